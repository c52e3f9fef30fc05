/* SPDX-License-Identifier: BSD-3-Clause
 * The vector kernels of the families `elementwise` and `reduce`, called directly: against the ref kernels over types,
 * odd sizes and strides, and against themselves bit by bit under every instruction set and several thread counts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/backend.h"
#include "base/half.h"
#include "base/philox.h"
#include "cpu_scratch.h"

#define SETS(X) X(sse2)
#if defined(__x86_64__)
#undef SETS
#define SETS(X) X(sse2) X(avx2) X(avx512)
#endif
#define DECLARE(isa) void ps_cpu_fill_elementwise_##isa(ps_kernel *k); void ps_cpu_fill_reduce_##isa(ps_kernel *k);
SETS(DECLARE)

static ps_backend *ref;
static ps_kernel kernels[3][PS_OP_COUNT];
static int sets, passed, failed;

static void fill_kernels(void)
{
#if defined(__x86_64__)
    int best = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") ? 3
             : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 2 : 1;
#else
    int best = 1;
#endif
#define FILL(isa) \
    if (sets < best) ps_cpu_fill_elementwise_##isa(kernels[sets]), ps_cpu_fill_reduce_##isa(kernels[sets]), sets++;
    SETS(FILL)
}

/* -- tensors: a view in a buffer of its own ---------------------------------------------------------------------- */
/* REPEATED has stride 0 along the first dimension. */
enum layout { FLAT, TRANSPOSED, PADDED, STEPPED, REPEATED, LAYOUTS };
typedef struct tensor { ps_view v; char *buffer; int64_t nbytes, first; } tensor;

static uint64_t random_state = 1;
static uint32_t random_word(void) { return ps_philox4x32(42, random_state++, 0).v[0]; }
static double uniform(double low, double high) { return low + (high - low) * ps_unit_f32(random_word()); }

static double get(const ps_view *v, int64_t at)
{
    switch (v->dtype) {
    case PS_F32: return ((float *)v->data)[at];
    case PS_BF16: return ps_bf16_to_f32(((uint16_t *)v->data)[at]);
    case PS_F16: return ps_f16_to_f32(((uint16_t *)v->data)[at]);
    case PS_F64: return ((double *)v->data)[at];
    case PS_I32: return ((int32_t *)v->data)[at];
    case PS_I64: return (double)((int64_t *)v->data)[at];
    default: return ((uint8_t *)v->data)[at];
    }
}

static void put(const ps_view *v, int64_t at, double x)
{
    switch (v->dtype) {
    case PS_F32: ((float *)v->data)[at] = (float)x; break;
    case PS_BF16: ((uint16_t *)v->data)[at] = ps_f32_to_bf16((float)x); break;
    case PS_F16: ((uint16_t *)v->data)[at] = ps_f32_to_f16((float)x); break;
    case PS_F64: ((double *)v->data)[at] = x; break;
    case PS_I32: ((int32_t *)v->data)[at] = (int32_t)x; break;
    case PS_I64: ((int64_t *)v->data)[at] = (int64_t)x; break;
    case PS_U8: ((uint8_t *)v->data)[at] = (uint8_t)(int64_t)x; break;
    default: ((uint8_t *)v->data)[at] = x != 0; break;
    }
}

static int64_t place(const ps_view *v, int64_t i)
{
    int64_t at = 0;
    for (int d = v->ndim - 1; d >= 0; d--) at += i % v->shape[d] * v->stride[d], i /= v->shape[d];
    return at;
}

/* The buffer starts one element late, so that nothing is aligned by chance. */
static tensor tensor_new(int dtype, enum layout layout, int ndim, const int64_t *shape)
{
    tensor t = { .v = { .dtype = dtype, .ndim = ndim, .numel = 1 } };
    int order[PS_MAX_DIMS];
    for (int d = 0; d < ndim; d++) order[d] = d, t.v.shape[d] = shape[d];
    if (layout == TRANSPOSED && ndim >= 2) order[ndim - 1] = ndim - 2, order[ndim - 2] = ndim - 1;
    int64_t step = layout == STEPPED ? 3 : 1;
    for (int i = ndim - 1; i >= 0; i--) {
        int d = order[i];
        t.v.stride[d] = step;
        step *= shape[d];
        if (layout == PADDED && i == ndim - 1) step += 5;
        t.v.numel *= shape[d];
    }
    if (layout == REPEATED && ndim > 0) t.v.stride[0] = 0;
    int64_t size = ps_dtype_bytes(dtype);
    t.nbytes = (step + 1) * size;
    t.buffer = calloc(1, (size_t)t.nbytes);
    t.first = size;
    t.v.data = t.buffer + size;
    return t;
}

