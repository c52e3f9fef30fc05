/* SPDX-License-Identifier: BSD-3-Clause
 * Reductions, running sums and topk. Sums are computed in fp32 over blocks of a fixed size, and the sums of the blocks
 * are added in order. If the blocks are parts of a row, their sums are added in double. Hence the bits depend neither
 * on the number of threads nor on the instruction set. Kernels exist for two layouts. In the row layout, the reduced
 * dimension is contiguous. In the column layout, the kept dimension is contiguous, as in the gradient of a bias.
 * Tensors with another layout are first copied into rows. ref computes the reductions of integers that this file does
 * not support. */
#define PS_ANY_LANES                    /* a row's sums always have sixteen lanes (operand.h) */
#include "backend/cpu/simd/operand.h"

enum { ROW_BLOCK = 4096, COLUMN_ROWS = 64, COLUMN_GROUP = 8, PANEL = 64 };
enum { LANES = 16, ABREAST = VL == 16 ? 4 : 8 };    /* LANES: number of sums of a row; ABREAST: number of adjacent
                                                     * vectors of columns that are reduced together */
typedef enum reducer { SUM, MAX, MIN } reducer;

/* A reduction in the form that the kernels process. The first `outer` dimensions are kept and have any strides. The
 * next dimension is reduced and has n elements, which are `stride` elements apart. The last dimension is kept and has
 * `cols` contiguous elements. If cols is 1, the reduction has the row layout, and stride is 1. The result is row-major
 * [rows, cols]. */
typedef struct plan {
    const char *data;
    int dtype, outer;
    int64_t rows, n, cols, stride, shape[PS_MAX_DIMS], step[PS_MAX_DIMS];
} plan;

/* -- the plan ------------------------------------------------------------------------------------------------------ */
typedef struct dims { int n; int64_t shape[PS_MAX_DIMS], stride[PS_MAX_DIMS]; bool reduced[PS_MAX_DIMS]; } dims;

/* Returns the dimensions of x whose size is not 1. Adjacent dimensions are merged if both are kept or both are reduced,
 * and if their strides allow it. */
static dims merged_dims(const ps_view *x, uint32_t bits)
{
    dims m = { .n = 0 };
    for (int d = 0; d < x->ndim; d++) {
        bool reduced = bits == 0 || (bits >> d & 1);
        if (x->shape[d] == 1) continue;
        int last = m.n - 1;
        if (last >= 0 && m.reduced[last] == reduced && m.stride[last] == x->stride[d] * x->shape[d]) {
            m.shape[last] *= x->shape[d], m.stride[last] = x->stride[d];
            continue;
        }
        m.shape[m.n] = x->shape[d], m.stride[m.n] = x->stride[d], m.reduced[m.n] = reduced;
        m.n++;
    }
    return m;
}

/* Copies x to workspace, in row-major order and with the shape [rows, n]. The kept dimensions become the first
 * dimension. */
static int copy_to_rows(ps_call *call, const ps_view *x, const dims *m, plan *p)
{
    ps_view src = *x, dst;
    src.ndim = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int d = 0; d < m->n; d++)
            if (m->reduced[d] == (pass == 1)) {
                src.shape[src.ndim] = m->shape[d], src.stride[src.ndim] = m->stride[d];
                src.ndim++;
            }
    dst = src;
    int64_t step = 1;
    for (int d = src.ndim - 1; d >= 0; d--) dst.stride[d] = step, step *= src.shape[d];
    dst.data = call->scratch(call, (size_t)(x->numel * ps_dtype_bytes(x->dtype)));
    if (!dst.data) return PS_ENOMEM;                         /* scratch() has recorded the error */
    if (!call->dry) loop_copy(&dst, &src);
    p->data = dst.data;
    p->outer = 1, p->shape[0] = p->rows, p->step[0] = p->n;
    p->cols = 1, p->stride = 1;
    return PS_OK;
}

/* Makes a plan. x must not be empty. Set only_rows if the caller has no kernel for the column layout. */
static int plan_make(ps_call *call, const ps_view *x, uint32_t bits, bool only_rows, plan *p)
{
    dims m = merged_dims(x, bits);
    *p = (plan){ .data = x->data, .dtype = x->dtype, .rows = 1, .n = 1, .cols = 1, .stride = 1 };
    int reduced = 0;
    for (int d = 0; d < m.n; d++) {
        if (m.reduced[d]) reduced++, p->n *= m.shape[d];
        else p->rows *= m.shape[d];
    }
    int outer = m.n;
    if (reduced == 1 && m.reduced[m.n - 1] && m.stride[m.n - 1] == 1) {
        outer = m.n - 1;
    } else if (reduced == 1 && m.n >= 2 && m.reduced[m.n - 2] && m.stride[m.n - 1] == 1 && !only_rows) {
        outer = m.n - 2;
        p->stride = m.stride[m.n - 2], p->cols = m.shape[m.n - 1];
        p->rows /= p->cols;
    } else if (reduced == 0 && m.n >= 1 && m.stride[m.n - 1] == 1 && !only_rows) {
        outer = m.n - 1;                           /* all reduced dimensions have size 1, so a column has one element */
        p->cols = m.shape[m.n - 1];
        p->rows /= p->cols;
    } else if (reduced > 0) {
        return copy_to_rows(call, x, &m, p);
    }
    p->outer = outer;
    for (int d = 0; d < outer; d++) p->shape[d] = m.shape[d], p->step[d] = m.stride[d];
    return PS_OK;
}

static const char *plan_row(const plan *p, int64_t row)
{
    int64_t offset = 0;
    for (int d = p->outer - 1; d >= 0; d--) {
        offset += row % p->shape[d] * p->step[d];
        row /= p->shape[d];
    }
    return p->data + offset * ps_dtype_bytes(p->dtype);
}

/* -- lanes --------------------------------------------------------------------------------------------------------- */
SIMD float neutral(reducer op) { return op == SUM ? 0 : op == MAX ? -INFINITY : INFINITY; }
SIMD vf combine(vf a, vf b, reducer op) { return op == SUM ? a + b : op == MAX ? vf_max_nan(a, b) : vf_min_nan(a, b); }
SIMD float combine_1(float a, float b, reducer op)
{
    if (op == SUM) return a + b;
    if (a != a || b != b) return NAN;
    return op == MAX ? (a > b ? a : b) : (a < b ? a : b);
}
/* Reduces sixteen lanes to one lane. Combines the upper half of the lanes with the lower half, and repeats this until
 * one lane is left. */
SIMD float horizontal(const vf *v, reducer op)
{
    if (op == SUM) return sum_lanes(v);
    float x[16];
    EACH_PART(j) vf_store(x + j * VL, v[j]);
    for (int w = 8; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] = combine_1(x[i], x[i + w], op);
    return x[0];
}

