/* Segments that the ranks of a node share, cut into blocks: what `arrays.c` makes arrays of. */
#ifndef HPCDIST_REGIONS_H
#define HPCDIST_REGIONS_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LINE = 256,         /* arrays of `empty` begin at multiples of this */
    GRANULE = 256 << 10 /* the least block of an ordinary array: one begins in each of these */
};

typedef struct {
    size_t begin, length;
} run_t;

/* A segment. Its runs are what lies between the blocks, in order, up to `backed`. */
typedef struct region {
    char *base;
    size_t capacity;
    size_t backed;      /* bytes that the system has promised */
    size_t touched;     /* beyond these, all are zeros */
    size_t used;        /* bytes in blocks */
    size_t blocks;      /* how many there are */
    size_t ordinary;    /* of them, for ordinary arrays, which begin with a page */
    run_t *runs, *made; /* free ones; and the ordinary block that begins in each granule */
    size_t n_runs, room;
    int descriptor; /* its maker's, until it is closed */
    int open;       /* whether it grows, and blocks are taken */
    int retired;    /* whether none are for now */
    int starved;    /* whether the system had no memory for an ordinary array */
    int held;       /* whether Python refers to it */
    int inherited;  /* whether it is the one of the process that this one was forked from */
    struct region *next;
} region_t;

extern pthread_mutex_t LOCK; /* all functions here are called while it is held */
extern region_t *REGIONS, *SERVING;
extern uintptr_t LOWEST, HIGHEST; /* where any block may lie */
extern size_t PAGE;

static inline size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* The number of runs that begin at or before a place. */
size_t runs_before(const region_t *g, size_t begin);

void remove_run(region_t *g, size_t at);

/* Add a free run, joined with its neighbours. Without memory for the table, it is lost. */
void give(region_t *g, size_t begin, size_t length);

/* Take the first free run that is large enough. `begin` is SIZE_MAX where there is none; returns
 * 0, or the system's error. */
int take(region_t *g, size_t length, size_t align, size_t *begin);

void put_back(region_t *g, size_t begin, size_t length);

/* Give the end of what is free back to the system where it is more than a quarter of all. */
void trim(region_t *g);

/* Look again where all segments lie. */
void bound(void);

/* Unmap a segment that nobody uses any more. */
void end_if_unused(region_t *g);

/* The segment in which a pointer lies, or NULL. */
region_t *region_of(const void *pointer);

/* Let no more blocks be taken. */
void close_region(region_t *g);

/* For `pthread_atfork`; they take the lock, and give it back. See [Note: fork]. */
void before_fork(void);
void after_fork_in_parent(void);
void after_fork_in_child(void);

#endif
