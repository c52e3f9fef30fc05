/* SPDX-License-Identifier: BSD-3-Clause
 * Attention and rotary position embedding (Su et al. 2021): shapes and gradients. */
#include <string.h>
#include "base/blocks.h"
#include "base/error.h"
#include "tensor/optable.h"

int infer_attention(ps_infer *f);
int infer_attention_backward(ps_infer *f);
int infer_attention_packed(ps_infer *f);
int infer_rope(ps_infer *f);
int infer_attention_packed_backward(ps_infer *f);
int grad_attention(ps_grad *g);
int grad_attention_packed(ps_grad *g);
int grad_rope(ps_grad *g);

static int check_dropout(const ps_infer *f, double p, int32_t first_head)
{
    if (first_head < 0) return ps_rule_fail(f, "first_head is %d; it must be 0 or more", first_head);
    return p >= 0 && p < 1 ? 0 : ps_rule_fail(f, "dropout p = %g is not in [0, 1)", p);
}

/* Checks a mask of two dimensions. The mask must be bool [B, S] or, for segments, int32 [B, T]. For segments, T must
 * equal S. */
static int check_mask(const ps_infer *f, const ps_tensor *mask, int64_t batch, int64_t queries, int64_t keys)
{
    bool segments = mask && mask->dtype_ == PS_I32 && mask->ndim == 2;
    if (segments && queries != keys)
        return ps_rule_fail(f, "segments need as many queries as keys, not %lld and %lld: pass a mask of 4 dimensions",
                            (long long)queries, (long long)keys);
    if (!mask || ((segments || mask->dtype_ == PS_BOOL) && mask->ndim == 2 && mask->shape_[0] == batch &&
                  mask->shape_[1] == keys))
        return 0;
    return ps_rule_fail(f, "the mask must be bool [%lld, %lld], or int32 segments of this shape", (long long)batch,
                        (long long)keys);
}

static int check_any_mask(const ps_infer *f, const ps_tensor *mask, const ps_tensor *q, int64_t keys)
{
    if (!mask || mask->ndim != 4) return check_mask(f, mask, q->shape_[0], q->shape_[2], keys);
    bool typed = mask->dtype_ == PS_BOOL || mask->dtype_ == PS_F32 || mask->dtype_ == q->dtype_;
    for (int d = 0; d < 3; d++) typed = typed && (mask->shape_[d] == 1 || mask->shape_[d] == q->shape_[d]);
    if (typed && mask->shape_[3] == keys) return 0;
    return ps_rule_fail(f, "a mask of 4 dimensions must be bool, fp32 or %s, [%lld or 1, %lld or 1, %lld or 1, %lld]",
                        ps_dtype_name(q->dtype_), (long long)q->shape_[0], (long long)q->shape_[1],
                        (long long)q->shape_[2], (long long)keys);
}

/* Returns whether k has the type and the width of a cache: bf16 or fp16 elements, or rows of Q8_0 blocks. The caller
 * has found that q and k have different types. */
static bool is_cache_of(const ps_tensor *q, const ps_tensor *k)
{
    const ps_blocks *b = ps_blocks_of(PS_Q8_0);
    int64_t width = q->shape_[3];
    if (q->dtype_ == PS_F64) return false;
    if (k->dtype_ == PS_BF16 || k->dtype_ == PS_F16) return k->shape_[3] == width;
    return k->dtype_ == PS_U8 && width % b->block == 0 && k->shape_[3] == width / b->block * b->bytes;
}

static int check_qkv(const ps_infer *f, const ps_tensor *const *in, int32_t causal, int32_t window, bool caches)
{
    const ps_tensor *q = in[0], *k = in[1], *v = in[2];
    if (q->ndim != 4 || k->ndim != 4 || !ps_same_shape(k, v) || k->dtype_ != v->dtype_ ||
        !ps_dtype_is_float(q->dtype_) || q->shape_[0] != k->shape_[0] ||
        !((q->dtype_ == k->dtype_ && q->shape_[3] == k->shape_[3]) || (caches && is_cache_of(q, k))))
        return ps_rule_fail(f, "q must be [B, H, T, D], and k and v must be [B, G, S, D], all of one float type%s",
                            k->dtype_ == q->dtype_ ? "" : "; convert with :to");
    if (q->shape_[1] != k->shape_[1] && (k->shape_[1] < 1 || q->shape_[1] % k->shape_[1]))
        return ps_rule_fail(f, "%lld heads of keys do not divide %lld heads", (long long)k->shape_[1],
                            (long long)q->shape_[1]);
    if (window < 0 || (window > 0 && !causal))
        return ps_rule_fail(f, "a window needs causal attention, and must be at least 1 key (it is %d)", window);
    return check_any_mask(f, in[3], q, k->shape_[2]);
}

/* Returns the meta of a tensor with the shape of t [B, H, T, D]. If t is stored as [B, T, H, D], the tensor is stored
 * in this order, too. */
static ps_meta like_heads(const ps_tensor *t)
{
    ps_meta m = ps_meta_like(t);
    int64_t H = t->shape_[1], D = t->shape_[3], stride[] = { t->shape_[2] * H * D, D, H * D, 1 };
    for (int d = 0; d < 4; d++)
        if (t->shape_[d] != 1 && t->stride_[d] != stride[d]) return m;
    m.permuted = true;
    memcpy(m.stride, stride, sizeof stride);
    return m;
}

