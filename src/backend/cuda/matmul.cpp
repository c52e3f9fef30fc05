/* SPDX-License-Identifier: BSD-3-Clause
 * The ops matmul, linear, mlp, lm_loss and their gradients. Operands can have any strides, and are passed to gemm.cu as
 * matrices. The leading dimensions of an operand are merged if its strides allow it. Otherwise the operand is first
 * copied to contiguous workspace. */
#include <string.h>
#include "backend/cuda/cuda.h"
#include "backend/dims.h"

/* Makes v contiguous by copying it to workspace. */
static int pack_view(ps_call *call, ps_view *v)
{
    ps_view from = *v;
    v->data = call->scratch(call, (size_t)(v->numel * ps_dtype_bytes(v->dtype)));
    if (!v->data) return PS_ENOMEM;
    int64_t stride = 1;
    for (int d = v->ndim - 1; d >= 0; stride *= v->shape[d--]) v->stride[d] = stride;
    return ps_cuda_copy(v, &from);
}

static ps_cu_mat matrix(void *data, int dtype, int64_t rows, int64_t cols, int64_t stride_row, int64_t stride_col)
{
    ps_cu_mat m = { data, dtype, rows, cols, stride_row, stride_col };
    return m;
}
static ps_cu_mat turned(const ps_cu_mat &m)
{
    return matrix(m.data, m.dtype, m.cols, m.rows, m.stride_col, m.stride_row);
}

/* Describes v [..., cols] as the matrix [rows, cols]. If the strides of v do not allow this, v is copied first. */
static int rows_matrix(ps_call *call, const ps_view *given, ps_cu_mat *out)
{
    ps_view v = *given;
    int64_t rows = product(v.shape, v.ndim - 1), cols = v.shape[v.ndim - 1], stride;
    if (ps_cu_is_rows(&v, &stride)) {
        *out = matrix(v.data, v.dtype, rows, cols, stride, v.stride[v.ndim - 1]);
        return 0;
    }
    PS_TRY(pack_view(call, &v));
    *out = matrix(v.data, v.dtype, rows, cols, cols, 1);
    return 0;
}

/* -- linear -------------------------------------------------------------------------------------------------------- */
/* Describes the product y = x w, without bias and residual. If out_in is set, w is [O, I]. */
static int product_of(ps_call *call, const ps_view *x, const ps_view *w, bool out_in, const ps_view *y, ps_cu_gemm *g)
{
    int64_t O = ps_cu_last(y);
    memset(g, 0, sizeof *g);
    g->batch = 1;
    if (x->numel == 0) {                             /* the sums of products have no terms, so the strides do not
                                                      * matter */
        g->a = matrix(x->data, x->dtype, y->numel / O, 0, 1, 1);
        g->b = matrix(w->data, w->dtype, 0, O, 1, 1);
    } else {
        PS_TRY(rows_matrix(call, x, &g->a));
        PS_TRY(rows_matrix(call, w, &g->b));
        if (out_in) g->b = turned(g->b);
    }
    g->dst = matrix(y->data, y->dtype, y->numel / O, O, O, 1);
    return 0;
}

static int add_bias(ps_call *call, const ps_view *given, ps_cu_gemm *g)
{
    ps_view b = *given;
    if (!ps_has(&b)) return 0;
    if (b.shape[0] != 1 && b.stride[0] != 1) PS_TRY(pack_view(call, &b));
    g->bias = b.data;
    g->bias_dtype = b.dtype;
    return 0;
}

static int add_residual(ps_call *call, const ps_view *given, ps_cu_gemm *g)
{
    ps_view r = *given;
    int64_t O = g->dst.cols;
    if (!ps_has(&r)) return 0;
    if (!ps_cu_is_residual(&r, g->dst.rows, O, &g->ld_residual)) {
        PS_TRY(pack_view(call, &r));
        g->ld_residual = O;
    }
    g->residual = r.data;
    return 0;
}

