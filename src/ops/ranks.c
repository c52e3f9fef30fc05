/* SPDX-License-Identifier: BSD-3-Clause
 * Ops of several ranks: shapes and gradients. Of most every rank's loss counts: the gradient of x is that of
 * the sum of all ranks' losses, as each gives its own dy. The rows of tensor parallelism (..._tp) have one loss, which
 * all ranks compute alike (Shoeybi et al. 2019, "Megatron-LM"). */
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

typedef ps_attrs_all_reduce of_ranks;           /* all have these attributes; those with products have more */

static bool gathers(int op)
{
    return op == PS_OP_all_gather || op == PS_OP_all_gather_again || op == PS_OP_gather_from_tp;
}

int ps_rule_ranks(const ps_infer *f)
{
    const of_ranks *at = f->attrs;
    if (at->size >= 1 && at->rank >= 0 && at->rank < at->size && at->root >= 0 && at->root < at->size) return 0;
    return ps_rule_fail(f, "rank %d, root %d of a group of %d", at->rank, at->root, at->size);
}

int infer_of_ranks(ps_infer *f)
{
    const of_ranks *at = f->attrs;
    ps_meta *y = &f->out[0];
    bool view = f->op == PS_OP_copy_to_tp || f->op == PS_OP_scatter_to_tp || f->op == PS_OP_counted_once;
    *y = view ? ps_tensor_meta(f->in[0]) : ps_meta_like(f->in[0]);
    PS_TRY(ps_rule_ranks(f));
    bool gather = gathers(f->op), scatter = f->op == PS_OP_reduce_scatter || f->op == PS_OP_scatter_to_tp;
    if ((gather || scatter) && y->ndim == 0) return ps_rule_fail(f, "x has no dimension to be cut along");
    if (scatter && y->shape[0] % at->size)
        return ps_rule_fail(f, "the first dimension of x, %lld, cannot be cut into %d equal parts",
                            (long long)y->shape[0], at->size);
    if (gather && __builtin_mul_overflow(y->shape[0], at->size, &y->shape[0]))
        return ps_rule_fail(f, "x is too large to be gathered");
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

/* Only the root's x was used. */
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
/* The attributes with which column_linear and column_linear_grad begin are those of row_linear. */
typedef ps_attrs_row_linear with_product;

/* x [..., I] and w of one float type; *out: the outputs of w. */
static int check_product(const ps_infer *f, const ps_tensor *x, const ps_tensor *w, int64_t *out)
{
    const with_product *at = f->attrs;
    PS_TRY(ps_rule_ranks(f));
    if (at->pieces < 1 || at->pieces > PS_MAX_PIECES)
        return ps_rule_fail(f, "rows travel in 1 to %d pieces, not in %d", PS_MAX_PIECES, at->pieces);
    bool rows = x->ndim == 2 || (f->op == PS_OP_row_linear && x->ndim > 2);
    if (!rows || w->ndim != 2 || !ps_dtype_is_float(x->dtype_) || x->dtype_ != w->dtype_)
        return ps_rule_fail(f, "x [rows, I] and w with two dimensions, of one float type, are needed");
    int64_t in = w->shape_[at->out_in ? 1 : 0], features = x->shape_[x->ndim - 1];
    *out = w->shape_[at->out_in ? 0 : 1];
    if (features == in) return 0;
    return ps_rule_fail(f, "x has %lld features, w takes %lld (w is %s)", (long long)features, (long long)in,
                        at->out_in ? "[out, in]" : "[in, out]");
}

int infer_column_linear(ps_infer *f)
{
    ps_attrs_column_linear *at = f->attrs;
    const ps_tensor *x = f->in[0], *b = f->in[2];
    int64_t out, rows;
    PS_TRY(check_product(f, x, f->in[1], &out));
    if (b && (b->ndim != 1 || b->shape_[0] != out || !ps_dtype_is_float(b->dtype_)))
        return ps_rule_fail(f, "the bias must be float [%lld]", (long long)out);
    if (__builtin_mul_overflow(x->shape_[0], at->size, &rows)) return ps_rule_fail(f, "x is too large to be gathered");
    f->out[0] = (ps_meta){ .dtype = x->dtype_, .ndim = 2, .shape = { rows, out } };
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
    PS_TRY(check_product(f, x, f->in[1], &out));
    for (int d = 0; d < x->ndim - 1; d++) rows *= x->shape_[d];
    if (rows % at->size)
        return ps_rule_fail(f, "the rows of x, %lld, cannot be cut into %d equal parts", (long long)rows, at->size);
    f->out[0] = (ps_meta){ .dtype = x->dtype_, .ndim = 2, .shape = { rows / at->size, out } };
    return 0;
}

int infer_column_linear_grad(ps_infer *f)
{
    ps_attrs_column_linear_grad *at = f->attrs;
    const ps_tensor *x = f->in[0], *dy = f->in[1], *w = f->in[2], *full = f->in[3];
    int64_t out;
    PS_TRY(check_product(f, x, w, &out));
    int64_t all[2] = { x->shape_[0] * at->size, x->shape_[1] }, of_y[2] = { all[0], out };
    PS_TRY(ps_rule_like(f, dy, "dy", x->dtype_, 2, of_y));
    if (full) PS_TRY(ps_rule_like(f, full, "full", x->dtype_, 2, all));
    f->out[0] = ps_meta_like(x);
    f->out[1] = ps_meta_like(w);
    f->out[2] = (ps_meta){ .dtype = x->dtype_, .ndim = 1, .shape = { out } };
    if (!at->want_b) f->out[2].ndim = -1;
    if (!(f->given & 2)) at->accumulate = 0;
    if (!(f->given & 4)) at->add_b = 0;
    return 0;
}

/* All ranks' rows of t. */
static int gathered(ps_grad *g, ps_tensor **out, ps_tensor *t)
{
    const of_ranks *at = g->attrs;
    ps_attrs_all_gather attrs = { at->group, at->size, at->rank, at->root };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_all_gather, &attrs, all, 1, t));
    *out = all[0];
    return 0;
}

