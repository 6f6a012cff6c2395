// Elements as they lie in memory, and chunks of them that one thread reads or writes at once.
//
// ELEMENT and GATE_ELEMENT (float32, bfloat16, float16, float64, complex64) and ALIGNED (0, 1) come
// from the build. No header of the toolkit is included and none is needed.
#pragma once
#include "ptx.cuh"

struct Complex {
    float re, im;

    __device__ constexpr Complex(float re = 0, float im = 0) : re(re), im(im) {}
};

__device__ inline Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
__device__ inline Complex operator*(Complex a, Complex b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
__device__ inline bool operator==(Complex a, Complex b) { return a.re == b.re && a.im == b.im; }

__device__ inline float conj(float x) { return x; }
__device__ inline double conj(double x) { return x; }
__device__ inline Complex conj(Complex x) { return {x.re, -x.im}; }

// Storage holds one element's bits, State is what the recurrence is computed in, and Whole is the
// element that holds a State without rounding.
struct float32 {
    using Whole = float32;
    using Storage = unsigned;
    using State = float;
    enum : Storage { ONE = 0x3f800000u };
    static __device__ State widen(Storage bits) { return __uint_as_float(bits); }
    static __device__ Storage narrow(State x) { return __float_as_uint(x); }
};

struct bfloat16 {
    using Whole = float32;
    using Storage = unsigned short;
    using State = float;
    enum : Storage { ONE = 0x3f80u };
    static __device__ State widen(Storage bits) { return __uint_as_float(unsigned(bits) << 16); }
    static __device__ unsigned narrow_two(State low, State high) { return bfloat16_pair(low, high); }
    static __device__ Storage narrow(State x) { return Storage(narrow_two(x, x)); }
};

struct float16 {
    using Whole = float32;
    using Storage = unsigned short;
    using State = float;
    enum : Storage { ONE = 0x3c00u };
    static __device__ State widen(Storage bits) { return from_float16(bits); }
    static __device__ unsigned narrow_two(State low, State high) { return float16_pair(low, high); }
    static __device__ Storage narrow(State x) { return Storage(narrow_two(x, x)); }
};

struct float64 {
    using Whole = float64;
    using Storage = u64;
    using State = double;
    enum : Storage { ONE = 0x3ff0000000000000u };
    static __device__ State widen(Storage bits) { return __longlong_as_double(i64(bits)); }
    static __device__ Storage narrow(State x) { return Storage(__double_as_longlong(x)); }
};

struct complex64 {
    using Whole = complex64;
    using Storage = u64;  // the real part is the low half
    using State = Complex;
    enum : Storage { ONE = 0x3f800000u };
    static __device__ State widen(Storage bits) {
        return {__uint_as_float(unsigned(bits)), __uint_as_float(unsigned(bits >> 32))};
    }
    static __device__ Storage narrow(State x) {
        return u64(__float_as_uint(x.im)) << 32 | __float_as_uint(x.re);
    }
};

using Element = ELEMENT;
using GateElement = GATE_ELEMENT;
using Storage = Element::Storage;
using GateStorage = GateElement::Storage;
using State = Element::State;

// CTAs per SM that registers must leave room for. 1 frees the compiler from aiming at more, which
// makes it spill where much is live; 0 leaves that to it.
enum : int { LEAST_BLOCKS = ALIGNED && sizeof(Storage) < 8 ? 0 : 1 };

// N elements of type E, packed into 32-bit words.
template <class E, int N>
struct Chunk {
    enum : int { SIZE = sizeof(typename E::Storage) };
    enum : int { WORDS = (N * SIZE + 3) / 4 };
    unsigned word[WORDS];

    __device__ typename E::Storage bits(int i) const {
        if constexpr (SIZE == 2) return word[i / 2] >> (16 * (i % 2));
        else if constexpr (SIZE == 4) return word[i];
        else return u64(word[2 * i + 1]) << 32 | word[2 * i];
    }

    __device__ void put(int i, typename E::Storage bits) {
        if constexpr (SIZE == 2) {
            const unsigned kept = word[i / 2] & ~(0xffffu << (16 * (i % 2)));
            word[i / 2] = kept | unsigned(bits) << (16 * (i % 2));
        } else if constexpr (SIZE == 4) {
            word[i] = bits;
        } else {
            word[2 * i] = unsigned(bits);
            word[2 * i + 1] = unsigned(bits >> 32);
        }
    }

    __device__ typename E::State get(int i) const { return E::widen(bits(i)); }

    __device__ void set(const typename E::State (&x)[N]) {
        if constexpr (SIZE == 2) {
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                word[i] = E::narrow_two(x[2 * i], x[N > 1 ? 2 * i + 1 : 0]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) put(i, E::narrow(x[i]));
        }
    }

    __device__ void fill(typename E::Storage bits) {
#pragma unroll
        for (int i = 0; i < N; i++) put(i, bits);
    }
};

// A chunk of 4, 8 or 16 bytes, in one access.
template <class E, int N>
__device__ Chunk<E, N> get_words(const unsigned* from) {
    Chunk<E, N> chunk;
    if constexpr (Chunk<E, N>::WORDS == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        chunk.word[0] = v.x, chunk.word[1] = v.y, chunk.word[2] = v.z, chunk.word[3] = v.w;
    } else if constexpr (Chunk<E, N>::WORDS == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        chunk.word[0] = v.x, chunk.word[1] = v.y;
    } else {
        static_assert(Chunk<E, N>::WORDS == 1);
        chunk.word[0] = *from;
    }
    return chunk;
}
template <class E, int N>
__device__ auto words_of(const Chunk<E, N>& chunk) {
    if constexpr (Chunk<E, N>::WORDS == 4)
        return make_uint4(chunk.word[0], chunk.word[1], chunk.word[2], chunk.word[3]);
    else if constexpr (Chunk<E, N>::WORDS == 2)
        return make_uint2(chunk.word[0], chunk.word[1]);
    else
        return chunk.word[0];
}
template <class E, int N>
__device__ void put_words(void* to, const Chunk<E, N>& chunk) {
    *static_cast<decltype(words_of(chunk))*>(to) = words_of(chunk);
}

// One line of a tensor: the elements that succeed one another along one dimension.
template <class E>
struct Line {
    typename E::Storage* first;
    i64 stride;

    __device__ typename E::Storage* at(i64 index) const { return first + index * stride; }
};

template <class E>
__device__ inline Line<E> line(const typename E::Storage* first, i64 stride) {
    return {const_cast<typename E::Storage*>(first), stride};
}

// Elements [begin, begin + N) of a line; those outside [0, end) are not touched and read as
// `outside`. Aligned chunks have unit stride, are 16 or 8 bytes on a boundary of that size, and lie
// wholly inside or wholly outside.
template <int N, class E>
__device__ Chunk<E, N> load(const Line<E>& from, i64 begin, i64 end, typename E::Storage outside) {
    Chunk<E, N> chunk;
    chunk.word[Chunk<E, N>::WORDS - 1] = 0;
    chunk.fill(outside);
    if constexpr (ALIGNED) {
        if (begin >= 0 && begin < end)
            chunk = get_words<E, N>(reinterpret_cast<const unsigned*>(from.first + begin));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (begin + i >= 0 && begin + i < end) chunk.put(i, *from.at(begin + i));
    }
    return chunk;
}

template <int N, class E>
__device__ void store(const Line<E>& to, i64 begin, i64 end, const Chunk<E, N>& chunk) {
    if constexpr (ALIGNED) {
        if (begin >= 0 && begin < end)
            put_words(to.first + begin, chunk);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (begin + i >= 0 && begin + i < end) *to.at(begin + i) = chunk.bits(i);
    }
}
