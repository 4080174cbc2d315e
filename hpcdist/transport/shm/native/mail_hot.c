/* `send` and `recv` in one call each; what is usual is as in `hot.h`. */
#include "mail.h"

static PyObject *MAIL_NAME, *AWAIT_COPIED;

static int peer_of(const mail_t *m, PyObject *world_rank) {
    if (!PyLong_CheckExact(world_rank)) return -1;
    int overflow;
    long long wanted = PyLong_AsLongLongAndOverflow(world_rank, &overflow);
    if (overflow) return -1;
    if (wanted >= 0 && wanted < m->size && m->ranks[wanted] == wanted) return (int)wanted;
    for (int r = 0; r < m->size; r++)
        if (m->ranks[r] == wanted) return r;
    return -1;
}

static int64_t mail_tag_of(const mail_t *m, PyObject *tag, int code) {
    int overflow = 0;
    long long wanted = PyLong_CheckExact(tag) ? PyLong_AsLongLongAndOverflow(tag, &overflow) : -1;
    if (overflow || wanted < 0 || wanted > m->last_tag >> FACTS.CODE_BITS) return -1;
    return (int64_t)wanted << FACTS.CODE_BITS | code;
}

int is_true(PyObject *callable, PyObject *argument) {
    PyObject *said = argument ? PyObject_CallFunctionObjArgs(callable, argument, NULL)
                              : PyObject_CallNoArgs(callable);
    Py_XDECREF(said);
    if (!said) PyErr_Clear();
    return said == Py_True;
}

/* Whether nobody is in the middle of receiving, on this thread or another. */
static int is_free(const mail_t *m) {
    if (is_true(m->is_owned, NULL) || !is_true(m->acquire, Py_False)) return 0;
    PyObject *ended = PyObject_CallNoArgs(m->release);
    Py_XDECREF(ended);
    if (!ended) PyErr_Clear();
    return ended != NULL;
}

static mail_t *mail_of(PyObject *group) {
    PyObject *mail = of_transport(group, MAIL_NAME);
    if (mail && !is_mail(mail)) Py_CLEAR(mail);
    return (mail_t *)mail;
}

void begin_message(message_t *w) {
    w->mail = NULL, w->group = NULL;
    w->array.dtype = NULL, w->array.axes = 0, w->code = 0;
}

int may_be_usual(PyObject *const *args, Py_ssize_t n_args) {
    int by_world_rank = n_args == 5 || (n_args == 6 && args[5] == Py_None);
    return by_world_rank && HOT.on && PyBool_Check(args[3]) && PyList_Size(HOT.listeners) == 0 &&
           PyThread_get_thread_ident() == HOT.thread;
}

int find_peer(message_t *w, PyObject *const *args, int code) {
    if (!(w->group = group_of(args[2])) || !(w->mail = mail_of(w->group))) return 0;
    w->peer = args[1] == Py_None ? -1 : peer_of(w->mail, args[1]);
    w->tag = mail_tag_of(w->mail, args[4], code);
    return w->tag >= 0;
}

/* Look at ``(tensor, peer, group, sync_op, tag)``; 0: not usual. To be followed by `forget`. */
static int look_at(message_t *w, PyObject *const *args, Py_ssize_t n_args, int flags) {
    begin_message(w);
    if (!may_be_usual(args, n_args) || !look_for(args[0], &w->array, flags)) return 0;
    const dtype_t *dtype = w->array.dtype;
    w->code = dtype->code;
    w->nbytes = size_of(&w->array) * (size_t)dtype->item;
    return find_peer(w, args, w->code);
}

void forget(message_t *w) { Py_XDECREF((PyObject *)w->mail), Py_XDECREF(w->group); }

void record_message(const message_t *w, int kind, int peer, uint64_t since, int flags, int state) {
    uint64_t mark = flight_begin(HOT.flight, (unsigned)kind, (unsigned)w->code, w->nbytes,
                                 group_in(w->group)->flight, 0, peer,
                                 (uint32_t)(w->tag >> FACTS.CODE_BITS), (unsigned)flags, since);
    flight_end(HOT.flight, mark, (unsigned)state);
}

int is_recorded(void) { return HOT.flight && HOT.flight->header; }

/* While the other rank copies, only Python waits long: ``await_copied(group, tensor, peer, tag,
 * is_sent)``; 0: an error is set. */
