/* causal_conv1d on CPUs, forward, backward and step by step: see
 * kernels/causal_conv1d/reference.py.
 *
 * Vectors run along channels, which do not influence one another: how they are shared out among
 * threads does not change a bit of the results. What is read is read once, and what is written is
 * written once.
 *
 *   causal_conv1d.c            arguments
 *   problem.h                  a problem as numbers
 *   level.h                    a task, at each level of vector instructions
 *   cpu_blocks.h               between memory and blocks of channels
 */
#include "cpu_arguments.h"
#include "problem.h"

#define LEVEL_BODY "causal_conv1d/cpu/level.h"
#include "cpu_levels.h"

typedef void Task(const void *problem, int64_t task, char *scratch);
static Task *const forward_tasks[] = OF_LEVELS(forward_task);
static Task *const backward_tasks[] = OF_LEVELS(backward_task);
static Task *const update_tasks[] = OF_LEVELS(update_task);
static Task *const sum_tasks[] = OF_LEVELS(sum_task);

/* Elements that are worth a thread; tasks per thread; and channels of a task, at least. */
enum { THREAD_WORK = 65536, TASKS = 4, LEAST_RUN = 16 };

static int64_t threads_worth(double elements, int64_t threads) {
    const double work = elements / THREAD_WORK;
    return smaller(smaller(threads, MOST_THREADS), work < 1 ? 1 : (int64_t)work);
}

/* Run the tasks of a pass; LANES are at most 8. */
static int run_conv(Conv *conv, int backward, int64_t threads, char *weight_grad, char *bias_grad) {
    const double elements = (double)conv->batch * (double)conv->channels * (double)conv->time;
    Work work = {.problem = conv, .threads = threads_worth(elements, threads)};
    const int64_t wanted = ceil_div(work.threads > 1 ? TASKS * work.threads : 1, conv->batch);
    const int64_t fair = ceil_div(ceil_div(conv->channels, wanted), LEAST_RUN) * LEAST_RUN;
    conv->run = smaller(TOGETHER, fair);
    work.tasks = conv->batch * ceil_div(conv->channels, conv->run);
    work.scratch_bytes = 4 * 4 * (STEPS + 2 * MOST_WIDTH) * 8; /* panels */
    work.scratch_bytes += 64 * TOGETHER * MOST_WIDTH + 16 * LINE;
    work.run = (backward ? backward_tasks : forward_tasks)[level_in_use];
    if (!backward) return run_all(&work);
    const int64_t channels = conv->channels;
    const Gradient gradients[] = {
        {{NULL, weight_grad, conv->weight_type, 1, conv->batch, channels * conv->width},
         &conv->weight_sums},
        {{NULL, bias_grad, conv->weight_type, 1, conv->batch, channels}, &conv->bias_sums},
    };
    return run_and_sum(&work, gradients, 2, sum_tasks[level_in_use]);
}

/* --- Arguments -------------------------------------------------------------------------------- */

/* The dtypes of x and the weight, and the number of threads. */
static int common(PyObject *const *args, Py_ssize_t count, const char *name, int *type,
                  int *weight_type, int64_t *threads) {
    if (count != 5) {
        PyErr_Format(PyExc_TypeError,
                     "%s takes dtype, weight_dtype, pointers, scalars, threads; got %zd arguments",
                     name, count);
        return -1;
    }
    *type = type_named(args[0]);
    *weight_type = *type < 0 ? -1 : type_named(args[1]);
    if (*weight_type < 0) return -1;
    if (types[*type].state != FLOAT32)
        return fail("dtype %R; accepted are float32, bfloat16, float16", args[0]);
    if (*weight_type != *type && *weight_type != FLOAT32)
        return fail("weight_dtype %R with dtype %R; accepted is the same, or float32", args[1],
                    args[0]);
    *threads = threads_allowed(args[4]);
    return *threads ? 0 : -1;
}

