/* SPDX-License-Identifier: BSD-3-Clause
 * The functions that a gradient rule calls (ps_grad, tensor/optable.h). They read the inputs and outputs of the rule's
 * node, find the tensor for a gradient, run ops and make temporaries. If the node has not kept a tensor, the tensor is
 * computed again. */
#include <stdarg.h>
#include "base/error.h"
#include "grad/tape.h"

/* -- calls of gradient rules --------------------------------------------------------------------------------------- */
bool ps_grad_wants_ever(const ps_grad *g, int i)
{
    const edge *e = &g->node->edges[i];
    return (e->node || e->leaf) && targets_want(g->ctx->tape.walk, e);
}

bool ps_grad_wants(const ps_grad *g, int i)
{
    bool weights = tape_is_later(&g->node->edges[i]);
    return ps_grad_wants_ever(g, i) && (g->phase == PS_GRAD_WHOLE || weights == (g->phase == PS_GRAD_WEIGHTS));
}

int ps_grad_keep(ps_grad *g, ps_tensor *t)
{
    if (g->phase == PS_GRAD_INPUTS && !g->node->kept) g->node->kept = ps_tensor_hold(t);
    return 0;
}

ps_tensor *ps_grad_kept(const ps_grad *g) { return g->node->kept; }

const ps_meta *ps_grad_in_meta(const ps_grad *g, int i) { return &g->node->in_meta[i]; }

int tape_check_version(const ps_node *node, const saved *s)
{
    if (!s->t || s->t->storage->version == s->version) return 0;
    char text[160];
    return ps_fail(PS_ESTALE, "backward of %s needs a tensor of shape %s that was changed in place after it was used",
                   tape_name(node), ps_shape_text(s->t->ndim, s->t->shape_, text, sizeof text));
}

static int saved_get(ps_node *node, int i, ps_tensor **out);

static int compute_again(ps_node *node)
{
    if (node->again) return 0;
    if (node->passed && node->later == 0) return tape_passed_already(node);
    ps_tensor *in[PS_MAX_IN], *out[PS_MAX_OUT] = { NULL };
    for (int i = 0; i < node->n_in; i++) PS_TRY(saved_get(node, i, &in[i]));
    PS_TRY(ps_apply_all(node->ctx, node->op, node->n_in, in, node->attrs.bytes, out));
    for (int i = 1; i < node->n_out; i++) if (out[i]) ps_tensor_release(out[i]);
    ps_storage_hold(out[0]->storage);
    node->again = out[0];
    return 0;
}

static int saved_get(ps_node *node, int i, ps_tensor **out)
{
    saved *s = &node->saved_in[i];
    if (s->cheap) {
        PS_TRY(compute_again(s->cheap));
        *out = s->cheap->again;
        return 0;
    }
    PS_TRY(tape_check_version(node, s));
    *out = s->t;
    return 0;
}

int ps_grad_in(ps_grad *g, int i, ps_tensor **out) { return saved_get(g->node, i, out); }

int ps_grad_out(ps_grad *g, int i, ps_tensor **out)
{
    PS_TRY(tape_check_version(g->node, &g->node->saved_out[i]));
    *out = g->node->saved_out[i].t;
    return 0;
}

/* -- places of gradients ------------------------------------------------------------------------------------------- */
/* Returns true if input i is a leaf, and another input of the node is the same leaf. */
static bool comes_twice(const ps_grad *g, int i)
{
    for (int k = 0; k < g->n_in; k++)
        if (k != i && g->node->edges[k].leaf == g->node->edges[i].leaf) return true;
    return false;
}

/* Returns true if t is the only owner of its bytes. Headers with PS_T_LATER do not count as owners. If weight gradients
 * were not deferred, sums would be written into these bytes. */
static bool is_alone(const ps_tensor *t)
{
    const ps_storage *s = t->storage;
    return t->refs == 1 && s->refs - s->tape.later == 1 && !s->bytes.kept && ps_tensor_is_contiguous(t);
}

static void replace(ps_tensor **held, ps_tensor *by)
{
    ps_tensor_hold(by);
    ps_tensor_unhold(*held);
    *held = by;
}

/* Called before a gradient is added to *there, the sum of an output's gradients so far. If deferred weight gradients
 * will read the bytes of *there, replaces *there by a copy. */
static int spare_later(ps_grad *g, ps_tensor **there)
{
    static const ps_attrs_contiguous none;
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    if (!*there || (*there)->storage->tape.later == 0 || !is_alone(*there)) return 0;
    PS_TRY(ps_apply_all(g->ctx, PS_OP_contiguous, 1, there, &none, all));
    replace(there, all[0]);
    ps_tensor_release(all[0]);
    return 0;
}

/* Makes a tensor for a deferred gradient. The tensor's type is at least fp32, and at least as wide as the type of the
 * sum to which the gradient will be added. */
