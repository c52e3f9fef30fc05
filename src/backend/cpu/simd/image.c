/* SPDX-License-Identifier: BSD-3-Clause
 * Padding, resampling and max pooling of contiguous images. This file is compiled once per instruction set. A thread
 * processes whole planes [H, W]. For padding, a thread processes whole rows. Hence results do not depend on the number
 * of threads. bf16 and fp16 values are converted to fp32 row by row. Each sum is rounded once. */
#define PS_ANY_LANES
#include "backend/cpu/simd/operand.h"
#include "backend/cpu/gemm.h"
#include "backend/image.h"
#include <omp.h>

static bool usable(const ps_view *v) { return is_lane_type(v->dtype) && view_flat(v); }

static int threads_for(int64_t numel, int64_t planes)
{
    int64_t n = numel >= PS_PAR_MIN ? omp_get_max_threads() : 1;
    return (int)(n < planes ? n : planes > 0 ? planes : 1);
}

/* -- padding ------------------------------------------------------------------------------------------------------- */
static void pad_row(const ps_attrs_pad *a, const ps_view *x, const ps_view *y, int64_t r, const char *fill)
{
    int last = y->ndim - 1;
    int64_t n = y->shape[last], from = 0, scale = 1, size = ps_dtype_bytes(y->dtype);
    char *to = (char *)y->data + r * n * size;
    bool inside = x->shape[last] > 0;
    for (int d = last - 1; d >= 0; d--) {
        int64_t i = r % y->shape[d] - a->before[d];
        inside = inside && i >= 0 && i < x->shape[d];
        from += i * scale, scale *= x->shape[d], r /= y->shape[d];
    }
    int64_t before = a->before[last], first = before > 0 ? before : 0, end = before + x->shape[last];
    if (end > n) end = n;
    if (!inside || end < first) first = end = 0;
    for (int64_t i = 0; i < first; i++) memcpy(to + i * size, fill, (size_t)size);
    const char *row = (const char *)x->data + (from * x->shape[last] + first - before) * size;
    if (end > first) memcpy(to + first * size, row, (size_t)((end - first) * size));
    for (int64_t i = end; i < n; i++) memcpy(to + i * size, fill, (size_t)size);
}

static int pad(ps_call *call)
{
    const ps_attrs_pad *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    char fill[8] = { 0 };
    if (!usable(x) || !usable(y) || x->dtype != y->dtype || y->ndim < 1) return PS_EUNSUP;
    ps_put_one(fill, 0, y->dtype, (float)a->value);
    int64_t n = y->shape[y->ndim - 1], rows = n > 0 ? y->numel / n : 0;
#pragma omp parallel for schedule(static) if (y->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < rows; r++) pad_row(a, x, y, r, fill);
    return 0;
}

/* -- resampling ---------------------------------------------------------------------------------------------------- */
struct maps { ps_taps h, w; int64_t in[2], out[2]; const float *weight; };   /* weight: the weights of the taps of w */

/* Resamples a row of fp32 values along W. The result `out` has the width of y. */
static void map_row(const struct maps *m, const float *row, float *out)
{
    const ps_taps *t = &m->w;
    for (int64_t j = 0; j < m->out[1]; j++) {
        float s = 0;
        for (int64_t k = t->start[j]; k < t->start[j + 1]; k++) s += m->weight[k] * row[t->at[k]];
        out[j] = s;
    }
}

/* Resamples a plane. First resamples all rows along W. Then resamples the result along H. `memory` has space for a
 * plane [H of x, W of y], a row of y and a row of x. */
