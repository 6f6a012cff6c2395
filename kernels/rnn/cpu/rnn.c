/* rnn on CPUs, forward and backward: see kernels/rnn/reference.py.
 *
 * Heads and rows of a batch do not influence one another, and are shared out among threads. All
 * is in float32.
 *
 *   rnn.c              arguments
 *   problem.h          a problem as numbers
 *   level.h            a task, at each level of vector instructions
 *   product.h          products with R
 *   cells.h            the cells without them
 */
#include "cpu_arguments.h"
#include "problem.h"

#define LEVEL_BODY "rnn/cpu/level.h"
#include "cpu_levels.h"

typedef void Task(const void *problem, int64_t task, char *scratch);
static Task *const forward_tasks[] = OF_LEVELS(forward_task);
static Task *const backward_tasks[] = OF_LEVELS(backward_task);
static Task *const pack_forward_tasks[] = OF_LEVELS(pack_forward_task);
static Task *const pack_backward_tasks[] = OF_LEVELS(pack_backward_task);
static const int64_t panel_units[] = OF_LEVELS(panel);

/* THREAD_WORK: multiply-adds that are worth one more thread. COPIED: elements to copy that are worth
 * one more thread. CELL_WORK: what a gate of a cell costs beside its product, in multiply-adds. */
enum { THREAD_WORK = 1 << 20, COPIED = 1 << 17, CELL_WORK = 64 };

static int64_t threads_worth(double work, double of_thread, int64_t threads) {
    const double most = work / of_thread;
    return most < 1 ? 1 : most < (double)threads ? (int64_t)most : smaller(threads, MOST_THREADS);
}

/* Pack R into panels. Returns their memory, to be freed, or null. Rows of panels are whole cache
 * lines. */
static char *pack(Network *net, int backward, int64_t threads) {
    const int64_t panel = panel_units[level_in_use], blocks = ceil_div(net->dim, panel);
    const int64_t floats = net->heads * cells[net->cell].recurrent * net->dim * blocks * panel;
    char *const memory = malloc((size_t)floats * sizeof(float) + LINE);
    if (!memory) return NULL;
    net->panels = (float *)offset(memory, 1, LINE - (int64_t)((uintptr_t)memory % LINE));
    Work work = {.problem = net, .tasks = net->heads * blocks};
    work.threads = threads_worth((double)floats, COPIED, threads);
    work.run = (backward ? pack_backward_tasks : pack_forward_tasks)[level_in_use];
    if (!run_all(&work)) return memory;
    free(memory);
    return NULL;
}

static int run_network(Network *net, int backward, int64_t threads) {
    const Cell *const cell = &cells[net->cell];
    const int64_t panel = panel_units[level_in_use];
    const int64_t width = ceil_div(net->dim, panel) * panel, depth = cell->recurrent * net->dim;
    /* Without a state before the only step, R is not read. */
    const int reads = backward ? !net->cut && (net->time > 1 || net->initial_grad || net->fresh_grad)
                               : net->time > 1 || net->initial || net->fresh;
    double steps = 0;
    for (int64_t i = 0; i < net->rows; i++) steps += (double)net->row[i].length;
    steps *= (double)net->heads * (double)depth;
    Work work = {.problem = net};
    work.threads = threads_worth(steps * (double)((reads ? net->dim : 0) + CELL_WORK), THREAD_WORK,
                                 threads);
    const int64_t runs = ceil_div(work.threads, net->heads);
    net->run = smaller(MOST_ROWS, ceil_div(net->rows, runs));
    work.tasks = net->heads * ceil_div(net->rows, net->run);
    work.run = (backward ? backward_tasks : forward_tasks)[level_in_use];
    work.scratch_bytes = 4 * net->run * (MOST_STATES + 1) * width + 16 * LINE;
    work.scratch_bytes += 4 * net->run * (backward ? depth + 2 * MOST_PANEL : 0);
    work.scratch_bytes += 4 * net->run * MOST_GATES * panel;
    char *const memory = reads ? pack(net, backward, threads) : NULL;
    if (reads && !memory) return -1;
    const int status = run_all(&work);
    free(memory);
    return status;
}

/* --- Arguments -------------------------------------------------------------------------------- */

static int cell_named(PyObject *name) {
    const char *text = text_of(name, "cell must be a str");
    if (!text) return -1;
    for (int i = 0; i < CELLS; i++)
        if (!strcmp(text, cells[i].name)) return i;
    return fail("cell %R; accepted are lstm, gru, elman, slstm", name);
}

static int by_length(const void *one, const void *other) {
    const Row *const a = one, *const b = other;
    if (a->length != b->length) return a->length < b->length ? 1 : -1;
    return a->index < b->index ? -1 : 1;
}

/* The rows: those of the batch, or packed sequences. The offsets are read once, as all indices
 * follow from them. */
static int make_rows(Network *net, int64_t sequences, const int64_t *offsets) {
    net->rows = sequences ? sequences : net->batch;
    if (sequences && !offsets)
        return fail("offsets of %lld sequences is null", (long long)sequences);
    if (sequences && net->batch != 1)
        return fail("sequences are packed, and batch is %lld", (long long)net->batch);
    net->row = malloc((size_t)larger(net->rows, 1) * sizeof *net->row);
    if (!net->row) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t begin = 0;
    int rises = !sequences || offsets[0] == 0;
    for (int64_t i = 0; i < net->rows; i++) {
        const int64_t end = sequences ? offsets[i + 1] : net->time;
        const Row row = {i, sequences ? 0 : i, sequences ? begin : 0, end - (sequences ? begin : 0)};
        net->row[i] = row;
        rises &= row.length >= 0;
        begin = end;
    }
    if (sequences && (!rises || begin != net->time))
        return fail("offsets do not rise from 0 to time, %lld", (long long)net->time);
    if (sequences) qsort(net->row, (size_t)net->rows, sizeof *net->row, by_length);
    return 0;
}

