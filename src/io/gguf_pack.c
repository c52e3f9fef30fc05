/* SPDX-License-Identifier: BSD-3-Clause
 * Packs values into GGUF's blocks. The result is the same, byte for byte, as the result of ggml's reference quantiser
 * without an importance matrix. Therefore this file performs the same fp32 operations in the same order as ggml. The
 * values must be finite, and so small that the scale of each block fits into fp16. gguf_write.c checks this. */
#include "io/gguf.h"
#include "base/blocks.h"
#include "base/error.h"
#include "base/half.h"
#include <float.h>
#include <math.h>
#include <string.h>

static void put_half(uint8_t *s, float f)
{
    uint16_t h = ps_f32_to_f16(f);
    memcpy(s, &h, 2);
}

static float rounded_half(float f) { return ps_f16_to_f32(ps_f32_to_f16(f)); }

/* Rounds f to the nearest integer. If two integers are equally near, rounds to the even integer. |f| must be < 2^22. */
static int nearest(float f)
{
    float shifted = f + 12582912.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    return (bits & 0x7fffff) - 0x400000;
}

static int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

/* Returns the value with the largest magnitude, including its sign. If several values have this magnitude, returns the
 * first of them. */
static float largest(const float *x, int n)
{
    float most = 0, value = 0;
    for (int i = 0; i < n; i++) if (most < fabsf(x[i])) most = fabsf(x[i]), value = x[i];
    return value;
}

static void range_of(const float *x, int n, float *min, float *max)
{
    *min = FLT_MAX, *max = -FLT_MAX;
    for (int i = 0; i < n; i++) {
        if (x[i] < *min) *min = x[i];
        if (x[i] > *max) *max = x[i];
    }
}

/* -- blocks of 32 -------------------------------------------------------------------------------------------------- */
static void pack_q4_0(const float *x, uint8_t *s)
{
    float d = largest(x, 32) / -8, by = d ? 1.0f / d : 0.0f;
    put_half(s, d);
    for (int k = 0; k < 16; k++) {
        int low = clamp((int8_t)(x[k] * by + 8.5f), 0, 15), high = clamp((int8_t)(x[16 + k] * by + 8.5f), 0, 15);
        s[2 + k] = (uint8_t)(low | high << 4);
    }
}

static void pack_q4_1(const float *x, uint8_t *s)
{
    float min, max;
    range_of(x, 32, &min, &max);
    float d = (max - min) / 15, by = d ? 1.0f / d : 0.0f;
    put_half(s, d), put_half(s + 2, min);
    for (int k = 0; k < 16; k++) {
        int low = clamp((int8_t)((x[k] - min) * by + 0.5f), 0, 15);
        int high = clamp((int8_t)((x[16 + k] - min) * by + 0.5f), 0, 15);
        s[4 + k] = (uint8_t)(low | high << 4);
    }
}

static void put_fives(const int *q, uint8_t *high_at, uint8_t *s)
{
    uint32_t high = 0;
    for (int k = 0; k < 16; k++) {
        s[k] = (uint8_t)((q[k] & 15) | (q[16 + k] & 15) << 4);
        high |= (uint32_t)(q[k] >> 4 & 1) << k | (uint32_t)(q[16 + k] >> 4 & 1) << (16 + k);
    }
    memcpy(high_at, &high, 4);
}

static void pack_q5_0(const float *x, uint8_t *s)
{
    int q[32];
    float d = largest(x, 32) / -16, by = d ? 1.0f / d : 0.0f;
    put_half(s, d);
    for (int k = 0; k < 32; k++) q[k] = clamp((int8_t)(x[k] * by + 16.5f), 0, 31);
    put_fives(q, s + 2, s + 6);
}

static void pack_q5_1(const float *x, uint8_t *s)
{
    int q[32];
    float min, max;
    range_of(x, 32, &min, &max);
    float d = (max - min) / 31, by = d ? 1.0f / d : 0.0f;
    put_half(s, d), put_half(s + 2, min);
    for (int k = 0; k < 32; k++) q[k] = (uint8_t)((x[k] - min) * by + 0.5f);
    put_fives(q, s + 4, s + 8);
}

/* -- Q6_K ---------------------------------------------------------------------------------------------------------- */
enum { PART = 16, HALF_RANGE = 32 };
static const float TINY = 1e-15f;

/* For each value x, rounds factor * x to an integer l and weights it with w = x * x. Sets *lx to the sum of w * x * l.
 * Sets *ll to the sum of w * l * l. */
static void weigh(const float *x, float factor, float *lx, float *ll)
{
    *lx = *ll = 0;
    for (int i = 0; i < PART; i++) {
        int l = clamp(nearest(factor * x[i]), -HALF_RANGE, HALF_RANGE - 1);
        float w = x[i] * x[i];
        *lx += w * x[i] * (float)l;
        *ll += w * (float)l * (float)l;
    }
}

