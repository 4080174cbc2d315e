/* The hot path of small objects.
 *
 * A rank pickles what it sends, once, before anything else. The pickles travel in the control
 * block, as `intranode_objects.py` has them: behind eight zero bytes, for no buffers lie beside
 * them; those that are for one rank each behind a table of where they begin. What has been
 * pickled goes along where an operation is left to Python, or handed over.
 *
 * Unpickling runs Python, which may do anything: so it is done in the group's turn.
 */
#include "hot_objects.h"

typedef struct {
    const int *kind; /* of FACTS */
    int loose, n_args;
    int target, thing, root; /* places of arguments; -1: there is none */
    int each;                /* an object for each rank is sent */
    int from_root, to_root;  /* by the root alone, or to it */
} object_verb_t;

static const object_verb_t OBJECT_VERBS[] = {
    {&FACTS.BROADCAST_OBJECT_LIST, 0, 2, 0, 0, 1, 0, 1, 0}, /* and the list is the object */
    {&FACTS.ALL_GATHER_OBJECT, 1, 2, 0, 1, -1, 0, 0, 0},
    {&FACTS.GATHER_OBJECT, 1, 3, 1, 0, 2, 0, 0, 1},
    {&FACTS.SCATTER_OBJECT_LIST, 1, 3, 0, 1, 2, 1, 1, 0},
    {&FACTS.ALL_TO_ALL_OBJECT, 1, 2, 0, 1, -1, 1, 0, 0},
};

static struct {
    PyObject *describe, *dumps, *unpack, *leave, *not_packed, *protocol, *buffer_callback, *raw;
    Py_ssize_t eager, out_of_band, large;
} OBJECT;

Py_ssize_t length_of(PyObject *given, int or_tuple) {
    if (PyList_CheckExact(given)) return PyList_Size(given);
    return or_tuple && PyTuple_CheckExact(given) ? PyTuple_Size(given) : -1;
}

/* Whether the arguments are usual; notes who gives and takes. */
static int plan_objects(const hot_t *h, const object_verb_t *v, PyObject *const *args,
                        packed_t *p) {
    int size = h->control->size, rank = h->control->rank;
    p->n = 0, p->longest = 0, p->fits = 1;
    p->root = v->root < 0 ? 0 : rank_of(h, args[v->root]);
    if (p->root < 0) return 0;
    p->gives = !v->from_root || p->root == rank;
    p->takes = !v->to_root || p->root == rank;
    Py_ssize_t room = length_of(args[v->target], 0);
    if (v->kind == &FACTS.BROADCAST_OBJECT_LIST) {
        p->takes = !p->gives;
        return room > 0;
    }
    if (p->takes && !(room == 0 || room == size || (room > 0 && v->from_root))) return 0;
    return !p->gives || !v->each || length_of(args[v->thing], 1) == size;
}

/* The callback of a pickler: keep large buffers in the list `beside`. */
static PyObject *keep_beside(PyObject *beside, PyObject *buffer) {
    PyObject *raw = PyObject_CallMethodObjArgs(buffer, OBJECT.raw, NULL);
    Py_ssize_t nbytes = raw ? PyObject_Size(raw) : -1;
    int failed = nbytes < 0 || (nbytes >= OBJECT.out_of_band && PyList_Append(beside, raw) < 0);
    Py_XDECREF(raw);
    return failed ? NULL : PyBool_FromLong(nbytes < OBJECT.out_of_band);
}

static PyMethodDef KEEP_BESIDE = {"keep_beside", keep_beside, METH_O, NULL};

enum { DEPTH = 4, LOOK = 64 }; /* so deep, and at so many items, it is looked */
enum { LARGE = 1, OTHER = 2 };

static int look_into(PyObject *o, int depth);

static int look_at_items(PyObject *o, int depth, Py_ssize_t n,
                         PyObject *(*item)(PyObject *, Py_ssize_t)) {
    int found = n > LOOK ? OTHER : 0;
    for (Py_ssize_t i = 0; !(found & LARGE) && i < n && i < LOOK; i++)
        found |= look_into(item(o, i), depth - 1);
    return found;
}

/* Whether an object is, or a container has, a value that is better not copied into a pickle, and
 * whether there may be any but numbers and text: from these nothing can be kept beside a pickle. */
