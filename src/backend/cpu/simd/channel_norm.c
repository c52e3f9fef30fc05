/* SPDX-License-Identifier: BSD-3-Clause
 * Batch norm and group norm for contiguous fp32, bf16 and fp16 tensors. This file is compiled once per instruction set.
 *
 * A set consists of all elements that share one mean and variance. A thread copies a set to fp32 rows in its scratch
 * buffer, computes the sums, and writes the results for the set. In group norm, the rows are the channels of the set.
 * In batch norm, a set has one row, which contains the elements of one channel in all samples. Rows are padded to whole
 * blocks of 16 elements. The sums have sixteen lanes of doubles and a fixed order. Hence the bits depend neither on the
 * number of threads nor on the instruction set. */
#define PS_ANY_LANES
#include "backend/cpu/simd/operand.h"
#include "backend/cpu/gemm.h"
#include <omp.h>

enum { LANES = 16 };

struct norm {
    int dtype, groups, given;
    int64_t N, C, S;                  /* x is [N, C, S] */
    int64_t sets, rows, n, np;        /* rows: number of rows in a set; n: number of elements in a row; np: the same
                                       * number with padding */
    double eps;
    const void *x, *dy;
    void *y, *dx;                     /* y is the result of forward, and dx of backward; dx can be NULL */
    const float *w, *b;               /* [C], or NULL */
    const float *mean_in, *var_in;    /* [sets]; means and variances that the caller passes; in backward, the means and
                                       * variances of forward */
    float *mean, *var;                /* [sets] */
    float *dw, *db;                   /* [N, C] or [1, C]; the sums over each channel of each set */
};

static void set_sizes(struct norm *m, const ps_view *x, int groups)
{
    m->dtype = x->dtype, m->groups = groups, m->x = x->data;
    m->N = x->shape[0], m->C = x->shape[1], m->S = x->numel > 0 ? x->numel / m->N / m->C : 0;
    m->sets = groups ? m->N * groups : m->C;
    m->rows = groups ? m->C / groups : 1;
    m->n = groups ? m->S : m->N * m->S;
    m->np = (m->n + LANES - 1) / LANES * LANES;
}

static int64_t channel(const struct norm *m, int64_t set, int64_t row)
{
    return m->groups ? set % m->groups * m->rows + row : set;
}

/* Copies the elements of one set of v to the rows of buf, and pads the rows with zeros. */
static void gather(const struct norm *m, int64_t set, const void *v, float *buf)
{
    if (m->groups) {
        for (int64_t r = 0; r < m->rows; r++) {
            ps_cpu_row_load(buf + r * m->np, ps_at(v, (set * m->rows + r) * m->S, m->dtype), m->S, m->dtype);
            memset(buf + r * m->np + m->n, 0, (size_t)(m->np - m->n) * sizeof *buf);
        }
        return;
    }
    for (int64_t i = 0; i < m->N; i++) {
        int64_t at = (i * m->C + set) * m->S;
        if (m->S == 1) buf[i] = ps_get_one(v, at, m->dtype);
        else ps_cpu_row_load(buf + i * m->S, ps_at(v, at, m->dtype), m->S, m->dtype);
    }
    memset(buf + m->n, 0, (size_t)(m->np - m->n) * sizeof *buf);
}

static void scatter(const struct norm *m, int64_t set, const float *buf, void *v)
{
    if (m->groups) {
        for (int64_t r = 0; r < m->rows; r++)
            ps_cpu_row_store(ps_at(v, (set * m->rows + r) * m->S, m->dtype), buf + r * m->np, m->S, m->dtype);
        return;
    }
    for (int64_t i = 0; i < m->N; i++) {
        int64_t at = (i * m->C + set) * m->S;
        if (m->S == 1) ps_put_one(v, at, m->dtype, buf[i]);
        else ps_cpu_row_store(ps_at(v, at, m->dtype), buf + i * m->S, m->S, m->dtype);
    }
}

typedef double vd __attribute__((vector_size(PS_LANES * 8)));

static double sum_of(const vd *s)
{
    double sum[LANES];
    memcpy(sum, s, sizeof sum);
    for (int w = LANES / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) sum[i] += sum[i + w];
    return sum[0];
}

/* Returns the sum of n elements, where n is a multiple of LANES. */
static double row_sum(const float *p, int64_t n)
{
    vd s[PARTS] = { { 0 } };
    for (int64_t i = 0; i < n; i += LANES)
        EACH_PART(j) s[j] += __builtin_convertvector(vf_load(p + i + j * VL), vd);
    return sum_of(s);
}

