/* SPDX-License-Identifier: BSD-3-Clause
 * Groups of ranks, as the layers above use them. comm.c compares the ranks' calls, and moves and sums bytes. job.c runs
 * collectives concurrently with the computation (for zero/shard.c), plan.c has the calls that a dry run predicted, and
 * count.c records calls. inner.h declares the functions that only these files call. No file of this folder uses a
 * tensor or accesses a context; collectives/collectives.h has the collectives that do. One thread at a time uses a
 * group: the group's own thread while there are jobs, else the caller's thread. */
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

/* Describes a call, in 48 bytes. Ranks exchange and compare their headers before they send the call's bytes. */
typedef struct header {
    uint64_t seq;                          /* number of earlier calls of this group, or for send and recv, of these
                                            * two ranks */
    int32_t op, dtype;
    int64_t nbytes;
    int32_t root, failed;                  /* root: the stripe for OP_CHUNK_*, PS_REDUCE_* for all_reduce, and the
                                            * number of pieces for OP_COLUMN, OP_ROW and OP_COLUMN_GRAD. failed:
                                            * PS_E* if this rank's preparation failed, else 0. */
    uint64_t check;                        /* for OP_CHUNK_*, a hash that must be equal on all ranks; else 0 */
    int32_t place;
    int16_t small, planned;                /* small: 1 if the call's bytes follow its header (group_small). planned:
                                            * 1 if the call is the plan's next call (plan.c). */
} header;
_Static_assert(sizeof(header) == 48, "a message on the wire has no holes");

/* Number of small bytes that a rank sends with a header. The number is the same for every call, so both ends know it
 * before they have compared their calls. */
enum { GROUP_SMALL_NBYTES = 4096 };

typedef struct ps_jobs ps_jobs;

/* Calls that a step is expected to make. */
typedef struct group_plan {
    ps_rank_calls now, next;               /* now: plan of the present step. next: plan of the step that begins next */
    int32_t at;                            /* index in `now` of the next call */
    int64_t kept;                          /* number of calls so far that all ranks made as planned */
} group_plan;

/* How bytes of one kind of memory are sent to other ranks. */
typedef struct transport {
    ps_comm *comm;                         /* NULL if not connected; a device may use the host's communicator */
    char *staging;                         /* memory of the same kind for addends of other ranks, allocated when it
                                            * is first used */
    int64_t stage_nbytes;
} transport;

/* A call of the group that is under way, as the event record and the call statistics need it. */
typedef struct group_call {
    int op;
    int64_t began_ns;                      /* 0 if neither the record nor the statistics include the call */
    int64_t nbytes;                        /* size of the whole tensor */
} group_call;

struct ps_group {
    ps_comm *comm;                         /* communicator for host memory and headers */
    transport at[PLACES];
    int32_t device;                        /* device whose memory is sent by at[ON_DEVICE], or -1 */
    const char *carrier;                   /* name of the library that sends device memory, or NULL */
    bool by_host, by_device;               /* by_host: never connect devices. by_device: fail if devices cannot be
                                            * connected. */
    int32_t refs;                          /* one reference for the group's maker, and one for each engine that uses
                                            * the group */
    ps_ctx *ctx;
    int32_t number;                        /* index in ctx->ranks.groups, or -1 if there was no room */
    uint64_t seq, *pair_seq;               /* seq: number of calls so far. pair_seq: [size] number of sends and
                                            * receives with each rank. */
    int64_t bytes_sent, bytes_in_pieces;
    header *heard;                         /* [size] last headers received from the ranks */
    ps_comm_part *send, *recv, *parts;     /* [size] */
    char **addends;                        /* [size] */
    char *said;                            /* [size] entries of said_nbytes bytes: a rank's header, followed by its
                                            * small bytes */
    int64_t said_nbytes;
    bool has_small;                        /* calls may use small bytes, because the group has few ranks */
    group_plan plan;
    ps_jobs *jobs;                         /* or NULL */
    group_call recorded;                   /* the caller's present collective */
};

