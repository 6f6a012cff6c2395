/* What a call without options depends on, read from its tensors at the least cost.
 *
 * A call's plan is looked up by dtype, device, shape, strides and alignment. Asking torch for them one by
 * one in Python, and hashing them, costs more than the launch. Here they come all at once, through DLPack's
 * table of C functions, which torch has on its tensors' type from 2.10 on, and become a few integers in a
 * row. Nothing of torch's is linked; the declarations below are those of DLPack 1.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    void *data;
    int32_t device_type, device;
    int32_t dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Tensor;

typedef struct {
    uint32_t major, minor;
    void *earlier;
    void *allocate, *export_managed, *import_managed;
    int (*read)(void *object, Tensor *tensor); /* -1 with an exception; does not own what it reads */
    void *current_stream;
} Exchange;

enum { CPU = 1, CUDA = 2, PINNED = 3, FLOAT = 2, BFLOAT = 4 };
enum { MOST = 8, MOST_DIMENSIONS = 16, HEAD = 3, ALIGNMENT = 15 };

typedef struct {
    PyObject *items[MOST];
    Py_ssize_t count;
} Objects;

static Objects types, watchers;
static const Exchange *exchange; /* NULL: this torch has none, and no call is a plain one */
static PyObject *is_neg;

/* The results of all below: 1 found, 0 not what a plain call has, -1 with an exception. */

static int is_type(PyTypeObject *type) {
    for (Py_ssize_t i = 0; i < types.count; i++)
        if (types.items[i] == (PyObject *)type) return 1;
    return 0;
}

static int negation(PyObject *truth) {
    if (!truth) return -1;
    const int active = PyObject_IsTrue(truth);
    Py_DECREF(truth);
    return active < 0 ? -1 : !active;
}

static int nobody_watches(void) {
    for (Py_ssize_t i = 0; i < watchers.count; i++) {
        const int status = negation(PyObject_CallNoArgs(watchers.items[i]));
        if (status < 1) return status;
    }
    return 1;
}

static int read_tensor(PyObject *object, Tensor *tensor) {
    const int status = negation(PyObject_CallFunctionObjArgs(is_neg, object, NULL));
    if (status < 1) return status;
    if (exchange->read(object, tensor)) return -1;
    const int real = tensor->code == FLOAT || tensor->code == BFLOAT;
    const int here = tensor->device_type >= CPU && tensor->device_type <= PINNED;
    /* Without an address there is nothing, or it stands for zeros. */
    return real && here && tensor->lanes == 1 && tensor->dimensions <= MOST_DIMENSIONS &&
           tensor->data != NULL;
}

static int read_both(PyObject *const *args, Tensor *gates, Tensor *tokens) {
    int status;
    if (!exchange || !is_type(Py_TYPE(args[0])) || !is_type(Py_TYPE(args[1]))) return 0;
    if ((status = nobody_watches()) < 1 || (status = read_tensor(args[0], gates)) < 1 ||
        (status = read_tensor(args[1], tokens)) < 1)
        return status;
    return gates->code == tokens->code && gates->bits == tokens->bits &&
           gates->device_type == tokens->device_type && gates->device == tokens->device &&
           gates->dimensions == tokens->dimensions &&
           !memcmp(gates->shape, tokens->shape, sizeof(int64_t) * (size_t)gates->dimensions);
}

static PyObject *signature(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Tensor gates, tokens;
    (void)module;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "signature takes two tensors, got %zd arguments", count);
    const int status = read_both(args, &gates, &tokens);
    if (status < 0) {
        /* Sparse and nested tensors, and batches that transforms map over, cannot be read so. What else
         * they are is for others to say. */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_BufferError))
            return NULL;
        PyErr_Clear();
    }
    if (status < 1) Py_RETURN_NONE;
    const size_t n = (size_t)gates.dimensions;
    const uint64_t at[2] = {(uint64_t)(uintptr_t)gates.data + gates.offset,
                            (uint64_t)(uintptr_t)tokens.data + tokens.offset};
    int64_t words[HEAD + 3 * MOST_DIMENSIONS] = {
        gates.code << 8 | gates.bits, (int64_t)gates.device_type << 32 | gates.device,
        (int64_t)((at[0] | at[1]) & ALIGNMENT)};
    memcpy(words + HEAD, gates.shape, n * sizeof *words);
    memcpy(words + HEAD + n, gates.strides, n * sizeof *words);
    memcpy(words + HEAD + 2 * n, tokens.strides, n * sizeof *words);
    return Py_BuildValue("y#KK", (const char *)words, (Py_ssize_t)((HEAD + 3 * n) * sizeof *words),
                         (unsigned long long)at[0], (unsigned long long)at[1]);
}

static int fits(PyObject *tuple) {
    if (PyTuple_Size(tuple) <= MOST) return 1;
    PyErr_Format(PyExc_ValueError, "at most %d objects are taken, %zd were given", MOST,
                 PyTuple_Size(tuple));
    return 0;
}

static void take(Objects *into, PyObject *tuple) {
    into->count = PyTuple_Size(tuple);
    for (Py_ssize_t i = 0; i < into->count; i++) {
        into->items[i] = PyTuple_GetItem(tuple, i);
        Py_INCREF(into->items[i]); /* for good: modules are not unloaded */
    }
}

static PyObject *bind(PyObject *module, PyObject *args) {
    PyObject *of_types, *of_watchers, *negated, *capsule;
    const Exchange *table = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!OO:bind", &PyTuple_Type, &of_types, &PyTuple_Type, &of_watchers,
                          &negated, &capsule))
        return NULL;
    if (capsule != Py_None && !(table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api")))
        return NULL;
    if (!fits(of_types) || !fits(of_watchers)) return NULL;
    take(&types, of_types);
    take(&watchers, of_watchers);
    Py_INCREF(negated);
    is_neg = negated;
    exchange = table && table->major == 1 ? table : NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS,
     "bind(types, watchers, is_neg, exchange)\n\nThe types of plain tensors; functions that return "
     "something true while somebody watches or\nchanges what is dispatched; torch.Tensor.is_neg; and "
     "the type's __dlpack_c_exchange_api__,\nor None."},
    {"signature", (PyCFunction)(void (*)(void))signature, METH_FASTCALL,
     "signature(gates, tokens) -> (bytes, int, int) | None\n\nWhat the plan of a call on two tensors "
     "depends on, and their addresses; None unless they\nare plain, of one real dtype and one shape, on "
     "one device, in memory, and nobody watches."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                 "_signature",
                                 "What a call without options depends on.",
                                 0,
                                 functions,
                                 slots,
                                 NULL,
                                 NULL,
                                 NULL};

PyMODINIT_FUNC PyInit__signature(void) { return PyModuleDef_Init(&definition); }
