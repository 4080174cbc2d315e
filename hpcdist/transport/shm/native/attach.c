/* The memory of other processes, as the kernel copies it. */
#include "attach.h"
#include <errno.h>
#include <sys/uio.h>
#if defined(__linux__)
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

/* ---- the memory of other processes: one copy, which the kernel makes (cross-memory attach) */

#if defined(__linux__)
int attach(pid_t pid, uintptr_t theirs, void *ours, size_t nbytes, int writes) {
    while (nbytes) {
        struct iovec here = {ours, nbytes}, there = {(void *)theirs, nbytes};
        ssize_t moved = writes ? process_vm_writev(pid, &here, 1, &there, 1, 0)
                               : process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (moved <= 0) {
            if (moved == 0) errno = EFAULT;
            return -1;
        }
        theirs += (size_t)moved, ours = (char *)ours + moved, nbytes -= (size_t)moved;
    }
    return 0;
}

/* Where the heap of malloc ended when this was loaded. What it has grown by since is memory like any
 * other, and need not be tried: that takes 1 us. NULL where nothing can be read at all. */
static char *heap;

int can_attach(char *data, size_t nbytes) {
    if (heap && data >= heap && data + nbytes <= (char *)sbrk(0)) return 1;
    char ends[2];
    struct iovec here = {ends, 2}, there[2] = {{data, 1}, {data + nbytes - 1, 1}};
    return process_vm_readv(getpid(), &here, 1, there, 2, 0) == 2;
}

/* [Note: rights] A number of what this process may do to the memory of others, and they to its own:
 * whether it is dumpable, and its capabilities. Where that has changed since the ranks have tried,
 * a rank offers nothing to be attached, and reads nothing so. Never 0. */
int64_t rights(void) {
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct able[_LINUX_CAPABILITY_U32S_3] = {{0}};
    syscall(SYS_capget, &head, able);
    uint64_t mixed = (uint64_t)prctl(PR_GET_DUMPABLE);
    for (int i = 0; i < _LINUX_CAPABILITY_U32S_3; i++)
        mixed = (mixed * 1000003 + able[i].permitted) * 1000003 + able[i].effective;
    return (int64_t)(mixed >> 2 | 1);
}
#else
int64_t rights(void) { return 1; }

int can_attach(char *data, size_t nbytes) {
    (void)data, (void)nbytes;
    return 0;
}

int attach(pid_t pid, uintptr_t theirs, void *ours, size_t nbytes, int writes) {
    (void)pid, (void)theirs, (void)ours, (void)nbytes, (void)writes;
    errno = ENOSYS;
    return -1;
}
#endif

/* read_from(pid, address, to) and write_to(pid, address, from). */
static PyObject *move_attached(PyObject *const *args, Py_ssize_t n_args, int writes) {
    Py_buffer ours;
    if (n_args != 3) {
        PyErr_SetString(PyExc_TypeError, "a process, an address and an array");
        return NULL;
    }
    long pid = PyLong_AsLong(args[0]);
    uintptr_t theirs = (uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (PyObject_GetBuffer(args[2], &ours, writes ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = attach((pid_t)pid, theirs, ours.buf, (size_t)ours.len, writes);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&ours);
    return failed ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

static PyObject *py_read_from(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    return move_attached(args, n_args, 0);
}

static PyObject *py_write_to(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    return move_attached(args, n_args, 1);
}

/* rights(): see [Note: rights] */
static PyObject *py_rights(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromLongLong(rights());
}

/* Whether the kernel can read the first and the last byte of an array for other processes: memory
 * of devices cannot be read so. */
static PyObject *py_is_attachable(PyObject *self, PyObject *array) {
    (void)self;
    Py_buffer data;
    if (PyObject_GetBuffer(array, &data, PyBUF_SIMPLE) < 0) return NULL;
    int can = data.len > 0 && can_attach(data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyBool_FromLong(can);
}

static PyMethodDef FUNCTIONS[] = {
    FAST("read_from", py_read_from),
    FAST("write_to", py_write_to),
    {"rights", py_rights, METH_NOARGS, NULL},
    {"is_attachable", py_is_attachable, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_attach(PyObject *module) {
#if defined(__linux__)
    heap = can_attach((char *)&heap, sizeof heap) ? sbrk(0) : NULL;
#endif
    return PyModule_AddFunctions(module, FUNCTIONS);
}
