/* The fast path of calls on plain tensors: from tensors and options to the launch, at the least cost.
 *
 * A call's plan is made once, and found again by the options and by each tensor's dtype, device, shape, strides and
 * alignment. All this is in C, since asking torch in Python for these facts one by one, and for memory and its address,
 * costs more than the launch.
 */
#pragma once
#include "launch.h"
#include "plans.h"
#include "torch.h"

enum { ALIGNMENT = 15, MOST_TENSORS = 16, MOST_RESULTS = 4 };

static void release(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(self);
    Py_DECREF(type);
}

static PyObject *allocate_object(PyTypeObject *type) {
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static void keep_parts(PyObject **parts, PyObject *const *from, int count) {
    for (int i = 0; i < count; i++) parts[i] = Py_NewRef(from[i]);
}

static void forget_parts(PyObject **parts, int count) {
    for (int i = 0; i < count; i++) Py_XDECREF(parts[i]);
}

/* --- FastLaunch: what a call does on a GPU ----------------------------------------------------- */

enum { EMPTY, RESULTS, WORKSPACE, REFUSE, ELSEWHERE, RECORD, RECORDING, LAUNCH_PARTS }; /* described in _launcher.pyi */

typedef struct {
    PyObject_HEAD
    Launch *launch;
    int inputs, results;
    int places[MOST_TENSORS + MOST_RESULTS]; /* of the inputs, then the results, among the launch's pointers */
    PyObject *parts[LAUNCH_PARTS];
} FastLaunch;

static PyTypeObject *fast_launch_type;

static PyObject *fast_launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"launch", "places",    "empty",  "results",   "workspace",
                            "refuse", "elsewhere", "record", "recording", NULL};
    PyObject *launch, *of_tensors, *parts[LAUNCH_PARTS] = {[RECORD] = Py_None, [RECORDING] = Py_None};
    long places[MOST_TENSORS + MOST_RESULTS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OO!OOO|OO:FastLaunch", names, launch_type, &launch,
                                     &PyTuple_Type, &of_tensors, &parts[EMPTY], &PyTuple_Type, &parts[RESULTS],
                                     &parts[WORKSPACE], &parts[REFUSE], &parts[ELSEWHERE], &parts[RECORD],
                                     &parts[RECORDING]))
        return NULL;
    const int pointers = ((Launch *)launch)->pointers, zeroed = ((Launch *)launch)->workspace;
    const Py_ssize_t count = PyTuple_Size(of_tensors), results = PyTuple_Size(parts[RESULTS]);
    if (results < 1 || results > MOST_RESULTS || count < results || count > MOST_TENSORS + results)
        return PyErr_Format(PyExc_ValueError, "%zd places of tensors, %zd of them results; there are at most %d and %d",
                            count, results, MOST_TENSORS + MOST_RESULTS, MOST_RESULTS);
    for (Py_ssize_t i = 0; i < count; i++) {
        places[i] = PyLong_AsLong(PyTuple_GetItem(of_tensors, i));
        if (places[i] == -1 && PyErr_Occurred()) return NULL;
        if (places[i] < 0 || places[i] >= pointers)
            return PyErr_Format(PyExc_ValueError, "place %ld of %d pointers", places[i], pointers);
    }
    for (Py_ssize_t i = 0; i < results; i++)
        if (!PyTuple_Check(PyTuple_GetItem(parts[RESULTS], i)))
            return PyErr_Format(PyExc_TypeError, "result %zd of %R is no tuple", i, parts[RESULTS]);
    if (PyTuple_Check(parts[WORKSPACE]) != (zeroed >= 0))
        return PyErr_Format(PyExc_ValueError, "the launch and its workspace do not go together");
    if (!get_current) return PyErr_Format(PyExc_RuntimeError, "bind has not been called");
    FastLaunch *self = (FastLaunch *)allocate_object(type);
    if (!self) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) self->places[i] = (int)places[i];
    self->inputs = (int)(count - results);
    self->results = (int)results;
    self->launch = (Launch *)Py_NewRef(launch);
    keep_parts(self->parts, parts, LAUNCH_PARTS);
    return (PyObject *)self;
}

static void fast_launch_dealloc(PyObject *object) {
    FastLaunch *self = (FastLaunch *)object;
    Py_XDECREF(self->launch);
    forget_parts(self->parts, LAUNCH_PARTS);
    release(object);
}

