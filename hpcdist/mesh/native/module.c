/* The extension module `hpcdist.mesh._native`. */
#include "native.h"

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module && (add_merges(module) < 0 || add_sums(module) < 0)) Py_CLEAR(module);
    return module;
}
