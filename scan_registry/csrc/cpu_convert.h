/* Between memory and vectors, at one level of vector instructions: conversions of narrow floats,
 * and transposes. What is compiled at every level includes this first.
 */
#define INLINE TARGET UNUSED static inline __attribute__((always_inline))

/* --- Conversions ------------------------------------------------------------------------------ */

/* Of narrow floats to float32, and back: to the nearest, ties to even. NaN stays NaN. */

INLINE void LEVEL(widen_bfloat16)(void *restrict wide, const void *restrict narrow,
                                         int64_t n) {
    Float *to = wide;
    const Half *from = narrow;
    for (int64_t i = 0; i < n; i++) to[i] = as_float((uint32_t)from[i] << 16);
}

INLINE void LEVEL(narrow_bfloat16)(void *restrict narrow, const void *restrict wide,
                                          int64_t n) {
    const Float *from = wide;
    Half *to = narrow;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(from[i]);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
    }
}

#if AVX2
INLINE void LEVEL(widen_float16)(void *restrict wide, const void *restrict narrow,
                                        int64_t n) {
    Float *to = wide;
    const Half *from = narrow;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    for (; i < n; i++) to[i] = _cvtsh_ss(from[i]);
}

INLINE void LEVEL(narrow_float16)(void *restrict narrow, const void *restrict wide,
                                         int64_t n) {
    const Float *from = wide;
    Half *to = narrow;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    for (; i < n; i++) to[i] = (uint16_t)_cvtss_sh(from[i], 0);
}
#elif defined(__aarch64__)
/* 8 elements at a time, then one by one. Compilers do not use these instructions for the plain
 * loops below. */
INLINE void LEVEL(widen_float16)(void *restrict wide, const void *restrict narrow,
                                        int64_t n) {
    Float *to = wide;
    const Half *from = narrow;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16((const uint16_t *)(from + i)));
        vst1q_f32((float *)(to + i), vcvt_f32_f16(vget_low_f16(x)));
        vst1q_f32((float *)(to + i + 4), vcvt_high_f32_f16(x));
    }
    for (; i < n; i++) {
        __fp16 x;
        memcpy(&x, from + i, sizeof x);
        to[i] = x;
    }
}

INLINE void LEVEL(narrow_float16)(void *restrict narrow, const void *restrict wide,
                                         int64_t n) {
    const Float *from = wide;
    Half *to = narrow;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const float16x4_t low = vcvt_f16_f32(vld1q_f32((const float *)(from + i)));
        const float16x8_t x = vcvt_high_f16_f32(low, vld1q_f32((const float *)(from + i + 4)));
        vst1q_u16((uint16_t *)(to + i), vreinterpretq_u16_f16(x));
    }
    for (; i < n; i++) {
        const __fp16 x = (__fp16)from[i];
        memcpy(to + i, &x, sizeof x);
    }
}
#else
INLINE void LEVEL(widen_float16)(void *restrict wide, const void *restrict narrow,
                                        int64_t n) {
    Float *to = wide;
    const Half *from = narrow;
    for (int64_t i = 0; i < n; i++) {
        /* Moved to where float32 has them, exponent and fraction mean 2^112 times less. */
        const uint32_t moved = (uint32_t)(from[i] & 0x7fff) << 13;
        const uint32_t sign = (uint32_t)(from[i] & 0x8000) << 16;
        const uint32_t finite = as_bits(as_float(moved) * 0x1p112f);
        to[i] = as_float(sign | (moved < 0x7c00 << 13 ? finite : moved | 0x7f800000));
    }
}

INLINE void LEVEL(narrow_float16)(void *restrict narrow, const void *restrict wide,
                                         int64_t n) {
    const Float *from = wide;
    Half *to = narrow;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = as_bits(from[i]) & 0x7fffffff;
        const uint32_t sign = as_bits(from[i]) >> 16 & 0x8000;
        /* Below 2^-14, adding 0.5 rounds where float16 does. */
        const uint32_t small = as_bits(as_float(bits) + 0.5f) - as_bits(0.5f);
        const uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
        const uint32_t huge = bits > 0x7f800000 ? 0x7e00 : 0x7c00;
        to[i] = (uint16_t)(sign | (bits < 0x38800000 ? small : bits < 0x47800000 ? normal : huge));
    }
}
#endif

