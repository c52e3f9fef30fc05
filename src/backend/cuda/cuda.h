/* SPDX-License-Identifier: BSD-3-Clause
 * Declarations that the host code of the cuda backend shares: the device and its streams, errors, and operands of
 * kernels. ps_fail, ps_alloc and similar functions call the program through the table with which it opens the
 * plug-in (program.cpp). */
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

/* Errors that kernels find in the values of their operands. Only the first is kept. The host checks for it when it
 * waits for the device. */
enum { TRAP_NONE, TRAP_INDEX, TRAP_TARGET, TRAP_NAN, TRAP_INFINITE };
struct ps_trap {
    int kind, op;
    long long value, position, limit, ignore;
};

/* The one device. Kernels and copies run in the order of their stream; all kernels use `compute`. Once `broken` is
 * set, every call fails, because a context is unusable after a CUDA error. */
enum { WGMMA_NEVER, WGMMA_WHERE_FASTER, WGMMA_ALWAYS };
struct ps_cuda {
    ps_backend base;
    cudaMemPool_t pool;                        /* pool of device memory, or NULL for plain allocations */
    cudaStream_t compute, lane[2];             /* lane: [to_device] */
    cudaEvent_t fence;                         /* event recorded on `compute` for a copy that must wait */
    ps_trap *trap, *trap_host, *trap_device;   /* the trap in device memory, and the trap in host memory by its two
                                                * addresses */
    int *trap_taken;                           /* set in device memory when a kernel traps */
    int number;                                /* device index within this process */
    ps_cuda_card card;
    int capability;                            /* compute capability of the device; 90 means 9.0 */
    int wgmma;                                 /* which calls attention_hopper.cu computes */
    int64_t shared;                            /* maximum dynamic shared memory per block, in bytes */
    bool sync;                                 /* PS_CUDA_SYNC=1: wait for each op, so that errors name it */
    bool told;                                 /* PS_CUDA_SYNC=trace: also print each op's name before it runs */
    bool dry;                                  /* kernels allocate workspace and launch nothing */
    bool broken;
    char what_broke[512];
    const char *last_op;                       /* name of the last launched op, or NULL */
};
extern ps_cuda *ps_cu;
extern const ps_cuda_program *ps_cuda_host;    /* the program's functions, set when the plug-in is opened */

