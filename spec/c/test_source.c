/* SPDX-License-Identifier: BSD-3-Clause
 * Tests of src/chunk/source.c: parts at any offset of a file arrive in a chunk, past the page cache, from the mapped
 * pages if the file system refuses that, and from both if a read past the page cache ends early. */
#define _GNU_SOURCE
#include "check.h"
#include "chunk/source.h"
#include "io/file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FILE_NBYTES = (9 << 20) + 1234, CHUNK = 28 << 20, PARTS = 7, PAGE = 4096 };
enum { BLOCKS = 3, HEAD = 3, BODY = 32, N_BLOCKS = 100001 };      /* the part that consists of blocks */
static char path[512];
static uint64_t state = 88172645463325252u;

static int64_t draw(int64_t n)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int64_t)(state % (uint64_t)n);
}

static uint8_t byte_at(int64_t i) { return (uint8_t)(((uint64_t)i * 0x9E3779B97F4A7C15u) >> 56); }

/* Replaces the C library's function. A file system without reads past the page cache refuses to open such a file. */
static bool refuses;
static int refused;
int open(const char *name, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, int) : 0;
    va_end(ap);
    if (refuses && flags & O_DIRECT) return refused++, errno = EINVAL, -1;
    return (int)syscall(SYS_openat, AT_FDCWD, name, flags, mode);
}

static int write_bytes(const char *name, int64_t nbytes)
{
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    uint8_t *bytes = malloc((size_t)nbytes);
    for (int64_t i = 0; i < nbytes; i++) bytes[i] = byte_at(i);
    CHECK(fd >= 0 && write(fd, bytes, (size_t)nbytes) == nbytes && fsync(fd) == 0);
    free(bytes);
    return fd;
}

static int unchanged(void *lender) { return 0; }

/* Drops the file's pages from the page cache. */
static void drop(int fd) { posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); }

/* Returns the number of the file's pages in the page cache. */
static int64_t cached(int fd)
{
    static unsigned char pages[FILE_NBYTES / PAGE + 1];
    void *at = mmap(NULL, FILE_NBYTES, PROT_READ, MAP_SHARED, fd, 0);
    int64_t n = 0;
    if (!CHECK(at != MAP_FAILED && mincore(at, FILE_NBYTES, pages) == 0)) return -1;
    for (int64_t i = 0; i <= FILE_NBYTES / PAGE; i++) n += pages[i] & 1;
    munmap(at, FILE_NBYTES);
    return n;
}

/* Returns the offset in the file of byte k of a part. */
static int64_t place_of(const source_part *p, int64_t k)
{
    if (p->loans.n == 1) return p->file[0].offset + k;
    int64_t block = k / (HEAD + BODY), rest = k % (HEAD + BODY);
    return rest < HEAD ? p->file[0].offset + block * HEAD + rest : p->file[1].offset + block * BODY + rest - HEAD;
}

/* Reads parts of the file into a chunk with `fd` as the descriptor of direct reads. */
static void read_parts(const ps_map *m, int fd)
{
    ps_source *s;
    ps_source_job *job;
    source_part parts[PARTS];
    ps_lent_map lent[PARTS + 1];
    uint8_t *chunk = malloc(CHUNK);
    int64_t at = draw(3000);
    int wrong = 0;
    if (!OK(ps_source_open(&s))) return;
    memset(chunk, 0xee, CHUNK);
    for (int i = 0; i < PARTS; i++) {                    /* the last one ends at the file's end */
        int64_t nbytes = i == 1 ? 1 + draw(20) : i == 2 ? 5000000 + draw(100) : i == BLOCKS ? BODY * N_BLOCKS
                         : 1 + draw(3000000);
        int64_t offset = i < PARTS - 1 ? draw(FILE_NBYTES - nbytes) : FILE_NBYTES - nbytes;
        OK(ps_map_lend(m, offset, nbytes, &lent[i]));
        parts[i] = (source_part){ .at = at, .nbytes = nbytes, .file[0] = { fd, offset },
                                  .loans = { .loan[0] = { .bytes = lent[i].bytes, .check = unchanged }, .n = 1 } };
        ps_loans *l = &parts[i].loans;
        l->width[0] = nbytes;
        if (i == BLOCKS) {                               /* blocks with bytes of two ranges */
            int64_t heads = draw(FILE_NBYTES / 8);
            OK(ps_map_lend(m, heads, HEAD * N_BLOCKS, &lent[PARTS]));
            parts[i].nbytes = nbytes = (HEAD + BODY) * N_BLOCKS;
            parts[i].file[1] = parts[i].file[0];
            parts[i].file[0].offset = heads;
            l->loan[1] = l->loan[0];
            l->loan[0].bytes = lent[PARTS].bytes;
            l->width[0] = HEAD, l->width[1] = BODY;
            l->n = 2;
        }
        at += nbytes + draw(5000);
    }
    CHECK(at <= CHUNK);
    OK(ps_source_read(s, parts, PARTS, chunk, CHUNK, &job));
    CHECK(ps_source_wait(s, job, true) == 1);
    at = 0;
    for (int i = 0; i < PARTS; i++) {
        for (; at < parts[i].at; at++) wrong += chunk[at] != 0;
        for (int64_t k = 0; k < parts[i].nbytes; k++) wrong += chunk[at++] != byte_at(place_of(&parts[i], k));
        ps_map_unlend(&lent[i]);
    }
    ps_map_unlend(&lent[PARTS]);
    for (; at < CHUNK; at++) wrong += chunk[at] != 0;
    CHECK(wrong == 0);
    ps_source_close(s);
    free(chunk);
}

int main(void)
{
    const char *base = getenv("TMPDIR");
    char half[520];
    ps_map m, other;
    snprintf(path, sizeof path, "%s/psluajit-source-%d", base && *base ? base : "/tmp", (int)getpid());
    snprintf(half, sizeof half, "%s-half", path);
    int fd = write_bytes(path, FILE_NBYTES), short_fd = write_bytes(half, FILE_NBYTES / 2);
    if (!OK(ps_map_open(&m, path)) || !OK(ps_map_open(&other, path))) return end_checks();
    int direct = ps_map_direct(&m);
    CHECK(ps_map_direct(&m) == direct);                  /* opened once */
    drop(fd);
    bool drops = cached(fd) == 0;
    for (int i = 0; i < 5; i++) read_parts(&m, direct);
    if (direct >= 0 && drops) CHECK(cached(fd) == 0);
    refuses = true;
    CHECK(ps_map_direct(&other) == -1 && refused == 1);
    read_parts(&other, ps_map_direct(&other));
    CHECK(refused == 1);
    refuses = false;
    for (int i = 0; i < 5; i++) read_parts(&m, short_fd);      /* the rest comes from the mapped pages */
    int closed = dup(fd);
    close(closed);
    read_parts(&m, closed);                              /* every such read fails */
    ps_map_close(&m);
    ps_map_close(&other);
    if (direct >= 0) CHECK(fcntl(direct, F_GETFD) < 0);
    close(fd);
    close(short_fd);
    unlink(path);
    unlink(half);
    return end_checks();
}
