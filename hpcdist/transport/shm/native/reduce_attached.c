/* Reducing ordinary arrays where they lie.
 *
 * Each rank owns a share of the elements, and nobody else touches that share, in anyone's array:
 * block by block the owner reads what the others have there (`attach`), combines it with its own
 * in the order of the ranks, and writes the result wherever it is wanted, while all of this is in
 * its cache. So nothing is rounded in between, and the ranks wait for each other once, at the end.
 *
 * Measured on two cores of a Xeon, float32, with blocks of 128 to 256 KiB, against reading the results
 * out of the arrays of their owners after a step: 2 MiB 145 us and 310, 4 MiB 340 us and 570.
 */
#include "attach.h"
#include <errno.h>

static size_t block_of(const share_t *s) {
    const size_t in_cache = 256 << 10, least = 16 << 10;
    size_t others = s->size > 1 ? (size_t)s->size - 1 : 1;
    size_t wanted = in_cache / others > least ? in_cache / others : least;
    size_t bytes = s->room_bytes / others < wanted ? s->room_bytes / others : wanted;
    return bytes / s->kernel->item / 64 * 64;
}

/* Reduce the elements from `at` on, `n` of them; 0, or the error that keeps it from others' memory. */
static int reduce_block(const share_t *s, size_t at, size_t n, size_t block) {
    size_t item = s->kernel->item, start = at * item;
    job_t job = {.kernel = s->kernel, .n_sources = s->size, .n_outs = 1, .count = n};
    job.divisor = s->divisor;
    job.sources[s->rank] = s->from[s->rank] + start;
    for (int k = 1; k < s->size; k++) { /* each rank begins with another one */
        int r = (s->rank + k) % s->size;
        char *place = s->room + (size_t)(k - 1) * block * item;
        if (attach(s->pids[r], s->from[r] + start, place, n * item, 0)) return errno;
        job.sources[r] = (uintptr_t)place;
    }
    uintptr_t own = s->to[s->rank];
    char *result = own ? (char *)own + start : s->room; /* which `combine` may write to, too */
    job.outs[0] = (uintptr_t)result;
    combine(&job);
    for (int k = 1; k < s->size; k++) {
        int r = (s->rank + k) % s->size;
        if (s->to[r] && attach(s->pids[r], s->to[r] + start, result, n * item, 1)) return errno;
    }
    return 0;
}

/* Reduce this rank's share; 0, or the error that has stopped it on its way. */
int reduce_share(const share_t *s) {
    size_t block = block_of(s);
    int failed = block ? 0 : EINVAL;
    for (size_t at = 0; !failed && at < s->count; at += block)
        failed = reduce_block(s, at, s->count - at < block ? s->count - at : block, block);
    return failed;
}

static int read_all(PyObject *tuple, int size, uintptr_t *into) {
    int n = read_addresses(tuple, into);
    if (n < 0) return -1;
    if (n == size) return 0;
    PyErr_SetString(PyExc_ValueError, "reduce_attached: one of each for each rank");
    return -1;
}

/* reduce_attached(code, rank, processes, sources, targets, count, divisor, room, its bytes): the
 * addresses are those of this rank's share in everyone's memory; a target of 0: none. */
static PyObject *py_reduce_attached(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *code, *processes, *sources, *targets, *room_;
    share_t s;
    uintptr_t pids[MOST], room;
    Py_ssize_t count, room_bytes;
    if (!PyArg_ParseTuple(args, "OiOOOndOn", &code, &s.rank, &processes, &sources, &targets, &count,
                          &s.divisor, &room_, &room_bytes))
        return NULL;
    if (!(s.kernel = kernel_of(code)) || (s.size = read_addresses(processes, pids)) < 0 ||
        read_all(sources, s.size, s.from) < 0 || read_all(targets, s.size, s.to) < 0 ||
        as_address(room_, &room) < 0)
        return NULL;
    if (s.rank < 0 || s.rank >= s.size || count < 0 || room_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "reduce_attached: no such rank, or less than nothing");
        return NULL;
    }
    for (int r = 0; r < s.size; r++) s.pids[r] = (pid_t)pids[r];
    s.count = (size_t)count, s.room = (char *)room, s.room_bytes = (size_t)room_bytes;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = reduce_share(&s);
    Py_END_ALLOW_THREADS
    errno = failed;
    return failed ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

static PyMethodDef FUNCTIONS[] = {
    {"reduce_attached", py_reduce_attached, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_reduce_attached(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
