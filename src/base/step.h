/* SPDX-License-Identifier: BSD-3-Clause
 * The training step under way, as every layer sees it: its actions, the one that runs now, and whether ops compute.
 * The context has a const pointer to it; only engine/step.c writes it (spec/source/layers_spec.lua). State that only
 * one layer needs (a chunk's moves, a stripe's uses, the walk's heap) belongs to that layer. */
#ifndef PS_BASE_STEP_H
#define PS_BASE_STEP_H
#include <stdbool.h>
#include <stdint.h>
#include "ps.h"

struct ps_mem;
struct ps_engine;

/* A virtual stage in the table of a step. */
typedef struct step_vstage {
    int32_t last;                 /* index of its last BACKWARD or WEIGHT */
    int32_t next, put_off, in_flight;   /* While the table is checked: the next INPUT to look at, INPUTs so far
                                         * without a WEIGHT, forwards so far without a backward. */
} step_vstage;

struct ps_step {
    ps_step_state is;             /* state that scripts can read */
    struct ps_mem *dry;           /* dry run (ops do all but compute): memory for addresses of its tensors; else NULL */
    int32_t pass;                 /* Incremented by each action of the table, to tell its reads from earlier ones; a
                                   * repeated action keeps its pass. */
    ps_action *actions;           /* [n_actions] the table */
    int32_t n_actions, capacity;
    int32_t cursor;               /* index of the action that is due */
    int32_t at;                   /* index of the action under way, or of the last one; -1 before the first */
    step_vstage *stages;           /* [n_vstages] */
    int32_t n_vstages, stages_capacity;
    int32_t *first_walk;          /* [n_actions] by micro-batch: its first BACKWARD or INPUT, or -1 */
    int32_t first_walk_capacity;
    int32_t collected;            /* finished micro-batches at Lua's last collection (ps_step_collects) */
    bool measures;                /* the table has an action for the norm */
    bool ahead;                   /* Several micro-batches of a virtual stage are in flight, or weight gradients are
                                   * deferred. Gradients of embeddings are then not kept from forward to backward. */
    bool noted;                   /* the uses of the step are recorded as a trace */
    bool suspended;               /* the script is paused: ops are not part of the step */
    ps_action_how how;            /* settings of the action under way, or of the last action */
    uint32_t first_op;            /* number of the next dropout when the step began */
    uint32_t forward_op;          /* the same when the forward under way began; restored if it is abandoned */
    uint64_t forward_offset;      /* counter of other random tensors, likewise */
    int32_t refs;
    struct ps_ctx *ctx;
    struct ps_engine *engine;     /* engine of this step, or NULL for plain memory */
};

/* Returns true if gradients are final: the action under way is the last backward of its virtual stage, or the
 * reduction after it. */
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

/* Returns true if some ops must leave the gradients of embeddings to backward. Otherwise they can compute them
 * together with their outputs, long before they are needed. */
static inline bool ps_step_runs_ahead(const ps_step *s)
{
    return s->ahead && (s->is.now.kind == PS_ACT_FORWARD || s->is.now.kind == PS_ACT_INPUT);
}

extern const ps_step ps_step_idle;        /* step of a context without an engine */
#endif
