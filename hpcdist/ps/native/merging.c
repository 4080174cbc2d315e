/* Rows of equal ids become one; see `merging.py`. */
#include "rows.h"

enum { DIGIT = 11, BUCKETS = 1 << DIGIT, DIGITS = (64 + DIGIT - 1) / DIGIT };

typedef struct {
    uint64_t key;
    int64_t place;
} keyed_t;

/* Sort ids with their places, by their digits from the lowest that differs on; stable. Returns
 * which of both arrays has the result. */
static keyed_t *sort_ids(const uint64_t *ids, size_t n, keyed_t *from, keyed_t *to,
                         size_t *counts) {
    const uint64_t sign = 1ull << 63;
    uint64_t differ = 0;
    for (size_t i = 0; i < n; i++) differ |= ids[i] ^ ids[0];
    int low = differ ? __builtin_ctzll(differ) : 0, digits = 0;
    while (low + digits * DIGIT < 64 && differ >> (low + digits * DIGIT)) digits++;
    memset(counts, 0, (size_t)digits * BUCKETS * sizeof *counts);
    for (size_t i = 0; i < n; i++) {
        uint64_t key = ids[i] ^ sign;
        from[i] = (keyed_t){key, (int64_t)i};
        for (int d = 0; d < digits; d++)
            counts[d * BUCKETS + (key >> (low + d * DIGIT) & (BUCKETS - 1))]++;
    }
    for (int d = 0; d < digits; d++) {
        size_t *begin = counts + d * BUCKETS, sum = 0;
        for (int b = 0; b < BUCKETS; b++) {
            size_t count = begin[b];
            begin[b] = sum;
            sum += count;
        }
        for (size_t i = 0; i < n; i++)
            to[begin[from[i].key >> (low + d * DIGIT) & (BUCKETS - 1)]++] = from[i];
        keyed_t *old = from;
        from = to, to = old;
    }
    return from;
}

/* group_ids(ids, unique, order, starts) -> how many are distinct */
static PyObject *py_group_ids(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4];
    if (n_args != 4) {
        PyErr_SetString(PyExc_TypeError, "group_ids(ids, unique, order, starts)");
        return NULL;
    }
    if (open_buffers(args, 4, 0xe, views) < 0) return NULL;
    size_t n = words_in(&views[0]), found = 0;
    if (words_in(&views[1]) < n || words_in(&views[2]) < n || words_in(&views[3]) < n + 1)
        return close_buffers(views, 4, "group_ids: an output is too short", 0);
    int64_t *unique = views[1].buf, *order = views[2].buf, *starts = views[3].buf;
    size_t tables = DIGITS * BUCKETS * sizeof(size_t);
    char *room = n <= (SIZE_MAX / 4 - tables) / sizeof(keyed_t)
                     ? malloc(tables + 2 * n * sizeof(keyed_t))
                     : NULL;
    if (!room) {
        close_buffers(views, 4, "", 0);
        PyErr_Clear();
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    keyed_t *first = (keyed_t *)(room + tables);
    keyed_t *sorted = sort_ids(views[0].buf, n, first, first + n, (size_t *)room);
    for (size_t i = 0; i < n; i++) {
        if (!i || sorted[i].key != sorted[i - 1].key) {
            unique[found] = (int64_t)(sorted[i].key ^ 1ull << 63);
            starts[found++] = (int64_t)i;
        }
        order[i] = sorted[i].place;
    }
    starts[found] = (int64_t)n;
    Py_END_ALLOW_THREADS
    free(room);
    return close_buffers(views, 4, NULL, (Py_ssize_t)found);
}

#define SEGMENT_ADD(T)                                                                             \
    CLONES static void segment_add_##T(T *sums, const T *rows, size_t width, const int64_t *order, \
                                       const int64_t *starts, size_t n) {                          \
        size_t last = (size_t)starts[n];                                                           \
        for (size_t s = 0; s < n; s++, sums += width) {                                            \
            for (size_t k = (size_t)starts[s]; k < (size_t)starts[s + 1]; k++) {                   \
                const T *row = rows + (size_t)order[k] * width;                                    \
                if (k + AHEAD < last)                                                              \
                    prefetch_row((const char *)(rows + (size_t)order[k + AHEAD] * width),          \
                                 width * sizeof(T));                                               \
                if (k == (size_t)starts[s])                                                        \
                    memcpy(sums, row, width * sizeof(T));                                          \
                else                                                                               \
                    for (size_t i = 0; i < width; i++) sums[i] += row[i];                          \
            }                                                                                      \
        }                                                                                          \
    }
SEGMENT_ADD(float)
SEGMENT_ADD(double)

/* segment_add(item, sums, rows, order, starts): `item` is 4 (float) or 8 (double) */
static PyObject *py_segment_add(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4];
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, "segment_add(item, sums, rows, order, starts)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[0]);
    if (PyErr_Occurred() || open_buffers(args + 1, 4, 1, views) < 0) return NULL;
    const int64_t *order = views[2].buf, *starts = views[3].buf;
    size_t n = words_in(&views[3]), places = words_in(&views[2]), width = 0;
    int fits = n > 0 && (item == sizeof(float) || item == sizeof(double));
    n -= fits;
    if (fits && n > 0) {
        width = (size_t)views[0].len / item / n;
        size_t rows = width ? (size_t)views[1].len / item / width : 0;
        fits = width * n * item == (size_t)views[0].len && (!width || rows) &&
               all_within(order, places, 0, (int64_t)(rows ? rows : places + 1)) &&
               all_within(starts, n + 1, 0, (int64_t)places + 1);
        for (size_t i = 0; fits && i < n; i++) fits = starts[i] < starts[i + 1];
    }
    if (!fits) return close_buffers(views, 4, "segment_add: the arrays do not fit", 0);
    Py_BEGIN_ALLOW_THREADS
    if (item == sizeof(float))
        segment_add_float(views[0].buf, views[1].buf, width, order, starts, n);
    else
        segment_add_double(views[0].buf, views[1].buf, width, order, starts, n);
    Py_END_ALLOW_THREADS
    return close_buffers(views, 4, NULL, 0);
}

static PyMethodDef FUNCTIONS[] = {
    FAST("group_ids", py_group_ids),
    FAST("segment_add", py_segment_add),
    {NULL, NULL, 0, NULL},
};

int add_merging(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