static int look_into(PyObject *o, int depth) {
    if (o == Py_None || PyBool_Check(o) || PyLong_CheckExact(o) || PyFloat_CheckExact(o)) return 0;
    if (PyUnicode_CheckExact(o)) return PyUnicode_GetLength(o) >= OBJECT.large ? LARGE : 0;
    if (PyBytes_CheckExact(o)) return PyBytes_Size(o) >= OBJECT.large ? LARGE : 0;
    if (PyByteArray_CheckExact(o)) return PyByteArray_Size(o) >= OBJECT.large ? LARGE : 0;
    if (!depth) return OTHER;
    if (PyList_CheckExact(o)) return look_at_items(o, depth, PyList_Size(o), PyList_GetItem);
    if (PyTuple_CheckExact(o)) return look_at_items(o, depth, PyTuple_Size(o), PyTuple_GetItem);
    if (!PyDict_CheckExact(o)) return OTHER;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int found = PyDict_Size(o) > LOOK ? OTHER : 0;
    for (int i = 0; !(found & LARGE) && i < LOOK && PyDict_Next(o, &at, &key, &value); i++)
        found |= look_into(value, depth - 1) | (look_into(key, 0) & OTHER);
    return found;
}

/* A pickle; large buffers are put into a list beside it. */
static PyObject *dump(PyObject *object, PyObject *beside) {
    PyObject *options = PyDict_New(), *args = PyTuple_Pack(2, object, OBJECT.protocol);
    PyObject *keep = PyCFunction_NewEx(&KEEP_BESIDE, beside, NULL), *made = NULL;
    if (keep && options && args && PyDict_SetItem(options, OBJECT.buffer_callback, keep) == 0)
        made = PyObject_Call(OBJECT.dumps, args, options);
    Py_XDECREF(keep), Py_XDECREF(options), Py_XDECREF(args);
    return made;
}

/* Pickle an object; 0: an error is set, and Python does it, in pieces if there are large ones. */
int pack(packed_t *p, PyObject *object) {
    int found = look_into(object, DEPTH);
    if (found & LARGE) {
        PyErr_SetString(PyExc_BufferError, "it is pickled in pieces");
        return 0;
    }
    PyObject *beside = found & OTHER ? PyList_New(0) : PyTuple_New(0), *made = NULL;
    if (beside && found & OTHER)
        made = dump(object, beside);
    else if (beside)
        made = PyObject_CallFunctionObjArgs(OBJECT.dumps, object, OBJECT.protocol, NULL);
    if (made && !PyBytes_CheckExact(made)) {
        PyErr_SetString(PyExc_TypeError, "a pickle is bytes");
        Py_CLEAR(made);
    }
    if (!made) return Py_XDECREF(beside), 0;
    p->pickles[p->n] = made, p->beside[p->n++] = beside;
    Py_ssize_t nbytes = META + PyBytes_Size(made);
    if (nbytes > p->longest) p->longest = nbytes;
    p->fits &= !(found & OTHER) || PyList_Size(beside) == 0;
    return 1;
}

void unpacked(packed_t *p) {
    while (p->n > 0) {
        p->n--;
        Py_DECREF(p->pickles[p->n]);
        Py_DECREF(p->beside[p->n]);
    }
}

/* Pickle what this rank gives; 0: an error is set. */
static int pack_all(const hot_t *h, const object_verb_t *v, PyObject *const *args, packed_t *p) {
    if (!p->gives) return 1;
    PyObject *thing = args[v->thing];
    if (v->kind == &FACTS.BROADCAST_OBJECT_LIST ||
        v->each) { /* as it is now: pickling runs Python */
        thing = PySequence_List(thing);
        int packed = thing != NULL;
        if (v->each && packed && PyList_Size(thing) == h->control->size)
            for (int r = 0; packed && r < h->control->size; r++)
                packed = pack(p, PyList_GetItem(thing, r));
        else if (packed)
            packed = pack(p, thing);
        Py_XDECREF(thing);
        return packed;
    }
    return pack(p, thing);
}

/* How many bytes this rank gives in all. */
static size_t bytes_of(const object_verb_t *v, const packed_t *p) {
    if (!v->each) return (size_t)p->longest;
    Py_ssize_t nbytes = p->n ? META * (p->n + 1) : 0;
    for (int r = 0; r < p->n; r++) nbytes += META + PyBytes_Size(p->pickles[r]);
    return (size_t)nbytes;
}

/* How long the pickles of an operation are at most. */
static int64_t most_bytes(const hot_t *h, const object_verb_t *v) {
    int64_t most = OBJECT.eager, size = h->control->size;
    if (!v->each) return most;
    int64_t room = ((int64_t)h->control->payload - META * (size + 1)) / size;
    return room < most ? room : most;
}

int64_t put(char *payload, int64_t at, PyObject *pickle) {
    Py_ssize_t nbytes = PyBytes_Size(pickle);
    memset(payload + at, 0, META);
    memcpy(payload + at + META, PyBytes_AsString(pickle), (size_t)nbytes);
    return at + META + nbytes;
}

static void put_all(const object_verb_t *v, const packed_t *p, char *payload) {
    if (!p->gives) return;
    if (!v->each) {
        put(payload, 0, p->pickles[0]);
        return;
    }
    int64_t at = META * (p->n + 1), *table = (int64_t *)payload;
    for (int r = 0; r < p->n; r++) {
        table[r] = at;
        at = put(payload, at, p->pickles[r]);
    }
    table[p->n] = at;
}

