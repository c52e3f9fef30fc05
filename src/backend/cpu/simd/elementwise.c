/* SPDX-License-Identifier: BSD-3-Clause
 * Elementwise arithmetic. Floats of up to 32 bits are computed in fp32 lanes. Each op is one expression, which is
 * compiled for each storage type. For fp64 and integers, the few ops that benefit have plain loops. In all other cases
 * the kernels return PS_EUNSUP, and ref computes the op. elementwise_copy.c has copies, casts, fills and random
 * numbers. */
#define PS_ANY_LANES
#include "backend/cpu/simd/divide.h"
#include "backend/cpu/simd/loop.h"

/* Constants that an expression can use. */
typedef struct consts { float a, b, c; } consts;
static const consts no_consts;

/* -- expressions --------------------------------------------------------------------------------------------------- */
/* Computes the lanes that are too large for the range reduction of vf_sin and vf_cos, one by one, with the C
 * library. */
static __attribute__((noinline)) void large_lanes(vf *y, const vf *x, float (*f)(float))
{
    for (int i = 0; i < VL; i++)
        if (fabsf((*x)[i]) > 1e5f) (*y)[i] = f((*x)[i]);
}
SIMD vf sin_any(vf x)
{
    vf y = vf_sin(x);
    if (vi_any(vf_abs(x) > vf_set(1e5f))) large_lanes(&y, &x, sinf);
    return y;
}
SIMD vf cos_any(vf x)
{
    vf y = vf_cos(x);
    if (vi_any(vf_abs(x) > vf_set(1e5f))) large_lanes(&y, &x, cosf);
    return y;
}
static __attribute__((noinline)) void pow_lanes(vf *x, const vf *y)
{
    for (int i = 0; i < VL; i++) (*x)[i] = powf((*x)[i], (*y)[i]);
}
SIMD vf pow_any(vf x, vf y)
{
    pow_lanes(&x, &y);
    return x;
}
SIMD vf sign(vf x)
{
    return vf_select(x > vf_zero(), vf_set(1.0f), vf_zero()) - vf_select(x < vf_zero(), vf_set(1.0f), vf_zero());
}
SIMD vf clamp_between(vf x, vf low, vf high)       /* returns x unchanged if x is NaN, or if x and the bound are zeros
                                                    * with different signs */
{
    vf y = vf_select(x < low, low, x);
    return vf_select(y > high, high, y);
}
SIMD vf silu(vf x) { return vf_max(vf_set(-104.0f), x) * vf_sigmoid(x); }
/* Multiplies dy by the derivative s + x * s * (1 - s), where s is the sigmoid of x. 1 - s is computed without
 * cancellation. x is limited to a range outside which the product is 0 anyway, so that infinity is never multiplied by
 * 0. */
SIMD vf silu_backward(vf x, vf dy)
{
    vf c = vf_max(vf_set(-104.0f), vf_min(vf_set(104.0f), x)), e = vf_exp(-vf_abs(c));
    vf larger = vf_set(1.0f) / (vf_set(1.0f) + e), smaller = e * larger;             /* s and 1 - s, or vice versa */
    return dy * vf_fma(c * larger, smaller, vf_select(c < vf_zero(), smaller, larger));
}
/* The tanh form of GELU is x * sigmoid(2u), with 2u = x * (a + b * x^2), a = 2 * sqrt(2 / pi) and b = 0.044715 * a. At
 * x = 9.9 and x = -9.9, the sigmoid equals 1 or 0 to within 1e-36, and e^-2u is still a normal number. */
SIMD vf gelu_tanh_exp(vf c, vf z)                  /* returns e^-2u */
{
    return vf_exp_core(c * vf_fma(z, vf_set(-0.0713548163f), vf_set(-1.59576912f)));
}
SIMD vf gelu_tanh(vf x)
{
    vf above = vf_max(vf_set(-9.9f), x), c = vf_min(vf_set(9.9f), above);
    vf s = vf_set(1.0f) / (vf_set(1.0f) + gelu_tanh_exp(c, c * c));
    return above * vf_select(x > vf_set(-9.9f), s, vf_zero());      /* if this were written as x <= -9.9 ? 0 : s, it
                                                                     * would take two divisions */
}
SIMD vf gelu_tanh_backward(vf x, vf dy)
{
    vf c = vf_max(vf_set(-9.9f), vf_min(vf_set(9.9f), x)), z = c * c, e = gelu_tanh_exp(c, z);
    vf s = vf_set(1.0f) / (vf_set(1.0f) + e);
    vf inner = c * vf_fma(z, vf_set(0.214064449f), vf_set(1.59576912f));     /* x times the derivative of 2u */
    return dy * vf_select(x <= vf_set(-9.9f), vf_zero(), vf_fma(s * (e * s), inner, s));
}
SIMD vf gelu_erf(vf x)
{
    return vf_max(vf_set(-1e4f), x) * vf_normal_cdf(x);
}
/* Multiplies dy by Phi(x) + x * phi(x), with phi(x) = exp(-x^2 / 2) / sqrt(2 * pi). If x is below -5, Phi(x) is
 * computed as -phi(x) / x * (1 - w + 3 w^2 - 15 w^3 + 105 w^4 ...) with w = x^-2 (Abramowitz and Stegun 26.2.12). */
