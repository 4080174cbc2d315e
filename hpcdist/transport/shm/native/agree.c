/* The agreement of a group on one node, and small operations that need no more than that. */
#include "eager.h"

int publish(const control_block_t *b, long patience) {
    __atomic_store_n(&slot_of(b, b->rank)->sequence, b->sequence, __ATOMIC_RELEASE);
    int complete = is_complete(b);
    uint64_t since = 0;
    for (long looks = 0; !complete && rest_patiently(looks, patience, &since); looks++)
        complete = is_complete(b);
    return complete;
}

int agree(control_block_t *b, uint64_t now, int64_t number, int64_t limit, int64_t detail,
          int64_t address, int64_t other, long spins) {
    slot_t *own = slot_of(b, b->rank);
    number = seal(b, number);
    own->numbers[0] = number, own->numbers[1] = -number;
    own->numbers[2] = detail, own->numbers[3] = -detail;
    own->numbers[4] = (int64_t)now + limit, own->numbers[5] = -(int64_t)now;
    own->address = address;
    int agreed = publish(b, spins);
    int64_t deadline = INT64_MAX, arrival = INT64_MIN;
    for (int r = 0; agreed && r < b->size; r++) {
        const int64_t *theirs = slot_of(b, r)->numbers;
        agreed = theirs[0] == number && theirs[1] == -number &&
                 (theirs[2] == detail || theirs[2] <= other ||
                  (detail > 1 && (theirs[2] ^ detail) == 1));
        if (theirs[4] < deadline) deadline = theirs[4];
        if (-theirs[5] > arrival) arrival = -theirs[5];
    }
    return agreed && arrival <= deadline;
}

static void close_small(Py_buffer *from, Py_buffer *to) {
    if (from->obj) PyBuffer_Release(from);
    if (to->obj) PyBuffer_Release(to);
}

/* Open what a rank contributes and what it writes (either may be None); -1: an error is set. */
static int open_small(const control_block_t *b, PyObject *data, PyObject *out, Py_buffer *from,
                      Py_buffer *to) {
    from->obj = to->obj = NULL;
    from->len = to->len = 0;
    int in_place = data == out && data != Py_None; /* then it is opened once, as what is written */
    if (!in_place && data != Py_None && PyObject_GetBuffer(data, from, PyBUF_SIMPLE) < 0) return -1;
    if (out == Py_None || PyObject_GetBuffer(out, to, PyBUF_WRITABLE) == 0) {
        if (in_place) from->buf = to->buf, from->len = to->len;
        if ((size_t)from->len <= b->payload) return 0;
        PyErr_SetString(PyExc_ValueError, "the data are larger than the control block's payload");
    }
    close_small(from, to);
    return -1;
}

/* All of a small reduction, if nothing unusual happens: post the data, see that all ranks mean
 * the same in time, combine `count` elements from `first` on into `out`. False: look with `test`
 * what happened, or wait. */
