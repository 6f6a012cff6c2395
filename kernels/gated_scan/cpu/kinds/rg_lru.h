/* RG-LRU. With r and i the sigmoids of `recurrence_gate` and `input_gate`, and
 * a = exp(-8 * r * softplus(a_param)):  h[t] = a * h[t-1] + sqrt(1 - a * a) * i * x, and where the
 * state starts anew  h[t] = i * x
 *
 * The prepared parameter is p = 8 * softplus(a_param) / log(2), a finite number, so that
 * a = 2^-m with m = p * r. */
#define KIND(name) LEVEL(name##_rg_lru)
enum { KIND(INPUTS) = 3, KIND(PARAMETERS) = 1, KIND(OPTIONS) = 0 };

typedef struct {
    Floats a, token;
    Floats scale, root; /* the root, and what it is replaced by: 1 at a reset */
    Floats m;
    Shares r, taken; /* the sigmoids of each gate and of its negative */
} KIND(Values);

TARGET static void KIND(prepare)(const float *parameter, float *prepared, float *slope) {
    Floats of_softplus;
    const Floats p = 8 * 1.442695041f * LEVEL(softplus_of)(LEVEL(load)(parameter), &of_softplus);
    const Floats most = LEVEL(all)(3e38f);
    LEVEL(store)(prepared, LEVEL(select)(p > most, most, p));
    LEVEL(store)(slope, 8 * of_softplus);
}

INLINE KIND(Values) KIND(values)(const Given *given) {
    const Floats zero = {0}, one = LEVEL(all)(1), gate = given->input[2];
    const Floats recurrence = LEVEL(select)(given->reset, zero, given->input[1]);
    const Shares r = LEVEL(quick_sigmoids)(recurrence);
    const Shares taken = LEVEL(quick_sigmoids)(gate);
    const Floats m = given->parameter[0] * r.up;
    /* 1 - a has all its digits where a is close to 1. */
    Floats a;
    const Floats rest = LEVEL(decay_of)(m, &a), root = LEVEL(root)(rest * (1 + a));
    const Floats scale = LEVEL(select)(given->reset, one, root);
    return (KIND(Values)){a, scale * taken.up * given->input[0], scale, root, m, r, taken};
}

INLINE Step KIND(step)(KIND(Values) of) { return (Step){of.a, of.token}; }

INLINE Gradients KIND(gradients)(const Given *given, const KIND(Values) *of, Floats gate_grad,
                                 Floats token_grad) {
    const Floats zero = {0}, x = given->input[0], to_scale = token_grad * of->taken.up;
    /* 2 times the root's derivative, which is limited to 1000. */
    const Floats slope = LEVEL(clamped)(1 / of->root, 0, 2000);
    /* da / dm = -log(2) * a, and d(1 - a * a) / dm = 2 log(2) * a * a. The factor log(2) is in the
     * gradient of the gate, and in the slope of the prepared parameter. */
    const Floats of_a = to_scale * x * slope * of->a - gate_grad;
    const Floats to_m = of->a * LEVEL(select)(given->reset, zero, of_a);
    const Floats to_x = to_scale * of->scale;
    return (Gradients){{to_x, to_m * (of->m * of->r.down * 0.6931471806f),
                        to_x * (x * of->taken.down)},
                       {to_m * of->r.up}};
}

#include "gated_scan/cpu/steps.h"
