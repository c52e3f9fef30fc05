/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the disk tier (disk.h): a file without a name, its extents, and the threads that transfer
 * bytes.
 *
 * A job is divided into pieces of PIECE bytes. Jobs that may begin wait in two queues, one for reads and one for
 * writes. Threads take pieces from the two queues in turn. A piece belongs to one thread from take_piece to
 * end_piece. The io_uring thread keeps up to DEPTH pieces in the kernel, and polls an eventfd while it is idle. A
 * plain thread has one piece at a time, and waits for `work` while it is idle.
 *
 * Fields that `lock` guards change only while `lock` is held. Functions marked (lock) are called with `lock` held. An
 * error belongs to the thread that raises it. A job therefore stores the cause of its failure, and ps_disk_wait
 * raises the error in the caller's thread. Every job ends, because a thread that must give up ends all jobs. */
#define _GNU_SOURCE
#include "chunk/disk.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/grow.h"
#include "base/log.h"
#include "base/record.h"
#include "base/thread.h"
#include "ps_test.h"
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/magic.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 4 << 20, DEPTH = 32, MOST_THREADS = 64, FALLBACK_THREADS = 4 };
/* An attempt that transfers no bytes is repeated at most MOST_TRIES times. After QUICK_TRIES attempts, the thread
 * sleeps for one millisecond before each further attempt. */
enum { MOST_TRIES = 1000, QUICK_TRIES = 8 };
enum { READ, WRITE };
/* The length of a file includes its holes. The length can be up to FILE_OVER_SPACE times the space that the file has
 * on the disk. With checksums it can be up to SUMMED_OVER_SPACE times this space, because the array of checksums also
 * has entries for holes. */
enum { FILE_OVER_SPACE = 64, SUMMED_OVER_SPACE = 2 };

/* The cause of a job's first failure. `err` is the errno of a piece or of the ring. `err` is 0 if the file ended
 * early, or if a write wrote no bytes. */
typedef struct cause {
    int err;
    bool ring;
    bool differs;               /* the checksum of the bytes has changed since they were written */
    int way;                    /* READ or WRITE */
    int64_t offset, nbytes;     /* position and size of the piece in the file */
} cause;

struct ps_disk_job {
    int way;
    int64_t offset, nbytes;     /* position in the file, size in bytes */
    int64_t began_ns;           /* start of its event in the record, or 0 */
    uint8_t *mem;
    /* The lock guards the fields that follow. */
    /* cut: number of bytes that have been divided into pieces
     * moved: number of bytes that have been transferred */
    int64_t cut, moved;
    int pieces;                 /* number of pieces that threads are transferring */
    /* inherited: the job never began, because an earlier job failed with `cause` */
    bool done, failed, inherited;
    cause cause;
    /* dependents: first job that waits for this job
     * sibling: next job that waits for the same job as this job */
    ps_disk_job *dependents, *sibling;
    ps_disk_job *next;                      /* next job in a queue of jobs that may begin */
    ps_disk_job *newer, *older;             /* neighbors in the list of jobs that no caller has waited for */
};

typedef struct piece {
    ps_disk_job *job;           /* NULL if this entry has no piece */
    uint8_t *mem;
    int64_t offset, left;       /* position in the file and size of the remainder to transfer */
    int64_t len;                /* number of bytes of this attempt */
    int64_t begin, nbytes;      /* position in the file and size of the whole piece */
    int64_t forced;             /* result that a test requested in place of a transfer, or 0 */
    double began;
    int tries;                  /* number of attempts since the last progress */
    struct iovec iov;
} piece;

/* The checksum of a written piece. It is stored at the index of the piece's first block. */
typedef struct piece_sum { uint64_t sum; int64_t nbytes; } piece_sum;
typedef struct extent { int64_t offset, nbytes; } extent;
typedef struct line { ps_disk_job *first, *last; } line;

struct ps_disk {
    /* wake: eventfd that wakes the ring's thread, or -1 */
    int fd, wake;
    char *folder;
    int64_t capacity;
    bool direct, uring;
    /* sums: [reach / PS_DIRECT_ALIGN] checksums, or NULL. The array needs no lock, because only one thread works on a
     * piece, and the read of a chunk waits for the chunk's write. Unused pages of the array use no memory. */
    piece_sum *sums;
    /* The fields up to `reach` are used only by the caller's thread. Free extents and holes are sorted by offset. Two
     * free extents never touch each other, and neither do two holes. Therefore n allocated extents and m holes leave
     * at most n + m + 1 free extents. The arrays grow when an extent is allocated, so that freeing an extent never
     * needs memory. A hole has no space on the disk, see make_piece. */
    extent *free_space, *holes;
    int n_free, n_given, room, n_holes, holes_room;
    int64_t used;
    /* end: length of the file in bytes, including its holes
     * reach: maximum length of the file in bytes */
    int64_t end, reach;

    pthread_mutex_t lock;
    pthread_cond_t work, ended;
    bool has_lock;
    pthread_t threads[MOST_THREADS];
    int n_threads;
    struct io_uring ring;       /* used only by the ring's thread */
    /* The lock guards the fields that follow. */
    bool stop;
    cause dead;                 /* dead.ring is set if the ring's thread has given up */
    line lines[2];              /* the two queues, indexed by READ and WRITE */
    int turn;                   /* queue that is tried first for the next piece */
    ps_disk_job *jobs;          /* list of all jobs, newest first */
    int under_way;              /* number of jobs that have not ended */
    int64_t bytes[2];
    double busy_s, busy_since;
};

