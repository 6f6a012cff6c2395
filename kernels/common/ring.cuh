// Tiles on their way from global memory: a warp's share of a ring of STAGES places in shared memory, so that many
// bytes are in flight without a register for any of them.
//
// Pieces are copied so that successive lanes copy successive 16 bytes, and read by the lane that they belong to; of
// contiguous time results go back the same way. A piece lies where neither way makes lanes of a quarter warp meet in a
// bank.
#pragma once
#include "../common/shared_memory.cuh"
#include "../common/state.cuh"

static_assert(VECTOR * sizeof(Storage) == 16, "elements of a piece");

// Where piece p of a tile lies.
__device__ inline int swizzled(int piece) { return piece ^ (piece >> 3 & 7); }

// INPUTS of EACH pieces, and after them EXTRA ones; each stage starts in a row of banks.
template <int INPUTS, int EACH, int EXTRA = 0>
struct Ring {
    enum : int { STAGE = (INPUTS * EACH + EXTRA + 7) / 8 * 8 };
    uint4* const own;  // of a stage

    __device__ explicit Ring(int stage)
        : own(reinterpret_cast<uint4*>(dynamic_rows()) +
              (threadIdx.x / 32 * STAGES + stage) * STAGE) {}

    __device__ uint4* place(int input, int piece) const { return own + input * EACH + swizzled(piece); }
    __device__ uint4* extra(int i) const { return own + INPUTS * EACH + i; }
};

__device__ inline Chunk<Element, VECTOR> read_piece(const uint4* place) {
    return get_words<Element, VECTOR>(reinterpret_cast<const unsigned*>(place));
}
__device__ inline uint4 piece_of(Storage bits) {
    Chunk<Element, VECTOR> chunk;
    chunk.fill(bits);
    return words_of(chunk);
}
