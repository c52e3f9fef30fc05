/* SPDX-License-Identifier: BSD-3-Clause
 * Eviction policies decide which chunk leaves a full tier. Each policy is a row of the table in policy.c. Plans
 * (plan_level.c) and moves without a plan (transfer.c) use the same table. */
#ifndef PS_POLICY_H
#define PS_POLICY_H
#include "ps.h"

/* A candidate for eviction, with the times of its next use, its last use and its arrival. In a plan, these times are
 * positions as in ps_stream.when, which count used bytes. Without a plan, `next` is the number of moments from now,
 * and `last` and `taken` count uses. */
typedef struct ps_victim { double next, last, taken; } ps_victim;

/* The copies that the eviction of a chunk costs.
 * CLEAN: only the next fetch.
 * DIRTY: the next fetch, and a copy down now.
 * TWIN: the next fetch, and a copy down later, because the tier above has the same contents. */
enum { WEIGH_CLEAN, WEIGH_DIRTY, WEIGH_TWIN, WEIGH_COUNT };
typedef struct ps_tuning { double weight[WEIGH_COUNT]; } ps_tuning;

typedef struct ps_policy {
    const char *name;
    double (*rank)(const ps_victim *v);    /* the highest rank is evicted first */
    /* The planner tries each of these tunings and uses the plan that moves the fewest bytes. */
    const ps_tuning *tunings;
    int n_tunings;
} ps_policy;

const ps_policy *ps_policy_row(int policy);       /* NULL if there is no such policy */
#endif
