/* The runtime API, libcudart, on the emulated driver: what CuPy's module `runtime` calls.
 *
 * CUDA has given errors and attributes the same numbers in both. A device becomes current for a
 * thread with its first call that needs one.
 */
#define _GNU_SOURCE
#include "../seam.h"
#include <cuda.h>
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

static pthread_once_t ONCE = PTHREAD_ONCE_INIT;
static CUresult INITIALISED;
static _Thread_local int DEVICE;
static _Thread_local CUresult LAST;

static void initialise(void) { INITIALISED = cuInit(0); }

static CUresult begin(void) {
    pthread_once(&ONCE, initialise);
    return INITIALISED;
}

static cudaError_t tell(CUresult result) {
    if (result && result != CUDA_ERROR_NOT_READY) LAST = result;
    return (cudaError_t)result;
}

/* Make the device of this thread current. */
static CUresult enter(void) {
    CUcontext context;
    CUresult result = begin();
    if (result || (result = cuCtxGetCurrent(&context)) || context) return result;
    result = cuDevicePrimaryCtxRetain(&context, DEVICE);
    return result ? result : cuCtxSetCurrent(context);
}

/* A function that is one call of the driver, with a device or without one that is current. */
#define IS(name, arguments, call)                \
    EXPORT cudaError_t name arguments {          \
        CUresult entered = enter();              \
        return tell(entered ? entered : (call)); \
    }
#define IS_ANYWHERE(name, arguments, call)   \
    EXPORT cudaError_t name arguments {      \
        CUresult begun = begin();            \
        return tell(begun ? begun : (call)); \
    }

/* ---- errors and versions */

EXPORT cudaError_t cudaGetLastError(void) {
    CUresult result = LAST;
    LAST = CUDA_SUCCESS;
    return (cudaError_t)result;
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    const char *text;
    cuGetErrorString((CUresult)error, &text);
    return text;
}

#define NAME(name) {name, #name}
static const struct {
    cudaError_t code;
    const char *name;
} NAMES[] = {
    NAME(cudaSuccess),
    NAME(cudaErrorInvalidValue),
    NAME(cudaErrorMemoryAllocation),
    NAME(cudaErrorInitializationError),
    NAME(cudaErrorNoDevice),
    NAME(cudaErrorInvalidDevice),
    NAME(cudaErrorDeviceUninitialized),
    NAME(cudaErrorInvalidResourceHandle),
    NAME(cudaErrorIllegalState),
    NAME(cudaErrorSymbolNotFound),
    NAME(cudaErrorNotReady),
    NAME(cudaErrorPeerAccessAlreadyEnabled),
    NAME(cudaErrorPeerAccessNotEnabled),
    NAME(cudaErrorHostMemoryAlreadyRegistered),
    NAME(cudaErrorHostMemoryNotRegistered),
    NAME(cudaErrorNotPermitted),
    NAME(cudaErrorNotSupported),
    NAME(cudaErrorStreamCaptureUnsupported),
    NAME(cudaErrorStreamCaptureInvalidated),
    NAME(cudaErrorStreamCaptureMerge),
    NAME(cudaErrorStreamCaptureUnmatched),
    NAME(cudaErrorStreamCaptureIsolation),
    NAME(cudaErrorStreamCaptureImplicit),
    NAME(cudaErrorCapturedEvent),
};

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (NAMES[i].code == error) return NAMES[i].name;
    return "cudaErrorUnknown";
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) { return tell(cuDriverGetVersion(version)); }

/* ---- devices */

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    CUresult result = begin();
    return tell(result ? result : cuDeviceGetCount(count));
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    CUcontext context = NULL;
    CUresult result = begin();
    if (!result) result = cuCtxGetCurrent(&context);
    *device = DEVICE;
    return tell(result || !context ? result : cuCtxGetDevice(device));
}

EXPORT cudaError_t cudaSetDevice(int device) {
    CUcontext context;
    CUresult result = begin();
    if (!result) result = cuDevicePrimaryCtxRetain(&context, device);
    if (!result) result = cuCtxSetCurrent(context);
    if (!result) DEVICE = device;
    return tell(result);
}

