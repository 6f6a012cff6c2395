// What kernels/common/math.cuh says in PTX, for the emulator.
#pragma once
#include <cmath>

inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_reciprocal(float x) { return 1 / x; }
inline float fast_rsqrt(float x) { return 1 / std::sqrt(x); }
inline float fast_tanh(float x) { return std::tanh(x); }
inline float clamped_product(float a, float b) { return std::fmin(std::fmax(a * b, 0.f), 1.f); }
