/* The inner loops of one state type, at one level of vector instructions.
 *
 * level.h includes this once per state type, with REAL, REAL_BYTES, MASK, COMPLEX,
 * BLOCK_BYTES and STATE(name) defined. A block of lanes stays in registers while it is carried
 * through all the steps. Lanes do not influence one another.
 */
#define BLOCK (BLOCK_BYTES / VECTOR)

/* aligned(1), may_alias: rows are whatever memory the caller has. */
typedef REAL STATE(Vector) __attribute__((vector_size(VECTOR)));
typedef REAL STATE(Loose) __attribute__((vector_size(VECTOR), aligned(1), may_alias));

#define Vector STATE(Vector)
#define LOAD(at, i) (*(const STATE(Loose) *)((at) + (i) * VECTOR))
#define STORE(at, i, value) (*(STATE(Loose) *)((at) + (i) * VECTOR) = (value))

#if COMPLEX /* real and imaginary parts alternate */
#if VECTOR / REAL_BYTES == 8
#define REALS 0, 0, 2, 2, 4, 4, 6, 6
#define IMAGINARIES 1, 1, 3, 3, 5, 5, 7, 7
#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6
#define SIGNS -1, 1, -1, 1, -1, 1, -1, 1
#elif VECTOR / REAL_BYTES == 4
#define REALS 0, 0, 2, 2
#define IMAGINARIES 1, 1, 3, 3
#define SWAPPED 1, 0, 3, 2
#define SIGNS -1, 1, -1, 1
#else
#define REALS 0, 0
#define IMAGINARIES 1, 1
#define SWAPPED 1, 0
#define SIGNS -1, 1
#endif

/* a * x + b; with conj(a) below. Few operations wait for x, which is the one that is late. */
INLINE Vector STATE(multiply_add)(Vector a, Vector x, Vector b) {
    const Vector signs = {SIGNS};
    const Vector imaginary = signs * SHUFFLE(MASK, a, IMAGINARIES);
    b = SHUFFLE(MASK, a, REALS) * x + b;
    return imaginary * SHUFFLE(MASK, x, SWAPPED) + b;
}

INLINE Vector STATE(conj_multiply_add)(Vector a, Vector x, Vector b) {
    const Vector signs = {SIGNS};
    const Vector imaginary = signs * SHUFFLE(MASK, a, IMAGINARIES);
    b = SHUFFLE(MASK, a, REALS) * x + b;
    return b - imaginary * SHUFFLE(MASK, x, SWAPPED);
}

#undef REALS
#undef IMAGINARIES
#undef SWAPPED
#undef SIGNS
#else
INLINE Vector STATE(multiply_add)(Vector a, Vector x, Vector b) { return a * x + b; }
INLINE Vector STATE(conj_multiply_add)(Vector a, Vector x, Vector b) { return a * x + b; }
#endif

/* state = states[t] = gates[t] * state + tokens[t] */
TARGET static void STATE(forward)(char *state, ptrdiff_t bytes, int64_t steps, Rows gates,
                                  Rows tokens, Rows states) {
    for (ptrdiff_t lane = 0; lane < bytes; lane += BLOCK_BYTES) {
        const char *gate = gates.at + lane, *token = tokens.at + lane;
        char *out = states.at + lane;
        Vector x[BLOCK];
        for (int i = 0; i < BLOCK; i++) x[i] = LOAD(state + lane, i);
        for (int64_t t = 0; t < steps; t++) {
            for (int i = 0; i < BLOCK; i++) {
                x[i] = STATE(multiply_add)(LOAD(gate, i), x[i], LOAD(token, i));
                STORE(out, i, x[i]);
            }
            gate += gates.pitch, token += tokens.pitch, out += states.pitch;
        }
        for (int i = 0; i < BLOCK; i++) STORE(state + lane, i, x[i]);
    }
}

/* One block of backward, below. */
INLINE void STATE(backward_block)(char *adjoint, char *gate, int64_t steps, Rows gates, Rows grads,
                                  Rows earlier, Rows gates_grad, Rows tokens_grad, int with_gates) {
    Vector a[BLOCK], g[BLOCK];
    for (int i = 0; i < BLOCK; i++) a[i] = LOAD(adjoint, i), g[i] = LOAD(gate, i);
    for (int64_t t = 0; t < steps; t++) {
        for (int i = 0; i < BLOCK; i++) {
            const Vector zero = {0};
            a[i] = STATE(conj_multiply_add)(g[i], a[i], LOAD(grads.at, i));
            g[i] = LOAD(gates.at, i);
            if (with_gates)
                STORE(gates_grad.at, i, STATE(conj_multiply_add)(LOAD(earlier.at, i), a[i], zero));
            STORE(tokens_grad.at, i, a[i]);
        }
        gates.at += gates.pitch, grads.at += grads.pitch, tokens_grad.at += tokens_grad.pitch;
        if (with_gates) earlier.at += earlier.pitch, gates_grad.at += gates_grad.pitch;
    }
    for (int i = 0; i < BLOCK; i++) STORE(adjoint, i, a[i]), STORE(gate, i, g[i]);
}

