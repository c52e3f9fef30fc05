/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the doors of files (faults.h). The streams of the C library (fopen) pass the same doors.
 * LuaJIT's io library uses these streams. */
#define _GNU_SOURCE
#include "faults/faults.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAMELESS "/(nameless)"
enum { MOST_FDS = 4096 };
enum { CAN_FAIL = CAN(ACT_ERRNO), CAN_STOP = CAN(ACT_ERRNO) | CAN(ACT_INTERRUPT) };

static struct { int class; char *path; } descriptors[MOST_FDS];

int faults_class_of(int fd) { return fd < 0 || fd >= MOST_FDS ? FD_OTHER : descriptors[fd].class; }
const char *faults_path_of(int fd)
{
    return faults_class_of(fd) && descriptors[fd].path ? descriptors[fd].path : "";
}

void faults_set_class(int fd, int class, const char *path)
{
    if (fd < 0 || fd >= MOST_FDS) return;
    faults_lock();
    free(descriptors[fd].path);
    descriptors[fd].path = path ? strdup(path) : NULL;
    descriptors[fd].class = class;
    faults_unlock();
}

void faults_flip(void *bytes, size_t nbytes, double which)
{
    if (!nbytes) return;
    uint64_t bit = (uint64_t)which % (nbytes * 8);
    ((uint8_t *)bytes)[bit / 8] ^= (uint8_t)(1u << bit % 8);
}

/* The path of an open file descriptor begins with this text. open() accepts such a path. */
#define OPEN_FILE "/proc/self/fd/"

/* If the path is below PS_FAULT_FOLDER, writes the absolute path to out [PATH_MAX] and returns it. Returns NULL for
 * other paths. */
static const char *ours(int folder, const char *path, char *out)
{
    static const char *root;
    if (!root && !(root = getenv("PS_FAULT_FOLDER"))) root = "";
    if (!path || !*root) return NULL;
    if (!strncmp(path, OPEN_FILE, sizeof OPEN_FILE - 1)) {
        int fd = atoi(path + sizeof OPEN_FILE - 1);
        if (faults_class_of(fd) != FD_FILE) return NULL;
        path = faults_path_of(fd);
    }
    if (path[0] == '/') snprintf(out, PATH_MAX, "%s", path);
    else if (faults_class_of(folder) == FD_FOLDER) snprintf(out, PATH_MAX, "%s/%s", faults_path_of(folder), path);
    else return NULL;
    size_t n = strlen(root);
    for (char *p = out; (p = strstr(p, "//")) != NULL;) memmove(p, p + 1, strlen(p));
    return !strncmp(out, root, n) && (out[n] == '/' || !out[n]) ? out : NULL;
}

/* Logs the path of a file or folder that will be created outside PS_FAULT_FOLDER. The test runner checks that the file
 * or folder is removed again. */
static void outside(const char *path)
{
    if (path && strncmp(path, "/dev/", 5) && strncmp(path, "/proc/", 6)) faults_note("outside %s", path);
}

static bool is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* -- opening and closing ------------------------------------------------------------------------------------------ */
static int fail(faults_hit hit)
{
    errno = hit.err;
    return -1;
}

static int open_door(int folder, const char *path, int flags, mode_t mode, bool interrupts)
{
    char full[PATH_MAX];
    const char *mine = ours(folder, path, full);
    bool folders = (flags & O_DIRECTORY) != 0, nameless = (flags & O_TMPFILE) == O_TMPFILE;
    unsigned can = (interrupts ? CAN_STOP : CAN_FAIL) | (flags & O_CREAT || nameless ? CAN(ACT_FULL) : 0u);
    if (!mine && flags & O_CREAT) outside(path);
    if (!mine) return (int)syscall(SYS_openat, folder, path, flags, mode);
    faults_hit hit = faults_pass(DOOR_OPEN, can, mine);
    if (hit.action) return fail(hit);
    bool is_new = (flags & O_CREAT) && access(mine, F_OK) != 0;
    if (is_new) lost_create(mine);
    else if (flags & O_TRUNC) lost_truncate(mine);
    int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
    if (fd < 0 && is_new) lost_undone();
    if (fd >= 0 && nameless && strlen(mine) + sizeof NAMELESS < sizeof full) strcat(full, NAMELESS);
    if (fd >= 0)
        faults_set_class(fd, nameless ? FD_NAMELESS : folders || is_folder(mine) ? FD_FOLDER : FD_FILE, mine);
    return fd;
}

