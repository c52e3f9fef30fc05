/* SPDX-License-Identifier: BSD-3-Clause
 * Writes safetensors. The caller first declares all tensors, so that `begin` knows the size of the whole file. `begin`
 * sorts the tensors by descending element size and then by name, reserves the space, and writes the header. Then the
 * caller writes the tensors in any order, whole or in pieces. Each write also updates the tensor's checksum (st_sum.c).
 * Commit writes the header again, with the checksums. The file gets its name at commit, when it is complete and on the
 * disk. */
#include "io/safetensors.h"
#include "base/alloc.h"
#include "base/grow.h"
#include "base/text.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A text that grows. `failed` is set if an allocation fails. */
typedef struct text { char *p; size_t n, room; bool failed; } text;

typedef struct stw_tensor {
    char *name;
    const st_type *type;
    int ndim;
    int64_t shape[PS_MAX_DIMS];
    int64_t nbytes, begin;      /* begin: offset in bytes from the start of the data */
    int64_t written;            /* number of bytes that were written */
    st_sum *sum;                /* checksum of the bytes that were written */
    uint64_t checksum;          /* checksum of all bytes; valid after all bytes were written */
} stw_tensor;
typedef struct stw_meta { char *key, *value; } stw_meta;

struct ps_stw {
    enum { DECLARING, WRITING, DONE } state;
    char *path;
    ps_tempfile file;
    stw_tensor *tensors;        /* [count] in the order of the file, after begin */
    stw_tensor **by_name;       /* [count] in the order of their names, after begin */
    stw_meta *meta;
    int count, room, meta_count, meta_room;
    bool sums;
    text header;                /* with checksums: the header, which is kept from begin to commit */
    int64_t data_start;         /* offset in the file; a multiple of 64; with checksums, a multiple of 4096 */
    int64_t data_nbytes;
};

/* -- texts --------------------------------------------------------------------------------------------------------- */
static void put(text *t, const char *s, size_t n)
{
    if (t->failed) return;
    if (!ps_try_grow(t->p, t->room, t->n + n)) {
        t->failed = true;
        return;
    }
    memcpy(t->p + t->n, s, n);
    t->n += n;
}

static void putf(text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void putf(text *t, const char *fmt, ...)
{
    char piece[128];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(piece, sizeof piece, fmt, ap);
    va_end(ap);
    put(t, piece, (size_t)n);
}

static void put_string(text *t, const char *s)
{
    put(t, "\"", 1);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') put(t, "\\", 1), put(t, s, 1);
        else if ((unsigned char)*s < 0x20) putf(t, "\\u%04x", *s);
        else put(t, s, 1);
    }
    put(t, "\"", 1);
}

/* -- declaring --------------------------------------------------------------------------------------------------- */
int ps_stw_new(const char *path, ps_stw **out)
{
    PS_NEED(path);
    PS_NEED(out);
    ps_stw *w = ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->file = PS_TEMPFILE_NONE;
    if (!(w->path = ps_strdup(path))) {
        ps_free(w);
        return ps_fail_nomem(strlen(path) + 1);
    }
    *out = w;
    return 0;
}

static int check_text(const ps_stw *w, const char *what, const char *s)
{
    char shown[ST_NAME_SHOWN];
    size_t left = strlen(s);
    for (const uint8_t *at = (const uint8_t *)s; left; ) {
        int len = ps_utf8(at, left);
        if (!len) return ps_fail(PS_EINVAL, "writing %s: the %s '%s' is not UTF-8", w->path, what, st_shown(s, shown));
        at += len, left -= (size_t)len;
    }
    return 0;
}

static int check_state(const ps_stw *w, int wanted)
{
    static const char *const names[] = { "declaring (before begin)", "writing (after begin)", "finished (committed)" };
    if ((int)w->state == wanted) return 0;
    return ps_fail(PS_ESTATE, "writing %s: this call belongs to %s, but the writer is %s", w->path, names[wanted],
                   names[w->state]);
}

int ps_stw_checksums(ps_stw *w)
{
    PS_NEED(w);
    PS_TRY(check_state(w, DECLARING));
    w->sums = true;
    return 0;
}