static void map_plane(const struct maps *m, const void *x, void *y, int dtype, float *memory)
{
    int64_t W = m->in[1], out = m->out[1];
    float *rows = memory, *sum = rows + m->in[0] * out, *wide = sum + out;
    for (int64_t i = 0; i < m->in[0]; i++) {
        const float *row = (const float *)x + i * W;
        if (dtype != PS_F32) {
            ps_cpu_row_load(wide, ps_at(x, i * W, dtype), W, dtype);
            row = wide;
        }
        map_row(m, row, rows + i * out);
    }
    for (int64_t i = 0; i < m->out[0]; i++) {
        float *to = dtype == PS_F32 ? (float *)y + i * out : sum;
        int64_t first = m->h.start[i], end = m->h.start[i + 1];
        if (first == end) memset(to, 0, (size_t)out * sizeof *to);
        for (int64_t k = first; k < end; k++) {
            const float *row = rows + m->h.at[k] * out;
            float w = (float)m->h.weight[k];
            if (k == first) for (int64_t j = 0; j < out; j++) to[j] = w * row[j];
            else for (int64_t j = 0; j < out; j++) to[j] += w * row[j];
        }
        if (dtype != PS_F32) ps_cpu_row_store(ps_at(y, i * out, dtype), sum, out, dtype);
    }
}

static int resample(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (!usable(x) || !usable(y) || x->dtype != y->dtype) return PS_EUNSUP;
    struct maps m = { .in = { x->shape[2], x->shape[3] }, .out = { y->shape[2], y->shape[3] } };
    int64_t planes = x->shape[0] * x->shape[1], in = m.in[0] * m.in[1], out = m.out[0] * m.out[1];
    int threads = threads_for(x->numel + y->numel, planes);
    int64_t each = (m.in[0] * m.out[1] + m.out[1] + m.in[1] + 15) / 16 * 16;
    void *of_h = call->scratch(call, ps_resample_nbytes(call, 0));
    void *of_w = call->scratch(call, ps_resample_nbytes(call, 1));
    float *memory = call->scratch(call, (size_t)(threads * each) * sizeof *memory);
    float *weight = call->scratch(call, ps_resample_nbytes(call, 1));        /* larger than necessary, because only one
                                                                              * weight per tap is stored */
    if (!of_h || !of_w || !memory || !weight) return PS_ENOMEM;
    if (call->dry) return 0;
    m.h = ps_resample_taps(call, 0, of_h), m.w = ps_resample_taps(call, 1, of_w), m.weight = weight;
    for (int64_t k = 0; k < m.w.start[m.w.n]; k++) weight[k] = (float)m.w.weight[k];
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < planes; p++)
        map_plane(&m, ps_at(x->data, p * in, x->dtype), ps_at(y->data, p * out, x->dtype), x->dtype,
                  memory + (threads > 1 ? omp_get_thread_num() : 0) * each);
    return 0;
}

/* -- max pooling --------------------------------------------------------------------------------------------------- */
enum { POOLED = 64 };                        /* number of windows that are computed together */

/* Computes n windows of a row of y in fp32, starting at window j. All columns of these windows must be columns of x.
 * `rows` is the range of rows of x in the windows. */
static void pool_inside(const ps_attrs_max_pool *a, const float *in, int64_t W, ps_window rows, int64_t j, int n,
                        float *y, int64_t *index)
{
    float most[POOLED];
    int64_t best[POOLED], step = a->stride[1], first = j * step - a->padding[1];
    for (int k = 0; k < n; k++) best[k] = rows.first * W + first + k * step, most[k] = in[best[k]];
    for (int64_t u = rows.first; u < rows.end; u += rows.step)
        for (int v = 0; v < a->kernel[1]; v++) {
            int64_t at = u * W + first + v * (int64_t)a->dilation[1];
#pragma omp simd
            for (int k = 0; k < n; k++) {
                float e = in[at + k * step];
                bool more = (e > most[k]) | (e != e);
                most[k] = more ? e : most[k], best[k] = more ? at + k * step : best[k];
            }
        }
    memcpy(y, most, (size_t)n * sizeof *y);
    if (index) memcpy(index, best, (size_t)n * sizeof *index);
}

/* Computes those windows of a row of y whose columns are all columns of x. Stores the index of the first such window in
 * *first, and the index of the last such window plus 1 in *end. */
static void pool_row(const ps_attrs_max_pool *a, const float *in, int64_t W, ps_window rows, int64_t out, float *y,
                     int64_t *index, int64_t *first, int64_t *end)
{
    int64_t step = a->stride[1], reach = (int64_t)(a->kernel[1] - 1) * a->dilation[1];
    *first = (a->padding[1] + step - 1) / step, *end = (W - 1 - reach + a->padding[1]) / step + 1;
    if (W - 1 - reach + a->padding[1] < 0 || *end < *first) *end = *first = 0;
    if (*end > out) *end = out;
    for (int64_t j = *first; j < *end; j += POOLED)
        pool_inside(a, in, W, rows, j, *end - j < POOLED ? (int)(*end - j) : POOLED, y + j, index ? index + j : NULL);
}