/* --- Transposes ------------------------------------------------------------------------------- */

/* Of rows of words: to[column][row] = from[row][column]. Pitches are in bytes. */

#if AVX2
/* 8 by 8. A register's halves hold words of rows i and i + 4, so that no shuffle crosses them. */
INLINE void LEVEL(transpose_block_4)(char *to, ptrdiff_t to_pitch, const char *from,
                                     ptrdiff_t pitch) {
#define ROW(i, bytes) _mm_loadu_ps((const Float *)(from + (i) * pitch + (bytes)))
#define ROWS(i, bytes) \
    _mm256_insertf128_ps(_mm256_castps128_ps256(ROW(i, bytes)), ROW(i + 4, bytes), 1)
#define COLUMN(i, low, high, words) \
    _mm256_storeu_ps((Float *)(to + (i) * to_pitch), _mm256_shuffle_ps(low, high, words))
    enum { FIRST = _MM_SHUFFLE(1, 0, 1, 0), LAST = _MM_SHUFFLE(3, 2, 3, 2) };
    for (int half = 0; half < 2; half++) {
        const __m256 a = ROWS(0, 16 * half), b = ROWS(1, 16 * half);
        const __m256 c = ROWS(2, 16 * half), d = ROWS(3, 16 * half);
        const __m256 ab = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
        const __m256 cd = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
        COLUMN(4 * half, ab, cd, FIRST);
        COLUMN(4 * half + 1, ab, cd, LAST);
        COLUMN(4 * half + 2, ab_high, cd_high, FIRST);
        COLUMN(4 * half + 3, ab_high, cd_high, LAST);
    }
#undef ROW
#undef ROWS
#undef COLUMN
}

/* 4 by 4, likewise. */
INLINE void LEVEL(transpose_block_8)(char *to, ptrdiff_t to_pitch, const char *from,
                                     ptrdiff_t pitch) {
#define ROW(i, bytes) _mm_loadu_pd((const Double *)(from + (i) * pitch + (bytes)))
#define ROWS(i, bytes) \
    _mm256_insertf128_pd(_mm256_castpd128_pd256(ROW(i, bytes)), ROW(i + 2, bytes), 1)
    for (int half = 0; half < 2; half++) {
        const __m256d a = ROWS(0, 16 * half), b = ROWS(1, 16 * half);
        _mm256_storeu_pd((Double *)(to + 2 * half * to_pitch), _mm256_unpacklo_pd(a, b));
        _mm256_storeu_pd((Double *)(to + (2 * half + 1) * to_pitch), _mm256_unpackhi_pd(a, b));
    }
#undef ROW
#undef ROWS
}
#else
/* 4 by 4. */
INLINE void LEVEL(transpose_block_4)(char *to, ptrdiff_t to_pitch, const char *from,
                                     ptrdiff_t pitch) {
    typedef uint32_t Words __attribute__((vector_size(16), aligned(1), may_alias));
    const Words a = *(const Words *)from, b = *(const Words *)(from + pitch);
    const Words c = *(const Words *)(from + 2 * pitch), d = *(const Words *)(from + 3 * pitch);
    const Words ab = MERGE_4(a, b, 0, 4, 1, 5), ab_high = MERGE_4(a, b, 2, 6, 3, 7);
    const Words cd = MERGE_4(c, d, 0, 4, 1, 5), cd_high = MERGE_4(c, d, 2, 6, 3, 7);
    *(Words *)to = MERGE_4(ab, cd, 0, 1, 4, 5);
    *(Words *)(to + to_pitch) = MERGE_4(ab, cd, 2, 3, 6, 7);
    *(Words *)(to + 2 * to_pitch) = MERGE_4(ab_high, cd_high, 0, 1, 4, 5);
    *(Words *)(to + 3 * to_pitch) = MERGE_4(ab_high, cd_high, 2, 3, 6, 7);
}

