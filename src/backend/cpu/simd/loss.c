/* SPDX-License-Identifier: BSD-3-Clause
 * Softmax, log-softmax and cross-entropy over rows of fp32, bf16 or fp16. This file is compiled once per instruction
 * set. A row is processed in blocks that fit into the first-level cache. For each block, the kernel first finds the
 * maximum. It then computes the exponentials relative to the largest value of all blocks so far, and adds them to the
 * row's sum. If this block raises the largest value, the sum is first scaled to the new value. A row of up to KEEP
 * elements keeps its exponentials in fp32, so that each exponential is computed only once. If a row contains a NaN, its
 * results are NaN. No result depends on the number of threads, because rows are independent, and losses are added in
 * fp64 in the order of the rows. */
#define PS_ANY_LANES                    /* sums always have sixteen lanes (operand.h) */
#include "backend/cpu/simd/operand.h"

enum { BLOCK = 2048, KEEP = 1 << 16 };   /* BLOCK: number of elements in a block; KEEP: if a row has at most this number
                                          * of elements, its exponentials are stored, in at most 256 KiB of stack */

/* Computes e^x. The function is meant for x <= 0, and also works for positive x below 88. It splits x into n * ln2 + r,
 * and uses a polynomial of degree 5 in r. The relative error is below 2e-7 for x > -20. The terms in this range make up
 * most of the sum of a softmax. The result is 0 if x is below -86, and NaN if x is NaN. */
SIMD vf exp_below(vf x)
{
    const vf magic = vf_set(12582912.0f);                     /* adding 1.5 * 2^23 rounds to an integer */
    vf shifted = vf_fma(x, vf_set(1.44269504f), magic), n = shifted - magic;
    vf r = vf_fma(n, vf_set(-0.693147182f), x);
    vf p = vf_fma(vf_set(8.31243011e-3f), r, vf_set(4.18909872e-2f));
    p = vf_fma(p, r, vf_set(1.66671182e-1f));
    p = vf_fma(p, r, vf_set(4.99992259e-1f));
    p = vf_fma(p, r, vf_set(1.0f));
    p = vf_fma(p, r, vf_set(1.0f));
#if defined(__AVX512F__)
    __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-86.0f), _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(keep, (__m512)p, (__m512)n);
#else
    vf y = p * (vf)(((vu)shifted - (0x4b400000u - 127)) << 23);
    return (vf)(~(x < vf_set(-86.0f)) & (vi)y);
#endif
}
/* Sets m to the largest of n > 0 values. Floats are compared as integers, so that the compiler can use vectors, and so
 * that bf16 and fp16 values need no conversion. If all bits of negative floats except the sign are inverted, the
 * integers have the same order as the floats. A NaN counts as the largest or the smallest value, depending on its sign.
 * The pragma is needed because -O2 does not vectorise a loop of unknown length without it. */
#define PS_BLOCK_MAX(type, mask) \
    const type *p = (const type *)x + first; \
    type m = (type)(p[0] ^ ((p[0] < 0 ? -1 : 0) & mask)); \
    _Pragma("omp simd reduction(max : m)") \
    for (int64_t i = 0; i < n; i++) { \
        type v = (type)(p[i] ^ ((p[i] < 0 ? -1 : 0) & mask)); \
        m = v > m ? v : m; \
    } \
    m = (type)(m ^ ((m < 0 ? -1 : 0) & mask))

static float block_max_f32(const void *x, int64_t first, int64_t n)
{
    PS_BLOCK_MAX(int32_t, 0x7fffffff);
    return ps_bits_f32((uint32_t)m);
}
static float block_max_half(const void *x, int64_t first, int64_t n, int dtype)
{
    PS_BLOCK_MAX(int16_t, 0x7fff);
    uint16_t u = (uint16_t)m;
    return ps_get_one(&u, 0, dtype);
}
SIMD float block_max(const void *x, int64_t first, int64_t n, int dtype)
{
#if defined(__AVX512F__)
    if (dtype == PS_F32 && n <= PAIR) {
        vp u = vp_row_get(x, first, first + n, 0, -INFINITY, PS_F32);
        return _mm512_reduce_max_ps(_mm512_max_ps((__m512)u.a, (__m512)u.b));
    }
#endif
    return dtype == PS_F32 ? block_max_f32(x, first, n) : block_max_half(x, first, n, dtype);
}

/* Prefetches 2 * PAIR elements of the next block. Otherwise memory would limit the speed at which the maximum of the
 * next block is found. */
