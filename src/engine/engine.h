/* SPDX-License-Identifier: BSD-3-Clause
 * Internals of the engine, the layer above the tape and the chunk manager. Its files:
 *   engine.c    parameters, gradients and updates
 *   step.c      the order of a step's actions
 *   norm.c      the norm of the gradients
 *   ties.c      parameters that several virtual stages share
 *   partial.c   gradients that are summed over tensor-parallel ranks
 *   trace.c     traces of steps, and forecasts from them
 *   place.c     moves tensors into chunks
 *   inspect.c   chunks, tiers and waits, for scripts
 *   rates.c     measures the speed of this machine
 *   suspend.c   pauses the script */
#ifndef PS_ENGINE_H
#define PS_ENGINE_H
#include "chunk/chunk.h"
#include "engine/zero_table.h"
#include "tensor/tensor.h"

enum { PS_ENGINE_TRACES = 8 };

/* A trained parameter, with its gradient. Backward computes the gradient into a new tensor or into `place`. A final
 * gradient may move into the parameter's own bytes, its slot (ps_action_how.slot). The update frees it. */
typedef struct param_rec {
    struct ps_engine *engine;
    ps_tensor *param, *master, *state[PS_MAX_STATES];
    ps_tensor *host[2 + PS_MAX_STATES];   /* param, master, states viewed on the host; NULL if the host computes */
    ps_tensor *place, *host_place;   /* gradient in a gradient chunk, or NULL; host_place views it on the host */
    ps_tensor *slot, *host_slot;  /* views param's bytes as its gradient; NULL if the value must not be overwritten */
    ps_tensor *addend;            /* PS_TP_PARTIAL: its section of partial_rec.sums, in param's shape; else NULL */
    int32_t group, unit, vstage, number, tie, tp;   /* unit is -1 for a PS_TIE_USE */
    int32_t n_states;
    struct param_rec *first_use;  /* PS_TIE_USE: the earlier use, which has a unit; else NULL */
    ps_tensor *sum;               /* gradient of this use while param->grad_ belongs to another use; else NULL */
    int64_t t;                    /* number of updates so far */
    double square;                /* sum of squares of the stored gradient */
    double scale;                 /* factor for the gradient in this step's update */
    int32_t unread;               /* 1 + the index in `sums` from which `square` must still be read; 0 if read */
    uint32_t version;             /* version of the gradient's storage when its squares were summed */
    bool final, squared, in_slot, updated;
    bool waits;                   /* several virtual stages use the parameter: final after all backwards */
    bool summed;                  /* PS_TP_PARTIAL: the gradient is summed over the ranks */
    bool had;                     /* had a gradient in this step when engine_unit_had_grad last looked */
    bool owned;                   /* this rank holds the master and the states */
} param_rec;

typedef struct unit_rec {
    int32_t n, n_final, vstage;
    int32_t grad_chunk;           /* chunk that holds exactly this unit's gradients, or -1 */
    bool on_device, updated;
} unit_rec;

/* Buffer that sums PS_TP_PARTIAL gradients over the ranks: fp32, on the compute device. It begins with n marks, and
 * the gradients follow. A parameter's mark is 1 if this rank has a gradient for it. */
typedef struct partial_rec {
    ps_tensor *sums, *marks;      /* marks: first n elements of sums. Both are NULL if n is 0 */
    float *values;                /* [n] the marks on the host */
    int32_t n;
    bool exchanged;               /* this step's sums are complete */
} partial_rec;

typedef struct trace_rec {
    ps_trace trace;
    ps_gathers gathers;
    ps_rank_calls calls;          /* collectives of the dry run that made the trace */
    uint16_t *ops;                /* [n_ops] forward ops of that dry run */
    int32_t n_ops, ops_capacity;
    int32_t id;                   /* stays if a step runs differently and replaces the trace, else new */
    int64_t used_at;              /* clock at the last use, 0 if never; the oldest record is replaced first */
} trace_rec;

