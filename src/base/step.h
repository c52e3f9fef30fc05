/* SPDX-License-Identifier: BSD-3-Clause
 * The step of training that is under way, as every layer sees it: its actions, which of them runs now, and whether ops
 * compute. The context leads to it by a const pointer; engine/step.c alone writes one (spec/source/layers_spec.lua).
 * What one layer alone needs of a step (a chunk's moves, a stripe's uses, the walk's heap) is that layer's. */
#ifndef PS_BASE_STEP_H
#define PS_BASE_STEP_H
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

struct ps_mem;
struct ps_engine;

/* A virtual stage in the table of a step. */
typedef struct step_stage {
    int32_t last;                 /* place of its last BACKWARD or WEIGHT */
    int32_t next, put_off, in_flight;   /* while the table is checked: the next INPUT to look at, INPUTs without their
                                         * WEIGHT, and forwards without their backward */
} step_stage;

struct ps_step {
    ps_step_state is;             /* what scripts read, too */
    struct ps_mem *dry;           /* what a dry run makes has its addresses here: ops do all but compute; else NULL */
    int32_t pass;                 /* raised by each action of the table, so that what was read in an earlier one is told
                                   * from it; an action that is performed again goes on in its pass */
    ps_action *actions;           /* [n_actions] the table */
    int32_t n_actions, capacity;
    int32_t cursor;               /* place of the action that is due */
    int32_t at;                   /* place of the action under way, or of the last one; -1: none yet */
    step_stage *stages;           /* [n_vstages] */
    int32_t n_vstages, stages_capacity;
    int32_t *first_walk;          /* [n_actions] of micro-batch i: the place of its first BACKWARD or INPUT, or -1 */
    int32_t first_walk_capacity;
    int32_t collected;            /* micro-batches that were done when Lua's garbage last went (ps_step_collects) */
    bool measures;                /* the table has a norm */
    bool ahead;                   /* several micro-batches of a virtual stage are in flight, or weight gradients are put
                                   * off: gradients of tables are not kept from forward to backward */
    bool noted;                   /* its uses become a trace */
    bool suspended;               /* the script is paused: what is computed now is no part of the step */
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
    return (kind == PS_ACT_BACKWARD || kind == PS_ACT_WEIGHT || kind == PS_ACT_REDUCE) &&
           s->at >= s->stages[s->is.now.vstage].last;
}

/* An action behind the one under way adds to gradients, or reduces them. */
static inline bool ps_step_adds_later(const ps_step *s)
{
    for (int32_t i = s->at + 1; i < s->n_actions; i++) {
        int kind = s->actions[i].kind;
        if (kind == PS_ACT_BACKWARD || kind == PS_ACT_WEIGHT || kind == PS_ACT_REDUCE) return true;
    }
    return false;
}

/* Ops that could compute gradients of tables with their outputs, long before they are asked for, leave that to
 * backward. */
static inline bool ps_step_runs_ahead(const ps_step *s)
{
    return s->ahead && (s->is.now.kind == PS_ACT_FORWARD || s->is.now.kind == PS_ACT_INPUT);
}

extern const ps_step ps_step_idle;        /* where no engine is open */
#endif
