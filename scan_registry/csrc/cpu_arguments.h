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

UNUSED static int fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(PyExc_ValueError, format, arguments);
    va_end(arguments);
    return -1;
}

UNUSED static int type_named(PyObject *name) {
    if (!PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "dtype and gates_dtype must be str");
        return -1;
    }
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
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
