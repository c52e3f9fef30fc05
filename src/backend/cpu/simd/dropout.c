/* SPDX-License-Identifier: BSD-3-Clause
 * Dropout for contiguous fp32, bf16 and fp16 tensors. This file is compiled once per instruction set. A mask depends
 * only on seed, step, op, sample and element. */
#define PS_ANY_LANES
#include "backend/cpu/simd/operand.h"

enum { DROPOUT_BLOCK = 4096 };
static bool usable(const ps_view *v) { return !ps_has(v) || (is_lane_type(v->dtype) && view_flat(v)); }

/* Computes the upper and the lower half of a * k in each lane. */
SIMD void mul_wide(vu a, uint32_t k, vu *hi, vu *lo)
{
#if defined(__AVX512F__)
    __m512i kk = _mm512_set1_epi32((int)k), even = _mm512_mul_epu32((__m512i)a, kk);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), kk);
    *hi = (vu)_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
    *lo = (vu)_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CCAA);
#elif defined(__AVX2__)
    __m256i kk = _mm256_set1_epi32((int)k), even = _mm256_mul_epu32((__m256i)a, kk);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), kk);
    *hi = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    *lo = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#elif defined(PS_SSE2)
    __m128i kk = _mm_set1_epi32((int)k), even = _mm_mul_epu32((__m128i)a, kk);
    __m128i odd = _mm_mul_epu32(_mm_srli_epi64((__m128i)a, 32), kk), upper = _mm_set_epi32(-1, 0, -1, 0);
    *hi = (vu)_mm_or_si128(_mm_srli_epi64(even, 32), _mm_and_si128(odd, upper));
    *lo = (vu)_mm_or_si128(_mm_andnot_si128(upper, even), _mm_slli_epi64(odd, 32));
#else
    for (int i = 0; i < VL; i++) {
        uint64_t p = (uint64_t)a[i] * k;
        (*hi)[i] = (uint32_t)(p >> 32), (*lo)[i] = (uint32_t)p;
    }
#endif
}
/* Transposes each group of four lanes of the four vectors, as a 4 x 4 matrix. */
SIMD void transpose_groups(vu w[4])
{
#if defined(__AVX512F__)
    __m512i w0 = (__m512i)w[0], w1 = (__m512i)w[1], w2 = (__m512i)w[2], w3 = (__m512i)w[3];
    __m512i a = _mm512_unpacklo_epi32(w0, w1), b = _mm512_unpackhi_epi32(w0, w1);
    __m512i c = _mm512_unpacklo_epi32(w2, w3), d = _mm512_unpackhi_epi32(w2, w3);
    w[0] = (vu)_mm512_unpacklo_epi64(a, c), w[1] = (vu)_mm512_unpackhi_epi64(a, c);
    w[2] = (vu)_mm512_unpacklo_epi64(b, d), w[3] = (vu)_mm512_unpackhi_epi64(b, d);
#elif defined(__AVX2__)
    __m256i w0 = (__m256i)w[0], w1 = (__m256i)w[1], w2 = (__m256i)w[2], w3 = (__m256i)w[3];
    __m256i a = _mm256_unpacklo_epi32(w0, w1), b = _mm256_unpackhi_epi32(w0, w1);
    __m256i c = _mm256_unpacklo_epi32(w2, w3), d = _mm256_unpackhi_epi32(w2, w3);
    w[0] = (vu)_mm256_unpacklo_epi64(a, c), w[1] = (vu)_mm256_unpackhi_epi64(a, c);
    w[2] = (vu)_mm256_unpacklo_epi64(b, d), w[3] = (vu)_mm256_unpackhi_epi64(b, d);
#elif defined(PS_SSE2)
    __m128i w0 = (__m128i)w[0], w1 = (__m128i)w[1], w2 = (__m128i)w[2], w3 = (__m128i)w[3];
    __m128i a = _mm_unpacklo_epi32(w0, w1), b = _mm_unpackhi_epi32(w0, w1);
    __m128i c = _mm_unpacklo_epi32(w2, w3), d = _mm_unpackhi_epi32(w2, w3);
    w[0] = (vu)_mm_unpacklo_epi64(a, c), w[1] = (vu)_mm_unpackhi_epi64(a, c);
    w[2] = (vu)_mm_unpacklo_epi64(b, d), w[3] = (vu)_mm_unpackhi_epi64(b, d);
#else
    uint32_t from[4][VL], to[4][VL];
    memcpy(from, w, sizeof from);
    for (int g = 0; g < VL; g += 4)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) to[i][g + j] = from[j][g + i];
    memcpy(w, to, sizeof to);
