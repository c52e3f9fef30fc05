/* SPDX-License-Identifier: BSD-3-Clause
 * Reads GGUF, the format of llama.cpp. Opening maps a file and checks its header (gguf_header.c). After that, the bytes
 * of a tensor can be lent, or read as values of one dtype. base/blocks.c unpacks the blocks. */
#define _GNU_SOURCE
#include "io/gguf.h"
#include "base/alloc.h"
#include "base/blocks.h"
#include <stdlib.h>
#include <string.h>

static const gguf_type types[] = {
    [0] = { "F32", 1, 4, PS_F32, NULL }, [1] = { "F16", 1, 2, PS_F16, NULL },
    [2] = { "Q4_0", 32, 18, PS_F32, ps_unpack_q4_0 }, [3] = { "Q4_1", 32, 20, PS_F32, ps_unpack_q4_1 },
    [6] = { "Q5_0", 32, 22, PS_F32, ps_unpack_q5_0 }, [7] = { "Q5_1", 32, 24, PS_F32, ps_unpack_q5_1 },
    [8] = { "Q8_0", 32, 34, PS_F32, ps_unpack_q8_0 }, [9] = { "Q8_1", 32, 36, -1, NULL },
    [10] = { "Q2_K", 256, 84, PS_F32, ps_unpack_q2_k }, [11] = { "Q3_K", 256, 110, PS_F32, ps_unpack_q3_k },
    [12] = { "Q4_K", 256, 144, PS_F32, ps_unpack_q4_k }, [13] = { "Q5_K", 256, 176, PS_F32, ps_unpack_q5_k },
    [14] = { "Q6_K", 256, 210, PS_F32, ps_unpack_q6_k }, [15] = { "Q8_K", 256, 292, -1, NULL },
    [16] = { "IQ2_XXS", 256, 66, -1, NULL }, [17] = { "IQ2_XS", 256, 74, -1, NULL },
    [18] = { "IQ3_XXS", 256, 98, -1, NULL }, [19] = { "IQ1_S", 256, 50, -1, NULL },
    [20] = { "IQ4_NL", 32, 18, PS_F32, ps_unpack_iq4_nl }, [21] = { "IQ3_S", 256, 110, -1, NULL },
    [22] = { "IQ2_S", 256, 82, -1, NULL }, [23] = { "IQ4_XS", 256, 136, PS_F32, ps_unpack_iq4_xs },
    [24] = { "I8", 1, 1, -1, NULL }, [25] = { "I16", 1, 2, -1, NULL }, [26] = { "I32", 1, 4, PS_I32, NULL },
    [27] = { "I64", 1, 8, PS_I64, NULL }, [28] = { "F64", 1, 8, PS_F64, NULL },
    [29] = { "IQ1_M", 256, 56, -1, NULL }, [30] = { "BF16", 1, 2, PS_BF16, NULL },
    [34] = { "TQ1_0", 256, 54, -1, NULL }, [35] = { "TQ2_0", 256, 66, -1, NULL },
    [39] = { "MXFP4", 32, 17, PS_F32, ps_unpack_mxfp4 }, [40] = { "NVFP4", 64, 36, -1, NULL },
    [41] = { "Q1_0", 128, 18, -1, NULL }, [42] = { "Q2_0", 64, 18, -1, NULL },
};
enum { N_TYPES = sizeof types / sizeof *types };

const gguf_type *gguf_type_of(int64_t number)
{
    return number >= 0 && number < N_TYPES && types[number].name ? &types[number] : NULL;
}

int gguf_type_by_name(const char *name)
{
    for (int i = 0; i < N_TYPES; i++) if (types[i].name && !strcmp(types[i].name, name)) return i;
    return -1;
}

/* -- opening ------------------------------------------------------------------------------------------------------- */
/* Opens the file in `map`. If this fails, the function closes `map`. Otherwise the result owns `map`. */
static int open_map(ps_map *map, ps_gguf **out)
{
    ps_gguf *g = ps_alloc0(sizeof *g);
    if (!g) {
        ps_map_close(map);
        return ps_fail_nomem(sizeof *g);
    }
    g->map = *map;
    int rc = gguf_parse(g);
    if (rc < 0) ps_gguf_close(g);
    else *out = g;
    return rc;
}

int ps_gguf_open(const char *path, ps_gguf **out)
{
    PS_NEED(out);
    ps_map map;
    PS_TRY(ps_map_open(&map, path));
    return open_map(&map, out);
}

