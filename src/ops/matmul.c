/* SPDX-License-Identifier: BSD-3-Clause
 * Matrix products: shapes and gradients. Gradients of weights are products of transposed views. If a weight already has
 * a gradient (from another use of the weight or an earlier micro-batch), the product is added directly to this
 * gradient. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_matmul(ps_infer *f);
int infer_linear(ps_infer *f);
int grad_matmul(ps_grad *g);
int grad_linear(ps_grad *g);
int infer_linear_grad(ps_infer *f);
int infer_mlp(ps_infer *f);
int infer_linear_gelu_backward(ps_infer *f);
int grad_mlp(ps_grad *g);

int infer_matmul(ps_infer *f)
{
    const ps_tensor *a = f->in[0], *b = f->in[1];
    if (a->ndim < 2 || b->ndim < 2)
        return ps_rule_fail(f, "both inputs must be matrices; add a dimension with :unsqueeze()");
    PS_TRY(ps_rule_one_type(f, a, "a", b, "b"));
    int64_t k = a->shape_[a->ndim - 1], k2 = b->shape_[b->ndim - 2];
    if (k != k2) return ps_rule_fail(f, "the inner sizes differ: %lld and %lld", (long long)k, (long long)k2);
    ps_tensor batch_a = { .ndim = a->ndim - 2 }, batch_b = { .ndim = b->ndim - 2 };
    memcpy(batch_a.shape_, a->shape_, sizeof a->shape_);
    memcpy(batch_b.shape_, b->shape_, sizeof b->shape_);
    ps_meta *m = &f->out[0];
    m->dtype = a->dtype_;
    PS_TRY(ps_rule_broadcast(f, &batch_a, &batch_b, m));
    if (m->ndim + 2 > PS_MAX_DIMS) return ps_rule_fail(f, "the inputs have too many dimensions");
    m->shape[m->ndim++] = a->shape_[a->ndim - 2];
    m->shape[m->ndim++] = b->shape_[b->ndim - 1];
    if (!f->given) ((ps_attrs_matmul *)f->attrs)->accumulate = 0;
    return 0;
}

static int transpose(ps_grad *g, ps_tensor **out, ps_tensor *t)
{
    ps_attrs_permute attrs;
    for (int i = 0; i < t->ndim; i++) attrs.axes[i] = i;
    attrs.axes[t->ndim - 1] = t->ndim - 2;
    attrs.axes[t->ndim - 2] = t->ndim - 1;
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_permute, &attrs, all, 1, t));
    *out = all[0];
    return 0;
}

/* Computes the gradient of input i, which is the product a b. If input i already has a gradient, the product is added
 * to it directly, unless this would need an additional pass. */
static int give_product(ps_grad *g, int i, ps_tensor *a, ps_tensor *b)
{
    const ps_meta *m = ps_grad_in_meta(g, i);
    ps_attrs_matmul attrs = { 0 };
    ps_tensor *all[PS_MAX_OUT] = { NULL }, *sum;
    if (m->ndim == a->ndim && a->ndim == b->ndim) PS_TRY(ps_grad_dest(g, i, &all[0], &attrs.accumulate));
    if (all[0] && m->ndim > 2) {                                /* the products of a broadcast batch must be summed
                                                                 * first */
        for (int d = 0; d < m->ndim - 2; d++)
            if (m->shape[d] != a->shape_[d] && m->shape[d] != b->shape_[d]) all[0] = NULL;
        if (!all[0]) attrs.accumulate = 0;
    }
    PS_TRY(ps_run(g, PS_OP_matmul, &attrs, all, 2, a, b));
    if (attrs.accumulate) return 0;
    PS_TRY(ps_sum_to(g, &sum, all[0], m));
    ps_grad_give(g, i, sum);
    return 0;
}