SIMD void fetch_next(const void *x, int64_t i, int dtype)
{
    __builtin_prefetch(ps_at(x, i + BLOCK, dtype));
    __builtin_prefetch(ps_at(x, i + BLOCK + PAIR, dtype));
    if (dtype != PS_F32) return;
    __builtin_prefetch(ps_at(x, i + BLOCK + PAIR / 2, dtype));
    __builtin_prefetch(ps_at(x, i + BLOCK + PAIR + PAIR / 2, dtype));
}
/* Returns the sum of e^(x - m) over n values. If `keep` is not NULL, stores the exponentials in `keep`, in the order of
 * pairs. For fp32, `keep` can be x. */
SIMD float block_exp(const void *x, int64_t first, int64_t n, float m, float *keep, int dtype)
{
    vf s0[PARTS] = { { 0 } }, s1[PARTS] = { { 0 } }, s2[PARTS] = { { 0 } }, s3[PARTS] = { { 0 } }, mm = vf_set(m);
    int64_t i = first, last = first + n;
    for (; i + 2 * PAIR <= last; i += 2 * PAIR) {
        fetch_next(x, i, dtype);
        EACH_PART(j) {
            vp u = vp_get(x, i, j, dtype), v = vp_get(x, i + PAIR, j, dtype);
            u.a = exp_below(u.a - mm), u.b = exp_below(u.b - mm), v.a = exp_below(v.a - mm), v.b = exp_below(v.b - mm);
            if (keep) vp_store(keep + i, j, u), vp_store(keep + i + PAIR, j, v);
            s0[j] += u.a, s1[j] += u.b, s2[j] += v.a, s3[j] += v.b;
        }
    }
    for (; i < last; i += PAIR) {
        vp e[PARTS];
        EACH_PART(j) {
            vp u = vp_row_get(x, i, last, j, -INFINITY, dtype);
            u.a = exp_below(u.a - mm), u.b = exp_below(u.b - mm);
            s0[j] += u.a, s1[j] += u.b, e[j] = u;
        }
        if (keep && dtype != PS_BF16) vp_row_put(keep, i, last, e, PS_F32);
        else if (keep) EACH_PART(j) vp_store(keep + i, j, e[j]);         /* for bf16, `keep` has space for whole
                                                                          * blocks of PAIR */
    }
    EACH_PART(j) s0[j] = (s0[j] + s1[j]) + (s2[j] + s3[j]);
    return sum_lanes(s0);
}

struct row {
    float max;                        /* largest element of the row, ignoring NaN */
    float before;                     /* largest of the elements before element `at`, an argument of scan_row; ignores
                                       * NaN */
    double sum;                       /* sum of e^(x - max) */
    float block_max[KEEP / BLOCK];    /* for each block, the value m in the stored exponentials e^(x - m) of the
                                       * block */
};
/* Returns a sum of exponentials relative to m as a sum relative to `top`. It is not inlined, so that the vectors of the
 * caller stay in registers. */
static __attribute__((noinline)) double rescaled(double sum, float m, float top)
{
    return sum == 0 ? 0.0 : sum * exp((double)m - top);
}
/* Computes the maximum and the sum of a row. Unless `at` is -1, also finds the largest of the elements before element
 * `at`. */
SIMD void scan_row(struct row *w, const void *x, int64_t V, float *keep, int64_t at, int dtype)
{
    float m = -INFINITY;
    w->sum = 0;
    w->before = -INFINITY;
    for (int64_t first = 0; first < V; first += BLOCK) {
        int64_t n = V - first < BLOCK ? V - first : BLOCK;
        float top = block_max(x, first, n, dtype);
        if (at >= first && at < first + n) {
            float part = at > first ? block_max(x, first, at - first, dtype) : -INFINITY;
            w->before = part > m ? part : m;
        }
        if (top > m) {
            w->sum = rescaled(w->sum, m, top);
            m = top;
        }
        float base = m == -INFINITY ? 0.0f : m;              /* if all elements so far are -infinity, the exponentials
                                                              * are 0 for every base */
        if (keep) w->block_max[first / BLOCK] = base;
        w->sum += block_exp(x, first, n, base, keep, dtype);
    }
    w->max = m;
}
/* Returns true if `logit` is the first of the row's largest elements. The caller must have passed the position of
 * `logit` to scan_row as `at`. */
