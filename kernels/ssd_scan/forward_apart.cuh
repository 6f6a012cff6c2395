// A forward pass whose states do not wait for outputs, for GPUs whose warpgroups multiply together (sm_90a). A CTA has SIZE channels of
// each of HEADS heads that share B and C. A warpgroup has the states of one head. Two others take turns with chunks and compute the
// outputs of all heads: one multiplies while the other computes decays, and C·Bᵀ is one product for all heads.
//
//     warpgroup of head h, for each chunk i                warpgroups of outputs, for i = 0, 2, … and i = 1, 3, …
//         wait until outputs have READ the kept states         wait until chunk i is READY; start copies of x and B of a later chunk
//         states S to shared memory, rounded                   C·Bᵀ, and C·Sᵀ for each head
//         READY: the states before chunk i are there           READ: the next states may be kept; start the copy of C of chunk i + 2
//         xᵀ scaled in registers                               decays times C·Bᵀ, masked
//         S_end: that times B                                  C·Sᵀ scaled; masked C·Bᵀ times x; store
//
// Shared memory has x and B of STAGES chunks, C of two, and the states before one. The tensor memory accelerator copies x, B, C and
// outputs, by maps that the CTA makes in the workspace: a copy takes two to three thousand cycles, so it starts two chunks ahead
// (three stages: one). Every four chunks each warp of states computes the decays and step sizes of one of the next four.
#pragma once
#include "outputs.cuh"
#if BY_WARPGROUPS
#include "../common/tensor_copy.cuh"
#endif

enum : int {
    STATE_THREADS = 128 * HEADS,
    THREADS = STATE_THREADS + 2 * 128,
    HANDED = STATE_THREADS + 128,  // threads of states and of one warpgroup of outputs
    X_BYTES = ELEMENT_BYTES * CHUNK * SIZE,
    C_BYTES = ELEMENT_BYTES * CHUNK * STATES,
    STAGE = HEADS * X_BYTES + C_BYTES,  // x and B
    KEPT = ELEMENT_BYTES * SIZE * STATES,
    CHUNKS_AHEAD = STAGES - 2,  // that x and B are copied
    CHUNKS = 8,                 // of whose steps shared memory has decays
    // Barriers. Each but the first stands for two, one for each warpgroup of outputs.
    STATES_MEET = 1,
    READY = 2,
    READ = 4,
    OUTPUTS_MEET = 6,
    X_READ = 8,
    COPIED = 10,
};
static_assert(STAGES == 3 || STAGES == 4);

// Registers of a thread: as many states as it has, or outputs of all heads, and some more. Together what an SM has.
enum : int {
    REGISTERS = 65536 / THREADS / 8 * 8,
    STATE_REGISTERS = HEADS == 2 ? 120 : 216,
    OUTPUT_REGISTERS = HEADS == 2 ? 136 : 144,
};
struct Forward {
    const Arguments& args;
    const Sizes& sizes = args.sizes;

    const unsigned stages = shared_address(tile_memory()), C_tiles = stages + STAGES * STAGE, all_kept = C_tiles + 2 * C_BYTES;
    Steps<CHUNKS>* const steps =  // of each head
        reinterpret_cast<Steps<CHUNKS>*>(tile_memory() + STAGES * STAGE + 2 * C_BYTES + HEADS * KEPT);

    const int warp = warp_number(), row = warp % 4 * 16;
    const Walk walk{sizes, (int(sizes.head_size) + SIZE - 1) / SIZE, HEADS};
    const int batch = walk.batch, sequence = walk.sequence, head = walk.head;
    const int first_number = walk.tile * SIZE, numbers = int(sizes.head_size) - first_number;
    const SequenceRange range = sequence_range<CHUNK>(sizes, args.cu_seqlens, sequence);
    const int chunks = (range.end - range.begin + CHUNK - 1) / CHUNK;

    __device__ explicit Forward(const Arguments& args) : args(args) {}

    __device__ void run() {
        if (chunks) prepare_copies();
        if (warp < 4 * HEADS) {
            set_registers<REGISTERS, STATE_REGISTERS>();
            run_states(warp / 4);
        } else {
            set_registers<REGISTERS, OUTPUT_REGISTERS>();
            run_outputs(warp / 4 - HEADS);
        }
    }

