/* What the emulated driver and a module that the emulated NVRTC has compiled know of each other. */
#ifndef EMULATED_ABI_H
#define EMULATED_ABI_H

enum { EMULATED_ABI = 2 };

typedef struct {
    struct {
        unsigned x, y, z;
    } grid, block;
} emulated_launch_t;

typedef struct emulated_kernel {
    struct emulated_kernel *next;
    const char *name;
    int n_arguments;
    const unsigned long *sizes;
    void (*run)(const emulated_launch_t *, void **arguments);
} emulated_kernel_t;

/* What a kernel calls: threads of a block as fibers, and their barriers. */
typedef struct {
    int abi;
    void (*block)(unsigned n, void (*body)(void *, unsigned), void (*enter)(unsigned), void *arg);
    void (*barrier)(void);
    void (*warp)(unsigned mask);
} emulated_host_t;

/* What a module has as `emulated_enter`: hands over its kernels; 0 if it knows another ABI. */
typedef int emulated_enter_t(const emulated_host_t *, const emulated_kernel_t **kernels);

#endif