static Tensor tensor_of(int64_t pointer, int type, const int64_t *strides) {
    Tensor tensor = {(char *)(uintptr_t)pointer, type, {0}};
    for (int d = 0; d < 3; d++)
        tensor.stride[d] = (int64_t)((uint64_t)strides[d] * (uint64_t)types[type].bytes);
    return tensor;
}

static int check_sizes(const int64_t *sizes, int count, int64_t width) {
    double elements = 1;
    for (int i = 0; i < count; i++) {
        if (sizes[i] < 0) return fail("size %d is %lld", i, (long long)sizes[i]);
        if (i < 3) elements *= (double)larger(sizes[i], 1);
    }
    if (elements > 0x1p52) return fail("the sizes multiply to too many elements");
    if (width < LEAST_WIDTH || width > MOST_WIDTH)
        return fail("width is %lld; accepted are %d to %d", (long long)width, LEAST_WIDTH,
                    MOST_WIDTH);
    return 0;
}

enum { BATCH, CHANNELS, TIME, WIDTH, SEQUENCES, SILU, SIZES };

/* Forward: x, y, weight, bias, initial state, seq_idx, offsets, final state. Backward: x,
 * y_grad, weight, bias, initial state, seq_idx, offsets, x_grad, final_state_grad, and the
 * gradients of weight, bias and initial state. The strides are those of x, y or y_grad, and
 * x_grad. */
static PyObject *call(PyObject *const *args, Py_ssize_t count, int backward) {
    const char *name = backward ? "causal_conv1d_backward" : "causal_conv1d_forward";
    int64_t p[12], scalars[SIZES + 9], threads;
    Conv conv = {0};
    int type, weight_type;
    if (common(args, count, name, &type, &weight_type, &threads) ||
        integers(args[2], name, "pointers", backward ? 12 : 8, 1, p) ||
        integers(args[3], name, "scalars", SIZES + (backward ? 9 : 6), 0, scalars) ||
        check_sizes(scalars, SIZES, scalars[WIDTH]))
        return NULL;
    conv.batch = scalars[BATCH], conv.channels = scalars[CHANNELS], conv.time = scalars[TIME];
    conv.width = scalars[WIDTH], conv.sequences = scalars[SEQUENCES], conv.silu = !!scalars[SILU];
    if (!p[0] || !p[1] || !p[2] || (backward && !p[7])) {
        fail("a pointer of %s is null", name);
        return NULL;
    }
    if (conv.sequences && (conv.batch > 1 || p[5])) {
        fail("sequences are packed, so that batch must be 1 and seq_idx null");
        return NULL;
    }
    const int64_t of_state[] = {conv.channels * (conv.width - 1), conv.width - 1, 1};
    conv.tensor[X] = tensor_of(p[0], type, scalars + SIZES);
    conv.tensor[backward ? Y_GRAD : Y] = tensor_of(p[1], type, scalars + SIZES + 3);
    conv.tensor[INITIAL] = tensor_of(p[4], type, of_state);
    conv.weight = (const char *)(uintptr_t)p[2], conv.bias = (const char *)(uintptr_t)p[3];
    conv.weight_type = weight_type, conv.seq_idx = (const int32_t *)(uintptr_t)p[5];
    if (backward) {
        conv.tensor[X_GRAD] = tensor_of(p[7], type, scalars + SIZES + 6);
        conv.tensor[FINAL_GRAD] = tensor_of(p[8], type, of_state);
        conv.tensor[INITIAL_GRAD] = tensor_of(p[11], type, of_state);
    } else {
        conv.tensor[FINAL] = tensor_of(p[7], type, of_state);
    }
    conv.offsets = copied_offsets(p[6], conv.sequences, conv.time);
    if (!conv.offsets) return NULL;
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    if (conv.batch && conv.channels && conv.time)
        status = run_conv(&conv, backward, threads, (char *)(uintptr_t)p[9 * backward],
                          (char *)(uintptr_t)p[10 * backward]);
    Py_END_ALLOW_THREADS
    return finished(status, conv.offsets);
}

