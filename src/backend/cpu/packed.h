/* SPDX-License-Identifier: BSD-3-Clause
 * Products with packed weights, for the ops in packed.c. simd/packed.c computes the products and is compiled once per
 * instruction set. cpu/packed.c calls its functions through pointers that cpu.c sets. A row of packed numbers consists
 * of blocks (base/blocks.h). */
#ifndef PS_CPU_PACKED_H
#define PS_CPU_PACKED_H
#include "backend/cpu/cpu.h"
#include "base/blocks.h"

/* A part of a row of x. It has PS_INT8_PART values, which are rounded to 8 bits (base/blocks.h). */
typedef struct ps_int8_part {
    int8_t q[PS_INT8_PART];
    int32_t sums[PS_INT8_PART / 4];       /* each element is the sum of 4 adjacent elements of q */
    float d;
    float padding[7];                     /* aligns q and sums to 32 bytes in an array of parts */
} ps_int8_part;
typedef struct ps_packed_matrix {
    const uint8_t *data;
    int64_t rows, cols, row_nbytes;       /* cols: number of values in a row; row_nbytes: size of a row in bytes */
    int type;
    const float *scales;                  /* scales of the blocks of a PS_NF4_DOUBLE weight; NULL for other types */
} ps_packed_matrix;

/* Computes c [M, rows] = x [M, cols] w^T. x and c are dense fp32 matrices, and M is at most PS_PACKED_ROWS. The results
 * for a row of x depend neither on the number of threads nor on the other rows of x. */
typedef void (*ps_cpu_packed_dots_fn)(const ps_packed_matrix *w, const float *x, int64_t M, float *c);
/* Unpacks the values of n blocks to fp32, bf16 or fp16. The values are rounded to nearest even. `scales` contains the
 * scales of the whole weight, or is NULL. `number` is the index of the first block within the weight. The function
 * finds the scales of the blocks by this index. */
typedef void (*ps_cpu_unpack_fn)(int type, const uint8_t *blocks, int64_t n, const float *scales, int64_t number,
                                 void *out, int dtype);
/* Like ps_cpu_packed_dots_fn, but x [M, cols / PS_INT8_PART] consists of parts with rounded values. ps_blocks_int8()
 * must return true for the type of the weight. */
typedef void (*ps_cpu_int8_dots_fn)(const ps_packed_matrix *w, const ps_int8_part *x, int64_t M, float *c);
/* Rounds the fp32 values x to 8 bits and stores them in out [parts]. */
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
