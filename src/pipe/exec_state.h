/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the state of the executor, and the functions of exec_dry.c and exec_messages.c. Only the files
 * of the executor include it. */
#ifndef PS_PIPE_EXEC_STATE_H
#define PS_PIPE_EXEC_STATE_H
#include "base/error.h"
#include "pipe/exec.h"
#include "tensor/tensor.h"

typedef struct bundle { int32_t n; ps_tensor *t[PS_PIPE_CARRY]; } bundle;

typedef struct slot {
    /* in: tensors that the forward received. They are a boundary if gradients are sent back. */
    bundle in;
    /* in_grad: gradients of `in`, from the end of the backward until they are sent */
    bundle in_grad;
    bundle out;                     /* tensors that the forward returned, or the loss */
    bundle out_grad;                /* gradients of `out`, from their arrival until the backward */
    /* root: for the last virtual stage, the held tensor where the walk begins; NULL if the walk begins at the loss */
    ps_tensor *root;
    bool bounded;                   /* `in` is a boundary */
    /* sent: `out` was sent. Its bytes exist only as long as the channel or the tape holds them. */
    bool sent;
} slot;

/* The tensors that a virtual stage passes to the next virtual stage in a micro-batch. */
typedef struct expected {
    int32_t n;
    ps_pipe_tensor *carry;          /* [n] */
} expected;

typedef struct incoming {           /* a receive in progress */
    ps_tensor *t;                   /* NULL if the message has no tensor */
    void *request;
} incoming;

struct ps_pipe {
    ps_guest guest;
    ps_ctx *ctx;
    const ps_pipe_table *t;
    pipe_channel *channel;
    /* host: the device that sends a message if the channel cannot send from the device of the message's tensor */
    int rank, host;
    int32_t n_local;
    /* slots: [n_local x micro_batches] slots of the virtual stages on this rank */
    slot *slots;
    /* expected: [vstages x micro_batches] tensors that each virtual stage passes to the next virtual stage */
    expected *expected;
    /* losses: [micro_batches] losses that this rank has received or computed, with their weights (ps_pipe_weigh) and
     * hits (ps_pipe_score) */
    pipe_note *losses;
    double *weights;                /* [micro_batches] weights set by ps_pipe_mark */
    void **loss_requests;           /* [micro_batches] receives of losses in progress, or NULL */
    void **sends;                   /* [n_sends] sends in progress */
    int32_t n_sends, sends_capacity;
    /* posted: [n_posted] receives for the next actions, in the order of the row. The receives before index first_posted
     * have ended. */
    incoming *posted;
    int32_t n_posted, posted_capacity, first_posted;
    bool open, dry, tells;
    /* In a dry run, micro-batches [first_again, end_again) repeat an earlier micro-batch. */
    int32_t first_again, end_again;
    bool differed;                  /* true if the last dry run found that a repeated micro-batch would differ */
    /* step: the step that contains the actions of the row; NULL if the caller performs all actions */
    ps_step *step;
    /* last: settings for the last BACKWARD or WEIGHT action of each virtual stage */
    ps_action_how last;
    ps_update_group *groups;        /* [last.n_groups], or NULL */
    int32_t groups_capacity;
    int32_t event;                  /* kind of the event that the caller is handling, or NONE */
    bool told;                      /* true if the caller has handled the event that comes before the due action */
    bool stopped;                   /* the walk of the due action has stopped at a segment */
    bool broken;                    /* the step failed */
    /* seconds: time that the executor itself has spent on actions since the last event */
    double seconds;
    int32_t cursor;                 /* index of the action that is due or in progress */
    int32_t ahead;                  /* all receives before this index have been posted */
    bool has_clock;                 /* the virtual clock is on */
    ps_pipe_cost *costs;            /* [vstages] */
    ps_pipe_link link;
    /* clock: current time of this rank
     * free: [vstages] for each link, the time when the link has sent its last message and is free */
    double clock, *free[PIPE_DIRECTIONS];
    ps_pipe_span *spans;            /* [actions of the row] simulated begin and end of each action */
};

static inline const pipe_row *row_of(const ps_pipe *x) { return &x->t->rows[x->rank]; }
static inline const ps_action *due(const ps_pipe *x) { return &row_of(x)->actions[x->cursor]; }
static inline bool pipe_is_receive(const ps_action *a) { return a->kind == PS_ACT_RECV_F || a->kind == PS_ACT_RECV_B; }
static inline slot *slot_of(const ps_pipe *x, int32_t vstage, int32_t micro)
{
    return &x->slots[(int64_t)x->t->local_of[vstage] * x->t->spec.micro_batches + micro];
}
static inline expected *expected_of(const ps_pipe *x, int32_t vstage, int32_t micro)
{
    return &x->expected[pipe_pair(x->t, vstage, micro)];
}

/* -- exec_dry.c: rows of a dry run, in which micro-batches repeat earlier micro-batches ------------------------ */
/* The sections of a micro-batch's work. Each section is recorded and repeated separately (tensor/replay.h). */
enum { SPAN_POST_F, SPAN_RECV_F, SPAN_FORWARD, SPAN_SEND_F, SPAN_POST_B, SPAN_RECV_B, SPAN_BACKWARD, SPAN_SEND_B,
       SPAN_WEIGHT, SPANS };
/* Returns the section that contains the actions of the kind `kind`. */
int pipe_part_of(int kind);
bool pipe_noting(const ps_pipe *x);                 /* returns true if ops are recorded so that they can be repeated */
/* Returns true if the action repeats the recorded effects of an earlier micro-batch. */
bool pipe_is_again(const ps_pipe *x, const ps_action *a);
void pipe_enter(ps_pipe *x, const ps_action *a, int span);       /* begins a section */
int pipe_leave(ps_pipe *x);                                      /* ends the section */
int pipe_again(ps_pipe *x, const ps_action *a, int span);        /* repeats a section of an earlier micro-batch */

/* -- exec_messages.c: tensors and losses that ranks send to each other ------------------------------------------- */
void pipe_let_one_go(ps_tensor *t);                              /* releases a tensor, which may be NULL */
void pipe_let_go(bundle *b);
void pipe_let_slot_go(slot *s);
/* Adds t to a bundle. Releases the caller's reference to t, even if the function fails. */
int pipe_put(bundle *b, ps_tensor *t);
/* Returns an error if a message between devices has failed. If `all` is set, first waits for all such messages. */
int pipe_settle(ps_pipe *x, bool all);
/* Posts the receives of all actions before index `end`. */
int pipe_post_before(ps_pipe *x, int32_t end);
/* Returns the index of the first action after the due action for which pipe_is_compute() is true. */
int32_t pipe_next_work(const ps_pipe *x);
/* Waits until the message of `request` has been sent or received. */
int pipe_wait_for(ps_pipe *x, void *request, pipe_note *note);
int pipe_receive(ps_pipe *x, const ps_action *a);
int pipe_send(ps_pipe *x, const ps_action *a);
/* Posts the receives of all losses. Called when the step begins. */
int pipe_post_losses(ps_pipe *x);
/* Reads the loss that was computed on this rank. */
int pipe_give_loss(ps_pipe *x, int32_t micro, const bundle *out);
int pipe_send_loss(ps_pipe *x, int32_t micro);
/* Waits for the loss from the rank that computes it. */
int pipe_take_loss(ps_pipe *x, int32_t micro);
#endif