SIMD bool is_hit(const struct row *w, float logit)
{
    return logit == w->max && w->before < logit && w->sum == w->sum && logit < INFINITY;
}
/* Returns the factor by which the stored exponentials of block b must be multiplied to make them relative to the
 * maximum of the row. */
static double block_factor(const struct row *w, int64_t b)
{
    float base = w->block_max[b];
    return base == w->max ? 1.0 : base < w->max ? exp((double)base - w->max) : 0.0;
}

/* Computes y = f * keep for the elements [i, end). There are at most PAIR of these elements. */
SIMD void scale_pair(void *y, const float *keep, int64_t i, int64_t end, vf f, int dtype)
{
    vp e[PARTS];
    EACH_PART(j) {
        e[j] = dtype == PS_BF16 ? vp_load(keep + i, j) : vp_row_get(keep, i, end, j, 0.0f, PS_F32);
        e[j].a *= f, e[j].b *= f;
    }
    vp_row_put(y, i, end, e, dtype);
}
SIMD void block_scale(void *y, const float *keep, int64_t first, int64_t n, float factor, int dtype)
{
    vf f = vf_set(factor);
    int64_t i = first, last = first + n;
    for (; i + PAIR <= last; i += PAIR) scale_pair(y, keep, i, i + PAIR, f, dtype);
    if (i < last) scale_pair(y, keep, i, last, f, dtype);
}
/* Computes y = e^(x - m) * f for the elements [i, end). There are at most PAIR of these elements. y can be x. */
SIMD void exp_pair(void *y, const void *x, int64_t i, int64_t end, vf m, vf f, int dtype)
{
    vp e[PARTS];
    EACH_PART(j) {
        vp u = vp_row_get(x, i, end, j, 0.0f, dtype);
        e[j].a = exp_below(u.a - m) * f, e[j].b = exp_below(u.b - m) * f;
    }
    vp_row_put(y, i, end, e, dtype);
}
SIMD void row_exp(void *y, const void *x, int64_t V, float base, float factor, int dtype)
{
    vf f = vf_set(factor), m = vf_set(base);
    int64_t i = 0;
    for (; i + PAIR <= V; i += PAIR) exp_pair(y, x, i, i + PAIR, m, f, dtype);
    if (i < V) exp_pair(y, x, i, V, m, f, dtype);
}
/* Computes y = softmax(x) * scale. y can be x. Returns the log-sum-exp of the row. `keep` is memory for V floats, or
 * NULL. For fp32, `keep` can be y. If want >= 0, sets *at to element `want` of y in fp32, and sets *hit to true if this
 * element is the first of the largest elements. */
SIMD double softmax_row(void *y, const void *x, int64_t V, float *keep, float scale, int64_t want, float *at, bool *hit,
                        int dtype)
{
    struct row w;
    float logit = want >= 0 ? ps_get_one(x, want, dtype) : 0;
    scan_row(&w, x, V, keep, want, dtype);
    if (want >= 0) *hit = is_hit(&w, logit);
    double lse = (double)w.max + log(w.sum), factor = scale / w.sum;
    if (!keep) {
        if (want >= 0) *at = (float)(exp((double)ps_get_one(x, want, dtype) - w.max) * factor);
        row_exp(y, x, V, w.max, (float)factor, dtype);
        return lse;
    }
    if (want >= 0) *at = keep[pair_place(want, dtype)] * (float)(factor * block_factor(&w, want / BLOCK));
    for (int64_t first = 0; first < V; first += BLOCK) {
        float f = (float)(factor * block_factor(&w, first / BLOCK));
        block_scale(y, keep, first, V - first < BLOCK ? V - first : BLOCK, f, dtype);
    }
    return lse;
}