/* adjoint = tokens_grad[t] = conj(gate) * adjoint + grads[t], gate = gates[t],
 * gates_grad[t] = adjoint * conj(earlier[t]); gates_grad may be null, and earlier then too. The
 * gate is carried, rather than the product, so that a step's rounding depends on nothing but its
 * sequence. */
TARGET static void STATE(backward)(char *adjoint, char *gate, ptrdiff_t bytes, int64_t steps,
                                   Rows gates, Rows grads, Rows earlier, Rows gates_grad,
                                   Rows tokens_grad) {
    const int with_gates = gates_grad.at != NULL;
    for (ptrdiff_t lane = 0; lane < bytes; lane += BLOCK_BYTES) {
        if (with_gates)
            STATE(backward_block)(adjoint + lane, gate + lane, steps, gates, grads, earlier,
                                  gates_grad, tokens_grad, 1);
        else
            STATE(backward_block)(adjoint + lane, gate + lane, steps, gates, grads, earlier,
                                  gates_grad, tokens_grad, 0);
        gates.at += BLOCK_BYTES, grads.at += BLOCK_BYTES, tokens_grad.at += BLOCK_BYTES;
        if (with_gates) earlier.at += BLOCK_BYTES, gates_grad.at += BLOCK_BYTES;
    }
}

/* sums[t] += grads[t] * conj(earlier[t]); with a pitch of 0, all t add to one row. */
TARGET static void STATE(products)(Rows sums, ptrdiff_t bytes, int64_t steps, Rows grads,
                                   Rows earlier) {
    for (ptrdiff_t lane = 0; lane < bytes; lane += BLOCK_BYTES) {
        const char *grad = grads.at + lane, *state = earlier.at + lane;
        char *sum = sums.at + lane;
        Vector total[BLOCK];
        for (int i = 0; i < BLOCK; i++) total[i] = LOAD(sum, i);
        for (int64_t t = 0; t < steps; t++) {
            for (int i = 0; i < BLOCK; i++) {
                if (sums.pitch) total[i] = LOAD(sum, i);
                total[i] = STATE(conj_multiply_add)(LOAD(state, i), LOAD(grad, i), total[i]);
                if (sums.pitch) STORE(sum, i, total[i]);
            }
            grad += grads.pitch, state += earlier.pitch, sum += sums.pitch;
        }
        if (!sums.pitch)
            for (int i = 0; i < BLOCK; i++) STORE(sum, i, total[i]);
    }
}

/* sums += more, of so many bytes, whole blocks */
TARGET static void STATE(add)(char *sums, const char *more, ptrdiff_t bytes) {
    for (ptrdiff_t lane = 0; lane < bytes; lane += VECTOR)
        STORE(sums + lane, 0, LOAD(sums + lane, 0) + LOAD(more + lane, 0));
}

/* sum += all of so many lanes: blocks onto one another, what is left, then half onto half */
TARGET static void STATE(fold)(char *sum, const char *row, int64_t lanes) {
    enum { REALS = BLOCK_BYTES / sizeof(REAL), OF_LANE = 1 + COMPLEX };
    const char *const end = row + lanes * OF_LANE * (int64_t)sizeof(REAL);
    Vector block[BLOCK] = {{0}};
    REAL part[REALS], value;
    for (; row + BLOCK_BYTES <= end; row += BLOCK_BYTES)
        for (int i = 0; i < BLOCK; i++) block[i] += LOAD(row, i);
    memcpy(part, block, sizeof part);
    for (int k = 0; row < end; k++, row += sizeof value) {
        memcpy(&value, row, sizeof value);
        part[k] += value;
    }
    for (int half = REALS / 2; half >= OF_LANE; half /= 2)
        for (int k = 0; k < half; k++) part[k] += part[k + half];
    for (int k = 0; k < OF_LANE; k++, sum += sizeof value) {
        memcpy(&value, sum, sizeof value);
        value += part[k];
        memcpy(sum, &value, sizeof value);
    }
}

#undef Vector
#undef LOAD
#undef STORE
#undef REAL
#undef REAL_BYTES
#undef MASK
#undef COMPLEX
#undef BLOCK
#undef BLOCK_BYTES
#undef STATE
