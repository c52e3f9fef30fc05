/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements TCP sockets for the store and the watch (net.h). */
#define _GNU_SOURCE
#include "rendezvous/net.h"
#include "base/error.h"
#include "ps_test.h"
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

static const double ONE_OF_MANY_S = 3;
static _Atomic double linger_s = -1;       /* set by ps_test_linger; negative means the default */

void ps_test_linger(double seconds) { atomic_store(&linger_s, seconds); }

double ps_net_linger_s(double usual)
{
    double given = atomic_load(&linger_s);
    return given < 0 ? usual : given;
}

int ps_net_ready(int fd, short events, double until)
{
    for (;;) {
        double left = until - ps_now();
        struct pollfd p = { .fd = fd, .events = events };
        int n = poll(&p, 1, left <= 0 ? 0 : left > 1000 ? 1000000 : (int)(left * 1e3) + 1);
        if (n > 0) return 1;
        if (n < 0 && errno != EINTR) return -1;
        if (n == 0 && ps_now() >= until) return 0;
    }
}

bool ps_net_no_files(int why) { return why == EMFILE || why == ENFILE; }

/* Returns true for "localhost" and for names that end in ".localhost", with or without a final dot (RFC 6761, section
 * 6.3). */
static bool is_localhost(const char *host)
{
    static const char name[] = "localhost";
    size_t n = strlen(host), own = sizeof name - 1;
    if (n > 0 && host[n - 1] == '.') n--;
    if (n < own || strncasecmp(host + n - own, name, own) != 0) return false;
    return n == own || (n > own + 1 && host[n - own - 1] == '.');
}

/* Calls getaddrinfo for stream sockets. For "localhost", directly requests loopback addresses, because RFC 6761
 * requires loopback addresses even if the system does not know the name. flags: AI_PASSIVE or 0. */
static int look_up(const char *host, int port, int flags, struct addrinfo **list)
{
    char service[16];
    bool local = is_localhost(host);
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = local ? 0 : flags };
    snprintf(service, sizeof service, "%d", port);
    return getaddrinfo(local ? NULL : host, service, &hints, list);
}

/* Tries once to connect to one address. Returns 0 if no process answers at this address now. */
static int try_connect(const struct addrinfo *at, double until)
{
    int fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), error = 0, on = 1;
    socklen_t length = sizeof error;
    if (fd < 0 && ps_net_no_files(errno))
        return ps_fail(PS_EIO, "cannot open a socket to the other ranks: %s (ulimit -n)", strerror(errno));
    if (fd < 0) return 0;
    bool ok = connect(fd, at->ai_addr, at->ai_addrlen) == 0;
    if (!ok && errno == EINPROGRESS && ps_net_ready(fd, POLLOUT, until) > 0)
        ok = getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
    if (!ok) {
        close(fd);
        return 0;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

int ps_net_reach(const char *host, int port, double until)
{
    struct addrinfo *list, *a;
    if (look_up(host, port, 0, &list) != 0) return 0;
    int fd = 0;
    for (a = list; a && !fd; a = a->ai_next) {
        double most = ps_now() + ONE_OF_MANY_S;           /* if a host has several addresses, some may be unreachable */
        fd = try_connect(a, a->ai_next && most < until ? most : until);
    }
    freeaddrinfo(list);
    return fd;
}

bool ps_net_knows(const char *host)
{
    struct addrinfo *list;
    if (look_up(host, 0, 0, &list) != 0) return false;
    freeaddrinfo(list);
    return true;
}

static bool loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET) return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
    const struct in6_addr *six = &((const struct sockaddr_in6 *)a)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(six) || (IN6_IS_ADDR_V4MAPPED(six) && six->s6_addr[12] == 127);
}

bool ps_net_is_loopback(const char *host)
{
    struct addrinfo *list, *a;
    if (look_up(host, 0, 0, &list) != 0) return false;
    for (a = list; a && loopback(a->ai_addr); a = a->ai_next) { }
    freeaddrinfo(list);
    return a == NULL;
}

