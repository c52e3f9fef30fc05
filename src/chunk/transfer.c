/* SPDX-License-Identifier: BSD-3-Clause
 * This file manages the memory and the copies of the chunk manager. It allocates slots on each tier, copies chunks
 * between neighboring tiers, and makes room. A chunk has at most one copy in progress. Slots and memory that is kept
 * for reuse never exceed the budget of a tier minus its other tensors. A request that fails may have moved chunks,
 * but each chunk still has its contents on some tier. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/record.h"
#include "chunk/impl.h"
#include "chunk/policy.h"

/* -- the record of events ----------------------------------------------------------------------------------------- */
static uint16_t places_of(const ps_chunks *cs, const chunk *c)
{
    unsigned on = 0;
    for (int t = 0; t < cs->n_tiers; t++)
        if (is_disk(cs, t) ? has_copy(c, t) : c->slot[t] != NULL) on |= 1u << t;
    return (uint16_t)on;
}

static void put_chunk(const ps_chunks *cs, const chunk *c, int what, int from, int t, int64_t now)
{
    ps_record_put((ps_record_event){ .kind = PS_REC_CHUNK, .name = (uint16_t)what, .begin_ns = now, .end_ns = now,
                                     .id = c->id, .of = c->kind, .bytes = c->nbytes, .from = (uint8_t)from,
                                     .to = (uint8_t)t, .on = places_of(cs, c) });
}

void record_tiers(ps_chunks *cs)
{
    int64_t now = ps_record_clock();
    bool all = cs->recorded != ps_record_run;
    cs->recorded = ps_record_run;
    for (int32_t i = 0; all && i < cs->n_chunks; i++)
        if (!cs->chunks[i].dead) put_chunk(cs, &cs->chunks[i], PS_CHUNK_THERE, 0, 0, now);
    for (int t = 0; t < cs->n_tiers; t++) {
        tier *at = &cs->tiers[t];
        int64_t chunks = at->used, other = 0;
        ps_memory_info info;
        ps_disk_info disk;
        if (is_disk(cs, t)) {
            ps_disk_get_info(cs->disk, &disk);
            chunks = disk.used;
        } else if (cs->plain->table->info(cs->plain, at->device, &info) == 0) {
            other = info.used;
        }
        if (!all && at->recorded[0] == chunks && at->recorded[1] == other) continue;
        at->recorded[0] = chunks, at->recorded[1] = other;
        ps_record_put((ps_record_event){ .kind = PS_REC_TIER, .to = (uint8_t)t, .begin_ns = now, .end_ns = now,
                                         .bytes = chunks, .flops = other });
    }
}

/* Called after memory for c was allocated or freed on tier t, or after c was copied to tier t. */
static void record_chunk(ps_chunks *cs, const chunk *c, int what, int from, int t)
{
    if (!ps_record_on()) return;
    record_tiers(cs);
    put_chunk(cs, c, what, from, t, ps_record_clock());
}

/* -- slots -------------------------------------------------------------------------------------------------------- */
int64_t tier_other(ps_chunks *cs, int t)
{
    return is_disk(cs, t) ? 0 : cs->plain->table->held(cs->plain, cs->tiers[t].device);
}

int64_t tier_busy(ps_chunks *cs, int t, int64_t *peak)
{
    ps_mem *others = cs->step->dry ? cs->step->dry : cs->plain;
    return others->table->busy(others, cs->tiers[t].device, peak);
}

int64_t other_in_step(ps_chunks *cs, const ps_trace *trace, int t)
{
    int64_t other = tier_other(cs, t);
    return other > trace->other_peak[t] ? other : trace->other_peak[t];
}

const char *last_key(const ps_chunks *cs) { return cs->disk ? "disk.limit" : cs->tiers[cs->n_tiers - 1].name; }

int64_t tier_room(ps_chunks *cs, int t)
{
    const tier *at = &cs->tiers[t];
    if (is_disk(cs, t)) {
        ps_disk_info info;
        ps_disk_get_info(cs->disk, &info);
        return info.capacity - info.used;
    }
    if (at->budget == 0) return INT64_MAX / 2;
    int64_t other = tier_other(cs, t);
    if (at->planned_other > other) other = at->planned_other;
    return at->budget - other - at->used;
}

static void poison(void *p, int64_t nbytes) { memset(p, 0xA5, (size_t)nbytes); }

static void region_free(tier *at, void *p, int64_t nbytes) { at->be->region_free(at->be, p, (size_t)nbytes); }