/* A new tensor, and its address. */
static PyObject *new_tensor(const Exchange *exchange, PyObject *empty, PyObject *arguments, uint64_t *at) {
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
    PyObject *nothing = PyObject_CallFunction(self->parts[REFUSE], "i", status);
    Py_XDECREF(nothing);
    if (nothing) PyErr_Format(PyExc_RuntimeError, "the launch failed with status %d", status);
    return 0;
}

/* One result, or a tuple of them. ``addresses`` are those of the inputs, null where one is None. */
static PyObject *launched(const FastLaunch *self, const Exchange *exchange, const uint64_t *addresses, void *stream) {
    const Launch *launch = self->launch;
    const int *const places = self->places + self->inputs; /* of the results */
    uint64_t values[MAX_VALUES];
    memcpy(values, launch->values, sizeof *values * (size_t)launch->count);
    for (int i = 0; i < self->inputs; i++) values[self->places[i]] = addresses[i];
    PyObject *workspace = NULL, *result = NULL, *all = self->results > 1 ? PyTuple_New(self->results) : NULL;
    int ready = self->results == 1 || all;
    for (int i = 0; ready && i < self->results; i++) {
        PyObject *arguments = PyTuple_GetItem(self->parts[RESULTS], i);
        result = new_tensor(exchange, self->parts[EMPTY], arguments, &values[places[i]]);
        ready = result && (!all || !PyTuple_SetItem(all, i, result));
    }
    if (all) result = all;
    if (ready && launch->workspace >= 0) {
        workspace = new_tensor(exchange, self->parts[EMPTY], self->parts[WORKSPACE], &values[launch->workspace]);
        ready = workspace != NULL;
    }
    ready = ready && started(self, values, stream);
    Py_XDECREF(workspace); /* whoever gets this memory next uses it after the kernel */
    if (!ready) Py_CLEAR(result);
    return result;
}

/* The results, of which autograd is told if it is to be. ``there`` is a tensor on the device of all. */
static PyObject *fast_launch_run(const FastLaunch *self, const Exchange *exchange, PyObject *tensors,
                                 const uint64_t *addresses, const Tensor *there) {
    void *current = NULL, *stream = NULL;
    PyObject *results;
    if (PyTuple_Size(tensors) != self->inputs)
        return PyErr_Format(PyExc_TypeError, "a launch of %d tensors", self->inputs);
    if (get_current(&current) || current != self->launch->context)
        results = PyObject_CallObject(self->parts[ELSEWHERE], tensors);
    else if (exchange->current_stream(there->device_type, there->device, &stream)) return NULL;
    else results = launched(self, exchange, addresses, stream);
    if (!results || self->parts[RECORD] == Py_None) return results;
    /* Results go in a tuple: autograd takes the tensors among its arguments for inputs. */
    PyObject *done = PyTuple_Check(results) ? Py_NewRef(results) : PyTuple_Pack(1, results);
    PyObject *call = done ? PyTuple_Pack(2, self->parts[RECORDING], done) : NULL;
    PyObject *all = call ? PyTuple_New(self->inputs + 1) : NULL;
    Py_DECREF(results);
    Py_XDECREF(done);
    if (!all) {
        Py_XDECREF(call);
        return NULL;
    }
    PyTuple_SetItem(all, 0, call);
    for (int i = 0; i < self->inputs; i++) PyTuple_SetItem(all, i + 1, Py_NewRef(PyTuple_GetItem(tensors, i)));
    results = PyObject_CallObject(self->parts[RECORD], all);
    Py_DECREF(all);
    return results;
}

static PyType_Slot fast_launch_slots[] = {
    {Py_tp_new, fast_launch_new},
    {Py_tp_dealloc, fast_launch_dealloc},
    {Py_tp_doc, "What a call on the fast path does on a GPU: allocate results, and launch."},
    {0, NULL}};

static PyType_Spec fast_launch_spec = {"scan_registry.hardware._launcher.FastLaunch", sizeof(FastLaunch), 0,
                                       Py_TPFLAGS_DEFAULT, fast_launch_slots};

/* --- FastPath: whether a call takes it, and what the call does ---------------------------- */

