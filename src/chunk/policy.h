/* SPDX-License-Identifier: BSD-3-Clause
 * Eviction policies decide which chunk leaves a full tier. Each is a row of the table in policy.c. Plans
 * (plan_level.c) and moves without a plan (transfer.c) use the same rows. */
#ifndef PS_POLICY_H
#define PS_POLICY_H
#include "ps.h"

/* A candidate for eviction, with the times of its next use, its last use and its arrival. A plan measures time in
 * bytes used. Without a plan, `next` is in moments from now, and the other two count uses. */
typedef struct ps_victim { double next, last, taken; } ps_victim;

/* The copies that an eviction costs. CLEAN: only the next fetch. DIRTY: also a copy down now. TWIN: also a copy
 * down, but later, because the tier above has the same contents. */
enum { WEIGH_CLEAN, WEIGH_DIRTY, WEIGH_TWIN, WEIGH_COUNT };
typedef struct ps_tuning { double weight[WEIGH_COUNT]; } ps_tuning;

typedef struct ps_policy {
    const char *name;
    double (*rank)(const ps_victim *v);    /* the highest rank is evicted first */
    const ps_tuning *tunings;              /* the planner tries each tuning and uses the cheapest plan */
    int n_tunings;
} ps_policy;

const ps_policy *ps_policy_row(int policy);       /* NULL if there is none */
#endif
