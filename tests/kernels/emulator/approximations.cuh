// What kernels/common/approximations.cuh says in PTX, for the emulator.
#pragma once
#include <cmath>

inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_reciprocal(float x) { return 1 / x; }
inline float fast_rsqrt(float x) { return 1 / std::sqrt(x); }
