// Stochastic rounding of states: away from zero with a probability of the distance to the neighbour nearer to zero, as a part of the
// gap between both neighbours, so that what is written is right in the mean.
//
// Random bits depend on a seed, a slot, a row and a state's number, and on nothing else: not on the kernel, the launch or the
// order of threads. reference.py has the same functions.
#pragma once
#include "../common/element.cuh"

// A permutation of the 32-bit words after which every bit depends on all bits.
__device__ inline unsigned scrambled(unsigned word) {
    word = (word ^ word >> 16) * 0x7feb352du;
    word = (word ^ word >> 15) * 0x846ca68bu;
    return word ^ word >> 16;
}
// Of a row of a slot.
__device__ inline unsigned random_key(i64 seed, i64 slot, unsigned row) {
    const unsigned of_seed = scrambled(scrambled(unsigned(seed)) ^ unsigned(u64(seed) >> 32));
    return scrambled(scrambled(of_seed ^ unsigned(slot)) ^ row);
}
// 32 random bits for two states of the row, of which the first has the lower half and an even number.
__device__ inline unsigned random_word(unsigned key, int pair) { return scrambled(key + unsigned(pair) * 0x9e3779b9u); }

// The number of type E to which x is rounded, as a float; `random` are 16 bits. For float32, x itself.
template <class E>
__device__ inline float rounded_at_random(float x, unsigned) {
    return x;
}
template <>
__device__ inline float rounded_at_random<bfloat16>(float x, unsigned random) {
    const float rounded = __uint_as_float((__float_as_uint(x) + random) & 0xffff0000u);
    return x == x ? rounded : x;
}
// Subnormal numbers are as far apart as those of the lowest normal binade, into which adding 2^-14 moves them.
template <>
__device__ inline float rounded_at_random<float16>(float x, unsigned random) {
    const unsigned sign = __float_as_uint(x) & 0x80000000u;
    const float smallest = __uint_as_float(0x38800000u | sign);  // 2^-14
    const float raised = fabsf(x) < fabsf(smallest) ? smallest : 0.f;
    const float rounded = __uint_as_float((__float_as_uint(x + raised) + (random >> 3)) & 0xffffe000u) - raised;
    return x == x ? rounded : x;
}
