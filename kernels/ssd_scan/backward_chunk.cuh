// What a CTA of the backward pass works on: a chunk, heads and blocks of states; see backward.cu.
#pragma once
#include "products.cuh"
#include "steps.cuh"

enum : int {
    CHUNK = 64,
    WARPS = 8,
    SIDES = 2,
    PART = 64 / SIDES,  // steps or channels that a warp has, of 64
    PART_TILES = PART / 8,
    THREADS = 32 * WARPS,
    MOST_HEADS = WIDE ? 16 : 32,  // of a CTA
    WARP_STATES = STATES / SIDES,
    STATE_TILES = WARP_STATES / 8,
    INPUT = ELEMENT_BYTES * CHUNK * STATES,   // bytes of B, and of C
    STAGE = ELEMENT_BYTES * 2 * SIZE * (CHUNK + STATES),
    SQUARE = ELEMENT_BYTES * CHUNK * CHUNK,
};

struct Arguments {
    Strided x, B, C, grad;
    StepInputs steps;
    const float* D;
    i64 D_channel;  // elements from a channel of D to the next: 1, or 0 for one number a head
    const int* cu_seqlens;
    const Storage *states, *adjoints;
    Storage* x_grad;
    float *dt_grad, *A_grad, *D_grad, *B_grad, *C_grad;
    Sizes sizes;
    i64 splits;
};

// Terms that warps compute of a head's steps, for `finish` to sum up.
struct Terms {
    ExactSum rows[SIDES][CHUNK], columns[4][CHUNK];  // of L·dt·X·(C·Bᵀ), but for its diagonal
    float diagonal[CHUNK];                        // of X
    float begin[SIDES][CHUNK];                    // exp(s_i)·dy_i·S·C_i
    float end[SIDES][CHUNK];                      // dt_j·w_j·x_j·G·B_j
    float inside[SIDES][CHUNK];                   // x_j·u_j
    float whole[WARPS];                           // S·G
};

// A CTA's place in the tensors, its shared memory, and how both are filled.
struct BackwardChunk {
    const Arguments& args;
    const Sizes& sizes = args.sizes;

    char* const memory = tile_memory();
    const Tile<CHUNK, STATES> B{shared_address(memory)}, C{B.address + INPUT};
    const unsigned stages = C.address + INPUT;
    const Tile<CHUNK, CHUNK> square{stages + STAGES * STAGE};
    const Tile<CHUNK, SIZE> output{square.address + SQUARE};
    StoredSum* const all_sums =  // (head, step)
        reinterpret_cast<StoredSum*>(memory + 2 * INPUT + STAGES * STAGE + SQUARE + output.BYTES);
    float* const all_dt = reinterpret_cast<float*>(all_sums + MOST_HEADS * CHUNK);
    float* const slopes = all_dt + MOST_HEADS * CHUNK;    // derivatives of dt by raw dt + dt_bias
    Terms* const terms = reinterpret_cast<Terms*>(slopes + MOST_HEADS * CHUNK);  // of two head tiles, used in turn

    const int lane = threadIdx.x % 32, warp = warp_number(), row = warp % 4 * 16, side = warp / 4;
    const int own = row + lane_row();  // the lane's first row of all products
    const int slot = int(blockIdx.x % unsigned(sizes.slots)), batch = int(blockIdx.x / unsigned(sizes.slots));
    const int splits = int(args.splits);
    const int group = int(blockIdx.y) / splits, split = int(blockIdx.y) % splits;
    const int group_heads = int(sizes.heads) / int(sizes.groups), per_cta = (group_heads + splits - 1) / splits;
    const int first_head = group * group_heads + split * per_cta;
    const int heads = smaller(group_heads - split * per_cta, per_cta);
    const int head_size = int(sizes.head_size), head_tiles = (head_size + SIZE - 1) / SIZE, tiles = heads * head_tiles;
    const ChunkRange range = chunk_range<CHUNK>(sizes, args.cu_seqlens, slot);

    // Where the CTA's first head begins in each tensor.
    const Storage *const first_x = args.x.at(batch, range.begin, first_head),
                  *const first_grad = args.grad.at(batch, range.begin, first_head);
    const i64 first_state_at =
        ((batch * sizes.slots + slot) * sizes.heads + first_head) * sizes.head_size * sizes.state_size;
    const i64 first_step = batch * sizes.time + range.begin;
    Storage* const first_x_grad = args.x_grad + (first_step * sizes.heads + first_head) * sizes.head_size;

    // The block of states that is worked on: its first one, and the block that is worked on first.
    const int last_block = (int(sizes.state_size) - 1) / STATES * STATES;
    int first_state = last_block;
    __device__ int states_left() const { return int(sizes.state_size) - first_state; }

    // The head tile that is worked on: its steps' sums and dt in shared memory, and its terms.
    struct Head {
        int number, first;  // the head's index in the CTA; the tile's first channel of the head
        const StoredSum* sums;
        const float* dt;
        Terms& terms;
    };

    __device__ explicit BackwardChunk(const Arguments& args) : args(args) {}