int ps_stw_meta(ps_stw *w, const char *key, const char *value)
{
    PS_NEED(w);
    PS_NEED(key);
    PS_NEED(value);
    PS_TRY(check_state(w, DECLARING));
    if (!strcmp(key, ST_SUM_KEY))
        return ps_fail(PS_EINVAL, "writing %s: the metadata key '" ST_SUM_KEY "' is for checksums, which the writer "
                       "computes itself (ps_stw_checksums)", w->path);
    PS_TRY(check_text(w, "metadata key", key));
    PS_TRY(check_text(w, "metadata value", value));
    char *v = ps_strdup(value);
    if (!v) return ps_fail_nomem(strlen(value) + 1);
    for (int i = 0; i < w->meta_count; i++)
        if (!strcmp(w->meta[i].key, key)) {
            ps_free(w->meta[i].value);
            w->meta[i].value = v;
            return 0;
        }
    char *k = NULL;
    int rc = ps_grow(w->meta, w->meta_room, w->meta_count + 1);
    if (rc == 0 && !(k = ps_strdup(key))) rc = ps_fail_nomem(strlen(key) + 1);
    if (rc < 0) {
        ps_free(v);
        return rc;
    }
    w->meta[w->meta_count++] = (stw_meta){ k, v };
    return 0;
}

int ps_stw_add(ps_stw *w, const char *name, int dtype, int ndim, const int64_t *shape)
{
    char shown[ST_NAME_SHOWN];
    PS_NEED(w);
    PS_NEED(name);
    PS_TRY(check_state(w, DECLARING));
    PS_TRY(check_text(w, "tensor name", name));
    st_shown(name, shown);
    if (!strcmp(name, "__metadata__"))
        return ps_fail(PS_EINVAL, "writing %s: a tensor cannot be called '__metadata__'", w->path);
    stw_tensor t = { .type = st_type_by_dtype(dtype), .ndim = ndim };
    if (!t.type) return ps_fail(PS_EINVAL, "writing %s: tensor '%s': dtype %d does not exist", w->path, shown, dtype);
    if (ndim < 0 || ndim > PS_MAX_DIMS || (ndim && !shape))
        return ps_fail(PS_EINVAL, "writing %s: tensor '%s' has %d dimensions; only 0 to %d are supported", w->path,
                       shown, ndim, PS_MAX_DIMS);
    for (int d = 0; d < ndim; d++) {
        if (shape[d] < 0)
            return ps_fail(PS_EINVAL, "writing %s: tensor '%s': dimension %d is %lld; it must not be negative", w->path,
                           shown, d, (long long)shape[d]);
        t.shape[d] = shape[d];
    }
    int64_t numel = st_numel(ndim, t.shape);
    if (numel < 0 || __builtin_mul_overflow(numel, t.type->bits / 8, &t.nbytes))
        return ps_fail(PS_EINVAL, "writing %s: tensor '%s': the shape is too large", w->path, shown);
    PS_TRY(ps_grow(w->tensors, w->room, w->count + 1));
    if (!(t.name = ps_strdup(name))) return ps_fail_nomem(strlen(name) + 1);
    w->tensors[w->count++] = t;
    return 0;
}

/* -- begin ------------------------------------------------------------------------------------------------------- */
static int file_order(const void *a, const void *b)
{
    const stw_tensor *s = a, *t = b;
    return s->type->bits != t->type->bits ? t->type->bits - s->type->bits : strcmp(s->name, t->name);
}

static int name_order(const void *a, const void *b)
{
    return strcmp((*(stw_tensor *const *)a)->name, (*(stw_tensor *const *)b)->name);
}

/* Sorts the tensors, rejects duplicate names, and assigns the offsets. */
static int lay_out(ps_stw *w, int64_t *data_nbytes)
{
    char shown[ST_NAME_SHOWN];
    ps_free(w->by_name);
    if (!(w->by_name = ps_alloc((size_t)w->count * sizeof *w->by_name)))
        return ps_fail_nomem((size_t)w->count * sizeof *w->by_name);
    if (w->count) qsort(w->tensors, (size_t)w->count, sizeof *w->tensors, file_order);
    for (int i = 0; i < w->count; i++) w->by_name[i] = &w->tensors[i];
    if (w->count) qsort(w->by_name, (size_t)w->count, sizeof *w->by_name, name_order);
    for (int i = 1; i < w->count; i++)
        if (!strcmp(w->by_name[i - 1]->name, w->by_name[i]->name))
            return ps_fail(PS_EINVAL, "writing %s: tensor '%s' was added twice", w->path,
                           st_shown(w->by_name[i]->name, shown));
    *data_nbytes = 0;
    for (int i = 0; i < w->count; i++) {
        stw_tensor *t = &w->tensors[i];
        t->begin = *data_nbytes;
        if (__builtin_add_overflow(*data_nbytes, t->nbytes, data_nbytes))
            return ps_fail(PS_EINVAL, "writing %s: all tensors together are too large", w->path);
    }
    return 0;
}

