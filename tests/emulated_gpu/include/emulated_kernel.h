/* CUDA C++ as a compiler for the host takes it: comes before every source of the emulated NVRTC.
 *
 * A thread of a kernel is a call of its function, and a fiber where the source has barriers. Shared
 * memory is the thread's of the host, as one block runs at a time on a stream. What a kernel uses and
 * is not here is an error of the compiler.
 */
#ifndef EMULATED_KERNEL_H
#define EMULATED_KERNEL_H

#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <math.h>
#include <tuple>
#include <type_traits>
#include <utility>

#include "emulated_abi.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#define __CUDA_ARCH__ 900
#define __CUDACC_RTC__ 1

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

static thread_local uint3 threadIdx, blockIdx;
static thread_local dim3 blockDim, gridDim;
static const int warpSize = 32;

/* ---- the kernels of a module, and how one is run */

namespace emulated {

template <class T> using only_numbers = std::enable_if_t<std::is_arithmetic<T>::value>;

static const emulated_host_t *host;
static emulated_kernel_t *kernels;
static void add_all(); /* at the end of each source, by NVRTC */

template <auto function> struct kernel;

template <class... A, void (*function)(A...)> struct kernel<function> {
    static constexpr unsigned long sizes[sizeof...(A) + 1] = {sizeof(A)..., 0};

    template <size_t... I> static void call(void **arguments, std::index_sequence<I...>) {
        function(*static_cast<std::remove_reference_t<A> *>(arguments[I])...);
    }

    static void thread(void *arguments, unsigned) {
        call(static_cast<void **>(arguments), std::index_sequence_for<A...>());
    }

    static void place(unsigned i) {
        threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    }

    template <bool has_barriers>
    static void run(const emulated_launch_t *launch, void **arguments) {
        gridDim = {launch->grid.x, launch->grid.y, launch->grid.z};
        blockDim = {launch->block.x, launch->block.y, launch->block.z};
        unsigned n = blockDim.x * blockDim.y * blockDim.z;
        for (unsigned z = 0; z < gridDim.z; z++)
            for (unsigned y = 0; y < gridDim.y; y++)
                for (unsigned x = 0; x < gridDim.x; x++) {
                    blockIdx = {x, y, z};
                    if (has_barriers)
                        host->block(n, thread, place, arguments);
                    else
                        for (unsigned i = 0; i < n; i++) place(i), thread(arguments, i);
                }
    }
};

template <auto function, bool has_barriers> static void add(const char *name) {
    using K = kernel<function>;
    static emulated_kernel_t made = {kernels, name, sizeof(K::sizes) / sizeof *K::sizes - 1,
                                     K::sizes, K::template run<has_barriers>};
    kernels = &made;
}

} // namespace emulated

extern "C" __attribute__((visibility("default"))) int emulated_enter(
    const emulated_host_t *host, const emulated_kernel_t **kernels) {
    if (host->abi != EMULATED_ABI) return 0;
    emulated::host = host;
    if (!emulated::kernels) emulated::add_all();
    *kernels = emulated::kernels;
    return 1;
}

/* ---- barriers, and what threads of a warp exchange */

inline void __syncthreads() { emulated::host->barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { emulated::host->warp(mask); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace emulated {

static thread_local unsigned long long exchanged[1024];

inline unsigned self() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

/* Return what lane `from` has given, or the own value where that is outside of the segment. */
template <class T> inline T shuffle(unsigned mask, T value, int from, int width) {
    static_assert(sizeof(T) <= 8, "a warp exchanges values of up to 8 bytes");
    int own = self() % 32, first = own / width * width;
    __builtin_memcpy(&exchanged[self()], &value, sizeof value);
    host->warp(mask);
    if (from >= first && from < first + width)
        __builtin_memcpy(&value, &exchanged[self() - own + from], sizeof value);
    host->warp(mask);
    return value;
}

inline int lane() { return self() % 32; }

} // namespace emulated

template <class T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return emulated::shuffle(mask, value, emulated::lane() / width * width + lane % width, width);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, int by, int width = 32) {
    return emulated::shuffle(mask, value, emulated::lane() - by, width);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
    return emulated::shuffle(mask, value, emulated::lane() + by, width);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32) {
    return emulated::shuffle(mask, value, emulated::lane() ^ by, width);
}

/* ---- bits */

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }

