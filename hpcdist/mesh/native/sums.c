/* Sums without an order; `mesh/sums.py` says what they are.
 *
 * A number is cut at fixed places, multiples of WIDTH bits, into slices, of which the sum keeps the
 * highest BINS, counted from the largest number. A slice is what adding a constant and subtracting it
 * again leaves of a number: exact, and the same whatever was added before. Slices of one bin are
 * added as doubles, which is exact for a BLOCK of numbers, and then as integers.
 */
#include "native.h"

enum { WIDTH = 40, BINS = 3, LOWEST = -25, BLOCK = 4096, COLUMNS = 32, ROWS = 512 };
enum { GRID, ODD, FIRST_BIN, WORDS = FIRST_BIN + 2 * BINS };
#define INFINITE 0x7ff0000000000000ull
#define LESS_SIGN 0x7fffffffffffffffull
#define ONE_BELOW ((int64_t)1 << 31) /* in `odd`, whose lower half counts those above */

/* As CLONES, and for processors with vectors of 64 bytes. */
#ifdef AVX2
#define WIDE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE_CLONES
#endif

/* As many numbers as a register holds, or two. */
enum { LANES = 8 };
typedef double vec __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
typedef long long bits __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int float_bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* One sum on its way. */
typedef struct {
    int64_t grid; /* the highest bin counts multiples of two to the WIDTH times this */
    int64_t odd;  /* infinities above zero and below */
    __int128 bins[BINS];
} sum_t;

/* What makes a slice: one and a half times the number whose last bit counts one of a bin. */
static const double CUTS[BINS] = {0x1.8p52, 0x1.8p12, 0x1.8p-28};
static const double COUNTED[BINS] = {1.0, 0x1p40, 0x1p80};

static double power_of_two(int exponent) {
    uint64_t as_bits = (uint64_t)(exponent + 1023) << 52;
    double value;
    memcpy(&value, &as_bits, sizeof value);
    return value;
}

/* The grid for numbers up to one with these bits, without its sign: none of them is half as large as
 * what the next higher bin counts, where it would have a slice, too. */
static int64_t grid_of(uint64_t largest) {
    int exponent = (int)(largest >> 52) - 1022;
    int grid = (exponent - (exponent < 0 ? WIDTH - 1 : 0)) / WIDTH;
    return grid < LOWEST ? LOWEST : grid;
}

static void raise_grid(sum_t *s, int64_t grid) {
    int64_t by = grid - s->grid;
    for (int b = BINS; b-- > 0;) s->bins[b] = b >= by ? s->bins[b - by] : 0;
    s->grid = grid;
}

/* Add the exact totals of slices, in doubles, of `n` lanes that are `apart`. */
static void add_totals(sum_t *s, int64_t grid, const double *totals, int n, int apart) {
    if (grid > s->grid) raise_grid(s, grid);
    for (int64_t b = 0, at = s->grid - grid; at < BINS; b++, at++)
        for (int lane = 0; lane < n; lane++)
            s->bins[at] += (int64_t)(totals[b * apart + lane] * COUNTED[b]);
}

/* Take infinities and NaN, which is both of them, out of numbers that are `apart`. */
static void take_odd(sum_t *s, double *numbers, size_t n, size_t apart) {
    for (size_t i = 0; i < n; i++) {
        double *x = numbers + i * apart;
        if (*x - *x == 0) continue;
        if (!(*x < 0)) s->odd |= 1;
        if (!(*x > 0)) s->odd |= ONE_BELOW;
        *x = 0;
    }
}

/* ---- numbers that all belong to one sum: `largest_of` and `slice` take a multiple of LANES */

