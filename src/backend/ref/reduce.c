/* SPDX-License-Identifier: BSD-3-Clause
 * Reductions, running sums, and the largest and smallest elements. A sum adds the elements of the input in row-major
 * order, in long double, so that sums of fp64 are accurate to the last bit. */
#include <stdlib.h>
#include "ref.h"

/* Returns a view that has the shape of x. Element i of the view, in row-major order, is the element of the reduction's
 * result to which element i of x contributes. The reduction's result is row-major, without the reduced dimensions.
 * `dims` is a bit set of the reduced dimensions, or 0 for all dimensions. */
static ps_view target_of(const ps_view *x, uint32_t dims)
{
    ps_view t = *x;
    int64_t step = 1;
    for (int d = x->ndim - 1; d >= 0; d--) {
        bool reduced = dims == 0 || (dims >> d & 1);
        t.stride[d] = reduced ? 0 : step;
        if (!reduced) step *= x->shape[d];
    }
    return ref_flat(&t);
}

static int sum_doubles(ps_call *call, uint32_t dims, double **out)
{
    ps_view x = ref_flat(&call->in[0]), to = target_of(&call->in[0], dims);
    int64_t n = call->out[0].numel;
    PS_TRY(ref_scratch(call, n, out));
    long double *acc = call->scratch(call, (size_t)(n > 0 ? n : 1) * sizeof *acc);
    if (!acc) return PS_ENOMEM;
    for (int64_t i = 0; i < n; i++) acc[i] = 0;
    for (int64_t i = 0; i < x.numel; i++) acc[ref_at(&to, i)] += ref_load(&x, ref_at(&x, i));
    for (int64_t i = 0; i < n; i++) (*out)[i] = (double)acc[i];
    return 0;
}

int ref_sum(ps_call *call)
{
    const ps_attrs_sum *a = call->attrs;
    const ps_view *out = &call->out[0];
    if (ps_dtype_is_float(out->dtype)) {
        double *acc;
        PS_TRY(sum_doubles(call, a->dims, &acc));
        ref_put(out, acc, a->accumulate);
        return 0;
    }
    ps_view x = ref_flat(&call->in[0]), y = ref_flat(out), to = target_of(&call->in[0], a->dims);
    for (int64_t i = 0; !a->accumulate && i < y.numel; i++) ref_store_int(&y, ref_at(&y, i), 0);
    for (int64_t i = 0; i < x.numel; i++) {
        int64_t at = ref_at(&y, ref_at(&to, i));
        uint64_t so_far = (uint64_t)ref_load_int(&y, at);
        ref_store_int(&y, at, (int64_t)(so_far + (uint64_t)ref_load_int(&x, ref_at(&x, i))));
    }
    return 0;
}

int ref_mean(ps_call *call)
{
    const ps_attrs_mean *a = call->attrs;
    const ps_view *x = &call->in[0];
    double *acc, count = 1;
    PS_TRY(sum_doubles(call, a->dims, &acc));
    for (int d = 0; d < x->ndim; d++)
        if (a->dims == 0 || (a->dims >> d & 1)) count *= (double)x->shape[d];
    for (int64_t i = 0; i < call->out[0].numel; i++) acc[i] /= count;
    ref_put(&call->out[0], acc, false);
    return 0;
}

/* Returns true if element a of x must be chosen before element b. NaN is chosen before all numbers. If sign is 1,
 * larger values are chosen before smaller values. If sign is -1, smaller values are chosen before larger values. */
static bool beats(const ps_view *x, int64_t a, int64_t b, int sign)
{
    if (!ps_dtype_is_float(x->dtype)) {
        int64_t p = ref_load_int(x, a), q = ref_load_int(x, b);
        return sign > 0 ? p > q : p < q;
    }
    double p = ref_load(x, a), q = ref_load(x, b);
    if (isnan(p)) return !isnan(q);
    return sign > 0 ? p > q : p < q;
}

