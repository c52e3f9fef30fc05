/* SPDX-License-Identifier: BSD-3-Clause
 * Copies, conversions, and ops that compute each element of the output from one element of each input. */
#include "base/divide.h"
#include "ref.h"

static bool is_int(const ps_view *v) { return !ps_dtype_is_float(v->dtype); }
static bool is_whole(double x) { return x == trunc(x) && fabs(x) < 0x1p63; }

/* -- copies and types ------------------------------------------------------------------------------------------- */
int ref_contiguous(ps_call *call) { ref_copy(&call->out[0], &call->in[0]); return 0; }
int ref_cast(ps_call *call) { ref_copy(&call->out[0], &call->in[0]); return 0; }
int ref_copy_(ps_call *call) { ref_copy(&call->in[0], &call->in[1]); return 0; }

int ref_fill_(ps_call *call)
{
    const ps_attrs_fill_ *a = call->attrs;
    ps_view x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < x.numel; i++) ref_store(&x, ref_at(&x, i), a->value);
    return 0;
}

int ref_arange_(ps_call *call)
{
    const ps_attrs_arange_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    bool exact = is_int(x) && is_whole(a->start) && is_whole(a->step);
    for (int64_t i = 0; i < x->numel; i++) {
        if (exact)
            ref_store_int(x, i, (int64_t)((uint64_t)(int64_t)a->start + (uint64_t)i * (uint64_t)(int64_t)a->step));
        else
            ref_store(x, i, a->start + (double)i * a->step);
    }
    return 0;
}

/* Stores alpha * x + beta for an integer x. If alpha and beta are whole numbers, the result is exact. Otherwise the
 * result is truncated to an integer. */
static void store_affine_int(const ps_view *y, int64_t at, int64_t x, double alpha, double beta)
{
    if (is_whole(alpha) && is_whole(beta))
        ref_store_int(y, at, (int64_t)((uint64_t)x * (uint64_t)(int64_t)alpha + (uint64_t)(int64_t)beta));
    else
        ref_store(y, at, alpha * (double)x + beta);
}

int ref_axpy_(ps_call *call)
{
    const ps_attrs_axpy_ *a = call->attrs;
    const ps_view *y = &call->in[0], *x = &call->in[1];
    for (int64_t i = 0; i < y->numel; i++) ref_store(y, i, ref_load(y, i) + a->alpha * ref_load(x, i));
    return 0;
}

int ref_scale_(ps_call *call)
{
    const ps_attrs_scale_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    for (int64_t i = 0; i < x->numel; i++) ref_store(x, i, a->alpha * ref_load(x, i));
    return 0;
}

int ref_scale_by_(ps_call *call)
{
    const ps_attrs_scale_by_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    double factor = a->alpha * ref_load(&call->in[1], 0);
    for (int64_t i = 0; factor != 1 && i < x->numel; i++) ref_store(x, i, factor * ref_load(x, i));
    return 0;
}

/* -- two inputs, broadcast -------------------------------------------------------------------------------------- */
typedef double (*binary_fn)(double a, double b);
typedef int64_t (*binary_int_fn)(int64_t a, int64_t b);

/* Computes an op of two inputs. If both inputs are integers and on_int is not NULL, calls on_int for each element.
 * Otherwise calls on_float. */
static int binary(ps_call *call, binary_fn on_float, binary_int_fn on_int)
{
    const ps_view *out = &call->out[0];
    ps_view y = ref_flat(out), a = ref_like(&call->in[0], out), b = ref_like(&call->in[1], out);
    bool exact = on_int && is_int(&a) && is_int(&b);
    for (int64_t i = 0; i < y.numel; i++) {
        int64_t at = ref_at(&y, i), ia = ref_at(&a, i), ib = ref_at(&b, i);
        if (exact)
            ref_store_int(&y, at, on_int(ref_load_int(&a, ia), ref_load_int(&b, ib)));
        else
            ref_store(&y, at, on_float(ref_load(&a, ia), ref_load(&b, ib)));
    }
    return 0;
}

#define BINARY(name, of_floats, of_ints)                                         \
    static double name##_float(double a, double b) { return (of_floats); }       \
    static int64_t name##_int(int64_t a, int64_t b) { return (of_ints); }        \
    int ref_##name(ps_call *call) { return binary(call, name##_float, name##_int); }

/* The casts to unsigned make integers wrap around. In C, the overflow of signed numbers is undefined. */
BINARY(add, a + b, (int64_t)((uint64_t)a + (uint64_t)b))
BINARY(sub, a - b, (int64_t)((uint64_t)a - (uint64_t)b))
BINARY(mul, a * b, (int64_t)((uint64_t)a * (uint64_t)b))
BINARY(maximum, a > b || a != a ? a : b, a > b ? a : b)
BINARY(minimum, a < b || a != a ? a : b, a < b ? a : b)

