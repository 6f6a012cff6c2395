/* One task of each direction: a group of lanes through time, or tiles of a reduction. */
#include "panels.h"

/* The first sequence that begins at or after time t. */
static int64_t sequence_from(const Scan *scan, int64_t t) {
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

/* --- Forward and backward --------------------------------------------------------------------- */

static Group group_of(const Scan *scan, int64_t task) {
    const int64_t span = task % scan->spans, place = task / scan->spans;
    const int64_t batch = place / scan->groups, lane = place % scan->groups * scan->width;
    Group group = {
        .index = {batch / scan->size[BATCH], batch % scan->size[BATCH], lane},
        .lanes = smaller(scan->width, scan->size[CHANNEL] - lane),
        .first = sequence_from(scan, scan->size[TIME] * span / scan->spans),
        .last = sequence_from(scan, scan->size[TIME] * (span + 1) / scan->spans),
    };
    group.pitch = panel_pitch(scan, group.lanes);
    return group;
}

static void forward_task(const void *problem, int64_t task, char *scratch) {
    const Scan *const scan = problem;
    char *const x = scratch, *const panels = scratch + scan->row;
    const Recurrence *recurrence = &level->recurrence[scan->state];
    const Group group = group_of(scan, task);
    const View gates = view(scan, GATES, &group), tokens = view(scan, TOKENS, &group);
    const View states = view(scan, STATES, &group);
    const View initial = view(scan, INITIAL, &group), final = view(scan, FINAL, &group);
    const int64_t *offsets = scan->offsets, end = offsets[group.last];
    const int64_t most = scan->panel / group.pitch;
    for (int64_t begin = offsets[group.first], s = group.first; begin < end; begin += most) {
        const int64_t steps = smaller(most, end - begin);
        const Rows gate = shared_input(&gates, begin, steps, &group, panels);
        const Rows token = input(&tokens, begin, steps, &group, panels + scan->panel);
        const Rows out = output(&states, begin, &group, panels + scan->panel);
        for (int64_t t = 0, run; t < steps; t += run) {
            while (offsets[s + 1] <= begin + t) s++;
            run = smaller(offsets[s + 1] - begin, steps) - t;
            if (begin + t == offsets[s]) load_state(&initial, s, &group, x);
            recurrence->forward(x, group.pitch, run, skip(gate, t), skip(token, t), skip(out, t));
            if (begin + t + run == offsets[s + 1]) store_state(&final, s, &group, x);
        }
        finish(&states, begin, steps, &group, out);
    }
}

/* Time goes up as the adjoint walks: the state before that at t is at t + 1, or, at the last step
 * of what is a sequence here, the initial one. */
static void backward_task(const void *problem, int64_t task, char *scratch) {
    const Scan *const scan = problem;
    char *const adjoint = scratch, *const carried = adjoint + scan->row;
    char *const before = carried + scan->row, *const panels = before + scan->row;
    const Recurrence *recurrence = &level->recurrence[scan->state];
    const Type *one = &types[scan->state];
    const Group group = group_of(scan, task);
    const View gates = view(scan, GATES, &group), grads = view(scan, STATES_GRAD, &group);
    const View states = view(scan, STATES, &group), initial = view(scan, INITIAL, &group);
    const View final_grad = view(scan, FINAL_GRAD, &group);
    const View gates_grad = view(scan, GATES_GRAD, &group);
    const View tokens_grad = view(scan, TOKENS_GRAD, &group);
    const View initial_grad = view(scan, INITIAL_GRAD, &group);
    const int64_t *offsets = scan->offsets, end = offsets[group.last];
    const int64_t most = scan->panel / group.pitch;
    for (int64_t begin = offsets[group.first], s = group.first; begin < end; begin += most) {
        const int64_t steps = smaller(most, end - begin);
        const int64_t known = smaller(steps, scan->size[TIME] - begin - 1);
        const Rows gate = shared_input(&gates, begin, steps, &group, panels);
        const Rows grad = input(&grads, begin, steps, &group, panels + scan->panel);
        const Rows token = output(&tokens_grad, begin, &group, panels + scan->panel);
        Rows product = {0}, earlier = {0};
        if (gates_grad.at) {
            product = output(&gates_grad, begin, &group, panels + 2 * scan->panel);
            earlier = input(&states, begin + 1, known, &group, panels + 2 * scan->panel);
        }
        for (int64_t t = 0, run; t < steps; t += run) {
            while (offsets[s + 1] <= begin + t) s++;
            run = smaller(offsets[s + 1] - begin, steps) - t;
            const int ends = begin + t + run == offsets[s + 1];
            if (begin + t == offsets[s]) {
                load_state(&final_grad, s, &group, adjoint);
                memset(carried, 0, (size_t)group.pitch);
                copy(carried, one->bytes, one->one, 0, group.lanes, one->bytes);
            }
            recurrence->backward(adjoint, carried, group.pitch, run - ends, skip(gate, t),
                                 skip(grad, t), skip(earlier, t), skip(product, t), skip(token, t));
            if (!ends) continue;
            const int64_t last = t + run - 1;
            load_state(&initial, s, &group, before);
            recurrence->backward(adjoint, carried, group.pitch, 1, skip(gate, last),
                                 skip(grad, last), (Rows){before, 0}, skip(product, last),
                                 skip(token, last));
            if (!initial_grad.at) continue;
            memset(before, 0, (size_t)group.pitch);
            recurrence->products((Rows){before, 0}, group.pitch, 1, (Rows){adjoint, 0},
                                 (Rows){carried, 0});
            store_state(&initial_grad, s, &group, before);
        }
        finish(&tokens_grad, begin, steps, &group, token);
        finish(&gates_grad, begin, steps, &group, product);
    }
}

/* --- Reduction -------------------------------------------------------------------------------- */

/* The states before those of so many steps from t on, the initial ones among them. */
static Rows earlier_rows(const Scan *scan, const Group *group, int64_t t, int64_t steps,
                         char *panel) {
    const View states = view(scan, STATES, group), initial = view(scan, INITIAL, group);
    const int64_t back = scan->reverse ? 1 : -1, *offsets = scan->offsets;
    const Rows rows = {panel, group->pitch};
    int known = 0; /* whether the rows hold the states that there are */
    /* From the last sequence that begins at t or before. */
    for (int64_t s = sequence_from(scan, t + 1) - 1; s < scan->sequences; s++) {
        if (offsets[s] >= t + steps) break;
        const int64_t first = scan->reverse ? offsets[s + 1] - 1 : offsets[s];
        if (offsets[s] == offsets[s + 1] || first < t || first >= t + steps) continue;
        if (!known) {
            const int64_t low = larger(t + back, 0);
            const int64_t high = smaller(t + back + steps, scan->size[TIME]);
            load(&states, low, high - low, group->lanes, skip(rows, low - back - t));
            known = 1;
        }
        load_state(&initial, s, group, skip(rows, first - t).at);
    }
    return known ? rows : input(&states, t + back, steps, group, panel);
}

/* Where a partial sum goes: that of the tile (ic, it), if these dimensions are summed, or of the
 * channel and the time. */
static char *piece_at(const Scan *scan, const View *out, int64_t part, int64_t channel, int64_t t) {
    const int bytes = types[scan->state].bytes;
    int64_t piece = part;
    char *at = out->at;
    if (scan->summed[CHANNEL])
        piece = piece * scan->tiles[CHANNEL] + channel / scan->tile[CHANNEL];
    else
        at = offset(at, channel, out->lane);
    if (scan->summed[TIME])
        piece = piece * scan->tiles[TIME] + t / scan->tile[TIME];
    else
        at = offset(at, t, out->time);
    return offset(at, piece, scan->gates * bytes);
}

/* Sum so many steps from t on, of some lanes, over a part of the summed (outer, batch) pairs. Along
 * a summed time, there is one row of sums per tile, and of those one per pair first: sums of sums
 * round less. */
static void sum_pairs(const Scan *scan, Group *group, int64_t part, int64_t begin, int64_t steps,
                      char *sums, char *fresh, char *panels) {
    const Recurrence *recurrence = &level->recurrence[scan->state];
    const int64_t most = scan->panel / group->pitch, tile = scan->tile[TIME];
    const int64_t rows = scan->summed[TIME] ? ceil_div(steps, tile) : steps;
    const int64_t batches = scan->summed[BATCH] ? scan->size[BATCH] : 1;
    const int64_t pairs = scan->summed[OUTER] ? scan->size[OUTER] * batches : batches;
    memset(sums, 0, (size_t)(rows * group->pitch));
    for (int64_t r = pairs * part / scan->parts; r < pairs * (part + 1) / scan->parts; r++) {
        if (scan->summed[OUTER]) group->index[OUTER] = r / batches;
        if (scan->summed[BATCH]) group->index[BATCH] = r % batches;
        const View grads = view(scan, TOKENS_GRAD, group);
        if (scan->summed[TIME]) memset(fresh, 0, (size_t)(rows * group->pitch));
        for (int64_t done = 0; done < steps; done += most) {
            const int64_t now = smaller(most, steps - done);
            const Rows grad = input(&grads, begin + done, now, group, panels);
            const Rows earlier = earlier_rows(scan, group, begin + done, now, panels + scan->panel);
            if (!scan->summed[TIME]) {
                recurrence->products(skip((Rows){sums, group->pitch}, done), group->pitch, now,
                                     grad, earlier);
                continue;
            }
            for (int64_t t = 0, run; t < now; t += run) {
                const int64_t row = (done + t) / tile;
                run = smaller((row + 1) * tile - done, now) - t;
                recurrence->products((Rows){fresh + row * group->pitch, 0}, group->pitch, run,
                                     skip(grad, t), skip(earlier, t));
            }
        }
        if (scan->summed[TIME]) recurrence->add(sums, fresh, rows * group->pitch);
    }
}

/* Put rows of sums, which are not summed along channels, where they go. */
static void store_sums(const Scan *scan, const Group *group, const View *out, int64_t part,
                       int64_t begin, int64_t rows, char *sums) {
    const int bytes = types[scan->state].bytes;
    const int64_t channel = group->index[CHANNEL];
    if (!scan->summed[TIME]) {
        const View piece = {piece_at(scan, out, part, channel, 0), out->type, out->lane, out->time};
        store(&piece, begin, rows, group->lanes, (Rows){sums, group->pitch});
        return;
    }
    for (int64_t row = 0; row < rows; row++)
        copy(piece_at(scan, out, part, channel, begin + row * scan->tile[TIME]), out->lane,
             sums + row * group->pitch, bytes, group->lanes, bytes);
}

/* Add rows of sums to the cells of their tiles; so many, from channel low on, make a row. */
static void fold_lanes(const Scan *scan, const Group *group, const char *sums, int64_t rows,
                       int64_t low, int64_t per_row, char *cells) {
    const int bytes = types[scan->state].bytes;
    const int64_t tile = scan->tile[CHANNEL], first = group->index[CHANNEL] - low;
    for (int64_t lane = 0, count; lane < group->lanes; lane += count) {
        const int64_t cell = (first + lane) / tile;
        count = smaller((cell + 1) * tile - first, group->lanes) - lane;
        for (int64_t row = 0; row < rows; row++)
            level->recurrence[scan->state].fold(cells + (row * per_row + cell) * bytes,
                                                sums + row * group->pitch + lane * bytes, count);
    }
}

/* Some neighbouring tiles: a band of lanes after the other, and, where time is not summed, a panel
 * of steps after the other. */
static void reduction_task(const void *problem, int64_t task, char *scratch) {
    const Scan *const scan = problem;
    char *const sums = scratch, *const fresh = sums + scan->sums, *const cells = fresh + scan->sums;
    char *const panels = cells + scan->cells;
    const int64_t *size = scan->size, *span = scan->span, tile = scan->tile[CHANNEL];
    const int *summed = scan->summed, bytes = types[scan->state].bytes;
    const int64_t times = ceil_div(size[TIME], span[TIME]);
    const int64_t channels = ceil_div(size[CHANNEL], span[CHANNEL]);
    const int64_t begin = task % times * span[TIME], place = task / times;
    const int64_t low = place % channels * span[CHANNEL], block = place / channels;
    const int64_t end = smaller(begin + span[TIME], size[TIME]);
    const int64_t high = smaller(low + span[CHANNEL], size[CHANNEL]);
    const int64_t part = block % scan->parts, kept = block / scan->parts;
    const int64_t batches = summed[BATCH] ? 1 : size[BATCH], per_row = ceil_div(high - low, tile);
    const int64_t every = summed[TIME] ? scan->tile[TIME] : 1; /* steps of a row of sums */
    const int64_t most = summed[TIME] ? end - begin : scan->panel / scan->row;
    Group group = {.index = {kept / batches, kept % batches}};
    const View out = view(scan, GATES_GRAD, &group);
    for (int64_t t = begin; t < end; t += most) {
        const int64_t steps = smaller(most, end - t), rows = ceil_div(steps, every);
        memset(cells, 0, (size_t)(rows * per_row * bytes));
        for (int64_t lane = low; lane < high; lane += scan->width) {
            group.index[CHANNEL] = lane;
            group.lanes = smaller(scan->width, high - lane);
            group.pitch = panel_pitch(scan, group.lanes);
            sum_pairs(scan, &group, part, t, steps, sums, fresh, panels);
            if (summed[CHANNEL])
                fold_lanes(scan, &group, sums, rows, low, per_row, cells);
            else
                store_sums(scan, &group, &out, part, t, rows, sums);
        }
        for (int64_t i = 0; summed[CHANNEL] && i < rows * per_row; i++)
            memcpy(piece_at(scan, &out, part, low + i % per_row * tile, t + i / per_row * every),
                   cells + i * bytes, (size_t)bytes);
    }
}
