/* SPDX-License-Identifier: BSD-3-Clause
 * The optimizers that are not in optim.c, and masters that are kept as remainders. This file is compiled once per
 * instruction set. ref/update.c has the formulas and their sources. The invariants of optim.c also apply to this
 * file. */
#define PS_ANY_LANES
#include "backend/cpu/simd/operand.h"
#include "backend/cpu/simd/optim_list.h"
#include "backend/cpu/simd/codes.h"

/* -- remainders ---------------------------------------------------------------------------------------------------- */
static int remainder_split(ps_call *call)
{
    for (int k = 0; k + 3 <= call->n_in; k += 3) {
        const ps_view *w = &call->in[k], *low = w + 1, *src = w + 2;
        if (!view_flat(w) || !view_flat(low) || !view_flat(src)) return PS_EUNSUP;
        struct item it = { .param = w->data, .low = low->data };
        const float *from = src->data;
        int64_t n = w->numel, whole = n / VL * VL;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
        for (int64_t i = 0; i < whole; i += VL) master_put(&it, i, vf_load(from + i), PS_REMAINDER);
        for (int64_t i = whole; i < n; i++)
            ((uint16_t *)it.param)[i] = ps_remainder_split(ps_f32_bits(from[i]), it.low + i);
    }
    return 0;
}
static int remainder_join(ps_call *call)
{
    const ps_view *w = &call->in[0], *low = &call->in[1];
    if (!view_flat(w) || !view_flat(low) || !view_flat(&call->out[0])) return PS_EUNSUP;
    struct item it = { .param = w->data, .low = low->data };
    float *to = call->out[0].data;
    int64_t n = w->numel, whole = n / VL * VL;
#pragma omp parallel for schedule(static) if (n > PS_PAR_MIN)
    for (int64_t i = 0; i < whole; i += VL) vf_store(to + i, master_get(&it, i, PS_REMAINDER));
    for (int64_t i = whole; i < n; i++) to[i] = ps_bits_f32(ps_remainder_join(((uint16_t *)it.param)[i], it.low[i]));
    return 0;
}

/* -- Lion ---------------------------------------------------------------------------------------------------------- */
struct lion { float scale, keep, b1, b2, c1, c2, lr; };

/* Updates VL elements. Returns the new average. */
SIMD vf lion_step(const struct lion *h, const struct item *it, int64_t i, vf old, int form, int grad_dtype)
{
    vf p = master_get(it, i, form) * h->keep, g = vf_get(it->grad, i, grad_dtype) * h->scale;
    vf u = vf_fma(vf_set(h->b1), old, g * h->c1), lr = vf_set(h->lr);
    p = vf_select(u > vf_zero(), p - lr, vf_select(u < vf_zero(), p + lr, vf_select(u != u, u, p)));
    master_put(it, i, p, form);
    return vf_fma(vf_set(h->b2), old, g * h->c2);
}
SIMD void lion_at(const struct lion *h, const struct item *it, int64_t i, int form, int grad_dtype)
{
    float *m = (float *)it->state[0] + i;
    vf_store(m, lion_step(h, it, i, vf_load(m), form, grad_dtype));
}
PS_SPAN(lion, 4, 0)
static struct lion lion_of(double lr, double beta1, double beta2, double wd, double scale)
{
    return (struct lion){ .scale = (float)scale, .keep = (float)(1 - lr * wd), .b1 = (float)beta1, .b2 = (float)beta2,
                          .c1 = (float)(1 - beta1), .c2 = (float)(1 - beta2), .lr = (float)lr };
}
static int lion(ps_call *call)
{
    const struct ps_attrs_lion_ *a = call->attrs;
    struct work w;
    if (!collect_alike(call, 4, PS_F32, &w)) return PS_EUNSUP;
    struct lion h = lion_of(a->lr, a->beta1, a->beta2, a->weight_decay, a->grad_scale);
    run_work(&w, &h, lion_span);
    return 0;
}

/* -- RMSprop ------------------------------------------------------------------------------------------------------- */
struct rmsprop { float scale, l2, alpha, rest, eps, momentum, lr; int has_l2, has_momentum; };

