/* Memory: what is on a device, and what of the host is page-locked.
 *
 * An allocation is a memfd that is mapped twice. At the address which the program sees it has no
 * access, so that a device pointer that is used on the host is a fault, and `faults.c` says so; what
 * runs on streams reaches the same bytes at `emulated_view`. Addresses are never given out again, so
 * what is used after it was freed is a fault, too. New memory is filled with 0xa5.
 */
#define _GNU_SOURCE
#include "driver.h"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FIRST ((uintptr_t)1 << 44)  /* the addresses that programs see */
#define SPAN ((uintptr_t)1 << 42)   /* of each device */
#define SHIFT (SPAN * MOST_DEVICES) /* from there to where memory can be touched */
#define TOTAL ((size_t)4 << 30)     /* what a device has */
enum { GRANULE = 64 << 10, FILLED = 1 << 20, AT_ONCE = 64 };

typedef struct block {
    struct block *next;
    range_t range;
    size_t mapped; /* 0: registered, the program's own */
    int n_open;    /* kernels for which it has been opened */
    unsigned flags;
} block_t;

static pthread_mutex_t OWN_LOCK = PTHREAD_MUTEX_INITIALIZER;
static block_t *BLOCKS;
static uintptr_t TOP[MOST_DEVICES];
static size_t USED[MOST_DEVICES];
static _Thread_local uintptr_t OPENED[AT_ONCE];
static _Thread_local int N_OPENED;

bool is_device_address(uintptr_t address) { return address >= FIRST && address < FIRST + SHIFT; }

EXPORT void *emulated_view(const void *address) {
    uintptr_t at = (uintptr_t)address;
    return (void *)(is_device_address(at) ? at + SHIFT : at);
}

/* ---- the table of what there is */

static block_t *block_of(uintptr_t address) { /* with OWN_LOCK */
    block_t *each = BLOCKS;
    while (each && address - each->range.base >= each->range.size) each = each->next;
    return each;
}

range_t range_of(const void *address) {
    pthread_mutex_lock(&OWN_LOCK);
    const block_t *block = block_of((uintptr_t)address);
    range_t range = block ? block->range : (range_t){0};
    pthread_mutex_unlock(&OWN_LOCK);
    return range;
}

/* Whether memory may be made now, and for which context. */
static CUresult may_make(size_t size, context_t **context) {
    TRY(refuse_if_captured());
    *context = current_context();
    if (!*context) return CUDA_ERROR_INVALID_CONTEXT;
    return size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static size_t in_granules(size_t size) { return (size + GRANULE - 1) / GRANULE * GRANULE; }

static CUresult add(range_t range, size_t mapped, unsigned flags) {
    block_t *block = malloc(sizeof *block);
    if (!block) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&OWN_LOCK);
    *block = (block_t){BLOCKS, range, mapped, 0, flags};
    BLOCKS = block;
    pthread_mutex_unlock(&OWN_LOCK);
    return CUDA_SUCCESS;
}

