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

/* One gather of a step. pass: number of the action that gathered, counted from the start of the step. uses: number
 * of reads of the stripe in this action. */
typedef struct ps_gather { int32_t stripe, pass, uses; } ps_gather;
typedef struct ps_gathers { ps_gather *list; int32_t n, capacity; } ps_gathers;

typedef struct ps_zero ps_zero;

typedef struct ps_zero_table {
    void (*close)(ps_zero *z);             /* called before the chunks are closed; storages in parts lose their bytes */
    /* -- memory */
    bool (*holds)(const ps_zero *z, const ps_storage *s);       /* returns true if s is in a part */
    int32_t (*chunk)(const ps_zero *z, const ps_storage *s);    /* chunk of s on this rank, or -1 */
    /* While this is on, only this rank runs ops. The ops may read only bytes that this rank owns; nothing is
     * gathered. */
    void (*alone)(ps_zero *z, bool on);
    double (*waited)(const ps_zero *z);    /* seconds that this rank has waited for other ranks */
    int64_t (*comes)(const ps_zero *z, int32_t stripe);    /* bytes that a gather of the stripe receives from other
                                                            * ranks */
    /* -- steps */
    void (*op_begins)(ps_zero *z);         /* called when an op begins; also calls the chunk manager */
    void (*op_failed)(ps_zero *z);         /* called when the latest op failed; discards its reads */
    void (*pass)(ps_zero *z);              /* called when a pass begins; step->pass is its number */
    void (*step_begin)(ps_zero *z, const ps_gathers *expected);  /* expected: gathers that the step should repeat
                                                                  * (lent), or NULL if unknown */
    const ps_gathers *(*step_end)(ps_zero *z);      /* returns the step's gathers, lent until the next step_begin */
    /* -- gradients */
    /* Allocates records of `n` units (n may be 0), and drops the records of earlier units. */
    int (*units)(ps_zero *z, int32_t n);
    int (*before_slot)(ps_zero *z, int32_t unit);   /* called before a gradient is written over the unit's values */
    int (*unit_final)(ps_zero *z, int32_t unit);    /* called when all gradients of the unit are final on this rank */
    int (*all_final)(ps_zero *z);          /* called when the gradients of all units are final; waits for the
                                            * reductions under way */
    void (*unit_not_final)(ps_zero *z, int32_t unit);   /* resets the number of final units of the unit's stripe */
    /* Sums values [n] over the ranks. Each rank passes the values that it owns, and 0 for the others. At ZeRO stage
     * 0 every rank owns all values, so they do not change. */
    int (*sum_owned)(ps_zero *z, double *values, int32_t n);
    void (*forget)(ps_zero *z);            /* called when values may have changed: later reads gather again, */
                                           /* and the results of reductions under way are discarded */
} ps_zero_table;

struct ps_zero {
    const ps_zero_table *table;
    int stage;                             /* ZeRO stage, 0 to 3: determines which states have one owner
                                            * (ps_engine_shard) */
    int ranks;                             /* number of ranks that train the same parameters */
    bool once;                             /* gradients are summed over the ranks once per step, at every stage */
};

/* The other stages of a pipeline. */
typedef struct ps_pipe_ranks ps_pipe_ranks;
typedef struct ps_pipe_ranks_table {
    void (*close)(ps_pipe_ranks *s);
    int (*sum)(ps_pipe_ranks *s, double *values, int32_t n); /* sums over the stages; each value is nonzero in at
                                                              * most one stage */
    bool (*has_copies)(const ps_pipe_ranks *s);
    int (*sum_copies)(ps_pipe_ranks *s, ps_tensor *t);          /* sums t over the ranks that have copies, in rank
                                                                 * order */
    bool (*counts)(const ps_pipe_ranks *s);                     /* returns true if the norm includes this rank's
                                                                 * copies */
} ps_pipe_ranks_table;
struct ps_pipe_ranks { const ps_pipe_ranks_table *table; };

/* The tensor-parallel group: its ranks hold shards of the same layers. In a dry run the calls are only recorded. */
typedef struct ps_tp ps_tp;
typedef struct ps_tp_table {
    void (*close)(ps_tp *t);
    int (*sum)(ps_tp *t, double *values, int32_t n);        /* sums values [n] over the ranks, in rank order */
    /* Like sum, for a tensor. rc: result of this rank's preparation. If it is an error, the other ranks get the
     * error. */
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
/* Returns the collectives that the dry run of a trace recorded, or NULL if there is no such trace. */
const ps_rank_calls *engine_calls(const ps_engine *e, int32_t trace);
/* Connects ZeRO to the engine, which calls z and closes it at the end. */
void engine_zero_set(ps_engine *e, ps_zero *z);
/* Connects the pipeline's stages to the engine. PS_ESTATE: the engine already has stages or parameters. */
int engine_stages_set(ps_engine *e, ps_pipe_ranks *stages, int32_t n_numbers);
int engine_tp_set(ps_engine *e, ps_tp *tp);                 /* the same */
int engine_check_device(const ps_engine *e, int device);    /* PS_EINVAL: the device is not one of the engine's two
                                                             * devices */
int engine_check_whole(const ps_tensor *t);                 /* PS_EINVAL: the tensor does not cover its whole storage */
/* Computes the shape, type and bytes of a tensor like `like`, on a device of the engine. */
int engine_meta_like(const ps_engine *e, const ps_tensor *like, int dtype, int device, ps_meta *meta, int64_t *nbytes);
/* Returns 1 if parameter i of a unit has had a gradient in this step, and 0 if it has not. Returns -1 if the unit
 * has no parameter i. */
int engine_unit_had_grad(ps_engine *e, int32_t unit, int32_t i);
int32_t engine_unit_vstage(const ps_engine *e, int32_t unit);
/* Prepares the bytes of a unit's gradients for the sum over ranks. If owners sum the micro-batches, this rank
 * contributes zeros for each parameter without a gradient. */
int engine_unit_reduces(ps_engine *e, int32_t unit);
/* Called when a unit's gradients have been summed: owners keep the sums, and other ranks drop their gradients. */
int engine_unit_reduced(ps_engine *e, int32_t unit);
#endif
