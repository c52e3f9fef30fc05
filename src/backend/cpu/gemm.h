/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by onednn.c and the kernels made of matrix products (matmul.c, lm_loss.c): a product with all its options,
 * batched, and the scratch memory that consecutive products of one kernel call use again. */
#ifndef PS_CPU_GEMM_H
#define PS_CPU_GEMM_H
#include "backend/cpu/cpu.h"

/* Scratch of one kernel call. Start with { .call = call }; each buffer grows to the largest need and is given back with
 * the call's other scratch. */
typedef struct ps_gemm_space {
    ps_call *call;
    void *work, *panels;
    size_t work_nbytes, panels_nbytes;
} ps_gemm_space;

/* dst = a b + bias + residual + dst (when accumulate), as ps_cpu_gemm says, `batch` times: matrix i of an operand
 * starts i * step elements after the first; step 0 repeats it. bias and residual only with batch 1. */
typedef struct ps_gemm {
    ps_mat a, b, dst;
    const void *bias, *residual;
    int bias_dtype, accumulate;
    int64_t ld_residual;
    int64_t batch, step_a, step_b, step_dst;
} ps_gemm;

int ps_cpu_gemm_run(ps_gemm_space *space, const ps_gemm *g);
/* True when oneDNN multiplies this type without conversion to fp32. */
bool ps_cpu_gemm_native(int dtype);
#endif
