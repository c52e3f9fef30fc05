/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements sources (source.h): the threads that read parts of the user's files into chunks, and the
 * chunks that have sources. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/grow.h"
#include "base/thread.h"
#include "chunk/impl.h"
#include "mem/mem.h"

/* The number of bytes that are read or copied at once. A block fits in a core's cache. */
enum { BLOCK = 1 << 20 };
enum { THREADS = 2 };           /* one thread copies a block while the other thread waits for the disk */

struct ps_source_job {
    const source_part *parts;
    int32_t n;
    char *dst;
    int64_t nbytes;
    /* The lock guards the fields up to `done`.
     * part: index of the first part that is not wholly taken
     * reading: number of threads that are reading */
    int32_t part, reading;
    int64_t at;                 /* number of bytes of part `part` that are taken */
    bool done;
    ps_source_job *next;
};

/* A thread reads one piece at a time. A piece has `nbytes` bytes of a part, starting at byte `at` of the part. If the
 * part has two loans, the piece consists of whole blocks. */
typedef struct piece { const source_part *part; int64_t at, nbytes; } piece;

/* The bytes of one loan in a piece. The range has `nbytes` bytes, starting at byte `at` of the loan. */
typedef struct range { const source_part *part; int i; int64_t at, nbytes; } range;

typedef struct reader {
    struct ps_source *source;
    pthread_t thread;
    /* staging: [BLOCK] a buffer inside `room`, for reads that bypass the page cache; NULL if there is no memory for
     * it */
    char *room, *staging;
} reader;

struct ps_source {
    pthread_mutex_t lock;
    pthread_cond_t work, ended;
    bool stop;                  /* guarded by the lock */
    /* first, last: the queue of jobs, which the lock guards. A job leaves the queue when threads have taken all of
     * its parts. */
    ps_source_job *first, *last;
    int n_readers;
    reader readers[THREADS];
};

/* -- the threads --------------------------------------------------------------------------------------------------- */
/* Calls madvise for all pages that contain these n bytes. A loan maps whole pages that no one else uses, so the call
 * affects no other bytes. */
static void advise(const char *bytes, int64_t n, int advice)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)bytes & ~(page - 1);
    uintptr_t end = ((uintptr_t)bytes + (uintptr_t)n + page - 1) & ~(page - 1);
    madvise((void *)begin, end - begin, advice);
}

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21         /* exists since Linux 5.4; older systems return an error */
#endif

/* Copies n bytes of a range to their places in the part at dst. The bytes start at byte `done` of the range. */
static void put(const range *x, int64_t done, char *dst, const char *src, int64_t n)
{
    ps_loans_copy(dst, &x->part->loans, x->i, x->at + done, src, n);
}

/* Reads a range with reads that bypass the page cache. The bytes of a tensor in a safetensors file can begin at any
 * offset. Therefore the aligned range around a block is read into `staging`, and the block is copied from there.
 * Returns the number of bytes that were read. This number is smaller than the size of the range if a read failed. */
static int64_t read_direct(const range *x, char *dst, char *staging)
{
    int fd = x->part->file[x->i].fd;
    for (int64_t done = 0, n; done < x->nbytes; done += n) {
        int64_t at = x->part->file[x->i].offset + x->at + done, from = at / PS_DIRECT_ALIGN * PS_DIRECT_ALIGN;
        int64_t skip = at - from, rest = x->nbytes - done;
        int64_t want = (skip + rest + PS_DIRECT_ALIGN - 1) / PS_DIRECT_ALIGN * PS_DIRECT_ALIGN;
        ssize_t got;
        do got = pread(fd, staging, (size_t)(want < BLOCK ? want : BLOCK), from); while (got < 0 && errno == EINTR);
        if (got <= skip) return done;
        n = got - skip < rest ? got - skip : rest;
        put(x, done, dst, staging + skip, n);
    }
    return x->nbytes;
}

/* Copies bytes of a range from the mapped file, starting at byte `begin` of the range. Removes the pages of these
 * bytes from the process at once, so that the pages do not count as memory of the process. If the user owns the file,
 * also removes the pages from the page cache. Otherwise a large model would push other files out of the cache. */
static void copy_mapped(const range *x, int64_t begin, char *dst)
{
    const char *src = (const char *)x->part->loans.loan[x->i].bytes + x->at + begin;
    int64_t page = sysconf(_SC_PAGESIZE), nbytes = x->nbytes - begin;
    advise(src, nbytes < BLOCK ? nbytes : BLOCK, MADV_WILLNEED);
    for (int64_t at = 0; at < nbytes; at += BLOCK) {
        int64_t n = nbytes - at < BLOCK ? nbytes - at : BLOCK, rest = nbytes - at - n;
        if (rest > 0) advise(src + at + n, rest < BLOCK ? rest : BLOCK, MADV_WILLNEED);
        put(x, begin + at, dst, src + at, n);
        int64_t done = rest > 0 ? n - page : n;                            /* the next block shares the last page */
        advise(src + at, done, MADV_PAGEOUT);
        advise(src + at, done, MADV_DONTNEED);                             /* because MADV_PAGEOUT skips dirty pages */
    }
    advise(src, nbytes, MADV_DONTNEED);
}

