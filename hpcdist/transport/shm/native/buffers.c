/* Memory that Python gives by address. */
#include "buffers.h"

/* An address is given as a number or as the object that owns the memory (the caller keeps it). */
int as_address(PyObject *object, uintptr_t *address) {
    Py_buffer view;
    if (PyLong_CheckExact(object)) {
        *address = (uintptr_t)PyLong_AsUnsignedLongLong(object);
        return PyErr_Occurred() ? -1 : 0;
    }
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) return -1;
    *address = (uintptr_t)view.buf;
    PyBuffer_Release(&view);
    return 0;
}

static PyObject *py_address(PyObject *self, PyObject *object) {
    (void)self;
    uintptr_t address;
    return as_address(object, &address) < 0 ? NULL : PyLong_FromUnsignedLongLong(address);
}

int read_addresses(PyObject *tuple, uintptr_t *into) {
    Py_ssize_t n = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    if (n < 1 || n > MOST) {
        PyErr_SetString(PyExc_ValueError, "not a tuple of 1 to 256 addresses");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        into[i] = (uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : (int)n;
}

static PyMethodDef FUNCTIONS[] = {
    {"address", py_address, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_buffers(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
