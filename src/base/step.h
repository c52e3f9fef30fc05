/* SPDX-License-Identifier: BSD-3-Clause
 * The step of training that is under way, as every layer sees it: what runs now, and whether it computes. The context
 * leads to it by a const pointer; engine/step.c alone writes one. What one layer alone needs of a step (a chunk's
 * moves, a stripe's uses, the walk's heap) is that layer's. */
#ifndef PS_BASE_STEP_H
#define PS_BASE_STEP_H
#include <stdbool.h>
#include <stdint.h>

struct ps_mem;

typedef struct ps_step {
    struct ps_mem *dry;           /* what a dry run makes has its addresses here: ops do all but compute; else NULL */
    int32_t kind;                 /* of the action that is under way, a PS_STAGE; PS_STAGE_NONE: none is */
    int32_t pass;                 /* raised by each action, so that what was read in an earlier one is told from it */
    bool open;                    /* a step has begun and not ended */
} ps_step;

extern const ps_step ps_step_idle;        /* where no engine is open */
#endif
