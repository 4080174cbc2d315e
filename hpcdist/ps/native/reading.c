/* Rows read past their owners: see [Note: reading past] in `ps/shared.py` */
#include "rows.h"

/* One table, as another process reads it: a line of the array that `shared.py` calls views. */
typedef struct {
    int64_t header; /* an address; 0: nobody can read this table */
    int64_t generation, index, index_size, index_item, ids, n_ids, key, slabs, n_slabs, shift;
} view_t;

typedef struct {
    slots_t slots;
    slabs_t rows;
    const int64_t *header;
    int64_t count, generation;
    int usable, touched;
} window_t;

enum { CHANGES, GENERATION };
enum { UNREAD, READ, ABSENT }; /* an id: not looked for yet, its row is copied, it has none */

/* Look up where the parts of a table are, and whether nobody changes it now. */
static void open_window(window_t *w, const view_t *v, size_t row) {
    *w = (window_t){.header = (const int64_t *)(uintptr_t)v->header};
    if (!w->header) return;
    int64_t most = v->n_slabs << v->shift;
    w->generation = v->generation;
    w->slots = slots_of((const void *)(uintptr_t)v->index, (size_t)v->index_size,
                        (size_t)v->index_item, (const int64_t *)(uintptr_t)v->ids,
                        (size_t)(v->n_ids < most ? v->n_ids : most), (uint64_t)v->key);
    w->rows = (slabs_t){
        .slabs = (const uintptr_t *)(uintptr_t)v->slabs, .row = row, .shift = (int)v->shift};
    w->count = __atomic_load_n(w->header + CHANGES, __ATOMIC_ACQUIRE);
    w->usable = w->count % 2 == 0 && w->generation >= 0 && /* below: the table has gone */
                __atomic_load_n(w->header + GENERATION, __ATOMIC_ACQUIRE) == w->generation;
}

static int is_as_it_was(const window_t *w) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(w->header + CHANGES, __ATOMIC_ACQUIRE) == w->count &&
           __atomic_load_n(w->header + GENERATION, __ATOMIC_ACQUIRE) == w->generation;
}

typedef struct {
    window_t *windows;
    size_t servers;
    const int64_t *ids;
    unsigned char *states;
    char *rows;
    size_t n, row;
} reading_t;

static inline window_t *window_of(const reading_t *r, uint64_t hash) {
    return r->windows + ((hash >> 32) * r->servers >> 32);
}

/* Where a row is that may be that of an id, and the id that it is of. */
typedef struct {
    const int64_t *id; /* NULL: there is none */
    const char *row;
} candidate_t;

static inline candidate_t candidate_of(const window_t *w, int64_t slot) {
    if (slot == NO_SLOT) return (candidate_t){NULL, NULL};
    return (candidate_t){w->slots.ids + slot, row_at(&w->rows, slot)};
}

/* Read what is unread of some ids, of those tables that nobody changes. The id of a slot and its
 * row are on their way while the rows before are copied. */
CLONES static void read_batch(const reading_t *r, size_t begin, size_t m) {
    const window_t *of[BATCH];
    uint64_t hashes[BATCH];
    candidate_t found[BATCH];
    const int64_t *ids = r->ids + begin;
    unsigned char *states = r->states + begin;
    char *to = r->rows + begin * r->row;
    for (size_t i = 0; i < m; i++) {
        uint64_t hash = mixed((uint64_t)ids[i]);
        window_t *w = window_of(r, hash);
        if (!w->header && states[i] == UNREAD) states[i] = ABSENT;
        of[i] = w->usable && states[i] == UNREAD ? w : NULL;
        if (!of[i]) continue;
        w->touched = 1;
        hashes[i] = begin_search(&w->slots, hash);
    }
    for (size_t i = 0; i < m; i++)
        found[i] = candidate_of(of[i], of[i] ? seek_slot(&of[i]->slots, hashes[i], NULL) : NO_SLOT);
    for (size_t i = 0; i < m; i++, to += r->row) {
        if (i + ROWS_AHEAD < m) {
            __builtin_prefetch(found[i + ROWS_AHEAD].id);
            __builtin_prefetch(found[i + ROWS_AHEAD].row);
        }
        if (found[i].id && *found[i].id != ids[i])
            found[i] = candidate_of(of[i], seek_slot(&of[i]->slots, hashes[i], ids + i));
        if (!of[i]) continue;
        states[i] = found[i].id ? READ : ABSENT;
        if (found[i].id) copy_row(to, found[i].row, r->row);
    }
}