#endif
}
/* Computes Philox in each lane: turns the four words c0 to c3 of a counter into four random words. */
SIMD void philox_lanes(uint64_t key, vu c0, vu c1, vu c2, vu c3, vu w[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        vu h0, l0, h1, l1;
        mul_wide(c0, 0xD2511F53u, &h0, &l0);
        mul_wide(c2, 0xCD9E8D57u, &h1, &l1);
        c0 = h1 ^ c1 ^ k0, c2 = h0 ^ c3 ^ k1, c1 = l1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    w[0] = c0, w[1] = c1, w[2] = c2, w[3] = c3;
}
/* Computes the random words of 4 * VL elements in order, starting at element 4 * counter. Lane 4 * l + k computes
 * counter + VL / 4 * k + l. If each group of four lanes is then transposed, the words are in the order of the
 * elements. */
SIMD void philox_block(uint64_t key, uint32_t sample, uint32_t step, uint32_t op, uint32_t counter, vu w[4])
{
    const vu lane = PS_LANE_NUMBERS, order = lane % 4 * (VL / 4) + lane / 4;
    vu zero = { 0 };
    philox_lanes(key, order + counter, zero + sample, zero + op, zero + step, w);
    transpose_groups(w);
}
struct dropout {
    const void *x;
    void *y;
    const struct ps_attrs_dropout *attrs;
    int32_t threshold;                /* an element is dropped if the upper 24 bits of its word are a number below
                                       * threshold; this is the case exactly if bits * 2^-24 < (float)p */
    float scale;
};
/* Computes lanes [from, to) of the vector that begins at y[i], from x and the random words of the lanes. */
SIMD void drop_some(const struct dropout *d, int64_t i, vu word, int from, int to, int dtype)
{
    for (int lane = from; lane < to; lane++) {
        vf x = vf_get_n(d->x, i + lane, dtype, 1, 0.0f) * vf_set(d->scale);
        if ((int32_t)(word[lane] >> 8) < d->threshold) x = vf_zero();
        vf_put_n(d->y, i + lane, dtype, 1, x);
    }
}
/* Processes elements [begin, end) of a sample. Element e of the sample is element at + e of x and y. */
SIMD void dropout_span(const struct dropout *d, uint64_t sample, int64_t begin, int64_t end, int64_t at, int dtype)
{
    vf scale = vf_set(d->scale);
    vi threshold = vi_set(d->threshold);
    for (int64_t e = begin / 4 * 4; e < end; e += 4 * VL) {
        vu w[4];
        philox_block(d->attrs->seed, (uint32_t)(d->attrs->sample + sample), (uint32_t)d->attrs->step, d->attrs->op,
                     (uint32_t)(e / 4), w);
#pragma GCC unroll 4                               /* keeps the words in registers */
        for (int k = 0; k < 4; k++) {
            int64_t v = e + k * VL, i = at + v;
            vi drop = (vi)(w[k] >> 8) < threshold;
            if (v < begin)
                drop_some(d, i, w[k], (int)(begin - v), (int)(end - v < VL ? end - v : VL), dtype);
            else if (v + VL <= end)
                vf_put(d->y, i, dtype, (vf)(~drop & (vi)(vf_get(d->x, i, dtype) * scale)));
            else if (v < end)
                vf_put_n(d->y, i, dtype, (int)(end - v),
                         (vf)(~drop & (vi)(vf_get_n(d->x, i, dtype, (int)(end - v), 0.0f) * scale)));
        }
    }
}
/* Processes elements [begin, end) of x, where each element is a sample of its own. */
SIMD void dropout_singles(const struct dropout *d, int64_t begin, int64_t end, int dtype)
{
    vf scale = vf_set(d->scale);
    vi threshold = vi_set(d->threshold);
    vu zero = { 0 };
    const vu lane = PS_LANE_NUMBERS;
    for (int64_t i = begin; i < end; i += VL) {
        vu w[4];
        philox_lanes(d->attrs->seed, zero, lane + (uint32_t)(d->attrs->sample + (uint64_t)(d->attrs->first + i)),
                     zero + d->attrs->op, zero + (uint32_t)d->attrs->step, w);
        vi drop = (vi)(w[0] >> 8) < threshold;
        if (i + VL <= end) vf_put(d->y, i, dtype, (vf)(~drop & (vi)(vf_get(d->x, i, dtype) * scale)));
        else
            vf_put_n(d->y, i, dtype, (int)(end - i),
                     (vf)(~drop & (vi)(vf_get_n(d->x, i, dtype, (int)(end - i), 0.0f) * scale)));
    }
}
/* Processes a tensor x that consists of some rows of a larger tensor. `rows` contains the indices of these rows in the
 * larger tensor. Each row has `width` consecutive elements of one sample. */
static int dropout_rows(const struct dropout *d, const ps_view *rows, int64_t width, int dtype)
{
    int64_t n = d->attrs->per_sample;
    PS_TRY(ps_check_indices(rows, INT64_MAX / width));
#pragma omp parallel for schedule(static) if (rows->numel * width >= PS_PAR_MIN / 4)
    for (int64_t r = 0; r < rows->numel; r++) {
        int64_t g = ps_index_at(rows, r) * width, begin = g % n;
        PS_BY_VEC(dtype, dropout_span, d, (uint64_t)(g / n), begin, begin + width, r * width - begin);
    }
    return 0;
}
static int dropout(ps_call *call)
{
    const struct ps_attrs_dropout *a = call->attrs;
    const ps_view *x = &call->in[0], *rows = &call->in[1];
    ps_view *y = &call->out[0];
    if (!usable(x) || !usable(y) || x->dtype != y->dtype || (ps_has(rows) && !view_flat(rows))) return PS_EUNSUP;
    if (x->numel == 0) return 0;
    struct dropout d = { .x = x->data, .y = y->data, .attrs = a,
                         .threshold = (int32_t)ceil((double)(float)a->p * 0x1p24),
                         .scale = (float)(1.0 / (1.0 - a->p)) };
    if (ps_has(rows)) return dropout_rows(&d, rows, x->numel / rows->numel, x->dtype);
    if (a->per_sample == 1) {
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN / 4)
        for (int64_t i = 0; i < x->numel; i += DROPOUT_BLOCK)
            PS_BY_VEC(x->dtype, dropout_singles, &d, i, i + DROPOUT_BLOCK < x->numel ? i + DROPOUT_BLOCK : x->numel);
        return 0;
    }
    int64_t n = a->per_sample, last = a->first + x->numel, blocks = (n - 1) / DROPOUT_BLOCK + 1;
    /* the first and the last of the samples that have elements in x */
    int64_t from = a->first / n, to = (last - 1) / n;
    int64_t first_block = a->first % n / DROPOUT_BLOCK;
    int64_t last_block = (to - from) * blocks + (last - 1) % n / DROPOUT_BLOCK;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN / 4)
    for (int64_t b = first_block; b <= last_block; b++) {
        int64_t s = from + b / blocks, begin = b % blocks * DROPOUT_BLOCK, end = begin + DROPOUT_BLOCK;
        /* the range of the sample's elements that are in x */
        int64_t least = a->first - s * n, most = last - s * n < n ? last - s * n : n;
        if (begin < least) begin = least;
        if (end > most) end = most;
        if (begin < end) PS_BY_VEC(x->dtype, dropout_span, &d, (uint64_t)s, begin, end, -least);
    }
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_dropout)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_dropout)(ps_kernel *k) { k[PS_OP_dropout] = dropout; }
