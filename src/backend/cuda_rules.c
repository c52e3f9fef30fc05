/* SPDX-License-Identifier: BSD-3-Clause
 * Computes the workspace that the cuda kernels request, even for a card that this machine does not have. Both this file
 * and the kernels use the functions of cuda/rules.h. At every call, the emulated plug-in compares the result of this
 * file with the workspace that the kernel requests. */
#include "backend/cuda_rules.h"
#include <string.h>
#include "base/blocks.h"
#include "base/update.h"

static int64_t up(int64_t nbytes) { return (nbytes + 63) / 64 * 64; }
static int64_t nbytes_of(const ps_view *v) { return v->numel * ps_dtype_bytes(v->dtype); }

static int64_t reduction(const ps_cuda_card *card, const ps_view *x, uint32_t dims)
{
    ps_cu_reduction r = ps_cu_reduce(card, x, dims);
    return r.kept == 0 ? 0 : up(ps_cu_reduce_nbytes(&r));
}

/* Returns the size in bytes of the workspace for summing n rows of `cols` elements. The row stride is ld elements. */
static int64_t row_sums(const ps_cuda_card *card, int64_t n, int64_t cols, int64_t ld)
{
    ps_view rows;
    memset(&rows, 0, sizeof rows);
    rows.ndim = 2;
    rows.numel = n * cols;
    rows.shape[0] = n, rows.shape[1] = cols, rows.stride[0] = ld, rows.stride[1] = 1;
    return reduction(card, &rows, 1);
}
static int64_t sums_of(const ps_cuda_card *card, const ps_view *d)
{
    int64_t cols = ps_cu_last(d);
    return row_sums(card, d->numel / cols, cols, d->ndim == 2 ? d->stride[0] : cols);
}

/* Returns the size in bytes of the workspace for a copy of v [..., cols]. Returns 0 if v can be used as a matrix
 * without a copy. */
static int64_t rows_copy(const ps_view *v)
{
    int64_t stride;
    return ps_cu_is_rows(v, &stride) ? 0 : up(nbytes_of(v));
}

/* Returns the size in bytes of the copies of the bias that gemm.cu makes for a product [rows, inner] x [inner,
 * cols]. */
static int64_t bias_copy(const ps_view *bias, int64_t rows, int64_t inner, int64_t cols, int a, int b, int dst)
{
    if (!bias || !ps_has(bias)) return 0;
    bool packed = bias->shape[0] != 1 && bias->stride[0] != 1, half = a == PS_BF16 || a == PS_F16;
    int64_t nbytes = packed ? up(nbytes_of(bias)) : 0;
    bool by_library = rows > 0 && cols > 0 && inner > 0 && a == b && (dst == a || (half && dst == PS_F32));
    if (by_library && !ps_cu_takes_bias(packed ? NULL : bias->data, bias->dtype, dst))
        nbytes += up(cols * ps_dtype_bytes(dst));
    return nbytes;
}

static int64_t residual_copy(const ps_view *residual, int64_t rows, int64_t cols)
{
    int64_t ld;
    return !residual || !ps_has(residual) || ps_cu_is_residual(residual, rows, cols, &ld) ? 0 : up(nbytes_of(residual));
}

/* Returns the size in bytes of the workspace for y = x w + bias + residual. bias and residual can be NULL or absent. */
static int64_t linear(const ps_view *x, const ps_view *w, const ps_view *bias, const ps_view *residual,
                      const ps_view *y)
{
    if (y->numel == 0) return 0;
    int64_t cols = ps_cu_last(y), rows = y->numel / cols, inner = x->numel == 0 ? 0 : ps_cu_last(x);
    int64_t nbytes = x->numel == 0 ? 0 : rows_copy(x) + rows_copy(w);
    return nbytes + bias_copy(bias, rows, inner, cols, x->dtype, w->dtype, y->dtype) +
           residual_copy(residual, rows, cols);
}

static int64_t mlp(const ps_call *call)
{
    const ps_attrs_mlp *a = (const ps_attrs_mlp *)call->attrs;
    const ps_view *in = call->in, *y = &call->out[0], *pre = &call->out[1];
    if (y->numel == 0 && (!ps_has(pre) || pre->numel == 0)) return 0;
    static char there[1];
    ps_view h = in[0];
    int64_t hidden = in[1].shape[a->out_in ? 0 : 1], step = 1;
    h.shape[h.ndim - 1] = hidden;
    h.numel = product(h.shape, h.ndim);
    for (int d = h.ndim - 1; d >= 0; step *= h.shape[d--]) h.stride[d] = step;
    h.data = there;
    int64_t nbytes = up(nbytes_of(&h));
    nbytes += linear(&in[0], &in[1], &in[2], NULL, &h);
    return nbytes + linear(&h, &in[3], &in[4], &in[5], y);
}

