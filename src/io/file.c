/* SPDX-License-Identifier: BSD-3-Clause
 * Maps files and replaces files atomically (file.h). All calls from src/io to the operating system are in this file.
 * Invariant: the file at the final path is always either the old file or the complete new file, even after a crash. */
#define _GNU_SOURCE
#include "io/file.h"
#include "base/alloc.h"
#include "base/fd.h"
#include "base/log.h"
#include "io/map_fault.h"
#include "ps_test.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* -- maps -------------------------------------------------------------------------------------------------------- */
static int64_t nanoseconds(struct timespec t) { return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec; }
static int64_t time_of(const struct stat *st) { return nanoseconds(st->st_mtim); }

static int map_file(ps_map *m)
{
    /* O_NONBLOCK: if the path is a pipe, open must not wait for a writer. The check below then rejects the pipe. */
    char other[PATH_MAX];
    int diverted = ps_file_diverted(m->path, 0, other, sizeof other);
    PS_TRY(diverted);
    const char *path = diverted ? other : m->path;
    do m->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); while (m->fd < 0 && errno == EINTR);
    if (m->fd < 0) return ps_fail(PS_EIO, "cannot open %s: %s", m->path, strerror(errno));
    struct stat st;
    if (fstat(m->fd, &st) < 0) return ps_fail(PS_EIO, "cannot read %s: %s", m->path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return ps_fail(PS_EIO, "cannot read %s: it is %s, not a file", m->path,
                       S_ISDIR(st.st_mode) ? "a folder" : "a pipe or device");
    m->nbytes = st.st_size;
    m->written = time_of(&st);
    m->changed = nanoseconds(st.st_ctim);
    if (!m->nbytes) {
        m->bytes = (const uint8_t *)"";
        return 0;
    }
    void *p = mmap(NULL, (size_t)m->nbytes, PROT_READ, MAP_PRIVATE, m->fd, 0);
    if (p == MAP_FAILED)
        return ps_fail(errno == ENOMEM ? PS_ENOMEM : PS_EIO, "cannot map %s (%lld bytes): %s", m->path,
                       (long long)m->nbytes, strerror(errno));
    m->bytes = p;
    ps_map_fault_add(p, m->nbytes, m->path);
    return 0;
}

int ps_map_open(ps_map *m, const char *path)
{
    *m = (ps_map){ .fd = -1 };
    PS_NEED(path);
    if (!(m->path = ps_strdup(path))) return ps_fail_nomem(strlen(path) + 1);
    int rc = map_file(m);
    if (rc < 0) ps_map_close(m);
    return rc;
}

int ps_map_borrow(ps_map *m, const char *path, const void *bytes, int64_t nbytes)
{
    *m = (ps_map){ .fd = -1, .bytes = bytes, .nbytes = nbytes };
    if (!(m->path = ps_strdup(path))) return ps_fail_nomem(strlen(path) + 1);
    return 0;
}

/* Returns PS_EIO if the file is shorter than when it was mapped. */
static int check_size(const ps_map *m, struct stat *st)
{
    if (fstat(m->fd, st) < 0) return ps_fail(PS_EIO, "cannot read %s: %s", m->path, strerror(errno));
    if (st->st_size < m->nbytes)
        return ps_fail(PS_EIO, "%s was truncated from %lld to %lld bytes while it was in use",
                       m->path, (long long)m->nbytes,
                       (long long)st->st_size);
    return 0;
}

int ps_map_check(const ps_map *m)
{
    struct stat st;
    return m->fd < 0 ? 0 : check_size(m, &st);
}

int ps_map_unchanged(const ps_map *m)
{
    struct stat st;
    if (m->fd < 0) return 0;
    PS_TRY(check_size(m, &st));
    if (time_of(&st) == m->written) return 0;
    return ps_fail(PS_EIO, "%s was written to while tensors use its bytes (mmap = true): load it again, and "
                   "replace such a file instead of writing to it", m->path);
}