SIMD void rmsprop_at(const struct rmsprop *h, const struct item *it, int64_t i, int form, int grad_dtype)
{
    vf p = master_get(it, i, form), g = vf_get(it->grad, i, grad_dtype) * h->scale;
    float *of_v = (float *)it->state[0] + i;
    if (h->has_l2) g = vf_fma(vf_set(h->l2), p, g);
    vf v = vf_fma(vf_set(h->alpha), vf_load(of_v), (g * h->rest) * g), u = g / (vf_sqrt(v) + vf_set(h->eps));
    vf_store(of_v, v);
    if (h->has_momentum) {
        float *of_m = (float *)it->state[1] + i;
        u = vf_fma(vf_set(h->momentum), vf_load(of_m), u);
        vf_store(of_m, u);
    }
    master_put(it, i, vf_fma(vf_set(-h->lr), u, p), form);
}
PS_SPAN(rmsprop, 4, h->has_momentum ? 4 : 0)
static int rmsprop(ps_call *call)
{
    const struct ps_attrs_rmsprop_ *a = call->attrs;
    struct work w;
    if (!collect_alike(call, 5, PS_F32, &w)) return PS_EUNSUP;
    struct rmsprop h = { .scale = (float)a->grad_scale, .l2 = (float)a->weight_decay, .alpha = (float)a->alpha,
                         .rest = (float)(1 - a->alpha), .eps = (float)a->eps, .momentum = (float)a->momentum,
                         .lr = (float)a->lr, .has_l2 = (float)a->weight_decay != 0,
                         .has_momentum = (float)a->momentum != 0 };
    run_work(&w, &h, rmsprop_span);
    return 0;
}

/* -- AdamW with averages in bf16 or in 8 bits ---------------------------------------------------------------------- */
struct adamw { float scale, keep, b1, b2, c1, c2, inv, eps, step; uint64_t seed, t; };

static struct adamw adamw_of(double lr, double beta1, double beta2, double eps, double wd, double scale, int64_t t)
{
    double bias1 = 1 - pow(beta1, (double)t), bias2 = 1 - pow(beta2, (double)t);
    return (struct adamw){ .scale = (float)scale, .keep = (float)(1 - lr * wd), .b1 = (float)beta1, .b2 = (float)beta2,
                           .c1 = (float)(1 - beta1), .c2 = (float)(1 - beta2), .inv = (float)(1 / sqrt(bias2)),
                           .eps = (float)eps, .step = (float)(lr / bias1), .t = (uint64_t)t };
}
SIMD void adamw_step(const struct adamw *h, vf g, vf *p, vf *m, vf *v)
{
    g = g * h->scale;
    *p = *p * h->keep;
    *m = vf_fma(vf_set(h->b1), *m, g * h->c1);
    *v = vf_fma(vf_set(h->b2), *v, (g * h->c2) * g);
    *p = vf_fma(vf_set(-h->step), *m / vf_fma(vf_sqrt(*v), vf_set(h->inv), vf_set(h->eps)), *p);
}

/* Stores x as bf16 with stochastic rounding. Adds the lower half of each lane of `random` to the 16 bits of x below the
 * last bit of bf16, and truncates. */
SIMD void put_random(void *to, int64_t i, vf x, vu random)
{
    vu u = (vu)x, special = (vu)((vi)(u & 0x7fffffffu) >= vi_set(0x7f800000));
    vu r = (u + (random & 0xffffu)) & 0xffff0000u;
    vf_store_bf16((uint16_t *)to + i, (vf)((special & u) | (~special & r)));
}
SIMD void adam_bf16_at(const struct adamw *h, const struct item *it, int64_t i, vu random, int form, int grad_dtype)
{
    vf p = master_get(it, i, form), m = vf_load_bf16((uint16_t *)it->state[0] + i);
    vf v = vf_load_bf16((uint16_t *)it->state[1] + i);
    adamw_step(h, vf_get(it->grad, i, grad_dtype), &p, &m, &v);
    put_random(it->state[0], i, m, random);
    put_random(it->state[1], i, v, random >> 16);
    master_put(it, i, p, form);
}
static __attribute__((noinline)) void adam_bf16_tail(const struct adamw *h, const struct item *it, int64_t i, int n,
                                                     vu random, int form, int grad_dtype)
{
    static const int nbytes[2] = { 2, 2 };
    struct tail t;
    tail_get(&t, it, i, n, nbytes);
    adam_bf16_at(h, &t.it, 0, random, form, grad_dtype);
    tail_put(&t, it, i, n, nbytes);
}
/* A counter yields four random words. The four words are used for elements that are 16 apart, so that no vector size
 * wastes a word. 16 counters yield the words of 64 elements. */
