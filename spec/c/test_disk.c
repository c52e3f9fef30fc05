/* SPDX-License-Identifier: BSD-3-Clause
 * The disk tier: data that was written can be read again no matter what else is running, jobs keep their order, faults
 * become errors with a place, nothing hangs, and no file stays in the folder. Everything runs with io_uring and with
 * threads. */
#define _GNU_SOURCE
#include "check.h"
#include "base/fd.h"
#include "chunk/disk.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BLOCK = PS_DIRECT_ALIGN, MIB = 1 << 20 };
static char folder[512];
static uint64_t state = 88172645463325252u;

static uint64_t draw(uint64_t n)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % n;
}

static void *aligned(int64_t nbytes)
{
    void *p = NULL;
    if (posix_memalign(&p, BLOCK, (size_t)nbytes)) exit(2);
    memset(p, 0xee, (size_t)nbytes);
    return p;
}

/* Returns contents that depend on the offset in the file and on the version written there. */
static uint64_t word_at(int64_t at, uint32_t version)
{
    return ((uint64_t)at * 0x9E3779B97F4A7C15u) ^ ((uint64_t)version << 32 | version);
}
static void fill(uint64_t *p, int64_t offset, int64_t nbytes, uint32_t version)
{
    for (int64_t i = 0; i < nbytes / 8; i++) p[i] = word_at(offset + i * 8, version);
}
static bool holds(const uint64_t *p, int64_t offset, int64_t nbytes, uint32_t version)
{
    for (int64_t i = 0; i < nbytes / 8; i++)
        if (p[i] != word_at(offset + i * 8, version)) return false;
    return true;
}

static int entries(void)
{
    DIR *dir = opendir(folder);
    int n = -2;                 /* starts at -2 because of . and .. */
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

/* Returns this process's descriptor whose link contains `word`, or -1. */
static int find_fd(const char *word)
{
    for (int fd = 3; fd < 256; fd++) {
        char path[64], target[1024];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n < 0) continue;
        target[n] = 0;
        if (strstr(target, word)) return fd;
    }
    return -1;
}

/* A file system with fewer features: these two functions replace the C library's, and reject the features that a
 * test selects. */
static int refused_flags;           /* of open */
static bool refuse_fallocate;
static int refused_opens;

int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, int) : 0;
    va_end(ap);
    bool nameless = (flags & O_TMPFILE) == O_TMPFILE;
    if ((refused_flags & O_DIRECT & flags) || (nameless && (refused_flags & O_TMPFILE) == O_TMPFILE)) {
        refused_opens++;
        errno = flags & refused_flags & O_DIRECT ? EINVAL : EOPNOTSUPP;
        return -1;
    }
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int fallocate(int fd, int mode, off_t offset, off_t nbytes)
{
    if (refuse_fallocate) return errno = EOPNOTSUPP, -1;
    return (int)syscall(SYS_fallocate, fd, mode, offset, nbytes);
}

