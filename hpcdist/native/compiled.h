/* What the compiled parts of all packages begin with: Python, and how loops are compiled. Each
 * package has its own, in `native/`; they are optional, and have the same in Python or NumPy. */
#ifndef HPCDIST_COMPILED_H
#define HPCDIST_COMPILED_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Built with HPCDIST_BASELINE, it does what it does on an x86-64 without AVX2, for tests. */
#if defined(__x86_64__) && !defined(HPCDIST_BASELINE)
#define AVX2
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

enum { LINE = 64 }; /* bytes of a cache line */

/* A function of a module or a method that takes its arguments as an array. */
#define FAST(NAME, FUNCTION) {NAME, (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL, NULL}

/* A number that is compiled in, and that Python has, too; `expect` in `compiled.py` compares. */
typedef struct {
    const char *name;
    long long value;
} number_t;

/* Add numbers, by their names, to NUMBERS of a module; -1: an error is set. */
static inline int add_numbers(PyObject *module, const number_t *numbers, size_t n) {
    PyObject *all = PyObject_GetAttrString(module, "NUMBERS");
    if (!all) {
        PyErr_Clear();
        all = PyDict_New();
        if (!all || PyModule_AddObject(module, "NUMBERS", Py_NewRef(all)) < 0) return -1;
    }
    int failed = 0;
    for (size_t i = 0; !failed && i < n; i++) {
        PyObject *value = PyLong_FromLongLong(numbers[i].value);
        failed = !value || PyDict_SetItemString(all, numbers[i].name, value) < 0;
        Py_XDECREF(value);
    }
    Py_DECREF(all);
    return failed ? -1 : 0;
}

#endif
