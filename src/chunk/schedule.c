/* SPDX-License-Identifier: BSD-3-Clause
 * This file records the uses of chunks in a step, plans the next step from these uses, and performs the plan. A step
 * is correct even if its plan is wrong. A move that does not match the present place of its chunk is skipped. If the
 * plan has not fetched a chunk in time, the pin fetches it. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "chunk/impl.h"

/* The margin that stays free above the peak of tensors outside chunks, in plans in which ops use memory that these
 * tensors leave free:
 *   margin = OTHER_PAGES * page size + min(peak / OTHER_SHARE, OTHER_MOST)
 * The margin is necessary because a real arena is fragmented differently from the arena of a dry run. */
enum { OTHER_PAGES = 2, OTHER_SHARE = 16, OTHER_MOST = 1 << 20 };
/* A plan returns idle memory of other tensors to the system if that memory is more than 1 / IDLE_SHARE of the
 * budget. */
enum { IDLE_SHARE = 32 };

/* -- recording uses ----------------------------------------------------------------------------------------------- */
static void stop_noting(ps_chunks *cs)                       /* harmless, because pins still fetch their chunks */
{
    cs->noting = false;
    cs->record.n_uses = 0;
}

static void record_use(ps_chunks *cs, chunk *c, int t, bool write)
{
    ps_trace *r = &cs->record;
    if (!cs->noting) return;
    if (c->noted == cs->now && c->noted_at < r->n_uses && r->uses[c->noted_at].tier == t) {
        r->uses[c->noted_at].write |= (int8_t)write;
        return;
    }
    if (!ps_try_grow(r->uses, r->capacity, r->n_uses + 1)) {
        stop_noting(cs);
        return;
    }
    c->noted_at = r->n_uses;
    r->uses[r->n_uses++] = (ps_use){ .moment = cs->now, .chunk = c->id, .tier = (int8_t)t, .write = write,
                                     .action = (int8_t)cs->step->is.now.kind };
}

/* Records the size in bytes of tensors outside chunks during the moment that has just ended. */
static void note_others(ps_chunks *cs)
{
    ps_trace *r = &cs->record;
    if (!ps_try_grow(r->spare, r->spare_capacity, (cs->now + 1) * PS_TIERS)) {
        stop_noting(cs);
        return;
    }
    for (int t = 0; t < cs->n_tiers; t++) {
        int64_t busy = 0;
        if (!is_disk(cs, t)) tier_busy(cs, t, &busy);
        if (busy < cs->before_pause[t]) busy = cs->before_pause[t];
        cs->before_pause[t] = 0;
        if (cs->now < 0) cs->before_step[t] = busy;
        else r->spare[cs->now * PS_TIERS + t] = busy;      /* ps_chunks_trace_end subtracts this value from the peak */
    }
}

/* Sets the number of bytes that each tier leaves for tensors outside chunks at this moment. The number is smaller if
 * the plan gives the op of this moment extra bytes for chunks. */
static void plan_others(ps_chunks *cs)
{
    const ps_trace *e = cs->expected;
    for (int t = 0; e && t < cs->n_tiers; t++)
        if (cs->extra[t])
            cs->tiers[t].planned_other = e->other_peak[t] + cs->margin[t] -
                                         (cs->now < e->n_moments ? cs->extra[t][cs->now] : 0);
}

void note_use(ps_chunks *cs, chunk *c, int t, bool write)
{
    c->last_use = ++cs->clock;
    if (!cs->noting || cs->step->suspended) return;
    if (cs->fresh || cs->now < 0) {
        note_others(cs);
        if (!cs->noting) return;
        cs->now++;
        cs->fresh = false;
        plan_others(cs);
        for (int i = 0; i < cs->n_tiers; i++) {
            int64_t other = cs->step->dry ? 0 : tier_other(cs, i);
            if (other > cs->record.other_peak[i]) cs->record.other_peak[i] = other;
        }
        for (int32_t i = 0; i < cs->n_held; i++) {       /* chunks pinned by ps_chunk_pin cannot move at this moment */
            chunk *x = chunk_at(cs, cs->held[i]);
            record_use(cs, x, x->held_tier, false);
            x->noted = cs->now;
        }
    }
    record_use(cs, c, t, write);
    c->noted = cs->now;
    while (cs->expected && c->next_in_trace >= 0 && cs->expected->uses[c->next_in_trace].moment <= cs->now)
        c->next_in_trace = cs->next_use[c->next_in_trace];
}

void note_end(ps_chunks *cs, const chunk *c)
{
    if (cs->noting && c->noted >= 0 && c->noted_at < cs->record.n_uses) cs->record.uses[c->noted_at].ends = 1;
}