/* -- extents ----------------------------------------------------------------------------------------------------- */
static void test_extents(void)
{
    enum { BLOCKS = 256 };
    ps_disk *d;
    ps_disk_info info;
    int64_t a, b, c, e;
    if (!OK(ps_disk_open(folder, BLOCKS * BLOCK, 1, &d))) return;
    OK(ps_disk_extent_new(d, 4 * BLOCK, &a));
    OK(ps_disk_extent_new(d, 8 * BLOCK, &b));
    OK(ps_disk_extent_new(d, 4 * BLOCK, &c));
    CHECK(a == 0 && b == 4 * BLOCK && c == 12 * BLOCK);
    ps_disk_extent_free(d, a, 4 * BLOCK);
    OK(ps_disk_extent_new(d, 6 * BLOCK, &e));
    CHECK(e == 16 * BLOCK);                         /* does not fit into the first free extent */
    ps_disk_extent_free(d, b, 8 * BLOCK);
    OK(ps_disk_extent_new(d, 12 * BLOCK, &a));
    CHECK(a == 0);                                  /* the two free extents have been joined */
    FAILS(ps_disk_extent_new(d, 235 * BLOCK, &b), PS_ENOSPC, "memory.disk");
    CHECK(strstr(ps_error_message(), "in 1 pieces of at most 958464") != NULL);
    FAILS(ps_disk_extent_new(d, 100, &b), PS_EINVAL, "4096");
    FAILS(ps_disk_extent_new(d, 0, &b), PS_EINVAL, "4096");
    FAILS(ps_disk_extent_new(d, -BLOCK, &b), PS_EINVAL, "4096");
    ps_disk_get_info(d, &info);
    CHECK(info.capacity == BLOCKS * BLOCK && info.used == 22 * BLOCK);
    ps_disk_extent_free(d, a, 12 * BLOCK);
    ps_disk_extent_free(d, c, 4 * BLOCK);
    ps_disk_extent_free(d, e, 6 * BLOCK);

    /* Random allocations, compared with a map of blocks. Checks first fit and that blocks do not overlap, and that
     * everything is freed. */
    static int owner[BLOCKS];
    static struct { int64_t at, n; } live[BLOCKS];
    int n_live = 0;
    bool right = true;
    memset(owner, 0, sizeof owner);
    refuse_fallocate = true;                        /* so the file gets no holes */
    for (int turn = 0; turn < 20000 && right; turn++) {
        if (n_live && draw(100) < 48) {
            int i = (int)draw((uint64_t)n_live);
            ps_disk_extent_free(d, live[i].at * BLOCK, live[i].n * BLOCK);
            for (int64_t k = 0; k < live[i].n; k++) owner[live[i].at + k] = 0;
            live[i] = live[--n_live];
            continue;
        }
        int64_t n = 1 + (int64_t)draw(draw(4) ? 4 : 40), want = -1, at = -1;
        for (int64_t i = 0, run = 0; i < BLOCKS && want < 0; i++) {
            run = owner[i] ? 0 : run + 1;
            if (run == n) want = i - n + 1;
        }
        int rc = ps_disk_extent_new(d, n * BLOCK, &at);
        right = want < 0 ? rc == PS_ENOSPC : rc == 0 && at == want * BLOCK;
        if (want < 0) continue;
        for (int64_t k = 0; k < n; k++) owner[want + k] = 1;
        live[n_live].at = want, live[n_live++].n = n;
    }
    CHECK(right);
    refuse_fallocate = false;
    while (n_live--) ps_disk_extent_free(d, live[n_live].at * BLOCK, live[n_live].n * BLOCK);
    OK(ps_disk_extent_new(d, BLOCKS * BLOCK, &a));
    ps_disk_extent_free(d, a, BLOCKS * BLOCK);
    ps_disk_get_info(d, &info);
    CHECK(info.used == 0);
    ps_disk_close(d);
}

/* Returns the bytes that a file has on the disk. */
static int64_t space_of(int fd)
{
    struct stat st;
    return fd >= 0 && fstat(fd, &st) == 0 ? (int64_t)st.st_blocks * 512 : -1;
}

/* An extent is found whenever as many bytes are free, also in small pieces, and the file takes no more of the disk. */
static void test_holes(void)
{
    enum { BLOCKS = 64, MOST = 64 * BLOCKS, TURNS = 4000,
           OWN_BLOCKS = 8 };                       /* that the file system may need for its list of extents */
    static uint8_t owner[MOST];
    static struct { int64_t at, n; uint8_t mark; } live[BLOCKS];
    uint8_t *memory = aligned_alloc(BLOCK, BLOCKS * BLOCK);
    int n_live = 0, moved = 0;
    int64_t used = 0;
    ps_disk *d;
    ps_disk_info info;
    ps_disk_job *job;
    memset(owner, 0, sizeof owner);
    if (!memory || !OK(ps_disk_open(folder, BLOCKS * BLOCK, 1, &d))) return free(memory);
    int fd = find_fd("(deleted)");
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, BLOCK) < 0) {
        printf("skipped: the file system of %s has no holes: %s\n", folder, strerror(errno));
        ps_disk_close(d);
        return free(memory);
    }
    for (int turn = 0; turn < TURNS; turn++) {
        int64_t n = 1 + (int64_t)draw(draw(4) ? 4 : 20), at = -1;
        if (n_live && (draw(100) < 45 || used + n > BLOCKS)) {
            int i = (int)draw((uint64_t)n_live);
            OK(ps_disk_read(d, live[i].at * BLOCK, memory, live[i].n * BLOCK, NULL, &job));
            OK(ps_disk_wait(d, job, true));
            bool same = true;
            for (int64_t k = 0; k < live[i].n * BLOCK; k++) same = same && memory[k] == live[i].mark;
            CHECK(same);
            ps_disk_extent_free(d, live[i].at * BLOCK, live[i].n * BLOCK);
            memset(&owner[live[i].at], 0, (size_t)live[i].n);
            used -= live[i].n;
            live[i] = live[--n_live];
            continue;
        }
        int rc = ps_disk_extent_new(d, n * BLOCK, &at);
        if (rc < 0) {
            CHECK(rc == PS_ENOSPC && used + n > BLOCKS);
            continue;
        }
        moved += at >= BLOCKS * BLOCK;
        at /= BLOCK;
        CHECK(at >= 0 && at + n <= MOST);
        for (int64_t k = at; k < at + n; k++) CHECK(!owner[k]);
        memset(&owner[at], 1, (size_t)n);
        uint8_t mark = (uint8_t)(1 + draw(255));
        memset(memory, mark, (size_t)(n * BLOCK));
        OK(ps_disk_write(d, at * BLOCK, memory, n * BLOCK, NULL, &job));
        OK(ps_disk_wait(d, job, true));
        live[n_live].at = at, live[n_live].n = n, live[n_live++].mark = mark;
        used += n;
        CHECK(space_of(fd) <= (BLOCKS + OWN_BLOCKS) * BLOCK);
    }
    CHECK(moved > TURNS / 100);
    ps_disk_get_info(d, &info);
    CHECK(info.capacity == BLOCKS * BLOCK && info.used == used * BLOCK);
    while (n_live--) ps_disk_extent_free(d, live[n_live].at * BLOCK, live[n_live].n * BLOCK);
    ps_disk_close(d);
    free(memory);
}

