/* Copies: by vectors, or past the caches; of runs, and of boxes of several axes. */
#include "copy.h"
#include "buffers.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__)
/* Write a cache line past the caches. */
static inline void stream_line(char *to, const char *from) {
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* Write as many pages as there are past the caches, four at a time: the processor looks up where
 * the next ones lie while it copies others. Memory that ranks share has small pages. */
static size_t stream_pages(char *to, const char *from, size_t nbytes) {
    enum { STRIPE = 4096, ALL = 4 * STRIPE };
    size_t done = 0;
    for (; done + ALL <= nbytes; done += ALL)
        for (size_t line = done; line < done + STRIPE; line += 64)
            for (size_t i = line; i < line + ALL; i += STRIPE) stream_line(to + i, from + i);
    return done;
}
#endif

/* Write a run past the caches, whatever its place and length; `end_of_stream` has to follow. */
static void stream_run(char *to, const char *from, size_t nbytes) {
#if defined(__x86_64__)
    size_t head = (size_t)(-(uintptr_t)to % 64), i = head < nbytes ? head : nbytes;
    memcpy(to, from, i);
    i += stream_pages(to + i, from + i, nbytes - i);
    for (; i + 64 <= nbytes; i += 64) stream_line(to + i, from + i);
    memcpy(to + i, from + i, nbytes - i);
#else
    memcpy(to, from, nbytes);
#endif
}

static void end_of_stream(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Write past the caches. Not in the pipe: there what a core writes is read by another soon, and 64 KiB
 * to 16 MiB took 1.2 to 1.5 times as long. */
static void stream(char *to, const char *from, size_t nbytes) {
    stream_run(to, from, nbytes);
    end_of_stream();
}

/* From here on what is written would leave a core's cache before anyone reads it. Measured on a Xeon
 * with 2 MiB of it, two ranks: at 4 MiB 0.8 to 1 times the speed where arrays are used again and
 * again, 1.5 times where they are in no cache; from 8 MiB on 1.2 to 1.5 times. */
enum { STREAMED_FROM = 6 << 20 };

/* Copy what another core wrote: vectors are several times faster at it than "rep movsb". */
CLONES static void copy_vectors(char *restrict to, const char *restrict from, size_t nbytes) {
    typedef long long vector __attribute__((vector_size(32), aligned(1), may_alias));
    size_t i = 0;
    for (; i + 128 <= nbytes; i += 128)
        for (int j = 0; j < 128; j += 32) *(vector *)(to + i + j) = *(const vector *)(from + i + j);
    memcpy(to + i, from + i, nbytes - i);
}

void copy(char *restrict to, const char *restrict from, size_t nbytes) {
    if (nbytes >= STREAMED_FROM)
        stream(to, from, nbytes);
    else
        copy_vectors(to, from, nbytes);
}

static PyObject *py_copy(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer to, from;
    if (n_args != 2) {
        PyErr_SetString(PyExc_TypeError, "copy(to, from)");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE) < 0) return NULL;
    if (PyObject_GetBuffer(args[1], &from, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&to);
        return NULL;
    }
    size_t nbytes = (size_t)(to.len < from.len ? to.len : from.len);
    Py_BEGIN_ALLOW_THREADS
    copy(to.buf, from.buf, nbytes);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    Py_RETURN_NONE;
}

static PyObject *py_fetch(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer to;
    if (n_args != 2) {
        PyErr_SetString(PyExc_TypeError, "fetch(to, address)");
        return NULL;
    }
    const char *from = (const char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE) < 0) return NULL;
    if (to.len > (32 << 10)) {
        Py_BEGIN_ALLOW_THREADS
        copy(to.buf, from, (size_t)to.len);
        Py_END_ALLOW_THREADS
    } else {
        memcpy(to.buf, from, (size_t)to.len);
    }
    PyBuffer_Release(&to);
    Py_RETURN_NONE;
}

