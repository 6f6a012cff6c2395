// Rows with contiguous time: what the forward and the backward kernel share.
//
// The build pins WARPS (per row), ROWS (per block) and STEPS. A tile is the part of a row that its
// warps hold in registers at once:
//
//     order  0                                                              TILE
//            | warp 0                     | warp 1                     | …  |
//            | step 0      | step 1  | …  | step 0      | step 1  | …  |
//            | 32 lanes × VECTOR elements |
//
// Order runs with time in the forward scan and against it in the backward scan; either way a lane's
// chunk is 16 consecutive bytes. While a tile is computed, the next one is already loading.
#pragma once
#include "affine.cuh"

constexpr int VECTOR = 16 / sizeof(Storage);
constexpr int WARP_TILE = STEPS * 32 * VECTOR;
constexpr int TILE = WARPS * WARP_TILE;
constexpr int THREADS = WARPS * ROWS * 32;
static_assert(WARPS == 1 || ROWS == 1, "warps that share a row meet at a block-wide barrier");

struct Position {
    i64 row;   // batch * channels + channel
    int warp;  // within the row
    int lane;

    __device__ Position()
        : row(i64(blockIdx.x) * ROWS + threadIdx.x / (32 * WARPS)),
          warp(threadIdx.x / 32 % WARPS),
          lane(threadIdx.x % 32) {}

    // Order of this lane's chunk in a step of a tile.
    __device__ i64 order(i64 tile, int step) const {
        return tile + warp * WARP_TILE + (step * 32 + lane) * VECTOR;
    }
};

// The state that enters this warp's part of the tile. `carry` is the state that enters the tile
// and becomes the one that leaves it. Two buffers alternate, so that one barrier a tile is enough.
__device__ inline State enter_warp(Affine warp_total, int warp, int lane, int parity, State& carry) {
    if constexpr (WARPS == 1) {
        const State entering = carry;
        carry = warp_total(carry);
        return entering;
    } else {
        __shared__ Affine totals[2][WARPS];
        if (lane == 0) totals[parity][warp] = warp_total;
        __syncthreads();
        State entering = carry;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w == warp) entering = carry;
            carry = totals[parity][w](carry);
        }
        return entering;
    }
}