PYTHON_FUNCTION(causal_conv1d_forward, call(args, count, 0))
PYTHON_FUNCTION(causal_conv1d_backward, call(args, count, 1))

/* Pointers: x, state, y, weight, bias, positions, indices. Strides: of the first three. */
static PyObject *causal_conv1d_update(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    enum { ROWS, OF_CHANNELS, STEPS_NOW, OF_WIDTH, SLOTS, LENGTH, ACTIVE, NUMBERS };
    const char *name = "causal_conv1d_update";
    int64_t p[7], scalars[NUMBERS + 9], threads;
    int type, weight_type;
    (void)module;
    if (common(args, count, name, &type, &weight_type, &threads) ||
        integers(args[2], name, "pointers", 7, 1, p) ||
        integers(args[3], name, "scalars", NUMBERS + 9, 0, scalars) ||
        check_sizes(scalars, NUMBERS, scalars[OF_WIDTH]))
        return NULL;
    Update update = {
        .batch = scalars[ROWS],
        .channels = scalars[OF_CHANNELS],
        .time = scalars[STEPS_NOW],
        .width = scalars[OF_WIDTH],
        .slots = scalars[SLOTS],
        .length = scalars[LENGTH],
        .silu = !!scalars[ACTIVE],
        .x = tensor_of(p[0], type, scalars + NUMBERS),
        .state = tensor_of(p[1], type, scalars + NUMBERS + 3),
        .y = tensor_of(p[2], type, scalars + NUMBERS + 6),
        .weight = (const char *)(uintptr_t)p[3],
        .bias = (const char *)(uintptr_t)p[4],
        .weight_type = weight_type,
        .positions = (const int32_t *)(uintptr_t)p[5],
        .indices = (const int32_t *)(uintptr_t)p[6],
    };
    if (!p[0] || !p[1] || !p[2] || !p[3]) {
        fail("a pointer of %s is null", name);
        return NULL;
    }
    if (update.length < update.width - 1 || (!update.indices && update.slots != update.batch)) {
        fail("a state of %lld slots and %lld inputs, with batch %lld and width %lld",
             (long long)update.slots, (long long)update.length, (long long)update.batch,
             (long long)update.width);
        return NULL;
    }
    const double elements = (double)update.batch * (double)update.channels *
                            (double)(update.time + update.length);
    Work work = {.problem = &update, .run = update_tasks[level_in_use]};
    work.tasks = ceil_div(update.channels, TOGETHER);
    work.threads = threads_worth(elements, threads);
    work.scratch_bytes = 4 * 3 * (STEPS + 2 * MOST_WIDTH) * 8 + 4 * LINE;
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    if (update.batch && update.channels && update.time) status = run_all(&work);
    Py_END_ALLOW_THREADS
    return finished(status, NULL);
}

static PyMethodDef functions[] = {
    FUNCTION_ROW(causal_conv1d_forward,
     "causal_conv1d_forward(dtype, weight_dtype, pointers, scalars, threads)\n\n"
     "The output and the final state of a causal convolution. Pointers and scalars are those\n"
     "that scan_registry.kernels.causal_conv1d.op.cpu names. Raises as forward."),
    FUNCTION_ROW(causal_conv1d_backward,
     "causal_conv1d_backward(dtype, weight_dtype, pointers, scalars, threads)\n\n"
     "The gradients of a causal convolution. As causal_conv1d_forward."),
    FUNCTION_ROW(causal_conv1d_update,
     "causal_conv1d_update(dtype, weight_dtype, pointers, scalars, threads)\n\n"
     "The output of some steps, and the new states, in place. As causal_conv1d_forward."),
    {NULL, NULL, 0, NULL}};

ADD_FUNCTIONS(functions)