void source_copy(char *dst, const char *src, int64_t nbytes)
{
    source_part p = { .loans = { .loan = { { .bytes = (void *)src } }, .width = { nbytes }, .n = 1 } };
    copy_mapped(&(range){ &p, 0, 0, nbytes }, 0, dst);
}

/* Reads a piece of a part. dst is the place at which the part begins in memory. If reads that bypass the page cache
 * are impossible or fail, the remaining bytes are copied from the mapped pages. The access to mapped pages also
 * detects truncated files. */
static void read_piece(const piece *x, char *dst, char *staging)
{
    const ps_loans *loans = &x->part->loans;
    int64_t block = loans->n == 2 ? loans->width[0] + loans->width[1] : 1;
    for (int i = 0; i < loans->n; i++) {
        int64_t width = loans->n == 2 ? loans->width[i] : 1;
        range r = { x->part, i, x->at / block * width, x->nbytes / block * width };
        int64_t n = x->part->file[i].fd >= 0 && staging ? read_direct(&r, dst, staging) : 0;
        if (n < r.nbytes) copy_mapped(&r, n, dst);
    }
}

/* Returns the size in bytes of the piece that starts at byte `at` of a part, if more bytes than this remain in the
 * part. For one loan, a piece is a block whose end is aligned in the file. For two loans, a piece has whole blocks of
 * both loans, and the aligned range of each loan fits in `staging`. */
static int64_t piece_nbytes(const source_part *p, int64_t at)
{
    if (p->loans.n == 1) return BLOCK - (p->file[0].offset + at) % PS_DIRECT_ALIGN;
    int64_t a = p->loans.width[0], b = p->loans.width[1];
    return (BLOCK - 2 * PS_DIRECT_ALIGN) / (a > b ? a : b) * (a + b);
}

/* Takes the next piece of a job. */
static piece take_piece(ps_source_job *job, bool direct)
{
    const source_part *p = &job->parts[job->part];
    piece x = { p, job->at, p->nbytes - job->at };
    int64_t block = piece_nbytes(p, job->at);
    if (direct && p->file[0].fd >= 0 && x.nbytes > block) {
        x.nbytes = block;
        job->at += block;
    } else {
        job->part++;
        job->at = 0;
    }
    return x;
}

/* Fills the bytes before, between and after the parts with zeros. */
static void clear_gaps(const ps_source_job *job)
{
    int64_t at = 0;
    for (int32_t i = 0; i < job->n; i++) {
        const source_part *p = &job->parts[i];
        memset(job->dst + at, 0, (size_t)(p->at - at));
        at = p->at + p->nbytes;
    }
    memset(job->dst + at, 0, (size_t)(job->nbytes - at));
}

static void *source_thread(void *arg)
{
    reader *self = arg;
    ps_source *s = self->source;
    pthread_setname_np(pthread_self(), "ps-source");
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->stop) pthread_cond_wait(&s->work, &s->lock);
        ps_source_job *job = s->first;
        if (!job) break;
        bool begins = job->part == 0 && job->at == 0;
        piece x = { NULL, 0, 0 };
        if (job->n > 0) x = take_piece(job, self->staging != NULL);
        if (job->part == job->n) s->first = job->next;
        job->reading++;
        pthread_mutex_unlock(&s->lock);
        if (begins) clear_gaps(job);
        if (x.part) read_piece(&x, job->dst + x.part->at, self->staging);
        pthread_mutex_lock(&s->lock);
        if (--job->reading > 0 || job->part < job->n) continue;
        job->done = true;
        pthread_cond_broadcast(&s->ended);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Starts a thread. Returns 0 or an error number. */
static int reader_start(ps_source *s)
{
    reader *r = &s->readers[s->n_readers];
    *r = (reader){ .source = s, .room = ps_alloc(BLOCK + PS_DIRECT_ALIGN) };
    if (r->room) r->staging = r->room + (PS_DIRECT_ALIGN - (uintptr_t)r->room % PS_DIRECT_ALIGN);
    int rc = ps_thread_start(&r->thread, source_thread, r);
    if (rc) ps_free(r->room);
    else s->n_readers++;
    return rc;
}

