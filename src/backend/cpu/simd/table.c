/* SPDX-License-Identifier: BSD-3-Clause
 * Lookups in tables: embedding and its gradient, gather and scatter along a dimension, and searches. This file is
 * compiled once per instruction set.
 * All indices are checked before any output is written. To compute the gradient of an embedding, the kernel sorts the
 * positions by index. For each index, it then sums the rows of dy in fp32, in the order of the positions, and rounds
 * once. Each destination row is written by one thread, so the kernel needs no atomics, and the result does not depend
 * on the number of threads. */
#define PS_ANY_LANES
#include "backend/cpu/simd/operand.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { COLUMNS = 512, RADIX_BITS = 11, ZERO_CHUNK = 1 << 18 };

/* Returns true if w [V, C] has a row v. w can be a part of a larger table. v is relative to the first row of this
 * part. */
static bool is_own(int64_t v, int64_t V) { return v >= 0 && v < V; }
static bool index_usable(const ps_view *v) { return ps_is_index(v) && view_flat(v); }

static const void *index_from(const ps_view *index, int64_t at)
{
    return (const char *)index->data + at * ps_dtype_bytes(index->dtype);
}

/* Returns element i of an index tensor. The tensor is int64 if `wide` is set, otherwise int32. */
static inline int64_t number(const void *index, bool wide, int64_t i)
{
    return wide ? ((const int64_t *)index)[i] : ((const int32_t *)index)[i];
}

#define PICK_N(type, wide, step, move) \
    for (int64_t i = 0; i < n; i++) ((type *)to)[i] = ((const type *)from)[number(index, wide, i) * step + i * move]
#define PICK(type) \
    do { \
        if (wide && step == 1 && move == 0) PICK_N(type, true, 1, 0); \
        else if (wide) PICK_N(type, true, step, move); \
        else PICK_N(type, false, step, move); \
    } while (0)

/* Sets to[i] = from[index[i] * step + i * move] for i from 0 to n - 1. Each element has `size` bytes. */
static void pick(void *to, const void *from, const void *index, bool wide, int64_t n, int64_t step, int64_t move,
                 int64_t size)
{
    if (size == 1) PICK(uint8_t);
    else if (size == 2) PICK(uint16_t);
    else if (size == 4) PICK(uint32_t);
    else PICK(uint64_t);
}

enum { PICKS = 4096 };                       /* number of elements that a thread reads at a time */

static int embedding(ps_call *call)
{
    const ps_view *w = &call->in[0], *index = &call->in[1];
    ps_view *y = &call->out[0];
    if (!index_usable(index) || !view_flat(w) || !view_flat(y) || w->dtype != y->dtype || w->ndim != 2)
        return PS_EUNSUP;
    const struct ps_attrs_embedding *a = call->attrs;
    int64_t V = w->shape[0];
    size_t row = (size_t)(w->shape[1] * ps_dtype_bytes(w->dtype));
    PS_TRY(ps_check_indices(index, a->total > 0 ? a->total : V));
    if (w->shape[1] == 1 && a->first == 0 && (a->total == 0 || a->total == V)) {
        int64_t n = index->numel, parts = (n + PICKS - 1) / PICKS;
#pragma omp parallel for schedule(static) if (n >= PS_PAR_MIN)
        for (int64_t part = 0; part < parts; part++) {
            int64_t at = part * PICKS;
            pick((char *)y->data + (size_t)at * row, w->data, index_from(index, at), index->dtype == PS_I64,
                 n - at < PICKS ? n - at : PICKS, 1, 0, (int64_t)row);
        }
        return 0;
    }
#pragma omp parallel for schedule(static) if (y->numel >= PS_PAR_MIN)
    for (int64_t i = 0; i < index->numel; i++) {
        int64_t v = ps_index_at(index, i) - a->first;
        char *to = (char *)y->data + (size_t)i * row;
        if (is_own(v, V)) memcpy(to, (const char *)w->data + (size_t)v * row, row);
        else memset(to, 0, row);
    }
    return 0;
}

/* -- gradient of the embedding ----------------------------------------------------------------------------------- */
typedef struct entry { int64_t row, position; } entry;

/* Sorts n entries by their row, which must be less than `rows`. Each pass sorts by RADIX_BITS bits of the row. Entries
 * with equal rows keep their order. Returns a or b, depending on which one contains the result. */
