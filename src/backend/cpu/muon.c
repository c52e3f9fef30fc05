/* SPDX-License-Identifier: BSD-3-Clause
 * Muon and the optimizers that need sums over whole tensors, made of matrix products and of sums in a fixed order.
 * ref/update.c has the formulas and their sources. Sums are in double: of a row from left to right, of rows in their
 * order, whatever the number of threads. */
#include <math.h>
#include <string.h>
#include "backend/cpu/gemm.h"
#include "base/error.h"
#include "base/half.h"
#include "base/update.h"

enum { SYMMETRIC_ROWS = 256 };        /* rows of a panel of a symmetric product, of which only half is computed */

/* -- operands of a parameter --------------------------------------------------------------------------------------- */
static float grad_at(const ps_view *in, int64_t i)
{
    const ps_view *g = &in[2];
    if (g->dtype == PS_F32) return ((const float *)g->data)[i];
    uint16_t half = ((const uint16_t *)g->data)[i];
    return g->dtype == PS_BF16 ? ps_bf16_to_f32(half) : ps_f16_to_f32(half);
}
static float master_at(const ps_view *in, int64_t i)
{
    if (in[1].dtype == PS_F32) return ((const float *)in[1].data)[i];
    return ps_bits_f32(ps_remainder_join(((const uint16_t *)in[0].data)[i], ((const uint16_t *)in[1].data)[i]));
}
static void set_master(const ps_view *in, int64_t i, float p)
{
    uint16_t *half = in[0].data;
    if (in[1].dtype == PS_U8) {
        half[i] = ps_remainder_split(ps_f32_bits(p), (uint16_t *)in[1].data + i);
        return;
    }
    ((float *)in[1].data)[i] = p;
    if (in[0].dtype == PS_BF16) half[i] = ps_f32_to_bf16(p);
    else if (in[0].dtype == PS_F16) half[i] = ps_f32_to_f16(p);
    else ((float *)in[0].data)[i] = p;
}
/* Returns whether the kernels of this file support these tensors: fp32 or half parameters, fp32 masters or
 * remainders. */
static bool known(const ps_view *in, int each)
{
    bool low = in[1].dtype == PS_U8, half = in[0].dtype == PS_BF16 || in[0].dtype == PS_F16;
    for (int k = 0; k < each; k++)
        if (!view_flat(&in[k]) || (k > 2 && in[k].dtype != PS_F32 && in[k].data != in[1].data)) return false;
    if (in[2].dtype != PS_F32 && in[2].dtype != PS_BF16 && in[2].dtype != PS_F16) return false;
    return (in[0].dtype == PS_F32 || half) && (low ? in[0].dtype == PS_BF16 : in[1].dtype == PS_F32);
}
static double in_order(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum;
}

/* -- Muon ---------------------------------------------------------------------------------------------------------- */
typedef struct matrices {
    ps_call *call;
    ps_gemm_space space;
    int type;                         /* type of the products' operands */
    int64_t R, C;                     /* sizes, R <= C */
    void *x, *y, *gram, *poly;        /* x and y are [R, C], gram and poly are [R, R] */
    float *sums;                      /* [R, C] fp32 results, from which the operands are made; for fp32, y itself */
} matrices;

static int64_t size_of(const matrices *m) { return m->type == PS_F32 ? 4 : 2; }
static void *row_of(const matrices *m, void *p, int64_t row, int64_t cols)
{
    return (char *)p + row * cols * size_of(m);
}

/* Computes rows [first, first + n) of the lower half of dst [R, R] = a b, which is symmetric. turned: b is a
 * transposed. */
