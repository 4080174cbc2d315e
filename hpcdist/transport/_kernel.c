/* The compiled part of the shared-memory transport, all of it optional: `kernel.py` and
 * `shm/control.py` say what each function does and hold the same in NumPy and Python.
 *
 * `combine` reduces in blocks that stay in the cache: it reads the block of every rank,
 * accumulates in the order of the ranks and writes the result wherever it is wanted. 16-bit
 * floats are accumulated in float32.
 *
 * `ControlBlock` is the flags of one group of ranks on one node. A rank publishes with a release
 * store and looks with acquire loads; nothing here blocks: whoever has looked long enough without
 * success returns to Python, which yields, sleeps, and watches the clock.
 *
 * `ControlBlock.begin` and `go_on` reduce ordinary arrays through staging memory, part by part;
 * `reduce_attached` reduces them where they lie.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/uio.h>
#if defined(__linux__)
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif
#include <time.h>
#include <unistd.h>

#include "_recorder.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

/* Built with HPCDIST_BASELINE, it does what it does on an x86-64 without AVX2, for tests. */
#if defined(__x86_64__) && !defined(HPCDIST_BASELINE)
#define AVX2
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

/* ---- elements: how they are loaded into an accumulator, combined and stored */

enum { BLOCK = 4096 };          /* elements accumulated at a time: 16 or 32 KiB */
enum { LINE = 64 };             /* bytes of a cache line */

typedef void (*load_t)(void *acc, const void *src, size_t n);
typedef void (*fold_t)(void *acc, const void *src, size_t n);
typedef void (*store_t)(void *dst, void *acc, size_t n, double divisor);

#define LOAD(NAME, T, A, EXPR)                                                         \
    CLONES static void load_##NAME(void *acc_, const void *src_, size_t n) {           \
        A *acc = acc_;                                                                 \
        const T *src = src_;                                                           \
        for (size_t i = 0; i < n; i++) { T x = src[i]; acc[i] = (EXPR); }              \
    }
#define FOLD(NAME, T, A, EXPR)                                                         \
    CLONES static void fold_##NAME(void *acc_, const void *src_, size_t n) {           \
        A *acc = acc_;                                                                 \
        const T *src = src_;                                                           \
        for (size_t i = 0; i < n; i++) { A a = acc[i]; T x = src[i]; acc[i] = (EXPR); } \
    }
#define STORE(NAME, T, A, EXPR)                                                        \
    CLONES static void store_##NAME(void *dst_, void *acc_, size_t n, double divisor) { \
        T *dst = dst_;                                                                 \
        A *acc = acc_;                                                                 \
        if (divisor != 1.0) {                                                          \
            A by = (A)divisor;                                                         \
            for (size_t i = 0; i < n; i++) acc[i] = acc[i] / by;                       \
        }                                                                              \
        for (size_t i = 0; i < n; i++) { A a = acc[i]; dst[i] = (EXPR); }              \
    }

/* Plain numbers are accumulated as they are; integers wrap, so signs do not matter to + and *. */
#define PLAIN(NAME, T)                                                                 \
    LOAD(NAME, T, T, x)                                                                \
    STORE(NAME, T, T, a)                                                               \
    FOLD(NAME##_add, T, T, a + x)                                                      \
    FOLD(NAME##_mul, T, T, a * x)
#define ORDERED(NAME, T)                                                               \
    FOLD(NAME##_max, T, T, a > x ? a : x)                                              \
    FOLD(NAME##_min, T, T, a < x ? a : x)
#define BITS(NAME, T)                                                                  \
    FOLD(NAME##_or, T, T, a | x)                                                       \
    FOLD(NAME##_and, T, T, a & x)                                                      \
    FOLD(NAME##_xor, T, T, a ^ x)

PLAIN(f32, float)
PLAIN(f64, double)
PLAIN(u8, uint8_t)
PLAIN(u16, uint16_t)
PLAIN(u32, uint32_t)
PLAIN(u64, uint64_t)
ORDERED(i8, int8_t)
ORDERED(i16, int16_t)
ORDERED(i32, int32_t)
ORDERED(i64, int64_t)
ORDERED(u8, uint8_t)
ORDERED(u16, uint16_t)
ORDERED(u32, uint32_t)
ORDERED(u64, uint64_t)
BITS(u8, uint8_t)
BITS(u16, uint16_t)
BITS(u32, uint32_t)
BITS(u64, uint64_t)

static inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* bfloat16 is the upper half of a float32; round to nearest even, NaN to the quiet one. */
static inline uint16_t to_bf16(float x) {
    uint32_t bits = float_bits(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = ((bits >> 16) & 0x8000) | 0x7fc0;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}
LOAD(bf16, uint16_t, float, bits_float((uint32_t)x << 16))
FOLD(bf16_add, uint16_t, float, a + bits_float((uint32_t)x << 16))
FOLD(bf16_mul, uint16_t, float, a * bits_float((uint32_t)x << 16))
STORE(bf16, uint16_t, float, to_bf16(a))

#if defined(AVX2)
#define HALF __attribute__((target("avx2,f16c")))
static int have_half(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}
#define HALF_LOOP(NAME, EIGHT, ONE)                                                    \
    HALF static void NAME(void *acc_, const void *src_, size_t n) {                    \
        float *acc = acc_;                                                             \
        const uint16_t *src = src_;                                                    \
        size_t i = 0;                                                                  \
        for (; i + 8 <= n; i += 8) {                                                   \
            __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i)));   \
            _mm256_storeu_ps(acc + i, EIGHT);                                          \
        }                                                                              \
        for (; i < n; i++) { float x = _cvtsh_ss(src[i]); acc[i] = ONE; }              \
    }
HALF_LOOP(load_f16, x, x)
HALF_LOOP(fold_f16_add, _mm256_add_ps(_mm256_loadu_ps(acc + i), x), acc[i] + x)
HALF_LOOP(fold_f16_mul, _mm256_mul_ps(_mm256_loadu_ps(acc + i), x), acc[i] * x)
HALF static void store_f16(void *dst_, void *acc_, size_t n, double divisor) {
    uint16_t *dst = dst_;
    float *acc = acc_, by = (float)divisor;
    if (by != 1.0f)
        for (size_t i = 0; i < n; i++) acc[i] /= by;
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), 0));
    for (; i < n; i++) dst[i] = _cvtss_sh(acc[i], 0);
}
#elif defined(__aarch64__)
static int have_half(void) { return 1; }
LOAD(f16, __fp16, float, (float)x)
FOLD(f16_add, __fp16, float, a + (float)x)
FOLD(f16_mul, __fp16, float, a * (float)x)
STORE(f16, __fp16, float, (__fp16)a)
#else
static int have_half(void) { return 0; }
#define load_f16 NULL
#define fold_f16_add NULL
#define fold_f16_mul NULL
#define store_f16 NULL
#endif

/* MAX and MIN of floats, as reduction.py defines them: by the bits, -0.0 below 0.0, NaN wins. */
#define EXTREMUM(NAME, U, I, SHIFT, LIMIT, INFINITE)                                   \
    static inline I key_##NAME(U bits, I nan_key) {                                    \
        I flipped = (I)(bits ^ (((U)((I)bits >> SHIFT)) & LIMIT));                     \
        return (bits & LIMIT) > INFINITE ? nan_key : flipped;                          \
    }                                                                                  \
    LOAD(NAME##_maximum, U, I, key_##NAME(x, (I)LIMIT))                                    \
    LOAD(NAME##_minimum, U, I, key_##NAME(x, (I)(LIMIT + 1)))                              \
    static inline I larger_##NAME(I a, I b) { return a > b ? a : b; }                  \
    static inline I smaller_##NAME(I a, I b) { return a < b ? a : b; }                 \
    FOLD(NAME##_maximum, U, I, larger_##NAME(a, key_##NAME(x, (I)LIMIT)))                  \
    FOLD(NAME##_minimum, U, I, smaller_##NAME(a, key_##NAME(x, (I)(LIMIT + 1))))           \
    CLONES static void store_##NAME##_key(void *dst_, void *acc_, size_t n, double d) { \
        U *dst = dst_;                                                                 \
        I *acc = acc_;                                                                 \
        (void)d;                                                                       \
        for (size_t i = 0; i < n; i++)                                                 \
            dst[i] = (U)acc[i] ^ (((U)(acc[i] >> SHIFT)) & LIMIT);                     \
    }
EXTREMUM(f32, uint32_t, int32_t, 31, 0x7fffffffu, 0x7f800000u)
EXTREMUM(f64, uint64_t, int64_t, 63, 0x7fffffffffffffffull, 0x7ff0000000000000ull)

/* Sums and products of plain numbers from i to n: all sources and outputs in one pass, in
 * registers. Returns the first element that is left to the loops above. */
#define FUSED(NAME, T, OP)                                                             \
    CLONES static size_t fused_##NAME(const uintptr_t *sources, int n_sources,         \
                                      const uintptr_t *outs, int n_outs, size_t i,     \
                                      size_t n, double divisor) {                      \
        typedef T vec __attribute__((vector_size(32), aligned(1), may_alias));         \
        enum { LANES = 32 / sizeof(T), STEP = 4 * LANES };                             \
        for (; i + STEP <= n; i += STEP) {                                             \
            const vec *x = (const vec *)((const T *)sources[0] + i);                   \
            vec a = x[0], b = x[1], c = x[2], d = x[3];                                \
            for (int s = 1; s < n_sources; s++) {                                      \
                x = (const vec *)((const T *)sources[s] + i);                          \
                a = a OP x[0], b = b OP x[1], c = c OP x[2], d = d OP x[3];            \
            }                                                                          \
            if (divisor != 1.0) {                                                      \
                T by = (T)divisor;                                                     \
                a = a / by, b = b / by, c = c / by, d = d / by;                        \
            }                                                                          \
            for (int o = 0; o < n_outs; o++) {                                         \
                vec *y = (vec *)((T *)outs[o] + i);                                    \
                y[0] = a, y[1] = b, y[2] = c, y[3] = d;                                \
            }                                                                          \
        }                                                                              \
        return i;                                                                      \
    }
FUSED(f32_add, float, +)
FUSED(f32_mul, float, *)
FUSED(f64_add, double, +)
FUSED(f64_mul, double, *)
FUSED(u32_add, uint32_t, +)
FUSED(u32_mul, uint32_t, *)
FUSED(u64_add, uint64_t, +)
FUSED(u64_mul, uint64_t, *)

#if defined(AVX2)
/* The same for sums of 16-bit floats, eight at a time, in float32. */
#define FUSED_SHORT(NAME, WIDEN, NARROW)                                               \
    HALF static size_t fused_##NAME(const uintptr_t *sources, int n_sources,           \
                                    const uintptr_t *outs, int n_outs, size_t i,       \
                                    size_t n, double divisor) {                        \
        __m256 by = _mm256_set1_ps((float)divisor);                                    \
        for (; i + 16 <= n; i += 16) {                                                 \
            const __m128i *x = (const __m128i *)((const uint16_t *)sources[0] + i);    \
            __m256 a = WIDEN(_mm_loadu_si128(x)), b = WIDEN(_mm_loadu_si128(x + 1));   \
            for (int s = 1; s < n_sources; s++) {                                      \
                x = (const __m128i *)((const uint16_t *)sources[s] + i);               \
                a = _mm256_add_ps(a, WIDEN(_mm_loadu_si128(x)));                       \
                b = _mm256_add_ps(b, WIDEN(_mm_loadu_si128(x + 1)));                   \
            }                                                                          \
            if (divisor != 1.0) a = _mm256_div_ps(a, by), b = _mm256_div_ps(b, by);    \
            __m128i c = NARROW(a), d = NARROW(b);                                      \
            for (int o = 0; o < n_outs; o++) {                                         \
                __m128i *y = (__m128i *)((uint16_t *)outs[o] + i);                     \
                _mm_storeu_si128(y, c), _mm_storeu_si128(y + 1, d);                    \
            }                                                                          \
        }                                                                              \
        return i;                                                                      \
    }
HALF static inline __m256 widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
HALF static inline __m128i narrow_bf16(__m256 a) { /* `to_bf16`, eight at a time */
    __m256i bits = _mm256_castps_si256(a), one = _mm256_set1_epi32(1);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x8000));
    __m256i nan = _mm256_or_si256(sign, _mm256_set1_epi32(0x7fc0));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    __m256i chosen = _mm256_blendv_epi8(rounded, nan, is_nan);
    __m256i packed = _mm256_packus_epi32(chosen, chosen);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x88));
}
HALF static inline __m256 widen_f16(__m128i x) { return _mm256_cvtph_ps(x); }
HALF static inline __m128i narrow_f16(__m256 a) { return _mm256_cvtps_ph(a, 0); }
FUSED_SHORT(bf16_add, widen_bf16, narrow_bf16)
FUSED_SHORT(f16_add, widen_f16, narrow_f16)
#else
#define fused_bf16_add NULL
#define fused_f16_add NULL
#endif

typedef size_t (*fused_t)(const uintptr_t *, int, const uintptr_t *, int, size_t, size_t, double);

typedef struct {
    const char *name;
    size_t item; /* bytes of an element */
    load_t load;
    fold_t fold;
    store_t store;
    fused_t fused; /* or NULL */
} kernel_t;

