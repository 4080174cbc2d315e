/* Streams: a thread each with a queue, so that who forgets to wait is too early.
 *
 * Work is numbered within its stream; to wait is to wait until a number is reached. What orders the
 * legacy stream and the blocking ones are waits of the same kind. With EMULATED_GPU_DELAY_US=n each
 * piece of work begins up to n microseconds late, at random.
 */
#define _GNU_SOURCE
#include "driver.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct op {
    op_t *next;
    work_t work;
    uint64_t number;
    int n_waits;
    point_t waits[];
};

pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t CHANGED = PTHREAD_COND_INITIALIZER;
stream_t *STREAMS;
static uint64_t IDS;
static _Thread_local bool SERVES;

bool is_stream_thread(void) { return SERVES; }

uint64_t next_id(void) { return __atomic_add_fetch(&IDS, 1, __ATOMIC_RELAXED); }

bool is_reached(point_t point) { return !point.stream || point.stream->completed >= point.number; }

/* ---- the thread of a stream */

static void await_ready(const op_t *op) { /* with LOCK */
    for (int i = 0; i < op->n_waits; i++)
        while (!is_reached(op->waits[i])) pthread_cond_wait(&CHANGED, &LOCK);
}

static op_t *next_op(stream_t *stream) { /* with LOCK; NULL: the stream was destroyed */
    while (!stream->first && !stream->closing) pthread_cond_wait(&CHANGED, &LOCK);
    if (stream->first) await_ready(stream->first);
    return stream->first;
}

static void complete(stream_t *stream, op_t *op) { /* with LOCK */
    stream->first = op->next;
    if (!stream->first) stream->last = &stream->first;
    stream->completed = op->number;
    pthread_cond_broadcast(&CHANGED);
}

static void *serve(void *arg) {
    stream_t *stream = arg;
    const char *text = getenv("EMULATED_GPU_DELAY_US");
    int delay = text ? atoi(text) : 0;
    unsigned seed = (unsigned)(stream->id * 7919) ^ (unsigned)getpid();
    op_t *op;
    SERVES = true;
    pthread_mutex_lock(&LOCK);
    while ((op = next_op(stream))) {
        pthread_mutex_unlock(&LOCK);
        if (delay > 0) usleep((useconds_t)(rand_r(&seed) % delay));
        if (op->work.run) op->work.run(op->work.arg);
        pthread_mutex_lock(&LOCK);
        complete(stream, op);
        pthread_mutex_unlock(&LOCK);
        if (op->work.drop) op->work.drop(op->work.arg);
        free(op);
        pthread_mutex_lock(&LOCK);
    }
    pthread_mutex_unlock(&LOCK);
    end_fibers();
    return NULL; /* the struct stays: events point to it */
}

stream_t *new_stream(context_t *context, unsigned flags, int priority) {
    stream_t *stream = calloc(1, sizeof *stream);
    if (!stream) abort();
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->blocking = !(flags & CU_STREAM_NON_BLOCKING);
    stream->last = &stream->first;
    stream->id = next_id();
    pthread_mutex_lock(&LOCK);
    stream->next = STREAMS;
    STREAMS = stream;
    pthread_mutex_unlock(&LOCK);
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, stream)) abort();
    pthread_detach(thread);
    return stream;
}

stream_t *resolve(CUstream handle) {
    context_t *context = current_context();
    if (handle == NULL || handle == CU_STREAM_LEGACY) return context ? context->legacy : NULL;
    if (handle == CU_STREAM_PER_THREAD) return context ? context->per_thread : NULL;
    return handle;
}

/* ---- putting work on a stream */

static void wait_for_blocking(op_t *op, const stream_t *legacy) {
    for (stream_t *each = STREAMS; each; each = each->next)
        if (each->blocking && each->context == legacy->context)
            op->waits[op->n_waits++] = (point_t){each, each->submitted};
}

