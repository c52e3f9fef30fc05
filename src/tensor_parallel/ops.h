/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the functions for ops that the ranks of a group compute together. These ops have the flag RANKS
 * in ops.def. */
#ifndef PS_TENSOR_PARALLEL_OPS_H
#define PS_TENSOR_PARALLEL_OPS_H
#include "collectives/collectives.h"

struct ps_call;

/* -- op.c: the function `of_ranks` of a context (tensor.h) */
int group_op(ps_ctx *ctx, int device, struct ps_call *call);

/* -- linear.c: the ops column_linear, row_linear and column_linear_grad */
/* carried: true if the connections of the host can send the memory of this device. A dry call only allocates memory. */
int group_linear(ps_group *g, place at, bool carried, struct ps_call *call);

/* -- loss.c: the op parallel_lm_loss. A dry call only allocates memory. */
int group_lm_loss(ps_group *g, place at, struct ps_call *call);
#endif