/* -- opening ----------------------------------------------------------------------------------------------------- */
static void test_open(void)
{
    ps_disk *d;
    char path[600];
    struct rlimit before, low;
    snprintf(path, sizeof path, "%s/nowhere", folder);
    FAILS(ps_disk_open(path, MIB, 0, &d), PS_EIO, "nowhere");
    CHECK(d == NULL && strstr(ps_error_message(), "memory.disk") && strstr(ps_error_message(), "1048576"));
    snprintf(path, sizeof path, "%s/file", folder);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0);
    close(fd);
    FAILS(ps_disk_open(path, MIB, 0, &d), PS_EIO, "Not a directory");
    unlink(path);
    if (geteuid()) {
        chmod(folder, 0500);
        FAILS(ps_disk_open(folder, MIB, 0, &d), PS_EIO, "Permission denied");
        chmod(folder, 0700);
    }
    FAILS(ps_disk_open(folder, INT64_C(1) << 60, 0, &d), PS_ENOSPC, "1152921504606846976 bytes wanted");
    CHECK(strstr(ps_error_message(), folder) && strstr(ps_error_message(), "are free")
          && strstr(ps_error_message(), "memory.disk"));
    FAILS(ps_disk_open(folder, MIB + 1, 0, &d), PS_EINVAL, "4096");
    FAILS(ps_disk_open(folder, 0, 0, &d), PS_EINVAL, "4096");
    FAILS(ps_disk_open(folder, -BLOCK, 0, &d), PS_EINVAL, "4096");
    FAILS(ps_disk_open(NULL, MIB, 0, &d), PS_EINVAL, "memory.disk");
    FAILS(ps_disk_open("", MIB, 0, &d), PS_EINVAL, "memory.disk");
    ps_disk_close(NULL);

    getrlimit(RLIMIT_FSIZE, &before);
    low = before, low.rlim_cur = MIB;
    setrlimit(RLIMIT_FSIZE, &low);
    FAILS(ps_disk_open(folder, 2 * MIB, 0, &d), PS_ENOSPC, "ulimit");
    setrlimit(RLIMIT_FSIZE, &before);

    if (OK(ps_disk_open(folder, MIB, 0, &d))) {
        CHECK(entries() == 0);
        ps_disk_close(d);
    }
    CHECK(entries() == 0 && find_fd(folder) < 0 && find_fd("io_uring") < 0 && find_fd("eventfd") < 0);
}

static void test_arguments(int threads)
{
    ps_disk *d;
    ps_disk_job *job;
    if (!OK(ps_disk_open(folder, MIB, threads, &d))) return;
    uint8_t *mem = aligned(2 * MIB);
    FAILS(ps_disk_read(d, 0, mem, 100, NULL, &job), PS_EINVAL, "4096");
    CHECK(job == NULL);
    FAILS(ps_disk_read(d, 0, mem, 0, NULL, &job), PS_EINVAL, "4096");
    FAILS(ps_disk_write(d, 0, mem + 8, BLOCK, NULL, &job), PS_EINVAL, "address");
    FAILS(ps_disk_write(d, 0, NULL, BLOCK, NULL, &job), PS_EINVAL, "address");
    FAILS(ps_disk_write(d, 512, mem, BLOCK, NULL, &job), PS_EINVAL, "offset 512");
    FAILS(ps_disk_write(d, -BLOCK, mem, BLOCK, NULL, &job), PS_EINVAL, "offset -4096");
    FAILS(ps_disk_write(d, MIB, mem, BLOCK, NULL, &job), PS_ERANGE, "beyond its end at 1048576");
    FAILS(ps_disk_write(d, 0, mem, 2 * MIB, NULL, &job), PS_ERANGE, "beyond");
    ps_disk_close(d);
    free(mem);
}

