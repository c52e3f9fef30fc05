/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements chunks, the storages in them, and pins. A pinned chunk does not move, and has a valid copy on
 * the tier where it is pinned. After a write, exactly one copy is valid. Only set_state changes the state of a tensor
 * in a chunk. */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/grow.h"
#include "base/record.h"
#include "chunk/impl.h"
#include "chunk/policy.h"

/* -- kinds --------------------------------------------------------------------------------------------------------- */
enum { KIND_NAME = 32 };
static char kind_names[PS_KIND_COUNT][KIND_NAME] = { "param", "param_fp32", "grad" };
static _Atomic int n_kinds = PS_KIND_STATE;

const char *ps_kind_name(int kind) { return kind >= 0 && kind < n_kinds ? kind_names[kind] : NULL; }

int ps_kind_state(const char *name)
{
    int n = n_kinds;
    for (int i = PS_KIND_STATE; i < n; i++) if (strcmp(kind_names[i], name) == 0) return i;
    if (!name[0] || strlen(name) >= KIND_NAME)
        return ps_fail(PS_EINVAL, "the name of a state, '%s', has %zu characters; it must have 1 to %d", name,
                       strlen(name), KIND_NAME - 1);
    if (n == PS_KIND_COUNT)
        return ps_fail(PS_EINVAL, "state '%s' would be kind %d of chunks, but at most %d kinds are supported", name, n,
                       PS_KIND_COUNT);
    snprintf(kind_names[n], KIND_NAME, "%s", name);
    n_kinds = n + 1;                             /* set last, because other threads read the names below n_kinds */
    return n;
}

int tier_of(const ps_chunks *cs, int device)
{
    for (int t = 0; t < cs->n_tiers; t++)
        if (cs->tiers[t].be && cs->tiers[t].device == device) return t;
    return -1;
}

int ps_chunk_text(const ps_chunks *cs, const chunk *c, char *buf, size_t size)
{
    const char *name = c->n_members ? c->members[0]->name : NULL;
    if (name && c->n_members > 1)
        return snprintf(buf, size, "%s[%d] (%s and %d more)", ps_kind_name(c->kind), c->index, name, c->n_members - 1);
    if (name) return snprintf(buf, size, "%s[%d] (%s)", ps_kind_name(c->kind), c->index, name);
    return snprintf(buf, size, "%s[%d] (%d tensors)", ps_kind_name(c->kind), c->index, c->n_members);
}

/* -- states -------------------------------------------------------------------------------------------------------- */
/* For each state of a tensor, the set of states that may follow it, with one bit per state.
 * FREE: the tensor has no contents.
 * COMPUTE: the tensor is pinned.
 * HOLD: the tensor waits for its next use.
 * HOLD_AFTER_FWD, HOLD_AFTER_BWD: like HOLD, after a use in a forward or in a backward. */
static const uint8_t legal[PS_TS_COUNT] = {
    [PS_TS_FREE] = 1 << PS_TS_COMPUTE | 1 << PS_TS_HOLD,
    [PS_TS_COMPUTE] = 1 << PS_TS_HOLD | 1 << PS_TS_HOLD_AFTER_FWD | 1 << PS_TS_HOLD_AFTER_BWD | 1 << PS_TS_FREE,
    [PS_TS_HOLD] = 1 << PS_TS_COMPUTE | 1 << PS_TS_FREE,
    [PS_TS_HOLD_AFTER_FWD] = 1 << PS_TS_COMPUTE | 1 << PS_TS_HOLD | 1 << PS_TS_FREE,
    [PS_TS_HOLD_AFTER_BWD] = 1 << PS_TS_COMPUTE | 1 << PS_TS_HOLD | 1 << PS_TS_FREE,
};

static int set_state(chunk *c, member *m, int to)
{
    if (m->state == to) return 0;
    if (!(legal[m->state] >> to & 1))
        return ps_fail(PS_ESTATE, "internal error: a tensor of chunk %s[%d] cannot change from state %d to state %d",
                       ps_kind_name(c->kind), c->index, m->state, to);
    c->count[m->state]--;
    c->count[to]++;
    m->state = (int8_t)to;
    return 0;
}

