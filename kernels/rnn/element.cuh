// Elements as they lie in memory, two or more at a time, and their products.
//
// ELEMENT (float32, bfloat16, float16) comes from the build. Neighbouring units go in pairs, which a
// thread loads and stores at once, and in 16-byte words.
#pragma once
#include "../common/compiler.cuh"
#include "../common/element.cuh"
#include "../common/mma.cuh"

// Of a float the 11 leading bits, rounded, and the next 11.
__device__ inline unsigned high_part(unsigned x) { return (x + 0x1000u) & 0xffffe000u; }
__device__ inline unsigned low_part(unsigned x) {
    const float remainder = __uint_as_float(x) - __uint_as_float(high_part(x));
    return __float_as_uint(remainder) & 0xffffe000u;
}

// Of each element type: two neighbours in one word or two, and acc += A·B for a warp (`mma.cuh` says which lane
// holds what).
template <class E>
struct Operand;
template <>
struct Operand<bfloat16> {
    using Pair = unsigned;
    static __device__ Pair narrow(float2 x) { return bfloat16_pair(x.x, x.y); }
    static __device__ void multiply(float (&acc)[4], uint4 a, uint2 b) { mma_bfloat16(acc, a, b); }
};
template <>
struct Operand<float16> {
    using Pair = unsigned;
    static __device__ Pair narrow(float2 x) { return float16_pair(x.x, x.y); }
    static __device__ void multiply(float (&acc)[4], uint4 a, uint2 b) { mma_float16(acc, a, b); }
};
template <>
struct Operand<float32> {
    using Pair = uint2;
    static __device__ Pair narrow(float2 x) { return make_uint2(__float_as_uint(x.x), __float_as_uint(x.y)); }
    // In three parts: what is left out is 2^-22 of a product. Tensor cores take 11 bits.
    static __device__ void multiply(float (&acc)[4], uint4 a, uint2 b) {
        const uint4 fresh = make_uint4(opaque(a.x), opaque(a.y), opaque(a.z), opaque(a.w));
        const uint4 high = make_uint4(high_part(fresh.x), high_part(fresh.y), high_part(fresh.z),
                                      high_part(fresh.w));
        const uint2 b_high = make_uint2(high_part(b.x), high_part(b.y));
        mma_tf32(acc,
                 make_uint4(low_part(fresh.x), low_part(fresh.y), low_part(fresh.z),
                            low_part(fresh.w)),
                 b_high);
        mma_tf32(acc, high, make_uint2(low_part(b.x), low_part(b.y)));
        mma_tf32(acc, high, b_high);
    }
};

struct Element : ELEMENT, Operand<ELEMENT> {
    enum : bool { EXACT = sizeof(Storage) == 4 };  // 16 bits are narrow enough for the GPU's approximations
    using Operand<ELEMENT>::narrow;
};
using Storage = Element::Storage;
using Pair = Element::Pair;

enum : unsigned { PER = 16 / sizeof(Storage) };  // elements in a 16-byte word
enum : unsigned { CHUNK = 4 * PER };  // of a row that a warp multiplies at a time

__device__ inline Storage first_of(unsigned pair) { return Storage(pair); }
__device__ inline Storage second_of(unsigned pair) { return Storage(pair >> 16); }
__device__ inline Storage first_of(uint2 pair) { return Storage(pair.x); }
__device__ inline Storage second_of(uint2 pair) { return Storage(pair.y); }

__device__ inline float2 load_pair(const Storage* from) {
    const Pair pair = *reinterpret_cast<const Pair*>(from);
    return make_float2(Element::widen(first_of(pair)), Element::widen(second_of(pair)));
}
__device__ inline float2 widen(Pair pair) {
    return make_float2(Element::widen(first_of(pair)), Element::widen(second_of(pair)));
}
__device__ inline float half(Pair pair, int i) {
    return Element::widen(i ? second_of(pair) : first_of(pair));
}
__device__ inline void store_pair(Storage* to, float2 x) {
    *reinterpret_cast<Pair*>(to) = Element::narrow(x);
}