static int64_t linear_grad(const ps_cuda_card *card, const ps_call *call)
{
    const ps_view *x = &call->in[0], *dy = &call->in[1], *db = &call->out[1];
    if (db->numel == 0) return 0;
    int64_t nbytes = x->numel == 0 ? 0 : rows_copy(x) + rows_copy(dy);
    return nbytes + (dy->numel > 0 ? sums_of(card, dy) : 0);
}

static int64_t linear_gelu_backward(const ps_cuda_card *card, const ps_call *call)
{
    const ps_view *d = &call->out[0], *db = &call->out[1];
    if (ps_cu_last(d) == 0 || d->numel == 0) return 0;
    return linear(&call->in[0], &call->in[1], NULL, NULL, d) + (ps_has(db) ? sums_of(card, d) : 0);
}

static int64_t operand_copy(const ps_view *v)
{
    int r = v->ndim - 2, c = v->ndim - 1;
    return ps_cu_has_lines(v->shape[r], v->shape[c], v->stride[r], v->stride[c]) ? 0 : up(nbytes_of(v));
}

static int64_t lm_loss(const ps_cuda_card *card, const ps_call *call)
{
    const ps_attrs_lm_loss *a = (const ps_attrs_lm_loss *)call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1], *bias = &call->in[3], *out = call->out;
    int64_t N = call->in[2].numel, V = w->shape[0], C = w->shape[1], panels = 0;
    if (V == 0) return 0;
    bool want_dx = (a->want_grad & 1) && ps_has(&out[1]) && N > 0, want_dw = (a->want_grad & 2) && ps_has(&out[2]);
    bool want_db = (a->want_grad & 4) && ps_has(&out[3]);
    ps_cu_lm s = ps_cu_lm_sizes(card, N, V, C, x->dtype, want_dw ? out[2].dtype : -1, want_dx || want_dw || want_db,
                                ps_has(bias));
    int64_t nbytes = up(8) + up(s.loss_nbytes) + up(s.logits_nbytes) + up(s.grad_nbytes) + up(s.dw_nbytes) +
                     up(s.w_nbytes) + up(s.bias_nbytes);
    ps_view all = *bias;
    if (s.bias_nbytes > 0) all.shape[0] = all.numel = s.wide, all.stride[0] = 1, all.data = NULL;
    for (int64_t first = 0; first < N; first += s.rows, panels++) {
        int64_t rows = N - first < s.rows ? N - first : s.rows;
        nbytes += bias_copy(&all, rows, C, s.wide, x->dtype, x->dtype, s.logits_dtype);
        if (want_db) nbytes += row_sums(card, rows, V, s.ld);
    }
    return nbytes;
}

static int64_t heads_backward(int64_t B, int64_t H, int64_t T, int64_t S, int64_t D, bool grouped, int wanted,
                              bool mask, int dtype)
{
    int64_t nbytes = 0;
    if (B * H == 0) return 0;
    if (grouped) nbytes += wanted * up(ps_cu_each_head_nbytes(B * H * S * D, dtype));
    return nbytes + up(ps_cu_delta_nbytes(B * H * T, dtype)) + (mask ? up(B * 4) : 0);
}

/* Returns whether attention's input `mask` is a bool mask [B, S]. Otherwise it contains segments or is a mask of 4
 * dimensions. */
static bool is_key_mask(const ps_view *mask) { return ps_has(mask) && mask->ndim != 4 && mask->dtype != PS_I32; }

/* Returns the size in bytes of the workspace for the bounds of segments. Returns 0 if attention's input `mask` does not
 * contain segments. */
static int64_t segments(const ps_view *mask)
{
    if (!ps_has(mask) || mask->ndim != 2 || mask->dtype != PS_I32) return 0;
    return up(ps_cu_segments_nbytes(mask->shape[0], mask->shape[1]));
}

static int64_t attention_backward(const ps_call *call)
{
    const ps_view *q = &call->in[1], *k = &call->in[2], *out = call->out;
    int wanted = ps_has(&out[1]) + ps_has(&out[2]);
    return segments(&call->in[4]) +
           heads_backward(q->shape[0], q->shape[1], q->shape[2], k->shape[2], q->shape[3],
                          k->shape[1] > 0 && q->shape[1] > k->shape[1], wanted, is_key_mask(&call->in[4]), q->dtype);
}

static int64_t attention_packed_backward(const ps_call *call)
{
    const ps_view *qkv = &call->in[1];
    int64_t H = ((const ps_attrs_attention_packed_backward *)call->attrs)->heads;
    return segments(&call->in[2]) +
           heads_backward(qkv->shape[0], H, qkv->shape[1], qkv->shape[1], qkv->shape[2] / 3 / H, false, 0,
                          is_key_mask(&call->in[2]), qkv->dtype);
}

