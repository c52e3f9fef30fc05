/* SPDX-License-Identifier: BSD-3-Clause
 * Views (which have no kernel), copies, casts and the in-place ops: shapes and gradients. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_reshape(ps_infer *f);
int infer_permute(ps_infer *f);
int infer_slice(ps_infer *f);
int infer_expand(ps_infer *f);
int infer_same(ps_infer *f);
int infer_cast(ps_infer *f);
int infer_to_device(ps_infer *f);
int infer_copy(ps_infer *f);
int infer_inplace(ps_infer *f);
int infer_inplace_float(ps_infer *f);
int infer_inplace_int(ps_infer *f);
int infer_randperm(ps_infer *f);
int infer_axpy(ps_infer *f);
int infer_scale_by(ps_infer *f);
int infer_concat(ps_infer *f);
int infer_flip(ps_infer *f);
int infer_triangle(ps_infer *f);
int grad_reshape(ps_grad *g);
int grad_permute(ps_grad *g);
int grad_slice(ps_grad *g);
int grad_expand(ps_grad *g);
int grad_identity(ps_grad *g);
int grad_cast(ps_grad *g);
int grad_to_device(ps_grad *g);
int grad_concat(ps_grad *g);
int grad_flip(ps_grad *g);
int grad_triangle(ps_grad *g);

/* m->shape is a new shape for the elements of x. Finds strides for this shape, by the rule of NumPy and PyTorch: a run
 * of dimensions of x that are contiguous with each other can be divided differently. Returns false if there are no such
 * strides and a copy is needed. */
static bool view_strides(const ps_tensor *x, ps_meta *m)
{
    int64_t shape[PS_MAX_DIMS], stride[PS_MAX_DIMS];
    int n = 0;
    for (int i = 0; i < x->ndim; i++)
        if (x->shape_[i] != 1) shape[n] = x->shape_[i], stride[n] = x->stride_[i], n++;
    int old = 0, new = 0;
    while (old < n && new < m->ndim) {
        int64_t a = shape[old], b = m->shape[new];
        int old_end = old + 1, new_end = new + 1;
        while (a != b) {
            if (a < b) a *= shape[old_end++];
            else b *= m->shape[new_end++];
        }
        for (int k = old; k < old_end - 1; k++)
            if (stride[k] != shape[k + 1] * stride[k + 1]) return false;
        m->stride[new_end - 1] = stride[old_end - 1];
        for (int k = new_end - 1; k > new; k--) m->stride[k - 1] = m->stride[k] * m->shape[k];
        old = old_end, new = new_end;
    }
    for (; new < m->ndim; new++) m->stride[new] = 1;          /* sizes of 1 at the end of the shape */
    return true;
}

int infer_reshape(ps_infer *f)
{
    ps_attrs_reshape *at = f->attrs;
    const ps_tensor *x = f->in[0];
    ps_meta *m = &f->out[0];
    if (at->ndim < 0 || at->ndim > PS_MAX_DIMS)
        return ps_rule_fail(f, "the tensor would have %d dimensions; at most %d are supported", at->ndim, PS_MAX_DIMS);
    *m = (ps_meta){ .dtype = x->dtype_, .ndim = at->ndim, .offset = x->offset };
    int64_t numel = 1;
    int unknown = -1;
    for (int i = 0; i < at->ndim; i++) {
        m->shape[i] = at->shape[i];
        if (at->shape[i] == -1 && unknown < 0) unknown = i;
        else if (at->shape[i] < 0) return ps_rule_fail(f, "the new shape has size %lld", (long long)at->shape[i]);
        else if (__builtin_mul_overflow(numel, at->shape[i], &numel))
            return ps_rule_fail(f, "the new shape has 2^63 elements or more");
    }
    if (unknown >= 0 && numel > 0 && x->numel_ % numel == 0) m->shape[unknown] = x->numel_ / numel, numel = x->numel_;
    if (numel != x->numel_ || (unknown >= 0 && m->shape[unknown] < 0)) {
        char text[160];
        return ps_rule_fail(f, "shape %s does not hold %lld elements",
                            ps_shape_text(m->ndim, at->shape, text, sizeof text), (long long)x->numel_);
    }
    if (x->numel_ == 0) {
        ps_meta_set_contiguous(m);
        m->offset = x->offset;
        return 0;
    }
    if (!view_strides(x, m))
        return ps_rule_fail(f, "this tensor's strides do not allow this view; call :contiguous() first");
    return 0;
}

