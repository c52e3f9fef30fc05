/* SPDX-License-Identifier: BSD-3-Clause
 * A dry run of a pipeline performs few micro-batches. What the parts of the last of them did to memory, chunks and
 * other ranks is noted, and done again for those that follow: the same storages are made and go in the same order, the
 * same chunks are pinned at the same moments, the same collectives are noted. A part is a piece of a micro-batch's way
 * through a row (pipe/exec.c numbers them); parts of one micro-batch come in one order.
 *
 * Lua's collector decides when bytes go that a script had a header of. So that a dry run does not depend on it, such
 * bytes wait, and go when the collector was called (ps_replay_collected), the youngest first. That holds in each dry
 * run of a pipeline, whether micro-batches are repeated or not: both have the same bytes at each moment.
 */
#ifndef PS_TENSOR_REPLAY_H
#define PS_TENSOR_REPLAY_H
#include "tensor/tensor.h"

typedef struct ps_replay ps_replay;

/* A dry row of so many micro-batches and parts begins. Micro-batches [first, end) will do what first - 1 does; none
 * where first is end. It lasts until ps_replay_end. PS_ENOMEM. */
int ps_replay_begin(ps_ctx *ctx, int32_t micros, int32_t parts, int32_t first, int32_t end);
void ps_replay_end(ps_ctx *ctx);         /* bytes that wait go. It may be called again, and without a begin */
void ps_replay_enter(ps_ctx *ctx, int32_t part, int32_t micro);     /* that part of the micro-batch begins */
/* It is over. PS_ESTATE: micro-batches do not do alike, so the row cannot go on with repeats (ps_replay_differs). */
int ps_replay_leave(ps_ctx *ctx);
bool ps_replay_differs(const ps_ctx *ctx);
/* Does the part again for another micro-batch. PS_ESTATE: it was not noted. Else the errors of memory and of pins. */
int ps_replay_part(ps_ctx *ctx, int32_t part, int32_t micro);
void ps_replay_collected(ps_ctx *ctx);   /* Lua's collector has run */

/* -- for tensor.c and dispatch.c, while ctx->replay is set --------------------------------------------------------- */
void ps_replay_made(ps_ctx *ctx, ps_storage *s);
/* A dry run of a pipeline made it. */
static inline bool ps_replay_has(const ps_storage *s) { return s->replay.of != NULL; }
/* Whether a script may have a header of it, so that its bytes wait for Lua's collector. */
static inline void ps_replay_scripted(ps_storage *s, bool is) { s->replay.scripted = is; }
/* The bytes of the storage go. released: with the last header. True: they wait, and are s's no more. */
bool ps_replay_gone(ps_storage *s, bool released);
void ps_replay_op(ps_ctx *ctx);          /* an op is about to pin its operands */
void ps_replay_pin(ps_ctx *ctx, ps_storage *s, int device, unsigned access);
void ps_replay_unpin(ps_ctx *ctx, ps_storage *s, int device);
void ps_replay_take(ps_ctx *ctx, int device, int64_t nbytes);       /* scratch memory; the youngest is given first */
void ps_replay_give(ps_ctx *ctx, int device);
void ps_replay_spoil(ps_ctx *ctx);       /* something was done that cannot be done again */
void ps_replay_free(ps_replay *r);
#endif