static int attribute(CUdevice_attribute what, int device) {
    int value = 0;
    cuDeviceGetAttribute(&value, what, device);
    return value;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    CUresult result = begin();
    if (!result) result = cuDeviceGet(&device, device);
    if (result) return tell(result);
    memset(p, 0, sizeof *p);
    cuDeviceGetName(p->name, sizeof p->name, device);
    cuDeviceGetUuid((CUuuid *)&p->uuid, device);
    cuDeviceTotalMem(&p->totalGlobalMem, device);
#define TAKE(field, what) p->field = attribute(CU_DEVICE_ATTRIBUTE_##what, device)
    p->sharedMemPerBlock = p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin =
        (size_t)attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, device);
    p->memPitch = (size_t)attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH, device);
    p->totalConstMem = (size_t)attribute(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, device);
    p->textureAlignment = (size_t)attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, device);
    TAKE(regsPerBlock, MAX_REGISTERS_PER_BLOCK);
    TAKE(regsPerMultiprocessor, MAX_REGISTERS_PER_MULTIPROCESSOR);
    TAKE(warpSize, WARP_SIZE);
    TAKE(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK);
    TAKE(maxThreadsDim[0], MAX_BLOCK_DIM_X);
    TAKE(maxThreadsDim[1], MAX_BLOCK_DIM_Y);
    TAKE(maxThreadsDim[2], MAX_BLOCK_DIM_Z);
    TAKE(maxGridSize[0], MAX_GRID_DIM_X);
    TAKE(maxGridSize[1], MAX_GRID_DIM_Y);
    TAKE(maxGridSize[2], MAX_GRID_DIM_Z);
    TAKE(major, COMPUTE_CAPABILITY_MAJOR);
    TAKE(minor, COMPUTE_CAPABILITY_MINOR);
    TAKE(multiProcessorCount, MULTIPROCESSOR_COUNT);
    TAKE(maxThreadsPerMultiProcessor, MAX_THREADS_PER_MULTIPROCESSOR);
    TAKE(maxBlocksPerMultiProcessor, MAX_BLOCKS_PER_MULTIPROCESSOR);
    TAKE(canMapHostMemory, CAN_MAP_HOST_MEMORY);
    TAKE(concurrentKernels, CONCURRENT_KERNELS);
    TAKE(unifiedAddressing, UNIFIED_ADDRESSING);
    TAKE(asyncEngineCount, ASYNC_ENGINE_COUNT);
    TAKE(streamPrioritiesSupported, STREAM_PRIORITIES_SUPPORTED);
    TAKE(hostRegisterSupported, HOST_REGISTER_SUPPORTED);
    TAKE(l2CacheSize, L2_CACHE_SIZE);
    TAKE(memoryBusWidth, GLOBAL_MEMORY_BUS_WIDTH);
    TAKE(pciBusID, PCI_BUS_ID);
    return cudaSuccess;
}

IS_ANYWHERE(cudaDeviceGetAttribute, (int *value, enum cudaDeviceAttr what, int device),
            cuDeviceGetAttribute(value, (CUdevice_attribute)what, device))
IS_ANYWHERE(cudaDeviceGetPCIBusId, (char *text, int size, int device),
            cuDeviceGetPCIBusId(text, size, device))
IS_ANYWHERE(cudaDeviceGetByPCIBusId, (int *device, const char *text),
            cuDeviceGetByPCIBusId(device, text))
IS(cudaDeviceSynchronize, (void), cuCtxSynchronize())
IS(cudaDeviceCanAccessPeer, (int *can, int device, int peer),
   cuDeviceCanAccessPeer(can, device, peer))
IS(cudaProfilerStart, (void), CUDA_SUCCESS)
IS(cudaProfilerStop, (void), CUDA_SUCCESS)

/* Any device can always reach any other; only who asks twice, or takes back what is not given,
 * is told so. */
static _Thread_local unsigned PEERS;

static CUresult change_peer(int peer, bool enable) {
    CUdevice device;
    CUresult result = cuDeviceGet(&device, peer);
    if (result) return result;
    unsigned bit = 1u << peer;
    if (enable && (PEERS & bit)) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    if (!enable && !(PEERS & bit)) return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    PEERS ^= bit;
    return CUDA_SUCCESS;
}

