/* `ControlBlock`: the flags of one group of ranks on one node, and what each puts beside them.
 *
 * A rank publishes with a release store and looks with acquire loads; nothing here blocks: whoever
 * has looked long enough without success returns to Python, which yields, sleeps, and watches the
 * clock.
 */
#ifndef HPCDIST_CONTROL_H
#define HPCDIST_CONTROL_H
#include "combine.h"
#include "../../flight/native/recorder.h"
#include <sched.h>
#include <structmember.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

enum { NUMBERS_AGREED = 6 };
#define NOT_IN_HEAP (1LL << 62) /* addresses from here on mean something else */

typedef struct {
    int64_t numbers[NUMBERS_AGREED], address;
    uint64_t sequence;
} slot_t; /* one cache line */

/* A reduction on its way through the staging memory; see `pipe_go`. */
typedef struct {
    const kernel_t *kernel;
    const char *send;      /* what this rank contributes */
    char *mine, *all;      /* where its slice of the result goes, and the others'; or NULL */
    char *stages[MOST];    /* of every rank: two parts of `size` slices, then two results */
    size_t slice;          /* elements of a slice in the staging memory */
    size_t length, stride; /* all that is in slices of one rank; between slices of two */
    size_t parts, part;
    int phase;
    uint64_t before; /* this control block's step when the pipe began */
    double divisor;
} pipe_t;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    int rank, size;
    size_t payload;
    uint64_t sequence, step;
    uint64_t ended; /* the last operation in which nobody can use this rank's memory any more */
    char *steps, *slots, *payloads;
    char *decisions, *given_places; /* of eager operations; see `eager.h` */
    int most_eager;                 /* between two agreements, */
    int n_eager;                    /* since the last agreement, */
    int n_sealed;                   /* before it, */
    int64_t chain;                  /* and what they were */
    int hesitates; /* the last agreement has failed: the next operation is one, too */
    pipe_t pipe;
} control_block_t;

static inline slot_t *slot_in(const control_block_t *b, uint64_t sequence, int rank) {
    return (slot_t *)(b->slots + ((sequence & 1) * (size_t)b->size + (size_t)rank) * LINE);
}

static inline slot_t *slot_of(const control_block_t *b, int rank) {
    return slot_in(b, b->sequence, rank);
}

/* Where a rank's contribution to the operation at hand lies. */
static inline char *payload_of(const control_block_t *b, int rank) {
    return b->payloads + ((b->sequence & 1) * (size_t)b->size + (size_t)rank) * b->payload;
}

static inline uint64_t *step_of(const control_block_t *b, int rank) {
    return (uint64_t *)(b->steps + (size_t)rank * LINE);
}

static inline int is_complete(const control_block_t *b) {
    for (int r = 0; r < b->size; r++)
        if (__atomic_load_n(&slot_of(b, r)->sequence, __ATOMIC_ACQUIRE) != b->sequence) return 0;
    return 1;
}

/* How often a rank looks at others before it gives its core away. Looks are cheap and come soon, but
 * where somebody else needs the core, they keep from running whom this rank may wait for. A core that
 * is given away comes back at once if nobody needs it: what that takes says how often to look. */
enum { FEW_LOOKS = 300, CROWDED_LOOKS = 5, CROWDED_NS = 1000, REST_NS = 5000 };
extern long looks_at_once;

/* Give the core away, at the time `now`. */
void give_core(uint64_t now);

/* Let a moment pass before the next look at others. */
static inline void rest(long looks) {
    if (looks < looks_at_once)
        PAUSE();
    else
        give_core(flight_now());
}

/* The same; 0: there have been as many looks as there is patience for, or they took too long: more
 * than some microseconds each when this core is given away. */
static inline int rest_patiently(long looks, long patience, uint64_t *since) {
    if (looks >= patience) return 0;
    if (looks < looks_at_once) {
        PAUSE();
        return 1;
    }
    uint64_t now = flight_now();
    if (!*since) *since = now;
    if (now - *since > REST_NS * (uint64_t)(patience - FEW_LOOKS)) return 0;
    give_core(now);
    return 1;
}

enum { STEP_BITS = 24, WHO_BITS = 16, OF_A_DEATH = 1 << 14 };
#define BEYOND (1ull << (STEP_BITS - 1))

enum { NO_OTHER = -1 };

static inline int all_at(const control_block_t *b, uint64_t step, long patience) {
    uint64_t since = 0;
    for (long looks = 1;; looks++) {
        int r = 0;
        while (r < b->size && __atomic_load_n(step_of(b, r), __ATOMIC_ACQUIRE) >= step) r++;
        if (r == b->size) return 1;
        if (!rest_patiently(looks, patience, &since)) return 0;
    }
}

/* Count steps from where the operation at hand begins. */
static inline void count_from_here(control_block_t *b) {
    if (b->step < b->sequence << STEP_BITS) b->step = b->sequence << STEP_BITS;
}

static inline void take_step(control_block_t *b) {
    count_from_here(b);
    __atomic_store_n(step_of(b, b->rank), ++b->step, __ATOMIC_RELEASE);
}

/* This rank's slice of `count` elements: the first, and how many; whole cache lines. */
static inline size_t own_share(const control_block_t *b, size_t count, size_t *first) {
    size_t unit = 64, size = (size_t)b->size, rank = (size_t)b->rank;
    size_t each = (count + size * unit - 1) / (size * unit) * unit;
    *first = rank * each < count ? rank * each : count;
    size_t end = *first + each < count ? *first + each : count;
    return end - *first;
}

/* ---- `agree.c` */

/* Publish that this rank's slot is written, and return whether the others' are. */
int publish(const control_block_t *b, long patience);

/* Publish a fingerprint and what belongs to it, and look whether all ranks agree, in time. Their
 * details are equal, but for the last bit of hashes of shapes, or numbers up to `other`. It is `now`
 * by the clock that all ranks of the node have, which never jumps (`flight_now`). */
int agree(control_block_t *b, uint64_t now, int64_t number, int64_t limit, int64_t detail,
          int64_t address, int64_t other, long spins);

PyObject *control_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *control_move(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *control_reduce_shared(PyObject *self, PyObject *const *args, Py_ssize_t n_args);

/* ---- `control.c` */

/* Begin what follows the agreement; returns who has called the operation off, or -1. */
int enter(const control_block_t *b);

/* The rank that has broken the operation at hand; -1: none. */
int broken_by(const control_block_t *b);

/* Whether an object is a ControlBlock. */
int is_control_block(PyObject *object);

int add_control(PyObject *module);

/* ---- `pipe.c` */

/* Begin what is described in the pipe. */
void pipe_begin(control_block_t *b);

/* Go on as far as the others allow; 1 when all is done. */
int pipe_go(control_block_t *b, long patience);

PyObject *control_begin(PyObject *self, PyObject *args);
PyObject *control_go_on(PyObject *self, PyObject *patience_);

#endif