static int extreme(ps_call *call, uint32_t dims, int sign)
{
    ps_view x = ref_flat(&call->in[0]), y = ref_flat(&call->out[0]), to = target_of(&call->in[0], dims);
    if (x.numel == 0 && y.numel > 0)
        return ps_fail(PS_EINVAL, "the maximum or minimum of no elements does not exist; reduce a dimension that has "
                       "elements");
    /* for each element of y, the index in x of the best element so far, or -1 if there is none */
    int64_t *best = call->scratch(call, (size_t)(y.numel + 1) * sizeof *best);
    if (!best) return PS_ENOMEM;
    for (int64_t i = 0; i < y.numel; i++) best[i] = -1;
    for (int64_t i = 0; i < x.numel; i++) {
        int64_t t = ref_at(&to, i);
        if (best[t] < 0 || beats(&x, ref_at(&x, i), ref_at(&x, best[t]), sign)) best[t] = i;
    }
    for (int64_t i = 0; i < y.numel; i++) {
        int64_t at = ref_at(&y, i), from = ref_at(&x, best[i]);
        if (ps_dtype_is_float(x.dtype))
            ref_store(&y, at, ref_load(&x, from));
        else
            ref_store_int(&y, at, ref_load_int(&x, from));
    }
    return 0;
}

int ref_amax(ps_call *call) { return extreme(call, ((const ps_attrs_amax *)call->attrs)->dims, 1); }
int ref_amin(ps_call *call) { return extreme(call, ((const ps_attrs_amin *)call->attrs)->dims, -1); }

static int arg_extreme(ps_call *call, int dim, int sign)
{
    const ps_view *x = &call->in[0];
    ps_view y = ref_flat(&call->out[0]);
    dim = ref_dim(x, dim);
    ps_view lanes = x->ndim > 0 ? ref_without_dim(x, dim) : *x;
    int64_t n = x->ndim > 0 ? x->shape[dim] : 1, stride = x->ndim > 0 ? x->stride[dim] : 0;
    if (n == 0 && y.numel > 0)
        return ps_fail(PS_EINVAL, "the maximum or minimum of no elements does not exist; reduce a dimension that has "
                       "elements");
    for (int64_t r = 0; r < y.numel; r++) {
        int64_t first = ref_at(&lanes, r), best = 0;
        for (int64_t j = 1; j < n; j++)
            if (beats(x, first + j * stride, first + best * stride, sign)) best = j;
        ref_store_int(&y, ref_at(&y, r), best);
    }
    return 0;
}

int ref_argmax(ps_call *call) { return arg_extreme(call, ((const ps_attrs_argmax *)call->attrs)->dim, 1); }
int ref_argmin(ps_call *call) { return arg_extreme(call, ((const ps_attrs_argmin *)call->attrs)->dim, -1); }

/* Returns a product of floats, rounded to fp64 if `wide` is set, otherwise to fp32. A product of two fp32 numbers is
 * exact in double. */
static double times(double a, double b, bool wide) { return wide ? a * b : (double)(float)(a * b); }

int ref_prod(ps_call *call)
{
    const ps_attrs_prod *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    int dim = ref_dim(x, a->dim);
    int64_t n = x->ndim > 0 ? x->shape[dim] : 1, step = x->ndim > 0 ? x->stride[dim] : 1;
    bool is_float = ps_dtype_is_float(x->dtype), wide = x->dtype == PS_F64;
    struct { double f; uint64_t i; } *lane = call->scratch(call, (size_t)(n + 1) * sizeof *lane), rest;
    if (!lane) return PS_ENOMEM;
    ps_view from = ref_without_dim(x, dim);
    for (int64_t r = 0; r < y->numel; r++) {
        rest.f = 1, rest.i = 1;
        lane[0] = rest;
        for (int64_t k = 0; k < n; k++) {
            int64_t at = ref_at(&from, r) + k * step;
            lane[k].f = is_float ? ref_load(x, at) : 0;
            lane[k].i = is_float ? 0 : (uint64_t)ref_load_int(x, at);
        }
        for (int64_t m = n; m > 1; m /= 2) {
            if (m % 2) rest.f = times(rest.f, lane[m - 1].f, wide), rest.i *= lane[m - 1].i;
            for (int64_t k = 0; k < m / 2; k++) {
                lane[k].f = times(lane[k].f, lane[k + m / 2].f, wide);
                lane[k].i *= lane[k + m / 2].i;
            }
        }
        if (is_float) ref_store(y, r, times(lane[0].f, rest.f, wide));
        else ref_store_int(y, r, (int64_t)(lane[0].i * rest.i));
    }
    return 0;
}

