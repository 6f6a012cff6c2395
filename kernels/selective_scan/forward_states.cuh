// The forward pass where warps have different channels, or different states of the same channels (forward.cu).
//
// A warp has 16 channels, and a lane two of them with STATES states each, in registers. SPLIT warps, a channel group, share
// channels and have different states. A CTA has WARPS warps of one batch and group, so it reads B and C once for all:
//
//     lane % 4             0        1        2        3          a row of shared memory for each channel:
//     lane / 4      d      n 0…3    n 4…7    n 8…11   n 12…15    (δ, δ·u) of TIMES steps
//     lane / 4 + 8  d + 8  n 0…3    n 4…7    n 8…11   n 12…15    and one for each warp with y
//
// For each tile of TIMES steps, in the order of the functions below:
//     load    16-byte pieces of u, delta, z, B and C, one tile ahead
//     stage   δ and δ·u of each element, and B and C, to shared memory
//     scan    eight steps at a time: states in registers, sums over states to the rows of y
//     store   out, gated
#pragma once

enum : int {
    ROW = 2 * TIMES + 4,  // so that channels lie in different banks
    Y_ROW = TIMES + 4,
    STEPS = 8,
    // The steps of a sequence come in groups of STEPS, so that no step beyond its end is computed.
    WHOLE_STEPS = ALIGNED && !CHANNEL_LAST && VALUES == STEPS,
    CTA_CHANNELS = WARPS / SPLIT * CHANNELS,
    WIDTH = STATES < 4 ? STATES : 4,  // neighbouring states of a lane: a block
    BLOCKS = STATES / WIDTH,
    STATES_APART = 4 * WIDTH * SPLIT,  // from one block of a lane to its next
    SHARED_ROWS = CTA_CHANNELS * ROW,
    SHARED_Y = WARPS * CHANNELS * Y_ROW,
    SHARED_STAGE = 2 * CAPACITY * TIMES,
};

struct Forward {
    const Arguments& args;

    float* const all_rows = reinterpret_cast<float*>(dynamic_rows());
    float* const all_y = all_rows + SHARED_ROWS;
    float* const stages = all_y + SHARED_Y;
    float* const biases = stages + 2 * SHARED_STAGE;
    float* const skips = biases + CTA_CHANNELS;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel_group = warp / SPLIT;
    const int channels = int(args.sizes.channels), states = int(args.sizes.states);
    const int sequences = int(args.sizes.sequences);
    const CtaRange& range = shared_cta_range(args.sizes, int(args.sizes.parts), args.cu_seqlens);
    const bool with_softplus = args.flags & SOFTPLUS;
    const int first = range.first + channel_group * CHANNELS;
    const int channels_left = within(range.limit - first, CHANNELS);
    const Pieces<const Storage*> us{args.u, range.batch, first, range.begin};
    const Pieces<const Storage*> deltas{args.delta, range.batch, first, range.begin};
    const Pieces<const Storage*> zs{args.z, range.batch, first, range.begin};
    const Pieces<Storage*> outs{args.out, range.batch, first, range.begin};
    const Projection B{args.B, range}, C{args.C, range};
    // The part ends before this step of the sequence.
    const int length = within(range.end - range.begin, range.end_tile * INTERVAL);
    // Of the sequence's first checkpoint.
    __device__ int slot() const {
        return range.batch * (int(args.sizes.time) / INTERVAL + sequences) + range.begin / INTERVAL + range.sequence;
    }

    // The channel group's part of shared memory.
    const float* const bias = biases + channel_group * CHANNELS;
    const float* const skip = skips + channel_group * CHANNELS;
    float* const rows = all_rows + channel_group * CHANNELS * ROW;
    const float* const ys = all_y + channel_group * SPLIT * CHANNELS * Y_ROW;

    // The lane's channels are `own` and `own` + 8, its states `first_state` and the next of each block.
    const int own = lane / 4, quarter = lane % 4;
    const int first_state = (warp % SPLIT * 4 + quarter) * WIDTH;
    const float* const row = rows + own * ROW;
    float* const y_row = all_y + (warp * CHANNELS + own) * Y_ROW;
    float decay[BLOCKS][2][WIDTH], h[BLOCKS][2][WIDTH];

    // What is on its way for the next tile, and what `store` needs of this one.
    Values next_u[PER_LANE], next_delta[PER_LANE], u[PER_LANE], z[PER_LANE];
    ProjectionTile projections;

    __device__ explicit Forward(const Arguments& args) : args(args) {}

    __device__ void run() {
        load_channels();
        load_states();
        const int begin = range.first_tile * INTERVAL;
        if (begin < length) load(begin);
        int side = 0;
        for (int tile = begin; tile < length; tile += TIMES, side ^= 1) {
            float* const shared_B = stages + side * SHARED_STAGE;
            const int times = within(length - tile, TIMES);
            stage(tile, times, shared_B);
            __syncthreads();
            if (tile + TIMES < length) load(tile + TIMES);
#pragma unroll 1
            for (int t = 0; t < times; t += STEPS) {
                if (args.checkpoints && (tile + t) % INTERVAL == 0) save_checkpoint((tile + t) / INTERVAL);
                scan(t, shared_B);
            }
            if constexpr (SPLIT > 1) __syncthreads();
            else __syncwarp();
            store(tile, times);
            __syncwarp();
        }
        if (args.final_state && range.part + 1 == int(args.sizes.parts)) store_final_state();
    }