static int chunk_state(const chunk *c)
{
    static const int8_t order[] = { PS_TS_COMPUTE, PS_TS_HOLD, PS_TS_HOLD_AFTER_FWD, PS_TS_HOLD_AFTER_BWD };
    for (size_t i = 0; i < sizeof order; i++) if (c->count[order[i]] > 0) return order[i];
    return PS_TS_FREE;
}

void ps_chunks_pass(ps_chunks *cs)
{
    int kind = cs->step->is.now.kind;
    if (kind != PS_ACT_FORWARD && kind != PS_ACT_NONE) return;
    for (int32_t i = 0; i < cs->n_chunks; i++) {         /* a new pass forgets the uses of the previous pass */
        chunk *c = &cs->chunks[i];
        for (int32_t k = 0; k < c->n_members; k++)
            if (c->members[k]->state == PS_TS_HOLD_AFTER_FWD || c->members[k]->state == PS_TS_HOLD_AFTER_BWD)
                set_state(c, c->members[k], PS_TS_HOLD);
    }
}

/* -- pins ---------------------------------------------------------------------------------------------------------- */
static void only_valid(ps_chunks *cs, chunk *c, int t)
{
    for (int other = 0; other < cs->n_tiers; other++)
        if (other != t && has_copy(c, other) && c->slot[other]) slot_drop(cs, c, other);
    c->valid = (uint8_t)(1u << t);
    source_drop(c);
}

/* Used by tests. Evicts random chunks, often including c, and brings c back to tier t. The address of c then
 * changes. */
static int stress(ps_chunks *cs, chunk *c, int t)
{
    if (c->pins > 0 || c->transfer || c->valid == 0) return 0;
    PS_TRY(ps_chunks_settle(cs));
    for (int32_t i = 0; i < cs->n_chunks; i++) {
        chunk *other = &cs->chunks[i];
        cs->random = cs->random * 1664525u + 1013904223u;
        int from = (int)(cs->random >> 30) % cs->n_tiers;
        if (other->pins > 0 || other->transfer || is_disk(cs, from) || !has_copy(other, from)) continue;
        if (other->resident && from == 0) continue;
        if (from + 1 >= cs->n_tiers || (other != c && (cs->random >> 16 & 3))) continue;
        int rc = begin_evict(cs, other, from);
        if (rc < 0) return rc;
        PS_TRY(ps_chunks_settle(cs));
    }
    return bring(cs, c, t);
}

/* Pins chunk c on tier t, and stores its address in *out. If `contents` is false, the caller does not need the
 * contents of c, so they are not fetched. */
static int chunk_pin(ps_chunks *cs, chunk *c, int t, unsigned access, bool contents, char **out)
{
    if (t < 0) return ps_fail(PS_EINVAL, "a parameter in chunks was requested on a device that is not a tier of its "
                                         "engine");
    note_use(cs, c, t, access & PS_WRITE);
    if (cs->step->dry) {
        *out = (char *)((uintptr_t)1 << 60);                /* any address will do, because a dry run reads no bytes */
        return 0;
    }
    PS_TRY(advance(cs));
    PS_TRY(contents ? bring(cs, c, t) : bring_blank(cs, c, t));
    if (cs->config.stress && contents) PS_TRY(stress(cs, c, t));
    if (access & PS_WRITE) {
        only_valid(cs, c, t);
        c->writing = true;
    }
    c->pins++;
    c->tier_pins[t]++;
    *out = c->slot[t];
    return 0;
}

static void chunk_unpin(ps_chunks *cs, chunk *c, int t)
{
    if (cs->step->dry) return;
    c->tier_pins[t]--;
    if (--c->pins > 0) return;
    c->writing = false;
    done_with(cs, c, t);
}