    // Of the CTA's head number `own`.
    __device__ void run_states(int own) {
        const int state_size = int(sizes.state_size), head = this->head + own;
        const float A = args.steps.A[head], bias = args.steps.bias_of(head);
        Steps<CHUNKS>& steps = this->steps[own];
        LaneSteps<2> next_steps;
        const auto load_steps = [&](int i) {
            next_steps.load(args.steps, batch, range.begin, range.begin + i * CHUNK, steps_of(i), head);
        };
        const auto compute_steps = [&](int i) {  // of chunks i to i + 3, of which the warp has one
            const int of_warp = i + warp % 4;
            next_steps.add_up(args.steps, steps_of(of_warp), A, bias);
            steps.store(of_warp % CHUNKS, next_steps);
            load_steps(of_warp + 4);
        };
        load_steps(warp % 4);
        RunningStates<STATES> running;
        running.load(args.states_of(args.initial_state, batch, sequence, head, first_number), state_size, numbers, state_size, row);
        compute_steps(0);
        meet_at<STATE_THREADS>(STATES_MEET);
#pragma unroll 1
        for (int i = 0; i < chunks; i++) {
            wait_for_x_and_B(i);
            if (i) meet_at<HANDED>(READ + (i - 1) % 2);
            running.keep(kept(own), row);
            show_tensor_cores();
            arrive_at<HANDED>(READY + i % 2);
            Fragment lefts[CHUNK / 16];
            running.load_lefts(lefts, x_tile(i, own), steps.weights[i % CHUNKS], row);
            arrive_at<HANDED>(X_READ + i % 2);
            running.start_add(lefts, B_tile(i), steps.decays[i % CHUNKS]);
            if (i % 4 == 2) compute_steps(i + 2);  // in place of those of chunks i - 6 to i - 3, whose outputs are computed
            running.finish_add();
        }
        if (args.final_state)
            running.store(args.states_of(args.final_state, batch, sequence, head, first_number), state_size, numbers, state_size, row);
    }

    // Of every second chunk from chunk `first` on.
    __device__ void run_outputs(int first) {
        float D[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) D[h] = args.D ? args.D[head + h] : 0;
        if (first >= 2 - CHUNKS_AHEAD) copy_x_and_B(first - (2 - CHUNKS_AHEAD), first);
        copy_C(first, first);
#pragma unroll 1
        for (int i = first; i < chunks; i += 2) {
            float scores[CHUNK / 8][4], y[HEADS][SIZE / 8][4];
            meet_at<HANDED>(READY + first);
            copy_x_and_B(i + CHUNKS_AHEAD, first);  // where those of chunk i - 2 were
            wait_for_x_and_B(i), wait_for_C(i);
            const auto C = along_k(C_tile(first));
            begin_products();
            multiply<STATES, false>(scores, C, along_k(B_tile(i)));
            close_products();
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                multiply<STATES, false>(y[h], C, along_k(kept(h)));
                close_products();
            }
            wait_for_products<0>(scores);
#pragma unroll
            for (int h = 0; h < HEADS; h++) wait_for_products<0>(y[h]);
            // States have read x, whose memory outputs go through. This comes before READ, so that states never say it twice before
            // outputs have waited for it once.
            meet_at<HANDED>(X_READ + first);
            if (i + 1 < chunks) arrive_at<HANDED>(READ + first);
            copy_C(i + 2, first);
            Fragment weights[HEADS][CHUNK / 16];
            float2 before[HEADS];
            mask(weights, before, scores, i % CHUNKS);
#pragma unroll
            for (int h = 0; h < HEADS; h++) scale_rows(y[h], before[h]);
            begin_products();
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int j = 0; j < CHUNK; j += 16)
                    if (BY_WARPGROUPS || j <= row) multiply_registers(y[h], weights[h][j / 16], across_k(x_tile(i, h)), j);
            close_products();
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                wait_for_products<0>(y[h]);
                if (args.D) add_skip(y[h], x_tile(i, h), row, [&](int) { return make_float2(D[h], D[h]); });
            }
            store(y, i, first);
        }
        finish_stores();
    }

    // Of masked scores the operands of products with x, and the decays before the lane's rows.
    __device__ void mask(Fragment (&weights)[HEADS][CHUNK / 16], float2 (&before)[HEADS], const float (&scores)[CHUNK / 8][4],
                         int chunk) const {
        const Mask masks[] = {Mask(steps[0], chunk, row), Mask(steps[HEADS - 1], chunk, row)};
#pragma unroll
        for (int j = 0; j < CHUNK; j += 16)
#pragma unroll
            for (int h = 0; h < HEADS; h++) weights[h][j / 16] = masks[h].of(scores, j);
#pragma unroll
        for (int h = 0; h < HEADS; h++) before[h] = masks[h].before();
    }

    __device__ Tile<CHUNK, SIZE> x_tile(int i, int h) const { return {stages + i % STAGES * STAGE + h * X_BYTES}; }
    __device__ Tile<CHUNK, STATES> B_tile(int i) const { return {x_tile(i, HEADS).address}; }
    __device__ Tile<CHUNK, STATES> C_tile(int i) const { return {C_tiles + i % 2 * C_BYTES}; }
    __device__ Tile<SIZE, STATES> kept(int h) const { return {all_kept + h * KEPT}; }
    __device__ int steps_of(int i) const { return i < chunks ? smaller(range.end - range.begin - i * CHUNK, CHUNK) : 0; }
    __device__ int group() const { return head / (int(sizes.heads) / int(sizes.groups)); }

