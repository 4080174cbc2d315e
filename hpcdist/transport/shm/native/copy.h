/* Copies of memory that other cores have written, or will read. */
#ifndef HPCDIST_COPY_H
#define HPCDIST_COPY_H
#include "../../../native/compiled.h"

/* Copy what another core wrote; past the caches if it is large. */
void copy(char *restrict to, const char *restrict from, size_t nbytes);

/* Copy what another core has written, or will read, where it is mostly little. */
static inline void copy_between(char *restrict to, const char *restrict from, size_t nbytes) {
    enum { FROM = 1 << 10 };
    if (nbytes < FROM)
        memcpy(to, from, nbytes);
    else
        copy(to, from, nbytes);
}

#if defined(__x86_64__)
#define FETCH_TO_WRITE(PLACE) __asm__ volatile("prefetchw %0" ::"m"(*(const char *)(PLACE)))
#else
#define FETCH_TO_WRITE(PLACE) __builtin_prefetch(PLACE, 1)
#endif

/* Copy to where another core has read: it gives up the cache lines of a few KiB at the same time, not
 * one after the other. More than that do not come sooner for being asked for. */
static inline void copy_for_others(char *to, const char *from, size_t nbytes) {
    enum { FROM = 4 * LINE, UP_TO = 16 << 10 };
    if (nbytes > FROM && nbytes <= UP_TO)
        for (size_t at = 0; at < nbytes; at += LINE) FETCH_TO_WRITE(to + at);
    copy_between(to, from, nbytes);
}

int add_copy(PyObject *module);

#endif
