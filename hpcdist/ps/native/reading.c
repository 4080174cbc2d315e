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

/* A look-up under way. */
typedef struct {
    const window_t *window; /* NULL: nothing is to be read */
    uint64_t hash;
    const int64_t *id; /* that of the row which may be the wanted one; NULL: there is none */
    const char *row;
} search_t;

/* So many look-ups later their next step is made: what it reads is on its way meanwhile. */
enum { SEEK_AFTER = 16, COPY_AFTER = 24, UNDER_WAY = 32 };

static inline search_t begin_read(const reading_t *r, size_t i) {
    uint64_t hash = mixed((uint64_t)r->ids[i]);
    window_t *w = window_of(r, hash);
    if (!w->header && r->states[i] == UNREAD) r->states[i] = ABSENT;
    if (!w->usable || r->states[i] != UNREAD) return (search_t){NULL, 0, NULL, NULL};
    w->touched = 1;
    return (search_t){w, begin_search(&w->slots, hash), NULL, NULL};
}

static inline void seek_row(search_t *s, const int64_t *wanted) {
    int64_t slot = seek_slot(&s->window->slots, s->hash, wanted);
    s->id = slot == NO_SLOT ? NULL : s->window->slots.ids + slot;
    s->row = slot == NO_SLOT ? NULL : row_at(&s->window->rows, slot);
    __builtin_prefetch(s->id);
    __builtin_prefetch(s->row);
}

static inline void end_read(const reading_t *r, size_t i, search_t *s) {
    if (s->id && *s->id != r->ids[i]) seek_row(s, r->ids + i);
    r->states[i] = s->id ? READ : ABSENT;
    if (s->id) copy_row(r->rows + i * r->row, s->row, r->row);
}

/* Read what is unread, of those tables that nobody changes. */
CLONES static void read_all(const reading_t *r) {
    search_t under_way[UNDER_WAY];
    for (size_t i = 0; i < r->n + COPY_AFTER; i++) {
        search_t *seek = under_way + (i - SEEK_AFTER) % UNDER_WAY;
        search_t *copy = under_way + (i - COPY_AFTER) % UNDER_WAY;
        if (i < r->n) under_way[i % UNDER_WAY] = begin_read(r, i);
        if (i >= SEEK_AFTER && i - SEEK_AFTER < r->n && seek->window) seek_row(seek, NULL);
        if (i >= COPY_AFTER && copy->window) end_read(r, i - COPY_AFTER, copy);
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

/* Open the tables, and read of them; return how many rows are not there. */
static size_t read_tables(const reading_t *r, const view_t *views) {
    for (size_t s = 0; s < r->servers; s++) open_window(&r->windows[s], views + s, r->row);
    read_all(r);
    return count_unread(r);
}

static PyObject *no_memory(Py_buffer *views, int n) {
    Py_XDECREF(close_buffers(views, n, NULL, 0));
    return PyErr_NoMemory();
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
    if (!windows) return no_memory(views, 4);
    reading_t r = {windows,
                   servers,
                   views[1].buf,
                   views[2].buf,
                   views[3].buf,
                   n,
                   n ? (size_t)views[3].len / n : 0};
    Py_BEGIN_ALLOW_THREADS
    unread = read_tables(&r, views[0].buf);
    Py_END_ALLOW_THREADS
    free(windows);
    return close_buffers(views, 4, NULL, (Py_ssize_t)unread);
}

/* pull_rows(index, ids, slabs, wanted, rows, item, key, shift) -> how many ids have no row, of a
 * table that nobody changes meanwhile; the rows of the others are copied. */
static PyObject *py_pull_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    static const int64_t still[] = {[CHANGES] = 0, [GENERATION] = 0};
    Py_buffer views[5];
    window_t w;
    if (n_args != 8) {
        PyErr_SetString(PyExc_TypeError,
                        "pull_rows(index, ids, slabs, wanted, rows, item, key, shift)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[5]), unread = 0;
    uint64_t key = PyLong_AsUnsignedLongLong(args[6]);
    long shift = PyLong_AsLong(args[7]);
    if (PyErr_Occurred() || open_buffers(args, 5, 0x10, views) < 0) return NULL;
    size_t n = words_in(&views[3]);
    view_t view = {(int64_t)(uintptr_t)still,
                   0,
                   (int64_t)(uintptr_t)views[0].buf,
                   item ? views[0].len / (int64_t)item : 0,
                   (int64_t)item,
                   (int64_t)(uintptr_t)views[1].buf,
                   (int64_t)words_in(&views[1]),
                   (int64_t)key,
                   (int64_t)(uintptr_t)views[2].buf,
                   views[2].len / (int64_t)sizeof(uintptr_t),
                   shift};
    unsigned char *states = calloc(n + 1, 1);
    if (!states) return no_memory(views, 5);
    if (!are_views(&view, 1) || (n && (size_t)views[4].len % n)) {
        free(states);
        return close_buffers(views, 5, "pull_rows: the arrays do not fit", 0);
    }
    reading_t r = {&w, 1, views[3].buf, states, views[4].buf, n, n ? (size_t)views[4].len / n : 0};
    Py_BEGIN_ALLOW_THREADS
    unread = read_tables(&r, &view);
    Py_END_ALLOW_THREADS
    free(states);
    return close_buffers(views, 5, NULL, (Py_ssize_t)unread);
}

static const number_t NUMBERS_HERE[] = {
    {"CHANGES", CHANGES},
    {"GENERATION", GENERATION},
    {"READ", READ},
    {"VIEW", sizeof(view_t) / sizeof(int64_t)},
};

static PyMethodDef FUNCTIONS[] = {
    FAST("read_rows", py_read_rows),
    FAST("pull_rows", py_pull_rows),
    {NULL, NULL, 0, NULL},
};

int add_reading(PyObject *module) {
    if (PyModule_AddFunctions(module, FUNCTIONS) < 0) return -1;
    return add_numbers(module, NUMBERS_HERE, sizeof NUMBERS_HERE / sizeof *NUMBERS_HERE);
}
