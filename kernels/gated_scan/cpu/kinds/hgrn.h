/* HGRN. With s the sigmoid, b the channel's `lower_bound` and g = b + (1 - b) * s(forget):
 * h[t] = g * h[t-1] + (1 - g) * x * s(x) */
#define KIND(name) LEVEL(name##_hgrn)
enum { KIND(INPUTS) = 2, KIND(PARAMETERS) = 1, KIND(OPTIONS) = 0 };

typedef struct {
    Floats kept, token;
    Shares forget, x; /* the sigmoids of each and of its negative */
} KIND(Values);

INLINE KIND(Values) KIND(values)(const Given *given) {
    const Floats x = given->input[0], forget = given->input[1];
    const Floats bound = given->parameter[0], free = 1 - bound;
    const Shares of = LEVEL(sigmoids)(forget);
    const Shares of_x = LEVEL(quick_sigmoids)(x);
    /* The two forms of g are equal. The first one rounds to 1 where s(forget) does. */
    const Floats kept = LEVEL(select)(forget >= 0, 1 - free * of.down, bound + free * of.up);
    return (KIND(Values)){kept, free * of.down * (x * of_x.up), of, of_x};
}

INLINE Step KIND(step)(KIND(Values) of) { return (Step){of.kept, of.token}; }

INLINE Gradients KIND(gradients)(const Given *given, const KIND(Values) *of, Floats gate_grad,
                                 Floats token_grad) {
    const Floats x = given->input[0], free = 1 - given->parameter[0];
    /* The gradient of s(-forget), divided by 1 - b. */
    const Floats to_falls = token_grad * (x * of->x.up) - gate_grad;
    return (Gradients){{token_grad * (free * of->forget.down) * (of->x.up * (1 + x * of->x.down)),
                        -to_falls * free * (of->forget.up * of->forget.down)},
                       {-to_falls * of->forget.down}};
}

#include "gated_scan/cpu/steps.h"
