/* SPDX-License-Identifier: BSD-3-Clause
 * Embeddings, gather, scatter and searches: shapes and gradients. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_embedding(ps_infer *f);
int infer_embedding_backward(ps_infer *f);
int infer_flat_index(ps_infer *f);
int infer_gather(ps_infer *f);
int infer_scatter_add(ps_infer *f);
int infer_scatter_(ps_infer *f);
int infer_scatter(ps_infer *f);
int infer_scatter_backward(ps_infer *f);
int infer_scatter_reduce(ps_infer *f);
int infer_searchsorted(ps_infer *f);
int infer_masked_scatter(ps_infer *f);
int infer_unfold(ps_infer *f);
int infer_unfold_backward(ps_infer *f);
int grad_embedding(ps_grad *g);
int grad_gather(ps_grad *g);
int grad_scatter_add(ps_grad *g);
int grad_scatter(ps_grad *g);
int grad_unfold(ps_grad *g);
int grad_scatter_reduce(ps_grad *g);

static int check_index(const ps_infer *f, const ps_tensor *index)
{
    return index->dtype_ == PS_I32 || index->dtype_ == PS_I64 ? 0 : ps_rule_fail(f, "indices must be int32 or int64");
}

/* Checks the shard of an embedding. w contains `rows` rows of the embedding, starting at row `first`. total: number of
 * rows of the embedding; 0 if w is the whole embedding. Rows of w after the end of the embedding are padding. */
static int check_part(const ps_infer *f, int64_t first, int64_t total, int64_t rows)
{
    if (first >= 0 && total >= 0 && first <= INT64_MAX - rows && (total > 0 || first == 0)) return 0;
    return ps_rule_fail(f, "there are no rows from %lld on in an embedding of %lld rows", (long long)first,
                        (long long)total);
}

