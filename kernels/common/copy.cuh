// Copies from global to shared memory that go on while the thread does other work.
#pragma once
#include "../common/types.cuh"

// For lines that leave the L2 last. Where inputs do, though nobody reads them again, memory takes the results faster;
// the reason is not known (linear_scan/notes/memory.md).
__device__ inline u64 leaves_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copy 16 bytes if `wanted`. Only the first `bytes` of them are read, and the others are zeros. HINTED copies ask the L2 to
// let the lines leave last.
template <bool HINTED>
__device__ inline void copy_async_first(void* to, const void* from, int bytes, bool wanted) {
    const unsigned shared = unsigned(__cvta_generic_to_shared(to));
    if constexpr (HINTED)
        asm volatile(
            "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n\t"
            "@wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3, %4; }" ::"r"(shared),
            "l"(from), "r"(int(wanted)), "r"(bytes), "l"(leaves_last())
            : "memory");
    else
        asm volatile(
            "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n\t"
            "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %3; }" ::"r"(shared),
            "l"(from), "r"(int(wanted)), "r"(bytes)
            : "memory");
}
// Copy 16 bytes if `wanted`. The L2 reads all of the 128 bytes around them, for other threads.
template <bool HINTED>
__device__ inline void copy_async(void* to, const void* from, bool wanted) {
    if constexpr (!HINTED) return copy_async_first<false>(to, from, 16, wanted);
    const unsigned shared = unsigned(__cvta_generic_to_shared(to));
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n\t"
        "@wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3; }" ::"r"(shared),
        "l"(from), "r"(int(wanted)), "l"(leaves_last())
        : "memory");
}
// Copy 4 bytes if `wanted`: for what lies on no 16-byte boundary.
__device__ inline void copy_word_async(void* to, const void* from, bool wanted) {
    const unsigned shared = unsigned(__cvta_generic_to_shared(to));
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n\t"
        "@wanted cp.async.ca.shared.global [%0], [%1], 4; }" ::"r"(shared),
        "l"(from), "r"(int(wanted))
        : "memory");
}
// Close the group of this thread's copies so far; wait until at most PENDING groups are under way.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
