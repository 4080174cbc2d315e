/* The loops over elements of each dtype and operator, and the table of them. */
#include "elements.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LOAD(NAME, T, A, EXPR)                                               \
    CLONES static void load_##NAME(void *acc_, const void *src_, size_t n) { \
        A *acc = acc_;                                                       \
        const T *src = src_;                                                 \
        for (size_t i = 0; i < n; i++) {                                     \
            T x = src[i];                                                    \
            acc[i] = (EXPR);                                                 \
        }                                                                    \
    }
#define FOLD(NAME, T, A, EXPR)                                               \
    CLONES static void fold_##NAME(void *acc_, const void *src_, size_t n) { \
        A *acc = acc_;                                                       \
        const T *src = src_;                                                 \
        for (size_t i = 0; i < n; i++) {                                     \
            A a = acc[i];                                                    \
            T x = src[i];                                                    \
            acc[i] = (EXPR);                                                 \
        }                                                                    \
    }
#define STORE(NAME, T, A, EXPR)                                                         \
    CLONES static void store_##NAME(void *dst_, void *acc_, size_t n, double divisor) { \
        T *dst = dst_;                                                                  \
        A *acc = acc_;                                                                  \
        if (divisor != 1.0) {                                                           \
            A by = (A)divisor;                                                          \
            for (size_t i = 0; i < n; i++) acc[i] = acc[i] / by;                        \
        }                                                                               \
        for (size_t i = 0; i < n; i++) {                                                \
            A a = acc[i];                                                               \
            dst[i] = (EXPR);                                                            \
        }                                                                               \
    }

