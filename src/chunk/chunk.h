/* SPDX-License-Identifier: BSD-3-Clause
 * The chunk manager makes it possible to train models that are larger than the memory of the device. Parameters,
 * gradients and optimizer states are in large chunks, which move between device memory, host memory and a disk file.
 * Each of these tiers has a budget. All other tensors stay with the plain manager, but they count against the same
 * budgets. The chunk manager implements the tables of mem.h. The rest of the engine therefore uses it in the same way
 * as plain.c.
 *
 * A moment is the index, within a step, of an op that uses a chunk. A trace is the list of all uses of chunks in a
 * step. plan.c computes the moves of a step from a trace, and the manager performs these moves during computation. If
 * there is no trace, or if a step departs from its trace, each pin fetches its chunk, and a policy chooses the chunks
 * to evict. One thread calls the manager. Copies run on other threads. */
#ifndef PS_CHUNK_H
#define PS_CHUNK_H
#include "base/step.h"
#include "mem/mem.h"
#include "chunk/disk.h"
#include "chunk/plan.h"

typedef struct ps_chunks ps_chunks;

/* States of a tensor in a chunk. The state of a chunk is the first state, in the order COMPUTE, HOLD, HOLD_AFTER_FWD,
 * HOLD_AFTER_BWD, FREE, that at least one of the chunk's tensors has. */
enum { PS_TS_FREE, PS_TS_COMPUTE, PS_TS_HOLD, PS_TS_HOLD_AFTER_FWD, PS_TS_HOLD_AFTER_BWD, PS_TS_COUNT };

typedef struct ps_trace {
    ps_use *uses;
    int32_t n_uses, capacity, n_moments;
    int64_t other_peak[PS_TIERS];             /* peak size in bytes of all tensors outside chunks, on each tier */
    /* spare: [n_moments][PS_TIERS] for each moment, other_peak minus the peak size in bytes of tensors outside chunks
     * during the moment. NULL if unknown. A moment lasts from its op to the op of the next moment. The last moment
     * lasts until the first moment of the next step. */
    int64_t *spare;
    int32_t spare_capacity;
    int64_t other_base[PS_TIERS];             /* size in bytes of all tensors outside chunks when the trace began */
} ps_trace;

/* Creates the chunk manager of a context. All later calls read the current state of `step`. In a dry run, pins only
 * record uses. */
int ps_chunks_new(const ps_step *step, int n_devices, ps_backend *const *devices, ps_mem *plain,
                  const ps_chunk_config *config, const char *disk_folder, ps_chunks **out);
ps_mem *ps_chunks_mem(ps_chunks *cs);
/* Called when an op begins. The next pin of a chunk then begins a new moment. */
void ps_chunks_tick(ps_chunks *cs);
/* Waits for all copies, and frees all memory. The storages in chunks lose their bytes. */
void ps_chunks_close(ps_chunks *cs);
void ps_chunks_trim(ps_chunks *cs);           /* frees the memory that is kept for reuse */

/* Makes an empty chunk of `nbytes` bytes, which must be a multiple of 4096. The chunk reads as zeros. Its first pin
 * allocates its memory. */
int ps_chunk_new(ps_chunks *cs, int kind, int group, int index, int dtype, int64_t nbytes, int32_t *id);
/* Makes a storage of `nbytes` bytes in a chunk, at `offset`, which must be a multiple of 256. Copies the name, which
 * may be NULL. */
int ps_chunk_storage_new(ps_chunks *cs, int32_t chunk, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out);
/* Undoes ps_chunk_storage_new for an unused storage. The chunk remains. */
void ps_chunk_storage_undo(ps_chunks *cs, ps_storage *s);
/* Moves a storage and its bytes into a chunk, from plain memory or from another chunk. If `stays` is set and there is
 * a disk tier, borrowed bytes are not copied. The chunk then reads these bytes from the lender until the first write
 * to the chunk. */
int ps_chunk_adopt(ps_chunks *cs, ps_storage *s, int32_t chunk, int64_t offset, const char *name, bool stays);
int ps_chunk_count(const ps_chunks *cs);
void ps_chunk_get(const ps_chunks *cs, int32_t chunk, ps_chunk_info *out);
const char *ps_chunk_tensor_name(const ps_chunks *cs, int32_t chunk, int i);   /* "" if the tensor has no name */
int ps_tier_count(const ps_chunks *cs);
void ps_tier_get(ps_chunks *cs, int tier, ps_tier_info *out);
int32_t ps_storage_chunk(const ps_chunks *cs, const ps_storage *s);            /* returns -1 if s is in no chunk */
/* Moves the bytes of s, which are in a chunk, to the storage `to`. All fields of `to` are overwritten. Afterwards s
 * has no bytes. */
void ps_chunk_storage_hand_on(ps_storage *s, ps_storage *to);
/* Pins a whole chunk for work that runs concurrently with ops. Until the chunk is unpinned, every moment counts as a
 * use of the chunk. PS_WRITE without PS_READ means that the caller writes the whole chunk. The contents are then not
 * fetched. */
int ps_chunk_pin(ps_chunks *cs, int32_t chunk, int device, unsigned access, void **out);
void ps_chunk_unpin(ps_chunks *cs, int32_t chunk, int device);
/* Discards the contents of a chunk and frees their memory. Must be called only if no later use reads the contents.
 * The contents are undefined at the next pin. Does nothing if the chunk is pinned or resident, or if there is only
 * one tier. */
int ps_chunk_end(ps_chunks *cs, int32_t chunk);

/* -- steps -------------------------------------------------------------------------------------------------------- */
void ps_chunks_pass(ps_chunks *cs);       /* begins a new pass over the chunks */
/* Begins to record uses, starting at moment 0. ps_chunks_trace_end returns the recorded trace, which is valid until
 * the next recording begins. */
void ps_chunks_trace_begin(ps_chunks *cs);
const ps_trace *ps_chunks_trace_end(ps_chunks *cs);
/* Plans a step that is expected to repeat the uses of `trace`. The trace must stay valid until ps_chunks_step_end.
 * Pins then perform the moves of the plan, starting from the present places of the chunks. The plan leaves
 * `trace->other_peak` bytes free on each tier. If the chunks of a moment do not fit, the plan leaves only the bytes
 * that other tensors use at that moment. Returns PS_ENOMEM if a moment still does not fit. The message then names the
 * tensor, the chunk and the tier. */
int ps_chunks_step_begin(ps_chunks *cs, const ps_trace *trace);
void ps_chunks_step_end(ps_chunks *cs);
/* Plans a step like ps_chunks_step_begin, but does not perform the plan. Writes the forecast of the plan to *out. */
int ps_chunks_predict(ps_chunks *cs, const ps_trace *trace, ps_step_forecast *out);
void ps_chunks_stats(const ps_chunks *cs, ps_engine_stats *out);
ps_disk *ps_chunks_disk(ps_chunks *cs);       /* NULL if there is no disk tier */
/* Called when the script pauses. Until the script resumes, pins do not count as uses of the step, and tiers may
 * exceed their budgets by a reserve (see schedule.c). */
void ps_chunks_suspend(ps_chunks *cs);
/* Called when the script resumes. Moves chunks until all tiers are within their budgets again. Returns PS_ENOMEM if
 * lower tiers have no room, or the error of a copy. */
int ps_chunks_resume(ps_chunks *cs);
/* Waits for all copies in progress. */
int ps_chunks_settle(ps_chunks *cs);
#endif
