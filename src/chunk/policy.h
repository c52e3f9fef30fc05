/* SPDX-License-Identifier: BSD-3-Clause
 * Eviction policies. Each is a row of the table in policy.c. Plans (plan_level.c) and moves without a plan (transfer.c)
 * rank chunks by the same row. */
#ifndef PS_POLICY_H
#define PS_POLICY_H
#include "ps.h"

/* A candidate for eviction: times of its next use, its last use and its arrival on the tier. A plan measures times
 * in bytes used. Without a plan, `next` is the number of moments until the next use, and the other two times count
 * uses. */
typedef struct ps_victim { double next, last, taken; } ps_victim;

/* Copies that the eviction of a chunk costs. CLEAN: only the fetch that follows. DIRTY: also a copy down now. TWIN:
 * the tier above has the same contents, so also another copy down later. */
enum { WEIGH_CLEAN, WEIGH_DIRTY, WEIGH_TWIN, WEIGH_COUNT };
typedef struct ps_tuning { double weight[WEIGH_COUNT]; } ps_tuning;

typedef struct ps_policy {
    const char *name;
    double (*rank)(const ps_victim *v);    /* the chunk with the highest rank is evicted first */
    const ps_tuning *tunings;              /* the planner tries each tuning and uses the cheapest plan */
    int n_tunings;
} ps_policy;

const ps_policy *ps_policy_row(int policy);       /* NULL if there is no such policy */
#endif
