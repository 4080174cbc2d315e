/* The pipe: reductions of ordinary arrays through staging memory, part by part.
 *
 * The elements are cut into parts of `size` slices. For each part a rank
 *   IN      copies the slices of the others into its staging memory, where they read them,
 *   FOLD    combines its own slice, from everyone's staging memory and its own array,
 *   OUT     copies the other slices of the result from where their owners left them.
 * IN is one part ahead, so that ranks seldom wait: a rank's steps are in 0, in 1, fold 0, in 2,
 * fold 1, ... Two parts take turns in the memory: in p+2 comes after out p, hence after everyone's
 * fold p; fold p+2 comes after everyone's in p+2, hence after everyone's out p.
 *
 * In a reduce_scatter the slices of one rank lie one after the other (`stride` apart from the next
 * rank's); in an all_reduce or reduce they take turns (`stride` is 0).
 */
#include "control.h"
#include "copy.h"

enum { IN, AWAIT_IN, FOLD_, AWAIT_FOLD, OUT };

static size_t slice_at(const control_block_t *b, size_t part, int rank, size_t *offset) {
    const pipe_t *p = &b->pipe;
    size_t first, rest;
    if (p->stride) { /* of `length` elements per rank */
        first = part * p->slice;
        rest = p->length - first;
        *offset = (size_t)rank * p->stride + first;
        return rest < p->slice ? rest : p->slice;
    }
    first = part * p->slice * (size_t)b->size;
    rest = p->length - first;
    size_t each = (rest + (size_t)b->size - 1) / (size_t)b->size;
    each = each < p->slice ? (each + 63) / 64 * 64 : p->slice; /* whole cache lines */
    if (each > p->slice) each = p->slice;
    size_t start = (size_t)rank * each;
    *offset = first + start;
    return start >= rest ? 0 : rest - start < each ? rest - start : each;
}

static char *staged_in(const control_block_t *b, int owner, size_t part, int rank) {
    const pipe_t *p = &b->pipe;
    size_t place = (part & 1) * (size_t)b->size + (size_t)rank;
    return p->stages[owner] + place * p->slice * p->kernel->item;
}

static char *staged_out(const control_block_t *b, int owner, size_t part) {
    const pipe_t *p = &b->pipe;
    size_t place = 2 * (size_t)b->size + (part & 1);
    return p->stages[owner] + place * p->slice * p->kernel->item;
}

static void pipe_in(const control_block_t *b, size_t part) {
    const pipe_t *p = &b->pipe;
    for (int turn = 1; turn < b->size; turn++) {
        int rank = (b->rank + turn) % b->size;
        size_t offset, n = slice_at(b, part, rank, &offset), item = p->kernel->item;
        copy(staged_in(b, b->rank, part, rank), p->send + offset * item, n * item);
    }
}

static void pipe_fold(const control_block_t *b) {
    const pipe_t *p = &b->pipe;
    size_t offset, item = p->kernel->item;
    job_t job = {.kernel = p->kernel, .n_sources = b->size, .n_outs = 0, .divisor = p->divisor};
    job.count = slice_at(b, p->part, b->rank, &offset);
    for (int r = 0; r < b->size; r++)
        job.sources[r] = r == b->rank ? (uintptr_t)(p->send + offset * item)
                                      : (uintptr_t)staged_in(b, r, p->part, b->rank);
    if (p->mine) {
        size_t skipped = p->stride ? (size_t)b->rank * p->stride : 0;
        job.outs[job.n_outs++] = (uintptr_t)(p->mine + (offset - skipped) * item);
    }
    if (!p->stride) job.outs[job.n_outs++] = (uintptr_t)staged_out(b, b->rank, p->part);
    combine(&job);
}

static void pipe_out(const control_block_t *b) {
    const pipe_t *p = &b->pipe;
    for (int turn = 1; p->all && turn < b->size; turn++) {
        int rank = (b->rank + turn) % b->size;
        size_t offset, n = slice_at(b, p->part, rank, &offset), item = p->kernel->item;
        copy(p->all + offset * item, staged_out(b, rank, p->part), n * item);
    }
}

int pipe_go(control_block_t *b, long patience) {
    pipe_t *p = &b->pipe;
    for (;;) {
        size_t ahead = p->part + 1 < p->parts;
        switch (p->phase) {
        case IN:
            if (p->part == 0) {
                pipe_in(b, 0);
                take_step(b);
            }
            if (ahead) pipe_in(b, p->part + 1);
            take_step(b);        /* also where there is nothing ahead: steps are counted */
            p->phase = AWAIT_IN; /* fall through */
        case AWAIT_IN:
            if (!all_at(b, p->before + (p->part ? 2 * p->part : 1), patience)) return 0;
            p->phase = FOLD_; /* fall through */
        case FOLD_:
            pipe_fold(b);
            take_step(b);
            p->phase = AWAIT_FOLD; /* fall through */
        case AWAIT_FOLD:
            if (!all_at(b, p->before + 2 * p->part + 3, patience)) return 0;
            p->phase = OUT; /* fall through */
        case OUT:
            pipe_out(b);
            p->phase = IN;
            if (++p->part == p->parts) return 1;
        }
    }
}

PyObject *control_go_on(PyObject *self, PyObject *patience_) {
    control_block_t *b = (control_block_t *)self;
    long patience = PyLong_AsLong(patience_);
    int done;
    if (!PyErr_Occurred() && b->pipe.part >= b->pipe.parts)
        PyErr_SetString(PyExc_RuntimeError, "go_on: begin first");
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = pipe_go(b, patience);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(done);
}

void pipe_begin(control_block_t *b) {
    pipe_t *p = &b->pipe;
    size_t whole = p->stride ? p->slice : p->slice * (size_t)b->size;
    p->parts = p->length ? (p->length + whole - 1) / whole : 1;
    p->part = 0;
    p->phase = IN;
    count_from_here(b);
    p->before = b->step;
}

PyObject *control_begin(PyObject *self, PyObject *args) {
    control_block_t *b = (control_block_t *)self;
    pipe_t *p = &b->pipe;
    PyObject *code, *stages, *send_, *mine_, *all_;
    uintptr_t send, mine, all;
    Py_ssize_t slice, length, stride;
    uintptr_t addresses[MOST];
    if (!PyArg_ParseTuple(args, "OOOOOnnnd", &code, &send_, &mine_, &all_, &stages, &slice, &length,
                          &stride, &p->divisor))
        return NULL;
    if (!(p->kernel = kernel_of(code)) || read_addresses(stages, addresses) < 0 ||
        as_address(send_, &send) < 0 || as_address(mine_, &mine) < 0 || as_address(all_, &all) < 0)
        return NULL;
    if (PyTuple_Size(stages) != b->size || slice < 64 || length < 0 || stride < 0) {
        PyErr_SetString(PyExc_ValueError, "begin: a stage per rank, and slices of 64 or more");
        return NULL;
    }
    for (int r = 0; r < b->size; r++) p->stages[r] = (char *)addresses[r];
    p->send = (const char *)send;
    p->mine = (char *)mine;
    p->all = (char *)all;
    p->slice = (size_t)slice / 64 * 64;
    p->length = (size_t)length;
    p->stride = (size_t)stride;
    pipe_begin(b);
    Py_RETURN_NONE;
}