#if BY_WARPGROUPS
    enum : int { MAPS = 4 };
    char* const maps = args.workspace + i64(blockIdx.x) * MAPS * TENSOR_MAP;  // of x, B, C and outputs
    const unsigned copied = shared_address(steps + HEADS);  // barriers of x and B, and of C

    // By all threads.
    __device__ void prepare_copies() {
        if (warp == 0) {
            const auto make = [&](int i, const void* data, int columns, int count, i64 apart, i64 step) {
                make_tensor_map(maps + i * TENSOR_MAP, stages + i * TENSOR_MAP, data,
                                {unsigned(columns), unsigned(count), unsigned(range.end - range.begin)},
                                {u64(2 * apart), u64(2 * step)}, CHUNK);
            };
            const int state_size = int(sizes.state_size);
            make(0, args.x.at(batch, range.begin, head) + first_number, numbers, HEADS, args.x.head, args.x.time);
            make(1, args.B.at(batch, range.begin, group()), state_size, 1, args.B.head, args.B.time);
            make(2, args.C.at(batch, range.begin, group()), state_size, 1, args.C.head, args.C.time);
            make(3, out_rows(sizes, args.out, batch, range.begin, head) + first_number, numbers, HEADS, sizes.head_size,
                 sizes.heads * sizes.head_size);
            if (threadIdx.x == 0) init_copy_barriers<STAGES + 2>(copied);
            show_tensor_cores();  // maps went through memory of tiles
        }
        __syncthreads();
        if (threadIdx.x % 128 == 0)
            for (int i = 0; i < MAPS; i++) acquire_tensor_map(maps + i * TENSOR_MAP);
    }
    // By one thread of the warpgroup `first` of outputs.
    __device__ void copy_x_and_B(int i, int) const {
        if (threadIdx.x % 128 || i >= chunks) return;
        wait_for_stores_read();  // of outputs, which were where the copies of x are to be
        const unsigned barrier = copied + i % STAGES * 8;
        expect_bytes(barrier, STAGE);
#pragma unroll
        for (int h = 0; h < HEADS; h++) copy_box(x_tile(i, h).address, maps, 0, h, i * CHUNK, barrier);
        copy_states(B_tile(i), 1, i, barrier);
    }
    __device__ void copy_C(int i, int) const {
        if (threadIdx.x % 128 || i >= chunks) return;
        const unsigned barrier = copied + 8 * (STAGES + i % 2);
        expect_bytes(barrier, C_BYTES);
        copy_states(C_tile(i), 2, i, barrier);
    }
    __device__ void copy_states(Tile<CHUNK, STATES> to, int map, int i, unsigned barrier) const {
#pragma unroll
        for (int first = 0; first < STATES; first += 64)
            copy_box(to.address + first / 64 * to.BLOCK, maps + map * TENSOR_MAP, first, 0, i * CHUNK, barrier);
    }
    __device__ void wait_for_x_and_B(int i) const { wait_for_bytes(copied + i % STAGES * 8, i / STAGES % 2); }
    __device__ void wait_for_C(int i) const { wait_for_bytes(copied + 8 * (STAGES + i % 2), i / 2 % 2); }
    // By way of the memory of x.
    __device__ void store(const float (&y)[HEADS][SIZE / 8][4], int i, int first) const {
        meet_at<128>(OUTPUTS_MEET + first);  // all have read x
#pragma unroll
        for (int h = 0; h < HEADS; h++) store_sums(x_tile(i, h), y[h], row);
        show_tensor_cores();
        meet_at<128>(OUTPUTS_MEET + first);
        if (threadIdx.x % 128) return;
#pragma unroll
        for (int h = 0; h < HEADS; h++) store_box(maps + 3 * TENSOR_MAP, 0, h, i * CHUNK, x_tile(i, h).address);
        commit_stores();
    }
    __device__ void finish_stores() const { wait_for_stores(); }
#else
    // For tests on a CPU: the warpgroup `first` of outputs copies at once, and says so to states.
    __device__ void prepare_copies() const {}
    __device__ void copy_x_and_B(int i, int first) const {
        if (i >= chunks) return;
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            Copier<CHUNK, SIZE, 128>(args.x.at(batch, range.begin + i * CHUNK, head + h) + first_number, args.x.time, numbers,
                                     threadIdx.x % 128)
                .copy(x_tile(i, h), 0, steps_of(i));
        copy_states(B_tile(i), args.B, i);
        arrive_at<HANDED>(COPIED + first);
    }
    __device__ void copy_C(int i, int) const { if (i < chunks) copy_states(C_tile(i), args.C, i); }
    __device__ void copy_states(Tile<CHUNK, STATES> to, const Strided& from, int i) const {
        Copier<CHUNK, STATES, 128>(from.at(batch, range.begin + i * CHUNK, group()), from.time, int(sizes.state_size), threadIdx.x % 128)
            .copy(to, 0, steps_of(i));
        commit_copies();
        wait_for_copies<0>();
    }
    __device__ void wait_for_x_and_B(int i) const {
        if (warp < 4 * HEADS) meet_at<HANDED>(COPIED + (i - CHUNKS_AHEAD + 2) % 2);
    }
    __device__ void wait_for_C(int) const {}
    __device__ void store(const float (&y)[HEADS][SIZE / 8][4], int i, int) const {
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            store_rows(out_rows(sizes, args.out, batch, range.begin + i * CHUNK, head + h) + first_number, y[h], row, steps_of(i),
                       numbers, sizes.heads * sizes.head_size);
    }
    __device__ void finish_stores() const {}
#endif
};
