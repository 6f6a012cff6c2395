// RG-LRU. With r and i the sigmoids of `recurrence_gate` and `input_gate`, and a = exp(-8 * r * softplus(a_param)):
//
//     h[t] = a * h[t-1] + sqrt(1 - a * a) * i * x          and where the state starts anew  h[t] = i * x
//
// `prepared` replaces the channel parameter by p = 8 * softplus(a_param) / log(2), so that a = exp2(-m) with m = p * r. p
// is limited to finite numbers, since infinity times r = 0 would be NaN. Special functions: 5.
//
// At a reset the recurrence gate has no effect, even if it is NaN.
//
// a may be close to 1, where the difference 1 - a would lose digits. For m below 1/2, 1 - a is therefore m times a
// polynomial in m, with an error of 1e-7, and 1 - a * a is (1 - a) * (1 + a). The special function exp2 would err by two
// units in the last place, with the same sign for similar gates, and such errors add up over the steps that a state
// lasts.
//
// The square root is steep where a is close to 1. Its derivative is limited to 1000, as the published implementations do.

struct Kind : KindOf<3, 1> {
    struct Values {
        float a, token;
        float scale, slope;   // scale: the root, or 1 at a reset; slope: 2 times the root's derivative
        float r, to_gate;     // r: the sigmoid of the recurrence gate; to_gate: log(2) * dm / d(recurrence gate)
        float taken, falls;   // the sigmoids of the input gate and of its negative
    };
    enum : bool { PADS = true };
    __device__ static float padding(int input) { return input == 1 ? -1e4f : 0.0f; }

    __device__ static float prepared(int, float a_param) {
        const float p = 8 * LOG2_E * softplus(a_param);
        return p > 3e38f ? 3e38f : p;  // NaN stays NaN
    }
    __device__ static float slope(int, float a_param) {
        const float below = exp_neg_abs(a_param);
        return 8 * Sigmoids(a_param, below, fast_reciprocal(1 + below)).up;
    }

    // a = exp2(-m) and 1 - a, for m >= 0.
    __device__ static Complements decay(float m) {
        float p = 0.0011542474385350943f;
        p = p * m - 0.009541073814034462f;
        p = p * m + 0.055490341037511826f;
        p = p * m - 0.2402256429195404f;
        p = p * m + 0.6931471824645996f;
        const bool slow = m < 0.5f;
        return Complements(slow, slow ? m * p : fast_exp2(-m));
    }
    __device__ static Values values(const Given& given) {
        const float recurrence = given.reset ? 0.0f : given.input[1], gate = given.input[2];
        const float below = exp_neg_abs(recurrence), gate_below = exp_neg_abs(gate);
        const float both = fast_reciprocal((1 + below) * (1 + gate_below));
        const Sigmoids r(recurrence, below, both * (1 + gate_below)), taken(gate, gate_below, both * (1 + below));
        const float m = given.parameter[0] * r.up;
        const Complements decay = Kind::decay(m);
        const float a = decay.first, square = decay.second * (1 + a);
        // If 1 - a * a is 0, so is the root. Its reciprocal is limited, here and in `slope`.
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
