// The gradients of an SSD scan, for chunks of 64 steps of each head, from the states S before the chunks and the gradients G
// of the states after them (states.cu). With s_i = Σ_{t≤i} dt_t·A, L_ij = exp(s_i - s_j) where i ≥ j, else 0, and w_j =
// exp(s_63 - s_j):
//     X_ij = dy_i·x_j
//     u_j  = Σ_i L_ij·(C_i·B_j)·dy_i + w_j·G·B_j            x_grad_j  = dt_j·u_j + D·dy_j
//     C_grad_i = Σ_j L_ij·dt_j·X_ij·B_j + exp(s_i)·Sᵀ·dy_i   B_grad_j = Σ_i L_ij·dt_j·X_ij·C_i + dt_j·w_j·Gᵀ·x_j
//     a_grad_t = Σ_{i≥t>j} L_ij·dt_j·X_ij·(C_i·B_j) + Σ_{i≥t} exp(s_i)·dy_i·S·C_i + Σ_{j<t} dt_j·w_j·x_j·G·B_j + exp(s_63)·S·G
//     dt_grad_t = f_t·(x_t·u_t + A·a_grad_t), with f_t the derivative of the step size by the raw dt
//     A_grad = Σ_t dt_t·a_grad_t                             D_grad = Σ_t X_tt
// where dt is the step size and a_grad the gradient of dt·A.
//
// Traffic of a step and head: SIZE elements of x, dy and x_grad each, once for each block of STATES states, and x_grad once more
// for each block but one; and SIZE · state_size / 32 of S and G.
//
// A CTA has one chunk and some heads of a group. It takes blocks of STATES states one after the other, the last block first, and
// for each block all heads. B_grad, C_grad and Σ L·dt·X over the CTA's heads stay in registers. x_grad, dt_grad and A_grad are
// sums over states: the first block's pass over the heads stores them, with all that does not depend on states, and with the
// product of L·(C·Bᵀ) over all states and dy. Later passes (FIRST is false) add the other terms of their states, without
// masked_scores. Eight warps, 16 rows and half of the columns each:
//
//     masked_scores  L·(C·Bᵀ) to shared memory; X = dy·xᵀ, weighted, to Σ L·dt·X  (step i, step j)
//     dot            dy·(C·Sᵀ) and x·(B·Gᵀ), for finish                          (step, channel)
//     add_scaled     Sᵀ·dy to C_grad and Gᵀ·x to B_grad                          (step, state)
//     combine        u and x_grad                                                (step j, channel)
//     finish         one warp: sums over the steps; dt_grad and the terms of A_grad and D_grad
#include "backward_chunk.cuh"

struct Backward : BackwardChunk {
    float scores[PART_TILES][4];   // C·Bᵀ
    float weights[PART_TILES][4];  // Σ L·dt·X
    float B_grad[STATE_TILES][4], C_grad[STATE_TILES][4];

