/* SPDX-License-Identifier: BSD-3-Clause
 * Opens the `ref` backend. This file also contains the functions that the backend's kernels share: broadcasting,
 * copies, and conversion of tensors to and from dense arrays of doubles. The kernel table is filled from ops.def, so
 * the program does not link if an op has no kernel. */
#include <stdio.h>
#include "base/alloc.h"
#include "ref.h"

ps_view ref_expand(const ps_view *v, int ndim, const int64_t *shape)
{
    ps_view e = *v;
    int lead = ndim - v->ndim;
    e.ndim = 0;
    e.numel = 1;
    for (int d = 0; d < ndim; d++) {
        int64_t size = shape[d];
        int64_t stride = d < lead || v->shape[d - lead] == 1 ? 0 : v->stride[d - lead];
        e.numel *= size;
        if (size == 1) continue;
        if (e.ndim > 0 && e.stride[e.ndim - 1] == size * stride) {
            e.shape[e.ndim - 1] *= size;
            e.stride[e.ndim - 1] = stride;
        } else {
            e.shape[e.ndim] = size;
            e.stride[e.ndim++] = stride;
        }
    }
    return e;
}

ps_view ref_matrix(const ps_view *v, int64_t at)
{
    ps_view m = ref_shift(v, at);
    m.ndim = 2;
    for (int d = 0; d < 2; d++) {
        m.shape[d] = v->shape[v->ndim - 2 + d];
        m.stride[d] = v->stride[v->ndim - 2 + d];
    }
    m.numel = m.shape[0] * m.shape[1];
    return m;
}

ps_view ref_without_dim(const ps_view *v, int dim)
{
    ps_view w = *v;
    w.ndim = 0;
    w.numel = 1;
    for (int d = 0; d < v->ndim; d++) {
        if (d == dim) continue;
        w.shape[w.ndim] = v->shape[d];
        w.stride[w.ndim++] = v->stride[d];
        w.numel *= v->shape[d];
    }
    return w;
}

void ref_copy(const ps_view *dst, const ps_view *src)
{
    ps_view d = ref_flat(dst), s = ref_like(src, dst);
    bool exact = !ps_dtype_is_float(d.dtype) && !ps_dtype_is_float(s.dtype);
    bool from_int = !ps_dtype_is_float(s.dtype);
    size_t size = (size_t)ps_dtype_bytes(d.dtype);
    for (int64_t i = 0; i < d.numel; i++) {
        int64_t to = ref_at(&d, i), from = ref_at(&s, i);
        if (d.dtype == s.dtype)
            memcpy((char *)d.data + to * (int64_t)size, (const char *)s.data + from * (int64_t)size, size);
        else if (exact || from_int)
            ref_store_int(&d, to, ref_load_int(&s, from));
        else
            ref_store(&d, to, ref_load(&s, from));
    }
}

int ref_scratch(ps_call *call, int64_t numel, double **out)
{
    size_t nbytes = (size_t)(numel > 0 ? numel : 1) * sizeof(double);
    *out = call->scratch(call, nbytes);
    if (!*out) return PS_ENOMEM;
    memset(*out, 0, nbytes);
    return 0;
}

void ref_read(const ps_view *v, double *dst)
{
    ps_view f = ref_flat(v);
    for (int64_t i = 0; i < f.numel; i++) dst[i] = ref_load(&f, ref_at(&f, i));
}

int ref_dense(ps_call *call, const ps_view *v, double **out)
{
    *out = NULL;
    if (!ps_has(v)) return 0;
    PS_TRY(ref_scratch(call, v->numel, out));
    ref_read(v, *out);
    return 0;
}

void ref_put(const ps_view *v, const double *x, bool add)
{
    if (!ps_has(v)) return;
    ps_view f = ref_flat(v);
    for (int64_t i = 0; i < f.numel; i++) {
        int64_t at = ref_at(&f, i);
        ref_store(&f, at, add ? ref_load(&f, at) + x[i] : x[i]);
    }
}

static void close_ref(ps_backend *be)
{
    ps_free(be);
}

int ps_backend_ref_open(ps_backend **out)
{
    ps_backend *be = ps_alloc0(sizeof *be);
    if (!be) return ps_fail_nomem(sizeof *be);
    be->name = "ref";
    be->is_host = true;
    snprintf(be->describe, sizeof be->describe, "plain C, one thread, computes in fp64");
    be->region_new = ps_host_region_new;
    be->region_free = ps_host_region_free;
    be->region_discard = ps_host_region_discard;
    be->region_move = ps_host_region_move;
    be->bytes_available = ps_host_bytes_available;
    be->bytes_held = ps_host_bytes_held;
    be->close = close_ref;
#define REF_FILL_1(name)
#define REF_FILL_0(name) be->kernel[PS_OP_##name] = ref_##name;
#define OP(name, inputs, outputs, attributes, infer, grad, saved, flags, cost, doc) \
    REF_JOIN(REF_FILL_, REF_IS_VIEW(flags))(name)
#include "ops.def"
#undef OP
    *out = be;
    return 0;
}
