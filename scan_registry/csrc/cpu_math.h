/* Vectors of float32, and functions of them, at one level of vector instructions. cpu_convert.h
 * comes before. A function's error is about one unit in the last place; NaN stays NaN. */
#define LANES (VECTOR / 4)

typedef float LEVEL(Floats) __attribute__((vector_size(VECTOR)));
typedef float LEVEL(LooseFloats) __attribute__((vector_size(VECTOR), aligned(4), may_alias));
typedef int32_t LEVEL(Ints) __attribute__((vector_size(VECTOR)));
typedef int32_t LEVEL(LooseInts) __attribute__((vector_size(VECTOR), aligned(4), may_alias));

#define Floats LEVEL(Floats)
#define Ints LEVEL(Ints)

INLINE Floats LEVEL(load)(const void *at) { return *(const LEVEL(LooseFloats) *)at; }
INLINE void LEVEL(store)(void *at, Floats x) { *(LEVEL(LooseFloats) *)at = x; }
INLINE Floats LEVEL(all)(float x) { return x - (Floats){0}; }

/* a where the mask has ones, b where it has zeros. */
INLINE Floats LEVEL(select)(Ints mask, Floats a, Floats b) {
    return (Floats)((mask & (Ints)a) | (~mask & (Ints)b));
}

INLINE Floats LEVEL(clamped)(Floats x, float low, float high) {
#if AVX2
    const __m256 above = _mm256_max_ps(_mm256_set1_ps(low), (__m256)x);
    return (Floats)_mm256_min_ps(_mm256_set1_ps(high), above);
#elif defined(__x86_64__)
    return (Floats)_mm_min_ps(_mm_set1_ps(high), _mm_max_ps(_mm_set1_ps(low), (__m128)x));
#elif defined(__aarch64__)
    return (Floats)vminq_f32(vmaxq_f32((float32x4_t)x, vdupq_n_f32(low)), vdupq_n_f32(high));
#else
    const Floats lowest = LEVEL(all)(low), highest = LEVEL(all)(high);
    const Floats above = LEVEL(select)(x < lowest, lowest, x);
    return LEVEL(select)(above > highest, highest, above);
#endif
}

/* The larger of two; the second one if one of them is NaN. */
INLINE Floats LEVEL(larger_of)(Floats a, Floats b) {
#if AVX2
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return LEVEL(select)(a > b, a, b);
#endif
}

/* The smaller of two; likewise. */
INLINE Floats LEVEL(smaller_of)(Floats a, Floats b) {
#if AVX2
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return LEVEL(select)(a < b, a, b);
#endif
}

/* 2^(whole + part), part in [-0.5, 0.5]; shifted is whole + SHIFT, whose lowest bits are the
 * exponent's of 2^whole. The polynomial is exact at 0, so that what decays slowly has no bias. */
#define SHIFT (0x1.8p23f + 127)
INLINE Floats LEVEL(power_of_2)(Floats shifted, Floats part) {
    Floats sum = 1.5353362e-4f * part + 1.3398874e-3f;
    sum = sum * part + 9.618437e-3f;
    sum = sum * part + 5.5503324e-2f;
    sum = sum * part + 0.24022648f;
    sum = sum * part + 0.6931472f;
    sum = sum * part + 1;
    return sum * (Floats)((Ints)shifted << 23);
}

/* 2^x: 0 below -127, infinity from 127.5 on. */
INLINE Floats LEVEL(exp2_of)(Floats x) {
    x = LEVEL(clamped)(x, -127, 128);
    const Floats shifted = x + SHIFT;
    return LEVEL(power_of_2)(shifted, x - (shifted - SHIFT));
}

/* e^(sign * x), sign 1 or -1, for sign * x from -88.02969 to 88.72284. x / ln 2 less the
 * nearest integer is to be exact: in one rounding where there are fused operations, else from ln 2
 * in two parts. */
