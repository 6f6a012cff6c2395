// A backward pass whose warps all do the same.
//
// A CTA has one chunk and some heads of a group. It takes blocks of STATES states one after the other, the last block first, and
// for each block all heads. B_grad, C_grad and Σ L·dt·X over the CTA's heads stay in registers. x_grad, dt_grad and A_grad are
// sums over states: the first block's pass over the heads stores them, with all that does not depend on states, and with the
// product of L·(C·Bᵀ) over all states and dy. Later passes (FIRST is false) add the other terms of their states, without
// masked_scores. Eight warps, 16 rows and half of the columns each:
//
//     masked_scores  L·(C·Bᵀ) to shared memory; X = dy·xᵀ, weighted, to Σ L·dt·X  (step i, step j)
//     add_scaled     dy·S to C_grad and x·G to B_grad                            (step, state)
//     dot            these times C and B, for finish
//     combine        u and x_grad                                                (step j, channel)
//     finish         one warp: sums over the steps; dt_grad and terms of the gradients of A, D and dt_bias
#pragma once
#include "backward_chunk.cuh"

enum : int {
    WARPS = 8,
    SIDES = 2,
    PART = 64 / SIDES,  // steps or channels that a warp has, of 64
    PART_TILES = PART / 8,
    THREADS = 32 * WARPS,
    WARP_STATES = STATES / SIDES,
    STATE_TILES = WARP_STATES / 8,
    STAGE = ELEMENT_BYTES * 2 * SIZE * (CHUNK + STATES),
    SQUARE = ELEMENT_BYTES * CHUNK * CHUNK,
};

// Terms that warps compute of a head tile's steps, for `finish` to sum up.
struct Terms {
    ExactSum rows[SIDES][CHUNK], columns[4][CHUNK];  // Σ L·dt·X·(C·Bᵀ) but for its diagonal, and without dt
    float diagonal[CHUNK], scored[CHUNK];            // X_jj, and X_jj·(C_j·B_j)
    float begin[SIDES][CHUNK];                       // exp(s_i)·dy_i·S·C_i
    float end[SIDES][CHUNK];                         // w_j·x_j·G·B_j
    float whole[WARPS];                              // S·G
};

struct Backward : BackwardChunk {
    const Tile<CHUNK, STATES> B{shared_address(tile_memory())}, C{B.address + INPUT};
    const unsigned stages = C.address + INPUT;
    const Tile<CHUNK, CHUNK> square{stages + STAGES * STAGE};
    const Tile<CHUNK, SIZE> output{square.address + SQUARE};
    Terms* const all_terms = reinterpret_cast<Terms*>(after_steps);  // of two head tiles, used in turn

    const int side = warp / 4;
    // Where the CTA's first head begins in each tensor.
    const Storage *const first_x = args.x.at(batch, range.begin, first_head),
                  *const first_grad = args.grad.at(batch, range.begin, first_head);
    Storage* const first_x_grad = args.x_grad + (first_step * sizes.heads + first_head) * sizes.head_size;

    float scores[PART_TILES][4];   // C·Bᵀ
    float weights[PART_TILES][4];  // Σ L·dt·X
    float B_grad[STATE_TILES][4], C_grad[STATE_TILES][4];

    __device__ explicit Backward(const Arguments& args)
        : BackwardChunk(args, tile_memory() + 2 * INPUT + STAGES * STAGE + SQUARE + ELEMENT_BYTES * CHUNK * SIZE) {}

    __device__ void run() {
        if (heads == 0) return;
        if (range.steps == 0) return store_nothing();
        clear(scores), clear(weights);
#pragma unroll 1
        for (first_state = 0; first_state < last_block; first_state += STATES) {
            load_inputs();
            wait_for_copies<0>();
            meet();
            add_scores();
            __syncthreads();
        }
        start_loads();
        for (int h = warp; h < heads; h += WARPS) compute_decays(h);
        wait_for_copies<STAGES - 1>();
        meet();
        add_scores();
        pass<true>();
        keep_weights();
#pragma unroll 1
        while (true) {
            meet();
            store_projections();
            if (first_state == 0) break;
            __threadfence();  // copies to shared memory read what the pass before has stored
            __syncthreads();
            first_state -= STATES;
            start_loads();
            pass<false>();
        }
    }

    __device__ void add_scores() {
        begin_products();
        multiply<STATES, true>(scores, along_k(C), along_k(B, PART * side));
        close_products();
        wait_for_products<0>(scores);
    }