/* Frees memory that is kept for reuse, until `until_room` bytes are free. If `until_room` is INT64_MAX, frees all
 * kept memory. */
void cache_clear(ps_chunks *cs, int t, int64_t until_room)
{
    tier *at = &cs->tiers[t];
    while (at->n_cache > 0 && (until_room == INT64_MAX || tier_room(cs, t) - at->cached_nbytes < until_room)) {
        cached *last = &at->cache[--at->n_cache];
        region_free(at, last->p, last->nbytes);
        at->cached_nbytes -= last->nbytes;
    }
}

static void *cache_take(tier *at, int64_t nbytes)
{
    for (int i = at->n_cache - 1; i >= 0; i--)
        if (at->cache[i].nbytes == nbytes) {
            void *p = at->cache[i].p;
            at->cache[i] = at->cache[--at->n_cache];
            at->cached_nbytes -= nbytes;
            return p;
        }
    return NULL;
}

/* Makes a region for a slot from memory that is kept for reuse. New memory would be slower, because the system clears
 * new pages. Clearing can take longer than reading a chunk from the disk. The kept regions have other sizes, and they
 * lose their first bytes. `lacking` is the number of bytes of kept memory that must be used or freed to make room for
 * the slot. Sets *fresh to the number of bytes of the new region that have no memory yet. */
static int region_remake(tier *at, int64_t nbytes, int64_t lacking, void **out, int64_t *fresh)
{
    PS_TRY(at->be->region_new(at->be, (size_t)nbytes, out));
    int64_t done = 0, most = nbytes / PS_MOVE_NBYTES * PS_MOVE_NBYTES;
    while (done < most && done < lacking && at->n_cache > 0) {
        cached *last = &at->cache[at->n_cache - 1];
        int64_t n = last->nbytes / PS_MOVE_NBYTES * PS_MOVE_NBYTES;
        if (n > most - done) n = most - done;
        int64_t moved = at->be->region_move(at->be, (char *)*out + done, last->p, (size_t)n);
        if (moved < 0) {
            at->be->region_free(at->be, *out, (size_t)nbytes);
            *out = NULL;
            return (int)moved;
        }
        done += moved;
        last->p = (char *)last->p + moved;
        last->nbytes -= moved;
        at->cached_nbytes -= moved;
        if (moved < n) break;                                    /* the system refuses to move more pages */
        if (last->nbytes >= PS_MOVE_NBYTES) continue;
        if (last->nbytes > 0) region_free(at, last->p, last->nbytes);
        at->cached_nbytes -= last->nbytes;
        at->n_cache--;
    }
    *fresh = nbytes - done;
    return 0;
}

static void cache_put(tier *at, void *p, int64_t nbytes)
{
    if (!ps_try_grow(at->cache, at->cache_capacity, at->n_cache + 1)) {
        region_free(at, p, nbytes);
        return;
    }
    at->cache[at->n_cache++] = (cached){ p, nbytes };
    at->cached_nbytes += nbytes;
}

void cache_forget(ps_chunks *cs, int64_t nbytes)
{
    for (int32_t i = 0; i < cs->n_chunks; i++)
        if (!cs->chunks[i].dead && cs->chunks[i].nbytes == nbytes) return;
    for (int t = 0; t < cs->n_tiers; t++)
        for (void *p; !is_disk(cs, t) && (p = cache_take(&cs->tiers[t], nbytes)); )
            region_free(&cs->tiers[t], p, nbytes);
}

/* Makes the plain manager return unused memory if that makes room for `nbytes` bytes. Returns true if there is room. */
static bool trim(ps_chunks *cs, int t, int64_t nbytes)
{
    const tier *at = &cs->tiers[t];
    int64_t least = tier_busy(cs, t, NULL);
    if (least < at->planned_other) least = at->planned_other;
    if (at->budget - least - at->used < nbytes) return false;
    for (int holes = 0; holes < 2 && tier_room(cs, t) < nbytes; holes++)
        cs->plain->table->trim(cs->plain, at->device, holes);
    return tier_room(cs, t) >= nbytes;
}

/* Returns true if the extent of c can be freed. An extent can be freed if its contents are stale. If `redundant` is
 * set, it can also be freed if a higher tier has the same contents. */
static bool can_give_extent(const chunk *c, int disk, bool redundant)
{
    if (c->dead || c->extent < 0 || c->transfer) return false;
    return !has_copy(c, disk) || (redundant && c->valid != 1u << disk);
}

/* Allocates an extent of the disk's file for c. If the file is full, first frees stale extents, and then the extents
 * of chunks whose contents are also on a higher tier. */
