/* SPDX-License-Identifier: BSD-3-Clause
 * Ops of several ranks: shapes and gradients. For most of these ops, every rank has its own loss and its own dy. The
 * gradient of x is then the gradient of the sum of all ranks' losses. For the ops of tensor parallelism (..._tp), there
 * is one loss, and all ranks compute it identically (Shoeybi et al. 2019, "Megatron-LM"). */
#include "base/error.h"
#include "tensor/optable.h"

int infer_of_ranks(ps_infer *f);
int grad_all_reduce(ps_grad *g);
int grad_all_gather(ps_grad *g);
int grad_reduce_scatter(ps_grad *g);
int grad_broadcast(ps_grad *g);
int grad_copy_to_tp(ps_grad *g);
int grad_scatter_to_tp(ps_grad *g);
int grad_gather_from_tp(ps_grad *g);
int grad_counted_once(ps_grad *g);
int infer_column_linear(ps_infer *f);
int infer_row_linear(ps_infer *f);
int infer_column_linear_grad(ps_infer *f);
int grad_column_linear(ps_grad *g);
int grad_row_linear(ps_grad *g);

typedef ps_attrs_all_reduce of_ranks;           /* the attributes that all ops here have in common; ops with products
                                                 * have additional attributes */

static bool gathers(int op)
{
    return op == PS_OP_all_gather || op == PS_OP_all_gather_again || op == PS_OP_gather_from_tp;
}

int ps_rule_ranks(const ps_infer *f)
{
    const of_ranks *at = f->attrs;
    if (at->size >= 1 && at->rank >= 0 && at->rank < at->size && at->root >= 0 && at->root < at->size) return 0;
    return ps_rule_fail(f, "rank %d or root %d does not exist in a group of %d ranks", at->rank, at->root, at->size);
}

int infer_of_ranks(ps_infer *f)
{
    const of_ranks *at = f->attrs;
    ps_meta *y = &f->out[0];
    bool view = f->op == PS_OP_copy_to_tp || f->op == PS_OP_scatter_to_tp || f->op == PS_OP_counted_once;
    *y = view ? ps_tensor_meta(f->in[0]) : ps_meta_like(f->in[0]);
    PS_TRY(ps_rule_ranks(f));
    bool gather = gathers(f->op), scatter = f->op == PS_OP_reduce_scatter || f->op == PS_OP_scatter_to_tp;
    if ((gather || scatter) && y->ndim == 0) return ps_rule_fail(f, "x has no dimension along which it could be split");
    if (scatter && y->shape[0] % at->size)
        return ps_rule_fail(f, "the first dimension of x, %lld, cannot be cut into %d equal parts",
                            (long long)y->shape[0], at->size);
    if (gather && __builtin_mul_overflow(y->shape[0], at->size, &y->shape[0]))
        return ps_rule_fail(f, "x is too large to gather: the gathered size overflows 64 bits");
    if (scatter) y->shape[0] /= at->size;
    if (f->op == PS_OP_scatter_to_tp) y->offset += at->rank * y->shape[0] * y->stride[0];
    if (!view) ps_meta_set_contiguous(y);
    return 0;
}

