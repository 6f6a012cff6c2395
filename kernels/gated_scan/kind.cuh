// What the header of a kind gets and gives. A kernel is compiled for one kind, whose header the build names (KIND_HEADER).
//
// A header defines `struct Kind`, which inherits from KindOf<sequences, channel parameters>. It has `Values`, whatever step
// and gradients share, and three functions:
//
//     static Values values(const Given& given)
//     static Step step(const Values& of)                  gate and token of h[t] = gate * h[t-1] + token
//     static Gradients gradients(const Given& given, const Values& of, float gate_grad, float token_grad)
//
// These are right for any finite inputs: nothing in them overflows up to 1e30. Where a state starts anew the kernels take
// 0 for gate and gate_grad, whatever the gate is. A header may also define, in place of what it inherits,
//
//     PADS, padding       inputs at which the map is the identity, for time steps past the end
//     prepared, slope     a function of a channel parameter, which steps get in the parameter's place; and its derivative
//
// Functions of the GPU's special function units are the dearest. One exponential of -|x| gives the sigmoids of x and -x,
// and sigmoids share a reciprocal: each denominator is between 1 and 2, so their product is too small to overflow.
#pragma once
#include "../common/activations.cuh"
#include "../common/affine.cuh"

template <int INPUT_COUNT, int PARAMETER_COUNT>
struct KindOf {
    enum : int { INPUTS = INPUT_COUNT, PARAMETERS = PARAMETER_COUNT, ROOM = PARAMETERS > 0 ? PARAMETERS : 1 };
    enum : bool { PADS = false };

    // At one time step of one channel, in float32.
    struct Given {
        float input[INPUTS];
        float parameter[ROOM];  // prepared
        bool reset;             // whether the state starts anew here
        bool option;            // of the kind's line in kinds.py
    };
    struct Gradients {
        float input[INPUTS];
        float parameter[ROOM];  // of what was prepared
    };

    __device__ static float padding(int) { return 0; }
    __device__ static float prepared(int, float parameter) { return parameter; }
    __device__ static float slope(int, float) { return 1; }
};

// exp(-|x|)
__device__ inline float exp_below(float x) { return fast_exp2(-LOG2_E * fabsf(x)); }

// Two numbers whose sum is 1, from the smaller one. The larger one is a difference, so that one close to 1, such as a gate
// that keeps a state for long, is right to its last bit.
struct Shares {
    float first, second;

    __device__ Shares(bool first_is_larger, float smaller)
        : first(first_is_larger ? 1 - smaller : smaller), second(first_is_larger ? smaller : 1 - smaller) {}
};

// The sigmoids of x and of -x, from exp(-|x|) and 1 / (1 + exp(-|x|)).
struct Sigmoids {
    float up, down;

    __device__ Sigmoids(float x, float below, float reciprocal) {
        const Shares shares(x >= 0, below * reciprocal);
        up = shares.first, down = shares.second;
    }
};

// g(x) = x + 1/2 from 0 on, and sigmoid(x) below, from the same; and its derivative, from its value.
__device__ inline float positive(float x, float below, float reciprocal) {
    return x >= 0 ? x + 0.5f : below * reciprocal;
}
__device__ inline float positive_slope(float x, float value) { return x >= 0 ? 1.0f : value * (1 - value); }

#include KIND_HEADER