static int extent_take(ps_chunks *cs, chunk *c)
{
    int disk = cs->n_tiers - 1, rc = ps_disk_extent_new(cs->disk, c->nbytes, &c->extent);
    for (int redundant = 0; rc == PS_ENOSPC && redundant < 2; redundant++) {
        for (int32_t i = 0; i < cs->n_chunks; i++) {
            chunk *x = &cs->chunks[i];
            if (!can_give_extent(x, disk, redundant)) continue;
            ps_disk_extent_free(cs->disk, x->extent, x->nbytes);
            x->extent = -1;
            x->valid &= (uint8_t)~(1u << disk);
        }
        rc = ps_disk_extent_new(cs->disk, c->nbytes, &c->extent);
    }
    return rc;
}

enum { SPARE_NBYTES = 64 << 20, GRANT_NBYTES = SPARE_NBYTES / 4 };

/* Returns true if the system has this number of bytes for tier t. On the host, some spare memory must remain free.
 * Asking the system takes longer than allocating a small slot. Therefore one query serves several slots, which
 * together use at most a quarter of the spare memory if they are small. */
static bool system_has(tier *at, int64_t nbytes)
{
    if (!at->be->is_host) return at->be->bytes_available(at->be) >= nbytes;
    if (at->granted < nbytes) {
        if (at->be->bytes_available(at->be) < nbytes + SPARE_NBYTES) return false;
        at->granted = nbytes < GRANT_NBYTES ? GRANT_NBYTES : nbytes;
    }
    at->granted -= nbytes;
    return true;
}

int slot_take(ps_chunks *cs, chunk *c, int t)
{
    tier *at = &cs->tiers[t];
    if (is_disk(cs, t)) return c->extent >= 0 ? 0 : extent_take(cs, c);
    if (c->slot[t]) return 0;
    if (tier_room(cs, t) < c->nbytes && !trim(cs, t, c->nbytes)) return 1;
    void *p = cache_take(at, c->nbytes);
    if (!p) {
        int64_t fresh = c->nbytes, lacking = c->nbytes - (tier_room(cs, t) - at->cached_nbytes);
        if (at->be->region_move && lacking > 0) PS_TRY(region_remake(at, c->nbytes, lacking, &p, &fresh));
        cache_clear(cs, t, c->nbytes);
        if (!system_has(at, fresh)) {
            cache_clear(cs, t, INT64_MAX);
            if (!system_has(at, fresh)) {
                if (p) region_free(at, p, c->nbytes);
                return 1;
            }
        }
        if (!p) PS_TRY(at->be->region_new(at->be, (size_t)c->nbytes, &p));
    }
    c->slot[t] = p;
    c->arrived = ++cs->clock;
    at->used += c->nbytes;
    int64_t total = at->used + tier_other(cs, t);
    if (total > at->peak) at->peak = total;
    record_chunk(cs, c, PS_CHUNK_ALLOCATE, t, t);
    return 0;
}

void slot_drop(ps_chunks *cs, chunk *c, int t)
{
    tier *at = &cs->tiers[t];
    if (!c->slot[t]) return;
    if (cs->config.stress && !at->be->no_data && !at->be->pretends) poison(c->slot[t], c->nbytes);
    cache_put(at, c->slot[t], c->nbytes);
    c->slot[t] = NULL;
    c->valid &= (uint8_t)~(1u << t);
    at->used -= c->nbytes;
    record_chunk(cs, c, PS_CHUNK_RELEASE, t, t);
}

/* -- copies ------------------------------------------------------------------------------------------------------- */
static transfer *transfer_new(ps_chunks *cs, chunk *c, int level, bool up)
{
    transfer *x = cs->spare;
    if (x) cs->spare = x->next;
    else if (!(x = ps_alloc(sizeof *x))) return NULL;
    *x = (transfer){ .chunk = c->id, .heir = -1, .level = (int8_t)level, .up = up };
    return x;
}

/* Starts to read a chunk from its source. The first call starts the threads that read sources. */
static int read_source(ps_chunks *cs, const chunk *c, void *dst, ps_source_job **out)
{
    if (!cs->source) PS_TRY(ps_source_open(&cs->source));
    return ps_source_read(cs->source, c->source, c->n_source, dst, c->nbytes, out);
}

