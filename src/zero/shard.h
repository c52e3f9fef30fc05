/* SPDX-License-Identifier: BSD-3-Clause
 * Sharding (ZeRO): a chunk belongs to one rank, and the other ranks hold its bytes only while they need them. This
 * layer wraps the chunk manager, which does not know of ranks. It is the keeper of the storages in parts (ps_keeper,
 * mem.h), so that ops cannot tell them from others. Bytes are sent from device to device if the group has connected the
 * devices that ops use, else through host memory.
 *
 * A part is the bytes of one chunk on all ranks: in a chunk at its owner, in a temporary buffer on other ranks. A
 * stripe is a list of parts, at most one of each rank. Parts are gathered and reduced by stripes, so that all ranks
 * send at once. A read returns the owner's bytes: it gathers the part's stripe, unless the stripe is open. After a
 * write the owner keeps the result and other ranks drop theirs, since every rank runs the same program.
 *
 * All ranks must gather and reduce the same stripes in the same order. The order depends only on the uses of parts,
 * which are the same on all ranks, never on free memory or time. With the list of gathers of an earlier step, the next
 * gather begins while the present stripe is used, and a stripe is dropped after its last use in a pass. Without the
 * list, the two stripes used last stay open in addition to the one that is read.
 *
 * Source of the method: Rajbhandari et al., ZeRO, SC 2020; stripes of one chunk per rank: Fang et al., PatrickStar,
 * 2022. */
#ifndef PS_SHARD_H
#define PS_SHARD_H
#include "chunk/chunk.h"
#include "comm/group.h"
#include "engine/zero_table.h"

typedef struct ps_shard ps_shard;

int ps_shard_new(ps_chunks *chunks, const ps_step *step, ps_backend *const *devices, int device, int host,
                 ps_group *group, ps_shard **out);
/* Closes ZeRO. Must be called before the chunks are closed. Storages in parts lose their bytes. */
void ps_shard_close(ps_shard *sh);
/* tick: called when an op begins. failed: called when the latest op has failed; its reads then do not count. */
void ps_shard_tick(ps_shard *sh);
void ps_shard_failed(ps_shard *sh);
ps_group *ps_shard_group(const ps_shard *sh);

int ps_shard_part(ps_shard *sh, const ps_part_config *config, int32_t *part);
/* Frees a part that has no storages, because every rank keeps the chunk. The caller frees the chunk afterwards.
 * Other parts are freed with their last storage. */
int ps_shard_part_drop(ps_shard *sh, int32_t part);
/* Moves a storage and its bytes from anywhere into the part, to `offset`. stays: as in ps_chunk_adopt, on the owner
 * of the part. */
int ps_shard_adopt(ps_shard *sh, ps_storage *s, int32_t part, int64_t offset, const char *name, bool stays);
/* Makes a storage in a part. On the owner its bytes are zeros. */
int ps_shard_storage_new(ps_shard *sh, int32_t part, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out);
void ps_shard_storage_undo(ps_shard *sh, ps_storage *s);
/* Returns a storage of the bytes of s that this rank can use without other ranks. This is s itself if s is not in a
 * part. Returns NULL if another rank owns the bytes. */
ps_storage *ps_shard_own(const ps_shard *sh, ps_storage *s);
bool ps_shard_has(const ps_shard *sh, const ps_storage *s);
int32_t ps_shard_chunk(const ps_shard *sh, const ps_storage *s);      /* the part's chunk on this rank, or -1 */

/* -- steps -------------------------------------------------------------------------------------------------------- */
/* Begins a pass with a new number. Closes the open stripes, except one that the next gather would fetch again. */
void ps_shard_pass(ps_shard *sh);
/* Closes all stripes and begins to record gathers. expected: gathers that the step should repeat (lent), or NULL if
 * they are unknown. */
void ps_shard_step_begin(ps_shard *sh, const ps_gathers *expected);
double ps_shard_expects(const ps_shard *sh);              /* hash of the expected gathers, 0 if they are unknown */
void ps_shard_expect_none(ps_shard *sh);
const ps_gathers *ps_shard_step_end(ps_shard *sh);        /* the recorded gathers, lent until the next begin */
/* Called when values may have changed: the next use of each stripe gathers it again. Waits for jobs under way. */
void ps_shard_forget(ps_shard *sh);

/* Called before a gradient is written into the part. Keeps the part's bytes until its stripe has been reduced. */
int ps_shard_grads(ps_shard *sh, int32_t part);
/* Sums all ranks' versions of the part's stripe, concurrently with computation between begin and end. The owner of
 * each part gets its sum; if `everywhere` is set, every rank gets it. `check` must be the same on all ranks. At the
 * end, this rank drops the parts of other owners, and the next read gathers the stripe again. Gradients that are
 * stored in the place of values are then sums, and storage->engine.taken still marks them. */
int ps_shard_reduce_begin(ps_shard *sh, int32_t part, bool everywhere, uint64_t check);
int ps_shard_reduce_end(ps_shard *sh, int32_t part);
/* While this is on, only this rank runs ops. The ops may read only bytes that this rank owns; nothing is gathered. */
void ps_shard_alone(ps_shard *sh, bool on);
int64_t ps_shard_comes(const ps_shard *sh, int32_t stripe);   /* bytes that a gather of the stripe receives from
                                                               * other ranks */
double ps_shard_waited(const ps_shard *sh);               /* seconds that this rank has waited for other ranks */
#endif