PyObject *control_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    control_block_t *b = (control_block_t *)self;
    if (n_args != 9) {
        PyErr_SetString(PyExc_TypeError, "reduce(fingerprint, timeout_ns, data, out, first, code, "
                                         "count, divisor, spins)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(args[0]), limit = PyLong_AsLongLong(args[1]);
    size_t first = PyLong_AsSize_t(args[4]);
    job_t job = {.kernel = kernel_of(args[5]), .n_sources = b->size, .n_outs = 1};
    job.count = PyLong_AsSize_t(args[6]);
    job.divisor = PyFloat_AsDouble(args[7]);
    long spins = PyLong_AsLong(args[8]);
    Py_buffer data, out;
    if (PyErr_Occurred() || open_small(b, args[2], args[3], &data, &out) < 0) return NULL;
    size_t item = job.kernel->item;
    if (args[2] == Py_None || (first + job.count) * item > (size_t)data.len || b->size > MOST ||
        (out.obj && (size_t)out.len != job.count * item)) {
        close_small(&data, &out);
        PyErr_SetString(PyExc_ValueError, "the data do not fit the count");
        return NULL;
    }
    b->sequence++;
    memcpy(payload_of(b, b->rank), data.buf, (size_t)data.len);
    int agreed = agree(b, flight_now(), number, limit, 0, 0, NO_OTHER, spins);
    if (agreed && out.obj) {
        job.outs[0] = (uintptr_t)out.buf;
        for (int r = 0; r < b->size; r++)
            job.sources[r] = (uintptr_t)payload_of(b, r) + first * item;
        combine(&job);
    }
    close_small(&data, &out);
    return PyBool_FromLong(agreed);
}

/* All of a small movement of data, if nothing unusual happens: post the data, see that all ranks
 * mean the same in time, copy to `out`, one after the other, `nbytes` from `first` on of what
 * `source` has posted, or each rank if `source` is negative. False: as for `reduce`. */
PyObject *control_move(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    control_block_t *b = (control_block_t *)self;
    if (n_args != 9) {
        PyErr_SetString(PyExc_TypeError, "move(fingerprint, timeout_ns, detail, data, out, source, "
                                         "first, nbytes, spins)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(args[0]), limit = PyLong_AsLongLong(args[1]);
    int64_t detail = PyLong_AsLongLong(args[2]);
    long source = PyLong_AsLong(args[5]), spins = PyLong_AsLong(args[8]);
    size_t first = PyLong_AsSize_t(args[6]), nbytes = PyLong_AsSize_t(args[7]);
    Py_buffer data, out;
    if (PyErr_Occurred() || open_small(b, args[3], args[4], &data, &out) < 0) return NULL;
    int begin = source < 0 ? 0 : (int)source, end = source < 0 ? b->size : begin + 1;
    if (end > b->size || first + nbytes > b->payload ||
        (out.obj && (size_t)out.len != nbytes * (size_t)(end - begin))) {
        close_small(&data, &out);
        PyErr_SetString(PyExc_ValueError, "move: the array has another size");
        return NULL;
    }
    b->sequence++;
    if (data.len) memcpy(payload_of(b, b->rank), data.buf, (size_t)data.len);
    int agreed = agree(b, flight_now(), number, limit, detail, 0, NO_OTHER, spins);
    for (int r = begin; agreed && out.obj && r < end; r++)
        memcpy((char *)out.buf + (size_t)(r - begin) * nbytes, payload_of(b, r) + first, nbytes);
    close_small(&data, &out);
    return PyBool_FromLong(agreed);
}

/* All of an all_reduce of arrays in shared memory, as far as nothing unusual happens. Returns
 * 0: look with `test` what happened, or wait; 1: agreed, but some array is not in shared memory;
 * 2: this rank's slice is in all arrays, but others are not so far, or one has left; 3: done. */
PyObject *control_reduce_shared(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    control_block_t *b = (control_block_t *)self;
    if (n_args != 8) {
        PyErr_SetString(PyExc_TypeError,
                        "reduce_shared(fingerprint, timeout_ns, address, bases, code, count, "
                        "divisor, spins)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(args[0]), limit = PyLong_AsLongLong(args[1]);
    int64_t address = PyLong_AsLongLong(args[2]);
    job_t job = {.kernel = kernel_of(args[4]), .n_sources = b->size, .n_outs = b->size};
    size_t count = PyLong_AsSize_t(args[5]), first;
    job.divisor = PyFloat_AsDouble(args[6]);
    long spins = PyLong_AsLong(args[7]);
    if (PyErr_Occurred() || read_addresses(args[3], job.sources) < 0) return NULL;
    if (PyTuple_Size(args[3]) != b->size) {
        PyErr_SetString(PyExc_ValueError, "reduce_shared: a base per rank");
        return NULL;
    }
    b->sequence++;
    int state = agree(b, flight_now(), number, limit, 0, address, NO_OTHER, spins) && enter(b) < 0;
    for (int r = 0; state && r < b->size; r++)
        if (slot_of(b, r)->address <= 0 || slot_of(b, r)->address >= NOT_IN_HEAP)
            return PyLong_FromLong(1);
    if (!state) return PyLong_FromLong(0);
    job.count = own_share(b, count, &first);
    for (int r = 0; r < b->size; r++) {
        job.sources[r] += (uintptr_t)slot_of(b, r)->address - 1 + first * job.kernel->item;
        job.outs[r] = job.sources[r];
    }
    Py_BEGIN_ALLOW_THREADS
    combine(&job);
    take_step(b);
    state = all_at(b, b->step, spins) && broken_by(b) < 0 ? 3 : 2;
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(state);
}
