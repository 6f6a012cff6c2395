// Functions of numbers in one instruction. Approximations are right to nearly all bits of a float unless they say otherwise,
// and take subnormal numbers for zero.
#pragma once

__device__ inline float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float fast_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// To 11 bits.
__device__ inline float fast_tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// a·b, or 0 or 1 where that is less than 0 or more than 1.
__device__ inline float clamped_product(float a, float b) {
    float product;
    asm("mul.sat.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}
