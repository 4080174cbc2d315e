/* A public function that is tried in one compiled call first, without a frame of Python; what the
 * compiled one leaves to Python is done by the function itself. It looks like the function: see
 * `in_one_call` in `comm/hot.py`.
 */
#include "verb.h"
#include <structmember.h>

enum { MOST_PARAMETERS = 8 };

typedef PyObject *(*compiled_t)(PyObject *, PyObject *const *, Py_ssize_t);
typedef PyObject *(*vectorcall_t)(PyObject *, PyObject *const *, size_t, PyObject *);

/* The protocol of PEP 590, as it is since Python 3.9; its names are in the limited API since 3.12. */
#define HAS_VECTORCALL (1ul << 11)
#define COUNT_OF(N_ARGS_AND_FLAG) \
    ((Py_ssize_t)((N_ARGS_AND_FLAG) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))

typedef struct {
    PyObject_HEAD
    vectorcall_t call;
    PyObject *function, *names, *defaults; /* a default for each name; Ellipsis: none */
    PyObject *dict, *weak;
    compiled_t compiled; /* of the module, which lives as long */
    Py_ssize_t n, n_positional;
    Py_ssize_t places[MOST_PARAMETERS]; /* of each parameter, among those of the compiled call */
} verb_object_t;

static Py_ssize_t parameter(const verb_object_t *v, PyObject *name) {
    for (Py_ssize_t i = 0; i < v->n; i++)
        if (PyTuple_GetItem(v->names, i) == name) return i;
    for (Py_ssize_t i = 0; i < v->n; i++)
        if (PyUnicode_Compare(PyTuple_GetItem(v->names, i), name) == 0) return i;
    return -1;
}

/* Write down what the compiled call gets; 0: the arguments are wrong, as the function will say. */
static int bind(const verb_object_t *v, PyObject *const *args, Py_ssize_t n_args, PyObject *names,
                PyObject **bound) {
    Py_ssize_t n_named = names ? PyTuple_Size(names) : 0;
    if (n_args > v->n_positional) return 0;
    for (Py_ssize_t i = 0; i < v->n; i++) bound[i] = NULL;
    for (Py_ssize_t i = 0; i < n_args; i++) bound[v->places[i]] = args[i];
    for (Py_ssize_t k = 0; k < n_named; k++) {
        Py_ssize_t i = parameter(v, PyTuple_GetItem(names, k));
        if (i < 0 || bound[v->places[i]]) return 0;
        bound[v->places[i]] = args[n_args + k];
    }
    for (Py_ssize_t i = 0; i < v->n; i++) {
        if (bound[v->places[i]]) continue;
        PyObject *value = PyTuple_GetItem(v->defaults, i);
        if (value == Py_Ellipsis) return 0;
        bound[v->places[i]] = value;
    }
    return 1;
}

static PyObject *call_function(const verb_object_t *v, PyObject *const *args, Py_ssize_t n_args,
                               PyObject *names) {
    PyObject *given = PyTuple_New(n_args), *named = names ? PyDict_New() : NULL, *result = NULL;
    int failed = !given || (names && !named);
    for (Py_ssize_t i = 0; !failed && i < n_args; i++)
        PyTuple_SetItem(given, i, Py_NewRef(args[i]));
    for (Py_ssize_t k = 0; !failed && names && k < PyTuple_Size(names); k++)
        failed = PyDict_SetItem(named, PyTuple_GetItem(names, k), args[n_args + k]) < 0;
    if (!failed) result = PyObject_Call(v->function, given, named);
    Py_XDECREF(given), Py_XDECREF(named);
    return result;
}

static PyObject *verb_vectorcall(PyObject *self, PyObject *const *args, size_t count,
                                 PyObject *names) {
    const verb_object_t *v = (verb_object_t *)self;
    Py_ssize_t n_args = COUNT_OF(count);
    PyObject *bound[MOST_PARAMETERS];
    if (bind(v, args, n_args, names, bound)) {
        PyObject *result = v->compiled(NULL, bound, v->n);
        if (result != Py_None) return result;
        Py_DECREF(result);
    }
    return call_function(v, args, n_args, names);
}