/* Starts copy x. If `after` is not NULL, x begins after copy `after` has ended. c must have memory on both tiers. */
static int transfer_start(ps_chunks *cs, transfer *x, ps_copy *after)
{
    chunk *c = chunk_at(cs, x->chunk);
    int t = x->level;
    void *above = c->slot[t];
    if (cs->tiers[t].be->pretends) return 0;                 /* simulated memory has no bytes to copy */
    if (is_disk(cs, t + 1)) {
        if (x->up && c->n_source) return read_source(cs, c, above, &x->read);
        if (x->up) return ps_disk_read(cs->disk, c->extent, above, c->nbytes, NULL, &x->job);
        return ps_disk_write(cs->disk, c->extent, above, c->nbytes, NULL, &x->job);
    }
    ps_backend *be = cs->tiers[t].be;
    void *below = c->slot[t + 1];
    be->times = x->began_ns != 0;
    if (be->copy_start)
        return be->copy_start(be, x->up, x->up ? above : below, x->up ? below : above, (size_t)c->nbytes, after,
                              &x->copy);
    memcpy(x->up ? above : below, x->up ? below : above, (size_t)c->nbytes);
    return 0;
}

static int begin_behind(ps_chunks *cs, chunk *c, int level, bool up, ps_copy *after)
{
    transfer *x = transfer_new(cs, c, level, up);
    if (!x) return ps_fail_nomem(sizeof *x);
    x->began_ns = ps_record_begin();
    int rc = transfer_start(cs, x, after);
    if (rc < 0) {
        x->next = cs->spare;
        cs->spare = x;
        return rc;
    }
    x->next = NULL;
    *cs->transfers_end = x;
    cs->transfers_end = &x->next;
    c->transfer = x;
    return 0;
}

static int begin(ps_chunks *cs, chunk *c, int level, bool up) { return begin_behind(cs, c, level, up, NULL); }

/* Begins to fetch c into the memory of a chunk that is still being evicted. Both directions then stay busy while the
 * caller computes. c is the heir of the evicted chunk. The copy engine starts the fetch when the copy down has ended.
 * transfer_end() then assigns the memory to c. If the copy down failed, the evicted chunk keeps the memory. Returns 1
 * if no chunk of the same size as c is being evicted. */
static int begin_fetch_after(ps_chunks *cs, chunk *c, int t)
{
    transfer *x = cs->transfers;
    while (x && !(x->level == t && !x->up && x->copy && x->heir < 0 && chunk_at(cs, x->chunk)->nbytes == c->nbytes))
        x = x->next;
    if (!x) return 1;
    c->slot[t] = chunk_at(cs, x->chunk)->slot[t];
    int rc = begin_behind(cs, c, t, true, x->copy);
    if (rc < 0) c->slot[t] = NULL;
    else x->heir = c->id, c->transfer->behind = true, c->arrived = ++cs->clock;
    return rc;
}

int begin_fetch(ps_chunks *cs, chunk *c, int t)
{
    if (has_copy(c, t) && !c->transfer) return 0;
    if (c->transfer || c->writing || !has_copy(c, t + 1)) return 1;
    int rc = slot_take(cs, c, t);
    if (rc == 1) return begin_fetch_after(cs, c, t);
    if (rc != 0) return rc;
    rc = begin(cs, c, t, true);
    if (rc < 0) slot_drop(cs, c, t);
    return rc;
}

int begin_evict(ps_chunks *cs, chunk *c, int t)
{
    if (c->transfer || c->tier_pins[t] > 0) return 1;
    if (!c->slot[t]) return 0;
    for (int lower = t + 1; lower < cs->n_tiers; lower++)
        if (has_copy(c, lower) || !has_copy(c, t)) {
            slot_drop(cs, c, t);
            return 0;
        }
    if (t + 1 >= cs->n_tiers) return 1;
    int rc = slot_take(cs, c, t + 1);
    if (rc != 0) return rc;
    rc = begin(cs, c, t, false);
    if (rc < 0 && !is_disk(cs, t + 1)) slot_drop(cs, c, t + 1);
    return rc;
}

/* Completes a copy that ended with result `rc`. Updates the slots and the valid copies. The slots and the valid
 * copies do not change while copies run. */
