/* SPDX-License-Identifier: BSD-3-Clause
 * Writes PyTorch's .pt files for torch.load(weights_only=True). PyTorch 1.13 can read a file only if it contains no
 * floats. The caller first declares the storages and the value. A container is declared before its items. `begin`
 * computes the size of the whole file and reserves the space. After `begin` the caller passes the bytes of each storage
 * in pieces. The writer keeps data.pkl in memory (some hundred bytes per tensor), but not the bytes of the tensors. The
 * file gets its name at commit, when it is complete and on the disk. */
#include "io/torch_pt.h"
#include "base/alloc.h"
#include "base/grow.h"
#include "base/text.h"
#include "io/safetensors.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An open container. left: number of missing items. number: the container's index in the memo. */
typedef struct frame { int32_t kind, left, number; } frame;
typedef struct ptw_storage { int32_t dtype; int entry; int64_t numel; } ptw_storage;
/* The words that all tensors use. The first use of a word writes the word. Later uses write its index in the memo. */
enum { W_STORAGE, W_CPU, W_REBUILD, W_ORDERED_DICT, W_TYPES, N_WORDS = W_TYPES + PS_DTYPE_COUNT };

struct ps_ptw {
    enum { DECLARING, WRITING, DONE } state;
    bool has_root;
    char *path, *note;
    zipw archive;
    uint8_t *pickle;
    int64_t n, room;
    frame open[PK_MAX_DEPTH];
    int depth;
    int words[N_WORDS];         /* a word's index in the memo plus 1, or 0 if the word was not written yet */
    int memo;                   /* number of memo entries in use, for words and containers */
    ptw_storage *storages;
    int count, storages_room;
};

/* -- the pickle -------------------------------------------------------------------------------------------------- */
static int put(ps_ptw *w, const void *bytes, int64_t n)
{
    if (n > PK_MAX_NBYTES - w->n)
        return ps_fail(PS_EINVAL, "writing %s: the values other than tensors take more than %d bytes; keep long lists "
                       "of numbers in tensors", w->path, PK_MAX_NBYTES);
    PS_TRY(ps_grow(w->pickle, w->room, w->n + n));
    memcpy(w->pickle + w->n, bytes, (size_t)n);
    w->n += n;
    return 0;
}

static int put_op(ps_ptw *w, char op) { return put(w, &op, 1); }

static int put_number(ps_ptw *w, char op, uint64_t v, int nbytes)
{
    uint8_t bytes[9] = { (uint8_t)op };
    for (int i = 0; i < nbytes; i++) bytes[1 + i] = (uint8_t)(v >> (8 * i));
    return put(w, bytes, 1 + nbytes);
}

static int put_int(ps_ptw *w, int64_t v)
{
    if (v >= 0 && v < 256) return put_number(w, 'K', (uint64_t)v, 1);
    if (v >= 0 && v < 65536) return put_number(w, 'M', (uint64_t)v, 2);
    if (v >= INT32_MIN && v <= INT32_MAX) return put_number(w, 'J', (uint32_t)v, 4);
    PS_TRY(put(w, "\x8a\x08", 2));
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)((uint64_t)v >> (8 * i));
    return put(w, bytes, 8);
}

static int put_double(ps_ptw *w, double v)
{
    uint8_t bytes[9] = { 'G' };
    uint64_t bits;
    memcpy(&bits, &v, 8);
    for (int i = 0; i < 8; i++) bytes[1 + i] = (uint8_t)(bits >> (56 - 8 * i));
    return put(w, bytes, 9);
}

static int put_text(ps_ptw *w, const char *text, int64_t n)
{
    if (n > PK_MAX_NBYTES)
        return ps_fail(PS_EINVAL, "writing %s: a string of %lld bytes is too long", w->path, (long long)n);
    PS_TRY(put_number(w, 'X', (uint64_t)n, 4));
    return put(w, text, n);
}

/* If `takes` is true, stores the last written value in memo entry i (opcodes q and r). Otherwise writes the value of
 * memo entry i again (opcodes h and j). */
static int put_memo(ps_ptw *w, bool takes, int i)
{
    return i < 256 ? put_number(w, takes ? 'q' : 'h', (uint64_t)i, 1)
                   : put_number(w, takes ? 'r' : 'j', (uint64_t)i, 4);
}