static int panel(matrices *m, float *dst, void *a, int64_t K, bool turned, int64_t first, int64_t n)
{
    ps_gemm g = { .batch = 1 };
    int64_t cols = first + n;
    g.a = (ps_mat){ row_of(m, a, first, K), m->type, n, K, K, 1 };
    g.b = turned ? (ps_mat){ a, m->type, K, cols, 1, K } : (ps_mat){ a, m->type, K, cols, K, 1 };
    g.dst = (ps_mat){ dst + first * m->R, PS_F32, n, cols, m->R, 1 };
    return ps_cpu_gemm_run(&m->space, &g);
}
static int symmetric(matrices *m, float *dst, void *a, int64_t K, bool turned)
{
    int64_t R = m->R;
    for (int64_t first = 0; first < R; first += SYMMETRIC_ROWS)
        PS_TRY(panel(m, dst, a, K, turned, first, R - first < SYMMETRIC_ROWS ? R - first : SYMMETRIC_ROWS));
    if (m->call->dry) return 0;
    enum { TILE = 32 };
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i0 = 0; i0 < R; i0 += TILE)
        for (int64_t j0 = i0; j0 < R; j0 += TILE)
            for (int64_t i = i0; i < i0 + TILE && i < R; i++)
                for (int64_t j = j0 > i ? j0 : i + 1; j < j0 + TILE && j < R; j++) dst[i * R + j] = dst[j * R + i];
    return 0;
}
/* Computes dst = beta add + alpha x, rounded to the operands' type. add can be NULL. */
static void combine(const matrices *m, void *dst, const float *x, float alpha, const void *add, float beta, int64_t n)
{
    if (m->call->dry) return;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t i = 0; i < n; i++) {
        float old = !add ? 0 : m->type == PS_F32 ? ((const float *)add)[i] : ps_bf16_to_f32(((const uint16_t *)add)[i]);
        float value = alpha * x[i] + beta * old;
        if (m->type == PS_F32) ((float *)dst)[i] = value;
        else ((uint16_t *)dst)[i] = ps_f32_to_bf16(value);
    }
}

static int iterate(matrices *m, const ps_attrs_muon_ *a)
{
    int64_t R = m->R, C = m->C;
    float *square = m->type == PS_F32 ? m->gram : m->sums;
    PS_TRY(symmetric(m, square, m->x, C, true));
    if (m->type != PS_F32) combine(m, m->gram, square, 1, NULL, 0, R * R);
    square = m->type == PS_F32 ? m->poly : m->sums;
    PS_TRY(symmetric(m, square, m->gram, R, false));
    combine(m, m->poly, square, (float)a->c, m->gram, (float)a->b, R * R);
    float *result = m->type == PS_F32 ? m->y : m->sums;
    ps_gemm g = { .batch = 1 };
    g.a = (ps_mat){ m->poly, m->type, R, R, R, 1 };
    g.b = (ps_mat){ m->x, m->type, R, C, C, 1 };
    g.dst = (ps_mat){ result, PS_F32, R, C, C, 1 };
    PS_TRY(ps_cpu_gemm_run(&m->space, &g));
    combine(m, m->y, result, 1, m->x, (float)a->a, R * C);
    void *swap = m->x;
    m->x = m->y, m->y = swap;
    return 0;
}

/* Returns the position of the parameter's element (r, c) in [R, C], which has the smaller dimension first. */
static int64_t place(const ps_view *in, int64_t r, int64_t c)
{
    return in->shape[0] > in->shape[1] ? c * in->shape[0] + r : r * in->shape[1] + c;
}

/* Updates the momentum, and writes the update, divided by its norm, to x. */
static void begin(matrices *m, const ps_attrs_muon_ *a, const ps_view *in, float *u, double *by_row)
{
    int64_t rows = in->shape[0], cols = in->shape[1];
    float take = (float)(1 - a->momentum), momentum = (float)a->momentum, scale = (float)a->grad_scale;
    float *buf = in[3].data;
#pragma omp parallel for schedule(static) if (rows * cols > PS_PAR_MIN)
    for (int64_t r = 0; r < rows; r++) {
        by_row[r] = 0;
        for (int64_t c = 0; c < cols; c++) {
            int64_t i = r * cols + c;
            float g = grad_at(in, i) * scale, b = buf[i] + take * (g - buf[i]);
            float x = a->nesterov ? g + momentum * (b - g) : b;
            buf[i] = b;
            u[place(in, r, c)] = x;
            by_row[r] += (double)x * x;
        }
    }
    double norm = sqrt(in_order(by_row, rows));
    combine(m, m->x, u, (float)(1 / (norm > a->eps ? norm : a->eps)), NULL, 0, rows * cols);
}

