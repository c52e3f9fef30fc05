/* SPDX-License-Identifier: BSD-3-Clause
 * Steps of the optimizers that are not in optim.c, and masters that are stored as remainders. As in optim.c, the order
 * of operations is a contract for elementwise steps in fp32. Sums over a tensor (norms, means) are computed in double
 * in the order of the elements. The sums that other backends compute can differ by rounding errors. */
#include "ref.h"
#include "base/update.h"

/* -- masters ------------------------------------------------------------------------------------------------------- */
static uint16_t low_at(const ps_view *low, int64_t i)
{
    uint16_t lo;
    memcpy(&lo, (const char *)low->data + 2 * i, 2);
    return lo;
}

/* in[0] is the parameter. in[1] is the parameter's fp32 or fp64 master. If the type of in[1] is uint8, in[1] contains
 * remainders instead. */
double ref_master_get(const ps_view *in, int64_t i)
{
    if (in[1].dtype != PS_U8) return ref_load(&in[1], i);
    return ps_bits_f32(ps_remainder_join(((const uint16_t *)in[0].data)[i], low_at(&in[1], i)));
}

void ref_master_put(const ps_view *in, int64_t i, double p)
{
    if (in[1].dtype != PS_U8) {
        ref_store(&in[1], i, p);
        ref_store(&in[0], i, p);
        return;
    }
    uint16_t lo;
    ((uint16_t *)in[0].data)[i] = ps_remainder_split(ps_f32_bits((float)p), &lo);
    memcpy((char *)in[1].data + 2 * i, &lo, 2);
}

int ref_remainder_split_(ps_call *call)
{
    for (int n = 0; n + 3 <= call->n_in; n += 3)
        for (int64_t i = 0; i < call->in[n].numel; i++) ref_master_put(&call->in[n], i, ref_load(&call->in[n + 2], i));
    return 0;
}

int ref_remainder_join(ps_call *call)
{
    for (int64_t i = 0; i < call->in[0].numel; i++) ref_store(&call->out[0], i, ref_master_get(call->in, i));
    return 0;
}

/* -- Lion ---------------------------------------------------------------------------------------------------------- */
/* Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"). It is computed in fp32, or in double for
 * fp64 masters:
 *     g = grad * grad_scale;  wd != 0: p = p * (1 - lr * wd)
 *     u = fma(beta1, m, (1 - beta1) * g);  p = p - lr * sign(u);  m = fma(beta2, m, (1 - beta2) * g) */
#define LION(name, R, FMA)                                                                                     \
    static void name(const ps_attrs_lion_ *a, const ps_view *in)                                               \
    {                                                                                                          \
        R lr = (R)a->lr, keep = (R)(1 - a->lr * a->weight_decay), scale = (R)a->grad_scale, b1 = (R)a->beta1;  \
        R b2 = (R)a->beta2, c1 = (R)(1 - a->beta1), c2 = (R)(1 - a->beta2);                                    \
        for (int64_t i = 0; i < in->numel; i++) {                                                              \
            R p = (R)ref_master_get(in, i) * keep, g = (R)ref_load(&in[2], i) * scale, m = (R)ref_load(&in[3], i); \
            R u = FMA(b1, m, c1 * g);                                                                          \
            p = u > 0 ? p - lr : u < 0 ? p + lr : u != u ? u : p;                                              \
            ref_store(&in[3], i, FMA(b2, m, c2 * g));                                                          \
            ref_master_put(in, i, p);                                                                              \
        }                                                                                                      \
    }
LION(lion_float, float, fmaf)
LION(lion_double, double, fma)

int ref_lion_(ps_call *call)
{
    for (int n = 0; n + 4 <= call->n_in; n += 4)
        (call->in[n + 1].dtype == PS_F64 ? lion_double : lion_float)(call->attrs, &call->in[n]);
    return 0;
}

