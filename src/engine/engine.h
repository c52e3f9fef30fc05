/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of the engine: step.c (the action that is due), engine.c (parameters, gradients, updates), norm.c
 * (squares of gradients), ties.c (parameters of several virtual stages), partial.c (gradients of which tensor-parallel
 * ranks have addends), trace.c (traces of steps, and forecasts),
 * place.c (tensors into chunks), inspect.c (chunks, tiers and waits for scripts), rates.c (speeds of this machine),
 * suspend.c (a script that is paused).
 * The engine stands above the tape and the chunk manager. */
#ifndef PS_ENGINE_H
#define PS_ENGINE_H
#include "chunk/chunk.h"
#include "engine/zero_table.h"
#include "tensor/tensor.h"

enum { PS_ENGINE_TRACES = 8 };

/* One trained parameter. Its gradient is made in a tensor of its own or in `place`, becomes final, may move into the
 * parameter's slot (ps_action_how.slot), and goes with the update. */
typedef struct param_rec {
    struct ps_engine *engine;
    ps_tensor *param, *master, *m, *v;
    ps_tensor *host[4];           /* param, master, m, v for the host; NULL where the compute device is the host */
    ps_tensor *place, *host_place;   /* its gradient in a gradient chunk, or NULL; the same bytes for the host */
    ps_tensor *slot, *host_slot;  /* param's bytes seen as its gradient; NULL where the parameter is its own master */
    ps_tensor *addend;            /* of PS_TP_PARTIAL: its part of partial_rec.sums, in its shape; else NULL */
    int32_t group, unit, vstage, number, tie, tp;   /* unit: -1 of a PS_TIE_USE */
    struct param_rec *first_use;  /* of a PS_TIE_USE: the use before it that has a unit; else NULL */
    ps_tensor *sum;               /* its gradient while the tensor has that of another use; else NULL */
    int64_t t;                    /* updates so far */
    double square;                /* sum of squares of the gradient as it was stored */
    double scale;                 /* a factor on the gradient in this step's update */
    int32_t unread;               /* not 0: that sum is still in sums[unread - 1] alone */
    bool final, squared, in_slot, updated;
    bool waits;                   /* several virtual stages use it: its gradient is whole when all backwards are over */
    bool summed;                  /* of PS_TP_PARTIAL: its gradient is the sum over the ranks */
    bool had;                     /* it has had a gradient in this step, as of the last comparison between ranks */
    bool owned;                   /* master, m and v lie on this rank */
} param_rec;

typedef struct unit_rec {
    int32_t n, n_final, vstage;
    int32_t grad_chunk;           /* the chunk in which its gradients, and no others', have their places; or -1 */
    bool on_device, updated;
} unit_rec;

/* Where gradients of PS_TP_PARTIAL are added up: fp32 [n marks, then the addends], on the device that computes. A mark
 * is 1 where this rank has a gradient. */
typedef struct partial_rec {
    ps_tensor *sums, *marks;      /* marks: the first n of sums. NULL: this rank owns no such gradient */
    float *values;                /* [n] of marks, for the host */
    int32_t n;
    bool exchanged;               /* the sums of this step are there */
} partial_rec;

typedef struct trace_rec {
    ps_trace trace;
    ps_gathers gathers;
    ps_rank_calls calls;          /* collectives of the dry run that it was made by */
    int32_t id;                   /* kept where a step that went otherwise replaces the trace; new in a reused record */
    int64_t used_at;              /* clock of the last use: the record used longest ago is reused; 0: never used */
} trace_rec;

