// Lines of a tensor, and how chunks of them are read and written.
//
// ALIGNED (0, 1) comes from the build.
#pragma once
#include "../common/state.cuh"

// CTAs per SM that registers must leave room for. 1 frees the compiler from aiming at more, which
// makes it spill where much is live; 0 leaves that to it.
enum : int { LEAST_BLOCKS = ALIGNED && sizeof(Storage) < 8 ? 0 : 1 };

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
