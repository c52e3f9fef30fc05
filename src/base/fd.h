/* SPDX-License-Identifier: BSD-3-Clause
 * File descriptors of the engine's own files. */
#ifndef PS_BASE_FD_H
#define PS_BASE_FD_H
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <unistd.h>

/* Alignment in bytes of transfers that bypass the page cache (O_DIRECT). It applies to offset, size and address. */
enum { PS_DIRECT_ALIGN = 4096 };

/* Moves a descriptor from open() to a number above 2, and returns the new descriptor. If a script has closed stdin,
 * stdout or stderr, open() returns the number of the closed stream. A print would then write into the opened file. If
 * the descriptor is -1, returns -1 and keeps errno. */
static inline int ps_fd_above_stdio(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO) return fd;
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), err = errno;
    close(fd);
    errno = err;
    return moved;
}

/* Returns whether a file that was opened with O_DIRECT can be read. Some file systems allow the open but refuse the
 * reads. If the file cannot be read, sets errno. */
static inline bool ps_fd_reads_directly(int fd)
{
    _Alignas(PS_DIRECT_ALIGN) char block[PS_DIRECT_ALIGN];
    ssize_t n;
    do n = pread(fd, block, sizeof block, 0);
    while (n < 0 && errno == EINTR);
    return n >= 0;
}
#endif