static int chunks_pin(ps_keeper *keeper, ps_storage *s, int device, unsigned access, void **out)
{
    ps_chunks *cs = (ps_chunks *)keeper;
    member *m = s->block;
    if (!m) { *out = NULL; s->pins++; return 0; }             /* a tensor without elements has no bytes */
    chunk *c = chunk_at(cs, m->chunk);
    char *base;
    int rc = chunk_pin(cs, c, tier_of(cs, device), access, true, &base);
    if (rc < 0) {
        char text[160];
        ps_chunk_text(cs, c, text, sizeof text);
        ps_error_prefix(m->name ? "%s, for tensor %s: " : "%s: ", text, m->name);
        return rc;
    }
    *out = base + m->offset;
    if (cs->step->dry) return 0;
    s->pins++;
    if (cs->step->suspended && m->state != PS_TS_FREE) return 0;     /* a paused script does not change states */
    set_state(c, m, PS_TS_COMPUTE);                          /* legal from every state */
    return 0;
}

static void chunks_unpin(ps_keeper *keeper, ps_storage *s, int device)
{
    ps_chunks *cs = (ps_chunks *)keeper;
    member *m = s->block;
    if (!m) { s->pins--; return; }
    chunk *c = chunk_at(cs, m->chunk);
    int kind = cs->step->is.now.kind;
    if (!cs->step->dry && --s->pins == 0 && m->state == PS_TS_COMPUTE)
        set_state(c, m, kind == PS_ACT_FORWARD ? PS_TS_HOLD_AFTER_FWD
                        : kind == PS_ACT_BACKWARD ? PS_TS_HOLD_AFTER_BWD : PS_TS_HOLD);
    chunk_unpin(cs, c, tier_of(cs, device));
}

/* -- whole chunks ------------------------------------------------------------------------------------------------- */
int ps_chunk_pin(ps_chunks *cs, int32_t id, int device, unsigned access, void **out)
{
    chunk *c = chunk_at(cs, id);
    int t = tier_of(cs, device);
    char *base;
    int rc = chunk_pin(cs, c, t, access, access & PS_READ, &base);
    if (rc < 0) {
        char text[160];
        ps_chunk_text(cs, c, text, sizeof text);
        ps_error_prefix("%s, for an exchange with other ranks: ", text);
        return rc;
    }
    *out = base;
    c->held_tier = (int8_t)t;
    if (c->held++ == 0) cs->held[cs->n_held++] = id;
    return 0;
}

void ps_chunk_unpin(ps_chunks *cs, int32_t id, int device)
{
    chunk *c = chunk_at(cs, id);
    if (--c->held == 0) {
        int32_t at = 0;
        while (cs->held[at] != id) at++;
        cs->held[at] = cs->held[--cs->n_held];
    }
    chunk_unpin(cs, c, tier_of(cs, device));
}

int ps_chunk_end(ps_chunks *cs, int32_t id)
{
    chunk *c = chunk_at(cs, id);
    if (cs->n_tiers == 1 || c->pins > 0 || c->resident) return 0;
    note_end(cs, c);
    if (cs->step->dry) return 0;
    while (c->transfer) PS_TRY(transfers_poll(cs, true, c));
    for (int t = 0; t < cs->n_tiers; t++) slot_drop(cs, c, t);
    source_drop(c);
    for (int32_t k = 0; k < c->n_members; k++) PS_TRY(set_state(c, c->members[k], PS_TS_FREE));
    c->valid = 0;
    c->ended = true;
    return 0;
}

void ps_chunks_tick(ps_chunks *cs)
{
    cs->fresh = true;
    if (ps_record_on()) record_tiers(cs);
}

/* -- memory outside chunks ---------------------------------------------------------------------------------------- */
/* Limits the arena of tier t to the part of the budget that chunks do not use. The limit is at least 1 byte, because
 * 0 would mean no limit. */
static void limit_arena(ps_chunks *cs, int t)
{
    tier *at = &cs->tiers[t];
    if (at->budget == 0) return;
    int64_t left = at->budget - at->used - at->cached_nbytes;
    cs->plain->table->set_hold_limit(cs->plain, at->device, left > 1 ? left : 1);
}

/* Calls `once`, which allocates from the plain manager. If there is no room, returns unused memory to the system and
 * calls `once` again. If there is still no room, moves chunks down and calls `once` a last time. */
