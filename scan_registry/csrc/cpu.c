/* The module scan_registry.ops._cpu: the functions of all families for CPUs, which are in kernels/<family>/cpu, and the level of
 * vector instructions that they use.
 *
 * Families share
 *   cpu_arguments.h   between Python's arguments and numbers
 *   cpu_threads.h     the threads that run tasks
 *   cpu_levels.h      one body, compiled for each level, by cpu_level.h
 *   cpu_convert.h     conversions and transposes
 *   cpu_types.h       element types
 */
#include "cpu_arguments.h"

static int runs_portable(void) { return 1; }

#if defined(__x86_64__)
/* Whether the processor has the instructions, and the system keeps the registers they use. */
static int runs_avx2(void) {
    const unsigned needed = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
    unsigned a, b, c, d, registers, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed) return 0;
    __asm__("xgetbv" : "=a"(registers), "=d"(high) : "c"(0));
    return (registers & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
#endif

typedef struct {
    const char *name;
    int (*runs_here)(void);
} Level;

/* As cpu_levels.h counts them. */
static const Level levels[] = {
    {"portable", runs_portable},
#if defined(__x86_64__)
    {"avx2", runs_avx2},
#endif
};
enum { LEVELS = sizeof levels / sizeof *levels };

int level_in_use;

static PyObject *instructions(PyObject *module, PyObject *args) {
    const char *name = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "|s:instructions", &name)) return NULL;
    int chosen = name ? -1 : level_in_use;
    for (int i = 0; name && i < LEVELS && chosen < 0; i++)
        if (!strcmp(name, levels[i].name) && levels[i].runs_here()) chosen = i;
    if (chosen < 0)
        return PyErr_Format(PyExc_ValueError, "instructions %s do not run on this processor", name);
    level_in_use = chosen;
    return PyUnicode_FromString(levels[chosen].name);
}

static PyMethodDef functions[] = {
    {"instructions", instructions, METH_VARARGS,
     "instructions(name=None) -> str\n\n"
     "The vector instructions in use: \"avx2\" or \"portable\". Given a name, use those instead."},
    {NULL, NULL, 0, NULL}};

/* What families offer, which their files add when the library is loaded, before the module is made. */
static Functions *added;

void add_functions(Functions *more) {
    more->next = added;
    added = more;
}

static int execute(PyObject *module) {
    for (int i = 0; i < LEVELS; i++)
        if (levels[i].runs_here()) level_in_use = i;
    for (const Functions *more = added; more; more = more->next)
        if (PyModule_AddFunctions(module, more->table)) return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                 "_cpu",
                                 "Scans, recurrent networks and convolutions on CPUs.",
                                 0,
                                 functions,
                                 slots,
                                 NULL,
                                 NULL,
                                 NULL};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&definition); }
