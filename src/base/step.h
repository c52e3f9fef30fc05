/* SPDX-License-Identifier: BSD-3-Clause
 * The step of training that is under way, as every layer sees it: its actions, which of them runs now, and whether ops
 * compute. The context leads to it by a const pointer; engine/step.c alone writes one (spec/layers_spec.lua). What one
 * layer alone needs of a step (a chunk's moves, a stripe's uses, the walk's heap) is that layer's. */
#ifndef PS_BASE_STEP_H
#define PS_BASE_STEP_H
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

struct ps_mem;
struct ps_engine;

struct ps_step {
    ps_step_state is;             /* what scripts read, too */
    struct ps_mem *dry;           /* what a dry run makes has its addresses here: ops do all but compute; else NULL */
    int32_t pass;                 /* raised by each action of the table, so that what was read in an earlier one is told
                                   * from it; an action that is performed again goes on in its pass */
    ps_action *actions;           /* [n_actions] the table */
    int32_t n_actions, capacity;
    int32_t cursor;               /* place of the action that is due */
    int32_t at;                   /* place of the action under way, or of the last one; -1: none yet */
    int32_t *last;                /* [n_vstages] place of the last backward of each virtual stage */
    int32_t n_vstages, last_capacity;
    double *weights;              /* [n_actions] of a micro-batch, at the place of its backward */
    int32_t weights_capacity;
    bool measures;                /* the table has a norm */
    bool noted;                   /* its uses become a trace */
    ps_action_how how;            /* of the action under way, or of the last one */
    uint32_t first_op;            /* number of the next dropout when the step began, */
    uint32_t forward_op;          /* and when the forward under way did: a forward that is given up takes no numbers; */
    uint64_t forward_offset;      /* the same of other random tensors */
    int32_t refs;
    struct ps_ctx *ctx;
    struct ps_engine *engine;     /* whose step it is, or NULL: plain memory */
};

/* The action under way is the last backward of its virtual stage, or the reduction behind it: gradients are final. */
static inline bool ps_step_is_last(const ps_step *s)
{
    int kind = s->is.now.kind;
    return (kind == PS_ACT_BACKWARD || kind == PS_ACT_REDUCE) && s->at >= s->last[s->is.now.vstage];
}

extern const ps_step ps_step_idle;        /* where no engine is open */
#endif
