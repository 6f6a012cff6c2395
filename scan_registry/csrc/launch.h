/* A prepared launch: all that stays the same from call to call.
 *
 * The driver's functions arrive as addresses (see driver.py); their signatures below are the driver API's.
 */
#pragma once
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MAX_VALUES = 64, MAX_GRID_X = 0x7fffffff, MAX_GRID_YZ = 65535 };

typedef int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            void *stream, void **parameters, void **extra);
typedef int (*MemsetAsync)(uint64_t pointer, unsigned char value, size_t bytes, void *stream);
typedef int (*GetCurrent)(void **context);
typedef int (*PushCurrent)(void *context);
typedef int (*PopCurrent)(void **context);

static LaunchKernel launch_kernel;
static MemsetAsync memset_async;
static GetCurrent get_current;
static PushCurrent push_current;
static PopCurrent pop_current;

typedef struct {
    PyObject_HEAD
    void *context;
    void *function;
    unsigned grid[3], block[3], shared;
    int pointers; /* the first values, given anew at each run */
    int count;    /* of all values: pointers, integers, hidden nulls */
    int workspace; /* index of its pointer, or -1 */
    size_t workspace_bytes; /* to zero before the launch */
    uint64_t values[MAX_VALUES];
} Launch;

static PyTypeObject *launch_type;

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"context", "function", "grid", "block", "shared", "pointers",
                            "scalars", "hidden", "workspace", "workspace_bytes", NULL};
    unsigned long long context, function, workspace_bytes, grid[3];
    unsigned block[3], shared;
    int pointers, hidden, workspace;
    PyObject *scalars;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KK(KKK)(III)IiO!iiK:Launch", names, &context,
                                     &function, &grid[0], &grid[1], &grid[2], &block[0], &block[1],
                                     &block[2], &shared, &pointers, &PyTuple_Type, &scalars,
                                     &hidden, &workspace, &workspace_bytes))
        return NULL;
    const Py_ssize_t integers = PyTuple_Size(scalars);
    if (pointers < 0 || hidden < 0 || workspace >= pointers ||
        pointers + integers + hidden > MAX_VALUES) {
        PyErr_Format(PyExc_ValueError, "a launch takes at most %d parameters", MAX_VALUES);
        return NULL;
    }
    if (grid[0] > MAX_GRID_X || grid[1] > MAX_GRID_YZ || grid[2] > MAX_GRID_YZ) {
        PyErr_Format(PyExc_ValueError, "a grid of %llu x %llu x %llu blocks cannot be launched",
                     grid[0], grid[1], grid[2]);
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Launch *self = (Launch *)allocate(type, 0);
    if (!self) return NULL;
    self->context = (void *)(uintptr_t)context;
    self->function = (void *)(uintptr_t)function;
    for (int i = 0; i < 3; i++) self->grid[i] = (unsigned)grid[i];
    memcpy(self->block, block, sizeof block);
    self->shared = shared;
    self->pointers = pointers;
    self->count = pointers + (int)integers + hidden;
    self->workspace = workspace;
    self->workspace_bytes = (size_t)workspace_bytes;
    memset(self->values, 0, sizeof self->values);
    for (Py_ssize_t i = 0; i < integers; i++) {
        const long long value = PyLong_AsLongLong(PyTuple_GetItem(scalars, i));
        if (value == -1 && PyErr_Occurred()) {
            Py_DECREF(self);
            return NULL;
        }
        self->values[pointers + i] = (uint64_t)value;
    }
    return (PyObject *)self;
}

static void launch_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* In the current context, which has to be the launch's. */
static int start_here(const Launch *self, uint64_t *values, void *stream) {
    void *parameters[MAX_VALUES];
    if (self->workspace >= 0 && self->workspace_bytes) {
        const uint64_t workspace = values[self->workspace];
        const int status = memset_async(workspace, 0, self->workspace_bytes, stream);
        if (status) return status;
    }
    for (int i = 0; i < self->count; i++) parameters[i] = &values[i];
    return launch_kernel(self->function, self->grid[0], self->grid[1], self->grid[2],
                         self->block[0], self->block[1], self->block[2], self->shared, stream,
                         parameters, NULL);
}

static int start(const Launch *self, uint64_t *values, void *stream) {
    void *current = NULL;
    int status = get_current(&current);
    if (status) return status;
    if (current == self->context) return start_here(self, values, stream);
    if ((status = push_current(self->context))) return status;
    status = start_here(self, values, stream);
    const int popped = pop_current(&current);
    return status ? status : popped;
}

static PyObject *launch_run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    const Launch *self = (const Launch *)object;
    uint64_t values[MAX_VALUES];
    if (count != self->pointers + 1)
        return PyErr_Format(PyExc_TypeError, "run takes a stream and %d pointers, got %zd arguments",
                            self->pointers, count);
    if (!launch_kernel) {
        PyErr_SetString(PyExc_RuntimeError, "bind has not been called");
        return NULL;
    }
    memcpy(values, self->values, sizeof(uint64_t) * (size_t)self->count);
    for (int i = 0; i < self->pointers; i++) {
        if (args[i + 1] == Py_None) continue;
        values[i] = PyLong_AsUnsignedLongLong(args[i + 1]);
        if (values[i] == (uint64_t)-1 && PyErr_Occurred()) return NULL;
    }
    const uint64_t stream = PyLong_AsUnsignedLongLong(args[0]);
    if (stream == (uint64_t)-1 && PyErr_Occurred()) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = start(self, values, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static PyMethodDef launch_methods[] = {
    {"run", (PyCFunction)(void (*)(void))launch_run, METH_FASTCALL,
     "run(stream, *pointers) -> int\n\nZero the workspace, launch, return the driver's status: 0 or "
     "an error.\nA pointer is an address or None."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot launch_slots[] = {
    {Py_tp_new, launch_new},
    {Py_tp_dealloc, launch_dealloc},
    {Py_tp_methods, launch_methods},
    {Py_tp_doc, "A kernel launch with everything fixed but the stream and the pointers."},
    {0, NULL}};

static PyType_Spec launch_spec = {"scan_registry.hardware._launcher.Launch", sizeof(Launch), 0,
                                  Py_TPFLAGS_DEFAULT, launch_slots};
