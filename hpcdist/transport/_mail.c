/* Mailboxes: small messages between the ranks of a node. A part of `_kernel.c`, which includes it;
 * `shm/mail.py` says where they lie and what they promise.
 *
 * Each pair of ranks has a box in each direction: a ring of bytes with one writer and one reader. A
 * letter is a header and the bytes of a message, contiguous, in whole cache lines. The writer
 * publishes `head` with a release store; the reader looks with acquire loads, may take letters in
 * any order, and gives their room back in the order of the ring.
 *
 * A message that is too large for a box is offered: the writer says where it is, and the reader, if
 * it is waiting at this moment, claims it and copies it from there. Else the writer takes the offer
 * back, and MPI is to carry it.
 *
 * Everything here is called with the global interpreter lock held, and waits for microseconds.
 */

typedef struct {
    int64_t tag;
    uint32_t nbytes;
    uint32_t is_taken; /* the reader's; also of what fills up the end of a ring */
} letter_t;

typedef struct {
    uint64_t head; /* the writer's: bytes written, ever */
    char pad0[LINE - sizeof(uint64_t)];
    uint64_t tail; /* the reader's: bytes given back, ever */
    char pad1[LINE - sizeof(uint64_t)];
    uint64_t received; /* the reader's: messages of this writer by MPI that have been received */
    char pad2[LINE - sizeof(uint64_t)];
    uint64_t sent; /* the writer's: messages by MPI */
    uint64_t offer; /* a state; the rest belongs to it */
    int64_t tag;
    uint64_t address, nbytes;
    char pad3[LINE - 5 * sizeof(uint64_t)];
    char ring[];
} mailbox_t;

/* The reader claims an offer that is OFFERED, the writer takes back one that nobody has claimed. */
enum { NO_OFFER, OFFERED, CLAIMED, TAKEN, REFUSED };

/* What this rank knows of another (or of itself). */
typedef struct {
    mailbox_t *to, *from;
    uint64_t head, given_back;        /* of `to`: what is written, and what was seen of its tail */
    uint64_t tail;                    /* of `from` */
    uint64_t sent, seen_received;     /* messages to it by MPI, and those it is known to have got */
    uint64_t received;                /* messages from it by MPI */
} peer_t;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    int rank, size;
    size_t room, most;      /* bytes of a ring, and of the largest message in it */
    peer_t *peers;
    int next;               /* from whom a receive from any rank takes first */
    int posted;             /* receives that wait for their messages */
    long long last_tag;     /* the largest tag */
    long long pause_ns;     /* if not 0, so often a message goes by MPI */
    uint64_t last_sent;     /* when one did */
    int64_t *ranks;         /* the world rank of each rank */
    int attaches;           /* whether ranks can read each other's memory */
    long patience;          /* looks at an offer, or for a message, before Python takes over */
    int64_t *pids;          /* the process of each rank */
    PyObject *works;        /* what a receive returns, by sender */
    PyObject *is_owned, *acquire, *release; /* of the lock of whoever receives */
} mail_t;

static size_t lines_of(size_t nbytes) {
    return (sizeof(letter_t) + nbytes + LINE - 1) / LINE * LINE;
}

static letter_t *letter_at(const mail_t *m, mailbox_t *box, uint64_t at) {
    return (letter_t *)(box->ring + at % m->room);
}

/* Whether a message to a peer may go through the box: it must not overtake one that goes by MPI. */
static int is_open(mail_t *m, peer_t *p) {
    if (m->pause_ns && flight_now() - m->last_sent > (uint64_t)m->pause_ns) return 0;
    if (p->sent != p->seen_received)
        p->seen_received = __atomic_load_n(&p->to->received, __ATOMIC_ACQUIRE);
    return p->sent == p->seen_received;
}

