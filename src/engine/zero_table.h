/* SPDX-License-Identifier: BSD-3-Clause
 * This header is the interface between the engine and three layers that communicate with other ranks. These layers are
 * above the engine, so the engine calls them through tables. If there is only one process, the engine has no tables:
 *   ps_zero_table          ZeRO (src/zero), set by ps_engine_shard
 *   ps_pipe_ranks_table    other pipeline stages (pipe/ranks.c), set by ps_engine_stages
 *   ps_tp_table            tensor-parallel group (tensor_parallel/ranks.c), set by ps_engine_tensor_parallel
 * The layers call the functions at the end of this header. Neither side accesses the records of the other side. */
#ifndef PS_ZERO_TABLE_H
#define PS_ZERO_TABLE_H
#include "chunk/chunk.h"
#include "tensor/tensor.h"

/* One gather of a step. The action with the sequence number `pass` gathered the stripe, and read it `uses` times. */
typedef struct ps_gather { int32_t stripe, pass, uses; } ps_gather;
typedef struct ps_gathers { ps_gather *list; int32_t n, capacity; } ps_gathers;

typedef struct ps_zero ps_zero;

typedef struct ps_zero_table {
    /* Called before the chunks are closed. Frees the parts, including the bytes of the storages that are in a part. */
    void (*close)(ps_zero *z);
    /* -- memory */
    bool (*holds)(const ps_zero *z, const ps_storage *s);       /* returns true if s is in a part */
    int32_t (*chunk)(const ps_zero *z, const ps_storage *s);    /* returns the chunk of s on this rank, or -1 */
    /* Switches a mode on or off. In this mode, only this rank runs ops, nothing is gathered, and ops may read only
     * bytes that this rank owns. */
    void (*alone)(ps_zero *z, bool on);
    /* Returns the number of seconds that this rank has waited for other ranks. */
    double (*waited)(const ps_zero *z);
    /* Returns the number of bytes that a gather of the stripe receives. */
    int64_t (*comes)(const ps_zero *z, int32_t stripe);
    /* -- steps */
    void (*op_begins)(ps_zero *z);         /* called when an op begins; also notifies the chunk manager */
    void (*op_failed)(ps_zero *z);         /* called when the latest op has failed; discards the reads of that op */
    void (*pass)(ps_zero *z);              /* called when a pass begins; step->pass is the number of the pass */
    /* expected: the gathers that the step should repeat, or NULL. The list must stay valid until step_end. */
    void (*step_begin)(ps_zero *z, const ps_gathers *expected);
    /* Returns the gathers of the step. The list is valid until the next step_begin. */
    const ps_gathers *(*step_end)(ps_zero *z);
    /* -- gradients */
    /* Allocates records for `n` units, which may be 0. Frees the records of earlier units. */
    int (*units)(ps_zero *z, int32_t n);
    /* Called before a gradient is written over the values of the unit. */
    int (*before_slot)(ps_zero *z, int32_t unit);
    /* Called when all gradients of the unit are final on this rank. */
    int (*unit_final)(ps_zero *z, int32_t unit);
    int (*all_final)(ps_zero *z);          /* called when all units are final; waits for all reductions */
    /* Sets the number of final units in the stripe of the unit to 0. */
    void (*unit_not_final)(ps_zero *z, int32_t unit);
    /* Sums values [n] over the ranks. Each rank passes the values that it owns, and 0 for all other values. At ZeRO
     * stage 0 every rank owns all values, so this function does not change the values. */
    int (*sum_owned)(ps_zero *z, double *values, int32_t n);
    /* Called when values may have changed. Later reads gather again, and reductions in progress are discarded. */
    void (*forget)(ps_zero *z);
} ps_zero_table;

struct ps_zero {
    const ps_zero_table *table;
    int stage;                             /* ZeRO stage, 0 to 3 (ps_engine_shard) */
    int ranks;                             /* number of ranks that train the same parameters */
    bool once;                             /* true if gradients are summed over the ranks only once per step */
};

/* The other stages of a pipeline. */
typedef struct ps_pipe_ranks ps_pipe_ranks;
typedef struct ps_pipe_ranks_table {
    void (*close)(ps_pipe_ranks *s);
    /* Sums values [n] over the stages. For each value, at most one stage may have a number other than zero. */
    int (*sum)(ps_pipe_ranks *s, double *values, int32_t n);
    bool (*has_copies)(const ps_pipe_ranks *s);
    /* Sums t over the ranks with copies, in rank order. */
    int (*sum_copies)(ps_pipe_ranks *s, ps_tensor *t);
    bool (*counts)(const ps_pipe_ranks *s);               /* returns true if the norm counts the copies of this rank */
} ps_pipe_ranks_table;
struct ps_pipe_ranks { const ps_pipe_ranks_table *table; };

/* The tensor-parallel group. Its ranks hold shards of the same layers. In a dry run, the calls are only recorded. */
typedef struct ps_tp ps_tp;
typedef struct ps_tp_table {
    void (*close)(ps_tp *t);
    int (*sum)(ps_tp *t, double *values, int32_t n);        /* sums values [n] over the ranks, in rank order */
    /* Sums a tensor over the ranks, in rank order. rc: 0, or the error that this rank got when it prepared `sums`. If
     * any rank passes an error, all ranks return this error. */
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
    ps_zero *zero;                         /* NULL if there is only one process */
    int device, host;
} engine_base;
int engine_base_get(ps_ctx *ctx, engine_base *out);         /* returns PS_ESTATE if no engine is open */
/* Returns the collectives of the dry run that recorded the trace, or NULL if the trace does not exist. */
const ps_rank_calls *engine_calls(const ps_engine *e, int32_t trace);
/* Connects ZeRO to the engine. The engine becomes the owner of z, and closes z. */
void engine_zero_set(ps_engine *e, ps_zero *z);
/* Connects the stages of the pipeline to the engine. Returns PS_ESTATE if the engine already has stages or
 * parameters. */
int engine_stages_set(ps_engine *e, ps_pipe_ranks *stages, int32_t n_numbers);
/* Connects the tensor-parallel group to the engine. Returns PS_ESTATE if the engine already has a tensor-parallel group
 * or parameters. */
int engine_tp_set(ps_engine *e, ps_tp *tp);
int engine_check_device(const ps_engine *e, int device);  /* returns PS_EINVAL if the engine does not use the device */
int engine_check_whole(const ps_tensor *t);              /* returns PS_EINVAL if t covers only a part of its storage */
/* Computes the meta and the size in bytes of a tensor that has the shape of `like` and the type `dtype`. Returns
 * PS_EINVAL if the engine does not use `device`. */
int engine_meta_like(const ps_engine *e, const ps_tensor *like, int dtype, int device, ps_meta *meta, int64_t *nbytes);
/* Returns 1 if parameter i of a unit has had a gradient in any micro-batch of this step, and 0 otherwise. Returns -1 if
 * the unit has no parameter i. */
int engine_unit_had_grad(ps_engine *e, int32_t unit, int32_t i);
int32_t engine_unit_vstage(const ps_engine *e, int32_t unit);
/* Prepares the gradients of a unit for the sum over the ranks. If gradients are summed after every micro-batch, a
 * parameter that has no gradient on this rank contributes zeros, unless this rank owns the parameter. */
int engine_unit_reduces(ps_engine *e, int32_t unit);
/* Called after the sum over the ranks. This rank keeps the gradients of the parameters that it owns, and drops the
 * other gradients of the unit. */
int engine_unit_reduced(ps_engine *e, int32_t unit);
#endif
