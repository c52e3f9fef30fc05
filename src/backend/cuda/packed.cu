/* SPDX-License-Identifier: BSD-3-Clause
 * Products with packed weights. Packed weights are stored in the blocks of base/blocks.h. The formulas of base/blocks.h
 * are repeated here operation by operation, so results are bit-identical to the results of the device ref. If x has at
 * most PS_PACKED_ROWS rows, a kernel multiplies the blocks directly, in fp32. If x has more rows, panels of the weight
 * are unpacked to the type of x, and cuBLASLt multiplies x by the panels. */
#include "backend/cuda/device.h"
#include "base/blocks.h"

enum { RUN = 8 };                                    /* number of values that a thread unpacks at a time */

/* A block type with the sizes of its blocks, and the table of NF4's values. The struct is passed to kernels by
 * value. */
struct packed_type {
    int type, block, bytes;
    float nf4[16];
};

static packed_type type_of(int type)
{
    packed_type t = { type, 32, 0, { 0 } };
    memcpy(t.nf4, ps_nf4, sizeof t.nf4);
    switch (type) {
    case PS_Q4_0: case PS_IQ4_NL: t.bytes = 18; break;
    case PS_Q4_1: t.bytes = 20; break;
    case PS_Q5_0: t.bytes = 22; break;
    case PS_Q5_1: t.bytes = 24; break;
    case PS_Q8_0: t.bytes = 34; break;
    case PS_MXFP4: t.bytes = 17; break;
    case PS_Q2_K: t.block = 256, t.bytes = 84; break;
    case PS_Q3_K: t.block = 256, t.bytes = 110; break;
    case PS_Q4_K: t.block = 256, t.bytes = 144; break;
    case PS_Q5_K: t.block = 256, t.bytes = 176; break;
    case PS_Q6_K: t.block = 256, t.bytes = 210; break;
    case PS_IQ4_XS: t.block = 256, t.bytes = 136; break;
    case PS_NF4: t.block = 64, t.bytes = 36; break;
    case PS_NF4_DOUBLE: t.block = 64, t.bytes = 33; break;
    default: break;
    }
    return t;
}

/* -- numbers in a block, read byte by byte, since blocks have no alignment ----------------------------------------- */
DEV float half_at(const uint8_t *s) { return f16_up((uint16_t)(s[0] | s[1] << 8)); }
DEV uint32_t u32_at(const uint8_t *s)
{
    return (uint32_t)s[0] | (uint32_t)s[1] << 8 | (uint32_t)s[2] << 16 | (uint32_t)s[3] << 24;
}
/* Returns entry i of a table of 16 signed bytes. Entries 0 to 7 are packed in `low`, and entries 8 to 15 in `high`. */
DEV int entry(uint64_t low, uint64_t high, int i) { return (int8_t)((i < 8 ? low : high) >> (i % 8 * 8)); }
DEV int iq4_value(int i) { return entry(0xf6eaddcfbfad9881ull, 0x7159453526190d01ull, i); }
DEV int mxfp4_twice(int i) { return entry(0x0c08060403020100ull, 0xf4f8fafcfdfeff00ull, i); }
DEV float times(float a, int b) { return __fmul_rn(a, (float)b); }

/* Reads the scale and the minimum of one part of a block in Q4_K or Q5_K (ps_blocks_scale). A block has 8 parts. */
DEV void part_scale(const uint8_t *s, int p, int *scale, int *min)
{
    *scale = p < 4 ? s[p] & 63 : (s[4 + p] & 15) | (s[p - 4] >> 6) << 4;
    *min = p < 4 ? s[4 + p] & 63 : s[4 + p] >> 4 | (s[p] >> 6) << 4;
}

/* Unpacks a run of 8 numbers from a block of 32, starting at number k. Byte b of a block holds number b in its low half
 * and number 16 + b in its high half. k is a multiple of 8, so the run is in the low halves or in the high halves of 8
 * bytes. */