/* Reduces n contiguous elements to one. It keeps four sums of sixteen lanes. */
SIMD float row_block(const void *x, int64_t n, reducer op, int T)
{
    vf none = vf_set(neutral(op)), acc[4][PARTS];
#pragma GCC unroll 4                               /* also needed with -O2, to keep the sums in registers */
    for (int k = 0; k < 4; k++) EACH_PART(j) acc[k][j] = none;
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            EACH_PART(j) acc[k][j] = combine(acc[k][j], vf_get(x, i + k * LANES + j * VL, T), op);
    for (; i + LANES <= n; i += LANES) EACH_PART(j) acc[0][j] = combine(acc[0][j], vf_get(x, i + j * VL, T), op);
    EACH_PART(j) {
        int64_t left = n - i - j * VL;
        if (left > 0)
            acc[1][j] = combine(acc[1][j], vf_get_n(x, i + j * VL, T, left < VL ? (int)left : VL, neutral(op)), op);
    }
    EACH_PART(j) acc[0][j] = combine(combine(acc[0][j], acc[1][j], op), combine(acc[2][j], acc[3][j], op), op);
    return horizontal(acc[0], op);
}

/* Reduces n rows to one row, over `cols` <= PANEL columns. The rows are `stride` elements apart. The rows are added in
 * groups of COLUMN_GROUP rows, so that no sum adds many terms one by one. The error is below two ulp. */
SIMD void column_block(const void *x, int64_t stride, int64_t n, int cols, float *out, reducer op, int T)
{
    vf none = vf_set(neutral(op));
    int c = 0;
    for (; c + ABREAST * VL <= cols; c += ABREAST * VL) {
        vf acc[ABREAST], part[ABREAST];
        for (int j = 0; j < ABREAST; j++) acc[j] = none;
        for (int64_t first = 0; first < n; first += COLUMN_GROUP) {
            int64_t last = first + COLUMN_GROUP < n ? first + COLUMN_GROUP : n;
            for (int j = 0; j < ABREAST; j++) part[j] = none;
            for (int64_t r = first; r < last; r++)
#pragma GCC unroll 8
                for (int j = 0; j < ABREAST; j++)
                    part[j] = combine(part[j], vf_get(x, r * stride + c + j * VL, T), op);
            for (int j = 0; j < ABREAST; j++) acc[j] = combine(acc[j], part[j], op);
        }
        for (int j = 0; j < ABREAST; j++) vf_store(out + c + j * VL, acc[j]);
    }
    for (; c < cols; c += VL) {
        int w = cols - c < VL ? cols - c : VL;
        vf a = none;
        for (int64_t first = 0; first < n; first += COLUMN_GROUP) {
            int64_t last = first + COLUMN_GROUP < n ? first + COLUMN_GROUP : n;
            vf b = none;
            for (int64_t r = first; r < last; r++)
                b = combine(b, w == VL ? vf_get(x, r * stride + c, T) : vf_get_n(x, r * stride + c, T, w, 0), op);
            a = combine(a, b, op);
        }
        vf_put_n(out, c, PS_F32, w, a);
    }
}

#define BLOCKS_TYPE(name, op, T) \
    static float row_##name##_##T(const void *x, int64_t n) { return row_block(x, n, op, T); } \
    static void column_##name##_##T(const void *x, int64_t stride, int64_t n, int cols, float *out) \
    { \
        column_block(x, stride, n, cols, out, op, T); \
    }
#define BLOCKS(name, op) BLOCKS_TYPE(name, op, PS_F32) BLOCKS_TYPE(name, op, PS_BF16) BLOCKS_TYPE(name, op, PS_F16)
BLOCKS(sum, SUM)
BLOCKS(max, MAX)
BLOCKS(min, MIN)
typedef float (*row_fn)(const void *x, int64_t n);
typedef void (*column_fn)(const void *x, int64_t stride, int64_t n, int cols, float *out);
static const row_fn row_fns[3][3] = {
    { row_sum_PS_F32, row_sum_PS_BF16, row_sum_PS_F16 },
    { row_max_PS_F32, row_max_PS_BF16, row_max_PS_F16 },
    { row_min_PS_F32, row_min_PS_BF16, row_min_PS_F16 },
};
static const column_fn column_fns[3][3] = {
    { column_sum_PS_F32, column_sum_PS_BF16, column_sum_PS_F16 },
    { column_max_PS_F32, column_max_PS_BF16, column_max_PS_F16 },
    { column_min_PS_F32, column_min_PS_BF16, column_min_PS_F16 },
};

/* -- results: fp32 [rows, cols] ------------------------------------------------------------------------------------ */
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void *scratch(ps_call *call, int64_t nbytes)
{
    return call->scratch(call, (size_t)nbytes);
}

static int reduce_rows(ps_call *call, const plan *p, reducer op, float *result)
{
    row_fn fn = row_fns[op][p->dtype];
    int64_t blocks = ceil_div(p->n, ROW_BLOCK), items = p->rows * blocks, size = ps_dtype_bytes(p->dtype);
    float *part = result;                          /* [rows, blocks] */
    if (blocks > 1 && !(part = scratch(call, items * 4))) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (p->rows * p->n >= PS_PAR_MIN)
    for (int64_t item = 0; item < items; item++) {
        int64_t first = item % blocks * ROW_BLOCK, n = p->n - first < ROW_BLOCK ? p->n - first : ROW_BLOCK;
        part[item] = fn(plan_row(p, item / blocks) + first * size, n);
    }
    for (int64_t r = 0; blocks > 1 && r < p->rows; r++) {
        double sum = 0;
        float extreme = part[r * blocks];
        for (int64_t b = 0; b < blocks; b++) {
            sum += part[r * blocks + b];
            extreme = combine_1(extreme, part[r * blocks + b], op);
        }
        result[r] = op == SUM ? (float)sum : extreme;
    }
    return PS_OK;
}

static int reduce_columns(ps_call *call, const plan *p, reducer op, float *result)
{
    column_fn fn = column_fns[op][p->dtype];
    int64_t blocks = ceil_div(p->n, COLUMN_ROWS), panels = ceil_div(p->cols, PANEL), items = p->rows * blocks * panels;
    int64_t size = ps_dtype_bytes(p->dtype);
    float *part = result;                          /* [rows, blocks, cols] */
    if (blocks > 1 && !(part = scratch(call, p->rows * blocks * p->cols * 4))) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (p->rows * p->n * p->cols >= PS_PAR_MIN)
    for (int64_t item = 0; item < items; item++) {
        int64_t panel = item % panels * PANEL, block = item / panels % blocks, row = item / panels / blocks;
        int64_t first = block * COLUMN_ROWS, n = p->n - first < COLUMN_ROWS ? p->n - first : COLUMN_ROWS;
        int cols = p->cols - panel < PANEL ? (int)(p->cols - panel) : PANEL;
        fn(plan_row(p, row) + (first * p->stride + panel) * size, p->stride, n, cols,
           part + (row * blocks + block) * p->cols + panel);
    }
    if (blocks == 1) return PS_OK;
    items = p->rows * panels;
#pragma omp parallel for schedule(static) if (p->rows * blocks * p->cols >= PS_PAR_MIN)
    for (int64_t item = 0; item < items; item++) {
        int64_t panel = item % panels * PANEL, row = item / panels;
        int cols = p->cols - panel < PANEL ? (int)(p->cols - panel) : PANEL;
        column_fns[op][PS_F32](part + row * blocks * p->cols + panel, p->cols, blocks, cols,
                               result + row * p->cols + panel);
    }
    return PS_OK;
}

