/* Forward, and what backward has of it, at one level of vector instructions. */
#include "cpu_convert.h"
#include "cpu_math.h"
#include "cpu_blocks.h"

/* B or C of some steps: that of a state and a step is at[state * of_state + step * of_step]. */
typedef struct {
    const float *at;
    int64_t of_state, of_step;
} LEVEL(Projection);
#define Projection LEVEL(Projection)

TARGET static View LEVEL(view)(const Scan *scan, int which, int64_t batch, int64_t channel) {
    const Tensor *tensor = &scan->tensor[which];
    return LEVEL(view_of)(tensor->at, tensor->type, tensor->stride, batch, channel);
}

/* In memory itself if it is float32 and steps lie side by side, else widened into the room. */
TARGET static Projection LEVEL(projection)(const Scan *scan, int which, const Run *run, int64_t t,
                                           int64_t steps, float *room) {
    const Tensor *tensor = &scan->tensor[which];
    const int type = tensor->type, bytes = types[type].bytes;
    const int64_t group = run->group * tensor->groups / scan->groups, states = scan->states;
    const int64_t of_state = tensor->stride[2], of_step = tensor->stride[3];
    const char *from = offset(tensor->at, run->batch, tensor->stride[0]);
    from = offset(offset(from, group, tensor->stride[1]), t, of_step);
    if (of_step == bytes && type == FLOAT32 && of_state % 4 == 0)
        return (Projection){(const float *)from, of_state / 4, 1};
    if (of_step == bytes) {
        for (int64_t n = 0; n < states; n++)
            LEVEL(widen)(type, room + n * steps, offset(from, n, of_state), steps);
        return (Projection){room, steps, 1};
    }
    for (int64_t i = 0; i < steps; i++) {
        char row[4 * MOST_STATES];
        LEVEL(copy_elements)(row, bytes, offset(from, i, of_step), of_state, states, bytes);
        LEVEL(widen)(type, room + i * states, row, states);
    }
    return (Projection){room, 1, states};
}

/* Rates A·log2(e) of a block of channels, (N, LANES). */
TARGET static void LEVEL(fetch_rates)(const Scan *scan, int64_t channel, int64_t lanes,
                                      float *rates) {
    for (int64_t n = 0; n < scan->states; n++)
        for (int64_t i = 0; i < LANES; i++)
            rates[n * LANES + i] =
                i < lanes ? scan->A[(channel + i) * scan->states + n] * 1.442695041f : 0;
}

/* Where the states of a block's first channel are, in a tensor (B, S, D, N) like the initial
 * one. */
static int64_t LEVEL(state_at)(const Scan *scan, int64_t batch, int64_t sequence, int64_t channel) {
    return ((batch * scan->sequences + sequence) * scan->channels + channel) * scan->states;
}

TARGET static void LEVEL(fetch_state)(const Scan *scan, const float *from, int64_t lanes,
                                      float *state) {
    memset(state, 0, (size_t)scan->states * VECTOR);
    for (int64_t i = 0; from && i < lanes; i++)
        for (int64_t n = 0; n < scan->states; n++)
            state[n * LANES + i] = from[i * scan->states + n];
}

TARGET static void LEVEL(put_state)(const Scan *scan, float *to, int64_t lanes,
                                    const float *state) {
    for (int64_t i = 0; to && i < lanes; i++)
        for (int64_t n = 0; n < scan->states; n++)
            to[i * scan->states + n] = state[n * LANES + i];
}

INLINE Floats LEVEL(per_channel)(const float *values, int64_t channel, int64_t lanes) {
    float row[LANES] = {0};
    for (int64_t i = 0; values && i < lanes; i++) row[i] = values[channel + i];
    return LEVEL(load)(row);
}

/* Step sizes, in place of what they are made of; their slopes; and, in place of u, size · u. */
INLINE void LEVEL(step_sizes)(const Scan *scan, Floats bias, int64_t steps, float *sizes,
                              float *slopes) {
    for (int64_t i = 0; i < steps * LANES; i += LANES) {
        Floats size = LEVEL(load)(sizes + i) + bias, slope = LEVEL(all)(1);
        if (scan->softplus) size = LEVEL(softplus_of)(size, &slope);
        LEVEL(store)(sizes + i, size);
        if (slopes) LEVEL(store)(slopes + i, slope);
    }
}

/* ``count`` states of a block through some steps; what they give is added to y, if that is
 * there. */
INLINE void LEVEL(through)(int count, const float *rates, float *state, int64_t steps,
                           const float *sizes, const float *inputs, Projection b, Projection c,
                           float *y) {
    Floats rate[4], h[4];
    for (int j = 0; j < count; j++)
        rate[j] = LEVEL(load)(rates + j * LANES), h[j] = LEVEL(load)(state + j * LANES);
    for (int64_t t = 0; t < steps; t++) {
        const Floats size = LEVEL(load)(sizes + t * LANES), in = LEVEL(load)(inputs + t * LANES);
        Floats sum = {0};
        if (y) sum = LEVEL(load)(y + t * LANES);
        for (int j = 0; j < count; j++) {
            const float into = b.at[t * b.of_step + j * b.of_state];
            h[j] = LEVEL(exp2_of)(size * rate[j]) * h[j] + in * into;
            if (y) sum += h[j] * c.at[t * c.of_step + j * c.of_state];
        }
        if (y) LEVEL(store)(y + t * LANES, sum);
    }
    for (int j = 0; j < count; j++) LEVEL(store)(state + j * LANES, h[j]);
}