/* Writes word i. If the word was written before, writes only its index in the memo. */
static int put_word(ps_ptw *w, int i)
{
    if (w->words[i]) return put_memo(w, false, w->words[i] - 1);
    char global[64];
    if (i == W_STORAGE) PS_TRY(put_text(w, "storage", 7));
    else if (i == W_CPU) PS_TRY(put_text(w, "cpu", 3));
    else {
        snprintf(global, sizeof global, i == W_REBUILD ? "ctorch._utils\n_rebuild_tensor_v2\n" :
                 i == W_ORDERED_DICT ? "ccollections\nOrderedDict\n" : "ctorch\n%s\n",
                 i >= W_TYPES ? pt_type_by_dtype(i - W_TYPES)->storage + strlen("torch.") : "");
        PS_TRY(put(w, global, (int64_t)strlen(global)));
    }
    w->words[i] = ++w->memo;
    return put_memo(w, true, w->memo - 1);
}

/* Writes a byte string as a text of characters below 256. Readers convert the text back to bytes. */
static int put_bytes(ps_ptw *w, const uint8_t *bytes, int64_t n)
{
    int64_t length = n;
    for (int64_t i = 0; i < n; i++) length += bytes[i] >= 0x80;
    if (length > PK_MAX_NBYTES)
        return ps_fail(PS_EINVAL, "writing %s: a string of %lld bytes is too long", w->path, (long long)n);
    PS_TRY(put(w, "c_codecs\nencode\n", 16));
    PS_TRY(put_number(w, 'X', (uint64_t)length, 4));
    for (int64_t i = 0; i < n; i++) {
        uint8_t two[] = { 0xc0 | bytes[i] >> 6, 0x80 | (bytes[i] & 0x3f) };
        PS_TRY(bytes[i] < 0x80 ? put(w, &bytes[i], 1) : put(w, two, 2));
    }
    PS_TRY(put_text(w, "latin1", 6));
    return put(w, "\x86R", 2);
}

/* -- declaring --------------------------------------------------------------------------------------------------- */
int ps_ptw_new(const char *path, ps_ptw **out)
{
    PS_NEED(path);
    PS_NEED(out);
    ps_ptw *w = ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    zipw_init(&w->archive);
    int rc = (w->path = ps_strdup(path)) ? put(w, "\x80\2", 2) : ps_fail_nomem(strlen(path) + 1);
    if (rc < 0) ps_ptw_free(w);
    else *out = w;
    return rc;
}

static int check_state(const ps_ptw *w, int wanted)
{
    static const char *const names[] = { "declaring (before begin)", "writing (after begin)", "finished (committed)" };
    if ((int)w->state == wanted) return 0;
    return ps_fail(PS_ESTATE, "writing %s: this call belongs to %s, but the writer is %s", w->path, names[wanted],
                   names[w->state]);
}

int ps_ptw_storage(ps_ptw *w, int dtype, int64_t numel)
{
    PS_NEED(w);
    PS_TRY(check_state(w, DECLARING));
    const pt_type *type = pt_type_by_dtype(dtype);
    int64_t nbytes;
    if (!type) return ps_fail(PS_EINVAL, "writing %s: dtype %d does not exist", w->path, dtype);
    if (numel < 0 || __builtin_mul_overflow(numel, type->nbytes, &nbytes))
        return ps_fail(PS_EINVAL, "writing %s: a storage cannot have %lld elements", w->path, (long long)numel);
    PS_TRY(ps_grow(w->storages, w->storages_room, w->count + 1));
    w->storages[w->count] = (ptw_storage){ .dtype = dtype, .numel = numel };
    return w->count++;
}

/* Begins a value. Returns an error if no value may follow, or if the value must be a key and may_be_key is false. */
static int begin_value(ps_ptw *w, bool may_be_key)
{
    PS_TRY(check_state(w, DECLARING));
    if (!w->depth) {
        if (w->has_root) return ps_fail(PS_EINVAL, "writing %s: the value is complete, but another one was "
                                                   "passed", w->path);
        w->has_root = true;
        return 0;
    }
    frame *f = &w->open[w->depth - 1];
    if (f->kind == PS_PT_DICT && f->left % 2 == 0 && !may_be_key)
        return ps_fail(PS_EINVAL, "writing %s: a dict's key must be a string or a number", w->path);
    return 0;
}

/* Ends a value, and counts the value as an item of its container. Closes all containers that are complete. */
static int end_value(ps_ptw *w)
{
    while (w->depth) {
        frame *f = &w->open[w->depth - 1];
        if (--f->left > 0) return 0;
        w->depth--;
        PS_TRY(put_op(w, f->kind == PS_PT_LIST ? 'e' : f->kind == PS_PT_DICT ? 'u' : 't'));
        if (f->kind == PS_PT_TUPLE) PS_TRY(put_memo(w, true, f->number));
    }
    return 0;
}

