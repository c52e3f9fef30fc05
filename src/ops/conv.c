/* SPDX-License-Identifier: BSD-3-Clause
 * Convolution, its transpose and the gradient of its weight: shapes and gradients. The gradients of each of these three
 * ops are computed by the other two ops. The attributes of all three ops begin with the attributes of conv. These
 * attributes are pairs of values, for H and for W. For a tensor [N, C, L], only the value for W is used. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_conv(ps_infer *f);
int infer_conv_transpose(ps_infer *f);
int infer_conv_weight(ps_infer *f);
int grad_conv(ps_grad *g);
int grad_conv_transpose(ps_grad *g);

/* Checks the attributes. If x has three dimensions, there is no dimension H. The attributes for H are then set to
 * stride 1, dilation 1 and padding 0. */
static int check_attrs(const ps_infer *f, ps_attrs_conv *a, int spatial)
{
    if (spatial == 1) a->stride[0] = a->dilation[0] = 1, a->padding[0] = a->padding[2] = 0;
    for (int i = 0; i < 2; i++) {
        if (a->stride[i] < 1) return ps_rule_fail(f, "stride is %d; it must be 1 or more", a->stride[i]);
        if (a->dilation[i] < 1) return ps_rule_fail(f, "dilation is %d; it must be 1 or more", a->dilation[i]);
        if (a->padding[i] < 0 || a->padding[i + 2] < 0)
            return ps_rule_fail(f, "padding is %d and %d; both must be 0 or more", a->padding[i], a->padding[i + 2]);
    }
    return a->groups >= 1 ? 0 : ps_rule_fail(f, "groups is %d; it must be 1 or more", a->groups);
}

static int check_operands(const ps_infer *f, const ps_tensor *x, const ps_tensor *w, const char *names)
{
    bool fits = (x->ndim == 3 || x->ndim == 4) && w->ndim == x->ndim;
    return fits ? ps_rule_one_type(f, x, "x", w, "w") : ps_rule_fail(f, "the inputs must be %s", names);
}

static int check_bias(const ps_infer *f, const ps_tensor *b, int64_t channels)
{
    if (!b || (b->ndim == 1 && b->shape_[0] == channels && ps_dtype_is_float(b->dtype_))) return 0;
    return ps_rule_fail(f, "the bias must be float [%lld]", (long long)channels);
}

/* Computes the output size of conv along the height (i = 0) or the width (i = 1). Along that dimension, the input has
 * `size` elements, and the kernel has k elements. */
static int size_of(const ps_infer *f, const ps_attrs_conv *a, int i, int64_t size, int64_t k, int64_t *out)
{
    int64_t span = (k - 1) * a->dilation[i] + 1, padded = size + a->padding[i] + a->padding[i + 2];
    const char *along = i == 0 ? "height" : "width";
    if (k < 1) return ps_rule_fail(f, "the kernel's %s is %lld; it must be 1 or more", along, (long long)k);
    if (span > padded)
        return ps_rule_fail(f, "the kernel of %s %lld spans %lld elements (dilation %d), more than the %lld of the "
                            "padded input; use a larger padding", along, (long long)k, (long long)span, a->dilation[i],
                            (long long)padded);
    *out = (padded - span) / a->stride[i] + 1;
    return 0;
}

static int check_groups(const ps_infer *f, const ps_attrs_conv *a, int64_t channels, const char *name)
{
    if (channels % a->groups == 0) return 0;
    return ps_rule_fail(f, "%lld %s channels cannot be divided into %d groups", (long long)channels, name, a->groups);
}

