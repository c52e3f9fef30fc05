/* SPDX-License-Identifier: BSD-3-Clause
 * Maps the dimensions of operands to the dimensions of a matrix product. C and C++ backends share this file. */
#ifndef PS_BACKEND_DIMS_H
#define PS_BACKEND_DIMS_H
#include <string.h>
#include "backend/backend.h"

static inline int64_t product(const int64_t *n, int count)
{
    int64_t p = 1;
    for (int i = 0; i < count; i++) p *= n[i];
    return p;
}

/* Returns whether the dimensions 0 to count - 1 of v can be merged into one dimension. Sets *stride to the stride of
 * the merged dimension. Dimensions of size 1 are ignored. */
static inline bool collapses(const ps_view *v, int count, int64_t *stride)
{
    int64_t expect = -1, step = 0;
    for (int d = count - 1; d >= 0; d--) {
        if (v->shape[d] == 1) continue;
        if (expect >= 0 && v->stride[d] != expect) return false;
        if (expect < 0) step = v->stride[d];
        expect = v->stride[d] * v->shape[d];
    }
    *stride = step;
    return true;
}

/* The batch dimensions of y = a b. These are all dimensions before the last two, except those of size 1. Adjacent
 * dimensions are merged if the strides of a, b and y permit it. v contains the views of a, b and y, in this order. */
typedef struct batch_dims { int ndim; int64_t n[PS_MAX_DIMS], step[3][PS_MAX_DIMS]; } batch_dims;

static inline batch_dims batch_of(const ps_view *const v[3])
{
    batch_dims out;
    memset(&out, 0, sizeof out);
    int nd = v[2]->ndim - 2;
    for (int d = 0; d < nd; d++) {
        int64_t n = v[2]->shape[d], step[3];
        if (n == 1) continue;
        for (int t = 0; t < 3; t++) {
            int own = d - (v[2]->ndim - v[t]->ndim);         /* for broadcasting, shapes are aligned at their last
                                                              * dimensions */
            step[t] = own < 0 || v[t]->shape[own] == 1 ? 0 : v[t]->stride[own];
        }
        int p = out.ndim - 1;
        bool merge = p >= 0;
        for (int t = 0; t < 3; t++) merge = merge && out.step[t][p] == step[t] * n;
        if (!merge) p = out.ndim++, out.n[p] = 1;
        out.n[p] *= n;
        for (int t = 0; t < 3; t++) out.step[t][p] = step[t];
    }
    return out;
}
#endif
