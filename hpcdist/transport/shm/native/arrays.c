/* Blocks of a segment that the ranks of a node share, as memory of NumPy's arrays; `shm/blocks.py`
 * holds the first half in Python, `shm/ordinary.py` says what the second is for.
 *
 * `Blocks` maps a segment and hands out runs of it: to `empty`, whose arrays hold theirs by a `Run`,
 * and to ordinary arrays. The latter come through NumPy's handlers of array memory (NEP 49): a
 * handler of our own, which a thread makes its current one, or NumPy's default one, whose
 * functions `share_all` replaces. Memory is told by its address, so both free what either made.
 *
 * NumPy frees memory late: when the interpreter ends, on other threads, in forked children. So
 * nothing here calls Python while it allocates or frees, a lock of its own guards the tables, and
 * a segment stays mapped until its last block is free.
 *
 * NumPy's functions are reached through its table `_ARRAY_API`, whose places are part of its
 * binary interface since 1.22. So this is built without NumPy, and works with any later one.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "regions.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- ordinary arrays: NumPy's handlers of array memory, as they are laid out since 1.22 */

typedef struct {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t n, size_t size);
    void *(*realloc)(void *ctx, void *pointer, size_t size);
    void (*free)(void *ctx, void *pointer, size_t size);
} allocator_t;

typedef struct {
    char name[127];
    uint8_t version;
    allocator_t allocator;
} handler_t;

static allocator_t USUAL; /* what NumPy's default handler does by itself */
static unsigned long long ASKED;

static run_t *made_at(region_t *g, size_t begin) { return &g->made[begin / GRANULE]; }

/* A block of the heap for an ordinary array, or NULL; the bytes from `*fresh` on are zeros. */
static char *take_ordinary(size_t size, size_t *fresh) {
    ASKED++;
    if (size < GRANULE || !__atomic_load_n(&SERVING, __ATOMIC_RELAXED)) return NULL;
    char *block = NULL;
    pthread_mutex_lock(&LOCK);
    region_t *g = SERVING;
    if (g && !g->starved && size <= g->capacity) {
        size_t length = up(size, PAGE), touched = g->touched, begin;
        g->starved = take(g, length, PAGE, &begin) != 0;
        if (begin != SIZE_MAX && !g->starved) {
            *made_at(g, begin) = (run_t){begin, length};
            g->ordinary++;
            *fresh = touched <= begin ? 0 : touched - begin;
            block = g->base + begin;
        }
    }
    pthread_mutex_unlock(&LOCK);
    return block;
}

/* The segment in which a pointer lies, and the block there; NULL and no lock for other memory. */
static region_t *lock_region_of(const void *pointer, run_t **block) {
    uintptr_t at = (uintptr_t)pointer;
    if (at < __atomic_load_n(&LOWEST, __ATOMIC_RELAXED) ||
        at >= __atomic_load_n(&HIGHEST, __ATOMIC_RELAXED))
        return NULL;
    pthread_mutex_lock(&LOCK);
    region_t *g = region_of(pointer);
    if (!g) {
        pthread_mutex_unlock(&LOCK);
        return NULL;
    }
    *block = made_at(g, (size_t)((const char *)pointer - g->base));
    return g;
}

static void *array_malloc(void *ctx, size_t size) {
    (void)ctx;
    size_t fresh;
    char *block = take_ordinary(size, &fresh);
    return block ? block : USUAL.malloc(USUAL.ctx, size);
}

static void *array_calloc(void *ctx, size_t n, size_t each) {
    (void)ctx;
    size_t size, fresh;
    char *block = __builtin_mul_overflow(n, each, &size) ? NULL : take_ordinary(size, &fresh);
    if (!block) return USUAL.calloc(USUAL.ctx, n, each);
    memset(block, 0, fresh < size ? fresh : size);
    return block;
}

static void free_in(region_t *g, run_t *block) {
    size_t begin = block->begin, length = block->length;
    block->length = 0;
    g->ordinary--;
    put_back(g, begin, length);
    trim(g);
    end_if_unused(g);
}

static void array_free(void *ctx, void *pointer, size_t size) {
    (void)ctx;
    run_t *block;
    region_t *g = lock_region_of(pointer, &block);
    if (!g) {
        USUAL.free(USUAL.ctx, pointer, size);
        return;
    }
    free_in(g, block);
    pthread_mutex_unlock(&LOCK);
}