int infer_conv(ps_infer *f)
{
    ps_attrs_conv *a = f->attrs;
    const ps_tensor *x = f->in[0], *w = f->in[1];
    int spatial = x->ndim - 2;
    PS_TRY(check_operands(f, x, w, "x [N, C, L] and w [O, C / groups, K], or x [N, C, H, W] and w [O, C / groups, KH, "
                          "KW]"));
    PS_TRY(check_attrs(f, a, spatial));
    PS_TRY(check_groups(f, a, x->shape_[1], "input"));
    PS_TRY(check_groups(f, a, w->shape_[0], "output"));
    if (w->shape_[1] * a->groups != x->shape_[1])
        return ps_rule_fail(f, "x has %lld channels, but w needs %lld (%lld in each of %d groups)",
                            (long long)x->shape_[1], (long long)(w->shape_[1] * a->groups), (long long)w->shape_[1],
                            a->groups);
    PS_TRY(check_bias(f, f->in[2], w->shape_[0]));
    f->out[0] = ps_meta_like(x);
    f->out[0].shape[1] = w->shape_[0];
    for (int i = 2 - spatial; i < 2; i++) {
        int d = i + spatial;
        PS_TRY(size_of(f, a, i, x->shape_[d], w->shape_[d], &f->out[0].shape[d]));
    }
    return 0;
}

int infer_conv_transpose(ps_infer *f)
{
    ps_attrs_conv_transpose *at = f->attrs;
    ps_attrs_conv *a = f->attrs;
    const ps_tensor *x = f->in[0], *w = f->in[1];
    int spatial = x->ndim - 2;
    PS_TRY(check_operands(f, x, w, "x [N, O, L] and w [O, C / groups, K], or x [N, O, H, W] and w [O, C / groups, KH, "
                          "KW]"));
    PS_TRY(check_attrs(f, a, spatial));
    PS_TRY(check_groups(f, a, x->shape_[1], "input"));
    if (w->shape_[0] != x->shape_[1])
        return ps_rule_fail(f, "x has %lld channels, but w needs %lld",
                            (long long)x->shape_[1], (long long)w->shape_[0]);
    PS_TRY(check_bias(f, f->in[2], w->shape_[1] * a->groups));
    f->out[0] = ps_meta_like(x);
    f->out[0].shape[1] = w->shape_[1] * a->groups;
    for (int i = 2 - spatial; i < 2; i++) {
        int d = i + spatial;
        int64_t least = (x->shape_[d] - 1) * a->stride[i] + (w->shape_[d] - 1) * a->dilation[i] + 1 -
                        a->padding[i] - a->padding[i + 2];
        int64_t size = at->size[i] ? at->size[i] : least, back = 0;
        if (size < 1 || x->shape_[d] < 1)
            return ps_rule_fail(f, "the output would have %lld elements along the %s: the padding is too large",
                                (long long)size, i == 0 ? "height" : "width");
        PS_TRY(size_of(f, a, i, size, w->shape_[d], &back));
        if (back != x->shape_[d])
            return ps_rule_fail(f, "the output cannot have %lld elements along the %s; it must have %lld to %lld",
                                (long long)size, i == 0 ? "height" : "width", (long long)least,
                                (long long)(least + a->stride[i] - 1));
        at->size[i] = f->out[0].shape[d] = size;
    }
    return 0;
}

int infer_conv_weight(ps_infer *f)
{
    ps_attrs_conv_weight *at = f->attrs;
    ps_attrs_conv *a = f->attrs;
    const ps_tensor *x = f->in[0], *dy = f->in[1];
    int spatial = x->ndim - 2;
    int32_t want_b = at->want_b;
    PS_TRY(check_operands(f, x, dy, "x [N, C, ...] and dy [N, O, ...] of three or four dimensions"));
    PS_TRY(check_attrs(f, a, spatial));
    at->want_b = want_b;
    PS_TRY(check_groups(f, a, x->shape_[1], "input"));
    PS_TRY(check_groups(f, a, dy->shape_[1], "output"));
    if (x->shape_[0] != dy->shape_[0])
        return ps_rule_fail(f, "x has %lld samples, but dy has %lld",
                            (long long)x->shape_[0], (long long)dy->shape_[0]);
    f->out[0] = (ps_meta){ .dtype = x->dtype_, .ndim = x->ndim,
                           .shape = { dy->shape_[1], x->shape_[1] / a->groups } };
    for (int i = 2 - spatial; i < 2; i++) {
        int d = i + spatial;
        int64_t size;
        PS_TRY(size_of(f, a, i, x->shape_[d], at->size[i], &size));
        if (size != dy->shape_[d])
            return ps_rule_fail(f, "dy has %lld elements along the %s, but a kernel of %lld results in %lld",
                                (long long)dy->shape_[d], i == 0 ? "height" : "width", (long long)at->size[i],
                                (long long)size);
        f->out[0].shape[d] = at->size[i];
    }
    f->out[1] = (ps_meta){ .dtype = dy->dtype_, .ndim = at->want_b ? 1 : -1, .shape = { dy->shape_[1] } };
    if (!(f->given & 1)) at->accumulate = 0;
    if (!(f->given & 2)) at->add_b = 0;
    return 0;
}

