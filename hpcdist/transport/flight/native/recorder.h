/* The flight recorder as C sees it: the records of one process in a mapped file, and how one is
 * begun and ended. `flight/layout.py` has the same layout for readers. Everything here is called
 * with the global interpreter lock held, so one writer is at work at a time; readers are other
 * processes, which check `number`.
 *
 * Another extension module gets the recorder with
 *     flight_t *flight = PyCapsule_Import("hpcdist.transport._recorder.flight", 0);
 * and then, around an operation,
 *     uint64_t mark = flight_begin(flight, kind, dtype, nbytes, group, sequence, peer, digest, 0, 0);
 *     flight_end(flight, mark, FLIGHT_ENDED);
 */
#ifndef HPCDIST_RECORDER_H
#define HPCDIST_RECORDER_H
#include <stdint.h>
#include <time.h>

enum { FLIGHT_BEGUN = 1, FLIGHT_ENDED = 2, FLIGHT_FAILED = 3 };
enum { FLIGHT_STARTED = 1 }; /* of `flags`: the caller went on, the operation runs beside it */
enum { FLIGHT_KINDS = 64 };

typedef struct {
    uint64_t number; /* from 1 on; 0 while the record is written */
    uint64_t begin_ns, end_ns, nbytes;
    uint32_t file, line;      /* call site: where its file name is in the text, and the line */
    uint32_t sequence, group; /* number in the group; where the group is in the text */
    int32_t peer;             /* rank of the group: root, or the other end of a message */
    uint32_t digest;          /* of the shape; of a message its tag */
    uint16_t kind, dtype;
    uint8_t state, flags;
    uint16_t unused;
} flight_record_t;

typedef struct {
    uint64_t count, nbytes, busy_ns;
} flight_counter_t;

typedef struct {
    char magic[8];
    uint64_t pid, born; /* `born`: when the process began, in ticks since the start of the node */
    int64_t rank, size; /* in the world; -1 before it has begun */
    uint64_t capacity;  /* records, a power of two */
    uint64_t head;      /* number of the newest record */
    uint64_t text_used, text_size;
    int64_t wall_ns;            /* wall clock minus monotonic clock when the file was made */
    uint64_t about, about_size; /* where the description of the job is in the text */
    uint64_t groups;            /* where the newest group is in the text */
    uint64_t unused[19];
    flight_counter_t counters[FLIGHT_KINDS];
} flight_header_t;

typedef struct {
    flight_header_t *header; /* NULL: nothing is recorded */
    flight_record_t *records;
    char *text;
    uint64_t mask;
    uint64_t (*site)(void); /* the call site: file << 32 | line */
} flight_t;

static inline uint64_t flight_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Begin a record; returns its mark, 0 where nothing is recorded. `group` begins with the number of
 * the last operation issued there, which stays when the records of the group are gone. It began
 * at the time `since`; 0: now. */
static inline uint64_t flight_begin(flight_t *f, unsigned kind, unsigned dtype, uint64_t nbytes,
                                    uint32_t group, uint32_t sequence, int32_t peer,
                                    uint32_t digest, unsigned flags, uint64_t since) {
    if (!f->header || !group) return 0;
    uint64_t number = f->header->head + 1, site = f->site();
    flight_record_t *r = f->records + (number & f->mask);
    __atomic_store_n(&r->number, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    r->nbytes = nbytes, r->end_ns = 0;
    r->file = (uint32_t)(site >> 32), r->line = (uint32_t)site;
    r->sequence = sequence, r->group = group, r->peer = peer, r->digest = digest;
    r->kind = (uint16_t)kind, r->dtype = (uint16_t)dtype;
    r->state = FLIGHT_BEGUN, r->flags = (uint8_t)flags;
    r->begin_ns = since ? since : flight_now();
    __atomic_store_n(&r->number, number, __ATOMIC_RELEASE);
    if (sequence) *(uint64_t *)(f->text + group) = sequence;
    __atomic_store_n(&f->header->head, number, __ATOMIC_RELEASE);
    return number;
}

/* End a record once; a record that has been written over since is left alone. */
static inline void flight_end(flight_t *f, uint64_t mark, unsigned state) {
    if (!mark || !f->header) return;
    flight_record_t *r = f->records + (mark & f->mask);
    if (r->number != mark || r->state != FLIGHT_BEGUN) return;
    uint64_t now = flight_now();
    flight_counter_t *counter = f->header->counters + (r->kind & (FLIGHT_KINDS - 1));
    counter->count++, counter->nbytes += r->nbytes, counter->busy_ns += now - r->begin_ns;
    r->end_ns = now;
    __atomic_store_n(&r->state, (uint8_t)state, __ATOMIC_RELEASE);
}

#endif