/* Note as unread again what is of tables that changed meanwhile; return how many are not read. */
static size_t count_unread(const reading_t *r) {
    int all = 1;
    size_t unread = 0;
    for (size_t s = 0; s < r->servers; s++) {
        window_t *w = &r->windows[s];
        w->usable = !w->header || (w->usable && is_as_it_was(w));
        all = all && w->usable;
    }
    for (size_t i = 0; !all && i < r->n; i++) {
        const window_t *w = window_of(r, mixed((uint64_t)r->ids[i]));
        if (!w->usable && w->touched) r->states[i] = UNREAD;
    }
    for (size_t i = 0; i < r->n; i++) unread += r->states[i] != READ;
    return unread;
}

static int are_views(const view_t *views, size_t n) {
    int fit = n > 0;
    for (const view_t *v = views; fit && v < views + n; v++)
        if (v->header)
            fit = (v->index_item == 4 || v->index_item == 8) && v->index_size >= 2 &&
                  !(v->index_size & (v->index_size - 1)) && v->n_slabs >= 0 && v->shift >= 0 &&
                  v->shift <= 40 && v->n_slabs <= INT64_MAX >> v->shift;
    return fit;
}

/* read_rows(views, ids, states, rows) -> how many rows are not there. A row is copied where the
 * state of its id is UNREAD, which becomes READ, or ABSENT; or stays, where the table changes. */
static PyObject *py_read_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4];
    if (n_args != 4) {
        PyErr_SetString(PyExc_TypeError, "read_rows(views, ids, states, rows)");
        return NULL;
    }
    if (open_buffers(args, 4, 0xc, views) < 0) return NULL;
    size_t n = words_in(&views[1]), servers = (size_t)views[0].len / sizeof(view_t), unread = 0;
    if (!are_views(views[0].buf, servers) || (size_t)views[2].len != n ||
        (n && (size_t)views[3].len % n))
        return close_buffers(views, 4, "read_rows: the arrays do not fit", 0);
    window_t *windows = malloc(servers * sizeof *windows);
    if (!windows) {
        close_buffers(views, 4, "", 0);
        PyErr_Clear();
        return PyErr_NoMemory();
    }
    reading_t r = {windows,
                   servers,
                   views[1].buf,
                   views[2].buf,
                   views[3].buf,
                   n,
                   n ? (size_t)views[3].len / n : 0};
    Py_BEGIN_ALLOW_THREADS
    for (size_t s = 0; s < servers; s++)
        open_window(&windows[s], (const view_t *)views[0].buf + s, r.row);
    for (size_t i = 0; i < n; i += BATCH) read_batch(&r, i, n - i < BATCH ? n - i : BATCH);
    unread = count_unread(&r);
    Py_END_ALLOW_THREADS
    free(windows);
    return close_buffers(views, 4, NULL, (Py_ssize_t)unread);
}

static const number_t NUMBERS_HERE[] = {
    {"CHANGES", CHANGES},
    {"GENERATION", GENERATION},
    {"READ", READ},
    {"VIEW", sizeof(view_t) / sizeof(int64_t)},
};

static PyMethodDef FUNCTIONS[] = {
    FAST("read_rows", py_read_rows),
    {NULL, NULL, 0, NULL},
};

int add_reading(PyObject *module) {
    if (PyModule_AddFunctions(module, FUNCTIONS) < 0) return -1;
    return add_numbers(module, NUMBERS_HERE, sizeof NUMBERS_HERE / sizeof *NUMBERS_HERE);
}