static PyObject *verb_call(PyObject *self, PyObject *args, PyObject *named) {
    return PyObject_Call(((verb_object_t *)self)->function, args, named);
}

/* Verb(function, compiled, names, defaults, places, how many are positional) */
static PyObject *verb_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *function, *hot, *names, *defaults, *places;
    Py_ssize_t n_positional;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOO!O!O!n", &function, &hot, &PyTuple_Type, &names, &PyTuple_Type,
                          &defaults, &PyTuple_Type, &places, &n_positional))
        return NULL;
    verb_object_t *v = (verb_object_t *)PyType_GenericNew(type, NULL, NULL);
    if (!v) return NULL;
    Py_ssize_t n = PyTuple_Size(names), taken = 0;
    int right = PyCFunction_Check(hot) && PyCFunction_GetFlags(hot) == METH_FASTCALL &&
                n <= MOST_PARAMETERS && PyTuple_Size(defaults) == n && PyTuple_Size(places) == n &&
                n_positional <= n;
    for (Py_ssize_t i = 0; right && i < n; i++) {
        v->places[i] = PyLong_AsSsize_t(PyTuple_GetItem(places, i));
        right = v->places[i] >= 0 && v->places[i] < n;
        if (right) taken |= (Py_ssize_t)1 << v->places[i];
    }
    if (!right || taken != ((Py_ssize_t)1 << n) - 1) {
        Py_DECREF(v);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Verb: these do not fit together");
        return NULL;
    }
    v->n = n, v->n_positional = n_positional;
    v->function = Py_NewRef(function), v->names = Py_NewRef(names);
    v->defaults = Py_NewRef(defaults);
    v->compiled = (compiled_t)(void (*)(void))PyCFunction_GetFunction(hot);
    v->call = verb_vectorcall;
    return (PyObject *)v;
}

static int verb_traverse(PyObject *self, visitproc visit, void *arg) {
    verb_object_t *v = (verb_object_t *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(v->function);
    Py_VISIT(v->dict);
    return 0;
}

static int verb_clear(PyObject *self) {
    verb_object_t *v = (verb_object_t *)self;
    Py_CLEAR(v->dict);
    return 0;
}

static void verb_dealloc(PyObject *self) {
    verb_object_t *v = (verb_object_t *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (v->weak) PyObject_ClearWeakRefs(self);
    verb_clear(self);
    Py_XDECREF(v->function), Py_XDECREF(v->names), Py_XDECREF(v->defaults);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *verb_repr(PyObject *self) {
    return PyObject_Repr(((verb_object_t *)self)->function);
}

/* In a class it is a method, as the function would be. */
static PyObject *verb_get(PyObject *self, PyObject *object, PyObject *type) {
    if (!object || object == Py_None) return Py_NewRef(self);
    return PyObject_CallMethod(((verb_object_t *)self)->function, "__get__", "OO", object,
                               type ? type : Py_None);
}

/* It is copied and pickled by its name. */
static PyObject *verb_reduce(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyObject_GetAttrString(self, "__qualname__");
}

static PyMemberDef MEMBERS[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(verb_object_t, call), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(verb_object_t, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(verb_object_t, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef METHODS[] = {
    {"__reduce__", verb_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef GETTERS[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot SLOTS[] = {
    {Py_tp_new, verb_new},
    {Py_tp_call, verb_call},
    {Py_tp_members, MEMBERS},
    {Py_tp_methods, METHODS},
    {Py_tp_getset, GETTERS},
    {Py_tp_descr_get, verb_get},
    {Py_tp_repr, verb_repr},
    {Py_tp_traverse, verb_traverse},
    {Py_tp_clear, verb_clear},
    {Py_tp_dealloc, verb_dealloc},
    {0, NULL},
};
static PyType_Spec SPEC = {"hpcdist.transport._kernel.Verb", sizeof(verb_object_t), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | HAS_VECTORCALL, SLOTS};

int add_verb(PyObject *module) {
    PyObject *type = PyType_FromSpec(&SPEC);
    return type ? PyModule_AddObject(module, "Verb", type) : -1;
}
