/* The fast path of scans of plain tensors: from the tensors to the launch, at the least cost.
 *
 * A call's plan is made once, and found again by the options and by each tensor's dtype, device, shape, strides and
 * alignment. autograd is told of the results after they are computed. All this is in C, since asking torch in Python for
 * these facts one by one, and for memory and its address, costs more than the launch.
 */
#pragma once
#include "launch.h"
#include "plans.h"
#include "torch.h"

enum { ALIGNMENT = 15, MOST_TENSORS = 12, MOST_RESULTS = 2 };
enum { GATES, TOKENS, INITIAL, OFFSETS, DIM, REVERSE, FINAL, BACKEND, ARGUMENTS }; /* of a call */
enum { TENSORS = DIM }; /* tensors are the first arguments; all but gates and tokens may be None */

static void release(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(self);
    Py_DECREF(type);
}

static PyObject *allocate_object(PyTypeObject *type) {
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

/* --- FastLaunch: what a call does on a GPU ----------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Launch *launch;
    int inputs;           /* tensors that it is given */
    int places[MOST_TENSORS + MOST_RESULTS]; /* of the inputs, then the results, among the launch's pointers */
    PyObject *empty;      /* makes a tensor on the current device */
    PyObject *states;     /* arguments of empty for the states */
    PyObject *last;       /* those for the final state; None if the call returns states alone */
    PyObject *workspace;  /* those for the workspace; None if there is none */
    PyObject *refuse;     /* raises the error of a status */
    PyObject *elsewhere;  /* computes the same from any context */
} FastLaunch;

static PyTypeObject *fast_launch_type;

static PyObject *fast_launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"launch", "places",    "empty", "states", "workspace",
                            "refuse", "elsewhere", "last",  NULL};
    PyObject *launch, *given, *empty, *states, *workspace, *refuse, *elsewhere, *last = Py_None;
    long places[MOST_TENSORS + MOST_RESULTS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OO!OOO|O:FastLaunch", names, launch_type, &launch,
                                     &PyTuple_Type, &given, &empty, &PyTuple_Type, &states, &workspace,
                                     &refuse, &elsewhere, &last))
        return NULL;
    if (last != Py_None && !PyTuple_Check(last))
        return PyErr_Format(PyExc_TypeError, "last is %R; it must be a tuple or None", last);
    const int pointers = ((Launch *)launch)->pointers, zeroed = ((Launch *)launch)->workspace;
    const Py_ssize_t count = PyTuple_Size(given), results = last == Py_None ? 1 : 2;
    if (count < results || count > MOST_TENSORS + results)
        return PyErr_Format(PyExc_ValueError, "%zd places of tensors; there are at most %zd", count,
                            MOST_TENSORS + results);
    for (Py_ssize_t i = 0; i < count; i++) {
        places[i] = PyLong_AsLong(PyTuple_GetItem(given, i));
        if (places[i] == -1 && PyErr_Occurred()) return NULL;
        if (places[i] < 0 || places[i] >= pointers)
            return PyErr_Format(PyExc_ValueError, "place %ld of %d pointers", places[i], pointers);
    }
    if (PyTuple_Check(workspace) != (zeroed >= 0))
        return PyErr_Format(PyExc_ValueError, "the launch and its workspace do not go together");
    if (!get_current) return PyErr_Format(PyExc_RuntimeError, "bind has not been called");
    FastLaunch *self = (FastLaunch *)allocate_object(type);
    if (!self) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) self->places[i] = (int)places[i];
    self->inputs = (int)(count - results);
    self->launch = (Launch *)Py_NewRef(launch);
    self->empty = Py_NewRef(empty);
    self->states = Py_NewRef(states);
    self->last = Py_NewRef(last);
    self->workspace = Py_NewRef(workspace);
    self->refuse = Py_NewRef(refuse);
    self->elsewhere = Py_NewRef(elsewhere);
    return (PyObject *)self;
}

static void fast_launch_dealloc(PyObject *object) {
    FastLaunch *self = (FastLaunch *)object;
    Py_XDECREF(self->launch);
    Py_XDECREF(self->empty);
    Py_XDECREF(self->states);
    Py_XDECREF(self->last);
    Py_XDECREF(self->workspace);
    Py_XDECREF(self->refuse);
    Py_XDECREF(self->elsewhere);
    release(object);
}

/* A new tensor, and its address. */
static PyObject *made(const Exchange *exchange, PyObject *empty, PyObject *arguments, uint64_t *at) {
    Tensor tensor;
    PyObject *object = PyObject_Call(empty, arguments, NULL);
    if (object && exchange->read(object, &tensor)) Py_CLEAR(object);
    if (object) *at = address(&tensor);
    return object;
}

