/* `hpcdist.transport._kernel`: the compiled part of the shared-memory transport, all of it optional.
 * `kernel.py`, `shm/control.py` and `shm/mail.py` say what each function does.
 *
 *   elements, combine   what is reduced, and how
 *   copy, attach        memory that is copied, here and between processes
 *   control, agree, pipe   the flags of a group of ranks, and what goes by them
 *   turn                which operation of a group runs
 *   group               what a group has that every call looks at
 *   hot*, mail*, verb   an operation or a message in one call
 */
#include "attach.h"
#include "copy.h"
#include "facts.h"
#include "group.h"
#include "mail.h"
#include "turn.h"
#include "verb.h"

static int (*const PARTS[])(PyObject *module) = {
    add_facts,           add_buffers, add_combine,  add_copy,         add_attach,
    add_reduce_attached, add_control, add_hot_look, add_hot,          add_hot_objects,
    add_plan_slots,      add_mail,    add_mail_hot, add_mail_objects, add_turn,
    add_group,           add_verb,
};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) {
    PyObject *module = PyModule_Create(&MODULE);
    for (size_t i = 0; module && i < sizeof PARTS / sizeof *PARTS; i++)
        if (PARTS[i](module) < 0) return NULL;
    return module;
}
