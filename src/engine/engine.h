/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the internals of the engine, which is the layer above the tape and the chunk manager. Its files:
 *   engine.c    parameters, gradients and updates
 *   step.c      the order of a step's actions
 *   norm.c      the norm of the gradients
 *   ties.c      parameters that several virtual stages share
 *   partial.c   gradients that are summed over tensor-parallel ranks
 *   trace.c     traces of steps, and forecasts from them
 *   place.c     moves tensors into chunks
 *   inspect.c   queries of scripts about chunks, tiers and waiting times
 *   rates.c     measures the speed of this machine
 *   suspend.c   pauses the script */
#ifndef PS_ENGINE_H
#define PS_ENGINE_H
#include "chunk/chunk.h"
#include "engine/zero_table.h"
#include "tensor/tensor.h"

enum { PS_ENGINE_TRACES = 8 };

/* A trained parameter and its gradient. Backward writes the gradient to a new tensor or to `place`. When the gradient
 * is final, the engine may move it to the memory of the parameter itself (ps_action_how.slot). This memory is then
 * called the slot of the parameter. The update frees the gradient. */
typedef struct param_rec {
    struct ps_engine *engine;
    ps_tensor *param, *master, *state[PS_MAX_STATES];
    /* host: views of param, master and states on the host; NULL if the host is the device that computes */
    ps_tensor *host[2 + PS_MAX_STATES];
    /* place: tensor for the gradient in a gradient chunk, or NULL
     * host_place: a view of `place` on the host */
    ps_tensor *place, *host_place;
    /* slot: a view of the memory of `param`, for the gradient; NULL if a gradient must not overwrite the value
     * host_slot: the same view on the host, or NULL */
    ps_tensor *slot, *host_slot;
    /* addend: for PS_TP_PARTIAL, the section of partial_rec.sums for this gradient, in the shape of `param`;
     * otherwise NULL */
    ps_tensor *addend;
    int32_t group, unit, vstage, number, tie, tp;   /* unit: -1 if `tie` is PS_TIE_USE */
    int32_t n_states;
    /* first_use: for PS_TIE_USE, the first use of the same tensor (only the first use has a unit); otherwise NULL */
    struct param_rec *first_use;
    /* sum: the gradient of this use while param->grad_ is the gradient of another use; otherwise NULL */
    ps_tensor *sum;
    int64_t t;                    /* number of updates so far */
    double square;                /* sum of squares of the stored gradient */
    double scale;                 /* factor for the gradient in the update of this step */
    /* unread: 0 if `square` is set; 1 or 2 if `square` must still be read from ps_engine.sums[unread - 1] */
    int32_t unread;
    uint32_t version;             /* version of the gradient's storage when its squares were summed */
    bool final, squared, in_slot, updated;
    /* waits: several virtual stages use the parameter, so its gradient is final only after all backwards */
    bool waits;
    /* summed: for PS_TP_PARTIAL, whether the gradient has been summed over the ranks */
    bool summed;
    /* had: true if the parameter had a gradient at a call of engine_unit_had_grad in this step */
    bool had;
    bool owned;                   /* true if this rank holds the master and the optimizer states */
} param_rec;

typedef struct unit_rec {
    int32_t n, n_final, vstage;
    int32_t grad_chunk;           /* chunk that contains the gradients of this unit and no other tensors, or -1 */
    bool on_device, updated;
} unit_rec;

/* The buffer in which PS_TP_PARTIAL gradients are summed over the ranks. The buffer is an fp32 tensor on the compute
 * device. It contains n marks, followed by the gradients. The mark of a parameter is 1 if this rank has a gradient of
 * the parameter, and 0 otherwise. */
typedef struct partial_rec {
    /* sums: the buffer, or NULL if n is 0
     * marks: a view of the first n elements of the buffer, or NULL if n is 0 */
    ps_tensor *sums, *marks;
    float *values;                /* [n] the marks on the host */
    int32_t n;
    bool exchanged;               /* true if `sums` contains the sums of this step */
} partial_rec;

typedef struct trace_rec {
    ps_trace trace;
    ps_gathers gathers;
    ps_rank_calls calls;          /* collectives of the dry run that recorded the trace */
    uint16_t *ops;                /* [n_ops] forward ops of the dry run that recorded the trace */
    int32_t n_ops, ops_capacity;
    /* id: number of the trace. If a step that was planned from this trace runs differently, its own trace replaces this
     * trace and keeps the id. Any other new trace has a new id. */
    int32_t id;
    /* used_at: value of ps_engine.clock at the last use, or 0 if the record was never used. A new trace replaces the
     * record with the lowest used_at. */
    int64_t used_at;
} trace_rec;

