/* SPDX-License-Identifier: BSD-3-Clause
 * Optimizers besides those of optim.c, and masters that are kept as remainders. ref/update.c has the formulas and their
 * sources. Compiled once per instruction set; the invariants are those of optim.c. */
#define PS_ANY_LANES
#include "backend/cpu/simd/operand.h"
#include "backend/cpu/simd/optim_list.h"
#include "base/update.h"

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

SIMD void lion_at(const struct lion *h, const struct item *it, int64_t i, int form, int grad_dtype)
{
    vf p = master_get(it, i, form) * h->keep, g = vf_get(it->grad, i, grad_dtype) * h->scale;
    float *m = (float *)it->state[0] + i;
    vf old = vf_load(m), u = vf_fma(vf_set(h->b1), old, g * h->c1), lr = vf_set(h->lr);
    p = vf_select(u > vf_zero(), p - lr, vf_select(u < vf_zero(), p + lr, vf_select(u != u, u, p)));
    vf_store(m, vf_fma(vf_set(h->b2), old, g * h->c2));
    master_put(it, i, p, form);
}
SIMD void lion_body(const struct lion *h, const struct item *it, int64_t first, int64_t last, int form, int grad_dtype)
{
    static const int nbytes[2] = { 4, 0 };
    int64_t i = first;
    for (; i + VL <= last; i += VL) lion_at(h, it, i, form, grad_dtype);
    if (i == last) return;
    struct tail t;
    tail_get(&t, it, i, (int)(last - i), nbytes);
    lion_at(h, &t.it, 0, form, grad_dtype);
    tail_put(&t, it, i, (int)(last - i), nbytes);
}
static void lion_span(const void *setting, const struct item *it, int64_t first, int64_t last)
{
    PS_BY_FORM(it, lion_body, setting, it, first, last);
}
static int lion(ps_call *call)
{
    const struct ps_attrs_lion_ *a = call->attrs;
    struct work w;
    if (!collect_alike(call, 4, PS_F32, &w)) return PS_EUNSUP;
    struct lion h = { .scale = (float)a->grad_scale, .keep = (float)(1 - a->lr * a->weight_decay),
                      .b1 = (float)a->beta1, .b2 = (float)a->beta2, .c1 = (float)(1 - a->beta1),
                      .c2 = (float)(1 - a->beta2), .lr = (float)a->lr };
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
SIMD void rmsprop_body(const struct rmsprop *h, const struct item *it, int64_t i, int64_t last, int form,
                       int grad_dtype)
{
    const int nbytes[2] = { 4, h->has_momentum ? 4 : 0 };
    for (; i + VL <= last; i += VL) rmsprop_at(h, it, i, form, grad_dtype);
    if (i == last) return;
    struct tail t;
    tail_get(&t, it, i, (int)(last - i), nbytes);
    rmsprop_at(h, &t.it, 0, form, grad_dtype);
    tail_put(&t, it, i, (int)(last - i), nbytes);
}
static void rmsprop_span(const void *setting, const struct item *it, int64_t first, int64_t last)
{
    PS_BY_FORM(it, rmsprop_body, setting, it, first, last);
}
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

/* Stores x with random rounding: the lower halves of `random` decide whether a value is rounded up. */
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
/* The four words of a counter are used for elements that are 16 apart, so that no word is wasted with any vector
 * size: 16 counters serve 64 elements. */
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
/* Maps magnitudes to codes. The upper 16 bits of a magnitude select a cell, which contains at most one midpoint. A
 * cell has one word. `below` is the lower half of its midpoint, or 2^16 if it has none. `above` is 1 plus the number
 * of midpoints up to the cell's first number. Magnitudes below 2^-25 are nearest to 0, and NaNs have the last cell. */
enum { LEAST = (127 - 25) << 7, CELLS = 26 << 7, MIDPOINT_BITS = 17 };
struct code_map { float value[256]; uint32_t cell[CELLS]; };
static struct code_map plain_map, signed_map;          /* filled once, before kernels run */

static void make_map(struct code_map *m, bool has_sign)
{
    int zero = has_sign ? 127 : 0, most = 255 - zero, number = 0;
    ps_state_map(m->value, has_sign);
    for (int cell = 0; cell < CELLS; cell++) {
        uint32_t bits = (uint32_t)(LEAST + cell) << 16, low = 1u << 16;
        float first = cell == 0 ? 0 : ps_bits_f32(bits), next = ps_bits_f32(bits + (1u << 16));
        while (number < most && ps_state_midpoint(m->value, zero + number) <= first) number++;
        if (number < most && ps_state_midpoint(m->value, zero + number) < next)
            low = ps_f32_bits(ps_state_midpoint(m->value, zero + number)) & 0xffffu;
        m->cell[cell] = (uint32_t)(number + 1) << MIDPOINT_BITS | low;
    }
}
/* Loads eight single values, which takes less time than the gather instruction. */
#if defined(__AVX2__) && !defined(__AVX512F__) && PS_LANES == 8
SIMD __m256 eight_of(const float *p0, const float *p1, const float *p2, const float *p3, const float *p4,
                     const float *p5, const float *p6, const float *p7)
{
    __m128 a = _mm_insert_ps(_mm_load_ss(p0), _mm_load_ss(p1), 0x10), b = _mm_load_ss(p4);
    b = _mm_insert_ps(b, _mm_load_ss(p5), 0x10);
    a = _mm_insert_ps(_mm_insert_ps(a, _mm_load_ss(p2), 0x20), _mm_load_ss(p3), 0x30);
    b = _mm_insert_ps(_mm_insert_ps(b, _mm_load_ss(p6), 0x20), _mm_load_ss(p7), 0x30);
    return _mm256_set_m128(b, a);
}
#endif
SIMD vu cell_of(const struct code_map *m, vi at)
{
#if defined(__AVX512F__)
    return (vu)_mm512_i32gather_epi32((__m512i)at, m->cell, 4);
#elif defined(__AVX2__) && PS_LANES == 8
    const float *t = (const float *)(const void *)m->cell;
    uint64_t a = (uint64_t)_mm256_extract_epi64((__m256i)at, 0), b = (uint64_t)_mm256_extract_epi64((__m256i)at, 1);
    uint64_t c = (uint64_t)_mm256_extract_epi64((__m256i)at, 2), d = (uint64_t)_mm256_extract_epi64((__m256i)at, 3);
    return (vu)eight_of(t + (uint32_t)a, t + (a >> 32), t + (uint32_t)b, t + (b >> 32), t + (uint32_t)c, t + (c >> 32),
                        t + (uint32_t)d, t + (d >> 32));
#else
    vu x;
    for (int i = 0; i < VL; i++) x[i] = m->cell[at[i]];
    return x;
#endif
}
SIMD vf dequantise(const struct code_map *m, const uint8_t *codes, float scale)
{
    const float *t = m->value;
#if defined(__AVX512F__)
    return (vf)_mm512_i32gather_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)), t, 4) * scale;
