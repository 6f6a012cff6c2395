/* The code of rnn that runs for each element, at one level of vector instructions.
 *
 * A task computes all steps of some rows of one head. Forward, it computes a step panel by panel of
 * units: first the products of all rows with R for these units, and then the cells, which find the
 * products in a cache. Backward, a step is the cells of all rows, and then the product of their
 * gradients with R.
 */
#include "cpu_convert.h"
#include "cpu_math.h"
#include "product.h"
#include "cells.h"

enum { LEVEL(panel) = PANEL };

/* The rows of a task, and the pitch of what it carries from step to step of each row. */
typedef struct {
    int64_t head, count, pitch;
    const Row *row;
    const Cell *cell;
} LEVEL(Part);

TARGET static LEVEL(Part) LEVEL(part_of)(const Network *net, int64_t task) {
    const int64_t runs = ceil_div(net->rows, net->run), first = task % runs * net->run;
    LEVEL(Part) part = {.head = task / runs, .row = net->row + first, .cell = &cells[net->cell]};
    part.count = smaller(net->run, net->rows - first);
    part.pitch = ceil_div(net->dim, PANEL) * PANEL;
    return part;
}

/* The element of a row at a step, and of the head. */
INLINE int64_t LEVEL(at_step)(const Sequence *sequence, const Row *row, int64_t t) {
    return row->batch * sequence->batch + (row->first + t) * sequence->time;
}

INLINE int LEVEL(is_reset)(const Network *net, const Row *row, int64_t t) {
    return net->reset &&
           net->reset[row->batch * net->reset_batch + (row->first + t) * net->reset_time];
}

/* Copy states (states, rows, N, D) to or from what a task carries of a row. Null: zeros, or no
 * copy. */
TARGET static void LEVEL(fetch_states)(const Network *net, const LEVEL(Part) *part, int64_t i,
                                       const float *from, float *const *carry) {
    for (int k = 0; k < part->cell->states; k++) {
        float *const to = carry[k] + i * part->pitch;
        const int64_t unit = ((k * net->rows + part->row[i].index) * net->heads + part->head);
        memset(to, 0, (size_t)part->pitch * 4);
        if (from) memcpy(to, from + unit * net->dim, (size_t)net->dim * 4);
    }
}

TARGET static void LEVEL(put_states)(const Network *net, const LEVEL(Part) *part, int64_t i,
                                     float *to, float *const *carry) {
    if (!to) return;
    for (int k = 0; k < part->cell->states; k++) {
        const int64_t unit = ((k * net->rows + part->row[i].index) * net->heads + part->head);
        memcpy(to + unit * net->dim, carry[k] + i * part->pitch, (size_t)net->dim * 4);
    }
}

/* Add a row's gradients to those of the fresh states. The states before the reset get none. */
TARGET static void LEVEL(go_back_to_fresh)(const Network *net, const LEVEL(Part) *part, int64_t i,
                                           float *const *carry) {
    for (int k = 0; k < part->cell->states; k++) {
        const int64_t unit = ((k * net->rows + part->row[i].index) * net->heads + part->head);
        float *const from = carry[k] + i * part->pitch;
        for (int64_t u = 0; net->fresh_grad && u < net->dim; u++)
            net->fresh_grad[unit * net->dim + u] += from[u];
        memset(from, 0, (size_t)part->pitch * 4);
    }
}

/* --- Forward ---------------------------------------------------------------------------------- */

/* The cells of some units, from a panel on, at a step of a row. */
INLINE void LEVEL(advance_row)(const int cell, const Network *net, const LEVEL(Part) *part,
                               int64_t i, int64_t t, int64_t unit, const float *terms,
                               float *const *carry, float *after) {
    const Row *const row = part->row + i;
    const int64_t head = part->head * net->dim;
    for (int64_t u = unit; u < smaller(unit + PANEL, net->dim); u += LANES, terms += LANES) {
        LEVEL(Step) step = {
            .inputs = net->inputs.at + LEVEL(at_step)(&net->inputs, row, t) + head + u,
            .bias = net->bias + head + u,
            .terms = terms,
            .before = carry[0] + i * part->pitch + u,
            .after = after + i * part->pitch + u,
            .states = net->states.at + LEVEL(at_step)(&net->states, row, t) + head + u,
            .cache = NULL,
            .gate = net->heads * net->dim,
            .state = net->states.state,
            .clip = net->clip,
        };
        if (net->cache.at)
            step.cache = net->cache.at + LEVEL(at_step)(&net->cache, row, t) + head + u;
        for (int k = 1; k < cells[cell].states; k++)
            step.carry[k] = carry[k] + i * part->pitch + u;
        if (u + LANES <= net->dim)
            LEVEL(advance)(cell, &step, LANES);
        else
            LEVEL(advance)(cell, &step, net->dim - u);
    }
}

