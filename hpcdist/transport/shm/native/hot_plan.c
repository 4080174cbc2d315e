/* Planning: what the verbs read and write (0: not usual), and the fingerprint of that. */
#include "hot.h"

/* Note an array that is like those of all ranks, and how much memory it is. */
static int is_like(const hot_t *h, planned_t *p, PyObject *object, int times) {
    if (!look(object, &p->like)) return p->like.dtype = NULL, 0;
    p->part = p->piece = size_of(&p->like) * (size_t)p->like.dtype->item;
    p->total = p->piece * (size_t)times;
    return p->total <= h->control->payload || h->large || h->slots;
}

static int is_reduced(const hot_t *h, planned_t *p, PyObject *op) {
    if (Py_TYPE(op) != HOT.reduce_op) return 0;
    p->reduce_op = (int)PyLong_AsLong(op);
    if (p->reduce_op < 0 || p->reduce_op >= OPS) return 0;
    p->kernel = p->like.dtype->kernels[p->reduce_op];
    p->divisor = p->reduce_op == FACTS.AVG ? (double)h->control->size : 1.0;
    return p->kernel != NULL;
}

static void gives(planned_t *p, const seen_t *v) { p->from[0] = v->data, p->n_from = 1; }
static void takes(planned_t *p, const seen_t *v) { p->to[0] = v->data, p->n_to = 1; }

/* Note what is given: a block for each rank, of which `piece` has the bytes. */
static int gives_blocks(const hot_t *h, planned_t *p, PyObject *given) {
    int size = h->control->size;
    p->first = (size_t)h->control->rank * p->part;
    p->n_from = blocks(h, given, &p->like, (char **)p->from);
    if (p->n_from == 1) p->piece *= (size_t)size;
    return p->n_from;
}

static int takes_blocks(const hot_t *h, planned_t *p, PyObject *given) {
    return p->n_to = blocks(h, given, &p->like, p->to);
}

static int plan_barrier(const hot_t *h, PyObject *const *args, planned_t *p) {
    (void)h, (void)args, (void)p;
    return 1;
}

static int plan_all_reduce(const hot_t *h, PyObject *const *args, planned_t *p) {
    if (!is_like(h, p, args[0], 1) || !is_reduced(h, p, args[1])) return 0;
    gives(p, &p->like), takes(p, &p->like);
    return 1;
}

static int plan_reduce(const hot_t *h, PyObject *const *args, planned_t *p) {
    if (!is_like(h, p, args[0], 1) || !is_reduced(h, p, args[2])) return 0;
    if ((p->root = rank_of(h, args[1])) < 0) return 0;
    gives(p, &p->like);
    p->to_root = 1;
    if (p->root == h->control->rank) takes(p, &p->like);
    return 1;
}

static int plan_reduce_scatter(const hot_t *h, PyObject *const *args, planned_t *p) {
    int size = h->control->size;
    if (!is_like(h, p, args[0], size) || !is_reduced(h, p, args[2])) return 0;
    takes(p, &p->like);
    return gives_blocks(h, p, args[1]);
}

static int plan_broadcast(const hot_t *h, PyObject *const *args, planned_t *p) {
    if (!is_like(h, p, args[0], 1) || (p->root = rank_of(h, args[1])) < 0) return 0;
    p->source = p->root;
    if (p->root == h->control->rank)
        gives(p, &p->like);
    else
        takes(p, &p->like);
    return 1;
}

static int plan_all_gather(const hot_t *h, PyObject *const *args, planned_t *p) {
    if (!is_like(h, p, args[1], 1)) return 0;
    gives(p, &p->like);
    return takes_blocks(h, p, args[0]);
}

static int plan_gather(const hot_t *h, PyObject *const *args, planned_t *p) {
    if (!is_like(h, p, args[0], 1) || (p->root = rank_of(h, args[2])) < 0) return 0;
    gives(p, &p->like);
    if (p->root != h->control->rank) return 1;
    return takes_blocks(h, p, args[1]);
}

static int plan_scatter(const hot_t *h, PyObject *const *args, planned_t *p) {
    int size = h->control->size;
    if (!is_like(h, p, args[0], size) || (p->root = rank_of(h, args[2])) < 0) return 0;
    takes(p, &p->like);
    p->source = p->root;
    p->first = (size_t)h->control->rank * p->part;
    if (p->root != h->control->rank) return args[1] == Py_None; /* else Python warns */
    return gives_blocks(h, p, args[1]);
}

/* Two arrays of one shape, cut along their first axis. */
static int plan_alltoall_single(const hot_t *h, PyObject *const *args, planned_t *p) {
    int size = h->control->size;
    seen_t out;
    if (args[2] != Py_None || args[3] != Py_None) return 0;
    if (!is_like(h, p, args[1], 1) || !look(args[0], &out)) return 0;
    const seen_t *in = &p->like;
    if (out.dtype != in->dtype || !is_same_shape(&out, in)) return 0;
    if (in->axes == 0 || in->shape[0] % size) return 0;
    p->part = p->piece / (size_t)size;
    gives(p, in), takes(p, &out);
    p->first = (size_t)h->control->rank * p->part;
    return 1;
}

