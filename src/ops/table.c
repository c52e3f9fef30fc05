/* SPDX-License-Identifier: BSD-3-Clause
 * Embeddings, gather and scatter: shapes and gradients. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_embedding(ps_infer *f);
int infer_embedding_backward(ps_infer *f);
int infer_gather(ps_infer *f);
int infer_scatter_add(ps_infer *f);
int grad_embedding(ps_grad *g);
int grad_gather(ps_grad *g);
int grad_scatter_add(ps_grad *g);

static int check_index(const ps_infer *f, const ps_tensor *index)
{
    return index->dtype_ == PS_I32 || index->dtype_ == PS_I64 ? 0 : ps_rule_fail(f, "indices must be int32 or int64");
}

/* w has `rows` rows of a table of `total` (0: all of it) from `first` on; those behind its end are padding. */
static int check_part(const ps_infer *f, int64_t first, int64_t total, int64_t rows)
{
    if (first >= 0 && total >= 0 && first <= INT64_MAX - rows && (total > 0 || first == 0)) return 0;
    return ps_rule_fail(f, "rows from %lld on of a table of %lld", (long long)first, (long long)total);
}

int infer_embedding(ps_infer *f)
{
    const ps_tensor *w = f->in[0], *index = f->in[1];
    PS_TRY(check_index(f, index));
    if (w->ndim != 2) return ps_rule_fail(f, "w must be [V, C]");
    if (index->ndim + 1 > PS_MAX_DIMS) return ps_rule_fail(f, "too many dimensions");
    const ps_attrs_embedding *at = f->attrs;
    PS_TRY(check_part(f, at->first, at->total, w->shape_[0]));
    int64_t rows = at->total > 0 ? at->total : w->shape_[0];
    if (at->padding_idx < -1 || at->padding_idx >= rows)
        return ps_rule_fail(f, "padding_idx %lld is no row of w [%lld, %lld]", (long long)at->padding_idx,
                            (long long)rows, (long long)w->shape_[1]);
    f->out[0] = ps_meta_like(index);
    f->out[0].dtype = w->dtype_;
    f->out[0].shape[f->out[0].ndim++] = w->shape_[1];
    return 0;
}

int infer_embedding_backward(ps_infer *f)
{
    ps_attrs_embedding_backward *at = f->attrs;
    const ps_tensor *index = f->in[0], *dy = f->in[1];
    PS_TRY(check_index(f, index));
    if (dy->ndim != index->ndim + 1 || memcmp(dy->shape_, index->shape_, sizeof(int64_t) * (size_t)index->ndim) ||
        !ps_dtype_is_float(dy->dtype_))
        return ps_rule_fail(f, "dy must be float [..., C] over the indices");
    if (at->rows < 0 || at->dtype < 0 || at->dtype >= PS_DTYPE_COUNT || !ps_dtype_is_float(at->dtype))
        return ps_rule_fail(f, "rows = %lld, dtype = %d", (long long)at->rows, at->dtype);
    PS_TRY(check_part(f, at->first, at->total, at->rows));
    if (!f->given) at->accumulate = 0;
    f->out[0] = (ps_meta){ .dtype = at->dtype, .ndim = 2, .shape = { at->rows, dy->shape_[dy->ndim - 1] } };
    return 0;
}

int grad_embedding(ps_grad *g)
{
    const ps_meta *w = ps_grad_in_meta(g, 0);
    const ps_attrs_embedding *at = g->attrs;
    ps_attrs_embedding_backward attrs = { .rows = w->shape[0], .dtype = w->dtype, .padding_idx = at->padding_idx,
                                          .first = at->first, .total = at->total };
    ps_tensor *index, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 1, &index));
    PS_TRY(ps_grad_dest(g, 0, &all[0], &attrs.accumulate));
    PS_TRY(ps_run(g, PS_OP_embedding_backward, &attrs, all, 2, index, g->dout[0]));
    if (!attrs.accumulate) ps_grad_give(g, 0, all[0]);
    return 0;
}

static int check_coordinates(ps_infer *f, int32_t *dim)
{
    const ps_tensor *x = f->in[0], *index = f->in[1];
    PS_TRY(check_index(f, index));
    PS_TRY(ps_rule_dim(f, x->ndim, dim));
    bool fits = x->ndim == index->ndim;
    for (int i = 0; fits && i < x->ndim; i++) fits = i == *dim || index->shape_[i] <= x->shape_[i];
    return fits ? 0 : ps_rule_fail(f, "the index must have x's dimensions and, but for dim, sizes within x's");
}

int infer_gather(ps_infer *f)
{
    PS_TRY(check_coordinates(f, &((ps_attrs_gather *)f->attrs)->dim));
    f->out[0] = ps_meta_like(f->in[1]);
    f->out[0].dtype = f->in[0]->dtype_;
    return 0;
}

int infer_scatter_add(ps_infer *f)
{
    PS_TRY(check_coordinates(f, &((ps_attrs_scatter_add *)f->attrs)->dim));
    if (!ps_same_shape(f->in[1], f->in[2]) || f->in[0]->dtype_ != f->in[2]->dtype_)
        return ps_rule_fail(f, "src must have the index's shape and x's type");
    f->out[0] = ps_meta_like(f->in[0]);
    return 0;
}

int grad_gather(ps_grad *g)
{
    ps_tensor *index, *zeros, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 1, &index));
    PS_TRY(ps_filled(g, &zeros, index->device_, ps_grad_in_meta(g, 0), 0));
    PS_TRY(ps_run(g, PS_OP_scatter_add, g->attrs, all, 3, zeros, index, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int grad_scatter_add(ps_grad *g)
{
    ps_tensor *index, *all[PS_MAX_OUT] = { NULL };
    if (ps_grad_wants(g, 0)) ps_grad_give(g, 0, g->dout[0]);
    if (!ps_grad_wants(g, 2)) return 0;
    PS_TRY(ps_grad_in(g, 1, &index));
    PS_TRY(ps_run(g, PS_OP_gather, g->attrs, all, 2, g->dout[0], index));
    ps_grad_give(g, 2, all[0]);
    return 0;
}
