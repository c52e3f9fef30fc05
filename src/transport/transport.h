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

/* Lanes: each may have one exchange under way. Messages of one lane between two ranks arrive in the order sent. PIECE
 * and the lanes after it are for the pieces of a product. Communicators of devices do not have these lanes. */
enum { PS_COMM_HEADER, PS_COMM_DATA, PS_COMM_DATA_2, PS_COMM_PLANNED, PS_COMM_PIECE,
       PS_COMM_LANES = PS_COMM_PIECE + PS_MAX_PIECES };
enum { PS_COMM_SLOTS = 8 };                /* for `post`: 0 .. 7 */
enum { PS_AXIS_NBYTES = 16 };              /* bytes of an axis name, with its final 0 */

typedef struct ps_comm_table {
    const char *name;
    /* Begins an exchange on a lane without one: sends the bytes of send[r] to each other rank r, and receives into
     * recv[r]. 0 bytes: no message is sent in that direction. Both arrays are [size] and are read before the call
     * returns. The bytes must stay valid and in place until `finish`. Both ends must pass the same sizes. */
    int (*begin)(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv);
    /* Waits for the end of the exchange, for at most timeout_s. After a failure of begin or finish, no exchange is
     * under way on any lane. The connections are closed, which the other ranks detect. PS_ETIME, PS_EIO: the message
     * names the rank. */
    int (*finish)(ps_comm *comm, int lane);
    /* Closes the connections, so that every later exchange fails. The other ranks get this thread's error. */
    void (*hang_up)(ps_comm *comm);
    void (*close)(ps_comm *comm);
    /* (NULL: a communicator of a device) Makes a communicator of `n` of these ranks over the same connections. Another
     * thread may use it at the same time. ranks: [n], ranks in this communicator, in the order of the new one. id: the
     * same on all `n` ranks, and different from the id of every other communicator that two of them share. A failure of
     * either communicator ends both. They may be closed in any order. */
    int (*cut)(ps_comm *comm, int n, const int32_t *ranks, const char *axis, int32_t id, ps_comm **out);
    /* (NULL: the library does not have these calls) Single messages, independent of exchanges. Any thread may send
     * them. post: begins to send the bytes to rank `peer`, or to receive them from it. The bytes must stay in place
     * until `drop`. Messages of a slot between two ranks arrive in the order sent. Both ends must pass the same
     * size. */
    int (*post)(ps_comm *comm, int slot, int peer, bool out, void *bytes, int64_t nbytes, ps_comm_post **made);
    /* 1: the message has ended. 0: the wait was woken by `wake`, by a verdict, or by a communicator that closed its
     * connections. PS_ETIME, PS_EIO: the library's error, which is not reported to the other ranks. Only one thread
     * waits for a message, once. */
    int (*wait)(ps_comm_post *post, double seconds);
    void (*wake)(ps_comm_post *post);
    void (*drop)(ps_comm_post *post);      /* NULL: does nothing */
    /* (NULL: bytes are in host memory) Further calls for device memory. mark, after and follow are those of
     * ps_wire_table. sum and copy return when they have begun; exchanges that begin later run after them. settle waits
     * for the end of everything that was begun, as finish does.
     *
     * hand_over: the caller stops watching the bytes of a call `op`, which are under way; from now on a thread of the
     * communicator watches them, as settle would. Returns a point (>= 0): after everything that was begun, or
     * an error.
     *
     * catch_up (called by the thread that runs kernels): orders all work that is queued on the device from now on after
     * the point, or after a later one. -1: after the present point, also after a failure.
     *
     * A failure of bytes that nobody waits for is raised by the next call here, by the next read of the device's memory
     * or by ps_groups_settle, whichever comes first. told: the script gets another error instead. If a call fails on a
     * thread of the group's jobs, the function that passes the job's result to the script calls told.
     *
     * leave: the host communicator is about to be closed. Ends everything under way within some seconds; afterwards no
     * thread of the communicator uses the host communicator. Only memory_free and close may follow. */
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
    /* (optional) The library's own collectives, with which benches compare ours. Both are in fp32. count: number of
     * elements of `in`. */
    int (*raw_all_gather)(ps_comm *comm, float *out, float *in, int64_t count);
    int (*raw_all_reduce)(ps_comm *comm, float *out, float *in, int64_t count);
} ps_comm_table;

struct ps_comm {
    const ps_comm_table *table;
    int rank, size;
    double timeout_s;
    struct ps_watch *watch;                /* the watch over all ranks, or NULL */
    int place;                             /* the communicator's place in the watch (rendezvous/watch.h) */
    const int32_t *ranks;                  /* [size] the world ranks; NULL: the same numbers */
    char axis[PS_AXIS_NBYTES];             /* the communicator's name in messages; "": all ranks */
    bool pretends;                         /* the other ranks are pretended: each sends and has the same bytes as this
                                            * rank */
};

/* Returns the world rank of the communicator's rank `r`. Messages name ranks by their world rank. */
static inline int ps_comm_world(const ps_comm *comm, int r) { return comm->ranks ? comm->ranks[r] : r; }

int ps_comm_self(ps_comm **out);           /* a world of one rank */
int ps_comm_pretend(int rank, int size, ps_comm **out);      /* a world of `size` ranks, of which `rank` is real; the
                                                              * others are pretended */
/* Makes the world over Gloo's TCP transport. PS_EUNSUP in a build without Gloo. */
int ps_comm_gloo(const ps_meeting *meeting, ps_comm **out);

/* A communicator for the memory of a device, between the ranks of `host`. `host` must outlive it, and is notified of
 * its failures. id: the same on all ranks; NULL: host is a world of one. */
int ps_comm_wire(struct ps_backend *be, const char *id, ps_comm *host, ps_comm **out);

#ifdef __cplusplus
}
#endif
#endif