/* Turns a CUDA error into an error of the engine, and marks the device as broken. Returns 0 for cudaSuccess. */
int ps_cuda_check(cudaError_t e, const char *what);
#define CU_TRY(call) PS_TRY(ps_cuda_check((call), #call))
int ps_cuda_launched(void);                    /* called after a launch; returns 0 or an error */
/* Marks the device as broken after an error of a library. */
int ps_cuda_broke(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Returns the error for which a finished kernel trapped, or 0. Call it after waiting for the device. */
int ps_cuda_trapped(void);
/* ps_cuda_lose records that bytes which kernels expect did not arrive from another rank. ps_cuda_lost returns the
 * recorded error or 0; call it after waiting for the device. told: clears the error, because the caller reports it.
 * Any thread can call both. */
void ps_cuda_lose(int code, const char *why);
int ps_cuda_lost(bool told);

const char *ps_cuda_op_name(int op);
ps_kernel ps_cuda_kernel(int op);              /* for kernels that call other kernels */
/* Writes zeros on the compute stream, unless the call is dry. */
int ps_cuda_clear(void *p, size_t nbytes);
int ps_cuda_move(void *dst, const void *src, size_t nbytes);

/* Pins host memory if possible, so that copies run at the link's speed while the caller continues (pinned.cpp).
 * Other memory is copied more slowly. */
void ps_cuda_pin_host(const void *p, size_t nbytes);
/* Returns how many bytes, at most nbytes, one copy can read from p on: all in one pinned range, or all not pinned. */
size_t ps_cuda_pinned_run(const void *p, size_t nbytes);
void ps_cuda_unpin_all(void);

/* -- times.cpp: when work of the device ran ------------------------------------------------------------------------ */
int ps_cuda_time_begin(ps_backend *be, int32_t run);                /* implements time_begin of backend.h */
int ps_cuda_time_end(ps_backend *be, const ps_record_event *what);
int ps_cuda_time_read(ps_backend *be, bool wait, ps_record_event *out);
struct ps_copy_times { cudaEvent_t from, to; };                     /* begin and end of a copy; NULL if times are not
                                                                     * recorded */
int ps_cuda_copy_times(ps_copy_times *t, cudaStream_t lane, bool begins);
int ps_cuda_copy_times_read(ps_copy_times *t, int64_t ns[2]);       /* reads times of a finished copy, 0 if unknown */
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
/* Copies src to dst, broadcast to its shape and converted to its type, with any strides (copy.cu). */
int ps_cuda_copy(const ps_view *dst, const ps_view *src);
/* Matrix products of float types (gemm.cu). One of each matrix's two strides is 1. */
struct ps_cu_mat { void *data; int dtype; int64_t rows, cols, stride_row, stride_col; };
struct ps_cu_gemm {
    ps_cu_mat a, b, dst;                       /* dst [M, N] = a [M, K] b [K, N]; dst.stride_col is 1 */
    int64_t batch, step_a, step_b, step_dst;   /* in elements */
    bool accumulate;                           /* dst += */
    const void *bias;                          /* [N] of type bias_dtype, or NULL */
    int bias_dtype;
    const void *residual;                      /* [M, N] of dst's type, with rows ld_residual apart, or NULL */
    int64_t ld_residual;
    int also;                                  /* extra output of ps_cuda_gemm_fused: PS_CU_GELU, PS_CU_SUM_A or
                                                * PS_CU_SUM_B */
    void *pre, *sums;                          /* extra outputs by `also`, of dst's type; pre is [M, N] */
};
enum {
    PS_CU_GELU = 1,                            /* dst = gelu(a b + bias), tanh form; pre = a b + bias, if not NULL */
    PS_CU_SUM_A,                               /* sums [M] = sum of a's columns */
    PS_CU_SUM_B                                /* sums [N] = sum of b's rows */
};
int ps_cuda_gemm(ps_call *call, const ps_cu_gemm *g);
/* Computes g and the extra output g->also in one pass. If cuBLASLt cannot, sets *done to false and computes nothing. */
int ps_cuda_gemm_fused(ps_call *call, const ps_cu_gemm *g, bool *done);
int ps_cuda_gemm_open(void);
void ps_cuda_gemm_close(void);
const char *ps_cuda_gemm_describe(void);
/* Replaces d [.., C] by d gelu'(pre), with GELU's tanh form, and sets db [C] to the sum of its rows, or adds the sum
 * to db (elementwise.cu). d and pre are contiguous. Supports fp32, bf16 and fp16, with rows of whole packs of 16
 * bytes and 16-byte aligned addresses. */
int ps_cuda_gelu_slope_sums(ps_call *call, const ps_view *pre, const ps_view *d, const ps_view *db, bool add);
/* Writes the number of targets [n] that are not `ignore` to *count on the device. Traps on targets outside [0, V)
 * (rows.cu). */
int ps_cuda_count_targets(int op, const ps_view *target, int64_t V, int64_t ignore, long long *count);
/* Losses of rows of logits [V], and the gradient of the logits (rows.cu). */
struct ps_cu_ce {
    void *logits; int dtype; int64_t rows, V;
    int64_t ld;                                /* row stride of logits and of grad, in elements */
    int64_t wide;                              /* at most ld; elements V to wide - 1 of each row of grad become 0 */
    const void *target; int target_dtype; int64_t first, ignore;   /* targets; row i has target[first + i] */
    void *grad; int grad_dtype;                /* has the shape of logits and can be logits; NULL if not wanted */
    double scale;
    const long long *count;                    /* divisor of the gradient, or NULL */
    const void *dloss; int dloss_dtype; bool dloss_per_row;        /* factor of the gradient, or NULL */
    void *loss, *lse;                          /* outputs, row i at [first + i], fp32 (fp64 for fp64 logits), or NULL */
    unsigned long long *hits;                  /* is increased by the number of rows whose first largest logit is the
                                                * target's; or NULL */
};
int ps_cuda_ce_rows(const ps_cu_ce *c);
/* Prepares the output `hits` [2] of an op: sets element 0, which counts hits, to 0, and element 1 to *count. *hits
 * points to element 0, or is NULL if the output is not wanted. */
int ps_cuda_begin_hits(const ps_view *out, int want, const long long *count, unsigned long long **hits);
/* Writes the sum of loss [n] (fp32 or fp64), in a fixed order, to out [1], in out's type. Divides it by *count
 * unless `count` is NULL. */
int ps_cuda_loss_total(const void *loss, int dtype, int64_t n, const long long *count, const ps_view *out);

#endif
