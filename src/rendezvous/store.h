/* SPDX-License-Identifier: BSD-3-Clause
 * Ranks find each other through a small key-value store, which a thread of rank 0 serves over TCP while a group is
 * made. The server handles requests only of clients that have proved to belong to the run (proof.h). Keys and values
 * are small, all sizes are bounded, and every wait has a time limit. All waiting clients get the first fault: a wrong
 * world size, a rank taken twice, a rank that ended. gloo.cc makes and joins the store, and ignores SIGPIPE. */
#ifndef PS_RENDEZVOUS_STORE_H
#define PS_RENDEZVOUS_STORE_H
#include "ps.h"
#include "rendezvous/proof.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { PS_STORE_MAX_KEY = 128, PS_STORE_MAX_VALUE = 1 << 20, PS_STORE_MAX_RANKS = 4096, PS_STORE_TEXT = 512 };

typedef struct ps_store_server ps_store_server;
/* Serves the ranks of a run, a world of `size`, at this address (ps_net_listen). port 0: any free port
 * (ps_store_port). */
int ps_store_serve(const char *host, int port, int size, const ps_run *run, ps_store_server **out);
int ps_store_port(const ps_store_server *server);
const char *ps_store_host(const ps_store_server *server);      /* numeric address at which the server listens */
const char *ps_store_lacks(const ps_store_server *server);     /* reason, for messages, for which ranks could not
                                                                * connect, or "" */
/* Ends the server. failed: first waits until all ranks have connected and received the fault, or have ended, for at
 * most PS_STORE_LINGER_S seconds. Does nothing for NULL. */
void ps_store_stop(ps_store_server *server, bool failed);
#define PS_STORE_LINGER_S 2

/* A rank's connection, used by one thread only. */
typedef struct ps_store ps_store;
/* The rank that connects, its run and its time-out. */
typedef struct ps_store_rank {
    int rank, size;
    const ps_run *run;
    double timeout_s;                      /* time-out for connecting, and for each later call */
} ps_store_rank;
/* Tries until the store of this run answers or the time is over. A rank that is rejected tries again. If the server
 * belongs to another run, has another secret or is not a store, this function waits PS_STORE_FOREIGN_S seconds for
 * it to end, then fails. */
int ps_store_connect(const char *host, int port, const ps_store_rank *me, ps_store **out);
/* Tries once to connect, until time `until` of ps_now(). After NOBODY, TURNED_AWAY and FOREIGN another try may
 * succeed. TURNED_AWAY: the server closed the connection or did not answer. FOREIGN: the server belongs to another
 * run, or is not a store. After TURNED_AWAY and FOREIGN this thread's error has the details. Negative: an error. */
enum { PS_STORE_REACHED, PS_STORE_NOBODY, PS_STORE_TURNED_AWAY, PS_STORE_FOREIGN };
int ps_store_try(const char *host, int port, const ps_store_rank *me, double until, ps_store **out);
#define PS_STORE_AGAIN_S 0.05                           /* pause between two tries to connect */
#define PS_STORE_FOREIGN_S 5
void ps_store_pause(void);
/* Returns the seconds after which a rank that waits for others prints a note, once. */
double ps_store_say_s(double timeout_s);
/* Prints a note that this rank is waiting for rank 0, once, if ps_store_say_s() seconds have passed since `since`.
 * *said is set when it has been printed. where: "at HOST port PORT". */
void ps_store_say(const ps_store_rank *me, double since, const char *where, bool *said);
/* Waits until all ranks are connected. If a rank or world size is wrong, fails before that. Rank 0 prints once, on
 * stderr, which ranks have been missing for a long time. */
int ps_store_meet(ps_store *store, double timeout_s);
int ps_store_set(ps_store *store, const char *key, const void *value, int64_t nbytes);
/* Waits until the key is set. *nbytes: bytes of the value; more than `room` is an error. */
int ps_store_get(ps_store *store, const char *key, double timeout_s, void *value, int64_t room, int64_t *nbytes);
/* Raises the server's fault as this thread's error. Returns 0 if the server has no fault within PS_STORE_FAULT_S
 * seconds. */
int ps_store_ask_fault(ps_store *store);
#define PS_STORE_FAULT_S 0.3                            /* A rank that closes a connection may be about to report a
                                                         * fault; other ranks wait this long for it. */
void ps_store_fault(ps_store *store, const char *text); /* sends the fault to all ranks; ignores a failure to send */
void ps_store_close(ps_store *store, bool ok);          /* ok: this rank no longer needs the store; false: it ends
                                                         * because of a fault */
/* Returns the numeric address from which this machine reached the store. Other ranks can also reach this machine at
 * it. */
const char *ps_store_local_address(const ps_store *store);
const char *ps_store_server_address(const ps_store *store); /* address of the store, as this machine reached it */

/* Serves the store (on rank 0) and connects to it, by "tcp://host:port" or by "file:///path". Rank 0 writes the
 * store's address to the file and, if the run has no secret, a new secret (store_meet.c). *run: the meeting's run,
 * with the file's secret if it has none. */
int ps_store_join(const ps_meeting *meeting, ps_run *run, ps_store_server **server, ps_store **out);

#ifdef __cplusplus
}
#endif
#endif