BINARY(remainder, ps_divide(PS_REMAINDER, a, b), ps_divide_ints(PS_REMAINDER, a, b))
BINARY(fmod, ps_divide(PS_FMOD, a, b), ps_divide_ints(PS_FMOD, a, b))
BINARY(floor_divide, ps_divide(PS_FLOOR_DIVIDE, a, b), ps_divide_ints(PS_FLOOR_DIVIDE, a, b))
BINARY(eq, a == b, a == b)
BINARY(ne, a != b, a != b)
BINARY(lt, a < b, a < b)
BINARY(le, a <= b, a <= b)
BINARY(gt, a > b, a > b)
BINARY(ge, a >= b, a >= b)
BINARY(logical_and, a != 0 && b != 0, a != 0 && b != 0)
BINARY(logical_or, a != 0 || b != 0, a != 0 || b != 0)

static double div_float(double a, double b) { return a / b; }
int ref_div(ps_call *call) { return binary(call, div_float, NULL); }
int ref_pow(ps_call *call) { return binary(call, pow, NULL); }

static double prelu_float(double x, double w) { return x > 0 ? x : w * x; }
int ref_prelu(ps_call *call) { return binary(call, prelu_float, NULL); }

static double log_sigmoid(double x) { return (x > 0 ? 0 : x) - log1p(exp(-fabs(x))); }

static double logit_entropy_float(double x, double t) { return (1 - t) * x - log_sigmoid(x); }
int ref_logit_entropy(ps_call *call) { return binary(call, logit_entropy_float, NULL); }

int ref_lerp(ps_call *call)
{
    double w = ((const ps_attrs_lerp *)call->attrs)->weight;
    const ps_view *out = &call->out[0];
    ps_view y = ref_flat(out), a = ref_like(&call->in[0], out), b = ref_like(&call->in[1], out);
    for (int64_t i = 0; i < y.numel; i++) {
        double from = ref_load(&a, ref_at(&a, i)), to = ref_load(&b, ref_at(&b, i));
        ref_store(&y, ref_at(&y, i), fabs(w) < 0.5 ? from + w * (to - from) : to - (1 - w) * (to - from));
    }
    return 0;
}

int ref_where(ps_call *call)
{
    const ps_view *out = &call->out[0];
    ps_view y = ref_flat(out), cond = ref_like(&call->in[0], out);
    ps_view a = ref_like(&call->in[1], out), b = ref_like(&call->in[2], out);
    for (int64_t i = 0; i < y.numel; i++) {
        const ps_view *from = ref_load(&cond, ref_at(&cond, i)) != 0 ? &a : &b;
        int64_t at = ref_at(&y, i);
        if (is_int(from))
            ref_store_int(&y, at, ref_load_int(from, ref_at(from, i)));
        else
            ref_store(&y, at, ref_load(from, ref_at(from, i)));
    }
    return 0;
}

/* -- one input -------------------------------------------------------------------------------------------------- */
static int unary(ps_call *call, double (*fn)(double x))
{
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++) ref_store(&y, ref_at(&y, i), fn(ref_load(&x, ref_at(&x, i))));
    return 0;
}

#define UNARY(name, value)                                                       \
    static double name##_float(double x) { return (value); }                     \
    int ref_##name(ps_call *call) { return unary(call, name##_float); }

UNARY(exp, exp(x))
UNARY(log, log(x))
UNARY(sqrt, sqrt(x))
UNARY(rsqrt, 1 / sqrt(x))
UNARY(reciprocal, 1 / x)
UNARY(floor, floor(x))
UNARY(ceil, ceil(x))
UNARY(round, nearbyint(x))
UNARY(trunc, trunc(x))
UNARY(sin, sin(x))
UNARY(cos, cos(x))
UNARY(erf, erf(x))
UNARY(tanh, tanh(x))
UNARY(sigmoid, 1 / (1 + exp(-x)))
UNARY(relu, x < 0 ? 0 : x)                  /* NaN stays NaN, and -0 stays -0 */
UNARY(silu, x / (1 + exp(-x)))
UNARY(log1p, log1p(x))
UNARY(expm1, expm1(x))
UNARY(isfinite, isfinite(x) != 0)
UNARY(logical_not, x == 0)