int gguf_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_gguf **out)
{
    ps_map map;
    PS_TRY(ps_map_borrow(&map, path, bytes, nbytes));
    return open_map(&map, out);
}

static void end_if_unused(ps_gguf *g)
{
    if (!g->closed || g->loans > 0) return;
    ps_map_close(&g->map);
    ps_free(g);
}

void ps_gguf_close(ps_gguf *g)
{
    if (!g) return;
    ps_free(g->text);
    ps_free(g->strings);
    ps_free(g->meta);
    ps_free(g->tensors);
    ps_free(g->by_key);
    ps_free(g->by_name);
    g->closed = true;
    end_if_unused(g);
}

int ps_gguf_count(const ps_gguf *g) { return g ? g->count : 0; }
int ps_gguf_meta_count(const ps_gguf *g) { return g ? g->meta_count : 0; }

/* -- metadata ------------------------------------------------------------------------------------------------------ */
const char *ps_gguf_meta_key(const ps_gguf *g, int i)
{
    return g && i >= 0 && i < g->meta_count ? g->meta[i].key : NULL;
}

int ps_gguf_meta_find(const ps_gguf *g, const char *key)
{
    int low = 0, high = g && key ? g->meta_count : 0;
    while (low < high) {
        int mid = low + (high - low) / 2, order = strcmp(g->meta[g->by_key[mid]].key, key);
        if (order == 0) return g->by_key[mid];
        if (order < 0) low = mid + 1;
        else high = mid;
    }
    return -1;
}

static int64_t whole_of(int type, const uint8_t *s)
{
    int8_t i8;
    uint16_t u16;
    int16_t i16;
    uint32_t u32;
    int32_t i32;
    int64_t i64;
    switch (type) {
    case GGUF_U8: case GGUF_BOOL: return *s;
    case GGUF_I8: memcpy(&i8, s, 1); return i8;
    case GGUF_U16: memcpy(&u16, s, 2); return u16;
    case GGUF_I16: memcpy(&i16, s, 2); return i16;
    case GGUF_U32: memcpy(&u32, s, 4); return u32;
    case GGUF_I32: memcpy(&i32, s, 4); return i32;
    default: memcpy(&i64, s, 8); return i64;        /* a uint64 is returned as an int64 with the same bits */
    }
}

int ps_gguf_meta_get(const ps_gguf *g, int i, int64_t k, ps_gguf_value *out)
{
    PS_NEED(g);
    PS_NEED(out);
    if (i < 0 || i >= g->meta_count)
        return ps_fail(PS_ERANGE, "%s: metadata entry %d was requested, but the file has %d", g->map.path, i,
                       g->meta_count);
    const gguf_meta *m = &g->meta[i];
    if (k < -1 || k >= m->n)
        return ps_fail(PS_ERANGE, "%s: value %lld of %s was requested, but it has %lld values", g->map.path,
                       (long long)k, m->key, (long long)m->n);
    PS_TRY(ps_map_check(&g->map));
    *out = (ps_gguf_value){ .type = m->type, .of = m->of, .n = m->n };
    if (k < 0) return 0;
    if (m->of == GGUF_STRING) {
        const uint8_t *s = g->map.bytes + m->at[k];
        uint64_t n;
        memcpy(&n, s, 8);
        out->text = (const char *)s + 8, out->whole = (int64_t)n;
        return 0;
    }
    const uint8_t *s = m->bytes + k * gguf_value_bytes[m->of];
    float f;
    if (m->of == GGUF_F32) memcpy(&f, s, 4), out->number = f;
    else if (m->of == GGUF_F64) memcpy(&out->number, s, 8);
    else out->whole = whole_of(m->of, s), out->number = m->of == GGUF_U64 ? (double)(uint64_t)out->whole
        : (double)out->whole;
    return 0;
}

/* -- tensors ------------------------------------------------------------------------------------------------------- */
static const gguf_tensor *tensor_at(const ps_gguf *g, int i)
{
    return g && i >= 0 && i < g->count ? &g->tensors[i] : NULL;
}

const char *ps_gguf_name(const ps_gguf *g, int i)
{
    const gguf_tensor *t = tensor_at(g, i);
    return t ? t->name : NULL;
}

