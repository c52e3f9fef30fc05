/* SPDX-License-Identifier: BSD-3-Clause
 * The executor's state, and the functions of exec_dry.c and exec_messages.c. Only the executor's files include this. */
#ifndef PS_PIPE_EXEC_STATE_H
#define PS_PIPE_EXEC_STATE_H
#include "base/error.h"
#include "pipe/exec.h"
#include "tensor/tensor.h"

typedef struct bundle { int32_t n; ps_tensor *t[PS_PIPE_CARRY]; } bundle;

typedef struct slot {
    bundle in;                      /* tensors that the forward received; a boundary if gradients go back */
    bundle in_grad;                 /* gradients of `in`, from the end of the backward until they are sent */
    bundle out;                     /* tensors that the forward returned, or the loss */
    bundle out_grad;                /* gradients of `out`, from their arrival until the backward */
    ps_tensor *root;                /* last virtual stage: the walk begins here (held); NULL: at the loss */
    bool bounded;                   /* `in` is a boundary */
    bool sent;                      /* `out` was sent; its bytes live while the channel or the tape holds them */
} slot;

/* The tensors that a virtual stage passes to the next one in a micro-batch. */
typedef struct expected {
    int32_t n;
    ps_pipe_tensor *carry;          /* [n] */
} expected;

typedef struct incoming {           /* a receive that is under way */
    ps_tensor *t;                   /* NULL for a message without a tensor */
    void *request;
} incoming;

struct ps_pipe {
    ps_guest guest;
    ps_ctx *ctx;
    const ps_pipe_table *t;
    pipe_channel *channel;
    int rank, host;                 /* host: the device for messages whose own device the channel cannot send from */
    int32_t n_local;
    slot *slots;                    /* [n_local x micro_batches] the slots of this rank's virtual stages */
    expected *expected;             /* [vstages x micro_batches] the tensors that each virtual stage passes on */
    pipe_note *losses;              /* [micro_batches] losses, received or computed here (ps_pipe_weigh,
                                     * ps_pipe_score) */
    double *weights;                /* [micro_batches] weights from ps_pipe_mark */
    void **loss_requests;           /* [micro_batches] receives of losses under way, or NULL */
    void **sends;                   /* [n_sends] sends under way */
    int32_t n_sends, sends_capacity;
    incoming *posted;               /* [n_posted] receives for the next actions, by row; ended before first_posted */
    int32_t n_posted, posted_capacity, first_posted;
    bool open, dry, tells;
    int32_t first_again, end_again; /* dry row: micro-batches [first_again, end_again) repeat the one before them */
    bool differed;                  /* the last dry row found that they differ from it */
    ps_step *step;                  /* holds the row's actions; NULL if the caller performs all */
    ps_action_how last;             /* settings for the last BACKWARD or WEIGHT of each virtual stage */
    ps_update_group *groups;        /* [last.n_groups] or NULL */
    int32_t groups_capacity;
    int32_t event;                  /* kind of the event that the caller is handling, or NONE */
    bool told;                      /* the caller has handled it for the due action */
    bool stopped;                   /* the walk of the due action stopped at a segment */
    bool broken;                    /* the step failed */
    double seconds;                 /* seconds that the executor's own actions took since the last event */
    int32_t cursor;                 /* index of the action that is due or under way */
    int32_t ahead;                  /* all receives before this index have been posted */
    bool has_clock;                 /* the virtual clock is on */
    ps_pipe_cost *costs;            /* [vstages] */
    ps_pipe_link link;
    double clock, *free[PIPE_DIRECTIONS];       /* free: by link, [vstages] when its last message has been sent */
    ps_pipe_span *spans;            /* [actions of the row] simulated times */
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

/* -- exec_dry.c: rows of a dry run, in which micro-batches repeat earlier ones --------------------------------- */
/* The sections of a micro-batch's work, which are recorded and repeated one by one (tensor/replay.h). */
enum { SPAN_POST_F, SPAN_RECV_F, SPAN_FORWARD, SPAN_SEND_F, SPAN_POST_B, SPAN_RECV_B, SPAN_BACKWARD, SPAN_SEND_B,
       SPAN_WEIGHT, SPANS };
int pipe_part_of(int kind);                                      /* section to which actions of this kind belong */
bool pipe_noting(const ps_pipe *x);                              /* true if ops are recorded, to be repeated */
bool pipe_is_again(const ps_pipe *x, const ps_action *a);        /* true if the micro-batch repeats an earlier one */
void pipe_enter(ps_pipe *x, const ps_action *a, int span);       /* begins a section */
int pipe_leave(ps_pipe *x);                                      /* ends it */
int pipe_again(ps_pipe *x, const ps_action *a, int span);        /* repeats a section of an earlier micro-batch */

/* -- exec_messages.c: tensors and losses that ranks send to each other ------------------------------------------- */
void pipe_let_one_go(ps_tensor *t);                              /* releases a tensor, which may be NULL */
void pipe_let_go(bundle *b);
void pipe_let_slot_go(slot *s);
int pipe_put(bundle *b, ps_tensor *t);       /* adds a tensor; takes its reference, even on failure */
int pipe_settle(ps_pipe *x, bool all);       /* error if messages between devices failed; all: wait for them first */
int pipe_post_before(ps_pipe *x, int32_t end);               /* posts the receives of all actions before index `end` */
int32_t pipe_next_work(const ps_pipe *x);    /* index of the first action after the due one that computes */
int pipe_wait_for(ps_pipe *x, void *request, pipe_note *note);   /* waits until the message has been received or sent */
int pipe_receive(ps_pipe *x, const ps_action *a);
int pipe_send(ps_pipe *x, const ps_action *a);
int pipe_post_losses(ps_pipe *x);            /* posts the receives of all losses when the step begins */
int pipe_give_loss(ps_pipe *x, int32_t micro, const bundle *out);        /* reads the loss that was computed here */
int pipe_send_loss(ps_pipe *x, int32_t micro);
int pipe_take_loss(ps_pipe *x, int32_t micro);                   /* waits for the loss from the rank that computes it */
#endif
