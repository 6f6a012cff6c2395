// What C++ has no word for: one function for each PTX instruction that several families use. All are instructions of
// sm_80 and later.
#pragma once

using i64 = long long;
using u64 = unsigned long long;

// Two floats as halves of a word, the second one high.
__device__ inline unsigned bfloat16_pair(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ inline unsigned float16_pair(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ inline float from_float16(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// One of two values that are both there: left to itself, the compiler fetches either where it is wanted, after a branch.
template <class T>
__device__ inline T chosen(bool first, T a, T b) {
    return first ? a : b;
}
template <>
__device__ inline float chosen(bool first, float a, float b) {
    float x;
    asm("{ .reg .pred first; setp.ne.b32 first, %3, 0;\n\t"
        "selp.f32 %0, %1, %2, first; }" : "=f"(x) : "f"(a), "f"(b), "r"(int(first)));
    return x;
}

// 16 or 8 bytes to global memory at once: left to itself, the compiler takes some of them apart.
__device__ inline void store_global(void* to, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}
__device__ inline void store_global(void* to, uint2 value) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(value.x), "r"(value.y) : "memory");
}
__device__ inline void store_global(void* to, unsigned value) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Memory that other CTAs read and write: 8 bytes in one piece, in no order with other accesses.
__device__ inline void store_relaxed(u64* to, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ inline u64 load_relaxed(const u64* from) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// Two of 8 bytes side by side, each in one piece.
__device__ inline void load_relaxed(const u64* from, u64& first, u64& second) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

// 16 bytes in one piece, likewise; or released, after all that the CTA has stored, if its threads have met since, and
// acquired, before all that it loads and stores.
#define STORE_LINE(ORDER, to, value)                                                              \
    asm volatile(                                                                                 \
        "{ .reg .b64 low, high; .reg .b128 all;\n\t"                                              \
        "mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4}; mov.b128 all, {low, high};\n\t"           \
        "st." ORDER ".gpu.global.b128 [%0], all; }" ::"l"(to),                                    \
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)                                    \
        : "memory")
#define LOAD_LINE(ORDER, from, value)                                                             \
    asm volatile(                                                                                 \
        "{ .reg .b64 low, high; .reg .b128 all;\n\t"                                              \
        "ld." ORDER ".gpu.global.b128 all, [%4];\n\t"                                             \
        "mov.b128 {low, high}, all; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }"             \
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)                              \
        : "l"(from)                                                                               \
        : "memory")
__device__ inline void store_relaxed(uint4* to, uint4 value) { STORE_LINE("relaxed", to, value); }
__device__ inline void store_release(uint4* to, uint4 value) { STORE_LINE("release", to, value); }
__device__ inline uint4 load_relaxed(const uint4* from) {
    uint4 value;
    LOAD_LINE("relaxed", from, value);
    return value;
}
__device__ inline uint4 load_acquire(const uint4* from) {
    uint4 value;
    LOAD_LINE("acquire", from, value);
    return value;
}

// Barriers of whole warps of a CTA, of number 1 to 15, that open when THREADS have arrived: some of them wait for
// that, others have but something to tell and go on.
template <int THREADS>
__device__ inline void meet_at(int barrier) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ inline void arrive_at(int barrier) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// The CTA's shared memory whose size the launch gives.
__device__ inline char* dynamic_shared() {
    extern __shared__ uint4 dynamic[];
    return reinterpret_cast<char*>(dynamic);
}

// The same from where a row of banks starts. Asynchronous copies take up to twice as long to pieces that lie together
// in memory, but not in a row.
__device__ inline char* dynamic_rows() {
    extern __shared__ __align__(128) uint4 rows[];
    return reinterpret_cast<char*>(rows);
}

// For lines that leave the L2 last. Where inputs do, though nobody reads them again, memory takes the results faster;
// the reason is not known (linear_scan/notes/memory.md).
__device__ inline u64 leaves_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Whether copies say so: not where NVRTC would give the hint a wrong register (linear_scan/notes/launching.md; ci/gates.py).
#if MISALIGNED && __CUDA_ARCH__ >= 1000
enum : bool { HINTED = false };
#else
enum : bool { HINTED = true };
#endif

// Copy 16 bytes, of which only the first are read and the others are zeros, if wanted, from global to shared memory while
// the thread goes on.
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
// Copy 16 bytes likewise. Of 128 bytes that lie together, what others will want comes as far as the L2, which it leaves
// last.
__device__ inline void copy_async(void* to, const void* from, bool wanted) {
    if constexpr (!HINTED) return copy_async_first(to, from, 16, wanted);
    const unsigned shared = unsigned(__cvta_generic_to_shared(to));
    asm volatile(
        "{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n\t"
        "@wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3; }" ::"r"(shared),
        "l"(from), "r"(int(wanted)), "l"(leaves_last())
        : "memory");
}
// Close the group of this thread's copies so far; wait until at most PENDING groups are under way.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
