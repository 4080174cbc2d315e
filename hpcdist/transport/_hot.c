/* The hot path: one compiled call for a small collective on the ranks of one node. A part of
 * `_kernel.c`, which includes it; `hot.py` and `comm/hot.py` say when it is used.
 *
 * A verb (`hot_all_reduce`, ...) gets what its public function got. It looks whether everything is
 * usual (`VERBS`): plain arrays in host memory that fit into the control block, the main thread,
 * nobody who listens, no other operation of the group under way. If not, it returns None and has done
 * nothing: Python runs the operation. Else it posts this rank's contribution, agrees and takes the
 * result, all while it holds the interpreter lock: nothing can come in between.
 *
 * Where the others do not come within microseconds, or mean something else, it takes the group's
 * turn and hands the posted operation over to Python (`hand_over`), which waits and raises as
 * always. From then on the operation counts as unfinished, until Python has ended it.
 */

enum { MOST_AXES = 8, PRINTS = 64, DTYPES = 64, OPS = 16, FOREIGN = 32 };
enum { OBJECTS = -2 }; /* in place of the code of a dtype */
/* NumPy's flags: C-contiguous, aligned, writable */
enum { READABLE = 0x1 | 0x100, ORDINARY = READABLE | 0x400 };

/* The beginning of NumPy's PyArrayObject, which is part of its binary interface; `hot_shows` lets
 * Python compare. Arrays of other libraries are seen through the C interface of DLPack that their
 * type has; `meet` in hot.py tells which. */
typedef struct {
    PyObject_HEAD
    char *data;
    int axes;
    Py_ssize_t *shape, *strides;
    PyObject *base, *descr;
    int flags;
} array_t;

typedef struct {
    PyObject *descr;
    int code, item, align;
    const kernel_t *kernels[OPS]; /* by operator; NULL: Python's business */
} dtype_t;

/* An array in host memory, contiguous, aligned and writable. */
typedef struct {
    char *data;
    int axes;
    const Py_ssize_t *shape;
    const dtype_t *dtype;
} seen_t;

/* DLPack's DLTensor, and as much of its DLPackExchangeAPI as is used; version 1. */
typedef struct {
    void *data;
    int32_t device_type, device_id, axes;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} dl_tensor_t;
typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *managed_from, *managed_to;
    int (*show)(void *object, dl_tensor_t *out);
} dl_exchange_t;

/* A type whose objects a verb has got. */
typedef struct {
    PyTypeObject *type;
    const dl_exchange_t *exchange; /* NULL: Python's business */
    PyObject *odd; /* the method that tells whether the memory holds other numbers than it says */
} foreign_t;

/* What a shared control block does not know of its group. */
typedef struct {
    PyObject_HEAD
    control_block_t *control;
    PyObject *queued, *locked, *acquire, *release; /* the group's turn; see `CollectiveQueue` */
    int64_t *ranks;                                /* the world rank of each rank */
    long long sequence, limit_ns;                  /* see `Tally` in hot.py */
    int unfinished;
    struct large *large; /* see `_hot_large.c`; NULL: what is large is Python's business */
} hot_t;

/* One operation, as a verb plans it. */
typedef struct {
    int kind, reduce_op, root, loose;
    seen_t like;         /* whose shape the ranks compare; without a dtype: nothing */
    size_t total;        /* bytes of the largest contribution */
    size_t piece;        /* bytes of each of `from` and `to` */
    int n_from, n_to;
    int source;          /* whose contribution is copied; -1: everyone's, one after the other */
    size_t first;        /* where in it the part for this rank begins */
    size_t part;         /* and its bytes */
    const kernel_t *kernel; /* instead of copying: how the parts are reduced */
    double divisor;
    const char *from[MOST];
    char *to[MOST];
} planned_t;

/* What has been computed of a shape: the fingerprint of the call, and its `detail`. */
typedef struct {
    int kind, reduce_op, root, code, axes;
    Py_ssize_t shape[MOST_AXES];
    int64_t number, detail;
} print_t;