/* -- a row of logits to its gradient, in place (cpu.h) ----------------------------------------------------------- */
SIMD float loss_row(void *logits, int64_t V, int64_t target, float scale, int want_grad, float *keep, bool *hit,
                    int dtype)
{
    float logit = ps_get_one(logits, target, dtype), p = 0;
    if (!want_grad) {
        struct row w;
        scan_row(&w, logits, V, NULL, target, dtype);
        *hit = is_hit(&w, logit);
        return (float)((double)w.max - logit + log(w.sum));
    }
    double lse = softmax_row(logits, logits, V, keep, scale, target, &p, hit, dtype);
    ps_put_one(logits, target, dtype, p - scale);
    return (float)(lse - logit);
}
static __attribute__((noinline)) float loss_row_half(void *logits, int dtype, int64_t V, int64_t target, float scale,
                                                     int want_grad, bool *hit)
{
    float keep[KEEP] __attribute__((aligned(64)));
    float *k = V <= KEEP ? keep : NULL;
    return dtype == PS_BF16 ? loss_row(logits, V, target, scale, want_grad, k, hit, PS_BF16)
                            : loss_row(logits, V, target, scale, want_grad, k, hit, PS_F16);
}
float PS_ISA_FN(ps_cpu_loss_row)(void *logits, int dtype, int64_t V, int64_t target, float scale, int want_grad,
                                 bool *hit)
{
    *hit = false;
    if (target < 0) {
        if (want_grad) memset(logits, 0, (size_t)(V * ps_dtype_bytes(dtype)));
        return 0.0f;
    }
    if (dtype != PS_F32) return loss_row_half(logits, dtype, V, target, scale, want_grad, hit);
    return loss_row(logits, V, target, scale, want_grad, V <= KEEP ? logits : NULL, hit, PS_F32);
}

/* -- softmax ----------------------------------------------------------------------------------------------------- */
static __attribute__((noinline)) void softmax_half(void *y, const void *x, int64_t V, int dtype)
{
    float keep[KEEP] __attribute__((aligned(64)));
    float *k = V <= KEEP ? keep : NULL;
    if (dtype == PS_BF16) softmax_row(y, x, V, k, 1.0f, -1, NULL, NULL, PS_BF16);
    else softmax_row(y, x, V, k, 1.0f, -1, NULL, NULL, PS_F16);
}
static void softmax_any(void *y, const void *x, int64_t V, int dtype)
{
    if (dtype == PS_F32) softmax_row(y, x, V, V <= KEEP ? y : NULL, 1.0f, -1, NULL, NULL, PS_F32);
    else softmax_half(y, x, V, dtype);
}
SIMD void log_pair(void *y, const void *x, int64_t i, int64_t end, vf m, vf l, int dtype)
{
    vp out[PARTS];
    EACH_PART(j) {
        vp u = vp_row_get(x, i, end, j, 0.0f, dtype);
        out[j].a = (u.a - m) - l, out[j].b = (u.b - m) - l;
    }
    vp_row_put(y, i, end, out, dtype);
}
SIMD void log_softmax_body(void *y, const void *x, int64_t V, int dtype)
{
    struct row w;
    scan_row(&w, x, V, NULL, -1, dtype);
    vf m = vf_set(w.max), l = vf_set((float)log(w.sum));     /* subtracted one after the other, because x - max is exact
                                                              * where this matters */
    int64_t i = 0;
    for (; i + PAIR <= V; i += PAIR) log_pair(y, x, i, i + PAIR, m, l, dtype);
    if (i < V) log_pair(y, x, i, V, m, l, dtype);
}
static void log_softmax_any(void *y, const void *x, int64_t V, int dtype)
{
    PS_BY_VEC(dtype, log_softmax_body, y, x, V);
}

static bool usable(const ps_view *v) { return is_lane_type(v->dtype) && view_flat(v); }

/* Calls row(y, x, V, dtype) for each row. */
static int by_row(ps_call *call, void (*row)(void *, const void *, int64_t, int))
{
    const ps_view *x = &call->in[0];
    ps_view *y = &call->out[0];
    int64_t V = ps_last_dim(x);
    if (!usable(x) || !usable(y) || x->dtype != y->dtype) return PS_EUNSUP;
    if (x->numel == 0) return 0;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < x->numel / V; r++)
        row(ps_at(y->data, r * V, y->dtype), ps_at(x->data, r * V, x->dtype), V, x->dtype);
    return 0;
}
static int softmax(ps_call *call) { return by_row(call, softmax_any); }
static int log_softmax(ps_call *call) { return by_row(call, log_softmax_any); }

