/* The verbs of arrays: post, agree and take; and the object of a transport. */
#include "hot.h"
#include "copy.h"

shared_t HOT;

/* Reduce the parts of what `size` ranks have given; as `combine` does, without its large
 * accumulators. */
static void reduce_parts(const planned_t *p, int size, const char *const *given) {
    enum { FEW = 32 };
    char accumulator[FEW * 8] __attribute__((aligned(64)));
    const kernel_t *k = p->kernel;
    size_t n = p->part / k->item;
    if (n <= FEW && k->fold) {
        k->load(accumulator, given[0] + p->first, n);
        for (int r = 1; r < size; r++) k->fold(accumulator, given[r] + p->first, n);
        k->store(p->to[0], accumulator, n, p->divisor);
        return;
    }
    job_t job;
    job.kernel = k, job.n_sources = size, job.n_outs = 1;
    job.count = n, job.divisor = p->divisor;
    job.outs[0] = (uintptr_t)p->to[0];
    for (int r = 0; r < size; r++) job.sources[r] = (uintptr_t)given[r] + p->first;
    combine(&job);
}

void take_result(const planned_t *p, int size, const char *const *given) {
    if (p->n_to == 0) return;
    if (p->kernel) {
        reduce_parts(p, size, given);
        return;
    }
    if (p->source >= 0) {
        copy_between(p->to[0], given[p->source] + p->first, p->part);
        return;
    }
    for (int r = 0; r < size; r++)
        if (given[r]) copy_between(place_to(p, r), given[r] + p->first, p->part);
}

void give(const planned_t *p, char *payload) {
    for (int i = 0; i < p->n_from; i++)
        copy_for_others(payload + (size_t)i * p->piece, p->from[i], p->piece);
}

/* What an exchange moves from this rank to a rank. */
static const char *piece_for(const planned_t *p, int rank) {
    return p->n_from == 1 ? p->from[0] + (size_t)rank * p->part : p->from[rank];
}

void give_others(const planned_t *p, const control_block_t *b, char *payload) {
    int is_exchange = p->kind == FACTS.ALLTOALL;
    if (!is_exchange) give(p, payload);
    for (int r = 0; is_exchange && r < b->size; r++)
        if (r != b->rank) copy_for_others(payload + (size_t)r * p->part, piece_for(p, r), p->part);
}

void give_the_rest(const planned_t *p, const control_block_t *b, char *payload) {
    if (p->kind == FACTS.ALLTOALL) memcpy(payload + p->first, piece_for(p, b->rank), p->part);
}

void take_from_others(const planned_t *p, const control_block_t *b, const char **given) {
    if (p->kind == FACTS.ALLTOALL) { /* first: what is written may be where it lies */
        memmove(place_to(p, b->rank), piece_for(p, b->rank), p->part);
        given[b->rank] = NULL;
    }
    take_result(p, b->size, given);
}

/* Post, agree and take. 0: posted, but the others have not come, or mean something else. */
static int perform(hot_t *h, const planned_t *p, const print_t *print, long spins, uint64_t mark,
                   uint64_t now) {
    control_block_t *b = h->control;
    if ((p->source >= 0 || p->to_root) && run_eagerly(h, p, print, spins, mark)) return 1;
    b->sequence++, h->sequence++;
    char *payload = payload_of(b, b->rank);
    give_others(p, b, payload);
    if (!agree(b, now, print->number, h->limit_ns, print->detail, 0, NO_OTHER, spins))
        return give_the_rest(p, b, payload), 0;
    const char *given[MOST];
    for (int r = 0; r < b->size; r++) given[r] = payload_of(b, r);
    take_from_others(p, b, given);
    return 1;
}

static uint64_t record_planned(PyObject *group, const planned_t *p, long long number,
                               unsigned flags, uint64_t now) {
    size_t nbytes = p->piece * (size_t)(p->n_from > 1 ? p->n_from : 1);
    return record(group, number, p->kind, p->like.dtype ? p->like.dtype->code : 0, nbytes, p->root,
                  flags, now);
}

/* A verb, called as ``verb(*arguments, group, sync_op)``: what the operation returns if it has run
 * it, None if that is left to Python. One that need not end is posted, and has mostly ended then:
 * the others are in step, or have waited; else the thread of the queue ends it. */
