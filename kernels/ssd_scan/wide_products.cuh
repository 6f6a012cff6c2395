// Products of float32. Tensor cores multiply numbers of 11 bits, so each number is the sum of two, large and small; of the four
// products of parts that of the small ones, about 2^-22 of the whole, is left out. What tensor cores add up is rounded towards zero,
// so they add 16 of K alone to each sum; that is then rounded to nearest.
#pragma once
#include "../common/mma.cuh"
#include "tile.cuh"

// Which two of eight of K a lane with q = lane % 4 has: q and q + 4, or 2 · q and the next, those that it has of sums.
enum Order : int { IN_ORDER, IN_PAIRS };

// A warp's 16 rows and 16 of K of an operand A, in registers: of eight of K each, x and z are the lane's two of K of row `lane_row()`,
// y and w those of the row eight further.
struct Fragment {
    uint4 eights[2];
};

// `start` is the tile's row (ALONG_K) or column (ACROSS_K), a multiple of 32, that is the product's row or column 0.
template <Lies LIES, class T>
struct Operand {
    T tile;
    int start = 0;

    // Of rows of A from `first` on, or of columns of B, where the lane's words begin.
    template <Order ORDER>
    __device__ unsigned lane(int first = 0) const {
        const int number = threadIdx.x % 32;
        if constexpr (LIES == ALONG_K) return tile.at(start + first + number % 16, number / 16 * PIECE);
        else return tile.at(number % 4 * (ORDER == IN_PAIRS ? 2 : 1), start + first + number / 4);
    }
    // Of 16 rows of A, or columns of B, and eight of K from `k` on, as in a fragment.
    template <Order ORDER>
    __device__ uint4 load(unsigned lane, int product, int k) const {
        if constexpr (LIES == ALONG_K) {
            static_assert(ORDER == IN_ORDER);
            return load_matrices(false, T::moved(lane, product, k));
        } else {
            const int next = k + (ORDER == IN_PAIRS ? 1 : 4);
            return make_uint4(load_word(T::moved(lane, k, product)), load_word(T::moved(lane, k, product + 8)),
                              load_word(T::moved(lane, next, product)), load_word(T::moved(lane, next, product + 8)));
        }
    }
    // As `multiply_registers` takes it.
    __device__ unsigned lane_of_A(int row) const { return lane<IN_PAIRS>(row); }
    __device__ Fragment load_A(unsigned lane, int k) const { return fragment<IN_PAIRS>(lane, k); }
    template <Order ORDER>
    __device__ Fragment fragment(unsigned lane, int k) const {
        return {{load<ORDER>(lane, 0, k), load<ORDER>(lane, 0, k + 8)}};
    }
};

__device__ inline unsigned large_of(unsigned x) { return (x + 0x1000u) & 0xffffe000u; }
__device__ inline unsigned small_of(unsigned x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(large_of(x)));
}
struct Parts {
    uint4 large, small;

    __device__ explicit Parts(uint4 x)
        : large(make_uint4(large_of(x.x), large_of(x.y), large_of(x.z), large_of(x.w))),
          small(make_uint4(small_of(x.x), small_of(x.y), small_of(x.z), small_of(x.w))) {}
};

__device__ inline void begin_products() {}
__device__ inline void close_products() {}
template <int LEFT, int N>
__device__ inline void wait_for_products(float (&)[N][4]) {}

// sums += A·B, of 16 of K.
template <Order ORDER, Lies B_LIES, class TB, int N>
__device__ void multiply_fragment(float (&sums)[N][4], const Fragment& fragment, Operand<B_LIES, TB> b, int k) {
    const Parts a[2] = {Parts(fragment.eights[0]), Parts(fragment.eights[1])};
    const unsigned lane = b.template lane<ORDER>();
    const auto of_eight = [](uint4 x, int i) { return i ? make_uint2(x.y, x.w) : make_uint2(x.x, x.z); };
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        const Parts columns[2] = {Parts(b.template load<ORDER>(lane, 8 * n, k)),
                                  Parts(b.template load<ORDER>(lane, 8 * n, k + 8))};
        float products[2][4];
        clear(products);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma_tf32(products[i], a[half].small, of_eight(columns[half].large, i));
                mma_tf32(products[i], a[half].large, of_eight(columns[half].small, i));
            }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 2; i++) mma_tf32(products[i], a[half].large, of_eight(columns[half].large, i));
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[n + i][j] += products[i][j];
    }
}
template <Lies B_LIES, class TB, int N>
__device__ void multiply_registers(float (&sums)[N][4], const Fragment& a, Operand<B_LIES, TB> b, int k) {
    multiply_fragment<IN_PAIRS>(sums, a, b, k);
}
// sums = A·B, or with MORE sums += A·B.
template <int K, bool MORE, Lies A_LIES, Lies B_LIES, class TA, class TB, int N>
__device__ void multiply(float (&sums)[N][4], Operand<A_LIES, TA> a, Operand<B_LIES, TB> b) {
    if constexpr (!MORE) clear(sums);
    const unsigned lane = a.template lane<IN_ORDER>(threadIdx.x / 32 % 4 * 16);
#pragma unroll 1
    for (int k = 0; k < K; k += 32)  // what is unrolled stays in the instruction cache
#pragma unroll
        for (int half = 0; half < 32; half += 16)
            multiply_fragment<IN_ORDER>(sums, a.template fragment<IN_ORDER>(lane, k + half), b, k + half);
}

// Of 16 × 16 sums.
__device__ inline Fragment fragment_of(const float (&left)[4], const float (&right)[4]) {
    const auto eight = [](const float (&sums)[4]) {
        const Pair upper = pair_of(sums[0], sums[1]), lower = pair_of(sums[2], sums[3]);
        return make_uint4(upper.x, lower.x, upper.y, lower.y);
    };
    return {{eight(left), eight(right)}};
}
// The lane's columns of a fragment times `first`, those of the first eight, and `second`.
__device__ inline Fragment scaled(const Fragment& a, float2 first, float2 second) {
    const auto scale = [](uint4 x, float2 factors) {
        const auto times = [](unsigned a, float b) { return __float_as_uint(__uint_as_float(a) * b); };
        return make_uint4(times(x.x, factors.x), times(x.y, factors.x), times(x.z, factors.y), times(x.w, factors.y));
    };
    return {{scale(a.eights[0], first), scale(a.eights[1], second)}};
}
