/* SPDX-License-Identifier: BSD-3-Clause
 * Reductions, running sums, top-k and the norms of lists: shapes and gradients. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_reduce(ps_infer *f);
int infer_arg_reduce(ps_infer *f);
int infer_prod(ps_infer *f);
int infer_cumsum(ps_infer *f);
int infer_cumprod_backward(ps_infer *f);
int infer_var(ps_infer *f);
int infer_median(ps_infer *f);
int infer_cdist(ps_infer *f);
int infer_cdist_backward(ps_infer *f);
int infer_topk(ps_infer *f);
int infer_sq_norms(ps_infer *f);
int infer_sample(ps_infer *f);
int grad_sum(ps_grad *g);
int grad_mean(ps_grad *g);
int grad_amax(ps_grad *g);
int grad_cumsum(ps_grad *g);
int grad_cumprod(ps_grad *g);
int grad_cdist(ps_grad *g);
int grad_topk(ps_grad *g);

/* Returns the shape of x without the dimensions in the bit set `dims`. If keepdim is set, these dimensions are kept and
 * have the size 1. */
static ps_meta reduced_meta(const ps_tensor *x, uint32_t dims, bool keepdim, int dtype)
{
    ps_meta m = { .dtype = dtype };
    for (int i = 0; i < x->ndim; i++) {
        if (!(dims >> i & 1)) m.shape[m.ndim++] = x->shape_[i];
        else if (keepdim) m.shape[m.ndim++] = 1;
    }
    return m;
}

/* The attributes of all reductions begin with the fields of ps_attrs_mean: dims and keepdim. */
int infer_reduce(ps_infer *f)
{
    ps_attrs_mean *at = f->attrs;
    const ps_tensor *x = f->in[0];
    uint32_t all = (1u << x->ndim) - 1;
    if (at->dims & ~all) return ps_rule_fail(f, "dims 0x%x of a tensor with %d dimensions", at->dims, x->ndim);
    if (at->dims == 0) at->dims = all;
    bool is_float = ps_dtype_is_float(x->dtype_), picks = f->op == PS_OP_amax || f->op == PS_OP_amin;
    if (f->op == PS_OP_mean && !is_float) return ps_rule_fail(f, "x must be a float tensor; convert it with :float()");
    f->out[0] = reduced_meta(x, at->dims, at->keepdim, is_float || picks ? x->dtype_ : PS_I64);
    int64_t reduced = 1;
    for (int i = 0; i < x->ndim; i++) if (at->dims >> i & 1) reduced *= x->shape_[i];
    if (picks && reduced == 0) return ps_rule_fail(f, "the reduced dimensions have no element to choose from");
    if (f->op == PS_OP_sum && !f->given) ((ps_attrs_sum *)f->attrs)->accumulate = 0;
    return 0;
}

/* Sets *out to t with the reduced dimensions restored as dimensions of size 1. t has the shape of the result, such as
 * dy. */
static int keep_dims(ps_grad *g, ps_tensor **out, ps_tensor *t)
{
    const ps_attrs_mean *at = g->attrs;
    ps_meta m = *ps_grad_in_meta(g, 0);
    for (int i = 0; i < m.ndim; i++) if (at->dims >> i & 1) m.shape[i] = 1;
    return ps_reshape_to(g, out, t, m.ndim, m.shape);
}

