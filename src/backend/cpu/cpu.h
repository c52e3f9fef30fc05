/* SPDX-License-Identifier: BSD-3-Clause
 * Internals of the cpu backend. Kernels are in simd/<family>.c, which is compiled once per instruction set. Each
 * family exports `void PS_ISA_FN(ps_cpu_fill_<family>)(ps_kernel *k)`, which writes its kernels to a kernel table.
 * cpu.c chooses the set at run time. Only onednn.c (matrix products) and onednn_conv.c (convolutions) use oneDNN.
 * Loops run on the OpenMP pool that oneDNN uses, and in parallel only if they have at least PS_PAR_MIN elements.
 * Sums do not depend on how the threads divide a loop. */
#ifndef PS_CPU_H
#define PS_CPU_H
#include "backend/backend.h"

enum { PS_PAR_MIN = 1 << 14 };        /* with fewer elements, starting and joining threads costs more than it saves */

#define PS_CPU_FAMILIES(X) X(elementwise) X(reduce) X(norm) X(dropout) X(loss) X(table) X(optim) X(update) \
    X(attention) X(rope) X(channel_norm) X(image)

/* Returns true if the view is one row-major array. */
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

/* A matrix for onednn.c. Element (i, j) is data[i * stride_row + j * stride_col]. One of the strides is 1. */
typedef struct ps_mat { void *data; int32_t dtype; int64_t rows, cols, stride_row, stride_col; } ps_mat;
/* Computes dst [M, N] = a [M, K] b [K, N], plus bias [N] and residual [M, N] if they are not NULL, plus dst if
 * `accumulate` is set. dst and residual are row-major and have the same type; ld_residual is residual's leading
 * dimension. Types are fp32, bf16 and fp16; sums are in fp32. Workspace comes from the call. */
int ps_cpu_gemm(ps_call *call, const ps_mat *a, const ps_mat *b, const ps_mat *dst, const void *bias, int bias_dtype,
                const void *residual, int64_t ld_residual, int accumulate);
int ps_cpu_matmul(ps_call *call);      /* kernels of the ops in ops.def */
int ps_cpu_linear(ps_call *call);
int ps_cpu_unpack_op(ps_call *call);             /* packed.c */
int ps_cpu_pack_op(ps_call *call);
int ps_cpu_linear_packed(ps_call *call);
int ps_cpu_lm_loss(ps_call *call);
int ps_cpu_sample(ps_call *call);
int ps_cpu_muon(ps_call *call);                  /* muon.c */
int ps_cpu_adafactor(ps_call *call);
int ps_cpu_lamb(ps_call *call);
int ps_cpu_linear_grad(ps_call *call);           /* chain.c */
int ps_cpu_mlp(ps_call *call);
int ps_cpu_linear_gelu_backward(ps_call *call);
int ps_cpu_conv(ps_call *call);                  /* onednn_conv.c */
int ps_cpu_conv_transpose(ps_call *call);
int ps_cpu_conv_weight(ps_call *call);
void ps_cpu_conv_close(void);                    /* frees cached primitives */
bool ps_cpu_asks(int op);              /* true if the op's kernel uses scratch memory and supports ps_call.dry */
/* Gives chain.c this backend's kernels, and the fallback's kernels for types that they do not support. */
void ps_cpu_chain_open(const ps_kernel *own, const ps_kernel *fallback);
/* Replaces the cpu's kernels in `kernel` by those of one instruction set: the set that an environment variable
 * names, or the best one. All sets compute the same bits, at different speeds. */
int ps_cpu_kernels(const char *variable, ps_kernel *kernel);
/* ps_cpu_vector_nbytes returns the bytes of a vector in the instruction set that PS_CPU_ISA names, or in the best
 * set. ps_cpu_has_set returns whether this machine has an instruction set. */
int ps_cpu_vector_nbytes(int *nbytes);
bool ps_cpu_has_set(const char *name);
/* copy.c: copy_in, copy_out and load of backend.h */
int ps_cpu_copy(ps_backend *be, void *dst, const void *src, size_t nbytes);
int ps_cpu_load(ps_backend *be, void *dst, ps_reader read, const void *from, int64_t at, size_t nbytes);
const char *ps_cpu_gemm_describe(void);
int ps_cpu_gemm_open(void);
void ps_cpu_gemm_close(void);          /* frees cached primitives */

/* loss.c: replaces a row of logits [V] by its gradient (softmax - onehot(target)) * scale, in the same type (fp32,
 * bf16 or fp16). Returns the row's loss. If target < 0, the row is ignored: its gradient and loss are 0. If
 * want_grad is 0, the logits do not change. *hit is true if the target's logit is the first of the largest. Each
 * instruction set has such a function; cpu.c sets the pointer to one of them. */
typedef float (*ps_cpu_loss_row_fn)(void *logits, int dtype, int64_t V, int64_t target, float scale, int want_grad,
                                    bool *hit);
extern ps_cpu_loss_row_fn ps_cpu_loss_row;
float ps_cpu_loss_row_sse2(void *, int, int64_t, int64_t, float, int, bool *);
float ps_cpu_loss_row_avx2(void *, int, int64_t, int64_t, float, int, bool *);
float ps_cpu_loss_row_avx512(void *, int, int64_t, int64_t, float, int, bool *);
#endif
