/* A scan as numbers, and the way between memory and the panels that it is computed in. */
#include "kernels.h"

enum { OUTER, BATCH, CHANNEL, TIME, DIMENSIONS };

/* From INITIAL on: states before and after the scan, whose "time" counts sequences. */
enum {
    GATES,
    TOKENS,
    STATES,
    STATES_GRAD,
    GATES_GRAD,
    TOKENS_GRAD,
    INITIAL,
    FINAL,
    INITIAL_GRAD,
    FINAL_GRAD,
    TENSORS
};

/* The most bytes of a panel and of one of its rows. */
enum { PANEL_BYTES = 65536, ROW_BYTES = 16384 };

typedef struct {
    char *at; /* null: not given, or not wanted */
    int type;
    int64_t stride[DIMENSIONS]; /* in bytes */
} Tensor;

typedef struct {
    Tensor tensor[TENSORS];
    int64_t size[DIMENSIONS], elements;
    int64_t sequences, *offsets; /* sequence s covers the times [offsets[s], offsets[s + 1]) */
    int state, reverse;
    /* How it is cut. Lanes of a group, groups per (outer, batch), runs of sequences walked apart;
     * bytes of a row and of a panel. */
    int64_t width, groups, spans, row, panel;
    /* A reduction: which dimensions are summed, elements of all gates, parts that the summed
     * (outer, batch) pairs are divided into; along channels and time, the size of a tile, the
     * number of tiles, and how much of it a task covers; bytes of a task's sums, and of what they
     * are folded to. */
    int summed[DIMENSIONS];
    int64_t gates, parts, tile[DIMENSIONS], tiles[DIMENSIONS], span[DIMENSIONS], sums, cells;
} Scan;

/* Lanes from index[CHANNEL] on, and the sequences [first, last). */
typedef struct {
    int64_t index[TIME], lanes, first, last;
    ptrdiff_t pitch; /* of a panel: whole blocks */
} Group;

/* Those lanes of a tensor. */
typedef struct {
    char *at;
    int type;
    int64_t lane, time; /* strides */
} View;

/* The level in use. */
#define level levels[level_in_use]

static inline Rows skip(Rows rows, int64_t steps) {
    return (Rows){offset(rows.at, steps, rows.pitch), rows.pitch};
}

static View view(const Scan *scan, int which, const Group *group) {
    const Tensor *tensor = &scan->tensor[which];
    View view = {tensor->at, tensor->type, tensor->stride[CHANNEL], tensor->stride[TIME]};
    if (view.at)
        for (int d = 0; d < TIME; d++)
            view.at = offset(view.at, group->index[d], tensor->stride[d]);
    return view;
}

static ptrdiff_t panel_pitch(const Scan *scan, int64_t lanes) {
    const ptrdiff_t block = level->recurrence[scan->state].block;
    return (ptrdiff_t)ceil_div(lanes * types[scan->state].bytes, block) * block;
}

/* Whether rows of memory are rows of a panel. */
static int is_panel(const View *view, const Group *group) {
    const int bytes = types[view->type].bytes;
    return types[view->type].state == view->type && view->lane == bytes &&
           group->lanes * bytes == group->pitch;
}

#define COPY(bytes)                                                                            \
    case bytes:                                                                                \
        for (; n > 0; n--, to = offset(to, 1, to_stride), from = offset(from, 1, from_stride)) \
            memcpy(to, from, bytes);                                                           \
        break

static void copy(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t n,
                 int bytes) {
    if (to_stride == bytes && from_stride == bytes) {
        memcpy(to, from, (size_t)(n * bytes));
        return;
    }
    switch (bytes) {
        COPY(2);
        COPY(4);
        COPY(8);
        COPY(16);
    }
}

#undef COPY

/* --- Where time has unit stride --------------------------------------------------------------- */

/* Rows that are transposed together, and how many steps of them are widened or narrowed at once. */
enum { SIDE_BY_SIDE = 8, AT_ONCE = 128 };

static void load_transposed(const View *view, const char *from, int64_t steps, int64_t lanes,
                            Rows panel) {
    const int type = view->type, bytes = types[type].bytes, wide = types[types[type].state].bytes;
    const int64_t most = level->widen[type] ? AT_ONCE : steps;
    float rows[SIDE_BY_SIDE][AT_ONCE];
    for (int64_t lane = 0; lane < lanes; lane += SIDE_BY_SIDE) {
        const int64_t count = smaller(SIDE_BY_SIDE, lanes - lane);
        for (int64_t t = 0; t < steps; t += most) {
            const int64_t now = smaller(most, steps - t);
            const char *at = offset(from, lane, view->lane) + t * bytes;
            char *to = skip(panel, t).at + lane * wide;
            if (level->widen[type]) {
                for (int64_t i = 0; i < count; i++)
                    level->widen[type](rows[i], offset(at, i, view->lane), now);
                level->transpose[wide](to, panel.pitch, (char *)rows, sizeof rows[0], count, now);
            } else {
                level->transpose[wide](to, panel.pitch, at, view->lane, count, now);
            }
        }
    }
}

