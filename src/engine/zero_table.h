/* SPDX-License-Identifier: BSD-3-Clause
 * The interface between the engine and the layers above it that communicate with other ranks. The engine calls ZeRO
 * (src/zero) through the table that ps_engine_shard sets, the other stages of a pipeline (pipe/ranks.c) through the
 * table of ps_engine_stages, and the tensor-parallel group (tensor_parallel/ranks.c) through the table of
 * ps_engine_tensor_parallel. These layers call the functions of engine.c and place.c that are declared below. Neither
 * side accesses the other's records. An engine of one process has no table. */
#ifndef PS_ZERO_TABLE_H
#define PS_ZERO_TABLE_H
#include "chunk/chunk.h"
#include "tensor/tensor.h"

/* One gather of a step. pass: number of the action, counted from the start of the step. uses: number of reads of the
 * stripe in that action. */
typedef struct ps_gather { int32_t stripe, pass, uses; } ps_gather;
typedef struct ps_gathers { ps_gather *list; int32_t n, capacity; } ps_gathers;

typedef struct ps_zero ps_zero;

typedef struct ps_zero_table {
    void (*close)(ps_zero *z);             /* called before the chunks are closed; storages in parts lose their bytes */
    /* -- memory */
    bool (*holds)(const ps_zero *z, const ps_storage *s);       /* returns true if s is in a part */
    int32_t (*chunk)(const ps_zero *z, const ps_storage *s);    /* chunk of s on this rank, or -1 */
    /* While this is on, only this rank runs ops. They read bytes that this rank owns, and nothing is gathered. */
    void (*alone)(ps_zero *z, bool on);
    double (*waited)(const ps_zero *z);    /* seconds that this rank has waited for other ranks */
    int64_t (*comes)(const ps_zero *z, int32_t stripe);    /* bytes that a gather of the stripe receives from other
                                                            * ranks */
    /* -- steps */
    void (*op_begins)(ps_zero *z);         /* called when an op begins; also notifies the chunk manager */
    void (*op_failed)(ps_zero *z);         /* called when the latest op failed, so that its reads do not count */
    void (*pass)(ps_zero *z);              /* called when a pass begins; step->pass is its number */
    void (*step_begin)(ps_zero *z, const ps_gathers *expected);  /* expected: lent, or NULL if unknown */
    const ps_gathers *(*step_end)(ps_zero *z);      /* recorded gathers, lent until the next step_begin */
    /* -- gradients */
    /* Allocates records of `n` units (n may be 0), and drops the records of earlier units. */
    int (*units)(ps_zero *z, int32_t n);
    int (*before_slot)(ps_zero *z, int32_t unit);   /* called before a gradient is written over the unit's values */
    int (*unit_final)(ps_zero *z, int32_t unit);    /* called when all gradients of the unit are final on this rank */
    int (*all_final)(ps_zero *z);          /* called when the gradients of all units are final; ends the reductions
                                            * under way */
    void (*unit_not_final)(ps_zero *z, int32_t unit);   /* makes the stripe of the unit count its final units from 0
                                                         * again */
    /* Sums values [n] over the ranks. Each rank passes the values that it owns, and 0 for the others. At ZeRO stage
     * 0 every rank owns all values, which do not change. */
    int (*sum_owned)(ps_zero *z, double *values, int32_t n);
    void (*forget)(ps_zero *z);            /* called when values may have changed: later reads gather again, */
                                           /* and reductions under way end without effect */
} ps_zero_table;

struct ps_zero {
    const ps_zero_table *table;
    int stage;                             /* 0 to 3; determines which state has one owner (ps_engine_shard) */
    int ranks;                             /* number of ranks that train the same parameters */
    bool once;                             /* at every stage, gradients are summed over the ranks once per step */
};

/* The other stages of a pipeline. */
typedef struct ps_pipe_ranks ps_pipe_ranks;
typedef struct ps_pipe_ranks_table {
    void (*close)(ps_pipe_ranks *s);
    int (*sum)(ps_pipe_ranks *s, double *values, int32_t n); /* sums over the stages; a value is nonzero in at most
                                                              * one stage */
    bool (*has_copies)(const ps_pipe_ranks *s);
    int (*sum_copies)(ps_pipe_ranks *s, ps_tensor *t);          /* sums t over the ranks with copies, in rank order */
    bool (*counts)(const ps_pipe_ranks *s);                     /* returns true if the norm counts this rank's copies */
} ps_pipe_ranks_table;
struct ps_pipe_ranks { const ps_pipe_ranks_table *table; };

/* The tensor-parallel group, whose ranks each have a shard of the same layers. In a dry run the calls are recorded
 * and change nothing. */
typedef struct ps_tp ps_tp;
typedef struct ps_tp_table {
    void (*close)(ps_tp *t);
    int (*sum)(ps_tp *t, double *values, int32_t n);        /* sums values [n] over the ranks, in rank order */
    /* Like sum, for a tensor. rc: result of this rank's preparation; a failure is reported to the other ranks. */
    int (*sum_tensor)(ps_tp *t, ps_tensor *sums, int rc);
} ps_tp_table;
struct ps_tp {
    const ps_tp_table *table;
    int rank, ranks;
};

/* -- engine.c and place.c, for ZeRO, pipelines and tensor parallelism */
typedef struct engine_base {
    ps_engine *e;
    const ps_step *step;
    ps_chunks *chunks;
    ps_zero *zero;                         /* NULL if there is one process */
    int device, host;
} engine_base;
int engine_base_get(ps_ctx *ctx, engine_base *out);         /* PS_ESTATE if no engine is open */
/* Returns the collectives of the dry run that made a trace, or NULL if there is no such trace. */
const ps_rank_calls *engine_calls(const ps_engine *e, int32_t trace);
/* Makes the engine call z, and close it at the end. */
void engine_zero_set(ps_engine *e, ps_zero *z);
/* PS_ESTATE: the engine already has stages or parameters. */
int engine_stages_set(ps_engine *e, ps_pipe_ranks *stages, int32_t n_numbers);
int engine_tp_set(ps_engine *e, ps_tp *tp);                 /* the same */
int engine_check_device(const ps_engine *e, int device);    /* PS_EINVAL: the device is not one of the engine's two
                                                             * devices */
int engine_check_whole(const ps_tensor *t);                 /* PS_EINVAL: the tensor does not cover its whole storage */
/* Computes shape, type and bytes of a tensor like another one, on a device of the engine. */
int engine_meta_like(const ps_engine *e, const ps_tensor *like, int dtype, int device, ps_meta *meta, int64_t *nbytes);
/* Returns 1 if parameter i of a unit has had a gradient in this step, 0 if not, and -1 if the unit has no parameter
 * i. */
int engine_unit_had_grad(ps_engine *e, int32_t unit, int32_t i);
int32_t engine_unit_vstage(const ps_engine *e, int32_t unit);
/* Prepares the bytes of a unit's gradients for the sum. If the owner sums the micro-batches, this rank contributes
 * zeros for a parameter without a gradient. */
int engine_unit_reduces(ps_engine *e, int32_t unit);
/* Called when a unit's gradients have been summed: owners keep the sums, and other ranks drop their gradients. */
int engine_unit_reduced(ps_engine *e, int32_t unit);
#endif
