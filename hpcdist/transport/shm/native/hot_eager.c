/* Eager operations on the hot path, and those ranks that come to them by Python; see `eager.h`. */
#include "hot.h"

static void note(hot_t *h, const print_t *print, uint64_t mark, PyObject *words) {
    eager_call_t *call = &h->eager[h->control->n_eager];
    h->eager_calls++;
    if (print) call->print = *print;
    call->mark = mark;
    PyObject *before = call->words;
    call->words = words ? Py_NewRef(words) : NULL;
    Py_XDECREF(before);
}

void note_eager(hot_t *h, const print_t *print, uint64_t mark) {
    note(h, print, mark, NULL);
    count_eager(h->control, print->number, print->detail);
}

int awaits_givers(const hot_t *h, const planned_t *p, const print_t *print, long patience) {
    const control_block_t *b = h->control;
    return p->to_root && p->root == b->rank && may_be_eager(b, p->total) &&
           awaits_others(b, print->number, print->detail, patience);
}

/* Give to the root, or take what all have given, as the root: they have, or all agree. */
static int reduce_eagerly(hot_t *h, const planned_t *p, const print_t *print, uint64_t mark) {
    control_block_t *b = h->control;
    int is_root = p->root == b->rank, at = b->n_eager;
    if (!all_give(b, !is_root && may_give(b, mark))) return 0;
    if (is_root && is_given(b, at, print->number, print->detail) != ALL_GIVEN) return 0;
    give(p, eager_place(b));
    if (!is_root) give_to_root(b, print->number, print->detail);
    const char *given[MOST];
    for (int r = 0; is_root && r < b->size; r++) given[r] = given_by(b, at, r);
    take_result(p, b->size, given);
    note_eager(h, print, mark);
    return 1;
}

int run_eagerly(hot_t *h, const planned_t *p, const print_t *print, long spins, uint64_t mark) {
    control_block_t *b = h->control;
    if (!may_be_eager(b, p->total)) return 0;
    if (p->to_root) return reduce_eagerly(h, p, print, mark);
    const char *given[MOST];
    if (p->root == b->rank) {
        if (!may_give(b, mark)) return 0;
        given[b->rank] = eager_place(b);
        give(p, eager_place(b));
        if (!give_eagerly(b, print->number, print->detail)) return 0;
    } else {
        given[p->root] = find_given(b, print->number, print->detail, p->root, spins);
        if (!given[p->root]) return 0;
    }
    take_result(p, b->size, given);
    note_eager(h, print, mark);
    return 1;
}

/* finds_given(fingerprint, detail, root) -> whether the root has given what this rank means; if it
 * has not, all ranks agree on the operation. */
PyObject *hot_finds_given(PyObject *self, PyObject *args) {
    control_block_t *b = ((hot_t *)self)->control;
    long long number, detail;
    int root;
    if (!PyArg_ParseTuple(args, "LLi", &number, &detail, &root)) return NULL;
    return PyBool_FromLong(may_be_eager(b, 0) && root >= 0 && root < b->size &&
                           find_given(b, number, detail, root, 0));
}

/* take_given(fingerprint, detail, root, out, first, words): take what has been found, from the byte
 * `first` on. */
PyObject *hot_take_given(PyObject *self, PyObject *args) {
    hot_t *h = (hot_t *)self;
    long long number, detail;
    int root;
    Py_ssize_t first;
    PyObject *out, *words;
    Py_buffer to;
    if (!PyArg_ParseTuple(args, "LLiOnO", &number, &detail, &root, &out, &first, &words) ||
        PyObject_GetBuffer(out, &to, PyBUF_WRITABLE) < 0)
        return NULL;
    const char *given = find_given(h->control, number, detail, root, 0);
    int fits = given && first >= 0 && first + to.len <= EAGER_BYTES;
    if (fits) {
        memcpy(to.buf, given + first, (size_t)to.len);
        note(h, NULL, 0, words);
        count_eager(h->control, number, detail);
    }
    PyBuffer_Release(&to);
    if (fits) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "take_given: nothing of that size has been given");
    return NULL;
}

/* all_give(nbytes) -> whether all ranks give so much to the root, and only that one waits; if they do
 * not, all agree on the operation. */
PyObject *hot_all_give(PyObject *self, PyObject *nbytes) {
    const control_block_t *b = ((hot_t *)self)->control;
    size_t most = PyLong_AsSize_t(nbytes);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(may_be_eager(b, most) && all_give(b, 0));
}

/* give(fingerprint, detail, data, words): give to the root, or, as the root, put own data there; and
 * count the operation. */
