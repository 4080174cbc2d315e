/* The compiled part of the flight recorder, optional: `recorder.py` holds the same in Python.
 *
 * A record costs two looks at the clock and a walk up the stack to the line of the program that
 * called hpcdist. Where a line is (`code`, and the offset of its instruction) is looked up in
 * `SITES`, whether a frame is one of hpcdist's own in `CODES`: both hold the code objects they know,
 * so that an address means one object. Both are emptied when they are full.
 *
 * Two functions of CPython are no part of its stable ABI, though every CPython from 3.11 on has
 * them; they are looked up by name, and the attributes of the frame serve where they are missing.
 */
#include "../../../native/compiled.h"
#include "recorder.h"
#include <dlfcn.h>

enum {
    SLOTS = 2048,
    PROBES = 16,
    DEEPEST = 200,
    LAYOUTS = 64,
    DTYPES = 64,
    PREFIXES = 8,
    PATHS = 512
};

static uint64_t site_of_caller(void);
static flight_t FLIGHT = {NULL, NULL, NULL, 0, site_of_caller};
static Py_buffer VIEW;

/* ---- the call site */

typedef struct {
    PyObject *code;
    int lasti;
    uint32_t line, file;
    PyObject *words; /* "file:line" */
} site_t;
typedef struct {
    PyObject *code;
    int is_inside;
} code_t;

static site_t SITES[SLOTS];
static code_t CODES[SLOTS];
static PyObject *INSIDE[PREFIXES]; /* prefixes of the file names of frames that are passed over */
static int N_INSIDE;
static PyFrameObject *(*frame_back)(PyFrameObject *);
static int (*frame_lasti)(PyFrameObject *);
static PyObject *F_BACK, *F_LASTI, *CO_FILENAME, *NBYTES, *CODE, *NUMPY, *ITEMSIZE;
static uint32_t FILES[PATHS]; /* where file names are in the text */
static int N_FILES;

static size_t hashed(const void *p, size_t n) {
    return (size_t)(((((uintptr_t)p >> 4) + n * 0x51) * 0x9E3779B97F4A7C15ull) >> 50) & (SLOTS - 1);
}

static void forget_codes(void) {
    for (int i = 0; i < SLOTS; i++) {
        PyObject *code = CODES[i].code;
        CODES[i].code = NULL;
        Py_XDECREF(code);
    }
}

static void forget_sites(void) {
    for (int i = 0; i < SLOTS; i++) {
        site_t old = SITES[i];
        memset(SITES + i, 0, sizeof(site_t));
        Py_XDECREF(old.code);
        Py_XDECREF(old.words);
    }
}

/* Add to the text; returns the place, 0 where there is no room, or nothing is recorded. */
static uint32_t append(const char *words, Py_ssize_t length) {
    flight_header_t *h = FLIGHT.header;
    if (!h) return 0;
    uint64_t at = h->text_used, after = (at + (uint64_t)length + 7) & ~7ull;
    if (after > h->text_size) return 0;
    memcpy(FLIGHT.text + at, words, (size_t)length);
    __atomic_store_n(&h->text_used, after, __ATOMIC_RELEASE);
    return (uint32_t)at;
}

/* Where a file name is in the text; 0 as above. */
static uint32_t text_of(const char *words, Py_ssize_t length) {
    if (!FLIGHT.header) return 0;
    for (int i = 0; i < N_FILES; i++)
        if (strcmp(FLIGHT.text + FILES[i], words) == 0) return FILES[i];
    uint32_t at = N_FILES < PATHS ? append(words, length + 1) : 0;
    if (at) FILES[N_FILES++] = at;
    return at;
}

static int code_is_inside(PyObject *code) {
    size_t at = hashed(code, 0);
    for (size_t k = 0; k < PROBES; k++) {
        code_t *slot = CODES + ((at + k) & (SLOTS - 1));
        if (slot->code == code) return slot->is_inside;
        if (slot->code) continue;
        PyObject *name = PyObject_GetAttr(code, CO_FILENAME);
        if (!name) return -1;
        int found = 0;
        for (int i = 0; i < N_INSIDE && !found; i++)
            found = PyUnicode_Tailmatch(name, INSIDE[i], 0, PY_SSIZE_T_MAX, -1) == 1;
        Py_DECREF(name);
        Py_INCREF(code);
        slot->code = code, slot->is_inside = found;
        return found;
    }
    forget_codes();
    return code_is_inside(code);
}

static int lasti_of(PyFrameObject *frame) {
    if (frame_lasti) return frame_lasti(frame);
    PyObject *number = PyObject_GetAttr((PyObject *)frame, F_LASTI);
    int found = number ? (int)PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return found;
}