static int linear(ps_call *call)
{
    const ps_attrs_linear *attrs = (const ps_attrs_linear *)call->attrs;
    ps_cu_gemm g;
    if (call->out[0].numel == 0) return 0;
    PS_TRY(product_of(call, &call->in[0], &call->in[1], attrs->out_in, &call->out[0], &g));
    PS_TRY(add_bias(call, &call->in[2], &g));
    PS_TRY(add_residual(call, &call->in[3], &g));
    return ps_cuda_gemm(call, &g);
}

/* -- products that compute more in the same pass, if cuBLASLt supports it ------------------------------------------ */
/* Runs the kernel of another op as part of this op. */
static int run_part(ps_call *call, int op, const void *attrs, int n_in, const ps_view *in, ps_view *out)
{
    ps_call part = *call;
    part.op = op, part.attrs = attrs, part.n_in = n_in, part.in = in, part.n_out = 1, part.out = out;
    return ps_cuda_kernel(op)(&part);
}

/* Sets db to the sum of d's rows. With `add`, adds the sum to db. */
static int sum_rows(ps_call *call, const ps_view *d, ps_view *db, bool add)
{
    ps_view rows = *d;
    rows.ndim = 2;
    rows.shape[1] = ps_cu_last(d), rows.shape[0] = d->numel / rows.shape[1];
    if (d->ndim != 2) rows.stride[1] = 1, rows.stride[0] = rows.shape[1];
    ps_attrs_sum attrs = { 1, 0, add };
    return run_part(call, PS_OP_sum, &attrs, 1, &rows, db);
}

/* Returns whether a product can write the vector db directly. It can if `add` is false and db has the type of
 * `result`. */
static bool may_write(const ps_view *db, bool add, const ps_view *result) { return !add && db->dtype == result->dtype; }

static int linear_grad(ps_call *call)
{
    const ps_attrs_linear_grad *a = (const ps_attrs_linear_grad *)call->attrs;
    const ps_view *x = &call->in[0], *dy = &call->in[1], *dw = &call->out[0];
    ps_view *db = &call->out[1];
    bool done = false;
    if (db->numel == 0) return 0;
    if (x->numel == 0) {                             /* x has no rows or no columns */
        if (dw->numel > 0 && !a->accumulate)
            PS_TRY(ps_cuda_clear(dw->data, (size_t)(dw->numel * ps_dtype_bytes(dw->dtype))));
    } else {
        ps_cu_gemm g;
        memset(&g, 0, sizeof g);
        g.batch = 1;
        g.accumulate = a->accumulate != 0;
        PS_TRY(rows_matrix(call, a->out_in ? dy : x, &g.a));
        PS_TRY(rows_matrix(call, a->out_in ? x : dy, &g.b));
        g.a = turned(g.a);
        g.dst = matrix(dw->data, dw->dtype, dw->shape[0], dw->shape[1], dw->shape[1], 1);
        g.also = a->out_in ? PS_CU_SUM_A : PS_CU_SUM_B;
        g.sums = db->data;
        if (may_write(db, a->add_b, dw)) PS_TRY(ps_cuda_gemm_fused(call, &g, &done));
        if (!done) PS_TRY(ps_cuda_gemm(call, &g));
    }
    if (done) return 0;
    if (dy->numel > 0) return sum_rows(call, dy, db, a->add_b);
    return a->add_b ? 0 : ps_cuda_clear(db->data, (size_t)(db->numel * ps_dtype_bytes(db->dtype)));
}

/* Allocates workspace for a tensor that has the shape of v except for the last dimension, whose size is `last`. */
static int room_like(ps_call *call, const ps_view *v, int64_t last, ps_view *out)
{
    *out = *v;
    out->shape[v->ndim - 1] = last;
    out->numel = 1;
    for (int d = v->ndim - 1; d >= 0; d--) {
        out->stride[d] = out->numel;
        out->numel *= out->shape[d];
    }
    out->data = call->scratch(call, (size_t)(out->numel * ps_dtype_bytes(v->dtype)));
    return out->data ? 0 : PS_ENOMEM;
}