static entry *sort_entries(entry *a, entry *b, int64_t n, int64_t rows)
{
    for (int shift = 0; shift < 63 && (rows - 1) >> shift > 0; shift += RADIX_BITS) {
        int64_t start[(1 << RADIX_BITS) + 1] = { 0 };
        for (int64_t i = 0; i < n; i++) start[((a[i].row >> shift) & ((1 << RADIX_BITS) - 1)) + 1]++;
        for (int d = 0; d < 1 << RADIX_BITS; d++) start[d + 1] += start[d];
        for (int64_t i = 0; i < n; i++) b[start[(a[i].row >> shift) & ((1 << RADIX_BITS) - 1)]++] = a[i];
        entry *swap = a;
        a = b, b = swap;
    }
    return a;
}
/* Writes zeros. If the machine supports it, the writes bypass the caches, because the zeros are not read soon. */
static void zero_bytes(char *p, size_t nbytes)
{
#if defined(__SSE2__)
    size_t head = (size_t)(-(uintptr_t)p & 63);
    if (nbytes >= 1 << 16) {
        memset(p, 0, head);
        size_t body = (nbytes - head) & ~(size_t)63;
        for (size_t i = 0; i < body; i += 16) _mm_stream_si128((__m128i *)(p + head + i), _mm_setzero_si128());
        _mm_sfence();
        p += head + body, nbytes -= head + body;
    }
#endif
    memset(p, 0, nbytes);
}

struct table_grad {
    const entry *sorted;
    const void *dy;                   /* [positions, C] */
    void *dw;                         /* [rows, C] */
    int64_t C;
    int dw_dtype, accumulate;
};
/* Sums columns [first, last) of the entries [from, to). These entries have the same destination row. */
SIMD void sum_entries(const struct table_grad *g, int64_t from, int64_t to, int64_t first, int64_t last, int dtype)
{
    int64_t out = g->sorted[from].row * g->C;
    for (int64_t c = first; c < last; c += 4 * VL) {
        vf s[4] = { { 0 } };
        int whole = c + 4 * VL <= last;
        for (int64_t e = from; e < to; e++) {
            int64_t in = g->sorted[e].position * g->C + c;
            for (int k = 0; k < 4; k++) {
                if (whole || c + (k + 1) * VL <= last) s[k] = s[k] + vf_get(g->dy, in + k * VL, dtype);
                else if (c + k * VL < last)
                    s[k] = s[k] + vf_get_n(g->dy, in + k * VL, dtype, (int)(last - c - k * VL), 0.0f);
            }
        }
        for (int k = 0; k < 4 && c + k * VL < last; k++) {
            int64_t at = out + c + k * VL;
            int n = last - c - k * VL < VL ? (int)(last - c - k * VL) : VL;
            if (g->accumulate)
                s[k] = (n == VL ? vf_get(g->dw, at, g->dw_dtype) : vf_get_n(g->dw, at, g->dw_dtype, n, 0.0f)) + s[k];
            if (n == VL) vf_put(g->dw, at, g->dw_dtype, s[k]);
            else vf_put_n(g->dw, at, g->dw_dtype, n, s[k]);
        }
    }
}
static int embedding_backward(ps_call *call)
{
    const struct ps_attrs_embedding_backward *a = call->attrs;
    const ps_view *index = &call->in[0], *dy = &call->in[1];
    ps_view *dw = &call->out[0];
    int64_t C = ps_last_dim(dy), n = index->numel;
    if (!index_usable(index) || !is_lane_type(dy->dtype) || !view_flat(dy) || !is_lane_type(dw->dtype) ||
        !view_flat(dw) || dw->ndim != 2)
        return PS_EUNSUP;
    int64_t rows = dw->shape[0];
    if (!call->dry) PS_TRY(ps_check_indices(index, a->total > 0 ? a->total : rows));
    entry *list = call->scratch(call, (size_t)(2 * n + 1) * sizeof *list);
    int64_t *start = call->scratch(call, (size_t)(n + 1) * sizeof *start);   /* the first entry of each distinct row */
    if (!list || !start) return PS_ENOMEM;
    if (call->dry) return 0;
    int64_t used = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t v = ps_index_at(index, i);
        if (v != a->padding_idx && is_own(v - a->first, rows)) list[used++] = (entry){ v - a->first, i };
    }
    struct table_grad g = { .sorted = sort_entries(list, list + n, used, rows), .dy = dy->data, .dw = dw->data, .C = C,
                            .dw_dtype = dw->dtype, .accumulate = a->accumulate };
    int64_t distinct = 0;
    for (int64_t i = 0; i < used; i++)
        if (i == 0 || g.sorted[i].row != g.sorted[i - 1].row) start[distinct++] = i;
    start[distinct] = used;
    if (!a->accumulate) {
        int64_t nbytes = dw->numel * ps_dtype_bytes(dw->dtype);
#pragma omp parallel for schedule(static) if (dw->numel >= PS_PAR_MIN)
        for (int64_t i = 0; i < nbytes; i += ZERO_CHUNK)
            zero_bytes((char *)dw->data + i, (size_t)(nbytes - i < ZERO_CHUNK ? nbytes - i : ZERO_CHUNK));
    }
    int64_t parts = (C + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(dynamic, 16) if (dy->numel >= PS_PAR_MIN)
    for (int64_t job = 0; job < distinct * parts; job++) {
        int64_t d = job / parts, first = job % parts * COLUMNS, last = first + COLUMNS < C ? first + COLUMNS : C;
        PS_BY_VEC(dy->dtype, sum_entries, &g, start[d], start[d + 1], first, last);
    }
    return 0;
}