int ps_gguf_find(const ps_gguf *g, const char *name)
{
    int low = 0, high = g && name ? g->count : 0;
    while (low < high) {
        int mid = low + (high - low) / 2, order = strcmp(g->tensors[g->by_name[mid]].name, name);
        if (order == 0) return g->by_name[mid];
        if (order < 0) low = mid + 1;
        else high = mid;
    }
    return -1;
}

static int no_tensor(const ps_gguf *g, int i)
{
    return ps_fail(PS_ERANGE, "%s: tensor %d was requested, but the file has %d", g->map.path, i, g->count);
}

/* Writes the shape that callers see to `shape`: t->shape, or the reverse of t->shape if the tensor is transposed. */
static void shape_of(const gguf_tensor *t, int64_t shape[GGUF_MAX_DIMS])
{
    for (int d = 0; d < t->ndim; d++) shape[d] = t->shape[t->transposed ? t->ndim - 1 - d : d];
}

int ps_gguf_get(const ps_gguf *g, int i, ps_gguf_entry *out)
{
    PS_NEED(g);
    PS_NEED(out);
    const gguf_tensor *t = tensor_at(g, i);
    if (!t) return no_tensor(g, i);
    *out = (ps_gguf_entry){ .type = t->number, .dtype = t->type->dtype, .ndim = t->ndim, .at = t->begin,
                            .nbytes = t->nbytes, .as_it_is = !t->type->unpack && !t->heads && !t->transposed };
    shape_of(t, out->shape);
    return 0;
}

const char *ps_gguf_type_name(int type)
{
    const gguf_type *t = gguf_type_of(type);
    return t ? t->name : NULL;
}

int ps_gguf_layout(ps_gguf *g, int i, int64_t heads, int transposed)
{
    char shown[GGUF_NAME_SHOWN];
    PS_NEED(g);
    if (i < 0 || i >= g->count) return no_tensor(g, i);
    gguf_tensor *t = &g->tensors[i];
    if (heads < 0 || (heads && (t->ndim < 1 || t->ndim > 2 || transposed || t->shape[0] % heads ||
                                t->shape[0] / heads % 2)))
        return ps_fail(PS_EFORMAT, "%s: tensor '%s' has %lld rows, which are not %lld heads of an even number of rows",
                       g->map.path, gguf_shown(t->name, shown), t->ndim ? (long long)t->shape[0] : 1ll,
                       (long long)heads);
    if (heads && t->ndim == 1 && t->type->block > 1)
        return ps_fail(PS_EFORMAT, "%s: tensor '%s' is a vector in blocks (%s), whose elements cannot be read in "
                       "another order", g->map.path, gguf_shown(t->name, shown), t->type->name);
    if (transposed && t->ndim != 2)
        return ps_fail(PS_EFORMAT, "%s: tensor '%s' has %d dimensions, but only a matrix, with 2, can be transposed",
                       g->map.path, gguf_shown(t->name, shown), t->ndim);
    t->heads = heads, t->transposed = transposed != 0;
    return 0;
}

/* Returns the index in the file of the row whose index in Hugging Face's order is j. Let D be the number of rows of a
 * head. For the rotary embedding, the file stores the rows of a head in pairs. In Hugging Face's order, the rows of
 * these pairs have the indices (0, D / 2), (1, D / 2 + 1), and so on. */
int64_t gguf_stored_row(const gguf_tensor *t, int64_t j)
{
    if (!t->heads) return j;
    int64_t D = t->shape[0] / t->heads, r = j % D;
    return j - r + (r < D / 2 ? 2 * r : 2 * (r - D / 2) + 1);
}

/* Unpacks n elements of a row, starting at element `from`, and writes them to `out` as values of type->dtype. */
static void unpack_row(const gguf_type *type, const uint8_t *row, int64_t from, int64_t n, uint8_t *out)
{
    if (!type->unpack) {
        memcpy(out, row + from * type->bytes, (size_t)(n * type->bytes));
        return;
    }
    float whole[GGUF_MAX_BLOCK];
    while (n > 0) {
        int64_t skip = from % type->block, take = type->block - skip < n ? type->block - skip : n;
        type->unpack(row + from / type->block * type->bytes, whole);
        memcpy(out, whole + skip, (size_t)take * sizeof *whole);
        from += take, n -= take, out += (size_t)take * sizeof *whole;
    }
}

/* Copies a rectangle of a transposed matrix (t->transposed). A column of the rectangle is a section of a row in the
 * file. */
