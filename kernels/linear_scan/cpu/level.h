/* Everything of linear_scan that runs once per element, at one level of vector instructions.
 * kernels.h has cpu_levels.h include this once per level.
 */
#include "cpu_convert.h"

/* --- Recurrences ------------------------------------------------------------------------------ */

#define REAL float
#define REAL_BYTES 4
#define MASK int32_t
#define COMPLEX 0
#define BLOCK_BYTES 32
#define STATE(name) LEVEL(name##_float32)
#include "recurrence.h"

#define REAL double
#define REAL_BYTES 8
#define MASK int64_t
#define COMPLEX 0
#define BLOCK_BYTES 64
#define STATE(name) LEVEL(name##_float64)
#include "recurrence.h"

#define REAL float
#define REAL_BYTES 4
#define MASK int32_t
#define COMPLEX 1
#define BLOCK_BYTES 64
#define STATE(name) LEVEL(name##_complex64)
#include "recurrence.h"

#define REAL double
#define REAL_BYTES 8
#define MASK int64_t
#define COMPLEX 1
#define BLOCK_BYTES 64
#define STATE(name) LEVEL(name##_complex128)
#include "recurrence.h"

/* --- All of it, in one table ------------------------------------------------------------------ */

#define RECURRENCE(type, block) \
    {block,                     \
     LEVEL(forward_##type),     \
     LEVEL(backward_##type),    \
     LEVEL(products_##type),    \
     LEVEL(add_##type),         \
     LEVEL(fold_##type)}

static const Level LEVEL(level) = {
    .recurrence = {[FLOAT32] = RECURRENCE(float32, 32),
                   [FLOAT64] = RECURRENCE(float64, 64),
                   [COMPLEX64] = RECURRENCE(complex64, 64),
                   [COMPLEX128] = RECURRENCE(complex128, 64)},
    .widen = {[BFLOAT16] = LEVEL(widen_bfloat16), [FLOAT16] = LEVEL(widen_float16)},
    .narrow = {[BFLOAT16] = LEVEL(narrow_bfloat16), [FLOAT16] = LEVEL(narrow_float16)},
    .transpose = {[4] = LEVEL(transpose_4), [8] = LEVEL(transpose_8), [16] = LEVEL(transpose_16)},
};

#undef RECURRENCE
