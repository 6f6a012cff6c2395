// A backward pass whose warpgroups each have gradients of their own, for GPUs whose warpgroups multiply together (sm_90a). Names are as
// in backward.cu. For each head tile and block of STATES states:
//
//     inputs (warpgroup 0)                        C (warpgroup 1)                  B (warpgroup 2)
//         X = x·dyᵀ               (j, i)              dy·S            (i, state)       x·G             (j, state)
//         u = w·(B·Gᵀ)            (j, channel)        times C: begin                   times B: end
//         weights L·dt·X, and (L·C·Bᵀ)ᵀ               C_grad += exp(s)·(dy·S)          B_grad += dt·w·(x·G)
//         u += (L·C·Bᵀ)ᵀ·dy                           S·G                              finish the head tile before
//         x_grad = dt·u + D·dy
//
// An operand that a warpgroup has as sums is already laid out as a left operand, so L·C·Bᵀ never leaves registers. Of x·u only x·G·B and X·L·C·Bᵀ are computed, which other terms need anyway.
//
// Shared memory has B and C, x, dy, S and G of STAGES head tiles, and x_grad of two. The tensor memory accelerator copies all but B and C,
// by maps that the CTA makes in the workspace. Warpgroup 2 starts copies two head tiles ahead, when all are DONE with the head tile before
// the current one.
#pragma once
#include "backward_tiles.cuh"

enum : int {
    REGISTERS = 65536 / THREADS / 8 * 8,
    INPUT_REGISTERS = 184,
    STATE_REGISTERS = 160,
};

struct Backward : BackwardTiles {
    float lane_value = 0;  // D (warpgroup 0) or A (the others) of the CTA's head whose index is the lane's

    using BackwardTiles::BackwardTiles;

    __device__ void run() {
        if (heads == 0) return;
        if (range.steps == 0) return store_nothing();
        prepare_copies();
        if (warp < 4) {
            set_registers<REGISTERS, INPUT_REGISTERS>();
            run_inputs();
        } else {
            set_registers<REGISTERS, STATE_REGISTERS>();
            run_states(warp < 8);
        }
    }

    // The lane's pair of elements in columns 8 · n to 8 · n + 7, of its first row and of the row eight further; `rows` has these columns.
    __device__ static Pair upper_of(const Fragment& rows, int n) { return n % 2 ? rows.z : rows.x; }
    __device__ static Pair lower_of(const Fragment& rows, int n) { return n % 2 ? rows.w : rows.y; }
    // A warp's 16 rows of a tile, as left operands: also laid out as sums of its columns.
    template <int COLUMNS>
    __device__ void load_rows(Fragment (&to)[COLUMNS / 16], Tile<CHUNK, COLUMNS> from) const {
        const auto operand = along_k(from);
        const unsigned at = operand.lane_of_A(row);
#pragma unroll
        for (int k = 0; k < COLUMNS; k += 16) to[k / 16] = operand.load_A(at, k);
    }

    // The step sizes of all heads; then B and C of each block, with which `scores` works. Those of the last block stay.
    template <class F>
    __device__ void for_blocks(F scores) {
        for (int h = warp; h < heads; h += WARPS) compute_decays(h);
        for (first_state = 0;; first_state += STATES) {
            load_inputs();
            scores();
            if (first_state == last_block) return;
            meet_at<THREADS>(ALL_MEET);
        }
    }

