// What the forward kernels share: their arguments, the steps of chunks in shared memory, and a chunk's outputs, which four warps
// compute, 16 steps each.
#pragma once
#include "../common/barrier.cuh"
#include "running_states.cuh"

enum : int { CHUNK = 64 };

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
    char* workspace;

    // A sequence's states of a head, in a tensor of float32 or null.
    template <class T>
    __device__ T* states_of(T* states, int batch, int sequence, int head, int first_number) const {
        const i64 of_head = (i64(batch) * sizes.sequences + sequence) * sizes.heads + head;
        return states ? states + (of_head * sizes.head_size + first_number) * sizes.state_size : states;
    }
};

// The steps of so many chunks.
template <int CHUNKS>
struct Steps {
    StoredSum sums[CHUNKS][CHUNK];
    float dt[CHUNKS][CHUNK];
    float weights[CHUNKS][CHUNK];  // of what steps add to the state after the chunk
    float later[CHUNKS][CHUNK];    // of what steps add to outputs after their block of 16: exp(s_b - s_j)·dt_j, b the block's last step
    float decays[CHUNKS];          // over the chunk

    // A warp's, whose lanes have them, as those of chunk number `chunk`.
    __device__ void store(int chunk, const LaneSteps<2>& own) {
        const int lane = threadIdx.x % 32;
        const ExactSum block = __shfl_sync(FULL_WARP, own.sum[1], lane | 7);
        float after[2], in_block[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            after[k] = own.dt[k] * exp2_of(own.total - own.sum[k]);
            in_block[k] = own.dt[k] * exp2_of(block - own.sum[k]);
        }
        reinterpret_cast<TwoSums*>(sums[chunk])[lane] = {stored(own.sum[0]), stored(own.sum[1])};
        store_float2(dt[chunk] + 2 * lane, own.dt[0], own.dt[1]);
        store_float2(weights[chunk] + 2 * lane, after[0], after[1]);
        store_float2(later[chunk] + 2 * lane, in_block[0], in_block[1]);
        if (lane == 0) decays[chunk] = exp2_of(own.total);
    }
};

// What scores C_i·B_j of a warp's 16 steps i, those from `row` on, become: exp(s_i - s_j)·dt_j·(C_i·B_j) for j ≤ i, else 0. With b the
// last step of the block of 16 that j is in, exp(s_i - s_j) is exp(s_i - s_b)·exp(s_b - s_j) for later blocks: no factor is above 1.
struct Mask {
    const StoredSum* sums;
    const float *later, *dt;
    int row;
    StoredSum sum0, sum1;  // the lane's own

    template <int CHUNKS>
    __device__ Mask(const Steps<CHUNKS>& steps, int chunk, int row)
        : sums(steps.sums[chunk]), later(steps.later[chunk]), dt(steps.dt[chunk]), row(row), sum0(sums[row + lane_row()]),
          sum1(sums[row + lane_row() + 8]) {}

    // For 16 steps from j on, as the left operand of a product with x.
    __device__ Fragment of(const float (&scores)[CHUNK / 8][4], int j) const {
        if (j > row) return {};
        float m[2][4];
        if (j < row) {
            const StoredSum block = sums[j + 15];
            const float decay0 = fast_exp2(sum0 - block), decay1 = fast_exp2(sum1 - block);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 factor = *reinterpret_cast<const float2*>(later + j + 8 * half + lane_column());
#pragma unroll
                for (int k = 0; k < 4; k++)
                    m[half][k] = scores[j / 8 + half][k] * ((k / 2 ? decay1 : decay0) * (k % 2 ? factor.y : factor.x));
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = j + 8 * half + lane_column();
                const TwoSums sum = *reinterpret_cast<const TwoSums*>(sums + column);
                const float2 factor = *reinterpret_cast<const float2*>(dt + column);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int distance = lane_row() + k / 2 * 8 - (lane_column() + k % 2 + 8 * half);
                    const float decay = fast_exp2((k / 2 ? sum1 : sum0) - (k % 2 ? sum.y : sum.x));
                    m[half][k] = distance >= 0 ? scores[j / 8 + half][k] * (decay * (k % 2 ? factor.y : factor.x)) : 0;
                }
            }
        }
        return fragment_of(m[0], m[1]);
    }
    // exp(s_i) of the lane's two rows.
    __device__ float2 before() const { return make_float2(fast_exp2(sum0.value), fast_exp2(sum1.value)); }
};

