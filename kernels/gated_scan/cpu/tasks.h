/* One task of each direction, at one level of vector instructions: a group of channels of one
 * batch through time, some steps and LANES channels at a time. Rows of memory are computed with as
 * they are where they are rows of floats, else in panels. */

TARGET static View LEVEL(view)(const Scan *scan, int which, int64_t batch, int64_t channel) {
    const Tensor *tensor = &scan->tensor[which];
    return LEVEL(view_of)(tensor->at, tensor->type, tensor->stride, batch, channel);
}

INLINE int LEVEL(is_panel)(const View *view, int64_t lanes) {
    return view->at && view->type == FLOAT32 && view->channel == 4 && lanes == LANES;
}

/* Where in memory the earliest of so many steps from t on is. */
INLINE int64_t LEVEL(earliest)(const Scan *scan, int64_t t, int64_t steps) {
    return scan->down ? scan->time - t - steps : t;
}

/* Rows that are in the order of memory, in the order of steps. */
INLINE Rows LEVEL(in_order)(const Scan *scan, Rows rows, int64_t steps) {
    if (!scan->down) return rows;
    return (Rows){offset(rows.at, steps - 1, rows.pitch), -rows.pitch};
}

/* The rows of so many steps from t on: of memory itself, or of the panel, filled from there. */
TARGET static Rows LEVEL(input)(const Scan *scan, const View *view, int64_t t, int64_t steps,
                                int64_t lanes, float *panel, float *buffer) {
    if (steps == 0) return (Rows){(char *)panel, 0};
    const int64_t earliest = LEVEL(earliest)(scan, t, steps);
    Rows rows = {(char *)panel, VECTOR};
    if (LEVEL(is_panel)(view, lanes))
        rows = (Rows){offset(view->at, earliest, view->time), view->time};
    else
        LEVEL(fetch)(view, earliest, steps, lanes, panel, buffer);
    return LEVEL(in_order)(scan, rows, steps);
}

/* The same where nothing is written to the panel: steps that are alike share one row. Zeros if the
 * tensor is not there. */
TARGET static Rows LEVEL(shared_input)(const Scan *scan, const View *view, int64_t t, int64_t steps,
                                       int64_t lanes, float *panel, float *buffer) {
    if (!view->at) memset(panel, 0, VECTOR);
    if (view->at && view->time) return LEVEL(input)(scan, view, t, steps, lanes, panel, buffer);
    if (view->at) LEVEL(fetch)(view, 0, 1, lanes, panel, buffer);
    return (Rows){(char *)panel, 0};
}

/* The rows to compute so many steps into. The panel may be that of an input: a step's inputs are
 * read before its outputs are written. */
TARGET static Rows LEVEL(output)(const Scan *scan, const View *view, int64_t t, int64_t steps,
                                 int64_t lanes, float *panel) {
    Rows rows = {(char *)panel, VECTOR};
    if (LEVEL(is_panel)(view, lanes))
        rows = (Rows){offset(view->at, LEVEL(earliest)(scan, t, steps), view->time), view->time};
    return LEVEL(in_order)(scan, rows, steps);
}

/* Then, if the rows are not memory itself, put them there. */
TARGET static void LEVEL(finish)(const Scan *scan, const View *view, int64_t t, int64_t steps,
                                 int64_t lanes, const float *panel, float *buffer) {
    if (view->at && !LEVEL(is_panel)(view, lanes))
        LEVEL(put)(view, LEVEL(earliest)(scan, t, steps), steps, lanes, panel, buffer);
}

/* Where a state of a sequence is. */
INLINE const char *LEVEL(state_at)(const Scan *scan, const View *view, int64_t sequence) {
    const int64_t place = scan->down ? scan->sequences - 1 - sequence : sequence;
    return offset(view->at, place, view->time);
}

/* The state of a block, or zeros where there is none; zeros in lanes that fill up the block. */
TARGET static void LEVEL(load_state)(const Scan *scan, const View *view, int64_t sequence,
                                     int64_t lanes, float *state) {
    memset(state, 0, VECTOR);
    if (!view->at) return;
    const char *from = LEVEL(state_at)(scan, view, sequence);
    for (int64_t i = 0; i < lanes; i++) memcpy(state + i, offset(from, i, view->channel), 4);
}

TARGET static void LEVEL(store_state)(const Scan *scan, const View *view, int64_t sequence,
                                      int64_t lanes, const float *state) {
    if (!view->at) return;
    const char *to = LEVEL(state_at)(scan, view, sequence);
    for (int64_t i = 0; i < lanes; i++) memcpy(offset(to, i, view->channel), state + i, 4);
}