namespace emulated {
template <class To, class From> inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To made;
    __builtin_memcpy(&made, &value, sizeof made);
    return made;
}
} // namespace emulated

inline int __float_as_int(float v) { return emulated::bits_as<int>(v); }
inline unsigned __float_as_uint(float v) { return emulated::bits_as<unsigned>(v); }
inline float __int_as_float(int v) { return emulated::bits_as<float>(v); }
inline float __uint_as_float(unsigned v) { return emulated::bits_as<float>(v); }
inline long long __double_as_longlong(double v) { return emulated::bits_as<long long>(v); }
inline double __longlong_as_double(long long v) { return emulated::bits_as<double>(v); }
inline int __double2hiint(double v) {
    return (int)(emulated::bits_as<unsigned long long>(v) >> 32);
}
inline int __double2loint(double v) { return (int)emulated::bits_as<unsigned long long>(v); }
inline double __hiloint2double(int high, int low) {
    return emulated::bits_as<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

/* ---- numbers */

template <class A, class B, class = emulated::only_numbers<A>, class = emulated::only_numbers<B>>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value) return std::fmin((T)a, (T)b);
    return (T)b < (T)a ? (T)b : (T)a;
}

template <class A, class B, class = emulated::only_numbers<A>, class = emulated::only_numbers<B>>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value) return std::fmax((T)a, (T)b);
    return (T)a < (T)b ? (T)b : (T)a;
}

inline double rsqrt(double v) { return 1 / std::sqrt(v); }
inline float rsqrt(float v) { return 1 / std::sqrt(v); }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
inline double sinpi(double v) { return std::sin(M_PI * v); }
inline double cospi(double v) { return std::cos(M_PI * v); }
inline void sincospi(double v, double *s, double *c) { *s = sinpi(v), *c = cospi(v); }
inline void __sincosf(float v, float *s, float *c) { *s = std::sin(v), *c = std::cos(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1 / v; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
template <class T> inline T __ldg(const T *at) { return *at; }

/* ---- atomics: other streams run beside this one */

template <class T> inline T atomicCAS(T *at, T old, T value) {
    __atomic_compare_exchange(at, &old, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return old;
}

namespace emulated {
template <class T, class F> inline T change(T *at, F changed) {
    T old, made;
    __atomic_load(at, &old, __ATOMIC_SEQ_CST);
    do made = changed(old);
    while (!__atomic_compare_exchange(at, &old, &made, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
} // namespace emulated

#define EMULATED_ATOMIC(name, T, expression)                                 \
    inline T name(T *at, T v) {                                              \
        return emulated::change(at, [v](T old) -> T { return expression; }); \
    }
#define EMULATED_ATOMICS(name, expression)      \
    EMULATED_ATOMIC(name, int, expression)      \
    EMULATED_ATOMIC(name, unsigned, expression) \
    EMULATED_ATOMIC(name, unsigned long long, expression)
EMULATED_ATOMICS(atomicAdd, old + v)
EMULATED_ATOMICS(atomicSub, old - v)
EMULATED_ATOMICS(atomicMax, old < v ? v : old)
EMULATED_ATOMICS(atomicMin, v < old ? v : old)
EMULATED_ATOMICS(atomicAnd, old &v)
EMULATED_ATOMICS(atomicOr, old | v)
EMULATED_ATOMICS(atomicXor, old ^ v)
EMULATED_ATOMICS(atomicExch, v)
EMULATED_ATOMIC(atomicAdd, float, old + v)
EMULATED_ATOMIC(atomicAdd, double, old + v)
EMULATED_ATOMIC(atomicMax, long long, old < v ? v : old)
EMULATED_ATOMIC(atomicMin, long long, v < old ? v : old)
EMULATED_ATOMIC(atomicExch, float, v)

#endif
