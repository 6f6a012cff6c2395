// The cells of recurrent networks: what one hidden unit computes in a time step, after the product of the hidden state
// with R, and the gradients of that.
//
// FUNCTION (lstm, gru, elman, slstm) comes from the build. Gates, states and kept values come in the order of problem.py;
// reference.py has the formulas. Everything is computed in float32.
//
//     RECURRENT   gates that have a product of R with h: `r`
//     INPUTS      gates that have a part of the inputs, Wx: `x`
//     GATES       biases `b`, and gradients that the backward function gives
//     STATES      states `s`
//     KEPT        values that the forward function keeps for the backward one
//
// The backward functions read only TRACKED of the states, from number FIRST on, as they were before and after the step.
// `grads` comes in as the gradient of the states after the step. It goes out as the gradient of the states before the
// step, without the part that flows through R.
#pragma once
#include "../common/math.cuh"
#include "element.cuh"

__device__ inline float exponential(float x) {
    return Element::EXACT ? expf(x) : fast_exp2(x * 1.4426950408889634f);
}
// To one or two ulp, without branches: tanhf and a division each contain a branch, which keeps the compiler from interleaving
// gates. Below 0.6: the odd polynomial with the least relative error.
__device__ inline float exact_tanh(float x) {
    const float size = fabsf(x), square = x * x;
    float p = -0.006276393309235573f;
    p = fmaf(p, square, 0.021116217598319054f);
    p = fmaf(p, square, -0.053875140845775604f);
    p = fmaf(p, square, 0.13332924246788025f);
    p = fmaf(p, square, -0.3333333134651184f);
    const float small = fmaf(x * square, p, x);
    const float large = 1.f - 2.f * fast_reciprocal(1.f + expf(2.f * size));
    return size < 0.6f ? small : copysignf(large, x);
}
// Not below 2^-126.
__device__ inline float exact_logistic(float x) {
    constexpr float MOST = 8.507059e37f;  // 2^126, whose reciprocal is the least that is not subnormal
    const float y = 1.f + expf(-x), bounded = y > MOST ? MOST : y, r = fast_reciprocal(bounded);
    return fmaf(r, fmaf(-bounded, r, 1.f), r);
}
__device__ inline float hyperbolic(float x) { return Element::EXACT ? exact_tanh(x) : fast_tanh(x); }
__device__ inline float quotient(float x, float y) {
    return Element::EXACT ? x / y : x * fast_reciprocal(y);
}
__device__ inline float logistic(float x) {
    return Element::EXACT ? exact_logistic(x) : fast_reciprocal(1.f + exponential(-x));
}
// log σ(x). `complement` computes 1 − σ(x) from it.
__device__ inline float log_logistic(float x) {
    const float tail = exponential(-fabsf(x));
    const float log = Element::EXACT ? log1pf(tail) : 0.6931471805599453f * fast_log2(1.f + tail);
    return (x < 0 ? x : 0.f) - log;
}
__device__ inline float complement(float log) {
    if (Element::EXACT) return -expm1f(log);
    const float series = 1 + log / 2 * (1 + log / 3 * (1 + log / 4 * (1 + log / 5)));
    return log > -0.25f ? -log * series : 1.f - exponential(log);
}

__device__ inline float clipped(float x, float limit) {
    return x > limit ? limit : x < -limit ? -limit : x;
}

struct lstm {
    enum : int { RECURRENT = 4, INPUTS = 4, GATES = 4, STATES = 2, KEPT = 4 };
    enum : int { FIRST = 1, TRACKED = 1 };

