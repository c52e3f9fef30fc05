/* SPDX-License-Identifier: BSD-3-Clause
 * Who has to leave a full tier. A policy is one function that ranks a chunk (the highest rank leaves first) and one
 * row of the table; plan_level.c asks for the rank when a chunk stops being in use and never again until its next use,
 * so a rank must not depend on the time that passes. Policies that weigh costs also have tunings: what a byte of
 * distance counts for, by the kind of copy the victim would cost. */
#include "chunk/plan_level.h"
#include "base/error.h"
#include <string.h>

static double rank_belady(const ps_victim *v) { return v->next; }
static double rank_lru(const ps_victim *v) { return -v->last; }
static double rank_fifo(const ps_victim *v) { return -v->taken; }

static const ps_tuning even = { { 1, 1, 1 } };
/* The first is belady's, so that `plan` is never worse. A dirty chunk costs two copies, but often one of them later
 * anyway; which counts for more depends on the trace. The last: dirty chunks leave when no clean ones are left. */
static const ps_tuning tunings[] = { { { 1, 1, 1 } }, { { 1, 4, 0.5 } }, { { 1, 1e6, 0.5 } } };

static const ps_policy policies[PS_POLICY_COUNT] = {
    [PS_POLICY_BELADY] = { "belady", rank_belady, &even, 1 },
    [PS_POLICY_LRU] = { "lru", rank_lru, &even, 1 },
    [PS_POLICY_FIFO] = { "fifo", rank_fifo, &even, 1 },
    [PS_POLICY_PLAN] = { "plan", rank_belady, tunings, sizeof tunings / sizeof *tunings },
};

const ps_policy *ps_policy_row(int policy)
{
    return policy >= 0 && policy < PS_POLICY_COUNT ? &policies[policy] : NULL;
}

const char *ps_policy_name(int policy)
{
    const ps_policy *row = ps_policy_row(policy);
    return row ? row->name : NULL;
}

int ps_policy_find(const char *name, int *out)
{
    for (int i = 0; name && i < PS_POLICY_COUNT; i++)
        if (!strcmp(policies[i].name, name)) {
            *out = i;
            return 0;
        }
    return ps_fail(PS_EINVAL, "no eviction policy '%s'; there are %s, %s, %s, %s", name ? name : "", policies[0].name,
                   policies[1].name, policies[2].name, policies[3].name);
}
