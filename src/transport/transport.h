/* SPDX-License-Identifier: BSD-3-Clause
 * Interface of a library that sends bytes between ranks: an exchange and, for device memory, a sum. comm/comm.c does
 * all other work for every library alike: it chooses the bytes, orders the sums, and checks that ranks agree. */
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

/* A lane can have one exchange under way. Its messages between two ranks arrive in the order of their sends. Lanes
 * from PIECE on carry pieces of a product; communicators of devices do not have them. */
enum { PS_COMM_HEADER, PS_COMM_DATA, PS_COMM_DATA_2, PS_COMM_PLANNED, PS_COMM_PIECE,
       PS_COMM_LANES = PS_COMM_PIECE + PS_MAX_PIECES };
enum { PS_COMM_SLOTS = 8 };                /* slots for `post` */
enum { PS_AXIS_NBYTES = 16 };              /* with the final 0 */

typedef struct ps_comm_table {
    const char *name;
    /* Begins an exchange on a free lane: sends send[r] to each other rank r, and receives into recv[r]. A size of 0
     * sends no message. Both arrays are [size] and are read before the call returns. The bytes must stay in place
     * until `finish`. Both ends must pass the same sizes. */
    int (*begin)(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv);
    /* Waits at most timeout_s for the end of the exchange. If begin or finish fails, all exchanges end and the
     * connections are closed, which the other ranks detect. PS_ETIME, PS_EIO: the message names the rank. */
    int (*finish)(ps_comm *comm, int lane);
    /* Closes the connections, so that every later exchange fails. The other ranks get this thread's error. */
    void (*hang_up)(ps_comm *comm);
    void (*close)(ps_comm *comm);
    /* (NULL for a communicator of a device) Makes a communicator of `n` of these ranks over the same connections,
     * which another thread may use. ranks: [n] ranks of this one, in the new order. id: equal on all `n` ranks; no
     * two of them may share another communicator with this id. If either communicator fails, both end. They may be
     * closed in any order. */
    int (*cut)(ps_comm *comm, int n, const int32_t *ranks, const char *axis, int32_t id, ps_comm **out);
    /* (NULL if the library has no such calls) Single messages, independent of exchanges, from any thread. post
     * begins to send the bytes to rank `peer`, or to receive them. The bytes must stay in place until `drop`.
     * Messages of a slot between two ranks arrive in the order of their sends. Both ends must pass the same size. */
    int (*post)(ps_comm *comm, int slot, int peer, bool out, void *bytes, int64_t nbytes, ps_comm_post **made);
    /* Waits for a message. Returns 1 if it has ended. Returns 0 if something else woke the wait: `wake`, a verdict,
     * or a communicator that closed. PS_ETIME, PS_EIO: the library's error, of which other ranks are not notified.
     * Only one thread may wait for a message, and only once. */
    int (*wait)(ps_comm_post *post, double seconds);
    void (*wake)(ps_comm_post *post);
    void (*drop)(ps_comm_post *post);      /* does nothing for NULL */
    /* (NULL if bytes are in host memory) Further calls for device memory. mark, after and follow are those of
     * ps_wire_table. sum and copy return when they have begun; later exchanges run after them. settle waits for the
     * end of everything that was begun.
     *
     * hand_over: the caller stops watching the bytes of a call `op`, and a thread of the communicator watches them
     * from now on. Returns a point (>= 0) after everything that was begun, or an error.
     *
     * catch_up: makes all work that is queued on the device from now on wait for the point, or for a later one. -1
     * is the present point, and is valid even after a failure. Called by the thread that runs kernels.
     *
     * If bytes that no thread waits for fail, the next call here, the next read of the device's memory, or
     * ps_groups_settle raises the error. told: called if the script gets another error instead. After a failed job,
     * the function that passes the job's result to the script calls it.
     *
     * leave: called before the host communicator is closed. Ends everything under way within some seconds.
     * Afterwards no thread uses the host communicator, and only memory_free and close may be called. */
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
    /* (optional) The library's own fp32 collectives, for comparisons in benchmarks. count: elements of `in`. */
    int (*raw_all_gather)(ps_comm *comm, float *out, float *in, int64_t count);
    int (*raw_all_reduce)(ps_comm *comm, float *out, float *in, int64_t count);
} ps_comm_table;

struct ps_comm {
    const ps_comm_table *table;
    int rank, size;
    double timeout_s;
    struct ps_watch *watch;                /* the watch over all ranks, or NULL */
    int place;                             /* index of this communicator's place in the watch (rendezvous/watch.h) */
    const int32_t *ranks;                  /* [size] world ranks; NULL if each rank is its world rank */
    char axis[PS_AXIS_NBYTES];             /* name for errors, "" if it has all ranks */
    bool pretends;                         /* the other ranks are simulated, with this rank's bytes */
};

/* Returns the world rank of the communicator's rank `r`. Errors name world ranks. */
static inline int ps_comm_world(const ps_comm *comm, int r) { return comm->ranks ? comm->ranks[r] : r; }

int ps_comm_self(ps_comm **out);           /* makes a world of one rank */
int ps_comm_pretend(int rank, int size, ps_comm **out);      /* `size` ranks, of which only `rank` is real */
/* Makes the world of all ranks over Gloo's TCP transport. PS_EUNSUP: a build without Gloo. */
int ps_comm_gloo(const ps_meeting *meeting, ps_comm **out);

/* Makes a communicator for device memory between the ranks of `host`, which must outlive it and gets its failures.
 * id: equal on all ranks, or NULL if `host` is a world of one. */
int ps_comm_wire(struct ps_backend *be, const char *id, ps_comm *host, ps_comm **out);

#ifdef __cplusplus
}
#endif
#endif
