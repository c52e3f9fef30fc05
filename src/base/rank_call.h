/* SPDX-License-Identifier: BSD-3-Clause
 * A record of a collective call that a dry run would have made. collectives/context.c records these calls. The engine
 * stores them with the trace of the step. comm/plan.c expects the same calls in a step that repeats the trace. */
#ifndef PS_BASE_RANK_CALL_H
#define PS_BASE_RANK_CALL_H
#include <stdint.h>

typedef struct ps_rank_call {
    int32_t group;                         /* index of the group in the context */
    int32_t op, dtype, root, place;        /* fields of a call's header (comm/group.h) */
    int32_t unused;                        /* always 0, because calls are compared byte by byte */
    int64_t nbytes;
} ps_rank_call;
_Static_assert(sizeof(ps_rank_call) == 32, "no holes");

typedef struct ps_rank_calls { ps_rank_call *list; int32_t n, capacity; } ps_rank_calls;
#endif
