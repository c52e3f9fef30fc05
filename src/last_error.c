/* SPDX-License-Identifier: BSD-3-Clause
 * The error that ends the program (last_error.h).
 *
 * The ranks of one machine agree through a record, so that only one of them prints an error that they have in common.
 * The record is a file in /tmp. Its name is a hash of the launcher's process, the attempt and the standard error. The
 * record lists the ranks that have failed, with hashes of their errors.
 *
 * A rank that fails locks the record. If no listed rank has the same error, the rank prints it. Then the rank adds
 * itself to the list. It adds itself only after printing, so that a rank which dies before it prints is not listed.
 * If a rank finds itself in the list, the list belongs to another run under the same launcher. The list is then
 * cleared, and the rank prints.
 *
 * A rank can also fail because the watch has notified it of another rank's failure. The error of the notified rank
 * then repeats the first line of the other rank's error. The notified rank prints its error only if the other rank is
 * not in the list. In that case the other rank runs on another machine or was killed. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "last_error.h"
#include "ps.h"
#include "rendezvous/watch.h"

static const char FOLDER[] = "/tmp";
static const char PREFIX[] = "psluajit-error-";
static const time_t STALE_S = 86400;       /* age in seconds at which an abandoned record of a job is removed */
/* Lock of the record: maximum wait, and time between two attempts. */
static const long WAIT_NS = 1000000000, TRY_NS = 5000000;

enum { MAX_RECORD = 65536, MAX_ENVIRONMENT = 1 << 20, MAX_ANCESTORS = 16 };

/* Launchers that start one process per rank and that end with their job. `rank` is the variable that contains the
 * rank. `here` is the variable that contains the number of ranks on this machine. */