/* The op flat_index for one contiguous index tensor. It adds the size of the dimension to negative indices. */
static int flat_index(ps_call *call)
{
    const struct ps_attrs_flat_index *a = call->attrs;
    const ps_view *index = &call->in[0];
    int64_t *y = call->out[0].data, size = a->size[0], bad = 0;
    if (call->n_in != 1 || !index_usable(index) || !view_flat(&call->out[0])) return PS_EUNSUP;
    bool wide = index->dtype == PS_I64;
    for (int64_t i = 0; i < index->numel; i++) {
        int64_t k = wide ? ((const int64_t *)index->data)[i] : ((const int32_t *)index->data)[i];
        bad |= k < -size || k >= size;
        y[i] = k < 0 ? k + size : k;
    }
    return bad ? PS_EUNSUP : 0;                    /* ref raises the error, which contains the index */
}

/* -- gather and scatter, if x and index have the same shape except in the indexed dimension ------------------------ */
/* x is [outer, size, inner]. index is [outer, n, inner], or [outer, n] if `whole` is set. */
struct along { int64_t outer, n, inner, size; bool whole; };

static bool split_along(const ps_view *x, const ps_view *index, int dim, struct along *a)
{
    if (dim < 0) dim += x->ndim;
    if (dim < 0 || dim >= x->ndim || dim >= index->ndim) return false;
    *a = (struct along){ 1, index->shape[dim], 1, x->shape[dim], index->ndim < x->ndim };
    for (int d = 0; d < x->ndim; d++) {
        if (d != dim && d < index->ndim && x->shape[d] != index->shape[d]) return false;
        if (d < dim) a->outer *= x->shape[d];
        if (d > dim) a->inner *= x->shape[d];
    }
    a->whole = a->whole || a->inner == 1;
    return true;
}


static int gather(ps_call *call)
{
    const ps_view *x = &call->in[0], *index = &call->in[1];
    ps_view *y = &call->out[0];
    struct along a;
    if (!index_usable(index) || !view_flat(x) || !view_flat(y) || x->dtype != y->dtype ||
        !split_along(x, index, ((const struct ps_attrs_gather *)call->attrs)->dim, &a))
        return PS_EUNSUP;
    PS_TRY(ps_check_indices(index, a.size));
    if (y->numel == 0) return 0;
    int64_t size = ps_dtype_bytes(x->dtype), row = a.inner * size, block = a.size * row;
    bool wide = index->dtype == PS_I64;
    const char *from = x->data;
    char *to = y->data;
    if (a.inner == 1) {
        int64_t parts = (a.n + PICKS - 1) / PICKS;
#pragma omp parallel for schedule(static) if (y->numel >= PS_PAR_MIN)
        for (int64_t job = 0; job < a.outer * parts; job++) {
            int64_t o = job / parts, first = job % parts * PICKS, at = o * a.n + first;
            pick(to + at * size, from + o * block, index_from(index, at), wide,
                 a.n - first < PICKS ? a.n - first : PICKS, 1, 0, size);
        }
        return 0;
    }
#pragma omp parallel for schedule(static) if (y->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < a.outer * a.n; r++) {
        const char *here = from + r / a.n * block;
        if (a.whole) memcpy(to + r * row, here + number(index->data, wide, r) * row, (size_t)row);
        else pick(to + r * row, here, index_from(index, r * a.inner), wide, a.inner, a.inner, 1, size);
    }
    return 0;
}

