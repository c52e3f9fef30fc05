/* SPDX-License-Identifier: BSD-3-Clause
 * Ops that compute each element of the output from one element of each input. any_kernel supports any strides and
 * types, and computes in fp32, fp64 or int64. flat_kernel processes 16 bytes at a time and requires that all tensors
 * have the same float type and the same layout. Both kernels choose the op at run time, by a branch that all threads
 * take in the same way. For the ops of a transformer's step, the op is a template parameter instead. bf16 and fp16
 * results are rounded once. */
#include "backend/cuda/columns.h"
#include "base/divide.h"

struct settings { double alpha, beta, gamma; };

/* -- one element --------------------------------------------------------------------------------------------------- */
#define SQRT_HALF 0.70710678118654752440
#define SQRT_2_OVER_PI 0.79788456080286535588
#define INV_SQRT_2PI 0.39894228040143267794
#define GELU_CUBIC 0.044715

/* Computes 0.5 * (1 + tanh(u)) as 1 / (1 + exp(-2 * u)), because this form is precise for small values. */
template <class A> DEV A gelu_tanh(A x)
{
    A u = (A)SQRT_2_OVER_PI * (x + (A)GELU_CUBIC * x * x * x);
    return x / (1 + exp(-2 * u));
}
/* Like gelu_tanh(), but faster and less precise. It is used for results that are rounded to bf16 or fp16. */
DEV float gelu_tanh_quick(float x)
{
    float u = (float)SQRT_2_OVER_PI * (x + (float)GELU_CUBIC * x * x * x);
    return x * quick_inverse(1 + quick_exp(-2 * u));
}
DEV float gelu_tanh_slope_quick(float x)
{
    float u = (float)SQRT_2_OVER_PI * (x + (float)GELU_CUBIC * x * x * x), s = quick_inverse(1 + quick_exp(-2 * u));
    return s + x * 2 * s * (1 - s) * (float)SQRT_2_OVER_PI * (1 + 3 * (float)GELU_CUBIC * x * x);
}
template <class A> DEV A gelu_tanh_slope(A x)
{
    A u = (A)SQRT_2_OVER_PI * (x + (A)GELU_CUBIC * x * x * x), s = 1 / (1 + exp(-2 * u));
    return s + x * 2 * s * (1 - s) * (A)SQRT_2_OVER_PI * (1 + 3 * (A)GELU_CUBIC * x * x);
}
template <class A> DEV A gelu_erf(A x) { return (A)0.5 * x * erfc(-x * (A)SQRT_HALF); }
template <class A> DEV A gelu_erf_slope(A x)
{
    return (A)0.5 * erfc(-x * (A)SQRT_HALF) + x * (A)INV_SQRT_2PI * exp((A)-0.5 * x * x);
}
template <class A> DEV A silu_slope(A x)
{
    A s = 1 / (1 + exp(-x));
    return s * (1 + x * (1 - s));
}

/* Computes the activation with index `act` of act_mul. */
template <class A> DEV A act_of(int act, A x)
{
    return act == 0 ? x / (1 + exp(-x)) : act == 1 ? gelu_erf(x) : gelu_tanh(x);
}
template <class A> DEV A act_slope(int act, A x)
{
    return act == 0 ? silu_slope(x) : act == 1 ? gelu_erf_slope(x) : gelu_tanh_slope(x);
}

/* The largest finite number of the float type A. */
#define LARGEST ((A)(sizeof(A) == 4 ? 3.402823466e38 : 1.7976931348623157e308))

template <class A> DEV A hard_gate(A x) { return (x < -3 ? 0 : x > 3 ? 6 : x + 3) / 6; }
template <class A> DEV A mish_gate(A x) { return tanh(x > 20 ? x : log1p(exp(x))); }
template <class A> DEV A logsigmoid(A x) { return (x > 0 ? 0 : x) - log1p(exp(-fabs(x))); }

