/* SPDX-License-Identifier: BSD-3-Clause
 * The table of a library that carries bytes between ranks: one exchange, and for device memory a sum. Everything else
 * (which bytes, the order of sums, the check that ranks agree) is comm/comm.c, the same for all libraries. */
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
typedef struct ps_comm_post ps_comm_post;  /* a message under way */

struct ps_watch;

/* Exchanges that may be under way at once. Messages of one lane between two ranks arrive in their order. PIECE and what
 * follows are of a product's pieces; communicators of devices have none of them. */
enum { PS_COMM_HEADER, PS_COMM_DATA, PS_COMM_DATA_2, PS_COMM_PLANNED, PS_COMM_PIECE,
       PS_COMM_LANES = PS_COMM_PIECE + PS_MAX_PIECES };
enum { PS_COMM_SLOTS = 8 };                /* for `post`: 0 .. 7 */
enum { PS_AXIS_NBYTES = 16 };              /* bytes of an axis's name, with its 0 */

typedef struct ps_comm_table {
    const char *name;
    /* Begins an exchange on a lane that has none: for each other rank r it sends the bytes of send[r] and fills those
     * of recv[r]. 0 bytes: nothing goes that way. Both arrays are [size] and are read before the call returns. The
     * bytes stay where they are until `finish`. Both ends must mean the same sizes. */
    int (*begin)(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv);
    /* Waits for the exchange's end, timeout_s at most. After a failure of begin or finish nothing is under way on any
     * lane, and the connections are closed, which the other ranks see. PS_ETIME, PS_EIO: the message names the rank. */
    int (*finish)(ps_comm *comm, int lane);
    /* Closes the connections; every later exchange fails. The other ranks are told this thread's error. */
    void (*hang_up)(ps_comm *comm);
    void (*close)(ps_comm *comm);
    /* (NULL: a communicator of a device) Makes a communicator of `n` of these ranks over the same connections. Another
     * thread may use it at the same time. ranks: [n], numbers in this communicator, in the order of the new one. id:
     * the same on all `n` ranks; no other communicator that two of them share has it. A failure of either communicator
     * ends both. They may be closed in any order. */
    int (*cut)(ps_comm *comm, int n, const int32_t *ranks, const char *axis, int32_t id, ps_comm **out);
    /* (NULL: the library has none) Single messages, beside exchanges and from any thread. post: begins to send the
     * bytes to rank `peer`, or to receive them from it. The bytes stay where they are until `drop`. Messages of a slot
     * between two ranks arrive in their order. Both ends must mean the same size. */
    int (*post)(ps_comm *comm, int slot, int peer, bool out, void *bytes, int64_t nbytes, ps_comm_post **made);
    /* 1: the message ended. 0: the wait was woken, by `wake`, a verdict or a communicator that hung up. PS_ETIME,
     * PS_EIO: the library's error, of which the other ranks are not told here. One thread waits for a message, once. */
    int (*wait)(ps_comm_post *post, double seconds);
    void (*wake)(ps_comm_post *post);
    void (*drop)(ps_comm_post *post);      /* NULL: nothing happens */
    /* (NULL: bytes are in host memory) Further calls for device memory. mark, after and follow are ps_wire_table's. sum
     * and copy return when they have begun; exchanges that begin later come after them. settle waits for the end of all
     * that was begun, as finish does.
     *
     * hand_over: the bytes of a call `op` are under way, and its caller goes on: from now on a thread of the
     * communicator looks at them, as settle would. Returns a moment (>= 0) behind all that was begun, or an error.
     * catch_up, called by the thread that runs kernels: what the device is given from now on comes after the moment,
     * which may be taken for a later one; -1: this one, after a failure, too. A failure of bytes that nobody waits for
     * is the error of the next call here, of the next read of the device's memory or of ps_groups_settle, whichever
     * comes first; told: the script gets another error. What fails on a thread of the group's jobs is told by whoever
     * gives the job's result to the script. leave: the host communicator is about to be closed. Ends what is under way
     * within some seconds; no thread of the communicator uses that of the host afterwards. memory_free and close alone
     * follow. */
    int (*mark)(ps_comm *comm);
    int (*after)(ps_comm *comm, int mark);
    int (*follow)(ps_comm *comm, int lane);
    int (*settle)(ps_comm *comm);
    int (*hand_over)(ps_comm *comm, const char *op, uint64_t call);
    int (*catch_up)(ps_comm *comm, int moment);
    void (*told)(ps_comm *comm);
    void (*leave)(ps_comm *comm);
    int (*sum)(ps_comm *comm, int dtype, int n, char *const *at, int64_t numel, char *to);   /* as ps_wire_table's */
    int (*copy)(ps_comm *comm, void *to, const void *from, int64_t nbytes);
    int (*memory)(ps_comm *comm, int64_t nbytes, void **out);
    void (*memory_free)(ps_comm *comm, void *p);
    /* (optional) The library's own collectives, to which benches compare ours. Both are of fp32. count: elements of
     * `in`. */
    int (*raw_all_gather)(ps_comm *comm, float *out, float *in, int64_t count);
    int (*raw_all_reduce)(ps_comm *comm, float *out, float *in, int64_t count);
} ps_comm_table;

struct ps_comm {
    const ps_comm_table *table;
    int rank, size;
    double timeout_s;
    struct ps_watch *watch;                /* of all ranks, or NULL */
    int place;                             /* in the watch (rendezvous/watch.h) */
    const int32_t *ranks;                  /* [size]: the ranks' numbers in the world; NULL: the same numbers */
    char axis[PS_AXIS_NBYTES];             /* its name in messages; "": all ranks */
    bool pretends;                         /* the other ranks are not here: each says and has what this one does */
};

/* The number in the world of the communicator's rank `r`. Messages call ranks by it. */
static inline int ps_comm_world(const ps_comm *comm, int r) { return comm->ranks ? comm->ranks[r] : r; }

int ps_comm_self(ps_comm **out);           /* a world of one */
int ps_comm_pretend(int rank, int size, ps_comm **out);      /* rank `rank` of `size`, of which no other is here */
/* Over Gloo's TCP transport. PS_EUNSUP in a build without it. */
int ps_comm_gloo(const ps_meeting *meeting, ps_comm **out);

/* Over the memory of a device, between the ranks of `host`. `host` outlives the new communicator and hears of its
 * failures. id: the same on all ranks; NULL: host is a world of one. */
int ps_comm_wire(struct ps_backend *be, const char *id, ps_comm *host, ps_comm **out);

#ifdef __cplusplus
}
#endif
#endif
