/* SPDX-License-Identifier: BSD-3-Clause
 * Two kinds of nodes without an op: recompute segments and boundaries.
 *
 * At a recompute segment (Chen et al. 2016) the walk stops, and the caller runs the segment's function again.
 * ps_backward_splice() (walk.c) then passes the gradients of the segment's outputs to the new outputs. The nodes of the
 * new run have the highest numbers, so the walk visits them next, as if there were no segment.
 *
 * A boundary has no inputs. Its outputs are the tensors that a stage of a pipeline received. The gradients of these
 * tensors are summed in the node until ps_boundary_take() returns them. The caller sends them to the previous stage. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "grad/tape.h"

/* -- segments ------------------------------------------------------------------------------------------------------ */
void tape_release_reads(ps_storage **list, int n)
{
    for (int i = 0; i < n; i++) ps_storage_release(list[i]);
}

/* Reserves memory for the id of one more segment, so that segment_reap() cannot fail. */
int reap_reserve(ps_ctx *ctx)
{
    PS_TRY(ps_grow(ctx->tape.reaped.ids, ctx->tape.reaped.capacity, ctx->tape.reaped.n + ctx->tape.reaped.live + 1));
    ctx->tape.reaped.live++;
    return 0;
}

void segment_reap(ps_ctx *ctx, int64_t segment)
{
    ctx->tape.reaped.live--;
    ctx->tape.reaped.ids[ctx->tape.reaped.n++] = segment;
}

void ps_segment_begin(ps_ctx *ctx)
{
    ctx->tape.reads.n = 0;
    ctx->tape.reads.failed = false;
    ctx->tape.reads.on = true;
}

void ps_segment_cancel(ps_ctx *ctx)
{
    tape_release_reads(ctx->tape.reads.list, ctx->tape.reads.n);
    ctx->tape.reads.n = 0;
    ctx->tape.reads.on = false;
}

void ps_reads_add(ps_ctx *ctx, ps_storage *s)
{
    ps_reads *r = &ctx->tape.reads;
    if (!ps_try_grow(r->list, r->capacity, r->n + 1)) {
        r->failed = true;                                /* ps_segment_new() reports this failure */
        return;
    }
    s->refs++;
    r->list[r->n++] = s;
}

bool ps_reads_set(ps_ctx *ctx, bool on)
{
    bool was = ctx->tape.reads.on;
    ctx->tape.reads.on = on;
    return was;
}

void ps_tape_free(ps_ctx *ctx)
{
    ps_free(ctx->tape.reaped.ids);
    ps_free(ctx->tape.reads.list);
}

int tape_take_reads(ps_ctx *ctx, ps_node *node)
{
    ps_reads *r = &ctx->tape.reads;
    r->on = false;
    if (r->failed) return ps_fail_nomem(sizeof *r->list * 2 * (size_t)r->capacity);
    if (r->n == 0) return 0;
    node->reads = ps_alloc(sizeof *r->list * (size_t)r->n);
    if (!node->reads) return ps_fail_nomem(sizeof *r->list * (size_t)r->n);
    memcpy(node->reads, r->list, sizeof *r->list * (size_t)r->n);
    node->n_reads = r->n;
    r->n = 0;
    return 0;
}

