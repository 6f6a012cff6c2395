/* What kinds of gates share, at one level of vector instructions: cpu_math.h comes before. The
 * interface between a kind's header, kinds/<name>.h, and the loops of steps.h.
 *
 * A header defines KIND(name), and in terms of it
 *
 *     KIND(INPUTS), KIND(PARAMETERS)     how many there are
 *     KIND(OPTIONS)                      whether the kind has an option, as its line in kinds.py
 *     KIND(Values)                       what both functions below need
 *     KIND(values)(given)                from inputs and prepared parameters
 *     KIND(step)(values)                 gate and token of h[t] = gate * h[t-1] + token
 *     KIND(gradients)(given, values, gate_grad, token_grad)
 *
 * and includes steps.h. The formulas are those of ../kinds/<name>.cuh, which explains them. At a
 * reset the gate may be anything.
 */

typedef struct {
    Floats input[MOST_INPUTS], parameter[MOST_PARAMETERS]; /* the latter as prepared */
    Ints reset;                                            /* a mask */
    int option;
} LEVEL(Given);

typedef struct {
    Floats gate, token;
} LEVEL(Step);

typedef struct {
    Floats input[MOST_INPUTS], parameter[MOST_PARAMETERS]; /* the latter of the prepared one */
} LEVEL(Gradients);

#define Given LEVEL(Given)
#define Step LEVEL(Step)
#define Gradients LEVEL(Gradients)

/* What a row holds, or goes to, and on to the next row. To hide the address keeps compilers from
 * a second loop for rows 1 byte apart. */
#define HIDDEN_ADDRESS(at) __asm__("" : "+r"(at))
INLINE Floats LEVEL(next)(Rows *rows) {
    const Floats row = LEVEL(load)(rows->at);
    rows->at += rows->pitch;
    HIDDEN_ADDRESS(rows->at);
    return row;
}

INLINE void LEVEL(put_next)(Rows *rows, Floats row) {
    LEVEL(store)(rows->at, row);
    rows->at += rows->pitch;
    HIDDEN_ADDRESS(rows->at);
}
#undef HIDDEN_ADDRESS

/* e^-x, at most e^88.3, which is finite. */
INLINE Floats LEVEL(exp_neg)(Floats x) {
    return LEVEL(exp_within)(-1, LEVEL(clamped)(x, -88.3f, 88.02969f));
}

/* e^-|x| */
INLINE Floats LEVEL(exp_neg_abs)(Floats x) {
    const Floats size = (Floats)((Ints)x & INT32_MAX);
    return LEVEL(exp_within)(-1, LEVEL(smaller_of)(LEVEL(all)(88.02969f), size));
}

/* Two numbers whose sum is 1, from the smaller one. The larger is 1 less the smaller, so that a
 * gate close to 1 is right to its last bit. */
typedef struct {
    Floats up, down;
} LEVEL(Shares);
#define Shares LEVEL(Shares)

INLINE Shares LEVEL(shares)(Ints up_is_larger, Floats smaller) {
    const Floats larger = 1 - smaller;
    return (Shares){LEVEL(select)(up_is_larger, larger, smaller),
                    LEVEL(select)(up_is_larger, smaller, larger)};
}

/* The sigmoids of x and of -x. */
INLINE Shares LEVEL(sigmoids)(Floats x) {
    const Floats below = LEVEL(exp_neg_abs)(x);
    return LEVEL(shares)(x >= 0, below / (1 + below));
}

/* The same where a last bit does not matter in a number close to 1. */
INLINE Shares LEVEL(quick_sigmoids)(Floats x) {
    const Floats e = LEVEL(exp_neg)(x), up = 1 / (1 + e);
    return (Shares){up, e * up};
}

/* g(x) = x + 1/2 for x >= 0, else the sigmoid of x; and its derivative, from g(x). */
INLINE Floats LEVEL(positive)(Floats x) {
    const Floats below = LEVEL(exp_neg_abs)(x);
    return LEVEL(select)(x >= 0, x + 0.5f, below / (1 + below));
}

INLINE Floats LEVEL(positive_slope)(Floats x, Floats value) {
    return LEVEL(select)(x >= 0, LEVEL(all)(1), value * (1 - value));
}

INLINE Floats LEVEL(root)(Floats x) {
#if AVX2
    return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (Floats)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
    return (Floats)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}
