/* A gated scan as numbers, and how it is cut into tasks. */
#include "cpu_sum.h"

enum { MOST_INPUTS = 4, MOST_PARAMETERS = 1 };

/* (B, C, T), or a state (B, C, S); strides are in bytes. */
typedef struct {
    char *at; /* null: not there, or not wanted */
    int type;
    int64_t stride[3];
} Tensor;

/* From INITIAL on: states before and after the scan, and their gradients. */
enum {
    INPUT,
    STATES = INPUT + MOST_INPUTS,
    STATES_GRAD,
    INPUT_GRAD,
    INITIAL = INPUT_GRAD + MOST_INPUTS,
    FINAL,
    FINAL_GRAD,
    INITIAL_GRAD,
    TENSORS
};

typedef struct {
    int64_t batch, channels, time;
    /* Steps are numbered in the order in which tasks take them: against that of memory if down is
     * true. Sequence s covers the steps [offsets[s], offsets[s + 1]). */
    int64_t sequences, *offsets;
    int down, kind, option;
    Tensor tensor[TENSORS];
    const char *reset; /* (B, T), of unit stride along time; null: none */
    int64_t reset_batch;
    const float *parameters; /* (P, C) */
    float *parameter_sums;   /* that tasks leave: (B, spans, P, C) */
    /* How it is cut: groups of so many neighbouring channels, which a task takes so many steps at
     * a time; runs of sequences that are scanned apart. */
    int64_t groups, width, spans, steps;
} Scan;

/* One row of LANES floats per step. The pitch is the distance in bytes to the next step's; it may
 * be negative, or 0 where all steps share one row. */
typedef struct {
    char *at;
    ptrdiff_t pitch;
} Rows;

/* So many steps of a block of LANES channels, within one sequence. Rows of floats: */
typedef struct {
    int64_t steps;
    Rows input[MOST_INPUTS];
    Rows states;             /* backward: those before each step */
    Rows states_grad, grad[MOST_INPUTS];
    Rows reset;              /* a byte each; null: none */
    float *state, *gate;     /* carried: the state; or the adjoint, and the gate that it passes */
    const float *parameters; /* (P, LANES), as the kind prepares them */
    float *sums;             /* (P, LANES): gradients of the prepared parameters are added */
} Steps;

/* A kind of gates, at one level of vector instructions. */
typedef struct {
    const char *name; /* as in kinds.py, of the kind without option */
    int inputs, parameters;
    void (*forward)(const Steps *steps, int option);
    void (*backward)(const Steps *steps, int option);
    /* The prepared value of a channel parameter and its derivative, for a block; null: as it is. */
    void (*prepare)(const float *parameter, float *prepared, float *slope);
} Kind;

/* What a task computes: channels from first_channel on, and the sequences [first, last). */
typedef struct {
    int64_t batch, span, first_channel, last_channel, first, last;
} Part;

/* The first sequence that begins at or after step t. */
static inline int64_t sequence_from(const Scan *scan, int64_t t) {
    int64_t low = 0, high = scan->sequences;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (scan->offsets[middle] < t)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static inline Part part_of(const Scan *scan, int64_t task) {
    const int64_t span = task % scan->spans, place = task / scan->spans;
    const int64_t channel = place % scan->groups * scan->width;
    return (Part){
        .batch = place / scan->groups,
        .span = span,
        .first_channel = channel,
        .last_channel = smaller(channel + scan->width, scan->channels),
        .first = sequence_from(scan, scan->time * span / scan->spans),
        .last = sequence_from(scan, scan->time * (span + 1) / scan->spans),
    };
}

static inline Rows skip(Rows rows, int64_t steps) {
    return (Rows){offset(rows.at, steps, rows.pitch), rows.pitch};
}

/* So many steps from t on. */
static inline Steps part_of_steps(const Steps *all, int64_t t, int64_t steps) {
    Steps some = *all;
    some.steps = steps;
    some.states = skip(all->states, t), some.states_grad = skip(all->states_grad, t);
    if (all->reset.at) some.reset = skip(all->reset, t);
    for (int n = 0; n < MOST_INPUTS; n++) {
        some.input[n] = skip(all->input[n], t);
        some.grad[n] = skip(all->grad[n], t);
    }
    return some;
}

/* Resets of steps from t on. */
static inline Rows resets_from(const Scan *scan, int64_t batch, int64_t t) {
    if (!scan->reset) return (Rows){NULL, 0};
    const char *of_batch = offset(scan->reset, batch, scan->reset_batch);
    if (scan->down) return (Rows){offset(of_batch, scan->time - 1 - t, 1), -1};
    return (Rows){offset(of_batch, t, 1), 1};
}

/* Bytes of scratch memory, no less than the tasks take. Blocks are of 8 lanes at most; rows count
 * those of one float per lane. */
static inline int64_t scratch_of(const Scan *scan) {
    const int64_t panels = (MOST_INPUTS + 3) * 8 * scan->steps;
    const int64_t rows = (4 + 4 * MOST_PARAMETERS) * (scan->width + 8);
    return 4 * (panels + rows) + 32 * LINE;
}
