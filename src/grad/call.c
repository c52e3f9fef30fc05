/* SPDX-License-Identifier: BSD-3-Clause
 * Functions of the script that have their own backward. A call of such a function is a node of the tape, and the walk
 * stops at the node. The caller of the walk then reads the gradients of the function's outputs (ps_stop_gradient) and
 * the saved tensors (ps_call_saved), and passes the gradients of the arguments to ps_call_done(). The node's inputs are
 * the arguments, followed by the saved tensors. Saved tensors have no edge. */
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/record.h"
#include "grad/tape.h"

/* -- recording ----------------------------------------------------------------------------------------------------- */
static int check_outputs(const char *name, int n, ps_tensor *const *out)
{
    int given = 0;
    for (int i = 0; i < n; i++) {
        if (!out[i]) continue;
        given++;
        bool fresh = !out[i]->node && !(out[i]->flags & PS_T_REQUIRES_GRAD) && ps_dtype_is_float(out[i]->dtype_);
        for (int k = 0; fresh && k < i; k++) fresh = out[i] != out[k];
        if (!fresh)
            return ps_fail(PS_EINVAL, "output %d of %s must be a float tensor without history, and must be returned "
                           "only once", i + 1, name);
    }
    return given ? 0 : ps_fail(PS_EINVAL, "%s has no output that can get a gradient", name);
}

/* Saves a tensor in the node. If the tensor is an output of the node, saves another header for it. Otherwise the node
 * and the tensor would hold each other. */
static int save(ps_node *node, int at, ps_tensor *t, int n_out, ps_tensor *const *out)
{
    ps_tensor *kept = t;
    bool is_output = false;
    for (int i = 0; i < n_out; i++) is_output = is_output || out[i] == t;
    node->in_meta[at].ndim = -1;
    if (!t) return 0;
    PS_TRY(ps_tensor_check_alive(t));
    if (is_output) PS_TRY(ps_tensor_detach(t, &kept));
    else ps_tensor_retain(kept);
    ps_storage_hold(kept->storage);
    node->saved_in[at] = (saved){ .t = kept, .version = kept->storage->version };
    return 0;
}

int ps_call_new(ps_ctx *ctx, const char *name, int n_in, ps_tensor *const *in, int n_out, ps_tensor *const *out,
                int n_saved, ps_tensor *const *saved_, int64_t *id)
{
    if (!name || n_in < 1 || n_out < 1 || n_saved < 0)
        return ps_fail(PS_EINVAL, "a function of the script needs a name, at least one input and at least one output");
    PS_TRY(check_outputs(name, n_out, out));
    PS_TRY(reap_reserve(ctx));
    ps_node *node = tape_node_new(ctx, CALL, n_in + n_saved, n_out, (int)strlen(name) + 1);
    int rc = node ? 0 : PS_ENOMEM;
    if (rc == 0) {
        strcpy(node->attrs.bytes, name);
        node->n_args = n_in;
        for (int i = 0; i < n_in; i++) tape_add_edge(node, i, in[i]);
        rc = tape_take_reads(ctx, node);
    }
    for (int i = 0; rc == 0 && i < n_saved; i++) rc = save(node, n_in + i, saved_[i], n_out, out);
    if (rc < 0) {
        ctx->tape.reaped.live--;
        if (node) node->op = PS_OP_COUNT;                /* the caller has not seen the node's id yet, so the id is not
                                                          * reported when the node is freed */
        if (node) ps_node_release(node);
        return rc;
    }
    *id = node->segment = node->seq;
    for (int i = 0; i < n_out; i++) {
        if (!out[i]) continue;
        out[i]->node = node;
        out[i]->node_out = i;
        node->refs++;
    }
    rc = node->n_reads > 0;
    ps_node_release(node);
    return rc;
}

/* -- the walk's stop ----------------------------------------------------------------------------------------------- */
static ps_node *stopped_at_call(const ps_ctx *ctx)
{
    ps_walk *w = ctx->tape.walk;
    return w && w->stopped && w->stopped->op == CALL && !w->at_hooks ? w->stopped : NULL;
}