/* The operands of a scatter. The functions *_columns process the columns [first, last) of the outer index o, and the
 * elements of `index` in order. */
struct scatter {
    struct along a;
    const void *index;                /* [outer, n] or [outer, n, inner] */
    bool wide;
    char *to;                         /* [outer, size, inner] */
    char *src;                        /* [outer, n, inner] */
    int64_t size;                     /* size of an element in bytes */
    int dtype;
};

/* Returns the position in `to` of the element that has the outer index o, the position j along `index`, and the column
 * c. */
static inline int64_t place(const struct scatter *s, bool wide, int64_t o, int64_t j, int64_t c)
{
    int64_t r = o * s->a.n + j;
    return (o * s->a.size + number(s->index, wide, s->a.whole ? r : r * s->a.inner + c)) * s->a.inner + c;
}

#define ADD_ALL(type, wide) \
    for (int64_t j = 0; j < s->a.n; j++) { \
        const type *from = (const type *)s->src + (o * s->a.n + j) * s->a.inner; \
        type *to = (type *)s->to; \
        if (s->a.whole) { \
            to += place(s, wide, o, j, 0); \
            PS_SIMD_LOOP for (int64_t c = first; c < last; c++) to[c] += from[c]; \
        } else \
            for (int64_t c = first; c < last; c++) to[place(s, wide, o, j, c)] += from[c]; \
    }
#define ADD(type) do { if (s->wide) ADD_ALL(type, true) else ADD_ALL(type, false) } while (0)
#define PS_SIMD_LOOP _Pragma("omp simd")

static void add_columns(const struct scatter *s, int64_t o, int64_t first, int64_t last)
{
    if (s->dtype == PS_F32) ADD(float);
    else if (s->dtype == PS_I64) ADD(uint64_t);
    else ADD(uint32_t);
}

#define PUT_ALL(type) \
    for (int64_t j = 0; j < s->a.n; j++) \
        for (int64_t c = first; c < last; c++) \
            ((type *)s->to)[place(s, s->wide, o, j, c)] = ((const type *)s->src)[(o * s->a.n + j) * s->a.inner + c]
#define TAKE_ALL(type) \
    for (int64_t j = s->a.n - 1; j >= 0; j--) \
        for (int64_t c = first; c < last; c++) { \
            type *to = (type *)s->to + place(s, s->wide, o, j, c); \
            ((type *)s->src)[(o * s->a.n + j) * s->a.inner + c] = *to; \
            *to = 0; \
        }

/* Writes the elements of outer index o. Used only if inner is 1. */
#define PUT_ONE(type) \
    do { \
        type *to = (type *)s->to + o * s->a.size; \
        const type *from = (const type *)s->src + o * s->a.n; \
        int64_t at = o * s->a.n; \
        if (s->wide) for (int64_t j = 0; j < s->a.n; j++) to[((const int64_t *)s->index)[at + j]] = from[j]; \
        else for (int64_t j = 0; j < s->a.n; j++) to[((const int32_t *)s->index)[at + j]] = from[j]; \
    } while (0)

static void put_columns(const struct scatter *s, int64_t o, int64_t first, int64_t last)
{
    if (s->a.inner == 1 && s->size == 4) PUT_ONE(uint32_t);
    else if (s->a.inner == 1 && s->size == 8) PUT_ONE(uint64_t);
    else if (s->a.whole && s->a.inner > 1) {
        for (int64_t j = 0; j < s->a.n; j++)
            memcpy(s->to + place(s, s->wide, o, j, first) * s->size,
                   s->src + ((o * s->a.n + j) * s->a.inner + first) * s->size, (size_t)((last - first) * s->size));
    } else if (s->size == 1) PUT_ALL(uint8_t);
    else if (s->size == 2) PUT_ALL(uint16_t);
    else if (s->size == 4) PUT_ALL(uint32_t);
    else PUT_ALL(uint64_t);
}

/* The gradient of put_columns. It processes the elements of `index` in reverse order. For each element, it copies the
 * value at the element's position in `to` to src, and then sets the value in `to` to 0. */
