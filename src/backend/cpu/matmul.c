/* SPDX-License-Identifier: BSD-3-Clause
 * The ops matmul and linear on the cpu. They accept operands with any strides, and pass them to onednn.c as matrices.
 * If the strides allow it, dimensions are merged, and a transposed matrix is passed without a copy. Otherwise the
 * operand is copied to workspace. The fallback computes all types other than fp32, bf16 and fp16. */
#include "backend/cpu/gemm.h"
#include "backend/dims.h"
#include "base/error.h"
#include <string.h>

static bool multiplies(const ps_view *v) { return v->dtype == PS_F32 || v->dtype == PS_BF16 || v->dtype == PS_F16; }

/* Returns true if oneDNN accepts the matrix. One of its strides must be 1, and its lines must not overlap. Adjusts the
 * stride of a dimension of size 1 if that makes the matrix acceptable. */
static bool is_plain(ps_mat *m)
{
    if (m->cols == 1 && m->stride_row >= 1) m->stride_col = 1;
    if (m->rows == 1 && m->stride_col >= 1) m->stride_row = m->stride_col == 1 ? m->cols : 1;
    if (m->rows == 1 && m->cols == 1) m->stride_row = m->stride_col = 1;
    return (m->stride_col == 1 && m->stride_row >= m->cols) || (m->stride_row == 1 && m->stride_col >= m->rows);
}

/* Copies v to dst in row-major order. */
static void pack(const ps_view *v, void *dst)
{
    int last = v->ndim - 1;
    int64_t size = ps_dtype_bytes(v->dtype), n = v->ndim ? v->shape[last] : 1, step = v->ndim ? v->stride[last] : 1;
    int64_t lines = n ? v->numel / n : 0;
#pragma omp parallel for schedule(static) if (v->numel > PS_PAR_MIN)
    for (int64_t line = 0; line < lines; line++) {
        int64_t rest = line, offset = 0;
        for (int d = last - 1; d >= 0; d--) {
            offset += rest % v->shape[d] * v->stride[d];
            rest /= v->shape[d];
        }
        const char *src = (const char *)v->data + offset * size;
        char *out = (char *)dst + line * n * size;
        if (step == 1) memcpy(out, src, (size_t)(n * size));
        else if (size == 4) for (int64_t i = 0; i < n; i++) memcpy(out + i * 4, src + i * step * 4, 4);
        else for (int64_t i = 0; i < n; i++) memcpy(out + i * 2, src + i * step * 2, 2);
    }
}

/* Copies the elements of v to workspace, where they are contiguous. */
static int pack_view(ps_call *call, ps_view *v)
{
    void *p = call->scratch(call, (size_t)(v->numel * ps_dtype_bytes(v->dtype)));
    if (!p) return PS_ENOMEM;
    if (!call->dry) pack(v, p);
    v->data = p;
    int64_t stride = 1;
    for (int d = v->ndim - 1; d >= 0; stride *= v->shape[d--]) v->stride[d] = stride;
    return 0;
}

/* Describes `given` [..., cols] as the matrix [rows, cols]. If the strides of `given` do not allow this, copies its
 * elements first. */
static int rows_matrix(ps_call *call, const ps_view *given, ps_mat *out)
{
    ps_view v = *given;
    for (int pass = 0; pass < 2; pass++) {
        int64_t stride;
        if (collapses(&v, v.ndim - 1, &stride)) {
            int64_t cols = v.shape[v.ndim - 1], rows = product(v.shape, v.ndim - 1);
            *out = (ps_mat){ v.data, v.dtype, rows, cols, stride, v.stride[v.ndim - 1] };
            if (is_plain(out)) return 0;
        }
        PS_TRY(pack_view(call, &v));
    }
    return ps_fail(PS_EUNSUP, "a matrix of these strides");
}

/* -- linear -------------------------------------------------------------------------------------------------------- */
static bool unit_last(const ps_view *v) { return v->shape[v->ndim - 1] == 1 || v->stride[v->ndim - 1] == 1; }

int ps_cpu_linear(ps_call *call)
{
    const struct ps_attrs_linear *attrs = call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2], *r = &call->in[3], *y = &call->out[0];
    if (!multiplies(x) || !multiplies(w) || !multiplies(y) || (ps_has(b) && !multiplies(b))) return PS_EUNSUP;
    int64_t ld = 0;
    if (!collapses(y, y->ndim - 1, &ld) || !unit_last(y)) return PS_EUNSUP;
    if (y->numel == 0) return 0;
    ps_gemm_space space = { .call = call };
    ps_gemm g = { .batch = 1, .bias_dtype = PS_F32 };
    if (x->numel == 0) {                                     /* the sums have no terms, so the strides do not matter */
        g.a = (ps_mat){ x->data, x->dtype, product(x->shape, x->ndim - 1), 0, 1, 1 };
        g.b = (ps_mat){ w->data, w->dtype, 0, y->shape[y->ndim - 1], 1, 1 };
    } else {
        PS_TRY(rows_matrix(call, x, &g.a));
        PS_TRY(rows_matrix(call, w, &g.b));
        if (attrs->out_in)
            g.b = (ps_mat){ g.b.data, g.b.dtype, g.b.cols, g.b.rows, g.b.stride_col, g.b.stride_row };
    }
    g.dst = (ps_mat){ y->data, y->dtype, g.a.rows, g.b.cols, g.a.rows == 1 ? g.b.cols : ld, 1 };
    if (ps_has(b)) {
        ps_view v = *b;
        if (!unit_last(&v)) PS_TRY(pack_view(call, &v));
        g.bias = v.data;
        g.bias_dtype = v.dtype;
    }
    if (ps_has(r)) {
        ps_view v = *r;
        if (!unit_last(&v) || !collapses(&v, v.ndim - 1, &g.ld_residual)) {
            PS_TRY(pack_view(call, &v));
            g.ld_residual = v.shape[v.ndim - 1];
        }
        g.residual = v.data;
    }
    return ps_cpu_gemm_run(&space, &g);
}

