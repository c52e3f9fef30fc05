/* SPDX-License-Identifier: BSD-3-Clause
 * The chunk manager. Parameters, gradients and optimizer state live in large chunks that move between the device, host
 * memory and a disk file, each with its budget. All other tensors stay with the plain manager below, and their bytes
 * count against the same budgets. The chunk manager fills the tables of mem.h, so the rest of the engine cannot tell it
 * from plain.c.
 *
 * A moment is the number of an op that touches a chunk, counted from the start of a step. A trace is the list of a
 * step's uses of chunks. plan.c works out from a trace which moves serve the step, and the manager carries these moves
 * out beside the computation. Without a trace, or where a step departs from its trace, a pin fetches its chunk, and the
 * policy decides which chunks make room. One thread calls the manager; copies run on other threads. */
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
    int64_t *spare;                           /* [n_moments][PS_TIERS] bytes by which other tensors stay below
                                               * other_peak, from a moment's op up to the next moment's; the last
                                               * moment lasts to the first one of the next step; NULL: not known */
    int32_t spare_capacity;                   /* numbers that `spare` has room for */
    int64_t other_base[PS_TIERS];             /* bytes besides chunks when the trace began */
} ps_trace;

/* `step`: the step under way, read at each call. During a dry run pins note uses and touch nothing. */
int ps_chunks_new(const ps_step *step, int n_devices, ps_backend *const *devices, ps_mem *plain,
                  const ps_chunk_config *config, const char *disk_folder, ps_chunks **out);
ps_mem *ps_chunks_mem(ps_chunks *cs);
void ps_chunks_tick(ps_chunks *cs);           /* an op begins: the next pin of a chunk is of another moment */
/* Ends every copy under way and gives all memory back. Storages in chunks lose their bytes. */
void ps_chunks_close(ps_chunks *cs);
void ps_chunks_trim(ps_chunks *cs);           /* memory kept for other chunks goes back */

/* A chunk of `nbytes` (a multiple of 4096) without contents: zeros. It takes memory when it is first pinned. */
int ps_chunk_new(ps_chunks *cs, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *id);
/* A storage of `nbytes` at `offset` (a multiple of 256) in a chunk; the name (may be NULL) is copied. */
int ps_chunk_storage_new(ps_chunks *cs, int32_t chunk, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out);
/* Undoes ps_chunk_storage_new before the storage was used; the chunk stays. */
void ps_chunk_storage_undo(ps_chunks *cs, ps_storage *s);
/* Moves a storage, with its bytes, into a chunk: from the plain manager, or from another chunk. */
int ps_chunk_adopt(ps_chunks *cs, ps_storage *s, int32_t chunk, int64_t offset, const char *name);
int ps_chunk_count(const ps_chunks *cs);
void ps_chunk_get(const ps_chunks *cs, int32_t chunk, ps_chunk_info *out);
const char *ps_chunk_tensor_name(const ps_chunks *cs, int32_t chunk, int i);   /* "" where it has none */
int ps_tier_count(const ps_chunks *cs);
void ps_tier_get(ps_chunks *cs, int tier, ps_tier_info *out);
int32_t ps_storage_chunk(const ps_chunks *cs, const ps_storage *s);            /* its chunk, or -1 */
/* Gives the place of s in its chunk to `to`, a record that is overwritten; s is left without bytes. */
void ps_chunk_storage_hand_on(ps_storage *s, ps_storage *to);
/* Pins a whole chunk for work that goes on beside ops: the chunk is in use at every moment until the unpin. PS_WRITE
 * alone: the caller will write all of the chunk, so its contents are not fetched. */
int ps_chunk_pin(ps_chunks *cs, int32_t chunk, int device, unsigned access, void **out);
void ps_chunk_unpin(ps_chunks *cs, int32_t chunk, int device);
/* The chunk's contents end: nobody will read them. Its memory is free, it moves no more, and its next pin finds any
 * contents there. Nothing is done while it is pinned, or where there is one tier. */
int ps_chunk_end(ps_chunks *cs, int32_t chunk);

/* -- steps -------------------------------------------------------------------------------------------------------- */
void ps_chunks_pass(ps_chunks *cs);       /* a pass began */
/* Begins to note uses, from moment 0. The trace that ps_chunks_trace_end returns is lent until this is called again. */
void ps_chunks_trace_begin(ps_chunks *cs);
const ps_trace *ps_chunks_trace_end(ps_chunks *cs);
/* Plans a step whose uses are expected to be those of `trace` (lent until ps_chunks_step_end). The plan begins with the
 * chunks where they are now, and pins carry it out. It leaves `trace->other_peak` free on each tier; where an op's
 * chunks have no room beside that peak, it leaves less, as far as other tensors stay below their peak at that moment.
 * PS_ENOMEM names the tensor, chunk and tier that a moment of the trace does not fit. */
int ps_chunks_step_begin(ps_chunks *cs, const ps_trace *trace);
void ps_chunks_step_end(ps_chunks *cs);
/* The plan of a step like `trace` once steps repeat, without carrying it out. */
int ps_chunks_predict(ps_chunks *cs, const ps_trace *trace, ps_step_forecast *out);
void ps_chunks_stats(const ps_chunks *cs, ps_engine_stats *out);
ps_disk *ps_chunks_disk(ps_chunks *cs);       /* or NULL */
/* The script is paused: pins are no part of the step, and tiers have a reserve beyond their budgets (schedule.c). */
void ps_chunks_suspend(ps_chunks *cs);
/* It goes on: chunks and other tensors lie within the budgets again. PS_ENOMEM: there is no room below. Errors of
 * copies. */
int ps_chunks_resume(ps_chunks *cs);
/* Waits for all copies under way. */
int ps_chunks_settle(ps_chunks *cs);
#endif
