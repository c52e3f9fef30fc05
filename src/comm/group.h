/* SPDX-License-Identifier: BSD-3-Clause
 * Groups of ranks, as the layers above use them. comm.c compares the ranks' calls, and moves and adds bytes. job.c
 * makes collectives beside the computation (for zero/shard.c), plan.c has the calls that a dry run foresaw, and count.c
 * records calls. inner.h declares the functions that only these files call. No file of this folder knows a tensor or
 * looks into a context; collectives/collectives.h has the collectives that do. One thread at a time uses a group: the
 * group's own thread while there are jobs, the caller's once no job is left. */
#ifndef PS_COMM_GROUP_H
#define PS_COMM_GROUP_H
#include <stdbool.h>
#include "base/rank_call.h"
#include "ps.h"
#include "transport/transport.h"

enum { OP_ALL_REDUCE, OP_REDUCE_SCATTER, OP_ALL_GATHER, OP_BROADCAST, OP_BARRIER, OP_CONNECT, OP_SPLIT, OP_SEND,
       OP_RECV, OP_COLUMN, OP_ROW, OP_COLUMN_GRAD, OP_CHUNK_GATHER, OP_CHUNK_REDUCE, OP_CHUNK_ALL_REDUCE, OP_COUNT };

/* The place of a call's bytes, on all ranks. */
typedef enum place { ON_HOST, ON_DEVICE, PLACES } place;

/* A call, as ranks compare it before bytes move: 48 bytes on the wire. */
typedef struct header {
    uint64_t seq;                          /* earlier calls of this group (send, recv: between these two ranks) */
    int32_t op, dtype;
    int64_t nbytes;
    int32_t root, failed;                  /* root: OP_CHUNK_*: the stripe; all_reduce: PS_REDUCE_*; OP_COLUMN,
                                              OP_ROW, OP_COLUMN_GRAD: the pieces;
                                              failed: PS_E* of this rank's preparation, or 0 */
    uint64_t check;                        /* OP_CHUNK_*: a number that must be the same on all ranks; else 0 */
    int32_t place;
    int16_t small, planned;                /* small: 1: the call's bytes come beside its header (group_small).
                                              planned: 1: it is the next call of the plan (plan.c) */
} header;
_Static_assert(sizeof(header) == 48, "a message on the wire has no holes");

/* Bytes of a rank that come beside its header, in a message of this size whatever the call: both ends know it before
 * they have compared their calls. */
enum { GROUP_SMALL_NBYTES = 4096 };

typedef struct ps_jobs ps_jobs;

/* The calls that a step is planned to make. */
typedef struct group_plan {
    ps_rank_calls now, next;               /* next: of the step that begins */
    int32_t at;                            /* place in `now` of the next call */
    int64_t kept;                          /* calls that all ranks made as planned, ever */
} group_plan;

/* How the bytes of a place get to other ranks. */
typedef struct transport {
    ps_comm *comm;                         /* NULL: not connected; that of a device may be the host's */
    char *stage;                           /* memory of the place for other ranks' addends; made when first needed */
    int64_t stage_nbytes;
} transport;

/* A call between ranks that is under way, for the record of events and for sums of calls. */
typedef struct group_call {
    int op;
    int64_t began_ns;                      /* 0: nobody wants to know */
    int64_t nbytes;                        /* of the whole tensor */
} group_call;

