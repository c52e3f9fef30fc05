/* SPDX-License-Identifier: BSD-3-Clause
 * Tables of a pipeline: the ordered actions of each rank in a step whose model is cut into virtual stages. The
 * functions are pure. A table that pipe_seal has accepted can be performed; other functions rely on that. In reading
 * order: schedule.c (the schedules), csv.c (tables as text), check.c (the guarantees of a table), lower.c (adds
 * transfers and yields between forwards and backwards), simulate.c (the timing of a table by its costs), cut.c (which
 * parts of a model form a virtual stage), layout.c (a cut as text). exec.h declares the executor of a rank's row. */
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

/* Positions, in its row, of the actions of a (virtual stage, micro-batch) pair, counted without transfers. -1 if the
 * row has no such action. */
typedef struct pipe_place {
    int32_t forward;
    int32_t back;                   /* INPUT or BACKWARD */
    int32_t weight;                 /* WEIGHT or BACKWARD */
} pipe_place;

/* Messages are sent from the end of one virtual stage to the beginning of the next (PIPE_UP), or back (PIPE_DOWN). A
 * message has the index of the (virtual stage, micro-batch) pair that sends it. All messages from one rank to
 * another in one direction share a link and arrive in the order in which they were sent. If two ranks share several
 * pairs of neighbouring virtual stages, their link has the index of the lower stage of the first pair. */
enum { PIPE_UP, PIPE_DOWN, PIPE_DIRECTIONS };

struct ps_pipe_table {
    ps_pipe_spec spec;
    bool lowered;
    int32_t refs;                   /* references: one for the table's maker and one for each executor */
    pipe_row *rows;                 /* [stages] */
    int32_t *rank_of, *local_of;    /* [n_vstages] rank of a virtual stage, and index of the stage on that rank */
    pipe_place *places;             /* [n_vstages x micro_batches] */
    int32_t *link_of;               /* [n_vstages] link between this virtual stage and the next, -1 if both are on
                                     * one rank */
    int32_t *link_base;             /* [n_vstages] by link: position in `order` of its first message */
    int32_t *turn[PIPE_DIRECTIONS];  /* [pairs] by message: number of messages that its link carries before it */
    int32_t *order[PIPE_DIRECTIONS]; /* [pairs] messages of all links, link by link, in the order in which each link
                                      * carries them */
};

/* Makes a table with empty rows. PS_EINVAL: a size is below 1 or too large. */
int pipe_new(const ps_pipe_spec *spec, int64_t n_vstages, ps_pipe_table **out);
int pipe_push(pipe_row *row, int kind, int32_t vstage, int32_t micro);
/* Checks the rows and sets the fields after `rows`. PS_EINVAL: an action is missing, occurs twice, or is before an
 * action of its row that it needs; gradients would be summed in another order; or ranks would deadlock. */
int pipe_seal(ps_pipe_table *t);

/* Returns true if the (virtual stage, micro-batch) pair of the action is no longer in flight after the action. */
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

/* Finds the message that an action needs: the message's direction and the virtual stage that sends it. Returns false
 * if the action needs no message. */
static inline bool pipe_takes(const ps_pipe_table *t, const ps_action *a, int *direction, int32_t *from)
{
    *direction = a->kind == PS_ACT_FORWARD ? PIPE_UP : PIPE_DOWN;
    if (a->kind == PS_ACT_FORWARD) return (*from = a->vstage - 1) >= 0;
    if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) return (*from = a->vstage + 1) < t->spec.vstages;
    return false;
}

/* Finds the message that an action makes: the message's direction and the virtual stage that receives it. Returns
 * false if the action makes no message. */
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

const char *pipe_kind_text(int kind);       /* the name that PyTorch uses, such as "F", "I" or "SEND_F", else NULL */
enum { PIPE_TEXT = 40 };                    /* buffer size for any action's text */
const char *pipe_action_text(const ps_action *a, char *out);    /* writes a text such as "2F0" to out [PIPE_TEXT] and
                                                                 * returns `out` */

/* Scratch memory for simulations of one table; each pipe_course_run reuses it. Times are in the unit of the costs. */
typedef struct pipe_course {
    const ps_pipe_table *t;
    double *clock;                          /* [stages] */
    int32_t *cursor;                        /* [stages] position of the next action */
    bool *sending, *queued;                 /* [stages] sending: the action at the cursor has ended, but its message
                                             * still waits for room on the link. queued: the rank is in `queue`. */
    int32_t *queue;                         /* [stages] ranks that may be able to continue */
    double *whole[PIPE_DIRECTIONS];         /* [pairs] time at which the forward, or the BACKWARD or INPUT, ended;
                                             * -1: not yet */
    double *arrival[PIPE_DIRECTIONS];       /* [pairs] by position in `order`: time at which a message arrives; -1:
                                             * not sent yet */
    double *taken[PIPE_DIRECTIONS];         /* [pairs] by position in `order`: time at which the receiver takes a
                                             * message; -1: not yet */
    double *free[PIPE_DIRECTIONS];          /* [n_vstages] by link: time at which its last message has been sent */
    int32_t *n_taken[PIPE_DIRECTIONS];      /* [n_vstages] by link: number of messages that the receiver took */
    void *memory;
} pipe_course;
int pipe_course_new(const ps_pipe_table *t, pipe_course *out);
void pipe_course_free(pipe_course *c);
/* PS_EINVAL: one of costs [n], or a field of the link, is negative or NaN. what: "virtual stage" or "part", which
 * the error calls a cost's owner. */
int pipe_check_numbers(const char *what, const ps_pipe_cost *costs, int32_t n, const ps_pipe_link *link);
/* Returns the time that an action takes. Without costs, a forward, an INPUT and a WEIGHT take 1 each, and a BACKWARD
 * takes 2. */
double pipe_cost_of(const ps_pipe_cost *costs, const ps_action *a);
/* Like ps_pipe_simulate, but does not check costs and link. */
int pipe_course_run(pipe_course *c, const ps_pipe_cost *costs, const ps_pipe_link *link, ps_pipe_times *out,
                    ps_pipe_rank_times *ranks, ps_pipe_span *const *spans);
#endif