static void store_transposed(const View *view, char *to, int64_t steps, int64_t lanes, Rows panel) {
    const int type = view->type, bytes = types[type].bytes, wide = types[types[type].state].bytes;
    const int64_t most = level->narrow[type] ? AT_ONCE : steps;
    float rows[SIDE_BY_SIDE][AT_ONCE];
    for (int64_t lane = 0; lane < lanes; lane += SIDE_BY_SIDE) {
        const int64_t count = smaller(SIDE_BY_SIDE, lanes - lane);
        for (int64_t t = 0; t < steps; t += most) {
            const int64_t now = smaller(most, steps - t);
            const char *from = skip(panel, t).at + lane * wide;
            char *at = offset(to, lane, view->lane) + t * bytes;
            if (level->narrow[type]) {
                level->transpose[wide]((char *)rows, sizeof rows[0], from, panel.pitch, now, count);
                for (int64_t i = 0; i < count; i++)
                    level->narrow[type](offset(at, i, view->lane), rows[i], now);
            } else {
                level->transpose[wide](at, view->lane, from, panel.pitch, now, count);
            }
        }
    }
}

/* Whether time has unit stride and lanes do not. If time runs down, both sides are turned round. */
static int along_time(const View *view, int64_t steps, char **memory, Rows *panel) {
    const int bytes = types[view->type].bytes;
    if (view->lane == bytes || (view->time != bytes && view->time != -bytes)) return 0;
    if (view->time == -bytes) {
        *memory = offset(*memory, steps - 1, view->time);
        *panel = skip(*panel, steps - 1);
        panel->pitch = -panel->pitch;
    }
    return 1;
}

/* --- Any strides ------------------------------------------------------------------------------ */

static void load(const View *view, int64_t t, int64_t steps, int64_t lanes, Rows panel) {
    const int type = view->type, bytes = types[type].bytes;
    _Alignas(16) char narrow[ROW_BYTES / 2];
    char *from = offset(view->at, t, view->time);
    if (along_time(view, steps, &from, &panel)) {
        load_transposed(view, from, steps, lanes, panel);
        return;
    }
    for (; steps > 0; steps--, from = offset(from, 1, view->time), panel = skip(panel, 1)) {
        if (!level->widen[type]) {
            copy(panel.at, bytes, from, view->lane, lanes, bytes);
        } else if (view->lane == bytes) {
            level->widen[type](panel.at, from, lanes);
        } else {
            copy(narrow, bytes, from, view->lane, lanes, bytes);
            level->widen[type](panel.at, narrow, lanes);
        }
    }
}

static void store(const View *view, int64_t t, int64_t steps, int64_t lanes, Rows panel) {
    const int type = view->type, bytes = types[type].bytes;
    _Alignas(16) char narrow[ROW_BYTES / 2];
    char *to = offset(view->at, t, view->time);
    if (along_time(view, steps, &to, &panel)) {
        store_transposed(view, to, steps, lanes, panel);
        return;
    }
    for (; steps > 0; steps--, to = offset(to, 1, view->time), panel = skip(panel, 1)) {
        if (!level->narrow[type]) {
            copy(to, view->lane, panel.at, bytes, lanes, bytes);
        } else if (view->lane == bytes) {
            level->narrow[type](to, panel.at, lanes);
        } else {
            level->narrow[type](narrow, panel.at, lanes);
            copy(to, view->lane, narrow, bytes, lanes, bytes);
        }
    }
}

/* The rows of so many steps from t on: of memory itself, or of the panel, filled from there. */
static Rows input(const View *view, int64_t t, int64_t steps, const Group *group, char *panel) {
    const Rows rows = {panel, group->pitch};
    if (is_panel(view, group)) return (Rows){offset(view->at, t, view->time), view->time};
    load(view, t, steps, group->lanes, rows);
    return rows;
}

/* The same where nothing else will use the panel: steps that are alike share one row. */
static Rows shared_input(const View *view, int64_t t, int64_t steps, const Group *group,
                         char *panel) {
    Rows rows = input(view, t, view->time ? steps : 1, group, panel);
    if (!view->time) rows.pitch = 0;
    return rows;
}

/* The rows to compute so many steps into. The panel may be that of an input: a step's inputs are
 * read before its outputs are written. Then, if they are not memory itself, put them there. */
static Rows output(const View *view, int64_t t, const Group *group, char *panel) {
    if (view->at && is_panel(view, group))
        return (Rows){offset(view->at, t, view->time), view->time};
    return (Rows){panel, group->pitch};
}

static void finish(const View *view, int64_t t, int64_t steps, const Group *group, Rows rows) {
    if (view->at && !is_panel(view, group)) store(view, t, steps, group->lanes, rows);
}

/* The state of a sequence, or zeros where there is none; zeros in lanes that fill up a block. */
static void load_state(const View *view, int64_t sequence, const Group *group, char *state) {
    const int bytes = types[view->type].bytes;
    memset(state, 0, (size_t)group->pitch);
    if (view->at)
        copy(state, bytes, offset(view->at, sequence, view->time), view->lane, group->lanes, bytes);
}

static void store_state(const View *view, int64_t sequence, const Group *group, const char *state) {
    const int bytes = types[view->type].bytes;
    if (view->at)
        copy(offset(view->at, sequence, view->time), view->lane, state, bytes, group->lanes, bytes);
}
