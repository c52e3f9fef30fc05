/* SPDX-License-Identifier: BSD-3-Clause
 * Descriptors of the engine's own files. */
#ifndef PS_BASE_FD_H
#define PS_BASE_FD_H
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Moves a descriptor that open() just gave above those of stdin, stdout and stderr, which a script may have closed: a
 * print would write into the file. Passes -1 and errno on. */
static inline int ps_fd_above_stdio(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO) return fd;
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), err = errno;
    close(fd);
    errno = err;
    return moved;
}
#endif
