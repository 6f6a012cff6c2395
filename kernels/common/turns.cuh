// Warps of a CTA that take turns: each waits until the one before it has passed the turn on.
#pragma once
#include "../common/types.cuh"

// The barrier of one warp in shared memory, set up by one thread; a barrier of the CTA follows before others use it.
__device__ inline void init_turn(u64* barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(unsigned(__cvta_generic_to_shared(barrier))) : "memory");
}
// Passes the turn on to barrier `number` of `barriers`, with all that the lanes of this warp have written to shared memory.
__device__ inline void pass_turn(u64* barriers, int number) {
    __syncwarp();
    asm volatile(
        "{ .reg .b64 state; .reg .pred first; setp.eq.u32 first, %1, 0;\n\t"
        "@first mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(unsigned(__cvta_generic_to_shared(barriers + number))),
        "r"(threadIdx.x % 32)
        : "memory");
}
// Waits for the turn. `round` counts a warp's turns.
__device__ inline void wait_for_turn(u64* barriers, int number, unsigned round) {
    asm volatile(
        "{ .reg .pred passed;\n"
        "again: mbarrier.try_wait.parity.shared.b64 passed, [%0], %1;\n"
        "@!passed bra again; }" ::"r"(unsigned(__cvta_generic_to_shared(barriers + number))),
        "r"(round % 2)
        : "memory");
}
