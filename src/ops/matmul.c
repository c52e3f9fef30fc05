/* SPDX-License-Identifier: BSD-3-Clause
 * Matrix products: shapes and gradients. Weight gradients are products of transposed views, added straight into a
 * gradient that is there already (a tied weight, a further micro-batch). */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_matmul(ps_infer *f);
int infer_linear(ps_infer *f);
int grad_matmul(ps_grad *g);
int grad_linear(ps_grad *g);

int infer_matmul(ps_infer *f)
{
    const ps_tensor *a = f->in[0], *b = f->in[1];
    if (a->ndim < 2 || b->ndim < 2) return ps_rule_fail(f, "matrices are needed; add a dimension with :unsqueeze()");
    if (!ps_dtype_is_float(a->dtype_) || a->dtype_ != b->dtype_)
        return ps_rule_fail(f, "two float tensors of one type are needed");
    int64_t k = a->shape_[a->ndim - 1], k2 = b->shape_[b->ndim - 2];
    if (k != k2) return ps_rule_fail(f, "inner sizes differ: %lld and %lld", (long long)k, (long long)k2);
    ps_tensor batch_a = { .ndim = a->ndim - 2 }, batch_b = { .ndim = b->ndim - 2 };
    memcpy(batch_a.shape_, a->shape_, sizeof a->shape_);
    memcpy(batch_b.shape_, b->shape_, sizeof b->shape_);
    ps_meta *m = &f->out[0];
    m->dtype = a->dtype_;
    PS_TRY(ps_rule_broadcast(f, &batch_a, &batch_b, m));
    if (m->ndim + 2 > PS_MAX_DIMS) return ps_rule_fail(f, "too many dimensions");
    m->shape[m->ndim++] = a->shape_[a->ndim - 2];
    m->shape[m->ndim++] = b->shape_[b->ndim - 1];
    if (!f->given) ((ps_attrs_matmul *)f->attrs)->accumulate = 0;
    return 0;
}

static int transpose(ps_grad *g, ps_tensor **out, ps_tensor *t)
{
    ps_attrs_permute attrs;
    for (int i = 0; i < t->ndim; i++) attrs.axes[i] = i;
    attrs.axes[t->ndim - 1] = t->ndim - 2;
    attrs.axes[t->ndim - 2] = t->ndim - 1;
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_permute, &attrs, all, 1, t));
    *out = all[0];
    return 0;
}

/* Gives input i the product a b, added into what is there when that can be done without another pass. */
static int give_product(ps_grad *g, int i, ps_tensor *a, ps_tensor *b)
{
    const ps_meta *m = ps_grad_in_meta(g, i);
    ps_attrs_matmul attrs = { 0 };
    ps_tensor *all[PS_MAX_OUT] = { NULL }, *sum;
    if (m->ndim == a->ndim && a->ndim == b->ndim) PS_TRY(ps_grad_dest(g, i, &all[0], &attrs.accumulate));
    if (all[0] && m->ndim > 2) {                                /* a batch that was broadcast must be summed first */
        for (int d = 0; d < m->ndim - 2; d++)
            if (m->shape[d] != a->shape_[d] && m->shape[d] != b->shape_[d]) all[0] = NULL;
        if (!all[0]) attrs.accumulate = 0;
    }
    PS_TRY(ps_run(g, PS_OP_matmul, &attrs, all, 2, a, b));
    if (attrs.accumulate) return 0;
    PS_TRY(ps_sum_to(g, &sum, all[0], m));
    ps_grad_give(g, i, sum);
    return 0;
}

/* da = dy b^T, db = a^T dy. */
int grad_matmul(ps_grad *g)
{
    ps_tensor *a, *b, *t;
    PS_TRY(ps_grad_in(g, 0, &a));
    PS_TRY(ps_grad_in(g, 1, &b));
    if (ps_grad_wants(g, 0)) {
        PS_TRY(transpose(g, &t, b));
        PS_TRY(give_product(g, 0, g->dout[0], t));
    }
    if (ps_grad_wants(g, 1)) {
        PS_TRY(transpose(g, &t, a));
        PS_TRY(give_product(g, 1, t, g->dout[0]));
    }
    return 0;
}

