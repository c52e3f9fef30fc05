/* SPDX-License-Identifier: BSD-3-Clause
 * Muon, Adafactor and LAMB, the optimizers that need sums over whole tensors. ref/update.c has the formulas and their
 * sources. Sums are computed in double. Each row is summed from left to right, and the sums of the rows are added in
 * order. Hence the result does not depend on the number of threads. */
#include <math.h>
#include <string.h>
#include "backend/cpu/gemm.h"
#include "base/error.h"
#include "base/half.h"
#include "base/update.h"

enum {
    LEAF = 128,                       /* maximum number of rows of a diagonal block; both halves of the block are
                                       * computed, although it is symmetric */
    TILE = 32,
};

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

/* -- Muon ---------------------------------------------------------------------------------------------------------- */
/* The state of Muon's iteration X' = (a I + b A + c A A) X with A = X X^T. The iteration is computed in this form:
 *     X' = q (X + P X),  E = A - s I,  P = ((b + 2 c s) E + c E E) / q,  q = a + b s + c s s.
 * The shift s reduces rounding errors. In the last iterations A is near I. Then b A and c A A nearly cancel, which
 * would amplify the rounding errors of the products. If s I is near A, E is small, and so are its rounding errors.
 * Operands of half types have no shift (s = 0). In the first iterations A is small, and rounding A - s I to a half type
 * would remove most of the digits of A.
 * The stored matrix x is X divided by `scale`. `scale` is the product of the values of q in all iterations so far.
 * Hence the last product of an iteration adds x without a factor. */
typedef struct matrices {
    ps_call *call;
    ps_gemm_space space;
    int type;                         /* type of the operands of the products */
    int64_t R, C;                     /* sizes of X, with R <= C */
    void *x, *y, *gram, *poly;        /* x and y are [R, C]; gram and poly are [R, R] */
    float *sums;                      /* [R, C] in fp32; shares the memory of y if y is fp32 */
    double shift, q, scale;
} matrices;

/* The shift s for fp32 operands. For random matrices, the rounding errors are smallest if the shift is between 0.6 and
 * 0.7. */
static const double SHIFT = 0.65;

static int64_t size_of(const matrices *m) { return m->type == PS_F32 ? 4 : 2; }
static void *at(const matrices *m, void *p, int64_t i) { return (char *)p + i * size_of(m); }
static float load(const matrices *m, const void *p, int64_t i)
{
    return m->type == PS_F32 ? ((const float *)p)[i] : ps_bf16_to_f32(((const uint16_t *)p)[i]);
}
static void store(const matrices *m, void *p, int64_t i, float value)
{
    if (m->type == PS_F32) ((float *)p)[i] = value;
    else ((uint16_t *)p)[i] = ps_f32_to_bf16(value);
}

/* Computes a block of dst [R, R] = a a^T. The block has rows i0 to i0 + rows and columns j0 to j0 + cols. If `a` is not
 * m->x, `a` is symmetric, and the function computes a * a, which is the same. K is the number of columns of `a`. */
static int block(matrices *m, float *dst, void *a, int64_t K, int64_t i0, int64_t rows, int64_t j0, int64_t cols)
{
    bool turned = a == m->x;
    ps_gemm g = { .batch = 1 };
    g.a = (ps_mat){ at(m, a, i0 * K), m->type, rows, K, K, 1 };
    g.b = turned ? (ps_mat){ at(m, a, j0 * K), m->type, K, cols, 1, K }
                 : (ps_mat){ at(m, a, j0), m->type, K, cols, K, 1 };
    g.dst = (ps_mat){ dst + i0 * m->R + j0, PS_F32, rows, cols, m->R, 1 };
    return ps_cpu_gemm_run(&m->space, &g);
}
/* Computes the lower half of the diagonal block of rows [first, first + n). If n <= LEAF, computes the whole block. */
static int lower(matrices *m, float *dst, void *a, int64_t K, int64_t first, int64_t n)
{
    if (n <= LEAF) return block(m, dst, a, K, first, n, first, n);
    int64_t top = (n / 2 + TILE - 1) / TILE * TILE;
    PS_TRY(lower(m, dst, a, K, first, top));
    PS_TRY(block(m, dst, a, K, first + top, n - top, first, top));
    return lower(m, dst, a, K, first + top, n - top);
}
/* Computes the symmetric matrix dst [R, R] = alpha * sum + beta * add + diagonal * I. Reads only the lower half of
 * `sum`. dst may be the same matrix as `sum`. */