/* -- contents ---------------------------------------------------------------------------------------------------- */
/* Random reads and writes of parts of regions. Jobs in the same region wait for the previous job, so that the
 * expected contents of a read are known. Jobs in different regions do not wait for each other. */
enum { REGIONS = 12, OPEN_JOBS = 48 };
typedef struct op {
    ps_disk_job *job;
    int region;
    bool write;
    int64_t at, n;              /* the region's first block and number of blocks */
    uint32_t *versions;         /* [n] for each block, the version that a read must find */
    uint64_t *mem;
} op;
typedef struct region {
    int64_t offset, blocks;
    uint32_t *versions;         /* [blocks] */
    ps_disk_job *tail;          /* the newest job that no thread has waited for */
} region;

static bool finish(ps_disk *d, op *o, region *r, bool block)
{
    int rc = ps_disk_wait(d, o->job, block);
    if (rc == 0) return false;
    bool right = rc == 1;
    for (int64_t i = 0; i < o->n && right && !o->write; i++)
        right = holds(o->mem + i * (BLOCK / 8), r->offset + (o->at + i) * BLOCK, BLOCK, o->versions[i]);
    const char *what = o->write ? "a random write" : "a random read";
    if (!right) check(0, __LINE__, what, rc < 0 ? ps_error_message() : "other bytes");
    if (r->tail == o->job) r->tail = NULL;
    free(o->mem);
    free(o->versions);
    o->job = NULL;
    return true;
}

static void begin(ps_disk *d, op *o, region *r, uint32_t version)
{
    o->n = 1 + (int64_t)draw(draw(3) ? 64 : (uint64_t)r->blocks);
    if (o->n > r->blocks) o->n = r->blocks;
    o->at = (int64_t)draw((uint64_t)(r->blocks - o->n + 1));
    o->mem = aligned(o->n * BLOCK);
    o->versions = malloc((size_t)o->n * sizeof *o->versions);
    if (!o->versions) exit(2);
    memcpy(o->versions, r->versions + o->at, (size_t)o->n * sizeof *o->versions);
    o->write = draw(2);
    int64_t offset = r->offset + o->at * BLOCK;
    if (o->write) {
        fill(o->mem, offset, o->n * BLOCK, version);
        for (int64_t i = 0; i < o->n; i++) r->versions[o->at + i] = version;
        OK(ps_disk_write(d, offset, o->mem, o->n * BLOCK, r->tail, &o->job));
    } else
        OK(ps_disk_read(d, offset, o->mem, o->n * BLOCK, r->tail, &o->job));
    r->tail = o->job;
}

static void test_mix(int threads, bool faults, int turns)
{
    ps_disk *d;
    static region regions[REGIONS];
    static op ops[OPEN_JOBS];
    if (!OK(ps_disk_open(folder, 48 * MIB, threads, &d))) return;
    for (int i = 0; i < REGIONS; i++) {
        region *r = &regions[i];
        *r = (region){ .blocks = 1 + (int64_t)draw(i % 3 ? 100 : 2400) };
        r->versions = malloc((size_t)r->blocks * sizeof *r->versions);
        if (!r->versions) exit(2);
        for (int64_t k = 0; k < r->blocks; k++) r->versions[k] = 1;
        OK(ps_disk_extent_new(d, r->blocks * BLOCK, &r->offset));
        uint64_t *mem = aligned(r->blocks * BLOCK);
        ps_disk_job *job;
        fill(mem, r->offset, r->blocks * BLOCK, 1);
        if (OK(ps_disk_write(d, r->offset, mem, r->blocks * BLOCK, NULL, &job))) OK(ps_disk_wait(d, job, true));
        free(mem);
    }
    memset(ops, 0, sizeof ops);
    for (int turn = 0; turn < turns; turn++) {
        static const int codes[] = { 0, EINTR, EAGAIN, 0 };
        if (faults && turn % 8 == 0) ps_test_fail_io((int64_t)draw(4), 1 + (int64_t)draw(6), codes[draw(4)]);
        op *o = &ops[draw(OPEN_JOBS)];
        if (o->job && !finish(d, o, &regions[o->region], draw(2))) continue;
        o->region = (int)draw(REGIONS);
        begin(d, o, &regions[o->region], (uint32_t)turn + 2);
    }
    for (int i = 0; i < OPEN_JOBS; i++)             /* waits for dependent jobs before the jobs on which they depend,
                                                     * in random order */
        if (ops[i].job) finish(d, &ops[i], &regions[ops[i].region], true);
    ps_test_fail_io(-1, 0, 0);
    ps_disk_close(d);
    for (int i = 0; i < REGIONS; i++) free(regions[i].versions);
    CHECK(entries() == 0);
}

