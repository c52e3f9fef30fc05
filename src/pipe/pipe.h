/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the tables of a pipeline. A table describes a step whose model is cut into virtual stages. It
 * has a list of actions for each rank. All functions are pure. Only a table that pipe_seal has accepted can be
 * performed.
 *
 * The files, in reading order:
 *   schedule.c   the schedules
 *   csv.c        tables as text
 *   check.c      the guarantees of a table
 *   lower.c      adds transfers and yields
 *   simulate.c   the time that a table takes
 *   cut.c        the division of a model into virtual stages
 *   layout.c     such a division as text
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
 * position is -1 if there is no such action. */
typedef struct pipe_place {
    int32_t forward;
    int32_t back;                   /* of INPUT or BACKWARD */
    int32_t weight;                 /* of WEIGHT or BACKWARD */
} pipe_place;

/* The directions of messages. PIPE_UP is to the next virtual stage, and PIPE_DOWN is to the previous one. The index
 * of a message is the index of the (virtual stage, micro-batch) pair that sends it. All messages from one rank to
 * another in one direction share a link. They arrive in the order in which they were sent. The index of a link is the
 * lower virtual stage of the first pair of neighbors that uses it. */
enum { PIPE_UP, PIPE_DOWN, PIPE_DIRECTIONS };

struct ps_pipe_table {
    ps_pipe_spec spec;
    bool lowered;
    int32_t refs;                   /* one for the creator and one for each executor */
    pipe_row *rows;                 /* [stages] */
    /* rank_of: [n_vstages] rank of each virtual stage
     * local_of: [n_vstages] index of each virtual stage on its rank */
    int32_t *rank_of, *local_of;
    pipe_place *places;             /* [n_vstages x micro_batches] */
    /* link_of: [n_vstages] index of the link to the next virtual stage; -1 if that stage is on the same rank */
    int32_t *link_of;
    /* link_base: [n_vstages] for each link, the position of its first message in `order` */
    int32_t *link_base;
    /* turn: [pairs] for each message, the number of messages that its link sends before it */
    int32_t *turn[PIPE_DIRECTIONS];
    /* order: [pairs] all messages, sorted by link and then by their order on the link */
    int32_t *order[PIPE_DIRECTIONS];
};

/* Makes a table with empty rows. Returns PS_EINVAL if a size is below 1 or too large. */
int pipe_new(const ps_pipe_spec *spec, int64_t n_vstages, ps_pipe_table **out);
int pipe_push(pipe_row *row, int kind, int32_t vstage, int32_t micro);
/* Checks the rows, and sets the fields after `rows`. Returns PS_EINVAL in these cases: an action is missing, occurs
 * twice, or is before an action that it needs; gradients would be summed in another order; or ranks would deadlock. */
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

/* Finds the message that an action needs. Sets its direction and the virtual stage that sends it. Returns false if
 * the action needs no message. */
static inline bool pipe_takes(const ps_pipe_table *t, const ps_action *a, int *direction, int32_t *from)
{
    *direction = a->kind == PS_ACT_FORWARD ? PIPE_UP : PIPE_DOWN;
    if (a->kind == PS_ACT_FORWARD) return (*from = a->vstage - 1) >= 0;
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) return (*from = a->vstage + 1) < t->spec.vstages;
    return false;
}

/* Finds the message that an action makes. Sets its direction and the virtual stage that receives it. Returns false if
 * the action makes no message. */
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

/* Returns PyTorch's name of the kind, such as "F", "I" or "SEND_F". Returns NULL if there is no such kind. */
const char *pipe_kind_text(int kind);
enum { PIPE_TEXT = 40 };                    /* size of a buffer for the text of any action */
/* Writes a text such as "2F0" to out [PIPE_TEXT], and returns `out`. */
const char *pipe_action_text(const ps_action *a, char *out);

/* Memory for simulations of one table. All calls of pipe_course_run reuse it. Times are in the unit of the costs. */
typedef struct pipe_course {
    const ps_pipe_table *t;
    double *clock;                          /* [stages] */
    int32_t *cursor;                        /* [stages] position of the next action */
    /* sending: [stages] the message of the rank waits for room on its link
     * queued: [stages] the rank is in `queue` */
    bool *sending, *queued;
    int32_t *queue;                         /* [stages] ranks that may be able to continue */
    /* whole: [pairs] time when the forward, BACKWARD or INPUT ended; -1 if it has not ended */
    double *whole[PIPE_DIRECTIONS];
    /* arrival: [pairs] in the order of `order`, arrival time of each message; -1 if it has not been sent */
    double *arrival[PIPE_DIRECTIONS];
    /* taken: [pairs] in the order of `order`, time when the receiver takes each message; -1 if it has not been taken */
    double *taken[PIPE_DIRECTIONS];
    /* free: [n_vstages] for each link, the time when its last message has been sent */
    double *free[PIPE_DIRECTIONS];
    /* n_taken: [n_vstages] for each link, the number of messages that the receiver has taken */
    int32_t *n_taken[PIPE_DIRECTIONS];
    void *memory;
} pipe_course;
int pipe_course_new(const ps_pipe_table *t, pipe_course *out);
void pipe_course_free(pipe_course *c);
/* Returns PS_EINVAL if one of costs [n], or a field of the link, is negative or NaN. what: name of the thing that has
 * the costs, for the error: "virtual stage" or "part". */
int pipe_check_numbers(const char *what, const ps_pipe_cost *costs, int32_t n, const ps_pipe_link *link);
/* Returns the time that an action takes. If `costs` is NULL, a BACKWARD takes 2, and all other actions that compute
 * take 1. */
double pipe_cost_of(const ps_pipe_cost *costs, const ps_action *a);
/* Does the same as ps_pipe_simulate, but does not check the costs and the link. */
int pipe_course_run(pipe_course *c, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                    ps_pipe_rank_times *ranks, ps_pipe_span *const *spans);
#endif