/* -- matmul -------------------------------------------------------------------------------------------------------- */
static ps_mat last_two(const ps_view *v)
{
    int r = v->ndim - 2, c = v->ndim - 1;
    return (ps_mat){ v->data, v->dtype, v->shape[r], v->shape[c], v->stride[r], v->stride[c] };
}

static ps_mat turned(ps_mat m) { return (ps_mat){ m.data, m.dtype, m.cols, m.rows, m.stride_col, m.stride_row }; }

/* Describes v as matrices for oneDNN. If oneDNN cannot read v directly, makes v contiguous first. */
static int operand(ps_call *call, ps_view *v, ps_mat *out)
{
    *out = last_two(v);
    if (is_plain(out)) return 0;
    PS_TRY(pack_view(call, v));
    *out = last_two(v);
    return is_plain(out) ? 0 : ps_fail(PS_EUNSUP, "a matrix of these strides");
}

/* If all products of the batch use the same b, merges them into one product, whose `a` has the rows of all products. As
 * a result, b is packed only once. */
static bool merge_rows(ps_gemm *g, const batch_dims *bd)
{
    if (bd->ndim != 1 || bd->step[1][0] != 0 || g->a.stride_col != 1 || g->dst.stride_col != 1) return false;
    int64_t n = bd->n[0], row_a = g->a.rows == 1 ? bd->step[0][0] : g->a.stride_row;
    int64_t row_d = g->dst.rows == 1 ? bd->step[2][0] : g->dst.stride_row;
    if (bd->step[0][0] != row_a * g->a.rows || bd->step[2][0] != row_d * g->dst.rows) return false;
    if (row_a < g->a.cols || row_d < g->dst.cols) return false;
    g->a.rows *= n, g->dst.rows *= n;
    g->a.stride_row = row_a, g->dst.stride_row = row_d;
    return true;
}

int ps_cpu_matmul(ps_call *call)
{
    const struct ps_attrs_matmul *attrs = call->attrs;
    ps_view va = call->in[0], vb = call->in[1];
    const ps_view *y = &call->out[0], *all[3] = { &va, &vb, y };
    if (!multiplies(&va) || !multiplies(&vb) || !multiplies(y) || va.ndim < 2 || vb.ndim < 2) return PS_EUNSUP;
    if (y->numel == 0) return 0;
    ps_gemm_space space = { .call = call };
    ps_gemm g = { .batch = 1, .accumulate = attrs->accumulate };
    g.dst = last_two(y);
    if (!is_plain(&g.dst)) return PS_EUNSUP;
    bool turn = g.dst.stride_col != 1;                       /* compute y^T = b^T a^T, so that y is written by rows */
    if (va.numel == 0) {
        g.a = (ps_mat){ va.data, va.dtype, va.shape[va.ndim - 2], 0, 1, 1 };
        g.b = (ps_mat){ vb.data, vb.dtype, 0, vb.shape[vb.ndim - 1], 1, 1 };
    } else {
        PS_TRY(operand(call, &va, &g.a));
        PS_TRY(operand(call, &vb, &g.b));
    }
    batch_dims bd = batch_of(all);
    if (va.numel == 0) memset(bd.step[0], 0, sizeof bd.step[0]), memset(bd.step[1], 0, sizeof bd.step[1]);
    if (turn) {
        ps_mat a = g.a;
        g.a = turned(g.b), g.b = turned(a), g.dst = turned(g.dst);
    } else if (va.numel > 0 && merge_rows(&g, &bd)) {
        bd.ndim = 0;
    }
    int first = turn ? 1 : 0, in = bd.ndim - 1;              /* oneDNN iterates over the innermost batch dimension */
    int64_t loops = 1, size = ps_dtype_bytes(y->dtype);
    if (bd.ndim > 0) {
        g.batch = bd.n[in];
        g.step_a = bd.step[first][in], g.step_b = bd.step[!first][in], g.step_dst = bd.step[2][in];
        loops = product(bd.n, in);
    }
    for (int64_t i = 0; i < loops; i++) {
        ps_gemm one = g;
        int64_t rest = i, offset[3] = { 0 };
        for (int d = in - 1; d >= 0; d--) {
            for (int t = 0; t < 3; t++) offset[t] += rest % bd.n[d] * bd.step[t][d];
            rest /= bd.n[d];
        }
        one.a.data = (char *)g.a.data + offset[first] * ps_dtype_bytes(g.a.dtype);
        one.b.data = (char *)g.b.data + offset[!first] * ps_dtype_bytes(g.b.dtype);
        one.dst.data = (char *)g.dst.data + offset[2] * size;
        PS_TRY(ps_cpu_gemm_run(&space, &one));
    }
    return 0;
}
