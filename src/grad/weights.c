/* SPDX-License-Identifier: BSD-3-Clause
 * Backward in two parts (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). The action INPUT computes the gradients
 * of activations, and adds nodes with parameters to a list. The action WEIGHT computes the gradients of these
 * parameters from the list. The gradients of every parameter are added in the same order as in an undivided backward:
 *
 * - The rule of an op with the flag SPLIT runs twice, for different inputs. Any other rule runs once, and the gradients
 *   of parameters that it computes are kept (ps_node.din).
 * - Nodes that are computed only from parameters are passed during WEIGHT, between the nodes of the list, by descending
 *   number.
 * - A listed node reads its output's gradient later. It keeps a header of the gradient that does not count as an owner
 *   (ps_storage.tape.later). If a sum would overwrite the gradient's bytes, the sum is written to a new tensor instead.
 * - If a listed node has saved a cheap node, the cheap node keeps everything that it needs to compute its output
 *   again. */
#include <string.h>
#include "base/error.h"
#include "base/grow.h"
#include "grad/tape.h"

/* -- lists -------------------------------------------------------------------------------------------------------- */
static weight_list *find(ps_walk *w, const ps_action *a)
{
    for (int32_t i = 0; i < w->n_lists; i++)
        if (w->lists[i].used && w->lists[i].vstage == a->vstage && w->lists[i].micro == a->micro) return &w->lists[i];
    return NULL;
}

int weights_open(ps_ctx *ctx, ps_walk *w)
{
    const ps_action *a = &ctx->step->is.now;
    if (find(w, a))
        return ps_fail(PS_ESTATE, "backward of micro-batch %d ran a second time while the weight gradients of the "
                       "first one are still deferred", a->micro);
    int32_t i = 0;
    while (i < w->n_lists && w->lists[i].used) i++;
    PS_TRY(ps_grow(w->lists, w->lists_capacity, i + 1));
    if (i == w->n_lists) w->lists[w->n_lists++] = (weight_list){ .n = 0 };
    w->lists[i].vstage = a->vstage, w->lists[i].micro = a->micro;
    w->lists[i].used = true;
    w->put_off = i;
    return 0;
}

static int append(ps_walk *w, ps_node *node)
{
    weight_list *list = &w->lists[w->put_off];
    PS_TRY(ps_grow(list->nodes, list->capacity, list->n + 1));
    list->nodes[list->n++] = node;
    node->refs++;
    return 0;
}

static void unlist(ps_node *node)
{
    tape_uncount(node);
    node->listed = false;
    tape_release_all(node);
    ps_node_release(node);
}

static void clear(weight_list *list)
{
    while (list->n > 0) unlist(list->nodes[--list->n]);
    list->used = false;
}

void weights_drop(ps_walk *w)
{
    for (int32_t i = 0; i < w->n_lists; i++) clear(&w->lists[i]);
}

/* -- saved tensors that are still needed --------------------------------------------------------------------------- */
void weights_unclaim(ps_node *cheap)
{
    cheap->later--;
    weights_release(cheap);
}

void weights_release(ps_node *node)
{
    bool needed = node->listed || node->later > 0;
    if (needed && !node->claims) {
        node->claims = true;
        for (int i = 0; i < node->n_in; i++) {
            if (!node->saved_in[i].cheap) continue;
            node->saved_in[i].cheap->later++;
            weights_release(node->saved_in[i].cheap);
        }
    }
    if (!needed && node->passed) tape_release_saved(node);
}

/* Replaces *t (held) by a new header of the same bytes that does not count as an owner. */
static int keep_for_later(ps_tensor **t)
{
    ps_tensor *copy;
    if (!*t) return 0;
    PS_TRY(ps_tensor_detach(*t, &copy));
    ps_storage_hold(copy->storage);
    copy->flags |= PS_T_LATER;
    copy->storage->tape.later++;
    ps_tensor_unhold(*t);
    *t = copy;
    return 0;
}

/* Releases tensors that only the first phase needs. The second phase reads a parameter only if the op's row marks the
 * parameter with + (ahead_in). If the rule has returned a saved output as a gradient, the output now belongs to the
 * receiver of the gradient. */
static void release_first_phase(ps_node *node, ps_tensor *const *din)
{
    const ps_opinfo *row = ps_op(node->op);
    for (int i = 0; i < node->n_in; i++)
        if (tape_is_later(&node->edges[i]) && !(row->ahead_in >> i & 1)) tape_let_go(&node->saved_in[i].t);
    for (int k = 0; k < node->n_out; k++)
        for (int i = 0; i < node->n_in; i++)
            if (din[i] && din[i] == node->saved_out[k].t) tape_let_go(&node->saved_out[k].t);
}

int weights_put_off(ps_walk *w, ps_node *node, bool split, ps_tensor **din)
{
    int rc = append(w, node);
    for (int i = 0; din && i < node->n_in; i++) {
        if (!din[i] || !tape_is_later(&node->edges[i])) continue;
        node->din[i] = din[i];
        din[i] = NULL;
        if (rc == 0) rc = keep_for_later(&node->din[i]);
    }
    node->has_rule = split || !din;
    for (int i = 0; i < node->n_out; i++) {
        if (!node->has_rule) tape_let_go(&node->dout[i]);
        else if (rc == 0) rc = keep_for_later(&node->dout[i]);
    }
    if (din && split) release_first_phase(node, din);
    if (!node->has_rule) weights_release(node);            /* the rule has run, so only tensors that other nodes need
                                                            * are kept */
    node->listed = true;
    weights_release(node);
    return rc;
}