static int muon_matrix(ps_call *call, const ps_view *in)
{
    const struct ps_attrs_muon_ *a = call->attrs;
    int64_t rows = in->shape[0], cols = in->shape[1];
    matrices m = { .call = call, .space = { .call = call }, .R = rows < cols ? rows : cols,
                   .C = rows < cols ? cols : rows, .type = in[0].dtype == PS_BF16 ? PS_BF16 : PS_F32 };
    size_t all = (size_t)(m.R * m.C), square = (size_t)(m.R * m.R), size = (size_t)size_of(&m);
    double *by_row = call->scratch(call, (size_t)rows * sizeof *by_row);
    m.x = call->scratch(call, all * size), m.y = call->scratch(call, all * size);
    m.gram = call->scratch(call, square * size), m.poly = call->scratch(call, square * size);
    m.sums = m.type == PS_F32 ? m.y : call->scratch(call, all * 4);
    if (!by_row || !m.x || !m.y || !m.gram || !m.poly || !m.sums) return PS_ENOMEM;
    if (!call->dry) begin(&m, a, in, m.sums, by_row);
    for (int k = 0; k < a->steps; k++) PS_TRY(iterate(&m, a));
    if (call->dry) return 0;
    float rate = (float)(a->lr * ps_muon_ratio(a->adjust, rows, cols)), keep = (float)(1 - a->lr * a->weight_decay);
#pragma omp parallel for schedule(static) if (rows * cols > PS_PAR_MIN)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            int64_t i = r * cols + c, at = place(in, r, c);
            float x = m.type == PS_F32 ? ((float *)m.x)[at] : ps_bf16_to_f32(((uint16_t *)m.x)[at]);
            set_master(in, i, master_at(in, i) * keep - rate * x);
        }
    return 0;
}

int ps_cpu_muon(ps_call *call)
{
    for (int n = 0; n + 4 <= call->n_in; n += 4) if (!known(&call->in[n], 4)) return PS_EUNSUP;
    for (int n = 0; n + 4 <= call->n_in; n += 4)
        if (call->in[n].numel > 0) PS_TRY(muon_matrix(call, &call->in[n]));
    return 0;
}

/* -- Adafactor ----------------------------------------------------------------------------------------------------- */
/* A tensor [batch, R, C]. A vector is [1, 1, C], with averages of its elements. */
typedef struct factored {
    const ps_attrs_adafactor_ *a;
    const ps_view *in;
    int64_t batch, R, C;
    bool matrix;
    double *by_row;                   /* [batch R] sums of rows */
    double *row_mean;                 /* [batch] */
} factored;

static double squared(const factored *f, int64_t i)
{
    float g = grad_at(f->in, i) * (float)f->a->grad_scale;
    return (double)g * g + (f->a->hugging_face ? f->a->eps1 : 0);
}
/* Returns the update of an element in row `row`, before it is clipped. */
static float factored_update(const factored *f, int64_t row, int64_t c)
{
    const ps_attrs_adafactor_ *a = f->a;
    const float *rows = f->in[3].data, *cols = f->in[4].data;
    int64_t b = row / f->R;
    float var;
    if (f->matrix) {
        double mean = f->row_mean[b];
        var = (float)(rows[row] / (a->hugging_face || mean > a->eps1 ? mean : a->eps1)) * cols[b * f->C + c];
    } else {
        var = rows[c];
    }
    float least = (float)(a->eps1 * a->eps1);
    if (!a->hugging_face && var < least) var = least;
    return grad_at(f->in, row * f->C + c) * (float)a->grad_scale / sqrtf(var);
}

