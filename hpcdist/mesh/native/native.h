/* What the files of this extension have for each other. */
#ifndef HPCDIST_MESH_NATIVE_H
#define HPCDIST_MESH_NATIVE_H
#include "../../native/compiled.h"
#include <math.h>

int add_merges(PyObject *module);
int add_sums(PyObject *module);

#endif