int ps_source_open(ps_source **out)
{
    ps_source *s = ps_alloc0(sizeof *s);
    if (!s) return ps_fail_nomem(sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->ended, NULL);
    int rc = 0;
    for (int i = 0; i < THREADS && rc == 0; i++) rc = reader_start(s);
    if (s->n_readers == 0) {
        pthread_cond_destroy(&s->ended);
        pthread_cond_destroy(&s->work);
        pthread_mutex_destroy(&s->lock);
        ps_free(s);
        return ps_fail(PS_ENOMEM, "cannot start the thread that reads mapped files: %s", strerror(rc));
    }
    *out = s;
    return 0;
}

void ps_source_close(ps_source *s)
{
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < s->n_readers; i++) {
        pthread_join(s->readers[i].thread, NULL);
        ps_free(s->readers[i].room);
    }
    pthread_cond_destroy(&s->ended);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    ps_free(s);
}

int ps_source_read(ps_source *s, const source_part *parts, int32_t n, void *dst, int64_t nbytes, ps_source_job **out)
{
    for (int32_t i = 0; i < n; i++) PS_TRY(ps_loans_check(&parts[i].loans));
    ps_source_job *job = ps_alloc0(sizeof *job);
    if (!job) return ps_fail_nomem(sizeof *job);
    *job = (ps_source_job){ .parts = parts, .n = n, .dst = dst, .nbytes = nbytes };
    pthread_mutex_lock(&s->lock);
    if (s->first) s->last->next = job;
    else s->first = job;
    s->last = job;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    *out = job;
    return 0;
}

int ps_source_wait(ps_source *s, ps_source_job *job, bool block)
{
    pthread_mutex_lock(&s->lock);
    while (block && !job->done) pthread_cond_wait(&s->ended, &s->lock);
    bool done = job->done;
    pthread_mutex_unlock(&s->lock);
    if (done) ps_free(job);
    return done;
}

/* -- chunks with sources ------------------------------------------------------------------------------------------- */
void source_drop(chunk *c)
{
    for (int32_t i = 0; i < c->n_source; i++) ps_loans_end(&c->source[i].loans);
    ps_free(c->source);
    c->source = NULL;
    c->n_source = c->source_capacity = 0;
}

/* Returns true if parts can be added to the source of c, because c has no contents outside its source. */
static bool takes_parts(const ps_chunks *cs, const chunk *c)
{
    if (!cs->disk || c->transfer || c->pins > 0 || c->extent >= 0) return false;
    for (int t = 0; t < cs->n_tiers; t++) if (c->slot[t]) return false;
    return c->valid == (c->n_source ? 1u << (cs->n_tiers - 1) : 0);
}

/* Returns the index of the part of c's source that has the same bytes as m, or -1. */
static int32_t part_of(const chunk *c, const member *m)
{
    for (int32_t i = 0; i < c->n_source; i++)
        if (c->source[i].at == m->offset && c->source[i].nbytes == m->nbytes) return i;
    return -1;
}

/* Moves the loans of s to *out. s must have borrowed bytes, or be in a chunk that has a source. Returns false if the
 * loans cannot be moved now. */
static bool take_loans(ps_chunks *cs, ps_storage *s, ps_loans *out)
{
    if (!ps_storage_is_of(s, &cs->base)) return ps_storage_take_loans(s, out);
    chunk *from = chunk_at(cs, ((member *)s->block)->chunk);
    int32_t i = part_of(from, s->block);
    if (i < 0 || from->transfer || from->pins > 0) return false;
    *out = from->source[i].loans;
    memmove(&from->source[i], &from->source[i + 1], (size_t)(--from->n_source - i) * sizeof *from->source);
    /* Higher tiers may still have copies. */
    if (from->n_source == 0) from->valid &= (uint8_t)~(1u << (cs->n_tiers - 1));
    return true;
}

int source_adopt(ps_chunks *cs, ps_storage *s, const member *m)
{
    chunk *c = chunk_at(cs, m->chunk);
    if (!takes_parts(cs, c)) return 0;
    PS_TRY(ps_grow(c->source, c->source_capacity, c->n_source + 1));
    source_part part = { .at = m->offset, .nbytes = m->nbytes };
    if (!take_loans(cs, s, &part.loans)) return 0;
    for (int i = 0; i < part.loans.n; i++) {
        const ps_loan *loan = &part.loans.loan[i];
        bool direct = loan->direct && !cs->tiers[0].be->pretends;
        part.file[i].fd = direct ? loan->direct(loan->lender, &part.file[i].offset) : -1;
    }
    int32_t at = c->n_source++;
    for (; at > 0 && c->source[at - 1].at > part.at; at--) c->source[at] = c->source[at - 1];
    c->source[at] = part;
    c->valid = (uint8_t)(1u << (cs->n_tiers - 1));
    return 1;
}
