// minGRU. With z the sigmoid of `gate`:  h[t] = (1 - z) * h[t-1] + z * g(hidden)
//
// g(x) is x + 1/2 from 0 on and sigmoid(x) below, which is positive; with the option it is x itself.
#pragma once
#include "../kind.cuh"

struct Kind {
    enum : int { INPUTS = 2, PARAMETERS = 0 };
    using Given = GivenTo<Kind>;

    struct Values {
        float kept, taken, value;  // 1 - z, z and g(hidden)
    };

    __device__ static Values values(const Given& given) {
        return {sigmoid(-given.input[0]), sigmoid(given.input[0]),
                given.option ? given.input[1] : positive(given.input[1])};
    }
    __device__ static Step step(const Values& of) { return {of.kept, of.taken * of.value}; }

    // The gradients of the inputs and of the channel's parameters, from those of gate and token.
    __device__ static Gradients<Kind> gradients(const Given& given, const Values& of, float gate_grad, float token_grad) {
        const float to_z = token_grad * of.value - gate_grad;
        const float slope = given.option ? 1.0f : positive_slope(given.input[1], of.value);
        return {{to_z * (of.kept * of.taken), token_grad * of.taken * slope}, {}};
    }
};