SIMD vf gelu_erf_backward(vf x, vf dy)
{
    vf c = vf_max(vf_set(-15.0f), vf_min(vf_set(15.0f), x));                          /* e^-112 counts as 0 */
    vf e = vf_exp(c * c * vf_set(-0.5f)), scaled = c * vf_set(0.398942280f);      /* e is multiplied last, because it
                                                                                   * can be subnormal */
    vf w = vf_set(1.0f) / (c * c), one = vf_set(1.0f), s = vf_fma(vf_set(105.0f), w, vf_set(-15.0f));
    s = one - w * vf_fma(w, vf_fma(w, vf_fma(w, s, vf_set(3.0f)), vf_set(-1.0f)), one);
    return dy * vf_select(x < vf_set(-5.0f), scaled * s * e, vf_fma(scaled, e, vf_normal_cdf(x)));
}

/* Computes log(1 + x) as log(u) * x / (u - 1), where u is the rounded value of 1 + x. The factor x / (u - 1) corrects
 * the rounding error of u (Goldberg 1991, theorem 4). */
SIMD vf log1p_of(vf x)
{
    vf u = vf_set(1.0f) + x, d = u - vf_set(1.0f);
    vf y = vf_log(u) * (x / d);
    y = vf_select(d == vf_zero(), x, y);
    return vf_select((x == vf_set(INFINITY)) | (x != x), x, y);
}
/* Computes exp(x) - 1 as (u - 1) * x / log(u), where u is the rounded value of exp(x). The factor x / log(u) corrects
 * the rounding error of u (Kahan). */
SIMD vf expm1_of(vf x)
{
    vf u = vf_exp(x), d = u - vf_set(1.0f);
    vf y = d * (x / vf_log(u));
    y = vf_select(d == vf_zero(), x, y);
    y = vf_select(x < vf_set(-18.0f), vf_set(-1.0f), y);
    return vf_select((u == vf_set(INFINITY)) | (x != x), u, y);
}
SIMD vf leaky_relu_of(vf x, vf slope) { return vf_select(x > vf_zero(), x, slope * x); }
SIMD vf elu_of(vf x, vf alpha) { return vf_select(x > vf_zero(), x, alpha * expm1_of(x)); }
SIMD vf softplus_of(vf x, vf beta, vf threshold)
{
    vf z = beta * x;
    return vf_select(z > threshold, x, log1p_of(vf_exp(z)) / beta);
}

SIMD vf trunc_of(vf x) { return vf_select(x < vf_zero(), vf_ceil(x), vf_floor(x)); }
SIMD vf nan_to_num_of(vf x, vf nan, vf high, vf low)
{
    vf y = vf_select(x == vf_set(INFINITY), high, vf_select(x == vf_set(-INFINITY), low, x));
    return vf_select(x != x, nan, y);
}
SIMD vf hard_gate(vf x)                            /* returns 3 plus x, where x is limited to [-3, 3] */
{
    return clamp_between(x, vf_set(-3.0f), vf_set(3.0f)) + vf_set(3.0f);
}
SIMD vf hardsigmoid_of(vf x) { return hard_gate(x) / vf_set(6.0f); }
SIMD vf hardswish_of(vf x)
{
    return x * (clamp_between(x + vf_set(3.0f), vf_zero(), vf_set(6.0f)) / vf_set(6.0f));
}
SIMD vf mish_of(vf x) { return x * vf_tanh(softplus_of(x, vf_set(1.0f), vf_set(20.0f))); }
SIMD vf logsigmoid_of(vf x)
{
    return vf_select(x > vf_zero(), vf_zero(), x) - log1p_of(vf_exp(-vf_abs(x)));
}
SIMD vf huber_of(vf x, vf delta, vf factor, vf half)
{
    vf size = vf_abs(x);
    return vf_select(size < delta, x * x * factor, size - half);
}
SIMD vf hardsigmoid_slope(vf x, vf dy) { return vf_select(vf_abs(x) < vf_set(3.0f), dy / vf_set(6.0f), vf_zero()); }
SIMD vf hardswish_slope(vf x, vf dy)
{
    vf s = x / vf_set(3.0f) + vf_set(0.5f);
    s = vf_select(x < vf_set(3.0f), s, vf_set(1.0f));
    return dy * vf_select(x <= vf_set(-3.0f), vf_zero(), s);
}
SIMD vf mish_slope(vf x, vf dy)
{
    vf c = vf_max(vf_set(-104.0f), x), t = vf_tanh(softplus_of(c, vf_set(1.0f), vf_set(20.0f)));
    return dy * (t + c * vf_sigmoid(c) * (vf_set(1.0f) - t * t));
}
SIMD vf logsigmoid_slope(vf x, vf dy) { return dy * vf_sigmoid(-x); }
SIMD vf huber_slope(vf x, vf dy, vf delta)
{
    return dy * vf_select(vf_abs(x) >= delta, sign(x), x / delta);
}
SIMD vf prelu_of(vf x, vf w) { return vf_select(x > vf_zero(), x, w * x); }
SIMD vf logit_entropy_of(vf x, vf t) { return (vf_set(1.0f) - t) * x - logsigmoid_of(x); }
SIMD vf lerp_near(vf a, vf b, vf w) { return a + w * (b - a); }
SIMD vf lerp_far(vf a, vf b, vf rest) { return b - rest * (b - a); }

