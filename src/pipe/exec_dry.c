/* SPDX-License-Identifier: BSD-3-Clause
 * This file runs the rows of a dry run. Some micro-batches of a dry run repeat the recorded effects of an earlier
 * micro-batch instead of performing their actions (tensor/replay.h). */
#include "base/error.h"
#include "pipe/exec_state.h"
#include "tensor/replay.h"

int pipe_part_of(int kind)
{
    switch (kind) {
    case PS_ACT_RECV_F: return SPAN_RECV_F;
    case PS_ACT_FORWARD: return SPAN_FORWARD;
    case PS_ACT_SEND_F: return SPAN_SEND_F;
    case PS_ACT_RECV_B: return SPAN_RECV_B;
    case PS_ACT_SEND_B: return SPAN_SEND_B;
    case PS_ACT_WEIGHT: return SPAN_WEIGHT;
    default: return SPAN_BACKWARD;
    }
}

bool pipe_noting(const ps_pipe *x) { return x->dry && x->step; }

/* Returns true if the action repeats the recorded effects of an earlier micro-batch. */
bool pipe_is_again(const ps_pipe *x, const ps_action *a)
{
    return pipe_noting(x) && a->micro >= x->first_again && a->micro < x->end_again && a->kind != PS_ACT_YIELD &&
           a->kind != PS_ACT_REDUCE;
}

static int32_t number_of(const ps_pipe *x, const ps_action *a, int span)
{
    return x->t->local_of[a->vstage] * SPANS + span;
}

void pipe_enter(ps_pipe *x, const ps_action *a, int span)
{
    if (pipe_noting(x)) ps_replay_enter(x->ctx, number_of(x, a, span), a->micro);
}

int pipe_leave(ps_pipe *x)
{
    int rc = pipe_noting(x) ? ps_replay_leave(x->ctx) : 0;
    if (rc < 0) x->differed = ps_replay_differs(x->ctx);
    return rc;
}

int pipe_again(ps_pipe *x, const ps_action *a, int span)
{
    int rc = ps_replay_span(x->ctx, number_of(x, a, span), a->micro);
    if (rc < 0) x->differed = ps_replay_differs(x->ctx);
    return rc;
}

int ps_pipe_repeat(ps_pipe *x, int first, int end)
{
    if (x->open) return ps_fail(PS_ESTATE, "a step of the pipeline is already under way");
    if (first != end && (first < PS_PIPE_PERFORMED || end < first || end >= x->t->spec.micro_batches))
        return ps_fail(PS_EINVAL, "micro-batches %d to %d of %d cannot repeat earlier ones: the first %d "
                       "and the last must be performed", first, end - 1, x->t->spec.micro_batches, PS_PIPE_PERFORMED);
    x->first_again = first, x->end_again = end;
    x->differed = false;
    return 0;
}

int ps_pipe_differed(const ps_pipe *x) { return x->differed; }
void ps_pipe_collected(ps_pipe *x) { ps_replay_collected(x->ctx); }