int infer_linear(ps_infer *f)
{
    const ps_attrs_linear *at = f->attrs;
    const ps_tensor *x = f->in[0], *w = f->in[1], *b = f->in[2], *r = f->in[3];
    if (x->ndim < 1 || w->ndim != 2 || !ps_dtype_is_float(x->dtype_) || x->dtype_ != w->dtype_)
        return ps_rule_fail(f, "x [..., I] and w with two dimensions, of one float type, are needed");
    int64_t in = w->shape_[at->out_in ? 1 : 0], out = w->shape_[at->out_in ? 0 : 1];
    if (x->shape_[x->ndim - 1] != in)
        return ps_rule_fail(f, "x has %lld features, w takes %lld (w is %s)", (long long)x->shape_[x->ndim - 1],
                            (long long)in, at->out_in ? "[out, in]" : "[in, out]");
    f->out[0] = ps_meta_like(x);
    f->out[0].shape[x->ndim - 1] = out;
    if (b && (b->ndim != 1 || b->shape_[0] != out || !ps_dtype_is_float(b->dtype_)))
        return ps_rule_fail(f, "the bias must be float [%lld]", (long long)out);
    if (r && (r->dtype_ != x->dtype_ || r->ndim != x->ndim ||
              memcmp(r->shape_, f->out[0].shape, sizeof(int64_t) * (size_t)r->ndim)))
        return ps_rule_fail(f, "the residual must have the output's shape and type");
    return 0;
}

static int rows_of(ps_grad *g, ps_tensor **out, ps_tensor *t)
{
    int64_t shape[2] = { 1, t->shape_[t->ndim - 1] };
    for (int i = 0; i < t->ndim - 1; i++) shape[0] *= t->shape_[i];
    if (t->ndim == 2) {
        *out = t;
        return 0;
    }
    return ps_reshape_to(g, out, t, 2, shape);
}

/* dx = dy w^T, dw = x^T dy (or its transpose), db = sum of dy over rows, dresidual = dy. */
int grad_linear(ps_grad *g)
{
    const ps_attrs_linear *at = g->attrs;
    ps_tensor *x, *w, *dy = g->dout[0], *x2, *dy2, *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, 0)) {
        ps_attrs_linear attrs = { .out_in = !at->out_in };
        PS_TRY(ps_grad_in(g, 1, &w));
        PS_TRY(ps_run(g, PS_OP_linear, &attrs, all, 4, dy, w, (ps_tensor *)NULL, (ps_tensor *)NULL));
        ps_grad_give(g, 0, all[0]);
    }
    if (ps_grad_wants(g, 1)) {
        PS_TRY(ps_grad_in(g, 0, &x));
        PS_TRY(rows_of(g, &x2, x));
        PS_TRY(rows_of(g, &dy2, dy));
        ps_tensor *left = at->out_in ? dy2 : x2, *right = at->out_in ? x2 : dy2;
        PS_TRY(transpose(g, &left, left));
        PS_TRY(give_product(g, 1, left, right));
    }
    if (ps_grad_wants(g, 2)) {
        ps_attrs_sum attrs = { .dims = (1u << (dy->ndim - 1)) - 1 };
        all[0] = NULL;
        if (dy->ndim == 1) {
            ps_grad_give(g, 2, dy);
        } else {
            PS_TRY(ps_grad_dest(g, 2, &all[0], &attrs.accumulate));
            PS_TRY(ps_run(g, PS_OP_sum, &attrs, all, 1, dy));
            if (!attrs.accumulate) ps_grad_give(g, 2, all[0]);
        }
    }
    if (ps_grad_wants(g, 3)) ps_grad_give(g, 3, dy);
    return 0;
}