void ps_chunks_trace_begin(ps_chunks *cs)
{
    cs->record.n_uses = 0;
    memset(cs->record.other_peak, 0, sizeof cs->record.other_peak);
    for (int t = 0; t < cs->n_tiers; t++) cs->record.other_base[t] = is_disk(cs, t) ? 0 : tier_other(cs, t);
    for (int t = 0; t < cs->n_tiers; t++) if (!is_disk(cs, t)) tier_busy(cs, t, &cs->before_step[t]);
    cs->now = -1;
    cs->noting = true;
    for (int32_t i = 0; i < cs->n_chunks; i++) cs->chunks[i].noted = -1;
}

const ps_trace *ps_chunks_trace_end(ps_chunks *cs)
{
    ps_trace *r = &cs->record;
    if (cs->noting && cs->now >= 0) note_others(cs);
    cs->noting = false;
    r->n_moments = cs->now + 1;
    cs->now = -1;
    for (int t = 0; t < cs->n_tiers && r->n_uses > 0; t++) {
        if (is_disk(cs, t)) continue;
        int64_t *last = &r->spare[(r->n_moments - 1) * PS_TIERS + t];
        /* The last moment lasts until the next step begins. */
        if (*last < cs->before_step[t]) *last = cs->before_step[t];
        if (cs->step->dry) r->other_peak[t] = cs->step->dry->table->held(cs->step->dry, cs->tiers[t].device);
        for (int32_t m = 0; m < r->n_moments; m++) {
            int64_t *at = &r->spare[m * PS_TIERS + t];
            *at = r->other_peak[t] > *at ? r->other_peak[t] - *at : 0;
        }
    }
    return r;
}

int64_t next_use_of(const ps_chunks *cs, const chunk *c)
{
    const ps_trace *e = cs->expected;
    if (!e) return INT64_MAX;
    if (c->next_in_trace >= 0) return e->uses[c->next_in_trace].moment - cs->now;
    if (c->first_in_trace >= 0) return e->n_moments - cs->now + e->uses[c->first_in_trace].moment;
    return (int64_t)e->n_moments * 2;
}

/* -- planning ----------------------------------------------------------------------------------------------------- */
typedef struct request {
    ps_plan_input in;
    ps_plan_chunk *chunks;        /* [n_chunks] */
    uint8_t *resident;            /* [n_chunks] 1 if the chunk is not part of the plan */
    ps_use *uses;                 /* [n_uses] uses of the trace, without the uses of residents */
    int32_t *number;              /* [n_uses] index of each use in the trace */
    int64_t resident_nbytes;
    int64_t *extra[PS_TIERS];     /* like ps_plan_input.extra */
    /* margin: if `extra` is not NULL, the number of bytes that stay free above the peak of other tensors */
    int64_t margin[PS_TIERS];
    /* These fields are for the first tier on which the chunks of an op and the peak of other tensors do not fit
     * together. They are 0 if there is no such tier.
     * wanted: maximum size in bytes of the chunks that one op needs on the tier
     * left: capacity of the tier for chunks, in bytes */
    int64_t wanted, left;
    int32_t short_tier;           /* number of the tier */
} request;

static void extra_free(int64_t *extra[PS_TIERS])
{
    for (int t = 0; t < PS_TIERS; t++) {
        ps_free(extra[t]);
        extra[t] = NULL;
    }
}

static void request_close(request *r)
{
    extra_free(r->extra);
    ps_free(r->chunks);
    r->chunks = NULL;
}

static int request_open(ps_chunks *cs, const ps_trace *trace, request *r)
{
    size_t n = (size_t)cs->n_chunks + 1, uses = (size_t)trace->n_uses + 1;
    size_t size = n * (sizeof *r->chunks + 1) + uses * (sizeof *r->uses + sizeof *r->number);
    *r = (request){ .chunks = ps_alloc0(size) };
    if (!r->chunks) return ps_fail_nomem(size);
    r->uses = (ps_use *)(r->chunks + n);
    r->number = (int32_t *)(r->uses + uses);
    r->resident = (uint8_t *)(r->number + uses);
    int rc = residents_choose(cs, trace, r->resident, &r->resident_nbytes);
    if (rc < 0) request_close(r);
    return rc;
}

/* Returns the margin above the peak of other tensors on tier t. Returns 0 if ops cannot use the memory that other
 * tensors leave free. This happens in three cases: the trace does not have the bytes of each moment, the backend
 * cannot return free memory, or the capacity is smaller than the margin. */