static int open_container(ps_ptw *w, const ps_pt_value *v)
{
    bool dict = v->kind == PS_PT_DICT;
    if (v->count < 0 || (dict && v->count % 2))
        return ps_fail(PS_EINVAL, "writing %s: a container cannot have %d items", w->path, v->count);
    if (w->depth == PK_MAX_DEPTH)
        return ps_fail(PS_EINVAL, "writing %s: values are nested more than %d deep", w->path, PK_MAX_DEPTH);
    int number = w->memo++;
    bool whole = v->kind != PS_PT_TUPLE || !v->count;       /* true if the container exists before its items */
    if (whole) {
        PS_TRY(put_op(w, dict ? '}' : v->kind == PS_PT_TUPLE ? ')' : ']'));
        PS_TRY(put_memo(w, true, number));
    }
    if (v->count) {
        w->open[w->depth++] = (frame){ v->kind, v->count, number };
        PS_TRY(put_op(w, '('));
    } else {
        PS_TRY(end_value(w));
    }
    return number;
}

int ps_ptw_again(ps_ptw *w, int container)
{
    PS_NEED(w);
    bool wrong = container < 0 || container >= w->memo;
    for (int i = 0; i < w->depth; i++) wrong = wrong || w->open[i].number == container;
    for (int i = 0; i < N_WORDS; i++) wrong = wrong || w->words[i] == container + 1;
    if (wrong)
        return ps_fail(PS_EINVAL, "writing %s: there is no complete container %d", w->path, container);
    PS_TRY(begin_value(w, false));
    PS_TRY(put_memo(w, false, container));
    return end_value(w);
}

int ps_ptw_put(ps_ptw *w, const ps_pt_value *v)
{
    PS_NEED(w);
    PS_NEED(v);
    bool is_text = v->kind == PS_PT_STRING || v->kind == PS_PT_BYTES;
    if (is_text && (v->integer < 0 || !v->text))
        return ps_fail(PS_EINVAL, "writing %s: a string is NULL", w->path);
    PS_TRY(begin_value(w, is_text || v->kind == PS_PT_INT || v->kind == PS_PT_FLOAT || v->kind == PS_PT_BOOL));
    switch (v->kind) {
    case PS_PT_NONE: PS_TRY(put_op(w, 'N')); break;
    case PS_PT_BOOL: PS_TRY(put_op(w, v->integer ? '\x88' : '\x89')); break;
    case PS_PT_INT: PS_TRY(put_int(w, v->integer)); break;
    case PS_PT_FLOAT: PS_TRY(put_double(w, v->number)); break;
    case PS_PT_STRING: {
        const uint8_t *at = (const uint8_t *)v->text, *end = at + v->integer;
        for (int len; at < end; at += len)
            if (!(len = ps_utf8(at, (size_t)(end - at))))
                return ps_fail(PS_EINVAL, "writing %s: a string is not UTF-8", w->path);
        PS_TRY(put_text(w, v->text, v->integer));
        break;
    }
    case PS_PT_BYTES: PS_TRY(put_bytes(w, (const uint8_t *)v->text, v->integer)); break;
    case PS_PT_LIST: case PS_PT_TUPLE: case PS_PT_DICT: return open_container(w, v);
    default: return ps_fail(PS_EINVAL, "writing %s: values of kind %d cannot be written by this "
                                       "call", w->path, v->kind);
    }
    return end_value(w);
}

static int put_dims(ps_ptw *w, int n, const int64_t *dims)
{
    PS_TRY(put_op(w, '('));
    for (int d = 0; d < n; d++) PS_TRY(put_int(w, dims[d]));
    return put_op(w, 't');
}

static int check_tensor(const ps_ptw *w, const ps_pt_tensor *t)
{
    if (t->storage < 0 || t->storage >= w->count)
        return ps_fail(PS_EINVAL, "writing %s: storage %d was not declared", w->path, t->storage);
    if (t->ndim < 0 || t->ndim > PS_MAX_DIMS)
        return ps_fail(PS_EINVAL, "writing %s: a tensor has %d dimensions; only 0 to %d are supported", w->path,
                       t->ndim, PS_MAX_DIMS);
    int64_t last = t->offset, step;
    bool empty = false, wrong = t->offset < 0;
    for (int d = 0; d < t->ndim; d++) {
        wrong = wrong || t->shape[d] < 0 || t->stride[d] < 0;
        empty = empty || t->shape[d] == 0;
    }
    for (int d = 0; d < t->ndim && !empty && !wrong; d++)
        wrong = __builtin_mul_overflow(t->shape[d] - 1, t->stride[d], &step) ||
                __builtin_add_overflow(last, step, &last);
    if (wrong || (!empty && last >= w->storages[t->storage].numel))
        return ps_fail(PS_EINVAL, "writing %s: a tensor reaches beyond its storage of %lld elements", w->path,
                       (long long)w->storages[t->storage].numel);
    return 0;
}