/* 2 by 2. */
INLINE void LEVEL(transpose_block_8)(char *to, ptrdiff_t to_pitch, const char *from,
                                     ptrdiff_t pitch) {
    typedef uint64_t Words __attribute__((vector_size(16), aligned(1), may_alias));
    const Words a = *(const Words *)from, b = *(const Words *)(from + pitch);
    *(Words *)to = MERGE_2(a, b, 0, 2);
    *(Words *)(to + to_pitch) = MERGE_2(a, b, 1, 3);
}
#endif

INLINE void LEVEL(transpose_block_16)(char *to, ptrdiff_t to_pitch, const char *from,
                                      ptrdiff_t pitch) {
    (void)to_pitch, (void)pitch;
    memcpy(to, from, 16);
}

/* 4 by 4 words of 4 bytes, where there are too few for a block. */
INLINE void LEVEL(transpose_quad)(char *to, ptrdiff_t to_pitch, const char *from, ptrdiff_t pitch) {
#if AVX2
    __m128 a = _mm_loadu_ps((const Float *)from), b = _mm_loadu_ps((const Float *)(from + pitch));
    __m128 c = _mm_loadu_ps((const Float *)(from + 2 * pitch));
    __m128 d = _mm_loadu_ps((const Float *)(from + 3 * pitch));
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps((Float *)to, a);
    _mm_storeu_ps((Float *)(to + to_pitch), b);
    _mm_storeu_ps((Float *)(to + 2 * to_pitch), c);
    _mm_storeu_ps((Float *)(to + 3 * to_pitch), d);
#else
    LEVEL(transpose_block_4)(to, to_pitch, from, pitch);
#endif
}

/* In blocks of a vector of words each way, then what is left, word by word. The caller keeps one
 * side to a block or so, and the other long. */
#define TRANSPOSE(word)                                                                          \
    TARGET UNUSED static void LEVEL(transpose_##word)(char *to, ptrdiff_t to_pitch,              \
                                                      const char *from, ptrdiff_t pitch,         \
                                                      int64_t rows, int64_t columns) {           \
        enum { SIDE = word < 16 ? VECTOR / word : 1, QUADS = word == 4 && SIDE > 4 };            \
        const int64_t whole_rows = rows / SIDE * SIDE, whole_columns = columns / SIDE * SIDE;    \
        if (rows < columns)                                                                      \
            for (int64_t r = 0; r < whole_rows; r += SIDE)                                       \
                for (int64_t c = 0; c < whole_columns; c += SIDE)                                \
                    LEVEL(transpose_block_##word)(to + c * to_pitch + r * word, to_pitch,        \
                                                  from + r * pitch + c * word, pitch);           \
        else                                                                                     \
            for (int64_t c = 0; c < whole_columns; c += SIDE)                                    \
                for (int64_t r = 0; r < whole_rows; r += SIDE)                                   \
                    LEVEL(transpose_block_##word)(to + c * to_pitch + r * word, to_pitch,        \
                                                  from + r * pitch + c * word, pitch);           \
        int64_t some_rows = whole_rows, some_columns = whole_columns;                            \
        for (; QUADS && some_columns + 4 <= columns; some_columns += 4)                          \
            for (int64_t r = 0; r < whole_rows; r += 4)                                          \
                LEVEL(transpose_quad)(to + some_columns * to_pitch + r * word, to_pitch,         \
                                      from + r * pitch + some_columns * word, pitch);            \
        for (; QUADS && some_rows + 4 <= rows; some_rows += 4)                                   \
            for (int64_t c = 0; c < whole_columns; c += 4)                                       \
                LEVEL(transpose_quad)(to + c * to_pitch + some_rows * word, to_pitch,            \
                                      from + some_rows * pitch + c * word, pitch);               \
        for (int64_t r = 0; r < rows; r++) {                                                     \
            int64_t c = r < whole_rows ? some_columns : r < some_rows ? whole_columns : 0;       \
            for (; c < columns; c++)                                                             \
                memcpy(to + c * to_pitch + r * word, from + r * pitch + c * word, word);         \
        }                                                                                        \
    }
TRANSPOSE(4)
TRANSPOSE(8)
TRANSPOSE(16)
#undef TRANSPOSE