    static __device__ void forward(const float (&r)[4], const float (&x)[4], const float (&b)[4],
                                   float (&s)[2], float (&kept)[4]) {
        kept[0] = logistic(r[0] + x[0] + b[0]);
        kept[1] = logistic(r[1] + x[1] + b[1]);
        kept[2] = hyperbolic(r[2] + x[2] + b[2]);
        kept[3] = logistic(r[3] + x[3] + b[3]);
        s[1] = kept[1] * s[1] + kept[0] * kept[2];
        s[0] = kept[3] * hyperbolic(s[1]);
    }
    static __device__ void backward(const float (&kept)[4], const float (&before)[1],
                                    const float (&after)[1], float (&grads)[2], float (&gates)[4]) {
        const float i = kept[0], f = kept[1], z = kept[2], o = kept[3], bent = hyperbolic(after[0]);
        const float dh = grads[0], dc = grads[1] + dh * o * (1 - bent * bent);
        gates[0] = dc * z * i * (1 - i);
        gates[1] = dc * before[0] * f * (1 - f);
        gates[2] = dc * i * (1 - z * z);
        gates[3] = dh * bent * o * (1 - o);
        grads[0] = 0;
        grads[1] = dc * f;
    }
};

struct gru {
    enum : int { RECURRENT = 3, INPUTS = 3, GATES = 4, STATES = 1, KEPT = 4 };
    enum : int { FIRST = 0, TRACKED = 1 };

    static __device__ void forward(const float (&r)[3], const float (&x)[3], const float (&b)[4],
                                   float (&s)[1], float (&kept)[4]) {
        kept[3] = r[0] + b[0];
        kept[0] = logistic(r[1] + x[0] + b[1]);
        kept[1] = logistic(r[2] + x[1] + b[2]);
        kept[2] = hyperbolic(x[2] + b[3] + kept[0] * kept[3]);
        s[0] = kept[1] * s[0] + (1 - kept[1]) * kept[2];
    }
    static __device__ void backward(const float (&kept)[4], const float (&before)[1],
                                    const float (&after)[1], float (&grads)[1], float (&gates)[4]) {
        const float r = kept[0], z = kept[1], n = kept[2], g = kept[3], dh = grads[0];
        const float dn = dh * (1 - z) * (1 - n * n);
        gates[0] = dn * r;
        gates[1] = dn * g * r * (1 - r);
        gates[2] = dh * (before[0] - n) * z * (1 - z);
        gates[3] = dn;
        grads[0] = dh * z;
    }
};

struct elman {
    enum : int { RECURRENT = 1, INPUTS = 1, GATES = 1, STATES = 1, KEPT = 0 };
    enum : int { FIRST = 0, TRACKED = 1 };

    static __device__ void forward(const float (&r)[1], const float (&x)[1], const float (&b)[1],
                                   float (&s)[1], float (&kept)[1]) {
        s[0] = hyperbolic(r[0] + x[0] + b[0]);
    }
    static __device__ void backward(const float (&kept)[1], const float (&before)[1],
                                    const float (&after)[1], float (&grads)[1], float (&gates)[1]) {
        gates[0] = grads[0] * (1 - after[0] * after[0]);
        grads[0] = 0;
    }
};

// The states are h, c, n and m; a prime marks a state after the step. The step weighs its input by e = exp(i − m') and the
// states before it by k = exp(log σ(f) + m − m'), with m' the larger of i and log σ(f) + m, so that e or k is 1. kept[0]
// holds the other one: k if i is the larger, else −e, so that the sign bit tells which. kept[1] holds log σ(f).
//
// Gradient of m. h depends on c, n and m only through c/n, which m does not change unless n is at its lower bound of 1. So
// if only h enters the loss, dm = dc·c + dn·n. The backward pass carries dm − dc·c − dn·n in place of dm: it is exactly 0
// then, and collects no rounding errors.
//
// Gradients of i and f. They are dc times a difference: of z and c/n, or of c/n before and after the step. Both may be far
// smaller than c/n, so that the rounding of states to 16 bits would be most of them. But c'/n' − c/n = w·(z − c/n) with
// w = e/n', and that form makes the error smaller by the factor w. The gradient carried for n then has to belong to the
// c/n of the rounded states, too. The form holds while c/n is a weighted mean of z. It is not used if initial states put
// |c/n| at 2 or more, or if n is at its lower bound: then the states are subtracted as they are.
struct slstm {
    enum : int { RECURRENT = 4, INPUTS = 4, GATES = 4, STATES = 4, KEPT = 4 };
    enum : int { FIRST = 1, TRACKED = 2 };

