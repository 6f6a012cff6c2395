// What keeps the compiler from a choice that costs time or registers.
#pragma once

// One of two values, both computed: left to itself, the compiler computes either where it is wanted, after a branch.
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

// The same word, of which the compiler does not know that it has seen it before. What is computed from it is computed anew,
// and takes no registers in between.
__device__ inline unsigned opaque(unsigned word) {
    asm volatile("" : "+r"(word));
    return word;
}