/* Computes dx = y * (dy - sum(y * dy)), or dx = dy - exp(y) * sum(dy) for log-softmax. */
SIMD void slope_sums(const void *y, const void *dy, int64_t i, int64_t end, vf *s0, vf *s1, int log_form, int dtype)
{
    EACH_PART(j) {
        vp d = vp_row_get(dy, i, end, j, 0.0f, dtype);
        if (log_form) {
            s0[j] += d.a, s1[j] += d.b;
        } else {
            vp u = vp_row_get(y, i, end, j, 0.0f, dtype);
            s0[j] = vf_fma(u.a, d.a, s0[j]), s1[j] = vf_fma(u.b, d.b, s1[j]);
        }
    }
}
SIMD void slope_pair(void *dx, const void *y, const void *dy, int64_t i, int64_t end, vf s, int log_form, int dtype)
{
    vp out[PARTS];
    EACH_PART(j) {
        vp d = vp_row_get(dy, i, end, j, 0.0f, dtype), u = vp_row_get(y, i, end, j, 0.0f, dtype);
        if (log_form) {
            u.a = vf_fma(vf_zero() - exp_below(u.a), s, d.a);
            u.b = vf_fma(vf_zero() - exp_below(u.b), s, d.b);
        } else {
            u.a = u.a * (d.a - s), u.b = u.b * (d.b - s);
        }
        out[j] = u;
    }
    vp_row_put(dx, i, end, out, dtype);
}
SIMD void backward_row(void *dx, const void *y, const void *dy, int64_t V, int log_form, int dtype)
{
    vf s0[PARTS] = { { 0 } }, s1[PARTS] = { { 0 } };
    int64_t i = 0;
    for (; i + PAIR <= V; i += PAIR) slope_sums(y, dy, i, i + PAIR, s0, s1, log_form, dtype);
    if (i < V) slope_sums(y, dy, i, V, s0, s1, log_form, dtype);
    EACH_PART(j) s0[j] += s1[j];
    vf s = vf_set(sum_lanes(s0));
    for (i = 0; i + PAIR <= V; i += PAIR) slope_pair(dx, y, dy, i, i + PAIR, s, log_form, dtype);
    if (i < V) slope_pair(dx, y, dy, i, V, s, log_form, dtype);
}
static int backward(ps_call *call, int log_form)
{
    const ps_view *y = &call->in[0], *dy = &call->in[1];
    ps_view *dx = &call->out[0];
    int64_t V = ps_last_dim(y);
    if (!usable(y) || !usable(dy) || !usable(dx) || y->dtype != dy->dtype || y->dtype != dx->dtype) return PS_EUNSUP;
    if (y->numel == 0) return 0;
#pragma omp parallel for schedule(static) if (y->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < y->numel / V; r++) {
        int64_t at = r * V;
        if (log_form)
            PS_BY_VEC(y->dtype, backward_row, ps_at(dx->data, at, y->dtype), ps_at(y->data, at, y->dtype),
                      ps_at(dy->data, at, y->dtype), V, 1);
        else
            PS_BY_VEC(y->dtype, backward_row, ps_at(dx->data, at, y->dtype), ps_at(y->data, at, y->dtype),
                      ps_at(dy->data, at, y->dtype), V, 0);
    }
    return 0;
}
static int softmax_backward(ps_call *call) { return backward(call, 0); }
static int log_softmax_backward(ps_call *call) { return backward(call, 1); }

/* -- cross-entropy ----------------------------------------------------------------------------------------------- */
/* Returns the number of rows that are not ignored. Returns PS_ERANGE if a target is neither a class nor
 * ignore_index. */
static int64_t count_targets(const ps_view *target, int64_t V, int64_t ignore_index)
{
    int64_t count = 0;
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ps_index_at(target, r);
        if (t == ignore_index) continue;
        if (t < 0 || t >= V)
            return ps_fail(PS_ERANGE, "target %lld at position %lld is outside [0, %lld) and is not ignore_index %lld",
                           (long long)t, (long long)r, (long long)V, (long long)ignore_index);
        count++;
    }
    return count;
}
/* Sets *lse to the log-sum-exp of a row. Sets *hit to true if `target` is the first of the row's largest elements. If
 * target is -1, *hit is false, and the function saves the search for earlier elements of the same size. */