static int give_op(ps_grad *g, int op)
{
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, op, g->attrs, all, 1, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int grad_all_reduce(ps_grad *g) { return give_op(g, PS_OP_all_reduce); }
int grad_all_gather(ps_grad *g) { return give_op(g, PS_OP_reduce_scatter); }
int grad_reduce_scatter(ps_grad *g) { return give_op(g, PS_OP_all_gather); }
int grad_copy_to_tp(ps_grad *g) { return give_op(g, PS_OP_all_reduce); }
int grad_scatter_to_tp(ps_grad *g) { return give_op(g, PS_OP_gather_from_tp); }
int grad_gather_from_tp(ps_grad *g) { return give_op(g, PS_OP_scatter_to_tp); }

int grad_counted_once(ps_grad *g)
{
    ps_tensor *dx = g->dout[0];
    if (((const of_ranks *)g->attrs)->rank > 0)
        PS_TRY(ps_filled(g, &dx, g->dout[0]->device_, ps_grad_in_meta(g, 0), 0));
    ps_grad_give(g, 0, dx);
    return 0;
}

/* Forward used only the root's x, so only the root's x gets a gradient. */
int grad_broadcast(ps_grad *g)
{
    const of_ranks *at = g->attrs;
    ps_tensor *all[PS_MAX_OUT] = { NULL }, *zeros[PS_MAX_OUT] = { NULL };
    ps_attrs_fill_ zero = { 0 };
    PS_TRY(ps_run(g, PS_OP_all_reduce, g->attrs, all, 1, g->dout[0]));
    if (at->rank != at->root) PS_TRY(ps_run(g, PS_OP_fill_, &zero, zeros, 1, all[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

/* -- products with exchanges --------------------------------------------------------------------------------------- */
/* The attributes of column_linear and column_linear_grad begin with the attributes of row_linear. */
typedef ps_attrs_row_linear with_product;

/* Checks x [..., I] and w. x and w must have the same float type. w is [I, O], or [O, I] if out_in is set. Sets *out to
 * O. */
static int check_product(const ps_infer *f, const ps_tensor *x, const ps_tensor *w, bool out_in, int64_t *out)
{
    const with_product *at = f->attrs;
    PS_TRY(ps_rule_ranks(f));
    if (at->pieces < 1 || at->pieces > PS_MAX_PIECES)
        return ps_rule_fail(f, "rows can be exchanged in 1 to %d pieces, not in %d", PS_MAX_PIECES, at->pieces);
    bool rows = x->ndim == 2 || (f->op == PS_OP_row_linear && x->ndim > 2);
    if (!rows || w->ndim != 2) return ps_rule_fail(f, "x must be [rows, I], and w must have two dimensions");
    PS_TRY(ps_rule_one_type(f, x, "x", w, "w"));
    int64_t in = w->shape_[out_in ? 1 : 0], features = x->shape_[x->ndim - 1];
    *out = w->shape_[out_in ? 0 : 1];
    if (features == in) return 0;
    return ps_rule_fail(f, "x has %lld features, but w needs %lld (w is %s)", (long long)features, (long long)in,
                        out_in ? "[out, in]" : "[in, out]");
}

int infer_column_linear(ps_infer *f)
{
    ps_attrs_column_linear *at = f->attrs;
    const ps_tensor *x = f->in[0];
    int64_t out, rows;
    PS_TRY(check_product(f, x, f->in[1], at->out_in, &out));
    if (__builtin_mul_overflow(x->shape_[0], at->size, &rows))
        return ps_rule_fail(f, "x is too large to gather: the gathered size overflows 64 bits");
    for (int i = 0; i < PS_MAX_COLUMNS; i++) {
        const ps_tensor *w = f->in[1 + 2 * i], *b = f->in[2 + 2 * i];
        ps_meta *y = &f->out[i ? 1 + i : 0];
        y->ndim = -1;
        if (!w && b) return ps_rule_fail(f, "a bias was passed without its weight");
        if (!w) continue;
        PS_TRY(check_product(f, x, w, at->out_in, &out));
        if (b && (b->ndim != 1 || b->shape_[0] != out || !ps_dtype_is_float(b->dtype_)))
            return ps_rule_fail(f, "the bias must be float [%lld]", (long long)out);
        *y = (ps_meta){ .dtype = x->dtype_, .ndim = 2, .shape = { rows, out } };
    }
    f->out[1] = (ps_meta){ .dtype = x->dtype_, .ndim = 2, .shape = { rows, x->shape_[1] } };
    int64_t nbytes = rows * x->shape_[1] * ps_dtype_bytes(x->dtype_);
    if (f->needs && nbytes < PS_CHEAP_MIN_NBYTES) at->keep = 1;
    if (!at->keep) f->out[1].ndim = -1;
    return 0;
}

int infer_row_linear(ps_infer *f)
{
    const ps_attrs_row_linear *at = f->attrs;
    const ps_tensor *x = f->in[0];
    int64_t out, rows = 1;
    PS_TRY(check_product(f, x, f->in[1], at->out_in, &out));
    for (int d = 0; d < x->ndim - 1; d++) rows *= x->shape_[d];
    if (rows % at->size)
        return ps_rule_fail(f, "the rows of x, %lld, cannot be cut into %d equal parts", (long long)rows, at->size);
    f->out[0] = (ps_meta){ .dtype = x->dtype_, .ndim = 2, .shape = { rows / at->size, out } };
    return 0;
}

int infer_column_linear_grad(ps_infer *f)
{
    ps_attrs_column_linear_grad *at = f->attrs;
    const ps_tensor *dy = f->in[0], *x = f->in[2], *full = f->in[3];
    int64_t in, rows = dy->ndim == 2 ? dy->shape_[0] : 0;
    PS_TRY(check_product(f, dy, f->in[1], !at->out_in, &in));
    if (rows % at->size)
        return ps_rule_fail(f, "the rows of dy, %lld, cannot be cut into %d equal parts", (long long)rows, at->size);
    int64_t all[2] = { rows, in }, own[2] = { rows / at->size, in };
    if (x) PS_TRY(ps_rule_like(f, x, "x", dy->dtype_, 2, own));
    if (full) PS_TRY(ps_rule_like(f, full, "full", dy->dtype_, 2, all));
    if (at->want_w && !x && !full) return ps_rule_fail(f, "gradients of weights need x or full");
    if (at->want_b & ~at->want_w)
        return ps_rule_fail(f, "the gradient of a bias can be computed only with that of its weight");
    f->out[0] = (ps_meta){ .dtype = dy->dtype_, .ndim = 2, .shape = { own[0], in } };
    for (int i = 0; i < PS_MAX_COLUMNS; i++) {
        const ps_tensor *d = f->in[i ? 2 + 2 * i : 0], *w = f->in[i ? 3 + 2 * i : 1];
        ps_meta *dw = &f->out[1 + 2 * i], *db = &f->out[2 + 2 * i];
        int64_t got;
        dw->ndim = db->ndim = -1;
        if (!d != !w) return ps_rule_fail(f, "each dy needs a weight, and each weight needs a dy");
        if (!d && ((at->want_w | at->want_b) >> i & 1)) return ps_rule_fail(f, "there is no weight %d", i);
        if (!d) continue;
        PS_TRY(check_product(f, d, w, !at->out_in, &got));
        if (got != in || d->shape_[0] != rows) return ps_rule_fail(f, "all products must have the same rows of x");
        if (at->want_w >> i & 1) *dw = ps_meta_like(w);
        if (at->want_b >> i & 1) *db = (ps_meta){ .dtype = dy->dtype_, .ndim = 1, .shape = { d->shape_[1] } };
        if (!(f->given >> (1 + 2 * i) & 1)) at->accumulate &= ~(1 << i);
        if (!(f->given >> (2 + 2 * i) & 1)) at->add_b &= ~(1 << i);
    }
    return 0;
}

/* Sets *out to the rows of all ranks' t. */
static int gathered(ps_grad *g, ps_tensor **out, ps_tensor *t)
{
    const of_ranks *at = g->attrs;
    ps_attrs_all_gather attrs = { at->group, at->size, at->rank, at->root };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_all_gather, &attrs, all, 1, t));
    *out = all[0];
    return 0;
}

/* The products of a call of column_linear. Products whose output has no gradient are left out. w and b contain the
 * input indices of each product's weight and bias. */
typedef struct products {
    int n, w[PS_MAX_COLUMNS], b[PS_MAX_COLUMNS];
    ps_tensor *dy[PS_MAX_COLUMNS];
} products;

/* Computes dx. While ranks exchange dx, also computes the dw and db that are needed. `full` contains the rows of x of
 * all ranks. If `full` is NULL, the op gathers these rows from x. */
static int give_all(ps_grad *g, const products *p, ps_tensor *x, ps_tensor *full)
{
    const with_product *at = g->attrs;
    ps_attrs_column_linear_grad attrs = { .group = at->group, .size = at->size, .rank = at->rank, .root = at->root,
                                          .out_in = at->out_in, .pieces = at->pieces };
    ps_tensor *all[PS_MAX_OUT] = { NULL }, *in[2 + 2 * PS_MAX_COLUMNS] = { NULL };
    in[2] = x, in[3] = full;
    for (int i = 0; i < p->n; i++) {
        int32_t adds = 0;
        in[i ? 2 + 2 * i : 0] = p->dy[i];
        PS_TRY(ps_grad_in(g, p->w[i], &in[i ? 3 + 2 * i : 1]));
        if (!ps_grad_wants(g, p->w[i])) continue;
        attrs.want_w |= 1 << i;
        PS_TRY(ps_grad_dest(g, p->w[i], &all[1 + 2 * i], &adds));
        attrs.accumulate |= adds << i;
        if (!ps_grad_wants(g, p->b[i])) continue;
        attrs.want_b |= 1 << i;
        PS_TRY(ps_grad_dest(g, p->b[i], &all[2 + 2 * i], &adds));
        attrs.add_b |= adds << i;
    }
    PS_TRY(ps_run_list(g, PS_OP_column_linear_grad, &attrs, all, 2 + 2 * PS_MAX_COLUMNS, in));
    ps_grad_give(g, 0, all[0]);
    for (int i = 0; i < p->n; i++) {
        bool given = attrs.want_w >> i & 1;
        if (!given) PS_TRY(ps_give_weights(g, p->w[i], p->b[i], at->out_in, NULL, p->dy[i]));
        if (given && !(attrs.accumulate >> i & 1)) ps_grad_give(g, p->w[i], all[1 + 2 * i]);
        if ((attrs.want_b & ~attrs.add_b) >> i & 1) ps_grad_give(g, p->b[i], all[2 + 2 * i]);
    }
    return 0;
}

/* Let s be the sum of dy w^T over all outputs and ranks. dx = this rank's rows of s. dw = full^T dy, or its transpose
 * if w is [O, I]. db = the sum of dy over rows. */
int grad_column_linear(ps_grad *g)
{
    const ps_attrs_column_linear *at = g->attrs;
    ps_tensor *x = NULL, *full = NULL;
    products p = { 0 };
    bool wants_w = false;
    for (int i = 0; i < PS_MAX_COLUMNS; i++) {
        ps_tensor *dy = g->dout[i ? 1 + i : 0];
        if (!dy) continue;
        p.w[p.n] = 1 + 2 * i, p.b[p.n] = 2 + 2 * i, p.dy[p.n++] = dy;
        wants_w = wants_w || ps_grad_wants(g, 1 + 2 * i);
    }
    if (wants_w && at->keep) PS_TRY(ps_grad_out(g, 1, &full));
    if (wants_w && !full) PS_TRY(ps_grad_in(g, 0, &x));
    if (ps_grad_wants(g, 0)) return give_all(g, &p, x, full);
    if (wants_w && !full) PS_TRY(gathered(g, &full, x));
    for (int i = 0; i < p.n; i++) PS_TRY(ps_give_weights(g, p.w[i], p.b[i], at->out_in, full, p.dy[i]));
    return 0;
}

/* dx = dy w^T. dw = x^T dy, or its transpose if w is [O, I]. dy contains the rows of all ranks. */
int grad_row_linear(ps_grad *g)
{
    const ps_attrs_row_linear *at = g->attrs;
    bool wants_w = ps_grad_wants(g, 1);
    ps_tensor *x = NULL, *w, *dy = g->dout[0], *full = ps_grad_kept(g), *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, 0)) {
        ps_attrs_column_linear attrs = { .group = at->group, .size = at->size, .rank = at->rank, .root = at->root,
                                         .out_in = !at->out_in, .pieces = at->pieces,
                                         .keep = ps_grad_wants_ever(g, 1) };
        PS_TRY(ps_grad_in(g, 1, &w));
        ps_tensor *in[1 + 2 * PS_MAX_COLUMNS] = { dy, w };
        PS_TRY(ps_run_list(g, PS_OP_column_linear, &attrs, all, 1 + 2 * PS_MAX_COLUMNS, in));
        const ps_meta *like = ps_grad_in_meta(g, 0);
        ps_tensor *dx = all[0];
        if (like->ndim != 2) PS_TRY(ps_reshape_to(g, &dx, dx, like->ndim, like->shape));
        ps_grad_give(g, 0, dx);
        full = all[1];
        if (full) PS_TRY(ps_grad_keep(g, full));
    }
    if (!wants_w) return 0;
    if (!full) PS_TRY(gathered(g, &full, dy));
    PS_TRY(ps_grad_in(g, 0, &x));
    return ps_give_weights(g, 1, -1, at->out_in, x, full);
}
