/* Elements of the dtypes that are reduced: how they are loaded into an accumulator, combined and
 * stored. 16-bit floats are accumulated in float32. */
#ifndef HPCDIST_ELEMENTS_H
#define HPCDIST_ELEMENTS_H
#include "../../../native/compiled.h"

typedef void (*load_t)(void *acc, const void *src, size_t n);
typedef void (*fold_t)(void *acc, const void *src, size_t n);
typedef void (*store_t)(void *dst, void *acc, size_t n, double divisor);
typedef size_t (*fused_t)(const uintptr_t *, int, const uintptr_t *, int, size_t, size_t, double);

typedef struct {
    const char *name;
    size_t item; /* bytes of an element */
    load_t load;
    fold_t fold; /* NULL: `exact.c` accumulates, in doubles */
    store_t store;
    fused_t fused; /* or NULL */
} kernel_t;

/* By their numbers; what uses them is in `combine.h`. */
extern const kernel_t KERNELS[];
extern const int N_KERNELS;

/* Whether this processor converts float16; where it does not, there are no loops for it. */
int have_half(void);

#endif