static int rows_of(ps_grad *g, ps_tensor **out, ps_tensor *t)
{
    int64_t shape[2] = { 1, t->shape_[t->ndim - 1] };
    for (int i = 0; i < t->ndim - 1; i++) shape[0] *= t->shape_[i];
    if (t->ndim == 2) {
        *out = t;
        return 0;
    }
    return ps_reshape_to(g, out, t, 2, shape);
}

/* Computes db if every matrix of a's batch is multiplied by the same matrix b. db is one product that sums over the
 * rows of the whole batch. With one product per matrix of the batch, bf16 and fp16 results would be rounded before they
 * are summed. */
static int give_of_rows(ps_grad *g, ps_tensor *a)
{
    const ps_meta *m = ps_grad_in_meta(g, 1);
    static const ps_attrs_matmul none;
    ps_tensor *x, *dy, *t, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(rows_of(g, &x, a));
    PS_TRY(rows_of(g, &dy, g->dout[0]));
    PS_TRY(transpose(g, &x, x));
    if (m->ndim == 2) return give_product(g, 1, x, dy);
    PS_TRY(ps_run(g, PS_OP_matmul, &none, all, 2, x, dy));
    PS_TRY(ps_reshape_to(g, &t, all[0], m->ndim, m->shape));
    ps_grad_give(g, 1, t);
    return 0;
}

/* Computes da in bf16 or fp16 if the same matrix a is multiplied by every matrix of b's batch. da is one product that
 * sums over the columns of the whole batch, for the same reason as in give_of_rows(). */
static int give_of_columns(ps_grad *g, ps_tensor *b)
{
    const ps_meta *m = ps_grad_in_meta(g, 0);
    static const ps_attrs_matmul none;
    static const ps_attrs_permute swap = { .axes = { 1, 0, 2 } };
    ps_tensor *x, *dy = g->dout[0], *t, *all[PS_MAX_OUT] = { NULL };
    int64_t M = dy->shape_[dy->ndim - 2], N = dy->shape_[dy->ndim - 1], n = 1;
    for (int d = 0; d < dy->ndim - 2; d++) n *= dy->shape_[d];
    PS_TRY(transpose(g, &t, b));
    PS_TRY(rows_of(g, &x, t));
    PS_TRY(ps_reshape_to(g, &dy, dy, 3, (int64_t[]) { n, M, N }));
    PS_TRY(ps_run(g, PS_OP_permute, &swap, all, 1, dy));
    PS_TRY(ps_reshape_to(g, &dy, all[0], 2, (int64_t[]) { M, n * N }));
    all[0] = NULL;
    PS_TRY(ps_run(g, PS_OP_matmul, &none, all, 2, dy, x));
    PS_TRY(ps_reshape_to(g, &t, all[0], m->ndim, m->shape));
    ps_grad_give(g, 0, t);
    return 0;
}

static int64_t matrices_of(const ps_meta *m)
{
    int64_t n = 1;
    for (int d = 0; d < m->ndim - 2; d++) n *= m->shape[d];
    return n;
}

/* da = dy b^T, db = a^T dy. */
int grad_matmul(ps_grad *g)
{
    const ps_meta *m = ps_grad_in_meta(g, 1);
    ps_tensor *a, *b, *t;
    if (ps_grad_wants(g, 0)) {
        bool half = m->dtype == PS_BF16 || m->dtype == PS_F16;
        PS_TRY(ps_grad_in(g, 1, &b));
        if (half && matrices_of(ps_grad_in_meta(g, 0)) == 1 && matrices_of(m) > 1) {
            PS_TRY(give_of_columns(g, b));
        } else {
            PS_TRY(transpose(g, &t, b));
            PS_TRY(give_product(g, 0, g->dout[0], t));
        }
    }
    if (!ps_grad_wants(g, 1)) return 0;
    PS_TRY(ps_grad_in(g, 0, &a));
    if (matrices_of(m) == 1 && a->ndim > 2 && a->ndim >= m->ndim) return give_of_rows(g, a);
    PS_TRY(transpose(g, &t, a));
    return give_product(g, 1, t, g->dout[0]);
}

