/* SPDX-License-Identifier: BSD-3-Clause
 * Functions that the shape and gradient rules of all families share. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int ps_rule_fail(const ps_infer *f, const char *fmt, ...)
{
    char text[900];
    va_list ap;
    va_start(ap, fmt);
    size_t n = (size_t)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (int i = 0; i < f->n_in && i < 8 && n < sizeof text; i++) {
        if (!f->in[i]) continue;
        char shape[160];
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s %s",
                              i ? ", " : "; inputs: ", ps_dtype_name(f->in[i]->dtype_),
                              ps_shape_text(f->in[i]->ndim, f->in[i]->shape_, shape, sizeof shape));
    }
    return ps_fail(PS_EINVAL, "%s: %s", ps_op(f->op)->name, text);
}

int ps_rule_one_type(const ps_infer *f, const ps_tensor *a, const char *name_a, const ps_tensor *b, const char *name_b)
{
    bool float_a = ps_dtype_is_float(a->dtype_), float_b = ps_dtype_is_float(b->dtype_);
    if (float_a && a->dtype_ == b->dtype_) return 0;
    const char *type_a = ps_dtype_name(a->dtype_), *type_b = ps_dtype_name(b->dtype_);
    if (!float_a && !float_b)
        return ps_rule_fail(f, "%s is %s and %s is %s; both must be of one float type: convert both with :float()",
                            name_a, type_a, name_b, type_b);
    return ps_rule_fail(f, "%s is %s, but %s is %s; both must be of one float type: write %s:to \"%s\"", name_a, type_a,
                        name_b, type_b, float_b ? name_a : name_b, float_b ? type_b : type_a);
}

ps_meta ps_meta_like(const ps_tensor *t)
{
    ps_meta m = { .dtype = t->dtype_, .ndim = t->ndim };
    memcpy(m.shape, t->shape_, sizeof m.shape);
    return m;
}

bool ps_same_shape(const ps_tensor *a, const ps_tensor *b)
{
    return a->ndim == b->ndim && !memcmp(a->shape_, b->shape_, sizeof(int64_t) * (size_t)a->ndim);
}

int ps_rule_like(const ps_infer *f, const ps_tensor *t, const char *name, int dtype, int ndim, const int64_t *shape)
{
    char text[160];
    if (t->dtype_ == dtype && t->ndim == ndim && !memcmp(t->shape_, shape, sizeof(int64_t) * (size_t)ndim)) return 0;
    ps_shape_text(ndim, shape, text, sizeof text);
    return ps_rule_fail(f, "%s must be %s %s", name, ps_dtype_name(dtype), text);
}

int ps_rule_dim(const ps_infer *f, int ndim, int32_t *dim)
{
    int d = *dim < 0 ? *dim + ndim : *dim;
    if (d < 0 || d >= ndim)
        return ps_rule_fail(f, "dimension %d does not exist in a tensor with %d dimension%s", *dim, ndim,
                            ndim == 1 ? "" : "s");
    *dim = d;
    return 0;
}

int ps_rule_broadcast(const ps_infer *f, const ps_tensor *a, const ps_tensor *b, ps_meta *out)
{
    int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    for (int i = 0; i < ndim; i++) {
        int64_t x = i < a->ndim ? a->shape_[a->ndim - 1 - i] : 1, y = i < b->ndim ? b->shape_[b->ndim - 1 - i] : 1;
        if (x != y && x != 1 && y != 1)
            return ps_rule_fail(f, "shapes do not broadcast: dimension -%d has size %lld in one and %lld in the other",
                                i + 1, (long long)x, (long long)y);
        out->shape[ndim - 1 - i] = x == 1 ? y : x;
    }
    out->ndim = ndim;
    return 0;
}

int ps_run1(ps_grad *g, int op, ps_tensor **out, ps_tensor *a, ps_tensor *b)
{
    static const char none[PS_MAX_ATTRS];
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, op, none, all, b ? 2 : 1, a, b));
    *out = all[0];
    return 0;
}

int ps_affine(ps_grad *g, ps_tensor **out, ps_tensor *x, double alpha, double beta)
{
    ps_attrs_affine attrs = { .alpha = alpha, .beta = beta };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_affine, &attrs, all, 1, x));
    *out = all[0];
    return 0;
}

/* Computes alpha * x. The op also adds a constant. The constant is -0, because adding -0 changes no value, and adding
 * +0 would change -0 to +0. */
int ps_scaled(ps_grad *g, ps_tensor **out, ps_tensor *x, double alpha) { return ps_affine(g, out, x, alpha, -0.0); }

int ps_cast(ps_grad *g, ps_tensor **out, ps_tensor *x, int dtype)
{
    ps_attrs_cast attrs = { .dtype = dtype };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_cast, &attrs, all, 1, x));
    *out = all[0];
    return 0;
}

int ps_filled(ps_grad *g, ps_tensor **out, int device, const ps_meta *meta, double value)
{
    ps_tensor *t, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_new(g, device, meta, &t));
    ps_attrs_fill_ attrs = { .value = value };
    PS_TRY(ps_run(g, PS_OP_fill_, &attrs, all, 1, t));
    *out = t;
    return 0;
}

int ps_scalar_like(ps_grad *g, ps_tensor **out, const ps_tensor *like, double value)
{
    ps_meta m = { .dtype = like->dtype_ };
    return ps_filled(g, out, like->device_, &m, value);
}

int ps_reshape_to(ps_grad *g, ps_tensor **out, ps_tensor *x, int ndim, const int64_t *shape)
{
    ps_attrs_reshape attrs = { .ndim = ndim };
    memcpy(attrs.shape, shape, sizeof(int64_t) * (size_t)ndim);
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    if (!ps_tensor_is_contiguous(x)) PS_TRY(ps_run1(g, PS_OP_contiguous, &x, x, NULL));
    PS_TRY(ps_run(g, PS_OP_reshape, &attrs, all, 1, x));
    *out = all[0];
    return 0;
}

int ps_sum_to(ps_grad *g, ps_tensor **out, ps_tensor *x, const ps_meta *like)
{
    uint32_t dims = 0;
    int extra = x->ndim - like->ndim;
    for (int i = 0; i < x->ndim; i++)
        if (i < extra || (like->shape[i - extra] == 1 && x->shape_[i] != 1)) dims |= 1u << i;
    if (dims) {
        ps_attrs_sum attrs = { .dims = dims, .keepdim = 1 };
        ps_tensor *all[PS_MAX_OUT] = { NULL };
        PS_TRY(ps_run(g, PS_OP_sum, &attrs, all, 1, x));
        x = all[0];
    }
    if (extra > 0) PS_TRY(ps_reshape_to(g, &x, x, like->ndim, like->shape));
    *out = x;
    return 0;
}