    // Warpgroup 0.
    __device__ void run_inputs() {
        if (args.D && !args.D_channel && lane < heads) lane_value = args.D[first_head + lane];
        float scores[CHUNK / 8][4], weights[CHUNK / 8][4];  // B·Cᵀ, and Σ L·dt·X transposed
        clear(scores), clear(weights);
        for_blocks([&] {
            begin_products();
            multiply<STATES, true>(scores, along_k(B), along_k(C));
            close_products();
            wait_for_products<0>(scores);
        });
        float own_scores[2] = {0, 0};
#pragma unroll
        for (int b = 0; b < CHUNK; b += 16) add_diagonal(own_scores, scores, b, row);
#pragma unroll 1
        for (int i = 0; i < tiles; i++, turn++) {
            const Head of = head(i);
            const Tile<CHUNK, SIZE> x = x_tile(), grad = grad_tile();
            wait_for_tiles();
            float products[CHUNK / 8][4], u[SIZE / 8][4];
            Fragment rows[SIZE / 16];
            load_rows(rows, x);
            begin_products();
#pragma unroll
            for (int k = 0; k < SIZE; k += 16) multiply_registers(products, rows[k / 16], along_k(grad), k, k);
            close_products();
            multiply<STATES, false>(u, along_k(B), along_k(adjoints_tile()));
            close_products();
            wait_for_products<1>(products);
            Fragment masked[CHUNK / 16];
            mask(masked, weights, scores, own_scores, products, of);
            wait_for_products<0>(u);
            scale_rows(u, decays_after(of));
            begin_products();
#pragma unroll
            for (int k = 0; k < CHUNK; k += 16)
                if (BY_WARPGROUPS || k >= row) multiply_registers(u, masked[k / 16], across_k(grad), k);
            close_products();
            const float2 dt = dt_of(of);
            wait_for_products<0>(u);
            add_skip(u, grad, of, dt);
            store_x_grad(u, of);
            arrive_at<THREADS>(DONE + turn % STAGES);
        }
#pragma unroll 1
        while (true) {
            keep_weights(weights);
            if (first_state == 0) break;
            meet_at<THREADS>(ALL_MEET);  // projections are stored
            first_state -= STATES;
            load_inputs();
            load_x_grad(head(0), turn);
#pragma unroll 1
            for (int i = 0; i < tiles; i++, turn++) {
                const Head of = head(i);
                wait_for_tiles();
                float u[SIZE / 8][4];
                begin_products();
                multiply<STATES, false>(u, along_k(B), along_k(adjoints_tile()));
                close_products();
                const float2 dt = dt_of(of), after = decays_after(of);
                if (i + 1 < tiles) load_x_grad(head(i + 1), turn + 1);
                wait_for_x_grad();
                wait_for_products<0>(u);
                scale_rows(u, make_float2(dt.x * after.x, dt.y * after.y));
                add_stored(u);
                store_x_grad(u, of);
                arrive_at<THREADS>(DONE + turn % STAGES);
            }
        }
        finish_stores();
    }

