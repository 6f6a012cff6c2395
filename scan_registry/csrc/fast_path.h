/* The fast path, of calls on two plain tensors without options: from the tensors to the launch, at the least cost.
 *
 * What a call does is planned once for all calls alike, and found again by dtype, device, shape, strides and
 * alignment; autograd is told of its states after they are computed. Asking torch for them one by one in
 * Python, and for memory and its address, costs more than the launch.
 */
#pragma once
#include "launch.h"
#include "plans.h"
#include "torch.h"

enum { ALIGNMENT = 15, MOST_TENSORS = 12 };
enum { GATES, TOKENS, DIM, BACKEND, ARGUMENTS }; /* of a call */

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
    int places[MOST_TENSORS + 1]; /* of these, and of what it makes, among the launch's pointers */
    PyObject *empty;      /* makes a tensor on the current device */
    PyObject *states;     /* of these arguments, */
    PyObject *workspace;  /* and of these; None where there is none */
    PyObject *refuse;     /* raises the error of a status */
    PyObject *elsewhere;  /* computes the same from any context */
} FastLaunch;

static PyTypeObject *fast_launch_type;

static PyObject *fast_launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"launch",    "places", "empty",     "states",
                            "workspace", "refuse", "elsewhere", NULL};
    PyObject *launch, *given, *empty, *states, *workspace, *refuse, *elsewhere;
    long places[MOST_TENSORS + 1];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OO!OOO:FastLaunch", names, launch_type, &launch,
                                     &PyTuple_Type, &given, &empty, &PyTuple_Type, &states, &workspace,
                                     &refuse, &elsewhere))
        return NULL;
    const int pointers = ((Launch *)launch)->pointers, zeroed = ((Launch *)launch)->workspace;
    const Py_ssize_t count = PyTuple_Size(given);
    if (count < 1 || count > MOST_TENSORS + 1)
        return PyErr_Format(PyExc_ValueError, "%zd places of tensors; there are at most %d", count,
                            MOST_TENSORS + 1);
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
    self->inputs = (int)count - 1;
    self->launch = (Launch *)Py_NewRef(launch);
    self->empty = Py_NewRef(empty);
    self->states = Py_NewRef(states);
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
    PyObject *workspace = NULL, *states;
    states = made(exchange, self->empty, self->states, &values[self->places[self->inputs]]);
    int ready = states != NULL;
    if (ready && launch->workspace >= 0) {
        workspace = made(exchange, self->empty, self->workspace, &values[launch->workspace]);
        ready = workspace != NULL;
    }
    if (!ready || !started(self, values, stream)) Py_CLEAR(states);
    Py_XDECREF(workspace); /* whoever gets this memory next uses it after the kernel */
    return states;
}

