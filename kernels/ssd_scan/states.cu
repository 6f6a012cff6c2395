// The states of an SSD scan at the bounds of chunks of 64 steps. Forwards, for each head and chunk,
//     S_end = exp(Σ dt·A)·S_begin + Σ_j exp(Σ_{t>j} dt_t·A)·dt_j·x_j ⊗ B_j
// and what is kept is the state before each chunk. If REVERSE, the same of gradients, from the last chunk to the first:
//     G_begin = exp(Σ dt·A)·G_end + Σ_i exp(Σ_{t≤i} dt_t·A)·dy_i ⊗ C_i
// and what is kept is the gradient of the state after each chunk.
//
// Asked for or not: what is kept, the last state, and forwards the decay over each sequence.
//
// Traffic of a step and head: SIZE elements of x or dy, once for each tile of STATES states, and SIZE · state_size / 64 of
// states. B and C come from the L2.
//
// A CTA of four warps has SIZE channels of one head and STATES states of each, in registers: a warp has 16 × STATES. For each
// chunk:
//
//     load    x and B, STAGES - 1 chunks ahead; on sm_90a by the tensor memory accelerator, with maps that the CTA makes in the workspace
//     keep    the state, in the elements' type
//     add     what the chunk adds, on tensor cores: xᵀ, scaled in registers, times B
//
// Every four chunks each warp computes what the steps of one of the next four are scaled by.
#include "running_states.cuh"
#if BY_WARPGROUPS
#include "../common/tensor_copy.cuh"
#endif

enum : int {
    CHUNK = 64,
    WARPS = 4,
    THREADS = 32 * WARPS,
    STAGE = ELEMENT_BYTES * CHUNK * (SIZE + STATES),
};

struct Arguments {
    Strided x, B;  // dy and C if REVERSE
    StepInputs steps;
    const float* first_state;  // initial_state, or the final state's gradient
    const int* cu_seqlens;
    Storage* states;                // null: not asked for, like the following
    float *last_state, *sequence_decays;
    Sizes sizes;
    char* workspace;
};

struct States {
    const Arguments& args;
    const Sizes& sizes = args.sizes;

    const unsigned stages = shared_address(tile_memory());
    const Tile<SIZE, STATES> kept{stages + STAGES * STAGE};
    float* const all_weights = reinterpret_cast<float*>(tile_memory() + STAGES * STAGE + kept.BYTES);
    float* const decays = all_weights + WARPS * CHUNK;  // over each of WARPS chunks

    // The CTA's channels and states, and its head and sequence.
    const int lane = threadIdx.x % 32, warp = warp_number(), row = 16 * warp;
    const int state_tiles = (int(sizes.state_size) + STATES - 1) / STATES;
    const Walk walk{sizes, (int(sizes.head_size) + SIZE - 1) / SIZE * state_tiles};
    const int batch = walk.batch, sequence = walk.sequence, head = walk.head;
    const int first_number = walk.tile / state_tiles * SIZE, first_column = walk.tile % state_tiles * STATES;
    const int numbers = int(sizes.head_size) - first_number, columns = int(sizes.state_size) - first_column;
    const int group = head / (int(sizes.heads) / int(sizes.groups));
    const SequenceRange range = sequence_range<CHUNK>(sizes, args.cu_seqlens, sequence);
    const int chunks = (range.end - range.begin + CHUNK - 1) / CHUNK;

    const Storage* const first_x = args.x.at(batch, range.begin, head) + first_number;
    const Storage* const first_B = args.B.at(batch, range.begin, group) + first_column;

    // Where the lane's next piece of a state is stored; elements to the next chunk, and to the row ROWS_APART further.
    enum : int { PIECES = STATES / PIECE, ROWS_APART = 32 / PIECES };
    const int kept_row = row + lane / PIECES, kept_column = lane % PIECES * PIECE;
    const i64 of_chunk = i64(sizes.heads) * sizes.head_size * sizes.state_size;
    const int of_rows = ROWS_APART * int(sizes.state_size);
    Storage* to_memory;

    RunningStates<STATES> running;
    LaneSteps<2> next_steps;

