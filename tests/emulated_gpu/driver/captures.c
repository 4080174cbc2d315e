/* Captures and graphs. A graph is what was issued, in that order, which respects every dependency;
 * a launch replays it as one piece of work. */
#define _GNU_SOURCE
#include "driver.h"
#include <stdlib.h>

typedef struct node {
    struct node *next;
    work_t work;
} node_t;

struct graph {
    graph_t *next; /* of the open ones */
    node_t *first, **last;
    int n_references;
    CUstreamCaptureMode mode;
    bool open, broken;
    stream_t *origin;
    pthread_t thread;
};

static graph_t *OPEN;
static _Thread_local CUstreamCaptureMode MODE = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool is_open(const graph_t *graph) { return graph->open; }

void spoil(graph_t *graph) { graph->broken = true; }

bool captures_blocking(const context_t *context) {
    for (const graph_t *each = OPEN; each; each = each->next)
        if (each->origin->blocking && each->origin->context == context) return true;
    return false;
}

CUresult record(stream_t *stream, work_t work) {
    graph_t *graph = stream->capture;
    node_t *node = malloc(sizeof *node);
    if (!node) return CUDA_ERROR_OUT_OF_MEMORY;
    *node = (node_t){NULL, work};
    *graph->last = node;
    graph->last = &node->next;
    return CUDA_SUCCESS;
}

/* Whether a capture forbids unsafe calls to this thread: by its own mode, and by the thread's. */
static bool forbids(const graph_t *graph) {
    if (graph->mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (pthread_equal(graph->thread, pthread_self())) return true;
    return graph->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && MODE == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult refuse_if_captured(void) {
    if (is_stream_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (MODE == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&LOCK);
    for (graph_t *each = OPEN; each; each = each->next)
        if (forbids(each)) {
            spoil(each);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    pthread_mutex_unlock(&LOCK);
    return result;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUstreamCaptureMode old = MODE;
    MODE = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

/* ---- captures */

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    stream_t *stream = resolve(handle);
    if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
    if (stream == stream->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    graph_t *graph = calloc(1, sizeof *graph);
    if (!graph) return CUDA_ERROR_OUT_OF_MEMORY;
    graph->last = &graph->first;
    graph->n_references = 1;
    graph->mode = mode;
    graph->open = true;
    graph->origin = stream;
    graph->thread = pthread_self();
    pthread_mutex_lock(&LOCK);
    bool again = stream->capture != NULL;
    if (!again) {
        stream->capture = graph;
        graph->next = OPEN;
        OPEN = graph;
    }
    pthread_mutex_unlock(&LOCK);
    if (again) free(graph);
    return again ? CUDA_ERROR_ILLEGAL_STATE : CUDA_SUCCESS;
}

static void release(void *arg) {
    graph_t *graph = arg;
    pthread_mutex_lock(&LOCK);
    bool over = --graph->n_references == 0;
    pthread_mutex_unlock(&LOCK);
    if (!over) return;
    for (node_t *node = graph->first, *next; node; node = next) {
        next = node->next;
        if (node->work.drop) node->work.drop(node->work.arg);
        free(node);
    }
    graph->first = NULL; /* the struct stays: events point to it */
}

static void close_capture(graph_t *graph) { /* with LOCK */
    graph->open = false;
    for (stream_t *each = STREAMS; each; each = each->next)
        if (each->capture == graph) each->capture = NULL;
    graph_t **at = &OPEN;
    while (*at != graph) at = &(*at)->next;
    *at = graph->next;
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *made) {
    stream_t *stream = resolve(handle);
    *made = NULL;
    if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
    graph_t *graph = stream->capture;
    if (!graph) return CUDA_ERROR_ILLEGAL_STATE;
    if (graph->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    pthread_mutex_lock(&LOCK);
    close_capture(graph);
    pthread_mutex_unlock(&LOCK);
    if (graph->broken) {
        release(graph);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    *made = (CUgraph)graph;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    stream_t *stream = resolve(handle);
    if (!stream) return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&LOCK);
    bool implicit = stream == stream->context->legacy && captures_blocking(stream->context);
    const graph_t *graph = stream->capture;
    *status = !graph          ? CU_STREAM_CAPTURE_STATUS_NONE
              : graph->broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                              : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    pthread_mutex_unlock(&LOCK);
    return implicit ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

/* ---- graphs; an executable one is the same graph, held once more */

static graph_t *hold(void *handle) {
    graph_t *graph = handle;
    pthread_mutex_lock(&LOCK);
    graph->n_references++;
    pthread_mutex_unlock(&LOCK);
    return graph;
}

static void replay(void *arg) {
    for (const node_t *node = ((graph_t *)arg)->first; node; node = node->next)
        if (node->work.run) node->work.run(node->work.arg);
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph graph,
                                            unsigned long long flags) {
    if (flags) return emulated_missing("flags of cuGraphInstantiate");
    *made = (CUgraphExec)hold(graph);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    return put(stream, (work_t){replay, release, hold(graph)});
}

EXPORT CUresult cuGraphUpload(CUgraphExec graph, CUstream stream) {
    return graph && resolve(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
    release(graph);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec graph) {
    release(graph);
    return CUDA_SUCCESS;
}