IS(cudaDeviceEnablePeerAccess, (int peer, unsigned flags),
   flags ? CUDA_ERROR_INVALID_VALUE : change_peer(peer, true))
IS(cudaDeviceDisablePeerAccess, (int peer), change_peer(peer, false))

/* ---- memory */

IS(cudaMalloc, (void **made, size_t size),
   size ? cuMemAlloc((CUdeviceptr *)made, size) : (*made = NULL, CUDA_SUCCESS))
IS(cudaFree, (void *address), cuMemFree((CUdeviceptr)address))
IS(cudaHostAlloc, (void **made, size_t size, unsigned flags), cuMemHostAlloc(made, size, flags))
IS(cudaFreeHost, (void *address), address ? cuMemFreeHost(address) : CUDA_SUCCESS)
IS(cudaHostRegister, (void *address, size_t size, unsigned flags),
   cuMemHostRegister(address, size, flags))
IS(cudaHostUnregister, (void *address), cuMemHostUnregister(address))
IS(cudaMemGetInfo, (size_t *left, size_t *all), cuMemGetInfo(left, all))

static CUresult describe(struct cudaPointerAttributes *out, CUdeviceptr address) {
    unsigned type = 0;
    out->type = cudaMemoryTypeUnregistered;
    out->device = -2;
    out->devicePointer = out->hostPointer = NULL;
    if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))
        return CUDA_SUCCESS; /* memory of the host that CUDA does not know */
    bool on_host = type == CU_MEMORYTYPE_HOST;
    out->type = on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->devicePointer = (void *)address;
    if (on_host) out->hostPointer = (void *)address;
    return cuPointerGetAttribute(&out->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
}

IS(cudaPointerGetAttributes, (struct cudaPointerAttributes * out, const void *address),
   describe(out, (CUdeviceptr)address))

static CUresult copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    CUdeviceptr into = (CUdeviceptr)to, out_of = (CUdeviceptr)from;
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return cuMemcpyHtoD(into, from, size);
    case cudaMemcpyDeviceToHost:
        return cuMemcpyDtoH(to, out_of, size);
    case cudaMemcpyDeviceToDevice:
        return cuMemcpyDtoD(into, out_of, size);
    default:
        return cuMemcpy(into, out_of, size);
    }
}

static CUresult copy_async(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                           CUstream stream) {
    CUdeviceptr into = (CUdeviceptr)to, out_of = (CUdeviceptr)from;
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return cuMemcpyHtoDAsync(into, from, size, stream);
    case cudaMemcpyDeviceToHost:
        return cuMemcpyDtoHAsync(to, out_of, size, stream);
    case cudaMemcpyDeviceToDevice:
        return cuMemcpyDtoDAsync(into, out_of, size, stream);
    default:
        return cuMemcpyAsync(into, out_of, size, stream);
    }
}

static CUDA_MEMCPY2D rectangle(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                               size_t width, size_t height) {
    return (CUDA_MEMCPY2D){
        .srcMemoryType = CU_MEMORYTYPE_UNIFIED,
        .srcDevice = (CUdeviceptr)from,
        .srcPitch = from_pitch,
        .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
        .dstDevice = (CUdeviceptr)to,
        .dstPitch = to_pitch,
        .WidthInBytes = width,
        .Height = height,
    };
}

IS(cudaMemcpy, (void *to, const void *from, size_t size, enum cudaMemcpyKind kind),
   copy(to, from, size, kind))
IS(cudaMemcpyAsync,
   (void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream),
   copy_async(to, from, size, kind, stream))
IS(cudaMemcpyPeer, (void *to, int device, const void *from, int peer, size_t size),
   ((void)device, (void)peer, copy(to, from, size, cudaMemcpyDeviceToDevice)))
IS(cudaMemcpyPeerAsync,
   (void *to, int device, const void *from, int peer, size_t size, cudaStream_t stream),
   ((void)device, (void)peer, copy_async(to, from, size, cudaMemcpyDeviceToDevice, stream)))

