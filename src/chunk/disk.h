/* SPDX-License-Identifier: BSD-3-Clause
 * The disk tier: one preallocated file without a name, which disappears when the process ends. One thread reads and
 * writes the file with io_uring and O_DIRECT, bypassing the page cache. If the kernel has no io_uring, a few plain
 * threads do. Offsets, sizes and addresses are multiples of PS_DIRECT_ALIGN bytes. One thread calls these functions;
 * jobs run on others. */
#ifndef PS_DISK_H
#define PS_DISK_H
#include <stdbool.h>
#include <stdint.h>

typedef struct ps_disk ps_disk;
typedef struct ps_disk_job ps_disk_job;

typedef struct ps_disk_info {
    int64_t capacity, used;           /* bytes of the file on the disk, and of its extents */
    int64_t bytes_read, bytes_written;
    double busy_s;                    /* seconds with at least one job under way */
    bool uring, direct;               /* whether io_uring is used; whether O_DIRECT is, not the page cache */
} ps_disk_info;

/* Creates a file of `nbytes` in `folder`, and reserves its space. If threads > 0, uses this number of plain threads
 * instead of io_uring. The messages of PS_EIO and PS_ENOSPC contain the folder and the bytes wanted and free. */
int ps_disk_open(const char *folder, int64_t nbytes, int threads, ps_disk **out);
/* Turns checksums on, before the first job. Reading a piece then fails with PS_EIO if its checksum has changed since
 * it was written. PS_ENOMEM: no room for 16 bytes per 4,096 bytes of the file. */
int ps_disk_check_sums(ps_disk *disk);
/* Opens a simulated disk, which has extents but transfers no bytes. */
int ps_disk_pretend(int64_t nbytes, ps_disk **out);
/* Waits for the transfers under way, drops other jobs, and frees everything. */
void ps_disk_close(ps_disk *disk);
/* Allocates the first free extent that is large enough. If there is none, but enough bytes are free in total, moves the
 * space of smaller extents to the file's end or into an earlier hole; the file then has holes. The message of PS_ENOSPC
 * contains the free bytes and the number of free extents. */
int ps_disk_extent_new(ps_disk *disk, int64_t nbytes, int64_t *offset);
/* Frees an extent. The arguments are those of its allocation. */
void ps_disk_extent_free(ps_disk *disk, int64_t offset, int64_t nbytes);
/* Begins a job that transfers `nbytes` between memory and the file. The buffer must stay valid until ps_disk_wait.
 * If `after` is not NULL, the job waits for job `after`, and fails if that one fails. Other jobs may run in any
 * order or at the same time. */
int ps_disk_read(ps_disk *disk, int64_t offset, void *dst, int64_t nbytes, ps_disk_job *after, ps_disk_job **out);
int ps_disk_write(ps_disk *disk, int64_t offset, const void *src, int64_t nbytes, ps_disk_job *after,
                  ps_disk_job **out);
/* Returns 1 if the job has ended, 0 if not (only if block is false), or a negative error. Frees the job unless the
 * result is 0. A job may be freed before one that names it as `after`. */
int ps_disk_wait(ps_disk *disk, ps_disk_job *job, bool block);
void ps_disk_get_info(ps_disk *disk, ps_disk_info *out);
/* Measures the disk's own rates. Writes `nbytes` of free space, then reads them, with many large transfers at once.
 * ps_disk_info does not count them. PS_ESTATE: jobs are under way. */
int ps_disk_probe(ps_disk *disk, int64_t nbytes, double *read_bytes_per_s, double *write_bytes_per_s);
/* For tests: `count` attempts to transfer a piece fail with errno `code`, beginning with the nth from now. If code
 * is 0, they transfer half of their bytes instead. nth -1 switches this off. */
void ps_test_fail_io(int64_t nth, int64_t count, int code);
/* For tests: every attempt to transfer a piece takes at least `seconds`. 0 switches this off. */
void ps_test_slow_io(double seconds);
#endif
