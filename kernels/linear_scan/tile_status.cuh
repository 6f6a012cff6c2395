// How a block tells others a map: in one store and one load, with a mark in it, so that nothing needs a fence. Memory
// that was zeroed has no mark.
#pragma once
#include "affine.cuh"

// Where maps have a rest, a line of 16 bytes, the last word of which is the mark.
template <bool = COMPENSATED>
struct TileDescriptorOf {
    using Word = uint4;
    Word word;

    static __device__ TileDescriptorOf of(const Affine& map, unsigned flag) {
        return {{__float_as_uint(map.scale), __float_as_uint(map.error_term), __float_as_uint(map.shift), flag}};
    }
    __device__ unsigned flag() const { return word.w; }
    __device__ operator Affine() const {
        return {__uint_as_float(word.x), __uint_as_float(word.y), __uint_as_float(word.z)};
    }
};
// Where they have none, 8 bytes, with a mark of up to 3 in the last bits of the shift: states are stored so coarsely that
// these do not matter.
template <>
struct TileDescriptorOf<false> {
    using Word = u64;
    Word word;

    static __device__ TileDescriptorOf of(const Affine& map, unsigned flag) {
        return {u64((__float_as_uint(map.shift) & ~3u) | flag) << 32 | __float_as_uint(map.scale)};
    }
    __device__ unsigned flag() const { return unsigned(word >> 32) & 3; }
    __device__ operator Affine() const {
        return {__uint_as_float(unsigned(word)), State(0), __uint_as_float(unsigned(word >> 32) & ~3u)};
    }
};
using TileDescriptor = TileDescriptorOf<>;

// 16 bytes of them at once.
__device__ inline void read_words(TileDescriptorOf<true> (&descriptors)[1], const uint4* from) { descriptors[0].word = load_relaxed(from); }
__device__ inline void read_words(TileDescriptorOf<false> (&descriptors)[2], const u64* from) {
    load_relaxed(from, descriptors[0].word, descriptors[1].word);
}
