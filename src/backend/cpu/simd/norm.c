/* SPDX-License-Identifier: BSD-3-Clause
 * Layer norm, RMS norm and dropout for contiguous fp32, bf16 and fp16; compiled once per instruction set and entered
 * into the table by the fill function at the end.
 * Invariants: all arithmetic in fp32; sums over a row run in 4 x 16 lanes in a fixed order; the sums over rows (dw, db)
 * are taken in blocks of ROW_BLOCK rows whose partial sums are added in order, so that neither the thread count nor the
 * instruction set changes a bit. Weights are copied to fp32 rows padded with zeros to whole pairs of vectors. */
#include "backend/cpu/simd/operand.h"

enum { ROW_BLOCK = 64, GROUP = 4, DROPOUT_BLOCK = 4096 };

struct norm {
    int dtype, rms, want_w;
    int64_t rows, C, Cp;              /* Cp: C rounded up to whole pairs */
    double eps;
    const void *x, *dy, *add;         /* [rows, C] of dtype; add may be NULL and may be dx */
    void *y, *dx;                     /* [rows, C] of dtype; dx may be NULL */
    const float *w, *b;               /* [Cp] in the order of pairs, zeros behind the C elements */
    float *mean, *rstd;               /* [rows]; may be NULL in forward, mean is NULL for RMS norm */
    float *dw, *db;                   /* partial sums [blocks, Cp] in the order of pairs */
    float exists[PAIR];               /* of a row's last pair: 1 where it has elements, 0 behind its end */
};

SIMD float row_sum(const void *x, int64_t C, int dtype)
{
    vf s0 = vf_zero(), s1 = s0, s2 = s0, s3 = s0;
    int64_t i = 0;
    for (; i + 2 * PAIR <= C; i += 2 * PAIR) {
        vp u = vp_get(x, i, dtype), v = vp_get(x, i + PAIR, dtype);
        s0 += u.a, s1 += u.b, s2 += v.a, s3 += v.b;
    }
    for (; i < C; i += PAIR) {
        vp u = vp_row_get(x, i, C, 0.0f, dtype);
        s0 += u.a, s1 += u.b;
    }
    return vf_hsum((s0 + s1) + (s2 + s3));
}
/* Sum of (x - mean)^2; *rest = the sum of x - mean, which is what rounding has left in the mean (Chan, Golub, LeVeque,
 * "Algorithms for computing the sample variance", 1983). */
SIMD float row_squares(const struct norm *n, const void *x, float mean, float *rest, int dtype)
{
    vf s0 = vf_zero(), s1 = s0, s2 = s0, s3 = s0, r0 = s0, r1 = s0, m = vf_set(mean);
    int64_t C = n->C, i = 0;
    for (; i + 2 * PAIR <= C; i += 2 * PAIR) {
        vp u = vp_get(x, i, dtype), v = vp_get(x, i + PAIR, dtype);
        u.a -= m, u.b -= m, v.a -= m, v.b -= m;
        s0 = vf_fma(u.a, u.a, s0), s1 = vf_fma(u.b, u.b, s1);
        s2 = vf_fma(v.a, v.a, s2), s3 = vf_fma(v.b, v.b, s3);
        r0 += u.a + u.b, r1 += v.a + v.b;
    }
    for (; i < C; i += PAIR) {
        vp u = vp_row_get(x, i, C, 0.0f, dtype);
        u.a -= m, u.b -= m;
        if (i + PAIR > C) u.a *= vf_load(n->exists), u.b *= vf_load(n->exists + VL);
        s0 = vf_fma(u.a, u.a, s0), s1 = vf_fma(u.b, u.b, s1);
        r0 += u.a + u.b;
    }
    *rest = vf_hsum(r0 + r1);
    return vf_hsum((s0 + s1) + (s2 + s3));
}