    __device__ explicit States(const Arguments& args) : args(args) {
        const i64 slot = i64(batch) * sizes.slots + range.slot + chunk(0);
        const i64 of_row = (slot * sizes.heads + head) * sizes.head_size + first_number + kept_row;
        to_memory = args.states + of_row * sizes.state_size + first_column + kept_column;
    }

    __device__ void run() {
        running.load(at_sequence(args.first_state), sizes.state_size, numbers, columns, row);
        next_steps.load(args.steps, batch, range.begin, begin_of(warp), steps_of(warp), head);
        prepare_copies();
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) load(i, i);
        int stage = 0;
        float passed = 1;
#pragma unroll 1
        for (int i = 0; i < chunks; i++) {
            wait_for_chunk(i, stage);
            if (i % WARPS == 0) {
                weigh(i);
                __syncthreads();
            }
            load(i + STAGES - 1, stage ? stage - 1 : STAGES - 1);
            if (args.states) keep();
            const Tile<CHUNK, SIZE> x_tile{stages + stage * STAGE};
            const Tile<CHUNK, STATES> B_tile{x_tile.address + x_tile.BYTES};
            running.add(x_tile, B_tile, all_weights + i % WARPS * CHUNK, decays[i % WARPS], row);
            passed *= decays[i % WARPS];
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        if (args.sequence_decays && walk.tile == 0 && threadIdx.x == 0)
            args.sequence_decays[(i64(batch) * sizes.sequences + sequence) * sizes.heads + head] = passed;
        if (args.last_state) running.store(at_sequence(args.last_state), sizes.state_size, numbers, columns, row);
    }

    __device__ int chunk(int i) const { return REVERSE ? chunks - 1 - i : i; }
    __device__ int begin_of(int i) const { return range.begin + chunk(i) * CHUNK; }
    __device__ int steps_of(int i) const { return i < chunks ? smaller(range.end - begin_of(i), CHUNK) : 0; }

#if BY_WARPGROUPS
    enum : int { MAPS = 2 };
    char* const maps = args.workspace + i64(blockIdx.x) * MAPS * TENSOR_MAP;
    const unsigned copied = shared_address(decays + WARPS);  // a barrier for each stage

    __device__ void prepare_copies() const {
        if (chunks && warp == 0) {
            const auto make = [&](int i, const void* data, int columns, i64 step) {
                make_tensor_map(maps + i * TENSOR_MAP, stages + i * TENSOR_MAP, data,
                                {unsigned(columns), 1, unsigned(range.end - range.begin)}, {u64(2 * step), u64(2 * step)}, CHUNK);
            };
            make(0, first_x, numbers, args.x.time), make(1, first_B, columns, args.B.time);
            if (lane == 0) {
                init_copy_barriers<STAGES>(copied);
                for (int i = 0; i < MAPS; i++) acquire_tensor_map(maps + i * TENSOR_MAP);
            }
            show_tensor_cores();  // maps went through memory of tiles
        }
        __syncthreads();
    }
    __device__ void load(int i, int stage) const {
        if (threadIdx.x || i >= chunks) return;
        const unsigned to = stages + stage * STAGE, barrier = copied + 8 * stage;
        expect_bytes(barrier, STAGE);
        copy_box(to, maps, 0, 0, chunk(i) * CHUNK, barrier);
#pragma unroll
        for (int first = 0; first < STATES; first += 64)
            copy_box(to + ELEMENT_BYTES * CHUNK * (SIZE + first), maps + TENSOR_MAP, first, 0, chunk(i) * CHUNK, barrier);
    }
    __device__ void wait_for_chunk(int i, int stage) const {
        wait_for_bytes(copied + 8 * stage, i / STAGES % 2);
        __syncthreads();  // all have read the chunk before
    }
#else
    const Copier<CHUNK, SIZE, THREADS> x{first_x, args.x.time, numbers};
    const Copier<CHUNK, STATES, THREADS> B{first_B, args.B.time, columns};

    __device__ void prepare_copies() const {}
    __device__ void load(int i, int stage) const {
        if (i < chunks) {
            const unsigned to = stages + stage * STAGE;
            const int first = chunk(i) * CHUNK;
            x.copy({to}, i64(first) * args.x.time, steps_of(i));
            B.copy({to + ELEMENT_BYTES * CHUNK * SIZE}, i64(first) * args.B.time, steps_of(i));
        }
        commit_copies();
    }
    __device__ void wait_for_chunk(int, int) const {
        wait_for_copies<STAGES - 2>();
        meet();
    }
#endif

