/* SPDX-License-Identifier: BSD-3-Clause
 * Ops that fill a tensor: copies, casts, constants, ranges, random numbers and concatenation. Conversions compute the
 * same bits as ref. A conversion to fp32 rounds once. A conversion to bf16 or fp16 first converts to fp32. A conversion
 * from float to integer truncates and saturates, and turns NaN into 0. A conversion from integer to integer wraps
 * around. */
#define PS_ANY_LANES
#include "backend/cpu/simd/loop.h"
#include "base/error.h"
#include "base/philox.h"

/* -- conversions --------------------------------------------------------------------------------------------------- */
#define LANES_TO_LANES(TO, FROM) \
    static void TO##_from_##FROM(void *const *p, int64_t n, const void *arg) \
    { \
        void *out = p[0]; \
        const void *px = p[1]; \
        for (int64_t i = 0; i < n; i += VL) vf_put(out, i, TO, vf_get(px, i, FROM)); \
    }
LANES_TO_LANES(PS_F32, PS_BF16) LANES_TO_LANES(PS_F32, PS_F16)
LANES_TO_LANES(PS_BF16, PS_F32) LANES_TO_LANES(PS_BF16, PS_F16)
LANES_TO_LANES(PS_F16, PS_F32) LANES_TO_LANES(PS_F16, PS_BF16)

/* Converts types without lanes to lane types and back, through fp32. Sixteen elements are converted at a time. */
#define OTHER_TO_LANES(TO, name, T, value) \
    static void TO##_from_##name(void *const *p, int64_t n, const void *arg) \
    { \
        const T *src = p[1]; \
        for (int64_t i = 0; i < n; i += VL) { \
            float f[VL]; \
            for (int j = 0; j < VL; j++) { \
                T v = src[i + j]; \
                f[j] = (float)(value); \
            } \
            vf_put(p[0], i, TO, vf_load(f)); \
        } \
    }
#define LANES_TO_OTHER(name, T, FROM, value) \
    static void name##_from_##FROM(void *const *p, int64_t n, const void *arg) \
    { \
        T *dst = p[0]; \
        for (int64_t i = 0; i < n; i += VL) { \
            float f[VL]; \
            vf_store(f, vf_get(p[1], i, FROM)); \
            for (int j = 0; j < VL; j++) { \
                float v = f[j]; \
                dst[i + j] = (T)(value); \
            } \
        } \
    }
#define BOTH_WAYS(name, T, value_in, value_out) \
    OTHER_TO_LANES(PS_F32, name, T, value_in) OTHER_TO_LANES(PS_BF16, name, T, (double)(value_in)) \
    OTHER_TO_LANES(PS_F16, name, T, (double)(value_in)) \
    LANES_TO_OTHER(name, T, PS_F32, value_out) LANES_TO_OTHER(name, T, PS_BF16, value_out) \
    LANES_TO_OTHER(name, T, PS_F16, value_out)

static inline int32_t saturate_i32(double v)
{
    return v != v ? 0 : v >= 0x1p31 ? INT32_MAX : v <= -0x1p31 ? INT32_MIN : (int32_t)v;
}
static inline int64_t saturate_i64(double v)
{
    return v != v ? 0 : v >= 0x1p63 ? INT64_MAX : v <= -0x1p63 ? INT64_MIN : (int64_t)v;
}
static inline uint8_t saturate_u8(double v) { return v != v || v <= 0 ? 0 : v >= 255 ? 255 : (uint8_t)v; }
BOTH_WAYS(i32, int32_t, v, saturate_i32(v))
BOTH_WAYS(i64, int64_t, v, saturate_i64(v))
BOTH_WAYS(u8, uint8_t, v, saturate_u8(v))
BOTH_WAYS(truth, uint8_t, v != 0, v != 0)
BOTH_WAYS(f64, double, v, v)

/* Converts elements one by one. */
#define PLAIN(to, T, from, F, value) \
    static void to##_from_##from(void *const *p, int64_t n, const void *arg) \
    { \
        T *restrict dst = p[0]; \
        const F *src = p[1]; \
        for (int64_t i = 0; i < n; i++) { \
            F v = src[i]; \
            dst[i] = (T)(value); \
        } \
    }