TARGET static void LEVEL(advance_rows)(const Network *net, const LEVEL(Part) *part, int64_t rows,
                                       int64_t t, int64_t unit, const float *terms,
                                       float *const *carry, float *after) {
#define ROWS(cell)                                                                          \
    for (int64_t i = 0; i < rows; i++)                                                      \
        LEVEL(advance_row)(cell, net, part, i, t, unit, terms + i * MOST_GATES * PANEL, carry, \
                           after)
    switch (net->cell) {
        case LSTM: ROWS(LSTM); break;
        case GRU: ROWS(GRU); break;
        case ELMAN: ROWS(ELMAN); break;
        default: ROWS(SLSTM);
    }
#undef ROWS
}

TARGET static void LEVEL(forward_task)(const void *problem, int64_t task, char *scratch) {
    const Network *const net = problem;
    const LEVEL(Part) part = LEVEL(part_of)(net, task);
    const int64_t dim = net->dim, gates = part.cell->recurrent;
    float *carry[MOST_STATES], *after;
    for (int k = 0; k < MOST_STATES; k++) carry[k] = take(&scratch, part.count * part.pitch);
    after = take(&scratch, part.count * part.pitch);
    float *const terms = take(&scratch, part.count * MOST_GATES * PANEL);
    memset(terms, 0, (size_t)(part.count * MOST_GATES * PANEL) * 4);
    int64_t rows = part.count; /* those that have this step */
    for (int64_t i = 0; i < rows; i++) LEVEL(fetch_states)(net, &part, i, net->initial, carry);
    for (int64_t t = 0;; t++) {
        for (; rows > 0 && part.row[rows - 1].length <= t; rows--)
            LEVEL(put_states)(net, &part, rows - 1, net->last, carry);
        if (!rows) return;
        for (int64_t i = 0; i < rows; i++)
            if (LEVEL(is_reset)(net, part.row + i, t))
                LEVEL(fetch_states)(net, &part, i, net->fresh, carry);
        const float *panel = net->panels;
        if (panel) panel += part.head * gates * dim * part.pitch;
        for (int64_t unit = 0; unit < dim; unit += PANEL) {
            if (t > 0 || net->initial || net->fresh)
                for (int64_t gate = 0; gate < gates; gate++, panel += dim * PANEL)
                    LEVEL(multiply)(carry[0], part.pitch, rows, panel, dim, terms + gate * PANEL,
                                    MOST_GATES * PANEL);
            LEVEL(advance_rows)(net, &part, rows, t, unit, terms, carry, after);
        }
        float *const before = carry[0];
        carry[0] = after, after = before;
    }
}

/* --- Backward --------------------------------------------------------------------------------- */

