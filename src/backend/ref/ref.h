/* SPDX-License-Identifier: BSD-3-Clause
 * Declarations for the kernels of the `ref` backend. The kernels are plain C, run on one thread and are not optimised.
 * Every other backend is compared with these kernels, and uses these kernels for the ops that it does not implement.
 * The kernels are written to be easy to read.
 *
 * Elements of every type are read as doubles, computed in double, and rounded once when they are stored. A result of
 * type bf16 or fp16 is first rounded to fp32, as in PyTorch. A double cannot represent all 64-bit integers. Hence
 * copies, casts, gather, add, sub, mul and comparisons read and write integers with the *_int functions, which are
 * exact. No kernel writes an output before all of its checks have passed. */
#ifndef PS_REF_H
#define PS_REF_H
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include "backend/backend.h"
#include "base/error.h"
#include "base/half.h"
#include "base/philox.h"

/* The implementation of REF_KERNELS(X). REF_IS_VIEW(flags) is 1 if the first flag of an op is VIEW, MOVE or RANKS,
 * otherwise 0. Ops with these flags have no kernel. */
#define REF_FLAG_VIEW ~, 1, ~
#define REF_FLAG_MOVE ~, 1, ~
#define REF_FLAG_RANKS ~, 1, ~
#define REF_SECOND(a, b, ...) b
#define REF_SECOND_OF(...) REF_SECOND(__VA_ARGS__, 0, 0)
#define REF_IS_VIEW(flags) REF_SECOND_OF(REF_FLAG_##flags)
#define REF_JOIN2(a, b) a##b
#define REF_JOIN(a, b) REF_JOIN2(a, b)

#define REF_DECLARE_1(name)
#define REF_DECLARE_0(name) int ref_##name(ps_call *call);
#define OP(name, inputs, outputs, attributes, infer, grad, saved, flags, cost, doc) \
    REF_JOIN(REF_DECLARE_, REF_IS_VIEW(flags))(name)
#include "ops.def"
#undef OP

/* -- one element; `at` counts elements from v->data ------------------------------------------------------------- */
static inline double ref_load(const ps_view *v, int64_t at)
{
    switch (v->dtype) {
    case PS_F32: return ((const float *)v->data)[at];
    case PS_BF16: return ps_bf16_to_f32(((const uint16_t *)v->data)[at]);
    case PS_F16: return ps_f16_to_f32(((const uint16_t *)v->data)[at]);
    case PS_F64: return ((const double *)v->data)[at];
    case PS_I32: return ((const int32_t *)v->data)[at];
    case PS_I64: return (double)((const int64_t *)v->data)[at];
    case PS_U8: return ((const uint8_t *)v->data)[at];
    default: return ((const uint8_t *)v->data)[at] != 0;
    }
}

/* Truncates x to an integer in [low, high]. Numbers outside the range become low or high. NaN becomes 0. */
static inline int64_t ref_to_int(double x, int64_t low, int64_t high)
{
    if (x != x) return 0;
    if (x >= (double)high) return high;
    if (x <= (double)low) return low;
    return (int64_t)x;
}

static inline int64_t ref_load_int(const ps_view *v, int64_t at)
{
    switch (v->dtype) {
    case PS_I32: return ((const int32_t *)v->data)[at];
    case PS_I64: return ((const int64_t *)v->data)[at];
    case PS_U8: return ((const uint8_t *)v->data)[at];
    case PS_BOOL: return ((const uint8_t *)v->data)[at] != 0;
    default: return ref_to_int(ref_load(v, at), INT64_MIN, INT64_MAX);
    }
}

static inline void ref_store(const ps_view *v, int64_t at, double x)
{
    switch (v->dtype) {
    case PS_F32: ((float *)v->data)[at] = (float)x; break;
    case PS_BF16: ((uint16_t *)v->data)[at] = ps_f32_to_bf16((float)x); break;
    case PS_F16: ((uint16_t *)v->data)[at] = ps_f32_to_f16((float)x); break;
    case PS_F64: ((double *)v->data)[at] = x; break;
    case PS_I32: ((int32_t *)v->data)[at] = (int32_t)ref_to_int(x, INT32_MIN, INT32_MAX); break;
    case PS_I64: ((int64_t *)v->data)[at] = ref_to_int(x, INT64_MIN, INT64_MAX); break;
    case PS_U8: ((uint8_t *)v->data)[at] = (uint8_t)ref_to_int(x, 0, UINT8_MAX); break;
    default: ((uint8_t *)v->data)[at] = x != 0; break;
    }
}

