/* SPDX-License-Identifier: BSD-3-Clause
 * Ops of several ranks: shapes and gradients. Every rank's loss counts: the gradient of x is that of the sum of all
 * ranks' losses, as each gives its own dy. */
#include "base/error.h"
#include "tensor/optable.h"

int infer_of_ranks(ps_infer *f);
int grad_all_reduce(ps_grad *g);
int grad_all_gather(ps_grad *g);
int grad_reduce_scatter(ps_grad *g);
int grad_broadcast(ps_grad *g);

typedef ps_attrs_all_reduce of_ranks;           /* all four have the same attributes */

int infer_of_ranks(ps_infer *f)
{
    const of_ranks *at = f->attrs;
    ps_meta *y = &f->out[0];
    *y = ps_meta_like(f->in[0]);
    if (at->size < 1 || at->rank < 0 || at->rank >= at->size || at->root < 0 || at->root >= at->size)
        return ps_rule_fail(f, "rank %d, root %d of a group of %d", at->rank, at->root, at->size);
    bool gather = f->op == PS_OP_all_gather, scatter = f->op == PS_OP_reduce_scatter;
    if ((gather || scatter) && y->ndim == 0) return ps_rule_fail(f, "x has no dimension to be cut along");
    if (scatter && y->shape[0] % at->size)
        return ps_rule_fail(f, "the first dimension of x, %lld, cannot be cut into %d equal parts",
                            (long long)y->shape[0], at->size);
    if (gather && __builtin_mul_overflow(y->shape[0], at->size, &y->shape[0]))
        return ps_rule_fail(f, "x is too large to be gathered");
    if (scatter) y->shape[0] /= at->size;
    ps_meta_set_contiguous(y);
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
