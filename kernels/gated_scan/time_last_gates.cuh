// What the kernels for contiguous time compute at one time step. Aligned and generic access share this file, which does not
// depend on how inputs are loaded. kind.cuh has the interface of the kind.
#pragma once
#include "kind.cuh"

enum : int { INPUTS = Kind::INPUTS, PARAMETERS = Kind::PARAMETERS };
// Bits of `flags`: whether h[t] follows from h[t+1], and the kind's option.
enum : int { AGAINST_TIME = 1, WITH_OPTION = 2 };

using Given = Kind::Given;
using Values = Kind::Values;

// What an input is taken to be past the end of a row.
__device__ inline Storage padding_of(int input) { return Element::narrow(Kind::padding(input)); }

// The parameters of one channel, after Kind::prepared.
struct Channel {
    float parameter[Kind::PARAMETER_SLOTS];

    __device__ void load(const float* parameters, i64 channels, i64 channel) {
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++) parameter[p] = Kind::prepared(p, parameters[p * channels + channel]);
    }
    __device__ void give(Given& given) const {
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++) given.parameter[p] = parameter[p];
    }
};
// The gradient of a channel parameter, from the gradient of its `prepared` value.
__device__ inline float of_parameter(int p, float gradient, const float* parameters, i64 channels, i64 channel) {
    return Kind::slope(p, parameters[p * channels + channel]) * gradient;
}

// Gate and token of one step. At a reset the gate is 0.
__device__ inline Step gated(const Given& given, const Values& values) {
    const Step step = Kind::step(values);
    return {given.reset ? 0.0f : step.scale, step.shift};
}

// The affine map of one step of the backward scan, h[t] = gate * (grad + h[t+1]). At a reset it is 0, even where the gate
// or the gradient is NaN.
__device__ inline Step backward_step(const Given& given, const Values& values, float grad) {
    const float gate = Kind::step(values).scale;
    return {given.reset ? 0.0f : gate, given.reset ? 0.0f : gate * grad};
}

struct BackwardResult {
    Kind::Gradients gradients;
    float earlier;  // the gradient that reaches the state before the step
};

// `earlier` is the state before the step, and `h` the gradient from the step after it.
__device__ inline BackwardResult backward(const Given& given, const Values& values, float grad, float earlier, float h) {
    const float token_grad = grad + h, gate = Kind::step(values).scale;
    const float gate_grad = given.reset ? 0.0f : token_grad * earlier;
    return {Kind::gradients(given, values, gate_grad, token_grad), given.reset ? 0.0f : gate * token_grad};
}

// The sum over a warp's lanes. Only the first lane's result is right.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += from_higher(x, distance);
    return x;
}