int ps_host_is_loopback(const char *host) { return host && ps_net_is_loopback(host); }

/* Tries to listen at one address. On success, returns the file descriptor. On failure, returns -1 and sets errno. */
static int try_listen(const struct addrinfo *at)
{
    int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, off = 0;
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    /* If IPV6_V6ONLY is off, an IPv6 socket also accepts IPv4 connections. */
    if (at->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, 1024) == 0) return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

int ps_net_listen(const char *host, int port, int *out_fd, int *out_port)
{
    char text[NI_MAXHOST] = "";
    struct addrinfo *list, *a;
    int wrong = look_up(host, port, AI_PASSIVE, &list), fd = -1, why = 0;
    if (wrong)
        return ps_fail(PS_EIO, "rank 0 cannot serve at %s, which has no address here: %s", host, gai_strerror(wrong));
    for (a = list; a && fd < 0 && why != EADDRINUSE; a = a->ai_next) {
        fd = try_listen(a);
        if (fd >= 0) break;
        why = errno;
        getnameinfo(a->ai_addr, a->ai_addrlen, text, sizeof text, NULL, 0, NI_NUMERICHOST);
    }
    freeaddrinfo(list);
    struct sockaddr_storage at;
    socklen_t length = sizeof at;
    if (fd >= 0 && getsockname(fd, (struct sockaddr *)&at, &length) == 0) {
        *out_fd = fd;
        *out_port = ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port
                                                   : ((struct sockaddr_in *)&at)->sin_port);
        return 0;
    }
    if (fd >= 0) close(fd);
    if (why == EADDRINUSE)
        return ps_fail(PS_EIO, "port %d of this machine is in use, and rank 0 needs it for the addresses of all ranks: "
                       "choose another port (MASTER_PORT, --master-port), or end the program that uses it", port);
    if (why == EADDRNOTAVAIL)
        return ps_fail(PS_EIO, "rank 0 cannot serve at %s (%s), which is not an address of this machine: start rank 0 "
                       "there, or set this machine's address (MASTER_ADDR); if another machine forwards that address "
                       "to this one, set 0.0.0.0 for rank 0 only", host, text);
    return ps_fail(PS_EIO, "rank 0 cannot serve on port %d of %s: %s", port, host, strerror(why));
}

int64_t ps_net_some(int fd, void *bytes, size_t nbytes, bool out)
{
    for (;;) {
        ssize_t n = out ? send(fd, bytes, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, bytes, nbytes, MSG_DONTWAIT);
        if (n > 0) return n;
        if (n == 0) return -1;
        if (errno == EAGAIN) return 0;
        if (errno != EINTR) return -1;
    }
}

int ps_net_transfer(int fd, void *bytes, size_t nbytes, bool out, double until)
{
    for (size_t at = 0; at < nbytes;) {
        int64_t n = ps_net_some(fd, (char *)bytes + at, nbytes - at, out);
        if (n < 0) return -1;
        at += (size_t)n;
        int r = n > 0 ? 1 : ps_net_ready(fd, out ? POLLOUT : POLLIN, until);
        if (r <= 0) return r;
    }
    return 1;
}

int ps_net_address(int fd, bool peer, char *text, size_t room)
{
    struct sockaddr_storage a;
    socklen_t length = sizeof a;
    int rc = peer ? getpeername(fd, (struct sockaddr *)&a, &length) : getsockname(fd, (struct sockaddr *)&a, &length);
    if (rc < 0 || getnameinfo((struct sockaddr *)&a, length, text, (socklen_t)room, NULL, 0, NI_NUMERICHOST) != 0)
        return ps_fail(PS_EIO, "a connection between ranks has no address");
    if (!strncmp(text, "::ffff:", 7)) memmove(text, text + 7, strlen(text + 7) + 1);
    return 0;
}
