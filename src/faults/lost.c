/* SPDX-License-Identifier: BSD-3-Clause
 * This file simulates a loss of power (faults.h). Before each change of a file, the present bytes of the file are kept
 * until an fsync confirms that the new bytes are on the disk. Names are kept in the same way until their folder is
 * synced. When power is lost, one of three cases is chosen for each block of 4,096 bytes that was not synced:
 *   - The block keeps its new bytes.
 *   - The block gets its old bytes back.
 *   - Some sectors of the block get their old bytes back.
 * The last few changes of a folder's names are undone, as in a file system that has a journal.
 *
 * Files of the disk tier have no name. They are ignored, because their contents end with the process. Each process
 * undoes its own changes. If all ranks lose power, each rank undoes its changes, in no particular order. */
#define _GNU_SOURCE
#include "faults/faults.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BLOCK = 4096, SECTOR = 512, MOST_SAVED = 64 << 20 };

typedef struct block { int64_t index; uint8_t old[BLOCK]; } block;
/* A file with bytes that have not been synced. */
typedef struct file {
    struct file *next;
    dev_t dev;
    ino_t ino;
    /* fd: a separate descriptor, with which old bytes are read and written */
    int fd;
    int64_t old_size;
    block *blocks;
    int n, room;
} file;
typedef struct change {
    enum { CREATE, RENAME, EXCHANGE, REMOVE, REMOVE_FOLDER, MAKE_FOLDER } kind;
    /* folder: the folder whose names change */
    char folder[PATH_MAX], path[PATH_MAX], to[PATH_MAX];
    /* old: the contents of the file that the change removes or replaces, or NULL */
    uint8_t *old;
    int64_t old_size;
} change;

static file *files;
static change *changes;
static int n_changes, room_changes;

/* -- bytes -------------------------------------------------------------------------------------------------------- */
static int64_t size_of(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 ? st.st_size : 0;
}

static file **find(const struct stat *st)
{
    file **at = &files;
    while (*at && ((*at)->dev != st->st_dev || (*at)->ino != st->st_ino)) at = &(*at)->next;
    return at;
}

/* Returns the record of a file. Makes the record if there is none. Returns NULL if fd is not a regular file, or if
 * there is no memory. */
static file *record_of(int fd)
{
    struct stat st;
    char name[64];
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) return NULL;
    file **at = find(&st);
    if (*at) return *at;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int own = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0);
    file *f = own >= 0 ? calloc(1, sizeof *f) : NULL;
    if (!f) return NULL;
    *f = (file){ .dev = st.st_dev, .ino = st.st_ino, .fd = own, .old_size = st.st_size };
    return *at = f;
}

static void keep_block(file *f, int64_t index)
{
    for (int i = 0; i < f->n; i++)
        if (f->blocks[i].index == index) return;
    if (f->n == f->room) {
        int room = f->room ? 2 * f->room : 16;
        block *more = realloc(f->blocks, (size_t)room * sizeof *more);
        if (!more) return;
        f->blocks = more, f->room = room;
    }
    block *b = &f->blocks[f->n++];
    memset(b, 0, sizeof *b);
    b->index = index;
    syscall(SYS_pread64, f->fd, b->old, BLOCK, index * BLOCK);
}

void lost_write(int fd, int64_t offset, int64_t nbytes)
{
    if (!faults_want_power() || nbytes <= 0) return;
    faults_lock();
    file *f = record_of(fd);
    for (int64_t i = offset / BLOCK; f && i <= (offset + nbytes - 1) / BLOCK; i++) keep_block(f, i);
    faults_unlock();
}

void lost_resize(int fd)
{
    if (!faults_want_power()) return;
    faults_lock();
    file *f = record_of(fd);
    for (int64_t i = 0; f && i * BLOCK < size_of(fd); i++) keep_block(f, i);
    faults_unlock();
}

void lost_truncate(const char *path)
{
    int fd = faults_want_power() ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0) return;
    lost_resize(fd);
    syscall(SYS_close, fd);
}

static void forget_file(file **at)
{
    file *f = *at;
    *at = f->next;
    syscall(SYS_close, f->fd);
    free(f->blocks);
    free(f);
}

static void forget_change(int i)
{
    free(changes[i].old);
    memmove(&changes[i], &changes[i + 1], (size_t)(--n_changes - i) * sizeof *changes);
}

