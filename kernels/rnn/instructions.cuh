// One function for each PTX instruction that the family adds to those of common/ptx.cuh. All are
// instructions of sm_80 and later.
#pragma once
#include "../common/approximations.cuh"
#include "../common/prefetch.cuh"
#include "../common/ptx.cuh"

// acc += A·B, 16 × 8, for a warp. A is 16 × 16 of 16 bits, or 16 × 8 of 32: a lane holds two words of row
// lane / 4, x and z, and of the row that is eight further, y and w; of B's column lane / 4 it holds two.
// Which values of a row those words are is the caller's choice, if it is the same for A and B.
__device__ inline void mma_bfloat16(float (&acc)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
__device__ inline void mma_float16(float (&acc)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
__device__ inline void mma_tf32(float (&acc)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// Memory that other CTAs read and write: each 32-bit word in one piece, in no order with others.
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

// Cycles of the SM's clock, of which 32 bits come round in seconds.
__device__ inline unsigned clock_cycles() {
    unsigned cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
}

// The GPU's own approximation, to 11 bits.
__device__ inline float fast_tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The same word, of which the compiler does not know that it has seen it before: what is computed of it
// is not kept in registers beside it.
__device__ inline unsigned afresh(unsigned word) {
    asm volatile("" : "+r"(word));
    return word;
}