/* Writes the header's length and the JSON to `t`. The JSON is padded so that the data begins at a multiple of 64 bytes,
 * or of 4096 bytes if the file has checksums. Therefore every tensor is aligned in a map. The digits of the checksums
 * are zeros. */
static int print_header(const ps_stw *w, text *t)
{
    bool has_format = false;
    put(t, "\0\0\0\0\0\0\0\0", 8);
    if (w->sums) {
        put(t, ST_SUM_HEAD, sizeof ST_SUM_HEAD - 1);
        for (int i = 0; i <= w->count; i++)
            put(t, i ? " 0000000000000000" : "0000000000000000", i ? ST_SUM_DIGITS + 1 : ST_SUM_DIGITS);
        put(t, w->meta_count ? "\"," : "\"", w->meta_count ? 2 : 1);
    } else {
        put(t, "{\"__metadata__\":{", 17);
    }
    for (int i = 0; i < w->meta_count; i++) {
        has_format = has_format || !strcmp(w->meta[i].key, "format");
        if (i) put(t, ",", 1);
        put_string(t, w->meta[i].key);
        put(t, ":", 1);
        put_string(t, w->meta[i].value);
    }
    if (!has_format) {          /* transformers rejects a file without a format */
        if (w->meta_count || w->sums) put(t, ",", 1);
        put(t, "\"format\":\"pt\"", 13);
    }
    put(t, "}", 1);
    for (int i = 0; i < w->count; i++) {
        const stw_tensor *s = &w->tensors[i];
        put(t, ",", 1);
        put_string(t, s->name);
        putf(t, ":{\"dtype\":\"%s\",\"shape\":[", s->type->text);
        for (int d = 0; d < s->ndim; d++) putf(t, d ? ",%lld" : "%lld", (long long)s->shape[d]);
        putf(t, "],\"data_offsets\":[%lld,%lld]}", (long long)s->begin, (long long)(s->begin + s->nbytes));
    }
    put(t, "}", 1);
    while (t->n % (w->sums ? 4096 : 64) && !t->failed) put(t, " ", 1);
    if (t->failed) return ps_fail_nomem(t->n * 2);
    uint64_t length = t->n - 8;
    if (length > ST_MAX_HEADER)
        return ps_fail(PS_EINVAL, "writing %s: the header would have %llu bytes, but at most %d are allowed; use fewer "
                       "tensors or shorter names", w->path, (unsigned long long)length, ST_MAX_HEADER);
    for (int i = 0; i < 8; i++) t->p[i] = (char)(length >> (8 * i));
    return 0;
}

int ps_stw_begin(ps_stw *w)
{
    PS_NEED(w);
    PS_TRY(check_state(w, DECLARING));
    int64_t data_nbytes = 0, total = 0;
    PS_TRY(lay_out(w, &data_nbytes));
    text header = { 0 };
    int rc = print_header(w, &header);
    if (rc == 0 && __builtin_add_overflow(data_nbytes, (int64_t)header.n, &total))
        rc = ps_fail(PS_EINVAL, "writing %s: all tensors together are too large", w->path);
    if (rc == 0) rc = ps_tempfile_open(&w->file, w->path);
    if (rc == 0) rc = ps_tempfile_reserve(&w->file, total);
    if (rc == 0) rc = ps_tempfile_write(&w->file, 0, header.p, (int64_t)header.n);
    if (rc < 0 || !w->sums) ps_free(header.p);
    else w->header = header;
    if (rc < 0) {
        ps_tempfile_close(&w->file);
        return rc;
    }
    w->data_start = (int64_t)header.n, w->data_nbytes = data_nbytes;
    w->state = WRITING;
    return 0;
}

/* -- the data ---------------------------------------------------------------------------------------------------- */
static int find_added(ps_stw *w, const char *name, stw_tensor **out)
{
    char shown[ST_NAME_SHOWN];
    PS_NEED(w);
    PS_NEED(name);
    PS_TRY(check_state(w, WRITING));
    stw_tensor key = { .name = (char *)(uintptr_t)name }, *wanted = &key, **found;
    found = w->count ? bsearch(&wanted, w->by_name, (size_t)w->count, sizeof wanted, name_order) : NULL;
    if (!found)
        return ps_fail(PS_EINVAL, "writing %s: tensor '%s' was not added before begin", w->path, st_shown(name, shown));
    *out = *found;
    return 0;
}

