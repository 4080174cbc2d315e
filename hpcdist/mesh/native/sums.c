/* Sums without an order; `mesh/sums.py` says what they are.
 *
 * A number is cut at fixed places, multiples of WIDTH bits, into slices, of which the sum keeps the
 * highest BINS, counted from the largest number. A slice is by how much an accumulator grows whose last
 * bit counts one of the bin: exact, and the same whatever was added before. Slices of one bin are added
 * there, in doubles, which is exact for a BLOCK of numbers, and then as integers.
 */
#include "native.h"

enum { WIDTH = 40, BINS = 3, LOWEST = -25, BLOCK = 4096, FEW = 64, COLUMNS = 32, ROWS = 256 };
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

static void add_sum(sum_t *s, sum_t *other) {
    if (other->grid > s->grid) raise_grid(s, other->grid);
    raise_grid(other, s->grid);
    s->odd += other->odd;
    for (int b = 0; b < BINS; b++) s->bins[b] += other->bins[b];
}

/* Add the exact totals of slices, in doubles, of `n` lanes that are `apart`; those of a BLOCK are exact
 * together, too. */
static void add_totals(sum_t *s, int64_t grid, const double *totals, int n, int apart) {
    if (grid > s->grid) raise_grid(s, grid);
    for (int64_t b = 0, at = s->grid - grid; at < BINS; b++, at++) {
        double total = 0;
        for (int lane = 0; lane < n; lane++) total += totals[b * apart + lane];
        s->bins[at] += (int64_t)(total * COUNTED[b]);
    }
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

/* Add numbers to the accumulators of three bins, each of which takes what the one before it has left.
 * The last bit of what is added is set, so that it never is in the middle between two multiples. */
#define ODD(X) ((vec)((bits)(X) | 1))
#define SLICE(X, FIRST, SECOND, THIRD)          \
    do {                                        \
        vec before = FIRST;                     \
        FIRST += ODD(X), X -= FIRST - before;   \
        before = SECOND;                        \
        SECOND += ODD(X), X -= SECOND - before; \
        THIRD += ODD(X);                        \
    } while (0)
#define LARGER(MOST, X)                 \
    do {                                \
        __typeof__(MOST) is = X > MOST; \
        MOST = (X & is) | (MOST & ~is); \
    } while (0)
#define ALL(X) {X, X, X, X, X, X, X, X}
static const vec STARTS[BINS] = {ALL(0x1.8p52), ALL(0x1.8p12), ALL(0x1.8p-28)};

/* ---- numbers that all belong to one sum: `largest_of` and `slice` take a multiple of LANES */

#define OF_TYPE(T, VEC, BITS, SIGNLESS)                                                            \
    static uint64_t largest_lane_##T(BITS most) { /* as bits, among which NaN is the largest */    \
        vec wide = __builtin_convertvector((VEC)most, vec);                                        \
        uint64_t largest = 0;                                                                      \
        for (int lane = 0; lane < LANES; lane++) {                                                 \
            uint64_t found = (uint64_t)((bits)wide)[lane] & LESS_SIGN;                             \
            if (found > largest) largest = found;                                                  \
        }                                                                                          \
        return largest;                                                                            \
    }                                                                                              \
    WIDE_CLONES static uint64_t largest_of_##T(const T *numbers, size_t n) {                       \
        BITS most = {0};                                                                           \
        for (size_t i = 0; i < n; i += LANES) {                                                    \
            BITS x = *(const BITS *)(numbers + i) & SIGNLESS;                                      \
            LARGER(most, x);                                                                       \
        }                                                                                          \
        return largest_lane_##T(most);                                                             \
    }                                                                                              \
    /* Return the largest number as well: the slices are right if it is not too large for them. */ \
    WIDE_CLONES static uint64_t slice_##T(const T *numbers, size_t n, double scale,                \
                                          double *totals) {                                        \
        vec a = STARTS[0], b = STARTS[1], c = STARTS[2], d = a, e = b, f = c;                      \
        BITS most = {0}, next = {0};                                                               \
        size_t i = 0;                                                                              \
        for (; i + 2 * LANES <= n; i += 2 * LANES) {                                               \
            const VEC *from = (const VEC *)(numbers + i);                                          \
            vec x = __builtin_convertvector(from[0], vec) * scale;                                 \
            vec y = __builtin_convertvector(from[1], vec) * scale;                                 \
            BITS p = (BITS)from[0] & SIGNLESS, q = (BITS)from[1] & SIGNLESS;                       \
            LARGER(most, p);                                                                       \
            LARGER(next, q);                                                                       \
            SLICE(x, a, b, c);                                                                     \
            SLICE(y, d, e, f);                                                                     \
        }                                                                                          \
        for (; i < n; i += LANES) {                                                                \
            VEC from = *(const VEC *)(numbers + i);                                                \
            vec x = __builtin_convertvector(from, vec) * scale;                                    \
            BITS p = (BITS)from & SIGNLESS;                                                        \
            LARGER(most, p);                                                                       \
            SLICE(x, a, b, c);                                                                     \
        }                                                                                          \
        LARGER(most, next);                                                                        \
        *(vec *)totals = (a - STARTS[0]) + (d - STARTS[0]);                                        \
        *(vec *)(totals + LANES) = (b - STARTS[1]) + (e - STARTS[1]);                              \
        *(vec *)(totals + 2 * LANES) = (c - STARTS[2]) + (f - STARTS[2]);                          \
        return largest_lane_##T(most);                                                             \
    }                                                                                              \
    /* Add at most a BLOCK of numbers; 0: there are infinities or NaN among them. */               \
    static int add_block_##T(sum_t *s, const T *numbers, size_t n) {                               \
        double totals[BINS * LANES];                                                               \
        int64_t grid = s->grid;                                                                    \
        uint64_t largest = grid == LOWEST ? largest_of_##T(numbers, n < FEW ? n : FEW) : 0;        \
        do {                                                                                       \
            if (largest >= INFINITE) return 0;                                                     \
            if (largest && grid_of(largest) > grid) grid = grid_of(largest);                       \
            largest = slice_##T(numbers, n, power_of_two((int)-grid * WIDTH), totals);             \
        } while (largest >= INFINITE || grid_of(largest) > grid);                                  \
        add_totals(s, grid, totals, LANES, LANES);                                                 \
        return 1;                                                                                  \
    }                                                                                              \
    static void add_row_##T(sum_t *s, const T *numbers, size_t n) {                                \
        double block[BLOCK];                                                                       \
        for (size_t at = 0, part; at < n; at += part) {                                            \
            part = n - at < BLOCK ? n - at : BLOCK;                                                \
            if (part > LANES) part -= part % LANES; /* and the rest after it */                    \
            if (part % LANES == 0 && add_block_##T(s, numbers + at, part)) continue;               \
            size_t end = (part + LANES - 1) / LANES * LANES;                                       \
            for (size_t i = 0; i < end; i++) block[i] = i < part ? (double)numbers[at + i] : 0;    \
            if (add_block_double(s, block, end)) continue;                                         \
            take_odd(s, block, part, 1);                                                           \
            add_block_double(s, block, end);                                                       \
        }                                                                                          \
    }                                                                                              \
    /* Add the columns of `rows` rows that are `apart`; 0: not all of them are finite. */          \
    static int add_columns_##T(sum_t *sums, const T *numbers, int rows, size_t apart) {            \
        double scales[COLUMNS], totals[BINS * COLUMNS];                                            \
        T together[ROWS * COLUMNS];                                                                \
        int64_t grids[COLUMNS];                                                                    \
        uint64_t largest[COLUMNS], all = 0;                                                        \
        largest_of_columns_##T(numbers, rows, apart, largest, together);                           \
        for (int c = 0; c < COLUMNS; c++) {                                                        \
            if (largest[c] >= INFINITE) return 0;                                                  \
            all |= largest[c], grids[c] = grid_of(largest[c]);                                     \
            scales[c] = power_of_two((int)-grids[c] * WIDTH);                                      \
        }                                                                                          \
        if (all) slice_columns_##T(together, rows, scales, totals);                                \
        for (int c = 0; c < COLUMNS; c++)                                                          \
            if (largest[c]) add_totals(sums + c, grids[c], totals + c, 1, COLUMNS);                \
        return 1;                                                                                  \
    }                                                                                              \
    static void add_rows_##T(sum_t *sums, const T *numbers, size_t length, size_t inner,           \
                             int columns) {                                                        \
        double block[ROWS * COLUMNS];                                                              \
        for (size_t at = 0; at < length; at += ROWS) {                                             \
            int rows = length - at < ROWS ? (int)(length - at) : ROWS;                             \
            const T *from = numbers + at * inner;                                                  \
            if (columns == COLUMNS && add_columns_##T(sums, from, rows, inner)) continue;          \
            for (int r = 0; r < rows; r++)                                                         \
                for (int c = 0; c < COLUMNS; c++)                                                  \
                    block[r * COLUMNS + c] =                                                       \
                        c < columns ? (double)from[(size_t)r * inner + (size_t)c] : 0;             \
            if (add_columns_double(sums, block, rows, COLUMNS)) continue;                          \
            for (int c = 0; c < columns; c++)                                                      \
                take_odd(sums + c, block + c, (size_t)rows, COLUMNS);                              \
            add_columns_double(sums, block, rows, COLUMNS);                                        \
        }                                                                                          \
    }

/* ---- numbers that stand in rows, whose columns are added: copied `together`, as rows are far apart */

#define OF_COLUMNS(T, VEC, BITS, SIGNLESS)                                                      \
    WIDE_CLONES static void largest_of_columns_##T(const T *numbers, int rows, size_t apart,    \
                                                   uint64_t *largest, T *together) {            \
        BITS most[COLUMNS / LANES] = {{0}};                                                     \
        for (int r = 0; r < rows; r++)                                                          \
            for (int v = 0; v < COLUMNS / LANES; v++) {                                         \
                BITS x = *(const BITS *)(numbers + (size_t)r * apart + v * LANES);              \
                *(BITS *)(together + (size_t)r * COLUMNS + v * LANES) = x;                      \
                x &= SIGNLESS;                                                                  \
                LARGER(most[v], x);                                                             \
            }                                                                                   \
        for (int v = 0; v < COLUMNS / LANES; v++)                                               \
            *(vec *)(largest + v * LANES) = __builtin_convertvector((VEC)most[v], vec);         \
    }                                                                                           \
    WIDE_CLONES static void slice_columns_##T(const T *numbers, int rows, const double *scales, \
                                              double *totals) {                                 \
        for (int v = 0; v < COLUMNS; v += 2 * LANES) {                                          \
            vec scale = *(const vec *)(scales + v), other = *(const vec *)(scales + v + LANES); \
            vec a = STARTS[0], b = STARTS[1], c = STARTS[2], d = a, e = b, f = c;               \
            for (int r = 0; r < rows; r++) {                                                    \
                const T *from = numbers + (size_t)r * COLUMNS + v;                              \
                vec x = __builtin_convertvector(*(const VEC *)from, vec) * scale;               \
                vec y = __builtin_convertvector(*(const VEC *)(from + LANES), vec) * other;     \
                SLICE(x, a, b, c);                                                              \
                SLICE(y, d, e, f);                                                              \
            }                                                                                   \
            *(vec *)(totals + v) = a - STARTS[0];                                               \
            *(vec *)(totals + v + LANES) = d - STARTS[0];                                       \
            *(vec *)(totals + COLUMNS + v) = b - STARTS[1];                                     \
            *(vec *)(totals + COLUMNS + v + LANES) = e - STARTS[1];                             \
            *(vec *)(totals + 2 * COLUMNS + v) = c - STARTS[2];                                 \
            *(vec *)(totals + 2 * COLUMNS + v + LANES) = f - STARTS[2];                         \
        }                                                                                       \
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
            memset(sums, 0, sizeof *sums * (size_t)columns);
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

/* Bring all bins but the highest between 0 and two to the WIDTH. */
static void carry_over(__int128 *bins) {
    for (int b = BINS; --b > 0;) {
        bins[b - 1] += bins[b] >> WIDTH;
        bins[b] &= ((__int128)1 << WIDTH) - 1;
    }
}

static int bits_of(unsigned __int128 size) {
    uint64_t high = (uint64_t)(size >> 64), low = (uint64_t)size;
    return high ? 128 - __builtin_clzll(high) : low ? 64 - __builtin_clzll(low) : 0;
}

/* The nearest number of `digits` bits, whose last one counts at least two to the `least`. */
static double nearest(const sum_t *s, int digits, int least) {
    __int128 bins[BINS];
    memcpy(bins, s->bins, sizeof bins);
    carry_over(bins);
    int is_negative = bins[0] < 0, unit = WIDTH * (int)(s->grid - BINS + 1);
    if (is_negative) { /* its opposite */
        for (int b = 0; b < BINS; b++) bins[b] = -bins[b];
        carry_over(bins);
    }
    unsigned __int128 size = (unsigned __int128)(bins[0] << WIDTH | bins[1]);
    if (bins[0] >>
        (127 - 2 * WIDTH)) /* the lowest bin is too low to count, but for a trace of it */
        size |= bins[2] != 0, unit += WIDTH;
    else
        size = size << WIDTH | (unsigned __int128)bins[2];
    int top = bits_of(size), last = top - digits;
    if (last < least - unit) last = least - unit;
    if (last > top) size = 0;
    if (last > 0 && size) {
        unsigned __int128 half = (unsigned __int128)1 << (last - 1), rest = size & (2 * half - 1);
        size >>= last, unit += last;
        size += rest > half || (rest == half && (size & 1));
    }
    double value = ldexp((double)(uint64_t)size, size ? unit : 0);
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

/* Words of as many sums as there are items, as often as there are ranks. */
typedef struct {
    Py_buffer words, items;
    size_t sums, ranks;
} tables_t;

static int close_tables(tables_t *t) {
    PyBuffer_Release(&t->words), PyBuffer_Release(&t->items);
    return -1;
}

/* Count sums by their items of 8 bytes; -1: an error is set, and the buffers are closed. */
static int count_sums(tables_t *t) {
    t->sums = (size_t)t->items.len / 8;
    size_t table = t->sums * WORDS * sizeof(int64_t);
    t->ranks = table ? (size_t)t->words.len / table : 1;
    if (t->ranks && (size_t)t->words.len == t->ranks * table) return 0;
    PyErr_SetString(PyExc_ValueError, "there are not as many words as sums");
    return close_tables(t);
}

/* nearest_to(words, digits, least, values): the numbers that are nearest to the sums of all ranks */
static PyObject *nearest_to(PyObject *self, PyObject *args) {
    (void)self;
    tables_t t;
    int digits, least;
    if (!PyArg_ParseTuple(args, "y*iiw*", &t.words, &digits, &least, &t.items)) return NULL;
    if (count_sums(&t)) return NULL;
    for (size_t i = 0; i < t.sums; i++) {
        sum_t s, other;
        const int64_t *words = (const int64_t *)t.words.buf + i;
        read_words(&s, words, t.sums);
        for (size_t r = 1; r < t.ranks; r++) {
            read_words(&other, words + r * t.sums * WORDS, t.sums);
            add_sum(&s, &other);
        }
        ((double *)t.items.buf)[i] = value_of(&s, digits, least);
    }
    close_tables(&t);
    Py_RETURN_NONE;
}

/* raise_to(words, grids): move the bins of sums to higher grids, in place */
static PyObject *raise_to(PyObject *self, PyObject *args) {
    (void)self;
    tables_t t;
    if (!PyArg_ParseTuple(args, "w*y*", &t.words, &t.items)) return NULL;
    if (count_sums(&t)) return NULL;
    for (size_t i = 0; i < t.sums; i++) {
        sum_t s;
        read_words(&s, (const int64_t *)t.words.buf + i, t.sums);
        raise_grid(&s, ((const int64_t *)t.items.buf)[i]);
        write_words(&s, (int64_t *)t.words.buf + i, t.sums);
    }
    close_tables(&t);
    Py_RETURN_NONE;
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