/* The next letter to a rank, to be filled and ended; NULL: it does not fit, or may not go. */
static letter_t *begin_letter(mail_t *m, int to, int64_t tag, size_t nbytes) {
    peer_t *p = m->peers + to;
    if (nbytes > m->most || !is_open(m, p)) return NULL;
    size_t lines = lines_of(nbytes), rest = m->room - p->head % m->room;
    size_t filler = lines > rest ? rest : 0;
    if (p->head + filler + lines - p->given_back > m->room) {
        p->given_back = __atomic_load_n(&p->to->tail, __ATOMIC_ACQUIRE);
        if (p->head + filler + lines - p->given_back > m->room) return NULL;
    }
    if (filler) {
        letter_t *end = letter_at(m, p->to, p->head);
        end->tag = -1, end->nbytes = (uint32_t)(filler - sizeof *end), end->is_taken = 1;
        p->head += filler;
    }
    letter_t *letter = letter_at(m, p->to, p->head);
    letter->tag = tag, letter->nbytes = (uint32_t)nbytes, letter->is_taken = 0;
    return letter;
}

/* Let the reader see a letter. */
static void end_letter(mail_t *m, int to, const letter_t *letter) {
    peer_t *p = m->peers + to;
    p->head += lines_of(letter->nbytes);
    __atomic_store_n(&p->to->head, p->head, __ATOMIC_RELEASE);
}

/* Put a message into the box to a rank; 0: it does not fit, or may not. */
static int put_letter(mail_t *m, int to, int64_t tag, const void *data, size_t nbytes) {
    letter_t *letter = begin_letter(m, to, tag, nbytes);
    if (!letter) return 0;
    if (nbytes) memcpy(letter + 1, data, nbytes);
    end_letter(m, to, letter);
    return 1;
}

/* The first letter of a rank with a tag, or NULL. */
static letter_t *letter_of(const mail_t *m, int from, int64_t tag) {
    const peer_t *p = m->peers + from;
    uint64_t end = __atomic_load_n(&p->from->head, __ATOMIC_ACQUIRE);
    for (uint64_t at = p->tail; at != end;) {
        letter_t *letter = letter_at(m, p->from, at);
        if (!letter->is_taken && letter->tag == tag) return letter;
        at += lines_of(letter->nbytes);
    }
    return NULL;
}

/* The same of a rank, or of any if `*from` is negative, which becomes the sender. */
static letter_t *find_letter(const mail_t *m, int *from, int64_t tag) {
    if (*from >= 0) return letter_of(m, *from, tag);
    for (int i = 0; i < m->size; i++) {
        int rank = (m->next + i) % m->size;
        letter_t *letter = letter_of(m, rank, tag);
        if (letter) return *from = rank, letter;
    }
    return NULL;
}

/* Give back the room of a letter that has been copied, and of those before it, if they have, too. */
static void discard_letter(mail_t *m, int from, letter_t *letter) {
    peer_t *p = m->peers + from;
    uint64_t end = __atomic_load_n(&p->from->head, __ATOMIC_ACQUIRE), before = p->tail;
    letter->is_taken = 1;
    while (p->tail != end) {
        letter_t *first = letter_at(m, p->from, p->tail);
        if (!first->is_taken) break;
        p->tail += lines_of(first->nbytes);
    }
    if (p->tail != before) __atomic_store_n(&p->from->tail, p->tail, __ATOMIC_RELEASE);
    m->next = (from + 1) % m->size;
}

/* ---- large messages */

enum { MOST_LOOKS = 400, MOST_OFFERED = 8 << 20 };

static uint64_t state_of(const mailbox_t *box) {
    return __atomic_load_n(&box->offer, __ATOMIC_ACQUIRE);
}

