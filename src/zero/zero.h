/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the internals of ZeRO. No other folder includes it. ZeRO has these files:
 *   zero.c     the table that the engine calls, and parts for scripts
 *   shard.c    memory of parts
 *   reduce.c   sums of gradients */
#ifndef PS_ZERO_H
#define PS_ZERO_H
#include "engine/zero_table.h"
#include "zero/shard.h"

/* The parts of a unit. param_part contains the values. grad_part contains the gradients, or is -1 if gradients are
 * stored in place of the values. */
typedef struct unit_parts { int32_t stripe, param_part, grad_part; } unit_parts;

/* The units of one stripe. Their gradients are reduced together. A stripe has at most one unit per rank. */
typedef struct stripe_units {
    int32_t n, n_final, vstage;
    int32_t part;                 /* during a reduction, a part of the stripe; otherwise -1 */
} stripe_units;

typedef struct zero {
    ps_zero base;
    ps_engine *e;
    ps_shard *shard;
    unit_parts *units;
    stripe_units *stripes;        /* [n_units], of which n_stripes are in use */
    int32_t *reducing;            /* [n_units] stripes that are being reduced, oldest first */
    int32_t n_units, n_stripes, n_reducing;
} zero;

/* -- reduce.c: functions of ps_zero_table */
int reduce_before_slot(ps_zero *z, int32_t unit);
int reduce_unit_final(ps_zero *z, int32_t unit);
int reduce_all_final(ps_zero *z);
void reduce_unit_not_final(ps_zero *z, int32_t unit);
int reduce_sum_owned(ps_zero *z, double *values, int32_t n);
void reduce_forget(ps_zero *z);
#endif
