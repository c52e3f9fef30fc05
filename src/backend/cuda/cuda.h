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

/* The errors that a kernel can find in its operands' values. The first one counts. The host checks for them when it
 * waits for the device. */
enum { TRAP_NONE, TRAP_INDEX, TRAP_TARGET, TRAP_NAN, TRAP_INFINITE };
struct ps_trap {
    int kind, op;
    long long value, position, limit, ignore;
};

/* One device. Kernels and copies run in the order of their stream; `compute` has all kernels. After `broken` is set
 * every call fails, since the context is unusable after a CUDA error. */
enum { WGMMA_NEVER, WGMMA_WHERE_FASTER, WGMMA_ALWAYS };
struct ps_cuda {
    ps_backend base;
    cudaMemPool_t pool;                        /* of device memory, or NULL: plain allocations */
    cudaStream_t compute, lane[2];             /* lane: [to_device] */
    cudaEvent_t fence;                         /* recorded on `compute` if a copy must come after it */
    ps_trap *trap, *trap_host, *trap_device;   /* in device memory; and in host memory, at its two addresses */
    int *trap_taken;                           /* in device memory: set when a kernel traps */
    int number;                                /* its number among this process's devices */
    ps_cuda_card card;
    int capability;                            /* compute capability of the device; 90 means 9.0 */
    int wgmma;                                 /* determines which calls attention_hopper.cu computes */
    int64_t shared;                            /* largest dynamic shared memory of a block, in bytes */
    bool sync;                                 /* PS_CUDA_SYNC=1: wait for each op, so errors name the op */
    bool told;                                 /* PS_CUDA_SYNC=trace: also print each op's name first */
    bool dry;                                  /* kernels only request scratch memory and launch nothing */
    bool broken;
    char what_broke[512];
    const char *last_op;                       /* name of the op launched last, or NULL */
};
extern ps_cuda *ps_cu;
extern const ps_cuda_program *ps_cuda_host;    /* functions of the program; set when the plug-in is opened */