static int dest_for_later(ps_grad *g, int i, ps_tensor **out)
{
    ps_meta m = *ps_grad_in_meta(g, i);
    if (ps_dtype_bytes(m.dtype) < 4) m.dtype = PS_F32;
    int k = 0;
    while (!g->dout[k]) k++;                    /* at least one output got a gradient */
    return ps_grad_new(g, g->dout[k]->device_, &m, out);
}

int ps_grad_dest(ps_grad *g, int i, ps_tensor **out, int32_t *accumulate)
{
    const edge *e = &g->node->edges[i];
    *out = NULL;
    *accumulate = 0;
    if (g->puts_off && tape_is_later(e)) return dest_for_later(g, i, out);
    int k;
    ps_node *sum = tape_sum_node(e, &k);
    if (sum) PS_TRY(spare_later(g, &sum->dout[k]));
    if (!sum && g->ctx->tape.walk->seeks) return 0;
    ps_tensor *there = sum ? sum->dout[k] : e->leaf ? e->leaf->grad_ : NULL, *place = NULL;
    if (there && (sum ? ps_tensor_exclusive(there) : ps_tensor_is_contiguous(there))) {
        *out = there;
        *accumulate = 1;
    }
    if (there || e->node || !e->leaf) return 0;
    if (e->leaf->managed && !sum) PS_TRY(g->ctx->engine.hooks->grad_place(g->ctx, e->leaf, &place));
    if (place && !comes_twice(g, i)) {
        *out = place;
        return 0;
    }
    /* If two inputs are the same leaf, their gradients are added when they are delivered, in the type of the sum. */
    ps_meta m = ps_tensor_meta(e->leaf);
    m.dtype = place ? place->dtype_ : tape_leaf_dtype(e->leaf);
    return m.dtype == e->leaf->dtype_ ? 0 : ps_grad_new(g, e->leaf->device_, &m, out);
}

int ps_grad_own(ps_grad *g, ps_tensor **t)
{
    static const ps_attrs_contiguous none;
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    if (!g->ctx->tape.walk->keeps) return 0;
    PS_TRY(ps_run_list(g, PS_OP_contiguous, &none, all, 1, t));
    *t = all[0];
    return 0;
}

void ps_grad_give(ps_grad *g, int i, ps_tensor *t)
{
    ps_tensor_retain(t);
    if (g->din[i]) ps_tensor_release(g->din[i]);
    g->din[i] = t;
}

/* -- ops and temporaries ------------------------------------------------------------------------------------------- */
int ps_run_list(ps_grad *g, int op, const void *attrs, ps_tensor **out, int n_in, ps_tensor *const *in)
{
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    int n_out = ps_op(op)->n_out;
    if (g->n_temps + n_out > (int)(sizeof g->temps / sizeof *g->temps))
        return ps_fail(PS_ESTATE, "a gradient rule made too many temporary tensors");
    for (int i = 0; i < n_out; i++) all[i] = out[i];
    PS_TRY(ps_apply_all(g->ctx, op, n_in, in, attrs, all));
    for (int i = 0; i < n_out; i++) {
        if (all[i] && all[i] != out[i]) g->temps[g->n_temps++] = all[i];
        out[i] = all[i];
    }
    return 0;
}

int ps_run(ps_grad *g, int op, const void *attrs, ps_tensor **out, int n_in, ...)
{
    ps_tensor *in[8];
    va_list ap;
    va_start(ap, n_in);
    for (int i = 0; i < n_in && i < 8; i++) in[i] = va_arg(ap, ps_tensor *);
    va_end(ap);
    return ps_run_list(g, op, attrs, out, n_in, in);
}

int ps_grad_new(ps_grad *g, int device, const ps_meta *meta, ps_tensor **out)
{
    if (g->n_temps == (int)(sizeof g->temps / sizeof *g->temps))
        return ps_fail(PS_ESTATE, "a gradient rule made too many temporary tensors");
    ps_meta m = *meta;
    m.permuted = false;
    PS_TRY(ps_tensor_new_meta(g->ctx, device, &m, out));
    g->temps[g->n_temps++] = *out;
    return 0;
}

ps_tensor *ps_grad_pending(ps_grad *g, int i, ps_tensor **out)
{
    const edge *e = &g->node->edges[i];
    ps_tensor *there = e->node ? e->node->dout[e->out] : NULL;
    bool ours = there && is_alone(there);
    *out = ours && there->storage->tape.later == 0 ? there : NULL;
    return ours ? there : NULL;
}

void ps_grad_replace(ps_grad *g, int i, ps_tensor *sum)
{
    const edge *e = &g->node->edges[i];
    if (e->node->dout[e->out] != sum) replace(&e->node->dout[e->out], sum);
}
