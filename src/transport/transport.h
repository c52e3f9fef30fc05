/* SPDX-License-Identifier: BSD-3-Clause
 * The interface of a library that carries bytes between ranks: an exchange and, for device memory, a sum. comm/comm.c
 * does everything else in the same way for all libraries: it chooses the bytes, orders the sums, and checks that ranks
 * agree. */
#ifndef PS_TRANSPORT_H
#define PS_TRANSPORT_H
#include <stdbool.h>
#include <stdint.h>
#include "backend/wire.h"
#include "ps.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_comm ps_comm;
typedef struct ps_comm_post ps_comm_post;  /* a message that is under way */

struct ps_watch;

/* Each lane can have one exchange under way. Messages of a lane between two ranks arrive in the order in which they
 * were sent. PIECE and the lanes after it carry the pieces of a product; communicators of devices do not have these
 * lanes. */
enum { PS_COMM_HEADER, PS_COMM_DATA, PS_COMM_DATA_2, PS_COMM_PLANNED, PS_COMM_PIECE,
       PS_COMM_LANES = PS_COMM_PIECE + PS_MAX_PIECES };
enum { PS_COMM_SLOTS = 8 };                /* number of slots that `post` can use */
enum { PS_AXIS_NBYTES = 16 };              /* bytes of an axis name, including its final 0 */

typedef struct ps_comm_table {
    const char *name;
    /* Begins an exchange on a free lane: sends the bytes of send[r] to each other rank r, and receives into recv[r].
     * Sends no message in a direction whose size is 0. Both arrays are [size] and are read before the call returns.
     * The bytes must stay valid and in place until `finish`. Both ends must pass the same sizes. */
    int (*begin)(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv);
    /* Waits at most timeout_s for the end of the exchange. If begin or finish fails, all exchanges end and the
     * connections are closed, which the other ranks detect. PS_ETIME, PS_EIO: the message names the rank. */
    int (*finish)(ps_comm *comm, int lane);
    /* Closes the connections, so that every later exchange fails. The other ranks get this thread's error. */
    void (*hang_up)(ps_comm *comm);
    void (*close)(ps_comm *comm);
    /* (NULL for a communicator of a device) Makes a communicator of `n` of these ranks over the same connections.
     * The new communicator may be used by another thread at the same time. ranks: [n] ranks of this communicator, in
     * the order of the new one. id: equal on all `n` ranks; any two of these ranks must share no other communicator
     * with this id. If either communicator fails, both end. They may be closed in any order. */
    int (*cut)(ps_comm *comm, int n, const int32_t *ranks, const char *axis, int32_t id, ps_comm **out);
    /* (NULL if the library does not have these calls) Single messages, which are independent of exchanges, and which
     * any thread may send. post begins to send the bytes to rank `peer`, or to receive them from it. The bytes must
     * stay in place until `drop`. Messages of a slot between two ranks arrive in the order in which they were sent.
     * Both ends must pass the same size. */
    int (*post)(ps_comm *comm, int slot, int peer, bool out, void *bytes, int64_t nbytes, ps_comm_post **made);
    /* Waits for a message. Returns 1 if it has ended, and 0 if something else woke the wait: `wake`, a verdict, or a
     * communicator that closed its connections. PS_ETIME, PS_EIO: the library's error; the other ranks are not
     * notified. Only one thread may wait for a message, and only once. */
    int (*wait)(ps_comm_post *post, double seconds);
    void (*wake)(ps_comm_post *post);
    void (*drop)(ps_comm_post *post);      /* does nothing for NULL */
    /* (NULL if bytes are in host memory) Further calls for device memory. mark, after and follow are those of
     * ps_wire_table. sum and copy return when they have begun; exchanges that begin later run after them. settle
     * waits, like finish, for the end of everything that was begun.
     *
     * hand_over: called when the caller stops watching the bytes under way of a call `op`. A thread of the
     * communicator watches them from now on, as settle would. Returns a point (>= 0) after everything that was
     * begun, or an error.
     *
     * catch_up: makes all work that is queued on the device from now on wait for the point, or for a later one. -1
     * means the present point, and is also valid after a failure. Called by the thread that runs kernels.
     *
     * If bytes that no thread waits for fail, the first of these calls raises the error: the next call here, the
     * next read of the device's memory, or ps_groups_settle. told: called if the script gets another error instead.
     * If a call fails on a thread of the group's jobs, told is called by the function that passes the job's result
     * to the script.
     *
     * leave: called before the host communicator is closed. Ends everything under way within some seconds.
     * Afterwards no thread of the communicator uses the host communicator, and only memory_free and close may be
     * called. */
    int (*mark)(ps_comm *comm);
    int (*after)(ps_comm *comm, int mark);
    int (*follow)(ps_comm *comm, int lane);
    int (*settle)(ps_comm *comm);
    int (*hand_over)(ps_comm *comm, const char *op, uint64_t call);
    int (*catch_up)(ps_comm *comm, int point);
    void (*told)(ps_comm *comm);
    void (*leave)(ps_comm *comm);
    int (*sum)(ps_comm *comm, int dtype, int n, char *const *at, int64_t numel, char *to);   /* as in ps_wire_table */
    int (*copy)(ps_comm *comm, void *to, const void *from, int64_t nbytes);
    int (*memory)(ps_comm *comm, int64_t nbytes, void **out);
    void (*memory_free)(ps_comm *comm, void *p);
    /* (optional) The library's own collectives in fp32, for benchmarks that compare them with ours. count: number of
     * elements of `in`. */
    int (*raw_all_gather)(ps_comm *comm, float *out, float *in, int64_t count);
    int (*raw_all_reduce)(ps_comm *comm, float *out, float *in, int64_t count);
} ps_comm_table;

struct ps_comm {
    const ps_comm_table *table;
    int rank, size;
    double timeout_s;
    struct ps_watch *watch;                /* the watch over all ranks, or NULL */
    int place;                             /* index of this communicator's place in the watch (rendezvous/watch.h) */
    const int32_t *ranks;                  /* [size] world rank of each rank; NULL if each rank is its world rank */
    char axis[PS_AXIS_NBYTES];             /* name of the communicator for errors, "" if it has all ranks */
    bool pretends;                         /* the other ranks are simulated: each has the same bytes as this rank,
                                            * and sends them */
};

/* Returns the world rank of the communicator's rank `r`. Errors identify ranks by world rank. */
static inline int ps_comm_world(const ps_comm *comm, int r) { return comm->ranks ? comm->ranks[r] : r; }

int ps_comm_self(ps_comm **out);           /* makes a world of one rank */
int ps_comm_pretend(int rank, int size, ps_comm **out);      /* makes a world of `size` ranks, of which only `rank`
                                                              * is real */
/* Makes the world of all ranks over Gloo's TCP transport. PS_EUNSUP in a build without Gloo. */
int ps_comm_gloo(const ps_meeting *meeting, ps_comm **out);

/* Makes a communicator for device memory between the ranks of `host`. `host` must outlive the communicator, whose
 * failures it is notified of. id: equal on all ranks, or NULL if `host` is a world of one. */
int ps_comm_wire(struct ps_backend *be, const char *id, ps_comm *host, ps_comm **out);

#ifdef __cplusplus
}
#endif
#endif