static int copy_swapped(const ps_gguf *g, const gguf_tensor *t, const int64_t *offset, const int64_t *shape,
                        int64_t first, uint8_t *dst, int64_t numel)
{
    size_t each = t->type->unpack ? sizeof(float) : (size_t)t->type->bytes;
    int64_t wide = shape[1], low = first / wide, high = (first + numel - 1) / wide;
    int64_t row_bytes = t->shape[1] / t->type->block * t->type->bytes;
    uint8_t *part = ps_alloc((size_t)(high - low + 1) * each);
    if (!part) return ps_fail_nomem((size_t)(high - low + 1) * each);
    for (int64_t c = 0; c < wide; c++) {
        const uint8_t *row = g->map.bytes + t->begin + (offset[1] + c) * row_bytes;
        unpack_row(t->type, row, offset[0] + low, high - low + 1, part);
        for (int64_t r = low; r <= high; r++) {
            int64_t at = r * wide + c - first;
            if (at >= 0 && at < numel) memcpy(dst + (size_t)at * each, part + (size_t)(r - low) * each, each);
        }
    }
    ps_free(part);
    return 0;
}

/* Copies a rectangle row by row. If a tensor has one dimension and heads, each element is a row. */
static void copy_rows(const ps_gguf *g, const gguf_tensor *t, const int64_t *offset, const int64_t *shape,
                      int64_t first, uint8_t *dst, int64_t numel)
{
    bool single = t->heads && t->ndim == 1;
    /* The number of dimensions before the dimension of a row's elements. For a scalar, t->ndim - 1 is -1. */
    int leading = single ? 1 : t->ndim - 1;
    if (leading < 0) leading = 0;
    int64_t row = single || !t->ndim ? 1 : t->shape[t->ndim - 1], wide = single || !t->ndim ? 1 : shape[t->ndim - 1];
    int64_t from = single || !t->ndim ? 0 : offset[t->ndim - 1];
    int64_t row_bytes = single ? t->type->bytes : row / t->type->block * t->type->bytes;
    size_t each = t->type->unpack ? sizeof(float) : (size_t)t->type->bytes;
    for (int64_t done = 0; done < numel;) {
        int64_t at = (first + done) / wide, col = (first + done) % wide, n = wide - col, stored = 0, unit = 1;
        if (n > numel - done) n = numel - done;
        for (int d = leading - 1; d >= 0; d--) {
            int64_t j = offset[d] + at % shape[d];
            stored += (d == 0 ? gguf_stored_row(t, j) : j) * unit;
            at /= shape[d], unit *= t->shape[d];
        }
        unpack_row(t->type, g->map.bytes + t->begin + stored * row_bytes, from + col, n, dst + (size_t)done * each);
        done += n;
    }
}

static int check_rectangle(const ps_gguf *g, const gguf_tensor *t, const int64_t *offset, const int64_t *shape,
                           int64_t first, const void *dst, int64_t numel)
{
    char shown[GGUF_NAME_SHOWN];
    int64_t all[GGUF_MAX_DIMS], room = 1;
    if (t->ndim) PS_NEED(offset);
    if (t->ndim) PS_NEED(shape);
    if (t->type->dtype < 0)
        return ps_fail(PS_EUNSUP, "%s: tensor '%s' has type %s, which is not supported", g->map.path,
                       gguf_shown(t->name, shown), t->type->name);
    shape_of(t, all);
    for (int d = 0; d < t->ndim; d++) {
        if (offset[d] < 0 || shape[d] < 0 || offset[d] > all[d] || shape[d] > all[d] - offset[d])
            return ps_fail(PS_ERANGE, "%s: of tensor '%s' %lld from %lld on of dimension %d were requested, which has "
                           "%lld", g->map.path, gguf_shown(t->name, shown), (long long)shape[d],
                           (long long)offset[d], d, (long long)all[d]);
        room *= shape[d];
    }
    if (first < 0 || numel < 0 || first > room || numel > room - first || (numel && !dst))
        return ps_fail(PS_ERANGE, "%s: %lld elements from %lld on were requested, of %lld of tensor '%s'",
                       g->map.path, (long long)numel, (long long)first, (long long)room, gguf_shown(t->name, shown));
    return 0;
}

