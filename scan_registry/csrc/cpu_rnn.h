/* A recurrent network as numbers, and how its rows are cut into tasks. */
#include "cpu_threads.h"

enum { LSTM, GRU, ELMAN, SLSTM, CELLS };
enum { MOST_STATES = 4, MOST_GATES = 4 };

/* How many of each a cell has, in the words of kernels/rnn/problem.py. */
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

/* float32, (states, B, T, …, N, D) without gaps from the gates, or the heads, on. Strides count
 * elements. */
typedef struct {
    float *at; /* null: not there */
    int64_t state, batch, time;
} Sequence;

/* A sequence of the batch, or of those packed along time. Task rows are ordered by length, the
 * longest first, so that those with a step are the first ones at every step. */
typedef struct {
    int64_t index, batch, first, length;
} Row;

typedef struct {
    int cell, graded; /* graded: states that have a gradient of every step */
    int64_t batch, time, heads, dim, rows, run; /* run: rows of a task at most */
    Row *row;
    Sequence inputs, states, cache, states_grad, gates_grad;
    const uint8_t *reset; /* (B, T): the states before a step are fresh; null: none */
    int64_t reset_batch, reset_time;
    const float *recurrent, *bias, *initial, *fresh, *final_grad; /* no gaps; null: zeros */
    float *last, *initial_grad, *fresh_grad; /* fresh_grad: zeros before, or null */
    float clip, recurrent_clip;
    int cut;
    float *panels; /* R as tasks read it */
} Network;

/* Rows of a task at most, so that what R carries of them stays in a cache. */
enum { MOST_ROWS = 48 };

/* Units that a panel of R has: two vectors. */
enum { MOST_LANES = 8, MOST_PANEL = 2 * MOST_LANES };