static void take_columns(const struct scatter *s, int64_t o, int64_t first, int64_t last)
{
    if (s->size == 2) TAKE_ALL(uint16_t)
    else if (s->size == 4) TAKE_ALL(uint32_t)
    else TAKE_ALL(uint64_t)
}

enum { SCATTER_COLUMNS = 1024, COPY_CHUNK = 1 << 16 };

/* Copies x to s->to, unless both are the same memory. Then calls fn for all outer indices and columns. */
static int run_scatter(struct scatter *s, const ps_view *x, int64_t work,
                       void (*fn)(const struct scatter *, int64_t, int64_t, int64_t))
{
    int64_t parts = (s->a.inner + SCATTER_COLUMNS - 1) / SCATTER_COLUMNS, row = s->a.inner * s->size,
            block = s->a.size * row;
    bool copies = s->to != x->data;
    if (x->numel + work == 0) return 0;
    if (copies && s->a.outer == 1 && x->numel >= PS_PAR_MIN) {
        int64_t nbytes = s->a.size * row;
#pragma omp parallel for schedule(static)
        for (int64_t at = 0; at < nbytes; at += COPY_CHUNK) {
            int64_t left = nbytes - at;
            memcpy(s->to + at, (const char *)x->data + at, (size_t)(left < COPY_CHUNK ? left : COPY_CHUNK));
        }
        copies = false;
    }
#pragma omp parallel for schedule(static) if (x->numel + work >= PS_PAR_MIN)
    for (int64_t o = 0; o < s->a.outer; o++) {
        if (copies) memcpy(s->to + o * block, (const char *)x->data + o * block, (size_t)block);
        if (s->a.outer == 1) continue;
        fn(s, o, 0, s->a.inner);
    }
    if (s->a.outer != 1) return 0;
#pragma omp parallel for schedule(static) if (work >= PS_PAR_MIN)
    for (int64_t p = 0; p < parts; p++) {
        int64_t first = p * SCATTER_COLUMNS, last = first + SCATTER_COLUMNS;
        fn(s, 0, first, last < s->a.inner ? last : s->a.inner);
    }
    return 0;
}

/* Initializes s from x, index, src and the result y. Returns PS_EUNSUP or an error if the shapes or types of these
 * tensors do not match. */
static int scatter_of(struct scatter *s, const ps_view *x, const ps_view *index, const ps_view *src, const ps_view *y,
                      int dim)
{
    if (!index_usable(index) || x->dtype != src->dtype || x->dtype != y->dtype || !view_flat(x) || !view_flat(y) ||
        !view_flat(src) || !split_along(x, index, dim, &s->a))
        return PS_EUNSUP;
    s->index = index->data, s->wide = index->dtype == PS_I64;
    s->to = y->data, s->src = src->data, s->size = ps_dtype_bytes(x->dtype), s->dtype = x->dtype;
    return ps_check_indices(index, s->a.size);
}

/* Supports fp32 and integers. ref computes the other types, and rounds after each addition. */
static int scatter_add(ps_call *call)
{
    const ps_view *x = &call->in[0], *src = &call->in[2];
    int dim = ((const struct ps_attrs_scatter_add *)call->attrs)->dim;
    struct scatter s;
    if (x->dtype != PS_F32 && x->dtype != PS_I64 && x->dtype != PS_I32) return PS_EUNSUP;
    PS_TRY(scatter_of(&s, x, &call->in[1], src, &call->out[0], dim));
    return run_scatter(&s, x, src->numel, add_columns);
}

static int scatter(ps_call *call)
{
    const ps_view *x = &call->in[0], *src = &call->in[2];
    struct scatter s;
    PS_TRY(scatter_of(&s, x, &call->in[1], src, &call->out[0], ((const struct ps_attrs_scatter *)call->attrs)->dim));
    return run_scatter(&s, x, src->numel, put_columns);
}

/* Returns the larger number of each lane if `largest` is set, otherwise the smaller number. Returns NaN if either
 * number is NaN, as ref does. */
