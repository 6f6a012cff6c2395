/* linear_scan on CPUs: x[t] = gates[t] * x[t-1] + tokens[t], its gradients, and sums of those.
 *
 *              time
 *         +------------------->   A group is a block of lanes (rows, or neighbouring channels) at
 *   lanes | +-------+-------+--   one (outer, batch). A thread carries it through time, a panel at
 *         | | panel |  ...  |     a time: rows of lanes, one per step, in the state type, in the
 *         | +-------+-------+--   cache. Vectors run along the lanes, so that each lane is computed
 *         v                       step by step, as the recurrence is written.
 *
 * A panel is filled by a copy: transposed in registers where time has unit stride, widened where
 * elements are narrower than the state, gathered where nothing has unit stride. Where lanes have,
 * in the state type, there is no copy: the rows are those of the memory. Outputs go the same way
 * back. So the bytes moved are those of the tensors, once: 3 elements per step forward, 5 backward,
 * 2 in a reduction.
 *
 * Order in time is settled before the first step: for reverse, and against it for backward, strides
 * along time are negated and offsets mirrored, so that every walk goes up. Groups, and runs of
 * packed sequences, are shared out among threads that live for one call. How they are shared out
 * does not change a bit of the results.
 *
 *   linear_scan.c     arguments
 *   plan.h            how a problem is cut into tasks
 *   walks.h           one task: a group through time, or some tiles of a reduction
 *   panels.h          between memory and panels
 *   kernels.h         the levels of vector instructions; for each of them,
 *   level.h           the inner loops; for each state type,
 *   recurrence.h      the multiply-adds
 */
#include "cpu_arguments.h"
#include "plan.h"

/* --- Arguments -------------------------------------------------------------------------------- */

enum { OF_GATES, OF_TOKENS, OF_STATE }; /* whose type a tensor's elements have */

typedef struct {
    const char *name;
    int tensor, type;
    int strides; /* which of the direction's */
    int needed;  /* whether it must be given */
} Parameter;

/* As in spec.parameters. The pointers after those of tensors are offsets and maybe a workspace. */
typedef struct {
    const char *name;
    int tensors, strided, pointers;
    Parameter parameter[8];
    int rows, panels; /* of scratch memory, but for the sums of a reduction */
    void (*run)(const void *problem, int64_t task, char *scratch);
} Direction;

static const Direction forward_direction = {
    .name = "forward",
    .tensors = 5,
    .strided = 4,
    .pointers = 7,
    .rows = 1,
    .panels = 2,
    .run = forward_task,
    .parameter = {{"gates", GATES, OF_GATES, 0, 1},
                  {"tokens", TOKENS, OF_TOKENS, 1, 1},
                  {"initial_state", INITIAL, OF_STATE, 3, 0},
                  {"states", STATES, OF_TOKENS, 2, 1},
                  {"final_state", FINAL, OF_STATE, 3, 0}},
};

static const Direction backward_direction = {
    .name = "backward",
    .tensors = 8,
    .strided = 5,
    .pointers = 10,
    .rows = 3,
    .panels = 3,
    .run = backward_task,
    .parameter = {{"gates", GATES, OF_GATES, 0, 1},
                  {"states", STATES, OF_TOKENS, 1, 0},
                  {"states_grad", STATES_GRAD, OF_TOKENS, 2, 1},
                  {"initial_state", INITIAL, OF_STATE, 4, 0},
                  {"final_state_grad", FINAL_GRAD, OF_STATE, 4, 0},
                  {"gates_grad", GATES_GRAD, OF_GATES, 3, 0},
                  {"tokens_grad", TOKENS_GRAD, OF_TOKENS, 3, 0},
                  {"initial_state_grad", INITIAL_GRAD, OF_STATE, 4, 0}},
};

static const Direction reduction_direction = {
    .name = "reduction",
    .tensors = 4,
    .strided = 4,
    .pointers = 5,
    .panels = 2,
    .run = reduction_task,
    .parameter = {{"tokens_grad", TOKENS_GRAD, OF_TOKENS, 0, 1},
                  {"states", STATES, OF_TOKENS, 1, 1},
                  {"initial_state", INITIAL, OF_STATE, 3, 0},
                  {"gates_grad", GATES_GRAD, OF_STATE, 2, 1}},
};

