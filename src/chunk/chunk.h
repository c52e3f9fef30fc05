/* SPDX-License-Identifier: BSD-3-Clause
 * The chunk manager: parameters, gradients and optimizer state live in large chunks that move between the device, host
 * memory and a disk file, each with its budget; everything else stays with the plain manager below, and what it takes
 * counts against the same budgets. It fills the tables of mem.h, so the rest of the engine cannot tell it from plain.c.
 *
 * A moment is the number of an op that touches a chunk, counted from the start of a step. A trace is the list of such
 * uses; from it plan.c works out which moves serve the step, and the manager carries them out beside the computation.
 * Without a trace, or where a step departs from it, chunks are fetched when they are pinned, and room is made by the
 * policy's rule. One thread; copies run on others. */
#ifndef PS_CHUNK_H
#define PS_CHUNK_H
#include "base/step.h"
#include "mem/mem.h"
#include "chunk/disk.h"
#include "chunk/plan.h"

typedef struct ps_chunks ps_chunks;

/* States of a tensor in a chunk. A chunk's own state is the first of COMPUTE, HOLD, HOLD_AFTER_FWD, HOLD_AFTER_BWD,
 * FREE that one of its tensors is in. */
enum { PS_TS_FREE, PS_TS_COMPUTE, PS_TS_HOLD, PS_TS_HOLD_AFTER_FWD, PS_TS_HOLD_AFTER_BWD, PS_TS_COUNT };

typedef struct ps_trace {
    ps_use *uses;
    int32_t n_uses, capacity, n_moments;
    int64_t other_peak[PS_TIERS];             /* bytes besides chunks, at most, on each tier */
    int64_t *spare;                           /* [n_moments][PS_TIERS] how far below that they stay from the op of a
                                               * moment up to the next that touches a chunk; the last: to the first one
                                               * of the next step; NULL: not known */
    int32_t spare_capacity;                   /* numbers in `spare` */
    int64_t other_base[PS_TIERS];             /* those of them that lay there before the step began */
} ps_trace;

/* `step`: the step under way, read at each call. While it is dry, pins note uses and touch nothing. */
int ps_chunks_new(const ps_step *step, int n_devices, ps_backend *const *devices, ps_mem *plain,
                  const ps_chunk_config *config, const char *disk_folder, ps_chunks **out);
ps_mem *ps_chunks_mem(ps_chunks *cs);
void ps_chunks_tick(ps_chunks *cs);           /* an op begins: the next pin of a chunk is of another moment */
/* Ends every copy under way and gives all memory back. Storages in chunks lose their bytes. */
void ps_chunks_close(ps_chunks *cs);

/* A chunk of `nbytes` (a multiple of 4096) without contents: zeros. It takes memory when it is first pinned. */
int ps_chunk_new(ps_chunks *cs, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *id);
/* A storage of `nbytes` at `offset` (a multiple of 256) in a chunk; the name (may be NULL) is copied. */
int ps_chunk_storage_new(ps_chunks *cs, int32_t chunk, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out);
/* Takes that back before the storage was used; the chunk stays. */
void ps_chunk_storage_undo(ps_chunks *cs, ps_storage *s);
/* Moves a storage, with its bytes, into a chunk: from the plain manager, or from another chunk. */
int ps_chunk_adopt(ps_chunks *cs, ps_storage *s, int32_t chunk, int64_t offset, const char *name);
int ps_chunk_count(const ps_chunks *cs);
void ps_chunk_get(const ps_chunks *cs, int32_t chunk, ps_chunk_info *out);
const char *ps_chunk_tensor_name(const ps_chunks *cs, int32_t chunk, int i);   /* "" where it has none */
int ps_tier_count(const ps_chunks *cs);
void ps_tier_get(ps_chunks *cs, int tier, ps_tier_info *out);
int32_t ps_storage_chunk(const ps_chunks *cs, const ps_storage *s);            /* its chunk, or -1 */
/* Has `to`, an empty record, stand for s from now on; s is left without bytes. */
void ps_chunk_storage_hand_on(ps_storage *s, ps_storage *to);
/* A whole chunk, held by work that goes on beside ops: it is in use at every moment until the unpin. PS_WRITE alone:
 * all of it will be written, its contents are not fetched. */
int ps_chunk_pin(ps_chunks *cs, int32_t chunk, int device, unsigned access, void **out);
void ps_chunk_unpin(ps_chunks *cs, int32_t chunk, int device);

/* -- steps -------------------------------------------------------------------------------------------------------- */
void ps_chunks_pass(ps_chunks *cs);       /* a pass began */
/* Begins to note uses, from moment 0; what was noted is lent until the next call. */
void ps_chunks_trace_begin(ps_chunks *cs);
const ps_trace *ps_chunks_trace_end(ps_chunks *cs);
/* From now on uses are expected to be those of `trace` (lent until ps_chunks_step_end): plans from where the chunks are
 * now, leaves `trace->other_peak` free on each tier (less where an op's chunks have no room beside that, and the others
 * of that moment leave it), and carries the plan out. PS_ENOMEM names the tensor, chunk and
 * tier that a moment of the trace does not fit. */
int ps_chunks_step_begin(ps_chunks *cs, const ps_trace *trace);
void ps_chunks_step_end(ps_chunks *cs);
/* The plan of a step like `trace` once steps repeat, without carrying it out. */
int ps_chunks_predict(ps_chunks *cs, const ps_trace *trace, ps_step_forecast *out);
void ps_chunks_stats(const ps_chunks *cs, ps_engine_stats *out);
ps_disk *ps_chunks_disk(ps_chunks *cs);       /* or NULL */
/* All copies under way are waited for. */
int ps_chunks_settle(ps_chunks *cs);
#endif