/* -- faults that tests request ----------------------------------------------------------------------------------- */
/* As in base/alloc.c, each attempt decrements `until_failure`. An attempt fails if, before the decrement, the counter
 * was at most 0 and greater than -failures. */
static atomic_llong until_failure = -1, failures, slow_ns;
static atomic_int failure_code;

void ps_test_fail_io(int64_t nth, int64_t count, int code)
{
    atomic_store(&failures, 0);
    atomic_store(&failure_code, code);
    atomic_store(&until_failure, nth < 0 ? -1 : nth);
    atomic_store(&failures, nth < 0 || count < 0 ? 0 : count);
}

void ps_test_slow_io(double seconds) { atomic_store(&slow_ns, seconds > 0 ? (long long)(seconds * 1e9) : 0); }

static bool should_fail(void)
{
    long long most = atomic_load(&failures);
    if (atomic_load(&until_failure) <= -most) return false;
    long long n = atomic_fetch_sub(&until_failure, 1);
    return n <= 0 && n > -most;
}

static void nap(double seconds)
{
    struct timespec t = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };
    nanosleep(&t, NULL);
}

/* -- jobs and pieces --------------------------------------------------------------------------------------------- */
/* (lock) Appends a job to its queue. */
static void enqueue(ps_disk *d, ps_disk_job *job)
{
    line *l = &d->lines[job->way];
    job->next = NULL;
    if (l->first) l->last->next = job;
    else l->first = job;
    l->last = job;
    pthread_cond_broadcast(&d->work);
}

/* (lock) Ends a job. If the job succeeded, the jobs that waited for the job may now begin. If the job failed, the
 * jobs that waited for it fail and end too. */
static void end_job(ps_disk *d, ps_disk_job *job)
{
    job->next = NULL;
    for (ps_disk_job *ended = job; ended;) {
        ps_disk_job *j = ended, *dependent = j->dependents;
        ended = j->next;
        j->done = true;
        j->dependents = NULL;
        if (!j->failed)
            ps_record_end((ps_record_event){ .kind = PS_REC_DISK, .name = (uint16_t)j->way, .begin_ns = j->began_ns,
                                             .id = -1, .bytes = j->nbytes });
        if (--d->under_way == 0) d->busy_s += ps_now() - d->busy_since;
        while (dependent) {
            ps_disk_job *sibling = dependent->sibling;
            if (j->failed) {
                dependent->failed = dependent->inherited = true;
                dependent->cause = j->cause;
                dependent->next = ended, ended = dependent;
            } else
                enqueue(d, dependent);
            dependent = sibling;
        }
    }
    pthread_cond_broadcast(&d->ended);
}

/* (lock) Takes the next piece from the queues. Returns false if there is no piece, or if the disk is being closed. */
static bool take_piece(ps_disk *d, piece *p)
{
    line *l = &d->lines[d->turn];
    if (!l->first) l = &d->lines[!d->turn];
    ps_disk_job *job = l->first;
    if (!job || d->stop) return false;
    int64_t nbytes = job->nbytes - job->cut < PIECE ? job->nbytes - job->cut : PIECE;
    *p = (piece){ .job = job, .mem = job->mem + job->cut, .offset = job->offset + job->cut, .left = nbytes,
                  .begin = job->offset + job->cut, .nbytes = nbytes };
    job->cut += nbytes;
    job->pieces++;
    if (job->cut == job->nbytes) l->first = job->next;
    d->turn = !job->way;
    return true;
}

/* -- checksums --------------------------------------------------------------------------------------------------- */
static const uint8_t *memory_of(const piece *p) { return p->job->mem + (p->begin - p->job->offset); }

static void note_sum(ps_disk *d, const piece *p)
{
    if (!d->sums || p->job->way != WRITE) return;
    d->sums[p->begin / PS_DIRECT_ALIGN] = (piece_sum){ ps_xxh3(memory_of(p), p->nbytes), p->nbytes };
}

/* Returns false if the checksum of a piece that was read has changed since the piece was written. */
static bool sum_fits(const ps_disk *d, const piece *p)
{
    if (!d->sums || p->job->way != READ) return true;
    const piece_sum *s = &d->sums[p->begin / PS_DIRECT_ALIGN];
    return s->nbytes != p->nbytes || s->sum == ps_xxh3(memory_of(p), p->nbytes);
}

/* Prepares an attempt to transfer the remainder of a piece. */
static void begin(piece *p)
{
    p->len = p->left;
    p->forced = 0;
    p->began = atomic_load(&slow_ns) ? ps_now() : 0;
    if (!should_fail()) return;
    int code = atomic_load(&failure_code);
    p->len = p->left / 2 / PS_DIRECT_ALIGN * PS_DIRECT_ALIGN;
    if (code) p->forced = -code;
    else if (!p->len) p->forced = PS_DIRECT_ALIGN / 2;
}

/* (lock) Marks a job as failed. No more of its pieces begin. The job ends when its pieces in progress have ended. */
static void fail_job(ps_disk *d, ps_disk_job *job, cause why)
{
    line *l = &d->lines[job->way];
    if (job->failed) return;
    job->failed = true;
    job->cause = why;
    if (l->first == job) l->first = job->next;      /* only the first job of a queue has pieces */
}

/* Accounts for an attempt that returned `res`, which is a number of bytes or a negative errno. Returns true if the
 * remainder of the piece must be tried again. Only whole blocks count, because a direct transfer cannot continue
 * within a block. */