/* Computes y = result / divisor, or adds result / divisor to y. Replaces every NaN by the canonical NaN, because the
 * bits of the sum of two NaNs depend on the order of the operands, which the compiler chooses. */
static void finish(const ps_view *y, const float *result, float divisor, bool accumulate)
{
#pragma omp parallel for schedule(static) if (y->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < y->numel; i += VL) {
        int n = y->numel - i < VL ? (int)(y->numel - i) : VL;
        vf v = vf_get_n(result, i, PS_F32, n, 0) / vf_set(divisor);
        if (accumulate) v += vf_get_n(y->data, i, y->dtype, n, 0);
        v = vf_select(v != v, vf_set(NAN), v);
        vf_put_n(y->data, i, y->dtype, n, v);
    }
}

static int reduce(ps_call *call, uint32_t bits, reducer op, bool mean, bool accumulate)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (!is_lane_type(x->dtype) || !is_lane_type(y->dtype) || !view_flat(y) || x->numel == 0) return PS_EUNSUP;
    plan p;
    PS_TRY(plan_make(call, x, bits, false, &p));
    float *result = scratch(call, y->numel * 4);
    if (!result) return PS_ENOMEM;
    PS_TRY(p.cols == 1 ? reduce_rows(call, &p, op, result) : reduce_columns(call, &p, op, result));
    if (!call->dry) finish(y, result, mean ? (float)p.n : 1.0f, accumulate);
    return PS_OK;
}

/* -- fp64: compensated sums (two-sum of Knuth) in 16 lanes, in blocks of ROW_BLOCK elements ----------------------- */
enum { DOUBLES = 16 };
/* Adds x to *sum, and the rounding error of this addition to *error. */
static inline void add_double(double *sum, double *error, double x)
{
    double t = *sum + x, z = t - *sum;
    *error += (*sum - (t - z)) + (x - z);
    *sum = t;
}

static double double_row(const double *x, int64_t n)
{
    double s[DOUBLES] = { 0 }, e[DOUBLES] = { 0 };
    int64_t i = 0;
    for (; i + DOUBLES <= n; i += DOUBLES)
        for (int j = 0; j < DOUBLES; j++) add_double(s + j, e + j, x[i + j]);
    for (int j = 0; i < n; i++, j++) add_double(s + j, e + j, x[i]);
    for (int w = DOUBLES / 2; w > 0; w /= 2)
        for (int j = 0; j < w; j++) {
            add_double(s + j, e + j, s[j + w]);
            e[j] += e[j + w];
        }
    return fabs(s[0]) < (double)INFINITY ? s[0] + e[0] : s[0];       /* the error of an infinite sum is NaN */
}

static int double_sum(ps_call *call, uint32_t bits, bool mean, bool accumulate)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (y->dtype != PS_F64 || !view_flat(y) || x->numel == 0) return PS_EUNSUP;
    plan p;
    PS_TRY(plan_make(call, x, bits, true, &p));
    int64_t blocks = ceil_div(p.n, ROW_BLOCK), items = p.rows * blocks;
    double *part = scratch(call, items * 8), *out = y->data;
    if (!part) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t item = 0; item < items; item++) {
        int64_t first = item % blocks * ROW_BLOCK, n = p.n - first < ROW_BLOCK ? p.n - first : ROW_BLOCK;
        part[item] = double_row((const double *)plan_row(&p, item / blocks) + first, n);
    }
    for (int64_t r = 0; r < p.rows; r++) {
        double total = blocks == 1 ? part[r] : double_row(part + r * blocks, blocks);
        if (mean) total /= (double)p.n;
        if (accumulate) total += out[r];
        out[r] = total == total ? total : (double)NAN;
    }
    return PS_OK;
}

/* -- integers: sums wrap, so their order does not matter ----------------------------------------------------------- */
SIMD int64_t int_row(const void *x, int64_t n, int dtype)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (dtype == PS_I64) sum += (uint64_t)((const int64_t *)x)[i];
        else if (dtype == PS_I32) sum += (uint64_t)(int64_t)((const int32_t *)x)[i];
        else if (dtype == PS_U8) sum += ((const uint8_t *)x)[i];
        else sum += ((const uint8_t *)x)[i] != 0;
    }
    return (int64_t)sum;
}

static int int_sum(ps_call *call, uint32_t bits, bool accumulate)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (y->dtype != PS_I64 || !view_flat(y) || x->numel == 0) return PS_EUNSUP;
    plan p;
    PS_TRY(plan_make(call, x, bits, true, &p));
    int64_t blocks = ceil_div(p.n, ROW_BLOCK), items = p.rows * blocks, size = ps_dtype_bytes(p.dtype);
    int64_t *part = scratch(call, items * 8), *out = y->data;
    if (!part) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t item = 0; item < items; item++) {
        int64_t first = item % blocks * ROW_BLOCK, n = p.n - first < ROW_BLOCK ? p.n - first : ROW_BLOCK;
        const char *row = plan_row(&p, item / blocks) + first * size;
        part[item] = p.dtype == PS_I64 ? int_row(row, n, PS_I64) : p.dtype == PS_I32 ? int_row(row, n, PS_I32)
                   : p.dtype == PS_U8 ? int_row(row, n, PS_U8) : int_row(row, n, PS_BOOL);
    }
    for (int64_t r = 0; r < p.rows; r++) {
        int64_t sum = int_row(part + r * blocks, blocks, PS_I64);
        out[r] = accumulate ? (int64_t)((uint64_t)out[r] + (uint64_t)sum) : sum;
    }
    return PS_OK;
}

/* Reduces booleans. If `all` is set, the result is true if all reduced elements are true. Otherwise the result is true
 * if at least one of them is true. */
static int bool_extreme(ps_call *call, uint32_t bits, bool all)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (y->dtype != PS_BOOL || !view_flat(y) || x->numel == 0) return PS_EUNSUP;
    plan p;
    PS_TRY(plan_make(call, x, bits, true, &p));
    if (call->dry) return PS_OK;
    uint8_t *out = y->data;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < p.rows; r++) {
        int64_t count = int_row(plan_row(&p, r), p.n, PS_BOOL);
        out[r] = all ? count == p.n : count > 0;
    }
    return PS_OK;
}