/* Returns the sum of the products p * q. p and q can be the same row. */
static double row_products(const float *p, const float *q, int64_t n)
{
    vd s[PARTS] = { { 0 } };
    for (int64_t i = 0; i < n; i += LANES)
        EACH_PART(j) {
            int64_t at = i + j * VL;
            s[j] += __builtin_convertvector(vf_load(p + at), vd) * __builtin_convertvector(vf_load(q + at), vd);
        }
    return sum_of(s);
}

/* Computes p = p * a + b for a row of n elements, and sets the padding after the row to 0. */
SIMD void row_affine(float *p, int64_t n, int64_t np, float a, float b)
{
    vf by = vf_set(a), more = vf_set(b);
    for (int64_t i = 0; i < np; i += VL) vf_store(p + i, vf_fma(vf_load(p + i), by, more));
    for (int64_t i = n; i < np; i++) p[i] = 0;
}

/* Subtracts the mean of a set from the elements of the set. Stores the mean and the variance. */
static void center(const struct norm *m, float *buf, float *mean, float *var)
{
    double sum = 0, squares = 0, count = (double)(m->rows * m->n);
    for (int64_t r = 0; r < m->rows; r++) sum += row_sum(buf + r * m->np, m->np);
    *mean = (float)(sum / count);
    for (int64_t r = 0; r < m->rows; r++) {
        float *p = buf + r * m->np;
        row_affine(p, m->n, m->np, 1.0f, -*mean);
        squares += row_products(p, p, m->np);
    }
    double rounded = sum / count - *mean;            /* corrects the variance, because the rounded mean was
                                                      * subtracted */
    squares = squares / count - rounded * rounded;
    *var = squares < 0 ? 0.0f : (float)squares;
}

static float rstd_of(const struct norm *m, float var) { return (float)(1.0 / sqrt((double)var + m->eps)); }

static void forward_set(const struct norm *m, int64_t set, float *buf)
{
    float mean, var;
    gather(m, set, m->x, buf);
    if (m->given) {
        mean = m->mean_in[set], var = m->var_in[set];
        row_affine(buf, m->n, m->np, 1.0f, -mean);
    } else {
        center(m, buf, &mean, &var);
        m->mean[set] = mean, m->var[set] = var;
    }
    float rstd = rstd_of(m, var);
    for (int64_t r = 0; r < m->rows; r++) {
        int64_t c = channel(m, set, r);
        row_affine(buf + r * m->np, m->n, m->np, m->w ? rstd * m->w[c] : rstd, m->b ? m->b[c] : -0.0f);
    }
    scatter(m, set, buf, m->y);
}

/* With n = (x - mean) * rstd and g = dy * w, computes
 *   dx = rstd * (g - mean(g) - n * mean(g * n)), dw = sum of dy * n, db = sum of dy. */
static void backward_set(const struct norm *m, int64_t set, float *buf, float *dy)
{
    float rstd = rstd_of(m, m->var_in[set]);
    double count = (double)(m->rows * m->n), sum_g = 0, sum_gn = 0;
    gather(m, set, m->x, buf);
    gather(m, set, m->dy, dy);
    float *dw = m->groups ? m->dw + set / m->groups * m->C : m->dw;
    float *db = m->groups ? m->db + set / m->groups * m->C : m->db;
    for (int64_t r = 0; r < m->rows; r++) {
        int64_t c = channel(m, set, r);
        float *x = buf + r * m->np, *d = dy + r * m->np, w = m->w ? m->w[c] : 1.0f;
        row_affine(x, m->n, m->np, 1.0f, -m->mean_in[set]);
        row_affine(x, m->n, m->np, rstd, -0.0f);
        double sum = row_sum(d, m->np), products = row_products(d, x, m->np);
        db[c] = (float)sum, dw[c] = (float)products;
        sum_g += sum * w, sum_gn += products * w;
    }
    if (m->given) sum_g = sum_gn = 0;
    vf mean_g = vf_set((float)(sum_g / count)), mean_gn = vf_set((float)(sum_gn / count)), by = vf_set(rstd);
    for (int64_t r = 0; m->dx && r < m->rows; r++) {
        float *x = buf + r * m->np, *d = dy + r * m->np, w = m->w ? m->w[channel(m, set, r)] : 1.0f;
        for (int64_t i = 0; i < m->np; i += VL) {
            vf g = vf_load(d + i) * vf_set(w) - mean_g;
            vf_store(d + i, (g - vf_load(x + i) * mean_gn) * by);
        }
    }
    if (m->dx) scatter(m, set, dy, m->dx);
}

/* -- the ops ------------------------------------------------------------------------------------------------------- */
static bool usable(const ps_view *v) { return !ps_has(v) || (is_lane_type(v->dtype) && view_flat(v)); }
static bool narrow(const ps_view *v) { return !ps_has(v) || (v->dtype == PS_F32 && view_flat(v)); }

