/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares groups of ranks, for the layers above. The files of this folder do not use tensors or contexts.
 * Collectives that use them are in collectives/collectives.h. Only one thread at a time uses a group. While there are
 * jobs, this is the group's own thread. Otherwise it is the caller's thread. The files are:
 *   comm.c    compares the ranks' calls, and moves and sums bytes
 *   job.c     collectives that run concurrently with the computation (for zero/shard.c)
 *   plan.c    calls that a dry run predicted
 *   count.c   statistics of calls
 *   inner.h   functions that only these files call */
#ifndef PS_COMM_GROUP_H
#define PS_COMM_GROUP_H
#include <stdbool.h>
#include "base/rank_call.h"
#include "ps.h"
#include "transport/transport.h"

enum { OP_ALL_REDUCE, OP_REDUCE_SCATTER, OP_ALL_GATHER, OP_BROADCAST, OP_BARRIER, OP_CONNECT, OP_SPLIT, OP_SEND,
       OP_RECV, OP_COLUMN, OP_ROW, OP_COLUMN_GRAD, OP_CHUNK_GATHER, OP_CHUNK_REDUCE, OP_CHUNK_ALL_REDUCE, OP_COUNT };

/* The kinds of memory for the bytes of a call. All ranks of a call use the same kind. */
typedef enum place { ON_HOST, ON_DEVICE, PLACES } place;

/* The description of a call, in 48 bytes. Ranks exchange and compare their headers before they send any other bytes. */
typedef struct header {
    /* seq: number of earlier calls of this group. For send and recv, it is the number of earlier calls between the
     * two ranks. */
    uint64_t seq;
    int32_t op, dtype;
    int64_t nbytes;
    /* root: depends on the call. For a broadcast it is the root, for OP_CHUNK_* the stripe, for all_reduce one of
     * PS_REDUCE_*, and for OP_COLUMN, OP_ROW and OP_COLUMN_GRAD the number of pieces.
     * failed: 0, or the PS_E* error if this rank's preparation failed */
    int32_t root, failed;
    /* check: for OP_CHUNK_*, a hash that must be equal on all ranks; otherwise 0 */
    uint64_t check;
    int32_t place;
    /* small: 1 if the bytes of the call follow (see group_small)
     * planned: 1 if the call is the next call of the plan (see plan.c) */
    int16_t small, planned;
} header;
_Static_assert(sizeof(header) == 48, "a message on the wire has no holes");

/* The number of small bytes that are sent with a header. It is the same for every call, because the ranks have not
 * compared their calls yet. */
enum { GROUP_SMALL_NBYTES = 4096 };

typedef struct ps_jobs ps_jobs;

/* The calls that a step is expected to make. */
typedef struct group_plan {
    ps_rank_calls now, next;               /* plan of the present step, plan of the next step */
    int32_t at;                            /* index in `now` of the next call */
    int64_t kept;                          /* number of calls so far that all ranks made as planned */
} group_plan;

/* The means by which bytes of one kind of memory are sent to other ranks. */
typedef struct transport {
    /* comm: NULL if not connected. Device memory may use the communicator of host memory. */
    ps_comm *comm;
    /* staging: memory for addends of other ranks. It is allocated at its first use. */
    char *staging;
    int64_t stage_nbytes;
} transport;

/* A call in progress, for the event record and the statistics. */
typedef struct group_call {
    int op;
    /* began_ns: time at which the call began; 0 if neither the record nor the statistics count the call */
    int64_t began_ns;
    int64_t nbytes;                        /* size of the whole tensor in bytes */
} group_call;