static PyFrameObject *back_of(PyFrameObject *frame) {
    if (frame_back) return frame_back(frame);
    PyObject *back = PyObject_GetAttr((PyObject *)frame, F_BACK);
    if (back == Py_None) Py_CLEAR(back);
    return (PyFrameObject *)back;
}

static site_t *site_of(PyFrameObject *frame, PyObject *code) {
    int lasti = lasti_of(frame);
    size_t at = hashed(code, (size_t)lasti);
    for (size_t k = 0; k < PROBES; k++) {
        site_t *slot = SITES + ((at + k) & (SLOTS - 1));
        if (slot->code == code && slot->lasti == lasti) return slot;
        if (slot->code) continue;
        PyObject *name = PyObject_GetAttr(code, CO_FILENAME);
        Py_ssize_t length = 0;
        const char *words = name ? PyUnicode_AsUTF8AndSize(name, &length) : NULL;
        int line = PyFrame_GetLineNumber(frame);
        PyObject *told = words ? PyUnicode_FromFormat("%U:%d", name, line) : NULL;
        if (told) {
            slot->file = text_of(words, length);
            slot->line = line < 0 ? 0 : (uint32_t)line;
            slot->lasti = lasti, slot->words = told;
            Py_INCREF(code);
            slot->code = code;
        }
        Py_XDECREF(name);
        return told ? slot : NULL;
    }
    forget_sites();
    return site_of(frame, code);
}

/* The innermost frame outside of hpcdist; NULL where there is none. */
static site_t *find_site(void) {
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    site_t *found = NULL;
    for (int depth = 0; frame && depth < DEEPEST; depth++) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        int inside = code_is_inside(code);
        if (inside == 0) found = site_of(frame, code);
        Py_DECREF(code);
        PyFrameObject *back = inside == 1 ? back_of(frame) : NULL;
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF((PyObject *)frame);
    if (!found) PyErr_Clear();
    return found;
}

static uint64_t site_of_caller(void) {
    site_t *site = find_site();
    return site ? (uint64_t)site->file << 32 | site->line : 0;
}

static PyObject *py_site(PyObject *self, PyObject *unused) {
    site_t *site = find_site();
    PyObject *words = site ? site->words : Py_None;
    Py_INCREF(words);
    return words;
}

/* skip(prefix): pass over frames whose file names begin so */
static PyObject *py_skip(PyObject *self, PyObject *prefix) {
    for (int i = 0; i < N_INSIDE; i++)
        if (PyUnicode_Compare(INSIDE[i], prefix) == 0) Py_RETURN_NONE;
    if (!PyUnicode_Check(prefix) || N_INSIDE == PREFIXES) {
        PyErr_SetString(PyExc_ValueError, "a prefix is a str, and there are few of them");
        return NULL;
    }
    Py_INCREF(prefix);
    INSIDE[N_INSIDE++] = prefix;
    forget_codes();
    Py_RETURN_NONE;
}

/* ---- what a call says of itself */

typedef struct {
    PyTypeObject *type;
    int dtype, shape, root, nbytes, tag; /* places in the tuple; -1: it has none */
} layout_t;
typedef struct {
    PyObject *dtype;
    long code, itemsize;
} dtype_t;

static layout_t LAYOUT[LAYOUTS];
static int N_LAYOUTS;
static dtype_t KNOWN[DTYPES];

/* layout(type, dtype, shape, root, nbytes, tag): where the calls of a type have what is recorded */
static PyObject *py_layout(PyObject *self, PyObject *args) {
    layout_t l;
    if (!PyArg_ParseTuple(args, "Oiiiii", &l.type, &l.dtype, &l.shape, &l.root, &l.nbytes, &l.tag))
        return NULL;
    if (N_LAYOUTS == LAYOUTS) {
        PyErr_SetString(PyExc_ValueError, "there are few types of calls");
        return NULL;
    }
    Py_INCREF((PyObject *)l.type);
    LAYOUT[N_LAYOUTS++] = l;
    Py_RETURN_NONE;
}

static dtype_t *dtype_of(PyObject *dtype) {
    size_t at = hashed(dtype, 0);
    for (size_t k = 0; k < DTYPES; k++) {
        dtype_t *slot = KNOWN + ((at + k) & (DTYPES - 1));
        if (slot->dtype == dtype) return slot;
        if (slot->dtype) continue;
        PyObject *code = PyObject_GetAttr(dtype, CODE), *numpy = PyObject_GetAttr(dtype, NUMPY);
        PyObject *size = numpy ? PyObject_GetAttr(numpy, ITEMSIZE) : NULL;
        if (code && size) {
            slot->code = PyLong_AsLong(code), slot->itemsize = PyLong_AsLong(size);
            Py_INCREF(dtype);
            slot->dtype = dtype;
        }
        Py_XDECREF(code);
        Py_XDECREF(size);
        Py_XDECREF(numpy);
        return code && size ? slot : NULL;
    }
    return NULL;
}

