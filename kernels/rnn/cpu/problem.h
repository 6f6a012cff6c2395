/* A recurrent network as numbers, and how its rows are cut into tasks. */
#include "cpu_threads.h"

enum { LSTM, GRU, ELMAN, SLSTM, CELLS };
enum { MOST_STATES = 4, MOST_GATES = 4 };

/* How many gates, states and so on a cell has, by the names of kernels/rnn/problem.py. */
typedef struct {
    const char *name;
    int recurrent, inputs, gates, states, cache;
} Cell;

static const Cell cells[CELLS] = {
    [LSTM] = {"lstm", 4, 4, 4, 2, 4},
    [GRU] = {"gru", 3, 3, 4, 1, 4},
    [ELMAN] = {"elman", 1, 1, 1, 1, 0},
    [SLSTM] = {"slstm", 4, 4, 4, 4, 4},
};

/* A float32 tensor (states, B, T, …, N, D). The dimensions after T have no gaps. Strides count
 * elements. */
typedef struct {
    float *at; /* null: there is no such tensor */
    int64_t state, batch, time;
} Sequence;

/* A row: a sequence of the batch, or a sequence packed along time. A task's rows are ordered by
 * length, the longest first. So at each step the rows that have this step come first. */
typedef struct {
    int64_t index, batch, first, length;
} Row;

typedef struct {
    int cell, graded; /* graded: how many states have a gradient at every step */
    int64_t batch, time, heads, dim, rows, run; /* run: the most rows of a task */
    Row *row;
    Sequence inputs, states, cache, states_grad, gates_grad;
    const uint8_t *reset; /* (B, T): where true, a step starts from fresh; null: no resets */
    int64_t reset_batch, reset_time;
    const float *recurrent, *bias, *initial, *fresh, *final_grad; /* without gaps; null: zeros */
    float *last, *initial_grad, *fresh_grad; /* fresh_grad: the caller has zeroed it, or null */
    float clip, recurrent_clip;
    int cut;
    float *panels; /* R, packed as tasks read it */
} Network;

/* The most rows of a task: so many that what a product with R reads and writes of them fits a
 * cache. */
enum { MOST_ROWS = 48 };

/* A panel of R has two vectors of units. */
enum { MOST_LANES = 8, MOST_PANEL = 2 * MOST_LANES };
