/* Rows between arrays and slabs; see `slabs.py`. */
#include "rows.h"

/* Return whether all of `n` numbers are from `least` on and below `limit`. */
CLONES static int are_all_within(const int64_t *numbers, size_t n, int64_t least, int64_t limit) {
    int outside = 0;
    for (size_t i = 0; i < n; i++) outside |= numbers[i] < least || numbers[i] >= limit;
    return !outside;
}

int all_within(const int64_t *numbers, size_t n, int64_t least, int64_t limit) {
    return are_all_within(numbers, n, least, limit);
}

CLONES static void take_rows(const slabs_t *s) {
    char *to = s->rows;
    for (size_t i = 0; i < s->n; i++, to += s->row) {
        if (i + ROWS_AHEAD < s->n && s->slots[i + ROWS_AHEAD] >= 0)
            __builtin_prefetch(row_at(s, s->slots[i + ROWS_AHEAD]));
        if (s->slots[i] >= 0) copy_row(to, row_at(s, s->slots[i]), s->row);
    }
}

static void put_rows(const slabs_t *s) {
    const char *from = s->rows;
    for (size_t i = 0; i < s->n; i++, from += s->row)
        if (s->slots[i] >= 0) memcpy(row_at(s, s->slots[i]), from, s->row);
}

static PyObject *move_rows(PyObject *const *args, Py_ssize_t n_args, int written,
                           void (*move)(const slabs_t *), const char *usage) {
    Py_buffer views[3];
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, usage);
        return NULL;
    }
    slabs_t s;
    long shift = PyLong_AsLong(args[3]);
    s.row = PyLong_AsSize_t(args[4]);
    if (PyErr_Occurred() || open_buffers(args, 3, (unsigned)written, views) < 0) return NULL;
    s.rows = views[0].buf, s.slabs = views[1].buf, s.slots = views[2].buf;
    s.n = words_in(&views[2]);
    size_t slabs = (size_t)views[1].len / sizeof(uintptr_t);
    if (!are_slabs(&s, shift, slabs, (size_t)views[0].len) ||
        !all_within(s.slots, s.n, INT64_MIN, (int64_t)(slabs << shift)))
        return close_buffers(views, 3, "a slot is outside of the slabs, or the array too small", 0);
    Py_BEGIN_ALLOW_THREADS
    move(&s);
    Py_END_ALLOW_THREADS
    return close_buffers(views, 3, NULL, 0);
}

static PyObject *py_take_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    return move_rows(args, n_args, 1, take_rows, "take_rows(out, slabs, slots, shift, row_bytes)");
}

static PyObject *py_put_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    return move_rows(args, n_args, 0, put_rows, "put_rows(rows, slabs, slots, shift, row_bytes)");
}

static PyMethodDef FUNCTIONS[] = {
    FAST("take_rows", py_take_rows),
    FAST("put_rows", py_put_rows),
    {NULL, NULL, 0, NULL},
};

int add_slabs(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
