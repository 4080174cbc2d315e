/* Copies and fills, checked against what is allocated.
 *
 * As with CUDA, a copy from memory of the host that is not page-locked has read it when the call
 * returns, and one to such memory has ended then. All others only begin.
 */
#define _GNU_SOURCE
#include "driver.h"
#include <stdlib.h>
#include <string.h>

/* Rows of bytes at equal distances. */
typedef struct {
    char *at;
    size_t pitch;
} rows_t;

typedef struct {
    rows_t to, from;
    size_t width, height;
    char snapshot[]; /* of what is read at once */
} copy_t;

/* What the caller says a pointer is; any kind if it does not say. */
typedef enum { ANY, ON_DEVICE, ON_HOST } side_t;

static void run_copy(void *arg) {
    const copy_t *copy = arg;
    char *to = emulated_view(copy->to.at);
    const char *from = emulated_view(copy->from.at);
    for (size_t row = 0; row < copy->height; row++)
        memmove(to + row * copy->to.pitch, from + row * copy->from.pitch, copy->width);
}

static bool fits(const char *at, size_t size, range_t range, side_t side) {
    if (range.kind == UNKNOWN) return side != ON_DEVICE && !is_device_address((uintptr_t)at);
    if (side == ON_HOST && range.kind == DEVICE) return false;
    return (uintptr_t)at + size <= range.base + range.size;
}

static CUresult copy(rows_t to, side_t to_side, rows_t from, side_t from_side, size_t width,
                     size_t height, CUstream stream, bool wait) {
    if (!width || !height) return CUDA_SUCCESS;
    size_t to_size = to.pitch * (height - 1) + width, from_size = from.pitch * (height - 1) + width;
    range_t into = range_of(to.at), out_of = range_of(from.at);
    if (!fits(to.at, to_size, into, to_side) || !fits(from.at, from_size, out_of, from_side)) {
        emulated_say("a copy of %zu bytes from %p to %p leaves what is allocated, or is no memory "
                     "of the kind that was said",
                     width * height, (void *)from.at, (void *)to.at);
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool at_once = !wait && out_of.kind == UNKNOWN;
    copy_t *made = malloc(sizeof *made + (at_once ? from_size : 0));
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (copy_t){to, from, width, height};
    if (at_once) made->from.at = memcpy(made->snapshot, from.at, from_size);
    CUresult result = put(stream, (work_t){run_copy, free, made});
    if (result || !(wait || into.kind == UNKNOWN)) return result;
    return finish(stream);
}

static CUresult line(CUdeviceptr to, side_t to_side, CUdeviceptr from, side_t from_side,
                     size_t size, CUstream stream, bool wait) {
    return copy((rows_t){(char *)to, 0}, to_side, (rows_t){(char *)from, 0}, from_side, size, 1,
                stream, wait);
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return line(to, ANY, from, ANY, size, NULL, true);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    return line(to, ANY, from, ANY, size, stream, false);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    return line(to, ON_DEVICE, (CUdeviceptr)from, ON_HOST, size, NULL, true);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size,
                                     CUstream stream) {
    return line(to, ON_DEVICE, (CUdeviceptr)from, ON_HOST, size, stream, false);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    return line((CUdeviceptr)to, ON_HOST, from, ON_DEVICE, size, NULL, true);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    return line((CUdeviceptr)to, ON_HOST, from, ON_DEVICE, size, stream, false);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    return line(to, ON_DEVICE, from, ON_DEVICE, size, NULL, false);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size,
                                     CUstream stream) {
    return line(to, ON_DEVICE, from, ON_DEVICE, size, stream, false);
}

/* All memory has one range of addresses, so the kinds that are named need not be looked at. */
static CUresult copy_2d(const CUDA_MEMCPY2D *p, CUstream stream, bool wait) {
    if (p->srcMemoryType == CU_MEMORYTYPE_ARRAY || p->dstMemoryType == CU_MEMORYTYPE_ARRAY)
        return emulated_missing("cuMemcpy2D of arrays");
    rows_t to = {(char *)p->dstDevice, p->dstPitch}, from = {(char *)p->srcDevice, p->srcPitch};
    if (p->dstMemoryType == CU_MEMORYTYPE_HOST) to.at = p->dstHost;
    if (p->srcMemoryType == CU_MEMORYTYPE_HOST) from.at = (char *)p->srcHost;
    to.at += p->dstY * p->dstPitch + p->dstXInBytes;
    from.at += p->srcY * p->srcPitch + p->srcXInBytes;
    return copy(to, ANY, from, ANY, p->WidthInBytes, p->Height, stream, wait);
}

EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *p) { return copy_2d(p, NULL, true); }

EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *p, CUstream stream) {
    return copy_2d(p, stream, false);
}

/* ---- fills */

typedef struct {
    char *at;
    int value;
    size_t size;
} fill_t;

static void run_fill(void *arg) {
    const fill_t *fill = arg;
    memset(emulated_view(fill->at), fill->value, fill->size);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
    if (!size) return CUDA_SUCCESS;
    fill_t fill = {(char *)to, value, size};
    if (!fits(fill.at, size, range_of(fill.at), ON_DEVICE)) return CUDA_ERROR_INVALID_VALUE;
    return put_copy(stream, run_fill, &fill, sizeof fill);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size) {
    return cuMemsetD8Async(to, value, size, NULL);
}