/* A copy of the pickle for this rank in what another one has given, which has `end` bytes. */
static PyObject *get(const object_verb_t *v, int rank, const char *payload, int64_t end) {
    int64_t begin = 0;
    if (v->each) {
        const int64_t *table = (const int64_t *)payload;
        begin = table[rank], end = table[rank + 1];
    }
    return PyBytes_FromStringAndSize(payload + begin + META, (Py_ssize_t)(end - begin) - META);
}

/* Take what has come, of an eager operation in `given`: `unpack(group, target, pickles, whole)`. */
static PyObject *take_objects(hot_t *h, PyObject *group, const object_verb_t *v,
                              PyObject *const *args, const packed_t *p, const char *given) {
    const control_block_t *b = h->control;
    int first = v->from_root ? p->root : 0, end = v->from_root ? p->root + 1 : b->size;
    int collects = PyGC_Disable();
    PyObject *pickles = PyList_New(end - first), *all = NULL;
    for (int r = first; pickles && r < end; r++) {
        PyObject *pickle =
            given ? get(v, b->rank, given, EAGER_BYTES) /* a pickle knows where it ends */
                  : get(v, b->rank, payload_of(b, r), slot_of(b, r)->numbers[2]);
        if (!pickle)
            Py_CLEAR(pickles);
        else
            PyList_SetItem(pickles, r - first, pickle);
    }
    PyObject *whole = v->kind == &FACTS.BROADCAST_OBJECT_LIST ? Py_True : Py_False;
    if (pickles) all = PyTuple_Pack(4, group, args[v->target], pickles, whole);
    Py_XDECREF(pickles);
    PyObject *done = call_in_turn(h, OBJECT.unpack, all, collects);
    if (!done) return NULL;
    Py_DECREF(done);
    return Py_NewRef(HOT.done);
}

/* What has been pickled, for Python: a tuple of the pickles and one of the buffers beside them. */
static PyObject *for_python(const packed_t *p) {
    PyObject *pickles = tuple_of(p->pickles, p->n), *beside = tuple_of(p->beside, p->n);
    PyObject *both = pickles && beside ? PyTuple_Pack(2, pickles, beside) : NULL;
    Py_XDECREF(pickles), Py_XDECREF(beside);
    return both;
}

PyObject *leave(PyObject *group, PyObject *describe, PyObject *given, const packed_t *p) {
    PyObject *packed = for_python(p), *result = NULL;
    if (given && packed)
        result = PyObject_CallFunctionObjArgs(OBJECT.leave, group, describe, given, packed, NULL);
    Py_XDECREF(packed);
    return result;
}

/* What the root has given eagerly, or gives; NULL: all ranks agree on it. */
static const char *find_pickles(hot_t *h, const object_verb_t *v, const packed_t *p,
                                const print_t *print, uint64_t mark) {
    control_block_t *b = h->control;
    if (!v->from_root || !may_be_eager(b, bytes_of(v, p))) return NULL;
    const char *given;
    if (p->gives) {
        if (!may_give(b, mark)) return NULL;
        given = eager_place(b);
        put_all(v, p, eager_place(b));
        if (!give_eagerly(b, print->number, print->detail)) return NULL;
    } else {
        given = find_given(b, print->number, print->detail, p->root, HOT.spins);
        if (!given) return NULL;
    }
    note_eager(h, print, mark);
    return given;
}

/* Do what all ranks have begun, or give it to Python. */
static PyObject *exchange_objects(hot_t *h, PyObject *group, const object_verb_t *v,
                                  PyObject *describe, PyObject *const *args, const packed_t *p,
                                  const print_t *print, uint64_t mark) {
    control_block_t *b = h->control;
    const char *given = find_pickles(h, v, p, print, mark);
    if (given) return p->takes ? take_objects(h, group, v, args, p, given) : Py_NewRef(HOT.done);
    PyObject *packed = for_python(p);
    if (!packed) return NULL;
    b->sequence++, h->sequence++;
    put_all(v, p, payload_of(b, b->rank));
    int64_t detail = p->longest;
    PyObject *result;
    if (!agree(b, flight_now(), print->number, h->limit_ns, detail, 0, most_bytes(h, v), HOT.spins))
        result = hand_over(h, group, describe, args, v->n_args, packed);
    else
        result = p->takes ? take_objects(h, group, v, args, p, NULL) : Py_NewRef(HOT.done);
    Py_DECREF(packed);
    return result;
}

PyObject *not_packed(PyObject *group, int kind) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    PyObject *result = PyObject_CallFunction(OBJECT.not_packed, "OiO", group, kind, error);
    Py_XDECREF(type), Py_XDECREF(error), Py_XDECREF(traceback);
    return result;
}

