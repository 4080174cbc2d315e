/* Looking at the arguments of verbs, and the dtypes that are known. */
#include "hot.h"

static dtype_t DTYPE_TABLE[DTYPES];
const dtype_t *DL_DTYPES[8][17];
static foreign_t FOREIGN_TABLE[FOREIGN];

static inline size_t dtype_place(const PyObject *descr) {
    return (size_t)(((uintptr_t)descr >> 4) * 0x9e3779b97f4a7c15ull >> 58);
}

static const dtype_t *dtype_of(const array_t *a) {
    size_t at = dtype_place(a->descr);
    for (int looks = 0; looks < DTYPES && DTYPE_TABLE[at].descr; looks++, at = (at + 1) % DTYPES)
        if (DTYPE_TABLE[at].descr == a->descr) return &DTYPE_TABLE[at];
    return NULL;
}

/* What is known of a type, from the table or from `meet`; NULL: Python's business. */
static const foreign_t *foreign(PyTypeObject *type) {
    foreign_t *place = FOREIGN_TABLE;
    while (place < FOREIGN_TABLE + FOREIGN && place->type && place->type != type) place++;
    if (place == FOREIGN_TABLE + FOREIGN) return NULL;
    if (place->type) return place->exchange ? place : NULL;
    PyObject *met = PyObject_CallFunctionObjArgs(HOT.meet, type, NULL), *capsule, *odd;
    if (!met) return PyErr_Clear(), NULL;
    if (PyTuple_Check(met) && PyArg_ParseTuple(met, "OO", &capsule, &odd)) {
        const dl_exchange_t *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        if (found && found->major == 1) place->exchange = found, place->odd = Py_NewRef(odd);
    }
    PyErr_Clear();
    Py_DECREF(met);
    Py_INCREF((PyObject *)type); /* for ever: it is the name of the place */
    place->type = type;
    return NULL; /* Python has run: what has been seen of others is not what they are */
}

static int is_contiguous(const dl_tensor_t *t) {
    int64_t step = 1;
    for (int i = t->axes; i-- > 0; step *= t->shape[i])
        if (t->strides && t->strides[i] != step) return 0;
    return step == 0 || t->data != NULL;
}

/* See an array of another library. */
static int look_foreign(PyObject *object, seen_t *v) {
    enum { CPU = 1, CODES = sizeof DL_DTYPES / sizeof *DL_DTYPES };
    const foreign_t *f = sizeof(Py_ssize_t) == sizeof(int64_t) ? foreign(Py_TYPE(object)) : NULL;
    dl_tensor_t t;
    if (!f) return 0;
    if (f->exchange->show(object, &t) != 0) return PyErr_Clear(), 0;
    if (t.device_type != CPU || t.axes > MOST_AXES || t.code >= CODES || t.lanes != 1 ||
        t.bits % 8 || t.bits > 128 || !is_contiguous(&t))
        return 0;
    v->dtype = DL_DTYPES[t.code][t.bits / 8];
    v->data = (char *)t.data + t.offset;
    if (!v->dtype || (uintptr_t)v->data % (unsigned)v->dtype->align) return 0;
    v->axes = t.axes, v->shape = (const Py_ssize_t *)t.shape;
    PyObject *odd = PyObject_CallMethodObjArgs(object, f->odd, NULL);
    if (!odd) PyErr_Clear();
    Py_XDECREF(odd);
    return odd == Py_False;
}

int look_for(PyObject *object, seen_t *v, int flags) {
    if (Py_TYPE(object) != HOT.array) return look_foreign(object, v);
    const array_t *a = (const array_t *)object;
    if ((a->flags & flags) != flags || a->axes > MOST_AXES) return 0;
    v->data = a->data, v->axes = a->axes, v->shape = a->shape;
    v->dtype = dtype_of(a);
    return v->dtype != NULL;
}

int rank_of(const hot_t *h, PyObject *world_rank) {
    if (!PyLong_CheckExact(world_rank)) return -1;
    int overflow, size = h->control->size;
    long long wanted = PyLong_AsLongLongAndOverflow(world_rank, &overflow);
    if (overflow) return -1;
    if (wanted >= 0 && wanted < size && h->ranks[wanted] == wanted) return (int)wanted;
    for (int r = 0; r < size; r++)
        if (h->ranks[r] == wanted) return r;
    return -1;
}

int blocks(const hot_t *h, PyObject *given, const seen_t *part, char **places) {
    int size = h->control->size;
    int is_list = PyList_CheckExact(given);
    seen_t each;
    if (!is_list && !PyTuple_CheckExact(given)) {
        if (!look(given, &each) || each.dtype != part->dtype ||
            size_of(&each) != (size_t)size * size_of(part))
            return 0;
        places[0] = each.data;
        return 1;
    }
    if ((is_list ? PyList_Size(given) : PyTuple_Size(given)) != size) return 0;
    for (int r = 0; r < size; r++) {
        PyObject *item = is_list ? PyList_GetItem(given, r) : PyTuple_GetItem(given, r);
        if (!look(item, &each) || each.dtype != part->dtype || !is_same_shape(&each, part))
            return 0;
        places[r] = each.data;
    }
    return size;
}

/* hot_shows(array): what the hot path sees of an array, for Python to compare. */
static PyObject *hot_shows(PyObject *self, PyObject *object) {
    (void)self;
    const array_t *a = (const array_t *)object;
    return Py_BuildValue("(KinniO)", (unsigned long long)(uintptr_t)a->data, a->axes,
                         a->axes ? a->shape[0] : 0, a->axes ? a->strides[a->axes - 1] : 0, a->flags,
                         a->descr);
}

/* hot_learn(dtype, code, itemsize, alignment, DLPack's code, kernel of each operator or -1) */
static PyObject *hot_learn(PyObject *self, PyObject *args) {
    (void)self;
    dtype_t row = {.descr = NULL};
    PyObject *kernels;
    unsigned dl;
    if (!PyArg_ParseTuple(args, "OiiiIO!", &row.descr, &row.code, &row.item, &row.align, &dl,
                          &PyTuple_Type, &kernels))
        return NULL;
    for (int i = 0; i < OPS && i < PyTuple_Size(kernels); i++) {
        long number = PyLong_AsLong(PyTuple_GetItem(kernels, i));
        if (number >= 0 && number < N_KERNELS) row.kernels[i] = &KERNELS[number];
    }
    size_t at = dtype_place(row.descr);
    for (int looks = 0; DTYPE_TABLE[at].descr && DTYPE_TABLE[at].descr != row.descr; looks++) {
        if (looks == DTYPES - 1) Py_RETURN_NONE; /* full: what is not there is left to Python */
        at = (at + 1) % DTYPES;
    }
    if (!PyErr_Occurred() && !DTYPE_TABLE[at].descr) {
        Py_INCREF(row.descr); /* for ever: NumPy's own dtypes live as long */
        DTYPE_TABLE[at] = row;
        if (dl < sizeof DL_DTYPES / sizeof *DL_DTYPES && row.item <= 16)
            DL_DTYPES[dl][row.item] = &DTYPE_TABLE[at];
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {
    {"hot_shows", hot_shows, METH_O, NULL},
    {"hot_learn", hot_learn, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_hot_look(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