int ps_map_hash(const ps_map *m, uint64_t *out)
{
    enum { BLOCK = 3 << 18 };
    uint8_t *block = ps_alloc(BLOCK);
    if (!block) return ps_fail_nomem(BLOCK);
    uint64_t both[2] = { (uint64_t)m->nbytes };
    int rc = 0;
    for (int64_t at = 0; at < m->nbytes && rc == 0; at += BLOCK) {
        int64_t n = m->nbytes - at < BLOCK ? m->nbytes - at : BLOCK;
        rc = ps_map_read(m, at, block, n);
        both[1] = ps_xxh3(block, n);
        both[0] = ps_xxh3(both, sizeof both);
    }
    ps_free(block);
    *out = both[0];
    return rc;
}

int ps_map_lend(const ps_map *m, int64_t at, int64_t nbytes, ps_lent_map *out)
{
    *out = (ps_lent_map){ 0 };
    if (m->fd < 0) return ps_fail(PS_EUNSUP, "%s is not a regular file, so its bytes cannot be lent", m->path);
    if (!nbytes) return 0;
    int64_t before = at % sysconf(_SC_PAGESIZE);
    /* MAP_NORESERVE: reserve no memory for the pages, because possibly no page is ever written. */
    void *p = mmap(NULL, (size_t)(before + nbytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, m->fd,
                   (off_t)(at - before));
    if (p == MAP_FAILED)
        return ps_fail(errno == ENOMEM ? PS_ENOMEM : PS_EIO, "cannot map %lld bytes of %s from byte %lld on: %s",
                       (long long)nbytes, m->path, (long long)at, strerror(errno));
    ps_map_fault_add(p, before + nbytes, m->path);
    *out = (ps_lent_map){ p, before + nbytes, (char *)p + before };
    return 0;
}

void ps_map_unlend(const ps_lent_map *lent)
{
    if (!lent->pages) return;
    ps_map_fault_remove(lent->pages);
    munmap(lent->pages, (size_t)lent->nbytes);
}

int ps_map_direct(ps_map *m)
{
    char path[40];
    if (m->asked_direct) return m->direct;
    m->asked_direct = true, m->direct = -1;
    if (m->fd < 0) return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", m->fd);      /* the mapped file, even if it was replaced */
    do m->direct = ps_fd_above_stdio(open(path, O_RDONLY | O_DIRECT | O_CLOEXEC));
    while (m->direct < 0 && errno == EINTR);
    int err = m->direct < 0 ? errno : 0;
    if (m->direct >= 0 && !ps_fd_reads_directly(m->direct)) {
        err = errno;
        close(m->direct);
        m->direct = -1;
    }
    if (m->direct < 0)
        ps_log(PS_LOG_INFO, "%s: cannot be read directly (O_DIRECT): %s; weights that are read from it pass the page "
               "cache", m->path, strerror(err));
    return m->direct;
}

int ps_map_read(const ps_map *m, int64_t at, void *dst, int64_t nbytes)
{
    char *to = dst;
    if (m->fd < 0 && nbytes > 0) memcpy(to, m->bytes + at, (size_t)nbytes);
    while (m->fd >= 0 && nbytes > 0) {
        ssize_t n = pread(m->fd, to, (size_t)nbytes, at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return ps_fail(PS_EIO, "cannot read %lld bytes of %s from byte %lld on: %s", (long long)nbytes, m->path,
                           (long long)at, strerror(errno));
        if (n == 0) {
            PS_TRY(ps_map_check(m));
            return ps_fail(PS_EIO, "%s was truncated to %lld bytes or less while it was read", m->path, (long long)at);
        }
        to += n, at += n, nbytes -= n;
    }
    return 0;
}

void ps_map_drop(const ps_map *m, const void *begin, int64_t nbytes)
{
    if (m->fd < 0 || nbytes <= 0) return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)begin & ~(page - 1);
    madvise((void *)from, (uintptr_t)begin + (uintptr_t)nbytes - from, MADV_DONTNEED);
}

void ps_map_close(ps_map *m)
{
    if (!m->path) return;                   /* the map is zeroed or already closed */
    if (m->fd >= 0) {
        if (m->bytes && m->nbytes) {
            ps_map_fault_remove(m->bytes);
            munmap((void *)(uintptr_t)m->bytes, (size_t)m->nbytes);
        }
        close(m->fd);
        if (m->asked_direct && m->direct >= 0) close(m->direct);
    }
    ps_free(m->path);
    *m = (ps_map){ .fd = -1 };
}

void ps_copy_strided(const void *data, int64_t each, int ndim, const int64_t *shape, const int64_t *stride,
                     int64_t first, void *dst, int64_t numel)
{
    if (numel <= 0) return;
    int64_t at[PS_MAX_DIMS] = { 0 }, from = 0, run = 1;
    /* Dimensions [outer, ndim) are contiguous, so one memcpy copies `run` elements. */
    int outer = ndim;
    while (outer > 0 && (shape[outer - 1] == 1 || stride[outer - 1] == run)) run *= shape[--outer];
    int64_t row = first / run, inside = first % run;
    for (int d = outer - 1; d >= 0; d--) {
        at[d] = row % shape[d], row /= shape[d];
        from += at[d] * stride[d];
    }
    char *to = dst;
    for (int64_t n; numel > 0; numel -= n, inside = 0) {
        n = run - inside < numel ? run - inside : numel;
        memcpy(to, (const char *)data + (from + inside) * each, (size_t)(n * each));
        to += n * each;
        for (int d = outer - 1; d >= 0; d--) {
            from += stride[d];
            if (++at[d] < shape[d]) break;
            from -= stride[d] * shape[d];
            at[d] = 0;
        }
    }
}

/* -- failures that tests ask for --------------------------------------------------------------------------------- */
static _Atomic int64_t until_failure = -1, failures;
static atomic_int failure_code;

void ps_test_fail_file(int64_t nth, int64_t count, int code)
{
    atomic_store(&failures, 0);
    atomic_store(&failure_code, code);
    atomic_store(&until_failure, nth < 0 ? -1 : nth);
    atomic_store(&failures, nth < 0 || count < 0 ? 0 : count);
}

int64_t ps_test_fail_file_left(void) { return atomic_load(&until_failure); }

/* Returns true and sets errno if a test asked for this operation to fail. */
static bool should_fail(void)
{
    int64_t most = atomic_load(&failures);
    if (!most) return false;
    int64_t n = atomic_fetch_sub(&until_failure, 1);
    if (n > 0 || n <= -most) return false;
    errno = atomic_load(&failure_code);
    return true;
}

/* -- temporary files --------------------------------------------------------------------------------------------- */
/* Writes the path of the folder that contains `path` to `out` [PATH_MAX]. */
static void folder_of(const char *path, char *out)
{
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (!slash) snprintf(out, PATH_MAX, ".");
    else if (!n) snprintf(out, PATH_MAX, "/");
    else snprintf(out, PATH_MAX, "%.*s", (int)n, path);
}

/* Reports that a write of `nbytes` bytes to f failed with the errno `err`. The message contains the text of `err`. If
 * the disk is full, the message also contains the number of free bytes. */
static int write_failed(const ps_tempfile *f, int err, int64_t nbytes)
{
    struct statvfs vfs;
    if ((err == ENOSPC || err == EDQUOT) && fstatvfs(f->fd, &vfs) == 0)
        return ps_fail(PS_EIO, "cannot write %s: %s: %lld bytes wanted, %llu bytes free on its file system; free some "
                       "space or choose another folder", f->path, strerror(err), (long long)nbytes,
                       (unsigned long long)vfs.f_bavail * vfs.f_frsize);
    return ps_fail(PS_EIO, "cannot write %lld bytes to %s: %s", (long long)nbytes, f->path, strerror(err));
}

static int check_limit(const ps_tempfile *f, int64_t end)
{
    if (end <= f->limit) return 0;
    return ps_fail(PS_EIO, "cannot write %s: %lld bytes are needed, but the process may only write files of %lld bytes "
                   "(ulimit -f)", f->path, (long long)end, (long long)f->limit);
}

enum { PIECE = 8 << 20 };       /* maximum number of bytes per write call */

/* Returns the last component of a path. */
static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

int ps_file_target(const char *path, char *out, int64_t room)
{
    PS_NEED(path);
    PS_NEED(out);
    char target[PATH_MAX], folder[PATH_MAX], next[PATH_MAX];
    int n = snprintf(out, room > 0 ? (size_t)room : 0, "%s", path);
    for (int links = 0; n >= 0 && n < PATH_MAX && n < room; links++) {
        ssize_t length = readlink(out, target, sizeof target - 1);
        if (length < 0) return 0;
        if (links == 40) return ps_fail(PS_EIO, "cannot write %s: %s", path, strerror(ELOOP));
        target[length] = 0;
        folder_of(out, folder);
        n = target[0] == '/' ? snprintf(next, sizeof next, "%s", target)
                             : snprintf(next, sizeof next, "%s/%s", folder, target);
        if (n >= 0 && n < PATH_MAX && n < room) memcpy(out, next, (size_t)n + 1);
    }
    return ps_fail(PS_EIO, "cannot write %.100s...: %s", path, strerror(ENAMETOOLONG));
}

static int no_temp(const ps_tempfile *f, int err)
{
    return ps_fail(PS_EIO, "cannot write %s: no temporary file can be made in its folder: %s", f->path, strerror(err));
}

static int open_folder(const char *path)
{
    int fd;
    do fd = ps_fd_above_stdio(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)); while (fd < 0 && errno == EINTR);
    return fd;
}

