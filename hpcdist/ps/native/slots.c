/* Finding the slots of ids, and entering new ones; see `slots.py`. */
#include "rows.h"

static void find_slots(const slots_t *t, const int64_t *wanted, int64_t *found, size_t n) {
    uint64_t hashes[BATCH];
    for (size_t begin = 0; begin < n; begin += BATCH, wanted += BATCH, found += BATCH) {
        size_t m = n - begin < BATCH ? n - begin : BATCH;
        for (size_t i = 0; i < m; i++) hashes[i] = begin_search(t, mixed((uint64_t)wanted[i]));
        for (size_t i = 0; i < m; i++) {
            found[i] = seek_slot(t, hashes[i], NULL);
            if (found[i] != NO_SLOT) __builtin_prefetch(t->ids + found[i]);
        }
        for (size_t i = 0; i < m; i++)
            if (found[i] != NO_SLOT && t->ids[found[i]] != wanted[i])
                found[i] = seek_slot(t, hashes[i], wanted + i);
    }
}

/* Enter slots of distinct ids that are absent; return -1 where the table is full. */
static int place_slots(const slots_t *t, const int64_t *slots, size_t n) {
    uint64_t hashes[BATCH];
    for (size_t begin = 0; begin < n; begin += BATCH, slots += BATCH) {
        size_t m = n - begin < BATCH ? n - begin : BATCH;
        for (size_t i = 0; i < m; i++)
            hashes[i] = begin_search(t, mixed((uint64_t)t->ids[slots[i]]));
        for (size_t i = 0; i < m; i++) {
            size_t place = home_of(t, hashes[i]), left = t->size;
            while (number_at(t, place) != FREE_SLOT && --left) place = (place + 1) & (t->size - 1);
            if (!left) return -1;
            put_number(t, place, tag_of(t, hashes[i]) | slots[i]);
        }
    }
    return 0;
}

/* Read a table from its buffers and its key; 0 if it is none. */
static int read_slots(slots_t *t, const Py_buffer *index, const Py_buffer *ids, size_t item,
                      uint64_t key) {
    if (item != sizeof(int32_t) && item != sizeof(int64_t)) return 0;
    size_t size = (size_t)index->len / item;
    if (size < 2 || size & (size - 1)) return 0;
    *t = slots_of(index->buf, size, item, ids->buf, words_in(ids), key);
    return 1;
}

/* find_slots(item, index, ids, wanted, found, key) */
static PyObject *py_find_slots(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4];
    slots_t table;
    if (n_args != 6) {
        PyErr_SetString(PyExc_TypeError, "find_slots(item, index, ids, wanted, found, key)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[0]);
    uint64_t key = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred() || open_buffers(args + 1, 4, 8, views) < 0) return NULL;
    if (!read_slots(&table, &views[0], &views[1], item, key) || views[2].len != views[3].len)
        return close_buffers(views, 4, "find_slots: the arrays do not fit", 0);
    Py_BEGIN_ALLOW_THREADS
    find_slots(&table, views[2].buf, views[3].buf, words_in(&views[2]));
    Py_END_ALLOW_THREADS
    return close_buffers(views, 4, NULL, 0);
}

/* place_slots(item, index, ids, slots, key) */
static PyObject *py_place_slots(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[3];
    slots_t table;
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, "place_slots(item, index, ids, slots, key)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[0]);
    uint64_t key = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred() || open_buffers(args + 1, 3, 1, views) < 0) return NULL;
    size_t n = words_in(&views[2]);
    if (!read_slots(&table, &views[0], &views[1], item, key) ||
        !all_within(views[2].buf, n, 0, (int64_t)table.n_ids) ||
        !all_within(views[2].buf, n, 0, table.slot))
        return close_buffers(views, 3, "place_slots: the arrays do not fit", 0);
    int full;
    Py_BEGIN_ALLOW_THREADS
    full = place_slots(&table, views[2].buf, n);
    Py_END_ALLOW_THREADS
    return close_buffers(views, 3, full ? "place_slots: the table is full" : NULL, 0);
}

static PyMethodDef FUNCTIONS[] = {
    FAST("find_slots", py_find_slots),
    FAST("place_slots", py_place_slots),
    {NULL, NULL, 0, NULL},
};

int add_slots(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