/* Fills a tensor with random numbers in +-limit. With `specials`, some are infinite, NaN, zero or huge. */
static void randomize(tensor *t, double limit, int specials)
{
    static const double odd[] = { 0, -0.0, 1, -1, INFINITY, -INFINITY, NAN, 1e30, -1e30, 1e-39, 0.5, -3e5 };
    for (int64_t i = 0; i < t->nbytes / ps_dtype_bytes(t->v.dtype) - 1; i++) {
        double x = uniform(-limit, limit);
        if (t->v.dtype == PS_U8) x = fabs(x);
        if (t->v.dtype == PS_BOOL) x = random_word() & 1;
        if (specials && ps_dtype_is_float(t->v.dtype) && random_word() % 8 == 0)
            x = odd[random_word() % (sizeof odd / sizeof *odd)];
        put(&t->v, i, x);
    }
}

static tensor tensor_clone(const tensor *t)
{
    tensor c = *t;
    c.buffer = malloc((size_t)t->nbytes);
    memcpy(c.buffer, t->buffer, (size_t)t->nbytes);
    c.v.data = c.buffer + t->first;
    return c;
}

/* -- running one op everywhere ------------------------------------------------------------------------------------- */
static void *pool[16];
static int pooled;
static void *scratch(ps_call *call, size_t nbytes)
{
    scratch_taken(nbytes);
    return pool[pooled++] = malloc(nbytes + 1);
}

static int run(ps_kernel kernel, int op, const void *attrs, int n_in, const ps_view *in, int n_out, ps_view *out)
{
    ps_call call = { .op = op, .n_in = n_in, .n_out = n_out, .in = in, .out = out, .attrs = attrs, .scratch = scratch };
    int rc = PS_EUNSUP;
    if (kernel == ref->kernel[op]) rc = kernel ? kernel(&call) : PS_EUNSUP;
    else if (kernel && scratch_differs(kernel, &call, &rc)) failed++;
    while (pooled > 0) free(pool[--pooled]);
    return rc;
}

static const char *label;
static void result(int ok, const char *what, int op, int dtype)
{
    if (ok) {
        passed++;
        return;
    }
    failed++;
    printf("%s: %s (op %d, type %d)\n", label, what, op, dtype);
}

/* Errors are relative to |want| + grain, where the grain is the size at which terms cancel. bf16 and fp16 results
 * can differ by one unit. */
static double grain = 0.05;
static int close_to(const ps_view *got, const ps_view *want, double tolerance)
{
    if (got->dtype == PS_BF16) tolerance = tolerance > 0x1p-7 ? tolerance : 0x1p-7;
    if (got->dtype == PS_F16) tolerance = tolerance > 0x1p-10 ? tolerance : 0x1p-10;
    for (int64_t i = 0; i < want->numel; i++) {
        double a = get(got, place(got, i)), b = get(want, place(want, i));
        if (a == b || (isnan(a) && isnan(b)) || fabs(a - b) <= tolerance * (fabs(b) + grain)) continue;
        printf("  element %lld of %lld: %.9g, ref has %.9g\n", (long long)i, (long long)want->numel, a, b);
        return 0;
    }
    return 1;
}

/* Outputs are contiguous and have the given types and shapes like `shape`. For in-place ops (n_out 0), input 0 is
 * compared. */
