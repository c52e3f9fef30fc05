/* SPDX-License-Identifier: BSD-3-Clause
 * Writes GGUF. The caller first declares the tensors, in the order of the file. ps_ggufw_begin() determines the
 * positions of the data, reserves the space, and writes the header with the metadata that the caller has encoded. Then
 * the caller appends each tensor in pieces, with the rows in Hugging Face's order. Threads convert and write the pieces
 * while the caller reads the next pieces. A transposed matrix is kept in memory until all its values are appended.
 * Other tensors are not kept in memory. The file gets its name at commit, when it is complete and on the disk. */
#include "io/gguf.h"
#include "base/alloc.h"
#include "base/half.h"
#include "base/thread.h"
#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <string.h>

/* RUN: maximum number of values of a piece. SLICE: number of values that are converted at once. RUN and SLICE are
 * multiples of all block sizes. */
enum { RUN = 1 << 20, SLICE = 1 << 12 };
enum { MAX_THREADS = 16, MAX_PIECES = 2 * MAX_THREADS };
static const float LARGEST = 65504.0f * 7;     /* if a block has a value above this, its scale may not fit into fp16 */

typedef struct ggufw_tensor {
    gguf_tensor t;              /* begin: offset in the file, set by ps_ggufw_begin */
    int64_t numel, done;        /* numel: number of values; done: number of values that were appended */
    float *whole;               /* for a transposed tensor: the appended values, until all values are appended */
} ggufw_tensor;

typedef struct piece {
    const ggufw_tensor *one;
    int dtype;
    int64_t at, n;              /* the piece contains values [at, at + n) of the tensor */
    int64_t serial;             /* index of the piece in the order in which all pieces were queued */
    uint8_t *data;              /* [RUN * 8 bytes] n values of type `dtype` */
} piece;

struct ps_ggufw {
    enum { DECLARING, WRITING, DONE } state;
    char *path;
    ps_tempfile file;
    ggufw_tensor *tensors;
    int count;
    /* The threads are started when the first piece is queued. Each thread repeatedly removes the oldest piece from
     * `queue`, converts and writes the piece, and puts it into `spare`. */
    pthread_t threads[MAX_THREADS];
    piece pieces[MAX_PIECES];
    int n_threads, n_pieces;
    int64_t next_serial;
    pthread_mutex_t lock;           /* must be held to access the fields below */
    pthread_cond_t queued, returned;
    piece *queue[MAX_PIECES], *spare[MAX_PIECES];
    int n_queue, n_spare;
    int64_t failed;                 /* serial of the earliest piece that failed, or INT64_MAX */
    ps_error_kept error;            /* error of the piece `failed` */
    bool quit;
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
    w->failed = INT64_MAX;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->queued, NULL);
    pthread_cond_init(&w->returned, NULL);
    if ((w->path = ps_strdup(path))) {
        *out = w;
        return 0;
    }
    ps_ggufw_free(w);
    return ps_fail_nomem(strlen(path) + 1);
}

void ps_ggufw_free(ps_ggufw *w)
{
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->quit = true;
    pthread_cond_broadcast(&w->queued);
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < w->n_threads; i++) pthread_join(w->threads[i], NULL);
    for (int i = 0; i < w->n_pieces; i++) ps_free(w->pieces[i].data);
    pthread_cond_destroy(&w->returned);
    pthread_cond_destroy(&w->queued);
    pthread_mutex_destroy(&w->lock);
    ps_tempfile_close(&w->file);
    for (int i = 0; i < w->count; i++) ps_free(w->tensors[i].t.name), ps_free(w->tensors[i].whole);
    ps_free(w->tensors);
    ps_free(w->path);
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

static bool is_float(int dtype) { return dtype == PS_F32 || dtype == PS_F64 || dtype == PS_BF16 || dtype == PS_F16; }

/* Converts n values to fp32. is_float(dtype) must be true. */
static void to_floats(int dtype, const uint8_t *from, int64_t n, float *to)
{
    uint16_t half;
    double wide;
    if (dtype == PS_F32) memcpy(to, from, (size_t)n * 4);
    else if (dtype == PS_F64)
        for (int64_t i = 0; i < n; i++) memcpy(&wide, from + 8 * i, 8), to[i] = (float)wide;
    else if (dtype == PS_BF16)
        for (int64_t i = 0; i < n; i++) memcpy(&half, from + 2 * i, 2), to[i] = ps_bf16_to_f32(half);
    else
        for (int64_t i = 0; i < n; i++) memcpy(&half, from + 2 * i, 2), to[i] = ps_f16_to_f32(half);
}

static uint32_t magnitude(float f) { return ps_f32_bits(f) & 0x7fffffff; }

/* Returns the index of the first value that the tensor's type cannot represent, or n if it can represent all values. A
 * block type cannot represent infinity, NaN, or magnitudes above LARGEST. F16 cannot represent finite values that would
 * round to infinity. The values are compared as integers with the same bits, because these integers have the same order
 * as the magnitudes. */