/* Copy `nbytes` from each address to one place after the other. */
static PyObject *py_gather(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer to;
    uintptr_t from[MOST];
    if (n_args != 3) {
        PyErr_SetString(PyExc_TypeError, "gather(to, addresses, nbytes)");
        return NULL;
    }
    int n = read_addresses(args[1], from);
    size_t nbytes = n < 0 ? 0 : PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE) < 0) return NULL;
    if ((size_t)to.len < nbytes * (size_t)n) {
        PyBuffer_Release(&to);
        PyErr_SetString(PyExc_ValueError, "gather: the array is too small");
        return NULL;
    }
    PyThreadState *state = to.len > (32 << 10) ? PyEval_SaveThread() : NULL;
    for (int i = 0; i < n; i++) {
        char *place = (char *)to.buf + (size_t)i * nbytes;
        if ((uintptr_t)place == from[i]) continue;
        if (state)
            copy(place, (const char *)from[i], nbytes);
        else
            memcpy(place, (const void *)from[i], nbytes);
    }
    if (state) PyEval_RestoreThread(state);
    PyBuffer_Release(&to);
    Py_RETURN_NONE;
}

/* ---- boxes: runs of bytes at equal distances, along several axes */

enum { AXES = 64 }; /* NumPy's limit */

typedef struct {
    Py_ssize_t axes;
    size_t run, counts[AXES];
    ptrdiff_t to[AXES], from[AXES];
} box_t;

static void stream_box(char *to, const char *from, const box_t *box) {
    size_t index[AXES] = {0};
    Py_ssize_t axis = 0;
    while (axis >= 0) {
        stream_run(to, from, box->run);
        for (axis = box->axes - 1; axis >= 0; axis--) { /* the next run */
            to += box->to[axis];
            from += box->from[axis];
            if (++index[axis] < box->counts[axis]) break;
            to -= box->to[axis] * (ptrdiff_t)box->counts[axis];
            from -= box->from[axis] * (ptrdiff_t)box->counts[axis];
            index[axis] = 0;
        }
    }
    end_of_stream();
}

static int read_sizes(PyObject *tuple, Py_ssize_t axes, ptrdiff_t *into) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != axes) {
        PyErr_SetString(PyExc_ValueError, "not a tuple of one number per axis");
        return -1;
    }
    for (Py_ssize_t i = 0; i < axes; i++) into[i] = PyLong_AsSsize_t(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : 0;
}

/* Copy `counts` runs of `nbytes` from one address to another, at these strides, past the caches. */
static PyObject *py_copy_box(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    if (n_args != 6) {
        PyErr_SetString(PyExc_TypeError,
                        "copy_box(to, from, nbytes, counts, to_strides, from_strides)");
        return NULL;
    }
    box_t box;
    char *to = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    const char *from = (const char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    box.run = PyLong_AsSize_t(args[2]);
    box.axes = PyTuple_Check(args[3]) ? PyTuple_Size(args[3]) : -1;
    if (PyErr_Occurred()) return NULL;
    if (box.axes < 0 || box.axes > AXES) {
        PyErr_SetString(PyExc_ValueError, "not a tuple of at most 64 numbers");
        return NULL;
    }
    ptrdiff_t counts[AXES];
    if (read_sizes(args[3], box.axes, counts) < 0 || read_sizes(args[4], box.axes, box.to) < 0 ||
        read_sizes(args[5], box.axes, box.from) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < box.axes; i++) {
        if (counts[i] <= 0) Py_RETURN_NONE;
        box.counts[i] = (size_t)counts[i];
    }
    Py_BEGIN_ALLOW_THREADS
    stream_box(to, from, &box);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {
    FAST("copy", py_copy),         FAST("fetch", py_fetch), FAST("gather", py_gather),
    FAST("copy_box", py_copy_box), {NULL, NULL, 0, NULL},
};

int add_copy(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