static bool end_piece(ps_disk *d, piece *p, int64_t res)
{
    ps_disk_job *job = p->job;
    double slow = (double)atomic_load(&slow_ns) * 1e-9;
    if (slow > 0 && p->began > 0 && ps_now() - p->began < slow) nap(slow - (ps_now() - p->began));
    int64_t whole = res > 0 ? res / PS_DIRECT_ALIGN * PS_DIRECT_ALIGN : 0;
    bool idle_try = !whole && (res > 0 || res == -EINTR || res == -EAGAIN);
    p->tries = idle_try ? p->tries + 1 : 0;
    bool differs = whole == p->left && !sum_fits(d, p);
    pthread_mutex_lock(&d->lock);
    if (whole) {
        p->mem += whole, p->offset += whole, p->left -= whole;
        job->moved += whole;
        d->bytes[job->way] += whole;
        if (differs) fail_job(d, job, (cause){ .differs = true, .way = READ, .offset = p->begin, .nbytes = p->nbytes });
    } else if (!idle_try || p->tries > MOST_TRIES)
        fail_job(d, job, (cause){ .err = res < 0 ? (int)-res : 0, .way = job->way, .offset = p->offset,
                                  .nbytes = p->left });
    bool again = p->left > 0 && !job->failed;
    if (!again && --job->pieces == 0 && (job->failed || job->cut == job->nbytes)) end_job(d, job);
    pthread_mutex_unlock(&d->lock);
    if (!again) p->job = NULL;
    else if (p->tries > QUICK_TRIES) nap(1e-3);
    return again;
}

/* Ends every job with an error, because the ring's thread cannot continue. */
static void give_up(ps_disk *d, int err)
{
    pthread_mutex_lock(&d->lock);
    d->dead = (cause){ .err = err, .ring = true };
    d->lines[READ] = d->lines[WRITE] = (line){ NULL, NULL };
    for (ps_disk_job *job = d->jobs; job; job = job->older) {
        if (job->done) continue;
        job->failed = true;
        job->cause = d->dead;
        job->dependents = NULL;         /* the loop itself ends the dependents */
        end_job(d, job);
    }
    pthread_mutex_unlock(&d->lock);
}

/* -- the threads ------------------------------------------------------------------------------------------------- */
static void *plain_thread(void *arg)
{
    ps_disk *d = arg;
    pthread_setname_np(pthread_self(), "ps-disk");
    for (;;) {
        piece p;
        pthread_mutex_lock(&d->lock);
        bool have = take_piece(d, &p);
        while (!have && !d->stop) {
            pthread_cond_wait(&d->work, &d->lock);
            have = take_piece(d, &p);
        }
        pthread_mutex_unlock(&d->lock);
        if (!have) return NULL;
        int64_t res;
        note_sum(d, &p);
        do {
            begin(&p);
            if (p.forced) res = p.forced;
            else if (p.job->way == WRITE) res = pwrite(d->fd, p.mem, (size_t)p.len, p.offset);
            else res = pread(d->fd, p.mem, (size_t)p.len, p.offset);
            if (res < 0 && !p.forced) res = -errno;
        } while (end_piece(d, &p, res));
    }
}

/* Submits a piece. The ring always has a free entry, because it has two entries per piece, and a piece has at most
 * one request. */
static void send_piece(ps_disk *d, piece *p)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&d->ring);
    begin(p);
    p->iov = (struct iovec){ p->mem, (size_t)p->len };
    if (p->forced) io_uring_prep_nop(sqe);
    else if (p->job->way == WRITE) io_uring_prep_writev(sqe, d->fd, &p->iov, 1, (uint64_t)p->offset);
    else io_uring_prep_readv(sqe, d->fd, &p->iov, 1, (uint64_t)p->offset);
    io_uring_sqe_set_data(sqe, p);
}

/* Handles completed requests, and returns their number. Sets *polled if the request of the eventfd was one of them.
 * Sends the remainders of pieces again only if `resend` is set. */
static int reap(ps_disk *d, bool resend, bool *polled)
{
    struct io_uring_cqe *cqe;
    int n = 0;
    for (; io_uring_peek_cqe(&d->ring, &cqe) == 0; n++) {
        piece *p = io_uring_cqe_get_data(cqe);
        int64_t res = cqe->res;
        io_uring_cqe_seen(&d->ring, cqe);
        if (!p) {
            eventfd_t count;
            eventfd_read(d->wake, &count);
            *polled = true;
        } else if (end_piece(d, p, p->forced ? p->forced : res)) {
            if (resend) send_piece(d, p);
            else p->job = NULL;
        }
    }
    return n;
}

/* Called when the kernel rejects the ring. Requests that the kernel has already accepted can still write to buffers,
 * so this function waits for these requests for at most two seconds. Unsent requests never complete. One of the
 * unsent requests may be the request of the eventfd, which has no piece. Therefore the wait also ends if the number
 * of pieces in use is smaller than the number of unsent requests. */
static void lose_ring(ps_disk *d, piece *pieces, int err)
{
    bool polled;
    for (int i = 0; i < 2000; i++) {
        int held = 0, unsent = (int)io_uring_sq_ready(&d->ring);
        for (int k = 0; k < DEPTH; k++) held += pieces[k].job != NULL;
        if (!held || held < unsent) break;
        if (!reap(d, false, &polled)) nap(1e-3);
    }
    give_up(d, err);
}

/* Assigns a piece to each unused entry, and prepares the requests. Returns the number of pieces in use. If writes
 * need checksums, the requests are submitted first and the checksums are computed afterwards, so that the disk works
 * while the checksums are computed. All other requests, and requests that the kernel refuses, stay in the ring until
 * the next submission. */
