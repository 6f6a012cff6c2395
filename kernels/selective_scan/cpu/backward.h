/* Backward, at one level of vector instructions: forward.h comes before.
 *
 * A task takes a run of channels, TOGETHER at a time, through each sequence twice: up, to keep the
 * state before every piece of so many steps, and down, a piece at a time. In a piece, a few states
 * of a block of channels go up again, to keep what their gates and products are, and down:
 *
 *     a[t] = C[t] * y_grad[t] + gate[t + 1] * a[t + 1]       a: the gradient of h[t]
 *     kept[t] = gate[t] * h[t - 1]                           in h[t] = kept[t] + size * B * u
 *
 * Sums over time are in double precision from piece to piece; those over channels are in an order
 * that the problem's shape alone decides.
 */

/* The panels of a block and a piece. */
typedef struct {
    float *u, *sizes, *slopes, *inputs, *y, *y_grad, *z_slopes, *through_B, *through_A;
} LEVEL(Panels);
#define Panels LEVEL(Panels)

/* Double sums of a block's channels, (LANES,) or (N, LANES). */
TARGET static void LEVEL(add_doubles)(double *sums, const float *more) {
    for (int i = 0; i < LANES; i++) sums[i] += (double)more[i];
}

INLINE void LEVEL(back_through)(int count, const float *rates, const float *entering,
                                float *adjoint, double *A_sums, int64_t steps, const Panels *p,
                                Projection b, Projection c, float *b_sums, float *c_sums,
                                int64_t of_sums, float *gates, float *kept) {
    Floats rate[2], h[2], a[2], sum[2];
    for (int j = 0; j < count; j++) {
        rate[j] = LEVEL(load)(rates + j * LANES), h[j] = LEVEL(load)(entering + j * LANES);
        a[j] = LEVEL(load)(adjoint + j * LANES), sum[j] = LEVEL(all)(0);
    }
    for (int64_t t = 0; t < steps; t++) {
        const int64_t at = t * LANES;
        const Floats size = LEVEL(load)(p->sizes + at), in = LEVEL(load)(p->inputs + at);
        const Floats grad = LEVEL(load)(p->y_grad + at);
        Floats y = LEVEL(load)(p->y + at);
        for (int j = 0; j < count; j++) {
            const Floats gate = LEVEL(exp2_of)(size * rate[j]), product = gate * h[j];
            float *const c_sum = c_sums + j * of_sums + at;
            h[j] = product + in * b.at[t * b.of_step + j * b.of_state];
            y += h[j] * c.at[t * c.of_step + j * c.of_state];
            LEVEL(store)(c_sum, LEVEL(load)(c_sum) + grad * h[j]);
            LEVEL(store)(gates + (t * count + j) * LANES, gate);
            LEVEL(store)(kept + (t * count + j) * LANES, product);
        }
        LEVEL(store)(p->y + at, y);
    }
    for (int64_t t = steps - 1; t >= 0; t--) {
        const int64_t at = t * LANES;
        const Floats size = LEVEL(load)(p->sizes + at), in = LEVEL(load)(p->inputs + at);
        const Floats grad = LEVEL(load)(p->y_grad + at);
        Floats through_B = LEVEL(load)(p->through_B + at);
        Floats through_A = LEVEL(load)(p->through_A + at);
        for (int j = 0; j < count; j++) {
            float *const b_sum = b_sums + j * of_sums + at;
            a[j] += grad * c.at[t * c.of_step + j * c.of_state];
            const Floats of_rate = a[j] * LEVEL(load)(kept + (t * count + j) * LANES);
            LEVEL(store)(b_sum, LEVEL(load)(b_sum) + a[j] * in);
            through_B += a[j] * b.at[t * b.of_step + j * b.of_state];
            through_A += of_rate * rate[j];
            sum[j] += of_rate * size;
            a[j] *= LEVEL(load)(gates + (t * count + j) * LANES);
        }
        LEVEL(store)(p->through_B + at, through_B);
        LEVEL(store)(p->through_A + at, through_A);
    }
    for (int j = 0; j < count; j++) {
        float row[LANES];
        LEVEL(store)(row, sum[j]);
        LEVEL(add_doubles)(A_sums + j * LANES, row);
        LEVEL(store)(adjoint + j * LANES, a[j]);
    }
}