SIMD void lse_row(const void *x, int64_t V, int64_t target, double *lse, bool *hit, int dtype)
{
    struct row w;
    scan_row(&w, x, V, NULL, target, dtype);
    *lse = (double)w.max + log(w.sum);
    *hit = target >= 0 && is_hit(&w, ps_get_one(x, target, dtype));
}
static int cross_entropy(ps_call *call)
{
    const struct ps_attrs_cross_entropy *a = call->attrs;
    const ps_view *x = &call->in[0], *target = &call->in[1];
    ps_view *loss = &call->out[0], *lse = &call->out[1];
    int64_t V = ps_last_dim(x), rows = target->numel, hits = 0;
    if (V == 0 || !usable(x) || !ps_is_index(target) || !view_flat(target) || loss->dtype != PS_F32 ||
        !view_flat(loss) || (ps_has(lse) && (lse->dtype != PS_F32 || !view_flat(lse))))
        return PS_EUNSUP;
    int64_t count = call->dry ? 0 : count_targets(target, V, a->ignore_index);
    if (count < 0) return (int)count;
    double *each = call->scratch(call, (size_t)(rows + 1) * sizeof *each);   /* one loss per row */
    if (!each) return PS_ENOMEM;
    if (call->dry) return 0;
#pragma omp parallel for schedule(static) reduction(+ : hits) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < rows; r++) {
        const void *row = ps_at(x->data, r * V, x->dtype);
        int64_t t = ps_index_at(target, r);
        double l;
        bool hit;
        PS_BY_VEC(x->dtype, lse_row, row, V, t == a->ignore_index || !a->want_hits ? -1 : t, &l, &hit);
        hits += hit;
        if (ps_has(lse)) ((float *)lse->data)[r] = (float)l;
        each[r] = t == a->ignore_index ? 0.0 : l - ps_get_one(row, t, x->dtype);
    }
    float *out = loss->data;
    double sum = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (a->reduction == 0) out[r] = (float)each[r];
        sum += each[r];
    }
    /* If all rows are ignored, the mean is 0. */
    if (a->reduction != 0) out[0] = (float)(a->reduction == 1 && count > 0 ? sum / (double)count : sum);
    if (a->want_hits && ps_has(&call->out[2])) {
        int64_t *told = call->out[2].data;
        told[0] = hits, told[1] = count;
    }
    return 0;
}
/* -- negative log-likelihood: the rows of log-probabilities are only read at the targets --------------------------- */
static double weight_of(const ps_view *weight, int64_t t)
{
    return ps_has(weight) ? (double)ps_get_one(weight->data, t, weight->dtype) : 1;
}

/* Returns the divisor of the mean: the sum of the weights of all targets that are not ignored. If the sum is 0, returns
 * 1. */
static double divisor_of(const ps_view *target, const ps_view *weight, int64_t count, int64_t ignore)
{
    double sum = 0;
    if (!ps_has(weight)) return count > 0 ? (double)count : 1;
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ps_index_at(target, r);
        if (t != ignore) sum += weight_of(weight, t);
    }
    return sum == 0 ? 1 : sum;
}

static int nll_loss(ps_call *call)
{
    const struct ps_attrs_nll_loss *a = call->attrs;
    const ps_view *x = &call->in[0], *target = &call->in[1], *weight = &call->in[2], *loss = &call->out[0];
    int64_t V = ps_last_dim(x);
    if (!usable(x) || !view_flat(target) || !view_flat(loss) || (ps_has(weight) && !view_flat(weight)))
        return PS_EUNSUP;
    int64_t count = count_targets(target, V, a->ignore_index);
    if (count < 0) return (int)count;
    double sum = 0;
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ps_index_at(target, r);
        double one = t == a->ignore_index ? 0 : -ps_get_one(x->data, r * V + t, x->dtype) * weight_of(weight, t);
        if (a->reduction == 0) ps_put_one(loss->data, r, loss->dtype, (float)one);
        sum += one;
    }
    if (a->reduction == 1) sum /= divisor_of(target, weight, count, a->ignore_index);
    if (a->reduction != 0) ps_put_one(loss->data, 0, loss->dtype, (float)sum);
    return 0;
}

static int nll_loss_backward(ps_call *call)
{
    const struct ps_attrs_nll_loss_backward *a = call->attrs;
    const ps_view *target = &call->in[0], *dloss = &call->in[1], *weight = &call->in[2], *dx = &call->out[0];
    int64_t V = a->classes, size = ps_dtype_bytes(dx->dtype);
    if (!usable(dx) || !usable(dloss) || !view_flat(target) || (ps_has(weight) && !view_flat(weight))) return PS_EUNSUP;
    int64_t count = count_targets(target, V, a->ignore_index);
    if (count < 0) return (int)count;
    double divisor = a->reduction == 1 ? divisor_of(target, weight, count, a->ignore_index) : 1;
#pragma omp parallel for schedule(static) if (dx->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < target->numel; r++) {
        int64_t t = ps_index_at(target, r);
        memset((char *)dx->data + r * V * size, 0, (size_t)(V * size));
        if (t == a->ignore_index) continue;
        double slope = ps_get_one(dloss->data, a->reduction == 0 ? r : 0, dloss->dtype) / divisor;
        ps_put_one(dx->data, r * V + t, dx->dtype, (float)(-slope * weight_of(weight, t)));
    }
    return 0;
}

