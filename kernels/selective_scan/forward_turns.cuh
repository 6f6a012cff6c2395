// The forward pass where the warps of a CTA take turns over time (forward.cu): of each tile, warp w has the STEPS steps from
// STEPS · w on, and those that are ROUND, 2 · ROUND … further. A CTA has 8 channels, so that few channels fill a GPU:
//
//     lane % 4          0        1        2        3
//     lane / 4     d    n 0…3    n 4…7    n 8…11   n 12…15
//
// A warp computes the gates of its steps, and what each step adds to the states, before it waits for the states that the warp
// before it hands on. That takes most of the time, so all warps of a CTA compute at once, though states follow from each other.
//
// For each tile of TIMES steps, in the order of the functions below:
//     copy              16-byte pieces of u, delta, z, B and C to shared memory, while the tile before is computed
//     stage             δ, δ·u and B to shared memory, as floats
//     scan_tile, scan   the warp's steps: gates, the wait, states in registers, sums over states to the rows of y
//     store             out, gated
#pragma once
#include "../common/copy.cuh"
#include "../common/turns.cuh"

using Piece16 = Chunk<Element, IN_16_BYTES>;

enum : int {
    STEPS = 8,
    ROUND = STEPS * WARPS,  // steps of one turn of each warp
    LANE_STATES = 4,
    LANES_OF_CHANNEL = CAPACITY / LANE_STATES,
    // Lanes that access 16 bytes each at once find them in different banks: rows leave out four floats after each 32, rows of
    // channels are 4, 12, 20 or 28 banks apart, and the rows of states of one lane 4 from those of the next.
    ROW = TIMES / 32 * 36 | 4,
    STATE_ROW = (TIMES / 32 * 36 + 7) / 8 * 8,
    NEXT_ROUND = ROUND % 32 ? ROUND : ROUND / 32 * 36,  // in a row
    COPIED_ROW = TIMES / IN_16_BYTES,                   // pieces of a state
    COPIED_STATES = THREADS / COPIED_ROW,
    COPIES = CAPACITY / COPIED_STATES,
};
static_assert(ALIGNED && !CHANNEL_LAST && PIECES == THREADS && VALUES == IN_16_BYTES && CAPACITY % COPIED_STATES == 0);
static_assert(TIMES % (2 * ROUND) == 0 && (ROUND % 32 == 0 || TIMES == 32) && COPIED_ROW % 8 == 0);

__device__ inline int padded(int step) { return step + step / 32 * 4; }
__device__ inline int state_row(int state) { return state * STATE_ROW + state / LANE_STATES * 4; }
__device__ inline int copied_row(int state) { return state * COPIED_ROW + state / LANE_STATES; }

// What `copy` fills for the next tile while this one is in use.
struct Copied {
    uint4 u[THREADS], z[THREADS], C[CAPACITY * COPIED_ROW + LANES_OF_CHANNEL];
};
struct Shared {
    float delta[CHANNELS][ROW];  // then y
    float delta_u[CHANNELS][ROW];
    float B[CAPACITY * STATE_ROW + 4 * LANES_OF_CHANNEL];
    float handed[32 * LANE_STATES];  // the states after a warp's steps, of each lane
    u64 turns[WARPS];
    uint4 delta_copy[THREADS], B_copy[COPIES][THREADS];  // what a thread copies for itself
    Copied copied[2];
};

struct Forward {
    const Arguments& args;

    Shared& shared = *reinterpret_cast<Shared*>(dynamic_rows());

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channels = int(args.sizes.channels), states = int(args.sizes.states);
    const CtaRange& range = shared_cta_range(args.sizes, int(args.sizes.parts), args.cu_seqlens);
    const int channels_left = within(range.limit - range.first, CHANNELS);
    // The part's steps are numbered from 0, and begin at this one of the sequence.
    const int begin = range.first_tile * INTERVAL;
    const int length = within(range.end, range.end_tile * INTERVAL) - begin;
    const Pieces<const Storage*> us{args.u, range.batch, range.first, begin};
    const Pieces<const Storage*> deltas{args.delta, range.batch, range.first, begin};
    const Pieces<const Storage*> zs{args.z, range.batch, range.first, begin};
    const Pieces<Storage*> outs{args.out, range.batch, range.first, begin};

