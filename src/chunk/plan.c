/* SPDX-License-Identifier: BSD-3-Clause
 * This file has the entry points of the planner. For each level, the planner makes a stream of events. The events of
 * level 0 (device and host) are made from the trace. The moves of level 0 are then events of level 1. The planner
 * tries each tuning of the policy. It repeats the simulation of a step until the step's final state equals its
 * initial state. plan_level.c plans one level. */
#include "chunk/plan.h"
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "chunk/plan_level.h"

enum { TRY_ROUNDS = 2, STEADY_ROUNDS = 8 };

typedef struct planner {
    const ps_plan_input *in;
    const ps_policy *policy;
    int levels;
    /* The stream of each level. stream[1] is made again in each round. */
    ps_stream stream[PS_TIERS - 1];
    ps_level level[PS_TIERS - 1];
    int tuning[PS_TIERS - 1];
    /* Each of these arrays is [n_chunks]. `valid` and `before` have the same meaning as ps_plan_chunk.valid. */
    uint8_t *valid, *before, *at[PS_TIERS - 1];
} planner;

/* -- the input ---------------------------------------------------------------------------------------------------- */
static int check_input(const ps_plan_input *in)
{
    if (in->n_tiers < 1 || in->n_tiers > PS_TIERS)
        return ps_fail(PS_EINVAL, "a plan cannot have %d tiers; it must have 1 to %d", in->n_tiers, PS_TIERS);
    if (!ps_policy_row(in->policy)) return ps_fail(PS_EINVAL, "there is no eviction policy %d", in->policy);
    if (in->n_chunks < 0 || in->n_uses < 0 || in->n_moments < 0 || in->n_moments > INT32_MAX / 4)
        return ps_fail(PS_EINVAL, "a plan cannot have %d chunks, %d uses and %d moments; none of them may be negative",
                       in->n_chunks, in->n_uses, in->n_moments);
    for (int32_t c = 0; c < in->n_chunks; c++)
        if (in->chunks[c].nbytes < 0 || in->chunks[c].valid >> in->n_tiers)
            return ps_fail(PS_EINVAL, "chunk %d has %lld bytes, valid on tiers 0x%x; there are %d tiers", c,
                           (long long)in->chunks[c].nbytes, in->chunks[c].valid, in->n_tiers);
    int32_t moment = 0;
    for (int32_t i = 0; i < in->n_uses; i++) {
        const ps_use *u = &in->uses[i];
        if (u->chunk < 0 || u->chunk >= in->n_chunks || u->tier < 0 || u->tier > 1 || u->tier >= in->n_tiers)
            return ps_fail(PS_EINVAL, "use %d is of chunk %d of %d on tier %d of %d; only tiers 0 and 1 can be used", i,
                           u->chunk, in->n_chunks, u->tier, in->n_tiers);
        if (u->moment < moment || u->moment >= in->n_moments)
            return ps_fail(PS_EINVAL, "use %d is at moment %d, after one at %d; there are %d moments", i, u->moment,
                           moment, in->n_moments);
        moment = u->moment;
    }
    return 0;
}

static int stream_new(ps_stream *s, int32_t room, int32_t n_chunks)
{
    size_t want = sizeof *s->events * ((size_t)room + 1);
    *s = (ps_stream){ .n_chunks = n_chunks };
    return (s->events = ps_alloc(want)) ? 0 : ps_fail_nomem(want);
}

/* Makes the events of level 0, one event per use. */
static int stream_of_uses(planner *p)
{
    const ps_plan_input *in = p->in;
    ps_stream *s = &p->stream[0];
    PS_TRY(stream_new(s, in->n_uses, in->n_chunks));
    for (int32_t i = 0; i < in->n_uses; i++) {
        const ps_use *u = &in->uses[i];
        int kind = (u->tier ? EV_DOWN : EV_READ) + (u->write != 0);
        int32_t group = i == 0 ? 0 : s->events[i - 1].group + (s->events[i - 1].moment != u->moment);
        s->events[s->n++] = (ps_event){ .chunk = u->chunk, .moment = u->moment, .need = u->moment, .ref = i,
                                        .group = group, .kind = (int16_t)kind, .ends = u->ends };
    }
    return ps_stream_link(s, in->chunks, in->cyclic);
}

