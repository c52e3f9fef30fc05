/* SPDX-License-Identifier: BSD-3-Clause
 * What the host code of the cuda backend shares: the one device and its streams, errors, and operands as kernels take
 * them. Only files of this folder include it. ps_fail, ps_alloc and the like reach the program by the
 * table that it opens the plug-in with (program.cpp). */
#ifndef PS_CUDA_H
#define PS_CUDA_H
#include <cuda_runtime.h>
extern "C" {
#include "backend/backend.h"
#include "backend/cuda/rules.h"
#include "backend/cuda_plugin.h"
#include "base/alloc.h"
#include "base/error.h"
}

/* Errors that a kernel can find in its operands' values. Only the first error is kept. The host checks for it when
 * it waits for the device. */
enum { TRAP_NONE, TRAP_INDEX, TRAP_TARGET, TRAP_NAN, TRAP_INFINITE };
struct ps_trap {
    int kind, op;
    long long value, position, limit, ignore;
};

/* One device. Kernels and copies run in the order of their stream; all kernels are in `compute`. After `broken` is
 * set every call fails, because the context is unusable after a CUDA error. */
enum { WGMMA_NEVER, WGMMA_WHERE_FASTER, WGMMA_ALWAYS };
struct ps_cuda {
    ps_backend base;
    cudaMemPool_t pool;                        /* pool of device memory, or NULL for plain allocations */
    cudaStream_t compute, lane[2];             /* lane: [to_device] */
    cudaEvent_t fence;                         /* recorded on `compute` if a copy must wait for it */
    ps_trap *trap, *trap_host, *trap_device;   /* trap in device memory, and in host memory at its two addresses */
    int *trap_taken;                           /* in device memory: set when a kernel traps */
    int number;                                /* index among this process's devices */
    ps_cuda_card card;
    int capability;                            /* compute capability of the device; 90 means 9.0 */
    int wgmma;                                 /* determines which calls attention_hopper.cu computes */
    int64_t shared;                            /* most dynamic shared memory of a block, in bytes */
    bool sync;                                 /* PS_CUDA_SYNC=1: wait for each op, so that errors name the op */
    bool told;                                 /* PS_CUDA_SYNC=trace: also print the name of each op before it runs */
    bool dry;                                  /* kernels only allocate workspace and launch nothing */
    bool broken;
    char what_broke[512];
    const char *last_op;                       /* name of the op launched last, or NULL */
};
extern ps_cuda *ps_cu;
extern const ps_cuda_program *ps_cuda_host;    /* the program's functions, set when the plug-in is opened */

