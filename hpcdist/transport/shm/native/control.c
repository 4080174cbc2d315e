/* The object `ControlBlock`: posting and testing, leaving, arriving. */
#include "eager.h"

long looks_at_once = FEW_LOOKS;

void give_core(uint64_t now) {
    sched_yield();
    if (flight_now() - now > CROWDED_NS)
        looks_at_once = CROWDED_LOOKS;
    else if (looks_at_once < FEW_LOOKS)
        looks_at_once++;
}

static int control_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    control_block_t *b = (control_block_t *)self;
    PyObject *memory;
    Py_ssize_t payload;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "Oiin", &memory, &b->rank, &b->size, &payload)) return -1;
    if (b->rank < 0 || b->rank >= b->size || payload < 0) {
        PyErr_SetString(PyExc_ValueError, "a rank from 0 to size - 1, and a payload of 0 or more");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &b->memory, PyBUF_WRITABLE) < 0) return -1;
    b->payload = (size_t)payload;
    b->sequence = b->step = b->ended = 0;
    b->n_eager = b->n_sealed = b->hesitates = 0, b->chain = 0;
    b->most_eager = b->size > sysconf(_SC_NPROCESSORS_ONLN) ? MOST_EAGER : 0;
    b->steps = b->memory.buf;
    b->slots = b->steps + (size_t)b->size * LINE;
    b->decisions = b->slots + 2 * (size_t)b->size * LINE;
    b->given_places = b->decisions + MOST_EAGER * LINE;
    b->payloads = b->given_places + MOST_EAGER * (size_t)b->size * (LINE + EAGER_BYTES);
    if (b->memory.len < b->payloads - b->steps + (Py_ssize_t)(2 * (size_t)b->size * b->payload)) {
        PyErr_SetString(PyExc_ValueError, "the memory is too small for this control block");
        return -1;
    }
    return 0;
}

