/* SPDX-License-Identifier: BSD-3-Clause
 * Declarations that the host code of the cuda backend shares: the device and its streams, errors, and operands of
 * kernels. ps_fail, ps_alloc and similar functions call the program through a table of functions. The program passes
 * this table when it opens the plug-in (program.cpp). */
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

/* Errors that kernels find in the values of their operands. Only the first error is kept. The host checks for an error
 * when it waits for the device. */
enum { TRAP_NONE, TRAP_INDEX, TRAP_TARGET, TRAP_NAN, TRAP_INFINITE };
struct ps_trap {
    int kind, op;
    long long value, position, limit, ignore;
};

/* The one device that this process uses. Work on one stream runs in order, and all kernels use the stream `compute`.
 * Once `broken` is set, every call fails, because a context is unusable after a CUDA error. */
enum { WGMMA_NEVER, WGMMA_WHERE_FASTER, WGMMA_ALWAYS };
struct ps_cuda {
    ps_backend base;
    cudaMemPool_t pool;                        /* pool of device memory; NULL if memory is allocated without a pool */
    cudaStream_t compute, lane[2];             /* lane: streams of copies, indexed by to_device */
    cudaEvent_t fence;                         /* event that is recorded on `compute` for a copy that must wait */
    /* trap: the address of the trap in device memory.
     * trap_host: the host's address of the trap in host memory.
     * trap_device: the device's address of the same trap in host memory. */
    ps_trap *trap, *trap_host, *trap_device;
    int *trap_taken;                           /* set in device memory when a kernel traps */
    int number;                                /* device index within this process */
    ps_cuda_card card;
    int capability;                            /* compute capability of the device; 90 means 9.0 */
    int wgmma;                                 /* one of the WGMMA constants; selects the calls that attention_hopper.cu
                                                * computes */
    int64_t shared;                            /* maximum dynamic shared memory per block, in bytes */
    bool sync;                                 /* PS_CUDA_SYNC=1: wait after each op, so that errors name the op */
    bool told;                                 /* PS_CUDA_SYNC=trace: also print each op's name before it runs */
    bool dry;                                  /* kernels allocate their workspace, but nothing is launched */
    bool broken;
    char what_broke[512];
    const char *last_op;                       /* name of the last launched op, or NULL */
};
extern ps_cuda *ps_cu;
extern const ps_cuda_program *ps_cuda_host;    /* the program's functions, set when the plug-in is opened */