INLINE Floats LEVEL(exp_within)(float sign, Floats x) {
#if AVX2
    const __m256 exponent = (__m256)x, factor = _mm256_set1_ps(sign * 0x1.715476p0f);
    const Floats shifted = (Floats)_mm256_fmadd_ps(exponent, factor, _mm256_set1_ps(SHIFT));
    const Floats whole = shifted - SHIFT;
    const Floats part = (Floats)_mm256_fmsub_ps(exponent, factor, (__m256)whole);
    return LEVEL(power_of_2)(shifted, x * (sign * 0x1.4ae0cp-26f) + part);
#else
    const Floats shifted = x * (sign * 1.442695f) + SHIFT, whole = shifted - SHIFT;
    x = sign * x - whole * 0x1.62e4p-1f;
    x = x - whole * 0x1.7f7d1cp-20f;
    return LEVEL(power_of_2)(shifted, x * 1.442695f);
#endif
}

/* e^x, 0 below -88.02969 and infinity from 88.72284 on. */
INLINE Floats LEVEL(exp_of)(Floats x) {
    return LEVEL(exp_within)(1, LEVEL(clamped)(x, -88.02969f, 88.72284f));
}

/* e^x - 1 for x <= 0, without loss of digits near 0. */
INLINE Floats LEVEL(expm1_of)(Floats x) {
    x = LEVEL(clamped)(x, -88.02969f, 0);
    const Floats shifted = x * 1.442695f + SHIFT, whole = shifted - SHIFT;
    x = x - whole * 0x1.62e4p-1f;
    x = x - whole * 0x1.7f7d1cp-20f;
    const Floats part = x * 1.442695f, power = (Floats)((Ints)shifted << 23);
    Floats sum = 1.5353362e-4f * part + 1.3398874e-3f;
    sum = sum * part + 9.618437e-3f;
    sum = sum * part + 5.5503324e-2f;
    sum = sum * part + 0.24022648f;
    sum = sum * part + 0.6931472f;
    return sum * part * power + (power - 1);
}

/* 1 - 2^-x for x >= 0, without loss of digits near 0; and 2^-x. */
INLINE Floats LEVEL(decay_of)(Floats x, Floats *power) {
    x = LEVEL(smaller_of)(LEVEL(all)(127), x);
    const Floats shifted = SHIFT - x, part = x + (shifted - SHIFT);
    const Floats whole = (Floats)((Ints)shifted << 23);
    /* 1 - 2^-part, by the polynomial of power_of_2. */
    Floats lost = 1.3398874e-3f - 1.5353362e-4f * part;
    lost = 9.618437e-3f - lost * part;
    lost = 5.5503324e-2f - lost * part;
    lost = 0.24022648f - lost * part;
    lost = 0.6931472f - lost * part;
    lost = lost * part;
    *power = whole - lost * whole;
    return lost * whole + (1 - whole);
}

INLINE Floats LEVEL(tanh_of)(Floats x) {
    const Floats size = (Floats)((Ints)x & 0x7fffffff), e = LEVEL(expm1_of)(-2 * size);
    /* e <= 0, so the quotient has a sign, which is replaced by that of x. */
    return (Floats)(((Ints)(e / (e + 2)) & 0x7fffffff) | ((Ints)x & INT32_MIN));
}

INLINE Floats LEVEL(sigmoid_of)(Floats x) { return 1 / (1 + LEVEL(exp_of)(-x)); }

/* log(1 + e^x) and its derivative. Of s = e^-|x| / (2 + e^-|x|), at most 1/3, log(1 + e^-|x|) is
 * 2 artanh s. */
INLINE Floats LEVEL(softplus_of)(Floats x, Floats *slope) {
    const Floats size = (Floats)((Ints)x & 0x7fffffff), e = LEVEL(exp_of)(-size);
    const Floats s = e / (2 + e), square = s * s, zero = {0};
    Floats sum = square * (1 / 13.f) + 1 / 11.f;
    sum = sum * square + 1 / 9.f;
    sum = sum * square + 1 / 7.f;
    sum = sum * square + 1 / 5.f;
    sum = sum * square + 1 / 3.f;
    sum = sum * square + 1;
    const Ints negative = x < zero;
    const Floats high = 1 / (1 + e);
    *slope = LEVEL(select)(negative, e * high, high);
    return LEVEL(select)(negative, zero, x) + 2 * s * sum;
}
#undef SHIFT
