// Look-back descriptors: how a CTA publishes one affine map (gate product, state) to other CTAs.
//
// Map and flag travel in one atomic store and one atomic load, so no fence is needed. Zeroed memory has flag 0, which
// stands for "not published".
#pragma once
#include "../common/affine.cuh"
#include "../common/global_memory.cuh"

// Compensated maps: 16 bytes, of which the last 4 are the flag.
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
// Others: 8 bytes, with a flag of 0 to 3 in the two lowest mantissa bits of the shift. States are stored in 16 bits then,
// far more coarsely than that.
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

// 16 bytes of descriptors in one load.
__device__ inline void read_words(TileDescriptorOf<true> (&descriptors)[1], const uint4* from) {
    descriptors[0].word = load_relaxed(from);
}
__device__ inline void read_words(TileDescriptorOf<false> (&descriptors)[2], const u64* from) {
    load_relaxed(from, descriptors[0].word, descriptors[1].word);
}