static int send_pieces(ps_disk *d, piece *pieces)
{
    bool taken[DEPTH] = { false };
    int held = 0, sums = 0;
    for (int i = 0; i < DEPTH; i++) {
        if (!pieces[i].job) {
            pthread_mutex_lock(&d->lock);
            taken[i] = take_piece(d, &pieces[i]);
            pthread_mutex_unlock(&d->lock);
            if (!taken[i]) continue;
            send_piece(d, &pieces[i]);
            sums += d->sums && pieces[i].job->way == WRITE;
        }
        held++;
    }
    if (sums) io_uring_submit_and_wait(&d->ring, 0);
    for (int i = 0; i < DEPTH && sums; i++)
        if (taken[i]) note_sum(d, &pieces[i]);
    return held;
}

static void *ring_thread(void *arg)
{
    ps_disk *d = arg;
    piece pieces[DEPTH] = { { .job = NULL } };
    bool wants_poll = true;
    int refusals = 0;
    pthread_setname_np(pthread_self(), "ps-disk");
    for (;;) {
        if (wants_poll) {
            struct io_uring_sqe *sqe = io_uring_get_sqe(&d->ring);
            io_uring_prep_poll_add(sqe, d->wake, POLLIN);
            io_uring_sqe_set_data(sqe, NULL);
            wants_poll = false;
        }
        int held = send_pieces(d, pieces);
        pthread_mutex_lock(&d->lock);
        bool stop = d->stop;
        pthread_mutex_unlock(&d->lock);
        if (stop && !held) return NULL;
        int rc = io_uring_submit_and_wait(&d->ring, 1);
        refusals = rc == -EAGAIN || rc == -EBUSY || rc == -ENOMEM ? refusals + 1 : 0;
        if ((rc < 0 && rc != -EINTR && !refusals) || refusals > MOST_TRIES) {
            lose_ring(d, pieces, -rc);
            return NULL;
        }
        if (reap(d, true, &wants_poll)) refusals = 0;
        else if (refusals) nap(1e-3);
    }
}

static int start_threads(ps_disk *d, int wanted)
{
    int rc = 0;
    while (d->n_threads < wanted && !rc) {
        rc = ps_thread_start(&d->threads[d->n_threads], d->uring ? ring_thread : plain_thread, d);
        if (!rc) d->n_threads++;
    }
    if (!d->n_threads) return ps_fail(PS_ENOMEM, "cannot start the disk tier's thread: %s", strerror(rc));
    return 0;
}

static int make_lock(ps_disk *d)
{
    if (pthread_mutex_init(&d->lock, NULL) || pthread_cond_init(&d->work, NULL) || pthread_cond_init(&d->ended, NULL))
        return ps_fail(PS_ENOMEM, "cannot make a lock for the disk tier");
    d->has_lock = true;
    return 0;
}

/* Starts the io_uring thread. If there is no io_uring, or if threads > 0, starts plain threads instead. */
static int start(ps_disk *d, int threads)
{
    PS_TRY(make_lock(d));
    if (threads <= 0) {
        int rc = io_uring_queue_init(2 * DEPTH, &d->ring, 0);
        d->uring = rc == 0;
        if (d->uring) d->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (d->uring && d->wake < 0) {
            rc = -errno;
            io_uring_queue_exit(&d->ring);
            d->uring = false;
        }
        if (rc) ps_log(PS_LOG_INFO, "disk tier: no io_uring (%s); %d plain threads", strerror(-rc), FALLBACK_THREADS);
        threads = d->uring ? 1 : FALLBACK_THREADS;
    }
    return start_threads(d, threads < MOST_THREADS ? threads : MOST_THREADS);
}

