/* SPDX-License-Identifier: BSD-3-Clause
 * The training step in progress. This struct contains everything about the step that all layers need: its actions,
 * the current action, and whether ops compute. The context has a const pointer to the struct, because only
 * engine/step.c may write to the struct (spec/source/layers_spec.lua). State that only one layer needs belongs to
 * that layer. Examples are a chunk's moves, a stripe's uses and the walk's heap. */
#ifndef PS_BASE_STEP_H
#define PS_BASE_STEP_H
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

struct ps_mem;
struct ps_engine;

/* A virtual stage in the table of a step. */
typedef struct step_vstage {
    int32_t last;                 /* index of the stage's last BACKWARD or WEIGHT in the table */
    /* These fields are used while the table is checked.
     * next: the next INPUT to check.
     * put_off: number of INPUTs so far that have no WEIGHT yet.
     * in_flight: number of forwards so far that have no backward yet. */
    int32_t next, put_off, in_flight;
} step_vstage;

struct ps_step {
    ps_step_state is;             /* state that scripts can read */
    struct ps_mem *dry;           /* memory manager that provides addresses for tensors in a dry run, in which ops do
                                   * everything except compute; NULL in other steps */
    int32_t pass;                 /* counter that each action of the table increments. It distinguishes the reads of
                                   * an action from earlier reads. A repeated action does not increment it. */
    ps_action *actions;           /* [n_actions] the table */
    int32_t n_actions, capacity;
    int32_t cursor;               /* index of the next action to run */
    int32_t at;                   /* index of the current action, or of the last action that ran; -1 before the first
                                   * action */
    step_vstage *stages;           /* [n_vstages] */
    int32_t n_vstages, stages_capacity;
    int32_t *first_walk;          /* [n_actions] for each micro-batch: index of the micro-batch's first BACKWARD or
                                   * INPUT, or -1 */
    int32_t first_walk_capacity;
    int32_t collected;            /* number of finished micro-batches at Lua's last collection (ps_step_collects) */
    bool measures;                /* true if the table has an action for the norm */
    bool ahead;                   /* true if several micro-batches of a virtual stage are in flight, or if weight
                                   * gradients are deferred. Gradients of embeddings are then not kept from forward to
                                   * backward. */
    bool noted;                   /* true if the step's uses of chunks are recorded as a trace */
    bool suspended;               /* true if the script is paused; ops are then not part of the step */
    ps_action_how how;            /* settings of the current action, or of the last action that ran */
    uint32_t first_op;            /* number of the next dropout at the begin of the step */
    uint32_t forward_op;          /* number of the next dropout at the begin of the current forward. It is restored if
                                   * the forward is abandoned. */
    uint64_t forward_offset;      /* ps_rng.offset at the begin of the current forward. It is restored if the forward
                                   * is abandoned. */
    int32_t refs;
    struct ps_ctx *ctx;
    struct ps_engine *engine;     /* engine of this step; NULL for plain memory */
};

/* Returns true if gradients are final. They are final if the current action is the last backward of its virtual
 * stage, or the reduction that follows it. */
static inline bool ps_step_is_last(const ps_step *s)
{
    int kind = s->is.now.kind;
    return (kind == PS_ACT_BACKWARD || kind == PS_ACT_WEIGHT || kind == PS_ACT_REDUCE) &&
           s->at >= s->stages[s->is.now.vstage].last;
}

/* Returns true if a later action of the step adds to gradients or reduces them. */
static inline bool ps_step_adds_later(const ps_step *s)
{
    for (int32_t i = s->at + 1; i < s->n_actions; i++) {
        int kind = s->actions[i].kind;
        if (kind == PS_ACT_BACKWARD || kind == PS_ACT_WEIGHT || kind == PS_ACT_REDUCE) return true;
    }
    return false;
}

/* Returns true if ops must compute the gradients of embeddings in backward. If the result is false, some ops can
 * compute these gradients together with their outputs, long before the gradients are needed. */
static inline bool ps_step_runs_ahead(const ps_step *s)
{
    return s->ahead && (s->is.now.kind == PS_ACT_FORWARD || s->is.now.kind == PS_ACT_INPUT);
}

extern const ps_step ps_step_idle;        /* the step of a context without an engine */
#endif
