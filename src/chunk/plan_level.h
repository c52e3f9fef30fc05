/* SPDX-License-Identifier: BSD-3-Clause
 * Inside the planner: one level (a bounded tier over another) simulated along a stream of events. plan.c makes the
 * streams and chains the levels, plan_level.c simulates, policy.c ranks victims. Only plan.c and plan_level.c include
 * this header. */
#ifndef PS_PLAN_LEVEL_H
#define PS_PLAN_LEVEL_H
#include "chunk/plan.h"
#include "chunk/policy.h"

/* An event of a chunk, as seen from the level's upper tier ("here"). */
typedef enum ps_event_kind {
    EV_READ, EV_WRITE,            /* a use on this tier */
    EV_DOWN, EV_DOWN_WRITE,       /* a use on the tier below: the contents must be there. A write makes the copy here
                                   * stale */
    EV_SOURCE,                    /* the level above fetches: the contents must be here */
    EV_DEST,                      /* the level above writes down: room must be here; the contents are new */
    EV_STALE,                     /* a write on the tier above, or a first use there: the copies here and below are
                                   * stale */
    EV_GONE,                      /* the level above drops its copy; the only valid copy is then here */
    EV_END,                       /* the contents ended with a use on the tier above */
} ps_event_kind;

typedef struct ps_event {
    int32_t chunk;
    int32_t moment;               /* the earliest moment for it: uses of earlier moments are over */
    int32_t need;                 /* the moment that waits for it */
    int32_t ref;                  /* number of the use, or number of the move in the level above */
    int32_t group;                /* all chunks of a group must be here together; group numbers have no gaps */
    int16_t kind;
    int16_t ends;                 /* a use with which its contents end */
} ps_event;

typedef struct ps_stream {
    ps_event *events;
    int32_t n, n_chunks;
    int32_t *next;                /* [n] the next event of the same chunk; n + i: event i of the next round; -1: none */
    int32_t *first, *last;        /* [n_chunks] the first event of each chunk, or -1 */
    double *when;                 /* [n] an event's place: the number of earlier events plus the bytes of their chunks.
                                   * Uses of a chunk in consecutive groups count its bytes once */
    double total;                 /* the place after the last event */
} ps_stream;

/* Where valid copies are. BLANK: no contents yet, or discarded. ENDED: the contents end with a use that is not over
 * yet; the space here is freed when it is. */
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
    struct ps_level *above;       /* the level to whose moves the events refer, or NULL */
    uint8_t *at;                  /* [n_chunks] AT_* before the step. ps_level_run replaces them by the values after the
                                   * step */
    /* made */
    ps_move *moves;
    int32_t *serves;              /* [n_moves] the event that each move serves */
    int32_t n_moves, room;
    int64_t fetched, evicted, peak;   /* bytes */
    int32_t bad_event;            /* an event of a group that does not fit, or -1 */
} ps_level;

int ps_stream_link(ps_stream *s, const ps_plan_chunk *chunks, int cyclic);  /* fills all fields except events, n,
                                                                             * n_chunks */
void ps_stream_clear(ps_stream *s);
int ps_level_run(ps_level *l);
void ps_level_clear(ps_level *l);
#endif
