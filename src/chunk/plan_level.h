/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares one level of the planner. A level simulates the moves between a tier of limited capacity and
 * the tier below it, along a stream of events. plan.c makes the streams and connects the levels. plan_level.c
 * simulates a level. policy.c ranks the candidates for eviction. Only plan.c and plan_level.c include this header. */
#ifndef PS_PLAN_LEVEL_H
#define PS_PLAN_LEVEL_H
#include "chunk/plan.h"
#include "chunk/policy.h"

/* The kinds of events of a chunk. "Here" is the upper tier of the level. */
typedef enum ps_event_kind {
    EV_READ, EV_WRITE,            /* a use on this tier */
    /* The tier below uses its copy of the contents. If it writes, the copy on this tier becomes stale. */
    EV_DOWN, EV_DOWN_WRITE,
    EV_SOURCE,                    /* a fetch by the level above; it needs the contents here */
    /* An eviction by the level above. It needs room here and brings new contents. */
    EV_DEST,
    /* A write or a first use on the tier above. It makes the copies here and below stale. */
    EV_STALE,
    /* A drop of the copy on the tier above. The copy here must then be valid. */
    EV_GONE,
    EV_END,                       /* a use on the tier above, after which nobody reads the contents */
} ps_event_kind;

typedef struct ps_event {
    int32_t chunk;
    /* moment: the earliest moment of the event. The uses of all earlier moments have then ended. */
    int32_t moment;
    int32_t need;                 /* moment that waits for the event */
    int32_t ref;                  /* index of the use, or of the move of the level above */
    /* group: number of the event's group. All chunks of a group must be here at the same time. Group numbers have no
     * gaps. */
    int32_t group;
    int16_t kind;
    int16_t ends;                 /* 1 if the contents end with this use */
} ps_event;

typedef struct ps_stream {
    ps_event *events;
    int32_t n, n_chunks;
    /* next: [n] index of the next event of the same chunk, or -1. A value n + i is event i of the next round. */
    int32_t *next;
    int32_t *first, *last;        /* [n_chunks] index of each chunk's first and last event, or -1 */
    /* when: [n] position of each event: the number of earlier events plus the size in bytes of their chunks. A chunk
     * that consecutive groups use counts once. */
    double *when;
    double total;                 /* position after the last event */
} ps_stream;

/* The places where a chunk has valid copies.
 * AT_BLANK: the chunk has no contents yet, or they were discarded.
 * AT_ENDED: the contents end with a use that has not ended yet. The memory here is freed after this use. */
enum { AT_HERE = 1, AT_BELOW = 2, AT_ABOVE = 4, AT_BLANK = 8, AT_ENDED = 16 };

typedef struct ps_level {
    /* Fields that the caller sets follow. */
    int tier, cyclic;
    int32_t n_moments;
    int64_t capacity, ahead;
    const int64_t *extra;         /* [n_moments] like ps_plan_input.extra, or NULL */
    const ps_plan_chunk *chunks;
    const ps_stream *stream;
    const ps_policy *policy;
    const ps_tuning *tuning;
    struct ps_level *above;       /* the level whose moves are events here, or NULL */
    /* at: [n_chunks] set of AT_* before the step. ps_level_run replaces each set by the set after the step. */
    uint8_t *at;
    /* Fields that ps_level_run sets follow. */
    ps_move *moves;
    int32_t *serves;              /* [n_moves] index of the event that needs each move */
    int32_t n_moves, room;
    int64_t fetched, evicted, peak;   /* sizes in bytes */
    int32_t bad_event;            /* an event of a group that does not fit, or -1 */
} ps_level;

/* Sets the fields next, first, last, when and total. The caller has set the fields events, n and n_chunks. */
int ps_stream_link(ps_stream *s, const ps_plan_chunk *chunks, int cyclic);
void ps_stream_clear(ps_stream *s);
int ps_level_run(ps_level *l);
void ps_level_clear(ps_level *l);
#endif
