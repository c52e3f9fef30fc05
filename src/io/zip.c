/* SPDX-License-Identifier: BSD-3-Clause
 * Reads ZIP archives of entries that are not compressed. This file reads only the directory at the end of the archive
 * and the short header of each entry. The input is treated as hostile until it is checked. */
#include "io/zip.h"
#include "base/alloc.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { END_SIZE = 22, LOCATOR_SIZE = 20, END64_SIZE = 56, ENTRY_SIZE = 46, LOCAL_SIZE = 30, MAX_COMMENT = 65535 };
#define VERIFY_PIECE ((int64_t)32 << 20)
/* Maximum size of a directory in bytes. This is enough for about four million storages. */
#define MAX_DIRECTORY ((int64_t)256 << 20)

/* -- checksum. crc_by_table() processes sixteen bytes per step with tables. crc_by_products() uses carry-less products,
 * if the processor supports them. */
enum { CRC_STEP = 16, FOLD_STEP = 64 };
static uint32_t table[CRC_STEP][256];       /* [t][b] checksum of byte b followed by t zero bytes */

static void make_tables(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (c & 1 ? 0xedb88320u : 0);
        table[0][i] = c;
    }
    for (int t = 1; t < CRC_STEP; t++)
        for (int i = 0; i < 256; i++)
            table[t][i] = table[t - 1][i] >> 8 ^ table[0][table[t - 1][i] & 255];
}

