// The order in which CTAs take packed sequences: the longest first. To be included where THREADS, the threads of a CTA, is known.
#pragma once
#include "../common/types.cuh"

// With more CTAs than these a launch takes many waves, and the last wave hardly matters. CTAs with short sequences then run beside
// CTAs with long ones, as CTAs with short sequences wait for memory more than they load.
enum : unsigned { MANY_CTAS = 2048 };
// The number of the sequence that comes at `place` in the order of descending length. The longest sequences start first, so that
// at the end of a launch no CTA is still busy with a long one. Each thread counts the sequences that are longer than its own.
__device__ inline unsigned longest_first(const i64* offsets, unsigned count, unsigned place) {
    if (count > THREADS || gridDim.x > MANY_CTAS) return place;
    __shared__ int lengths[THREADS];
    __shared__ unsigned there;
    const unsigned own = threadIdx.x;
    const int length = own < count ? int(offsets[own + 1] - offsets[own]) : 0;
    lengths[own] = length;
    __syncthreads();
    unsigned before = 0;
#pragma unroll 4
    for (unsigned i = 0; i < count; i++) before += lengths[i] > length || (lengths[i] == length && i < own);
    if (own < count && before == place) there = own;
    __syncthreads();
    return there;
}