struct ps_engine {
    ps_ctx *ctx;
    const ps_step *step;          /* only step.c writes to the step */
    ps_chunks *chunks;
    ps_zero *zero;                /* NULL if there is only one process */
    ps_pipe_ranks *pipe_ranks;    /* the other stages of the pipeline, or NULL */
    ps_tp *tp;                    /* the tensor-parallel group, or NULL */
    partial_rec partial;
    /* summing_ties: true while ties_sum runs, so that gradients with param_rec.waits may become final */
    bool summing_ties;
    double *squares;              /* [n_params] scratch array for sums of squares */
    double *by_number;            /* [n_numbers] sums of squares, indexed by ps_param.number */
    int32_t n_numbers;
    /* sums: fp64 [n_params] sums of squares of the gradients; sums[0] is on the device and sums[1] on the host */
    ps_tensor *sums[2];
    int32_t device, host;
    param_rec *params;
    int32_t n_params, n_units, n_groups;
    unit_rec *units;
    int32_t *pending, n_pending;  /* complete units that wait for their update, oldest first */
    int32_t *order;               /* indices of all parameters, sorted by unit */
    /* first: [n_units + 1] The parameters of unit u are order[first[u]] to order[first[u + 1] - 1]. */
    int32_t *first;
    ps_update_group *groups;
    trace_rec traces[PS_ENGINE_TRACES];
    int32_t next_id;              /* id for the next new trace */
    int32_t step_trace;           /* id of the trace that this step should repeat, or -1 */
    int64_t clock;                /* incremented by each use of a trace */
};

int engine_get(ps_ctx *ctx, ps_engine **out);     /* returns PS_ESTATE if no engine is open */

/* -- engine.c */
/* Called after a backward. Marks complete gradients as final. */
int engine_backward_done(ps_engine *e);
/* Waits for all reductions in progress, and then runs the updates of the units in `pending`. */
int engine_gradients_whole(ps_engine *e);
int engine_make_final(ps_engine *e, param_rec *r);
/* Called when the gradients of a unit are complete. */
int engine_unit_ready(ps_engine *e, int32_t unit);
/* Stores the gradient of r. If `squares` is set, also stores the sum of the gradient's squares in e->sums. If `slot` is
 * set, moves the gradient to the slot of r. */
int engine_store(ps_engine *e, param_rec *r, bool slot, bool squares);
int engine_run(ps_ctx *ctx, int op, const void *attrs, int n, ps_tensor *const *in, ps_tensor **all);
int engine_fill_zero(ps_engine *e, ps_tensor *t);
/* Returns PS_ESTATE unless an action of this kind is running. */
int engine_within(const ps_engine *e, int kind, const char *what);
void engine_set_groups(ps_engine *e, const ps_update_group *groups);
/* Returns true if s is in a chunk or in a part (ZeRO). */
bool engine_holds(const ps_engine *e, const ps_storage *s);
int engine_drop_grads(ps_engine *e);              /* drops all gradients, and restores the values that they replaced */
/* Called after a dry run. Drops gradients and marks, but keeps the values. */
void engine_reset(ps_engine *e);

/* -- ties.c */
/* Called after all parameters have been added. Finds the first use of each shared tensor. Returns PS_EINVAL if a use
 * has no valid first use, or if a copy has no group of ranks. */
int ties_find(ps_engine *e);
/* Makes grad_ of each shared tensor point to the gradient of the tensor's use in virtual stage `vstage`. If a tensor
 * has no use in this virtual stage, or if vstage is -1, its grad_ points to the gradient of its first use. */
void ties_turn(ps_engine *e, int32_t vstage);
/* Called once per step. Sums the gradients of all uses and copies of each shared tensor, and makes the sums final. */
int ties_sum(ps_engine *e);
bool ties_any(const ps_engine *e);

/* -- partial.c */
/* Allocates the buffer. Called after all parameters have been added. */
int partial_make(ps_engine *e);
void partial_free(ps_engine *e);
/* Called once per step. Sums the PS_TP_PARTIAL gradients over the ranks, and then calls engine_unit_ready for the units
 * that contain them. */
int partial_sum(ps_engine *e);
bool partial_waits(const param_rec *r);           /* returns true if the gradient must still be summed */

/* -- trace.c */
/* Begins to record a step, and plans the step from trace `id`. If `id` is PS_TRACE_UNKNOWN, the step has no plan. */
int trace_begin(ps_engine *e, int32_t id);
int trace_end(ps_engine *e, int32_t *id);         /* see ps_step_end */
void trace_free(ps_engine *e);

/* -- step.c */
void step_suspend(ps_engine *e, bool on);         /* called when the script pauses or resumes */
void step_join(ps_engine *e, ps_step *step);
/* Called when the engine is closed. Abandons the step, and detaches it from the engine. */
void step_leave(ps_engine *e);
void step_give_back(const ps_step *step);         /* releases the reference of step_join; this may free the step */
#endif
