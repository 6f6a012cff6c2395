// Products of matrices on tensor cores, one instruction of a warp each.
//
// acc += A·B. A is 16 × 16 of 16 bits, or 16 × 8 of 32; B is 8 columns wide. A lane has two words of row lane / 4 of A, x
// and z, and two of the row that is eight further, y and w; and two words of column lane / 4 of B. Which values of a row or
// column these words are is the caller's choice, if it is the same for A and B: for mma_tf32 in order, they are values lane
// % 4 and lane % 4 + 4. Of acc a lane has columns 2 · (lane % 4) and the next of row lane / 4, and the same of the row eight
// further.
#pragma once

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
// Of float32, without the 13 last bits.
__device__ inline void mma_tf32(float (&acc)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