/* -- comm.c */
/* Makes a group over `comm`. The group owns `comm`, which is closed even if this call fails. Only
 * collectives/context.c calls this function and the next two. */
int group_make(ps_comm *comm, ps_group **out);
void group_stop(ps_group *g);              /* ends all calls under way */
void group_free(ps_group *g);              /* after group_stop: closes the connections and frees the group */
/* Returns the world rank of the group's rank `r`. */
static inline int group_world(const ps_group *g, int r) { return ps_comm_world(g->comm, r); }
/* group_exchange, group_reduce and group_gather may be called only after group_agree (or group_agree_pair) has
 * succeeded. */
const char *group_op_name(int op);
/* Writes the name of a call to `text`, such as "all_reduce" or "all_reduce of tp", and returns `text`. */
enum { GROUP_CALL_NBYTES = 64 };
const char *group_call_name(const ps_group *g, int op, char text[GROUP_CALL_NBYTES]);
/* Exchanges headers with all ranks. If there is a failure or a difference, every rank returns the same first one. If
 * the call succeeds and has bytes to move, the caller moves them, and calls group_done afterwards, even if the move
 * failed. */
int group_agree(ps_group *g, header *mine);
void group_done(ps_group *g);              /* notifies the watch that this rank has finished its call */
/* Returns rc. If rc is negative, records that the script gets this thread's error, which a call of the group raised. */
int group_told(ps_group *g, int rc);
/* Compares the headers of two ranks, like group_agree. One rank must send as many bytes as the other receives. */
int group_agree_pair(ps_group *g, header *mine, int peer);
/* Returns true if a call can send its nbytes with the headers, so that it needs only one exchange. The caller writes
 * this rank's bytes to group_small(g, its rank) before group_agree, and then finds the bytes of all ranks in
 * group_small. */
bool group_is_small(const ps_group *g, place at, int64_t nbytes);
bool group_goes_small(const ps_group *g, int op, place at, int64_t nbytes);    /* group_is_small for a call of OP_* */
static inline header *group_said(const ps_group *g, int r)
{
    return (header *)(void *)(g->said + (int64_t)r * g->said_nbytes);
}
static inline char *group_small(const ps_group *g, int r) { return (char *)(group_said(g, r) + 1); }
/* Reduces the ranks' small bytes in rank order: computes their sum, maximum or minimum. */
void group_sum_small(ps_group *g, int reduce, int dtype, int64_t nbytes, char *out);
void group_clear_parts(ps_group *g);       /* clears g->send and g->recv */
/* Moves the bytes of g->send and g->recv. On a device, only later operations of the group wait for these bytes. A
 * call that moved bytes therefore ends with group_hand_over and group_catch_up, which also make the device's kernels
 * wait for the bytes. */
int group_exchange(ps_group *g, place at);
int group_move_begin(ps_group *g, place at, int lane);       /* group_exchange in two calls, on a free lane */
int group_move_end(ps_group *g, place at, int lane);
int group_settle(ps_group *g, place at);   /* waits until all exchanges and sums have ended */
/* Call hand_over and catch_up of ps_comm_table after a call of OP_*. Do nothing for host memory, because there the
 * bytes have arrived when the exchange ends. */
int group_hand_over(ps_group *g, place at, int op, uint64_t call);
int group_catch_up(ps_group *g, place at, int point);
/* Sums n elements of the ranks' addends, g->addends [size], in rank order. `to` may be one of the addends. */
int group_add_up(ps_group *g, place at, int reduce, int dtype, int64_t n, char *to);
/* Allocates the memory for addends. part_nbytes: bytes of the largest shard. reduce: PS_REDUCE_*. *piece_nbytes:
 * bytes of a shard that group_reduce will reduce at once. */
