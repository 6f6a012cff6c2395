/* Calls from programs that XLA compiled, by its typed foreign function interface (FFI).
 *
 * XLA calls a handler with buffers and attributes. Each call site has two attributes: "call", a text that describes one
 * kernel's call in full, and "key", a digest of that text. The text and not a number of this process, since compiled programs
 * are kept on disk and run by other processes. The first time that a device meets a key, a function of Python turns the text
 * into what is called: a Launch, or a function for CPUs. Later calls look the key up, without Python's lock.
 *
 * The declarations below are the part of XLA's binary interface, xla/ffi/api/c_api.h, that is used here: version 0.x, whose
 * structs only grow at their ends. So no header of XLA is needed.
 */
#pragma once
#include <stdatomic.h>
#include <stdlib.h>

#include "launch.h"

/* --- XLA's binary interface ------------------------------------------------------------------- */

enum { XLA_METADATA = 1, XLA_STRING = 4, XLA_INITIALIZE = 2, XLA_EXECUTE = 3, XLA_MAJOR = 0 };
enum { XLA_INVALID_ARGUMENT = 3, XLA_INTERNAL = 13, XLA_COMMAND_BUFFER_COMPATIBLE = 1 };

typedef struct XlaExtension {
    size_t struct_size;
    int type;
    struct XlaExtension *next;
} XlaExtension;

typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    int major, minor;
} XlaVersion;

typedef struct {
    size_t struct_size;
    XlaVersion version;
    uint32_t traits;
} XlaMetadata;

typedef struct {
    XlaExtension base;
    XlaMetadata *metadata;
} XlaMetadataExtension;

typedef struct XlaError XlaError;
typedef struct XlaContext XlaContext;

typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    const char *message;
    int code;
} XlaErrorArguments;

typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    XlaContext *context;
    void *stream;
} XlaStreamArguments;

typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    XlaContext *context;
    int32_t ordinal;
} XlaOrdinalArguments;

typedef void (*XlaUnused)(void);

typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    XlaVersion version;
    const void *internal;
    XlaError *(*create_error)(XlaErrorArguments *);
    XlaUnused of_errors[2], of_handlers;
    XlaError *(*get_stream)(XlaStreamArguments *);
    XlaUnused of_types_memory_and_threads[11];
    XlaUnused of_run;
    XlaError *(*get_ordinal)(XlaOrdinalArguments *);
} XlaApi;

typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    int type;
    void *data;
    int64_t rank, *sizes;
} XlaBuffer;

/* Arguments, and likewise results. */
typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    int64_t count;
    int *types;
    XlaBuffer **buffers;
} XlaBuffers;

typedef struct {
    const char *text;
    size_t length;
} XlaSpan;

typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    int64_t count;
    int *types;
    XlaSpan **names;
    void **values;
} XlaAttributes;

typedef struct {
    size_t struct_size;
    XlaExtension *extension_start;
    const XlaApi *api;
    XlaContext *context;
    int stage;
    XlaBuffers arguments, results;
    XlaAttributes attributes;
} XlaFrame;

static XlaError *xla_error(const XlaFrame *frame, int code, const char *message) {
    XlaErrorArguments arguments = {sizeof arguments, NULL, message, code};
    return frame->api->create_error(&arguments);
}

/* --- What keys stand for ---------------------------------------------------------------------- */

enum { KEY = 64, XLA_BUCKETS = 1024, NO_BUFFER = 0x7fffffff, XLA_MESSAGE = 4096 };

/* Never freed: a program that XLA compiled may call it at any time. */
typedef struct XlaCall {
    struct XlaCall *next;
    char key[KEY];
    int32_t ordinal;               /* of the device; -1: CPU */
    uint64_t alignment;            /* a power of 2 that divides all addresses of buffers */
    const Launch *launch;          /* or */
    PyObject *function;            /* is called with the items of */
    PyObject *before, *after;      /* and between them a tuple of addresses, None for null */
    int count;                     /* of pointers: */
    int32_t places[MAX_VALUES];    /* an argument, or from -1 down a result, or NO_BUFFER */
} XlaCall;

static _Atomic(XlaCall *) xla_calls[XLA_BUCKETS];
static PyObject *xla_resolve; /* a function of the text and the ordinal */

static _Atomic(XlaCall *) *xla_bucket(const char *key) {
    uint64_t word; /* of a digest in hexadecimal digits: any of it will do */
    memcpy(&word, key, sizeof word);
    return &xla_calls[(word ^ word >> 21 ^ word >> 43) % XLA_BUCKETS];
}

static const XlaCall *xla_find(const char *key, int32_t ordinal) {
    const XlaCall *call = atomic_load_explicit(xla_bucket(key), memory_order_acquire);
    while (call && (call->ordinal != ordinal || memcmp(call->key, key, KEY))) call = call->next;
    return call;
}

