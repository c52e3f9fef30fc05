/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the schedules. A schedule is the order in which each rank performs its forwards and backwards.
 * All schedules except zb_v follow one rule with three numbers (struct rule). A rank first performs some forwards. Then
 * it performs a forward and a backward alternately. If backward is split into INPUT and WEIGHT, the rank performs a
 * fixed number of other INPUTs between an INPUT and its WEIGHT.
 *
 *   gpipe        Each rank performs all forwards first (Huang et al. 2019).
 *   1f1b         Rank r first performs stages - 1 - r forwards (Narayanan et al. 2019, PipeDream-Flush).
 *   interleaved  Each rank has several virtual stages. The rank performs one group of micro-batches after the other,
 *                and within a group one virtual stage after the other (Narayanan et al. 2021). A group has `stages`
 *                micro-batches. Megatron requires that micro_batches is a multiple of `stages`. If it is not a
 *                multiple, this file makes some groups larger. This is a generalization of PyTorch's rounds.
 *   looped_bfs   Like interleaved, but all micro-batches are in a single group, and all forwards are first
 *                (Lamy-Poirier 2022).
 *   zb_h1        1f1b with a split backward. On rank r, a WEIGHT runs r INPUTs after its INPUT (Qi et al. 2023).
 *   zb_v         Each rank has two virtual stages. The first half of the virtual stages is on ranks 0, 1, ..., and the
 *                second half is on the same ranks in descending order (Qi et al. 2023, section 6). */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "pipe/pipe.h"

