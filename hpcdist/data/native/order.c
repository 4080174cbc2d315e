/* An order of samples: a Feistel permutation of the numbers of so many bits, and its inverse. */
#include "datasets.h"

enum { FEISTEL_ROUNDS = 8 };

static inline uint64_t feistel_hash(uint64_t word, uint64_t key, unsigned bits) {
    word = (word + key) * UINT64_C(0x9E3779B97F4A7C15);
    word = (word ^ word >> 32) * UINT64_C(0xD6E8FEB86659FD93);
    return word >> (64 - bits);
}

static inline uint64_t feistel(uint64_t word, unsigned bits, const uint64_t *keys, int back) {
    unsigned low_bits = bits / 2, high_bits = bits - low_bits;
    uint64_t high = word >> low_bits, low = word & ((UINT64_C(1) << low_bits) - 1);
    for (int i = 0; i < FEISTEL_ROUNDS; i++) {
        int round = back ? FEISTEL_ROUNDS - 1 - i : i;
        if (round % 2)
            high ^= feistel_hash(low, keys[round], high_bits);
        else
            low ^= feistel_hash(high, keys[round], low_bits);
    }
    return high << low_bits | low;
}

/* Permute; what comes out beyond `total` goes in again. Apart, so that most need no branch. */
static inline void permute(const uint64_t *words, uint64_t *found, size_t n, uint64_t total,
                           unsigned bits, const uint64_t *keys, int back) {
    for (size_t i = 0; i < n; i++) found[i] = feistel(words[i], bits, keys, back);
    for (size_t i = 0; i < n; i++)
        while (found[i] >= total) found[i] = feistel(found[i], bits, keys, back);
}

static PyObject *py_permute(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[3] = {{.obj = NULL}, {.obj = NULL}, {.obj = NULL}};
    Py_buffer *words = &views[0], *found = &views[1], *keys = &views[2];
    PyObject *result = NULL;
    if (n_args != 6) {
        PyErr_SetString(PyExc_TypeError, "permute(numbers, found, keys, total, bits, back)");
        return NULL;
    }
    uint64_t total = PyLong_AsUnsignedLongLong(args[3]);
    unsigned long bits = PyLong_AsUnsignedLong(args[4]);
    int back = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (open_items(args[0], PyBUF_SIMPLE, 8, words) < 0 ||
        open_items(args[1], PyBUF_WRITABLE, 8, found) < 0 ||
        open_items(args[2], PyBUF_SIMPLE, 8, keys) < 0)
        goto end;
    size_t n = (size_t)words->len / 8;
    int fits = bits > 1 && bits < 64 && total <= UINT64_C(1) << bits && found->len == words->len &&
               keys->len == FEISTEL_ROUNDS * 8;
    for (size_t i = 0; fits && i < n; i++) fits = ((const uint64_t *)words->buf)[i] < total;
    if (!fits) { /* else a walk might never end */
        PyErr_SetString(PyExc_ValueError, "permute: the arrays do not fit");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    if (back)
        permute(words->buf, found->buf, n, total, (unsigned)bits, keys->buf, 1);
    else
        permute(words->buf, found->buf, n, total, (unsigned)bits, keys->buf, 0);
    Py_END_ALLOW_THREADS
    result = Py_None;
    Py_INCREF(result);
end:
    for (int i = 0; i < 3; i++)
        if (views[i].obj) PyBuffer_Release(&views[i]);
    return result;
}

static const number_t NUMBERS_HERE[] = {
    {"ROUNDS", FEISTEL_ROUNDS},
};

static PyMethodDef FUNCTIONS[] = {
    FAST("permute", py_permute),
    {NULL, NULL, 0, NULL},
};

int add_order(PyObject *module) {
    if (PyModule_AddFunctions(module, FUNCTIONS) < 0) return -1;
    return add_numbers(module, NUMBERS_HERE, sizeof NUMBERS_HERE / sizeof *NUMBERS_HERE);
}
