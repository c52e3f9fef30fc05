/* SPDX-License-Identifier: BSD-3-Clause
 * Reads the header of a GGUF file. The input is treated as hostile. Each count and each length in the header is
 * compared with the number of bytes that are left in the file, before memory is allocated and before bytes are read.
 * The header is read twice. The first pass checks the header and counts the strings and names. The second pass fills
 * the tables. */
#define _GNU_SOURCE
#include "io/gguf.h"
#include "base/alloc.h"
#include "base/text.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct walk {
    ps_gguf *g;
    const uint8_t *at, *end;    /* end: the end of the map */
    const char *what;           /* kind of the item that is being read, for errors: "metadata entry" or "tensor" */
    int64_t index;              /* index of the item that is being read */
    const char *key;            /* name of the item that is being read, or NULL if the name was not read yet */
    size_t key_n;
    size_t text_n, strings_n;   /* of all items that were read: size in bytes of their names; number of their strings */
    bool fills;                 /* true in the second pass */
} walk;

const char *gguf_shown(const char *name, char out[GGUF_NAME_SHOWN])
{
    return ps_text_shown(name, out, GGUF_NAME_SHOWN);
}

/* Raises an error. The message contains the file's path, the current position in the file and the text of `fmt`. If an
 * entry or a tensor is being read, the message also contains the index and the name of the entry or tensor. */
