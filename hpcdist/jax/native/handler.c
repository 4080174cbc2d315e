/* The extension module `hpcdist.jax._handler`: what XLA calls for an operation of a program.
 *
 * It lets Python do it, in XLA's own memory: first of what is read, then of what is written. Python
 * begins the compiled hot path.
 */
#include "../../native/compiled.h"
#include "xla.h"

enum { ITEMSIZE, NUMBER, ATTRIBUTES }; /* in the order of their names */

static int MINOR;
static PyObject *OPERATIONS; /* list of functions of memory; each returns None or an error's text */

static xla_error_t *failed(const xla_call_t *call, const char *words) {
    xla_new_error_t error = {sizeof error, NULL, words, XLA_INTERNAL};
    return call->api->new_error(&error);
}

/* Tell XLA for which version of its interface this is: that which `learn` was told. */
static xla_error_t *describe(xla_extension_t *extension) {
    xla_metadata_t *metadata = ((xla_metadata_extension_t *)extension)->metadata;
    metadata->version.major = XLA_MAJOR;
    metadata->version.minor = MINOR;
    metadata->traits = 0;
    return NULL;
}

/* Structs inside of another have to be as long as here, or what follows them is elsewhere. */
static int is_understood(const xla_call_t *call) {
    const xla_attributes_t *attributes = &call->attributes;
    return FITS(call, attributes) && FITS(call->api, new_error) &&
           call->arguments.struct_size == sizeof call->arguments &&
           call->results.struct_size == sizeof call->results && FITS(attributes, values) &&
           attributes->size == ATTRIBUTES && attributes->types[ITEMSIZE] == XLA_SCALAR &&
           attributes->types[NUMBER] == XLA_SCALAR;
}

static long long attribute(const xla_call_t *call, int which) {
    return *(const int64_t *)call->attributes.values[which]->value;
}

static PyObject *memory_of(const xla_buffer_t *buffer, int64_t itemsize, int access) {
    static char nothing[1];
    for (int64_t i = 0; i < buffer->rank; i++) itemsize *= buffer->dims[i];
    return PyMemoryView_FromMemory(itemsize ? buffer->data : nothing, itemsize, access);
}

/* Add the memory of buffers to a list; -1: an error is set. */
static int add(PyObject *list, const xla_buffers_t *all, int64_t itemsize, int access) {
    int failed = 0;
    for (int64_t i = 0; !failed && i < all->size; i++) {
        if (all->buffers[i]->dtype == XLA_TOKEN) continue;
        PyObject *memory = memory_of(all->buffers[i], itemsize, access);
        failed = memory ? PyList_Append(list, memory) : -1;
        Py_XDECREF(memory);
    }
    return failed;
}

static PyObject *run(const xla_call_t *call) {
    PyObject *operation = PyList_GetItem(OPERATIONS, (Py_ssize_t)attribute(call, NUMBER));
    PyObject *memory = operation ? PyList_New(0) : NULL;
    PyObject *arguments = NULL, *words = NULL;
    int64_t itemsize = attribute(call, ITEMSIZE);
    if (memory && add(memory, &call->arguments, itemsize, PyBUF_READ) == 0 &&
        add(memory, &call->results, itemsize, PyBUF_WRITE) == 0)
        arguments = PyList_AsTuple(memory);
    if (arguments) words = PyObject_CallObject(operation, arguments);
    Py_XDECREF(arguments);
    Py_XDECREF(memory);
    return words;
}

static xla_error_t *operate(xla_call_t *call) {
    xla_extension_t *extension = call->extensions;
    if (extension && extension->type == XLA_METADATA) return describe(extension);
    if (!is_understood(call))
        return failed(call, "hpcdist does not know the interface of this XLA: remove hpcdist's "
                            "extension module jax/_handler, which is optional");
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *words = run(call);
    xla_error_t *error = NULL;
    if (words != Py_None) {
        const char *text = words ? PyUnicode_AsUTF8AndSize(words, NULL) : NULL;
        if (!text) PyErr_WriteUnraisable(OPERATIONS);
        error = failed(call, text ? text : "hpcdist was interrupted; see stderr");
    }
    Py_XDECREF(words);
    PyGILState_Release(lock);
    return error;
}

/* learn(operations, minor) -> capsule: what is to be registered, with XLA of this minor version. */
static PyObject *learn(PyObject *module, PyObject *arguments) {
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!i", &PyList_Type, &OPERATIONS, &MINOR)) return NULL;
    Py_INCREF(OPERATIONS);
    return PyCapsule_New((void *)operate, NULL, NULL);
}

static PyMethodDef FUNCTIONS[] = {{"learn", learn, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_handler", NULL, -1, FUNCTIONS, NULL, NULL, NULL, NULL};
static const number_t NUMBERS[] = {{"XLA_MAJOR", XLA_MAJOR}};

PyMODINIT_FUNC PyInit__handler(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module && add_numbers(module, NUMBERS, 1) < 0) Py_CLEAR(module);
    return module;
}