    // All heads, for one block of states.
    template <bool FIRST>
    __device__ void pass() {
        clear(B_grad), clear(C_grad);
        int stage = 0;
#pragma unroll 1
        for (int i = 0; i < tiles; i++) {
            if constexpr (STAGES == 1) load(i, 0);
            wait_for_copies<STAGES == 1 ? 0 : STAGES - 2>();
            meet();
            if constexpr (!FIRST) load_x_grad(head(i));
            if constexpr (STAGES > 1) load(i + STAGES - 1, stage ? stage - 1 : STAGES - 1);
            if constexpr (FIRST) work(head(i), terms_of(i), tiles_of(stage));
            else work_again(head(i), terms_of(i), tiles_of(stage));
            if (i && warp == i % WARPS) finish<FIRST>(head(i - 1), terms_of(i - 1));
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if constexpr (STAGES == 1) __syncthreads();
        }
        __syncthreads();
        if (warp == 0) finish<FIRST>(head(tiles - 1), terms_of(tiles - 1));
    }
    __device__ Terms& terms_of(int i) const { return all_terms[i % 2]; }

    struct Tiles {
        Tile<CHUNK, SIZE> x, grad;
        Tile<SIZE, STATES> states, adjoints;
    };
    __device__ Tiles tiles_of(int stage) const {
        const unsigned x = stages + stage * STAGE, grad = x + output.BYTES, states = grad + output.BYTES;
        return {{x}, {grad}, {states}, {states + ELEMENT_BYTES * SIZE * STATES}};
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
            const int head = i >> (head_tiles - 1), first = (i - head * head_tiles) * SIZE;
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

    // A head tile, in the first pass.
    __device__ void work(const Head& of, Terms& terms, const Tiles& from) {
        const int first = PART * side, column = WARP_STATES * side;  // the warp's channels and states
        float products[PART_TILES][4], u[PART_TILES][4], of_states[STATE_TILES][4];
        begin_products();
        multiply<SIZE, false>(products, along_k(from.grad), along_k(from.x, first));
        close_products();
        multiply<SIZE, false>(of_states, along_k(from.grad), across_k(from.states, column));
        close_products();
        multiply<STATES, false>(u, along_k(B), along_k(from.adjoints, first));
        close_products();
        multiply_states(terms, from);
        wait_for_products<2>(products);
        masked_scores(of, terms, products);
        const float2 before = decays_before(of), after = decays_after(of), dt = dt_of(of);
        wait_for_products<0>(of_states), wait_for_products<0>(u);
        add_scaled(C_grad, of_states, before);
        dot(of_states, C, before, terms.begin[side]);
        scale_rows(u, after);

        meet();  // the square is there
        begin_products();
        multiply<CHUNK, true>(u, across_k(square), across_k(from.grad, first));
        multiply<SIZE, false>(of_states, along_k(from.x), across_k(from.adjoints, column));
        close_products();
        wait_for_products<0>(u), wait_for_products<0>(of_states);
        add_scaled(B_grad, of_states, make_float2(dt.x * after.x, dt.y * after.y));
        dot(of_states, B, after, terms.end[side]);
        combine<true>(of, from, u, dt);
    }
    // A head tile, in later passes: only terms of their states.
    __device__ void work_again(const Head& of, Terms& terms, const Tiles& from) {
        const int column = WARP_STATES * side;
        float u[PART_TILES][4], of_states[STATE_TILES][4], of_adjoints[STATE_TILES][4];
        begin_products();
        multiply<SIZE, false>(of_states, along_k(from.grad), across_k(from.states, column));
        multiply<SIZE, false>(of_adjoints, along_k(from.x), across_k(from.adjoints, column));
        multiply<STATES, false>(u, along_k(B), along_k(from.adjoints, PART * side));
        close_products();
        multiply_states(terms, from);
        const float2 before = decays_before(of), after = decays_after(of), dt = dt_of(of);
        wait_for_products<0>(of_states), wait_for_products<0>(of_adjoints), wait_for_products<0>(u);
        add_scaled(C_grad, of_states, before);
        dot(of_states, C, before, terms.begin[side]);
        add_scaled(B_grad, of_adjoints, make_float2(dt.x * after.x, dt.y * after.y));
        dot(of_adjoints, B, after, terms.end[side]);
        scale_rows(u, after);
        combine<false>(of, from, u, dt);
    }

    // dots[row] = scales of the lane's two rows · dot product of that row of `numbers` with the same row and states of `others`.
    __device__ void dot(const float (&numbers)[STATE_TILES][4], Tile<CHUNK, STATES> others, float2 scales, float* dots) const {
        float dot0 = 0, dot1 = 0;
        const unsigned others_at = others.lane_of_sums(row);
#pragma unroll
        for (int n = 0; n < STATE_TILES; n++) {
            const int column = WARP_STATES * side + 8 * n;
            const Pair other0 = load_pair(others.moved(others_at, 0, column)), other1 = load_pair(others.moved(others_at, 8, column));
            dot0 += numbers[n][0] * low_of(other0) + numbers[n][1] * high_of(other0);
            dot1 += numbers[n][2] * low_of(other1) + numbers[n][3] * high_of(other1);
        }
        dot0 = of_quarter(scales.x * dot0), dot1 = of_quarter(scales.y * dot1);
        if (lane % 4 == 0) dots[own] = dot0, dots[own + 8] = dot1;
    }

    // A warp's 16 steps i and PART steps j: L times C·Bᵀ to shared memory, and L·dt·X to the sum over heads.
    __device__ void masked_scores(const Head& of, Terms& terms, const float (&products)[PART_TILES][4]) {
        const unsigned to = square.moved(square.lane_of_sums(row), 0, PART * side);
        if (PART * side > row) {  // steps j after all steps i
#pragma unroll
            for (int j = 0; j < PART_TILES; j++)
                store_pair(square.moved(to, 0, 8 * j), 0, 0), store_pair(square.moved(to, 8, 8 * j), 0, 0);
            if (lane < 16) terms.rows[side][row + lane] = 0;
            if (lane < PART) terms.columns[warp % 4][PART * side + lane] = 0;
            return;
        }
        const StoredSum sum[2] = {of.sums[own], of.sums[own + 8]};
        ExactSum rows[2] = {0, 0}, columns[2 * PART_TILES];
#pragma unroll
        for (int j = 0; j < PART_TILES; j++) {
            const int column = PART * side + 8 * j + lane_column();
            const TwoSums sums = *reinterpret_cast<const TwoSums*>(of.sums + column);
            const float2 dt = *reinterpret_cast<const float2*>(of.dt + column);
            const int block = PART * side + j / 2 * 16;  // first column of a block of 16 × 16
            float decayed[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float decay = fast_exp2(sum[k / 2] - (k % 2 ? sums.y : sums.x));
                const int distance = block < row ? 1 : own + 8 * (k / 2) - (column + k % 2);
                if (distance < 0) decay = 0;
                decayed[k] = decay * scores[j][k];
                float term = decayed[k] * products[j][k];
                if (distance == 0) {
                    terms.diagonal[column + k % 2] = products[j][k], terms.scored[column + k % 2] = term;
                    term = 0;
                }
                const float dt_j = k % 2 ? dt.y : dt.x;
                weights[j][k] += decay * dt_j * products[j][k];
                rows[k / 2] += ExactSum(dt_j) * term;
                columns[2 * j + k % 2] = k / 2 ? columns[2 * j + k % 2] + term : ExactSum(term);
            }
            store_pair(square.moved(to, 0, 8 * j), decayed[0], decayed[1]);
            store_pair(square.moved(to, 8, 8 * j), decayed[2], decayed[3]);
        }
        rows[0] = of_quarter(rows[0]), rows[1] = of_quarter(rows[1]);
        if (lane % 4 == 0) terms.rows[side][own] = rows[0], terms.rows[side][own + 8] = rows[1];
        const ExactSum column = transposed_sum<2 * PART_TILES, 4>(columns);
        const int number = transposed_index<2 * PART_TILES, 4>();
        terms.columns[warp % 4][PART * side + number / 2 * 8 + lane_column() + number % 2] = column;
    }

    __device__ void multiply_states(Terms& terms, const Tiles& from) const {
        float whole = 0;
#pragma unroll
        for (int i = 0; i < from.states.BYTES; i += 16 * THREADS) {
            const uint4 a = load_piece(from.states.address + 16 * threadIdx.x + i);
            const uint4 b = load_piece(from.adjoints.address + 16 * threadIdx.x + i);
#if WIDE
            whole += __uint_as_float(a.x) * __uint_as_float(b.x) + __uint_as_float(a.y) * __uint_as_float(b.y) +
                     __uint_as_float(a.z) * __uint_as_float(b.z) + __uint_as_float(a.w) * __uint_as_float(b.w);
#else
            whole += low_of(a.x) * low_of(b.x) + high_of(a.x) * high_of(b.x) + low_of(a.y) * low_of(b.y) +
                     high_of(a.y) * high_of(b.y);
            whole += low_of(a.z) * low_of(b.z) + high_of(a.z) * high_of(b.z) + low_of(a.w) * low_of(b.w) +
                     high_of(a.w) * high_of(b.w);
#endif
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) whole += __shfl_xor_sync(FULL_WARP, whole, distance);
        if (lane == 0) terms.whole[warp] = whole;
    }

    // x_grad of a warp's 16 steps and PART channels.
    template <bool FIRST>
    __device__ void combine(const Head& of, const Tiles& from, const float (&u)[PART_TILES][4], float2 dt) const {
        const Tile<CHUNK, SIZE> x = from.x, grad = from.grad;
        const int first = PART * side, head = first_head + of.number, D_channel = int(args.D_channel);
        const float* const D = args.D ? args.D + head * (D_channel ? head_size : 1) : nullptr;
        const unsigned sums_at = x.moved(x.lane_of_sums(row), 0, first) - x.address;
        if constexpr (!FIRST) {
            wait_for_copies<STAGES - 1>();  // but for those of the next head tile
            __syncwarp();
        }
#pragma unroll
        for (int p = 0; p < PART_TILES; p++) {
            const unsigned upper = x.moved(sums_at, 0, 8 * p), lower = upper + 8 * x.ROW;
            const unsigned others = FIRST ? grad.address : output.address;
            const Pair other0 = load_pair(others + upper), other1 = load_pair(others + lower);
            float2 scale = make_float2(1, 1);
            if constexpr (FIRST) {
                const int channel = of.first + first + 8 * p + lane_column();
                scale = make_float2(0, 0);
                if (D && channel < head_size) scale = make_float2(D[channel * D_channel], D[(channel + 1) * D_channel]);
            }
            store_pair(output.address + upper, dt.x * u[p][0] + scale.x * low_of(other0),
                       dt.x * u[p][1] + scale.y * high_of(other0));
            store_pair(output.address + lower, dt.y * u[p][2] + scale.x * low_of(other1),
                       dt.y * u[p][3] + scale.y * high_of(other1));
        }
        __syncwarp();
        Storage* const to = x_grad_at(of);
        const unsigned lane_output = output.at(stored_row, stored_piece);
#pragma unroll
        for (int r = 0; r < 16; r += APART)
            if (has_x_grad(of, r)) *reinterpret_cast<uint4*>(to + r * of_step) = load_piece(output.moved(lane_output, r, 0));
        __syncwarp();
    }

    // By one warp.
    template <bool FIRST>
    __device__ void finish(const Head& of, const Terms& of_tile) const {
        LaneTerms terms{};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int t = 2 * lane + k;
            terms.rows[k] = of_tile.begin[0][t] + of_tile.begin[1][t], terms.end[k] = of_tile.end[0][t] + of_tile.end[1][t];
            if constexpr (!FIRST) continue;
            terms.rows[k] += of_tile.rows[0][t] + of_tile.rows[1][t];
            terms.columns[k] = of_tile.columns[0][t] + of_tile.columns[1][t] + (of_tile.columns[2][t] + of_tile.columns[3][t]);
            terms.diagonal[k] = of_tile.diagonal[t], terms.scored[k] = of_tile.scored[t];
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) terms.whole += of_tile.whole[w];
        store_terms(of, terms, args.steps.A[first_head + of.number], FIRST);
    }

