/* SPDX-License-Identifier: BSD-3-Clause
 * Functions for images that the C and C++ kernels of several backends share. They compute the sizes of a convolution,
 * the windows of pooling, and the taps of `resample`. */
#ifndef PS_BACKEND_IMAGE_H
#define PS_BACKEND_IMAGE_H
#include <math.h>
#include <string.h>
#include "backend/backend.h"
#include "base/half.h"

/* -- convolution --------------------------------------------------------------------------------------------------- */
/* The sizes and attributes of a convolution: x is [n, c, in], w is [o, c / groups, k], and y is [n, o, out]. In the
 * arrays, element 0 is the value for H, and element 1 is the value for W. A tensor [N, C, L] has H = 1. */
typedef struct ps_conv_shape {
    int64_t n, c, o, groups, in[2], out[2], k[2], stride[2], dilation[2], before[2];
} ps_conv_shape;

/* Accepts the attributes of any of the three convolution ops, because all of them begin with the fields of conv. w is
 * [O, C / groups, ...]. */
static inline ps_conv_shape ps_conv_shape_of(const ps_attrs_conv *a, const ps_view *x, const ps_view *w,
                                             const ps_view *y)
{
    ps_conv_shape s;
    memset(&s, 0, sizeof s);
    s.n = x->shape[0], s.c = x->shape[1], s.o = y->shape[1], s.groups = a->groups;
    for (int i = 0; i < 2; i++) {
        int d = x->ndim - 2 + i;
        bool has = x->ndim == 4 || i == 1;
        s.in[i] = has ? x->shape[d] : 1, s.out[i] = has ? y->shape[d] : 1, s.k[i] = has ? w->shape[d] : 1;
        s.stride[i] = a->stride[i], s.dilation[i] = a->dilation[i], s.before[i] = a->padding[i];
    }
    return s;
}

/* -- windows of pooling -------------------------------------------------------------------------------------------- */
/* A window consists of the elements first, first + step, first + 2 * step and so on, below `end`. */
typedef struct ps_window { int64_t first, end, step; } ps_window;

/* Returns window i of `out` windows of nearly equal size, which together cover all `in` elements. */
PS_BOTH ps_window ps_window_adaptive(int64_t i, int64_t in, int64_t out)
{
    ps_window w = { i * in / out, ((i + 1) * in + out - 1) / out, 1 };
    return w;
}

PS_BOTH ps_window ps_window_at(int64_t i, int64_t in, int64_t kernel, int64_t stride, int64_t dilation,
                                     int64_t before)
{
    ps_window w = { i * stride - before, 0, dilation };
    w.end = w.first + (kernel - 1) * dilation + 1;
    if (w.first < 0) w.first += (-w.first + dilation - 1) / dilation * dilation;
    if (w.end > in) w.end = in;
    return w;
}

PS_BOTH ps_window ps_max_pool_window(const ps_attrs_max_pool *a, int d, int64_t i, int64_t in)
{
    if (a->adaptive) return ps_window_adaptive(i, in, a->size[d]);
    return ps_window_at(i, in, a->kernel[d], a->stride[d], a->dilation[d], a->padding[d]);
}

/* -- taps of resample ---------------------------------------------------------------------------------------------- */
enum { PS_TAPS_WINDOWS, PS_TAPS_ADAPTIVE, PS_TAPS_NEAREST, PS_TAPS_LINEAR, PS_TAPS_REFLECT, PS_TAPS_REPLICATE,
       PS_TAPS_CIRCULAR };

/* A linear map along one dimension. Result i is the sum of weight[t] * x[at[t]] over all taps t from start[i] to
 * start[i + 1] - 1. */
typedef struct ps_taps { int64_t n, *start, *at; double *weight; } ps_taps;

/* Returns the maximum number of taps of a map from `in` to `out` elements. */
static inline int64_t ps_taps_most(const ps_attrs_resample *a, int d, int64_t in, int64_t out)
{
    if (a->kind == PS_TAPS_WINDOWS) return out * a->kernel[d];
    if (a->kind == PS_TAPS_ADAPTIVE) return in + 2 * out;
    return a->kind == PS_TAPS_LINEAR ? 2 * out : out;
}

/* Returns the number of bytes that ps_taps_make() needs in `memory`, with or without transpose. */
static inline size_t ps_taps_nbytes(const ps_attrs_resample *a, int d, int64_t in, int64_t out)
{
    return (size_t)(in + out + 4 + 4 * ps_taps_most(a, d, in, out)) * 8;
}

/* The taps of one result: the elements from `first` to end - 1. Element end - 1 has the weight `last`. All other
 * elements have the weight `weight`. */
typedef struct ps_tap { int64_t first, end; double weight, last; } ps_tap;

PS_BOTH ps_tap ps_tap_window(const ps_attrs_resample *a, int d, int64_t in, int64_t out, int64_t i)
{
    ps_window w = a->kind == PS_TAPS_ADAPTIVE ? ps_window_adaptive(i, in, out)
                                              : ps_window_at(i, in, a->kernel[d], a->stride[d], 1, a->padding[d]);
    double count = (double)(w.end - w.first);
    if (a->kind == PS_TAPS_WINDOWS && a->divisor != 0) {
        count = d == 0 ? a->divisor : 1;
    } else if (a->kind == PS_TAPS_WINDOWS && a->flag) {
        int64_t first = i * a->stride[d] - a->padding[d], end = first + a->kernel[d], most = in + a->padding[d + 2];
        count = (double)((end < most ? end : most) - first);
    }
    ps_tap t = { w.first, w.end, 1 / count, 1 / count };
    return t;
}

