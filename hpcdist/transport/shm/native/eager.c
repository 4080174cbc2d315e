/* Operations whose root does not wait; see `eager.h`. */
#include "eager.h"

/* In place of the rank that has given, more by one. */
enum { RANK_BITS = 16, TOGETHER = 0, ALL_GIVE = (1 << RANK_BITS) - 1 };

static uint64_t *decision(const control_block_t *b) {
    return (uint64_t *)(b->decisions + (size_t)b->n_eager * LINE);
}

/* The number of an operation since the last agreement, as it stands in the word that decides on it. */
static uint64_t word_of(const control_block_t *b, int at) {
    return (b->sequence * MOST_EAGER + (uint64_t)at + 1) << RANK_BITS;
}

/* That of the operation at hand. */
static uint64_t undecided(const control_block_t *b) { return word_of(b, b->n_eager); }

static eager_t *place_in(const control_block_t *b, int at, int rank) {
    size_t place = (size_t)at * (size_t)b->size + (size_t)rank;
    return (eager_t *)(b->given_places + place * (LINE + EAGER_BYTES));
}

static eager_t *place_of(const control_block_t *b, int rank) {
    return place_in(b, b->n_eager, rank);
}

char *eager_place(const control_block_t *b) { return (char *)place_of(b, b->rank) + LINE; }

/* Decide on the operation at hand, if nobody has; returns what is decided. */
static uint64_t decide(const control_block_t *b, uint64_t on) {
    uint64_t wanted = undecided(b) + on;
    uint64_t found = __atomic_load_n(decision(b), __ATOMIC_ACQUIRE);
    while (found < undecided(b))
        if (__atomic_compare_exchange_n(decision(b), &found, wanted, 0, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
            found = wanted;
    return found - undecided(b);
}

/* Let the others know how many operations this rank has taken. */
static void tell_taken(const control_block_t *b) {
    uint64_t taken = b->sequence * (MOST_EAGER + 1) + (uint64_t)b->n_eager;
    __atomic_store_n(step_of(b, b->rank) + EAGER_WORD, taken, __ATOMIC_RELEASE);
}

void count_eager(control_block_t *b, int64_t number, int64_t detail) {
    const uint64_t mixer = 0x9e3779b97f4a7c15ull, positive = (1ull << 62) - 1;
    uint64_t mixed = ((uint64_t)b->chain ^ (uint64_t)number) * mixer + (uint64_t)(detail | 1);
    b->chain = (int64_t)((mixed ^ mixed >> 31) & positive);
    b->n_eager++;
    tell_taken(b);
}

void uncount_eager(control_block_t *b, int64_t chain) {
    b->chain = chain;
    b->n_eager--;
    tell_taken(b);
}

int give_eagerly(control_block_t *b, int64_t number, int64_t detail) {
    eager_t *own = place_of(b, b->rank);
    own->number = number, own->detail = detail;
    return decide(b, (uint64_t)b->rank + 1) == (uint64_t)b->rank + 1;
}

/* Whether a rank has begun the next agreement. */
static int agrees(const control_block_t *b, int rank) {
    uint64_t next = b->sequence + 1;
    return __atomic_load_n(&slot_in(b, next, rank)->sequence, __ATOMIC_ACQUIRE) == next;
}

const char *find_given(const control_block_t *b, int64_t number, int64_t detail, int root,
                       long patience) {
    uint64_t since = 0;
    for (long looks = 0; __atomic_load_n(decision(b), __ATOMIC_ACQUIRE) < undecided(b); looks++)
        if (agrees(b, root) || !rest_patiently(looks, patience, &since)) break;
    const eager_t *given = place_of(b, root);
    int is_there = decide(b, TOGETHER) == (uint64_t)root + 1;
    int is_meant = is_there && given->number == number && (given->detail | 1) == (detail | 1);
    return is_meant ? (const char *)given + LINE : NULL;
}

/* ---- reductions */

int all_give(const control_block_t *b, int may) {
    return decide(b, may ? ALL_GIVE : TOGETHER) == ALL_GIVE;
}

void give_to_root(const control_block_t *b, int64_t number, int64_t detail) {
    eager_t *own = place_of(b, b->rank);
    own->number = number, own->detail = detail;
    __atomic_store_n(&own->given_in, undecided(b), __ATOMIC_RELEASE);
}

const char *given_by(const control_block_t *b, int at, int rank) {
    return (const char *)place_in(b, at, rank) + LINE;
}

int is_missing(const control_block_t *b, int at, int rank) {
    return __atomic_load_n(&place_in(b, at, rank)->given_in, __ATOMIC_ACQUIRE) != word_of(b, at);
}

int is_given(const control_block_t *b, int at, int64_t number, int64_t detail) {
    int found = ALL_GIVEN;
    for (int r = 0; r < b->size; r++) {
        if (r == b->rank) continue;
        int has_gone_on = agrees(b, r); /* looked at first: it has given before, if at all */
        const eager_t *theirs = place_in(b, at, r);
        if (is_missing(b, at, r)) {
            if (has_gone_on) return ELSEWHERE;
            found = NOT_YET;
        } else if (theirs->number != number || theirs->detail != detail) {
            return ELSEWHERE;
        }
    }
    return found;
}

static int somebody_agrees(const control_block_t *b) {
    for (int r = 0; r < b->size; r++)
        if (agrees(b, r)) return 1;
    return 0;
}

int awaits_others(const control_block_t *b, int64_t number, int64_t detail, long patience) {
    uint64_t since = 0;
    for (long looks = 0; rest_patiently(looks, patience, &since); looks++) {
        int is_open = __atomic_load_n(decision(b), __ATOMIC_ACQUIRE) < undecided(b);
        if (is_open ? somebody_agrees(b) : !all_give(b, 0)) break;
        if (!is_open && is_given(b, b->n_eager, number, detail) != NOT_YET) return 0;
    }
    return all_give(b, 0) && is_given(b, b->n_eager, number, detail) == NOT_YET;
}

/* Whether a rank has not come as far as this one. */
static int is_behind(const control_block_t *b, int rank) {
    uint64_t taken = __atomic_load_n(step_of(b, rank) + EAGER_WORD, __ATOMIC_ACQUIRE);
    return taken < b->sequence * (MOST_EAGER + 1) + (uint64_t)b->n_eager;
}

PyObject *control_awaits_eager(PyObject *self, PyObject *ignored) {
    (void)ignored;
    const control_block_t *b = (control_block_t *)self;
    for (int r = 0; b->n_eager && r < b->size; r++)
        if (is_behind(b, r) && !agrees(b, r)) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

PyObject *control_agrees_elsewhere(PyObject *self, PyObject *ignored) {
    (void)ignored;
    const control_block_t *b = (control_block_t *)self;
    for (int r = 0; b->n_eager && r < b->size; r++)
        if (is_behind(b, r) && agrees(b, r)) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}