INLINE Projection LEVEL(from_state)(Projection all, int64_t n) {
    all.at += n * all.of_state;
    return all;
}

/* All states of a block through some steps. */
TARGET static void LEVEL(scan_block)(const Scan *scan, const float *rates, float *state,
                                     int64_t steps, const float *sizes, const float *inputs,
                                     Projection b, Projection c, float *y) {
    int64_t n = 0;
    for (; n + 4 <= scan->states; n += 4)
        LEVEL(through)(4, rates + n * LANES, state + n * LANES, steps, sizes, inputs,
                       LEVEL(from_state)(b, n), LEVEL(from_state)(c, n), y);
    for (; n < scan->states; n++)
        LEVEL(through)(1, rates + n * LANES, state + n * LANES, steps, sizes, inputs,
                       LEVEL(from_state)(b, n), LEVEL(from_state)(c, n), y);
}

/* The same where only the states are wanted. */
TARGET static void LEVEL(advance_block)(const Scan *scan, const float *rates, float *state,
                                        int64_t steps, const float *sizes, const float *inputs,
                                        Projection b) {
    int64_t n = 0;
    for (; n + 4 <= scan->states; n += 4)
        LEVEL(through)(4, rates + n * LANES, state + n * LANES, steps, sizes, inputs,
                       LEVEL(from_state)(b, n), b, NULL);
    for (; n < scan->states; n++)
        LEVEL(through)(1, rates + n * LANES, state + n * LANES, steps, sizes, inputs,
                       LEVEL(from_state)(b, n), b, NULL);
}

/* A run of channels, TOGETHER at a time, through all sequences. */
TARGET static void LEVEL(forward_task)(const void *problem, int64_t task, char *scratch) {
    const Scan *const scan = problem;
    const Run run = run_of(scan, task);
    const int64_t N = scan->states, of_block = N * LANES, panel = scan->steps * LANES;
    float *const b_room = take(&scratch, N * scan->steps);
    float *const c_room = take(&scratch, N * scan->steps);
    float *const rates = take(&scratch, TOGETHER * N), *const states = take(&scratch, TOGETHER * N);
    float *const sizes = take(&scratch, panel), *const inputs = take(&scratch, panel);
    float *const y = take(&scratch, panel), *const room = take(&scratch, panel);
    for (int64_t low = run.first; low < run.last; low += TOGETHER) {
        const int64_t high = smaller(low + TOGETHER, run.last);
        for (int64_t d = low; d < high; d += LANES)
            LEVEL(fetch_rates)(scan, d, smaller(LANES, high - d), rates + (d - low) * N);
        for (int64_t s = 0; s < scan->sequences; s++) {
            const int64_t entering = LEVEL(state_at)(scan, run.batch, s, 0);
            for (int64_t d = low; d < high; d += LANES)
                LEVEL(fetch_state)(scan, scan->initial ? scan->initial + entering + d * N : NULL,
                                   smaller(LANES, high - d), states + (d - low) * N);
            for (int64_t t = scan->offsets[s]; t < scan->offsets[s + 1]; t += scan->steps) {
                const int64_t steps = smaller(scan->steps, scan->offsets[s + 1] - t);
                const Projection b = LEVEL(projection)(scan, B, &run, t, steps, b_room);
                const Projection c = LEVEL(projection)(scan, C, &run, t, steps, c_room);
                for (int64_t d = low, place = 0; d < high; d += LANES, place += of_block) {
                    const int64_t lanes = smaller(LANES, high - d);
                    const View u = LEVEL(view)(scan, U, run.batch, d);
                    const View delta = LEVEL(view)(scan, DELTA, run.batch, d);
                    const View z = LEVEL(view)(scan, Z, run.batch, d);
                    const View out = LEVEL(view)(scan, OUT, run.batch, d);
                    const Floats straight = LEVEL(per_channel)(scan->D, d, lanes);
                    LEVEL(fetch)(&delta, t, steps, lanes, sizes, room);
                    LEVEL(fetch)(&u, t, steps, lanes, inputs, room);
                    LEVEL(step_sizes)(scan, LEVEL(per_channel)(scan->bias, d, lanes), steps, sizes,
                                      NULL);
                    for (int64_t i = 0; i < steps * LANES; i += LANES) {
                        const Floats x = LEVEL(load)(inputs + i);
                        LEVEL(store)(y + i, scan->D ? straight * x : LEVEL(all)(0));
                        LEVEL(store)(inputs + i, x * LEVEL(load)(sizes + i));
                    }
                    LEVEL(scan_block)(scan, rates + place, states + place, steps, sizes, inputs, b,
                                      c, y);
                    if (z.at) {
                        LEVEL(fetch)(&z, t, steps, lanes, sizes, room);
                        for (int64_t i = 0; i < steps * LANES; i += LANES) {
                            const Floats gate = LEVEL(load)(sizes + i);
                            const Floats open = gate / (1 + LEVEL(exp_of)(-gate));
                            LEVEL(store)(y + i, LEVEL(load)(y + i) * open);
                        }
                    }
                    LEVEL(put)(&out, t, steps, lanes, y, room);
                }
            }
            for (int64_t d = low; d < high; d += LANES)
                LEVEL(put_state)(scan, scan->final ? scan->final + entering + d * N : NULL,
                                 smaller(LANES, high - d), states + (d - low) * N);
        }
    }
}