struct ps_engine {
    ps_ctx *ctx;
    const ps_step *step;          /* only step.c writes to it */
    ps_chunks *chunks;
    ps_zero *zero;                /* NULL if there is one process */
    ps_pipe_ranks *pipe_ranks;    /* the other stages of a pipeline, or NULL */
    ps_tp *tp;                    /* the tensor-parallel group, or NULL */
    partial_rec partial;
    bool summing_ties;            /* ties_sum is running: gradients with param_rec.waits may become final */
    double *squares;              /* [n_params] scratch for sums of squares */
    double *by_number;            /* [n_numbers] sums of squares, indexed by ps_param.number */
    int32_t n_numbers;
    ps_tensor *sums[2];           /* fp64 [n_params] sums of squares of gradients: [0] on the device, [1] on the host */
    int32_t device, host;
    param_rec *params;
    int32_t n_params, n_units, n_groups;
    unit_rec *units;
    int32_t *pending, n_pending;  /* complete units that wait for their update, oldest first */
    int32_t *order;               /* indices of parameters, sorted by unit */
    int32_t *first;               /* [n_units + 1] unit u has parameters order[first[u]] to order[first[u + 1] - 1] */
    ps_update_group *groups;
    trace_rec traces[PS_ENGINE_TRACES];
    int32_t next_id;              /* id of the next new trace */
    int32_t step_trace;           /* trace that this step should repeat, or -1 */
    int64_t clock;                /* rises by 1 with each use of a trace */
};

int engine_get(ps_ctx *ctx, ps_engine **out);     /* PS_ESTATE if no engine is open */

/* -- engine.c */
int engine_backward_done(ps_engine *e);           /* called after a backward: marks complete gradients as final */
int engine_gradients_whole(ps_engine *e);         /* waits for all reductions, then runs pending updates */
int engine_make_final(ps_engine *e, param_rec *r);
int engine_unit_ready(ps_engine *e, int32_t unit);   /* called when a unit's gradients are complete */
/* Stores a gradient. With `squares`, also stores its sum of squares in `sums`. With `slot`, moves the gradient into
 * its parameter's slot. */
int engine_store(ps_engine *e, param_rec *r, bool slot, bool squares);
int engine_run(ps_ctx *ctx, int op, const void *attrs, int n, ps_tensor *const *in, ps_tensor **all);
int engine_fill_zero(ps_engine *e, ps_tensor *t);
int engine_within(const ps_engine *e, int kind, const char *what);     /* PS_ESTATE: another action or none runs */
void engine_set_groups(ps_engine *e, const ps_update_group *groups);
bool engine_holds(const ps_engine *e, const ps_storage *s);   /* whether s is in a chunk or in a part (ZeRO) */
int engine_drop_grads(ps_engine *e);              /* drops gradients, and restores the values that they replaced */
void engine_reset(ps_engine *e);                  /* after a dry run: drops gradients and marks, keeps values */

/* -- ties.c */
int ties_find(ps_engine *e);                      /* after all parameters are added; PS_EINVAL: an invalid use */
/* Points grad_ of each shared tensor to the gradient of its use in virtual stage `vstage`. Other shared tensors, or
 * all if vstage is -1, get the gradient of their first use. */
void ties_turn(ps_engine *e, int32_t vstage);
int ties_sum(ps_engine *e);                       /* once per step: makes the sums over uses and copies final */
bool ties_any(const ps_engine *e);

/* -- partial.c */
int partial_make(ps_engine *e);                   /* allocates the buffer, after all parameters are added */
void partial_free(ps_engine *e);
/* Sums the gradients over the ranks, once per step. Units that waited for the sums are then ready for their update. */
int partial_sum(ps_engine *e);
bool partial_waits(const param_rec *r);           /* whether the gradient must still be summed */

/* -- trace.c */
/* Begins to record a step, and plans it from trace `id`. With PS_TRACE_UNKNOWN the step has no plan. */
int trace_begin(ps_engine *e, int32_t id);
int trace_end(ps_engine *e, int32_t *id);         /* like ps_step_end */
void trace_free(ps_engine *e);

/* -- step.c */
void step_suspend(ps_engine *e, bool on);         /* called when the script pauses or resumes */
void step_join(ps_engine *e, ps_step *step);
void step_leave(ps_engine *e);                    /* for closing: abandons the step, and detaches it */
void step_give_back(const ps_step *step);         /* releases step_join's reference, which may be the last */
#endif
