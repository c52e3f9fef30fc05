/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the tables of a pipeline. A table describes a step whose model is cut into virtual stages. The
 * table has a row for each rank: the list of the rank's actions. The functions in this header have no side effects
 * except on their arguments. Only a table that pipe_seal has accepted can be performed.
 *
 * The files, in reading order:
 *   schedule.c   the schedules
 *   csv.c        tables as text
 *   check.c      the guarantees of a table
 *   lower.c      adds transfers and yields
 *   simulate.c   the time that a table takes
 *   cut.c        the division of a model into virtual stages
 *   layout.c     reads such a division from text
 * exec.h declares the executor of a rank's row. */
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

/* The positions of the actions of a (virtual stage, micro-batch) pair in their row. Transfers are not counted. A
 * position is -1 if the row does not have the action. */
typedef struct pipe_place {
    int32_t forward;                /* position of FORWARD */
    int32_t back;                   /* position of INPUT or BACKWARD */
    int32_t weight;                 /* position of WEIGHT or BACKWARD */
} pipe_place;

/* The directions of messages. A PIPE_UP message is sent to the next virtual stage, and a PIPE_DOWN message to the
 * previous virtual stage. The index of a message is the index of the (virtual stage, micro-batch) pair that sends the
 * message. All messages that one rank sends to another rank in one direction share a link. The messages of a link
 * arrive in the order in which they were sent. The index of a link is v if virtual stages v and
 * v + 1 are the first neighbors that use the link. */
enum { PIPE_UP, PIPE_DOWN, PIPE_DIRECTIONS };

struct ps_pipe_table {
    ps_pipe_spec spec;
    bool lowered;
    int32_t refs;                   /* number of references: one of the creator and one of each executor */
    pipe_row *rows;                 /* [stages] */
    /* rank_of: [n_vstages] rank of each virtual stage
     * local_of: [n_vstages] index of each virtual stage on its rank */
    int32_t *rank_of, *local_of;
    pipe_place *places;             /* [n_vstages x micro_batches] */
    /* link_of: [n_vstages] index of the link to the next virtual stage; -1 if the next stage is on the same rank */
    int32_t *link_of;
    /* link_base: [n_vstages] for each link, the position of its first message in `order` */
    int32_t *link_base;
    /* turn: [pairs] for each message, the number of earlier messages on its link */
    int32_t *turn[PIPE_DIRECTIONS];
    /* order: [pairs] all messages, sorted by link and then by their order on the link */
    int32_t *order[PIPE_DIRECTIONS];
};

/* Makes a table with empty rows. Returns PS_EINVAL if a size is below 1 or too large. */
int pipe_new(const ps_pipe_spec *spec, int64_t n_vstages, ps_pipe_table **out);
int pipe_push(pipe_row *row, int kind, int32_t vstage, int32_t micro);
/* Checks the rows, and sets the fields after `rows`. Returns PS_EINVAL in these cases:
 *   - An action is missing, occurs twice, or is before an action that it needs.
 *   - Gradients would not be summed in the order of micro-batches.
 *   - Ranks would deadlock. */
int pipe_seal(ps_pipe_table *t);

/* Returns true if the (virtual stage, micro-batch) pair of the action is no longer in flight after this action. */
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

/* Finds the message that an action needs. Sets *direction to the message's direction, and *from to the virtual stage
 * that sends the message. Returns false if the action needs no message. */
static inline bool pipe_takes(const ps_pipe_table *t, const ps_action *a, int *direction, int32_t *from)
{
    *direction = a->kind == PS_ACT_FORWARD ? PIPE_UP : PIPE_DOWN;
    if (a->kind == PS_ACT_FORWARD) return (*from = a->vstage - 1) >= 0;
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) return (*from = a->vstage + 1) < t->spec.vstages;
    return false;
}

/* Finds the message that an action makes. Sets *direction to the message's direction, and *to to the virtual stage that
 * receives the message. Returns false if the action makes no message. */
static inline bool pipe_gives(const ps_pipe_table *t, const ps_action *a, int *direction, int32_t *to)
{
    *direction = a->kind == PS_ACT_FORWARD ? PIPE_UP : PIPE_DOWN;
    if (a->kind == PS_ACT_FORWARD) return (*to = a->vstage + 1) < t->spec.vstages;
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) return (*to = a->vstage - 1) >= 0;
    return false;
}

/* Returns the link between two neighboring virtual stages, or -1 if both are on the same rank. */
static inline int32_t pipe_link(const ps_pipe_table *t, int32_t one, int32_t other)
{
    return t->link_of[one < other ? one : other];
}

/* Returns PyTorch's name of the kind, such as "F", "I" or "SEND_F", or NULL if `kind` is not a kind of action. */
const char *pipe_kind_text(int kind);
enum { PIPE_TEXT = 40 };                    /* size of a buffer for the text of any action */
/* Writes a text such as "2F0" to out [PIPE_TEXT], and returns `out`. */
const char *pipe_action_text(const ps_action *a, char *out);

/* Memory for simulations of one table. All calls of pipe_course_run reuse it. Times are in the unit of the costs. */
typedef struct pipe_course {
    const ps_pipe_table *t;
    double *clock;                          /* [stages] */
    int32_t *cursor;                        /* [stages] position of the next action */
    /* sending: [stages] true if the rank waits for room on a link for its message
     * queued: [stages] true if the rank is in `queue` */
    bool *sending, *queued;
    int32_t *queue;                         /* [stages] ranks that may be able to continue */
    /* whole: [pairs] time when the FORWARD (PIPE_UP) or the BACKWARD or INPUT (PIPE_DOWN) ended; -1 before its end */
    double *whole[PIPE_DIRECTIONS];
    /* arrival: [pairs] arrival time of each message, sorted like t->order; -1 if the message was not sent */
    double *arrival[PIPE_DIRECTIONS];
    /* taken: [pairs] time when each message was received, sorted like t->order; -1 if it was not received */
    double *taken[PIPE_DIRECTIONS];
    /* free: [n_vstages] for each link, the time when the link has sent its last message and is free */
    double *free[PIPE_DIRECTIONS];
    /* n_taken: [n_vstages] for each link, the number of messages that were received */
    int32_t *n_taken[PIPE_DIRECTIONS];
    void *memory;
} pipe_course;
int pipe_course_new(const ps_pipe_table *t, pipe_course *out);
void pipe_course_free(pipe_course *c);
/* Returns PS_EINVAL if a field of costs [n] or of the link is negative or NaN. what: for the error, the noun for an
 * element of `costs`: "virtual stage" or "part". */
int pipe_check_numbers(const char *what, const ps_pipe_cost *costs, int32_t n, const ps_pipe_link *link);
/* Returns the time that an action takes. If `costs` is NULL, a BACKWARD takes 2, and any other action that computes
 * takes 1. */
double pipe_cost_of(const ps_pipe_cost *costs, const ps_action *a);
/* Does the same as ps_pipe_simulate, but does not check the costs and the link. */
int pipe_course_run(pipe_course *c, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                    ps_pipe_rank_times *ranks, ps_pipe_span *const *spans);
#endif