/* -- RMSprop ------------------------------------------------------------------------------------------------------- */
/* RMSprop (Tieleman and Hinton 2012, "Lecture 6.5") with PyTorch's momentum. It is computed in fp32, or in double for
 * fp64 masters:
 *     g = grad * grad_scale;  wd != 0: g = fma(wd, p, g)
 *     v = fma(alpha, v, ((1 - alpha) * g) * g);  u = g / (sqrt(v) + eps)
 *     momentum != 0:  u = m = fma(momentum, m, u)
 *     p = fma(-lr, u, p) */
#define RMSPROP(name, R, FMA, SQRT)                                                                            \
    static void name(const ps_attrs_rmsprop_ *a, const ps_view *in)                                            \
    {                                                                                                          \
        R lr = (R)a->lr, wd = (R)a->weight_decay, scale = (R)a->grad_scale, momentum = (R)a->momentum;         \
        R alpha = (R)a->alpha, rest = (R)(1 - a->alpha), eps = (R)a->eps;                                      \
        for (int64_t i = 0; i < in->numel; i++) {                                                              \
            R p = (R)ref_master_get(in, i), g = (R)ref_load(&in[2], i) * scale;                                \
            if (wd != 0) g = FMA(wd, p, g);                                                                    \
            R v = FMA(alpha, (R)ref_load(&in[3], i), (rest * g) * g), u = g / (SQRT(v) + eps);                 \
            ref_store(&in[3], i, v);                                                                           \
            if (momentum != 0) {                                                                               \
                u = FMA(momentum, (R)ref_load(&in[4], i), u);                                                  \
                ref_store(&in[4], i, u);                                                                       \
            }                                                                                                  \
            ref_master_put(in, i, FMA(-lr, u, p));                                                             \
        }                                                                                                      \
    }
RMSPROP(rmsprop_float, float, fmaf, sqrtf)
RMSPROP(rmsprop_double, double, fma, sqrt)

int ref_rmsprop_(ps_call *call)
{
    for (int n = 0; n + 5 <= call->n_in; n += 5)
        (call->in[n + 1].dtype == PS_F64 ? rmsprop_double : rmsprop_float)(call->attrs, &call->in[n]);
    return 0;
}

/* -- AdamW with averages in bf16 ----------------------------------------------------------------------------------- */
/* Rounds x at random to one of the two nearest bf16 values. The probability of each value is proportional to the
 * distance from x to the other value. To do this, the function adds 16 random bits below the last bit of bf16, and
 * truncates. */
static uint16_t round_random(float x, uint32_t random)
{
    uint32_t u = ps_f32_bits(x);
    if ((u & 0x7fffffffu) >= 0x7f800000u) return ps_f32_to_bf16(x);
    return (uint16_t)((u + (random & 0xffffu)) >> 16);
}

/* AdamW of optim.c, but exp_avg and exp_avg_sq are stored with stochastic rounding. Element i uses word i % 64 / 16 of
 * counter i / 64 * 16 + i % 16. exp_avg uses the lower half of the word, and exp_avg_sq uses the upper half. */
static void adam_bf16(const ps_attrs_adam_bf16_ *a, const ps_view *in)
{
    double bias1 = 1 - pow(a->beta1, (double)a->t), bias2 = 1 - pow(a->beta2, (double)a->t);
    float b1 = (float)a->beta1, b2 = (float)a->beta2, c1 = (float)(1 - a->beta1), c2 = (float)(1 - a->beta2);
    float keep = (float)(1 - a->lr * a->weight_decay), scale = (float)a->grad_scale, eps = (float)a->eps;
    float step = (float)(a->lr / bias1), inv = (float)(1 / sqrt(bias2));
    for (int64_t i = 0; i < in->numel; i++) {
        float p = (float)ref_master_get(in, i) * keep, g = (float)ref_load(&in[2], i) * scale;
        float m = (float)ref_load(&in[3], i), v = (float)ref_load(&in[4], i);
        uint32_t random = ps_philox4x32(a->seed, (uint64_t)(i / 64 * 16 + i % 16), (uint64_t)a->t).v[i % 64 / 16];
        m = fmaf(b1, m, c1 * g);
        v = fmaf(b2, v, (c2 * g) * g);
        p = fmaf(-step, m / fmaf(sqrtf(v), inv, eps), p);
        ((uint16_t *)in[3].data)[i] = round_random(m, random);
        ((uint16_t *)in[4].data)[i] = round_random(v, random >> 16);
        ref_master_put(in, i, p);
    }
}