/* Defines a function that returns the largest or the smallest of n > 0 integers. */
#define INT_MOST(name, type, compare) \
    static type name(const void *x, int64_t n) \
    { \
        const type *p = x; \
        type most[VL]; \
        for (int j = 0; j < VL; j++) most[j] = p[0]; \
        int64_t i = 0; \
        for (; i + VL <= n; i += VL) \
            for (int j = 0; j < VL; j++) most[j] = p[i + j] compare most[j] ? p[i + j] : most[j]; \
        for (; i < n; i++) most[0] = p[i] compare most[0] ? p[i] : most[0]; \
        for (int j = 1; j < VL; j++) most[0] = most[j] compare most[0] ? most[j] : most[0]; \
        return most[0]; \
    }
INT_MOST(max_row_i64, int64_t, >)
INT_MOST(min_row_i64, int64_t, <)
INT_MOST(max_row_i32, int32_t, >)
INT_MOST(min_row_i32, int32_t, <)
INT_MOST(max_row_u8, uint8_t, >)
INT_MOST(min_row_u8, uint8_t, <)

/* Finds the largest integer of each row, or the smallest one. */
static int int_extreme(ps_call *call, uint32_t bits, bool largest)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (y->dtype != x->dtype || !view_flat(y) || x->numel == 0) return PS_EUNSUP;
    plan p;
    PS_TRY(plan_make(call, x, bits, true, &p));
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < p.rows; r++) {
        const void *row = plan_row(&p, r);
        if (x->dtype == PS_I64) ((int64_t *)y->data)[r] = largest ? max_row_i64(row, p.n) : min_row_i64(row, p.n);
        else if (x->dtype == PS_I32) ((int32_t *)y->data)[r] = largest ? max_row_i32(row, p.n) : min_row_i32(row, p.n);
        else ((uint8_t *)y->data)[r] = largest ? max_row_u8(row, p.n) : min_row_u8(row, p.n);
    }
    return PS_OK;
}

static int sum(ps_call *call)
{
    const ps_attrs_sum *a = call->attrs;
    if (!ps_dtype_is_float(call->in[0].dtype)) return int_sum(call, a->dims, a->accumulate);
    if (call->in[0].dtype == PS_F64) return double_sum(call, a->dims, false, a->accumulate);
    return reduce(call, a->dims, SUM, false, a->accumulate);
}
static int mean(ps_call *call)
{
    uint32_t bits = ((const ps_attrs_mean *)call->attrs)->dims;
    if (call->in[0].dtype == PS_F64) return double_sum(call, bits, true, false);
    return reduce(call, bits, SUM, true, false);
}
static int extreme(ps_call *call, uint32_t bits, reducer op)
{
    if (call->in[0].dtype == PS_BOOL) return bool_extreme(call, bits, op == MIN);
    if (!ps_dtype_is_float(call->in[0].dtype)) return int_extreme(call, bits, op == MAX);
    return reduce(call, bits, op, false, false);
}
static int amax(ps_call *call) { return extreme(call, ((const ps_attrs_amax *)call->attrs)->dims, MAX); }
static int amin(ps_call *call) { return extreme(call, ((const ps_attrs_amin *)call->attrs)->dims, MIN); }

/* -- positions ----------------------------------------------------------------------------------------------------- */
/* Returns the position of the first element that equals `best`. If `best` is NaN, returns the position of the first
 * NaN. */
SIMD int64_t first_equal(const void *x, int64_t n, float best, int T)
{
    vf b = vf_set(best);
    for (int64_t i = 0; i < n; i += VL) {
        int m = n - i < VL ? (int)(n - i) : VL;
        vf v = m == VL ? vf_get(x, i, T) : vf_get_n(x, i, T, m, best);
        vi hit = best != best ? v != v : v == b;
        if (!vi_any(hit)) continue;
        for (int j = 0; j < m; j++)
            if (hit[j]) return i + j;
    }
    return 0;
}

static int64_t arg_row(const void *x, int64_t n, reducer op, int dtype)
{
    float best = row_fns[op][dtype](x, n);
    if (dtype == PS_F32) return first_equal(x, n, best, PS_F32);
    if (dtype == PS_BF16) return first_equal(x, n, best, PS_BF16);
    return first_equal(x, n, best, PS_F16);
}

static int arg_reduce(ps_call *call, int dim, reducer op)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (!is_lane_type(x->dtype) || !view_flat(y) || x->numel == 0 || x->ndim == 0) return PS_EUNSUP;
    plan p;
    PS_TRY(plan_make(call, x, 1u << (dim < 0 ? dim + x->ndim : dim), true, &p));
    if (call->dry) return PS_OK;
    int64_t *out = y->data;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < p.rows; r++) out[r] = arg_row(plan_row(&p, r), p.n, op, p.dtype);
    return PS_OK;
}
static int argmax(ps_call *call) { return arg_reduce(call, ((const ps_attrs_argmax *)call->attrs)->dim, MAX); }
static int argmin(ps_call *call) { return arg_reduce(call, ((const ps_attrs_argmin *)call->attrs)->dim, MIN); }

/* -- products ------------------------------------------------------------------------------------------------------ */
/* Multiplies n rows elementwise. A row, like the product y, has `inner` elements. `half` is memory for n / 2 rows. */
#define PROD(type) \
    static void prod_##type(const type *x, int64_t n, int64_t inner, type *half, type *y) \
    { \
        for (int64_t j = 0; j < inner; j++) y[j] = 1; \
        for (; n > 1; n /= 2) { \
            int64_t m = n / 2 * inner; \
            if (n % 2) for (int64_t j = 0; j < inner; j++) y[j] *= x[2 * m + j]; \
            _Pragma("omp simd") for (int64_t j = 0; j < m; j++) half[j] = x[j] * x[m + j]; \
            x = half; \
        } \
        if (n == 1) for (int64_t j = 0; j < inner; j++) y[j] = x[j] * y[j]; \
    }
PROD(float)
PROD(double)
PROD(uint64_t)

static int prod(ps_call *call)
{
    const ps_attrs_prod *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    int dim = a->dim < 0 ? a->dim + x->ndim : a->dim;
    int64_t size = ps_dtype_bytes(x->dtype), outer = 1, inner = 1, n = x->ndim > 0 ? x->shape[dim] : 1;
    if ((x->dtype != PS_F32 && x->dtype != PS_F64 && x->dtype != PS_I64) || !view_flat(x) || !view_flat(y))
        return PS_EUNSUP;
    for (int d = 0; d < x->ndim; d++) {
        if (d < dim) outer *= x->shape[d];
        if (d > dim) inner *= x->shape[d];
    }
    int64_t each = n / 2 * inner * size;
    char *half = each > 0 ? scratch(call, outer * each) : NULL;
    if (each > 0 && !half) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t o = 0; o < outer; o++) {
        const char *from = (const char *)x->data + o * n * inner * size;
        char *to = (char *)y->data + o * inner * size, *own = each > 0 ? half + o * each : NULL;
        if (x->dtype == PS_F32) prod_float((const float *)from, n, inner, (float *)own, (float *)to);
        else if (x->dtype == PS_F64) prod_double((const double *)from, n, inner, (double *)own, (double *)to);
        else prod_uint64_t((const uint64_t *)from, n, inner, (uint64_t *)own, (uint64_t *)to);
    }
    return PS_OK;
}