/* How many elements a shape has; -1 where it is one of several shapes. */
static int64_t elements_of(PyObject *shape, uint32_t *digest) {
    int64_t count = 1;
    uint32_t mixed = 2166136261u;
    Py_ssize_t n = PyTuple_Size(shape);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *dim = PyTuple_GetItem(shape, i);
        if (!PyLong_Check(dim)) return -1;
        long long size = PyLong_AsLongLong(dim);
        count *= size;
        mixed = (mixed ^ (uint32_t)size) * 16777619u;
    }
    *digest = mixed;
    return count;
}

static long long attribute_nbytes(PyObject *call) {
    PyObject *found = PyObject_GetAttr(call, NBYTES);
    long long nbytes = found ? PyLong_AsLongLong(found) : 0;
    Py_XDECREF(found);
    return nbytes;
}

/* begin(call, group, sequence, flags) -> mark: the operation `call` begins */
static PyObject *py_begin(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 4) return PyErr_Format(PyExc_TypeError, "begin takes 4 arguments");
    PyObject *call = args[0];
    uint32_t group = (uint32_t)PyLong_AsUnsignedLong(args[1]);
    if (!FLIGHT.header || !group) return PyLong_FromLong(0);
    uint32_t sequence = args[2] == Py_None ? 0 : (uint32_t)PyLong_AsLong(args[2]), digest = 0;
    unsigned flags = (unsigned)PyLong_AsLong(args[3]);
    layout_t *layout = NULL;
    for (int i = 0; i < N_LAYOUTS && !layout; i++)
        if (LAYOUT[i].type == Py_TYPE(call)) layout = LAYOUT + i;
    if (!layout) return PyLong_FromLong(0);
    long kind = PyLong_AsLong(PyTuple_GetItem(call, 0)), code = 0;
    long root = layout->root < 0 ? 0 : PyLong_AsLong(PyTuple_GetItem(call, layout->root));
    int64_t nbytes = 0;
    if (layout->dtype >= 0) {
        dtype_t *dtype = dtype_of(PyTuple_GetItem(call, layout->dtype));
        int64_t count = elements_of(PyTuple_GetItem(call, layout->shape), &digest);
        code = dtype ? dtype->code : 0;
        nbytes = !dtype || count < 0 ? attribute_nbytes(call) : count * dtype->itemsize;
    } else if (layout->nbytes >= 0) {
        nbytes = PyLong_AsLongLong(PyTuple_GetItem(call, layout->nbytes));
    } else if (layout->nbytes == -2) {
        nbytes = attribute_nbytes(call);
    }
    if (layout->tag >= 0) digest = (uint32_t)PyLong_AsLong(PyTuple_GetItem(call, layout->tag));
    if (PyErr_Occurred()) PyErr_Clear(); /* a record that is not whole must fail no operation */
    uint64_t mark = flight_begin(&FLIGHT, (unsigned)kind, (unsigned)code, (uint64_t)nbytes, group,
                                 sequence, (int32_t)root, digest, flags, 0);
    return PyLong_FromUnsignedLongLong(mark);
}

/* note(kind, group, sequence, nbytes, peer, flags) -> mark: something that is no `Call` begins */
static PyObject *py_note(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 6) return PyErr_Format(PyExc_TypeError, "note takes 6 arguments");
    long long given[6];
    for (int i = 0; i < 6; i++) given[i] = PyLong_AsLongLong(args[i]);
    if (PyErr_Occurred()) return NULL;
    uint64_t mark =
        flight_begin(&FLIGHT, (unsigned)given[0], 0, (uint64_t)given[3], (uint32_t)given[1],
                     (uint32_t)given[2], (int32_t)given[4], 0, (unsigned)given[5], 0);
    return PyLong_FromUnsignedLongLong(mark);
}

static PyObject *ended_with(PyObject *mark, unsigned state) {
    uint64_t number = PyLong_AsUnsignedLongLong(mark);
    if (PyErr_Occurred()) return NULL;
    flight_end(&FLIGHT, number, state);
    Py_RETURN_NONE;
}

static PyObject *py_end(PyObject *self, PyObject *mark) { return ended_with(mark, FLIGHT_ENDED); }
static PyObject *py_fail(PyObject *self, PyObject *mark) { return ended_with(mark, FLIGHT_FAILED); }

/* ---- the file */