/* Computes the derivative of one of several functions. `of` is the attribute of the op slope that selects the
 * function. */
template <class A> DEV A slope_at(int of, A x, A delta)
{
    if (of == 0) return fabs(x) < 3 ? (A)(1.0 / 6) : 0;
    if (of == 1) return x <= -3 ? 0 : x < 3 ? x / 3 + (A)0.5 : 1;
    if (of == 3) return 1 / (1 + exp(x));
    if (of == 4) return fabs(x) >= delta ? (A)((x > 0) - (x < 0)) : x / delta;
    A c = x < -80 ? -80 : x, t = mish_gate(c);
    return t + c / (1 + exp(-c)) * (1 - t * t);
}

/* Computes an op on floats. A is float or double. Its type selects the functions of <math.h>. */
template <class A> DEV A of_floats(int op, A a, A b, settings s)
{
    switch (op) {
    case PS_OP_add: return a + b;
    case PS_OP_sub: return a - b;
    case PS_OP_mul: return a * b;
    case PS_OP_div: return a / b;
    case PS_OP_pow: return pow(a, b);
    case PS_OP_maximum: return a > b || a != a ? a : b;
    case PS_OP_minimum: return a < b || a != a ? a : b;
    case PS_OP_remainder: return (A)ps_divide(PS_REMAINDER, a, b);
    case PS_OP_fmod: return fmod(a, b);                      /* the result of fmod is exact in every float type */
    case PS_OP_floor_divide: return (A)ps_divide(PS_FLOOR_DIVIDE, a, b);
    case PS_OP_lerp: return fabs(s.alpha) < 0.5 ? a + (A)s.alpha * (b - a) : b - (A)(1 - s.alpha) * (b - a);
    case PS_OP_prelu: return a > 0 ? a : b * a;
    case PS_OP_logit_entropy: return (1 - b) * a - logsigmoid(a);
    case PS_OP_eq: return a == b;
    case PS_OP_ne: return a != b;
    case PS_OP_lt: return a < b;
    case PS_OP_le: return a <= b;
    case PS_OP_gt: return a > b;
    case PS_OP_ge: return a >= b;
    case PS_OP_logical_and: return a != 0 && b != 0;
    case PS_OP_logical_or: return a != 0 || b != 0;
    case PS_OP_affine: return fma((A)s.alpha, a, (A)s.beta);
    case PS_OP_scale_: return (A)s.alpha * a;
    case PS_OP_axpy_: return fma((A)s.alpha, b, a);
    case PS_OP_pow_scalar: return pow(a, (A)s.alpha);
    case PS_OP_clamp: a = a < (A)s.alpha ? (A)s.alpha : a; return a > (A)s.beta ? (A)s.beta : a;
    case PS_OP_exp: return exp(a);
    case PS_OP_log: return log(a);
    case PS_OP_sqrt: return sqrt(a);
    case PS_OP_rsqrt: return 1 / sqrt(a);
    case PS_OP_reciprocal: return 1 / a;
    case PS_OP_abs: return fabs(a);
    case PS_OP_sign: return (A)((a > 0) - (a < 0));
    case PS_OP_floor: return floor(a);
    case PS_OP_ceil: return ceil(a);
    case PS_OP_round: return rint(a);
    case PS_OP_trunc: return trunc(a);
    case PS_OP_nan_to_num: return (A)(a != a ? s.alpha : fabs(a) <= LARGEST ? a : a > 0 ? s.beta : s.gamma);
    case PS_OP_hardsigmoid: return hard_gate(a);
    case PS_OP_hardswish: return a * hard_gate(a);
    case PS_OP_mish: return a * mish_gate(a);
    case PS_OP_logsigmoid: return logsigmoid(a);
    case PS_OP_huber: return fabs(a) < (A)s.alpha ? a * a * (A)s.beta : fabs(a) - (A)s.gamma;
    case PS_OP_slope: return b * slope_at((int)s.alpha, a, (A)s.beta);
    case PS_OP_sin: return sin(a);
    case PS_OP_cos: return cos(a);
    case PS_OP_erf: return erf(a);
    case PS_OP_tanh: return tanh(a);
    case PS_OP_sigmoid: return 1 / (1 + exp(-a));
    case PS_OP_relu: return a < 0 ? 0 : a;                  /* NaN stays NaN, and -0 stays -0 */
    case PS_OP_silu: return a / (1 + exp(-a));
    case PS_OP_log1p: return log1p(a);
    case PS_OP_expm1: return expm1(a);
    case PS_OP_leaky_relu: return a > 0 ? a : (A)s.alpha * a;
    case PS_OP_elu: return a > 0 ? a : (A)s.alpha * expm1(a);
    case PS_OP_softplus: return (A)s.alpha * a > (A)s.beta ? a : log1p(exp((A)s.alpha * a)) / (A)s.alpha;
    case PS_OP_silu_backward: return b * silu_slope(a);
    case PS_OP_gelu: return s.alpha != 0 ? gelu_tanh(a) : gelu_erf(a);
    case PS_OP_gelu_backward: return b * (s.alpha != 0 ? gelu_tanh_slope(a) : gelu_erf_slope(a));
    case PS_OP_act_mul: return b * act_of((int)s.alpha, a);
    case PS_OP_isfinite: return fabs(a) <= LARGEST;
    default: return a == 0;                                 /* logical_not */
    }
}

