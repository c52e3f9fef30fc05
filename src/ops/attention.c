/* SPDX-License-Identifier: BSD-3-Clause
 * Attention: shapes and gradients. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_attention(ps_infer *f);
int infer_attention_backward(ps_infer *f);
int infer_attention_packed(ps_infer *f);
int infer_attention_packed_backward(ps_infer *f);
int grad_attention(ps_grad *g);
int grad_attention_packed(ps_grad *g);

static int check_p(const ps_infer *f, double p)
{
    return p >= 0 && p < 1 ? 0 : ps_rule_fail(f, "dropout p = %g is not in [0, 1)", p);
}

static int check_mask(const ps_infer *f, const ps_tensor *mask, int64_t batch, int64_t keys)
{
    if (!mask || (mask->dtype_ == PS_BOOL && mask->ndim == 2 && mask->shape_[0] == batch && mask->shape_[1] == keys))
        return 0;
    return ps_rule_fail(f, "the mask must be bool [%lld, %lld]", (long long)batch, (long long)keys);
}

static int check_qkv(const ps_infer *f, const ps_tensor *const *in, double p)
{
    const ps_tensor *q = in[0], *k = in[1], *v = in[2];
    if (q->ndim != 4 || k->ndim != 4 || !ps_same_shape(k, v) || q->dtype_ != k->dtype_ || q->dtype_ != v->dtype_ ||
        !ps_dtype_is_float(q->dtype_) || q->shape_[0] != k->shape_[0] || q->shape_[1] != k->shape_[1] ||
        q->shape_[3] != k->shape_[3])
        return ps_rule_fail(f, "q [B, H, T, D], k and v [B, H, S, D] of one float type are needed");
    PS_TRY(check_mask(f, in[3], k->shape_[0], k->shape_[2]));
    return check_p(f, p);
}

int infer_attention(ps_infer *f)
{
    const ps_tensor *q = f->in[0];
    PS_TRY(check_qkv(f, f->in, ((const ps_attrs_attention *)f->attrs)->p));
    int64_t heads = q->shape_[1], rows = q->shape_[2], width = q->shape_[3];
    ps_meta *y = &f->out[0];
    *y = ps_meta_like(q);
    y->permuted = true;                                   /* bytes as [B, T, H, D] */
    y->stride[0] = rows * heads * width;
    y->stride[1] = width;
    y->stride[2] = heads * width;
    y->stride[3] = 1;
    f->out[1] = (ps_meta){ .dtype = q->dtype_ == PS_F64 ? PS_F64 : PS_F32, .ndim = 3,
                           .shape = { q->shape_[0], heads, rows } };
    return 0;
}

int infer_attention_backward(ps_infer *f)
{
    const ps_tensor *q = f->in[1];
    PS_TRY(check_qkv(f, f->in + 1, ((const ps_attrs_attention_backward *)f->attrs)->p));
    PS_TRY(ps_rule_like(f, f->in[0], "dy", q->dtype_, 4, q->shape_));
    PS_TRY(ps_rule_like(f, f->in[5], "y", q->dtype_, 4, q->shape_));
    PS_TRY(ps_rule_like(f, f->in[6], "lse", q->dtype_ == PS_F64 ? PS_F64 : PS_F32, 3, q->shape_));
    for (int i = 0; i < 3; i++) f->out[i] = ps_meta_like(f->in[1 + i]);
    return 0;
}

int grad_attention(ps_grad *g)
{
    ps_tensor *in[4], *y, *lse, *all[PS_MAX_OUT] = { NULL };
    for (int i = 0; i < 4; i++) PS_TRY(ps_grad_in(g, i, &in[i]));
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_grad_out(g, 1, &lse));
    PS_TRY(ps_run(g, PS_OP_attention_backward, g->attrs, all, 7, g->dout[0], in[0], in[1], in[2], in[3], y, lse));
    for (int i = 0; i < 3; i++) if (ps_grad_wants(g, i)) ps_grad_give(g, i, all[i]);
    return 0;
}

static int check_packed(const ps_infer *f, const ps_tensor *qkv, const ps_tensor *mask, int32_t heads, double p)
{
    if (qkv->ndim != 3 || !ps_dtype_is_float(qkv->dtype_)) return ps_rule_fail(f, "qkv must be float [B, T, 3C]");
    if (heads < 1 || qkv->shape_[2] % (3 * (int64_t)heads))
        return ps_rule_fail(f, "%d heads do not divide C = %g", heads, (double)qkv->shape_[2] / 3);
    PS_TRY(check_mask(f, mask, qkv->shape_[0], qkv->shape_[1]));
    return check_p(f, p);
}

int infer_attention_packed(ps_infer *f)
{
    const ps_attrs_attention_packed *at = f->attrs;
    const ps_tensor *qkv = f->in[0];
    PS_TRY(check_packed(f, qkv, f->in[1], at->heads, at->p));
    f->out[0] = ps_meta_like(qkv);
    f->out[0].shape[2] /= 3;
    f->out[1] = (ps_meta){ .dtype = qkv->dtype_ == PS_F64 ? PS_F64 : PS_F32, .ndim = 3,
                           .shape = { qkv->shape_[0], at->heads, qkv->shape_[1] } };
    return 0;
}

int infer_attention_packed_backward(ps_infer *f)
{
    const ps_attrs_attention_packed_backward *at = f->attrs;
    const ps_tensor *qkv = f->in[1];
    PS_TRY(check_packed(f, qkv, f->in[2], at->heads, at->p));
    int64_t y[] = { qkv->shape_[0], qkv->shape_[1], qkv->shape_[2] / 3 };
    int64_t lse[] = { qkv->shape_[0], at->heads, qkv->shape_[1] };
    PS_TRY(ps_rule_like(f, f->in[0], "dy", qkv->dtype_, 3, y));
    PS_TRY(ps_rule_like(f, f->in[3], "y", qkv->dtype_, 3, y));
    PS_TRY(ps_rule_like(f, f->in[4], "lse", qkv->dtype_ == PS_F64 ? PS_F64 : PS_F32, 3, lse));
    f->out[0] = ps_meta_like(qkv);
    return 0;
}

int grad_attention_packed(ps_grad *g)
{
    ps_tensor *qkv, *mask, *y, *lse, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &qkv));
    PS_TRY(ps_grad_in(g, 1, &mask));
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_grad_out(g, 1, &lse));
    PS_TRY(ps_run(g, PS_OP_attention_packed_backward, g->attrs, all, 5, g->dout[0], qkv, mask, y, lse));
    ps_grad_give(g, 0, all[0]);
    return 0;
}