/* Sets *out to v [C] converted to fp32, or to NULL if v is absent. */
static int weights(ps_call *call, const ps_view *v, const float **out)
{
    *out = NULL;
    if (!ps_has(v)) return 0;
    float *p = call->scratch(call, (size_t)(v->numel + 1) * sizeof *p);
    if (!p) return PS_ENOMEM;
    if (!call->dry) ps_cpu_row_load(p, v->data, v->numel, v->dtype);
    *out = p;
    return 0;
}

static int threads_for(const struct norm *m, int64_t numel)
{
    int64_t n = numel >= PS_PAR_MIN ? omp_get_max_threads() : 1;
    return (int)(n < m->sets ? n : m->sets > 0 ? m->sets : 1);
}

static int channel_norm(ps_call *call)
{
    const ps_attrs_channel_norm *a = call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2], *y = &call->out[0];
    const ps_view *mean = &call->in[3], *var = &call->in[4], *mean_out = &call->out[1], *var_out = &call->out[2];
    struct norm m = { .eps = a->eps, .y = y->data, .given = ps_has(mean) };
    if (!usable(x) || !usable(w) || !usable(b) || !usable(y) || y->dtype != x->dtype || !narrow(mean) ||
        !narrow(var) || !narrow(mean_out) || !narrow(var_out) || x->numel == 0)
        return PS_EUNSUP;
    set_sizes(&m, x, a->groups);
    int threads = threads_for(&m, x->numel);
    float *buf = call->scratch(call, (size_t)(threads * m.rows * m.np) * sizeof *buf);
    float *stats = call->scratch(call, (size_t)(2 * m.sets) * sizeof *stats);
    if (!buf || !stats) return PS_ENOMEM;
    PS_TRY(weights(call, w, &m.w));
    PS_TRY(weights(call, b, &m.b));
    if (call->dry) return 0;
    m.mean_in = mean->data, m.var_in = var->data;
    m.mean = ps_has(mean_out) ? mean_out->data : stats, m.var = ps_has(var_out) ? var_out->data : stats + m.sets;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t s = 0; s < m.sets; s++)
        forward_set(&m, s, buf + (threads > 1 ? omp_get_thread_num() : 0) * m.rows * m.np);
    return 0;
}

static void put_sums(const struct norm *m, const ps_view *out, const float *sums)
{
    for (int64_t c = 0; ps_has(out) && c < m->C; c++) {
        float s = sums[c];
        for (int64_t i = 1; m->groups && i < m->N; i++) s += sums[i * m->C + c];
        ps_put_one(out->data, c, out->dtype, s);
    }
}

static int channel_norm_backward(ps_call *call)
{
    const ps_attrs_channel_norm_backward *a = call->attrs;
    const ps_view *dy = &call->in[0], *x = &call->in[1], *w = &call->in[2], *mean = &call->in[3], *var = &call->in[4];
    const ps_view *dx = &call->out[0], *dw = &call->out[1], *db = &call->out[2];
    struct norm m = { .eps = a->eps, .dy = dy->data, .given = a->given };
    if (!usable(dy) || !usable(x) || dy->dtype != x->dtype || !usable(w) || !usable(dx) || !usable(dw) || !usable(db) ||
        (ps_has(dx) && dx->dtype != x->dtype) || !narrow(mean) || !narrow(var) || x->numel == 0)
        return PS_EUNSUP;
    set_sizes(&m, x, a->groups);
    int threads = threads_for(&m, x->numel);
    int64_t each = m.rows * m.np, sums = (m.groups ? m.N : 1) * m.C;
    float *buf = call->scratch(call, (size_t)(2 * threads * each) * sizeof *buf);
    m.dw = call->scratch(call, (size_t)(2 * sums) * sizeof *buf);
    if (!buf || !m.dw) return PS_ENOMEM;
    PS_TRY(weights(call, w, &m.w));
    if (call->dry) return 0;
    m.db = m.dw + sums, m.dx = ps_has(dx) ? dx->data : NULL;
    m.mean_in = mean->data, m.var_in = var->data;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t s = 0; s < m.sets; s++) {
        float *own = buf + (threads > 1 ? omp_get_thread_num() : 0) * 2 * each;
        backward_set(&m, s, own, own + each);
    }
    put_sums(&m, dw, m.dw);
    put_sums(&m, db, m.db);
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_channel_norm)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_channel_norm)(ps_kernel *k)
{
    k[PS_OP_channel_norm] = channel_norm;
    k[PS_OP_channel_norm_backward] = channel_norm_backward;
}