static PyObject *run_verb(Py_ssize_t verb, PyObject *const *args, Py_ssize_t n_args) {
    const verb_t *v = &VERBS[verb];
    if (n_args != v->n_args + 2) {
        PyErr_SetString(PyExc_TypeError, "a verb of the hot path got another number of arguments");
        return NULL;
    }
    int waits = args[n_args - 1] == Py_True;
    if (!is_usual() || !(waits || args[n_args - 1] == Py_False)) Py_RETURN_NONE;
    PyObject *group = group_of(args[n_args - 2]), *result = NULL;
    hot_t *h = group ? hot_of(group) : NULL;
    planned_t p;
    p.kind = *v->kind, p.loose = v->loose, p.reduce_op = -1, p.root = 0;
    p.like.dtype = NULL, p.kernel = NULL, p.source = -1, p.divisor = 1.0;
    p.total = p.piece = p.part = p.first = 0, p.n_from = p.n_to = 0, p.to_root = 0;
    const print_t *print = NULL;
    int usual = h && v->plan(h, args, &p);
    int is_large = usual && p.total > h->control->payload;
    int at_once = waits || p.total <= AT_ONCE_BYTES;
    if (h && h->slots)
        usual = usual && p.n_from <= 1 && p.n_to <= 1 && (waits || !is_large);
    else
        usual = usual && (!is_large || (at_once && is_movable(h, &p)));
    usual = usual && (print = print_of(&p)) && is_idle(h);
    long patience = waits ? HOT.spins : LITTLE_PATIENCE;
    usual = usual && (is_large || !awaits_givers(h, &p, print, patience));
    if (!usual) {
        result = Py_NewRef(Py_None);
    } else {
        long long number = count_issued(group, h);
        unsigned flags = waits ? 0 : FLIGHT_STARTED;
        uint64_t now = flight_now();
        uint64_t mark = record_planned(group, &p, number, flags, now);
        PyObject *describe = PyTuple_GetItem(HOT.describe, verb);
        int state = h->slots ? perform_in_slots(h, &p, print, waits) : 0;
        if (state == ALL_DONE)
            result = Py_NewRef(HOT.done);
        else if (state == AGREED)
            result = end_in_turn(h, group, describe, args, v->n_args, state);
        else if (is_large && !h->slots && waits && is_soon_staged(h, &p))
            result = run_staged(h, group, describe, args, v->n_args, &p, print);
        else if (is_large && !h->slots)
            result =
                run_large(h, group, describe, args, v->n_args, &p, print, waits ? NULL : &mark);
        else if (!h->slots && perform(h, &p, print, patience, mark, now))
            result = Py_NewRef(HOT.done);
        else if (waits)
            result = hand_over(h, group, describe, args, v->n_args, Py_None);
        else if ((result = hand_to_thread(h, group, describe, args, v->n_args, mark)))
            mark = 0; /* the work has it */
        if (mark) flight_end(HOT.flight, mark, result ? FLIGHT_ENDED : FLIGHT_FAILED);
    }
    Py_XDECREF((PyObject *)h), Py_XDECREF(group);
    return result;
}

#define VERB(NAME, AT)                                                                      \
    static PyObject *hot_##NAME(PyObject *self, PyObject *const *args, Py_ssize_t n_args) { \
        (void)self;                                                                         \
        return run_verb(AT, args, n_args);                                                  \
    }
VERB(barrier, 0)
VERB(all_reduce, 1)
VERB(reduce, 2)
VERB(reduce_scatter, 3)
VERB(broadcast, 4)
VERB(all_gather, 5)
VERB(gather, 6)
VERB(scatter, 7)
VERB(alltoall, 8)
VERB(alltoall_single, 9)

/* ---- the object of a transport */

static int hot_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    hot_t *h = (hot_t *)self;
    PyObject *control, *ranks, *queued, *turn;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!OO", &control, &PyTuple_Type, &ranks, &queued, &turn))
        return -1;
    control_block_t *b = (control_block_t *)control;
    if (!is_control_block(control) || PyTuple_Size(ranks) != b->size || b->size > MOST ||
        !is_turn(turn)) {
        PyErr_SetString(PyExc_ValueError,
                        "a ControlBlock, a world rank for each of its ranks, and a Turn");
        return -1;
    }
    h->control = (control_block_t *)Py_NewRef(control);
    h->queued = Py_NewRef(queued), h->turn = (turn_t *)Py_NewRef(turn);
    h->ranks = malloc(sizeof *h->ranks * (size_t)b->size);
    if (!h->ranks) return PyErr_NoMemory(), -1;
    for (int r = 0; r < b->size; r++) h->ranks[r] = PyLong_AsLongLong(PyTuple_GetItem(ranks, r));
    return PyErr_Occurred() ? -1 : 0;
}