PyObject *hot_give(PyObject *self, PyObject *args) {
    hot_t *h = (hot_t *)self;
    control_block_t *b = h->control;
    long long number, detail;
    PyObject *data, *words;
    Py_buffer from;
    if (!PyArg_ParseTuple(args, "LLOO", &number, &detail, &data, &words) ||
        PyObject_GetBuffer(data, &from, PyBUF_SIMPLE) < 0)
        return NULL;
    int fits = may_be_eager(b, (size_t)from.len);
    if (fits) {
        memcpy(eager_place(b), from.buf, (size_t)from.len);
        give_to_root(b, number, detail);
        note(h, NULL, 0, words);
        h->chain_before = b->chain;
        count_eager(b, number, detail);
    }
    PyBuffer_Release(&from);
    if (fits) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "give: no place for that");
    return NULL;
}

/* has_all(fingerprint, detail) -> whether all have given to this rank, which has called `give`; None:
 * some will never, so all agree on the operation, and it does not count any more. */
PyObject *hot_has_all(PyObject *self, PyObject *args) {
    hot_t *h = (hot_t *)self;
    control_block_t *b = h->control;
    long long number, detail;
    if (!PyArg_ParseTuple(args, "LL", &number, &detail)) return NULL;
    if (!b->n_eager) {
        PyErr_SetString(PyExc_ValueError, "has_all: nothing is given");
        return NULL;
    }
    int found = is_given(b, b->n_eager - 1, number, detail);
    if (found != ELSEWHERE) return PyBool_FromLong(found == ALL_GIVEN);
    uncount_eager(b, h->chain_before);
    h->eager_calls--;
    Py_RETURN_NONE;
}

/* not_given() -> the ranks that have not given to this one; none, when it waits no more */
PyObject *hot_not_given(PyObject *self, PyObject *ignored) {
    (void)ignored;
    const control_block_t *b = ((hot_t *)self)->control;
    PyObject *ranks = PyList_New(0);
    for (int r = 0; ranks && b->n_eager && r < b->size; r++) {
        if (!is_missing(b, b->n_eager - 1, r)) continue;
        PyObject *rank = PyLong_FromLong(r);
        if (!rank || PyList_Append(ranks, rank) < 0) Py_CLEAR(ranks);
        Py_XDECREF(rank);
    }
    return ranks;
}

/* take_all(out): copy what each rank has given, one after the other. */
PyObject *hot_take_all(PyObject *self, PyObject *args) {
    const control_block_t *b = ((hot_t *)self)->control;
    PyObject *out;
    Py_buffer to;
    if (!PyArg_ParseTuple(args, "O", &out) || PyObject_GetBuffer(out, &to, PyBUF_WRITABLE) < 0)
        return NULL;
    size_t each = (size_t)to.len / (size_t)b->size;
    int fits = b->n_eager && each <= EAGER_BYTES && each * (size_t)b->size == (size_t)to.len;
    for (int r = 0; fits && r < b->size; r++)
        memcpy((char *)to.buf + (size_t)r * each, given_by(b, b->n_eager - 1, r), each);
    PyBuffer_Release(&to);
    if (fits) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "take_all: as many bytes as all have given");
    return NULL;
}

/* What is known of one: `words`, or (kind, operator, root, code of the dtype, shape, file or None,
 * line). */
static PyObject *told_of(const eager_call_t *call) {
    if (call->words) return Py_NewRef(call->words);
    const print_t *print = &call->print;
    const char *file = NULL;
    unsigned line = 0;
    if (call->mark && HOT.flight && HOT.flight->header) {
        const flight_record_t *r = HOT.flight->records + (call->mark & HOT.flight->mask);
        if (r->number == call->mark && r->file) file = HOT.flight->text + r->file, line = r->line;
    }
    PyObject *shape = PyTuple_New(print->axes);
    for (int i = 0; shape && i < print->axes; i++)
        PyTuple_SetItem(shape, i, PyLong_FromSsize_t(print->shape[i]));
    if (!shape) return NULL;
    return Py_BuildValue("(iiiiNzI)", print->kind, print->reduce_op, print->root, print->code,
                         shape, file, line);
}

/* earlier() -> the eager operations between the last agreement and the one before it */
PyObject *hot_earlier(PyObject *self, PyObject *ignored) {
    (void)ignored;
    const hot_t *h = (hot_t *)self;
    PyObject *all = PyTuple_New(h->control->n_sealed);
    for (int i = 0; all && i < h->control->n_sealed; i++) {
        PyObject *told = told_of(&h->eager[i]);
        if (!told) return Py_DECREF(all), NULL;
        PyTuple_SetItem(all, i, told);
    }
    return all;
}

void forget_eager(hot_t *h) {
    for (int i = 0; i < MOST_EAGER; i++) Py_CLEAR(h->eager[i].words);
}
