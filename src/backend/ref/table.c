/* SPDX-License-Identifier: BSD-3-Clause
 * Ops that read elements by index (embedding, gather), ops that write or add elements by index (scatter, gradients),
 * and concatenation. All indices are checked before any output is written. A negative index is an error. */
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

/* Returns the row of w [V, C] that element i of `index` selects. w contains V rows of the embedding, starting at row
 * `first`. If another shard contains the selected row, returns -1. */
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

/* Sorts positions by index. The counting sort keeps the order of positions that have the same index. Each row of dw is
 * a sum of rows of dy. The sum is computed in double, in row order, and is rounded once. */
int ref_embedding_backward(ps_call *call)
{
    const ps_attrs_embedding_backward *a = call->attrs;
    const ps_view *index = &call->in[0], *dy = &call->in[1], *dw = &call->out[0];
    int64_t V = a->rows, n = index->numel, C = ref_last(dy);
    double *sum;
    PS_TRY(ref_check_index(index, a->total > 0 ? a->total : V));
    PS_TRY(ref_scratch(call, C, &sum));
    /* The positions that select row v begin at order[begin[v]]. */
    int64_t *begin = call->scratch(call, (size_t)(V + 1) * sizeof *begin);
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
    /* At this point, the positions that select row v end before order[begin[v]]. */
    for (int64_t v = 0, k = 0; v < V; v++) {
        memset(sum, 0, (size_t)C * sizeof *sum);
        for (; k < begin[v]; k++)
            for (int64_t c = 0; v + a->first != a->padding_idx && c < C; c++) sum[c] += ref_load(dy, order[k] * C + c);
        for (int64_t c = 0; c < C; c++)
            ref_store(dw, v * C + c, a->accumulate ? ref_load(dw, v * C + c) + sum[c] : sum[c]);
    }
    return 0;
}

/* Returns the position of element i of v, where v is broadcast to the shape of y. */
static int64_t broadcast_at(const ps_view *v, const ps_view *y, int64_t i)
{
    int64_t at = 0;
    for (int d = y->ndim - 1, e = v->ndim - 1; e >= 0; d--, e--) {
        if (v->shape[e] != 1) at += i % y->shape[d] * v->stride[e];
        i /= y->shape[d];
    }
    return at;
}

int ref_flat_index(ps_call *call)
{
    const ps_attrs_flat_index *a = call->attrs;
    const ps_view *y = &call->out[0];
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t all = 0;
        for (int k = 0; k < call->n_in; k++) {
            int64_t size = a->size[k], index = ref_load_int(&call->in[k], broadcast_at(&call->in[k], y, i));
            if (index < -size || index >= size)
                return ps_fail(PS_ERANGE, "index %" PRId64 " of dimension %d with size %" PRId64 ", in an index tensor",
                               index, a->dim[k], size);
            all = all * size + (index < 0 ? index + size : index);
        }
        ref_store_int(y, i, all);
    }
    return 0;
}

/* Returns the number of elements of x that one element of `index` selects. If `index` has as many dimensions as x, this
 * is 1. Otherwise the indexed dimension is the last dimension of `index`, and an element selects everything in the
 * dimensions of x after the indexed dimension. */
static int64_t width_of(const ps_view *x, const ps_view *index)
{
    int64_t width = 1;
    for (int d = index->ndim; d < x->ndim; d++) width *= x->shape[d];
    return width;
}

/* Returns the position in x of selected element i. The position has the coordinates of element i, except that the
 * coordinate of dimension dim is the value in `index`. */
static int64_t picked(const ps_view *x, const ps_view *index, int dim, int64_t width, int64_t i)
{
    int64_t at = 0, rest = i;
    for (int d = x->ndim - 1; d >= 0; d--) {
        int64_t size = d < index->ndim ? index->shape[d] : x->shape[d], coordinate = rest % size;
        rest /= size;
        at += (d == dim ? ref_load_int(index, i / width) : coordinate) * x->stride[d];
    }
    return at;
}

int ref_gather(ps_call *call)
{
    const ps_attrs_gather *a = call->attrs;
    const ps_view *x = &call->in[0], *index = &call->in[1], *y = &call->out[0];
    int dim = ref_dim(x, a->dim);
    int64_t size = ps_dtype_bytes(x->dtype), width = width_of(x, index);
    PS_TRY(ref_check_index(index, x->ndim > 0 ? x->shape[dim] : 1));
    for (int64_t i = 0; i < index->numel * width; i++) {
        const char *from = (const char *)x->data + picked(x, index, dim, width, i) * size;
        memcpy((char *)y->data + i * size, from, (size_t)size);
    }
    return 0;
}