static int64_t margin_of(const ps_chunks *cs, const ps_trace *trace, int t, int64_t capacity)
{
    const ps_backend *be = cs->tiers[t].be;
    if (!trace->spare || !be || !be->region_discard) return 0;
    int64_t page = be->page_nbytes ? (int64_t)be->page_nbytes : 4096;
    int64_t share = trace->other_peak[t] / OTHER_SHARE;
    int64_t margin = (share < OTHER_MOST ? share : OTHER_MOST) + OTHER_PAGES * page;
    return margin <= capacity ? margin : 0;
}

/* Returns the maximum size in bytes of the chunks that one op needs on tier t. */
static int64_t widest_op(const ps_chunks *cs, const request *r, int t)
{
    int64_t need = 0, most = 0;
    for (int32_t i = 0; i < r->in.n_uses; i++) {
        const ps_use *u = &r->uses[i];
        if (i == 0 || u[-1].moment != u->moment) need = 0;
        if (u->tier == t) need += cs->chunks[u->chunk].nbytes;
        if (need > most) most = need;
    }
    return most;
}

/* Finds room for ops whose chunks do not fit on tier t together with the peak of other tensors. At its moment, such
 * an op may use memory that other tensors leave free. Only these ops use such memory, because the arena must first
 * return the memory to the system and later map it again. */
static int fill_extra(ps_chunks *cs, const ps_trace *trace, request *r, int t)
{
    int64_t need = widest_op(cs, r, t), capacity = r->in.capacity[t];
    if (need <= capacity) return 0;
    if (r->wanted == 0) r->wanted = need, r->left = capacity, r->short_tier = t;
    if (!(r->margin[t] = margin_of(cs, trace, t, capacity))) return 0;
    size_t size = sizeof *r->extra[t] * (size_t)trace->n_moments;
    if (!(r->extra[t] = ps_alloc0(size))) return ps_fail_nomem(size);
    r->in.capacity[t] = capacity -= r->margin[t];
    r->in.extra[t] = r->extra[t];
    for (int32_t i = 0; i < r->in.n_uses; i++) {
        const ps_use *u = &r->uses[i];
        if (i == 0 || u[-1].moment != u->moment) need = 0;
        if (u->tier != t) continue;
        need += cs->chunks[u->chunk].nbytes;
        int64_t spare = trace->spare[u->moment * PS_TIERS + t];
        if (need > capacity) r->extra[t][u->moment] = need - capacity < spare ? need - capacity : spare;
    }
    return 0;
}

/* Returns idle memory of other tensors to the system if it would take much space from the chunks. An example is the
 * memory of copies that were made while the model was created. A smaller amount of idle memory is kept, because the
 * step would have to map it again. */
static void return_idle(ps_chunks *cs, const ps_trace *trace, int t)
{
    if (tier_other(cs, t) - trace->other_peak[t] > cs->tiers[t].budget / IDLE_SHARE)
        cs->plain->table->trim(cs->plain, cs->tiers[t].device, true);
}

static int fill_request(ps_chunks *cs, const ps_trace *trace, request *r)
{
    int64_t n = 0, total = 0, largest = 0;
    for (int32_t i = 0; i < cs->n_chunks; i++) {
        const chunk *c = &cs->chunks[i];
        if (c->dead || r->resident[i]) continue;
        r->chunks[i] = (ps_plan_chunk){ .nbytes = c->nbytes, .valid = c->valid };
        total += c->nbytes;
        if (largest < c->nbytes) largest = c->nbytes;
        n++;
    }
    int32_t n_uses = 0;
    for (int32_t i = 0; i < trace->n_uses; i++) {
        if (r->resident[trace->uses[i].chunk]) continue;
        r->number[n_uses] = i;
        r->uses[n_uses++] = trace->uses[i];
    }
    r->in = (ps_plan_input){ .n_tiers = cs->n_tiers, .n_chunks = cs->n_chunks, .n_uses = n_uses,
                             .n_moments = trace->n_moments, .chunks = r->chunks, .uses = r->uses,
                             .policy = cs->config.policy, .cyclic = 1 };
    for (int t = 0; t < cs->n_tiers; t++) {
        const tier *at = &cs->tiers[t];
        if (at->budget > 0 && !is_disk(cs, t)) return_idle(cs, trace, t);
        int64_t other = other_in_step(cs, trace, t) + (t == 0 ? r->resident_nbytes : 0);
        r->in.capacity[t] = at->budget == 0 || is_disk(cs, t) ? total : at->budget - other;
        if (r->in.capacity[t] > total) r->in.capacity[t] = total;
        int64_t ahead = r->in.capacity[t] / 8;
        if (cs->config.ahead[t]) {
            ahead = cs->config.ahead[t];
        } else if (t + 1 < cs->n_tiers && !is_disk(cs, t + 1)) {
            ahead = r->in.capacity[t] / 2;   /* a forward uses the same chunks as a backward, in half the time */
        } else {
            /* Six chunks of mean size are two sets of the chunks that an Adam update fetches. If one chunk is far
             * larger than the mean, the depth is two thirds of that chunk. This depth halves the waiting time of 8
             * layers of a Llama of 8 B. If the depth were the size of the whole chunk, the planned steps of all 32
             * layers of that model would move 9 % more bytes. */
            int64_t sets = n > 0 ? total / n * 6 : 0;
            if (sets < largest / 3 * 2) sets = largest / 3 * 2;
            if (ahead > sets) ahead = sets;
        }
        r->in.ahead[t] = cs->config.prefetch ? ahead : 0;
        if (at->budget > 0 && t + 1 < cs->n_tiers) PS_TRY(fill_extra(cs, trace, r, t));
    }
    return 0;
}