    static __device__ void forward(const float (&r)[4], const float (&x)[4], const float (&b)[4],
                                   float (&s)[4], float (&kept)[4]) {
        const float i = r[0] + x[0] + b[0];
        kept[1] = log_logistic(r[1] + x[1] + b[1]);
        kept[2] = hyperbolic(r[2] + x[2] + b[2]);
        kept[3] = logistic(r[3] + x[3] + b[3]);
        const float decayed = kept[1] + s[3];
        const bool by_input = s[2] == 0 || i > decayed;
        constexpr float MOST_LOG = 60;  // if n is 0, k is not bounded by 1; this keeps it finite
        const float apart = by_input ? decayed - i : i - decayed;
        const float lesser = exponential(apart > MOST_LOG ? MOST_LOG : apart);
        const float e = by_input ? 1.f : lesser, k = by_input ? lesser : 1.f;
        kept[0] = by_input ? lesser : -lesser;
        s[1] = k * s[1] + e * kept[2];
        s[2] = k * s[2] + e;
        s[2] = s[2] < 1 ? 1.f : s[2];
        s[3] = by_input ? i : decayed;
        s[0] = kept[3] * quotient(s[1], s[2]);
    }
    static __device__ void backward(const float (&kept)[4], const float (&before)[2],
                                    const float (&after)[2], float (&grads)[4], float (&gates)[4]) {
        const bool by_input = !(__float_as_uint(kept[0]) >> 31);
        const float e = by_input ? 1.f : -kept[0], k = by_input ? kept[0] : 1.f;
        const float z = kept[2], o = kept[3], c = after[0], n = after[1];
        const float dh = grads[0], share = quotient(dh * o, n), y = quotient(c, n);
        const float dc = grads[1] + share, to_n = grads[2] - share * y;
        const float kept_n = k * before[1];
        const bool floored = kept_n + e < 1;
        const float dn = floored ? 0.f : to_n;
        const float dm = grads[3] + (floored ? to_n : 0.f);
        float to_e = dc * z + dn, to_k = dc * before[0] + dn * before[1], old_dn = dn;
        if (!Element::EXACT && !floored && fabsf(before[0]) < 2 * before[1]) {
            const float old_y = quotient(before[0], before[1]), apart = quotient(dc * (z - old_y), n);
            const float own = dc * y + dn, old = own - e * apart;
            to_e = own + kept_n * apart, to_k = old * before[1], old_dn = old - dc * old_y;
        }
        gates[0] = to_e * e + (by_input ? dm : 0.f);
        gates[1] = (to_k * k + (by_input ? 0.f : dm)) * complement(kept[1]);
        gates[2] = dc * e * (1 - z * z);
        gates[3] = dh * y * o * (1 - o);
        grads[0] = 0;
        grads[1] = dc * k;
        grads[2] = old_dn * k;
        grads[3] = by_input ? 0.f : dm;
    }
};

using Cell = FUNCTION;

// `receive` adds `given`, the gradient of the states that a step gives out, to the carried gradient. `release` turns the
// carried gradient into the gradient of the states before the first step. They differ only in slstm, which carries another
// value in place of dm (see slstm).
__device__ inline void receive(float (&grads)[Cell::STATES], const float (&given)[Cell::STATES],
                               const float (&after)[Cell::TRACKED]) {
#pragma unroll
    for (int s = 0; s < Cell::STATES; s++) grads[s] += given[s];
    if constexpr (Cell::STATES == 4) grads[3] -= given[1] * after[0] + given[2] * after[1];
}
__device__ inline void release(float (&grads)[Cell::STATES], const float (&before)[Cell::TRACKED]) {
    if constexpr (Cell::STATES == 4) grads[3] += grads[1] * before[0] + grads[2] * before[1];
}

// A reset: neither the product with R nor the states before are of account, even if they are not finite.
__device__ inline void start_anew(float (&r)[Cell::RECURRENT], float (&states)[Cell::STATES]) {
#pragma unroll
    for (int g = 0; g < Cell::RECURRENT; g++) r[g] = 0;
#pragma unroll
    for (int s = 0; s < Cell::STATES; s++) states[s] = 0;
}

__device__ constexpr int at_least_one(int n) { return n > 0 ? n : 1; }
