/* SPDX-License-Identifier: BSD-3-Clause
 * Walks that compute the gradients of chosen tensors, the targets. Such a walk does not change the gradients of leaves,
 * and passes only nodes that lead to a target. To find these nodes, the nodes are examined by ascending number, so that
 * producers come before their consumers. */
#include <stdlib.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "grad/tape.h"

target *targets_leaf(ps_walk *w, const ps_tensor *leaf)
{
    for (int i = 0; w->seeks && i < w->n_targets; i++)
        if (w->targets[i].t == leaf) return &w->targets[i];
    return NULL;
}

bool targets_want(const ps_walk *w, const edge *e)
{
    if (!w->seeks) return true;
    if (!e->node) return targets_leaf((ps_walk *)(uintptr_t)w, e->leaf) != NULL;
    return e->node->target == w->id || (e->node->seen == w->id && e->node->leads);
}

/* -- marking ------------------------------------------------------------------------------------------------------- */
static int by_number(const void *a, const void *b)
{
    const ps_node *x = *(ps_node *const *)a, *y = *(ps_node *const *)b;
    return (x->seq > y->seq) - (x->seq < y->seq);
}

/* Returns true if the node leads to a target. A segment counts as leading to every target that is a leaf, because its
 * function may read any leaf. */
static bool leads(ps_walk *w, const ps_node *node)
{
    for (int i = 0; node->op == SEGMENT && i < w->n_targets; i++) if (!w->targets[i].t->node) return true;
    for (int i = 0; i < node->n_in; i++) {
        const edge *e = &node->edges[i];
        if ((e->node || e->leaf) && targets_want(w, e)) return true;
    }
    return false;
}

static void push(const ps_walk *w, ps_node *node, ps_node **stack)
{
    if (!node || node->passed || node->seen == w->id) return;
    node->seen = w->id;
    node->leads = false;
    node->next_free = *stack;
    *stack = node;
}

int targets_mark(ps_walk *w, ps_node *node)
{
    ps_node *stack = NULL, **found = NULL;
    int32_t n = 0, capacity = 0;
    int rc = 0;
    push(w, node, &stack);
    while (rc == 0 && (node = stack)) {
        stack = node->next_free;
        rc = ps_grow(found, capacity, n + 1);
        if (rc == 0) found[n++] = node;
        for (int i = 0; i < node->n_in; i++) push(w, node->edges[i].node, &stack);
    }
    if (rc == 0 && n > 0) qsort(found, (size_t)n, sizeof *found, by_number);
    for (int32_t i = 0; rc == 0 && i < n; i++) found[i]->leads = leads(w, found[i]);
    ps_free(found);
    return rc;
}

/* -- taking -------------------------------------------------------------------------------------------------------- */
int targets_take(ps_walk *w, ps_node *node)
{
    for (int i = 0; node->target == w->id && i < w->n_targets; i++) {
        target *to = &w->targets[i];
        ps_tensor *grad = to->t->node == node ? node->dout[to->t->node_out] : NULL;
        if (grad) to->sum = ps_tensor_hold(grad);
    }
    return 0;
}

void targets_drop(ps_walk *w)
{
    for (int i = 0; i < w->n_targets; i++) {
        ps_tensor_unhold(w->targets[i].sum);
        ps_tensor_release(w->targets[i].t);
    }
    w->n_targets = 0;
    w->seeks = false;
}

void targets_close(ps_walk *w) { w->seeks = false; }

static int set_targets(ps_walk *w, int n, ps_tensor *const *to)
{
    targets_drop(w);
    PS_TRY(ps_grow(w->targets, w->targets_capacity, n));
    for (int i = 0; i < n; i++) {
        ps_tensor_retain(to[i]);
        w->targets[w->n_targets++] = (target){ .t = to[i] };
    }
    return 0;
}

int ps_backward_for(ps_ctx *ctx, int n, ps_tensor *const *roots, ps_tensor *const *gradients, int keep, int n_to,
                    ps_tensor *const *to, int64_t *stopped)
{
    for (int i = 0; i < n_to; i++) {
        if (!ps_tape_wants(to[i]))
            return ps_fail(PS_EINVAL, "input %d requires no gradient, so no op that uses it was recorded", i + 1);
        for (int k = 0; k < i; k++)
            if (to[k] == to[i])
                return ps_fail(PS_EINVAL, "inputs %d and %d are the same tensor; pass it once", k + 1, i + 1);
    }
    if (ctx->tape.walk && ctx->tape.walk->active) return ps_fail_walking();
    if (!ctx->tape.walk && !(ctx->tape.walk = ps_alloc0(sizeof *ctx->tape.walk)))
        return ps_fail_nomem(sizeof *ctx->tape.walk);
    ps_walk *w = ctx->tape.walk;
    PS_TRY(set_targets(w, n_to, to));
    w->seeks = n_to > 0;
    w->keeps = keep != 0;
    int rc = ps_backward_begin_n(ctx, n, roots, gradients, stopped);
    if (rc <= 0) w->seeks = w->keeps = false;
    return rc;
}

int ps_backward_taken(ps_ctx *ctx, int n, ps_tensor **gradients)
{
    ps_walk *w = ctx->tape.walk;
    if (!w || w->active || w->seeks) return ps_fail(PS_ESTATE, "gradients can be taken only after the backward walk "
                                                               "has ended");
    if (n != w->n_targets)
        return ps_fail(PS_EINVAL, "the walk was for %d tensors, but the gradients of %d were requested", w->n_targets,
                       n);
    for (int i = 0; i < n; i++) {
        gradients[i] = w->targets[i].sum;
        w->targets[i].sum = NULL;
        if (!gradients[i]) continue;
        ps_scope_adopt(ctx, gradients[i]->storage);      /* the storage exists as long as its header, so no scope may
                                                          * drop the storage */
        ps_storage_unhold(gradients[i]->storage);
    }
    targets_drop(w);
    return 0;
}
