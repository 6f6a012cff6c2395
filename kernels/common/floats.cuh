// Several neighbouring floats in one access, of shared memory or global.
#pragma once
#include "../common/element.cuh"

// N floats that lie together, on a boundary of their size or of 16 bytes.
template <int N>
__device__ inline void load_floats(float (&x)[N], const float* from) {
    constexpr int WIDTH = N < 4 ? N : 4;
#pragma unroll
    for (int i = 0; i < N; i += WIDTH) {
        const auto words = get_words<float32, WIDTH>(reinterpret_cast<const unsigned*>(from + i));
#pragma unroll
        for (int k = 0; k < WIDTH; k++) x[i + k] = words.get(k);
    }
}
__device__ inline void store_float4(float* to, float a, float b, float c, float d) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}
__device__ inline void store_float2(float* to, float a, float b) {
    *reinterpret_cast<uint2*>(to) = make_uint2(__float_as_uint(a), __float_as_uint(b));
}
template <int N>
__device__ inline void store_floats(float* to, const float (&x)[N]) {
    constexpr int WIDTH = N < 4 ? N : 4;
#pragma unroll
    for (int i = 0; i < N; i += WIDTH) {
        Chunk<float32, WIDTH> words;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) words.put(k, __float_as_uint(x[i + k]));
        put_words(to + i, words);
    }
}
