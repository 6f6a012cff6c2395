/* What the CPU kernels of all families share: element types, and vectors of them. */
#ifndef CPU_TYPES_H
#define CPU_TYPES_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define UNUSED __attribute__((unused))
#define HIDDEN __attribute__((visibility("hidden")))

/* Element types; each has the state type in which it is computed. */
enum {
    FLOAT32,
    FLOAT64,
    COMPLEX64,
    COMPLEX128,
    STATE_TYPES,
    BFLOAT16 = STATE_TYPES,
    FLOAT16,
    TYPES
};

typedef struct {
    const char *name;
    int bytes, state;
    const void *one;
} Type;

static const float one_float[] = {1, 0};
static const double one_double[] = {1, 0};

static const Type types[TYPES] = {
    [FLOAT32] = {"float32", 4, FLOAT32, one_float},
    [FLOAT64] = {"float64", 8, FLOAT64, one_double},
    [COMPLEX64] = {"complex64", 8, COMPLEX64, one_float},
    [COMPLEX128] = {"complex128", 16, COMPLEX128, one_double},
    [BFLOAT16] = {"bfloat16", 2, FLOAT32, NULL},
    [FLOAT16] = {"float16", 2, FLOAT32, NULL},
};

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Unsigned: where a size is 1, its stride may be anything and wrap around. */
static inline char *offset(const char *at, int64_t index, int64_t stride) {
    return (char *)((uintptr_t)at + (uintptr_t)index * (uintptr_t)stride);
}

/* Shuffles of one vector of REAL, and of two vectors of 4 words. */
#if defined(__clang__)
#define SHUFFLE(mask, a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#define MERGE_4 __builtin_shufflevector
#define MERGE_2 __builtin_shufflevector
#else
#define SHUFFLE(mask, a, ...) \
    __builtin_shuffle(a, (mask __attribute__((vector_size(VECTOR)))){__VA_ARGS__})
#define MERGE_4(a, b, ...) \
    __builtin_shuffle(a, b, (uint32_t __attribute__((vector_size(16)))){__VA_ARGS__})
#define MERGE_2(a, b, ...) \
    __builtin_shuffle(a, b, (uint64_t __attribute__((vector_size(16)))){__VA_ARGS__})
#endif

/* Elements of what was declared as bytes. */
typedef float Float __attribute__((may_alias));
typedef double Double __attribute__((may_alias));
typedef uint16_t Half __attribute__((may_alias));

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The level of vector instructions in use, as cpu_levels.h numbers them: the best that runs here,
 * once the module is imported. */
extern HIDDEN int level_in_use;

#endif