SIMD void forward_out(const struct norm *n, int64_t r, float mean, float rstd, int dtype)
{
    int64_t C = n->C;
    const float *weight = n->w, *bias = n->b;
    const void *x = ps_at(n->x, r * C, dtype);
    void *y = ps_at(n->y, r * C, dtype);
    vf m = vf_set(mean), s = vf_set(rstd);
    for (int64_t i = 0; i < C; i += PAIR) {
        vp u = vp_row_get(x, i, C, 0.0f, dtype), w = vp_load(weight + i), b = vp_load(bias + i);
        u.a = vf_fma((u.a - m) * s, w.a, b.a);
        u.b = vf_fma((u.b - m) * s, w.b, b.b);
        vp_row_put(y, i, C, u, dtype);
    }
}
/* Up to GROUP rows. They go through each stage together, so that one row's sums overlap another's final additions. */
SIMD void forward_rows(const struct norm *n, int64_t first, int64_t last, int dtype)
{
    float mean[GROUP] = { 0 }, rstd[GROUP];
    int64_t C = n->C;
    for (int64_t r = first; r < last && !n->rms; r++)
        mean[r - first] = row_sum(ps_at(n->x, r * C, dtype), C, dtype) / (float)C;
    for (int64_t r = first; r < last; r++) {
        float rest, var = row_squares(n, ps_at(n->x, r * C, dtype), mean[r - first], &rest, dtype) / (float)C;
        if (!n->rms) {
            rest /= (float)C;
            mean[r - first] += rest, var = fmaxf(var - rest * rest, 0.0f);
        }
        rstd[r - first] = (float)(1.0 / sqrt((double)var + n->eps));
    }
    for (int64_t r = first; r < last; r++) {
        if (n->mean) n->mean[r] = mean[r - first];
        if (n->rstd) n->rstd[r] = rstd[r - first];
        forward_out(n, r, mean[r - first], rstd[r - first], dtype);
    }
}

/* -- backward: with g = dy * w, dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); RMS norm has no mean(g) ------- */
/* First pass over a row: sums of g and g * xhat, and the row's part of dw and db. */
SIMD void backward_sums(const struct norm *n, int64_t r, float *dw, float *db, float *mean_g, float *mean_gx, int dtype)
{
    int64_t C = n->C;
    const float *weight = n->w;
    const void *x = ps_at(n->x, r * C, dtype), *dy = ps_at(n->dy, r * C, dtype);
    vf m = vf_set(n->rms ? 0.0f : n->mean[r]), rs = vf_set(n->rstd[r]);
    vf g0 = vf_zero(), g1 = g0, gx0 = g0, gx1 = g0;
    for (int64_t i = 0; i < C; i += PAIR) {
        vp u = vp_row_get(x, i, C, 0.0f, dtype), d = vp_row_get(dy, i, C, 0.0f, dtype), w = vp_load(weight + i);
        u.a = (u.a - m) * rs, u.b = (u.b - m) * rs;          /* xhat; behind the end d is 0 */
        w.a *= d.a, w.b *= d.b;
        g0 += w.a, g1 += w.b;
        gx0 = vf_fma(w.a, u.a, gx0), gx1 = vf_fma(w.b, u.b, gx1);
        if (dw) {
            vp s = vp_load(dw + i);
            vp_store(dw + i, (vp){ vf_fma(d.a, u.a, s.a), vf_fma(d.b, u.b, s.b) });
        }
        if (db) {
            vp s = vp_load(db + i);
            vp_store(db + i, (vp){ s.a + d.a, s.b + d.b });
        }
    }
    *mean_g = n->rms ? 0.0f : vf_hsum(g0 + g1) / (float)C;
    *mean_gx = vf_hsum(gx0 + gx1) / (float)C;
}
SIMD void backward_dx(const struct norm *n, int64_t r, float mean_g, float mean_gx, int dtype)
{
    int64_t C = n->C;
    const float *weight = n->w;
    const void *x = ps_at(n->x, r * C, dtype), *dy = ps_at(n->dy, r * C, dtype);
    const void *add = n->add ? ps_at(n->add, r * C, dtype) : NULL;
    void *dx = ps_at(n->dx, r * C, dtype);
    vf m = vf_set(n->rms ? 0.0f : n->mean[r]), rs = vf_set(n->rstd[r]), mg = vf_set(mean_g), mgx = vf_set(-mean_gx);
    for (int64_t i = 0; i < C; i += PAIR) {
        vp u = vp_row_get(x, i, C, 0.0f, dtype), d = vp_row_get(dy, i, C, 0.0f, dtype), w = vp_load(weight + i);
        u.a = vf_fma((u.a - m) * rs, mgx, d.a * w.a - mg);
        u.b = vf_fma((u.b - m) * rs, mgx, d.b * w.b - mg);
        if (add) {
            vp s = vp_row_get(add, i, C, 0.0f, dtype);
            u.a = vf_fma(u.a, rs, s.a), u.b = vf_fma(u.b, rs, s.b);
        } else {
            u.a *= rs, u.b *= rs;
        }
        vp_row_put(dx, i, C, u, dtype);
    }
}
SIMD void backward_rows(const struct norm *n, int64_t block, int dtype)
{
    float *dw = n->want_w ? n->dw + block * n->Cp : NULL, *db = n->want_w && !n->rms ? n->db + block * n->Cp : NULL;
    if (dw) memset(dw, 0, (size_t)n->Cp * sizeof *dw);
    if (db) memset(db, 0, (size_t)n->Cp * sizeof *db);
    int64_t last = (block + 1) * ROW_BLOCK < n->rows ? (block + 1) * ROW_BLOCK : n->rows;
    for (int64_t r = block * ROW_BLOCK; r < last; r++) {
        float mean_g, mean_gx;
        backward_sums(n, r, dw, db, &mean_g, &mean_gx, dtype);
        if (n->dx) backward_dx(n, r, mean_g, mean_gx, dtype);
    }
}