static void mirror(const matrices *m, void *dst, const float *sum, float alpha, const void *add, float beta,
                   float diagonal)
{
    int64_t R = m->R;
    if (m->call->dry) return;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i0 = 0; i0 < R; i0 += TILE)
        for (int64_t j0 = 0; j0 <= i0; j0 += TILE) {
            float tile[TILE][TILE];
            int64_t rows = R - i0 < TILE ? R - i0 : TILE, cols = R - j0 < TILE ? R - j0 : TILE;
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < cols; j++) {
                    int64_t from = (i0 + i) * R + j0 + j;
                    tile[i][j] = alpha * sum[from];
                    if (add) tile[i][j] += beta * load(m, add, from);
                }
            for (int64_t i = 0; i0 == j0 && i < rows; i++) {
                tile[i][i] += diagonal;
                for (int64_t j = i + 1; j < cols; j++) tile[i][j] = tile[j][i];
            }
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < cols; j++) store(m, dst, (i0 + i) * R + j0 + j, tile[i][j]);
            for (int64_t j = 0; i0 != j0 && j < cols; j++)
                for (int64_t i = 0; i < rows; i++) store(m, dst, (j0 + j) * R + i0 + i, tile[i][j]);
        }
}

/* Multiplies x by m->scale if the scale has become very large or very small. This keeps x in the range of its type. */
static void rescale(matrices *m)
{
    int64_t n = m->R * m->C;
    if (m->scale < 1e6 && m->scale > 1e-6) return;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t i = 0; i < n; i++) store(m, m->x, i, load(m, m->x, i) * (float)m->scale);
    m->scale = 1;
}

static int iterate(matrices *m, const ps_attrs_muon_ *a)
{
    int64_t R = m->R, C = m->C;
    bool wide = m->type == PS_F32;
    float *square = wide ? m->gram : m->sums;
    if (!m->call->dry) rescale(m);
    PS_TRY(lower(m, square, m->x, C, 0, R));
    mirror(m, m->gram, square, (float)(m->scale * m->scale), NULL, 0, (float)-m->shift);
    square = wide ? m->poly : m->sums;
    PS_TRY(lower(m, square, m->gram, R, 0, R));
    mirror(m, m->poly, square, (float)(a->c / m->q), m->gram, (float)((a->b + 2 * a->c * m->shift) / m->q), 0);
    ps_gemm g = { .batch = 1, .residual = m->x, .ld_residual = C };
    g.a = (ps_mat){ m->poly, m->type, R, R, R, 1 };
    g.b = (ps_mat){ m->x, m->type, R, C, C, 1 };
    g.dst = (ps_mat){ m->y, m->type, R, C, C, 1 };
    PS_TRY(ps_cpu_gemm_run(&m->space, &g));
    m->scale *= m->q;
    void *swap = m->x;
    m->x = m->y, m->y = swap;
    return 0;
}

/* Returns true if x contains the transposed parameter, so that R <= C. */
static bool is_turned(const ps_view *in) { return in->shape[0] > in->shape[1]; }

/* Updates the momentum of n rows of the parameter, beginning at row `first`. Writes the update of these rows to u, a
 * matrix [R, C], and the sum of squares of each row's update to by_row. */
static void begin_rows(const ps_attrs_muon_ *a, const ps_view *in, float *u, double *by_row, int64_t first, int64_t n)
{
    int64_t rows = in->shape[0], cols = in->shape[1];
    float take = (float)(1 - a->momentum), momentum = (float)a->momentum, scale = (float)a->grad_scale;
    float *buf = in[3].data, tile[TILE][TILE];
    bool turned = is_turned(in);
    for (int64_t k = 0; k < n; k++) by_row[first + k] = 0;
    for (int64_t c0 = 0; c0 < cols; c0 += TILE) {
        int64_t width = cols - c0 < TILE ? cols - c0 : TILE;
        for (int64_t k = 0; k < n; k++) {
            double sum = by_row[first + k];
            for (int64_t c = 0; c < width; c++) {
                int64_t i = (first + k) * cols + c0 + c;
                float g = grad_at(in, i) * scale, b = buf[i] + take * (g - buf[i]);
                float x = a->nesterov ? g + momentum * (b - g) : b;
                buf[i] = b;
                if (turned) tile[c][k] = x;
                else u[i] = x;
                sum += (double)x * x;
            }
            by_row[first + k] = sum;
        }
        for (int64_t c = 0; turned && c < width; c++)
            memcpy(u + (c0 + c) * rows + first, tile[c], (size_t)n * sizeof(float));
    }
}
static void begin(matrices *m, const ps_attrs_muon_ *a, const ps_view *in, float *u, double *by_row)
{
    int64_t rows = in->shape[0], n = m->R * m->C;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t first = 0; first < rows; first += TILE)
        begin_rows(a, in, u, by_row, first, rows - first < TILE ? rows - first : TILE);
    double norm = sqrt(in_order(by_row, rows));
    float inv = (float)(1 / (norm > a->eps ? norm : a->eps));
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t i = 0; i < n; i++) store(m, m->x, i, u[i] * inv);
}

