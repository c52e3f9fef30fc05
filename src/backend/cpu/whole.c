/* SPDX-License-Identifier: BSD-3-Clause
 * Adafactor and LAMB, whose updates depend on sums over the whole tensor. ref/update.c has the formulas and their
 * sources. Sums are computed in double. Each row is summed from left to right, and the sums of the rows are added in
 * order. Hence the result does not depend on the number of threads.
 *
 * The kernels allocate the workspace of the largest tensor before they change the first one. If memory is short, a call
 * therefore fails without any change, and can be repeated. */
#include <math.h>
#include "backend/cpu/cpu.h"
#include "base/error.h"
#include "base/half.h"
#include "base/update.h"

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
/* Returns true if this file's kernels support these tensors. The parameters must be fp32, bf16 or fp16. Masters must be
 * fp32. A bf16 parameter can have a remainder instead of a master. */
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

/* -- Adafactor ----------------------------------------------------------------------------------------------------- */
/* A tensor [batch, R, C] with its averages. A one-dimensional tensor has the shape [1, 1, C] and one average for each
 * element. */
typedef struct factored {
    const ps_attrs_adafactor_ *a;
    const ps_view *in;
    int64_t batch, R, C;
    bool matrix;
    double *by_row;                   /* [batch * R]; sums of rows */
    double *row_mean;                 /* [batch]; the mean of the row averages of each matrix */
} factored;

static double squared(const factored *f, int64_t i)
{
    float g = grad_at(f->in, i) * (float)f->a->grad_scale;
    return (double)g * g + (f->a->hugging_face ? f->a->eps1 : 0);
}
/* Returns the update of the element in row `row` and column c, before the update is clipped. */
static float factored_update(const factored *f, int64_t row, int64_t c)
{
    const ps_attrs_adafactor_ *a = f->a;
    const float *rows = f->in[3].data, *cols = f->in[4].data;
    int64_t b = row / f->R;
    float var;
    if (f->matrix) {
        double mean = f->row_mean[b];
        var = (float)(rows[row] / (!a->hugging_face && mean < a->eps1 ? a->eps1 : mean)) * cols[b * f->C + c];
    } else {
        var = rows[c];
    }
    float least = (float)(a->eps1 * a->eps1);
    if (!a->hugging_face && var < least) var = least;
    return grad_at(f->in, row * f->C + c) * (float)a->grad_scale / sqrtf(var);
}

static void factored_averages(const factored *f, double take)
{
    float *rows = f->in[3].data, *cols = f->in[4].data;
    int64_t n_rows = f->batch * f->R, C = f->C;
    bool hugging_face = f->a->hugging_face;
    if (!f->matrix) {
        for (int64_t i = 0; i < C; i++)
            rows[i] = (float)ps_adafactor_average(rows[i], squared(f, i), take, hugging_face);
        return;
    }
#pragma omp parallel for schedule(static) if (n_rows * C > PS_PAR_MIN)
    for (int64_t r = 0; r < n_rows; r++) {
        double sum = 0;
        for (int64_t c = 0; c < C; c++) sum += squared(f, r * C + c);
        rows[r] = (float)ps_adafactor_average(rows[r], sum / (double)C, take, hugging_face);
    }
    enum { COLUMNS = 64 };
#pragma omp parallel for collapse(2) schedule(static) if (n_rows * C > PS_PAR_MIN)
    for (int64_t b = 0; b < f->batch; b++)
        for (int64_t c0 = 0; c0 < C; c0 += COLUMNS) {
            int64_t n = C - c0 < COLUMNS ? C - c0 : COLUMNS;
            double sum[COLUMNS] = { 0 };
            for (int64_t r = 0; r < f->R; r++)
                for (int64_t c = 0; c < n; c++) sum[c] += squared(f, (b * f->R + r) * C + c0 + c);
            for (int64_t c = 0; c < n; c++) {
                float *col = &cols[b * C + c0 + c];
                *col = (float)ps_adafactor_average(*col, sum[c] / (double)f->R, take, hugging_face);
            }
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
    factored_averages(f, take);
#pragma omp parallel for schedule(static) if (n_rows * C > PS_PAR_MIN)
    for (int64_t r = 0; r < n_rows; r++) {
        f->by_row[r] = 0;
        for (int64_t c = 0; c < C; c++) {
            double u = factored_update(f, r, c);
            f->by_row[r] += u * u;
        }
    }
    double divisor = ps_adafactor_divisor(sqrt(in_order(f->by_row, n_rows) / n) / a->d, a->hugging_face);
    double alpha = ps_adafactor_rate(a->t, a->lr, a->eps2, rms, a->hugging_face, a->scale_parameter, a->relative_step,
                                     a->warmup_init);
    float keep = (float)(1 - a->weight_decay * (a->hugging_face ? alpha : a->lr)), rate = (float)(alpha / divisor);
#pragma omp parallel for schedule(static) if (n_rows * C > PS_PAR_MIN)
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t c = 0; c < C; c++) {
            int64_t i = r * C + c;
            set_master(in, i, master_at(in, i) * keep - rate * factored_update(f, r, c));
        }
}

