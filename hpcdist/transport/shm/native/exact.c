/* Exact sums of a few numbers each. A sum of two doubles, and what rounding took from it, are exactly
 * what was added (Knuth, The Art of Computer Programming 2, 4.2.2). So the sum of numbers is a total
 * and a rest, of which both are doubles, as long as the additions to the rest are exact. The few
 * elements of which they are not are added as integers that have a bit for every power of two.
 */
#include "exact.h"
#include <math.h>

enum { BLOCK = 128 };   /* elements at a time */
enum { LIMBS = 70 };    /* of 32 bits: 2098 of a double, and as many as there are numbers to add */
enum { LOWEST = 1074 }; /* the first bit counts two to the minus so many */

/* Add a double to each of the totals; what is lost is not 0 where the rest is not exact. A sum is the
 * total less the rest: a rest of 0 takes the sign from no -0.0. */
CLONES static void add_doubles(double *totals, double *rests, double *lost, const double *x,
                               size_t n) {
    for (size_t i = 0; i < n; i++) {
        double a = totals[i], b = x[i], sum = a + b, from = sum - a;
        double slip = ((sum - from) - a) + (from - b);
        totals[i] = sum;
        a = rests[i], sum = a + slip, from = sum - a;
        rests[i] = sum;
        lost[i] += fabs((a - (sum - from)) + (slip - from));
    }
}

/* Write the nearest doubles to totals. */
CLONES static void to_nearest(double *totals, const double *rests, size_t n) {
    for (size_t i = 0; i < n; i++) totals[i] = totals[i] - rests[i];
}

/* Write to totals of the two doubles around a sum the one whose last bit is set, if the sum is neither:
 * it is rounded to fewer bits as the sum would be. */
CLONES static void to_odd(double *totals, const double *rests, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double sum = totals[i] - rests[i], from = sum - totals[i];
        double slip = (totals[i] - (sum - from)) - (rests[i] + from);
        int64_t bits, away = 1 - 2 * (int64_t)((slip > 0) != (sum > 0));
        memcpy(&bits, &sum, sizeof bits);
        bits += away & -(int64_t)((slip != 0) & !(bits & 1));
        memcpy(totals + i, &bits, sizeof bits);
    }
}

CLONES static int is_any(const double *lost, size_t n) {
    int64_t any = 0;
    for (size_t i = 0; i < n; i++) any |= !(lost[i] == 0);
    return any != 0;
}

static void add_bits(int64_t *limbs, double x) {
    int exponent;
    int64_t digits = (int64_t)ldexp(frexp(fabs(x), &exponent), 53);
    int at = exponent - 53 + LOWEST; /* of the last digit */
    if (at < 0) digits >>= -at, at = 0;
    unsigned __int128 spread = (unsigned __int128)digits << at % 32;
    for (int i = at / 32; spread; i++, spread >>= 32) {
        int64_t limb = (int64_t)(spread & 0xffffffff);
        limbs[i] += x < 0 ? -limb : limb;
    }
}

/* The number whose digits are limbs; they are changed. */
static double number_of(int64_t *limbs, int to_double) {
    for (int i = 0; i + 1 < LIMBS; i++) limbs[i + 1] += limbs[i] >> 32, limbs[i] &= 0xffffffff;
    int is_negative = limbs[LIMBS - 1] < 0, top = LIMBS - 1;
    if (is_negative) { /* the opposite */
        for (int i = 0; i < LIMBS; i++) limbs[i] = -limbs[i];
        for (int i = 0; i + 1 < LIMBS; i++) limbs[i + 1] += limbs[i] >> 32, limbs[i] &= 0xffffffff;
    }
    while (top > 2 && !limbs[top]) top--;
    /* The three highest, of which what is below counts only by not being 0. */
    unsigned __int128 digits = (unsigned __int128)limbs[top] << 64 |
                               (unsigned __int128)limbs[top - 1] << 32 |
                               (unsigned __int128)limbs[top - 2];
    for (int i = 0; i < top - 2; i++) digits |= limbs[i] != 0;
    int exponent = 32 * (top - 2) - LOWEST, drop = 0;
    while (digits >> drop > 0x1fffffffffffffull) drop++;
    uint64_t kept = (uint64_t)(digits >> drop);
    unsigned __int128 rest = digits - ((unsigned __int128)kept << drop);
    if (rest && to_double) {
        unsigned __int128 half = (unsigned __int128)1 << (drop - 1);
        kept += rest > half || (rest == half && (kept & 1));
    } else if (rest) {
        kept |= 1;
    }
    double value = ldexp((double)kept, exponent + drop);
    return is_negative ? -value : value;
}

/* The sum of element `at` of all sources, whatever they are. */
static double sum_of_bits(const job_t *job, size_t at, int to_double) {
    int64_t limbs[LIMBS] = {0};
    int above = 0, below = 0;
    for (int s = 0; s < job->n_sources; s++) {
        double x;
        job->kernel->load(&x, (const void *)(job->sources[s] + at * job->kernel->item), 1);
        if (x - x == 0)
            add_bits(limbs, x);
        else
            above |= !(x < 0), below |= !(x > 0);
    }
    if (above || below) return above && below ? NAN : above ? INFINITY : -INFINITY;
    return number_of(limbs, to_double);
}

static void add_block(const job_t *job, size_t at, size_t n) {
    double totals[BLOCK], rests[BLOCK] = {0}, lost[BLOCK], x[BLOCK];
    const kernel_t *k = job->kernel;
    int to_double = k->item == sizeof(double);
    size_t start = at * k->item;
    k->load(totals, (const void *)(job->sources[0] + start), n);
    for (size_t i = 0; i < n; i++) lost[i] = totals[i] - totals[i]; /* NaN of an infinity */
    for (int s = 1; s < job->n_sources; s++) {
        k->load(x, (const void *)(job->sources[s] + start), n);
        add_doubles(totals, rests, lost, x, n);
    }
    if (to_double || is_any(rests, n)) (to_double ? to_nearest : to_odd)(totals, rests, n);
    if (is_any(lost, n))
        for (size_t i = 0; i < n; i++)
            if (!(lost[i] == 0)) totals[i] = sum_of_bits(job, at + i, to_double);
    for (int o = 0; o < job->n_outs; o++) k->store((void *)(job->outs[o] + start), totals, n, 1.0);
}

void add_exactly(const job_t *job, size_t at, size_t end) {
    for (; at < end; at += BLOCK) add_block(job, at, end - at < BLOCK ? end - at : BLOCK);
}