/* If x does not fit into the type, it wraps around, as in C and PyTorch. */
static inline void ref_store_int(const ps_view *v, int64_t at, int64_t x)
{
    switch (v->dtype) {
    case PS_F32: ((float *)v->data)[at] = (float)x; break;
    case PS_I32: ((int32_t *)v->data)[at] = (int32_t)x; break;
    case PS_I64: ((int64_t *)v->data)[at] = x; break;
    case PS_U8: ((uint8_t *)v->data)[at] = (uint8_t)x; break;
    case PS_BOOL: ((uint8_t *)v->data)[at] = x != 0; break;
    default: ref_store(v, at, (double)x); break;
    }
}

/* -- views (ref.c) ---------------------------------------------------------------------------------------------- */
/* Broadcasts v to a shape by PyTorch's rules: the shapes are aligned at the last dimension, and a dimension of size 1
 * is repeated. Merges dimensions that are row-major in memory. Hence the result can be passed only to ref_at(). */
ps_view ref_expand(const ps_view *v, int ndim, const int64_t *shape);
static inline ps_view ref_like(const ps_view *v, const ps_view *out) { return ref_expand(v, out->ndim, out->shape); }
static inline ps_view ref_flat(const ps_view *v) { return ref_expand(v, v->ndim, v->shape); }

/* Returns the position in memory of the element with row-major index i. */
static inline int64_t ref_at(const ps_view *v, int64_t i)
{
    int64_t at = 0;
    for (int d = v->ndim - 1; d > 0; d--) {
        at += i % v->shape[d] * v->stride[d];
        i /= v->shape[d];
    }
    return v->ndim > 0 ? at + i * v->stride[0] : 0;
}

/* Returns v with its data shifted by `at` elements. */
static inline ps_view ref_shift(const ps_view *v, int64_t at)
{
    ps_view s = *v;
    s.data = (char *)v->data + at * ps_dtype_bytes(v->dtype);
    return s;
}
ps_view ref_matrix(const ps_view *v, int64_t at);              /* returns a view of the last two dimensions that starts
                                                                * at element `at` */
static inline int ref_dim(const ps_view *v, int dim) { return dim < 0 ? dim + v->ndim : dim; }
ps_view ref_without_dim(const ps_view *v, int dim);            /* returns a view of position 0 of `dim`, without
                                                                * `dim` */
static inline int64_t ref_last(const ps_view *v) { return v->ndim > 0 ? v->shape[v->ndim - 1] : 1; }

/* Copies src to dst. src is broadcast to the shape of dst and converted to the type of dst. Conversions between integer
 * types are exact. */
void ref_copy(const ps_view *dst, const ps_view *src);

/* Read and write the value of a parameter in full precision, fp32 or fp64. in[0] is the parameter. in[1] is the
 * parameter's master or its remainders (update.c). */
double ref_master_get(const ps_view *in, int64_t i);
void ref_master_put(const ps_view *in, int64_t i, double p);

/* Returns PS_ERANGE if an index is outside [0, n). */
int ref_check_index(const ps_view *index, int64_t n);

/* -- working memory: row-major doubles -------------------------------------------------------------------------- */
/* If call->scratch fails, it records the error message itself. Hence kernels only return PS_ENOMEM. */
int ref_scratch(ps_call *call, int64_t numel, double **out);    /* the memory is zeroed */
void ref_read(const ps_view *v, double *dst);                   /* reads all elements of v */
int ref_dense(ps_call *call, const ps_view *v, double **out);   /* reads all elements of v into scratch memory; sets
                                                                 * *out to NULL if v is absent */
/* Sets v to x, or adds x to v if `add` is set. Rounds once. Does nothing if v is absent. */
void ref_put(const ps_view *v, const double *x, bool add);

/* -- GELU, the tanh approximation, and its derivative (elementwise.c) ---------------------------------------------- */
double ref_gelu_tanh(double x);
double ref_gelu_tanh_slope(double x);

/* -- dropout ---------------------------------------------------------------------------------------------------- */
/* Returns true if element e of a sample is dropped. `sample` is the index of the sample in the whole batch. p is
 * compared as a float. */
static inline bool ref_dropped(uint64_t seed, uint64_t step, uint32_t op, uint64_t sample, uint64_t e, double p)
{
    ps_philox r = ps_philox4x32(seed, sample << 32 | e / 4, step << 32 | op);
    return ps_unit_f32(r.v[e % 4]) < (float)p;
}
#endif