void lost_sync(int fd)
{
    struct stat st;
    if (!faults_want_power() || fstat(fd, &st) < 0) return;
    faults_lock();
    file **at = find(&st);
    if (*at) forget_file(at);
    for (int i = n_changes - 1; S_ISDIR(st.st_mode) && i >= 0; i--) {
        struct stat folder;
        if (stat(changes[i].folder, &folder) == 0 && folder.st_dev == st.st_dev && folder.st_ino == st.st_ino)
            forget_change(i);
    }
    faults_unlock();
}

/* -- names -------------------------------------------------------------------------------------------------------- */
/* Copies a path to `out` [PATH_MAX], without slashes at its end. */
static void copy_path(char *out, const char *path)
{
    int n = snprintf(out, PATH_MAX, "%s", path);
    if (n >= PATH_MAX) n = PATH_MAX - 1;
    while (n > 1 && out[n - 1] == '/') out[--n] = 0;
}

/* (locked) Appends a record of a change of names in the folder that contains `path`. */
static change *append(int kind, const char *path, const char *to)
{
    if (n_changes == room_changes) {
        int room = room_changes ? 2 * room_changes : 16;
        change *more = realloc(changes, (size_t)room * sizeof *more);
        if (!more) return NULL;
        changes = more, room_changes = room;
    }
    change *c = &changes[n_changes++];
    memset(c, 0, sizeof *c);
    c->kind = kind;
    copy_path(c->path, path);
    copy_path(c->to, to ? to : "");
    copy_path(c->folder, to ? to : path);
    char *slash = strrchr(c->folder, '/');
    if (slash) *slash = 0;
    return c;
}

/* Stores the bytes of the file `path` in the change, if the file exists. */
static void keep_bytes(change *c, const char *path)
{
    int fd = c ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0) : -1;
    struct stat st;
    if (fd < 0) return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size <= MOST_SAVED
        && (c->old = malloc((size_t)st.st_size + 1)) != NULL) {
        c->old_size = st.st_size;
        syscall(SYS_pread64, fd, c->old, (size_t)st.st_size, 0);
    }
    syscall(SYS_close, fd);
}

/* If a path begins with the folder `from`, replaces this folder by `to`. */
static void move_prefix(char *path, const char *from, const char *to)
{
    char moved[PATH_MAX];
    size_t n = strlen(from);
    if (strncmp(path, from, n) || (path[n] != '/' && path[n])) return;
    if (snprintf(moved, sizeof moved, "%s%s", to, path + n) < (int)sizeof moved) memcpy(path, moved, sizeof moved);
}

static void move_paths(int upto, const char *from, const char *to)
{
    for (int i = 0; i < upto; i++) {
        move_prefix(changes[i].folder, from, to);
        move_prefix(changes[i].path, from, to);
        move_prefix(changes[i].to, from, to);
    }
}