static void check_op(int op, const void *attrs, int n_in, tensor *in, int n_out, const int *dtypes, int ndim,
                     const int64_t *shape, double tolerance)
{
    tensor want[2] = { { .first = 0 } }, got[2] = { { .first = 0 } }, first[2] = { { .first = 0 } };
    ps_view vin[8], vout[2];
    int judged = n_out ? n_out : 1;
    int last = in[0].v.numel >= 1 << 14 ? sets + 1 : sets - 1;      /* smaller sizes stay on one thread */
    for (int attempt = -1; attempt <= last; attempt++) {            /* ref, each instruction set, and the best set on
                                                                     * 1 and 3 threads */
        tensor *out = attempt < 0 ? want : got;
        ps_kernel kernel = attempt < 0 ? ref->kernel[op] : kernels[attempt < sets ? attempt : sets - 1][op];
        ps_set_threads(attempt == sets ? 1 : attempt == sets + 1 ? 3 : 2);
        for (int i = 0; i < n_in; i++) vin[i] = in[i].v;
        for (int i = 0; i < judged; i++) {
            out[i] = n_out ? tensor_new(dtypes[i], FLAT, ndim, shape) : tensor_clone(&in[0]);
            if (n_out) memset(out[i].buffer, 0, (size_t)out[i].nbytes), vout[i] = out[i].v;
            else vin[0] = vout[0] = out[0].v;
        }
        int rc = run(kernel, op, attrs, n_in, vin, judged, vout);
        int dtype = judged ? out[0].v.dtype : 0;
        if (attempt < 0) {
            result(rc == 0, "ref runs", op, dtype);
            continue;
        }
        result(rc == 0, "kernel runs", op, dtype);
        for (int i = 0; rc == 0 && i < judged; i++) {
            if (attempt == 0) {
                result(close_to(&out[i].v, &want[i].v, tolerance), "as ref", op, dtype);
                first[i] = tensor_clone(&out[i]);
            } else {
                const char *what = attempt < sets ? "same bits under each instruction set"
                                                  : "same bits on any number of threads";
                result(memcmp(out[i].buffer, first[i].buffer, (size_t)out[i].nbytes) == 0, what, op, dtype);
            }
        }
        for (int i = 0; i < judged; i++) free(got[i].buffer);
    }
    for (int i = 0; i < judged; i++) free(want[i].buffer), free(first[i].buffer);
}

/* -- cases -------------------------------------------------------------------------------------------------------- */
#define COUNT(a) (sizeof(a) / sizeof *(a))
typedef struct shape { int ndim; int64_t size[4]; } shape;
static const shape shapes[] = { { 0, { 0 } }, { 1, { 1 } }, { 1, { 37 } }, { 2, { 5, 3 } }, { 3, { 3, 17, 19 } },
                                { 2, { 33, 64 } }, { 4, { 2, 5, 3, 16 } }, { 1, { 2049 } }, { 2, { 130, 131 } } };
static const int lane_types[] = { PS_F32, PS_BF16, PS_F16 };

static void check_elementwise(int op, const void *attrs, int n_in, int in_dtype, int out_dtype, double limit,
                              int specials, double tolerance)
{
    static const enum layout seconds[LAYOUTS] = { FLAT, FLAT, TRANSPOSED, PADDED, STEPPED };
    for (size_t s = 0; s < COUNT(shapes); s++)
        for (int l = 0; l < (s < 7 ? LAYOUTS : PADDED); l++) {      /* fewer types for large shapes */
            tensor in[3];
            for (int i = 0; i < n_in; i++) {
                int dtype = op == PS_OP_where && i == 0 ? PS_BOOL : in_dtype;
                in[i] = tensor_new(dtype, i == 0 ? (enum layout)l : seconds[(l + i) % LAYOUTS], shapes[s].ndim,
                                   shapes[s].size);
                randomize(&in[i], limit, specials);
            }
            check_op(op, attrs, n_in, in, 1, &out_dtype, shapes[s].ndim, shapes[s].size, tolerance);
            for (int i = 0; i < n_in; i++) free(in[i].buffer);
        }
}

static const int64_t no_attrs[8];