#define ROW(OP, NAME, ITEM, TYPE, FOLDED)                                              \
    {OP "_" NAME, ITEM, load_##TYPE, fold_##FOLDED, store_##TYPE, NULL}
#define FAST(OP, NAME, ITEM, TYPE, FOLDED)                                             \
    {OP "_" NAME, ITEM, load_##TYPE, fold_##FOLDED, store_##TYPE, fused_##FOLDED}
#define KEYED(OP, NAME, ITEM, TYPE)                                                    \
    {#OP "_" NAME, ITEM, load_##TYPE##_##OP, fold_##TYPE##_##OP, store_##TYPE##_key, NULL}
#define NUMBERS(NAME, ITEM, TYPE)                                                      \
    ROW("add", NAME, ITEM, TYPE, TYPE##_add), ROW("multiply", NAME, ITEM, TYPE, TYPE##_mul)
#define FAST_NUMBERS(NAME, ITEM, TYPE)                                                 \
    FAST("add", NAME, ITEM, TYPE, TYPE##_add), FAST("multiply", NAME, ITEM, TYPE, TYPE##_mul)
#define INTEGERS(NUMBERS, NAME, ITEM, TYPE, SIGNED)                                    \
    NUMBERS(NAME, ITEM, TYPE), ROW("maximum", NAME, ITEM, TYPE, SIGNED##_max),         \
        ROW("minimum", NAME, ITEM, TYPE, SIGNED##_min),                                \
        ROW("bit_and", NAME, ITEM, TYPE, TYPE##_and),                                  \
        ROW("bit_or", NAME, ITEM, TYPE, TYPE##_or),                                    \
        ROW("bit_xor", NAME, ITEM, TYPE, TYPE##_xor)
#define SHORT_FLOATS(NAME, TYPE)                                                       \
    FAST("add", NAME, 2, TYPE, TYPE##_add), ROW("multiply", NAME, 2, TYPE, TYPE##_mul)

static const kernel_t KERNELS[] = {
    FAST_NUMBERS("float32", 4, f32),
    FAST_NUMBERS("float64", 8, f64),
    KEYED(maximum, "float32", 4, f32),
    KEYED(minimum, "float32", 4, f32),
    KEYED(maximum, "float64", 8, f64),
    KEYED(minimum, "float64", 8, f64),
    SHORT_FLOATS("bfloat16", bf16),
    SHORT_FLOATS("float16", f16),
    INTEGERS(NUMBERS, "int8", 1, u8, i8),
    INTEGERS(NUMBERS, "int16", 2, u16, i16),
    INTEGERS(FAST_NUMBERS, "int32", 4, u32, i32),
    INTEGERS(FAST_NUMBERS, "int64", 8, u64, i64),
    INTEGERS(NUMBERS, "uint8", 1, u8, u8),
    INTEGERS(NUMBERS, "uint16", 2, u16, u16),
    INTEGERS(FAST_NUMBERS, "uint32", 4, u32, u32),
    INTEGERS(FAST_NUMBERS, "uint64", 8, u64, u64),
    ROW("or", "bool", 1, u8, u8_or),
    ROW("and", "bool", 1, u8, u8_and),
    ROW("xor", "bool", 1, u8, u8_xor),
    /* two numbers each: `kernel.py` doubles the count */
    FAST("add", "complex64", 4, f32, f32_add),
    FAST("add", "complex128", 8, f64, f64_add),
};
enum { N_KERNELS = sizeof KERNELS / sizeof *KERNELS };

/* ---- combine */

enum { MOST = 256 }; /* ranks of one node; more of them reduce in Python */

typedef struct {
    const kernel_t *kernel;
    int n_sources, n_outs;
    uintptr_t sources[MOST], outs[MOST];
    size_t count;
    double divisor;
} job_t;

#if defined(__x86_64__)
/* Write a cache line past the caches. */
static inline void stream_line(char *to, const char *from) {
    __m128i a = _mm_loadu_si128((const __m128i *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

/* Write as many pages as there are past the caches, four at a time: the processor looks up where
 * the next ones lie while it copies others. Memory that ranks share has small pages. */
static size_t stream_pages(char *to, const char *from, size_t nbytes) {
    enum { STRIPE = 4096, ALL = 4 * STRIPE };
    size_t done = 0;
    for (; done + ALL <= nbytes; done += ALL)
        for (size_t line = done; line < done + STRIPE; line += 64)
            for (size_t i = line; i < line + ALL; i += STRIPE) stream_line(to + i, from + i);
    return done;
}
#endif

/* Write a run past the caches, whatever its place and length; `end_of_stream` has to follow. */
static void stream_run(char *to, const char *from, size_t nbytes) {
#if defined(__x86_64__)
    size_t head = (size_t)(-(uintptr_t)to % 64), i = head < nbytes ? head : nbytes;
    memcpy(to, from, i);
    i += stream_pages(to + i, from + i, nbytes - i);
    for (; i + 64 <= nbytes; i += 64) stream_line(to + i, from + i);
    memcpy(to + i, from + i, nbytes - i);
#else
    memcpy(to, from, nbytes);
#endif
}

static void end_of_stream(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Write past the caches. Not in the pipe: there what a core writes is read by another soon, and 64 KiB
 * to 16 MiB took 1.2 to 1.5 times as long. */
static void stream(char *to, const char *from, size_t nbytes) {
    stream_run(to, from, nbytes);
    end_of_stream();
}

/* From here on what is written would leave a core's cache before anyone reads it. Measured on a Xeon
 * with 2 MiB of it, two ranks: at 4 MiB 0.8 to 1 times the speed where arrays are used again and
 * again, 1.5 times where they are in no cache; from 8 MiB on 1.2 to 1.5 times. */
enum { STREAMED_FROM = 6 << 20 };

/* Copy what another core wrote: vectors are several times faster at it than "rep movsb". */
CLONES static void copy(char *restrict to, const char *restrict from, size_t nbytes) {
    typedef long long vector __attribute__((vector_size(32), aligned(1), may_alias));
    size_t i = 0;
    if (nbytes >= STREAMED_FROM) {
        stream(to, from, nbytes);
        return;
    }
    for (; i + 128 <= nbytes; i += 128)
        for (int j = 0; j < 128; j += 32) *(vector *)(to + i + j) = *(const vector *)(from + i + j);
    memcpy(to + i, from + i, nbytes - i);
}

/* Combine the elements from `at` to `end`, at most BLOCK of them. */
static void combine_block(const job_t *job, size_t at, size_t end) {
    char accumulator[BLOCK * 8] __attribute__((aligned(64)));
    const kernel_t *k = job->kernel;
    size_t n = end - at, start = at * k->item;
    k->load(accumulator, (const void *)(job->sources[0] + start), n);
    for (int s = 1; s < job->n_sources; s++)
        k->fold(accumulator, (const void *)(job->sources[s] + start), n);
    for (int o = 0; o < job->n_outs; o++)
        k->store((void *)(job->outs[o] + start), accumulator, n, o == 0 ? job->divisor : 1.0);
}

static void combine(const job_t *job) {
    const kernel_t *k = job->kernel;
    int fused = k->fused && job->n_outs > 0 && (k->item != 2 || have_half());
    size_t at = 0;
    if (fused)
        at = k->fused(job->sources, job->n_sources, job->outs, job->n_outs, 0, job->count,
                      job->divisor);
    for (; at < job->count; at += BLOCK)
        combine_block(job, at, job->count - at < BLOCK ? job->count : at + BLOCK);
}

static const kernel_t *kernel_of(PyObject *code_) {
    long code = PyLong_AsLong(code_);
    if (!PyErr_Occurred() && (code < 0 || code >= N_KERNELS))
        PyErr_SetString(PyExc_ValueError, "no such kernel");
    return PyErr_Occurred() ? NULL : &KERNELS[code];
}

/* An address is given as a number or as the object that owns the memory (the caller keeps it). */
static int as_address(PyObject *object, uintptr_t *address) {
    Py_buffer view;
    if (PyLong_CheckExact(object)) {
        *address = (uintptr_t)PyLong_AsUnsignedLongLong(object);
        return PyErr_Occurred() ? -1 : 0;
    }
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) return -1;
    *address = (uintptr_t)view.buf;
    PyBuffer_Release(&view);
    return 0;
}

static PyObject *py_address(PyObject *self, PyObject *object) {
    (void)self;
    uintptr_t address;
    return as_address(object, &address) < 0 ? NULL : PyLong_FromUnsignedLongLong(address);
}

static int read_addresses(PyObject *tuple, uintptr_t *into) {
    Py_ssize_t n = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    if (n < 1 || n > MOST) {
        PyErr_SetString(PyExc_ValueError, "not a tuple of 1 to 256 addresses");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        into[i] = (uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : (int)n;
}

static PyObject *py_combine(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, "combine(code, sources, outs, count, divisor)");
        return NULL;
    }
    job_t job = {.n_outs = 0};
    Py_buffer view = {.obj = NULL};
    job.kernel = kernel_of(args[0]);
    job.count = PyLong_AsSize_t(args[3]);
    job.divisor = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred() || (job.n_sources = read_addresses(args[1], job.sources)) < 0) return NULL;
    if (PyTuple_Check(args[2])) {
        if ((job.n_outs = read_addresses(args[2], job.outs)) < 0) return NULL;
    } else { /* one array */
        if (PyObject_GetBuffer(args[2], &view, PyBUF_WRITABLE) < 0) return NULL;
        if (job.count > (size_t)view.len / job.kernel->item) {
            PyBuffer_Release(&view);
            PyErr_SetString(PyExc_ValueError, "the output is too small");
            return NULL;
        }
        job.outs[0] = (uintptr_t)view.buf;
        job.n_outs = 1;
    }
    if (job.count * job.kernel->item > (32 << 10)) {
        Py_BEGIN_ALLOW_THREADS
        combine(&job);
        Py_END_ALLOW_THREADS
    } else {
        combine(&job);
    }
    if (view.obj) PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *py_copy(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer to, from;
    if (n_args != 2) {
        PyErr_SetString(PyExc_TypeError, "copy(to, from)");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE) < 0) return NULL;
    if (PyObject_GetBuffer(args[1], &from, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&to);
        return NULL;
    }
    size_t nbytes = (size_t)(to.len < from.len ? to.len : from.len);
    Py_BEGIN_ALLOW_THREADS
    copy(to.buf, from.buf, nbytes);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    Py_RETURN_NONE;
}

static PyObject *py_fetch(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer to;
    if (n_args != 2) {
        PyErr_SetString(PyExc_TypeError, "fetch(to, address)");
        return NULL;
    }
    const char *from = (const char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE) < 0) return NULL;
    if (to.len > (32 << 10)) {
        Py_BEGIN_ALLOW_THREADS
        copy(to.buf, from, (size_t)to.len);
        Py_END_ALLOW_THREADS
    } else {
        memcpy(to.buf, from, (size_t)to.len);
    }
    PyBuffer_Release(&to);
    Py_RETURN_NONE;
}

/* Copy `nbytes` from each address to one place after the other. */
static PyObject *py_gather(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer to;
    uintptr_t from[MOST];
    if (n_args != 3) {
        PyErr_SetString(PyExc_TypeError, "gather(to, addresses, nbytes)");
        return NULL;
    }
    int n = read_addresses(args[1], from);
    size_t nbytes = n < 0 ? 0 : PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE) < 0) return NULL;
    if ((size_t)to.len < nbytes * (size_t)n) {
        PyBuffer_Release(&to);
        PyErr_SetString(PyExc_ValueError, "gather: the array is too small");
        return NULL;
    }
    PyThreadState *state = to.len > (32 << 10) ? PyEval_SaveThread() : NULL;
    for (int i = 0; i < n; i++) {
        char *place = (char *)to.buf + (size_t)i * nbytes;
        if ((uintptr_t)place == from[i]) continue;
        if (state)
            copy(place, (const char *)from[i], nbytes);
        else
            memcpy(place, (const void *)from[i], nbytes);
    }
    if (state) PyEval_RestoreThread(state);
    PyBuffer_Release(&to);
    Py_RETURN_NONE;
}

/* ---- the memory of other processes: one copy, which the kernel makes (cross-memory attach) */

#if defined(__linux__)
static int attach(pid_t pid, uintptr_t theirs, void *ours, size_t nbytes, int writes) {
    while (nbytes) {
        struct iovec here = {ours, nbytes}, there = {(void *)theirs, nbytes};
        ssize_t moved = writes ? process_vm_writev(pid, &here, 1, &there, 1, 0)
                               : process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (moved <= 0) {
            if (moved == 0) errno = EFAULT;
            return -1;
        }
        theirs += (size_t)moved, ours = (char *)ours + moved, nbytes -= (size_t)moved;
    }
    return 0;
}

static int can_attach(char *data, size_t nbytes) {
    char ends[2];
    struct iovec here = {ends, 2}, there[2] = {{data, 1}, {data + nbytes - 1, 1}};
    return process_vm_readv(getpid(), &here, 1, there, 2, 0) == 2;
}

/* [Note: rights] A number of what this process may do to the memory of others, and they to its own:
 * whether it is dumpable, and its capabilities. Where that has changed since the ranks have tried,
 * a rank offers nothing to be attached, and reads nothing so. Never 0. */
static int64_t rights(void) {
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct able[_LINUX_CAPABILITY_U32S_3] = {{0}};
    syscall(SYS_capget, &head, able);
    uint64_t mixed = (uint64_t)prctl(PR_GET_DUMPABLE);
    for (int i = 0; i < _LINUX_CAPABILITY_U32S_3; i++)
        mixed = (mixed * 1000003 + able[i].permitted) * 1000003 + able[i].effective;
    return (int64_t)(mixed >> 2 | 1);
}
#else
static int64_t rights(void) { return 1; }

static int can_attach(char *data, size_t nbytes) {
    (void)data, (void)nbytes;
    return 0;
}

static int attach(pid_t pid, uintptr_t theirs, void *ours, size_t nbytes, int writes) {
    (void)pid, (void)theirs, (void)ours, (void)nbytes, (void)writes;
    errno = ENOSYS;
    return -1;
}
#endif

/* read_from(pid, address, to) and write_to(pid, address, from). */
static PyObject *move_attached(PyObject *const *args, Py_ssize_t n_args, int writes) {
    Py_buffer ours;
    if (n_args != 3) {
        PyErr_SetString(PyExc_TypeError, "a process, an address and an array");
        return NULL;
    }
    long pid = PyLong_AsLong(args[0]);
    uintptr_t theirs = (uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (PyObject_GetBuffer(args[2], &ours, writes ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = attach((pid_t)pid, theirs, ours.buf, (size_t)ours.len, writes);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&ours);
    return failed ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

static PyObject *py_read_from(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    return move_attached(args, n_args, 0);
}

static PyObject *py_write_to(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    return move_attached(args, n_args, 1);
}

/* rights(): see [Note: rights] */
static PyObject *py_rights(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromLongLong(rights());
}

/* Whether the kernel can read the first and the last byte of an array for other processes: memory
 * of devices cannot be read so. */
static PyObject *py_is_attachable(PyObject *self, PyObject *array) {
    (void)self;
    Py_buffer data;
    if (PyObject_GetBuffer(array, &data, PyBUF_SIMPLE) < 0) return NULL;
    int can = data.len > 0 && can_attach(data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyBool_FromLong(can);
}

/* ---- boxes: runs of bytes at equal distances, along several axes */

enum { AXES = 64 }; /* NumPy's limit */

typedef struct {
    Py_ssize_t axes;
    size_t run, counts[AXES];
    ptrdiff_t to[AXES], from[AXES];
} box_t;

static void stream_box(char *to, const char *from, const box_t *box) {
    size_t index[AXES] = {0};
    Py_ssize_t axis = 0;
    while (axis >= 0) {
        stream_run(to, from, box->run);
        for (axis = box->axes - 1; axis >= 0; axis--) { /* the next run */
            to += box->to[axis];
            from += box->from[axis];
            if (++index[axis] < box->counts[axis]) break;
            to -= box->to[axis] * (ptrdiff_t)box->counts[axis];
            from -= box->from[axis] * (ptrdiff_t)box->counts[axis];
            index[axis] = 0;
        }
    }
    end_of_stream();
}

static int read_sizes(PyObject *tuple, Py_ssize_t axes, ptrdiff_t *into) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != axes) {
        PyErr_SetString(PyExc_ValueError, "not a tuple of one number per axis");
        return -1;
    }
    for (Py_ssize_t i = 0; i < axes; i++) into[i] = PyLong_AsSsize_t(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : 0;
}

/* Copy `counts` runs of `nbytes` from one address to another, at these strides, past the caches. */
static PyObject *py_copy_box(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    if (n_args != 6) {
        PyErr_SetString(PyExc_TypeError,
                        "copy_box(to, from, nbytes, counts, to_strides, from_strides)");
        return NULL;
    }
    box_t box;
    char *to = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
    const char *from = (const char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    box.run = PyLong_AsSize_t(args[2]);
    box.axes = PyTuple_Check(args[3]) ? PyTuple_Size(args[3]) : -1;
    if (PyErr_Occurred()) return NULL;
    if (box.axes < 0 || box.axes > AXES) {
        PyErr_SetString(PyExc_ValueError, "not a tuple of at most 64 numbers");
        return NULL;
    }
    ptrdiff_t counts[AXES];
    if (read_sizes(args[3], box.axes, counts) < 0 || read_sizes(args[4], box.axes, box.to) < 0 ||
        read_sizes(args[5], box.axes, box.from) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < box.axes; i++) {
        if (counts[i] <= 0) Py_RETURN_NONE;
        box.counts[i] = (size_t)counts[i];
    }
    Py_BEGIN_ALLOW_THREADS
    stream_box(to, from, &box);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- merging: two sorted runs become one; of equal elements those of the first run come first */

/* Elements are taken from the front and from the end at once, and the runs are cut in the middle
 * of the result: four chains of comparisons that do not wait for each other. Nothing branches on
 * what the elements are: the compiler must not know what a comparison has found. */
#define HIDE(FOUND) __asm__("" : "+r"(FOUND))
#define MERGE(NAME, T)                                                                 \
    typedef struct { const T *a, *a_end, *b, *b_end; } NAME##_runs;                    \
    static inline T NAME##_least(NAME##_runs *r) {                                     \
        T x = *r->a, y = *r->b;                                                        \
        size_t second = y < x;                                                         \
        HIDE(second);                                                                  \
        r->a += 1 - second;                                                            \
        r->b += second;                                                                \
        return y < x ? y : x;                                                          \
    }                                                                                  \
    static inline T NAME##_largest(NAME##_runs *r) {                                   \
        T x = r->a_end[-1], y = r->b_end[-1];                                          \
        size_t first = y < x;                                                          \
        HIDE(first);                                                                   \
        r->a_end -= first;                                                             \
        r->b_end -= 1 - first;                                                         \
        return y < x ? x : y;                                                          \
    }                                                                                  \
    static inline size_t NAME##_safe(const NAME##_runs *r) {                           \
        size_t n = (size_t)(r->a_end - r->a), m = (size_t)(r->b_end - r->b);           \
        return (n < m ? n : m) / 2;                                                    \
    }                                                                                  \
    /* Merge what is left to between two places. */                                    \
    static void NAME##_rest(NAME##_runs r, T *to, T *end) {                            \
        for (size_t n; (n = NAME##_safe(&r)) > 0;)                                     \
            for (; n > 0; n--) {                                                       \
                *to++ = NAME##_least(&r);                                              \
                *--end = NAME##_largest(&r);                                           \
            }                                                                          \
        while (r.a < r.a_end && r.b < r.b_end) *to++ = NAME##_least(&r);               \
        memcpy(to, r.a, (size_t)((const char *)r.a_end - (const char *)r.a));          \
        to += r.a_end - r.a;                                                           \
        memcpy(to, r.b, (size_t)((const char *)r.b_end - (const char *)r.b));          \
    }                                                                                  \
    static void NAME##_merge(void *to_, const void *a_, size_t na, const void *b_, size_t nb) { \
        T *to = to_;                                                                   \
        const T *a = a_, *b = b_;                                                      \
        size_t half = (na + nb) / 2, lo = half > nb ? half - nb : 0, hi = half < na ? half : na; \
        while (lo < hi) { /* how many of the first half are of the first run */        \
            size_t i = lo + (hi - lo) / 2;                                             \
            if (b[half - i - 1] < a[i]) hi = i;                                        \
            else lo = i + 1;                                                           \
        }                                                                              \
        NAME##_runs one = {a, a + lo, b, b + (half - lo)};                             \
        NAME##_runs two = {a + lo, a + na, b + (half - lo), b + nb};                   \
        T *front = to, *middle = to + half, *next = middle, *end = to + na + nb;       \
        for (;;) {                                                                     \
            size_t n = NAME##_safe(&one), m = NAME##_safe(&two);                       \
            n = n < m ? n : m;                                                         \
            if (n == 0) break;                                                         \
            for (size_t i = 0; i < n; i++) {                                           \
                *front++ = NAME##_least(&one);                                         \
                *next++ = NAME##_least(&two);                                          \
                *--middle = NAME##_largest(&one);                                      \
                *--end = NAME##_largest(&two);                                         \
            }                                                                          \
        }                                                                              \
        NAME##_rest(one, front, middle);                                               \
        NAME##_rest(two, next, end);                                                   \
    }

MERGE(i32, int32_t)
MERGE(u32, uint32_t)
MERGE(i64, int64_t)
MERGE(u64, uint64_t)
MERGE(f32, float)
MERGE(f64, double)

typedef struct {
    const char *name;
    size_t item;
    void (*merge)(void *to, const void *a, size_t na, const void *b, size_t nb);
} merge_t;

static const merge_t MERGES[] = {
    {"int32", 4, i32_merge},  {"uint32", 4, u32_merge},  {"int64", 8, i64_merge},
    {"uint64", 8, u64_merge}, {"float32", 4, f32_merge}, {"float64", 8, f64_merge},
};
enum { N_MERGES = sizeof MERGES / sizeof *MERGES };

static PyObject *py_merge(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer to = {.obj = NULL}, a = {.obj = NULL}, b = {.obj = NULL};
    PyObject *result = NULL;
    if (n_args != 4) {
        PyErr_SetString(PyExc_TypeError, "merge(code, to, first, second)");
        return NULL;
    }
    long code = PyLong_AsLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    if (code < 0 || code >= N_MERGES) {
        PyErr_SetString(PyExc_ValueError, "no such kernel");
        return NULL;
    }
    const merge_t *row = &MERGES[code];
    if (PyObject_GetBuffer(args[1], &to, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(args[2], &a, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(args[3], &b, PyBUF_SIMPLE) < 0)
        goto end;
    if (to.len != a.len + b.len) {
        PyErr_SetString(PyExc_ValueError, "merge: the output is not as long as both runs");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    row->merge(to.buf, a.buf, (size_t)a.len / row->item, b.buf, (size_t)b.len / row->item);
    Py_END_ALLOW_THREADS
    result = Py_None;
    Py_INCREF(result);
end:
    if (b.obj) PyBuffer_Release(&b);
    if (a.obj) PyBuffer_Release(&a);
    if (to.obj) PyBuffer_Release(&to);
    return result;
}

/* ---- rows by ids, as `hpcdist.ps` has them: `slots.py`, `merging.py` and `slabs.py` say what each
 * function does, and do the same in Python */

/* Open `n` arguments as buffers, those whose bit is set in `written` to be written; -1: an error
 * is set, and none is open. */
static int open_buffers(PyObject *const *args, int n, unsigned written, Py_buffer *views) {
    for (int i = 0; i < n; i++) {
        if (PyObject_GetBuffer(args[i], &views[i], written >> i & 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) {
            while (i-- > 0) PyBuffer_Release(&views[i]);
            return -1;
        }
    }
    return 0;
}

/* Close them again; the result of the call, or NULL and an error if something did not fit. */
static PyObject *close_buffers(Py_buffer *views, int n, const char *wrong, Py_ssize_t result) {
    for (int i = 0; i < n; i++) PyBuffer_Release(&views[i]);
    if (!wrong) return PyLong_FromSsize_t(result);
    PyErr_SetString(PyExc_ValueError, wrong);
    return NULL;
}

static size_t words_in(const Py_buffer *view) { return (size_t)view->len / sizeof(int64_t); }

/* Return whether all of `n` numbers are from `least` on and below `limit`. */
CLONES static int all_within(const int64_t *numbers, size_t n, int64_t least, int64_t limit) {
    int outside = 0;
    for (size_t i = 0; i < n; i++) outside |= numbers[i] < least || numbers[i] >= limit;
    return !outside;
}

enum { DIGIT = 11, BUCKETS = 1 << DIGIT, DIGITS = (64 + DIGIT - 1) / DIGIT };

typedef struct {
    uint64_t key;
    int64_t place;
} keyed_t;

/* Sort ids with their places, by their digits from the lowest that differs on; stable. Returns
 * which of both arrays has the result. */
static keyed_t *sort_ids(const uint64_t *ids, size_t n, keyed_t *from, keyed_t *to, size_t *counts) {
    const uint64_t sign = 1ull << 63;
    uint64_t differ = 0;
    for (size_t i = 0; i < n; i++) differ |= ids[i] ^ ids[0];
    int low = differ ? __builtin_ctzll(differ) : 0, digits = 0;
    while (low + digits * DIGIT < 64 && differ >> (low + digits * DIGIT)) digits++;
    memset(counts, 0, (size_t)digits * BUCKETS * sizeof *counts);
    for (size_t i = 0; i < n; i++) {
        uint64_t key = ids[i] ^ sign;
        from[i] = (keyed_t){key, (int64_t)i};
        for (int d = 0; d < digits; d++)
            counts[d * BUCKETS + (key >> (low + d * DIGIT) & (BUCKETS - 1))]++;
    }
    for (int d = 0; d < digits; d++) {
        size_t *begin = counts + d * BUCKETS, sum = 0;
        for (int b = 0; b < BUCKETS; b++) {
            size_t count = begin[b];
            begin[b] = sum;
            sum += count;
        }
        for (size_t i = 0; i < n; i++)
            to[begin[from[i].key >> (low + d * DIGIT) & (BUCKETS - 1)]++] = from[i];
        keyed_t *old = from;
        from = to, to = old;
    }
    return from;
}

/* group_ids(ids, unique, order, starts) -> how many are distinct */
static PyObject *py_group_ids(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4];
    if (n_args != 4) {
        PyErr_SetString(PyExc_TypeError, "group_ids(ids, unique, order, starts)");
        return NULL;
    }
    if (open_buffers(args, 4, 0xe, views) < 0) return NULL;
    size_t n = words_in(&views[0]), found = 0;
    if (words_in(&views[1]) < n || words_in(&views[2]) < n || words_in(&views[3]) < n + 1)
        return close_buffers(views, 4, "group_ids: an output is too short", 0);
    int64_t *unique = views[1].buf, *order = views[2].buf, *starts = views[3].buf;
    size_t tables = DIGITS * BUCKETS * sizeof(size_t);
    char *room = n <= (SIZE_MAX / 4 - tables) / sizeof(keyed_t)
                     ? malloc(tables + 2 * n * sizeof(keyed_t))
                     : NULL;
    if (!room) {
        close_buffers(views, 4, "", 0);
        PyErr_Clear();
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    keyed_t *first = (keyed_t *)(room + tables);
    keyed_t *sorted = sort_ids(views[0].buf, n, first, first + n, (size_t *)room);
    for (size_t i = 0; i < n; i++) {
        if (!i || sorted[i].key != sorted[i - 1].key) {
            unique[found] = (int64_t)(sorted[i].key ^ 1ull << 63);
            starts[found++] = (int64_t)i;
        }
        order[i] = sorted[i].place;
    }
    starts[found] = (int64_t)n;
    Py_END_ALLOW_THREADS
    free(room);
    return close_buffers(views, 4, NULL, (Py_ssize_t)found);
}

enum { AHEAD = 8, MOST_LINES = 16 };

/* Ask for the first KiB of a row that will be used soon. */
static inline void prefetch_row(const char *row, size_t nbytes) {
    for (size_t i = 0; i < nbytes && i < MOST_LINES * LINE; i += LINE) __builtin_prefetch(row + i);
}

#define SEGMENT_ADD(T)                                                                 \
    CLONES static void segment_add_##T(T *sums, const T *rows, size_t width, const int64_t *order, \
                                       const int64_t *starts, size_t n) {              \
        size_t last = (size_t)starts[n];                                               \
        for (size_t s = 0; s < n; s++, sums += width) {                                \
            for (size_t k = (size_t)starts[s]; k < (size_t)starts[s + 1]; k++) {       \
                const T *row = rows + (size_t)order[k] * width;                        \
                if (k + AHEAD < last)                                                  \
                    prefetch_row((const char *)(rows + (size_t)order[k + AHEAD] * width), \
                                 width * sizeof(T));                                   \
                if (k == (size_t)starts[s])                                            \
                    memcpy(sums, row, width * sizeof(T));                              \
                else                                                                   \
                    for (size_t i = 0; i < width; i++) sums[i] += row[i];              \
            }                                                                          \
        }                                                                              \
    }
SEGMENT_ADD(float)
SEGMENT_ADD(double)

/* segment_add(item, sums, rows, order, starts): `item` is 4 (float) or 8 (double) */
static PyObject *py_segment_add(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4];
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, "segment_add(item, sums, rows, order, starts)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[0]);
    if (PyErr_Occurred() || open_buffers(args + 1, 4, 1, views) < 0) return NULL;
    const int64_t *order = views[2].buf, *starts = views[3].buf;
    size_t n = words_in(&views[3]), places = words_in(&views[2]), width = 0;
    int fits = n > 0 && (item == sizeof(float) || item == sizeof(double));
    n -= fits;
    if (fits && n > 0) {
        width = (size_t)views[0].len / item / n;
        size_t rows = width ? (size_t)views[1].len / item / width : 0;
        fits = width * n * item == (size_t)views[0].len && (!width || rows) &&
               all_within(order, places, 0, (int64_t)(rows ? rows : places + 1)) &&
               all_within(starts, n + 1, 0, (int64_t)places + 1);
        for (size_t i = 0; fits && i < n; i++) fits = starts[i] < starts[i + 1];
    }
    if (!fits) return close_buffers(views, 4, "segment_add: the arrays do not fit", 0);
    Py_BEGIN_ALLOW_THREADS
    if (item == sizeof(float))
        segment_add_float(views[0].buf, views[1].buf, width, order, starts, n);
    else
        segment_add_double(views[0].buf, views[1].buf, width, order, starts, n);
    Py_END_ALLOW_THREADS
    return close_buffers(views, 4, NULL, 0);
}

/* The finalizer of splitmix64. */
static inline uint64_t mixed(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

enum { BATCH = 256 }; /* look-ups whose misses of the cache overlap, as no step waits for one */
enum { FREE_SLOT = -1, NO_SLOT = -1 };

/* A table: `index` has a power of two of numbers, of 4 or 8 bytes each; see `Slots`. Of a hash the
 * upper bits are the place, and those after them the tag. */
typedef struct {
    void *index;
    size_t size, item;
    int place_shift, low_shift, tag_shift;
    int64_t slot, tag; /* the bits of a number that are the slot, and those that are the tag */
    const int64_t *ids;
    size_t n_ids;
    uint64_t key;
} slots_t;

static slots_t slots_of(const void *index, size_t size, size_t item, const int64_t *ids,
                        size_t n_ids, uint64_t key) {
    int bits = __builtin_ctzll(size), most = (int)item * 8 - 1;
    int64_t slot = (int64_t)(((uint64_t)1 << (bits < most ? bits : most)) - 1);
    int64_t tag = (int64_t)(((uint64_t)1 << most) - 1) & ~slot;
    return (slots_t){(void *)index, size, item, 64 - bits, 64 - most, bits, slot, tag, ids, n_ids,
                     key};
}

static inline int64_t number_at(const slots_t *t, size_t place) {
    return t->item == sizeof(int32_t) ? ((const int32_t *)t->index)[place]
                                      : ((const int64_t *)t->index)[place];
}

static inline void put_number(const slots_t *t, size_t place, int64_t number) {
    if (t->item == sizeof(int32_t))
        ((int32_t *)t->index)[place] = (int32_t)number;
    else
        ((int64_t *)t->index)[place] = number;
}

static inline size_t home_of(const slots_t *t, uint64_t hash) {
    return (size_t)(hash >> t->place_shift);
}

static inline int64_t tag_of(const slots_t *t, uint64_t hash) {
    return (int64_t)(hash >> t->low_shift << t->tag_shift) & t->tag;
}

/* Return the hash of an id, of which `mixed_id` is what its name says, and ask for its place. */
static inline uint64_t begin_search(const slots_t *t, uint64_t mixed_id) {
    uint64_t hash = mixed_id * t->key;
    __builtin_prefetch((const char *)t->index + home_of(t, hash) * t->item);
    return hash;
}

/* Return the first slot of this tag whose id is the wanted one, or, without `wanted`, may be it;
 * NO_SLOT: there is none. */
static inline int64_t seek_slot(const slots_t *t, uint64_t hash, const int64_t *wanted) {
    int64_t tag = tag_of(t, hash), number;
    size_t place = home_of(t, hash), mask = t->size - 1;
    for (size_t left = t->size; left && (number = number_at(t, place)) != FREE_SLOT; left--) {
        int64_t slot = number & t->slot;
        if ((number & ~t->slot) == tag && (size_t)slot < t->n_ids &&
            (!wanted || t->ids[slot] == *wanted))
            return slot;
        place = (place + 1) & mask;
    }
    return NO_SLOT;
}

static void find_slots(const slots_t *t, const int64_t *wanted, int64_t *found, size_t n) {
    uint64_t hashes[BATCH];
    for (size_t begin = 0; begin < n; begin += BATCH, wanted += BATCH, found += BATCH) {
        size_t m = n - begin < BATCH ? n - begin : BATCH;
        for (size_t i = 0; i < m; i++) hashes[i] = begin_search(t, mixed((uint64_t)wanted[i]));
        for (size_t i = 0; i < m; i++) {
            found[i] = seek_slot(t, hashes[i], NULL);
            if (found[i] != NO_SLOT) __builtin_prefetch(t->ids + found[i]);
        }
        for (size_t i = 0; i < m; i++)
            if (found[i] != NO_SLOT && t->ids[found[i]] != wanted[i])
                found[i] = seek_slot(t, hashes[i], wanted + i);
    }
}

/* Enter slots of distinct ids that are absent; return -1 where the table is full. */
static int place_slots(const slots_t *t, const int64_t *slots, size_t n) {
    uint64_t hashes[BATCH];
    for (size_t begin = 0; begin < n; begin += BATCH, slots += BATCH) {
        size_t m = n - begin < BATCH ? n - begin : BATCH;
        for (size_t i = 0; i < m; i++)
            hashes[i] = begin_search(t, mixed((uint64_t)t->ids[slots[i]]));
        for (size_t i = 0; i < m; i++) {
            size_t place = home_of(t, hashes[i]), left = t->size;
            while (number_at(t, place) != FREE_SLOT && --left) place = (place + 1) & (t->size - 1);
            if (!left) return -1;
            put_number(t, place, tag_of(t, hashes[i]) | slots[i]);
        }
    }
    return 0;
}

/* Read a table from its buffers and its key; 0 if it is none. */
static int read_slots(slots_t *t, const Py_buffer *index, const Py_buffer *ids, size_t item,
                      uint64_t key) {
    if (item != sizeof(int32_t) && item != sizeof(int64_t)) return 0;
    size_t size = (size_t)index->len / item;
    if (size < 2 || size & (size - 1)) return 0;
    *t = slots_of(index->buf, size, item, ids->buf, words_in(ids), key);
    return 1;
}

/* find_slots(item, index, ids, wanted, found, key) */
static PyObject *py_find_slots(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4];
    slots_t table;
    if (n_args != 6) {
        PyErr_SetString(PyExc_TypeError, "find_slots(item, index, ids, wanted, found, key)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[0]);
    uint64_t key = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred() || open_buffers(args + 1, 4, 8, views) < 0) return NULL;
    if (!read_slots(&table, &views[0], &views[1], item, key) || views[2].len != views[3].len)
        return close_buffers(views, 4, "find_slots: the arrays do not fit", 0);
    Py_BEGIN_ALLOW_THREADS
    find_slots(&table, views[2].buf, views[3].buf, words_in(&views[2]));
    Py_END_ALLOW_THREADS
    return close_buffers(views, 4, NULL, 0);
}

/* place_slots(item, index, ids, slots, key) */
static PyObject *py_place_slots(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[3];
    slots_t table;
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, "place_slots(item, index, ids, slots, key)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[0]);
    uint64_t key = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred() || open_buffers(args + 1, 3, 1, views) < 0) return NULL;
    size_t n = words_in(&views[2]);
    if (!read_slots(&table, &views[0], &views[1], item, key) ||
        !all_within(views[2].buf, n, 0, (int64_t)table.n_ids) ||
        !all_within(views[2].buf, n, 0, table.slot))
        return close_buffers(views, 3, "place_slots: the arrays do not fit", 0);
    int full;
    Py_BEGIN_ALLOW_THREADS
    full = place_slots(&table, views[2].buf, n);
    Py_END_ALLOW_THREADS
    return close_buffers(views, 3, full ? "place_slots: the table is full" : NULL, 0);
}

/* Rows between an array and slabs of `1 << shift` rows each. */
typedef struct {
    char *rows;
    const uintptr_t *slabs;
    const int64_t *slots;
    size_t n, row;
    int shift;
} slabs_t;

static inline char *row_at(const slabs_t *s, int64_t slot) {
    size_t place = (size_t)slot & (((size_t)1 << s->shift) - 1);
    return (char *)s->slabs[slot >> s->shift] + place * s->row;
}

/* Take a shift over; 0 if it is none, or `nbytes` are too few for the rows. */
static int are_slabs(slabs_t *s, long shift, size_t slabs, size_t nbytes) {
    s->shift = (int)shift;
    return shift >= 0 && shift <= 40 && slabs <= (size_t)1 << 22 &&
           (!s->row || s->n <= nbytes / s->row);
}

/* `memcpy` for a few hundred bytes: all of 128 are asked for before the first of them is needed. */
static inline void copy_row(char *restrict to, const char *restrict from, size_t nbytes) {
    typedef char vec __attribute__((vector_size(32), aligned(1), may_alias));
    enum { V = sizeof(vec) };
    size_t i = 0;
    for (; i + 4 * V <= nbytes; i += 4 * V) {
        vec a = *(const vec *)(from + i), b = *(const vec *)(from + i + V);
        vec c = *(const vec *)(from + i + 2 * V), d = *(const vec *)(from + i + 3 * V);
        *(vec *)(to + i) = a, *(vec *)(to + i + V) = b;
        *(vec *)(to + i + 2 * V) = c, *(vec *)(to + i + 3 * V) = d;
    }
    for (; i + V <= nbytes; i += V) *(vec *)(to + i) = *(const vec *)(from + i);
    if (i < nbytes) memcpy(to + i, from + i, nbytes - i);
}

enum { ROWS_AHEAD = 16 }; /* the first line of a row is enough: the processor goes on by itself */

CLONES static void take_rows(const slabs_t *s) {
    char *to = s->rows;
    for (size_t i = 0; i < s->n; i++, to += s->row) {
        if (i + ROWS_AHEAD < s->n && s->slots[i + ROWS_AHEAD] >= 0)
            __builtin_prefetch(row_at(s, s->slots[i + ROWS_AHEAD]));
        if (s->slots[i] >= 0) copy_row(to, row_at(s, s->slots[i]), s->row);
    }
}

static void put_rows(const slabs_t *s) {
    const char *from = s->rows;
    for (size_t i = 0; i < s->n; i++, from += s->row)
        if (s->slots[i] >= 0) memcpy(row_at(s, s->slots[i]), from, s->row);
}

static PyObject *move_rows(PyObject *const *args, Py_ssize_t n_args, int written,
                           void (*move)(const slabs_t *), const char *usage) {
    Py_buffer views[3];
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, usage);
        return NULL;
    }
    slabs_t s;
    long shift = PyLong_AsLong(args[3]);
    s.row = PyLong_AsSize_t(args[4]);
    if (PyErr_Occurred() || open_buffers(args, 3, (unsigned)written, views) < 0) return NULL;
    s.rows = views[0].buf, s.slabs = views[1].buf, s.slots = views[2].buf;
    s.n = words_in(&views[2]);
    size_t slabs = (size_t)views[1].len / sizeof(uintptr_t);
    if (!are_slabs(&s, shift, slabs, (size_t)views[0].len) ||
        !all_within(s.slots, s.n, INT64_MIN, (int64_t)(slabs << shift)))
        return close_buffers(views, 3, "a slot is outside of the slabs, or the array too small", 0);
    Py_BEGIN_ALLOW_THREADS
    move(&s);
    Py_END_ALLOW_THREADS
    return close_buffers(views, 3, NULL, 0);
}

static PyObject *py_take_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    return move_rows(args, n_args, 1, take_rows, "take_rows(out, slabs, slots, shift, row_bytes)");
}

static PyObject *py_put_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    return move_rows(args, n_args, 0, put_rows, "put_rows(rows, slabs, slots, shift, row_bytes)");
}

/* ---- rows read past their owners: see [Note: reading past] in `ps/shared.py` */

/* One table, as another process reads it: a line of the array that `shared.py` calls views. */
typedef struct {
    int64_t header; /* an address; 0: nobody can read this table */
    int64_t generation, index, index_size, index_item, ids, n_ids, key, slabs, n_slabs, shift;
} view_t;

typedef struct {
    slots_t slots;
    slabs_t rows;
    const int64_t *header;
    int64_t count, generation;
    int usable, touched;
} window_t;

enum { CHANGES, GENERATION };
enum { UNREAD, READ, ABSENT }; /* an id: not looked for yet, its row is copied, it has none */

/* Look up where the parts of a table are, and whether nobody changes it now. */
static void open_window(window_t *w, const view_t *v, size_t row) {
    *w = (window_t){.header = (const int64_t *)(uintptr_t)v->header};
    if (!w->header) return;
    int64_t most = v->n_slabs << v->shift;
    w->generation = v->generation;
    w->slots = slots_of((const void *)(uintptr_t)v->index, (size_t)v->index_size,
                        (size_t)v->index_item, (const int64_t *)(uintptr_t)v->ids,
                        (size_t)(v->n_ids < most ? v->n_ids : most), (uint64_t)v->key);
    w->rows = (slabs_t){.slabs = (const uintptr_t *)(uintptr_t)v->slabs, .row = row,
                        .shift = (int)v->shift};
    w->count = __atomic_load_n(w->header + CHANGES, __ATOMIC_ACQUIRE);
    w->usable = w->count % 2 == 0 && w->generation >= 0 && /* below: the table has gone */
                __atomic_load_n(w->header + GENERATION, __ATOMIC_ACQUIRE) == w->generation;
}

static int is_as_it_was(const window_t *w) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(w->header + CHANGES, __ATOMIC_ACQUIRE) == w->count &&
           __atomic_load_n(w->header + GENERATION, __ATOMIC_ACQUIRE) == w->generation;
}

typedef struct {
    window_t *windows;
    size_t servers;
    const int64_t *ids;
    unsigned char *states;
    char *rows;
    size_t n, row;
} reading_t;

static inline window_t *window_of(const reading_t *r, uint64_t hash) {
    return r->windows + ((hash >> 32) * r->servers >> 32);
}

/* Where a row is that may be that of an id, and the id that it is of. */
typedef struct {
    const int64_t *id; /* NULL: there is none */
    const char *row;
} candidate_t;

static inline candidate_t candidate_of(const window_t *w, int64_t slot) {
    if (slot == NO_SLOT) return (candidate_t){NULL, NULL};
    return (candidate_t){w->slots.ids + slot, row_at(&w->rows, slot)};
}

/* Read what is unread of some ids, of those tables that nobody changes. The id of a slot and its
 * row are on their way while the rows before are copied. */
CLONES static void read_batch(const reading_t *r, size_t begin, size_t m) {
    const window_t *of[BATCH];
    uint64_t hashes[BATCH];
    candidate_t found[BATCH];
    const int64_t *ids = r->ids + begin;
    unsigned char *states = r->states + begin;
    char *to = r->rows + begin * r->row;
    for (size_t i = 0; i < m; i++) {
        uint64_t hash = mixed((uint64_t)ids[i]);
        window_t *w = window_of(r, hash);
        if (!w->header && states[i] == UNREAD) states[i] = ABSENT;
        of[i] = w->usable && states[i] == UNREAD ? w : NULL;
        if (!of[i]) continue;
        w->touched = 1;
        hashes[i] = begin_search(&w->slots, hash);
    }
    for (size_t i = 0; i < m; i++)
        found[i] = candidate_of(of[i], of[i] ? seek_slot(&of[i]->slots, hashes[i], NULL) : NO_SLOT);
    for (size_t i = 0; i < m; i++, to += r->row) {
        if (i + ROWS_AHEAD < m) {
            __builtin_prefetch(found[i + ROWS_AHEAD].id);
            __builtin_prefetch(found[i + ROWS_AHEAD].row);
        }
        if (found[i].id && *found[i].id != ids[i])
            found[i] = candidate_of(of[i], seek_slot(&of[i]->slots, hashes[i], ids + i));
        if (!of[i]) continue;
        states[i] = found[i].id ? READ : ABSENT;
        if (found[i].id) copy_row(to, found[i].row, r->row);
    }
}

/* Note as unread again what is of tables that changed meanwhile; return how many are not read. */
static size_t count_unread(const reading_t *r) {
    int all = 1;
    size_t unread = 0;
    for (size_t s = 0; s < r->servers; s++) {
        window_t *w = &r->windows[s];
        w->usable = !w->header || (w->usable && is_as_it_was(w));
        all = all && w->usable;
    }
    for (size_t i = 0; !all && i < r->n; i++) {
        const window_t *w = window_of(r, mixed((uint64_t)r->ids[i]));
        if (!w->usable && w->touched) r->states[i] = UNREAD;
    }
    for (size_t i = 0; i < r->n; i++) unread += r->states[i] != READ;
    return unread;
}

static int are_views(const view_t *views, size_t n) {
    int fit = n > 0;
    for (const view_t *v = views; fit && v < views + n; v++)
        if (v->header)
            fit = (v->index_item == 4 || v->index_item == 8) && v->index_size >= 2 &&
                  !(v->index_size & (v->index_size - 1)) && v->n_slabs >= 0 && v->shift >= 0 &&
                  v->shift <= 40 && v->n_slabs <= INT64_MAX >> v->shift;
    return fit;
}

/* read_rows(views, ids, states, rows) -> how many rows are not there. A row is copied where the
 * state of its id is UNREAD, which becomes READ, or ABSENT; or stays, where the table changes. */
static PyObject *py_read_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4];
    if (n_args != 4) {
        PyErr_SetString(PyExc_TypeError, "read_rows(views, ids, states, rows)");
        return NULL;
    }
    if (open_buffers(args, 4, 0xc, views) < 0) return NULL;
    size_t n = words_in(&views[1]), servers = (size_t)views[0].len / sizeof(view_t), unread = 0;
    if (!are_views(views[0].buf, servers) || (size_t)views[2].len != n ||
        (n && (size_t)views[3].len % n))
        return close_buffers(views, 4, "read_rows: the arrays do not fit", 0);
    window_t *windows = malloc(servers * sizeof *windows);
    if (!windows) {
        close_buffers(views, 4, "", 0);
        PyErr_Clear();
        return PyErr_NoMemory();
    }
    reading_t r = {windows, servers, views[1].buf, views[2].buf, views[3].buf, n,
                   n ? (size_t)views[3].len / n : 0};
    Py_BEGIN_ALLOW_THREADS
    for (size_t s = 0; s < servers; s++)
        open_window(&windows[s], (const view_t *)views[0].buf + s, r.row);
    for (size_t i = 0; i < n; i += BATCH) read_batch(&r, i, n - i < BATCH ? n - i : BATCH);
    unread = count_unread(&r);
    Py_END_ALLOW_THREADS
    free(windows);
    return close_buffers(views, 4, NULL, (Py_ssize_t)unread);
}

/* ---- rules: how one row changes by its gradient, with the roundings of `hpcdist.optim.rules` */

enum { NUMBERS = 8 }; /* of a rule, at most; `accessors.py` has their order */
enum { LANES = 8 };   /* sums that a row's numbers are added up in, as `accessors.py` does */

/* A gradient for each of some slots. `corrections` are pairs of numbers by the count of steps. */
typedef struct {
    slabs_t rows, state;
    size_t dim, steps;
    const double *numbers, *corrections;
    int rule, counted;
} update_t;

#define RULES(T, SQRT, FABS, COPYSIGN)                                                 \
    typedef struct {                                                                   \
        T *restrict w, *restrict s;                                                    \
        const T *restrict g;                                                           \
        size_t n;                                                                      \
        const T *x;             /* the numbers of the rule */                          \
        int first;              /* whether this is the row's first step */             \
        T epsilon, rate;        /* of this step */                                     \
    } row_##T;                                                                         \
    CLONES static void sgd_##T(const row_##T *r) {                                     \
        T *restrict w = r->w, rate = r->x[0], decay = r->x[1];                         \
        const T *restrict g = r->g;                                                    \
        if (decay != 0)                                                                \
            for (size_t i = 0; i < r->n; i++) w[i] = w[i] - (w[i] * decay + g[i]) * rate; \
        else                                                                           \
            for (size_t i = 0; i < r->n; i++) w[i] = w[i] - g[i] * rate;               \
    }                                                                                  \
    CLONES static void momentum_##T(const row_##T *r) {                                \
        T *restrict w = r->w, *restrict v = r->s;                                      \
        const T *restrict g = r->g, rate = r->x[0], decay = r->x[1];                   \
        T mu = r->x[2], keep = r->x[3], first = r->first, nesterov = r->x[4];          \
        for (size_t i = 0; i < r->n; i++) {                                            \
            T slope = decay != 0 ? w[i] * decay + g[i] : g[i];                         \
            T speed = first != 0 ? slope : v[i] * mu + slope * keep;                   \
            T step = nesterov != 0 ? slope + speed * mu : speed;                       \
            v[i] = speed;                                                              \
            w[i] = w[i] - step * rate;                                                 \
        }                                                                              \
    }                                                                                  \
    CLONES static void adagrad_##T(const row_##T *r) {                                 \
        T *restrict w = r->w, *restrict s = r->s, rate = r->x[0], epsilon = r->x[1];   \
        const T *restrict g = r->g;                                                    \
        for (size_t i = 0; i < r->n; i++) {                                            \
            T sum = s[i] + g[i] * g[i];                                                \
            s[i] = sum;                                                                \
            w[i] = w[i] - g[i] / (SQRT(sum) + epsilon) * rate;                         \
        }                                                                              \
    }                                                                                  \
    CLONES static void adam_##T(const row_##T *r) {                                    \
        T *restrict w = r->w, *restrict m = r->s, *restrict v = r->s + r->n;           \
        const T *restrict g = r->g;                                                    \
        T decay = r->x[1], less1 = r->x[2], beta2 = r->x[3], less2 = r->x[4];          \
        T shrink = r->x[5], epsilon = r->epsilon, rate = r->rate;                      \
        for (size_t i = 0; i < r->n; i++) {                                            \
            T weight = shrink != 1 ? w[i] * shrink : w[i];                             \
            T slope = decay != 0 ? weight * decay + g[i] : g[i];                       \
            T first = m[i] + (slope - m[i]) * less1;                                   \
            T second = v[i] * beta2 + slope * slope * less2;                           \
            m[i] = first;                                                              \
            v[i] = second;                                                             \
            w[i] = weight - first / (SQRT(second) + epsilon) * rate;                   \
        }                                                                              \
    }                                                                                  \
    CLONES static void ftrl_##T(const row_##T *r) {                                    \
        T *restrict w = r->w, *restrict z = r->s, *restrict s = r->s + r->n;           \
        const T *restrict g = r->g;                                                    \
        T rate = r->x[0], beta = r->x[1], l1 = r->x[2], l2 = r->x[3];                  \
        for (size_t i = 0; i < r->n; i++) {                                            \
            T old = SQRT(s[i]), sum = s[i] + g[i] * g[i], root = SQRT(sum);            \
            T linear = z[i] + g[i] - (root - old) / rate * w[i];                       \
            T size = FABS(linear), least = size > l1 ? l1 : size;                      \
            z[i] = linear;                                                             \
            s[i] = sum;                                                                \
            w[i] = (COPYSIGN(least, linear) - linear) / ((root + beta) / rate + l2);   \
        }                                                                              \
    }                                                                                  \
    CLONES static void rowwise_adagrad_##T(const row_##T *r) {                         \
        T *restrict w = r->w, rate = r->x[0], epsilon = r->x[1], lanes[LANES] = {0};   \
        const T *restrict g = r->g;                                                    \
        size_t i = 0;                                                                  \
        for (; i + LANES <= r->n; i += LANES)                                          \
            for (int l = 0; l < LANES; l++) lanes[l] += g[i + l] * g[i + l];           \
        for (int l = 0; i < r->n; i++, l++) lanes[l] += g[i] * g[i];                   \
        for (int half = LANES / 2; half; half /= 2)                                    \
            for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];                \
        T sum = r->s[0] + lanes[0] / (T)r->n, scale = SQRT(sum) + epsilon;             \
        r->s[0] = sum;                                                                 \
        for (i = 0; i < r->n; i++) w[i] = w[i] - g[i] / scale * rate;                  \
    }                                                                                  \
    static void (*const RULES_##T[])(const row_##T *) = {                              \
        sgd_##T, momentum_##T, adagrad_##T, adam_##T, ftrl_##T, rowwise_adagrad_##T};  \
    static void update_rows_##T(const update_t *u) {                                   \
        T numbers[NUMBERS];                                                            \
        for (int i = 0; i < NUMBERS; i++) numbers[i] = (T)u->numbers[i];               \
        row_##T row = {.n = u->dim, .x = numbers};                                     \
        for (size_t i = 0; i < u->rows.n; i++) {                                       \
            int64_t ahead = i + AHEAD < u->rows.n ? u->rows.slots[i + AHEAD] : -1;     \
            if (ahead >= 0) {                                                          \
                prefetch_row(row_at(&u->rows, ahead), u->rows.row);                    \
                if (u->state.row) prefetch_row(row_at(&u->state, ahead), u->state.row); \
            }                                                                          \
            int64_t slot = u->rows.slots[i];                                           \
            if (slot < 0) continue;                                                    \
            row.w = (T *)row_at(&u->rows, slot);                                       \
            row.s = u->state.row ? (T *)row_at(&u->state, slot) : NULL;                \
            row.g = (const T *)u->rows.rows + i * u->dim;                              \
            if (u->counted) {                                                          \
                T *count = row.s + u->state.row / sizeof(T) - 1;                       \
                *count += 1;                                                           \
                int known = *count >= 0 && *count < (T)u->steps;                       \
                size_t step = known ? (size_t)*count : u->steps - 1;    \
                row.first = *count == 1;                                               \
                row.epsilon = (T)(u->numbers[6] * u->corrections[2 * step]);           \
                row.rate = (T)(u->numbers[0] * u->corrections[2 * step + 1]);          \
            }                                                                          \
            RULES_##T[u->rule](&row);                                                  \
        }                                                                              \
    }                                                                                  \
    static double most_steps_##T(const update_t *u) {                                  \
        T most = 0;                                                                    \
        for (size_t i = 0; i < u->rows.n; i++) {                                       \
            if (u->rows.slots[i] < 0) continue;                                        \
            T count = ((T *)row_at(&u->state, u->rows.slots[i]))[u->state.row / sizeof(T) - 1]; \
            if (count > most) most = count;                                            \
        }                                                                              \
        return (double)most + 1;                                                       \
    }