static int give_expanded(ps_grad *g, ps_tensor *t)
{
    const ps_meta *m = ps_grad_in_meta(g, 0);
    ps_attrs_expand attrs = { .ndim = m->ndim };
    memcpy(attrs.shape, m->shape, sizeof attrs.shape);
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(keep_dims(g, &t, t));
    PS_TRY(ps_run(g, PS_OP_expand, &attrs, all, 1, t));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int grad_sum(ps_grad *g) { return give_expanded(g, g->dout[0]); }

int grad_mean(ps_grad *g)
{
    const ps_attrs_mean *at = g->attrs;
    const ps_meta *m = ps_grad_in_meta(g, 0);
    double count = 1;
    for (int i = 0; i < m->ndim; i++) if (at->dims >> i & 1) count *= (double)m->shape[i];
    ps_tensor *t;
    PS_TRY(ps_scaled(g, &t, g->dout[0], 1 / count));
    return give_expanded(g, t);
}

/* If several elements equal the result, its gradient is divided equally among them. */
int grad_amax(ps_grad *g)
{
    const ps_attrs_amax *at = g->attrs;
    ps_tensor *x, *y, *dy, *chosen, *count, *t, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(keep_dims(g, &y, y));
    PS_TRY(keep_dims(g, &dy, g->dout[0]));
    PS_TRY(ps_run1(g, PS_OP_eq, &chosen, x, y));
    PS_TRY(ps_cast(g, &chosen, chosen, x->dtype_));
    ps_attrs_sum sum = { .dims = at->dims, .keepdim = 1 };
    PS_TRY(ps_run(g, PS_OP_sum, &sum, all, 1, chosen));
    count = all[0];
    PS_TRY(ps_run1(g, PS_OP_div, &t, dy, count));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, chosen, t));
    ps_grad_give(g, 0, t);
    return 0;
}

int infer_arg_reduce(ps_infer *f)
{
    ps_attrs_argmax *at = f->attrs;
    const ps_tensor *x = f->in[0];
    PS_TRY(ps_rule_dim(f, x->ndim, &at->dim));
    if (x->shape_[at->dim] == 0) return ps_rule_fail(f, "the reduced dimensions have no element to choose from");
    f->out[0] = reduced_meta(x, 1u << at->dim, at->keepdim, PS_I64);
    return 0;
}

/* The product over an empty dimension is 1. */
int infer_prod(ps_infer *f)
{
    ps_attrs_prod *at = f->attrs;
    const ps_tensor *x = f->in[0];
    PS_TRY(ps_rule_dim(f, x->ndim, &at->dim));
    f->out[0] = reduced_meta(x, 1u << at->dim, at->keepdim, ps_dtype_is_float(x->dtype_) ? x->dtype_ : PS_I64);
    return 0;
}

/* cumprod uses this rule, too, because its attributes begin with the same field as those of cumsum. */
int infer_cumsum(ps_infer *f)
{
    f->out[0] = ps_meta_like(f->in[0]);
    if (!ps_dtype_is_float(f->in[0]->dtype_)) f->out[0].dtype = PS_I64;
    return ps_rule_dim(f, f->in[0]->ndim, &((ps_attrs_cumsum *)f->attrs)->dim);
}

