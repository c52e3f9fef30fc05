/* SPDX-License-Identifier: BSD-3-Clause
 * Reads safetensors. Opening maps a file and checks its header (st_header.c). After that, the bytes of a tensor can be
 * lent or read. */
#define _GNU_SOURCE
#include "io/safetensors.h"
#include "base/alloc.h"
#include <stdlib.h>
#include <string.h>

static const st_type types[] = {
    { "BOOL", 8, PS_BOOL }, { "U8", 8, PS_U8 }, { "F16", 16, PS_F16 }, { "BF16", 16, PS_BF16 }, { "I32", 32, PS_I32 },
    { "F32", 32, PS_F32 }, { "F64", 64, PS_F64 }, { "I64", 64, PS_I64 },
    { "F4", 4, -1 }, { "F6_E2M3", 6, -1 }, { "F6_E3M2", 6, -1 }, { "I8", 8, -1 }, { "F8_E5M2", 8, -1 },
    { "F8_E4M3", 8, -1 }, { "F8_E8M0", 8, -1 }, { "F8_E4M3FNUZ", 8, -1 }, { "F8_E5M2FNUZ", 8, -1 }, { "I16", 16, -1 },
    { "U16", 16, -1 }, { "U32", 32, -1 }, { "C64", 64, -1 }, { "U64", 64, -1 },
};
enum { N_TYPES = sizeof types / sizeof *types };

const st_type *st_type_by_text(const char *text)
{
    for (int i = 0; i < N_TYPES; i++)
        if (!strcmp(types[i].text, text)) return &types[i];
    return NULL;
}

const st_type *st_type_by_dtype(int dtype)
{
    for (int i = 0; i < N_TYPES; i++)
        if (types[i].dtype == dtype && dtype >= 0) return &types[i];
    return NULL;
}

/* Opens the file in `map`. If this fails, the function closes `map`. Otherwise the result owns `map`. */
static int open_map(ps_map *map, ps_st **out)
{
    ps_st *st = ps_alloc0(sizeof *st);
    if (!st) {
        ps_map_close(map);
        return ps_fail_nomem(sizeof *st);
    }
    st->map = *map;
    int rc = st_parse(st);
    if (rc < 0) ps_st_close(st);
    else *out = st;
    return rc;
}

int ps_st_open(const char *path, ps_st **out)
{
    PS_NEED(out);
    ps_map map;
    PS_TRY(ps_map_open(&map, path));
    return open_map(&map, out);
}

int st_open_memory(const char *path, const void *bytes, int64_t nbytes, ps_st **out)
{
    ps_map map;
    PS_TRY(ps_map_borrow(&map, path, bytes, nbytes));
    return open_map(&map, out);
}

static void end_if_unused(ps_st *st)
{
    if (!st->closed || st->loans > 0) return;
    ps_map_close(&st->map);
    ps_free(st);
}

void ps_st_close(ps_st *st)
{
    if (!st) return;
    for (int i = 0; i < st->count; i++) ps_free(st->tensors[i].blocks);
    ps_free(st->tensors);
    ps_free(st->by_name);
    ps_free(st->meta);
    ps_free(st->text);
    st->closed = true;
    end_if_unused(st);
}

static const st_tensor *tensor_at(const ps_st *st, int i)
{
    return st && i >= 0 && i < st->count ? &st->tensors[i] : NULL;
}

int ps_st_count(const ps_st *st) { return st ? st->count : 0; }

const char *ps_st_name(const ps_st *st, int i)
{
    const st_tensor *t = tensor_at(st, i);
    return t ? t->name : NULL;
}

const char *ps_st_dtype_text(const ps_st *st, int i)
{
    const st_tensor *t = tensor_at(st, i);
    return t ? t->type->text : NULL;
}

int ps_st_find(const ps_st *st, const char *name)
{
    int low = 0, high = st && name ? st->count : 0;
    while (low < high) {
        int mid = low + (high - low) / 2, order = strcmp(st->by_name[mid]->name, name);
        if (order == 0) return (int)(st->by_name[mid] - st->tensors);
        if (order < 0) low = mid + 1;
        else high = mid;
    }
    return -1;
}

int ps_st_get(const ps_st *st, int i, ps_st_entry *out)
{
    PS_NEED(st);
    PS_NEED(out);
    const st_tensor *t = tensor_at(st, i);
    if (!t) return ps_fail(PS_ERANGE, "%s: tensor %d was requested, but the file has %d", st->map.path, i, st->count);
    *out = (ps_st_entry){ .dtype = t->type->dtype, .ndim = t->ndim, .at = t->begin,
                           .nbytes = t->end - t->begin };
    memcpy(out->shape, t->shape, sizeof out->shape);
    return 0;
}

int ps_st_meta_count(const ps_st *st) { return st ? st->meta_count : 0; }

const char *ps_st_meta_key(const ps_st *st, int i)
{
    return st && i >= 0 && i < st->meta_count ? st->meta[i].key : NULL;
}

const char *ps_st_meta_value(const ps_st *st, int i)
{
    return st && i >= 0 && i < st->meta_count ? st->meta[i].value : NULL;
}