/* -- one block function per op and float type ---------------------------------------------------------------------- */
#define UNARY_TYPE(name, expr, T) \
    static void name##_##T(void *const *p, int64_t n, const void *arg) \
    { \
        const consts k = *(const consts *)arg; \
        void *out = p[0]; \
        const void *px = p[1]; \
        (void)k; \
        for (int64_t i = 0; i < n; i += VL) { \
            vf x = vf_get(px, i, T); \
            vf_put(out, i, T, expr); \
        } \
    }
#define UNARY(name, expr) \
    UNARY_TYPE(name, expr, PS_F32) UNARY_TYPE(name, expr, PS_BF16) UNARY_TYPE(name, expr, PS_F16) \
    static const loop_fn name[3] = { name##_PS_F32, name##_PS_BF16, name##_PS_F16 };

#define BINARY_TYPE(name, expr, T) \
    static void name##_##T(void *const *p, int64_t n, const void *arg) \
    { \
        const consts k = *(const consts *)arg; \
        void *out = p[0]; \
        (void)k; \
        const void *px = p[1], *py = p[2]; \
        for (int64_t i = 0; i < n; i += VL) { \
            vf x = vf_get(px, i, T), y = vf_get(py, i, T); \
            vf_put(out, i, T, expr); \
        } \
    }
#define BINARY(name, expr) \
    BINARY_TYPE(name, expr, PS_F32) BINARY_TYPE(name, expr, PS_BF16) BINARY_TYPE(name, expr, PS_F16) \
    static const loop_fn name[3] = { name##_PS_F32, name##_PS_BF16, name##_PS_F16 };

/* `mask` is an expression whose lanes have all bits set where the predicate is true. */
#define PREDICATE_TYPE(name, in2, mask, T) \
    static void name##_##T(void *const *p, int64_t n, const void *arg) \
    { \
        uint8_t *out = p[0]; \
        const void *px = p[1], *py = p[in2]; \
        for (int64_t i = 0; i < n; i += VL) { \
            vf x = vf_get(px, i, T), y = vf_get(py, i, T); \
            (void)y; \
            vb b = vi_to_bool(mask); \
            memcpy(out + i, &b, sizeof b); \
        } \
    }
#define PREDICATE(name, in2, mask) \
    PREDICATE_TYPE(name, in2, mask, PS_F32) PREDICATE_TYPE(name, in2, mask, PS_BF16) \
    PREDICATE_TYPE(name, in2, mask, PS_F16) \
    static const loop_fn name[3] = { name##_PS_F32, name##_PS_BF16, name##_PS_F16 };

UNARY(u_affine, vf_fma(vf_set(k.a), x, vf_set(k.b)))
UNARY(u_clamp, clamp_between(x, vf_set(k.a), vf_set(k.b)))
UNARY(u_pow, pow_any(x, vf_set(k.a)))
UNARY(u_square, x * x)
UNARY(u_cube, x * x * x)
UNARY(u_exp, vf_exp(x))
UNARY(u_log, vf_log(x))
UNARY(u_log1p, log1p_of(x))
UNARY(u_expm1, expm1_of(x))
UNARY(u_leaky_relu, leaky_relu_of(x, vf_set(k.a)))
UNARY(u_elu, elu_of(x, vf_set(k.a)))
UNARY(u_softplus, softplus_of(x, vf_set(k.a), vf_set(k.b)))
UNARY(u_sqrt, vf_sqrt(x))
UNARY(u_rsqrt, vf_set(1.0f) / vf_sqrt(x))
UNARY(u_reciprocal, vf_set(1.0f) / x)
UNARY(u_abs, vf_abs(x))
UNARY(u_sign, sign(x))
UNARY(u_floor, vf_floor(x))
UNARY(u_ceil, vf_ceil(x))
UNARY(u_round, vf_round(x))
UNARY(u_trunc, trunc_of(x))
UNARY(u_nan_to_num, nan_to_num_of(x, vf_set(k.a), vf_set(k.b), vf_set(k.c)))
UNARY(u_hardsigmoid, hardsigmoid_of(x))
UNARY(u_hardswish, hardswish_of(x))
UNARY(u_mish, mish_of(x))
UNARY(u_logsigmoid, logsigmoid_of(x))
UNARY(u_huber, huber_of(x, vf_set(k.a), vf_set(k.b), vf_set(k.c)))
UNARY(u_sin, sin_any(x))
UNARY(u_cos, cos_any(x))
UNARY(u_erf, vf_erf(x))
UNARY(u_tanh, vf_tanh(x))
UNARY(u_sigmoid, vf_sigmoid(x))
UNARY(u_relu, vf_max(vf_zero(), x))
UNARY(u_silu, silu(x))
UNARY(u_gelu_erf, gelu_erf(x))
UNARY(u_gelu_tanh, gelu_tanh(x))
BINARY(b_silu_backward, silu_backward(x, y))
BINARY(b_gelu_erf_backward, gelu_erf_backward(x, y))
BINARY(b_gelu_tanh_backward, gelu_tanh_backward(x, y))
BINARY(b_swiglu, silu(x) * y)
BINARY(b_geglu_erf, gelu_erf(x) * y)
BINARY(b_geglu_tanh, gelu_tanh(x) * y)
BINARY(b_add, x + y)
BINARY(b_sub, x - y)
BINARY(b_mul, x * y)
BINARY(b_div, x / y)
BINARY(b_pow, pow_any(x, y))
BINARY(b_maximum, vf_max_nan(x, y))
BINARY(b_minimum, vf_min_nan(x, y))
BINARY(b_remainder, divide_lanes(PS_REMAINDER, x, y))
BINARY(b_fmod, divide_lanes(PS_FMOD, x, y))
BINARY(b_floor_divide, divide_lanes(PS_FLOOR_DIVIDE, x, y))
BINARY(b_prelu, prelu_of(x, y))
BINARY(b_logit_entropy, logit_entropy_of(x, y))
BINARY(b_lerp_near, lerp_near(x, y, vf_set(k.a)))
BINARY(b_lerp_far, lerp_far(x, y, vf_set(k.a)))
BINARY(s_hardsigmoid, hardsigmoid_slope(x, y))
BINARY(s_hardswish, hardswish_slope(x, y))
BINARY(s_mish, mish_slope(x, y))
BINARY(s_logsigmoid, logsigmoid_slope(x, y))
BINARY(s_huber, huber_slope(x, y, vf_set(k.a)))
PREDICATE(p_eq, 2, x == y)
PREDICATE(p_ne, 2, x != y)
PREDICATE(p_lt, 2, x < y)
PREDICATE(p_le, 2, x <= y)
PREDICATE(p_gt, 2, x > y)
PREDICATE(p_ge, 2, x >= y)
PREDICATE(p_and, 2, (x != vf_zero()) & (y != vf_zero()))
PREDICATE(p_or, 2, (x != vf_zero()) | (y != vf_zero()))
PREDICATE(p_isfinite, 1, vf_abs(x) < vf_set(INFINITY))
PREDICATE(p_not, 1, x == vf_zero())

/* -- fp64 and integers --------------------------------------------------------------------------------------------- */
/* T is the type of the elements in memory. R is the type of the result. W is the type in which the expression is
 * computed. For integers, W is unsigned, so that overflow wraps around. */
#define SCALAR(name, T, W, R, in2, expr) \
    static void name(void *const *p, int64_t n, const void *arg) \
    { \
        R *restrict out = p[0]; \
        const T *px = p[1], *py = p[in2]; \
        for (int64_t i = 0; i < n; i++) { \
            W x = (W)px[i], y = (W)py[i]; \
            (void)y; \
            out[i] = (R)(expr); \
        } \
    }
#define SCALAR_COMPARES(t, T) \
    SCALAR(eq_##t, T, T, uint8_t, 2, x == y) SCALAR(ne_##t, T, T, uint8_t, 2, x != y) \
    SCALAR(lt_##t, T, T, uint8_t, 2, x < y) SCALAR(le_##t, T, T, uint8_t, 2, x <= y) \
    SCALAR(gt_##t, T, T, uint8_t, 2, x > y) SCALAR(ge_##t, T, T, uint8_t, 2, x >= y) \
    SCALAR(and_##t, T, T, uint8_t, 2, (x != 0) & (y != 0)) SCALAR(or_##t, T, T, uint8_t, 2, (x != 0) | (y != 0)) \
    SCALAR(not_##t, T, T, uint8_t, 1, x == 0)
#define SCALAR_ARITHMETIC(t, T, W) \
    SCALAR(add_##t, T, W, T, 2, x + y) SCALAR(sub_##t, T, W, T, 2, x - y) SCALAR(mul_##t, T, W, T, 2, x * y)
SCALAR_COMPARES(f64, double)
SCALAR_COMPARES(i32, int32_t)
SCALAR_COMPARES(i64, int64_t)
SCALAR_COMPARES(u8, uint8_t)
SCALAR_ARITHMETIC(f64, double, double)
SCALAR_ARITHMETIC(i32, int32_t, uint32_t)
SCALAR_ARITHMETIC(i64, int64_t, uint64_t)
SCALAR(floor_f64, double, double, double, 1, floor(x))
SCALAR(ceil_f64, double, double, double, 1, ceil(x))
SCALAR(round_f64, double, double, double, 1, nearbyint(x))
SCALAR(abs_f64, double, double, double, 1, fabs(x))
SCALAR(isfinite_f64, double, double, uint8_t, 1, fabs(x) < (double)INFINITY)
SCALAR(div_f64, double, double, double, 2, x / y)
SCALAR(max_i32, int32_t, int32_t, int32_t, 2, x > y ? x : y)
SCALAR(min_i32, int32_t, int32_t, int32_t, 2, x < y ? x : y)
SCALAR(max_i64, int64_t, int64_t, int64_t, 2, x > y ? x : y)
SCALAR(min_i64, int64_t, int64_t, int64_t, 2, x < y ? x : y)

SCALAR(trunc_f64, double, double, double, 1, trunc(x))
#define SCALAR_DIVISIONS(t, T, of) \
    SCALAR(remainder_##t, T, T, T, 2, of(PS_REMAINDER, x, y)) SCALAR(fmod_##t, T, T, T, 2, of(PS_FMOD, x, y)) \
    SCALAR(floor_divide_##t, T, T, T, 2, of(PS_FLOOR_DIVIDE, x, y))
SCALAR_DIVISIONS(f64, double, ps_divide)
SCALAR_DIVISIONS(i32, int32_t, ps_divide_ints)
SCALAR_DIVISIONS(i64, int64_t, ps_divide_ints)
SCALAR_DIVISIONS(u8, uint8_t, ps_divide_ints)

/* The functions of each op, one for each of the three lane types and of four other types. A function is NULL if the op
 * has no function for the type in this file. */
typedef struct row { const loop_fn *lanes; loop_fn f64, i32, i64, u8; } row;
static const row rows[PS_OP_COUNT] = {
    [PS_OP_affine] = { .lanes = u_affine }, [PS_OP_clamp] = { .lanes = u_clamp },
    [PS_OP_exp] = { .lanes = u_exp }, [PS_OP_log] = { .lanes = u_log }, [PS_OP_sqrt] = { .lanes = u_sqrt },
    [PS_OP_rsqrt] = { .lanes = u_rsqrt }, [PS_OP_reciprocal] = { .lanes = u_reciprocal },
    [PS_OP_abs] = { .lanes = u_abs, .f64 = abs_f64 }, [PS_OP_sign] = { .lanes = u_sign },
    [PS_OP_floor] = { .lanes = u_floor, .f64 = floor_f64 },
    [PS_OP_ceil] = { .lanes = u_ceil, .f64 = ceil_f64 }, [PS_OP_round] = { .lanes = u_round, .f64 = round_f64 },
    [PS_OP_trunc] = { .lanes = u_trunc, .f64 = trunc_f64 }, [PS_OP_hardsigmoid] = { .lanes = u_hardsigmoid },
    [PS_OP_hardswish] = { .lanes = u_hardswish }, [PS_OP_mish] = { .lanes = u_mish },
    [PS_OP_logsigmoid] = { .lanes = u_logsigmoid }, [PS_OP_prelu] = { .lanes = b_prelu },
    [PS_OP_logit_entropy] = { .lanes = b_logit_entropy },
    [PS_OP_remainder] = { b_remainder, remainder_f64, remainder_i32, remainder_i64, remainder_u8 },
    [PS_OP_fmod] = { b_fmod, fmod_f64, fmod_i32, fmod_i64, fmod_u8 },
    [PS_OP_floor_divide] = { b_floor_divide, floor_divide_f64, floor_divide_i32, floor_divide_i64, floor_divide_u8 },
    [PS_OP_sin] = { .lanes = u_sin },
    [PS_OP_cos] = { .lanes = u_cos }, [PS_OP_erf] = { .lanes = u_erf }, [PS_OP_tanh] = { .lanes = u_tanh },
    [PS_OP_sigmoid] = { .lanes = u_sigmoid }, [PS_OP_relu] = { .lanes = u_relu }, [PS_OP_silu] = { .lanes = u_silu },
    [PS_OP_log1p] = { .lanes = u_log1p }, [PS_OP_expm1] = { .lanes = u_expm1 },
    [PS_OP_silu_backward] = { .lanes = b_silu_backward },
    [PS_OP_add] = { b_add, add_f64, add_i32, add_i64, NULL }, [PS_OP_sub] = { b_sub, sub_f64, sub_i32, sub_i64, NULL },
    [PS_OP_mul] = { b_mul, mul_f64, mul_i32, mul_i64, NULL }, [PS_OP_div] = { b_div, div_f64, NULL, NULL, NULL },
    [PS_OP_pow] = { .lanes = b_pow },
    [PS_OP_maximum] = { b_maximum, NULL, max_i32, max_i64, NULL },
    [PS_OP_minimum] = { b_minimum, NULL, min_i32, min_i64, NULL },
    [PS_OP_eq] = { p_eq, eq_f64, eq_i32, eq_i64, eq_u8 }, [PS_OP_ne] = { p_ne, ne_f64, ne_i32, ne_i64, ne_u8 },
    [PS_OP_lt] = { p_lt, lt_f64, lt_i32, lt_i64, lt_u8 }, [PS_OP_le] = { p_le, le_f64, le_i32, le_i64, le_u8 },
    [PS_OP_gt] = { p_gt, gt_f64, gt_i32, gt_i64, gt_u8 }, [PS_OP_ge] = { p_ge, ge_f64, ge_i32, ge_i64, ge_u8 },
    [PS_OP_logical_and] = { p_and, and_f64, and_i32, and_i64, and_u8 },
    [PS_OP_logical_or] = { p_or, or_f64, or_i32, or_i64, or_u8 },
    [PS_OP_logical_not] = { p_not, not_f64, not_i32, not_i64, not_u8 },
    [PS_OP_isfinite] = { .lanes = p_isfinite, .f64 = isfinite_f64 },
};

/* -- kernels ------------------------------------------------------------------------------------------------------- */
static int apply_to(const ps_view *out, ps_call *call, loop_fn fn, const void *k)
{
    const ps_view *in[LOOP_OPS - 1];
    for (int i = 0; i < call->n_in; i++) in[i] = &call->in[i];
    loop l;
    loop_init(&l, out, call->n_in, in);
    loop_run(&l, fn, k);
    return PS_OK;
}
static int apply(ps_call *call, loop_fn fn, const void *k) { return apply_to(&call->out[0], call, fn, k); }

static loop_fn choose(int op, int dtype)
{
    const row *r = &rows[op];
    switch (dtype) {
    case PS_F32: case PS_BF16: case PS_F16: return r->lanes[dtype];
    case PS_F64: return r->f64;
    case PS_I32: return r->i32;
    case PS_I64: return r->i64;
    default: return r->u8;
    }
}

static bool same_types(const ps_call *call)
{
    for (int i = 0; i < call->n_in; i++)
        if (call->in[i].dtype != call->in[0].dtype) return false;
    return true;
}

/* Runs an op whose inputs and output have the same type. */
static int arithmetic(ps_call *call)
{
    loop_fn fn = choose(call->op, call->out[0].dtype);
    if (!fn || !same_types(call) || call->in[0].dtype != call->out[0].dtype) return PS_EUNSUP;
    return apply(call, fn, &no_consts);
}

static int predicate(ps_call *call)
{
    loop_fn fn = choose(call->op, call->in[0].dtype);
    if (!fn || !same_types(call) || call->out[0].dtype != PS_BOOL) return PS_EUNSUP;
    return apply(call, fn, &no_consts);
}

/* Runs one of the three block functions fn. The type of the operands, which is the same for all operands, selects the
 * function. */
static int lanes(ps_call *call, const loop_fn *fn, const consts *k)
{
    int dtype = call->out[0].dtype;
    if (!is_lane_type(dtype) || !same_types(call) || call->in[0].dtype != dtype) return PS_EUNSUP;
    return apply(call, fn[dtype], k);
}

/* Functions for types without lanes. `arg` points to the op's attributes. Integers wrap around. */
static void affine_f64(void *const *p, int64_t n, const void *arg)
{
    const ps_attrs_affine *at = arg;
    double *restrict out = p[0], alpha = at->alpha, beta = at->beta;
    const double *x = p[1];
    for (int64_t i = 0; i < n; i++) out[i] = alpha * x[i] + beta;
}

#define AFFINE_INT(T) \
    static void affine_##T(void *const *p, int64_t n, const void *arg) \
    { \
        const ps_attrs_affine *at = arg; \
        T *restrict out = p[0], alpha = (T)(int64_t)at->alpha, beta = (T)(int64_t)at->beta; \
        const T *x = p[1]; \
        for (int64_t i = 0; i < n; i++) out[i] = x[i] * alpha + beta; \
    }
AFFINE_INT(uint32_t)
AFFINE_INT(uint64_t)

static bool fits_i64(double x) { return floor(x) == x && fabs(x) < 0x1p63; }

static int affine(ps_call *call)
{
    const ps_attrs_affine *at = call->attrs;
    int dtype = call->out[0].dtype;
    if (call->in[0].dtype == dtype && dtype == PS_F64) return apply(call, affine_f64, at);
    if (call->in[0].dtype == dtype && (dtype == PS_I64 || dtype == PS_I32) && fits_i64(at->alpha) && fits_i64(at->beta))
        return apply(call, dtype == PS_I64 ? affine_uint64_t : affine_uint32_t, at);
    return lanes(call, u_affine, &(consts){ (float)at->alpha, (float)at->beta, 0 });
}

static int clamp(ps_call *call)
{
    const ps_attrs_clamp *at = call->attrs;
    return lanes(call, u_clamp, &(consts){ (float)at->low, (float)at->high, 0 });
}

static int pow_scalar(ps_call *call)
{
    double e = ((const ps_attrs_pow_scalar *)call->attrs)->exponent;
    const loop_fn *fn = e == 2 ? u_square : e == 3 ? u_cube : e == 0.5 ? u_sqrt : e == -0.5 ? u_rsqrt
                      : e == -1 ? u_reciprocal : u_pow;
    return lanes(call, fn, &(consts){ .a = (float)e });
}

static int nan_to_num(ps_call *call)
{
    const ps_attrs_nan_to_num *at = call->attrs;
    return lanes(call, u_nan_to_num, &(consts){ (float)at->nan, (float)at->high, (float)at->low });
}

static int huber(ps_call *call)
{
    double delta = ((const ps_attrs_huber *)call->attrs)->delta;
    return lanes(call, u_huber, &(consts){ (float)delta, (float)(0.5 / delta), (float)(0.5 * delta) });
}

static int slope(ps_call *call)
{
    static const loop_fn *const fn[] = { s_hardsigmoid, s_hardswish, s_mish, s_logsigmoid, s_huber };
    const ps_attrs_slope *at = call->attrs;
    return lanes(call, fn[at->of], &(consts){ .a = (float)at->delta });
}

static int lerp(ps_call *call)
{
    double w = ((const ps_attrs_lerp *)call->attrs)->weight;
    bool near = fabs(w) < 0.5;
    return lanes(call, near ? b_lerp_near : b_lerp_far, &(consts){ .a = (float)(near ? w : 1 - w) });
}

static int leaky_relu(ps_call *call)
{
    return lanes(call, u_leaky_relu, &(consts){ .a = (float)((const ps_attrs_leaky_relu *)call->attrs)->slope });
}

static int elu(ps_call *call)
{
    return lanes(call, u_elu, &(consts){ .a = (float)((const ps_attrs_elu *)call->attrs)->alpha });
}

static int softplus(ps_call *call)
{
    const ps_attrs_softplus *at = call->attrs;
    return lanes(call, u_softplus, &(consts){ (float)at->beta, (float)at->threshold, 0 });
}

static int gelu(ps_call *call)
{
    const ps_attrs_gelu *at = call->attrs;
    return lanes(call, at->tanh ? u_gelu_tanh : u_gelu_erf, &no_consts);
}

static int gelu_backward(ps_call *call)
{
    const ps_attrs_gelu_backward *at = call->attrs;
    return lanes(call, at->tanh ? b_gelu_tanh_backward : b_gelu_erf_backward, &no_consts);
}

static int act_mul(ps_call *call)
{
    static const loop_fn *const fn[] = { b_swiglu, b_geglu_erf, b_geglu_tanh };
    return lanes(call, fn[((const ps_attrs_act_mul *)call->attrs)->act], &no_consts);
}

/* Computes dx = dy * up * act'(x) and dup = dy * act(x) for n elements, where n is a multiple of VL. */
#define ACT_MUL_BACKWARD_TYPE(name, act, slope, T) \
    static void name##_##T(void *const *p, int64_t n) \
    { \
        for (int64_t i = 0; i < n; i += VL) { \
            vf x = vf_get(p[2], i, T), dy = vf_get(p[4], i, T); \
            vf_put(p[0], i, T, slope(x, dy * vf_get(p[3], i, T))); \
            vf_put(p[1], i, T, dy * act(x)); \
        } \
    }
typedef void (*act_mul_fn)(void *const *p, int64_t n);
#define ACT_MUL_BACKWARD(name, act, slope) \
    ACT_MUL_BACKWARD_TYPE(name, act, slope, PS_F32) ACT_MUL_BACKWARD_TYPE(name, act, slope, PS_BF16) \
    ACT_MUL_BACKWARD_TYPE(name, act, slope, PS_F16) \
    static const act_mul_fn name[3] = { name##_PS_F32, name##_PS_BF16, name##_PS_F16 };
ACT_MUL_BACKWARD(a_silu, silu, silu_backward)
ACT_MUL_BACKWARD(a_gelu_erf, gelu_erf, gelu_erf_backward)
ACT_MUL_BACKWARD(a_gelu_tanh, gelu_tanh, gelu_tanh_backward)

/* Computes dx and dup from contiguous x, up and dy. The last elements are computed in a buffer. */
static int act_mul_backward(ps_call *call)
{
    static const act_mul_fn *const all[] = { a_silu, a_gelu_erf, a_gelu_tanh };
    const ps_view *v[5] = { &call->out[0], &call->out[1], &call->in[0], &call->in[1], &call->in[2] };
    int dtype = v[2]->dtype;
    if (!is_lane_type(dtype) || !ps_has(v[0]) || !ps_has(v[1])) return PS_EUNSUP;
    act_mul_fn fn = all[((const ps_attrs_act_mul_backward *)call->attrs)->act][dtype];
    int64_t n = v[2]->numel, size = ps_dtype_bytes(dtype), whole = n / VL * VL;
    int64_t blocks = (whole + LOOP_BLOCK - 1) / LOOP_BLOCK;
#pragma omp parallel for schedule(static) if (n >= PS_PAR_MIN)
    for (int64_t b = 0; b < blocks; b++) {
        void *p[5];
        int64_t first = b * LOOP_BLOCK, part = whole - first < LOOP_BLOCK ? whole - first : LOOP_BLOCK;
        for (int k = 0; k < 5; k++) p[k] = (char *)v[k]->data + first * size;
        fn(p, part);
    }
    if (whole == n) return 0;
    char last[5][VL * 4] = { { 0 } };
    void *p[5] = { last[0], last[1], last[2], last[3], last[4] };
    for (int k = 2; k < 5; k++) memcpy(p[k], (char *)v[k]->data + whole * size, (size_t)((n - whole) * size));
    fn(p, VL);
    for (int k = 0; k < 2; k++) memcpy((char *)v[k]->data + whole * size, p[k], (size_t)((n - whole) * size));
    return 0;
}

static int scale_(ps_call *call)
{
    const ps_attrs_scale_ *at = call->attrs;
    const ps_view *x = &call->in[0];
    if (!is_lane_type(x->dtype)) return PS_EUNSUP;
    /* adding -0 does not change x */
    return apply_to(x, call, u_affine[x->dtype], &(consts){ (float)at->alpha, -0.0f, 0 });
}

static int scale_by_(ps_call *call)
{
    const ps_attrs_scale_by_ *at = call->attrs;
    const ps_view *x = &call->in[0], *by = &call->in[1];
    if (!is_lane_type(x->dtype) || (by->dtype != PS_F32 && by->dtype != PS_F64)) return PS_EUNSUP;
    double factor = at->alpha * (by->dtype == PS_F32 ? *(const float *)by->data : *(const double *)by->data);
    if (factor == 1) return 0;
    return apply_to(x, call, u_affine[x->dtype], &(consts){ (float)factor, -0.0f, 0 });
}

/* Computes y += alpha * x, for each pair of lane types. */
#define AXPY(TY, TX) \
    static void axpy_##TY##_##TX(void *const *p, int64_t n, const void *arg) \
    { \
        vf alpha = vf_set(((const consts *)arg)->a); \
        void *out = p[0]; \
        const void *py = p[1], *px = p[2]; \
        for (int64_t i = 0; i < n; i += VL) \
            vf_put(out, i, TY, vf_fma(alpha, vf_get(px, i, TX), vf_get(py, i, TY))); \
    }
AXPY(PS_F32, PS_F32) AXPY(PS_F32, PS_BF16) AXPY(PS_F32, PS_F16)
AXPY(PS_BF16, PS_F32) AXPY(PS_BF16, PS_BF16) AXPY(PS_BF16, PS_F16)
AXPY(PS_F16, PS_F32) AXPY(PS_F16, PS_BF16) AXPY(PS_F16, PS_F16)
static const loop_fn axpy_fn[3][3] = {
    { axpy_PS_F32_PS_F32, axpy_PS_F32_PS_BF16, axpy_PS_F32_PS_F16 },
    { axpy_PS_BF16_PS_F32, axpy_PS_BF16_PS_BF16, axpy_PS_BF16_PS_F16 },
    { axpy_PS_F16_PS_F32, axpy_PS_F16_PS_BF16, axpy_PS_F16_PS_F16 },
};

static int axpy_(ps_call *call)
{
    int ty = call->in[0].dtype, tx = call->in[1].dtype;
    if (!is_lane_type(ty) || !is_lane_type(tx)) return PS_EUNSUP;
    const ps_attrs_axpy_ *at = call->attrs;
    return apply_to(&call->in[0], call, axpy_fn[ty][tx], &(consts){ .a = (float)at->alpha });
}

/* `where` only copies elements, so only the size of an element matters. */
#define WHERE(T) \
    static void where_##T(void *const *p, int64_t n, const void *arg) \
    { \
        T *restrict out = p[0]; \
        const uint8_t *cond = p[1]; \
        const T *a = p[2], *b = p[3]; \
        for (int64_t i = 0; i < n; i++) { \
            T x = a[i], y = b[i]; \
            out[i] = cond[i] ? x : y; \
        } \
    }
WHERE(uint8_t)
WHERE(uint16_t)
WHERE(uint32_t)
WHERE(uint64_t)

static int where(ps_call *call)
{
    int dtype = call->out[0].dtype;
    if (ps_dtype_bytes(call->in[0].dtype) != 1 || call->in[1].dtype != dtype || call->in[2].dtype != dtype)
        return PS_EUNSUP;
    int64_t size = ps_dtype_bytes(dtype);
    return apply(call, size == 1 ? where_uint8_t : size == 2 ? where_uint16_t : size == 4 ? where_uint32_t
                 : where_uint64_t, &no_consts);
}

void PS_ISA_FN(ps_cpu_fill_elementwise)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_elementwise)(ps_kernel *k)
{
    for (int op = 0; op < PS_OP_COUNT; op++)
        if (rows[op].lanes) k[op] = arithmetic;
    static const int16_t predicates[] = {
        PS_OP_eq, PS_OP_ne, PS_OP_lt, PS_OP_le, PS_OP_gt, PS_OP_ge, PS_OP_logical_and, PS_OP_logical_or,
        PS_OP_logical_not, PS_OP_isfinite,
    };
    for (size_t i = 0; i < sizeof predicates / sizeof *predicates; i++) k[predicates[i]] = predicate;
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
    loop_fill_copies(k);
}
