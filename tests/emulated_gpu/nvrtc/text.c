#define _GNU_SOURCE
#include "text.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void text_add(text_t *text, const char *bytes, size_t size) {
    char *at = realloc(text->at, text->size + size + 1);
    if (!at) abort();
    memcpy(at + text->size, bytes, size);
    text->at = at;
    text->size += size;
    at[text->size] = 0;
}

void text_put(text_t *text, const char *words) { text_add(text, words, strlen(words)); }

void text_format(text_t *text, const char *format, ...) {
    va_list arguments;
    char *words;
    va_start(arguments, format);
    if (vasprintf(&words, format, arguments) < 0) abort();
    va_end(arguments);
    text_put(text, words);
    free(words);
}

bool text_read(text_t *text, const char *path) {
    char piece[1 << 14];
    FILE *file = fopen(path, "r");
    if (!file) return false;
    for (size_t n; (n = fread(piece, 1, sizeof piece, file));) text_add(text, piece, n);
    return !fclose(file);
}

bool text_write(const text_t *text, const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return false;
    bool good = fwrite(text->at, 1, text->size, file) == text->size;
    return !fclose(file) && good;
}

void text_free(text_t *text) {
    free(text->at);
    *text = (text_t){0};
}