static mode_t mode_of(int flags, va_list ap)
{
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(ap, int) : 0;
}

int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = mode_of(flags, ap);
    va_end(ap);
    return open_door(AT_FDCWD, path, flags, mode, true);
}

int openat(int folder, const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = mode_of(flags, ap);
    va_end(ap);
    return open_door(folder, path, flags, mode, true);
}

int open64(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = mode_of(flags, ap);
    va_end(ap);
    return open_door(AT_FDCWD, path, flags, mode, true);
}

int close(int fd)
{
    if (faults_class_of(fd)) faults_set_class(fd, FD_OTHER, NULL);
    return (int)syscall(SYS_close, fd);
}

/* -- reading and writing ------------------------------------------------------------------------------------------ */
/* Reads from a descriptor. If `offset` is -1, reads at the descriptor's own offset. interrupts: true if the kernel
 * can return EINTR for this call. */
static ssize_t read_door(int fd, void *bytes, size_t nbytes, int64_t offset, bool interrupts)
{
    unsigned can = (interrupts ? CAN_STOP : CAN_FAIL) | CAN(ACT_SHORT) | CAN(ACT_FLIP);
    faults_hit hit = faults_pass(DOOR_READ, can, faults_path_of(fd));
    if (hit.err) return fail(hit);
    size_t n = hit.action == ACT_SHORT && nbytes > 1 ? (nbytes > 8192 ? nbytes / 2 / 4096 * 4096 : nbytes / 2) : nbytes;
    ssize_t got = offset < 0 ? syscall(SYS_read, fd, bytes, n) : syscall(SYS_pread64, fd, bytes, n, offset);
    if (got > 0 && hit.action == ACT_FLIP) faults_flip(bytes, (size_t)got, hit.arg);
    return got;
}

static ssize_t write_door(int fd, const void *bytes, size_t nbytes, int64_t offset, bool interrupts)
{
    unsigned can = (interrupts ? CAN_STOP : CAN_FAIL) | CAN(ACT_FULL) | CAN(ACT_SHORT);
    faults_hit hit = faults_pass(DOOR_WRITE, can, faults_path_of(fd));
    if (hit.err) return fail(hit);
    size_t n = hit.action == ACT_SHORT && nbytes > 1 ? (nbytes > 8192 ? nbytes / 2 / 4096 * 4096 : nbytes / 2) : nbytes;
    int64_t at = offset < 0 ? (int64_t)syscall(SYS_lseek, fd, 0, SEEK_CUR) : offset;
    if (faults_class_of(fd) == FD_FILE) lost_write(fd, at, (int64_t)n);
    return offset < 0 ? syscall(SYS_write, fd, bytes, n) : syscall(SYS_pwrite64, fd, bytes, n, offset);
}

static bool is_file(int fd) { return faults_class_of(fd) == FD_FILE || faults_class_of(fd) == FD_NAMELESS; }

ssize_t read(int fd, void *bytes, size_t nbytes)
{
    if (is_file(fd)) return read_door(fd, bytes, nbytes, -1, true);
    if (faults_class_of(fd) == FD_SOCKET) return faults_socket_recv(fd, bytes, nbytes, 0);
    return syscall(SYS_read, fd, bytes, nbytes);
}

ssize_t pread(int fd, void *bytes, size_t nbytes, off_t offset)
{
    return is_file(fd) ? read_door(fd, bytes, nbytes, offset, true) : syscall(SYS_pread64, fd, bytes, nbytes, offset);
}

ssize_t write(int fd, const void *bytes, size_t nbytes)
{
    if (is_file(fd)) return write_door(fd, bytes, nbytes, -1, true);
    if (faults_class_of(fd) == FD_SOCKET) return faults_socket_send(fd, bytes, nbytes, 0);
    return syscall(SYS_write, fd, bytes, nbytes);
}

ssize_t pwrite(int fd, const void *bytes, size_t nbytes, off_t offset)
{
    return is_file(fd) ? write_door(fd, bytes, nbytes, offset, true)
                       : syscall(SYS_pwrite64, fd, bytes, nbytes, offset);
}

