/* Plans through shared memory.
 *
 * A `SharedRequest` is what `plan_slots.py` makes of a small operation that the ranks of a node
 * have agreed on: everything is described, so that a start copies this rank's contribution into
 * its slot, and whoever has seen all ranks start takes the result. It is used like a persistent
 * request of MPI. The memory of its buffers is kept alive by its owner.
 *
 * A slot is a number, how often its rank has started, and two places for contributions, used in
 * turn: a rank starts again only when all have started, hence have taken what was before.
 */
#include "hot.h"

typedef struct {
    PyObject_HEAD
    planned_t planned;
    int rank, size, active;
    uint64_t started;
    size_t payload;
    long spins;
    char *slots[MOST]; /* of each rank */
} shared_request_t;

static uint64_t *started_by(const shared_request_t *q, int rank) {
    return (uint64_t *)q->slots[rank];
}

static char *place_of(const shared_request_t *q, int rank) {
    return q->slots[rank] + LINE + (q->started & 1) * q->payload;
}

static int request_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    shared_request_t *q = (shared_request_t *)self;
    planned_t *p = &q->planned;
    PyObject *slots, *from, *to, *kernel;
    Py_ssize_t piece, part, first, payload;
    uintptr_t places[MOST];
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!inO!nO!nniOdl", &PyTuple_Type, &slots, &q->rank, &payload,
                          &PyTuple_Type, &from, &piece, &PyTuple_Type, &to, &part, &first,
                          &p->source, &kernel, &p->divisor, &q->spins))
        return -1;
    if ((q->size = read_addresses(slots, places)) < 0) return -1;
    for (int r = 0; r < q->size; r++) q->slots[r] = (char *)places[r];
    p->n_from = PyTuple_Size(from) ? read_addresses(from, places) : 0;
    for (int i = 0; i < p->n_from; i++) p->from[i] = (const char *)places[i];
    p->n_to = PyTuple_Size(to) ? read_addresses(to, places) : 0;
    for (int i = 0; i < p->n_to; i++) p->to[i] = (char *)places[i];
    p->kernel = kernel == Py_None ? NULL : kernel_of(kernel);
    if (PyErr_Occurred()) return -1;
    if (q->rank < 0 || q->rank >= q->size || p->source >= q->size || piece < 0 || part < 0 ||
        first < 0 || p->n_from * piece > payload || first + part > payload ||
        (p->n_to > 1 && p->n_to != q->size)) {
        PyErr_SetString(PyExc_ValueError, "SharedRequest: what is planned does not fit the slots");
        return -1;
    }
    p->piece = (size_t)piece, p->part = (size_t)part, p->first = (size_t)first;
    q->payload = (size_t)payload;
    q->started = *started_by(q, q->rank);
    return 0;
}

static void request_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Start(): give what the buffers hold now; what was started before has been taken. */
static PyObject *request_start(PyObject *self, PyObject *ignored) {
    shared_request_t *q = (shared_request_t *)self;
    (void)ignored;
    if (q->active) {
        PyErr_SetString(PyExc_RuntimeError, "Start: what was started before has not ended");
        return NULL;
    }
    q->active = 1, q->started++;
    give(&q->planned, place_of(q, q->rank));
    __atomic_store_n(started_by(q, q->rank), q->started, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static int have_all_started(const shared_request_t *q) {
    for (int r = 0; r < q->size; r++)
        if (__atomic_load_n(started_by(q, r), __ATOMIC_ACQUIRE) < q->started) return 0;
    return 1;
}

static PyObject *take_if_there(shared_request_t *q, long spins) {
    int complete = !q->active || have_all_started(q);
    uint64_t since = 0;
    for (long looks = 0; !complete && rest_patiently(looks, spins, &since); looks++)
        complete = have_all_started(q);
    if (complete && q->active) {
        const char *given[MOST];
        for (int r = 0; r < q->size; r++) given[r] = place_of(q, r);
        take_result(&q->planned, q->size, given);
        q->active = 0;
    }
    return PyBool_FromLong(complete);
}

/* Test(): whether it has ended; if all have started, it ends now. Meet() looks a little longer. */
static PyObject *request_test(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return take_if_there((shared_request_t *)self, 0);
}

static PyObject *request_meet(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return take_if_there((shared_request_t *)self, ((shared_request_t *)self)->spins);
}

/* behind(): the ranks that have not started as often as this one. */
static PyObject *request_behind(PyObject *self, PyObject *ignored) {
    const shared_request_t *q = (shared_request_t *)self;
    (void)ignored;
    PyObject *ranks = PyList_New(0);
    for (int r = 0; ranks && r < q->size; r++) {
        if (__atomic_load_n(started_by(q, r), __ATOMIC_ACQUIRE) >= q->started) continue;
        PyObject *rank = PyLong_FromLong(r);
        if (!rank || PyList_Append(ranks, rank) < 0) Py_CLEAR(ranks);
        Py_XDECREF(rank);
    }
    return ranks;
}

static PyMethodDef REQUEST_METHODS[] = {
    {"Start", request_start, METH_NOARGS, NULL},
    {"Test", request_test, METH_NOARGS, NULL},
    {"Meet", request_meet, METH_NOARGS, NULL},
    {"behind", request_behind, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot REQUEST_SLOTS[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, request_init},
    {Py_tp_dealloc, request_dealloc},
    {Py_tp_methods, REQUEST_METHODS},
    {0, NULL},
};
static PyType_Spec REQUEST_SPEC = {"hpcdist.transport._kernel.SharedRequest",
                                   sizeof(shared_request_t), 0, Py_TPFLAGS_DEFAULT, REQUEST_SLOTS};

int add_plan_slots(PyObject *module) {
    PyObject *type = PyType_FromSpec(&REQUEST_SPEC);
    return type ? PyModule_AddObject(module, "SharedRequest", type) : -1;
}
