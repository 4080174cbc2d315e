/* NCCL between processes of one machine, over shared memory; written from NCCL's documentation.
 *
 * An operation is a host function on its stream, so it begins when all before it has ended, holds up
 * what comes after it, and becomes part of a graph where the stream is captured. As with NCCL,
 * operations are matched by their order, and where ranks differ they hang until they are aborted
 * (this one says so first); the first collective, and the first message of a pair, hold up the host
 * until the others have come; two ranks on one device are refused without
 * NCCL_MULTI_RANK_GPU_ENABLE=1. `communicators.c` has communicators and how their ranks meet,
 * `operations.c` what runs on streams, `reductions.c` arithmetic, `groups.c` the calls.
 *
 * EMULATED_GPU_NCCL_VERSION is what ncclGetVersion says (23203). With EMULATED_GPU_NCCL_SERIAL=1 a
 * process has one operation at a time, as a GPU whose units one kernel takes: operations of two
 * communicators lock if ranks run them in different orders. With NCCL_LAUNCH_ORDER_IMPLICIT=1 that
 * is the order of their issue, otherwise that in which their streams come to them.
 */
#ifndef EMULATED_NCCL_H
#define EMULATED_NCCL_H

#include "../seam.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_RANKS = 64, SLOT = 256 << 10, BOX = 64 << 10, SHARES_GPUS = 23000 };

typedef enum { SUCCESS, CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE } result_t;
typedef enum {
    INT8,
    UINT8,
    INT32,
    UINT32,
    INT64,
    UINT64,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT8E4M3,
    FLOAT8E5M2,
    N_TYPES
} type_t;
typedef enum { SUM, PROD, MAX, MIN, AVG, N_OPERATORS } operator_t;
typedef enum { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECV } verb_t;

/* What ranks must have in common. `root` is the other rank of a message. */
typedef struct {
    verb_t verb;
    type_t type;
    operator_t op;
    int root;
    uint64_t count;
} call_t;

typedef struct {
    _Atomic uint64_t step, host_step; /* how far this rank has come, on its stream and its host */
    unsigned char device[16];
    call_t call;
    char slot[SLOT];
} rank_t;

typedef struct { /* from one rank to another */
    _Atomic uint32_t full, greeted;
    uint32_t size;
    char bytes[BOX];
} box_t;

/* Operations of a communicator follow each other, whatever their streams. */
typedef struct {
    CUevent last;
    CUstream stream;
} order_t;

typedef struct communicator {
    rank_t *ranks;
    box_t *boxes;
    int rank, size, device;
    uint64_t step, host_step;
    bool connected, knows[MOST_RANKS];
    _Atomic bool aborted;
    _Atomic int n_pending; /* operations on streams */
    CUcontext context;
    bool takes_turns;
    order_t own, *order; /* its own, or that of all communicators of the process */
} communicator_t;

typedef struct job {
    struct job *next; /* of the messages that travel together */
    communicator_t *comm;
    CUstream stream;
    call_t call;
    const char *send;
    char *recv;
    size_t moved;
    bool captured; /* runs as often as its graph */
} job_t;

extern const int WIDTHS[N_TYPES];

result_t fail(result_t result, const char *what);
bool be_patient(communicator_t *comm, unsigned *turns); /* false: it was aborted */
bool meet_on_host(communicator_t *comm);
bool meet_on_device(communicator_t *comm);
box_t *box_of(communicator_t *comm, int from, int to);
void run_job(void *job);
bool reduces(type_t type);
void combine(type_t type, operator_t op, void *into, const void *from, size_t n);
void divide(type_t type, void *into, size_t n, int by);

#endif
