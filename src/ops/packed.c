/* SPDX-License-Identifier: BSD-3-Clause
 * Packed weights: shapes, and the gradient of x. */
#include <string.h>
#include "base/blocks.h"
#include "base/error.h"
#include "tensor/optable.h"

int infer_unpack(ps_infer *f);
int infer_pack(ps_infer *f);
int infer_linear_packed(ps_infer *f);
int grad_linear_packed(ps_grad *g);

/* Sets *out to the number of values that a row of w contains. */
static int row_numel(ps_infer *f, const ps_tensor *w, int type, int64_t *out)
{
    const ps_blocks *b = ps_blocks_of(type);
    if (!b) return ps_rule_fail(f, "there is no type %d of packed numbers", type);
    if (w->ndim < 1 || w->dtype_ != PS_U8) return ps_rule_fail(f, "w must be uint8 [..., bytes]");
    int64_t nbytes = w->shape_[w->ndim - 1];
    if (nbytes % b->bytes)
        return ps_rule_fail(f, "rows of %lld bytes are not a whole number of blocks of %s, which have %d bytes",
                            (long long)nbytes, b->name, b->bytes);
    *out = nbytes / b->bytes * b->block;
    return 0;
}

/* Checks the scales of w. Each row of w has `numel` values. */
static int check_scales(ps_infer *f, const ps_tensor *w, int type, const ps_tensor *scales, int64_t numel)
{
    const ps_blocks *b = ps_blocks_of(type);
    if (type != PS_NF4_DOUBLE) {
        if (scales) return ps_rule_fail(f, "blocks of %s have scales of their own, so scales must be nil", b->name);
        return 0;
    }
    int64_t nbytes = w->shape_[w->ndim - 1], blocks = nbytes ? w->numel_ / nbytes * (numel / b->block) : 0;
    int64_t count = PS_SCALES_HEAD + (blocks + PS_SCALES_GROUP - 1) / PS_SCALES_GROUP;
    if (!scales || scales->ndim != 1 || scales->dtype_ != PS_F32 || scales->shape_[0] != count)
        return ps_rule_fail(f, "the scales of %lld blocks of %s must be fp32 [%lld]", (long long)blocks, b->name,
                            (long long)count);
    return 0;
}

int infer_unpack(ps_infer *f)
{
    const ps_attrs_unpack *at = f->attrs;
    const ps_tensor *w = f->in[0];
    int64_t numel;
    if (at->dtype != PS_F32 && at->dtype != PS_BF16 && at->dtype != PS_F16)
        return ps_rule_fail(f, "packed values can be unpacked only to fp32, bf16 or fp16");
    PS_TRY(row_numel(f, w, at->type, &numel));
    PS_TRY(check_scales(f, w, at->type, f->in[1], numel));
    f->out[0] = ps_meta_like(w);
    f->out[0].dtype = at->dtype;
    f->out[0].shape[w->ndim - 1] = numel;
    return 0;
}

int infer_pack(ps_infer *f)
{
    const ps_attrs_pack *at = f->attrs;
    const ps_tensor *x = f->in[0];
    const ps_blocks *b = ps_blocks_of(PS_Q8_0);
    if (at->type != PS_Q8_0) return ps_rule_fail(f, "only type %d (Q8_0) can be packed, not %d", PS_Q8_0, at->type);
    if (x->ndim < 1 || !ps_dtype_is_float(x->dtype_)) return ps_rule_fail(f, "x must be float [..., I]");
    int64_t width = x->shape_[x->ndim - 1];
    if (width % b->block)
        return ps_rule_fail(f, "rows of %lld values are not a whole number of blocks of %s, which have %d values",
                            (long long)width, b->name, b->block);
    f->out[0] = ps_meta_like(x);
    f->out[0].dtype = PS_U8;
    f->out[0].shape[x->ndim - 1] = width / b->block * b->bytes;
    return 0;
}

int infer_linear_packed(ps_infer *f)
{
    const ps_attrs_linear_packed *at = f->attrs;
    const ps_tensor *x = f->in[0], *w = f->in[1], *b = f->in[2], *r = f->in[3];
    int64_t numel;
    PS_TRY(row_numel(f, w, at->type, &numel));
    if (x->ndim < 1 || w->ndim != 2 || !ps_dtype_is_float(x->dtype_))
        return ps_rule_fail(f, "x must be a float tensor [..., I], and w must have two dimensions");
    PS_TRY(check_scales(f, w, at->type, f->in[4], numel));
    int64_t in = at->back ? w->shape_[0] : numel, out = at->back ? numel : w->shape_[0];
    if (x->shape_[x->ndim - 1] != in)
        return ps_rule_fail(f, "x has %lld features, but w needs %lld", (long long)x->shape_[x->ndim - 1],
                            (long long)in);
    f->out[0] = ps_meta_like(x);
    f->out[0].shape[x->ndim - 1] = out;
    if (at->back && (b || r)) return ps_rule_fail(f, "with back, neither a bias nor a residual is supported");
    if (b && (b->ndim != 1 || b->shape_[0] != out || !ps_dtype_is_float(b->dtype_)))
        return ps_rule_fail(f, "the bias must be float [%lld]", (long long)out);
    if (r && (r->dtype_ != x->dtype_ || r->ndim != x->ndim ||
              memcmp(r->shape_, f->out[0].shape, sizeof(int64_t) * (size_t)r->ndim)))
        return ps_rule_fail(f, "the residual must have the output's shape and type");
    return 0;
}

/* dx = dy w. db = the sum of dy over rows. dresidual = dy. */
int grad_linear_packed(ps_grad *g)
{
    const ps_attrs_linear_packed *at = g->attrs;
    ps_tensor *w, *scales, *dy = g->dout[0], *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, 0)) {
        ps_attrs_linear_packed attrs = { .type = at->type, .back = !at->back };
        PS_TRY(ps_grad_in(g, 1, &w));
        PS_TRY(ps_grad_in(g, 4, &scales));
        PS_TRY(ps_run(g, PS_OP_linear_packed, &attrs, all, 5, dy, w, (ps_tensor *)NULL, (ps_tensor *)NULL, scales));
        ps_grad_give(g, 0, all[0]);
    }
    if (!at->back) PS_TRY(ps_give_weights(g, 1, 2, true, NULL, dy));
    if (ps_grad_wants(g, 3)) ps_grad_give(g, 3, dy);
    return 0;
}
