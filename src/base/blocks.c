/* SPDX-License-Identifier: BSD-3-Clause
 * Unpacks blocks of packed numbers. The results have the same bits as the results of ggml, and for NF4 the same bits
 * as the results of bitsandbytes, because each value is computed by the same fp32 operations in the same order. d and
 * m are fp16 scales of a block. qs are the low bits of its numbers, and qh are their high bits. */
#include "base/blocks.h"
#include "base/half.h"
#include <math.h>
#include <stddef.h>
#include <string.h>

static float half_at(const uint8_t *s)
{
    uint16_t h;
    memcpy(&h, s, 2);
    return ps_f16_to_f32(h);
}

static uint32_t u32_at(const uint8_t *s)
{
    uint32_t u;
    memcpy(&u, s, 4);
    return u;
}

/* -- blocks of 32: number k is in the low half of byte k, and number 16 + k is in the high half of byte k -------- */
void ps_unpack_q4_0(const uint8_t *s, float *out)
{
    float d = half_at(s);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)((s[2 + k] & 15) - 8);
        out[16 + k] = d * (float)((s[2 + k] >> 4) - 8);
    }
}

void ps_unpack_q4_1(const uint8_t *s, float *out)
{
    float d = half_at(s), m = half_at(s + 2);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)(s[4 + k] & 15) + m;
        out[16 + k] = d * (float)(s[4 + k] >> 4) + m;
    }
}

void ps_unpack_q5_0(const uint8_t *s, float *out)
{
    float d = half_at(s);
    uint32_t high = u32_at(s + 2);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)((int)((s[6 + k] & 15) | (high >> k & 1) << 4) - 16);
        out[16 + k] = d * (float)((int)((s[6 + k] >> 4) | (high >> (16 + k) & 1) << 4) - 16);
    }
}

void ps_unpack_q5_1(const uint8_t *s, float *out)
{
    float d = half_at(s), m = half_at(s + 2);
    uint32_t high = u32_at(s + 4);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)((s[8 + k] & 15) | (high >> k & 1) << 4) + m;
        out[16 + k] = d * (float)((s[8 + k] >> 4) | (high >> (16 + k) & 1) << 4) + m;
    }
}

void ps_unpack_q8_0(const uint8_t *s, float *out)
{
    float d = half_at(s);
    for (int k = 0; k < 32; k++) out[k] = (float)(int8_t)s[2 + k] * d;
}

/* Rounds to the nearest integer, and rounds ties away from zero, as roundf does. |f| must be at most 128. The
 * function adds a constant to |f| and drops the fraction. The constant is the largest float below 1/2. With 1/2
 * itself, the sum would be rounded up for some fractions below 1/2. */
static inline int32_t rounded(float f) { return (int32_t)(f + copysignf(0x1.fffffep-2f, f)); }

/* The scale is rounded to fp16. If a value is not finite or is too large for the scale, the block is unpacked to NaN
 * or infinity. */
void ps_pack_q8_0(const float *x, uint8_t *s)
{
    int32_t most = 0;                      /* bit pattern of the largest magnitude; patterns are ordered like
                                            * magnitudes */
    for (int k = 0; k < 32; k++) {
        int32_t m = (int32_t)(ps_f32_bits(x[k]) & 0x7fffffff);
        most = m > most ? m : most;
    }
    bool odd = most >= 0x7f800000;         /* true if some value is not finite */
    float d = ps_bits_f32((uint32_t)most) / 127, by = d ? 1.0f / d : 0.0f;
    uint16_t h = ps_f32_to_f16(odd ? NAN : d);
    memcpy(s, &h, 2);
    if (odd) memset(s + 2, 0, 32);
    else for (int k = 0; k < 32; k++) s[2 + k] = (uint8_t)(int8_t)rounded(x[k] * by);
}

static const int8_t iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

void ps_unpack_iq4_nl(const uint8_t *s, float *out)
{
    float d = half_at(s);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)iq4_values[s[2 + k] & 15];
        out[16 + k] = d * (float)iq4_values[s[2 + k] >> 4];
    }
}

