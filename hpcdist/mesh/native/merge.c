/* Sorted arrays become one; `rules/merging.py` says when. */
#include "native.h"

/* ---- merging: two sorted runs become one; of equal elements those of the first run come first */

/* Elements are taken from the front and from the end at once, and the runs are cut in the middle
 * of the result: four chains of comparisons that do not wait for each other. Nothing branches on
 * what the elements are: the compiler must not know what a comparison has found. */
#define HIDE(FOUND) __asm__("" : "+r"(FOUND))
#define MERGE(NAME, T)                                                                           \
    typedef struct {                                                                             \
        const T *a, *a_end, *b, *b_end;                                                          \
    } NAME##_runs;                                                                               \
    static inline T NAME##_least(NAME##_runs *r) {                                               \
        T x = *r->a, y = *r->b;                                                                  \
        size_t second = y < x;                                                                   \
        HIDE(second);                                                                            \
        r->a += 1 - second;                                                                      \
        r->b += second;                                                                          \
        return y < x ? y : x;                                                                    \
    }                                                                                            \
    static inline T NAME##_largest(NAME##_runs *r) {                                             \
        T x = r->a_end[-1], y = r->b_end[-1];                                                    \
        size_t first = y < x;                                                                    \
        HIDE(first);                                                                             \
        r->a_end -= first;                                                                       \
        r->b_end -= 1 - first;                                                                   \
        return y < x ? x : y;                                                                    \
    }                                                                                            \
    static inline size_t NAME##_safe(const NAME##_runs *r) {                                     \
        size_t n = (size_t)(r->a_end - r->a), m = (size_t)(r->b_end - r->b);                     \
        return (n < m ? n : m) / 2;                                                              \
    }                                                                                            \
    /* Merge what is left to between two places. */                                              \
    static void NAME##_rest(NAME##_runs r, T *to, T *end) {                                      \
        for (size_t n; (n = NAME##_safe(&r)) > 0;)                                               \
            for (; n > 0; n--) {                                                                 \
                *to++ = NAME##_least(&r);                                                        \
                *--end = NAME##_largest(&r);                                                     \
            }                                                                                    \
        while (r.a < r.a_end && r.b < r.b_end) *to++ = NAME##_least(&r);                         \
        memcpy(to, r.a, (size_t)((const char *)r.a_end - (const char *)r.a));                    \
        to += r.a_end - r.a;                                                                     \
        memcpy(to, r.b, (size_t)((const char *)r.b_end - (const char *)r.b));                    \
    }                                                                                            \
    static void NAME##_merge(void *to_, const void *a_, size_t na, const void *b_, size_t nb) {  \
        T *to = to_;                                                                             \
        const T *a = a_, *b = b_;                                                                \
        size_t half = (na + nb) / 2, lo = half > nb ? half - nb : 0, hi = half < na ? half : na; \
        while (lo < hi) { /* how many of the first half are of the first run */                  \
            size_t i = lo + (hi - lo) / 2;                                                       \
            if (b[half - i - 1] < a[i])                                                          \
                hi = i;                                                                          \
            else                                                                                 \
                lo = i + 1;                                                                      \
        }                                                                                        \
        NAME##_runs one = {a, a + lo, b, b + (half - lo)};                                       \
        NAME##_runs two = {a + lo, a + na, b + (half - lo), b + nb};                             \
        T *front = to, *middle = to + half, *next = middle, *end = to + na + nb;                 \
        for (;;) {                                                                               \
            size_t n = NAME##_safe(&one), m = NAME##_safe(&two);                                 \
            n = n < m ? n : m;                                                                   \
            if (n == 0) break;                                                                   \
            for (size_t i = 0; i < n; i++) {                                                     \
                *front++ = NAME##_least(&one);                                                   \
                *next++ = NAME##_least(&two);                                                    \
                *--middle = NAME##_largest(&one);                                                \
                *--end = NAME##_largest(&two);                                                   \
            }                                                                                    \
        }                                                                                        \
        NAME##_rest(one, front, middle);                                                         \
        NAME##_rest(two, next, end);                                                             \
    }

MERGE(i32, int32_t)
MERGE(u32, uint32_t)
MERGE(i64, int64_t)
MERGE(u64, uint64_t)
MERGE(f32, float)
MERGE(f64, double)

typedef struct {
    const char *name;
    size_t item;
    void (*merge)(void *to, const void *a, size_t na, const void *b, size_t nb);
} merge_t;

static const merge_t MERGES[] = {
    {"int32", 4, i32_merge},  {"uint32", 4, u32_merge},  {"int64", 8, i64_merge},
    {"uint64", 8, u64_merge}, {"float32", 4, f32_merge}, {"float64", 8, f64_merge},
};
enum { N_MERGES = sizeof MERGES / sizeof *MERGES };

static PyObject *py_merge(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer to = {.obj = NULL}, a = {.obj = NULL}, b = {.obj = NULL};
    PyObject *result = NULL;
    if (n_args != 4) {
        PyErr_SetString(PyExc_TypeError, "merge(code, to, first, second)");
        return NULL;
    }
    long code = PyLong_AsLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    if (code < 0 || code >= N_MERGES) {
        PyErr_SetString(PyExc_ValueError, "no such kernel");
        return NULL;
    }
    const merge_t *row = &MERGES[code];
    if (PyObject_GetBuffer(args[1], &to, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(args[2], &a, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(args[3], &b, PyBUF_SIMPLE) < 0)
        goto end;
    if (to.len != a.len + b.len) {
        PyErr_SetString(PyExc_ValueError, "merge: the output is not as long as both runs");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    row->merge(to.buf, a.buf, (size_t)a.len / row->item, b.buf, (size_t)b.len / row->item);
    Py_END_ALLOW_THREADS
    result = Py_None;
    Py_INCREF(result);
end:
    if (b.obj) PyBuffer_Release(&b);
    if (a.obj) PyBuffer_Release(&a);
    if (to.obj) PyBuffer_Release(&to);
    return result;
}

static PyMethodDef FUNCTIONS[] = {FAST("merge", py_merge), {NULL, NULL, 0, NULL}};

/* MERGES: the number of the loop for each dtype. */
int add_merges(PyObject *module) {
    PyObject *merges = PyDict_New();
    for (int i = 0; merges && i < N_MERGES; i++) {
        PyObject *code = PyLong_FromLong(i);
        int failed = !code || PyDict_SetItemString(merges, MERGES[i].name, code) < 0;
        Py_XDECREF(code);
        if (failed) Py_CLEAR(merges);
    }
    if (!merges || PyModule_AddFunctions(module, FUNCTIONS) < 0) return -1;
    return PyModule_AddObject(module, "MERGES", merges);
}