/* -- topk ---------------------------------------------------------------------------------------------------------- */
/* Finds the k largest elements of a row, in descending order. NaN counts as the largest value. Equal elements keep the
 * order of their positions. */
static void topk_row(const char *x, int64_t n, int dtype, int k, float *value, int64_t *place)
{
    int have = 0;
    for (int64_t i = 0; i < n; i += VL) {
        int m = n - i < VL ? (int)(n - i) : VL;
        vf v = vf_get_n(x, i, dtype, m, -INFINITY);
        if (have == k && !vi_any((v != v) | (v > vf_set(value[k - 1])))) continue;
        for (int j = 0; j < m; j++) {
            float f = v[j];
            int at = have;
            while (at > 0 && (f > value[at - 1] || (f != f && value[at - 1] == value[at - 1]))) at--;
            if (at == k) continue;
            if (have < k) have++;
            memmove(value + at + 1, value + at, (size_t)(have - 1 - at) * sizeof *value);
            memmove(place + at + 1, place + at, (size_t)(have - 1 - at) * sizeof *place);
            value[at] = f, place[at] = i + j;
        }
    }
}

enum { INSERTED = 64, SORT_BITS = 11 };            /* if k is larger than INSERTED, sorting the row is faster than
                                                    * insertion */
typedef struct sorted { uint32_t key; int32_t place; } sorted;

/* Returns a key that decreases as the value increases. The key of NaN is 0. +0 and -0 have the same key. */
static inline uint32_t descending(float f)
{
    uint32_t bits;
    f += 0.0f;                                     /* -0 becomes +0 */
    memcpy(&bits, &f, sizeof bits);
    if (f != f) return 0;
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

/* Sorts a row in descending order. Equal elements keep their order. a and b have n entries each. Returns a or b,
 * depending on which one contains the result. */
static const sorted *sort_row(const char *x, int64_t n, int dtype, sorted *a, sorted *b)
{
    enum { KEYS = 1 << SORT_BITS, PASSES = 3 };
    int32_t start[PASSES][KEYS] = { { 0 } };
    for (int64_t i = 0; i < n; i += VL) {
        int m = n - i < VL ? (int)(n - i) : VL;
        vf v = vf_get_n(x, i, dtype, m, 0);
        for (int j = 0; j < m; j++) {
            a[i + j] = (sorted){ descending(v[j]), (int32_t)(i + j) };
            for (int k = 0; k < PASSES; k++) start[k][a[i + j].key >> (k * SORT_BITS) & (KEYS - 1)]++;
        }
    }
    for (int k = 0; k < PASSES; k++) {
        int32_t sum = 0;
        bool one = false;                          /* true if all keys have the same digit */
        for (int d = 0; d < KEYS; d++) {
            int32_t count = start[k][d];
            one = one || count == n;
            start[k][d] = sum, sum += count;
        }
        if (one) continue;
        for (int64_t i = 0; i < n; i++) b[start[k][a[i].key >> (k * SORT_BITS) & (KEYS - 1)]++] = a[i];
        sorted *swap = a;
        a = b, b = swap;
    }
    return a;
}

/* Writes the first k elements of a sorted row. */
static void put_sorted(const sorted *list, const char *x, int dtype, int64_t k, char *values, int64_t *indices)
{
    for (int64_t j = 0; j < k; j++) {
        int32_t at = list[j].place;
        indices[j] = at;
        if (dtype == PS_F32) ((float *)values)[j] = ((const float *)x)[at];
        else ((uint16_t *)values)[j] = ((const uint16_t *)x)[at];
    }
}

static int topk_sorted(ps_call *call, const plan *p, int k)
{
    const ps_view *values = &call->out[0], *indices = &call->out[1];
    int64_t size = ps_dtype_bytes(p->dtype);
    sorted *lists = scratch(call, 2 * p->rows * p->n * (int64_t)sizeof *lists);
    if (!lists) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (p->rows * p->n >= PS_PAR_MIN)
    for (int64_t r = 0; r < p->rows; r++) {
        sorted *own = lists + 2 * r * p->n;
        const char *x = plan_row(p, r);
        put_sorted(sort_row(x, p->n, p->dtype, own, own + p->n), x, p->dtype, k, (char *)values->data + r * k * size,
                   (int64_t *)indices->data + r * k);
    }
    return PS_OK;
}

/* -- topk of fp64 and integers, by keys of 64 bits --------------------------------------------------------------- */
enum { WIDE_KEYS = 1 << SORT_BITS, WIDE_PASSES = 6 };
typedef struct wide { uint64_t key; int64_t place; } wide;

/* Returns a key that decreases as the element increases. The key of NaN is 0. +0 and -0 have the same key. */
static uint64_t wide_key(const void *x, int64_t i, int dtype)
{
    if (dtype != PS_F64) {
        int64_t v = dtype == PS_I64 ? ((const int64_t *)x)[i] : dtype == PS_I32 ? ((const int32_t *)x)[i]
                  : ((const uint8_t *)x)[i];
        return ~((uint64_t)v ^ 1ull << 63);
    }
    double f = ((const double *)x)[i] + 0.0;
    uint64_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (f != f) return 0;
    return bits >> 63 ? bits : ~bits & ~0ull >> 1;
}

/* Sorts a small number of entries by insertion. Entries with equal keys keep their order. */
static void insert_wide(wide *a, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        wide e = a[i];
        int64_t at = i;
        for (; at > 0 && a[at - 1].key > e.key; at--) a[at] = a[at - 1];
        a[at] = e;
    }
}

/* Sorts n entries by key. Entries with equal keys keep their order. Returns a or b, depending on which one contains the
 * result. */
static wide *sort_wide(wide *a, wide *b, int64_t n)
{
    if (n <= INSERTED) {
        insert_wide(a, n);
        return a;
    }
    int32_t start[WIDE_PASSES * WIDE_KEYS] = { 0 };
    for (int64_t i = 0; i < n; i++)
        for (int k = 0; k < WIDE_PASSES; k++) start[k * WIDE_KEYS + (a[i].key >> (k * SORT_BITS) & (WIDE_KEYS - 1))]++;
    for (int k = 0; k < WIDE_PASSES; k++) {
        int32_t sum = 0, *own = start + k * WIDE_KEYS;
        bool one = false;                          /* true if all keys have the same digit */
        for (int d = 0; d < WIDE_KEYS; d++) {
            int32_t count = own[d];
            one = one || count == n;
            own[d] = sum, sum += count;
        }
        if (one) continue;
        for (int64_t i = 0; i < n; i++) b[own[a[i].key >> (k * SORT_BITS) & (WIDE_KEYS - 1)]++] = a[i];
        wide *swap = a;
        a = b, b = swap;
    }
    return a;
}

