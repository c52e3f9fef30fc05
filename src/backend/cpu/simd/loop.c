/* SPDX-License-Identifier: BSD-3-Clause
 * The iterator of loop.h. It merges dimensions, gathers strided operands into buffers, and pads the last vector. This
 * file also copies between layouts. If both operands have contiguous runs, a copy processes one run at a time. If one
 * operand is the transpose of the other, a copy processes one tile at a time. */
#include "backend/cpu/simd/loop.h"

/* -- set-up -------------------------------------------------------------------------------------------------------- */
static void broadcast_strides(int64_t *stride, const ps_view *v, int ndim)
{
    for (int d = 0; d < ndim; d++) {
        int from = d - (ndim - v->ndim);
        stride[d] = from < 0 || v->shape[from] == 1 ? 0 : v->stride[from];
    }
}

static void swap_dims(loop *l, int a, int b)
{
    int64_t t = l->shape[a];
    l->shape[a] = l->shape[b], l->shape[b] = t;
    for (int k = 0; k < l->n; k++) {
        int64_t *s = l->op[k].stride;
        t = s[a], s[a] = s[b], s[b] = t;
    }
}

static bool mergeable(const loop *l, int d)        /* returns true if dimensions d and d + 1 can be merged */
{
    for (int k = 0; k < l->n; k++)
        if (l->op[k].stride[d] != l->op[k].stride[d + 1] * l->shape[d + 1]) return false;
    return true;
}

static void remove_dim(loop *l, int d)
{
    l->ndim--;
    for (int i = d; i < l->ndim; i++) {
        l->shape[i] = l->shape[i + 1];
        for (int k = 0; k < l->n; k++) l->op[k].stride[i] = l->op[k].stride[i + 1];
    }
}

void loop_init(loop *l, const ps_view *out, int n_in, const ps_view *const *in)
{
    l->n = n_in + 1;
    l->ndim = out->ndim;
    l->numel = out->numel;
    memcpy(l->shape, out->shape, sizeof l->shape);
    for (int k = 0; k < l->n; k++) {
        const ps_view *v = k == 0 ? out : in[k - 1];
        l->op[k].data = v->data;
        l->op[k].size = ps_dtype_bytes(v->dtype);
        broadcast_strides(l->op[k].stride, v, out->ndim);
    }
    for (int d = l->ndim - 1; d >= 0; d--)
        if (l->shape[d] == 1) remove_dim(l, d);
    /* If the output is a permuted view, the loop processes its elements in the order in which they are in memory. */
    for (int i = 1; i < l->ndim; i++)
        for (int d = i; d > 0 && l->op[0].stride[d - 1] < l->op[0].stride[d]; d--) swap_dims(l, d - 1, d);
    for (int d = l->ndim - 2; d >= 0; d--)
        if (mergeable(l, d)) {
            l->shape[d] *= l->shape[d + 1];
            for (int k = 0; k < l->n; k++) l->op[k].stride[d] = l->op[k].stride[d + 1];
            remove_dim(l, d + 1);
        }
    if (l->ndim == 0) {
        l->ndim = 1, l->shape[0] = 1;
        for (int k = 0; k < l->n; k++) l->op[k].stride[0] = 1;
    }
    for (int k = 0; k < l->n; k++) {
        int64_t expect = 1;
        l->op[k].flat = true;
        for (int d = l->ndim - 1; d >= 0; d--) {
            if (l->op[k].stride[d] != expect) l->op[k].flat = false;
            expect *= l->shape[d];
        }
    }
}

/* -- gather and scatter -------------------------------------------------------------------------------------------- */
/* Sets `index` to the multi-dimensional index of the flat position `first`. Returns the offset of the operand's element
 * at this index, in elements. */
static int64_t locate(const loop *l, const loop_operand *o, int64_t first, int64_t *index)
{
    int64_t offset = 0;
    for (int d = l->ndim - 1; d >= 0; d--) {
        index[d] = first % l->shape[d];
        first /= l->shape[d];
        offset += index[d] * o->stride[d];
    }
    return offset;
}

/* Moves from the end of a run along the last dimension to the next run. Increments `index`, and returns the offset of
 * the next run. `start` is the offset of the current run. */
static int64_t next_run(const loop *l, const loop_operand *o, int64_t *index, int64_t start)
{
    for (int d = l->ndim - 2; d >= 0; d--) {
        start += o->stride[d];
        if (++index[d] < l->shape[d]) return start;
        start -= o->stride[d] * l->shape[d];
        index[d] = 0;
    }
    return start;
}

