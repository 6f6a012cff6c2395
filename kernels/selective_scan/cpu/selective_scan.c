/* selective_scan on CPUs, forward and backward: see kernels/selective_scan/reference.py.
 *
 * Vectors run along channels, whose states stay in registers while they go through some steps; B
 * and C of those steps are shared by all channels of a group. A thread takes TOGETHER channels of a
 * group at a time, through all of time. Channels do not influence one another, so how they are
 * shared out does not change a bit of what is forward. Backward, sums over channels are cut as the
 * shape alone decides.
 *
 *   selective_scan.c               arguments, and how a problem is cut into tasks
 *   problem.h                      a problem as numbers
 *   level.h                        at each level of vector instructions,
 *   forward.h                      a task of the forward pass
 *   backward.h                     a task of the backward pass
 *   cpu_blocks.h                   between memory and blocks of channels
 *   cpu_math.h                     exponentials
 */
#include "cpu_arguments.h"
#include "problem.h"
#include "cpu_sum.h"

#define LEVEL_BODY "selective_scan/cpu/level.h"
#include "cpu_levels.h"

typedef void Task(const void *problem, int64_t task, char *scratch);
static Task *const forward_tasks[] = OF_LEVELS(forward_task);
static Task *const backward_tasks[] = OF_LEVELS(backward_task);
static Task *const sum_tasks[] = OF_LEVELS(sum_task);

/* States of channels and steps that are worth a thread; tasks per thread; channels of a task, at
 * least; and tasks of a backward pass, if there are channels enough, and if they are to be
 * fewer. */
enum { THREAD_WORK = 65536, TASKS = 4, LEAST_RUN = 16, WANTED_RUNS = 64, LEAST_RUNS = 16 };

/* --- Cutting ---------------------------------------------------------------------------------- */

static int64_t common_multiple(int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y) {
        const int64_t rest = x % y;
        x = y, y = rest;
    }
    return a / x * b;
}

/* Cut each group into so many runs, or fewer. */
static void cut(Scan *scan, int64_t runs) {
    const int64_t of_group = scan->channels / scan->groups;
    scan->run = ceil_div(ceil_div(of_group, runs), 8) * 8;
    scan->runs = ceil_div(of_group, scan->run);
}

static int64_t threads_worth(const Scan *scan, int64_t threads) {
    const double work = (double)scan->batch * (double)scan->channels * (double)scan->time *
                        (double)scan->states / THREAD_WORK;
    return smaller(smaller(threads, MOST_THREADS), work < 1 ? 1 : (int64_t)work);
}

static int run_forward(Scan *scan, int64_t threads) {
    const int64_t of_group = scan->channels / scan->groups, groups = scan->batch * scan->groups;
    const int64_t wanted = ceil_div(threads > 1 ? TASKS * threads : 1, groups);
    const int64_t most = ceil_div(of_group, LEAST_RUN);
    cut(scan, larger(smaller(wanted, most), ceil_div(of_group, TOGETHER)));
    Work work = {.problem = scan, .run = forward_tasks[level_in_use], .threads = threads};
    work.tasks = groups * scan->runs;
    work.scratch_bytes = forward_scratch(scan);
    return run_all(&work);
}

static int run_backward(Scan *scan, int64_t threads, char *const *to) {
    const int64_t of_group = scan->channels / scan->groups, groups = scan->batch * scan->groups;
    const int64_t N = scan->states, of_projection = N * scan->time;
    const int64_t many = smaller(ceil_div(of_group, TOGETHER), ceil_div(WANTED_RUNS, groups));
    cut(scan, larger(many, smaller(ceil_div(of_group, LEAST_RUN), ceil_div(LEAST_RUNS, groups))));
    const int64_t b = scan->tensor[B].groups, c = scan->tensor[C].groups;
    const Gradient gradients[] = {
        {{NULL, to[0], FLOAT32, 1, scan->batch, scan->channels * N}, &scan->A_sums},
        {{NULL, to[1], FLOAT32, 1, scan->batch, scan->channels}, &scan->D_sums},
        {{NULL, to[2], FLOAT32, 1, scan->batch, scan->channels}, &scan->bias_sums},
        {{NULL, to[3], scan->tensor[B].type, scan->batch * b, scan->groups / b * scan->runs,
          of_projection}, &scan->B_sums},
        {{NULL, to[4], scan->tensor[C].type, scan->batch * c, scan->groups / c * scan->runs,
          of_projection}, &scan->C_sums},
    };
    enum { GRADIENTS = sizeof gradients / sizeof *gradients };
    Work work = {.problem = scan, .run = backward_tasks[level_in_use], .threads = threads};
    work.tasks = groups * scan->runs;
    work.scratch_bytes = backward_scratch(scan);
    return run_and_sum(&work, gradients, GRADIENTS, sum_tasks[level_in_use]);
}

/* --- Arguments -------------------------------------------------------------------------------- */

enum { BATCH, CHANNELS, TIME, STATES, B_GROUPS, C_GROUPS, SEQUENCES, SOFTPLUS, SIZES };

/* The tensors of a direction that have strides, B and C the last; and all of its pointers, of
 * which the first are those and the next are A, D, bias, initial state and offsets. */
static const int forward_strided[] = {U, DELTA, Z, OUT, B, C};
static const int backward_strided[] = {U, DELTA, Z, OUT_GRAD, U_GRAD, DELTA_GRAD, Z_GRAD, B, C};
enum {
    FORWARD_STRIDED = sizeof forward_strided / sizeof(int),
    BACKWARD_STRIDED = sizeof backward_strided / sizeof(int),
    FORWARD_POINTERS = FORWARD_STRIDED + 5 + 1,
    BACKWARD_POINTERS = BACKWARD_STRIDED + 5 + 2 + 5,
};

