/* The hot path: one compiled call for a small collective on the ranks of one node; `hot.py` and
 * `comm/hot.py` say when it is used.
 *
 * A verb (`hot_all_reduce`, ...) gets what its public function got. It looks whether everything is
 * usual (`VERBS`): plain arrays in host memory that fit into the control block, the main thread,
 * nobody who listens, no other operation of the group under way. If not, it returns None and has done
 * nothing: Python runs the operation. Else it posts this rank's contribution, agrees and takes the
 * result, all while it holds the interpreter lock: nothing can come in between.
 *
 * Where the others do not come within microseconds, or mean something else, it takes the group's
 * turn and hands the posted operation over to Python (`hand_over`), which waits and raises as
 * always. From then on the operation counts as unfinished, until Python has ended it.
 */
#ifndef HPCDIST_HOT_H
#define HPCDIST_HOT_H
#include "eager.h"
#include "facts.h"
#include "group.h"
#include "turn.h"

enum { MOST_AXES = 8, PRINTS = 64, DTYPES = 64, OPS = 16, FOREIGN = 32 };
enum { OBJECTS = -2 }; /* in place of the code of a dtype */
/* Looks at others in an operation that nobody waits for: some 30 us, which is what it takes to wake
 * the thread of the queue. Ranks that had to do that come so late to the next one. */
enum { LITTLE_PATIENCE = FEW_LOOKS + 40 };
/* NumPy's flags: C-contiguous, aligned, writable */
enum { READABLE = 0x1 | 0x100, ORDINARY = READABLE | 0x400 };

/* The beginning of NumPy's PyArrayObject, which is part of its binary interface; `hot_shows` lets
 * Python compare. Arrays of other libraries are seen through the C interface of DLPack that their
 * type has; `meet` in hot.py tells which. */
typedef struct {
    PyObject_HEAD
    char *data;
    int axes;
    Py_ssize_t *shape, *strides;
    PyObject *base, *descr;
    int flags;
} array_t;

typedef struct {
    PyObject *descr;
    int code, item, align;
    const kernel_t *kernels[OPS]; /* by operator; NULL: Python's business */
} dtype_t;

/* An array in host memory, contiguous, aligned and writable. */
typedef struct {
    char *data;
    int axes;
    const Py_ssize_t *shape;
    const dtype_t *dtype;
} seen_t;

/* DLPack's DLTensor, and as much of its DLPackExchangeAPI as is used; version 1. */
typedef struct {
    void *data;
    int32_t device_type, device_id, axes;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} dl_tensor_t;
typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *managed_from, *managed_to;
    int (*show)(void *object, dl_tensor_t *out);
} dl_exchange_t;

/* A type whose objects a verb has got. */
typedef struct {
    PyTypeObject *type;
    const dl_exchange_t *exchange; /* NULL: Python's business */
    PyObject *odd; /* the method that tells whether the memory holds other numbers than it says */
} foreign_t;

/* What has been computed of a shape: the fingerprint of the call, and its `detail`. */
typedef struct {
    int kind, reduce_op, root, code, axes;
    Py_ssize_t shape[MOST_AXES];
    int64_t number, detail;
} print_t;

/* An eager operation, for the words of an error: what the hot path knows of it and its record, or
 * what Python says. */
typedef struct {
    print_t print;
    uint64_t mark;
    PyObject *words;
} eager_call_t;

/* What a shared control block does not know of its group. */
typedef struct {
    PyObject_HEAD
    control_block_t *control;
    PyObject *queued; /* what waits for the group's turn */
    turn_t *turn;
    int64_t *ranks;               /* the world rank of each rank */
    long long sequence, limit_ns; /* see `Tally` in hot.py */
    int unfinished;
    long long eager_calls;          /* all of them so far, */
    long long missed;               /* and those that others have begun and this rank will not */
    eager_call_t eager[MOST_EAGER]; /* since the last agreement, or before it */
    int64_t chain_before;           /* see `uncount_eager` */
    struct large *large; /* see `hot_large.c`; NULL: what is large is Python's business */
    struct slots *slots; /* see `hot_slots.c`; NULL: the ranks share memory */
    long long posted;    /* operations in slots, */
    PyObject *failure;   /* and the error of MPI in the last one, if any */
} hot_t;