int grad_reshape(ps_grad *g)
{
    const ps_meta *m = ps_grad_in_meta(g, 0);
    ps_tensor *dx;
    PS_TRY(ps_reshape_to(g, &dx, g->dout[0], m->ndim, m->shape));
    ps_grad_give(g, 0, dx);
    return 0;
}

int infer_permute(ps_infer *f)
{
    ps_attrs_permute *at = f->attrs;
    const ps_tensor *x = f->in[0];
    unsigned seen = 0;
    f->out[0] = (ps_meta){ .dtype = x->dtype_, .ndim = x->ndim, .offset = x->offset };
    for (int i = 0; i < x->ndim; i++) {
        PS_TRY(ps_rule_dim(f, x->ndim, &at->axes[i]));
        if (seen >> at->axes[i] & 1) return ps_rule_fail(f, "dimension %d is named twice", at->axes[i]);
        seen |= 1u << at->axes[i];
        f->out[0].shape[i] = x->shape_[at->axes[i]];
        f->out[0].stride[i] = x->stride_[at->axes[i]];
    }
    return 0;
}

int grad_permute(ps_grad *g)
{
    const ps_attrs_permute *at = g->attrs;
    ps_attrs_permute inverse = { { 0 } };
    for (int i = 0; i < ps_grad_in_meta(g, 0)->ndim; i++) inverse.axes[at->axes[i]] = i;
    ps_tensor *out[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_permute, &inverse, out, 1, g->dout[0]));
    ps_grad_give(g, 0, out[0]);
    return 0;
}

int infer_slice(ps_infer *f)
{
    ps_attrs_slice *at = f->attrs;
    const ps_tensor *x = f->in[0];
    PS_TRY(ps_rule_dim(f, x->ndim, &at->dim));
    int64_t size = x->shape_[at->dim];
    if (at->step < 1 || at->start < 0 || at->stop < at->start || at->stop > size)
        return ps_rule_fail(f, "the range [%lld, %lld) with step %lld is not valid for dimension %d of size %lld",
                            (long long)at->start, (long long)at->stop, (long long)at->step, at->dim, (long long)size);
    if (at->step > size) at->step = size > 0 ? size : 1;       /* this step selects the same elements as a larger step,
                                                                * and does not overflow */
    f->out[0] = ps_tensor_meta(x);
    f->out[0].offset += at->start * x->stride_[at->dim];
    f->out[0].shape[at->dim] = (at->stop - at->start + at->step - 1) / at->step;
    f->out[0].stride[at->dim] *= at->step;
    return 0;
}

/* dx is a tensor of zeros, with dy copied to the slice that forward read. */
int grad_slice(ps_grad *g)
{
    ps_tensor *dx, *out[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_filled(g, &dx, g->dout[0]->device_, ps_grad_in_meta(g, 0), 0));
    PS_TRY(ps_run(g, PS_OP_slice, g->attrs, out, 1, dx));
    ps_tensor *part = out[0];
    ps_attrs_copy_ none = { 0 };
    out[0] = NULL;
    PS_TRY(ps_run(g, PS_OP_copy_, &none, out, 2, part, g->dout[0]));
    ps_grad_give(g, 0, dx);
    return 0;
}