/* From (launch or function, places, before, after, alignment). */
static int xla_fill(XlaCall *call, PyObject *resolved) {
    PyObject *callee, *places;
    unsigned long long alignment;
    if (!PyArg_ParseTuple(resolved, "OO!O!O!K:resolve", &callee, &PyTuple_Type, &places,
                          &PyTuple_Type, &call->before, &PyTuple_Type, &call->after, &alignment))
        return -1;
    call->alignment = alignment;
    call->count = (int)PyTuple_Size(places);
    const int launches = Py_TYPE(callee) == launch_type;
    if (call->count > MAX_VALUES || (launches && ((const Launch *)callee)->pointers != call->count)) {
        PyErr_Format(PyExc_ValueError, "a call cannot have %d pointers", call->count);
        return -1;
    }
    for (int i = 0; i < call->count; i++) {
        PyObject *place = PyTuple_GetItem(places, i);
        call->places[i] = place == Py_None ? NO_BUFFER : (int32_t)PyLong_AsLong(place);
        if (PyErr_Occurred()) return -1;
    }
    if (launches)
        call->launch = (const Launch *)callee;
    else
        call->function = callee;
    Py_INCREF(callee), Py_INCREF(call->before), Py_INCREF(call->after);
    return 0;
}

/* With Python's lock; NULL with an exception. */
static const XlaCall *xla_add(const char *key, XlaSpan text, int32_t ordinal) {
    if (!xla_resolve) {
        PyErr_SetString(PyExc_RuntimeError, "import scan_registry.jax before its calls run");
        return NULL;
    }
    PyObject *resolved = PyObject_CallFunction(xla_resolve, "s#i", text.text,
                                               (Py_ssize_t)text.length, (int)ordinal);
    if (!resolved) return NULL;
    const XlaCall *other = xla_find(key, ordinal); /* from another thread, meanwhile */
    XlaCall *call = other ? NULL : calloc(1, sizeof *call);
    if (!other && !call) PyErr_NoMemory();
    if (call && xla_fill(call, resolved)) {
        free(call);
        call = NULL;
    }
    Py_DECREF(resolved);
    if (!call) return other;
    memcpy(call->key, key, KEY);
    call->ordinal = ordinal;
    _Atomic(XlaCall *) *bucket = xla_bucket(key);
    call->next = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, call, memory_order_release);
    return call;
}

/* --- Calling ---------------------------------------------------------------------------------- */

static XlaSpan xla_attribute(const XlaFrame *frame, const char *name) {
    const XlaAttributes *attributes = &frame->attributes;
    for (int64_t i = 0; i < attributes->count; i++) {
        const XlaSpan *own = attributes->names[i];
        if (attributes->types[i] == XLA_STRING && own->length == strlen(name) &&
            !memcmp(own->text, name, own->length))
            return *(const XlaSpan *)attributes->values[i];
    }
    return (XlaSpan){NULL, 0};
}

/* The exception's type and words, which are no longer set. */
static XlaError *xla_exception(const XlaFrame *frame) {
    char message[XLA_MESSAGE] = "an exception without words";
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *name = PyObject_GetAttrString(type, "__name__");
    PyObject *words = name && value ? PyUnicode_FromFormat("%U: %S", name, value) : NULL;
    PyObject *bytes = words ? PyUnicode_AsUTF8String(words) : NULL;
    if (bytes) snprintf(message, sizeof message, "%s", PyBytes_AsString(bytes));
    PyErr_Clear();
    Py_XDECREF(name), Py_XDECREF(words), Py_XDECREF(bytes);
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
    return xla_error(frame, XLA_INVALID_ARGUMENT, message);
}

/* Addresses of the buffers in the order of the kernel's pointers; an error's words or NULL. */
static const char *xla_addresses(const XlaFrame *frame, const XlaCall *call, uint64_t *values) {
    for (int i = 0; i < call->count; i++) {
        const int64_t place = call->places[i];
        const XlaBuffers *of = place < 0 ? &frame->results : &frame->arguments;
        const int64_t index = place < 0 ? -1 - place : place;
        values[i] = 0;
        if (place == NO_BUFFER) continue;
        if (index >= of->count) return "the call has fewer buffers than its kernel";
        values[i] = (uint64_t)(uintptr_t)of->buffers[index]->data;
        if (values[i] & (call->alignment - 1))
            return "a buffer is aligned less than its kernel was chosen for";
    }
    return NULL;
}