DEV void unpack_32(int type, const uint8_t *s, int k, float *v)
{
    int shift = k < 16 ? 0 : 4, at = k % 16;
    float d, m = 0;
    uint32_t high = 0;
    if (type == PS_MXFP4) d = __uint_as_float(s[0] < 2 ? 0x00200000u << s[0] : (uint32_t)(s[0] - 1) << 23);
    else d = half_at(s);
    if (type == PS_Q4_1 || type == PS_Q5_1) m = half_at(s + 2);
    if (type == PS_Q5_0 || type == PS_Q5_1) high = u32_at(s + (type == PS_Q5_0 ? 2 : 4)) >> k;
    const uint8_t *qs = s + 2;
    if (type == PS_MXFP4) qs = s + 1;
    else if (type == PS_Q4_1) qs = s + 4;
    else if (type == PS_Q5_0) qs = s + 6;
    else if (type == PS_Q5_1) qs = s + 8;
#pragma unroll
    for (int j = 0; j < RUN; j++) {
        int q = qs[at + j] >> shift & 15, fifth = (int)(high >> j & 1) << 4;
        if (type == PS_Q4_0) v[j] = times(d, q - 8);
        else if (type == PS_Q4_1) v[j] = __fadd_rn(times(d, q), m);
        else if (type == PS_Q5_0) v[j] = times(d, (q | fifth) - 16);
        else if (type == PS_Q5_1) v[j] = __fadd_rn(times(d, q | fifth), m);
        else v[j] = times(d, type == PS_IQ4_NL ? iq4_value(q) : mxfp4_twice(q));
    }
}

DEV void unpack_q8_0(const uint8_t *s, int k, float *v)
{
    float d = half_at(s);
#pragma unroll
    for (int j = 0; j < RUN; j++) v[j] = times(d, (int8_t)s[2 + k + j]);
}

/* Unpacks a run of NF4 codes, starting at code k, and multiplies the values by the scale `most`. The high half of byte
 * b holds code 2 * b, and the low half holds code 2 * b + 1. */
DEV void unpack_nf4(const float *table, float most, const uint8_t *codes, int k, float *v)
{
#pragma unroll
    for (int j = 0; j < RUN; j++) v[j] = __fmul_rn(table[codes[(k + j) / 2] >> (j % 2 ? 0 : 4) & 15], most);
}
/* Returns the scale of block `number` of a weight in NF4_DOUBLE (ps_blocks_double_scale). */
DEV float double_scale(const uint8_t *s, const float *scales, int64_t number)
{
    return __fadd_rn(__fmul_rn(scales[1 + s[0]], scales[PS_SCALES_HEAD + number / PS_SCALES_GROUP]), scales[0]);
}

/* These functions unpack a run from a block of 256 numbers. The formats of such blocks are described in base/blocks.c.
 * All numbers of a run have the same scale. */
DEV void unpack_q2_k(const uint8_t *s, int n, float *v)
{
    float d = half_at(s + 80), m = half_at(s + 82);
    int part = s[n / 16], shift = n % 128 / 32 * 2;
    float by = times(d, part & 15), less = times(m, part >> 4);
#pragma unroll
    for (int j = 0; j < RUN; j++)
        v[j] = __fadd_rn(times(by, s[16 + n / 128 * 32 + n % 32 + j] >> shift & 3), -less);
}

DEV void unpack_q3_k(const uint8_t *s, int n, float *v)
{
    const uint8_t *qs = s + 32 + n / 128 * 32, *scales = s + 96;
    int k = n % 128 / 32, p = n / 16, bit = n / 128 * 4 + k;
    int scale = (p < 8 ? scales[p] & 15 : scales[p - 8] >> 4) | (scales[8 + p % 4] >> (2 * (p / 4)) & 3) << 4;
    float by = times(half_at(s + 108), scale - 32);
#pragma unroll
    for (int j = 0; j < RUN; j++)
        v[j] = times(by, (qs[n % 32 + j] >> (2 * k) & 3) - (s[n % 32 + j] >> bit & 1 ? 0 : 4));
}