PLAIN(i32, int32_t, i64, int64_t, v) PLAIN(i64, int64_t, i32, int32_t, v)
PLAIN(i32, int32_t, u8, uint8_t, v) PLAIN(i64, int64_t, u8, uint8_t, v)
PLAIN(u8, uint8_t, i32, int32_t, v) PLAIN(u8, uint8_t, i64, int64_t, v)
PLAIN(i32, int32_t, truth, uint8_t, v != 0) PLAIN(i64, int64_t, truth, uint8_t, v != 0)
PLAIN(u8, uint8_t, truth, uint8_t, v != 0) PLAIN(truth, uint8_t, u8, uint8_t, v != 0)
PLAIN(truth, uint8_t, i32, int32_t, v != 0) PLAIN(truth, uint8_t, i64, int64_t, v != 0)

PLAIN(f64, double, i32, int32_t, v) PLAIN(f64, double, i64, int64_t, v)
PLAIN(f64, double, u8, uint8_t, v) PLAIN(f64, double, truth, uint8_t, v != 0)
PLAIN(i32, int32_t, f64, double, saturate_i32(v)) PLAIN(i64, int64_t, f64, double, saturate_i64(v))
PLAIN(u8, uint8_t, f64, double, saturate_u8(v)) PLAIN(truth, uint8_t, f64, double, v != 0)

/* convert_fn[to][from] is NULL if the two types are equal, because the elements are copied in this case. */
static const loop_fn convert_fn[PS_DTYPE_COUNT][PS_DTYPE_COUNT] = {
#define FROM_LANES(T) [PS_F32] = T##_from_PS_F32, [PS_BF16] = T##_from_PS_BF16, [PS_F16] = T##_from_PS_F16
#define FROM_OTHERS(T) [PS_F64] = T##_from_f64, [PS_I32] = T##_from_i32, [PS_I64] = T##_from_i64, \
                       [PS_U8] = T##_from_u8, [PS_BOOL] = T##_from_truth
    [PS_F32] = { FROM_OTHERS(PS_F32), [PS_BF16] = PS_F32_from_PS_BF16, [PS_F16] = PS_F32_from_PS_F16 },
    [PS_BF16] = { FROM_OTHERS(PS_BF16), [PS_F32] = PS_BF16_from_PS_F32, [PS_F16] = PS_BF16_from_PS_F16 },
    [PS_F16] = { FROM_OTHERS(PS_F16), [PS_F32] = PS_F16_from_PS_F32, [PS_BF16] = PS_F16_from_PS_BF16 },
    [PS_F64] = { FROM_LANES(f64), [PS_I32] = f64_from_i32, [PS_I64] = f64_from_i64, [PS_U8] = f64_from_u8,
                 [PS_BOOL] = f64_from_truth },
    [PS_I32] = { FROM_LANES(i32), [PS_F64] = i32_from_f64, [PS_I64] = i32_from_i64, [PS_U8] = i32_from_u8,
                 [PS_BOOL] = i32_from_truth },
    [PS_I64] = { FROM_LANES(i64), [PS_F64] = i64_from_f64, [PS_I32] = i64_from_i32, [PS_U8] = i64_from_u8,
                 [PS_BOOL] = i64_from_truth },
    [PS_U8] = { FROM_LANES(u8), [PS_F64] = u8_from_f64, [PS_I32] = u8_from_i32, [PS_I64] = u8_from_i64,
                [PS_BOOL] = u8_from_truth },
    [PS_BOOL] = { FROM_LANES(truth), [PS_F64] = truth_from_f64, [PS_I32] = truth_from_i32, [PS_I64] = truth_from_i64,
                  [PS_U8] = truth_from_u8 },
#undef FROM_OTHERS
#undef FROM_LANES
};

static int convert(const ps_view *dst, const ps_view *src)
{
    if (dst->dtype == src->dtype) {
        loop_copy(dst, src);
        return PS_OK;
    }
    loop l;
    loop_init(&l, dst, 1, &src);
    loop_run(&l, convert_fn[dst->dtype][src->dtype], NULL);
    return PS_OK;
}

static int contiguous(ps_call *call) { return convert(&call->out[0], &call->in[0]); }
static int copy_(ps_call *call) { return convert(&call->in[0], &call->in[1]); }

static int concat(ps_call *call)
{
    const ps_view *y = &call->out[0];
    int dim = ((const ps_attrs_concat *)call->attrs)->dim;
    if (dim < 0) dim += y->ndim;
    for (int i = 0; i < call->n_in; i++)
        if (call->in[i].dtype != y->dtype || call->in[i].ndim != y->ndim) return PS_EUNSUP;
    ps_view part = *y;
    for (int i = 0; i < call->n_in; i++) {
        const ps_view *x = &call->in[i];
        part.shape[dim] = x->shape[dim];
        part.numel = x->numel;
        loop_copy(&part, x);
        part.data = (char *)part.data + x->shape[dim] * y->stride[dim] * ps_dtype_bytes(y->dtype);
    }
    return PS_OK;
}

