/* SPDX-License-Identifier: BSD-3-Clause
 * Ops that other devices run as one kernel. The cpu runs them as a chain of existing kernels, so that the result has
 * the same bits as the separate ops. */
#include <string.h>
#include "backend/cpu/cpu.h"
#include "base/error.h"

/* The kernels of the cpu backend, followed by the kernels of the fallback. All contexts of a process share this
 * table. */
static ps_kernel kernels[2][PS_OP_COUNT];

void ps_cpu_chain_open(const ps_kernel *own, const ps_kernel *fallback)
{
    memcpy(kernels[0], own, sizeof kernels[0]);
    memcpy(kernels[1], fallback, sizeof kernels[1]);
}

static const ps_view absent = { .ndim = -1 };

/* Runs one kernel of the chain. If this backend's kernel does not support the types, runs the fallback's kernel. */
static int run(ps_call *call, int op, const void *attrs, int n_in, const ps_view *in, ps_view *out)
{
    ps_call one = *call;
    int rc = PS_EUNSUP;
    one.op = op, one.attrs = attrs, one.n_in = n_in, one.in = in, one.n_out = 1, one.out = out;
    if (call->dry) return ps_cpu_asks(op) ? kernels[0][op](&one) : 0;
    for (int i = 0; i < 2 && rc == PS_EUNSUP; i++)
        if (kernels[i][op]) rc = kernels[i][op](&one);
    return rc;
}

/* Sums d [..., O] over all dimensions except the last, and stores the sum in db or adds it to db. */
static int sum_rows(ps_call *call, const ps_view *d, ps_view *db, int add)
{
    ps_attrs_sum attrs = { .dims = (1u << (d->ndim - 1)) - 1, .accumulate = add };
    if (d->ndim > 1) return run(call, PS_OP_sum, &attrs, 1, d, db);
    ps_attrs_axpy_ one = { .alpha = 1 };                     /* d has a single row, so the sum is that row */
    ps_attrs_copy_ none = { 0 };
    ps_view in[2] = { *db, *d };
    return add ? run(call, PS_OP_axpy_, &one, 2, in, db) : run(call, PS_OP_copy_, &none, 2, in, db);
}

static ps_view transposed(const ps_view *v)
{
    ps_view t = *v;
    t.shape[0] = v->shape[1], t.stride[0] = v->stride[1];
    t.shape[1] = v->shape[0], t.stride[1] = v->stride[0];
    return t;
}

int ps_cpu_linear_grad(ps_call *call)
{
    const ps_attrs_linear_grad *at = call->attrs;
    const ps_view *x = &call->in[0], *dy = &call->in[1];
    ps_view in[2] = { transposed(at->out_in ? dy : x), at->out_in ? *x : *dy };
    ps_attrs_matmul attrs = { .accumulate = at->accumulate };
    PS_TRY(run(call, PS_OP_matmul, &attrs, 2, in, &call->out[0]));
    return sum_rows(call, dy, &call->out[1], at->add_b);
}

/* Allocates v, unless the caller has provided it. The new tensor has the type and shape of `like`, but the size of its
 * last dimension is `last`. */
static int make(ps_call *call, ps_view *v, const ps_view *like, int64_t last)
{
    if (ps_has(v)) return 0;
    *v = *like;
    v->numel = 1;
    v->shape[v->ndim - 1] = last;
    for (int d = v->ndim - 1; d >= 0; d--) {
        v->stride[d] = v->numel;
        v->numel *= v->shape[d];
    }
    v->data = call->scratch(call, (size_t)(v->numel * ps_dtype_bytes(v->dtype)));
    return v->data ? 0 : PS_ENOMEM;
}

int ps_cpu_mlp(ps_call *call)
{
    const ps_attrs_mlp *at = call->attrs;
    const ps_view *in = call->in;
    int64_t H = in[1].shape[at->out_in ? 0 : 1];
    ps_view pre = call->out[1], h = absent;
    PS_TRY(make(call, &pre, &in[0], H));
    PS_TRY(make(call, &h, &in[0], H));
    ps_attrs_linear linear = { .out_in = at->out_in };
    ps_attrs_gelu gelu = { .tanh = 1 };
    ps_view first[4] = { in[0], in[1], in[2], absent }, second[4] = { h, in[3], in[4], in[5] };
    PS_TRY(run(call, PS_OP_linear, &linear, 4, first, &pre));
    PS_TRY(run(call, PS_OP_gelu, &gelu, 1, &pre, &h));
    return run(call, PS_OP_linear, &linear, 4, second, &call->out[0]);
}

int ps_cpu_linear_gelu_backward(ps_call *call)
{
    const ps_attrs_linear_gelu_backward *at = call->attrs;
    ps_view *d = &call->out[0];
    ps_attrs_linear linear = { .out_in = !at->out_in };
    ps_attrs_gelu_backward gelu = { .tanh = 1 };
    ps_view product[4] = { call->in[0], call->in[1], absent, absent };
    PS_TRY(run(call, PS_OP_linear, &linear, 4, product, d));
    ps_view slope[2] = { call->in[2], *d };
    PS_TRY(run(call, PS_OP_gelu_backward, &gelu, 2, slope, d));
    return ps_has(&call->out[1]) ? sum_rows(call, d, &call->out[1], at->add_b) : 0;
}
