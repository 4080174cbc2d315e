/* `hpcdist.data._native`: rows of datasets. */
#include "datasets.h"

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (!module || add_columns(module) < 0 || add_order(module) < 0 || add_multislot(module) < 0)
        return NULL;
    return module;
}
