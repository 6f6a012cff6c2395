// Products of matrices on tensor cores, of tiles in shared memory, by four warps.
#pragma once
#include "tile.cuh"

// Four warps compute 64 rows and 8 · N columns of a product, 16 rows each: a lane has, of each 8 columns, column `lane_column()`
// and the next, of row `lane_row()` and the one eight further. K is the dimension that is summed over. An operand is a part of a
// tile, whose rows are the product's rows or columns (ALONG_K: a row's elements lie along K), or whose rows are K (ACROSS_K).
__device__ inline int lane_row() { return threadIdx.x % 32 / 4; }
__device__ inline int lane_column() { return threadIdx.x % 4 * 2; }

enum Lies : int { ALONG_K = 0, ACROSS_K = 1 };

template <int N>
__device__ inline void clear(float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) sums[n][k] = 0;
}

#if WIDE
#include "wide_products.cuh"
#else
#include "narrow_products.cuh"
#endif

template <class T>
__device__ Operand<ALONG_K, T> along_k(T tile, int start = 0) { return {tile, start}; }
template <class T>
__device__ Operand<ACROSS_K, T> across_k(T tile, int start = 0) { return {tile, start}; }

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
// Store a warp's 16 rows of sums in a tile, rounded, from row `row` and column `column` on.
template <class T, int N>
__device__ inline void store_sums(T to, const float (&sums)[N][4], int row, int column = 0) {
#if BY_WARPGROUPS
    const int matrix = threadIdx.x % 32 / 8;
    const unsigned at = to.at(row + threadIdx.x % 8 + matrix % 2 * 8, matrix / 2 * PIECE);
#pragma unroll
    for (int n = 0; n < N; n += 2) store_matrices(to.moved(at, 0, column + 8 * n), fragment_of(sums[n], sums[n + 1]));
#else
    const unsigned at = to.lane_of_sums(row);
#pragma unroll
    for (int n = 0; n < N; n++) {
        store_pair(to.moved(at, 0, column + 8 * n), sums[n][0], sums[n][1]);
        store_pair(to.moved(at, 8, column + 8 * n), sums[n][2], sums[n][3]);
    }
#endif
}
