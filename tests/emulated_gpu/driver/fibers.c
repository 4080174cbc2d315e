/* The threads of a block as fibers: each runs up to its next barrier, then the next one does.
 *
 * So a block never runs in parallel, and a warp is in step only where its threads exchange values.
 * On x86-64 a switch is a few instructions; elsewhere, and with PORTABLE_FIBERS, it is swapcontext.
 */
#define _GNU_SOURCE
#include "driver.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { STACK = 64 << 10, MOST = 1024, WARP = 32 };

#if defined(__x86_64__) && !defined(PORTABLE_FIBERS)

typedef struct {
    void *top;
} fiber_t;

void emulated_switch(void **save, void *load);
__asm__(".text\n.globl emulated_switch\n.hidden emulated_switch\n"
        ".type emulated_switch,@function\nemulated_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static void prepare(fiber_t *fiber, char *stack, void (*start)(void)) {
    void **top = (void **)(stack + STACK) - 2;
    *top = (void *)start; /* where the first switch returns to, the stack as after a call */
    fiber->top = top - 6;
}

static void switch_to(fiber_t *from, fiber_t *to) { emulated_switch(&from->top, to->top); }

#else

#include <ucontext.h>
typedef struct {
    ucontext_t machine;
} fiber_t;

static void prepare(fiber_t *fiber, char *stack, void (*start)(void)) {
    getcontext(&fiber->machine);
    fiber->machine.uc_stack.ss_sp = stack;
    fiber->machine.uc_stack.ss_size = STACK;
    makecontext(&fiber->machine, start, 0);
}

static void switch_to(fiber_t *from, fiber_t *to) { swapcontext(&from->machine, &to->machine); }

#endif

/* It is passed when all that take part have come. */
typedef struct {
    unsigned n_come, n_passed;
} barrier_t;

typedef struct {
    char *stacks;
    fiber_t scheduler, fibers[MOST];
    bool done[MOST];
    unsigned current, n_alive, progress;
    barrier_t block, warps[MOST / WARP];
    unsigned lanes[MOST / WARP];  /* of each warp: who has not ended */
    unsigned wanted[MOST / WARP]; /* and who is to come to its barrier */
    void (*body)(void *, unsigned);
    void *arg;
} scheduler_t;

static _Thread_local scheduler_t *HERE;

static void pass(barrier_t *barrier, unsigned n_wanted) {
    if (!barrier->n_come || barrier->n_come < n_wanted) return;
    barrier->n_come = 0;
    barrier->n_passed++;
    HERE->progress++;
}

static void wait_at(barrier_t *barrier, unsigned n_wanted) {
    unsigned n_passed = barrier->n_passed;
    barrier->n_come++;
    pass(barrier, n_wanted);
    while (barrier->n_passed == n_passed) switch_to(&HERE->fibers[HERE->current], &HERE->scheduler);
}

void block_barrier(void) { wait_at(&HERE->block, HERE->n_alive); }

static unsigned n_wanted_of(unsigned warp) {
    return (unsigned)__builtin_popcount(HERE->wanted[warp] & HERE->lanes[warp]);
}

void warp_barrier(unsigned mask) {
    unsigned warp = HERE->current / WARP;
    HERE->wanted[warp] = mask;
    wait_at(&HERE->warps[warp], n_wanted_of(warp));
}

static void begin(void) {
    HERE->body(HERE->arg, HERE->current);
    unsigned warp = HERE->current / WARP;
    HERE->done[HERE->current] = true;
    HERE->lanes[warp] &= ~(1u << HERE->current % WARP);
    HERE->n_alive--;
    HERE->progress++;
    pass(&HERE->block, HERE->n_alive); /* who has ended is waited for no more */
    pass(&HERE->warps[warp], n_wanted_of(warp));
    switch_to(&HERE->fibers[HERE->current], &HERE->scheduler);
    abort();
}

static scheduler_t *new_scheduler(void) {
    scheduler_t *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->stacks = mmap(NULL, (size_t)MOST * STACK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made->stacks == MAP_FAILED) abort();
    return made;
}

void end_fibers(void) {
    if (!HERE) return;
    munmap(HERE->stacks, (size_t)MOST * STACK);
    free(HERE);
    HERE = NULL;
}

void run_block(unsigned n, void (*body)(void *, unsigned), void (*enter)(unsigned), void *arg) {
    if (!HERE) HERE = new_scheduler();
    HERE->body = body, HERE->arg = arg, HERE->n_alive = n;
    HERE->block.n_come = 0;
    memset(HERE->warps, 0, sizeof HERE->warps);
    memset(HERE->lanes, 0, sizeof HERE->lanes);
    memset(HERE->wanted, 0, sizeof HERE->wanted);
    for (unsigned i = 0; i < n; i++) {
        prepare(&HERE->fibers[i], HERE->stacks + (size_t)i * STACK, begin);
        HERE->done[i] = false;
        HERE->lanes[i / WARP] |= 1u << i % WARP;
    }
    while (HERE->n_alive) {
        unsigned before = HERE->progress;
        for (unsigned i = 0; i < n; i++) {
            if (HERE->done[i]) continue;
            HERE->current = i;
            enter(i);
            switch_to(&HERE->scheduler, &HERE->fibers[i]);
        }
        if (HERE->progress != before) continue;
        emulated_say("the threads of a kernel wait at barriers that never fill");
        abort();
    }
}