SIMD void pool_plane(const ps_attrs_max_pool *a, const ps_view *x, const ps_view *y, int64_t *index, int64_t p,
                     int dtype)
{
    int64_t H = x->shape[2], W = x->shape[3], out = y->shape[3], at = p * y->shape[2] * out;
    const void *in = ps_at(x->data, p * H * W, dtype);
    for (int64_t i = 0; i < y->shape[2]; i++) {
        ps_window r = ps_max_pool_window(a, 0, i, H);
        int64_t inside = 0, beyond = 0;
        if (dtype == PS_F32 && !a->adaptive)
            pool_row(a, in, W, r, out, (float *)y->data + at, index ? index + at : NULL, &inside, &beyond);
        for (int64_t j = 0; j < out; j++, at++) {
            if (j == inside && j < beyond) at += beyond - j, j = beyond;
            if (j == out) break;
            ps_window c = ps_max_pool_window(a, 1, j, W);
            int64_t best = r.first * W + c.first;
            float most = ps_get_one(in, best, dtype);
            for (int64_t u = r.first; u < r.end; u += r.step)
                for (int64_t v = c.first; v < c.end; v += c.step) {
                    float e = ps_get_one(in, u * W + v, dtype);
                    bool more = (e > most) | (e != e);       /* | instead of ||, because a branch would be
                                                              * mispredicted */
                    most = more ? e : most, best = more ? u * W + v : best;
                }
            ps_put_one(y->data, at, dtype, most);
            if (index) index[at] = best;
        }
    }
}

static int max_pool(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->out[0], *index = &call->out[1];
    if (!usable(x) || !usable(y) || x->dtype != y->dtype || (ps_has(index) && !view_flat(index))) return PS_EUNSUP;
    int64_t *to = ps_has(index) ? index->data : NULL, planes = x->shape[0] * x->shape[1];
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t p = 0; p < planes; p++) PS_BY_VEC(x->dtype, pool_plane, call->attrs, x, y, to, p);
    return 0;
}

static void pool_back(const ps_view *dy, const ps_view *dx, const int64_t *index, int64_t p, float *wide)
{
    int64_t in = dx->shape[2] * dx->shape[3], out = dy->shape[2] * dy->shape[3];
    float *sum = dx->dtype == PS_F32 ? (float *)dx->data + p * in : wide;
    memset(sum, 0, (size_t)in * sizeof *sum);
    for (int64_t i = p * out; i < (p + 1) * out; i++) sum[index[i]] += ps_get_one(dy->data, i, dy->dtype);
    if (dx->dtype != PS_F32) ps_cpu_row_store(ps_at(dx->data, p * in, dx->dtype), sum, in, dx->dtype);
}

static int max_pool_backward(ps_call *call)
{
    const ps_view *dy = &call->in[0], *index = &call->in[1], *dx = &call->out[0];
    int64_t in = dx->shape[2] * dx->shape[3], planes = dy->shape[0] * dy->shape[1];
    if (!usable(dy) || !usable(dx) || dy->dtype != dx->dtype || !view_flat(index)) return PS_EUNSUP;
    int threads = threads_for(dx->numel, planes);
    float *wide = call->scratch(call, dx->dtype == PS_F32 ? 1 : (size_t)(threads * in) * sizeof *wide);
    if (!wide) return PS_ENOMEM;
    if (call->dry) return 0;
    PS_TRY(ps_check_indices(index, in));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < planes; p++)
        pool_back(dy, dx, index->data, p, wide + (threads > 1 ? omp_get_thread_num() : 0) * in);
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_image)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_image)(ps_kernel *k)
{
    k[PS_OP_pad] = pad;
    k[PS_OP_resample] = resample;
    k[PS_OP_max_pool] = max_pool;
    k[PS_OP_max_pool_backward] = max_pool_backward;
}
