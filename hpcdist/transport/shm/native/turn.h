/* The turn of a group: the right of one of its operations to run, and which thread is inside one.
 * `waiting/turn.py` has the same in Python, and says what it is for. No signal handler runs between
 * two instructions of C, so none comes between the lock and the mark.
 */
#ifndef HPCDIST_TURN_H
#define HPCDIST_TURN_H
#include "../../../native/compiled.h"

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    int is_taken;         /* changed under the interpreter lock, as the next one */
    unsigned long inside; /* the thread in the middle of an operation; 0: none */
} turn_t;

int is_turn(PyObject *object);
/* Whether this thread is inside. */
int is_inside(const turn_t *turn);
/* Take it for this thread, which is inside then, if it is free. */
int take_turn(turn_t *turn);
void give_turn_back(turn_t *turn);

int add_turn(PyObject *module);

#endif