static const char *const names[] = { "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "custom" };

const char *ps_pipe_schedule_name(int schedule)
{
    return schedule >= 0 && schedule <= PS_PIPE_CUSTOM ? names[schedule] : NULL;
}

int ps_pipe_schedule_find(const char *name, int *out)
{
    for (int i = 0; name && i < PS_PIPE_SCHEDULES; i++)
        if (!strcmp(name, names[i])) return *out = i, 0;
    return ps_fail(PS_EINVAL, "there is no schedule '%s'; there are gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_v",
                   name ? name : "(none)");
}

/* -- one rule ------------------------------------------------------------------------------------------------------ */
typedef struct rule {
    /* groups: number of groups of micro-batches. A rank completes one group after the other. */
    int32_t groups;
    int32_t first;                  /* number of forwards before the first backward */
    /* lag: number of other INPUTs between an INPUT and its WEIGHT, or -1 if backward is not split */
    int32_t lag;
} rule;

/* Finds forward k of a rank; the first forward is 0. Sets *local to the index of the forward's virtual stage on the
 * rank, and *micro to its micro-batch. The sizes of groups differ by at most one micro-batch, and the larger groups
 * come first. Therefore rule.first, which is computed for the first group, is large enough for all groups. */
static void nth(const ps_pipe_spec *s, int32_t groups, int32_t k, int32_t *local, int32_t *micro)
{
    int32_t v = s->virtual_stages, size = s->micro_batches / groups, larger = s->micro_batches % groups;
    int32_t in_larger = larger * (size + 1) * v, at = 0;
    if (k < in_larger) size++;
    else at = larger * (size + 1), k -= in_larger;
    at += k / (size * v) * size;
    *local = k % (size * v) / size;
    *micro = at + k % size;
}

static int push_nth(ps_pipe_table *t, int rank, const rule *r, int kind, int32_t k)
{
    const ps_pipe_spec *s = &t->spec;
    int32_t local, micro;
    if (s->forward_only && kind != PS_ACT_FORWARD) return 0;
    nth(s, r->groups, k, &local, &micro);
    if (kind != PS_ACT_FORWARD) local = s->virtual_stages - 1 - local;
    return pipe_push(&t->rows[rank], kind, local * s->stages + rank, micro);
}

static int fill_by_rule(ps_pipe_table *t, int rank, const rule *r)
{
    int32_t total = t->spec.virtual_stages * t->spec.micro_batches, first = r->first < total ? r->first : total;
    int back = r->lag < 0 ? PS_ACT_BACKWARD : PS_ACT_INPUT;
    for (int32_t k = 0; k < first; k++) PS_TRY(push_nth(t, rank, r, PS_ACT_FORWARD, k));
    for (int32_t k = 0; k < total; k++) {
        if (first + k < total) PS_TRY(push_nth(t, rank, r, PS_ACT_FORWARD, first + k));
        PS_TRY(push_nth(t, rank, r, back, k));
        if (r->lag >= 0 && k >= r->lag) PS_TRY(push_nth(t, rank, r, PS_ACT_WEIGHT, k - r->lag));
    }
    for (int32_t k = total - r->lag > 0 ? total - r->lag : 0; r->lag > 0 && k < total; k++)
        PS_TRY(push_nth(t, rank, r, PS_ACT_WEIGHT, k));
    return 0;
}

static rule rule_of(const ps_pipe_spec *s, int rank)
{
    int32_t p = s->stages, v = s->virtual_stages, m = s->micro_batches, total = v * m, behind = p - 1 - rank;
    int32_t groups = m / p > 1 ? m / p : 1, size = (m + groups - 1) / groups;
    switch (s->schedule) {
    case PS_PIPE_1F1B: return (rule){ 1, behind, -1 };
    case PS_PIPE_ZB_H1: return (rule){ 1, behind, rank };
    case PS_PIPE_INTERLEAVED: return (rule){ groups, (v - 1) * size + 2 * behind, -1 };
    default: return (rule){ 1, total, -1 };
    }
}

/* -- zb_v ---------------------------------------------------------------------------------------------------------- */
/* The row of a rank while it is being filled.
 *   down                    the rank's virtual stage in the first half of the virtual stages
 *   up                      the rank's virtual stage in the second half
 *   forward, back, weight   number of forwards, INPUTs and WEIGHTs in the row so far; index 0: down, index 1: up */
typedef struct vee { ps_pipe_table *t; int rank; int32_t down, up, forward[2], back[2], weight[2]; } vee;

/* Appends the action `kind` of the next micro-batch to the row. After the last micro-batch, appends nothing. */
static int push_next(vee *z, int kind, int up)
{
    int32_t *count = kind == PS_ACT_FORWARD ? z->forward : kind == PS_ACT_INPUT ? z->back : z->weight;
    int32_t micro = count[up]++;
    if (micro >= z->t->spec.micro_batches || (z->t->spec.forward_only && kind != PS_ACT_FORWARD)) return 0;
    return pipe_push(&z->t->rows[z->rank], kind, up ? z->up : z->down, micro);
}

static int push_back_whole(vee *z, int up)
{
    PS_TRY(push_next(z, PS_ACT_INPUT, up));
    return push_next(z, PS_ACT_WEIGHT, up);
}

/* Fills a row, on the assumption that each action takes the same time. Until the rank receives its first gradient, it
 * performs forwards. Then it repeats the six actions of a micro-batch. At the end, it performs WEIGHTs in the time in
 * which it would wait for the last gradients. Rank 0 begins with the forwards of 2 * stages - 1 micro-batches. If the
 * step has fewer micro-batches, the actions of the missing micro-batches are omitted. */
static int fill_vee(ps_pipe_table *t, int rank)
{
    int32_t p = t->spec.stages, m = t->spec.micro_batches > 2 * p - 1 ? t->spec.micro_batches : 2 * p - 1;
    vee z = { .t = t, .rank = rank, .down = rank, .up = 2 * p - 1 - rank };
    for (int32_t i = 0; i < 2 * (p - rank) - 1; i++) PS_TRY(push_next(&z, PS_ACT_FORWARD, 0));
    for (int32_t i = 0; i < rank; i++) {
        PS_TRY(push_next(&z, PS_ACT_FORWARD, 1));
        PS_TRY(push_next(&z, PS_ACT_FORWARD, 0));
    }
    for (int32_t i = 0; i < p - rank; i++) {
        PS_TRY(push_next(&z, PS_ACT_FORWARD, 1));
        PS_TRY(push_back_whole(&z, 1));
    }
    while (z.forward[1] < m) {
        if (z.forward[0] < m) PS_TRY(push_next(&z, PS_ACT_FORWARD, 0));
        PS_TRY(push_back_whole(&z, 0));
        PS_TRY(push_next(&z, PS_ACT_FORWARD, 1));
        PS_TRY(push_back_whole(&z, 1));
    }
    for (int32_t i = 0; i < rank; i++) {
        PS_TRY(push_next(&z, PS_ACT_INPUT, 0));
        PS_TRY(push_next(&z, PS_ACT_INPUT, 1));
    }
    for (int32_t i = 0; i < p - rank; i++) PS_TRY(push_back_whole(&z, 0));
    while (z.weight[1] < m) PS_TRY(push_next(&z, PS_ACT_WEIGHT, 1));
    while (z.weight[0] < m) PS_TRY(push_next(&z, PS_ACT_WEIGHT, 0));
    return 0;
}

/* -- tables -------------------------------------------------------------------------------------------------------- */
/* Returns the number of virtual stages per rank that a schedule requires. Returns 0 if any number is allowed. */
static int32_t virtual_of(int schedule)
{
    switch (schedule) {
    case PS_PIPE_INTERLEAVED: case PS_PIPE_LOOPED_BFS: return 0;
    case PS_PIPE_ZB_V: return 2;
    default: return 1;
    }
}

int ps_pipe_table_new(const ps_pipe_spec *spec, ps_pipe_table **out)
{
    ps_pipe_table *t = NULL;
    int rc = 0;
    if (spec->schedule < 0 || spec->schedule >= PS_PIPE_SCHEDULES)
        return ps_fail(PS_EINVAL, "there is no schedule %d", spec->schedule);
    int32_t wanted = virtual_of(spec->schedule);
    if (wanted && spec->virtual_stages != wanted)
        return ps_fail(PS_EINVAL, "schedule %s has %d virtual stage%s per rank, not %d; interleaved and "
                       "looped_bfs allow any number", names[spec->schedule], wanted, wanted > 1 ? "s" : "",
                       spec->virtual_stages);
    PS_TRY(pipe_new(spec, (int64_t)spec->stages * spec->virtual_stages, &t));
    for (int rank = 0; rc == 0 && rank < spec->stages; rank++) {
        rule r = rule_of(spec, rank);
        rc = spec->schedule == PS_PIPE_ZB_V ? fill_vee(t, rank) : fill_by_rule(t, rank, &r);
    }
    if (rc == 0) rc = pipe_seal(t);
    if (rc < 0) return ps_pipe_table_free(t), rc;
    *out = t;
    return 0;
}
