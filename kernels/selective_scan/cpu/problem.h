/* A selective scan as numbers, and how it is cut into tasks. */
#include "cpu_threads.h"

/* Channels that go through time together, and steps that they go at a time. */
enum { TOGETHER = 64, STEPS = 64, FEWER_STEPS = 32, MANY_STATES = 64 };
enum { MOST_STATES = 256 };

/* (B, D, L), or (B, G, N, L) with what is B's or C's groups; strides are in bytes. */
typedef struct {
    char *at; /* null: not there */
    int type;
    int64_t stride[4], groups;
} Tensor;

enum { U, DELTA, Z, OUT, OUT_GRAD, U_GRAD, DELTA_GRAD, Z_GRAD, B, C, TENSORS };

typedef struct {
    int64_t batch, channels, time, states;
    int64_t sequences, *offsets; /* sequence s covers the times [offsets[s], offsets[s + 1]) */
    int softplus;
    Tensor tensor[TENSORS];
    /* Without gaps, of float32. Null: zeros, or not wanted. */
    const float *A, *D, *bias, *initial, *final_grad;
    float *final, *initial_grad;
    /* Sums that tasks leave: (batch, D, N), (batch, D), and (batch, groups, runs, N, L). */
    float *A_sums, *D_sums, *bias_sums, *B_sums, *C_sums;
    /* How it is cut: groups, whose channels share B and C; runs of so many neighbouring channels in
     * each of them, a task each; steps at a time, and the most pieces of so many in a sequence. */
    int64_t groups, runs, run, steps, pieces;
} Scan;

/* The channels of a task. */
typedef struct {
    int64_t batch, group, place, first, last;
} Run;

static inline Run run_of(const Scan *scan, int64_t task) {
    const int64_t of_group = scan->channels / scan->groups;
    Run run = {.place = task % scan->runs};
    task /= scan->runs;
    run.group = task % scan->groups;
    run.batch = task / scan->groups;
    run.first = run.group * of_group + run.place * scan->run;
    run.last = smaller(run.first + scan->run, (run.group + 1) * of_group);
    return run;
}

/* Bytes of scratch memory, no less than the tasks take. A panel is a block's; rows count panels
 * of any width, LANES at most 8. */
static inline int64_t forward_scratch(const Scan *scan) {
    const int64_t projections = 2 * scan->states * scan->steps;
    const int64_t panels = 5 * 8 * scan->steps, states = 2 * TOGETHER * scan->states;
    return 4 * (projections + panels + states) + 32 * LINE;
}

static inline int64_t backward_scratch(const Scan *scan) {
    const int64_t projections = 2 * (1 + 8) * scan->states * scan->steps;
    const int64_t panels = 16 * 8 * scan->steps, states = (4 + 2) * TOGETHER * scan->states;
    const int64_t kept = scan->pieces * TOGETHER * scan->states;
    return 4 * (projections + panels + states + kept + 8 * TOGETHER) + 64 * LINE;
}