static int await_copied(const message_t *w, PyObject *const *args, PyObject *is_sent) {
    PyObject *ended = PyObject_CallFunctionObjArgs(AWAIT_COPIED, w->group, args[0], args[1],
                                                   args[4], is_sent, NULL);
    Py_XDECREF(ended);
    return ended != NULL;
}

/* Offer a large message; -1: an error is set. */
static int send_large(const message_t *w, PyObject *const *args) {
    int state = offer(w->mail, w->peer, w->tag, w->array.data, w->nbytes);
    if (state == CLAIMED) {
        if (!await_copied(w, args, Py_True)) return -1;
        state = (int)state_of(w->mail->peers[w->peer].to);
    }
    return state == TAKEN;
}

/* Take a large message that is offered; -1: an error is set, and MPI is to carry it. */
static int take_large(const message_t *w, int from, PyObject *const *args) {
    int state = take_offer(w->mail, from, w->tag, w->array.data, w->nbytes);
    if (state == CLAIMED) {
        if (!await_copied(w, args, Py_False)) {
            if (!is_copied(w->mail, from, w->nbytes)) Py_INCREF(args[0]); /* for ever */
            leave_offer(w->mail, from);
            return -1;
        }
        state = end_offer(w->mail, from, w->array.data, w->nbytes);
    }
    return state == TAKEN;
}

/* hot_send(tensor, dst, group, sync_op, tag): its work, or None: left to Python */
static PyObject *hot_send(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    message_t w;
    PyObject *result = Py_None;
    if (look_at(&w, args, n_args, READABLE) && w.peer >= 0 && !is_true(w.mail->is_owned, NULL)) {
        uint64_t since = is_recorded() ? flight_now() : 0;
        int ended = 0;
        if (w.nbytes <= w.mail->most)
            ended = put_letter(w.mail, w.peer, w.tag, w.array.data, w.nbytes);
        else if (args[3] == Py_True)
            ended = send_large(&w, args);
        if (ended > 0 && since)
            record_message(&w, FACTS.SEND, w.peer, since, args[3] == Py_True ? 0 : FLIGHT_STARTED,
                           FLIGHT_ENDED);
        result = ended > 0 ? HOT.done : ended == 0 ? Py_None : NULL;
    }
    forget(&w);
    Py_XINCREF(result);
    return result;
}

/* Wait a moment for a message, and take it: the sender, or -1, maybe with an error set. */
static int take_soon(const message_t *w, PyObject *const *args) {
    mail_t *m = w->mail;
    uint64_t since = 0;
    long looks = 0;
    do {
        int from = w->peer;
        letter_t *letter = find_letter(m, &from, w->tag);
        if (letter) {
            if (letter->nbytes != w->nbytes) return -1;
            if (w->nbytes) memcpy(w->array.data, letter + 1, w->nbytes);
            discard_letter(m, from, letter);
            return from;
        }
        if (w->nbytes > m->most) {
            if (from < 0 || is_by_mpi(m, from)) return -1;
            int taken = take_large(w, from, args);
            if (taken) return taken > 0 ? from : -1;
        }
    } while (rest_patiently(looks++, m->patience, &since));
    return -1;
}

/* hot_recv(tensor, src, group, sync_op, tag): its work, or None: left to Python, as is a message
 * that does not come within microseconds, or is of another size */
static PyObject *hot_recv(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    message_t w;
    PyObject *result = Py_None;
    if (look_at(&w, args, n_args, ORDINARY) && args[3] == Py_True &&
        (w.peer >= 0 || args[1] == Py_None) && w.mail->posted == 0 && is_free(w.mail)) {
        uint64_t since = is_recorded() ? flight_now() : 0;
        int from = take_soon(&w, args);
        if (from >= 0) {
            if (since) record_message(&w, FACTS.RECV, w.peer, since, 0, FLIGHT_ENDED);
            result = PyTuple_GetItem(w.mail->works, from);
        } else if (PyErr_Occurred()) {
            result = NULL;
        }
    }
    forget(&w);
    Py_XINCREF(result);
    return result;
}

/* mail_join(await_copied) */
static PyObject *mail_join(PyObject *self, PyObject *function) {
    (void)self;
    keep(&AWAIT_COPIED, function);
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {
    FAST("hot_send", hot_send),
    FAST("hot_recv", hot_recv),
    {"mail_join", mail_join, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_mail_hot(PyObject *module) {
    MAIL_NAME = PyUnicode_InternFromString("mail");
    return MAIL_NAME ? PyModule_AddFunctions(module, FUNCTIONS) : -1;
}