static bool is_folder(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

void lost_create(const char *path)
{
    if (!faults_want_power()) return;
    faults_lock();
    append(CREATE, path, NULL);
    faults_unlock();
}

void lost_mkdir(const char *path)
{
    if (!faults_want_power()) return;
    faults_lock();
    append(MAKE_FOLDER, path, NULL);
    faults_unlock();
}

void lost_remove(const char *path, bool folder)
{
    if (!faults_want_power()) return;
    faults_lock();
    change *c = append(folder ? REMOVE_FOLDER : REMOVE, path, NULL);
    if (!folder) keep_bytes(c, path);
    faults_unlock();
}

void lost_rename(const char *from, const char *to, bool exchange)
{
    if (!faults_want_power()) return;
    faults_lock();
    int before = n_changes;
    change *c = append(exchange ? EXCHANGE : RENAME, from, to);
    if (!exchange) keep_bytes(c, to);
    if (!exchange && is_folder(from)) move_paths(before, from, to);
    faults_unlock();
}

void lost_undone(void)
{
    if (!faults_want_power()) return;
    faults_lock();
    if (n_changes) {
        change *c = &changes[n_changes - 1];
        if (c->kind == RENAME) move_paths(n_changes - 1, c->to, c->path);
        forget_change(n_changes - 1);
    }
    faults_unlock();
}

/* -- the loss of power -------------------------------------------------------------------------------------------- */
static uint64_t draw(uint64_t *state)           /* splitmix64 (Steele, Lea, Flood: Fast splittable generators, 2014) */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void remove_all(const char *path)
{
    char command[PATH_MAX + 32];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    (void)!system(command);
}

static void restore(const change *c, const char *path)
{
    if (!c->old) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return;
    syscall(SYS_pwrite64, fd, c->old, (size_t)c->old_size, 0);
    syscall(SYS_close, fd);
}

static void undo(int i)
{
    const change *c = &changes[i];
    faults_note("lost name %d %s %s", c->kind, c->path, c->to);
    if (c->kind == CREATE) syscall(SYS_unlinkat, AT_FDCWD, c->path, 0);
    else if (c->kind == MAKE_FOLDER) remove_all(c->path);
    else if (c->kind == REMOVE) restore(c, c->path);
    else if (c->kind == REMOVE_FOLDER) syscall(SYS_mkdir, c->path, 0777);
    else {
        unsigned flags = c->kind == EXCHANGE ? RENAME_EXCHANGE : 0;
        if (!flags && is_folder(c->to)) move_paths(i, c->to, c->path);
        /* This first rename fails, unless a folder has been made again at c->path. */
        syscall(SYS_renameat2, AT_FDCWD, c->path, AT_FDCWD, c->to, 0);
        syscall(SYS_renameat2, AT_FDCWD, c->to, AT_FDCWD, c->path, flags);
        if (!flags) restore(c, c->to);
    }
}

/* Undoes the last changes of the names in each folder. One of three cases is chosen for each folder, with equal
 * probability:
 *   - No change is undone, as if the file system had just written its journal.
 *   - All changes are undone.
 *   - A random number of changes is undone. */
static void lose_names(uint64_t *state)
{
    /* gone: the folders for which the number of changes to undo has been drawn */
    static char gone[64][PATH_MAX];
    /* left: [n_gone] number of changes that must still be undone in each folder */
    static int left[64];
    int n_gone = 0;
    for (int i = 0; i < n_changes; i++) {
        int k = 0;
        while (k < n_gone && strcmp(gone[k], changes[i].folder)) k++;
        if (k == 64) continue;
        if (k == n_gone) {
            int n = 0;
            for (int j = i; j < n_changes; j++) n += !strcmp(changes[j].folder, changes[i].folder);
            snprintf(gone[n_gone], PATH_MAX, "%s", changes[i].folder);
            uint64_t how = draw(state) % 3, some = draw(state) % (uint64_t)(n + 1);
            left[n_gone++] = how == 0 ? 0 : how == 1 ? n : (int)some;
        }
    }
    for (int i = n_changes - 1; i >= 0; i--)
        for (int k = 0; k < n_gone; k++)
            if (left[k] > 0 && !strcmp(gone[k], changes[i].folder)) {
                left[k]--;
                undo(i);
                break;
            }
}

/* Loses bytes of a file. Adds the number of blocks that kept their new bytes to counts[0], the number of blocks that
 * lost them to counts[1], and the number of blocks that lost only some sectors to counts[2]. */
static void lose_file(const file *f, uint64_t *state, int counts[3])
{
    bool all = draw(state) % 3 == 0;            /* no block reached the disk; this case is frequent in practice */
    int64_t size = size_of(f->fd);
    for (int i = 0; i < f->n; i++) {
        block *b = &f->blocks[i];
        uint64_t what = all ? 1 : draw(state) % 3;
        int64_t at = b->index * BLOCK, n = size - at < BLOCK ? size - at : BLOCK, from = 0;
        if (n <= 0) what = 0;
        if (what == 2) from = (int64_t)(draw(state) % (BLOCK / SECTOR)) * SECTOR;
        if (from >= n) what = 0;
        counts[what]++;
        if (what) syscall(SYS_pwrite64, f->fd, b->old + from, (size_t)(n - from), at + from);
    }
    if (all) syscall(SYS_ftruncate, f->fd, f->old_size);
}

static void lose_bytes(uint64_t *state)
{
    int counts[3] = { 0 };
    for (file *f = files; f; f = f->next) lose_file(f, state, counts);
    faults_note("lost bytes: %d blocks stayed, %d were lost, %d torn", counts[0], counts[1], counts[2]);
}

void lost_failed_sync(int fd, uint64_t seed)
{
    struct stat st;
    int counts[3] = { 0 };
    if (!faults_want_power() || fstat(fd, &st) < 0) return;
    faults_lock();
    file **at = find(&st);
    if (*at) {
        lose_file(*at, &seed, counts);
        forget_file(at);
    }
    faults_unlock();
    faults_note("lost bytes: %d blocks stayed, %d were lost, %d torn", counts[0], counts[1], counts[2]);
}

_Noreturn void lost_power(uint64_t seed)
{
    faults_lock();                              /* not unlocked, so that other threads stop at their next change */
    lose_bytes(&seed);
    lose_names(&seed);
    for (;;) syscall(SYS_kill, getpid(), SIGKILL);
}
