/* SPDX-License-Identifier: BSD-3-Clause
 * This file manages the groups of a context. Ops find a group by its number in ctx->ranks.groups, until the group is
 * closed. During a dry run, the context records the calls that the ranks make in a step. */
#include "base/error.h"
#include "collectives/collectives.h"
#include "tensor/tensor.h"

static void enroll(ps_ctx *ctx, ps_group *g)
{
    for (int i = 0; i < PS_MAX_GROUPS && g->number < 0; i++) if (!ctx->ranks.groups[i]) g->number = i;
    if (g->number < 0) return;
    ctx->ranks.groups[g->number] = g;
    ctx->refs++;                           /* closing the group clears its entry in the context */
    g->ctx = ctx;
}

static void leave(ps_group *g)
{
    if (!g->ctx) return;
    g->ctx->ranks.groups[g->number] = NULL;
    ps_ctx_release(g->ctx);
    g->ctx = NULL;
}

int group_new(ps_ctx *ctx, ps_comm *comm, ps_group **out)
{
    PS_TRY(group_make(comm, out));
    enroll(ctx, *out);
    return 0;
}

void group_retain(ps_group *g) { g->refs++; }

void ps_group_close(ps_group *g)
{
    if (!g || --g->refs > 0) return;
    group_stop(g);
    leave(g);
    group_free(g);
}

int group_note(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root)
{
    if (!g->ctx || g->comm->size == 1 || g->comm->pretends) return 0;
    ps_rank_call call = { .group = g->number, .op = op, .dtype = dtype, .root = root, .place = at, .nbytes = nbytes };
    return ps_dry_note_calls(g->ctx, &call, 1);
}

int group_without_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root)
{
    if (g->ctx && g->ctx->step->dry) return group_note(g, op, at, dtype, nbytes, root);
    if (g->comm->pretends) group_count(g, op, at, dtype, nbytes, root);
    return 0;
}
