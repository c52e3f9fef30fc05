/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares groups of ranks, for the layers above. The files of this folder do not use tensors or contexts.
 * collectives/collectives.h declares the collectives that use tensors and contexts. Only one thread at a time uses a
 * group. While there are jobs, it is the group's own thread. Otherwise it is the caller's thread. The files are:
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

/* The kinds of memory in which the bytes of a call can be. All ranks of a call use the same kind. */
typedef enum place { ON_HOST, ON_DEVICE, PLACES } place;

/* The header of a call describes the call, in 48 bytes. Ranks exchange and compare their headers before they send any
 * other bytes. */
typedef struct header {
    /* seq: number of earlier calls of this group. For send and recv, the number of earlier sends and receives between
     * the two ranks. */
    uint64_t seq;
    int32_t op, dtype;
    int64_t nbytes;
    /* root: depends on the call:
     *   broadcast                          the root
     *   OP_CHUNK_*                         the stripe
     *   all_reduce                         one of PS_REDUCE_*
     *   OP_COLUMN, OP_ROW, OP_COLUMN_GRAD  the number of pieces
     * failed: 0, or the PS_E* error if this rank's preparation failed */
    int32_t root, failed;
    /* check: for OP_CHUNK_*, a hash that must be equal on all ranks; otherwise 0 */
    uint64_t check;
    int32_t place;
    /* small: 1 if the call has small bytes, which are sent with the headers (see group_small)
     * planned: 1 if the call is the next call of the plan (see plan.c) */
    int16_t small, planned;
} header;
_Static_assert(sizeof(header) == 48, "a message on the wire has no holes");

/* The number of small bytes that a rank sends with a header. This number is the same for every call, because the ranks
 * have not compared their calls yet. */
enum { GROUP_SMALL_NBYTES = 4096 };

typedef struct ps_jobs ps_jobs;

/* The calls that a step is expected to make in this group. */
typedef struct group_plan {
    ps_rank_calls now, next;               /* plan of the present step, plan of the next step */
    int32_t at;                            /* index in `now` of the next call */
    /* kept: number of calls so far that were made as planned by all ranks */
    int64_t kept;
} group_plan;

/* The way in which bytes of one kind of memory are sent to other ranks. */
typedef struct transport {
    /* comm: NULL if this kind of memory is not connected. Device memory may use the communicator of host memory. */
    ps_comm *comm;
    /* staging: memory for the addends that other ranks send, allocated when it is first used */
    char *staging;
    int64_t stage_nbytes;
} transport;

/* A call in progress, for the event record and the statistics. */
typedef struct group_call {
    int op;
    /* began_ns: time at which the call began. 0 if neither the record nor the statistics count the call. */
    int64_t began_ns;
    int64_t nbytes;                        /* size of the whole tensor in bytes */
} group_call;

struct ps_group {
    ps_comm *comm;                         /* communicator for host memory and headers */
    transport at[PLACES];
    /* device: the device whose memory at[ON_DEVICE] sends, or -1 */
    int32_t device;
    const char *carrier;                   /* name of the library that sends device memory, or NULL */
    /* by_host: only host memory is sent, and devices are never connected
     * by_device: it is an error if devices cannot be connected */
    bool by_host, by_device;
    /* refs: number of references; one for the creator of the group, and one for each engine that uses the group */
    int32_t refs;
    ps_ctx *ctx;
    /* number: index of this group in ctx->ranks.groups, or -1 if the list had no room */
    int32_t number;
    /* seq: number of calls so far
     * pair_seq: [size] number of sends and receives so far between this rank and each other rank */
    uint64_t seq, *pair_seq;
    int64_t bytes_sent, bytes_in_pieces;
    header *heard;                         /* [size] the last header of each rank */
    ps_comm_part *send, *recv, *parts;     /* [size] */
    char **addends;                        /* [size] */
    /* said: [size] For each rank, said_nbytes bytes that contain the rank's header and then its small bytes. */
    char *said;
    int64_t said_nbytes;
    /* has_small: true if the group has so few ranks that calls may use small bytes */
    bool has_small;
    group_plan plan;
    ps_jobs *jobs;                         /* NULL until the first job starts */
    group_call recorded;                   /* the collective that the caller has begun */
};

/* -- comm.c */
/* Makes a group that uses `comm`. The group owns `comm`, which is closed even if this function fails. Only
 * collectives/context.c calls group_make, group_stop and group_free. */
int group_make(ps_comm *comm, ps_group **out);
void group_stop(ps_group *g);              /* ends all jobs and device calls in progress */
/* Closes the connections and frees the group. Must be called after group_stop. */
void group_free(ps_group *g);
/* Returns the world rank of rank `r` of the group. */
static inline int group_world(const ps_group *g, int r) { return ps_comm_world(g->comm, r); }
const char *group_op_name(int op);
/* Writes the name of a call to `text` and returns `text`. An example is "all_reduce" or "all_reduce of tp". */
enum { GROUP_CALL_NBYTES = 64 };
const char *group_call_name(const ps_group *g, int op, char text[GROUP_CALL_NBYTES]);
/* Exchanges headers with all ranks. If a rank has failed or its header differs, every rank returns the same first
 * error. If group_agree succeeds, the caller moves the bytes of the call (if there are any). It then calls group_done,
 * even if the move has failed. */