static uint64_t load(const uint8_t *p, int nbytes)
{
    uint64_t v = 0;
    for (int i = 0; i < nbytes; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static uint32_t load32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Updates the register c with n bytes and returns it. The register is the complement of the checksum. */
static uint32_t crc_by_table(uint32_t c, const uint8_t *p, int64_t n)
{
    for (; n >= CRC_STEP; p += CRC_STEP, n -= CRC_STEP) {
        uint32_t a = load32(p) ^ c, b = load32(p + 4), d = load32(p + 8), e = load32(p + 12);
        c = table[15][a & 255] ^ table[14][a >> 8 & 255] ^ table[13][a >> 16 & 255] ^ table[12][a >> 24] ^
            table[11][b & 255] ^ table[10][b >> 8 & 255] ^ table[9][b >> 16 & 255] ^ table[8][b >> 24] ^
            table[7][d & 255] ^ table[6][d >> 8 & 255] ^ table[5][d >> 16 & 255] ^ table[4][d >> 24] ^
            table[3][e & 255] ^ table[2][e >> 8 & 255] ^ table[1][e >> 16 & 255] ^ table[0][e >> 24];
    }
    for (; n > 0; p++, n--) c = c >> 8 ^ table[0][(c ^ *p) & 255];
    return c;
}

#ifdef __x86_64__
/* Moves the 16 bytes x forward by a distance of d bits in the message, and adds them to the bytes `there`. `factors`
 * determines d, which is 128 or 512. The factors are X^(d + 31) and X^(d - 33) modulo the polynomial in X,
 * reflected. */
__attribute__((target("pclmul,sse4.1"))) static inline __m128i fold(__m128i x, __m128i factors, __m128i there)
{
    return _mm_xor_si128(there, _mm_xor_si128(_mm_clmulepi64_si128(x, factors, 0x00),
                                              _mm_clmulepi64_si128(x, factors, 0x11)));
}

/* Updates the register c with n bytes and returns it. n must be a positive multiple of FOLD_STEP. Four lanes fold the
 * message into sixteen bytes. crc_by_table() computes the same register from these sixteen bytes as from the whole
 * message. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_by_products(uint32_t c, const uint8_t *p, int64_t n)
{
    const __m128i by64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by16 = _mm_set_epi64x(0xccaa009e, 0x1751997d0);
    __m128i lane[4];
    uint8_t rest[16];
    for (int i = 0; i < 4; i++) lane[i] = _mm_loadu_si128((const __m128i *)(p + 16 * i));
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)c));
    for (p += FOLD_STEP, n -= FOLD_STEP; n > 0; p += FOLD_STEP, n -= FOLD_STEP)
        for (int i = 0; i < 4; i++) lane[i] = fold(lane[i], by64, _mm_loadu_si128((const __m128i *)(p + 16 * i)));
    for (int i = 1; i < 4; i++) lane[i] = fold(lane[i - 1], by16, lane[i]);
    _mm_storeu_si128((__m128i *)rest, lane[3]);
    return crc_by_table(0, rest, sizeof rest);
}

static bool has_products(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
#else
static uint32_t crc_by_products(uint32_t c, const uint8_t *p, int64_t n) { return crc_by_table(c, p, n); }
static bool has_products(void) { return false; }
#endif

uint32_t zip_crc32(uint32_t crc, const void *data, int64_t nbytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_tables);
    const uint8_t *p = data;
    int64_t folded = nbytes >= FOLD_STEP && has_products() ? nbytes - nbytes % FOLD_STEP : 0;
    uint32_t c = ~crc;
    if (folded) c = crc_by_products(c, p, folded);
    return ~crc_by_table(c, p + folded, nbytes - folded);
}

/* -- the directory ----------------------------------------------------------------------------------------------- */
static int bad(const zip *z, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int bad(const zip *z, const char *fmt, ...)
{
    char what[500];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return ps_fail(PS_EFORMAT, "%s: not a whole ZIP archive: %s", z->map.path, what);
}

static bool has_mark(const uint8_t *p, int a, int b) { return p[0] == 'P' && p[1] == 'K' && p[2] == a && p[3] == b; }

typedef struct directory { int64_t begin, nbytes; uint64_t count; } directory;

/* Returns the offset of the end record, or -1 if the file has no end record. A comment may follow the end record. */
static int64_t find_end(const zip *z)
{
    const uint8_t *bytes = z->map.bytes;
    for (int64_t at = z->map.nbytes - END_SIZE; at >= 0 && at >= z->map.nbytes - END_SIZE - MAX_COMMENT; at--)
        if (has_mark(bytes + at, 5, 6) && at + END_SIZE + (int64_t)load(bytes + at + 20, 2) == z->map.nbytes) return at;
    return -1;
}

/* If the file has a ZIP64 record, reads the values from it that did not fit into the end record. `end` is the offset of
 * the end record. */
static int read_end64(const zip *z, int64_t end, uint64_t *count, uint64_t *nbytes, uint64_t *begin, int64_t *limit)
{
    const uint8_t *bytes = z->map.bytes;
    if (end < LOCATOR_SIZE || !has_mark(bytes + end - LOCATOR_SIZE, 6, 7)) return 0;
    uint64_t at = load(bytes + end - LOCATOR_SIZE + 8, 8);
    if (end - LOCATOR_SIZE < END64_SIZE || at > (uint64_t)(end - LOCATOR_SIZE - END64_SIZE) ||
        !has_mark(bytes + at, 6, 6))
        return bad(z, "its ZIP64 record is not at the position in the file's end record");
    if (*count == 0xffff) *count = load(bytes + at + 32, 8);
    if (*nbytes == 0xffffffff) *nbytes = load(bytes + at + 40, 8);
    if (*begin == 0xffffffff) *begin = load(bytes + at + 48, 8);
    *limit = (int64_t)at;
    return 0;
}

static int find_directory(const zip *z, directory *d)
{
    int64_t end = find_end(z), limit = end;
    if (end < 0) return bad(z, "its end is missing (was the file cut, or is it another kind of file?)");
    const uint8_t *p = z->map.bytes + end;
    uint64_t count = load(p + 10, 2), nbytes = load(p + 12, 4), begin = load(p + 16, 4);
    PS_TRY(read_end64(z, end, &count, &nbytes, &begin, &limit));
    if (begin > (uint64_t)limit || nbytes > (uint64_t)limit - begin || count > nbytes / ENTRY_SIZE)
        return bad(z, "its directory does not fit into the file");
    if (nbytes > (uint64_t)MAX_DIRECTORY)
        return bad(z, "its directory has %llu bytes, but at most %lld are supported", (unsigned long long)nbytes,
                   (long long)MAX_DIRECTORY);
    *d = (directory){ .begin = (int64_t)begin, .nbytes = (int64_t)nbytes, .count = count };
    return 0;
}

/* Replaces each size or offset in `fields` that is 0xffffffff. This number means that the value is in the ZIP64 field
 * of the n bytes `extra`. */
static int read_wide(const zip *z, const char *name, const uint8_t *extra, int64_t n, uint64_t *const fields[3])
{
    if (*fields[0] != 0xffffffff && *fields[1] != 0xffffffff && *fields[2] != 0xffffffff) return 0;
    while (n >= 4) {
        int64_t length = (int64_t)load(extra + 2, 2);
        if (length > n - 4) break;
        if (load(extra, 2) != 1) {
            extra += 4 + length, n -= 4 + length;
            continue;
        }
        const uint8_t *from = extra + 4;
        for (int i = 0; i < 3; i++) {
            if (*fields[i] != 0xffffffff) continue;
            if (length < 8) return bad(z, "entry '%.100s' has no 64-bit sizes", name);
            *fields[i] = load(from, 8);
            from += 8, length -= 8;
        }
        return 0;
    }
    return bad(z, "entry '%.100s' has no 64-bit sizes", name);
}

/* Reads one entry of the directory at p. Checks that the entry is inside the file and agrees with its local header. */
static int place_entry(zip *z, const directory *d, const uint8_t *p, zip_entry *e)
{
    uint64_t packed = load(p + 20, 4), nbytes = load(p + 24, 4), header = load(p + 42, 4);
    size_t name_length = strlen(e->name);
    PS_TRY(read_wide(z, e->name, p + ENTRY_SIZE + name_length, (int64_t)load(p + 30, 2),
                     (uint64_t *const[]){ &nbytes, &packed, &header }));
    if (load(p + 8, 2) & 1) return bad(z, "entry '%.100s' is encrypted", e->name);
    if (load(p + 10, 2) != 0)
        return ps_fail(PS_EFORMAT, "%s: entry '%.100s' is compressed (method %d); only stored entries are read, as "
                       "PyTorch writes them: unpack the file and pack it with zip -0 -r", z->map.path, e->name,
                       (int)load(p + 10, 2));
    if (packed != nbytes) return bad(z, "entry '%.100s' has different compressed and uncompressed sizes", e->name);
    if (header > (uint64_t)d->begin || (uint64_t)d->begin - header < LOCAL_SIZE)
        return bad(z, "entry '%.100s' is outside the file", e->name);
    const uint8_t *local = z->map.bytes + header;
    int64_t local_name = (int64_t)load(local + 26, 2), room = d->begin - (int64_t)header - LOCAL_SIZE;
    int64_t before = local_name + (int64_t)load(local + 28, 2);
    if (!has_mark(local, 3, 4) || before > room || (size_t)local_name != name_length ||
        memcmp(local + LOCAL_SIZE, e->name, name_length))
        return bad(z, "the header of entry '%.100s' is not at the position in the directory", e->name);
    if (nbytes > (uint64_t)(room - before)) return bad(z, "entry '%.100s' is outside the file", e->name);
    e->begin = (int64_t)header + LOCAL_SIZE + before;
    e->nbytes = (int64_t)nbytes;
    e->crc = (uint32_t)load(p + 16, 4);
    return 0;
}

static int name_order(const void *a, const void *b)
{
    return strcmp(((const zip_entry *)a)->name, ((const zip_entry *)b)->name);
}

int zip_open(zip *z)
{
    directory d = { 0 };
    PS_TRY(find_directory(z, &d));
    size_t names_nbytes = (size_t)d.nbytes + 1, entries_nbytes = (size_t)d.count * sizeof *z->entries + 1;
    if (!(z->names = ps_alloc(names_nbytes))) return ps_fail_nomem(names_nbytes);
    if (!(z->entries = ps_alloc0(entries_nbytes))) return ps_fail_nomem(entries_nbytes);
    const uint8_t *p = z->map.bytes + d.begin, *end = p + d.nbytes;
    char *names = z->names;
    for (uint64_t i = 0; i < d.count; i++) {
        if (end - p < ENTRY_SIZE || !has_mark(p, 1, 2)) return bad(z, "its directory ends early");
        int64_t name_length = (int64_t)load(p + 28, 2);
        int64_t length = ENTRY_SIZE + name_length + (int64_t)load(p + 30, 2) + (int64_t)load(p + 32, 2);
        if (length > end - p) return bad(z, "its directory ends early");
        if (memchr(p + ENTRY_SIZE, 0, (size_t)name_length)) return bad(z, "a name contains a zero byte");
        zip_entry *e = &z->entries[z->count];
        /* A directory entry is longer than its name and the final 0, so all names fit. */
        e->name = names;
        memcpy(names, p + ENTRY_SIZE, (size_t)name_length);
        names[name_length] = 0;
        names += name_length + 1;
        PS_TRY(place_entry(z, &d, p, e));
        z->has_checksums = z->has_checksums || e->crc;
        z->count++;
        p += length;
    }
    if (z->count) qsort(z->entries, (size_t)z->count, sizeof *z->entries, name_order);
    for (int i = 1; i < z->count; i++)
        if (!strcmp(z->entries[i - 1].name, z->entries[i].name))
            return bad(z, "entry '%.100s' occurs twice", z->entries[i].name);
    return 0;
}

void zip_close(zip *z)
{
    ps_free(z->entries);
    ps_free(z->names);
    ps_map_close(&z->map);
    *z = (zip){ .map.fd = -1 };
}

int zip_find(const zip *z, const char *name)
{
    const zip_entry key = { .name = name };
    const zip_entry *e = z->count ? bsearch(&key, z->entries, (size_t)z->count, sizeof key, name_order) : NULL;
    return e ? (int)(e - z->entries) : -1;
}

int zip_verify(zip *z, int i)
{
    zip_entry *e = &z->entries[i];
    if (e->verified || !z->has_checksums) return 0;
    PS_TRY(ps_map_check(&z->map));
    const uint8_t *from = z->map.bytes + e->begin;
    uint32_t crc = 0;
    for (int64_t left = e->nbytes, n; left > 0; from += n, left -= n) {
        n = left < VERIFY_PIECE ? left : VERIFY_PIECE;
        crc = zip_crc32(crc, from, n);
        if (e->nbytes > VERIFY_PIECE) ps_map_drop(&z->map, from, n);   /* keep at most one piece of a large entry */
    }
    if (crc != e->crc)
        return ps_fail(PS_EFORMAT, "%s: the bytes of '%.100s' are damaged: their checksum is not the checksum in the "
                       "file; copy the file again, or pass verify = false to use them as they are",
                       z->map.path, e->name);
    e->verified = true;
    return 0;
}
