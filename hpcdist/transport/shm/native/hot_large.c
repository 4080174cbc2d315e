/* The hot path of arrays that do not fit into the control block.
 *
 * What is moved is read where it lies, what is reduced is reduced there (`hot_heap.c`,
 * `reduce_attached.c`) or goes through the pipe, as `tuning` says; `shm/collectives.py` and
 * `intranode_large.py` have the same in Python. It is done in the group's turn, without the
 * interpreter lock. Where something is unusual, or the others let this rank wait, `end` goes on, from
 * where it stands:
 *
 *   POSTED   this rank has begun; the others have not come, or mean something else, or offer
 *            other memory, or theirs cannot be reached;
 *   IN_PIPE  the reduction is under way;
 *   DONE     this rank has done its part, the others have not;
 *   BROKEN   another rank has left it on its way;
 *   less than POSTED: it is the error, negative, that stopped a reduction on its way.
 */
#include "hot_large.h"

static int overlaps(const char *a, size_t of_a, const char *b, size_t of_b) {
    return a < b + of_b && b < a + of_a;
}

/* Whether writing the results would change what others still read, or other results. A rank's own
 * block of a gathered array, or of one that is reduced and scattered, is read by nobody else. */
static int is_entangled(const hot_t *h, const planned_t *p) {
    int size = h->control->size, n = p->n_to ? (p->source >= 0 || p->kernel ? 1 : size) : 0;
    for (int i = 0; i < n; i++) {
        const char *to = place_to(p, i);
        int own = p->kind == FACTS.ALL_GATHER && i == h->control->rank && to == p->from[0];
        if (p->kind == FACTS.REDUCE_SCATTER) own = p->n_from == 1 && to == p->from[0] + p->first;
        for (int j = 0; j < p->n_from && !own; j++)
            if (overlaps(to, p->part, p->from[j], p->piece)) return 1;
        for (int j = 0; j < i && p->n_to > 1; j++)
            if (overlaps(to, p->part, place_to(p, j), p->part)) return 1;
    }
    return 0;
}

static int is_ordinary(const hot_t *h, const char *data, size_t nbytes) {
    return !overlaps(data, nbytes, h->large->heaps[h->control->rank], h->large->heap_bytes);
}

static int is_short(const planned_t *p) {
    enum { FLOAT = 2 };
    return p->divisor != 1.0 || p->like.dtype == DL_DTYPES[FLOAT][2];
}

static int is_attached(const hot_t *h, const planned_t *p) {
    return is_within(p->total, h->large->attached[is_short(p)][p->kind]);
}

/* Whether what this rank contributes is copied to its staging memory. */
static int is_staged(const hot_t *h, const planned_t *p) {
    return !p->kernel && is_within(p->total, h->large->staged[p->kind]);
}

static char *copy_of(const hot_t *h, int rank) {
    return h->large->copies[rank] + (h->control->sequence & 1) * h->large->copy_bytes;
}

/* Whether what this rank offers, which is ordinary memory, can be read by others. */
static int is_offerable(const hot_t *h, const planned_t *p) {
    for (int i = 0; i < n_offered(p); i++)
        if (!is_ordinary(h, offered(p, i), p->piece) ||
            !can_attach((char *)offered(p, i), p->piece))
            return 0;
    return 1;
}

int is_movable(const hot_t *h, const planned_t *p) {
    const struct large *l = h->large;
    PyObject *failed = attribute(l->node, HOT.failed);
    Py_XDECREF(failed);
    if (failed != Py_False || p->n_to > MOST_IN_LIST || p->n_from > MOST_IN_LIST) return 0;
    int checked = !p->kernel || p->kind == FACTS.REDUCE_SCATTER; /* others are in place */
    if (checked && is_entangled(h, p)) return 0;
    if (is_attached(h, p) && l->rights != rights()) return 0;
    if (is_in_heap(h, p) || is_staged(h, p)) return 1;
    if (is_attached(h, p)) return is_offerable(h, p);
    if (p->kernel)
        return p->n_from == 1 && is_ordinary(h, p->from[0], p->total) &&
               is_within(p->total, l->piped[is_short(p)][p->kind]);
    return !n_offered(p) && is_within(p->total, l->direct[p->kind]);
}

