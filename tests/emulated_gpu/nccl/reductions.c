/* Reductions, element by element in the order of the ranks. 16-bit floats are computed in float. */
#include "nccl.h"
#include <math.h>
#include <string.h>

const int WIDTHS[N_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    return value != value ? 0x7fff : (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

/* For elements of type T, which are computed in type W: `load` and `store` are between the two. */
#define KERNELS(name, T, W, load, store, smaller, larger)                                \
    static void name##_combine(operator_t op, void *into, const void *from, size_t n) {  \
        T *to = into;                                                                    \
        const T *other = from;                                                           \
        for (size_t i = 0; i < n; i++) {                                                 \
            W a = load(to[i]), b = load(other[i]);                                       \
            W c = op == PROD ? a * b : op == MAX ? larger : op == MIN ? smaller : a + b; \
            to[i] = store(c);                                                            \
        }                                                                                \
    }                                                                                    \
    static void name##_divide(void *into, size_t n, int by) {                            \
        T *to = into;                                                                    \
        for (size_t i = 0; i < n; i++) to[i] = store(load(to[i]) / (W)by);               \
    }
#define INTEGERS(name, T) KERNELS(name, T, T, (T), (T), (a < b ? a : b), (a < b ? b : a))
INTEGERS(int8, int8_t)
INTEGERS(uint8, uint8_t)
INTEGERS(int32, int32_t)
INTEGERS(uint32, uint32_t)
INTEGERS(int64, int64_t)
INTEGERS(uint64, uint64_t)
KERNELS(float16, _Float16, float, (float), (_Float16), fminf(a, b), fmaxf(a, b))
KERNELS(float32, float, float, (float), (float), fminf(a, b), fmaxf(a, b))
KERNELS(float64, double, double, (double), (double), fmin(a, b), fmax(a, b))
KERNELS(bfloat16, uint16_t, float, from_bfloat16, to_bfloat16, fminf(a, b), fmaxf(a, b))

#define ROW(name) {name##_combine, name##_divide}
static const struct {
    void (*combine)(operator_t op, void *into, const void *from, size_t n);
    void (*divide)(void *into, size_t n, int by);
} TABLE[N_TYPES] = {ROW(int8),   ROW(uint8),   ROW(int32),   ROW(uint32),  ROW(int64),
                    ROW(uint64), ROW(float16), ROW(float32), ROW(float64), ROW(bfloat16)};

bool reduces(type_t type) { return TABLE[type].combine != NULL; }

void combine(type_t type, operator_t op, void *into, const void *from, size_t n) {
    TABLE[type].combine(op, into, from, n);
}

void divide(type_t type, void *into, size_t n, int by) { TABLE[type].divide(into, n, by); }
