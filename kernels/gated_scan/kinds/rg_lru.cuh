// RG-LRU. With r and i the sigmoids of `recurrence_gate` and `input_gate`, and a = exp(-8 * r * softplus(a_param)):
//
//     h[t] = a * h[t-1] + sqrt(1 - a * a) * i * x          and where the state starts anew  h[t] = i * x
//
// The channel parameter is prepared, to p = 8 * softplus(a_param) / log(2), so that a = exp2(-m) with m = p * r. p is
// finite, as infinity times r = 0 would be NaN. Special functions: 5.
//
// Where the state starts anew the recurrence gate does not matter, even if it is not a number.
//
// a may be as close to 1 as one likes, so 1 - a is not a difference there: up to m = 1/2 it is m times a polynomial, to
// 1e-7, and 1 - a * a is (1 - a) * (1 + a). The GPU's exponential errs by two units in the last place, alike for like
// gates, which would add up over the steps that a state lasts. The root is steep where a is close to 1; its derivative
// counts as at most 1000, as implementations cap it.

struct Kind : KindOf<3, 1> {
    struct Values {
        float a, token;
        float scale, slope;   // scale: the root, or 1 where the state starts anew; slope: the root's derivative, twice
        float r, to_gate;     // the sigmoid of the recurrence gate; and m's derivative by that gate, times log(2)
        float taken, falls;   // the sigmoids of the input gate, and of its negative
    };
    enum : bool { PADS = true };
    __device__ static float padding(int input) { return input == 1 ? -1e4f : 0.0f; }

    __device__ static float prepared(int, float a_param) {
        const float p = 8 * LOG2_E * softplus(a_param);
        return p > 3e38f ? 3e38f : p;  // and NaN is NaN
    }
    __device__ static float slope(int, float a_param) {
        const float below = exp_below(a_param);
        return 8 * Sigmoids(a_param, below, fast_reciprocal(1 + below)).up;
    }

    // a and 1 - a, of a = exp2(-m) for m from 0 on.
    __device__ static Shares decay(float m) {
        float p = 0.0011542474385350943f;
        p = p * m - 0.009541073814034462f;
        p = p * m + 0.055490341037511826f;
        p = p * m - 0.2402256429195404f;
        p = p * m + 0.6931471824645996f;
        const bool slow = m < 0.5f;
        return Shares(slow, slow ? m * p : fast_exp2(-m));
    }
    __device__ static Values values(const Given& given) {
        const float recurrence = given.reset ? 0.0f : given.input[1], gate = given.input[2];
        const float below = exp_below(recurrence), gate_below = exp_below(gate);
        const float both = fast_reciprocal((1 + below) * (1 + gate_below));
        const Sigmoids r(recurrence, below, both * (1 + gate_below)), taken(gate, gate_below, both * (1 + below));
        const float m = given.parameter[0] * r.up;
        const Shares decay = Kind::decay(m);
        const float a = decay.first, square = decay.second * (1 + a);
        // Of nothing the root is 0, and what divides by it is capped.
        const float by_root = fast_rsqrt(square < 1e-30f ? 1e-30f : square);
        const float scale = given.reset ? 1.0f : square * by_root;
        return {a,
                scale * taken.up * given.input[0],
                scale,
                by_root < 2000.0f ? by_root : 2000.0f,
                r.up,
                m * r.down * (1 / LOG2_E),
                taken.up,
                taken.down};
    }
    __device__ static Step step(const Values& of) { return {of.a, of.token}; }

    __device__ static Gradients gradients(const Given& given, const Values& of, float gate_grad, float token_grad) {
        const float x = given.input[0], to_scale = token_grad * of.taken;
        // da / dm = -log(2) * a, and d(1 - a * a) / dm = 2 log(2) * a * a. The factor log(2) is in `to_gate` and slope().
        const float to_a = given.reset ? 0.0f : to_scale * x * of.slope * of.a - gate_grad;
        const float to_m = of.a * to_a;
        const float to_x = to_scale * of.scale;
        return {{to_x, to_m * of.to_gate, to_x * (x * of.falls)}, {to_m * of.r}};
    }
};
