/* Bytes that grow; a zero byte follows them. */
#ifndef EMULATED_TEXT_H
#define EMULATED_TEXT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    char *at;
    size_t size;
} text_t;

void text_add(text_t *text, const char *bytes, size_t size);
void text_put(text_t *text, const char *words);
__attribute__((format(printf, 2, 3))) void text_format(text_t *text, const char *format, ...);
bool text_read(text_t *text, const char *path);
bool text_write(const text_t *text, const char *path);
void text_free(text_t *text);

#endif