/* Multiplies rows [first, first + n) of the master by `keep`, and then subtracts `rate` times x. */
static void end_rows(const matrices *m, const ps_view *in, float keep, float rate, int64_t first, int64_t n)
{
    int64_t rows = in->shape[0], cols = in->shape[1];
    float tile[TILE][TILE];
    bool turned = is_turned(in);
    for (int64_t c0 = 0; c0 < cols; c0 += TILE) {
        int64_t width = cols - c0 < TILE ? cols - c0 : TILE;
        for (int64_t c = 0; turned && c < width; c++)
            for (int64_t k = 0; k < n; k++) tile[k][c] = load(m, m->x, (c0 + c) * rows + first + k);
        for (int64_t k = 0; k < n; k++)
            for (int64_t c = 0; c < width; c++) {
                int64_t i = (first + k) * cols + c0 + c;
                set_master(in, i, master_at(in, i) * keep - rate * (turned ? tile[k][c] : load(m, m->x, i)));
            }
    }
}

static int muon_matrix(ps_call *call, const ps_view *in)
{
    const struct ps_attrs_muon_ *a = call->attrs;
    int64_t rows = in->shape[0], cols = in->shape[1];
    matrices m = { .call = call, .space = { .call = call }, .R = rows < cols ? rows : cols,
                   .C = rows < cols ? cols : rows, .scale = 1,
                   .type = in[0].dtype == PS_BF16 && ps_cpu_gemm_native(PS_BF16) ? PS_BF16 : PS_F32 };
    size_t all = (size_t)(m.R * m.C), square = (size_t)(m.R * m.R), size = (size_t)size_of(&m);
    double *by_row = call->scratch(call, (size_t)rows * sizeof *by_row);
    m.x = call->scratch(call, all * size), m.y = call->scratch(call, all * size);
    m.gram = call->scratch(call, square * size), m.poly = call->scratch(call, square * size);
    m.sums = m.type == PS_F32 ? m.y : call->scratch(call, all * 4);
    if (!by_row || !m.x || !m.y || !m.gram || !m.poly || !m.sums) return PS_ENOMEM;
    m.shift = m.type == PS_F32 ? SHIFT : 0;
    m.q = a->a + a->b * m.shift + a->c * m.shift * m.shift;
    if (m.q == 0) m.shift = 0, m.q = a->a;
    if (m.q == 0) return ps_fail(PS_EINVAL, "muon_: a = 0 in the iteration's coefficients");
    if (!call->dry) begin(&m, a, in, m.sums, by_row);
    for (int k = 0; k < a->steps; k++) PS_TRY(iterate(&m, a));
    if (call->dry) return 0;
    float rate = (float)(a->lr * ps_muon_ratio(a->adjust, rows, cols) * m.scale);
    float keep = (float)(1 - a->lr * a->weight_decay);
#pragma omp parallel for schedule(static) if (rows * cols > PS_PAR_MIN)
    for (int64_t first = 0; first < rows; first += TILE)
        end_rows(&m, in, keep, rate, first, rows - first < TILE ? rows - first : TILE);
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
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        size_t units = (size_t)(call->in[n].numel + PS_LAMB_UNIT - 1) / PS_LAMB_UNIT;
        double *sums = call->scratch(call, (2 * units + 1) * sizeof *sums);
        if (!sums) return PS_ENOMEM;
        if (!call->dry) lamb_tensor(a, &h, &call->in[n], sums, sums + units);
    }
    return 0;
}