/* What the blocks of a task have; those of one block are LANES, or (P, LANES), apart. */
typedef struct {
    const Scan *scan;
    const Kind *kind;
    Part part;
    float *panel[MOST_INPUTS], *buffer, *states_panel, *grad_panel;
    float *state, *gate, *parameters, *slopes;
    double *sums;
} LEVEL(Task);
#define Task LEVEL(Task)

/* With prepared parameters. */
TARGET static Task LEVEL(task_of)(const Scan *scan, int64_t task, char *scratch) {
    const Kind *kind = &LEVEL(kinds)[scan->kind];
    const int64_t panel = scan->steps * LANES, row = scan->width + LANES;
    Task of = {.scan = scan, .kind = kind, .part = part_of(scan, task)};
    for (int n = 0; n < MOST_INPUTS; n++) of.panel[n] = take(&scratch, panel);
    of.buffer = take(&scratch, panel);
    of.states_panel = take(&scratch, panel), of.grad_panel = take(&scratch, panel);
    of.state = take(&scratch, row), of.gate = take(&scratch, row);
    of.parameters = take(&scratch, kind->parameters * row);
    of.slopes = take(&scratch, kind->parameters * row);
    of.sums = (double *)take(&scratch, 2 * kind->parameters * row);
    memset(of.sums, 0, (size_t)(kind->parameters * row) * 8);
    float *prepared = of.parameters, *slope = of.slopes;
    for (int64_t d = of.part.first_channel; d < of.part.last_channel; d += LANES)
        for (int n = 0; n < kind->parameters; n++, prepared += LANES, slope += LANES) {
            const int64_t lanes = smaller(LANES, of.part.last_channel - d);
            float values[LANES] = {0};
            memcpy(values, scan->parameters + n * scan->channels + d, (size_t)lanes * 4);
            LEVEL(store)(slope, LEVEL(all)(1));
            if (kind->prepare)
                kind->prepare(values, prepared, slope);
            else
                memcpy(prepared, values, VECTOR);
        }
    return of;
}

/* The inputs of a block, so many steps from t on. */
TARGET static Steps LEVEL(fetch_inputs)(const Task *task, int64_t d, int64_t t, int64_t steps) {
    const Scan *const scan = task->scan;
    const int64_t place = d - task->part.first_channel;
    Steps all = {.steps = steps,
                 .state = task->state + place,
                 .gate = task->gate + place,
                 .parameters = task->parameters + place * task->kind->parameters,
                 .reset = resets_from(scan, task->part.batch, t)};
    for (int n = 0; n < task->kind->inputs; n++) {
        const View view = LEVEL(view)(scan, INPUT + n, task->part.batch, d);
        const int64_t lanes = smaller(LANES, task->part.last_channel - d);
        all.input[n] = LEVEL(input)(scan, &view, t, steps, lanes, task->panel[n], task->buffer);
    }
    return all;
}

/* So many steps of a block from ``begin`` on, which is in sequence s. */
TARGET static void LEVEL(forward_block)(const Task *task, int64_t d, int64_t s, int64_t begin,
                                        int64_t steps) {
    const Scan *const scan = task->scan;
    const int64_t *offsets = scan->offsets, lanes = smaller(LANES, task->part.last_channel - d);
    const View states = LEVEL(view)(scan, STATES, task->part.batch, d);
    const View initial = LEVEL(view)(scan, INITIAL, task->part.batch, d);
    const View final = LEVEL(view)(scan, FINAL, task->part.batch, d);
    Steps all = LEVEL(fetch_inputs)(task, d, begin, steps);
    all.states = LEVEL(output)(scan, &states, begin, steps, lanes, task->panel[0]);
    for (int64_t t = 0, run; t < steps; t += run) {
        while (offsets[s + 1] <= begin + t) s++;
        run = smaller(offsets[s + 1] - begin, steps) - t;
        if (begin + t == offsets[s]) LEVEL(load_state)(scan, &initial, s, lanes, all.state);
        const Steps some = part_of_steps(&all, t, run);
        task->kind->forward(&some, scan->option);
        if (begin + t + run == offsets[s + 1])
            LEVEL(store_state)(scan, &final, s, lanes, all.state);
    }
    LEVEL(finish)(scan, &states, begin, steps, lanes, task->panel[0], task->buffer);
}

/* The runs of a block that lie in one sequence each. The state before that at step t is at t + 1,
 * or, at the last step of a sequence, the initial one. */
