/* SPDX-License-Identifier: BSD-3-Clause
 * Tables of a pipeline: a step whose model is cut into virtual stages, as a list of actions for each rank. All
 * functions are pure. Only a table that pipe_seal has accepted can be performed.
 *
 * In reading order: schedule.c (the schedules), csv.c (tables as text), check.c (the guarantees of a table), lower.c
 * (adds transfers and yields), simulate.c (the time that a table takes), cut.c (which parts of a model form a
 * virtual stage), layout.c (a cut as text). exec.h declares the executor of a rank's row. */
#ifndef PS_PIPE_H
#define PS_PIPE_H
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

enum {
    PIPE_MOST_PAIRS = 1 << 20,      /* maximum number of (virtual stage, micro-batch) pairs in a table */
    PIPE_MOST_VSTAGES = 4096,
};

typedef struct pipe_row {
    ps_action *actions;             /* [n] */
    int32_t n, capacity;
} pipe_row;

/* Where the actions of a (virtual stage, micro-batch) pair are in their row, transfers not counted; -1 for none. */
typedef struct pipe_place {
    int32_t forward;
    int32_t back;                   /* INPUT or BACKWARD */
    int32_t weight;                 /* WEIGHT or BACKWARD */
} pipe_place;

/* Directions of messages: to the next virtual stage (PIPE_UP), or back (PIPE_DOWN). The index of a message is that
 * of the (virtual stage, micro-batch) pair that sends it. All messages from one rank to another in one direction
 * share a link, and arrive in the order in which they were sent. A link has the index of the lower virtual stage of
 * its first pair of neighbours. */
enum { PIPE_UP, PIPE_DOWN, PIPE_DIRECTIONS };

struct ps_pipe_table {
    ps_pipe_spec spec;
    bool lowered;
    int32_t refs;                   /* one for its maker and one for each executor */
    pipe_row *rows;                 /* [stages] */
    int32_t *rank_of, *local_of;    /* [n_vstages] the rank of a virtual stage, and its index there */
    pipe_place *places;             /* [n_vstages x micro_batches] */
    int32_t *link_of;               /* [n_vstages] link to the next virtual stage; -1: on the same rank */
    int32_t *link_base;             /* [n_vstages] by link: position in `order` of its first message */
    int32_t *turn[PIPE_DIRECTIONS];  /* [pairs] by message: how many its link carries before it */
    int32_t *order[PIPE_DIRECTIONS]; /* [pairs] messages, link by link, in the order of each link */
};

/* Makes a table with empty rows. PS_EINVAL: a size is below 1 or too large. */
int pipe_new(const ps_pipe_spec *spec, int64_t n_vstages, ps_pipe_table **out);
int pipe_push(pipe_row *row, int kind, int32_t vstage, int32_t micro);
/* Checks the rows and sets the fields after `rows`. PS_EINVAL: an action is missing, occurs twice or comes before
 * one that it needs; gradients would be summed in another order; or ranks would deadlock. */
int pipe_seal(ps_pipe_table *t);

/* Returns true if the action ends the flight of its (virtual stage, micro-batch) pair. */
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

/* Finds the message that an action needs: its direction, and the virtual stage that sends it. Returns false for
 * none. */
static inline bool pipe_takes(const ps_pipe_table *t, const ps_action *a, int *direction, int32_t *from)
{
    *direction = a->kind == PS_ACT_FORWARD ? PIPE_UP : PIPE_DOWN;
    if (a->kind == PS_ACT_FORWARD) return (*from = a->vstage - 1) >= 0;
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) return (*from = a->vstage + 1) < t->spec.vstages;
    return false;
}

/* Finds the message that an action makes: its direction, and the virtual stage that receives it. Returns false for
 * none. */
static inline bool pipe_gives(const ps_pipe_table *t, const ps_action *a, int *direction, int32_t *to)
{
    *direction = a->kind == PS_ACT_FORWARD ? PIPE_UP : PIPE_DOWN;
    if (a->kind == PS_ACT_FORWARD) return (*to = a->vstage + 1) < t->spec.vstages;
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) return (*to = a->vstage - 1) >= 0;
    return false;
}

/* Returns the link between two neighbouring virtual stages, or -1 if both are on one rank. */
static inline int32_t pipe_link(const ps_pipe_table *t, int32_t one, int32_t other)
{
    return t->link_of[one < other ? one : other];
}

const char *pipe_kind_text(int kind);       /* PyTorch's name, such as "F", "I" or "SEND_F", or NULL */
enum { PIPE_TEXT = 40 };                    /* buffer size for any action's text */
const char *pipe_action_text(const ps_action *a, char *out);    /* writes a text such as "2F0", returns out
                                                                 * [PIPE_TEXT] */

/* Memory for simulations of one table, reused by each pipe_course_run. Times are in the unit of the costs. */
typedef struct pipe_course {
    const ps_pipe_table *t;
    double *clock;                          /* [stages] */
    int32_t *cursor;                        /* [stages] position of the next action */
    bool *sending, *queued;                 /* [stages] sending: its message waits for room; queued: in `queue` */
    int32_t *queue;                         /* [stages] ranks that may be able to go on */
    double *whole[PIPE_DIRECTIONS];         /* [pairs] when the forward, BACKWARD or INPUT ended; -1: not yet */
    double *arrival[PIPE_DIRECTIONS];       /* [pairs] as `order`: when a message arrives; -1: not yet sent */
    double *taken[PIPE_DIRECTIONS];         /* [pairs] as `order`: when the receiver takes it; -1: not yet */
    double *free[PIPE_DIRECTIONS];          /* [n_vstages] by link: when its last message has been sent */
    int32_t *n_taken[PIPE_DIRECTIONS];      /* [n_vstages] by link: messages that the receiver took */
    void *memory;
} pipe_course;
int pipe_course_new(const ps_pipe_table *t, pipe_course *out);
void pipe_course_free(pipe_course *c);
/* PS_EINVAL: one of costs [n], or a field of the link, is negative or NaN. what: whose costs, for the error:
 * "virtual stage" or "part". */
int pipe_check_numbers(const char *what, const ps_pipe_cost *costs, int32_t n, const ps_pipe_link *link);
/* Returns the time that an action takes. Without costs, a BACKWARD takes 2, other actions that compute take 1. */
double pipe_cost_of(const ps_pipe_cost *costs, const ps_action *a);
/* ps_pipe_simulate without the checks of costs and link. */
int pipe_course_run(pipe_course *c, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                    ps_pipe_rank_times *ranks, ps_pipe_span *const *spans);
#endif
