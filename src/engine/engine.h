/* SPDX-License-Identifier: BSD-3-Clause
 * What the files of the engine share: step.c (which action is due), engine.c (parameters, gradients, updates), norm.c
 * (squares of gradients), ties.c (parameters of several virtual stages), trace.c (what a step used, and how the next
 * one will go), place.c (tensors into chunks), inspect.c (what scripts look at).
 * Above the tape and the chunk manager. */
#ifndef PS_ENGINE_H
#define PS_ENGINE_H
#include "chunk/chunk.h"
#include "engine/zero_table.h"
#include "tensor/tensor.h"

enum { PS_ENGINE_TRACES = 8 };

/* One trained parameter. The gradient is, in this order of time: nowhere; in a tensor of its own, or in `place`; final;
 * in its parameter's slot (ps_action_how.slot); used up by the update. */
typedef struct param_rec {
    struct ps_engine *engine;
    ps_tensor *param, *master, *m, *v;
    ps_tensor *host[4];           /* param, master, m, v for the host; NULL where the compute device is the host */
    ps_tensor *place, *host_place;   /* in a gradient chunk, or NULL; the same for the host, where that is apart */
    ps_tensor *slot, *host_slot;  /* param's bytes seen as its gradient; NULL while the parameter is its own master */
    int32_t group, unit, vstage, number, tie;   /* unit: -1 of a PS_TIE_USE */
    struct param_rec *first_use;  /* of a PS_TIE_USE; else NULL */
    int64_t t;                    /* updates so far */
    double square;                /* sum of squares of the gradient, when it was stored; */
    int32_t unread;               /* if not 0, it is in sums[unread - 1] still */
    bool final, squared, in_slot, updated;
    bool waits;                   /* tied: its gradient is whole when all backwards are over, not before */
    bool had;                     /* a gradient, in this step, as far as ranks have compared */
    bool owned;                   /* its state lies on this rank */
} param_rec;

typedef struct unit_rec {
    int32_t n, n_final, vstage;
    bool on_device, updated;
} unit_rec;

typedef struct trace_rec {
    ps_trace trace;
    ps_gathers gathers;
    int32_t id;                   /* given out; never again once the record is used for another trace */
    int64_t used_at;              /* for reusing the oldest; 0: never used */
} trace_rec;

struct ps_engine {
    ps_ctx *ctx;
    const ps_step *step;          /* step.c alone writes it */
    ps_chunks *chunks;
    ps_zero *zero;                /* of several ranks; or NULL: one process */
    ps_stages *stages;            /* the other stages of a pipeline, or NULL */
    bool settling;                /* tied gradients are being added up */
    double *squares;              /* [n_params] what ranks tell each other, and what is read of sums */
    double *by_number;            /* [n_numbers] squares in the order of the model */
    int32_t n_numbers;
    ps_tensor *sums[2];           /* fp64 [n_params] where gradients on the device, and on a host apart, leave theirs */
    int32_t device, host;
    param_rec *params;
    int32_t n_params, n_units, n_groups;
    unit_rec *units;
    int32_t *pending, n_pending;  /* units whose gradients are whole, and which backward updates */
    int32_t *order;               /* params sorted by unit, */
    int32_t *first;               /* [n_units + 1] those of unit u are order[first[u]] .. */
    ps_adam_group *groups;
    trace_rec traces[PS_ENGINE_TRACES];
    int32_t next_id;              /* of traces */
    int32_t step_trace;           /* id of the one this step is expected to follow, or -1 */
    int64_t clock;
};

int engine_get(ps_ctx *ctx, ps_engine **out);     /* PS_ESTATE when none is open */

/* -- engine.c */
int engine_backward_done(ps_engine *e);           /* a walk is over: what nothing will add to any more is final */
int engine_gradients_whole(ps_engine *e);         /* sums of ranks, and updates that wait, are ended */
int engine_make_final(ps_engine *e, param_rec *r);
/* The gradient's squares go to its place in `sums` when `squares`, and it to its parameter's slot when `slot`. */
int engine_store(ps_engine *e, param_rec *r, bool slot, bool squares);
int engine_run(ps_ctx *ctx, int op, const void *attrs, int n, ps_tensor *const *in, ps_tensor **all);
int engine_fill_zero(ps_engine *e, ps_tensor *t);
int engine_within(const ps_engine *e, int kind, const char *what);     /* PS_ESTATE: another action is under way */
void engine_set_groups(ps_engine *e, const ps_adam_group *groups);
bool engine_holds(const ps_engine *e, const ps_storage *s);   /* it lies in a chunk, or in a part */
int engine_drop_grads(ps_engine *e);              /* values come back from masters; an error: some gradients stayed */
void engine_reset(ps_engine *e);                  /* after a dry run: gradients and marks go, values stay */

/* -- ties.c */
int ties_find(ps_engine *e);                      /* once all parameters are taken; PS_EINVAL: one does not fit */
int ties_settle(ps_engine *e);                    /* adds the uses and copies up, once a step: then they are final */
bool ties_any(const ps_engine *e);

/* -- trace.c */
/* Expects a step to go as trace `id`, and notes what happens; _UNKNOWN: notes only. */
int trace_begin(ps_engine *e, int32_t id);
int trace_end(ps_engine *e, int32_t *id);         /* as ps_step_end */
void trace_free(ps_engine *e);

/* -- step.c */
void step_join(ps_engine *e, ps_step *step);
void step_leave(ps_engine *e);                    /* the engine ends: the step is given up, and nobody's */
#endif
