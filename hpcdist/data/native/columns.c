/* Runs of values, taken from a column; see `columns.py`. */
#include "datasets.h"

static PyObject *py_copy_runs(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4] = {{.obj = NULL}, {.obj = NULL}, {.obj = NULL}, {.obj = NULL}};
    Py_buffer *to = &views[0], *offsets = &views[1], *from = &views[2], *starts = &views[3];
    PyObject *result = NULL;
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, "copy_runs(to, offsets, values, starts, item)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (open_items(args[0], PyBUF_WRITABLE, 1, to) < 0 ||
        open_items(args[1], PyBUF_SIMPLE, 8, offsets) < 0 ||
        open_items(args[2], PyBUF_SIMPLE, 1, from) < 0 ||
        open_items(args[3], PyBUF_SIMPLE, 8, starts) < 0)
        goto end;
    if (offsets->len != starts->len + 8) {
        PyErr_SetString(PyExc_ValueError, "copy_runs: one offset more than starts is needed");
        goto end;
    }
    size_t rows = (size_t)starts->len / 8, row = 0;
    const int64_t *at = offsets->buf, *begin = starts->buf;
    int64_t n_to = item ? to->len / (Py_ssize_t)item : 0;
    int64_t n_from = item ? from->len / (Py_ssize_t)item : 0;
    char *target = to->buf;
    const char *source = from->buf;
    Py_BEGIN_ALLOW_THREADS
    for (; item && row < rows; row++) {
        int64_t n = (int64_t)((uint64_t)at[row + 1] - (uint64_t)at[row]);
        if (at[row] < 0 || n < 0 || at[row] > n_to || n > n_to - at[row] || begin[row] < 0 ||
            begin[row] > n_from || n > n_from - begin[row])
            break;
        memcpy(target + (size_t)at[row] * item, source + (size_t)begin[row] * item,
               (size_t)n * item);
    }
    Py_END_ALLOW_THREADS
    if (item && row < rows) {
        PyErr_SetString(PyExc_ValueError, "copy_runs: a row lies outside of the values");
        goto end;
    }
    result = Py_None;
    Py_INCREF(result);
end:
    for (int i = 0; i < 4; i++)
        if (views[i].obj) PyBuffer_Release(&views[i]);
    return result;
}

static PyMethodDef FUNCTIONS[] = {
    FAST("copy_runs", py_copy_runs),
    {NULL, NULL, 0, NULL},
};

int add_columns(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
