/* SPDX-License-Identifier: BSD-3-Clause
 * Token shards. This file reads llm.c's .bin files, raw tokens and plain text through a map, and writes llm.c's files.
 * A .bin file has a header of 256 int32 (magic, version, count), and then the tokens. All formats are little-endian,
 * like all machines that psluajit runs on. */
#include "data/tokens.h"
#include "base/alloc.h"
#include <stdio.h>
#include <string.h>

enum { HEADER_BYTES = 1024, MAGIC_U16 = 20240520, MAGIC_U32 = 20240801, VERSION_U16 = 1, VERSION_U32 = 7 };

/* -- reading ----------------------------------------------------------------------------------------------------- */
static int32_t header_word(const ps_tokens *s, int i)
{
    int32_t v;
    memcpy(&v, s->map.bytes + 4 * i, 4);
    return v;
}

/* Reads the header of a file whose magic number says that a token has `width` bytes. */
static int read_header(ps_tokens *s, int width, int wanted)
{
    const char *path = s->map.path;
    int version = width == 2 ? VERSION_U16 : VERSION_U32;
    if (wanted && wanted != width)
        return ps_fail(PS_EFORMAT, "%s: its header says that tokens have %d bytes, but %d were requested", path, width,
                       wanted);
    if (s->map.nbytes < HEADER_BYTES)
        return ps_fail(PS_EFORMAT, "%s: truncated: the header has %d bytes, the file %lld", path, HEADER_BYTES,
                       (long long)s->map.nbytes);
    if (header_word(s, 1) != version)
        return ps_fail(PS_EFORMAT, "%s: the header has version %d of the token format; only version %d is supported",
                       path, header_word(s, 1), version);
    s->count = header_word(s, 2);
    if (s->count < 0)
        return ps_fail(PS_EFORMAT, "%s: the header says that the file has %lld tokens; the number must not be negative",
                       path, (long long)s->count);
    int64_t expected = HEADER_BYTES + s->count * width;
    if (s->map.nbytes != expected)
        return ps_fail(PS_EFORMAT, "%s: %s: the header says %lld tokens of %d bytes, so %lld bytes are expected; the "
                       "file has %lld", path, s->map.nbytes < expected ? "truncated" : "too long", (long long)s->count,
                       width, (long long)expected, (long long)s->map.nbytes);
    s->width = width;
    s->data = s->map.bytes + HEADER_BYTES;
    return 0;
}

static int read_layout(ps_tokens *s, int width)
{
    int32_t magic = s->map.nbytes >= 4 ? header_word(s, 0) : 0;
    /* A file of width 1 is text, whatever its first bytes are. A file of raw tokens cannot begin with the magic number,
     * because no vocabulary has such large ids. As a u32 token, the magic number would be 20,240,801. As u16 tokens, it
     * would be 55,432 followed by 308, while GPT-2's ids end at 50,256. */
    if (width != 1 && magic == MAGIC_U16) return read_header(s, 2, width);
    if (width != 1 && magic == MAGIC_U32) return read_header(s, 4, width);
    if (width == 0)
        return ps_fail(PS_EFORMAT, "%s: the file has no token header (it begins with %d, neither %d nor %d); psluajit "
                       "prepare.lua writes files with one; for raw tokens pass their width in Lua, "
                       "ps.data.tokens(path, { width = 2 }), or 4, or 1 for text", s->map.path, magic, MAGIC_U16,
                       MAGIC_U32);
    if (s->map.nbytes % width)
        return ps_fail(PS_EFORMAT, "%s: the file is truncated: its %lld bytes are not a multiple of the %d bytes of a "
                       "token (%lld bytes expected)", s->map.path, (long long)s->map.nbytes, width,
                       (long long)(s->map.nbytes / width * width));
    s->width = width;
    s->count = s->map.nbytes / width;
    s->data = s->map.bytes;
    return 0;
}

/* Opens the file in `map`. The function closes `map` if it fails. Otherwise the result owns `map`. */
static int open_map(ps_map *map, int width, ps_tokens **out)
{
    ps_tokens *s = ps_alloc0(sizeof *s);
    if (!s) {
        ps_map_close(map);
        return ps_fail_nomem(sizeof *s);
    }
    s->map = *map;
    atomic_init(&s->refs, 1);
    int rc = read_layout(s, width);
    if (rc < 0) ps_tokens_close(s);
    else *out = s;
    return rc;
}

