/* The extension module `hpcdist.jax._handler`: what XLA calls for an operation of a program.
 *
 * It lets Python do it, in XLA's own memory, and tells the addresses: first of what is read, then of
 * what is written. Python begins the compiled hot path.
 */
#include "../../native/compiled.h"
#include "xla.h"

enum { NUMBER, ATTRIBUTES }; /* in the order of their names */

static int MINOR;
static PyObject *OPERATIONS; /* list of functions of addresses; each returns None or a text */

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
           attributes->size == ATTRIBUTES && attributes->types[NUMBER] == XLA_SCALAR;
}

/* Write addresses of buffers into a tuple from `at` on; returns the index behind them. */
static Py_ssize_t list(PyObject *addresses, Py_ssize_t at, const xla_buffers_t *all) {
    for (int64_t i = 0; i < all->size; i++)
        if (all->buffers[i]->dtype != XLA_TOKEN)
            PyTuple_SetItem(addresses, at++, PyLong_FromVoidPtr(all->buffers[i]->data));
    return at;
}

static Py_ssize_t count(const xla_buffers_t *all) {
    Py_ssize_t n = 0;
    for (int64_t i = 0; i < all->size; i++) n += all->buffers[i]->dtype != XLA_TOKEN;
    return n;
}

static PyObject *run(const xla_call_t *call) {
    int64_t number = *(const int64_t *)call->attributes.values[NUMBER]->value;
    PyObject *operation = PyList_GetItem(OPERATIONS, (Py_ssize_t)number);
    Py_ssize_t n = count(&call->arguments) + count(&call->results);
    PyObject *addresses = operation ? PyTuple_New(n) : NULL, *words = NULL;
    if (addresses && list(addresses, list(addresses, 0, &call->arguments), &call->results) == n)
        words = PyObject_CallObject(operation, addresses);
    Py_XDECREF(addresses);
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
