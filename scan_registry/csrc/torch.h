/* What torch is asked at every call on the fast path, past what a call of Python's costs.
 *
 * Tensors are read through DLPack's table of C functions, which torch has on their type from 2.10 on, and through
 * that type's own entries. Nothing of torch's is linked; the declarations of the table are those of DLPack 1.
 */
#pragma once
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
    int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} Exchange;

enum { CPU = 1, CUDA = 2, PINNED = 3, INTEGER = 0, FLOAT = 2, BFLOAT = 4, BOOL = 6 };
enum { MOST_DIMENSIONS = 16 };

typedef struct {
    const Exchange *exchange;
    PyCFunction is_neg;
    getter requires_grad;
    void *closure;
} Torch;

static uint64_t address(const Tensor *tensor) {
    return (uint64_t)(uintptr_t)tensor->data + tensor->offset;
}

/* The results of what follows: 1 yes, 0 no, -1 with an exception. */

static int is_true(PyObject *truth) {
    if (!truth) return -1;
    const int value = PyObject_IsTrue(truth);
    Py_DECREF(truth);
    return value;
}

static int is_false(PyObject *truth) {
    const int value = is_true(truth);
    return value < 0 ? -1 : !value;
}

/* From the type of tensors, and its table or None. -1 with an exception. Where anything is missing there is no
 * exchange. */
static int take_torch(Torch *torch, PyTypeObject *tensor, PyObject *exchange) {
    const Exchange *table = NULL;
    if (exchange != Py_None && !(table = PyCapsule_GetPointer(exchange, "dlpack_exchange_api"))) return -1;
    const PyMethodDef *method = PyType_GetSlot(tensor, Py_tp_methods);
    for (; method && method->ml_name; method++)
        if (!strcmp(method->ml_name, "is_neg") && method->ml_flags == METH_NOARGS)
            torch->is_neg = method->ml_meth;
    const PyGetSetDef *attribute = PyType_GetSlot(tensor, Py_tp_getset);
    for (; attribute && attribute->name; attribute++)
        if (!strcmp(attribute->name, "requires_grad"))
            torch->requires_grad = attribute->get, torch->closure = attribute->closure;
    const int all = table && table->major == 1 && torch->is_neg && torch->requires_grad;
    torch->exchange = all ? table : NULL;
    return 0;
}

static int requires_grad(const Torch *torch, PyObject *tensor) {
    return is_true(torch->requires_grad(tensor, torch->closure));
}

/* Whether it is a tensor of real numbers, integers or booleans, as they are, in memory. */
static int read_any(const Torch *torch, PyObject *object, Tensor *tensor) {
    const int status = is_false(torch->is_neg(object, NULL));
    if (status < 1) return status;
    if (torch->exchange->read(object, tensor)) return -1;
    const int plain = tensor->code == FLOAT || tensor->code == BFLOAT || tensor->code == INTEGER || tensor->code == BOOL;
    const int here = tensor->device_type >= CPU && tensor->device_type <= PINNED;
    /* Without an address there is nothing, or it stands for zeros. */
    return plain && here && tensor->lanes == 1 && tensor->dimensions <= MOST_DIMENSIONS &&
           tensor->data != NULL;
}
