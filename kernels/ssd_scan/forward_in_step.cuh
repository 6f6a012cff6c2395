// A forward pass whose warps go from chunk to chunk together. A CTA has SIZE channels of one head. Four of its warps have the states,
// four the outputs:
//
//     warps 0 to 3, 16 channels each                 warps 4 to 7, 16 steps i each
//         states S to shared memory, rounded             C·Bᵀ, and its decays and step sizes, masked
//         ------------------------- the states are there -------------------------
//         S_end: xᵀ, scaled in registers, times B        C·Sᵀ, its rows scaled, and the masked C·Bᵀ times x; gate
//
// Every eight chunks each warp computes the decays and step sizes of one of the next eight.
#pragma once
#include "outputs.cuh"

enum : int {
    WARPS = 8,  // and as many chunks whose steps shared memory has
    THREADS = 32 * WARPS,
    STAGE = ELEMENT_BYTES * CHUNK * (SIZE + 2 * STATES),
    STATES_KEPT = 1,  // a barrier
};

struct AllSteps : Steps<WARPS> {
#if GATED
    float D[SIZE];  // of the CTA's channels
#endif
};

struct Forward {
    const Arguments& args;
    const Sizes& sizes = args.sizes;

    const unsigned stages = shared_address(tile_memory());
    const Tile<SIZE, STATES> kept{stages + STAGES * STAGE};
    AllSteps& steps = *reinterpret_cast<AllSteps*>(tile_memory() + STAGES * STAGE + kept.BYTES);

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
            show_tensor_cores();  // before copies start, for which it would wait
            arrive_at<THREADS>(STATES_KEPT);
            load_ahead(i, stage);
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
            load_ahead(i, stage);
            const Mask mask(steps, i % WARPS, row);
            Fragment weights[CHUNK / 16];
            float scores[CHUNK / 8][4];
            begin_products();
            multiply<STATES, false>(scores, along_k(C_tile(stage)), along_k(B_tile(stage)));
            close_products();
            wait_for_products<0>(scores);
#pragma unroll
            for (int j = 0; j < CHUNK; j += 16) weights[j / 16] = mask.of(scores, j);
            const Tile<CHUNK, SIZE> x_tile = this->x_tile(stage);
            const float2 before = mask.before();
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
            scale_rows(y, before);
            begin_products();
#pragma unroll
            for (int j = 0; j < CHUNK; j += 16)
                if (BY_WARPGROUPS || j <= row) multiply_registers(y, weights[j / 16], across_k(x_tile), j);
            close_products();
            wait_for_products<0>(y);
            if (args.D) add_skip(y, x_tile, row, [&](int channel) { return D_of(channel, skip); });
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

    // Wait for chunk i's tiles, whose copies start here if STAGES is 1, and for all warps.
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
    }
    // Start the copies of chunk i + STAGES - 1.
    __device__ void load_ahead(int i, int stage) const {
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
        steps.store(warp, next_steps);
        const int next = i + WARPS + warp;
        next_steps.load(args.steps, batch, range.begin, range.begin + next * CHUNK, steps_of(next), head);
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

    __device__ void store(Storage* out, const float (&y)[SIZE / 8][4], int i) const {
        store_rows(out_rows(sizes, out, batch, range.begin + i * CHUNK, head) + first_number, y, row, steps_of(i), numbers,
                   sizes.heads * sizes.head_size);
    }

    // The CTA's states of the sequence, in a tensor of float32 or null.
    template <class T>
    __device__ T* at_sequence(T* states) const { return args.states_of(states, batch, sequence, head, first_number); }
};