/* With checksums, a byte that changed on the disk is an error of the job that reads it, and of no other job. Without
 * checksums, the byte is read. Short and interrupted transfers do not affect checksums. */
static void test_sums(int threads, bool sums)
{
    enum { PIECES_NBYTES = 9 * MIB };               /* three pieces */
    static const int codes[] = { 0, EINTR, EAGAIN };
    ps_disk *d;
    ps_disk_job *job;
    int64_t a, b;
    if (!OK(ps_disk_open(folder, 2 * PIECES_NBYTES, threads, &d))) return;
    if (sums) OK(ps_disk_check_sums(d));
    OK(ps_disk_extent_new(d, PIECES_NBYTES, &a));
    OK(ps_disk_extent_new(d, PIECES_NBYTES, &b));
    uint64_t *mem = aligned(PIECES_NBYTES);
    for (int i = 0; i < 3; i++) {
        ps_test_fail_io(i, 3, codes[i]);
        fill(mem, a, PIECES_NBYTES, (uint32_t)i);
        if (OK(ps_disk_write(d, a, mem, PIECES_NBYTES, NULL, &job))) OK(ps_disk_wait(d, job, true));
        if (OK(ps_disk_write(d, b, mem, PIECES_NBYTES, NULL, &job))) OK(ps_disk_wait(d, job, true));
        memset(mem, 0, PIECES_NBYTES);
        ps_test_fail_io(i, 3, codes[i]);
        if (OK(ps_disk_read(d, a, mem, PIECES_NBYTES, NULL, &job))) CHECK(ps_disk_wait(d, job, true) == 1);
        CHECK(holds(mem, a, PIECES_NBYTES, (uint32_t)i));
    }
    ps_test_fail_io(-1, 0, 0);
    int fd = find_fd(folder);
    uint8_t *block = aligned(BLOCK);
    int64_t at = a + 5 * MIB;                       /* in the second piece, which begins at 4 MiB */
    CHECK(fd >= 0 && pread(fd, block, BLOCK, at) == BLOCK);
    block[77] ^= 8;
    CHECK(pwrite(fd, block, BLOCK, at) == BLOCK);
    if (OK(ps_disk_read(d, a, mem, PIECES_NBYTES, NULL, &job))) {
        if (sums) FAILS(ps_disk_wait(d, job, true), PS_EIO, "4194304 bytes at offset 4194304 are damaged");
        else CHECK(ps_disk_wait(d, job, true) == 1 && !holds(mem, a, PIECES_NBYTES, 2));
    }
    if (OK(ps_disk_read(d, b, mem, PIECES_NBYTES, NULL, &job))) CHECK(ps_disk_wait(d, job, true) == 1);
    fill(mem, a, PIECES_NBYTES, 9);
    if (OK(ps_disk_write(d, a, mem, PIECES_NBYTES, NULL, &job))) OK(ps_disk_wait(d, job, true));
    if (OK(ps_disk_read(d, a, mem, PIECES_NBYTES, NULL, &job))) CHECK(ps_disk_wait(d, job, true) == 1);
    CHECK(holds(mem, a, PIECES_NBYTES, 9));
    free(block);
    free(mem);
    ps_disk_close(d);
}

/* One job with many pieces, and the values in its info. */
static void test_large(int threads)
{
    ps_disk *d;
    ps_disk_job *write, *read;
    ps_disk_info info;
    int64_t nbytes = 37 * MIB + 3 * BLOCK;
    if (!OK(ps_disk_open(folder, nbytes, threads, &d))) return;
    uint64_t *from = aligned(nbytes), *to = aligned(nbytes);
    fill(from, 0, nbytes, 7);
    OK(ps_disk_write(d, 0, from, nbytes, NULL, &write));
    OK(ps_disk_read(d, 0, to, nbytes, write, &read));
    CHECK(ps_disk_wait(d, write, true) == 1);       /* freed before the job that refers to it */
    CHECK(ps_disk_wait(d, read, true) == 1);
    CHECK(holds(to, 0, nbytes, 7));
    ps_disk_get_info(d, &info);
    CHECK(info.bytes_read == nbytes && info.bytes_written == nbytes && info.busy_s > 0);
    CHECK(threads == 0 || !info.uring);
    double busy_s = info.busy_s;
    ps_disk_get_info(d, &info);
    CHECK(info.busy_s == busy_s);                   /* idle */
    ps_disk_close(d);
    free(from);
    free(to);
}

