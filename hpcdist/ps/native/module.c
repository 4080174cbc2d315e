/* `hpcdist.ps._native`: the loops over rows. */
#include "rows.h"

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (!module || add_merging(module) < 0 || add_slots(module) < 0 || add_slabs(module) < 0 ||
        add_reading(module) < 0 || add_rules(module) < 0)
        return NULL;
    return module;
}