/* Fill in the scan from the values of pointers and scalars. */
static int describe(const Direction *direction, int type, int gates_type, const int64_t *pointers,
                    const int64_t *scalars, Scan *scan) {
    static const char *const sizes[] = {"outer", "batch", "channels", "time", "sequences"};
    const int type_of[] = {gates_type, type, types[type].state}; /* OF_... */
    double product = 1;
    for (int i = 0; i < 5; i++) {
        if (scalars[i] < 0) return fail("%s is %lld", sizes[i], (long long)scalars[i]);
        if (i < DIMENSIONS) product *= (double)(scan->size[i] = scalars[i]);
    }
    if (product > 0x1p52) return fail("the sizes multiply to too many elements");
    for (int i = 0; i < direction->tensors; i++) {
        const Parameter *parameter = &direction->parameter[i];
        Tensor *tensor = &scan->tensor[parameter->tensor];
        tensor->at = (char *)(uintptr_t)pointers[i];
        tensor->type = type_of[parameter->type];
        if (parameter->needed && !tensor->at && product > 0)
            return fail("%s of %s is null", parameter->name, direction->name);
        for (int d = 0; d < DIMENSIONS; d++)
            tensor->stride[d] = (int64_t)((uint64_t)scalars[5 + 4 * parameter->strides + d] *
                                          (uint64_t)types[tensor->type].bytes);
    }
    if (scan->tensor[GATES_GRAD].at && !scan->tensor[STATES].at && product > 0)
        return fail("states of %s is null, which gates_grad needs", direction->name);
    scan->elements = (int64_t)product;
    scan->state = types[type].state;
    scan->sequences = scalars[4] ? scalars[4] : 1;
    return 0;
}

static int layout_named(PyObject *name) {
    for (int layout = 0; layout < 2; layout++)
        if (PyUnicode_Check(name) &&
            !PyUnicode_CompareWithASCIIString(name, layout ? "channel_last" : "time_last"))
            return layout;
    return fail("layout %R; accepted are 'time_last' and 'channel_last'", name);
}

static PyObject *call(const Direction *direction, PyObject *const *args, Py_ssize_t count) {
    const int reduces = direction == &reduction_direction;
    int64_t pointers[10], scalars[26];
    Scan scan = {.parts = 1};
    Work work = {.run = direction->run};
    if (count != 5 + reduces)
        return PyErr_Format(PyExc_TypeError,
                            "%s takes dtype, gates_dtype, pointers, scalars, threads%s; got %zd "
                            "arguments",
                            direction->name, reduces ? ", layout" : "", count);
    const int type = type_named(args[0]);
    const int gates_type = type < 0 ? -1 : type_named(args[1]);
    if (gates_type < 0) return NULL;
    if (gates_type != type && (gates_type != FLOAT32 || types[type].state != FLOAT32)) {
        fail("gates_dtype %R with dtype %R; accepted is the same, or float32 for narrower ones",
             args[1], args[0]);
        return NULL;
    }
    const int integer_count = 5 + DIMENSIONS * direction->strided + reduces + 1;
    if (integers(args[2], direction->name, "pointers", direction->pointers, 1, pointers) ||
        integers(args[3], direction->name, "scalars", integer_count, 0, scalars))
        return NULL;
    const int64_t threads = threads_allowed(args[4]);
    if (!threads) return NULL;
    const int64_t flags = scalars[integer_count - 1];
    const int layout = reduces ? layout_named(args[5]) : 0;
    if (layout < 0 || describe(direction, type, gates_type, pointers, scalars, &scan)) return NULL;
    if (flags & ~(int64_t)1) {
        fail("flags is %lld; accepted are 0, and 1 for reverse", (long long)flags);
        return NULL;
    }
    if (reduces && (scan.parts = scalars[integer_count - 2]) < 1) {
        fail("groups is %lld", (long long)scan.parts);
        return NULL;
    }
    if (scan.elements == 0) Py_RETURN_NONE;
    scan.offsets = copied_offsets(pointers[direction->tensors], scalars[4], scan.size[TIME]);
    if (!scan.offsets) return NULL;
    scan.reverse = (int)flags;
    work.threads = threads_worth(&scan, threads);
    int status;
    Py_BEGIN_ALLOW_THREADS
    if (reduces)
        plan_reduction(&scan, &work, layout);
    else
        plan_walk(&scan, &work, direction == &backward_direction);
    status = run_scan(&work, &scan, direction->rows, direction->panels);
    Py_END_ALLOW_THREADS
    return finished(status, scan.offsets);
}

PYTHON_FUNCTION(forward, call(&forward_direction, args, count))
PYTHON_FUNCTION(backward, call(&backward_direction, args, count))
PYTHON_FUNCTION(reduction, call(&reduction_direction, args, count))

static PyMethodDef functions[] = {
    FUNCTION_ROW(forward,
     "forward(dtype, gates_dtype, pointers, scalars, threads)\n\n"
     "States, and the final state, of a scan. Pointers (addresses, or None) and scalars are those\n"
     "of kernels.linear_scan.spec.parameters; at most so many threads run. Raises TypeError or\n"
     "ValueError, and nothing has been written then, or MemoryError."),
    FUNCTION_ROW(backward,
     "backward(dtype, gates_dtype, pointers, scalars, threads)\n\n"
     "Gradients of gates, tokens and initial state. As forward."),
    FUNCTION_ROW(reduction,
     "reduction(dtype, gates_dtype, pointers, scalars, threads, layout)\n\n"
     "Partial sums of the gradient of broadcast gates, cut as LinearScanProblem.reduction says\n"
     "for this layout, \"time_last\" or \"channel_last\". As forward."),
    {NULL, NULL, 0, NULL}};

ADD_FUNCTIONS(functions)