SIMD void ce_backward_row(void *dx, const void *x, int64_t V, int64_t target, float lse, float scale, int dtype)
{
    float p = (float)exp((double)ps_get_one(x, target, dtype) - lse);
    row_exp(dx, x, V, lse, scale, dtype);
    ps_put_one(dx, target, dtype, (p - 1.0f) * scale);
}
static int cross_entropy_backward(ps_call *call)
{
    const struct ps_attrs_cross_entropy_backward *a = call->attrs;
    const ps_view *x = &call->in[0], *target = &call->in[1], *lse = &call->in[2], *dloss = &call->in[3];
    ps_view *dx = &call->out[0];
    int64_t V = ps_last_dim(x), rows = target->numel;
    if (V == 0 || !usable(x) || !usable(dx) || dx->dtype != x->dtype || !ps_is_index(target) || !view_flat(target) ||
        lse->dtype != PS_F32 || !view_flat(lse) || dloss->dtype != PS_F32 || !view_flat(dloss))
        return PS_EUNSUP;
    int64_t count = count_targets(target, V, a->ignore_index);
    if (count < 0) return (int)count;
    const float *given = dloss->data, *l = lse->data;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < rows; r++) {
        int64_t t = ps_index_at(target, r);
        void *to = ps_at(dx->data, r * V, x->dtype);
        float scale = a->reduction == 0 ? given[r] : a->reduction == 1 ? given[0] / (float)count : given[0];
        if (scale != scale) scale = NAN;                     /* the canonical NaN (vp_put) */
        if (t == a->ignore_index) memset(to, 0, (size_t)(V * ps_dtype_bytes(x->dtype)));
        else PS_BY_VEC(x->dtype, ce_backward_row, to, ps_at(x->data, r * V, x->dtype), V, t, l[r], scale);
    }
    return 0;
}

/* -- a vocabulary that ranks share: a rank has the logits of `words` words, starting at word `first` --------------- */
static double dot_mass(const void *x, const float *mass, int64_t words, int dtype)
{
    double sum = 0;
    for (int64_t v = 0; v < words; v++) sum += (double)mass[v] * (double)ps_get_one(x, v, dtype);
    return sum;
}
/* t is the column of the target, or -1 if the target is not in this part of the vocabulary. */
SIMD void top_and_sum(const void *x, int64_t words, int64_t t, float *top, float *sum, int dtype)
{
    struct row w;
    scan_row(&w, x, words, NULL, t, dtype);
    *top = w.max;
    *sum = (float)(t >= 0 && is_hit(&w, ps_get_one(x, t, dtype)) ? -w.sum : w.sum);
}
static bool same_rows(const ps_view *x, const ps_view *target, const ps_view *mass)
{
    return usable(x) && ps_is_index(target) && view_flat(target) &&
           (!ps_has(mass) || (mass->dtype == PS_F32 && view_flat(mass)));
}
static int logit_stats(ps_call *call)
{
    const struct ps_attrs_logit_stats *a = call->attrs;
    const ps_view *x = &call->in[0], *target = &call->in[1], *mass = &call->in[2];
    int64_t N = x->shape[0], V = x->shape[1];
    if (!same_rows(x, target, mass) || call->out[0].dtype != PS_F32 || !view_flat(&call->out[0])) return PS_EUNSUP;
    float *stats = call->out[0].data;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < N; r++) {
        const void *row = ps_at(x->data, r * V, x->dtype);
        int64_t t = ps_index_at(target, r) - a->first;
        if (t < 0 || t >= a->words) t = -1;
        PS_BY_VEC(x->dtype, top_and_sum, row, a->words, t, &stats[r], &stats[N + r]);
        stats[2 * N + r] = t >= 0 ? ps_get_one(row, t, x->dtype) : 0.0f;
        if (ps_has(mass)) stats[3 * N + r] = (float)dot_mass(row, mass->data, a->words, x->dtype);
    }
    return 0;
}

/* The combined statistics of a row, from the stats [t, kinds, N] of all ranks. `hit` is true if the target's logit is
 * the first of the largest logits. */