int infer_embedding(ps_infer *f)
{
    const ps_tensor *w = f->in[0], *index = f->in[1];
    PS_TRY(check_index(f, index));
    if (w->ndim != 2) return ps_rule_fail(f, "w must be [V, C]");
    if (index->ndim + 1 > PS_MAX_DIMS) return ps_rule_fail(f, "the index and w have too many dimensions");
    const ps_attrs_embedding *at = f->attrs;
    PS_TRY(check_part(f, at->first, at->total, w->shape_[0]));
    int64_t rows = at->total > 0 ? at->total : w->shape_[0];
    if (at->padding_idx < -1 || at->padding_idx >= rows)
        return ps_rule_fail(f, "padding_idx %lld is not a row of w [%lld, %lld]", (long long)at->padding_idx,
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
        return ps_rule_fail(f, "dy must be a float tensor [..., C] with the shape of the indices");
    if (at->rows < 0 || at->dtype < 0 || at->dtype >= PS_DTYPE_COUNT || !ps_dtype_is_float(at->dtype))
        return ps_rule_fail(f, "rows is %lld and dtype is %d; rows must be 0 or more, and dtype must be a float type",
                            (long long)at->rows, at->dtype);
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

int infer_flat_index(ps_infer *f)
{
    const ps_attrs_flat_index *at = f->attrs;
    if (f->n_in > PS_MAX_DIMS)
        return ps_rule_fail(f, "%d indices were passed; at most %d are supported", f->n_in, PS_MAX_DIMS);
    ps_meta m = { .dtype = PS_I64 };
    for (int i = 0; i < f->n_in; i++) {
        int dtype = f->in[i]->dtype_;
        if (dtype != PS_I32 && dtype != PS_I64 && dtype != PS_U8)
            return ps_rule_fail(f, "an index has type %s; it must have an integer type", ps_dtype_name(dtype));
        if (at->size[i] < 0) return ps_rule_fail(f, "size %lld", (long long)at->size[i]);
        ps_tensor so_far = { .ndim = m.ndim };
        memcpy(so_far.shape_, m.shape, sizeof m.shape);
        PS_TRY(ps_rule_broadcast(f, &so_far, f->in[i], &m));
    }
    f->out[0] = m;
    return 0;
}

/* Returns the shape of the elements that `index` selects in x. The shape begins with the shape of index. If x has more
 * dimensions than index, the remaining dimensions of x follow. */
static ps_meta picked_of(const ps_tensor *x, const ps_tensor *index)
{
    ps_meta m = ps_meta_like(index);
    for (m.dtype = x->dtype_; m.ndim < x->ndim; m.ndim++) m.shape[m.ndim] = x->shape_[m.ndim];
    return m;
}

static int check_coordinates(ps_infer *f, int32_t *dim)
{
    const ps_tensor *x = f->in[0], *index = f->in[1];
    PS_TRY(check_index(f, index));
    PS_TRY(ps_rule_dim(f, x->ndim, dim));
    bool fits = x->ndim == index->ndim || index->ndim == *dim + 1;
    for (int i = 0; fits && i < index->ndim; i++) fits = i == *dim || index->shape_[i] <= x->shape_[i];
    return fits ? 0 : ps_rule_fail(f, "the index must have x's dimensions, or those up to dim, and sizes within x's "
                                   "except along dim");
}

int infer_gather(ps_infer *f)
{
    PS_TRY(check_coordinates(f, &((ps_attrs_gather *)f->attrs)->dim));
    f->out[0] = picked_of(f->in[0], f->in[1]);
    return 0;
}

/* Checks an op that scatters. The attributes of all such ops begin with `dim`. */
static int check_scatter(ps_infer *f)
{
    PS_TRY(check_coordinates(f, &((ps_attrs_scatter *)f->attrs)->dim));
    ps_meta m = picked_of(f->in[0], f->in[1]);
    const ps_tensor *src = f->in[2];
    if (src->ndim != m.ndim || memcmp(src->shape_, m.shape, sizeof(int64_t) * (size_t)m.ndim))
        return ps_rule_fail(f, "src must have the shape of the elements that the index selects");
    return m.dtype == src->dtype_ ? 0 : ps_rule_fail(f, "src must have x's type");
}

int infer_scatter_(ps_infer *f) { return check_scatter(f); }

int infer_scatter(ps_infer *f)
{
    PS_TRY(check_scatter(f));
    f->out[0] = ps_meta_like(f->in[0]);
    return 0;
}

int infer_scatter_add(ps_infer *f) { return infer_scatter(f); }

int infer_scatter_reduce(ps_infer *f)
{
    const ps_attrs_scatter_reduce *at = f->attrs;
    if (at->reduce < 0 || at->reduce > 2) return ps_rule_fail(f, "reduce is %d; it must be 0, 1 or 2", at->reduce);
    if (at->reduce == 2 && f->needs) return ps_rule_fail(f, "the product has no gradient; compute it in ps.no_grad");
    return infer_scatter(f);
}

int infer_scatter_backward(ps_infer *f)
{
    PS_TRY(check_coordinates(f, &((ps_attrs_scatter_backward *)f->attrs)->dim));
    f->out[0] = ps_meta_like(f->in[0]);
    f->out[1] = picked_of(f->in[0], f->in[1]);
    return 0;
}

int infer_searchsorted(ps_infer *f)
{
    const ps_tensor *seq = f->in[0], *values = f->in[1];
    if (seq->ndim == 0) return ps_rule_fail(f, "the sorted sequence has no dimension");
    bool fits = seq->ndim == 1 || seq->ndim == values->ndim;
    for (int i = 0; fits && i < seq->ndim - 1; i++) fits = seq->shape_[i] == values->shape_[i];
    if (!fits) return ps_rule_fail(f, "all sizes of the sequence and the values except the last must be equal");
    f->out[0] = ps_meta_like(values);
    f->out[0].dtype = PS_I64;
    return 0;
}

int infer_masked_scatter(ps_infer *f)
{
    const ps_tensor *x = f->in[0];
    PS_TRY(ps_rule_like(f, f->in[1], "mask", PS_BOOL, x->ndim, x->shape_));
    if (f->in[2]->dtype_ != x->dtype_) return ps_rule_fail(f, "x and src must have one type");
    f->out[0] = ps_meta_like(x);
    return 0;
}

int infer_unfold(ps_infer *f)
{
    ps_attrs_unfold *at = f->attrs;
    const ps_tensor *x = f->in[0];
    PS_TRY(ps_rule_dim(f, x->ndim, &at->dim));
    if (x->ndim == PS_MAX_DIMS) return ps_rule_fail(f, "x already has %d dimensions", PS_MAX_DIMS);
    int64_t n = x->shape_[at->dim];
    if (at->size < 1 || at->size > n || at->step < 1)
        return ps_rule_fail(f, "the size must be from 1 to %lld, the size of dimension %d, and the step at least 1",
                            (long long)n, at->dim);
    f->out[0] = ps_meta_like(x);
    f->out[0].shape[at->dim] = (n - at->size) / at->step + 1;
    f->out[0].shape[f->out[0].ndim++] = at->size;
    return 0;
}

int infer_unfold_backward(ps_infer *f)
{
    ps_attrs_unfold_backward *at = f->attrs;
    const ps_tensor *dy = f->in[0];
    if (dy->ndim < 2 || !ps_dtype_is_float(dy->dtype_))
        return ps_rule_fail(f, "dy must be a float tensor of at least two dimensions");
    PS_TRY(ps_rule_dim(f, dy->ndim - 1, &at->dim));
    if (at->size < 1 || at->step < 1 || at->n < at->size || dy->shape_[dy->ndim - 1] != at->size ||
        dy->shape_[at->dim] != (at->n - at->size) / at->step + 1)
        return ps_rule_fail(f, "dy does not have the shape of the windows");
    f->out[0] = ps_meta_like(dy);
    f->out[0].ndim--;
    f->out[0].shape[at->dim] = at->n;
    return 0;
}

int grad_unfold(ps_grad *g)
{
    const ps_attrs_unfold *at = g->attrs;
    ps_attrs_unfold_backward attrs = { .dim = at->dim, .size = at->size, .step = at->step,
                                       .n = ps_grad_in_meta(g, 0)->shape[at->dim] };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_unfold_backward, &attrs, all, 1, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
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

static int gathered(ps_grad *g, int32_t dim, ps_tensor **out, ps_tensor *x, ps_tensor *index)
{
    ps_attrs_gather attrs = { .dim = dim };
    ps_tensor *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_run(g, PS_OP_gather, &attrs, all, 2, x, index));
    *out = all[0];
    return 0;
}

int grad_scatter_add(ps_grad *g)
{
    ps_tensor *index, *dsrc;
    if (ps_grad_wants(g, 0)) ps_grad_give(g, 0, g->dout[0]);
    if (!ps_grad_wants(g, 2)) return 0;
    PS_TRY(ps_grad_in(g, 1, &index));
    PS_TRY(gathered(g, ((const ps_attrs_scatter_add *)g->attrs)->dim, &dsrc, g->dout[0], index));
    ps_grad_give(g, 2, dsrc);
    return 0;
}

int grad_scatter(ps_grad *g)
{
    ps_tensor *index, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 1, &index));
    PS_TRY(ps_run(g, PS_OP_scatter_backward, g->attrs, all, 2, g->dout[0], index));
    if (ps_grad_wants(g, 0)) ps_grad_give(g, 0, all[0]);
    if (ps_grad_wants(g, 2)) ps_grad_give(g, 2, all[1]);
    return 0;
}

