/* Messages of objects in one call.
 *
 * A list is pickled before anything else. A pickle that fits goes through the box as Python sends
 * it, behind eight zero bytes, for no buffers follow it; one that is too large goes on to Python.
 * A list is unpickled with the lock of whoever receives held, as on the other ways.
 */
#include "hot_objects.h"
#include "mail.h"

static struct {
    PyObject *describe_send, *loads, *replace;
} LETTER;

/* Look at ``(object_list, peer, group, sync_op, tag, None)``; 0: not usual. To be followed by `forget`. */
static int look_at_list(message_t *w, PyObject *const *args, Py_ssize_t n_args) {
    begin_message(w);
    return LETTER.loads && may_be_usual(args, n_args) && args[3] == Py_True &&
           length_of(args[0], 0) > 0 && find_peer(w, args, FACTS.OBJECT_MESSAGE);
}

/* Put a pickle into the box; 0: it does not fit, or may not. */
static int put_pickle(const message_t *w, const packed_t *p) {
    if (!p->fits || is_true(w->mail->is_owned, NULL)) return 0;
    letter_t *letter = begin_letter(w->mail, w->peer, w->tag, (size_t)p->longest);
    if (!letter) return 0;
    put((char *)(letter + 1), 0, p->pickles[0]);
    end_letter(w->mail, w->peer, letter);
    return 1;
}

/* Pickle a list and send it; Python need not pickle it again. */
static PyObject *send_list(message_t *w, PyObject *const *args) {
    PyObject *given = NULL, *result = NULL;
    packed_t p;
    p.n = 0, p.longest = 0, p.fits = 1;
    if (!pack(&p, args[0])) return not_packed(Py_None, FACTS.SEND_OBJECT_LIST);
    uint64_t since = is_recorded() ? flight_now() : 0;
    w->nbytes = (size_t)p.longest;
    if (put_pickle(w, &p)) {
        if (since) record_message(w, FACTS.SEND_OBJECT_LIST, w->peer, since, 0, FLIGHT_ENDED);
        result = Py_NewRef(HOT.done);
    } else if ((given = PyTuple_Pack(3, args[0], args[1], args[4]))) {
        result = leave(w->group, LETTER.describe_send, given, &p);
        Py_DECREF(given);
    }
    unpacked(&p);
    return result;
}

/* hot_send_object_list(object_list, dst, group, sync_op, tag, None): its work, or None; the last one is
 * a rank in the group instead of `dst` */
static PyObject *hot_send_object_list(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    message_t w;
    int usual = look_at_list(&w, args, n_args) && w.peer >= 0 && !is_true(w.mail->is_owned, NULL);
    PyObject *result = usual ? send_list(&w, args) : Py_NewRef(Py_None);
    forget(&w);
    return result;
}

/* Wait a moment for a pickle without buffers, and take it; NULL: there is none, or an error. */
static PyObject *take_pickle_soon(message_t *w, int *from) {
    mail_t *m = w->mail;
    uint64_t since = 0;
    long looks = 0;
    do {
        *from = w->peer;
        letter_t *letter = find_letter(m, from, w->tag);
        if (letter) {
            int64_t buffers;
            if (letter->nbytes < META) return NULL;
            memcpy(&buffers, letter + 1, META);
            if (buffers) return NULL;
            w->nbytes = letter->nbytes;
            PyObject *pickle = PyBytes_FromStringAndSize((char *)(letter + 1) + META,
                                                         (Py_ssize_t)w->nbytes - META);
            if (pickle) discard_letter(m, *from, letter);
            return pickle;
        }
    } while (rest_patiently(looks++, m->patience, &since));
    return NULL;
}

/* Note that a receive has ended, well or with an error, which stays set. */
static void end_receive(const message_t *w, int from, uint64_t since) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (since && from >= 0)
        record_message(w, FACTS.RECV_OBJECT_LIST, from, since, 0,
                       type ? FLIGHT_FAILED : FLIGHT_ENDED);
    PyObject *released = PyObject_CallNoArgs(w->mail->release);
    Py_XDECREF(released);
    if (!released) PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* Replace the entries of a list by those of a pickled one; 0: an error is set. After an interrupt the
 * list has them, too, as the message is taken: that does not come twice, other errors do. */
static int unpickle(const message_t *w, PyObject *list, PyObject *pickle) {
    PyObject *type = NULL, *value = NULL, *trace = NULL, *done = NULL;
    PyObject *received = PyObject_CallFunctionObjArgs(LETTER.loads, pickle, NULL);
    if (!received) {
        PyErr_Fetch(&type, &value, &trace);
        received = PyObject_CallFunctionObjArgs(LETTER.loads, pickle, NULL);
    }
    int fits =
        received && PyList_CheckExact(received) && PyList_Size(received) == PyList_Size(list);
    if (fits)
        fits = PyList_SetSlice(list, 0, PyList_Size(list), received) == 0;
    else if (received)
        done = PyObject_CallFunctionObjArgs(LETTER.replace, w->group, list, received, NULL);
    Py_XDECREF(received), Py_XDECREF(done);
    if (type) PyErr_Restore(type, value, trace); /* in place of a second one */
    return !PyErr_Occurred();
}

/* Receive a list, with the lock held: its work, or NULL with an error set or without. */
static PyObject *receive_list(message_t *w, PyObject *const *args) {
    uint64_t since = is_recorded() ? flight_now() : 0;
    int from = -1;
    PyObject *pickle = take_pickle_soon(w, &from);
    int done = pickle && unpickle(w, args[0], pickle);
    end_receive(w, pickle ? from : -1, since);
    Py_XDECREF(pickle);
    if (!done) return NULL;
    return Py_NewRef(PyTuple_GetItem(w->mail->works, from));
}

/* hot_recv_object_list(object_list, src, group, sync_op, tag, None): the same */
static PyObject *hot_recv_object_list(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    message_t w;
    PyObject *result = NULL;
    if (look_at_list(&w, args, n_args) && (w.peer >= 0 || args[1] == Py_None) &&
        w.mail->posted == 0 && !is_true(w.mail->is_owned, NULL) &&
        is_true(w.mail->acquire, Py_False))
        result = receive_list(&w, args);
    forget(&w);
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

/* mail_join_objects(describe_send, loads, replace) */
static PyObject *mail_join_objects(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *describe, *loads, *replace;
    if (!PyArg_ParseTuple(args, "OOO", &describe, &loads, &replace)) return NULL;
    keep(&LETTER.describe_send, describe), keep(&LETTER.loads, loads);
    keep(&LETTER.replace, replace);
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {
    FAST("hot_send_object_list", hot_send_object_list),
    FAST("hot_recv_object_list", hot_recv_object_list),
    {"mail_join_objects", mail_join_objects, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_mail_objects(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