static int started(const FastLaunch *self, uint64_t *values, void *stream) {
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = start_here(self->launch, values, stream);
    Py_END_ALLOW_THREADS
    if (!status) return 1;
    PyObject *nothing = PyObject_CallFunction(self->refuse, "i", status);
    Py_XDECREF(nothing);
    if (nothing) PyErr_Format(PyExc_RuntimeError, "the launch failed with status %d", status);
    return 0;
}

/* What a callable makes of ``count`` arguments. */
static PyObject *called(PyObject *callable, PyObject *const *args, Py_ssize_t count) {
    PyObject *all = PyTuple_New(count);
    if (!all) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SetItem(all, i, Py_NewRef(args[i]));
    PyObject *made = PyObject_CallObject(callable, all);
    Py_DECREF(all);
    return made;
}

/* ``args`` are its inputs, and ``addresses`` theirs, null where one is None. ``there`` is a tensor on their device. */
static PyObject *fast_launch_run(const FastLaunch *self, const Exchange *exchange, PyObject *const *args,
                                 const uint64_t *addresses, const Tensor *there) {
    const Launch *launch = self->launch;
    void *current = NULL, *stream = NULL;
    if (get_current(&current) || current != launch->context)
        return called(self->elsewhere, args, self->inputs);
    if (exchange->current_stream(there->device_type, there->device, &stream)) return NULL;
    uint64_t values[MAX_VALUES];
    memcpy(values, launch->values, sizeof *values * (size_t)launch->count);
    for (int i = 0; i < self->inputs; i++) values[self->places[i]] = addresses[i];
    const int *const places = self->places + self->inputs; /* of the results */
    PyObject *workspace = NULL, *states, *last = NULL, *both = NULL;
    states = made(exchange, self->empty, self->states, &values[places[0]]);
    int ready = states != NULL;
    if (ready && self->last != Py_None) {
        last = made(exchange, self->empty, self->last, &values[places[1]]);
        ready = last && (both = PyTuple_Pack(2, states, last));
    }
    if (ready && launch->workspace >= 0) {
        workspace = made(exchange, self->empty, self->workspace, &values[launch->workspace]);
        ready = workspace != NULL;
    }
    ready = ready && started(self, values, stream);
    Py_XDECREF(workspace); /* whoever gets this memory next uses it after the kernel */
    PyObject *result = ready ? Py_NewRef(both ? both : states) : NULL;
    Py_XDECREF(both);
    Py_XDECREF(last);
    Py_XDECREF(states);
    return result;
}

static PyType_Slot fast_launch_slots[] = {
    {Py_tp_new, fast_launch_new},
    {Py_tp_dealloc, fast_launch_dealloc},
    {Py_tp_doc, "What a call on the fast path does on a GPU: allocate results, and launch."},
    {0, NULL}};

static PyType_Spec fast_launch_spec = {"scan_registry.hardware._launcher.FastLaunch", sizeof(FastLaunch), 0,
                                       Py_TPFLAGS_DEFAULT, fast_launch_slots};

/* --- FastPath: whether a call takes it, and what the call does ---------------------------- */

typedef struct {
    PyObject_HEAD
    Torch torch; /* without an exchange no call takes this path */
    PyObject *types, *observers, *backends, *choice, *plan, *tracking, *record;
    Plans plans;
} FastPath;

static PyTypeObject *fast_path_type;

/* Types whose entries are called without a look; -1 with an exception for one that is none of tensors. */
static int are_tensors(PyObject *types, PyObject *tensor) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(types); i++) {
        const int status = PyObject_IsSubclass(PyTuple_GetItem(types, i), tensor);
        if (!status) PyErr_Format(PyExc_TypeError, "type %zd is not one of %R", i, tensor);
        if (status < 1) return -1;
    }
    return 0;
}

static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"types", "tensor", "exchange", "observers", "backends", "choice",
                            "plan",  "tracking", "record", NULL};
    PyObject *types, *tensor, *exchange, *observers, *backends, *choice, *plan, *tracking, *record;
    Torch torch = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OO!O!OOOO:FastPath", names, &PyTuple_Type, &types,
                                     &PyType_Type, &tensor, &exchange, &PyTuple_Type, &observers,
                                     &PyTuple_Type, &backends, &choice, &plan, &tracking, &record))
        return NULL;
    if (are_tensors(types, tensor) || take_torch(&torch, (PyTypeObject *)tensor, exchange)) return NULL;
    FastPath *self = (FastPath *)allocate_object(type);
    if (!self) return NULL;
    self->torch = torch;
    self->types = Py_NewRef(types);
    self->observers = Py_NewRef(observers);
    self->backends = Py_NewRef(backends);
    self->choice = Py_NewRef(choice);
    self->plan = Py_NewRef(plan);
    self->tracking = Py_NewRef(tracking);
    self->record = Py_NewRef(record);
    return (PyObject *)self;
}

