/* SPDX-License-Identifier: BSD-3-Clause
 * Lookups: embedding and its gradient, gather and scatter_add along a dimension; compiled once per instruction set.
 * Invariants: every index is checked before anything is written. The embedding's gradient sorts positions by index
 * (stable), sums the rows of one index in fp32 in the order of positions and rounds once; a destination row belongs to
 * one thread at a time, so there are no atomics and the thread count changes nothing. */
#define PS_ANY_LANES
#include "backend/cpu/simd/operand.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { COLUMNS = 512, RADIX_BITS = 11, ZERO_CHUNK = 1 << 18 };

/* Whether w [V, C] has a row, counted from the first of its table that it has. */
static bool is_own(int64_t v, int64_t V) { return v >= 0 && v < V; }
static bool index_usable(const ps_view *v) { return ps_is_index(v) && view_flat(v); }

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

/* Sorts n entries by row < rows, stably, by passes over RADIX_BITS bits; returns the array that holds the result. */
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
/* Zeros past the caches where the machine can, since the next reader is far away. */
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
/* Columns [first, last) of the destination row that entries [from, to) share. */
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
    int64_t *start = call->scratch(call, (size_t)(n + 1) * sizeof *start);   /* of each distinct row's entries */
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

/* -- gather and scatter_add, where only the indexed dimension's size differs ------------------------------------- */
struct along { int64_t outer, n, inner, size; };   /* index is [outer, n, inner], x is [outer, size, inner] */

static bool split_along(const ps_view *x, const ps_view *index, int dim, struct along *a)
{
    if (dim < 0) dim += x->ndim;
    if (x->ndim != index->ndim || dim < 0 || dim >= x->ndim) return false;
    *a = (struct along){ 1, index->shape[dim], 1, x->shape[dim] };
    for (int d = 0; d < x->ndim; d++) {
        if (d != dim && x->shape[d] != index->shape[d]) return false;
        if (d < dim) a->outer *= x->shape[d];
        if (d > dim) a->inner *= x->shape[d];
    }
    return true;
}
#define GATHER(type) \
    for (int64_t i = 0; i < a.n * a.inner; i++) \
        ((type *)y->data)[o * a.n * a.inner + i] = ((const type *)x->data)[ \
            (o * a.size + ps_index_at(index, o * a.n * a.inner + i)) * a.inner + i % a.inner]

static int gather(ps_call *call)
{
    const ps_view *x = &call->in[0], *index = &call->in[1];
    ps_view *y = &call->out[0];
    struct along a;
    if (!index_usable(index) || !view_flat(x) || !view_flat(y) || x->dtype != y->dtype ||
        !split_along(x, index, ((const struct ps_attrs_gather *)call->attrs)->dim, &a))
        return PS_EUNSUP;
    PS_TRY(ps_check_indices(index, a.size));
    int64_t size = ps_dtype_bytes(x->dtype);
#pragma omp parallel for schedule(static) if (index->numel >= PS_PAR_MIN)
    for (int64_t o = 0; o < a.outer; o++) {
        if (size == 1) GATHER(uint8_t);
        else if (size == 2) GATHER(uint16_t);
        else if (size == 4) GATHER(uint32_t);
        else GATHER(uint64_t);
    }
    return 0;
}
/* fp32 only: other types have a rounding at each addition that belongs to the reference. */
static int scatter_add(ps_call *call)
{
    const ps_view *x = &call->in[0], *index = &call->in[1], *src = &call->in[2];
    ps_view *y = &call->out[0];
    struct along a;
    if (!index_usable(index) || x->dtype != PS_F32 || src->dtype != PS_F32 || y->dtype != PS_F32 || !view_flat(x) ||
        !view_flat(y) || !view_flat(src) || src->numel != index->numel ||
        !split_along(x, index, ((const struct ps_attrs_scatter_add *)call->attrs)->dim, &a))
        return PS_EUNSUP;
    PS_TRY(ps_check_indices(index, a.size));
#pragma omp parallel for schedule(static) if (x->numel + src->numel >= PS_PAR_MIN)
    for (int64_t o = 0; o < a.outer; o++) {
        float *to = (float *)y->data + o * a.size * a.inner;
        const float *from = (const float *)src->data + o * a.n * a.inner;
        memmove(to, (const float *)x->data + o * a.size * a.inner, (size_t)(a.size * a.inner) * sizeof *to);
        for (int64_t i = 0; i < a.n * a.inner; i++)
            to[ps_index_at(index, o * a.n * a.inner + i) * a.inner + i % a.inner] += from[i];
    }
    return 0;
}

void PS_ISA_FN(ps_cpu_fill_table)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_table)(ps_kernel *k)
{
    k[PS_OP_embedding] = embedding;
    k[PS_OP_embedding_backward] = embedding_backward;
    k[PS_OP_gather] = gather;
    k[PS_OP_scatter_add] = scatter_add;
}