#define OF_TYPE(T, VEC, BITS, SIGNLESS)                                                           \
    WIDE_CLONES static uint64_t largest_of_##T(const T *numbers, size_t n) {                      \
        BITS most = {0};                                                                          \
        for (size_t i = 0; i < n; i += LANES) {                                                   \
            BITS x = *(const BITS *)(numbers + i) & SIGNLESS, larger = x > most;                  \
            most = (x & larger) | (most & ~larger);                                               \
        }                                                                                         \
        uint64_t largest = 0;                                                                     \
        for (int lane = 0; lane < LANES; lane++) { /* as bits, among which NaN is the largest */  \
            double wide = (double)((VEC)most)[lane];                                              \
            uint64_t found;                                                                       \
            memcpy(&found, &wide, sizeof found);                                                  \
            if ((found & LESS_SIGN) > largest) largest = found & LESS_SIGN;                       \
        }                                                                                         \
        return largest;                                                                           \
    }                                                                                             \
    WIDE_CLONES static void slice_##T(const T *numbers, size_t n, double scale, double *totals) { \
        vec first = {0}, second = {0}, third = {0};                                               \
        for (size_t i = 0; i < n; i += LANES) {                                                   \
            vec x = __builtin_convertvector(*(const VEC *)(numbers + i), vec) * scale;            \
            vec cut = (x + CUTS[0]) - CUTS[0];                                                    \
            x -= cut, first += cut;                                                               \
            cut = (x + CUTS[1]) - CUTS[1];                                                        \
            x -= cut, second += cut;                                                              \
            third += (x + CUTS[2]) - CUTS[2];                                                     \
        }                                                                                         \
        *(vec *)totals = first, *(vec *)(totals + LANES) = second;                                \
        *(vec *)(totals + 2 * LANES) = third;                                                     \
    }                                                                                             \
    /* Add at most a BLOCK of numbers; 0: there are infinities or NaN among them. */              \
    static int add_block_##T(sum_t *s, const T *numbers, size_t n) {                              \
        double totals[BINS * LANES];                                                              \
        uint64_t largest = largest_of_##T(numbers, n);                                            \
        if (largest >= INFINITE) return 0;                                                        \
        int64_t grid = grid_of(largest);                                                          \
        slice_##T(numbers, n, power_of_two((int)-grid * WIDTH), totals);                          \
        if (largest) add_totals(s, grid, totals, LANES, LANES);                                   \
        return 1;                                                                                 \
    }                                                                                             \
    static void add_row_##T(sum_t *s, const T *numbers, size_t n) {                               \
        double block[BLOCK];                                                                      \
        for (size_t at = 0; at < n; at += BLOCK) {                                                \
            size_t part = n - at < BLOCK ? n - at : BLOCK, end = (part + LANES - 1) & -LANES;     \
            if (part == BLOCK && add_block_##T(s, numbers + at, part)) continue;                  \
            for (size_t i = 0; i < end; i++) block[i] = i < part ? (double)numbers[at + i] : 0;   \
            if (add_block_double(s, block, end)) continue;                                        \
            take_odd(s, block, part, 1);                                                          \
            add_block_double(s, block, end);                                                      \
        }                                                                                         \
    }                                                                                             \
    /* Add the columns of `rows` rows that are `apart`; 0: not all of them are finite. */         \
    static int add_columns_##T(sum_t *sums, const T *numbers, int rows, size_t apart) {           \
        double scales[COLUMNS], totals[BINS * COLUMNS];                                           \
        int64_t grids[COLUMNS];                                                                   \
        uint64_t largest[COLUMNS], all = 0;                                                       \
        largest_of_columns_##T(numbers, rows, apart, largest);                                    \
        for (int c = 0; c < COLUMNS; c++) {                                                       \
            if (largest[c] >= INFINITE) return 0;                                                 \
            all |= largest[c], grids[c] = grid_of(largest[c]);                                    \
            scales[c] = power_of_two((int)-grids[c] * WIDTH);                                     \
        }                                                                                         \
        if (all) slice_columns_##T(numbers, rows, apart, scales, totals);                         \
        for (int c = 0; c < COLUMNS; c++)                                                         \
            if (largest[c]) add_totals(sums + c, grids[c], totals + c, 1, COLUMNS);               \
        return 1;                                                                                 \
    }                                                                                             \
    static void add_rows_##T(sum_t *sums, const T *numbers, size_t length, size_t inner,          \
                             int columns) {                                                       \
        double block[ROWS * COLUMNS];                                                             \
        for (size_t at = 0; at < length; at += ROWS) {                                            \
            int rows = length - at < ROWS ? (int)(length - at) : ROWS;                            \
            const T *from = numbers + at * inner;                                                 \
            if (columns == COLUMNS && add_columns_##T(sums, from, rows, inner)) continue;         \
            for (int r = 0; r < rows; r++)                                                        \
                for (int c = 0; c < COLUMNS; c++)                                                 \
                    block[r * COLUMNS + c] =                                                      \
                        c < columns ? (double)from[(size_t)r * inner + (size_t)c] : 0;            \
            if (add_columns_double(sums, block, rows, COLUMNS)) continue;                         \
            for (int c = 0; c < columns; c++)                                                     \
                take_odd(sums + c, block + c, (size_t)rows, COLUMNS);                             \
            add_columns_double(sums, block, rows, COLUMNS);                                       \
        }                                                                                         \
    }

/* ---- numbers that stand in rows, whose columns are added */

#define OF_COLUMNS(T, VEC, BITS, SIGNLESS)                                                   \
    WIDE_CLONES static void largest_of_columns_##T(const T *numbers, int rows, size_t apart, \
                                                   uint64_t *largest) {                      \
        for (int c = 0; c < COLUMNS; c += LANES) {                                           \
            BITS most = {0};                                                                 \
            for (int r = 0; r < rows; r++) {                                                 \
                BITS x = *(const BITS *)(numbers + (size_t)r * apart + c) & SIGNLESS;        \
                BITS larger = x > most;                                                      \
                most = (x & larger) | (most & ~larger);                                      \
            }                                                                                \
            *(vec *)(largest + c) = __builtin_convertvector((VEC)most, vec);                 \
        }                                                                                    \
    }                                                                                        \
    WIDE_CLONES static void slice_columns_##T(const T *numbers, int rows, size_t apart,      \
                                              const double *scales, double *totals) {        \
        for (int c = 0; c < COLUMNS; c += LANES) {                                           \
            vec first = {0}, second = {0}, third = {0}, scale = *(const vec *)(scales + c);  \
            for (int r = 0; r < rows; r++) {                                                 \
                const T *from = numbers + (size_t)r * apart + c;                             \
                vec x = __builtin_convertvector(*(const VEC *)from, vec) * scale;            \
                vec cut = (x + CUTS[0]) - CUTS[0];                                           \
                x -= cut, first += cut;                                                      \
                cut = (x + CUTS[1]) - CUTS[1];                                               \
                x -= cut, second += cut;                                                     \
                third += (x + CUTS[2]) - CUTS[2];                                            \
            }                                                                                \
            *(vec *)(totals + c) = first, *(vec *)(totals + COLUMNS + c) = second;           \
            *(vec *)(totals + 2 * COLUMNS + c) = third;                                      \
        }                                                                                    \
    }

