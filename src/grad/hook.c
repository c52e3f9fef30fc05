/* SPDX-License-Identifier: BSD-3-Clause
 * Hooks of tensors: functions of the script that receive the complete gradient of a tensor and can replace the
 * gradient.
 *
 * The hooks of an op's output belong to the node of the op. The walk stops at this node before it runs the node's rule.
 * A leaf with hooks has a node of its own, LEAF. A LEAF node sums the gradients of one walk before they are added to
 * the leaf's gradient. It has the lowest number, so the walk visits it last. The leaf owns the node. The node has an
 * edge back to the leaf. The edge counts as a reference to the leaf only while the node waits in a walk. */
#include "base/error.h"
#include "grad/tape.h"

/* -- registering --------------------------------------------------------------------------------------------------- */
static int leaf_node(ps_tensor *leaf, ps_node **out)
{
    if (!leaf->hook) {
        ps_node *node = tape_node_new(leaf->ctx, LEAF, 1, 1, 0);
        if (!node) return PS_ENOMEM;
        node->seq = -2 - node->seq;
        node->in_meta[0] = ps_tensor_meta(leaf);
        node->in_meta[0].dtype = tape_leaf_dtype(leaf);
        node->edges[0].leaf = leaf;
        leaf->hook = node;
    }
    *out = leaf->hook;
    return 0;
}

int ps_tensor_hook(ps_tensor *t, int64_t *id, int *out)
{
    ps_node *node = t->node;
    if (!ps_tape_wants(t))
        return ps_fail(PS_EINVAL, "a hook of a tensor that requires no gradient would never run; call requires_grad() "
                       "on it first");
    if (node && node->passed)
        return ps_fail(PS_ESTATE, "backward has already run through %s, so a hook of its output would never run",
                       tape_name(node));
    if (!node) PS_TRY(leaf_node(t, &node));
    if (!node->hooks) {
        PS_TRY(reap_reserve(t->ctx));
        node->hooks = t->ctx->tape.next_seq++;
    }
    *id = node->hooks;
    *out = t->node ? t->node_out : 0;
    return 0;
}

void hooks_end(ps_node *node)
{
    if (!node->hooks || node->op == LEAF) return;
    segment_reap(node->ctx, node->hooks);
    node->hooks = 0;
}

/* -- leaves -------------------------------------------------------------------------------------------------------- */
void ps_hook_release(ps_node *node)
{
    node->edges[0].leaf = NULL;
    ps_node_release(node);
}

void leaf_let_go(ps_node *node)
{
    tape_let_go(&node->dout[0]);
    ps_tensor_release(node->edges[0].leaf);
}

int leaf_pass(ps_ctx *ctx, ps_walk *w, ps_node *node)
{
    ps_tensor *leaf = node->edges[0].leaf, *grad = node->dout[0];
    node->dout[0] = NULL;
    tape_uncount(node);
    int rc = grad ? tape_add_to_leaf(ctx, leaf, grad) : 0;
    if (rc == 0 && !w->seeks) rc = tape_leaf_final(ctx, leaf);
    if (rc == 0) leaf_let_go(node);                       /* after a failure, tape_give_up() releases the leaf */
    return rc;
}

/* -- the walk's stop ----------------------------------------------------------------------------------------------- */
int ps_stop_gradient(ps_ctx *ctx, int out, ps_tensor **gradient)
{
    ps_node *node = ctx->tape.walk ? ctx->tape.walk->stopped : NULL;
    if (!node) return ps_fail(PS_ESTATE, "the walk is not stopped");
    if (out < 0 || out >= node->n_out) return ps_fail(PS_ERANGE, "%s has no output %d", tape_name(node), out + 1);
    *gradient = node->dout[out];
    return 0;
}

int ps_hook_replace(ps_ctx *ctx, int out, ps_tensor *gradient)
{
    ps_walk *w = ctx->tape.walk;
    ps_tensor *before;
    if (!w || !w->at_hooks) return ps_fail(PS_ESTATE, "the walk is not stopped at hooks");
    PS_TRY(ps_stop_gradient(ctx, out, &before));
    PS_TRY(ps_tensor_check_alive(gradient));
    if (!before || !ps_same_shape(before, gradient) || before->dtype_ != gradient->dtype_ ||
        before->device_ != gradient->device_)
        return ps_fail(PS_EINVAL, "a hook must return a gradient of the same shape, type and device");
    ps_tensor_hold(gradient);
    tape_let_go(&w->stopped->dout[out]);
    w->stopped->dout[out] = gradient;
    return 0;
}

int ps_hooks_done(ps_ctx *ctx)
{
    ps_walk *w = ctx->tape.walk;
    if (!w || !w->at_hooks) return ps_fail(PS_ESTATE, "the walk is not stopped at hooks");
    w->hooks_ran = true;
    return 0;
}