struct ps_group {
    ps_comm *comm;                         /* of host memory, and of headers */
    transport at[PLACES];
    int32_t device;                        /* the device whose memory at[ON_DEVICE] carries, or -1 */
    const char *carrier;                   /* the library that carries the device's memory, or NULL */
    bool by_host, by_device;               /* by_host: never connect devices; by_device: connect them or fail */
    int32_t refs;                          /* engines that use it, and whoever made it */
    ps_ctx *ctx;
    int32_t number;                        /* in ctx->groups, or -1: ctx->groups had no room */
    uint64_t seq, *pair_seq;               /* calls so far; pair_seq: [size], sends and receives with each rank */
    int64_t bytes_sent, bytes_in_pieces;
    header *heard;                         /* [size] */
    ps_comm_part *send, *recv, *parts;     /* [size] */
    char **addends;                        /* [size] */
    char *said;                            /* [size] of said_nbytes: each rank's header and small bytes, side by side */
    int64_t said_nbytes;
    bool has_small;                        /* there is room for small bytes: the ranks are not too many */
    group_plan plan;
    ps_jobs *jobs;                         /* or NULL */
    group_call recorded;                   /* the collective under way on the caller's thread */
};

/* -- comm.c */
/* Makes a group over `comm`, which the group closes. A failure closes `comm`, too. collectives/context.c calls this
 * function and the next two. */
int group_make(ps_comm *comm, ps_group **out);
void group_stop(ps_group *g);              /* ends the calls that are under way */
void group_free(ps_group *g);              /* after group_stop: closes the connections and frees the group */
/* The number of the group's rank `r` among all ranks. */
static inline int group_world(const ps_group *g, int r) { return ps_comm_world(g->comm, r); }
/* Callers of group_exchange, group_reduce and group_gather call group_agree (or group_agree_pair) first, and move
 * nothing when that fails. */
const char *group_op_name(int op);
/* "all_reduce", "all_reduce of tp"; `text` is returned. */
enum { GROUP_CALL_NBYTES = 64 };
const char *group_call_name(const ps_group *g, int op, char text[GROUP_CALL_NBYTES]);
/* Sends a header to all ranks and hears theirs. Every rank finds the same first failure or difference. When it succeeds
 * and there are bytes to move, group_done follows once they have moved, or have failed to. */
int group_agree(ps_group *g, header *mine);
void group_done(ps_group *g);              /* tells the watch that this rank has finished its call */
int group_told(ps_group *g, int rc);       /* rc; < 0: the script gets this thread's error, of a call of the group's */
/* The same comparison between two ranks: one sends, the other receives as much. */
int group_agree_pair(ps_group *g, header *mine, int peer);
/* Whether each rank's nbytes come beside the headers of a call, so that it takes one exchange. Before group_agree this
 * rank's are put to group_small(g, its rank); afterwards those of all ranks are there. */
bool group_is_small(const ps_group *g, place at, int64_t nbytes);
bool group_goes_small(const ps_group *g, int op, place at, int64_t nbytes);    /* the same of a call of OP_* */
static inline header *group_said(const ps_group *g, int r)
{
    return (header *)(void *)(g->said + (int64_t)r * g->said_nbytes);
}
static inline char *group_small(const ps_group *g, int r) { return (char *)(group_said(g, r) + 1); }
/* The sum (or greatest, or least) of the ranks' small bytes, in the order of ranks. */
void group_sum_small(ps_group *g, int reduce, int dtype, int64_t nbytes, char *out);
void group_clear_parts(ps_group *g);       /* of g->send and g->recv */
/* Moves the bytes of g->send and g->recv. On a device they are there for what the group begins next; a call that moved
 * bytes ends with group_hand_over and group_catch_up, and with them the device's kernels come after its bytes. */
int group_exchange(ps_group *g, place at);
int group_move_begin(ps_group *g, place at, int lane);       /* the same in two calls, on a lane that has none */
int group_move_end(ps_group *g, place at, int lane);
int group_settle(ps_group *g, place at);   /* waits until all that moves has moved, and all sums are taken */
/* ps_comm_table's, of a call of OP_*. In host memory bytes are there when a call has moved them. */
int group_hand_over(ps_group *g, place at, int op, uint64_t call);
int group_catch_up(ps_group *g, place at, int moment);
/* Adds up n elements of the ranks' addends, g->addends [size], in the order of ranks; `to` may be one of them. */
int group_add_up(ps_group *g, place at, int reduce, int dtype, int64_t n, char *to);
/* Makes the memory for addends. part_nbytes: of the largest part. reduce: PS_REDUCE_*. *piece_nbytes: bytes of a part
 * that are summed at once, for group_reduce. */
