/* SPDX-License-Identifier: BSD-3-Clause
 * Three groups of kernels: optimizers that process lists of tensors in one pass over memory, sums of squares, and
 * copies of gradients that also compute their sums of squares. This file is compiled once per instruction set.
 * ref/optim.c has the formulas and their sources.
 * Invariants: The update of an element depends only on that element. The update uses explicit fused multiply-adds, IEEE
 * division and square root, and scalars that are computed once per call. It keeps denormals. Hence the bits are the
 * same for every instruction set and number of threads. An element is read before it is written, so operands can share
 * memory (for example master and param, or grad and param). */
#define PS_ANY_LANES                    /* sums of squares always have SUMS lanes */
#include "backend/cpu/simd/operand.h"
#include "backend/cpu/simd/optim_list.h"

/* -- Adam -------------------------------------------------------------------------------------------------------- */
struct adam { float scale, l2, keep, b1, b2, omb1, omb2, inv_sqrt_bias2, eps, step; int has_l2; };

SIMD void adam_step(const struct adam *h, vf g, vf *p, vf *m, vf *v)
{
    g = g * h->scale;
    if (h->has_l2) g = vf_fma(vf_set(h->l2), *p, g);
    *p = *p * h->keep;                                       /* without decoupled decay, keep is 1, and the product is
                                                              * exact */
    *m = vf_fma(vf_set(h->b1), *m, g * h->omb1);
    *v = vf_fma(vf_set(h->b2), *v, (g * h->omb2) * g);
    vf denominator = vf_fma(vf_sqrt(*v), vf_set(h->inv_sqrt_bias2), vf_set(h->eps));
    *p = vf_fma(vf_set(-h->step), *m / denominator, *p);
}
SIMD void adam_at(const struct adam *h, const struct item *it, int64_t i, int form, int grad_dtype)
{
    float *of_m = (float *)it->state[0] + i, *of_v = (float *)it->state[1] + i;
    vf g = vf_get(it->grad, i, grad_dtype), p = master_get(it, i, form), m = vf_load(of_m), v = vf_load(of_v);
    adam_step(h, g, &p, &m, &v);
    vf_store(of_m, m);
    vf_store(of_v, v);
    master_put(it, i, p, form);
}
PS_SPAN(adam, 4, 4)
static int adam(ps_call *call)
{
    const struct ps_attrs_adam_ *a = call->attrs;
    struct work w;
    if (!collect_alike(call, 5, PS_F32, &w)) return PS_EUNSUP;
    struct adam h = { .scale = (float)a->grad_scale, .l2 = (float)a->weight_decay,
                      .has_l2 = !a->adamw && (float)a->weight_decay != 0,
                      .keep = a->adamw ? (float)(1 - a->lr * a->weight_decay) : 1.0f, .b1 = (float)a->beta1,
                      .b2 = (float)a->beta2, .omb1 = (float)(1 - a->beta1), .omb2 = (float)(1 - a->beta2),
                      .inv_sqrt_bias2 = (float)(1 / sqrt(a->bias2)), .eps = (float)a->eps,
                      .step = (float)(a->lr / a->bias1) };
    run_work(&w, &h, adam_span);
    return 0;
}

/* -- schedule-free AdamW ------------------------------------------------------------------------------------------ */
struct schedule_free { float scale, wd, b2, c2, inv, eps, average, toward, lr; int has_wd, first; };

SIMD void schedule_free_at(const struct schedule_free *h, const struct item *it, int64_t i, int form, int grad_dtype)
{
    float *of_z = (float *)it->state[0] + i, *of_v = (float *)it->state[1] + i;
    vf p = master_get(it, i, form), g = vf_get(it->grad, i, grad_dtype) * h->scale, z = h->first ? p : vf_load(of_z);
    vf v = vf_fma(vf_set(h->b2), vf_load(of_v), (g * h->c2) * g);
    vf u = g / vf_fma(vf_sqrt(v), vf_set(h->inv), vf_set(h->eps));
    if (h->has_wd) u = vf_fma(vf_set(h->wd), p, u);
    vf_store(of_z, vf_fma(vf_set(-h->lr), u, z));
    vf_store(of_v, v);
    master_put(it, i, vf_fma(vf_set(h->toward), u, vf_fma(vf_set(h->average), z - p, p)), form);
}
PS_SPAN(schedule_free, 4, 4)
static int schedule_free(ps_call *call)
{
    const struct ps_attrs_adam_schedule_free_ *a = call->attrs;
    struct work w;
    if (!collect_alike(call, 5, PS_F32, &w)) return PS_EUNSUP;
    struct schedule_free h = { .scale = (float)a->grad_scale, .wd = (float)a->weight_decay, .b2 = (float)a->beta2,
                               .c2 = (float)(1 - a->beta2), .inv = (float)(1 / sqrt(a->bias2)), .eps = (float)a->eps,
                               .average = (float)a->average, .lr = (float)a->lr,
                               .toward = (float)(a->lr * (a->beta1 * (1 - a->average) - 1)),
                               .has_wd = (float)a->weight_decay != 0, .first = a->t == 1 };
    run_work(&w, &h, schedule_free_span);
    return 0;
}