static int bad(const walk *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int bad(const walk *w, const char *fmt, ...)
{
    char what[512], name[GGUF_NAME_SHOWN], whole[GGUF_NAME_SHOWN];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    long long place = w->at - w->g->map.bytes;
    if (!w->what) return ps_fail(PS_EFORMAT, "%s: byte %lld: %s", w->g->map.path, place, what);
    if (!w->key)
        return ps_fail(PS_EFORMAT, "%s: %s %lld (byte %lld): %s", w->g->map.path, w->what, (long long)w->index, place,
                       what);
    snprintf(whole, sizeof whole, "%.*s", (int)(w->key_n < sizeof whole ? w->key_n : sizeof whole - 1), w->key);
    return ps_fail(PS_EFORMAT, "%s: %s '%s' (byte %lld): %s", w->g->map.path, w->what, gguf_shown(whole, name), place,
                   what);
}

static size_t left(const walk *w) { return (size_t)(w->end - w->at); }

static int read_u32(walk *w, uint32_t *out)
{
    if (left(w) < 4) return bad(w, "the file ends inside a number of 4 bytes");
    memcpy(out, w->at, 4);
    w->at += 4;
    return 0;
}

static int read_u64(walk *w, uint64_t *out)
{
    if (left(w) < 8) return bad(w, "the file ends inside a number of 8 bytes");
    memcpy(out, w->at, 8);
    w->at += 8;
    return 0;
}

/* Reads a string, which may contain any bytes. Sets *s to the string in the map, and *n to its length in bytes. */
static int read_string(walk *w, const uint8_t **s, size_t *n)
{
    uint64_t length = 0;
    PS_TRY(read_u64(w, &length));
    if (length > left(w))
        return bad(w, "a string of %llu bytes, but the file has only %zu more", (unsigned long long)length, left(w));
    *s = w->at, *n = (size_t)length;
    w->at += length;
    return 0;
}

/* Reads a key or a name. Returns an error if it is empty, is not UTF-8, or contains a zero byte. The first pass sets
 * *out to NULL. The second pass sets *out to a copy with a final 0. */
static int read_name(walk *w, char **out)
{
    const uint8_t *s;
    size_t n;
    w->key = NULL;
    PS_TRY(read_string(w, &s, &n));
    if (!n || n > GGUF_LONGEST_NAME)
        return bad(w, "its name has %zu bytes; use 1 to %d", n, GGUF_LONGEST_NAME);
    for (size_t i = 0, len; i < n; i += len)
        if (!(len = (size_t)ps_utf8(s + i, n - i)) || !s[i]) return bad(w, "its name is not UTF-8 (byte 0x%02x)", s[i]);
    w->key = (const char *)s, w->key_n = n;
    *out = NULL;
    if (w->fills) {
        *out = w->g->text + w->text_n;
        memcpy(*out, s, n);
        (*out)[n] = 0;
    }
    w->text_n += n + 1;
    return 0;
}

/* -- metadata ------------------------------------------------------------------------------------------------------ */
const int gguf_value_bytes[GGUF_VALUE_TYPES] = {
    [GGUF_U8] = 1, [GGUF_I8] = 1, [GGUF_U16] = 2, [GGUF_I16] = 2, [GGUF_U32] = 4, [GGUF_I32] = 4, [GGUF_F32] = 4,
    [GGUF_BOOL] = 1, [GGUF_U64] = 8, [GGUF_I64] = 8, [GGUF_F64] = 8,
};

static int read_strings(walk *w, gguf_meta *m)
{
    if (w->fills) m->at = w->g->strings + w->strings_n;
    for (int64_t i = 0; i < m->n; i++) {
        const uint8_t *s;
        size_t n;
        if (w->fills) w->g->strings[w->strings_n + (size_t)i] = (uint64_t)(w->at - w->g->map.bytes);
        PS_TRY(read_string(w, &s, &n));
    }
    w->strings_n += (size_t)m->n;
    return 0;
}

static int read_values(walk *w, gguf_meta *m)
{
    m->bytes = w->at;
    if (m->of == GGUF_STRING) {
        if ((uint64_t)m->n > left(w) / 8)
            return bad(w, "an array of %lld strings, but the file has only %zu more bytes", (long long)m->n, left(w));
        return read_strings(w, m);
    }
    size_t each = (size_t)gguf_value_bytes[m->of];
    if ((uint64_t)m->n > left(w) / each)
        return bad(w, "there are %lld values of %zu bytes, but the file has only %zu more bytes", (long long)m->n, each,
                   left(w));
    for (int64_t i = 0; m->of == GGUF_BOOL && i < m->n; i++)
        if (w->at[i] > 1) return bad(w, "a boolean is %d; it must be 0 or 1", w->at[i]);
    w->at += (size_t)m->n * each;
    return 0;
}

static int read_meta(walk *w, gguf_meta *m)
{
    uint32_t type = 0, of = 0;
    uint64_t n = 1;
    PS_TRY(read_name(w, &m->key));
    PS_TRY(read_u32(w, &type));
    if (type >= GGUF_VALUE_TYPES) return bad(w, "there is no type %u of values", type);
    of = type;
    if (type == GGUF_ARRAY) {
        PS_TRY(read_u32(w, &of));
        if (of >= GGUF_VALUE_TYPES || of == GGUF_ARRAY) return bad(w, "an array of type %u is not supported", of);
        PS_TRY(read_u64(w, &n));
        if (n > left(w)) return bad(w, "an array of %llu values, but the file has only %zu more bytes",
                                    (unsigned long long)n, left(w));
    }
    m->type = (int)type, m->of = (int)of, m->n = (int64_t)n;
    return read_values(w, m);
}

/* -- tensors ------------------------------------------------------------------------------------------------------- */
/* Returns the size of a tensor in bytes. If the file is shorter than this size, reports an error and returns -1. */
static int64_t size_of(const walk *w, const gguf_tensor *t)
{
    int64_t rows = 1, row = 1, nbytes;
    for (int d = 0; d < t->ndim - 1; d++)
        if (__builtin_mul_overflow(rows, t->shape[d], &rows)) return bad(w, "it has more than 2^63 elements"), -1;
    if (t->ndim) row = t->shape[t->ndim - 1];
    if (row % t->type->block) {
        bad(w, "rows of %lld elements, but %s has blocks of %d", (long long)row, t->type->name, t->type->block);
        return -1;
    }
    if (__builtin_mul_overflow(row / t->type->block, (int64_t)t->type->bytes, &nbytes) ||
        __builtin_mul_overflow(rows, nbytes, &nbytes) || nbytes > INT64_MAX / 2)
        return bad(w, "it has more than 2^62 bytes"), -1;
    return nbytes;
}

static int read_tensor(walk *w, gguf_tensor *t)
{
    uint32_t ndim = 0, type = 0;
    uint64_t dims[GGUF_MAX_DIMS], offset = 0;
    PS_TRY(read_name(w, &t->name));
    PS_TRY(read_u32(w, &ndim));
    if (ndim > GGUF_MAX_DIMS) return bad(w, "it has %u dimensions, but the format allows only %d", ndim, GGUF_MAX_DIMS);
    for (uint32_t d = 0; d < ndim; d++) {
        PS_TRY(read_u64(w, &dims[d]));
        if (dims[d] > INT64_MAX)
            return bad(w, "dimension %u is %llu; it must be less than 2^63", d, (unsigned long long)dims[d]);
    }
    PS_TRY(read_u32(w, &type));
    if (!(t->type = gguf_type_of(type))) return bad(w, "there is no type %u of tensors", type);
    t->number = (int)type, t->ndim = (int)ndim;
    for (uint32_t d = 0; d < ndim; d++) t->shape[ndim - 1 - d] = (int64_t)dims[d];
    PS_TRY(read_u64(w, &offset));
    if ((t->nbytes = size_of(w, t)) < 0) return PS_EFORMAT;
    if (offset > INT64_MAX / 2)
        return bad(w, "its bytes begin at byte %llu of the data; the offset must be less than 2^62",
                   (unsigned long long)offset);
    t->begin = (int64_t)offset;                 /* an offset in the data until all tensors have been read */
    return 0;
}

/* -- the whole ----------------------------------------------------------------------------------------------------- */
static int compare_keys(const void *a, const void *b, void *g)
{
    return strcmp(((ps_gguf *)g)->meta[*(const int *)a].key, ((ps_gguf *)g)->meta[*(const int *)b].key);
}

static int compare_names(const void *a, const void *b, void *g)
{
    return strcmp(((ps_gguf *)g)->tensors[*(const int *)a].name, ((ps_gguf *)g)->tensors[*(const int *)b].name);
}

static int compare_places(const void *a, const void *b, void *of)
{
    const ps_gguf *g = of;
    const gguf_tensor *x = &g->tensors[*(const int *)a], *y = &g->tensors[*(const int *)b];
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->nbytes < y->nbytes ? -1 : x->nbytes > y->nbytes;
}

static int sorted(int n, ps_gguf *g, int (*compare)(const void *, const void *, void *), int **out)
{
    if (!(*out = ps_alloc((size_t)(n ? n : 1) * sizeof **out))) return ps_fail_nomem((size_t)n * sizeof **out);
    for (int i = 0; i < n; i++) (*out)[i] = i;
    qsort_r(*out, (size_t)n, sizeof **out, compare, g);
    return 0;
}

static int check_names(ps_gguf *g)
{
    char shown[GGUF_NAME_SHOWN];
    PS_TRY(sorted(g->meta_count, g, compare_keys, &g->by_key));
    for (int i = 1; i < g->meta_count; i++)
        if (!compare_keys(&g->by_key[i - 1], &g->by_key[i], g))
            return ps_fail(PS_EFORMAT, "%s: the metadata has '%s' twice", g->map.path,
                           gguf_shown(g->meta[g->by_key[i]].key, shown));
    PS_TRY(sorted(g->count, g, compare_names, &g->by_name));
    for (int i = 1; i < g->count; i++)
        if (!compare_names(&g->by_name[i - 1], &g->by_name[i], g))
            return ps_fail(PS_EFORMAT, "%s: there are two tensors '%s'", g->map.path,
                           gguf_shown(g->tensors[g->by_name[i]].name, shown));
    return 0;
}

static int find_alignment(ps_gguf *g)
{
    int i = ps_gguf_meta_find(g, "general.alignment");
    g->alignment = GGUF_ALIGNMENT;
    if (i < 0) return 0;
    uint32_t value = 0;
    if (g->meta[i].type == GGUF_U32) memcpy(&value, g->meta[i].bytes, 4);
    if (!value || (value & (value - 1)) || value > GGUF_MAX_ALIGNMENT)
        return ps_fail(PS_EFORMAT, "%s: general.alignment is %s; it must be a power of two up to %d, as uint32",
                       g->map.path, g->meta[i].type == GGUF_U32 ? "another number" : "of another type",
                       GGUF_MAX_ALIGNMENT);
    g->alignment = value;
    return 0;
}

static int place_tensors(ps_gguf *g, int64_t header)
{
    char shown[GGUF_NAME_SHOWN], other[GGUF_NAME_SHOWN];
    int *order = NULL, rc = 0;
    g->data = (header + g->alignment - 1) / g->alignment * g->alignment;
    for (int i = 0; i < g->count; i++) {
        gguf_tensor *t = &g->tensors[i];
        if (t->begin % g->alignment)
            return ps_fail(PS_EFORMAT, "%s: tensor '%s' begins at byte %lld of the data, which is not a multiple of "
                           "%lld", g->map.path, gguf_shown(t->name, shown), (long long)t->begin,
                           (long long)g->alignment);
        t->begin += g->data;
        if (t->begin > g->map.nbytes || t->nbytes > g->map.nbytes - t->begin)
            return ps_fail(PS_EFORMAT, "%s: tensor '%s' has bytes %lld to %lld, but the file has only %lld; the file "
                           "is truncated, download it again", g->map.path, gguf_shown(t->name, shown),
                           (long long)t->begin, (long long)(t->begin + t->nbytes), (long long)g->map.nbytes);
    }
    PS_TRY(sorted(g->count, g, compare_places, &order));
    for (int i = 1; i < g->count && !rc; i++) {
        const gguf_tensor *a = &g->tensors[order[i - 1]], *b = &g->tensors[order[i]];
        if (a->begin + a->nbytes > b->begin)
            rc = ps_fail(PS_EFORMAT, "%s: the bytes of tensors '%s' and '%s' overlap", g->map.path,
                         gguf_shown(a->name, shown), gguf_shown(b->name, other));
    }
    ps_free(order);
    return rc;
}

static int read_counts(walk *w)
{
    ps_gguf *g = w->g;
    uint32_t version = 0;
    uint64_t count = 0, meta_count = 0;
    if (left(w) < 4 || memcmp(w->at, "GGUF", 4)) return bad(w, "this is not a GGUF file (which begins with \"GGUF\")");
    w->at += 4;
    PS_TRY(read_u32(w, &version));
    if (version == 0x02000000u || version == 0x03000000u)
        return bad(w, "the file is big-endian, which is not supported; convert it on a little-endian machine");
    if (version != 2 && version != 3)
        return bad(w, "the file has version %u; this psluajit reads only versions 2 and 3", version);
    PS_TRY(read_u64(w, &count));
    PS_TRY(read_u64(w, &meta_count));
    /* 24 is the minimum size in bytes of a tensor's description. 13, below, is the minimum size of a metadata entry. */
    if (count > left(w) / 24 || count > INT32_MAX)
        return bad(w, "the header announces %llu tensors, but the file has only %zu more bytes",
                   (unsigned long long)count, left(w));
    if (meta_count > left(w) / 13 || meta_count > INT32_MAX)
        return bad(w, "the header announces %llu metadata entries, but the file has only %zu more bytes",
                   (unsigned long long)meta_count, left(w));
    g->count = (int)count, g->meta_count = (int)meta_count;
    return 0;
}

static int walk_all(walk *w)
{
    ps_gguf *g = w->g;
    gguf_meta entry = { 0 };
    gguf_tensor tensor = { 0 };
    w->what = "metadata entry";
    for (w->index = 0; w->index < g->meta_count; w->index++)
        PS_TRY(read_meta(w, w->fills ? &g->meta[w->index] : &entry));
    w->what = "tensor";
    for (w->index = 0; w->index < g->count; w->index++)
        PS_TRY(read_tensor(w, w->fills ? &g->tensors[w->index] : &tensor));
    return 0;
}

int gguf_parse(ps_gguf *g)
{
    walk w = { .g = g, .at = g->map.bytes, .end = g->map.bytes + g->map.nbytes };
    PS_TRY(read_counts(&w));
    walk second = w;
    int count = g->count, meta_count = g->meta_count;
    PS_TRY(walk_all(&w));
    size_t nbytes[] = { w.text_n + 1, (w.strings_n + 1) * sizeof *g->strings,
                        (size_t)(meta_count + 1) * sizeof *g->meta, (size_t)(count + 1) * sizeof *g->tensors };
    g->text = ps_alloc(nbytes[0]), g->strings = ps_alloc(nbytes[1]);
    g->meta = ps_alloc0(nbytes[2]), g->tensors = ps_alloc0(nbytes[3]);
    if (!g->text || !g->strings || !g->meta || !g->tensors)
        return ps_fail_nomem(nbytes[0] + nbytes[1] + nbytes[2] + nbytes[3]);
    second.fills = true;
    PS_TRY(walk_all(&second));
    PS_TRY(check_names(g));
    PS_TRY(find_alignment(g));
    return place_tensors(g, second.at - g->map.bytes);
}
