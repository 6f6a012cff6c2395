// Copies 4 bytes, if wanted, from global to shared memory while the thread goes on: for what lies on no 16-byte boundary.
// ptx.cuh closes groups of copies and waits for them.
#pragma once

__device__ inline void copy_word_async(void* to, const void* from, bool wanted) {
    const unsigned shared = unsigned(__cvta_generic_to_shared(to));
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n\t"
        "@wanted cp.async.ca.shared.global [%0], [%1], 4; }" ::"r"(shared),
        "l"(from), "r"(int(wanted))
        : "memory");
}