struct ps_group {
    ps_comm *comm;                         /* communicator for host memory and headers */
    transport at[PLACES];
    /* device: device whose memory is sent by at[ON_DEVICE], or -1 */
    int32_t device;
    const char *carrier;                   /* name of the library that sends device memory, or NULL */
    /* by_host: devices are never connected
     * by_device: it is an error if devices cannot be connected */
    bool by_host, by_device;
    int32_t refs;                          /* one for the creator of the group, one for each engine that uses it */
    ps_ctx *ctx;
    int32_t number;                        /* index in ctx->ranks.groups, or -1 if it had no room */
    /* seq: number of calls so far
     * pair_seq: [size] number of sends and receives so far with each rank */
    uint64_t seq, *pair_seq;
    int64_t bytes_sent, bytes_in_pieces;
    header *heard;                         /* [size] the last header of each rank */
    ps_comm_part *send, *recv, *parts;     /* [size] */
    char **addends;                        /* [size] */
    /* said: [size] For each rank, said_nbytes bytes that contain its header and then its small bytes. */
    char *said;
    int64_t said_nbytes;
    bool has_small;                        /* there are so few ranks that calls may use small bytes */
    group_plan plan;
    ps_jobs *jobs;                         /* NULL if there are no jobs yet */
    group_call recorded;                   /* the present collective of the caller */
};

/* -- comm.c */
/* Makes a group over `comm`. The group owns `comm`, which is closed even if this function fails. Only
 * collectives/context.c calls this function and the next two functions. */
int group_make(ps_comm *comm, ps_group **out);
void group_stop(ps_group *g);              /* ends all calls in progress */
/* Closes the connections and frees the group. Must be called after group_stop. */
void group_free(ps_group *g);
/* Returns the world rank of rank `r` of the group. */
static inline int group_world(const ps_group *g, int r) { return ps_comm_world(g->comm, r); }
const char *group_op_name(int op);
/* Writes the name of a call to `text` and returns `text`. An example is "all_reduce" or "all_reduce of tp". */
enum { GROUP_CALL_NBYTES = 64 };
const char *group_call_name(const ps_group *g, int op, char text[GROUP_CALL_NBYTES]);
/* Exchanges headers with all ranks. If a rank has failed or its header differs, every rank returns the same first
 * error. On success, the caller moves the bytes of the call, if there are any, and then calls group_done. It calls
 * group_done even if the move has failed. */
int group_agree(ps_group *g, header *mine);
void group_done(ps_group *g);              /* notifies the watch that this rank has finished its call */
/* Returns rc. If rc is negative, records that the script gets the error of this thread. */
int group_told(ps_group *g, int rc);
/* Does the same as group_agree, between two ranks. One rank must send as many bytes as the other rank receives. */
int group_agree_pair(ps_group *g, header *mine, int peer);
/* Returns true if the bytes of a call can be sent in the same exchange as the headers. Before group_agree, the caller
 * writes the bytes of this rank to group_small(g, its rank). Afterwards it finds the bytes of each rank r in
 * group_small(g, r). */
bool group_is_small(const ps_group *g, place at, int64_t nbytes);
/* Returns true if `op` (OP_*) is a call that uses small bytes, and group_is_small is true for its bytes. */
bool group_goes_small(const ps_group *g, int op, place at, int64_t nbytes);
static inline header *group_said(const ps_group *g, int r)
{
    return (header *)(void *)(g->said + (int64_t)r * g->said_nbytes);
}
static inline char *group_small(const ps_group *g, int r) { return (char *)(group_said(g, r) + 1); }
/* Reduces the small bytes of all ranks to a sum, maximum or minimum, in rank order. */
void group_sum_small(ps_group *g, int reduce, int dtype, int64_t nbytes, char *out);
void group_clear_parts(ps_group *g);       /* clears g->send and g->recv */
/* Sends the bytes of g->send and receives those of g->recv. Before group_exchange, group_reduce and group_gather, a
 * group_agree or group_agree_pair must have succeeded. On a device, only later operations of the group wait for
 * these bytes. To make kernels of the device wait as well, a call must end with group_hand_over and group_catch_up. */
int group_exchange(ps_group *g, place at);
/* group_move_begin and group_move_end do the same as group_exchange in two calls, on a free lane. */
int group_move_begin(ps_group *g, place at, int lane);
int group_move_end(ps_group *g, place at, int lane);
int group_settle(ps_group *g, place at);   /* waits until all exchanges and sums have ended */
/* These functions call hand_over and catch_up of ps_comm_table after a call with the number `op` (OP_*). They do
 * nothing for host memory, because its bytes have already arrived. */
