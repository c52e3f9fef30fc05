/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the doors of sockets (faults.h). The sockets belong to the store, the watch, psluajit's lines,
 * and Gloo. */
#define _GNU_SOURCE
#include "faults/faults.h"
#include <errno.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST = 4096 };
/* The states into which events put a descriptor.
 * DRIPS: each call transfers at most 64 bytes
 * HALF_OPEN: bytes that are sent are lost */
enum { DRIPS = 1, HALF_OPEN = 2 };
static atomic_uchar state[MOST];
enum { CAN_SEND = CAN(ACT_ERRNO) | CAN(ACT_INTERRUPT) | CAN(ACT_SHORT) | CAN(ACT_RESET) | CAN(ACT_HALF_OPEN)
                  | CAN(ACT_DRIP) };

static int made(int fd)
{
    if (fd >= 0 && fd < MOST) {
        atomic_store(&state[fd], 0);
        faults_set_class(fd, FD_SOCKET, NULL);
    }
    return fd;
}

int socket(int domain, int type, int protocol)
{
    int fd = (int)syscall(SYS_socket, domain, type, protocol);
    return domain == AF_INET || domain == AF_INET6 ? made(fd) : fd;
}

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
    faults_hit hit = faults_pass(DOOR_ACCEPT, CAN(ACT_ERRNO), NULL);
    if (hit.action) return errno = hit.err, -1;
    return made((int)syscall(SYS_accept4, fd, address, length, flags));
}

int accept(int fd, struct sockaddr *address, socklen_t *length) { return accept4(fd, address, length, 0); }

int connect(int fd, const struct sockaddr *address, socklen_t length)
{
    if (faults_class_of(fd) != FD_SOCKET) return (int)syscall(SYS_connect, fd, address, length);
    faults_hit hit = faults_pass(DOOR_CONNECT, CAN(ACT_ERRNO), NULL);
    if (hit.action) return errno = hit.err, -1;
    return (int)syscall(SYS_connect, fd, address, length);
}

/* Resets a connection. The other side receives RST, and the call on this side returns an error. */
static ssize_t reset(int fd)
{
    struct linger now = { 1, 0 };
    struct sockaddr nowhere = { .sa_family = AF_UNSPEC };
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    syscall(SYS_connect, fd, &nowhere, sizeof nowhere);
    errno = ECONNRESET;
    return -1;
}

/* Applies the events of the plan to a call. Returns true if the call must return *result without doing anything.
 * Otherwise sets *nbytes to the number of bytes that the call may transfer. */
static bool struck(int door, int fd, size_t *nbytes, ssize_t *result)
{
    unsigned can = CAN_SEND & ~(door == DOOR_RECV ? CAN(ACT_HALF_OPEN) : 0u);
    faults_hit hit = faults_pass(door, can, NULL);
    if (hit.err) {
        errno = hit.err;
        *result = -1;
        return true;
    }
    if (hit.action == ACT_RESET) {
        *result = reset(fd);
        return true;
    }
    if (hit.action == ACT_HALF_OPEN) atomic_fetch_or(&state[fd], HALF_OPEN);
    if (hit.action == ACT_DRIP) atomic_fetch_or(&state[fd], DRIPS);
    int now = atomic_load(&state[fd]);
    if (door == DOOR_SEND && (now & HALF_OPEN)) {
        *result = (ssize_t)*nbytes;
        return true;
    }
    if ((now & DRIPS) && *nbytes > 64) *nbytes = 64;
    if (hit.action == ACT_SHORT && *nbytes > 1) *nbytes /= 2;
    return false;
}

ssize_t faults_socket_send(int fd, const void *bytes, size_t nbytes, int flags)
{
    ssize_t result;
    if (struck(DOOR_SEND, fd, &nbytes, &result)) return result;
    return syscall(SYS_sendto, fd, bytes, nbytes, flags, NULL, 0);
}

ssize_t faults_socket_recv(int fd, void *bytes, size_t nbytes, int flags)
{
    ssize_t result;
    if (struck(DOOR_RECV, fd, &nbytes, &result)) return result;
    return syscall(SYS_recvfrom, fd, bytes, nbytes, flags, NULL, NULL);
}

ssize_t send(int fd, const void *bytes, size_t nbytes, int flags)
{
    if (faults_class_of(fd) == FD_SOCKET) return faults_socket_send(fd, bytes, nbytes, flags);
    return syscall(SYS_sendto, fd, bytes, nbytes, flags, NULL, 0);
}

ssize_t recv(int fd, void *bytes, size_t nbytes, int flags)
{
    if (faults_class_of(fd) == FD_SOCKET) return faults_socket_recv(fd, bytes, nbytes, flags);
    return syscall(SYS_recvfrom, fd, bytes, nbytes, flags, NULL, NULL);
}

ssize_t writev(int fd, const struct iovec *list, int n)
{
    size_t all = 0, most;
    ssize_t result;
    if (faults_class_of(fd) != FD_SOCKET) return syscall(SYS_writev, fd, list, n);
    for (int i = 0; i < n; i++) all += list[i].iov_len;
    most = all;
    if (struck(DOOR_SEND, fd, &most, &result)) return result;
    if (most == all) return syscall(SYS_writev, fd, list, n);
    struct iovec some[16];
    int k = 0;
    for (; k < n && k < 16 && most > 0; k++) {
        some[k] = list[k];
        if (some[k].iov_len > most) some[k].iov_len = most;
        most -= some[k].iov_len;
    }
    return syscall(SYS_writev, fd, some, k);
}
