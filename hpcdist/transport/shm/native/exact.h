/* Exact sums of a few numbers each, rounded once; `call/exact.py` says how, and has the same. */
#ifndef HPCDIST_EXACT_H
#define HPCDIST_EXACT_H
#include "combine.h"

/* Add the elements of all sources from `at` to `end`, by a kernel that has no `fold`. */
void add_exactly(const job_t *job, size_t at, size_t end);

#endif
