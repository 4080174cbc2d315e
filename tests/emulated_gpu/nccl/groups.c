/* The calls: each is a job, which waits for the end of its group and is put on its stream then. */
#define _GNU_SOURCE
#include "nccl.h"
#include <stdlib.h>

static _Thread_local int DEPTH;
static _Thread_local job_t *FIRST, **LAST;
static _Thread_local result_t FAILURE;

/* ---- putting a job on its stream */

/* Hold up the host until those whom it has not met before are here. */
static bool connect_all(communicator_t *comm) {
    if (comm->connected) return true;
    comm->connected = meet_on_host(comm);
    return comm->connected;
}

static bool connect_pairs(job_t *first) {
    communicator_t *comm = first->comm;
    unsigned turns = 0;
    for (job_t *job = first; job; job = job->next)
        atomic_store(&box_of(comm, comm->rank, job->call.root)->greeted, 1);
    for (job_t *job = first; job; job = job->next) {
        int peer = job->call.root;
        while (!comm->knows[peer] && !atomic_load(&box_of(comm, peer, comm->rank)->greeted))
            if (!be_patient(comm, &turns)) return false;
        comm->knows[peer] = true;
    }
    return true;
}

static result_t put(job_t *job) {
    communicator_t *comm = job->comm;
    order_t *order = comm->order;
    CUstream stream = job->stream;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (cuStreamIsCapturing(stream, &status)) return CUDA;
    bool captured = job->captured = status != CU_STREAM_CAPTURE_STATUS_NONE;
    if (!captured && order->stream != stream && cuStreamWaitEvent(stream, order->last, 0))
        return CUDA;
    if (!captured) comm->n_pending++;
    if (cuLaunchHostFunc(stream, run_job, job)) {
        if (!captured) comm->n_pending--;
        return CUDA;
    }
    if (captured) return SUCCESS;
    order->stream = stream;
    return cuEventRecord(order->last, stream) ? CUDA : SUCCESS;
}

static result_t launch(job_t *job) {
    communicator_t *comm = job->comm;
    bool connected = job->call.verb >= SEND ? connect_pairs(job) : connect_all(comm);
    if (!connected) return INTERNAL;
    cuCtxPushCurrent(comm->context);
    result_t result = put(job);
    cuCtxPopCurrent(NULL);
    return result ? fail(result, "an operation cannot be put on its stream") : SUCCESS;
}

/* ---- groups */

/* Take the first job out of the list, and with a message all others of its communicator. */
static result_t take_together(job_t **list, job_t **taken) {
    job_t *first = *list, **end = &first->next;
    *taken = first;
    *list = first->next;
    first->next = NULL;
    if (first->call.verb < SEND) return SUCCESS;
    for (job_t **at = list, *each; (each = *at);) {
        if (each->comm != first->comm || each->call.verb < SEND) {
            at = &each->next;
            continue;
        }
        if (each->stream != first->stream)
            return fail(ARGUMENT, "several streams in one group are not emulated");
        *at = each->next;
        each->next = NULL;
        *end = each, end = &each->next;
    }
    return SUCCESS;
}

static result_t flush(void) {
    job_t *list = FIRST, *job;
    result_t result = FAILURE;
    FIRST = NULL, LAST = &FIRST, FAILURE = SUCCESS;
    while (list && !result) {
        result = take_together(&list, &job);
        if (!result) result = launch(job);
    }
    return result;
}

EXPORT int ncclGroupStart(void) {
    DEPTH++;
    return SUCCESS;
}

EXPORT int ncclGroupEnd(void) {
    if (!DEPTH) return fail(USAGE, "ncclGroupEnd without ncclGroupStart");
    return --DEPTH ? SUCCESS : flush();
}

/* ---- the calls */

static bool is_reachable(const void *address, int device) {
    unsigned type;
    int owner;
    CUdeviceptr at = (CUdeviceptr)address;
    if (!address) return true;
    if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at)) return false;
    if (type == CU_MEMORYTYPE_HOST) return true;
    return !cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at) &&
           owner == device;
}

static const char *what_is_wrong(const communicator_t *comm, const call_t *call, const void *send,
                                 const void *recv) {
    bool has_operator =
        call->verb == ALL_REDUCE || call->verb == REDUCE || call->verb == REDUCE_SCATTER;
    if (!comm || comm->aborted) return "the communicator was aborted, or is none";
    if ((int)call->type < 0 || call->type >= N_TYPES) return "there is no such type";
    if (call->root < 0 || call->root >= comm->size) return "there is no such rank";
    if (has_operator && ((int)call->op < 0 || call->op >= N_OPERATORS))
        return "there is no such operator, or it is not emulated";
    if (has_operator && !reduces(call->type)) return "reductions of this type are not emulated";
    if (call->count && !(is_reachable(send, comm->device) && is_reachable(recv, comm->device)))
        return "a pointer is not to memory of the communicator's device";
    return NULL;
}

static int add(communicator_t *comm, CUstream stream, call_t call, const void *send, void *recv) {
    const char *wrong = what_is_wrong(comm, &call, send, recv);
    job_t *job = wrong ? NULL : malloc(sizeof *job);
    if (!job) {
        result_t result = fail(ARGUMENT, wrong ? wrong : "no memory");
        if (DEPTH) FAILURE = result;
        return result;
    }
    *job = (job_t){NULL, comm, stream, call, send, recv, 0, false};
    if (!FIRST) LAST = &FIRST;
    *LAST = job;
    LAST = &job->next;
    return DEPTH ? SUCCESS : flush();
}

EXPORT int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op,
                         communicator_t *comm, CUstream stream) {
    return add(comm, stream, (call_t){ALL_REDUCE, type, op, 0, count}, send, recv);
}

EXPORT int ncclReduce(const void *send, void *recv, size_t count, int type, int op, int root,
                      communicator_t *comm, CUstream stream) {
    return add(comm, stream, (call_t){REDUCE, type, op, root, count}, send, recv);
}

EXPORT int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root,
                         communicator_t *comm, CUstream stream) {
    return add(comm, stream, (call_t){BROADCAST, type, 0, root, count}, send, recv);
}

EXPORT int ncclBcast(void *both, size_t count, int type, int root, communicator_t *comm,
                     CUstream stream) {
    return ncclBroadcast(both, both, count, type, root, comm, stream);
}

EXPORT int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op,
                             communicator_t *comm, CUstream stream) {
    return add(comm, stream, (call_t){REDUCE_SCATTER, type, op, 0, count}, send, recv);
}

EXPORT int ncclAllGather(const void *send, void *recv, size_t count, int type, communicator_t *comm,
                         CUstream stream) {
    return add(comm, stream, (call_t){ALL_GATHER, type, 0, 0, count}, send, recv);
}

EXPORT int ncclSend(const void *send, size_t count, int type, int peer, communicator_t *comm,
                    CUstream stream) {
    return add(comm, stream, (call_t){SEND, type, 0, peer, count}, send, NULL);
}

EXPORT int ncclRecv(void *recv, size_t count, int type, int peer, communicator_t *comm,
                    CUstream stream) {
    return add(comm, stream, (call_t){RECV, type, 0, peer, count}, NULL, recv);
}
