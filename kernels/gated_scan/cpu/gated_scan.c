/* gated_scan on CPUs, forward and backward: h[t] = gate * h[t-1] + token, of gates and tokens that
 * a kind computes from its inputs. See kernels/gated_scan/kinds.py.
 *
 * Vectors run along channels, each computed step by step: gate and token, in registers, and the
 * state. A thread takes a group of channels of one batch through time, some steps of LANES channels
 * at a time. Where neighbouring channels of float32 lie side by side, it reads and writes memory
 * itself, else panels that fit in the cache. Backward, gates and tokens are computed again. Bytes
 * moved are those of the tensors, once. How work is shared out changes no bit of the results.
 *
 *   gated_scan.c      arguments, and how a problem is cut into tasks
 *   problem.h         a problem as numbers
 *   level.h           at each level of vector instructions,
 *   gates.h           what kinds share
 *   kinds/<name>.h    gate, token and derivatives of a kind
 *   steps.h           the inner loops of a kind
 *   tasks.h           a task of each pass
 */
#include "cpu_arguments.h"
#include "problem.h"

#define LEVEL_BODY "gated_scan/cpu/level.h"
#include "cpu_levels.h"

typedef void TaskFunction(const void *problem, int64_t task, char *scratch);
static TaskFunction *const forward_tasks[] = OF_LEVELS(forward_task);
static TaskFunction *const backward_tasks[] = OF_LEVELS(backward_task);
static TaskFunction *const sum_tasks[] = OF_LEVELS(sum_task);
enum { KINDS = sizeof kinds_portable / sizeof *kinds_portable };

/* Elements that are worth a thread; tasks per thread, to even out their load; and parts that time
 * is cut into, at most, where parameters have gradients. */
enum { THREAD_ELEMENTS = 32768, TASKS = 4, PARTS = 16 };
/* Channels of a task and steps at a time, where channels have unit stride, and where not. */
enum { WIDE = 512, WIDE_STEPS = 128, NARROW = 8, NARROW_STEPS = 256 };

/* --- Cutting ---------------------------------------------------------------------------------- */

static int64_t threads_worth(const Scan *scan, int64_t threads) {
    const int64_t most = larger(scan->batch * scan->channels * scan->time / THREAD_ELEMENTS, 1);
    return smaller(smaller(threads, MOST_THREADS), most);
}

/* Cut it into tasks. What sums of parameters' gradients depend on follows from the shape alone. */
static void cut(Scan *scan, Work *work, int sums) {
    const int64_t *stride = scan->tensor[INPUT].stride;
    const int wide = scan->channels > 1 && llabs(stride[1]) < llabs(stride[2]);
    const int64_t wanted = work->threads > 1 ? TASKS * work->threads : 1;
    const int64_t fair = ceil_div(scan->channels, ceil_div(wanted, scan->batch));
    scan->width = wide ? smaller(WIDE, ceil_div(fair, 16) * 16) : NARROW;
    scan->steps = smaller(wide ? WIDE_STEPS : NARROW_STEPS, scan->time);
    scan->groups = ceil_div(scan->channels, scan->width);
    scan->spans = smaller(scan->sequences, sums ? ceil_div(PARTS, scan->batch)
                                                : ceil_div(wanted, scan->batch * scan->groups));
    work->tasks = scan->batch * scan->groups * scan->spans;
    work->scratch_bytes = scratch_of(scan);
}

static int run(Scan *scan, int64_t threads, int backward, char *parameters_grad) {
    Work work = {.problem = scan, .threads = threads_worth(scan, threads)};
    work.run = (backward ? backward_tasks : forward_tasks)[level_in_use];
    cut(scan, &work, parameters_grad != NULL);
    if (!parameters_grad) return run_all(&work);
    const int64_t of_part = kinds_portable[scan->kind].parameters * scan->channels;
    const Gradient gradient = {
        {NULL, parameters_grad, FLOAT32, 1, scan->batch * scan->spans, of_part},
        &scan->parameter_sums};
    return run_and_sum(&work, &gradient, 1, sum_tasks[level_in_use]);
}

/* --- Arguments -------------------------------------------------------------------------------- */

enum { BATCH, CHANNELS, TIME, SEQUENCES, RESET_BATCH, FLAGS, SIZES };

/* The tensors of each direction, which all have strides: so many of the dtype, then states. The
 * pointers after those of tensors are parameters, reset, offsets, and backward the parameters'
 * gradients. */
static const int forward_tensors[] = {INPUT, INPUT + 1, INPUT + 2, INPUT + 3, STATES,
                                      INITIAL, FINAL};
static const int backward_tensors[] = {INPUT, INPUT + 1, INPUT + 2, INPUT + 3, STATES, STATES_GRAD,
                                       INPUT_GRAD, INPUT_GRAD + 1, INPUT_GRAD + 2, INPUT_GRAD + 3,
                                       INITIAL, FINAL_GRAD, INITIAL_GRAD};
enum {
    FORWARD_TENSORS = sizeof forward_tensors / sizeof(int),
    BACKWARD_TENSORS = sizeof backward_tensors / sizeof(int),
};

static int kind_named(PyObject *name) {
    for (int i = 0; i < KINDS; i++)
        if (PyUnicode_Check(name) &&
            !PyUnicode_CompareWithASCIIString(name, kinds_portable[i].name))
            return i;
    return fail("kind %R has no code for CPUs", name);
}