static int with_room(ps_chunks *cs, int device, int64_t nbytes, int (*once)(ps_chunks *, void *), void *arg)
{
    int t = tier_of(cs, device);
    if (t < 0 || cs->step->dry) return once(cs, arg);
    limit_arena(cs, t);
    int rc = once(cs, arg);
    if (rc != PS_ENOMEM) goto done;
    cs->plain->table->trim(cs->plain, device, true);
    cache_clear(cs, t, nbytes + 4096);
    limit_arena(cs, t);
    rc = once(cs, arg);
    if (rc != PS_ENOMEM) goto done;
    rc = transfers_poll(cs, false, NULL);
    int64_t planned = cs->tiers[t].planned_other;
    cs->tiers[t].planned_other = 0;                      /* the plan reserved this memory for tensors outside chunks */
    if (rc == 0) rc = make_room(cs, t, nbytes + 4096, NULL);
    cs->tiers[t].planned_other = planned;
    if (rc < 0) goto done;
    cache_clear(cs, t, nbytes + 4096);
    limit_arena(cs, t);
    rc = once(cs, arg);
done:;
    int64_t total = cs->tiers[t].used + tier_other(cs, t);
    if (total > cs->tiers[t].peak) cs->tiers[t].peak = total;
    return rc;
}

static int alloc_once(ps_chunks *cs, void *arg) { return cs->plain->table->alloc(cs->plain, arg); }

static int chunks_alloc(ps_mem *mem, ps_storage *s)
{
    return with_room((ps_chunks *)mem, s->device, s->nbytes, alloc_once, s);
}

typedef struct scratch_request { int device; int64_t nbytes; void **handle, **out; } scratch_request;

static int scratch_once(ps_chunks *cs, void *arg)
{
    scratch_request *r = arg;
    return cs->plain->table->scratch(cs->plain, r->device, r->nbytes, r->handle, r->out);
}

static int chunks_scratch(ps_mem *mem, int device, int64_t nbytes, void **handle, void **out)
{
    scratch_request r = { device, nbytes, handle, out };
    PS_TRY(with_room((ps_chunks *)mem, device, nbytes, scratch_once, &r));
    if (ps_record_on()) record_tiers((ps_chunks *)mem);
    return 0;
}

static void chunks_scratch_free(ps_mem *mem, int device, void *handle)
{
    ps_mem *plain = ((ps_chunks *)mem)->plain;
    plain->table->scratch_free(plain, device, handle);
}

static int chunks_info(ps_mem *mem, int device, ps_memory_info *out)
{
    ps_chunks *cs = (ps_chunks *)mem;
    PS_TRY(cs->plain->table->info(cs->plain, device, out));
    int t = tier_of(cs, device);
    if (t < 0) return 0;
    tier *at = &cs->tiers[t];
    out->used += at->used;
    out->reserved += at->used + at->cached_nbytes;
    if (at->peak > out->peak) out->peak = at->peak;
    out->limit = at->budget;
    return 0;
}

static int chunks_set_limit(ps_mem *mem, int device, int64_t nbytes)
{
    ps_chunks *cs = (ps_chunks *)mem;
    int t = tier_of(cs, device);
    if (t < 0) return cs->plain->table->set_limit(cs->plain, device, nbytes);
    return ps_fail(PS_ESTATE, "the limit of this device is the budget of its chunks; set memory.%s in the "
                   "configuration of the engine", cs->tiers[t].name);
}

static void chunks_reset_peak(ps_mem *mem, int device)
{
    ps_chunks *cs = (ps_chunks *)mem;
    cs->plain->table->reset_peak(cs->plain, device);
    int t = tier_of(cs, device);
    if (t >= 0) cs->tiers[t].peak = cs->tiers[t].used + tier_other(cs, t);
}

