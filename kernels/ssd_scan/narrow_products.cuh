// Products of elements of 16 bits: by four warps together, where the GPU can, else by each warp.
#pragma once
#include "../common/mma.cuh"
#include "tile.cuh"

// `start` is the tile's row (ALONG_K) or column (ACROSS_K) that is the product's row or column 0.
template <Lies LIES, class T>
struct Operand {
    T tile;
    int start = 0;

    // A descriptor of wgmma from `k` on, in units of 16 bytes: address, leading offset (64 columns, read for ACROSS_K alone) and
    // stride offset (eight rows); and the swizzle of 128 bytes.
    __device__ u64 described(int k) const {
        const unsigned address = LIES == ALONG_K ? tile.address + start * T::ROW + k / 64 * T::BLOCK + k % 64 * 2
                                                 : tile.address + start / 64 * T::BLOCK + start % 64 * 2 + k * T::ROW;
        return u64(1) << 62 | u64(8 * T::ROW / 16) << 32 | u64(T::BLOCK / 16) << 16 | address / 16;
    }

    // Four matrices of 8 × 8 elements: of an operand A, 16 rows from `row` on and 16 of K from `k` on; of B, x and y for 8
    // columns, z and w for the next.
    __device__ unsigned lane_of_A(int row) const { return lane(LIES == ALONG_K, row); }
    __device__ unsigned lane_of_B() const { return lane(LIES == ACROSS_K, 0); }
    __device__ uint4 load_A(unsigned lane, int k) const { return load(LIES == ACROSS_K, lane, 0, k); }
    __device__ uint4 load_B(unsigned lane, int column, int k) const { return load(LIES == ACROSS_K, lane, column, k); }

private:
    // Matrix 1 of an ldmatrix is below matrix 0 (lanes 0 to 15 address rows 0 to 15), or to the right of it.
    __device__ unsigned lane(bool below, int first) const {
        const int number = threadIdx.x % 32, eight = number / 8, in_eight = number % 8;
        const int row = in_eight + 8 * (below ? eight % 2 : eight / 2), column = PIECE * (below ? eight / 2 : eight % 2);
        return LIES == ALONG_K ? tile.at(start + first + row, column) : tile.moved(tile.at(row, column), 0, start + first);
    }
    __device__ static uint4 load(bool transposed, unsigned lane, int product, int k) {
        const unsigned row = LIES == ALONG_K ? T::moved(lane, product, k) : T::moved(lane, k, product);
        return load_matrices(transposed, row);
    }
};
// A warp's 16 rows and 16 of K of an operand A, in registers.
using Fragment = uint4;

#if BY_WARPGROUPS
// TYPES names the element types in PTX; a macro of ELEMENT, as a template argument cannot go into a string of assembly.
#define bfloat16_TYPES "bf16.bf16"
#define float16_TYPES "f16.f16"
#define TYPES OF_ELEMENT(ELEMENT, _TYPES)

template <Lies A_LIES, Lies B_LIES>
__device__ inline void multiply_together(float (&s)[4][4], u64 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred more;\n\tsetp.ne.b32 more, %18, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPES
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, more, 1, 1, %19, %20; }"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]),
          "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), "+f"(s[1][3]),
          "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]),
          "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3])
        : "l"(a), "l"(b), "r"(more), "n"(int(A_LIES)), "n"(int(B_LIES))
        : "memory");
}

template <Lies A_LIES, Lies B_LIES>
__device__ inline void multiply_together(float (&s)[8][4], u64 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred more;\n\tsetp.ne.b32 more, %34, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, more, 1, 1, %35, %36; }"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]),
          "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), "+f"(s[1][3]),
          "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]),
          "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3]),
          "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]),
          "+f"(s[5][0]), "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3]),
          "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]),
          "+f"(s[7][0]), "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3])
        : "l"(a), "l"(b), "r"(more), "n"(int(A_LIES)), "n"(int(B_LIES))
        : "memory");
}