/* Returns the sub-code of the error for an op whose chunks have no room. There are two sub-codes, because smaller
 * chunks help more often if there are residents. */
static int op_sub(const request *r) { return r->resident_nbytes > 0 ? PS_SUB_OP_BESIDE_RESIDENTS : PS_SUB_OP_CHUNKS; }

/* Raises the error for an op that fits on its tier, if the tier below has no room for the chunks that move through
 * it. */
static int below_failed(ps_chunks *cs, const ps_trace *trace, const request *r, const ps_use *u)
{
    int t = u->tier + 1;
    const chunk *c = &cs->chunks[u->chunk];
    int64_t other = other_in_step(cs, trace, t), left = cs->tiers[t].budget - other;
    if (left < 0) left = 0;
    char text[160];
    ps_chunk_text(cs, c, text, sizeof text);
    return ps_fail_room(PS_ENOMEM, op_sub(r), t, left + c->nbytes, left,
                        "the step does not fit: at moment %d %s (%s) moves between tiers, and tier %s has no room "
                        "for it: of the budget of %s, %s are left for chunks in addition to the %s of other tensors; "
                        "raise memory.%s", u->moment, text, bytes_text(c->nbytes).s, cs->tiers[t].name,
                        bytes_text(cs->tiers[t].budget).s, bytes_text(left).s, bytes_text(other).s, cs->tiers[t].name);
}

/* Raises the error of the planner, with the names of tensors, chunks and tiers. bad: index of the use that failed. */
static int plan_failed(ps_chunks *cs, const ps_trace *trace, const request *r, int32_t bad)
{
    if (bad < 0 || bad >= r->in.n_uses) return PS_ENOMEM;
    const ps_use *u = &trace->uses[r->number[bad]];
    if (ps_error_get_detail()->tier > u->tier) return below_failed(cs, trace, r, u);
    int64_t wanted = 0;
    for (int32_t i = 0; i < trace->n_uses; i++)
        if (trace->uses[i].moment == u->moment && trace->uses[i].tier == u->tier &&
            !r->resident[trace->uses[i].chunk])
            wanted += cs->chunks[trace->uses[i].chunk].nbytes;
    const tier *at = &cs->tiers[u->tier];
    int64_t stay = u->tier == 0 ? r->resident_nbytes : 0, other = other_in_step(cs, trace, u->tier);
    if (r->margin[u->tier] > 0) {
        int64_t spare = trace->spare[u->moment * PS_TIERS + u->tier];
        other += r->margin[u->tier];
        /* If the op would fit with `spare`, the reason for the failure is a chunk that moves through this tier and
         * has no room. */
        if (at->budget - other - stay + spare < wanted) other -= spare;
    }
    int64_t left = at->budget - other - stay;
    char text[160], besides[120] = "";
    ps_chunk_text(cs, &cs->chunks[u->chunk], text, sizeof text);
    if (stay > 0)
        snprintf(besides, sizeof besides, " and %s of chunks for which tier %s has no room", bytes_text(stay).s,
                 cs->tiers[cs->n_tiers - 1].name);
    return ps_fail_room(PS_ENOMEM, op_sub(r), u->tier, wanted, left,
                        "the step does not fit: at moment %d its op needs %s of chunks at once on tier %s, %s among "
                        "them, and the budget of %s leaves only %s in addition to the %s of other tensors%s; raise "
                        "memory.%s%s%s, or use a smaller batch or recompute", u->moment, bytes_text(wanted).s,
                        at->name, text, bytes_text(at->budget).s, bytes_text(left > 0 ? left : 0).s,
                        bytes_text(other).s, besides, at->name, stay > 0 ? " or memory." : "",
                        stay > 0 ? last_key(cs) : "");
}