TARGET static void LEVEL(backward_runs)(const Task *task, const Steps *all, int64_t d, int64_t s,
                                        int64_t begin) {
    const Scan *const scan = task->scan;
    const int64_t *offsets = scan->offsets, lanes = smaller(LANES, task->part.last_channel - d);
    const View initial = LEVEL(view)(scan, INITIAL, task->part.batch, d);
    const View final_grad = LEVEL(view)(scan, FINAL_GRAD, task->part.batch, d);
    const View initial_grad = LEVEL(view)(scan, INITIAL_GRAD, task->part.batch, d);
    float before[LANES];
    for (int64_t t = 0, run; t < all->steps; t += run) {
        while (offsets[s + 1] <= begin + t) s++;
        run = smaller(offsets[s + 1] - begin, all->steps) - t;
        const int ends = begin + t + run == offsets[s + 1];
        if (begin + t == offsets[s]) {
            LEVEL(load_state)(scan, &final_grad, s, lanes, all->state);
            LEVEL(store)(all->gate, LEVEL(all)(1));
        }
        Steps some = part_of_steps(all, t, run - ends);
        task->kind->backward(&some, scan->option);
        if (!ends) continue;
        some = part_of_steps(all, t + run - 1, 1);
        LEVEL(load_state)(scan, &initial, s, lanes, before);
        some.states = (Rows){(char *)before, 0};
        task->kind->backward(&some, scan->option);
        LEVEL(store)(before, LEVEL(load)(all->gate) * LEVEL(load)(all->state));
        LEVEL(store_state)(scan, &initial_grad, s, lanes, before);
    }
}

TARGET static void LEVEL(backward_block)(const Task *task, int64_t d, int64_t s, int64_t begin,
                                         int64_t steps) {
    const Scan *const scan = task->scan;
    const int inputs = task->kind->inputs, parameters = task->kind->parameters;
    const int64_t batch = task->part.batch, lanes = smaller(LANES, task->part.last_channel - d);
    const int64_t known = smaller(steps, scan->time - begin - 1);
    const View states = LEVEL(view)(scan, STATES, batch, d);
    const View grads = LEVEL(view)(scan, STATES_GRAD, batch, d);
    float sums[MOST_PARAMETERS * LANES] = {0};
    View grad[MOST_INPUTS];
    Steps all = LEVEL(fetch_inputs)(task, d, begin, steps);
    all.sums = sums;
    all.states =
        LEVEL(input)(scan, &states, begin + 1, known, lanes, task->states_panel, task->buffer);
    all.states_grad =
        LEVEL(shared_input)(scan, &grads, begin, steps, lanes, task->grad_panel, task->buffer);
    for (int n = 0; n < inputs; n++) {
        grad[n] = LEVEL(view)(scan, INPUT_GRAD + n, batch, d);
        all.grad[n] = LEVEL(output)(scan, &grad[n], begin, steps, lanes, task->panel[n]);
    }
    LEVEL(backward_runs)(task, &all, d, s, begin);
    for (int n = 0; n < inputs; n++)
        LEVEL(finish)(scan, &grad[n], begin, steps, lanes, task->panel[n], task->buffer);
    double *of_task = task->sums + (d - task->part.first_channel) * parameters;
    for (int i = 0; i < parameters * LANES; i++) of_task[i] += (double)sums[i];
}

INLINE void LEVEL(run)(const Task *task, int backward) {
    const Scan *const scan = task->scan;
    const Part *const part = &task->part;
    const int64_t end = scan->offsets[part->last];
    for (int64_t t = scan->offsets[part->first], s = part->first; t < end; t += scan->steps) {
        while (scan->offsets[s + 1] <= t) s++;
        for (int64_t d = part->first_channel; d < part->last_channel; d += LANES)
            if (backward)
                LEVEL(backward_block)(task, d, s, t, smaller(scan->steps, end - t));
            else
                LEVEL(forward_block)(task, d, s, t, smaller(scan->steps, end - t));
    }
}

TARGET static void LEVEL(forward_task)(const void *problem, int64_t number, char *scratch) {
    const Task task = LEVEL(task_of)(problem, number, scratch);
    LEVEL(run)(&task, 0);
}

TARGET static void LEVEL(backward_task)(const void *problem, int64_t number, char *scratch) {
    const Scan *const scan = problem;
    const Task task = LEVEL(task_of)(scan, number, scratch);
    const Part *const part = &task.part;
    const int parameters = task.kind->parameters;
    LEVEL(run)(&task, 1);
    if (!scan->parameter_sums) return;
    float *const to = scan->parameter_sums +
                      (part->batch * scan->spans + part->span) * parameters * scan->channels;
    for (int64_t d = part->first_channel; d < part->last_channel; d++)
        for (int n = 0; n < parameters; n++) {
            const int64_t lane = (d - part->first_channel) % LANES;
            const int64_t block = d - part->first_channel - lane;
            const int64_t at = block * parameters + n * LANES + lane;
            to[n * scan->channels + d] = (float)(task.sums[at] * (double)task.slopes[at]);
        }
}
#undef Task