int infer_expand(ps_infer *f)
{
    ps_attrs_expand *at = f->attrs;
    const ps_tensor *x = f->in[0];
    if (at->ndim < x->ndim || at->ndim > PS_MAX_DIMS)
        return ps_rule_fail(f, "a tensor cannot be expanded to %d dimensions", at->ndim);
    int extra = at->ndim - x->ndim;
    f->out[0] = (ps_meta){ .dtype = x->dtype_, .ndim = at->ndim, .offset = x->offset };
    for (int i = 0; i < at->ndim; i++) {
        int64_t have = i < extra ? 1 : x->shape_[i - extra],
                want = at->shape[i] == -1 && i >= extra ? have : at->shape[i];
        if (want < 0 || (have != want && have != 1))
            return ps_rule_fail(f, "size %lld of dimension %d cannot be expanded to %lld", (long long)have, i,
                                (long long)at->shape[i]);
        f->out[0].shape[i] = want;
        f->out[0].stride[i] = have == want && i >= extra ? x->stride_[i - extra] : 0;
    }
    return 0;
}

int grad_expand(ps_grad *g)
{
    ps_tensor *dx;
    PS_TRY(ps_sum_to(g, &dx, g->dout[0], ps_grad_in_meta(g, 0)));
    ps_grad_give(g, 0, dx);
    return 0;
}

int infer_same(ps_infer *f)
{
    f->out[0] = ps_meta_like(f->in[0]);
    return 0;
}

int grad_identity(ps_grad *g)
{
    ps_grad_give(g, 0, g->dout[0]);
    return 0;
}

int infer_to_device(ps_infer *f)
{
    ((ps_attrs_to_device *)f->attrs)->from = f->in[0]->device_;
    f->out[0] = ps_meta_like(f->in[0]);
    return 0;
}