PS_BOTH ps_tap ps_tap_linear(const ps_attrs_resample *a, int64_t in, int64_t out, int64_t i, double scale)
{
    double at = a->flag ? (out > 1 ? (double)(in - 1) / (double)(out - 1) : 0) * (double)i
                        : ((double)i + 0.5) * scale - 0.5;
    if (at < 0) at = 0;
    int64_t k = (int64_t)at < in - 1 ? (int64_t)at : in - 1;
    double rest = k < in - 1 ? at - (double)k : 0;
    ps_tap t = { k, k + (rest > 0 ? 2 : 1), 1 - rest, rest > 0 ? rest : 1 };
    return t;
}

/* Returns the taps of result i of a map from `in` to `out` elements along dimension d (0: H, 1: W). */
PS_BOTH ps_tap ps_tap_of(const ps_attrs_resample *a, int d, int64_t in, int64_t out, int64_t i)
{
    double scale = a->scale[d] > 0 ? a->scale[d] : (double)in / (double)out;
    int64_t j = i - a->padding[d];
    if (a->kind <= PS_TAPS_ADAPTIVE) return ps_tap_window(a, d, in, out, i);
    if (a->kind == PS_TAPS_LINEAR) return ps_tap_linear(a, in, out, i, scale);
    if (a->kind == PS_TAPS_NEAREST) {                           /* computed in fp32, as in PyTorch */
        j = (int64_t)floorf(((float)i + (a->flag ? 0.5f : 0.0f)) * (float)scale);
        if (j > in - 1) j = in - 1;
        if (!a->flag && (out == in || out == 2 * in)) j = i / (out / in);      /* does not depend on the scale, as in
                                                                                * PyTorch */
    } else if (a->kind == PS_TAPS_REFLECT) {
        j = j < 0 ? -j : j >= in ? 2 * (in - 1) - j : j;
    } else if (a->kind == PS_TAPS_REPLICATE) {
        j = j < 0 ? 0 : j >= in ? in - 1 : j;
    } else {
        j = j < 0 ? j + in : j >= in ? j - in : j;
    }
    ps_tap t = { j, j + 1, 1, 1 };
    return t;
}

/* Makes the map from `in` to `out` elements along dimension d (0: H, 1: W). If a->transpose is set, makes the transpose
 * of this map instead. Even then, `in` and `out` are the sizes of the map before it is transposed. The result is stored
 * in `memory`, which must have a size of ps_taps_nbytes() bytes. */
static inline ps_taps ps_taps_make(const ps_attrs_resample *a, int d, int64_t in, int64_t out, void *memory)
{
    int64_t most = ps_taps_most(a, d, in, out), n = 0;
    ps_taps t, back;
    t.n = out, t.start = (int64_t *)memory, t.at = t.start + out + 1, t.weight = (double *)(t.at + most);
    for (int64_t i = 0; i < out; i++) {
        ps_tap one = ps_tap_of(a, d, in, out, i);
        t.start[i] = n;
        for (int64_t k = one.first; k < one.end; k++)
            t.at[n] = k, t.weight[n++] = k == one.end - 1 ? one.last : one.weight;
    }
    t.start[out] = n;
    if (!a->transpose) return t;
    back.n = in, back.start = (int64_t *)(t.weight + most), back.at = back.start + in + 2;
    back.weight = (double *)(back.at + most);
    memset(back.start, 0, (size_t)(in + 2) * sizeof *back.start);
    for (int64_t k = 0; k < n; k++) back.start[t.at[k] + 2]++;
    for (int64_t i = 0; i < in; i++) back.start[i + 2] += back.start[i + 1];
    for (int64_t i = 0; i < out; i++)
        for (int64_t k = t.start[i]; k < t.start[i + 1]; k++) {
            int64_t to = back.start[t.at[k] + 1]++;
            back.at[to] = i, back.weight[to] = t.weight[k];
        }
    return back;
}

/* Returns the size in bytes of the memory for the map along dimension d of a call. */
static inline size_t ps_resample_nbytes(const ps_call *call, int d)
{
    const ps_attrs_resample *a = (const ps_attrs_resample *)call->attrs;
    const ps_view *from = a->transpose ? &call->out[0] : &call->in[0];
    const ps_view *to = a->transpose ? &call->in[0] : &call->out[0];
    return ps_taps_nbytes(a, d, from->shape[2 + d], to->shape[2 + d]);
}
static inline ps_taps ps_resample_taps(const ps_call *call, int d, void *memory)
{
    const ps_attrs_resample *a = (const ps_attrs_resample *)call->attrs;
    const ps_view *from = a->transpose ? &call->out[0] : &call->in[0];
    const ps_view *to = a->transpose ? &call->in[0] : &call->out[0];
    return ps_taps_make(a, d, from->shape[2 + d], to->shape[2 + d], memory);
}
#endif