/* Computes an op on integers. Results wrap around. Arithmetic is unsigned, because signed overflow is undefined. */
DEV int64_t of_ints(int op, int64_t a, int64_t b, settings s)
{
    switch (op) {
    case PS_OP_remainder: return ps_divide_ints(PS_REMAINDER, a, b);
    case PS_OP_fmod: return ps_divide_ints(PS_FMOD, a, b);
    case PS_OP_floor_divide: return ps_divide_ints(PS_FLOOR_DIVIDE, a, b);
    case PS_OP_add: return (int64_t)((uint64_t)a + (uint64_t)b);
    case PS_OP_sub: return (int64_t)((uint64_t)a - (uint64_t)b);
    case PS_OP_mul: return (int64_t)((uint64_t)a * (uint64_t)b);
    case PS_OP_maximum: return a > b ? a : b;
    case PS_OP_minimum: return a < b ? a : b;
    case PS_OP_eq: return a == b;
    case PS_OP_ne: return a != b;
    case PS_OP_lt: return a < b;
    case PS_OP_le: return a <= b;
    case PS_OP_gt: return a > b;
    case PS_OP_ge: return a >= b;
    case PS_OP_logical_and: return a != 0 && b != 0;
    case PS_OP_logical_or: return a != 0 || b != 0;
    case PS_OP_affine: return (int64_t)((uint64_t)a * (uint64_t)(int64_t)s.alpha + (uint64_t)(int64_t)s.beta);
    case PS_OP_clamp: {
        int64_t low = to_int(ceil(s.alpha), INT64_MIN, INT64_MAX), high = to_int(floor(s.beta), INT64_MIN, INT64_MAX);
        a = a < low ? low : a;
        return a > high ? high : a;
    }
    case PS_OP_abs: return a < 0 ? (int64_t)(0 - (uint64_t)a) : a;
    case PS_OP_sign: return (a > 0) - (a < 0);
    default: return a == 0;                                 /* logical_not */
    }
}

template <class A> struct compute;
template <> struct compute<float> {
    DEV float of(int op, float a, float b, settings s) { return of_floats(op, a, b, s); }
};
template <> struct compute<double> {
    DEV double of(int op, double a, double b, settings s)
    {
        if (op == PS_OP_affine) return __dadd_rn(__dmul_rn(s.alpha, a), s.beta);    /* if y has an integer type, the
                                                                                     * caller truncates the result */
        return of_floats(op, a, b, s);
    }
};
template <> struct compute<int64_t> {
    DEV int64_t of(int op, int64_t a, int64_t b, settings s) { return of_ints(op, a, b, s); }
};