int ps_stw_write(ps_stw *w, const char *name, const void *data, int64_t nbytes)
{
    char shown[ST_NAME_SHOWN];
    stw_tensor *t = NULL;
    PS_TRY(find_added(w, name, &t));
    if (nbytes != t->nbytes || (nbytes && !data))
        return ps_fail(PS_EINVAL, "writing %s: tensor '%s' was added with %lld bytes, but %lld were passed", w->path,
                       st_shown(name, shown), (long long)t->nbytes, (long long)(data ? nbytes : 0));
    PS_TRY(ps_tempfile_write(&w->file, w->data_start + t->begin, data, nbytes));
    t->written = nbytes;
    if (w->sums) t->checksum = ps_xxh3(data, nbytes);
    return 0;
}

int ps_stw_append(ps_stw *w, const char *name, const void *data, int64_t nbytes)
{
    char shown[ST_NAME_SHOWN];
    stw_tensor *t = NULL;
    PS_TRY(find_added(w, name, &t));
    if (nbytes < 0 || nbytes > t->nbytes - t->written || (nbytes && !data))
        return ps_fail(PS_EINVAL, "writing %s: tensor '%s' has room for %lld more bytes, but %lld were passed", w->path,
                       st_shown(name, shown), (long long)(t->nbytes - t->written), (long long)(data ? nbytes : 0));
    PS_TRY(ps_tempfile_write(&w->file, w->data_start + t->begin + t->written, data, nbytes));
    if (w->sums) {
        if (!t->sum && !(t->sum = st_sum_new())) return ps_fail_nomem(sizeof *t);
        st_sum_add(t->sum, data, nbytes);
    }
    t->written += nbytes;
    if (t->sum && t->written == t->nbytes) {
        t->checksum = st_sum_end(t->sum);
        t->sum = NULL;
    }
    return 0;
}

int64_t ps_stw_nbytes(const ps_stw *w) { return w && w->state == WRITING ? w->data_nbytes : -1; }

int ps_stw_place(ps_stw *w, const char *name, int64_t *out)
{
    stw_tensor *t = NULL;
    PS_NEED(out);
    PS_TRY(find_added(w, name, &t));
    *out = t->begin;
    return 0;
}

int ps_stw_write_all(ps_stw *w, const void *data, int64_t nbytes)
{
    PS_NEED(w);
    PS_TRY(check_state(w, WRITING));
    if (nbytes != w->data_nbytes || (nbytes && !data))
        return ps_fail(PS_EINVAL, "writing %s: the tensors have %lld bytes, but %lld were passed", w->path,
                       (long long)w->data_nbytes, (long long)(data ? nbytes : 0));
    PS_TRY(ps_tempfile_stream(&w->file, w->data_start, data, nbytes));
    for (int i = 0; i < w->count; i++) {
        stw_tensor *t = &w->tensors[i];
        t->written = t->nbytes;
        if (w->sums) t->checksum = ps_xxh3((const char *)data + t->begin, t->nbytes);
    }
    return 0;
}

/* Writes the header again, now with the checksums. */
static int finish_header(ps_stw *w)
{
    uint64_t sum;
    char *digits = w->header.p + ST_SUM_AT;
    for (int i = 0; i < w->count; i++) {
        const stw_tensor *t = &w->tensors[i];
        st_sum_print(t->nbytes ? t->checksum : ps_xxh3("", 0), digits + (i + 1) * (ST_SUM_DIGITS + 1));
    }
    PS_TRY(st_sum_header(w->header.p, w->data_start, &sum));
    st_sum_print(sum, digits);
    return ps_tempfile_write(&w->file, 0, w->header.p, w->data_start);
}

int ps_stw_commit(ps_stw *w)
{
    char shown[ST_NAME_SHOWN];
    PS_NEED(w);
    PS_TRY(check_state(w, WRITING));
    for (int i = 0; i < w->count; i++)
        if (w->tensors[i].written < w->tensors[i].nbytes)
            return ps_fail(PS_ESTATE, "writing %s: tensor '%s' was added, but only %lld of its %lld bytes were written",
                           w->path, st_shown(w->tensors[i].name, shown), (long long)w->tensors[i].written,
                           (long long)w->tensors[i].nbytes);
    if (w->sums) PS_TRY(finish_header(w));
    PS_TRY(ps_tempfile_commit(&w->file));
    w->state = DONE;
    return 0;
}

void ps_stw_free(ps_stw *w)
{
    if (!w) return;
    ps_tempfile_close(&w->file);
    for (int i = 0; i < w->count; i++) ps_free(w->tensors[i].name), st_sum_free(w->tensors[i].sum);
    ps_free(w->header.p);
    for (int i = 0; i < w->meta_count; i++) ps_free(w->meta[i].key), ps_free(w->meta[i].value);
    ps_free(w->tensors);
    ps_free(w->by_name);
    ps_free(w->meta);
    ps_free(w->path);
    ps_free(w);
}
