// Shared memory of backward_apart.cuh: its tiles and terms, the copies that fill the tiles, and the barriers between those who use them.
#pragma once
#include "../common/barrier.cuh"
#include "backward_chunk.cuh"
#if BY_WARPGROUPS
#include "../common/tensor_copy.cuh"
#endif

enum : int {
    GROUP = 128,  // threads of a warpgroup
    THREADS = 3 * GROUP,
    WARPS = THREADS / 32,
    HALVES = STATES / 64,
    X_BYTES = ELEMENT_BYTES * CHUNK * SIZE,
    S_BYTES = ELEMENT_BYTES * SIZE * STATES,
    STAGE = 2 * (X_BYTES + S_BYTES),
    // Head tiles of whose terms there is memory. Terms of tile i are written after its copies have arrived. These start when all warps
    // are done with tile i - 3, and so with `finish` of tile i - 4.
    TURNS = 4,
    // Barriers. DONE and COPIED stand for one of each stage.
    ALL_MEET = 1,
    INPUTS_MEET = 2,
    DONE = 3,
    COPIED = 6,
    COPIES_MEET = 9,
};
static_assert(STAGES == 3);

// Terms of a head tile's steps, for `finish` to sum up: those of warpgroup 0, and those of the others.
struct InputTerms {
    float rows[4][CHUNK];  // Σ_j L·dt·X·(C·Bᵀ) but for its diagonal, of 16 steps j each
    float columns[CHUNK];  // Σ_i L·X·(C·Bᵀ) but for its diagonal
    float diagonal[CHUNK], scored[CHUNK];  // X_jj, and X_jj·(C_j·B_j)
};
struct StateTerms {
    float begin[CHUNK];  // exp(s_i)·dy_i·S·C_i
    float end[CHUNK];    // w_j·x_j·G·B_j
    float whole[4];      // S·G
};

struct BackwardTiles : BackwardChunk {
    const Tile<CHUNK, STATES> B{shared_address(tile_memory())}, C{B.address + INPUT};
    const unsigned stages = C.address + INPUT, outputs = stages + STAGES * STAGE;
    InputTerms* const input_terms = reinterpret_cast<InputTerms*>(after_steps);
    StateTerms* const state_terms = reinterpret_cast<StateTerms*>(input_terms + TURNS);

    int turn = 0;  // head tiles of all blocks so far

    __device__ explicit BackwardTiles(const Arguments& args)
        : BackwardChunk(args, tile_memory() + 2 * INPUT + STAGES * STAGE + 2 * X_BYTES) {}

    __device__ unsigned stage() const { return stages + turn % STAGES * STAGE; }
    __device__ Tile<CHUNK, SIZE> x_tile() const { return {stage()}; }
    __device__ Tile<CHUNK, SIZE> grad_tile() const { return {stage() + X_BYTES}; }
    __device__ Tile<SIZE, STATES> states_tile() const { return {stage() + 2 * X_BYTES}; }
    __device__ Tile<SIZE, STATES> adjoints_tile() const { return {stage() + 2 * X_BYTES + S_BYTES}; }
    __device__ Tile<CHUNK, SIZE> output() const { return {outputs + turn % 2 * X_BYTES}; }

    // By all warpgroups: B and C of a block of states.
    __device__ void load_inputs() {
        if (threadIdx.x < 256) {
            Copier<CHUNK, STATES, 256>(args.B.at(batch, range.begin, group) + first_state, args.B.time, states_left())
                .copy(B, 0, range.steps);
            Copier<CHUNK, STATES, 256>(args.C.at(batch, range.begin, group) + first_state, args.C.time, states_left())
                .copy(C, 0, range.steps);
        }
        commit_copies();
        wait_for_copies<0>();
        show_tensor_cores();
        meet_at<THREADS>(ALL_MEET);
    }
#if BY_WARPGROUPS
    enum : int { MAPS = 5 };
    char* const maps = args.workspace + (i64(blockIdx.y) * gridDim.x + blockIdx.x) * MAPS * TENSOR_MAP;
    const unsigned copied = shared_address(state_terms + TURNS);  // barriers of stages, and of x_grad

