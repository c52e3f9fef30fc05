/* SPDX-License-Identifier: BSD-3-Clause
 * Functions that compute the workspace of the cuda kernels from shapes and from a card's properties. The kernels use
 * these functions. cuda_rules.c uses them, too, to predict the memory use of cards that this machine does not have. The
 * file is plain C and C++, without CUDA. */
#ifndef PS_CUDA_RULES_H
#define PS_CUDA_RULES_H
#include "backend/backend.h"
#include "backend/dims.h"
#include "base/update.h"

/* Properties of a card that the rules use. */
typedef struct ps_cuda_card {
    int sm_count;
    int64_t memory;                            /* size of the card's memory in bytes */
} ps_cuda_card;

static inline int64_t ps_cu_div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t ps_cu_last(const ps_view *v) { return v->ndim > 0 ? v->shape[v->ndim - 1] : 1; }

/* -- reductions (reduce.cu) ---------------------------------------------------------------------------------------- */
enum { PS_CU_REDUCE_THREADS = 256 };

/* The plan of a reduction. If the reduced dimension is split into several parts, their results [parts, kept] are fp64
 * or int64, and another kernel combines them. */
typedef struct ps_cu_reduction {
    int64_t kept, reduced, blocks, parts;
    bool together;                             /* whether a block computes each part of a kept element; otherwise a
                                                * thread computes it */
} ps_cu_reduction;

/* Plans a reduction. Bit d of `dims` is set if dimension d is reduced. dims = 0 reduces all dimensions. */
static inline ps_cu_reduction ps_cu_reduce(const ps_cuda_card *card, const ps_view *x, uint32_t dims)
{
    ps_cu_reduction r = { 1, 1, 0, 1, false };
    int64_t wanted = (int64_t)card->sm_count * 8, inner = 0;     /* enough blocks to use the whole device */
    for (int d = 0; d < x->ndim; d++) {
        bool is_reduced = dims == 0 || (dims >> d & 1);
        if (is_reduced) r.reduced *= x->shape[d];
        else r.kept *= x->shape[d];
        if (is_reduced && x->shape[d] != 1) inner = x->stride[d];
    }
    r.together = r.reduced > 32 && (inner == 1 || r.kept < 64);
    r.blocks = r.together ? r.kept : ps_cu_div_up(r.kept, PS_CU_REDUCE_THREADS);
    int64_t least = r.together ? 4 * PS_CU_REDUCE_THREADS : 16;  /* minimum number of reduced elements per part */
    if (r.blocks > 0 && r.blocks < wanted) r.parts = wanted / r.blocks;
    if (r.parts > r.reduced / least) r.parts = r.reduced / least;
    r.parts = r.parts < 1 ? 1 : r.parts > 1024 ? 1024 : r.parts;
    return r;
}
static inline int64_t ps_cu_reduce_nbytes(const ps_cu_reduction *r)
{
    return r->parts > 1 ? r->parts * r->kept * 8 : 0;
}

/* -- norms (norm.cu) ----------------------------------------------------------------------------------------------- */
/* The maximum number of parts in which the gradient of a norm's weights is summed. With 1320 parts, each of 132
 * multiprocessors computes ten blocks. A multiprocessor runs five such blocks at a time for 768 bf16 columns, and two
 * for 1600 columns. Both numbers divide ten, so no multiprocessor is idle in the last round. */
enum { PS_CU_NORM_PARTS = 1320 };

/* Returns the number of parts into which rows are divided for the gradient of a norm's weights. */
static inline int64_t ps_cu_norm_parts(int64_t rows)
{
    int64_t parts = ps_cu_div_up(rows, 16);
    return parts < 1 ? 1 : parts < PS_CU_NORM_PARTS ? parts : (int64_t)PS_CU_NORM_PARTS;
}

/* -- sums of squares (optim.cu) ------------------------------------------------------------------------------------ */
enum { PS_CU_SQUARES_UNIT = 16 * 256 };        /* elements per block; a block writes one fp64 sum */
static inline int64_t ps_cu_squares_nbytes(int64_t units) { return (units + 1) * 8; }