/* -- constants and ranges ------------------------------------------------------------------------------------------ */
/* `arg` points to sixteen copies of the element. */
#define FILL(T) \
    static void fill_##T(void *const *p, int64_t n, const void *arg) \
    { \
        T v = *(const T *)arg, *dst = p[0]; \
        for (int64_t i = 0; i < n; i++) dst[i] = v; \
    }
FILL(uint8_t)
FILL(uint16_t)
FILL(uint32_t)
FILL(uint64_t)

static int fill_(ps_call *call)
{
    const ps_view *x = &call->in[0];
    double value = ((const ps_attrs_fill_ *)call->attrs)->value;
    uint64_t element[VL] = { 0 };
    if (x->dtype == PS_F64) {
        memcpy(element, &value, sizeof value);
    } else {
        double in[VL] = { value };
        convert_fn[x->dtype][PS_F64]((void *const[2]){ element, in }, VL, NULL);
    }
    loop l;
    loop_init(&l, x, 0, NULL);
    int64_t size = ps_dtype_bytes(x->dtype);
    loop_run(&l, size == 1 ? fill_uint8_t : size == 2 ? fill_uint16_t : size == 4 ? fill_uint32_t : fill_uint64_t,
             element);
    return PS_OK;
}

/* Converts the first n of the sixteen numbers v to the type, by rounding or wrapping, and stores them starting at flat
 * position i. */
static void store_doubles(void *data, int dtype, int64_t i, int n, const double *v)
{
    if (dtype == PS_F64) {
        memcpy((double *)data + i, v, (size_t)n * sizeof *v);
        return;
    }
    float f[VL];
    for (int j = 0; j < VL; j++) f[j] = (float)v[j];
    if (n == VL) vf_put(data, i, dtype, vf_load(f));
    else vf_put_n(data, i, dtype, n, vf_load(f));
}

/* Not inlined, because GCC 12 would warn that v may be uninitialised. */
static __attribute__((noinline)) void store_ints(void *data, int dtype, int64_t i, int n, const int64_t *v)
{
    for (int j = 0; j < n; j++) {
        if (dtype == PS_I64) ((int64_t *)data)[i + j] = v[j];
        else if (dtype == PS_I32) ((int32_t *)data)[i + j] = (int32_t)v[j];
        else ((uint8_t *)data)[i + j] = (uint8_t)v[j];
    }
}

static bool is_whole(double x) { return x == trunc(x) && fabs(x) < 0x1p63; }

static int arange_(ps_call *call)
{
    const ps_attrs_arange_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    bool is_float = ps_dtype_is_float(x->dtype);
    if (x->dtype == PS_BOOL || (!is_float && !(is_whole(a->start) && is_whole(a->step)))) return PS_EUNSUP;
    double start = a->start, step = a->step;
    uint64_t istart = is_float ? 0 : (uint64_t)(int64_t)start, istep = is_float ? 0 : (uint64_t)(int64_t)step;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < x->numel; i += VL) {
        int n = x->numel - i < VL ? (int)(x->numel - i) : VL;
        if (is_float) {
            double v[VL];
            for (int j = 0; j < VL; j++) v[j] = start + (double)(i + j) * step;
            store_doubles(x->data, x->dtype, i, n, v);
        } else {
            int64_t v[VL];
            for (int j = 0; j < VL; j++) v[j] = (int64_t)(istart + (uint64_t)(i + j) * istep);
            store_ints(x->data, x->dtype, i, n, v);
        }
    }
    return PS_OK;
}

/* -- random numbers: element i belongs to counter offset + i ------------------------------------------------------- */
/* If rounding raises a number to `high`, the number is replaced by `low`. Hence the range never includes `high`, in any
 * type. */