struct all_words { double top, sum, target, dot; bool hit; };
static struct all_words of_all(const ps_view *stats, int64_t r)
{
    int64_t kinds = stats->shape[1], N = stats->shape[2];
    struct all_words s = { -INFINITY, 0, 0, 0, false };
    bool first = true;                                       /* true if no earlier rank has the largest logit */
    for (int64_t i = 0; i < stats->shape[0]; i++) {
        const float *mine = (const float *)stats->data + i * kinds * N + r;
        s.top = mine[0] > s.top ? mine[0] : s.top;
    }
    for (int64_t i = 0; i < stats->shape[0]; i++) {
        const float *mine = (const float *)stats->data + i * kinds * N + r;
        s.sum += fabsf(mine[N]) * exp(mine[0] - s.top);
        if (mine[0] == s.top) {
            if (first) s.hit = mine[N] < 0;
            first = false;
        }
        s.target += mine[2 * N];
        if (kinds == 4) s.dot += mine[3 * N];
    }
    if (s.sum != s.sum) s.hit = false;
    return s;
}
/* Computes the gradient y of x. y can be x. t is the column of the target, or -1 if the target is not in this part of
 * the vocabulary. */
SIMD void logit_row(void *y, const void *x, int64_t words, int64_t t, const struct all_words *s, const float *share,
                    const float *mass, int dtype)
{
    double factor = share[0] / s->sum;
    float f = (float)factor, at = 0;
    if (f != f) f = NAN;                                     /* the canonical NaN (vp_put) */
    if (t >= 0) {
        double m = mass ? (double)share[2] * (double)mass[t] : 0;
        at = (float)(exp((double)ps_get_one(x, t, dtype) - s->top) * factor - share[1] - m);
    }
    row_exp(y, x, words, (float)s->top, f, dtype);
    for (int64_t v = 0; mass && v < words; v++)
        ps_put_one(y, v, dtype, ps_get_one(y, v, dtype) - share[2] * mass[v]);
    if (t >= 0) ps_put_one(y, t, dtype, at == at ? at : NAN);
}
static int logit_loss(ps_call *call)
{
    const struct ps_attrs_logit_loss *a = call->attrs;
    const ps_view *x = &call->in[0], *target = &call->in[1], *stats = &call->in[2], *share = &call->in[3];
    const ps_view *mass = &call->in[4], *loss = &call->out[0], *dx = &call->out[1];
    int64_t N = x->shape[0], V = x->shape[1], next = share->stride[0];
    int32_t *hits = a->want_hits && ps_has(&call->out[2]) ? call->out[2].data : NULL;
    if (!same_rows(x, target, mass) || stats->dtype != PS_F32 || !view_flat(stats) || share->dtype != PS_F32 ||
        loss->dtype != PS_F32 || !view_flat(loss) || (ps_has(dx) && (!usable(dx) || dx->dtype != x->dtype)))
        return PS_EUNSUP;
    int64_t nbytes = V * ps_dtype_bytes(x->dtype);
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < N; r++) {
        const float *from = (const float *)share->data + r;
        float of[3] = { from[0], from[next], from[2 * next] };
        struct all_words s = of_all(stats, r);
        bool counts = of[0] != 0 || of[1] != 0 || of[2] != 0;
        double l = of[0] * (s.top + log(s.sum)) - of[1] * s.target - of[2] * s.dot;
        ((float *)loss->data)[r] = counts ? (float)l : 0.0f;
        if (hits) hits[r] = counts && s.hit, hits[N + r] = counts;
        if (!ps_has(dx)) continue;
        for (int i = 0; i < 3; i++) of[i] *= (float)a->dloss;
        char *to = ps_at(dx->data, r * V, x->dtype);
        int64_t t = ps_index_at(target, r) - a->first, here = a->words * ps_dtype_bytes(x->dtype);
        if (counts)
            PS_BY_VEC(x->dtype, logit_row, to, ps_at(x->data, r * V, x->dtype), a->words,
                      t >= 0 && t < a->words ? t : -1, &s, of, ps_has(mass) ? mass->data : NULL);
        else here = 0;
        memset(to + here, 0, (size_t)(nbytes - here));
    }
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_loss)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_loss)(ps_kernel *k)
{
    k[PS_OP_softmax] = softmax;
    k[PS_OP_log_softmax] = log_softmax;
    k[PS_OP_softmax_backward] = softmax_backward;
    k[PS_OP_log_softmax_backward] = log_softmax_backward;
    k[PS_OP_nll_loss] = nll_loss;
    k[PS_OP_nll_loss_backward] = nll_loss_backward;
    k[PS_OP_cross_entropy] = cross_entropy;
    k[PS_OP_cross_entropy_backward] = cross_entropy_backward;
    k[PS_OP_logit_stats] = logit_stats;
    k[PS_OP_logit_loss] = logit_loss;
}
