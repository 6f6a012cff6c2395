/* Products with R, at one level of vector instructions. cpu_math.h comes before.
 *
 * R is packed in panels: PANEL neighbouring columns, row after row, with zeros where there are no
 * columns. A tile of up to 6 rows by a panel is summed in registers.
 */
#define PANEL (2 * LANES)

/* out = a · panel. Sums of few rows are split, so that their additions need not wait for one
 * another. */
INLINE void LEVEL(tile)(const int rows, const int splits, const float *a, int64_t pitch,
                        const float *panel, int64_t depth, float *out, int64_t out_pitch) {
    Floats sum[4][6][2];
    for (int s = 0; s < splits; s++)
        for (int i = 0; i < rows; i++) sum[s][i][0] = sum[s][i][1] = LEVEL(all)(0);
    int64_t k = 0;
    for (; k + splits <= depth; k += splits)
        for (int s = 0; s < splits; s++) {
            const float *const row = panel + (k + s) * PANEL;
            const Floats low = LEVEL(load)(row), high = LEVEL(load)(row + LANES);
            for (int i = 0; i < rows; i++) {
                const Floats factor = LEVEL(all)(a[i * pitch + k + s]);
                sum[s][i][0] += factor * low;
                sum[s][i][1] += factor * high;
            }
        }
    for (; k < depth; k++) {
        const float *const row = panel + k * PANEL;
        const Floats low = LEVEL(load)(row), high = LEVEL(load)(row + LANES);
        for (int i = 0; i < rows; i++) {
            const Floats factor = LEVEL(all)(a[i * pitch + k]);
            sum[0][i][0] += factor * low;
            sum[0][i][1] += factor * high;
        }
    }
    for (int i = 0; i < rows; i++) {
        for (int s = 1; s < splits; s++) {
            sum[0][i][0] += sum[s][i][0];
            sum[0][i][1] += sum[s][i][1];
        }
        LEVEL(store)(out + i * out_pitch, sum[0][i][0]);
        LEVEL(store)(out + i * out_pitch + LANES, sum[0][i][1]);
    }
}

/* The product of any number of rows with a panel. */
TARGET static void LEVEL(multiply)(const float *a, int64_t pitch, int64_t rows, const float *panel,
                                   int64_t depth, float *out, int64_t out_pitch) {
    while (rows > 0) {
        const int64_t count = ceil_div(rows, ceil_div(rows, 6));
        switch (count) {
            case 1: LEVEL(tile)(1, 4, a, pitch, panel, depth, out, out_pitch); break;
            case 2: LEVEL(tile)(2, 2, a, pitch, panel, depth, out, out_pitch); break;
            case 3: LEVEL(tile)(3, 2, a, pitch, panel, depth, out, out_pitch); break;
            case 4: LEVEL(tile)(4, 1, a, pitch, panel, depth, out, out_pitch); break;
            case 5: LEVEL(tile)(5, 1, a, pitch, panel, depth, out, out_pitch); break;
            default: LEVEL(tile)(6, 1, a, pitch, panel, depth, out, out_pitch);
        }
        a += count * pitch, out += count * out_pitch, rows -= count;
    }
}

/* Where a task packs panels: those of one head that begin at a unit. */
typedef struct {
    int64_t head, unit, columns, gates;
    float *at;
} LEVEL(Panels);

INLINE LEVEL(Panels) LEVEL(panels_of)(const Network *net, int64_t task) {
    const int64_t dim = net->dim, blocks = ceil_div(dim, PANEL), unit = task % blocks * PANEL;
    const int64_t gates = cells[net->cell].recurrent, columns = smaller(PANEL, dim - unit);
    float *const at = net->panels + task * gates * dim * PANEL;
    return (LEVEL(Panels)){task / blocks, unit, columns, gates, at};
}

/* Forward, one panel for each gate: the columns are new units, the rows previous ones. */
TARGET static void LEVEL(pack_forward_task)(const void *problem, int64_t task, char *scratch) {
    const Network *const net = problem;
    const LEVEL(Panels) panels = LEVEL(panels_of)(net, task);
    const int64_t dim = net->dim;
    (void)scratch;
    for (int64_t gate = 0; gate < panels.gates; gate++) {
        float *const panel = panels.at + gate * dim * PANEL;
        if (panels.columns < PANEL) memset(panel, 0, (size_t)(dim * PANEL) * 4);
        const int64_t row = (gate * net->heads + panels.head) * dim + panels.unit;
        const char *const from = (const char *)(net->recurrent + row * dim);
        LEVEL(transpose_4)((char *)panel, PANEL * 4, from, (ptrdiff_t)dim * 4, panels.columns, dim);
    }
}

/* Backward, one panel: the columns are previous units, the rows gates, and new units of each. */
TARGET static void LEVEL(pack_backward_task)(const void *problem, int64_t task, char *scratch) {
    const Network *const net = problem;
    const LEVEL(Panels) panels = LEVEL(panels_of)(net, task);
    const int64_t dim = net->dim;
    float *panel = panels.at;
    (void)scratch;
    if (panels.columns < PANEL) memset(panel, 0, (size_t)(panels.gates * dim * PANEL) * 4);
    for (int64_t gate = 0; gate < panels.gates; gate++) {
        const int64_t row = (gate * net->heads + panels.head) * dim;
        const float *from = net->recurrent + row * dim + panels.unit;
        for (int64_t k = 0; k < dim; k++, from += dim, panel += PANEL)
            memcpy(panel, from, (size_t)panels.columns * 4);
    }
}
