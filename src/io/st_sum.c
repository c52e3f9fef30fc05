/* SPDX-License-Identifier: BSD-3-Clause
 * Checksums of safetensors files. A checksum is an XXH3 hash of 64 bits, written as 16 hexadecimal digits. The header
 * has a checksum, and the bytes of each tensor have a checksum, so that the checksums cover every byte of the file.
 * They are the value of the key "xxh3_64" in the header's metadata, which is the first key in the file. The value
 * contains the checksum of the header, followed by the checksums of the tensors in the order of the data. Spaces
 * separate the checksums. The checksum of the header covers all bytes before the data, with zeros in place of its own
 * 16 digits.
 *
 * Opening a file compares the header's checksum. ps_st_verify compares a tensor's checksum. If another program has
 * rewritten the file, "xxh3_64" is not the first key, and no checksums are compared. */
#define XXH_STATIC_LINKING_ONLY                     /* for the size of XXH3_state_t */
#include "io/safetensors.h"
#include "base/alloc.h"
#include <stdlib.h>
#include <string.h>
#include <xxh_x86dispatch.h>

enum { BLOCK = 256 << 10, PIECE = 32 * BLOCK };     /* PIECE: maximum number of bytes of a map that are read at once */

struct st_sum {
    /* The allocation that contains `state`. xxHash requires that `state` is aligned to 64 bytes. */
    void *whole;
    XXH3_state_t *state;
};

st_sum *st_sum_new(void)
{
    st_sum *s = ps_alloc(sizeof *s);
    if (!s) return NULL;
    if (!(s->whole = ps_alloc(sizeof *s->state + 64))) {
        ps_free(s);
        return NULL;
    }
    s->state = (XXH3_state_t *)(((uintptr_t)s->whole + 63) & ~(uintptr_t)63);
    XXH3_64bits_reset(s->state);
    return s;
}

void st_sum_add(st_sum *s, const void *data, int64_t nbytes) { XXH3_64bits_update(s->state, data, (size_t)nbytes); }

uint64_t st_sum_end(st_sum *s)
{
    uint64_t sum = XXH3_64bits_digest(s->state);
    st_sum_free(s);
    return sum;
}

void st_sum_free(st_sum *s)
{
    if (!s) return;
    ps_free(s->whole);
    ps_free(s);
}

void st_sum_print(uint64_t sum, char *out)
{
    for (int i = ST_SUM_DIGITS - 1; i >= 0; i--, sum >>= 4) out[i] = "0123456789abcdef"[sum & 15];
}

int st_sum_header(const void *bytes, int64_t nbytes, uint64_t *out)
{
    st_sum *s = st_sum_new();
    if (!s) return ps_fail_nomem(sizeof(XXH3_state_t));
    st_sum_add(s, bytes, ST_SUM_AT);
    st_sum_add(s, "0000000000000000", ST_SUM_DIGITS);
    st_sum_add(s, (const char *)bytes + ST_SUM_AT + ST_SUM_DIGITS, nbytes - ST_SUM_AT - ST_SUM_DIGITS);
    *out = st_sum_end(s);
    return 0;
}

static bool has_sums(const ps_st *st)
{
    return st->data - st->map.bytes >= ST_SUM_AT + ST_SUM_DIGITS
           && !memcmp(st->map.bytes + 8, ST_SUM_HEAD, sizeof ST_SUM_HEAD - 1);
}

int st_check_header(const ps_st *st)
{
    char digits[ST_SUM_DIGITS + 1] = { 0 };
    uint64_t sum = 0;
    if (!has_sums(st)) return 0;
    PS_TRY(st_sum_header(st->map.bytes, st->data - st->map.bytes, &sum));
    st_sum_print(sum, digits);
    const char *saved = (const char *)st->map.bytes + ST_SUM_AT;
    if (!memcmp(saved, digits, ST_SUM_DIGITS)) return 0;
    return ps_fail(PS_EFORMAT, "%s: the header is damaged: its checksum is %s, but the file has %.16s; copy the file "
                   "again, or use an older one", st->map.path, digits, saved);
}

/* Sets *out to the text of the checksums, or to NULL if the file has no checksums. Returns PS_EFORMAT if the text does
 * not contain one checksum for the header and one for each tensor. */
static int sums_of(const ps_st *st, const char **out)
{
    *out = NULL;
    if (!has_sums(st)) return 0;
    for (int i = 0; i < st->meta_count; i++)
        if (!strcmp(st->meta[i].key, ST_SUM_KEY)) *out = st->meta[i].value;
    if (!*out || strlen(*out) != ((size_t)st->count + 1) * (ST_SUM_DIGITS + 1) - 1)
        return ps_fail(PS_EFORMAT, "%s: the file does not have one checksum for each of its %d tensors", st->map.path,
                       st->count);
    return 0;
}

/* Computes the checksum of a tensor's bytes in the map, and writes the hash of each block to `blocks`. */
static int sum_of_map(const ps_st *st, const st_tensor *t, uint64_t *blocks, uint64_t *out)
{
    st_sum *s = st_sum_new();
    if (!s) return ps_fail_nomem(sizeof(XXH3_state_t));
    for (int64_t at = t->begin; at < t->end; at += PIECE) {
        int64_t n = t->end - at < PIECE ? t->end - at : PIECE;
        int rc = ps_map_check(&st->map);
        if (rc < 0) {
            st_sum_free(s);
            return rc;
        }
        st_sum_add(s, st->data + at, n);
        for (int64_t b = 0; b < n; b += BLOCK) *blocks++ = ps_xxh3(st->data + at + b, n - b < BLOCK ? n - b : BLOCK);
        ps_map_drop(&st->map, st->data + at, n);
    }
    *out = st_sum_end(s);
    return 0;
}

