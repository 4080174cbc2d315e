/* What runs on the thread of a stream: a collective, or messages that travel together. */
#define _GNU_SOURCE
#include "nccl.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void hang(communicator_t *comm) {
    while (!comm->aborted) usleep(1000);
}

/* ---- collectives */

static bool is_same(const call_t *a, const call_t *b) {
    return a->verb == b->verb && a->type == b->type && a->op == b->op && a->root == b->root &&
           a->count == b->count;
}

/* Tell each other the call; false: it was aborted, as it never ends where ranks differ. */
static bool agree(job_t *job) {
    communicator_t *comm = job->comm;
    const call_t *own = &job->call;
    comm->ranks[comm->rank].call = *own;
    if (!meet_on_device(comm)) return false;
    for (int i = 0; i < comm->size; i++) {
        const call_t *their = &comm->ranks[i].call;
        if (is_same(own, their)) continue;
        emulated_say("NCCL hangs: rank %d is at verb %d, type %d, operator %d, root %d, count %lu, "
                     "but rank %d at %d, %d, %d, %d, %lu",
                     comm->rank, own->verb, own->type, own->op, own->root, own->count, i,
                     their->verb, their->type, their->op, their->root, their->count);
        hang(comm);
        return false;
    }
    return meet_on_device(comm);
}

/* Put `n` elements of every rank that sends some into the slots, and let `into` be what becomes of
 * them: the sum of all, or those of one rank. */
static bool share(job_t *job, const char *send, size_t n, char *into, int from) {
    communicator_t *comm = job->comm;
    type_t type = job->call.type;
    size_t nbytes = n * (size_t)WIDTHS[type];
    if (send) memcpy(comm->ranks[comm->rank].slot, send, nbytes);
    if (!meet_on_device(comm)) return false;
    if (into) memcpy(into, comm->ranks[from < 0 ? 0 : from].slot, nbytes);
    for (int i = 1; into && from < 0 && i < comm->size; i++)
        combine(type, job->call.op, into, comm->ranks[i].slot, n);
    if (into && from < 0 && job->call.op == AVG) divide(type, into, n, comm->size);
    return meet_on_device(comm);
}

/* Elements from `first` on of each of the blocks that a rank sends or receives. */
static bool gather(job_t *job, size_t first, size_t n) {
    communicator_t *comm = job->comm;
    size_t width = (size_t)WIDTHS[job->call.type], block = job->call.count * width;
    memcpy(comm->ranks[comm->rank].slot, job->send + first * width, n * width);
    if (!meet_on_device(comm)) return false;
    for (int i = 0; i < comm->size; i++)
        memcpy(job->recv + (size_t)i * block + first * width, comm->ranks[i].slot, n * width);
    return meet_on_device(comm);
}

static bool scatter(job_t *job, size_t first, size_t n) {
    size_t width = (size_t)WIDTHS[job->call.type], block = job->call.count * width;
    for (int i = 0; i < job->comm->size; i++) {
        char *into = i == job->comm->rank ? job->recv + first * width : NULL;
        if (!share(job, job->send + (size_t)i * block + first * width, n, into, -1)) return false;
    }
    return true;
}

static bool piece(job_t *job, size_t first, size_t n) {
    size_t at = first * (size_t)WIDTHS[job->call.type];
    bool is_root = job->comm->rank == job->call.root;
    switch (job->call.verb) {
    case ALL_REDUCE:
        return share(job, job->send + at, n, job->recv + at, -1);
    case REDUCE:
        return share(job, job->send + at, n, is_root ? job->recv + at : NULL, -1);
    case BROADCAST:
        return share(job, is_root ? job->send + at : NULL, n, job->recv + at, job->call.root);
    case REDUCE_SCATTER:
        return scatter(job, first, n);
    default:
        return gather(job, first, n);
    }
}

static void run_collective(job_t *job) {
    size_t most = SLOT / (size_t)WIDTHS[job->call.type], n;
    if (!agree(job)) return;
    for (size_t first = 0; first < job->call.count; first += n) {
        n = job->call.count - first < most ? job->call.count - first : most;
        if (!piece(job, first, n)) return;
    }
}

/* ---- messages */

static size_t nbytes_of(const job_t *job) {
    return job->call.count * (size_t)WIDTHS[job->call.type];
}

/* Move a piece of a message if the other side has left room, or has put one there. */
static bool advance(job_t *job) {
    communicator_t *comm = job->comm;
    bool sends = job->call.verb == SEND;
    int peer = job->call.root;
    box_t *box = sends ? box_of(comm, comm->rank, peer) : box_of(comm, peer, comm->rank);
    size_t left = nbytes_of(job) - job->moved;
    if (atomic_load(&box->full) == (uint32_t)sends) return false;
    if (sends) {
        box->size = left < BOX ? (uint32_t)left : BOX;
        memcpy(box->bytes, job->send + job->moved, box->size);
    } else if (box->size > left) {
        emulated_say("NCCL hangs: rank %d receives %zu bytes of rank %d, which sends more",
                     comm->rank, nbytes_of(job), peer);
        hang(comm);
        return false;
    } else {
        memcpy(job->recv + job->moved, box->bytes, box->size);
    }
    job->moved += box->size;
    atomic_store(&box->full, sends);
    return true;
}

/* One turn for all of them; those of a pair travel in their order. */
static bool advance_all(job_t *first, bool *moved) {
    uint64_t busy[2] = {0, 0};
    bool left = false;
    for (job_t *job = first; job; job = job->next) {
        uint64_t bit = (uint64_t)1 << job->call.root, *pairs = &busy[job->call.verb == SEND];
        if (job->moved == nbytes_of(job)) continue;
        left = true;
        if (!(*pairs & bit)) *moved |= advance(job);
        *pairs |= bit;
    }
    return left;
}

static void run_messages(job_t *first) {
    unsigned turns = 0;
    bool moved = false;
    for (job_t *job = first; job; job = job->next) job->moved = 0;
    while (advance_all(first, &moved)) {
        if (moved)
            turns = 0;
        else if (!be_patient(first->comm, &turns))
            return;
        moved = false;
    }
}

/* ---- one or the other */

static pthread_mutex_t ONE_AT_A_TIME = PTHREAD_MUTEX_INITIALIZER;

static bool take_turn(communicator_t *comm) {
    unsigned turns = 0;
    while (pthread_mutex_trylock(&ONE_AT_A_TIME))
        if (!be_patient(comm, &turns)) return false;
    return true;
}

static void show_memory(job_t *job) {
    for (; job; job = job->next) {
        job->send = emulated_view(job->send);
        job->recv = emulated_view(job->recv);
    }
}

void run_job(void *arg) {
    job_t *job = arg, *next;
    communicator_t *comm = job->comm;
    bool captured = job->captured;
    if (!comm->aborted && (!comm->takes_turns || take_turn(comm))) {
        show_memory(job);
        if (job->call.verb >= SEND)
            run_messages(job);
        else
            run_collective(job);
        if (comm->takes_turns) pthread_mutex_unlock(&ONE_AT_A_TIME);
    }
    if (captured) return;
    for (; job; job = next) next = job->next, free(job);
    comm->n_pending--;
}
