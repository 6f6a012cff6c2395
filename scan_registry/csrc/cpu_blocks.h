/* Blocks of LANES channels by some steps, between memory of any strides and panels: rows of LANES
 * floats, one for each step. cpu_math.h comes before. */

/* Of one batch; strides are in bytes. */
typedef struct {
    char *at; /* null: not there */
    int type;
    int64_t channel, time;
} LEVEL(View);
#define View LEVEL(View)

/* Of a tensor (batch, channels, time), from a channel of a batch on. */
INLINE View LEVEL(view_of)(char *at, int type, const int64_t *stride, int64_t batch,
                           int64_t channel) {
    if (at) at = offset(offset(at, batch, stride[0]), channel, stride[1]);
    return (View){at, type, stride[1], stride[2]};
}

INLINE void LEVEL(widen)(int type, void *wide, const void *narrow, int64_t n) {
    if (type == FLOAT32)
        memcpy(wide, narrow, (size_t)n * 4);
    else if (type == BFLOAT16)
        LEVEL(widen_bfloat16)(wide, narrow, n);
    else
        LEVEL(widen_float16)(wide, narrow, n);
}

INLINE void LEVEL(narrow)(int type, void *narrow, const void *wide, int64_t n) {
    if (type == FLOAT32)
        memcpy(narrow, wide, (size_t)n * 4);
    else if (type == BFLOAT16)
        LEVEL(narrow_bfloat16)(narrow, wide, n);
    else
        LEVEL(narrow_float16)(narrow, wide, n);
}

/* One after the other, so that they may go down in memory that is shared; of 2 or 4 bytes. */
INLINE void LEVEL(copy_elements)(char *to, int64_t to_stride, const char *from,
                                 int64_t from_stride, int64_t n, int bytes) {
    if (bytes == 2)
        for (int64_t i = 0; i < n; i++)
            memcpy(offset(to, i, to_stride), offset(from, i, from_stride), 2);
    else
        for (int64_t i = 0; i < n; i++)
            memcpy(offset(to, i, to_stride), offset(from, i, from_stride), 4);
}

/* Rows of neighbouring channels, a type at a time so that no loop asks for it. */
INLINE void LEVEL(fetch_rows)(int type, const char *from, int64_t stride, int64_t steps,
                              float *panel) {
    for (int64_t t = 0; t < steps; t++)
        LEVEL(widen)(type, panel + t * LANES, offset(from, t, stride), LANES);
}

INLINE void LEVEL(put_rows)(int type, char *to, int64_t stride, int64_t steps, const float *panel) {
    for (int64_t t = 0; t < steps; t++)
        LEVEL(narrow)(type, offset(to, t, stride), panel + t * LANES, LANES);
}

/* So many lanes, the others zeros. ``room`` is for a panel, too. */
TARGET UNUSED static void LEVEL(fetch)(const View *view, int64_t t, int64_t steps, int64_t lanes,
                                       float *panel, float *room) {
    const int type = view->type, bytes = types[type].bytes;
    const char *from = offset(view->at, t, view->time);
    if (lanes < LANES) memset(panel, 0, (size_t)steps * VECTOR);
    if (view->channel == bytes && lanes == LANES) {
        if (type == FLOAT32)
            LEVEL(fetch_rows)(FLOAT32, from, view->time, steps, panel);
        else if (type == BFLOAT16)
            LEVEL(fetch_rows)(BFLOAT16, from, view->time, steps, panel);
        else
            LEVEL(fetch_rows)(FLOAT16, from, view->time, steps, panel);
    } else if (view->time == bytes && type == FLOAT32) {
        LEVEL(transpose_4)((char *)panel, VECTOR, from, (ptrdiff_t)view->channel, lanes, steps);
    } else if (view->time == bytes) {
        /* One row, if they lie one after the other. */
        const int64_t rows = view->channel == steps * bytes ? 1 : lanes;
        for (int64_t i = 0; i < rows; i++)
            LEVEL(widen)(type, room + i * steps, offset(from, i, view->channel),
                         steps * lanes / rows);
        LEVEL(transpose_4)((char *)panel, VECTOR, (const char *)room, (ptrdiff_t)steps * 4, lanes,
                           steps);
    } else {
        char row[VECTOR];
        for (int64_t i = 0; i < steps; i++) {
            LEVEL(copy_elements)(row, bytes, offset(from, i, view->time), view->channel, lanes,
                                 bytes);
            LEVEL(widen)(type, panel + i * LANES, row, lanes);
        }
    }
}

/* The way back. */
TARGET UNUSED static void LEVEL(put)(const View *view, int64_t t, int64_t steps, int64_t lanes,
                                     const float *panel, float *room) {
    const int type = view->type, bytes = types[type].bytes;
    char *to = offset(view->at, t, view->time);
    if (view->channel == bytes && lanes == LANES) {
        if (type == FLOAT32)
            LEVEL(put_rows)(FLOAT32, to, view->time, steps, panel);
        else if (type == BFLOAT16)
            LEVEL(put_rows)(BFLOAT16, to, view->time, steps, panel);
        else
            LEVEL(put_rows)(FLOAT16, to, view->time, steps, panel);
    } else if (view->time == bytes && type == FLOAT32) {
        LEVEL(transpose_4)(to, (ptrdiff_t)view->channel, (const char *)panel, VECTOR, steps, lanes);
    } else if (view->time == bytes) {
        LEVEL(transpose_4)((char *)room, (ptrdiff_t)steps * 4, (const char *)panel, VECTOR, steps,
                           lanes);
        const int64_t rows = view->channel == steps * bytes ? 1 : lanes;
        for (int64_t i = 0; i < rows; i++)
            LEVEL(narrow)(type, offset(to, i, view->channel), room + i * steps,
                          steps * lanes / rows);
    } else {
        char row[VECTOR];
        for (int64_t i = 0; i < steps; i++) {
            LEVEL(narrow)(type, row, panel + i * LANES, lanes);
            LEVEL(copy_elements)(offset(to, i, view->time), view->channel, row, bytes, lanes,
                                 bytes);
        }
    }
}