/* What this rank publishes about what it offers; a list goes into its payload. */
static int64_t publish_places(const hot_t *h, const planned_t *p) {
    if (is_in_heap(h, p)) return publish_in_heap(h, p);
    if (is_staged(h, p) && p->n_from) {
        give_others(p, h->control, copy_of(h, h->control->rank));
        return IN_STAGE;
    }
    if (p->kernel && !is_attached(h, p)) return 0;
    if (n_offered(p) == 0 || is_staged(h, p)) return NOTHING;
    if (p->n_from <= 1) return ATTACHED - (int64_t)(uintptr_t)offered(p, 0);
    int64_t *list = (int64_t *)payload_of(h->control, h->control->rank);
    for (int i = 0; i < p->n_from; i++) list[i] = (int64_t)(uintptr_t)p->from[i];
    return ATTACHED_LIST;
}

static int is_address_attached(int64_t address) {
    return address <= ATTACHED || address == ATTACHED_LIST;
}

static place_t place_offered(const hot_t *h, const planned_t *p, int rank) {
    const control_block_t *b = h->control;
    int64_t address = slot_of(b, rank)->address;
    pid_t pid = rank == b->rank ? 0 : h->large->pids[rank];
    if (address == ATTACHED_LIST)
        return (place_t){pid, (char *)(uintptr_t)((int64_t *)payload_of(b, rank))[b->rank]};
    if (address <= ATTACHED)
        return (place_t){pid, (char *)(uintptr_t)(ATTACHED - address) + p->first};
    return place_in_heap(h, p, rank);
}

/* Copy what is `offset` bytes behind a place to here, or from here to there. */
static int move(place_t place, size_t offset, char *ours, size_t nbytes, int writes) {
    char *theirs = place.at + offset;
    if (place.pid) return attach(place.pid, (uintptr_t)theirs, ours, nbytes, writes);
    if (theirs != ours) copy(writes ? theirs : ours, writes ? ours : theirs, nbytes);
    return 0;
}

enum { OWN_UP_TO = 1 << 20 };

static int fetch_from(const hot_t *h, const planned_t *p, int rank, char *to) {
    place_t from = place_offered(h, p, rank);
    if (!from.at) return -1;
    if (rank != h->control->rank || p->part > OWN_UP_TO) return move(from, 0, to, p->part, 0);
    if (to != from.at) memcpy(to, from.at, p->part); /* no other core wrote that */
    return 0;
}

/* Copy this rank's slice of the root's array into everybody's. */
static int fetch_slice(const hot_t *h, const planned_t *p) {
    const control_block_t *b = h->control;
    size_t first, count = own_share(b, p->part, &first);
    for (int r = 0; r < b->size; r++)
        if (!place_offered(h, p, r).at) return -1;
    char *mine = p->like.data + first;
    if (move(place_offered(h, p, p->root), first, mine, count, 0)) return -1;
    for (int r = 0; r < b->size; r++)
        if (r != p->root && r != b->rank && move(place_offered(h, p, r), first, mine, count, 1))
            return -1;
    return 0;
}

static int fetch_all(const hot_t *h, const planned_t *p) {
    const control_block_t *b = h->control;
    for (int r = 0; r < b->size; r++)
        if (slot_of(b, r)->address == 0) return -1; /* all leave it to MPI, if one does */
    if (p->kind == FACTS.BROADCAST) return fetch_slice(h, p);
    if (p->n_to == 0) return 0;
    if (p->source >= 0) return fetch_from(h, p, p->source, p->to[0]);
    for (int k = 1; k <= b->size; k++) { /* each rank begins with another one */
        int r = (b->rank + k) % b->size;
        if (fetch_from(h, p, r, place_to(p, r))) return -1;
    }
    return 0;
}

