/* SPDX-License-Identifier: BSD-3-Clause
 * Writing GGUF. Tensors are declared first, in the order of the file. `begin` lays out the data, reserves the space
 * and writes the header, with the metadata that the caller has encoded. Each tensor is then appended in pieces, in
 * the order of Hugging Face's rows, and converted. Only a transposed matrix is kept in memory until it is complete.
 * The file gets its name at commit, when it is complete and on its disk. */
#include "io/gguf.h"
#include "base/alloc.h"
#include "base/half.h"
#include <math.h>
#include <string.h>

enum { RUN = 1 << 16 };         /* number of values converted at once, a multiple of every block size */
static const float LARGEST = 65504.0f * 7;     /* the scale of a block with larger values may not fit into fp16 */

typedef struct ggufw_tensor {
    gguf_tensor t;              /* begin: offset in the file, once the data is laid out */
    int64_t numel, done;        /* values */
    float *whole;               /* for a transposed tensor: its values until all have been appended */
} ggufw_tensor;

struct ps_ggufw {
    enum { DECLARING, WRITING, DONE } state;
    char *path;
    ps_tempfile file;
    ggufw_tensor *tensors;
    int count;
    float *run;                 /* [RUN] */
    uint8_t *out;               /* [RUN * 8] */
};

static int in_state(const ps_ggufw *w, int state, const char *what)
{
    PS_NEED(w);
    if ((int)w->state == state) return 0;
    return ps_fail(PS_ESTATE, "%s: a GGUF writer: %s is called in the wrong order (new, add, begin, append, commit)",
                   w->path, what);
}

int ps_ggufw_new(const char *path, ps_ggufw **out)
{
    PS_NEED(path);
    PS_NEED(out);
    ps_ggufw *w = ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->file = PS_TEMPFILE_NONE;
    w->path = ps_strdup(path), w->run = ps_alloc(RUN * sizeof *w->run), w->out = ps_alloc(RUN * 8);
    if (w->path && w->run && w->out) {
        *out = w;
        return 0;
    }
    ps_ggufw_free(w);
    return ps_fail_nomem(RUN * 12);
}

void ps_ggufw_free(ps_ggufw *w)
{
    if (!w) return;
    ps_tempfile_close(&w->file);
    for (int i = 0; i < w->count; i++) ps_free(w->tensors[i].t.name), ps_free(w->tensors[i].whole);
    ps_free(w->tensors);
    ps_free(w->path);
    ps_free(w->run);
    ps_free(w->out);
    ps_free(w);
}

int ps_ggufw_add(ps_ggufw *w, const char *name, const char *type, int ndim, const int64_t *shape, int64_t heads,
                 int transposed)
{
    char shown[GGUF_NAME_SHOWN];
    PS_TRY(in_state(w, DECLARING, "add"));
    PS_NEED(name);
    PS_NEED(type);
    int number = gguf_type_by_name(type);
    ggufw_tensor one = { .t = { .number = number, .ndim = ndim, .heads = heads, .transposed = transposed != 0 },
                         .numel = 1 };
    gguf_shown(name, shown);
    if (number < 0 || (gguf_type_of(number)->block > 1 && !gguf_pack_of(number)) || gguf_type_of(number)->dtype < 0)
        return ps_fail(PS_EUNSUP, "%s: tensor '%s': type %s cannot be written", w->path, shown, type);
    one.t.type = gguf_type_of(number);
    if (ndim < 0 || ndim > GGUF_MAX_DIMS || (transposed && ndim != 2))
        return ps_fail(PS_EINVAL, "%s: tensor '%s' has %d dimensions, but the format allows only %d", w->path, shown,
                       ndim, GGUF_MAX_DIMS);
    for (int d = 0; d < ndim; d++) {
        one.t.shape[transposed ? ndim - 1 - d : d] = shape[d];
        if (shape[d] < 0 || __builtin_mul_overflow(one.numel, shape[d], &one.numel))
            return ps_fail(PS_EINVAL, "%s: tensor '%s' is too large", w->path, shown);
    }
    int64_t row = ndim ? one.t.shape[ndim - 1] : 1;
    if (row % one.t.type->block)
        return ps_fail(PS_EINVAL, "%s: tensor '%s' has rows of %lld values, but %s has blocks of %d", w->path, shown,
                       (long long)row, type, one.t.type->block);
    bool fits = ndim >= 1 && heads && one.t.shape[0] % heads == 0 && one.t.shape[0] / heads % 2 == 0;
    if (heads && (!fits || (ndim == 1 && one.t.type->block > 1)))
        return ps_fail(PS_EINVAL, "%s: tensor '%s' cannot be divided into %lld heads with an even number of rows",
                       w->path, shown, (long long)heads);
    one.t.nbytes = one.numel / one.t.type->block * one.t.type->bytes;
    for (int i = 0; i < w->count; i++)
        if (!strcmp(w->tensors[i].t.name, name))
            return ps_fail(PS_EINVAL, "%s: tensor '%s' is declared twice", w->path, shown);
    ggufw_tensor *list = ps_realloc(w->tensors, (size_t)(w->count + 1) * sizeof *list);
    if (!list) return ps_fail_nomem((size_t)(w->count + 1) * sizeof *list);
    w->tensors = list;
    if (!(one.t.name = ps_strdup(name))) return ps_fail_nomem(strlen(name) + 1);
    w->tensors[w->count++] = one;
    return 0;
}