int infer_attention(ps_infer *f)
{
    const ps_tensor *q = f->in[0];
    const ps_attrs_attention *at = f->attrs;
    PS_TRY(check_qkv(f, f->in, at->causal, at->window, true));
    PS_TRY(check_dropout(f, at->p, at->first_head));
    int64_t heads = q->shape_[1], rows = q->shape_[2], width = q->shape_[3];
    ps_meta *y = &f->out[0];
    *y = ps_meta_like(q);
    y->permuted = true;                                   /* stored as [B, T, H, D] */
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
    const ps_attrs_attention_backward *at = f->attrs;
    PS_TRY(check_qkv(f, f->in + 1, at->causal, at->window, false));
    PS_TRY(check_dropout(f, at->p, at->first_head));
    PS_TRY(ps_rule_like(f, f->in[0], "dy", q->dtype_, 4, q->shape_));
    PS_TRY(ps_rule_like(f, f->in[5], "y", q->dtype_, 4, q->shape_));
    PS_TRY(ps_rule_like(f, f->in[6], "lse", q->dtype_ == PS_F64 ? PS_F64 : PS_F32, 3, q->shape_));
    for (int i = 0; i < 3; i++) f->out[i] = like_heads(f->in[1 + i]);
    return 0;
}

int grad_attention(ps_grad *g)
{
    ps_tensor *in[4], *y, *lse, *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, 3)) return ps_fail(PS_EUNSUP, "attention: a mask has no gradient here; detach it");
    for (int i = 0; i < 4; i++) PS_TRY(ps_grad_in(g, i, &in[i]));
    if (in[0]->dtype_ != in[1]->dtype_)
        return ps_fail(PS_EUNSUP, "attention: keys and values of another type (%s) than queries (%s) have no gradient; "
                       "convert them first", ps_dtype_name(in[1]->dtype_), ps_dtype_name(in[0]->dtype_));
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_grad_out(g, 1, &lse));
    PS_TRY(ps_run(g, PS_OP_attention_backward, g->attrs, all, 7, g->dout[0], in[0], in[1], in[2], in[3], y, lse));
    for (int i = 0; i < 3; i++) if (ps_grad_wants(g, i)) ps_grad_give(g, i, all[i]);
    return 0;
}

static int check_packed(const ps_infer *f, const ps_tensor *qkv, const ps_tensor *mask, int32_t heads)
{
    if (qkv->ndim != 3 || !ps_dtype_is_float(qkv->dtype_))
        return ps_rule_fail(f, "qkv must be a float tensor [B, T, 3C]");
    if (heads < 1 || qkv->shape_[2] % (3 * (int64_t)heads))
        return ps_rule_fail(f, "%d heads do not divide C = %g", heads, (double)qkv->shape_[2] / 3);
    return check_mask(f, mask, qkv->shape_[0], qkv->shape_[1], qkv->shape_[1]);
}

int infer_attention_packed(ps_infer *f)
{
    const ps_attrs_attention_packed *at = f->attrs;
    const ps_tensor *qkv = f->in[0];
    PS_TRY(check_packed(f, qkv, f->in[1], at->heads));
    PS_TRY(check_dropout(f, at->p, at->first_head));
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
    PS_TRY(check_packed(f, qkv, f->in[2], at->heads));
    PS_TRY(check_dropout(f, at->p, at->first_head));
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

int infer_rope(ps_infer *f)
{
    const ps_tensor *x = f->in[0], *cos = f->in[1];
    int angles = x->dtype_ == PS_F64 ? PS_F64 : PS_F32;
    if (x->ndim != 4 || !ps_dtype_is_float(x->dtype_)) return ps_rule_fail(f, "x must be float [B, H, T, D]");
    if (cos->ndim != 3 || !ps_same_shape(cos, f->in[2]) || cos->dtype_ != angles || f->in[2]->dtype_ != angles ||
        (cos->shape_[0] != 1 && cos->shape_[0] != x->shape_[0]) || cos->shape_[1] != x->shape_[2] ||
        2 * cos->shape_[2] > x->shape_[3])
        return ps_rule_fail(f, "cos and sin must be %s [%lld or 1, %lld, at most %lld]", ps_dtype_name(angles),
                            (long long)x->shape_[0], (long long)x->shape_[2], (long long)x->shape_[3] / 2);
    f->out[0] = like_heads(x);
    return 0;
}

/* Rotates dy by the opposite angles. The matrix of a rotation is orthogonal, except that cos and sin can be scaled.
 * Their scale applies in forward and in backward. */
int grad_rope(ps_grad *g)
{
    ps_attrs_rope attrs = { .inverse = !((const ps_attrs_rope *)g->attrs)->inverse };
    ps_tensor *cos, *sin, *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, 1) || ps_grad_wants(g, 2))
        return ps_fail(PS_EUNSUP, "rope: cos and sin have no gradient here; detach them");
    PS_TRY(ps_grad_in(g, 1, &cos));
    PS_TRY(ps_grad_in(g, 2, &sin));
    PS_TRY(ps_run(g, PS_OP_rope, &attrs, all, 3, g->dout[0], cos, sin));
    ps_grad_give(g, 0, all[0]);
    return 0;
}
