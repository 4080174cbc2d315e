/* Memory that Python gives by address. */
#ifndef HPCDIST_BUFFERS_H
#define HPCDIST_BUFFERS_H
#include "../../../native/compiled.h"

enum { MOST = 256 }; /* ranks of one node; more of them reduce in Python */

/* Read an address, or where the memory of an object begins; -1: an error is set. */
int as_address(PyObject *object, uintptr_t *address);

/* Read a tuple of 1 to MOST addresses; how many there are, or -1: an error is set. */
int read_addresses(PyObject *tuple, uintptr_t *into);

int add_buffers(PyObject *module);

#endif