/* Fills `nbytes` bytes with copies of the first element. Each memcpy doubles the filled part. The function uses memcpy
 * because memcpy is fast at any optimisation level. */
static void repeat(char *dst, int64_t size, int64_t nbytes)
{
    for (int64_t have = size; have < nbytes; have *= 2)
        memcpy(dst + have, dst, (size_t)(nbytes - have < have ? nbytes - have : have));
}

#define MOVES(T) \
    static void gather_##T(const loop *l, const loop_operand *o, int64_t first, int64_t n, T *restrict dst) \
    { \
        int64_t index[PS_MAX_DIMS], last = l->ndim - 1, s = o->stride[last]; \
        int64_t start = locate(l, o, first, index); \
        int64_t run = l->shape[last] - index[last]; \
        for (;;) { \
            const T *restrict src = (const T *)o->data + start; \
            if (run > n) run = n; \
            if (s == 1) memcpy(dst, src, (size_t)run * sizeof(T)); \
            else if (s == 0) dst[0] = *src, repeat((char *)dst, sizeof(T), run * (int64_t)sizeof(T)); \
            else for (int64_t i = 0; i < run; i++) dst[i] = src[i * s]; \
            dst += run, n -= run; \
            if (n == 0) return; \
            start = next_run(l, o, index, start - index[last] * s); \
            index[last] = 0, run = l->shape[last]; \
        } \
    } \
    static void scatter_##T(const loop *l, const loop_operand *o, int64_t first, int64_t n, const T *restrict src) \
    { \
        int64_t index[PS_MAX_DIMS], last = l->ndim - 1, s = o->stride[last]; \
        int64_t start = locate(l, o, first, index); \
        int64_t run = l->shape[last] - index[last]; \
        for (;;) { \
            T *restrict dst = (T *)o->data + start; \
            if (run > n) run = n; \
            if (s == 1) memcpy(dst, src, (size_t)run * sizeof(T)); \
            else for (int64_t i = 0; i < run; i++) dst[i * s] = src[i]; \
            src += run, n -= run; \
            if (n == 0) return; \
            start = next_run(l, o, index, start - index[last] * s); \
            index[last] = 0, run = l->shape[last]; \
        } \
    } \
    /* Transposes src [rows, cols] in tiles. The reads and writes of a tile cover whole cache lines. */ \
    static void transpose_##T(T *dst, int64_t ld_dst, const T *src, int64_t ld_src, int64_t rows, int64_t cols) \
    { \
        enum { TILE = 64 / sizeof(T) < 16 ? 16 : 64 / sizeof(T) }; \
        T tile[TILE][TILE]; \
        for (int64_t c0 = 0; c0 < cols; c0 += TILE) { \
            int64_t c = cols - c0 < TILE ? cols - c0 : TILE; \
            for (int64_t j = 0; j < c; j++) memcpy(tile[j], src + (c0 + j) * ld_src, (size_t)rows * sizeof(T)); \
            if (c == TILE) \
                for (int64_t i = 0; i < rows; i++) \
                    for (int64_t j = 0; j < TILE; j++) dst[i * ld_dst + c0 + j] = tile[j][i]; \
            else \
                for (int64_t i = 0; i < rows; i++) \
                    for (int64_t j = 0; j < c; j++) dst[i * ld_dst + c0 + j] = tile[j][i]; \
        } \
    }
MOVES(uint8_t)
MOVES(uint16_t)
MOVES(uint32_t)
MOVES(uint64_t)

static void gather(const loop *l, const loop_operand *o, int64_t first, int64_t n, void *dst)
{
    if (o->size == 1) gather_uint8_t(l, o, first, n, dst);
    else if (o->size == 2) gather_uint16_t(l, o, first, n, dst);
    else if (o->size == 4) gather_uint32_t(l, o, first, n, dst);
    else gather_uint64_t(l, o, first, n, dst);
}

static void scatter(const loop *l, const loop_operand *o, int64_t first, int64_t n, const void *src)
{
    if (o->size == 1) scatter_uint8_t(l, o, first, n, src);
    else if (o->size == 2) scatter_uint16_t(l, o, first, n, src);
    else if (o->size == 4) scatter_uint32_t(l, o, first, n, src);
    else scatter_uint64_t(l, o, first, n, src);
}

