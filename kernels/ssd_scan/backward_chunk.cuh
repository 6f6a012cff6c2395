// What the backward kernels share: the place of a CTA in the tensors, the step sizes and decays of its heads, and sums over their steps.
#pragma once
#include "products.cuh"
#include "steps.cuh"

enum : int {
    CHUNK = 64,
    MOST_HEADS = WIDE ? 16 : 32,  // of a CTA
    INPUT = ELEMENT_BYTES * CHUNK * STATES,  // bytes of B, and of C
};

struct Arguments {
    Strided x, B, C, grad;
    StepInputs steps;
    const float* D;
    i64 D_channel;  // elements from a channel of D to the next: 1, or 0 for one number a head
    const int* cu_seqlens;
    const Storage *states, *adjoints;
    Storage* x_grad;
    float *dt_grad, *head_grads;
    void *B_grad, *C_grad;  // of float or, if there is one split, Storage
    Sizes sizes;
    i64 splits;  // CTAs that share the heads of a group
    char* workspace;
};

// A head tile: the head's index in the CTA, the tile's first channel of the head, and the steps' sums and dt in shared memory.
struct Head {
    int number, first;
    const StoredSum* sums;
    const float* dt;
};
// What `store_terms` sums up: terms of the lane's steps 2 · lane and the next, and of the chunk.
struct LaneTerms {
    ExactSum rows[2], columns[2];  // exp(s_t)·dy_t·S·C_t + Σ_j L·dt·X·(C·Bᵀ), and Σ_i L·X·(C·Bᵀ), both but for the diagonal
    ExactSum end[2];               // w_t·x_t·G·B_t
    float diagonal[2], scored[2];  // X_tt, and X_tt·(C_t·B_t)
    float whole;                   // S·G
};

struct BackwardChunk {
    const Arguments& args;
    const Sizes& sizes = args.sizes;

    // Of all heads and steps: sums, step sizes, and the derivatives of these by raw dt + dt_bias.
    StoredSum* const all_sums;
    float* const all_dt = reinterpret_cast<float*>(all_sums + MOST_HEADS * CHUNK);
    float* const slopes = all_dt + MOST_HEADS * CHUNK;
    char* const after_steps = reinterpret_cast<char*>(slopes + MOST_HEADS * CHUNK);

    const int lane = threadIdx.x % 32, warp = warp_number(), row = warp % 4 * 16;
    const int own = row + lane_row();  // the lane's first row of all products
    const int slot = int(blockIdx.x % unsigned(sizes.slots)), batch = int(blockIdx.x / unsigned(sizes.slots));
    const int splits = int(args.splits);
    const int group = int(blockIdx.y) / splits, split = int(blockIdx.y) % splits;
    const int group_heads = int(sizes.heads) / int(sizes.groups), per_cta = (group_heads + splits - 1) / splits;
    const int first_head = group * group_heads + split * per_cta;
    const int heads = smaller(group_heads - split * per_cta, per_cta);
    const int head_size = int(sizes.head_size), head_tiles = (head_size + SIZE - 1) / SIZE, tiles = heads * head_tiles;
    const ChunkRange range = chunk_range<CHUNK>(sizes, args.cu_seqlens, slot);
    const i64 first_step = batch * sizes.time + range.begin;
    // Where the CTA's first head begins in the states.
    const i64 first_state_at = ((batch * sizes.slots + slot) * sizes.heads + first_head) * sizes.head_size * sizes.state_size;

    // The first state of the block that is worked on. Head tiles take the last block first.
    const int last_block = (int(sizes.state_size) - 1) / STATES * STATES;
    int first_state = 0;
    __device__ int states_left() const { return int(sizes.state_size) - first_state; }

    __device__ BackwardChunk(const Arguments& args, char* steps) : args(args), all_sums(reinterpret_cast<StoredSum*>(steps)) {}

    __device__ Head head(int i) const {
        const int h = i >> (head_tiles - 1);  // a head has one tile or two
        return {h, (i - h * head_tiles) * SIZE, all_sums + h * CHUNK, all_dt + h * CHUNK};
    }
    template <class T>
    __device__ static T of_quarter(T x) {  // the sum over the four lanes that share rows
        x += __shfl_xor_sync(FULL_WARP, x, 1);
        return x + __shfl_xor_sync(FULL_WARP, x, 2);
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

    // dt_grad, and the chunk's terms of the gradients of A, D and dt_bias, by one warp. `first`: of the block of
    // states that comes first, with which come the terms that do not depend on states.
    __device__ void store_terms(const Head& of, const LaneTerms& terms, float A, bool first) const {
        ExactSum later[2], before[2];
        float dt[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            dt[k] = of.dt[2 * lane + k];
            later[k] = terms.rows[k] - dt[k] * terms.columns[k], before[k] = dt[k] * terms.end[k];
        }
        // Sums of `later` from a step on, and of `before` up to the step before.
        ExactSum from = later[0] + later[1], through = before[0] + before[1];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const ExactSum higher = from_higher(from, distance), lower = from_lower(through, distance);
            if (lane + distance < 32) from += higher;
            if (lane >= distance) through += lower;
        }
        const ExactSum higher = from_higher(from, 1), lower = from_lower(through, 1);
        const float all = fast_exp2(of.sums[CHUNK - 1].value) * terms.whole;
        const float exponent_grads[2] = {
            float((lane < 31 ? higher : 0) + later[1] + later[0] + (lane ? lower : 0) + all),
            float((lane < 31 ? higher : 0) + later[1] + (lane ? lower : 0) + before[0] + all),
        };
        const int head = first_head + of.number;
        const bool again = !first || of.first > 0;  // an earlier block or tile of this head has stored its terms
        float of_head[3] = {0, terms.diagonal[0] + terms.diagonal[1], 0};  // of A, D and dt_bias
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int t = 2 * lane + k;
            of_head[0] += dt[k] * exponent_grads[k];
            if (t >= range.steps) continue;
            float* const to = args.dt_grad + (first_step + t) * sizes.heads + head;
            const float inside = float(terms.end[k] + terms.columns[k]) + terms.scored[k];  // x_t·u_t
            const float grad = slopes[of.number * CHUNK + t] * (inside + A * exponent_grads[k]);
            of_head[2] += grad;
            *to = (again ? *to : 0) + grad;
        }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) {
#pragma unroll
            for (float& sum : of_head) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        }
        if (lane == 0) {
#pragma unroll
            for (int k = 0; k < 3; k++) {
                float* const to = args.head_grads + term_at(k, head);
                *to = (again ? *to : 0) + of_head[k];
            }
        }
    }
    __device__ void store_nothing() const {
        for (int h = threadIdx.x; h < heads; h += blockDim.x)
            for (int k = 0; k < 3; k++) args.head_grads[term_at(k, first_head + h)] = 0;
    }
    // Where the chunk's term of a head's gradient is, of A, D or dt_bias.
    __device__ i64 term_at(int which, int head) const {
        return ((which * sizes.batch + batch) * sizes.slots + slot) * sizes.heads + head;
    }
    // Two numbers of B_grad or C_grad.
    __device__ void store_sum(void* grad, i64 at, float x, float y) const {
        if (splits > 1) return store_float2(static_cast<float*>(grad) + at, x, y);
        *reinterpret_cast<Pair*>(static_cast<Storage*>(grad) + at) = pair_of(x, y);
    }
};