static void control_dealloc(PyObject *self) {
    control_block_t *b = (control_block_t *)self;
    if (b->memory.obj) PyBuffer_Release(&b->memory);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *least(const control_block_t *b) {
    int64_t found[NUMBERS_AGREED];
    memcpy(found, slot_of(b, 0)->numbers, sizeof found);
    for (int r = 1; r < b->size; r++) {
        const int64_t *theirs = slot_of(b, r)->numbers;
        for (int i = 0; i < NUMBERS_AGREED; i++)
            if (theirs[i] < found[i]) found[i] = theirs[i];
    }
    PyObject *result = PyTuple_New(NUMBERS_AGREED);
    for (int i = 0; result && i < NUMBERS_AGREED; i++)
        PyTuple_SetItem(result, i, PyLong_FromLongLong(found[i]));
    return result;
}

static PyObject *control_test(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    if (!is_complete(b)) Py_RETURN_NONE;
    return least(b);
}

static PyObject *control_post(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    control_block_t *b = (control_block_t *)self;
    if (n_args != NUMBERS_AGREED + 3) {
        PyErr_SetString(PyExc_TypeError, "post(six numbers, address, data, spins)");
        return NULL;
    }
    int64_t numbers[NUMBERS_AGREED + 1];
    for (int i = 0; i <= NUMBERS_AGREED; i++) numbers[i] = PyLong_AsLongLong(args[i]);
    PyObject *data = args[NUMBERS_AGREED + 1];
    long spins = PyLong_AsLong(args[NUMBERS_AGREED + 2]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer view = {.obj = NULL};
    if (data != Py_None) {
        if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
        if ((size_t)view.len > b->payload) {
            PyBuffer_Release(&view);
            PyErr_SetString(PyExc_ValueError,
                            "the data are larger than the control block's payload");
            return NULL;
        }
    }
    b->sequence++;
    slot_t *own = slot_of(b, b->rank);
    memcpy(own->numbers, numbers, sizeof own->numbers);
    own->address = numbers[NUMBERS_AGREED];
    int64_t sealed = seal(b, numbers[0]);
    if (numbers[1] == -numbers[0]) /* else this rank agrees with nobody */
        own->numbers[0] = sealed, own->numbers[1] = -sealed;
    if (view.obj) {
        memcpy(payload_of(b, b->rank), view.buf, (size_t)view.len);
        PyBuffer_Release(&view);
    }
    if (publish(b, spins)) return least(b);
    Py_RETURN_NONE;
}

static PyObject *control_addresses(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    PyObject *result = PyTuple_New(b->size);
    for (int r = 0; result && r < b->size; r++)
        PyTuple_SetItem(result, r, PyLong_FromLongLong(slot_of(b, r)->address));
    return result;
}

/* ---- leaving
 *
 * An operation that does not end with its agreement begins for good when the first rank that has seen
 * all others enters it (`enter`). Until then a rank that has posted its part may call it off: there is
 * a word for each of the two turns, and whoever changes it first decides for all. Afterwards a rank
 * that cannot go on breaks the operation: it takes a step that is beyond all others. Steps are counted
 * from where the operation begins, so all ranks are in step again in the next one.
 */

/* Who has called off the operation at hand; -1: nobody. `most`: what to write if it is undecided. */
static int decide(const control_block_t *b, uint64_t most) {
    uint64_t *word = (uint64_t *)b->steps + 1 + (b->sequence & 1); /* in the first rank's line */
    uint64_t entered = b->sequence << WHO_BITS;
    uint64_t found = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    while (most && found < entered)
        if (__atomic_compare_exchange_n(word, &found, entered + most - 1, 0, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
            found = entered + most - 1;
    return found < entered ? -1 : (int)(found - entered) - 1;
}

int enter(const control_block_t *b) { return decide(b, 1); }

int broken_by(const control_block_t *b) {
    uint64_t beyond = (b->sequence << STEP_BITS) + BEYOND;
    for (int r = 0; b->sequence && r < b->size; r++)
        if (__atomic_load_n(step_of(b, r), __ATOMIC_ACQUIRE) >= beyond) return r;
    return -1;
}

/* enter() -> who has called off the operation at hand, -1 if all ranks are in it from now on */
static PyObject *control_enter(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyLong_FromLong(enter((control_block_t *)self));
}

/* called_off_by() -> the same, without entering it */
static PyObject *control_called_off_by(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyLong_FromLong(decide((control_block_t *)self, 0));
}

/* call_off(because a rank has died) -> whether nobody does anything in the operation at hand; False:
 * some rank is in it. Whoever hears of it gets the number of this rank, more by `OF_A_DEATH`. */
static PyObject *control_call_off(PyObject *self, PyObject *of_a_death) {
    control_block_t *b = (control_block_t *)self;
    uint64_t who = (uint64_t)b->rank + (of_a_death == Py_True ? OF_A_DEATH : 0);
    return PyBool_FromLong(decide(b, who + 2) >= 0);
}

/* break_off(): never go on with the operation at hand, which all ranks are in. */
static PyObject *control_break_off(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    b->step = (b->sequence << STEP_BITS) + BEYOND;
    __atomic_store_n(step_of(b, b->rank), b->step, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyObject *control_broken_by(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyLong_FromLong(broken_by((control_block_t *)self));
}

/* inside(steps): the ranks that have not taken so many steps in the operation at hand. */
static PyObject *control_inside(PyObject *self, PyObject *steps) {
    const control_block_t *b = (control_block_t *)self;
    uint64_t last = (b->sequence << STEP_BITS) + (uint64_t)PyLong_AsLong(steps);
    PyObject *ranks = PyErr_Occurred() ? NULL : PyList_New(0);
    for (int r = 0; ranks && r < b->size; r++) {
        if (__atomic_load_n(step_of(b, r), __ATOMIC_ACQUIRE) >= last) continue;
        PyObject *rank = PyLong_FromLong(r);
        if (!rank || PyList_Append(ranks, rank) < 0) Py_CLEAR(ranks);
        Py_XDECREF(rank);
    }
    return ranks;
}

static PyObject *control_arrive(PyObject *self, PyObject *spins_) {
    control_block_t *b = (control_block_t *)self;
    long spins = PyLong_AsLong(spins_);
    if (PyErr_Occurred()) return NULL;
    take_step(b);
    return PyBool_FromLong(all_at(b, b->step, spins + 1));
}

static PyObject *control_arrived(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    return PyBool_FromLong(all_at(b, b->step, 1));
}

static PyObject *control_behind(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    PyObject *ranks = PyList_New(0);
    int has_stepped = b->step > b->sequence << STEP_BITS;
    for (int r = 0; ranks && r < b->size; r++) {
        int here = __atomic_load_n(&slot_of(b, r)->sequence, __ATOMIC_ACQUIRE) == b->sequence &&
                   (!has_stepped || __atomic_load_n(step_of(b, r), __ATOMIC_ACQUIRE) >= b->step);
        PyObject *rank = here ? NULL : PyLong_FromLong(r);
        if (rank && PyList_Append(ranks, rank) < 0) Py_CLEAR(ranks);
        Py_XDECREF(rank);
    }
    return ranks;
}

static PyObject *control_turn(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong((long)(((control_block_t *)self)->sequence & 1));
}

static PyObject *control_looks(PyObject *self, void *closure) {
    (void)self, (void)closure;
    return PyLong_FromLong(looks_at_once);
}

static PyMethodDef CONTROL_METHODS[] = {
    FAST("post", control_post),
    {"test", control_test, METH_NOARGS, NULL},
    FAST("reduce", control_reduce),
    FAST("move", control_move),
    FAST("reduce_shared", control_reduce_shared),
    {"addresses", control_addresses, METH_NOARGS, NULL},
    {"arrive", control_arrive, METH_O, NULL},
    {"arrived", control_arrived, METH_NOARGS, NULL},
    {"behind", control_behind, METH_NOARGS, NULL},
    {"enter", control_enter, METH_NOARGS, NULL},
    {"called_off_by", control_called_off_by, METH_NOARGS, NULL},
    {"call_off", control_call_off, METH_O, NULL},
    {"break_off", control_break_off, METH_NOARGS, NULL},
    {"broken_by", control_broken_by, METH_NOARGS, NULL},
    {"inside", control_inside, METH_O, NULL},
    {"awaits_eager", control_awaits_eager, METH_NOARGS, NULL},
    {"agrees_elsewhere", control_agrees_elsewhere, METH_NOARGS, NULL},
    {"begin", control_begin, METH_VARARGS, NULL},
    {"go_on", control_go_on, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef CONTROL_MEMBERS[] = {
    {"sequence", T_ULONGLONG, offsetof(control_block_t, sequence), READONLY, NULL},
    {"ended", T_ULONGLONG, offsetof(control_block_t, ended), 0, NULL},
    {"most_eager", T_INT, offsetof(control_block_t, most_eager), 0, NULL},
    {"hesitates", T_INT, offsetof(control_block_t, hesitates), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef CONTROL_GETSET[] = {
    {"turn", control_turn, NULL, NULL, NULL},
    {"looks", control_looks, NULL, "Looks before this process gives its core away.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot CONTROL_SLOTS[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, control_init},
    {Py_tp_dealloc, control_dealloc},
    {Py_tp_methods, CONTROL_METHODS},
    {Py_tp_getset, CONTROL_GETSET},
    {Py_tp_members, CONTROL_MEMBERS},
    {0, NULL},
};
static PyType_Spec CONTROL_BLOCK_SPEC = {"hpcdist.transport._kernel.ControlBlock",
                                         sizeof(control_block_t), 0, Py_TPFLAGS_DEFAULT,
                                         CONTROL_SLOTS};

int is_control_block(PyObject *object) {
    return PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)control_dealloc;
}

int add_control(PyObject *module) {
    PyObject *type = PyType_FromSpec(&CONTROL_BLOCK_SPEC);
    return type ? PyModule_AddObject(module, "ControlBlock", type) : -1;
}