/* -- running ------------------------------------------------------------------------------------------------------- */
/* Calls fn for all whole vectors, and then for a padded copy of the remaining elements. */
static void call_padded(const loop *l, loop_fn fn, const void *arg, char **p, int64_t n)
{
    int64_t whole = n & ~(int64_t)(VL - 1), rest = n - whole;
    if (whole > 0) fn((void *const *)p, whole, arg);
    if (rest == 0) return;
    char pad[LOOP_OPS][VL * 8] __attribute__((aligned(64))) = { { 0 } };
    void *q[LOOP_OPS];
    for (int k = 0; k < l->n; k++) {
        q[k] = pad[k];
        if (k > 0) memcpy(pad[k], p[k] + whole * l->op[k].size, (size_t)(rest * l->op[k].size));
    }
    fn(q, VL, arg);
    memcpy(p[0] + whole * l->op[0].size, pad[0], (size_t)(rest * l->op[0].size));
}

static void run_gathered(const loop *l, loop_fn fn, const void *arg, int64_t first, int64_t n)
{
    char buf[LOOP_OPS][LOOP_BLOCK * 8] __attribute__((aligned(64)));
    char *p[LOOP_OPS];
    for (int k = 0; k < l->n; k++) {
        const loop_operand *o = &l->op[k];
        p[k] = o->flat ? o->data + first * o->size : buf[k];
        if (!o->flat && k > 0) gather(l, o, first, n, buf[k]);
    }
    call_padded(l, fn, arg, p, n);
    if (!l->op[0].flat) scatter(l, &l->op[0], first, n, buf[0]);
}

static bool all_flat(const loop *l)
{
    for (int k = 0; k < l->n; k++)
        if (!l->op[k].flat) return false;
    return true;
}

enum { LEAST_ROW = 128 };                    /* rows shorter than this are faster if several rows are processed
                                              * together */

/* Returns true if the result is contiguous and each input's part of a row is either contiguous or a single element. */
static bool has_rows(const loop *l)
{
    int last = l->ndim - 1;
    if (last > 1 || !l->op[0].flat || l->shape[last] < LEAST_ROW) return false;
    for (int k = 1; k < l->n; k++)
        if (l->op[k].stride[last] != 1 && l->op[k].stride[last] != 0) return false;
    return true;
}

/* Fills a buffer of LOOP_BLOCK elements with at least n copies of one element. */
static void fill_buffer(char *buf, const char *element, int64_t size, int64_t n)
{
    float one;
    memcpy(buf, element, (size_t)size);
    if (size != sizeof one) {
        repeat(buf, size, n * size);
        return;
    }
    memcpy(&one, element, sizeof one);
    for (int64_t i = 0; i < n; i += VL) vf_store((float *)buf + i, vf_set(one));
}

/* Processes up to LOOP_BLOCK elements of a row without copying them. The only exception is an input that has a single
 * element per row: a buffer contains copies of this element. */
static void run_row(const loop *l, loop_fn fn, const void *arg, int64_t row, int64_t first, int64_t n)
{
    char buf[LOOP_OPS][LOOP_BLOCK * 8] __attribute__((aligned(64)));
    char *p[LOOP_OPS];
    int last = l->ndim - 1;
    for (int k = 0; k < l->n; k++) {
        const loop_operand *o = &l->op[k];
        p[k] = o->data + ((last > 0 ? row * o->stride[0] : 0) + first * o->stride[last]) * o->size;
        if (o->stride[last] == 1) continue;
        fill_buffer(buf[k], p[k], o->size, n);
        p[k] = buf[k];
    }
    call_padded(l, fn, arg, p, n);
}

static void run_rows(const loop *l, loop_fn fn, const void *arg)
{
    int64_t n = l->shape[l->ndim - 1], blocks = (n + LOOP_BLOCK - 1) / LOOP_BLOCK, items = l->numel / n * blocks;
#pragma omp parallel for schedule(static) if (l->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < items; i++) {
        int64_t first = i % blocks * LOOP_BLOCK;
        run_row(l, fn, arg, i / blocks, first, n - first < LOOP_BLOCK ? n - first : LOOP_BLOCK);
    }
}