/* Finds the k smallest keys of a row, in ascending order. Equal keys keep their order. */
static void wide_few(const char *row, int64_t n, int dtype, int k, wide *few)
{
    int count = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t key = wide_key(row, i, dtype);
        if (count == k && key >= few[k - 1].key) continue;
        int at = count < k ? count++ : k - 1;
        for (; at > 0 && few[at - 1].key > key; at--) few[at] = few[at - 1];
        few[at] = (wide){ key, i };
    }
}

/* Sorts the keys of a row in ascending order. `list` has room for 2 n entries, and contains the result. */
static const wide *wide_all(const char *row, int64_t n, int dtype, wide *list)
{
    for (int64_t i = 0; i < n; i++) list[i] = (wide){ wide_key(row, i, dtype), i };
    return sort_wide(list, list + n, n);
}

static int topk_wide(ps_call *call, int k)
{
    const ps_view *x = &call->in[0], *values = &call->out[0], *indices = &call->out[1];
    int64_t size = ps_dtype_bytes(x->dtype);
    plan p;
    PS_TRY(plan_make(call, x, 1u << (x->ndim - 1), true, &p));
    bool is_few = k <= INSERTED;
    wide *lists = is_few ? NULL : scratch(call, 2 * p.rows * p.n * (int64_t)sizeof *lists);
    if (!is_few && !lists) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (p.rows * p.n >= PS_PAR_MIN)
    for (int64_t r = 0; r < p.rows; r++) {
        wide few[INSERTED];
        const wide *sorted_row = few;
        const char *row = plan_row(&p, r);
        if (is_few) wide_few(row, p.n, x->dtype, k, few);
        else sorted_row = wide_all(row, p.n, x->dtype, lists + 2 * r * p.n);
        char *to = (char *)values->data + r * k * size;
        for (int64_t j = 0; j < k; j++) {
            int64_t at = sorted_row[j].place;
            ((int64_t *)indices->data)[r * k + j] = at;
            if (size == 8) ((uint64_t *)to)[j] = ((const uint64_t *)row)[at];
            else if (size == 4) ((uint32_t *)to)[j] = ((const uint32_t *)row)[at];
            else to[j] = row[at];
        }
    }
    return PS_OK;
}

static int topk(ps_call *call)
{
    const ps_view *x = &call->in[0], *values = &call->out[0], *indices = &call->out[1];
    int k = ((const ps_attrs_topk *)call->attrs)->k;
    bool is_wide = x->dtype == PS_F64 || x->dtype == PS_I64 || x->dtype == PS_I32 || x->dtype == PS_U8;
    if ((!is_lane_type(x->dtype) && !is_wide) || x->numel == 0 || x->ndim == 0 || k < 1 || k > x->shape[x->ndim - 1]
        || values->dtype != x->dtype || x->shape[x->ndim - 1] > INT32_MAX || !view_flat(values) || !view_flat(indices))
        return PS_EUNSUP;
    if (is_wide) return topk_wide(call, k);
    plan p;
    PS_TRY(plan_make(call, x, 1u << (x->ndim - 1), true, &p));
    if (k > INSERTED) return topk_sorted(call, &p, k);
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < p.rows; r++) {
        float value[INSERTED + 1];
        int64_t place[INSERTED + 1];
        topk_row(plan_row(&p, r), p.n, p.dtype, k, value, place);
        memcpy((int64_t *)indices->data + r * k, place, (size_t)k * sizeof *place);
        for (int j = 0; j < k; j += VL)
            vf_put_n(values->data, r * k + j, values->dtype, k - j < VL ? k - j : VL, vf_load(value + j));
    }
    return PS_OK;
}

/* -- running sums: in double, each result rounded once ------------------------------------------------------------- */
/* Computes the running sums of w <= VL adjacent columns of [n, cols]. */
SIMD void cumsum_panel(const void *x, void *y, int64_t n, int64_t cols, int w, bool reverse, int T)
{
    double acc[VL] = { 0 };
    for (int64_t k = 0; k < n; k++) {
        int64_t at = (reverse ? n - 1 - k : k) * cols;
        float f[VL];
        vf_store(f, vf_get_n(x, at, T, w, 0));
        for (int j = 0; j < VL; j++) acc[j] += f[j], f[j] = (float)acc[j];
        vf_put_n(y, at, T, w, vf_load(f));
    }
}

/* Computes the running sums of one contiguous row. */
static void cumsum_row(const void *x, void *y, int64_t n, bool reverse, int dtype)
{
    double acc = 0;
    for (int64_t k = 0; k < n; k += VL) {
        int w = n - k < VL ? (int)(n - k) : VL;
        int64_t at = reverse ? n - k - w : k;
        float f[VL];
        vf_store(f, vf_get_n(x, at, dtype, w, 0));
        for (int j = 0; j < w; j++) {
            int place = reverse ? w - 1 - j : j;
            acc += f[place];
            f[place] = (float)acc;
        }
        vf_put_n(y, at, dtype, w, vf_load(f));
    }
}

static int cumsum(ps_call *call)
{
    const ps_attrs_cumsum *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (!is_lane_type(x->dtype) || x->ndim == 0 || !view_flat(x) || !view_flat(y) || x->numel == 0) return PS_EUNSUP;
    int dim = a->dim < 0 ? a->dim + x->ndim : a->dim, dtype = x->dtype;
    bool reverse = a->reverse;
    int64_t n = x->shape[dim], cols = 1, size = ps_dtype_bytes(dtype);
    for (int d = dim + 1; d < x->ndim; d++) cols *= x->shape[d];
    int64_t panels = ceil_div(cols, VL), items = x->numel / n / cols * panels;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t item = 0; item < items; item++) {
        int64_t panel = item % panels * VL, at = (item / panels * n * cols + panel) * size;
        const char *from = (const char *)x->data + at;
        char *to = (char *)y->data + at;
        int w = cols - panel < VL ? (int)(cols - panel) : VL;
        if (cols == 1) cumsum_row(from, to, n, reverse, dtype);
        else if (dtype == PS_F32) cumsum_panel(from, to, n, cols, w, reverse, PS_F32);
        else if (dtype == PS_BF16) cumsum_panel(from, to, n, cols, w, reverse, PS_BF16);
        else cumsum_panel(from, to, n, cols, w, reverse, PS_F16);
    }
    return PS_OK;
}

/* -- running products: products of floats are computed in double, and each result is rounded once ----------------- */
/* Compute running products and their gradients for w <= PROD_COLUMNS adjacent columns of [n, cols]. `later` is memory
 * for n rows of w doubles. */
