/* SPDX-License-Identifier: BSD-3-Clause
 * Matrix products: operands of any strides are read into row-major doubles, multiplied by the plain triple loop (each
 * sum runs over k upwards) and rounded once. */
#include "ref.h"

/* y [M, N] += a [M, K] b [K, N], all row-major. */
static void multiply(int64_t M, int64_t N, int64_t K, const double *a, const double *b, double *y)
{
    for (int64_t i = 0; i < M; i++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t j = 0; j < N; j++) y[i * N + j] += a[i * K + k] * b[k * N + j];
}

/* The leading dimensions of v [..., R, C], broadcast to those of out: where the matrix of batch n begins. */
static ps_view batches(const ps_view *v, const ps_view *out)
{
    ps_view lead = *v;
    lead.ndim -= 2;
    return ref_expand(&lead, out->ndim - 2, out->shape);
}

int ref_matmul(ps_call *call)
{
    const ps_attrs_matmul *attrs = call->attrs;
    const ps_view *a = &call->in[0], *b = &call->in[1], *y = &call->out[0];
    int64_t M = a->shape[a->ndim - 2], K = a->shape[a->ndim - 1], N = b->shape[b->ndim - 1];
    ps_view a_at = batches(a, y), b_at = batches(b, y), y_at = batches(y, y);
    double *am, *bm, *ym;
    PS_TRY(ref_scratch(call, M * K, &am));
    PS_TRY(ref_scratch(call, K * N, &bm));
    PS_TRY(ref_scratch(call, M * N, &ym));
    for (int64_t n = 0; n < y_at.numel; n++) {
        ps_view am_view = ref_matrix(a, ref_at(&a_at, n)), bm_view = ref_matrix(b, ref_at(&b_at, n));
        ps_view ym_view = ref_matrix(y, ref_at(&y_at, n));
        ref_read(&am_view, am);
        ref_read(&bm_view, bm);
        memset(ym, 0, (size_t)(M * N) * sizeof *ym);
        multiply(M, N, K, am, bm, ym);
        ref_put(&ym_view, ym, attrs->accumulate);
    }
    return 0;
}

int ref_linear(ps_call *call)
{
    const ps_attrs_linear *attrs = call->attrs;
    const ps_view *out = &call->out[0];
    ps_view w_view = call->in[1];                    /* [I, O] */
    if (attrs->out_in) {
        w_view.shape[0] = call->in[1].shape[1], w_view.stride[0] = call->in[1].stride[1];
        w_view.shape[1] = call->in[1].shape[0], w_view.stride[1] = call->in[1].stride[0];
    }
    int64_t I = w_view.shape[0], O = w_view.shape[1], rows = O > 0 ? out->numel / O : 0;
    double *x, *w, *b, *residual, *y;
    PS_TRY(ref_dense(call, &call->in[0], &x));
    PS_TRY(ref_dense(call, &w_view, &w));
    PS_TRY(ref_dense(call, &call->in[2], &b));
    PS_TRY(ref_dense(call, &call->in[3], &residual));
    PS_TRY(ref_scratch(call, out->numel, &y));
    multiply(rows, O, I, x, w, y);
    for (int64_t i = 0; i < out->numel; i++) y[i] += (b ? b[i % O] : 0) + (residual ? residual[i] : 0);
    ref_put(out, y, false);
    return 0;
}
