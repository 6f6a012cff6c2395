/* The inner loops, compiled for each level of vector instructions, and how they are called. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

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

/* One row of lanes, of a state type, per step. The pitch is the distance in bytes to the next
 * step's; it may be negative, or 0 where all steps share one row. */
typedef struct {
    char *at;
    ptrdiff_t pitch;
} Rows;

/* Of one state type. Lanes are carried through time in blocks, and rows are whole blocks: so wide
 * that a block's multiply-adds hide one another's latency, and so narrow that the rows of memory
 * that are walked at once, in all tensors, are no more than a processor prefetches. */
typedef struct {
    ptrdiff_t block; /* bytes */
    void (*forward)(char *state, ptrdiff_t bytes, int64_t steps, Rows gates, Rows tokens,
                    Rows states);
    void (*backward)(char *adjoint, char *gate, ptrdiff_t bytes, int64_t steps, Rows gates,
                     Rows grads, Rows earlier, Rows gates_grad, Rows tokens_grad);
    void (*products)(Rows sums, ptrdiff_t bytes, int64_t steps, Rows grads, Rows earlier);
    void (*add)(char *sums, const char *more, ptrdiff_t bytes);
    void (*fold)(char *sum, const char *row, int64_t lanes);
} Recurrence;

typedef struct {
    const char *name;
    int (*runs_here)(void);
    Recurrence recurrence[STATE_TYPES];
    void (*widen[TYPES])(void *wide, const void *narrow, int64_t n); /* null: nothing to do */
    void (*narrow[TYPES])(void *narrow, const void *wide, int64_t n);
    void (*transpose[17])(char *to, ptrdiff_t to_pitch, const char *from, ptrdiff_t from_pitch,
                          int64_t rows, int64_t columns); /* by the bytes of an element */
} Level;

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

/* What every processor of the platform has: SSE2, or NEON. */
static int runs_portable(void) { return 1; }

#define LEVEL(name) name##_portable
#define LEVEL_NAME "portable"
#define TARGET
#define VECTOR 16
#define AVX2 0
#include "cpu_level.h"

#if defined(__x86_64__)
/* Whether the processor has the instructions, and the system keeps the registers they use. */
static int runs_avx2(void) {
    const unsigned needed = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
    unsigned a, b, c, d, registers, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed) return 0;
    __asm__("xgetbv" : "=a"(registers), "=d"(high) : "c"(0));
    return (registers & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

#define LEVEL(name) name##_avx2
#define LEVEL_NAME "avx2"
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR 32
#define AVX2 1
#include "cpu_level.h"
#endif

/* From the plainest to the best. */
static const Level *const levels[] = {
    &level_portable,
#if defined(__x86_64__)
    &level_avx2,
#endif
};
enum { LEVELS = sizeof levels / sizeof *levels };
