/* Segments and their runs, and what becomes of them when the process is forked.
 *
 * [Note: fork] A forked child maps the segment, too, and would see the parent's arrays change. Its
 * ordinary arrays are made its own, as a fork has it: the child copies them before the fork returns
 * on either side. From then on it allocates elsewhere, and what it inherited is never used again.
 */
#include "regions.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14; older ones refuse, and pages come as touched */
#endif

enum {
    PIECE = 16 << 20, /* bytes that are asked of the system at a time */
    MAPPED_AT_ONCE = 64 << 10
};

pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
region_t *REGIONS, *SERVING;
uintptr_t LOWEST = UINTPTR_MAX, HIGHEST;
size_t PAGE;
static int AT_FORK[2] = {-1, -1}; /* a pipe from the child */

/* ---- runs */

size_t runs_before(const region_t *g, size_t begin) {
    size_t low = 0, high = g->n_runs;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (g->runs[middle].begin <= begin)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void remove_run(region_t *g, size_t at) {
    g->n_runs--;
    memmove(g->runs + at, g->runs + at + 1, (g->n_runs - at) * sizeof *g->runs);
}

static int insert_run(region_t *g, size_t at, run_t run) {
    if (g->n_runs == g->room) {
        size_t room = g->room ? 2 * g->room : 64;
        run_t *runs = realloc(g->runs, room * sizeof *runs);
        if (!runs) return 0;
        g->runs = runs, g->room = room;
    }
    memmove(g->runs + at + 1, g->runs + at, (g->n_runs - at) * sizeof *g->runs);
    g->runs[at] = run;
    g->n_runs++;
    return 1;
}

void give(region_t *g, size_t begin, size_t length) {
    size_t at = runs_before(g, begin), end = begin + length;
    run_t *before = at > 0 ? &g->runs[at - 1] : NULL, *after = at < g->n_runs ? &g->runs[at] : NULL;
    int joins = before && before->begin + before->length == begin;
    if (after && after->begin == end) {
        if (joins) {
            before->length += length + after->length;
            remove_run(g, at);
        } else {
            after->begin = begin, after->length += length;
        }
    } else if (joins) {
        before->length += length;
    } else {
        insert_run(g, at, (run_t){begin, length});
    }
}

/* Have the system promise memory up to `end`, so that touching it cannot fail; 0 or an error. */
static int back(region_t *g, size_t end) {
    size_t first = g->backed;
    end = up(end, PAGE) < g->capacity ? up(end, PAGE) : g->capacity;
    while (g->backed < end) {
        size_t length = end - g->backed < PIECE ? end - g->backed : PIECE;
        int error = posix_fallocate(g->descriptor, (off_t)g->backed, (off_t)length);
        if (error == EINTR) continue;
        if (error) {
            if (g->backed > first) give(g, first, g->backed - first);
            return error;
        }
        if (length >= MAPPED_AT_ONCE) madvise(g->base + g->backed, length, MADV_POPULATE_WRITE);
        g->backed += length;
    }
    if (end > first) give(g, first, end - first);
    return 0;
}

static size_t fits_at(const run_t *run, size_t length, size_t align) {
    size_t begin = up(run->begin, align);
    return begin + length <= run->begin + run->length ? begin : SIZE_MAX;
}

int take(region_t *g, size_t length, size_t align, size_t *begin) {
    *begin = SIZE_MAX;
    if (!g->open || g->retired || length > g->capacity) return 0;
    size_t at = 0;
    while (at < g->n_runs && (*begin = fits_at(&g->runs[at], length, align)) == SIZE_MAX) at++;
    if (at == g->n_runs) {
        const run_t *last = g->n_runs ? &g->runs[g->n_runs - 1] : NULL;
        size_t tail = last && last->begin + last->length == g->backed ? last->begin : g->backed;
        if (up(tail, align) > g->capacity - length) return 0;
        int error = back(g, up(tail, align) + length);
        if (error) return error;
        at = g->n_runs - 1;
        if (g->n_runs == 0 || (*begin = fits_at(&g->runs[at], length, align)) == SIZE_MAX) return 0;
    }
    run_t run = g->runs[at];
    size_t end = *begin + length, behind = run.begin + run.length - end;
    if (*begin > run.begin) {
        g->runs[at].length = *begin - run.begin;
        if (behind && !insert_run(g, at + 1, (run_t){end, behind})) {
            g->runs[at] = run;
            *begin = SIZE_MAX;
            return 0;
        }
    } else if (behind) {
        g->runs[at] = (run_t){end, behind};
    } else {
        remove_run(g, at);
    }
    g->used += length;
    g->blocks++;
    if (end > g->touched) g->touched = end;
    return 0;
}

void put_back(region_t *g, size_t begin, size_t length) {
    g->used -= length;
    g->blocks--;
    if (g->open) give(g, begin, length);
}

void trim(region_t *g) {
    size_t keep = up(g->capacity / 4, PAGE);
    run_t *last = g->n_runs ? &g->runs[g->n_runs - 1] : NULL;
    if (!g->open || !last || last->begin + last->length != g->backed || last->length <= keep)
        return;
    size_t end = up(last->begin, PAGE) + keep;
    if (end >= g->backed) return;
    int flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (fallocate(g->descriptor, flags, (off_t)end, (off_t)(g->backed - end)) != 0) return;
    last->length = end - last->begin;
    g->backed = end;
    if (g->touched > end) g->touched = end;
    g->starved = 0;
}

/* ---- segments */

void bound(void) {
    LOWEST = UINTPTR_MAX, HIGHEST = 0;
    for (const region_t *g = REGIONS; g; g = g->next) {
        uintptr_t low = (uintptr_t)g->base, high = low + g->capacity;
        if (low < LOWEST) LOWEST = low;
        if (high > HIGHEST) HIGHEST = high;
    }
}

void end_if_unused(region_t *g) {
    if (g->held || g->blocks) return;
    region_t **place = &REGIONS;
    while (*place != g) place = &(*place)->next;
    *place = g->next;
    bound();
    munmap(g->base, g->capacity);
    free(g->runs), free(g->made), free(g);
}

region_t *region_of(const void *pointer) {
    for (region_t *g = REGIONS; g; g = g->next)
        if ((const char *)pointer >= g->base && (const char *)pointer < g->base + g->capacity)
            return g;
    return NULL;
}

void close_region(region_t *g) {
    if (SERVING == g) SERVING = NULL;
    g->open = 0;
}

/* ---- forking; see [Note: fork] */

void before_fork(void) {
    pthread_mutex_lock(&LOCK);
    size_t copied = 0;
    for (const region_t *g = REGIONS; g; g = g->next) copied += g->inherited ? 0 : g->ordinary;
    AT_FORK[0] = AT_FORK[1] = -1;
    if (copied && pipe2(AT_FORK, O_CLOEXEC) != 0) AT_FORK[0] = AT_FORK[1] = -1;
}

void after_fork_in_parent(void) {
    char byte;
    if (AT_FORK[0] >= 0) {
        close(AT_FORK[1]);
        while (read(AT_FORK[0], &byte, 1) < 0 && errno == EINTR) continue;
        close(AT_FORK[0]);
    }
    pthread_mutex_unlock(&LOCK);
}

/* Put memory of this process's own, with the same contents, where a shared block lies. */
static void make_own(char *block, size_t length) {
    int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *copy = mmap(NULL, length, protection, flags, -1, 0);
    if (copy == MAP_FAILED) return;
    memcpy(copy, block, length);
    if (mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, block) == MAP_FAILED)
        munmap(copy, length);
}

void after_fork_in_child(void) {
    for (region_t *g = REGIONS; g; g = g->next) {
        size_t granules = g->capacity / GRANULE + 1;
        for (size_t i = 0; !g->inherited && g->ordinary && i < granules; i++)
            if (g->made[i].length) make_own(g->base + g->made[i].begin, g->made[i].length);
        close_region(g);
        g->inherited = 1;
    }
    if (AT_FORK[0] >= 0) {
        ssize_t told = write(AT_FORK[1], "", 1);
        (void)told;
        close(AT_FORK[0]), close(AT_FORK[1]);
    }
    pthread_mutex_unlock(&LOCK);
}