static int mlp(ps_call *call)
{
    const ps_attrs_mlp *a = (const ps_attrs_mlp *)call->attrs;
    const ps_view *in = call->in, *y = &call->out[0];
    ps_view h, pre = call->out[1];
    ps_cu_gemm g;
    bool done = false;
    if (y->numel == 0 && (!ps_has(&pre) || pre.numel == 0)) return 0;
    PS_TRY(room_like(call, &in[0], in[1].shape[a->out_in ? 0 : 1], &h));
    if (h.numel > 0) {
        PS_TRY(product_of(call, &in[0], &in[1], a->out_in, &h, &g));
        PS_TRY(add_bias(call, &in[2], &g));
        g.also = PS_CU_GELU;
        g.pre = ps_has(&pre) ? pre.data : NULL;
        PS_TRY(ps_cuda_gemm_fused(call, &g, &done));
    }
    if (h.numel > 0 && !done) {
        ps_attrs_gelu gelu = { 1 };
        ps_view *before = ps_has(&pre) ? &pre : &h;          /* the input of GELU is computed in h if there is no output
                                                              * `pre` */
        g.dst.data = before->data;
        PS_TRY(ps_cuda_gemm(call, &g));
        PS_TRY(run_part(call, PS_OP_gelu, &gelu, 1, before, &h));
    }
    if (y->numel == 0) return 0;
    PS_TRY(product_of(call, &h, &in[3], a->out_in, y, &g));
    PS_TRY(add_bias(call, &in[4], &g));
    PS_TRY(add_residual(call, &in[5], &g));
    return ps_cuda_gemm(call, &g);
}

/* Returns whether ps_cuda_gelu_slope_sums supports the operands d and pre. */
static bool sums_beside_slope(const ps_view *pre, const ps_view *d)
{
    int64_t cols = ps_cu_last(d), each = ps_dtype_bytes(d->dtype), stride;
    bool lies_alike = ps_cu_is_rows(pre, &stride) && stride == cols && pre->stride[pre->ndim - 1] == 1;
    return d->dtype <= PS_F16 && pre->dtype == d->dtype && lies_alike && cols * each % 16 == 0 && cols >= 64 &&
           d->numel > 32 * cols && ((uintptr_t)d->data | (uintptr_t)pre->data) % 16 == 0;
}

/* Computes the product and the gradient of GELU in two passes. cuBLASLt has an epilogue that computes both in one pass
 * (DGELU). On an H200, a product with this epilogue takes more than twice as long as two passes, and its tanh has an
 * error of 2e-5 in fp32. */
static int linear_gelu_backward(ps_call *call)
{
    const ps_attrs_linear_gelu_backward *a = (const ps_attrs_linear_gelu_backward *)call->attrs;
    ps_view *d = &call->out[0], *db = &call->out[1];
    if (ps_cu_last(d) == 0) return 0;
    if (d->numel > 0) {
        ps_attrs_gelu_backward gelu = { 1 };
        ps_view both[2] = { call->in[2], *d };
        ps_cu_gemm g;
        PS_TRY(product_of(call, &call->in[0], &call->in[1], !a->out_in, d, &g));
        PS_TRY(ps_cuda_gemm(call, &g));
        if (ps_has(db) && sums_beside_slope(&both[0], d))
            return ps_cuda_gelu_slope_sums(call, &both[0], d, db, a->add_b);
        PS_TRY(run_part(call, PS_OP_gelu_backward, &gelu, 2, both, d));
    }
    if (!ps_has(db)) return 0;
    if (d->numel > 0) return sum_rows(call, d, db, a->add_b);
    return a->add_b ? 0 : ps_cuda_clear(db->data, (size_t)(db->numel * ps_dtype_bytes(db->dtype)));
}

/* -- matmul -------------------------------------------------------------------------------------------------------- */
static ps_cu_mat last_two(const ps_view *v)
{
    int r = v->ndim - 2, c = v->ndim - 1;
    return matrix(v->data, v->dtype, v->shape[r], v->shape[c], v->stride[r], v->stride[c]);
}

static int operand(ps_call *call, ps_view *v, ps_cu_mat *out)
{
    *out = last_two(v);
    if (ps_cu_has_lines(out->rows, out->cols, out->stride_row, out->stride_col)) return 0;
    PS_TRY(pack_view(call, v));
    *out = last_two(v);
    return 0;
}

