/* SPDX-License-Identifier: BSD-3-Clause
 * Blocks of packed numbers. The types of blocks are ggml's types, with ggml's ids, and NF4 (Dettmers et al. 2023,
 * "QLoRA: Efficient Finetuning of Quantized LLMs"). A row is a sequence of blocks. A block contains `block` numbers
 * and has a size of `bytes` bytes. */
#ifndef PS_BASE_BLOCKS_H
#define PS_BASE_BLOCKS_H
#include <stdint.h>

enum { PS_BLOCKS_MOST = 256 };                           /* number of values in the largest block */
enum { PS_Q4_0 = 2, PS_Q4_1 = 3, PS_Q5_0 = 6, PS_Q5_1 = 7, PS_Q8_0 = 8, PS_Q2_K = 10, PS_Q3_K = 11, PS_Q4_K = 12,
       PS_Q5_K = 13, PS_Q6_K = 14, PS_IQ4_NL = 20, PS_IQ4_XS = 23, PS_MXFP4 = 39, PS_NF4 = 256, PS_NF4_DOUBLE = 257 };

typedef struct ps_blocks {
    const char *name;
    int number, block, bytes;
    void (*unpack)(const uint8_t *block, float *out);   /* unpacks the values of one block; NULL for NF4_DOUBLE */
} ps_blocks;
/* Returns the type of blocks with this id, or NULL if there is no such type. */
const ps_blocks *ps_blocks_of(int64_t number);

/* Products with at most PS_PACKED_ROWS rows of x read the blocks directly. If the attribute int8 of the op
 * linear_packed is set, the rows of x are first rounded to 8 bits, in parts of PS_INT8_PART elements. A part becomes
 * x = d * q. d is the largest magnitude of the part divided by 127. q is x / d, rounded to the nearest integer, ties
 * to even. */
enum { PS_PACKED_ROWS = 4, PS_INT8_PART = 32 };
/* Returns true if the attribute int8 changes products with blocks of this type. */
static inline int ps_blocks_int8(int type)
{
    return type == PS_Q4_0 || type == PS_Q4_1 || type == PS_Q5_0 || type == PS_Q5_1 || type == PS_Q8_0 ||
           type == PS_Q4_K || type == PS_Q5_K || type == PS_Q6_K;
}

/* NF4 with double quantization. A block consists of an 8-bit code of its scale and 32 bytes of values. The blocks of
 * a weight are numbered in row-major order. The weight's fp32 scales begin with PS_SCALES_HEAD numbers, which are the
 * offset and the values of the 256 codes. After these numbers there is one absolute maximum for each group of
 * PS_SCALES_GROUP blocks. */
enum { PS_SCALES_HEAD = 257, PS_SCALES_GROUP = 256 };
/* Returns the scale of block `number` of a weight. Like bitsandbytes, it rounds the product and the sum to fp32. */
static inline float ps_blocks_double_scale(const uint8_t *block, const float *scales, int64_t number)
{
    return scales[1 + block[0]] * scales[PS_SCALES_HEAD + number / PS_SCALES_GROUP] + scales[0];
}

/* Packs 32 values into a block of Q8_0, as ggml's reference quantizer does. */
void ps_pack_q8_0(const float *x, uint8_t *block);

static const float ps_nf4[16] = {                       /* the values of NF4 if the absolute maximum is 1 */
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f };
/* Reads the scale and the minimum of one of the 8 parts in Q4_K and Q5_K. p is the index of the part. The 8 pairs of
 * 6-bit values are packed in 12 bytes. */
static inline void ps_blocks_scale(const uint8_t *s, int p, int *scale, int *min)
{
    if (p < 4) *scale = s[p] & 63, *min = s[4 + p] & 63;
    else *scale = (s[4 + p] & 15) | (s[p - 4] >> 6) << 4, *min = s[4 + p] >> 4 | (s[p] >> 6) << 4;
}

void ps_unpack_q4_0(const uint8_t *block, float *out);
void ps_unpack_q4_1(const uint8_t *block, float *out);
void ps_unpack_q5_0(const uint8_t *block, float *out);
void ps_unpack_q5_1(const uint8_t *block, float *out);
void ps_unpack_q8_0(const uint8_t *block, float *out);
void ps_unpack_q2_k(const uint8_t *block, float *out);
void ps_unpack_q3_k(const uint8_t *block, float *out);
void ps_unpack_q4_k(const uint8_t *block, float *out);
void ps_unpack_q5_k(const uint8_t *block, float *out);
void ps_unpack_q6_k(const uint8_t *block, float *out);
void ps_unpack_iq4_nl(const uint8_t *block, float *out);
void ps_unpack_iq4_xs(const uint8_t *block, float *out);
void ps_unpack_mxfp4(const uint8_t *block, float *out);
void ps_unpack_nf4(const uint8_t *block, float *out);
void ps_unpack_nf4_double(const uint8_t *block, const float *scales, int64_t number, float *out);
#endif
