/* minLSTM. With s the sigmoid, f = s(forget) / (s(forget) + s(input)) and i = 1 - f:
 * h[t] = f * h[t-1] + i * g(hidden)
 *
 * f = (1 + e^-input) / (2 + e^-forget + e^-input), which does not change where both are so negative
 * that s(x) is e^x and the same is added to both: so much that the larger one becomes LOW. */
#define KIND(name) LEVEL(name##_min_lstm)
enum { KIND(INPUTS) = 3, KIND(PARAMETERS) = 0, KIND(OPTIONS) = 1 };

typedef struct {
    Floats kept, taken, value;  /* f, i and g(hidden) */
    Floats of_forget, of_input; /* e^-forget and e^-input, or s(-forget) and s(-input) are 1 */
} KIND(Values);

INLINE KIND(Values) KIND(values)(const Given *given) {
    const float LOW = -20;
    const Floats forget = given->input[0], input = given->input[1], hidden = given->input[2];
    const Floats most = LEVEL(larger_of)(forget, input);
    const Floats more = LEVEL(larger_of)(LOW - most, LEVEL(all)(0));
    const Floats of_forget = LEVEL(exp_neg)(forget + more), taken = 1 + of_forget;
    const Floats of_input = LEVEL(exp_neg)(input + more), kept = 1 + of_input;
    const Floats smaller = LEVEL(smaller_of)(kept, taken);
    const Shares of = LEVEL(shares)(kept >= taken, smaller / (kept + taken));
    return (KIND(Values)){of.up, of.down, given->option ? hidden : LEVEL(positive)(hidden),
                          of_forget, of_input};
}

INLINE Step KIND(step)(KIND(Values) of) { return (Step){of.kept, of.taken * of.value}; }

INLINE Gradients KIND(gradients)(const Given *given, const KIND(Values) *of, Floats gate_grad,
                                 Floats token_grad) {
    const Floats to_value = token_grad * of->taken, hidden = given->input[2];
    const Floats to_apart = (gate_grad - token_grad * of->value) * (of->kept * of->taken);
    return (Gradients){
        {to_apart * (of->of_forget / (1 + of->of_forget)),
         -to_apart * (of->of_input / (1 + of->of_input)),
         given->option ? to_value : to_value * LEVEL(positive_slope)(hidden, of->value)},
        {{0}}};
}

#include "gated_scan/cpu/steps.h"