struct ps_engine {
    ps_ctx *ctx;
    const ps_step *step;          /* step.c alone writes it */
    ps_chunks *chunks;
    ps_zero *zero;                /* NULL: one process */
    ps_stages *stages;            /* the other stages of a pipeline, or NULL */
    ps_tp *tp;                    /* the ranks of the same layers, or NULL */
    partial_rec partial;
    bool settling;                /* gradients that wait (param_rec.waits) become final now */
    double *squares;              /* [n_params] buffer for sums of squares, to read `sums` and for ranks to share */
    double *by_number;            /* [n_numbers] sums of squares by ps_param.number */
    int32_t n_numbers;
    ps_tensor *sums[2];           /* fp64 [n_params] sums of squares of gradients: [0] on the device, [1] the host */
    int32_t device, host;
    param_rec *params;
    int32_t n_params, n_units, n_groups;
    unit_rec *units;
    int32_t *pending, n_pending;  /* units whose gradients are whole and which backward has still to update */
    int32_t *order;               /* indices of params, sorted by unit */
    int32_t *first;               /* [n_units + 1] parameters of unit u: order[first[u]] to order[first[u + 1] - 1] */
    ps_update_group *groups;
    trace_rec traces[PS_ENGINE_TRACES];
    int32_t next_id;              /* of traces */
    int32_t step_trace;           /* id of the one this step is expected to follow, or -1 */
    int64_t clock;                /* of trace_rec.used_at */
};

int engine_get(ps_ctx *ctx, ps_engine **out);     /* PS_ESTATE when none is open */

/* -- engine.c */
int engine_backward_done(ps_engine *e);           /* a backward is over: gradients that are whole here are final */
int engine_gradients_whole(ps_engine *e);         /* ends reductions under way, and does the updates that wait */
int engine_make_final(ps_engine *e, param_rec *r);
int engine_unit_ready(ps_engine *e, int32_t unit);   /* its gradients are whole: backward may update it */
/* squares: sums the gradient's squares into its element of `sums`. slot: moves it into its parameter's slot. */
int engine_store(ps_engine *e, param_rec *r, bool slot, bool squares);
int engine_run(ps_ctx *ctx, int op, const void *attrs, int n, ps_tensor *const *in, ps_tensor **all);
int engine_fill_zero(ps_engine *e, ps_tensor *t);
int engine_within(const ps_engine *e, int kind, const char *what);     /* PS_ESTATE: another action is under way */
void engine_set_groups(ps_engine *e, const ps_update_group *groups);
bool engine_holds(const ps_engine *e, const ps_storage *s);   /* it lies in a chunk, or in a part */
int engine_drop_grads(ps_engine *e);              /* restores values from masters; an error: some gradients stayed */
void engine_reset(ps_engine *e);                  /* after a dry run: gradients and marks go, values stay */

/* -- ties.c */
int ties_find(ps_engine *e);                      /* once all parameters are taken; PS_EINVAL: one does not fit */
/* Tensors with several uses have the gradients of this virtual stage's; those of their first uses: -1 */
void ties_turn(ps_engine *e, int32_t vstage);
int ties_settle(ps_engine *e);                    /* adds up uses and copies, once a step; their sums are then final */
bool ties_any(const ps_engine *e);

/* -- partial.c */
int partial_make(ps_engine *e);                   /* once all parameters are taken */
void partial_free(ps_engine *e);
/* Adds the gradients up, once a step. Units that waited for it may be updated. */
int partial_settle(ps_engine *e);
bool partial_waits(const param_rec *r);           /* its gradient is still an addend */

/* -- trace.c */
/* Notes the step's uses, and plans it to go as trace `id`. PS_TRACE_UNKNOWN: no plan. */
int trace_begin(ps_engine *e, int32_t id);
int trace_end(ps_engine *e, int32_t *id);         /* as ps_step_end */
void trace_free(ps_engine *e);

/* -- step.c */
void step_suspend(ps_engine *e, bool on);         /* the script is paused */
void step_join(ps_engine *e, ps_step *step);
void step_leave(ps_engine *e);                    /* the engine ends: the step is given up, and has no engine */
void step_give_back(const ps_step *step);         /* what step_join took: the script may have let go of it before */
#endif
