// minLSTM. With s the sigmoid, f = s(forget) / (s(forget) + s(input)) and i = 1 - f:  h[t] = f * h[t-1] + i * g(hidden)
//
// g(x) is x + 1/2 from 0 on and sigmoid(x) below, which is positive; with the option it is x itself. Special functions: 5
// forward and 6 backward.
//
// f is a quotient of two numbers that may both be as small as one likes, so it is computed as the sigmoid of a difference
// of logarithms. That of s(x) is min(x, 0) - log(1 + exp(-|x|)). With d the difference of the minima, f and i are in
// proportion as exp(d) * (1 + exp(-|input|)) and 1 + exp(-|forget|). Both are divided by exp(d) where that is above 1.

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
        const float forget_below = exp_below(forget), input_below = exp_below(input), hidden_below = exp_below(hidden);
        const float least = exp_below(apart);
        const float kept = (1 + input_below) * (apart < 0 ? least : 1.0f);
        const float taken = (1 + forget_below) * (apart < 0 ? 1.0f : least);
        const float both = fast_reciprocal((kept + taken) * (1 + hidden_below)), each = both * (1 + hidden_below);
        const float two = fast_reciprocal((1 + forget_below) * (1 + input_below));  // in backward kernels alone
        const Shares shares(kept >= taken, (kept < taken ? kept : taken) * each);
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