static uint8_t *put(uint8_t *at, const void *from, size_t n)
{
    memcpy(at, from, n);
    return at + n;
}

static uint8_t *put_u64(uint8_t *at, uint64_t value) { return put(at, &value, 8); }
static uint8_t *put_u32(uint8_t *at, uint32_t value) { return put(at, &value, 4); }

static int64_t padded(int64_t n) { return (n + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT * GGUF_ALIGNMENT; }

int ps_ggufw_begin(ps_ggufw *w, const void *meta, int64_t nbytes, int64_t entries)
{
    PS_TRY(in_state(w, DECLARING, "begin"));
    if (nbytes) PS_NEED(meta);
    int64_t head = 24 + nbytes, data = 0;
    for (int i = 0; i < w->count; i++) {
        gguf_tensor *t = &w->tensors[i].t;
        head += 8 + (int64_t)strlen(t->name) + 4 + 8 * t->ndim + 12;
    }
    uint8_t *bytes = ps_alloc0((size_t)padded(head)), *at = bytes;
    if (!bytes) return ps_fail_nomem((size_t)padded(head));
    at = put_u32(put(at, "GGUF", 4), 3);
    at = put_u64(put_u64(at, (uint64_t)w->count), (uint64_t)entries);
    if (nbytes) at = put(at, meta, (size_t)nbytes);
    for (int i = 0; i < w->count; i++) {
        gguf_tensor *t = &w->tensors[i].t;
        at = put_u64(at, strlen(t->name));
        at = put_u32(put(at, t->name, strlen(t->name)), (uint32_t)t->ndim);
        for (int d = t->ndim - 1; d >= 0; d--) at = put_u64(at, (uint64_t)t->shape[d]);
        at = put_u64(put_u32(at, (uint32_t)t->number), (uint64_t)data);
        t->begin = padded(head) + data;
        data += padded(t->nbytes);
    }
    int rc = ps_tempfile_open(&w->file, w->path);
    if (!rc) rc = ps_tempfile_reserve(&w->file, padded(head) + data);
    if (!rc) rc = ps_tempfile_write(&w->file, 0, bytes, w->count ? padded(head) : head);
    ps_free(bytes);
    if (!rc) w->state = WRITING;
    return rc;
}

/* Converts n values of a dtype to fp32. */
static int to_floats(const ps_ggufw *w, int dtype, const uint8_t *from, int64_t n, float *to)
{
    if (dtype == PS_F32) memcpy(to, from, (size_t)n * 4);
    for (int64_t i = 0; i < n && dtype != PS_F32; i++) {
        uint16_t half;
        double wide;
        if (dtype == PS_F64) memcpy(&wide, from + 8 * i, 8), to[i] = (float)wide;
        else {
            memcpy(&half, from + 2 * i, 2);
            to[i] = dtype == PS_BF16 ? ps_bf16_to_f32(half) : ps_f16_to_f32(half);
        }
    }
    if (dtype == PS_F32 || dtype == PS_F64 || dtype == PS_BF16 || dtype == PS_F16) return 0;
    return ps_fail(PS_EUNSUP, "%s: values of dtype %s cannot be written, because they are not floats", w->path,
                   ps_dtype_name(dtype));
}

static int bad_value(const ps_ggufw *w, const ggufw_tensor *one, float value, int64_t row, int64_t col)
{
    char shown[GGUF_NAME_SHOWN];
    return ps_fail(PS_ERANGE, "%s: tensor '%s' has the value %g (row %lld, column %lld), which %s cannot hold; write "
                   "the file as bf16 or f32", w->path, gguf_shown(one->t.name, shown), (double)value, (long long)row,
                   (long long)col, one->t.type->name);
}

/* Converts n values of one stored row, from column `col` on, and writes them to w->out. Returns the number of bytes
 * written there, or an error. */
static int64_t convert(ps_ggufw *w, const ggufw_tensor *one, const float *x, int64_t n, int64_t row, int64_t col)
{
    const gguf_type *type = one->t.type;
    gguf_pack pack = gguf_pack_of(one->t.number);
    uint8_t *out = w->out;
    for (int64_t i = 0; i < n; i++) {
        bool fits = !pack || fabsf(x[i]) <= LARGEST;
        if (type->dtype == PS_F16) fits = !isfinite(x[i]) || isfinite(ps_f16_to_f32(ps_f32_to_f16(x[i])));
        if (!fits) return bad_value(w, one, x[i], row, col + i);
    }
    if (pack) for (int64_t i = 0; i < n; i += type->block, out += type->bytes) pack(x + i, out);
    for (int64_t i = 0; i < n && !pack; i++, out += type->bytes) {
        uint16_t half = type->dtype == PS_BF16 ? ps_f32_to_bf16(x[i]) : ps_f32_to_f16(x[i]);
        double wide = x[i];
        memcpy(out, type->bytes == 2 ? (void *)&half : type->bytes == 8 ? (void *)&wide : (void *)&x[i],
            (size_t)type->bytes);
    }
    return out - w->out;
}

/* Writes n values of the tensor, from value `from` on. They are in the order of the file's rows or, if the tensor
 * has heads, of Hugging Face's rows. With heads, each row is written separately. */
static int write_values(ps_ggufw *w, ggufw_tensor *one, const float *x, int64_t from, int64_t n)
{
    gguf_tensor *t = &one->t;
    int64_t row = t->ndim && !(t->heads && t->ndim == 1) ? t->shape[t->ndim - 1] : 1, wide = one->numel;
    if (t->heads) wide = row;
    for (int64_t i = 0; i < n;) {
        int64_t at = from + i, run = wide - at % wide, r = at / row;
        if (run > n - i) run = n - i;
        if (run > RUN) run = RUN;
        if (t->heads) at = gguf_stored_row(t, r) * row + at % row;
        int64_t nbytes = convert(w, one, x + i, run, r, (from + i) % row);
        if (nbytes < 0) return (int)nbytes;
        PS_TRY(ps_tempfile_write(&w->file, t->begin + at / t->type->block * t->type->bytes, w->out, nbytes));
        i += run;
    }
    return 0;
}

/* Writes a matrix with swapped dimensions when all its values have been appended. */
static int write_swapped(ps_ggufw *w, ggufw_tensor *one)
{
    int64_t rows = one->t.shape[0], row = one->t.shape[1];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < row; c += RUN) {
            int64_t n = row - c < RUN ? row - c : RUN;
            for (int64_t i = 0; i < n; i++) w->run[i] = one->whole[(c + i) * rows + r];
            PS_TRY(write_values(w, one, w->run, r * row + c, n));
        }
    ps_free(one->whole);
    one->whole = NULL;
    return 0;
}