DEV void unpack_q4_k(const uint8_t *s, int n, bool fifth, float *v)
{
    const uint8_t *qh = s + 16, *qs = s + (fifth ? 48 : 16);
    int p = n / 32, k = n % 32, scale, min;
    part_scale(s + 4, p, &scale, &min);
    float by = times(half_at(s), scale), less = times(half_at(s + 2), min);
#pragma unroll
    for (int j = 0; j < RUN; j++) {
        int q = qs[p / 2 * 32 + k + j] >> (p % 2 * 4) & 15;
        if (fifth) q |= (qh[k + j] >> p & 1) << 4;
        v[j] = __fadd_rn(times(by, q), -less);
    }
}

DEV void unpack_q6_k(const uint8_t *s, int n, float *v)
{
    const uint8_t *qh = s + 128 + n / 128 * 32 + n % 32, *ql = s + n / 128 * 64 + n % 64;
    int k = n % 128 / 32, shift = n % 128 / 64 * 4;
    float by = times(half_at(s + 208), (int8_t)s[192 + n / 16]);
#pragma unroll
    for (int j = 0; j < RUN; j++)
        v[j] = times(by, ((ql[j] >> shift & 15) | (qh[j] >> (2 * k) & 3) << 4) - 32);
}

DEV void unpack_iq4_xs(const uint8_t *s, int n, float *v)
{
    int p = n / 32, k = n % 32, high = s[2] | s[3] << 8;
    int scale = (s[4 + p / 2] >> (p % 2 * 4) & 15) | (high >> (2 * p) & 3) << 4;
    float by = times(half_at(s), scale - 32);
#pragma unroll
    for (int j = 0; j < RUN; j++) v[j] = times(by, iq4_value(s[8 + 16 * p + k % 16 + j] >> (k < 16 ? 0 : 4) & 15));
}

/* Consecutive rows of a packed matrix, or some columns of them. There are `rows` rows, row_nbytes bytes apart. Each row
 * has per_row runs. */
struct packed_part {
    packed_type t;
    const uint8_t *w;
    int64_t rows, row_nbytes, per_row;
    const float *scales;                             /* scales of a weight in NF4_DOUBLE; otherwise NULL */
    int64_t first, row_blocks;                       /* first: index, in the whole weight, of the block at w.
                                                      * row_blocks: number of blocks per row of the whole weight */
};

/* Unpacks a run of 8 numbers of a row. Run 0 begins with the row's first block in the part. */
DEV void unpack_run(const packed_part &p, int64_t row, int64_t run, float *v)
{
    int each = p.t.block / RUN;
    int64_t block = run / each;
    const uint8_t *s = p.w + row * p.row_nbytes + block * p.t.bytes;
    int k = (int)(run - block * each) * RUN;
    switch (p.t.type) {
    case PS_Q4_0: unpack_32(PS_Q4_0, s, k, v); break;
    case PS_Q4_1: unpack_32(PS_Q4_1, s, k, v); break;
    case PS_Q5_0: unpack_32(PS_Q5_0, s, k, v); break;
    case PS_Q5_1: unpack_32(PS_Q5_1, s, k, v); break;
    case PS_IQ4_NL: unpack_32(PS_IQ4_NL, s, k, v); break;
    case PS_MXFP4: unpack_32(PS_MXFP4, s, k, v); break;
    case PS_Q8_0: unpack_q8_0(s, k, v); break;
    case PS_Q2_K: unpack_q2_k(s, k, v); break;
    case PS_Q3_K: unpack_q3_k(s, k, v); break;
    case PS_Q4_K: unpack_q4_k(s, k, false, v); break;
    case PS_Q5_K: unpack_q4_k(s, k, true, v); break;
    case PS_Q6_K: unpack_q6_k(s, k, v); break;
    case PS_IQ4_XS: unpack_iq4_xs(s, k, v); break;
    case PS_NF4: unpack_nf4(p.t.nf4, __uint_as_float(u32_at(s)), s + 4, k, v); break;
    default: {
        int64_t number = p.first + row * p.row_blocks + block;
        unpack_nf4(p.t.nf4, double_scale(s, p.scales, number), s + 1, k, v);
    }
    }
}