/* Take what this rank wants out of copies, if there are no others. For these nobody waits: see
 * [Note: two turns] in control.py. */
static int take_copies(const hot_t *h, const planned_t *p) {
    const control_block_t *b = h->control;
    const char *copies[MOST];
    for (int r = 0; r < b->size; r++) {
        int64_t address = slot_of(b, r)->address;
        if (address != IN_STAGE && address != NOTHING) return 0;
        copies[r] = copy_of(h, r);
    }
    take_from_others(p, b, copies);
    return 1;
}

/* Reduce this rank's share where everyone's lie. */
static int reduce_in_place(hot_t *h, const planned_t *p) {
    const control_block_t *b = h->control;
    size_t first = 0, item = p->kernel->item, slices = 2 * ((size_t)b->size + 1);
    share_t s = {.kernel = p->kernel, .divisor = p->divisor, .rank = b->rank, .size = b->size};
    s.count = p->part / item;
    if (p->kind != FACTS.REDUCE_SCATTER) s.count = own_share(b, s.count, &first);
    for (int r = 0; r < b->size; r++) {
        if (!is_address_attached(slot_of(b, r)->address)) return POSTED; /* then nobody's is used */
        uintptr_t place = (uintptr_t)place_offered(h, p, r).at;
        s.pids[r] = h->large->pids[r], s.from[r] = place + first * item;
        if (p->kind == FACTS.ALL_REDUCE || (p->kind == FACTS.REDUCE && r == p->root))
            s.to[r] = s.from[r];
    }
    if (p->kind == FACTS.REDUCE_SCATTER) s.to[b->rank] = (uintptr_t)p->to[0];
    s.room = h->large->stages[b->rank], s.room_bytes = slices * h->large->slice_bytes;
    int failed = reduce_share(&s);
    return failed ? -failed : DONE;
}

/* Whether a reduction goes through the pipe: some array is ordinary, and so says the table. */
static int is_piped(const hot_t *h, const planned_t *p) {
    const control_block_t *b = h->control;
    int r = 0;
    while (r < b->size && slot_of(b, r)->address != 0) r++;
    return r < b->size && p->n_from == 1 &&
           is_within(p->total, h->large->piped[is_short(p)][p->kind]);
}

/* How an operation stands for which no rank is waited any more. */
static int end_of(control_block_t *b) {
    if (broken_by(b) >= 0) return BROKEN;
    b->ended = b->sequence;
    return ALL_DONE;
}

static int reduce_large(hot_t *h, const planned_t *p, long patience) {
    control_block_t *b = h->control;
    pipe_t *pipe = &b->pipe;
    int all = p->kind != FACTS.REDUCE_SCATTER;
    pipe->kernel = p->kernel, pipe->divisor = p->divisor;
    pipe->send = p->from[0], pipe->mine = p->n_to ? p->to[0] : NULL;
    pipe->all = all ? pipe->mine : NULL;
    memcpy(pipe->stages, h->large->stages, sizeof(char *) * (size_t)b->size);
    pipe->slice = h->large->slice_bytes / p->kernel->item / 64 * 64;
    pipe->length = p->part / p->kernel->item;
    pipe->stride = all ? 0 : pipe->length;
    pipe_begin(b);
    return pipe_go(b, patience) ? end_of(b) : IN_PIPE;
}