int ps_call_saved(ps_ctx *ctx, int i, ps_tensor **out)
{
    ps_node *node = stopped_at_call(ctx);
    if (!node) return ps_fail(PS_ESTATE, "the walk is not stopped at a function of the script");
    int at = node->n_args + i;
    if (i < 0 || at >= node->n_in) return ps_fail(PS_ERANGE, "%s has no saved tensor %d", tape_name(node), i + 1);
    PS_TRY(tape_check_version(node, &node->saved_in[at]));
    *out = node->saved_in[at].t;
    return 0;
}

/* Checks a gradient of input i. It must have the input's type. For a bf16 or fp16 input, it can also be fp32. */
static int check_gradient(const ps_node *node, int i, const ps_tensor *grad, int device)
{
    const ps_meta *want = &node->in_meta[i];
    char x[160], y[160];
    if (grad->ndim != want->ndim || memcmp(grad->shape_, want->shape, sizeof(int64_t) * (size_t)want->ndim))
        return ps_fail(PS_EINVAL, "backward of %s returned gradient %d of shape %s for an input of shape %s",
                       tape_name(node), i + 1, ps_shape_text(grad->ndim, grad->shape_, x, sizeof x),
                       ps_shape_text(want->ndim, want->shape, y, sizeof y));
    if (grad->dtype_ != want->dtype && !(grad->dtype_ == PS_F32 && ps_dtype_bytes(want->dtype) < 4))
        return ps_fail(PS_EINVAL, "backward of %s returned gradient %d of type %s, shape %s, for an input of type %s",
                       tape_name(node), i + 1, ps_dtype_name(grad->dtype_),
                       ps_shape_text(grad->ndim, grad->shape_, x, sizeof x), ps_dtype_name(want->dtype));
    if (grad->device_ != device)
        return ps_fail(PS_EINVAL, "backward of %s returned gradient %d, shape %s, on device %s for an input on %s",
                       tape_name(node), i + 1, ps_shape_text(grad->ndim, grad->shape_, x, sizeof x),
                       node->ctx->devices[grad->device_]->name, node->ctx->devices[device]->name);
    return ps_tensor_check_alive(grad);
}

int ps_call_done(ps_ctx *ctx, int n, ps_tensor *const *gradients, const int32_t *devices)
{
    ps_walk *w = ctx->tape.walk;
    ps_node *node = stopped_at_call(ctx);
    if (!node) return ps_fail(PS_ESTATE, "the walk is not stopped at a function of the script");
    if (n != node->n_args)
        return ps_fail(PS_EINVAL, "backward of %s returned %d gradients, but its forward has %d inputs",
                       tape_name(node), n,
                       node->n_args);
    for (int i = 0; i < n; i++)
        if (gradients[i] && (node->edges[i].node || node->edges[i].leaf))
            PS_TRY(check_gradient(node, i, gradients[i], devices[i]));
    ps_tensor **din = ps_alloc0(sizeof *din * (size_t)node->n_in);
    if (!din) return ps_fail_nomem(sizeof *din * (size_t)node->n_in);
    for (int i = 0; i < n; i++)
        if (gradients[i] && (node->edges[i].node || node->edges[i].leaf)) din[i] = ps_tensor_hold(gradients[i]);
    atomic_store_explicit(&ps_record_at.backward, 0, memory_order_relaxed);
    int enabled = ps_set_grad_enabled(ctx, 0);
    int rc = node->holder ? tape_give_holder(ctx, node) : 0;
    w->stopped = NULL;
    if (rc < 0) for (int i = 0; i < n; i++) ps_tensor_unhold(din[i]);
    else rc = tape_hand_on(ctx, w, node, din, tape_puts_off(w, node), false);
    ps_set_grad_enabled(ctx, enabled);
    ps_free(din);
    if (rc < 0) tape_give_up(node);
    ps_node_release(node);
    return rc;
}
