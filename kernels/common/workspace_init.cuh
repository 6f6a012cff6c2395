// Zeroes a launch's workspace inside the launch, in place of a memset before it, which costs more than a microsecond.
//
// The first CTA does nothing but zero the workspace and then release a 16-byte flag at its start, while the other CTAs
// load their first tiles. The last CTA that has seen the flag takes it back, so that no later launch finds it. Whatever
// the memory held before is taken for no flag: a flag has 128 bits, which depend on its address.
//
// Layout: HEAD bytes for the flag and a count of the CTAs that have seen it, then the workspace proper. The file that
// includes this one defines THREADS, those of a CTA.
#pragma once
#include "../common/global_memory.cuh"

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

    // To be called by a whole CTA.
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
    // Waits for the flag, which the last of `readers` takes back. To be called by one thread of each.
    __device__ void await(unsigned readers) const {
        while (!is_ready()) {}
        if (count_reader() + 1 == readers) retract();
    }
    // How many CTAs have seen the flag before this one. To be called once by each that has seen it.
    __device__ unsigned count_reader() const { return atomicAdd(&line[1].x, 1u); }
    __device__ void retract() const { store_relaxed(line, uint4{}); }
};
