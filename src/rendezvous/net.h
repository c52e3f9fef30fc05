/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares TCP sockets for the store and the watch. All sockets are closed on exec. Functions with a
 * parameter `until` return at that time at the latest. `until` is a time of ps_now() in seconds. */
#ifndef PS_RENDEZVOUS_NET_H
#define PS_RENDEZVOUS_NET_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Listens at one address of this machine. "0.0.0.0" and "::" mean all addresses. Port 0 means any free port. */
int ps_net_listen(const char *host, int port, int *out_fd, int *out_port);
/* Returns true if only this machine can reach `host`. */
bool ps_net_is_loopback(const char *host);
/* Tries once to connect. Returns a non-blocking file descriptor, or 0 if no process answers now. Returns PS_EIO if this
 * process cannot open a socket. */
int ps_net_reach(const char *host, int port, double until);
/* Returns true if this machine can look up an address of `host`. */
bool ps_net_knows(const char *host);
/* Returns true if the errno `why` means that too many files are open. */
bool ps_net_no_files(int why);
/* Waits until the socket is ready for `events` (POLLIN or POLLOUT). Returns 1 if it is ready, 0 if the time `until` has
 * passed, or -1 if the socket has failed. */
int ps_net_ready(int fd, short events, double until);
/* Sends (if `out` is set) or receives as many bytes as possible without waiting. Returns the number of transferred
 * bytes, which can be 0. Returns -1 if the other end has closed the connection, or if the socket has failed. */
int64_t ps_net_some(int fd, void *bytes, size_t nbytes, bool out);
/* Sends (if `out` is set) or receives exactly nbytes bytes. Returns 1 on success, 0 if the time `until` has passed, or
 * -1 if the other end has closed the connection or the socket has failed. */
int ps_net_transfer(int fd, void *bytes, size_t nbytes, bool out, double until);
/* Returns the maximum time in seconds that a process waits, when it closes a connection, until the other end has
 * received its last message. This time is `usual`, unless ps_test_linger has set another time. */
double ps_net_linger_s(double usual);
/* Writes the numeric address of one end of the connection to `text`. If `peer` is set, this is the address of the other
 * end. Otherwise it is the address of this end. */
int ps_net_address(int fd, bool peer, char *text, size_t room);
#endif
