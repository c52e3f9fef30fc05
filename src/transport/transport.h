/* SPDX-License-Identifier: BSD-3-Clause
 * This header is the interface of a library that sends bytes between ranks. A library provides an exchange, and a sum
 * for device memory. comm/comm.c does all other work, in the same way for every library. It chooses the bytes to send,
 * sums in rank order, and checks that the ranks make the same calls. */
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
typedef struct ps_comm_post ps_comm_post;  /* a message in progress */

struct ps_watch;

/* The lanes. Each lane can have one exchange in progress. The messages of a lane from one rank to another arrive in the
 * order of their sends. The lanes from PS_COMM_PIECE on are for the pieces of a product. Communicators for device
 * memory do not have the lanes for pieces. */
enum { PS_COMM_HEADER, PS_COMM_DATA, PS_COMM_DATA_2, PS_COMM_PLANNED, PS_COMM_PIECE,
       PS_COMM_LANES = PS_COMM_PIECE + PS_MAX_PIECES };
enum { PS_COMM_SLOTS = 8 };                /* number of slots for `post` */
/* The maximum size of the name of an axis in bytes, with the final 0. */
enum { PS_AXIS_NBYTES = 16 };

typedef struct ps_comm_table {
    const char *name;
    /* begin: Begins an exchange on a free lane. Sends send[r] to each other rank r, and receives bytes from rank r into
     * recv[r]. A part of 0 bytes sends no message. Both arrays are [size] and are read before the call returns. The
     * bytes must stay in place until `finish` returns. The sizes that the sender and the receiver pass must be
     * equal. */
    int (*begin)(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv);
    /* finish: Waits for the end of the exchange, but at most timeout_s. If begin or finish fails, all exchanges end and
     * the connections are closed. The other ranks detect this. Returns PS_ETIME or PS_EIO on failure. The text of the
     * error names the rank that caused the failure. */
    int (*finish)(ps_comm *comm, int lane);
    /* hang_up: Closes the connections, so that every later exchange fails. The other ranks get the error of this
     * thread. */
    void (*hang_up)(ps_comm *comm);
    void (*close)(ps_comm *comm);
    /* cut: (NULL for a communicator of a device) Makes a communicator of `n` ranks of this communicator, over the same
     * connections. Another thread may use the new communicator. If either of the two communicators fails, both end.
     * They may be closed in any order.
     * ranks: [n] ranks of this communicator, in the order of the new communicator
     * id: must be equal on all `n` ranks; no two of these ranks may share another communicator with the same id */
    int (*cut)(ps_comm *comm, int n, const int32_t *ranks, const char *axis, int32_t id, ps_comm **out);
    /* post: (NULL if the library does not support single messages) The functions post, wait, wake and drop are for
     * single messages, which are independent of exchanges. Any thread may call these functions. post begins to send the
     * bytes to rank `peer`, or to receive bytes from rank `peer`. The bytes must stay in place until `drop`. The
     * messages of a slot from one rank to another arrive in the order of their sends. The sizes that the sender and the
     * receiver pass must be equal. */
    int (*post)(ps_comm *comm, int slot, int peer, bool out, void *bytes, int64_t nbytes, ps_comm_post **made);
    /* wait: Waits for the end of a message. Only one thread may wait for a message, and only once. Other ranks are not
     * notified of an error. Returns one of these values:
     *   1   the message has ended
     *   0   the wait was woken by `wake`, by a verdict, or by a communicator that has closed its connections
     *   PS_ETIME, PS_EIO   the library has failed */
    int (*wait)(ps_comm_post *post, double seconds);
    void (*wake)(ps_comm_post *post);
    void (*drop)(ps_comm_post *post);      /* does nothing if `post` is NULL */
    /* (NULL for a communicator of host memory) The functions that follow are for device memory. mark, after and follow
     * do the same as in ps_wire_table. sum and copy return when their work has begun. Later exchanges begin after this
     * work. settle waits for the end of everything that was begun.
     *
     * hand_over: After this function, the caller no longer watches the bytes of the call `op`. A thread of the
     * communicator watches them instead. Returns a point (>= 0) that is after everything that was begun, or an error.
     *
     * catch_up: Makes all work that is queued on the device after this call wait for the point, or for a later point.
     * The point -1 is the present point, which is valid even after a failure. Called by the thread that runs kernels.
     *
     * told: If bytes that no thread waits for are lost, an error is raised by the next call of this table, by the next
     * read of the device's memory, or by ps_groups_settle. told is called if the script gets another error instead of
     * this error. If a job has failed, told is called by the function that passes the result of the job to the script.
     *
     * leave: Must be called before the communicator of host memory is closed. Ends everything in progress within some
     * seconds. After leave, no thread uses the communicator of host memory, and only memory_free and close may be
     * called. */
    int (*mark)(ps_comm *comm);
    int (*after)(ps_comm *comm, int mark);
    int (*follow)(ps_comm *comm, int lane);
    int (*settle)(ps_comm *comm);
    int (*hand_over)(ps_comm *comm, const char *op, uint64_t call);
    int (*catch_up)(ps_comm *comm, int point);
    void (*told)(ps_comm *comm);
    void (*leave)(ps_comm *comm);
    int (*sum)(ps_comm *comm, int dtype, int n, char *const *at, int64_t numel, char *to);   /* see ps_wire_table */
    int (*copy)(ps_comm *comm, void *to, const void *from, int64_t nbytes);
    int (*memory)(ps_comm *comm, int64_t nbytes, void **out);
    void (*memory_free)(ps_comm *comm, void *p);
    /* (optional) The library's own fp32 collectives, for comparisons in benchmarks. count: number of elements of
     * `in`. */
    int (*raw_all_gather)(ps_comm *comm, float *out, float *in, int64_t count);
    int (*raw_all_reduce)(ps_comm *comm, float *out, float *in, int64_t count);
} ps_comm_table;

struct ps_comm {
    const ps_comm_table *table;
    int rank, size;
    double timeout_s;
    /* watch: the watch of all ranks, or NULL if there is none */
    struct ps_watch *watch;
    /* place: index of this communicator's place in the watch (see rendezvous/watch.h) */
    int place;
    /* ranks: [size] the world rank of each rank, or NULL if the rank and the world rank are equal for all ranks */
    const int32_t *ranks;
    /* axis: name of the communicator in errors; "" if the communicator has all ranks */
    char axis[PS_AXIS_NBYTES];
    bool pretends;                         /* the other ranks are simulated, and have the same bytes as this rank */
};

/* Returns the world rank of rank `r` of the communicator. Errors contain world ranks. */
static inline int ps_comm_world(const ps_comm *comm, int r) { return comm->ranks ? comm->ranks[r] : r; }

int ps_comm_self(ps_comm **out);           /* makes a world of one rank */
/* Makes a communicator of `size` ranks, of which only `rank` is real. */
int ps_comm_pretend(int rank, int size, ps_comm **out);
/* Makes the world of all ranks over Gloo's TCP transport. Returns PS_EUNSUP in a build without Gloo. */
int ps_comm_gloo(const ps_meeting *meeting, ps_comm **out);

/* Makes a communicator for device memory between the ranks of `host`. `host` must be closed after the new communicator.
 * If the new communicator fails, `host` fails as well. id: must be equal on all ranks; NULL if `host` is a world of one
 * rank. */
int ps_comm_wire(struct ps_backend *be, const char *id, ps_comm *host, ps_comm **out);

#ifdef __cplusplus
}
#endif
#endif
