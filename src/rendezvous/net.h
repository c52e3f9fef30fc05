/* SPDX-License-Identifier: BSD-3-Clause
 * TCP sockets for the store and the watch, closed on exec. No call blocks beyond its deadline `until`, in seconds of
 * ps_now(). */
#ifndef PS_RENDEZVOUS_NET_H
#define PS_RENDEZVOUS_NET_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Listens at one address of this machine. "0.0.0.0" and "::" mean all addresses, and port 0 any free port. */
int ps_net_listen(const char *host, int port, int *out_fd, int *out_port);
bool ps_net_is_loopback(const char *host);                     /* whether only this machine can reach `host` */
/* Tries once to connect. Returns a non-blocking file descriptor, or 0 if nothing answers there now. PS_EIO: this
 * process cannot open a socket. */
int ps_net_reach(const char *host, int port, double until);
bool ps_net_knows(const char *host);                           /* whether the name has an address here */
bool ps_net_no_files(int why);                                 /* whether errno `why` means too many open files */
/* Waits until the socket is ready for `events` (POLLIN or POLLOUT). Returns 1 on success, 0 if the time is over, or -1
 * if the socket failed. */
int ps_net_ready(int fd, short events, double until);
/* Sends or receives as many bytes as possible without waiting, and returns their number, which can be 0. Returns -1
 * if the other end closed the connection or the socket failed. */
int64_t ps_net_some(int fd, void *bytes, size_t nbytes, bool out);
/* Sends or receives exactly nbytes. Returns 1 on success, 0 if the time is over, or -1 if the other end closed the
 * connection or the socket failed. */
int ps_net_transfer(int fd, void *bytes, size_t nbytes, bool out, double until);
/* Returns how many seconds a closing end waits, at most, until its last message is received: `usual`, or the value
 * from ps_test_linger. */
double ps_net_linger_s(double usual);
/* Writes the numeric address of the other end (peer) or of this end to `text`. */
int ps_net_address(int fd, bool peer, char *text, size_t room);
#endif