/* A row as fp32 in the order of pairs; NaN becomes the canonical one (vp_put). */
SIMD void pad_pairs(float *p, const void *v, int64_t C, int dtype)
{
    vf nan = vf_set(NAN);
    for (int64_t i = 0; i < C; i += PAIR) {
        vp u = vp_row_get(v, i, C, 0.0f, dtype);
        vp_store(p + i, (vp){ vf_select(u.a != u.a, nan, u.a), vf_select(u.b != u.b, nan, u.b) });
    }
}
/* v as an fp32 row [Cp]; `value` everywhere when v is absent. NULL: no memory (scratch has left the message). */
static float *padded_row(ps_call *call, const ps_view *v, float value, const struct norm *n)
{
    float *p = call->scratch(call, (size_t)n->Cp * sizeof *p);
    bool has = v && ps_has(v);
    if (!p || call->dry) return p;
    if (has && v->dtype == n->dtype) {
        PS_BY_VEC(n->dtype, pad_pairs, p, v->data, n->C);
        return p;
    }
    memset(p, 0, (size_t)n->Cp * sizeof *p);
    for (int64_t i = 0; i < n->C; i++) {
        float e = has ? ps_get_one(v->data, i, v->dtype) : value;
        p[pair_place(i, n->dtype)] = e == e ? e : NAN;
    }
    return p;
}
static void set_sizes(struct norm *n, const ps_view *x)
{
    n->rows = x->numel / n->C;
    n->Cp = (n->C + PAIR - 1) / PAIR * PAIR;
    for (int i = 0; i < PAIR; i++) n->exists[pair_place(i, n->dtype)] = n->Cp - PAIR + i < n->C ? 1.0f : 0.0f;
}
static bool usable(const ps_view *v) { return !ps_has(v) || (is_lane_type(v->dtype) && view_flat(v)); }

static int norm_forward(ps_call *call, int rms, double eps)
{
    const ps_view *x = &call->in[0], *w = &call->in[1], *b = rms ? NULL : &call->in[2];
    ps_view *y = &call->out[0], *mean = rms ? NULL : &call->out[1], *rstd = &call->out[rms ? 1 : 2];
    struct norm n = { .dtype = x->dtype, .rms = rms, .C = ps_last_dim(x), .eps = eps, .x = x->data, .y = y->data };
    if (n.C == 0 || y->dtype != x->dtype || !usable(x) || !usable(y) || !usable(w) || (b && !usable(b)) ||
        (ps_has(rstd) && (rstd->dtype != PS_F32 || !view_flat(rstd))) ||
        (mean && ps_has(mean) && (mean->dtype != PS_F32 || !view_flat(mean))))
        return PS_EUNSUP;
    set_sizes(&n, x);
    n.mean = mean && ps_has(mean) ? mean->data : NULL;
    n.rstd = ps_has(rstd) ? rstd->data : NULL;
    n.w = padded_row(call, w, 1.0f, &n);
    n.b = padded_row(call, b, 0.0f, &n);
    if (!n.w || !n.b) return PS_ENOMEM;
    if (call->dry) return 0;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < n.rows; r += GROUP) {
        int64_t last = r + GROUP < n.rows ? r + GROUP : n.rows;
        PS_BY_VEC(n.dtype, forward_rows, &n, r, last);
    }
    return 0;
}

/* out [C] = partial sums [blocks, Cp] added in order, in place of the first. */
static void sum_blocks(ps_view *out, float *part, int64_t blocks, const struct norm *n)
{
    for (int64_t k = 1; k < blocks; k++)
        for (int64_t i = 0; i < n->Cp; i += VL)
            vf_store(part + i, vf_load(part + i) + vf_load(part + k * n->Cp + i));
    for (int64_t i = 0; i < n->C; i++)
        ps_put_one(out->data, i, out->dtype, blocks ? part[pair_place(i, n->dtype)] : 0.0f);
}

