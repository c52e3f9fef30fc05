/* SPDX-License-Identifier: BSD-3-Clause
 * Rows and elements picked by index, sums back into them, and concatenation. Every index is checked before anything is
 * written; negative ones are errors. */
#include "ref.h"

int ref_check_index(const ps_view *index, int64_t n)
{
    for (int64_t i = 0; i < index->numel; i++) {
        int64_t k = ref_load_int(index, i);
        if (k < 0 || k >= n)
            return ps_fail(PS_ERANGE, "index %" PRId64 " at position %" PRId64 " is outside [0, %" PRId64 ")", k, i, n);
    }
    return 0;
}

/* The row of w [V, C] for an index: those of a table from `first` on. -1: another part of the table has it. */
static int64_t own_row(const ps_view *index, int64_t i, int64_t first, int64_t V)
{
    int64_t k = ref_load_int(index, i) - first;
    return k >= 0 && k < V ? k : -1;
}

int ref_embedding(ps_call *call)
{
    const ps_attrs_embedding *a = call->attrs;
    const ps_view *w = &call->in[0], *index = &call->in[1], *y = &call->out[0];
    int64_t V = w->shape[0], C = w->shape[1], nbytes = C * ps_dtype_bytes(w->dtype);
    PS_TRY(ref_check_index(index, a->total > 0 ? a->total : V));
    for (int64_t r = 0; r < index->numel; r++) {
        int64_t k = own_row(index, r, a->first, V);
        char *to = (char *)y->data + r * nbytes;
        if (k < 0) memset(to, 0, (size_t)nbytes);
        else memcpy(to, (const char *)w->data + k * nbytes, (size_t)nbytes);
    }
    return 0;
}

/* Positions are sorted by index first (a counting sort keeps their order), so that each row of dw is one sum in double
 * over the rows of dy in row order, rounded once. */
int ref_embedding_backward(ps_call *call)
{
    const ps_attrs_embedding_backward *a = call->attrs;
    const ps_view *index = &call->in[0], *dy = &call->in[1], *dw = &call->out[0];
    int64_t V = a->rows, n = index->numel, C = ref_last(dy);
    double *sum;
    PS_TRY(ref_check_index(index, a->total > 0 ? a->total : V));
    PS_TRY(ref_scratch(call, C, &sum));
    int64_t *begin = call->scratch(call, (size_t)(V + 1) * sizeof *begin);    /* of row v's positions in `order` */
    int64_t *order = call->scratch(call, (size_t)(n + 1) * sizeof *order);
    if (!begin || !order) return PS_ENOMEM;
    memset(begin, 0, (size_t)(V + 1) * sizeof *begin);
    for (int64_t r = 0; r < n; r++) {
        int64_t v = own_row(index, r, a->first, V);
        if (v >= 0) begin[v + 1]++;
    }
    for (int64_t v = 0; v < V; v++) begin[v + 1] += begin[v];
    for (int64_t r = 0; r < n; r++) {
        int64_t v = own_row(index, r, a->first, V);
        if (v >= 0) order[begin[v]++] = r;
    }
    /* Now begin[v] is the end of row v's positions. */
    for (int64_t v = 0, k = 0; v < V; v++) {
        memset(sum, 0, (size_t)C * sizeof *sum);
        for (; k < begin[v]; k++)
            for (int64_t c = 0; v + a->first != a->padding_idx && c < C; c++) sum[c] += ref_load(dy, order[k] * C + c);
        for (int64_t c = 0; c < C; c++)
            ref_store(dw, v * C + c, a->accumulate ? ref_load(dw, v * C + c) + sum[c] : sum[c]);
    }
    return 0;
}

/* x indexed by the coordinates of element i of `index`, with coordinate dim replaced by that element. */
static int64_t picked(const ps_view *x, const ps_view *index, int dim, int64_t i)
{
    int64_t at = 0, rest = i;
    for (int d = index->ndim - 1; d >= 0; d--) {
        int64_t coordinate = rest % index->shape[d];
        rest /= index->shape[d];
        at += (d == dim ? ref_load_int(index, i) : coordinate) * x->stride[d];
    }
    return at;
}

int ref_gather(ps_call *call)
{
    const ps_attrs_gather *a = call->attrs;
    const ps_view *x = &call->in[0], *index = &call->in[1], *y = &call->out[0];
    int dim = ref_dim(x, a->dim);
    int64_t size = ps_dtype_bytes(x->dtype);
    PS_TRY(ref_check_index(index, x->ndim > 0 ? x->shape[dim] : 1));
    for (int64_t i = 0; i < index->numel; i++) {
        const char *from = (const char *)x->data + picked(x, index, dim, i) * size;
        memcpy((char *)y->data + i * size, from, (size_t)size);
    }
    return 0;
}

/* Floats are summed in double and rounded once, integers exactly. src may be larger than index, as in PyTorch. */
int ref_scatter_add(ps_call *call)
{
    const ps_attrs_scatter_add *a = call->attrs;
    const ps_view *x = &call->in[0], *index = &call->in[1], *y = &call->out[0];
    ps_view src = call->in[2];
    int dim = ref_dim(x, a->dim);
    PS_TRY(ref_check_index(index, x->ndim > 0 ? x->shape[dim] : 1));
    for (int d = 0; d < src.ndim; d++) src.shape[d] = index->shape[d];
    if (!ps_dtype_is_float(x->dtype)) {
        ref_copy(y, x);
        for (int64_t i = 0; i < index->numel; i++) {
            int64_t at = picked(x, index, dim, i);
            uint64_t sum = (uint64_t)ref_load_int(y, at) + (uint64_t)ref_load_int(&src, ref_at(&src, i));
            ref_store_int(y, at, (int64_t)sum);
        }
        return 0;
    }
    double *sum;
    PS_TRY(ref_dense(call, x, &sum));
    for (int64_t i = 0; i < index->numel; i++) sum[picked(x, index, dim, i)] += ref_load(&src, ref_at(&src, i));
    ref_put(y, sum, false);
    return 0;
}

int ref_concat(ps_call *call)
{
    const ps_attrs_concat *a = call->attrs;
    const ps_view *y = &call->out[0];
    int dim = ref_dim(y, a->dim);
    int64_t first = 0;                              /* along dim */
    for (int n = 0; n < call->n_in; n++) {
        const ps_view *x = &call->in[n];
        ps_view part = ref_shift(y, first * y->stride[dim]);
        part.shape[dim] = x->shape[dim];
        part.numel = x->numel;
        ref_copy(&part, x);
        first += x->shape[dim];
    }
    return 0;
}
