/* What the other emulated libraries ask of the emulated driver, beside CUDA's own functions. */
#ifndef EMULATED_SEAM_H
#define EMULATED_SEAM_H

#include <cuda.h>

#define EXPORT __attribute__((visibility("default")))

/* Say something on stderr, as one line. */
__attribute__((format(printf, 1, 2))) void emulated_say(const char *format, ...);

/* Say that a function is not emulated; CUDA_ERROR_NOT_SUPPORTED. */
CUresult emulated_missing(const char *name);

/* Where device memory can be touched: the addresses that a program sees have no access. What is
 * not on a device stays as it is. For functions that run on the thread of a stream. */
void *emulated_view(const void *address);

#endif
