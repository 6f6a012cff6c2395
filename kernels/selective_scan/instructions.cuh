// One function for each PTX instruction that the family adds to those of common/ptx.cuh. All are
// instructions of sm_80 and later.
#pragma once
#include "../common/approximations.cuh"
#include "../common/prefetch.cuh"
#include "../common/ptx.cuh"

// acc += A·B, 16 × 8, for a warp, of numbers of which the 13 last bits are not seen. A is 16 × 8: a lane holds of row
// lane / 4 columns lane % 4, x, and lane % 4 + 4, z, and of the row that is eight further y and w. B is 8 × 8: a lane
// holds of column lane / 4 rows lane % 4 and lane % 4 + 4. Of acc it holds in row lane / 4 columns lane % 4 · 2 and
// the next, and the same eight rows further.
__device__ inline void mma_tf32(float (&acc)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// a·b, or 0 or 1 where that is less than 0 or more than 1.
__device__ inline float clamped_product(float a, float b) {
    float product;
    asm("mul.sat.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

// The same word, from which nothing that was computed before can be reused.
__device__ inline unsigned afresh(unsigned word) {
    asm volatile("" : "+r"(word));
    return word;
}
