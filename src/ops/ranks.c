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

typedef ps_attrs_all_reduce of_ranks;           /* all have the same attributes */

static bool gathers(int op)
{
    return op == PS_OP_all_gather || op == PS_OP_all_gather_again || op == PS_OP_gather_from_tp;
}

int infer_of_ranks(ps_infer *f)
{
    const of_ranks *at = f->attrs;
    ps_meta *y = &f->out[0];
    bool view = f->op == PS_OP_copy_to_tp || f->op == PS_OP_scatter_to_tp || f->op == PS_OP_counted_once;
    *y = view ? ps_tensor_meta(f->in[0]) : ps_meta_like(f->in[0]);
    if (at->size < 1 || at->rank < 0 || at->rank >= at->size || at->root < 0 || at->root >= at->size)
        return ps_rule_fail(f, "rank %d, root %d of a group of %d", at->rank, at->root, at->size);
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