/* If all products of the batch have the same b, replaces them by one product of the rows of all batches. */
static bool merge_rows(ps_cu_gemm *g, const batch_dims *bd)
{
    if (bd->ndim != 1 || bd->step[1][0] != 0 || g->a.stride_col != 1) return false;
    int64_t n = bd->n[0], row_a = g->a.rows == 1 ? bd->step[0][0] : g->a.stride_row;
    if (bd->step[0][0] != row_a * g->a.rows || row_a < g->a.cols) return false;
    g->a.rows *= n, g->dst.rows *= n;
    g->a.stride_row = row_a, g->dst.stride_row = g->dst.cols;
    return true;
}

/* y is contiguous, because dispatch allocated it. */
static int matmul(ps_call *call)
{
    ps_view va = call->in[0], vb = call->in[1];
    const ps_view *y = &call->out[0], *all[3] = { &va, &vb, y };
    if (y->numel == 0) return 0;
    ps_cu_gemm g;
    memset(&g, 0, sizeof g);
    g.batch = 1;
    g.accumulate = ((const ps_attrs_matmul *)call->attrs)->accumulate != 0;
    g.dst = last_two(y);
    if (va.numel == 0) {
        g.a = matrix(va.data, va.dtype, va.shape[va.ndim - 2], 0, 1, 1);
        g.b = matrix(vb.data, vb.dtype, 0, vb.shape[vb.ndim - 1], 1, 1);
    } else {
        PS_TRY(operand(call, &va, &g.a));
        PS_TRY(operand(call, &vb, &g.b));
    }
    batch_dims bd = batch_of(all);
    if (va.numel == 0) memset(bd.step[0], 0, sizeof bd.step[0]), memset(bd.step[1], 0, sizeof bd.step[1]);
    else if (merge_rows(&g, &bd)) bd.ndim = 0;
    int in = bd.ndim - 1;                                    /* cuBLASLt iterates over the innermost dimension of the
                                                              * batch */
    int64_t loops = 1;
    if (bd.ndim > 0) {
        g.batch = bd.n[in];
        g.step_a = bd.step[0][in], g.step_b = bd.step[1][in], g.step_dst = bd.step[2][in];
        loops = product(bd.n, in);
    }
    for (int64_t i = 0; i < loops; i++) {
        ps_cu_gemm one = g;
        int64_t rest = i, offset[3] = { 0, 0, 0 };
        for (int d = in - 1; d >= 0; d--) {
            for (int t = 0; t < 3; t++) offset[t] += rest % bd.n[d] * bd.step[t][d];
            rest /= bd.n[d];
        }
        one.a.data = (char *)g.a.data + offset[0] * ps_dtype_bytes(g.a.dtype);
        one.b.data = (char *)g.b.data + offset[1] * ps_dtype_bytes(g.b.dtype);
        one.dst.data = (char *)g.dst.data + offset[2] * ps_dtype_bytes(g.dst.dtype);
        PS_TRY(ps_cuda_gemm(call, &one));
    }
    return 0;
}

/* -- lm_loss ------------------------------------------------------------------------------------------------------- */
/* One call of lm_loss. It computes logits = x w^T + bias, the cross entropy, dx, dw and db. It processes panels of
 * rows, so that only one panel of logits exists at a time. Logits are fp32. Their gradient has the type of x and its
 * own memory. dw is summed over all panels in fp32 and rounded once. db is rounded once per panel.
 *
 * Products are fast if each row begins at a multiple of 16 bytes and its length is a multiple of 16 bytes. So each row
 * of logits begins at a multiple of 64 elements. If the length of a row of logits in bytes is not a multiple of 16
 * (GPT-2's vocabulary has 50,257 entries), the row is padded. To pad it, w is copied and extended by rows of zeros. The
 * logits of the added rows are ignored and have no gradient. */
