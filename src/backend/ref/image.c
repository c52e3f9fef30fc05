/* SPDX-License-Identifier: BSD-3-Clause
 * Images: convolution, padding, resampling, max pooling, and norms over channels. */
#include "ref.h"
#include "backend/image.h"

/* -- convolution --------------------------------------------------------------------------------------------------- */
/* An element of y is a sum of products of an element of x and an element of w. The function `each` is called once for
 * every product. The calls are in the order of the elements of y. The calls for the same element of y are in the order
 * of the elements of w. */
typedef struct products { const ps_view *x, *w, *y; double *sum; } products;
typedef void (*each_product)(const products *p, int64_t x, int64_t w, int64_t y);

static void walk(const ps_conv_shape *s, const products *p, each_product each)
{
    int64_t in_group = s->c / s->groups, out_group = s->o / s->groups;
    for (int64_t y = 0; y < s->n * s->o * s->out[0] * s->out[1]; y++) {
        int64_t j = y % s->out[1], i = y / s->out[1] % s->out[0], o = y / (s->out[0] * s->out[1]) % s->o;
        int64_t n = y / (s->o * s->out[0] * s->out[1]), first = o / out_group * in_group;
        for (int64_t c = 0; c < in_group; c++)
            for (int64_t u = 0; u < s->k[0]; u++)
                for (int64_t v = 0; v < s->k[1]; v++) {
                    int64_t a = i * s->stride[0] + u * s->dilation[0] - s->before[0];
                    int64_t b = j * s->stride[1] + v * s->dilation[1] - s->before[1];
                    if (a < 0 || b < 0 || a >= s->in[0] || b >= s->in[1]) continue;
                    each(p, ((n * s->c + first + c) * s->in[0] + a) * s->in[1] + b,
                         ((o * in_group + c) * s->k[0] + u) * s->k[1] + v, y);
                }
    }
}

static void to_y(const products *p, int64_t x, int64_t w, int64_t y)
{
    p->sum[y] += ref_load(p->x, x) * ref_load(p->w, w);
}
static void to_x(const products *p, int64_t x, int64_t w, int64_t y)
{
    p->sum[x] += ref_load(p->w, w) * ref_load(p->y, y);
}
static void to_w(const products *p, int64_t x, int64_t w, int64_t y)
{
    p->sum[w] += ref_load(p->x, x) * ref_load(p->y, y);
}

static void add_bias(const ps_view *b, const ps_view *y, double *sum)
{
    int64_t C = y->shape[1], each = y->numel > 0 ? y->numel / y->shape[0] / C : 0;
    for (int64_t i = 0; ps_has(b) && i < y->numel; i++) sum[i] += ref_load(b, i / each % C);
}

int ref_conv(ps_call *call)
{
    const ps_view *x = &call->in[0], *w = &call->in[1], *y = &call->out[0];
    ps_conv_shape s = ps_conv_shape_of(call->attrs, x, w, y);
    products p = { .x = x, .w = w };
    PS_TRY(ref_scratch(call, y->numel, &p.sum));
    walk(&s, &p, to_y);
    add_bias(&call->in[2], y, p.sum);
    ref_put(y, p.sum, false);
    return 0;
}

int ref_conv_transpose(ps_call *call)
{
    const ps_view *dy = &call->in[0], *w = &call->in[1], *dx = &call->out[0];
    ps_conv_shape s = ps_conv_shape_of(call->attrs, dx, w, dy);
    products p = { .w = w, .y = dy };
    PS_TRY(ref_scratch(call, dx->numel, &p.sum));
    walk(&s, &p, to_x);
    add_bias(&call->in[2], dx, p.sum);
    ref_put(dx, p.sum, false);
    return 0;
}