/* A verb on objects, called as ``verb(*arguments, group, sync_op)``; see `run_verb`. */
static PyObject *run_objects(Py_ssize_t verb, PyObject *const *args, Py_ssize_t n_args) {
    const object_verb_t *v = &OBJECT_VERBS[verb];
    if (n_args != v->n_args + 2) {
        PyErr_SetString(PyExc_TypeError, "a verb of the hot path got another number of arguments");
        return NULL;
    }
    if (!OBJECT.describe || !is_usual() || args[n_args - 1] != Py_True) Py_RETURN_NONE;
    PyObject *group = group_of(args[n_args - 2]), *result = NULL;
    hot_t *h = group ? hot_of(group) : NULL;
    PyObject *describe = PyTuple_GetItem(OBJECT.describe, verb), *given = NULL;
    packed_t p;
    if (!h || h->slots || !plan_objects(h, v, args, &p) || !is_idle(h)) {
        result = Py_NewRef(Py_None);
    } else if (!pack_all(h, v, args, &p)) {
        result = not_packed(group, *v->kind);
        unpacked(&p);
    } else {
        print_t key = {.kind = *v->kind, .reduce_op = -1, .root = p.root, .code = OBJECTS};
        if (!v->loose) key.axes = 1, key.shape[0] = PyList_Size(args[v->target]);
        const print_t *print = find_print(&key, v->loose);
        int is_each = !v->each || !p.gives || p.n == h->control->size;
        int usual = print && p.fits && p.longest <= most_bytes(h, v) && is_each;
        if (!usual || !is_idle(h)) {
            given = tuple_of(args, v->n_args);
            result = leave(group, describe, given, &p);
            Py_XDECREF(given);
        } else {
            long long number = count_issued(group, h);
            uint64_t mark = record(group, number, *v->kind, 0, (size_t)p.longest, p.root, 0, 0);
            result = exchange_objects(h, group, v, describe, args, &p, print, mark);
            if (mark) flight_end(HOT.flight, mark, result ? FLIGHT_ENDED : FLIGHT_FAILED);
        }
        unpacked(&p);
    }
    Py_XDECREF((PyObject *)h), Py_XDECREF(group);
    return result;
}

#define OBJECT_VERB(NAME, AT)                                                               \
    static PyObject *hot_##NAME(PyObject *self, PyObject *const *args, Py_ssize_t n_args) { \
        (void)self;                                                                         \
        return run_objects(AT, args, n_args);                                               \
    }
OBJECT_VERB(broadcast_object_list, 0)
OBJECT_VERB(all_gather_object, 1)
OBJECT_VERB(gather_object, 2)
OBJECT_VERB(scatter_object_list, 3)
OBJECT_VERB(all_to_all_object, 4)

/* hot_join_objects(describe, dumps, unpack, leave, not_packed, eager, out_of_band, large) */
static PyObject *hot_join_objects(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *describe, *dumps, *unpack, *left, *failed;
    if (!PyArg_ParseTuple(args, "O!OOOOnnn", &PyTuple_Type, &describe, &dumps, &unpack, &left,
                          &failed, &OBJECT.eager, &OBJECT.out_of_band, &OBJECT.large))
        return NULL;
    if (PyTuple_Size(describe) != (Py_ssize_t)(sizeof OBJECT_VERBS / sizeof *OBJECT_VERBS)) {
        PyErr_SetString(PyExc_ValueError, "hot_join_objects: a function for each verb");
        return NULL;
    }
    PyObject *protocol = PyLong_FromLong(5);
    PyObject *callback = PyUnicode_InternFromString("buffer_callback");
    PyObject *raw = PyUnicode_InternFromString("raw");
    if (!protocol || !callback || !raw) return NULL;
    keep(&OBJECT.protocol, protocol), keep(&OBJECT.buffer_callback, callback);
    keep(&OBJECT.raw, raw), keep(&OBJECT.dumps, dumps), keep(&OBJECT.unpack, unpack);
    keep(&OBJECT.leave, left), keep(&OBJECT.not_packed, failed), keep(&OBJECT.describe, describe);
    Py_DECREF(protocol), Py_DECREF(callback), Py_DECREF(raw);
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {
    FAST("hot_broadcast_object_list", hot_broadcast_object_list),
    FAST("hot_all_gather_object", hot_all_gather_object),
    FAST("hot_gather_object", hot_gather_object),
    FAST("hot_scatter_object_list", hot_scatter_object_list),
    FAST("hot_all_to_all_object", hot_all_to_all_object),
    {"hot_join_objects", hot_join_objects, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_hot_objects(PyObject *module) { return PyModule_AddFunctions(module, FUNCTIONS); }