/* Moves the master towards `end`. The caller passes `end` in place of the gradient. */
struct lerp { float weight; int near; };

SIMD void lerp_at(const struct lerp *h, const struct item *it, int64_t i, int form, int end_dtype)
{
    vf p = master_get(it, i, form), end = vf_get(it->grad, i, end_dtype);
    master_put(it, i, vf_fma(vf_set(h->weight), end - p, h->near ? p : end), form);
}
PS_SPAN(lerp, 0, 0)
static int master_lerp(ps_call *call)
{
    const struct ps_attrs_master_lerp_ *a = call->attrs;
    struct work w;
    if (!collect_any(call, 3, &w)) return PS_EUNSUP;
    bool near = fabs(a->weight) < 0.5;
    struct lerp h = { .weight = (float)(near ? a->weight : a->weight - 1), .near = near };
    run_work(&w, &h, lerp_span);
    return 0;
}

/* -- SGD --------------------------------------------------------------------------------------------------------- */
struct sgd { float scale, l2, momentum, take, lr; int has_l2, has_momentum, nesterov, first; };

SIMD void sgd_step(const struct sgd *h, vf g, vf *p, vf *m)
{
    g = g * h->scale;
    if (h->has_l2) g = vf_fma(vf_set(h->l2), *p, g);
    if (h->has_momentum) {
        *m = h->first ? g : vf_fma(vf_set(h->momentum), *m, g * h->take);
        g = h->nesterov ? vf_fma(vf_set(h->momentum), *m, g) : *m;
    }
    *p = vf_fma(vf_set(-h->lr), g, *p);
}
SIMD void sgd_at(const struct sgd *h, const struct item *it, int64_t i, int form, int grad_dtype)
{
    float *of_m = (float *)it->state[0] + i;
    vf g = vf_get(it->grad, i, grad_dtype), p = master_get(it, i, form);
    vf m = h->has_momentum ? vf_load(of_m) : vf_zero();
    sgd_step(h, g, &p, &m);
    if (h->has_momentum) vf_store(of_m, m);
    master_put(it, i, p, form);
}
PS_SPAN(sgd, h->has_momentum ? 4 : 0, 0)
static int sgd(ps_call *call)
{
    const struct ps_attrs_sgd_ *a = call->attrs;
    struct work w;
    if (!collect_alike(call, 4, PS_F32, &w)) return PS_EUNSUP;
    struct sgd h = { .scale = (float)a->grad_scale, .l2 = (float)a->weight_decay, .momentum = (float)a->momentum,
                     .take = (float)(1 - a->dampening), .lr = (float)a->lr, .has_l2 = (float)a->weight_decay != 0,
                     .has_momentum = (float)a->momentum != 0, .nesterov = a->nesterov, .first = a->first };
    run_work(&w, &h, sgd_span);
    return 0;
}

/* -- sums of squares --------------------------------------------------------------------------------------------- */
/* Sums are computed in fp64, in vectors of the machine's width. There are SUMS sums. Each element of a group of 32
 * elements is added to a different sum. */
enum { SUMS = 32, VD = VL / 2 };
typedef double vd __attribute__((vector_size(VD * 8)));

SIMD void add_squares(vf x, vd *s)
{
#if defined(__AVX512F__)
    vd low = (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
    vd high = (vd)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)x, 1)));
