/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of the engine: step.c (the action that is due), engine.c (parameters, gradients, updates), norm.c
 * (squares of gradients), ties.c (parameters of several virtual stages), partial.c (gradients that are summed over
 * tensor-parallel ranks), trace.c (traces of steps, and forecasts), place.c (moves tensors into chunks), inspect.c
 * (chunks, tiers and waits, for scripts), rates.c (speeds of this machine), suspend.c (pausing the script).
 * The engine is the layer above the tape and the chunk manager. */
#ifndef PS_ENGINE_H
#define PS_ENGINE_H
#include "chunk/chunk.h"
#include "engine/zero_table.h"
#include "tensor/tensor.h"

enum { PS_ENGINE_TRACES = 8 };

/* A trained parameter. Its gradient is computed into a tensor of its own or into `place`. The gradient then becomes
 * final, may move into the parameter's slot (ps_action_how.slot), and is freed by the update. */
typedef struct param_rec {
    struct ps_engine *engine;
    ps_tensor *param, *master, *state[PS_MAX_STATES];
    ps_tensor *host[2 + PS_MAX_STATES];   /* views of param, master and states on the host; NULL if the host is the
                                           * compute device */
    ps_tensor *place, *host_place;   /* its gradient in a gradient chunk, or NULL; host_place: the same bytes, on the
                                      * host */
    ps_tensor *slot, *host_slot;  /* the bytes of `param` viewed as its gradient; NULL if the parameter is its own
                                   * master */
    ps_tensor *addend;            /* for PS_TP_PARTIAL: the parameter's section of partial_rec.sums, viewed in the
                                   * parameter's shape; else NULL */
    int32_t group, unit, vstage, number, tie, tp;   /* unit is -1 for a PS_TIE_USE */
    int32_t n_states;
    struct param_rec *first_use;  /* for PS_TIE_USE: the earlier use that has a unit; else NULL */
    ps_tensor *sum;               /* gradient of this use while the tensor's gradient is that of another use; else
                                   * NULL */
    int64_t t;                    /* number of updates so far */
    double square;                /* sum of squares of the stored gradient */
    double scale;                 /* factor that this step's update multiplies the gradient by */
    int32_t unread;               /* 0, or 1 + the index in `sums` of the sum of squares if it has not been read into
                                   * `square` yet */
    bool final, squared, in_slot, updated;
    bool waits;                   /* several virtual stages use the parameter, so its gradient is complete only when
                                   * all backwards are over */
    bool summed;                  /* for PS_TP_PARTIAL: the gradient has been summed over the ranks */
    bool had;                     /* the parameter had a gradient in this step when ranks last compared their
                                   * gradients, or before */
    bool owned;                   /* this rank holds the master and the states */
} param_rec;

typedef struct unit_rec {
    int32_t n, n_final, vstage;
    int32_t grad_chunk;           /* chunk that contains only gradients of this unit, or -1 */
    bool on_device, updated;
} unit_rec;

/* Buffer in which PS_TP_PARTIAL gradients are summed, fp32 on the compute device: first n marks, then the addends.
 * The mark of a parameter is 1 if this rank has a gradient for it. */
typedef struct partial_rec {
    ps_tensor *sums, *marks;      /* marks are the first n elements of sums; both NULL if this rank owns no such
                                   * gradient */
    float *values;                /* [n] copy of the marks on the host, after the sum */
    int32_t n;
    bool exchanged;               /* this step's sums over the ranks are complete */
} partial_rec;

