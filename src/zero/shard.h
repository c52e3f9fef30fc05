/* SPDX-License-Identifier: BSD-3-Clause
 * Sharding (ZeRO): each chunk belongs to one rank, and other ranks have its bytes only while they need them. This
 * layer wraps the chunk manager, which knows no ranks. It is the keeper of the storages in parts (ps_keeper, mem.h).
 * Bytes are sent from device to device if the group has connected the devices that ops use, else through host
 * memory.
 *
 * A part is the bytes of one chunk: in the chunk on its owner, in a temporary buffer on other ranks. A stripe is a
 * list of parts, at most one of each rank, which are gathered and reduced together, so that all ranks send at once.
 * A read gathers the part's stripe unless the stripe is open. After a write the owner keeps the result and other
 * ranks drop theirs, since every rank runs the same program.
 *
 * All ranks must gather and reduce the same stripes in the same order. The order therefore depends only on the uses
 * of parts, never on free memory or time. If an earlier step's list of gathers is known, the next gather begins
 * while the present stripe is used, and a stripe is dropped after its last use in a pass. Otherwise the two stripes
 * used last stay open, in addition to the one that is read.
 *
 * Sources: Rajbhandari et al., ZeRO, SC 2020; for stripes of one chunk per rank, Fang et al., PatrickStar, 2022. */
#ifndef PS_SHARD_H
#define PS_SHARD_H
#include "chunk/chunk.h"
#include "comm/group.h"
#include "engine/zero_table.h"

typedef struct ps_shard ps_shard;

int ps_shard_new(ps_chunks *chunks, const ps_step *step, ps_backend *const *devices, int device, int host,
                 ps_group *group, ps_shard **out);
/* Closes ZeRO, before the chunks are closed. Storages in parts lose their bytes. */
void ps_shard_close(ps_shard *sh);
/* Called when an op begins, and when the latest op has failed. A failed op's reads do not count. */
void ps_shard_tick(ps_shard *sh);
void ps_shard_failed(ps_shard *sh);
ps_group *ps_shard_group(const ps_shard *sh);

int ps_shard_part(ps_shard *sh, const ps_part_config *config, int32_t *part);
/* Frees a part without storages; the caller then frees the chunk. For chunks that every rank keeps. Other parts are
 * freed with their last storage. */
int ps_shard_part_drop(ps_shard *sh, int32_t part);
/* Moves a storage and its bytes into the part, to `offset`. stays: as in ps_chunk_adopt, on the part's owner. */
int ps_shard_adopt(ps_shard *sh, ps_storage *s, int32_t part, int64_t offset, const char *name, bool stays);
/* Makes a storage in a part. On the owner its bytes are zeros. */
int ps_shard_storage_new(ps_shard *sh, int32_t part, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out);
void ps_shard_storage_undo(ps_shard *sh, ps_storage *s);
/* Returns a storage with the bytes of s that needs no other ranks, or NULL if another rank owns the bytes. This is s
 * itself if s is not in a part. */
ps_storage *ps_shard_own(const ps_shard *sh, ps_storage *s);
bool ps_shard_has(const ps_shard *sh, const ps_storage *s);
int32_t ps_shard_chunk(const ps_shard *sh, const ps_storage *s);      /* the part's chunk on this rank, or -1 */

/* -- steps -------------------------------------------------------------------------------------------------------- */
/* Begins a pass with a new number. Closes the open stripes, except one that the next gather would fetch again. */
void ps_shard_pass(ps_shard *sh);
/* Closes all stripes and begins to record gathers. expected: gathers to repeat (lent), or NULL if unknown. */
void ps_shard_step_begin(ps_shard *sh, const ps_gathers *expected);
double ps_shard_expects(const ps_shard *sh);              /* hash of the expected gathers, 0 if unknown */
void ps_shard_expect_none(ps_shard *sh);
const ps_gathers *ps_shard_step_end(ps_shard *sh);        /* recorded gathers, lent until the next begin */
/* Called when values may have changed. Later uses gather again. Waits for jobs under way. */
void ps_shard_forget(ps_shard *sh);

/* Called before a gradient is written into the part, which then stays until its stripe has been reduced. */
int ps_shard_grads(ps_shard *sh, int32_t part);
/* Sum all ranks' versions of the part's stripe, during the computation between begin and end. Each part's owner gets
 * the sum, or every rank if `everywhere` is set. `check` must be the same on all ranks. At the end this rank drops
 * the parts of other owners. Gradients in the place of values are then sums, and storage->engine.taken still marks
 * them. */
int ps_shard_reduce_begin(ps_shard *sh, int32_t part, bool everywhere, uint64_t check);
int ps_shard_reduce_end(ps_shard *sh, int32_t part);
/* While on, only this rank runs ops. They may read only bytes that this rank owns; nothing is gathered. */
void ps_shard_alone(ps_shard *sh, bool on);
int64_t ps_shard_comes(const ps_shard *sh, int32_t stripe);   /* bytes that a gather of the stripe receives */
double ps_shard_waited(const ps_shard *sh);               /* seconds that this rank has waited for other ranks */
#endif