/* Plain numbers are accumulated as they are; integers wrap, so signs do not matter to + and *. */
#define PLAIN(NAME, T)            \
    LOAD(NAME, T, T, x)           \
    STORE(NAME, T, T, a)          \
    FOLD(NAME##_add, T, T, a + x) \
    FOLD(NAME##_mul, T, T, a *x)
#define ORDERED(NAME, T)                  \
    FOLD(NAME##_max, T, T, a > x ? a : x) \
    FOLD(NAME##_min, T, T, a < x ? a : x)
#define BITS(NAME, T)            \
    FOLD(NAME##_or, T, T, a | x) \
    FOLD(NAME##_and, T, T, a &x) \
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
FOLD(bf16_mul, uint16_t, float, a *bits_float((uint32_t)x << 16))
STORE(bf16, uint16_t, float, to_bf16(a))

#if defined(AVX2)
#define HALF __attribute__((target("avx2,f16c")))
int have_half(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
#define HALF_LOOP(NAME, EIGHT, ONE)                                                  \
    HALF static void NAME(void *acc_, const void *src_, size_t n) {                  \
        float *acc = acc_;                                                           \
        const uint16_t *src = src_;                                                  \
        size_t i = 0;                                                                \
        for (; i + 8 <= n; i += 8) {                                                 \
            __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))); \
            _mm256_storeu_ps(acc + i, EIGHT);                                        \
        }                                                                            \
        for (; i < n; i++) {                                                         \
            float x = _cvtsh_ss(src[i]);                                             \
            acc[i] = ONE;                                                            \
        }                                                                            \
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
int have_half(void) { return 1; }
LOAD(f16, __fp16, float, (float)x)
FOLD(f16_add, __fp16, float, a + (float)x)
FOLD(f16_mul, __fp16, float, a *(float)x)
STORE(f16, __fp16, float, (__fp16)a)
#else
int have_half(void) { return 0; }
#define load_f16 NULL
#define fold_f16_add NULL
#define fold_f16_mul NULL
#define store_f16 NULL
#endif

/* MAX and MIN of floats, as reduction.py defines them: by the bits, -0.0 below 0.0, NaN wins. */
#define EXTREMUM(NAME, U, I, SHIFT, LIMIT, INFINITE)                                          \
    static inline I key_##NAME(U bits, I nan_key) {                                           \
        I flipped = (I)(bits ^ (((U)((I)bits >> SHIFT)) & LIMIT));                            \
        return (bits & LIMIT) > INFINITE ? nan_key : flipped;                                 \
    }                                                                                         \
    LOAD(NAME##_maximum, U, I, key_##NAME(x, (I)LIMIT))                                       \
    LOAD(NAME##_minimum, U, I, key_##NAME(x, (I)(LIMIT + 1)))                                 \
    static inline I larger_##NAME(I a, I b) { return a > b ? a : b; }                         \
    static inline I smaller_##NAME(I a, I b) { return a < b ? a : b; }                        \
    FOLD(NAME##_maximum, U, I, larger_##NAME(a, key_##NAME(x, (I)LIMIT)))                     \
    FOLD(NAME##_minimum, U, I, smaller_##NAME(a, key_##NAME(x, (I)(LIMIT + 1))))              \
    CLONES static void store_##NAME##_key(void *dst_, void *acc_, size_t n, double d) {       \
        U *dst = dst_;                                                                        \
        I *acc = acc_;                                                                        \
        (void)d;                                                                              \
        for (size_t i = 0; i < n; i++) dst[i] = (U)acc[i] ^ (((U)(acc[i] >> SHIFT)) & LIMIT); \
    }
EXTREMUM(f32, uint32_t, int32_t, 31, 0x7fffffffu, 0x7f800000u)
EXTREMUM(f64, uint64_t, int64_t, 63, 0x7fffffffffffffffull, 0x7ff0000000000000ull)

/* Sums and products of plain numbers from i to n: all sources and outputs in one pass, in
 * registers. Returns the first element that is left to the loops above. */
#define FUSED(NAME, T, OP)                                                                   \
    CLONES static size_t fused_##NAME(const uintptr_t *sources, int n_sources,               \
                                      const uintptr_t *outs, int n_outs, size_t i, size_t n, \
                                      double divisor) {                                      \
        typedef T vec __attribute__((vector_size(32), aligned(1), may_alias));               \
        enum { LANES = 32 / sizeof(T), STEP = 4 * LANES };                                   \
        for (; i + STEP <= n; i += STEP) {                                                   \
            const vec *x = (const vec *)((const T *)sources[0] + i);                         \
            vec a = x[0], b = x[1], c = x[2], d = x[3];                                      \
            for (int s = 1; s < n_sources; s++) {                                            \
                x = (const vec *)((const T *)sources[s] + i);                                \
                a = a OP x[0], b = b OP x[1], c = c OP x[2], d = d OP x[3];                  \
            }                                                                                \
            if (divisor != 1.0) {                                                            \
                T by = (T)divisor;                                                           \
                a = a / by, b = b / by, c = c / by, d = d / by;                              \
            }                                                                                \
            for (int o = 0; o < n_outs; o++) {                                               \
                vec *y = (vec *)((T *)outs[o] + i);                                          \
                y[0] = a, y[1] = b, y[2] = c, y[3] = d;                                      \
            }                                                                                \
        }                                                                                    \
        return i;                                                                            \
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
#define FUSED_SHORT(NAME, WIDEN, NARROW)                                                   \
    HALF static size_t fused_##NAME(const uintptr_t *sources, int n_sources,               \
                                    const uintptr_t *outs, int n_outs, size_t i, size_t n, \
                                    double divisor) {                                      \
        __m256 by = _mm256_set1_ps((float)divisor);                                        \
        for (; i + 16 <= n; i += 16) {                                                     \
            const __m128i *x = (const __m128i *)((const uint16_t *)sources[0] + i);        \
            __m256 a = WIDEN(_mm_loadu_si128(x)), b = WIDEN(_mm_loadu_si128(x + 1));       \
            for (int s = 1; s < n_sources; s++) {                                          \
                x = (const __m128i *)((const uint16_t *)sources[s] + i);                   \
                a = _mm256_add_ps(a, WIDEN(_mm_loadu_si128(x)));                           \
                b = _mm256_add_ps(b, WIDEN(_mm_loadu_si128(x + 1)));                       \
            }                                                                              \
            if (divisor != 1.0) a = _mm256_div_ps(a, by), b = _mm256_div_ps(b, by);        \
            __m128i c = NARROW(a), d = NARROW(b);                                          \
            for (int o = 0; o < n_outs; o++) {                                             \
                __m128i *y = (__m128i *)((uint16_t *)outs[o] + i);                         \
                _mm_storeu_si128(y, c), _mm_storeu_si128(y + 1, d);                        \
            }                                                                              \
        }                                                                                  \
        return i;                                                                          \
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

/* Exact sums are accumulated as doubles, by `exact.c`, and stored as the nearest numbers. */
LOAD(exact_f32, float, double, x)
LOAD(exact_f64, double, double, x)
LOAD(exact_bf16, uint16_t, double, bits_float((uint32_t)x << 16))
STORE(exact_f32, float, double, (float)a)
STORE(exact_f64, double, double, a)
/* Of a double that was rounded to odd, the float that is, too: `to_bf16` rounds it as the double. */
static inline float odd_float(double a) {
    float x = (float)a;
    uint32_t bits = float_bits(x);
    if (x == a || bits & 1 || x - x != 0) return x;
    return bits_float(bits + ((a > x) == (a > 0) ? 1 : (uint32_t)-1));
}
STORE(exact_bf16, uint16_t, double, to_bf16(odd_float(a)))
#if defined(AVX2)
HALF static void load_exact_f16(void *acc_, const void *src_, size_t n) {
    double *acc = acc_;
    const uint16_t *src = src_;
    for (size_t i = 0; i < n; i++) acc[i] = _cvtsh_ss(src[i]);
}
HALF static void store_exact_f16(void *dst_, void *acc_, size_t n, double divisor) {
    uint16_t *dst = dst_;
    double *acc = acc_;
    (void)divisor;
    for (size_t i = 0; i < n; i++) dst[i] = _cvtss_sh(odd_float(acc[i]), 0);
}
#elif defined(__aarch64__)
LOAD(exact_f16, __fp16, double, x)
STORE(exact_f16, __fp16, double, (__fp16)odd_float(a))
#else
#define load_exact_f16 NULL
#define store_exact_f16 NULL
#endif

#define ROW(OP, NAME, ITEM, TYPE, FOLDED) \
    {OP "_" NAME, ITEM, load_##TYPE, fold_##FOLDED, store_##TYPE, NULL}
#define FUSED_ROW(OP, NAME, ITEM, TYPE, FOLDED) \
    {OP "_" NAME, ITEM, load_##TYPE, fold_##FOLDED, store_##TYPE, fused_##FOLDED}
#define EXACT(NAME, ITEM, TYPE) \
    {"exact_sum_" NAME, ITEM, load_exact_##TYPE, NULL, store_exact_##TYPE, NULL}
#define KEYED(OP, NAME, ITEM, TYPE) \
    {#OP "_" NAME, ITEM, load_##TYPE##_##OP, fold_##TYPE##_##OP, store_##TYPE##_key, NULL}
#define NUMBERS(NAME, ITEM, TYPE) \
    ROW("add", NAME, ITEM, TYPE, TYPE##_add), ROW("multiply", NAME, ITEM, TYPE, TYPE##_mul)
#define FAST_NUMBERS(NAME, ITEM, TYPE)              \
    FUSED_ROW("add", NAME, ITEM, TYPE, TYPE##_add), \
        FUSED_ROW("multiply", NAME, ITEM, TYPE, TYPE##_mul)
#define INTEGERS(NUMBERS, NAME, ITEM, TYPE, SIGNED)                                               \
    NUMBERS(NAME, ITEM, TYPE), ROW("maximum", NAME, ITEM, TYPE, SIGNED##_max),                    \
        ROW("minimum", NAME, ITEM, TYPE, SIGNED##_min),                                           \
        ROW("bit_and", NAME, ITEM, TYPE, TYPE##_and), ROW("bit_or", NAME, ITEM, TYPE, TYPE##_or), \
        ROW("bit_xor", NAME, ITEM, TYPE, TYPE##_xor)
#define SHORT_FLOATS(NAME, TYPE) \
    FUSED_ROW("add", NAME, 2, TYPE, TYPE##_add), ROW("multiply", NAME, 2, TYPE, TYPE##_mul)

const kernel_t KERNELS[] = {
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
    FUSED_ROW("add", "complex64", 4, f32, f32_add),
    FUSED_ROW("add", "complex128", 8, f64, f64_add),
    EXACT("complex64", 4, f32),
    EXACT("complex128", 8, f64),
    EXACT("float32", 4, f32),
    EXACT("float64", 8, f64),
    EXACT("bfloat16", 2, bf16),
    EXACT("float16", 2, f16),
};
const int N_KERNELS = sizeof KERNELS / sizeof *KERNELS;