/* The scale is one byte, which contains the exponent of a power of two. The code uses half the scale, because the
 * values in its table are twice the e2m1 values. */
void ps_unpack_mxfp4(const uint8_t *s, float *out)
{
    static const int8_t twice[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
    float d = ps_bits_f32(s[0] < 2 ? 0x00200000u << s[0] : (uint32_t)(s[0] - 1) << 23);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)twice[s[1 + k] & 15];
        out[16 + k] = d * (float)twice[s[1 + k] >> 4];
    }
}

/* -- blocks of 256 numbers; the parts of a block have scales of their own ---------------------------------------- */
/* A block consists of 16 bytes of scales, 64 bytes of values, d, and dmin. Each byte of scales contains the scale and
 * the minimum of 16 values. Each group of 32 bytes of values contains 128 values: value 32 * k + i is in bits 2 * k
 * and 2 * k + 1 of byte i. */
void ps_unpack_q2_k(const uint8_t *s, float *out)
{
    const uint8_t *qs = s + 16;
    float d = half_at(s + 80), m = half_at(s + 82);
    for (int n = 0; n < 256; n++) {
        int half = n / 128, k = n % 128 / 32, q = qs[half * 32 + n % 32] >> (2 * k) & 3, part = s[n / 16];
        out[n] = d * (float)(part & 15) * (float)q - m * (float)(part >> 4);
    }
}

/* A block consists of 32 bytes of high bits, 64 bytes of low bits in the layout of Q2_K, 12 bytes that contain 16
 * scales of 6 bits each, and d. If the high bit of a value is 0, 4 is subtracted from the value. */
void ps_unpack_q3_k(const uint8_t *s, float *out)
{
    const uint8_t *qs = s + 32, *scales = s + 96;
    float d = half_at(s + 108);
    for (int n = 0; n < 256; n++) {
        int half = n / 128, k = n % 128 / 32, p = n / 16;
        int low = qs[half * 32 + n % 32] >> (2 * k) & 3, high = s[n % 32] >> (half * 4 + k) & 1;
        int scale = (p < 8 ? scales[p] & 15 : scales[p - 8] >> 4) | (scales[8 + p % 4] >> (2 * (p / 4)) & 3) << 4;
        out[n] = d * (float)(scale - 32) * (float)(low - (high ? 0 : 4));
    }
}

/* A block consists of d, dmin, 12 bytes of scales, and 128 bytes of values. Each group of 32 bytes of values contains
 * 64 values. The first 32 values are in the low halves of the bytes, and the last 32 values are in the high halves. */
void ps_unpack_q4_k(const uint8_t *s, float *out)
{
    const uint8_t *qs = s + 16;
    float d = half_at(s), m = half_at(s + 2);
    for (int p = 0; p < 8; p++) {
        int scale, min;
        ps_blocks_scale(s + 4, p, &scale, &min);
        float by = d * (float)scale, less = m * (float)min;
        for (int k = 0; k < 32; k++)
            out[p * 32 + k] = by * (float)(qs[p / 2 * 32 + k] >> (p % 2 * 4) & 15) - less;
    }
}

/* Like Q4_K, but each value has 5 bits. The fifth bits are in 32 bytes before the values. Bit p of byte k belongs to
 * value k of part p. */
void ps_unpack_q5_k(const uint8_t *s, float *out)
{
    const uint8_t *qh = s + 16, *qs = s + 48;
    float d = half_at(s), m = half_at(s + 2);
    for (int p = 0; p < 8; p++) {
        int scale, min;
        ps_blocks_scale(s + 4, p, &scale, &min);
        float by = d * (float)scale, less = m * (float)min;
        for (int k = 0; k < 32; k++) {
            int q = (qs[p / 2 * 32 + k] >> (p % 2 * 4) & 15) | (qh[k] >> p & 1) << 4;
            out[p * 32 + k] = by * (float)q - less;
        }
    }
}

/* A block consists of 128 bytes of low nibbles, 64 bytes of high bits, 16 scales of 8 bits, and d. Each half of a
 * block has 128 values. The low nibbles of these values are in 64 bytes with the layout of Q4_K. The high bits of
 * these values are in 32 bytes. The high bits of value 32 * k + i are bits 2 * k and 2 * k + 1 of byte i. */