/* Rejects a step whose residents do not fit on tier 0 together with other tensors. The planner cannot detect this,
 * because it does not see residents. */
static int check_residents(ps_chunks *cs, const ps_trace *trace, const request *r)
{
    const tier *at = &cs->tiers[0];
    int64_t left = at->budget - trace->other_peak[0];
    if (r->resident_nbytes == 0 || at->budget == 0 || r->resident_nbytes <= left) return 0;
    return ps_fail_room(PS_ENOMEM, PS_SUB_RESIDENTS, 0, r->resident_nbytes, left,
                        "the step does not fit: tier %s has no room for %s of chunks, and on tier %s the budget of %s "
                        "leaves them only %s in addition to the %s of other tensors; raise memory.%s or memory.%s, or "
                        "use a smaller batch or recompute",
                        cs->tiers[cs->n_tiers - 1].name, bytes_text(r->resident_nbytes).s, at->name,
                        bytes_text(at->budget).s, bytes_text(left > 0 ? left : 0).s, bytes_text(trace->other_peak[0]).s,
                        at->name, last_key(cs));
}

static void forget_back(ps_chunks *cs)
{
    for (int32_t i = 0; i < cs->n_back; i++) cs->chunks[cs->back[i]].returning = false;
    cs->n_back = 0;
}

void step_off(ps_chunks *cs)
{
    if (!cs->expected) return;
    forget_back(cs);
    cs->expected = NULL;
    ps_plan_clear(&cs->plan);
    extra_free(cs->extra);
    for (int t = 0; t < cs->n_tiers; t++) cs->tiers[t].planned_other = 0;
    for (int32_t i = 0; i < cs->n_chunks; i++) cs->chunks[i].next_in_trace = cs->chunks[i].first_in_trace = -1;
}

/* Links each use with the next use of the same chunk. */
static int link_uses(ps_chunks *cs, const ps_trace *trace)
{
    PS_TRY(ps_grow(cs->next_use, cs->next_use_capacity, trace->n_uses));
    for (int32_t i = 0; i < cs->n_chunks; i++) cs->chunks[i].next_in_trace = -1;
    for (int32_t i = trace->n_uses - 1; i >= 0; i--) {
        chunk *c = &cs->chunks[trace->uses[i].chunk];
        cs->next_use[i] = c->next_in_trace;
        c->next_in_trace = i;
    }
    for (int32_t i = 0; i < cs->n_chunks; i++) cs->chunks[i].first_in_trace = cs->chunks[i].next_in_trace;
    return 0;
}

static bool trace_fits(const ps_chunks *cs, const ps_trace *trace)
{
    for (int32_t i = 0; i < trace->n_uses; i++)
        if (trace->uses[i].chunk >= cs->n_chunks || cs->chunks[trace->uses[i].chunk].dead) return false;
    return true;
}

/* Rejects a step whose chunks and other tensors together need more bytes than all budgets have. */
static int check_total(ps_chunks *cs, const ps_trace *trace)
{
    int64_t chunks = 0, room = 0, others = 0;
    for (int32_t i = 0; i < cs->n_chunks; i++)            /* chunks with a source need no budget */
        if (!cs->chunks[i].dead && !cs->chunks[i].n_source) chunks += cs->chunks[i].nbytes;
    for (int t = 0; t < cs->n_tiers; t++) {
        int64_t budget = cs->tiers[t].budget, other = is_disk(cs, t) ? 0 : trace->other_peak[t];
        if (budget == 0) return 0;
        room += budget > other ? budget - other : 0;
        others += other;
    }
    if (chunks <= room) return 0;
    return ps_fail_room(PS_ENOMEM, PS_SUB_NONE, -1, chunks, room,
                        "the step does not fit: all chunks have %s, but in addition to the %s of other tensors the "
                        "budgets have room for only %s; raise memory.%s%s, or use a smaller batch, recompute or a "
                        "smaller model",
                        bytes_text(chunks).s, bytes_text(others).s, bytes_text(room).s, last_key(cs),
                        cs->disk ? "" : ", set memory.disk");
}