typedef struct trace_rec {
    ps_trace trace;
    ps_gathers gathers;
    ps_rank_calls calls;          /* collectives of the dry run that made the trace */
    uint16_t *ops;                /* [n_ops] ops of the forward of that dry run */
    int32_t n_ops, ops_capacity;
    int32_t id;                   /* Id of the trace. If a step ran differently, its trace replaces this one under
                                   * the same id. If the record is reused for another trace, it gets a new id. */
    int64_t used_at;              /* clock at the last use, 0 if never used; the least recently used record is
                                   * replaced first */
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
    double *squares;              /* [n_params] scratch for sums of squares, while they are read from `sums` or
                                   * summed over ranks */
    double *by_number;            /* [n_numbers] sums of squares, by ps_param.number */
    int32_t n_numbers;
    ps_tensor *sums[2];           /* fp64 [n_params] sums of squares of gradients: [0] on the device, [1] on the host */
    int32_t device, host;
    param_rec *params;
    int32_t n_params, n_units, n_groups;
    unit_rec *units;
    int32_t *pending, n_pending;  /* units whose gradients are complete and that backward has not updated yet */
    int32_t *order;               /* indices of parameters, sorted by unit */
    int32_t *first;               /* [n_units + 1] unit u has the parameters order[first[u]] to order[first[u + 1] -
                                   * 1] */
    ps_update_group *groups;
    trace_rec traces[PS_ENGINE_TRACES];
    int32_t next_id;              /* id of the next new trace */
    int32_t step_trace;           /* trace that the present step should repeat, or -1 */
    int64_t clock;                /* counts uses of traces, for trace_rec.used_at */
};

int engine_get(ps_ctx *ctx, ps_engine **out);     /* PS_ESTATE if no engine is open */

/* -- engine.c */
int engine_backward_done(ps_engine *e);           /* called after a backward: marks complete gradients as final */
int engine_gradients_whole(ps_engine *e);         /* waits for the reductions under way, and performs the pending
                                                   * updates */
int engine_make_final(ps_engine *e, param_rec *r);
int engine_unit_ready(ps_engine *e, int32_t unit);   /* called when the unit's gradients are complete, so that
                                                      * backward may update the unit */
/* Stores a gradient. If `squares` is set, also stores its sum of squares in `sums`. If `slot` is set, moves the
 * gradient into its parameter's slot. */
int engine_store(ps_engine *e, param_rec *r, bool slot, bool squares);
int engine_run(ps_ctx *ctx, int op, const void *attrs, int n, ps_tensor *const *in, ps_tensor **all);
int engine_fill_zero(ps_engine *e, ps_tensor *t);
int engine_within(const ps_engine *e, int kind, const char *what);     /* PS_ESTATE: another action is under way */
void engine_set_groups(ps_engine *e, const ps_update_group *groups);
bool engine_holds(const ps_engine *e, const ps_storage *s);   /* returns true if s is in a chunk or a part */
int engine_drop_grads(ps_engine *e);              /* drops gradients, and restores from masters the values that they
                                                   * replaced; after an error some values are not restored */
void engine_reset(ps_engine *e);                  /* after a dry run: drops gradients and marks, but keeps values */

/* -- ties.c */
int ties_find(ps_engine *e);                      /* called when all parameters have been added. PS_EINVAL: a use is
                                                   * invalid */
/* Selects the gradient of each tensor with several uses: that of its use in virtual stage `vstage`, or of its first
 * use if vstage is -1. */
void ties_turn(ps_engine *e, int32_t vstage);
int ties_sum(ps_engine *e);                       /* once per step: sums the gradients of uses and copies, and makes
                                                   * the sums final */
bool ties_any(const ps_engine *e);

/* -- partial.c */
int partial_make(ps_engine *e);                   /* makes the buffer when all parameters have been added */
void partial_free(ps_engine *e);
/* Sums the gradients over the ranks, once per step. Units that waited for the sums can then be updated. */
int partial_sum(ps_engine *e);
bool partial_waits(const param_rec *r);           /* returns true if the parameter's gradient has not been summed yet */

/* -- trace.c */
/* Begins to record the step's uses, and plans the step from trace `id`. For PS_TRACE_UNKNOWN there is no plan. */
int trace_begin(ps_engine *e, int32_t id);
int trace_end(ps_engine *e, int32_t *id);         /* as ps_step_end */
void trace_free(ps_engine *e);

/* -- step.c */
void step_suspend(ps_engine *e, bool on);         /* called when the script pauses or resumes */
void step_join(ps_engine *e, ps_step *step);
void step_leave(ps_engine *e);                    /* called when the engine is closed: abandons the step, and
                                                   * detaches the step from the engine */
void step_give_back(const ps_step *step);         /* releases the reference that step_join took; the script may
                                                   * already have released its own */
#endif
