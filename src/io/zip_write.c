/* SPDX-License-Identifier: BSD-3-Clause
 * Writes ZIP archives of entries that are not compressed. All sizes are known before the first byte is written, so all
 * positions are known, too. An entry's header is written after the entry's last byte, when the entry's checksum is
 * known. The data of each entry begins at a multiple of 64 bytes. As in PyTorch, an extra field contains the padding.
 * No clock is read, so equal contents result in equal files. */
#include "io/zip.h"
#include "base/alloc.h"
#include "base/grow.h"
#include <stdlib.h>
#include <string.h>

enum { LOCAL_SIZE = 30, ENTRY_SIZE = 46, END_SIZE = 22, END64_SIZE = 56, LOCATOR_SIZE = 20 };
enum { ALIGN = 64, MAX_NAME = 512 };
enum { NEEDS_PLAIN = 20, NEEDS_ZIP64 = 45, UTF8_NAMES = 0x800, FIRST_OF_1980 = 0x21, NARROW_COUNT = 0xffff };

void zipw_init(zipw *w) { *w = (zipw){ .file = PS_TEMPFILE_NONE, .wide_from = 0xffffffff }; }

int zipw_add(zipw *w, const char *name, int64_t nbytes)
{
    PS_TRY(ps_grow(w->entries, w->room, w->count + 1));
    if (strlen(name) > MAX_NAME) return ps_fail(PS_EINVAL, "an archive entry's name has %zu bytes, which is too "
                                                           "long", strlen(name));
    char *copy = ps_strdup(name);
    if (!copy) return ps_fail_nomem(strlen(name) + 1);
    w->entries[w->count] = (zipw_entry){ .name = copy, .nbytes = nbytes };
    return w->count++;
}

static bool wide(const zipw *w, int64_t n) { return n >= w->wide_from; }
static int local_wide_size(const zipw *w, const zipw_entry *e) { return wide(w, e->nbytes) ? 4 + 16 : 0; }
static int entry_wide_size(const zipw *w, const zipw_entry *e)
{
    int n = (wide(w, e->nbytes) ? 16 : 0) + (wide(w, e->header) ? 8 : 0);
    return n ? 4 + n : 0;
}
static bool wide_end(const zipw *w)
{
    return w->count >= NARROW_COUNT || wide(w, w->count) || wide(w, w->directory) || wide(w, w->directory_nbytes);
}

static uint8_t *store(uint8_t *p, uint64_t v, int nbytes)
{
    for (int i = 0; i < nbytes; i++) p[i] = (uint8_t)(v >> (8 * i));
    return p + nbytes;
}
static uint8_t *store_mark(uint8_t *p, int a, int b)
{
    return store(p, 'P' | 'K' << 8 | (uint64_t)a << 16 | (uint64_t)b << 24, 4);
}
/* Stores n, a size or an offset, in its field of 4 bytes. If n is stored as ZIP64, stores 0xffffffff instead. */
static uint8_t *store_narrow(const zipw *w, uint8_t *p, int64_t n)
{
    return store(p, wide(w, n) ? 0xffffffff : (uint64_t)n, 4);
}

static int lay_out(zipw *w)
{
    int64_t at = 0;
    for (int i = 0; i < w->count; i++) {
        zipw_entry *e = &w->entries[i];
        e->header = at;
        int64_t before = LOCAL_SIZE + (int64_t)strlen(e->name) + local_wide_size(w, e) + 4 + ALIGN;
        if (__builtin_add_overflow(at, before, &at)) return ps_fail(PS_EINVAL, "an archive would be too large");
        at -= at % ALIGN;           /* this leaves 1 to 64 bytes for padding */
        e->begin = at;
        if (__builtin_add_overflow(at, e->nbytes, &at)) return ps_fail(PS_EINVAL, "an archive would be too large");
    }
    w->directory = at;
    for (int i = 0; i < w->count; i++)
        w->directory_nbytes += ENTRY_SIZE + (int64_t)strlen(w->entries[i].name) + entry_wide_size(w, &w->entries[i]);
    int64_t behind = w->directory_nbytes + END_SIZE + (wide_end(w) ? END64_SIZE + LOCATOR_SIZE : 0);
    if (__builtin_add_overflow(at, behind, &w->nbytes)) return ps_fail(PS_EINVAL, "an archive would be too large");
    return 0;
}

/* Stores the fields that a local header and a directory entry have in common. The first field is the version that a
 * reader needs, and the last field is the length of the extra field. */
static uint8_t *store_common(const zipw *w, uint8_t *p, const zipw_entry *e, int needs, int extra)
{
    p = store(store(p, (uint64_t)needs, 2), UTF8_NAMES, 2);
    p = store(store(store(p, 0, 2), 0, 2), FIRST_OF_1980, 2);   /* method (not compressed), time, date */
    p = store_narrow(w, store_narrow(w, store(p, e->crc, 4), e->nbytes), e->nbytes);
    return store(store(p, strlen(e->name), 2), (uint64_t)extra, 2);
}

static uint8_t *store_name(uint8_t *p, const char *name)
{
    size_t n = strlen(name);
    memcpy(p, name, n);
    return p + n;
}