    // This thread's first piece of B and of C is of this state, and begins at this step of a tile.
    const int copied_state = threadIdx.x / COPIED_ROW, copied_time = threadIdx.x % COPIED_ROW * IN_16_BYTES;
    const Storage* const B_from = states_from(args.B);
    const Storage* const C_from = states_from(args.C);

    const int own = lane / 4, quarter = lane % 4, first_state = quarter * LANE_STATES;
    float* const handed = shared.handed + lane * LANE_STATES;
    const Piece piece{0};
    float decay[LANE_STATES], bias, skip;
    const bool keeps = args.checkpoints && own < channels_left;

    __device__ explicit Forward(const Arguments& args) : args(args) {}

    __device__ void run() {
        if (threadIdx.x < WARPS) init_turn(&shared.turns[threadIdx.x]);
        if (states < CAPACITY) clear_states();
        load_channels();
        __syncthreads();
        if (warp == WARPS - 1) start_states(), pass_turn(shared.turns, 0);
        if (length > 0) copy(0);
        commit_copies();
#pragma unroll 1
        for (int tile = -TIMES;; tile += TIMES) {
            const int next = tile + TIMES;
            __syncthreads();
            if (tile >= 0) store(tile);
            if (next >= length) break;
            stage(next);
            __syncthreads();
            if (next + TIMES < length) copy(next + TIMES);
            commit_copies();
            scan_tile(next);
        }
        if (args.final_state && range.part + 1 == int(args.sizes.parts)) {
            __syncthreads();
            if (warp == 0) store_final_state();
        }
    }

    __device__ void load_channels() {
        const int channel = range.first + piece.channel;
        const bool in = channel < range.limit;
        bias = in && args.delta_bias ? args.delta_bias[channel] : 0;
        skip = in && args.D ? args.D[channel] : 0;
#pragma unroll
        for (int s = 0; s < LANE_STATES; s++) {
            const int n = first_state + s;
            decay[s] = own < channels_left && n < states ? args.A[i64(range.first + own) * states + n] * LOG2_E : 0;
        }
    }

    __device__ i64 state_offset(int row) const { return (i64(row) * channels + range.first + own) * states; }