/* -- faults ------------------------------------------------------------------------------------------------------ */
static void test_errors(int threads)
{
    ps_disk *d;
    ps_disk_job *a, *b, *c, *e;
    if (!OK(ps_disk_open(folder, 32 * MIB, threads, &d))) return;
    uint64_t *mem = aligned(16 * MIB), *other = aligned(MIB);
    fill(mem, 0, 16 * MIB, 3);

    ps_test_fail_io(2, 1, EIO);
    OK(ps_disk_write(d, 0, mem, 16 * MIB, NULL, &a));
    FAILS(ps_disk_wait(d, a, true), PS_EIO, "writing");
    CHECK(strstr(ps_error_message(), "Input/output error") && strstr(ps_error_message(), "offset")
          && strstr(ps_error_message(), "bytes") && strstr(ps_error_message(), folder));
    OK(ps_disk_write(d, 0, mem, 16 * MIB, NULL, &a));       /* the next job succeeds */
    CHECK(ps_disk_wait(d, a, true) == 1);

    /* Jobs that wait for a failed job fail, whatever the length of the chain and whether they existed at that time. */
    ps_test_slow_io(0.02);
    ps_test_fail_io(0, 1, EIO);
    OK(ps_disk_read(d, 16 * MIB, other, MIB, NULL, &a));
    OK(ps_disk_read(d, 0, mem, BLOCK, a, &b));
    OK(ps_disk_write(d, 0, mem, BLOCK, b, &c));
    FAILS(ps_disk_wait(d, c, true), PS_EIO, "not begun");
    CHECK(strstr(ps_error_message(), "reading 1048576 bytes at offset 16777216") != NULL);
    OK(ps_disk_read(d, 0, mem, BLOCK, a, &e));              /* ended already */
    FAILS(ps_disk_wait(d, e, true), PS_EIO, "not begun");
    FAILS(ps_disk_wait(d, b, true), PS_EIO, "not begun");
    FAILS(ps_disk_wait(d, a, true), PS_EIO, "reading");
    CHECK(!strstr(ps_error_message(), "not begun"));
    ps_test_slow_io(0);

    ps_test_fail_io(0, 1, ENOSPC);
    OK(ps_disk_write(d, 0, mem, BLOCK, NULL, &a));
    FAILS(ps_disk_wait(d, a, true), PS_ENOSPC, "No space left");

    /* Short, interrupted and rejected transfers are continued ... */
    static const int codes[] = { 0, EINTR, EAGAIN };
    for (int i = 0; i < 3; i++) {
        fill(mem, 0, 16 * MIB, 4 + (uint32_t)i);
        ps_test_fail_io(0, 30, codes[i]);
        OK(ps_disk_write(d, 0, mem, 16 * MIB, NULL, &a));
        CHECK(ps_disk_wait(d, a, true) == 1);
        memset(mem, 0, 16 * MIB);
        ps_test_fail_io(1, 30, codes[i]);
        OK(ps_disk_read(d, 0, mem, 16 * MIB, NULL, &a));
        CHECK(ps_disk_wait(d, a, true) == 1);
        CHECK(holds(mem, 0, 16 * MIB, 4 + (uint32_t)i));
        ps_test_fail_io(0, 5, codes[i]);                    /* a single block cannot be transferred in halves */
        OK(ps_disk_read(d, 0, mem, BLOCK, NULL, &a));
        CHECK(ps_disk_wait(d, a, true) == 1);
    }
    ps_test_fail_io(0, INT64_MAX / 2, EAGAIN);              /* ... but not indefinitely */
    OK(ps_disk_read(d, 0, mem, BLOCK, NULL, &a));
    FAILS(ps_disk_wait(d, a, true), PS_EIO, "temporarily");
    ps_test_fail_io(-1, 0, 0);

    int fd = find_fd(folder);                               /* the file ends too early */
    CHECK(fd >= 0 && ftruncate(fd, 24 * MIB) == 0);
    OK(ps_disk_read(d, 20 * MIB, mem, 8 * MIB, NULL, &a));
    FAILS(ps_disk_wait(d, a, true), PS_EIO, "ended early");
    ps_disk_close(d);
    free(mem);
    free(other);
}