struct lm_problem {
    int64_t N, V, C;                                         /* x [N, C], w [V, C] */
    ps_cu_lm size;
    int dtype;
    bool want_dx, want_dw, want_db;
    void *logits, *grad, *loss, *w, *dw;                     /* w and dw are [wide, C]; dw contains the sum of the
                                                              * panels' dw */
    void *bias;                                              /* [wide], or NULL */
    long long *count;
    unsigned long long *hits;                                /* or NULL */
};

static void *at(const void *p, int64_t i, int dtype) { return (char *)(uintptr_t)p + i * ps_dtype_bytes(dtype); }

static int lm_room(ps_call *call, lm_problem *p)
{
    const ps_cu_lm *s = &p->size;
    p->count = (long long *)call->scratch(call, sizeof *p->count);
    p->loss = p->count ? call->scratch(call, (size_t)s->loss_nbytes) : NULL;
    p->logits = p->loss ? call->scratch(call, (size_t)s->logits_nbytes) : NULL;
    if (!p->logits) return PS_ENOMEM;
    p->grad = s->grad_nbytes > 0 ? call->scratch(call, (size_t)s->grad_nbytes) : p->logits;
    if (!p->grad) return PS_ENOMEM;
    p->dw = !p->want_dw ? NULL : s->dw_nbytes > 0 ? call->scratch(call, (size_t)s->dw_nbytes) : call->out[2].data;
    return p->want_dw && !p->dw && s->dw_nbytes > 0 ? PS_ENOMEM : 0;
}

/* Sets *to to the data of rows [V, C], or to a copy that is padded with zeros to `wide` rows. */
static int fill_up(ps_call *call, const lm_problem *p, const ps_view *rows, int64_t C, void **to)
{
    int64_t nbytes = p->V * C * ps_dtype_bytes(p->dtype), all = p->size.wide * C * ps_dtype_bytes(p->dtype);
    *to = rows->data;
    if (p->size.wide == p->V || p->N == 0) return 0;
    *to = call->scratch(call, (size_t)all);
    if (!*to) return PS_ENOMEM;
    PS_TRY(ps_cuda_move(*to, rows->data, (size_t)nbytes));
    return ps_cuda_clear((char *)*to + nbytes, (size_t)(all - nbytes));
}

/* Sets db to the sum of a panel's rows of dlogits. With `add`, adds the sum to db. */
static int add_db(ps_call *call, const lm_problem *p, int64_t rows, bool add)
{
    ps_view d;
    memset(&d, 0, sizeof d);
    d.data = p->grad, d.dtype = p->dtype, d.ndim = 2, d.numel = rows * p->V;
    d.shape[0] = rows, d.shape[1] = p->V, d.stride[0] = p->size.ld, d.stride[1] = 1;
    return sum_rows(call, &d, &call->out[3], add);
}

static int lm_panel(ps_call *call, const lm_problem *p, int64_t first, int64_t rows)
{
    const ps_attrs_lm_loss *a = (const ps_attrs_lm_loss *)call->attrs;
    const ps_view *x = &call->in[0], *target = &call->in[2], *dx = &call->out[1];
    ps_cu_gemm g;
    memset(&g, 0, sizeof g);
    g.batch = 1;
    g.a = matrix(at(x->data, first * p->C, p->dtype), p->dtype, rows, p->C, p->C, 1);
    g.b = matrix(p->w, p->dtype, p->C, p->size.wide, 1, p->C);
    g.dst = matrix(p->logits, p->size.logits_dtype, rows, p->size.wide, p->size.ld, 1);
    g.bias = p->bias, g.bias_dtype = p->dtype;
    PS_TRY(ps_cuda_gemm(call, &g));
    ps_cu_ce c;
    memset(&c, 0, sizeof c);
    c.logits = p->logits, c.dtype = p->size.logits_dtype, c.rows = rows, c.V = p->V;
    c.wide = p->size.wide, c.ld = p->size.ld;
    c.target = target->data, c.target_dtype = target->dtype, c.first = first, c.ignore = a->ignore_index;
    c.loss = p->loss;
    c.hits = p->hits;
    if (p->want_dx || p->want_dw || p->want_db) c.grad = p->grad, c.grad_dtype = p->dtype, c.scale = a->dloss;
    if (a->reduction == 1) c.count = p->count;
    PS_TRY(ps_cuda_ce_rows(&c));
    if (p->want_db) PS_TRY(add_db(call, p, rows, first > 0));
    if (p->want_dx) {
        memset(&g, 0, sizeof g);
        g.batch = 1;
        g.a = matrix(p->grad, p->dtype, rows, p->size.wide, p->size.ld, 1);
        g.b = matrix(p->w, p->dtype, p->size.wide, p->C, p->C, 1);
        g.dst = matrix(at(dx->data, first * p->C, dx->dtype), dx->dtype, rows, p->C, p->C, 1);
        PS_TRY(ps_cuda_gemm(call, &g));
    }
    if (!p->want_dw) return 0;
    memset(&g, 0, sizeof g);
    g.batch = 1;
    g.accumulate = first > 0;
    g.a = matrix(p->grad, p->dtype, p->size.wide, rows, 1, p->size.ld);
    g.b = matrix(at(x->data, first * p->C, p->dtype), p->dtype, rows, p->C, p->C, 1);
    g.dst = matrix(p->dw, p->size.dw_dtype, p->size.wide, p->C, p->C, 1);
    return ps_cuda_gemm(call, &g);
}

