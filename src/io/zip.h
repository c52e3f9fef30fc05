/* SPDX-License-Identifier: BSD-3-Clause
 * ZIP archives as PyTorch writes them. No entry is compressed. Only src/io includes this header.
 *
 * An opened zip contains only checked entries. The bytes of every entry are inside the file and before the directory,
 * and all names differ. The reader and the writer support sizes and offsets of 64 bits (ZIP64). */
#ifndef PS_IO_ZIP_H
#define PS_IO_ZIP_H
#include "io/file.h"
#include <stdbool.h>

/* Returns the checksum of some bytes that are followed by `data`. `crc` is the checksum of the bytes before `data`, or
 * 0 if `data` is the beginning. */
uint32_t zip_crc32(uint32_t crc, const void *data, int64_t nbytes);

typedef struct zip_entry {
    const char *name;       /* points into zip.names */
    int64_t begin, nbytes;  /* begin: offset of the entry's data in the file. nbytes: size of the data in bytes. */
    uint32_t crc;
    bool verified;
} zip_entry;

typedef struct zip {
    ps_map map;
    char *names;
    zip_entry *entries;     /* [count] in the order of their names */
    int count;
    /* False if the program that wrote the archive stored 0 instead of checksums, which is an option of PyTorch. */
    bool has_checksums;
} zip;
/* Reads and checks the directory of z->map. The other fields of z must be zero. If this fails, the caller closes z. */
int zip_open(zip *z);
void zip_close(zip *z);
int zip_find(const zip *z, const char *name);       /* returns the entry's index, or -1 */
/* If the archive has checksums and entry i is not yet verified, compares the entry's bytes with its checksum. Returns
 * PS_EFORMAT if the checksum is wrong. */
int zip_verify(zip *z, int i);

/* A writer. Call zipw_add for all entries, zipw_begin, zipw_write for the bytes of each entry, and then zipw_commit.
 * All sizes must be known at zipw_begin. */
typedef struct zipw_entry {
    char *name;             /* owned */
    int64_t nbytes, written;
    int64_t header, begin;  /* offsets in the file; `begin` is a multiple of 64 */
    uint32_t crc;
} zipw_entry;
typedef struct zipw {
    ps_tempfile file;
    zipw_entry *entries;
    int count, room;
    int64_t directory, directory_nbytes, nbytes;
    /* Numbers that are at least wide_from are written as ZIP64. wide_from is 0xffffffff, or less in tests. */
    int64_t wide_from;
} zipw;
void zipw_init(zipw *w);
int zipw_add(zipw *w, const char *name, int64_t nbytes);            /* returns the entry's index: 0, 1, 2, ... */
int zipw_begin(zipw *w, const char *path);                          /* reserves space for the whole file */
int zipw_write(zipw *w, int i, const void *data, int64_t nbytes);   /* writes the next bytes of entry i */
int zipw_commit(zipw *w);
void zipw_close(zipw *w);                                           /* closes the file; removes an uncommitted file */
#endif