/* -- any strides --------------------------------------------------------------------------------------------------- */
struct operands { void *y, *a, *b; int y_type, a_type, b_type; };

/* b is NULL for ops with one input. */
template <class A> static __global__ void any_kernel(int op, settings s, operands p, places<3> x)
{
    for (int64_t i = FIRST_ELEMENT; i < x.numel; i += ALL_THREADS) {
        int64_t at[3];
        locate(x, i, at);
        A a = access<A>::load(p.a, p.a_type, at[1]), b = p.b ? access<A>::load(p.b, p.b_type, at[2]) : (A)0;
        access<A>::store(p.y, p.y_type, at[0], compute<A>::of(op, a, b, s));
    }
}

/* -- 16 bytes at a time: all operands of type T, in the same order in memory --------------------------------------- */
/* If OP is not negative, it replaces op, so that the compiler knows the op. */
template <class T, int OP>
DEV typename type_info<T>::acc flat_element(int op, typename type_info<T>::acc a, typename type_info<T>::acc b,
                                            settings s)
{
    if (sizeof(T) == 2 && s.alpha != 0) {
        if (OP == PS_OP_gelu) return gelu_tanh_quick(a);
        if (OP == PS_OP_gelu_backward) return b * gelu_tanh_slope_quick(a);
    }
    return of_floats<typename type_info<T>::acc>(OP >= 0 ? OP : op, a, b, s);
}

template <class T, int OP>
static __global__ void flat_kernel(int op, settings s, T *y, const T *a, const T *b, int64_t n)
{
    const int W = pack<T>::n;
    typedef typename type_info<T>::acc A;
    int64_t packs = n / W;
    for (int64_t i = FIRST_ELEMENT; i < packs; i += ALL_THREADS) {
        pack<T> va = load_pack(a + i * W), vb = b ? load_pack(b + i * W) : va, vy;
#pragma unroll
        for (int k = 0; k < W; k++)
            vy.v[k] = down<T>(flat_element<T, OP>(op, up(va.v[k]), up(vb.v[k]), s));
        store_pack(y + i * W, vy);
    }
    int64_t i = packs * W + FIRST_ELEMENT;
    if (i >= n) return;
    A last = b ? up(b[i]) : (A)0;
    y[i] = down<T>(flat_element<T, OP>(op, up(a[i]), last, s));
}

template <class T> static int run_flat(int op, settings s, const operands &p, int64_t n)
{
    T *y = (T *)p.y;
    const T *a = (const T *)p.a, *b = (const T *)p.b;
    dim3 blocks = blocks_for(ps_cu_div_up(n, pack<T>::n));
    auto kernel = flat_kernel<T, -1>;
    switch (op) {
    case PS_OP_add: kernel = flat_kernel<T, PS_OP_add>; break;
    case PS_OP_gelu: kernel = flat_kernel<T, PS_OP_gelu>; break;
    case PS_OP_gelu_backward: kernel = flat_kernel<T, PS_OP_gelu_backward>; break;
    case PS_OP_scale_: kernel = flat_kernel<T, PS_OP_scale_>; break;
    case PS_OP_act_mul: kernel = flat_kernel<T, PS_OP_act_mul>; break;
    default: break;
    }
    PS_LAUNCH(kernel, blocks, THREADS, 0, ps_cu->compute, op, s, y, a, b, n);
    return 0;
}