/* -- unpacking ----------------------------------------------------------------------------------------------------- */
template <class T> KERNEL_UP_TO(THREADS) unpack_kernel(T *y, const __grid_constant__ packed_part p)
{
    for (int64_t i = FIRST_ELEMENT; i < p.rows * p.per_row; i += ALL_THREADS) {
        int64_t row = i / p.per_row;
        float v[RUN];
        unpack_run(p, row, i - row * p.per_row, v);
        T *to = y + i * RUN;
        if (sizeof(T) <= 4 && aligned16(y)) {
            const int W = pack<T>::n;
            union { pack<T> v[RUN / W]; uint4 raw[RUN / W]; } out;
#pragma unroll
            for (int j = 0; j < RUN; j++) out.v[j / W].v[j % W] = down<T>(v[j]);
#pragma unroll
            for (int j = 0; j < RUN / W; j++) ((uint4 *)to)[j] = out.raw[j];
        } else {
#pragma unroll
            for (int j = 0; j < RUN; j++) to[j] = down<T>(v[j]);
        }
    }
}
template <class T> static int run_unpack(void *y, const packed_part &p)
{
    if (p.rows * p.per_row > 0)
        PS_LAUNCH(unpack_kernel<T>, blocks_for(p.rows * p.per_row), THREADS, 0, ps_cu->compute, (T *)y, p);
    return 0;
}

/* `scales` is absent if the block type needs no separate scales. */
static packed_part part_of(int type, const ps_view *w, const ps_view *scales, int64_t rows, int64_t row_nbytes)
{
    packed_type t = type_of(type);
    int64_t blocks = row_nbytes / t.bytes;
    packed_part p = { t, (const uint8_t *)w->data, rows, row_nbytes, blocks * t.block / RUN,
                      ps_has(scales) ? (const float *)scales->data : NULL, 0, blocks };
    return p;
}
static int unpack_op(ps_call *call)
{
    const ps_view *w = &call->in[0], *y = &call->out[0];
    packed_part p = part_of(((const ps_attrs_unpack *)call->attrs)->type, w, &call->in[1], 1, w->numel);
    return BY_FLOAT(y->dtype, run_unpack, y->data, p);
}

/* -- packing as Q8_0 (ps_pack_q8_0), one warp per block ------------------------------------------------------------ */
template <class T> KERNEL_UP_TO(THREADS) pack_kernel(uint8_t *to, const T *x, int64_t blocks)
{
    int lane = threadIdx.x % 32;
    for (int64_t block = FIRST_ELEMENT / 32; block < blocks; block += ALL_THREADS / 32) {
        float v = (float)up(x[block * 32 + lane]), most = warp_all<op_max>(fabsf(v));
        float d = __fdiv_rn(most, 127.0f), by = d != 0 ? __fdiv_rn(1.0f, d) : 0.0f;
        bool finite = warp_all<op_add>(v * 0.0f) == 0;
        uint8_t *s = to + block * 34;
        s[2 + lane] = finite ? (uint8_t)(int8_t)roundf(__fmul_rn(v, by)) : 0;
        if (lane > 0) continue;
        uint16_t half = finite ? f16_down(d) : 0x7e00;                   /* NaN */
        s[0] = (uint8_t)half, s[1] = (uint8_t)(half >> 8);
    }
}
template <class T> static int run_pack(void *to, const void *x, int64_t blocks)
{
    if (blocks > 0)
        PS_LAUNCH(pack_kernel<T>, blocks_for(blocks * 32), THREADS, 0, ps_cu->compute, (uint8_t *)to, (const T *)x,
                  blocks);
    return 0;
}
static int pack_op(ps_call *call)
{
    const ps_view *x = &call->in[0];
    return BY_FLOAT(x->dtype, run_pack, call->out[0].data, x->data, x->numel / 32);
}

/* -- few rows ------------------------------------------------------------------------------------------------------ */
/* Rounds x to 8 bits as in base/blocks.h. Each part of 32 elements has its own scale. Writes the rounded integers,
 * multiplied by their scale, to `to`. Each warp rounds one part. */
template <class T> KERNEL_UP_TO(THREADS) round_kernel(typename type_info<T>::acc *to, const T *x, int64_t parts)
{
    for (int64_t part = FIRST_ELEMENT / 32; part < parts; part += ALL_THREADS / 32) {
        int64_t i = part * PS_INT8_PART + threadIdx.x % 32;
        float v = (float)up(x[i]), largest = warp_all<op_max>(fabsf(v)), odd = warp_all<op_add>(v * 0.0f);
        float d = __fdiv_rn(largest, 127.0f), by = largest < 1e-36f ? 0.0f : __fdiv_rn(127.0f, largest);
        to[i] = odd != odd ? odd : by > 0 ? rintf(__fmul_rn(v, by)) * d : 0.0f;
    }
}