static int write_header(zipw *w, const zipw_entry *e)
{
    uint8_t header[LOCAL_SIZE + MAX_NAME + 20 + 4 + 2 * ALIGN], *p = header;
    int wide_size = local_wide_size(w, e);
    int extra = (int)(e->begin - e->header) - LOCAL_SIZE - (int)strlen(e->name), padding = extra - wide_size - 4;
    p = store_common(w, store_mark(p, 3, 4), e, wide_size ? NEEDS_ZIP64 : NEEDS_PLAIN, extra);
    p = store_name(p, e->name);
    if (wide_size) p = store(store(store(store(p, 1, 2), 16, 2), (uint64_t)e->nbytes, 8), (uint64_t)e->nbytes, 8);
    p = store(store(p, 'F' | 'B' << 8, 2), (uint64_t)padding, 2);
    memset(p, 'Z', (size_t)padding);
    return ps_tempfile_write(&w->file, e->header, header, e->begin - e->header);
}

int zipw_begin(zipw *w, const char *path)
{
    PS_TRY(lay_out(w));
    PS_TRY(ps_tempfile_open(&w->file, path));
    PS_TRY(ps_tempfile_reserve(&w->file, w->nbytes));
    for (int i = 0; i < w->count; i++)
        if (!w->entries[i].nbytes) PS_TRY(write_header(w, &w->entries[i]));
    return 0;
}

int zipw_write(zipw *w, int i, const void *data, int64_t nbytes)
{
    zipw_entry *e = &w->entries[i];
    if (nbytes < 0 || nbytes > e->nbytes - e->written || (nbytes && !data))
        return ps_fail(PS_EINVAL, "writing %s: entry '%s' has room for %lld more bytes, but %lld were "
                                  "passed", w->file.path,
                       e->name, (long long)(e->nbytes - e->written), (long long)nbytes);
    if (!nbytes) return 0;
    PS_TRY(ps_tempfile_write(&w->file, e->begin + e->written, data, nbytes));
    e->crc = zip_crc32(e->crc, data, nbytes);
    e->written += nbytes;
    return e->written < e->nbytes ? 0 : write_header(w, e);
}

static uint8_t *store_entry(const zipw *w, uint8_t *p, const zipw_entry *e)
{
    int wide_size = entry_wide_size(w, e), needs = wide_size ? NEEDS_ZIP64 : NEEDS_PLAIN;
    p = store_common(w, store(store_mark(p, 1, 2), (uint64_t)needs, 2), e, needs, wide_size);
    p = store(store(store(store(p, 0, 2), 0, 2), 0, 2), 0, 4);   /* comment, disk, attributes */
    p = store_name(store_narrow(w, p, e->header), e->name);
    if (wide_size) p = store(store(p, 1, 2), (uint64_t)wide_size - 4, 2);
    if (wide(w, e->nbytes)) p = store(store(p, (uint64_t)e->nbytes, 8), (uint64_t)e->nbytes, 8);
    if (wide(w, e->header)) p = store(p, (uint64_t)e->header, 8);
    return p;
}

static uint8_t *store_end(const zipw *w, uint8_t *p)
{
    uint64_t count = (uint64_t)w->count, narrow_count = count;
    if (wide_end(w)) {
        p = store(store_mark(p, 6, 6), END64_SIZE - 12, 8);
        p = store(store(p, NEEDS_ZIP64, 2), NEEDS_ZIP64, 2);
        p = store(store(store(store(p, 0, 4), 0, 4), count, 8), count, 8);
        p = store(store(p, (uint64_t)w->directory_nbytes, 8), (uint64_t)w->directory, 8);
        p = store(store_mark(p, 6, 7), 0, 4);
        p = store(store(p, (uint64_t)(w->directory + w->directory_nbytes), 8), 1, 4);
    }
    if (count >= NARROW_COUNT || wide(w, w->count)) narrow_count = NARROW_COUNT;
    p = store(store(store_mark(p, 5, 6), 0, 2), 0, 2);
    p = store_narrow(w, store(store(p, narrow_count, 2), narrow_count, 2), w->directory_nbytes);
    return store(store_narrow(w, p, w->directory), 0, 2);
}

int zipw_commit(zipw *w)
{
    for (int i = 0; i < w->count; i++)
        if (w->entries[i].written < w->entries[i].nbytes)
            return ps_fail(PS_ESTATE, "writing %s: entry '%s' has only %lld of its %lld bytes", w->file.path,
                           w->entries[i].name, (long long)w->entries[i].written, (long long)w->entries[i].nbytes);
    int64_t nbytes = w->nbytes - w->directory;
    uint8_t *directory = ps_alloc((size_t)nbytes), *p = directory;
    if (!directory) return ps_fail_nomem(nbytes);
    for (int i = 0; i < w->count; i++) p = store_entry(w, p, &w->entries[i]);
    store_end(w, p);
    int rc = ps_tempfile_write(&w->file, w->directory, directory, nbytes);
    ps_free(directory);
    if (rc < 0) return rc;
    return ps_tempfile_commit(&w->file);
}

void zipw_close(zipw *w)
{
    ps_tempfile_close(&w->file);
    for (int i = 0; i < w->count; i++) ps_free(w->entries[i].name);
    ps_free(w->entries);
    zipw_init(w);
}
