// Gates and tokens as they are:  h[t] = gate * h[t-1] + token. Special functions: none.

struct Kind : KindOf<2, 0> {
    struct Values {
        float gate, token;
    };
    enum : bool { PADS = true };
    __device__ static float padding(int input) { return input == 0 ? 1.0f : 0.0f; }

    __device__ static Values values(const Given& given) { return {given.input[0], given.input[1]}; }
    __device__ static Step step(const Values& of) { return {of.gate, of.token}; }

    __device__ static Gradients gradients(const Given&, const Values&, float gate_grad, float token_grad) {
        return {{gate_grad, token_grad}, {}};
    }
};