static int64_t first_bad(const ggufw_tensor *one, const float *x, int64_t n)
{
    bool packs = one->t.type->block > 1;
    uint32_t low = magnitude(packs ? LARGEST : 65520.0f) + packs, high = packs ? 0x7fffffff : 0x7f7fffff;
    int bad = 0;
    if (!packs && one->t.type->dtype != PS_F16) return n;
    for (int64_t i = 0; i < n; i++) bad |= magnitude(x[i]) - low <= high - low;
    for (int64_t i = 0; bad && i < n; i++) if (magnitude(x[i]) - low <= high - low) return i;
    return n;
}

/* Converts n values to the tensor's type and writes them to `out`. */
static void encode(const ggufw_tensor *one, const float *x, int64_t n, uint8_t *out)
{
    const gguf_type *type = one->t.type;
    gguf_pack pack = gguf_pack_of(one->t.number);
    if (pack) for (int64_t i = 0; i < n; i += type->block, out += type->bytes) pack(x + i, out);
    else if (type->dtype == PS_F32) memcpy(out, x, (size_t)n * 4);
    for (int64_t i = 0; i < n && !pack && type->dtype != PS_F32; i++, out += type->bytes) {
        uint16_t half = type->dtype == PS_BF16 ? ps_f32_to_bf16(x[i]) : ps_f32_to_f16(x[i]);
        double wide = x[i];
        memcpy(out, type->bytes == 2 ? (void *)&half : (void *)&wide, (size_t)type->bytes);
    }
}

/* Returns the number of values in a row. The values of a row are adjacent in the file. If a bias is divided into heads,
 * each value of the bias is a row. */
static int64_t row_of(const gguf_tensor *t)
{
    return t->ndim && !(t->heads && t->ndim == 1) ? t->shape[t->ndim - 1] : 1;
}

/* Converts a piece to `out` [RUN * 8 bytes] and writes the result to the file. If the tensor has heads, the rows of the
 * piece are in Hugging Face's order, and are written in the order of the file. */
static int write_piece(ps_ggufw *w, const piece *p, uint8_t *out)
{
    const gguf_tensor *t = &p->one->t;
    char shown[GGUF_NAME_SHOWN];
    int64_t row = row_of(t), each = (int64_t)ps_dtype_size(p->dtype);
    for (int64_t i = 0; i < p->n; i += SLICE) {
        float x[SLICE];
        int64_t m = p->n - i < SLICE ? p->n - i : SLICE;
        to_floats(p->dtype, p->data + i * each, m, x);
        int64_t bad = first_bad(p->one, x, m), at = p->at + i + bad;
        if (bad < m)
            return ps_fail(PS_ERANGE, "%s: tensor '%s' has the value %g (row %lld, column %lld), which %s cannot hold; "
                           "write the file as bf16 or f32", w->path, gguf_shown(t->name, shown), (double)x[bad],
                           (long long)(at / row), (long long)(at % row), t->type->name);
        encode(p->one, x, m, out + i / t->type->block * t->type->bytes);
    }
    for (int64_t i = 0, run; i < p->n; i += run) {
        int64_t to = p->at + i;
        run = p->n - i;
        if (t->heads) {
            if (run > row - to % row) run = row - to % row;
            to = gguf_stored_row(t, to / row) * row + to % row;
        }
        PS_TRY(ps_tempfile_write(&w->file, t->begin + to / t->type->block * t->type->bytes,
                                 out + i / t->type->block * t->type->bytes,
                                 run / t->type->block * t->type->bytes));
    }
    return 0;
}

/* -- threads ------------------------------------------------------------------------------------------------------ */
static void *work(void *arg)
{
    ps_ggufw *w = arg;
    uint8_t *out = ps_alloc(RUN * 8);
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->n_queue && !w->quit) pthread_cond_wait(&w->queued, &w->lock);
        if (w->quit) break;
        piece *p = w->queue[0];
        memmove(w->queue, w->queue + 1, (size_t)--w->n_queue * sizeof *w->queue);
        if (w->failed == INT64_MAX) {
            pthread_mutex_unlock(&w->lock);
            int rc = out ? write_piece(w, p, out) : ps_fail_nomem(RUN * 8);
            pthread_mutex_lock(&w->lock);
            if (rc < 0 && p->serial < w->failed) {
                w->failed = p->serial;
                ps_error_keep(&w->error);
            }
        }
        w->spare[w->n_spare++] = p;
        pthread_cond_signal(&w->returned);
    }
    pthread_mutex_unlock(&w->lock);
    ps_free(out);
    return NULL;
}

/* Starts as many threads as OpenMP would use, but at most one thread for each RUN values of the file. Allocates two
 * pieces per thread, so that the caller can fill one piece while the thread writes the other piece. */