/* -- chunks and their storages ------------------------------------------------------------------------------------ */
int ps_chunk_new(ps_chunks *cs, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *id)
{
    if (nbytes <= 0 || nbytes % PS_DIRECT_ALIGN)
        return ps_fail(PS_EINVAL, "a chunk cannot have %lld bytes; its size must be a positive multiple of %d",
                       (long long)nbytes, PS_DIRECT_ALIGN);
    int32_t at = cs->first_dead;
    while (at < cs->n_chunks && !cs->chunks[at].dead) at++;
    int32_t back = cs->capacity, held = cs->capacity;    /* the three arrays have the same capacity */
    PS_TRY(ps_grow(cs->back, back, at + 1));
    PS_TRY(ps_grow(cs->held, held, at + 1));
    PS_TRY(ps_grow(cs->chunks, cs->capacity, at + 1));
    if (at == cs->n_chunks) cs->n_chunks++;
    cs->first_dead = at + 1;
    cs->chunks[at] = (chunk){ .id = at, .kind = kind, .group = group, .index = index, .dtype = dtype, .nbytes = nbytes,
                              .extent = -1, .noted = -1, .next_in_trace = -1, .first_in_trace = -1, .last_use = -1 };
    *id = at;
    return 0;
}

static void chunk_bury(ps_chunks *cs, chunk *c)
{
    while (c->transfer) transfers_poll(cs, true, c);      /* ignores errors, because the copy ends in either case */
    for (int t = 0; t < cs->n_tiers; t++) if (c->slot[t]) slot_drop(cs, c, t);
    if (c->extent >= 0) ps_disk_extent_free(cs->disk, c->extent, c->nbytes);
    source_drop(c);
    c->extent = -1;
    c->valid = 0;
    c->dead = true;
    if (c->id < cs->first_dead) cs->first_dead = c->id;
    ps_free(c->members);
    c->members = NULL;
    c->members_capacity = 0;
    cache_forget(cs, c->nbytes);
    step_off(cs);
}

