// Tiles on their way from global memory: a ring of STAGES places in shared memory, so that many bytes
// are in flight without a register for any of them.
//
// A thread copies the pieces of a tile that it will read itself, so it waits for nobody else:
//
//     stage 0 | input 0: piece 0 of all threads | piece 1 | … STEPS | input 1: … |
//     stage 1 | …
//
// A piece is VECTOR elements, of 4, 8 or 16 bytes.
#pragma once
#include "element.cuh"

template <int INPUTS>
struct Ring {
    static constexpr int PIECE = VECTOR * sizeof(Storage);
    static constexpr int STAGE = INPUTS * STEPS * THREADS * PIECE;
    static_assert(PIECE == 4 || PIECE == 8 || PIECE == 16, "what one instruction copies");

    char* const own;  // this thread's first piece of a stage

    __device__ explicit Ring(int stage)
        : own(dynamic_shared() + stage * STAGE + threadIdx.x * PIECE) {}

    __device__ char* place(int input, int k) const {
        return own + (input * STEPS + k) * THREADS * PIECE;
    }

    // Have a piece copied from global memory, if wanted; make it of states; make all from `k` on of
    // one element.
    __device__ void copy(int input, int k, const Storage* from, bool wanted) const {
        copy_async<PIECE>(place(input, k), from, wanted);
    }
    __device__ void put(int input, int k, const State (&x)[VECTOR]) const {
        Chunk<Element, VECTOR> chunk;
        chunk.set(x);
        put(input, k, chunk);
    }
    __device__ void fill(int input, int k, Storage bits) const {
        Chunk<Element, VECTOR> chunk;
        chunk.fill(bits);
#pragma unroll 1
        for (; k < STEPS; k++) put(input, k, chunk);
    }
    __device__ void put(int input, int k, const Chunk<Element, VECTOR>& chunk) const {
        put_words(place(input, k), chunk);
    }
    __device__ Chunk<Element, VECTOR> get(int input, int k) const {
        return get_words<Element, VECTOR>(
            reinterpret_cast<const unsigned*>(place(input, k)));
    }
};
