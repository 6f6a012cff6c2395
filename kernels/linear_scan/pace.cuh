// Blocks that walk side by side do not get the same share of the memory's bandwidth, and what those with the smallest
// share have left in the end they read alone. So a block counts its tiles where all see it, and while it is ahead of
// the average it asks for no tile before it needs it, which leaves the bandwidth to the others.
//
// Nobody waits for anybody. A count that is wrong, as another launch of this kernel runs at the same time, costs
// time and nothing else.
//
// The build pins PACE, whether blocks look at others at all.
#pragma once
#include "ptx.cuh"

#if !PACE
struct Pace {
    __device__ explicit Pace(int) {}
};
#else

// The tiles of all launches so far, in a piece that can be copied as tiles are. It is never reset: what was added
// since a block began is what counts.
struct alignas(16) Count {
    unsigned tiles, rest[3];
};
__device__ Count all_tiles;

// A warp's look at the others: it reads the count with each tile that it asks for.
struct Pace {
    const int slack;  // tiles by which a block may be ahead, less than 0 if not all of the grid run at the same time
    bool ahead = false;
    unsigned taken = 0, before = 0;  // tiles of this block, and of all when it began

    __device__ explicit Pace(int kept) : slack(kept - 1) {}

    __device__ static Count& count(int stage) {
        __shared__ Count counts[WARPS][STAGES];
        return counts[threadIdx.x / 32][stage];
    }
    __device__ static unsigned& taken_then(int stage) {
        __shared__ unsigned taken[WARPS][STAGES];
        return taken[threadIdx.x / 32][stage];
    }

    // With the copies of the tile that goes to this stage.
    __device__ void ask(int stage) const {
        if (slack < 0 || threadIdx.x % 32) return;
        copy_async<16>(&count(stage), &all_tiles, true);
        taken_then(stage) = taken;
    }
    // When that tile is there.
    __device__ void take(int stage) {
        if (slack < 0) return;
        if (threadIdx.x == 0) add_relaxed(&all_tiles.tiles, 1);
        const unsigned blocks = gridDim.x, all = count(stage).tiles;
        if (taken++ == 0) before = all;
        ahead = int(taken_then(stage) * blocks - (all - before)) > int(slack * blocks);
    }
};

// Wait until at most so many groups of copies are under way, of MOST or fewer.
template <int MOST>
__device__ inline void wait_for_copies(int pending) {
    if constexpr (MOST > 0)
        if (pending < MOST) return wait_for_copies<MOST - 1>(pending);
    wait_for_copies<MOST>();
}
#endif
