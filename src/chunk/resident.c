/* SPDX-License-Identifier: BSD-3-Clause
 * Residents are chunks that stay on tier 0 during whole steps, without a copy on a lower tier. A plan assumes that
 * the last tier has a place for every chunk. If the last tier is too small, the chunks without a place become
 * residents. Plans then do not contain the residents, and the capacity of tier 0 is smaller by the size of the
 * residents. In this way device and host (or host and disk) together hold the state, and no byte is held twice. Only
 * a chunk whose uses are all on tier 0 can be a resident. An example is a chunk of optimizer state that is updated on
 * tier 0. */
#include <stdlib.h>
#include "base/alloc.h"
#include "base/error.h"
#include "chunk/impl.h"

/* The last tier must have extra room for this number of chunks of the largest size. One place is for a short-lived
 * copy through which the host reads a resident. The other place allows two chunks to be swapped. */
enum { SPARE = 2 };

typedef struct candidate {
    int32_t chunk;
    /* uses: number of uses in the trace; INT32_MAX if the chunk is used below tier 0 */
    int32_t uses;
    bool resident;
} candidate;

/* Sorts candidates by the benefit of keeping them on tier 0. Chunks that are residents now are first, because they
 * should not move. The chunks with the most uses are next, because each use would cost copies. */
static int by_worth(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->resident != y->resident) return x->resident ? -1 : 1;
    if (x->uses != y->uses) return x->uses > y->uses ? -1 : 1;
    return x->chunk < y->chunk ? -1 : 1;
}

/* Returns the number of bytes that chunks can use on the last tier in a step like `trace`. INT64_MAX means no limit. */
static int64_t last_tier_room(ps_chunks *cs, const ps_trace *trace)
{
    int last = cs->n_tiers - 1;
    int64_t budget = cs->tiers[last].budget;
    if (is_disk(cs, last)) {
        ps_disk_info info;
        ps_disk_get_info(cs->disk, &info);
        return info.capacity;
    }
    if (budget == 0) return INT64_MAX;
    if (tier_other(cs, last) > trace->other_peak[last])    /* the trim returns unused memory to the system */
        cs->plain->table->trim(cs->plain, cs->tiers[last].device, true);
    int64_t other = other_in_step(cs, trace, last);
    return budget > other ? budget - other : 0;
}

static int fail_homeless(ps_chunks *cs, int64_t chunks, int64_t room, int64_t wanted, int64_t can_stay)
{
    const char *last = cs->tiers[cs->n_tiers - 1].name, *first = cs->tiers[0].name;
    return ps_fail_room(PS_ENOMEM, PS_SUB_HOMELESS, 0, wanted, can_stay,
                        "the step does not fit: all chunks have %s, and tier %s has room for %s of them; the others "
                        "would have to stay on tier %s for whole steps, but only %s of chunks can, as they are used "
                        "nowhere else; raise memory.%s%s, or let more of the updates run on the device "
                        "(zero_optimization.offload_optimizer.ratio, client.mem_tracer.margin_use_ratio)",
                        bytes_text(chunks).s, last, bytes_text(room).s, first, bytes_text(can_stay).s, last_key(cs),
                        cs->disk ? "" : ", set memory.disk");
}

int residents_choose(ps_chunks *cs, const ps_trace *trace, uint8_t *resident, int64_t *nbytes)
{
    int64_t all = 0, largest = 0, room = last_tier_room(cs, trace), can_stay = 0;
    *nbytes = 0;
    for (int32_t i = 0; i < cs->n_chunks; i++) {
        resident[i] = 0;
        /* A chunk with a source needs no room on lower tiers. */
        if (cs->chunks[i].dead || cs->chunks[i].n_source) continue;
        all += cs->chunks[i].nbytes;
        if (cs->chunks[i].nbytes > largest) largest = cs->chunks[i].nbytes;
    }
    if (cs->n_tiers < 2 || all <= room) return 0;
    int64_t wanted = all - room + SPARE * largest;
    if (wanted > all) wanted = all;
    size_t size = sizeof(candidate) * (size_t)(cs->n_chunks + 1);
    candidate *list = ps_alloc(size);
    if (!list) return ps_fail_nomem(size);
    for (int32_t i = 0; i < cs->n_chunks; i++)
        list[i] = (candidate){ .chunk = i, .uses = 0, .resident = cs->chunks[i].resident };
    for (int32_t i = 0; i < trace->n_uses; i++) {
        candidate *c = &list[trace->uses[i].chunk];
        if (trace->uses[i].tier > 0) c->uses = INT32_MAX;
        else if (c->uses < INT32_MAX - 1) c->uses++;
    }
    int32_t n = 0;
    for (int32_t i = 0; i < cs->n_chunks; i++) {
        const chunk *c = &cs->chunks[i];
        if (c->dead || c->n_source || list[i].uses == INT32_MAX || c->held > 0) continue;
        can_stay += c->nbytes;
        list[n++] = list[i];
    }
    if (can_stay < wanted) {
        ps_free(list);
        return fail_homeless(cs, all, room, wanted, can_stay);
    }
    qsort(list, (size_t)n, sizeof *list, by_worth);
    for (int32_t i = 0; i < n && *nbytes < wanted; i++) {
        resident[list[i].chunk] = 1;
        *nbytes += cs->chunks[list[i].chunk].nbytes;
    }
    ps_free(list);
    return 0;
}

int residents_make(ps_chunks *cs, const uint8_t *resident)
{
    for (int32_t i = 0; i < cs->n_chunks; i++) cs->chunks[i].resident = resident[i] != 0;
    for (int pass = 0; pass < 2; pass++)          /* the first pass handles the chunks that are on tier 0 and need no
                                                   * room */
        for (int32_t i = 0; i < cs->n_chunks; i++) {
            chunk *c = chunk_at(cs, i);
            if (!c->resident || c->valid == 0 || c->pins > 0 || (pass == 0 && !has_copy(c, 0))) continue;
            int64_t fetched = cs->stats.unplanned;
            PS_TRY(bring(cs, c, 0));
            cs->stats.unplanned = fetched;   /* does not count these fetches, because later steps do not repeat them */
            for (int t = 1; t < cs->n_tiers; t++) if (c->slot[t]) slot_drop(cs, c, t);
            c->valid = 1;
        }
    return 0;
}
