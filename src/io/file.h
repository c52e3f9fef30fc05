/* SPDX-License-Identifier: BSD-3-Clause
 * Files as the readers and writers of src/io use them: a read-only map that knows its path, and a temporary file that
 * takes the place of another only when it is complete. Included by src/io only.
 *
 * A map cannot be protected from somebody who truncates the file under it (the kernel answers such a read with
 * SIGBUS), so readers call ps_map_check before they touch bytes: it turns every truncation up to that moment into an
 * error. ps_map_read touches none: there every truncation is an error. Replacing a file by rename, as the writers here
 * do, never disturbs a map: it keeps the old file. */
#ifndef PS_IO_FILE_H
#define PS_IO_FILE_H
#include <stdbool.h>
#include "base/error.h"

#define PS_NEED(arg) \
    do { if (!(arg)) return ps_fail(PS_EINVAL, "%s: argument '%s' is missing (NULL)", __func__, #arg); } while (0)

typedef struct ps_map {
    char *path;             /* owned */
    const uint8_t *bytes;   /* [nbytes] */
    int64_t nbytes;
    int64_t written;        /* when the file was last written to, ns */
    int fd;                 /* -1: the bytes are the caller's, nothing to check or unmap */
} ps_map;
int ps_map_open(ps_map *m, const char *path);
/* For bytes that are already in memory and outlive the map; path is only for messages. */
int ps_map_borrow(ps_map *m, const char *path, const void *bytes, int64_t nbytes);
/* Reads bytes at .. at + nbytes, which are in the map, by read calls. PS_EIO: the file was truncated, or the disk
 * fails. */
int ps_map_read(const ps_map *m, int64_t at, void *dst, int64_t nbytes);
int ps_map_check(const ps_map *m);      /* PS_EIO when the file has become shorter than it was when mapped */
/* Bytes of the file in private pages: writes to them change neither the file nor the map. */
typedef struct ps_lent_map {
    void *pages;            /* NULL: no bytes */
    int64_t nbytes;         /* of the pages */
    void *bytes;            /* the first requested byte */
} ps_lent_map;
int ps_map_lend(const ps_map *m, int64_t at, int64_t nbytes, ps_lent_map *out);     /* at: in the file */
void ps_map_unlend(const ps_lent_map *lent);
/* PS_EIO if the file was written to, by any process, or became shorter since it was mapped. */
int ps_map_unchanged(const ps_map *m);
void ps_map_drop(const ps_map *m, const void *begin, int64_t nbytes);  /* not needed soon: frees their pages */
void ps_map_close(ps_map *m);           /* also of a zeroed one */
/* Copies elements first .. first + numel - 1, row-major, of a strided tensor, whose element 0 is at `data`, to dst.
 * `each` is the bytes of an element, strides count elements, and the caller has checked that all of it is there. */
void ps_copy_strided(const void *data, int64_t each, int ndim, const int64_t *shape, const int64_t *stride,
                     int64_t first, void *dst, int64_t numel);

typedef struct ps_tempfile {
    char *path, *temp;      /* owned; temp is NULL when there is nothing to remove */
    int fd, folder;         /* folder: of both names, which stay valid if the folder is renamed */
    bool sparse;            /* in a dry run (ps_file_divert): zeros, as of tensors without values, take no space */
    int64_t limit;          /* the process's largest file (RLIMIT_FSIZE): exceeding it would raise a deadly signal */
} ps_tempfile;
#define PS_TEMPFILE_NONE ((ps_tempfile){ .fd = -1, .folder = -1 })     /* a closed one */
/* Creates "path.tmp-PID-N" in path's folder. If path is a link, its target is meant, even if it does not exist yet. */
int ps_tempfile_open(ps_tempfile *f, const char *path);
int ps_tempfile_reserve(ps_tempfile *f, int64_t nbytes);    /* sets the size, and reserves its blocks if possible */
int ps_tempfile_write(ps_tempfile *f, int64_t offset, const void *data, int64_t nbytes);
/* Writes large data that is complete in memory, without the page cache if the file system allows it and offset and data
 * are multiples of 4096: this makes no copy, and evicts nothing else from memory. */
int ps_tempfile_stream(ps_tempfile *f, int64_t offset, const void *data, int64_t nbytes);
int ps_tempfile_commit(ps_tempfile *f);                     /* fsync, rename over path, fsync the folder */
void ps_tempfile_close(ps_tempfile *f);                   /* removes an uncommitted file; also valid for a closed one */
bool ps_files_are_diverted(void);                           /* ps_file_divert has set a folder */
#endif