static int lm_loss(ps_call *call)
{
    const ps_attrs_lm_loss *a = (const ps_attrs_lm_loss *)call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1], *target = &call->in[2];
    const ps_view *bias = &call->in[3], *dw = &call->out[2], *db = &call->out[3];
    lm_problem p;
    memset(&p, 0, sizeof p);
    p.N = target->numel, p.V = w->shape[0], p.C = w->shape[1];
    p.dtype = x->dtype;
    if (p.V == 0) return ps_fail(PS_EINVAL, "the logits have no words to choose from");
    p.want_dx = (a->want_grad & 1) && ps_has(&call->out[1]) && p.N > 0;
    p.want_dw = (a->want_grad & 2) && ps_has(dw);
    p.want_db = (a->want_grad & 4) && ps_has(db);
    p.size = ps_cu_lm_sizes(&ps_cu->card, p.N, p.V, p.C, p.dtype, p.want_dw ? dw->dtype : -1,
                            p.want_dx || p.want_dw || p.want_db, ps_has(bias));
    PS_TRY(lm_room(call, &p));
    PS_TRY(fill_up(call, &p, w, p.C, &p.w));
    if (ps_has(bias)) PS_TRY(fill_up(call, &p, bias, 1, &p.bias));
    PS_TRY(ps_cuda_count_targets(call->op, target, p.V, a->ignore_index, p.count));
    PS_TRY(ps_cuda_begin_hits(&call->out[4], a->want_hits, p.count, &p.hits));
    if (p.want_dw && p.N == 0)
        PS_TRY(ps_cuda_clear(dw->data, (size_t)(dw->numel * ps_dtype_bytes(dw->dtype))));
    if (p.want_db && p.N == 0)
        PS_TRY(ps_cuda_clear(db->data, (size_t)(db->numel * ps_dtype_bytes(db->dtype))));
    for (int64_t first = 0; first < p.N; first += p.size.rows)
        PS_TRY(lm_panel(call, &p, first, p.N - first < p.size.rows ? p.N - first : p.size.rows));
    if (p.want_dw && p.N > 0 && p.dw != dw->data) {
        ps_view sum = *dw;
        sum.data = p.dw;
        sum.dtype = p.size.dw_dtype;
        PS_TRY(ps_cuda_copy(dw, &sum));
    }
    return ps_cuda_loss_total(p.loss, p.size.logits_dtype, p.N, a->reduction == 1 ? p.count : NULL, &call->out[0]);
}

void ps_cuda_fill_matmul(ps_kernel *k)
{
    k[PS_OP_matmul] = matmul;
    k[PS_OP_linear] = linear;
    k[PS_OP_lm_loss] = lm_loss;
    k[PS_OP_linear_grad] = linear_grad;
    k[PS_OP_mlp] = mlp;
    k[PS_OP_linear_gelu_backward] = linear_gelu_backward;
}