static void test_unary(void)
{
    static const struct { int op; double limit; int specials; } plain[] = {
        { PS_OP_exp, 60, 1 }, { PS_OP_log, 9, 1 }, { PS_OP_sqrt, 9, 1 }, { PS_OP_rsqrt, 9, 1 },
        { PS_OP_reciprocal, 9, 1 }, { PS_OP_abs, 9, 1 }, { PS_OP_sign, 9, 1 }, { PS_OP_floor, 9, 1 },
        { PS_OP_ceil, 9, 1 }, { PS_OP_round, 9, 1 },
        { PS_OP_sin, 40, 1 }, { PS_OP_cos, 40, 1 }, { PS_OP_erf, 5, 1 }, { PS_OP_tanh, 6, 1 }, { PS_OP_sigmoid, 20, 1 },
        { PS_OP_relu, 5, 1 }, { PS_OP_silu, 20, 0 },
    };
    label = "unary";
    for (size_t t = 0; t < COUNT(lane_types); t++) {
        int T = lane_types[t];
        for (size_t i = 0; i < COUNT(plain); i++)
            check_elementwise(plain[i].op, no_attrs, 1, T, T, plain[i].limit, plain[i].specials, 1e-6);
        check_elementwise(PS_OP_affine, &(ps_attrs_affine){ -0.37, 1.7 }, 1, T, T, 9, 1, 1e-6);
        check_elementwise(PS_OP_clamp, &(ps_attrs_clamp){ -1.25, 2.5 }, 1, T, T, 9, 1, 1e-6);
        static const double exponents[] = { 2, 3, 0.5, -0.5, -1, 1.7, 0, 1 };
        for (size_t i = 0; i < COUNT(exponents); i++)
            check_elementwise(PS_OP_pow_scalar, &(ps_attrs_pow_scalar){ exponents[i] }, 1, T, T, 9, 0, 1e-6);
        grain = 10;
        for (int tanh_form = 0; tanh_form < 2; tanh_form++) {
            ps_attrs_gelu forward = { tanh_form };
            ps_attrs_gelu_backward backward = { tanh_form };
            check_elementwise(PS_OP_gelu, &forward, 1, T, T, 12, 0, 1e-7);
            check_elementwise(PS_OP_gelu_backward, &backward, 2, T, T, 12, 0, 2e-7);
        }
        check_elementwise(PS_OP_silu_backward, no_attrs, 2, T, T, 30, 0, 2e-7);
        grain = 0.05;
        check_elementwise(PS_OP_isfinite, no_attrs, 1, T, PS_BOOL, 9, 1, 0);
        check_elementwise(PS_OP_logical_not, no_attrs, 1, T, PS_BOOL, 9, 1, 0);
    }
    check_elementwise(PS_OP_isfinite, no_attrs, 1, PS_F64, PS_BOOL, 9, 1, 0);
}

static void test_binary(void)
{
    static const int ops[] = { PS_OP_add, PS_OP_sub, PS_OP_mul, PS_OP_maximum, PS_OP_minimum, PS_OP_div, PS_OP_pow };
    static const int compares[] = { PS_OP_eq, PS_OP_ne, PS_OP_lt, PS_OP_le, PS_OP_gt, PS_OP_ge, PS_OP_logical_and,
                                    PS_OP_logical_or };
    label = "binary";
    for (size_t t = 0; t < COUNT(lane_types); t++)
        for (size_t i = 0; i < COUNT(ops); i++)
            check_elementwise(ops[i], no_attrs, 2, lane_types[t], lane_types[t], 6, ops[i] != PS_OP_pow, 1e-6);
    for (size_t i = 0; i < 5; i++)
        for (int T = PS_I32; T <= PS_I64; T++) check_elementwise(ops[i], no_attrs, 2, T, T, 9, 0, 0);
    for (size_t i = 0; i < COUNT(compares); i++)
        for (int T = 0; T < PS_DTYPE_COUNT; T++) check_elementwise(compares[i], no_attrs, 2, T, PS_BOOL, 3, 1, 0);
    for (int T = 0; T < PS_DTYPE_COUNT; T++) check_elementwise(PS_OP_where, no_attrs, 3, T, T, 90, 1, 0);
}

