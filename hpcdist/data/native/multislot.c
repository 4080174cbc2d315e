/* Numbers as text. A token ends at a space, and every line with a newline or the end of the text. */
#include "datasets.h"
#include <math.h>

static inline int is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
static inline int is_end(char c) { return is_blank(c) || c == '\n'; }

enum { SLOT_INT64, SLOT_INT32, SLOT_UINT64, SLOT_FLOAT64, SLOT_FLOAT32, N_SLOT_TYPES };

/* Digits as a number; 0 where there are none, or more than 64 bits. */
static int read_digits(const char **at, const char *end, uint64_t *number) {
    const char *p = *at;
    uint64_t n = 0;
    for (; p < end && (unsigned char)(*p - '0') < 10; p++) {
        unsigned digit = (unsigned)(*p - '0');
        if (n > (UINT64_MAX - digit) / 10) return 0;
        n = n * 10 + digit;
    }
    if (p == *at) return 0;
    *at = p;
    *number = n;
    return 1;
}

static int read_integer(const char *p, const char *end, int type, uint64_t *cell) {
    int negative = *p == '-';
    uint64_t n;
    if (*p == '-' || *p == '+') p++;
    if (!read_digits(&p, end, &n) || p != end) return 0;
    if (type == SLOT_INT32) {
        if (n > (uint64_t)INT32_MAX + (uint64_t)negative) return 0;
    } else if (negative && (type == SLOT_UINT64 ? n != 0 : n > (uint64_t)1 << 63)) {
        return 0;
    }
    *cell = negative ? 0 - n : n;
    return 1;
}

