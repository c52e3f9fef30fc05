/* SPDX-License-Identifier: BSD-3-Clause
 * Unpacks the block types of GGUF. Each value is computed by the operations of ggml's own definition, in fp32 and in
 * the same order, so that it has the same bits. d and m are fp16 scales of a block; qs and qh are the low and the high
 * bits of its numbers. */
#include "io/gguf.h"
#include "base/half.h"
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

/* -- blocks of 32: number k is in the low half of byte k, number 16 + k in its high half --------------------------- */
void gguf_unpack_q4_0(const uint8_t *s, float *out)
{
    float d = half_at(s);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)((s[2 + k] & 15) - 8);
        out[16 + k] = d * (float)((s[2 + k] >> 4) - 8);
    }
}

void gguf_unpack_q4_1(const uint8_t *s, float *out)
{
    float d = half_at(s), m = half_at(s + 2);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)(s[4 + k] & 15) + m;
        out[16 + k] = d * (float)(s[4 + k] >> 4) + m;
    }
}

void gguf_unpack_q5_0(const uint8_t *s, float *out)
{
    float d = half_at(s);
    uint32_t high = u32_at(s + 2);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)((int)((s[6 + k] & 15) | (high >> k & 1) << 4) - 16);
        out[16 + k] = d * (float)((int)((s[6 + k] >> 4) | (high >> (16 + k) & 1) << 4) - 16);
    }
}

void gguf_unpack_q5_1(const uint8_t *s, float *out)
{
    float d = half_at(s), m = half_at(s + 2);
    uint32_t high = u32_at(s + 4);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)((s[8 + k] & 15) | (high >> k & 1) << 4) + m;
        out[16 + k] = d * (float)((s[8 + k] >> 4) | (high >> (16 + k) & 1) << 4) + m;
    }
}

void gguf_unpack_q8_0(const uint8_t *s, float *out)
{
    float d = half_at(s);
    for (int k = 0; k < 32; k++) out[k] = (float)(int8_t)s[2 + k] * d;
}

static const int8_t iq4_values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

void gguf_unpack_iq4_nl(const uint8_t *s, float *out)
{
    float d = half_at(s);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)iq4_values[s[2 + k] & 15];
        out[16 + k] = d * (float)iq4_values[s[2 + k] >> 4];
    }
}

/* The scale is a power of two of one byte, halved, since the numbers below are twice those of e2m1. */
void gguf_unpack_mxfp4(const uint8_t *s, float *out)
{
    static const int8_t twice[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
    float d = ps_bits_f32(s[0] < 2 ? 0x00200000u << s[0] : (uint32_t)(s[0] - 1) << 23);
    for (int k = 0; k < 16; k++) {
        out[k] = d * (float)twice[s[1 + k] & 15];
        out[16 + k] = d * (float)twice[s[1 + k] >> 4];
    }
}

/* -- blocks of 256 with scales of their parts ---------------------------------------------------------------------- */
/* 16 bytes: scale and minimum of each 16 numbers, 64 bytes: the numbers, d, dmin. Of 128 numbers, number 32 k + i has
 * bits 2 k and 2 k + 1 of byte i. */
void gguf_unpack_q2_k(const uint8_t *s, float *out)
{
    const uint8_t *qs = s + 16;
    float d = half_at(s + 80), m = half_at(s + 82);
    for (int n = 0; n < 256; n++) {
        int half = n / 128, k = n % 128 / 32, q = qs[half * 32 + n % 32] >> (2 * k) & 3, part = s[n / 16];
        out[n] = d * (float)(part & 15) * (float)q - m * (float)(part >> 4);
    }
}

/* 32 bytes: the high bits (0 means minus 4), 64 bytes: the low ones as in Q2_K, 12 bytes: 16 scales of 6 bits, d. */
void gguf_unpack_q3_k(const uint8_t *s, float *out)
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

/* Scale and minimum of part p of 8, of 6 bits each, in 12 bytes. */
static void scale_and_min(const uint8_t *s, int p, int *scale, int *min)
{
    if (p < 4) *scale = s[p] & 63, *min = s[4 + p] & 63;
    else *scale = (s[4 + p] & 15) | (s[p - 4] >> 6) << 4, *min = s[4 + p] >> 4 | (s[p] >> 6) << 4;
}

/* d, dmin, 12 bytes of scales, 128 bytes: of 64 numbers, the first 32 are low halves, the others high halves. */
void gguf_unpack_q4_k(const uint8_t *s, float *out)
{
    const uint8_t *qs = s + 16;
    float d = half_at(s), m = half_at(s + 2);
    for (int p = 0; p < 8; p++) {
        int scale, min;
        scale_and_min(s + 4, p, &scale, &min);
        float by = d * (float)scale, less = m * (float)min;
        for (int k = 0; k < 32; k++)
            out[p * 32 + k] = by * (float)(qs[p / 2 * 32 + k] >> (p % 2 * 4) & 15) - less;
    }
}

/* As Q4_K, with 32 bytes of fifth bits in front of the numbers: bit p of byte k is number k of part p. */
void gguf_unpack_q5_k(const uint8_t *s, float *out)
{
    const uint8_t *qh = s + 16, *qs = s + 48;
    float d = half_at(s), m = half_at(s + 2);
    for (int p = 0; p < 8; p++) {
        int scale, min;
        scale_and_min(s + 4, p, &scale, &min);
        float by = d * (float)scale, less = m * (float)min;
        for (int k = 0; k < 32; k++) {
            int q = (qs[p / 2 * 32 + k] >> (p % 2 * 4) & 15) | (qh[k] >> p & 1) << 4;
            out[p * 32 + k] = by * (float)q - less;
        }
    }
}

/* 128 bytes of low halves, 64 of high bits, 16 scales of 8 bits, d. Of 128 numbers, low halves are as in Q4_K over 64
 * bytes, and number 32 k + i has bits 2 k and 2 k + 1 of byte i. */
void gguf_unpack_q6_k(const uint8_t *s, float *out)
{
    const uint8_t *qh = s + 128, *scales = s + 192;
    float d = half_at(s + 208);
    for (int n = 0; n < 256; n++) {
        int half = n / 128, k = n % 128 / 32, i = n % 32;
        int low = s[half * 64 + n % 64] >> (n % 128 / 64 * 4) & 15, high = qh[half * 32 + i] >> (2 * k) & 3;
        out[n] = d * (float)(int8_t)scales[n / 16] * (float)((low | high << 4) - 32);
    }
}

/* d, u16: high bits of 8 scales, 4 bytes: their low bits, 128 bytes: 8 parts, each as in IQ4_NL. */
void gguf_unpack_iq4_xs(const uint8_t *s, float *out)
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