    // Σ L·dt·X to shared memory, where it stays.
    __device__ void keep_weights() const {
        const unsigned to = square.moved(square.lane_of_sums(row), 0, PART * side);
#pragma unroll
        for (int j = 0; j < PART_TILES; j++) {
            store_pair(square.moved(to, 0, 8 * j), weights[j][0], weights[j][1]);
            store_pair(square.moved(to, 8, 8 * j), weights[j][2], weights[j][3]);
        }
    }
    // Add (Σ L·dt·X)·B to C_grad and (Σ L·dt·X)ᵀ·C to B_grad, and store both.
    __device__ void store_projections() {
        const int first = WARP_STATES * side;
        begin_products();
        multiply<CHUNK, true>(C_grad, along_k(square), across_k(B, first));
        multiply<CHUNK, true>(B_grad, across_k(square), across_k(C, first));
        close_products();
        wait_for_products<0>(C_grad), wait_for_products<0>(B_grad);
        const i64 step = (split * sizes.batch + batch) * sizes.time + range.begin + own;
        const i64 at = (step * sizes.groups + group) * sizes.state_size + first_state + first + lane_column();
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int n = 0; n < STATE_TILES; n++) {
                if (own + 8 * k >= range.steps || first + 8 * n + lane_column() >= states_left()) continue;
                const i64 of_tile = at + 8 * k * sizes.groups * sizes.state_size + 8 * n;
                store_sum(args.C_grad, of_tile, C_grad[n][2 * k], C_grad[n][2 * k + 1]);
                store_sum(args.B_grad, of_tile, B_grad[n][2 * k], B_grad[n][2 * k + 1]);
            }
    }
};