static struct {
    int on;
    unsigned long thread; /* the main one */
    long spins;
    PyTypeObject *array, *group, *reduce_op;
    PyTypeObject *hot;
    PyObject *here, *listeners, *go_on, *start, *end, *take_back, *done, *describe, *meet;
    PyObject *session, *world, *transport, *hot_, *issued, *flight_, *failed; /* of attributes */
    flight_t *flight; /* the recorder; NULL where it is not compiled */
} HOT;
static dtype_t DTYPE_TABLE[DTYPES];
static const dtype_t *DL_DTYPES[8][17]; /* by DLPack's code and the bytes of an element */
static foreign_t FOREIGN_TABLE[FOREIGN];
static print_t PRINT_TABLE[PRINTS];

/* ---- looking at arguments */

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

/* See the array that an argument is, if it is one that is used as it lies, with these flags. */
static int look_for(PyObject *object, seen_t *v, int flags) {
    if (Py_TYPE(object) != HOT.array) return look_foreign(object, v);
    const array_t *a = (const array_t *)object;
    if ((a->flags & flags) != flags || a->axes > MOST_AXES) return 0;
    v->data = a->data, v->axes = a->axes, v->shape = a->shape;
    v->dtype = dtype_of(a);
    return v->dtype != NULL;
}

static int look(PyObject *object, seen_t *v) { return look_for(object, v, ORDINARY); }

static size_t size_of(const seen_t *v) {
    size_t size = 1;
    for (int i = 0; i < v->axes; i++) size *= (size_t)v->shape[i];
    return size;
}

static int is_same_shape(const seen_t *a, const seen_t *b) {
    if (a->axes != b->axes) return 0;
    for (int i = 0; i < a->axes; i++)
        if (a->shape[i] != b->shape[i]) return 0;
    return 1;
}

/* The rank in the group of a world rank; -1: Python's business. */
static int rank_of(const hot_t *h, PyObject *world_rank) {
    if (!PyLong_CheckExact(world_rank)) return -1;
    int overflow, size = h->control->size;
    long long wanted = PyLong_AsLongLongAndOverflow(world_rank, &overflow);
    if (overflow) return -1;
    if (wanted >= 0 && wanted < size && h->ranks[wanted] == wanted) return (int)wanted;
    for (int r = 0; r < size; r++)
        if (h->ranks[r] == wanted) return r;
    return -1;
}

/* Whether an argument is one block per rank like `part`: an array of n times its elements, or n
 * arrays of its shape. Writes down where they begin, and returns how many places that are. */
