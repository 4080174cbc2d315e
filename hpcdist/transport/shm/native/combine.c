/* `combine`: it reads a block of every rank, accumulates in their order and writes the result. */
#include "combine.h"
#include "exact.h"

enum { BLOCK = 4096 }; /* elements accumulated at a time: 16 or 32 KiB */

/* Combine the elements from `at` to `end`, at most BLOCK of them. */
static void combine_block(const job_t *job, size_t at, size_t end) {
    char accumulator[BLOCK * 8] __attribute__((aligned(64)));
    const kernel_t *k = job->kernel;
    size_t n = end - at, start = at * k->item;
    k->load(accumulator, (const void *)(job->sources[0] + start), n);
    for (int s = 1; s < job->n_sources; s++)
        k->fold(accumulator, (const void *)(job->sources[s] + start), n);
    for (int o = 0; o < job->n_outs; o++)
        k->store((void *)(job->outs[o] + start), accumulator, n, o == 0 ? job->divisor : 1.0);
}

void combine(const job_t *job) {
    const kernel_t *k = job->kernel;
    if (!k->fold) {
        add_exactly(job, 0, job->count);
        return;
    }
    int fused = k->fused && job->n_outs > 0 && (k->item != 2 || have_half());
    size_t at = 0;
    if (fused)
        at = k->fused(job->sources, job->n_sources, job->outs, job->n_outs, 0, job->count,
                      job->divisor);
    for (; at < job->count; at += BLOCK)
        combine_block(job, at, job->count - at < BLOCK ? job->count : at + BLOCK);
}

const kernel_t *kernel_of(PyObject *code_) {
    long code = PyLong_AsLong(code_);
    if (!PyErr_Occurred() && (code < 0 || code >= N_KERNELS))
        PyErr_SetString(PyExc_ValueError, "no such kernel");
    return PyErr_Occurred() ? NULL : &KERNELS[code];
}

static PyObject *py_combine(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, "combine(code, sources, outs, count, divisor)");
        return NULL;
    }
    job_t job = {.n_outs = 0};
    Py_buffer view = {.obj = NULL};
    job.kernel = kernel_of(args[0]);
    job.count = PyLong_AsSize_t(args[3]);
    job.divisor = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred() || (job.n_sources = read_addresses(args[1], job.sources)) < 0) return NULL;
    if (PyTuple_Check(args[2])) {
        if ((job.n_outs = read_addresses(args[2], job.outs)) < 0) return NULL;
    } else { /* one array */
        if (PyObject_GetBuffer(args[2], &view, PyBUF_WRITABLE) < 0) return NULL;
        if (job.count > (size_t)view.len / job.kernel->item) {
            PyBuffer_Release(&view);
            PyErr_SetString(PyExc_ValueError, "the output is too small");
            return NULL;
        }
        job.outs[0] = (uintptr_t)view.buf;
        job.n_outs = 1;
    }
    if (job.count * job.kernel->item > (32 << 10)) {
        Py_BEGIN_ALLOW_THREADS
        combine(&job);
        Py_END_ALLOW_THREADS
    } else {
        combine(&job);
    }
    if (view.obj) PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

/* CODES: the number of each loop that works on this processor, by operator and dtype. */
static int add_codes(PyObject *module) {
    PyObject *codes = PyDict_New();
    for (int i = 0; codes && i < N_KERNELS; i++) {
        if (strstr(KERNELS[i].name, "_float16") && !have_half()) continue;
        PyObject *code = PyLong_FromLong(i);
        int failed = !code || PyDict_SetItemString(codes, KERNELS[i].name, code) < 0;
        Py_XDECREF(code);
        if (failed) return -1;
    }
    return codes ? PyModule_AddObject(module, "CODES", codes) : -1;
}

static PyMethodDef FUNCTIONS[] = {
    FAST("combine", py_combine),
    {NULL, NULL, 0, NULL},
};

int add_combine(PyObject *module) {
    return PyModule_AddFunctions(module, FUNCTIONS) < 0 ? -1 : add_codes(module);
}
