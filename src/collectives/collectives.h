/* SPDX-License-Identifier: BSD-3-Clause
 * Collectives of a group in a context, on bytes and on tensors. This layer works with contexts and tensors. The layer
 * comm below it works with neither. Scripts call the functions of ps.h (collective.c, connect.c, sub.c); higher layers
 * call the functions that are declared here. */
#ifndef PS_COLLECTIVES_H
#define PS_COLLECTIVES_H
#include "comm/group.h"

/* -- context.c */
int group_new(ps_ctx *ctx, ps_comm *comm, ps_group **out);    /* group_make, which also adds the group to the context */
void group_retain(ps_group *g);            /* the group then needs one more ps_group_close */
/* Records a call of the dry run under way, with the fields of its header. PS_ENOMEM */
int group_note(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);
/* Handles a call of OP_* that moves no bytes. In a dry run of a step it is recorded. Otherwise, if the other ranks are
 * pretended, the bytes that it would send are counted. nbytes, root: as for group_count. PS_ENOMEM */
int group_without_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);

/* -- collective.c */
/* In a group whose other ranks are pretended: counts the bytes that a call of OP_* sends. nbytes: for all_gather the
 * size of this rank's part, for other calls the size of the whole. */
void group_count(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);
/* Compares a collective on bytes with the other ranks' calls. rc: the result of this rank's preparation. If it is a
 * failure, sends the failure to the other ranks and returns it. */
int group_agree_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root, int rc);
/* Ends the third part of a call, moving bytes (comm/comm.c). Prefixes the message of a failure with call and rank. */
int group_moved(ps_group *g, int op, place at, int rc);
/* The collectives of ps.h on nbytes in a place. Each begins with group_agree_bytes. all_reduce sums in place; _by
 * computes the greatest or the least value instead, by PS_REDUCE_*. reduce_scatter writes part `rank` of the sum of
 * `in` to `out`. all_gather writes the `in` of all ranks to `out`, one after the other. */
int group_all_reduce(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int rc);
int group_all_reduce_by(ps_group *g, place at, int reduce, int dtype, char *bytes, int64_t nbytes, int rc);
int group_reduce_scatter(ps_group *g, place at, int dtype, char *in, int64_t nbytes, char *out, int rc);
int group_all_gather(ps_group *g, place at, int dtype, const char *in, int64_t nbytes, char *out, int rc);
int group_broadcast(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int root, int rc);
/* Does the same as ps_group_all_reduce. rc: the result of this rank's preparation. */
int group_all_reduce_tensor(ps_group *g, ps_tensor *t, int reduce, int rc);

/* -- connect.c */
/* *out: the place of the device's memory. If the device is not connected, this call connects it, so all ranks must make
 * the call. */
int group_place(ps_group *g, ps_ctx *ctx, int device, place *out);
#endif