template <Lies B_LIES>
__device__ inline void multiply_together(float (&s)[8][4], uint4 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred more;\n\tsetp.ne.b32 more, %37, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, more, 1, 1, %38; }"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]),
          "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]), "+f"(s[1][3]),
          "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]),
          "+f"(s[3][0]), "+f"(s[3][1]), "+f"(s[3][2]), "+f"(s[3][3]),
          "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]),
          "+f"(s[5][0]), "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3]),
          "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]),
          "+f"(s[7][0]), "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(more), "n"(int(B_LIES))
        : "memory");
}

// wgmma is asynchronous: sums and operands are left alone from `begin_products` until `wait_for_products<LEFT>` returns, when at
// most LEFT of the groups that `close_products` committed still run.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT, int N>
__device__ inline void wait_for_products(float (&sums)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int n = 0; n < N; n++)  // so that the compiler reads no sum earlier
        asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])::"memory");
}
// sums = A·B, or with MORE sums += A·B.
template <int K, bool MORE, Lies A_LIES, Lies B_LIES, class TA, class TB, int N>
__device__ void multiply(float (&sums)[N][4], Operand<A_LIES, TA> a, Operand<B_LIES, TB> b) {
#pragma unroll
    for (int k = 0; k < K; k += 16)
        multiply_together<A_LIES, B_LIES>(sums, a.described(k), b.described(k), MORE || k);
}
// sums += A·B, or without `more` sums = A·B, where a lane has its part of 16 of K of A in registers.
template <Lies B_LIES, class TB, int N>
__device__ void multiply_registers(float (&sums)[N][4], Fragment a, Operand<B_LIES, TB> b, int k, int more = 1) {
    multiply_together<B_LIES>(sums, a, b.described(k), more);
}
#else
__device__ inline void begin_products() {}
__device__ inline void close_products() {}
template <int LEFT, int N>
__device__ inline void wait_for_products(float (&)[N][4]) {}
template <Lies B_LIES, class TB, int N>
__device__ void multiply_registers(float (&sums)[N][4], Fragment a, Operand<B_LIES, TB> b, int k, int more = 1) {
    if (!more) clear(sums);
    const unsigned lane = b.lane_of_B();
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        const uint4 columns = b.load_B(lane, 8 * n, k);
        if constexpr (Element::ONE == 0x3f80u) {
            mma_bfloat16(sums[n], a, make_uint2(columns.x, columns.y));
            mma_bfloat16(sums[n + 1], a, make_uint2(columns.z, columns.w));
        } else {
            mma_float16(sums[n], a, make_uint2(columns.x, columns.y));
            mma_float16(sums[n + 1], a, make_uint2(columns.z, columns.w));
        }
    }
}
template <int K, bool MORE, Lies A_LIES, Lies B_LIES, class TA, class TB, int N>
__device__ void multiply(float (&sums)[N][4], Operand<A_LIES, TA> a, Operand<B_LIES, TB> b) {
    if constexpr (!MORE) clear(sums);
    const unsigned lane = a.lane_of_A(threadIdx.x / 32 % 4 * 16);
#pragma unroll
    for (int k = 0; k < K; k += 16) multiply_registers(sums, a.load_A(lane, k), b, k);
}
#endif

// Of 16 × 16 sums.
__device__ inline Fragment fragment_of(const float (&left)[4], const float (&right)[4]) {
    return make_uint4(pair_of(left[0], left[1]), pair_of(left[2], left[3]), pair_of(right[0], right[1]),
                      pair_of(right[2], right[3]));
}
// The lane's columns of a fragment times `first`, those of the first eight, and `second`.
__device__ inline Fragment scaled(Fragment a, float2 first, float2 second) {
    const auto scale = [](Pair pair, float2 factors) {
        return pair_of(low_of(pair) * factors.x, high_of(pair) * factors.y);
    };
    return make_uint4(scale(a.x, first), scale(a.y, first), scale(a.z, second), scale(a.w, second));
}