int infer_linear(ps_infer *f)
{
    const ps_attrs_linear *at = f->attrs;
    const ps_tensor *x = f->in[0], *w = f->in[1], *b = f->in[2], *r = f->in[3];
    if (x->ndim < 1 || w->ndim != 2) return ps_rule_fail(f, "x must be [..., I], and w must have two dimensions");
    PS_TRY(ps_rule_one_type(f, x, "x", w, "w"));
    int64_t in = w->shape_[at->out_in ? 1 : 0], out = w->shape_[at->out_in ? 0 : 1];
    if (x->shape_[x->ndim - 1] != in)
        return ps_rule_fail(f, "x has %lld features, but w needs %lld (w is %s)", (long long)x->shape_[x->ndim - 1],
                            (long long)in, at->out_in ? "[out, in]" : "[in, out]");
    f->out[0] = ps_meta_like(x);
    f->out[0].shape[x->ndim - 1] = out;
    if (b && (b->ndim != 1 || b->shape_[0] != out || !ps_dtype_is_float(b->dtype_)))
        return ps_rule_fail(f, "the bias must be float [%lld]", (long long)out);
    if (r && (r->dtype_ != x->dtype_ || r->ndim != x->ndim ||
              memcmp(r->shape_, f->out[0].shape, sizeof(int64_t) * (size_t)r->ndim)))
        return ps_rule_fail(f, "the residual must have the output's shape and type");
    return 0;
}

int infer_linear_grad(ps_infer *f)
{
    ps_attrs_linear_grad *at = f->attrs;
    const ps_tensor *x = f->in[0], *dy = f->in[1];
    if (x->ndim != 2 || dy->ndim != 2 || x->shape_[0] != dy->shape_[0] || !ps_dtype_is_float(x->dtype_) ||
        x->dtype_ != dy->dtype_)
        return ps_rule_fail(f, "x must be [N, I] and dy [N, O], both of one float type");
    f->out[0] = (ps_meta){ .dtype = x->dtype_, .ndim = 2 };
    f->out[0].shape[at->out_in ? 1 : 0] = x->shape_[1];
    f->out[0].shape[at->out_in ? 0 : 1] = dy->shape_[1];
    f->out[1] = (ps_meta){ .dtype = dy->dtype_, .ndim = 1, .shape = { dy->shape_[1] } };
    if (!(f->given & 1)) at->accumulate = 0;
    if (!(f->given & 2)) at->add_b = 0;
    return 0;
}

int ps_give_weights(ps_grad *g, int iw, int ib, bool out_in, ps_tensor *x, ps_tensor *dy)
{
    bool wants_b = ib >= 0 && ps_grad_wants(g, ib);
    ps_attrs_linear_grad attrs = { .out_in = out_in };
    ps_tensor *x2, *dy2, *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, iw)) {
        PS_TRY(rows_of(g, &x2, x));
        PS_TRY(rows_of(g, &dy2, dy));
    }
    if (ps_grad_wants(g, iw) && wants_b && dy->ndim > 1) {
        PS_TRY(ps_grad_dest(g, iw, &all[0], &attrs.accumulate));
        PS_TRY(ps_grad_dest(g, ib, &all[1], &attrs.add_b));
        PS_TRY(ps_run(g, PS_OP_linear_grad, &attrs, all, 2, x2, dy2));
        if (!attrs.accumulate) ps_grad_give(g, iw, all[0]);
        if (!attrs.add_b) ps_grad_give(g, ib, all[1]);
        return 0;
    }
    if (ps_grad_wants(g, iw)) {
        ps_tensor *left = out_in ? dy2 : x2, *right = out_in ? x2 : dy2;
        PS_TRY(transpose(g, &left, left));
        PS_TRY(give_product(g, iw, left, right));
    }
    if (!wants_b) return 0;
    if (dy->ndim == 1) {
        ps_grad_give(g, ib, dy);
        return 0;
    }
    ps_attrs_sum sum = { .dims = (1u << (dy->ndim - 1)) - 1 };
    all[0] = NULL;
    PS_TRY(ps_grad_dest(g, ib, &all[0], &sum.accumulate));
    PS_TRY(ps_run(g, PS_OP_sum, &sum, all, 1, dy));
    if (!sum.accumulate) ps_grad_give(g, ib, all[0]);
    return 0;
}

