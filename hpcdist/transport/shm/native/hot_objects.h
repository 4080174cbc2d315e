/* Pickles, as collectives and messages of objects send them. */
#ifndef HPCDIST_HOT_OBJECTS_H
#define HPCDIST_HOT_OBJECTS_H
#include "hot.h"

enum { META = 8 }; /* bytes before a pickle */

/* What a rank does in one operation. */
typedef struct {
    int gives, takes, root, n; /* how many pickles it gives */
    PyObject *pickles[MOST], *beside[MOST];
    Py_ssize_t longest;
    int fits;
} packed_t;

/* The length of a list of one kind only: what `target[:] = ...` means is known. */
Py_ssize_t length_of(PyObject *given, int or_tuple);

/* Pickle an object; 0: an error is set. */
int pack(packed_t *p, PyObject *object);

/* What follows when `pack` has failed: None leaves the operation to Python, which can, or fails, too,
 * and tells all; NULL is for what does not come twice. A message has no `group`. */
PyObject *not_packed(PyObject *group, int kind);

/* Drop what has been pickled. */
void unpacked(packed_t *p);

/* Write a pickle, `at` bytes into a payload; where it ends. */
int64_t put(char *payload, int64_t at, PyObject *pickle);

/* Leave an operation to Python, which need not pickle again. */
PyObject *leave(PyObject *group, PyObject *describe, PyObject *given, const packed_t *p);

#endif
