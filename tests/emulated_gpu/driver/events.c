/* Events: the place in a stream where one was recorded last, and the time when it was reached. */
#define _GNU_SOURCE
#include "driver.h"
#include <stdlib.h>
#include <time.h>

struct CUevent_st {
    point_t at;
    graph_t *capture; /* in which it was recorded last, while that is open */
    unsigned flags;
    bool recorded, destroyed;
    int n_marks; /* on streams, which still write the time */
    double milliseconds;
};

typedef struct CUevent_st event_t;

static bool is_captured(const event_t *event) { return event->capture && is_open(event->capture); }

static void free_if_unused(event_t *event) { /* with LOCK */
    if (event->destroyed && !event->n_marks) free(event);
}

static void mark(void *arg) {
    event_t *event = arg;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&LOCK);
    event->milliseconds = (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
    event->n_marks--;
    free_if_unused(event);
    pthread_mutex_unlock(&LOCK);
}

EXPORT CUresult cuEventCreate(CUevent *made, unsigned flags) {
    if (flags & CU_EVENT_INTERPROCESS) return emulated_missing("CU_EVENT_INTERPROCESS");
    *made = calloc(1, sizeof **made);
    if (!*made) return CUDA_ERROR_OUT_OF_MEMORY;
    (*made)->flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&LOCK);
    event->destroyed = true;
    free_if_unused(event);
    pthread_mutex_unlock(&LOCK);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream handle) {
    stream_t *stream = resolve(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
    if (is_stream_thread()) return CUDA_ERROR_NOT_PERMITTED;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&LOCK);
    if (stream->capture) {
        event->capture = stream->capture;
    } else if (stream == stream->context->legacy && captures_blocking(stream->context)) {
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    } else {
        event->n_marks++;
        event->at = push(stream, (work_t){mark, NULL, event}, (point_t){0});
        event->recorded = true;
        event->capture = NULL;
    }
    pthread_mutex_unlock(&LOCK);
    return result;
}

EXPORT CUresult cuEventQuery(CUevent event) {
    CUresult result = CUDA_SUCCESS;
    TRY(refuse_if_captured());
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&LOCK);
    if (is_captured(event))
        result = CUDA_ERROR_CAPTURED_EVENT;
    else if (event->recorded && !is_reached(event->at))
        result = CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&LOCK);
    return result;
}

EXPORT CUresult cuEventSynchronize(CUevent event) {
    TRY(refuse_if_captured());
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (is_captured(event)) return CUDA_ERROR_CAPTURED_EVENT;
    return event->recorded ? await_point(event->at) : CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    if (!start || !end || !start->recorded || !end->recorded ||
        ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&LOCK);
    bool done = is_reached(start->at) && is_reached(end->at);
    *milliseconds = (float)(end->milliseconds - start->milliseconds);
    pthread_mutex_unlock(&LOCK);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult join(stream_t *stream, graph_t *capture) { /* with LOCK */
    if (stream->capture && stream->capture != capture) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
    stream_t *stream = resolve(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags) return emulated_missing("flags of cuStreamWaitEvent");
    if (is_stream_thread()) return CUDA_ERROR_NOT_PERMITTED;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&LOCK);
    if (is_captured(event)) {
        result = join(stream, event->capture);
    } else if (stream->capture && event->recorded) {
        spoil(stream->capture);
        result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    } else if (event->recorded) {
        push(stream, (work_t){0}, event->at);
    }
    pthread_mutex_unlock(&LOCK);
    return result;
}