static PyType_Slot fast_launch_slots[] = {
    {Py_tp_new, fast_launch_new},
    {Py_tp_dealloc, fast_launch_dealloc},
    {Py_tp_doc, "What a call on the fast path does on a GPU: allocate states, and launch."},
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

static int read_both(const FastPath *self, PyObject *const *args, Tensor *gates, Tensor *tokens) {
    int status;
    const Torch *torch = &self->torch;
    if (!torch->exchange || !has_type(self->types, args[GATES]) || !has_type(self->types, args[TOKENS])) return 0;
    if ((status = dispatch_is_trivial(self->observers)) < 1 || (status = read_tensor(torch, args[GATES], gates)) < 1 ||
        (status = read_tensor(torch, args[TOKENS], tokens)) < 1)
        return status;
    return gates->code == tokens->code && gates->bits == tokens->bits &&
           gates->device_type == tokens->device_type && gates->device == tokens->device &&
           gates->dimensions == tokens->dimensions &&
           !memcmp(gates->shape, tokens->shape, sizeof(int64_t) * (size_t)gates->dimensions);
}

static int read_options(const FastPath *self, PyObject *const *args, int64_t options[2]) {
    int overflow;
    if (!PyLong_CheckExact(args[DIM])) return 0;
    options[0] = PyLong_AsLongLongAndOverflow(args[DIM], &overflow);
    if (options[0] == -1 && PyErr_Occurred()) return -1;
    const Py_ssize_t count = PyTuple_Size(self->backends);
    Py_ssize_t i = 0;
    while (i < count && PyTuple_GetItem(self->backends, i) != args[BACKEND]) i++;
    if (i == count && PyUnicode_Check(args[BACKEND]))
        for (i = 0; i < count; i++)
            if (!PyUnicode_Compare(PyTuple_GetItem(self->backends, i), args[BACKEND])) break;
    options[1] = i;
    return !overflow && i < count;
}

/* Whether autograd is to be told. */
static int is_tracked(const FastPath *self, PyObject *const *args) {
    int status = requires_grad(&self->torch, args[GATES]);
    if (!status) status = requires_grad(&self->torch, args[TOKENS]);
    return status == 1 ? is_true(PyObject_CallNoArgs(self->tracking)) : status;
}

/* All that a plan depends on; ``choice`` goes by its identity. */
static void fill_key(Key *key, const Tensor *gates, const Tensor *tokens, const int64_t options[2],
                     PyObject *choice) {
    const int64_t head[] = {gates->code << 8 | gates->bits,
                            (int64_t)gates->device_type << 32 | gates->device,
                            (int64_t)((address(gates) | address(tokens)) & ALIGNMENT),
                            options[0],
                            options[1],
                            (int64_t)(intptr_t)choice};
    enum { HEAD = sizeof head / sizeof *head };
    _Static_assert(HEAD + 3 * MOST_DIMENSIONS <= MOST_WORDS, "a key has room for all dimensions");
    const size_t n = (size_t)gates->dimensions;
    key->count = HEAD + 3 * n;
    memcpy(key->words, head, sizeof head);
    memcpy(key->words + HEAD, gates->shape, n * sizeof *key->words);
    memcpy(key->words + HEAD + n, gates->strides, n * sizeof *key->words);
    memcpy(key->words + HEAD + 2 * n, tokens->strides, n * sizeof *key->words);
}

/* Kept with what was asked for, and so with ``choice``: its identity is nothing else's meanwhile. */
static Planned *make_plan(FastPath *self, const Key *key, PyObject *const *args, PyObject *choice) {
    PyObject *plan = PyObject_CallFunctionObjArgs(self->plan, args[GATES], args[TOKENS], args[DIM],
                                                  args[BACKEND], NULL);
    PyObject *request = plan ? PyTuple_Pack(3, args[DIM], args[BACKEND], choice) : NULL;
    Planned *kept = request ? keep_planned(&self->plans, key, plan, request) : NULL;
    Py_XDECREF(request);
    Py_XDECREF(plan);
    return kept;
}

static const Planned *plan_of(FastPath *self, PyObject *const *args, const Tensor *gates,
                              const Tensor *tokens, const int64_t options[2]) {
    PyObject *choice = PyObject_CallNoArgs(self->choice);
    if (!choice) return NULL;
    Key key;
    fill_key(&key, gates, tokens, options, choice);
    const Planned *planned = find_planned(&self->plans, &key);
    if (!planned) planned = make_plan(self, &key, args, choice);
    Py_DECREF(choice);
    return planned;
}

/* The states of a plan; from then on it may be forgotten. */
static PyObject *states_of(const FastPath *self, const Planned *planned, PyObject *const *args,
                           const Tensor *gates, const Tensor *tokens, int tracked) {
    PyObject *plan = Py_NewRef(planned->plan), *request = Py_NewRef(planned->request), *states = NULL;
    const uint64_t addresses[] = {address(gates), address(tokens)};
    if (Py_TYPE(plan) != fast_launch_type) states = called(plan, args, DIM);
    else if (((const FastLaunch *)plan)->inputs == DIM)
        states = fast_launch_run((const FastLaunch *)plan, self->torch.exchange, args, addresses, tokens);
    else PyErr_Format(PyExc_TypeError, "a launch of %d tensors", ((const FastLaunch *)plan)->inputs);
    if (states && tracked) {
        PyObject *done = PyTuple_Pack(2, states, request);
        Py_DECREF(states);
        states = done ? PyObject_CallFunctionObjArgs(self->record, args[GATES], args[TOKENS], done,
                                                     NULL)
                      : NULL;
        Py_XDECREF(done);
    }
    Py_DECREF(request);
    Py_DECREF(plan);
    return states;
}

static PyObject *fast_path_run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    FastPath *self = (FastPath *)object;
    Tensor gates, tokens;
    int64_t options[2];
    if (count != ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "run takes gates, tokens, dim and backend, got %zd arguments",
                            count);
    int status = read_both(self, args, &gates, &tokens);
    if (status < 0) {
        if (!cannot_be_read()) return NULL;
        Py_RETURN_NONE;
    }
    if (status) status = read_options(self, args, options);
    if (status < 1) return status < 0 ? NULL : Py_NewRef(Py_None);
    const int tracked = is_tracked(self, args);
    const Planned *planned = tracked < 0 ? NULL : plan_of(self, args, &gates, &tokens, options);
    return planned ? states_of(self, planned, args, &gates, &tokens, tracked) : NULL;
}

static PyMethodDef fast_path_methods[] = {
    {"run", (PyCFunction)(void (*)(void))fast_path_run, METH_FASTCALL,
     "run(gates, tokens, dim, backend) -> states | None\n\nDo what is planned for the call. None unless "
     "the tensors are plain, of one real dtype and\none shape, on one device, in memory, and dispatch "
     "is trivial; or if there is no such backend."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot fast_path_slots[] = {
    {Py_tp_new, fast_path_new},
    {Py_tp_dealloc, fast_path_dealloc},
    {Py_tp_methods, fast_path_methods},
    {Py_tp_doc, "Calls on two plain tensors, without options."},
    {0, NULL}};

static PyType_Spec fast_path_spec = {"scan_registry.hardware._launcher.FastPath", sizeof(FastPath), 0,
                                     Py_TPFLAGS_DEFAULT, fast_path_slots};
