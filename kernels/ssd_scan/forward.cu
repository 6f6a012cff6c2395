// The forward pass of an SSD scan. For each head, in chunks of 64 steps, with s_i = Σ_{t≤i} dt_t·A within a chunk,
//     y_i   = exp(s_i)·S·C_i + Σ_{j≤i} exp(s_i - s_j)·dt_j·(C_i·B_j)·x_j + D·x_i,       out_i = y_i·silu(z_i), or y_i without z
//     S_end = exp(s_63)·S + Σ_j exp(s_63 - s_j)·dt_j·x_j ⊗ B_j
//
// GATED says whether there may be a z, and a D that has a number for each channel and not one for each head.
//
// Traffic of a step and head: SIZE elements of x, of z and of out. B and C, which the heads of a group share, come from the L2.
//
// A CTA has SIZE channels of one head and walks along its chunks. Four of its warps have the states, four the outputs:
//
//     warps 0 to 3, 16 channels each                 warps 4 to 7, 16 steps i each
//         states S to shared memory, rounded             C·Bᵀ, and its decays and step sizes, masked
//         ------------------------- the states are there -------------------------
//         S_end: xᵀ, scaled in registers, times B        C·Sᵀ, its rows scaled, and the masked C·Bᵀ times x; gate
//
// Every eight chunks each warp computes the decays and step sizes of one of the next eight. Decays are exponentials of
// differences of prefix sums, which are not positive for i ≥ j if A ≤ 0 and dt ≥ 0.
#include "../common/barrier.cuh"
#include "running_states.cuh"

enum : int {
    CHUNK = 64,
    WARPS = 8,
    THREADS = 32 * WARPS,
    STAGE = ELEMENT_BYTES * CHUNK * (SIZE + 2 * STATES),
    STATES_KEPT = 1,  // a barrier
};

struct Arguments {
    Strided x, B, C, z;  // without z its data are null
    StepInputs steps;
    const float* D;
    i64 D_channel;  // elements from a channel of D to the next: 1, or 0 for one number a head
    const float* initial_state;
    const int* cu_seqlens;
    Storage *out, *ungated;  // y goes to `ungated`, unless that is null
    float* final_state;
    Sizes sizes;
};

// The steps of eight chunks.
struct Steps {
    StoredSum sums[WARPS][CHUNK];
    float dt[WARPS][CHUNK];
    float weights[WARPS][CHUNK];  // of what steps add to the state after the chunk
    float decays[WARPS];          // over the chunk
#if GATED
    float D[SIZE];  // of the CTA's channels
#endif
};

struct Forward {
    const Arguments& args;
    const Sizes& sizes = args.sizes;

    const unsigned stages = shared_address(tile_memory());
    const Tile<SIZE, STATES> kept{stages + STAGES * STAGE};
    Steps& steps = *reinterpret_cast<Steps*>(tile_memory() + STAGES * STAGE + kept.BYTES);

    const int lane = threadIdx.x % 32, warp = warp_number(), row = warp % 4 * 16;
    const Walk walk{sizes, (int(sizes.head_size) + SIZE - 1) / SIZE};
    const int batch = walk.batch, sequence = walk.sequence, head = walk.head;
    const int first_number = walk.tile * SIZE, numbers = int(sizes.head_size) - first_number;
    const int group = head / (int(sizes.heads) / int(sizes.groups));
    const SequenceRange range = sequence_range<CHUNK>(sizes, args.cu_seqlens, sequence);
    const int chunks = (range.end - range.begin + CHUNK - 1) / CHUNK, state_size = int(sizes.state_size);

    const Copier<CHUNK, SIZE, THREADS> x{args.x.at(batch, range.begin, head) + first_number, args.x.time, numbers};
    const Copier<CHUNK, STATES, THREADS> B{args.B.at(batch, range.begin, group), args.B.time, state_size};
    const Copier<CHUNK, STATES, THREADS> C{args.C.at(batch, range.begin, group), args.C.time, state_size};

    LaneSteps<2> next_steps;

    __device__ explicit Forward(const Arguments& args) : args(args) {}

