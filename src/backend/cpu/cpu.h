/* SPDX-License-Identifier: BSD-3-Clause
 * Internals of the cpu backend. The kernels are in simd/<family>.c. Each of these files is compiled once per
 * instruction set. Each family exports `void PS_ISA_FN(ps_cpu_fill_<family>)(ps_kernel *k)`, which writes its kernels
 * to a kernel table. cpu.c chooses the instruction set at run time. Only onednn.c (matrix products) and onednn_conv.c
 * (convolutions) use oneDNN.
 * Loops run on the OpenMP pool that oneDNN also uses. A loop runs in parallel only if it has at least PS_PAR_MIN
 * elements. The result of a sum does not depend on how the loop is divided among threads. */
#ifndef PS_CPU_H
#define PS_CPU_H
#include "backend/backend.h"

enum { PS_PAR_MIN = 1 << 14 };        /* in smaller loops, starting and joining threads costs more than it saves */

#define PS_CPU_FAMILIES(X) X(elementwise) X(reduce) X(norm) X(dropout) X(loss) X(table) X(optim) X(update) \
    X(muon) X(attention) X(rope) X(channel_norm) X(image)

/* Returns true if the elements of the view are dense and in row-major order. */
static inline bool view_flat(const ps_view *v)
{
    int64_t expect = 1;
    for (int d = v->ndim - 1; d >= 0; d--) {
        if (v->shape[d] == 1) continue;
        if (v->stride[d] != expect) return false;
        expect *= v->shape[d];
    }
    return true;
}

/* A matrix for onednn.c. Element (i, j) is data[i * stride_row + j * stride_col]. One of the two strides is 1. */
typedef struct ps_mat { void *data; int32_t dtype; int64_t rows, cols, stride_row, stride_col; } ps_mat;
/* Computes dst [M, N] = a [M, K] * b [K, N]. Adds bias [N] and residual [M, N] if they are not NULL. Adds the old
 * values of dst if `accumulate` is set. dst and residual are row-major and have the same type. ld_residual is the
 * leading dimension of residual. The types are fp32, bf16 and fp16. Sums are computed in fp32. The function allocates
 * its workspace from `call`. */
int ps_cpu_gemm(ps_call *call, const ps_mat *a, const ps_mat *b, const ps_mat *dst, const void *bias, int bias_dtype,
                const void *residual, int64_t ld_residual, int accumulate);
int ps_cpu_matmul(ps_call *call);      /* this function and the following functions are kernels of the ops in ops.def */
int ps_cpu_linear(ps_call *call);
int ps_cpu_unpack_op(ps_call *call);             /* packed.c */
int ps_cpu_pack_op(ps_call *call);
int ps_cpu_linear_packed(ps_call *call);
int ps_cpu_lm_loss(ps_call *call);
int ps_cpu_sample(ps_call *call);
int ps_cpu_adafactor(ps_call *call);             /* whole.c */
int ps_cpu_lamb(ps_call *call);
int ps_cpu_linear_grad(ps_call *call);           /* chain.c */
int ps_cpu_mlp(ps_call *call);
int ps_cpu_linear_gelu_backward(ps_call *call);
int ps_cpu_conv(ps_call *call);                  /* onednn_conv.c */
int ps_cpu_conv_transpose(ps_call *call);
int ps_cpu_conv_weight(ps_call *call);
void ps_cpu_conv_close(void);                    /* frees cached primitives */
bool ps_cpu_asks(int op);              /* returns true if the op's kernel uses scratch memory; every such kernel
                                        * supports ps_call.dry */
/* Sets the kernels that chain.c uses. `own` contains this backend's kernels. `fallback` contains the kernels for the
 * types that `own` does not support. */
void ps_cpu_chain_open(const ps_kernel *own, const ps_kernel *fallback);
/* Replaces the cpu kernels in `kernel` by the kernels of the instruction set that the environment variable `variable`
 * names. If the variable is not set, uses the best set. All sets compute the same bits, at different speeds. */
int ps_cpu_kernels(const char *variable, ps_kernel *kernel);
/* ps_cpu_vector_nbytes stores the size in bytes of a vector of the instruction set that PS_CPU_ISA names, or of the
 * best set if PS_CPU_ISA is not set. ps_cpu_has_set returns true if this machine supports the named instruction set. */
int ps_cpu_vector_nbytes(int *nbytes);
bool ps_cpu_has_set(const char *name);
/* copy.c: copy_in, copy_out and load of backend.h. */
int ps_cpu_copy(ps_backend *be, void *dst, const void *src, size_t nbytes);
int ps_cpu_load(ps_backend *be, void *dst, ps_reader read, const void *from, int64_t at, size_t nbytes);
const char *ps_cpu_gemm_describe(void);
int ps_cpu_gemm_open(void);
void ps_cpu_gemm_close(void);          /* frees cached primitives */

/* loss.c: Replaces a row of logits [V] by its gradient (softmax - onehot(target)) * scale, in the same type (fp32, bf16
 * or fp16). Returns the row's loss. If target < 0, the row is ignored, and its gradient and loss are 0. If want_grad is
 * 0, the logits do not change. Sets *hit to true if the target has the largest logit and no earlier token has the same
 * logit. Each instruction set has its own function of this type. cpu.c sets the pointer to one of them. */
typedef float (*ps_cpu_loss_row_fn)(void *logits, int dtype, int64_t V, int64_t target, float scale, int want_grad,
                                    bool *hit);
extern ps_cpu_loss_row_fn ps_cpu_loss_row;
float ps_cpu_loss_row_sse2(void *, int, int64_t, int64_t, float, int, bool *);
float ps_cpu_loss_row_avx2(void *, int, int64_t, int64_t, float, int, bool *);
float ps_cpu_loss_row_avx512(void *, int, int64_t, int64_t, float, int, bool *);
#endif