static int uniform_(ps_call *call)
{
    const ps_attrs_uniform_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    int dtype = x->dtype;
    if (!is_lane_type(dtype) && dtype != PS_F64) return PS_EUNSUP;
    double low = a->low, high = a->high, range = high - low;
    uint64_t seed = a->seed, offset = a->offset;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < x->numel; i += VL) {
        int n = x->numel - i < VL ? (int)(x->numel - i) : VL;
        float u[VL], f[VL];
        uint16_t rounded[VL];
        vf_store(u, vu_unit(vu_philox_run(seed, offset + (uint64_t)i, 0).v[0]));
        if (dtype == PS_F64) {
            for (int j = 0; j < n; j++) {
                double d = low + range * (double)u[j];
                ((double *)x->data)[i + j] = d >= high ? low : d;
            }
            continue;
        }
        for (int j = 0; j < VL; j++) f[j] = (float)(low + range * (double)u[j]);
        vf v = vf_load(f);
        if (dtype != PS_F32) {
            vf_put(rounded, 0, dtype, v);
            v = vf_get(rounded, 0, dtype);
        }
        vf_store(f, v);
        for (int j = 0; j < VL; j++) f[j] = (double)f[j] >= high ? (float)low : f[j];
        vf_put_n(x->data, i, dtype, n, vf_load(f));
    }
    return PS_OK;
}

/* Computes normal numbers by the formula of Box and Muller: sqrt(-2 log(1 - u1)) cos(2 pi u2). */
static int normal_(ps_call *call)
{
    const ps_attrs_normal_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    int dtype = x->dtype;
    if (!is_lane_type(dtype)) return PS_EUNSUP;
    float mean = (float)a->mean, std = (float)a->std;
    uint64_t seed = a->seed, offset = a->offset;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < x->numel; i += VL) {
        int n = x->numel - i < VL ? (int)(x->numel - i) : VL;
        vu4 r = vu_philox_run(seed, offset + (uint64_t)i, 0);
        vf radius = vf_sqrt(vf_set(-2.0f) * vf_log(vf_set(1.0f) - vu_unit(r.v[0])));
        vf z = radius * vf_cos(vf_set(6.28318531f) * vu_unit(r.v[1]));
        vf_put_n(x->data, i, dtype, n, vf_set(mean) + vf_set(std) * z);
    }
    return PS_OK;
}

/* Computes low + floor(r * (high - low) / 2^64). r consists of the first two random words of the counter. The first
 * word is the lower half of r. */
static int randint_(ps_call *call)
{
    const ps_attrs_randint_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    if (ps_dtype_is_float(x->dtype) || x->dtype == PS_BOOL || a->high <= a->low) return PS_EUNSUP;
    uint64_t low = (uint64_t)a->low, range = (uint64_t)a->high - low, seed = a->seed, offset = a->offset;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < x->numel; i += VL) {
        int n = x->numel - i < VL ? (int)(x->numel - i) : VL;
        int64_t v[VL];
        vu4 r = vu_philox_run(seed, offset + (uint64_t)i, 0);
        for (int j = 0; j < VL; j++) {
            uint64_t word = (uint64_t)r.v[1][j] << 32 | r.v[0][j];
            v[j] = (int64_t)(low + (uint64_t)((unsigned __int128)word * range >> 64));
        }
        store_ints(x->data, x->dtype, i, n, v);
    }
    return PS_OK;
}

/* Sets u to VL random numbers in [0, 1) with 48 random bits each, for the elements that start at i. n is the total
 * number of elements. */
SIMD void fine(double *u, uint64_t seed, uint64_t offset, int64_t i, int64_t n)
{
    float upper[VL], lower[VL];
    vf_store(upper, vu_unit(vu_philox_run(seed, offset + (uint64_t)i, 0).v[0]));
    vf_store(lower, vu_unit(vu_philox_run(seed, offset + (uint64_t)n + (uint64_t)i, 0).v[0]));
    for (int j = 0; j < VL; j++) u[j] = (double)upper[j] + (double)lower[j] * 0x1p-24;
}

/* -- a random order ------------------------------------------------------------------------------------------------ */
/* Elements are sorted by 48 random bits. An entry of the sort has the upper 24 random bits of its element in bits 40 to
 * 63, and the element's index in bits 0 to 39. Few entries agree in the upper random bits. Only these entries need the
 * lower 24 random bits. */
enum { KEY_BITS = 24, PLACE_BITS = 40, DIGIT_BITS = 12, FEW_DIGIT_BITS = 8, FEW_ENTRIES = 4096 };

/* Sorts n entries by one digit, which consists of `bits` bits and begins at bit `shift`. Entries with equal digits keep
 * their order. */
static void sort_digit(uint64_t *to, const uint64_t *from, int64_t n, int shift, int bits)
{
    int64_t start[1 << DIGIT_BITS] = { 0 }, sum = 0;
    uint64_t mask = (1ull << bits) - 1;
    for (int64_t i = 0; i < n; i++) start[from[i] >> shift & mask]++;
    for (uint64_t d = 0; d <= mask; d++) {
        int64_t count = start[d];
        start[d] = sum, sum += count;
    }
    for (int64_t i = 0; i < n; i++) to[start[from[i] >> shift & mask]++] = from[i];
}

