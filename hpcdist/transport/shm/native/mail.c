/* The boxes: letters, offers of large messages, and the object `Mailboxes`. */
#include "mail.h"
#include "attach.h"
#include "copy.h"

enum { MOST_LOOKS = 400, MOST_OFFERED = 8 << 20, LONG_NS = 20000000 };

/* Messages from so many bytes on are copied by both ranks, in pieces of so many. */
enum { TOGETHER = 64 << 10, LEAST_PIECE = 32 << 10, MOST_PIECE = 128 << 10 };

#define FAILED ((uint64_t)1 << 62) /* in `ended`, beside the bytes: a piece could not be copied */

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

letter_t *begin_letter(mail_t *m, int to, int64_t tag, size_t nbytes) {
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

void end_letter(mail_t *m, int to, const letter_t *letter) {
    peer_t *p = m->peers + to;
    p->head += lines_of(letter->nbytes);
    __atomic_store_n(&p->to->head, p->head, __ATOMIC_RELEASE);
}

int put_letter(mail_t *m, int to, int64_t tag, const void *data, size_t nbytes) {
    letter_t *letter = begin_letter(m, to, tag, nbytes);
    if (!letter) return 0;
    if (nbytes) copy_for_others((char *)(letter + 1), data, nbytes);
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

letter_t *find_letter(const mail_t *m, int *from, int64_t tag) {
    if (*from >= 0) return letter_of(m, *from, tag);
    for (int i = 0; i < m->size; i++) {
        int rank = (m->next + i) % m->size;
        letter_t *letter = letter_of(m, rank, tag);
        if (letter) return *from = rank, letter;
    }
    return NULL;
}

void discard_letter(mail_t *m, int from, letter_t *letter) {
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

static int change_state(mailbox_t *box, uint64_t before, uint64_t after) {
    return __atomic_compare_exchange_n(&box->offer, &before, after, 0, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

/* Copy the pieces that the other one has not begun. Who cannot copy one leaves the rest, too, and
 * says so: then all is over as soon as the other one has ended what it has begun. */
static void copy_pieces(mailbox_t *box, pid_t pid, uintptr_t theirs, char *ours, size_t nbytes,
                        int writes) {
    size_t at, each = nbytes / 8;
    each = each < LEAST_PIECE ? LEAST_PIECE : each > MOST_PIECE ? MOST_PIECE : each;
    while ((at = __atomic_fetch_add(&box->begun, each, __ATOMIC_RELAXED)) < nbytes) {
        size_t piece = nbytes - at < each ? nbytes - at : each;
        uint64_t ended = piece;
        if (attach(pid, theirs + at, ours + at, piece, writes)) {
            size_t rest = __atomic_exchange_n(&box->begun, nbytes, __ATOMIC_RELAXED);
            ended += FAILED + (rest < nbytes ? nbytes - rest : 0);
        }
        __atomic_fetch_add(&box->ended, ended, __ATOMIC_ACQ_REL);
    }
}

/* Let a moment pass while the other one copies, since `began`; 0: it takes long, and Python waits. */
static int rest_shortly(long looks, uint64_t began) {
    if (looks >= FEW_LOOKS && flight_now() - began > LONG_NS) return 0;
    rest(looks / 16);
    return 1;
}

int offer(mail_t *m, int to, int64_t tag, const void *data, size_t nbytes) {
    peer_t *p = m->peers + to;
    mailbox_t *box = p->to;
    if (!m->attaches || to == m->rank || nbytes > MOST_OFFERED || state_of(box) == CLAIMED ||
        !is_open(m, p))
        return REFUSED;
    __atomic_store_n(&box->tag, tag, __ATOMIC_RELAXED);
    __atomic_store_n(&box->nbytes, nbytes, __ATOMIC_RELAXED);
    box->address = (uintptr_t)data, box->target = box->begun = box->ended = 0;
    __atomic_store_n(&box->offer, OFFERED, __ATOMIC_RELEASE);
    uint64_t since = 0;
    long looks = 0;
    while (state_of(box) == OFFERED && rest_patiently(looks, m->patience, &since)) looks++;
    if (change_state(box, OFFERED, NO_OFFER)) return REFUSED;
    uint64_t began = flight_now();
    for (looks = 0; state_of(box) == CLAIMED; looks++) {
        uint64_t target = __atomic_load_n(&box->target, __ATOMIC_ACQUIRE);
        if (target) {
            box->target = 0;
            copy_pieces(box, (pid_t)m->pids[to], target, (char *)data, nbytes, 1);
        }
        if (!rest_shortly(looks, began)) return CLAIMED;
    }
    return (int)state_of(box);
}

int is_copied(const mail_t *m, int from, size_t nbytes) {
    uint64_t ended = __atomic_load_n(&m->peers[from].from->ended, __ATOMIC_ACQUIRE);
    return (ended & (FAILED - 1)) >= nbytes;
}

static int settle(mailbox_t *box, int is_taken) {
    int state = is_taken ? TAKEN : REFUSED;
    __atomic_store_n(&box->offer, (uint64_t)state, __ATOMIC_RELEASE);
    return state;
}

int end_offer(const mail_t *m, int from, void *data, size_t nbytes) {
    mailbox_t *box = m->peers[from].from;
    int failed = __atomic_load_n(&box->ended, __ATOMIC_ACQUIRE) >= FAILED;
    return settle(box, !failed || !attach((pid_t)m->pids[from], box->address, data, nbytes, 0));
}

void leave_offer(const mail_t *m, int from) { settle(m->peers[from].from, 0); }

int take_offer(const mail_t *m, int from, int64_t tag, void *data, size_t nbytes) {
    mailbox_t *box = m->peers[from].from;
    pid_t pid = (pid_t)m->pids[from];
    if (state_of(box) != OFFERED || __atomic_load_n(&box->tag, __ATOMIC_RELAXED) != tag ||
        __atomic_load_n(&box->nbytes, __ATOMIC_RELAXED) != nbytes ||
        !change_state(box, OFFERED, CLAIMED))
        return REFUSED;
    /* only now it stays as it is: what was seen before may have been taken back */
    if (box->tag != tag || box->nbytes != nbytes || letter_of(m, from, tag)) return settle(box, 0);
    if (nbytes < TOGETHER) return settle(box, !attach(pid, box->address, data, nbytes, 0));
    __atomic_store_n(&box->target, (uintptr_t)data, __ATOMIC_RELEASE);
    copy_pieces(box, pid, box->address, data, nbytes, 0);
    uint64_t began = flight_now();
    for (long looks = 0; !is_copied(m, from, nbytes); looks++)
        if (!rest_shortly(looks, began)) return CLAIMED;
    return end_offer(m, from, data, nbytes);
}

int is_by_mpi(const mail_t *m, int from) {
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
        PyErr_SetString(PyExc_ValueError,
                        "the memory is too small for these boxes, or not aligned");
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

/* is_copied(rank): whether nothing of a message of it that was claimed is being copied any more */
static PyObject *mail_is_copied(PyObject *self, PyObject *given) {
    mail_t *m = (mail_t *)self;
    int rank = (int)PyLong_AsLong(given);
    if (!is_rank(m, rank)) return NULL;
    return PyBool_FromLong(is_copied(m, rank, m->peers[rank].from->nbytes));
}

/* written(rank), arrived(rank): bytes of the box to it and from it that have been written, ever */
static PyObject *mail_written(PyObject *self, PyObject *given) {
    const mail_t *m = (mail_t *)self;
    int rank = (int)PyLong_AsLong(given);
    if (!is_rank(m, rank)) return NULL;
    return PyLong_FromUnsignedLongLong(__atomic_load_n(&m->peers[rank].to->head, __ATOMIC_ACQUIRE));
}

static PyObject *mail_arrived(PyObject *self, PyObject *given) {
    const mail_t *m = (mail_t *)self;
    int rank = (int)PyLong_AsLong(given);
    if (!is_rank(m, rank)) return NULL;
    return PyLong_FromUnsignedLongLong(
        __atomic_load_n(&m->peers[rank].from->head, __ATOMIC_ACQUIRE));
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
    {"written", mail_written, METH_O, NULL},
    {"arrived", mail_arrived, METH_O, NULL},
    {"sent", mail_sent, METH_O, NULL},
    {"received", mail_received, METH_O, NULL},
    {"is_settled", mail_is_settled, METH_O, NULL},
    {"is_copied", mail_is_copied, METH_O, NULL},
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
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, mail_init},       {Py_tp_dealloc, mail_dealloc},
    {Py_tp_methods, MAIL_METHODS},  {Py_tp_members, MAIL_MEMBERS}, {0, NULL},
};
static PyType_Spec MAIL_SPEC = {"hpcdist.transport._kernel.Mailboxes", sizeof(mail_t), 0,
                                Py_TPFLAGS_DEFAULT, MAIL_SLOTS};

static PyTypeObject *MAIL;

int is_mail(PyObject *object) { return Py_TYPE(object) == MAIL; }

int add_mail(PyObject *module) {
    PyObject *type = PyType_FromSpec(&MAIL_SPEC);
    if (!type) return -1;
    MAIL = (PyTypeObject *)type;
    Py_INCREF(type);
    return PyModule_AddObject(module, "Mailboxes", type);
}
