/* The hot path of a few ranks that share no memory: what they have to say, and a few bytes of data,
 * travels in slots, by a persistent all-gather of MPI; see `transport/mpi/exchange.py`. What has no
 * room in a slot is agreed on here, and done in Python. The control block of such a group is this
 * rank's own, and only says who it is.
 *
 * MPI lets go of the interpreter lock, so this takes the turn of the group first, and keeps it for
 * what is left to Python.
 */
#include "hot.h"
#include <string.h>

/* How long a rank looks whether the others have come, if it waits for them, and if it does not. */
enum { LOOKS_NS = 30000, FEW_LOOKS_NS = 3000 };

struct slots {
    PyObject *start, *test; /* of the request */
    PyObject *under_way;    /* see `MpiContext.under_way` */
    Py_buffer mine, all;
    size_t data; /* where in a slot they begin, after six numbers */
    int64_t clock_ns;
};

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static const char *slot_from(const struct slots *s, int rank) {
    return (const char *)s->all.buf + (size_t)rank * (size_t)s->mine.len;
}

/* Whether all ranks mean the same, and have come in time. */
static int agreed(const struct slots *s, int size) {
    int64_t deadline = INT64_MAX, arrival = INT64_MIN;
    const int64_t *own = s->mine.buf;
    for (int r = 0; r < size; r++) {
        const int64_t *theirs = (const int64_t *)(const void *)slot_from(s, r);
        if (memcmp(own, theirs, 4 * sizeof *own)) return 0;
        if (theirs[4] < deadline) deadline = theirs[4];
        if (-theirs[5] > arrival) arrival = -theirs[5];
    }
    return arrival <= deadline;
}

/* Whether the others' slots are here; what MPI raises is kept for Python. */
static int is_here(hot_t *h, int64_t until) {
    struct slots *s = h->slots;
    int found = 0;
    do {
        PyObject *done = PyObject_CallObject(s->test, NULL);
        if (!done) return -1;
        found = done == Py_True;
        Py_DECREF(done);
    } while (!found && now_ns() < until);
    return found;
}

static int has_room(const hot_t *h, const planned_t *p) { return p->total <= h->control->payload; }

static int post(hot_t *h, const planned_t *p, const print_t *print, int64_t now) {
    struct slots *s = h->slots;
    int64_t *own = s->mine.buf;
    own[0] = print->number, own[1] = -print->number;
    own[2] = print->detail, own[3] = -print->detail;
    own[4] = now + s->clock_ns + h->limit_ns, own[5] = -(now + s->clock_ns);
    if (has_room(h, p)) give(p, (char *)own + s->data);
    if (PyList_SetSlice(s->under_way, 0, PY_SSIZE_T_MAX, NULL) < 0) return -1;
    Py_CLEAR(h->failure);
    h->sequence++, h->posted++;
    PyObject *started = PyObject_CallObject(s->start, NULL);
    Py_XDECREF(started);
    return started ? 0 : -1;
}

int perform_in_slots(hot_t *h, const planned_t *p, const print_t *print, int waits) {
    int64_t now = now_ns();
    int collects = PyGC_Disable(), found = take_turn(h->turn) ? post(h, p, print, now) : -1;
    if (!found) found = is_here(h, now + (waits ? LOOKS_NS : FEW_LOOKS_NS));
    if (found < 0) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        Py_XDECREF(type), Py_XDECREF(traceback), Py_XDECREF(h->failure);
        h->failure = value;
    }
    if (collects) PyGC_Enable();
    if (found <= 0 || !agreed(h->slots, h->control->size)) return 0;
    if (!has_room(h, p)) return AGREED;
    const char *given[MOST];
    for (int r = 0; r < h->control->size; r++) given[r] = slot_from(h->slots, r) + h->slots->data;
    take_result(p, h->control->size, given);
    give_turn_back(h->turn);
    return ALL_DONE;
}

void forget_slots(hot_t *h) {
    struct slots *s = h->slots;
    Py_CLEAR(h->failure);
    h->slots = NULL;
    if (!s) return;
    Py_XDECREF(s->start), Py_XDECREF(s->test), Py_XDECREF(s->under_way);
    if (s->mine.obj) PyBuffer_Release(&s->mine);
    if (s->all.obj) PyBuffer_Release(&s->all);
    free(s);
}

/* learn_slots(start, test, the slot of this rank, all slots, where in them data begin, what is added
 * to the clock, the list `under_way`): the first two are of a request of MPI, which fills all slots. */
PyObject *hot_learn_slots(PyObject *self, PyObject *args) {
    hot_t *h = (hot_t *)self;
    PyObject *start, *test, *mine, *all, *under_way;
    Py_ssize_t data;
    long long clock_ns;
    if (!PyArg_ParseTuple(args, "OOOOnLO!", &start, &test, &mine, &all, &data, &clock_ns,
                          &PyList_Type, &under_way))
        return NULL;
    struct slots *s = calloc(1, sizeof *s);
    if (!s) return PyErr_NoMemory();
    forget_slots(h);
    h->slots = s;
    s->start = Py_NewRef(start), s->test = Py_NewRef(test), s->under_way = Py_NewRef(under_way);
    s->data = (size_t)data, s->clock_ns = clock_ns;
    if (PyObject_GetBuffer(mine, &s->mine, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(all, &s->all, PyBUF_SIMPLE) < 0) {
        forget_slots(h);
        return NULL;
    }
    size_t slot = (size_t)s->mine.len;
    if (s->data >= 6 * sizeof(int64_t) && s->data + h->control->payload <= slot &&
        (size_t)s->all.len == slot * (size_t)h->control->size)
        Py_RETURN_NONE;
    forget_slots(h);
    PyErr_SetString(PyExc_ValueError, "learn_slots: a slot for each rank, with room for its data");
    return NULL;
}