int grad_cumsum(ps_grad *g)
{
    ps_attrs_cumsum attrs = *(const ps_attrs_cumsum *)g->attrs;
    attrs.reverse = !attrs.reverse;
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_cumsum, &attrs, all, 1, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int infer_cumprod_backward(ps_infer *f)
{
    const ps_tensor *x = f->in[0];
    if (!ps_dtype_is_float(x->dtype_)) return ps_rule_fail(f, "x must be a float tensor");
    PS_TRY(ps_rule_like(f, f->in[1], "dy", x->dtype_, x->ndim, x->shape_));
    f->out[0] = ps_meta_like(x);
    return ps_rule_dim(f, x->ndim, &((ps_attrs_cumprod_backward *)f->attrs)->dim);
}

int grad_cumprod(ps_grad *g)
{
    ps_attrs_cumprod_backward attrs = { .dim = ((const ps_attrs_cumprod *)g->attrs)->dim };
    ps_tensor *x, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_run(g, PS_OP_cumprod_backward, &attrs, all, 2, x, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int infer_var(ps_infer *f)
{
    const ps_tensor *x = f->in[0];
    if (x->ndim == 0 || !ps_dtype_is_float(x->dtype_))
        return ps_rule_fail(f, "x must be a float tensor with a last dimension");
    f->out[0] = reduced_meta(x, 1u << (x->ndim - 1), ((const ps_attrs_var *)f->attrs)->keepdim, x->dtype_);
    return 0;
}

int infer_median(ps_infer *f)
{
    const ps_tensor *x = f->in[0];
    if (x->ndim != 1 || x->numel_ == 0 || !ps_dtype_is_float(x->dtype_))
        return ps_rule_fail(f, "x must be a float tensor [N], N at least 1");
    f->out[0] = (ps_meta){ .dtype = x->dtype_ };
    return 0;
}

int infer_cdist(ps_infer *f)
{
    const ps_tensor *x = f->in[0], *y = f->in[1];
    int last = x->ndim - 1;
    bool fits = last >= 1 && y->ndim == x->ndim && x->dtype_ == y->dtype_ && ps_dtype_is_float(x->dtype_) &&
                x->shape_[last] == y->shape_[last];
    for (int d = 0; fits && d < last - 1; d++) fits = x->shape_[d] == y->shape_[d];
    if (!fits) return ps_rule_fail(f, "x must be [..., N, D] and y [..., M, D], both of one float type");
    f->out[0] = ps_meta_like(x);
    f->out[0].shape[last] = y->shape_[last - 1];
    return 0;
}

int infer_cdist_backward(ps_infer *f)
{
    PS_TRY(infer_cdist(f));
    ps_meta d = f->out[0];
    PS_TRY(ps_rule_like(f, f->in[2], "d", d.dtype, d.ndim, d.shape));
    PS_TRY(ps_rule_like(f, f->in[3], "dd", d.dtype, d.ndim, d.shape));
    f->out[0] = ps_meta_like(f->in[0]);
    f->out[1] = ps_meta_like(f->in[1]);
    return 0;
}

int grad_cdist(ps_grad *g)
{
    ps_tensor *x, *y, *d, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_grad_in(g, 1, &y));
    PS_TRY(ps_grad_out(g, 0, &d));
    PS_TRY(ps_run(g, PS_OP_cdist_backward, g->attrs, all, 4, x, y, d, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    ps_grad_give(g, 1, all[1]);
    return 0;
}

int infer_topk(ps_infer *f)
{
    const ps_attrs_topk *at = f->attrs;
    const ps_tensor *x = f->in[0];
    if (x->ndim < 1 || at->k < 1 || at->k > x->shape_[x->ndim - 1]) return ps_rule_fail(f, "k = %d", at->k);
    f->out[0] = ps_meta_like(x);
    f->out[0].shape[x->ndim - 1] = at->k;
    f->out[1] = f->out[0];
    f->out[1].dtype = PS_I64;
    return 0;
}

/* Adds the gradient of each result to dx, at the position from which forward read the result. */
int grad_topk(ps_grad *g)
{
    const ps_meta *m = ps_grad_in_meta(g, 0);
    ps_attrs_scatter_add attrs = { .dim = m->ndim - 1 };
    ps_tensor *zeros, *indices, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_out(g, 1, &indices));
    PS_TRY(ps_filled(g, &zeros, g->dout[0]->device_, m, 0));
    PS_TRY(ps_run(g, PS_OP_scatter_add, &attrs, all, 3, zeros, indices, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int infer_sq_norms(ps_infer *f)
{
    for (int i = 0; i < f->n_in; i++)
        if (!ps_dtype_is_float(f->in[i]->dtype_)) return ps_rule_fail(f, "input %d is not a float tensor", i);
    f->out[0] = (ps_meta){ .dtype = PS_F64, .ndim = 1, .shape = { f->n_in } };
    return 0;
}

int infer_sample(ps_infer *f)
{
    const ps_attrs_sample *at = f->attrs;
    const ps_tensor *x = f->in[0];
    if (x->ndim < 1 || x->shape_[x->ndim - 1] < 1 || !ps_dtype_is_float(x->dtype_))
        return ps_rule_fail(f, "logits must be a float tensor [..., V]");
    if (!(at->temperature >= 0) || !(at->top_p > 0) || at->top_k < 0 || !(at->min_p >= 0 && at->min_p <= 1))
        return ps_rule_fail(f, "temperature is %g (it must be >= 0), top_p is %g (> 0), top_k is %d (>= 0) and min_p "
                            "is %g (0 to 1)", at->temperature, at->top_p, at->top_k, at->min_p);
    f->out[0] = ps_meta_like(x);
    f->out[0].ndim--;
    f->out[0].dtype = PS_I64;
    return 0;
}