RULES(float, sqrtf, fabsf, copysignf)
RULES(double, sqrt, fabs, copysign)
enum { N_RULES = sizeof RULES_float / sizeof *RULES_float };

/* update_rows(item, rule, grads, slots, rows, state, shift, dim, width, numbers, corrections, open)
 *
 * Change rows by their gradients, one for each slot; negative slots are passed over. Returns 0, or
 * if `open` the steps that some row will have taken where `corrections` has no pair for them; then
 * nothing has changed. */
static PyObject *py_update_rows(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[6];
    update_t u;
    if (n_args != 12) {
        PyErr_SetString(PyExc_TypeError, "update_rows(item, rule, grads, slots, rows, state, shift, "
                                         "dim, width, numbers, corrections, open)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[0]);
    long rule = PyLong_AsLong(args[1]), shift = PyLong_AsLong(args[6]);
    size_t width = PyLong_AsSize_t(args[8]);
    int open = PyObject_IsTrue(args[11]);
    u.dim = PyLong_AsSize_t(args[7]);
    if (PyErr_Occurred() || open_buffers(args + 2, 4, 0, views) < 0) return NULL;
    if (open_buffers(args + 9, 2, 0, views + 4) < 0) {
        close_buffers(views, 4, "", 0);
        return NULL;
    }
    u.rows = (slabs_t){views[0].buf, views[2].buf, views[1].buf, words_in(&views[1]), u.dim * item, 0};
    u.state = (slabs_t){NULL, views[3].buf, views[1].buf, u.rows.n, width * item, 0};
    u.numbers = views[4].buf, u.corrections = views[5].buf;
    u.steps = (size_t)views[5].len / sizeof(double) / 2;
    u.counted = u.steps > 0;
    u.rule = (int)rule;
    size_t slabs = words_in(&views[2]), kept[] = {0, 1, 1, 2, 2, 0};
    if ((item != sizeof(float) && item != sizeof(double)) || rule < 0 || rule >= N_RULES ||
        u.dim == 0 || u.dim > SIZE_MAX >> 8 || width > SIZE_MAX >> 8 ||
        width < kept[rule] * u.dim + (size_t)u.counted + (rule == 5) || ((rule == 1 || rule == 3) && !u.counted) ||
        (size_t)views[4].len < NUMBERS * sizeof(double) || (width && words_in(&views[3]) < slabs) ||
        !are_slabs(&u.rows, shift, slabs, (size_t)views[0].len) ||
        !all_within(u.rows.slots, u.rows.n, INT64_MIN, (int64_t)(slabs << shift)))
        return close_buffers(views, 6, "update_rows: the arrays do not fit", 0);
    u.state.shift = u.rows.shift;
    double most = 0;
    Py_BEGIN_ALLOW_THREADS
    if (open && u.counted)
        most = item == sizeof(float) ? most_steps_float(&u) : most_steps_double(&u);
    if (most < (double)u.steps || !open || !u.counted) {
        most = 0;
        (item == sizeof(float) ? update_rows_float : update_rows_double)(&u);
    }
    Py_END_ALLOW_THREADS
    return close_buffers(views, 6, NULL, (Py_ssize_t)most);
}

/* ---- rows of datasets: `data/columns.py`, `order.py` and `multislot.py` hold the same in NumPy */

/* An object's memory, which must hold whole items; -1 and an exception if it does not. */
static int open_items(PyObject *object, int flags, size_t item, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, flags) < 0) return -1;
    if ((size_t)view->len % item == 0) return 0;
    PyBuffer_Release(view);
    view->obj = NULL;
    PyErr_SetString(PyExc_ValueError, "a buffer does not hold whole items");
    return -1;
}

