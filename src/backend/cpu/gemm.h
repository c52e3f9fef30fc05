/* SPDX-License-Identifier: BSD-3-Clause
 * A batched matrix product with all its options. The products of one kernel call share one workspace. onednn.c and the
 * kernels that consist of matrix products (matmul.c, lm_loss.c) include this header. */
#ifndef PS_CPU_GEMM_H
#define PS_CPU_GEMM_H
#include "backend/cpu/cpu.h"

/* The workspace of one kernel call. Initialize it with { .call = call }. Each buffer grows to the largest size that a
 * product needs. The buffers are freed together with the call's other workspace. */
typedef struct ps_gemm_space {
    ps_call *call;
    void *work, *panels;
    size_t work_nbytes, panels_nbytes;
} ps_gemm_space;

/* `batch` products of the form dst = a * b + bias + residual. If `accumulate` is set, the old values of dst are also
 * added, as in ps_cpu_gemm. Matrix i of an operand begins i * step elements after the operand's first matrix. With a
 * step of 0, all products use the same matrix. bias and residual require batch 1. */
typedef struct ps_gemm {
    ps_mat a, b, dst;
    const void *bias, *residual;
    int bias_dtype, accumulate;
    int64_t ld_residual;
    int64_t batch, step_a, step_b, step_dst;
} ps_gemm;

int ps_cpu_gemm_run(ps_gemm_space *space, const ps_gemm *g);

/* simd/few_rows.c: Computes c [M, N] = x [M, K] times g->b. x and c are dense and fp32. `part` is memory for partial
 * sums [K / PS_FEW_DEPTH rounded up, M, N]. It is used only if the N elements of each row of g->b are contiguous. cpu.c
 * sets the pointer to the function of one instruction set. */
enum { PS_FEW_ROWS = 4, PS_FEW_DEPTH = 64 };
typedef void (*ps_cpu_few_rows_fn)(const ps_gemm *g, const float *x, float *part, float *c);
extern ps_cpu_few_rows_fn ps_cpu_few_rows;
void ps_cpu_few_rows_sse2(const ps_gemm *, const float *, float *, float *);
void ps_cpu_few_rows_avx2(const ps_gemm *, const float *, float *, float *);
void ps_cpu_few_rows_avx512(const ps_gemm *, const float *, float *, float *);
/* ps_cpu_row_load converts n adjacent elements of a float type to fp32. ps_cpu_row_store converts fp32 to the type, and
 * rounds to nearest even. */
void ps_cpu_row_load(float *dst, const void *src, int64_t n, int dtype);
void ps_cpu_row_store(void *dst, const float *src, int64_t n, int dtype);
/* Returns true if large products with operands of this type are computed without a conversion to fp32. Small products
 * can differ. */
bool ps_cpu_gemm_native(int dtype);
#endif