/* Moves chunks down until the other tensors of the step have room. */
static int leave_room(ps_chunks *cs, const ps_trace *trace)
{
    for (int t = cs->n_tiers - 1; t >= 0; t--) {
        if (is_disk(cs, t) || cs->tiers[t].budget == 0) continue;
        cs->tiers[t].planned_other = trace->other_peak[t];
        if (tier_other(cs, t) > trace->other_peak[t]) cs->plain->table->trim(cs->plain, cs->tiers[t].device, true);
        if (trace->other_peak[t] < cs->tiers[t].budget && tier_room(cs, t) < 0) PS_TRY(make_room(cs, t, 0, NULL));
    }
    return ps_chunks_settle(cs);
}

/* Rejects a step whose tensors outside chunks do not fit on a tier. This check is last, because the planner's error
 * has more details if chunks are the reason. */
static int check_others(ps_chunks *cs, const ps_trace *trace)
{
    for (int t = 0; t < cs->n_tiers; t++) {
        const tier *at = &cs->tiers[t];
        if (is_disk(cs, t) || at->budget == 0 || trace->other_peak[t] <= at->budget) continue;
        return ps_fail_room(PS_ENOMEM, PS_SUB_NONE, t, trace->other_peak[t], at->budget,
                            "the step does not fit: without chunks it needs %s on tier %s, whose budget is %s; raise "
                            "memory.%s, or use a smaller batch or recompute",
                            bytes_text(trace->other_peak[t]).s, at->name, bytes_text(at->budget).s, at->name);
    }
    return 0;
}

int ps_chunks_step_begin(ps_chunks *cs, const ps_trace *trace)
{
    step_off(cs);
    if (!trace || trace->n_uses == 0) return 0;
    if (!trace_fits(cs, trace)) return ps_fail(PS_ESTATE, "the trace is for chunks that no longer exist");
    PS_TRY(ps_chunks_settle(cs));
    PS_TRY(check_total(cs, trace));
    PS_TRY(link_uses(cs, trace));
    memset(&cs->plan, 0, sizeof cs->plan);
    memset(cs->cursor, 0, sizeof cs->cursor);
    cs->expected = trace;
    request r;
    int32_t bad = -1;
    int rc = request_open(cs, trace, &r);
    if (rc == 0) rc = check_residents(cs, trace, &r);
    if (rc == 0) rc = leave_room(cs, trace);
    if (rc == 0) rc = residents_make(cs, r.resident);
    if (rc == 0) rc = fill_request(cs, trace, &r);
    if (rc == 0) rc = ps_plan_make(&r.in, &cs->plan, &bad);
    if (rc == 0) rc = check_others(cs, trace);
    if (rc == 0) {
        memcpy(cs->margin, r.margin, sizeof cs->margin);
        memcpy(cs->extra, r.extra, sizeof cs->extra);
        memset(r.extra, 0, sizeof r.extra);
    }
    if (rc < 0) step_off(cs);
    if (rc == PS_ENOMEM && bad >= 0) rc = plan_failed(cs, trace, &r, bad);
    request_close(&r);
    return rc;
}

void ps_chunks_step_end(ps_chunks *cs) { step_off(cs); }

int ps_chunks_predict(ps_chunks *cs, const ps_trace *trace, ps_step_forecast *out)
{
    if (!trace_fits(cs, trace)) return ps_fail(PS_ESTATE, "the trace is for chunks that no longer exist");
    if (cs->n_tiers == 1) PS_TRY(check_total(cs, trace));   /* if there is only one tier, no plan detects this */
    request r;
    ps_plan first, steady;
    int32_t bad = -1;
    int64_t sources = 0;              /* size in bytes of chunks with a source; these chunks need no space on the disk
                                       * tier */
    for (int32_t i = 0; i < cs->n_chunks; i++)
        if (!cs->chunks[i].dead && cs->chunks[i].n_source) sources += cs->chunks[i].nbytes;
    *out = (ps_step_forecast){ .n_moments = trace->n_moments, .n_uses = trace->n_uses };
    int rc = request_open(cs, trace, &r);
    out->resident = r.resident_nbytes;
    if (rc < 0) return rc;
    rc = fill_request(cs, trace, &r);
    if (rc == 0) rc = check_residents(cs, trace, &r);
    if (rc == 0) rc = ps_plan_make(&r.in, &first, &bad);
    if (rc == 0) {
        for (int l = 0; l + 1 < cs->n_tiers; l++) {
            out->first_fetched[l] = first.fetched[l];
            out->first_evicted[l] = first.evicted[l];
        }
        rc = ps_plan_steady(&r.in, &steady, &bad);
        if (rc == 0) {
            for (int t = 0; t < cs->n_tiers; t++) {
                int64_t chunks = first.peak[t] > steady.peak[t] ? first.peak[t] : steady.peak[t];
                if (chunks > r.in.capacity[t] && !is_disk(cs, t)) chunks = r.in.capacity[t];
                if (is_disk(cs, t)) chunks = chunks > sources ? chunks - sources : 0;
                out->other[t] = is_disk(cs, t) ? 0 : trace->other_peak[t];
                out->peak[t] = chunks + out->other[t] + (t == 0 ? r.resident_nbytes : 0);
            }
            for (int l = 0; l + 1 < cs->n_tiers; l++) {
                out->fetched[l] = steady.fetched[l];
                out->evicted[l] = steady.evicted[l];
            }
            ps_plan_clear(&steady);
        }
        ps_plan_clear(&first);
    }
    if (rc == 0) rc = check_others(cs, trace);
    if (rc == 0) out->wanted = r.wanted, out->left = r.left, out->short_tier = r.short_tier;
    if (rc == PS_ENOMEM && bad >= 0) rc = plan_failed(cs, trace, &r, bad);
    request_close(&r);
    return rc;
}