    __device__ void run() {
        next_steps.load(args.steps, batch, range.begin, range.begin + warp * CHUNK, steps_of(warp), head);
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) load(i, i);
        if (warp < 4) run_states();
        else run_outputs();
    }

    __device__ void run_states() {
        RunningStates<STATES> running;
        running.load(at_sequence(args.initial_state), state_size, numbers, state_size, row);
        int stage = 0;
#pragma unroll 1
        for (int i = 0; i < chunks; i++, stage = after(stage)) {
            begin_chunk(i, stage);
            running.keep(kept, row);
#if BY_WARPGROUPS
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
            arrive_at<THREADS>(STATES_KEPT);
            running.add(x_tile(stage), B_tile(stage), steps.weights[i % WARPS], steps.decays[i % WARPS], row);
        }
        if (args.final_state) running.store(at_sequence(args.final_state), state_size, numbers, state_size, row);
    }

    __device__ void run_outputs() {
        const float skip = load_D();
        int stage = 0;
#pragma unroll 1
        for (int i = 0; i < chunks; i++, stage = after(stage)) {
            begin_chunk(i, stage);
            Fragment weights[CHUNK / 16];
            masked_weights(weights, stage, steps.sums[i % WARPS], steps.dt[i % WARPS]);
            const Tile<CHUNK, SIZE> x_tile = this->x_tile(stage);
            const StoredSum* const own_sum = steps.sums[i % WARPS] + row + lane_row();
            const float before0 = fast_exp2(own_sum[0].value), before1 = fast_exp2(own_sum[8].value);
            float y[SIZE / 8][4];
#if GATED
            Pair z[SIZE / 8][2];
            load_z(z, i);
#endif
            meet_at<THREADS>(STATES_KEPT);
            begin_products();
            multiply<STATES, false>(y, along_k(C_tile(stage)), along_k(kept));
            close_products();
            wait_for_products<0>(y);
            scale_rows(y, make_float2(before0, before1));
            begin_products();
#pragma unroll
            for (int j = 0; j < CHUNK; j += 16)
                if (BY_WARPGROUPS || j <= row) multiply_registers(y, weights[j / 16], across_k(x_tile), j);
            close_products();
            wait_for_products<0>(y);
            if (args.D) {
                const unsigned at = x_tile.lane_of_sums(row);
#pragma unroll
                for (int p = 0; p < SIZE / 8; p++) {
                    const Pair x0 = load_pair(x_tile.moved(at, 0, 8 * p)), x1 = load_pair(x_tile.moved(at, 8, 8 * p));
                    const float2 D = D_of(8 * p + lane_column(), skip);
                    y[p][0] += D.x * low_of(x0), y[p][1] += D.y * high_of(x0);
                    y[p][2] += D.x * low_of(x1), y[p][3] += D.y * high_of(x1);
                }
            }
#if GATED
            if (args.ungated) store(args.ungated, y, i);
            if (args.z.data) gate(y, z);
#endif
            store(args.out, y, i);
        }
    }

    __device__ Tile<CHUNK, SIZE> x_tile(int stage) const { return {stages + stage * STAGE}; }
    __device__ Tile<CHUNK, STATES> B_tile(int stage) const { return {x_tile(stage).address + x_tile(stage).BYTES}; }
    __device__ Tile<CHUNK, STATES> C_tile(int stage) const { return {B_tile(stage).address + B_tile(stage).BYTES}; }
    __device__ static int after(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }
    __device__ int steps_of(int i) const { return i < chunks ? smaller(range.end - range.begin - i * CHUNK, CHUNK) : 0; }

    // Wait for chunk i's tiles and for all warps; start the copies of chunk i + STAGES - 1, of i itself if STAGES is 1.
    __device__ void begin_chunk(int i, int stage) {
        if constexpr (STAGES == 1) {
            __syncthreads();
            load(i, 0);
        }
        wait_for_copies<STAGES == 1 ? 0 : STAGES - 2>();
        meet();
        if (i % WARPS == 0) {
            compute_decays(i);
            __syncthreads();
        }
        if constexpr (STAGES > 1) load(i + STAGES - 1, stage ? stage - 1 : STAGES - 1);
    }
    __device__ void load(int i, int stage) const {
        if (i < chunks) {
            const i64 first = i * CHUNK;
            x.copy(x_tile(stage), first * args.x.time, steps_of(i));
            B.copy(B_tile(stage), first * args.B.time, steps_of(i));
            C.copy(C_tile(stage), first * args.C.time, steps_of(i));
        }
        commit_copies();
    }
    // Of the steps of chunk i + warp.
    __device__ void compute_decays(int i) {
        next_steps.add_up(args.steps, steps_of(i + warp), args.steps.A[head], args.steps.bias_of(head));
        float weights[2];
#pragma unroll
        for (int k = 0; k < 2; k++) weights[k] = next_steps.dt[k] * exp2_of(next_steps.total - next_steps.sum[k]);
        reinterpret_cast<TwoSums*>(steps.sums[warp])[lane] = {stored(next_steps.sum[0]), stored(next_steps.sum[1])};
        store_float2(steps.dt[warp] + 2 * lane, next_steps.dt[0], next_steps.dt[1]);
        store_float2(steps.weights[warp] + 2 * lane, weights[0], weights[1]);
        if (lane == 0) steps.decays[warp] = exp2_of(next_steps.total);
        const int next = i + WARPS + warp;
        next_steps.load(args.steps, batch, range.begin, range.begin + next * CHUNK, steps_of(next), head);
    }

    // exp(s_i - s_j)·dt_j·(C_i·B_j) of a warp's steps i, as the left operand of a product with x.
    __device__ void masked_weights(Fragment (&weights)[CHUNK / 16], int stage, const StoredSum* sums,
                                   const float* all_dt) const {
        float scores[CHUNK / 8][4];
        begin_products();
        multiply<STATES, false>(scores, along_k(C_tile(stage)), along_k(B_tile(stage)));
        close_products();
        wait_for_products<0>(scores);
        const StoredSum sum0 = sums[row + lane_row()], sum1 = sums[row + lane_row() + 8];
#pragma unroll
        for (int j = 0; j < CHUNK; j += 16) {
            weights[j / 16] = {};
            if (j > row) continue;
            float m[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = j + 8 * half + lane_column();
                const TwoSums sum = *reinterpret_cast<const TwoSums*>(sums + column);
                const float2 dt = *reinterpret_cast<const float2*>(all_dt + column);
                const float (&score)[4] = scores[j / 8 + half];
                m[half][0] = score[0] * (fast_exp2(sum0 - sum.x) * dt.x);
                m[half][1] = score[1] * (fast_exp2(sum0 - sum.y) * dt.y);
                m[half][2] = score[2] * (fast_exp2(sum1 - sum.x) * dt.x);
                m[half][3] = score[3] * (fast_exp2(sum1 - sum.y) * dt.y);
            }
            if (j == row) {  // only steps up to the own one
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const bool in = lane_row() >= lane_column() + k;
                    m[0][k] = in ? m[0][k] : 0, m[1][k] = 0;
                    m[1][2 + k] = in ? m[1][2 + k] : 0;
                }
            }
            weights[j / 16] = fragment_of(m[0], m[1]);
        }
    }

