/* SPDX-License-Identifier: BSD-3-Clause
 * Tables of a pipeline: what each rank does in a step whose model is cut into virtual stages, and in which order. Pure
 * functions of their arguments. A table that pipe_seal has passed can be performed, and all else builds on that.
 * In reading order: schedule.c (the schedules), csv.c (tables as text), check.c (what a table promises), lower.c (what
 * goes between forwards and backwards), simulate.c (a table's course by its costs), cut.c (which parts of a model are a
 * virtual stage), layout.c (the same as text). exec.h has the executor of a rank's row. */
#ifndef PS_PIPE_H
#define PS_PIPE_H
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

enum {
    PIPE_MOST_PAIRS = 1 << 20,      /* (virtual stage, micro-batch) pairs of a table */
    PIPE_MOST_VSTAGES = 4096,
};

typedef struct pipe_row {
    ps_action *actions;             /* [n] */
    int32_t n, capacity;
} pipe_row;

/* Where the actions of a (virtual stage, micro-batch) stand in their row, without transfers; -1: nowhere. */
typedef struct pipe_place {
    int32_t forward;
    int32_t back;                   /* INPUT or BACKWARD */
    int32_t weight;                 /* WEIGHT or BACKWARD */
} pipe_place;

/* Messages go from the end of one virtual stage to the beginning of the next (PIPE_UP), or back (PIPE_DOWN). Their
 * number is that of the (virtual stage, micro-batch) that sends. All messages from one rank to another in one of the
 * two directions share a link and arrive in the order in which they were sent. Link l is that of virtual stages l and
 * l + 1, the first ones of its ranks. */
enum { PIPE_UP, PIPE_DOWN, PIPE_DIRECTIONS };

struct ps_pipe_table {
    ps_pipe_spec spec;
    bool lowered;
    int32_t refs;                   /* one of who made it, one of each executor */
    pipe_row *rows;                 /* [stages] */
    int32_t *rank_of, *local_of;    /* [n_vstages] */
    pipe_place *places;             /* [n_vstages x micro_batches] */
    int32_t *link_of;               /* [n_vstages] the link between this virtual stage and the next; -1: same rank */
    int32_t *link_base;             /* [n_vstages] of a link: where its messages begin in `order` */
    int32_t *turn[PIPE_DIRECTIONS];  /* [pairs] of a message: how many its link carries before it */
    int32_t *order[PIPE_DIRECTIONS]; /* [pairs] of a link, from its base on: its messages */
};

/* A table with empty rows. PS_EINVAL: sizes below 1, or too large. */
int pipe_new(const ps_pipe_spec *spec, int64_t n_vstages, ps_pipe_table **out);
int pipe_push(pipe_row *row, int kind, int32_t vstage, int32_t micro);
/* Checks the rows and fills the fields behind them. PS_EINVAL: an action is missing, is there twice, stands before one
 * of its row that it needs, or where sums of gradients would have another order; or ranks wait in a circle. */
int pipe_seal(ps_pipe_table *t);

/* The pair of (virtual stage, micro-batch) is no longer in flight when the action has ended. */
static inline bool pipe_ends_flight(const ps_pipe_table *t, const ps_action *a)
{
    if (a->kind == PS_ACT_FORWARD) return t->spec.forward_only;
    return a->kind == PS_ACT_INPUT || a->kind == PS_ACT_BACKWARD;
}

static inline bool pipe_is_compute(int kind)
{
    return kind == PS_ACT_FORWARD || kind == PS_ACT_BACKWARD || kind == PS_ACT_INPUT || kind == PS_ACT_WEIGHT;
}

static inline int32_t pipe_pair(const ps_pipe_table *t, int32_t vstage, int32_t micro)
{
    return vstage * t->spec.micro_batches + micro;
}

/* The message that an action takes: its direction and sender's virtual stage. False: it takes none. */
static inline bool pipe_takes(const ps_pipe_table *t, const ps_action *a, int *direction, int32_t *from)
{
    *direction = a->kind == PS_ACT_FORWARD ? PIPE_UP : PIPE_DOWN;
    if (a->kind == PS_ACT_FORWARD) return (*from = a->vstage - 1) >= 0;
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) return (*from = a->vstage + 1) < t->spec.vstages;
    return false;
}

/* The message that an action gives: its direction and receiver's virtual stage. False: it gives none. */
static inline bool pipe_gives(const ps_pipe_table *t, const ps_action *a, int *direction, int32_t *to)
{
    *direction = a->kind == PS_ACT_FORWARD ? PIPE_UP : PIPE_DOWN;
    if (a->kind == PS_ACT_FORWARD) return (*to = a->vstage + 1) < t->spec.vstages;
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) return (*to = a->vstage - 1) >= 0;
    return false;
}

/* The link between two neighbouring virtual stages; -1: they are on one rank. */
static inline int32_t pipe_link(const ps_pipe_table *t, int32_t one, int32_t other)
{
    return t->link_of[one < other ? one : other];
}

const char *pipe_kind_text(int kind);       /* "F", "B", "I", "W", "SEND_F" ...: as PyTorch writes them; NULL: none */
enum { PIPE_TEXT = 40 };                    /* room for an action's text */
const char *pipe_action_text(const ps_action *a, char *out);    /* "2F0" into out [PIPE_TEXT]; returns it */

/* Memory for one table's course, used again by each one. */
typedef struct pipe_course {
    const ps_pipe_table *t;
    double *clock;                          /* [stages] */
    int32_t *cursor;                        /* [stages] place of the action that comes next */
    bool *sending, *queued;                 /* [stages] the action before it has not sent; waits for its turn to run */
    int32_t *queue;                         /* [stages] */
    double *whole[PIPE_DIRECTIONS];         /* [pairs] end of a forward or of a backward's INPUT; -1: not yet */
    double *arrival[PIPE_DIRECTIONS];       /* [pairs] of a link's messages, as `order`; -1: not sent */
    double *taken[PIPE_DIRECTIONS];         /* [pairs] when the receiver took it; -1: not yet */
    double *free[PIPE_DIRECTIONS];          /* [n_vstages] of a link: when its last message has left */
    int32_t *n_taken[PIPE_DIRECTIONS];      /* [n_vstages] of a link */
    void *memory;
} pipe_course;
int pipe_course_new(const ps_pipe_table *t, pipe_course *out);
void pipe_course_free(pipe_course *c);
/* PS_EINVAL: a cost [n] or the link is below 0 or no number; what: "virtual stage" or "part". */
int pipe_check_numbers(const char *what, const ps_pipe_cost *costs, int32_t n, const ps_pipe_link *link);
/* What an action takes; costs NULL: 1 for forward, input and weight. */
double pipe_cost_of(const ps_pipe_cost *costs, const ps_action *a);
/* ps_pipe_simulate; numbers are not looked at. */
int pipe_course_run(pipe_course *c, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                    ps_pipe_rank_times *ranks, ps_pipe_span *const *spans);
#endif