static int norm_backward(ps_call *call, int rms, int want_w)
{
    const ps_view *dy = &call->in[0], *x = &call->in[1], *w = &call->in[2], *mean = rms ? NULL : &call->in[3];
    const ps_view *rstd = &call->in[rms ? 3 : 4], *add = &call->in[rms ? 4 : 5];
    ps_view *dx = &call->out[0], *dw = &call->out[1], *db = rms ? NULL : &call->out[2];
    bool has_dw = ps_has(dw), has_db = db && ps_has(db);
    struct norm n = { .dtype = x->dtype, .rms = rms, .C = ps_last_dim(x), .x = x->data, .dy = dy->data };
    if (n.C == 0 || dy->dtype != x->dtype || !usable(dy) || !usable(x) || !usable(w) || !usable(add) || !usable(dx) ||
        !usable(dw) || (db && !usable(db)) || (ps_has(dx) && dx->dtype != x->dtype) ||
        (ps_has(add) && add->dtype != x->dtype) || rstd->dtype != PS_F32 || (mean && mean->dtype != PS_F32))
        return PS_EUNSUP;
    set_sizes(&n, x);
    n.want_w = want_w && (has_dw || has_db);
    n.dx = ps_has(dx) ? dx->data : NULL;
    n.add = ps_has(add) ? add->data : NULL;
    n.mean = mean ? mean->data : NULL;
    n.rstd = rstd->data;
    int64_t blocks = (n.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    n.w = padded_row(call, w, 1.0f, &n);
    if (!n.w) return PS_ENOMEM;
    if (n.want_w) {
        size_t nbytes = (size_t)(2 * blocks * n.Cp) * sizeof(float);
        n.dw = call->scratch(call, nbytes ? nbytes : 1);
        if (!n.dw) return PS_ENOMEM;
        n.db = n.dw + blocks * n.Cp;
    }
    if (call->dry) return 0;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t k = 0; k < blocks; k++) PS_BY_VEC(n.dtype, backward_rows, &n, k);
    if (n.want_w && has_dw) sum_blocks(dw, n.dw, blocks, &n);
    if (n.want_w && has_db) sum_blocks(db, n.db, blocks, &n);
    return 0;
}

static int layer_norm(ps_call *call)
{
    return norm_forward(call, 0, ((const struct ps_attrs_layer_norm *)call->attrs)->eps);
}
static int rms_norm(ps_call *call)
{
    return norm_forward(call, 1, ((const struct ps_attrs_rms_norm *)call->attrs)->eps);
}
static int layer_norm_backward(ps_call *call)
{
    return norm_backward(call, 0, ((const struct ps_attrs_layer_norm_backward *)call->attrs)->want_w);
}
static int rms_norm_backward(ps_call *call)
{
    return norm_backward(call, 1, ((const struct ps_attrs_rms_norm_backward *)call->attrs)->want_w);
}

/* -- dropout ----------------------------------------------------------------------------------------------------- */
/* The two halves of a * k, lane by lane. */
SIMD void mul_wide(vu a, uint32_t k, vu *hi, vu *lo)
{
#if defined(__AVX512F__)
    __m512i kk = _mm512_set1_epi32((int)k), even = _mm512_mul_epu32((__m512i)a, kk);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), kk);
    *hi = (vu)_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
    *lo = (vu)_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CCAA);
#elif defined(__AVX2__)
    union { vu v; __m256i h[2]; } x = { a }, high, low;
    __m256i kk = _mm256_set1_epi32((int)k);
    for (int i = 0; i < 2; i++) {
        __m256i even = _mm256_mul_epu32(x.h[i], kk), odd = _mm256_mul_epu32(_mm256_srli_epi64(x.h[i], 32), kk);
        high.h[i] = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
        low.h[i] = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    }
    *hi = high.v, *lo = low.v;
#else
    for (int i = 0; i < VL; i++) {
        uint64_t p = (uint64_t)a[i] * k;
        (*hi)[i] = (uint32_t)(p >> 32), (*lo)[i] = (uint32_t)p;
    }