int ref_adam_bf16_(ps_call *call)
{
    for (int n = 0; n + 5 <= call->n_in; n += 5) adam_bf16(call->attrs, &call->in[n]);
    return 0;
}

/* -- AdamW with averages in 8 bits --------------------------------------------------------------------------------- */
/* Quantises a block of up to PS_STATE_BLOCK elements. The scale of the block is its largest magnitude. If an element is
 * not finite, all codes are 0. */
static void quantise(const ps_codes *c, const float *x, int64_t n, uint8_t *codes, float *scale, bool has_sign)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++) most = fabsf(x[i]) > most || x[i] != x[i] ? fabsf(x[i]) : most;
    *scale = most;
    memset(codes, 0, (size_t)n);
    if (!isfinite(most)) return;
    float factor = ps_codes_factor(most);
    for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)ps_codes_nearest(c, x[i] * factor, has_sign);
}

static void adam8bit(const ps_attrs_adam8bit_ *a, const ps_view *in)
{
    double bias1 = 1 - pow(a->beta1, (double)a->t), bias2 = 1 - pow(a->beta2, (double)a->t);
    float b1 = (float)a->beta1, b2 = (float)a->beta2, c1 = (float)(1 - a->beta1), c2 = (float)(1 - a->beta2);
    float keep = (float)(1 - a->lr * a->weight_decay), scale = (float)a->grad_scale, eps = (float)a->eps;
    float step = (float)(a->lr / bias1), inv = (float)(1 / sqrt(bias2)), m[PS_STATE_BLOCK], v[PS_STATE_BLOCK];
    float *m_scale = in[4].data, *v_scale = in[6].data;
    uint8_t *m_codes = in[3].data, *v_codes = in[5].data;
    ps_codes with_sign, plain;
    ps_codes_make(&with_sign, true), ps_codes_make(&plain, false);
    for (int64_t block = 0; block * PS_STATE_BLOCK < in->numel; block++) {
        int64_t first = block * PS_STATE_BLOCK, left = in->numel - first;
        int64_t n = left < PS_STATE_BLOCK ? left : PS_STATE_BLOCK;
        for (int64_t k = 0; k < n; k++) {
            int64_t i = first + k;
            float p = (float)ref_master_get(in, i) * keep, g = (float)ref_load(&in[2], i) * scale;
            float old_m = ps_codes_value(&with_sign, m_codes[i], true) * m_scale[block];
            float old_v = ps_codes_value(&plain, v_codes[i], false) * v_scale[block];
            m[k] = fmaf(b1, old_m, c1 * g);
            v[k] = fmaf(b2, old_v, (c2 * g) * g);
            ref_master_put(in, i, fmaf(-step, m[k] / fmaf(sqrtf(v[k]), inv, eps), p));
        }
        quantise(&with_sign, m, n, m_codes + first, &m_scale[block], true);
        quantise(&plain, v, n, v_codes + first, &v_scale[block], false);
    }
}

