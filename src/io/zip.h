/* SPDX-License-Identifier: BSD-3-Clause
 * ZIP archives as PyTorch uses them: every entry is stored, and none is compressed. Included by src/io only.
 *
 * An opened zip has only checked entries: every entry's bytes lie inside the file, before the directory, and no name
 * occurs twice. Sizes and positions may be 64 bits wide (ZIP64), both in reading and in writing. */
#ifndef PS_IO_ZIP_H
#define PS_IO_ZIP_H
#include "io/file.h"
#include <stdbool.h>

uint32_t zip_crc32(uint32_t crc, const void *data, int64_t nbytes);    /* crc: 0, or the checksum of the preceding
                                                                        * bytes */

typedef struct zip_entry {
    const char *name;       /* in zip.names */
    int64_t begin, nbytes;  /* offset and size of the entry's data in the file */
    uint32_t crc;
    bool verified;
} zip_entry;

typedef struct zip {
    ps_map map;
    char *names;
    zip_entry *entries;     /* [count] in the order of names */
    int count;
    bool has_checksums;     /* false if the writer computed no checksums and stored 0 for each entry (an option of
                             * PyTorch) */
} zip;
/* Reads and checks the directory of z->map. The other fields are initially zero. On failure the caller closes z. */
int zip_open(zip *z);
void zip_close(zip *z);
int zip_find(const zip *z, const char *name);       /* index of the entry, or -1 */
/* Compares an entry's bytes with its checksum, once, if the archive has checksums. Returns PS_EFORMAT if they
 * differ. */
int zip_verify(zip *z, int i);

/* A writer: add all entries, call begin (which needs the whole size), write each entry, then call commit. */
typedef struct zipw_entry {
    char *name;             /* owned */
    int64_t nbytes, written;
    int64_t header, begin;  /* offsets in the file; begin is a multiple of 64 */
    uint32_t crc;
} zipw_entry;
typedef struct zipw {
    ps_tempfile file;
    zipw_entry *entries;
    int count, room;
    int64_t directory, directory_nbytes, nbytes;
    int64_t wide_from;      /* numbers from this value on are written as ZIP64; 0xffffffff, or less in tests */
} zipw;
void zipw_init(zipw *w);
int zipw_add(zipw *w, const char *name, int64_t nbytes);            /* returns the entry's index, from 0 */
int zipw_begin(zipw *w, const char *path);                          /* reserves space for the whole file */
int zipw_write(zipw *w, int i, const void *data, int64_t nbytes);   /* writes the next bytes of entry i */
int zipw_commit(zipw *w);
void zipw_close(zipw *w);                                           /* closes the file; without a commit, removes it */
#endif