static PyObject *py_copy_runs(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[4] = {{.obj = NULL}, {.obj = NULL}, {.obj = NULL}, {.obj = NULL}};
    Py_buffer *to = &views[0], *offsets = &views[1], *from = &views[2], *starts = &views[3];
    PyObject *result = NULL;
    if (n_args != 5) {
        PyErr_SetString(PyExc_TypeError, "copy_runs(to, offsets, values, starts, item)");
        return NULL;
    }
    size_t item = PyLong_AsSize_t(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (open_items(args[0], PyBUF_WRITABLE, 1, to) < 0 ||
        open_items(args[1], PyBUF_SIMPLE, 8, offsets) < 0 ||
        open_items(args[2], PyBUF_SIMPLE, 1, from) < 0 ||
        open_items(args[3], PyBUF_SIMPLE, 8, starts) < 0)
        goto end;
    if (offsets->len != starts->len + 8) {
        PyErr_SetString(PyExc_ValueError, "copy_runs: one offset more than starts is needed");
        goto end;
    }
    size_t rows = (size_t)starts->len / 8, row = 0;
    const int64_t *at = offsets->buf, *begin = starts->buf;
    int64_t n_to = item ? to->len / (Py_ssize_t)item : 0;
    int64_t n_from = item ? from->len / (Py_ssize_t)item : 0;
    char *target = to->buf;
    const char *source = from->buf;
    Py_BEGIN_ALLOW_THREADS
    for (; item && row < rows; row++) {
        int64_t n = (int64_t)((uint64_t)at[row + 1] - (uint64_t)at[row]);
        if (at[row] < 0 || n < 0 || at[row] > n_to || n > n_to - at[row] || begin[row] < 0 ||
            begin[row] > n_from || n > n_from - begin[row])
            break;
        memcpy(target + (size_t)at[row] * item, source + (size_t)begin[row] * item,
               (size_t)n * item);
    }
    Py_END_ALLOW_THREADS
    if (item && row < rows) {
        PyErr_SetString(PyExc_ValueError, "copy_runs: a row lies outside of the values");
        goto end;
    }
    result = Py_None;
    Py_INCREF(result);
end:
    for (int i = 0; i < 4; i++)
        if (views[i].obj) PyBuffer_Release(&views[i]);
    return result;
}

/* An order of samples: a Feistel permutation of the numbers of so many bits, and its inverse. */

enum { FEISTEL_ROUNDS = 8 };

static inline uint64_t feistel_hash(uint64_t word, uint64_t key, unsigned bits) {
    word = (word + key) * UINT64_C(0x9E3779B97F4A7C15);
    word = (word ^ word >> 32) * UINT64_C(0xD6E8FEB86659FD93);
    return word >> (64 - bits);
}

static inline uint64_t feistel(uint64_t word, unsigned bits, const uint64_t *keys, int back) {
    unsigned low_bits = bits / 2, high_bits = bits - low_bits;
    uint64_t high = word >> low_bits, low = word & ((UINT64_C(1) << low_bits) - 1);
    for (int i = 0; i < FEISTEL_ROUNDS; i++) {
        int round = back ? FEISTEL_ROUNDS - 1 - i : i;
        if (round % 2)
            high ^= feistel_hash(low, keys[round], high_bits);
        else
            low ^= feistel_hash(high, keys[round], low_bits);
    }
    return high << low_bits | low;
}

/* Permute; what comes out beyond `total` goes in again. Apart, so that most need no branch. */
static inline void permute(const uint64_t *words, uint64_t *found, size_t n, uint64_t total,
                           unsigned bits, const uint64_t *keys, int back) {
    for (size_t i = 0; i < n; i++) found[i] = feistel(words[i], bits, keys, back);
    for (size_t i = 0; i < n; i++)
        while (found[i] >= total) found[i] = feistel(found[i], bits, keys, back);
}

static PyObject *py_permute(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[3] = {{.obj = NULL}, {.obj = NULL}, {.obj = NULL}};
    Py_buffer *words = &views[0], *found = &views[1], *keys = &views[2];
    PyObject *result = NULL;
    if (n_args != 6) {
        PyErr_SetString(PyExc_TypeError, "permute(numbers, found, keys, total, bits, back)");
        return NULL;
    }
    uint64_t total = PyLong_AsUnsignedLongLong(args[3]);
    unsigned long bits = PyLong_AsUnsignedLong(args[4]);
    int back = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (open_items(args[0], PyBUF_SIMPLE, 8, words) < 0 ||
        open_items(args[1], PyBUF_WRITABLE, 8, found) < 0 ||
        open_items(args[2], PyBUF_SIMPLE, 8, keys) < 0)
        goto end;
    size_t n = (size_t)words->len / 8;
    int fits = bits > 1 && bits < 64 && total <= UINT64_C(1) << bits &&
               found->len == words->len && keys->len == FEISTEL_ROUNDS * 8;
    for (size_t i = 0; fits && i < n; i++) fits = ((const uint64_t *)words->buf)[i] < total;
    if (!fits) { /* else a walk might never end */
        PyErr_SetString(PyExc_ValueError, "permute: the arrays do not fit");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    if (back)
        permute(words->buf, found->buf, n, total, (unsigned)bits, keys->buf, 1);
    else
        permute(words->buf, found->buf, n, total, (unsigned)bits, keys->buf, 0);
    Py_END_ALLOW_THREADS
    result = Py_None;
    Py_INCREF(result);
end:
    for (int i = 0; i < 3; i++)
        if (views[i].obj) PyBuffer_Release(&views[i]);
    return result;
}

/* Numbers as text. A token ends at a space, and every line with a newline or the end of the text. */

static inline int is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
static inline int is_end(char c) { return is_blank(c) || c == '\n'; }

enum { SLOT_INT64, SLOT_INT32, SLOT_UINT64, SLOT_FLOAT64, SLOT_FLOAT32, N_SLOT_TYPES };

/* Digits as a number; 0 where there are none, or more than 64 bits. */
static int read_digits(const char **at, const char *end, uint64_t *number) {
    const char *p = *at;
    uint64_t n = 0;
    for (; p < end && (unsigned char)(*p - '0') < 10; p++) {
        unsigned digit = (unsigned)(*p - '0');
        if (n > (UINT64_MAX - digit) / 10) return 0;
        n = n * 10 + digit;
    }
    if (p == *at) return 0;
    *at = p;
    *number = n;
    return 1;
}

static int read_integer(const char *p, const char *end, int type, uint64_t *cell) {
    int negative = *p == '-';
    uint64_t n;
    if (*p == '-' || *p == '+') p++;
    if (!read_digits(&p, end, &n) || p != end) return 0;
    if (type == SLOT_INT32) {
        if (n > (uint64_t)INT32_MAX + (uint64_t)negative) return 0;
    } else if (negative && (type == SLOT_UINT64 ? n != 0 : n > (uint64_t)1 << 63)) {
        return 0;
    }
    *cell = negative ? 0 - n : n;
    return 1;
}

static const double POWERS[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

/* What is not exact in one division or multiplication is up to Python. */
static int read_odd_float(const char *p, const char *end, double *value, PyThreadState **thread) {
    char text[64], *copy = text, *stop = NULL;
    size_t n = (size_t)(end - p);
    int good = 0;
    PyEval_RestoreThread(*thread);
    if (n >= sizeof text) copy = PyMem_Malloc(n + 1);
    if (copy) {
        memcpy(copy, p, n);
        copy[n] = 0;
        *value = PyOS_string_to_double(copy, &stop, NULL);
        good = !PyErr_Occurred() && stop == copy + n;
        PyErr_Clear();
        if (copy != text) PyMem_Free(copy);
    }
    *thread = PyEval_SaveThread();
    return good;
}

/* Whether a number would become an infinity; one that is written as such is none. */
static int is_too_large(double value, const char *text, int type) {
    if (*text == '-' || *text == '+') text++;
    if (*text == 'i' || *text == 'I') return 0;
    return fabs(value) >= (type == SLOT_FLOAT32 ? 0x1.ffffffp127 : HUGE_VAL);
}

static int read_float(const char *begin, const char *end, int type, uint64_t *cell,
                      PyThreadState **thread) {
    const char *p = begin;
    int negative = *p == '-', digits = 0, point = 0, exact = 1;
    uint64_t mantissa = 0;
    double value;
    if (*p == '-' || *p == '+') p++;
    for (; p < end; p++) {
        if ((unsigned char)(*p - '0') < 10) {
            exact = exact && mantissa < (uint64_t)1 << 49; /* so ten times of it has 53 bits */
            if (exact) mantissa = mantissa * 10 + (uint64_t)(*p - '0');
            digits++;
            if (point) point++;
        } else if (*p == '.' && !point) {
            point = 1;
        } else {
            break;
        }
    }
    int places = point ? point - 1 : 0;
    if (p == end && digits && exact && places <= 22) {
        value = (double)mantissa / POWERS[places];
        if (negative) value = -value;
    } else if (!read_odd_float(begin, end, &value, thread) || is_too_large(value, begin, type)) {
        return 0;
    }
    memcpy(cell, &value, 8);
    return 1;
}

typedef struct {
    const int32_t *types;
    const int64_t *counts; /* of the values of a slot, or -1: any number */
    size_t n_slots;
    uint64_t *cells, *end_cells;
    int64_t *lengths, *end_lengths;
} multislot_t;

/* Parse one line; NULL where it is no record. `slots` goes on behind what was written. */
static const char *read_line(multislot_t *slots, const char *p, const char *end,
                             PyThreadState **thread) {
    uint64_t *cell = slots->cells;
    if (slots->end_lengths - slots->lengths < (ptrdiff_t)slots->n_slots) return NULL;
    for (size_t slot = 0; slot < slots->n_slots; slot++) {
        uint64_t n;
        while (p < end && is_blank(*p)) p++;
        if (!read_digits(&p, end, &n) || (p < end && !is_end(*p))) return NULL;
        if (n > (uint64_t)(slots->end_cells - cell)) return NULL;
        if (slots->counts[slot] >= 0 && n != (uint64_t)slots->counts[slot]) return NULL;
        slots->lengths[slot] = (int64_t)n;
        int type = slots->types[slot];
        for (uint64_t i = 0; i < n; i++) {
            while (p < end && is_blank(*p)) p++;
            const char *token = p;
            while (p < end && !is_end(*p)) p++;
            if (p == token) return NULL;
            int good = type >= SLOT_FLOAT64 ? read_float(token, p, type, cell, thread)
                                            : read_integer(token, p, type, cell);
            if (!good) return NULL;
            cell++;
        }
    }
    while (p < end && is_blank(*p)) p++;
    if (p < end && *p != '\n') return NULL;
    slots->cells = cell;
    slots->lengths += slots->n_slots;
    return p < end ? p + 1 : p;
}

static PyObject *py_parse_slots(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    Py_buffer views[5] = {{.obj = NULL}, {.obj = NULL}, {.obj = NULL}, {.obj = NULL}, {.obj = NULL}};
    PyObject *result = NULL;
    if (n_args != 6) {
        PyErr_SetString(PyExc_TypeError, "parse_slots(text, start, types, counts, cells, lengths)");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (open_items(args[0], PyBUF_SIMPLE, 1, &views[0]) < 0 ||
        open_items(args[2], PyBUF_SIMPLE, 4, &views[1]) < 0 ||
        open_items(args[3], PyBUF_SIMPLE, 8, &views[2]) < 0 ||
        open_items(args[4], PyBUF_WRITABLE, 8, &views[3]) < 0 ||
        open_items(args[5], PyBUF_WRITABLE, 8, &views[4]) < 0)
        goto end;
    multislot_t slots = {.types = views[1].buf, .counts = views[2].buf};
    slots.n_slots = (size_t)views[1].len / 4;
    slots.cells = views[3].buf;
    slots.end_cells = slots.cells + views[3].len / 8;
    slots.lengths = views[4].buf;
    slots.end_lengths = slots.lengths + views[4].len / 8;
    int known = 1;
    for (size_t i = 0; i < slots.n_slots; i++)
        known = known && slots.types[i] >= 0 && slots.types[i] < N_SLOT_TYPES;
    if (!known || !slots.n_slots || views[2].len != 2 * views[1].len || start < 0 ||
        start > views[0].len) {
        PyErr_SetString(PyExc_ValueError, "parse_slots: no such slots or start");
        goto end;
    }
    const char *text = views[0].buf, *p = text + start, *end = text + views[0].len;
    PyThreadState *thread = PyEval_SaveThread();
    int good = 1;
    while (p < end) {
        const char *q = p;
        while (q < end && is_blank(*q)) q++;
        if (q == end || *q == '\n') { /* an empty line */
            p = q == end ? q : q + 1;
            continue;
        }
        if (!(q = read_line(&slots, q, end, &thread))) {
            good = 0;
            break;
        }
        p = q;
    }
    PyEval_RestoreThread(thread);
    result = Py_BuildValue("nnnO", (Py_ssize_t)(p - text),
                           (Py_ssize_t)(slots.cells - (uint64_t *)views[3].buf),
                           (Py_ssize_t)(slots.lengths - (int64_t *)views[4].buf),
                           good ? Py_True : Py_False);
end:
    for (int i = 0; i < 5; i++)
        if (views[i].obj) PyBuffer_Release(&views[i]);
    return result;
}

/* ---- the control block */

enum { NUMBERS_AGREED = 6 };
#define NOT_IN_HEAP (1LL << 62) /* addresses from here on mean something else */

typedef struct {
    int64_t numbers[NUMBERS_AGREED], address;
    uint64_t sequence;
} slot_t; /* one cache line */

/* A reduction on its way through the staging memory; see `pipe_go`. */
typedef struct {
    const kernel_t *kernel;
    const char *send;           /* what this rank contributes */
    char *mine, *all;           /* where its slice of the result goes, and the others'; or NULL */
    char *stages[MOST];         /* of every rank: two parts of `size` slices, then two results */
    size_t slice;               /* elements of a slice in the staging memory */
    size_t length, stride;      /* all that is in slices of one rank; between slices of two */
    size_t parts, part;
    int phase;
    uint64_t before;            /* this control block's step when the pipe began */
    double divisor;
} pipe_t;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    int rank, size;
    size_t payload;
    uint64_t sequence, step;
    uint64_t ended; /* the last operation in which nobody can use this rank's memory any more */
    char *steps, *slots, *payloads;
    pipe_t pipe;
} control_block_t;

static slot_t *slot_of(const control_block_t *b, int rank) {
    return (slot_t *)(b->slots + ((b->sequence & 1) * (size_t)b->size + (size_t)rank) * LINE);
}

/* Where a rank's contribution to the operation at hand lies. */
static char *payload_of(const control_block_t *b, int rank) {
    return b->payloads + ((b->sequence & 1) * (size_t)b->size + (size_t)rank) * b->payload;
}

static uint64_t *step_of(const control_block_t *b, int rank) {
    return (uint64_t *)(b->steps + (size_t)rank * LINE);
}

static int control_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    control_block_t *b = (control_block_t *)self;
    PyObject *memory;
    Py_ssize_t payload;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "Oiin", &memory, &b->rank, &b->size, &payload)) return -1;
    if (b->rank < 0 || b->rank >= b->size || payload < 0) {
        PyErr_SetString(PyExc_ValueError, "a rank from 0 to size - 1, and a payload of 0 or more");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &b->memory, PyBUF_WRITABLE) < 0) return -1;
    b->payload = (size_t)payload;
    b->sequence = b->step = b->ended = 0;
    b->steps = b->memory.buf;
    b->slots = b->steps + (size_t)b->size * LINE;
    b->payloads = b->slots + 2 * (size_t)b->size * LINE;
    if (b->memory.len < (Py_ssize_t)((size_t)b->size * (3 * LINE + 2 * b->payload))) {
        PyErr_SetString(PyExc_ValueError, "the memory is too small for this control block");
        return -1;
    }
    return 0;
}

