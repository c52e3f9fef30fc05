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

/* Kinds of memory that a call's bytes can be in; the same on all ranks. */
typedef enum place { ON_HOST, ON_DEVICE, PLACES } place;

/* Description of a call, 48 bytes, which ranks send to each other and compare before bytes are sent. */
typedef struct header {
    uint64_t seq;                          /* number of earlier calls of this group; for send and recv, of the two
                                            * ranks */
    int32_t op, dtype;
    int64_t nbytes;
    int32_t root, failed;                  /* root: for OP_CHUNK_* the stripe, for all_reduce PS_REDUCE_*, for
                                            * OP_COLUMN, OP_ROW and OP_COLUMN_GRAD the number of pieces. failed: 0,
                                            * or PS_E* if this rank's preparation failed. */
    uint64_t check;                        /* hash that must be equal on all ranks for OP_CHUNK_*, else 0 */
    int32_t place;
    int16_t small, planned;                /* small: 1 if the call's bytes follow its header (group_small). planned:
                                            * 1 if the call is the next call of the plan (plan.c). */
} header;
_Static_assert(sizeof(header) == 48, "a message on the wire has no holes");

/* Size of the small bytes that a rank sends together with its header. Every call's message has this size, so both
 * ends know the size before they have compared their calls. */
enum { GROUP_SMALL_NBYTES = 4096 };

typedef struct ps_jobs ps_jobs;

/* Calls that a step is expected to make. */
typedef struct group_plan {
    ps_rank_calls now, next;               /* next: plan of the step that will begin */
    int32_t at;                            /* index in `now` of the next call */
    int64_t kept;                          /* total number of calls that all ranks have made as planned */
} group_plan;

/* How bytes of one kind of memory are sent to other ranks. */
typedef struct transport {
    ps_comm *comm;                         /* NULL if not connected; a device may use the host's communicator */
    char *staging;                         /* memory of the same kind for the addends of other ranks, allocated at
                                            * its first use */
    int64_t stage_nbytes;
} transport;

/* A call between ranks that is under way, for the event record and for call statistics. */
typedef struct group_call {
    int op;
    int64_t began_ns;                      /* 0 if neither the record nor the statistics need the call */
    int64_t nbytes;                        /* size of the whole tensor */
} group_call;

struct ps_group {
    ps_comm *comm;                         /* communicator for host memory and headers */
    transport at[PLACES];
    int32_t device;                        /* device whose memory at[ON_DEVICE] sends, or -1 */
    const char *carrier;                   /* name of the library that sends device memory, or NULL */
    bool by_host, by_device;               /* by_host: never connect devices. by_device: connect them or fail. */
    int32_t refs;                          /* references: one for the group's maker and one for each engine that uses
                                            * it */
    ps_ctx *ctx;
    int32_t number;                        /* index in ctx->ranks.groups, or -1 if that was full */
    uint64_t seq, *pair_seq;               /* seq: number of calls so far. pair_seq: [size] number of sends and
                                            * receives with each rank. */
    int64_t bytes_sent, bytes_in_pieces;
    header *heard;                         /* [size] headers received from the ranks */
    ps_comm_part *send, *recv, *parts;     /* [size] */
    char **addends;                        /* [size] */
    char *said;                            /* [size] entries of said_nbytes bytes: the header of each rank and then
                                            * its small bytes */
    int64_t said_nbytes;
    bool has_small;                        /* the group has few enough ranks for small bytes */
    group_plan plan;
    ps_jobs *jobs;                         /* or NULL */
    group_call recorded;                   /* collective that the caller's thread is performing */
};

/* -- comm.c */
/* Makes a group over `comm`, which it will close; it is closed even if this call fails. collectives/context.c calls
 * this function and the next two. */
int group_make(ps_comm *comm, ps_group **out);
void group_stop(ps_group *g);              /* ends the calls that are under way */
void group_free(ps_group *g);              /* after group_stop: closes the connections and frees the group */
/* Returns the world rank of the group's rank `r`. */
static inline int group_world(const ps_group *g, int r) { return ps_comm_world(g->comm, r); }
/* group_exchange, group_reduce and group_gather are called after group_agree (or group_agree_pair). If that call
 * fails, no bytes are moved. */
const char *group_op_name(int op);
/* Writes "all_reduce" or "all_reduce of tp" to `text`, and returns `text`. */
enum { GROUP_CALL_NBYTES = 64 };
const char *group_call_name(const ps_group *g, int op, char text[GROUP_CALL_NBYTES]);
/* Sends this rank's header to all ranks and receives theirs. Every rank finds the same first failure or difference.
 * If the call succeeds and there are bytes to move, the caller calls group_done after they have been moved or the
 * move has failed. */
int group_agree(ps_group *g, header *mine);
void group_done(ps_group *g);              /* notifies the watch that this rank has finished its call */
/* Returns rc. If rc is negative, records that the script gets this thread's error, which came from a call of the
 * group. */
int group_told(ps_group *g, int rc);
/* Compares the headers of two ranks like group_agree: one sends, the other receives the same number of bytes. */
int group_agree_pair(ps_group *g, header *mine, int peer);
/* Returns true if each rank sends its nbytes together with its header, so that the call needs only one exchange. The
 * caller writes this rank's bytes to group_small(g, its rank) before group_agree. After it, the bytes of all ranks
 * are in group_small. */
bool group_is_small(const ps_group *g, place at, int64_t nbytes);
bool group_goes_small(const ps_group *g, int op, place at, int64_t nbytes);    /* Like group_is_small, for a call of
                                                                                * OP_*. */