int ref_affine(ps_call *call)
{
    const ps_attrs_affine *a = call->attrs;
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++) {
        int64_t at = ref_at(&y, i), from = ref_at(&x, i);
        if (is_int(&x))
            store_affine_int(&y, at, ref_load_int(&x, from), a->alpha, a->beta);
        else
            ref_store(&y, at, a->alpha * ref_load(&x, from) + a->beta);
    }
    return 0;
}

int ref_pow_scalar(ps_call *call)
{
    const ps_attrs_pow_scalar *a = call->attrs;
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++)
        ref_store(&y, ref_at(&y, i), pow(ref_load(&x, ref_at(&x, i)), a->exponent));
    return 0;
}

int ref_leaky_relu(ps_call *call)
{
    double slope = ((const ps_attrs_leaky_relu *)call->attrs)->slope;
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++) {
        double v = ref_load(&x, ref_at(&x, i));
        ref_store(&y, ref_at(&y, i), v > 0 ? v : slope * v);
    }
    return 0;
}

int ref_elu(ps_call *call)
{
    double alpha = ((const ps_attrs_elu *)call->attrs)->alpha;
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++) {
        double v = ref_load(&x, ref_at(&x, i));
        ref_store(&y, ref_at(&y, i), v > 0 ? v : alpha * expm1(v));
    }
    return 0;
}

static double hard_gate(double x) { return (x < -3 ? 0 : x > 3 ? 6 : x + 3) / 6; }
UNARY(hardsigmoid, hard_gate(x))
UNARY(hardswish, x * hard_gate(x))
UNARY(mish, x * tanh(x > 20 ? x : log1p(exp(x))))
UNARY(logsigmoid, log_sigmoid(x))

static double huber(double x, double delta)
{
    return fabs(x) < delta ? x * x * (0.5 / delta) : fabs(x) - 0.5 * delta;
}
int ref_huber(ps_call *call)
{
    double delta = ((const ps_attrs_huber *)call->attrs)->delta;
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++) ref_store(&y, ref_at(&y, i), huber(ref_load(&x, ref_at(&x, i)), delta));
    return 0;
}

/* Returns the derivative at x of the function whose number in the op slope is `of`. */
static double slope_at(int of, double x, double delta)
{
    double t, s;
    switch (of) {
    case 0: return fabs(x) < 3 ? 1.0 / 6 : 0;
    case 1: return x <= -3 ? 0 : x < 3 ? x / 3 + 0.5 : 1;
    case 2:
        x = x < -700 ? -700 : x;                   /* for x below -700, the derivative is 0 */
        t = tanh(x > 20 ? x : log1p(exp(x))), s = 1 / (1 + exp(-x));
        return t + x * s * (1 - t * t);
    case 3: return 1 / (1 + exp(x));
    default: return fabs(x) >= delta ? (x > 0) - (x < 0) : x / delta;
    }
}
int ref_slope(ps_call *call)
{
    const ps_attrs_slope *a = call->attrs;
    ps_view dx = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]), dy = ref_flat(&call->in[1]);
    for (int64_t i = 0; i < dx.numel; i++) {
        double v = ref_load(&x, ref_at(&x, i));
        ref_store(&dx, ref_at(&dx, i), ref_load(&dy, ref_at(&dy, i)) * slope_at(a->of, v, a->delta));
    }
    return 0;
}

int ref_nan_to_num(ps_call *call)
{
    const ps_attrs_nan_to_num *a = call->attrs;
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++) {
        double v = ref_load(&x, ref_at(&x, i));
        ref_store(&y, ref_at(&y, i), isnan(v) ? a->nan : !isinf(v) ? v : v > 0 ? a->high : a->low);
    }
    return 0;
}

int ref_softplus(ps_call *call)
{
    const ps_attrs_softplus *a = call->attrs;
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++) {
        double v = ref_load(&x, ref_at(&x, i));
        ref_store(&y, ref_at(&y, i), a->beta * v > a->threshold ? v : log1p(exp(a->beta * v)) / a->beta);
    }
    return 0;
}

/* If low > high, the result is high. If x is NaN, the result is NaN. If x is an integer, the result is an integer in
 * [low, high]. */
int ref_clamp(ps_call *call)
{
    const ps_attrs_clamp *a = call->attrs;
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    int64_t low = ref_to_int(ceil(a->low), INT64_MIN, INT64_MAX);
    int64_t high = ref_to_int(floor(a->high), INT64_MIN, INT64_MAX);
    for (int64_t i = 0; i < y.numel; i++) {
        int64_t at = ref_at(&y, i), from = ref_at(&x, i);
        if (is_int(&x)) {
            int64_t v = ref_load_int(&x, from);
            v = v < low ? low : v;
            ref_store_int(&y, at, v > high ? high : v);
        } else {
            double v = ref_load(&x, from);
            v = v < a->low ? a->low : v;
            ref_store(&y, at, v > a->high ? a->high : v);
        }
    }
    return 0;
}

