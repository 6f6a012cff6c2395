/* Between the arguments of Python's functions and numbers. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdarg.h>

#include "cpu_types.h"

/* Functions of a family for the module: ADD_FUNCTIONS(table) once in one of its files. */
typedef struct Functions {
    PyMethodDef *table;
    struct Functions *next;
} Functions;

HIDDEN void add_functions(Functions *more);

#define ADD_FUNCTIONS(methods)                                \
    __attribute__((constructor)) static void when_loaded(void) { \
        static Functions more = {.table = methods};           \
        add_functions(&more);                                 \
    }

/* A function of Python that returns an expression of args and count; and its row in a table. */
#define PYTHON_FUNCTION(name, result)                                                  \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t count) { \
        (void)module;                                                                  \
        return result;                                                                 \
    }
#define FUNCTION_ROW(name, text) \
    {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, text}

UNUSED static int fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(PyExc_ValueError, format, arguments);
    va_end(arguments);
    return -1;
}

/* Null with a TypeError that says so if it is no str. */
UNUSED static const char *text_of(PyObject *name, const char *otherwise) {
    if (PyUnicode_Check(name)) return PyUnicode_AsUTF8AndSize(name, NULL);
    PyErr_SetString(PyExc_TypeError, otherwise);
    return NULL;
}

UNUSED static int type_named(PyObject *name) {
    const char *text = text_of(name, "dtype and gates_dtype must be str");
    if (!text) return -1;
    for (int i = 0; i < TYPES; i++)
        if (!strcmp(text, types[i].name)) return i;
    return fail("dtype %R; accepted are float32, bfloat16, float16, float64, complex64, complex128",
                name);
}

/* Read a tuple of so many integers; None counts as 0 where it may stand. */
UNUSED static int integers(PyObject *tuple, const char *direction, const char *what, int count,
                    int pointers, int64_t *values) {
    if (!PyTuple_Check(tuple)) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple", what);
        return -1;
    }
    if (PyTuple_Size(tuple) != count)
        return fail("%s takes %d %s, got %zd", direction, count, what, PyTuple_Size(tuple));
    for (int i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (pointers && item == Py_None)
            values[i] = 0;
        else if (pointers)
            values[i] = (int64_t)PyLong_AsUnsignedLongLong(item);
        else
            values[i] = PyLong_AsLongLong(item);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

/* The largest number of threads to use; 0 where it is refused. */
UNUSED static int64_t threads_allowed(PyObject *number) {
    const long long threads = PyLong_AsLongLong(number);
    if (threads == -1 && PyErr_Occurred()) return 0;
    if (threads >= 1) return threads;
    fail("threads is %lld", threads);
    return 0;
}

/* A copy of the offsets, which nothing can change afterwards: all indices follow from it. Where no
 * sequences are packed, those of one. NULL where they are refused. */
UNUSED static int64_t *copied_offsets(int64_t pointer, int64_t packed, int64_t time) {
    const int64_t *from = (const int64_t *)(uintptr_t)pointer, sequences = packed ? packed : 1;
    int64_t *offsets = NULL;
    if (packed && !from) {
        fail("offsets of %lld sequences is null", (long long)packed);
        return NULL;
    }
    if (sequences < PTRDIFF_MAX / (int64_t)sizeof *offsets)
        offsets = malloc((size_t)(sequences + 1) * sizeof *offsets);
    if (!offsets) {
        PyErr_NoMemory();
        return NULL;
    }
    offsets[0] = 0, offsets[1] = time;
    if (packed) memcpy(offsets, from, (size_t)(sequences + 1) * sizeof *offsets);
    int rises = offsets[0] == 0 && offsets[sequences] == time;
    for (int64_t s = 0; s < sequences; s++) rises &= offsets[s] <= offsets[s + 1];
    if (rises) return offsets;
    free(offsets);
    fail("offsets do not rise from 0 to time, %lld", (long long)time);
    return NULL;
}

/* What a call returns: None, or MemoryError. The memory is freed. */
UNUSED static PyObject *finished(int status, void *memory) {
    free(memory);
    return status ? PyErr_NoMemory() : Py_NewRef(Py_None);
}