    // The states before the part's first step.
    __device__ void start_states() const {
        float h[LANE_STATES] = {};
        const int parts = int(args.sizes.parts);
#pragma unroll 1
        for (int part = -1; part < range.part && own < channels_left; part++) {
            const int row = range.batch * parts + part;
            const float size = part < 0 ? 0 : args.part_sizes[i64(row) * channels + range.first + own];
            if (part < 0 && !args.initial_state) continue;
            const float* const from =
                part < 0 ? args.initial_state + state_offset(range.batch) : args.part_states + state_offset(row);
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++)
                if (first_state + s < states) h[s] = from[first_state + s] + gate_of(decay[s] * size) * h[s];
        }
        store_floats(handed, h);
    }
    __device__ void store_final_state() const {
        float h[LANE_STATES];
        load_floats(h, handed);
        if (own >= channels_left) return;
#pragma unroll
        for (int s = 0; s < LANE_STATES; s++)
            if (first_state + s < states) args.final_state[state_offset(range.batch) + first_state + s] = h[s];
    }

    __device__ Copied& copied(unsigned step) const { return shared.copied[step / TIMES % 2]; }

    __device__ bool piece_in(int tile) const { return piece.channel < channels_left && tile + piece.time < length; }

    __device__ void copy(int tile) const {
        Copied& to = copied(tile);
        const int thread = threadIdx.x;
        const bool in = piece_in(tile);
        copy_async<false>(&to.u[thread], us.at(0, tile), in);
        copy_async<false>(&shared.delta_copy[thread], deltas.at(0, tile), in);
        if (args.z.data) copy_async<false>(&to.z[thread], zs.at(0, tile), in);
        if (tile + copied_time >= length) return;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int state = copied_state + COPIED_STATES * i;
            const bool exists = state < states;
            copy_async<false>(&shared.B_copy[i][thread], B_from + COPIED_STATES * i * args.B.state + tile, exists);
            copy_async<false>(&to.C[copied_row(state) + copied_time / IN_16_BYTES],
                              C_from + COPIED_STATES * i * args.C.state + tile, exists);
        }
    }
    __device__ const Storage* states_from(const ProjectionTensor& tensor) const {
        return tensor.data + range.batch * tensor.batch + range.group * tensor.group + copied_state * tensor.state + begin +
               copied_time;
    }
    // States that there are not have zeros for B and C.
    __device__ void clear_states() const {
        const uint4 zeros = make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (int i = threadIdx.x; i < CAPACITY * COPIED_ROW + LANES_OF_CHANNEL; i += THREADS) {
            if (i < COPIES * THREADS) (&shared.B_copy[0][0])[i] = zeros;
            shared.copied[0].C[i] = zeros, shared.copied[1].C[i] = zeros;
        }
    }

    // δ, δ·u and B, from what this thread has copied. Of 16 bits, no step that does not exist is computed.
    __device__ void stage(int tile) const {
        wait_for_copies<0>();
        const auto u = piece_of(copied(tile).u[threadIdx.x]), given = piece_of(shared.delta_copy[threadIdx.x]);
        const bool in = NARROW || piece_in(tile);
        float delta[VALUES], delta_u[VALUES];
#pragma unroll
        for (int k = 0; k < VALUES; k++) delta[k] = given.get(k) + bias;
        if (args.flags & SOFTPLUS) {
#pragma unroll
            for (int k = 0; k < VALUES; k++) delta[k] = softplus<NARROW>(delta[k]);
        }
#pragma unroll
        for (int k = 0; k < VALUES; k++) delta_u[k] = in ? delta[k] * u.get(k) : 0, delta[k] = in ? delta[k] : 0;
        store_floats(&shared.delta[piece.channel][padded(piece.time)], delta);
        store_floats(&shared.delta_u[piece.channel][padded(piece.time)], delta_u);
        const bool exists = NARROW || tile + copied_time < length;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const auto copy = piece_of(shared.B_copy[i][threadIdx.x]);
            float b[IN_16_BYTES];
#pragma unroll
            for (int k = 0; k < IN_16_BYTES; k++) b[k] = exists ? copy.get(k) : 0;
            store_floats(&shared.B[state_row(copied_state + COPIED_STATES * i) + padded(copied_time)], b);
        }
    }
    static __device__ Piece16 piece_of(const uint4& words) { return get_words<Element, IN_16_BYTES>(&words.x); }

    // Each warp's turns of a tile: from step STEPS · warp on.
    __device__ void scan_tile(int tile) const {
        float* row = &shared.delta[own][padded(STEPS * warp)];
        const float* B_rows = &shared.B[state_row(first_state) + padded(STEPS * warp)];
        const uint4* C_rows = &copied(tile).C[copied_row(first_state) + STEPS * warp / IN_16_BYTES];
        const int end = within(length, tile + TIMES);
        unsigned round = 0;  // an even number of rounds are a tile, so this has the parity of all
#pragma unroll 1
        for (int step = tile + STEPS * warp; step < end; step += ROUND, round++) {
            scan(step, round, row, B_rows, C_rows);
            row += NEXT_ROUND, B_rows += NEXT_ROUND, C_rows += ROUND / IN_16_BYTES;
        }
    }

    // The warp's steps from `step` on. Its lane has one row of δ, δ·u and then y, and LANE_STATES rows of B and C.
    __device__ void scan(int step, unsigned round, float* row, const float* B_rows, const uint4* C_rows) const {
        float gate[STEPS][LANE_STATES], h[STEPS][LANE_STATES], before[LANE_STATES];
        load_inputs(row, B_rows, gate, h);
        wait_for_turn(shared.turns, warp, round);
        load_floats(before, handed);
#pragma unroll
        for (int j = 0; j < STEPS; j++)
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++) h[j][s] += gate[j][s] * (j ? h[j ? j - 1 : 0][s] : before[s]);
        store_floats(handed, h[STEPS - 1]);
        pass_turn(shared.turns, (warp + 1) % WARPS);
        if (keeps && step % INTERVAL == 0) save_checkpoint(step / INTERVAL, before);
        store_sums(row, C_rows, h);
    }

    // The gates of the warp's steps, and what they add to the states.
    __device__ void load_inputs(const float* row, const float* B_rows, float (&gate)[STEPS][LANE_STATES],
                                float (&x)[STEPS][LANE_STATES]) const {
#pragma unroll
        for (int j = 0; j < STEPS; j += 4) {
            float delta[4], delta_u[4];
            load_floats(delta, row + j);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int s = 0; s < LANE_STATES; s++) gate[j + k][s] = gate_of(delta[k] * decay[s]);
            load_floats(delta_u, row + CHANNELS * ROW + j);
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++) {
                float b[4];
                load_floats(b, B_rows + s * STATE_ROW + j);
#pragma unroll
                for (int k = 0; k < 4; k++) x[j + k][s] = __fmul_rn(delta_u[k], b[k]);
            }
        }
        // Left to itself, the compiler computes most gates after the wait. It does not know that this never happens.
        if (__builtin_expect(states < 0, 0)) {
#pragma unroll
            for (int j = 0; j < STEPS; j++) store_floats(&shared.B[STATE_ROW * j], gate[j]);
        }
    }

    __device__ void save_checkpoint(unsigned number, const float (&before)[LANE_STATES]) const {
        const int row = range.batch * (int(args.sizes.time) / INTERVAL + 1) + range.first_tile + number;
        float* const to = args.checkpoints + state_offset(row) + first_state;
        if (states % LANE_STATES == 0 && first_state < states) {
            store_floats(to, before);
        } else {
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++)
                if (first_state + s < states) to[s] = before[s];
        }
    }

    // Σ C·h over states, of each of the warp's steps. In 16 bits a product on tensor cores has two steps of the channels as its
    // rows and C of eight steps as its columns, of which those of the two steps are kept.
    __device__ void store_sums(float* y_row, const uint4* C_rows, const float (&h)[STEPS][LANE_STATES]) const {
        if constexpr (NARROW) {
            float c[LANE_STATES];
#pragma unroll
            for (int s = 0; s < LANE_STATES; s++)
                c[s] = Element::widen(reinterpret_cast<const Storage*>(C_rows + s * COPIED_ROW)[own]);
            float y[2] = {};
#pragma unroll
            for (int j = 0; j < STEPS; j += 2) {
                float acc[4] = {};
#pragma unroll
                for (int s = 0; s < LANE_STATES; s += 2)
                    mma_tf32(acc,
                             make_uint4(__float_as_uint(h[j][s]), __float_as_uint(h[j + 1][s]),
                                        __float_as_uint(h[j][s + 1]), __float_as_uint(h[j + 1][s + 1])),
                             make_uint2(__float_as_uint(c[s]), __float_as_uint(c[s + 1])));
                y[0] = quarter == j / 2 ? acc[0] : y[0], y[1] = quarter == j / 2 ? acc[3] : y[1];
            }
            store_float2(y_row + 2 * quarter, y[0], y[1]);
        } else {
#pragma unroll
            for (int j = 0; j < STEPS; j += 4) {
                float y[4] = {};
#pragma unroll
                for (int s = 0; s < LANE_STATES; s++) {
                    const auto c = piece_of(C_rows[s * COPIED_ROW + j / IN_16_BYTES]);
#pragma unroll
                    for (int k = 0; k < 4; k++) y[k] += c.get(k) * h[j + k][s];
                }
                const float sum = transposed_sum<4, 1>(y);
                y_row[j + transposed_index<4, 1>()] = sum;
            }
        }
    }

    __device__ void store(int tile) const {
        float y[VALUES];
        load_floats(y, &shared.delta[piece.channel][padded(piece.time)]);
        const auto u = piece_of(copied(tile).u[threadIdx.x]);
#pragma unroll
        for (int k = 0; k < VALUES; k++) y[k] += skip * u.get(k);
        if (args.z.data) {
            const auto z = piece_of(copied(tile).z[threadIdx.x]);
#pragma unroll
            for (int k = 0; k < VALUES; k++) y[k] *= z.get(k) * sigmoid(z.get(k));
        }
        outs.store(0, tile, piece_in(tile) ? VALUES : 0, y);
    }
};