static void transfer_end(ps_chunks *cs, transfer *x, int rc)
{
    chunk *c = chunk_at(cs, x->chunk);
    int t = x->level;
    chunk *heir = x->heir >= 0 ? chunk_at(cs, x->heir) : NULL;
    c->transfer = NULL;
    if (heir) heir->transfer->behind = false;
    if (rc < 0) {
        if (heir) heir->slot[t] = NULL;             /* the evicted chunk keeps the memory, and the heir's copy fails */
        if (x->up) slot_drop(cs, c, t);
        else if (!is_disk(cs, t + 1)) slot_drop(cs, c, t + 1);
        return;
    }
    if (x->up) {
        c->valid |= (uint8_t)(1u << t);
        cs->tiers[t].bytes_up += c->nbytes;
    } else {
        c->valid |= (uint8_t)(1u << (t + 1));
        cs->tiers[t].bytes_down += c->nbytes;
        if (heir) {                                       /* the heir now owns the memory, so `used` does not change */
            c->slot[t] = NULL;
            c->valid &= (uint8_t)~(1u << t);
        } else if (c->tier_pins[t] == 0 && !(c->resident && t == 0)) {
            slot_drop(cs, c, t);
        }
    }
    int from = x->up ? t + 1 : t, to = x->up ? t : t + 1;
    record_chunk(cs, c, PS_CHUNK_MOVE, from, to);
    ps_record_event e = { .kind = PS_REC_COPY, .name = !x->up, .begin_ns = x->began_ns, .id = c->id,
                          .bytes = c->nbytes, .from = (uint8_t)from, .to = (uint8_t)to };
    const int64_t *ran = cs->tiers[t].be->copied_ns;     /* begin and end of the copy by the device's clock; 0 if
                                                          * unknown */
    if (x->copy && x->began_ns && ran[0]) e.begin_ns = ran[0], e.end_ns = ran[1];
    ps_record_end(e);
}

int transfers_poll(ps_chunks *cs, bool block, const chunk *only)
{
    int result = 0;
    for (transfer **at = &cs->transfers; *at;) {
        transfer *x = *at;
        bool before = only && x->heir == only->id;        /* this copy down frees memory for `only` */
        bool wait = block && (!only || x->chunk == only->id || before);
        double began = wait ? ps_now() : 0;
        int64_t wait_ns = wait ? ps_record_begin() : 0;
        int rc = x->behind ? 0
                 : x->job  ? ps_disk_wait(cs->disk, x->job, wait)
                 : x->read ? ps_source_wait(cs->source, x->read, wait)
                 : x->copy ? cs->tiers[x->level].be->copy_wait(cs->tiers[x->level].be, x->copy, wait)
                           : 1;
        if (rc == 0) {
            at = &x->next;
            continue;
        }
        if (wait) {
            block = before;
            cs->stats.wait_s += ps_now() - began;
            cs->stats.waits++;
            ps_record_end((ps_record_event){ .kind = PS_REC_WAIT, .name = PS_WAIT_COPY, .begin_ns = wait_ns,
                                             .id = x->chunk, .bytes = chunk_at(cs, x->chunk)->nbytes });
        }
        *at = x->next;
        if (!*at) cs->transfers_end = at;
        transfer_end(cs, x, rc);
        x->next = cs->spare;
        cs->spare = x;
        if (rc < 0) {
            char text[160];
            ps_chunk_text(cs, chunk_at(cs, x->chunk), text, sizeof text);
            ps_error_prefix("moving chunk %s %s: ", text, x->up ? "up" : "down");
            result = rc;
            break;
        }
    }
    return result;
}

