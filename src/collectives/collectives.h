/* SPDX-License-Identifier: BSD-3-Clause
 * Collectives of a group in a context, on bytes and on tensors. This layer works with contexts and tensors. The layer
 * comm below it works with neither. Scripts call the functions of ps.h (collective.c, connect.c, sub.c); higher layers
 * call the functions that are declared here. */
#ifndef PS_COLLECTIVES_H
#define PS_COLLECTIVES_H
#include "comm/group.h"

/* -- context.c */
int group_new(ps_ctx *ctx, ps_comm *comm, ps_group **out);    /* calls group_make, then adds the group to the context */
void group_retain(ps_group *g);            /* adds a reference, which another ps_group_close releases */
/* Appends a call, with the fields of its header, to the current dry run's list of calls. PS_ENOMEM. */
int group_note(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);
/* Performs a call of OP_* that moves no bytes. In a dry run of a step, records the call. Otherwise, if the other
 * ranks are simulated, counts the bytes that the call would send. nbytes, root: as for group_count. PS_ENOMEM. */
int group_without_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);

/* -- collective.c */
/* For a group whose other ranks are simulated: counts the bytes that a call of OP_* would send. For all_gather,
 * nbytes is the size of this rank's shard; for other calls, it is the size of the whole. */
void group_count(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);
/* Compares this rank's call of a collective on bytes with those of the other ranks. rc: result of this rank's
 * preparation. If it is an error, the other ranks get the error, and this function returns it. */
int group_agree_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root, int rc);
/* Ends the third section of a call, which moves bytes (comm/comm.c). If it failed, prefixes the error with the call
 * and the rank. */
int group_moved(ps_group *g, int op, place at, int rc);
/* Perform the collectives of ps.h on nbytes of one kind of memory. Each begins with group_agree_bytes. all_reduce
 * sums in place; _by computes the maximum or minimum instead (PS_REDUCE_*). reduce_scatter writes shard `rank` of
 * the sum of `in` to `out`. all_gather writes the `in` of all ranks to `out`, one after the other. */
int group_all_reduce(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int rc);
int group_all_reduce_by(ps_group *g, place at, int reduce, int dtype, char *bytes, int64_t nbytes, int rc);
int group_reduce_scatter(ps_group *g, place at, int dtype, char *in, int64_t nbytes, char *out, int rc);
int group_all_gather(ps_group *g, place at, int dtype, const char *in, int64_t nbytes, char *out, int rc);
int group_broadcast(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int root, int rc);
/* Like ps_group_all_reduce. rc: result of this rank's preparation. */
int group_all_reduce_tensor(ps_group *g, ps_tensor *t, int reduce, int rc);

/* -- connect.c */
/* Sets *out to the kind of memory of the device. Connects the device if it is not connected yet. All ranks must make
 * this call, because connecting needs all of them. */
int group_place(ps_group *g, ps_ctx *ctx, int device, place *out);
#endif