int grad_to_device(ps_grad *g)
{
    ps_attrs_to_device back = { .device = ((const ps_attrs_to_device *)g->attrs)->from };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_to_device, &back, all, 1, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int infer_cast(ps_infer *f)
{
    ps_attrs_cast *at = f->attrs;
    if (at->dtype < 0 || at->dtype >= PS_DTYPE_COUNT) return ps_rule_fail(f, "there is no type %d", at->dtype);
    f->out[0] = ps_meta_like(f->in[0]);
    f->out[0].dtype = at->dtype;
    return 0;
}

int grad_cast(ps_grad *g)
{
    ps_tensor *dx;
    PS_TRY(ps_cast(g, &dx, g->dout[0], ps_grad_in_meta(g, 0)->dtype));
    ps_grad_give(g, 0, dx);
    return 0;
}

int infer_copy(ps_infer *f)
{
    ps_meta m;
    PS_TRY(ps_rule_broadcast(f, f->in[0], f->in[1], &m));
    if (m.ndim != f->in[0]->ndim || memcmp(m.shape, f->in[0]->shape_, sizeof(int64_t) * (size_t)m.ndim))
        return ps_rule_fail(f, "the source does not broadcast to the destination");
    return 0;
}

int infer_inplace(ps_infer *f) { return 0; }

int infer_inplace_float(ps_infer *f)
{
    return ps_dtype_is_float(f->in[0]->dtype_) ? 0 : ps_rule_fail(f, "x must be a float tensor");
}

int infer_randperm(ps_infer *f)
{
    if (f->in[0]->dtype_ != PS_I64 || f->in[0]->ndim != 1) return ps_rule_fail(f, "the tensor must be int64 [N]");
    return 0;
}

int infer_inplace_int(ps_infer *f)
{
    const ps_attrs_randint_ *at = f->attrs;
    if (ps_dtype_is_float(f->in[0]->dtype_)) return ps_rule_fail(f, "the tensor must have an integer type");
    if (at->high <= at->low)
        return ps_rule_fail(f, "the range [%lld, %lld) is empty", (long long)at->low, (long long)at->high);
    int dtype = f->in[0]->dtype_;
    int64_t least = dtype == PS_I64 ? INT64_MIN : dtype == PS_I32 ? INT32_MIN : 0;
    int64_t most = dtype == PS_I64 ? INT64_MAX : dtype == PS_I32 ? INT32_MAX : dtype == PS_U8 ? 255 : 1;
    if (at->low < least || at->high - 1 > most)
        return ps_rule_fail(f, "the range [%lld, %lld) does not fit %s", (long long)at->low, (long long)at->high,
                            ps_dtype_name(dtype));
    return 0;
}

int infer_axpy(ps_infer *f)
{
    if (!ps_same_shape(f->in[0], f->in[1])) return ps_rule_fail(f, "the two tensors must have the same shape");
    if (!ps_dtype_is_float(f->in[0]->dtype_) || !ps_dtype_is_float(f->in[1]->dtype_))
        return ps_rule_fail(f, "both tensors must have a float type");
    return 0;
}

int infer_scale_by(ps_infer *f)
{
    if (!ps_dtype_is_float(f->in[0]->dtype_) || !ps_dtype_is_float(f->in[1]->dtype_) || f->in[1]->numel_ != 1)
        return ps_rule_fail(f, "the inputs must be a float tensor and a single float value");
    return 0;
}

int infer_concat(ps_infer *f)
{
    ps_attrs_concat *at = f->attrs;
    const ps_tensor *first = f->in[0];
    PS_TRY(ps_rule_dim(f, first->ndim, &at->dim));
    f->out[0] = ps_meta_like(first);
    for (int i = 1; i < f->n_in; i++) {
        const ps_tensor *t = f->in[i];
        bool fits = t->ndim == first->ndim;
        for (int d = 0; fits && d < t->ndim; d++) fits = d == at->dim || t->shape_[d] == first->shape_[d];
        if (!fits) return ps_rule_fail(f, "input %d differs outside dimension %d", i, at->dim);
        f->out[0].shape[at->dim] += t->shape_[at->dim];
    }
    return 0;
}

int grad_concat(ps_grad *g)
{
    const ps_attrs_concat *at = g->attrs;
    ps_attrs_slice part = { .dim = at->dim, .step = 1 };
    for (int i = 0; i < g->n_in; i++) {
        part.start = part.stop;
        part.stop += ps_grad_in_meta(g, i)->shape[at->dim];
        if (!ps_grad_wants(g, i)) continue;
        ps_tensor *out[PS_MAX_OUT] = { NULL };
        PS_TRY(ps_run(g, PS_OP_slice, &part, out, 1, g->dout[0]));
        ps_grad_give(g, i, out[0]);
        g->temps[--g->n_temps] = NULL;                        /* the tensor is released now, because a long list of
                                                               * tensors would fill the pool `temps` */
        ps_tensor_release(out[0]);
    }
    return 0;
}

int infer_flip(ps_infer *f)
{
    const ps_attrs_flip *at = f->attrs;
    const ps_tensor *x = f->in[0];
    if (at->dims >> x->ndim) return ps_rule_fail(f, "dims 0x%x of a tensor with %d dimensions", at->dims, x->ndim);
    f->out[0] = ps_meta_like(x);
    return 0;
}

/* If the diagonal is outside the matrix, it is moved to the border of the matrix. The kernels add the diagonal to an
 * index, and this sum must not overflow. */
int infer_triangle(ps_infer *f)
{
    ps_attrs_triangle *at = f->attrs;
    const ps_tensor *x = f->in[0];
    if (x->ndim < 2) return ps_rule_fail(f, "x must have at least 2 dimensions");
    int64_t least = -x->shape_[x->ndim - 2], most = x->shape_[x->ndim - 1];
    at->diagonal = at->diagonal < least ? least : at->diagonal > most ? most : at->diagonal;
    f->out[0] = ps_meta_like(x);
    return 0;
}

/* The op is linear and is its own transpose, so dx = op(dy). */
static int same_of_gradient(ps_grad *g, int op)
{
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, op, g->attrs, all, 1, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}
int grad_flip(ps_grad *g) { return same_of_gradient(g, PS_OP_flip); }
int grad_triangle(ps_grad *g) { return same_of_gradient(g, PS_OP_triangle); }
