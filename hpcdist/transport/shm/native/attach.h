/* The memory of other processes: one copy, which the kernel makes (cross-memory attach), and
 * reductions of what lies there. */
#ifndef HPCDIST_ATTACH_H
#define HPCDIST_ATTACH_H
#include "combine.h"
#include <sys/types.h>

/* Copy from another process, or to it; -1: `errno` says why not. */
int attach(pid_t pid, uintptr_t theirs, void *ours, size_t nbytes, int writes);

/* Whether others can reach the first and the last byte here. */
int can_attach(char *data, size_t nbytes);

/* See [Note: rights]. */
int64_t rights(void);

/* This rank's share of a reduction of what lies in several processes. */
typedef struct {
    const kernel_t *kernel;
    double divisor;
    int rank, size;
    pid_t pids[MOST];
    uintptr_t from[MOST]; /* where this rank's share begins in everyone's contribution */
    uintptr_t to[MOST];   /* and where its result goes; 0: this rank does not want it */
    size_t count;         /* elements of the share */
    char *room;           /* of this rank alone, for one block of each other rank */
    size_t room_bytes;
} share_t;

/* Reduce this rank's share; 0, or the error that has stopped it on its way. */
int reduce_share(const share_t *s);

int add_attach(PyObject *module);
int add_reduce_attached(PyObject *module);

#endif