int ref_cumsum(ps_call *call)
{
    const ps_attrs_cumsum *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (x->ndim == 0) {
        ref_copy(y, x);
        return 0;
    }
    int dim = ref_dim(x, a->dim);
    int64_t n = x->shape[dim];
    ps_view from = ref_without_dim(x, dim), to = ref_without_dim(y, dim);
    for (int64_t r = 0; r < from.numel; r++) {
        int64_t x0 = ref_at(&from, r), y0 = ref_at(&to, r);
        long double sum = 0;
        uint64_t isum = 0;
        for (int64_t k = 0; k < n; k++) {
            int64_t j = a->reverse ? n - 1 - k : k;
            if (ps_dtype_is_float(x->dtype)) {
                sum += ref_load(x, x0 + j * x->stride[dim]);
                ref_store(y, y0 + j * y->stride[dim], (double)sum);
            } else {
                isum += (uint64_t)ref_load_int(x, x0 + j * x->stride[dim]);
                ref_store_int(y, y0 + j * y->stride[dim], (int64_t)isum);
            }
        }
    }
    return 0;
}

/* The shape of a contiguous tensor as [outer, n, inner], where n is the size of dimension dim. */
struct lanes { int64_t outer, n, inner; };
static struct lanes lanes_of(const ps_view *x, int dim)
{
    struct lanes s = { 1, 1, 1 };
    dim = ref_dim(x, dim);
    for (int d = 0; d < x->ndim; d++) *(d < dim ? &s.outer : d == dim ? &s.n : &s.inner) *= x->shape[d];
    return s;
}

int ref_cumprod(ps_call *call)
{
    const ps_attrs_cumprod *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    struct lanes s = lanes_of(x, a->dim);
    for (int64_t r = 0; r < s.outer * s.inner; r++) {
        int64_t first = r / s.inner * s.n * s.inner + r % s.inner;
        long double product = 1;
        uint64_t whole = 1;
        for (int64_t k = 0; k < s.n; k++) {
            int64_t at = first + k * s.inner;
            if (ps_dtype_is_float(x->dtype)) ref_store(y, at, (double)(product *= ref_load(x, at)));
            else ref_store_int(y, at, (int64_t)(whole *= (uint64_t)ref_load_int(x, at)));
        }
    }
    return 0;
}

int ref_cumprod_backward(ps_call *call)
{
    const ps_attrs_cumprod_backward *a = call->attrs;
    const ps_view *x = &call->in[0], *dy = &call->in[1], *dx = &call->out[0];
    struct lanes s = lanes_of(x, a->dim);
    long double *later = call->scratch(call, (size_t)(s.n + 1) * sizeof *later);
    if (!later) return PS_ENOMEM;
    for (int64_t r = 0; r < s.outer * s.inner; r++) {
        int64_t first = r / s.inner * s.n * s.inner + r % s.inner;
        for (int64_t k = s.n - 1; k >= 0; k--) {
            int64_t at = first + k * s.inner;
            later[k] = ref_load(dy, at) + (k < s.n - 1 ? ref_load(x, at + s.inner) * later[k + 1] : 0);
        }
        long double before = 1;
        for (int64_t k = 0; k < s.n; k++) {
            int64_t at = first + k * s.inner;
            double factor = ref_load(x, at);
            ref_store(dx, at, (double)(before * later[k]));
            before *= factor;
        }
    }
    return 0;
}

/* An element of a lane and its position, for sorting. If the element is a float, f contains it and i is 0. If it is an
 * integer, i contains it and f is 0. */
struct ranked { double f; int64_t i, place; };

/* Orders NaN first, and numbers by descending value. Equal values are ordered by position. */
static int by_rank(const void *pa, const void *pb)
{
    const struct ranked *a = pa, *b = pb;
    if (isnan(a->f) != isnan(b->f)) return isnan(a->f) ? -1 : 1;
    if (a->f > b->f) return -1;
    if (a->f < b->f) return 1;
    if (a->i != b->i) return a->i > b->i ? -1 : 1;
    return a->place < b->place ? -1 : 1;
}