static int check_width(int width)
{
    if (width == 0 || width == 1 || width == 2 || width == 4) return 0;
    return ps_fail(PS_EINVAL, "a token must have 1, 2 or 4 bytes (0: as in the file's header), not %d", width);
}

int ps_tokens_open(const char *path, int width, ps_tokens **out)
{
    ps_map map;
    PS_NEED(out);
    PS_TRY(check_width(width));
    PS_TRY(ps_map_open(&map, path));
    return open_map(&map, width, out);
}

int tokens_open_memory(const char *path, const void *bytes, int64_t nbytes, int width, ps_tokens **out)
{
    ps_map map;
    PS_TRY(check_width(width));
    PS_TRY(ps_map_borrow(&map, path, bytes, nbytes));
    return open_map(&map, width, out);
}

void tokens_retain(ps_tokens *s) { atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed); }

void ps_tokens_close(ps_tokens *s)
{
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) return;
    ps_map_close(&s->map);
    ps_free(s);
}

int64_t ps_tokens_count(const ps_tokens *s) { return s ? s->count : 0; }

static uint32_t token_at(const ps_tokens *s, int64_t i)
{
    uint16_t u16;
    uint32_t u32;
    if (s->width == 1) return s->data[i];
    if (s->width == 2) return memcpy(&u16, s->data + 2 * i, 2), u16;
    return memcpy(&u32, s->data + 4 * i, 4), u32;
}

int tokens_copy(const ps_tokens *s, int64_t first, int64_t n, int64_t vocab, int32_t *dst)
{
    PS_TRY(ps_map_check(&s->map));
    const uint8_t *from = s->data + first * s->width;
    uint32_t largest = 0;
    if (s->width == 1) for (int64_t i = 0; i < n; i++) dst[i] = from[i];
    else if (s->width == 2) {
        for (int64_t i = 0; i < n; i++) {
            uint16_t v;
            memcpy(&v, from + 2 * i, 2);
            dst[i] = v;
        }
    } else memcpy(dst, from, (size_t)n * 4);
    for (int64_t i = 0; i < n; i++) largest = (uint32_t)dst[i] > largest ? (uint32_t)dst[i] : largest;
    bool by_vocab = vocab && vocab <= INT32_MAX;
    int64_t limit = by_vocab ? vocab : (int64_t)INT32_MAX + 1;
    if (largest < limit) return 0;
    for (int64_t i = 0; i < n; i++)
        if ((uint32_t)dst[i] >= limit)
            return ps_fail(PS_ERANGE, "%s: token %lld of the file is %u, beyond the %s of %lld", s->map.path,
                           (long long)(first + i), (uint32_t)dst[i], by_vocab ? "vocabulary" : "range of int32",
                           (long long)limit);
    return 0;
}

int ps_tokens_read(const ps_tokens *s, int64_t first, int64_t n, int32_t *dst)
{
    PS_NEED(s);
    if (first < 0 || n < 0 || first > s->count || n > s->count - first)
        return ps_fail(PS_ERANGE, "%s: %lld tokens from %lld on were requested, but the file has %lld", s->map.path,
                       (long long)n, (long long)first, (long long)s->count);
    if (!n) return 0;
    PS_NEED(dst);
    if (s->width == 4)          /* check all tokens first, so that an invalid token leaves dst unchanged */
        for (int64_t i = 0; i < n; i++)
            if (token_at(s, first + i) > INT32_MAX)
                return ps_fail(PS_ERANGE, "%s: token %lld is %u, which does not fit in 31 bits", s->map.path,
                               (long long)(first + i), token_at(s, first + i));
    return tokens_copy(s, first, n, 0, dst);
}

/* -- writing ----------------------------------------------------------------------------------------------------- */
enum { BUFFER_BYTES = 1 << 18 };
struct ps_tokw {
    char *path;
    ps_tempfile file;
    int width;
    bool broken;                /* true if a write failed; then the file lacks appended tokens */
    int64_t count;              /* number of tokens that were appended, including those in the buffer */
    int64_t flushed;            /* size in bytes of the tokens in the file */
    int used;                   /* number of used bytes in the buffer */
    uint8_t buffer[BUFFER_BYTES];
};