SIMD vf chosen_lanes(vf a, vf b, bool largest)
{
    vf most = largest ? vf_select(a > b, a, b) : vf_select(a > b, b, a);
    return vf_select((a == a) & (b == b), most, vf_set(NAN));
}
/* Like chosen_lanes, for one number. */
static inline float chosen(float a, float b, bool largest)
{
    if (a != a || b != b) return NAN;
    return largest == (a > b) ? a : b;
}
SIMD void join_row(float *to, const float *from, int64_t n, bool largest)
{
    int64_t c = 0;
    for (; c + VL <= n; c += VL) vf_store(to + c, chosen_lanes(vf_load(to + c), vf_load(from + c), largest));
    for (; c < n; c++) to[c] = chosen(to[c], from[c], largest);
}
SIMD void join_columns(const struct scatter *s, int64_t o, int64_t first, int64_t last, bool largest)
{
    for (int64_t j = 0; j < s->a.n; j++) {
        const float *from = (const float *)s->src + (o * s->a.n + j) * s->a.inner;
        float *row = (float *)s->to + place(s, s->wide, o, j, first);
        if (s->a.whole) join_row(row, from + first, last - first, largest);
        for (int64_t c = first; !s->a.whole && c < last; c++) {
            float *to = (float *)s->to + place(s, s->wide, o, j, c);
            *to = chosen(*to, from[c], largest);
        }
    }
}
static void join_largest(const struct scatter *s, int64_t o, int64_t first, int64_t last)
{
    join_columns(s, o, first, last, true);
}
static void join_smallest(const struct scatter *s, int64_t o, int64_t first, int64_t last)
{
    join_columns(s, o, first, last, false);
}

/* Supports the maximum and the minimum of fp32 values. */
static int scatter_reduce(ps_call *call)
{
    const ps_view *x = &call->in[0], *src = &call->in[2];
    const struct ps_attrs_scatter_reduce *a = call->attrs;
    struct scatter s;
    if (x->dtype != PS_F32 || a->reduce > 1) return PS_EUNSUP;
    PS_TRY(scatter_of(&s, x, &call->in[1], src, &call->out[0], a->dim));
    return run_scatter(&s, x, src->numel, a->reduce == 0 ? join_largest : join_smallest);
}

static int scatter_(ps_call *call)
{
    const ps_view *x = &call->in[0], *src = &call->in[2];
    struct scatter s;
    PS_TRY(scatter_of(&s, x, &call->in[1], src, x, ((const struct ps_attrs_scatter_ *)call->attrs)->dim));
    return run_scatter(&s, x, src->numel, put_columns);
}

static int scatter_backward(ps_call *call)
{
    const ps_view *dy = &call->in[0], *dsrc = &call->out[1];
    struct scatter s;
    int dim = ((const struct ps_attrs_scatter_backward *)call->attrs)->dim;
    PS_TRY(scatter_of(&s, dy, &call->in[1], dsrc, &call->out[0], dim));
    return run_scatter(&s, dy, dsrc->numel, take_columns);
}

/* -- order --------------------------------------------------------------------------------------------------------- */
#define REVERSE(type) \
    do { \
        _Pragma("omp simd") \
        for (int64_t i = 0; i < n; i++) ((type *)to)[i] = ((const type *)from)[n - 1 - i]; \
    } while (0)

/* Copies n pieces in reverse order. Each piece has `size` bytes. */
static void reverse(char *to, const char *from, int64_t n, int64_t size)
{
    if (size == 1) REVERSE(uint8_t);
    else if (size == 2) REVERSE(uint16_t);
    else if (size == 4) REVERSE(uint32_t);
    else if (size == 8) REVERSE(uint64_t);
    else for (int64_t i = 0; i < n; i++) memcpy(to + i * size, from + (n - 1 - i) * size, (size_t)size);
}

static int flip(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    uint32_t dims = ((const struct ps_attrs_flip *)call->attrs)->dims;
    int64_t size = ps_dtype_bytes(x->dtype);
    int last = x->ndim - 1;                                  /* the last of the reversed dimensions */
    if (!view_flat(x) || !view_flat(y)) return PS_EUNSUP;
    if (x->numel == 0) return 0;
    for (; last >= 0 && !(dims >> last & 1); last--) size *= x->shape[last];
    if (last < 0) {
        memcpy(y->data, x->data, (size_t)size);
        return 0;
    }
    int64_t n = x->shape[last], rows = x->numel * ps_dtype_bytes(x->dtype) / (n * size);
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < rows; r++) {
        int64_t rest = r, at = 0, scale = 1;
        for (int d = last - 1; d >= 0; d--) {
            int64_t i = rest % x->shape[d];
            at += (dims >> d & 1 ? x->shape[d] - 1 - i : i) * scale;
            rest /= x->shape[d], scale *= x->shape[d];
        }
        reverse((char *)y->data + r * n * size, (const char *)x->data + at * n * size, n, size);
    }
    return 0;
}