int fsync(int fd)
{
    int class = faults_class_of(fd);
    if (class != FD_FILE && class != FD_FOLDER) return (int)syscall(SYS_fsync, fd);
    faults_hit hit = faults_pass(DOOR_SYNC, CAN_STOP | CAN(ACT_FULL), faults_path_of(fd));
    if (hit.err && hit.err != EINTR) lost_failed_sync(fd, (uint64_t)hit.arg);
    if (hit.action) return fail(hit);
    /* The real file is not synced. The loss of power is only simulated, so it is enough to record the sync. */
    lost_sync(fd);
    return 0;
}

int fdatasync(int fd) { return fsync(fd); }

int ftruncate(int fd, off_t nbytes)
{
    if (!is_file(fd)) return (int)syscall(SYS_ftruncate, fd, nbytes);
    faults_hit hit = faults_pass(DOOR_SPACE, CAN_STOP | CAN(ACT_FULL), faults_path_of(fd));
    if (hit.action) return fail(hit);
    if (faults_class_of(fd) == FD_FILE) lost_resize(fd);
    return (int)syscall(SYS_ftruncate, fd, nbytes);
}

int fallocate(int fd, int mode, off_t offset, off_t nbytes)
{
    if (!is_file(fd)) return (int)syscall(SYS_fallocate, fd, mode, offset, nbytes);
    faults_hit hit = faults_pass(DOOR_SPACE, CAN_STOP | CAN(ACT_FULL), faults_path_of(fd));
    if (hit.action) return fail(hit);
    if (faults_class_of(fd) == FD_FILE) lost_resize(fd);
    return (int)syscall(SYS_fallocate, fd, mode, offset, nbytes);
}

/* -- memory maps -------------------------------------------------------------------------------------------------- */
/* Replaces the pages of a private map from page `which` % 10 to its end by pages of an empty file. An access to the
 * replaced pages raises SIGBUS. The kernel also raises SIGBUS if another process truncates a mapped file, or if the
 * disk of the file fails. */
static void cut_map(char *p, size_t nbytes, int flags, double which)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), from = (size_t)which % 10 * page;
    int empty = (int)syscall(SYS_memfd_create, "cut", 0);
    if (from >= nbytes) from = 0;
    if (empty < 0 || !(flags & MAP_PRIVATE)) return;
    syscall(SYS_mmap, p + from, nbytes - from, PROT_READ, MAP_PRIVATE | MAP_FIXED, empty, 0);
    syscall(SYS_close, empty);
}

/* Returns true if a code address is in oneDNN. oneDNN's code generator does not check whether its maps have failed, so
 * a failed map would end the process with SIGSEGV. */
static bool in_onednn(void *address)
{
    Dl_info info;
    return dladdr(address, &info) && info.dli_fname && strstr(info.dli_fname, "/libdnnl.so");
}

/* If the map has a file, passes it to the door of maps. Otherwise counts it as an allocation, unless oneDNN makes the
 * map. */
void *mmap(void *at, size_t nbytes, int prot, int flags, int fd, off_t offset)
{
    bool anonymous = (flags & MAP_ANONYMOUS) != 0;
    unsigned can = anonymous ? CAN_FAIL : CAN_FAIL | CAN(ACT_FLIP) | CAN(ACT_CUT);
    faults_hit hit = { ACT_NONE, 0, 0 };
    if (anonymous && !in_onednn(__builtin_return_address(0))) hit = faults_pass(DOOR_ALLOC, can, NULL);
    else if (!anonymous && is_file(fd)) hit = faults_pass(DOOR_MAP, can, faults_path_of(fd));
    if (hit.action == ACT_ERRNO) {
        errno = anonymous ? ENOMEM : hit.err;
        return MAP_FAILED;
    }
    void *p = (void *)syscall(SYS_mmap, at, nbytes, prot, flags, fd, offset);
    if (p == MAP_FAILED) return p;
    if (hit.action == ACT_CUT) cut_map(p, nbytes, flags, hit.arg);
    if (hit.action == ACT_FLIP && (flags & MAP_PRIVATE) && mprotect(p, nbytes, prot | PROT_WRITE) == 0) {
        faults_flip(p, nbytes, hit.arg);
        mprotect(p, nbytes, prot);
    }
    return p;
}

