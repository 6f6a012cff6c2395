// minGRU. With z the sigmoid of `gate`:  h[t] = (1 - z) * h[t-1] + z * g(hidden)
//
// g(x) is x + 1/2 from 0 on and sigmoid(x) below, which is positive; with the option it is x itself. Special functions: 3.

struct Kind : KindOf<2, 0> {
    struct Values {
        float kept, taken, value;  // 1 - z, z and g(hidden)
    };
    enum : bool { PADS = true };
    __device__ static float padding(int input) { return input == 0 ? -1e4f : 0.0f; }

    __device__ static Values values(const Given& given) {
        const float gate = given.input[0], hidden = given.input[1];
        const float below = exp_below(gate), hidden_below = exp_below(hidden);
        const float both = fast_reciprocal((1 + below) * (1 + hidden_below));
        const Sigmoids z(gate, below, both * (1 + hidden_below));
        return {z.down, z.up, given.option ? hidden : positive(hidden, hidden_below, both * (1 + below))};
    }
    __device__ static Step step(const Values& of) { return {of.kept, of.taken * of.value}; }

    __device__ static Gradients gradients(const Given& given, const Values& of, float gate_grad, float token_grad) {
        const float to_z = token_grad * of.value - gate_grad;
        const float slope = given.option ? 1.0f : positive_slope(given.input[1], of.value);
        return {{to_z * (of.kept * of.taken), token_grad * of.taken * slope}, {}};
    }
};