/* Broadcasts [4, 1, 33] with [7, 33], [33] and a scalar. */
static void test_broadcast(void)
{
    static const int64_t out[] = { 4, 7, 33 }, a[] = { 4, 1, 33 }, b[] = { 7, 33 }, wide[] = { 301, 67 };
    label = "broadcast";
    for (size_t t = 0; t < COUNT(lane_types); t++) {
        int T = lane_types[t];
        tensor x = tensor_new(T, PADDED, 3, a), w = tensor_new(T, FLAT, 2, wide);
        randomize(&x, 5, 0);
        randomize(&w, 5, 0);
        for (int ndim = 0; ndim <= 2; ndim++) {
            tensor in[2] = { x, tensor_new(T, FLAT, ndim, b + 2 - ndim) };
            randomize(&in[1], 5, 0);
            check_op(PS_OP_mul, no_attrs, 2, in, 1, &T, 3, ndim == 2 ? out : (const int64_t[]){ 4, 1, 33 }, 1e-6);
            free(in[1].buffer);
            if (ndim == 2) continue;
            in[0] = w, in[1] = tensor_new(T, FLAT, ndim, wide + 2 - ndim);
            randomize(&in[1], 5, 0);
            check_op(PS_OP_add, no_attrs, 2, in, 1, &T, 2, wide, 1e-6);
            free(in[1].buffer);
        }
        free(x.buffer);
        free(w.buffer);
    }
}

static void test_copies(void)
{
    label = "copies";
    for (int to = 0; to < PS_DTYPE_COUNT; to++)
        for (int from = 0; from < PS_DTYPE_COUNT; from++) {
            if (to == from) check_elementwise(PS_OP_contiguous, no_attrs, 1, to, to, 99, 1, 0);
            check_elementwise(PS_OP_cast, &(ps_attrs_cast){ to }, 1, from, to, 120, 1, 0);
            for (size_t s = 0; s < COUNT(shapes); s++)
                for (int l = 0; l < (s < 7 ? REPEATED : FLAT + 1); l++) {
                    tensor in[2] = { tensor_new(to, (enum layout)l, shapes[s].ndim, shapes[s].size),
                                     tensor_new(from, (enum layout)((l + (int)s) % LAYOUTS), shapes[s].ndim,
                                                shapes[s].size) };
                    randomize(&in[1], 99, 0);
                    check_op(PS_OP_copy_, no_attrs, 2, in, 0, NULL, 0, NULL, 0);
                    free(in[0].buffer);
                    free(in[1].buffer);
                }
        }
    /* [B, T, H, D] viewed as [B, H, T, D], and a whole matrix transposed within a batch. */
    for (int T = 0; T < PS_DTYPE_COUNT; T++) {
        static const int64_t size[] = { 2, 40, 3, 64 }, seen[] = { 2, 3, 40, 64 }, turned[] = { 3, 64, 40, 2 };
        tensor x = tensor_new(T, FLAT, 4, size);
        randomize(&x, 99, 0);
        tensor y = x, z = x;
        y.v.shape[1] = 3, y.v.shape[2] = 40, y.v.stride[1] = x.v.stride[2], y.v.stride[2] = x.v.stride[1];
        check_op(PS_OP_contiguous, no_attrs, 1, &y, 1, &T, 4, seen, 0);
        static const int axes[] = { 2, 3, 1, 0 };
        for (int d = 0; d < 4; d++) z.v.shape[d] = x.v.shape[axes[d]], z.v.stride[d] = x.v.stride[axes[d]];
        check_op(PS_OP_contiguous, no_attrs, 1, &z, 1, &T, 4, turned, 0);
        free(x.buffer);
    }
}