/* dx = dy w^T. dw = x^T dy, or its transpose if w is [O, I]. db = the sum of dy over rows. dresidual = dy. */
int grad_linear(ps_grad *g)
{
    const ps_attrs_linear *at = g->attrs;
    ps_tensor *x = NULL, *w, *dy = g->dout[0], *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, 0)) {
        ps_attrs_linear attrs = { .out_in = !at->out_in };
        PS_TRY(ps_grad_in(g, 1, &w));
        PS_TRY(ps_run(g, PS_OP_linear, &attrs, all, 4, dy, w, (ps_tensor *)NULL, (ps_tensor *)NULL));
        ps_grad_give(g, 0, all[0]);
    }
    if (ps_grad_wants(g, 1)) PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_give_weights(g, 1, 2, at->out_in, x, dy));
    if (ps_grad_wants(g, 3)) ps_grad_give(g, 3, dy);
    return 0;
}

/* -- two products with a GELU between them ------------------------------------------------------------------------- */
static bool is_bias(const ps_tensor *b, int64_t n)
{
    return !b || (b->ndim == 1 && b->shape_[0] == n && ps_dtype_is_float(b->dtype_));
}

int infer_mlp(ps_infer *f)
{
    const ps_attrs_mlp *at = f->attrs;
    const ps_tensor *x = f->in[0], *w1 = f->in[1], *w2 = f->in[3], *r = f->in[5];
    if (x->ndim < 1 || w1->ndim != 2 || w2->ndim != 2)
        return ps_rule_fail(f, "x must be [..., C], and both weights must have two dimensions");
    PS_TRY(ps_rule_one_type(f, x, "x", w1, "w1"));
    PS_TRY(ps_rule_one_type(f, x, "x", w2, "w2"));
    int64_t C = w1->shape_[at->out_in ? 1 : 0], H = w1->shape_[at->out_in ? 0 : 1];
    int64_t H2 = w2->shape_[at->out_in ? 1 : 0], O = w2->shape_[at->out_in ? 0 : 1];
    if (x->shape_[x->ndim - 1] != C || H != H2)
        return ps_rule_fail(f, "x has %lld features; w1 needs %lld and returns %lld; w2 needs %lld",
                            (long long)x->shape_[x->ndim - 1], (long long)C, (long long)H, (long long)H2);
    if (!is_bias(f->in[2], H) || !is_bias(f->in[4], O))
        return ps_rule_fail(f, "the biases must be float [%lld] and [%lld]", (long long)H, (long long)O);
    f->out[0] = f->out[1] = ps_meta_like(x);
    f->out[0].shape[x->ndim - 1] = O;
    f->out[1].shape[x->ndim - 1] = H;
    if (r && (r->dtype_ != x->dtype_ || r->ndim != x->ndim ||
              memcmp(r->shape_, f->out[0].shape, sizeof(int64_t) * (size_t)r->ndim)))
        return ps_rule_fail(f, "the residual must have the output's shape and type");
    if (!f->needs) f->out[1].ndim = -1;
    return 0;
}