static int64_t within(int64_t i, int64_t n) { return i < 0 ? 0 : i > n ? n : i; }

static int triangle(ps_call *call)
{
    const struct ps_attrs_triangle *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (!view_flat(x) || !view_flat(y)) return PS_EUNSUP;
    if (x->numel == 0) return 0;
    int64_t C = x->shape[x->ndim - 1], R = x->shape[x->ndim - 2], size = ps_dtype_bytes(x->dtype);
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < x->numel / C; r++) {
        int64_t edge = within(r % R + a->diagonal + !a->upper, C);
        const char *from = (const char *)x->data + r * C * size;
        char *to = (char *)y->data + r * C * size;
        /* the range of the elements that are kept */
        int64_t first = a->upper ? edge : 0, end = a->upper ? C : edge;
        memset(to, 0, (size_t)(first * size));
        memcpy(to + first * size, from + first * size, (size_t)((end - first) * size));
        memset(to + end * size, 0, (size_t)((C - end) * size));
    }
    return 0;
}

/* -- search -------------------------------------------------------------------------------------------------------- */
/* A search has no branch that depends on values, because the processor could not predict it. */
#define SEARCH(T) \
    static void search_##T(const T *seq, int64_t n, const T *values, int64_t *y, int64_t count, bool right) \
    { \
        for (int64_t i = 0; i < count; i++) { \
            int64_t first = 0, last = n; \
            T v = values[i]; \
            while (first < last) { \
                int64_t middle = first + (last - first) / 2; \
                int64_t beyond = -(int64_t)(right ? seq[middle] > v : seq[middle] >= v); \
                first = (first & beyond) | ((middle + 1) & ~beyond); \
                last = (middle & beyond) | (last & ~beyond); \
            } \
            y[i] = first; \
        } \
    }
SEARCH(float)
SEARCH(double)
SEARCH(int32_t)
SEARCH(int64_t)
SEARCH(uint8_t)

static int searchsorted(ps_call *call)
{
    const ps_view *seq = &call->in[0], *values = &call->in[1], *y = &call->out[0];
    int dtype = seq->dtype;
    if (dtype == PS_BF16 || dtype == PS_F16 || !view_flat(seq) || !view_flat(values) || !view_flat(y)) return PS_EUNSUP;
    if (values->numel == 0) return 0;
    bool right = ((const struct ps_attrs_searchsorted *)call->attrs)->right, one = seq->ndim == 1;
    int64_t n = ps_last_dim(seq), each = one ? PICKS : ps_last_dim(values), size = ps_dtype_bytes(dtype);
    int64_t parts = (values->numel + each - 1) / each;
#pragma omp parallel for schedule(static) if (values->numel >= PS_PAR_MIN)
    for (int64_t part = 0; part < parts; part++) {
        int64_t at = part * each, count = values->numel - at < each ? values->numel - at : each;
        const char *row = (const char *)seq->data + (one ? 0 : part * n * size);
        const char *from = (const char *)values->data + at * size;
        int64_t *to = (int64_t *)y->data + at;
        if (dtype == PS_F32) search_float((const float *)row, n, (const float *)from, to, count, right);
        else if (dtype == PS_F64) search_double((const double *)row, n, (const double *)from, to, count, right);
        else if (dtype == PS_I32) search_int32_t((const int32_t *)row, n, (const int32_t *)from, to, count, right);
        else if (dtype == PS_I64) search_int64_t((const int64_t *)row, n, (const int64_t *)from, to, count, right);
        else search_uint8_t((const uint8_t *)row, n, (const uint8_t *)from, to, count, right);
    }
    return 0;
}

/* -- masks and windows -------------------------------------------------------------------------------------------- */
#define SPREAD(type) \
    for (int64_t i = 0; i < n; i++) { \
        ((type *)y->data)[i] = mask[i] ? ((const type *)src->data)[k] : ((const type *)x->data)[i]; \
        k += mask[i] != 0 && k < last; \
    }