/* -- names of files and folders ----------------------------------------------------------------------------------- */
static int rename_door(int from_at, const char *from, int to_at, const char *to, unsigned flags)
{
    char full_from[PATH_MAX], full_to[PATH_MAX];
    const char *mine = ours(from_at, from, full_from), *other = ours(to_at, to, full_to);
    if (!mine || !other) return (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    faults_hit hit = faults_pass(DOOR_RENAME, CAN_FAIL, other);
    if (hit.action) return fail(hit);
    lost_rename(mine, other, (flags & RENAME_EXCHANGE) != 0);
    int rc = (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    if (rc < 0) lost_undone();
    return rc;
}

int rename(const char *from, const char *to) { return rename_door(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_at, const char *from, int to_at, const char *to)
{
    return rename_door(from_at, from, to_at, to, 0);
}
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags)
{
    return rename_door(from_at, from, to_at, to, flags);
}

static int remove_door(int at, const char *path, int flags)
{
    char full[PATH_MAX];
    const char *mine = ours(at, path, full);
    if (!mine) return (int)syscall(SYS_unlinkat, at, path, flags);
    faults_hit hit = faults_pass(DOOR_REMOVE, CAN_FAIL, mine);
    if (hit.action) return fail(hit);
    lost_remove(mine, (flags & AT_REMOVEDIR) != 0);
    int rc = (int)syscall(SYS_unlinkat, at, path, flags);
    if (rc < 0) lost_undone();
    return rc;
}

int unlink(const char *path) { return remove_door(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return remove_door(at, path, flags); }
int rmdir(const char *path) { return remove_door(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path)
{
    int rc = remove_door(AT_FDCWD, path, 0);
    return rc < 0 && errno == EISDIR ? remove_door(AT_FDCWD, path, AT_REMOVEDIR) : rc;
}

int mkdir(const char *path, mode_t mode)
{
    char full[PATH_MAX];
    const char *mine = ours(AT_FDCWD, path, full);
    if (!mine) outside(path);
    if (!mine) return (int)syscall(SYS_mkdir, path, mode);
    faults_hit hit = faults_pass(DOOR_MKDIR, CAN_FAIL | CAN(ACT_FULL), mine);
    if (hit.action) return fail(hit);
    lost_mkdir(mine);
    int rc = (int)syscall(SYS_mkdir, path, mode);
    if (rc < 0) lost_undone();
    return rc;
}

/* -- streams ------------------------------------------------------------------------------------------------------ */
/* Reads for a stream. Never fails with EINTR, because the kernel restarts reads of files after a signal. */
static ssize_t cookie_read(void *c, char *bytes, size_t nbytes)
{
    return read_door((int)(intptr_t)c, bytes, nbytes, -1, false);
}
/* Writes for a stream. If an error occurs, returns 0, as the C library requires. After a short write, the C library
 * writes the remaining bytes itself. */
static ssize_t cookie_write(void *c, const char *bytes, size_t nbytes)
{
    ssize_t done = 0;
    while ((size_t)done < nbytes) {
        ssize_t n = write_door((int)(intptr_t)c, bytes + done, nbytes - (size_t)done, -1, false);
        if (n <= 0) return 0;
        done += n;
    }
    return done;
}
static int cookie_seek(void *c, off64_t *offset, int whence)
{
    off64_t at = (off64_t)syscall(SYS_lseek, (int)(intptr_t)c, *offset, whence);
    if (at < 0) return -1;
    *offset = at;
    return 0;
}
static int cookie_close(void *c) { return close((int)(intptr_t)c); }

static FILE *stream_door(const char *path, const char *mode)
{
    static FILE *(*next)(const char *, const char *);
    char full[PATH_MAX];
    if (!ours(AT_FDCWD, path, full)) {
        if (!next) *(void **)&next = faults_next("fopen64", NULL);
        if (mode[0] != 'r') outside(path);
        return next(path, mode);
    }
    bool plus = strchr(mode, '+') != NULL;
    int flags = mode[0] == 'r' ? 0 : mode[0] == 'w' ? O_CREAT | O_TRUNC : O_CREAT | O_APPEND;
    flags |= plus ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
    int fd = open_door(AT_FDCWD, path, flags, 0666, false);
    if (fd < 0) return NULL;
    cookie_io_functions_t doors = { cookie_read, cookie_write, cookie_seek, cookie_close };
    FILE *f = fopencookie((void *)(intptr_t)fd, mode, doors);
    if (!f) close(fd);
    return f;
}

FILE *fopen(const char *path, const char *mode) { return stream_door(path, mode); }
FILE *fopen64(const char *path, const char *mode) { return stream_door(path, mode); }
