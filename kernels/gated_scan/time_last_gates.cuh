// What time-last kernels compute at one time step, whatever path its inputs come on. The kind is that of kind.cuh.
#pragma once
#include "kind.cuh"

enum : int { INPUTS = Kind::INPUTS, PARAMETERS = Kind::PARAMETERS };
// Bits of `flags`: h[t] follows from h[t+1]; the kind's option.
enum : int { AGAINST_TIME = 1, WITH_OPTION = 2 };

using Given = Kind::Given;
using Values = Kind::Values;

// What the bits of `input` are past the end of a row.
__device__ inline Storage padding_of(int input) { return Element::narrow(Kind::padding(input)); }

// The parameters of one channel, prepared.
struct Channel {
    float parameter[Kind::ROOM];

    __device__ void load(const float* parameters, i64 channels, i64 channel) {
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++) parameter[p] = Kind::prepared(p, parameters[p * channels + channel]);
    }
    __device__ void give(Given& given) const {
#pragma unroll
        for (int p = 0; p < PARAMETERS; p++) given.parameter[p] = parameter[p];
    }
};
// The gradient of a channel's parameter, from that of the prepared one.
__device__ inline float of_parameter(int p, float gradient, const float* parameters, i64 channels, i64 channel) {
    return Kind::slope(p, parameters[p * channels + channel]) * gradient;
}

// The gate counts as 0 where a state starts anew.
__device__ inline Step gated(const Given& given, const Values& values) {
    const Step step = Kind::step(values);
    return {given.reset ? 0.0f : step.scale, step.shift};
}

// How the gradient passes a step, in the order of the backward scan: h[t] = gate * (grad + h[t+1]), of which nothing is
// left where a state starts anew, not even a NaN.
__device__ inline Step backward_step(const Given& given, const Values& values, float grad) {
    const float gate = Kind::step(values).scale;
    return {given.reset ? 0.0f : gate, given.reset ? 0.0f : gate * grad};
}

struct BackwardResult {
    Kind::Gradients gradients;
    float earlier;  // the gradient of the state before the step
};

// `earlier` is the state before the step, `h` the gradient that comes from the step after it.
__device__ inline BackwardResult backward(const Given& given, const Values& values, float grad, float earlier, float h) {
    const float token_grad = grad + h, gate = Kind::step(values).scale;
    const float gate_grad = given.reset ? 0.0f : token_grad * earlier;
    return {Kind::gradients(given, values, gate_grad, token_grad), given.reset ? 0.0f : gate * token_grad};
}

// The sum over a warp, in its first lane.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += from_higher(x, distance);
    return x;
}
