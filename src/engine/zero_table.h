/* SPDX-License-Identifier: BSD-3-Clause
 * Interface between the engine and the layers above it that communicate with other ranks. The engine calls each
 * layer through a table, and has no tables if there is one process:
 *   ps_zero_table          ZeRO (src/zero), set by ps_engine_shard
 *   ps_pipe_ranks_table    other pipeline stages (pipe/ranks.c), set by ps_engine_stages
 *   ps_tp_table            tensor-parallel group (tensor_parallel/ranks.c), set by ps_engine_tensor_parallel
 * The layers call the functions below. Neither side accesses the other's records. */
#ifndef PS_ZERO_TABLE_H
#define PS_ZERO_TABLE_H
#include "chunk/chunk.h"
#include "tensor/tensor.h"

/* One gather of a step: its action number `pass` gathered the stripe, and read it `uses` times. */
typedef struct ps_gather { int32_t stripe, pass, uses; } ps_gather;
typedef struct ps_gathers { ps_gather *list; int32_t n, capacity; } ps_gathers;

typedef struct ps_zero ps_zero;

typedef struct ps_zero_table {
    void (*close)(ps_zero *z);             /* called before the chunks are closed; storages in parts lose their bytes */
    /* -- memory */
    bool (*holds)(const ps_zero *z, const ps_storage *s);       /* returns true if s is in a part */
    int32_t (*chunk)(const ps_zero *z, const ps_storage *s);    /* chunk of s on this rank, or -1 */
    /* While on, only this rank runs ops, and nothing is gathered. The ops may read only bytes that this rank owns. */
    void (*alone)(ps_zero *z, bool on);
    double (*waited)(const ps_zero *z);    /* seconds that this rank has waited for other ranks */
    int64_t (*comes)(const ps_zero *z, int32_t stripe);    /* bytes that a gather of the stripe receives */
    /* -- steps */
    void (*op_begins)(ps_zero *z);         /* called when an op begins; also calls the chunk manager */
    void (*op_failed)(ps_zero *z);         /* called when the latest op failed; discards its reads */
    void (*pass)(ps_zero *z);              /* called when a pass begins; step->pass is its number */
    void (*step_begin)(ps_zero *z, const ps_gathers *expected);  /* expected: gathers to repeat (lent), or NULL */
    const ps_gathers *(*step_end)(ps_zero *z);      /* returns the step's gathers, lent until the next step_begin */
    /* -- gradients */
    /* Allocates records of `n` units, which may be 0. Drops earlier records. */
    int (*units)(ps_zero *z, int32_t n);
    int (*before_slot)(ps_zero *z, int32_t unit);   /* called before a gradient is written over the unit's values */
    int (*unit_final)(ps_zero *z, int32_t unit);    /* called when all gradients of the unit are final on this rank */
    int (*all_final)(ps_zero *z);          /* called when all units are final; waits for all reductions */
    void (*unit_not_final)(ps_zero *z, int32_t unit);   /* resets the number of final units of the unit's stripe */
    /* Sums values [n] over the ranks. Each rank passes the values that it owns, and 0 for the others. At ZeRO stage
     * 0 every rank owns all values, so they do not change. */
    int (*sum_owned)(ps_zero *z, double *values, int32_t n);
    void (*forget)(ps_zero *z);            /* called when values may have changed: later reads gather again, */
                                           /* and reductions under way are discarded */
} ps_zero_table;

struct ps_zero {
    const ps_zero_table *table;
    int stage;                             /* ZeRO stage, 0 to 3 (ps_engine_shard) */
    int ranks;                             /* number of ranks that train the same parameters */
    bool once;                             /* sums gradients over the ranks only once per step */
};

/* The other stages of a pipeline. */
typedef struct ps_pipe_ranks ps_pipe_ranks;
typedef struct ps_pipe_ranks_table {
    void (*close)(ps_pipe_ranks *s);
    int (*sum)(ps_pipe_ranks *s, double *values, int32_t n); /* over the stages; at most one has a nonzero value */
    bool (*has_copies)(const ps_pipe_ranks *s);
    int (*sum_copies)(ps_pipe_ranks *s, ps_tensor *t);          /* sums t over the ranks with copies, in rank order */
    bool (*counts)(const ps_pipe_ranks *s);                     /* whether the norm counts this rank's copies */
} ps_pipe_ranks_table;
struct ps_pipe_ranks { const ps_pipe_ranks_table *table; };

/* The tensor-parallel group, whose ranks hold shards of the same layers. A dry run only records the calls. */
typedef struct ps_tp ps_tp;
typedef struct ps_tp_table {
    void (*close)(ps_tp *t);
    int (*sum)(ps_tp *t, double *values, int32_t n);        /* sums values [n] over the ranks, in rank order */
    /* Like sum, for a tensor. rc is the result of this rank's preparation. If it is an error, all ranks get it. */
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
/* Returns the collectives that a trace's dry run recorded, or NULL if there is no such trace. */
const ps_rank_calls *engine_calls(const ps_engine *e, int32_t trace);
/* Connects ZeRO to the engine, which calls z and closes it. */
void engine_zero_set(ps_engine *e, ps_zero *z);
/* Connects the pipeline's stages to the engine. PS_ESTATE if it already has stages or parameters. */
int engine_stages_set(ps_engine *e, ps_pipe_ranks *stages, int32_t n_numbers);
int engine_tp_set(ps_engine *e, ps_tp *tp);                 /* likewise */
int engine_check_device(const ps_engine *e, int device);    /* PS_EINVAL if it is not the engine's */
int engine_check_whole(const ps_tensor *t);                 /* PS_EINVAL if t covers only part of its storage */
/* Computes the shape, type and bytes of a tensor like `like` on a device of the engine. */
int engine_meta_like(const ps_engine *e, const ps_tensor *like, int dtype, int device, ps_meta *meta, int64_t *nbytes);
/* Returns 1 if parameter i of a unit has had a gradient in this step, in any micro-batch, else 0. Returns -1 if there
 * is no parameter i. */
int engine_unit_had_grad(ps_engine *e, int32_t unit, int32_t i);
int32_t engine_unit_vstage(const ps_engine *e, int32_t unit);
/* Prepares a unit's gradients for the sum over the ranks. If sums are kept by owners, parameters without a gradient
 * contribute zeros. */
int engine_unit_reduces(ps_engine *e, int32_t unit);
/* Called after the sum over the ranks. Owners keep the unit's gradients, and other ranks drop them. */
int engine_unit_reduced(ps_engine *e, int32_t unit);
#endif
