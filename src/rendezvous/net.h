/* SPDX-License-Identifier: BSD-3-Clause
 * Sockets for the store and the watch: TCP, closed on exec. No call blocks beyond its deadline `until`, in seconds of
 * ps_now(). Called by store*.c, watch*.c and proof.c. */
#ifndef PS_RENDEZVOUS_NET_H
#define PS_RENDEZVOUS_NET_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Listens at one address of this machine. "0.0.0.0" and "::" mean all its addresses; port 0 means any free port. */
int ps_net_listen(const char *host, int port, int *out_fd, int *out_port);
bool ps_net_is_loopback(const char *host);                     /* returns true if no address of `host` can reach
                                                                * another machine */
/* Tries once to connect to host:port. Returns a non-blocking file descriptor, or 0 if no process answers there now.
 * PS_EIO: this process cannot open a socket. */
int ps_net_reach(const char *host, int port, double until);
bool ps_net_knows(const char *host);                           /* returns true if this machine finds an address for
                                                                * the name */
bool ps_net_no_files(int why);                                 /* returns true if the errno `why` means that the
                                                                * process cannot open more files */
/* Waits until the socket is ready for `events` (POLLIN or POLLOUT). Returns 1 if it is ready, 0 if the time is over,
 * and -1 if the socket failed. */
int ps_net_ready(int fd, short events, double until);
/* Sends or receives as many bytes as possible without waiting, and returns their number. Returns 0 if none can be
 * transferred yet, and -1 if the other end closed the connection or the socket failed. */
int64_t ps_net_some(int fd, void *bytes, size_t nbytes, bool out);
/* Sends or receives exactly nbytes. Returns 1 on success, 0 if the time is over, and -1 if the other end closed the
 * connection or the socket failed. */
int ps_net_transfer(int fd, void *bytes, size_t nbytes, bool out, double until);
/* Returns how many seconds an end waits, at most, for its peers to receive its last message: `usual`, or the value
 * from ps_test_linger. */
double ps_net_linger_s(double usual);
/* Writes a numeric address of the connection to `text`: the other end's if `peer` is set, else this end's. */
int ps_net_address(int fd, bool peer, char *text, size_t room);
#endif