static void factored_averages(const factored *f, double keep, double take)
{
    float *rows = f->in[3].data, *cols = f->in[4].data;
    int64_t n_rows = f->batch * f->R, C = f->C;
    if (!f->matrix) {
        for (int64_t i = 0; i < C; i++) rows[i] = (float)(keep * rows[i] + take * squared(f, i));
        return;
    }
#pragma omp parallel for schedule(static) if (n_rows * C > PS_PAR_MIN)
    for (int64_t r = 0; r < n_rows; r++) {
        double sum = 0;
        for (int64_t c = 0; c < C; c++) sum += squared(f, r * C + c);
        rows[r] = (float)(keep * rows[r] + take * (sum / (double)C));
    }
    enum { COLUMNS = 64 };
#pragma omp parallel for collapse(2) schedule(static) if (n_rows * C > PS_PAR_MIN)
    for (int64_t b = 0; b < f->batch; b++)
        for (int64_t c0 = 0; c0 < C; c0 += COLUMNS) {
            int64_t n = C - c0 < COLUMNS ? C - c0 : COLUMNS;
            double sum[COLUMNS] = { 0 };
            for (int64_t r = 0; r < f->R; r++)
                for (int64_t c = 0; c < n; c++) sum[c] += squared(f, (b * f->R + r) * C + c0 + c);
            for (int64_t c = 0; c < n; c++)
                cols[b * C + c0 + c] = (float)(keep * cols[b * C + c0 + c] + take * (sum[c] / (double)f->R));
        }
    for (int64_t b = 0; b < f->batch; b++) {
        double sum = 0;
        for (int64_t r = 0; r < f->R; r++) sum += rows[b * f->R + r];
        f->row_mean[b] = sum / (double)f->R;
    }
}

static void adafactor(const factored *f)
{
    const ps_attrs_adafactor_ *a = f->a;
    const ps_view *in = f->in;
    int64_t n_rows = f->batch * f->R, C = f->C;
    double take = pow((double)a->t, a->beta2_decay), n = (double)in->numel, rms = 0;
    if (!a->hugging_face || a->scale_parameter) {            /* otherwise the rate does not depend on rms */
#pragma omp parallel for schedule(static) if (n_rows * C > PS_PAR_MIN)
        for (int64_t r = 0; r < n_rows; r++) {
            f->by_row[r] = 0;
            for (int64_t c = 0; c < C; c++) {
                double p = master_at(in, r * C + c);
                f->by_row[r] += p * p;
            }
        }
        rms = sqrt(in_order(f->by_row, n_rows) / n);
    }
    factored_averages(f, 1 - take, take);
#pragma omp parallel for schedule(static) if (n_rows * C > PS_PAR_MIN)
    for (int64_t r = 0; r < n_rows; r++) {
        f->by_row[r] = 0;
        for (int64_t c = 0; c < C; c++) {
            double u = factored_update(f, r, c);
            f->by_row[r] += u * u;
        }
    }
    double divisor = sqrt(in_order(f->by_row, n_rows) / n) / a->d;
    double alpha = ps_adafactor_rate(a->t, a->lr, a->eps2, rms, a->hugging_face, a->scale_parameter, a->relative_step,
                                     a->warmup_init);
    if (!(divisor > 1)) divisor = 1;
    float keep = (float)(1 - a->weight_decay * (a->hugging_face ? alpha : a->lr)), rate = (float)(alpha / divisor);
#pragma omp parallel for schedule(static) if (n_rows * C > PS_PAR_MIN)
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t c = 0; c < C; c++) {
            int64_t i = r * C + c;
            set_master(in, i, master_at(in, i) * keep - rate * factored_update(f, r, c));
        }
}

