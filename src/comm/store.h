/* SPDX-License-Identifier: BSD-3-Clause
 * How ranks find each other: a small key-value store that a thread of rank 0 serves over TCP while a group is made.
 * Keys and values are small and all sizes bounded; every wait has an end. The first fault (a wrong world size, a rank
 * taken twice, a rank that ended) is told to all who wait. Called by gloo.cc only, which has SIGPIPE ignored. */
#ifndef PS_COMM_STORE_H
#define PS_COMM_STORE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { PS_STORE_MAX_KEY = 128, PS_STORE_MAX_VALUE = 1 << 20, PS_STORE_MAX_RANKS = 4096, PS_STORE_TEXT = 512 };

typedef struct ps_store_server ps_store_server;
/* Serves a world of `size` ranks. host "127.0.0.1" or "localhost": to this machine only, else on all addresses.
 * port 0: a free one (ps_store_port). */
int ps_store_serve(const char *host, int port, int size, ps_store_server **out);
int ps_store_port(const ps_store_server *server);
bool ps_store_is_local(const ps_store_server *server); /* serves this machine only */
/* failed: only when those connected have heard of the fault or ended, and others had time to come and hear of it, but
 * PS_STORE_LINGER_S at most. NULL: nothing. */
void ps_store_stop(ps_store_server *server, bool failed);
#define PS_STORE_LINGER_S 2

/* A rank's connection. It belongs to one thread. */
typedef struct ps_store ps_store;
/* Tries until somebody answers or the time is over. */
int ps_store_connect(const char *host, int port, int rank, int size, double timeout_s, ps_store **out);
/* One try; *out is NULL when nobody answers. until: of connecting; timeout_s: of each call afterwards. */
int ps_store_try(const char *host, int port, int rank, int size, double until, double timeout_s, ps_store **out);
#define PS_STORE_AGAIN_S 0.05                           /* between two tries */
void ps_store_pause(void);
/* Until all ranks are connected: what ranks were told wrongly (their number, the size) shows before this returns. */
int ps_store_meet(ps_store *store, double timeout_s);
int ps_store_set(ps_store *store, const char *key, const void *value, int64_t nbytes);
/* Waits for the key. *nbytes: of the value; more than `room` is an error. */
int ps_store_get(ps_store *store, const char *key, double timeout_s, void *value, int64_t room, int64_t *nbytes);
/* The fault that the server knows of, as this thread's error; 0: none, within PS_STORE_FAULT_S. */
int ps_store_ask_fault(ps_store *store);
#define PS_STORE_FAULT_S 0.3                            /* a rank that broke a connection may just be ending */
void ps_store_fault(ps_store *store, const char *text); /* tells all ranks, the best it can */
void ps_store_close(ps_store *store, bool ok);          /* ok: this rank needs the store no more; else a fault */
/* The numeric address by which this machine reached the store: others can reach it there, too. */
const char *ps_store_local_address(const ps_store *store);
const char *ps_store_server_address(const ps_store *store); /* where the store is, as this machine reached it */

/* Serves (rank 0) and connects by "tcp://host:port", or by a file where rank 0 writes the address of its store,
 * "file:///path" (store_meet.c). */
int ps_store_join(const char *rendezvous, int rank, int size, double timeout_s, ps_store_server **server,
                  ps_store **out);

#ifdef __cplusplus
}
#endif
#endif
