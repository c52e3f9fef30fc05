/* SPDX-License-Identifier: BSD-3-Clause
 * This file makes collectives faster by predicting them. A dry run records the collectives of a step (group_note). When
 * the step begins, the ranks compare their lists of calls. If the lists are equal, each rank knows the next call of the
 * other ranks. Each rank then sends the header and the small bytes of its call in one message.
 *
 * If a rank makes another call instead of the planned call, its header says so. Therefore no rank waits forever. If no
 * rank makes the planned call, the ranks compare their calls as they do without a plan, and the planned call remains
 * the next call of the plan. Whether a call is planned depends only on the plan and on earlier calls. A plan ends when
 * the next plan begins. All ranks begin the next plan between the same two calls. */
#include "base/error.h"
#include "base/grow.h"
#include "comm/inner.h"

static bool is_open(const group_plan *p) { return p->at < p->now.n; }

bool group_plan_is_open(const ps_group *g) { return is_open(&g->plan); }

static bool fits(const ps_rank_call *c, const header *h)
{
    return c->op == h->op && c->dtype == h->dtype && c->root == h->root && c->place == h->place &&
           c->nbytes == h->nbytes && h->check == 0;
}

void group_plan_prepare(ps_group *g, const ps_rank_calls *calls)
{
    ps_rank_calls *to = &g->plan.next;
    int32_t n = 0;
    to->n = 0;
    for (int32_t i = 0; calls && i < calls->n; i++) {
        if (calls->list[i].group != g->number) continue;
        if (!ps_try_grow(to->list, to->capacity, n + 1)) return;
        to->list[n] = calls->list[i];
        to->list[n++].group = 0;           /* ranks may have different numbers for the same group */
    }
    to->n = n;
}

/* Computes the hash FNV-1a. */
uint64_t group_plan_hash(const ps_group *g)
{
    const ps_rank_calls *c = &g->plan.next;
    const unsigned char *bytes = (const unsigned char *)c->list;
    uint64_t hash = 0xcbf29ce484222325u;
    if (c->n == 0) return 0;
    for (size_t i = 0; i < sizeof *c->list * (size_t)c->n; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash ? hash : 1;
}

int32_t ps_group_plan_calls(const ps_group *g) { return g->plan.next.n; }

int ps_group_plan_call(const ps_group *g, int32_t i, char *text, int64_t room)
{
    const ps_rank_calls *c = &g->plan.next;
    if (i < 0 || i >= c->n) return ps_fail(PS_ERANGE, "there is no planned call %d: the plan has %d calls", i, c->n);
    const ps_rank_call *call = &c->list[i];
    header h = { .seq = (uint64_t)i, .op = call->op, .dtype = call->dtype, .nbytes = call->nbytes, .root = call->root,
                 .place = call->place };
    group_describe(&h, text, (size_t)room);
    return 0;
}

void ps_group_plan_begin(ps_group *g, int agreed)
{
    ps_rank_calls was = g->plan.now;
    g->plan.now = g->plan.next;
    g->plan.next = was;
    g->plan.next.n = 0;
    if (!agreed) g->plan.now.n = 0;
    g->plan.at = 0;
}

int64_t ps_group_planned(const ps_group *g) { return g->plan.kept; }

void group_plan_free(ps_group *g)
{
    ps_free(g->plan.now.list);
    ps_free(g->plan.next.list);
}

static bool with(const ps_group *g, int r, int peer) { return r != g->comm->rank && (peer < 0 || r == peer); }

int group_plan_exchange(ps_group *g, const header *mine, int peer, int *planned)
{
    const ps_rank_call *c = &g->plan.now.list[g->plan.at];
    int rank = g->comm->rank;
    bool small = group_goes_small(g, c->op, c->place, c->nbytes);
    ps_comm_part part = { .nbytes = (int64_t)sizeof(header) + (small ? c->nbytes : 0) };
    header *said = group_said(g, rank);
    *said = *mine;
    said->planned = fits(c, mine);
    group_clear_parts(g);
    for (int r = 0; r < g->comm->size; r++) {
        if (!with(g, r, peer)) continue;
        g->send[r] = (ps_comm_part){ group_said(g, rank), part.nbytes };
        g->recv[r] = (ps_comm_part){ group_said(g, r), part.nbytes };
    }
    PS_TRY(g->comm->table->begin(g->comm, PS_COMM_PLANNED, g->send, g->recv));
    PS_TRY(g->comm->table->finish(g->comm, PS_COMM_PLANNED));
    *planned = 0;
    for (int r = 0; r < g->comm->size; r++) {
        if (r != rank && !with(g, r, peer)) continue;
        g->heard[r] = *group_said(g, r);
        *planned += g->heard[r].planned != 0;
    }
    if (*planned > 0) g->plan.at++;
    if (*planned == g->comm->size) g->plan.kept++;
    return 0;
}
