/* NVRTC's functions, with the machine's C++ compiler behind them: a "cubin" is a shared library.
 *
 * The build names the flags with which kernels and their precompiled header are compiled
 * (KERNEL_FLAGS), and what tells the caches of CuPy that kernels are to be compiled anew (STAMP). The
 * headers are in ../include, seen from where this library lies.
 */
#define _GNU_SOURCE
#include "text.h"
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef enum { /* nvrtc.h is in no package of headers alone */
               NVRTC_SUCCESS = 0,
               NVRTC_ERROR_OUT_OF_MEMORY = 1,
               NVRTC_ERROR_INVALID_INPUT = 3,
               NVRTC_ERROR_COMPILATION = 6,
               NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
               NVRTC_ERROR_INTERNAL_ERROR = 11,
} nvrtcResult;

enum { MOST_ARGUMENTS = 256, MOST_VARIABLES = 4096 };

typedef struct {
    text_t name, source, names, module, log; /* `names`: each expression, and a zero byte */
} program_t;

static const char PTX[] = "// the emulated NVRTC, " STAMP "\n";

EXPORT const char *nvrtcGetErrorString(nvrtcResult result) {
    switch (result) {
    case NVRTC_SUCCESS:
        return "NVRTC_SUCCESS";
    case NVRTC_ERROR_OUT_OF_MEMORY:
        return "NVRTC_ERROR_OUT_OF_MEMORY";
    case NVRTC_ERROR_INVALID_INPUT:
        return "NVRTC_ERROR_INVALID_INPUT";
    case NVRTC_ERROR_COMPILATION:
        return "NVRTC_ERROR_COMPILATION";
    case NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID:
        return "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID";
    default:
        return "NVRTC_ERROR_INTERNAL_ERROR";
    }
}

