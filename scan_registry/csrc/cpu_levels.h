/* Compiles LEVEL_BODY, a header, once per level of vector instructions, with LEVEL(name),
 * LEVEL_NAME, TARGET, VECTOR (bytes of a vector register) and AVX2 (whether its intrinsics are
 * to be used) defined. From the plainest level to the best, which is how level_in_use counts. */
#include "cpu_types.h"

/* What every processor of the platform has: SSE2, or NEON. */
#define LEVEL(name) name##_portable
#define LEVEL_NAME "portable"
#define TARGET
#define VECTOR 16
#define AVX2 0
#include "cpu_level.h"

#if defined(__x86_64__)
#define LEVEL(name) name##_avx2
#define LEVEL_NAME "avx2"
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR 32
#define AVX2 1
#include "cpu_level.h"
#endif

/* The levels' variants of one thing, in order. */
#if defined(__x86_64__)
#define OF_LEVELS(name) {name##_portable, name##_avx2}
#else
#define OF_LEVELS(name) {name##_portable}
#endif