EXPORT cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                size_t width, size_t height, enum cudaMemcpyKind kind) {
    (void)kind;
    CUDA_MEMCPY2D p = rectangle(to, to_pitch, from, from_pitch, width, height);
    CUresult entered = enter();
    return tell(entered ? entered : cuMemcpy2DUnaligned(&p));
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                     size_t width, size_t height, enum cudaMemcpyKind kind,
                                     cudaStream_t stream) {
    (void)kind;
    CUDA_MEMCPY2D p = rectangle(to, to_pitch, from, from_pitch, width, height);
    CUresult entered = enter();
    return tell(entered ? entered : cuMemcpy2DAsync(&p, stream));
}

IS(cudaMemset, (void *to, int value, size_t size),
   cuMemsetD8((CUdeviceptr)to, (unsigned char)value, size))
IS(cudaMemsetAsync, (void *to, int value, size_t size, cudaStream_t stream),
   cuMemsetD8Async((CUdeviceptr)to, (unsigned char)value, size, stream))

/* ---- streams, events, graphs */

IS(cudaStreamCreate, (cudaStream_t * made), cuStreamCreate(made, 0))
IS(cudaStreamCreateWithFlags, (cudaStream_t * made, unsigned flags), cuStreamCreate(made, flags))
IS(cudaStreamCreateWithPriority, (cudaStream_t * made, unsigned flags, int priority),
   cuStreamCreateWithPriority(made, flags, priority))
IS(cudaStreamGetFlags, (cudaStream_t stream, unsigned *flags), cuStreamGetFlags(stream, flags))
IS(cudaStreamGetPriority, (cudaStream_t stream, int *priority),
   cuStreamGetPriority(stream, priority))
IS(cudaStreamDestroy, (cudaStream_t stream), cuStreamDestroy(stream))
IS(cudaStreamSynchronize, (cudaStream_t stream), cuStreamSynchronize(stream))
IS(cudaStreamQuery, (cudaStream_t stream), cuStreamQuery(stream))
IS(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags),
   cuStreamWaitEvent(stream, event, flags))
IS(cudaStreamAddCallback,
   (cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags),
   cuStreamAddCallback(stream, (CUstreamCallback)callback, data, flags))
IS(cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t function, void *data),
   cuLaunchHostFunc(stream, function, data))
IS(cudaStreamBeginCapture, (cudaStream_t stream, enum cudaStreamCaptureMode mode),
   cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode))
IS(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *made), cuStreamEndCapture(stream, made))
IS(cudaStreamIsCapturing, (cudaStream_t stream, enum cudaStreamCaptureStatus *status),
   cuStreamIsCapturing(stream, (CUstreamCaptureStatus *)status))
IS(cudaEventCreate, (cudaEvent_t * made), cuEventCreate(made, 0))
IS(cudaEventCreateWithFlags, (cudaEvent_t * made, unsigned flags), cuEventCreate(made, flags))
IS(cudaEventDestroy, (cudaEvent_t event), cuEventDestroy(event))
IS(cudaEventElapsedTime, (float *milliseconds, cudaEvent_t start, cudaEvent_t end),
   cuEventElapsedTime(milliseconds, start, end))
IS(cudaEventQuery, (cudaEvent_t event), cuEventQuery(event))
IS(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), cuEventRecord(event, stream))
IS(cudaEventSynchronize, (cudaEvent_t event), cuEventSynchronize(event))
IS(cudaGraphInstantiate, (cudaGraphExec_t * made, cudaGraph_t graph, unsigned long long flags),
   cuGraphInstantiateWithFlags(made, graph, flags))
IS(cudaGraphLaunch, (cudaGraphExec_t graph, cudaStream_t stream), cuGraphLaunch(graph, stream))
IS(cudaGraphUpload, (cudaGraphExec_t graph, cudaStream_t stream), cuGraphUpload(graph, stream))
IS(cudaGraphDestroy, (cudaGraph_t graph), cuGraphDestroy(graph))
IS(cudaGraphExecDestroy, (cudaGraphExec_t graph), cuGraphExecDestroy(graph))
