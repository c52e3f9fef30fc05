/* SPDX-License-Identifier: BSD-3-Clause
 * Eviction policies decide which chunk leaves a full tier. A policy is a function that ranks chunks, and a row of the
 * table below. The row has the policy's name for the configuration, for error messages and for docs/config.md. A rank
 * must not depend on the present time, because plan_level.c computes the rank of a chunk only once, when the chunk is
 * no longer in use.
 *
 * A plan divides the time until the next use of a candidate by a weight. The weight depends on the copies that the
 * eviction of the candidate costs. A tuning is one set of these weights. A policy that considers costs has several
 * tunings.
 *
 * The rule to evict the chunk that is needed last is from L. A. Belady, A study of replacement algorithms for a
 * virtual-storage computer, IBM Systems Journal 5 (2), 1966. */
#include "chunk/policy.h"
#include "base/error.h"
#include <stdio.h>
#include <string.h>

static double rank_belady(const ps_victim *v) { return v->next; }
static double rank_lru(const ps_victim *v) { return -v->last; }
static double rank_fifo(const ps_victim *v) { return -v->taken; }

static const ps_tuning even = { { 1, 1, 1 } };
/* The tunings of `plan`. The planner tries each tuning. The first tuning is the tuning of `belady`, so `plan` is
 * never worse than `belady`. Evicting a dirty chunk costs two copies, but its copy down is often necessary later
 * anyway. Whether that copy should count depends on the trace. With the last tuning, dirty chunks are evicted only if
 * no clean chunks are left. */
static const ps_tuning tunings[] = { { { 1, 1, 1 } }, { { 1, 4, 0.5 } }, { { 1, 1e6, 0.5 } } };

static const ps_policy policies[] = {
    { "plan", rank_belady, tunings, sizeof tunings / sizeof *tunings },
    { "belady", rank_belady, &even, 1 },
    { "lru", rank_lru, &even, 1 },
    { "fifo", rank_fifo, &even, 1 },
};
enum { COUNT = sizeof policies / sizeof *policies };

const ps_policy *ps_policy_row(int policy) { return policy >= 0 && policy < COUNT ? &policies[policy] : NULL; }

const char *ps_policy_name(int policy)
{
    const ps_policy *row = ps_policy_row(policy);
    return row ? row->name : NULL;
}

int ps_policy_find(const char *name, int *out)
{
    char names[512];
    size_t n = 0;
    for (int i = 0; name && i < COUNT; i++)
        if (!strcmp(policies[i].name, name)) {
            *out = i;
            return 0;
        }
    for (int i = 0; i < COUNT && n < sizeof names; i++)
        n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", i > 0 ? ", " : "", policies[i].name);
    return ps_fail(PS_EINVAL, "there is no eviction policy '%s'; the policies are %s", name ? name : "", names);
}
