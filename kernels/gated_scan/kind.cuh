// The interface between kernels and kinds of gates. A kind computes gate and token of  h[t] = gate * h[t-1] + token  from
// its inputs at step t. A kernel is compiled for one kind, and includes its header: the build names it in KIND_HEADER.
//
// A header defines `struct Kind`, which inherits from KindOf<number of inputs, number of channel parameters>. It has a type
// `Values`, which holds what `step` and `gradients` both need, and three functions:
//
//     static Values values(const Given& given)
//     static Step step(const Values& of)                  gate and token of h[t] = gate * h[t-1] + token
//     static Gradients gradients(const Given& given, const Values& of, float gate_grad, float token_grad)
//
// The functions must be right for all finite inputs, and not overflow for inputs up to 1e30. At a reset the state starts
// anew: the kernels then take 0 for gate and gate_grad, whatever the kind computes. A header may also replace what it
// inherits:
//
//     PADS, padding       PADS is true if the inputs `padding` make gate 1 and token 0, the identity. Kernels take these
//                         inputs past the end of the sequence.
//     prepared, slope     `prepared` is a function of a channel parameter, computed once for the channel; the kind gets its
//                         value in place of the parameter. `slope` is its derivative.
//
// Instructions of the special function units (ex2, rcp, rsqrt) are the slowest, so kinds save them. The sigmoids of x and
// of -x both come from exp(-|x|). Two sigmoids share one reciprocal, that of the product of their denominators: each
// denominator is between 1 and 2, so the product does not overflow.
#pragma once
#include "../common/activations.cuh"
#include "../common/affine.cuh"

template <int INPUT_COUNT, int PARAMETER_COUNT>
struct KindOf {
    enum : int { INPUTS = INPUT_COUNT, PARAMETERS = PARAMETER_COUNT, PARAMETER_SLOTS = PARAMETERS > 0 ? PARAMETERS : 1 };
    enum : bool { PADS = false };

    // At one time step of one channel, in float32.
    struct Given {
        float input[INPUTS];
        float parameter[PARAMETER_SLOTS];  // after `prepared`
        bool reset;             // whether the state starts anew here
        bool option;            // `option` of the kind's line in kinds.py
    };
    struct Gradients {
        float input[INPUTS];
        float parameter[PARAMETER_SLOTS];  // with respect to the value of `prepared`
    };

    __device__ static float padding(int) { return 0; }
    __device__ static float prepared(int, float parameter) { return parameter; }
    __device__ static float slope(int, float) { return 1; }
};

// exp(-|x|)
__device__ inline float exp_neg_abs(float x) { return fast_exp2(-LOG2_E * fabsf(x)); }

// Two numbers whose sum is 1, made from the smaller of them. The larger one is 1 minus the smaller, so a number close to
// 1 is right to its last bit. That matters for gates close to 1, which keep a state for many steps.
struct Complements {
    float first, second;

    __device__ Complements(bool first_is_larger, float smaller)
        : first(first_is_larger ? 1 - smaller : smaller), second(first_is_larger ? smaller : 1 - smaller) {}
};

// The sigmoids of x and of -x, from exp(-|x|) and 1 / (1 + exp(-|x|)).
struct Sigmoids {
    float up, down;

    __device__ Sigmoids(float x, float below, float reciprocal) {
        const Complements shares(x >= 0, below * reciprocal);
        up = shares.first, down = shares.second;
    }
};

// g(x) = x + 1/2 for x >= 0, else sigmoid(x), from exp(-|x|) and 1 / (1 + exp(-|x|)).
__device__ inline float positive(float x, float below, float reciprocal) {
    return x >= 0 ? x + 0.5f : below * reciprocal;
}
// The derivative of g at x, from the value of g(x).
__device__ inline float positive_slope(float x, float value) { return x >= 0 ? 1.0f : value * (1 - value); }

#include KIND_HEADER
