// Elements as they lie in memory, and chunks of them that one thread reads or writes at once.
//
// ELEMENT (float32, bfloat16, float16) and ALIGNED (0, 1) come from the build. No header is
// included and none is needed: conversions are single PTX instructions of sm_80 and later.
#pragma once

using i64 = long long;
using u64 = unsigned long long;

// Storage holds one element's bits, State is what the recurrence is computed in, and a 32-bit word
// packs one element, or two with the first in the low half. ONE is a word of ones.
struct float32 {
    using Storage = unsigned;
    using State = float;
    static constexpr unsigned ONE = 0x3f800000u;
    static __device__ State widen(Storage bits) { return __uint_as_float(bits); }
    static __device__ unsigned pack(State x, State) { return __float_as_uint(x); }
};

struct bfloat16 {
    using Storage = unsigned short;
    using State = float;
    static constexpr unsigned ONE = 0x3f803f80u;
    static __device__ State widen(Storage bits) { return __uint_as_float(unsigned(bits) << 16); }
    static __device__ unsigned pack(State low, State high) {
        unsigned word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
    }
};

struct float16 {
    using Storage = unsigned short;
    using State = float;
    static constexpr unsigned ONE = 0x3c003c00u;
    static __device__ State widen(Storage bits) {
        State x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
    static __device__ unsigned pack(State low, State high) {
        unsigned word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
    }
};

using Element = ELEMENT;
using Storage = Element::Storage;
using State = Element::State;

__device__ inline Storage narrow(State x) { return Storage(Element::pack(x, x)); }

template <int N>
struct Chunk {
    static constexpr int PER_WORD = 4 / sizeof(Storage);
    static constexpr int WORDS = (N + PER_WORD - 1) / PER_WORD;
    unsigned word[WORDS];

    __device__ Storage bits(int i) const {
        if constexpr (PER_WORD == 1) return Storage(word[i]);
        else return Storage(word[i / 2] >> (16 * (i % 2)));
    }
    __device__ State get(int i) const { return Element::widen(bits(i)); }

    __device__ void fill(unsigned pattern) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) word[i] = pattern;
    }

    __device__ void set(const State (&x)[N]) {
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            word[i] = Element::pack(x[i * PER_WORD], x[N > 1 ? i * PER_WORD + PER_WORD - 1 : 0]);
    }

    // The chunk one element earlier: every element moves up one place and `first` comes in below.
    __device__ Chunk delayed(Storage first) const {
        Chunk out;
        if constexpr (PER_WORD == 1) {
            out.word[0] = first;
#pragma unroll
            for (int i = 1; i < WORDS; i++) out.word[i] = word[i - 1];
        } else {
            out.word[0] = (word[0] << 16) | first;
#pragma unroll
            for (int i = 1; i < WORDS; i++) out.word[i] = __funnelshift_l(word[i - 1], word[i], 16);
        }
        return out;
    }
};

// Elements [begin, begin + N) of a row; those outside [low, high) are not touched and read as
// `outside`. Aligned chunks are 16 or 8 bytes, on a boundary of that size, and lie wholly inside or
// wholly outside.
template <int N>
__device__ Chunk<N> load(const Storage* row, i64 begin, i64 low, i64 high, unsigned outside) {
    Chunk<N> chunk;
    chunk.fill(outside);
    if constexpr (ALIGNED) {
        if (begin >= low && begin < high) {
            if constexpr (Chunk<N>::WORDS == 4) {
                const uint4 v = *reinterpret_cast<const uint4*>(row + begin);
                chunk.word[0] = v.x, chunk.word[1] = v.y, chunk.word[2] = v.z, chunk.word[3] = v.w;
            } else {
                const uint2 v = *reinterpret_cast<const uint2*>(row + begin);
                chunk.word[0] = v.x, chunk.word[1] = v.y;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (begin + i >= low && begin + i < high) {
                const unsigned bits = row[begin + i];
                if constexpr (Chunk<N>::PER_WORD == 1) {
                    chunk.word[i] = bits;
                } else {
                    const unsigned mask = 0xffffu << (16 * (i % 2));
                    chunk.word[i / 2] = (chunk.word[i / 2] & ~mask) | (bits << (16 * (i % 2)));
                }
            }
        }
    }
    return chunk;
}

template <int N>
__device__ void store(Storage* row, i64 begin, i64 low, i64 high, const Chunk<N>& chunk) {
    if constexpr (ALIGNED) {
        if (begin >= low && begin < high) {
            if constexpr (Chunk<N>::WORDS == 4)
                *reinterpret_cast<uint4*>(row + begin) =
                    make_uint4(chunk.word[0], chunk.word[1], chunk.word[2], chunk.word[3]);
            else
                *reinterpret_cast<uint2*>(row + begin) = make_uint2(chunk.word[0], chunk.word[1]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (begin + i >= low && begin + i < high) row[begin + i] = chunk.bits(i);
    }
}