/* dx, dw and db at once: x is gathered, and rows of dx are added up, beside the products. */
static int give_all(ps_grad *g, ps_tensor *x, ps_tensor *w, ps_tensor *full)
{
    const with_product *at = g->attrs;
    ps_attrs_column_linear_grad attrs = { .group = at->group, .size = at->size, .rank = at->rank, .root = at->root,
                                          .out_in = at->out_in, .pieces = at->pieces,
                                          .want_b = ps_grad_wants(g, 2) };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_dest(g, 1, &all[1], &attrs.accumulate));
    if (attrs.want_b) PS_TRY(ps_grad_dest(g, 2, &all[2], &attrs.add_b));
    PS_TRY(ps_run(g, PS_OP_column_linear_grad, &attrs, all, 4, x, g->dout[0], w, full));
    ps_grad_give(g, 0, all[0]);
    if (!attrs.accumulate) ps_grad_give(g, 1, all[1]);
    if (attrs.want_b && !attrs.add_b) ps_grad_give(g, 2, all[2]);
    return 0;
}

/* dx = this rank's rows of the sum of all dy w^T, dw = full^T dy (or its transpose), db = the sum of dy over rows. */
int grad_column_linear(ps_grad *g)
{
    const ps_attrs_column_linear *at = g->attrs;
    bool wants_x = ps_grad_wants(g, 0), wants_w = ps_grad_wants(g, 1);
    ps_tensor *x = NULL, *w = NULL, *full = NULL, *dy = g->dout[0], *all[PS_MAX_OUT] = { NULL };
    if (wants_x) PS_TRY(ps_grad_in(g, 1, &w));
    if (wants_w && at->keep) PS_TRY(ps_grad_out(g, 1, &full));
    if (wants_w && (wants_x || !full)) PS_TRY(ps_grad_in(g, 0, &x));
    if (wants_x && wants_w) return give_all(g, x, w, full);
    if (wants_x) {
        ps_attrs_row_linear attrs = { at->group, at->size, at->rank, at->root, !at->out_in, at->pieces };
        PS_TRY(ps_run(g, PS_OP_row_linear, &attrs, all, 2, dy, w));
        ps_grad_give(g, 0, all[0]);
    }
    if (wants_w && !full) PS_TRY(gathered(g, &full, x));
    return ps_give_weights(g, 1, 2, at->out_in, full, dy);
}

/* With all ranks' rows of dy: dx = dy w^T, dw = x^T dy (or its transpose). */
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
        PS_TRY(ps_run(g, PS_OP_column_linear, &attrs, all, 3, dy, w, (ps_tensor *)NULL));
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
