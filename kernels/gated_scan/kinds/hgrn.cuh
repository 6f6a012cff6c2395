// HGRN. With s the sigmoid, b the channel's `lower_bound` and g = b + (1 - b) * s(forget):
//
//     h[t] = g * h[t-1] + (1 - g) * x * s(x)
//
// 1 - g is (1 - b) * s(-forget), and no difference of numbers close to 1. Special functions: 3.

struct Kind : KindOf<2, 1> {
    struct Values {
        float kept, token;
        float rises, falls;      // s(forget) and s(-forget)
        float x_rises, x_falls;  // s(x) and s(-x)
    };
    enum : bool { PADS = true };
    __device__ static float padding(int input) { return input == 1 ? 1e4f : 0.0f; }

    __device__ static Values values(const Given& given) {
        const float x = given.input[0], forget = given.input[1], b = given.parameter[0], free = 1 - b;
        const float x_below = exp_below(x), below = exp_below(forget);
        const float both = fast_reciprocal((1 + x_below) * (1 + below));
        const Sigmoids of(forget, below, both * (1 + x_below)), of_x(x, x_below, both * (1 + below));
        // Either is right everywhere; the first is 1 where s(forget) is.
        return {forget >= 0 ? 1 - free * of.down : b + free * of.up,
                free * of.down * (x * of_x.up),
                of.up,
                of.down,
                of_x.up,
                of_x.down};
    }
    __device__ static Step step(const Values& of) { return {of.kept, of.token}; }

    __device__ static Gradients gradients(const Given& given, const Values& of, float gate_grad, float token_grad) {
        const float x = given.input[0], free = 1 - given.parameter[0];
        const float to_falls = token_grad * (x * of.x_rises) - gate_grad;  // per 1 - b
        return {{token_grad * (free * of.falls) * (of.x_rises * (1 + x * of.x_falls)),
                 -to_falls * free * (of.rises * of.falls)},
                {-to_falls * of.falls}};
    }
};