point_t push(stream_t *stream, work_t work, point_t after) {
    stream_t *legacy = stream->context->legacy;
    int room = 2;
    for (stream_t *each = STREAMS; stream == legacy && each; each = each->next) room++;
    op_t *op = malloc(sizeof *op + (size_t)room * sizeof *op->waits);
    if (!op) abort();
    op->next = NULL, op->work = work, op->number = ++stream->submitted, op->n_waits = 0;
    if (after.stream) op->waits[op->n_waits++] = after;
    if (stream == legacy)
        wait_for_blocking(op, legacy);
    else if (stream->blocking && legacy)
        op->waits[op->n_waits++] = (point_t){legacy, legacy->submitted};
    *stream->last = op;
    stream->last = &op->next;
    pthread_cond_broadcast(&CHANGED);
    return (point_t){stream, op->number};
}

CUresult put(CUstream handle, work_t work) {
    stream_t *stream = resolve(handle);
    CUresult result = stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (SERVES) result = CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&LOCK);
    if (result)
        ;
    else if (stream->closing)
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (stream->capture)
        result = record(stream, work);
    else if (stream == stream->context->legacy && captures_blocking(stream->context))
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    else
        push(stream, work, (point_t){0});
    pthread_mutex_unlock(&LOCK);
    if (result && work.drop) work.drop(work.arg);
    return result;
}

CUresult put_copy(CUstream handle, void (*run)(void *), const void *arg, size_t size) {
    void *copy = malloc(size);
    if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(copy, arg, size);
    return put(handle, (work_t){run, free, copy});
}

/* ---- waiting */

CUresult await_point(point_t point) {
    if (SERVES) return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&LOCK);
    while (!is_reached(point)) pthread_cond_wait(&CHANGED, &LOCK);
    pthread_mutex_unlock(&LOCK);
    return CUDA_SUCCESS;
}

CUresult finish(CUstream handle) {
    stream_t *stream = resolve(handle);
    if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
    if (stream->capture) {
        spoil(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream == stream->context->legacy) { /* it waits for the blocking streams, too */
        TRY(put(handle, (work_t){0}));
    }
    return await_point((point_t){stream, stream->submitted});
}

CUresult finish_device(int device) {
    if (SERVES) return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&LOCK);
    for (stream_t *each = STREAMS; each; each = each->next) {
        point_t end = {each, each->submitted};
        while ((device < 0 || each->context->device == device) && !is_reached(end))
            pthread_cond_wait(&CHANGED, &LOCK);
    }
    pthread_mutex_unlock(&LOCK);
    return CUDA_SUCCESS;
}

/* ---- the functions of CUDA */

EXPORT CUresult cuStreamCreateWithPriority(CUstream *made, unsigned flags, int priority) {
    context_t *context = current_context();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *made = new_stream(context, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *made, unsigned flags) {
    return cuStreamCreateWithPriority(made, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&LOCK);
    bool again = stream->closing;
    stream->closing = true;
    pthread_cond_broadcast(&CHANGED);
    pthread_mutex_unlock(&LOCK);
    return again ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    TRY(refuse_if_captured());
    return finish(handle);
}

EXPORT CUresult cuStreamQuery(CUstream handle) {
    TRY(refuse_if_captured());
    stream_t *stream = resolve(handle);
    if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
    if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&LOCK);
    bool done = is_reached((point_t){stream, stream->submitted});
    pthread_mutex_unlock(&LOCK);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    stream_t *stream = resolve(handle);
    if (stream) *priority = stream->priority;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned *flags) {
    stream_t *stream = resolve(handle);
    if (stream) *flags = stream->flags;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    stream_t *stream = resolve(handle);
    if (stream) *context = stream->context;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

typedef struct {
    CUhostFn function;
    CUstreamCallback callback; /* the older kind */
    CUstream stream;
    void *data;
} call_t;

static void run_call(void *arg) {
    const call_t *call = arg;
    if (call->function)
        call->function(call->data);
    else
        call->callback(call->stream, CUDA_SUCCESS, call->data);
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    return put_copy(stream, run_call, &(call_t){function, NULL, stream, data}, sizeof(call_t));
}

EXPORT CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *data,
                                    unsigned flags) {
    if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
    return put_copy(stream, run_call, &(call_t){NULL, callback, stream, data}, sizeof(call_t));
}
