/* Everything of causal_conv1d that runs once per element, at one level of vector instructions.
 *
 * Vectors run along channels. A panel has the last W - 1 inputs of what came before, then those of
 * some steps: row W - 1 + t is x[t]. Backward, a panel of the gradients of what enters the
 * activation is like it, and row t of the inputs' gradients, which is x[t - (W - 1)], is a sum over
 * its rows t to t + W - 1. So these come W - 1 steps late, the initial state's first, and that many
 * steps follow the last.
 */
#include "cpu_convert.h"
#include "cpu_math.h"
#include "cpu_blocks.h"
#include "cpu_sums.h"

#define PANEL ((STEPS + 2 * MOST_WIDTH) * LANES)
#define STATE ((MOST_WIDTH - 1) * LANES)

/* Tap j, of x[t - j], of so many channels is row j; the bias is row W. */
TARGET static void LEVEL(fetch_taps)(const char *weight, const char *bias, int type, int64_t width,
                                     int64_t channel, int64_t lanes, float *taps) {
    const int bytes = types[type].bytes;
    float wide[MOST_WIDTH * LANES], rows[MOST_WIDTH * LANES];
    memset(taps, 0, (MOST_WIDTH + 1) * VECTOR);
    memset(rows, 0, sizeof rows);
    LEVEL(widen)(type, wide, weight + channel * width * bytes, lanes * width);
    LEVEL(transpose_4)((char *)rows, VECTOR, (const char *)wide, (ptrdiff_t)width * 4, lanes,
                       width);
    for (int64_t j = 0; j < width; j++)
        LEVEL(store)(taps + j * LANES, LEVEL(load)(rows + (width - 1 - j) * LANES));
    if (bias) LEVEL(widen)(type, taps + width * LANES, bias + channel * bytes, lanes);
}

TARGET static View LEVEL(view)(const Tensor *tensor, int64_t row, int64_t channel) {
    View view = {tensor->at, tensor->type, tensor->stride[1], tensor->stride[2]};
    if (view.at)
        view.at = offset(offset(view.at, row, tensor->stride[0]), channel, tensor->stride[1]);
    return view;
}

/* How far, up to so many steps, steps see back: as in the reference, what precedes the first step
 * belongs to its run. */
TARGET static void LEVEL(find_reach)(const int32_t *seq_idx, int64_t t, int64_t steps, int most,
                                     int *reach) {
    int count = 0; /* that of step t - 1 */
    while (count < most && t - 1 - count > 0 && seq_idx[t - 1 - count] == seq_idx[t - 2 - count])
        count++;
    if (t - 1 - count <= 0) count = most;
    for (int64_t i = 0; i < steps; i++) {
        if (t + i > 0) count = seq_idx[t + i] != seq_idx[t + i - 1] ? 0 : count + (count < most);
        reach[i] = count;
    }
}

/* What enters the activation, of so many steps. */
INLINE void LEVEL(convolve_width)(int width, const float *taps, const float *panel, int64_t steps,
                                  const int *reach, float *y) {
    Floats tap[MOST_WIDTH];
    for (int j = 0; j < width; j++) tap[j] = LEVEL(load)(taps + j * LANES);
    const Floats bias = LEVEL(load)(taps + width * LANES);
    for (int64_t t = 0; t < steps; t++) {
        const float *const last = panel + (t + width - 1) * LANES;
        Floats sum = bias;
        for (int j = 0; j < width; j++)
            if (!reach || j <= reach[t]) sum += tap[j] * LEVEL(load)(last - j * LANES);
        LEVEL(store)(y + t * LANES, sum);
    }
}

/* Inputs' gradients, and the sums of the taps' and, last, the bias's, to which only real steps
 * add. */
INLINE void LEVEL(back_width)(int width, const float *taps, const float *panel, const float *grads,
                              int64_t steps, int64_t real, const int *reach, float *x_grads,
                              float *sums) {
    Floats tap[MOST_WIDTH], sum[MOST_WIDTH + 1];
    for (int j = 0; j < width; j++) tap[j] = LEVEL(load)(taps + j * LANES), sum[j] = LEVEL(all)(0);
    sum[width] = LEVEL(all)(0);
    for (int64_t t = 0; t < steps; t++) {
        const float *const last = panel + (t + width - 1) * LANES;
        const Floats grad = LEVEL(load)(grads + (t + width - 1) * LANES);
        Floats of_x = LEVEL(all)(0);
        for (int j = 0; j < width; j++) {
            if (!reach || reach[t + j] >= j)
                of_x += tap[j] * LEVEL(load)(grads + (t + j) * LANES);
            if (t < real && (!reach || reach[t + width - 1] >= j))
                sum[j] += grad * LEVEL(load)(last - j * LANES);
        }
        sum[width] += grad;
        LEVEL(store)(x_grads + t * LANES, of_x);
    }
    for (int j = 0; j <= width; j++) LEVEL(store)(sums + j * LANES, sum[j]);
}

