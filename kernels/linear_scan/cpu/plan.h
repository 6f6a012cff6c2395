/* How a problem is cut into tasks. */
#include "cpu_threads.h"
#include "walks.h"

/* Elements that are worth a thread; tasks per thread, to even out their load. */
enum { THREAD_ELEMENTS = 65536, TASKS = 2 };
/* Steps of a panel where lanes have unit stride; or so many bytes, where those steps have less. */
enum { LOW = 3, LOW_BYTES = 8192 };
/* The tile that a piece of a reduction sums, along the dimension of unit stride and the other. */
enum { TILE_UNIT = 32, TILE_OTHER = 64 };
/* --- Planning --------------------------------------------------------------------------------- */

/* As many threads as there is work for. */
static int64_t threads_worth(const Scan *scan, int64_t threads) {
    const int64_t most = larger(scan->elements / THREAD_ELEMENTS, 1);
    return smaller(smaller(threads, MOST_THREADS), most);
}

/* Make time go up as the walk does. */
static void turn_round(Scan *scan) {
    for (int i = 0; i < TENSORS; i++) {
        Tensor *tensor = &scan->tensor[i];
        const int64_t last = (i < INITIAL ? scan->size[TIME] : scan->sequences) - 1;
        if (tensor->at) tensor->at = offset(tensor->at, last, tensor->stride[TIME]);
        tensor->stride[TIME] = (int64_t)(0 - (uint64_t)tensor->stride[TIME]);
    }
    for (int64_t low = 0, high = scan->sequences; low <= high; low++, high--) {
        const int64_t begin = scan->offsets[low];
        scan->offsets[low] = scan->size[TIME] - scan->offsets[high];
        if (low < high) scan->offsets[high] = scan->size[TIME] - begin;
    }
}

/* Whether lanes lie closer together than steps, in most tensors. */
static int lanes_first(const Scan *scan) {
    int votes = 0;
    for (int i = 0; i < INITIAL; i++) {
        const Tensor *tensor = &scan->tensor[i];
        const int64_t lane = llabs(tensor->stride[CHANNEL]), step = llabs(tensor->stride[TIME]);
        if (tensor->at && lane && step) votes += (lane < step) - (step < lane);
    }
    return scan->size[CHANNEL] > 1 && (scan->size[TIME] == 1 || votes > 0);
}

/* Where lanes are rows any dimension will do: take the largest if channels are too few. */
static void choose_lanes(Scan *scan, int64_t block) {
    const int other = scan->size[OUTER] > scan->size[BATCH] ? OUTER : BATCH;
    const int64_t size = scan->size[CHANNEL];
    if (size >= block || scan->size[other] <= size) return;
    scan->size[CHANNEL] = scan->size[other];
    scan->size[other] = size;
    for (int i = 0; i < TENSORS; i++) {
        int64_t *stride = scan->tensor[i].stride, channel = stride[CHANNEL];
        stride[CHANNEL] = stride[other];
        stride[other] = channel;
    }
}

/* Cut forward or backward into tasks.
 *
 * Where time has unit stride, a group is one block: few rows, each read for about a page at a time,
 * which is as far as processors prefetch in one go. Where lanes have, groups are as wide as leaves
 * enough of them, and panels a few steps high: enough to keep states in registers meanwhile, and
 * few enough rows to be prefetched together. */
static void plan_walk(Scan *scan, Work *work, int backward) {
    const int64_t threads = work->threads, bytes = types[scan->state].bytes;
    const int64_t block = level->recurrence[scan->state].block / bytes;
    const int wide = lanes_first(scan);
    if (!wide) choose_lanes(scan, block);
    if (scan->reverse != backward) turn_round(scan);
    const int64_t batches = scan->size[OUTER] * scan->size[BATCH], lanes = scan->size[CHANNEL];
    const int64_t wanted = wide && threads > 1 ? TASKS * threads : threads;
    const int64_t fair = ceil_div(lanes, ceil_div(wanted, batches)), step = wide ? 32 : 4;
    scan->width = smaller(wide ? ROW_BYTES / bytes : block, ceil_div(fair, step) * step);
    scan->groups = ceil_div(lanes, scan->width);
    scan->spans = smaller(scan->sequences, ceil_div(wanted, batches * scan->groups));
    scan->row = panel_pitch(scan, smaller(scan->width, lanes));
    scan->panel = wide ? larger(LOW * scan->row, LOW_BYTES) : PANEL_BYTES;
    scan->panel = smaller(scan->panel / scan->row, scan->size[TIME]) * scan->row;
    work->tasks = batches * scan->groups * scan->spans;
}

/* Cut a reduction into tasks: spans of tiles, along the dimension of unit stride, that make groups
 * and panels like those above. */
static void plan_reduction(Scan *scan, Work *work, int channel_last) {
    const int64_t threads = work->threads, bytes = types[scan->state].bytes;
    const int64_t block = level->recurrence[scan->state].block / bytes;
    const int wide = lanes_first(scan), along = wide ? CHANNEL : TIME;
    int64_t blocks = scan->parts;
    scan->gates = 1;
    scan->tile[CHANNEL] = channel_last ? TILE_UNIT : TILE_OTHER;
    scan->tile[TIME] = channel_last ? TILE_OTHER : TILE_UNIT;
    for (int d = 0; d < DIMENSIONS; d++) {
        scan->summed[d] = scan->size[d] > 1 && scan->tensor[GATES_GRAD].stride[d] == 0;
        if (!scan->summed[d]) scan->gates *= scan->size[d];
        if (d >= CHANNEL)
            scan->tiles[d] = ceil_div(scan->size[d], scan->tile[d]);
        else if (!scan->summed[d])
            blocks *= scan->size[d];
    }
    const int64_t others = blocks * scan->tiles[wide ? TIME : CHANNEL];
    const int64_t fair = ceil_div(scan->tiles[along], ceil_div(TASKS * threads, others));
    const int64_t most = (wide ? ROW_BYTES : PANEL_BYTES / block) / bytes / scan->tile[along];
    scan->span[wide ? TIME : CHANNEL] = scan->tile[wide ? TIME : CHANNEL];
    scan->span[along] = smaller(fair, most) * scan->tile[along];

    scan->width = smaller(wide ? scan->span[CHANNEL] : block, scan->size[CHANNEL]);
    scan->row = panel_pitch(scan, scan->width);
    const int64_t rows = smaller(scan->span[TIME], scan->size[TIME]);
    scan->panel = scan->row * (wide ? smaller(rows, larger(LOW, LOW_BYTES / scan->row)) : rows);
    scan->sums = scan->summed[TIME] ? scan->row * ceil_div(rows, scan->tile[TIME]) : scan->panel;
    const int64_t cells = scan->sums / scan->row * (scan->span[CHANNEL] / scan->tile[CHANNEL]);
    scan->cells = ceil_div(cells * bytes, LINE) * LINE;
    work->tasks = blocks * ceil_div(scan->size[CHANNEL], scan->span[CHANNEL]) *
                  ceil_div(scan->size[TIME], scan->span[TIME]);
}

/* Run all tasks, with so many rows and panels of scratch memory, but for the sums of a
 * reduction; -1, and nothing has been written, if there is no memory for it. */
static int run_scan(Work *work, const Scan *scan, int rows, int panels) {
    work->problem = scan;
    work->scratch_bytes = rows * scan->row + panels * scan->panel + 2 * scan->sums + scan->cells;
    return run_all(work);
}