void loop_run(const loop *l, loop_fn fn, const void *arg)
{
    if (l->numel == 0) return;
    bool flat = all_flat(l);
    if (!flat && has_rows(l)) {
        run_rows(l, fn, arg);
        return;
    }
    if (flat && l->numel <= LOOP_FLAT_BLOCK) {               /* a parallel region would cost more than it saves */
        char *p[LOOP_OPS];
        for (int k = 0; k < l->n; k++) p[k] = l->op[k].data;
        call_padded(l, fn, arg, p, l->numel);
        return;
    }
    if (!flat && l->numel <= LOOP_BLOCK) {
        run_gathered(l, fn, arg, 0, l->numel);
        return;
    }
    int64_t block = flat ? LOOP_FLAT_BLOCK : LOOP_BLOCK, blocks = (l->numel + block - 1) / block;
#pragma omp parallel for schedule(static) if (l->numel >= PS_PAR_MIN)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = b * block, n = l->numel - first < block ? l->numel - first : block;
        if (!flat) {
            run_gathered(l, fn, arg, first, n);
            continue;
        }
        char *p[LOOP_OPS];
        for (int k = 0; k < l->n; k++) p[k] = l->op[k].data + first * l->op[k].size;
        call_padded(l, fn, arg, p, n);
    }
}

/* -- copies -------------------------------------------------------------------------------------------------------- */
/* If the copy is a transpose, returns the dimension along which the input is contiguous. Otherwise returns -1. In a
 * transpose, the output is contiguous along its last dimension. */
static int transposed_dim(const loop *l)
{
    int last = l->ndim - 1;
    const int64_t *in = l->op[1].stride;
    if (last == 0 || l->op[0].stride[last] != 1 || in[last] == 1 || in[last] == 0 || l->shape[last] < 8) return -1;
    for (int d = last - 1; d >= 0; d--)
        if (in[d] == 1 && l->shape[d] >= 8) return d;
    return -1;
}

static void copy_transposed(const loop *l, int dim)
{
    int last = l->ndim - 1;
    int64_t size = l->op[0].size, tile = 64 / size < 16 ? 16 : 64 / size;
    int64_t tiles = (l->shape[dim] + tile - 1) / tile, cols = l->shape[last];
    int64_t items = l->numel / cols / l->shape[dim] * tiles;
#pragma omp parallel for schedule(static) if (l->numel >= PS_PAR_MIN)
    for (int64_t item = 0; item < items; item++) {
        int64_t first = item % tiles * tile, outer = item / tiles;
        int64_t rows = l->shape[dim] - first < tile ? l->shape[dim] - first : tile;
        int64_t to = first * l->op[0].stride[dim], from = first;
        for (int d = last - 1; d >= 0; d--) {
            if (d == dim) continue;
            int64_t i = outer % l->shape[d];
            outer /= l->shape[d];
            to += i * l->op[0].stride[d], from += i * l->op[1].stride[d];
        }
        int64_t ld_to = l->op[0].stride[dim], ld_from = l->op[1].stride[last];
        char *dst = l->op[0].data + to * size;
        const char *src = l->op[1].data + from * size;
        if (size == 1) transpose_uint8_t((uint8_t *)dst, ld_to, (const uint8_t *)src, ld_from, rows, cols);
        else if (size == 2) transpose_uint16_t((uint16_t *)dst, ld_to, (const uint16_t *)src, ld_from, rows, cols);
        else if (size == 4) transpose_uint32_t((uint32_t *)dst, ld_to, (const uint32_t *)src, ld_from, rows, cols);
        else transpose_uint64_t((uint64_t *)dst, ld_to, (const uint64_t *)src, ld_from, rows, cols);
    }
}

void loop_copy(const ps_view *dst, const ps_view *src)
{
    loop l;
    loop_init(&l, dst, 1, &src);
    if (l.numel == 0) return;
    int dim = transposed_dim(&l);
    if (dim >= 0) {
        copy_transposed(&l, dim);
        return;
    }
    const loop_operand *to = &l.op[0], *from = &l.op[1];
    int64_t block = LOOP_FLAT_BLOCK, blocks = (l.numel + block - 1) / block;
#pragma omp parallel for schedule(static) if (l.numel >= PS_PAR_MIN)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = b * block, n = l.numel - first < block ? l.numel - first : block;
        int64_t at = first * to->size;
        if (to->flat && from->flat) memmove(to->data + at, from->data + at, (size_t)(n * to->size));
        else if (to->flat) gather(&l, from, first, n, to->data + at);
        else if (from->flat) scatter(&l, to, first, n, from->data + at);
        else for (int64_t i = 0; i < n; i += LOOP_BLOCK) {
            char buf[LOOP_BLOCK * 8] __attribute__((aligned(64)));
            int64_t m = n - i < LOOP_BLOCK ? n - i : LOOP_BLOCK;
            gather(&l, from, first + i, m, buf);
            scatter(&l, to, first + i, m, buf);
        }
    }
}
