/* What the parts of the emulated driver, libcuda.so.1, know of each other.
 *
 * `devices.c` has devices, contexts and errors; `streams.c` the threads that do the work of streams,
 * `events.c` and `captures.c` what is built on them; `memory.c` allocations, `copies.c` what moves
 * bytes, `faults.c` the sentence for who touches them by mistake; `modules.c` and `fibers.c` kernels.
 */
#ifndef EMULATED_DRIVER_H
#define EMULATED_DRIVER_H

#include "../seam.h"
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_DEVICES = 8 };

/* Return the error of a call, if it has one. */
#define TRY(call)                \
    do {                         \
        CUresult tried = (call); \
        if (tried) return tried; \
    } while (0)

/* ---- devices and contexts */

typedef struct CUctx_st {
    int device;
    unsigned flags;
    struct CUstream_st *legacy, *per_thread;
} context_t;

context_t *current_context(void); /* of this thread; NULL if there is none */

/* ---- streams */

typedef struct CUstream_st stream_t;
typedef struct graph graph_t;

/* A piece of work: `run` may be called more than once where it became part of a graph; `drop`
 * frees `arg`, when it has run or never will. */
typedef struct {
    void (*run)(void *);
    void (*drop)(void *);
    void *arg;
} work_t;

/* A place in a stream, which is reached when all work up to it has ended. */
typedef struct {
    stream_t *stream;
    uint64_t number;
} point_t;

typedef struct op op_t;

struct CUstream_st {
    stream_t *next;
    context_t *context;
    bool blocking, closing;
    unsigned flags;
    int priority;
    uint64_t id, submitted, completed;
    op_t *first, **last;
    graph_t *capture;
};

extern pthread_mutex_t LOCK; /* of streams, events and captures */
extern pthread_cond_t CHANGED;
extern stream_t *STREAMS;

stream_t *resolve(CUstream handle); /* the legacy and per-thread ones are the context's */
stream_t *new_stream(context_t *context, unsigned flags, int priority);
CUresult put(CUstream handle, work_t work); /* takes `work` over in any case */
CUresult put_copy(CUstream handle, void (*run)(void *), const void *arg, size_t size);
point_t push(stream_t *stream, work_t work, point_t after); /* with LOCK */
bool is_reached(point_t point);                             /* with LOCK */
CUresult await_point(point_t point);
CUresult finish(CUstream handle);   /* wait until all that is queued has ended */
CUresult finish_device(int device); /* the same for all its streams; -1: of all devices */
bool is_stream_thread(void);        /* such threads may not call CUDA */
uint64_t next_id(void);

/* ---- captures */

CUresult record(stream_t *stream, work_t work); /* with LOCK, for a stream that is captured */
bool is_open(const graph_t *graph);
bool captures_blocking(const context_t *context); /* with LOCK */
void spoil(graph_t *graph);
CUresult refuse_if_captured(void); /* what a call returns that a capture in progress forbids */

/* ---- memory */

typedef enum { UNKNOWN, DEVICE, HOST } kind_t;

typedef struct {
    kind_t kind;
    int device;
    uintptr_t base;
    size_t size;
} range_t;

range_t range_of(const void *address);
bool is_device_address(uintptr_t address); /* allocated or not */
bool open_for_kernel(uintptr_t address); /* let this thread's kernel touch what it was not given */
void close_after_kernel(void);
void watch_faults(void);
bool is_in_kernel(void);

/* ---- fibers: the threads of a block where a kernel has barriers */

void run_block(unsigned n, void (*body)(void *, unsigned), void (*enter)(unsigned), void *arg);
void block_barrier(void);
void warp_barrier(unsigned mask);
void end_fibers(void); /* of this thread */

#endif
