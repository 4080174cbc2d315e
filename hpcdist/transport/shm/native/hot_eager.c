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

int run_eagerly(hot_t *h, const planned_t *p, const print_t *print, long spins, uint64_t mark) {
    control_block_t *b = h->control;
    if (!may_be_eager(b, p->total)) return 0;
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

/* What is known of one: `words`, or (kind, root, code of the dtype, shape, file or None, line). */
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
    return Py_BuildValue("(iiiNzI)", print->kind, print->root, print->code, shape, file, line);
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