static const struct launcher { const char *rank, *here; } LAUNCHERS[] = {
    { "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE" },     /* torchrun: RANK contains the rank, but other programs set
                                                        * RANK too */
    { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE" },
    { "PMI_RANK", "MPI_LOCALNRANKS" },
    { "SLURM_PROCID", NULL },
};

/* Returns the launcher that has set variables of this process, or NULL if there is none. */
static const struct launcher *launcher_here(void)
{
    for (size_t i = 0; i < sizeof LAUNCHERS / sizeof *LAUNCHERS; i++)
        if (getenv(LAUNCHERS[i].rank)) return &LAUNCHERS[i];
    return NULL;
}

static void print(const char *name, const char *text)
{
    fflush(stdout);
    if (name) fprintf(stderr, "%s: ", name);
    fprintf(stderr, "%s\n", text);
    fflush(stderr);
}

/* -- psluajit's own launcher --------------------------------------------------------------------------------------- */

/* Returns whether standard error is the pipe on which a launcher (lua/ps/launch/supervisor.lua) reads this rank's
 * errors. PS_LAUNCHER_STDERR contains the inode of that pipe. The inode is compared because a process may inherit the
 * variable but write its errors to another file. */
static bool launcher_reads(void)
{
    const char *text = getenv("PS_LAUNCHER_STDERR");
    struct stat file;
    unsigned long long inode;
    return text && sscanf(text, "%llu", &inode) == 1 && fstat(2, &file) == 0 && S_ISFIFO(file.st_mode)
        && file.st_ino == inode;
}

static void print_marked(const char *name, const char *text)
{
    fflush(stdout);
    fprintf(stderr, "\036%s%s", name ? name : "", name ? ": " : "");
    for (; *text; text++) {
        fputc(*text, stderr);
        if (*text == '\n') fputc('\036', stderr);
    }
    fputc('\n', stderr);
    fflush(stderr);
}

/* -- other launchers ----------------------------------------------------------------------------------------------- */

/* Reads a file in /proc into text[room], and appends a 0. Returns the number of bytes, or -1 if the file cannot be
 * read. */
static ssize_t read_proc(const char *file, long pid, char *text, size_t room)
{
    char path[64];
    size_t n = 0;
    ssize_t got = 0;
    snprintf(path, sizeof path, "/proc/%ld/%s", pid, file);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    while (n < room - 1 && ((got = read(fd, text + n, room - 1 - n)) > 0 || (got < 0 && errno == EINTR)))
        if (got > 0) n += (size_t)got;
    close(fd);
    text[n] = 0;
    return got < 0 ? -1 : (ssize_t)n;
}

/* Finds the parent of process `pid`, and the time at which process `pid` was started, in ticks since the system's
 * start. */
static bool parent_of(long pid, long *parent, unsigned long long *start)
{
    char text[4096], *at;
    if (read_proc("stat", pid, text, sizeof text) < 0 || !(at = strrchr(text, ')'))) return false;
    return sscanf(at + 1, " %*c %ld %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                  parent, start) == 2;
}

/* Returns true if process `pid` was started with the environment variable `name`. If the process belongs to another
 * user, its environment cannot be read, and the result is false. That is correct, because such a process is not a
 * rank's shell. */
static bool has_variable(long pid, const char *name, char *buffer)
{
    ssize_t n = read_proc("environ", pid, buffer, MAX_ENVIRONMENT);
    size_t length = strlen(name);
    for (char *at = buffer; n > 0 && at < buffer + n; at += strlen(at) + 1)
        if (strncmp(at, name, length) == 0 && at[length] == '=') return true;
    return false;
}

/* Finds the launcher. The launcher is the nearest ancestor process that does not have the rank's variable. Shells
 * between the launcher and this process do have the variable. */
static bool find_launcher(const char *rank_variable, long *pid, unsigned long long *start)
{
    char *buffer = malloc(MAX_ENVIRONMENT);
    bool found = false;
    long parent = getppid(), up;
    for (int i = 0; buffer && !found && parent > 0 && i < MAX_ANCESTORS; i++) {
        if (!parent_of(parent, &up, start)) break;
        *pid = parent;
        found = !has_variable(parent, rank_variable, buffer);
        parent = up;
    }
    free(buffer);
    return found;
}

/* Returns a hash of at most n bytes of the text. Addresses are left out, because they differ between processes.
 * Returns 0 if there is no memory. */
static uint64_t hash_words(const char *text, size_t n)
{
    char *copy = malloc(n + 1), *to = copy;
    const char *end = text + strnlen(text, n);
    uint64_t hash;
    if (!copy) return 0;
    while (text < end) {
        *to++ = *text++;
        if (to[-1] != '0' || text == end || *text != 'x') continue;
        *to++ = *text++;
        while (text < end && isxdigit((unsigned char)*text)) text++;
    }
    hash = ps_xxh3(copy, to - copy);
    free(copy);
    return hash ? hash : 1;
}

/* Hashes of the errors that a rank compares. A rank is notified if the watch reports another rank's failure to it. */
typedef struct words {
    uint64_t all;                          /* hash of the error; if the rank was notified, hash of the verdict only */
    uint64_t first;                        /* hash of the error's first line, which other ranks receive; 0 if the rank
                                            * was notified */
    uint64_t cause;                        /* if the rank was notified, hash of the first line of the other rank's
                                            * error; otherwise 0 */
} words;

static words words_of(const char *text)
{
    static const char FAILED[] = ") failed: ";
    char verdict[PS_WATCH_TEXT];
    if (!ps_watch_repeats(text, verdict))
        return (words){ hash_words(text, strlen(text)), hash_words(text, ps_watch_last_words(text)), 0 };
    const char *cause = strstr(verdict, FAILED);
    return (words){ hash_words(verdict, sizeof verdict), 0,
                    cause ? hash_words(cause + strlen(FAILED), sizeof verdict) : 0 };
}

/* Finds the path of the record and the rank of this process. Returns false if no known launcher has started the
 * process. */
static bool find_record(char *path, size_t room, long *rank)
{
    char key[1024], boot[64] = "";
    struct stat file, space;
    long launcher;
    unsigned long long start;
    const struct launcher *by = launcher_here();
    if (!by) return false;
    const char *variable = by->rank, *number, *attempt = getenv("TORCHELASTIC_RESTART_COUNT");
    number = getenv(strcmp(variable, "TORCHELASTIC_RUN_ID") == 0 ? "RANK" : variable);
    if (!number || !*number || strlen(number) > 9 || number[strspn(number, "0123456789")]) return false;
    *rank = atol(number);
    FILE *id = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (id) {
        if (!fgets(boot, sizeof boot, id)) boot[0] = 0;
        fclose(id);
    }
    if (!boot[0] || fstat(2, &file) || stat("/proc/self/ns/pid", &space)
        || !find_launcher(variable, &launcher, &start)) return false;
    /* If each rank has a separate file as its standard error, the error is printed into each file. */
    bool own = S_ISREG(file.st_mode);
    snprintf(key, sizeof key, "%s %llu %ld %llu %.40s %.40s %llu %llu", boot, (unsigned long long)space.st_ino,
             launcher, start, variable, attempt ? attempt : "", own ? (unsigned long long)file.st_dev : 0,
             own ? (unsigned long long)file.st_ino : 0);
    snprintf(path, room, "%s/%s%u-%016llx", FOLDER, PREFIX, (unsigned)geteuid(),
             (unsigned long long)ps_xxh3(key, (int64_t)strlen(key)));
    return true;
}

/* -- the record ---------------------------------------------------------------------------------------------------- */

static bool lock(int fd)
{
    for (long waited = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; waited += TRY_NS) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || waited >= WAIT_NS) return false;
        nanosleep(&(struct timespec){ 0, TRY_NS }, NULL);
    }
    return true;
}

