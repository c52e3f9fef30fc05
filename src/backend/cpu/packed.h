/* SPDX-License-Identifier: BSD-3-Clause
 * Products with packed weights for packed.c, which has the ops. simd/packed.c is compiled once per instruction set,
 * and packed.c calls it through pointers that cpu.c sets. A row of packed numbers consists of blocks
 * (base/blocks.h). */
#ifndef PS_CPU_PACKED_H
#define PS_CPU_PACKED_H
#include "backend/cpu/cpu.h"
#include "base/blocks.h"

/* PS_INT8_PART values of a row of x, rounded to 8 bits (base/blocks.h). */
typedef struct ps_int8_part {
    int8_t q[PS_INT8_PART];
    int32_t sums[PS_INT8_PART / 4];       /* sums of 4 neighbouring q */
    float d;
    float padding[7];                     /* aligns q and sums to multiples of 32 bytes */
} ps_int8_part;
typedef struct ps_packed_matrix {
    const uint8_t *data;
    int64_t rows, cols, row_nbytes;       /* cols: number of values in a row */
    int type;
    const float *scales;                  /* scales of the blocks of a weight in PS_NF4_DOUBLE, else NULL */
} ps_packed_matrix;

/* Computes c [M, rows] = x [M, cols] w^T. x and c are dense fp32, and M <= PS_PACKED_ROWS. A row's sums depend
 * neither on the number of threads nor on other rows. */
typedef void (*ps_cpu_packed_dots_fn)(const ps_packed_matrix *w, const float *x, int64_t M, float *c);
/* Unpacks the values of n blocks to fp32, bf16 or fp16, rounded to nearest even. scales: of the weight, or NULL.
 * number: the number of the first block in the weight, for the scales. */
typedef void (*ps_cpu_unpack_fn)(int type, const uint8_t *blocks, int64_t n, const float *scales, int64_t number,
                                 void *out, int dtype);
/* Computes the same product with x rounded in parts, [M, cols / PS_INT8_PART]. ps_blocks_int8 must accept the type. */
typedef void (*ps_cpu_int8_dots_fn)(const ps_packed_matrix *w, const ps_int8_part *x, int64_t M, float *c);
/* Rounds the fp32 values x to 8 bits, in `parts` parts. */
typedef void (*ps_cpu_round_int8_fn)(const float *x, int64_t parts, ps_int8_part *out);
extern ps_cpu_packed_dots_fn ps_cpu_packed_dots;
extern ps_cpu_int8_dots_fn ps_cpu_int8_dots;
extern ps_cpu_round_int8_fn ps_cpu_round_int8;
extern ps_cpu_unpack_fn ps_cpu_unpack;
void ps_cpu_packed_dots_sse2(const ps_packed_matrix *, const float *, int64_t, float *);
void ps_cpu_packed_dots_avx2(const ps_packed_matrix *, const float *, int64_t, float *);
void ps_cpu_packed_dots_avx512(const ps_packed_matrix *, const float *, int64_t, float *);
void ps_cpu_unpack_sse2(int, const uint8_t *, int64_t, const float *, int64_t, void *, int);
void ps_cpu_unpack_avx2(int, const uint8_t *, int64_t, const float *, int64_t, void *, int);
void ps_cpu_unpack_avx512(int, const uint8_t *, int64_t, const float *, int64_t, void *, int);
void ps_cpu_int8_dots_sse2(const ps_packed_matrix *, const ps_int8_part *, int64_t, float *);
void ps_cpu_round_int8_sse2(const float *, int64_t, ps_int8_part *);
void ps_cpu_int8_dots_avx2(const ps_packed_matrix *, const ps_int8_part *, int64_t, float *);
void ps_cpu_round_int8_avx2(const float *, int64_t, ps_int8_part *);
void ps_cpu_int8_dots_avx512(const ps_packed_matrix *, const ps_int8_part *, int64_t, float *);
void ps_cpu_round_int8_avx512(const float *, int64_t, ps_int8_part *);
#endif