int infer_linear_gelu_backward(ps_infer *f)
{
    ps_attrs_linear_gelu_backward *at = f->attrs;
    const ps_tensor *dy = f->in[0], *w = f->in[1], *pre = f->in[2];
    bool fits = dy->ndim >= 1 && w->ndim == 2 && pre->ndim == dy->ndim && ps_dtype_is_float(dy->dtype_) &&
                w->dtype_ == dy->dtype_ && pre->dtype_ == dy->dtype_ &&
                !memcmp(dy->shape_, pre->shape_, sizeof(int64_t) * (size_t)(dy->ndim - 1));
    if (!fits || dy->shape_[dy->ndim - 1] != w->shape_[at->out_in ? 0 : 1] ||
        pre->shape_[dy->ndim - 1] != w->shape_[at->out_in ? 1 : 0])
        return ps_rule_fail(f, "dy must be [..., O], w %s and pre [..., H], all of one float type",
                            at->out_in ? "[O, H]" : "[H, O]");
    f->out[0] = ps_meta_like(pre);
    f->out[1] = (ps_meta){ .dtype = pre->dtype_, .ndim = 1, .shape = { pre->shape_[pre->ndim - 1] } };
    if (!at->want_b) f->out[1].ndim = -1;
    if (!(f->given & 2)) at->add_b = 0;
    return 0;
}

/* h = gelu(pre) is computed again. Then:
 *   dw2 = h^T dy
 *   dpre = (dy w2^T) * gelu'(pre)
 *   dw1 = x^T dpre
 *   dx = dpre w1^T */
int grad_mlp(ps_grad *g)
{
    const ps_attrs_mlp *at = g->attrs;
    ps_tensor *x = NULL, *w, *pre, *h = NULL, *dy = g->dout[0], *dpre = ps_grad_kept(g), *all[PS_MAX_OUT] = { NULL };
    bool wants_1 = ps_grad_wants(g, 1), wants_b1 = ps_grad_wants_ever(g, 2) && dy->ndim > 1;
    PS_TRY(ps_grad_out(g, 1, &pre));
    if (ps_grad_wants(g, 3)) {
        ps_attrs_gelu attrs = { .tanh = 1 };
        PS_TRY(ps_run(g, PS_OP_gelu, &attrs, all, 1, pre));
        h = all[0];
        all[0] = NULL;
    }
    PS_TRY(ps_give_weights(g, 3, 4, at->out_in, h, dy));
    if (ps_grad_wants(g, 5)) ps_grad_give(g, 5, dy);
    if (!ps_grad_wants(g, 0) && !wants_1 && !ps_grad_wants(g, 2)) return 0;
    if (!dpre) {                                       /* dpre is computed together with the gradient of b1, even if the
                                                        * latter is needed only later */
        ps_attrs_linear_gelu_backward back = { .out_in = at->out_in, .want_b = wants_b1 };
        PS_TRY(ps_grad_in(g, 3, &w));
        if (wants_b1) PS_TRY(ps_grad_dest(g, 2, &all[1], &back.add_b));
        PS_TRY(ps_run(g, PS_OP_linear_gelu_backward, &back, all, 3, dy, w, pre));
        if (wants_b1 && !back.add_b) ps_grad_give(g, 2, all[1]);
        dpre = all[0];
        PS_TRY(ps_grad_keep(g, dpre));
    }
    if (ps_grad_wants(g, 2) && !wants_b1) ps_grad_give(g, 2, dpre);
    if (wants_1) {
        PS_TRY(ps_grad_in(g, 0, &x));
        PS_TRY(ps_give_weights(g, 1, -1, at->out_in, x, dpre));
    }
    if (!ps_grad_wants(g, 0)) return 0;
    ps_attrs_linear attrs = { .out_in = !at->out_in };
    all[0] = all[1] = NULL;
    PS_TRY(ps_grad_in(g, 1, &w));
    PS_TRY(ps_run(g, PS_OP_linear, &attrs, all, 4, dpre, w, (ps_tensor *)NULL, (ps_tensor *)NULL));
    ps_grad_give(g, 0, all[0]);
    return 0;
}
