// Products of matrices on tensor cores, of tiles in shared memory, by four warps.
#pragma once
#include "../common/mma.cuh"
#include "tile.cuh"

// Four warps compute 64 rows and 8 · N columns of a product, 16 rows each: a lane has, of each 8 columns, column `lane_column()`
// and the next, of row `lane_row()` and the one eight further. K is the dimension that is summed over. An operand is a part of a
// tile, whose rows are the product's rows or columns (ALONG_K: a row's elements lie along K), or whose rows are K (ACROSS_K).
__device__ inline int lane_row() { return threadIdx.x % 32 / 4; }
__device__ inline int lane_column() { return threadIdx.x % 4 * 2; }

enum Lies : int { ALONG_K = 0, ACROSS_K = 1 };

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
template <class T>
__device__ Operand<ALONG_K, T> along_k(T tile, int start = 0) { return {tile, start}; }
template <class T>
__device__ Operand<ACROSS_K, T> across_k(T tile, int start = 0) { return {tile, start}; }

template <int N>
__device__ inline void clear(float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) sums[n][k] = 0;
}

#if BY_WARPGROUPS
// TYPES names the element types in PTX; a macro of ELEMENT, as a template argument cannot go into a string of assembly.
#define bfloat16_TYPES "bf16.bf16"
#define float16_TYPES "f16.f16"
#define JOINED(a, b) a##b
#define TYPES_OF(element) JOINED(element, _TYPES)
#define TYPES TYPES_OF(ELEMENT)

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
// sums += A·B, where a lane has its part of 16 of K of A in registers.
template <Lies B_LIES, class TB, int N>
__device__ void multiply_registers(float (&sums)[N][4], uint4 a, Operand<B_LIES, TB> b, int k) {
    multiply_together<B_LIES>(sums, a, b.described(k), 1);
}
#else
__device__ inline void begin_products() {}
__device__ inline void close_products() {}
template <int LEFT, int N>
__device__ inline void wait_for_products(float (&)[N][4]) {}
template <Lies B_LIES, class TB, int N>
__device__ void multiply_registers(float (&sums)[N][4], uint4 a, Operand<B_LIES, TB> b, int k) {
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

// products *= scales, and sums += scales · products, with a scale for each of the lane's two rows.
template <int N>
__device__ inline void scale_rows(float (&products)[N][4], float2 scales) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        products[n][0] *= scales.x, products[n][1] *= scales.x;
        products[n][2] *= scales.y, products[n][3] *= scales.y;
    }
}
template <int N>
__device__ inline void add_scaled(float (&sums)[N][4], const float (&products)[N][4], float2 scales) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        sums[n][0] += scales.x * products[n][0], sums[n][1] += scales.x * products[n][1];
        sums[n][2] += scales.y * products[n][2], sums[n][3] += scales.y * products[n][3];
    }
}

__device__ inline float low_of(unsigned pair) { return Element::widen(Storage(pair)); }
__device__ inline float high_of(unsigned pair) {
    if constexpr (Element::ONE == 0x3f80u) return __uint_as_float(pair & 0xffff0000u);
    else return Element::widen(Storage(pair >> 16));
}
__device__ inline unsigned scaled(unsigned pair, float2 factors) {
    return Element::narrow_two(low_of(pair) * factors.x, high_of(pair) * factors.y);
}