static void test_inplace(void)
{
    label = "inplace";
    grain = 1;
    for (int T = 0; T < PS_DTYPE_COUNT; T++)
        for (size_t s = 0; s < COUNT(shapes); s++)
            for (int l = 0; l < REPEATED; l++) {
                tensor x = tensor_new(T, (enum layout)l, shapes[s].ndim, shapes[s].size);
                randomize(&x, 9, 0);
                double value = T == PS_F32 ? 0.1 : 3;
                check_op(PS_OP_fill_, &(ps_attrs_fill_){ value }, 1, &x, 0, NULL, 0, NULL, 0);
                if (l == FLAT && T != PS_BOOL)
                    check_op(PS_OP_arange_, &(ps_attrs_arange_){ 3, 2 }, 1, &x, 0, NULL, 0, NULL, 0);
                if (l == FLAT && T <= PS_F64)
                    check_op(PS_OP_uniform_, &(ps_attrs_uniform_){ -0.3, 0.7, 12345678901234, 0xfffffff0 }, 1, &x, 0,
                             NULL, 0, NULL, 0);
                if (l == FLAT && T <= PS_F16) {
                    check_op(PS_OP_scale_, &(ps_attrs_scale_){ 1.3 }, 1, &x, 0, NULL, 0, NULL, 1e-6);
                    check_op(PS_OP_normal_, &(ps_attrs_normal_){ 0.5, 2, 99, 7 }, 1, &x, 0, NULL, 0, NULL, 3e-6);
                }
                if (l == FLAT && T >= PS_I32 && T <= PS_U8)
                    check_op(PS_OP_randint_, &(ps_attrs_randint_){ 3, 200, 5, 1 }, 1, &x, 0, NULL, 0, NULL, 0);
                for (int other = 0; l == FLAT && T <= PS_F16 && other <= PS_F16; other++) {
                    tensor in[2] = { x, tensor_new(other, FLAT, shapes[s].ndim, shapes[s].size) };
                    randomize(&in[1], 9, 0);
                    check_op(PS_OP_axpy_, &(ps_attrs_axpy_){ -0.7 }, 2, in, 0, NULL, 0, NULL, 1e-6);
                    free(in[1].buffer);
                }
                free(x.buffer);
            }
}

/* The sizes have few and many entries of a sort, and several elements that agree in the upper bits of their keys. */
static void test_randperm(void)
{
    static const int64_t sizes[] = { 1, 10, 300, 4095, 4096, 70001 };
    label = "randperm";
    for (size_t i = 0; i < COUNT(sizes); i++) {
        tensor x = tensor_new(PS_I64, FLAT, 1, sizes + i);
        check_op(PS_OP_randperm_, &(ps_attrs_randperm_){ 7, 0xfffffff0 }, 1, &x, 0, NULL, 0, NULL, 0);
        free(x.buffer);
    }
}

/* Returns the shape of x without the dimensions in the bit set. */
static int kept(const ps_view *x, uint32_t bits, int64_t *out)
{
    int n = 0;
    for (int d = 0; d < x->ndim; d++)
        if (bits && !(bits >> d & 1)) out[n++] = x->shape[d];
    return n;
}

static void check_reduce(tensor *x, uint32_t bits)
{
    int64_t out[PS_MAX_DIMS];
    int T = x->v.dtype, ndim = kept(&x->v, bits, out), wide = T == PS_F64 ? PS_F64 : PS_F32, to_i64 = PS_I64;
    double tolerance = T == PS_F64 ? 1e-15 : 3e-6;
    if (!ps_dtype_is_float(T)) {
        check_op(PS_OP_sum, &(ps_attrs_sum){ bits, 0, 0 }, 1, x, 1, &to_i64, ndim, out, 0);
        check_op(PS_OP_amax, &(ps_attrs_amax){ bits, 0 }, 1, x, 1, &T, ndim, out, 0);
        check_op(PS_OP_amin, &(ps_attrs_amin){ bits, 0 }, 1, x, 1, &T, ndim, out, 0);
        return;
    }
    check_op(PS_OP_sum, &(ps_attrs_sum){ bits, 0, 0 }, 1, x, 1, &T, ndim, out, tolerance);
    check_op(PS_OP_sum, &(ps_attrs_sum){ bits, 0, 1 }, 1, x, 1, &wide, ndim, out, tolerance);
    check_op(PS_OP_mean, &(ps_attrs_mean){ bits, 0 }, 1, x, 1, &T, ndim, out, tolerance);
    if (T == PS_F64) return;
    check_op(PS_OP_amax, &(ps_attrs_amax){ bits, 0 }, 1, x, 1, &T, ndim, out, 0);
    check_op(PS_OP_amin, &(ps_attrs_amin){ bits, 0 }, 1, x, 1, &T, ndim, out, 0);
}

