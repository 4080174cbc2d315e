/* `Turn`; see `turn.h`. */
#include "turn.h"

static PyTypeObject *TURN;

int is_turn(PyObject *object) { return Py_TYPE(object) == TURN; }

int is_inside(const turn_t *turn) { return turn->inside == PyThread_get_thread_ident(); }

int take_turn(turn_t *turn) {
    if (!PyThread_acquire_lock(turn->lock, NOWAIT_LOCK)) return 0;
    turn->is_taken = 1, turn->inside = PyThread_get_thread_ident();
    return 1;
}

void give_turn_back(turn_t *turn) {
    turn->is_taken = 0, turn->inside = 0;
    PyThread_release_lock(turn->lock);
}

static PyObject *turn_take(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(take_turn((turn_t *)self));
}

static PyObject *turn_give_back(PyObject *self, PyObject *unused) {
    (void)unused;
    give_turn_back((turn_t *)self);
    Py_RETURN_NONE;
}

static PyObject *call_without_first(PyObject *const *args, Py_ssize_t n) {
    PyObject *rest = n > 0 ? PyTuple_New(n - 1) : NULL;
    if (!rest) return n > 0 ? NULL : PyErr_Format(PyExc_TypeError, "a function is needed");
    for (Py_ssize_t i = 1; i < n; i++) PyTuple_SetItem(rest, i - 1, Py_NewRef(args[i]));
    PyObject *result = PyObject_Call(args[0], rest, NULL);
    Py_DECREF(rest);
    return result;
}

static PyObject *turn_serve(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    turn_t *turn = (turn_t *)self;
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(turn->lock, WAIT_LOCK);
    Py_END_ALLOW_THREADS
    turn->is_taken = 1;
    PyObject *result = call_without_first(args, n);
    give_turn_back(turn);
    return result;
}

static PyObject *turn_call(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    turn_t *turn = (turn_t *)self;
    unsigned long before = turn->inside;
    if (!before)
        turn->inside = PyThread_get_thread_ident(); /* else a helper of that thread calls */
    PyObject *result = call_without_first(args, n);
    turn->inside = before;
    return result;
}

static PyObject *turn_is_inside(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(is_inside((turn_t *)self));
}

static int turn_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    PyThread_type_lock lock = ((turn_t *)self)->lock = PyThread_allocate_lock();
    return lock ? 0 : (PyErr_NoMemory(), -1);
}

static void turn_dealloc(PyObject *self) {
    turn_t *turn = (turn_t *)self;
    if (turn->lock) PyThread_free_lock(turn->lock);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"take", turn_take, METH_O, NULL},
    {"give_back", turn_give_back, METH_NOARGS, NULL},
    FAST("serve", turn_serve),
    FAST("call", turn_call),
    {"is_inside", turn_is_inside, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot SLOTS[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, turn_init},
    {Py_tp_dealloc, turn_dealloc},
    {Py_tp_methods, METHODS},
    {0, NULL},
};
static PyType_Spec SPEC = {"hpcdist.transport._kernel.Turn", sizeof(turn_t), 0, Py_TPFLAGS_DEFAULT,
                           SLOTS};

int add_turn(PyObject *module) {
    TURN = (PyTypeObject *)PyType_FromSpec(&SPEC);
    return TURN ? PyModule_AddObject(module, "Turn", Py_NewRef((PyObject *)TURN)) : -1;
}