/* Floats are summed in double and rounded once. Sums of integers are exact. */
int ref_scatter_add(ps_call *call)
{
    const ps_attrs_scatter_add *a = call->attrs;
    const ps_view *x = &call->in[0], *index = &call->in[1], *src = &call->in[2], *y = &call->out[0];
    int dim = ref_dim(x, a->dim);
    int64_t width = width_of(x, index), n = index->numel * width;
    PS_TRY(ref_check_index(index, x->ndim > 0 ? x->shape[dim] : 1));
    if (!ps_dtype_is_float(x->dtype)) {
        ref_copy(y, x);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = picked(x, index, dim, width, i);
            uint64_t sum = (uint64_t)ref_load_int(y, at) + (uint64_t)ref_load_int(src, i);
            ref_store_int(y, at, (int64_t)sum);
        }
        return 0;
    }
    double *sum;
    PS_TRY(ref_dense(call, x, &sum));
    for (int64_t i = 0; i < n; i++) sum[picked(x, index, dim, width, i)] += ref_load(src, i);
    ref_put(y, sum, false);
    return 0;
}

static void put_all(const ps_view *y, const ps_view *index, const ps_view *src, int dim)
{
    int64_t size = ps_dtype_bytes(y->dtype), width = width_of(y, index);
    for (int64_t i = 0; i < index->numel * width; i++)
        memcpy((char *)y->data + picked(y, index, dim, width, i) * size, (const char *)src->data + i * size,
               (size_t)size);
}

int ref_scatter_(ps_call *call)
{
    const ps_view *x = &call->in[0], *index = &call->in[1];
    int dim = ref_dim(x, ((const ps_attrs_scatter_ *)call->attrs)->dim);
    PS_TRY(ref_check_index(index, x->shape[dim]));
    put_all(x, index, &call->in[2], dim);
    return 0;
}

int ref_scatter(ps_call *call)
{
    const ps_view *x = &call->in[0], *index = &call->in[1];
    int dim = ref_dim(x, ((const ps_attrs_scatter *)call->attrs)->dim);
    PS_TRY(ref_check_index(index, x->shape[dim]));
    ref_copy(&call->out[0], x);
    put_all(&call->out[0], index, &call->in[2], dim);
    return 0;
}

/* Processes the elements of `index` in reverse order and sets the value at each selected position to 0. If two elements
 * select the same position, the earlier element reads 0. */
int ref_scatter_backward(ps_call *call)
{
    const ps_view *dy = &call->in[0], *index = &call->in[1], *dx = &call->out[0], *dsrc = &call->out[1];
    int dim = ref_dim(dy, ((const ps_attrs_scatter_backward *)call->attrs)->dim);
    int64_t width = width_of(dy, index);
    PS_TRY(ref_check_index(index, dy->shape[dim]));
    ref_copy(dx, dy);
    for (int64_t i = index->numel * width - 1; i >= 0; i--) {
        int64_t at = picked(dx, index, dim, width, i);
        ref_store(dsrc, i, ref_load(dx, at));
        ref_store(dx, at, 0);
    }
    return 0;
}

static double joined(double a, double b, int reduce)
{
    if (reduce == 2) return a * b;
    if (isnan(a) || isnan(b)) return NAN;
    return (reduce == 0) == (a > b) ? a : b;
}

static int64_t joined_int(int64_t a, int64_t b, int reduce)
{
    if (reduce == 2) return (int64_t)((uint64_t)a * (uint64_t)b);
    return (reduce == 0) == (a > b) ? a : b;
}

/* Floats are multiplied in double and rounded once. */
int ref_scatter_reduce(ps_call *call)
{
    const ps_attrs_scatter_reduce *a = call->attrs;
    const ps_view *x = &call->in[0], *index = &call->in[1], *src = &call->in[2], *y = &call->out[0];
    int dim = ref_dim(x, a->dim);
    int64_t width = width_of(x, index), n = index->numel * width;
    PS_TRY(ref_check_index(index, x->shape[dim]));
    if (!ps_dtype_is_float(x->dtype)) {
        ref_copy(y, x);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = picked(x, index, dim, width, i);
            ref_store_int(y, at, joined_int(ref_load_int(y, at), ref_load_int(src, i), a->reduce));
        }
        return 0;
    }
    double *all;
    PS_TRY(ref_dense(call, x, &all));
    for (int64_t i = 0; i < n; i++) {
        int64_t at = picked(x, index, dim, width, i);
        all[at] = joined(all[at], ref_load(src, i), a->reduce);
    }
    ref_put(y, all, false);
    return 0;
}