static int blocks(const hot_t *h, PyObject *given, const seen_t *part, char **places) {
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

/* ---- planning: what the verbs read and write. 0: not usual. */

enum {
    BARRIER = 0, ALL_REDUCE = 1, REDUCE = 2, REDUCE_SCATTER = 3, BROADCAST = 6, ALL_GATHER = 7,
    GATHER = 8, SCATTER = 9, ALLTOALL = 10
}; /* as in kinds.py */

/* Note an array that is like those of all ranks, and how much memory it is. */
static int is_like(const hot_t *h, planned_t *p, PyObject *object, int times) {
    if (!look(object, &p->like)) return p->like.dtype = NULL, 0;
    p->part = p->piece = size_of(&p->like) * (size_t)p->like.dtype->item;
    p->total = p->piece * (size_t)times;
    return p->total <= h->control->payload || h->large;
}

static int is_reduced(const hot_t *h, planned_t *p, PyObject *op) {
    enum { AVG = 4 };
    if (Py_TYPE(op) != HOT.reduce_op) return 0;
    p->reduce_op = (int)PyLong_AsLong(op);
    if (p->reduce_op < 0 || p->reduce_op >= OPS) return 0;
    p->kernel = p->like.dtype->kernels[p->reduce_op];
    p->divisor = p->reduce_op == AVG ? (double)h->control->size : 1.0;
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

typedef struct {
    int kind, loose, n_args;
    int (*plan)(const hot_t *, PyObject *const *, planned_t *);
} verb_t;

static const verb_t VERBS[] = {
    {BARRIER, 0, 0, plan_barrier},
    {ALL_REDUCE, 0, 2, plan_all_reduce},
    {REDUCE, 0, 3, plan_reduce},
    {REDUCE_SCATTER, 0, 3, plan_reduce_scatter},
    {BROADCAST, 0, 2, plan_broadcast},
    {ALL_GATHER, 1, 2, plan_all_gather},
    {GATHER, 1, 3, plan_gather},
    {SCATTER, 1, 3, plan_scatter},
    {ALLTOALL, 1, 2, plan_alltoall},
    {ALLTOALL, 1, 4, plan_alltoall_single},
};

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
    else if (print->kind == BARRIER)
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

/* The numbers of an operation, from the table or made and kept there. */
static const print_t *find_print(print_t *key, int loose) {
    print_t *place = &PRINT_TABLE[print_place(key)];
    if (place->number && is_same_print(place, key)) return place;
    int collects = PyGC_Disable(); /* a destructor might change what has been planned */
    int made = make_print(key, loose);
    if (collects) PyGC_Enable();
    if (!made) return PyErr_Clear(), NULL;
    *place = *key;
    return place;
}

static const print_t *print_of(const planned_t *p) {
    print_t key = {.kind = p->kind, .reduce_op = p->reduce_op, .root = p->root};
    if (p->like.dtype) {
        key.code = p->like.dtype->code, key.axes = p->like.axes;
        for (int i = 0; i < key.axes; i++) key.shape[i] = p->like.shape[i];
    }
    return find_print(&key, p->loose);
}

/* ---- doing it */

/* Reduce the parts of what `size` ranks have given; as `combine` does, without its large
 * accumulators. */
static void reduce_parts(const planned_t *p, int size, const char *const *given) {
    enum { FEW = 32 };
    char accumulator[FEW * 8] __attribute__((aligned(64)));
    const kernel_t *k = p->kernel;
    size_t n = p->part / k->item;
    if (n <= FEW) {
        k->load(accumulator, given[0] + p->first, n);
        for (int r = 1; r < size; r++) k->fold(accumulator, given[r] + p->first, n);
        k->store(p->to[0], accumulator, n, p->divisor);
        return;
    }
    job_t job;
    job.kernel = k, job.n_sources = size, job.n_outs = 1;
    job.count = n, job.divisor = p->divisor;
    job.outs[0] = (uintptr_t)p->to[0];
    for (int r = 0; r < size; r++) job.sources[r] = (uintptr_t)given[r] + p->first;
    combine(&job);
}

static void take_result(const planned_t *p, int size, const char *const *given) {
    if (p->n_to == 0) return;
    if (p->kernel) {
        reduce_parts(p, size, given);
        return;
    }
    if (p->source >= 0) {
        memcpy(p->to[0], given[p->source] + p->first, p->part);
        return;
    }
    for (int r = 0; r < size; r++) {
        char *to = p->n_to == 1 ? p->to[0] + (size_t)r * p->part : p->to[r];
        memcpy(to, given[r] + p->first, p->part);
    }
}

static void give(const planned_t *p, char *payload) {
    for (int i = 0; i < p->n_from; i++)
        memcpy(payload + (size_t)i * p->piece, p->from[i], p->piece);
}

/* Post, agree and take. 0: posted, but the others have not come, or mean something else. */
static int perform(hot_t *h, const planned_t *p, const print_t *print, long spins) {
    control_block_t *b = h->control;
    b->sequence++, h->sequence++;
    give(p, payload_of(b, b->rank));
    if (!agree(b, print->number, h->limit_ns, print->detail, 0, NO_OTHER, spins)) return 0;
    const char *given[MOST];
    for (int r = 0; r < b->size; r++) given[r] = payload_of(b, r);
    take_result(p, b->size, given);
    return 1;
}

/* Give the group's turn back, if it was taken; an operation that has failed lends no memory any more
 * (`take_back(group, describe, args)`). Keeps what is raised, and takes the reference to `turn`. */
static void end_turn(const hot_t *h, PyObject *turn, int has_failed, PyObject *group,
                     PyObject *describe, PyObject *args) {
    PyObject *type, *value, *traceback, *left = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    if (turn == Py_True && has_failed && args) {
        left = PyObject_CallFunctionObjArgs(HOT.take_back, group, describe, args, NULL);
        if (!left) PyErr_Clear();
    }
    PyObject *ended = turn == Py_True ? PyObject_CallNoArgs(h->release) : NULL;
    if (type) PyErr_Restore(type, value, traceback);
    Py_XDECREF(left), Py_XDECREF(ended), Py_XDECREF(turn);
}

/* Call `function(group, ...)` in the group's turn, which is free. No Python runs before the turn is
 * taken and the frame of `function` is there, by which a signal handler or a destructor can tell
 * that it is in the middle of an operation; `collects` says whether to collect garbage from then
 * on. Takes the reference to `args`, which may be NULL. */
static PyObject *call_in_turn(hot_t *h, PyObject *function, PyObject *args, int collects) {
    PyObject *turn = PyObject_CallNoArgs(h->acquire);
    if (collects) PyGC_Enable();
    PyObject *result = turn == Py_True && args ? PyObject_Call(function, args, NULL) : NULL;
    end_turn(h, turn, 0, NULL, NULL, NULL);
    Py_XDECREF(args);
    return result;
}

/* A new tuple of arguments; NULL if there is no memory. */
static PyObject *tuple_of(PyObject *const *args, Py_ssize_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple && i < n; i++) PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
    return tuple;
}

/* Give an operation that is posted to Python: `go_on(group, describe, args, pickles)`. */
static PyObject *hand_over(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                           Py_ssize_t n_args, PyObject *pickles) {
    h->unfinished = 1;
    int collects = PyGC_Disable();
    PyObject *given = tuple_of(args, n_args);
    PyObject *all = given ? PyTuple_Pack(4, group, describe, given, pickles) : NULL;
    Py_XDECREF(given);
    return call_in_turn(h, HOT.go_on, all, collects);
}

/* The attribute of an object; NULL, without an error, where it has none. */
static PyObject *attribute(PyObject *object, PyObject *name) {
    PyObject *found = object ? PyObject_GetAttr(object, name) : NULL;
    if (!found) PyErr_Clear();
    return found;
}

/* The group that an argument means: a new reference, or NULL. */
static PyObject *group_of(PyObject *given) {
    PyObject *group = given;
    if (given != Py_None)
        Py_INCREF(group);
    else {
        PyObject *session = attribute(HOT.here, HOT.session);
        group = session == Py_None ? NULL : attribute(session, HOT.world);
        Py_XDECREF(session);
    }
    if (group && Py_TYPE(group) != HOT.group) {
        Py_DECREF(group);
        return NULL;
    }
    return group;
}

/* What the transport of a group has for the hot path: a new reference, or NULL. */
static hot_t *hot_of(PyObject *group) {
    PyObject *transport = attribute(group, HOT.transport);
    PyObject *hot = attribute(transport, HOT.hot_);
    Py_XDECREF(transport);
    if (hot && Py_TYPE(hot) != HOT.hot) {
        Py_DECREF(hot);
        return NULL;
    }
    return (hot_t *)hot;
}

/* Whether nothing of the group is under way, no exchange of it left to be completed, and nobody to
 * be told of an operation. */
static int is_idle(const hot_t *h) {
    if (PyList_Size(HOT.listeners) != 0 || h->unfinished || PyObject_Size(h->queued) != 0) return 0;
    PyObject *locked = PyObject_CallNoArgs(h->locked);
    Py_XDECREF(locked);
    if (!locked) PyErr_Clear();
    return locked == Py_False;
}

/* Count the operation in `Group.issued`, as `dispatch` does; returns its number, or 0. */
static long long count_issued(PyObject *group) {
    PyObject *before = attribute(group, HOT.issued), *after = NULL;
    long long number = before ? PyLong_AsLongLong(before) + 1 : 0;
    if (number > 0) after = PyLong_FromLongLong(number);
    int counted = after && PyObject_SetAttr(group, HOT.issued, after) == 0;
    Py_XDECREF(before), Py_XDECREF(after);
    if (!counted) PyErr_Clear();
    return counted ? number : 0;
}

/* Record that operation `number` of a group begins; its mark, 0 where nothing is recorded. */
static uint64_t record(PyObject *group, long long number, int kind, int code, size_t nbytes,
                       int root, unsigned flags) {
    if (!HOT.flight || !HOT.flight->header) return 0;
    PyObject *place = attribute(group, HOT.flight_);
    unsigned long at = place ? PyLong_AsUnsignedLong(place) : 0;
    Py_XDECREF(place);
    if (PyErr_Occurred()) return PyErr_Clear(), 0;
    return flight_begin(HOT.flight, (unsigned)kind, (unsigned)code, nbytes, (uint32_t)at,
                        (uint32_t)number, root, 0, flags);
}

static uint64_t record_planned(PyObject *group, const planned_t *p, long long number,
                               unsigned flags) {
    size_t nbytes = p->piece * (size_t)(p->n_from > 1 ? p->n_from : 1);
    return record(group, number, p->kind, p->like.dtype ? p->like.dtype->code : 0, nbytes, p->root,
                  flags);
}

/* Let the thread of the group's queue end an operation that is posted:
 * `start(group, describe, args, mark)` returns its work. */
static PyObject *hand_to_thread(hot_t *h, PyObject *group, PyObject *describe,
                                PyObject *const *args, Py_ssize_t n_args, uint64_t mark) {
    h->unfinished = 1;
    int collects = PyGC_Disable();
    PyObject *given = tuple_of(args, n_args), *all = NULL;
    if (given) all = Py_BuildValue("(OOOK)", group, describe, given, (unsigned long long)mark);
    Py_XDECREF(given);
    return call_in_turn(h, HOT.start, all, collects);
}

/* Whether the hot path is on, for the main thread. */
static int is_usual(void) { return HOT.on && PyThread_get_thread_ident() == HOT.thread; }

static int is_movable(const hot_t *h, const planned_t *p);
static PyObject *run_large(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                           Py_ssize_t n_args, const planned_t *p, const print_t *print);

/* A verb, called as ``verb(*arguments, group, sync_op)``: what the operation returns if it has run
 * it, None if that is left to Python. One that need not end is posted, and has mostly ended then:
 * the others are in step, or have waited; else the thread of the queue ends it. */
static PyObject *run_verb(Py_ssize_t verb, PyObject *const *args, Py_ssize_t n_args) {
    const verb_t *v = &VERBS[verb];
    if (n_args != v->n_args + 2) {
        PyErr_SetString(PyExc_TypeError, "a verb of the hot path got another number of arguments");
        return NULL;
    }
    int waits = args[n_args - 1] == Py_True;
    if (!is_usual() || !(waits || args[n_args - 1] == Py_False)) Py_RETURN_NONE;
    PyObject *group = group_of(args[n_args - 2]), *result = NULL;
    hot_t *h = group ? hot_of(group) : NULL;
    planned_t p;
    p.kind = v->kind, p.loose = v->loose, p.reduce_op = -1, p.root = 0;
    p.like.dtype = NULL, p.kernel = NULL, p.source = -1, p.divisor = 1.0;
    p.total = p.piece = p.part = p.first = 0, p.n_from = p.n_to = 0;
    const print_t *print = NULL;
    int usual = h && v->plan(h, args, &p);
    int is_large = usual && p.total > h->control->payload;
    usual = usual && (!is_large || (waits && is_movable(h, &p))) && (print = print_of(&p)) && is_idle(h);
    long long number = usual ? count_issued(group) : 0;
    if (!number) {
        result = Py_None;
        Py_INCREF(result);
    } else {
        unsigned flags = waits ? 0 : FLIGHT_STARTED;
        uint64_t mark = record_planned(group, &p, number, flags);
        PyObject *describe = PyTuple_GetItem(HOT.describe, verb);
        if (is_large)
            result = run_large(h, group, describe, args, v->n_args, &p, print);
        else if (perform(h, &p, print, waits ? HOT.spins : HOT.spins / 4))
            result = Py_NewRef(HOT.done);
        else if (waits)
            result = hand_over(h, group, describe, args, v->n_args, Py_None);
        else if ((result = hand_to_thread(h, group, describe, args, v->n_args, mark)))
            mark = 0; /* the work has it */
        if (mark) flight_end(HOT.flight, mark, result ? FLIGHT_ENDED : FLIGHT_FAILED);
    }
    Py_XDECREF((PyObject *)h), Py_XDECREF(group);
    return result;
}

#define VERB(NAME, AT)                                                                          \
    static PyObject *hot_##NAME(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {     \
        (void)self;                                                                             \
        return run_verb(AT, args, n_args);                                                      \
    }