/* All states of a block through a piece. */
TARGET static void LEVEL(back_block)(const Scan *scan, const float *rates, const float *entering,
                                     float *adjoint, double *A_sums, int64_t steps,
                                     const Panels *p, Projection b, Projection c, float *b_sums,
                                     float *c_sums, float *gates, float *kept) {
    const int64_t of_sums = steps * LANES;
    int64_t n = 0;
    for (; n + 2 <= scan->states; n += 2)
        LEVEL(back_through)(2, rates + n * LANES, entering + n * LANES, adjoint + n * LANES,
                            A_sums + n * LANES, steps, p, LEVEL(from_state)(b, n),
                            LEVEL(from_state)(c, n), b_sums + n * of_sums, c_sums + n * of_sums,
                            of_sums, gates, kept);
    for (; n < scan->states; n++)
        LEVEL(back_through)(1, rates + n * LANES, entering + n * LANES, adjoint + n * LANES,
                            A_sums + n * LANES, steps, p, LEVEL(from_state)(b, n),
                            LEVEL(from_state)(c, n), b_sums + n * of_sums, c_sums + n * of_sums,
                            of_sums, gates, kept);
}

/* What a block reads of a piece. */
TARGET static void LEVEL(fetch_piece)(const Scan *scan, int64_t batch, int64_t d, int64_t lanes,
                                      int64_t t, int64_t steps, const Panels *p, float *room) {
    const View u = LEVEL(view)(scan, U, batch, d), delta = LEVEL(view)(scan, DELTA, batch, d);
    const View grad = LEVEL(view)(scan, OUT_GRAD, batch, d), z = LEVEL(view)(scan, Z, batch, d);
    const Floats straight = LEVEL(per_channel)(scan->D, d, lanes), zero = {0};
    LEVEL(fetch)(&delta, t, steps, lanes, p->sizes, room);
    LEVEL(fetch)(&u, t, steps, lanes, p->u, room);
    LEVEL(fetch)(&grad, t, steps, lanes, p->y_grad, room);
    LEVEL(step_sizes)(scan, LEVEL(per_channel)(scan->bias, d, lanes), steps, p->sizes, p->slopes);
    if (z.at) LEVEL(fetch)(&z, t, steps, lanes, p->z_slopes, room);
    for (int64_t i = 0; i < steps * LANES; i += LANES) {
        const Floats x = LEVEL(load)(p->u + i), out_grad = LEVEL(load)(p->y_grad + i);
        LEVEL(store)(p->inputs + i, x * LEVEL(load)(p->sizes + i));
        LEVEL(store)(p->y + i, scan->D ? straight * x : zero);
        LEVEL(store)(p->through_B + i, zero);
        LEVEL(store)(p->through_A + i, zero);
        if (!z.at) continue;
        const Floats gate = LEVEL(load)(p->z_slopes + i), open = LEVEL(sigmoid_of)(gate);
        LEVEL(store)(p->z_slopes + i, out_grad * (open * (1 + gate * (1 - open))));
        LEVEL(store)(p->y_grad + i, out_grad * (gate * open));
    }
}

/* What a block leaves of a piece; sums[0] of D's gradient, sums[1] of the bias's, (2, LANES). */
TARGET static void LEVEL(put_piece)(const Scan *scan, int64_t batch, int64_t d, int64_t lanes,
                                    int64_t t, int64_t steps, const Panels *p, double *sums,
                                    float *room) {
    const View u_grad = LEVEL(view)(scan, U_GRAD, batch, d);
    const View delta_grad = LEVEL(view)(scan, DELTA_GRAD, batch, d);
    const View z_grad = LEVEL(view)(scan, Z_GRAD, batch, d);
    const Floats straight = LEVEL(per_channel)(scan->D, d, lanes);
    Floats of_D = {0}, of_bias = {0};
    for (int64_t i = 0; i < steps * LANES; i += LANES) {
        const Floats grad = LEVEL(load)(p->y_grad + i), x = LEVEL(load)(p->u + i);
        const Floats through_B = LEVEL(load)(p->through_B + i);
        const Floats through_A = LEVEL(load)(p->through_A + i) * 0.6931471806f;
        Floats of_u = LEVEL(load)(p->sizes + i) * through_B;
        if (scan->D) of_u += grad * straight;
        const Floats of_delta = (x * through_B + through_A) * LEVEL(load)(p->slopes + i);
        of_D += grad * x;
        of_bias += of_delta;
        LEVEL(store)(p->u + i, of_u);
        LEVEL(store)(p->sizes + i, of_delta);
        LEVEL(store)(p->y + i, LEVEL(load)(p->y + i) * LEVEL(load)(p->z_slopes + i));
    }
    float row[LANES];
    LEVEL(store)(row, of_D);
    LEVEL(add_doubles)(sums, row);
    LEVEL(store)(row, of_bias);
    LEVEL(add_doubles)(sums + LANES, row);
    LEVEL(put)(&u_grad, t, steps, lanes, p->u, room);
    LEVEL(put)(&delta_grad, t, steps, lanes, p->sizes, room);
    if (z_grad.at) LEVEL(put)(&z_grad, t, steps, lanes, p->y, room);
}