static int change_state(mailbox_t *box, uint64_t before, uint64_t after) {
    return __atomic_compare_exchange_n(&box->offer, &before, after, 0, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

/* Offer a message to a rank: TAKEN, REFUSED (nothing has happened), or CLAIMED for a long time. */
static int offer(mail_t *m, int to, int64_t tag, const void *data, size_t nbytes) {
    enum { LONG_NS = 20000000 };
    peer_t *p = m->peers + to;
    mailbox_t *box = p->to;
    if (!m->attaches || to == m->rank || nbytes > MOST_OFFERED || state_of(box) == CLAIMED ||
        !is_open(m, p))
        return REFUSED;
    __atomic_store_n(&box->tag, tag, __ATOMIC_RELAXED);
    __atomic_store_n(&box->nbytes, nbytes, __ATOMIC_RELAXED);
    box->address = (uintptr_t)data;
    __atomic_store_n(&box->offer, OFFERED, __ATOMIC_RELEASE);
    uint64_t since;
    long looks = 0;
    while (state_of(box) == OFFERED && rest_patiently(looks, m->patience, &since)) looks++;
    if (change_state(box, OFFERED, NO_OFFER)) return REFUSED;
    uint64_t began = flight_now();
    for (looks = 0; state_of(box) == CLAIMED; looks++) {
        if (looks >= FEW_LOOKS && flight_now() - began > LONG_NS) return CLAIMED;
        rest(looks / 16);
    }
    return (int)state_of(box);
}

/* Take what a rank offers, if it is what is wanted and nothing of it in the box comes before. */
static int take_offer(const mail_t *m, int from, int64_t tag, void *data, size_t nbytes) {
    mailbox_t *box = m->peers[from].from;
    if (state_of(box) != OFFERED || __atomic_load_n(&box->tag, __ATOMIC_RELAXED) != tag ||
        __atomic_load_n(&box->nbytes, __ATOMIC_RELAXED) != nbytes ||
        !change_state(box, OFFERED, CLAIMED))
        return 0;
    /* only now it stays as it is: what was seen before may have been taken back */
    int fits = box->tag == tag && box->nbytes == nbytes && !letter_of(m, from, tag) &&
               !attach((pid_t)m->pids[from], (uintptr_t)box->address, data, nbytes, 0);
    __atomic_store_n(&box->offer, fits ? TAKEN : REFUSED, __ATOMIC_RELEASE);
    return fits;
}

/* Whether MPI brings something of a rank. */
static int is_by_mpi(const mail_t *m, int from) {
    const peer_t *p = m->peers + from;
    return __atomic_load_n(&p->from->sent, __ATOMIC_ACQUIRE) != p->received;
}

/* ---- for Python */

static int is_rank(const mail_t *m, int rank) {
    if (rank >= 0 && rank < m->size) return 1;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a rank of the group");
    return 0;
}

/* put(rank, tag, data) -> whether the message is in the box; if not, MPI is to carry it */
static PyObject *mail_put(PyObject *self, PyObject *args) {
    mail_t *m = (mail_t *)self;
    int to;
    long long tag;
    PyObject *data;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "iLO", &to, &tag, &data) || !is_rank(m, to)) return NULL;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear(); /* MPI may know how to read it */
        Py_RETURN_FALSE;
    }
    int is_in = put_letter(m, to, tag, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyBool_FromLong(is_in);
}

/* find(rank or a negative number for any, tag) -> (sender, bytes) of the first such, or None */
static PyObject *mail_find(PyObject *self, PyObject *args) {
    mail_t *m = (mail_t *)self;
    int from;
    long long tag;
    if (!PyArg_ParseTuple(args, "iL", &from, &tag)) return NULL;
    if (from >= 0 && !is_rank(m, from)) return NULL;
    const letter_t *letter = find_letter(m, &from, tag);
    if (!letter) Py_RETURN_NONE;
    return Py_BuildValue("(iI)", from, letter->nbytes);
}

/* take(rank, tag, buffers): take the first such, which is as large as the buffers together */
static PyObject *mail_take(PyObject *self, PyObject *args) {
    mail_t *m = (mail_t *)self;
    int from;
    long long tag;
    PyObject *buffers;
    if (!PyArg_ParseTuple(args, "iLO!", &from, &tag, &PyList_Type, &buffers)) return NULL;
    if (!is_rank(m, from)) return NULL;
    letter_t *letter = letter_of(m, from, tag);
    size_t done = 0, nbytes = letter ? letter->nbytes : 0;
    for (Py_ssize_t i = 0; letter && i < PyList_Size(buffers); i++) {
        Py_buffer view;
        if (PyObject_GetBuffer(PyList_GetItem(buffers, i), &view, PyBUF_WRITABLE) < 0) return NULL;
        size_t part = (size_t)view.len;
        if (part > nbytes - done) part = nbytes - done;
        if (part) memcpy(view.buf, (char *)(letter + 1) + done, part);
        done += part;
        PyBuffer_Release(&view);
    }
    if (!letter) {
        PyErr_SetString(PyExc_LookupError, "there is no such message");
        return NULL;
    }
    discard_letter(m, from, letter);
    Py_RETURN_NONE;
}