int ps_ggufw_append(ps_ggufw *w, const char *name, int dtype, const void *data, int64_t numel)
{
    char shown[GGUF_NAME_SHOWN];
    ggufw_tensor *one = NULL;
    PS_TRY(in_state(w, WRITING, "append"));
    PS_NEED(name);
    for (int i = 0; i < w->count && !one; i++) if (!strcmp(w->tensors[i].t.name, name)) one = &w->tensors[i];
    gguf_shown(name, shown);
    if (!one) return ps_fail(PS_EINVAL, "%s: tensor '%s' was not declared", w->path, shown);
    if (numel < 0 || numel > one->numel - one->done || (numel % one->t.type->block && !one->t.transposed))
        return ps_fail(PS_EINVAL, "%s: tensor '%s' needs %lld more values, but %lld were appended; append whole "
                       "blocks, and not more values", w->path, shown, (long long)(one->numel - one->done),
                       (long long)numel);
    if (numel) PS_NEED(data);
    if (one->t.transposed && !one->whole && one->numel) {
        if (!(one->whole = ps_alloc((size_t)one->numel * sizeof *one->whole)))
            return ps_fail_nomem((size_t)one->numel * sizeof *one->whole);
    }
    const uint8_t *from = data;
    int64_t each = (int64_t)ps_dtype_size(dtype);
    for (int64_t i = 0; i < numel; i += RUN) {
        int64_t n = numel - i < RUN ? numel - i : RUN;
        float *to = one->whole ? one->whole + one->done : w->run;
        PS_TRY(to_floats(w, dtype, from + i * each, n, to));
        if (!one->whole) PS_TRY(write_values(w, one, w->run, one->done, n));
        one->done += n;
    }
    return one->whole && one->done == one->numel ? write_swapped(w, one) : 0;
}

int ps_ggufw_commit(ps_ggufw *w)
{
    char shown[GGUF_NAME_SHOWN];
    PS_TRY(in_state(w, WRITING, "commit"));
    for (int i = 0; i < w->count; i++)
        if (w->tensors[i].done < w->tensors[i].numel)
            return ps_fail(PS_ESTATE, "%s: tensor '%s' got only %lld of its %lld values", w->path,
                           gguf_shown(w->tensors[i].t.name, shown), (long long)w->tensors[i].done,
                           (long long)w->tensors[i].numel);
    PS_TRY(ps_tempfile_commit(&w->file));
    w->state = DONE;
    return 0;
}
