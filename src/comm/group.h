/* SPDX-License-Identifier: BSD-3-Clause
 * Groups of ranks, for the layers above. No file of this folder uses a tensor or a context; the collectives that do
 * are in collectives/collectives.h. One thread at a time uses a group: the group's own thread while there are jobs,
 * else the caller's. The files:
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

/* Kinds of memory for the bytes of a call. All ranks of a call use the same kind. */
typedef enum place { ON_HOST, ON_DEVICE, PLACES } place;

/* Describes a call, in 48 bytes. Ranks exchange and compare their headers before any other bytes. */
typedef struct header {
    uint64_t seq;                          /* number of earlier calls of this group (send, recv: of these two ranks) */
    int32_t op, dtype;
    int64_t nbytes;
    int32_t root, failed;                  /* root: stripe of OP_CHUNK_*, PS_REDUCE_* of all_reduce, number of pieces
                                            * of OP_COLUMN, OP_ROW, OP_COLUMN_GRAD. failed: 0, or PS_E* if this
                                            * rank's preparation failed */
    uint64_t check;                        /* OP_CHUNK_*: hash that must be equal on all ranks; else 0 */
    int32_t place;
    int16_t small, planned;                /* small: 1 if the call's bytes follow (group_small). planned: 1 if the
                                            * call is the plan's next one (plan.c) */
} header;
_Static_assert(sizeof(header) == 48, "a message on the wire has no holes");

/* Number of small bytes sent with a header. It is the same for every call, because ranks have not compared their
 * calls yet. */
enum { GROUP_SMALL_NBYTES = 4096 };

typedef struct ps_jobs ps_jobs;

/* The calls that a step is expected to make. */
typedef struct group_plan {
    ps_rank_calls now, next;               /* plans of the present step, of the next one */
    int32_t at;                            /* index in `now` of the next call */
    int64_t kept;                          /* calls so far that all ranks made as planned */
} group_plan;

/* How bytes of one kind of memory are sent to other ranks. */
typedef struct transport {
    ps_comm *comm;                         /* NULL if not connected; a device may use the host's */
    char *staging;                         /* memory for addends of other ranks, allocated at its first use */
    int64_t stage_nbytes;
} transport;

/* A call under way, for the event record and the statistics. */
typedef struct group_call {
    int op;
    int64_t began_ns;                      /* 0 if neither counts the call */
    int64_t nbytes;                        /* size of the whole tensor */
} group_call;

struct ps_group {
    ps_comm *comm;                         /* communicator for host memory and headers */
    transport at[PLACES];
    int32_t device;                        /* device whose memory is sent by at[ON_DEVICE], or -1 */
    const char *carrier;                   /* name of the library that sends device memory, or NULL */
    bool by_host, by_device;               /* never connect devices; fail if devices cannot be connected */
    int32_t refs;                          /* one for the group's maker, one for each engine that uses it */
    ps_ctx *ctx;
    int32_t number;                        /* index in ctx->ranks.groups, or -1 if there was no room */
    uint64_t seq, *pair_seq;               /* calls so far; [size] sends and receives so far with each rank */
    int64_t bytes_sent, bytes_in_pieces;
    header *heard;                         /* [size] the ranks' last headers */
    ps_comm_part *send, *recv, *parts;     /* [size] */
    char **addends;                        /* [size] */
    char *said;                            /* [size] said_nbytes for each rank: its header, then its small bytes */
    int64_t said_nbytes;
    bool has_small;                        /* few ranks: calls may use small bytes */
    group_plan plan;
    ps_jobs *jobs;                         /* or NULL */
    group_call recorded;                   /* the caller's present collective */
};

/* -- comm.c */
/* Makes a group over `comm`, which it owns and closes even if it fails. Only collectives/context.c calls this
 * function and the next two. */
int group_make(ps_comm *comm, ps_group **out);
void group_stop(ps_group *g);              /* ends all calls under way */
void group_free(ps_group *g);              /* after group_stop: closes the connections and frees the group */
/* Returns the world rank of the group's rank `r`. */
static inline int group_world(const ps_group *g, int r) { return ps_comm_world(g->comm, r); }
/* group_exchange, group_reduce and group_gather need a successful group_agree or group_agree_pair before them. */
const char *group_op_name(int op);
/* Writes the name of a call to `text` and returns it, such as "all_reduce" or "all_reduce of tp". */
enum { GROUP_CALL_NBYTES = 64 };
const char *group_call_name(const ps_group *g, int op, char text[GROUP_CALL_NBYTES]);
/* Exchanges headers with all ranks. If one rank failed or differs, every rank returns the same first error. On
 * success the caller moves the call's bytes, if any, and then calls group_done, even if the move failed. */
int group_agree(ps_group *g, header *mine);
void group_done(ps_group *g);              /* tells the watch that this rank has finished its call */
/* Returns rc. If it is negative, records that the script gets this thread's error. */
int group_told(ps_group *g, int rc);
/* Like group_agree, between two ranks. One must send as many bytes as the other receives. */
int group_agree_pair(ps_group *g, header *mine, int peer);
/* Returns true if the bytes of a call can be sent with the headers, in one exchange. The caller writes this rank's
 * bytes to group_small(g, its rank) before group_agree, and afterwards finds each rank's bytes in group_small. */