static void fast_path_dealloc(PyObject *object) {
    FastPath *self = (FastPath *)object;
    forget_plans(&self->plans);
    Py_XDECREF(self->types);
    Py_XDECREF(self->observers);
    Py_XDECREF(self->backends);
    Py_XDECREF(self->choice);
    Py_XDECREF(self->plan);
    Py_XDECREF(self->tracking);
    Py_XDECREF(self->record);
    release(object);
}

/* The results of what follows: 1 yes, 0 not what the fast path takes, -1 with an exception. */

static int has_type(PyObject *types, PyObject *object) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(types); i++)
        if (PyTuple_GetItem(types, i) == (PyObject *)Py_TYPE(object)) return 1;
    return 0;
}

/* Whether every observer says that there is nothing to observe. */
static int dispatch_is_trivial(PyObject *observers) {
    int status = 1;
    for (Py_ssize_t i = 0; status == 1 && i < PyTuple_Size(observers); i++)
        status = is_false(PyObject_CallNoArgs(PyTuple_GetItem(observers, i)));
    return status;
}

/* Whether the exception is that of tensors that cannot be read so: sparse and nested ones, and batches that transforms
 * map over. What else they are is for others to say, and it is cleared. */
static int cannot_be_read(void) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_BufferError)) return 0;
    PyErr_Clear();
    return 1;
}

/* Read a tensor, and append to the key what a plan depends on; or append that there is no tensor. */
static int append_tensor(Key *key, const Torch *torch, PyObject *types, PyObject *object, int rank, Tensor *tensor) {
    int64_t *const words = key->words + key->count++;
    words[0] = 0;
    if (object == Py_None) return 1;
    int status = has_type(types, object);
    if (status == 1) status = read_any(torch, object, tensor);
    if (status < 1 || tensor->dimensions > rank) return status < 0 ? status : 0;
    const size_t n = (size_t)tensor->dimensions;
    words[0] = (int64_t)(tensor->code + 1) << 16 | tensor->bits << 8 | tensor->dimensions;
    memcpy(words + 1, tensor->shape, n * sizeof *words);
    memcpy(words + 1 + n, tensor->strides, n * sizeof *words);
    key->count += 2 * n;
    return 1;
}

typedef struct {
    Tensor tensors[TENSORS];
    uint64_t addresses[TENSORS]; /* 0 where there is no tensor */
    Key key;
} Call;

enum { HEAD = 5, MOST_OF_TENSOR = 1 + 2 * MOST_DIMENSIONS };
_Static_assert(HEAD + TENSORS * MOST_OF_TENSOR <= MOST_WORDS, "a key has room for all dimensions");

static int read_tensors(const FastPath *self, PyObject *const *args, Call *call) {
    const Torch *torch = &self->torch;
    if (!torch->exchange || !has_type(self->types, args[GATES]) || !has_type(self->types, args[TOKENS])) return 0;
    int status = dispatch_is_trivial(self->observers);
    call->key.count = HEAD;
    for (int i = 0; status == 1 && i < TENSORS; i++) {
        Tensor *const tensor = &call->tensors[i];
        call->addresses[i] = 0;
        status = append_tensor(&call->key, torch, self->types, args[i], MOST_DIMENSIONS, tensor);
        if (status < 1 || args[i] == Py_None) continue;
        if ((tensor->code == INTEGER) != (i == OFFSETS) || tensor->code == BOOL || tensor->device_type != call->tensors[0].device_type ||
            tensor->device != call->tensors[0].device)
            return 0;
        call->addresses[i] = address(tensor);
    }
    return status;
}

/* Append the options to the key; whether they have the types that the fast path takes. */
static int read_options(const FastPath *self, PyObject *const *args, Key *key) {
    int overflow;
    if (!PyLong_CheckExact(args[DIM]) || !PyBool_Check(args[REVERSE]) || !PyBool_Check(args[FINAL])) return 0;
    key->words[2] = PyLong_AsLongLongAndOverflow(args[DIM], &overflow);
    if (key->words[2] == -1 && PyErr_Occurred()) return -1;
    const Py_ssize_t count = PyTuple_Size(self->backends);
    Py_ssize_t i = 0;
    while (i < count && PyTuple_GetItem(self->backends, i) != args[BACKEND]) i++;
    if (i == count && PyUnicode_Check(args[BACKEND]))
        for (i = 0; i < count; i++)
            if (!PyUnicode_Compare(PyTuple_GetItem(self->backends, i), args[BACKEND])) break;
    key->words[3] = (int64_t)i << 2 | (args[REVERSE] == Py_True) << 1 | (args[FINAL] == Py_True);
    return !overflow && i < count;
}

