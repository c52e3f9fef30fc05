/* SPDX-License-Identifier: BSD-3-Clause
 * Padding, resampling (mean pooling, interpolation, padding by reflection) and max pooling: shapes and gradients. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_pad(ps_infer *f);
int infer_resample(ps_infer *f);
int infer_max_pool(ps_infer *f);
int infer_max_pool_backward(ps_infer *f);
int grad_pad(ps_grad *g);
int grad_resample(ps_grad *g);
int grad_max_pool(ps_grad *g);

int infer_pad(ps_infer *f)
{
    const ps_attrs_pad *a = f->attrs;
    const ps_tensor *x = f->in[0];
    f->out[0] = ps_meta_like(x);
    for (int d = 0; d < x->ndim; d++) {
        int64_t before = a->before[d], after = a->after[d], most = INT64_MAX / 8;
        if (before > most || before < -most || after > most || after < -most)
            return ps_rule_fail(f, "padding %lld and %lld of dimension %d are out of range", (long long)before,
                                (long long)after, d);
        f->out[0].shape[d] = x->shape_[d] + before + after;
        if (f->out[0].shape[d] < 0 || -before > x->shape_[d] || -after > x->shape_[d])
            return ps_rule_fail(f, "padding %lld and %lld cut more than the %lld elements of dimension %d",
                                (long long)before, (long long)after, (long long)x->shape_[d], d);
    }
    return 0;
}

/* Pads dy by the negative widths. Elements that forward removed get the gradient 0, and the gradient of the padding is
 * dropped. */