/* Turns a CUDA error into the engine's and poisons the device. 0 for cudaSuccess. */
int ps_cuda_check(cudaError_t e, const char *what);
#define CU_TRY(call) PS_TRY(ps_cuda_check((call), #call))
int ps_cuda_launched(void);                    /* called after a launch; returns 0 or the error */
/* Marks the device as unusable after a library's error. */
int ps_cuda_broke(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Returns the error at which kernels of finished work trapped. Called after waiting. */
int ps_cuda_trapped(void);
/* ps_cuda_lose records an error: bytes that kernels expect did not arrive from another rank. ps_cuda_lost returns that
 * error, or 0; call it after waiting. told: the caller reports the error, so it is cleared. Any thread. */
void ps_cuda_lose(int code, const char *why);
int ps_cuda_lost(bool told);

const char *ps_cuda_op_name(int op);
ps_kernel ps_cuda_kernel(int op);              /* for kernels that call other kernels */
/* Runs on the compute stream, unless the call is dry. */
int ps_cuda_clear(void *p, size_t nbytes);
int ps_cuda_move(void *dst, const void *src, size_t nbytes);

/* Pins host memory that copies use, if possible, so that they run at the link's speed while the caller continues
 * (pinned.cpp). Memory that cannot be pinned is still copied, but slower. */
void ps_cuda_pin_host(const void *p, size_t nbytes);
/* The bytes from p, at most nbytes, that one copy may read: in one pinned range, or not pinned. */
size_t ps_cuda_pinned_run(const void *p, size_t nbytes);
void ps_cuda_unpin_all(void);

/* -- times.cpp: when work of the device ran ------------------------------------------------------------------------ */
int ps_cuda_time_begin(ps_backend *be, int32_t run);                /* as in backend.h */
int ps_cuda_time_end(ps_backend *be, const ps_record_event *what);
int ps_cuda_time_read(ps_backend *be, bool wait, ps_record_event *out);
struct ps_copy_times { cudaEvent_t from, to; };                     /* of a copy; NULL: not recorded */
int ps_cuda_copy_times(ps_copy_times *t, cudaStream_t lane, bool begins);
int ps_cuda_copy_times_read(ps_copy_times *t, int64_t ns[2]);       /* of a finished copy; 0: unknown */
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
void ps_cuda_fill_matmul(ps_kernel *k);
void ps_cuda_fill_attention(ps_kernel *k);
void ps_cuda_fill_rope(ps_kernel *k);
void ps_cuda_fill_conv(ps_kernel *k);
void ps_cuda_fill_image(ps_kernel *k);
void ps_cuda_fill_channel_norm(ps_kernel *k);

/* -- used by several of them --------------------------------------------------------------------------------------- */
/* dst = src of the same shape or broadcast, converted; any strides (copy.cu). */
int ps_cuda_copy(const ps_view *dst, const ps_view *src);
/* Matrix products of fp types (gemm.cu). Each matrix has a unit stride in one dimension. */
struct ps_cu_mat { void *data; int dtype; int64_t rows, cols, stride_row, stride_col; };
struct ps_cu_gemm {
    ps_cu_mat a, b, dst;                       /* dst [M, N] = a [M, K] b [K, N]; dst.stride_col is 1 */
    int64_t batch, step_a, step_b, step_dst;   /* in elements */
    bool accumulate;                           /* dst += */
    const void *bias;                          /* [N] of bias_dtype, or NULL */
    int bias_dtype;
    const void *residual;                      /* [M, N] of dst's type, rows ld_residual apart, or NULL */
    int64_t ld_residual;
    int also;                                  /* PS_CU_GELU, PS_CU_SUM_A or PS_CU_SUM_B, for ps_cuda_gemm_fused */
    void *pre, *sums;                          /* outputs of `also`, of dst's type; pre is [M, N] */
};
enum {
    PS_CU_GELU = 1,                            /* dst = gelu(a b + bias), by tanh; pre (or NULL) = a b + bias */
    PS_CU_SUM_A,                               /* sums [M] = the sum of a's columns */
    PS_CU_SUM_B                                /* sums [N] = the sum of b's rows */
};
int ps_cuda_gemm(ps_call *call, const ps_cu_gemm *g);
/* *done false: cuBLASLt cannot compute this in one pass, and nothing was computed. */
int ps_cuda_gemm_fused(ps_call *call, const ps_cu_gemm *g, bool *done);
int ps_cuda_gemm_open(void);
void ps_cuda_gemm_close(void);
const char *ps_cuda_gemm_describe(void);
/* d [.., C] (contiguous, as pre) becomes d gelu'(pre), by tanh; db [C] (+)= the sum of its rows (elementwise.cu). Takes
 * fp32, bf16 and fp16 with rows of whole packs of 16 bytes, at addresses that are multiples of 16. */
int ps_cuda_gelu_slope_sums(ps_call *call, const ps_view *pre, const ps_view *d, const ps_view *db, bool add);
/* Counts targets [n] that are not `ignore` into *count on the device; traps on those outside [0, V) (rows.cu). */
int ps_cuda_count_targets(int op, const ps_view *target, int64_t V, int64_t ignore, long long *count);
/* Computes losses and the gradient of the logits from rows of logits [V] (rows.cu). */
struct ps_cu_ce {
    void *logits; int dtype; int64_t rows, V;
    int64_t ld;                                /* row stride of logits and of grad, in elements */
    int64_t wide;                              /* at most ld: sets elements V to wide - 1 of grad's rows to 0 */
    const void *target; int target_dtype; int64_t first, ignore;   /* row i has target[first + i] */
    void *grad; int grad_dtype;                /* shape of logits, may be logits itself; NULL: not wanted */
    double scale;
    const long long *count;                    /* divide the gradient by it; or NULL */
    const void *dloss; int dloss_dtype; bool dloss_per_row;        /* multiply the gradient with it; or NULL */
    void *loss, *lse;                          /* [.. first + i], fp32 (fp64 for fp64 logits); or NULL */
    unsigned long long *hits;                  /* += rows whose first largest logit is the target's; or NULL */
};
int ps_cuda_ce_rows(const ps_cu_ce *c);
/* Prepares the output `hits` [2] of an op: *hits, where rows are added up, becomes 0, and the count follows it. *hits
 * is NULL if hits are not wanted. */
int ps_cuda_begin_hits(const ps_view *out, int want, const long long *count, unsigned long long **hits);
/* total of loss [n] (fp32, or fp64) in a fixed order, divided by *count unless NULL, to out [1] of out's type. */
int ps_cuda_loss_total(const void *loss, int dtype, int64_t n, const long long *count, const ps_view *out);

#endif