/* -- the stream of the second level ------------------------------------------------------------------------------- */
/* Appends events for the moves of level 0, starting with move *next, as long as the moves can begin before the uses
 * of `moment`. */
static void add_moves(const planner *p, ps_stream *s, int32_t *next, int32_t moment, int32_t *group)
{
    static const int kinds[] = { [PS_MOVE_FETCH] = EV_SOURCE, [PS_MOVE_EVICT] = EV_DEST, [PS_MOVE_DROP] = EV_GONE };
    const ps_level *above = &p->level[0];
    for (; *next < above->n_moves && above->moves[*next].from <= moment; ++*next) {
        const ps_move *m = &above->moves[*next];
        s->events[s->n++] = (ps_event){ .chunk = m->chunk, .moment = m->from, .need = m->need, .ref = *next,
                                        .group = (*group)++, .kind = (int16_t)kinds[m->kind] };
    }
}

/* Makes the events of level 1. Within a moment, the events are in this order:
 *   moves of level 0 that can begin before the moment
 *   writes on tier 0 that make the copies on lower tiers stale
 *   uses on tier 1, whose chunks must all be there at the same time
 *   uses on tier 0 after which nobody reads the contents */
static int stream_of_moves(planner *p)
{
    const ps_plan_input *in = p->in;
    ps_stream *s = &p->stream[1];
    ps_stream_clear(s);
    PS_TRY(stream_new(s, 2 * in->n_uses + p->level[0].n_moves, in->n_chunks));
    int32_t move = 0, group = 0;
    for (int32_t i = 0, end; i < in->n_uses; i = end) {
        int32_t moment = in->uses[i].moment, n = s->n;
        add_moves(p, s, &move, moment, &group);
        n = s->n;
        for (end = i; end < in->n_uses && in->uses[end].moment == moment; end++)
            if (in->uses[end].tier == 0 && (in->uses[end].write || p->at[1][in->uses[end].chunk] & AT_BLANK)) {
                p->at[1][in->uses[end].chunk] &= (uint8_t)~AT_BLANK;
                s->events[s->n++] = (ps_event){ .chunk = in->uses[end].chunk, .moment = moment, .need = moment,
                                                .ref = end, .group = group, .kind = EV_STALE };
            }
        for (int32_t j = i; j < end; j++)
            if (in->uses[j].tier == 1) {
                p->at[1][in->uses[j].chunk] &= (uint8_t)~AT_BLANK;
                s->events[s->n++] = (ps_event){ .chunk = in->uses[j].chunk, .moment = moment, .need = moment, .ref = j,
                                                .group = group, .kind = in->uses[j].write ? EV_WRITE : EV_READ,
                                                .ends = in->uses[j].ends };
            }
        group += s->n > n;
        n = s->n;
        for (int32_t j = i; j < end; j++) {
            if (!in->uses[j].ends) continue;
            p->at[1][in->uses[j].chunk] |= AT_BLANK;
            if (in->uses[j].tier == 0)
                s->events[s->n++] = (ps_event){ .chunk = in->uses[j].chunk, .moment = moment + 1, .need = moment + 1,
                                                .ref = j, .group = group, .kind = EV_END };
        }
        group += s->n > n;
    }
    add_moves(p, s, &move, INT32_MAX, &group);
    return ps_stream_link(s, in->chunks, in->cyclic);
}

/* -- a round ------------------------------------------------------------------------------------------------------ */
static void fill_at(planner *p, int l)
{
    for (int32_t c = 0; c < p->in->n_chunks; c++) {
        unsigned v = p->valid[c], tier = 1u << l, at = 0;
        if (v & tier) at |= AT_HERE;
        if (v & ~(2 * tier - 1)) at |= AT_BELOW;
        if (v & (tier - 1)) at |= AT_ABOVE;
        p->at[l][c] = (uint8_t)(v ? at : AT_BLANK);
    }
}