int ref_conv_weight(ps_call *call)
{
    const ps_attrs_conv_weight *a = call->attrs;
    const ps_view *x = &call->in[0], *dy = &call->in[1], *dw = &call->out[0], *db = &call->out[1];
    int64_t O = dy->shape[1], each = dy->numel > 0 ? dy->numel / dy->shape[0] / O : 0;
    if (ps_has(dw)) {
        ps_conv_shape s = ps_conv_shape_of(call->attrs, x, dw, dy);
        products p = { .x = x, .y = dy };
        PS_TRY(ref_scratch(call, dw->numel, &p.sum));
        walk(&s, &p, to_w);
        ref_put(dw, p.sum, a->accumulate);
    }
    if (!ps_has(db)) return 0;
    double *sum;
    PS_TRY(ref_scratch(call, O, &sum));
    for (int64_t i = 0; i < dy->numel; i++) sum[i / each % O] += ref_load(dy, i);
    ref_put(db, sum, a->add_b);
    return 0;
}

/* -- padding, resampling ------------------------------------------------------------------------------------------- */
int ref_pad(ps_call *call)
{
    const ps_attrs_pad *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    ps_view from = *x, to = *y;
    bool is_float = ps_dtype_is_float(y->dtype), any = true;
    for (int64_t i = 0; i < y->numel; i++) {
        if (is_float) ref_store(y, i, a->value);
        else ref_store_int(y, i, ref_to_int(a->value, INT64_MIN, INT64_MAX));
    }
    for (int d = 0; d < x->ndim; d++) {                          /* finds the range of elements that are in both
                                                                  * tensors */
        int64_t before = a->before[d], after = a->after[d], cut = before < 0 ? -before : 0;
        int64_t end = x->shape[d] + (after < 0 ? after : 0);
        from = ref_shift(&from, cut * x->stride[d]);
        to = ref_shift(&to, (before > 0 ? before : 0) * y->stride[d]);
        from.shape[d] = to.shape[d] = end - cut;
        any = any && end > cut;
    }
    for (int d = 0; any && d < x->ndim; d++) {
        if (d == 0) from.numel = to.numel = 1;
        from.numel = to.numel = from.numel * from.shape[d];
    }
    if (any) ref_copy(&to, &from);
    return 0;
}

int ref_resample(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    ps_taps t[2];
    for (int d = 0; d < 2; d++) {
        void *memory = call->scratch(call, ps_resample_nbytes(call, d));
        if (!memory) return PS_ENOMEM;
        t[d] = ps_resample_taps(call, d, memory);
    }
    int64_t in = x->shape[2] * x->shape[3], W = x->shape[3], out = y->shape[3];
    for (int64_t e = 0; e < y->numel; e++) {
        int64_t j = e % out, i = e / out % y->shape[2], plane = e / (out * y->shape[2]) * in;
        double sum = 0;
        for (int64_t u = t[0].start[i]; u < t[0].start[i + 1]; u++) {
            double row = 0;
            for (int64_t v = t[1].start[j]; v < t[1].start[j + 1]; v++)
                row += t[1].weight[v] * ref_load(x, plane + t[0].at[u] * W + t[1].at[v]);
            sum += t[0].weight[u] * row;
        }
        ref_store(y, e, sum);
    }
    return 0;
}

/* -- max pooling --------------------------------------------------------------------------------------------------- */
int ref_max_pool(ps_call *call)
{
    const ps_attrs_max_pool *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0], *index = &call->out[1];
    int64_t H = x->shape[2], W = x->shape[3], out = y->shape[3];
    for (int64_t e = 0; e < y->numel; e++) {
        int64_t plane = e / (out * y->shape[2]) * H * W, best = -1;
        ps_window r = ps_max_pool_window(a, 0, e / out % y->shape[2], H), c = ps_max_pool_window(a, 1, e % out, W);
        double most = 0;
        for (int64_t i = r.first; i < r.end; i += r.step)
            for (int64_t j = c.first; j < c.end; j += c.step) {
                double v = ref_load(x, plane + i * W + j);
                if (best < 0 || v > most || v != v) most = v, best = i * W + j;
            }
        ref_store(y, e, most);
        if (ps_has(index)) ref_store_int(index, e, best);
    }
    return 0;
}

int ref_max_pool_backward(ps_call *call)
{
    const ps_view *dy = &call->in[0], *index = &call->in[1], *dx = &call->out[0];
    int64_t in = dx->shape[2] * dx->shape[3], out = dy->shape[2] * dy->shape[3];
    double *sum;
    PS_TRY(ref_check_index(index, in));
    PS_TRY(ref_scratch(call, dx->numel, &sum));
    for (int64_t e = 0; e < dy->numel; e++) sum[e / out * in + ref_load_int(index, e)] += ref_load(dy, e);
    ref_put(dx, sum, false);
    return 0;
}