/* -- the gradient of GELU (by tanh), with the sums of its columns -------------------------------------------------- */
template <class T> struct slope_rows {
    struct both { pack<T> pre, dy; };
    const T *pre;
    T *dy;                                           /* replaced by the gradient */
    int64_t ld;
    __device__ __forceinline__ both load(int64_t i, int64_t j) const
    {
        int64_t at = j * ld + i * pack<T>::n;
        both loaded = { load_pack(pre + at), load_pack(dy + at) };
        return loaded;
    }
    __device__ __forceinline__ pack<T> finish(int64_t i, int64_t j, const both &loaded) const
    {
        settings by_tanh = { 1, 0, 0 };
        pack<T> out;
#pragma unroll
        for (int k = 0; k < pack<T>::n; k++)
            out.v[k] = down<T>(flat_element<T, PS_OP_gelu_backward>(PS_OP_gelu_backward, up(loaded.pre.v[k]),
                                                                    up(loaded.dy.v[k]), by_tanh));
        store_pack(dy + j * ld + i * pack<T>::n, out);
        return out;
    }
};

template <class T>
KERNEL_UP_TO(COLUMN_THREADS * ROW_GROUPS, 2) slope_columns_kernel(target t, const T *pre, T *dy, int64_t cols,
                                                                   int64_t rows)
{
    sum_columns_of<T, 2>(t, cols, rows, slope_rows<T>{ pre, dy, cols });
}

template <class T>
static int run_slope_columns(const target &t, const ps_view *pre, const ps_view *d, int64_t cols, int64_t parts)
{
    auto kernel = slope_columns_kernel<T>;
    PS_LAUNCH(kernel, column_blocks(cols / pack<T>::n, parts), COLUMN_THREADS * ROW_GROUPS, 0, ps_cu->compute, t,
              (const T *)pre->data, (T *)d->data, cols, d->numel / cols);
    return ps_cuda_launched();
}

int ps_cuda_gelu_slope_sums(ps_call *call, const ps_view *pre, const ps_view *d, const ps_view *db, bool add)
{
    int64_t cols = ps_cu_last(d);
    target t = { NULL, db->data, db->dtype, SUM, add, 1 };
    ps_view rows = *d;
    rows.ndim = 2, rows.shape[0] = d->numel / cols, rows.shape[1] = cols, rows.stride[0] = cols, rows.stride[1] = 1;
    ps_cu_reduction r = ps_cu_reduce(&ps_cu->card, &rows, 1);
    if (r.parts > 1) {
        t.parts = call->scratch(call, (size_t)ps_cu_reduce_nbytes(&r));
        if (!t.parts) return PS_ENOMEM;
    }
    PS_TRY(d->dtype == PS_F32 ? run_slope_columns<float>(t, pre, d, cols, r.parts)
           : d->dtype == PS_BF16 ? run_slope_columns<bf16>(t, pre, d, cols, r.parts)
                                 : run_slope_columns<f16>(t, pre, d, cols, r.parts));
    return r.parts > 1 ? ps_cuda_combine_sums(&t, r.kept, r.parts) : 0;
}

static bool has_int_form(int op)
{
    return (op >= PS_OP_add && op <= PS_OP_logical_or && op != PS_OP_div && op != PS_OP_pow) || op == PS_OP_affine ||
           op == PS_OP_clamp || op == PS_OP_abs || op == PS_OP_sign || op == PS_OP_logical_not;
}

static bool whole(double x) { return x == trunc(x) && fabs(x) < 9223372036854775808.0; }