enum { TYPES, OBSERVERS, CHOICE, PLAN, TRACKING, PATH_PARTS }; /* described in _launcher.pyi */

typedef struct {
    PyObject_HEAD
    Torch torch; /* without an exchange no call takes this path */
    PyObject *parts[PATH_PARTS];
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
    static char *names[] = {"types", "tensor", "exchange", "observers", "choice", "plan", "tracking", NULL};
    PyObject *tensor, *exchange, *parts[PATH_PARTS];
    Torch torch = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OO!OOO:FastPath", names, &PyTuple_Type, &parts[TYPES],
                                     &PyType_Type, &tensor, &exchange, &PyTuple_Type, &parts[OBSERVERS],
                                     &parts[CHOICE], &parts[PLAN], &parts[TRACKING]))
        return NULL;
    if (are_tensors(parts[TYPES], tensor) || take_torch(&torch, (PyTypeObject *)tensor, exchange)) return NULL;
    FastPath *self = (FastPath *)allocate_object(type);
    if (!self) return NULL;
    self->torch = torch;
    keep_parts(self->parts, parts, PATH_PARTS);
    return (PyObject *)self;
}

static void fast_path_dealloc(PyObject *object) {
    FastPath *self = (FastPath *)object;
    forget_plans(&self->plans);
    forget_parts(self->parts, PATH_PARTS);
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

typedef struct {
    Tensor first;                    /* of those that are not None */
    uint64_t addresses[MOST_TENSORS]; /* 0 where there is no tensor */
    int count, tracked;              /* tensors, but for None; whether one requires gradients */
    Key key;
} Call;

enum { ALIGNMENTS, DEVICE, REQUIRED, RECORDED, HEAD }; /* the first words of a key */

/* Append to the key what a plan depends on; or that there is no tensor. */
static int append_tensor(Call *call, const FastPath *self, PyObject *object, int place) {
    Key *const key = &call->key;
    int64_t *const words = key->words + key->count;
    Tensor tensor;
    call->addresses[place] = 0;
    if (key->count + 1 + 2 * MOST_DIMENSIONS > MOST_WORDS) return 0;
    words[0] = 0;
    key->count++;
    if (object == Py_None) return 1;
    int status = has_type(self->parts[TYPES], object);
    if (status == 1) status = read_any(&self->torch, object, &tensor);
    if (status < 1) return status;
    const size_t n = (size_t)tensor.dimensions;
    words[0] = (int64_t)(tensor.code + 1) << 16 | tensor.bits << 8 | tensor.dimensions;
    memcpy(words + 1, tensor.shape, n * sizeof *words);
    memcpy(words + 1 + n, tensor.strides, n * sizeof *words);
    key->count += 2 * n;
    if (!call->count++) call->first = tensor;
    if (tensor.device_type != call->first.device_type || tensor.device != call->first.device) return 0;
    if (!call->tracked && (call->tracked = requires_grad(&self->torch, object)) < 0) return -1;
    call->addresses[place] = address(&tensor);
    key->words[ALIGNMENTS] |= (int64_t)((call->addresses[place] & ALIGNMENT) << 4 * (place % 16));
    return 1;
}

/* Append an option: None, a bool, an integer, a float or a string, each of exactly this type. */
static int append_option(Key *key, PyObject *option) {
    enum { NONE = 1, FALSE, TRUE, NUMBER, REAL, TEXT };
    int64_t *const words = key->words + key->count;
    int overflow = 0;
    if (key->count + 2 > MOST_WORDS) return 0;
    key->count++;
    if (option == Py_None || option == Py_True || option == Py_False) {
        words[0] = option == Py_None ? NONE : option == Py_True ? TRUE : FALSE;
        return 1;
    }
    if (PyUnicode_CheckExact(option)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(option, &size);
        if (!text) PyErr_Clear();
        const size_t count = text ? ((size_t)size + sizeof *words - 1) / sizeof *words : MOST_WORDS;
        if (key->count + count > MOST_WORDS) return 0;
        words[count] = 0; /* the last word may be longer than the text */
        words[0] = (int64_t)size << 8 | TEXT;
        memcpy(words + 1, text, (size_t)size);
        key->count += count;
        return 1;
    }
    key->count++;
    if (PyFloat_CheckExact(option)) {
        const double value = PyFloat_AsDouble(option);
        words[0] = REAL;
        memcpy(words + 1, &value, sizeof value);
        return 1;
    }
    if (!PyLong_CheckExact(option)) return 0;
    words[0] = NUMBER;
    words[1] = PyLong_AsLongLongAndOverflow(option, &overflow);
    return words[1] == -1 && PyErr_Occurred() ? -1 : !overflow;
}

/* All of the key but what is required. */
static int read_call(const FastPath *self, PyObject *tensors, PyObject *options, Call *call) {
    const Py_ssize_t count = PyTuple_Size(tensors);
    if (!self->torch.exchange || count > MOST_TENSORS) return 0;
    int status = dispatch_is_trivial(self->parts[OBSERVERS]);
    call->count = call->tracked = 0;
    call->key.count = HEAD;
    call->key.words[ALIGNMENTS] = 0;
    for (Py_ssize_t i = 0; status == 1 && i < count; i++)
        status = append_tensor(call, self, PyTuple_GetItem(tensors, i), (int)i);
    if (status < 0) return cannot_be_read() ? 0 : -1;
    for (Py_ssize_t i = 0; status == 1 && i < PyTuple_Size(options); i++)
        status = append_option(&call->key, PyTuple_GetItem(options, i));
    if (status < 1 || !call->count) return status < 0 ? -1 : 0;
    if (call->tracked && (call->tracked = is_true(PyObject_CallNoArgs(self->parts[TRACKING]))) < 0) return -1;
    call->key.words[DEVICE] = (int64_t)call->first.device_type << 32 | call->first.device;
    call->key.words[RECORDED] = call->tracked;
    return 1;
}

/* What is required goes by its identity, and is kept with the plan: the identity is nothing else's meanwhile. */
static const Planned *plan_of(FastPath *self, PyObject *tensors, PyObject *options, Call *call) {
    PyObject *choice = PyObject_CallNoArgs(self->parts[CHOICE]);
    if (!choice) return NULL;
    call->key.words[REQUIRED] = (int64_t)(intptr_t)choice;
    const Planned *planned = find_planned(&self->plans, &call->key);
    if (!planned) {
        PyObject *recorded = call->tracked ? Py_True : Py_False;
        PyObject *plan = PyObject_CallFunctionObjArgs(self->parts[PLAN], recorded, tensors, options, NULL);
        if (plan) planned = keep_planned(&self->plans, &call->key, plan, choice);
        Py_XDECREF(plan);
    }
    Py_DECREF(choice);
    return planned;
}

static PyObject *fast_path_run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    FastPath *self = (FastPath *)object;
    Call call;
    if (count != 2 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "run takes a tuple of tensors and a tuple of options");
    const int status = read_call(self, args[0], args[1], &call);
    if (status < 1) return status < 0 ? NULL : Py_NewRef(Py_None);
    const Planned *planned = plan_of(self, args[0], args[1], &call);
    if (!planned) return NULL;
    PyObject *plan = Py_NewRef(planned->plan), *results; /* which another call may drop meanwhile */
    if (plan == Py_None) results = Py_NewRef(Py_None);
    else if (Py_TYPE(plan) != fast_launch_type) results = PyObject_CallObject(plan, args[0]);
    else results = fast_launch_run((const FastLaunch *)plan, self->torch.exchange, args[0], call.addresses, &call.first);
    Py_DECREF(plan);
    return results;
}

static PyMethodDef fast_path_methods[] = {
    {"run", (PyCFunction)(void (*)(void))fast_path_run, METH_FASTCALL,
     "run(tensors, options) -> results | None\n\nDo what is planned for the call. None unless the tensors that are not "
     "None are plain, of real dtypes,\non one device, in memory, and dispatch is trivial; or if the plan is None."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot fast_path_slots[] = {
    {Py_tp_new, fast_path_new},
    {Py_tp_dealloc, fast_path_dealloc},
    {Py_tp_methods, fast_path_methods},
    {Py_tp_doc, "Calls on plain tensors."},
    {0, NULL}};

static PyType_Spec fast_path_spec = {"scan_registry.hardware._launcher.FastPath", sizeof(FastPath), 0,
                                     Py_TPFLAGS_DEFAULT, fast_path_slots};