/* Take what begins at `base` out of the table when nothing uses it any more, as CUDA does. */
static CUresult take(uintptr_t base, kind_t kind, block_t *taken) {
    TRY(refuse_if_captured());
    range_t range = range_of((void *)base);
    if (range.kind != kind || range.base != base) return CUDA_ERROR_INVALID_VALUE;
    TRY(finish_device(kind == DEVICE ? range.device : -1));
    pthread_mutex_lock(&OWN_LOCK);
    block_t **at = &BLOCKS;
    while (*at && (*at)->range.base != base) at = &(*at)->next;
    block_t *block = *at; /* NULL: another thread was here meanwhile */
    if (block) {
        *taken = *block;
        *at = block->next;
        if (kind == DEVICE) USED[range.device] -= block->mapped;
    }
    pthread_mutex_unlock(&OWN_LOCK);
    free(block);
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- device memory */

static bool reserve(int device, size_t size, uintptr_t *base) {
    pthread_mutex_lock(&OWN_LOCK);
    bool fits = USED[device] + size <= TOTAL && TOP[device] + size + GRANULE <= SPAN;
    if (fits) {
        *base = FIRST + (uintptr_t)device * SPAN + TOP[device];
        TOP[device] += size + GRANULE; /* what is in between is never mapped */
        USED[device] += size;
    }
    pthread_mutex_unlock(&OWN_LOCK);
    return fits;
}

static bool map_twice(uintptr_t base, size_t size) {
    int file = memfd_create("emulated GPU", MFD_CLOEXEC), how = MAP_SHARED | MAP_FIXED_NOREPLACE;
    bool made = file >= 0 && !ftruncate(file, (off_t)size) &&
                mmap((void *)base, size, PROT_NONE, how, file, 0) == (void *)base &&
                mmap((void *)(base + SHIFT), size, PROT_READ | PROT_WRITE, how, file, 0) ==
                    (void *)(base + SHIFT);
    if (file >= 0) close(file);
    return made;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *made, size_t size) {
    context_t *context;
    TRY(may_make(size, &context));
    size_t mapped = in_granules(size);
    uintptr_t base;
    if (!reserve(context->device, mapped, &base)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (!map_twice(base, mapped)) {
        emulated_say("no %zu bytes can be mapped at %p", mapped, (void *)base);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset((void *)(base + SHIFT), 0xa5, size < FILLED ? size : FILLED);
    *made = base;
    return add((range_t){DEVICE, context->device, base, size}, mapped, 0);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    block_t block;
    if (!address) return refuse_if_captured();
    TRY(take(address, DEVICE, &block));
    munmap((void *)address, block.mapped);
    munmap(emulated_view((void *)address), block.mapped);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *left, size_t *all) {
    if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
    *all = TOTAL;
    *left = TOTAL - USED[current_context()->device];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *size, CUdevice device) {
    *size = TOTAL;
    return device < MOST_DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

/* ---- [Note: opening] Pointers that a kernel is given are those at which it can touch memory (see
 * `modules.c`), but not the pointers that it reads from memory, as CuPy's concatenation does. Where
 * a kernel uses one, its block is opened until the kernel has ended. */

bool open_for_kernel(uintptr_t address) {
    pthread_mutex_lock(&OWN_LOCK);
    block_t *block = block_of(address);
    bool opens = block && block->range.kind == DEVICE && N_OPENED < AT_ONCE &&
                 !mprotect((void *)block->range.base, block->mapped, PROT_READ | PROT_WRITE);
    if (opens) {
        block->n_open++;
        OPENED[N_OPENED++] = block->range.base;
    }
    pthread_mutex_unlock(&OWN_LOCK);
    return opens;
}

void close_after_kernel(void) {
    while (N_OPENED) {
        pthread_mutex_lock(&OWN_LOCK);
        block_t *block = block_of(OPENED[--N_OPENED]);
        if (block && --block->n_open == 0)
            mprotect((void *)block->range.base, block->mapped, PROT_NONE);
        pthread_mutex_unlock(&OWN_LOCK);
    }
}

/* ---- page-locked memory of the host */

EXPORT CUresult cuMemHostAlloc(void **made, size_t size, unsigned flags) {
    context_t *context;
    TRY(may_make(size, &context));
    size_t mapped = in_granules(size);
    void *at = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = at;
    return add((range_t){HOST, context->device, (uintptr_t)at, size}, mapped, flags);
}

EXPORT CUresult cuMemFreeHost(void *address) {
    block_t block;
    TRY(take((uintptr_t)address, HOST, &block));
    munmap(address, block.mapped);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    context_t *context;
    TRY(may_make(address ? size : 0, &context));
    if (range_of(address).kind || range_of((char *)address + size - 1).kind)
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return add((range_t){HOST, context->device, (uintptr_t)address, size}, 0, flags);
}

EXPORT CUresult cuMemHostUnregister(void *address) {
    block_t block;
    CUresult result = take((uintptr_t)address, HOST, &block);
    return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : result;
}

/* ---- what a pointer is */

EXPORT CUresult cuPointerGetAttribute(void *out, CUpointer_attribute what, CUdeviceptr address) {
    range_t range = range_of((void *)address);
    if (range.kind == UNKNOWN) return CUDA_ERROR_INVALID_VALUE;
    switch (what) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = range.kind == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)out = range.device;
        return CUDA_SUCCESS;
    default:
        return emulated_missing("this attribute of cuPointerGetAttribute");
    }
}