    // delta_bias and D of the CTA's channels.
    __device__ void load_channels() {
#pragma unroll 1
        for (int i = threadIdx.x; i < CTA_CHANNELS; i += THREADS) {
            const bool in = range.first + i < range.limit;
            biases[i] = in && args.delta_bias ? args.delta_bias[range.first + i] : 0;
            skips[i] = in && args.D ? args.D[range.first + i] : 0;
        }
        __syncthreads();
    }

    // Where the states of channel `own` start in initial_state and final_state. It is computed anew each time, so that it
    // takes no registers from the steps.
    __device__ i64 state_offset() const {
        const int sequence = int(opaque(unsigned(range.batch))) * sequences + range.sequence;
        return (i64(sequence) * channels + first + own) * states;
    }

    __device__ void load_states() {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int s = 0; s < WIDTH; s++) {
                    const int n = first_state + block * STATES_APART + s, channel = own + 8 * c;
                    const bool in = channel < channels_left && n < states;
                    decay[block][c][s] = in ? args.A[i64(first + channel) * states + n] * LOG2_E : 0;
                    h[block][c][s] = 0;
                }
        if (args.initial_state) load_initial_state();
        for (int part = 0; part < range.part; part++) pass_part(part);
    }
    __device__ void load_initial_state() {
        const float* const from = args.initial_state + state_offset();
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int s = 0; s < WIDTH; s++) {
                    const int n = first_state + block * STATES_APART + s, channel = own + 8 * c;
                    if (channel < channels_left && n < states)
                        h[block][c][s] = from[i64(8 * c) * states + n];
                }
    }

    // The states after an earlier part of the sequence, from those before it and what it hands on (adjoint.cu).
    __device__ void pass_part(int part) {
        const int parts = int(args.sizes.parts), sequence = range.batch * sequences + range.sequence;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int channel = own + 8 * c;
            if (channel >= channels_left) continue;
            const i64 from = (i64(sequence) * parts + part) * channels + first + channel;
            const float size = args.part_sizes[from];
#pragma unroll
            for (int block = 0; block < BLOCKS; block++)
#pragma unroll
                for (int s = 0; s < WIDTH; s++) {
                    const int n = first_state + block * STATES_APART + s;
                    if (n < states)
                        h[block][c][s] = args.part_states[from * states + n] + gate_of(decay[block][c][s] * size) * h[block][c][s];
                }
        }
    }

    // Starts the loads of a tile. z comes later, with `stage`, so that it takes no registers from the steps.
    __device__ void load(int tile) {
        const int times = within(length - tile, TIMES);
        projections.load(B, C, 0, states, tile, times);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int count = Piece(i).count(channels_left, times);
            next_u[i] = us.load(i, tile, count);
            next_delta[i] = deltas.load(i, tile, count);
        }
    }

    __device__ void stage(int tile, int times, float* shared_B) {
        projections.store(shared_B);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(channels_left, times);
            u[i] = next_u[i], z[i] = zs.load(i, tile, count);
            if (!piece.exists) continue;
            float delta[VALUES], delta_u[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; k++)
                delta[k] = next_delta[i].get(k) + bias[piece.channel + (CHANNEL_LAST ? k : 0)];
            // One branch for all of a piece, so that the computations of its elements overlap.
            if (with_softplus) {
#pragma unroll
                for (int k = 0; k < VALUES; k++) delta[k] = softplus<NARROW>(delta[k]);
            }
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                if (!WHOLE_STEPS && !Piece::has(count, k)) delta[k] = 0;
                delta_u[k] = delta[k] * u[i].get(k);
            }
            float* const to = rows + piece.channel * ROW + 2 * piece.time;
            if constexpr (CHANNEL_LAST) {
#pragma unroll
                for (int k = 0; k < VALUES; k++) store_float2(to + k * ROW, delta[k], delta_u[k]);
            } else {
#pragma unroll
                for (int k = 0; k < VALUES; k += 2)
                    store_float4(to + 2 * k, delta[k], delta_u[k], delta[k + 1], delta_u[k + 1]);
            }
        }
    }

    // The states before a step, for the backward pass.
    __device__ void save_checkpoint(int number) const {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int n = first_state + block * STATES_APART, channel = own + 8 * c;
                if (channel >= channels_left) continue;
                float* const to = args.checkpoints + (i64(slot() + number) * channels + first + channel) * states;
                if (states % WIDTH == 0 && n < states) {
                    store_floats(to + n, h[block][c]);
                } else {
#pragma unroll
                    for (int s = 0; s < WIDTH; s++)
                        if (n + s < states) to[n + s] = h[block][c][s];
                }
            }
    }

    // Sums over states of a lane's channels: in 16 bits those of steps 2 · quarter and the next, else the lane's part of all.
    using Sums = float[2][NARROW ? 2 : STEPS];

    // STEPS steps from `t` on.
    __device__ void scan(int t, const float* shared_B) {
        Sums y = {};
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            if (block && block * STATES_APART >= states) break;
            const float* const B_tile = shared_B + t * CAPACITY + first_state + block * STATES_APART;
            const float* const C_tile = B_tile + TIMES * CAPACITY;
            float c[WIDTH];
            if constexpr (NARROW) load_floats(c, C_tile + own * CAPACITY);
            float pair[2][4];  // δ and δ·u of two steps
#pragma unroll
            for (int j = 0; j < STEPS; j++) {
                if (j % 2 == 0)
                    load_floats(pair[0], row + 2 * (t + j)), load_floats(pair[1], row + 8 * ROW + 2 * (t + j));
                float b[WIDTH];
                load_floats(b, B_tile + j * CAPACITY);
#pragma unroll
                for (int ch = 0; ch < 2; ch++)
#pragma unroll
                    for (int s = 0; s < WIDTH; s++)
                        h[block][ch][s] = gate_of(pair[ch][j % 2 * 2] * decay[block][ch][s]) * h[block][ch][s] +
                                          pair[ch][j % 2 * 2 + 1] * b[s];
                if constexpr (!NARROW) load_floats(c, C_tile + j * CAPACITY);
                add_product(y, block, j, c);
            }
        }
        store_sums(y, t);
    }

    // y += Σ C·h over the states of a block, of step j. In 16 bits c holds C of step `own`, else C of step j.
    __device__ void add_product(Sums& y, int block, int j, const float (&c)[WIDTH]) const {
        const float(&now)[2][WIDTH] = h[block];
        if constexpr (NARROW) {
            float of_steps[4] = {};
#pragma unroll
            for (int s = 0; s < WIDTH; s += 2) {
                const bool both = s + 1 < WIDTH;
                const int other = both ? s + 1 : s;
                mma_tf32(of_steps,
                         make_uint4(__float_as_uint(now[0][s]), __float_as_uint(now[1][s]),
                                    both ? __float_as_uint(now[0][other]) : 0u, both ? __float_as_uint(now[1][other]) : 0u),
                         make_uint2(__float_as_uint(c[s]), both ? __float_as_uint(c[other]) : 0u));
            }
            const bool mine = quarter == j / 2;
#pragma unroll
            for (int ch = 0; ch < 2; ch++) {
                float sum = of_steps[2 * ch + j % 2];
                if (block) sum += y[ch][j % 2];
                y[ch][j % 2] = mine ? sum : y[ch][j % 2];
            }
        } else {
#pragma unroll
            for (int ch = 0; ch < 2; ch++)
#pragma unroll
                for (int s = 0; s < WIDTH; s++) y[ch][NARROW ? 0 : j] += c[s] * now[ch][s];
        }
    }

    __device__ void store_sums(const Sums& y, int t) const {
#pragma unroll
        for (int ch = 0; ch < 2; ch++) {
            float* const to = y_row + 8 * ch * Y_ROW + t;
            if constexpr (NARROW) {
                store_float2(to + 2 * quarter, y[ch][0], y[ch][1]);
            } else {
#pragma unroll
                for (int j = 0; j < STEPS; j += 4) {
                    float four[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) four[k] = y[ch][NARROW ? 0 : j + k];
                    const float sum = transposed_sum<4, 1>(four);
                    to[j + transposed_index<4, 1>()] = sum;
                }
            }
        }
    }

    __device__ void store(int tile, int times) const {
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const Piece piece(i);
            const int count = piece.count(channels_left, times);
            if (!piece.exists) continue;
            float y[VALUES];
#pragma unroll
            for (int split = 0; split < SPLIT; split++) {
                const float* const from = ys + (split * CHANNELS + piece.channel) * Y_ROW + piece.time;
                float part[VALUES];
                if constexpr (CHANNEL_LAST) {
#pragma unroll
                    for (int k = 0; k < VALUES; k++) part[k] = from[k * Y_ROW];
                } else {
                    load_floats(part, from);
                }
#pragma unroll
                for (int k = 0; k < VALUES; k++) y[k] = split ? y[k] + part[k] : part[k];
            }
#pragma unroll
            for (int k = 0; k < VALUES; k++) y[k] += skip[piece.channel + (CHANNEL_LAST ? k : 0)] * u[i].get(k);
            if (args.z.data) {
#pragma unroll
                for (int k = 0; k < VALUES; k++) y[k] *= z[i].get(k) * sigmoid(z[i].get(k));
            }
            outs.store(i, tile, count, y);
        }
    }

    __device__ void store_final_state() const {
        float* const to = args.final_state + state_offset();
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int s = 0; s < WIDTH; s++) {
                    const int n = first_state + block * STATES_APART + s, channel = own + 8 * c;
                    if (channel < channels_left && n < states)
                        to[i64(8 * c) * states + n] = h[block][c][s];
                }
    }
};
