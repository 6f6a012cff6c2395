/* Kernel launches, from what was prepared for them; see launch.h, fast_path.h and xla.h.
 *
 * No CUDA header, no CUDA library and nothing of torch's is needed to build this.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "launch.h"
#include "fast_path.h"
#include "xla.h"

static PyObject *bind(PyObject *module, PyObject *args) {
    unsigned long long launch, set, current, push, pop;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKK:bind", &launch, &set, &current, &push, &pop)) return NULL;
    launch_kernel = (LaunchKernel)(uintptr_t)launch;
    memset_async = (MemsetAsync)(uintptr_t)set;
    get_current = (GetCurrent)(uintptr_t)current;
    push_current = (PushCurrent)(uintptr_t)push;
    pop_current = (PopCurrent)(uintptr_t)pop;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS,
     "bind(cuLaunchKernel, cuMemsetD8Async, cuCtxGetCurrent, cuCtxPushCurrent, cuCtxPopCurrent)\n\n"
     "Take the addresses of the driver's functions."},
    {"xla_handlers", xla_handlers, METH_O,
     "xla_handlers(resolve) -> tuple[int, int]\n\n"
     "The addresses of XLA's handlers for CPUs and GPUs. resolve makes, of a call's text and the device's ordinal (-1 for\n"
     "the CPU), a tuple: a Launch or a function for CPUs; of each pointer the number of its argument, or -1 - that of its\n"
     "result, or None; the function's arguments before and after the addresses; how far addresses are aligned."},
    {NULL, NULL, 0, NULL}};

/* Two copies of this package that have the same library file, as two revisions in the cache of Hugging Face's Hub may, have these
   types in common: the file is loaded once, and its functions know one type of each. */
static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **type) {
    if (!*type) *type = (PyTypeObject *)PyType_FromSpec(spec);
    if (!*type) return -1;
    Py_INCREF(*type); /* for what it is compared with */
    const int status = PyModule_AddObject(module, name, (PyObject *)*type);
    if (status) Py_DECREF(*type);
    return status;
}

static int execute(PyObject *module) {
    return add_type(module, "Launch", &launch_spec, &launch_type) ||
                   add_type(module, "FastLaunch", &fast_launch_spec, &fast_launch_type) ||
                   add_type(module, "FastPath", &fast_path_spec, &fast_path_type)
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                 "_launcher",
                                 "Prepared kernel launches.",
                                 0,
                                 functions,
                                 slots,
                                 NULL,
                                 NULL,
                                 NULL};

PyMODINIT_FUNC PyInit__launcher(void) { return PyModuleDef_Init(&definition); }