#elif defined(__AVX2__) && PS_LANES == 8
    uint64_t c;
    memcpy(&c, codes, sizeof c);
    return (vf)eight_of(t + (c & 255), t + (c >> 8 & 255), t + (c >> 16 & 255), t + (c >> 24 & 255),
                        t + (c >> 32 & 255), t + (c >> 40 & 255), t + (c >> 48 & 255), t + (c >> 56)) * scale;
#else
    vf x;
    for (int i = 0; i < VL; i++) x[i] = t[codes[i]];
    return x * scale;
#endif
}
SIMD void put_codes(uint8_t *codes, vi code)
{
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8((__m512i)code));
#elif defined(__AVX2__) && PS_LANES == 8
    __m128i a = _mm256_castsi256_si128((__m256i)code), b = _mm256_extracti128_si256((__m256i)code, 1);
    a = _mm_packs_epi32(a, b);
    _mm_storel_epi64((__m128i *)codes, _mm_packus_epi16(a, a));
#else
    vb b = __builtin_convertvector(code, vb);
    memcpy(codes, &b, sizeof b);
#endif
}
/* A midpoint itself has the higher code, so a negative number must be beyond it. There is no code for -1. */
SIMD void quantise(const struct code_map *m, vf x, uint8_t *codes, bool has_sign)
{
    vi magnitude = (vi)x & 0x7fffffff, cell = (magnitude >> 16) - vi_set(LEAST);
    vi below = cell < vi_set(0), above = cell >= vi_set(CELLS);
    cell = (cell & ~below & ~above) | (above & vi_set(CELLS - 1));
    vu word = cell_of(m, cell);
    vi low = magnitude & 0xffff, negative = (vi)x >> 31;
    if (has_sign) low += negative;
    vi code = (vi)(word >> MIDPOINT_BITS) + ((vi)(word & ((1u << MIDPOINT_BITS) - 1)) > low);
    if (has_sign) {
        code = ((code ^ negative) - negative) + vi_set(127);
        code = code & ~(code < vi_set(0));
    }
    put_codes(codes, code & (x == x));
}
/* Returns the largest of all lanes, or NaN if there is a NaN. */
SIMD float most_of(vf a)
{
    float x[VL], most;
    memcpy(x, &a, sizeof x);
    most = x[0];
    for (int i = 1; i < VL; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most;
    return most;
}
/* Computes codes of n numbers x [PS_STATE_BLOCK], whose largest magnitude is `most`. */
SIMD void quantise_block(const struct code_map *m, const float *x, int64_t n, float most, uint8_t *codes, float *scale,
                         bool has_sign)
{
    float inv = most > 0 ? 1 / most : 0;
    int64_t i = 0;
    for (; i + VL <= n; i += VL) quantise(m, vf_load(x + i) * inv, codes + i, has_sign);
    if (i < n) {
        uint8_t rest[VL];
        quantise(m, vf_load(x + i) * inv, rest, has_sign);
        memcpy(codes + i, rest, (size_t)(n - i));
    }
    *scale = most;
}
/* Updates VL elements. codes, scale: of exp_avg and of exp_avg_sq. The new averages are written to mean and square. */
SIMD void adam8bit_at(const struct adamw *h, const struct item *it, int64_t i, const uint8_t *const codes[2],
                      const float scale[2], float *mean, float *square, vf *most, int form, int grad_dtype)
{
    vf p = master_get(it, i, form), m = dequantise(&signed_map, codes[0], scale[0]);
    vf v = dequantise(&plain_map, codes[1], scale[1]);
    adamw_step(h, vf_get(it->grad, i, grad_dtype), &p, &m, &v);
    master_put(it, i, p, form);
    vf_store(mean, m), vf_store(square, v);
    most[0] = vf_max_nan(most[0], vf_max_nan(vf_abs(m), most[0]));
    most[1] = vf_max_nan(most[1], vf_max_nan(vf_abs(v), most[1]));
}
SIMD void adam8bit_block(const struct adamw *h, const struct item *it, int64_t first, int64_t n, int form,
                         int grad_dtype)
{
    float m[PS_STATE_BLOCK + VL], v[PS_STATE_BLOCK + VL];
    int64_t block = first / PS_STATE_BLOCK;
    float *m_scale = (float *)it->state[1] + block, *v_scale = (float *)it->state[3] + block;
    const float scale[2] = { *m_scale, *v_scale };
    uint8_t *m_codes = (uint8_t *)it->state[0] + first, *v_codes = (uint8_t *)it->state[2] + first;
    vf most[2] = { vf_zero(), vf_zero() };
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        adam8bit_at(h, it, first + i, (const uint8_t *const[2]){ m_codes + i, v_codes + i }, scale, m + i, v + i, most,
                    form, grad_dtype);
    if (i < n) {
        static const int none[2] = { 0, 0 };
        struct tail t;
        vf whole[2] = { most[0], most[1] };
        uint8_t rest[2][VL] = { { 0 }, { 0 } };
        memcpy(rest[0], m_codes + i, (size_t)(n - i)), memcpy(rest[1], v_codes + i, (size_t)(n - i));
        tail_get(&t, it, first + i, (int)(n - i), none);
        adam8bit_at(h, &t.it, 0, (const uint8_t *const[2]){ rest[0], rest[1] }, scale, m + i, v + i, whole, form,
                    grad_dtype);
        tail_put(&t, it, first + i, (int)(n - i), none);
        for (int64_t k = n; k < i + VL; k++) m[k] = v[k] = 0;           /* no elements, so they must not affect the
                                                                         * scale */
        most[0] = vf_max_nan(most[0], vf_max_nan(vf_abs(vf_load(m + i)), most[0]));
        most[1] = vf_max_nan(most[1], vf_max_nan(vf_abs(vf_load(v + i)), most[1]));
    }
    quantise_block(&signed_map, m, n, most_of(most[0]), m_codes, m_scale, true);
    quantise_block(&plain_map, v, n, most_of(most[1]), v_codes, v_scale, false);
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

void PS_ISA_FN(ps_cpu_fill_update)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_update)(ps_kernel *k)
{
    make_map(&plain_map, false);
    make_map(&signed_map, true);
    k[PS_OP_remainder_split_] = remainder_split;
    k[PS_OP_remainder_join] = remainder_join;
    k[PS_OP_lion_] = lion;
    k[PS_OP_rmsprop_] = rmsprop;
    k[PS_OP_adam_bf16_] = adam_bf16;
    k[PS_OP_adam8bit_] = adam8bit;
}