static int describe(const int *strided, int count, int type, const int64_t *pointers,
                    const int64_t *scalars, Scan *scan) {
    double elements = 1;
    for (int i = 0; i < SIZES; i++)
        if (scalars[i] < 0) return fail("size %d is %lld", i, (long long)scalars[i]);
    for (int i = BATCH; i <= STATES; i++) elements *= (double)larger(scalars[i], 1);
    if (elements > 0x1p52) return fail("the sizes multiply to too many elements");
    scan->batch = scalars[BATCH], scan->channels = scalars[CHANNELS];
    scan->time = scalars[TIME], scan->states = scalars[STATES];
    if (scan->states < 1 || scan->states > MOST_STATES)
        return fail("states is %lld; accepted are 1 to %d", (long long)scan->states, MOST_STATES);
    for (int i = B_GROUPS; i <= C_GROUPS; i++)
        if (scalars[i] < 1 || scan->channels % scalars[i])
            return fail("%lld groups do not divide %lld channels", (long long)scalars[i],
                        (long long)scan->channels);
    scan->groups = common_multiple(scalars[B_GROUPS], scalars[C_GROUPS]);
    scan->sequences = larger(scalars[SEQUENCES], 1);
    scan->softplus = scalars[SOFTPLUS] != 0;
    scan->tensor[B].groups = scalars[B_GROUPS], scan->tensor[C].groups = scalars[C_GROUPS];
    scalars += SIZES;
    for (int i = 0; i < count; i++) {
        const int which = strided[i], dimensions = which < B ? 3 : 4;
        Tensor *tensor = &scan->tensor[which];
        tensor->at = (char *)(uintptr_t)pointers[i];
        tensor->type = type;
        if (!tensor->at && which != Z && which != Z_GRAD) return fail("pointer %d is null", i);
        for (int d = 0; d < dimensions; d++)
            tensor->stride[d] = (int64_t)((uint64_t)*scalars++ * (uint64_t)types[type].bytes);
    }
    pointers += count;
    scan->A = (const float *)(uintptr_t)pointers[0];
    if (!scan->A) return fail("A is null");
    scan->D = (const float *)(uintptr_t)pointers[1];
    scan->bias = (const float *)(uintptr_t)pointers[2];
    scan->initial = (const float *)(uintptr_t)pointers[3];
    scan->steps = scan->states > MANY_STATES ? FEWER_STEPS : STEPS;
    return 0;
}

static PyObject *call(PyObject *const *args, Py_ssize_t count, int backward) {
    const int *strided = backward ? backward_strided : forward_strided;
    const int of_strided = backward ? BACKWARD_STRIDED : FORWARD_STRIDED;
    const int of_pointers = backward ? BACKWARD_POINTERS : FORWARD_POINTERS;
    const char *name = backward ? "selective_scan_backward" : "selective_scan_forward";
    int64_t pointers[BACKWARD_POINTERS], scalars[SIZES + 3 * BACKWARD_STRIDED + 2];
    Scan scan = {0};
    if (count != 4)
        return PyErr_Format(PyExc_TypeError,
                            "%s takes dtype, pointers, scalars, threads; got %zd arguments", name,
                            count);
    const int type = type_named(args[0]);
    if (type < 0) return NULL;
    if (types[type].state != FLOAT32) {
        fail("dtype %R; accepted are float32, bfloat16, float16", args[0]);
        return NULL;
    }
    if (integers(args[1], name, "pointers", of_pointers, 1, pointers) ||
        integers(args[2], name, "scalars", SIZES + 3 * of_strided + 2, 0, scalars))
        return NULL;
    int64_t threads = threads_allowed(args[3]);
    if (!threads) return NULL;
    if (describe(strided, of_strided, type, pointers, scalars, &scan)) return NULL;
    const int64_t *others = pointers + of_strided + 5;
    char *gradients[5];
    if (backward) {
        scan.final_grad = (const float *)(uintptr_t)others[0];
        scan.initial_grad = (float *)(uintptr_t)others[1];
        for (int i = 0; i < 5; i++) gradients[i] = (char *)(uintptr_t)others[2 + i];
    } else {
        scan.final = (float *)(uintptr_t)others[0];
    }
    scan.offsets = copied_offsets(others[-1], scalars[SEQUENCES], scan.time);
    if (!scan.offsets) return NULL;
    for (int64_t s = 0; s < scan.sequences; s++)
        scan.pieces = larger(scan.pieces, ceil_div(scan.offsets[s + 1] - scan.offsets[s], scan.steps));
    threads = threads_worth(&scan, threads);
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    if (scan.batch && scan.channels && scan.time)
        status = backward ? run_backward(&scan, threads, gradients) : run_forward(&scan, threads);
    Py_END_ALLOW_THREADS
    return finished(status, scan.offsets);
}

PYTHON_FUNCTION(selective_scan_forward, call(args, count, 0))
PYTHON_FUNCTION(selective_scan_backward, call(args, count, 1))

static PyMethodDef functions[] = {
    FUNCTION_ROW(selective_scan_forward,
     "selective_scan_forward(dtype, pointers, scalars, threads)\n\n"
     "The output and the final state of a selective scan. Pointers and scalars are those that\n"
     "scan_registry.kernels.selective_scan.op.cpu names. Raises as forward."),
    FUNCTION_ROW(selective_scan_backward,
     "selective_scan_backward(dtype, pointers, scalars, threads)\n\n"
     "The gradients of a selective scan. As selective_scan_forward."),
    {NULL, NULL, 0, NULL}};

ADD_FUNCTIONS(functions)