/* -- making room -------------------------------------------------------------------------------------------------- */
int fail_no_room(ps_chunks *cs, int t, const chunk *c, int64_t nbytes)
{
    const tier *at = &cs->tiers[t];
    int64_t pinned = 0, other = tier_other(cs, t), left = at->budget - at->used - other;
    bool last = t + 1 >= cs->n_tiers;
    ps_memory_info info;
    if (!is_disk(cs, t) && !cs->step->dry) cs->plain->table->refused(cs->plain, at->device);
    char text[160], idle[128] = "", below[160] = ", and there is no tier below to move chunks to";
    for (int32_t i = 0; i < cs->n_chunks; i++) if (cs->chunks[i].pins > 0) pinned += cs->chunks[i].nbytes;
    if (c) ps_chunk_text(cs, c, text, sizeof text);
    if (at->budget == 0)
        return ps_fail_room(PS_ENOMEM, PS_SUB_NONE, t, nbytes, 0,
                            "%s%s: %s wanted on tier %s, but this machine has no more memory (chunks have %s); "
                            "set memory.%s and memory.disk so that chunks can move out",
                            c ? "chunk " : "", c ? text : "a tensor", bytes_text(nbytes).s, at->name,
                            bytes_text(at->used).s, at->name);
    if (!is_disk(cs, t) && tier_room(cs, t) >= nbytes)      /* the budget has room, but the machine has none */
        return ps_fail_room(PS_ENOMEM, PS_SUB_NONE, t, nbytes, at->be->bytes_available(at->be),
                            "%s%s: %s wanted on tier %s, whose budget of %s has room for it, but only %s "
                            "are left %s%s; free some memory, or set memory.%s lower, so that chunks move out earlier",
                            c ? "chunk " : "", c ? text : "a tensor", bytes_text(nbytes).s, at->name,
                            bytes_text(at->budget).s, bytes_text(at->be->bytes_available(at->be)).s,
                            at->be->is_host ? ps_host_limited_by() : "on the device",
                            at->be->is_host ? ", and 64 MiB have to stay free" : "", at->name);
    if (!last) {
        int64_t room = tier_room(cs, t + 1);
        below[0] = 0;
        if (room < nbytes)
            snprintf(below, sizeof below, ", and tier %s below has %s free of %s", cs->tiers[t + 1].name,
                     bytes_text(room > 0 ? room : 0).s, bytes_text(cs->tiers[t + 1].budget).s);
    }
    if (!is_disk(cs, t) && cs->plain->table->info(cs->plain, at->device, &info) == 0 && other - info.used > other / 2
        && other > at->budget / 2)
        snprintf(idle, sizeof idle, ", of which %s are free and cannot be given back while tensors made earlier lie "
                 "among them", bytes_text(other - info.used).s);
    return ps_fail_room(PS_ENOMEM, PS_SUB_NONE, t, nbytes, left,
                        "%s%s: %s wanted on tier %s, but only %s of its budget of %s are free (chunks %s, of which %s "
                        "in use; other tensors %s%s)%s; raise memory.%s%s%s%s, or use a smaller batch, recompute or a "
                        "smaller chunk_size", c ? "chunk " : "", c ? text : "a tensor", bytes_text(nbytes).s, at->name,
                        bytes_text(left > 0 ? left : 0).s, bytes_text(at->budget).s, bytes_text(at->used).s,
                        bytes_text(pinned).s, bytes_text(other).s, idle, below, at->name,
                        last ? ", set memory.disk" : below[0] ? " or memory." : "",
                        last || !below[0] ? "" : cs->tiers[t + 1].name,
                        !last && below[0] && is_disk(cs, t + 1) ? ".limit" : "");
}

/* A moment that is after all known uses. The number is small enough that a double can also represent the number plus
 * 0.5, which pick() needs. */
static const int64_t NO_USE_KNOWN = 1000000000000000;

/* Returns the policy's rank of a chunk when there is no plan. A chunk whose next use is unknown is assumed to be used
 * after all chunks whose next use is known. Among the chunks whose next use is unknown, the least recently used chunk
 * is assumed to be used last. */
static double rank_of(ps_chunks *cs, const chunk *c)
{
    int64_t next = next_use_of(cs, c);
    ps_victim v = { .next = (double)(next == INT64_MAX ? NO_USE_KNOWN - c->last_use : next),
                    .last = (double)c->last_use, .taken = (double)c->arrived };
    return ps_policy_row(cs->config.policy)->rank(&v);
}

static bool movable(const ps_chunks *cs, const chunk *c, int t, const chunk *keep)
{
    return !c->dead && c != keep && c->slot[t] && c->pins == 0 && !c->transfer && !(c->resident && t == 0);
}

/* Returns true if tier t is host memory and the last tier, so that a chunk can leave tier t only by moving up. */
static bool only_up(const ps_chunks *cs, int t) { return t > 0 && t + 1 == cs->n_tiers && !is_disk(cs, t); }

/* Returns true if c's copy on tier t can be dropped, because tier t - 1 also has a copy of c. */
static bool doubled(const chunk *c, int t, const chunk *keep)
{
    return t > 0 && !c->dead && c != keep && c->slot[t] && c->tier_pins[t] == 0 && !c->transfer && has_copy(c, t - 1);
}

/* Returns true if c can leave tier t without being copied, because a lower tier has the contents of c, or because the
 * slot of c on tier t has no contents. */
static bool has_lower(const ps_chunks *cs, const chunk *c, int t)
{
    for (int lower = t + 1; lower < cs->n_tiers; lower++) if (has_copy(c, lower)) return true;
    return !has_copy(c, t);
}

