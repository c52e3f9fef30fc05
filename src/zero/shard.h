/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the sharding layer of ZeRO. Each chunk belongs to one rank. Another rank has a copy of the chunk
 * only while it needs the copy. This layer wraps the chunk manager, which does not know about ranks. It is the keeper
 * of the storages in parts (see ps_keeper in mem.h). If the group has connected the devices that ops use, bytes are
 * sent from device to device. Otherwise bytes are sent through host memory.
 *
 * A part is the bytes of one chunk. On the owner the part is the chunk itself, and on another rank the part is in a
 * temporary buffer. A stripe is a list of parts, with at most one part of each rank. The parts of a stripe are gathered
 * and reduced together, so that all ranks send at the same time. A read of a part gathers its stripe, unless the stripe
 * is open. Every rank runs the same program, so every rank writes the same result to a part. The owner keeps the
 * result, and the other ranks drop it.
 *
 * All ranks must gather and reduce the same stripes in the same order. Therefore the order depends only on the uses of
 * parts, and never on free memory or on time. If the list of gathers of an earlier step is known, the next gather
 * begins while the current stripe is in use, and a stripe is closed after its last use in a pass. If the list is
 * unknown, the two most recently used stripes stay open in addition to the stripe that is being read.
 *
 * Sources: Rajbhandari et al., ZeRO, SC 2020. For stripes with one chunk per rank: Fang et al., PatrickStar, 2022. */
#ifndef PS_SHARD_H
#define PS_SHARD_H
#include "chunk/chunk.h"
#include "comm/group.h"
#include "engine/zero_table.h"

typedef struct ps_shard ps_shard;

int ps_shard_new(ps_chunks *chunks, const ps_step *step, ps_backend *const *devices, int device, int host,
                 ps_group *group, ps_shard **out);
/* Closes ZeRO. Must be called before the chunks are closed. Frees the bytes of all storages in parts. */
void ps_shard_close(ps_shard *sh);
/* ps_shard_tick is called when an op begins. ps_shard_failed is called when the latest op has failed. It subtracts the
 * reads of this op from the number of reads of each stripe. */
void ps_shard_tick(ps_shard *sh);
void ps_shard_failed(ps_shard *sh);
ps_group *ps_shard_group(const ps_shard *sh);

int ps_shard_part(ps_shard *sh, const ps_part_config *config, int32_t *part);
/* Frees a part that has no storages. After that, the caller must free the part's chunk. This function is for chunks
 * that every rank keeps. Any other part is freed when its last storage is freed. */
int ps_shard_part_drop(ps_shard *sh, int32_t part);
/* Moves a storage and its bytes to `offset` in a part. On the owner of the part, `stays` has the same meaning as in
 * ps_chunk_adopt. */
int ps_shard_adopt(ps_shard *sh, ps_storage *s, int32_t part, int64_t offset, const char *name, bool stays);
/* Makes a storage in a part. On the owner of the part, the bytes of the storage are zeros. */
int ps_shard_storage_new(ps_shard *sh, int32_t part, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out);
void ps_shard_storage_undo(ps_shard *sh, ps_storage *s);
/* Returns a storage with the bytes of s that this rank can use without other ranks. If s is not in a part, returns s
 * itself. If another rank owns the bytes, returns NULL. */
ps_storage *ps_shard_own(const ps_shard *sh, ps_storage *s);
bool ps_shard_has(const ps_shard *sh, const ps_storage *s);
/* Returns the chunk of s on this rank, or -1. */
int32_t ps_shard_chunk(const ps_shard *sh, const ps_storage *s);

/* -- steps -------------------------------------------------------------------------------------------------------- */
/* Called when a pass begins. Closes the open stripes, except for the stripe of the next expected gather. */
void ps_shard_pass(ps_shard *sh);
/* Closes all stripes, and begins to record gathers. expected: the gathers that the step should repeat, or NULL if they
 * are unknown. The list must stay valid until ps_shard_step_end. */
void ps_shard_step_begin(ps_shard *sh, const ps_gathers *expected);
double ps_shard_expects(const ps_shard *sh);              /* hash of the expected gathers, or 0 if unknown */
void ps_shard_expect_none(ps_shard *sh);
/* Returns the recorded gathers. The list is valid until the next ps_shard_step_begin. */
const ps_gathers *ps_shard_step_end(ps_shard *sh);
/* Called when values may have changed. Later uses gather the values again. Waits for jobs in progress. */
void ps_shard_forget(ps_shard *sh);

/* Called before a gradient is written into the part. After the call, the part keeps its bytes until its stripe has been
 * reduced. */
int ps_shard_grads(ps_shard *sh, int32_t part);
/* Sum each part of the stripe that contains `part` over all ranks. The sums are computed concurrently with other work,
 * from begin to end. The owner of a part receives the part's sum. If `everywhere` is set, every rank receives all sums.
 * `check` must be the same on all ranks. ps_shard_reduce_end drops the parts that other ranks own. If gradients are
 * stored in place of values, storage->engine.taken is still set after the sum. */
int ps_shard_reduce_begin(ps_shard *sh, int32_t part, bool everywhere, uint64_t check);
int ps_shard_reduce_end(ps_shard *sh, int32_t part);
/* Switches a mode on or off. In this mode, only this rank runs ops, nothing is gathered, and ops may read only bytes
 * that this rank owns. */
void ps_shard_alone(ps_shard *sh, bool on);
/* Returns the number of bytes that a gather of the stripe receives. */
int64_t ps_shard_comes(const ps_shard *sh, int32_t stripe);
/* Returns the number of seconds that this rank has waited for other ranks. */
double ps_shard_waited(const ps_shard *sh);
#endif
