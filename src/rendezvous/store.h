/* SPDX-License-Identifier: BSD-3-Clause
 * A small key-value store through which ranks find each other. A thread of rank 0 serves it over TCP while a group
 * is made, only for clients that have proved to belong to the run (proof.h). All sizes are bounded, and every wait
 * has a time limit. The first fault (a wrong world size, a rank taken twice, a rank that ended) is sent to all
 * waiting clients. gloo.cc makes and joins the store, and ignores SIGPIPE. */
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
/* Serves the `size` ranks of a run at this address (ps_net_listen). port 0: any free port (ps_store_port). */
int ps_store_serve(const char *host, int port, int size, const ps_run *run, ps_store_server **out);
int ps_store_port(const ps_store_server *server);
const char *ps_store_host(const ps_store_server *server);      /* its numeric address */
const char *ps_store_lacks(const ps_store_server *server);     /* for errors: why ranks could not connect, or "" */
/* Ends the server. If `failed` is set, first waits at most PS_STORE_LINGER_S seconds until all ranks have received
 * the fault or ended. Does nothing for NULL. */
void ps_store_stop(ps_store_server *server, bool failed);
#define PS_STORE_LINGER_S 2

/* A rank's connection to the store, for one thread. */
typedef struct ps_store ps_store;
/* A rank that connects. */
typedef struct ps_store_rank {
    int rank, size;
    const ps_run *run;
    double timeout_s;                      /* for connecting, and for each later call */
} ps_store_rank;
/* Connects to the store of this run, trying until the time is over. If another server answers (FOREIGN, below),
 * gives it PS_STORE_FOREIGN_S seconds to end, then fails. */
int ps_store_connect(const char *host, int port, const ps_store_rank *me, ps_store **out);
/* Tries once to connect, until ps_now() reaches `until`. Returns a negative error, or:
 *   REACHED       the store is in *out
 *   NOBODY        no process answered
 *   TURNED_AWAY   the server closed the connection or did not answer
 *   FOREIGN       the server belongs to another run, has another secret, or is not a store
 * Another try may succeed after the last three. After the last two, this thread's error has the details. */
enum { PS_STORE_REACHED, PS_STORE_NOBODY, PS_STORE_TURNED_AWAY, PS_STORE_FOREIGN };
int ps_store_try(const char *host, int port, const ps_store_rank *me, double until, ps_store **out);
#define PS_STORE_AGAIN_S 0.05                           /* pause between two tries to connect */
#define PS_STORE_FOREIGN_S 5
void ps_store_pause(void);
/* Returns the seconds after which a waiting rank prints its note. */
double ps_store_say_s(double timeout_s);
/* Prints a note that this rank waits for rank 0, once, if ps_store_say_s() seconds have passed since `since`. Sets
 * *said when it does. where: "at HOST port PORT". */
void ps_store_say(const ps_store_rank *me, double since, const char *where, bool *said);
/* Waits until all ranks have connected. Fails at once if a rank or a world size is wrong. After a long time, rank 0
 * lists the missing ranks once on stderr. */
int ps_store_meet(ps_store *store, double timeout_s);
int ps_store_set(ps_store *store, const char *key, const void *value, int64_t nbytes);
/* Waits until the key is set, and copies its value. *nbytes: its size, which must not exceed `room`. */
int ps_store_get(ps_store *store, const char *key, double timeout_s, void *value, int64_t room, int64_t *nbytes);
/* Raises the server's fault as this thread's error. Returns 0 if there is none within PS_STORE_FAULT_S seconds. */
int ps_store_ask_fault(ps_store *store);
#define PS_STORE_FAULT_S 0.3                            /* a rank that closed a connection may be about to report a
                                                         * fault */
void ps_store_fault(ps_store *store, const char *text); /* sends a fault for all ranks; ignores errors */
void ps_store_close(ps_store *store, bool ok);          /* ok: not needed any more; else it failed */
/* Returns the numeric address from which this machine reached the store, and at which other ranks can reach it. */
const char *ps_store_local_address(const ps_store *store);
const char *ps_store_server_address(const ps_store *store); /* numeric address of the store */

/* Connects to the store at "tcp://host:port", or through the file "file:///path" (store_meet.c). On rank 0, first
 * serves the store, and writes the store's address to the file, with a new secret if the run has none. *run: the
 * meeting's run, with the file's secret if it has none of its own. */
int ps_store_join(const ps_meeting *meeting, ps_run *run, ps_store_server **server, ps_store **out);

#ifdef __cplusplus
}
#endif
#endif
