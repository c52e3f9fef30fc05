/* SPDX-License-Identifier: BSD-3-Clause
 * Replay makes dry runs of a pipeline short: only a few micro-batches are performed. Replay records the effects that
 * the last performed micro-batches have on memory, chunks and other ranks. For each following micro-batch, it repeats
 * these effects: it allocates and frees the same storages in the same order, pins the same chunks at the same moments,
 * and records the same collectives. A span is a part of a micro-batch's work that runs without interruption
 * (pipe/exec_state.h). The spans of a micro-batch always run in the same order.
 *
 * If a script had a header of a tensor, the tensor's bytes are kept until Lua's collector has been called
 * (ps_replay_collected). Then all such bytes are freed, the youngest first. So a dry run does not depend on the time at
 * which the collector frees the tensor. Every dry run of a pipeline does this, even without replay, so that dry runs
 * with and without replay use the same number of bytes at each moment. */
#ifndef PS_TENSOR_REPLAY_H
#define PS_TENSOR_REPLAY_H
#include "tensor/tensor.h"

typedef struct ps_replay ps_replay;

/* Begins a dry run of `micros` micro-batches. Each micro-batch has `spans` spans. The micro-batches `first` to end - 1
 * will repeat micro-batch first - 1. ps_replay_end() ends the dry run. Returns 0 or PS_ENOMEM. */
int ps_replay_begin(ps_ctx *ctx, int32_t micros, int32_t spans, int32_t first, int32_t end);
void ps_replay_end(ps_ctx *ctx);         /* frees the kept bytes; may be called at any time */
void ps_replay_enter(ps_ctx *ctx, int32_t span, int32_t micro);     /* begins a span of a micro-batch */
/* Ends the span. Returns PS_ESTATE if the micro-batches differ, because a replay is then impossible
 * (ps_replay_differs). */
int ps_replay_leave(ps_ctx *ctx);
bool ps_replay_differs(const ps_ctx *ctx);
/* Repeats the effects of the span for micro-batch `micro`. Returns PS_ESTATE if the span was not recorded, or the error
 * of an allocation or a pin. */
int ps_replay_span(ps_ctx *ctx, int32_t span, int32_t micro);
void ps_replay_collected(ps_ctx *ctx);   /* called when Lua's collector has run */

/* -- for tensor.c and dispatch.c, while ctx->dry.replay is set ----------------------------------------------------- */
void ps_replay_made(ps_ctx *ctx, ps_storage *s);
/* Returns true if a dry run of a pipeline made the storage. */
static inline bool ps_replay_has(const ps_storage *s) { return s->replay.of != NULL; }
/* Sets whether a script may have a header of the storage. If it may, the storage's bytes wait for Lua's collector. */
static inline void ps_replay_scripted(ps_storage *s, bool is) { s->replay.scripted = is; }
/* Called before the bytes of the storage are freed. released: whether the storage's last header was released. Returns
 * true if the bytes are kept; they then no longer belong to s. */
bool ps_replay_gone(ps_storage *s, bool released);
void ps_replay_op(ps_ctx *ctx);          /* called before an op pins its operands */
void ps_replay_pin(ps_ctx *ctx, ps_storage *s, int device, unsigned access);
void ps_replay_unpin(ps_ctx *ctx, ps_storage *s, int device);
void ps_replay_take(ps_ctx *ctx, int device, int64_t nbytes);       /* take allocates scratch memory; give frees the
                                                                     * youngest block */
void ps_replay_give(ps_ctx *ctx, int device);
void ps_replay_spoil(ps_ctx *ctx);       /* called for an operation that cannot be replayed */
void ps_replay_free(ps_replay *r);
#endif