/* -- gradients ----------------------------------------------------------------------------------------------------- */
/* Computes the gradient of the bias (input 2) as the sum of dy over samples and positions, and passes it on. */
static int give_bias(ps_grad *g, ps_tensor *dy)
{
    ps_attrs_sum sum = { .dims = ((1u << dy->ndim) - 1) & ~2u };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_dest(g, 2, &all[0], &sum.accumulate));
    PS_TRY(ps_run(g, PS_OP_sum, &sum, all, 1, dy));
    if (!sum.accumulate) ps_grad_give(g, 2, all[0]);
    return 0;
}

/* Computes the gradient of the weight (input 1) and passes it on. If with_b is set, does the same for the bias. x:
 * input of the conv. dy: gradient of the conv's output. */
static int give_weight(ps_grad *g, ps_tensor *x, ps_tensor *dy, bool with_b)
{
    const ps_meta *w = ps_grad_in_meta(g, 1);
    ps_attrs_conv_weight attrs = { .want_b = with_b };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    memcpy(&attrs, g->attrs, offsetof(ps_attrs_conv, pad));
    attrs.size[0] = w->ndim == 4 ? w->shape[2] : 1;
    attrs.size[1] = w->shape[w->ndim - 1];
    PS_TRY(ps_grad_dest(g, 1, &all[0], &attrs.accumulate));
    if (with_b) PS_TRY(ps_grad_dest(g, 2, &all[1], &attrs.add_b));
    PS_TRY(ps_run(g, PS_OP_conv_weight, &attrs, all, 2, x, dy));
    if (!attrs.accumulate) ps_grad_give(g, 1, all[0]);
    if (with_b && !attrs.add_b) ps_grad_give(g, 2, all[1]);
    return 0;
}

int grad_conv(ps_grad *g)
{
    const ps_meta *m = ps_grad_in_meta(g, 0);
    ps_tensor *x, *w, *dy = g->dout[0], *all[PS_MAX_OUT] = { NULL };
    bool wants_b = ps_grad_wants(g, 2);
    if (ps_grad_wants(g, 0)) {
        ps_attrs_conv_transpose attrs = { .size = { m->ndim == 4 ? m->shape[2] : 1, m->shape[m->ndim - 1] } };
        memcpy(&attrs, g->attrs, offsetof(ps_attrs_conv, pad));
        PS_TRY(ps_grad_in(g, 1, &w));
        PS_TRY(ps_run(g, PS_OP_conv_transpose, &attrs, all, 3, dy, w, (ps_tensor *)NULL));
        ps_grad_give(g, 0, all[0]);
    }
    if (ps_grad_wants(g, 1)) {
        PS_TRY(ps_grad_in(g, 0, &x));
        return give_weight(g, x, dy, wants_b);
    }
    return wants_b ? give_bias(g, dy) : 0;
}

int grad_conv_transpose(ps_grad *g)
{
    ps_tensor *x, *w, *dy = g->dout[0], *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, 0)) {
        ps_attrs_conv attrs = { .pad = 0 };
        memcpy(&attrs, g->attrs, offsetof(ps_attrs_conv, pad));
        PS_TRY(ps_grad_in(g, 1, &w));
        PS_TRY(ps_run(g, PS_OP_conv, &attrs, all, 3, dy, w, (ps_tensor *)NULL));
        ps_grad_give(g, 0, all[0]);
    }
    if (ps_grad_wants(g, 1)) {
        PS_TRY(ps_grad_in(g, 0, &x));
        PS_TRY(give_weight(g, dy, x, false));
    }
    return ps_grad_wants(g, 2) ? give_bias(g, dy) : 0;
}