/* Sum the lanes of a piece of B's or C's gradient, (N, steps, LANES), and write or add them. */
TARGET static void LEVEL(put_sums)(const Scan *scan, float *to, int64_t t, int64_t steps, int first,
                                   const float *sums, float *room) {
    for (int64_t n = 0; n < scan->states; n++) {
        float *const row = to + n * scan->time + t;
        const char *const from = (const char *)(sums + n * steps * LANES);
        LEVEL(transpose_4)((char *)room, (ptrdiff_t)steps * 4, from, VECTOR, steps, LANES);
        for (int64_t i = 0; i < steps; i++) {
            float pairs[LANES];
            for (int lane = 0; lane < LANES; lane++) pairs[lane] = room[lane * steps + i];
            for (int half = LANES / 2; half > 0; half /= 2)
                for (int lane = 0; lane < half; lane++) pairs[lane] += pairs[lane + half];
            row[i] = first ? pairs[0] : row[i] + pairs[0];
        }
    }
}

/* Of a task's channels from ``low`` to ``high``, the states, (N, LANES) each block. */
typedef struct {
    float *rates, *states, *adjoints, *kept, *b_room, *c_room, *b_sums, *c_sums, *gates, *products;
    float *room;
    double *A_sums, *other_sums;
    Panels panels;
    int64_t low, high;
} LEVEL(Together);
#define Together LEVEL(Together)

/* Up a sequence, to keep the states before every piece. */
TARGET static void LEVEL(up)(const Scan *scan, const Run *run, Together *w, int64_t s) {
    const int64_t N = scan->states, size = (w->high - w->low + LANES - 1) / LANES * LANES * N;
    const int64_t begin = scan->offsets[s], end = scan->offsets[s + 1];
    const float *entering = NULL;
    if (scan->initial) entering = scan->initial + LEVEL(state_at)(scan, run->batch, s, 0);
    for (int64_t d = w->low; d < w->high; d += LANES)
        LEVEL(fetch_state)(scan, entering ? entering + d * N : NULL, smaller(LANES, w->high - d),
                           w->states + (d - w->low) * N);
    float *kept = w->kept;
    for (int64_t t = begin; t < end; t += scan->steps, kept += size) {
        memcpy(kept, w->states, (size_t)size * 4);
        if (t + scan->steps >= end) return;
        const Projection b = LEVEL(projection)(scan, B, run, t, scan->steps, w->b_room);
        for (int64_t d = w->low; d < w->high; d += LANES) {
            const int64_t lanes = smaller(LANES, w->high - d);
            const View u = LEVEL(view)(scan, U, run->batch, d);
            const View delta = LEVEL(view)(scan, DELTA, run->batch, d);
            float *const sizes = w->panels.sizes, *const inputs = w->panels.inputs;
            LEVEL(fetch)(&delta, t, scan->steps, lanes, sizes, w->room);
            LEVEL(fetch)(&u, t, scan->steps, lanes, inputs, w->room);
            LEVEL(step_sizes)(scan, LEVEL(per_channel)(scan->bias, d, lanes), scan->steps, sizes,
                              NULL);
            for (int64_t i = 0; i < scan->steps * LANES; i += LANES)
                LEVEL(store)(inputs + i, LEVEL(load)(inputs + i) * LEVEL(load)(sizes + i));
            LEVEL(advance_block)(scan, w->rates + (d - w->low) * N, w->states + (d - w->low) * N,
                                 scan->steps, sizes, inputs, b);
        }
    }
}