/* The operands of y [M, N] = x [M, K] w^T + bias [N] + residual [M, N] for a packed w [N, K]. X is the type of x. T is
 * the type of y. If X is not T, x was rounded to 8 bits. */
template <class X, class T> struct few_call {
    packed_part w;
    const X *x;
    T *y;
    const void *bias;
    const T *residual;
    int bias_dtype, M;
    int64_t N, K;
};

/* Each warp computes one column of y. */
template <class X, class T> KERNEL_UP_TO(THREADS) few_rows_kernel(const __grid_constant__ few_call<X, T> c)
{
    typedef typename type_info<T>::acc A;
    int lane = threadIdx.x % 32;
    for (int64_t n = FIRST_ELEMENT / 32; n < c.N; n += ALL_THREADS / 32) {
        A sum[PS_PACKED_ROWS];
#pragma unroll
        for (int m = 0; m < PS_PACKED_ROWS; m++) sum[m] = 0;
        for (int64_t run = lane; run < c.w.per_row; run += 32) {
            float v[RUN];
            unpack_run(c.w, n, run, v);
#pragma unroll
            for (int m = 0; m < PS_PACKED_ROWS; m++) {
                if (m >= c.M) break;
                const X *x = c.x + m * c.K + run * RUN;
#pragma unroll
                for (int j = 0; j < RUN; j++) sum[m] += (A)v[j] * (A)up(x[j]);
            }
        }
#pragma unroll
        for (int m = 0; m < PS_PACKED_ROWS; m++) {
            if (m >= c.M) break;
            A total = warp_all<op_add>(sum[m]);
            if (lane > 0) continue;
            if (c.bias) total += access<A>::load(c.bias, c.bias_dtype, n);
            if (c.residual) total += (A)up(c.residual[m * c.N + n]);
            c.y[m * c.N + n] = down<T>(total);
        }
    }
}

struct packed_product {
    ps_call *call;
    const ps_view *x, *bias, *residual, *y;          /* bias and residual are NULL if they are absent */
    packed_part w;
    int64_t M, N, K;
};

template <class X, class T> static int run_few(const packed_product &p, const X *x)
{
    few_call<X, T> c = { p.w, x, (T *)p.y->data, p.bias ? p.bias->data : NULL,
                         p.residual ? (const T *)p.residual->data : NULL, p.bias ? p.bias->dtype : 0, (int)p.M, p.N,
                         p.K };
    PS_LAUNCH((few_rows_kernel<X, T>), blocks_for(p.N * 32), THREADS, 0, ps_cu->compute, c);
    return 0;
}
template <class T> static int few_rows(const packed_product &p)
{
    typedef typename type_info<T>::acc A;
    const ps_attrs_linear_packed *a = (const ps_attrs_linear_packed *)p.call->attrs;
    const T *x = (const T *)p.x->data;
    if (!a->int8 || !ps_blocks_int8(a->type)) return run_few<T, T>(p, x);
    A *rounded = (A *)p.call->scratch(p.call, (size_t)ps_cu_rounded_nbytes(p.M * p.K, p.y->dtype));
    if (!rounded) return PS_ENOMEM;
    int64_t parts = p.M * p.K / PS_INT8_PART;
    if (parts > 0) PS_LAUNCH(round_kernel<T>, blocks_for(parts * 32), THREADS, 0, ps_cu->compute, rounded, x, parts);
    return run_few<A, T>(p, (const A *)rounded);
}

/* -- many rows ----------------------------------------------------------------------------------------------------- */
static char *moved(const ps_view *v, int64_t i) { return (char *)v->data + i * ps_dtype_bytes(v->dtype); }
static ps_cu_mat matrix(void *data, int dtype, int64_t rows, int64_t cols, int64_t stride_row, int64_t stride_col)
{
    ps_cu_mat m = { data, dtype, rows, cols, stride_row, stride_col };
    return m;
}