INLINE void LEVEL(go_back_row)(const int cell, const Network *net, const LEVEL(Part) *part,
                               int64_t i, int64_t t, float *through, float *const *carry) {
    const Row *const row = part->row + i;
    const int64_t head = part->head * net->dim;
    const float *before = NULL;
    int64_t before_state = net->states.state;
    const int fresh = LEVEL(is_reset)(net, row, t);
    const float *const start = fresh ? net->fresh : net->initial;
    if (!fresh && t > 0) {
        before = net->states.at + LEVEL(at_step)(&net->states, row, t - 1) + head;
    } else if (start) {
        before = start + row->index * net->heads * net->dim + head;
        before_state = net->rows * net->heads * net->dim;
    }
    for (int64_t u = 0; u < net->dim; u += LANES) {
        LEVEL(StepBack) step = {
            .before = before ? before + u : NULL,
            .states = net->states.at + LEVEL(at_step)(&net->states, row, t) + head + u,
            .states_grad =
                net->states_grad.at + LEVEL(at_step)(&net->states_grad, row, t) + head + u,
            .cache = net->cache.at + LEVEL(at_step)(&net->cache, row, t) + head + u,
            .before_state = before_state,
            .state = net->states.state,
            .grad_state = net->states_grad.state,
            .gate = net->heads * net->dim,
            .gates_grad = net->gates_grad.at + LEVEL(at_step)(&net->gates_grad, row, t) + head + u,
            .through = through + u,
            .through_gate = net->dim,
            .graded = net->graded,
        };
        for (int k = 0; k < cells[cell].states; k++)
            step.carry[k] = carry[k] + i * part->pitch + u;
        if (u + LANES <= net->dim)
            LEVEL(go_back)(cell, &step, LANES);
        else
            LEVEL(go_back)(cell, &step, net->dim - u);
    }
}

TARGET static void LEVEL(go_back_rows)(const Network *net, const LEVEL(Part) *part, int64_t rows,
                                       int64_t t, float *through, int64_t pitch,
                                       float *const *carry) {
#define ROWS(cell)                     \
    for (int64_t i = 0; i < rows; i++) \
        LEVEL(go_back_row)(cell, net, part, i, t, through + i * pitch, carry)
    switch (net->cell) {
        case LSTM: ROWS(LSTM); break;
        case GRU: ROWS(GRU); break;
        case ELMAN: ROWS(ELMAN); break;
        default: ROWS(SLSTM);
    }
#undef ROWS
}

/* Add what R carries back of a panel of units, clipped. */
TARGET static void LEVEL(add_clipped)(float *to, int64_t pitch, int64_t rows, const float *terms,
                                      float clip) {
    const Floats high = LEVEL(all)(clip);
    for (int64_t i = 0; i < rows; i++, to += pitch, terms += PANEL)
        for (int64_t u = 0; u < PANEL; u += LANES) {
            Floats x = LEVEL(load)(terms + u);
            x = LEVEL(select)(x > high, high, x);
            x = LEVEL(select)(x < -high, -high, x);
            LEVEL(store)(to + u, LEVEL(load)(to + u) + x);
        }
}

TARGET static void LEVEL(backward_task)(const void *problem, int64_t task, char *scratch) {
    const Network *const net = problem;
    const LEVEL(Part) part = LEVEL(part_of)(net, task);
    const int64_t depth = part.cell->recurrent * net->dim;
    const int64_t pitch = depth + 2 * LANES; /* no power of two, which maps rows to the same lines */
    float *carry[MOST_STATES];
    for (int k = 0; k < MOST_STATES; k++) carry[k] = take(&scratch, part.count * part.pitch);
    float *const through = take(&scratch, part.count * pitch);
    float *const terms = take(&scratch, part.count * PANEL);
    for (int64_t i = 0; i < part.count; i++)
        LEVEL(fetch_states)(net, &part, i, net->final_grad, carry);
    int64_t rows = 0; /* those that have this step */
    for (int64_t t = part.row[0].length; t-- > 0;) {
        while (rows < part.count && part.row[rows].length > t) rows++;
        LEVEL(go_back_rows)(net, &part, rows, t, through, pitch, carry);
        if (!net->cut && (t > 0 || net->initial_grad || net->fresh_grad)) {
            const float *panel = net->panels + part.head * depth * part.pitch;
            for (int64_t unit = 0; unit < net->dim; unit += PANEL, panel += depth * PANEL) {
                LEVEL(multiply)(through, pitch, rows, panel, depth, terms, PANEL);
                LEVEL(add_clipped)(carry[0] + unit, part.pitch, rows, terms, net->recurrent_clip);
            }
        }
        for (int64_t i = 0; i < rows; i++)
            if (LEVEL(is_reset)(net, part.row + i, t))
                LEVEL(go_back_to_fresh)(net, &part, i, carry);
    }
    for (int64_t i = 0; i < part.count; i++)
        LEVEL(put_states)(net, &part, i, net->initial_grad, carry);
}

#undef Floats
#undef Ints
#undef LANES
#undef PANEL
