/* What CUDA's headers expect of this one, which is in no package of headers alone: for functions
 * of the host, all of these say nothing. */
#ifndef EMULATED_HOST_DEFINES_H
#define EMULATED_HOST_DEFINES_H

#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __no_return__ __attribute__((noreturn))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __thread__ __thread
#define __import__
#define __export__
#define __cdecl
#define __annotate__(a)
#define __location__(a)
#define __launch_bounds__(...)
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __specialization_static
#define CUDARTAPI
#define CUDARTAPI_CDECL

#endif