/* Opens and locks the record. Sets *made to true if no rank has written to the record yet. Returns -1 if the record
 * cannot be opened or locked. */
static int open_record(const char *path, bool *made)
{
    struct stat file;
    for (int i = 0; i < 8; i++) {
        int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0) return -1;
        if (!lock(fd) || fstat(fd, &file) != 0 || !S_ISREG(file.st_mode) || file.st_uid != geteuid()
            || file.st_size >= MAX_RECORD) {
            close(fd);
            return -1;
        }
        *made = file.st_size == 0;
        if (file.st_nlink > 0) return fd;
        close(fd);                               /* the last rank removed this file after it was opened */
    }
    return -1;
}

/* Removes old records. A record remains if only some ranks of a job have failed. */
static void sweep(void)
{
    DIR *folder = opendir(FOLDER);
    struct dirent *entry;
    struct stat file;
    time_t now = time(NULL);
    while (folder && (entry = readdir(folder)))
        if (strncmp(entry->d_name, PREFIX, sizeof PREFIX - 1) == 0
            && fstatat(dirfd(folder), entry->d_name, &file, AT_SYMLINK_NOFOLLOW) == 0 && file.st_uid == geteuid()
            && now - file.st_mtime > STALE_S) unlinkat(dirfd(folder), entry->d_name, 0);
    if (folder) closedir(folder);
}

/* Returns the number of ranks that the launcher has started on this machine, or 0 if the number is unknown. */
static long ranks_here(void)
{
    const struct launcher *by = launcher_here();
    const char *number = by && by->here ? getenv(by->here) : NULL;
    return number ? atol(number) : 0;
}

static bool reported;                      /* true if this process has reported an error; it can report two */

/* Locks the record and prints the text, unless a listed rank has already printed the same text. Adds this rank to the
 * record. Returns false if the record cannot be used; nothing was then printed. */
static bool print_by_record(const char *path, long rank, const char *name, const char *text)
{
    char *list = malloc(MAX_RECORD), line[64];
    bool made = false, known = false, again = false;
    long listed = 0, other;
    unsigned long long all, first;
    int fd = list ? open_record(path, &made) : -1;
    ssize_t n = fd < 0 ? -1 : read(fd, list, MAX_RECORD - 1);
    words own = words_of(text);
    if (n >= 0) {
        list[n] = 0;
        for (char *at = strtok(list, "\n"); at; at = strtok(NULL, "\n")) {
            if (sscanf(at, "%ld %llx %llx", &other, &all, &first) != 3) continue;
            listed++;
            again = again || (other == rank && !reported);
            known = known || (own.all && own.all == all) || (own.cause && own.cause == first);
        }
        if (again && ftruncate(fd, 0) == 0) listed = 0;
        if (again || !known) print(name, text);
        int length = snprintf(line, sizeof line, "%ld %llx %llx\n", rank, (unsigned long long)own.all,
                              (unsigned long long)own.first);
        if (pwrite(fd, line, (size_t)length, lseek(fd, 0, SEEK_END)) != length || listed + 1 == ranks_here())
            unlink(path);
        if (made) sweep();
        reported = true;
    }
    free(list);
    if (fd >= 0) close(fd);
    return n >= 0;
}

void last_error(const char *name, const char *text)
{
    char path[256];
    long rank;
    if (launcher_reads()) print_marked(name, text);
    else if (!find_record(path, sizeof path, &rank) || !print_by_record(path, rank, name, text)) print(name, text);
}
