/* Devices, contexts and errors. EMULATED_GPU_COUNT says how many devices the machine has. */
#define _GNU_SOURCE
#include "driver.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 16 };

static pthread_mutex_t OWN_LOCK = PTHREAD_MUTEX_INITIALIZER;
static context_t PRIMARY[MOST_DEVICES];
static int N_DEVICES, NUMBERS[MOST_DEVICES]; /* the machine's numbers, by the process's */
static bool READY;
static _Thread_local context_t *STACK[DEEPEST];
static _Thread_local int DEPTH;

EXPORT void emulated_say(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "emulated GPU: %s\n", text);
}

EXPORT CUresult emulated_missing(const char *name) {
    emulated_say("%s is not emulated", name);
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- devices */

/* Read CUDA_VISIBLE_DEVICES: numbers up to the first that is none. */
static void choose_visible(const char *text, int n_all) {
    while (N_DEVICES < MOST_DEVICES) {
        char *end;
        long number = strtol(text, &end, 10);
        if (end == text || number < 0 || number >= n_all) return;
        NUMBERS[N_DEVICES++] = (int)number;
        if (*end != ',') return;
        text = end + 1;
    }
}

EXPORT CUresult cuInit(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&OWN_LOCK);
    if (!READY) {
        const char *count = getenv("EMULATED_GPU_COUNT"), *visible = getenv("CUDA_VISIBLE_DEVICES");
        int n_all = count ? atoi(count) : 1;
        if (n_all > MOST_DEVICES) n_all = MOST_DEVICES;
        if (visible) choose_visible(visible, n_all);
        while (!visible && N_DEVICES < n_all) NUMBERS[N_DEVICES] = N_DEVICES, N_DEVICES++;
        watch_faults();
        READY = true;
    }
    pthread_mutex_unlock(&OWN_LOCK);
    return N_DEVICES ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    *count = N_DEVICES;
    return READY ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static CUresult check(int device) {
    if (!READY) return CUDA_ERROR_NOT_INITIALIZED;
    return device < 0 || device >= N_DEVICES ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return check(number);
}

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    snprintf(name, (size_t)size, "Emulated GPU");
    return check(device);
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    TRY(check(device));
    memcpy(uuid->bytes, "emulated-device-", 16);
    uuid->bytes[15] = (char)('a' + NUMBERS[device]);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
    TRY(check(device));
    snprintf(text, (size_t)size, "0000:%02X:00.0", 0x10 + NUMBERS[device]);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2) return CUDA_ERROR_INVALID_VALUE;
    for (*device = 0; *device < N_DEVICES; ++*device)
        if ((unsigned)NUMBERS[*device] + 0x10 == bus) return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_DEVICE;
}

#define ATTRIBUTE(name) [CU_DEVICE_ATTRIBUTE_##name]
static const int ATTRIBUTES[CU_DEVICE_ATTRIBUTE_MAX] = {
    ATTRIBUTE(MAX_THREADS_PER_BLOCK) = 1024,
    ATTRIBUTE(MAX_BLOCK_DIM_X) = 1024,
    ATTRIBUTE(MAX_BLOCK_DIM_Y) = 1024,
    ATTRIBUTE(MAX_BLOCK_DIM_Z) = 64,
    ATTRIBUTE(MAX_GRID_DIM_X) = 0x7fffffff,
    ATTRIBUTE(MAX_GRID_DIM_Y) = 65535,
    ATTRIBUTE(MAX_GRID_DIM_Z) = 65535,
    ATTRIBUTE(MAX_SHARED_MEMORY_PER_BLOCK) = 48 << 10,
    ATTRIBUTE(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) = 48 << 10,
    ATTRIBUTE(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR) = 48 << 10,
    ATTRIBUTE(TOTAL_CONSTANT_MEMORY) = 64 << 10,
    ATTRIBUTE(WARP_SIZE) = 32,
    ATTRIBUTE(MAX_PITCH) = 0x7fffffff,
    ATTRIBUTE(MAX_REGISTERS_PER_BLOCK) = 65536,
    ATTRIBUTE(MAX_REGISTERS_PER_MULTIPROCESSOR) = 65536,
    ATTRIBUTE(CLOCK_RATE) = 1000000,
    ATTRIBUTE(MEMORY_CLOCK_RATE) = 1000000,
    ATTRIBUTE(GLOBAL_MEMORY_BUS_WIDTH) = 512,
    ATTRIBUTE(L2_CACHE_SIZE) = 4 << 20,
    ATTRIBUTE(MAX_THREADS_PER_MULTIPROCESSOR) = 2048,
    ATTRIBUTE(MAX_BLOCKS_PER_MULTIPROCESSOR) = 32,
    ATTRIBUTE(TEXTURE_ALIGNMENT) = 512,
    ATTRIBUTE(MULTIPROCESSOR_COUNT) = 4,
    ATTRIBUTE(CAN_MAP_HOST_MEMORY) = 1,
    ATTRIBUTE(CONCURRENT_KERNELS) = 1,
    ATTRIBUTE(UNIFIED_ADDRESSING) = 1,
    ATTRIBUTE(STREAM_PRIORITIES_SUPPORTED) = 1,
    ATTRIBUTE(HOST_REGISTER_SUPPORTED) = 1,
    ATTRIBUTE(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) = 1,
    ATTRIBUTE(ASYNC_ENGINE_COUNT) = 2,
    ATTRIBUTE(COMPUTE_CAPABILITY_MAJOR) = 9,
}; /* what has no row is not there: textures, pools of memory, managed memory */

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
    TRY(check(device));
    if (what < 1 || what >= CU_DEVICE_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *value = what == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? 0x10 + NUMBERS[device] : ATTRIBUTES[what];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    *can = device != peer;
    TRY(check(device));
    return check(peer);
}

