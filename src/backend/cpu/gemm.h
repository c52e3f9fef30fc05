/* SPDX-License-Identifier: BSD-3-Clause
 * A batched matrix product with all its options, and the workspace that consecutive products of one kernel call
 * reuse. Shared by onednn.c and the kernels that consist of matrix products (matmul.c, lm_loss.c). */
#ifndef PS_CPU_GEMM_H
#define PS_CPU_GEMM_H
#include "backend/cpu/cpu.h"

/* Workspace of one kernel call. Initialize it with { .call = call }. Its buffers grow to the largest size needed,
 * and are freed with the call's other workspace. */
typedef struct ps_gemm_space {
    ps_call *call;
    void *work, *panels;
    size_t work_nbytes, panels_nbytes;
} ps_gemm_space;

/* `batch` products dst = a b + bias + residual, plus dst if `accumulate` is set, as in ps_cpu_gemm. Matrix i of an
 * operand begins i * step elements after its first matrix; step 0 repeats one matrix. bias and residual require
 * batch 1. */
typedef struct ps_gemm {
    ps_mat a, b, dst;
    const void *bias, *residual;
    int bias_dtype, accumulate;
    int64_t ld_residual;
    int64_t batch, step_a, step_b, step_dst;
} ps_gemm;

int ps_cpu_gemm_run(ps_gemm_space *space, const ps_gemm *g);

/* simd/few_rows.c: computes c [M, N] = x [M, K] times g->b, with dense fp32 x and c. part: memory for partial sums
 * [K / PS_FEW_DEPTH rounded up, M, N], used if g->b is stored in rows of N. cpu.c sets the pointer to the function
 * of one instruction set. */
enum { PS_FEW_ROWS = 4, PS_FEW_DEPTH = 64 };
typedef void (*ps_cpu_few_rows_fn)(const ps_gemm *g, const float *x, float *part, float *c);
extern ps_cpu_few_rows_fn ps_cpu_few_rows;
void ps_cpu_few_rows_sse2(const ps_gemm *, const float *, float *, float *);
void ps_cpu_few_rows_avx2(const ps_gemm *, const float *, float *, float *);
void ps_cpu_few_rows_avx512(const ps_gemm *, const float *, float *, float *);
/* Convert n adjacent elements of a float type to fp32, and back, rounded to nearest even. */
void ps_cpu_row_load(float *dst, const void *src, int64_t n, int dtype);
void ps_cpu_row_store(void *dst, const float *src, int64_t n, int dtype);
/* Returns true if oneDNN multiplies this type without converting it to fp32, small products excepted. */
bool ps_cpu_gemm_native(int dtype);
#endif
