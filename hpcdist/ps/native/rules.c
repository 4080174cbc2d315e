/* Rules: how one row changes by its gradient, with the roundings of `hpcdist.optim.rules` */
#include "rows.h"
#include <math.h>

enum { NUMBERS = 8 }; /* of a rule, at most; `accessors.py` has their order */
enum { LANES = 8 };   /* sums that a row's numbers are added up in, as `rules.py` does */
enum { SGD, MOMENTUM, ADAGRAD, ADAM, FTRL, ROWWISE_ADAGRAD }; /* as in `accessors.py` */

/* A gradient for each of some slots. `corrections` are pairs of numbers by the count of steps. */
typedef struct {
    slabs_t rows, state;
    size_t dim, steps;
    const double *numbers, *corrections;
    int rule, counted;
} update_t;

#define RULES(T, SQRT, FABS, COPYSIGN)                                                          \
    typedef struct {                                                                            \
        T *restrict w, *restrict s;                                                             \
        const T *restrict g;                                                                    \
        size_t n;                                                                               \
        const T *x;      /* the numbers of the rule */                                          \
        int first;       /* whether this is the row's first step */                             \
        T epsilon, rate; /* of this step */                                                     \
    } row_##T;                                                                                  \
    CLONES static void sgd_##T(const row_##T *r) {                                              \
        T *restrict w = r->w, rate = r->x[0], decay = r->x[1];                                  \
        const T *restrict g = r->g;                                                             \
        if (decay != 0)                                                                         \
            for (size_t i = 0; i < r->n; i++) w[i] = w[i] - (w[i] * decay + g[i]) * rate;       \
        else                                                                                    \
            for (size_t i = 0; i < r->n; i++) w[i] = w[i] - g[i] * rate;                        \
    }                                                                                           \
    CLONES static void momentum_##T(const row_##T *r) {                                         \
        T *restrict w = r->w, *restrict v = r->s;                                               \
        const T *restrict g = r->g, rate = r->x[0], decay = r->x[1];                            \
        T mu = r->x[2], keep = r->x[3], first = r->first, nesterov = r->x[4];                   \
        for (size_t i = 0; i < r->n; i++) {                                                     \
            T slope = decay != 0 ? w[i] * decay + g[i] : g[i];                                  \
            T speed = first != 0 ? slope : v[i] * mu + slope * keep;                            \
            T step = nesterov != 0 ? slope + speed * mu : speed;                                \
            v[i] = speed;                                                                       \
            w[i] = w[i] - step * rate;                                                          \
        }                                                                                       \
    }                                                                                           \
    CLONES static void adagrad_##T(const row_##T *r) {                                          \
        T *restrict w = r->w, *restrict s = r->s, rate = r->x[0], epsilon = r->x[1];            \
        const T *restrict g = r->g;                                                             \
        for (size_t i = 0; i < r->n; i++) {                                                     \
            T sum = s[i] + g[i] * g[i];                                                         \
            s[i] = sum;                                                                         \
            w[i] = w[i] - g[i] / (SQRT(sum) + epsilon) * rate;                                  \
        }                                                                                       \
    }                                                                                           \
    CLONES static void adam_##T(const row_##T *r) {                                             \
        T *restrict w = r->w, *restrict m = r->s, *restrict v = r->s + r->n;                    \
        const T *restrict g = r->g;                                                             \
        T decay = r->x[1], less1 = r->x[2], beta2 = r->x[3], less2 = r->x[4];                   \
        T shrink = r->x[5], epsilon = r->epsilon, rate = r->rate;                               \
        for (size_t i = 0; i < r->n; i++) {                                                     \
            T weight = shrink != 1 ? w[i] * shrink : w[i];                                      \
            T slope = decay != 0 ? weight * decay + g[i] : g[i];                                \
            T first = m[i] + (slope - m[i]) * less1;                                            \
            T second = v[i] * beta2 + slope * slope * less2;                                    \
            m[i] = first;                                                                       \
            v[i] = second;                                                                      \
            w[i] = weight - first / (SQRT(second) + epsilon) * rate;                            \
        }                                                                                       \
    }                                                                                           \
    CLONES static void ftrl_##T(const row_##T *r) {                                             \
        T *restrict w = r->w, *restrict z = r->s, *restrict s = r->s + r->n;                    \
        const T *restrict g = r->g;                                                             \
        T rate = r->x[0], beta = r->x[1], l1 = r->x[2], l2 = r->x[3];                           \
        for (size_t i = 0; i < r->n; i++) {                                                     \
            T old = SQRT(s[i]), sum = s[i] + g[i] * g[i], root = SQRT(sum);                     \
            T linear = z[i] + g[i] - (root - old) / rate * w[i];                                \
            T size = FABS(linear), least = size > l1 ? l1 : size;                               \
            z[i] = linear;                                                                      \
            s[i] = sum;                                                                         \
            w[i] = (COPYSIGN(least, linear) - linear) / ((root + beta) / rate + l2);            \
        }                                                                                       \
    }                                                                                           \
    CLONES static void rowwise_adagrad_##T(const row_##T *r) {                                  \
        T *restrict w = r->w, rate = r->x[0], epsilon = r->x[1], lanes[LANES] = {0};            \
        const T *restrict g = r->g;                                                             \
        size_t i = 0;                                                                           \
        for (; i + LANES <= r->n; i += LANES)                                                   \
            for (int l = 0; l < LANES; l++) lanes[l] += g[i + l] * g[i + l];                    \
        for (int l = 0; i < r->n; i++, l++) lanes[l] += g[i] * g[i];                            \
        for (int half = LANES / 2; half; half /= 2)                                             \
            for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];                         \
        T sum = r->s[0] + lanes[0] / (T)r->n, scale = SQRT(sum) + epsilon;                      \
        r->s[0] = sum;                                                                          \
        for (i = 0; i < r->n; i++) w[i] = w[i] - g[i] / scale * rate;                           \
    }                                                                                           \
    static void (*const RULES_##T[])(const row_##T *) = {                                       \
        [SGD] = sgd_##T,   [MOMENTUM] = momentum_##T, [ADAGRAD] = adagrad_##T,                  \
        [ADAM] = adam_##T, [FTRL] = ftrl_##T,         [ROWWISE_ADAGRAD] = rowwise_adagrad_##T}; \
    static void update_rows_##T(const update_t *u) {                                            \
        T numbers[NUMBERS];                                                                     \
        for (int i = 0; i < NUMBERS; i++) numbers[i] = (T)u->numbers[i];                        \
        row_##T row = {.n = u->dim, .x = numbers};                                              \
        for (size_t i = 0; i < u->rows.n; i++) {                                                \
            int64_t ahead = i + AHEAD < u->rows.n ? u->rows.slots[i + AHEAD] : -1;              \
            if (ahead >= 0) {                                                                   \
                prefetch_row(row_at(&u->rows, ahead), u->rows.row);                             \
                if (u->state.row) prefetch_row(row_at(&u->state, ahead), u->state.row);         \
            }                                                                                   \
            int64_t slot = u->rows.slots[i];                                                    \
            if (slot < 0) continue;                                                             \
            row.w = (T *)row_at(&u->rows, slot);                                                \
            row.s = u->state.row ? (T *)row_at(&u->state, slot) : NULL;                         \
            row.g = (const T *)u->rows.rows + i * u->dim;                                       \
            if (u->counted) {                                                                   \
                T *count = row.s + u->state.row / sizeof(T) - 1;                                \
                *count += 1;                                                                    \
                int known = *count >= 0 && *count < (T)u->steps;                                \
                size_t step = known ? (size_t)*count : u->steps - 1;                            \
                row.first = *count == 1;                                                        \
                row.epsilon = (T)(u->numbers[6] * u->corrections[2 * step]);                    \
                row.rate = (T)(u->numbers[0] * u->corrections[2 * step + 1]);                   \
            }                                                                                   \
            RULES_##T[u->rule](&row);                                                           \
        }                                                                                       \
    }                                                                                           \
    static double most_steps_##T(const update_t *u) {                                           \
        T most = 0;                                                                             \
        for (size_t i = 0; i < u->rows.n; i++) {                                                \
            if (u->rows.slots[i] < 0) continue;                                                 \
            T count = ((T *)row_at(&u->state, u->rows.slots[i]))[u->state.row / sizeof(T) - 1]; \
            if (count > most) most = count;                                                     \
        }                                                                                       \
        return (double)most + 1;                                                                \
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
        PyErr_SetString(PyExc_TypeError,
                        "update_rows(item, rule, grads, slots, rows, state, shift, "
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
    u.rows =
        (slabs_t){views[0].buf, views[2].buf, views[1].buf, words_in(&views[1]), u.dim * item, 0};
    u.state = (slabs_t){NULL, views[3].buf, views[1].buf, u.rows.n, width * item, 0};
    u.numbers = views[4].buf, u.corrections = views[5].buf;
    u.steps = (size_t)views[5].len / sizeof(double) / 2;
    u.counted = u.steps > 0;
    u.rule = (int)rule;
    const size_t kept[] = {
        [MOMENTUM] = 1, [ADAGRAD] = 1, [ADAM] = 2, [FTRL] = 2, [ROWWISE_ADAGRAD] = 0};
    size_t slabs = words_in(&views[2]);
    if ((item != sizeof(float) && item != sizeof(double)) || rule < 0 || rule >= N_RULES ||
        u.dim == 0 || u.dim > SIZE_MAX >> 8 || width > SIZE_MAX >> 8 ||
        width < kept[rule] * u.dim + (size_t)u.counted + (rule == ROWWISE_ADAGRAD) ||
        ((rule == MOMENTUM || rule == ADAM) && !u.counted) ||
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

static const number_t NUMBERS_HERE[] = {
    {"NUMBERS", NUMBERS},   {"LANES", LANES},     {"SGD", SGD},
    {"MOMENTUM", MOMENTUM}, {"ADAGRAD", ADAGRAD}, {"ADAM", ADAM},
    {"ADAMW", ADAM},        {"FTRL", FTRL},       {"ROWWISE_ADAGRAD", ROWWISE_ADAGRAD},
};

static PyMethodDef FUNCTIONS[] = {
    FAST("update_rows", py_update_rows),
    {NULL, NULL, 0, NULL},
};

int add_rules(PyObject *module) {
    if (PyModule_AddFunctions(module, FUNCTIONS) < 0) return -1;
    return add_numbers(module, NUMBERS_HERE, sizeof NUMBERS_HERE / sizeof *NUMBERS_HERE);
}
