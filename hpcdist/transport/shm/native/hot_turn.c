/* Between the hot path and Python: turns, groups, what is handed over and what is recorded. */
#include "hot.h"

void take_back(PyObject *group, PyObject *describe, PyObject *args, PyObject *pickles) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *left =
        PyObject_CallFunctionObjArgs(HOT.take_back, group, describe, args, pickles, NULL);
    if (!left) PyErr_Clear();
    if (type) PyErr_Restore(type, value, traceback);
    Py_XDECREF(left);
}

PyObject *call_in_turn(hot_t *h, PyObject *function, PyObject *args, int collects) {
    int has_turn = is_inside(h->turn) || take_turn(h->turn);
    if (collects) PyGC_Enable();
    PyObject *result = has_turn && args ? PyObject_Call(function, args, NULL) : NULL;
    int goes_on = function == HOT.go_on; /* which may not even have begun */
    if (!result && args && (goes_on || function == HOT.end))
        take_back(PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1), PyTuple_GetItem(args, 2),
                  goes_on ? PyTuple_GetItem(args, 3) : Py_None); /* others may count on this rank */
    if (has_turn) give_turn_back(h->turn);
    Py_XDECREF(args);
    return result;
}

PyObject *tuple_of(PyObject *const *args, Py_ssize_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple && i < n; i++) PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
    return tuple;
}

PyObject *hand_over(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                    Py_ssize_t n_args, PyObject *pickles) {
    h->unfinished = 1;
    int collects = PyGC_Disable();
    PyObject *given = tuple_of(args, n_args);
    PyObject *all = given ? PyTuple_Pack(4, group, describe, given, pickles) : NULL;
    Py_XDECREF(given);
    return call_in_turn(h, HOT.go_on, all, collects);
}

PyObject *end_in_turn(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                      Py_ssize_t n_args, int state) {
    int collects = PyGC_Disable();
    PyObject *given = tuple_of(args, n_args), *all = NULL;
    if (given) all = Py_BuildValue("(OOOi)", group, describe, given, state);
    Py_XDECREF(given);
    return call_in_turn(h, HOT.end, all, collects);
}

PyObject *attribute(PyObject *object, PyObject *name) {
    PyObject *found = object ? PyObject_GetAttr(object, name) : NULL;
    if (!found) PyErr_Clear();
    return found;
}

PyObject *group_of(PyObject *given) {
    PyObject *group = given == Py_None ? HOT.world : given;
    return group && Py_TYPE(group) == HOT.group ? Py_NewRef(group) : NULL;
}

PyObject *of_transport(PyObject *group, PyObject *name) {
    PyObject *transport = Py_XNewRef(group_in(group)->transport);
    PyObject *found = attribute(transport, name);
    Py_XDECREF(transport);
    return found;
}

hot_t *hot_of(PyObject *group) {
    PyObject *hot = of_transport(group, HOT.hot_);
    if (hot && Py_TYPE(hot) != HOT.hot) {
        Py_DECREF(hot);
        return NULL;
    }
    return (hot_t *)hot;
}

int is_idle(const hot_t *h) {
    return PyList_Size(HOT.listeners) == 0 && !h->unfinished && PyObject_Size(h->queued) == 0 &&
           !h->turn->is_taken;
}

long long count_issued(PyObject *group, hot_t *h) {
    group_t *state = group_in(group);
    state->issued += 1 + h->missed, h->missed = 0;
    return state->issued;
}

uint64_t record(PyObject *group, long long number, int kind, int code, size_t nbytes, int root,
                unsigned flags, uint64_t since) {
    if (!HOT.flight || !HOT.flight->header) return 0;
    return flight_begin(HOT.flight, (unsigned)kind, (unsigned)code, nbytes, group_in(group)->flight,
                        (uint32_t)number, root, 0, flags, since);
}

PyObject *hand_to_thread(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                         Py_ssize_t n_args, uint64_t mark) {
    h->unfinished = 1;
    int collects = PyGC_Disable();
    PyObject *given = tuple_of(args, n_args), *all = NULL;
    if (given) all = Py_BuildValue("(OOOKi)", group, describe, given, (unsigned long long)mark, 0);
    Py_XDECREF(given);
    return call_in_turn(h, HOT.start, all, collects);
}
