/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the collectives of a group, on bytes and on tensors. This layer works with contexts and
 * tensors. The layer below it, comm, does not. Scripts call the functions of ps.h (collective.c, connect.c, sub.c).
 * Higher layers call the functions below. */
#ifndef PS_COLLECTIVES_H
#define PS_COLLECTIVES_H
#include "comm/group.h"

/* -- context.c */
/* Calls group_make, and adds the group to the context. */
int group_new(ps_ctx *ctx, ps_comm *comm, ps_group **out);
void group_retain(ps_group *g);            /* adds a reference, which needs another ps_group_close */
/* Appends a call to the list of the current dry run. The arguments are fields of the call's header. Returns PS_ENOMEM
 * if there is no memory. */
int group_note(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);
/* Performs a call with the number `op` (OP_*) that sends no bytes. In a dry run, records the call. If the other ranks
 * are simulated, counts the bytes that the call would send. nbytes and root have the same meaning as for group_count.
 * Returns PS_ENOMEM if there is no memory. */
int group_without_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);

/* -- collective.c */
/* Counts the bytes that a call with the number `op` (OP_*) would send. Used for simulated ranks. nbytes is the size
 * of the whole tensor. For all_gather, it is the size of this rank's shard. */
void group_count(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);
/* Compares this rank's call with the calls of the other ranks. rc: result of this rank's preparation. If it is an
 * error on one rank, all ranks return that error. */
int group_agree_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root, int rc);
/* Ends section 3 of a call (see comm/comm.c). If that section failed, adds the call and the rank to the front of the
 * error. */
int group_moved(ps_group *g, int op, place at, int rc);
/* The collectives of ps.h, on nbytes bytes of one kind of memory. Each of them begins with group_agree_bytes.
 *   all_reduce       sums in place; all_reduce_by can compute the maximum or minimum instead (PS_REDUCE_*)
 *   reduce_scatter   writes shard `rank` of the sum of `in` to `out`
 *   all_gather       writes the `in` of all ranks to `out`, one after the other */
int group_all_reduce(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int rc);
int group_all_reduce_by(ps_group *g, place at, int reduce, int dtype, char *bytes, int64_t nbytes, int rc);
int group_reduce_scatter(ps_group *g, place at, int dtype, char *in, int64_t nbytes, char *out, int rc);
int group_all_gather(ps_group *g, place at, int dtype, const char *in, int64_t nbytes, char *out, int rc);
int group_broadcast(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int root, int rc);
/* Does the same as ps_group_all_reduce. rc: result of this rank's preparation. */
int group_all_reduce_tensor(ps_group *g, ps_tensor *t, int reduce, int rc);

/* -- connect.c */
/* Sets *out to the kind of memory of the device, and connects the device if necessary. All ranks must make this
 * call. */
int group_place(ps_group *g, ps_ctx *ctx, int device, place *out);
#endif