OF_COLUMNS(double, vec, bits, (long long)LESS_SIGN)
OF_COLUMNS(float, floats, float_bits, 0x7fffffff)
OF_TYPE(double, vec, bits, (long long)LESS_SIGN)
OF_TYPE(float, floats, float_bits, 0x7fffffff)

/* ---- sums as words, of which the first of all sums come first */

static void write_words(const sum_t *s, int64_t *words, size_t apart) {
    words[GRID * apart] = s->grid, words[ODD * apart] = s->odd;
    for (int b = 0; b < BINS; b++) {
        words[(FIRST_BIN + 2 * b) * apart] = (int64_t)(s->bins[b] >> 32);
        words[(FIRST_BIN + 2 * b + 1) * apart] = (int64_t)(s->bins[b] & 0xffffffff);
    }
}

static void read_words(sum_t *s, const int64_t *words, size_t apart) {
    s->grid = words[GRID * apart], s->odd = words[ODD * apart];
    for (int b = 0; b < BINS; b++)
        s->bins[b] = (__int128)words[(FIRST_BIN + 2 * b) * apart] * ((__int128)1 << 32) +
                     words[(FIRST_BIN + 2 * b + 1) * apart];
}

static void add_all(const void *data, int is_float, size_t outer, size_t length, size_t inner,
                    int64_t *words) {
    sum_t sums[COLUMNS];
    size_t m = outer * inner;
    for (size_t o = 0; o < outer; o++)
        for (size_t i = 0; i < inner; i += COLUMNS) {
            int columns = inner - i < COLUMNS ? (int)(inner - i) : COLUMNS;
            memset(sums, 0, sizeof sums);
            for (int c = 0; c < columns; c++) sums[c].grid = LOWEST;
            size_t at = o * length * inner + i;
            if (inner == 1 && is_float)
                add_row_float(sums, (const float *)data + at, length);
            else if (inner == 1)
                add_row_double(sums, (const double *)data + at, length);
            else if (is_float)
                add_rows_float(sums, (const float *)data + at, length, inner, columns);
            else
                add_rows_double(sums, (const double *)data + at, length, inner, columns);
            for (int c = 0; c < columns; c++)
                write_words(sums + c, words + o * inner + i + (size_t)c, m);
        }
}

/* A number of 256 bits, the lowest 64 first. */
typedef struct {
    uint64_t limbs[4];
} wide_t;

static void add_shifted(wide_t *to, __int128 value, int by) {
    wide_t shifted = {{0}};
    for (int i = 0; i < 4; i++) { /* the limb is what is left of the value there */
        int drop = 64 * i - by;
        if (drop > -64 && drop < 0)
            shifted.limbs[i] = (uint64_t)((unsigned __int128)value << -drop);
        else if (drop >= 0)
            shifted.limbs[i] = (uint64_t)(value >> (drop < 127 ? drop : 127));
    }
    unsigned carry = 0;
    for (int i = 0; i < 4; i++) {
        unsigned __int128 sum = (unsigned __int128)to->limbs[i] + shifted.limbs[i] + carry;
        to->limbs[i] = (uint64_t)sum, carry = (unsigned)(sum >> 64);
    }
}

static int is_bit(const wide_t *w, int at) { return w->limbs[at / 64] >> at % 64 & 1; }