/* Quantises 16 values to integers from -32 to 31, and returns their scale. Tries 19 factors by which the values are
 * multiplied before they are rounded, and uses the factor with the smallest error. The error of each value is weighted
 * by the square of the value. The scale is 0 if all values are 0. */
static float scale_of_part(const float *x, uint8_t *q)
{
    float max = largest(x, PART), lx, ll, used;
    if (fabsf(max) < TINY) {
        memset(q, 0, PART);
        return 0;
    }
    used = -HALF_RANGE / max;
    weigh(x, used, &lx, &ll);
    float scale = ll ? lx / ll : 0.0f, best = scale * lx;
    for (int step = -9; step <= 9; step++) {
        if (step == 0) continue;
        float factor = -((float)HALF_RANGE + 0.1f * (float)step) / max;
        weigh(x, factor, &lx, &ll);
        if (ll > 0 && lx * lx > best * ll) used = factor, scale = lx / ll, best = scale * lx;
    }
    for (int i = 0; i < PART; i++)
        q[i] = (uint8_t)(HALF_RANGE + clamp(nearest(used * x[i]), -HALF_RANGE, HALF_RANGE - 1));
    return scale;
}

static void pack_q6_k(const float *x, uint8_t *s)
{
    uint8_t q[256], *low = s, *high = s + 128;
    int8_t *scales = (int8_t *)s + 192;
    float part[16], max = 0;
    for (int p = 0; p < 16; p++) {
        part[p] = scale_of_part(x + PART * p, q + PART * p);
        if (fabsf(part[p]) > fabsf(max)) max = part[p];
    }
    memset(s, 0, 210);
    if (fabsf(max) < TINY) return;
    float by = -128.0f / max;
    put_half(s + 208, 1 / by);
    float d = rounded_half(1 / by);
    for (int p = 0; p < 16; p++) {
        int scale = nearest(by * part[p]);
        scales[p] = (int8_t)(scale > 127 ? 127 : scale);
        float whole = d * (float)scales[p];
        for (int i = 0; whole && i < PART; i++)
            q[PART * p + i] = (uint8_t)(HALF_RANGE + clamp(nearest(x[PART * p + i] / whole), -32, 31));
    }
    for (int n = 0; n < 256; n++) {
        int half = n / 128, k = n % 128 / 32;
        low[half * 64 + n % 64] |= (uint8_t)((q[n] & 15) << (n % 128 / 64 * 4));
        high[half * 32 + n % 32] |= (uint8_t)((q[n] >> 4) << (2 * k));
    }
}

/* -- Q4_K ---------------------------------------------------------------------------------------------------------- */
typedef struct line { float scale, min; } line;        /* value = scale * integer + min */

static float error_of(const float *x, const float *w, const uint8_t *q, line l)
{
    float sum = 0;
    for (int i = 0; i < 32; i++) {
        float off = l.scale * (float)q[i] + l.min - x[i];
        off = off * off;
        sum += w[i] * off;
    }
    return sum;
}

/* Rounds factor * (value - min) to an integer for each value. Then sets *out to the line that maps these integers to
 * the values with the smallest weighted square error. Returns false if no line is determined, because all integers are
 * equal. */
static bool fit(const float *x, const float *w, float min, float factor, float sum_w, float sum_x, uint8_t *q,
                line *out)
{
    float l1 = 0, l2 = 0, xl = 0;
    for (int i = 0; i < 32; i++) {
        int l = clamp(nearest(factor * (x[i] - min)), 0, 15);
        q[i] = (uint8_t)l;
        l1 += w[i] * (float)l;
        l2 += w[i] * (float)l * (float)l;
        xl += w[i] * (float)l * x[i];
    }
    float det = sum_w * l2 - l1 * l1;
    if (!(det > 0)) return false;
    *out = (line){ (sum_w * xl - sum_x * l1) / det, (l2 * sum_x - l1 * xl) / det };
    if (out->min > 0) *out = (line){ xl / l2, 0 };
    return true;
}

