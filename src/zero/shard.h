/* SPDX-License-Identifier: BSD-3-Clause
 * Sharding (ZeRO): a chunk belongs to one rank, and the others have its bytes only while they need them. It stands
 * around the chunk manager, which knows nothing of ranks, and fills the table of mem.h, so that ops cannot tell. Bytes
 * go from the device where ops use them where the group has connected it, else through host memory.
 *
 * A part is the bytes of one chunk on all ranks: in a chunk of its own where it lies for good, else in a buffer that
 * comes and goes. A stripe is a list of parts, one for each rank at most; parts are gathered and reduced by stripes, so
 * that all ranks send at once. What is read of a part is its owner's: a read gathers its stripe, unless that is open.
 * What is written goes to the owner's bytes, and is forgotten elsewhere: every rank runs the same program.
 *
 * All ranks must gather and reduce the same stripes in the same order. It follows from the uses of parts alone, which
 * are the same on all ranks, never from room or time. With the list of gathers of an earlier step the next one begins
 * while the present one is used, and a stripe is dropped with its last use in a pass; without it two stay open.
 *
 * Source of the method: Rajbhandari et al., ZeRO, 2020; stripes of one chunk a rank: Fang et al., PatrickStar, 2022. */
#ifndef PS_SHARD_H
#define PS_SHARD_H
#include "comm/group.h"
#include "chunk/chunk.h"
#include "engine/zero_table.h"

typedef struct ps_shard ps_shard;

int ps_shard_new(ps_chunks *chunks, const ps_step *step, ps_backend *const *devices, int device, int host,
                 ps_group *group, ps_shard **out);
/* Storages in parts lose their bytes. Before the chunks are closed. */
void ps_shard_close(ps_shard *sh);
ps_mem *ps_shard_mem(ps_shard *sh);                       /* has the ticks */
ps_group *ps_shard_group(const ps_shard *sh);

int ps_shard_part(ps_shard *sh, const ps_part_config *config, int32_t *part);
/* Takes back a part that holds no storage of its own, as where every rank keeps the chunk: before the chunk goes. A
 * part with storages goes with the last of them. */
int ps_shard_part_drop(ps_shard *sh, int32_t part);
/* Has the part hold a storage from now on, at `offset`: moved there with its bytes, from wherever it was. */
int ps_shard_adopt(ps_shard *sh, ps_storage *s, int32_t part, int64_t offset, const char *name);
/* A storage in a part, zeros where it lies. */
int ps_shard_storage_new(ps_shard *sh, int32_t part, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out);
void ps_shard_storage_undo(ps_shard *sh, ps_storage *s);
/* The storage of a part's bytes on this rank, which no use of other ranks touches; NULL where the part is not here. */
ps_storage *ps_shard_own(const ps_shard *sh, ps_storage *s);
bool ps_shard_has(const ps_shard *sh, const ps_storage *s);
int32_t ps_shard_chunk(const ps_shard *sh, const ps_storage *s);      /* its chunk on this rank, or -1 */

/* -- steps -------------------------------------------------------------------------------------------------------- */
/* A pass began, with a new number. What was open is dropped, except what the next gather would bring again. */
void ps_shard_pass(ps_shard *sh);
/* Begins to note gathers, and expects those given (lent; NULL: unknown). Nothing is open afterwards. */
void ps_shard_step_begin(ps_shard *sh, const ps_gathers *expected);
double ps_shard_expects(const ps_shard *sh);              /* a number of what it expects; 0: unknown */
void ps_shard_expect_none(ps_shard *sh);
const ps_gathers *ps_shard_step_end(ps_shard *sh);        /* what was noted: lent until the next begin */
/* Values may have changed: the next use of every stripe gathers it. Waits for what is under way. */
void ps_shard_forget(ps_shard *sh);

/* A gradient is about to be written into the part: its bytes stay until they were reduced. */
int ps_shard_grads(ps_shard *sh, int32_t part);
/* Adds all ranks' versions of the part's stripe up: each part at its owner, or, with `everywhere`, on all ranks.
 * Between begin and end it runs beside the computation. check: must be the same on all ranks. After the end, what other
 * ranks own is forgotten here, and a read gathers the stripe again, with sums where values were: storage->taken tells
 * those. */
int ps_shard_reduce_begin(ps_shard *sh, int32_t part, bool everywhere, uint64_t check);
int ps_shard_reduce_end(ps_shard *sh, int32_t part);
/* While on, ops read what this rank owns, and no other rank runs them: they gather nothing. */
void ps_shard_alone(ps_shard *sh, bool on);
double ps_shard_waited(const ps_shard *sh);               /* seconds of standing still for other ranks, ever */
#endif