/* -- the file ---------------------------------------------------------------------------------------------------- */
/* Creates a file without a name. If the file system cannot do this, creates a file with a name and unlinks it. */
static int open_nameless(const char *folder, int flags)
{
    flags |= O_RDWR | O_CLOEXEC;
    int fd = ps_fd_above_stdio(open(folder, flags | O_TMPFILE | O_EXCL, 0600));
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return fd;
    static atomic_uint count;
    char path[4096];
    for (int tries = 0; tries < 100; tries++) {
        int n = snprintf(path, sizeof path, "%s/.psluajit-disk-%ld-%u", folder, (long)getpid(),
                         atomic_fetch_add(&count, 1));
        if (n >= (int)sizeof path) return errno = ENAMETOOLONG, -1;
        fd = ps_fd_above_stdio(open(path, flags | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
        if (fd >= 0) {
            unlink(path);
            return fd;
        }
        if (errno != EEXIST) return -1;
    }
    return -1;
}

static int fail_file(const ps_disk *d, const char *what, int err)
{
    if (err == ENOSPC || err == EDQUOT)
        return ps_fail(PS_ENOSPC, "disk tier: %s has no room for %lld bytes (%s); lower memory.disk's limit, free some "
                       "space or choose another folder", d->folder, (long long)d->capacity, strerror(err));
    return ps_fail(PS_EIO, "disk tier: %s %s for %lld bytes: %s; choose another folder in memory.disk", what, d->folder,
                   (long long)d->capacity, strerror(err));
}

static int make_file(ps_disk *d)
{
    struct statvfs room;
    struct statfs kind;
    struct rlimit most;
    if (statvfs(d->folder, &room) < 0 || statfs(d->folder, &kind) < 0)
        return fail_file(d, "cannot read the free space of", errno);
    if (!getrlimit(RLIMIT_FSIZE, &most) && most.rlim_cur < (rlim_t)d->reach) d->reach = (int64_t)most.rlim_cur;
    int64_t bytes_free = (int64_t)((uint64_t)room.f_bavail * room.f_frsize);
    if (d->capacity > bytes_free)
        return ps_fail_room(PS_ENOSPC, PS_SUB_NONE, -1, d->capacity, bytes_free,
                            "disk tier: %lld bytes wanted in %s, but only %lld are free; lower memory.disk's "
                            "limit, free some space or choose another folder", (long long)d->capacity, d->folder,
                            (long long)bytes_free);
    /* A write past this limit would raise SIGXFSZ, which ends the process. */
    if (d->capacity > d->reach)
        return ps_fail(PS_ENOSPC, "disk tier: %lld bytes wanted in %s, but this process may only write files of %lld "
                       "bytes (ulimit -f); raise that limit, or lower memory.disk's limit", (long long)d->capacity,
                       d->folder, (long long)most.rlim_cur);
    d->fd = open_nameless(d->folder, O_DIRECT);
    d->direct = d->fd >= 0;
    if (d->fd < 0 && errno == EINVAL) d->fd = open_nameless(d->folder, 0);
    if (d->fd < 0) return fail_file(d, "cannot make a file in", errno);
    if (kind.f_type == TMPFS_MAGIC || kind.f_type == RAMFS_MAGIC)
        ps_log(PS_LOG_WARN, "disk tier: %s lies in memory, not on a disk; choose another folder in memory.disk",
               d->folder);

    int rc;
    do rc = fallocate(d->fd, 0, 0, d->capacity);
    while (rc < 0 && errno == EINTR);
    if (rc < 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
        ps_log(PS_LOG_WARN, "disk tier: the file system of %s cannot reserve space; a write fails if other programs "
               "fill the disk", d->folder);
        rc = ftruncate(d->fd, d->capacity);
    }
    if (rc < 0) return fail_file(d, "cannot reserve space in", errno);
    if (d->direct && !ps_fd_reads_directly(d->fd)) {
        int flags = fcntl(d->fd, F_GETFL);
        if (flags < 0 || fcntl(d->fd, F_SETFL, flags & ~O_DIRECT) < 0) return fail_file(d, "cannot use", errno);
        d->direct = false;
    }
    if (!d->direct)
        ps_log(PS_LOG_WARN, "disk tier: %s does not support direct transfers (O_DIRECT); they pass the page cache",
               d->folder);
    return 0;
}

static int make_extents(ps_disk *d)
{
    d->room = 16;
    d->free_space = ps_alloc((size_t)d->room * sizeof *d->free_space);
    if (!d->free_space) return ps_fail_nomem((size_t)d->room * sizeof *d->free_space);
    d->free_space[0] = (extent){ 0, d->capacity };
    d->n_free = 1;
    return 0;
}

static int open_parts(ps_disk *d, const char *folder, int threads)
{
    d->folder = ps_strdup(folder);
    if (!d->folder) return ps_fail_nomem(strlen(folder) + 1);
    PS_TRY(make_extents(d));
    PS_TRY(make_file(d));
    PS_TRY(start(d, threads));
    ps_log(PS_LOG_INFO, "disk tier: %lld bytes in %s, %s, %s", (long long)d->capacity, folder,
           d->uring ? "io_uring" : "plain threads", d->direct ? "direct" : "through the page cache");
    return 0;
}

static int check_range(const char *what, int64_t value)
{
    if (value > 0 && value % PS_DIRECT_ALIGN == 0) return 0;
    return ps_fail(PS_EINVAL, "disk tier: %s of %lld bytes; it must be a positive multiple of %d",
                   what, (long long)value,
                   PS_DIRECT_ALIGN);
}

static int disk_new(int64_t nbytes, ps_disk **out)
{
    PS_TRY(check_range("a file", nbytes));
    ps_disk *d = ps_alloc0(sizeof *d);
    if (!d) return ps_fail_nomem(sizeof *d);
    d->fd = d->wake = -1;
    d->capacity = d->end = nbytes;
    d->reach = nbytes <= INT64_MAX / FILE_OVER_SPACE ? FILE_OVER_SPACE * nbytes : nbytes;
    *out = d;
    return 0;
}

/* Stores d in *out, or closes d if rc is an error. */
static int opened(ps_disk *d, int rc, ps_disk **out)
{
    if (rc < 0) ps_disk_close(d);
    else *out = d;
    return rc < 0 ? rc : 0;
}

int ps_disk_open(const char *folder, int64_t nbytes, int threads, ps_disk **out)
{
    ps_disk *d;
    *out = NULL;
    if (!folder || !*folder) return ps_fail(PS_EINVAL, "disk tier: no folder is set; set memory.disk's path");
    PS_TRY(disk_new(nbytes, &d));
    return opened(d, open_parts(d, folder, threads), out);
}

int ps_disk_pretend(int64_t nbytes, ps_disk **out)
{
    ps_disk *d;
    *out = NULL;
    PS_TRY(disk_new(nbytes, &d));
    int rc = make_extents(d);
    return opened(d, rc < 0 ? rc : make_lock(d), out);
}

int ps_disk_check_sums(ps_disk *d)
{
    if (d->sums) return 0;
    if (d->reach / SUMMED_OVER_SPACE > d->capacity) d->reach = SUMMED_OVER_SPACE * d->capacity;
    size_t nbytes = (size_t)(d->reach / PS_DIRECT_ALIGN) * sizeof *d->sums;
    d->sums = ps_alloc0(nbytes);
    return d->sums ? 0 : ps_fail_nomem(nbytes);
}

void ps_disk_close(ps_disk *d)
{
    if (!d) return;
    if (d->has_lock) {
        pthread_mutex_lock(&d->lock);
        d->stop = true;
        pthread_cond_broadcast(&d->work);
        pthread_mutex_unlock(&d->lock);
    }
    if (d->wake >= 0) eventfd_write(d->wake, 1);
    for (int i = 0; i < d->n_threads; i++) pthread_join(d->threads[i], NULL);
    if (d->uring) io_uring_queue_exit(&d->ring);
    if (d->wake >= 0) close(d->wake);
    if (d->fd >= 0) close(d->fd);
    if (d->has_lock) {
        pthread_mutex_destroy(&d->lock);
        pthread_cond_destroy(&d->work);
        pthread_cond_destroy(&d->ended);
    }
    while (d->jobs) {
        ps_disk_job *job = d->jobs;
        d->jobs = job->older;
        ps_free(job);
    }
    ps_free(d->sums);
    ps_free(d->free_space);
    ps_free(d->holes);
    ps_free(d->folder);
    ps_free(d);
}

/* -- extents ----------------------------------------------------------------------------------------------------- */
static void remove_at(extent *list, int *n, int i)
{
    memmove(&list[i], &list[i + 1], (size_t)(--*n - i) * sizeof *list);
}

/* Inserts an extent into a sorted list, and joins the extent with the extents that it touches. The list must have
 * room for one more extent. */
static void insert(extent *list, int *n, int64_t offset, int64_t nbytes)
{
    int i = 0;                  /* first extent after the inserted extent */
    while (i < *n && list[i].offset <= offset) i++;
    bool joins_before = i > 0 && list[i - 1].offset + list[i - 1].nbytes == offset;
    bool joins_after = i < *n && offset + nbytes == list[i].offset;
    if (joins_before) {
        list[i - 1].nbytes += nbytes + (joins_after ? list[i].nbytes : 0);
        if (joins_after) remove_at(list, n, i);
    } else if (joins_after) {
        list[i] = (extent){ offset, nbytes + list[i].nbytes };
    } else {
        memmove(&list[i + 1], &list[i], (size_t)((*n)++ - i) * sizeof *list);
        list[i] = (extent){ offset, nbytes };
    }
}

/* Returns the index of the first extent of at least `nbytes`, or -1. */
static int first_fit(const extent *list, int n, int64_t nbytes)
{
    for (int i = 0; i < n; i++)
        if (list[i].nbytes >= nbytes) return i;
    return -1;
}

/* Removes the first `nbytes` bytes from extent i, and returns their offset. */
static int64_t take(extent *list, int *n, int i, int64_t nbytes)
{
    int64_t offset = list[i].offset;
    list[i].offset += nbytes;
    list[i].nbytes -= nbytes;
    if (!list[i].nbytes) remove_at(list, n, i);
    return offset;
}

/* Calls fallocate, but does nothing for a simulated disk. Returns 0 or an errno. */
static int set_space(const ps_disk *d, int mode, int64_t offset, int64_t nbytes)
{
    int rc = 0;
    if (d->fd < 0) return 0;
    do rc = fallocate(d->fd, mode, offset, nbytes); while (rc < 0 && errno == EINTR);
    return rc < 0 ? errno : 0;
}

/* Turns `nbytes` bytes of free extents into holes, whose disk space returns to the file system. Takes the smallest
 * free extents first. Returns the number of bytes that became holes. This number is smaller than `nbytes` if the file
 * system refuses to make a hole. */
static int64_t make_holes(ps_disk *d, int64_t nbytes)
{
    int64_t left = nbytes;
    while (left > 0) {
        int smallest = 0;
        for (int i = 1; i < d->n_free; i++)
            if (d->free_space[i].nbytes < d->free_space[smallest].nbytes) smallest = i;
        int64_t part = d->free_space[smallest].nbytes < left ? d->free_space[smallest].nbytes : left;
        if (set_space(d, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, d->free_space[smallest].offset, part)) break;
        insert(d->holes, &d->n_holes, take(d->free_space, &d->n_free, smallest, part), part);
        left -= part;
    }
    return nbytes - left;
}

/* Makes one free extent of `nbytes` bytes at the file's end or in a hole. Turns `nbytes` bytes of smaller free
 * extents into holes, so that the space that the file has on the disk does not change. Returns the offset of the new
 * extent, or -1 if the file system cannot do this. */
static int64_t make_piece(ps_disk *d, int64_t nbytes)
{
    int hole = first_fit(d->holes, d->n_holes, nbytes);
    int64_t offset = hole >= 0 ? d->holes[hole].offset : d->end;
    if (hole < 0 && nbytes > d->reach - d->end) return -1;
    int err = set_space(d, 0, offset, nbytes);
    if (err && err != ENOSPC && err != EDQUOT) return -1;
    if (hole >= 0) take(d->holes, &d->n_holes, hole, nbytes);
    int64_t returned = make_holes(d, nbytes);
    if (returned == nbytes && err) err = set_space(d, 0, offset, nbytes);
    if (returned == nbytes && !err) {
        if (hole < 0) d->end += nbytes;
        return offset;
    }
    /* Either the file system cannot make holes, or another program has taken the space of the new holes. The file has
     * lost the space of the holes that were made. */
    if (hole >= 0) insert(d->holes, &d->n_holes, offset, nbytes);
    if (hole >= 0 && !err) (void)set_space(d, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes);
    if (hole < 0 && !err && d->fd >= 0 && ftruncate(d->fd, d->end) < 0) d->reach = d->end;
    d->capacity -= returned;
    return -1;
}

int ps_disk_extent_new(ps_disk *d, int64_t nbytes, int64_t *offset)
{
    PS_TRY(check_range("an extent", nbytes));
    /* make_piece can turn each free extent into a hole, and it can divide one free extent. */
    PS_TRY(ps_grow(d->holes, d->holes_room, d->n_holes + d->n_free + 2));
    PS_TRY(ps_grow(d->free_space, d->room, d->n_given + d->n_holes + d->n_free + 3));
    int i = first_fit(d->free_space, d->n_free, nbytes);
    int64_t at = -1, free_nbytes = d->capacity - d->used, largest = 0;
    if (i >= 0) at = take(d->free_space, &d->n_free, i, nbytes);
    else if (free_nbytes >= nbytes) at = make_piece(d, nbytes);
    if (at < 0) {
        for (i = 0; i < d->n_free; i++)
            if (d->free_space[i].nbytes > largest) largest = d->free_space[i].nbytes;
        return ps_fail_room(PS_ENOSPC, PS_SUB_NONE, -1, nbytes, largest,
                            "disk tier in %s: %lld bytes wanted in one piece; of %lld bytes %lld are free, in %d "
                            "pieces of at most %lld; raise memory.disk's limit", d->folder, (long long)nbytes,
                            (long long)d->capacity, (long long)(d->capacity - d->used), d->n_free, (long long)largest);
    }
    *offset = at;
    d->n_given++;
    d->used += nbytes;
    return 0;
}

void ps_disk_extent_free(ps_disk *d, int64_t offset, int64_t nbytes)
{
    int i = 0;                  /* first free extent after the freed extent */
    while (i < d->n_free && d->free_space[i].offset <= offset) i++;
    const extent *before = i ? &d->free_space[i - 1] : NULL, *after = i < d->n_free ? &d->free_space[i] : NULL;
    if (offset < 0 || nbytes <= 0 || offset > d->end - nbytes || !d->n_given || d->n_free == d->room
        || (before && before->offset + before->nbytes > offset) || (after && offset + nbytes > after->offset)) {
        ps_log(PS_LOG_ERROR, "disk tier: %lld bytes at %lld are to be freed, but they are not an extent",
               (long long)nbytes,
               (long long)offset);
        return;
    }
    d->n_given--;
    d->used -= nbytes;
    insert(d->free_space, &d->n_free, offset, nbytes);
}

/* -- the caller's side of jobs ----------------------------------------------------------------------------------- */
/* Raises the error for the cause of a job's failure. */
static int fail_cause(const ps_disk *d, const cause *why, const char *before)
{
    if (why->ring)
        return ps_fail(PS_EIO, "disk tier in %s: %sio_uring failed: %s", d->folder, before, strerror(why->err));
    if (why->differs)
        return ps_fail(PS_EIO, "disk tier in %s: %s%lld bytes at offset %lld are damaged: their checksum is not the "
                       "one of the bytes that were written there; check that disk, or choose another folder in "
                       "memory.disk", d->folder, before, (long long)why->nbytes, (long long)why->offset);
    bool full = why->err == ENOSPC || why->err == EDQUOT;
    const char *text = why->err ? strerror(why->err)
                                : why->way == READ ? "the file ended early" : "no bytes were written";
    return ps_fail(full ? PS_ENOSPC : PS_EIO, "disk tier in %s: %s%s %lld bytes at offset %lld failed: %s (errno %d); "
                   "%s, or choose another folder in memory.disk", d->folder, before,
                   why->way == READ ? "reading" : "writing", (long long)why->nbytes, (long long)why->offset, text,
                   why->err, full ? "free some space there" : "check that disk");
}

static int submit(ps_disk *d, int way, int64_t offset, uint8_t *mem, int64_t nbytes, ps_disk_job *after,
                  ps_disk_job **out)
{
    *out = NULL;
    PS_TRY(check_range(way == READ ? "a read" : "a write", nbytes));
    if (offset < 0 || offset % PS_DIRECT_ALIGN || !mem || (uintptr_t)mem % PS_DIRECT_ALIGN)
        return ps_fail(PS_EINVAL, "disk tier: a transfer at offset %lld, address %p; both must be multiples of %d",
                       (long long)offset, (void *)mem, PS_DIRECT_ALIGN);
    if (nbytes > d->end || offset > d->end - nbytes)
        return ps_fail(PS_ERANGE, "disk tier in %s: %lld bytes at offset %lld are beyond its end at %lld bytes",
                       d->folder, (long long)nbytes, (long long)offset, (long long)d->end);
    ps_disk_job *job = ps_alloc0(sizeof *job);
    if (!job) return ps_fail_nomem(sizeof *job);
    job->way = way, job->offset = offset, job->mem = mem, job->nbytes = nbytes;
    job->began_ns = ps_record_begin();
    pthread_mutex_lock(&d->lock);
    if (d->dead.ring) {
        pthread_mutex_unlock(&d->lock);
        ps_free(job);
        return fail_cause(d, &d->dead, "");
    }
    job->older = d->jobs;
    if (d->jobs) d->jobs->newer = job;
    d->jobs = job;
    if (d->under_way++ == 0) d->busy_since = ps_now();
    if (after && !after->done) {
        job->sibling = after->dependents;
        after->dependents = job;
    } else if (after && after->failed) {
        job->failed = job->inherited = true;
        job->cause = after->cause;
        end_job(d, job);
    } else
        enqueue(d, job);
    pthread_mutex_unlock(&d->lock);
    if (d->uring) eventfd_write(d->wake, 1);
    *out = job;
    return 0;
}

int ps_disk_read(ps_disk *d, int64_t offset, void *dst, int64_t nbytes, ps_disk_job *after, ps_disk_job **out)
{
    return submit(d, READ, offset, dst, nbytes, after, out);
}

int ps_disk_write(ps_disk *d, int64_t offset, const void *src, int64_t nbytes, ps_disk_job *after, ps_disk_job **out)
{
    return submit(d, WRITE, offset, (uint8_t *)src, nbytes, after, out);
}

int ps_disk_wait(ps_disk *d, ps_disk_job *job, bool block)
{
    pthread_mutex_lock(&d->lock);
    while (block && !job->done) pthread_cond_wait(&d->ended, &d->lock);
    bool done = job->done;
    if (done) {
        if (job->newer) job->newer->older = job->older;
        else d->jobs = job->older;
        if (job->older) job->older->newer = job->newer;
    }
    pthread_mutex_unlock(&d->lock);
    if (!done) return 0;
    const char *before = job->inherited ? "not begun, since a transfer before it failed: " : "";
    int rc = job->failed ? fail_cause(d, &job->cause, before) : 1;
    ps_free(job);
    return rc;
}

void ps_disk_get_info(ps_disk *d, ps_disk_info *out)
{
    pthread_mutex_lock(&d->lock);
    *out = (ps_disk_info){ d->capacity, d->used, d->bytes[READ], d->bytes[WRITE], d->busy_s, d->uring, d->direct };
    if (d->under_way) out->busy_s += ps_now() - d->busy_since;
    pthread_mutex_unlock(&d->lock);
}

/* -- the disk's own rate ----------------------------------------------------------------------------------------- */
enum { PROBE_THREADS = 8, PROBE_PIECE = 4 << 20 };

/* A measurement of the rate of the disk itself, for comparison with the rate of jobs. PROBE_THREADS threads transfer
 * an extent from its beginning to its end, without jobs. */
typedef struct probe {
    int fd, way;
    int64_t offset, nbytes;
    uint8_t *buffers;           /* [PROBE_THREADS][PROBE_PIECE] */
    atomic_llong next;
    /* err: errno of the first failure, or -1 if the file ended early */
    atomic_int buffer, err;
} probe;

static void *probe_thread(void *arg)
{
    probe *p = arg;
    uint8_t *mem = p->buffers + (int64_t)atomic_fetch_add(&p->buffer, 1) * PROBE_PIECE;
    for (;;) {
        int64_t at = atomic_fetch_add(&p->next, PROBE_PIECE), end = at + PROBE_PIECE;
        if (end > p->nbytes) end = p->nbytes;
        while (at < end && !atomic_load(&p->err)) {
            ssize_t n = p->way == WRITE ? pwrite(p->fd, mem, (size_t)(end - at), p->offset + at)
                                        : pread(p->fd, mem, (size_t)(end - at), p->offset + at);
            if (n > 0) at += n;
            else if (n == 0 || (errno != EINTR && errno != EAGAIN)) atomic_store(&p->err, n ? errno : -1);
        }
        if (at >= p->nbytes || atomic_load(&p->err)) return NULL;
    }
}

static int probe_way(ps_disk *d, probe *p, int way, double *bytes_per_s)
{
    pthread_t threads[PROBE_THREADS];
    int n = 0, rc = 0;
    p->way = way;
    atomic_store(&p->next, 0);
    atomic_store(&p->buffer, 0);
    double began = ps_now();
    while (n < PROBE_THREADS && !rc) {
        rc = ps_thread_start(&threads[n], probe_thread, p);
        n += !rc;
    }
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    *bytes_per_s = (double)p->nbytes / (ps_now() - began);
    if (!n) return ps_fail(PS_ENOMEM, "cannot start a thread to measure the disk: %s", strerror(rc));
    int err = atomic_load(&p->err);
    if (!err) return 0;
    cause why = { .err = err < 0 ? 0 : err, .way = way, .offset = p->offset, .nbytes = p->nbytes };
    return fail_cause(d, &why, "measuring its rate, ");
}

int ps_disk_probe(ps_disk *d, int64_t nbytes, double *read_bytes_per_s, double *write_bytes_per_s)
{
    if (d->fd < 0)
        return ps_fail(PS_ESTATE, "disk tier: a dry run has no disk whose rate can be measured; call "
                       "ps_engine_disk_probe only if ps_machine_pretended() is 0");
    pthread_mutex_lock(&d->lock);
    int under_way = d->under_way;
    pthread_mutex_unlock(&d->lock);
    if (under_way)
        return ps_fail(PS_ESTATE, "disk tier: cannot measure the disk's rate while %d jobs are under way", under_way);
    probe p = { .fd = d->fd, .nbytes = nbytes };
    size_t size = (size_t)PROBE_THREADS * PROBE_PIECE;
    uint8_t *block = ps_alloc(size + PROBE_PIECE);
    if (!block) return ps_fail_nomem(size + PROBE_PIECE);
    /* The buffers use huge pages, as tensors do, because small pages can halve the disk's rate. The buffers are
     * filled first for two reasons: the measurement must not include page faults, and the disk must not be able to
     * skip zeros. */
    p.buffers = block + (-(uintptr_t)block & (PROBE_PIECE - 1));
    madvise(p.buffers, size, MADV_HUGEPAGE);
    memset(p.buffers, 0x5a, size);
    int rc = ps_disk_extent_new(d, nbytes, &p.offset);
    if (rc >= 0) {
        rc = probe_way(d, &p, WRITE, write_bytes_per_s);
        if (rc >= 0) rc = probe_way(d, &p, READ, read_bytes_per_s);
        ps_disk_extent_free(d, p.offset, nbytes);
    }
    ps_free(block);
    return rc;
}
