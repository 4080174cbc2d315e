/* Copies of memory that other cores have written, or will read. */
#ifndef HPCDIST_COPY_H
#define HPCDIST_COPY_H
#include "../../../native/compiled.h"

/* Copy what another core wrote; past the caches if it is large. */
void copy(char *restrict to, const char *restrict from, size_t nbytes);

int add_copy(PyObject *module);

#endif