/* Simulates one step on the first `levels` levels, with the present tunings. Before the call p->valid contains the
 * state before the step, and after the call it contains the state after the step. */
static int run_round(planner *p, int levels)
{
    const ps_plan_input *in = p->in;
    for (int l = 0; l < levels; l++) {
        ps_level *level = &p->level[l];
        fill_at(p, l);
        if (l == 1) {
            PS_TRY(stream_of_moves(p));
            fill_at(p, l);                                /* restores AT_BLANK, which stream_of_moves clears */
        }
        level->tuning = &p->policy->tunings[p->tuning[l]];
        PS_TRY(ps_level_run(level));
    }
    for (int32_t c = 0; c < in->n_chunks; c++) {
        uint8_t at = p->at[levels - 1][c], v = 0;
        int here = levels - 1;
        if (at & AT_ABOVE) v |= 1;
        if (at & AT_HERE) v |= (uint8_t)(1 << here);
        if (at & AT_BELOW) v |= (uint8_t)(2 << here);
        p->valid[c] = v;
    }
    return 0;
}

static int64_t bytes_moved(const planner *p, int levels)
{
    int64_t sum = 0;
    for (int l = 0; l < levels; l++) sum += p->level[l].fetched + p->level[l].evicted;
    return sum;
}

static void restart(planner *p)
{
    for (int32_t c = 0; c < p->in->n_chunks; c++) p->valid[c] = p->in->chunks[c].valid;
}

/* Repeats the simulation of the step until the final state equals the initial state, but at most `rounds` times. */
static int run_rounds(planner *p, int levels, int rounds)
{
    size_t n = (size_t)p->in->n_chunks;
    do {
        memcpy(p->before, p->valid, n);
        PS_TRY(run_round(p, levels));
    } while (--rounds > 0 && memcmp(p->before, p->valid, n));
    return 0;
}

/* Computes the number of bytes that the repeated step moves with tunings t0 on level 0 and t1 on level 1. */
static int try_tunings(planner *p, int levels, int t0, int t1, int64_t *bytes)
{
    p->tuning[0] = t0;
    p->tuning[1] = t1;
    restart(p);
    PS_TRY(run_rounds(p, levels, p->in->cyclic ? TRY_ROUNDS : 1));
    *bytes = bytes_moved(p, levels);
    return 0;
}

/* Chooses the tunings that move the fewest bytes, for one level after the other. The result is never worse than the
 * first tuning on both levels. */
static int choose(planner *p)
{
    int best[PS_TIERS - 1] = { 0, 0 };
    int64_t least = 0, plain = 0, bytes;
    for (int l = 0; l < p->levels && p->policy->n_tunings > 1; l++) {
        PS_TRY(try_tunings(p, l + 1, best[0], 0, &least));
        for (int t = 1; t < p->policy->n_tunings && least > 0; t++) {
            PS_TRY(try_tunings(p, l + 1, l == 0 ? t : best[0], l == 0 ? 0 : t, &bytes));
            if (bytes >= least) continue;
            least = bytes;
            best[l] = t;
        }
    }
    if (p->levels == 2 && best[0] > 0) {
        PS_TRY(try_tunings(p, 2, 0, 0, &plain));
        if (plain <= least) best[0] = best[1] = 0;
    }
    memcpy(p->tuning, best, sizeof best);
    return 0;
}

/* -- entry points ------------------------------------------------------------------------------------------------- */
static void planner_close(planner *p)
{
    for (int l = 0; l < PS_TIERS - 1; l++) {
        ps_stream_clear(&p->stream[l]);
        ps_level_clear(&p->level[l]);
        ps_free(p->at[l]);
    }
    ps_free(p->valid);
    ps_free(p->before);
}