int ps_ptw_tensor(ps_ptw *w, const ps_pt_tensor *t)
{
    PS_NEED(w);
    PS_NEED(t);
    PS_TRY(begin_value(w, false));
    PS_TRY(check_tensor(w, t));
    char key[16];
    int key_n = snprintf(key, sizeof key, "%d", t->storage);
    PS_TRY(put_word(w, W_REBUILD));
    PS_TRY(put(w, "((", 2));
    PS_TRY(put_word(w, W_STORAGE));
    PS_TRY(put_word(w, W_TYPES + w->storages[t->storage].dtype));
    PS_TRY(put_text(w, key, key_n));
    PS_TRY(put_word(w, W_CPU));
    PS_TRY(put_int(w, w->storages[t->storage].numel));
    PS_TRY(put(w, "tQ", 2));
    PS_TRY(put_int(w, t->offset));
    PS_TRY(put_dims(w, t->ndim, t->shape));
    PS_TRY(put_dims(w, t->ndim, t->stride));
    PS_TRY(put_op(w, '\x89'));                      /* requires_grad is false, because state is plain data */
    PS_TRY(put_word(w, W_ORDERED_DICT));           /* no hooks */
    PS_TRY(put(w, ")RtR", 4));
    return end_value(w);
}

/* -- the file ---------------------------------------------------------------------------------------------------- */
static int write_archive(ps_ptw *w)
{
    char name[48];
    zipw *z = &w->archive;
    PS_TRY(put_op(w, '.'));
    PS_TRY(zipw_add(z, "archive/data.pkl", w->n));
    PS_TRY(zipw_add(z, "archive/byteorder", 6));
    for (int i = 0; i < w->count; i++) {
        snprintf(name, sizeof name, "archive/data/%d", i);
        w->storages[i].entry = zipw_add(z, name, w->storages[i].numel *
                                        pt_type_by_dtype(w->storages[i].dtype)->nbytes);
        PS_TRY(w->storages[i].entry);
    }
    int version = zipw_add(z, "archive/version", 2), note = 0;
    PS_TRY(version);
    int64_t note_nbytes = w->note ? (int64_t)strlen(w->note) : 0;
    if (w->note) PS_TRY(note = zipw_add(z, "archive/psluajit", note_nbytes));
    PS_TRY(zipw_begin(z, w->path));
    PS_TRY(zipw_write(z, 0, w->pickle, w->n));
    PS_TRY(zipw_write(z, 1, "little", 6));
    if (w->note) PS_TRY(zipw_write(z, note, w->note, note_nbytes));
    return zipw_write(z, version, "3\n", 2);
}

int ps_ptw_note(ps_ptw *w, const char *text)
{
    PS_NEED(w);
    PS_NEED(text);
    PS_TRY(check_state(w, DECLARING));
    char *note = ps_strdup(text);
    if (!note) return ps_fail_nomem(strlen(text) + 1);
    ps_free(w->note);
    w->note = note;
    return 0;
}

int ps_ptw_begin(ps_ptw *w)
{
    PS_NEED(w);
    PS_TRY(check_state(w, DECLARING));
    if (!w->has_root || w->depth) return ps_fail(PS_ESTATE, "writing %s: the value is not complete", w->path);
    w->state = DONE;                                /* a failure is final, because the pickle has been closed */
    PS_TRY(write_archive(w));
    w->state = WRITING;
    return 0;
}

int ps_ptw_write(ps_ptw *w, int storage, const void *data, int64_t nbytes)
{
    PS_NEED(w);
    PS_TRY(check_state(w, WRITING));
    if (storage < 0 || storage >= w->count)
        return ps_fail(PS_EINVAL, "writing %s: storage %d was not declared", w->path, storage);
    return zipw_write(&w->archive, w->storages[storage].entry, data, nbytes);
}

int ps_ptw_commit(ps_ptw *w)
{
    PS_NEED(w);
    PS_TRY(check_state(w, WRITING));
    PS_TRY(zipw_commit(&w->archive));
    w->state = DONE;
    return 0;
}

void pt_write_wide_from(ps_ptw *w, int64_t n) { w->archive.wide_from = n; }

void ps_ptw_free(ps_ptw *w)
{
    if (!w) return;
    zipw_close(&w->archive);
    ps_free(w->storages);
    ps_free(w->pickle);
    ps_free(w->note);
    ps_free(w->path);
    ps_free(w);
}