/* Computes y = op(a, b). If b is NULL, computes y = op(a). */
static int run(int op, settings s, const ps_view *y, const ps_view *a, const ps_view *b)
{
    const ps_view *all[3] = { y, a, b ? b : a };
    operands p = { y->data, a->data, b ? b->data : NULL, y->dtype, a->dtype, b ? b->dtype : 0 };
    places<3> x = make_places<3>(y->ndim, y->shape, all);
    if (x.numel == 0) return 0;
    bool ints = !ps_dtype_is_float(a->dtype) && (!b || !ps_dtype_is_float(b->dtype));
    bool flat = is_flat(x, 0) && is_flat(x, 1) && is_flat(x, 2) && a->dtype == y->dtype &&
                (!b || b->dtype == y->dtype) && y->dtype <= PS_F16 && aligned16(p.y) && aligned16(p.a) &&
                (!b || aligned16(p.b));
    if (flat) {
        if (y->dtype == PS_F32) return run_flat<float>(op, s, p, x.numel);
        return y->dtype == PS_BF16 ? run_flat<bf16>(op, s, p, x.numel) : run_flat<f16>(op, s, p, x.numel);
    }
    bool exact = ints && has_int_form(op) && (op != PS_OP_affine || (whole(s.alpha) && whole(s.beta)));
    bool wide = ints || a->dtype == PS_F64 || (b && b->dtype == PS_F64) || y->dtype == PS_F64;
    auto kernel = exact ? any_kernel<int64_t> : wide ? any_kernel<double> : any_kernel<float>;
    PS_LAUNCH(kernel, blocks_for(x.numel), THREADS, 0, ps_cu->compute, op, s, p, x);
    return 0;
}

static int plain(ps_call *call)
{
    settings s = { 0, 0, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], call->n_in > 1 ? &call->in[1] : NULL);
}

