// Memory in which the blocks of a launch tell one another, and which nobody has zeroed before: the first block does, and
// nothing else, while the others get their first tiles, and says so in a line of 16 bytes. The last block that sees the
// line takes it back, so that it never speaks of an earlier launch. What the memory held before is no such line: that has
// 128 bits, and is another one at each address.
//
// It starts with HEAD bytes for the line and a count of the blocks that have seen it.
#pragma once
#include "ptx.cuh"

struct WorkspaceInit {
    enum : int { HEAD = 128 };
    uint4* const line;
    const int bytes;  // past the head

    __device__ WorkspaceInit(void* memory, int bytes) : line(static_cast<uint4*>(memory)), bytes(bytes) {}
    __device__ void* past_head() const { return line + HEAD / 16; }
    __device__ uint4 flag() const {
        const u64 at = u64(line);
        return {unsigned(at) ^ 0xb5297a4du, unsigned(at >> 32) ^ 0x68e31da4u, 0x1b56c4e9u, 0x7feb352du};
    }

    // By a whole block.
    __device__ void initialize() const {
#pragma unroll 1
        for (int i = 1 + threadIdx.x; i < (HEAD + bytes) / 16; i += THREADS) store_global(line + i, uint4{});
        __syncthreads();
        if (threadIdx.x == 0) store_release(line, flag());
    }
    __device__ bool is_ready() const {
        const uint4 there = load_acquire(line), expected = flag();
        return there.x == expected.x && there.y == expected.y && there.z == expected.z && there.w == expected.w;
    }
    // Of the blocks that see the line, how many have before this one. To be called once by each of them.
    __device__ unsigned count_reader() const { return atomicAdd(&line[1].x, 1u); }
    __device__ void retract() const { store_relaxed(line, uint4{}); }
};