    // A warp's 16 steps j and all steps i: (L·C·Bᵀ)ᵀ as left operands, and L·dt·X to `weights`. The warpgroups' loops together have to fit
    // the instruction cache, so blocks on the diagonal share the code of the others.
    __device__ void mask(Fragment (&masked)[CHUNK / 16], float (&weights)[CHUNK / 8][4], const float (&scores)[CHUNK / 8][4],
                         const float (&own_scores)[2], const float (&products)[CHUNK / 8][4], const Head& of) const {
        InputTerms& terms = input_terms[turn % TURNS];
        const float sum[2] = {of.sums[own].value, of.sums[own + 8].value}, dt[2] = {of.dt[own], of.dt[own + 8]};
        const bool before[2] = {lane_column() < lane_row(), lane_column() + 1 < lane_row()};  // steps i before j, in a block of 8 × 8
        float columns[2] = {0, 0}, at_diagonal[2] = {0, 0};
#pragma unroll
        for (int first = 0; first < CHUNK; first += 32) {
            float rows[8] = {};
#pragma unroll
            for (int b = first; b < first + 32; b += 16) {
                if (b < row) {  // steps i before all steps j
                    masked[b / 16] = {};
                    continue;
                }
                const bool diagonal = b == row;
                float m[2][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int n = b / 8 + half;
                    const float2 sums = *reinterpret_cast<const float2*>(of.sums + 8 * n + lane_column());
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const int j = k / 2;
                        float decay = fast_exp2((k % 2 ? sums.y : sums.x) - sum[j]);
                        if (half <= j && diagonal && (half < j || before[k % 2])) decay = 0;
                        m[half][k] = decay * scores[n][k];
                        float term = m[half][k] * products[n][k];
                        if (half == j && diagonal && on_diagonal(k % 2)) term = 0;
                        weights[n][k] += dt[j] * decay * products[n][k];
                        columns[j] += term;
                        rows[(b - first) / 4 + 2 * half + k % 2] += dt[j] * term;
                    }
                }
                masked[b / 16] = fragment_of(m[0], m[1]);
                add_diagonal(at_diagonal, products, b, row);
            }
            float of_row = 0;
            if (first + 32 > row) of_row = transposed_sum<8, 4>(rows);
            const int number = transposed_index<8, 4>();
            terms.rows[warp][first + number / 2 * 8 + lane_column() + number % 2] = of_row;
        }
        columns[0] = of_quarter(columns[0]), columns[1] = of_quarter(columns[1]);
        if (lane % 4 == 0) terms.columns[own] = columns[0], terms.columns[own + 8] = columns[1];
        if (on_diagonal(0) || on_diagonal(1)) {
            terms.diagonal[own] = at_diagonal[0], terms.diagonal[own + 8] = at_diagonal[1];
            terms.scored[own] = at_diagonal[0] * own_scores[0], terms.scored[own + 8] = at_diagonal[1] * own_scores[1];
        }
    }
    // Whether the lane's even or odd column is its row, in a block of 8 × 8 on the diagonal. `add_diagonal` adds the lane's two such
    // elements of block b of 16 columns if the block is on the diagonal, else 0 times others, so that registers are not indexed.
    __device__ bool on_diagonal(int odd) const { return lane_column() + odd == lane_row(); }
    __device__ void add_diagonal(float (&to)[2], const float (&products)[CHUNK / 8][4], int b, int row) const {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const float one = b == row && on_diagonal(odd) ? 1 : 0;
            to[0] += one * products[b / 8][odd], to[1] += one * products[b / 8 + 1][2 + odd];
        }
    }
    // u = dt·u + D·dy.
    __device__ void add_skip(float (&u)[SIZE / 8][4], Tile<CHUNK, SIZE> grad, const Head& of, float2 dt) const {
        const float D = from_lane(lane_value, of.number);
        Fragment rows[SIZE / 16];
        load_rows(rows, grad);
#pragma unroll
        for (int n = 0; n < SIZE / 8; n++) {
            const Pair upper = upper_of(rows[n / 2], n), lower = lower_of(rows[n / 2], n);
            u[n][0] = dt.x * u[n][0] + D * low_of(upper), u[n][1] = dt.x * u[n][1] + D * high_of(upper);
            u[n][2] = dt.y * u[n][2] + D * low_of(lower), u[n][3] = dt.y * u[n][3] + D * high_of(lower);
        }
        if (!args.D_channel) return;
        const float* const of_channels = args.D + i64(first_head + of.number) * head_size + of.first;
#pragma unroll
        for (int n = 0; n < SIZE / 8; n++) {
            const int channel = 8 * n + lane_column();
            if (of.first + channel >= head_size) continue;
            const Pair upper = upper_of(rows[n / 2], n), lower = lower_of(rows[n / 2], n);
            const float low = of_channels[channel], high = of_channels[channel + 1];
            u[n][0] += low * low_of(upper), u[n][1] += high * high_of(upper);
            u[n][2] += low * low_of(lower), u[n][3] += high * high_of(lower);
        }
    }
    __device__ void add_stored(float (&u)[SIZE / 8][4]) const {
        Fragment rows[SIZE / 16];
        load_rows(rows, output());
#pragma unroll
        for (int n = 0; n < SIZE / 8; n++) {
            const Pair upper = upper_of(rows[n / 2], n), lower = lower_of(rows[n / 2], n);
            u[n][0] += low_of(upper), u[n][1] += high_of(upper);
            u[n][2] += low_of(lower), u[n][3] += high_of(lower);
        }
    }

    // Warpgroup 1, which has C, and 2, which has B. They run the same instructions, for the sake of the instruction cache.
    __device__ void run_states(bool has_C) {
        if (lane < heads) lane_value = args.steps.A[first_head + lane];
        float sums[HALVES][8][4];  // C_grad or B_grad
        for_blocks([] {});
        bool first = true;
#pragma unroll 1
        while (true) {
            const auto factors = along_k(has_C ? C : B);
            const unsigned factors_at = factors.lane_of_A(row);
#pragma unroll
            for (int h = 0; h < HALVES; h++) clear(sums[h]);
            if (!has_C) copy_tiles(0, turn), copy_tiles(1, turn + 1);
#pragma unroll 1
            for (int i = 0;; i++, turn++) {
                if (!has_C) {
                    if (i) meet_at<THREADS>(DONE + (turn - 1) % STAGES);
                    copy_tiles(i + 2, turn + 2);
                    if (i && warp % 4 == i % 4) finish(head(i - 1), turn - 1, first);
                }
                if (i == tiles) break;
                const Head of = head(i);
                wait_for_tiles();
                Fragment rows[SIZE / 16];
                load_rows(rows, has_C ? grad_tile() : x_tile());
                const Tile<SIZE, STATES> right = has_C ? states_tile() : adjoints_tile();
                StateTerms& terms = state_terms[turn % TURNS];
                const float2 decays = has_C ? decays_before(of) : decays_after(of), dt = dt_of(of);
                const float2 scales = has_C ? decays : make_float2(dt.x * decays.x, dt.y * decays.y);
                float dot0 = 0, dot1 = 0;
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    float products[8][4];
                    Fragment factor;
                    begin_products();
#pragma unroll
                    for (int k = 0; k < SIZE; k += 16) multiply_registers(products, rows[k / 16], across_k(right, 64 * h), k, k);
                    close_products();
                    if (has_C && h == 0) multiply_states(terms);
                    wait_for_products<0>(products);
                    add_scaled(sums[h], products, scales);
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        if (n % 2 == 0) factor = factors.load_A(factors_at, 64 * h + 8 * n);
                        const Pair upper = upper_of(factor, n), lower = lower_of(factor, n);
                        dot0 += products[n][0] * low_of(upper) + products[n][1] * high_of(upper);
                        dot1 += products[n][2] * low_of(lower) + products[n][3] * high_of(lower);
                    }
                }
                dot0 = of_quarter(decays.x * dot0), dot1 = of_quarter(decays.y * dot1);
                float* const to = has_C ? terms.begin : terms.end;
                if (lane % 4 == 0) to[own] = dot0, to[own + 8] = dot1;
                if (has_C) arrive_at<THREADS>(DONE + turn % STAGES);
            }
            meet_at<THREADS>(ALL_MEET);
            begin_products();
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                if (has_C) multiply<CHUNK, true>(sums[h], across_k(kept()), across_k(B, 64 * h));
                else multiply<CHUNK, true>(sums[h], along_k(kept()), across_k(C, 64 * h));
            close_products();
            store_projection(has_C ? args.C_grad : args.B_grad, sums);
            if (first_state == 0) return;
            meet_at<THREADS>(ALL_MEET);
            first = false;
            first_state -= STATES;
            load_inputs();
        }
    }

    __device__ void multiply_states(StateTerms& terms) const {
        float whole = 0;
        const unsigned states = states_tile().address + 16 * (threadIdx.x % GROUP);
#pragma unroll 4
        for (int i = 0; i < S_BYTES; i += 16 * GROUP) {
            const uint4 a = load_piece(states + i), b = load_piece(states + S_BYTES + i);
            whole += low_of(a.x) * low_of(b.x) + high_of(a.x) * high_of(b.x) + low_of(a.y) * low_of(b.y) +
                     high_of(a.y) * high_of(b.y);
            whole += low_of(a.z) * low_of(b.z) + high_of(a.z) * high_of(b.z) + low_of(a.w) * low_of(b.w) +
                     high_of(a.w) * high_of(b.w);
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) whole += __shfl_xor_sync(FULL_WARP, whole, distance);
        if (lane == 0) terms.whole[warp % 4] = whole;
    }

    // By one warp.
    __device__ void finish(const Head& of, int turn, bool first) const {
        const InputTerms& input = input_terms[turn % TURNS];
        const StateTerms& state = state_terms[turn % TURNS];
        LaneTerms terms{};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int t = 2 * lane + k;
            terms.rows[k] = state.begin[t], terms.end[k] = state.end[t];
            if (!first) continue;
            terms.rows[k] += input.rows[0][t] + input.rows[1][t] + (input.rows[2][t] + input.rows[3][t]);
            terms.columns[k] = input.columns[t];
            terms.diagonal[k] = input.diagonal[t], terms.scored[k] = input.scored[t];
        }
