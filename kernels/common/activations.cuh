// Functions of one number that kernels apply to sequences, right to nearly all bits of a float.
#pragma once
#include "../common/math.cuh"

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

__device__ inline float sigmoid(float x) { return fast_reciprocal(1 + fast_exp2(-LOG2_E * x)); }

// log(1 + e) for e up to 1, where the GPU's logarithm is wrong for small ones: e times a polynomial, to 3e-8, or to 6e-5
// where what comes of it is NARROW, of 16 bits.
template <bool NARROW = false>
__device__ inline float log1p_of(float e) {
    float p;
    if constexpr (NARROW) {
        p = 0.04134729877114296f;
        p = p * e - 0.15742722153663635f;
        p = p * e + 0.30630096793174744f;
        p = p * e - 0.496977835893631f;
        p = p * e + 0.9999432563781738f;
    } else {
        p = 0.005253457929939032f;
        p = p * e - 0.02958850748836994f;
        p = p * e + 0.07836166769266129f;
        p = p * e - 0.13674770295619965f;
        p = p * e + 0.19111430644989014f;
        p = p * e - 0.24844369292259216f;
        p = p * e + 0.33319270610809326f;
        p = p * e - 0.49999502301216125f;
        p = p * e + 1.0f;
    }
    return p * e;
}
// log(1 + exp(x)); above 20 it is x, as what is added vanishes in rounding.
// Step sizes are this function of their inputs. The page docs/pages/developers/paths.md lists where else it is written: its
// derivative in selective_scan/backward.cuh and ssd_scan/backward_chunk.cuh, C code for CPUs in scan_registry/csrc/cpu_math.h,
// and the families' reference.py and jax_operator.py.
template <bool NARROW = false>
__device__ inline float softplus(float x) {
    return fmaxf(x, 0) + log1p_of<NARROW>(fast_exp2(-LOG2_E * fabsf(x)));
}
