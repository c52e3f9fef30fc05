/* SPDX-License-Identifier: BSD-3-Clause
 * Matrix products. Operands, which can have any strides, are copied to row-major doubles. The product is computed by
 * three nested loops. The terms of a sum are added in the order of k. The result is rounded once. */
#include "ref.h"

/* Adds the product a [M, K] * b [K, N] to y [M, N]. All matrices are row-major. */
static void multiply(int64_t M, int64_t N, int64_t K, const double *a, const double *b, double *y)
{
    for (int64_t i = 0; i < M; i++)
        for (int64_t k = 0; k < K; k++)
            for (int64_t j = 0; j < N; j++) y[i * N + j] += a[i * K + k] * b[k * N + j];
}

/* Returns a view of the leading dimensions of v [..., R, C], broadcast to the leading dimensions of `out`. Element n of
 * the view is the first element of matrix n. */
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

/* Returns v, or the transpose of v if `turn` is set. */
static ps_view turned(const ps_view *v, bool turn)
{
    ps_view t = *v;
    if (!turn) return t;
    t.shape[0] = v->shape[1], t.stride[0] = v->stride[1];
    t.shape[1] = v->shape[0], t.stride[1] = v->stride[0];
    return t;
}

/* Computes y [rows, O] = x [rows, I] * w [I, O] + b [O]. If out_in is set, w_view is [O, I]. b can be absent. */
static int product(ps_call *call, const double *x, int64_t rows, const ps_view *w_view, bool out_in,
                   const ps_view *b_view, double **y)
{
    ps_view plain = turned(w_view, out_in);
    int64_t I = plain.shape[0], O = plain.shape[1];
    double *w, *b;
    PS_TRY(ref_dense(call, &plain, &w));
    PS_TRY(ref_dense(call, b_view, &b));
    PS_TRY(ref_scratch(call, rows * O, y));
    multiply(rows, O, I, x, w, *y);
    for (int64_t i = 0; b && i < rows * O; i++) (*y)[i] += b[i % O];
    return 0;
}

static int64_t rows_of(const ps_view *v) { return ref_last(v) > 0 ? v->numel / ref_last(v) : 0; }

int ref_linear(ps_call *call)
{
    const ps_attrs_linear *attrs = call->attrs;
    const ps_view *out = &call->out[0];
    double *x, *residual, *y;
    PS_TRY(ref_dense(call, &call->in[0], &x));
    PS_TRY(ref_dense(call, &call->in[3], &residual));
    PS_TRY(product(call, x, rows_of(out), &call->in[1], attrs->out_in, &call->in[2], &y));
    for (int64_t i = 0; residual && i < out->numel; i++) y[i] += residual[i];
    ref_put(out, y, false);
    return 0;
}

int ref_linear_grad(ps_call *call)
{
    const ps_attrs_linear_grad *attrs = call->attrs;
    ps_view left = turned(&call->in[attrs->out_in ? 1 : 0], true);
    const ps_view *right = &call->in[attrs->out_in ? 0 : 1], *dy = &call->in[1];
    int64_t N = dy->shape[0], O = dy->shape[1];
    double *a, *b, *dw, *d, *db;
    PS_TRY(ref_dense(call, &left, &a));
    PS_TRY(ref_dense(call, right, &b));
    PS_TRY(ref_dense(call, dy, &d));
    PS_TRY(ref_scratch(call, call->out[0].numel, &dw));
    PS_TRY(ref_scratch(call, O, &db));
    multiply(left.shape[0], right->shape[1], N, a, b, dw);
    for (int64_t i = 0; i < N * O; i++) db[i % O] += d[i];
    ref_put(&call->out[0], dw, attrs->accumulate);
    ref_put(&call->out[1], db, attrs->add_b);
    return 0;
}

int ref_mlp(ps_call *call)
{
    const ps_attrs_mlp *attrs = call->attrs;
    const ps_view *out = &call->out[0], *x_view = &call->in[0];
    int64_t rows = ref_last(x_view) > 0 ? rows_of(x_view) : rows_of(out);
    int64_t H = call->in[1].shape[attrs->out_in ? 0 : 1];
    double *x, *h, *residual, *y;
    PS_TRY(ref_dense(call, x_view, &x));
    PS_TRY(ref_dense(call, &call->in[5], &residual));
    PS_TRY(product(call, x, rows, &call->in[1], attrs->out_in, &call->in[2], &h));
    ref_put(&call->out[1], h, false);
    for (int64_t i = 0; i < rows * H; i++) h[i] = ref_gelu_tanh(h[i]);
    PS_TRY(product(call, h, rows, &call->in[3], attrs->out_in, &call->in[4], &y));
    for (int64_t i = 0; residual && i < out->numel; i++) y[i] += residual[i];
    ref_put(out, y, false);
    return 0;
}

int ref_linear_gelu_backward(ps_call *call)
{
    const ps_attrs_linear_gelu_backward *attrs = call->attrs;
    const ps_view *out = &call->out[0], none = { .ndim = -1 };
    int64_t H = ref_last(out);
    double *dy, *pre, *d, *db;
    PS_TRY(ref_dense(call, &call->in[0], &dy));
    PS_TRY(ref_dense(call, &call->in[2], &pre));
    PS_TRY(product(call, dy, rows_of(out), &call->in[1], !attrs->out_in, &none, &d));
    PS_TRY(ref_scratch(call, H, &db));
    for (int64_t i = 0; i < out->numel; i++) {
        d[i] *= ref_gelu_tanh_slope(pre[i]);
        db[i % H] += d[i];
    }
    ref_put(out, d, false);
    ref_put(&call->out[1], db, attrs->add_b);
    return 0;
}
