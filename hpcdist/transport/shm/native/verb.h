/* `Verb`: a public function that is tried in one compiled call first. */
#ifndef HPCDIST_VERB_H
#define HPCDIST_VERB_H
#include "../../../native/compiled.h"

int add_verb(PyObject *module);

#endif
