/* Rows by ids, as this package has them: `slots.py`, `merging.py`, `slabs.py`, `shared.py` and
 * `accessors.py` say what each function does, and do the same in Python. */
#ifndef HPCDIST_ROWS_H
#define HPCDIST_ROWS_H
#include "../../native/compiled.h"

/* ---- arguments */

/* Open `n` arguments as buffers, those whose bit is set in `written` to be written; -1: an error
 * is set, and none is open. */
static inline int open_buffers(PyObject *const *args, int n, unsigned written, Py_buffer *views) {
    for (int i = 0; i < n; i++) {
        if (PyObject_GetBuffer(args[i], &views[i],
                               written >> i & 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) {
            while (i-- > 0) PyBuffer_Release(&views[i]);
            return -1;
        }
    }
    return 0;
}

/* Close them again; the result of the call, or NULL and an error if something did not fit. */
static inline PyObject *close_buffers(Py_buffer *views, int n, const char *wrong,
                                      Py_ssize_t result) {
    for (int i = 0; i < n; i++) PyBuffer_Release(&views[i]);
    if (!wrong) return PyLong_FromSsize_t(result);
    PyErr_SetString(PyExc_ValueError, wrong);
    return NULL;
}

static inline size_t words_in(const Py_buffer *view) { return (size_t)view->len / sizeof(int64_t); }

/* Return whether all of `n` numbers are from `least` on and below `limit`. */
int all_within(const int64_t *numbers, size_t n, int64_t least, int64_t limit);

/* ---- tables of slots, by ids */

/* The finalizer of splitmix64. */
static inline uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

enum { BATCH = 256 }; /* look-ups whose misses of the cache overlap, as no step waits for one */
enum { FREE_SLOT = -1, NO_SLOT = -1 };

/* A table: `index` has a power of two of numbers, of 4 or 8 bytes each; see `Slots`. Of a hash the
 * upper bits are the place, and those after them the tag. */
typedef struct {
    void *index;
    size_t size, item;
    int place_shift, low_shift, tag_shift;
    int64_t slot, tag; /* the bits of a number that are the slot, and those that are the tag */
    const int64_t *ids;
    size_t n_ids;
    uint64_t key;
} slots_t;

static inline slots_t slots_of(const void *index, size_t size, size_t item, const int64_t *ids,
                               size_t n_ids, uint64_t key) {
    int bits = __builtin_ctzll(size), most = (int)item * 8 - 1;
    int64_t slot = (int64_t)(((uint64_t)1 << (bits < most ? bits : most)) - 1);
    int64_t tag = (int64_t)(((uint64_t)1 << most) - 1) & ~slot;
    return (slots_t){(void *)index, size, item, 64 - bits, 64 - most, bits,
                     slot,          tag,  ids,  n_ids,     key};
}

static inline int64_t number_at(const slots_t *t, size_t place) {
    return t->item == sizeof(int32_t) ? ((const int32_t *)t->index)[place]
                                      : ((const int64_t *)t->index)[place];
}

static inline void put_number(const slots_t *t, size_t place, int64_t number) {
    if (t->item == sizeof(int32_t))
        ((int32_t *)t->index)[place] = (int32_t)number;
    else
        ((int64_t *)t->index)[place] = number;
}

static inline size_t home_of(const slots_t *t, uint64_t hash) {
    return (size_t)(hash >> t->place_shift);
}

static inline int64_t tag_of(const slots_t *t, uint64_t hash) {
    return (int64_t)(hash >> t->low_shift << t->tag_shift) & t->tag;
}

/* Return the hash of an id, of which `mixed_id` is what its name says, and ask for its place. */
static inline uint64_t begin_search(const slots_t *t, uint64_t mixed_id) {
    uint64_t hash = mixed_id * t->key;
    __builtin_prefetch((const char *)t->index + home_of(t, hash) * t->item);
    return hash;
}

/* Return the first slot of this tag whose id is the wanted one, or, without `wanted`, may be it;
 * NO_SLOT: there is none. */
static inline int64_t seek_slot(const slots_t *t, uint64_t hash, const int64_t *wanted) {
    int64_t tag = tag_of(t, hash), number;
    size_t place = home_of(t, hash), mask = t->size - 1;
    for (size_t left = t->size; left && (number = number_at(t, place)) != FREE_SLOT; left--) {
        int64_t slot = number & t->slot;
        if ((number & ~t->slot) == tag && (size_t)slot < t->n_ids &&
            (!wanted || t->ids[slot] == *wanted))
            return slot;
        place = (place + 1) & mask;
    }
    return NO_SLOT;
}

/* ---- slabs of rows */

/* Rows between an array and slabs of `1 << shift` rows each. */
typedef struct {
    char *rows;
    const uintptr_t *slabs;
    const int64_t *slots;
    size_t n, row;
    int shift;
} slabs_t;

static inline char *row_at(const slabs_t *s, int64_t slot) {
    size_t place = (size_t)slot & (((size_t)1 << s->shift) - 1);
    return (char *)s->slabs[slot >> s->shift] + place * s->row;
}

/* Take a shift over; 0 if it is none, or `nbytes` are too few for the rows. */
static inline int are_slabs(slabs_t *s, long shift, size_t slabs, size_t nbytes) {
    s->shift = (int)shift;
    return shift >= 0 && shift <= 40 && slabs <= (size_t)1 << 22 &&
           (!s->row || s->n <= nbytes / s->row);
}

/* `memcpy` for a few hundred bytes: all of 128 are asked for before the first of them is needed. */
static inline void copy_row(char *restrict to, const char *restrict from, size_t nbytes) {
    typedef char vec __attribute__((vector_size(32), aligned(1), may_alias));
    enum { V = sizeof(vec) };
    size_t i = 0;
    for (; i + 4 * V <= nbytes; i += 4 * V) {
        vec a = *(const vec *)(from + i), b = *(const vec *)(from + i + V);
        vec c = *(const vec *)(from + i + 2 * V), d = *(const vec *)(from + i + 3 * V);
        *(vec *)(to + i) = a, *(vec *)(to + i + V) = b;
        *(vec *)(to + i + 2 * V) = c, *(vec *)(to + i + 3 * V) = d;
    }
    for (; i + V <= nbytes; i += V) *(vec *)(to + i) = *(const vec *)(from + i);
    if (i < nbytes) memcpy(to + i, from + i, nbytes - i);
}

enum { ROWS_AHEAD = 16 }; /* the first line of a row is enough: the processor goes on by itself */

enum { AHEAD = 8, MOST_LINES = 16 };

/* Ask for the first KiB of a row that will be used soon. */
static inline void prefetch_row(const char *row, size_t nbytes) {
    for (size_t i = 0; i < nbytes && i < MOST_LINES * LINE; i += LINE) __builtin_prefetch(row + i);
}

/* ---- what the module has */

int add_merging(PyObject *module);
int add_slots(PyObject *module);
int add_slabs(PyObject *module);
int add_reading(PyObject *module);
int add_rules(PyObject *module);

#endif