/* -- a paused script ---------------------------------------------------------------------------------------------- */
/* Returns the number of bytes by which the prompt of a paused script may exceed the budget of a tier. It is 64 MiB or
 * a sixteenth of the budget, whichever is larger. */
static int64_t reserve(int64_t budget) { return budget / 16 > 64 << 20 ? budget / 16 : 64 << 20; }

void ps_chunks_suspend(ps_chunks *cs)
{
    for (int t = 0; t < cs->n_tiers; t++) {
        if (is_disk(cs, t)) continue;
        if (cs->noting) tier_busy(cs, t, &cs->before_pause[t]);
        cs->reserve[t] = cs->tiers[t].budget ? reserve(cs->tiers[t].budget) : 0;
        cs->tiers[t].budget += cs->reserve[t];
        cs->peak_before[t] = cs->tiers[t].peak;
    }
}

int ps_chunks_resume(ps_chunks *cs)
{
    int rc = 0;
    for (int t = 0; t < cs->n_tiers; t++) {
        if (is_disk(cs, t)) continue;
        cs->tiers[t].budget -= cs->reserve[t];
        cs->reserve[t] = 0;
    }
    for (int t = 0; rc == 0 && t < cs->n_tiers; t++) {
        int64_t ignored;
        if (is_disk(cs, t)) continue;
        if (cs->tiers[t].budget) {
            cs->plain->table->trim(cs->plain, cs->tiers[t].device, true);
            cache_clear(cs, t, 4096);
            int64_t planned = cs->tiers[t].planned_other;
            cs->tiers[t].planned_other = 0;
            if (tier_room(cs, t) < 0) rc = make_room(cs, t, 0, NULL);
            cs->tiers[t].planned_other = planned;
        }
        cs->tiers[t].peak = cs->peak_before[t];
        if (cs->noting) tier_busy(cs, t, &ignored);
    }
    if (rc == 0) rc = ps_chunks_settle(cs);
    return rc;
}

/* -- performing the plan ------------------------------------------------------------------------------------------ */
/* Returns 0 if the move has begun or is not necessary, and 1 if it cannot begin now. */
static int begin_move(ps_chunks *cs, const ps_move *m)
{
    chunk *c = chunk_at(cs, m->chunk);
    int t = m->tier;
    if (c->dead) return 0;
    if (c->transfer) return 1;
    switch (m->kind) {
    case PS_MOVE_FETCH:
        if (has_copy(c, t)) return 0;
        if (c->valid == 0) return 0;                     /* the pin will create the contents */
        if (has_copy(c, t + 1)) return begin_fetch(cs, c, t);
        return m->need <= cs->now ? 0 : 1;               /* skips a move that is due, because the pin fetches c */
    case PS_MOVE_EVICT:
        return !c->slot[t] || c->pins > 0 ? 0 : begin_evict(cs, c, t);
    case PS_MOVE_DROP:
        if (!c->slot[t] || c->tier_pins[t] > 0) return 0;
        if (!has_copy(c, t) || (c->valid & ~(1u << t))) slot_drop(cs, c, t);
        else return begin_evict(cs, c, t);               /* moves the last valid copy down instead of dropping it */
        return 0;
    }
    return 0;
}

/* Begins the moves of level l in their order, and stops at the first move that must wait. */
static int advance_level(ps_chunks *cs, int l, bool *moved)
{
    const ps_plan *p = &cs->plan;
    while (cs->cursor[l] < p->n_moves[l]) {
        const ps_move *m = &p->moves[l][cs->cursor[l]];
        if (m->from > cs->now || (cs->n_tiers > 2 && cs->cursor[1 - l] < m->after)) break;
        int rc = begin_move(cs, m);
        if (rc < 0) return rc;
        if (rc == 1) break;
        cs->cursor[l]++;
        *moved = true;
    }
    return 0;
}