#define OF_WIDTH(call, ...)                                \
    switch (width) {                                       \
        case 2: LEVEL(call##_width)(2, __VA_ARGS__); break; \
        case 3: LEVEL(call##_width)(3, __VA_ARGS__); break; \
        case 4: LEVEL(call##_width)(4, __VA_ARGS__); break; \
        case 5: LEVEL(call##_width)(5, __VA_ARGS__); break; \
        case 6: LEVEL(call##_width)(6, __VA_ARGS__); break; \
        case 7: LEVEL(call##_width)(7, __VA_ARGS__); break; \
        default: LEVEL(call##_width)(8, __VA_ARGS__);       \
    }

TARGET static void LEVEL(convolve)(int width, const float *taps, const float *panel, int64_t steps,
                                   const int *reach, float *y) {
    if (reach)
        OF_WIDTH(convolve, taps, panel, steps, reach, y)
    else
        OF_WIDTH(convolve, taps, panel, steps, NULL, y)
}

TARGET static void LEVEL(back)(int width, const float *taps, const float *panel, const float *grads,
                               int64_t steps, int64_t real, const int *reach, float *x_grads,
                               float *sums) {
    if (reach)
        OF_WIDTH(back, taps, panel, grads, steps, real, reach, x_grads, sums)
    else
        OF_WIDTH(back, taps, panel, grads, steps, real, NULL, x_grads, sums)
}
#undef OF_WIDTH

TARGET static void LEVEL(activate)(float *y, int64_t steps) {
    for (int64_t i = 0; i < steps * LANES; i += LANES) {
        const Floats x = LEVEL(load)(y + i);
        LEVEL(store)(y + i, x / (1 + LEVEL(exp_of)(-x)));
    }
}

/* What comes before a sequence: the initial state, or zeros. */
TARGET static void LEVEL(fetch_history)(const Conv *conv, int64_t row, int64_t channel,
                                        int64_t lanes, float *history, float *room) {
    const View initial = LEVEL(view)(&conv->tensor[INITIAL], row, channel);
    memset(history, 0, (size_t)(conv->width - 1) * VECTOR);
    if (initial.at) LEVEL(fetch)(&initial, 0, conv->width - 1, lanes, history, room);
}

/* The task's channels, row of the batch, and sequences. */
typedef struct {
    int64_t low, high, batch, sequences;
} LEVEL(Part);

TARGET static LEVEL(Part) LEVEL(part_of)(const Conv *conv, int64_t task) {
    const int64_t runs = ceil_div(conv->channels, conv->run);
    LEVEL(Part) part = {.low = task % runs * conv->run, .batch = task / runs};
    part.high = smaller(part.low + conv->run, conv->channels);
    part.sequences = conv->sequences ? conv->sequences : 1;
    return part;
}

TARGET static void LEVEL(forward_task)(const void *problem, int64_t task, char *scratch) {
    const Conv *const conv = problem;
    const LEVEL(Part) part = LEVEL(part_of)(conv, task);
    const int width = (int)conv->width;
    const int64_t before = (int64_t)(width - 1) * LANES;
    float *const panel = take(&scratch, PANEL), *const y = take(&scratch, PANEL);
    float *const room = take(&scratch, PANEL);
    float *const histories = take(&scratch, TOGETHER * MOST_WIDTH);
    float *const taps = take(&scratch, TOGETHER * (MOST_WIDTH + 1));
    int reached[STEPS];
    const int32_t *seq_idx = conv->seq_idx ? conv->seq_idx + part.batch * conv->time : NULL;
    for (int64_t d = part.low; d < part.high; d += LANES)
        LEVEL(fetch_taps)(conv->weight, conv->bias, conv->weight_type, width, d,
                          smaller(LANES, part.high - d), taps + (d - part.low) * (MOST_WIDTH + 1));
    for (int64_t s = 0; s < part.sequences; s++) {
        const int64_t row = conv->sequences ? s : part.batch;
        const int64_t begin = conv->offsets[s], end = conv->offsets[s + 1];
        for (int64_t d = part.low; d < part.high; d += LANES)
            LEVEL(fetch_history)(conv, row, d, smaller(LANES, part.high - d),
                                 histories + (d - part.low) * MOST_WIDTH, room);
        for (int64_t t = begin; t < end; t += STEPS) {
            const int64_t steps = smaller(STEPS, end - t);
            if (seq_idx) LEVEL(find_reach)(seq_idx, t, steps, width - 1, reached);
            for (int64_t d = part.low; d < part.high; d += LANES) {
                const int64_t lanes = smaller(LANES, part.high - d);
                const View x = LEVEL(view)(&conv->tensor[X], part.batch, d);
                const View out = LEVEL(view)(&conv->tensor[Y], part.batch, d);
                float *const history = histories + (d - part.low) * MOST_WIDTH;
                memcpy(panel, history, (size_t)before * 4);
                LEVEL(fetch)(&x, t, steps, lanes, panel + before, room);
                memcpy(history, panel + steps * LANES, (size_t)before * 4);
                LEVEL(convolve)(width, taps + (d - part.low) * (MOST_WIDTH + 1), panel, steps,
                                seq_idx ? reached : NULL, y);
                if (conv->silu) LEVEL(activate)(y, steps);
                for (int64_t i = 0; seq_idx && i < steps; i++)
                    if (seq_idx[t + i] < 0) memset(y + i * LANES, 0, VECTOR);
                LEVEL(put)(&out, t, steps, lanes, y, room);
            }
        }
        /* Of what came last, inputs of other runs count as zeros. */
        int age = width - 1;
        if (seq_idx && end > begin) LEVEL(find_reach)(seq_idx, end - 1, 1, width - 1, &age);
        for (int64_t d = part.low; conv->tensor[FINAL].at && d < part.high; d += LANES) {
            const View final = LEVEL(view)(&conv->tensor[FINAL], row, d);
            float *const history = histories + (d - part.low) * MOST_WIDTH;
            if (age < width - 2) memset(history, 0, (size_t)(width - 2 - age) * VECTOR);
            LEVEL(put)(&final, 0, width - 1, smaller(LANES, part.high - d), history, room);
        }
    }
}

/* The gradients of what enters the activation, in place of the output's. */
TARGET static void LEVEL(deactivate)(const float *y, float *grads, int64_t steps) {
    for (int64_t i = 0; i < steps * LANES; i += LANES) {
        const Floats x = LEVEL(load)(y + i), open = LEVEL(sigmoid_of)(x);
        LEVEL(store)(grads + i, LEVEL(load)(grads + i) * (open * (1 + x * (1 - open))));
    }
}

/* What a block has from one piece to the next, in backward. */
typedef struct {
    float taps[(MOST_WIDTH + 1) * LANES], history[STATE], grads[STATE];
    double sums[(MOST_WIDTH + 1) * LANES];
} LEVEL(BlockState);

/* One piece of a block: so many steps from t on, of which ``real`` are, and the others follow
 * the last. */
TARGET static void LEVEL(back_piece)(const Conv *conv, const LEVEL(Part) *part, int64_t s,
                                     int64_t d, int64_t t, int64_t steps, int64_t real,
                                     const int *reach,
                                     LEVEL(BlockState) *kept, float *panel, float *grads, float *y,
                                     float *room) {
    const int width = (int)conv->width;
    const int64_t lanes = smaller(LANES, part->high - d), before = (int64_t)(width - 1) * LANES;
    const int64_t begin = conv->offsets[s], length = conv->offsets[s + 1] - begin;
    const int64_t row = conv->sequences ? s : part->batch;
    const View x = LEVEL(view)(&conv->tensor[X], part->batch, d);
    const View y_grad = LEVEL(view)(&conv->tensor[Y_GRAD], part->batch, d);
    const View x_grad = LEVEL(view)(&conv->tensor[X_GRAD], part->batch, d);
    const View final_grad = LEVEL(view)(&conv->tensor[FINAL_GRAD], row, d);
    const View initial_grad = LEVEL(view)(&conv->tensor[INITIAL_GRAD], row, d);
    float sums[(MOST_WIDTH + 1) * LANES], *const current = grads + before;
    memcpy(panel, kept->history, (size_t)before * 4);
    memcpy(grads, kept->grads, (size_t)before * 4);
    if (real) {
        LEVEL(fetch)(&x, begin + t, real, lanes, panel + before, room);
        LEVEL(fetch)(&y_grad, begin + t, real, lanes, current, room);
    }
    memset(panel + before + real * LANES, 0, (size_t)(steps - real) * VECTOR);
    memset(current + real * LANES, 0, (size_t)(steps - real) * VECTOR);
    if (conv->silu && real) {
        LEVEL(convolve)(width, kept->taps, panel, real, reach ? reach + width - 1 : NULL, y);
        LEVEL(deactivate)(y, current, real);
    }
    if (conv->seq_idx)
        for (int64_t i = 0; i < real; i++)
            if (conv->seq_idx[part->batch * conv->time + t + i] < 0)
                memset(current + i * LANES, 0, VECTOR);
    memcpy(kept->history, panel + steps * LANES, (size_t)before * 4);
    memcpy(kept->grads, grads + steps * LANES, (size_t)before * 4);
    LEVEL(back)(width, kept->taps, panel, grads, steps, real, reach, y, sums);
    for (int i = 0; i < (width + 1) * LANES; i++) kept->sums[i] += (double)sums[i];
    /* Row i is that of step t + i - (width - 1), or, below 0, a slot of the initial state. */
    if (final_grad.at && t + steps > length) {
        float last[STATE];
        int age = width - 1;
        if (conv->seq_idx && length)
            LEVEL(find_reach)(conv->seq_idx + part->batch * conv->time, length - 1, 1, width - 1,
                              &age);
        LEVEL(fetch)(&final_grad, 0, width - 1, lanes, last, room);
        for (int64_t slot = larger(width - 2 - age, 0); slot < width - 1; slot++) {
            const int64_t i = length + slot - t;
            if (i < 0 || i >= steps) continue;
            const Floats sum = LEVEL(load)(y + i * LANES) + LEVEL(load)(last + slot * LANES);
            LEVEL(store)(y + i * LANES, sum);
        }
    }
    const int64_t early = smaller(larger(width - 1 - t, 0), steps);
    if (early && initial_grad.at) LEVEL(put)(&initial_grad, t, early, lanes, y, room);
    if (steps > early)
        LEVEL(put)(&x_grad, begin + t + early - (width - 1), steps - early, lanes,
                   y + early * LANES, room);
}

TARGET static void LEVEL(backward_task)(const void *problem, int64_t task, char *scratch) {
    const Conv *const conv = problem;
    const LEVEL(Part) part = LEVEL(part_of)(conv, task);
    const int width = (int)conv->width, late = width - 1;
    float *const panel = take(&scratch, PANEL), *const grads = take(&scratch, PANEL);
    float *const y = take(&scratch, PANEL), *const room = take(&scratch, PANEL);
    const int64_t floats = TOGETHER / LANES * (int64_t)sizeof(LEVEL(BlockState)) / 4;
    LEVEL(BlockState) *const blocks = (LEVEL(BlockState) *)take(&scratch, floats);
    const int32_t *seq_idx = conv->seq_idx ? conv->seq_idx + part.batch * conv->time : NULL;
    int reach[STEPS + MOST_WIDTH - 1];
    memset(blocks, 0, TOGETHER / LANES * sizeof *blocks);
    for (int64_t d = part.low; d < part.high; d += LANES)
        LEVEL(fetch_taps)(conv->weight, conv->bias, conv->weight_type, width, d,
                          smaller(LANES, part.high - d), blocks[(d - part.low) / LANES].taps);
    for (int64_t s = 0; s < part.sequences; s++) {
        const int64_t row = conv->sequences ? s : part.batch;
        const int64_t length = conv->offsets[s + 1] - conv->offsets[s];
        for (int64_t d = part.low; d < part.high; d += LANES) {
            LEVEL(BlockState) *const kept = &blocks[(d - part.low) / LANES];
            LEVEL(fetch_history)(conv, row, d, smaller(LANES, part.high - d), kept->history, room);
            memset(kept->grads, 0, sizeof kept->grads);
        }
        for (int i = 0; i < late; i++) reach[i] = 0;
        for (int64_t t = 0; t < length + late; t += STEPS) {
            const int64_t steps = smaller(STEPS, length + late - t);
            const int64_t real = smaller(larger(length - t, 0), steps);
            if (seq_idx) {
                LEVEL(find_reach)(seq_idx, t, real, late, reach + late);
                /* Padding has no output, so nothing that is not finite in it reaches the weight's gradient. */
                for (int64_t i = 0; i < real; i++)
                    if (seq_idx[t + i] < 0) reach[late + i] = -1;
                for (int64_t i = real; i < steps; i++) reach[late + i] = 0;
            }
            for (int64_t d = part.low; d < part.high; d += LANES)
                LEVEL(back_piece)(conv, &part, s, d, t, steps, real, seq_idx ? reach : NULL,
                                  &blocks[(d - part.low) / LANES], panel, grads, y, room);
            memmove(reach, reach + steps, (size_t)late * sizeof *reach);
        }
    }
    for (int64_t d = part.low; d < part.high; d++) {
        const double *sums = blocks[(d - part.low) / LANES].sums + (d - part.low) % LANES;
        const int64_t at = part.batch * conv->channels + d;
        for (int j = 0; j < width; j++)
            conv->weight_sums[at * width + width - 1 - j] = (float)sums[j * LANES];
        conv->bias_sums[at] = (float)sums[width * LANES];
    }
}

/* Of one row of the batch, a block's new state: the latest of what it holds and of x, at its
 * end, or round a ring whose next input goes to first. */
TARGET static void LEVEL(shift_state)(const Update *update, const View *x, const View *state,
                                      int64_t lanes, int64_t first) {
    const int64_t length = update->length, time = update->time, kept = smaller(time, length);
    const int bytes = types[x->type].bytes;
    for (int64_t lane = 0; lane < lanes; lane++) {
        char *const to = offset(state->at, lane, state->channel);
        const char *const from = offset(x->at, lane, x->channel);
        const char *const latest = offset(from, time - kept, x->time);
        int64_t begin = (first + time - kept) % length;
        if (!update->positions) {
            begin = length - kept;
            LEVEL(copy_elements)(to, state->time, offset(to, kept, state->time), state->time, begin,
                                 bytes);
        }
        const int64_t early = smaller(kept, length - begin);
        LEVEL(copy_elements)(offset(to, begin, state->time), state->time, latest, x->time, early,
                             bytes);
        LEVEL(copy_elements)(to, state->time, offset(latest, early, x->time), x->time, kept - early,
                             bytes);
    }
}

/* Some channels of all rows. Inputs before the first step are read, and y is written, before the
 * state changes. Where a state and the steps make no more than a panel, the panel has both. */
TARGET static void LEVEL(update_task)(const void *problem, int64_t task, char *scratch) {
    const Update *const update = problem;
    const int width = (int)update->width;
    const int64_t length = update->length, time = update->time, before = width - 1;
    const int whole = !update->positions && length <= MOST_WIDTH && time <= STEPS;
    float *const panel = take(&scratch, PANEL), *const y = take(&scratch, PANEL);
    float *const room = take(&scratch, PANEL);
    float taps[(MOST_WIDTH + 1) * LANES];
    const int64_t end = smaller((task + 1) * TOGETHER, update->channels);
    for (int64_t d = task * TOGETHER; d < end; d += LANES) {
        const int64_t lanes = smaller(LANES, end - d);
        LEVEL(fetch_taps)(update->weight, update->bias, update->weight_type, width, d, lanes, taps);
        for (int64_t row = 0; row < update->batch; row++) {
            const int64_t slot = update->indices ? update->indices[row] : row;
            const int there = slot >= 0 && slot < update->slots;
            const View x = LEVEL(view)(&update->x, row, d), out = LEVEL(view)(&update->y, row, d);
            const View state = LEVEL(view)(&update->state, there ? slot : 0, d);
            float *last = panel; /* the row of the first input that the first step sees */
            int64_t first = length;
            if (update->positions) first = (update->positions[row] % length + length) % length;
            if (there && whole) {
                LEVEL(fetch)(&state, 0, length, lanes, panel, room);
                last += (length - before) * LANES;
            } else if (there) {
                const int64_t from = (first + length - before) % length;
                const int64_t early = smaller(before, length - from);
                LEVEL(fetch)(&state, from, early, lanes, panel, room);
                LEVEL(fetch)(&state, 0, before - early, lanes, panel + early * LANES, room);
            }
            for (int64_t t = 0; t < time; t += STEPS) {
                const int64_t steps = smaller(STEPS, time - t);
                if (there) {
                    LEVEL(fetch)(&x, t, steps, lanes, last + before * LANES, room);
                    LEVEL(convolve)(width, taps, last, steps, NULL, y);
                    if (update->silu) LEVEL(activate)(y, steps);
                } else {
                    memset(y, 0, (size_t)steps * VECTOR);
                }
                LEVEL(put)(&out, t, steps, lanes, y, room);
                if (there && t + steps < time)
                    memmove(last, last + steps * LANES, (size_t)before * VECTOR);
            }
            if (there && whole)
                LEVEL(put)(&state, 0, length, lanes, panel + time * LANES, room);
            else if (there)
                LEVEL(shift_state)(update, &x, &state, lanes, first);
        }
    }
}

#undef PANEL
#undef STATE
#undef Floats
#undef Ints
#undef LANES
#undef View
