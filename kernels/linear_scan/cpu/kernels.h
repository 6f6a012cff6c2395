/* The inner loops of linear_scan, compiled for each level of vector instructions, and how they are
 * called. */
#include "cpu_types.h"

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
    Recurrence recurrence[STATE_TYPES];
    void (*widen[TYPES])(void *wide, const void *narrow, int64_t n); /* null: nothing to do */
    void (*narrow[TYPES])(void *narrow, const void *wide, int64_t n);
    void (*transpose[17])(char *to, ptrdiff_t to_pitch, const char *from, ptrdiff_t from_pitch,
                          int64_t rows, int64_t columns); /* by the bytes of an element */
} Level;

#define LEVEL_BODY "linear_scan/cpu/level.h"
#include "cpu_levels.h"
#undef LEVEL_BODY

static const Level *const levels[] = OF_LEVELS(&level);
