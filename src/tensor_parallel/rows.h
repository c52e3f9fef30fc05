/* SPDX-License-Identifier: BSD-3-Clause
 * This header defines views for the ops with products (linear.c, loss.c): some rows of a contiguous matrix, and the
 * transpose of a matrix. */
#ifndef PS_TENSOR_PARALLEL_ROWS_H
#define PS_TENSOR_PARALLEL_ROWS_H
#include "base/dtype.h"
#include "tensor/tensor.h"

static const ps_view absent = { .ndim = -1 };

static inline int64_t nbytes_of(const ps_view *v) { return v->numel * ps_dtype_bytes(v->dtype); }

/* Returns the size in bytes of one row of v [.., features]. */
static inline int64_t row_nbytes(const ps_view *v) { return v->shape[1] * ps_dtype_bytes(v->dtype); }

/* Returns rows [first, first + rows) of v [.., features]. */
static inline ps_view rows_of(const ps_view *v, int64_t first, int64_t rows)
{
    ps_view part = *v;
    part.data = (char *)v->data + first * row_nbytes(v);
    part.shape[0] = rows;
    part.numel = rows * v->shape[1];
    return part;
}

static inline ps_view turned(const ps_view *v)
{
    ps_view t = *v;
    t.shape[0] = v->shape[1], t.shape[1] = v->shape[0];
    t.stride[0] = v->stride[1], t.stride[1] = v->stride[0];
    return t;
}
#endif