EXPORT nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = 12;
    *minor = 9;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetNumSupportedArchs(int *count) {
    *count = 1;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetSupportedArchs(int *archs) {
    *archs = 90;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcCreateProgram(program_t **made, const char *source, const char *name,
                                      int n_headers, const char *const *headers,
                                      const char *const *include_names) {
    (void)headers, (void)include_names;
    if (n_headers) {
        fprintf(stderr, "emulated GPU: headers of nvrtcCreateProgram are not emulated\n");
        return NVRTC_ERROR_INVALID_INPUT;
    }
    *made = calloc(1, sizeof **made);
    if (!*made) return NVRTC_ERROR_OUT_OF_MEMORY;
    text_add(&(*made)->source, source, strlen(source));
    text_put(&(*made)->name, name && *name ? name : "default_program");
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcDestroyProgram(program_t **program) {
    text_free(&(*program)->name);
    text_free(&(*program)->source);
    text_free(&(*program)->names);
    text_free(&(*program)->module);
    text_free(&(*program)->log);
    free(*program);
    *program = NULL;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcAddNameExpression(program_t *program, const char *name) {
    text_add(&program->names, name, strlen(name) + 1);
    return NVRTC_SUCCESS;
}

/* Kernels are found by the expression itself. */
EXPORT nvrtcResult nvrtcGetLoweredName(program_t *program, const char *name, const char **lowered) {
    const char *at = program->names.at, *end = at + program->names.size;
    while (at < end && strcmp(at, name)) at += strlen(at) + 1;
    *lowered = at;
    return at < end ? NVRTC_SUCCESS : NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID;
}

/* ---- which kernels a source has */

static bool is_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

/* Whether the declaration before `at` begins with `template`. */
static bool is_template(const char *source, const char *at) {
    const char *start = at;
    while (start > source && !strchr(";}", start[-1])) start--;
    return memmem(start, (size_t)(at - start), "template", 8) != NULL;
}

/* Return the name before the parenthesis of the arguments, which begins after `at`. */
static const char *name_after(const char *at, int *length) {
    for (const char *open = strchr(at, '('); open; open = strchr(open + 1, '(')) {
        const char *end = open, *begin;
        while (end > at && isspace((unsigned char)end[-1])) end--;
        for (begin = end; begin > at && is_name(begin[-1]);) begin--;
        *length = (int)(end - begin);
        if (*length && strncmp(begin, "__launch_bounds__", 17)) return begin;
    }
    return NULL;
}

/* Write the function in which a module adds its kernels to its table. */
static void add_kernels(text_t *out, const program_t *program) {
    static const char *const barriers[] = {"__syncthreads", "__syncwarp", "_sync("};
    const char *source = program->source.at, *has = "false";
    text_t lines = {0};
    for (size_t i = 0; i < sizeof barriers / sizeof *barriers; i++)
        if (strstr(source, barriers[i])) has = "true";
    for (const char *at = source; (at = strstr(at, "__global__"));) {
        bool skipped = is_template(source, at);
        int length = 0;
        const char *name = name_after(at += strlen("__global__"), &length);
        char line[1024];
        if (!name || skipped) continue;
        snprintf(line, sizeof line, "    add<%.*s, %s>(\"%.*s\");\n", length, name, has, length,
                 name);
        if (!lines.at || !strstr(lines.at, line))
            text_put(&lines, line); /* once, if declared, too */
    }
    const char *each = program->names.at, *end = each + program->names.size;
    for (; each < end; each += strlen(each) + 1)
        text_format(&lines, "    add<%s, %s>(\"%s\");\n", each, has, each);
    text_format(out, "\nstatic void emulated::add_all() {\n%s}\n", lines.at ? lines.at : "");
    text_free(&lines);
}

/* ---- compiling */

typedef struct {
    char *each[MOST_ARGUMENTS];
    int n;
} arguments_t;

static void argue(arguments_t *arguments, const char *prefix, const char *text) {
    if (arguments->n < MOST_ARGUMENTS - 1 &&
        asprintf(&arguments->each[arguments->n], "%s%s", prefix, text) >= 0)
        arguments->each[++arguments->n] = NULL;
}

static void argue_words(arguments_t *arguments, const char *words) {
    char *copy = strdup(words), *rest = NULL;
    for (char *each = strtok_r(copy, " ", &rest); each; each = strtok_r(NULL, " ", &rest))
        argue(arguments, "", each);
    free(copy);
}

/* Of the options of nvcc only those for the preprocessor mean something here. */
static void argue_option(arguments_t *arguments, const char *option) {
    static const struct {
        const char *option, *ours;
    } rows[] = {{"-I", "-I"},
                {"-D", "-D"},
                {"-U", "-U"},
                {"--include-path=", "-I"},
                {"--define-macro=", "-D"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t length = strlen(rows[i].option);
        if (!strncmp(option, rows[i].option, length)) {
            argue(arguments, rows[i].ours, option + length);
            return;
        }
    }
}

extern char **environ;

/* Run the compiler without our libraries; what it says goes to the file `log`. */
static bool compile(arguments_t *arguments, const char *log) {
    static char *clean[MOST_VARIABLES];
    int n = 0, status = 1;
    for (char **each = environ; *each && n < MOST_VARIABLES - 1; each++)
        if (strncmp(*each, "LD_", 3)) clean[n++] = *each;
    clean[n] = NULL;
    pid_t child;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log, O_WRONLY | O_CREAT, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    bool good = !posix_spawnp(&child, arguments->each[0], &actions, NULL, arguments->each, clean);
    posix_spawn_file_actions_destroy(&actions);
    while (good && waitpid(child, &status, 0) < 0) good = errno == EINTR;
    return good && WIFEXITED(status) && !WEXITSTATUS(status);
}

static bool find_headers(char *folder, size_t size) {
    Dl_info here;
    char path[PATH_MAX];
    if (!dladdr((void *)nvrtcVersion, &here) || !realpath(here.dli_fname, path)) return false;
    return snprintf(folder, size, "-I%s/../include", dirname(path)) < (int)size;
}

EXPORT nvrtcResult nvrtcCompileProgram(program_t *program, int n_options,
                                       const char *const *options) {
    char folder[] = "/tmp/emulated-nvrtc-XXXXXX", headers[PATH_MAX];
    char source[64], module[64], log[64];
    if (!*(program->source.at + strspn(program->source.at, " \n")))
        return NVRTC_SUCCESS; /* CuPy asks which compiler this is */
    if (!find_headers(headers, sizeof headers) || !mkdtemp(folder))
        return NVRTC_ERROR_INTERNAL_ERROR;
    snprintf(source, sizeof source, "%s/kernel.cpp", folder);
    snprintf(module, sizeof module, "%s/kernel.so", folder);
    snprintf(log, sizeof log, "%s/log", folder);

    arguments_t arguments = {0};
    argue_words(&arguments, KERNEL_FLAGS);
    argue_words(&arguments, "-shared -Wl,-z,defs -include emulated_kernel.h");
    argue(&arguments, "", headers);
    for (int i = 0; i < n_options; i++) argue_option(&arguments, options[i]);
    argue(&arguments, "", source);
    argue(&arguments, "-o", module);

    text_t whole = {0};
    text_format(&whole, "#line 1 \"%s\"\n%s", program->name.at, program->source.at);
    add_kernels(&whole, program);
    bool good = text_write(&whole, source) && compile(&arguments, log);
    text_read(&program->log, log);
    good = good && text_read(&program->module, module);
    text_free(&whole);
    for (int i = 0; i < arguments.n; i++) free(arguments.each[i]);
    unlink(source), unlink(module), unlink(log), rmdir(folder);
    return good ? NVRTC_SUCCESS : NVRTC_ERROR_COMPILATION;
}

/* ---- what has been compiled */

EXPORT nvrtcResult nvrtcGetPTXSize(program_t *program, size_t *size) {
    (void)program;
    *size = sizeof PTX;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetPTX(program_t *program, char *out) {
    (void)program;
    memcpy(out, PTX, sizeof PTX);
    return NVRTC_SUCCESS;
}

static void take(const text_t *text, char *out) {
    if (text->size) memcpy(out, text->at, text->size);
    out[text->size] = 0;
}

EXPORT nvrtcResult nvrtcGetCUBINSize(program_t *program, size_t *size) {
    *size = program->module.size + 1;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetCUBIN(program_t *program, char *out) {
    take(&program->module, out);
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetProgramLogSize(program_t *program, size_t *size) {
    *size = program->log.size + 1;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetProgramLog(program_t *program, char *out) {
    take(&program->log, out);
    return NVRTC_SUCCESS;
}

static nvrtcResult no_lto(void) {
    fprintf(stderr, "emulated GPU: nvrtcGetLTOIR is not emulated\n");
    return NVRTC_ERROR_INVALID_INPUT;
}

EXPORT nvrtcResult nvrtcGetLTOIRSize(program_t *program, size_t *size) {
    (void)program, (void)size;
    return no_lto();
}

EXPORT nvrtcResult nvrtcGetLTOIR(program_t *program, char *out) {
    (void)program, (void)out;
    return no_lto();
}