int ps_tokw_new(const char *path, int width, ps_tokw **out)
{
    PS_NEED(path);
    PS_NEED(out);
    if (width != 2 && width != 4) return ps_fail(PS_EINVAL, "a token must be written with 2 or 4 bytes, not %d", width);
    ps_tokw *w = ps_alloc(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->width = width, w->broken = false, w->count = 0, w->flushed = 0, w->used = 0;
    if (!(w->path = ps_strdup(path))) {
        ps_free(w);
        return ps_fail_nomem(strlen(path) + 1);
    }
    int rc = ps_tempfile_open(&w->file, path);
    if (rc < 0) ps_tokw_free(w);
    else *out = w;
    return rc;
}

static int flush(ps_tokw *w)
{
    int rc = ps_tempfile_write(&w->file, HEADER_BYTES + w->flushed, w->buffer, w->used);
    w->broken = rc < 0;
    if (rc == 0) w->flushed += w->used, w->used = 0;
    return rc;
}

static int push(ps_tokw *w, uint32_t id)
{
    if (w->used == BUFFER_BYTES) PS_TRY(flush(w));
    uint16_t narrow = (uint16_t)id;
    memcpy(w->buffer + w->used, w->width == 2 ? (void *)&narrow : (void *)&id, (size_t)w->width);
    w->used += w->width;
    w->count++;
    return 0;
}

static int check_append(const ps_tokw *w, int64_t n)
{
    if (!w->file.temp) return ps_fail(PS_ESTATE, "writing %s: the file was already committed", w->path);
    if (w->broken) return ps_fail(PS_ESTATE, "writing %s: an earlier write failed; write the file again from the "
                                  "beginning", w->path);
    if (n < 0) return ps_fail(PS_EINVAL, "writing %s: cannot append %lld tokens", w->path, (long long)n);
    if (n > INT32_MAX - w->count)
        return ps_fail(PS_EINVAL, "writing %s: the file has %lld tokens, and %lld more do not fit: a shard must have "
                       "fewer than 2^31; start another file", w->path, (long long)w->count, (long long)n);
    return 0;
}

/* Checks all ids before it appends the first id, so that a failed call appends no ids. */
int ps_tokw_append(ps_tokw *w, const int32_t *ids, int64_t n)
{
    PS_NEED(w);
    PS_TRY(check_append(w, n));
    if (n) PS_NEED(ids);
    int64_t limit = w->width == 2 ? 65536 : (int64_t)INT32_MAX + 1;
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= limit)
            return ps_fail(PS_ERANGE, "writing %s: token %d at position %lld does not fit in %d bytes, which can hold "
                           "0 to %lld", w->path, ids[i], (long long)(w->count + i), w->width, (long long)(limit - 1));
    for (int64_t i = 0; i < n; i++) PS_TRY(push(w, (uint32_t)ids[i]));
    return 0;
}

int ps_tokw_append_bytes(ps_tokw *w, const void *bytes, int64_t n)
{
    const uint8_t *from = bytes;
    PS_NEED(w);
    PS_TRY(check_append(w, n));
    if (n) PS_NEED(bytes);
    for (int64_t i = 0; i < n; i++) PS_TRY(push(w, from[i]));
    return 0;
}

int ps_tokw_commit(ps_tokw *w)
{
    PS_NEED(w);
    PS_TRY(check_append(w, 0));
    int32_t header[HEADER_BYTES / 4] = { w->width == 2 ? MAGIC_U16 : MAGIC_U32,
                                         w->width == 2 ? VERSION_U16 : VERSION_U32, (int32_t)w->count };
    PS_TRY(flush(w));
    PS_TRY(ps_tempfile_write(&w->file, 0, header, HEADER_BYTES));
    return ps_tempfile_commit(&w->file);
}

void ps_tokw_free(ps_tokw *w)
{
    if (!w) return;
    ps_tempfile_close(&w->file);
    ps_free(w->path);
    ps_free(w);
}
