/* SPDX-License-Identifier: BSD-3-Clause
 * Sockets as the store and the watch of the ranks use them: TCP, closed on exec, never blocking for longer than a given
 * moment of ps_now(). Called by store*.c and watch*.c only. */
#ifndef PS_COMM_NET_H
#define PS_COMM_NET_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Listens at this address of this machine and no other; port 0: a free one. "0.0.0.0", "::": at all. */
int ps_net_listen(const char *host, int port, int *out_fd, int *out_port);
bool ps_net_is_loopback(const char *host);                     /* all its addresses: no other machine can mean them */
/* Tries once to connect to host:port: a file descriptor that never blocks, or 0: not now. PS_EIO: this process can open
 * no socket. */
int ps_net_reach(const char *host, int port, double until);
bool ps_net_knows(const char *host);                           /* its name has an address here */
bool ps_net_no_files(int why);                                 /* of errno: there are as many files as there may be */
/* Waits until the socket is ready (POLLIN, POLLOUT): 1; the time is over: 0; failed: -1. */
int ps_net_ready(int fd, short events, double until);
/* Sends or receives what can be now, and never waits: how many bytes; 0: none yet; -1: the other end hung up, or it
 * failed. */
int64_t ps_net_some(int fd, void *bytes, size_t nbytes, bool out);
/* Sends or receives exactly so many bytes: 1; the time is over: 0; the other end hung up, or it failed: -1. */
int ps_net_transfer(int fd, void *bytes, size_t nbytes, bool out, double until);
/* The numeric address of this end, or of the other one. */
int ps_net_address(int fd, bool peer, char *text, size_t room);
#endif
