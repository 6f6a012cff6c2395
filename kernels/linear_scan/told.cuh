// How a block tells others a map: in one store and one load, with a mark in it, so that nothing needs a fence. Memory
// that was zeroed has no mark.
#pragma once
#include "affine.cuh"

// Where maps have a rest, a line of 16 bytes, the last word of which is the mark.
template <bool = WITH_REST>
struct ToldOf {
    using Word = uint4;
    Word word;

    static __device__ ToldOf of(const Affine& map, unsigned mark) {
        return {{__float_as_uint(map.scale), __float_as_uint(map.rest), __float_as_uint(map.shift), mark}};
    }
    __device__ unsigned mark() const { return word.w; }
    __device__ operator Affine() const {
        return {__uint_as_float(word.x), __uint_as_float(word.y), __uint_as_float(word.z)};
    }
};
// Where they have none, 8 bytes, with a mark of up to 3 in the last bits of the shift: states are stored so coarsely that
// these do not matter.
template <>
struct ToldOf<false> {
    using Word = u64;
    Word word;

    static __device__ ToldOf of(const Affine& map, unsigned mark) {
        return {u64((__float_as_uint(map.shift) & ~3u) | mark) << 32 | __float_as_uint(map.scale)};
    }
    __device__ unsigned mark() const { return unsigned(word >> 32) & 3; }
    __device__ operator Affine() const {
        return {__uint_as_float(unsigned(word)), State(0), __uint_as_float(unsigned(word >> 32) & ~3u)};
    }
};
using Told = ToldOf<>;

// 16 bytes of them at once.
__device__ inline void read_words(ToldOf<true> (&told)[1], const uint4* from) { told[0].word = load_relaxed(from); }
__device__ inline void read_words(ToldOf<false> (&told)[2], const u64* from) {
    load_relaxed(from, told[0].word, told[1].word);
}