static int create_temp(ps_tempfile *f, const char *path)
{
    static atomic_uint serial;
    char real[PATH_MAX], folder[PATH_MAX], other[PATH_MAX];
    struct stat st;
    int diverted = ps_file_diverted(path, 1, other, sizeof other);
    PS_TRY(diverted);
    f->sparse = diverted;
    if (diverted) path = other;
    bool exists = stat(path, &st) == 0;
    if (exists && !S_ISREG(st.st_mode))
        return ps_fail(PS_EIO, "cannot write %s: it is %s, not a file", path,
                       S_ISDIR(st.st_mode) ? "a folder" : "a pipe or device");
    PS_TRY(ps_file_target(path, real, sizeof real));
    size_t room = strlen(real) + 48;
    if (!(f->path = ps_strdup(real))) return ps_fail_nomem(strlen(real) + 1);
    folder_of(real, folder);
    if ((f->folder = open_folder(folder)) < 0) return no_temp(f, errno);
    char *temp = ps_alloc(room);
    if (!temp) return ps_fail_nomem(room);
    do {
        snprintf(temp, room, "%s.tmp-%ld-%u", real, (long)getpid(), atomic_fetch_add(&serial, 1));
        f->fd = ps_fd_above_stdio(openat(f->folder, name_of(temp), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    } while (f->fd < 0 && (errno == EINTR || errno == EEXIST));
    if (f->fd < 0) {
        int err = errno;
        ps_free(temp);
        return no_temp(f, err);
    }
    f->temp = temp;
    /* An error of fchmod is ignored, because a process may be allowed to replace another user's file but not to set the
     * mode of the new file. */
    if (exists) (void)fchmod(f->fd, st.st_mode & 0777);
    return 0;
}

int ps_tempfile_open(ps_tempfile *f, const char *path)
{
    *f = PS_TEMPFILE_NONE;
    f->limit = INT64_MAX;
    PS_NEED(path);
    if (!*path) return ps_fail(PS_EINVAL, "the name of the file to write is empty");
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < (rlim_t)INT64_MAX) f->limit = (int64_t)limit.rlim_cur;
    int rc = create_temp(f, path);
    if (rc < 0) ps_tempfile_close(f);
    return rc;
}

int ps_tempfile_reserve(ps_tempfile *f, int64_t nbytes)
{
    PS_TRY(check_limit(f, nbytes));
    if (!nbytes) return 0;
    int rc = should_fail() ? -1 : 0;
    if (rc < 0) return write_failed(f, errno, nbytes);
    if (!f->sparse) {
        do rc = fallocate(f->fd, 0, 0, nbytes); while (rc < 0 && errno == EINTR);
        if (rc == 0) return 0;
        if (errno != EOPNOTSUPP && errno != ENOSYS) return write_failed(f, errno, nbytes);
    }
    /* This file system cannot reserve space. Return an error at least if `nbytes` is more than the free space. */
    struct statvfs vfs;
    if (!f->sparse && fstatvfs(f->fd, &vfs) == 0 && vfs.f_blocks && vfs.f_bavail < (uint64_t)nbytes / vfs.f_frsize)
        return write_failed(f, ENOSPC, nbytes);
    do rc = ftruncate(f->fd, nbytes); while (rc < 0 && errno == EINTR);
    return rc < 0 ? write_failed(f, errno, nbytes) : 0;
}

/* If f is sparse and all bytes at `p` are zeros, makes a hole in the file and returns true. Returns false if the caller
 * must write the bytes. */
static bool left_out(ps_tempfile *f, int64_t offset, const char *p, int64_t nbytes)
{
    struct stat st;
    if (!f->sparse || nbytes == 0 || p[0] != 0 || memcmp(p, p + 1, (size_t)nbytes - 1) != 0) return false;
    if (fstat(f->fd, &st) < 0 || (st.st_size < offset + nbytes && ftruncate(f->fd, offset + nbytes) < 0)) return false;
    return fallocate(f->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes) == 0;
}

int ps_tempfile_write(ps_tempfile *f, int64_t offset, const void *data, int64_t nbytes)
{
    const char *from = data;
    PS_TRY(check_limit(f, offset + nbytes));
    if (left_out(f, offset, from, nbytes)) return 0;
    while (nbytes > 0) {
        size_t piece = nbytes < PIECE ? (size_t)nbytes : (size_t)PIECE;
        ssize_t n = should_fail() ? -1 : pwrite(f->fd, from, piece, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return write_failed(f, n < 0 ? errno : EIO, nbytes);
        /* The disk writes this piece while the caller prepares the next piece. If writing to the disk fails, the fsync
         * in ps_tempfile_commit reports the error. */
        if (n >= PIECE / 8) (void)sync_file_range(f->fd, offset, n, SYNC_FILE_RANGE_WRITE);
        from += n, offset += n, nbytes -= n;
    }
    return 0;
}

int ps_tempfile_stream(ps_tempfile *f, int64_t offset, const void *data, int64_t nbytes)
{
    enum { AHEAD = 8 * PIECE };                     /* large, so that the disk has work while this thread waits */
    const char *from = data;
    int fd = -1;
    PS_TRY(check_limit(f, offset + nbytes));
    if (nbytes >= PS_DIRECT_ALIGN && (offset | (int64_t)(uintptr_t)data) % PS_DIRECT_ALIGN == 0)
        fd = ps_fd_above_stdio(openat(f->folder, name_of(f->temp), O_WRONLY | O_DIRECT | O_CLOEXEC));
    while (fd >= 0 && nbytes >= PS_DIRECT_ALIGN) {
        size_t piece = nbytes < AHEAD ? (size_t)(nbytes & -(int64_t)PS_DIRECT_ALIGN) : (size_t)AHEAD;
        ssize_t n = should_fail() ? -1 : pwrite(fd, from, piece, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EINVAL) {
            int err = errno;
            close(fd);
            return write_failed(f, err, nbytes);
        }
        /* This file system does not support direct writes, so the rest is written through the cache. */
        if (n <= 0 || n % PS_DIRECT_ALIGN) break;
        from += n, offset += n, nbytes -= n;
    }
    if (fd >= 0) close(fd);
    return ps_tempfile_write(f, offset, from, nbytes);
}

/* Syncs a folder. `folder` is an open descriptor of the folder, and `path` is the name for error messages. */
static int sync_folder(int folder, const char *path)
{
    int rc;
    do rc = should_fail() ? -1 : fsync(folder); while (rc < 0 && errno == EINTR);
    /* EINVAL: this file system cannot sync folders, and has no other way to make a rename durable. */
    if (rc < 0 && errno != EINVAL) return ps_fail(PS_EIO, "cannot sync the folder %s: %s", path, strerror(errno));
    return 0;
}

/* Renames the file and syncs its folder through the folder's descriptor, because another process may rename the folder
 * as soon as the file has its final name. */
int ps_tempfile_commit(ps_tempfile *f)
{
    char folder[PATH_MAX];
    int rc;
    if (!f->temp) return ps_fail(PS_ESTATE, "this file was already committed or closed");
    do rc = should_fail() ? -1 : fsync(f->fd); while (rc < 0 && errno == EINTR);
    if (rc < 0) return ps_fail(PS_EIO, "cannot write %s to its disk: %s", f->path, strerror(errno));
    if (should_fail() || renameat(f->folder, name_of(f->temp), f->folder, name_of(f->path)) < 0)
        return ps_fail(PS_EIO, "cannot replace %s by the complete %s: %s", f->path, f->temp, strerror(errno));
    ps_free(f->temp);
    f->temp = NULL;
    folder_of(f->path, folder);
    return sync_folder(f->folder, folder);
}

void ps_tempfile_close(ps_tempfile *f)
{
    if (f->temp) unlinkat(f->folder, name_of(f->temp), 0);
    if (f->fd >= 0) close(f->fd);
    if (f->folder >= 0) close(f->folder);
    ps_free(f->temp);
    ps_free(f->path);
    *f = PS_TEMPFILE_NONE;
}

/* -- ps.h -------------------------------------------------------------------------------------------------------- */
int ps_file_fsync_dir(const char *path)
{
    PS_NEED(path);
    if (ps_files_are_diverted()) return 0;
    int fd = open_folder(path);
    if (fd < 0) return ps_fail(PS_EIO, "cannot open the folder %s: %s", path, strerror(errno));
    int rc = sync_folder(fd, path);
    close(fd);
    return rc;
}

int ps_file_write_atomic(const char *path, const void *data, int64_t nbytes)
{
    if (nbytes < 0 || (nbytes && !data)) return ps_fail(PS_EINVAL, "ps_file_write_atomic: %lld bytes at %p",
                                                        (long long)nbytes, data);
    ps_tempfile f;
    PS_TRY(ps_tempfile_open(&f, path));
    int rc = ps_tempfile_reserve(&f, nbytes);
    if (rc == 0) rc = ps_tempfile_write(&f, 0, data, nbytes);
    if (rc == 0) rc = ps_tempfile_commit(&f);
    ps_tempfile_close(&f);
    return rc;
}

/* Swaps the names `from` and `path` by three renames, for file systems that cannot swap names atomically (NFS). Between
 * the first and the second rename, no folder has the name `path`. If the process crashes at that moment, the old folder
 * has the name `aside`, and lua/ps/checkpoints/folder.lua finds it under this name. */
static int swap_by_renames(const char *from, const char *path, const char *aside)
{
    if (rename(path, aside) < 0) return -1;
    if (should_fail() || rename(from, path) < 0) {
        int err = errno;
        (void)rename(aside, path);
        errno = err;
        return -1;
    }
    return rename(aside, from);
}

int ps_file_swap_folder(const char *from, const char *path)
{
    char above[PATH_MAX], aside[PATH_MAX];
    struct stat st;
    PS_NEED(from);
    PS_NEED(path);
    if (ps_files_are_diverted()) return 0;
    bool exists = lstat(path, &st) == 0;
    int n = snprintf(aside, sizeof aside, "%s-aside", from);
    if (n < 0 || (size_t)n >= sizeof aside) return ps_fail(PS_EINVAL, "the name of the folder %s is too long", from);
    int rc = should_fail() ? -1
        : exists ? renameat2(AT_FDCWD, from, AT_FDCWD, path, RENAME_EXCHANGE) : rename(from, path);
    if (rc < 0 && exists && (errno == EINVAL || errno == ENOSYS)) rc = swap_by_renames(from, path, aside);
    if (rc < 0) return ps_fail(PS_EIO, "cannot rename the folder %s to %s: %s", from, path, strerror(errno));
    folder_of(path, above);
    PS_TRY(ps_file_fsync_dir(above));
    return exists;
}