/* Converts a CUDA error to an error of the engine and marks the device as broken. Returns 0 for cudaSuccess. */
int ps_cuda_check(cudaError_t e, const char *what);
#define CU_TRY(call) PS_TRY(ps_cuda_check((call), #call))
int ps_cuda_launched(void);                    /* called after a launch; returns 0 or the error */
/* Marks the device as broken after an error of a library. */
int ps_cuda_broke(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Returns the error at which a kernel of finished work trapped. Called after waiting for the device. */
int ps_cuda_trapped(void);
/* ps_cuda_lose records the error that bytes expected by kernels did not arrive from another rank. ps_cuda_lost
 * returns that error, or 0; call it after waiting for the device. told: clears the error, because the caller reports
 * it. Any thread may call them. */
void ps_cuda_lose(int code, const char *why);
int ps_cuda_lost(bool told);

const char *ps_cuda_op_name(int op);
ps_kernel ps_cuda_kernel(int op);              /* for kernels that call other kernels */
/* Writes zeros on the compute stream, unless the call is dry. */
int ps_cuda_clear(void *p, size_t nbytes);
int ps_cuda_move(void *dst, const void *src, size_t nbytes);

/* Pins host memory that copies use, if possible, so that they run at the link's speed while the caller continues
 * (pinned.cpp). Memory that cannot be pinned is still copied, but slower. */
void ps_cuda_pin_host(const void *p, size_t nbytes);
/* Returns the number of bytes from p, at most nbytes, that one copy can read: either all in one pinned range, or all
 * not pinned. */
size_t ps_cuda_pinned_run(const void *p, size_t nbytes);
void ps_cuda_unpin_all(void);

/* -- times.cpp: when work of the device ran ------------------------------------------------------------------------ */
int ps_cuda_time_begin(ps_backend *be, int32_t run);                /* implements time_begin of backend.h */
int ps_cuda_time_end(ps_backend *be, const ps_record_event *what);
int ps_cuda_time_read(ps_backend *be, bool wait, ps_record_event *out);
struct ps_copy_times { cudaEvent_t from, to; };                     /* times of a copy; the events are NULL if they
                                                                     * are not recorded */
int ps_cuda_copy_times(ps_copy_times *t, cudaStream_t lane, bool begins);
int ps_cuda_copy_times_read(ps_copy_times *t, int64_t ns[2]);       /* times of a finished copy, 0 if unknown */
void ps_cuda_times_close(void);

/* -- kernels, one table per file ----------------------------------------------------------------------------------- */
void ps_cuda_fill_elementwise(ps_kernel *k);
void ps_cuda_fill_copy(ps_kernel *k);
void ps_cuda_fill_random(ps_kernel *k);
void ps_cuda_fill_reduce(ps_kernel *k);
void ps_cuda_fill_rows(ps_kernel *k);
void ps_cuda_fill_norm(ps_kernel *k);
void ps_cuda_fill_table(ps_kernel *k);
void ps_cuda_fill_optim(ps_kernel *k);
void ps_cuda_fill_update(ps_kernel *k);
void ps_cuda_fill_whole(ps_kernel *k);
void ps_cuda_fill_packed(ps_kernel *k);
void ps_cuda_fill_matmul(ps_kernel *k);
void ps_cuda_fill_attention(ps_kernel *k);
void ps_cuda_fill_rope(ps_kernel *k);
void ps_cuda_fill_conv(ps_kernel *k);
void ps_cuda_fill_image(ps_kernel *k);
void ps_cuda_fill_channel_norm(ps_kernel *k);

/* -- used by several of them --------------------------------------------------------------------------------------- */
/* Copies src, of the same shape or broadcast, to dst with conversion; both can have any strides (copy.cu). */
int ps_cuda_copy(const ps_view *dst, const ps_view *src);
/* Matrix products of floating-point types (gemm.cu). Each matrix has stride 1 in one dimension. */
struct ps_cu_mat { void *data; int dtype; int64_t rows, cols, stride_row, stride_col; };
struct ps_cu_gemm {
    ps_cu_mat a, b, dst;                       /* dst [M, N] = a [M, K] b [K, N]; dst.stride_col is 1 */
    int64_t batch, step_a, step_b, step_dst;   /* in elements */
    bool accumulate;                           /* dst += */
    const void *bias;                          /* [N] of type bias_dtype, or NULL */
    int bias_dtype;
    const void *residual;                      /* [M, N] of dst's type, with rows ld_residual apart, or NULL */
    int64_t ld_residual;
    int also;                                  /* for ps_cuda_gemm_fused: PS_CU_GELU, PS_CU_SUM_A or PS_CU_SUM_B */
    void *pre, *sums;                          /* outputs of `also`, of dst's type; pre is [M, N] */
};
enum {
    PS_CU_GELU = 1,                            /* dst = gelu(a b + bias), by tanh; pre (if not NULL) = a b + bias */
    PS_CU_SUM_A,                               /* sums [M] = the sum of a's columns */
    PS_CU_SUM_B                                /* sums [N] = the sum of b's rows */
};
int ps_cuda_gemm(ps_call *call, const ps_cu_gemm *g);
/* Computes g with its `also`. *done is false if cuBLASLt cannot compute this in one pass; nothing was computed then. */
int ps_cuda_gemm_fused(ps_call *call, const ps_cu_gemm *g, bool *done);
int ps_cuda_gemm_open(void);
void ps_cuda_gemm_close(void);
const char *ps_cuda_gemm_describe(void);
/* Replaces d [.., C] (contiguous, like pre) by d gelu'(pre), by tanh. db [C] = (or +=) the sum of d's rows
 * (elementwise.cu). Supports fp32, bf16 and fp16 if rows consist of whole packs of 16 bytes and addresses are
 * multiples of 16. */
int ps_cuda_gelu_slope_sums(ps_call *call, const ps_view *pre, const ps_view *d, const ps_view *db, bool add);
/* Counts the targets [n] that are not `ignore`, and writes the count to *count on the device. Traps on targets
 * outside [0, V) (rows.cu). */
int ps_cuda_count_targets(int op, const ps_view *target, int64_t V, int64_t ignore, long long *count);
/* Losses, and the gradient of the logits, for rows of logits [V] (rows.cu). */
struct ps_cu_ce {
    void *logits; int dtype; int64_t rows, V;
    int64_t ld;                                /* row stride of logits and of grad, in elements */
    int64_t wide;                              /* at most ld; elements V to wide - 1 of grad's rows become 0 */
    const void *target; int target_dtype; int64_t first, ignore;   /* targets; row i has target[first + i] */
    void *grad; int grad_dtype;                /* has the shape of logits, and can be logits itself; NULL if not
                                                * wanted */
    double scale;
    const long long *count;                    /* divisor of the gradient, or NULL */
    const void *dloss; int dloss_dtype; bool dloss_per_row;        /* factor on the gradient, or NULL */
    void *loss, *lse;                          /* outputs [.. first + i], fp32 (fp64 for fp64 logits), or NULL */
    unsigned long long *hits;                  /* += number of rows whose first largest logit is the target's, or
                                                * NULL */
};
int ps_cuda_ce_rows(const ps_cu_ce *c);
/* Prepares the output `hits` [2] of an op: *hits points to its first element, which is set to 0 and in which rows
 * are counted, and the second element is set to *count. *hits is NULL if hits are not wanted. */
int ps_cuda_begin_hits(const ps_view *out, int want, const long long *count, unsigned long long **hits);
/* Adds up loss [n] (fp32 or fp64) in a fixed order, divides by *count unless it is NULL, and writes the result to
 * out [1] of out's type. */
int ps_cuda_loss_total(const void *loss, int dtype, int64_t n, const long long *count, const ps_view *out);

#endif