static int planner_open(planner *p, const ps_plan_input *in)
{
    *p = (planner){ .in = in, .policy = ps_policy_row(in->policy), .levels = in->n_tiers - 1 };
    size_t n = (size_t)in->n_chunks + 1;
    p->valid = ps_alloc(n);
    p->before = ps_alloc(n);
    for (int l = 0; l < PS_TIERS - 1; l++) {
        p->at[l] = ps_alloc(n);
        p->level[l] = (ps_level){ .tier = l, .cyclic = in->cyclic, .n_moments = in->n_moments,
                                  .capacity = in->capacity[l], .extra = in->extra[l], .ahead = in->ahead[l],
                                  .chunks = in->chunks,
                                  .stream = &p->stream[l], .policy = p->policy, .at = p->at[l],
                                  .above = l > 0 ? &p->level[l - 1] : NULL, .bad_event = -1 };
    }
    if (!p->valid || !p->before || !p->at[0] || !p->at[1]) return ps_fail_nomem(4 * n);
    restart(p);
    memcpy(p->before, p->valid, n - 1);
    return stream_of_uses(p);
}

/* Returns the index of the use for which the plan failed. If a move of level 0 failed, this is the use that needs the
 * move. */
static int32_t bad_use_of(const planner *p)
{
    for (int l = p->levels - 1; l >= 0; l--) {
        int32_t i = p->level[l].bad_event;
        if (i < 0) continue;
        const ps_event *e = &p->stream[l].events[i];
        if (l == 1 && e->kind >= EV_SOURCE && e->kind != EV_STALE)
            e = &p->stream[0].events[p->level[0].serves[e->ref]];
        return e->ref;
    }
    return -1;
}

/* Plans a step on a single tier. There are no moves. After the step, each used chunk has contents on the tier. */
static void run_flat(planner *p)
{
    for (int32_t i = 0; i < p->in->n_uses; i++) p->valid[p->in->uses[i].chunk] = 1;
}

static void hand_over(planner *p, ps_plan *out)
{
    *out = (ps_plan){ .valid_before = p->before, .valid_after = p->valid };
    p->before = p->valid = NULL;
    for (int l = 0; l < p->levels; l++) {
        ps_level *level = &p->level[l];
        out->n_moves[l] = level->n_moves;
        out->moves[l] = level->moves;
        out->fetched[l] = level->fetched;
        out->evicted[l] = level->evicted;
        out->peak[l] = level->peak;
        level->moves = NULL;
    }
    for (int32_t c = 0; c < p->in->n_chunks; c++) out->peak[p->levels] += p->in->chunks[c].nbytes;
}

static int plan_rounds(const ps_plan_input *in, int rounds, ps_plan *out, int32_t *bad_use)
{
    planner p;
    *bad_use = -1;
    PS_TRY(check_input(in));
    int rc = planner_open(&p, in);
    if (rc == 0 && p.levels > 0) {
        rc = choose(&p);
        restart(&p);
        if (rc == 0) rc = run_rounds(&p, p.levels, rounds);
        if (rc < 0) *bad_use = bad_use_of(&p);
    } else if (rc == 0) {
        run_flat(&p);
        if (rounds > 1) memcpy(p.before, p.valid, (size_t)in->n_chunks);
    }
    if (rc == 0) hand_over(&p, out);
    planner_close(&p);
    return rc;
}

int ps_plan_make(const ps_plan_input *in, ps_plan *out, int32_t *bad_use) { return plan_rounds(in, 1, out, bad_use); }

int ps_plan_steady(const ps_plan_input *in, ps_plan *out, int32_t *bad_use)
{
    return plan_rounds(in, STEADY_ROUNDS, out, bad_use);
}

void ps_plan_clear(ps_plan *plan)
{
    for (int l = 0; l < PS_TIERS - 1; l++) ps_free(plan->moves[l]);
    ps_free(plan->valid_before);
    ps_free(plan->valid_after);
    *plan = (ps_plan){ 0 };
}