/* Down a sequence. */
TARGET static void LEVEL(down)(const Scan *scan, const Run *run, Together *w, int64_t s,
                               int first) {
    const int64_t N = scan->states, size = (w->high - w->low + LANES - 1) / LANES * LANES * N;
    const int64_t begin = scan->offsets[s], end = scan->offsets[s + 1];
    const int64_t state_at = LEVEL(state_at)(scan, run->batch, s, 0);
    const int64_t of_run = (run->batch * scan->groups + run->group) * scan->runs + run->place;
    for (int64_t d = w->low; d < w->high; d += LANES)
        LEVEL(fetch_state)(scan, scan->final_grad ? scan->final_grad + state_at + d * N : NULL,
                           smaller(LANES, w->high - d), w->adjoints + (d - w->low) * N);
    for (int64_t piece = ceil_div(end - begin, scan->steps) - 1; piece >= 0; piece--) {
        const int64_t t = begin + piece * scan->steps, steps = smaller(scan->steps, end - t);
        const Projection b = LEVEL(projection)(scan, B, run, t, steps, w->b_room);
        const Projection c = LEVEL(projection)(scan, C, run, t, steps, w->c_room);
        memset(w->b_sums, 0, (size_t)(N * steps) * VECTOR);
        memset(w->c_sums, 0, (size_t)(N * steps) * VECTOR);
        /* The last block first: what its other lanes have added is no channel's, and may be NaN. */
        for (int64_t at = size - N * LANES; at >= 0; at -= N * LANES) {
            const int64_t d = w->low + at / N, lanes = smaller(LANES, w->high - d);
            LEVEL(fetch_piece)(scan, run->batch, d, lanes, t, steps, &w->panels, w->room);
            LEVEL(back_block)(scan, w->rates + at, w->kept + piece * size + at, w->adjoints + at,
                              w->A_sums + at, steps, &w->panels, b, c, w->b_sums, w->c_sums,
                              w->gates, w->products);
            LEVEL(put_piece)(scan, run->batch, d, lanes, t, steps, &w->panels,
                             w->other_sums + 2 * (d - w->low), w->room);
            for (int64_t i = 0; lanes < LANES && i < N * steps * LANES; i += LANES)
                for (int64_t lane = lanes; lane < LANES; lane++)
                    w->b_sums[i + lane] = w->c_sums[i + lane] = 0;
        }
        const int64_t of_sums = of_run * N * scan->time;
        LEVEL(put_sums)(scan, scan->B_sums + of_sums, t, steps, first, w->b_sums, w->room);
        LEVEL(put_sums)(scan, scan->C_sums + of_sums, t, steps, first, w->c_sums, w->room);
    }
    for (int64_t d = w->low; d < w->high; d += LANES)
        LEVEL(put_state)(scan, scan->initial_grad ? scan->initial_grad + state_at + d * N : NULL,
                         smaller(LANES, w->high - d), w->adjoints + (d - w->low) * N);
}

TARGET static void LEVEL(backward_task)(const void *problem, int64_t task, char *scratch) {
    const Scan *const scan = problem;
    const Run run = run_of(scan, task);
    const int64_t N = scan->states, panel = scan->steps * LANES, together = TOGETHER * N;
    Together w = {
        .rates = take(&scratch, together),
        .states = take(&scratch, together),
        .adjoints = take(&scratch, together),
        .kept = take(&scratch, scan->pieces * together),
        .b_room = take(&scratch, N * scan->steps),
        .c_room = take(&scratch, N * scan->steps),
        .b_sums = take(&scratch, N * panel),
        .c_sums = take(&scratch, N * panel),
        .gates = take(&scratch, 2 * panel),
        .products = take(&scratch, 2 * panel),
        .room = take(&scratch, panel),
        .A_sums = (double *)take(&scratch, 2 * together),
        .other_sums = (double *)take(&scratch, 4 * TOGETHER),
        .panels = {take(&scratch, panel), take(&scratch, panel), take(&scratch, panel),
                   take(&scratch, panel), take(&scratch, panel), take(&scratch, panel),
                   take(&scratch, panel), take(&scratch, panel), take(&scratch, panel)},
    };
    for (w.low = run.first; w.low < run.last; w.low = w.high) {
        w.high = smaller(w.low + TOGETHER, run.last);
        memset(w.A_sums, 0, (size_t)together * 8);
        memset(w.other_sums, 0, 2 * TOGETHER * 8);
        for (int64_t d = w.low; d < w.high; d += LANES)
            LEVEL(fetch_rates)(scan, d, smaller(LANES, w.high - d), w.rates + (d - w.low) * N);
        for (int64_t s = 0; s < scan->sequences; s++) {
            LEVEL(up)(scan, &run, &w, s);
            LEVEL(down)(scan, &run, &w, s, w.low == run.first);
        }
        for (int64_t d = w.low; d < w.high; d++) {
            const int64_t i = d - w.low, lane = i % LANES, block = i - lane;
            const int64_t of_channel = run.batch * scan->channels + d;
            for (int64_t n = 0; n < N; n++)
                scan->A_sums[of_channel * N + n] =
                    (float)w.A_sums[block * N + n * LANES + lane];
            scan->D_sums[of_channel] = (float)w.other_sums[2 * block + lane];
            scan->bias_sums[of_channel] = (float)w.other_sums[2 * block + LANES + lane];
        }
    }
}