/* Whether autograd is to be told. */
static int is_tracked(const FastPath *self, PyObject *const *args) {
    int status = 0;
    for (int i = 0; !status && i < OFFSETS; i++)
        if (args[i] != Py_None) status = requires_grad(&self->torch, args[i]);
    return status == 1 ? is_true(PyObject_CallNoArgs(self->tracking)) : status;
}

/* Kept with what was asked for, and so with ``choice``: its identity is nothing else's meanwhile. */
static Planned *make_plan(FastPath *self, const Key *key, PyObject *const *args, PyObject *choice) {
    PyObject *plan = called(self->plan, args, ARGUMENTS);
    PyObject *request =
        plan ? PyTuple_Pack(5, args[DIM], args[REVERSE], args[FINAL], args[BACKEND], choice) : NULL;
    Planned *kept = request ? keep_planned(&self->plans, key, plan, request) : NULL;
    Py_XDECREF(request);
    Py_XDECREF(plan);
    return kept;
}

/* ``choice`` goes by its identity. */
static const Planned *plan_of(FastPath *self, PyObject *const *args, Call *call) {
    PyObject *choice = PyObject_CallNoArgs(self->choice);
    if (!choice) return NULL;
    const Tensor *tokens = &call->tensors[TOKENS];
    call->key.words[0] = (int64_t)((call->addresses[GATES] | call->addresses[TOKENS]) & ALIGNMENT);
    call->key.words[1] = (int64_t)tokens->device_type << 32 | tokens->device;
    call->key.words[4] = (int64_t)(intptr_t)choice;
    const Planned *planned = find_planned(&self->plans, &call->key);
    if (!planned) planned = make_plan(self, &call->key, args, choice);
    Py_DECREF(choice);
    return planned;
}

/* The results of a plan, which another call may drop meanwhile; None if the call is not for this path. */
static PyObject *results_of(const FastPath *self, const Planned *planned, PyObject *const *args, const Call *call,
                            int tracked) {
    PyObject *plan = Py_NewRef(planned->plan), *request = Py_NewRef(planned->request), *results = NULL;
    if (plan == Py_None) results = Py_NewRef(Py_None);
    else if (Py_TYPE(plan) != fast_launch_type) results = called(plan, args, TENSORS);
    else if (((const FastLaunch *)plan)->inputs == TENSORS)
        results = fast_launch_run((const FastLaunch *)plan, self->torch.exchange, args, call->addresses,
                                  &call->tensors[TOKENS]);
    else PyErr_Format(PyExc_TypeError, "a launch of %d tensors", ((const FastLaunch *)plan)->inputs);
    if (results && tracked && plan != Py_None) {
        PyObject *done = PyTuple_Pack(2, results, request);
        Py_DECREF(results);
        results = done ? PyObject_CallFunctionObjArgs(self->record, args[GATES], args[TOKENS], args[INITIAL],
                                                      args[OFFSETS], done, NULL)
                       : NULL;
        Py_XDECREF(done);
    }
    Py_DECREF(request);
    Py_DECREF(plan);
    return results;
}

static PyObject *fast_path_run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    FastPath *self = (FastPath *)object;
    Call call;
    if (count != ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "run takes %d tensors and %d options, got %zd arguments", TENSORS,
                            ARGUMENTS - TENSORS, count);
    int status = read_tensors(self, args, &call);
    if (status < 0) {
        if (!cannot_be_read()) return NULL;
        Py_RETURN_NONE;
    }
    if (status) status = read_options(self, args, &call.key);
    if (status < 1) return status < 0 ? NULL : Py_NewRef(Py_None);
    const int tracked = is_tracked(self, args);
    const Planned *planned = tracked < 0 ? NULL : plan_of(self, args, &call);
    return planned ? results_of(self, planned, args, &call, tracked) : NULL;
}

static PyMethodDef fast_path_methods[] = {
    {"run", (PyCFunction)(void (*)(void))fast_path_run, METH_FASTCALL,
     "run(gates, tokens, initial_state, cu_seqlens, dim, reverse, final, backend) -> states | (states, last) | None\n\n"
     "Do what is planned for the call. None unless the tensors are plain, of real dtypes, on one\ndevice, in memory, "
     "and dispatch is trivial; or if the options are of other types, there is no\nsuch backend, or the plan is None."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot fast_path_slots[] = {
    {Py_tp_new, fast_path_new},
    {Py_tp_dealloc, fast_path_dealloc},
    {Py_tp_methods, fast_path_methods},
    {Py_tp_doc, "Scans of plain tensors."},
    {0, NULL}};

static PyType_Spec fast_path_spec = {"scan_registry.hardware._launcher.FastPath", sizeof(FastPath), 0,
                                     Py_TPFLAGS_DEFAULT, fast_path_slots};