/* The same, or two lists of arrays of one shape. */
static int plan_alltoall(const hot_t *h, PyObject *const *args, planned_t *p) {
    int size = h->control->size;
    if (!PyList_CheckExact(args[0])) {
        PyObject *const pair[] = {args[0], args[1], Py_None, Py_None};
        return plan_alltoall_single(h, pair, p);
    }
    for (int i = 0; i < 2; i++)
        if (!PyList_CheckExact(args[i]) || PyList_Size(args[i]) != size) return 0;
    if (!is_like(h, p, PyList_GetItem(args[1], 0), size)) return 0;
    return takes_blocks(h, p, args[0]) && gives_blocks(h, p, args[1]);
}

const verb_t VERBS[] = {
    {&FACTS.BARRIER, 0, 0, plan_barrier},     {&FACTS.ALL_REDUCE, 0, 2, plan_all_reduce},
    {&FACTS.REDUCE, 0, 3, plan_reduce},       {&FACTS.REDUCE_SCATTER, 0, 3, plan_reduce_scatter},
    {&FACTS.BROADCAST, 0, 2, plan_broadcast}, {&FACTS.ALL_GATHER, 1, 2, plan_all_gather},
    {&FACTS.GATHER, 1, 3, plan_gather},       {&FACTS.SCATTER, 1, 3, plan_scatter},
    {&FACTS.ALLTOALL, 1, 2, plan_alltoall},   {&FACTS.ALLTOALL, 1, 4, plan_alltoall_single},
};

const int N_VERBS = sizeof VERBS / sizeof *VERBS;

static print_t PRINT_TABLE[PRINTS];

/* ---- the fingerprint */

static size_t print_place(const print_t *key) {
    uint64_t mixed = (uint64_t)key->kind * 31 + (uint64_t)key->reduce_op;
    mixed = mixed * 31 + (uint64_t)key->root;
    mixed = mixed * 31 + (uint64_t)key->code;
    for (int i = 0; i < key->axes; i++) mixed = mixed * 1000003 + (uint64_t)key->shape[i] + 1;
    return (size_t)(mixed * 0x9e3779b97f4a7c15ull >> 58);
}

static int is_same_print(const print_t *a, const print_t *b) {
    if (a->kind != b->kind || a->reduce_op != b->reduce_op || a->root != b->root ||
        a->code != b->code || a->axes != b->axes)
        return 0;
    for (int i = 0; i < a->axes; i++)
        if (a->shape[i] != b->shape[i]) return 0;
    return 1;
}

/* Compute what `Call.fingerprint` and `shape_detail` in call.py do. */
static int make_print(print_t *print, int loose) {
    const int64_t positive = (1LL << 62) - 1, even = positive - 1;
    PyObject *shape = PyTuple_New(print->axes), *none = PyTuple_New(0), *key = NULL;
    for (int i = 0; shape && i < print->axes; i++)
        PyTuple_SetItem(shape, i, PyLong_FromSsize_t(print->shape[i]));
    PyObject *compared = loose ? none : shape;
    int is_array = print->code != OBJECTS;
    if (!shape || !none || PyErr_Occurred())
        key = NULL;
    else if (print->kind == FACTS.BARRIER)
        key = Py_BuildValue("(ii)", print->kind, -1);
    else if (is_array)
        key = Py_BuildValue("(iiiiO)", print->kind, print->reduce_op, print->root, print->code,
                            compared);
    else
        key = Py_BuildValue("(iiiO)", print->kind, -1, print->root, compared);
    if (key) {
        print->number = (int64_t)PyObject_Hash(key) & positive;
        print->detail = loose && is_array ? ((int64_t)PyObject_Hash(shape) & even) + 2 : 0;
    }
    Py_XDECREF(key), Py_XDECREF(shape), Py_XDECREF(none);
    return key && !PyErr_Occurred();
}

const print_t *find_print(print_t *key, int loose) {
    print_t *place = &PRINT_TABLE[print_place(key)];
    if (place->number && is_same_print(place, key)) return place;
    int collects = PyGC_Disable(); /* a destructor might change what has been planned */
    int made = make_print(key, loose);
    if (collects) PyGC_Enable();
    if (!made) return PyErr_Clear(), NULL;
    *place = *key;
    return place;
}

const print_t *print_of(const planned_t *p) {
    print_t key = {.kind = p->kind, .reduce_op = p->reduce_op, .root = p->root};
    if (p->like.dtype) {
        key.code = p->like.dtype->code, key.axes = p->like.axes;
        for (int i = 0; i < key.axes; i++) key.shape[i] = p->like.shape[i];
    }
    return find_print(&key, p->loose);
}
