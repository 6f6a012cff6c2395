/* Calls on a number of plain tensors, of which some may be missing, without derivatives, at the least cost.
 *
 * As on the fast path, what a call does is planned once for all calls alike, and found again here.
 */
#pragma once
#include "fast_path.h"

enum { MOST_RANK = 4, TENSOR_HEAD = 4, TENSOR_WORDS = 1 + 2 * MOST_RANK };

typedef struct {
    PyObject_HEAD
    Torch torch; /* without an exchange no call takes this path */
    PyObject *types, *observers, *choice, *plan, *tracking;
    int count;                  /* tensors of a call */
    unsigned long long aligned; /* bits of those whose addresses a plan depends on */
    unsigned long long marks;   /* bits of those that may be booleans */
    Plans plans;
} TensorPath;

static PyTypeObject *tensor_path_type;

static PyObject *tensor_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"types",  "tensor",   "exchange", "observers", "choice",
                            "plan",   "tracking", "count",    "aligned",   "marks", NULL};
    PyObject *types, *tensor, *exchange, *observers, *choice, *plan, *tracking;
    unsigned long long aligned, marks = 0;
    int count;
    Torch torch = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OO!OOOiK|K:TensorPath", names, &PyTuple_Type, &types,
                                     &PyType_Type, &tensor, &exchange, &PyTuple_Type, &observers, &choice,
                                     &plan, &tracking, &count, &aligned, &marks))
        return NULL;
    if (count < 1 || count > MOST_TENSORS)
        return PyErr_Format(PyExc_ValueError, "%d tensors; there are at most %d", count, MOST_TENSORS);
    if (are_tensors(types, tensor) || take_torch(&torch, (PyTypeObject *)tensor, exchange)) return NULL;
    TensorPath *self = (TensorPath *)allocate_object(type);
    if (!self) return NULL;
    self->torch = torch;
    self->count = count;
    self->aligned = aligned;
    self->marks = marks;
    self->types = Py_NewRef(types);
    self->observers = Py_NewRef(observers);
    self->choice = Py_NewRef(choice);
    self->plan = Py_NewRef(plan);
    self->tracking = Py_NewRef(tracking);
    return (PyObject *)self;
}

static void tensor_path_dealloc(PyObject *object) {
    TensorPath *self = (TensorPath *)object;
    forget_plans(&self->plans);
    Py_XDECREF(self->types);
    Py_XDECREF(self->observers);
    Py_XDECREF(self->choice);
    Py_XDECREF(self->plan);
    Py_XDECREF(self->tracking);
    release(object);
}

/* Read all tensors, and fill the key but for its head. 1 yes, 0 not what this path takes, -1 with an exception. */
static int read_all(const TensorPath *self, PyObject *const *tensors, Tensor *first, uint64_t *addresses, Key *key) {
    int64_t alignment = 0;
    int tracked = 0, found = 0;
    key->count = TENSOR_HEAD;
    for (int i = 0; i < self->count; i++) {
        Tensor tensor;
        addresses[i] = 0;
        const int status = append_tensor(key, &self->torch, self->types, tensors[i], MOST_RANK, &tensor);
        if (status < 1) return status;
        if (tensors[i] == Py_None) continue;
        if (tensor.code == BOOL && !(self->marks >> i & 1)) return 0;
        if (!found) *first = tensor;
        if (tensor.device_type != first->device_type || tensor.device != first->device) return 0;
        found = 1;
        if (!tracked && (tracked = requires_grad(&self->torch, tensors[i])) < 0) return -1;
        addresses[i] = address(&tensor);
        if (self->aligned >> i & 1) alignment |= (int64_t)(addresses[i] & ALIGNMENT);
    }
    _Static_assert(TENSOR_HEAD + MOST_TENSORS * TENSOR_WORDS <= MOST_WORDS, "a key has room for all tensors");
    if (!found) return 0;
    if (tracked && (tracked = is_true(PyObject_CallNoArgs(self->tracking)))) return tracked < 0 ? -1 : 0;
    key->words[0] = alignment;
    key->words[1] = (int64_t)first->device_type << 32 | first->device;
    return 1;
}

static const Planned *tensor_plan_of(TensorPath *self, Key *key, PyObject *const *args) {
    PyObject *choice = PyObject_CallNoArgs(self->choice);
    if (!choice) return NULL;
    key->words[2] = args[0] == Py_True;
    key->words[3] = (int64_t)(intptr_t)choice;
    const Planned *planned = find_planned(&self->plans, key);
    if (!planned) {
        PyObject *plan = called(self->plan, args, self->count + 1);
        if (plan) planned = keep_planned(&self->plans, key, plan, choice);
        Py_XDECREF(plan);
    }
    Py_DECREF(choice);
    return planned;
}

static PyObject *tensor_path_run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    TensorPath *self = (TensorPath *)object;
    if (count != self->count + 1)
        return PyErr_Format(PyExc_TypeError, "run takes a flag and %d tensors, got %zd arguments", self->count, count);
    if (!self->torch.exchange || (args[0] != Py_True && args[0] != Py_False)) Py_RETURN_NONE;
    Key key;
    Tensor first;
    uint64_t addresses[MOST_TENSORS];
    int status = dispatch_is_trivial(self->observers);
    if (status == 1) status = read_all(self, args + 1, &first, addresses, &key);
    if (status < 0 && !cannot_be_read()) return NULL;
    if (status < 1) Py_RETURN_NONE;
    const Planned *planned = tensor_plan_of(self, &key, args);
    if (!planned) return NULL;
    PyObject *plan = Py_NewRef(planned->plan), *made = NULL;
    if (Py_TYPE(plan) != fast_launch_type) made = called(plan, args + 1, self->count);
    else if (((const FastLaunch *)plan)->inputs == self->count)
        made = fast_launch_run((const FastLaunch *)plan, self->torch.exchange, args + 1, addresses, &first);
    else PyErr_Format(PyExc_TypeError, "a launch of %d tensors", ((const FastLaunch *)plan)->inputs);
    Py_DECREF(plan);
    return made;
}

static PyMethodDef tensor_path_methods[] = {
    {"run", (PyCFunction)(void (*)(void))tensor_path_run, METH_FASTCALL,
     "run(flag, *tensors) -> result | None\n\nDo what is planned for the call. None unless the tensors that are not "
     "None are plain,\non one device, in memory, without derivatives, and dispatch is trivial."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot tensor_path_slots[] = {
    {Py_tp_new, tensor_path_new},
    {Py_tp_dealloc, tensor_path_dealloc},
    {Py_tp_methods, tensor_path_methods},
    {Py_tp_doc, "Calls on a number of plain tensors, without derivatives."},
    {0, NULL}};

static PyType_Spec tensor_path_spec = {"scan_registry.hardware._launcher.TensorPath", sizeof(TensorPath), 0,
                                       Py_TPFLAGS_DEFAULT, tensor_path_slots};
