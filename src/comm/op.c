/* SPDX-License-Identifier: BSD-3-Clause
 * Collectives as ops: what dispatch calls for rows of ops.def with the flag RANKS. Inputs and outputs are contiguous
 * and in host memory; their gradients are such ops, too (ops/ranks.c). */
#include <string.h>
#include "base/dtype.h"
#include "base/error.h"
#include "comm/group.h"
#include "tensor/tensor.h"

/* attrs of all these ops; the group as this rank has it. */
static int find_group(ps_ctx *ctx, const ps_attrs_all_reduce *at, ps_group **out)
{
    ps_group *g = at->group >= 0 && at->group < PS_MAX_GROUPS ? ctx->groups[at->group] : NULL;
    if (!g) return ps_fail(PS_ESTATE, "the group of ranks was closed");
    if (g->comm->size != at->size || g->comm->rank != at->rank)
        return ps_fail(PS_EINVAL, "rank %d of %d was said, the group has rank %d of %d", at->rank, at->size,
                       g->comm->rank, g->comm->size);
    *out = g;
    return 0;
}

static int carry_out(ps_group *g, int op, const ps_attrs_all_reduce *at, const ps_view *in, const ps_view *out)
{
    int dtype = in->dtype;
    int64_t nbytes = in->numel * ps_dtype_bytes(dtype);
    char *x = in->data, *y = out->data;
    switch (op) {
    case PS_OP_all_reduce:
        if (nbytes > 0) memcpy(y, x, (size_t)nbytes);
        return group_all_reduce(g, dtype, y, nbytes, 0);
    case PS_OP_reduce_scatter: return group_reduce_scatter(g, dtype, x, nbytes, y, 0);
    case PS_OP_all_gather: return group_all_gather(g, dtype, x, nbytes, y, 0);
    case PS_OP_broadcast:
        if (nbytes > 0) memcpy(y, x, (size_t)nbytes);
        return group_broadcast(g, dtype, y, nbytes, at->root, 0);
    default: return ps_fail(PS_EUNSUP, "no such op of several ranks");
    }
}

static int group_op(ps_ctx *ctx, int op, const void *attrs, const ps_view *in, const ps_view *out)
{
    ps_group *g = NULL;
    PS_TRY(find_group(ctx, attrs, &g));
    group_drain(g);
    int rc = carry_out(g, op, attrs, in, out);
    group_done(g);
    return rc;
}

void group_enroll(ps_ctx *ctx, ps_group *g)
{
    ctx->of_ranks = group_op;
    for (int i = 0; i < PS_MAX_GROUPS && g->number < 0; i++) if (!ctx->groups[i]) g->number = i;
    if (g->number < 0) return;
    ctx->groups[g->number] = g;
    ctx->refs++;                           /* what is freed last clears its place */
    g->ctx = ctx;
}

void group_leave(ps_group *g)
{
    if (!g->ctx) return;
    g->ctx->groups[g->number] = NULL;
    ps_ctx_release(g->ctx);
    g->ctx = NULL;
}