/* One operation, as a verb plans it. */
typedef struct {
    int kind, reduce_op, root, loose;
    seen_t like;  /* whose shape the ranks compare; without a dtype: nothing */
    size_t total; /* bytes of the largest contribution */
    size_t piece; /* bytes of each of `from` and `to` */
    int n_from, n_to;
    int to_root;            /* all but the root only give */
    int source;             /* whose contribution is copied; -1: everyone's, one after the other */
    size_t first;           /* where in it the part for this rank begins */
    size_t part;            /* and its bytes */
    const kernel_t *kernel; /* instead of copying: how the parts are reduced */
    double divisor;
    const char *from[MOST];
    char *to[MOST];
} planned_t;

/* Where what a rank has given has its place in the result. */
static inline char *place_to(const planned_t *p, int rank) {
    if (p->source >= 0) return p->to[0];
    return p->n_to == 1 ? p->to[0] + (size_t)rank * p->part : p->to[rank];
}

/* What all verbs use. */
typedef struct {
    int on;
    unsigned long thread; /* the main one */
    long spins;
    PyTypeObject *array, *group, *reduce_op;
    PyTypeObject *hot;
    PyObject *world; /* of the process, or None; simulated ranks, which are threads, have others */
    PyObject *listeners, *go_on, *start, *end, *take_back, *done, *describe, *meet;
    PyObject *hot_, *failed; /* names of attributes */
    flight_t *flight;        /* the recorder; NULL where it is not compiled */
} shared_t;
extern shared_t HOT;

/* ---- `hot_look.c`: looking at arguments */

extern const dtype_t *DL_DTYPES[8][17]; /* by DLPack's code and the bytes of an element */

/* See the array that an argument is, if it is one that is used as it lies, with these flags. */
int look_for(PyObject *object, seen_t *v, int flags);

static inline int look(PyObject *object, seen_t *v) { return look_for(object, v, ORDINARY); }

static inline size_t size_of(const seen_t *v) {
    size_t size = 1;
    for (int i = 0; i < v->axes; i++) size *= (size_t)v->shape[i];
    return size;
}

static inline int is_same_shape(const seen_t *a, const seen_t *b) {
    if (a->axes != b->axes) return 0;
    for (int i = 0; i < a->axes; i++)
        if (a->shape[i] != b->shape[i]) return 0;
    return 1;
}

/* The rank in the group of a world rank; -1: Python's business. */
int rank_of(const hot_t *h, PyObject *world_rank);

/* Whether an argument is one block per rank like `part`: an array of n times its elements, or n
 * arrays of its shape. Writes down where they begin, and returns how many places that are. */
int blocks(const hot_t *h, PyObject *given, const seen_t *part, char **places);

int add_hot_look(PyObject *module);

/* ---- `hot_plan.c`: what the verbs read and write, and the fingerprint of that */

typedef struct {
    const int *kind; /* of FACTS */
    int loose, n_args;
    int (*plan)(const hot_t *, PyObject *const *, planned_t *);
} verb_t;

extern const verb_t VERBS[];
extern const int N_VERBS;

/* The numbers of an operation, from the table or made and kept there. */
const print_t *find_print(print_t *key, int loose);

const print_t *print_of(const planned_t *p);

/* ---- `hot.c` */

/* Write what this rank contributes to a payload. */
void give(const planned_t *p, char *payload);

/* The same without what an exchange leaves on this rank, which is read where it lies; and that alone,
 * for who takes the result elsewhere. */
void give_others(const planned_t *p, const control_block_t *b, char *payload);
void give_the_rest(const planned_t *p, const control_block_t *b, char *payload);

/* Take the result out of what others have given in that way, and this rank's own. */
void take_from_others(const planned_t *p, const control_block_t *b, const char **given);

/* Take the result out of what `size` ranks have given; NULL: that is taken. */
void take_result(const planned_t *p, int size, const char *const *given);

/* ---- `hot_slots.c` */

/* How an operation stands that has been begun; 0: this rank has posted, see also `hot_large.c`. */
enum { ALL_DONE = 3, AGREED = 5 };

/* Post, agree and take, where the ranks have slots; how the operation stands then. */
int perform_in_slots(hot_t *h, const planned_t *p, const print_t *print, int waits);

void forget_slots(hot_t *h);
PyObject *hot_learn_slots(PyObject *self, PyObject *args);

/* ---- `hot_eager.c` */

/* Do what has a root that gives to all, or takes from all; 0: all ranks agree on it. */
int run_eagerly(hot_t *h, const planned_t *p, const print_t *print, long spins, uint64_t mark);

/* Whether this rank may give its data and go on: without a mark nobody could tell of it later. */
static inline int may_give(const control_block_t *b, uint64_t mark) {
    return mark && !b->hesitates;
}

/* Note and count an eager operation, for which this rank does no more than what is its own. */
void note_eager(hot_t *h, const print_t *print, uint64_t mark);

