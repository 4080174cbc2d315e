/* The hot path of arrays in the heap, which every rank maps (`hpcdist.empty`); in Python that is the
 * algorithm "direct".
 *
 * What is published of such an array is where it begins in this rank's heap. What is moved is read
 * there; what is reduced, too, if all arrays are in heaps.
 */
#include "hot_large.h"

/* Where in this rank's heap an array begins; -1: elsewhere. */
static int64_t offset_in_heap(const hot_t *h, const char *data, size_t nbytes) {
    uintptr_t at = (uintptr_t)data, heap = (uintptr_t)h->large->heaps[h->control->rank];
    size_t capacity = h->large->heap_bytes;
    int inside = at >= heap && nbytes <= capacity && at - heap <= capacity - nbytes;
    return inside ? (int64_t)(at - heap) : -1;
}

int is_in_heap(const hot_t *h, const planned_t *p) {
    int i = 0, n = is_within(p->total, h->large->direct[p->kind]) ? n_offered(p) : 0;
    while (i < n && offset_in_heap(h, offered(p, i), p->piece) >= 0) i++;
    return n > 0 && i == n;
}

int64_t publish_in_heap(const hot_t *h, const planned_t *p) {
    if (p->n_from <= 1) return offset_in_heap(h, offered(p, 0), p->piece) + 1;
    int64_t *list = (int64_t *)payload_of(h->control, h->control->rank);
    for (int i = 0; i < p->n_from; i++) list[i] = offset_in_heap(h, p->from[i], p->piece);
    return LISTED_IN_HEAP;
}

static int is_address_in_heap(int64_t address) {
    return (address > 0 && address < NOT_IN_HEAP) || address == LISTED_IN_HEAP;
}

int is_all_in_heap(const hot_t *h) {
    const control_block_t *b = h->control;
    int r = 0;
    while (r < b->size && is_address_in_heap(slot_of(b, r)->address)) r++;
    return r == b->size;
}

place_t place_in_heap(const hot_t *h, const planned_t *p, int rank) {
    const control_block_t *b = h->control;
    int64_t address = slot_of(b, rank)->address;
    char *heap = h->large->heaps[rank];
    if (address == LISTED_IN_HEAP)
        return (place_t){0, heap + ((int64_t *)payload_of(b, rank))[b->rank]};
    return (place_t){0, is_address_in_heap(address) ? heap + (address - 1) + p->first : NULL};
}

void reduce_in_heap(const hot_t *h, const planned_t *p) {
    const control_block_t *b = h->control;
    size_t first = 0, item = p->kernel->item;
    job_t job = {.kernel = p->kernel, .n_sources = b->size, .n_outs = 1, .divisor = p->divisor};
    job.count = p->part / item;
    if (p->kind != FACTS.REDUCE_SCATTER) job.count = own_share(b, job.count, &first);
    for (int r = 0; r < b->size; r++)
        job.sources[r] = (uintptr_t)place_in_heap(h, p, r).at + first * item;
    if (p->kind == FACTS.ALL_REDUCE) {
        job.n_outs = b->size;
        memcpy(job.outs, job.sources, sizeof *job.outs * (size_t)b->size);
    } else {
        job.outs[0] = p->kind == FACTS.REDUCE ? job.sources[p->root] : (uintptr_t)p->to[0];
    }
    combine(&job);
}
