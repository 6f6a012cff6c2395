// Elements as they lie in memory, two or more at a time, and their products.
//
// ELEMENT (float32, bfloat16, float16) comes from the build. Neighbouring units go in pairs, which a
// thread loads and stores at once, and in 16-byte words.
#pragma once
#include "instructions.cuh"

struct bfloat16 {
    using Storage = unsigned short;
    using Pair = unsigned;
    static constexpr bool EXACT = false;  // narrow enough for the GPU's approximations
    static __device__ float widen(Storage bits) { return __uint_as_float(unsigned(bits) << 16); }
    static __device__ Pair narrow(float2 x) { return bfloat16_pair(x.x, x.y); }
    static __device__ void multiply(float (&acc)[4], uint2 top, uint2 bottom, uint2 column) {
        mma_bfloat16(acc, top, bottom, column);
    }
};

struct float16 {
    using Storage = unsigned short;
    using Pair = unsigned;
    static constexpr bool EXACT = false;
    static __device__ float widen(Storage bits) { return from_float16(bits); }
    static __device__ Pair narrow(float2 x) { return float16_pair(x.x, x.y); }
    static __device__ void multiply(float (&acc)[4], uint2 top, uint2 bottom, uint2 column) {
        mma_float16(acc, top, bottom, column);
    }
};

// The 11 leading bits of a float, rounded, and the next 11.
struct Split {
    uint2 high, low;

    __device__ explicit Split(uint2 x) {
        part(x.x, high.x, low.x);
        part(x.y, high.y, low.y);
    }
    static __device__ void part(unsigned x, unsigned& high, unsigned& low) {
        constexpr unsigned KEPT = 0xffffe000u;
        high = (x + 0x1000u) & KEPT;
        low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high)) & KEPT;
    }
};

struct float32 {
    using Storage = unsigned;
    using Pair = uint2;
    static constexpr bool EXACT = true;
    static __device__ float widen(Storage bits) { return __uint_as_float(bits); }
    static __device__ Pair narrow(float2 x) {
        return make_uint2(__float_as_uint(x.x), __float_as_uint(x.y));
    }
    // In three parts: what is left out is 2^-22 of a product. Tensor cores take 11 bits.
    static __device__ void multiply(float (&acc)[4], uint2 top, uint2 bottom, uint2 column) {
        const Split a(make_uint2(afresh(top.x), afresh(top.y)));
        const Split b(make_uint2(afresh(bottom.x), afresh(bottom.y)));
        const Split c(column);
        mma_tf32(acc, a.low, b.low, c.high);
        mma_tf32(acc, a.high, b.high, c.low);
        mma_tf32(acc, a.high, b.high, c.high);
    }
};

using Element = ELEMENT;
using Storage = Element::Storage;
using Pair = Element::Pair;

constexpr unsigned PER = 16 / sizeof(Storage);  // elements in a 16-byte word
constexpr unsigned CHUNK = 4 * PER;             // of a row that a warp multiplies at a time

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