SIMD void adam_bf16_body(const struct adamw *h, const struct item *it, int64_t first, int64_t last, int form,
                         int grad_dtype)
{
    for (int64_t i = first; i < last; i += 64)
        for (int part = 0; part < 16; part += VL) {
            vu4 random = vu_philox_run(h->seed, (uint64_t)(i / 4 + part), h->t);
            _Pragma("GCC unroll 4")
            for (int w = 0; w < 4; w++) {
                int64_t at = i + 16 * w + part;
                if (at + VL <= last) adam_bf16_at(h, it, at, random.v[w], form, grad_dtype);
                else if (at < last) adam_bf16_tail(h, it, at, (int)(last - at), random.v[w], form, grad_dtype);
            }
        }
}
static void adam_bf16_span(const void *setting, const struct item *it, int64_t first, int64_t last)
{
    PS_BY_FORM(it, adam_bf16_body, setting, it, first, last);
}
static int adam_bf16(ps_call *call)
{
    const struct ps_attrs_adam_bf16_ *a = call->attrs;
    struct work w;
    if (!collect_alike(call, 5, PS_BF16, &w)) return PS_EUNSUP;
    struct adamw h = adamw_of(a->lr, a->beta1, a->beta2, a->eps, a->weight_decay, a->grad_scale, a->t);
    h.seed = a->seed;
    run_work(&w, &h, adam_bf16_span);
    return 0;
}

/* -- 8 bits -------------------------------------------------------------------------------------------------------- */
static ps_codes plain_codes, signed_codes;             /* filled once, before kernels run */

/* Updates VL elements. Reads the codes and scales of exp_avg and exp_avg_sq. Writes the new averages to `mean` and
 * `square`, and updates the averages' largest magnitudes in `most`. */
SIMD void adam8bit_at(const struct adamw *h, const struct item *it, int64_t i, const uint8_t *const codes[2],
                      const float scale[2], float *mean, float *square, vi most[2], int form, int grad_dtype)
{
    vf p = master_get(it, i, form), m = codes_load(&signed_codes, codes[0], true) * scale[0];
    vf v = codes_load(&plain_codes, codes[1], false) * scale[1];
    adamw_step(h, vf_get(it->grad, i, grad_dtype), &p, &m, &v);
    master_put(it, i, p, form);
    vf_store(mean, m), vf_store(square, v);
    most[0] = codes_most(most[0], m), most[1] = codes_most(most[1], v);
}
SIMD void adam8bit_block(const struct adamw *h, const struct item *it, int64_t first, int64_t n, int form,
                         int grad_dtype)
{
    float m[PS_STATE_BLOCK + CODES_RUN], v[PS_STATE_BLOCK + CODES_RUN];
    int64_t block = first / PS_STATE_BLOCK;
    float *m_scale = (float *)it->state[1] + block, *v_scale = (float *)it->state[3] + block;
    const float scale[2] = { *m_scale, *v_scale };
    uint8_t *m_codes = (uint8_t *)it->state[0] + first, *v_codes = (uint8_t *)it->state[2] + first;
    vi most[2] = { vi_set(0), vi_set(0) };
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        adam8bit_at(h, it, first + i, (const uint8_t *const[2]){ m_codes + i, v_codes + i }, scale, m + i, v + i, most,
                    form, grad_dtype);
    if (i < n) {
        static const int none[2] = { 0, 0 };
        struct tail t;
        vi unused[2] = { vi_set(0), vi_set(0) };
        uint8_t rest[2][VL] = { { 0 }, { 0 } };
        memcpy(rest[0], m_codes + i, (size_t)(n - i)), memcpy(rest[1], v_codes + i, (size_t)(n - i));
        tail_get(&t, it, first + i, (int)(n - i), none);
        adam8bit_at(h, &t.it, 0, (const uint8_t *const[2]){ rest[0], rest[1] }, scale, m + i, v + i, unused, form,
                    grad_dtype);
        tail_put(&t, it, first + i, (int)(n - i), none);
        for (int64_t k = n; k < i + VL; k++) m[k] = v[k] = 0;  /* lanes without elements must not affect the scale */
        most[0] = codes_most(most[0], vf_load(m + i)), most[1] = codes_most(most[1], vf_load(v + i));
    }
    codes_store_block(&signed_codes, m, n, most[0], m_codes, m_scale, true);
    codes_store_block(&plain_codes, v, n, most[1], v_codes, v_scale, false);
}
SIMD void adam8bit_body(const struct adamw *h, const struct item *it, int64_t first, int64_t last, int form,
                        int grad_dtype)
{
    for (int64_t i = first; i < last; i += PS_STATE_BLOCK)
        adam8bit_block(h, it, i, last - i < PS_STATE_BLOCK ? last - i : PS_STATE_BLOCK, form, grad_dtype);
}
static void adam8bit_span(const void *setting, const struct item *it, int64_t first, int64_t last)
{
    PS_BY_FORM(it, adam8bit_body, setting, it, first, last);
}
static int adam8bit(ps_call *call)
{
    const struct ps_attrs_adam8bit_ *a = call->attrs;
    struct work w;
    if (!collect_any(call, 7, &w)) return PS_EUNSUP;
    struct adamw h = adamw_of(a->lr, a->beta1, a->beta2, a->eps, a->weight_decay, a->grad_scale, a->t);
    run_work(&w, &h, adam8bit_span);
    return 0;
}