static int masked_scatter(ps_call *call)
{
    const ps_view *x = &call->in[0], *src = &call->in[2], *y = &call->out[0];
    if (!view_flat(x) || !view_flat(&call->in[1]) || !view_flat(src) || !view_flat(y)) return PS_EUNSUP;
    const uint8_t *mask = call->in[1].data;
    int64_t n = x->numel, size = ps_dtype_bytes(x->dtype), count = 0, k = 0, last = src->numel - 1;
    for (int64_t i = 0; i < n; i++) count += mask[i] != 0;
    if (count > src->numel)
        return ps_fail(PS_EINVAL, "the mask has %lld true elements, but the source has only %lld", (long long)count,
                       (long long)src->numel);
    if (count == 0) {
        if (n > 0) memcpy(y->data, x->data, (size_t)(n * size));
    } else if (size == 1) SPREAD(uint8_t)
    else if (size == 2) SPREAD(uint16_t)
    else if (size == 4) SPREAD(uint32_t)
    else SPREAD(uint64_t)
    return 0;
}

/* The shapes of unfold's operands: x is [outer, n, inner], where n is the size of the unfolded dimension, and y is
 * [outer, count, inner, size]. */
struct windows { int64_t outer, n, inner, count; };
static struct windows windows_of(const ps_view *x, int dim, int64_t size, int64_t step)
{
    struct windows w = { 1, 1, 1, 0 };
    if (dim < 0) dim += x->ndim;
    for (int d = 0; d < x->ndim; d++) *(d < dim ? &w.outer : d == dim ? &w.n : &w.inner) *= x->shape[d];
    w.count = (w.n - size) / step + 1;
    return w;
}

#define WINDOW(type) \
    for (int64_t i = 0; i < w.inner; i++) \
        for (int64_t k = 0; k < a->size; k++) ((type *)to)[i * a->size + k] = ((const type *)from)[k * w.inner + i]

static int unfold(ps_call *call)
{
    const struct ps_attrs_unfold *a = call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (!view_flat(x) || !view_flat(y)) return PS_EUNSUP;
    struct windows w = windows_of(x, a->dim, a->size, a->step);
    int64_t size = ps_dtype_bytes(x->dtype);
#pragma omp parallel for schedule(static) if (y->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < w.outer * w.count; r++) {
        const char *from = (const char *)x->data + (r / w.count * w.n + r % w.count * a->step) * w.inner * size;
        char *to = (char *)y->data + r * w.inner * a->size * size;
        if (size == 1) WINDOW(uint8_t);
        else if (size == 2) WINDOW(uint16_t);
        else if (size == 4) WINDOW(uint32_t);
        else WINDOW(uint64_t);
    }
    return 0;
}

/* Supports fp32. ref computes bf16 and fp16, and rounds only once. */
static int unfold_backward(ps_call *call)
{
    const struct ps_attrs_unfold_backward *a = call->attrs;
    const ps_view *dy = &call->in[0], *dx = &call->out[0];
    if (dy->dtype != PS_F32 || !view_flat(dy) || !view_flat(dx)) return PS_EUNSUP;
    struct windows w = windows_of(dx, a->dim, a->size, a->step);
#pragma omp parallel for schedule(static) if (dy->numel >= PS_PAR_MIN)
    for (int64_t o = 0; o < w.outer; o++) {
        const float *from = (const float *)dy->data + o * w.count * w.inner * a->size;
        float *to = (float *)dx->data + o * w.n * w.inner;
        memset(to, 0, (size_t)(w.n * w.inner) * sizeof *to);
        for (int64_t c = 0; c < w.count; c++, to += a->step * w.inner)
            for (int64_t i = 0; i < w.inner; i++)
                for (int64_t k = 0; k < a->size; k++) to[k * w.inner + i] += *from++;
    }
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_table)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_table)(ps_kernel *k)
{
    k[PS_OP_embedding] = embedding;
    k[PS_OP_embedding_backward] = embedding_backward;
    k[PS_OP_flat_index] = flat_index;
    k[PS_OP_gather] = gather;
    k[PS_OP_flip] = flip;
    k[PS_OP_triangle] = triangle;
    k[PS_OP_scatter_add] = scatter_add;
    k[PS_OP_scatter] = scatter;
    k[PS_OP_scatter_] = scatter_;
    k[PS_OP_scatter_reduce] = scatter_reduce;
    k[PS_OP_scatter_backward] = scatter_backward;
    k[PS_OP_searchsorted] = searchsorted;
    k[PS_OP_masked_scatter] = masked_scatter;
    k[PS_OP_unfold] = unfold;
    k[PS_OP_unfold_backward] = unfold_backward;
}
