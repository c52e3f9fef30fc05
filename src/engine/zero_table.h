/* SPDX-License-Identifier: BSD-3-Clause
 * What the engine and those who stand above it and reach other ranks (src/zero) know of each other. The engine of
 * several ranks calls ZeRO through one table, which ps_engine_shard hands it, and other stages through another, of
 * ps_engine_stages; they call the functions of engine.c below. Neither side sees the other's records. An engine of one
 * process has no table. */
#ifndef PS_ZERO_TABLE_H
#define PS_ZERO_TABLE_H
#include "chunk/chunk.h"
#include "tensor/tensor.h"

/* One gather of a step; `pass` counts forward and backward passes. */
typedef struct ps_gather { int32_t stripe, pass, uses; } ps_gather;
typedef struct ps_gathers { ps_gather *list; int32_t n, capacity; } ps_gathers;

typedef struct ps_zero ps_zero;

typedef struct ps_zero_table {
    void (*close)(ps_zero *z);             /* storages in parts lose their bytes; before the chunks are closed */
    /* -- memory */
    bool (*holds)(const ps_zero *z, const ps_storage *s);       /* it lies in a part */
    int32_t (*chunk)(const ps_zero *z, const ps_storage *s);    /* its chunk on this rank, or -1 */
    /* While on, ops read what this rank owns, and no other rank runs them: they gather nothing. */
    void (*alone)(ps_zero *z, bool on);
    double (*waited)(const ps_zero *z);    /* seconds of standing still for other ranks, ever */
    int64_t (*comes)(const ps_zero *z, int32_t stripe);    /* bytes that a gather brings from other ranks */
    /* -- steps */
    void (*op_begins)(ps_zero *z);         /* tells the chunks, too */
    void (*op_failed)(ps_zero *z);         /* what it read does not count */
    void (*pass)(ps_zero *z);              /* a pass began: the step has another number of it */
    void (*step_begin)(ps_zero *z, const ps_gathers *expected);  /* lent; NULL: unknown */
    const ps_gathers *(*step_end)(ps_zero *z);      /* what was noted: lent until the next begin */
    /* -- gradients */
    /* Makes room for what ZeRO knows of `n` units, forgetting those before; 0: there are none. */
    int (*units)(ps_zero *z, int32_t n);
    int (*before_slot)(ps_zero *z, int32_t unit);   /* a gradient is about to lie where the unit's values do */
    int (*unit_final)(ps_zero *z, int32_t unit);    /* all gradients of the unit are final on this rank */
    int (*all_final)(ps_zero *z);          /* those of all units are: whatever is under way ends */
    void (*unit_not_final)(ps_zero *z, int32_t unit);   /* its stripe counts anew */
    /* values[n]: afterwards the sums over the ranks of what each owns; stage 0, where all own all: as they are. */
    int (*sum_owned)(ps_zero *z, double *values, int32_t n);
    void (*forget)(ps_zero *z);            /* values may have changed; reductions under way end, and do not count */
} ps_zero_table;

struct ps_zero {
    const ps_zero_table *table;
    int stage;                             /* 0 to 3: what has one owner (ps_engine_shard) */
};

/* The other stages of a pipeline. */
typedef struct ps_stages ps_stages;
typedef struct ps_stages_table {
    void (*close)(ps_stages *s);
    int (*sum)(ps_stages *s, double *values, int32_t n);    /* over all stages: each value is of one, 0 elsewhere */
    bool (*has_copies)(const ps_stages *s);
    int (*sum_copies)(ps_stages *s, ps_tensor *t);          /* over the ranks with copies, in their order, on all */
    bool (*counts)(const ps_stages *s);                     /* this rank's copies are those that the norm counts */
} ps_stages_table;
struct ps_stages { const ps_stages_table *table; };

/* -- engine.c, for ZeRO */
typedef struct engine_base {
    ps_engine *e;
    const ps_step *step;
    ps_chunks *chunks;
    ps_zero *zero;                         /* or NULL: one process */
    int device, host;
} engine_base;
int engine_base_get(ps_ctx *ctx, engine_base *out);         /* PS_ESTATE when no engine is open */
/* The engine calls z from now on, and closes it. */
void engine_zero_set(ps_engine *e, ps_zero *z);
/* PS_ESTATE: it has stages, or parameters, already. */
int engine_stages_set(ps_engine *e, ps_stages *stages, int32_t n_numbers);
int engine_check_device(const ps_engine *e, int device);    /* PS_EINVAL: it is not one of the engine's two */
int engine_check_whole(const ps_tensor *t);                 /* PS_EINVAL: it does not cover its whole storage */
/* Shape, type and bytes of a tensor like another one, on a device of the engine. */
int engine_meta_like(const ps_engine *e, const ps_tensor *like, int dtype, int device, ps_meta *meta, int64_t *nbytes);
/* Whether parameter i of a unit has had a gradient in this step: 0 or 1; -1: the unit has no more parameters. */
int engine_unit_had_grad(ps_engine *e, int32_t unit, int32_t i);
int32_t engine_unit_vstage(const ps_engine *e, int32_t unit);
/* The bytes of the unit's gradients are about to be summed: zeros where a parameter has none. */
int engine_unit_reduces(ps_engine *e, int32_t unit);
/* They are summed: owners go on with them, other ranks have none any more. */
int engine_unit_reduced(ps_engine *e, int32_t unit);
#endif