/* Let a block have another length where it lies, if it can. */
static int resize_in(region_t *g, run_t *block, size_t size) {
    size_t length = up(size < GRANULE ? GRANULE : size, PAGE);
    size_t end = block->begin + block->length;
    if (length == block->length) return 1;
    if (!g->open || g->retired || length > g->capacity) return size <= block->length;
    if (length < block->length) {
        give(g, block->begin + length, block->length - length);
    } else {
        size_t at = runs_before(g, end), more = length - block->length;
        if (at == 0 || g->runs[at - 1].begin != end || g->runs[at - 1].length < more) return 0;
        run_t *run = &g->runs[at - 1];
        run->begin += more, run->length -= more;
        if (run->length == 0) remove_run(g, at - 1);
        if (end + more > g->touched) g->touched = end + more;
    }
    g->used = g->used - block->length + length;
    block->length = length;
    trim(g);
    return 1;
}

static void *array_realloc(void *ctx, void *pointer, size_t size) {
    run_t *block;
    region_t *g = lock_region_of(pointer, &block);
    if (!g) return USUAL.realloc(USUAL.ctx, pointer, size);
    size_t before = block->length;
    int done = before && resize_in(g, block, size);
    pthread_mutex_unlock(&LOCK);
    if (done) return pointer;
    void *other = array_malloc(ctx, size);
    if (!other) return NULL;
    memcpy(other, pointer, before < size ? before : size);
    array_free(ctx, pointer, before);
    return other;
}

static handler_t OURS = {
    "hpcdist", 1, {NULL, array_malloc, array_calloc, array_realloc, array_free}};
/* Makes arrays as NumPy does by itself. What the other has made must be freed by it, too, where it
 * stands in for NumPy's default one. */
static handler_t OTHERS = {"hpcdist_ordinary", 1, {NULL, NULL, NULL, array_realloc, array_free}};

/* ---- NumPy */

enum {
    ARRAY_TYPE = 2,
    DESCR_FROM_TYPE = 45,
    NEW_FROM_DESCR = 94,
    FEATURE_VERSION = 211,
    SET_BASE_OBJECT = 282,
    SET_HANDLER = 304,
    DEFAULT_HANDLER = 306
}; /* places of the table */
enum { HAS_HANDLERS = 0xf, UBYTE = 2, CARRAY = 0x501 };

static struct {
    PyTypeObject *array;
    PyObject *(*descr_from_type)(int);
    PyObject *(*new_from_descr)(PyTypeObject *, PyObject *, int, const Py_ssize_t *,
                                const Py_ssize_t *, void *, int, PyObject *);
    int (*set_base_object)(PyObject *, PyObject *);
    PyObject *(*set_handler)(PyObject *);
    handler_t *usual;
} NUMPY;

static int meet_numpy(void) {
    PyObject *module = PyImport_ImportModule("numpy._core._multiarray_umath");
    if (!module) { /* NumPy 1 */
        PyErr_Clear();
        module = PyImport_ImportModule("numpy.core._multiarray_umath");
    }
    PyObject *table = module ? PyObject_GetAttrString(module, "_ARRAY_API") : NULL;
    void **api = table ? PyCapsule_GetPointer(table, NULL) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(table); /* NumPy's module keeps it */
    if (!api) return -1;
    if (((unsigned (*)(void))api[FEATURE_VERSION])() < HAS_HANDLERS) {
        PyErr_SetString(PyExc_ImportError, "NumPy 1.22 or later is needed");
        return -1;
    }
    NUMPY.array = (PyTypeObject *)api[ARRAY_TYPE];
    NUMPY.descr_from_type = (PyObject * (*)(int)) api[DESCR_FROM_TYPE];
    NUMPY.new_from_descr =
        (PyObject * (*)(PyTypeObject *, PyObject *, int, const Py_ssize_t *, const Py_ssize_t *,
                        void *, int, PyObject *)) api[NEW_FROM_DESCR];
    NUMPY.set_base_object = (int (*)(PyObject *, PyObject *))api[SET_BASE_OBJECT];
    NUMPY.set_handler = (PyObject * (*)(PyObject *)) api[SET_HANDLER];
    PyObject *usual = *(PyObject **)api[DEFAULT_HANDLER];
    NUMPY.usual = PyCapsule_GetPointer(usual, "mem_handler");
    if (!NUMPY.usual) return -1;
    USUAL = NUMPY.usual->allocator;
    OTHERS.allocator.ctx = USUAL.ctx;
    OTHERS.allocator.malloc = USUAL.malloc, OTHERS.allocator.calloc = USUAL.calloc;
    return 0;
}

