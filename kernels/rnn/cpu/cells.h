/* The cells without their products with R, a vector of units at a time, at one level of vector
 * instructions; the formulas are those of kernels/rnn/reference.py. cpu_math.h comes before.
 *
 * Pointers are to the first of n units, at most LANES, of the first gate or state. The other gates
 * and states follow at a fixed distance.
 */
typedef struct {
    const float *inputs, *bias, *terms;
    float *carry[MOST_STATES]; /* in: the states before the step, without h; out: those after it */
    const float *before;       /* h */
    float *after;
    float *states, *cache; /* cache is null if it is not kept */
    int64_t gate;          /* distance of gates, also in the cache */
    int64_t state;
    float clip;
} LEVEL(Step);

typedef struct {
    const float *before, *states, *states_grad, *cache; /* before null: zeros */
    int64_t before_state, state, grad_state, gate;
    float *carry[MOST_STATES]; /* in: gradients of states after the step; out: before it */
    float *gates_grad;
    float *through; /* a copy of the gradients of the gates that R feeds */
    int64_t through_gate;
    int graded;
} LEVEL(StepBack);

INLINE Floats LEVEL(get)(const float *from, int64_t n) {
    if (n == LANES) return LEVEL(load)(from);
    float room[LANES] = {0};
    for (int64_t i = 0; i < n; i++) room[i] = from[i];
    return LEVEL(load)(room);
}

INLINE void LEVEL(set)(float *to, Floats x, int64_t n) {
    if (n == LANES) {
        LEVEL(store)(to, x);
        return;
    }
    float room[LANES];
    LEVEL(store)(room, x);
    for (int64_t i = 0; i < n; i++) to[i] = room[i];
}

#define X(k) LEVEL(get)(step->inputs + (k)*step->gate, n)
#define B(k) LEVEL(get)(step->bias + (k)*step->gate, n)
#define R(k) LEVEL(load)(step->terms + (k)*PANEL)
#define CACHE(k, value) \
    if (step->cache) LEVEL(set)(step->cache + (k)*step->gate, value, n)

INLINE void LEVEL(advance)(const int cell, const LEVEL(Step) *step, int64_t n) {
    Floats h, state[MOST_STATES];
    if (cell == LSTM) {
        const Floats i = LEVEL(sigmoid_of)(X(0) + R(0) + B(0));
        const Floats f = LEVEL(sigmoid_of)(X(1) + R(1) + B(1));
        const Floats z = LEVEL(tanh_of)(X(2) + R(2) + B(2));
        const Floats o = LEVEL(sigmoid_of)(X(3) + R(3) + B(3));
        state[1] = f * LEVEL(load)(step->carry[1]) + i * z;
        h = o * LEVEL(tanh_of)(state[1]);
        CACHE(0, i);
        CACHE(1, f);
        CACHE(2, z);
        CACHE(3, o);
    } else if (cell == GRU) {
        const Floats g = R(0) + B(0);
        const Floats r = LEVEL(sigmoid_of)(X(0) + R(1) + B(1));
        const Floats z = LEVEL(sigmoid_of)(X(1) + R(2) + B(2));
        const Floats new = LEVEL(tanh_of)(X(2) + B(3) + r * g);
        h = z * LEVEL(load)(step->before) + (1 - z) * new;
        CACHE(0, r);
        CACHE(1, z);
        CACHE(2, new);
        CACHE(3, g);
    } else if (cell == ELMAN) {
        h = LEVEL(tanh_of)(X(0) + R(0) + B(0));
    } else {
        Floats slope;
        const Floats i = X(0) + R(0) + B(0);
        const Floats log_f = -LEVEL(softplus_of)(-(X(1) + R(1) + B(1)), &slope);
        const Floats z = LEVEL(tanh_of)(X(2) + R(2) + B(2));
        const Floats o = LEVEL(sigmoid_of)(X(3) + R(3) + B(3));
        const Floats old_n = LEVEL(load)(step->carry[2]);
        const Floats kept = log_f + LEVEL(load)(step->carry[3]);
        const Ints by_input = (old_n == 0) | (i > kept);
        const Floats m = LEVEL(select)(by_input, i, kept);
        const Floats e = LEVEL(exp_of)(i - m);
        const Floats most = LEVEL(all)(60); /* above 0 only where n is 0 */
        const Floats log_k = LEVEL(select)(kept - m > most, most, kept - m);
        const Floats k = LEVEL(exp_of)(log_k);
        const Floats sum = k * old_n + e;
        state[1] = k * LEVEL(load)(step->carry[1]) + e * z;
        state[2] = LEVEL(select)(sum < 1, LEVEL(all)(1), sum);
        state[3] = m;
        h = o * state[1] / state[2];
        CACHE(0, LEVEL(select)(by_input, k, -e));
        CACHE(1, log_f);
        CACHE(2, z);
        CACHE(3, o);
    }
    const Floats high = LEVEL(all)(step->clip);
    h = LEVEL(select)(h > high, high, h);
    h = LEVEL(select)(h < -high, -high, h);
    LEVEL(store)(step->after, h);
    LEVEL(set)(step->states, h, n);
    for (int k = 1; k < cells[cell].states; k++) {
        LEVEL(store)(step->carry[k], state[k]);
        LEVEL(set)(step->states + k * step->state, state[k], n);
    }
}
#undef X
#undef B
#undef R
#undef CACHE

