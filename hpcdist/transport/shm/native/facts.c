/* The numbers that Python and C must mean alike; see `facts.h`. */
#include "facts.h"
#include "hot_large.h"

facts_t FACTS;

static const struct {
    const char *name;
    int *place;
} PLACES[] = {
#define FACT(NAME) {#NAME, &FACTS.NAME},
    FACTS_OF_PYTHON(FACT)
#undef FACT
};

/* learn_facts(numbers by name): ImportError where one that is needed is missing or out of range. */
static PyObject *learn_facts(PyObject *self, PyObject *given) {
    (void)self;
    if (!PyDict_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "learn_facts: a dict of numbers by their names");
        return NULL;
    }
    facts_t before = FACTS;
    for (size_t i = 0; i < sizeof PLACES / sizeof *PLACES; i++) {
        PyObject *number = PyDict_GetItemString(given, PLACES[i].name);
        long value = number ? PyLong_AsLong(number) : -1;
        if (PyErr_Occurred()) PyErr_Clear(), value = -1;
        if (value < 0 || value >= MOST_KINDS) {
            FACTS = before;
            return PyErr_Format(
                PyExc_ImportError,
                "the compiled part of hpcdist needs the number of %s, from 0 to %d, "
                "and Python has %R: compile hpcdist again",
                PLACES[i].name, MOST_KINDS - 1, number ? number : Py_None);
        }
        *PLACES[i].place = (int)value;
    }
    Py_RETURN_NONE;
}

static const number_t NUMBERS[] = {
    {"LINE", LINE},
    {"MOST", MOST},
    {"AGREED", NUMBERS_AGREED},
    {"STEP_BITS", STEP_BITS},
    {"OF_A_DEATH", OF_A_DEATH},
    {"MOST_EAGER", MOST_EAGER},
    {"EAGER_BYTES", EAGER_BYTES},
    {"IN_STAGE", NOT_IN_HEAP},
    {"IN_LIST", LISTED_IN_HEAP},
    {"ATTACHED_LIST", ATTACHED_LIST},
    {"ATTACHED", ATTACHED},
    {"NOTHING", NOTHING},
    {"IN_PIPE", IN_PIPE},
    {"DONE", DONE},
    {"BROKEN", BROKEN},
};

static PyMethodDef FUNCTIONS[] = {
    {"learn_facts", learn_facts, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_facts(PyObject *module) {
    if (PyModule_AddFunctions(module, FUNCTIONS) < 0) return -1;
    return add_numbers(module, NUMBERS, sizeof NUMBERS / sizeof *NUMBERS);
}