static int affine(ps_call *call)
{
    const ps_attrs_affine *a = (const ps_attrs_affine *)call->attrs;
    settings s = { a->alpha, a->beta, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int clamp(ps_call *call)
{
    const ps_attrs_clamp *a = (const ps_attrs_clamp *)call->attrs;
    settings s = { a->low, a->high, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int pow_scalar(ps_call *call)
{
    settings s = { ((const ps_attrs_pow_scalar *)call->attrs)->exponent, 0, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int nan_to_num(ps_call *call)
{
    const ps_attrs_nan_to_num *a = (const ps_attrs_nan_to_num *)call->attrs;
    settings s = { a->nan, a->high, a->low };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int huber(ps_call *call)
{
    double delta = ((const ps_attrs_huber *)call->attrs)->delta;
    settings s = { delta, 0.5 / delta, 0.5 * delta };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int slope(ps_call *call)
{
    const ps_attrs_slope *a = (const ps_attrs_slope *)call->attrs;
    settings s = { (double)a->of, a->delta, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], &call->in[1]);
}

static int lerp(ps_call *call)
{
    settings s = { ((const ps_attrs_lerp *)call->attrs)->weight, 0, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], &call->in[1]);
}

static int leaky_relu(ps_call *call)
{
    settings s = { ((const ps_attrs_leaky_relu *)call->attrs)->slope, 0, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int elu(ps_call *call)
{
    settings s = { ((const ps_attrs_elu *)call->attrs)->alpha, 0, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int softplus(ps_call *call)
{
    const ps_attrs_softplus *a = (const ps_attrs_softplus *)call->attrs;
    settings s = { a->beta, a->threshold, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int gelu(ps_call *call)
{
    settings s = { (double)((const ps_attrs_gelu *)call->attrs)->tanh, 0, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], NULL);
}

static int gelu_backward(ps_call *call)
{
    settings s = { (double)((const ps_attrs_gelu_backward *)call->attrs)->tanh, 0, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], &call->in[1]);
}

static int act_mul(ps_call *call)
{
    settings s = { (double)((const ps_attrs_act_mul *)call->attrs)->act, 0, 0 };
    return run(call->op, s, &call->out[0], &call->in[0], &call->in[1]);
}

/* Computes dx and dup, either of which can be NULL. All operands are contiguous. */
template <class T>
static __global__ void act_mul_backward_kernel(int act, const T *x, const T *up_, const T *dy, T *dx, T *dup, int64_t n,
                                               bool aligned)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n;
    int64_t packs = aligned ? n / W : 0;
    for (int64_t i = FIRST_ELEMENT; i < packs; i += ALL_THREADS) {
        pack<T> vx = load_pack(x + i * W), vu = load_pack(up_ + i * W), vd = load_pack(dy + i * W), gx, gu;
#pragma unroll
        for (int k = 0; k < W; k++) {
            A a = up(vx.v[k]), d = up(vd.v[k]);
            gx.v[k] = down<T>(d * up(vu.v[k]) * act_slope<A>(act, a));
            gu.v[k] = down<T>(d * act_of<A>(act, a));
        }
        if (dx) store_pack(dx + i * W, gx);
        if (dup) store_pack(dup + i * W, gu);
    }
    for (int64_t i = packs * W + FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        A a = up(x[i]), d = up(dy[i]);
        if (dx) dx[i] = down<T>(d * up(up_[i]) * act_slope<A>(act, a));
        if (dup) dup[i] = down<T>(d * act_of<A>(act, a));
    }
}

template <class T> static int run_act_mul_backward(ps_call *call, int act)
{
    const ps_view *in = call->in, *out = call->out;
    T *dx = ps_has(&out[0]) ? (T *)out[0].data : NULL, *dup = ps_has(&out[1]) ? (T *)out[1].data : NULL;
    bool aligned = aligned16(in[0].data) && aligned16(in[1].data) && aligned16(in[2].data) && aligned16(dx) &&
                   aligned16(dup);
    int64_t n = in[0].numel;
    auto kernel = act_mul_backward_kernel<T>;
    PS_LAUNCH(kernel, blocks_for(aligned ? ps_cu_div_up(n, pack<T>::n) : n), THREADS, 0, ps_cu->compute, act,
              (const T *)in[0].data, (const T *)in[1].data, (const T *)in[2].data, dx, dup, n, aligned);
    return 0;
}

static int act_mul_backward(ps_call *call)
{
    int act = ((const ps_attrs_act_mul_backward *)call->attrs)->act;
    if (call->in[0].numel == 0) return 0;
    return BY_FLOAT(call->in[0].dtype, run_act_mul_backward, call, act);
}

static int scale_(ps_call *call)
{
    settings s = { ((const ps_attrs_scale_ *)call->attrs)->alpha, 0, 0 };
    return run(call->op, s, &call->in[0], &call->in[0], NULL);
}

static int axpy_(ps_call *call)
{
    settings s = { ((const ps_attrs_axpy_ *)call->attrs)->alpha, 0, 0 };
    return run(call->op, s, &call->in[0], &call->in[0], &call->in[1]);
}

/* Multiplies x by alpha and by a factor in device memory (`by`), so that the host need not wait for the factor. */
template <class T> static __global__ void scale_by_kernel(T *x, int64_t n, bool aligned, double alpha, const void *by,
                                                          int by_type)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n;
    double factor = alpha * load_d(by, by_type, 0);
    if (factor == 1) return;
    A f = (A)factor;
    int64_t packs = aligned ? n / W : 0;
    for (int64_t i = FIRST_ELEMENT; i < packs; i += ALL_THREADS) {
        pack<T> v = load_pack(x + i * W);
#pragma unroll
        for (int k = 0; k < W; k++) v.v[k] = down<T>(f * up(v.v[k]));
        store_pack(x + i * W, v);
    }
    for (int64_t i = packs * W + FIRST_ELEMENT; i < n; i += ALL_THREADS) x[i] = down<T>(f * up(x[i]));
}

template <class T> static int run_scale_by(ps_call *call)
{
    const ps_view *x = &call->in[0], *by = &call->in[1];
    double alpha = ((const ps_attrs_scale_by_ *)call->attrs)->alpha;
    bool aligned = aligned16(x->data);
    auto kernel = scale_by_kernel<T>;
    PS_LAUNCH(kernel, blocks_for(aligned ? ps_cu_div_up(x->numel, pack<T>::n) : x->numel), THREADS, 0, ps_cu->compute,
              (T *)x->data, x->numel, aligned, alpha, (const void *)by->data, by->dtype);
    return 0;
}

static int scale_by_(ps_call *call)
{
    if (call->in[0].numel == 0) return 0;
    switch (call->in[0].dtype) {
    case PS_F32: return run_scale_by<float>(call);
    case PS_BF16: return run_scale_by<bf16>(call);
    case PS_F16: return run_scale_by<f16>(call);
    default: return run_scale_by<double>(call);
    }
}

/* -- where --------------------------------------------------------------------------------------------------------- */
static __global__ void where_kernel(operands p, const void *cond, int cond_type, places<4> x)
{
    for (int64_t i = FIRST_ELEMENT; i < x.numel; i += ALL_THREADS) {
        int64_t at[4];
        locate(x, i, at);
        bool first = load_d(cond, cond_type, at[3]) != 0;
        const void *from = first ? p.a : p.b;
        int type = first ? p.a_type : p.b_type;
        int64_t j = first ? at[1] : at[2];
        if (type > PS_F64) store_i(p.y, p.y_type, at[0], load_i(from, type, j));
        else store_d(p.y, p.y_type, at[0], load_d(from, type, j));
    }
}

static int where(ps_call *call)
{
    const ps_view *y = &call->out[0], *cond = &call->in[0], *a = &call->in[1], *b = &call->in[2];
    const ps_view *all[4] = { y, a, b, cond };
    places<4> x = make_places<4>(y->ndim, y->shape, all);
    operands p = { y->data, a->data, b->data, y->dtype, a->dtype, b->dtype };
    if (x.numel == 0) return 0;
    PS_LAUNCH(where_kernel, blocks_for(x.numel), THREADS, 0, ps_cu->compute, p, cond->data, cond->dtype, x);
    return 0;
}

void ps_cuda_fill_elementwise(ps_kernel *k)
{
    static const int ops[] = {
        PS_OP_add, PS_OP_sub, PS_OP_mul, PS_OP_div, PS_OP_pow, PS_OP_maximum, PS_OP_minimum, PS_OP_eq, PS_OP_ne,
        PS_OP_lt, PS_OP_le, PS_OP_gt, PS_OP_ge, PS_OP_logical_and, PS_OP_logical_or, PS_OP_exp, PS_OP_log, PS_OP_sqrt,
        PS_OP_rsqrt, PS_OP_reciprocal, PS_OP_abs, PS_OP_sign, PS_OP_floor, PS_OP_ceil, PS_OP_round, PS_OP_sin,
        PS_OP_cos, PS_OP_erf, PS_OP_tanh, PS_OP_sigmoid, PS_OP_relu, PS_OP_silu, PS_OP_silu_backward, PS_OP_isfinite,
        PS_OP_log1p, PS_OP_expm1, PS_OP_logical_not, PS_OP_remainder, PS_OP_fmod, PS_OP_floor_divide, PS_OP_prelu,
        PS_OP_logit_entropy, PS_OP_trunc, PS_OP_hardsigmoid, PS_OP_hardswish, PS_OP_mish, PS_OP_logsigmoid,
    };
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) k[ops[i]] = plain;
    k[PS_OP_affine] = affine;
    k[PS_OP_clamp] = clamp;
    k[PS_OP_pow_scalar] = pow_scalar;
    k[PS_OP_nan_to_num] = nan_to_num;
    k[PS_OP_huber] = huber;
    k[PS_OP_slope] = slope;
    k[PS_OP_lerp] = lerp;
    k[PS_OP_leaky_relu] = leaky_relu;
    k[PS_OP_elu] = elu;
    k[PS_OP_softplus] = softplus;
    k[PS_OP_gelu] = gelu;
    k[PS_OP_gelu_backward] = gelu_backward;
    k[PS_OP_act_mul] = act_mul;
    k[PS_OP_act_mul_backward] = act_mul_backward;
    k[PS_OP_scale_] = scale_;
    k[PS_OP_scale_by_] = scale_by_;
    k[PS_OP_axpy_] = axpy_;
    k[PS_OP_where] = where;
}