/* Begin an operation, and do as much of it as can be done at once; how it stands then. */
static int perform_large(hot_t *h, const planned_t *p, const print_t *print, long patience) {
    control_block_t *b = h->control;
    int is_list = p->n_from > 1 || p->n_to > 1;
    int64_t address = publish_places(h, p);
    int64_t detail = print->detail ? print->detail | is_list : 0; /* see `is_apart` in call.py */
    int agreed =
        agree(b, flight_now(), print->number, h->limit_ns, detail, address, NO_OTHER, patience) &&
        enter(b) < 0; /* not called off, as Python will find, too */
    if (agreed && is_staged(h, p) && take_copies(h, p)) return end_of(b);
    if (address == IN_STAGE) give_the_rest(p, b, copy_of(h, b->rank));
    if (!agreed) return POSTED;
    int state = DONE;
    if (p->kernel && is_all_in_heap(h))
        reduce_in_heap(h, p);
    else if (p->kernel && is_attached(h, p))
        state = reduce_in_place(h, p);
    else if (p->kernel)
        return is_piped(h, p) ? reduce_large(h, p, patience) : POSTED;
    else if (fetch_all(h, p))
        state = POSTED;
    if (state != DONE) return state;
    take_step(b);
    if (p->kind == FACTS.SCATTER && b->rank != p->root) return end_of(b); /* nobody reads here */
    return all_at(b, b->step, patience) ? end_of(b) : DONE;
}

/* The objects that an operation uses: those in lists, too. */
static PyObject *all_of(PyObject *const *args, Py_ssize_t n_args) {
    PyObject *all = PyTuple_New(n_args);
    for (Py_ssize_t i = 0; all && i < n_args; i++) {
        PyObject *kept = PyList_CheckExact(args[i]) ? PyList_AsTuple(args[i]) : Py_NewRef(args[i]);
        if (!kept)
            Py_CLEAR(all);
        else
            PyTuple_SetItem(all, i, kept);
    }
    return all;
}

PyObject *run_large(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                    Py_ssize_t n_args, const planned_t *p, const print_t *print, uint64_t *mark) {
    int collects = PyGC_Disable();
    PyObject *given = tuple_of(args, n_args), *kept = all_of(args, n_args);
    PyObject *result = NULL, *next = NULL;
    int state = POSTED, has_turn = take_turn(h->turn);
    if (has_turn && given && kept) {
        h->control->sequence++, h->sequence++;
        h->unfinished = 1;
        Py_BEGIN_ALLOW_THREADS
        state = perform_large(h, p, print, mark ? LITTLE_PATIENCE : PATIENCE);
        Py_END_ALLOW_THREADS
        if (state != POSTED) h->unfinished = 0;
        if (state != ALL_DONE && mark)
            next = Py_BuildValue("(OOOKiO)", group, describe, given, (unsigned long long)*mark,
                                 state, kept);
        else if (state != ALL_DONE)
            next = Py_BuildValue("(OOOi)", group, describe, given, state);
    }
    if (collects) PyGC_Enable();
    if (state == ALL_DONE)
        result = Py_NewRef(HOT.done);
    else if (next)
        result = PyObject_Call(mark ? HOT.start : HOT.end, next, NULL);
    if (next && mark && result) *mark = 0; /* the work has it */
    if (has_turn && !result && given) take_back(group, describe, given, Py_None);
    if (has_turn) give_turn_back(h->turn);
    Py_XDECREF(given), Py_XDECREF(kept), Py_XDECREF(next);
    return result;
}

int is_soon_staged(const hot_t *h, const planned_t *p) {
    enum { UP_TO = 64 << 10 };
    return p->total <= UP_TO && is_staged(h, p) && !is_in_heap(h, p);
}

PyObject *run_staged(hot_t *h, PyObject *group, PyObject *describe, PyObject *const *args,
                     Py_ssize_t n_args, const planned_t *p, const print_t *print) {
    h->control->sequence++, h->sequence++;
    int state = perform_large(h, p, print, HOT.spins);
    if (state == ALL_DONE) return Py_NewRef(HOT.done);
    h->unfinished = state == POSTED;
    return end_in_turn(h, group, describe, args, n_args, state);
}

/* ---- learning when */

