/* SPDX-License-Identifier: BSD-3-Clause
 * A dry run of a pipeline performs only a few micro-batches. The operations of the last of them on memory, chunks and
 * other ranks are recorded and replayed for the micro-batches that follow: the same storages are allocated and freed in
 * the same order, the same chunks are pinned at the same moments, the same collectives are recorded. A span is a piece
 * of a micro-batch's work in a row (pipe/exec.c numbers them); the spans of a micro-batch always run in the same order.
 *
 * Lua's collector decides when the bytes of tensors for which a script had a header are freed. So that a dry run does
 * not depend on it, such bytes are kept until the collector was called (ps_replay_collected), and are then freed, the
 * youngest first. Every dry run of a pipeline does so, with or without replayed micro-batches, so that both have the
 * same bytes at each moment. */
#ifndef PS_TENSOR_REPLAY_H
#define PS_TENSOR_REPLAY_H
#include "tensor/tensor.h"

typedef struct ps_replay ps_replay;

/* Begins a dry row of `micros` micro-batches and `spans` spans. Micro-batches [first, end) will repeat micro-batch
 * first - 1; if first is end, no micro-batch repeats another. The row lasts until ps_replay_end. Returns PS_ENOMEM
 * if memory is exhausted. */
int ps_replay_begin(ps_ctx *ctx, int32_t micros, int32_t spans, int32_t first, int32_t end);
void ps_replay_end(ps_ctx *ctx);         /* frees the kept bytes; may be called again, and without a begin */
void ps_replay_enter(ps_ctx *ctx, int32_t span, int32_t micro);     /* begins the span of the micro-batch */
/* Ends the span. Returns PS_ESTATE if micro-batches differ, so that the row cannot continue with replays
 * (ps_replay_differs). */
int ps_replay_leave(ps_ctx *ctx);
bool ps_replay_differs(const ps_ctx *ctx);
/* Replays the span for another micro-batch. Returns PS_ESTATE if the span was not recorded, or an error of memory or
 * of a pin. */
int ps_replay_span(ps_ctx *ctx, int32_t span, int32_t micro);
void ps_replay_collected(ps_ctx *ctx);   /* called when Lua's collector has run */

/* -- for tensor.c and dispatch.c, while ctx->dry.replay is set ----------------------------------------------------- */
void ps_replay_made(ps_ctx *ctx, ps_storage *s);
/* Returns true if a dry run of a pipeline made the storage. */
static inline bool ps_replay_has(const ps_storage *s) { return s->replay.of != NULL; }
/* Sets whether a script may have a header of the storage; if so, the bytes wait for Lua's collector. */
static inline void ps_replay_scripted(ps_storage *s, bool is) { s->replay.scripted = is; }
/* Called before the bytes of the storage are freed. `released` is true if the last header was released. Returns true
 * if the bytes are kept; they then no longer belong to s. */
bool ps_replay_gone(ps_storage *s, bool released);
void ps_replay_op(ps_ctx *ctx);          /* called before an op pins its operands */
void ps_replay_pin(ps_ctx *ctx, ps_storage *s, int device, unsigned access);
void ps_replay_unpin(ps_ctx *ctx, ps_storage *s, int device);
void ps_replay_take(ps_ctx *ctx, int device, int64_t nbytes);       /* scratch memory; `give` frees the youngest
                                                                     * block */
void ps_replay_give(ps_ctx *ctx, int device);
void ps_replay_spoil(ps_ctx *ctx);       /* called for an operation that cannot be replayed */
void ps_replay_free(ps_replay *r);
#endif