/* text(bytes) -> place */
static PyObject *py_text(PyObject *self, PyObject *given) {
    char *words;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(given, &words, &length) < 0) return NULL;
    return PyLong_FromUnsignedLong(append(words, length));
}

static PyObject *py_close(PyObject *self, PyObject *unused) {
    forget_sites(); /* they are places in this text */
    N_FILES = 0;
    if (FLIGHT.header) {
        FLIGHT.header = NULL;
        PyBuffer_Release(&VIEW);
    }
    Py_RETURN_NONE;
}

/* open(memory, records_at, text_at): record there; its header says how much there is room for */
static PyObject *py_open(PyObject *self, PyObject *args) {
    PyObject *memory;
    unsigned long long records_at, text_at;
    if (!PyArg_ParseTuple(args, "OKK", &memory, &records_at, &text_at)) return NULL;
    Py_XDECREF(py_close(self, NULL));
    if (PyObject_GetBuffer(memory, &VIEW, PyBUF_WRITABLE) < 0) return NULL;
    flight_header_t *header = VIEW.buf;
    uint64_t size = (uint64_t)VIEW.len, capacity = header->capacity;
    if (size < sizeof(flight_header_t) || !capacity || capacity & (capacity - 1) ||
        records_at + capacity * sizeof(flight_record_t) > size ||
        text_at + header->text_size > size) {
        PyBuffer_Release(&VIEW);
        PyErr_SetString(PyExc_ValueError, "the memory is smaller than its header says");
        return NULL;
    }
    FLIGHT.records = (flight_record_t *)((char *)VIEW.buf + records_at);
    FLIGHT.text = (char *)VIEW.buf + text_at;
    FLIGHT.mask = capacity - 1;
    FLIGHT.header = header;
    Py_RETURN_NONE;
}

static PyMethodDef FUNCTIONS[] = {
    {"open", py_open, METH_VARARGS, NULL},
    {"close", py_close, METH_NOARGS, NULL},
    {"text", py_text, METH_O, NULL},
    {"layout", py_layout, METH_VARARGS, NULL},
    {"skip", py_skip, METH_O, NULL},
    {"site", py_site, METH_NOARGS, NULL},
    {"begin", (PyCFunction)(void (*)(void))py_begin, METH_FASTCALL, NULL},
    {"note", (PyCFunction)(void (*)(void))py_note, METH_FASTCALL, NULL},
    {"end", py_end, METH_O, NULL},
    {"fail", py_fail, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_recorder", NULL, -1, FUNCTIONS, NULL, NULL, NULL, NULL};

static const number_t LAYOUT_NUMBERS[] = {
    /* as in `layout.py` */
    {"BEGUN", FLIGHT_BEGUN},
    {"ENDED", FLIGHT_ENDED},
    {"FAILED", FLIGHT_FAILED},
    {"STARTED", FLIGHT_STARTED},
    {"RECORD", sizeof(flight_record_t)},
    {"COUNTER", sizeof(flight_counter_t)},
    {"COUNTERS", FLIGHT_KINDS},
    {"COUNTERS_AT", offsetof(flight_header_t, counters)},
    {"PID_AT", offsetof(flight_header_t, pid)},
    {"RANK_AT", offsetof(flight_header_t, rank)},
    {"HEAD_AT", offsetof(flight_header_t, head)},
    {"TEXT_USED_AT", offsetof(flight_header_t, text_used)},
    {"ABOUT_AT", offsetof(flight_header_t, about)},
    {"GROUPS_AT", offsetof(flight_header_t, groups)},
};

PyMODINIT_FUNC PyInit__recorder(void) {
    frame_back = (PyFrameObject * (*)(PyFrameObject *)) dlsym(RTLD_DEFAULT, "PyFrame_GetBack");
    frame_lasti = (int (*)(PyFrameObject *))dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");
    F_BACK = PyUnicode_InternFromString("f_back");
    F_LASTI = PyUnicode_InternFromString("f_lasti");
    CO_FILENAME = PyUnicode_InternFromString("co_filename");
    NBYTES = PyUnicode_InternFromString("nbytes");
    CODE = PyUnicode_InternFromString("code");
    NUMPY = PyUnicode_InternFromString("numpy");
    ITEMSIZE = PyUnicode_InternFromString("itemsize");
    PyObject *module = PyModule_Create(&MODULE);
    PyObject *capsule = PyCapsule_New(&FLIGHT, "hpcdist.transport._recorder.flight", NULL);
    if (!module || !capsule || !CODE || PyModule_AddObject(module, "flight", capsule) < 0 ||
        add_numbers(module, LAYOUT_NUMBERS, sizeof LAYOUT_NUMBERS / sizeof *LAYOUT_NUMBERS) < 0)
        return NULL;
    return module;
}
