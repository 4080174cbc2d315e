/* Numbers that Python and C must mean alike.
 *
 * Those in FACTS are Python's: the kinds of operations, the operator AVG, the tags of messages. The
 * hot path gets them by name before it is used (`learn_facts`), so a kind may get another number.
 * Those that are compiled in, such as the layout of a control block, are in NUMBERS of the module:
 * `expect` in `compiled.py` compares them.
 */
#ifndef HPCDIST_FACTS_H
#define HPCDIST_FACTS_H
#include "../../../native/compiled.h"

/* clang-format off */
#define FACTS_OF_PYTHON(X)                                                             \
    X(BARRIER) X(ALL_REDUCE) X(REDUCE) X(REDUCE_SCATTER) X(BROADCAST) X(ALL_GATHER)    \
    X(GATHER) X(SCATTER) X(ALLTOALL) X(BROADCAST_OBJECT_LIST) X(ALL_GATHER_OBJECT)     \
    X(GATHER_OBJECT) X(SCATTER_OBJECT_LIST) X(ALL_TO_ALL_OBJECT) X(SEND) X(RECV)       \
    X(SEND_OBJECT_LIST) X(RECV_OBJECT_LIST) X(AVG) X(CODE_BITS) X(OBJECT_MESSAGE)
/* clang-format on */

#define FACT(NAME) int NAME;
typedef struct {
    FACTS_OF_PYTHON(FACT)
} facts_t;
#undef FACT

extern facts_t FACTS;

enum { MOST_KINDS = 64 }; /* a kind is a number below this */

int add_facts(PyObject *module);

#endif
