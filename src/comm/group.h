/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of groups: comm.c (agreeing, moving and adding bytes), collective.c (collectives on tensors),
 * job.c (collectives that run beside the computation, for zero/shard.c). One thread at a time uses a group: its own
 * thread, which carries jobs out, or, once no job is left, the calling one. */
#ifndef PS_COMM_GROUP_H
#define PS_COMM_GROUP_H
#include <stdbool.h>
#include "comm/comm.h"
#include "ps.h"

enum { OP_ALL_REDUCE, OP_REDUCE_SCATTER, OP_ALL_GATHER, OP_BROADCAST, OP_BARRIER, OP_CONNECT, OP_SPLIT, OP_SEND,
       OP_RECV, OP_CHUNK_GATHER, OP_CHUNK_REDUCE, OP_CHUNK_ALL_REDUCE, OP_COUNT };

/* The place of a call's bytes, on all ranks. */
typedef enum place { ON_HOST, ON_DEVICE, PLACES } place;

/* Ranks compare it before bytes move: 48 bytes on the wire. */
typedef struct header {
    uint64_t seq;                          /* calls of this group before (send, recv: between these two ranks) */
    int32_t op, dtype;
    int64_t nbytes;
    int32_t root, failed;                  /* root: of chunks, their stripe; of all_reduce, PS_REDUCE_*;
                                              failed: PS_E* of the first part, or 0 */
    uint64_t check;                        /* of chunks: a number that must be the same, too; else 0 */
    int32_t place, reserved;
} header;
_Static_assert(sizeof(header) == 48, "a message on the wire has no holes");

typedef struct ps_jobs ps_jobs;

/* The way of a place's bytes to other ranks. */
typedef struct transport {
    ps_comm *comm;                         /* NULL: not connected; a device's may be the host's */
    char *stage;                           /* there: room for others' addends; made when first needed */
    int64_t stage_nbytes;
} transport;

struct ps_group {
    ps_comm *comm;                         /* of host memory, and of headers */
    transport at[PLACES];
    int32_t device;                        /* whose memory at[ON_DEVICE] carries, or -1 */
    const char *carrier;                   /* of that memory: the library's name, or NULL */
    bool by_host, by_device;               /* by_host: never connect devices; by_device: connect them or fail */
    int32_t refs;                          /* engines that use it, and whoever made it */
    ps_ctx *ctx;
    int32_t number;                        /* in ctx->groups, or -1: it had no room */
    uint64_t seq, *pair_seq;               /* pair_seq: [size] */
    int64_t bytes_sent;
    header *heard;                         /* [size] */
    ps_comm_part *send, *recv, *parts;     /* [size] */
    char **addends;                        /* [size] */
    ps_jobs *jobs;                         /* or NULL */
};

/* -- comm.c */
int group_new(ps_ctx *ctx, ps_comm *comm, ps_group **out);    /* `comm` is the group's, or closed if that fails */
void group_retain(ps_group *g);            /* until one more ps_group_close */
/* The number of the group's rank `r` among all ranks. */
static inline int group_world(const ps_group *g, int r) { return ps_comm_world(g->comm, r); }
/* Moving bytes. Each of these begins with a call of group_agree, and sends nothing when that fails. */
const char *group_op_name(int op);
/* "all_reduce", "all_reduce of tp"; `text` is returned. */
enum { GROUP_CALL_NBYTES = 64 };
const char *group_call_name(const ps_group *g, int op, char text[GROUP_CALL_NBYTES]);
/* Sends a header to all ranks and hears theirs. Every rank finds the same first failure or difference. When it succeeds
 * and there are bytes to move, group_done follows once they have moved, or have failed to. */
int group_agree(ps_group *g, header *mine);
void group_done(ps_group *g);              /* for the watch: this rank is through with its call */
/* The same comparison between two ranks: one sends, the other receives as much. */
int group_agree_pair(ps_group *g, header *mine, int peer);
void group_clear_parts(ps_group *g);       /* of g->send and g->recv */
int group_exchange(ps_group *g, place at); /* moves the bytes of g->send and g->recv, and waits */
/* Memory for sums; `part_nbytes`: of the largest part. reduce: PS_REDUCE_*. */
int group_prepare_sum(ps_group *g, place at, int reduce, int dtype, int64_t part_nbytes, int64_t *piece_nbytes);
/* parts[r], the same sizes on all ranks: rank r's part as this rank has it. Afterwards `out` (NULL: the part itself)
 * holds the sum (or, by `reduce`, the greatest or least) of all ranks' versions of this rank's part, in the order of
 * ranks. piece_nbytes: from group_prepare_sum. */
int group_reduce(ps_group *g, place at, int reduce, int dtype, const ps_comm_part *parts, int64_t piece_nbytes,
                 char *out);
/* This rank's part goes to all others, and theirs come to their places. */
int group_gather(ps_group *g, place at, const ps_comm_part *parts);
int group_copy(ps_group *g, place at, void *to, const void *from, int64_t nbytes);   /* of this rank; may overlap */
/* Called by the thread that runs kernels. A mark (>= 0, or an error) is a point in a device's work. Bytes that are
 * moved after group_after come behind all work in front of the mark; after group_after_now, behind all work up to
 * now. */
int group_mark(ps_group *g, place at);
int group_after(ps_group *g, place at, int mark);
int group_after_now(ps_group *g, place at);
/* Cuts `nbytes` into equal parts of `part`; the last ones may be short or empty. */
void group_cut(const ps_group *g, char *base, int64_t nbytes, int64_t part, ps_comm_part *parts);

/* -- op.c: ops find a group by its number, from its making to its end */
void group_enroll(ps_ctx *ctx, ps_group *g);
void group_leave(ps_group *g);

/* -- collective.c */
/* The comparison of a collective on bytes. rc: the result of this rank's preparation. The others are told of a failure,
 * which stays this rank's error. */
int group_agree_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root, int rc);
/* The collectives of ps.h on nbytes in a place. Each begins with such a comparison. all_reduce sums in place (or, _by,
 * what PS_REDUCE_* says).
 * reduce_scatter puts part `rank` of the sum of `in` to `out`. all_gather puts the ranks' `in`, one after the other, to
 * `out`. */
int group_all_reduce(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int rc);
int group_all_reduce_by(ps_group *g, place at, int reduce, int dtype, char *bytes, int64_t nbytes, int rc);
int group_reduce_scatter(ps_group *g, place at, int dtype, char *in, int64_t nbytes, char *out, int rc);
int group_all_gather(ps_group *g, place at, int dtype, const char *in, int64_t nbytes, char *out, int rc);
int group_broadcast(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int root, int rc);
/* The place of a device's memory, connected if need be: a call of all ranks then. */
int group_place(ps_group *g, ps_ctx *ctx, int device, place *out);

/* -- job.c: collectives on chunks, one after the other in the order of their start */
typedef struct ps_job ps_job;
/* op: OP_CHUNK_*. parts: as above, in memory of the place that stays until the job's end. failed: an error of this
 * rank, whose message is this thread's last one; the others are told of it instead of waiting. Reductions leave the
 * sums in place. */
int group_job_start(ps_group *g, int op, place at, int dtype, int stripe, uint64_t check, const ps_comm_part *parts,
                    int failed, ps_job **out);
int group_job_wait(ps_group *g, ps_job *job);   /* its result; the job is gone afterwards */
void group_drain(ps_group *g);             /* until no job is left; their results stay with their owners */
void group_jobs_close(ps_group *g);
#endif