static int start_threads(ps_ggufw *w)
{
    int64_t runs = 1;
    int wanted = omp_get_max_threads(), err = 0;
    for (int i = 0; i < w->count; i++) runs += w->tensors[i].numel / RUN;
    if (wanted > MAX_THREADS) wanted = MAX_THREADS;
    if (wanted > runs) wanted = (int)runs;
    while (w->n_pieces < 2 * wanted) {
        piece *p = &w->pieces[w->n_pieces];
        if (!(p->data = ps_alloc(RUN * 8))) return ps_fail_nomem(RUN * 8);
        w->spare[w->n_spare++] = p;
        w->n_pieces++;
    }
    while (w->n_threads < wanted && (err = ps_thread_start(&w->threads[w->n_threads], work, w)) == 0) w->n_threads++;
    if (w->n_threads > 0) return 0;
    return ps_fail(PS_ENOMEM, "%s: cannot start a thread to write: %s", w->path, strerror(err));
}

/* Waits until all pieces are written. Returns the error of the earliest piece that failed, or 0. */
static int settle(ps_ggufw *w)
{
    pthread_mutex_lock(&w->lock);
    while (w->n_spare < w->n_pieces) pthread_cond_wait(&w->returned, &w->lock);
    pthread_mutex_unlock(&w->lock);
    return w->failed == INT64_MAX ? 0 : ps_error_again(&w->error);
}

/* Queues values [at, at + n) of a tensor for the threads. n must be at most RUN. */
static int put_values(ps_ggufw *w, const ggufw_tensor *one, int dtype, const uint8_t *from, int64_t at, int64_t n)
{
    if (w->n_threads == 0) PS_TRY(start_threads(w));
    pthread_mutex_lock(&w->lock);
    while (w->n_spare == 0) pthread_cond_wait(&w->returned, &w->lock);
    bool failed = w->failed < INT64_MAX;
    piece *p = failed ? NULL : w->spare[--w->n_spare];
    pthread_mutex_unlock(&w->lock);
    if (failed) return settle(w);
    p->one = one, p->dtype = dtype, p->at = at, p->n = n, p->serial = w->next_serial++;
    memcpy(p->data, from, (size_t)n * ps_dtype_size(dtype));
    pthread_mutex_lock(&w->lock);
    w->queue[w->n_queue++] = p;
    pthread_cond_signal(&w->queued);
    pthread_mutex_unlock(&w->lock);
    return 0;
}

/* Writes a transposed matrix after all its values have been appended. Copies several rows at once, because values of
 * adjacent rows are adjacent in `whole`. */
static int write_swapped(ps_ggufw *w, ggufw_tensor *one)
{
    int64_t rows = one->t.shape[0], row = one->t.shape[1], group = row < RUN ? RUN / row : 1;
    float *run = ps_alloc(RUN * sizeof *run);
    int rc = run ? 0 : ps_fail_nomem(RUN * sizeof *run);
    for (int64_t r = 0; rc == 0 && r < rows; r += group)
        for (int64_t c = 0; rc == 0 && c < row; c += RUN) {
            int64_t m = rows - r < group ? rows - r : group, n = row - c < RUN ? row - c : RUN;
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < m; j++) run[j * n + i] = one->whole[(c + i) * rows + r + j];
            rc = put_values(w, one, PS_F32, (uint8_t *)run, r * row + c, m * n);
        }
    ps_free(run);
    ps_free(one->whole);
    one->whole = NULL;
    if (rc < 0) one->done = 0;
    return rc;
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
    if (!is_float(dtype))
        return ps_fail(PS_EUNSUP, "%s: values of dtype %s cannot be written, because they are not floats", w->path,
                       ps_dtype_name(dtype));
    const uint8_t *from = data;
    int64_t each = (int64_t)ps_dtype_size(dtype);
    for (int64_t i = 0; i < numel; i += RUN) {
        int64_t n = numel - i < RUN ? numel - i : RUN;
        if (one->whole) to_floats(dtype, from + i * each, n, one->whole + one->done);
        else PS_TRY(put_values(w, one, dtype, from + i * each, one->done, n));
        one->done += n;
    }
    return one->whole && one->done == one->numel ? write_swapped(w, one) : 0;
}

int ps_ggufw_commit(ps_ggufw *w)
{
    char shown[GGUF_NAME_SHOWN];
    PS_TRY(in_state(w, WRITING, "commit"));
    PS_TRY(settle(w));
    for (int i = 0; i < w->count; i++)
        if (w->tensors[i].done < w->tensors[i].numel)
            return ps_fail(PS_ESTATE, "%s: tensor '%s' got only %lld of its %lld values", w->path,
                           gguf_shown(w->tensors[i].t.name, shown), (long long)w->tensors[i].done,
                           (long long)w->tensors[i].numel);
    PS_TRY(ps_tempfile_commit(&w->file));
    w->state = DONE;
    return 0;
}
