/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares a small key-value store, through which ranks find each other. A thread of rank 0 serves the
 * store over TCP while a group is made. It serves only clients that have proved that they belong to the run (proof.h).
 * All sizes are limited, and every wait has a time limit. The first fault is sent to all waiting clients. There is a
 * fault if a rank has another world size, if two processes use the same rank, or if a rank has ended. gloo.cc serves
 * and joins the store. It ignores SIGPIPE. */
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
/* Serves the store for the `size` ranks of a run, at this address (see ps_net_listen). If `port` is 0, uses any free
 * port (see ps_store_port). */
int ps_store_serve(const char *host, int port, int size, const ps_run *run, ps_store_server **out);
int ps_store_port(const ps_store_server *server);
const char *ps_store_host(const ps_store_server *server);      /* the numeric address of the store */
/* Returns a text for errors that says why ranks could not connect, or "" if no reason is known. */
const char *ps_store_lacks(const ps_store_server *server);
/* Ends the server. If `failed` is set, first waits until all connected ranks have received the fault or have ended.
 * This wait takes at most PS_STORE_LINGER_S seconds. Does nothing if `server` is NULL. */
void ps_store_stop(ps_store_server *server, bool failed);
#define PS_STORE_LINGER_S 2

/* The connection of a rank to the store. Only one thread may use it. */
typedef struct ps_store ps_store;
/* Describes a rank that connects to the store. */
typedef struct ps_store_rank {
    int rank, size;
    const ps_run *run;
    double timeout_s;                      /* maximum time for connecting, and for each later call */
} ps_store_rank;
/* Connects to the store of this run. Tries again until me->timeout_s has passed. If another server answers
 * (PS_STORE_FOREIGN), waits at most PS_STORE_FOREIGN_S seconds until that server has ended, and then fails. */
int ps_store_connect(const char *host, int port, const ps_store_rank *me, ps_store **out);
/* Tries once to connect, until ps_now() reaches `until`. Returns a negative error, or one of these values:
 *   REACHED       *out is the connection to the store
 *   NOBODY        no process has answered
 *   TURNED_AWAY   the server has closed the connection, or did not answer
 *   FOREIGN       the server belongs to another run, has another secret, or is not a store
 * If the result is not REACHED, another try may succeed. After TURNED_AWAY and FOREIGN, the error of this thread has
 * the details. */
enum { PS_STORE_REACHED, PS_STORE_NOBODY, PS_STORE_TURNED_AWAY, PS_STORE_FOREIGN };
int ps_store_try(const char *host, int port, const ps_store_rank *me, double until, ps_store **out);
#define PS_STORE_AGAIN_S 0.05                           /* pause between two tries to connect */
#define PS_STORE_FOREIGN_S 5
void ps_store_pause(void);
/* Returns the number of seconds after which a waiting rank prints its note. */
double ps_store_say_s(double timeout_s);
/* Prints a note that this rank waits for rank 0, if ps_store_say_s() seconds have passed since the time `since` and if
 * *said is false. Then sets *said to true. where: text such as "at HOST port PORT". */
void ps_store_say(const ps_store_rank *me, double since, const char *where, bool *said);
/* Waits until all ranks have connected. Fails at once if a rank or a world size is wrong. If the wait takes long, rank
 * 0 lists the missing ranks on stderr once. */
int ps_store_meet(ps_store *store, double timeout_s);
int ps_store_set(ps_store *store, const char *key, const void *value, int64_t nbytes);
/* Waits until `key` is set, and copies its value to `value`. *nbytes receives the size of the value in bytes, which
 * must not exceed `room`. */
int ps_store_get(ps_store *store, const char *key, double timeout_s, void *value, int64_t room, int64_t *nbytes);
/* Raises the fault that the server has set as the error of this thread. Returns 0 if no fault is set within
 * PS_STORE_FAULT_S seconds. */
int ps_store_ask_fault(ps_store *store);
/* The number of seconds for which ps_store_ask_fault waits for a fault. This wait is necessary because a rank that has
 * closed a connection may report a fault a moment later. */
#define PS_STORE_FAULT_S 0.3
/* Sends a fault to all ranks, and ignores errors. */
void ps_store_fault(ps_store *store, const char *text);
/* Closes the connection. If `ok` is set, the rank does not need the store any more. Otherwise the rank has failed. */
void ps_store_close(ps_store *store, bool ok);
/* Returns the numeric address of this machine in its connection to the store. Other ranks can reach this machine at
 * this address. */
const char *ps_store_local_address(const ps_store *store);
const char *ps_store_server_address(const ps_store *store); /* the numeric address of the store */

/* Connects to the store of a meeting (store_meet.c). The address of the meeting is "tcp://host:port" or "file:///path".
 * Rank 0 first serves the store. If ranks meet through a file, rank 0 also writes the address of its store to the file.
 * If the run has no secret, rank 0 makes a secret and writes it to the file, too. *run receives the run of the meeting.
 * Its secret is the meeting's secret, or otherwise the secret in the file. */
int ps_store_join(const ps_meeting *meeting, ps_run *run, ps_store_server **server, ps_store **out);

#ifdef __cplusplus
}
#endif
#endif