static void test_slow(int threads)
{
    ps_disk *d;
    ps_disk_job *job;
    if (!OK(ps_disk_open(folder, 64 * MIB, threads, &d))) return;
    uint8_t *mem = aligned(64 * MIB);
    ps_test_slow_io(0.05);
    double began = ps_now();
    OK(ps_disk_write(d, 0, mem, BLOCK, NULL, &job));
    CHECK(ps_disk_wait(d, job, false) == 0);
    CHECK(ps_disk_wait(d, job, true) == 1 && ps_now() - began >= 0.05);
    OK(ps_disk_write(d, 0, mem, BLOCK, NULL, &job));
    int rc, polls = 0;
    while (!(rc = ps_disk_wait(d, job, false))) polls++, usleep(1000);
    CHECK(rc == 1 && polls > 0);

    ps_test_slow_io(1);
    /* Closes the disk while jobs are in the kernel, in the queue, and waiting for other jobs. */
    ps_disk_job *after = NULL;
    for (int i = 0; i < 200; i++) {
        int64_t offset = i * (int64_t)(MIB / 4), nbytes = MIB / 4 - (int64_t)draw(9) * BLOCK;
        OK((draw(2) ? ps_disk_write(d, offset, mem + offset, nbytes, draw(2) ? after : NULL, &job)
                    : ps_disk_read(d, offset, mem + offset, nbytes, draw(2) ? after : NULL, &job)));
        after = job;
    }
    began = ps_now();
    ps_disk_close(d);
    CHECK(ps_now() - began < PROMPT_S);
    ps_test_slow_io(0);
    free(mem);
}

/* The ring fails in its thread. Jobs end with an error, and so do later jobs. */
static void test_lost_ring(void)
{
    ps_disk *d;
    ps_disk_job *a, *b, *c;
    ps_disk_info info;
    if (!OK(ps_disk_open(folder, 64 * MIB, 0, &d))) return;
    ps_disk_get_info(d, &info);
    int ring = find_fd("io_uring"), null = open("/dev/null", O_RDWR);
    if (info.uring && CHECK(ring >= 0 && null >= 0)) {
        uint8_t *mem = aligned(64 * MIB);
        OK(ps_disk_write(d, 0, mem, MIB, NULL, &a));
        CHECK(ps_disk_wait(d, a, true) == 1);
        dup2(null, ring);
        int rc = ps_disk_write(d, 0, mem, 64 * MIB, NULL, &a);
        if (rc >= 0) {
            int rc_b = ps_disk_read(d, 0, mem, MIB, a, &b);
            FAILS(ps_disk_wait(d, a, true), PS_EIO, "io_uring failed");
            if (rc_b >= 0) FAILS(ps_disk_wait(d, b, true), PS_EIO, "io_uring failed");
        }
        FAILS(ps_disk_write(d, 0, mem, MIB, NULL, &c), PS_EIO, "io_uring failed");
        ps_disk_close(d);
        free(mem);
    } else
        ps_disk_close(d);
    if (null >= 0) close(null);
}

/* No descriptor is left for a ring, so plain threads do the work. */
static void test_no_ring(void)
{
    ps_disk *d = NULL;
    ps_disk_info info;
    struct rlimit before, low;
    int next = dup(0);
    close(next);
    getrlimit(RLIMIT_NOFILE, &before);
    low = before, low.rlim_cur = (rlim_t)next + 1;
    setrlimit(RLIMIT_NOFILE, &low);
    OK(ps_disk_open(folder, MIB, 0, &d));
    setrlimit(RLIMIT_NOFILE, &before);
    if (!d) return;
    ps_disk_get_info(d, &info);
    CHECK(!info.uring);
    uint64_t *mem = aligned(MIB);
    ps_disk_job *a, *b;
    fill(mem, 0, MIB, 9);
    OK(ps_disk_write(d, 0, mem, MIB, NULL, &a));
    CHECK(ps_disk_wait(d, a, true) == 1);
    memset(mem, 0, MIB);
    OK(ps_disk_read(d, 0, mem, MIB, NULL, &b));
    CHECK(ps_disk_wait(d, b, true) == 1 && holds(mem, 0, MIB, 9));
    ps_disk_close(d);
    free(mem);
}

/* Everything works without nameless files, without direct transfers, and without a way to reserve space. */
static void test_poor_file_system(void)
{
    static const struct { int flags; bool fallocate; } poor[] = {
        { O_TMPFILE, false }, { O_DIRECT, false }, { O_TMPFILE | O_DIRECT, false }, { 0, true }
    };
    for (int i = 0; i < 4; i++) {
        ps_disk *d;
        ps_disk_job *job;
        ps_disk_info info;
        refused_flags = poor[i].flags, refuse_fallocate = poor[i].fallocate, refused_opens = 0;
        if (OK(ps_disk_open(folder, 8 * MIB, 0, &d))) {
            CHECK(refused_opens > 0 || !poor[i].flags);
            CHECK(entries() == 0);
            ps_disk_get_info(d, &info);
            CHECK(!info.direct || !(poor[i].flags & O_DIRECT));
            uint64_t *mem = aligned(8 * MIB);
            fill(mem, 0, 8 * MIB, 5);
            OK(ps_disk_write(d, 0, mem, 8 * MIB, NULL, &job));
            CHECK(ps_disk_wait(d, job, true) == 1);
            memset(mem, 0, 8 * MIB);
            OK(ps_disk_read(d, 0, mem, 8 * MIB, NULL, &job));
            CHECK(ps_disk_wait(d, job, true) == 1 && holds(mem, 0, 8 * MIB, 5));
            ps_disk_close(d);
            free(mem);
        }
    }
    refused_flags = 0, refuse_fallocate = false;
}