int group_agree(ps_group *g, header *mine);
void group_done(ps_group *g);              /* notifies the watch that this rank has finished its call */
/* Returns rc. If rc is negative, records that the script gets the error of this thread. */
int group_told(ps_group *g, int rc);
/* Does the same as group_agree, but only with rank `peer`. One of the two ranks must send as many bytes as the other
 * rank receives. */
int group_agree_pair(ps_group *g, header *mine, int peer);
/* Returns true if the bytes of a call can be sent in the same exchange as the headers. Before the caller calls
 * group_agree, it writes its own bytes to group_small(g, its rank). After group_agree, group_small(g, r) contains the
 * bytes of rank r. */
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
/* Sends the bytes of g->send, and receives bytes into g->recv. Before group_exchange, group_reduce or group_gather is
 * called, a group_agree or group_agree_pair must have succeeded. On a device, only later operations of the group wait
 * for the received bytes. If kernels of the device must wait as well, the call must end with group_hand_over and
 * group_catch_up. */
int group_exchange(ps_group *g, place at);
/* group_move_begin and group_move_end together do the same as group_exchange, on the lane `lane`. No other exchange may
 * be in progress on this lane. */
int group_move_begin(ps_group *g, place at, int lane);
int group_move_end(ps_group *g, place at, int lane);
int group_settle(ps_group *g, place at);   /* waits for the end of all exchanges and sums that were begun */
/* These functions call hand_over and catch_up of ps_comm_table. For group_hand_over, op and call are the number (OP_*)
 * and the index of the call that is handed over. For host memory these functions do nothing, because the bytes have
 * already arrived. */
int group_hand_over(ps_group *g, place at, int op, uint64_t call);
int group_catch_up(ps_group *g, place at, int point);
/* Reduces the n elements of each addend in g->addends [size] to `to`, in rank order. `to` may be one of the addends. */
int group_add_up(ps_group *g, place at, int reduce, int dtype, int64_t n, char *to);
/* Allocates the memory for addends. *piece_nbytes receives the size in bytes of a piece. Shards are reduced in pieces.
 * part_nbytes: size in bytes of the largest shard
 * reduce: one of PS_REDUCE_* */
int group_prepare_sum(ps_group *g, place at, int reduce, int dtype, int64_t part_nbytes, int64_t *piece_nbytes);
/* Reduces each shard to a sum, maximum or minimum over all ranks, in rank order. The reduced shard of this rank is
 * written to `out`, or to parts[this rank] if `out` is NULL.
 * reduce: one of PS_REDUCE_*
 * parts: [size] parts[r] is this rank's addend to the shard of rank r; its size must be equal on all ranks
 * piece_nbytes: the result of group_prepare_sum */
int group_reduce(ps_group *g, place at, int reduce, int dtype, const ps_comm_part *parts, int64_t piece_nbytes,
                 char *out);
/* Sends parts[this rank] to all other ranks, and receives the shard of each other rank r into parts[r]. */
int group_gather(ps_group *g, place at, const ps_comm_part *parts);
/* Copies bytes within this rank. The source and the destination may overlap. */
int group_copy(ps_group *g, place at, void *to, const void *from, int64_t nbytes);
/* Makes later exchanges wait for all work that is now in the queue of the device. Called by the thread that runs
 * kernels. */
int group_after_now(ps_group *g, place at);
/* Counts the bytes that this rank would send if the other ranks were not simulated. If `reduces` is set, this rank
 * sends its addends to the shards of the other ranks. If `gathers` is set, it sends its shard to all other ranks. */
void group_count_parts(ps_group *g, const ps_comm_part *parts, bool reduces, bool gathers);
/* Splits `nbytes` bytes into shards of `part` bytes. The last shards may be shorter or empty. */
void group_split(const ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part *parts);

/* -- count.c: any thread may call these functions. */
int64_t group_call_begin(void);            /* returns the time, or 0 if neither the record nor the statistics count */
void group_call_end(const ps_group *g, const group_call *call);
/* Returns true if the call `op` (OP_*) is timed. A timed call must wait until its bytes have arrived. */
bool group_call_is_timed(int op);

/* -- plan.c */
/* Prepares the plan of the step that begins now. The plan consists of all `calls` that belong to this group. It is
 * empty if `calls` is NULL, or if there is no memory. */
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
/* Starts a job with the number `op` (OP_CHUNK_*). A reduction leaves the reduced shard in its place in `parts`.
 * parts: has the same meaning as for group_reduce; the memory of the parts must stay valid until the job ends
 * failed: 0, or the last error of this thread; the other ranks then get this error instead of waiting */
int group_job_start(ps_group *g, int op, place at, int dtype, int stripe, uint64_t check, const ps_comm_part *parts,
                    int failed, ps_job **out);
/* Waits for a job, frees it, and returns its result. Called by the thread that runs kernels. On a device, waits only
 * until the bytes of the job are being sent, and makes later kernels wait until these bytes have arrived. A caller that
 * raises the error in the script must also call group_told. */
int group_job_wait(ps_group *g, ps_job *job);
/* These functions wait until all jobs have run. Jobs on a device have run when their bytes are being sent. The results
 * of the jobs are kept for group_job_wait. group_drain_device waits only for jobs on a device. */
void group_drain(ps_group *g);
void group_drain_device(ps_group *g);
#endif