void ps_unpack_q6_k(const uint8_t *s, float *out)
{
    const uint8_t *qh = s + 128, *scales = s + 192;
    float d = half_at(s + 208);
    for (int n = 0; n < 256; n++) {
        int half = n / 128, k = n % 128 / 32, i = n % 32;
        int low = s[half * 64 + n % 64] >> (n % 128 / 64 * 4) & 15, high = qh[half * 32 + i] >> (2 * k) & 3;
        out[n] = d * (float)(int8_t)scales[n / 16] * (float)((low | high << 4) - 32);
    }
}

/* A block consists of d, a u16 that contains the high bits of 8 scales, 4 bytes that contain the low bits of the
 * scales, and 128 bytes of values. The values form 8 parts in the layout of IQ4_NL. */
void ps_unpack_iq4_xs(const uint8_t *s, float *out)
{
    float d = half_at(s);
    int high = s[2] | s[3] << 8;
    for (int p = 0; p < 8; p++) {
        int scale = ((s[4 + p / 2] >> (p % 2 * 4)) & 15) | (high >> (2 * p) & 3) << 4;
        float by = d * (float)(scale - 32);
        const uint8_t *qs = s + 8 + 16 * p;
        for (int k = 0; k < 16; k++) {
            out[p * 32 + k] = by * (float)iq4_values[qs[k] & 15];
            out[p * 32 + 16 + k] = by * (float)iq4_values[qs[k] >> 4];
        }
    }
}

/* -- NF4 ----------------------------------------------------------------------------------------------------------- */
/* A block consists of the absolute maximum in fp32 and 32 bytes of values. Value 2 * k is in the high half of byte k,
 * and value 2 * k + 1 is in the low half. */
static void nf4_times(float most, const uint8_t *s, float *out)
{
    for (int k = 0; k < 32; k++) {
        out[2 * k] = ps_nf4[s[k] >> 4] * most;
        out[2 * k + 1] = ps_nf4[s[k] & 15] * most;
    }
}

void ps_unpack_nf4(const uint8_t *s, float *out)
{
    float most;
    memcpy(&most, s, 4);
    nf4_times(most, s + 4, out);
}

void ps_unpack_nf4_double(const uint8_t *s, const float *scales, int64_t number, float *out)
{
    nf4_times(ps_blocks_double_scale(s, scales, number), s + 1, out);
}

/* -- the types ----------------------------------------------------------------------------------------------------- */
static const ps_blocks types[] = {
    { "Q4_0", PS_Q4_0, 32, 18, ps_unpack_q4_0 }, { "Q4_1", PS_Q4_1, 32, 20, ps_unpack_q4_1 },
    { "Q5_0", PS_Q5_0, 32, 22, ps_unpack_q5_0 }, { "Q5_1", PS_Q5_1, 32, 24, ps_unpack_q5_1 },
    { "Q8_0", PS_Q8_0, 32, 34, ps_unpack_q8_0 }, { "Q2_K", PS_Q2_K, 256, 84, ps_unpack_q2_k },
    { "Q3_K", PS_Q3_K, 256, 110, ps_unpack_q3_k }, { "Q4_K", PS_Q4_K, 256, 144, ps_unpack_q4_k },
    { "Q5_K", PS_Q5_K, 256, 176, ps_unpack_q5_k }, { "Q6_K", PS_Q6_K, 256, 210, ps_unpack_q6_k },
    { "IQ4_NL", PS_IQ4_NL, 32, 18, ps_unpack_iq4_nl }, { "IQ4_XS", PS_IQ4_XS, 256, 136, ps_unpack_iq4_xs },
    { "MXFP4", PS_MXFP4, 32, 17, ps_unpack_mxfp4 }, { "NF4", PS_NF4, 64, 36, ps_unpack_nf4 },
    { "NF4_DOUBLE", PS_NF4_DOUBLE, 64, 33, NULL },
};

const ps_blocks *ps_blocks_of(int64_t number)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) if (types[i].number == number) return &types[i];
    return NULL;
}
