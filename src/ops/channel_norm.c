/* SPDX-License-Identifier: BSD-3-Clause
 * Batch norm (Ioffe and Szegedy 2015) and group norm (Wu and He 2018): shapes and gradients. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_channel_norm(ps_infer *f);
int infer_channel_norm_backward(ps_infer *f);
int grad_channel_norm(ps_grad *g);

/* Sets *stats to the type and the shape of a statistic. The shape is [C] for batch norm and [N, groups] for group
 * norm. */
static int stats_of(const ps_infer *f, const ps_tensor *x, int groups, const ps_tensor *w, const ps_tensor *b,
                    ps_meta *stats)
{
    if (x->ndim < 2 || !ps_dtype_is_float(x->dtype_) || x->shape_[1] < 1)
        return ps_rule_fail(f, "x must be a float tensor [N, C, ...]");
    int64_t C = x->shape_[1];
    if (groups < 0 || (groups > 0 && C % groups != 0))
        return ps_rule_fail(f, "%lld channels cannot be divided into %d groups", (long long)C, groups);
    for (int i = 0; i < 2; i++) {
        const ps_tensor *t = i ? b : w;
        if (t && (t->ndim != 1 || t->shape_[0] != C || !ps_dtype_is_float(t->dtype_)))
            return ps_rule_fail(f, "%s must be float [%lld]", i ? "b" : "w", (long long)C);
    }
    *stats = (ps_meta){ .dtype = x->dtype_ == PS_F64 ? PS_F64 : PS_F32, .ndim = groups ? 2 : 1,
                        .shape = { groups ? x->shape_[0] : C, groups } };
    return 0;
}

int infer_channel_norm(ps_infer *f)
{
    const ps_attrs_channel_norm *a = f->attrs;
    const ps_tensor *x = f->in[0], *mean = f->in[3], *var = f->in[4];
    ps_meta stats;
    PS_TRY(stats_of(f, x, a->groups, f->in[1], f->in[2], &stats));
    if (!mean != !var || (mean && a->groups))
        return ps_rule_fail(f, "mean and var must be passed together, and only with groups = 0");
    if (mean) PS_TRY(ps_rule_like(f, mean, "the given mean", stats.dtype, 1, stats.shape));
    if (mean) PS_TRY(ps_rule_like(f, var, "the given variance", stats.dtype, 1, stats.shape));
    int64_t count = x->numel_ / x->shape_[1];                 /* for batch norm: number of elements of x per channel */
    if (!mean && !a->groups && count < 1) return ps_rule_fail(f, "there are no values of which to compute the mean");
    f->out[0] = ps_meta_like(x);
    f->out[1] = f->out[2] = stats;
    if (mean) f->out[1].ndim = f->out[2].ndim = -1;
    return 0;
}

int infer_channel_norm_backward(ps_infer *f)
{
    const ps_attrs_channel_norm_backward *a = f->attrs;
    const ps_tensor *x = f->in[1], *w = f->in[2];
    ps_meta stats;
    PS_TRY(stats_of(f, x, a->groups, w, NULL, &stats));
    PS_TRY(ps_rule_like(f, f->in[0], "dy", x->dtype_, x->ndim, x->shape_));
    for (int i = 3; i < 5; i++) PS_TRY(ps_rule_like(f, f->in[i], "a statistic", stats.dtype, stats.ndim, stats.shape));
    f->out[0] = ps_meta_like(x);
    if (!a->want_x) f->out[0].ndim = -1;
    f->out[1] = (ps_meta){ .dtype = w ? w->dtype_ : x->dtype_, .ndim = a->want_w ? 1 : -1, .shape = { x->shape_[1] } };
    f->out[2] = f->out[1];
    return 0;
}

int grad_channel_norm(ps_grad *g)
{
    const ps_attrs_channel_norm *at = g->attrs;
    ps_tensor *x, *w, *mean, *var, *all[PS_MAX_OUT] = { NULL };
    if (!g->dout[0] || g->dout[1] || g->dout[2])
        return ps_fail(PS_EUNSUP, "channel_norm: the mean and variance have no gradients; detach them");
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_grad_in(g, 1, &w));
    PS_TRY(ps_grad_in(g, 3, &mean));
    PS_TRY(ps_grad_in(g, 4, &var));
    ps_attrs_channel_norm_backward attrs = { .eps = at->eps, .groups = at->groups, .given = mean != NULL };
    attrs.want_x = ps_grad_wants(g, 0);
    attrs.want_w = ps_grad_wants(g, 1) || ps_grad_wants(g, 2);
    if (!mean) PS_TRY(ps_grad_out(g, 1, &mean));
    if (!var) PS_TRY(ps_grad_out(g, 2, &var));
    if (ps_grad_wants(g, 3) || ps_grad_wants(g, 4))
        return ps_fail(PS_EUNSUP, "channel_norm: the given mean and variance have no gradients; detach them");
    PS_TRY(ps_run(g, PS_OP_channel_norm_backward, &attrs, all, 5, g->dout[0], x, w, mean, var));
    if (ps_grad_wants(g, 0)) ps_grad_give(g, 0, all[0]);
    if (ps_grad_wants(g, 1)) ps_grad_give(g, 1, all[1]);
    if (ps_grad_wants(g, 2)) ps_grad_give(g, 2, all[2]);
    return 0;
}
