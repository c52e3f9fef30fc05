/* SPDX-License-Identifier: BSD-3-Clause
 * The disk tier: one preallocated file without a name (it is gone when the process ends, however it ends), read and
 * written past the page cache by one thread that owns an io_uring, or by a few plain threads where the kernel has none.
 * Offsets, sizes and addresses are multiples of PS_DISK_ALIGN. Called by one thread; jobs run on others. */
#ifndef PS_DISK_H
#define PS_DISK_H
#include <stdbool.h>
#include <stdint.h>

enum { PS_DISK_ALIGN = 4096 };
typedef struct ps_disk ps_disk;
typedef struct ps_disk_job ps_disk_job;

typedef struct ps_disk_info {
    int64_t capacity, used;           /* bytes set aside, and given out as extents */
    int64_t bytes_read, bytes_written;
    double busy_s;                    /* seconds with a job under way */
    bool uring, direct;               /* io_uring in use; O_DIRECT in use (else through the page cache) */
} ps_disk_info;

/* A file of `nbytes` in `folder`, its space reserved. PS_EIO or PS_ENOSPC name folder, bytes wanted and free.
 * threads > 0 asks for that many plain threads instead of io_uring. */
int ps_disk_open(const char *folder, int64_t nbytes, int threads, ps_disk **out);
/* Waits for the transfers that the kernel has; what was not begun is dropped. Frees all jobs. */
void ps_disk_close(ps_disk *disk);
/* Space in the file, first fit. PS_ENOSPC says how much is free and in how many pieces. */
int ps_disk_extent_new(ps_disk *disk, int64_t nbytes, int64_t *offset);
/* Gives back an extent, whole. */
void ps_disk_extent_free(ps_disk *disk, int64_t offset, int64_t nbytes);
/* Begins a transfer of `nbytes` between memory and the file. It starts after job `after` (or NULL) has ended; jobs
 * without such a bond may run in any order and at once. The buffer must stay until the job was waited for. If `after`
 * failed, so does this job. */
int ps_disk_read(ps_disk *disk, int64_t offset, void *dst, int64_t nbytes, ps_disk_job *after, ps_disk_job **out);
int ps_disk_write(ps_disk *disk, int64_t offset, const void *src, int64_t nbytes, ps_disk_job *after,
                  ps_disk_job **out);
/* 1: ended, and the job is freed; 0: still under way (only when block is false); negative: failed, and the job is
 * freed. A job named as `after` may be freed first. */
int ps_disk_wait(ps_disk *disk, ps_disk_job *job, bool block);
void ps_disk_get_info(ps_disk *disk, ps_disk_info *out);
/* The disk's own rate: `nbytes` of free space are written, then read, in large pieces from front to back, many at once,
 * one direction at a time. Takes no part of the jobs' path and is not counted in the info. PS_ESTATE while jobs are
 * under way. */
int ps_disk_probe(ps_disk *disk, int64_t nbytes, double *read_bytes_per_s, double *write_bytes_per_s);
/* Tests: transfers number nth to nth + count - 1 from now on (pieces, as the kernel sees them) come back with error
 * `code` (an errno), or, when code is 0, short by half. nth -1 switches off. */
void ps_test_fail_io(int64_t nth, int64_t count, int code);
/* Tests: every transfer takes at least so long; 0 switches off. */
void ps_test_slow_io(double seconds);
#endif
