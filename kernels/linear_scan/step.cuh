// What a scan computes at one position, forward and backward. Every path reads a position's elements in its own way and
// calls the functor of its direction; none has a formula of its own.
//
// `Padding` holds the bits that a path puts where a tensor has no element, such as past the end of a row. The affine map
// of such a position is the identity in both directions, so that states pass through it unchanged. They are enumerators,
// since NVRTC keeps static members in memory.
#pragma once
#include "../common/affine.cuh"

// Forward: x[t] = gate * x[t-1] + token.
struct ForwardStep {
    struct Padding {
        enum : GateStorage { GATE = GateElement::ONE };
        enum : Storage { TOKEN = 0 };
    };

    __device__ static Step map(State gate, State token) { return {gate, token}; }
};

// Backward, with h[t] the gradient that reaches x[t-1]: h[t] = conj(gate) * (grad + h[t+1]).
struct BackwardStep {
    struct Padding {
        enum : GateStorage { GATE = GateElement::ONE };
        enum : Storage { GRAD = 0, STATE = 0 };
    };
    struct Gradients {
        State gate, token, earlier;  // of the position's gate and token, and h, of the state before it
    };

    __device__ static Step map(State gate, State grad) {
        const State scale = conj(gate);
        return {scale, scale * grad};
    }
    // Of the gate, from that of the token and the state before the position.
    __device__ static State gate_gradient(State token_gradient, State earlier) {
        return token_gradient * conj(earlier);
    }
    // `earlier` is the state before the position, and `h` the gradient that comes from the one after it.
    __device__ static Gradients gradients(State gate, State grad, State earlier, State h) {
        const State token = grad + h;
        return {gate_gradient(token, earlier), token, conj(gate) * token};
    }
};