int ref_concat(ps_call *call)
{
    const ps_attrs_concat *a = call->attrs;
    const ps_view *y = &call->out[0];
    int dim = ref_dim(y, a->dim);
    int64_t first = 0;                              /* first position along dim */
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

/* -- search -------------------------------------------------------------------------------------------------------- */
/* Returns true if element i of the sequence is larger than value j, or, if `right` is not set, equal to value j. */
static bool is_beyond(const ps_view *seq, int64_t i, const ps_view *values, int64_t j, bool right)
{
    if (!ps_dtype_is_float(seq->dtype)) {
        int64_t a = ref_load_int(seq, i), b = ref_load_int(values, j);
        return right ? a > b : a >= b;
    }
    double a = ref_load(seq, i), b = ref_load(values, j);
    return right ? a > b : a >= b;
}

int ref_searchsorted(ps_call *call)
{
    const ps_attrs_searchsorted *a = call->attrs;
    const ps_view *seq = &call->in[0], *values = &call->in[1], *y = &call->out[0];
    int64_t n = ref_last(seq), each = seq->ndim > 1 ? ref_last(values) : values->numel;
    for (int64_t i = 0; i < values->numel; i++) {
        int64_t row = i / each * n, first = 0, last = n;
        while (first < last) {
            int64_t middle = first + (last - first) / 2;
            if (is_beyond(seq, row + middle, values, i, a->right)) last = middle;
            else first = middle + 1;
        }
        ref_store_int(y, i, first);
    }
    return 0;
}

/* -- masks and windows -------------------------------------------------------------------------------------------- */
int ref_masked_scatter(ps_call *call)
{
    const ps_view *x = &call->in[0], *mask = &call->in[1], *src = &call->in[2], *y = &call->out[0];
    int64_t size = ps_dtype_bytes(x->dtype), count = 0;
    for (int64_t i = 0; i < mask->numel; i++) count += ref_load_int(mask, i);
    if (count > src->numel)
        return ps_fail(PS_EINVAL, "the mask has %" PRId64 " true elements, but the source has only %" PRId64, count,
                       src->numel);
    for (int64_t i = 0, k = 0; i < x->numel; i++) {
        bool on = ref_load_int(mask, i);
        memcpy((char *)y->data + i * size, (const char *)(on ? src : x)->data + (on ? k : i) * size, (size_t)size);
        k += on;
    }
    return 0;
}

/* The shapes of unfold's operands: x is [outer, n, inner], where n is the size of the unfolded dimension, and y is
 * [outer, count, inner, size]. */
struct windows { int64_t outer, n, inner, count; };
static struct windows windows_of(const ps_view *x, int dim, int64_t size, int64_t step)
{
    struct windows w = { 1, x->shape[dim], 1, 0 };
    for (int d = 0; d < x->ndim; d++) *(d < dim ? &w.outer : d == dim ? &w.count : &w.inner) *= x->shape[d];
    w.count = (w.n - size) / step + 1;
    return w;
}

int ref_unfold(ps_call *call)
{
    const ps_attrs_unfold *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    struct windows w = windows_of(x, ref_dim(x, a->dim), a->size, a->step);
    int64_t bytes = ps_dtype_bytes(x->dtype);
    for (int64_t i = 0; i < y->numel; i++) {
        int64_t row = i / a->size, at = i / (a->size * w.inner) % w.count * a->step + i % a->size;
        int64_t from = (row / (w.inner * w.count) * w.n + at) * w.inner + row % w.inner;
        memcpy((char *)y->data + i * bytes, (const char *)x->data + from * bytes, (size_t)bytes);
    }
    return 0;
}

int ref_unfold_backward(ps_call *call)
{
    const ps_attrs_unfold_backward *a = call->attrs;
    const ps_view *dy = &call->in[0], *dx = &call->out[0];
    struct windows w = windows_of(dx, ref_dim(dx, a->dim), a->size, a->step);
    for (int64_t i = 0; i < dx->numel; i++) {
        int64_t inner = i % w.inner, at = i / w.inner % w.n, outer = i / (w.inner * w.n);
        double sum = 0;
        for (int64_t k = at < a->size ? 0 : (at - a->size) / a->step + 1; k < w.count && k * a->step <= at; k++)
            sum += ref_load(dy, ((outer * w.count + k) * w.inner + inner) * a->size + at - k * a->step);
        ref_store(dx, i, sum);
    }
    return 0;
}

/* -- order --------------------------------------------------------------------------------------------------------- */
int ref_flip(ps_call *call)
{
    const ps_attrs_flip *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    int64_t size = ps_dtype_bytes(x->dtype);
    for (int64_t i = 0; i < x->numel; i++) {
        int64_t rest = i, at = 0, scale = 1;
        for (int d = x->ndim - 1; d >= 0; d--) {
            int64_t n = x->shape[d], k = rest % n;
            at += (a->dims >> d & 1 ? n - 1 - k : k) * scale;
            rest /= n, scale *= n;
        }
        memcpy((char *)y->data + i * size, (const char *)x->data + at * size, (size_t)size);
    }
    return 0;
}

int ref_triangle(ps_call *call)
{
    const ps_attrs_triangle *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    int64_t C = x->shape[x->ndim - 1], R = x->shape[x->ndim - 2], size = ps_dtype_bytes(x->dtype);
    for (int64_t i = 0; i < x->numel; i++) {
        int64_t right = i % C - i / C % R - a->diagonal;          /* number of columns to the right of the diagonal */
        char *to = (char *)y->data + i * size;
        if (a->upper ? right < 0 : right > 0) memset(to, 0, (size_t)size);
        else memcpy(to, (const char *)x->data + i * size, (size_t)size);
    }
    return 0;
}