    // By all threads: maps of x, dy, S, G and x_grad.
    __device__ void prepare_copies() {
        if (warp == 0) {
            const unsigned count = unsigned(heads), size = unsigned(head_size), states = unsigned(sizes.state_size);
            const auto make = [&](int i, const void* data, unsigned columns, unsigned rows, i64 apart, i64 step) {
                make_tensor_map(maps + i * TENSOR_MAP, stages + i * TENSOR_MAP, data, {columns, count, rows}, {u64(2 * apart), u64(2 * step)},
                                64);
            };
            make(0, args.x.at(batch, range.begin, first_head), size, unsigned(range.steps), args.x.head, args.x.time);
            make(1, args.grad.at(batch, range.begin, first_head), size, unsigned(range.steps), args.grad.head, args.grad.time);
            make(2, args.states + first_state_at, states, size, sizes.head_size * sizes.state_size, sizes.state_size);
            make(3, args.adjoints + first_state_at, states, size, sizes.head_size * sizes.state_size, sizes.state_size);
            make(4, args.x_grad + (first_step * sizes.heads + first_head) * sizes.head_size, size, unsigned(range.steps), sizes.head_size,
                 sizes.heads * sizes.head_size);
            if (threadIdx.x == 0) init_copy_barriers<STAGES + 2>(copied);
            show_tensor_cores();  // maps went through memory of tiles
        }
        __syncthreads();
        if (threadIdx.x % GROUP == 0)
            for (int i = 0; i < MAPS; i++) acquire_tensor_map(maps + i * TENSOR_MAP);
    }
    // By warpgroup 2, of which one thread copies.
    __device__ void copy_tiles(int i, int turn) const {
        if (threadIdx.x % GROUP || i >= tiles) return;
        const Head of = head(i);
        const unsigned to = stages + turn % STAGES * STAGE, barrier = copied + turn % STAGES * 8;
        expect_bytes(barrier, STAGE);
        copy_box(to, maps, of.first, of.number, 0, barrier);
        copy_box(to + X_BYTES, maps + TENSOR_MAP, of.first, of.number, 0, barrier);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                copy_box(to + 2 * X_BYTES + k * S_BYTES + h * S_BYTES / HALVES, maps + (2 + k) * TENSOR_MAP, first_state + 64 * h, of.number,
                         of.first, barrier);
    }
    __device__ void wait_for_tiles() const { wait_for_bytes(copied + turn % STAGES * 8, turn / STAGES % 2); }
    // By warpgroup 0, of which one thread copies.
    __device__ void load_x_grad(const Head& of, int turn) const {
        if (threadIdx.x % GROUP) return;
        wait_for_stores_read();
        const unsigned barrier = copied + (STAGES + turn % 2) * 8;
        expect_bytes(barrier, X_BYTES);
        copy_box(outputs + turn % 2 * X_BYTES, maps + 4 * TENSOR_MAP, of.first, of.number, 0, barrier);
    }
    __device__ void wait_for_x_grad() const { wait_for_bytes(copied + (STAGES + turn % 2) * 8, (turn - tiles) / 2 % 2); }
    __device__ void store_x_grad(const float (&u)[SIZE / 8][4], const Head& of) const {
        if (threadIdx.x % GROUP == 0) wait_for_stores_read();
        meet_at<GROUP>(INPUTS_MEET);
        store_sums(output(), u, row);
        show_tensor_cores();
        meet_at<GROUP>(INPUTS_MEET);
        if (threadIdx.x % GROUP) return;
        store_box(maps + 4 * TENSOR_MAP, of.first, of.number, 0, output().address);
        commit_stores();
    }
    __device__ void finish_stores() const { wait_for_stores(); }
#else
    // For tests on a CPU: threads copy at once.
    __device__ void prepare_copies() const {}
    __device__ void copy_tiles(int i, int turn) const {
        if (i >= tiles) return;
        const Head of = head(i);
        const unsigned to = stages + turn % STAGES * STAGE;
        const int h = first_head + of.number, numbers = head_size - of.first, thread = threadIdx.x % GROUP;
        Copier<CHUNK, SIZE, GROUP>(args.x.at(batch, range.begin, h) + of.first, args.x.time, numbers, thread).copy({to}, 0, range.steps);
        Copier<CHUNK, SIZE, GROUP>(args.grad.at(batch, range.begin, h) + of.first, args.grad.time, numbers, thread)
            .copy({to + X_BYTES}, 0, range.steps);
        const i64 at = first_state_at + first_state + i64(of.number * head_size + of.first) * sizes.state_size;
        const int apart = int(sizes.state_size);
        Copier<SIZE, STATES, GROUP>(args.states + at, apart, states_left(), thread).copy({to + 2 * X_BYTES}, 0, numbers);
        Copier<SIZE, STATES, GROUP>(args.adjoints + at, apart, states_left(), thread).copy({to + 2 * X_BYTES + S_BYTES}, 0, numbers);
        commit_copies();
        wait_for_copies<0>();
        meet_at<GROUP>(COPIES_MEET);
        arrive_at<THREADS>(COPIED + turn % STAGES);
    }
    __device__ void wait_for_tiles() const {
        if (warp < 8) meet_at<THREADS>(COPIED + turn % STAGES);
    }
    __device__ void load_x_grad(const Head& of, int turn) const {
        Copier<CHUNK, SIZE, GROUP>(x_grad_of(of), int(sizes.heads * sizes.head_size), head_size - of.first)
            .copy({outputs + turn % 2 * X_BYTES}, 0, range.steps);
        commit_copies();
        wait_for_copies<0>();
        meet_at<GROUP>(INPUTS_MEET);
    }
    __device__ void wait_for_x_grad() const {}
    __device__ void store_x_grad(const float (&u)[SIZE / 8][4], const Head& of) const {
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int n = 0; n < SIZE / 8; n++) {
                const int step = own + 8 * k, channel = 8 * n + lane_column();
                if (step >= range.steps || of.first + channel >= head_size) continue;
                *reinterpret_cast<Pair*>(x_grad_of(of) + (step * sizes.heads * sizes.head_size + channel)) =
                    pair_of(u[n][2 * k], u[n][2 * k + 1]);
            }
    }
    __device__ Storage* x_grad_of(const Head& of) const {
        return args.x_grad + ((first_step * sizes.heads + first_head + of.number) * sizes.head_size + of.first);
    }
    __device__ void finish_stores() const {}
#endif
};
