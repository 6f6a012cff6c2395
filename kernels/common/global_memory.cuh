// Loads and stores of global memory that C++ has no word for: of several words at once, and of words that other CTAs read and
// write.
#pragma once
#include "../common/types.cuh"

// 16 or 8 bytes at once: left to itself, the compiler takes some of them apart.
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

// 32-bit words, several at a time, each one in one piece, in no order with others.
__device__ inline void store_words(unsigned* to, unsigned word) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ inline void store_words(unsigned* to, uint2 words) {
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y)
                 : "memory");
}
__device__ inline uint4 load_words(const uint4* from) {
    uint4 words;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

// What this thread read and wrote before comes, for the whole GPU, before what it does after.
__device__ inline void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Makes the L2 read, from memory, the 32 bytes around an address that a load will ask for later.
__device__ inline void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
