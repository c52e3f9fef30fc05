/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the collectives of a group, on bytes and on tensors. This layer uses contexts and tensors. The
 * layer below it, comm, does not use them. Scripts call the functions of ps.h, which are implemented in collective.c,
 * connect.c and sub.c. Higher layers call the functions that follow. */
#ifndef PS_COLLECTIVES_H
#define PS_COLLECTIVES_H
#include "comm/group.h"

/* -- context.c */
/* Calls group_make, and adds the group to the context. */
int group_new(ps_ctx *ctx, ps_comm *comm, ps_group **out);
void group_retain(ps_group *g);            /* adds a reference; ps_group_close removes it */
/* Appends a call to the list of calls that the current dry run records. The arguments are fields of the call's header.
 * Returns PS_ENOMEM if there is no memory. */
int group_note(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);
/* Handles a call with the number `op` (OP_*) whose tensors have no bytes. In a dry run, records the call. If the other
 * ranks are simulated, counts the bytes that the call would send. nbytes and root have the same meaning as for
 * group_count. Returns PS_ENOMEM if there is no memory. */
int group_without_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);

/* -- collective.c */
/* Counts the bytes that a call with the number `op` (OP_*) would send, if the other ranks are simulated. nbytes is the
 * size of the whole tensor in bytes. For all_gather, nbytes is the size of this rank's shard. */
void group_count(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root);
/* Compares this rank's call with the calls of the other ranks. rc: result of this rank's preparation. If rc is an error
 * on one rank, all ranks return this error. */
int group_agree_bytes(ps_group *g, int op, place at, int dtype, int64_t nbytes, int root, int rc);
/* Ends section 3 of a call (see comm/comm.c), which sends the bytes. rc: result of that section. If rc is an error,
 * adds the name of the call and the rank to the front of the error's text. */
int group_moved(ps_group *g, int op, place at, int rc);
/* These functions are the collectives of ps.h, on `nbytes` bytes in memory of the kind `at`. Each function begins with
 * group_agree_bytes.
 *   all_reduce       sums in place
 *   all_reduce_by    does the same, or computes the maximum or minimum instead (`reduce`, one of PS_REDUCE_*)
 *   reduce_scatter   sums the `in` of all ranks, and writes shard `rank` of the sum to `out`
 *   all_gather       writes the `in` of all ranks to `out`, in rank order */
int group_all_reduce(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int rc);
int group_all_reduce_by(ps_group *g, place at, int reduce, int dtype, char *bytes, int64_t nbytes, int rc);
int group_reduce_scatter(ps_group *g, place at, int dtype, char *in, int64_t nbytes, char *out, int rc);
int group_all_gather(ps_group *g, place at, int dtype, const char *in, int64_t nbytes, char *out, int rc);
int group_broadcast(ps_group *g, place at, int dtype, char *bytes, int64_t nbytes, int root, int rc);
/* Does the same as ps_group_all_reduce. rc: result of this rank's preparation. */
int group_all_reduce_tensor(ps_group *g, ps_tensor *t, int reduce, int rc);

/* -- connect.c */
/* Sets *out to the kind of memory of `device` (ON_HOST or ON_DEVICE), and connects the device if necessary. All ranks
 * must make this call. */
int group_place(ps_group *g, ps_ctx *ctx, int device, place *out);
#endif
