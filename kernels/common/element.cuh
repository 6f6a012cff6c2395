// Element types: how one element lies in memory, and the type that kernels compute in. Chunks: elements that one thread
// reads or writes at once.
//
// No header of the CUDA toolkit is included, since NVRTC compiles these files without one.
#pragma once
#include "../common/convert.cuh"
#include "../common/types.cuh"

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