static const double POWERS[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

/* What is not exact in one division or multiplication is up to Python. */
static int read_odd_float(const char *p, const char *end, double *value, PyThreadState **thread) {
    char text[64], *copy = text, *stop = NULL;
    size_t n = (size_t)(end - p);
    int good = 0;
    PyEval_RestoreThread(*thread);
    if (n >= sizeof text) copy = PyMem_Malloc(n + 1);
    if (copy) {
        memcpy(copy, p, n);
        copy[n] = 0;
        *value = PyOS_string_to_double(copy, &stop, NULL);
        good = !PyErr_Occurred() && stop == copy + n;
        PyErr_Clear();
        if (copy != text) PyMem_Free(copy);
    }
    *thread = PyEval_SaveThread();
    return good;
}

/* Whether a number would become an infinity; one that is written as such is none. */
static int is_too_large(double value, const char *text, int type) {
    if (*text == '-' || *text == '+') text++;
    if (*text == 'i' || *text == 'I') return 0;
    return fabs(value) >= (type == SLOT_FLOAT32 ? 0x1.ffffffp127 : HUGE_VAL);
}

static int read_float(const char *begin, const char *end, int type, uint64_t *cell,
                      PyThreadState **thread) {
    const char *p = begin;
    int negative = *p == '-', digits = 0, point = 0, exact = 1;
    uint64_t mantissa = 0;
    double value;
    if (*p == '-' || *p == '+') p++;
    for (; p < end; p++) {
        if ((unsigned char)(*p - '0') < 10) {
            exact = exact && mantissa < (uint64_t)1 << 49; /* so ten times of it has 53 bits */
            if (exact) mantissa = mantissa * 10 + (uint64_t)(*p - '0');
            digits++;
            if (point) point++;
        } else if (*p == '.' && !point) {
            point = 1;
        } else {
            break;
        }
    }
    int places = point ? point - 1 : 0;
    if (p == end && digits && exact && places <= 22) {
        value = (double)mantissa / POWERS[places];
        if (negative) value = -value;
    } else if (!read_odd_float(begin, end, &value, thread) || is_too_large(value, begin, type)) {
        return 0;
    }
    memcpy(cell, &value, 8);
    return 1;
}

typedef struct {
    const int32_t *types;
    const int64_t *counts; /* of the values of a slot, or -1: any number */
    size_t n_slots;
    uint64_t *cells, *end_cells;
    int64_t *lengths, *end_lengths;
} multislot_t;

/* Parse one line; NULL where it is no record. `slots` goes on behind what was written. */
static const char *read_line(multislot_t *slots, const char *p, const char *end,
                             PyThreadState **thread) {
    uint64_t *cell = slots->cells;
    if (slots->end_lengths - slots->lengths < (ptrdiff_t)slots->n_slots) return NULL;
    for (size_t slot = 0; slot < slots->n_slots; slot++) {
        uint64_t n;
        while (p < end && is_blank(*p)) p++;
        if (!read_digits(&p, end, &n) || (p < end && !is_end(*p))) return NULL;
        if (n > (uint64_t)(slots->end_cells - cell)) return NULL;
        if (slots->counts[slot] >= 0 && n != (uint64_t)slots->counts[slot]) return NULL;
        slots->lengths[slot] = (int64_t)n;
        int type = slots->types[slot];
        for (uint64_t i = 0; i < n; i++) {
            while (p < end && is_blank(*p)) p++;
            const char *token = p;
            while (p < end && !is_end(*p)) p++;
            if (p == token) return NULL;
            int good = type >= SLOT_FLOAT64 ? read_float(token, p, type, cell, thread)
                                            : read_integer(token, p, type, cell);
            if (!good) return NULL;
            cell++;
        }
    }
    while (p < end && is_blank(*p)) p++;
    if (p < end && *p != '\n') return NULL;
    slots->cells = cell;
    slots->lengths += slots->n_slots;
    return p < end ? p + 1 : p;
}

static PyObject *py_parse_slots(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[5] = {
        {.obj = NULL}, {.obj = NULL}, {.obj = NULL}, {.obj = NULL}, {.obj = NULL}};
    PyObject *result = NULL;
    if (n_args != 6) {
        PyErr_SetString(PyExc_TypeError, "parse_slots(text, start, types, counts, cells, lengths)");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (open_items(args[0], PyBUF_SIMPLE, 1, &views[0]) < 0 ||
        open_items(args[2], PyBUF_SIMPLE, 4, &views[1]) < 0 ||
        open_items(args[3], PyBUF_SIMPLE, 8, &views[2]) < 0 ||
        open_items(args[4], PyBUF_WRITABLE, 8, &views[3]) < 0 ||
        open_items(args[5], PyBUF_WRITABLE, 8, &views[4]) < 0)
        goto end;
    multislot_t slots = {.types = views[1].buf, .counts = views[2].buf};
    slots.n_slots = (size_t)views[1].len / 4;
    slots.cells = views[3].buf;
    slots.end_cells = slots.cells + views[3].len / 8;
    slots.lengths = views[4].buf;
    slots.end_lengths = slots.lengths + views[4].len / 8;
    int known = 1;
    for (size_t i = 0; i < slots.n_slots; i++)
        known = known && slots.types[i] >= 0 && slots.types[i] < N_SLOT_TYPES;
    if (!known || !slots.n_slots || views[2].len != 2 * views[1].len || start < 0 ||
        start > views[0].len) {
        PyErr_SetString(PyExc_ValueError, "parse_slots: no such slots or start");
        goto end;
    }
    const char *text = views[0].buf, *p = text + start, *end = text + views[0].len;
    PyThreadState *thread = PyEval_SaveThread();
    int good = 1;
    while (p < end) {
        const char *q = p;
        while (q < end && is_blank(*q)) q++;
        if (q == end || *q == '\n') { /* an empty line */
            p = q == end ? q : q + 1;
            continue;
        }
        if (!(q = read_line(&slots, q, end, &thread))) {
            good = 0;
            break;
        }
        p = q;
    }
    PyEval_RestoreThread(thread);
    result = Py_BuildValue(
        "nnnO", (Py_ssize_t)(p - text), (Py_ssize_t)(slots.cells - (uint64_t *)views[3].buf),
        (Py_ssize_t)(slots.lengths - (int64_t *)views[4].buf), good ? Py_True : Py_False);
end:
    for (int i = 0; i < 5; i++)
        if (views[i].obj) PyBuffer_Release(&views[i]);
    return result;
}

static const number_t NUMBERS_HERE[] = {
    {"INT64", SLOT_INT64},     {"INT32", SLOT_INT32},     {"UINT64", SLOT_UINT64},
    {"FLOAT64", SLOT_FLOAT64}, {"FLOAT32", SLOT_FLOAT32},
};

static PyMethodDef FUNCTIONS[] = {
    FAST("parse_slots", py_parse_slots),
    {NULL, NULL, 0, NULL},
};

int add_multislot(PyObject *module) {
    if (PyModule_AddFunctions(module, FUNCTIONS) < 0) return -1;
    return add_numbers(module, NUMBERS_HERE, sizeof NUMBERS_HERE / sizeof *NUMBERS_HERE);
}
