/* What the ways of large arrays share; `hot_large.c` says what they do. */
#ifndef HPCDIST_HOT_LARGE_H
#define HPCDIST_HOT_LARGE_H
#include "attach.h"
#include "copy.h"
#include "hot.h"

enum { POSTED = 0, IN_PIPE = 1, DONE = 2, BROKEN = 4 };
enum { PATIENCE = 4000, MOST_IN_LIST = 16 };
/* What is published in place of an address in the heap; as in shm/node.py. */
#define IN_STAGE NOT_IN_HEAP             /* this rank's staging memory has a copy */
#define LISTED_IN_HEAP (NOT_IN_HEAP + 1) /* the payload has the offsets */
#define ATTACHED_LIST (NOT_IN_HEAP + 3)  /* the payload has the addresses */
#define ATTACHED (-2LL)                  /* an address of ordinary memory: this less the address */
enum { NOTHING = -1 };                   /* this rank offers nothing */

typedef struct {
    size_t low, high; /* of how many bytes; nothing: 1, 0 */
} range_t;

/* Where a rank's contribution to this one begins. */
typedef struct {
    pid_t pid; /* 0: it is mapped here */
    char *at;  /* NULL: it is none of the usual */
} place_t;

struct large {
    PyObject *node;
    int64_t rights; /* see [Note: rights]; 0: nothing is attached */
    pid_t pids[MOST];
    char *heaps[MOST];  /* of every rank, where they are mapped here */
    size_t heap_bytes;  /* of this rank */
    char *stages[MOST]; /* of what is reduced in parts */
    size_t slice_bytes;
    char *copies[MOST]; /* the same of whole contributions, in the first of two turns */
    size_t copy_bytes;
    range_t direct[MOST_KINDS]; /* of arrays in the heap; the others are ordinary */
    range_t staged[MOST_KINDS];
    range_t attached[2][MOST_KINDS],
        piped[2][MOST_KINDS]; /* the second: of what is in short numbers */
};

static inline int is_within(size_t nbytes, range_t range) {
    return nbytes >= range.low && nbytes <= range.high;
}

/* The array that this rank offers, or the i-th of them; for a broadcast also what it takes. */
static inline const char *offered(const planned_t *p, int i) {
    return p->n_from ? p->from[i] : p->to[0];
}

static inline int n_offered(const planned_t *p) {
    return p->n_from ? p->n_from : p->kind == FACTS.BROADCAST;
}

/* ---- `hot_heap.c` */

/* Whether all that this rank offers is in its heap, and the table has the others read it there. */
int is_in_heap(const hot_t *h, const planned_t *p);

/* What this rank publishes about that. */
int64_t publish_in_heap(const hot_t *h, const planned_t *p);

/* Whether that of all ranks is. */
int is_all_in_heap(const hot_t *h);

place_t place_in_heap(const hot_t *h, const planned_t *p, int rank);

/* Reduce this rank's slice of all arrays, or its part, into those that get the result. */
void reduce_in_heap(const hot_t *h, const planned_t *p);

#endif