VERB(barrier, 0)
VERB(all_reduce, 1)
VERB(reduce, 2)
VERB(reduce_scatter, 3)
VERB(broadcast, 4)
VERB(all_gather, 5)
VERB(gather, 6)
VERB(scatter, 7)
VERB(alltoall, 8)
VERB(alltoall_single, 9)

/* ---- the object of a transport, and the tables */

static void forget_large(hot_t *h);
static PyObject *hot_learn_large(PyObject *self, PyObject *args);

static int hot_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    hot_t *h = (hot_t *)self;
    PyObject *control, *ranks;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!OOOO", &control, &PyTuple_Type, &ranks, &h->queued, &h->locked,
                          &h->acquire, &h->release)) {
        h->queued = h->locked = h->acquire = h->release = NULL;
        return -1;
    }
    Py_INCREF(h->queued), Py_INCREF(h->locked), Py_INCREF(h->acquire), Py_INCREF(h->release);
    control_block_t *b = (control_block_t *)control;
    if (PyType_GetSlot(Py_TYPE(control), Py_tp_dealloc) != (void *)control_dealloc ||
        PyTuple_Size(ranks) != b->size || b->size > MOST) {
        PyErr_SetString(PyExc_ValueError, "a ControlBlock, and a world rank for each of its ranks");
        return -1;
    }
    Py_INCREF(control);
    h->control = b;
    h->ranks = malloc(sizeof *h->ranks * (size_t)b->size);
    if (!h->ranks) return PyErr_NoMemory(), -1;
    for (int r = 0; r < b->size; r++)
        h->ranks[r] = PyLong_AsLongLong(PyTuple_GetItem(ranks, r));
    return PyErr_Occurred() ? -1 : 0;
}