/* Reports a CUDA error as an error of the engine, and marks the device as broken. Returns 0 for cudaSuccess. */
int ps_cuda_check(cudaError_t e, const char *what);
#define CU_TRY(call) PS_TRY(ps_cuda_check((call), #call))
int ps_cuda_launched(void);                    /* called after each launch; returns 0 or the launch's error */
/* Marks the device as broken after a library has failed. */
int ps_cuda_broke(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Returns the error for which a finished kernel trapped, or 0. Call this function after waiting for the device. */
int ps_cuda_trapped(void);
/* ps_cuda_lose() records that bytes which kernels expect did not arrive from another rank. ps_cuda_lost() returns the
 * recorded error or 0. Call it after waiting for the device. If `told` is set, ps_cuda_lost() clears the error, because
 * the caller reports it. Any thread can call both functions. */
void ps_cuda_lose(int code, const char *why);
int ps_cuda_lost(bool told);

const char *ps_cuda_op_name(int op);
ps_kernel ps_cuda_kernel(int op);              /* returns the kernel of an op, for kernels that run other ops */
/* Writes zeros on the compute stream, unless the call is a dry run. */
int ps_cuda_clear(void *p, size_t nbytes);
int ps_cuda_move(void *dst, const void *src, size_t nbytes);

/* Pins host memory if possible (pinned.cpp). Copies of pinned memory run at the link's speed while the caller
 * continues. Copies of unpinned memory are slower. */
void ps_cuda_pin_host(const void *p, size_t nbytes);
/* Returns the number of bytes, at most nbytes, that one copy can read or write at p. All these bytes are in one pinned
 * range, or all are unpinned. */
size_t ps_cuda_pinned_run(const void *p, size_t nbytes);
void ps_cuda_unpin_all(void);

/* -- times.cpp: when work of the device ran ------------------------------------------------------------------------ */
int ps_cuda_time_begin(ps_backend *be, int32_t run);                /* implements time_begin of backend.h */
int ps_cuda_time_end(ps_backend *be, const ps_record_event *what);
int ps_cuda_time_read(ps_backend *be, bool wait, ps_record_event *out);
struct ps_copy_times { cudaEvent_t from, to; };                     /* recorded at the beginning and at the end of a
                                                                     * copy; NULL if times are not recorded */
int ps_cuda_copy_times(ps_copy_times *t, cudaStream_t lane, bool begins);
/* Sets ns to the times at which a finished copy began and ended, or to 0 if the times are unknown. */
int ps_cuda_copy_times_read(ps_copy_times *t, int64_t ns[2]);
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

/* -- functions that several kernels use ---------------------------------------------------------------------------- */
/* Copies src to dst (copy.cu). src is broadcast to dst's shape and converted to dst's type. Both can have any
 * strides. */
int ps_cuda_copy(const ps_view *dst, const ps_view *src);
/* Matrix products of float types (gemm.cu). Each matrix has two strides, and one of them is 1. */
struct ps_cu_mat { void *data; int dtype; int64_t rows, cols, stride_row, stride_col; };
struct ps_cu_gemm {
    ps_cu_mat a, b, dst;                       /* dst [M, N] = a [M, K] b [K, N]; dst.stride_col is 1 */
    int64_t batch, step_a, step_b, step_dst;   /* strides between batches, in elements */
    bool accumulate;                           /* add the product to dst */
    const void *bias;                          /* [N] of type bias_dtype, or NULL */
    int bias_dtype;
    const void *residual;                      /* [M, N] of dst's type, with row stride ld_residual, or NULL */
    int64_t ld_residual;
    int also;                                  /* the extra output of ps_cuda_gemm_fused: PS_CU_GELU, PS_CU_SUM_A or
                                                * PS_CU_SUM_B */
    void *pre, *sums;                          /* the extra outputs that `also` selects, of dst's type; pre is [M, N] */
};
enum {
    PS_CU_GELU = 1,                            /* dst = gelu(a b + bias) in tanh form; pre = a b + bias unless pre is
                                                * NULL */
    PS_CU_SUM_A,                               /* sums [M] = the sum over a's columns */
    PS_CU_SUM_B                                /* sums [N] = the sum over b's rows */
};
int ps_cuda_gemm(ps_call *call, const ps_cu_gemm *g);
/* Computes the product g and the extra output g->also in one pass. Sets *done to true if it has computed both. If
 * cuBLASLt does not support the combination, sets *done to false and computes nothing. */
int ps_cuda_gemm_fused(ps_call *call, const ps_cu_gemm *g, bool *done);
int ps_cuda_gemm_open(void);
void ps_cuda_gemm_close(void);
const char *ps_cuda_gemm_describe(void);
/* Computes the gradient of GELU in its tanh form, and the sums of the gradient's columns (elementwise.cu). d [.., C] is
 * replaced by d * gelu'(pre). db [C] is set to the sum of the new rows of d. If `add` is set, the sum is added to db
 * instead. d and pre are contiguous, of type fp32, bf16 or fp16. Addresses must be multiples of 16 bytes, and rows must
 * be whole packs of 16 bytes. */
int ps_cuda_gelu_slope_sums(ps_call *call, const ps_view *pre, const ps_view *d, const ps_view *db, bool add);
/* Counts the targets [n] that differ from `ignore`, and writes the count to *count in device memory. Traps if another
 * target is outside [0, V) (rows.cu). */
int ps_cuda_count_targets(int op, const ps_view *target, int64_t V, int64_t ignore, long long *count);
/* Losses of rows of logits [V], and the gradients of the logits (rows.cu). */
struct ps_cu_ce {
    void *logits; int dtype; int64_t rows, V;
    int64_t ld;                                /* row stride of logits and of grad, in elements */
    int64_t wide;                              /* at most ld; columns V to wide - 1 of grad are set to 0 */
    const void *target; int target_dtype; int64_t first, ignore;   /* row i has the target target[first + i]; rows whose
                                                                    * target is `ignore` are skipped */
    void *grad; int grad_dtype;                /* output with the shape of logits, which can share the memory of logits;
                                                * or NULL */
    double scale;
    const long long *count;                    /* the gradient is divided by *count, unless `count` is NULL */
    const void *dloss; int dloss_dtype; bool dloss_per_row;        /* the gradient is multiplied by dloss, unless
                                                                    * `dloss` is NULL */
    void *loss, *lse;                          /* outputs in fp32 (fp64 for fp64 logits), or NULL; element first + i
                                                * belongs to row i */
    /* increased by the number of rows in which the first of the largest logits is at the target; or NULL */
    unsigned long long *hits;
};
int ps_cuda_ce_rows(const ps_cu_ce *c);
/* Prepares the output `hits` [2] of an op. Element 0 counts hits and is set to 0. Element 1 is set to *count. Sets
 * *hits to the address of element 0, or to NULL if `want` is 0. */
int ps_cuda_begin_hits(const ps_view *out, int want, const long long *count, unsigned long long **hits);
/* Sums loss [n] (fp32 or fp64) in a fixed order, and divides the sum by *count unless `count` is NULL. Writes the
 * result to out [1], in out's type. */
int ps_cuda_loss_total(const void *loss, int dtype, int64_t n, const long long *count, const ps_view *out);

#endif
