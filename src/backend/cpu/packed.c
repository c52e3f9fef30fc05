/* SPDX-License-Identifier: BSD-3-Clause
 * The ops over packed weights on the cpu. If x has few rows, simd/packed.c multiplies the packed blocks directly, in
 * fp32. If x has many rows, the matrix is unpacked in tiles, which are multiplied like other matrices. If oneDNN can
 * multiply the type of x without a conversion, a tile has this type. Otherwise a tile is fp32. The division into tiles
 * depends only on the shapes. */
#include "backend/cpu/gemm.h"
#include "backend/cpu/packed.h"
#include "base/blocks.h"
#include "base/error.h"

enum { TILE = 1 << 20 };                                 /* number of values in a tile; an fp32 tile takes 4 MiB */

static bool is_float(const ps_view *v) { return v->dtype == PS_F32 || v->dtype == PS_BF16 || v->dtype == PS_F16; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int ps_cpu_unpack_op(ps_call *call)
{
    const struct ps_attrs_unpack *attrs = call->attrs;
    const ps_view *w = &call->in[0], *scales = &call->in[1], *y = &call->out[0];
    const ps_blocks *b = ps_blocks_of(attrs->type);
    if (!b || !is_float(y)) return PS_EUNSUP;
    int64_t blocks = w->numel / b->bytes, step = 64, size = b->block * ps_dtype_bytes(y->dtype);
#pragma omp parallel for schedule(static) if (y->numel > PS_PAR_MIN)
    for (int64_t i = 0; i < blocks; i += step)
        ps_cpu_unpack(attrs->type, (const uint8_t *)w->data + i * b->bytes, least(step, blocks - i),
                      ps_has(scales) ? scales->data : NULL, i, (char *)y->data + i * size, y->dtype);
    return 0;
}

int ps_cpu_pack_op(ps_call *call)
{
    const ps_view *x = &call->in[0];
    const ps_blocks *b = ps_blocks_of(PS_Q8_0);
    int64_t blocks = x->numel / b->block, size = b->block * ps_dtype_bytes(x->dtype);
    if (!is_float(x)) return PS_EUNSUP;
#pragma omp parallel for schedule(static) if (x->numel > PS_PAR_MIN)
    for (int64_t i = 0; i < blocks; i++) {
        float values[PS_BLOCKS_MOST];
        ps_cpu_row_load(values, (const char *)x->data + i * size, b->block, x->dtype);
        ps_pack_q8_0(values, (uint8_t *)call->out[0].data + i * b->bytes);
    }
    return 0;
}

typedef struct product {
    ps_call *call;
    ps_gemm_space space;
    ps_packed_matrix w;
    const ps_view *x, *bias, *residual, *y;             /* bias and residual are NULL if absent */
    int64_t M;
    int64_t lines;                                      /* in forward, the number of rows in a tile; in backward, the
                                                         * number of columns in a tile */
    int type;                                           /* type of the values in a tile */
    void *tile;
} product;

/* -- few rows ------------------------------------------------------------------------------------------------------ */
static int few_rows(product *p)
{
    int64_t M = p->M, K = p->w.cols, N = p->w.rows, size = ps_dtype_bytes(p->y->dtype);
    const struct ps_attrs_linear_packed *attrs = p->call->attrs;
    bool int8 = attrs->int8 && ps_blocks_int8(p->w.type);
    int64_t parts = int8 ? M * K / PS_INT8_PART : 0;
    size_t rounded = (size_t)parts * sizeof(ps_int8_part);
    ps_int8_part *q = p->call->scratch(p->call, rounded + (size_t)(M * (K + 2 * N)) * 4);
    if (!q) return PS_ENOMEM;
    if (p->call->dry) return 0;
    float *x = (float *)(q + parts), *c = x + M * K, *more = c + M * N;
    ps_cpu_row_load(x, p->x->data, M * K, p->x->dtype);
    if (int8) {
        ps_cpu_round_int8(x, parts, q);
        ps_cpu_int8_dots(&p->w, q, M, c);
    } else {
        ps_cpu_packed_dots(&p->w, x, M, c);
    }
    for (int64_t m = 0; p->bias && m < M; m++) {
        ps_cpu_row_load(more, p->bias->data, N, p->bias->dtype);
        for (int64_t j = 0; j < N; j++) c[m * N + j] += more[j];
    }
    if (p->residual) {
        ps_cpu_row_load(more, p->residual->data, M * N, p->residual->dtype);
        for (int64_t j = 0; j < M * N; j++) c[j] += more[j];
    }
    for (int64_t m = 0; m < M; m++)
        ps_cpu_row_store((char *)p->y->data + m * N * size, c + m * N, N, p->y->dtype);
    return 0;
}

/* -- tiles --------------------------------------------------------------------------------------------------------- */
/* Unpacks columns [from, from + cols) of rows [first, first + n) of the matrix. */
static void unpack_tile(const product *p, int64_t first, int64_t n, int64_t from, int64_t cols)
{
    const ps_blocks *b = ps_blocks_of(p->w.type);
    int64_t of_row = p->w.cols / b->block, at = from / b->block, blocks = cols / b->block;
    int64_t size = cols * ps_dtype_bytes(p->type);
#pragma omp parallel for schedule(static) if (n * cols > PS_PAR_MIN)
    for (int64_t i = 0; i < n; i++)
        ps_cpu_unpack(p->w.type, p->w.data + (first + i) * p->w.row_nbytes + at * b->bytes, blocks, p->w.scales,
                      (first + i) * of_row + at, (char *)p->tile + i * size, p->type);
}

static void *moved(const ps_view *v, int64_t i) { return (char *)v->data + i * ps_dtype_bytes(v->dtype); }

/* Computes y [M, rows] = x [M, cols] w^T + bias + residual. A tile consists of complete rows of w. Each of these rows
 * yields one column of y. */
static int forward(product *p)
{
    int64_t K = p->w.cols, N = p->w.rows;
    for (int64_t first = 0; first < N; first += p->lines) {
        int64_t n = least(p->lines, N - first);
        if (!p->call->dry) unpack_tile(p, first, n, 0, K);
        ps_gemm g = { .batch = 1, .bias_dtype = PS_F32 };
        g.a = (ps_mat){ p->x->data, p->x->dtype, p->M, K, K, 1 };
        g.b = (ps_mat){ p->tile, p->type, K, n, 1, K };
        g.dst = (ps_mat){ moved(p->y, first), p->y->dtype, p->M, n, N, 1 };
        if (p->bias) g.bias = moved(p->bias, first), g.bias_dtype = p->bias->dtype;
        if (p->residual) g.residual = moved(p->residual, first), g.ld_residual = N;
        PS_TRY(ps_cpu_gemm_run(&p->space, &g));
    }
    return 0;
}

/* Computes y [M, cols] = x [M, rows] w. A tile consists of complete columns of w, so that no sum is divided. */
static int backward(product *p)
{
    int64_t K = p->w.cols, N = p->w.rows, M = p->M;
    for (int64_t first = 0; first < K; first += p->lines) {
        int64_t n = least(p->lines, K - first);
        if (!p->call->dry) unpack_tile(p, 0, N, first, n);
        ps_gemm g = { .batch = 1, .bias_dtype = PS_F32 };
        g.a = (ps_mat){ p->x->data, p->x->dtype, M, N, N, 1 };
        g.b = (ps_mat){ p->tile, p->type, N, n, n, 1 };
        g.dst = (ps_mat){ moved(p->y, first), p->y->dtype, M, n, K, 1 };
        PS_TRY(ps_cpu_gemm_run(&p->space, &g));
    }
    return 0;
}

int ps_cpu_linear_packed(ps_call *call)
{
    const struct ps_attrs_linear_packed *attrs = call->attrs;
    const ps_view *x = &call->in[0], *w = &call->in[1], *b = &call->in[2], *r = &call->in[3], *y = &call->out[0];
    const ps_blocks *blocks = ps_blocks_of(attrs->type);
    if (!blocks || !is_float(x) || (ps_has(b) && !is_float(b))) return PS_EUNSUP;
    if (y->numel == 0 || x->numel == 0) return PS_EUNSUP;
    product p = { .call = call, .space = { .call = call }, .x = x, .y = y, .bias = ps_has(b) ? b : NULL,
                  .residual = ps_has(r) ? r : NULL };
    p.w = (ps_packed_matrix){ w->data, w->shape[0], w->shape[1] / blocks->bytes * blocks->block, w->shape[1],
                              attrs->type, ps_has(&call->in[4]) ? call->in[4].data : NULL };
    p.M = x->numel / (attrs->back ? p.w.rows : p.w.cols);
    if (!attrs->back && p.M <= PS_PACKED_ROWS) return few_rows(&p);
    p.type = ps_cpu_gemm_native(x->dtype) ? x->dtype : PS_F32;
    int64_t length = attrs->back ? p.w.rows : p.w.cols, lines = attrs->back ? p.w.cols : p.w.rows;
    p.lines = TILE / length / PS_BLOCKS_MOST * PS_BLOCKS_MOST;
    if (p.lines < PS_BLOCKS_MOST) p.lines = PS_BLOCKS_MOST;
    if (p.lines > lines) p.lines = lines;
    p.tile = call->scratch(call, (size_t)(p.lines * length * ps_dtype_bytes(p.type)));
    if (!p.tile) return PS_ENOMEM;
    return attrs->back ? backward(&p) : forward(&p);
}