#if GATED
    // D of the CTA's channels to shared memory, by the warps that compute outputs, before a barrier.
    __device__ float load_D() const {
        const int p = threadIdx.x - THREADS / 2;
        const int first = head * (args.D_channel ? int(sizes.head_size) : 1);
        if (args.D && p < SIZE && p < numbers) steps.D[p] = args.D[first + (first_number + p) * int(args.D_channel)];
        return 0;
    }
    __device__ float2 D_of(int channel, float) const { return *reinterpret_cast<const float2*>(steps.D + channel); }

    // The lane's pairs of z, for its two rows of y; in registers before the products that y is a sum of.
    __device__ void load_z(Pair (&z)[SIZE / 8][2], int i) const {
        const int own = row + lane_row();
        const Storage* const from = args.z.at(batch, range.begin + i * CHUNK + own, head) + first_number + lane_column();
#pragma unroll
        for (int p = 0; p < SIZE / 8; p++) {
            const bool there = args.z.data && 8 * p + lane_column() < numbers;
            const Pair* const pair = reinterpret_cast<const Pair*>(from + 8 * p);
            z[p][0] = there && own < steps_of(i) ? pair[0] : Pair{};
            z[p][1] = there && own + 8 < steps_of(i) ? pair[4 * args.z.time] : Pair{};
        }
    }
    __device__ static float silu(float x) { return x * sigmoid(x); }
    // y times silu(z).
    __device__ static void gate(float (&y)[SIZE / 8][4], const Pair (&z)[SIZE / 8][2]) {
#pragma unroll
        for (int p = 0; p < SIZE / 8; p++) {
            y[p][0] *= silu(low_of(z[p][0])), y[p][1] *= silu(high_of(z[p][0]));
            y[p][2] *= silu(low_of(z[p][1])), y[p][3] *= silu(high_of(z[p][1]));
        }
    }