#define BEFORE(k) \
    (step->before ? LEVEL(get)(step->before + (k)*step->before_state, n) : LEVEL(all)(0))
#define AFTER(k) LEVEL(get)(step->states + (k)*step->state, n)
#define CACHE(k) LEVEL(get)(step->cache + (k)*step->gate, n)

INLINE void LEVEL(go_back)(const int cell, const LEVEL(StepBack) *step, int64_t n) {
    const Floats zero = LEVEL(all)(0);
    Floats grad[MOST_STATES], gate[MOST_GATES];
    for (int k = 0; k < cells[cell].states; k++) {
        grad[k] = LEVEL(load)(step->carry[k]);
        if (k < step->graded)
            grad[k] += LEVEL(get)(step->states_grad + k * step->grad_state, n);
    }
    const Floats dh = grad[0];
    grad[0] = zero;
    if (cell == LSTM) {
        const Floats i = CACHE(0), f = CACHE(1), z = CACHE(2), o = CACHE(3);
        const Floats bent = LEVEL(tanh_of)(AFTER(1));
        const Floats dc = grad[1] + dh * o * (1 - bent * bent);
        gate[0] = dc * z * i * (1 - i);
        gate[1] = dc * BEFORE(1) * f * (1 - f);
        gate[2] = dc * i * (1 - z * z);
        gate[3] = dh * bent * o * (1 - o);
        grad[1] = dc * f;
    } else if (cell == GRU) {
        const Floats r = CACHE(0), z = CACHE(1), new = CACHE(2), g = CACHE(3);
        const Floats dn = dh * (1 - z) * (1 - new * new);
        gate[0] = dn * r;
        gate[1] = dn * g * r * (1 - r);
        gate[2] = dh * (BEFORE(0) - new) * z * (1 - z);
        gate[3] = dn;
        grad[0] = dh * z;
    } else if (cell == ELMAN) {
        const Floats h = AFTER(0);
        gate[0] = dh * (1 - h * h);
    } else {
        const Floats lesser = CACHE(0), log_f = CACHE(1), z = CACHE(2), o = CACHE(3);
        const Ints by_input = (Ints)lesser >= 0; /* the sign tells */
        const Floats one = LEVEL(all)(1);
        const Floats e = LEVEL(select)(by_input, one, -lesser);
        const Floats k = LEVEL(select)(by_input, lesser, one);
        const Floats old_c = BEFORE(1), old_n = BEFORE(2), c = AFTER(1), norm = AFTER(2);
        const Floats y = c / norm, to_n = grad[2] - dh * o * y / norm;
        Floats dm = grad[3] - grad[1] * c - grad[2] * norm;
        const Floats dc = grad[1] + dh * o / norm;
        const Floats sum = k * old_n + e;
        const Ints floored = sum < 1; /* the floor passes nothing on */
        const Floats dn = LEVEL(select)(floored, zero, to_n);
        dm += LEVEL(select)(floored, to_n, zero);
        const Floats size = (Floats)((Ints)old_c & 0x7fffffff);
        const Ints usual = ~floored & (size < 2 * old_n);
        const Floats old_y = old_c / LEVEL(select)(usual, old_n, one);
        const Floats change = dc * (z - old_y) / LEVEL(select)(usual, sum, one);
        const Floats own = dc * c / norm + dn, old = own - e * change;
        const Floats d_log_e =
            LEVEL(select)(usual, own + k * old_n * change, dc * z + dn) * e;
        Floats d_log_k = LEVEL(select)(usual, old * old_n, dc * old_c + dn * old_n) * k;
        grad[2] = LEVEL(select)(usual, old - dc * old_y, dn) * k;
        d_log_k += LEVEL(select)(by_input, zero, dm);
        gate[0] = d_log_e + LEVEL(select)(by_input, dm, zero);
        gate[1] = d_log_k * -LEVEL(expm1_of)(log_f);
        gate[2] = dc * e * (1 - z * z);
        gate[3] = dh * y * o * (1 - o);
        grad[1] = dc * k;
        grad[3] = d_log_k;
    }
    for (int k = 0; k < cells[cell].gates; k++) {
        LEVEL(set)(step->gates_grad + k * step->gate, gate[k], n);
        if (k < cells[cell].recurrent)
            LEVEL(set)(step->through + k * step->through_gate, gate[k], n);
    }
    for (int k = 0; k < cells[cell].states; k++) LEVEL(store)(step->carry[k], grad[k]);
}
#undef BEFORE
#undef AFTER
#undef CACHE
