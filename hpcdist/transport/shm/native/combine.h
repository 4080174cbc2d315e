/* Reducing memory of several ranks that one process sees: in blocks that stay in the cache, in the
 * order of the ranks; the result goes wherever it is wanted. */
#ifndef HPCDIST_COMBINE_H
#define HPCDIST_COMBINE_H
#include "buffers.h"
#include "elements.h"

typedef struct {
    const kernel_t *kernel;
    int n_sources, n_outs;
    uintptr_t sources[MOST], outs[MOST];
    size_t count;
    double divisor;
} job_t;

void combine(const job_t *job);

/* The loop of a number; NULL: an error is set. */
const kernel_t *kernel_of(PyObject *code_);

int add_combine(PyObject *module);

#endif