/* Lion in fp32 with an 8-bit average. */
static void lion8bit(const ps_attrs_lion8bit_ *a, const ps_view *in)
{
    float lr = (float)a->lr, keep = (float)(1 - a->lr * a->weight_decay), scale = (float)a->grad_scale;
    float b1 = (float)a->beta1, b2 = (float)a->beta2, c1 = (float)(1 - a->beta1), c2 = (float)(1 - a->beta2);
    float m[PS_STATE_BLOCK], *scales = in[4].data;
    uint8_t *codes = in[3].data;
    ps_codes with_sign;
    ps_codes_make(&with_sign, true);
    for (int64_t block = 0; block * PS_STATE_BLOCK < in->numel; block++) {
        int64_t first = block * PS_STATE_BLOCK, left = in->numel - first;
        int64_t n = left < PS_STATE_BLOCK ? left : PS_STATE_BLOCK;
        for (int64_t k = 0; k < n; k++) {
            int64_t i = first + k;
            float p = (float)ref_master_get(in, i) * keep, g = (float)ref_load(&in[2], i) * scale;
            float old = ps_codes_value(&with_sign, codes[i], true) * scales[block], u = fmaf(b1, old, c1 * g);
            m[k] = fmaf(b2, old, c2 * g);
            ref_master_put(in, i, u > 0 ? p - lr : u < 0 ? p + lr : u != u ? u : p);
        }
        quantise(&with_sign, m, n, codes + first, &scales[block], true);
    }
}

int ref_lion8bit_(ps_call *call)
{
    for (int n = 0; n + 5 <= call->n_in; n += 5) lion8bit(call->attrs, &call->in[n]);
    return 0;
}

int ref_adam8bit_(ps_call *call)
{
    for (int n = 0; n + 7 <= call->n_in; n += 7) adam8bit(call->attrs, &call->in[n]);
    return 0;
}

/* -- LAMB ---------------------------------------------------------------------------------------------------------- */
/* LAMB (You et al., ICLR 2020) as in timm. The update is Adam's update plus wd * p, multiplied by the norm of p and
 * divided by the norm of the update. */
static double lamb_update(const ps_attrs_lamb_ *a, const ps_view *in, int64_t i, double m, double v)
{
    double bias1 = a->bias_correction ? 1 - pow(a->beta1, (double)a->t) : 1;
    double bias2 = a->bias_correction ? 1 - pow(a->beta2, (double)a->t) : 1;
    return m / bias1 / (sqrt(v) / sqrt(bias2) + a->eps) + a->weight_decay * ref_master_get(in, i);
}

int ref_lamb_(ps_call *call)
{
    const ps_attrs_lamb_ *a = call->attrs;
    double c1 = a->grad_averaging ? 1 - a->beta1 : 1;
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        const ps_view *in = &call->in[n];
        double of_p = 0, of_u = 0;
        for (int64_t i = 0; i < in->numel; i++) {
            double g = ref_load(&in[2], i) * a->grad_scale, p = ref_master_get(in, i);
            ref_store(&in[3], i, a->beta1 * ref_load(&in[3], i) + c1 * g);
            ref_store(&in[4], i, a->beta2 * ref_load(&in[4], i) + (1 - a->beta2) * g * g);
            double u = lamb_update(a, in, i, ref_load(&in[3], i), ref_load(&in[4], i));
            of_p += p * p, of_u += u * u;
        }
        double ratio = of_p > 0 && of_u > 0 && (a->weight_decay != 0 || a->always_adapt) ? sqrt(of_p) / sqrt(of_u) : 1;
        if (a->trust_clip && ratio > 1) ratio = 1;
        for (int64_t i = 0; i < in->numel; i++) {
            double u = lamb_update(a, in, i, ref_load(&in[3], i), ref_load(&in[4], i));
            ref_master_put(in, i, ref_master_get(in, i) - a->lr * ratio * u);
        }
    }
    return 0;
}

/* -- Adafactor ----------------------------------------------------------------------------------------------------- */
/* A tensor [batch, R, C]. A one-dimensional tensor has the shape [1, 1, C] and one average for each element. */
typedef struct factored {
    const ps_attrs_adafactor_ *a;
    const ps_view *in;
    int64_t batch, R, C;
    bool matrix;
    double *row_mean;                 /* [batch]; the mean of the row averages of each matrix */
} factored;