static PyObject *xla_tuple(const XlaCall *call, const uint64_t *values) {
    PyObject *pointers = PyTuple_New(call->count);
    for (int i = 0; pointers && i < call->count; i++) {
        PyObject *pointer = values[i] ? PyLong_FromUnsignedLongLong(values[i]) : Py_NewRef(Py_None);
        if (!pointer || PyTuple_SetItem(pointers, i, pointer)) Py_CLEAR(pointers);
    }
    PyObject *middle = pointers ? PyTuple_New(1) : NULL;
    if (!middle || PyTuple_SetItem(middle, 0, pointers)) {
        Py_XDECREF(middle ? NULL : pointers);
        return NULL;
    }
    PyObject *first = PySequence_Concat(call->before, middle);
    PyObject *all = first ? PySequence_Concat(first, call->after) : NULL;
    Py_DECREF(middle);
    Py_XDECREF(first);
    return all;
}

/* A function for CPUs lets go of Python's lock while it computes. */
static XlaError *xla_call_function(const XlaFrame *frame, const XlaCall *call,
                                   const uint64_t *values) {
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *arguments = xla_tuple(call, values);
    PyObject *result = arguments ? PyObject_CallObject(call->function, arguments) : NULL;
    XlaError *error = result ? NULL : xla_exception(frame);
    Py_XDECREF(arguments);
    Py_XDECREF(result);
    PyGILState_Release(lock);
    return error;
}

static XlaError *xla_launch(const XlaFrame *frame, const XlaCall *call, const uint64_t *pointers) {
    XlaStreamArguments of = {sizeof of, NULL, frame->context, NULL};
    XlaError *error = frame->api->get_stream(&of);
    if (error) return error;
    uint64_t values[MAX_VALUES];
    memcpy(values, call->launch->values, sizeof values);
    memcpy(values, pointers, sizeof *values * (size_t)call->count);
    const int status = start(call->launch, values, of.stream);
    if (!status) return NULL;
    char message[64];
    snprintf(message, sizeof message, "the launch failed with the CUDA driver's error %d", status);
    return xla_error(frame, XLA_INTERNAL, message);
}

static XlaError *xla_run(XlaFrame *frame, int32_t ordinal) {
    const XlaSpan key = xla_attribute(frame, "key"), text = xla_attribute(frame, "call");
    if (key.length != KEY || !text.text)
        return xla_error(frame, XLA_INVALID_ARGUMENT, "the attributes key and call are missing");
    const XlaCall *call = xla_find(key.text, ordinal);
    if (!call) {
        PyGILState_STATE lock = PyGILState_Ensure();
        call = xla_add(key.text, text, ordinal);
        XlaError *error = call ? NULL : xla_exception(frame);
        PyGILState_Release(lock);
        if (error) return error;
    }
    if (frame->stage == XLA_INITIALIZE) return NULL;
    uint64_t values[MAX_VALUES];
    const char *wrong = xla_addresses(frame, call, values);
    if (wrong) return xla_error(frame, XLA_INVALID_ARGUMENT, wrong);
    return call->launch ? xla_launch(frame, call, values) : xla_call_function(frame, call, values);
}

/* Answer XLA's question for the handler's version and traits; 0 if this is a call. The version is that of the caller: what
 * is used here is alike in all of 0.x. A launch and the zeroing of its workspace are the same at each call, so XLA may
 * record them into a CUDA graph. */
static int xla_answers(XlaFrame *frame, uint32_t traits) {
    for (XlaExtension *one = frame->extension_start; one; one = one->next)
        if (one->type == XLA_METADATA) {
            XlaMetadata *metadata = ((XlaMetadataExtension *)one)->metadata;
            const XlaVersion *own = frame->api ? &frame->api->version : NULL;
            metadata->version.major = XLA_MAJOR;
            metadata->version.minor = own && own->major == XLA_MAJOR ? own->minor : 0;
            metadata->traits = traits;
            return 1;
        }
    return 0;
}

static XlaError *xla_on_cpu(XlaFrame *frame) {
    return xla_answers(frame, 0) ? NULL : xla_run(frame, -1);
}

static XlaError *xla_on_gpu(XlaFrame *frame) {
    if (xla_answers(frame, XLA_COMMAND_BUFFER_COMPATIBLE)) return NULL;
    if (frame->api->struct_size < sizeof(XlaApi))
        return xla_error(frame, XLA_INVALID_ARGUMENT,
                         "this jaxlib does not say on which GPU a call runs; a later one does");
    XlaOrdinalArguments of = {sizeof of, NULL, frame->context, 0};
    XlaError *error = frame->api->get_ordinal(&of);
    return error ? error : xla_run(frame, of.ordinal);
}

static PyObject *xla_handlers(PyObject *module, PyObject *resolve) {
    (void)module;
    Py_INCREF(resolve);
    Py_XDECREF(xla_resolve);
    xla_resolve = resolve;
    return Py_BuildValue("KK", (unsigned long long)(uintptr_t)xla_on_cpu,
                         (unsigned long long)(uintptr_t)xla_on_gpu);
}
