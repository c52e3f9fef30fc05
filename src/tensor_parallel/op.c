/* SPDX-License-Identifier: BSD-3-Clause
 * This file runs collectives as ops. Dispatch calls group_op for the ops whose row in ops.def has the flag RANKS.
 * Inputs and outputs are contiguous and on one device. The gradient of such an op is also computed by such an op
 * (ops/ranks.c). linear.c and loss.c perform the ops that contain products. */
#include "base/error.h"
#include "tensor/tensor.h"
#include "tensor_parallel/ops.h"
#include "tensor_parallel/rows.h"

/* Finds the group at->group. Returns PS_EINVAL if at->rank or at->size does not match the group. `at` may point to the
 * attributes of any op with the flag RANKS, because they begin with the attributes of all_reduce. */
static int find_group(ps_ctx *ctx, const ps_attrs_all_reduce *at, ps_group **out)
{
    ps_group *g = at->group >= 0 && at->group < PS_MAX_GROUPS ? ctx->ranks.groups[at->group] : NULL;
    if (!g) return ps_fail(PS_ESTATE, "the group of ranks was closed");
    if (g->comm->size != at->size || g->comm->rank != at->rank)
        return ps_fail(PS_EINVAL, "the op was called for rank %d of %d, but this is rank %d of %d in the group",
                       at->rank, at->size,
                       g->comm->rank, g->comm->size);
    *out = g;
    return 0;
}

/* Returns the collective (OP_*) that performs the op `op`, or -1 if the op also computes products. */
static int call_of(int op)
{
    switch (op) {
    case PS_OP_all_reduce:
    case PS_OP_reduce_from_tp: return OP_ALL_REDUCE;
    case PS_OP_reduce_scatter: return OP_REDUCE_SCATTER;
    case PS_OP_all_gather:
    case PS_OP_all_gather_again:
    case PS_OP_gather_from_tp: return OP_ALL_GATHER;
    case PS_OP_broadcast: return OP_BROADCAST;
    default: return -1;
    }
}

static int with_products(ps_group *g, place at, bool carried, ps_call *call)
{
    return call->op == PS_OP_parallel_lm_loss ? group_lm_loss(g, at, call) : group_linear(g, at, carried, call);
}

static int carry_out(ps_group *g, int call, place at, int root, const ps_view *in, const ps_view *out)
{
    int dtype = in->dtype, rc = group_after_now(g, at);
    int64_t nbytes = nbytes_of(in);
    char *x = in->data, *y = out->data;
    if (rc == 0 && (call == OP_ALL_REDUCE || call == OP_BROADCAST)) rc = group_copy(g, at, y, x, nbytes);
    switch (call) {
    case OP_ALL_REDUCE: return group_all_reduce(g, at, dtype, y, nbytes, rc);
    case OP_REDUCE_SCATTER: return group_reduce_scatter(g, at, dtype, x, nbytes, y, rc);
    case OP_ALL_GATHER: return group_all_gather(g, at, dtype, x, nbytes, y, rc);
    default: return group_broadcast(g, at, dtype, y, nbytes, root, rc);
    }
}

int group_op(ps_ctx *ctx, int device, ps_call *call)
{
    const ps_backend *be = ctx->devices[device];
    const ps_attrs_all_reduce *attributes = call->attrs;
    ps_group *g = NULL;
    place at = be->is_host ? ON_HOST : ON_DEVICE;
    PS_TRY(find_group(ctx, attributes, &g));
    int as = call_of(call->op);
    if (call->dry && as < 0) return with_products(g, at, be->is_host || be->host_carries, call);
    if (call->dry)
        return group_without_bytes(g, as, at, call->in[0].dtype, nbytes_of(&call->in[0]),
                                   as == OP_BROADCAST ? attributes->root : 0);
    PS_TRY(group_place(g, ctx, device, &at));
    group_drain(g);
    int rc = as < 0 ? with_products(g, at, g->at[at].comm == g->comm, call)
                    : carry_out(g, as, at, attributes->root, &call->in[0], &call->out[0]);
    group_done(g);
    if (rc == 0) return 0;
    ps_error_kept why;
    ps_error_keep(&why);
    group_catch_up(g, at, -1);             /* copies of the output must end before the output is freed */
    return ps_error_again(&why);
}