static double squared(const factored *f, int64_t i)
{
    double g = ref_load(&f->in[2], i) * f->a->grad_scale;
    return g * g + (f->a->hugging_face ? f->a->eps1 : 0);
}

/* Returns the update of element i, before the update is clipped. */
static double factored_update(const factored *f, int64_t i)
{
    const ps_attrs_adafactor_ *a = f->a;
    double g = ref_load(&f->in[2], i) * a->grad_scale, var;
    int64_t row = i / f->C, b = row / f->R;
    if (!f->matrix) var = ref_load(&f->in[3], i);
    else var = ref_load(&f->in[3], row) * ref_load(&f->in[4], b * f->C + i % f->C)
        / (!a->hugging_face && f->row_mean[b] < a->eps1 ? a->eps1 : f->row_mean[b]);
    if (!a->hugging_face && var < a->eps1 * a->eps1) var = a->eps1 * a->eps1;
    return g / sqrt(var);
}

/* Updates an average with the mean of the squares over a row (C elements) or over a column (R elements). */
static void average(const factored *f, const ps_view *averages, int64_t i, double mean, double take)
{
    ref_store(averages, i, ps_adafactor_average(ref_load(averages, i), mean, take, f->a->hugging_face));
}
static void factored_averages(const factored *f, double take)
{
    const ps_view *rows = &f->in[3], *cols = &f->in[4];
    for (int64_t r = 0; f->matrix && r < f->batch * f->R; r++) {
        double sum = 0;
        for (int64_t c = 0; c < f->C; c++) sum += squared(f, r * f->C + c);
        average(f, rows, r, sum / (double)f->C, take);
    }
    for (int64_t k = 0; f->matrix && k < f->batch * f->C; k++) {
        double sum = 0;
        for (int64_t r = 0; r < f->R; r++) sum += squared(f, (k / f->C * f->R + r) * f->C + k % f->C);
        average(f, cols, k, sum / (double)f->R, take);
    }
    for (int64_t i = 0; !f->matrix && i < f->C; i++) average(f, rows, i, squared(f, i), take);
    for (int64_t b = 0; b < f->batch; b++) {
        f->row_mean[b] = 0;
        for (int64_t r = 0; f->matrix && r < f->R; r++) f->row_mean[b] += ref_load(rows, b * f->R + r) / (double)f->R;
    }
}

/* Adafactor (Shazeer and Stern 2018), in the form of PyTorch or in the form of transformers. */
static void adafactor(const factored *f)
{
    const ps_attrs_adafactor_ *a = f->a;
    const ps_view *in = f->in;
    double t = (double)a->t, take = pow(t, a->beta2_decay), n = (double)in->numel, of_p = 0, of_u = 0;
    for (int64_t i = 0; i < in->numel; i++) of_p += ref_master_get(in, i) * ref_master_get(in, i);
    factored_averages(f, take);
    for (int64_t i = 0; i < in->numel; i++) of_u += factored_update(f, i) * factored_update(f, i);
    double rms = sqrt(of_p / n), divisor = ps_adafactor_divisor(sqrt(of_u / n) / a->d, a->hugging_face);
    double alpha = ps_adafactor_rate(a->t, a->lr, a->eps2, rms, a->hugging_face, a->scale_parameter, a->relative_step,
                                     a->warmup_init);
    double keep = 1 - a->weight_decay * (a->hugging_face ? alpha : a->lr);
    for (int64_t i = 0; i < in->numel; i++)
        ref_master_put(in, i, ref_master_get(in, i) * keep - alpha / divisor * factored_update(f, i));
}

static factored factored_of(const ps_call *call, int n)
{
    const ps_view *in = &call->in[n];
    factored f = { .a = call->attrs, .in = in, .batch = 1, .R = 1, .C = in->numel, .matrix = in->ndim > 1 };
    if (f.matrix && in->numel > 0)
        f.R = in->shape[in->ndim - 2], f.C = in->shape[in->ndim - 1], f.batch = in->numel / (f.R * f.C);
    return f;
}