#endif
}
/* Turns each group of four lanes of four vectors, seen as a 4 x 4 matrix, over its diagonal. */
SIMD void transpose_groups(vu w[4])
{
#if defined(__AVX512F__)
    __m512i w0 = (__m512i)w[0], w1 = (__m512i)w[1], w2 = (__m512i)w[2], w3 = (__m512i)w[3];
    __m512i a = _mm512_unpacklo_epi32(w0, w1), b = _mm512_unpackhi_epi32(w0, w1);
    __m512i c = _mm512_unpacklo_epi32(w2, w3), d = _mm512_unpackhi_epi32(w2, w3);
    w[0] = (vu)_mm512_unpacklo_epi64(a, c), w[1] = (vu)_mm512_unpackhi_epi64(a, c);
    w[2] = (vu)_mm512_unpacklo_epi64(b, d), w[3] = (vu)_mm512_unpackhi_epi64(b, d);
#else
    uint32_t from[4][VL], to[4][VL];
    memcpy(from, w, sizeof from);
    for (int g = 0; g < VL; g += 4)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) to[i][g + j] = from[j][g + i];
    memcpy(w, to, sizeof to);
#endif
}
/* The random words of elements e .. e + 63 of a sample, e a multiple of 64, in element order. Lane 4 l + k works on
 * counter 4 k + l, so that transposing groups of four lanes leaves the words in order. */
SIMD void philox64(uint64_t key, uint32_t sample, uint32_t step, uint32_t op, uint32_t counter, vu w[4])
{
    const vu order = { 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15 };
    vu zero = { 0 }, c0 = order + counter, c1 = zero + sample, c2 = zero + op, c3 = zero + step;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        vu h0, l0, h1, l1;
        mul_wide(c0, 0xD2511F53u, &h0, &l0);
        mul_wide(c2, 0xCD9E8D57u, &h1, &l1);
        c0 = h1 ^ c1 ^ k0, c2 = h0 ^ c3 ^ k1, c1 = l1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    w[0] = c0, w[1] = c1, w[2] = c2, w[3] = c3;
    transpose_groups(w);
}
struct dropout {
    const void *x;                    /* [samples, E] */
    void *y;
    int64_t E;
    const struct ps_attrs_dropout *attrs;
    int32_t threshold;                /* a word's upper 24 bits drop below this: bits * 2^-24 < (float)p, exactly */
    float scale;
};
SIMD void dropout_span(const struct dropout *d, int64_t sample, int64_t first, int64_t last, int dtype)
{
    const void *x = ps_at(d->x, sample * d->E, dtype);
    void *y = ps_at(d->y, sample * d->E, dtype);
    vf scale = vf_set(d->scale);
    vi threshold = vi_set(d->threshold);
    for (int64_t e = first; e < last; e += 4 * VL) {
        vu w[4];
        philox64(d->attrs->seed, (uint32_t)(d->attrs->sample + (uint64_t)sample), (uint32_t)d->attrs->step,
                 d->attrs->op, (uint32_t)(e / 4), w);
        for (int k = 0; k < 4; k++) {
            int64_t i = e + k * VL;
            vi drop = (vi)(w[k] >> 8) < threshold;
            if (i + VL <= last)
                vf_put(y, i, dtype, (vf)(~drop & (vi)(vf_get(x, i, dtype) * scale)));
            else if (i < last)
                vf_put_n(y, i, dtype, (int)(last - i),
                         (vf)(~drop & (vi)(vf_get_n(x, i, dtype, (int)(last - i), 0.0f) * scale)));
        }
    }
}
static int dropout(ps_call *call)
{
    const struct ps_attrs_dropout *a = call->attrs;
    const ps_view *x = &call->in[0];
    ps_view *y = &call->out[0];
    if (!usable(x) || !usable(y) || x->dtype != y->dtype) return PS_EUNSUP;
    if (x->numel == 0) return 0;
    int64_t samples = x->ndim > 0 ? x->shape[0] : 1, E = x->numel / samples;
    int64_t chunks = (E + DROPOUT_BLOCK - 1) / DROPOUT_BLOCK;
    struct dropout d = { .x = x->data, .y = y->data, .E = E, .attrs = a,
                         .threshold = (int32_t)ceil((double)(float)a->p * 0x1p24),
                         .scale = (float)(1.0 / (1.0 - a->p)) };
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN / 4)
    for (int64_t c = 0; c < samples * chunks; c++) {
        int64_t first = c % chunks * DROPOUT_BLOCK, last = first + DROPOUT_BLOCK < E ? first + DROPOUT_BLOCK : E;
        PS_BY_VEC(x->dtype, dropout_span, &d, c / chunks, first, last);
    }
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_norm)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_norm)(ps_kernel *k)
{
    k[PS_OP_layer_norm] = layer_norm;
    k[PS_OP_layer_norm_backward] = layer_norm_backward;
    k[PS_OP_rms_norm] = rms_norm;
    k[PS_OP_rms_norm_backward] = rms_norm_backward;
    k[PS_OP_dropout] = dropout;
}
