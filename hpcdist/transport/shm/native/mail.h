/* Mailboxes: small messages between the ranks of a node; `shm/mail.py` says where they lie and what
 * they promise.
 *
 * Each pair of ranks has a box in each direction: a ring of bytes with one writer and one reader. A
 * letter is a header and the bytes of a message, contiguous, in whole cache lines. The writer
 * publishes `head` with a release store; the reader looks with acquire loads, may take letters in
 * any order, and gives their room back in the order of the ring.
 *
 * A message that is too large for a box is offered: the writer says where it is, and the reader, if
 * it is waiting at this moment, claims it and copies it from there. Else the writer takes the offer
 * back, and MPI is to carry it. Of a very large one the reader also says where it is to go, and both
 * copy pieces, each the next that neither has begun.
 *
 * Everything here is called with the global interpreter lock held, and waits for microseconds.
 */
#ifndef HPCDIST_MAIL_H
#define HPCDIST_MAIL_H
#include "hot.h"

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
    uint64_t sent;  /* the writer's: messages by MPI */
    uint64_t offer; /* a state; the rest belongs to it */
    int64_t tag;
    uint64_t address, nbytes;
    uint64_t target;       /* where the reader wants it; 0: it copies it alone */
    uint64_t begun, ended; /* bytes whose copying either of them has begun, and ended */
    char ring[];
} mailbox_t;

/* The reader claims an offer that is OFFERED, the writer takes back one that nobody has claimed. */
enum { NO_OFFER, OFFERED, CLAIMED, TAKEN, REFUSED };

/* What this rank knows of another (or of itself). */
typedef struct {
    mailbox_t *to, *from;
    uint64_t head, given_back;    /* of `to`: what is written, and what was seen of its tail */
    uint64_t tail;                /* of `from` */
    uint64_t sent, seen_received; /* messages to it by MPI, and those it is known to have got */
    uint64_t received;            /* messages from it by MPI */
} peer_t;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    int rank, size;
    size_t room, most; /* bytes of a ring, and of the largest message in it */
    peer_t *peers;
    int next;           /* from whom a receive from any rank takes first */
    int posted;         /* receives that wait for their messages */
    long long last_tag; /* the largest tag */
    long long pause_ns; /* if not 0, so often a message goes by MPI */
    uint64_t last_sent; /* when one did */
    int64_t *ranks;     /* the world rank of each rank */
    int attaches;       /* whether ranks can read each other's memory */
    long patience;      /* looks at an offer, or for a message, before Python takes over */
    int64_t *pids;      /* the process of each rank */
    PyObject *works;    /* what a receive returns, by sender */
    PyObject *is_owned, *acquire, *release; /* of the lock of whoever receives */
} mail_t;

static inline size_t lines_of(size_t nbytes) {
    return (sizeof(letter_t) + nbytes + LINE - 1) / LINE * LINE;
}

static inline uint64_t state_of(const mailbox_t *box) {
    return __atomic_load_n(&box->offer, __ATOMIC_ACQUIRE);
}

/* ---- `mail.c` */

/* The next letter to a rank, to be filled and ended; NULL: it does not fit, or may not go. */
letter_t *begin_letter(mail_t *m, int to, int64_t tag, size_t nbytes);

/* Let the reader see a letter. */
void end_letter(mail_t *m, int to, const letter_t *letter);

/* Put a message into the box to a rank; 0: it does not fit, or may not. */
int put_letter(mail_t *m, int to, int64_t tag, const void *data, size_t nbytes);

/* The first letter of a rank with a tag, or of any rank if `*from` is negative, which becomes the
 * sender; NULL: there is none. */
letter_t *find_letter(const mail_t *m, int *from, int64_t tag);

/* Give back the room of a letter that has been copied, and of those before it, if they have, too. */
void discard_letter(mail_t *m, int from, letter_t *letter);

/* Offer a message to a rank: TAKEN, REFUSED (nothing has happened), or CLAIMED for a long time. */
int offer(mail_t *m, int to, int64_t tag, const void *data, size_t nbytes);

/* Take what a rank offers, if it is what is wanted and nothing of it in the box comes before:
 * TAKEN, REFUSED, or CLAIMED: for a long time that rank has not ended a piece of it. */
int take_offer(const mail_t *m, int from, int64_t tag, void *data, size_t nbytes);

/* Whether nothing of what was claimed is being copied any more. */
int is_copied(const mail_t *m, int from, size_t nbytes);

/* Leave what was CLAIMED to MPI, though the sender may still write a piece of it. */
void leave_offer(const mail_t *m, int from);

/* End what was CLAIMED, once all of it has been copied: TAKEN or REFUSED. */
int end_offer(const mail_t *m, int from, void *data, size_t nbytes);

/* Whether MPI brings something of a rank. */
int is_by_mpi(const mail_t *m, int from);

/* Whether an object is a Mailboxes. */
int is_mail(PyObject *object);

int add_mail(PyObject *module);

/* ---- `mail_hot.c` */

/* One message as its function was called. */
typedef struct {
    mail_t *mail;
    PyObject *group;
    seen_t array;
    int code, peer;
    size_t nbytes;
    int64_t tag; /* on the wire */
} message_t;

void begin_message(message_t *w);

/* Whether the arguments ``(what, peer, group, sync_op, tag)`` may be usual; a sixth is None then. */
int may_be_usual(PyObject *const *args, Py_ssize_t n_args);

/* Find the boxes, the peer and the tag; 0: not usual. */
int find_peer(message_t *w, PyObject *const *args, int code);

void forget(message_t *w);

/* What a callable says to an argument, or to none, if that is not NULL. */
int is_true(PyObject *callable, PyObject *argument);

int is_recorded(void);

/* Record a message that has been sent or received, from `since` on. */
void record_message(const message_t *w, int kind, int peer, uint64_t since, int flags, int state);

int add_mail_hot(PyObject *module);
int add_mail_objects(PyObject *module);

#endif
