/* Eager operations: ranks that only give in a small operation give their data and go on.
 *
 * [Note: eager operations] Between two agreements of a group there are places for `MOST_EAGER` of
 * them. The root of a broadcast or scatter writes its call and its data to its place and goes on; the
 * others look for that alone, compare the call with theirs, and take. Nobody waits for who only
 * receives, as in MPI.
 *
 * That all ranks have meant the same is part of their next agreement, in any operation that waits
 * for all, which is the next one but MOST_EAGER at the latest: each rank mixes into its number what
 * its eager operations were (`seal`). A rank that finds another call than its own does not take the
 * data: it goes to that agreement, which fails on all ranks, and names what all of them have called
 * (`_disagree` in `mpi/agreement.py`).
 *
 * How an operation goes is one word, which whoever comes first decides: the root that gives, or a
 * rank that has waited long enough: then all agree on it, as on any other, with all that belongs to
 * waiting. So nobody ever waits for an eager root outside of the hot path, and a root that goes
 * other ways agrees, too. A word holds the number of the operation: what is older is undecided.
 *
 * In a reduction all but the root give. Whoever comes first decides here, too: a rank that gives in
 * the hot path, or one that wants all to agree. But then what is decided holds: who has given is gone.
 * So every rank follows, by whichever path it comes: it gives to its place, with its call and the
 * word that was decided (`given_in`), and goes on; and the root waits for all places:
 *
 * - A rank is late: the root waits for it, in the hot path without having begun the operation, and
 *   then in Python (`_await_given` in `mpi/agreement.py`), where it has given its part, too, and
 *   counted the operation, in one step. From then on the root may leave it in any way: by an error
 *   that names who is missing, because one has died or left, or by an interrupt. It leaves a place
 *   that is not read, and the ranks stay in step.
 * - A rank has given for another call, such as one with another root, which waits itself; or has
 *   begun an agreement without having given, as it means something else, or has refused its call:
 *   the root goes to that agreement, with the operation not counted. It fails, as not all have
 *   counted the same.
 * - A rank dies, or leaves, after it has given: the root takes that.
 * - The root is late, or means something else: the others wait in their next agreement.
 * - The root has given up, and another rank comes later: it gives, and goes on. Nobody waits for it.
 * - Two roots wait for one another's places: each has given for another call.
 *
 * A place is written again after an agreement, in which each rank is when it has taken all.
 *
 * After an agreement that failed the next operation is agreed on: a rank that has given up takes
 * back as many operations as it has left out, each of which has to have an agreement.
 *
 * So it is where ranks share cores. Where each has its own, waiting costs less than this does, and
 * an error in the call that is wrong is worth more.
 */
#ifndef HPCDIST_EAGER_H
#define HPCDIST_EAGER_H
#include "control.h"

enum { MOST_EAGER = 16, EAGER_BYTES = 512 };
enum { EAGER_WORD = 4 }; /* in a rank's line of steps: which operations it has taken */

/* What a root writes before its data. */
typedef struct {
    int64_t number, detail;
    uint64_t given_in; /* in a reduction: the word of the operation for which this is here */
} eager_t;

/* The number of an agreement, and of all that was done since the last one. */
static inline int64_t seal(control_block_t *b, int64_t number) {
    number ^= b->chain;
    b->n_sealed = b->n_eager, b->n_eager = 0, b->chain = 0, b->hesitates = 0;
    return number;
}

/* Whether an operation of so many bytes may be eager, as far as this rank knows. */
static inline int may_be_eager(const control_block_t *b, size_t nbytes) {
    return b->n_eager < b->most_eager && nbytes <= EAGER_BYTES;
}

/* Where this rank gives its data for the operation at hand. */
char *eager_place(const control_block_t *b);

/* Let the others take what has been written there; 0: they agree on it. */
int give_eagerly(control_block_t *b, int64_t number, int64_t detail);

/* What `root` has given for this operation, as soon as it has; NULL: all agree on it, because the
 * root does, has given something else, or does not come for so many looks. */
const char *find_given(const control_block_t *b, int64_t number, int64_t detail, int root,
                       long patience);

/* Whether all ranks give to one in the operation at hand. Decides so, if this rank `may` and nobody
 * has; else all agree on it. */
int all_give(const control_block_t *b, int may);

/* Give to the root what has been written to `eager_place`. */
void give_to_root(const control_block_t *b, int64_t number, int64_t detail);

enum { NOT_YET, ALL_GIVEN, ELSEWHERE };

/* Whether all others have given what this rank means, in the operation `at` since the last
 * agreement; ELSEWHERE: one never will. */
int is_given(const control_block_t *b, int at, int64_t number, int64_t detail);

/* Whether ranks give to this one, of which some have not after so many looks. 0: all have, or all
 * agree on the operation. */
int awaits_others(const control_block_t *b, int64_t number, int64_t detail, long patience);

/* What a rank has given in the operation `at` since the last agreement. */
const char *given_by(const control_block_t *b, int at, int rank);

/* Count an operation whose data have been taken. */
void count_eager(control_block_t *b, int64_t number, int64_t detail);

/* Take back the last one, before which `chain` was. */
void uncount_eager(control_block_t *b, int64_t chain);

/* Whether a rank has not given in the operation `at` since the last agreement. */
int is_missing(const control_block_t *b, int at, int rank);

/* awaits_eager() -> whether a rank has neither come as far as this one, nor begun an agreement
 * agrees_elsewhere() -> whether one has begun an agreement before it has come so far: it means
 * something else */
PyObject *control_awaits_eager(PyObject *self, PyObject *ignored);
PyObject *control_agrees_elsewhere(PyObject *self, PyObject *ignored);

#endif