/* If several elements of x and src equal a result, the result's gradient is divided equally among them, as in
 * PyTorch. */
int grad_scatter_reduce(ps_grad *g)
{
    const ps_attrs_scatter_reduce *at = g->attrs;
    ps_attrs_scatter_add along = { .dim = at->dim };
    int dtype = ps_grad_in_meta(g, 0)->dtype;
    ps_tensor *x, *index, *src, *y, *at_src, *share, *is_x, *is_src, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_grad_in(g, 1, &index));
    PS_TRY(ps_grad_in(g, 2, &src));
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_run1(g, PS_OP_eq, &is_x, x, y));
    PS_TRY(ps_cast(g, &is_x, is_x, dtype));
    PS_TRY(gathered(g, at->dim, &at_src, y, index));
    PS_TRY(ps_run1(g, PS_OP_eq, &is_src, src, at_src));
    PS_TRY(ps_cast(g, &is_src, is_src, dtype));
    PS_TRY(ps_run(g, PS_OP_scatter_add, &along, all, 3, is_x, index, is_src));
    PS_TRY(ps_run1(g, PS_OP_div, &share, g->dout[0], all[0]));
    if (ps_grad_wants(g, 0)) {
        PS_TRY(ps_run1(g, PS_OP_mul, &is_x, is_x, share));
        ps_grad_give(g, 0, is_x);
    }
    if (!ps_grad_wants(g, 2)) return 0;
    PS_TRY(gathered(g, at->dim, &share, share, index));
    PS_TRY(ps_run1(g, PS_OP_mul, &is_src, is_src, share));
    ps_grad_give(g, 2, is_src);
    return 0;
}