int group_prepare_sum(ps_group *g, place at, int reduce, int dtype, int64_t part_nbytes, int64_t *piece_nbytes);
/* Reduces shards. parts: [size], with the same sizes on all ranks; parts[r] is this rank's addend to rank r's shard.
 * Afterwards `out`, or this rank's shard itself if `out` is NULL, holds the sum of all ranks' addends to this rank's
 * shard, in rank order. Depending on `reduce`, it holds the maximum or minimum instead. piece_nbytes: from
 * group_prepare_sum. */
int group_reduce(ps_group *g, place at, int reduce, int dtype, const ps_comm_part *parts, int64_t piece_nbytes,
                 char *out);
/* Sends this rank's shard to all other ranks, and receives their shards into parts[r]. */
int group_gather(ps_group *g, place at, const ps_comm_part *parts);
int group_copy(ps_group *g, place at, void *to, const void *from, int64_t nbytes);   /* copies memory on this rank;
                                                                                      * the areas may overlap */
/* Makes later exchanges wait for all work that is now queued on the device. Called by the thread that runs kernels. */
int group_after_now(ps_group *g, place at);
/* For a group whose other ranks are simulated: counts bytes as sent. A reduction sends this rank's addends to the
 * other ranks' shards, and a gather sends this rank's shard to all other ranks. Counts either or both. */
void group_count_parts(ps_group *g, const ps_comm_part *parts, bool reduces, bool gathers);
/* Splits `nbytes` into shards of `part` bytes; the last shards may be short or empty. */
void group_split(const ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part *parts);

/* -- count.c: any thread may call these functions. */
int64_t group_call_begin(void);            /* returns the time, or 0 if neither the record nor the statistics include
                                            * the call */
void group_call_end(const ps_group *g, const group_call *call);
bool group_call_is_timed(int op);          /* returns true if such calls are timed for the statistics, and must
                                            * therefore wait for their bytes */

/* -- plan.c */
/* Prepares the plan of the step that begins. The plan consists of those `calls` (NULL: none) that belong to this
 * group. If there is no memory, the plan is empty. */
void group_plan_prepare(ps_group *g, const ps_rank_calls *calls);
uint64_t group_plan_hash(const ps_group *g);           /* hash of the prepared plan, 0 if the plan is empty */

/* -- job.c: collectives on chunks, one after the other in the order of their start
 *
 *
 * Each device has one queue for the calls of all groups. The calls are queued in the order in which the script, and
 * therefore the engine, makes them. A call on a device begins when all earlier jobs on the device have begun,
 * whatever their group: a job has begun when its ranks have agreed and its bytes are under way. The call does not
 * wait for these bytes. All ranks of a group make its calls in the same order, which group_agree checks. On each
 * rank, one program orders the calls of all groups (only ZeRO's group has jobs). So one order of all calls of all
 * ranks agrees with the order on each device, and the first unfinished call in this order waits only for its own
 * bytes. Devices therefore cannot deadlock, even if each performs one exchange at a time. For the same reason the
 * host's wait for agreements ends. */
typedef struct ps_job ps_job;
/* Starts a job. op: OP_CHUNK_*. parts: as for group_reduce; their memory must stay valid until the job ends. failed:
 * 0, or an error of this rank, whose message is this thread's last error. The other ranks get this error instead of
 * waiting. Reductions leave the sums in place. */
int group_job_start(ps_group *g, int op, place at, int dtype, int stripe, uint64_t check, const ps_comm_part *parts,
                    int failed, ps_job **out);
/* Returns the job's result and frees the job. Called by the thread that runs kernels. On a device, waits until the
 * job's bytes are under way, and makes later kernels wait for the bytes. If the caller raises the error in the
 * script, it must also call group_told. */
int group_job_wait(ps_group *g, ps_job *job);
/* Wait until all jobs have run or, on a device, until their bytes are under way. group_job_wait can still return
 * their results afterwards. group_drain_device waits only for the jobs on a device. */
void group_drain(ps_group *g);
void group_drain_device(ps_group *g);
#endif