static void check_along(tensor *x, int dim)
{
    int64_t out[PS_MAX_DIMS];
    int T = x->v.dtype, to_i64 = PS_I64, ndim = kept(&x->v, 1u << dim, out);
    check_op(PS_OP_argmax, &(ps_attrs_argmax){ dim, 0 }, 1, x, 1, &to_i64, ndim, out, 0);
    check_op(PS_OP_argmin, &(ps_attrs_argmin){ dim - x->v.ndim, 0 }, 1, x, 1, &to_i64, ndim, out, 0);
    for (int reverse = 0; reverse < 2; reverse++) {
        ps_attrs_cumsum a = { dim, reverse };
        tensor flat = tensor_new(T, FLAT, x->v.ndim, x->v.shape);
        randomize(&flat, 3, 0);
        check_op(PS_OP_cumsum, &a, 1, &flat, 1, &T, x->v.ndim, x->v.shape, 1e-6);
        free(flat.buffer);
    }
    if (dim != x->v.ndim - 1) return;
    for (int k = 1; k <= 40 && k <= x->v.shape[dim]; k += 13) {
        memcpy(out, x->v.shape, sizeof x->v.shape);
        out[dim] = k;
        check_op(PS_OP_topk, &(ps_attrs_topk){ k }, 1, x, 2, (const int[]){ T, PS_I64 }, x->v.ndim, out, 0);
    }
}

static void test_reduce(void)
{
    static const shape sizes[] = { { 1, { 37 } }, { 1, { 17001 } }, { 2, { 1, 700 } }, { 2, { 301, 67 } },
                                   { 3, { 3, 150, 19 } }, { 3, { 7, 1, 80 } }, { 4, { 2, 5, 3, 16 } } };
    static const int types[] = { PS_F32, PS_BF16, PS_F16, PS_I32, PS_I64, PS_U8, PS_BOOL, PS_F64 };
    label = "reduce";
    grain = 10;
    for (size_t t = 0; t < COUNT(types); t++)
        for (size_t s = 0; s < COUNT(sizes); s++)
            for (int l = 0; l < (s == 1 || s == 3 ? (t < 2 ? PADDED : 1) : LAYOUTS); l++)      /* fewer types for
                                                                                                * large shapes */
                for (int specials = 0; specials <= (l == FLAT && ps_dtype_is_float(types[t])); specials++) {
                    tensor x = tensor_new(types[t], (enum layout)l, sizes[s].ndim, sizes[s].size);
                    randomize(&x, 3, 0);
                    if (specials) put(&x.v, 11, NAN), put(&x.v, 20, INFINITY), put(&x.v, 30, -INFINITY);
                    for (uint32_t bits = 0; bits < 1u << sizes[s].ndim; bits++) check_reduce(&x, bits);
                    for (int d = 0; d < sizes[s].ndim && types[t] <= PS_F16; d++) check_along(&x, d);
                    free(x.buffer);
                }
}

static void test_concat(void)
{
    label = "concat";
    for (int dim = -1; dim < 3; dim++)
        for (int T = 0; T < PS_DTYPE_COUNT; T++) {
            int d = dim < 0 ? 2 : dim;
            int64_t size[3] = { 3, 4, 5 }, out[3] = { 3, 4, 5 };
            tensor in[3];
            out[d] = 0;
            for (int i = 0; i < 3; i++) {
                size[d] = i + 2;
                out[d] += size[d];
                in[i] = tensor_new(T, (enum layout)i, 3, size);
                randomize(&in[i], 99, 0);
            }
            check_op(PS_OP_concat, &(ps_attrs_concat){ dim }, 3, in, 1, &T, 3, out, 0);
            for (int i = 0; i < 3; i++) free(in[i].buffer);
        }
}

int main(void)
{
    if (ps_backend_ref_open(&ref) < 0) return 1;
    fill_kernels();
    test_unary();
    test_binary();
    test_broadcast();
    test_copies();
    test_inplace();
    test_randperm();
    test_reduce();
    test_concat();
    ref->close(ref);
    printf("%d instruction sets: %d passed, %d failed\n", sets, passed, failed);
    return failed ? 1 : 0;
}