/* Whether it is left to Python, before anything has happened: to wait for those who give. */
int awaits_givers(const hot_t *h, const planned_t *p, const print_t *print, long patience);

PyObject *hot_all_give(PyObject *self, PyObject *nbytes);
PyObject *hot_give(PyObject *self, PyObject *args);
PyObject *hot_has_all(PyObject *self, PyObject *args);
PyObject *hot_not_given(PyObject *self, PyObject *ignored);
PyObject *hot_take_all(PyObject *self, PyObject *args);
PyObject *hot_finds_given(PyObject *self, PyObject *args);
PyObject *hot_take_given(PyObject *self, PyObject *args);
PyObject *hot_earlier(PyObject *self, PyObject *ignored);
void forget_eager(hot_t *h);

/* ---- `hot_turn.c`: between the hot path and Python */

/* Have an operation that has failed lend no memory any more. Keeps what is raised. `pickles` is what
 * has been pickled for it, or None. */
void take_back(PyObject *group, PyObject *describe, PyObject *args, PyObject *pickles);

/* Call `function(group, ...)` in the group's turn, which is free, or this thread's. `collects` says
 * whether to collect garbage from then on: no destructor runs before the turn is taken. Takes the
 * reference to `args`, which may be NULL. */
PyObject *call_in_turn(hot_t *h, PyObject *function, PyObject *args, int collects);

/* A new tuple of arguments; NULL if there is no memory. */
PyObject *tuple_of(PyObject *const *args, Py_ssize_t n);

/* Give an operation that is posted to Python: `go_on(group, describe, args, pickles)`. */
PyObject *hand_over(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                    Py_ssize_t n_args, PyObject *pickles);

/* Let the thread of the group's queue end an operation that is posted:
 * `start(group, describe, args, mark, state)` returns its work; see `hot_large.c` for the state. */
PyObject *hand_to_thread(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                         Py_ssize_t n_args, uint64_t mark);

/* Let Python end an operation in its turn, which stands so. */
PyObject *end_in_turn(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                      Py_ssize_t n_args, int state);

/* The attribute of an object; NULL, without an error, where it has none. */
PyObject *attribute(PyObject *object, PyObject *name);

/* The group that an argument means: a new reference, or NULL. */
PyObject *group_of(PyObject *given);

/* What the transport of a group has by that name: a new reference, or NULL. */
PyObject *of_transport(PyObject *group, PyObject *name);

/* What it has for the hot path. */
hot_t *hot_of(PyObject *group);

/* Whether nothing of the group is under way, no exchange of it left to be completed, and nobody to
 * be told of an operation. */
int is_idle(const hot_t *h);

/* Count the operation in `Group.issued`, as `dispatch` does; returns its number. */
long long count_issued(PyObject *group, hot_t *h);

/* Record that operation `number` of a group begins, at the time `since` (0: now); its mark, 0 where
 * nothing is recorded. */
uint64_t record(PyObject *group, long long number, int kind, int code, size_t nbytes, int root,
                unsigned flags, uint64_t since);

/* Whether the hot path is on, for the main thread. */
static inline int is_usual(void) { return HOT.on && PyThread_get_thread_ident() == HOT.thread; }

/* Of what `group_of` returns, of the class that `hot_join` has seen to be a `GroupState`. */
static inline group_t *group_in(PyObject *group) { return (group_t *)group; }

/* Keep a new reference in place of an older one. */
static inline void keep(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    Py_INCREF(object);
    *place = object;
    Py_XDECREF(before);
}

int add_hot(PyObject *module);
int add_hot_objects(PyObject *module);
int add_plan_slots(PyObject *module);

/* ---- `hot_large.c` */

/* Whether a large operation is done here: by the way that the tuning table names for it. */
int is_movable(const hot_t *h, const planned_t *p);

/* What may be done at once though nobody waits for it: so many bytes take less time than to wake the
 * thread of the queue. */
enum { AT_ONCE_BYTES = 128 << 10 };

/* Do it, in the group's turn. One that nobody waits for has a mark, which becomes 0 if the thread of
 * the queue is to end it. */
PyObject *run_large(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                    Py_ssize_t n_args, const planned_t *p, const print_t *print, uint64_t *mark);

/* Whether one that is waited for takes so little time, in staging memory, that it need not let go of
 * the interpreter lock; and do it, as it is done in the control block. */
int is_soon_staged(const hot_t *h, const planned_t *p);
PyObject *run_staged(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                     Py_ssize_t n_args, const planned_t *p, const print_t *print);

PyObject *hot_learn_large(PyObject *self, PyObject *args);
void forget_large(hot_t *h);

#endif