/* -- norms over channels ------------------------------------------------------------------------------------------- */
/* Returns the index of the mean and variance that element i of x [N, C, S] uses. */
static int64_t set_of(int64_t i, int64_t C, int64_t S, int64_t groups)
{
    int64_t c = i / S % C;
    return groups ? i / (C * S) * groups + c / (C / groups) : c;
}

int ref_channel_norm(ps_call *call)
{
    const ps_attrs_channel_norm *a = call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2], *y = &call->out[0];
    int64_t C = x->shape[1], samples = x->shape[0], sets = a->groups ? samples * a->groups : C;
    int64_t S = x->numel > 0 ? x->numel / samples / C : 0;
    double *mean, *var, count = sets > 0 ? (double)(x->numel / sets) : 0;
    PS_TRY(ref_scratch(call, sets, &mean));
    PS_TRY(ref_scratch(call, sets, &var));
    if (ps_has(&call->in[3])) {
        ref_read(&call->in[3], mean);
        ref_read(&call->in[4], var);
    } else {
        for (int64_t i = 0; i < x->numel; i++) mean[set_of(i, C, S, a->groups)] += ref_load(x, i) / count;
        for (int64_t i = 0; i < x->numel; i++) {
            double d = ref_load(x, i) - mean[set_of(i, C, S, a->groups)];
            var[set_of(i, C, S, a->groups)] += d * d / count;
        }
        ref_put(&call->out[1], mean, false);
        ref_put(&call->out[2], var, false);
    }
    for (int64_t i = 0; i < x->numel; i++) {
        int64_t c = i / S % C, k = set_of(i, C, S, a->groups);
        double v = (ref_load(x, i) - mean[k]) / sqrt(var[k] + a->eps);
        if (ps_has(w)) v *= ref_load(w, c);
        if (ps_has(b)) v += ref_load(b, c);
        ref_store(y, i, v);
    }
    return 0;
}

/* With n = (x - mean) * rstd and g = dy * w, computes
 *   dx = rstd * (g - mean(g) - n * mean(g * n)), dw = sum of dy * n, db = sum of dy.
 * mean(g) and mean(g * n) are over all elements that share a mean and variance. If the caller passes the means and
 * variances, dx is rstd * g. */
int ref_channel_norm_backward(ps_call *call)
{
    const ps_attrs_channel_norm_backward *a = call->attrs;
    const ps_view *dy = &call->in[0], *x = &call->in[1], *w = &call->in[2], *mean = &call->in[3], *var = &call->in[4];
    int64_t C = x->shape[1], samples = x->shape[0], sets = a->groups ? samples * a->groups : C;
    int64_t S = x->numel > 0 ? x->numel / samples / C : 0;
    double *g_mean, *gn_mean, *dw, *db, *dx, count = sets > 0 ? (double)(x->numel / sets) : 0;
    PS_TRY(ref_scratch(call, sets, &g_mean));
    PS_TRY(ref_scratch(call, sets, &gn_mean));
    PS_TRY(ref_scratch(call, C, &dw));
    PS_TRY(ref_scratch(call, C, &db));
    PS_TRY(ref_scratch(call, x->numel, &dx));
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < x->numel; i++) {
            int64_t c = i / S % C, k = set_of(i, C, S, a->groups);
            double rstd = 1 / sqrt(ref_load(var, k) + a->eps), n = (ref_load(x, i) - ref_load(mean, k)) * rstd;
            double d = ref_load(dy, i), g = ps_has(w) ? d * ref_load(w, c) : d;
            if (pass == 0) {
                dw[c] += d * n, db[c] += d;
                g_mean[k] += g / count, gn_mean[k] += g * n / count;
            } else {
                dx[i] = rstd * (a->given ? g : g - g_mean[k] - n * gn_mean[k]);
            }
        }
    ref_put(&call->out[0], dx, false);
    ref_put(&call->out[1], dw, false);
    ref_put(&call->out[2], db, false);
    return 0;
}