/* Quantises 32 values to integers from 0 to 15. Returns the scale and the minimum of the values. `min` is at most 0. */
static line line_of_part(const float *x, const float *w, uint8_t *q)
{
    uint8_t other[32];
    float min = x[0], max = x[0], sum_w = w[0], sum_x = sum_w * x[0];
    for (int i = 1; i < 32; i++) {
        if (x[i] < min) min = x[i];
        if (x[i] > max) max = x[i];
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    if (min > 0) min = 0;
    memset(q, 0, 32);
    if (max == min) return (line){ 0, min };
    float factor = 15 / (max - min), low = min;
    line best = { 1 / factor, min }, now;
    for (int i = 0; i < 32; i++) q[i] = (uint8_t)clamp(nearest(factor * (x[i] - min)), 0, 15);
    float error = error_of(x, w, q, best);
    for (int step = 0; step <= 20; step++) {
        factor = (-1.0f + 0.1f * (float)step + 15) / (max - low);
        if (!fit(x, w, low, factor, sum_w, sum_x, other, &now)) continue;
        float e = error_of(x, w, other, now);
        if (!(e < error)) continue;
        memcpy(q, other, 32);
        error = e, best = now, low = now.min;
    }
    return best;
}

static void pack_q4_k(const float *x, uint8_t *s)
{
    uint8_t q[256], *scales = s + 4;
    line part[8];
    float w[32], most = 0, least = 0;
    for (int p = 0; p < 8; p++) {
        float squares = 0;
        for (int i = 0; i < 32; i++) squares += x[32 * p + i] * x[32 * p + i];
        float mean = sqrtf(squares / 32);
        for (int i = 0; i < 32; i++) w[i] = mean + fabsf(x[32 * p + i]);
        part[p] = line_of_part(x + 32 * p, w, q + 32 * p);
        if (part[p].scale > most) most = part[p].scale;
        if (-part[p].min > least) least = -part[p].min;
    }
    memset(s, 0, 144);
    float by = most > 0 ? 63.0f / most : 0.0f, by_min = least > 0 ? 63.0f / least : 0.0f;
    put_half(s, most / 63.0f), put_half(s + 2, least / 63.0f);
    float d = rounded_half(most / 63.0f), m = rounded_half(least / 63.0f);
    for (int p = 0; p < 8; p++) {
        int scale = (uint8_t)nearest(by * part[p].scale), min = (uint8_t)nearest(by_min * -part[p].min);
        scale = scale > 63 ? 63 : scale, min = min > 63 ? 63 : min;
        if (p < 4) scales[p] |= (uint8_t)scale, scales[p + 4] |= (uint8_t)min;
        else {
            scales[p + 4] = (uint8_t)((scale & 15) | (min & 15) << 4);
            scales[p - 4] |= (uint8_t)(scale >> 4 << 6), scales[p] |= (uint8_t)(min >> 4 << 6);
        }
        float whole = d * (float)scale, less = m * (float)min;
        for (int i = 0; whole && i < 32; i++)
            q[32 * p + i] = (uint8_t)clamp(nearest((x[32 * p + i] + less) / whole), 0, 15);
    }
    for (int n = 0; n < 256; n++) s[16 + n / 64 * 32 + n % 32] |= (uint8_t)(q[n] << (n % 64 / 32 * 4));
}

/* Returns the index of the NF4 value that is nearest to x. If two values are equally near, returns the lower index. */
static uint8_t nf4_of(float x)
{
    int i = 0;
    while (i < 15 && x - ps_nf4[i] > ps_nf4[i + 1] - x) i++;
    return (uint8_t)i;
}

static void pack_nf4(const float *x, uint8_t *s)
{
    float most = 0;
    for (int k = 0; k < 64; k++) most = fmaxf(most, fabsf(x[k]));
    memcpy(s, &most, 4);
    for (int k = 0; k < 32; k++) {
        float a = most > 0 ? x[2 * k] / most : 0, b = most > 0 ? x[2 * k + 1] / most : 0;
        s[4 + k] = (uint8_t)(nf4_of(a) << 4 | nf4_of(b));
    }
}

gguf_pack gguf_pack_of(int number)
{
    switch (number) {
    case PS_Q4_0: return pack_q4_0;
    case PS_Q4_1: return pack_q4_1;
    case PS_Q5_0: return pack_q5_0;
    case PS_Q5_1: return pack_q5_1;
    case PS_Q8_0: return ps_pack_q8_0;
    case PS_Q4_K: return pack_q4_k;
    case PS_Q6_K: return pack_q6_k;
    case PS_NF4: return pack_nf4;
    default: return NULL;
    }
}

int ps_pack(int type, const float *values, int64_t numel, void *out)
{
    const ps_blocks *b = ps_blocks_of(type);
    gguf_pack pack = gguf_pack_of(type);
    PS_NEED(values);
    PS_NEED(out);
    if (!b || !pack) return ps_fail(PS_EUNSUP, "ps_pack: type %d cannot be written", type);
    if (numel < 0 || numel % b->block)
        return ps_fail(PS_EINVAL, "ps_pack: %lld values are not a whole number of blocks of %s, which have %d values",
                       (long long)numel, b->name, b->block);
    for (int64_t i = 0; i < numel; i++)
        if (!(fabsf(values[i]) <= 65504.0f))
            return ps_fail(PS_ERANGE, "ps_pack: value %lld is %g; a block of %s holds finite values up to 65504",
                           (long long)i, (double)values[i], b->name);
    int64_t n = numel / b->block;
#pragma omp parallel for schedule(static) if (n > 256)
    for (int64_t i = 0; i < n; i++) pack(values + i * b->block, (uint8_t *)out + i * b->bytes);
    return 0;
}