void forget_large(hot_t *h) {
    if (h->large) Py_DECREF(h->large->node);
    free(h->large);
    h->large = NULL;
}

static const range_t NO_RANGE = {1, 0};

static int is_kind(int kind) {
    if (kind >= 0 && kind < MOST_KINDS) return 1;
    PyErr_SetString(PyExc_ValueError, "learn_large: a kind is a number below 64");
    return 0;
}

static int read_range(PyObject *object, range_t *range) {
    *range = NO_RANGE;
    return object == Py_None || PyArg_ParseTuple(object, "nn", &range->low, &range->high);
}

/* learn_large(node, its rights, processes, heaps, bytes of this rank's, stages, bytes of a slice,
 * stages of copies, their bytes, for each kind of operation its number and the ranges of bytes (None:
 * none) of ordinary arrays that are read where they lie, of those in short numbers, of what is
 * reduced in the pipe, of the same in short numbers, of what is copied to staging memory, and of
 * arrays in the heap that are read where they are) */
PyObject *hot_learn_large(PyObject *self, PyObject *args) {
    hot_t *h = (hot_t *)self;
    PyObject *node, *processes, *heaps, *stages, *copies, *ways;
    Py_ssize_t heap_bytes, slice, copy_bytes;
    uintptr_t numbers[MOST];
    long long rights;
    if (!PyArg_ParseTuple(args, "OLO!O!nO!nO!nO!", &node, &rights, &PyTuple_Type, &processes,
                          &PyTuple_Type, &heaps, &heap_bytes, &PyTuple_Type, &stages, &slice,
                          &PyTuple_Type, &copies, &copy_bytes, &PyTuple_Type, &ways))
        return NULL;
    int size = h->control->size;
    if (PyTuple_Size(processes) != size || PyTuple_Size(heaps) != size ||
        PyTuple_Size(stages) != size || PyTuple_Size(copies) != size) {
        PyErr_SetString(PyExc_ValueError, "learn_large: one of each for each rank or kind");
        return NULL;
    }
    struct large *l = calloc(1, sizeof *l);
    if (!l) return PyErr_NoMemory();
    int fine = read_addresses(processes, numbers) == size;
    for (int r = 0; fine && r < size; r++) l->pids[r] = (pid_t)numbers[r];
    fine = fine && read_addresses(heaps, numbers) == size;
    for (int r = 0; fine && r < size; r++) l->heaps[r] = (char *)numbers[r];
    fine = fine && read_addresses(stages, numbers) == size;
    for (int r = 0; fine && r < size; r++) l->stages[r] = (char *)numbers[r];
    fine = fine && read_addresses(copies, numbers) == size;
    for (int r = 0; fine && r < size; r++) l->copies[r] = (char *)numbers[r];
    for (int k = 0; k < MOST_KINDS; k++)
        l->direct[k] = l->staged[k] = l->attached[0][k] = l->attached[1][k] = l->piped[0][k] =
            l->piped[1][k] = NO_RANGE;
    for (Py_ssize_t i = 0; fine && i < PyTuple_Size(ways); i++) {
        PyObject *at[2], *in[2], *staged, *direct;
        int k;
        fine = PyArg_ParseTuple(PyTuple_GetItem(ways, i), "iOOOOOO", &k, &at[0], &at[1], &in[0],
                                &in[1], &staged, &direct) &&
               is_kind(k) && read_range(staged, &l->staged[k]) && read_range(direct, &l->direct[k]);
        for (int s = 0; fine && s < 2; s++)
            fine = read_range(at[s], &l->attached[s][k]) && read_range(in[s], &l->piped[s][k]);
    }
    if (!fine) return free(l), NULL;
    l->node = Py_NewRef(node), l->rights = rights, l->heap_bytes = (size_t)heap_bytes,
    l->slice_bytes = (size_t)slice, l->copy_bytes = (size_t)copy_bytes;
    forget_large(h);
    h->large = l;
    Py_RETURN_NONE;
}