/* Like ref_muon_, allocates the workspace of the largest tensor before the first tensor changes. If memory is short,
 * the call fails without any change, and can be repeated. */
int ref_adafactor_(ps_call *call)
{
    int64_t batch = 1;
    double *row_mean;
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        factored f = factored_of(call, n);
        if (f.batch > batch) batch = f.batch;
    }
    if (ref_scratch(call, batch, &row_mean) < 0) return PS_ENOMEM;
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        factored f = factored_of(call, n);
        f.row_mean = row_mean;
        if (f.in->numel > 0) adafactor(&f);
    }
    return 0;
}

/* -- Muon ---------------------------------------------------------------------------------------------------------- */
/* Computes dst [R, C] = alpha * a [R, K] * b [K, C] + beta * add [R, C]. If `turned` is set, b is [C, K], and the
 * transpose of b is used. */
static void product(double *dst, double alpha, const double *a, const double *b, bool turned, double beta,
                    const double *add, int64_t R, int64_t K, int64_t C)
{
    for (int64_t i = 0; i < R; i++)
        for (int64_t j = 0; j < C; j++) {
            double sum = 0;
            for (int64_t k = 0; k < K; k++) sum += a[i * K + k] * (turned ? b[j * K + k] : b[k * C + j]);
            dst[i * C + j] = alpha * sum + (add ? beta * add[i * C + j] : 0);
        }
}

/* Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"), computed in double. */
static void muon(const ps_attrs_muon_ *a, const ps_view *in, double *x, double *y, double *gram, double *poly)
{
    int64_t rows = in->shape[0], cols = in->shape[1], R = rows < cols ? rows : cols, C = rows < cols ? cols : rows;
    double sum = 0;
    for (int64_t i = 0; i < in->numel; i++) {
        double g = ref_load(&in[2], i) * a->grad_scale, m = ref_load(&in[3], i);
        m += (1 - a->momentum) * (g - m);
        ref_store(&in[3], i, m);
        double u = a->nesterov ? g + a->momentum * (m - g) : m;
        x[rows > cols ? i % cols * C + i / cols : i] = u;
        sum += u * u;
    }
    double norm = sqrt(sum);
    for (int64_t i = 0; i < in->numel; i++) x[i] /= norm > a->eps ? norm : a->eps;
    for (int k = 0; k < a->steps; k++) {
        product(gram, 1, x, x, true, 0, NULL, R, C, R);
        product(poly, a->c, gram, gram, false, a->b, gram, R, R, R);
        product(y, 1, poly, x, false, a->a, x, R, R, C);
        double *swap = x;
        x = y, y = swap;
    }
    double rate = a->lr * ps_muon_ratio(a->adjust, rows, cols), keep = 1 - a->lr * a->weight_decay;
    for (int64_t i = 0; i < in->numel; i++)
        ref_master_put(in, i, ref_master_get(in, i) * keep - rate * x[rows > cols ? i % cols * C + i / cols : i]);
}

int ref_muon_(ps_call *call)
{
    int64_t all = 1, square = 1;
    double *x, *y, *gram, *poly;
    for (int n = 0; n + 4 <= call->n_in; n += 4) {
        const int64_t *shape = call->in[n].shape;
        int64_t R = shape[0] < shape[1] ? shape[0] : shape[1];
        if (call->in[n].numel > all) all = call->in[n].numel;
        if (R * R > square) square = R * R;
    }
    if (ref_scratch(call, all, &x) < 0 || ref_scratch(call, all, &y) < 0 || ref_scratch(call, square, &gram) < 0 ||
        ref_scratch(call, square, &poly) < 0) return PS_ENOMEM;
    for (int n = 0; n + 4 <= call->n_in; n += 4)
        if (call->in[n].numel > 0) muon(call->attrs, &call->in[n], x, y, gram, poly);
    return 0;
}