int ps_cpu_adafactor(ps_call *call)
{
    for (int n = 0; n + 5 <= call->n_in; n += 5) if (!known(&call->in[n], 5)) return PS_EUNSUP;
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        const ps_view *in = &call->in[n];
        factored f = { .a = call->attrs, .in = in, .batch = 1, .R = 1, .C = in->numel, .matrix = in->ndim > 1 };
        if (in->numel == 0) continue;
        if (f.matrix) f.R = in->shape[in->ndim - 2], f.C = in->shape[in->ndim - 1], f.batch = in->numel / (f.R * f.C);
        f.by_row = call->scratch(call, (size_t)(f.batch * f.R) * sizeof *f.by_row);
        f.row_mean = call->scratch(call, (size_t)f.batch * sizeof *f.row_mean);
        if (!f.by_row || !f.row_mean) return PS_ENOMEM;
        if (!call->dry) adafactor(&f);
    }
    return 0;
}

/* -- LAMB ---------------------------------------------------------------------------------------------------------- */
typedef struct lamb { float scale, b1, b2, c1, c2, inv1, inv2, eps, wd; } lamb;
enum { LAMB_UNIT = 4096 };            /* elements whose squares are summed at once */

static float lamb_update(const lamb *h, const ps_view *in, int64_t i)
{
    const float *m = in[3].data, *v = in[4].data;
    return m[i] * h->inv1 / (sqrtf(v[i]) * h->inv2 + h->eps) + h->wd * master_at(in, i);
}
static void lamb_tensor(const ps_attrs_lamb_ *a, const lamb *h, const ps_view *in, double *of_p, double *of_u)
{
    int64_t n = in->numel, units = (n + LAMB_UNIT - 1) / LAMB_UNIT;
    float *m = in[3].data, *v = in[4].data;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t k = 0; k < units; k++) {
        of_p[k] = of_u[k] = 0;
        for (int64_t i = k * LAMB_UNIT; i < n && i < (k + 1) * LAMB_UNIT; i++) {
            float g = grad_at(in, i) * h->scale, p = master_at(in, i);
            m[i] = h->b1 * m[i] + h->c1 * g;
            v[i] = h->b2 * v[i] + h->c2 * g * g;
            double u = lamb_update(h, in, i);
            of_p[k] += (double)p * p, of_u[k] += u * u;
        }
    }
    double p = sqrt(in_order(of_p, units)), u = sqrt(in_order(of_u, units));
    double ratio = p > 0 && u > 0 && (a->weight_decay != 0 || a->always_adapt) ? p / u : 1;
    float rate = (float)(a->lr * (a->trust_clip && ratio > 1 ? 1 : ratio));
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t i = 0; i < n; i++) set_master(in, i, master_at(in, i) - rate * lamb_update(h, in, i));
}

int ps_cpu_lamb(ps_call *call)
{
    const struct ps_attrs_lamb_ *a = call->attrs;
    double bias1 = a->bias_correction ? 1 - pow(a->beta1, (double)a->t) : 1;
    double bias2 = a->bias_correction ? 1 - pow(a->beta2, (double)a->t) : 1;
    lamb h = { .scale = (float)a->grad_scale, .b1 = (float)a->beta1, .b2 = (float)a->beta2,
               .c1 = a->grad_averaging ? (float)(1 - a->beta1) : 1, .c2 = (float)(1 - a->beta2),
               .inv1 = (float)(1 / bias1), .inv2 = (float)(1 / sqrt(bias2)), .eps = (float)a->eps,
               .wd = (float)a->weight_decay };
    for (int n = 0; n + 5 <= call->n_in; n += 5) if (!known(&call->in[n], 5)) return PS_EUNSUP;
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        size_t units = (size_t)(call->in[n].numel + LAMB_UNIT - 1) / LAMB_UNIT;
        double *sums = call->scratch(call, (2 * units + 1) * sizeof *sums);
        if (!sums) return PS_ENOMEM;
        if (!call->dry) lamb_tensor(a, &h, &call->in[n], sums, sums + units);
    }
    return 0;
}