#pragma unroll
        for (int w = 0; w < 4; w++) terms.whole += state.whole[w];
        store_terms(of, terms, from_lane(lane_value, of.number), first);
    }

    // (Σ L·dt·X)ᵀ to shared memory.
    __device__ Tile<CHUNK, CHUNK> kept() const { return {outputs}; }
    __device__ void keep_weights(const float (&weights)[CHUNK / 8][4]) const {
        finish_stores();
        meet_at<GROUP>(INPUTS_MEET);
        store_sums(kept(), weights, row);
        show_tensor_cores();
        meet_at<THREADS>(ALL_MEET);
    }
    // Store C_grad or B_grad, to which products add (Σ L·dt·X)·B or (Σ L·dt·X)ᵀ·C.
    __device__ void store_projection(void* grad, float (&sums)[HALVES][8][4]) const {
        const i64 step = (split * sizes.batch + batch) * sizes.time + range.begin + own;
        const i64 of_step = sizes.groups * sizes.state_size;
        const i64 at = (step * sizes.groups + group) * sizes.state_size + first_state;
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            wait_for_products<0>(sums[h]);
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    const int column = 64 * h + 8 * n + lane_column();
                    if (own + 8 * k < range.steps && column < states_left())
                        store_sum(grad, at + 8 * k * of_step + column, sums[h][n][2 * k], sums[h][n][2 * k + 1]);
                }
        }
    }
};
