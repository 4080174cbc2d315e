/* Rows of datasets: `columns.py`, `order.py` and `multislot.py` hold the same in NumPy. */
#ifndef HPCDIST_DATASETS_H
#define HPCDIST_DATASETS_H
#include "../../native/compiled.h"

/* An object's memory, which must hold whole items; -1 and an exception if it does not. */
static inline int open_items(PyObject *object, int flags, size_t item, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, flags) < 0) return -1;
    if ((size_t)view->len % item == 0) return 0;
    PyBuffer_Release(view);
    view->obj = NULL;
    PyErr_SetString(PyExc_ValueError, "a buffer does not hold whole items");
    return -1;
}

int add_columns(PyObject *module);
int add_order(PyObject *module);
int add_multislot(PyObject *module);

#endif