static void control_dealloc(PyObject *self) {
    control_block_t *b = (control_block_t *)self;
    if (b->memory.obj) PyBuffer_Release(&b->memory);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int is_complete(const control_block_t *b) {
    for (int r = 0; r < b->size; r++)
        if (__atomic_load_n(&slot_of(b, r)->sequence, __ATOMIC_ACQUIRE) != b->sequence) return 0;
    return 1;
}

enum { FEW_LOOKS = 300 };

/* Let a moment pass before the next look at others; after few, they may need this core. */
static void rest(long looks) {
    if (looks < FEW_LOOKS)
        PAUSE();
    else
        sched_yield();
}

/* The same; 0: there have been as many looks as there is patience for, or they took too long: more
 * than a microsecond each when this core is given away. */
static int rest_patiently(long looks, long patience, uint64_t *since) {
    if (looks >= patience) return 0;
    if (looks == FEW_LOOKS) *since = flight_now();
    if (looks > FEW_LOOKS && flight_now() - *since > 1000 * (uint64_t)(patience - FEW_LOOKS))
        return 0;
    rest(looks);
    return 1;
}

/* Publish that this rank's slot is written, and return whether the others' are. */
static int publish(const control_block_t *b, long patience) {
    __atomic_store_n(&slot_of(b, b->rank)->sequence, b->sequence, __ATOMIC_RELEASE);
    int complete = is_complete(b);
    uint64_t since;
    for (long looks = 0; !complete && rest_patiently(looks, patience, &since); looks++)
        complete = is_complete(b);
    return complete;
}

static PyObject *least(const control_block_t *b) {
    int64_t found[NUMBERS_AGREED];
    memcpy(found, slot_of(b, 0)->numbers, sizeof found);
    for (int r = 1; r < b->size; r++) {
        const int64_t *theirs = slot_of(b, r)->numbers;
        for (int i = 0; i < NUMBERS_AGREED; i++)
            if (theirs[i] < found[i]) found[i] = theirs[i];
    }
    PyObject *result = PyTuple_New(NUMBERS_AGREED);
    for (int i = 0; result && i < NUMBERS_AGREED; i++)
        PyTuple_SetItem(result, i, PyLong_FromLongLong(found[i]));
    return result;
}

static PyObject *control_test(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    if (!is_complete(b)) Py_RETURN_NONE;
    return least(b);
}

static PyObject *control_post(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    control_block_t *b = (control_block_t *)self;
    if (n_args != NUMBERS_AGREED + 3) {
        PyErr_SetString(PyExc_TypeError, "post(six numbers, address, data, spins)");
        return NULL;
    }
    int64_t numbers[NUMBERS_AGREED + 1];
    for (int i = 0; i <= NUMBERS_AGREED; i++) numbers[i] = PyLong_AsLongLong(args[i]);
    PyObject *data = args[NUMBERS_AGREED + 1];
    long spins = PyLong_AsLong(args[NUMBERS_AGREED + 2]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer view = {.obj = NULL};
    if (data != Py_None) {
        if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
        if ((size_t)view.len > b->payload) {
            PyBuffer_Release(&view);
            PyErr_SetString(PyExc_ValueError, "the data are larger than the control block's payload");
            return NULL;
        }
    }
    b->sequence++;
    slot_t *own = slot_of(b, b->rank);
    memcpy(own->numbers, numbers, sizeof own->numbers);
    own->address = numbers[NUMBERS_AGREED];
    if (view.obj) {
        memcpy(payload_of(b, b->rank), view.buf, (size_t)view.len);
        PyBuffer_Release(&view);
    }
    if (publish(b, spins)) return least(b);
    Py_RETURN_NONE;
}

static PyObject *control_addresses(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    PyObject *result = PyTuple_New(b->size);
    for (int r = 0; result && r < b->size; r++)
        PyTuple_SetItem(result, r, PyLong_FromLongLong(slot_of(b, r)->address));
    return result;
}

/* ---- leaving
 *
 * An operation that does not end with its agreement begins for good when the first rank that has seen
 * all others enters it (`enter`). Until then a rank that has posted its part may call it off: there is
 * a word for each of the two turns, and whoever changes it first decides for all. Afterwards a rank
 * that cannot go on breaks the operation: it takes a step that is beyond all others. Steps are counted
 * from where the operation begins, so all ranks are in step again in the next one.
 */

enum { STEP_BITS = 24, WHO_BITS = 16, OF_A_DEATH = 1 << 14 };
#define BEYOND (1ull << (STEP_BITS - 1))

/* Who has called off the operation at hand; -1: nobody. `most`: what to write if it is undecided. */
static int decide(const control_block_t *b, uint64_t most) {
    uint64_t *word = (uint64_t *)b->steps + 1 + (b->sequence & 1); /* in the first rank's line */
    uint64_t entered = b->sequence << WHO_BITS;
    uint64_t found = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    while (most && found < entered)
        if (__atomic_compare_exchange_n(word, &found, entered + most - 1, 0, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
            found = entered + most - 1;
    return found < entered ? -1 : (int)(found - entered) - 1;
}

/* Begin what follows the agreement; returns who has called the operation off, or -1. */
static int enter(const control_block_t *b) { return decide(b, 1); }

/* The rank that has broken the operation at hand; -1: none. */
static int broken_by(const control_block_t *b) {
    uint64_t beyond = (b->sequence << STEP_BITS) + BEYOND;
    for (int r = 0; b->sequence && r < b->size; r++)
        if (__atomic_load_n(step_of(b, r), __ATOMIC_ACQUIRE) >= beyond) return r;
    return -1;
}

/* enter() -> who has called off the operation at hand, -1 if all ranks are in it from now on */
static PyObject *control_enter(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyLong_FromLong(enter((control_block_t *)self));
}

/* called_off_by() -> the same, without entering it */
static PyObject *control_called_off_by(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyLong_FromLong(decide((control_block_t *)self, 0));
}

/* call_off(because a rank has died) -> whether nobody does anything in the operation at hand; False:
 * some rank is in it. Whoever hears of it gets the number of this rank, more by `OF_A_DEATH`. */
static PyObject *control_call_off(PyObject *self, PyObject *of_a_death) {
    control_block_t *b = (control_block_t *)self;
    uint64_t who = (uint64_t)b->rank + (of_a_death == Py_True ? OF_A_DEATH : 0);
    return PyBool_FromLong(decide(b, who + 2) >= 0);
}

/* break_off(): never go on with the operation at hand, which all ranks are in. */
static PyObject *control_break_off(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    b->step = (b->sequence << STEP_BITS) + BEYOND;
    __atomic_store_n(step_of(b, b->rank), b->step, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyObject *control_broken_by(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return PyLong_FromLong(broken_by((control_block_t *)self));
}

/* inside(steps): the ranks that have not taken so many steps in the operation at hand. */
static PyObject *control_inside(PyObject *self, PyObject *steps) {
    const control_block_t *b = (control_block_t *)self;
    uint64_t last = (b->sequence << STEP_BITS) + (uint64_t)PyLong_AsLong(steps);
    PyObject *ranks = PyErr_Occurred() ? NULL : PyList_New(0);
    for (int r = 0; ranks && r < b->size; r++) {
        if (__atomic_load_n(step_of(b, r), __ATOMIC_ACQUIRE) >= last) continue;
        PyObject *rank = PyLong_FromLong(r);
        if (!rank || PyList_Append(ranks, rank) < 0) Py_CLEAR(ranks);
        Py_XDECREF(rank);
    }
    return ranks;
}

static int all_at(const control_block_t *b, uint64_t step, long patience) {
    uint64_t since;
    for (long looks = 1;; looks++) {
        int r = 0;
        while (r < b->size && __atomic_load_n(step_of(b, r), __ATOMIC_ACQUIRE) >= step) r++;
        if (r == b->size) return 1;
        if (!rest_patiently(looks, patience, &since)) return 0;
    }
}

/* Count steps from where the operation at hand begins. */
static void count_from_here(control_block_t *b) {
    if (b->step < b->sequence << STEP_BITS) b->step = b->sequence << STEP_BITS;
}

static void take_step(control_block_t *b) {
    count_from_here(b);
    __atomic_store_n(step_of(b, b->rank), ++b->step, __ATOMIC_RELEASE);
}

static PyObject *control_arrive(PyObject *self, PyObject *spins_) {
    control_block_t *b = (control_block_t *)self;
    long spins = PyLong_AsLong(spins_);
    if (PyErr_Occurred()) return NULL;
    take_step(b);
    return PyBool_FromLong(all_at(b, b->step, spins + 1));
}

static PyObject *control_arrived(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    return PyBool_FromLong(all_at(b, b->step, 1));
}

static PyObject *control_behind(PyObject *self, PyObject *ignored) {
    (void)ignored;
    control_block_t *b = (control_block_t *)self;
    PyObject *ranks = PyList_New(0);
    int has_stepped = b->step > b->sequence << STEP_BITS;
    for (int r = 0; ranks && r < b->size; r++) {
        int here = __atomic_load_n(&slot_of(b, r)->sequence, __ATOMIC_ACQUIRE) == b->sequence &&
                   (!has_stepped || __atomic_load_n(step_of(b, r), __ATOMIC_ACQUIRE) >= b->step);
        PyObject *rank = here ? NULL : PyLong_FromLong(r);
        if (rank && PyList_Append(ranks, rank) < 0) Py_CLEAR(ranks);
        Py_XDECREF(rank);
    }
    return ranks;
}

/* ---- the pipe
 *
 * The elements are cut into parts of `size` slices. For each part a rank
 *   IN      copies the slices of the others into its staging memory, where they read them,
 *   FOLD    combines its own slice, from everyone's staging memory and its own array,
 *   OUT     copies the other slices of the result from where their owners left them.
 * IN is one part ahead, so that ranks seldom wait: a rank's steps are in 0, in 1, fold 0, in 2,
 * fold 1, ... Two parts take turns in the memory: in p+2 comes after out p, hence after everyone's
 * fold p; fold p+2 comes after everyone's in p+2, hence after everyone's out p.
 *
 * In a reduce_scatter the slices of one rank lie one after the other (`stride` apart from the next
 * rank's); in an all_reduce or reduce they take turns (`stride` is 0).
 */

enum { IN, AWAIT_IN, FOLD_, AWAIT_FOLD, OUT };

static size_t slice_at(const control_block_t *b, size_t part, int rank, size_t *offset) {
    const pipe_t *p = &b->pipe;
    size_t first, rest;
    if (p->stride) { /* of `length` elements per rank */
        first = part * p->slice;
        rest = p->length - first;
        *offset = (size_t)rank * p->stride + first;
        return rest < p->slice ? rest : p->slice;
    }
    first = part * p->slice * (size_t)b->size;
    rest = p->length - first;
    size_t each = (rest + (size_t)b->size - 1) / (size_t)b->size;
    each = each < p->slice ? (each + 63) / 64 * 64 : p->slice; /* whole cache lines */
    if (each > p->slice) each = p->slice;
    size_t start = (size_t)rank * each;
    *offset = first + start;
    return start >= rest ? 0 : rest - start < each ? rest - start : each;
}

static char *staged_in(const control_block_t *b, int owner, size_t part, int rank) {
    const pipe_t *p = &b->pipe;
    size_t place = (part & 1) * (size_t)b->size + (size_t)rank;
    return p->stages[owner] + place * p->slice * p->kernel->item;
}

static char *staged_out(const control_block_t *b, int owner, size_t part) {
    const pipe_t *p = &b->pipe;
    size_t place = 2 * (size_t)b->size + (part & 1);
    return p->stages[owner] + place * p->slice * p->kernel->item;
}

static void pipe_in(const control_block_t *b, size_t part) {
    const pipe_t *p = &b->pipe;
    for (int turn = 1; turn < b->size; turn++) {
        int rank = (b->rank + turn) % b->size;
        size_t offset, n = slice_at(b, part, rank, &offset), item = p->kernel->item;
        copy(staged_in(b, b->rank, part, rank), p->send + offset * item, n * item);
    }
}

static void pipe_fold(const control_block_t *b) {
    const pipe_t *p = &b->pipe;
    size_t offset, item = p->kernel->item;
    job_t job = {.kernel = p->kernel, .n_sources = b->size, .n_outs = 0, .divisor = p->divisor};
    job.count = slice_at(b, p->part, b->rank, &offset);
    for (int r = 0; r < b->size; r++)
        job.sources[r] = r == b->rank ? (uintptr_t)(p->send + offset * item)
                                      : (uintptr_t)staged_in(b, r, p->part, b->rank);
    if (p->mine) {
        size_t skipped = p->stride ? (size_t)b->rank * p->stride : 0;
        job.outs[job.n_outs++] = (uintptr_t)(p->mine + (offset - skipped) * item);
    }
    if (!p->stride) job.outs[job.n_outs++] = (uintptr_t)staged_out(b, b->rank, p->part);
    combine(&job);
}

static void pipe_out(const control_block_t *b) {
    const pipe_t *p = &b->pipe;
    for (int turn = 1; p->all && turn < b->size; turn++) {
        int rank = (b->rank + turn) % b->size;
        size_t offset, n = slice_at(b, p->part, rank, &offset), item = p->kernel->item;
        copy(p->all + offset * item, staged_out(b, rank, p->part), n * item);
    }
}

/* Go on as far as the others allow; 1 when all is done. */
static int pipe_go(control_block_t *b, long patience) {
    pipe_t *p = &b->pipe;
    for (;;) {
        size_t ahead = p->part + 1 < p->parts;
        switch (p->phase) {
        case IN:
            if (p->part == 0) {
                pipe_in(b, 0);
                take_step(b);
            }
            if (ahead) pipe_in(b, p->part + 1);
            take_step(b); /* also where there is nothing ahead: steps are counted */
            p->phase = AWAIT_IN; /* fall through */
        case AWAIT_IN:
            if (!all_at(b, p->before + (p->part ? 2 * p->part : 1), patience)) return 0;
            p->phase = FOLD_; /* fall through */
        case FOLD_:
            pipe_fold(b);
            take_step(b);
            p->phase = AWAIT_FOLD; /* fall through */
        case AWAIT_FOLD:
            if (!all_at(b, p->before + 2 * p->part + 3, patience)) return 0;
            p->phase = OUT; /* fall through */
        case OUT:
            pipe_out(b);
            p->phase = IN;
            if (++p->part == p->parts) return 1;
        }
    }
}

/* Publish a fingerprint and what belongs to it, and look whether all ranks agree, in time. Their
 * details are equal, but for the last bit of hashes of shapes, or numbers up to `other`. */
enum { NO_OTHER = -1 };
static int agree(control_block_t *b, int64_t number, int64_t limit, int64_t detail, int64_t address,
                 int64_t other, long spins) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    int64_t now = time.tv_sec * 1000000000LL + time.tv_nsec;
    slot_t *own = slot_of(b, b->rank);
    own->numbers[0] = number, own->numbers[1] = -number;
    own->numbers[2] = detail, own->numbers[3] = -detail;
    own->numbers[4] = now + limit, own->numbers[5] = -now;
    own->address = address;
    int agreed = publish(b, spins);
    int64_t deadline = INT64_MAX, arrival = INT64_MIN;
    for (int r = 0; agreed && r < b->size; r++) {
        const int64_t *theirs = slot_of(b, r)->numbers;
        agreed = theirs[0] == number && theirs[1] == -number &&
                 (theirs[2] == detail || theirs[2] <= other ||
                  (detail > 1 && (theirs[2] ^ detail) == 1));
        if (theirs[4] < deadline) deadline = theirs[4];
        if (-theirs[5] > arrival) arrival = -theirs[5];
    }
    return agreed && arrival <= deadline;
}

static void close_small(Py_buffer *from, Py_buffer *to) {
    if (from->obj) PyBuffer_Release(from);
    if (to->obj) PyBuffer_Release(to);
}

/* Open what a rank contributes and what it writes (either may be None); -1: an error is set. */
static int open_small(const control_block_t *b, PyObject *data, PyObject *out, Py_buffer *from,
                      Py_buffer *to) {
    from->obj = to->obj = NULL;
    from->len = to->len = 0;
    int in_place = data == out && data != Py_None; /* then it is opened once, as what is written */
    if (!in_place && data != Py_None && PyObject_GetBuffer(data, from, PyBUF_SIMPLE) < 0) return -1;
    if (out == Py_None || PyObject_GetBuffer(out, to, PyBUF_WRITABLE) == 0) {
        if (in_place) from->buf = to->buf, from->len = to->len;
        if ((size_t)from->len <= b->payload) return 0;
        PyErr_SetString(PyExc_ValueError, "the data are larger than the control block's payload");
    }
    close_small(from, to);
    return -1;
}

/* All of a small reduction, if nothing unusual happens: post the data, see that all ranks mean
 * the same in time, combine `count` elements from `first` on into `out`. False: look with `test`
 * what happened, or wait. */
static PyObject *control_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    control_block_t *b = (control_block_t *)self;
    if (n_args != 9) {
        PyErr_SetString(PyExc_TypeError, "reduce(fingerprint, timeout_ns, data, out, first, code, "
                                         "count, divisor, spins)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(args[0]), limit = PyLong_AsLongLong(args[1]);
    size_t first = PyLong_AsSize_t(args[4]);
    job_t job = {.kernel = kernel_of(args[5]), .n_sources = b->size, .n_outs = 1};
    job.count = PyLong_AsSize_t(args[6]);
    job.divisor = PyFloat_AsDouble(args[7]);
    long spins = PyLong_AsLong(args[8]);
    Py_buffer data, out;
    if (PyErr_Occurred() || open_small(b, args[2], args[3], &data, &out) < 0) return NULL;
    size_t item = job.kernel->item;
    if (args[2] == Py_None || (first + job.count) * item > (size_t)data.len || b->size > MOST ||
        (out.obj && (size_t)out.len != job.count * item)) {
        close_small(&data, &out);
        PyErr_SetString(PyExc_ValueError, "the data do not fit the count");
        return NULL;
    }
    b->sequence++;
    memcpy(payload_of(b, b->rank), data.buf, (size_t)data.len);
    int agreed = agree(b, number, limit, 0, 0, NO_OTHER, spins);
    if (agreed && out.obj) {
        job.outs[0] = (uintptr_t)out.buf;
        for (int r = 0; r < b->size; r++)
            job.sources[r] = (uintptr_t)payload_of(b, r) + first * item;
        combine(&job);
    }
    close_small(&data, &out);
    return PyBool_FromLong(agreed);
}

/* All of a small movement of data, if nothing unusual happens: post the data, see that all ranks
 * mean the same in time, copy to `out`, one after the other, `nbytes` from `first` on of what
 * `source` has posted, or each rank if `source` is negative. False: as for `reduce`. */
static PyObject *control_move(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    control_block_t *b = (control_block_t *)self;
    if (n_args != 9) {
        PyErr_SetString(PyExc_TypeError, "move(fingerprint, detail, timeout_ns, data, out, source, "
                                         "first, nbytes, spins)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(args[0]), detail = PyLong_AsLongLong(args[1]);
    int64_t limit = PyLong_AsLongLong(args[2]);
    long source = PyLong_AsLong(args[5]), spins = PyLong_AsLong(args[8]);
    size_t first = PyLong_AsSize_t(args[6]), nbytes = PyLong_AsSize_t(args[7]);
    Py_buffer data, out;
    if (PyErr_Occurred() || open_small(b, args[3], args[4], &data, &out) < 0) return NULL;
    int begin = source < 0 ? 0 : (int)source, end = source < 0 ? b->size : begin + 1;
    if (end > b->size || first + nbytes > b->payload ||
        (out.obj && (size_t)out.len != nbytes * (size_t)(end - begin))) {
        close_small(&data, &out);
        PyErr_SetString(PyExc_ValueError, "move: the array has another size");
        return NULL;
    }
    b->sequence++;
    if (data.len) memcpy(payload_of(b, b->rank), data.buf, (size_t)data.len);
    int agreed = agree(b, number, limit, detail, 0, NO_OTHER, spins);
    for (int r = begin; agreed && out.obj && r < end; r++)
        memcpy((char *)out.buf + (size_t)(r - begin) * nbytes, payload_of(b, r) + first, nbytes);
    close_small(&data, &out);
    return PyBool_FromLong(agreed);
}

/* This rank's slice of `count` elements: the first, and how many; whole cache lines. */
static size_t own_share(const control_block_t *b, size_t count, size_t *first) {
    size_t unit = 64, size = (size_t)b->size, rank = (size_t)b->rank;
    size_t each = (count + size * unit - 1) / (size * unit) * unit;
    *first = rank * each < count ? rank * each : count;
    size_t end = *first + each < count ? *first + each : count;
    return end - *first;
}

/* All of an all_reduce of arrays in shared memory, as far as nothing unusual happens. Returns
 * 0: look with `test` what happened, or wait; 1: agreed, but some array is not in shared memory;
 * 2: this rank's slice is in all arrays, but others are not so far; 3: done. */
static PyObject *control_reduce_shared(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    control_block_t *b = (control_block_t *)self;
    if (n_args != 8) {
        PyErr_SetString(PyExc_TypeError,
                        "reduce_shared(fingerprint, timeout_ns, address, bases, code, count, "
                        "divisor, spins)");
        return NULL;
    }
    int64_t number = PyLong_AsLongLong(args[0]), limit = PyLong_AsLongLong(args[1]);
    int64_t address = PyLong_AsLongLong(args[2]);
    job_t job = {.kernel = kernel_of(args[4]), .n_sources = b->size, .n_outs = b->size};
    size_t count = PyLong_AsSize_t(args[5]), first;
    job.divisor = PyFloat_AsDouble(args[6]);
    long spins = PyLong_AsLong(args[7]);
    if (PyErr_Occurred() || read_addresses(args[3], job.sources) < 0) return NULL;
    if (PyTuple_Size(args[3]) != b->size) {
        PyErr_SetString(PyExc_ValueError, "reduce_shared: a base per rank");
        return NULL;
    }
    b->sequence++;
    int state = agree(b, number, limit, 0, address, NO_OTHER, spins) && enter(b) < 0;
    for (int r = 0; state && r < b->size; r++)
        if (slot_of(b, r)->address <= 0 || slot_of(b, r)->address >= NOT_IN_HEAP)
            return PyLong_FromLong(1);
    if (!state) return PyLong_FromLong(0);
    job.count = own_share(b, count, &first);
    for (int r = 0; r < b->size; r++) {
        job.sources[r] += (uintptr_t)slot_of(b, r)->address - 1 + first * job.kernel->item;
        job.outs[r] = job.sources[r];
    }
    Py_BEGIN_ALLOW_THREADS
    combine(&job);
    take_step(b);
    state = all_at(b, b->step, spins) ? 3 : 2;
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(state);
}

static PyObject *control_go_on(PyObject *self, PyObject *patience_) {
    control_block_t *b = (control_block_t *)self;
    long patience = PyLong_AsLong(patience_);
    int done;
    if (!PyErr_Occurred() && b->pipe.part >= b->pipe.parts)
        PyErr_SetString(PyExc_RuntimeError, "go_on: begin first");
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = pipe_go(b, patience);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(done);
}

/* Begin what is described in the pipe. */
static void pipe_begin(control_block_t *b) {
    pipe_t *p = &b->pipe;
    size_t whole = p->stride ? p->slice : p->slice * (size_t)b->size;
    p->parts = p->length ? (p->length + whole - 1) / whole : 1;
    p->part = 0;
    p->phase = IN;
    count_from_here(b);
    p->before = b->step;
}

static PyObject *control_begin(PyObject *self, PyObject *args) {
    control_block_t *b = (control_block_t *)self;
    pipe_t *p = &b->pipe;
    PyObject *code, *stages, *send_, *mine_, *all_;
    uintptr_t send, mine, all;
    Py_ssize_t slice, length, stride;
    uintptr_t addresses[MOST];
    if (!PyArg_ParseTuple(args, "OOOOOnnnd", &code, &send_, &mine_, &all_, &stages, &slice, &length,
                          &stride, &p->divisor))
        return NULL;
    if (!(p->kernel = kernel_of(code)) || read_addresses(stages, addresses) < 0 ||
        as_address(send_, &send) < 0 || as_address(mine_, &mine) < 0 || as_address(all_, &all) < 0)
        return NULL;
    if (PyTuple_Size(stages) != b->size || slice < 64 || length < 0 || stride < 0) {
        PyErr_SetString(PyExc_ValueError, "begin: a stage per rank, and slices of 64 or more");
        return NULL;
    }
    for (int r = 0; r < b->size; r++) p->stages[r] = (char *)addresses[r];
    p->send = (const char *)send;
    p->mine = (char *)mine;
    p->all = (char *)all;
    p->slice = (size_t)slice / 64 * 64;
    p->length = (size_t)length;
    p->stride = (size_t)stride;
    pipe_begin(b);
    Py_RETURN_NONE;
}

static PyObject *control_turn(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong((long)(((control_block_t *)self)->sequence & 1));
}

static PyMethodDef CONTROL_METHODS[] = {
    {"post", (PyCFunction)(void (*)(void))control_post, METH_FASTCALL, NULL},
    {"test", control_test, METH_NOARGS, NULL},
    {"reduce", (PyCFunction)(void (*)(void))control_reduce, METH_FASTCALL, NULL},
    {"move", (PyCFunction)(void (*)(void))control_move, METH_FASTCALL, NULL},
    {"reduce_shared", (PyCFunction)(void (*)(void))control_reduce_shared, METH_FASTCALL, NULL},
    {"addresses", control_addresses, METH_NOARGS, NULL},
    {"arrive", control_arrive, METH_O, NULL},
    {"arrived", control_arrived, METH_NOARGS, NULL},
    {"behind", control_behind, METH_NOARGS, NULL},
    {"enter", control_enter, METH_NOARGS, NULL},
    {"called_off_by", control_called_off_by, METH_NOARGS, NULL},
    {"call_off", control_call_off, METH_O, NULL},
    {"break_off", control_break_off, METH_NOARGS, NULL},
    {"broken_by", control_broken_by, METH_NOARGS, NULL},
    {"inside", control_inside, METH_O, NULL},
    {"begin", control_begin, METH_VARARGS, NULL},
    {"go_on", control_go_on, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef CONTROL_MEMBERS[] = {
    {"sequence", T_ULONGLONG, offsetof(control_block_t, sequence), READONLY, NULL},
    {"ended", T_ULONGLONG, offsetof(control_block_t, ended), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef CONTROL_GETSET[] = {{"turn", control_turn, NULL, NULL, NULL},
                                       {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot CONTROL_SLOTS[] = {
    {Py_tp_new, PyType_GenericNew},   {Py_tp_init, control_init},
    {Py_tp_dealloc, control_dealloc}, {Py_tp_methods, CONTROL_METHODS},
    {Py_tp_getset, CONTROL_GETSET},   {Py_tp_members, CONTROL_MEMBERS},
    {0, NULL},
};
static PyType_Spec CONTROL_BLOCK_SPEC = {"hpcdist.transport._kernel.ControlBlock",
                                         sizeof(control_block_t), 0, Py_TPFLAGS_DEFAULT,
                                         CONTROL_SLOTS};

#include "_attached.c"
#include "_hot.c"
#include "_hot_large.c"
#include "_hot_heap.c"
#include "_hot_objects.c"
#include "_hot_plans.c"
#include "_mail.c"
#include "_mail_objects.c"

static PyMethodDef FUNCTIONS[] = {
    {"combine", (PyCFunction)(void (*)(void))py_combine, METH_FASTCALL, NULL},
    {"address", py_address, METH_O, NULL},
    {"gather", (PyCFunction)(void (*)(void))py_gather, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))py_fetch, METH_FASTCALL, NULL},
    {"copy", (PyCFunction)(void (*)(void))py_copy, METH_FASTCALL, NULL},
    {"read_from", (PyCFunction)(void (*)(void))py_read_from, METH_FASTCALL, NULL},
    {"write_to", (PyCFunction)(void (*)(void))py_write_to, METH_FASTCALL, NULL},
    {"reduce_attached", py_reduce_attached, METH_VARARGS, NULL},
    {"is_attachable", py_is_attachable, METH_O, NULL},
    {"rights", py_rights, METH_NOARGS, NULL},
    {"copy_box", (PyCFunction)(void (*)(void))py_copy_box, METH_FASTCALL, NULL},
    {"merge", (PyCFunction)(void (*)(void))py_merge, METH_FASTCALL, NULL},
    {"group_ids", (PyCFunction)(void (*)(void))py_group_ids, METH_FASTCALL, NULL},
    {"segment_add", (PyCFunction)(void (*)(void))py_segment_add, METH_FASTCALL, NULL},
    {"find_slots", (PyCFunction)(void (*)(void))py_find_slots, METH_FASTCALL, NULL},
    {"place_slots", (PyCFunction)(void (*)(void))py_place_slots, METH_FASTCALL, NULL},
    {"take_rows", (PyCFunction)(void (*)(void))py_take_rows, METH_FASTCALL, NULL},
    {"update_rows", (PyCFunction)(void (*)(void))py_update_rows, METH_FASTCALL, NULL},
    {"put_rows", (PyCFunction)(void (*)(void))py_put_rows, METH_FASTCALL, NULL},
    {"read_rows", (PyCFunction)(void (*)(void))py_read_rows, METH_FASTCALL, NULL},
    {"permute", (PyCFunction)(void (*)(void))py_permute, METH_FASTCALL, NULL},
    {"copy_runs", (PyCFunction)(void (*)(void))py_copy_runs, METH_FASTCALL, NULL},
    {"parse_slots", (PyCFunction)(void (*)(void))py_parse_slots, METH_FASTCALL, NULL},
    HOT_FUNCTIONS,
    HOT_OBJECT_FUNCTIONS,
    MAIL_FUNCTIONS,
    MAIL_OBJECT_FUNCTIONS,
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, FUNCTIONS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernel(void) {
    PyObject *module = PyModule_Create(&MODULE), *codes = PyDict_New(), *merges = PyDict_New();
    PyObject *control_block = PyType_FromSpec(&CONTROL_BLOCK_SPEC);
    if (!module || !codes || !merges || !control_block) return NULL;
    for (int i = 0; i < N_KERNELS; i++) {
        if (strstr(KERNELS[i].name, "_float16") && !have_half()) continue;
        PyObject *code = PyLong_FromLong(i);
        if (!code || PyDict_SetItemString(codes, KERNELS[i].name, code) < 0) return NULL;
        Py_DECREF(code);
    }
    for (int i = 0; i < N_MERGES; i++) {
        PyObject *code = PyLong_FromLong(i);
        if (!code || PyDict_SetItemString(merges, MERGES[i].name, code) < 0) return NULL;
        Py_DECREF(code);
    }
    if (PyModule_AddObject(module, "CODES", codes) < 0) return NULL;
    if (PyModule_AddObject(module, "MERGES", merges) < 0) return NULL;
    if (PyModule_AddObject(module, "ControlBlock", control_block) < 0) return NULL;
    PyObject *request = PyType_FromSpec(&REQUEST_SPEC);
    if (!request || PyModule_AddObject(module, "SharedRequest", request) < 0) return NULL;
    if (add_hot(module) < 0 || add_mail(module) < 0) return NULL;
    return module;
}