static void hot_dealloc(PyObject *self) {
    hot_t *h = (hot_t *)self;
    Py_XDECREF((PyObject *)h->control), Py_XDECREF((PyObject *)h->turn), Py_XDECREF(h->queued);
    free(h->ranks);
    forget_large(h), forget_eager(h), forget_slots(h);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef HOT_MEMBERS[] = {
    {"sequence", T_LONGLONG, offsetof(hot_t, sequence), 0, NULL},
    {"limit_ns", T_LONGLONG, offsetof(hot_t, limit_ns), 0, NULL},
    {"eager_calls", T_LONGLONG, offsetof(hot_t, eager_calls), 0, NULL},
    {"missed", T_LONGLONG, offsetof(hot_t, missed), 0, NULL},
    {"unfinished", T_INT, offsetof(hot_t, unfinished), 0, NULL},
    {"posted", T_LONGLONG, offsetof(hot_t, posted), READONLY, NULL},
    {"failure", T_OBJECT, offsetof(hot_t, failure), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef HOT_METHODS[] = {
    {"learn_large", hot_learn_large, METH_VARARGS, NULL},
    {"learn_slots", hot_learn_slots, METH_VARARGS, NULL},
    {"all_give", hot_all_give, METH_O, NULL},
    {"give", hot_give, METH_VARARGS, NULL},
    {"has_all", hot_has_all, METH_VARARGS, NULL},
    {"not_given", hot_not_given, METH_NOARGS, NULL},
    {"take_all", hot_take_all, METH_VARARGS, NULL},
    {"finds_given", hot_finds_given, METH_VARARGS, NULL},
    {"take_given", hot_take_given, METH_VARARGS, NULL},
    {"earlier", hot_earlier, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot HOT_SLOTS[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, hot_init},       {Py_tp_dealloc, hot_dealloc},
    {Py_tp_members, HOT_MEMBERS},   {Py_tp_methods, HOT_METHODS}, {0, NULL},
};
static PyType_Spec HOT_SPEC = {"hpcdist.transport._kernel.Hot", sizeof(hot_t), 0,
                               Py_TPFLAGS_DEFAULT, HOT_SLOTS};

/* hot_join(ndarray, Group, ReduceOp, listeners, go_on, start, end, take_back, done, describe, meet,
 * thread, spins) */
static PyObject *hot_join(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *array, *group, *op, *listeners, *go_on, *start, *end, *take_back, *done, *describe,
        *meet;
    unsigned long thread;
    long spins;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OOOOOO!Okl", &PyType_Type, &array, &PyType_Type, &group,
                          &PyType_Type, &op, &PyList_Type, &listeners, &go_on, &start, &end,
                          &take_back, &done, &PyTuple_Type, &describe, &meet, &thread, &spins))
        return NULL;
    if (PyTuple_Size(describe) != N_VERBS || !is_group_type((PyTypeObject *)group)) {
        PyErr_SetString(PyExc_ValueError, "hot_join: a function for each verb, and a GroupState");
        return NULL;
    }
    keep((PyObject **)&HOT.array, array), keep((PyObject **)&HOT.group, group);
    keep((PyObject **)&HOT.reduce_op, op);
    keep(&HOT.listeners, listeners), keep(&HOT.go_on, go_on), keep(&HOT.done, done);
    keep(&HOT.start, start), keep(&HOT.end, end), keep(&HOT.take_back, take_back);
    keep(&HOT.describe, describe), keep(&HOT.meet, meet);
    HOT.flight = PyCapsule_Import("hpcdist.transport._recorder.flight", 0);
    PyErr_Clear(); /* it was not compiled: nothing is recorded here */
    HOT.thread = thread, HOT.spins = spins, HOT.on = 1;
    Py_RETURN_NONE;
}

/* hot_world(group): the group of all ranks of this process from now on, or None. */
static PyObject *hot_world(PyObject *self, PyObject *world) {
    (void)self;
    keep(&HOT.world, world);
    Py_RETURN_NONE;
}

/* hot_switch(on): use the hot path or not, from now on; return whether it was used. */
static PyObject *hot_switch(PyObject *self, PyObject *on) {
    (void)self;
    int wanted = PyObject_IsTrue(on), before = HOT.on;
    if (wanted < 0) return NULL;
    HOT.on = wanted && HOT.go_on;
    return PyBool_FromLong(before);
}

/* hot_thread(ident): from now on this one stands for the main thread. */
static PyObject *hot_thread(PyObject *self, PyObject *ident) {
    (void)self;
    unsigned long wanted = PyLong_AsUnsignedLong(ident);
    if (PyErr_Occurred()) return NULL;
    HOT.thread = wanted;
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {
    FAST("hot_barrier", hot_barrier),
    FAST("hot_all_reduce", hot_all_reduce),
    FAST("hot_reduce", hot_reduce),
    FAST("hot_reduce_scatter", hot_reduce_scatter),
    FAST("hot_broadcast", hot_broadcast),
    FAST("hot_all_gather", hot_all_gather),
    FAST("hot_gather", hot_gather),
    FAST("hot_scatter", hot_scatter),
    FAST("hot_alltoall", hot_alltoall),
    FAST("hot_alltoall_single", hot_alltoall_single),
    {"hot_join", hot_join, METH_VARARGS, NULL},
    {"hot_world", hot_world, METH_O, NULL},
    {"hot_switch", hot_switch, METH_O, NULL},
    {"hot_thread", hot_thread, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_hot(PyObject *module) {
    PyObject *type = PyType_FromSpec(&HOT_SPEC);
    HOT.hot_ = PyUnicode_InternFromString("hot");
    HOT.failed = PyUnicode_InternFromString("failed");
    if (!type || PyErr_Occurred() || PyModule_AddFunctions(module, FUNCTIONS) < 0) return -1;
    HOT.hot = (PyTypeObject *)type;
    Py_INCREF(type);
    return PyModule_AddObject(module, "Hot", type);
}
