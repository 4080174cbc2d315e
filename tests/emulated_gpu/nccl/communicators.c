/* Communicators: shared memory that is named by the id, and how ranks meet in it. */
#define _GNU_SOURCE
#include "nccl.h"
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

typedef struct {
    char bytes[128];
} unique_id_t;

static _Thread_local char LAST_ERROR[256];

result_t fail(result_t result, const char *what) {
    snprintf(LAST_ERROR, sizeof LAST_ERROR, "NCCL: %s", what);
    emulated_say("%s", LAST_ERROR);
    return result;
}

EXPORT const char *ncclGetLastError(communicator_t *comm) {
    (void)comm;
    return LAST_ERROR;
}

EXPORT const char *ncclGetErrorString(int result) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error"};
    return result >= 0 && result <= REMOTE ? texts[result] : "unknown result code";
}

EXPORT int ncclGetVersion(int *version) {
    const char *text = getenv("EMULATED_GPU_NCCL_VERSION");
    *version = text ? atoi(text) : 23203;
    return SUCCESS;
}

EXPORT int ncclGetUniqueId(unique_id_t *id) {
    uint64_t random[2];
    memset(id, 0, sizeof *id);
    if (getrandom(random, sizeof random, 0) != sizeof random) return SYSTEM;
    snprintf(id->bytes, sizeof id->bytes, "/emulated-nccl-%016lx%016lx", random[0], random[1]);
    return SUCCESS;
}

/* ---- meeting */

bool be_patient(communicator_t *comm, unsigned *turns) {
    if (comm->aborted) return false;
    if (++*turns < 50)
        sched_yield();
    else
        usleep(*turns < 2000 ? 50 : 500);
    return true;
}

/* Wait until all ranks have come to a step, which is counted on hosts or on streams. */
static bool meet(communicator_t *comm, uint64_t step, size_t counter) {
    unsigned turns = 0;
    rank_t *ranks = comm->ranks;
#define STEP_OF(i) ((_Atomic uint64_t *)((char *)&ranks[i] + counter))
    atomic_store(STEP_OF(comm->rank), step);
    for (int i = 0; i < comm->size; i++)
        while (atomic_load(STEP_OF(i)) < step)
            if (!be_patient(comm, &turns)) return false;
    return true;
}

bool meet_on_host(communicator_t *comm) {
    return meet(comm, ++comm->host_step, offsetof(rank_t, host_step));
}

bool meet_on_device(communicator_t *comm) {
    return meet(comm, ++comm->step, offsetof(rank_t, step));
}

box_t *box_of(communicator_t *comm, int from, int to) {
    return &comm->boxes[from * comm->size + to];
}

/* ---- making and ending them */

static bool map(communicator_t *comm, const char *name) {
    size_t n = (size_t)comm->size, size = n * sizeof(rank_t) + n * n * sizeof(box_t);
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0) return false;
    void *at = ftruncate(file, (off_t)size)
                   ? MAP_FAILED
                   : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return false;
    comm->ranks = at;
    comm->boxes = (box_t *)(comm->ranks + n);
    return true;
}

static bool is_set(const char *name) {
    const char *text = getenv(name);
    return text && atoi(text);
}

static bool find_device(communicator_t *comm) {
    static order_t of_all;
    comm->takes_turns = is_set("EMULATED_GPU_NCCL_SERIAL");
    bool in_order = comm->takes_turns && is_set("NCCL_LAUNCH_ORDER_IMPLICIT");
    comm->order = in_order ? &of_all : &comm->own;
    if (cuCtxGetCurrent(&comm->context)) return false;
    return comm->context && !cuCtxGetDevice(&comm->device) &&
           (comm->order->last || !cuEventCreate(&comm->order->last, CU_EVENT_DISABLE_TIMING));
}

/* Whether two ranks are on one device, and may not be. */
static bool is_crowded(const communicator_t *comm) {
    int version;
    ncclGetVersion(&version);
    if (version >= SHARES_GPUS && is_set("NCCL_MULTI_RANK_GPU_ENABLE")) return false;
    for (int i = 0; i < comm->size; i++)
        for (int j = 0; j < i; j++)
            if (!memcmp(comm->ranks[i].device, comm->ranks[j].device, 16)) return true;
    return false;
}

EXPORT int ncclCommInitRankConfig(communicator_t **made, int size, unique_id_t id, int rank,
                                  const void *config) {
    const struct { /* as the header has it since 2.14 */
        size_t size;
        unsigned magic, version;
        int blocking;
    } *known = config;
    if (known && known->size >= sizeof *known && known->blocking == 0)
        return fail(ARGUMENT, "communicators that do not block are not emulated");
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size || id.bytes[0] != '/')
        return fail(ARGUMENT, "a bad rank, number of ranks, or id");
    communicator_t *comm = calloc(1, sizeof *comm);
    if (!comm) return SYSTEM;
    comm->rank = rank, comm->size = size;
    if (!find_device(comm)) return fail(CUDA, "no device is current");
    if (!map(comm, id.bytes)) return fail(SYSTEM, "there is no room in /dev/shm");
    cuDeviceGetUuid((CUuuid *)comm->ranks[rank].device, comm->device);
    meet_on_host(comm);
    if (rank == 0) shm_unlink(id.bytes);
    if (is_crowded(comm)) return fail(USAGE, "two ranks are on one GPU");
    *made = comm;
    return SUCCESS;
}

EXPORT int ncclCommInitRank(communicator_t **made, int size, unique_id_t id, int rank) {
    return ncclCommInitRankConfig(made, size, id, rank, NULL);
}

static void settle(const communicator_t *comm) {
    while (comm->n_pending) usleep(100);
}

EXPORT int ncclCommFinalize(communicator_t *comm) {
    settle(comm);
    return SUCCESS;
}

EXPORT int ncclCommDestroy(communicator_t *comm) { /* its memory stays: graphs may know it */
    if (comm) settle(comm);
    return SUCCESS;
}

EXPORT int ncclCommAbort(communicator_t *comm) {
    if (!comm) return SUCCESS;
    comm->aborted = true;
    settle(comm);
    return SUCCESS;
}

EXPORT int ncclCommGetAsyncError(const communicator_t *comm, int *error) {
    *error = SUCCESS;
    return comm ? SUCCESS : ARGUMENT;
}

EXPORT int ncclCommCount(const communicator_t *comm, int *count) {
    *count = comm->size;
    return SUCCESS;
}

EXPORT int ncclCommCuDevice(const communicator_t *comm, int *device) {
    *device = comm->device;
    return SUCCESS;
}

EXPORT int ncclCommUserRank(const communicator_t *comm, int *rank) {
    *rank = comm->rank;
    return SUCCESS;
}

#define MISSING(name)      \
    EXPORT int name(void); \
    EXPORT int name(void) { return fail(USAGE, #name " is not emulated"); }
MISSING(ncclCommInitAll)
MISSING(ncclCommSplit)