static int describe(int backward, int type, const int64_t *pointers, const int64_t *scalars,
                    Scan *scan) {
    static const char *const names[] = {"batch", "channels", "time", "sequences"};
    const int *tensors = backward ? backward_tensors : forward_tensors;
    const int count = backward ? BACKWARD_TENSORS : FORWARD_TENSORS;
    const Kind *kind = &kinds_portable[scan->kind];
    double elements = 1;
    for (int i = BATCH; i <= SEQUENCES; i++) {
        if (scalars[i] < 0) return fail("%s is %lld", names[i], (long long)scalars[i]);
        if (i <= TIME) elements *= (double)larger(scalars[i], 1);
    }
    if (elements > 0x1p52) return fail("the sizes multiply to too many elements");
    if (scalars[FLAGS] & ~(int64_t)3)
        return fail("flags is %lld; accepted are 0 to 3", (long long)scalars[FLAGS]);
    scan->batch = scalars[BATCH], scan->channels = scalars[CHANNELS], scan->time = scalars[TIME];
    scan->sequences = larger(scalars[SEQUENCES], 1);
    scan->reset_batch = scalars[RESET_BATCH];
    scan->down = (int)(scalars[FLAGS] & 1) != backward;
    scan->option = (int)(scalars[FLAGS] >> 1);
    scalars += SIZES;
    for (int i = 0; i < count; i++) {
        Tensor *tensor = &scan->tensor[tensors[i]];
        const int needed = tensors[i] < STATES ? tensors[i] < kind->inputs
                                               : tensors[i] == STATES;
        tensor->at = (char *)(uintptr_t)pointers[i];
        tensor->type = tensors[i] < INITIAL ? type : FLOAT32;
        if (!tensor->at && needed) return fail("pointer %d is null", i);
        for (int d = 0; d < 3; d++)
            tensor->stride[d] = (int64_t)((uint64_t)*scalars++ *
                                          (uint64_t)types[tensor->type].bytes);
    }
    scan->parameters = (const float *)(uintptr_t)pointers[count];
    if (!scan->parameters && kind->parameters) return fail("parameters is null");
    scan->reset = (const char *)(uintptr_t)pointers[count + 1];
    return 0;
}

/* In the order of steps. */
static int order_offsets(int64_t *offsets, Scan *scan) {
    scan->offsets = offsets;
    for (int64_t s = 0, n = scan->sequences; offsets && scan->down && s <= n / 2; s++) {
        const int64_t first = scan->time - offsets[n - s];
        offsets[n - s] = scan->time - offsets[s], offsets[s] = first;
    }
    return offsets ? 0 : -1;
}

static PyObject *call(PyObject *const *args, Py_ssize_t count, int backward) {
    const char *name = backward ? "gated_scan_backward" : "gated_scan_forward";
    const int tensors = backward ? BACKWARD_TENSORS : FORWARD_TENSORS;
    int64_t pointers[BACKWARD_TENSORS + 4], scalars[SIZES + 3 * BACKWARD_TENSORS];
    Scan scan = {0};
    if (count != 5)
        return PyErr_Format(PyExc_TypeError,
                            "%s takes kind, dtype, pointers, scalars, threads; got %zd arguments",
                            name, count);
    scan.kind = kind_named(args[0]);
    const int type = scan.kind < 0 ? -1 : type_named(args[1]);
    if (type < 0) return NULL;
    if (types[type].state != FLOAT32) {
        fail("dtype %R; accepted are float32, bfloat16, float16", args[1]);
        return NULL;
    }
    if (integers(args[2], name, "pointers", tensors + 3 + backward, 1, pointers) ||
        integers(args[3], name, "scalars", SIZES + 3 * tensors, 0, scalars))
        return NULL;
    const int64_t threads = threads_allowed(args[4]);
    if (!threads) return NULL;
    if (describe(backward, type, pointers, scalars, &scan)) return NULL;
    if (order_offsets(copied_offsets(pointers[tensors + 2], scalars[SEQUENCES], scan.time), &scan))
        return NULL;
    char *const sums = backward ? (char *)(uintptr_t)pointers[tensors + 3] : NULL;
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    if (scan.batch && scan.channels && scan.time)
        status = run(&scan, threads, backward, sums);
    Py_END_ALLOW_THREADS
    return finished(status, scan.offsets);
}

PYTHON_FUNCTION(gated_scan_forward, call(args, count, 0))
PYTHON_FUNCTION(gated_scan_backward, call(args, count, 1))

static PyObject *gated_scan_kinds(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *names = PyTuple_New(KINDS);
    for (int i = 0; names && i < KINDS; i++) {
        PyObject *name = PyUnicode_FromString(kinds_portable[i].name);
        if (!name || PyTuple_SetItem(names, i, name)) {
            Py_DECREF(names);
            return NULL;
        }
    }
    return names;
}

static PyMethodDef functions[] = {
    FUNCTION_ROW(gated_scan_forward,
     "gated_scan_forward(kind, dtype, pointers, scalars, threads)\n\n"
     "The states and the final state of a gated scan. Pointers and scalars are those that\n"
     "scan_registry.kernels.gated_scan.op.cpu names. Raises as forward."),
    FUNCTION_ROW(gated_scan_backward,
     "gated_scan_backward(kind, dtype, pointers, scalars, threads)\n\n"
     "The gradients of a gated scan. As gated_scan_forward."),
    {"gated_scan_kinds", gated_scan_kinds, METH_NOARGS,
     "gated_scan_kinds() -> tuple[str, ...]\n\n"
     "The kinds that both functions compute, by the names of their headers."},
    {NULL, NULL, 0, NULL}};

ADD_FUNCTIONS(functions)
