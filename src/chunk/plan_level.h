/* SPDX-License-Identifier: BSD-3-Clause
 * One level of the planner: moves between a bounded tier and the tier below, simulated along a stream of events.
 * plan.c makes the streams and connects the levels, plan_level.c simulates, and policy.c ranks victims. Only plan.c
 * and plan_level.c include this header. */
#ifndef PS_PLAN_LEVEL_H
#define PS_PLAN_LEVEL_H
#include "chunk/plan.h"
#include "chunk/policy.h"

/* Events of a chunk, as seen from the level's upper tier ("here"). */
typedef enum ps_event_kind {
    EV_READ, EV_WRITE,            /* a use on this tier */
    EV_DOWN, EV_DOWN_WRITE,       /* use on the tier below, which needs the contents; a write makes this copy stale */
    EV_SOURCE,                    /* fetch of the level above: needs the contents here */
    EV_DEST,                      /* eviction of the level above: needs room here, brings new contents */
    EV_STALE,                     /* write or first use on the tier above: makes copies here and below stale */
    EV_GONE,                      /* drop of the copy above: the copy here must then be valid */
    EV_END,                       /* use on the tier above, after which nobody reads the contents */
} ps_event_kind;

typedef struct ps_event {
    int32_t chunk;
    int32_t moment;               /* earliest moment; uses at earlier moments have then ended */
    int32_t need;                 /* moment that waits for the event */
    int32_t ref;                  /* index of the use, or of the move in the level above */
    int32_t group;                /* chunks of a group must be here together; numbers have no gaps */
    int16_t kind;
    int16_t ends;                 /* 1: the contents end with this use */
} ps_event;

typedef struct ps_stream {
    ps_event *events;
    int32_t n, n_chunks;
    int32_t *next;                /* [n] next event of the chunk; n + i: event i of the next round, -1: none */
    int32_t *first, *last;        /* [n_chunks] first and last event of each chunk, or -1 */
    double *when;                 /* [n] position: number of earlier events plus the bytes of their chunks. A chunk
                                   * that consecutive groups use counts once */
    double total;                 /* position after the last event */
} ps_stream;

/* Where a chunk has valid copies. BLANK: it has no contents yet, or they were discarded. ENDED: its contents end
 * with a use that has not ended yet, and its memory here is then freed. */
enum { AT_HERE = 1, AT_BELOW = 2, AT_ABOVE = 4, AT_BLANK = 8, AT_ENDED = 16 };

typedef struct ps_level {
    /* given */
    int tier, cyclic;
    int32_t n_moments;
    int64_t capacity, ahead;
    const int64_t *extra;         /* [n_moments] ps_plan_input.extra, or NULL */
    const ps_plan_chunk *chunks;
    const ps_stream *stream;
    const ps_policy *policy;
    const ps_tuning *tuning;
    struct ps_level *above;       /* level whose moves are events here, or NULL */
    uint8_t *at;                  /* [n_chunks] AT_* before the step; ps_level_run sets those after it */
    /* made */
    ps_move *moves;
    int32_t *serves;              /* [n_moves] event that each move serves */
    int32_t n_moves, room;
    int64_t fetched, evicted, peak;   /* bytes */
    int32_t bad_event;            /* event of a group that does not fit, or -1 */
} ps_level;

int ps_stream_link(ps_stream *s, const ps_plan_chunk *chunks, int cyclic);  /* sets all but events, n and n_chunks */
void ps_stream_clear(ps_stream *s);
int ps_level_run(ps_level *l);
void ps_level_clear(ps_level *l);
#endif