static int unary_any(ps_call *call, double (*on_float)(double), int64_t (*on_int)(int64_t))
{
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]);
    for (int64_t i = 0; i < y.numel; i++) {
        int64_t at = ref_at(&y, i), from = ref_at(&x, i);
        if (is_int(&x))
            ref_store_int(&y, at, on_int(ref_load_int(&x, from)));
        else
            ref_store(&y, at, on_float(ref_load(&x, from)));
    }
    return 0;
}

static int64_t abs_int(int64_t x) { return x < 0 ? (int64_t)(0 - (uint64_t)x) : x; }
int ref_abs(ps_call *call) { return unary_any(call, fabs, abs_int); }

static double sign_float(double x) { return (x > 0) - (x < 0); }       /* 0 for NaN, as in PyTorch */
static int64_t sign_int(int64_t x) { return (x > 0) - (x < 0); }
int ref_sign(ps_call *call) { return unary_any(call, sign_float, sign_int); }

/* -- GELU and the gradients that have a row --------------------------------------------------------------------- */
#define SQRT_HALF 0.70710678118654752440
#define SQRT_2_OVER_PI 0.79788456080286535588
#define INV_SQRT_2PI 0.39894228040143267794
#define GELU_CUBIC 0.044715

static double gelu_erf(double x) { return 0.5 * x * erfc(-x * SQRT_HALF); }
/* Computes (1 + tanh u) / 2 as 1 / (1 + e^-2u), which avoids cancellation. */
static double gelu_gate(double x) { return 1 / (1 + exp(-2 * SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))); }
double ref_gelu_tanh(double x) { return x * gelu_gate(x); }

static double gelu_erf_slope(double x)
{
    return 0.5 * erfc(-x * SQRT_HALF) + x * INV_SQRT_2PI * exp(-0.5 * x * x);
}
double ref_gelu_tanh_slope(double x)
{
    double s = gelu_gate(x), rest = gelu_gate(-x);
    return s + x * s * rest * 2 * SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x);
}
static double silu_slope(double x)
{
    double s = 1 / (1 + exp(-x));
    return s * (1 + x * (1 - s));
}

int ref_gelu(ps_call *call)
{
    const ps_attrs_gelu *a = call->attrs;
    return unary(call, a->tanh ? ref_gelu_tanh : gelu_erf);
}

/* Computes dx = dy * slope(x). */
static int unary_backward(ps_call *call, double (*slope)(double x))
{
    ps_view dx = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]), dy = ref_flat(&call->in[1]);
    for (int64_t i = 0; i < dx.numel; i++)
        ref_store(&dx, ref_at(&dx, i), ref_load(&dy, ref_at(&dy, i)) * slope(ref_load(&x, ref_at(&x, i))));
    return 0;
}

int ref_silu_backward(ps_call *call) { return unary_backward(call, silu_slope); }
int ref_gelu_backward(ps_call *call)
{
    const ps_attrs_gelu_backward *a = call->attrs;
    return unary_backward(call, a->tanh ? ref_gelu_tanh_slope : gelu_erf_slope);
}

/* -- an activation times another factor ------------------------------------------------------------------------- */
static double (*const acts[])(double x) = { silu_float, gelu_erf, ref_gelu_tanh };
static double (*const slopes[])(double x) = { silu_slope, gelu_erf_slope, ref_gelu_tanh_slope };

int ref_act_mul(ps_call *call)
{
    double (*act)(double) = acts[((const ps_attrs_act_mul *)call->attrs)->act];
    ps_view y = ref_flat(&call->out[0]), x = ref_flat(&call->in[0]), up = ref_flat(&call->in[1]);
    for (int64_t i = 0; i < y.numel; i++)
        ref_store(&y, ref_at(&y, i), act(ref_load(&x, ref_at(&x, i))) * ref_load(&up, ref_at(&up, i)));
    return 0;
}

/* Either output can be absent. */
int ref_act_mul_backward(ps_call *call)
{
    int act = ((const ps_attrs_act_mul_backward *)call->attrs)->act;
    const ps_view *x = &call->in[0], *up = &call->in[1], *dy = &call->in[2];
    for (int64_t i = 0; i < x->numel; i++) {
        double v = ref_load(x, i), d = ref_load(dy, i), u = ref_load(up, i);
        if (ps_has(&call->out[0])) ref_store(&call->out[0], i, d * u * slopes[act](v));
        if (ps_has(&call->out[1])) ref_store(&call->out[1], i, d * acts[act](v));
    }
    return 0;
}