    struct Tiles {
        Tile<CHUNK, SIZE> x, grad;
        Tile<SIZE, STATES> states, adjoints;
    };
    __device__ Tiles tiles_of(int stage) const {
        const unsigned x = stages + stage * STAGE, grad = x + output.BYTES, states = grad + output.BYTES;
        return {{x}, {grad}, {states}, {states + ELEMENT_BYTES * SIZE * STATES}};
    }
    __device__ Head head(int i) const {
        const int h = head_tiles == 1 ? i : i / head_tiles;
        return {h, (i - h * head_tiles) * SIZE, all_sums + h * CHUNK, all_dt + h * CHUNK, terms[i % 2]};
    }

    // B and C.
    __device__ void load_inputs() const {
        Copier<CHUNK, STATES, THREADS>(args.B.at(batch, range.begin, group) + first_state, args.B.time, states_left())
            .copy(B, 0, range.steps);
        Copier<CHUNK, STATES, THREADS>(args.C.at(batch, range.begin, group) + first_state, args.C.time, states_left())
            .copy(C, 0, range.steps);
        commit_copies();
    }
    __device__ void load(int i, int stage) const {
        if (i < tiles) {
            const int head = head_tiles == 1 ? i : i / head_tiles, first = (i - head * head_tiles) * SIZE;
            const int numbers = head_size - first, state_size = int(sizes.state_size);
            const Tiles to = tiles_of(stage);
            Copier<CHUNK, SIZE, THREADS>(first_x + (i64(head) * args.x.head + first), args.x.time, numbers)
                .copy(to.x, 0, range.steps);
            Copier<CHUNK, SIZE, THREADS>(first_grad + (i64(head) * args.grad.head + first), args.grad.time, numbers)
                .copy(to.grad, 0, range.steps);
            const i64 at = first_state_at + first_state + i64(head * head_size + first) * state_size;
            Copier<SIZE, STATES, THREADS>(args.states + at, state_size, states_left()).copy(to.states, 0, numbers);
            Copier<SIZE, STATES, THREADS>(args.adjoints + at, state_size, states_left()).copy(to.adjoints, 0, numbers);
        }
        commit_copies();
    }

    __device__ void start_loads() const {
        load_inputs();
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) load(i, i);
    }

    // A lane stores pieces of 16 bytes of its warp's 16 steps and PART channels of x_grad, every APART-th row.
    enum : int { PIECES = PART / PIECE, APART = 32 / PIECES };
    const int stored_row = row + lane / PIECES, stored_piece = PART * side + lane % PIECES * PIECE;
    const int of_step = int(sizes.heads) * head_size;  // elements from a step to the next
    __device__ Storage* x_grad_at(const Head& of) const {
        return first_x_grad + (i64(stored_row) * of_step + (of.number * head_size + of.first + stored_piece));
    }
    __device__ bool has_x_grad(const Head& of, int r) const {
        return stored_row + r < range.steps && of.first + stored_piece < head_size;
    }

    // What the pass before has stored.
    __device__ void load_x_grad(const Head& of) const {
        const Storage* const from = x_grad_at(of);
        const unsigned to = output.at(stored_row, stored_piece);
#pragma unroll
        for (int r = 0; r < 16; r += APART)
            copy_piece(output.moved(to, r, 0), from + r * of_step, has_x_grad(of, r) ? 16 : 0);
        commit_copies();
    }

    // Of the lane's two rows: decays from the chunk's begin and to its end, and step sizes.
    __device__ float2 decays_before(const Head& of) const {
        return make_float2(fast_exp2(of.sums[own].value), fast_exp2(of.sums[own + 8].value));
    }
    __device__ float2 decays_after(const Head& of) const {
        const StoredSum total = of.sums[CHUNK - 1];
        return make_float2(fast_exp2(total - of.sums[own]), fast_exp2(total - of.sums[own + 8]));
    }
    __device__ float2 dt_of(const Head& of) const { return make_float2(of.dt[own], of.dt[own + 8]); }

    // The step sizes of a head, their slopes, and the sums of the decays' logarithms.
    __device__ void compute_decays(int h) const {
        const int head = first_head + h;
        LaneSteps<2> steps;
        steps.load(args.steps, batch, range.sequence_begin, range.begin, range.steps, head);
        float slope[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float raw = args.steps.value(steps.bits[k]) + args.steps.bias_of(head), dt = args.steps.unlimited(raw);
            const bool in = !(dt < args.steps.low || dt > args.steps.high);
            slope[k] = !in ? 0.f : args.steps.flags & SOFTPLUS ? sigmoid(raw) : 1.f;
        }
        steps.add_up(args.steps, range.steps, args.steps.A[head], args.steps.bias_of(head));
        const int at = h * CHUNK + 2 * lane;
        *reinterpret_cast<TwoSums*>(all_sums + at) = {stored(steps.sum[0]), stored(steps.sum[1])};
        store_float2(all_dt + at, steps.dt[0], steps.dt[1]);
        store_float2(slopes + at, slope[0], slope[1]);
    }

    // Index of the chunk's term of a head's A_grad and D_grad.
    __device__ i64 term_at(int head) const {
        return (batch * sizes.slots + slot) * sizes.heads + head;
    }
};