int group_prepare_sum(ps_group *g, place at, int reduce, int dtype, int64_t part_nbytes, int64_t *piece_nbytes);
/* parts: [size], the same sizes on all ranks; parts[r] is rank r's part as this rank has it. Afterwards `out` (NULL:
 * the part itself) holds the sum (or, by `reduce`, the greatest or least) of all ranks' versions of this rank's part,
 * added in the order of ranks. piece_nbytes: from group_prepare_sum. */
int group_reduce(ps_group *g, place at, int reduce, int dtype, const ps_comm_part *parts, int64_t piece_nbytes,
                 char *out);
/* This rank's part goes to all others, and theirs come to their places. */
int group_gather(ps_group *g, place at, const ps_comm_part *parts);
int group_copy(ps_group *g, place at, void *to, const void *from, int64_t nbytes);   /* on this rank; may overlap */
/* Bytes that move after this call wait for all work that the device has been given. Called by the thread that runs
 * kernels. */
int group_after_now(ps_group *g, place at);
/* In a group whose other ranks are not here: counts the bytes that a reduction of parts sends (this rank's versions of
 * the others' parts), or a gather of them (its own part to all others), or both. */
void group_count_parts(ps_group *g, const ps_comm_part *parts, bool reduces, bool gathers);
/* Cuts `nbytes` into equal parts of `part`; the last ones may be short or empty. */
void group_cut(const ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part *parts);

/* -- count.c. Any thread. */
int64_t group_call_begin(void);            /* now, or 0: neither a record nor sums want the call */
void group_call_end(const ps_group *g, const group_call *call);
bool group_call_is_timed(int op);          /* sums of such calls are kept, so they wait for their bytes */

/* -- plan.c */
/* Makes the calls of this group among `calls` (NULL: none) the plan of the step that begins. If there is no memory for
 * them, the plan is empty. */
void group_plan_prepare(ps_group *g, const ps_rank_calls *calls);
uint64_t group_plan_hash(const ps_group *g);           /* of the prepared plan; 0: no calls */

/* -- job.c: collectives on chunks, one after the other in the order of their start
 *
 * One queue a device. The calls of all groups are given to a device in the order in which the script, and so the
 * engine, comes to them: a call on a device begins once all jobs on it that any group was given earlier have been begun
 * (their ranks agreed, their bytes are under way), and it does not wait for their bytes. All ranks of a group come to
 * its calls in the same order, which the agreement of the call checks, and each rank's order over its groups is that of
 * one program (jobs are those of one group, ZeRO's). So some order of all calls of all ranks is in keeping with each
 * device's, and the first of them that has not ended waits for nothing but its own bytes: no circle of devices can wait
 * for each other, even if each carries out one exchange at a time. The wait for agreements, on the host, ends by the
 * same argument. */
typedef struct ps_job ps_job;
/* op: OP_CHUNK_*. parts: as for group_reduce, in memory of the place that stays until the job's end. failed: an error
 * of this rank, whose message is this thread's last one; the other ranks hear of it instead of waiting. Reductions
 * leave the sums in place. */
int group_job_start(ps_group *g, int op, place at, int dtype, int stripe, uint64_t check, const ps_comm_part *parts,
                    int failed, ps_job **out);
/* The job's result; the job is gone afterwards. Called by the thread that runs kernels: on a device it waits until the
 * job's bytes are under way, and kernels come after them. Who gives an error to the script says so (group_told). */
int group_job_wait(ps_group *g, ps_job *job);
/* Waits until all jobs have run; on a device, until their bytes are under way. group_job_wait still gives their
 * results. _device: those on a device alone. */
void group_drain(ps_group *g);
void group_drain_device(ps_group *g);
#endif