/* ---- contexts */

context_t *current_context(void) { return DEPTH ? STACK[DEPTH - 1] : NULL; }

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
    TRY(check(device));
    pthread_mutex_lock(&OWN_LOCK);
    context_t *context = &PRIMARY[device];
    if (!context->legacy) {
        context->device = device;
        context->legacy = new_stream(context, CU_STREAM_DEFAULT, 0);
        context->legacy->blocking = false; /* its own rule: see `push` */
        context->per_thread = new_stream(context, CU_STREAM_DEFAULT, 0);
    }
    pthread_mutex_unlock(&OWN_LOCK);
    *made = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return check(device); }

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    if (!DEPTH) DEPTH = 1;
    STACK[DEPTH - 1] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current_context();
    return READY ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (DEPTH == DEEPEST) return CUDA_ERROR_OUT_OF_MEMORY;
    STACK[DEPTH++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!DEPTH) return CUDA_ERROR_INVALID_CONTEXT;
    DEPTH--;
    if (context) *context = STACK[DEPTH];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current_context()->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void) {
    if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
    TRY(refuse_if_captured());
    return finish_device(current_context()->device);
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuProfilerStart(void) { return CUDA_SUCCESS; }
EXPORT CUresult cuProfilerStop(void) { return CUDA_SUCCESS; }

/* ---- errors */

typedef struct {
    CUresult code;
    const char *name, *text;
} error_t;

#define ERROR(name, text) {CUDA_##name, "CUDA_" #name, text}
static const error_t ERRORS[] = {
    ERROR(SUCCESS, "no error"),
    ERROR(ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(ERROR_MAP_FAILED, "mapping of memory failed"),
    ERROR(ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ERROR(ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(ERROR_NOT_READY, "device not ready"),
    ERROR(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    ERROR(ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    ERROR(ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the memory is already registered"),
    ERROR(ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to registered memory"),
    ERROR(ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(ERROR_NOT_SUPPORTED, "operation not supported by the emulated GPU"),
    ERROR(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(ERROR_STREAM_CAPTURE_INVALIDATED, "an earlier error has invalidated the capture"),
    ERROR(ERROR_STREAM_CAPTURE_MERGE, "the operation would join two captures"),
    ERROR(ERROR_STREAM_CAPTURE_UNMATCHED, "the capture was not begun in this stream"),
    ERROR(ERROR_STREAM_CAPTURE_ISOLATION, "dependency on uncaptured work in another stream"),
    ERROR(ERROR_STREAM_CAPTURE_IMPLICIT, "the default stream would depend on a captured one"),
    ERROR(ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capture"),
    ERROR(ERROR_UNKNOWN, "unknown error"),
};

static const error_t *error_of(CUresult code) {
    const error_t *each = ERRORS, *last = ERRORS + sizeof ERRORS / sizeof *ERRORS - 1;
    while (each < last && each->code != code) each++;
    return each;
}

EXPORT CUresult cuGetErrorName(CUresult code, const char **name) {
    *name = error_of(code)->name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = error_of(code)->text;
    return CUDA_SUCCESS;
}