static int64_t norm_backward(const ps_view *x, bool want_w)
{
    int64_t C = ps_cu_last(x);
    if (C == 0 || !want_w) return 0;
    return up(2 * ps_cu_norm_parts(x->numel / C) * C * (x->dtype == PS_F64 ? 8 : 4));
}

static int64_t squares(int n, const ps_view *x)
{
    int64_t units = 0;
    for (int i = 0; i < n; i++) units += ps_cu_div_up(x[i].numel, PS_CU_SQUARES_UNIT);
    return up(ps_cu_squares_nbytes(units));
}

static int64_t linear_packed(const ps_call *call)
{
    const ps_attrs_linear_packed *a = (const ps_attrs_linear_packed *)call->attrs;
    const ps_view *x = &call->in[0], *bias = &call->in[2], *y = &call->out[0];
    if (y->numel == 0) return 0;
    int64_t M = y->numel / ps_cu_last(y), N = call->in[1].shape[0], K = ps_cu_last(a->back ? y : x);
    if (!a->back && M <= PS_PACKED_ROWS)
        return a->int8 && ps_blocks_int8(a->type) ? up(ps_cu_rounded_nbytes(M * K, y->dtype)) : 0;
    if (a->back)
        return x->numel == 0 ? 0 : up(ps_cu_packed_nbytes(N, ps_cu_packed_cols(N, K, y->dtype), y->dtype));
    int64_t step = ps_cu_packed_rows(N, K, y->dtype), nbytes = up(ps_cu_packed_nbytes(step, K, y->dtype));
    for (int64_t first = 0; first < N; first += step) {
        int64_t n = N - first < step ? N - first : step;
        nbytes += bias_copy(bias, M, K, n, y->dtype, y->dtype, y->dtype);
    }
    return nbytes;
}

int64_t ps_cuda_rules_scratch(const ps_cuda_card *card, const ps_call *call)
{
    const ps_view *in = call->in, *out = call->out;
    const void *a = call->attrs;
    switch (call->op) {
    case PS_OP_sum: return reduction(card, in, ((const ps_attrs_sum *)a)->dims);
    case PS_OP_mean: return reduction(card, in, ((const ps_attrs_mean *)a)->dims);
    case PS_OP_amax: return reduction(card, in, ((const ps_attrs_amax *)a)->dims);
    case PS_OP_amin: return reduction(card, in, ((const ps_attrs_amin *)a)->dims);
    case PS_OP_sq_norms: return squares(call->n_in, in);
    case PS_OP_grad_store: return squares(1, in);
    case PS_OP_layer_norm_backward: return norm_backward(&in[1], ((const ps_attrs_layer_norm_backward *)a)->want_w);
    case PS_OP_rms_norm_backward: return norm_backward(&in[1], ((const ps_attrs_rms_norm_backward *)a)->want_w);
    case PS_OP_cross_entropy:
        return up(8) + (((const ps_attrs_cross_entropy *)a)->reduction == 0 ? 0
                        : up((in[1].numel + 1) * (in[0].dtype == PS_F64 ? 8 : 4)));
    case PS_OP_cross_entropy_backward: return up(8);
    case PS_OP_embedding_backward:
        return out[0].numel == 0 ? 0
               : up(ps_cu_embedding_nbytes(((const ps_attrs_embedding_backward *)a)->rows, in[0].numel));
    case PS_OP_cumprod_backward: return in[0].numel == 0 ? 0 : up(in[0].numel * 8);
    case PS_OP_scatter_add:
    case PS_OP_scatter_reduce: return in[0].numel == 0 ? 0 : up(in[0].numel * 8);
    case PS_OP_attention: return segments(&in[3]);
    case PS_OP_attention_packed: return segments(&in[1]);
    case PS_OP_attention_backward: return attention_backward(call);
    case PS_OP_attention_packed_backward: return attention_packed_backward(call);
    case PS_OP_matmul: return out[0].numel == 0 || in[0].numel == 0 ? 0 : operand_copy(&in[0]) + operand_copy(&in[1]);
    case PS_OP_linear: return linear(&in[0], &in[1], &in[2], &in[3], &out[0]);
    case PS_OP_mlp: return mlp(call);
    case PS_OP_linear_grad: return linear_grad(card, call);
    case PS_OP_linear_gelu_backward: return linear_gelu_backward(card, call);
    case PS_OP_lm_loss: return lm_loss(card, call);
    case PS_OP_lamb_: return up(ps_cu_lamb_workspace(call));
    case PS_OP_adafactor_: return up(ps_cu_adafactor_workspace(call));
    case PS_OP_linear_packed: return linear_packed(call);
    default: return 0;
    }
}
