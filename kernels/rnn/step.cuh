// One step of a recurrent network without its product with R: a thread has a pair of units of one batch.
//
//     threads  ->  (batch, heads, dim / 2), the last one fastest
#pragma once
#include "cells.cuh"

enum : int { THREADS = 32 * WARPS };

struct Pairs {
    const i64 batches, heads, dim;
    const i64 number = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i64 offset = 2 * number % (heads * dim);  // in (heads, dim)
    const i64 batch = 2 * number / (heads * dim);

    __device__ bool there() const { return batch < batches; }
    __device__ i64 block_of() const { return heads * dim; }
    __device__ i64 of_state() const { return batches * heads * dim; }
    __device__ i64 own() const { return batch * block_of() + offset; }  // in (batch, heads, dim)
    // In (heads, batch, gates, dim), of the first gate.
    __device__ i64 in_terms(int gates) const {
        return ((offset / dim * batches + batch) * gates) * dim + offset % dim;
    }
};

// COUNT pairs that are `stride` apart; zeros where `from` is null or there are fewer.
template <int COUNT>
__device__ void load_pairs(float (&to)[2][COUNT], const Storage* from, i64 stride, int count) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        const float2 x = from && k < count ? load_pair(from + k * stride) : make_float2(0, 0);
        to[0][k] = x.x;
        to[1][k] = x.y;
    }
}
template <int COUNT>
__device__ void store_pairs(Storage* to, i64 stride, const float (&from)[2][COUNT], int count) {
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (k < count) store_pair(to + k * stride, make_float2(from[0][k], from[1][k]));
}
template <int COUNT>
__device__ void load_floats(float (&to)[2][COUNT], const float* from, i64 stride) {
#pragma unroll
    for (int k = 0; k < COUNT; k++)
#pragma unroll
        for (int i = 0; i < 2; i++) to[i][k] = from[k * stride + i];
}
