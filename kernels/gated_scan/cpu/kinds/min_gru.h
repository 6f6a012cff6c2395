/* minGRU. With z the sigmoid of `gate`:  h[t] = (1 - z) * h[t-1] + z * g(hidden) */
#define KIND(name) LEVEL(name##_min_gru)
enum { KIND(INPUTS) = 2, KIND(PARAMETERS) = 0, KIND(OPTIONS) = 1 };

typedef struct {
    Floats kept, taken, value; /* 1 - z, z and g(hidden) */
} KIND(Values);

INLINE KIND(Values) KIND(values)(const Given *given) {
    const Floats gate = given->input[0], hidden = given->input[1];
    const Shares z = LEVEL(sigmoids)(gate);
    return (KIND(Values)){z.down, z.up, given->option ? hidden : LEVEL(positive)(hidden)};
}

INLINE Step KIND(step)(KIND(Values) of) { return (Step){of.kept, of.taken * of.value}; }

INLINE Gradients KIND(gradients)(const Given *given, const KIND(Values) *of, Floats gate_grad,
                                 Floats token_grad) {
    const Floats to_value = token_grad * of->taken, hidden = given->input[1];
    const Floats to_z = token_grad * of->value - gate_grad;
    return (Gradients){
        {to_z * (of->kept * of->taken),
         given->option ? to_value : to_value * LEVEL(positive_slope)(hidden, of->value)},
        {{0}}};
}

#include "gated_scan/cpu/steps.h"