/* sent(rank): a message to it goes by MPI */
static PyObject *mail_sent(PyObject *self, PyObject *given) {
    mail_t *m = (mail_t *)self;
    int rank = (int)PyLong_AsLong(given);
    if (!is_rank(m, rank)) return NULL;
    peer_t *p = m->peers + rank;
    __atomic_store_n(&p->to->sent, ++p->sent, __ATOMIC_RELEASE);
    if (m->pause_ns) m->last_sent = flight_now();
    Py_RETURN_NONE;
}

/* received(rank): a receive has got a message of it that went by MPI */
static PyObject *mail_received(PyObject *self, PyObject *given) {
    mail_t *m = (mail_t *)self;
    int rank = (int)PyLong_AsLong(given);
    if (!is_rank(m, rank)) return NULL;
    peer_t *p = m->peers + rank;
    __atomic_store_n(&p->from->received, ++p->received, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static int mail_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    mail_t *m = (mail_t *)self;
    PyObject *memory, *ranks, *pids, *works, *lock;
    Py_ssize_t each;
    (void)kwargs;
    if (m->peers || !PyArg_ParseTuple(args, "OinO!O!O!O", &memory, &m->rank, &each, &PyTuple_Type,
                                      &ranks, &PyTuple_Type, &pids, &PyTuple_Type, &works, &lock))
        return -1;
    m->size = (int)PyTuple_Size(ranks);
    if (m->rank < 0 || m->rank >= m->size || PyTuple_Size(works) != m->size ||
        PyTuple_Size(pids) != m->size || each % LINE ||
        each < (Py_ssize_t)sizeof(mailbox_t) + 4 * LINE) {
        PyErr_SetString(PyExc_ValueError, "a rank of the group, and boxes of some whole lines");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &m->memory, PyBUF_WRITABLE) < 0) return -1;
    if (m->memory.len < each * m->size * m->size || (uintptr_t)m->memory.buf % LINE) {
        PyErr_SetString(PyExc_ValueError, "the memory is too small for these boxes, or not aligned");
        return -1;
    }
    m->room = (size_t)each - sizeof(mailbox_t);
    m->most = m->room / 4 - sizeof(letter_t);
    m->last_tag = INT32_MAX, m->patience = MOST_LOOKS;
    m->peers = calloc((size_t)m->size, sizeof *m->peers);
    m->ranks = calloc((size_t)m->size, sizeof *m->ranks);
    m->pids = calloc((size_t)m->size, sizeof *m->pids);
    if (!m->peers || !m->ranks || !m->pids) return PyErr_NoMemory(), -1;
    for (int r = 0; r < m->size; r++) {
        char *boxes = m->memory.buf;
        m->peers[r].to = (mailbox_t *)(boxes + (size_t)each * (size_t)(r * m->size + m->rank));
        m->peers[r].from = (mailbox_t *)(boxes + (size_t)each * (size_t)(m->rank * m->size + r));
        m->ranks[r] = PyLong_AsLongLong(PyTuple_GetItem(ranks, r));
        m->pids[r] = PyLong_AsLongLong(PyTuple_GetItem(pids, r));
    }
    Py_INCREF(works);
    m->works = works;
    m->is_owned = PyObject_GetAttrString(lock, "_is_owned");
    m->acquire = PyObject_GetAttrString(lock, "acquire");
    m->release = PyObject_GetAttrString(lock, "release");
    return PyErr_Occurred() ? -1 : 0;
}

