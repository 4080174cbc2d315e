/* As much of cuBLAS as CuPy needs to load it, and the product of two matrices, slowly. */
#define _GNU_SOURCE
#include "../seam.h"
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_64F = 1, R_16F = 2, COMPUTE_64F = 70 };

typedef struct {
    CUstream stream;
    int pointers, math;
} handle_t;

EXPORT int cublasCreate_v2(handle_t **made) {
    *made = calloc(1, sizeof **made);
    return *made ? SUCCESS : NOT_SUPPORTED;
}

EXPORT int cublasDestroy_v2(handle_t *handle) {
    free(handle);
    return SUCCESS;
}

EXPORT int cublasGetVersion_v2(handle_t *handle, int *version) {
    (void)handle;
    *version = CUDA_VERSION * 10;
    return SUCCESS;
}

/* A setting of the handle: cublasGetX and cublasSetX. */
#define SETTING(name, type, field)                              \
    EXPORT int cublasSet##name(handle_t *handle, type value) {  \
        handle->field = value;                                  \
        return SUCCESS;                                         \
    }                                                           \
    EXPORT int cublasGet##name(handle_t *handle, type *value) { \
        *value = handle->field;                                 \
        return SUCCESS;                                         \
    }
SETTING(Stream_v2, CUstream, stream)
SETTING(PointerMode_v2, int, pointers)
SETTING(MathMode, int, math)

/* ---- c = alpha * a @ b + beta * c, each matrix by columns, and transposed where it says so */

typedef struct {
    void *at;
    int transposed;
    long leading;
} matrix_t;

typedef struct {
    matrix_t a, b, c;
    int m, n, k, type;
    double alpha, beta;
} product_t;

static char *element(const matrix_t *matrix, long i, long j, int type) {
    static const size_t widths[] = {[R_32F] = 4, [R_64F] = 8, [R_16F] = 2};
    long at = matrix->transposed ? j + i * matrix->leading : i + j * matrix->leading;
    return (char *)emulated_view(matrix->at) + (size_t)at * widths[type];
}

static double get(const matrix_t *matrix, long i, long j, int type) {
    const char *at = element(matrix, i, j, type);
    return type == R_32F   ? *(const float *)at
           : type == R_64F ? *(const double *)at
                           : (double)*(const _Float16 *)at;
}

static void set(const matrix_t *matrix, long i, long j, int type, double value) {
    char *at = element(matrix, i, j, type);
    if (type == R_32F)
        *(float *)at = (float)value;
    else if (type == R_64F)
        *(double *)at = value;
    else
        *(_Float16 *)at = (_Float16)value;
}

static void multiply(void *arg) {
    const product_t *p = arg;
    for (long j = 0; j < p->n; j++)
        for (long i = 0; i < p->m; i++) {
            double sum = 0;
            for (long l = 0; l < p->k; l++)
                sum += get(&p->a, i, l, p->type) * get(&p->b, l, j, p->type);
            sum *= p->alpha;
            if (p->beta != 0) sum += p->beta * get(&p->c, i, j, p->type);
            set(&p->c, i, j, p->type, sum);
        }
}

EXPORT int cublasGemmEx(handle_t *handle, int a_transposed, int b_transposed, int m, int n, int k,
                        const void *alpha, const void *a, int a_type, int a_leading, const void *b,
                        int b_type, int b_leading, const void *beta, void *c, int c_type,
                        int c_leading, int compute, int algorithm) {
    (void)algorithm;
    if (a_type != b_type || b_type != c_type || a_type < R_32F || a_type > R_16F ||
        handle->pointers) {
        emulated_say("cublasGemmEx of these types is not emulated");
        return NOT_SUPPORTED;
    }
    product_t *made = malloc(sizeof *made); /* stays: it may become part of a graph */
    if (!made) return NOT_SUPPORTED;
    int wide = compute == COMPUTE_64F;
    *made = (product_t){{(void *)a, a_transposed, a_leading},
                        {(void *)b, b_transposed, b_leading},
                        {c, 0, c_leading},
                        m,
                        n,
                        k,
                        a_type,
                        wide ? *(const double *)alpha : *(const float *)alpha,
                        wide ? *(const double *)beta : *(const float *)beta};
    return cuLaunchHostFunc(handle->stream, multiply, made) ? INVALID_VALUE : SUCCESS;
}