static void hot_dealloc(PyObject *self) {
    hot_t *h = (hot_t *)self;
    Py_XDECREF((PyObject *)h->control);
    Py_XDECREF(h->queued), Py_XDECREF(h->locked), Py_XDECREF(h->acquire), Py_XDECREF(h->release);
    free(h->ranks);
    forget_large(h);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef HOT_MEMBERS[] = {
    {"sequence", T_LONGLONG, offsetof(hot_t, sequence), 0, NULL},
    {"limit_ns", T_LONGLONG, offsetof(hot_t, limit_ns), 0, NULL},
    {"unfinished", T_INT, offsetof(hot_t, unfinished), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef HOT_METHODS[] = {
    {"learn_large", hot_learn_large, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot HOT_SLOTS[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, hot_init},       {Py_tp_dealloc, hot_dealloc},
    {Py_tp_members, HOT_MEMBERS},   {Py_tp_methods, HOT_METHODS}, {0, NULL},
};
static PyType_Spec HOT_SPEC = {"hpcdist.transport._kernel.Hot", sizeof(hot_t), 0,
                               Py_TPFLAGS_DEFAULT, HOT_SLOTS};

/* Keep a new reference in place of an older one. */
static void keep(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    Py_INCREF(object);
    *place = object;
    Py_XDECREF(before);
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

/* hot_join(ndarray, Group, ReduceOp, here, listeners, go_on, start, end, take_back, done, describe, meet,
 * thread, spins) */
static PyObject *hot_join(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *array, *group, *op, *here, *listeners, *go_on, *start, *end, *take_back, *done, *describe, *meet;
    unsigned long thread;
    long spins;
    if (!PyArg_ParseTuple(args, "O!O!O!OO!OOOOOO!Okl", &PyType_Type, &array, &PyType_Type, &group,
                          &PyType_Type, &op, &here, &PyList_Type, &listeners, &go_on, &start, &end, &take_back,
                          &done,
                          &PyTuple_Type, &describe, &meet, &thread, &spins))
        return NULL;
    if (PyTuple_Size(describe) != (Py_ssize_t)(sizeof VERBS / sizeof *VERBS)) {
        PyErr_SetString(PyExc_ValueError, "hot_join: a function for each verb");
        return NULL;
    }
    keep((PyObject **)&HOT.array, array), keep((PyObject **)&HOT.group, group);
    keep((PyObject **)&HOT.reduce_op, op), keep(&HOT.here, here);
    keep(&HOT.listeners, listeners), keep(&HOT.go_on, go_on), keep(&HOT.done, done);
    keep(&HOT.start, start), keep(&HOT.end, end), keep(&HOT.take_back, take_back);
    keep(&HOT.describe, describe), keep(&HOT.meet, meet);
    HOT.flight = PyCapsule_Import("hpcdist.transport._recorder.flight", 0);
    PyErr_Clear(); /* it was not compiled: nothing is recorded here */
    HOT.thread = thread, HOT.spins = spins, HOT.on = 1;
    Py_RETURN_NONE;
}

/* hot_switch(on): use the hot path or not, from now on; return whether it was used. */
static PyObject *hot_switch(PyObject *self, PyObject *on) {
    (void)self;
    int wanted = PyObject_IsTrue(on), before = HOT.on;
    if (wanted < 0) return NULL;
    HOT.on = wanted && HOT.go_on;
    return PyBool_FromLong(before);
}

#define HOT_VERB(NAME) {"hot_" #NAME, (PyCFunction)(void (*)(void))hot_##NAME, METH_FASTCALL, NULL}
#define HOT_FUNCTIONS                                                                           \
    HOT_VERB(barrier), HOT_VERB(all_reduce), HOT_VERB(reduce), HOT_VERB(reduce_scatter),        \
        HOT_VERB(broadcast), HOT_VERB(all_gather), HOT_VERB(gather), HOT_VERB(scatter),         \
        HOT_VERB(alltoall), HOT_VERB(alltoall_single), {"hot_shows", hot_shows, METH_O, NULL},                             \
        {"hot_learn", hot_learn, METH_VARARGS, NULL},                                           \
        {"hot_join", hot_join, METH_VARARGS, NULL}, {"hot_switch", hot_switch, METH_O, NULL}

/* Add what the module has of the hot path beyond its functions. */
static int add_hot(PyObject *module) {
    PyObject *type = PyType_FromSpec(&HOT_SPEC);
    HOT.session = PyUnicode_InternFromString("session");
    HOT.world = PyUnicode_InternFromString("world");
    HOT.transport = PyUnicode_InternFromString("transport");
    HOT.hot_ = PyUnicode_InternFromString("hot");
    HOT.issued = PyUnicode_InternFromString("issued");
    HOT.flight_ = PyUnicode_InternFromString("flight");
    HOT.failed = PyUnicode_InternFromString("failed");
    if (!type || PyErr_Occurred()) return -1;
    HOT.hot = (PyTypeObject *)type;
    Py_INCREF(type);
    return PyModule_AddObject(module, "Hot", type);
}