/* -- LAMB and Adafactor (whole.cu) --------------------------------------------------------------------------------- */
/* units: number of units of PS_LAMB_UNIT elements (base/update.h). */
static inline int64_t ps_cu_lamb_nbytes(int64_t units) { return (2 * units + 2) * 8; }
/* rows: number of rows, summed over the matrices of a tensor. batch: number of matrices. */
static inline int64_t ps_cu_factored_nbytes(int64_t rows, int64_t batch) { return (rows + 2 + batch) * 8; }
/* Return the size in bytes of the workspace of a call, which is that of its largest tensor. */
static inline int64_t ps_cu_lamb_workspace(const ps_call *call)
{
    int64_t largest = 0;
    for (int i = 0; i + 5 <= call->n_in; i += 5) {
        int64_t nbytes = ps_cu_lamb_nbytes(ps_cu_div_up(call->in[i].numel, PS_LAMB_UNIT));
        if (call->in[i].numel > 0 && nbytes > largest) largest = nbytes;
    }
    return largest;
}
static inline int64_t ps_cu_adafactor_workspace(const ps_call *call)
{
    int64_t largest = 0;
    for (int i = 0; i + 5 <= call->n_in; i += 5) {
        const ps_view *p = &call->in[i];
        if (p->numel == 0) continue;
        int64_t rows = p->ndim > 1 ? p->numel / ps_cu_last(p) : 1;
        int64_t nbytes = ps_cu_factored_nbytes(rows, p->ndim > 1 ? rows / p->shape[p->ndim - 2] : 1);
        if (nbytes > largest) largest = nbytes;
    }
    return largest;
}

/* -- embeddings (table.cu) ----------------------------------------------------------------------------------------- */
enum { PS_CU_HOT = 64 };                       /* a row with more positions is hot: a whole block sums it */
/* Returns the largest possible number of hot rows for n positions. */
static inline int64_t ps_cu_embedding_hot(int64_t n) { return n / (PS_CU_HOT + 1) + 1; }
static inline int64_t ps_cu_embedding_nbytes(int64_t V, int64_t n)
{
    return (3 * (V + 1) + 2 * n + ps_cu_embedding_hot(n)) * 4;
}

/* -- attention (attention_plain.cu) -------------------------------------------------------------------------------- */
static inline int64_t ps_cu_delta_nbytes(int64_t rows, int dtype) { return (rows + 1) * (dtype == PS_F64 ? 8 : 4); }
/* Returns the size in bytes of the bounds of segments, for B samples of T positions each. */
static inline int64_t ps_cu_segments_nbytes(int64_t B, int64_t T) { return (B * T + 1) * 8; }
/* Returns the size in bytes of dk or dv if each query head has a separate result (query heads share keys). numel:
 * number of elements of all results. */
static inline int64_t ps_cu_each_head_nbytes(int64_t numel, int dtype) { return (numel + 1) * ps_dtype_bytes(dtype); }

/* -- matrix products (matmul.cpp, gemm.cu) ------------------------------------------------------------------------- */
/* Returns whether a matrix can be used without a copy: one of its strides is 1, and its rows do not overlap. */
static inline bool ps_cu_has_lines(int64_t rows, int64_t cols, int64_t stride_row, int64_t stride_col)
{
    bool by_row = cols == 1 || stride_col == 1, by_col = rows == 1 || stride_row == 1;
    return (by_row && (rows == 1 || stride_row >= cols)) || (by_col && (cols == 1 || stride_col >= rows));
}
/* Returns whether v [..., cols] can be used as the matrix [rows, cols] without a copy. Sets *stride to the row
 * stride. */
static inline bool ps_cu_is_rows(const ps_view *v, int64_t *stride)
{
    int last = v->ndim - 1;
    return collapses(v, last, stride) &&
           ps_cu_has_lines(product(v->shape, last), v->shape[last], *stride, v->stride[last]);
}
/* Returns whether a residual [..., cols] can be read without a copy. Sets *ld to the row stride. `rows` is the number
 * of rows of the product. */
static inline bool ps_cu_is_residual(const ps_view *v, int64_t rows, int64_t cols, int64_t *ld)
{
    bool lines = collapses(v, v->ndim - 1, ld) && (cols == 1 || v->stride[v->ndim - 1] == 1);
    if (lines && rows == 1) *ld = cols;
    return lines && *ld >= cols;
}
/* Returns whether cuBLASLt can add the bias. The bias must have the output's type, and its address must be a multiple
 * of 16 bytes, because some of cuBLASLt's kernels fail otherwise. */
static inline bool ps_cu_takes_bias(const void *bias, int bias_dtype, int dtype)
{
    return bias_dtype == dtype && (uintptr_t)bias % 16 == 0;
}

