// minLSTM. With s the sigmoid, f = s(forget) / (s(forget) + s(input)) and i = 1 - f:  h[t] = f * h[t-1] + i * g(hidden)
//
// g(x) is x + 1/2 for x >= 0, else sigmoid(x), so g is positive. With the option, g(x) is x. Special functions: 5 forward
// and 6 backward.
//
// Both sigmoids may underflow, so f is not computed as their quotient. Since log s(x) = min(x, 0) - log(1 + exp(-|x|)),
// with d = min(forget, 0) - min(input, 0)
//
//     f / i = exp(d) * (1 + exp(-|input|)) / (1 + exp(-|forget|))
//
// If d > 0, numerator and denominator are divided by exp(d), so nothing overflows.

struct Kind : KindOf<3, 0> {
    struct Values {
        float kept, taken, value;           // f, i and g(hidden)
        float forget_falls, input_falls;  // 1 - s(forget) and 1 - s(input)
    };
    enum : bool { PADS = true };
    __device__ static float padding(int input) { return input == 0 ? 1e4f : input == 1 ? -1e4f : 0.0f; }

    __device__ static Values values(const Given& given) {
        const float forget = given.input[0], input = given.input[1], hidden = given.input[2];
        const float apart = (forget < 0 ? forget : 0.0f) - (input < 0 ? input : 0.0f);
        const float forget_below = exp_neg_abs(forget), input_below = exp_neg_abs(input);
        const float hidden_below = exp_neg_abs(hidden);
        const float least = exp_neg_abs(apart);
        const float kept = (1 + input_below) * (apart < 0 ? least : 1.0f);
        const float taken = (1 + forget_below) * (apart < 0 ? 1.0f : least);
        const float both = fast_reciprocal((kept + taken) * (1 + hidden_below)), each = both * (1 + hidden_below);
        const float two = fast_reciprocal((1 + forget_below) * (1 + input_below));  // used by backward kernels only
        const Complements shares(kept >= taken, (kept < taken ? kept : taken) * each);
        return {shares.first, shares.second,
                given.option ? hidden : positive(hidden, hidden_below, both * (kept + taken)),
                Sigmoids(forget, forget_below, two * (1 + input_below)).down,
                Sigmoids(input, input_below, two * (1 + forget_below)).down};
    }
    __device__ static Step step(const Values& of) { return {of.kept, of.taken * of.value}; }

    __device__ static Gradients gradients(const Given& given, const Values& of, float gate_grad, float token_grad) {
        const float to_apart = (gate_grad - token_grad * of.value) * (of.kept * of.taken);
        const float slope = given.option ? 1.0f : positive_slope(given.input[2], of.value);
        return {{to_apart * of.forget_falls, -to_apart * of.input_falls, token_grad * of.taken * slope}, {}};
    }
};