static factored factored_of(const ps_call *call, int n)
{
    const ps_view *in = &call->in[n];
    factored f = { .a = call->attrs, .in = in, .batch = 1, .R = 1, .C = in->numel, .matrix = in->ndim > 1 };
    if (f.matrix && in->numel > 0)
        f.R = in->shape[in->ndim - 2], f.C = in->shape[in->ndim - 1], f.batch = in->numel / (f.R * f.C);
    return f;
}

int ps_cpu_adafactor(ps_call *call)
{
    for (int n = 0; n + 5 <= call->n_in; n += 5) if (!known(&call->in[n], 5)) return PS_EUNSUP;
    int64_t rows = 1, batch = 1;
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        factored f = factored_of(call, n);
        if (f.batch * f.R > rows) rows = f.batch * f.R;
        if (f.batch > batch) batch = f.batch;
    }
    double *by_row = call->scratch(call, (size_t)rows * sizeof *by_row);
    double *row_mean = call->scratch(call, (size_t)batch * sizeof *row_mean);
    if (!by_row || !row_mean) return PS_ENOMEM;
    for (int n = 0; n + 5 <= call->n_in && !call->dry; n += 5) {
        factored f = factored_of(call, n);
        f.by_row = by_row, f.row_mean = row_mean;
        if (f.in->numel > 0) adafactor(&f);
    }
    return 0;
}

/* -- LAMB ---------------------------------------------------------------------------------------------------------- */
typedef struct lamb { float scale, b1, b2, c1, c2, inv1, inv2, eps, wd; } lamb;

static float lamb_update(const lamb *h, const ps_view *in, int64_t i)
{
    const float *m = in[3].data, *v = in[4].data;
    return m[i] * h->inv1 / (sqrtf(v[i]) * h->inv2 + h->eps) + h->wd * master_at(in, i);
}
static void lamb_tensor(const ps_attrs_lamb_ *a, const lamb *h, const ps_view *in, double *of_p, double *of_u)
{
    int64_t n = in->numel, units = (n + PS_LAMB_UNIT - 1) / PS_LAMB_UNIT;
    float *m = in[3].data, *v = in[4].data;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t k = 0; k < units; k++) {
        of_p[k] = of_u[k] = 0;
        for (int64_t i = k * PS_LAMB_UNIT; i < n && i < (k + 1) * PS_LAMB_UNIT; i++) {
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
    size_t units = 1;
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        size_t own = (size_t)(call->in[n].numel + PS_LAMB_UNIT - 1) / PS_LAMB_UNIT;
        if (own > units) units = own;
    }
    double *sums = call->scratch(call, 2 * units * sizeof *sums);
    if (!sums) return PS_ENOMEM;
    for (int n = 0; n + 5 <= call->n_in && !call->dry; n += 5)
        lamb_tensor(a, &h, &call->in[n], sums, sums + units);
    return 0;
}