int ps_segment_new(ps_ctx *ctx, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out, int64_t *segment)
{
    if (n_in < 0 || n_out < 1) return ps_fail(PS_EINVAL, "a recompute segment must have at least one output");
    for (int i = 0; i < n_out; i++) {
        bool fresh =
            out[i] && !out[i]->node && !(out[i]->flags & PS_T_REQUIRES_GRAD) && ps_dtype_is_float(out[i]->dtype_);
        for (int k = 0; fresh && k < n_in; k++) fresh = out[i] != in[k];
        for (int k = 0; fresh && k < i; k++) fresh = out[i] != out[k];
        if (!fresh)
            return ps_fail(PS_EINVAL, "output %d of a recompute segment must be a float tensor computed in it, and "
                           "must be returned only once", i);
    }
    PS_TRY(reap_reserve(ctx));
    ps_node *node = tape_node_new(ctx, SEGMENT, n_in, n_out, 0);
    if (!node) {
        ctx->tape.reaped.live--;
        return PS_ENOMEM;
    }
    int rc = tape_take_reads(ctx, node);
    if (rc < 0) {
        ctx->tape.reaped.live--;
        node->op = PS_OP_COUNT;                          /* the caller has not seen the node's id yet, so the id is not
                                                          * reported when the node is freed */
        ps_node_release(node);
        ps_segment_cancel(ctx);
        return rc;
    }
    node->segment = node->seq;
    for (int i = 0; i < n_in; i++) {
        tape_add_edge(node, i, in[i]);
        if (in[i]) node->saved_in[i] = (saved){ .t = ps_tensor_hold(in[i]), .version = in[i]->storage->version };
    }
    for (int i = 0; i < n_out; i++) {
        out[i]->node = node;
        out[i]->node_out = i;
        node->refs++;
    }
    *segment = node->segment;
    if (ctx->offload.on) ps_away_round(ctx->offload.away);
    for (int i = 0; i < n_in; i++) if (in[i]) ps_storage_leave(ctx, in[i]->storage);
    rc = node->n_reads > 0;
    ps_node_release(node);
    return rc;
}

int64_t ps_segment_reap(ps_ctx *ctx)
{
    return ctx->tape.reaped.n > 0 ? ctx->tape.reaped.ids[--ctx->tape.reaped.n] : -1;
}

/* -- boundaries ---------------------------------------------------------------------------------------------------- */
int ps_boundary(ps_ctx *ctx, int n, ps_tensor *const *in, ps_tensor **out)
{
    int made = 0, rc = 0;
    ps_node *node = NULL;
    if (n < 1 || n > PS_MAX_ROOTS)
        return ps_fail(PS_EINVAL, "a boundary cannot have %d tensors; it must have 1 to %d", n, PS_MAX_ROOTS);
    for (int i = 0; i < n; i++) {
        PS_TRY(ps_tensor_check_alive(in[i]));
        if (in[i]->node || (in[i]->flags & PS_T_REQUIRES_GRAD))
            return ps_fail(PS_EINVAL, "tensor %d of a boundary already has a history, or is a parameter", i);
    }
    if (ctx->tape.grad_enabled && !(node = tape_node_new(ctx, BOUNDARY, 0, n, 0))) return PS_ENOMEM;
    while (rc == 0 && made < n) {
        rc = ps_tensor_detach(in[made], &out[made]);
        if (rc == 0) made++;
    }
    for (int i = 0; i < made; i++) {
        if (rc < 0) {
            ps_tensor_release(out[i]);
            out[i] = NULL;
        } else if (node && ps_dtype_is_float(out[i]->dtype_)) {
            out[i]->node = node;
            out[i]->node_out = i;
            node->refs++;
        }
    }
    if (node) ps_node_release(node);
    return rc;
}

int ps_boundary_take(ps_ctx *ctx, int n, ps_tensor *const *out, ps_tensor **gradients)
{
    if (ctx->tape.walk && ctx->tape.walk->active)
        return ps_fail(PS_ESTATE, "gradients of a boundary can be taken only after the backward walk has ended");
    for (int i = 0; i < n; i++)
        if (out[i]->node && out[i]->node->op != BOUNDARY)
            return ps_fail(PS_EINVAL, "tensor %d is not an output of this boundary", i);
    for (int i = 0; i < n; i++) {
        ps_tensor **slot = out[i]->node ? &out[i]->node->dout[out[i]->node_out] : NULL;
        gradients[i] = slot ? *slot : NULL;
        if (!gradients[i]) continue;
        *slot = NULL;
        ps_scope_adopt(ctx, gradients[i]->storage);       /* the storage exists as long as its header, so no scope may
                                                           * drop the storage */
        ps_storage_unhold(gradients[i]->storage);
    }
    return 0;
}