static bool move_due(const ps_chunks *cs, int l)
{
    return cs->cursor[l] < cs->plan.n_moves[l] && cs->plan.moves[l][cs->cursor[l]].need <= cs->now;
}

static int go_back(ps_chunks *cs);

int advance(ps_chunks *cs)
{
    if (cs->transfers) PS_TRY(transfers_poll(cs, false, NULL));
    if (cs->step->suspended) return 0;
    while (cs->expected) {
        bool moved = false, due = false;
        for (int l = cs->n_tiers - 2; l >= 0; l--) PS_TRY(advance_level(cs, l, &moved));
        for (int l = cs->n_tiers - 2; l >= 0; l--) due = due || move_due(cs, l);
        if (!due) break;
        if (moved) continue;
        if (cs->transfers) {
            PS_TRY(transfers_poll(cs, true, NULL));
            continue;
        }
        for (int l = 0; l < PS_TIERS - 1; l++)           /* abandons the plan, so that pins fetch all chunks */
            cs->cursor[l] = cs->plan.n_moves[l];
    }
    return cs->n_back > 0 ? go_back(cs) : 0;
}

/* -- ahead of the plan -------------------------------------------------------------------------------------------- */
/* A plan moves a chunk up only shortly before its next use. If there is room, two kinds of moves are made earlier:
 *   - A chunk whose next use is on the tier below moves down at once.
 *   - A chunk that was used on the tier below for the last time in this step moves back up when no other chunk is
 *     moving up. Otherwise the next step would begin with all these copies. */
static void leave_early(ps_chunks *cs, chunk *c, int t)
{
    if (t + 1 >= cs->n_tiers || is_disk(cs, t + 1) || c->transfer || !has_copy(c, t)) return;
    if (cs->expected->uses[c->next_in_trace].tier <= t) return;
    /* If this eviction cannot begin, the plan evicts c later. */
    if (tier_room(cs, t + 1) >= cs->tiers[t].used) begin_evict(cs, c, t);
}

/* Returns the smallest number of bytes that will be free on tier 0 at any time until the end of the plan, if only the
 * moves of the plan are made. */
static int64_t room_to_stay(ps_chunks *cs)
{
    int64_t room = tier_room(cs, 0), least;
    if (cs->extra[0] && cs->now >= 0 && cs->now < cs->expected->n_moments) room -= cs->extra[0][cs->now];
    least = room;
    cs->looks++;
    for (int32_t i = cs->cursor[0]; i < cs->plan.n_moves[0]; i++) {
        const ps_move *m = &cs->plan.moves[0][i];
        chunk *c = chunk_at(cs, m->chunk);
        if (c->seen != cs->looks) c->there = c->slot[0] != NULL && !hands_on(c);
        c->seen = cs->looks;
        bool after = m->kind == PS_MOVE_FETCH;
        if (after != c->there) room += after ? -c->nbytes : c->nbytes;
        c->there = after;
        if (room < least) least = room;
    }
    return least;
}

static bool lane_rests(const ps_chunks *cs)
{
    for (const transfer *x = cs->transfers; x; x = x->next) if (x->level == 0 && x->up) return false;
    return true;
}

static int go_back(ps_chunks *cs)
{
    while (cs->n_back > 0 && lane_rests(cs)) {
        chunk *c = chunk_at(cs, cs->back[0]);
        bool wanted = !c->dead && !has_copy(c, 0) && has_copy(c, 1);
        if (wanted && (c->transfer || c->pins > 0 || room_to_stay(cs) < c->nbytes)) return 0;
        int rc = wanted ? begin_fetch(cs, c, 0) : 0;
        if (rc != 0) return rc < 0 ? rc : 0;
        c->returning = false;
        memmove(cs->back, cs->back + 1, sizeof *cs->back * (size_t)--cs->n_back);
    }
    return 0;
}

void done_with(ps_chunks *cs, chunk *c, int t)
{
    if (!cs->expected || cs->step->suspended) return;
    if (c->next_in_trace >= 0) {
        leave_early(cs, c, t);
    } else if (t == 1 && !is_disk(cs, 1) && cs->config.prefetch && !c->returning && cs->n_back < cs->capacity &&
               c->first_in_trace >= 0 && cs->expected->uses[c->first_in_trace].tier == 0) {
        c->returning = true;
        cs->back[cs->n_back++] = c->id;
    }
}
