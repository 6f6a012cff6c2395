// What the header of a kind gets and gives. A kernel is compiled for one kind, whose header the build names (KIND_HEADER).
//
// A header defines `struct Kind` with INPUTS, the number of sequences, and PARAMETERS, the number of values that a channel
// has for all times; `Values`, whatever step and gradients share; and three functions: values, step and gradients.
#pragma once
#include "../common/activations.cuh"
#include "../common/affine.cuh"

// At one time step of one channel, in float32.
template <class Kind>
struct GivenTo {
    float input[Kind::INPUTS];
    float parameter[Kind::PARAMETERS > 0 ? Kind::PARAMETERS : 1];
    bool reset;   // whether the state starts anew here; the kernels take 0 for the gate then, whatever it is
    bool option;  // of the kind's line in kinds.py
};

template <class Kind>
struct Gradients {
    float input[Kind::INPUTS];
    float parameter[Kind::PARAMETERS > 0 ? Kind::PARAMETERS : 1];
};

__device__ inline float positive(float x) { return x >= 0 ? x + 0.5f : sigmoid(x); }
// Its derivative, where its value is known.
__device__ inline float positive_slope(float x, float value) { return x >= 0 ? 1.0f : value * (1 - value); }
