/* SPDX-License-Identifier: BSD-3-Clause
 * Layer norm (Ba, Kiros and Hinton 2016) and RMS norm (Zhang and Sennrich 2019): shapes and gradients. Backward adds dx
 * to the gradient of the residual stream in the same pass, if that gradient already exists. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_layer_norm(ps_infer *f);
int infer_layer_norm_backward(ps_infer *f);
int infer_rms_norm(ps_infer *f);
int infer_rms_norm_backward(ps_infer *f);
int grad_layer_norm(ps_grad *g);
int grad_rms_norm(ps_grad *g);

static int check_row_weights(const ps_infer *f, const ps_tensor *x, int first, int last)
{
    if (x->ndim < 1 || x->shape_[x->ndim - 1] < 1 || !ps_dtype_is_float(x->dtype_))
        return ps_rule_fail(f, "x must be a float tensor [..., C]");
    for (int i = first; i <= last; i++) {
        const ps_tensor *w = f->in[i];
        if (w && (w->ndim != 1 || w->shape_[0] != x->shape_[x->ndim - 1] || !ps_dtype_is_float(w->dtype_)))
            return ps_rule_fail(f, "weights must be float [%lld]", (long long)x->shape_[x->ndim - 1]);
    }
    return 0;
}

static ps_meta per_row(const ps_tensor *x)
{
    ps_meta m = ps_meta_like(x);
    m.ndim--;
    m.dtype = x->dtype_ == PS_F64 ? PS_F64 : PS_F32;
    return m;
}

int infer_layer_norm(ps_infer *f)
{
    PS_TRY(check_row_weights(f, f->in[0], 1, 2));
    f->out[0] = ps_meta_like(f->in[0]);
    f->out[1] = f->out[2] = per_row(f->in[0]);
    return 0;
}

int infer_rms_norm(ps_infer *f)
{
    PS_TRY(check_row_weights(f, f->in[0], 1, 1));
    f->out[0] = ps_meta_like(f->in[0]);
    f->out[1] = per_row(f->in[0]);
    return 0;
}

/* The inputs are dy, x, w?, one or two statistics, and add? (a ? marks an optional input). dx has the shape of x. dw
 * and db are [C] and have the type of the weights; they are computed only if they are wanted. */
static int backward_shapes(ps_infer *f, int want_w, int n_w)
{
    const ps_tensor *x = f->in[1], *w = f->in[2], *add = f->in[f->n_in - 1];
    PS_TRY(check_row_weights(f, x, 2, 2));
    PS_TRY(ps_rule_like(f, f->in[0], "dy", x->dtype_, x->ndim, x->shape_));
    for (int i = 3; i < f->n_in - 1; i++)
        PS_TRY(ps_rule_like(f, f->in[i], "a statistic", per_row(x).dtype, x->ndim - 1, x->shape_));
    if (add) PS_TRY(ps_rule_like(f, add, "add", x->dtype_, x->ndim, x->shape_));
    f->out[0] = ps_meta_like(x);
    for (int i = 1; i <= n_w; i++) {
        f->out[i] = (ps_meta){ .dtype = w ? w->dtype_ : x->dtype_,
                               .ndim = want_w ? 1 : -1,
                               .shape = { x->shape_[x->ndim - 1] } };
    }
    return 0;
}

int infer_layer_norm_backward(ps_infer *f)
{
    return backward_shapes(f, ((const ps_attrs_layer_norm_backward *)f->attrs)->want_w, 2);
}

int infer_rms_norm_backward(ps_infer *f)
{
    return backward_shapes(f, ((const ps_attrs_rms_norm_backward *)f->attrs)->want_w, 1);
}

int grad_layer_norm(ps_grad *g)
{
    ps_tensor *x, *w, *mean, *rstd, *all[PS_MAX_OUT] = { NULL }, *there = ps_grad_pending(g, 0, &all[0]);
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_grad_in(g, 1, &w));
    PS_TRY(ps_grad_out(g, 1, &mean));
    PS_TRY(ps_grad_out(g, 2, &rstd));
    ps_attrs_layer_norm_backward attrs = { .want_w = ps_grad_wants(g, 1) || (g->n_in > 2 && ps_grad_wants(g, 2)) };
    PS_TRY(ps_run(g, PS_OP_layer_norm_backward, &attrs, all, 6, g->dout[0], x, w, mean, rstd, there));
    if (there) ps_grad_replace(g, 0, all[0]);
    else if (ps_grad_wants(g, 0)) ps_grad_give(g, 0, all[0]);
    if (ps_grad_wants(g, 1)) ps_grad_give(g, 1, all[1]);
    if (ps_grad_wants(g, 2)) ps_grad_give(g, 2, all[2]);
    return 0;
}

int grad_rms_norm(ps_grad *g)
{
    ps_tensor *x, *w, *rstd, *all[PS_MAX_OUT] = { NULL }, *there = ps_grad_pending(g, 0, &all[0]);
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_grad_in(g, 1, &w));
    PS_TRY(ps_grad_out(g, 1, &rstd));
    ps_attrs_rms_norm_backward attrs = { .want_w = ps_grad_wants(g, 1) };
    PS_TRY(ps_run(g, PS_OP_rms_norm_backward, &attrs, all, 5, g->dout[0], x, w, rstd, there));
    if (there) ps_grad_replace(g, 0, all[0]);
    else if (ps_grad_wants(g, 0)) ps_grad_give(g, 0, all[0]);
    if (ps_grad_wants(g, 1)) ps_grad_give(g, 1, all[1]);
    return 0;
}
