/* SPDX-License-Identifier: BSD-3-Clause
 * The disk tier is one preallocated file without a name. The file disappears when the process ends. One thread reads
 * and writes the file with io_uring. It bypasses the page cache by O_DIRECT. If the kernel has no io_uring, a few
 * plain threads transfer the bytes instead. All offsets, sizes and addresses are multiples of PS_DIRECT_ALIGN bytes.
 * Only one thread calls these functions. Jobs run on other threads. */
#ifndef PS_DISK_H
#define PS_DISK_H
#include <stdbool.h>
#include <stdint.h>

typedef struct ps_disk ps_disk;
typedef struct ps_disk_job ps_disk_job;

typedef struct ps_disk_info {
    /* capacity: size in bytes of the file's space on the disk
     * used: size in bytes of the allocated extents */
    int64_t capacity, used;
    int64_t bytes_read, bytes_written;
    double busy_s;                    /* seconds during which at least one job was in progress */
    /* uring: whether io_uring is used
     * direct: whether O_DIRECT is used; if not, transfers pass through the page cache */
    bool uring, direct;
} ps_disk_info;

/* Creates a file of `nbytes` bytes in `folder`, and reserves its space. If threads > 0, uses this number of plain
 * threads instead of io_uring. Returns PS_EIO or PS_ENOSPC on failure. The message then contains the folder, the
 * bytes wanted and the bytes free. */
int ps_disk_open(const char *folder, int64_t nbytes, int threads, ps_disk **out);
/* Turns checksums on. Must be called before the first job. Reading a piece then fails with PS_EIO if the piece's
 * checksum has changed since the piece was written. Returns PS_ENOMEM if there is no room for 16 bytes per 4,096
 * bytes of the file. */
int ps_disk_check_sums(ps_disk *disk);
/* Opens a simulated disk, which has extents but transfers no bytes. */
int ps_disk_pretend(int64_t nbytes, ps_disk **out);
/* Waits for the transfers in progress, drops all other jobs, and frees everything. */
void ps_disk_close(ps_disk *disk);
/* Allocates the first free extent that is large enough. If no free extent is large enough, but enough bytes are free
 * in total, moves the disk space of smaller free extents to the end of the file or into an earlier hole. The smaller
 * extents become holes. Returns PS_ENOSPC if this fails. The message then contains the number of free bytes and the
 * number of free extents. */
int ps_disk_extent_new(ps_disk *disk, int64_t nbytes, int64_t *offset);
/* Frees an extent. The arguments must be the offset and the size of its allocation. */
void ps_disk_extent_free(ps_disk *disk, int64_t offset, int64_t nbytes);
/* Begins a job that transfers `nbytes` bytes between memory and the file. The buffer must stay valid until
 * ps_disk_wait. If `after` is not NULL, the new job waits for job `after`, and fails if that job fails. Jobs without
 * this relation may run in any order or at the same time. */
int ps_disk_read(ps_disk *disk, int64_t offset, void *dst, int64_t nbytes, ps_disk_job *after, ps_disk_job **out);
int ps_disk_write(ps_disk *disk, int64_t offset, const void *src, int64_t nbytes, ps_disk_job *after,
                  ps_disk_job **out);
/* Returns 1 if the job has ended, or a negative error if it has failed. Returns 0 if the job has not ended; this
 * happens only if `block` is false. Frees the job unless the result is 0. A job may be freed before the jobs that
 * were begun with this job as `after`. */
int ps_disk_wait(ps_disk *disk, ps_disk_job *job, bool block);
void ps_disk_get_info(ps_disk *disk, ps_disk_info *out);
/* Measures the rates of the disk itself. Writes `nbytes` bytes of free space and then reads them, with many large
 * transfers at once. ps_disk_info does not count these bytes. Returns PS_ESTATE if jobs are in progress. */
int ps_disk_probe(ps_disk *disk, int64_t nbytes, double *read_bytes_per_s, double *write_bytes_per_s);
/* Used by tests. Makes `count` attempts to transfer a piece fail with errno `code`, starting with the nth attempt
 * from now. If `code` is 0, these attempts transfer half of their bytes instead. If `nth` is -1, no attempts fail. */
void ps_test_fail_io(int64_t nth, int64_t count, int code);
/* Used by tests. After this call, every attempt to transfer a piece takes at least `seconds` seconds. If `seconds` is
 * 0, there is no delay. */
void ps_test_slow_io(double seconds);
#endif