/* Returns NULL and reports an error on failure. The pointer has the same alignment as the tensor's offset in the file.
 * Every call checks the file's size. If the file is truncated after the call, reading the bytes ends the process, as
 * for all maps. ps_st_read returns an error instead. */
const void *ps_st_data(const ps_st *st, int i)
{
    const st_tensor *t = tensor_at(st, i);
    if (!t) {
        ps_fail(PS_ERANGE, "tensor %d was requested, but the file has %d", i, ps_st_count(st));
        return NULL;
    }
    return ps_map_check(&st->map) < 0 ? NULL : st->data + t->begin;
}

static int check_range(const ps_st *st, int64_t at, int64_t nbytes, const void *out)
{
    if (at >= 0 && nbytes >= 0 && at <= st->data_nbytes && nbytes <= st->data_nbytes - at && (!nbytes || out)) return 0;
    return ps_fail(PS_ERANGE, "%s: %lld bytes from byte %lld of the data on were requested, but the data has only %lld "
                   "bytes", st->map.path, (long long)nbytes, (long long)at, (long long)st->data_nbytes);
}

int ps_st_read(const void *from, int64_t at, void *dst, int64_t nbytes)
{
    const ps_st *st = from;
    PS_NEED(st);
    PS_TRY(check_range(st, at, nbytes, dst));
    PS_TRY(ps_map_read(&st->map, st->data - st->map.bytes + at, dst, nbytes));
    return st_check_read(st, at, dst, nbytes);
}

typedef struct loan {
    ps_st *st;
    ps_lent_map map;
    int64_t at;             /* offset in the file of the first byte that is lent */
} loan;

static int loan_check(void *lender) { return ps_map_unchanged(&((const loan *)lender)->st->map); }

static int loan_direct(void *lender, int64_t *at)
{
    const loan *l = lender;
    *at = l->at;
    return ps_map_direct(&l->st->map);
}

static void loan_end(void *lender)
{
    loan *l = lender;
    ps_map_unlend(&l->map);
    l->st->loans--;
    end_if_unused(l->st);
    ps_free(l);
}

int ps_st_lend(void *from, int64_t at, int64_t nbytes, ps_loan *out)
{
    ps_st *st = from;
    PS_NEED(st);
    PS_NEED(out);
    PS_TRY(check_range(st, at, nbytes, st));
    PS_TRY(ps_map_unchanged(&st->map));
    loan *l = ps_alloc(sizeof *l);
    if (!l) return ps_fail_nomem(sizeof *l);
    l->at = st->data - st->map.bytes + at;
    int rc = ps_map_lend(&st->map, l->at, nbytes, &l->map);
    if (rc < 0) {
        ps_free(l);
        return rc;
    }
    l->st = st;
    st->loans++;
    *out = (ps_loan){ l->map.bytes, loan_check, loan_end, l, loan_direct };
    return 0;
}

int ps_st_copy(const ps_st *st, int i, const int64_t *offset, const int64_t *shape, int64_t first, void *dst,
               int64_t numel)
{
    PS_NEED(st);
    const st_tensor *t = tensor_at(st, i);
    if (!t) return ps_fail(PS_ERANGE, "%s: tensor %d was requested, but the file has %d", st->map.path, i, st->count);
    if (t->ndim) PS_NEED(offset);
    if (t->ndim) PS_NEED(shape);
    char shown[ST_NAME_SHOWN];
    if (t->type->dtype < 0)
        return ps_fail(PS_EUNSUP, "%s: tensor '%s' has type %s, which is not supported", st->map.path,
                       st_shown(t->name, shown), t->type->text);
    int64_t stride[PS_MAX_DIMS], run = 1, from = 0, room = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (offset[d] < 0 || shape[d] < 0 || offset[d] > t->shape[d] || shape[d] > t->shape[d] - offset[d])
            return ps_fail(PS_ERANGE, "%s: tensor '%s': %lld from %lld on of dimension %d were requested, but it has "
                           "%lld", st->map.path, st_shown(t->name, shown), (long long)shape[d], (long long)offset[d], d,
                           (long long)t->shape[d]);
        stride[d] = run, from += offset[d] * run;
        run *= t->shape[d], room *= shape[d];
    }
    if (first < 0 || numel < 0 || first > room || numel > room - first || (numel && !dst))
        return ps_fail(PS_ERANGE, "%s: %lld elements from %lld on were requested, of %lld of tensor '%s'",
                       st->map.path, (long long)numel, (long long)first, (long long)room, st_shown(t->name, shown));
    PS_TRY(ps_map_check(&st->map));
    int64_t each = t->type->bits / 8;
    if (numel) ps_copy_strided(st->data + t->begin + from * each, each, t->ndim, shape, stride, first, dst, numel);
    return 0;
}

void ps_st_drop(const ps_st *st, int i)
{
    const st_tensor *t = tensor_at(st, i);
    if (t) ps_map_drop(&st->map, st->data + t->begin, t->end - t->begin);
}
