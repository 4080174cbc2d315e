/* What the handler needs of XLA's interface for foreign functions (FFI), which is plain C and whose
 * header, `xla/ffi/api/c_api.h`, comes with jaxlib. hpcdist is compiled where no JAX is, so the
 * few structs are declared here. All begin with their size as XLA knows it: `FITS` compares. */
#ifndef HPCDIST_XLA_H
#define HPCDIST_XLA_H
#include <stddef.h>
#include <stdint.h>

enum { XLA_MAJOR = 0 };     /* the version whose structs these are; a minor one only adds fields */
enum { XLA_METADATA = 1 };  /* of an extension */
enum { XLA_INTERNAL = 13 }; /* of an error */
enum { XLA_TOKEN = 17 };    /* dtype of a buffer without content, which stands for an order */
enum { XLA_SCALAR = 3 };    /* type of an attribute */

typedef struct xla_error xla_error_t;

typedef struct xla_extension {
    size_t struct_size;
    int type;
    struct xla_extension *next;
} xla_extension_t;

typedef struct {
    size_t struct_size;
    xla_extension_t *extensions;
    int major, minor;
} xla_version_t;

typedef struct {
    size_t struct_size;
    xla_version_t version;
    uint32_t traits;
} xla_metadata_t;

typedef struct {
    xla_extension_t base;
    xla_metadata_t *metadata;
} xla_metadata_extension_t;

typedef struct {
    size_t struct_size;
    xla_extension_t *extensions;
    const char *message;
    int code;
} xla_new_error_t;

typedef struct {
    size_t struct_size;
    xla_extension_t *extensions;
    xla_version_t version;
    const void *internal;
    xla_error_t *(*new_error)(xla_new_error_t *); /* more follows */
} xla_api_t;

typedef struct {
    size_t struct_size;
    xla_extension_t *extensions;
    int dtype;
    void *data;
    int64_t rank, *dims;
} xla_buffer_t;

typedef struct {
    int dtype;
    void *value;
} xla_scalar_t;

typedef struct { /* arguments or results */
    size_t struct_size;
    xla_extension_t *extensions;
    int64_t size;
    int *types;
    xla_buffer_t **buffers;
} xla_buffers_t;

typedef struct { /* in the order of their names */
    size_t struct_size;
    xla_extension_t *extensions;
    int64_t size;
    int *types;
    void **names;
    xla_scalar_t **values;
} xla_attributes_t;

typedef struct {
    size_t struct_size;
    xla_extension_t *extensions;
    const xla_api_t *api;
    void *context;
    int stage;
    xla_buffers_t arguments, results;
    xla_attributes_t attributes; /* more follows */
} xla_call_t;

/* Whether XLA has the field of a struct that it gave us. */
#define FITS(STRUCT, FIELD)   \
    ((STRUCT)->struct_size >= \
     (size_t)((const char *)(&(STRUCT)->FIELD + 1) - (const char *)(STRUCT)))

#endif