/* The numbers of pointers, sizes and strides that each direction takes. */
enum { BATCH, TIME, HEADS, DIM, SEQUENCES, GRADED, CUT, RESET_BATCH, RESET_TIME, SIZES };

static int check_sizes(const int64_t *sizes) {
    double elements = 1;
    for (int i = 0; i <= SEQUENCES; i++) {
        if (sizes[i] < 0) return fail("size %d is %lld", i, (long long)sizes[i]);
        elements *= (double)larger(sizes[i], 1);
    }
    if (elements * (double)larger(sizes[DIM], 1) > 0x1p52)
        return fail("the sizes multiply to too many elements");
    return 0;
}

static Sequence sequence_of(int64_t pointer, const int64_t *strides, int states) {
    Sequence sequence = {(float *)(uintptr_t)pointer, 0, 0, 0};
    if (states) sequence.state = *strides++;
    sequence.batch = strides[0], sequence.time = strides[1];
    return sequence;
}

static float *floats_at(int64_t pointer) { return (float *)(uintptr_t)pointer; }

/* Forward: inputs, recurrent, bias, initial, reset, fresh, offsets, states, cache, last; strides
 * of inputs, states, cache. Backward: recurrent, states, initial, cache, states_grad, final_grad,
 * reset, fresh, offsets, gates_grad, initial_grad, fresh_grad; strides of states, cache,
 * states_grad, gates_grad. */
static PyObject *call(PyObject *const *args, Py_ssize_t count, int backward) {
    const char *name = backward ? "rnn_backward" : "rnn_forward";
    int64_t p[12], s[SIZES + 10];
    Network net = {0};
    if (count != 5) {
        PyErr_Format(PyExc_TypeError,
                     "%s takes cell, pointers, scalars, clip, threads; got %zd arguments", name,
                     count);
        return NULL;
    }
    if ((net.cell = cell_named(args[0])) < 0 ||
        integers(args[1], name, "pointers", backward ? 12 : 10, 1, p) ||
        integers(args[2], name, "scalars", SIZES + (backward ? 10 : 7), 0, s) || check_sizes(s))
        return NULL;
    const double clip = PyFloat_AsDouble(args[3]);
    const int64_t threads = PyErr_Occurred() ? 0 : threads_allowed(args[4]);
    if (!threads) return NULL;
    net.batch = s[BATCH], net.time = s[TIME], net.heads = s[HEADS], net.dim = s[DIM];
    net.cut = !!s[CUT], net.graded = (int)s[GRADED];
    net.reset_batch = s[RESET_BATCH], net.reset_time = s[RESET_TIME];
    net.clip = net.recurrent_clip = (float)clip;
    const int keeps = cells[net.cell].cache > 0;
    const int64_t *const strides = s + SIZES;
    const int64_t offsets = p[backward ? 8 : 6];
    net.recurrent = floats_at(p[backward ? 0 : 1]);
    net.initial = floats_at(p[backward ? 2 : 3]);
    net.reset = (const uint8_t *)(uintptr_t)p[backward ? 6 : 4];
    net.fresh = net.reset ? floats_at(p[backward ? 7 : 5]) : NULL;
    int there = net.recurrent != NULL;
    if (backward) {
        net.states = sequence_of(p[1], strides, 1);
        net.cache = sequence_of(p[3], strides + 3, 0);
        net.states_grad = sequence_of(p[4], strides + 5, 1);
        net.final_grad = floats_at(p[5]);
        net.gates_grad = sequence_of(p[9], strides + 8, 0);
        net.initial_grad = floats_at(p[10]);
        net.fresh_grad = net.reset ? floats_at(p[11]) : NULL;
        there &= p[1] && (p[3] || !keeps) && p[4] && p[9];
        if (net.graded < 1 || net.graded > cells[net.cell].states) {
            fail("graded is %d; %s has %d states", net.graded, cells[net.cell].name,
                 cells[net.cell].states);
            return NULL;
        }
    } else {
        net.inputs = sequence_of(p[0], strides, 0);
        net.bias = floats_at(p[2]);
        net.states = sequence_of(p[7], strides + 2, 1);
        net.cache = sequence_of(keeps ? p[8] : 0, strides + 5, 0);
        net.last = floats_at(p[9]);
        there &= p[0] && p[2] && p[7] && p[9];
    }
    if (!there) {
        fail("a pointer of %s is null", name);
        return NULL;
    }
    if (make_rows(&net, s[SEQUENCES], (const int64_t *)(uintptr_t)offsets)) {
        free(net.row);
        return NULL;
    }
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    if (net.rows && net.heads && net.dim) status = run_network(&net, backward, threads);
    Py_END_ALLOW_THREADS
    return finished(status, net.row);
}

PYTHON_FUNCTION(rnn_forward, call(args, count, 0))
PYTHON_FUNCTION(rnn_backward, call(args, count, 1))

static PyMethodDef functions[] = {
    FUNCTION_ROW(rnn_forward,
     "rnn_forward(cell, pointers, scalars, clip, threads)\n\n"
     "The states of a recurrent network in float32, and those after the last step. Pointers and\n"
     "scalars are those that scan_registry.kernels.rnn.op.cpu names. Raises as forward."),
    FUNCTION_ROW(rnn_backward,
     "rnn_backward(cell, pointers, scalars, clip, threads)\n\n"
     "The gradients of its gates and initial states. As rnn_forward."),
    {NULL, NULL, 0, NULL}};

ADD_FUNCTIONS(functions)