int ps_gguf_copy(const ps_gguf *g, int i, const int64_t *offset, const int64_t *shape, int64_t first, void *dst,
                 int64_t numel)
{
    PS_NEED(g);
    const gguf_tensor *t = tensor_at(g, i);
    if (!t) return no_tensor(g, i);
    PS_TRY(check_rectangle(g, t, offset, shape, first, dst, numel));
    PS_TRY(ps_map_check(&g->map));
    if (!numel) return 0;
    if (t->transposed) return copy_swapped(g, t, offset, shape, first, dst, numel);
    copy_rows(g, t, offset, shape, first, dst, numel);
    return 0;
}

int64_t ps_gguf_rows(const ps_gguf *g, int i)
{
    const gguf_tensor *t = tensor_at(g, i);
    return t && t->ndim == 2 ? t->shape[0] : 0;
}

int ps_gguf_copy_packed(const ps_gguf *g, int i, int64_t first, void *dst, int64_t nbytes)
{
    char shown[GGUF_NAME_SHOWN];
    PS_NEED(g);
    const gguf_tensor *t = tensor_at(g, i);
    if (!t) return no_tensor(g, i);
    if (t->ndim != 2 || first < 0 || nbytes < 0 || first > t->nbytes || nbytes > t->nbytes - first || (nbytes && !dst))
        return ps_fail(PS_ERANGE, "%s: %lld bytes from byte %lld on were requested, of %lld of matrix '%s'",
                       g->map.path, (long long)nbytes, (long long)first, (long long)t->nbytes,
                       gguf_shown(t->name, shown));
    PS_TRY(ps_map_check(&g->map));
    int64_t row = t->shape[0] ? t->nbytes / t->shape[0] : 0;
    for (int64_t done = 0; done < nbytes;) {
        int64_t at = (first + done) % row, n = row - at < nbytes - done ? row - at : nbytes - done;
        int64_t stored = gguf_stored_row(t, (first + done) / row);
        memcpy((uint8_t *)dst + done, g->map.bytes + t->begin + stored * row + at, (size_t)n);
        done += n;
    }
    return 0;
}

void ps_gguf_drop(const ps_gguf *g, int i)
{
    const gguf_tensor *t = tensor_at(g, i);
    if (t) ps_map_drop(&g->map, g->map.bytes + t->begin, t->nbytes);
}

/* -- bytes as they are --------------------------------------------------------------------------------------------- */
static int check_range(const ps_gguf *g, int64_t at, int64_t nbytes, const void *out)
{
    bool inside = at >= g->data && nbytes >= 0 && at <= g->map.nbytes && nbytes <= g->map.nbytes - at;
    if (inside && (!nbytes || out)) return 0;
    return ps_fail(PS_ERANGE, "%s: %lld bytes from byte %lld on were requested, but the data has bytes %lld to %lld",
                   g->map.path, (long long)nbytes, (long long)at, (long long)g->data, (long long)g->map.nbytes);
}

int ps_gguf_read(const void *from, int64_t at, void *dst, int64_t nbytes)
{
    const ps_gguf *g = from;
    PS_NEED(g);
    PS_TRY(check_range(g, at, nbytes, dst));
    return ps_map_read(&g->map, at, dst, nbytes);
}

typedef struct loan {
    ps_gguf *g;
    ps_lent_map map;
    int64_t at;                 /* offset in the file of the first byte that is lent */
} loan;

static int loan_check(void *lender) { return ps_map_unchanged(&((const loan *)lender)->g->map); }

static int loan_direct(void *lender, int64_t *at)
{
    const loan *l = lender;
    *at = l->at;
    return ps_map_direct(&l->g->map);
}

static void loan_end(void *lender)
{
    loan *l = lender;
    ps_map_unlend(&l->map);
    l->g->loans--;
    end_if_unused(l->g);
    ps_free(l);
}

int ps_gguf_lend(void *from, int64_t at, int64_t nbytes, ps_loan *out)
{
    ps_gguf *g = from;
    PS_NEED(g);
    PS_NEED(out);
    PS_TRY(check_range(g, at, nbytes, g));
    PS_TRY(ps_map_unchanged(&g->map));
    loan *l = ps_alloc(sizeof *l);
    if (!l) return ps_fail_nomem(sizeof *l);
    int rc = ps_map_lend(&g->map, at, nbytes, &l->map);
    if (rc < 0) {
        ps_free(l);
        return rc;
    }
    l->g = g;
    l->at = at;
    g->loans++;
    *out = (ps_loan){ l->map.bytes, loan_check, loan_end, l, loan_direct };
    return 0;
}
