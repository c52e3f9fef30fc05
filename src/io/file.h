/* SPDX-License-Identifier: BSD-3-Clause
 * Files for the readers and writers of src/io. A ps_map is a read-only map that knows its path. A ps_tempfile is a
 * temporary file that replaces another file only when it is complete. Only src/io includes this header.
 *
 * If another process truncates a mapped file, the kernel sends SIGBUS to the process that reads the missing pages.
 * Therefore readers call ps_map_check before they read bytes. ps_map_check returns an error if the file was truncated
 * before the call. ps_map_read does not use the mapped pages, so it returns an error even if the file is truncated
 * during the call. The writers in src/io replace a file by a rename. After the rename, a map of the old file still
 * shows the old bytes. */
#ifndef PS_IO_FILE_H
#define PS_IO_FILE_H
#include <stdbool.h>
#include "base/error.h"

#define PS_NEED(arg) \
    do { if (!(arg)) return ps_fail(PS_EINVAL, "%s: argument '%s' is missing (NULL)", __func__, #arg); } while (0)

typedef struct ps_map {
    char *path;             /* owned by the map */
    const uint8_t *bytes;   /* [nbytes] */
    int64_t nbytes;
    int64_t written;        /* time of the last write to the file in ns */
    int64_t changed;        /* time of the last change of the file or its inode in ns; programs cannot set this time */
    int fd;                 /* -1 if the bytes belong to the caller; the map then has no file and no pages of its own */
    int direct;             /* descriptor for reads that bypass the page cache, or -1; valid if asked_direct is true */
    bool asked_direct;
} ps_map;
int ps_map_open(ps_map *m, const char *path);
/* Makes a map of `bytes`, which must not be freed before the map is closed. Error messages contain `path`. */
int ps_map_borrow(ps_map *m, const char *path, const void *bytes, int64_t nbytes);
/* Reads nbytes bytes at offset `at` of the file into dst with read calls. Returns PS_EIO if the file was truncated or
 * the disk failed. */
int ps_map_read(const ps_map *m, int64_t at, void *dst, int64_t nbytes);
/* Returns a descriptor of the file for reads that bypass the page cache (O_DIRECT), or -1 if the file system does not
 * support such reads. Offsets, sizes and addresses of the reads must be multiples of PS_DIRECT_ALIGN. The map closes
 * the descriptor. */
int ps_map_direct(ps_map *m);
int ps_map_check(const ps_map *m);      /* returns PS_EIO if the file is shorter than when it was mapped */
/* Private pages that show bytes of a map's file. Writing to these pages changes neither the file nor the map. */
typedef struct ps_lent_map {
    void *pages;            /* NULL if 0 bytes were requested */
    int64_t nbytes;         /* size of `pages` in bytes */
    void *bytes;            /* address in `pages` of the first requested byte */
} ps_lent_map;
/* Maps nbytes bytes of the file, starting at offset `at`, to private pages. ps_map_unlend unmaps the pages. */
int ps_map_lend(const ps_map *m, int64_t at, int64_t nbytes, ps_lent_map *out);
void ps_map_unlend(const ps_lent_map *lent);
/* Returns PS_EIO if any process has written to the file or has truncated it since it was mapped. */
int ps_map_unchanged(const ps_map *m);
/* Computes a hash of the file's contents from the XXH3 hashes of its blocks. */
int ps_map_hash(const ps_map *m, uint64_t *out);
void ps_map_drop(const ps_map *m, const void *begin, int64_t nbytes);  /* frees pages whose bytes are not needed soon */
void ps_map_close(ps_map *m);           /* also accepts a map that is zeroed */
/* Copies elements [first, first + numel) of a strided tensor to dst, in row-major order. `data` is the address of
 * element 0, `each` is the size of an element in bytes, and `stride` counts elements. The caller must check first that
 * the bytes of all these elements exist. */
void ps_copy_strided(const void *data, int64_t each, int ndim, const int64_t *shape, const int64_t *stride,
                     int64_t first, void *dst, int64_t numel);

typedef struct ps_tempfile {
    char *path, *temp;      /* owned; temp is NULL if there is no temporary file to remove */
    int fd, folder;         /* folder: descriptor of the folder of `path` and `temp`; the folder may be renamed */
    bool sparse;            /* true in a dry run (ps_file_divert); blocks of zeros become holes and use no space */
    /* The maximum size in bytes of a file that the process writes (RLIMIT_FSIZE). Writing beyond this size would raise
     * a signal that ends the process. */
    int64_t limit;
} ps_tempfile;
#define PS_TEMPFILE_NONE ((ps_tempfile){ .fd = -1, .folder = -1 })     /* a closed file */
/* Creates a temporary file "path.tmp-PID-N" in the folder of `path`. If `path` is a symbolic link, the link's target is
 * used instead of `path`. The target need not exist. */
int ps_tempfile_open(ps_tempfile *f, const char *path);
int ps_tempfile_reserve(ps_tempfile *f, int64_t nbytes);    /* sets the size, and reserves blocks if possible */
int ps_tempfile_write(ps_tempfile *f, int64_t offset, const void *data, int64_t nbytes);
/* Writes large data that is complete in memory. If the file system supports it, and if `offset` and the address `data`
 * are multiples of 4096, the write bypasses the page cache. Then the kernel does not copy the data, and does not evict
 * other data from the page cache. */
int ps_tempfile_stream(ps_tempfile *f, int64_t offset, const void *data, int64_t nbytes);
int ps_tempfile_commit(ps_tempfile *f);                     /* fsyncs the file, renames it, and fsyncs the folder */
void ps_tempfile_close(ps_tempfile *f);                   /* removes an uncommitted file; also accepts a closed file */
bool ps_files_are_diverted(void);                           /* returns true if ps_file_divert has set a folder */
#endif