int ref_topk(ps_call *call)
{
    const ps_attrs_topk *a = call->attrs;
    const ps_view *x = &call->in[0];
    int64_t n = ref_last(x), k = a->k;
    if (k < 0 || k > n)
        return ps_fail(PS_EINVAL, "k is %" PRId64 "; the last dimension has %" PRId64 " elements", k, n);
    struct ranked *lane = call->scratch(call, (size_t)(n + 1) * sizeof *lane);
    if (!lane) return PS_ENOMEM;
    ps_view from = ref_flat(x), values = ref_flat(&call->out[0]), indices = ref_flat(&call->out[1]);
    bool is_float = ps_dtype_is_float(x->dtype);
    for (int64_t r = 0; n > 0 && r < x->numel / n; r++) {
        for (int64_t j = 0; j < n; j++) {
            int64_t at = ref_at(&from, r * n + j);
            lane[j].f = is_float ? ref_load(x, at) : 0;
            lane[j].i = is_float ? 0 : ref_load_int(x, at);
            lane[j].place = j;
        }
        qsort(lane, (size_t)n, sizeof *lane, by_rank);
        for (int64_t j = 0; j < k; j++) {
            int64_t at = ref_at(&values, r * k + j);
            if (is_float)
                ref_store(&values, at, lane[j].f);
            else
                ref_store_int(&values, at, lane[j].i);
            ref_store_int(&indices, ref_at(&indices, r * k + j), lane[j].place);
        }
    }
    return 0;
}

int ref_var(ps_call *call)
{
    const ps_attrs_var *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    int64_t n = ref_last(x);
    for (int64_t r = 0; r < y->numel; r++) {
        long double sum = 0, squares = 0;
        for (int64_t i = r * n; i < (r + 1) * n; i++) sum += ref_load(x, i);
        double mean = (double)(sum / n);
        for (int64_t i = r * n; i < (r + 1) * n; i++) {
            double d = ref_load(x, i) - mean;
            squares += (long double)d * d;
        }
        double var = (double)squares / (double)(!a->unbiased ? n : n > 1 ? n - 1 : 0);
        ref_store(y, r, a->root ? sqrt(var) : var);
    }
    return 0;
}

static int by_value(const void *p, const void *q)
{
    double a = *(const double *)p, b = *(const double *)q;
    return a < b ? -1 : a > b;
}

int ref_median(ps_call *call)
{
    const ps_view *x = &call->in[0];
    double *all;
    PS_TRY(ref_scratch(call, x->numel, &all));
    for (int64_t i = 0; i < x->numel; i++) {
        all[i] = ref_load(x, i);
        if (all[i] != all[i]) {
            ref_store(&call->out[0], 0, all[i]);
            return 0;
        }
    }
    qsort(all, (size_t)x->numel, sizeof *all, by_value);
    ref_store(&call->out[0], 0, all[(x->numel - 1) / 2]);
    return 0;
}

int ref_cdist(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->in[1], *d = &call->out[0];
    int64_t D = ref_last(x), M = ref_last(d), N = x->shape[x->ndim - 2];
    for (int64_t i = 0; i < d->numel; i++) {
        int64_t a = i / M * D, b = (i / (M * N) * M + i % M) * D;
        long double sum = 0;
        for (int64_t k = 0; k < D; k++) {
            long double away = (long double)ref_load(x, a + k) - ref_load(y, b + k);
            sum += away * away;
        }
        ref_store(d, i, sqrt((double)sum));
    }
    return 0;
}

int ref_cdist_backward(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->in[1], *d = &call->in[2], *dd = &call->in[3];
    int64_t D = ref_last(x), M = ref_last(d), N = x->shape[x->ndim - 2];
    double *dx, *dy;
    PS_TRY(ref_scratch(call, x->numel, &dx));
    PS_TRY(ref_scratch(call, y->numel, &dy));
    for (int64_t i = 0; i < d->numel; i++) {
        int64_t a = i / M * D, b = (i / (M * N) * M + i % M) * D;
        double length = ref_load(d, i), slope = length == 0 ? 0 : ref_load(dd, i) / length;
        for (int64_t k = 0; k < D; k++) {
            double term = slope * (ref_load(x, a + k) - ref_load(y, b + k));
            dx[a + k] += term, dy[b + k] -= term;
        }
    }
    for (int64_t i = 0; ps_has(&call->out[0]) && i < x->numel; i++) ref_store(&call->out[0], i, dx[i]);
    for (int64_t i = 0; ps_has(&call->out[1]) && i < y->numel; i++) ref_store(&call->out[1], i, dy[i]);
    return 0;
}

int ref_sq_norms(ps_call *call)
{
    for (int n = 0; n < call->n_in; n++) {
        long double sum = 0;
        for (int64_t i = 0; i < call->in[n].numel; i++) {
            double x = ref_load(&call->in[n], i);
            sum += (long double)x * x;
        }
        ref_store(&call->out[0], n, (double)sum);
    }
    return 0;
}
