/* `GroupState`: what every call of the hot path looks at in a group, where C finds it at once. The
 * class `Group` inherits from it; without the kernel these are ordinary attributes.
 */
#ifndef HPCDIST_GROUP_H
#define HPCDIST_GROUP_H
#include "../../../native/compiled.h"

typedef struct {
    PyObject_HEAD
    PyObject *transport; /* None or NULL: this process is no member */
    long long issued;    /* operations, by this rank */
    unsigned flight;     /* where the flight recorder has the group; 0: nowhere */
} group_t;

int is_group_type(PyTypeObject *type);

int add_group(PyObject *module);

#endif
