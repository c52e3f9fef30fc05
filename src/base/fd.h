/* SPDX-License-Identifier: BSD-3-Clause
 * Descriptors of the engine's own files. */
#ifndef PS_BASE_FD_H
#define PS_BASE_FD_H
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Moves a descriptor of open() above 2. A script may have closed stdin, stdout or stderr, and a print would then
 * write into the file. For -1 it returns -1 and keeps errno. */
static inline int ps_fd_above_stdio(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO) return fd;
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), err = errno;
    close(fd);
    errno = err;
    return moved;
}
#endif