/* Every allocation fails once, one per run. Nothing is lost (AddressSanitizer detects leaks). */
static int all_calls(int threads, uint64_t *mem)
{
    ps_disk *d;
    ps_disk_job *a = NULL, *b = NULL;
    int64_t at[40];
    double read_rate, write_rate;
    PS_TRY(ps_disk_open(folder, 4 * MIB, threads, &d));
    int n = 0, rc = 0;
    while (n < 40 && (rc = ps_disk_extent_new(d, BLOCK, &at[n])) >= 0) n++;
    for (int i = 0; i < n; i += 2) ps_disk_extent_free(d, at[i], BLOCK);
    if (rc >= 0) rc = ps_disk_write(d, 0, mem, MIB, NULL, &a);
    if (rc >= 0) rc = ps_disk_read(d, MIB, mem + MIB / 8, MIB, a, &b);
    if (a && ps_disk_wait(d, a, true) < 0) rc = PS_EIO;
    if (b && ps_disk_wait(d, b, true) < 0) rc = PS_EIO;
    if (rc >= 0) rc = ps_disk_probe(d, MIB, &read_rate, &write_rate);
    ps_disk_close(d);
    return rc;
}

static void test_no_memory(int threads)
{
    uint64_t *mem = aligned(2 * MIB);
    int rc = PS_ENOMEM, nth = 0, survived = 0;
    for (bool reached = true; nth < 100 && reached; nth++) {
        ps_test_fail_alloc(nth, 1);
        rc = all_calls(threads, mem);
        reached = ps_test_fail_alloc_left() < 0;
        ps_test_fail_alloc(-1, 0);
        survived += reached && rc == 0;
        CHECK(rc == 0 || (reached && rc == PS_ENOMEM));
    }
    OK(rc);
    CHECK(survived >= threads - 1);                           /* one of several threads is enough */
    CHECK(nth > 7 && nth < 100 && entries() == 0);
    free(mem);
}

static void test_probe(int threads)
{
    ps_disk *d;
    ps_disk_job *job;
    ps_disk_info info;
    double read_rate = 0, write_rate = 0;
    if (!OK(ps_disk_open(folder, 16 * MIB, threads, &d))) return;
    OK(ps_disk_probe(d, 13 * MIB + BLOCK, &read_rate, &write_rate));
    CHECK(read_rate > 0 && write_rate > 0);
    ps_disk_get_info(d, &info);
    CHECK(info.used == 0 && info.bytes_read == 0 && info.bytes_written == 0);
    FAILS(ps_disk_probe(d, 32 * MIB, &read_rate, &write_rate), PS_ENOSPC, "memory.disk");
    FAILS(ps_disk_probe(d, 1, &read_rate, &write_rate), PS_EINVAL, "4096");
    uint8_t *mem = aligned(BLOCK);
    ps_test_slow_io(0.05);
    OK(ps_disk_write(d, 0, mem, BLOCK, NULL, &job));
    FAILS(ps_disk_probe(d, MIB, &read_rate, &write_rate), PS_ESTATE, "1 jobs");
    CHECK(ps_disk_wait(d, job, true) == 1);
    ps_test_slow_io(0);
    ps_disk_close(d);
    free(mem);
    if (!OK(ps_disk_pretend(16 * MIB, &d))) return;
    FAILS(ps_disk_probe(d, MIB, &read_rate, &write_rate), PS_ESTATE, "dry run");
    ps_disk_close(d);
}

int main(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/psluajit-disk-XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(folder)) {
        printf("no folder %s can be made\n", folder);
        return 1;
    }
    static const int threads[] = { 0, 1, 4 };
    alarm(300);                         /* ends a test that hangs */
    setenv("PS_LOG", "error", 0);      /* hides expected warnings about such file systems */
    test_extents();
    test_holes();
    test_open();
    for (int i = 0; i < 3; i++) {
        test_arguments(threads[i]);
        test_large(threads[i]);
        test_mix(threads[i], false, 800);
        test_mix(threads[i], true, 600);
        test_sums(threads[i], true);
        test_sums(threads[i], false);
        test_errors(threads[i]);
        test_slow(threads[i]);
        test_no_memory(threads[i]);
        test_probe(threads[i]);
    }
    test_lost_ring();
    test_no_ring();
    test_poor_file_system();
    CHECK(entries() == 0);
    rmdir(folder);
    return end_checks();
}