static void mail_dealloc(PyObject *self) {
    mail_t *m = (mail_t *)self;
    if (m->memory.obj) PyBuffer_Release(&m->memory);
    free(m->peers), free(m->ranks), free(m->pids);
    Py_XDECREF(m->works), Py_XDECREF(m->is_owned);
    Py_XDECREF(m->acquire), Py_XDECREF(m->release);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* is_settled(rank): whether an offer to it is not claimed any more */
static PyObject *mail_is_settled(PyObject *self, PyObject *given) {
    mail_t *m = (mail_t *)self;
    int rank = (int)PyLong_AsLong(given);
    if (!is_rank(m, rank)) return NULL;
    return PyBool_FromLong(state_of(m->peers[rank].to) != CLAIMED);
}

/* left() -> [(sender, tag, bytes)]: what has been put into the boxes and not been taken */
static PyObject *mail_left(PyObject *self, PyObject *none) {
    mail_t *m = (mail_t *)self;
    (void)none;
    PyObject *found = PyList_New(0);
    for (int from = 0; found && from < m->size; from++) {
        const peer_t *p = m->peers + from;
        uint64_t end = __atomic_load_n(&p->from->head, __ATOMIC_ACQUIRE);
        for (uint64_t at = p->tail; found && at != end;) {
            const letter_t *letter = letter_at(m, p->from, at);
            at += lines_of(letter->nbytes);
            if (letter->is_taken) continue;
            PyObject *each = Py_BuildValue("(iLI)", from, (long long)letter->tag, letter->nbytes);
            if (!each || PyList_Append(found, each) < 0) Py_CLEAR(found);
            Py_XDECREF(each);
        }
    }
    return found;
}

static PyMethodDef MAIL_METHODS[] = {
    {"left", mail_left, METH_NOARGS, NULL},
    {"put", mail_put, METH_VARARGS, NULL},
    {"find", mail_find, METH_VARARGS, NULL},
    {"take", mail_take, METH_VARARGS, NULL},
    {"sent", mail_sent, METH_O, NULL},
    {"received", mail_received, METH_O, NULL},
    {"is_settled", mail_is_settled, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef MAIL_MEMBERS[] = {
    {"posted", T_INT, offsetof(mail_t, posted), 0, NULL},
    {"last_tag", T_LONGLONG, offsetof(mail_t, last_tag), 0, NULL},
    {"pause_ns", T_LONGLONG, offsetof(mail_t, pause_ns), 0, NULL},
    {"attaches", T_INT, offsetof(mail_t, attaches), 0, NULL},
    {"patience", T_LONG, offsetof(mail_t, patience), 0, NULL},
    {"most", T_PYSSIZET, offsetof(mail_t, most), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot MAIL_SLOTS[] = {
    {Py_tp_new, PyType_GenericNew},   {Py_tp_init, mail_init},       {Py_tp_dealloc, mail_dealloc},
    {Py_tp_methods, MAIL_METHODS},    {Py_tp_members, MAIL_MEMBERS}, {0, NULL},
};
static PyType_Spec MAIL_SPEC = {"hpcdist.transport._kernel.Mailboxes", sizeof(mail_t), 0,
                                Py_TPFLAGS_DEFAULT, MAIL_SLOTS};

/* ---- send and recv in one call; what is usual is as in `_hot.c` */

enum { CODE_BITS = 5, SEND = 16, RECV = 17 }; /* as in tags.py and kinds.py */
static PyTypeObject *MAIL;
static PyObject *MAIL_NAME, *AWAIT_TAKEN;

/* One message as its function was called. */
typedef struct {
    mail_t *mail;
    PyObject *group;
    seen_t array;
    int code, peer;
    size_t nbytes;
    int64_t tag; /* on the wire */
} message_t;

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
    if (overflow || wanted < 0 || wanted > m->last_tag >> CODE_BITS) return -1;
    return (int64_t)wanted << CODE_BITS | code;
}

static int is_true(PyObject *callable, PyObject *argument) {
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
    PyObject *transport = attribute(group, HOT.transport);
    PyObject *mail = attribute(transport, MAIL_NAME);
    Py_XDECREF(transport);
    if (mail && Py_TYPE(mail) != MAIL) Py_CLEAR(mail);
    return (mail_t *)mail;
}

static void begin_message(message_t *w) {
    w->mail = NULL, w->group = NULL;
    w->array.dtype = NULL, w->array.axes = 0, w->code = 0;
}

/* Whether the arguments ``(what, peer, group, sync_op, tag)`` may be usual. */
static int may_be_usual(PyObject *const *args, Py_ssize_t n_args) {
    return n_args == 5 && HOT.on && PyBool_Check(args[3]) && PyList_Size(HOT.listeners) == 0 &&
           PyThread_get_thread_ident() == HOT.thread;
}

/* Find the boxes, the peer and the tag; 0: not usual. */
static int find_peer(message_t *w, PyObject *const *args, int code) {
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

static void forget(message_t *w) {
    Py_XDECREF((PyObject *)w->mail), Py_XDECREF(w->group);
}

/* Record a message that has been sent or received, from `since` on. */
static void record_message(const message_t *w, int kind, int peer, uint64_t since, int flags,
                           int state) {
    PyObject *place = attribute(w->group, HOT.flight_);
    unsigned long at = place ? PyLong_AsUnsignedLong(place) : 0;
    Py_XDECREF(place);
    if (PyErr_Occurred()) PyErr_Clear(), at = 0;
    uint64_t mark = flight_begin(HOT.flight, (unsigned)kind, (unsigned)w->code, w->nbytes,
                                 (uint32_t)at, 0, peer, (uint32_t)(w->tag >> CODE_BITS),
                                 (unsigned)flags);
    if (!mark) return;
    HOT.flight->records[mark & HOT.flight->mask].begin_ns = since;
    flight_end(HOT.flight, mark, (unsigned)state);
}

static int is_recorded(void) { return HOT.flight && HOT.flight->header; }

/* Offer a large message; -1: an error is set. While it is being read, only Python waits long:
 * ``await_taken(group, tensor, dst, tag)``. */
static int send_large(const message_t *w, PyObject *const *args) {
    int state = offer(w->mail, w->peer, w->tag, w->array.data, w->nbytes);
    if (state == CLAIMED) {
        PyObject *ended = PyObject_CallFunctionObjArgs(AWAIT_TAKEN, w->group, args[0], args[1],
                                                       args[4], NULL);
        if (!ended) return -1;
        Py_DECREF(ended);
        state = (int)state_of(w->mail->peers[w->peer].to);
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
            record_message(&w, SEND, w.peer, since, args[3] == Py_True ? 0 : FLIGHT_STARTED,
                           FLIGHT_ENDED);
        result = ended > 0 ? HOT.done : ended == 0 ? Py_None : NULL;
    }
    forget(&w);
    Py_XINCREF(result);
    return result;
}

/* Wait a moment for a message, and take it: the sender, or -1. */
static int take_soon(const message_t *w) {
    mail_t *m = w->mail;
    uint64_t since;
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
            if (take_offer(m, from, w->tag, w->array.data, w->nbytes)) return from;
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
        int from = take_soon(&w);
        if (from >= 0) {
            if (since) record_message(&w, RECV, w.peer, since, 0, FLIGHT_ENDED);
            result = PyTuple_GetItem(w.mail->works, from);
        }
    }
    forget(&w);
    Py_INCREF(result);
    return result;
}

/* mail_join(await_taken) */
static PyObject *mail_join(PyObject *self, PyObject *await_taken) {
    (void)self;
    keep(&AWAIT_TAKEN, await_taken);
    Py_RETURN_NONE;
}

#define MAIL_FUNCTIONS                                                                          \
    HOT_VERB(send), HOT_VERB(recv), { "mail_join", mail_join, METH_O, NULL }

/* Add what the module has of mailboxes beyond its functions. */
static int add_mail(PyObject *module) {
    PyObject *type = PyType_FromSpec(&MAIL_SPEC);
    MAIL_NAME = PyUnicode_InternFromString("mail");
    if (!type || !MAIL_NAME) return -1;
    MAIL = (PyTypeObject *)type;
    Py_INCREF(type);
    return PyModule_AddObject(module, "Mailboxes", type);
}