/* Returns true if `nbytes` bytes can be freed on tier t. Counts the chunks that could move to other tiers. */
static bool can_free(ps_chunks *cs, int t, int64_t nbytes, const chunk *keep)
{
    int64_t room = tier_room(cs, t), down = 0;
    if (room >= nbytes) return true;
    if (is_disk(cs, t)) {
        for (int32_t i = 0; i < cs->n_chunks; i++)
            if (can_give_extent(&cs->chunks[i], t, true)) room += cs->chunks[i].nbytes;
        return room >= nbytes;
    }
    int64_t above = only_up(cs, t) ? tier_room(cs, t - 1) : 0;
    for (int32_t i = 0; i < cs->n_chunks && room < nbytes; i++) {
        const chunk *c = &cs->chunks[i];
        if ((only_up(cs, t) || c->pins > 0) && doubled(c, t, keep)) {
            room += c->nbytes;
            continue;
        }
        if (!movable(cs, c, t, keep)) continue;
        if (only_up(cs, t) && has_copy(c, t)) {
            if (c->nbytes > above) continue;
            above -= c->nbytes;
            room += c->nbytes;
            continue;
        }
        if (!has_lower(cs, c, t)) {
            if (t + 1 >= cs->n_tiers) continue;
            if (!(is_disk(cs, t + 1) && c->extent >= 0)) down += c->nbytes;
        }
        room += c->nbytes;
    }
    return room >= nbytes && (down == 0 || can_free(cs, t + 1, down, keep));
}

static chunk *pick(ps_chunks *cs, int t, const chunk *keep)
{
    chunk *best = NULL;
    double best_score = 0;
    for (int32_t i = 0; i < cs->n_chunks; i++) {
        chunk *c = &cs->chunks[i];
        if (!movable(cs, c, t, keep) || (t + 1 >= cs->n_tiers && !has_lower(cs, c, t))) continue;
        double score = rank_of(cs, c) + (has_lower(cs, c, t) ? 0.5 : 0);
        if (!best || score > best_score) best = c, best_score = score;
    }
    return best;
}

/* Returns the number of bytes that copies in progress will free on tier t. */
static int64_t coming(const ps_chunks *cs, int t)
{
    int64_t sum = 0;
    for (const transfer *x = cs->transfers; x; x = x->next)
        if (x->level == t && !x->up && x->heir < 0) sum += cs->chunks[x->chunk].nbytes;
    return sum;
}

/* Makes room on tier t, which is the last tier. First drops copies of chunks that tier t - 1 also has, starting with
 * the copies of residents. Then moves chunks up while there is room above, starting with the highest rank. */
static int yield_up(ps_chunks *cs, int t, int64_t nbytes, const chunk *keep)
{
    for (int others = 0; others < 2; others++)
        for (int32_t i = 0; i < cs->n_chunks && tier_room(cs, t) < nbytes; i++) {
            chunk *c = chunk_at(cs, i);
            if ((others || c->resident) && doubled(c, t, keep)) slot_drop(cs, c, t);
        }
    while (tier_room(cs, t) < nbytes) {
        chunk *best = NULL;
        for (int32_t i = 0; i < cs->n_chunks; i++) {
            chunk *c = chunk_at(cs, i);
            if (!movable(cs, c, t, keep) || !has_copy(c, t) || c->nbytes > tier_room(cs, t - 1)) continue;
            if (!best || rank_of(cs, c) > rank_of(cs, best)) best = c;
        }
        if (!best) return 0;
        int rc = slot_take(cs, best, t - 1);
        if (rc != 0) return rc < 0 ? rc : 0;
        rc = begin(cs, best, t - 1, true);
        if (rc < 0) {
            slot_drop(cs, best, t - 1);
            return rc;
        }
        PS_TRY(transfers_poll(cs, true, best));
        slot_drop(cs, best, t);
    }
    return 0;
}

