/* Modules are shared libraries that the emulated NVRTC has made; kernels run on streams' threads. */
#define _GNU_SOURCE
#include "driver.h"
#include "../include/emulated_abi.h"
#include <dlfcn.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct CUmod_st {
    const emulated_kernel_t *kernels;
};

static const emulated_host_t HOST_CALLS = {EMULATED_ABI, run_block, block_barrier, warp_barrier};
static _Thread_local bool IN_KERNEL;

bool is_in_kernel(void) { return IN_KERNEL; }

/* ---- modules; the libraries are never unloaded, as kernels of theirs may be queued */

static void *load(const void *image, size_t size) {
    char path[] = "/tmp/emulated-module-XXXXXX"; /* dlopen knows a library by its path */
    int file = mkstemp(path);
    if (file < 0) return NULL;
    bool written = write(file, image, size) == (ssize_t)size;
    close(file);
    void *library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) emulated_say("cuModuleLoadData: %s", written ? dlerror() : "/tmp is full");
    unlink(path);
    return library;
}

EXPORT CUresult cuModuleLoadData(CUmodule *made, const void *image) {
    const Elf64_Ehdr *elf = image;
    if (memcmp(elf->e_ident, ELFMAG, SELFMAG) || elf->e_type != ET_DYN) {
        emulated_say("cuModuleLoadData: this is no module of the emulated NVRTC");
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    void *library = load(image, elf->e_shoff + (size_t)elf->e_shnum * elf->e_shentsize);
    emulated_enter_t *enter = library ? (emulated_enter_t *)dlsym(library, "emulated_enter") : NULL;
    const emulated_kernel_t *kernels;
    if (!enter || !enter(&HOST_CALLS, &kernels)) return CUDA_ERROR_INVALID_IMAGE;
    *made = malloc(sizeof **made);
    if (!*made) return CUDA_ERROR_OUT_OF_MEMORY;
    (*made)->kernels = kernels;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
    const emulated_kernel_t *each = module->kernels;
    while (each && strcmp(each->name, name)) each = each->next;
    *found = (CUfunction)each;
    return each ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction function) {
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    switch (what) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = 1024;
        break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = 32;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = 48 << 10;
        break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = 90;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute what, int value) {
    (void)what, (void)value;
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction function, int size,
                                                            size_t shared) {
    (void)shared;
    *n = size > 0 ? 2048 / size : 0;
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *size, CUfunction function,
                                                 CUoccupancyB2DSize shared_of, size_t shared,
                                                 int limit) {
    (void)shared_of, (void)shared;
    *size = limit > 0 && limit < 256 ? limit : 256;
    *grid = 8;
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- launches */

typedef struct {
    const emulated_kernel_t *kernel;
    emulated_launch_t launch;
    void *arguments[];
} run_t;

static void run_kernel(void *arg) {
    run_t *run = arg;
    watch_faults();
    IN_KERNEL = true;
    run->kernel->run(&run->launch, run->arguments);
    IN_KERNEL = false;
    close_after_kernel();
}

static size_t aligned(size_t size) { return (size + 15) & ~(size_t)15; }

/* Let the pointers inside an argument, such as the data of an array, be those that can be used. */
static void show_memory(char *argument, size_t size) {
    for (size_t at = 0; at + sizeof(uintptr_t) <= size; at += sizeof(uintptr_t)) {
        void *word;
        memcpy(&word, argument + at, sizeof word);
        if (!is_device_address((uintptr_t)word) || range_of(word).kind != DEVICE) continue;
        word = emulated_view(word);
        memcpy(argument + at, &word, sizeof word);
    }
}

static run_t *new_run(const emulated_kernel_t *kernel, void **given) {
    size_t head = aligned(sizeof(run_t) + (size_t)kernel->n_arguments * sizeof(void *)),
           size = head;
    for (int i = 0; i < kernel->n_arguments; i++) size += aligned(kernel->sizes[i]);
    run_t *run = aligned_alloc(16, size);
    if (!run) return NULL;
    char *at = (char *)run + head;
    run->kernel = kernel;
    for (int i = 0; i < kernel->n_arguments; i++) {
        run->arguments[i] = memcpy(at, given[i], kernel->sizes[i]);
        show_memory(at, kernel->sizes[i]);
        at += aligned(kernel->sizes[i]);
    }
    return run;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz,
                               unsigned bx, unsigned by, unsigned bz, unsigned shared,
                               CUstream stream, void **arguments, void **extra) {
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    if (extra) return emulated_missing("cuLaunchKernel with `extra`");
    if (!gx || !gy || !gz || !bx || !by || !bz || (uint64_t)bx * by * bz > 1024 || gy > 65535 ||
        gz > 65535 || shared > 48 << 10)
        return CUDA_ERROR_INVALID_VALUE;
    run_t *run = new_run((const emulated_kernel_t *)function, arguments);
    if (!run) return CUDA_ERROR_OUT_OF_MEMORY;
    run->launch = (emulated_launch_t){{gx, gy, gz}, {bx, by, bz}};
    return put(stream, (work_t){run_kernel, free, run});
}

/* ---- what CuPy can call and is not here */

#define MISSING(name, ...) \
    EXPORT CUresult name(__VA_ARGS__) { return emulated_missing(#name); }
MISSING(cuModuleLoad, CUmodule *, const char *)
MISSING(cuLinkComplete, CUlinkState, void **, size_t *)
MISSING(cuLinkDestroy, CUlinkState)
MISSING(cuLinkCreate_v2, unsigned, CUjit_option *, void **, CUlinkState *)
MISSING(cuLinkAddData_v2, CUlinkState, CUjitInputType, void *, size_t, const char *, unsigned,
        CUjit_option *, void **)
MISSING(cuLinkAddFile_v2, CUlinkState, CUjitInputType, const char *, unsigned, CUjit_option *,
        void **)
MISSING(cuModuleGetGlobal_v2, CUdeviceptr *, size_t *, CUmodule, const char *)
MISSING(cuLaunchCooperativeKernel, CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
        unsigned, unsigned, CUstream, void **)