// y += D·x, where `D_of(channel)` has the D of two channels.
template <class T, class F>
__device__ inline void add_skip(float (&y)[SIZE / 8][4], T x, int row, F D_of) {
    const unsigned at = x.lane_of_sums(row);
#pragma unroll
    for (int p = 0; p < SIZE / 8; p++) {
        const Pair x0 = load_pair(x.moved(at, 0, 8 * p)), x1 = load_pair(x.moved(at, 8, 8 * p));
        const float2 D = D_of(8 * p + lane_column());
        y[p][0] += D.x * low_of(x0), y[p][1] += D.y * high_of(x0);
        y[p][2] += D.x * low_of(x1), y[p][3] += D.y * high_of(x1);
    }
}

// The rows of outputs from a step on.
__device__ inline Storage* out_rows(const Sizes& sizes, Storage* out, int batch, int step, int head) {
    return out + (i64(batch) * sizes.time + step) * sizes.heads * sizes.head_size + head * sizes.head_size;
}
#if WIDE
// Store `rows` rows of `numbers` numbers, `apart` elements from each other: four lanes 32 bytes of a row at a time.
__device__ inline void store_rows(Storage* rows_of_chunk, const float (&y)[SIZE / 8][4], int row, int rows, int numbers, i64 apart) {
    const int own = row + lane_row();
    Storage* const to = rows_of_chunk + own * apart + lane_column();
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int p = 0; p < SIZE / 8; p++)
            if (own + 8 * k < rows && 8 * p + lane_column() < numbers)
                *reinterpret_cast<Pair*>(to + 8 * k * apart + 8 * p) = pair_of(y[p][2 * k], y[p][2 * k + 1]);
}
#else
// Of four words that each of four neighbouring lanes has, word `lane % 4` of all four lanes.
__device__ inline uint4 transposed(unsigned a, unsigned b, unsigned c, unsigned d) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const unsigned from_a = __shfl_xor_sync(FULL_WARP, odd ? a : b, 1);
    const unsigned from_c = __shfl_xor_sync(FULL_WARP, odd ? c : d, 1);
    const unsigned a1 = odd ? from_a : a, b1 = odd ? b : from_a, c1 = odd ? from_c : c, d1 = odd ? d : from_c;
    const unsigned first = __shfl_xor_sync(FULL_WARP, high ? a1 : c1, 2);
    const unsigned second = __shfl_xor_sync(FULL_WARP, high ? b1 : d1, 2);
    return high ? make_uint4(first, second, c1, d1) : make_uint4(a1, b1, first, second);
}
// Store `rows` rows of `numbers` numbers, `apart` elements from each other. Four lanes share a row: after transposing, each stores
// one piece of 16 bytes in each 32 columns.
__device__ inline void store_rows(Storage* rows_of_chunk, const float (&y)[SIZE / 8][4], int row, int rows, int numbers, i64 apart) {
    const int own = row + lane_row(), piece = threadIdx.x % 4 * PIECE;
    Storage* const to = rows_of_chunk + own * apart + piece;
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int p = 0; p < SIZE / 8; p += 4) {
            unsigned words[4];
#pragma unroll
            for (int q = 0; q < 4; q++) words[q] = pair_of(y[p + q][2 * k], y[p + q][2 * k + 1]);
            const uint4 values = transposed(words[0], words[1], words[2], words[3]);
            if (own + 8 * k < rows && piece + 8 * p < numbers)
                *reinterpret_cast<uint4*>(to + 8 * k * apart + 8 * p) = values;
        }
}
#endif