#else
    __device__ float load_D() const { return args.D ? args.D[head] : 0; }
    __device__ static float2 D_of(int, float skip) { return make_float2(skip, skip); }
#endif

#if WIDE
    // Four lanes store 32 bytes of a row.
    __device__ void store(Storage* out, const float (&y)[SIZE / 8][4], int i) const {
        const int own = row + lane_row();
        const i64 step = i64(batch) * sizes.time + range.begin + i * CHUNK + own, of_step = sizes.heads * sizes.head_size;
        Storage* const to = out + step * of_step + head * sizes.head_size + first_number + lane_column();
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int p = 0; p < SIZE / 8; p++)
                if (own + 8 * k < steps_of(i) && 8 * p + lane_column() < numbers)
                    *reinterpret_cast<Pair*>(to + 8 * k * of_step + 8 * p) = pair_of(y[p][2 * k], y[p][2 * k + 1]);
    }
#else
    // Of four words that each of four neighbouring lanes has, word `lane % 4` of all four lanes.
    __device__ static uint4 transposed(unsigned a, unsigned b, unsigned c, unsigned d) {
        const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
        const unsigned from_a = __shfl_xor_sync(FULL_WARP, odd ? a : b, 1);
        const unsigned from_c = __shfl_xor_sync(FULL_WARP, odd ? c : d, 1);
        const unsigned a1 = odd ? from_a : a, b1 = odd ? b : from_a, c1 = odd ? from_c : c, d1 = odd ? d : from_c;
        const unsigned first = __shfl_xor_sync(FULL_WARP, high ? a1 : c1, 2);
        const unsigned second = __shfl_xor_sync(FULL_WARP, high ? b1 : d1, 2);
        return high ? make_uint4(first, second, c1, d1) : make_uint4(a1, b1, first, second);
    }
    // Four lanes share a row: after transposing, each stores one piece of 16 bytes in each 32 columns.
    __device__ void store(Storage* out, const float (&y)[SIZE / 8][4], int i) const {
        const int own = row + lane_row(), piece = lane % 4 * PIECE;
        const i64 step = i64(batch) * sizes.time + range.begin + i * CHUNK + own, of_step = sizes.heads * sizes.head_size;
        Storage* const to = out + step * of_step + head * sizes.head_size + first_number + piece;
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int p = 0; p < SIZE / 8; p += 4) {
                unsigned words[4];
#pragma unroll
                for (int q = 0; q < 4; q++) words[q] = pair_of(y[p + q][2 * k], y[p + q][2 * k + 1]);
                const uint4 values = transposed(words[0], words[1], words[2], words[3]);
                if (own + 8 * k < steps_of(i) && piece + 8 * p < numbers)
                    *reinterpret_cast<uint4*>(to + 8 * k * of_step + 8 * p) = values;
            }
    }
#endif

    // The CTA's states of the sequence, in a tensor of float32 or null.
    template <class T>
    __device__ T* at_sequence(T* states) const {
        const i64 of_head = (i64(batch) * sizes.sequences + sequence) * sizes.heads + head;
        return states ? states + (of_head * sizes.head_size + first_number) * state_size : states;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
ssd_scan_forward(const Storage* x, const void* dt, const float* A, const Storage* B, const Storage* C, const float* D,
                 const Storage* z, const float* dt_bias, const float* initial_state, const int* cu_seqlens,
                 const int* seq_idx, Storage* out, Storage* ungated, float* final_state, i64 batch, i64 time, i64 heads,
                 i64 groups, i64 head_size, i64 state_size, i64 sequences, i64 slots, i64 D_channel, i64 flags, i64 dt_low,
                 i64 dt_high, i64 x_batch, i64 x_time, i64 x_head, i64 dt_batch, i64 dt_time, i64 dt_head, i64 B_batch,
                 i64 B_time, i64 B_group, i64 C_batch, i64 C_time, i64 C_group, i64 z_batch, i64 z_time, i64 z_head) {
    Forward({{x, x_batch, x_time, x_head},
             {B, B_batch, B_time, B_group},
             {C, C_batch, C_time, C_group},
             {z, z_batch, z_time, z_head},
             {dt, dt_batch, dt_time, dt_head, A, dt_bias, seq_idx, time, flags, __uint_as_float(unsigned(dt_low)),
              __uint_as_float(unsigned(dt_high))},
             D, D_channel, initial_state, cu_seqlens, out, ungated, final_state,
             {batch, time, heads, groups, head_size, state_size, sequences, slots}})
        .run();
}