static inline header *group_said(const ps_group *g, int r)
{
    return (header *)(void *)(g->said + (int64_t)r * g->said_nbytes);
}
static inline char *group_small(const ps_group *g, int r) { return (char *)(group_said(g, r) + 1); }
/* Computes the sum (or maximum or minimum) of the ranks' small bytes, in the order of ranks. */
void group_sum_small(ps_group *g, int reduce, int dtype, int64_t nbytes, char *out);
void group_clear_parts(ps_group *g);       /* clears g->send and g->recv */
/* Moves the bytes of g->send and g->recv. On a device, only operations that the group begins later are ordered after
 * these bytes. A call that moved bytes therefore ends with group_hand_over and group_catch_up, which also order the
 * device's kernels after the bytes. */
int group_exchange(ps_group *g, place at);
int group_move_begin(ps_group *g, place at, int lane);       /* the same in two calls, on a lane that has no exchange */
int group_move_end(ps_group *g, place at, int lane);
int group_settle(ps_group *g, place at);   /* waits until all exchanges and sums have ended */
/* Calls hand_over and catch_up of ps_comm_table for a call of OP_*. In host memory they do nothing, because a call's
 * bytes have arrived when its exchange ends. */
int group_hand_over(ps_group *g, place at, int op, uint64_t call);
int group_catch_up(ps_group *g, place at, int point);
/* Sums n elements of the ranks' addends, g->addends [size], in rank order. `to` can be one of the addends. */
int group_add_up(ps_group *g, place at, int reduce, int dtype, int64_t n, char *to);
/* Allocates the memory for addends. part_nbytes: size of the largest shard. reduce: PS_REDUCE_*. *piece_nbytes:
 * bytes of a shard that group_reduce sums at once. */
int group_prepare_sum(ps_group *g, place at, int reduce, int dtype, int64_t part_nbytes, int64_t *piece_nbytes);
/* Reduces shards. parts: [size], with the same sizes on all ranks; parts[r] is this rank's version of rank r's
 * shard. Afterwards `out` (NULL: the shard itself) holds the sum (or, by `reduce`, the maximum or minimum) of all
 * ranks' versions of this rank's shard, in rank order. piece_nbytes: from group_prepare_sum. */
int group_reduce(ps_group *g, place at, int reduce, int dtype, const ps_comm_part *parts, int64_t piece_nbytes,
                 char *out);
/* Sends this rank's shard to all other ranks, and receives their shards into parts[r]. */
int group_gather(ps_group *g, place at, const ps_comm_part *parts);
int group_copy(ps_group *g, place at, void *to, const void *from, int64_t nbytes);   /* copies memory on this rank;
                                                                                      * the areas may overlap */
/* Makes exchanges that begin after this call wait for all work that is now queued on the device. Called by the
 * thread that runs kernels. */
int group_after_now(ps_group *g, place at);
/* For a group whose other ranks are simulated: counts the bytes that a reduction sends (this rank's versions of the
 * others' shards), that a gather sends (its own shard to all others), or both. */
void group_count_parts(ps_group *g, const ps_comm_part *parts, bool reduces, bool gathers);
/* Splits `nbytes` into shards of `part` bytes; the last shards may be short or empty. */
void group_split(const ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part *parts);

/* -- count.c: any thread may call these functions. */
int64_t group_call_begin(void);            /* returns the time, or 0 if neither the record nor the statistics need
                                            * the call */
void group_call_end(const ps_group *g, const group_call *call);
bool group_call_is_timed(int op);          /* returns true if statistics of such calls are kept, so that the calls
                                            * must wait for their bytes */

/* -- plan.c */
/* Makes a plan for the step that begins, of those `calls` (NULL: none) that belong to this group. If there is no
 * memory for them, the plan is empty. */
void group_plan_prepare(ps_group *g, const ps_rank_calls *calls);
uint64_t group_plan_hash(const ps_group *g);           /* a hash of the prepared plan, 0 if it has no calls */

/* -- job.c: collectives on chunks, one after the other in the order of their start
 *
 *
 * Each device has one queue. The calls of all groups are queued on a device in the order in which the script, and
 * therefore the engine, makes them. A call on a device begins after all earlier jobs on the device, of any group,
 * have begun (their ranks have agreed and their bytes are under way); it does not wait for their bytes. All ranks of
 * a group make its calls in the same order, which group_agree checks. On each rank, the order of calls over all
 * groups is that of one program (only ZeRO's group has jobs). So there is an order of all calls of all ranks that
 * agrees with the order on each device, and the first unfinished call in this order waits only for its own bytes.
 * Devices therefore cannot deadlock, even if each performs one exchange at a time. By the same argument the host's
 * wait for agreements ends. */
typedef struct ps_job ps_job;
/* Starts a job. op: OP_CHUNK_*. parts: as for group_reduce, in memory that stays valid until the job ends. failed:
 * an error of this rank, whose message is this thread's last error; it is sent to the other ranks, so that they do
 * not wait. Reductions leave the sums in place. */
int group_job_start(ps_group *g, int op, place at, int dtype, int stripe, uint64_t check, const ps_comm_part *parts,
                    int failed, ps_job **out);
/* Returns the job's result and frees the job. Called by the thread that runs kernels. On a device it waits until the
 * job's bytes are under way, and orders kernels after them. A caller that raises an error in the script also calls
 * group_told. */
int group_job_wait(ps_group *g, ps_job *job);
/* Waits until all jobs have run or, on a device, until their bytes are under way. group_job_wait still returns their
 * results. _device waits only for the jobs on a device. */
void group_drain(ps_group *g);
void group_drain_device(ps_group *g);
#endif