int grad_pad(ps_grad *g)
{
    const ps_attrs_pad *a = g->attrs;
    ps_attrs_pad back = { .value = 0 };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    for (int d = 0; d < 8; d++) back.before[d] = -a->before[d], back.after[d] = -a->after[d];
    PS_TRY(ps_run(g, PS_OP_pad, &back, all, 1, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

static int check_image(const ps_infer *f, const ps_tensor *x)
{
    if (x->ndim == 4 && ps_dtype_is_float(x->dtype_)) return 0;
    return ps_rule_fail(f, "x must be a float tensor [N, C, H, W]");
}

static const char *along(int i) { return i == 0 ? "height" : "width"; }

/* Checks `out` windows of `kernel` elements. All windows must be within the `in` elements and the padding around them,
 * and no window may begin in the padding at the end. */
static int check_windows(const ps_infer *f, int i, int64_t in, int64_t out, int64_t kernel, int64_t dilation,
                         int64_t stride, int64_t before, int64_t after)
{
    int64_t span = (kernel - 1) * dilation + 1;
    if (kernel < 1 || stride < 1 || dilation < 1)
        return ps_rule_fail(f, "kernel %lld, stride %lld and dilation %lld along the %s must all be 1 or more",
                            (long long)kernel, (long long)stride, (long long)dilation, along(i));
    if (before < 0 || after < 0 || before > kernel / 2 || after > kernel / 2)
        return ps_rule_fail(f, "padding %lld along the %s must be 0 to half of the kernel, %lld",
                            (long long)(before > after ? before : after), along(i), (long long)kernel);
    if (out < 1 || (out - 1) * stride >= in + before || (out - 1) * stride > in + before + after - span + stride - 1)
        return ps_rule_fail(f, "%lld windows of %lld elements along the %s do not fit %lld elements with a padding of "
                            "%lld and %lld", (long long)out, (long long)span, along(i), (long long)in,
                            (long long)before, (long long)after);
    return 0;
}

/* Checks that each window contains at least one element that is not padding. With a dilation, a window can skip over
 * all elements of the input. */
static int check_elements(const ps_infer *f, int i, int64_t in, const ps_attrs_max_pool *a)
{
    int64_t k = a->kernel[i], d = a->dilation[i], p = a->padding[i];
    for (int64_t w = 0; d > 1 && w < a->size[i]; w++) {
        int64_t first = w * a->stride[i] - p, skipped = first < 0 ? (-first + d - 1) / d : 0;
        if (skipped < k && first + skipped * d < in) continue;
        return ps_rule_fail(f, "window %lld along the %s has only padding: kernel %lld, dilation %lld, padding %lld, "
                            "%lld elements", (long long)w, along(i), (long long)k, (long long)d, (long long)p,
                            (long long)in);
    }
    return 0;
}

enum { WINDOWS, ADAPTIVE, NEAREST, LINEAR, REFLECT, REPLICATE, CIRCULAR, KINDS };

int infer_resample(ps_infer *f)
{
    const ps_attrs_resample *a = f->attrs;
    const ps_tensor *x = f->in[0];
    PS_TRY(check_image(f, x));
    if (a->kind < 0 || a->kind >= KINDS) return ps_rule_fail(f, "kind is %d; it must be 0 to %d", a->kind, KINDS - 1);
    f->out[0] = ps_meta_like(x);
    for (int i = 0; i < 2; i++) {
        int64_t size = a->size[i], in = a->transpose ? size : x->shape_[2 + i];
        int64_t out = a->transpose ? x->shape_[2 + i] : size, before = a->padding[i], after = a->padding[i + 2];
        if (in < 1 || out < 1)
            return ps_rule_fail(f, "cannot resample %lld elements to %lld along the %s; both sizes must be 1 or more",
                                (long long)in, (long long)out, along(i));
        if (a->kind == WINDOWS) PS_TRY(check_windows(f, i, in, out, a->kernel[i], 1, a->stride[i], before, after));
        if (a->kind >= REFLECT && (out != in + before + after || before < 0 || after < 0))
            return ps_rule_fail(f, "padding %lld and %lld of %lld elements along the %s do not match the output, or "
                                "are negative", (long long)before, (long long)after, (long long)in, along(i));
        int64_t most = a->kind == REFLECT ? in - 1 : in;
        if ((a->kind == REFLECT || a->kind == CIRCULAR) && (before > most || after > most))
            return ps_rule_fail(f, "padding %lld along the %s by %s is too large; it can be at most %lld for %lld "
                                "elements", (long long)(before > after ? before : after), along(i),
                                a->kind == REFLECT ? "reflection" : "the other end", (long long)most, (long long)in);
        f->out[0].shape[2 + i] = size;
    }
    return 0;
}

int grad_resample(ps_grad *g)
{
    ps_attrs_resample attrs = *(const ps_attrs_resample *)g->attrs;
    const ps_meta *x = ps_grad_in_meta(g, 0);
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    attrs.transpose = !attrs.transpose;
    for (int i = 0; i < 2; i++) attrs.size[i] = x->shape[2 + i];
    PS_TRY(ps_run(g, PS_OP_resample, &attrs, all, 1, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int infer_max_pool(ps_infer *f)
{
    const ps_attrs_max_pool *a = f->attrs;
    const ps_tensor *x = f->in[0];
    PS_TRY(check_image(f, x));
    f->out[0] = ps_meta_like(x);
    for (int i = 0; i < 2; i++) {
        int64_t in = x->shape_[2 + i];
        if (a->adaptive && (a->size[i] < 1 || in < 1))
            return ps_rule_fail(f, "cannot resample %lld elements to %lld along the %s; both sizes must be 1 or more",
                                (long long)in, (long long)a->size[i], along(i));
        if (!a->adaptive) {
            PS_TRY(check_windows(f, i, in, a->size[i], a->kernel[i], a->dilation[i], a->stride[i], a->padding[i],
                                 a->padding[i]));
            PS_TRY(check_elements(f, i, in, a));
        }
        f->out[0].shape[2 + i] = a->size[i];
    }
    f->out[1] = f->out[0];
    f->out[1].dtype = PS_I64;
    return 0;
}

int infer_max_pool_backward(ps_infer *f)
{
    const ps_attrs_max_pool_backward *a = f->attrs;
    const ps_tensor *dy = f->in[0], *index = f->in[1];
    PS_TRY(check_image(f, dy));
    PS_TRY(ps_rule_like(f, index, "index", PS_I64, dy->ndim, dy->shape_));
    f->out[0] = ps_meta_like(dy);
    for (int i = 0; i < 2; i++) {
        if (a->size[i] < 1)
            return ps_rule_fail(f, "the %s is %lld; it must be 1 or more", along(i), (long long)a->size[i]);
        f->out[0].shape[2 + i] = a->size[i];
    }
    return 0;
}

int grad_max_pool(ps_grad *g)
{
    const ps_meta *x = ps_grad_in_meta(g, 0);
    ps_attrs_max_pool_backward attrs;
    memcpy(&attrs, g->attrs, sizeof attrs);
    attrs.size[0] = x->shape[2], attrs.size[1] = x->shape[3];
    ps_tensor *index, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_out(g, 1, &index));
    PS_TRY(ps_run(g, PS_OP_max_pool_backward, &attrs, all, 2, g->dout[0], index));
    ps_grad_give(g, 0, all[0]);
    return 0;
}