/* The nearest number of `digits` bits, whose last one counts at least two to the `least`. */
static double nearest(const sum_t *s, int digits, int least) {
    wide_t w = {{0}};
    for (int b = 0; b < BINS; b++) add_shifted(&w, s->bins[b], WIDTH * (BINS - 1 - b));
    int is_negative = (int)(w.limbs[3] >> 63), unit = WIDTH * (int)(s->grid - BINS + 1), top = 255;
    if (is_negative) { /* its opposite */
        unsigned carry = 1;
        for (int i = 0; i < 4; i++) {
            w.limbs[i] = ~w.limbs[i] + carry;
            carry = carry && !w.limbs[i];
        }
    }
    while (top >= 0 && !is_bit(&w, top)) top--;
    if (top < 0) return 0.0;
    int last = top - digits + 1;
    if (last < least - unit) last = least - unit;
    uint64_t kept = 0;
    for (int at = top; at >= 0 && at >= last; at--) kept = kept << 1 | (uint64_t)is_bit(&w, at);
    if (last > 0) {
        int below = last > top + 1 ? 0 : is_bit(&w, last - 1), rest = 0;
        for (int at = last - 2 < top ? last - 2 : top; at >= 0 && !rest; at--)
            rest = is_bit(&w, at);
        kept += below && (rest || (kept & 1));
    }
    double value = ldexp((double)kept, unit + (last > 0 ? last : 0));
    return is_negative ? -value : value;
}

static double value_of(const sum_t *s, int digits, int least) {
    int above = (s->odd & (ONE_BELOW - 1)) != 0, below = s->odd >= ONE_BELOW;
    if (above || below) return above && below ? NAN : above ? INFINITY : -INFINITY;
    return nearest(s, digits, least);
}

/* ---- for Python */

/* sums_of(data, is_float, outer, length, inner, words): add what stands between outer and inner */
static PyObject *sums_of(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer data, words;
    int is_float;
    Py_ssize_t outer, length, inner;
    if (!PyArg_ParseTuple(args, "y*pnnnw*", &data, &is_float, &outer, &length, &inner, &words))
        return NULL;
    Py_ssize_t item = is_float ? (Py_ssize_t)sizeof(float) : (Py_ssize_t)sizeof(double);
    int fits = outer >= 0 && length >= 0 && inner >= 0 &&
               data.len == outer * length * inner * item &&
               words.len == outer * inner * WORDS * (Py_ssize_t)sizeof(int64_t);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        add_all(data.buf, is_float, (size_t)outer, (size_t)length, (size_t)inner, words.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data), PyBuffer_Release(&words);
    if (fits) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "sums_of: the data or the words have another length");
    return NULL;
}

/* nearest_to(words, digits, least, values): the numbers that are nearest to sums */
static PyObject *nearest_to(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer words, values;
    int digits, least;
    if (!PyArg_ParseTuple(args, "y*iiw*", &words, &digits, &least, &values)) return NULL;
    size_t n = (size_t)values.len / sizeof(double);
    int fits = (size_t)words.len == n * WORDS * sizeof(int64_t);
    for (size_t i = 0; fits && i < n; i++) {
        sum_t s;
        read_words(&s, (const int64_t *)words.buf + i, n);
        ((double *)values.buf)[i] = value_of(&s, digits, least);
    }
    PyBuffer_Release(&words), PyBuffer_Release(&values);
    if (fits) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "nearest_to: not as many words as values");
    return NULL;
}

/* raise_to(words, grids): move the bins of sums to higher grids, in place */
static PyObject *raise_to(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer words, grids;
    if (!PyArg_ParseTuple(args, "w*y*", &words, &grids)) return NULL;
    size_t n = (size_t)grids.len / sizeof(int64_t);
    int fits = (size_t)words.len == n * WORDS * sizeof(int64_t);
    for (size_t i = 0; fits && i < n; i++) {
        sum_t s;
        read_words(&s, (const int64_t *)words.buf + i, n);
        raise_grid(&s, ((const int64_t *)grids.buf)[i]);
        write_words(&s, (int64_t *)words.buf + i, n);
    }
    PyBuffer_Release(&words), PyBuffer_Release(&grids);
    if (fits) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "raise_to: not as many words as grids");
    return NULL;
}

static PyMethodDef FUNCTIONS[] = {
    {"sums_of", sums_of, METH_VARARGS, NULL},
    {"raise_to", raise_to, METH_VARARGS, NULL},
    {"nearest_to", nearest_to, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static const number_t NUMBERS[] = {
    {"WIDTH", WIDTH}, {"BINS", BINS}, {"LOWEST", LOWEST}, {"WORDS", WORDS}};

int add_sums(PyObject *module) {
    return PyModule_AddFunctions(module, FUNCTIONS) < 0
               ? -1
               : add_numbers(module, NUMBERS, sizeof NUMBERS / sizeof *NUMBERS);
}