/* -- packed weights (packed.cu) ------------------------------------------------------------------------------------ */
static inline int64_t ps_cu_packed_panel(int dtype)               /* number of values in a panel of unpacked weights */
{
#ifdef PS_CUDA_PANEL_NBYTES                                   /* tests set a small value */
    return PS_CUDA_PANEL_NBYTES / ps_dtype_bytes(dtype);
#else
    return ((int64_t)128 << 20) / ps_dtype_bytes(dtype);
#endif
}
/* Return the number of rows or of columns in a panel of a matrix [N, K]. A panel contains whole blocks. */
static inline int64_t ps_cu_packed_rows(int64_t N, int64_t K, int dtype)
{
    int64_t rows = ps_cu_packed_panel(dtype) / (K > 0 ? K : 1) / 64 * 64;
    if (rows < 64) rows = 64;
    return rows < N ? rows : N;
}
static inline int64_t ps_cu_packed_cols(int64_t N, int64_t K, int dtype)
{
    int64_t cols = ps_cu_packed_panel(dtype) / (N > 0 ? N : 1) / 256 * 256;
    if (cols < 256) cols = 256;
    return cols < K ? cols : K;
}
static inline int64_t ps_cu_packed_nbytes(int64_t rows, int64_t cols, int dtype)
{
    return (rows * cols + 1) * ps_dtype_bytes(dtype);
}
/* Returns the size in bytes of x after it is rounded to 8 bits. The rounded values are stored as fp32 or fp64. x is
 * rounded only if it has few rows. */
static inline int64_t ps_cu_rounded_nbytes(int64_t numel, int dtype) { return (numel + 1) * (dtype == PS_F64 ? 8 : 4); }

/* -- lm_loss (matmul.cpp) ------------------------------------------------------------------------------------------ */
static inline int64_t ps_cu_panel_nbytes(const ps_cuda_card *card)             /* size of a panel of logits in bytes */
{
#ifdef PS_CUDA_PANEL_NBYTES                                   /* tests set a small value */
    return PS_CUDA_PANEL_NBYTES;
#else
    int64_t part = card->memory / 128, least = (int64_t)256 << 20, most = (int64_t)1 << 30;
    return part < least ? least : part < most ? part : most;
#endif
}
/* Returns the number of rows per panel, for N rows of V logits. */
static inline int64_t ps_cu_panel_rows(const ps_cuda_card *card, int64_t N, int64_t V)
{
    int64_t rows = ps_cu_panel_nbytes(card) / (V * 4) / 128 * 128;
    if (rows < 128) rows = 128;
    if (rows >= N) return N;
    int64_t panels = ps_cu_div_up(N, rows);                  /* makes the panels nearly equal in size */
    rows = ps_cu_div_up(ps_cu_div_up(N, panels), 128) * 128;
    return rows < N ? rows : N;
}

/* Shapes and memory of a call of lm_loss for x [N, C] and w [V, C]. */
typedef struct ps_cu_lm {
    /* A panel is [rows, V] with row stride ld. w has V rows, or is padded with zeros to `wide` rows. */
    int64_t rows, ld, wide;
    int logits_dtype, dw_dtype;                /* dw_dtype: the type in which dw is summed */
    /* Sizes in bytes of workspace; 0 if it is not needed. grad: the gradient of a panel. w, bias: padded copies. dw:
     * the sum of dw over panels. */
    int64_t loss_nbytes, logits_nbytes, grad_nbytes, dw_nbytes, w_nbytes, bias_nbytes;
} ps_cu_lm;

/* dtype: type of x and w. dw: type of dw, or -1 if dw is not wanted. grads: whether any gradient is wanted. */
static inline ps_cu_lm ps_cu_lm_sizes(const ps_cuda_card *card, int64_t N, int64_t V, int64_t C, int dtype, int dw,
                                      bool grads, bool bias)
{
    ps_cu_lm s;
    memset(&s, 0, sizeof s);
    int64_t each = ps_dtype_bytes(dtype);
    s.logits_dtype = dtype == PS_F64 ? PS_F64 : PS_F32;
    s.ld = ps_cu_div_up(V, 64) * 64;
    s.wide = V * each % 16 == 0 ? V : s.ld;
    s.rows = N > 0 ? ps_cu_panel_rows(card, N, s.ld) : 1;
    s.loss_nbytes = N * 8 + 8;
    s.logits_nbytes = s.rows * s.ld * ps_dtype_bytes(s.logits_dtype);
    if (grads && dtype != s.logits_dtype) s.grad_nbytes = s.rows * s.ld * 2;
    if (s.wide != V && N > 0) {
        s.w_nbytes = s.wide * C * each;
        if (bias) s.bias_nbytes = s.wide * each;
    }
    if (dw < 0) return s;
    bool summed = s.rows < N && (dw == PS_BF16 || dw == PS_F16);
    s.dw_dtype = summed ? PS_F32 : dw;
    if (summed || s.wide != V) s.dw_nbytes = s.wide * C * ps_dtype_bytes(s.dw_dtype);
    return s;
}
#endif