enum { PROD_COLUMNS = 16 };
#define CUMPROD(T, A) \
    static void cumprod_##T(const T *x, T *y, int64_t n, int64_t cols, int w) \
    { \
        A acc[PROD_COLUMNS]; \
        for (int j = 0; j < PROD_COLUMNS; j++) acc[j] = 1; \
        for (int64_t k = 0; k < n; k++, x += cols, y += cols) { \
            if (w == 1) y[0] = (T)(acc[0] *= (A)x[0]); \
            else if (w == PROD_COLUMNS) for (int j = 0; j < PROD_COLUMNS; j++) y[j] = (T)(acc[j] *= (A)x[j]); \
            else for (int j = 0; j < w; j++) y[j] = (T)(acc[j] *= (A)x[j]); \
        } \
    }
#define CUMPROD_BACKWARD(T) \
    static void cumprod_backward_##T(const T *x, const T *dy, T *dx, int64_t n, int64_t cols, int w, double *later) \
    { \
        double acc[PROD_COLUMNS] = { 0 }; \
        for (int64_t k = n - 1; k >= 0; k--) \
            for (int j = 0; j < w; j++) { \
                acc[j] = (double)dy[k * cols + j] + (k < n - 1 ? (double)x[(k + 1) * cols + j] * acc[j] : 0.0); \
                later[k * w + j] = acc[j]; \
            } \
        for (int j = 0; j < w; j++) acc[j] = 1; \
        for (int64_t k = 0; k < n; k++) \
            for (int j = 0; j < w; j++) { \
                double factor = (double)x[k * cols + j]; \
                dx[k * cols + j] = (T)(acc[j] * later[k * w + j]); \
                acc[j] *= factor; \
            } \
    }
CUMPROD(float, double)
CUMPROD(double, double)
CUMPROD(uint64_t, uint64_t)
CUMPROD_BACKWARD(float)
CUMPROD_BACKWARD(double)

/* The work of cumprod and cumprod_backward. It is divided into items. Item i is a panel of `w` columns that starts at
 * element `at`. */
struct prod_panels { int64_t n, cols, panels, items; };
static struct prod_panels prod_panels(const ps_view *x, int dim)
{
    struct prod_panels p = { .cols = 1 };
    if (dim < 0) dim += x->ndim;
    p.n = x->shape[dim];
    for (int d = dim + 1; d < x->ndim; d++) p.cols *= x->shape[d];
    p.panels = ceil_div(p.cols, PROD_COLUMNS);
    p.items = x->numel / (p.n * p.cols) * p.panels;
    return p;
}
static int64_t prod_panel(const struct prod_panels *p, int64_t item, int *w)
{
    int64_t column = item % p->panels * PROD_COLUMNS;
    *w = p->cols - column < PROD_COLUMNS ? (int)(p->cols - column) : PROD_COLUMNS;
    return item / p->panels * p->n * p->cols + column;
}

static int cumprod(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (x->ndim == 0 || x->numel == 0 || !view_flat(x) || !view_flat(y) ||
        (x->dtype != PS_F32 && x->dtype != PS_F64 && x->dtype != PS_I64))
        return PS_EUNSUP;
    struct prod_panels p = prod_panels(x, ((const ps_attrs_cumprod *)call->attrs)->dim);
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t item = 0; item < p.items; item++) {
        int w;
        int64_t at = prod_panel(&p, item, &w);
        if (x->dtype == PS_F32) cumprod_float((const float *)x->data + at, (float *)y->data + at, p.n, p.cols, w);
        else if (x->dtype == PS_F64)
            cumprod_double((const double *)x->data + at, (double *)y->data + at, p.n, p.cols, w);
        else
            cumprod_uint64_t((const uint64_t *)x->data + at, (uint64_t *)y->data + at, p.n, p.cols, w);
    }
    return PS_OK;
}

static int cumprod_backward(ps_call *call)
{
    const ps_view *x = &call->in[0], *dy = &call->in[1], *dx = &call->out[0];
    if (x->ndim == 0 || x->numel == 0 || !view_flat(x) || !view_flat(dy) || !view_flat(dx) ||
        (x->dtype != PS_F32 && x->dtype != PS_F64))
        return PS_EUNSUP;
    struct prod_panels p = prod_panels(x, ((const ps_attrs_cumprod_backward *)call->attrs)->dim);
    double *later = scratch(call, x->numel * (int64_t)sizeof *later);
    if (!later) return PS_ENOMEM;
    if (call->dry) return PS_OK;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t item = 0; item < p.items; item++) {
        int w;
        int64_t at = prod_panel(&p, item, &w);
        double *own = later + item / p.panels * p.n * p.cols + item % p.panels * PROD_COLUMNS * p.n;
        if (x->dtype == PS_F32)
            cumprod_backward_float((const float *)x->data + at, (const float *)dy->data + at, (float *)dx->data + at,
                                   p.n, p.cols, w, own);
        else
            cumprod_backward_double((const double *)x->data + at, (const double *)dy->data + at,
                                    (double *)dx->data + at, p.n, p.cols, w, own);
    }
    return PS_OK;
}

/* -- variance: sums in double, in LANES lanes ---------------------------------------------------------------------- */
static double sum_of_lanes(const double *s)
{
    double sum = 0;
    for (int j = 0; j < LANES; j++) sum += s[j];
    return sum;
}
static double var_row(const float *x, int64_t n, bool unbiased)
{
    double s[LANES] = { 0 }, q[LANES] = { 0 };
    int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) s[j] += (double)x[i + j];
    for (int64_t i = whole; i < n; i++) s[i - whole] += (double)x[i];
    double mean = sum_of_lanes(s) / (double)n;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++) q[j] += ((double)x[i + j] - mean) * ((double)x[i + j] - mean);
    for (int64_t i = whole; i < n; i++) q[i - whole] += ((double)x[i] - mean) * ((double)x[i] - mean);
    return sum_of_lanes(q) / (double)(!unbiased ? n : n > 1 ? n - 1 : 0);
}
static int var(ps_call *call)
{
    const ps_attrs_var *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    int64_t n = ps_last_dim(x);
    if (x->dtype != PS_F32 || !view_flat(x) || !view_flat(y)) return PS_EUNSUP;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < y->numel; r++) {
        double v = var_row((const float *)x->data + r * n, n, a->unbiased);
        ((float *)y->data)[r] = (float)(a->root ? sqrt(v) : v);
    }
    return PS_OK;
}