int make_room(ps_chunks *cs, int t, int64_t nbytes, const chunk *keep)
{
    PS_TRY(transfers_poll(cs, false, NULL));
    while (tier_room(cs, t) < nbytes && cs->transfers) PS_TRY(transfers_poll(cs, true, NULL));
    if (tier_room(cs, t) < nbytes && !is_disk(cs, t) && tier_other(cs, t) > cs->tiers[t].planned_other)
        cs->plain->table->trim(cs->plain, cs->tiers[t].device, true);   /* returns freed memory to the system */
    if (tier_room(cs, t) >= nbytes) return 0;
    if (!can_free(cs, t, nbytes, keep)) return fail_no_room(cs, t, keep, nbytes);
    if (only_up(cs, t)) PS_TRY(yield_up(cs, t, nbytes, keep));
    ps_error_kept full = { 0 };                           /* the error of a lower tier that has no room */
    while (tier_room(cs, t) + coming(cs, t) < nbytes) {
        chunk *c = pick(cs, t, keep);
        if (!c) break;
        int64_t before = tier_room(cs, t);
        int rc = begin_evict(cs, c, t);
        if (rc == 1 && t + 1 < cs->n_tiers) {
            rc = make_room(cs, t + 1, c->nbytes, c);
            if (rc == 0) rc = begin_evict(cs, c, t);
        }
        if (rc == PS_ENOMEM || rc == PS_ENOSPC) ps_error_keep(&full);
        else if (rc < 0) return rc;
        if (rc != 0) break;
        if (!c->transfer && tier_room(cs, t) <= before) break;
    }
    /* pick() skips pinned chunks. The copies of pinned chunks on this tier can be dropped if tier t - 1 also has
     * copies of these chunks. */
    for (int32_t i = 0; i < cs->n_chunks && tier_room(cs, t) + coming(cs, t) < nbytes; i++) {
        chunk *c = chunk_at(cs, i);
        if (c->pins > 0 && doubled(c, t, keep)) slot_drop(cs, c, t);
    }
    while (tier_room(cs, t) < nbytes && cs->transfers) PS_TRY(transfers_poll(cs, true, NULL));
    if (tier_room(cs, t) >= nbytes) return 0;
    return full.code ? ps_error_again(&full) : fail_no_room(cs, t, keep, nbytes);
}

static int take_or_make(ps_chunks *cs, chunk *c, int t)
{
    int rc = slot_take(cs, c, t);
    if (rc != 1) return rc;
    int32_t id = c->id;
    PS_TRY(make_room(cs, t, c->nbytes, c));
    rc = slot_take(cs, chunk_at(cs, id), t);
    return rc == 1 ? fail_no_room(cs, t, c, c->nbytes) : rc;
}

/* Fills a slot with zeros. Uses the backend if the host cannot access the memory. */
static int clear_slot(const tier *at, char *p, int64_t nbytes)
{
    static const char zeros[64 << 10];
    ps_backend *be = at->be;
    if (be->pretends) return 0;
    if (be->is_host || !be->copy_in) {
        memset(p, 0, (size_t)nbytes);
        return 0;
    }
    if (be->clear) return be->clear(be, p, (size_t)nbytes);
    for (int64_t n; nbytes > 0; p += n, nbytes -= n) {
        n = nbytes < (int64_t)sizeof zeros ? nbytes : (int64_t)sizeof zeros;
        PS_TRY(be->copy_in(be, p, zeros, (size_t)n));
    }
    return 0;
}

int bring(ps_chunks *cs, chunk *c, int t)
{
    while (!has_copy(c, t)) {
        if (c->transfer) {
            PS_TRY(transfers_poll(cs, true, c));
            continue;
        }
        if (c->valid == 0) {                              /* there are no contents yet, so the chunk reads as zeros */
            PS_TRY(take_or_make(cs, c, t));
            int rc = c->ended ? 0 : clear_slot(&cs->tiers[t], c->slot[t], c->nbytes);
            if (rc < 0) {
                slot_drop(cs, c, t);
                return rc;
            }
            c->valid = (uint8_t)(1u << t);
            break;
        }
        int from = 0;
        cs->stats.unplanned++;
        while (!has_copy(c, from)) from++;                /* finds the fastest tier that has the contents */
        int rc;
        if (from < t) {                                   /* each copy moves the chunk by one tier */
            PS_TRY(take_or_make(cs, c, from + 1));
            rc = begin(cs, c, from, false);
        } else {
            while (from > t + 1 && has_copy(c, from - 1)) from--;
            PS_TRY(take_or_make(cs, c, from - 1));
            if (!has_copy(c, from)) continue;             /* make_room has moved c down */
            rc = begin(cs, c, from - 1, true);
            if (rc < 0) slot_drop(cs, c, from - 1);
        }
        if (rc < 0) return rc;
        PS_TRY(transfers_poll(cs, true, c));
    }
    /* The eviction of c is now pointless. Waits until the eviction has ended. */
    if (c->transfer) PS_TRY(transfers_poll(cs, true, c));
    return has_copy(c, t) ? 0 : bring(cs, c, t);
}

int bring_blank(ps_chunks *cs, chunk *c, int t)
{
    while (c->transfer) PS_TRY(transfers_poll(cs, true, c));
    if (has_copy(c, t)) return 0;
    PS_TRY(take_or_make(cs, c, t));
    c->valid = (uint8_t)(c->valid | 1u << t);
    return 0;
}