bool group_is_small(const ps_group *g, place at, int64_t nbytes);
bool group_goes_small(const ps_group *g, int op, place at, int64_t nbytes);    /* group_is_small for a call of OP_* */
static inline header *group_said(const ps_group *g, int r)
{
    return (header *)(void *)(g->said + (int64_t)r * g->said_nbytes);
}
static inline char *group_small(const ps_group *g, int r) { return (char *)(group_said(g, r) + 1); }
/* Reduces the ranks' small bytes in rank order, to a sum, maximum or minimum. */
void group_sum_small(ps_group *g, int reduce, int dtype, int64_t nbytes, char *out);
void group_clear_parts(ps_group *g);       /* clears g->send and g->recv */
/* Moves the bytes of g->send and g->recv. On a device, only later operations of the group wait for them. To make the
 * device's kernels wait, too, a call ends with group_hand_over and group_catch_up. */
int group_exchange(ps_group *g, place at);
int group_move_begin(ps_group *g, place at, int lane);       /* group_exchange in two calls, on a free lane */
int group_move_end(ps_group *g, place at, int lane);
int group_settle(ps_group *g, place at);   /* waits until all exchanges and sums have ended */
/* Call hand_over and catch_up of ps_comm_table after a call of OP_*. Do nothing for host memory, whose bytes have
 * already arrived. */
int group_hand_over(ps_group *g, place at, int op, uint64_t call);
int group_catch_up(ps_group *g, place at, int point);
/* Sums n elements of g->addends [size], in rank order. `to` may be one of them. */
int group_add_up(ps_group *g, place at, int reduce, int dtype, int64_t n, char *to);
/* Allocates the memory for addends. part_nbytes: bytes of the largest shard. reduce: PS_REDUCE_*. *piece_nbytes gets
 * the bytes of a shard that are reduced at once. */
int group_prepare_sum(ps_group *g, place at, int reduce, int dtype, int64_t part_nbytes, int64_t *piece_nbytes);
/* Reduces shards in rank order, to a sum, maximum or minimum (reduce). parts: [size] this rank's addend to each
 * rank's shard, with the same sizes on all ranks. `out`, or this rank's part if `out` is NULL, gets this rank's
 * reduced shard. piece_nbytes: from group_prepare_sum. */
int group_reduce(ps_group *g, place at, int reduce, int dtype, const ps_comm_part *parts, int64_t piece_nbytes,
                 char *out);
/* Sends this rank's shard to all other ranks, and receives their shards into parts[r]. */
int group_gather(ps_group *g, place at, const ps_comm_part *parts);
int group_copy(ps_group *g, place at, void *to, const void *from, int64_t nbytes);   /* on this rank; areas may
                                                                                      * overlap */
/* Makes later exchanges wait for all work that is queued on the device now. Called by the thread that runs kernels. */
int group_after_now(ps_group *g, place at);
/* For simulated ranks: counts the bytes that this rank would send. A reduction sends its addends to the other ranks'
 * shards, and a gather sends its shard to all other ranks. */
void group_count_parts(ps_group *g, const ps_comm_part *parts, bool reduces, bool gathers);
/* Splits `nbytes` into shards of `part` bytes; the last shards may be short or empty. */
void group_split(const ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part *parts);

/* -- count.c: any thread may call these functions. */
int64_t group_call_begin(void);            /* the time, or 0 if nothing counts the call */
void group_call_end(const ps_group *g, const group_call *call);
bool group_call_is_timed(int op);          /* true: the call must wait for its bytes, to be timed */

/* -- plan.c */
/* Prepares the plan of the step that begins, from those `calls` that belong to this group. The plan is empty if
 * `calls` is NULL, or if there is no memory. */
void group_plan_prepare(ps_group *g, const ps_rank_calls *calls);
uint64_t group_plan_hash(const ps_group *g);           /* hash of the prepared plan, 0 if the plan is empty */

/* -- job.c: collectives on chunks, one after the other in the order of their start
 *
 * Devices cannot deadlock. Each device has one queue for the calls of all groups, in the order in which the script
 * makes them. A call on a device begins when all earlier jobs on the device have begun: their ranks have agreed, and
 * their bytes are under way. The call does not wait for these bytes. All ranks of a group make its calls in the same
 * order, which group_agree checks, and on each rank one program orders the calls of all groups (only ZeRO's group has
 * jobs). So one order of all calls of all ranks agrees with the order on each device. The first unfinished call in this
 * order waits only for its own bytes, even if a device performs one exchange at a time. For the same reason the host's
 * wait for agreements ends. */
typedef struct ps_job ps_job;
/* Starts a job, OP_CHUNK_*. parts: as for group_reduce; their memory must stay valid until the job ends. failed: 0,
 * or this thread's last error, which the other ranks then get instead of waiting. Reductions leave the sums in
 * place. */
int group_job_start(ps_group *g, int op, place at, int dtype, int stripe, uint64_t check, const ps_comm_part *parts,
                    int failed, ps_job **out);
/* Waits for a job, frees it, and returns its result. Called by the thread that runs kernels. On a device, waits only
 * until the bytes are under way, and makes later kernels wait for them. A caller that raises the error in the script
 * must also call group_told. */
int group_job_wait(ps_group *g, ps_job *job);
/* Wait until all jobs have run, or on a device until their bytes are under way. Their results stay for
 * group_job_wait. group_drain_device waits only for jobs on a device. */
void group_drain(ps_group *g);
void group_drain_device(ps_group *g);
#endif