/* Returns the number of c's members before `offset`. */
static int32_t members_before(const chunk *c, int64_t offset)
{
    int32_t low = 0, high = c->n_members;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (c->members[middle]->offset < offset) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Adds a member to its chunk. check_place has already made room for the pointer. */
static void member_link(chunk *c, member *m)
{
    int32_t at = members_before(c, m->offset);
    memmove(&c->members[at + 1], &c->members[at], (size_t)(c->n_members - at) * sizeof *c->members);
    c->members[at] = m;
    m->chunk = c->id;
    c->n_members++;
    c->count[m->state]++;
    c->used_nbytes += m->nbytes;
}

static void member_unlink(ps_chunks *cs, member *m, bool last_goes)
{
    chunk *c = chunk_at(cs, m->chunk);
    int32_t at = members_before(c, m->offset);
    c->n_members--;
    memmove(&c->members[at], &c->members[at + 1], (size_t)(c->n_members - at) * sizeof *c->members);
    c->count[m->state]--;
    c->used_nbytes -= m->nbytes;
    if (c->n_members == 0 && last_goes && !cs->closing) chunk_bury(cs, c);
}

/* Checks that no member of the chunk uses a byte from offset to offset + nbytes - 1. Makes room for one more member
 * in the array of members. */
static int check_place(ps_chunks *cs, int32_t chunk_id, int64_t offset, int64_t nbytes)
{
    if (chunk_id < 0 || chunk_id >= cs->n_chunks || cs->chunks[chunk_id].dead)
        return ps_fail(PS_EINVAL, "there is no chunk %d", chunk_id);
    chunk *c = chunk_at(cs, chunk_id);
    if (offset < 0 || offset % 256 || nbytes <= 0 || offset + nbytes > c->nbytes)
        return ps_fail(PS_EINVAL, "bytes %lld to %lld do not fit chunk %d of %lld bytes", (long long)offset,
                       (long long)(offset + nbytes), chunk_id, (long long)c->nbytes);
    int32_t at = members_before(c, offset);
    const member *before = at > 0 ? c->members[at - 1] : NULL, *behind = at < c->n_members ? c->members[at] : NULL;
    if ((before && before->offset + before->nbytes > offset) || (behind && offset + nbytes > behind->offset))
        return ps_fail(PS_EINVAL, "two tensors overlap in chunk %d", chunk_id);
    return ps_grow(c->members, c->members_capacity, c->n_members + 1);
}

static member *member_new(ps_storage *s, int64_t offset, const char *name)
{
    member *m = ps_alloc0(sizeof *m);
    char *copy = m && name ? ps_strdup(name) : NULL;
    if (!m || (name && !copy)) {
        ps_free(m);
        ps_fail_nomem(sizeof *m);
        return NULL;
    }
    *m = (member){ .storage = s, .name = copy, .offset = offset, .nbytes = s->nbytes, .state = PS_TS_FREE };
    return m;
}

int ps_chunk_storage_new(ps_chunks *cs, int32_t chunk_id, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out)
{
    PS_TRY(check_place(cs, chunk_id, offset, nbytes));
    ps_storage *s = ps_alloc(sizeof *s);
    if (!s) return ps_fail_nomem(sizeof *s);
    *s = (ps_storage){ .keeper = &cs->base.keeper, .nbytes = nbytes, .device = cs->tiers[0].device, .refs = 1,
                       .bytes.kept = true };
    member *m = member_new(s, offset, name);
    if (!m) {
        ps_free(s);
        return PS_ENOMEM;
    }
    s->block = m;
    member_link(chunk_at(cs, chunk_id), m);
    *out = s;
    return 0;
}

void ps_chunk_storage_undo(ps_chunks *cs, ps_storage *s)
{
    member *m = s->block;
    member_unlink(cs, m, false);
    ps_free(m->name);
    ps_free(m);
    ps_free(s);
}

/* Copies the bytes of s to its new position `to`. */
static int copy_into(ps_chunks *cs, ps_storage *s, ps_storage *to)
{
    int host = cs->tiers[tier_of(cs, cs->config.host)].device;
    bool from_chunk = ps_storage_is_of(s, &cs->base);
    void *src, *dst;
    if (from_chunk && chunk_at(cs, ((member *)s->block)->chunk)->valid == 0) return 0;   /* nothing to copy */
    int from_device = from_chunk ? host : s->device;
    PS_TRY(chunks_pin(&cs->base.keeper, to, host, PS_WRITE, &dst));
    int rc = ps_storage_pin(s, from_device, PS_READ, &src);
    if (rc == 0) {
        ps_backend *be = from_chunk ? NULL : cs->tiers[tier_of(cs, s->device)].be;
        if (cs->tiers[0].be->pretends) rc = 0;
        /* The loan ends now. source_copy also drops the pages of the mapped file. */
        else if (ps_storage_is_lent(s)) source_copy(dst, src, s->nbytes);
        else if (be && be->copy_out) rc = be->copy_out(be, dst, src, (size_t)s->nbytes);
        else memcpy(dst, src, (size_t)s->nbytes);
        ps_storage_unpin(s, from_device);
    }
    chunks_unpin(&cs->base.keeper, to, host);
    return rc;
}

int ps_chunk_adopt(ps_chunks *cs, ps_storage *s, int32_t chunk_id, int64_t offset, const char *name, bool stays)
{
    if (tier_of(cs, s->device) < 0 || !s->block)
        return ps_fail(PS_EINVAL, "only a tensor that has bytes, on a device of this engine, can be moved into a "
                       "chunk");
    if (s->pins > 0) return ps_fail(PS_ESTATE, "a tensor that is in use cannot be moved into a chunk");
    PS_TRY(check_place(cs, chunk_id, offset, s->nbytes));
    ps_storage to = { .keeper = &cs->base.keeper, .nbytes = s->nbytes, .device = s->device, .refs = 1 };
    if (!name && ps_storage_is_of(s, &cs->base)) name = ((member *)s->block)->name;
    member *m = member_new(&to, offset, name);
    if (!m) return PS_ENOMEM;
    to.block = m;
    member_link(chunk_at(cs, chunk_id), m);
    /* A chunk with group < 0 is a staging chunk. */
    int rc = stays || chunk_at(cs, chunk_id)->group < 0 ? source_adopt(cs, s, m) : 0;
    if (rc == 0) rc = copy_into(cs, s, &to);
    if (rc < 0) {
        member_unlink(cs, m, false);
        ps_free(m->name);
        ps_free(m);
        return rc;
    }
    ps_storage_free(s);
    s->keeper = &cs->base.keeper;
    s->block = m;
    s->bytes.kept = true;
    m->storage = s;
    return 0;
}

static void chunks_free(ps_keeper *keeper, ps_storage *s)
{
    member *m = s->block;
    s->block = NULL;
    member_unlink((ps_chunks *)keeper, m, true);
    ps_free(m->name);
    ps_free(m);
}

void ps_chunk_storage_hand_on(ps_storage *s, ps_storage *to)
{
    member *m = s->block;
    *to = (ps_storage){ .keeper = s->keeper, .block = m, .nbytes = s->nbytes, .device = s->device, .refs = 1,
                        .bytes.kept = true };
    m->storage = to;
    s->block = NULL;
}

int32_t ps_storage_chunk(const ps_chunks *cs, const ps_storage *s)
{
    return ps_storage_is_of(s, &cs->base) && s->block ? ((const member *)s->block)->chunk : -1;
}

/* -- queries ------------------------------------------------------------------------------------------------------ */
int ps_chunk_count(const ps_chunks *cs) { return cs->n_chunks; }

void ps_chunk_get(const ps_chunks *cs, int32_t id, ps_chunk_info *out)
{
    const chunk *c = &cs->chunks[id];
    int64_t next = next_use_of(cs, c);
    *out = (ps_chunk_info){ .kind = c->kind, .group = c->group, .index = c->index, .dtype = c->dtype,
                            .state = c->dead ? PS_TS_FREE : chunk_state(c), .pins = c->pins, .n_tensors = c->n_members,
                            .valid = c->valid, .nbytes = c->dead ? 0 : c->nbytes, .used_nbytes = c->used_nbytes,
                            .last_use = c->noted, .next_use = next == INT64_MAX ? -1 : cs->now + next };
}

const char *ps_chunk_tensor_name(const ps_chunks *cs, int32_t id, int i)
{
    const chunk *c = &cs->chunks[id];
    return i >= 0 && i < c->n_members && c->members[i]->name ? c->members[i]->name : "";
}

void ps_chunks_stats(const ps_chunks *cs, ps_engine_stats *out) { *out = cs->stats; }
ps_disk *ps_chunks_disk(ps_chunks *cs) { return cs->disk; }

int ps_tier_count(const ps_chunks *cs) { return cs->n_tiers; }

void ps_tier_get(ps_chunks *cs, int t, ps_tier_info *out)
{
    tier *at = &cs->tiers[t];
    *out = (ps_tier_info){ .device = at->device, .budget = at->budget, .chunks = at->used, .other = tier_other(cs, t),
                           .peak = at->peak, .bytes_up = t > 0 ? cs->tiers[t - 1].bytes_up : 0,
                           .bytes_down = t > 0 ? cs->tiers[t - 1].bytes_down : 0 };
    snprintf(out->name, sizeof out->name, "%s", at->name);
    if (is_disk(cs, t)) {
        ps_disk_info info;
        ps_disk_get_info(cs->disk, &info);
        out->budget = info.capacity;
        out->chunks = out->peak = info.used;
    }
    out->free = out->budget ? out->budget - out->chunks - out->other : 0;
}

/* -- the manager -------------------------------------------------------------------------------------------------- */
ps_mem *ps_chunks_mem(ps_chunks *cs) { return &cs->base; }

int ps_chunks_settle(ps_chunks *cs)
{
    while (cs->transfers) PS_TRY(transfers_poll(cs, true, NULL));
    return 0;
}

void ps_chunks_trim(ps_chunks *cs)
{
    for (int t = 0; t < cs->n_tiers; t++)
        if (!is_disk(cs, t)) cache_clear(cs, t, INT64_MAX);
}

void ps_chunks_close(ps_chunks *cs)
{
    if (!cs) return;
    cs->closing = true;
    step_off(cs);
    while (cs->transfers) transfers_poll(cs, true, NULL);        /* ignores errors, because everything is freed now */
    for (int32_t i = 0; i < cs->n_chunks; i++) {
        chunk *c = &cs->chunks[i];
        while (c->n_members > 0) {
            ps_storage *s = c->members[c->n_members - 1]->storage;
            s->bytes.dropped = true;
            s->pins = 0;
            chunks_free(&cs->base.keeper, s);
        }
        for (int t = 0; t < cs->n_tiers; t++) if (c->slot[t]) slot_drop(cs, c, t);
        source_drop(c);
        ps_free(c->members);
    }
    for (int t = 0; t < cs->n_tiers; t++) {
        cache_clear(cs, t, INT64_MAX);
        ps_free(cs->tiers[t].cache);
        if (cs->tiers[t].be) cs->plain->table->set_hold_limit(cs->plain, cs->tiers[t].device, 0);
    }
    if (cs->disk) ps_disk_close(cs->disk);
    ps_source_close(cs->source);
    while (cs->spare) {
        transfer *x = cs->spare;
        cs->spare = x->next;
        ps_free(x);
    }
    ps_free(cs->record.uses);
    ps_free(cs->record.spare);
    ps_free(cs->next_use);
    ps_free(cs->back);
    ps_free(cs->held);
    ps_free(cs->chunks);
    ps_free(cs);
}

static void chunks_close_table(ps_mem *mem) { ps_chunks_close((ps_chunks *)mem); }

static const ps_keeper_table chunks_keeper = {
    .name = "chunk", .free = chunks_free, .pin = chunks_pin, .unpin = chunks_unpin,
};
static const ps_mem_table chunks_table = {
    .alloc = chunks_alloc, .scratch = chunks_scratch, .scratch_free = chunks_scratch_free, .info = chunks_info,
    .set_limit = chunks_set_limit, .reset_peak = chunks_reset_peak, .close = chunks_close_table,
};

static void add_tier(ps_chunks *cs, const char *name, ps_backend *be, int device, int64_t budget)
{
    cs->tiers[cs->n_tiers++] = (tier){ .name = name, .be = be, .device = device, .budget = budget };
}

int ps_chunks_new(const ps_step *step, int n_devices, ps_backend *const *devices, ps_mem *plain,
                  const ps_chunk_config *config, const char *disk_folder, ps_chunks **out)
{
    const ps_chunk_config *c = config;
    if (c->device < 0 || c->device >= n_devices || c->host < 0 || c->host >= n_devices ||
        !devices[c->host]->is_host || devices[c->host]->no_data || devices[c->device]->no_data)
        return ps_fail(PS_EINVAL, "an engine with chunks needs a device that computes and a device with host memory");
    if (c->device != c->host && !devices[c->device]->copy_start && !devices[c->device]->is_host)
        return ps_fail(PS_EUNSUP, "device %s cannot copy while it computes", devices[c->device]->name);
    for (int t = 0; t < PS_TIERS; t++)
        if (c->budget[t] < 0) return ps_fail(PS_EINVAL, "a budget of %lld bytes; it must not be negative",
                                             (long long)c->budget[t]);
    if (!ps_policy_row(c->policy)) return ps_fail(PS_EINVAL, "there is no eviction policy %d", c->policy);
    ps_chunks *cs = ps_alloc0(sizeof *cs);
    if (!cs) return ps_fail_nomem(sizeof *cs);
    cs->base = (ps_mem){ { &chunks_keeper }, &chunks_table };
    cs->plain = plain;
    cs->step = step;
    cs->config = *c;
    cs->now = -1;
    cs->random = 1;
    cs->transfers_end = &cs->transfers;
    if (c->device != c->host) add_tier(cs, "device", devices[c->device], c->device, c->budget[0]);
    add_tier(cs, "host", devices[c->host], c->host, c->budget[1]);
    if (c->budget[2] > 0) {
        int64_t nbytes = c->budget[2] / PS_DIRECT_ALIGN * PS_DIRECT_ALIGN;
        int rc = devices[c->host]->pretends ? ps_disk_pretend(nbytes, &cs->disk)
                                            : ps_disk_open(disk_folder, nbytes, c->disk_threads, &cs->disk);
        if (rc == 0 && c->disk_checksums) rc = ps_disk_check_sums(cs->disk);
        if (rc < 0) {
            ps_disk_close(cs->disk);
            ps_free(cs);
            return rc;
        }
        add_tier(cs, "disk", NULL, -1, c->budget[2]);
    }
    for (int t = 0; t < cs->n_tiers; t++)                 /* unused memory would count against the budget */
        if (!is_disk(cs, t) && cs->tiers[t].budget) plain->table->trim(plain, cs->tiers[t].device, true);
    *out = cs;
    return 0;
}