int weights_relay(ps_walk *w, ps_tensor *to, ps_tensor *grad, int64_t seq)
{
    ps_node *node = tape_node_new(to->ctx, RELAY, 1, 0, 0);
    if (!node) {
        ps_tensor_unhold(grad);
        return PS_ENOMEM;
    }
    node->seq = seq;
    node->passed = true;
    node->in_meta[0] = ps_tensor_meta(to);
    node->edges[0] = to->node ? (edge){ .node = to->node, .out = to->node_out } : (edge){ .leaf = to };
    if (to->node) to->node->refs++;
    else ps_tensor_retain(to);
    int rc = weights_put_off(w, node, false, &grad);
    ps_node_release(node);
    return rc;
}

/* -- the second part ---------------------------------------------------------------------------------------------- */
/* Computes the deferred gradients of a listed node, unless node->din contains them already, and delivers them. */
static int weights_of(ps_ctx *ctx, ps_walk *w, ps_node *node)
{
    ps_tensor *din[PS_MAX_IN] = { NULL };
    int rc = 0;
    for (int i = 0; i < node->n_out; i++) tape_is_now(node->dout[i]);
    if (node->has_rule) {
        ps_grad g = { .ctx = ctx, .node = node, .attrs = node->attrs.bytes, .n_in = node->n_in, .n_out = node->n_out,
                      .phase = PS_GRAD_WEIGHTS, .dout = node->dout, .din = din };
        rc = ps_op(node->op)->grad(&g);
        for (int i = 0; i < node->n_in; i++) if (din[i]) ps_storage_hold(din[i]->storage);
        while (g.n_temps > 0) ps_tensor_release(g.temps[--g.n_temps]);
    }
    for (int i = 0; i < node->n_in; i++) {
        if (din[i] || !node->din[i]) continue;
        tape_is_now(din[i] = node->din[i]);
        node->din[i] = NULL;
    }
    tape_uncount(node);
    node->listed = false;
    for (int i = 0; i < node->n_out; i++) tape_let_go(&node->dout[i]);
    weights_release(node);
    for (int i = 0; i < node->n_in; i++) {
        if (!din[i]) continue;
        if (rc == 0 && tape_is_later(&node->edges[i])) rc = tape_deliver(ctx, w, node, i, din[i]);
        else ps_tensor_unhold(din[i]);
    }
    for (int i = 0; rc == 0 && i < node->n_in; i++)
        if (node->edges[i].leaf) rc = tape_leaf_final(ctx, node->edges[i].leaf);
    if (rc < 0) ps_error_prefix("in the backward of weights: ");
    return rc;
}

/* Passes nodes with numbers above `seq` that were computed only from parameters, because an undivided backward would
 * pass them before the node `seq`. Returns 1 if the walk stopped at hooks. */
static int pass_down_to(ps_ctx *ctx, ps_walk *w, int64_t seq, int64_t *stopped)
{
    int rc = 0;
    while (rc == 0 && tape_is_due(w, seq)) rc = tape_visit(ctx, w, stopped);
    return rc;
}

static int go_through(ps_ctx *ctx, ps_walk *w, weight_list *list, int64_t *stopped)
{
    for (; list->at < list->n; list->at++) {
        ps_node *node = list->nodes[list->at];
        int rc = pass_down_to(ctx, w, node->seq, stopped);
        if (rc != 0) return rc;
        tape_watch(ctx, node);
        rc = weights_of(ctx, w, node);
        tape_watch(ctx, NULL);
        PS_TRY(rc);
    }
    return pass_down_to(ctx, w, INT64_MIN, stopped);
}

void weights_close(ps_walk *w)
{
    if (w->processed < 0) return;
    clear(&w->lists[w->processed]);
    w->processed = -1;
}

int weights_go_on(ps_ctx *ctx, ps_walk *w, int64_t *stopped)
{
    int enabled = ps_set_grad_enabled(ctx, 0);
    int rc = go_through(ctx, w, &w->lists[w->processed], stopped);
    ps_set_grad_enabled(ctx, enabled);
    if (rc <= 0) ps_backward_end(ctx);
    return rc;
}

int ps_backward_weights(ps_ctx *ctx, int64_t *stopped)
{
    const ps_action *a = &ctx->step->is.now;
    ps_walk *w = ctx->tape.walk;
    if (a->kind != PS_ACT_WEIGHT)
        return ps_fail(PS_ESTATE, "the step's current action is not a backward of weights");
    if (w && w->active) return ps_fail_walking();
    weight_list *list = w ? find(w, a) : NULL;
    if (!list)
        return ps_fail(PS_ESTATE, "no weight gradients of micro-batch %d, virtual stage %d were deferred", a->micro,
                       a->vstage);
    int rc = 0;
    w->active = true;
    w->id = ctx->tape.next_seq++;
    w->managed = false;
    w->put_off = -1;
    w->processed = (int32_t)(list - w->lists);
    list->at = 0;
    for (int32_t i = 0; i < list->n; i++) tape_count_listed(w, list->nodes[i]);
    if (w->managed && ctx->engine.hooks) rc = ctx->engine.hooks->walk_begin(ctx);
    if (ctx->offload.away) ps_away_backward(ctx->offload.away, true);
    if (rc == 0) return weights_go_on(ctx, w, stopped);
    ps_backward_end(ctx);
    return rc;
}