SIMD void lion8bit_block(const struct lion *h, const struct item *it, int64_t first, int64_t n, int form,
                         int grad_dtype)
{
    float m[PS_STATE_BLOCK + CODES_RUN], *scale = (float *)it->state[1] + first / PS_STATE_BLOCK;
    uint8_t *codes = (uint8_t *)it->state[0] + first;
    vi most = vi_set(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf old = codes_load(&signed_codes, codes + i, true) * *scale;
        vf new = lion_step(h, it, first + i, old, form, grad_dtype);
        vf_store(m + i, new);
        most = codes_most(most, new);
    }
    if (i < n) {
        static const int none[2] = { 0, 0 };
        struct tail t;
        uint8_t rest[VL] = { 0 };
        memcpy(rest, codes + i, (size_t)(n - i));
        tail_get(&t, it, first + i, (int)(n - i), none);
        vf old = codes_load(&signed_codes, rest, true) * *scale;
        vf_store(m + i, lion_step(h, &t.it, 0, old, form, grad_dtype));
        tail_put(&t, it, first + i, (int)(n - i), none);
        for (int64_t k = n; k < i + VL; k++) m[k] = 0;         /* lanes without elements must not affect the scale */
        most = codes_most(most, vf_load(m + i));
    }
    codes_store_block(&signed_codes, m, n, most, codes, scale, true);
}
SIMD void lion8bit_body(const struct lion *h, const struct item *it, int64_t first, int64_t last, int form,
                        int grad_dtype)
{
    for (int64_t i = first; i < last; i += PS_STATE_BLOCK)
        lion8bit_block(h, it, i, last - i < PS_STATE_BLOCK ? last - i : PS_STATE_BLOCK, form, grad_dtype);
}
static void lion8bit_span(const void *setting, const struct item *it, int64_t first, int64_t last)
{
    PS_BY_FORM(it, lion8bit_body, setting, it, first, last);
}
static int lion8bit(ps_call *call)
{
    const struct ps_attrs_lion8bit_ *a = call->attrs;
    struct work w;
    if (!collect_any(call, 5, &w)) return PS_EUNSUP;
    struct lion h = lion_of(a->lr, a->beta1, a->beta2, a->weight_decay, a->grad_scale);
    run_work(&w, &h, lion8bit_span);
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_update)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_update)(ps_kernel *k)
{
    ps_codes_make(&plain_codes, false);
    ps_codes_make(&signed_codes, true);
    k[PS_OP_remainder_split_] = remainder_split;
    k[PS_OP_remainder_join] = remainder_join;
    k[PS_OP_lion_] = lion;
    k[PS_OP_rmsprop_] = rmsprop;
    k[PS_OP_adam_bf16_] = adam_bf16;
    k[PS_OP_adam8bit_] = adam8bit;
    k[PS_OP_lion8bit_] = lion8bit;
}