#elif PS_LANES == 8
    vd low = (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
    vd high = (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#elif defined(PS_SSE2)
    vd low = (vd)_mm_cvtps_pd((__m128)x), high = (vd)_mm_cvtps_pd(_mm_movehl_ps((__m128)x, (__m128)x));
#else
    vd low, high;
    for (int i = 0; i < VD; i++) low[i] = x[i], high[i] = x[VD + i];
#endif
    s[0] += low * low;
    s[1] += high * high;
}
/* Computes the sum of squares of up to UNIT elements, in fp64. */
SIMD void unit_squares(const void *x, int64_t first, int64_t last, double *out, int dtype)
{
    vd s[SUMS / VD] = { { 0 } };
    double t[SUMS / 4];
    int64_t i = first;
    for (; i + SUMS <= last; i += SUMS)
        _Pragma("GCC unroll 8")
        for (int k = 0; k < SUMS; k += VL) add_squares(vf_get(x, i + k, dtype), s + k / VD);
    for (; i < last; i += 16)                                /* the remaining elements are added to the first sixteen
                                                              * sums */
        _Pragma("GCC unroll 4")
        for (int k = 0; k < 16; k += VL) {
            int64_t n = last - i - k < VL ? last - i - k : VL;
            if (n > 0) add_squares(vf_get_n(x, i + k, dtype, (int)n, 0.0f), s + k / VD);
        }
    enum { EACH = SUMS / 4 / VD };
    for (int k = 0; k < EACH; k++) s[k] = (s[k] + s[EACH + k]) + (s[2 * EACH + k] + s[3 * EACH + k]);
    memcpy(t, s, sizeof t);
    *out = ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}
static int sq_norms(ps_call *call)
{
    ps_view *y = &call->out[0];
    struct work w = { .n = call->n_in };
    if (y->dtype != PS_F64 || !view_flat(y)) return PS_EUNSUP;
    for (int i = 0; i < call->n_in; i++) {
        const ps_view *x = &call->in[i];
        if (!is_lane_type(x->dtype) || !view_flat(x)) return PS_EUNSUP;
        w.item[i] = (struct item){ .grad = x->data, .grad_dtype = x->dtype, .numel = x->numel };
    }
    count_units(&w);
    int64_t units = w.unit[w.n];
    double *part = call->scratch(call, (size_t)(units + 1) * sizeof *part);
    if (!part) return PS_ENOMEM;
    if (call->dry) return 0;
#pragma omp parallel if (units > PS_PAR_MIN / UNIT)
    {
        int64_t threads = omp_get_num_threads(), me = omp_get_thread_num(), end = units * (me + 1) / threads;
        int i = 0;
        for (int64_t u = units * me / threads; u < end; u++) {
            while (u >= w.unit[i + 1]) i++;
            const struct item *it = &w.item[i];
            int64_t first = (u - w.unit[i]) * UNIT, last = first + UNIT < it->numel ? first + UNIT : it->numel;
            PS_BY_VEC(it->grad_dtype, unit_squares, it->grad, first, last, &part[u]);
        }
    }
    for (int i = 0; i < w.n; i++) {
        double s = 0;
        for (int64_t u = w.unit[i]; u < w.unit[i + 1]; u++) s += part[u];
        ((double *)y->data)[i] = s;
    }
    return 0;
}

/* -- gradients as they are stored ---------------------------------------------------------------------------------- */
SIMD void convert_unit(void *dst, int dst_dtype, const void *src, int64_t first, int64_t last, int src_dtype)
{
    int64_t i = first;
    for (; i + VL <= last; i += VL) vf_put(dst, i, dst_dtype, vf_get(src, i, src_dtype));
    if (i < last) vf_put_n(dst, i, dst_dtype, (int)(last - i), vf_get_n(src, i, src_dtype, (int)(last - i), 0.0f));
}
static void store_unit(const ps_view *dst, const ps_view *src, int64_t first, int64_t last)
{
    void *to = ps_at(dst->data, first, dst->dtype), *from = ps_at(src->data, first, src->dtype);
    if (dst->dtype == src->dtype) memcpy(to, from, (size_t)((last - first) * (dst->dtype == PS_F32 ? 4 : 2)));
    else if (dst->dtype == PS_F32) PS_BY_VEC(src->dtype, convert_unit, dst->data, PS_F32, src->data, first, last);
    else if (dst->dtype == PS_BF16) PS_BY_VEC(src->dtype, convert_unit, dst->data, PS_BF16, src->data, first, last);
    else PS_BY_VEC(src->dtype, convert_unit, dst->data, PS_F16, src->data, first, last);
}
/* Stores a gradient and its sum of squares, one unit at a time. The squares are computed from the stored values, which
 * are still in the cache. The squares are added in the same order as in sq_norms. */
static int grad_store(ps_call *call)
{
    const ps_view *src = &call->in[0], *dst = &call->out[0], *sq = &call->out[1];
    if (!is_lane_type(src->dtype) || !is_lane_type(dst->dtype) || !view_flat(src) || !view_flat(dst) ||
        sq->dtype != PS_F64) return PS_EUNSUP;
    const char *from = src->data, *to = dst->data;
    int64_t n = src->numel, units = (n + UNIT - 1) / UNIT;
    bool itself = from == to && src->dtype == dst->dtype;
    if (!itself && from < to + n * (dst->dtype == PS_F32 ? 4 : 2) && to < from + n * (src->dtype == PS_F32 ? 4 : 2))
        return PS_EUNSUP;
    double *part = call->scratch(call, (size_t)(units + 1) * sizeof *part), sum = 0;
    if (!part) return PS_ENOMEM;
    if (call->dry) return 0;
#pragma omp parallel for schedule(static) if (units > PS_PAR_MIN / UNIT)
    for (int64_t u = 0; u < units; u++) {
        int64_t first = u * UNIT, last = first + UNIT < n ? first + UNIT : n;
        if (!itself) store_unit(dst, src, first, last);
        PS_BY_VEC(dst->dtype, unit_squares, dst->data, first, last, &part[u]);
    }
    for (int64_t u = 0; u < units; u++) sum += part[u];
    *(double *)sq->data = sum;
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_optim)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_optim)(ps_kernel *k)
{
    k[PS_OP_adam_] = adam;
    k[PS_OP_adam_schedule_free_] = schedule_free;
    k[PS_OP_master_lerp_] = master_lerp;
    k[PS_OP_sgd_] = sgd;
    k[PS_OP_sq_norms] = sq_norms;
    k[PS_OP_grad_store] = grad_store;
}