int group_hand_over(ps_group *g, place at, int op, uint64_t call);
int group_catch_up(ps_group *g, place at, int point);
/* Sums n elements of g->addends [size], in rank order. `to` may be one of the addends. */
int group_add_up(ps_group *g, place at, int reduce, int dtype, int64_t n, char *to);
/* Allocates the memory for addends. *piece_nbytes receives the number of bytes of a shard that are reduced at once.
 * part_nbytes: size in bytes of the largest shard
 * reduce: one of PS_REDUCE_* */
int group_prepare_sum(ps_group *g, place at, int reduce, int dtype, int64_t part_nbytes, int64_t *piece_nbytes);
/* Reduces shards to a sum, maximum or minimum (reduce), in rank order. The reduced shard of this rank is written to
 * `out`, or to this rank's part if `out` is NULL.
 * parts: [size] this rank's addend to the shard of each rank, with the same sizes on all ranks
 * piece_nbytes: the result of group_prepare_sum */
int group_reduce(ps_group *g, place at, int reduce, int dtype, const ps_comm_part *parts, int64_t piece_nbytes,
                 char *out);
/* Sends the shard of this rank to all other ranks, and receives their shards into parts[r]. */
int group_gather(ps_group *g, place at, const ps_comm_part *parts);
/* Copies bytes within this rank. The two areas may overlap. */
int group_copy(ps_group *g, place at, void *to, const void *from, int64_t nbytes);
/* Makes later exchanges wait for all work that is now queued on the device. Called by the thread that runs kernels. */
int group_after_now(ps_group *g, place at);
/* Counts the bytes that this rank would send. Used for simulated ranks. A reduction sends the addends of this rank to
 * the shards of other ranks. A gather sends the shard of this rank to all other ranks. */
void group_count_parts(ps_group *g, const ps_comm_part *parts, bool reduces, bool gathers);
/* Splits `nbytes` bytes into shards of `part` bytes. The last shards may be shorter or empty. */
void group_split(const ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part *parts);

/* -- count.c: any thread may call these functions. */
int64_t group_call_begin(void);            /* returns the time, or 0 if nothing counts the call */
void group_call_end(const ps_group *g, const group_call *call);
/* Returns true if calls of this kind are timed. A timed call must wait for its bytes. */
bool group_call_is_timed(int op);

/* -- plan.c */
/* Prepares the plan of the step that begins, from all `calls` that belong to this group. The plan is empty if `calls`
 * is NULL, or if there is no memory. */
void group_plan_prepare(ps_group *g, const ps_rank_calls *calls);
/* Returns a hash of the prepared plan, or 0 if the plan is empty. */
uint64_t group_plan_hash(const ps_group *g);

/* -- job.c: collectives on chunks, which run one after the other in the order of their start
 *
 * Devices cannot deadlock, for the following reason. Each device has one queue for the calls of all groups, in the
 * order in which the script makes them. A call on a device begins when all earlier jobs on the device have begun. A
 * job has begun when its ranks have agreed and its bytes are being sent. The call does not wait for these bytes. All
 * ranks of a group make its calls in the same order, which group_agree checks. On each rank, one program determines
 * the order of the calls of all groups (only the group of ZeRO has jobs). Therefore all calls of all ranks have one
 * common order, which agrees with the order on each device. The first unfinished call in this order waits only for
 * its own bytes, even if a device performs only one exchange at a time. For the same reason, the host never waits for
 * agreements without end. */
typedef struct ps_job ps_job;
/* Starts a job with the number `op` (OP_CHUNK_*). Reductions leave the sums in place.
 * parts: as for group_reduce. Their memory must stay valid until the job ends.
 * failed: 0, or the last error of this thread. The other ranks then get this error instead of waiting. */
int group_job_start(ps_group *g, int op, place at, int dtype, int stripe, uint64_t check, const ps_comm_part *parts,
                    int failed, ps_job **out);
/* Waits for a job, frees it, and returns its result. Called by the thread that runs kernels. On a device, waits only
 * until the bytes are being sent, and makes later kernels wait for their arrival. A caller that raises the error in
 * the script must also call group_told. */
int group_job_wait(ps_group *g, ps_job *job);
/* These functions wait until all jobs have run, or on a device until their bytes are being sent. The results are kept
 * for group_job_wait. group_drain_device waits only for jobs on a device. */
void group_drain(ps_group *g);
void group_drain_device(ps_group *g);
#endif