    using BackwardChunk::BackwardChunk;

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
            if constexpr (FIRST) work(head(i), tiles_of(stage));
            else work_again(head(i), tiles_of(stage));
            if (i && warp == i % WARPS) finish<FIRST>(head(i - 1));
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if constexpr (STAGES == 1) __syncthreads();
        }
        __syncthreads();
        if (warp == 0) finish<FIRST>(head(tiles - 1));
    }

    template <class T>
    __device__ static T of_quarter(T x) {  // the sum over the four lanes that share rows
        x += __shfl_xor_sync(FULL_WARP, x, 1);
        return x + __shfl_xor_sync(FULL_WARP, x, 2);
    }

    // A head tile, in the first pass.
    __device__ void work(const Head& of, const Tiles& from) {
        const int first = PART * side, column = WARP_STATES * side;  // the warp's channels and states
        float products[PART_TILES][4], y[PART_TILES][4], u[PART_TILES][4], of_states[STATE_TILES][4];
        begin_products();
        multiply<SIZE, false>(products, along_k(from.grad), along_k(from.x, PART * side));
        multiply<STATES, false>(y, along_k(C), along_k(from.states, first));
        close_products();
        multiply_states(of, from);
        wait_for_products<0>(products), wait_for_products<0>(y);
        masked_scores(of, products);

        begin_products();
        multiply<SIZE, false>(of_states, along_k(from.grad), across_k(from.states, column));
        multiply<STATES, false>(u, along_k(B), along_k(from.adjoints, first));
        close_products();
        const float2 before = decays_before(of);
        dot(y, from.grad, before, of.terms.begin[side]);
        wait_for_products<0>(of_states), wait_for_products<0>(u);
        add_scaled(C_grad, of_states, before);
        const float2 after = decays_after(of), dt = dt_of(of);
        scale_rows(u, after);
        dot(u, from.x, dt, of.terms.end[side]);

        meet();  // the square is there
        begin_products();
        multiply<CHUNK, true>(u, across_k(square), across_k(from.grad, first));
        multiply<SIZE, false>(of_states, along_k(from.x), across_k(from.adjoints, column));
        close_products();
        wait_for_products<0>(u), wait_for_products<0>(of_states);
        add_scaled(B_grad, of_states, make_float2(dt.x * after.x, dt.y * after.y));
        combine<true>(of, from, u, dt);
    }
    // A head tile, in later passes: only terms of their states.
    __device__ void work_again(const Head& of, const Tiles& from) {
        const int first = PART * side, column = WARP_STATES * side;
        float y[PART_TILES][4], u[PART_TILES][4], of_states[STATE_TILES][4], of_adjoints[STATE_TILES][4];
        begin_products();
        multiply<STATES, false>(y, along_k(C), along_k(from.states, first));
        multiply<STATES, false>(u, along_k(B), along_k(from.adjoints, first));
        close_products();
        multiply<SIZE, false>(of_states, along_k(from.grad), across_k(from.states, column));
        multiply<SIZE, false>(of_adjoints, along_k(from.x), across_k(from.adjoints, column));
        close_products();
        multiply_states(of, from);
        const float2 before = decays_before(of), after = decays_after(of), dt = dt_of(of);
        wait_for_products<1>(y), wait_for_products<1>(u);
        dot(y, from.grad, before, of.terms.begin[side]);
        scale_rows(u, after);
        dot(u, from.x, dt, of.terms.end[side]);
        wait_for_products<0>(of_states), wait_for_products<0>(of_adjoints);
        add_scaled(C_grad, of_states, before);
        add_scaled(B_grad, of_adjoints, make_float2(dt.x * after.x, dt.y * after.y));
        combine<false>(of, from, u, dt);
    }

    // dots[row] = scales of the lane's two rows · dot product of that row of `numbers` with the same row and columns of `others`.
    __device__ void dot(const float (&numbers)[PART_TILES][4], Tile<CHUNK, SIZE> others, float2 scales,
                        float* dots) const {
        float dot0 = 0, dot1 = 0;
        const unsigned others_at = others.moved(others.lane_of_sums(row), 0, PART * side);
#pragma unroll
        for (int p = 0; p < PART_TILES; p++) {
            const Pair other0 = load_pair(others.moved(others_at, 0, 8 * p));
            const Pair other1 = load_pair(others.moved(others_at, 8, 8 * p));
            dot0 += numbers[p][0] * low_of(other0) + numbers[p][1] * high_of(other0);
            dot1 += numbers[p][2] * low_of(other1) + numbers[p][3] * high_of(other1);
        }
        dot0 = of_quarter(scales.x * dot0), dot1 = of_quarter(scales.y * dot1);
        if (lane % 4 == 0) dots[own] = dot0, dots[own + 8] = dot1;
    }

    // A warp's 16 steps i and PART steps j: L times C·Bᵀ to shared memory, and L·dt·X to the sum over heads.
    __device__ void masked_scores(const Head& of, const float (&products)[PART_TILES][4]) {
        const unsigned to = square.moved(square.lane_of_sums(row), 0, PART * side);
        if (PART * side > row) {  // steps j after all steps i
#pragma unroll
            for (int j = 0; j < PART_TILES; j++)
                store_pair(square.moved(to, 0, 8 * j), 0, 0), store_pair(square.moved(to, 8, 8 * j), 0, 0);
            if (lane < 16) of.terms.rows[side][row + lane] = 0;
            if (lane < PART) of.terms.columns[warp % 4][PART * side + lane] = 0;
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
                float decay = fast_exp2(sum[k / 2] - (k % 2 ? sums.y : sums.x)), off_diagonal = 1;
                if (block >= row) {
                    const int distance = own + 8 * (k / 2) - (column + k % 2);
                    if (distance < 0) decay = 0;
                    if (distance == 0) of.terms.diagonal[column + k % 2] = products[j][k], off_diagonal = 0;
                }
                const float weight = decay * (k % 2 ? dt.y : dt.x) * products[j][k];
                weights[j][k] += weight;
                decayed[k] = decay * scores[j][k];
                const float term = weight * scores[j][k] * off_diagonal;
                rows[k / 2] += term;
                columns[2 * j + k % 2] = k / 2 ? columns[2 * j + k % 2] + term : ExactSum(term);
            }
            store_pair(square.moved(to, 0, 8 * j), decayed[0], decayed[1]);
            store_pair(square.moved(to, 8, 8 * j), decayed[2], decayed[3]);
        }
        rows[0] = of_quarter(rows[0]), rows[1] = of_quarter(rows[1]);
        if (lane % 4 == 0) of.terms.rows[side][own] = rows[0], of.terms.rows[side][own + 8] = rows[1];
        const ExactSum column = transposed_sum<2 * PART_TILES, 4>(columns);
        const int number = transposed_index<2 * PART_TILES, 4>();
        of.terms.columns[warp % 4][PART * side + number / 2 * 8 + lane_column() + number % 2] = column;
    }

    __device__ void multiply_states(const Head& of, const Tiles& from) const {
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
        if (lane == 0) of.terms.whole[warp] = whole;
    }

    // x_grad of a warp's 16 steps and PART channels.
    template <bool FIRST>
    __device__ void combine(const Head& of, const Tiles& from, const float (&u)[PART_TILES][4], float2 dt) const {
        const Tile<CHUNK, SIZE> x = from.x, grad = from.grad;
        const int first = PART * side, head = first_head + of.number, D_channel = int(args.D_channel);
        const float* const D = args.D ? args.D + head * (D_channel ? head_size : 1) : nullptr;
        float dot0 = 0, dot1 = 0;
        const unsigned sums_at = x.moved(x.lane_of_sums(row), 0, first) - x.address;
        if constexpr (!FIRST) {
            wait_for_copies<STAGES - 1>();  // but for those of the next head tile
            __syncwarp();
        }
#pragma unroll
        for (int p = 0; p < PART_TILES; p++) {
            const unsigned upper = x.moved(sums_at, 0, 8 * p), lower = upper + 8 * x.ROW;
            const Pair x0 = load_pair(x.address + upper), x1 = load_pair(x.address + lower);
            dot0 += u[p][0] * low_of(x0) + u[p][1] * high_of(x0);
            dot1 += u[p][2] * low_of(x1) + u[p][3] * high_of(x1);
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
        dot0 = of_quarter(dot0), dot1 = of_quarter(dot1);
        if (lane % 4 == 0) of.terms.inside[side][own] = dot0, of.terms.inside[side][own + 8] = dot1;
        __syncwarp();
        Storage* const to = x_grad_at(of);
        const unsigned lane_output = output.at(stored_row, stored_piece);
#pragma unroll
        for (int r = 0; r < 16; r += APART)
            if (has_x_grad(of, r)) *reinterpret_cast<uint4*>(to + r * of_step) = load_piece(output.moved(lane_output, r, 0));
        __syncwarp();
    }

    // By one warp: a lane has steps 2 · lane and the next.
    template <bool FIRST>
    __device__ void finish(const Head& of) const {
        const int head = first_head + of.number;
        const Terms& of_head = of.terms;
        ExactSum later[2], before[2];
        float inside[2], skip_grad = 0, whole = 0;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int t = 2 * lane + k;
            later[k] = of_head.begin[0][t] + of_head.begin[1][t];
            if constexpr (FIRST) {
                const ExactSum columns =
                    of_head.columns[0][t] + of_head.columns[1][t] + (of_head.columns[2][t] + of_head.columns[3][t]);
                later[k] += of_head.rows[0][t] + of_head.rows[1][t] - columns;
                skip_grad += of_head.diagonal[t];
            }
            before[k] = of_head.end[0][t] + of_head.end[1][t];
            inside[k] = of_head.inside[0][t] + of_head.inside[1][t];
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) whole += of_head.whole[w];
        // Sums of `later` from a step on, and of `before` up to the step before.
        ExactSum from = later[0] + later[1], through = before[0] + before[1];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const ExactSum higher = from_higher(from, distance), lower = from_lower(through, distance);
            if (lane + distance < 32) from += higher;
            if (lane >= distance) through += lower;
        }
        const ExactSum higher = from_higher(from, 1), lower = from_lower(through, 1);
        const float all = fast_exp2(of.sums[CHUNK - 1].value) * whole;
        const float exponent_grads[2] = {
            float((lane < 31 ? higher : 0) + later[1] + later[0] + (lane ? lower : 0) + all),
            float((lane < 31 ? higher : 0) + later[1] + (lane ? lower : 0) + before[0] + all),
        };
        const bool again = !FIRST || of.first > 0;  // an earlier pass or tile of this head has stored its terms
        const float A = args.steps.A[head];
        float A_grad = 0;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int t = 2 * lane + k;
            A_grad += of.dt[t] * exponent_grads[k];
            if (t >= range.steps) continue;
            float* const to = args.dt_grad + (first_step + t) * sizes.heads + head;
            *to = (again ? *to : 0) + slopes[of.number * CHUNK + t] * (inside[k] + A * exponent_grads[k]);
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) {
            A_grad += __shfl_xor_sync(FULL_WARP, A_grad, distance);
            skip_grad += __shfl_xor_sync(FULL_WARP, skip_grad, distance);
        }
        if (lane == 0) {
            float* const to_A = args.A_grad + term_at(head);
            *to_A = (again ? *to_A : 0) + A_grad;
            if (FIRST && args.D_grad) {
                float* const to_D = args.D_grad + term_at(head);
                *to_D = (again ? *to_D : 0) + skip_grad;
            }
        }
    }
    __device__ void store_nothing() const {
        for (int h = threadIdx.x; h < heads; h += THREADS) {
            args.A_grad[term_at(first_head + h)] = 0;
            if (args.D_grad) args.D_grad[term_at(first_head + h)] = 0;
        }
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
                store_float2(args.C_grad + of_tile, C_grad[n][2 * k], C_grad[n][2 * k + 1]);
                store_float2(args.B_grad + of_tile, B_grad[n][2 * k], B_grad[n][2 * k + 1]);
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ssd_scan_backward(const Storage* x, const void* dt, const float* A, const Storage* B, const Storage* C, const float* D,
                  const float* dt_bias, const Storage* out_grad, const int* cu_seqlens, const int* seq_idx,
                  const Storage* states, const Storage* adjoints, Storage* x_grad, float* dt_grad, float* A_grad,
                  float* D_grad, float* B_grad, float* C_grad, i64 batch, i64 time, i64 heads, i64 groups,
                  i64 head_size, i64 state_size, i64 sequences, i64 slots, i64 splits, i64 D_channel, i64 flags,
                  i64 dt_low, i64 dt_high, i64 x_batch, i64 x_time, i64 x_head, i64 dt_batch, i64 dt_time, i64 dt_head,
                  i64 B_batch, i64 B_time, i64 B_group, i64 C_batch, i64 C_time, i64 C_group, i64 grad_batch,
                  i64 grad_time, i64 grad_head) {
    Backward({{x, x_batch, x_time, x_head},
              {B, B_batch, B_time, B_group},
              {C, C_batch, C_time, C_group},
              {out_grad, grad_batch, grad_time, grad_head},
              {dt, dt_batch, dt_time, dt_head, A, dt_bias, seq_idx, time, flags, __uint_as_float(unsigned(dt_low)),
               __uint_as_float(unsigned(dt_high))},
              D, D_channel, cu_seqlens, states, adjoints, x_grad, dt_grad, A_grad, D_grad, B_grad, C_grad,
              {batch, time, heads, groups, head_size, state_size, sequences, slots},
              splits})
        .run();
}