/* Computes y [M, N] = x [M, K] w^T + bias + residual. Unpacks one panel of rows of w at a time, and computes the
 * matching columns of y. */
static int forward(const packed_product &p)
{
    int64_t step = ps_cu_packed_rows(p.N, p.K, p.y->dtype);
    void *panel = p.call->scratch(p.call, (size_t)ps_cu_packed_nbytes(step, p.K, p.y->dtype));
    if (!panel) return PS_ENOMEM;
    for (int64_t first = 0; first < p.N; first += step) {
        int64_t n = p.N - first < step ? p.N - first : step;
        packed_part part = p.w;
        part.w += first * part.row_nbytes;
        part.first = first * part.row_blocks;
        part.rows = n;
        PS_TRY(BY_FLOAT(p.y->dtype, run_unpack, panel, part));
        ps_cu_gemm g;
        memset(&g, 0, sizeof g);
        g.batch = 1;
        g.a = matrix(p.x->data, p.x->dtype, p.M, p.K, p.K, 1);
        g.b = matrix(panel, p.y->dtype, p.K, n, 1, p.K);
        g.dst = matrix(moved(p.y, first), p.y->dtype, p.M, n, p.N, 1);
        if (p.bias) g.bias = moved(p.bias, first), g.bias_dtype = p.bias->dtype;
        if (p.residual) g.residual = moved(p.residual, first), g.ld_residual = p.N;
        PS_TRY(ps_cuda_gemm(p.call, &g));
    }
    return 0;
}

/* Computes y [M, K] = x [M, N] w. Unpacks one panel of columns of w at a time, and computes the same columns of y. One
 * product thus computes a whole sum, which is rounded once. */
static int backward(const packed_product &p)
{
    int64_t step = ps_cu_packed_cols(p.N, p.K, p.y->dtype);
    void *panel = p.call->scratch(p.call, (size_t)ps_cu_packed_nbytes(p.N, step, p.y->dtype));
    if (!panel) return PS_ENOMEM;
    for (int64_t first = 0; first < p.K; first += step) {
        int64_t k = p.K - first < step ? p.K - first : step;
        packed_part part = p.w;
        part.w += first / part.t.block * part.t.bytes;
        part.first = first / part.t.block;
        part.per_row = k / RUN;
        PS_TRY(BY_FLOAT(p.y->dtype, run_unpack, panel, part));
        ps_cu_gemm g;
        memset(&g, 0, sizeof g);
        g.batch = 1;
        g.a = matrix(p.x->data, p.x->dtype, p.M, p.N, p.N, 1);
        g.b = matrix(panel, p.y->dtype, p.N, k, k, 1);
        g.dst = matrix(moved(p.y, first), p.y->dtype, p.M, k, p.K, 1);
        PS_TRY(ps_cuda_gemm(p.call, &g));
    }
    return 0;
}

static int linear_packed(ps_call *call)
{
    const ps_attrs_linear_packed *a = (const ps_attrs_linear_packed *)call->attrs;
    const ps_view *w = &call->in[1], *y = &call->out[0];
    if (y->numel == 0) return 0;
    int64_t N = w->shape[0];
    packed_part part = part_of(a->type, w, &call->in[4], N, w->shape[1]);
    packed_product p = { call, &call->in[0], ps_has(&call->in[2]) ? &call->in[2] : NULL,
                  ps_has(&call->in[3]) ? &call->in[3] : NULL, y, part, y->numel / ps_cu_last(y), N,
                  part.per_row * RUN };
    if (!a->back && p.M <= PS_PACKED_ROWS) return BY_FLOAT(y->dtype, few_rows, p);
    if (p.x->numel == 0 && a->back) return ps_cuda_clear(y->data, (size_t)(y->numel * ps_dtype_bytes(y->dtype)));
    return a->back ? backward(p) : forward(p);
}

void ps_cuda_fill_packed(ps_kernel *k)
{
    k[PS_OP_unpack] = unpack_op;
    k[PS_OP_pack] = pack_op;
    k[PS_OP_linear_packed] = linear_packed;
}