    // What each step of chunk i + warp is scaled by, and the decay over that chunk.
    __device__ void weigh(int i) {
        next_steps.add_up(args.steps, steps_of(i + warp), args.steps.A[head], args.steps.bias_of(head));
        float weights[2];
#pragma unroll
        for (int k = 0; k < 2; k++)
            weights[k] = REVERSE ? exp2_of(next_steps.sum[k])
                                 : next_steps.dt[k] * exp2_of(next_steps.total - next_steps.sum[k]);
        store_float2(all_weights + warp * CHUNK + 2 * lane, weights[0], weights[1]);
        if (lane == 0) decays[warp] = exp2_of(next_steps.total);
        const int next = i + WARPS + warp;
        next_steps.load(args.steps, batch, range.begin, begin_of(next), steps_of(next), head);
    }

    // The states to memory, by way of shared memory, so that a row's are stored together.
    __device__ void keep() {
        running.keep(kept, row);
        __syncwarp();
        Storage* to_row = to_memory;
#pragma unroll
        for (int r = 0; r < 16; r += ROWS_APART, to_row += of_rows)
            if (kept_row + r < numbers && kept_column < columns)
                *reinterpret_cast<uint4*>(to_row) = load_piece(kept.at(kept_row + r, kept_column));
        to_memory += REVERSE ? -of_chunk : of_chunk;
        __syncwarp();
    }

    // The CTA's states of the sequence, in a tensor of float32 or null.
    template <class T>
    __device__ T* at_sequence(T* states) const {
        const i64 of_head = (i64(batch) * sizes.sequences + sequence) * sizes.heads + head;
        return states ? states + (of_head * sizes.head_size + first_number) * sizes.state_size + first_column : states;
    }
};

#if REVERSE
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
ssd_scan_adjoint(const void* dt, const float* A, const Storage* C, const float* dt_bias, const Storage* out_grad,
                 const float* final_grad, const int* cu_seqlens, const int* seq_idx, Storage* adjoints,
                 float* initial_grad, char* workspace, i64 batch, i64 time, i64 heads, i64 groups, i64 head_size, i64 state_size,
                 i64 sequences, i64 slots, i64 flags, i64 dt_low, i64 dt_high, i64 dt_batch, i64 dt_time, i64 dt_head,
                 i64 C_batch, i64 C_time, i64 C_group, i64 grad_batch, i64 grad_time, i64 grad_head) {
    States({{out_grad, grad_batch, grad_time, grad_head},
            {C, C_batch, C_time, C_group},
            {dt, dt_batch, dt_time, dt_head, A, dt_bias, seq_idx, time, flags, __uint_as_float(unsigned(dt_low)),
             __uint_as_float(unsigned(dt_high))},
            final_grad, cu_seqlens, adjoints, initial_grad, nullptr,
            {batch, time, heads, groups, head_size, state_size, sequences, slots}, workspace})
        .run();
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
ssd_scan_states(const Storage* x, const void* dt, const float* A, const Storage* B, const float* dt_bias,
                const float* initial_state, const int* cu_seqlens, const int* seq_idx, Storage* states,
                float* final_state, float* sequence_decays, char* workspace, i64 batch, i64 time, i64 heads, i64 groups, i64 head_size,
                i64 state_size, i64 sequences, i64 slots, i64 flags, i64 dt_low, i64 dt_high, i64 x_batch, i64 x_time,
                i64 x_head, i64 dt_batch, i64 dt_time, i64 dt_head, i64 B_batch, i64 B_time, i64 B_group) {
    States({{x, x_batch, x_time, x_head},
            {B, B_batch, B_time, B_group},
            {dt, dt_batch, dt_time, dt_head, A, dt_bias, seq_idx, time, flags, __uint_as_float(unsigned(dt_low)),
             __uint_as_float(unsigned(dt_high))},
            initial_state, cu_seqlens, states, final_state, sequence_decays,
            {batch, time, heads, groups, head_size, state_size, sequences, slots}, workspace})
        .run();
}
#endif