/* Sorts n entries that agree in the upper bits by their lower bits. */
static void sort_equal(uint64_t *entries, int64_t n, uint64_t seed, uint64_t offset)
{
    const uint64_t places = (1ull << PLACE_BITS) - 1;
    for (int64_t i = 0; i < n; i++) {
        uint64_t place = entries[i] & places;
        uint64_t one = (uint64_t)(ps_philox4x32(seed, offset + place, 0).v[0] >> 8) << PLACE_BITS | place;
        int64_t k = i;
        for (; k > 0 && entries[k - 1] > one; k--) entries[k] = entries[k - 1];
        entries[k] = one;
    }
}

static int randperm_(ps_call *call)
{
    const ps_attrs_randperm_ *a = call->attrs;
    const ps_view *x = &call->in[0];
    int64_t n = x->numel;
    if (n >= 1ll << PLACE_BITS) return PS_EUNSUP;
    uint64_t *from = call->scratch(call, (size_t)(n + VL) * sizeof *from);
    uint64_t *to = call->scratch(call, (size_t)(n + 1) * sizeof *to);
    if (!from || !to) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (n >= PS_PAR_MIN)
    for (int64_t i = 0; i < n; i += VL) {
        uint32_t upper[VL];
        vu drawn = vu_philox_run(a->seed, a->offset + (uint64_t)i, 0).v[0] >> 8;
        memcpy(upper, &drawn, sizeof upper);
        for (int j = 0; j < VL; j++) from[i + j] = (uint64_t)upper[j] << PLACE_BITS | (uint64_t)(i + j);
    }
    int bits = n < FEW_ENTRIES ? FEW_DIGIT_BITS : DIGIT_BITS;
    for (int digit = 0; digit < KEY_BITS; digit += bits) {
        sort_digit(to, from, n, PLACE_BITS + digit, bits);
        uint64_t *swap = from;
        from = to, to = swap;
    }
    for (int64_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && from[end] >> PLACE_BITS == from[i] >> PLACE_BITS;) end++;
        if (end > i + 1) sort_equal(from + i, end - i, a->seed, a->offset + (uint64_t)n);
    }
    for (int64_t i = 0; i < n; i++) ((int64_t *)x->data)[i] = (int64_t)(from[i] & ((1ull << PLACE_BITS) - 1));
    return PS_OK;
}

static int bernoulli(ps_call *call)
{
    const ps_attrs_bernoulli *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (!is_lane_type(x->dtype) || !view_flat(x) || !view_flat(y)) return PS_EUNSUP;
    for (int64_t i = 0; a->p == -1 && i < x->numel; i += VL) {
        float p[VL];
        vf_store(p, vf_get_n(x->data, i, x->dtype, x->numel - i < VL ? (int)(x->numel - i) : VL, 0.0f));
        for (int j = 0; j < VL; j++)
            if (!(p[j] >= 0 && p[j] <= 1))
                return ps_fail(PS_EINVAL, "a probability is %g; it must be in [0, 1]", (double)p[j]);
    }
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < x->numel; i += VL) {
        int n = x->numel - i < VL ? (int)(x->numel - i) : VL;
        double u[VL];
        float p[VL];
        fine(u, a->seed, a->offset, i, x->numel);
        vf_store(p, vf_get_n(x->data, i, x->dtype, n, 0.0f));
        for (int j = 0; j < VL; j++) p[j] = u[j] < (a->p == -1 ? (double)p[j] : a->p) ? 1.0f : 0.0f;
        vf_put_n(y->data, i, y->dtype, n, vf_load(p));
    }
    return PS_OK;
}

void loop_fill_copies(ps_kernel *k)
{
    k[PS_OP_contiguous] = contiguous;
    k[PS_OP_cast] = contiguous;
    k[PS_OP_copy_] = copy_;
    k[PS_OP_concat] = concat;
    k[PS_OP_fill_] = fill_;
    k[PS_OP_arange_] = arange_;
    k[PS_OP_uniform_] = uniform_;
    k[PS_OP_normal_] = normal_;
    k[PS_OP_randint_] = randint_;
    k[PS_OP_randperm_] = randperm_;
    k[PS_OP_bernoulli] = bernoulli;
}