int ps_st_verify(const ps_st *st, int i)
{
    char digits[ST_SUM_DIGITS + 1] = { 0 }, shown[ST_NAME_SHOWN];
    const char *sums;
    uint64_t sum = 0;
    PS_NEED(st);
    if (i < 0 || i >= st->count)
        return ps_fail(PS_ERANGE, "%s: tensor %d was requested, but the file has %d", st->map.path, i, st->count);
    PS_TRY(sums_of(st, &sums));
    if (!sums) return 0;
    st_tensor *t = &st->tensors[i];
    size_t n_blocks = (size_t)((t->end - t->begin) / BLOCK + 1);
    uint64_t *blocks = ps_alloc(n_blocks * sizeof *blocks);
    if (!blocks) return ps_fail_nomem(n_blocks * sizeof *blocks);
    int rc = sum_of_map(st, t, blocks, &sum);
    st_sum_print(sum, digits);
    const char *saved = sums + ((size_t)i + 1) * (ST_SUM_DIGITS + 1);
    if (rc == 0 && !memcmp(saved, digits, ST_SUM_DIGITS)) {
        ps_free(t->blocks);
        t->blocks = blocks;
        return 1;
    }
    ps_free(blocks);
    PS_TRY(rc);
    return ps_fail(PS_EFORMAT, "%s: tensor '%s' is damaged: the checksum of its bytes is %s, but the file has %.16s; "
                   "copy the file again, or use an older one", st->map.path, st_shown(t->name, shown), digits, saved);
}

/* Returns the index of the tensor that contains byte `at` of the data, or -1 if no tensor contains it. */
static int tensor_of(const ps_st *st, int64_t at)
{
    int low = 0, high = st->count - 1;
    while (low <= high) {
        int mid = low + (high - low) / 2;
        if (at < st->tensors[mid].begin) high = mid - 1;
        else if (at >= st->tensors[mid].end) low = mid + 1;
        else return mid;
    }
    return -1;
}

/* Compares block `k` of a tensor's bytes with the block's hash. `bytes` points to the block. If `bytes` is NULL, the
 * block is read from the file into *buffer, which the caller frees. */
static int check_block(const ps_st *st, const st_tensor *t, int64_t k, const uint8_t *bytes, uint8_t **buffer)
{
    char shown[ST_NAME_SHOWN];
    int64_t from = t->begin + k * BLOCK, n = t->end - from < BLOCK ? t->end - from : BLOCK;
    if (!bytes) {
        if (!*buffer && !(*buffer = ps_alloc(BLOCK))) return ps_fail_nomem(BLOCK);
        PS_TRY(ps_map_read(&st->map, st->data - st->map.bytes + from, *buffer, n));
        bytes = *buffer;
    }
    if (ps_xxh3(bytes, n) == t->blocks[k]) return 0;
    return ps_fail(PS_EFORMAT, "%s: tensor '%s' is damaged: the checksum of the bytes that were read from byte %lld on "
                   "is not that of the bytes that were verified; its disk or the memory is failing", st->map.path,
                   st_shown(t->name, shown), (long long)(k * BLOCK));
}

/* The caller has read bytes [from, end) of the data into `bytes`. Checks the part of these bytes that is in block k. */
static int check_part(const ps_st *st, const st_tensor *t, int64_t k, int64_t from, int64_t end, const uint8_t *bytes,
                      uint8_t **buffer)
{
    char shown[ST_NAME_SHOWN];
    int64_t first = t->begin + k * BLOCK, last = first + BLOCK < t->end ? first + BLOCK : t->end;
    if (from <= first && last <= end) return check_block(st, t, k, bytes + (first - from), buffer);
    PS_TRY(check_block(st, t, k, NULL, buffer));
    int64_t a = first > from ? first : from, b = last < end ? last : end;
    if (!memcmp(*buffer + (a - first), bytes + (a - from), (size_t)(b - a))) return 0;
    return ps_fail(PS_EFORMAT, "%s: tensor '%s' is damaged: two reads of its bytes from byte %lld on differ; its disk "
                   "or the memory is failing", st->map.path, st_shown(t->name, shown), (long long)(a - t->begin));
}

int st_check_read(const ps_st *st, int64_t at, const void *bytes, int64_t nbytes)
{
    int i = nbytes > 0 && st->map.fd >= 0 ? tensor_of(st, at) : -1;
    const st_tensor *t = i < 0 ? NULL : &st->tensors[i];
    uint8_t *buffer = NULL;
    int rc = 0;
    if (!t || !t->blocks) return 0;
    int64_t end = at + nbytes < t->end ? at + nbytes : t->end;
    for (int64_t k = (at - t->begin) / BLOCK; rc == 0 && t->begin + k * BLOCK < end; k++)
        rc = check_part(st, t, k, at, end, bytes, &buffer);
    ps_free(buffer);
    return rc;
}