/* -- median: finds the digits of the element at a rank, beginning with the highest digit, by counting digits ------- */
/* Returns an integer for the number x. The integers of two numbers have the same order as the numbers. */
static uint32_t ordered(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u >> 31 ? ~u : u | 0x80000000u;
}
static int median(ps_call *call)
{
    enum { DIGIT = 8, FEW = 64 };
    const ps_view *x = &call->in[0];
    int64_t n = x->numel, rank = (n - 1) / 2;
    if (x->dtype != PS_F32 || !view_flat(x)) return PS_EUNSUP;
    uint32_t *all = scratch(call, n * (int64_t)sizeof *all);
    if (!all) return PS_ENOMEM;
    if (call->dry) return PS_OK;
    const float *from = x->data;
    float *to = call->out[0].data;
    for (int64_t i = 0; i < n; i++) {
        if (from[i] != from[i]) {
            *to = from[i];
            return PS_OK;
        }
        all[i] = ordered(from[i]);
    }
    for (int shift = 32 - DIGIT; n > FEW && shift >= 0; shift -= DIGIT) {
        int64_t count[1 << DIGIT] = { 0 }, kept = 0;
        uint32_t digit = 0, mask = (1 << DIGIT) - 1;
        for (int64_t i = 0; i < n; i++) count[all[i] >> shift & mask]++;
        for (; rank >= count[digit]; digit++) rank -= count[digit];
        for (int64_t i = 0; i < n; i++) {
            all[kept] = all[i];
            kept += (all[i] >> shift & mask) == digit;
        }
        n = kept;
    }
    for (int64_t i = 1; n <= FEW && i < n; i++) {
        uint32_t one = all[i];
        int64_t k = i;
        for (; k > 0 && all[k - 1] > one; k--) all[k] = all[k - 1];
        all[k] = one;
    }
    uint32_t found = n <= FEW ? all[rank] : all[0];          /* if more than FEW elements are left, all of them are
                                                              * equal */
    found = found >> 31 ? found & 0x7FFFFFFFu : ~found;
    memcpy(to, &found, sizeof found);
    return PS_OK;
}

/* -- distances of rows --------------------------------------------------------------------------------------------- */
struct tables { int64_t batches, N, M, D; };
static struct tables tables_of(const ps_view *x, const ps_view *y)
{
    struct tables t = { 1, x->shape[x->ndim - 2], y->shape[y->ndim - 2], ps_last_dim(x) };
    for (int d = 0; d < x->ndim - 2; d++) t.batches *= x->shape[d];
    return t;
}

SIMD vf some(const float *x, int64_t i, int n) { return n == VL ? vf_load(x + i) : vf_get_n(x, i, PS_F32, n, 0.0f); }

/* Sets to[m] to the distance between x [D] and row m of y. y is transposed and has the shape [D, M]. */
SIMD void distances(float *to, const float *x, const float *y, int64_t M, int64_t D)
{
    for (int64_t m = 0; m < M; m += 4 * VL) {
        int64_t left = M - m;
        vf s[4] = { { 0 } };
        for (int64_t k = 0; k < D; k++) {
            vf one = vf_set(x[k]);
            for (int j = 0; j < 4 && j * VL < left; j++) {
                int n = left - j * VL < VL ? (int)(left - j * VL) : VL;
                vf away = one - some(y, k * M + m + j * VL, n);
                s[j] = s[j] + away * away;
            }
        }
        for (int j = 0; j < 4 && j * VL < left; j++) {
            int n = left - j * VL < VL ? (int)(left - j * VL) : VL;
            vf_put_n(to, m + j * VL, PS_F32, n, vf_sqrt(s[j]));
        }
    }
}
static int cdist(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->in[1], *d = &call->out[0];
    if (x->dtype != PS_F32 || !view_flat(x) || !view_flat(y) || !view_flat(d)) return PS_EUNSUP;
    struct tables t = tables_of(x, y);
    float *turned = scratch(call, y->numel * (int64_t)sizeof *turned);
    if (!turned) return PS_ENOMEM;
    if (call->dry) return PS_OK;
    for (int64_t b = 0; b < t.batches; b++)
        for (int64_t m = 0; m < t.M; m++)
            for (int64_t k = 0; k < t.D; k++)
                turned[(b * t.D + k) * t.M + m] = ((const float *)y->data)[(b * t.M + m) * t.D + k];
#pragma omp parallel for schedule(static) if (d->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < t.batches * t.N; r++)
        distances((float *)d->data + r * t.M, (const float *)x->data + r * t.D, turned + r / t.N * t.D * t.M, t.M, t.D);
    return PS_OK;
}

/* Sets dx [D] to the sum over the M rows of y of (x - row m) * slope[m * step]. */
SIMD void pull(float *dx, const float *x, const float *y, const float *slope, int64_t step, int64_t M, int64_t D)
{
    for (int64_t k = 0; k < D; k += VL) {
        int n = D - k < VL ? (int)(D - k) : VL;
        vf own = some(x, k, n), s = vf_zero();
        for (int64_t m = 0; m < M; m++) s = s + (own - some(y, m * D + k, n)) * vf_set(slope[m * step]);
        vf_put_n(dx, k, PS_F32, n, s);
    }
}
static int cdist_backward(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->in[1], *d = &call->in[2], *dd = &call->in[3];
    if (x->dtype != PS_F32 || !view_flat(x) || !view_flat(y) || !view_flat(d) || !view_flat(dd)) return PS_EUNSUP;
    struct tables t = tables_of(x, y);
    float *slope = scratch(call, d->numel * (int64_t)sizeof *slope);
    if (!slope) return PS_ENOMEM;
    if (call->dry) return PS_OK;
    const float *length = d->data, *given = dd->data;
    for (int64_t i = 0; i < d->numel; i++) slope[i] = length[i] == 0 ? 0 : given[i] / length[i];
#pragma omp parallel for schedule(static) if (d->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < (ps_has(&call->out[0]) ? t.batches * t.N : 0); r++)
        pull((float *)call->out[0].data + r * t.D, (const float *)x->data + r * t.D,
             (const float *)y->data + r / t.N * t.M * t.D, slope + r * t.M, 1, t.M, t.D);
#pragma omp parallel for schedule(static) if (d->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < (ps_has(&call->out[1]) ? t.batches * t.M : 0); r++)
        pull((float *)call->out[1].data + r * t.D, (const float *)y->data + r * t.D,
             (const float *)x->data + r / t.M * t.N * t.D, slope + r / t.M * t.N * t.M + r % t.M, t.M, t.N, t.D);
    return PS_OK;
}

void PS_ISA_FN(ps_cpu_fill_reduce)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_reduce)(ps_kernel *k)
{
    k[PS_OP_sum] = sum;
    k[PS_OP_mean] = mean;
    k[PS_OP_amax] = amax;
    k[PS_OP_amin] = amin;
    k[PS_OP_argmax] = argmax;
    k[PS_OP_argmin] = argmin;
    k[PS_OP_prod] = prod;
    k[PS_OP_var] = var;
    k[PS_OP_median] = median;
    k[PS_OP_cdist] = cdist;
    k[PS_OP_cdist_backward] = cdist_backward;
    k[PS_OP_topk] = topk;
    k[PS_OP_cumsum] = cumsum;
    k[PS_OP_cumprod] = cumprod;
    k[PS_OP_cumprod_backward] = cumprod_backward;
}