/* An array of `nbytes` bytes that keeps `base`, of which a reference is taken over. */
static PyObject *bytes_at(char *address, size_t nbytes, PyObject *base) {
    Py_ssize_t size = (Py_ssize_t)nbytes;
    PyObject *array = NUMPY.new_from_descr(NUMPY.array, NUMPY.descr_from_type(UBYTE), 1, &size,
                                           NULL, address, CARRAY, NULL);
    if (!array) {
        Py_DECREF(base);
        return NULL;
    }
    if (NUMPY.set_base_object(array, base) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

/* ---- Run: what an array of `empty` keeps */

typedef struct {
    PyObject_HEAD
    region_t *region;
    size_t begin, length;
} run_object_t;

static PyTypeObject *RUN;

static void run_dealloc(PyObject *self) {
    run_object_t *run = (run_object_t *)self;
    region_t *g = run->region;
    PyTypeObject *type = Py_TYPE(self);
    if (g) {
        pthread_mutex_lock(&LOCK);
        put_back(g, run->begin, run->length);
        end_if_unused(g);
        pthread_mutex_unlock(&LOCK);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot RUN_SLOTS[] = {{Py_tp_dealloc, run_dealloc}, {0, NULL}};
static PyType_Spec RUN_SPEC = {"hpcdist.transport._arrays.Run", sizeof(run_object_t), 0,
                               Py_TPFLAGS_DEFAULT, RUN_SLOTS};

/* ---- Blocks */

typedef struct {
    PyObject_HEAD
    region_t *region;
} blocks_t;

static int blocks_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    blocks_t *b = (blocks_t *)self;
    Py_ssize_t capacity;
    int descriptor;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "in", &descriptor, &capacity)) return -1;
    if (capacity <= 0 || b->region) {
        PyErr_SetString(PyExc_ValueError, "Blocks(descriptor, capacity): a segment, once");
        return -1;
    }
    region_t *g = calloc(1, sizeof *g);
    if (!g) return PyErr_NoMemory(), -1;
    g->capacity = (size_t)capacity;
    g->made = calloc(g->capacity / GRANULE + 1, sizeof *g->made);
    g->descriptor = descriptor;
    int protection = PROT_READ | PROT_WRITE;
    void *base = MAP_FAILED;
    if (g->made) base = mmap(NULL, g->capacity, protection, MAP_SHARED, descriptor, 0);
    if (base == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        free(g->made), free(g);
        return -1;
    }
    g->base = base, g->open = g->held = 1;
    pthread_mutex_lock(&LOCK);
    g->next = REGIONS;
    REGIONS = g;
    bound();
    pthread_mutex_unlock(&LOCK);
    b->region = g;
    return 0;
}

static void blocks_dealloc(PyObject *self) {
    region_t *g = ((blocks_t *)self)->region;
    PyTypeObject *type = Py_TYPE(self);
    if (g) {
        pthread_mutex_lock(&LOCK);
        close_region(g);
        g->held = 0;
        end_if_unused(g);
        pthread_mutex_unlock(&LOCK);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *blocks_empty(PyObject *self, PyObject *nbytes_) {
    region_t *g = ((blocks_t *)self)->region;
    size_t nbytes = PyLong_AsSize_t(nbytes_), begin;
    if (PyErr_Occurred() || !g) return NULL;
    if (nbytes == 0 || nbytes > g->capacity) Py_RETURN_NONE;
    run_object_t *run = (run_object_t *)PyType_GenericAlloc(RUN, 0);
    if (!run) return NULL;
    size_t length = up(nbytes, LINE);
    pthread_mutex_lock(&LOCK);
    int error = take(g, length, LINE, &begin);
    if (!error) g->starved = 0;
    pthread_mutex_unlock(&LOCK);
    if (error || begin == SIZE_MAX) {
        Py_DECREF((PyObject *)run);
        if (!error) Py_RETURN_NONE;
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    run->region = g, run->begin = begin, run->length = length;
    return bytes_at(g->base + begin, nbytes, (PyObject *)run);
}

static PyObject *blocks_memory(PyObject *self, PyObject *none) {
    region_t *g = ((blocks_t *)self)->region;
    (void)none;
    Py_INCREF(self);
    return bytes_at(g->base, g->capacity, self);
}

static PyObject *set_retired(PyObject *self, int retired) {
    pthread_mutex_lock(&LOCK);
    ((blocks_t *)self)->region->retired = retired;
    pthread_mutex_unlock(&LOCK);
    Py_RETURN_NONE;
}

static PyObject *blocks_retire(PyObject *self, PyObject *none) {
    (void)none;
    return set_retired(self, 1);
}

static PyObject *blocks_revive(PyObject *self, PyObject *none) {
    (void)none;
    return set_retired(self, 0);
}

static PyObject *blocks_serve(PyObject *self, PyObject *none) {
    region_t *g = ((blocks_t *)self)->region;
    (void)none;
    pthread_mutex_lock(&LOCK);
    if (g->open) SERVING = g;
    pthread_mutex_unlock(&LOCK);
    Py_RETURN_NONE;
}

static PyObject *blocks_close(PyObject *self, PyObject *none) {
    (void)none;
    pthread_mutex_lock(&LOCK);
    close_region(((blocks_t *)self)->region);
    pthread_mutex_unlock(&LOCK);
    Py_RETURN_NONE;
}

static PyObject *blocks_used(PyObject *self, void *closure) {
    (void)closure;
    pthread_mutex_lock(&LOCK);
    size_t used = ((blocks_t *)self)->region->used;
    pthread_mutex_unlock(&LOCK);
    return PyLong_FromSize_t(used);
}

static PyMethodDef BLOCKS_METHODS[] = {
    {"empty", blocks_empty, METH_O, NULL},
    {"memory", blocks_memory, METH_NOARGS, NULL},
    {"retire", blocks_retire, METH_NOARGS, NULL},
    {"revive", blocks_revive, METH_NOARGS, NULL},
    {"serve", blocks_serve, METH_NOARGS, NULL},
    {"close", blocks_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyObject *blocks_is_open(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(((blocks_t *)self)->region->open);
}

static PyGetSetDef BLOCKS_GETSET[] = {{"used", blocks_used, NULL, NULL, NULL},
                                      {"is_open", blocks_is_open, NULL, NULL, NULL},
                                      {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot BLOCKS_SLOTS[] = {
    {Py_tp_new, PyType_GenericNew},  {Py_tp_init, blocks_init},     {Py_tp_dealloc, blocks_dealloc},
    {Py_tp_methods, BLOCKS_METHODS}, {Py_tp_getset, BLOCKS_GETSET}, {0, NULL},
};
static PyType_Spec BLOCKS_SPEC = {"hpcdist.transport._arrays.Blocks", sizeof(blocks_t), 0,
                                  Py_TPFLAGS_DEFAULT, BLOCKS_SLOTS};

/* ---- which handler */

/* Write to NumPy's default handler. The system does it, which tells where it is read-only. */
static int write_usual(const allocator_t *allocator) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return -1;
    ssize_t size = (ssize_t)sizeof *allocator, written = write(ends[1], allocator, (size_t)size);
    if (written == size) written = read(ends[0], &NUMPY.usual->allocator, (size_t)size);
    int error = errno;
    close(ends[0]), close(ends[1]);
    errno = error;
    return written == size ? 0 : -1;
}

/* share_all(on): let NumPy's default handler, hence every thread, use the heap or not. */
static PyObject *share_all(PyObject *self, PyObject *on_) {
    (void)self;
    int on = PyObject_IsTrue(on_), was = NUMPY.usual->allocator.malloc == array_malloc;
    if (on < 0) return NULL;
    if (on != was && write_usual(on ? &OURS.allocator : &OTHERS.allocator) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(was);
}

/* set_handler(handler): make it the current one of this context; return the one before. */
static PyObject *set_handler(PyObject *self, PyObject *handler) {
    (void)self;
    return NUMPY.set_handler(handler);
}

/* asked(): how often arrays have been made or enlarged by our functions. */
static PyObject *asked(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromUnsignedLongLong(ASKED);
}

static PyMethodDef FUNCTIONS[] = {
    {"share_all", share_all, METH_O, NULL},
    {"set_handler", set_handler, METH_O, NULL},
    {"asked", asked, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_arrays", NULL, -1, FUNCTIONS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__arrays(void) {
    PAGE = (size_t)sysconf(_SC_PAGESIZE);
    if (meet_numpy() < 0) return NULL;
    if (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) != 0)
        return PyErr_NoMemory();
    PyObject *module = PyModule_Create(&MODULE), *blocks = PyType_FromSpec(&BLOCKS_SPEC);
    PyObject *handler = PyCapsule_New(&OURS, "mem_handler", NULL);
    PyObject *others = PyCapsule_New(&OTHERS, "mem_handler", NULL);
    RUN = (PyTypeObject *)PyType_FromSpec(&RUN_SPEC);
    if (!module || !blocks || !handler || !others || !RUN) return NULL;
    if (PyModule_AddObject(module, "Blocks", blocks) < 0) return NULL;
    if (PyModule_AddObject(module, "handler", handler) < 0) return NULL;
    if (PyModule_AddObject(module, "others", others) < 0) return NULL;
    if (PyModule_AddIntConstant(module, "LEAST", GRANULE) < 0) return NULL;
    return module;
}
