/* SPDX-License-Identifier: BSD-3-Clause
 * Files for the readers and writers of src/io: a read-only map that knows its path, and a temporary file that takes
 * the place of another only when it is complete. Included by src/io only.
 *
 * The kernel ends the reader of a map with SIGBUS if another process truncates the file. Readers therefore call
 * ps_map_check before they read bytes, which turns every earlier truncation into an error. ps_map_read does not use
 * the mapped pages, so for it every truncation is an error. If a file is replaced by a rename, as the writers here
 * do, the map still shows the old file. */
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
    int64_t written;        /* time of the last write to the file, in ns */
    int64_t changed;        /* time of the last change of the file or its inode, in ns, which programs cannot set */
    int fd;                 /* -1 if the bytes are the caller's: nothing to check or unmap */
    int direct;             /* descriptor whose reads bypass the page cache, or -1; valid if asked_direct */
    bool asked_direct;
} ps_map;
int ps_map_open(ps_map *m, const char *path);
/* Makes a map of bytes that are already in memory and outlive it. `path` is only used in messages. */
int ps_map_borrow(ps_map *m, const char *path, const void *bytes, int64_t nbytes);
/* Reads nbytes bytes from offset `at` of the map into dst, with read calls. PS_EIO: the file was truncated or the
 * disk failed. */
int ps_map_read(const ps_map *m, int64_t at, void *dst, int64_t nbytes);
/* Returns a descriptor of the file whose reads bypass the page cache (O_DIRECT), or -1 if the file system has no such
 * reads. Offsets, sizes and addresses must be multiples of PS_DIRECT_ALIGN. The map closes the descriptor. */
int ps_map_direct(ps_map *m);
int ps_map_check(const ps_map *m);      /* PS_EIO if the file is shorter than when it was mapped */
/* Maps bytes of the file in private pages: writes to the pages change neither the file nor the map. */
typedef struct ps_lent_map {
    void *pages;            /* NULL if there are no bytes */
    int64_t nbytes;         /* size of the pages in bytes */
    void *bytes;            /* address of the first requested byte */
} ps_lent_map;
int ps_map_lend(const ps_map *m, int64_t at, int64_t nbytes, ps_lent_map *out);     /* at: offset in the file */
void ps_map_unlend(const ps_lent_map *lent);
/* Returns PS_EIO if any process has written to the file, or the file has become shorter, since it was mapped. */
int ps_map_unchanged(const ps_map *m);
/* Computes a hash of the file's bytes from the XXH3 of its blocks. */
int ps_map_hash(const ps_map *m, uint64_t *out);
void ps_map_drop(const ps_map *m, const void *begin, int64_t nbytes);  /* frees the pages of bytes that are not
                                                                        * needed soon */
void ps_map_close(ps_map *m);           /* `map` can also be zeroed */
/* Copies elements first to first + numel - 1 of a strided tensor, in row-major order, to dst. data: address of
 * element 0. each: bytes of an element. Strides count elements. The caller has checked that all these bytes exist. */
void ps_copy_strided(const void *data, int64_t each, int ndim, const int64_t *shape, const int64_t *stride,
                     int64_t first, void *dst, int64_t numel);

typedef struct ps_tempfile {
    char *path, *temp;      /* owned; temp is NULL if there is no file to remove */
    int fd, folder;         /* folder: descriptor of the folder of both files; it may be renamed */
    bool sparse;            /* dry run (ps_file_divert): zeros, such as tensors without values, use no space */
    int64_t limit;          /* largest file the process may write (RLIMIT_FSIZE); a larger one raises a deadly signal */
} ps_tempfile;
#define PS_TEMPFILE_NONE ((ps_tempfile){ .fd = -1, .folder = -1 })     /* a closed file */
/* Creates "path.tmp-PID-N" in path's folder. If path is a link, its target is used, which need not exist. */
int ps_tempfile_open(ps_tempfile *f, const char *path);
int ps_tempfile_reserve(ps_tempfile *f, int64_t nbytes);    /* sets the size, and reserves blocks if possible */
int ps_tempfile_write(ps_tempfile *f, int64_t offset, const void *data, int64_t nbytes);
/* Writes large data that is complete in memory. Bypasses the page cache if the file system allows it and offset and
 * data are multiples of 4096: this makes no copy, and keeps other data in the cache. */
int ps_tempfile_stream(ps_tempfile *f, int64_t offset, const void *data, int64_t nbytes);
int ps_tempfile_commit(ps_tempfile *f);                     /* fsyncs the file, renames it to path, and fsyncs the
                                                             * folder */
void ps_tempfile_close(ps_tempfile *f);                   /* removes an uncommitted file; also accepts a closed file */
bool ps_files_are_diverted(void);                           /* returns true if ps_file_divert has set a folder */
#endif
