/* SPDX-License-Identifier: BSD-3-Clause
 * Calls for tests and benches: deliberate failures, the planner alone, rates of the machine. The program exports them,
 * and Lua declares them together with the calls of ps.h. They are not part of the API, and this file is not
 * installed. */
#ifndef PS_TEST_H
#define PS_TEST_H
#include "ps.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* @cdef */
/* -- failures on purpose ----------------------------------------------------------------------------------------- */
/* Makes `count` allocations fail, from the nth allocation on (counted from 0). nth -1 switches this off. */
void ps_test_fail_alloc(int64_t nth, int64_t count);
int64_t ps_test_fail_alloc_left(void);   /* number of allocations before the first failure, negative after it */
/* Functions for the disk tier, documented in chunk/disk.h. */
void ps_test_fail_io(int64_t nth, int64_t count, int code);
void ps_test_slow_io(double seconds);
/* Makes operations that write files (reserving, writing, syncing, renaming) fail with error `code` (an errno): those
 * with index nth to nth + count - 1, counted from now. nth -1 switches this off. _left returns the number of
 * operations before the first failure, negative after it. */
void ps_test_fail_file(int64_t nth, int64_t count, int code);
int64_t ps_test_fail_file_left(void);
/* After the next action of this kind and micro-batch has begun, waits `seconds` and raises the signal. */
void ps_test_signal(int kind, int micro, double seconds, int signal);
/* Sets how long the end of a group waits until its peers have received its last message. A negative value restores
 * the default. If `seconds` exceeds the time that a test may take, an end that waits for a peer which already has
 * the message cannot be mistaken for a slow machine. */
void ps_test_linger(double seconds);
/* Makes the clock of recorded events wrong by this amount, as the clock of another machine can be. */
void ps_test_record_skew(int64_t ns);

/* -- the layout of structs ---------------------------------------------------------------------------------------- */
/* Returns entry i of the table of C's sizes ("ps_tensor") and offsets ("ps_tensor.grad_"), or -1 after its end. */
int64_t ps_abi_size(int i, const char **name);

/* -- planning: from a trace of one step to the moves that serve it; src/chunk/plan.h says how to read them --------- */
typedef struct ps_plan_chunk {
  int64_t nbytes;
  uint8_t valid;               /* bit set of the tiers with a valid copy at the start. 0 means that the chunk has no
                                * contents yet (zeros), so that its first use allocates memory but moves nothing. */
} ps_plan_chunk;
/* FETCH: copies from tier + 1 up to `tier`. EVICT: copies from `tier` down to tier + 1, then drops the copy on
 * `tier`. DROP: drops the copy on `tier`, because another copy is valid, or because the contents have ended or end
 * before they are used. */
enum { PS_MOVE_FETCH, PS_MOVE_EVICT, PS_MOVE_DROP };
/* The moves of a level are performed in the order of their list. A move may begin when all uses at moments < from
 * and the first `after` moves of the other level have ended. A use at moment m waits for all moves with need <= m.
 * need can be after the step's last moment: such a move reads ahead for the next step. */
typedef struct ps_move {
  int32_t chunk;
  int32_t from, need;          /* moments. need: the use for which this move fetches or makes room. */
  int32_t after;
  int8_t kind, tier;
  int16_t pad;
} ps_move;
typedef struct ps_plan_input {
  int32_t n_tiers, n_chunks, n_uses, n_moments;
  const ps_plan_chunk *chunks;
  const ps_use *uses;
  int64_t capacity[3];         /* bytes for chunks on each tier; the last value is ignored, because the last tier has
                                * room for all */
  const int64_t *extra[3];     /* [n_moments] additional bytes of a tier, from a moment's op until the next one, for
                                * chunks of that op that exceed the capacity; or NULL */
  int64_t ahead[3];            /* read-ahead depth: bytes of a tier that fetches may occupy before their use */
  int32_t policy;
  int32_t cyclic;              /* 1 if the step repeats, so that its first moment follows its last one */
} ps_plan_input;
typedef struct ps_plan {
  int32_t n_moves[2];
  ps_move *moves[2];           /* by level */
  int64_t fetched[2], evicted[2];   /* bytes copied up and down a level in this step */
  int64_t peak[3];             /* peak bytes of chunks on each tier; for the last tier, the bytes of all chunks */
  uint8_t *valid_before, *valid_after;   /* [n_chunks] values like ps_plan_chunk.valid; if both are equal, the plan
                                          * repeats */
} ps_plan;
/* Makes a plan. Returns PS_ENOMEM if the chunks of one moment do not fit their tier. The message then contains the
 * moment, the bytes wanted and the capacity (the caller adds names), and *bad_use is the first use that does not
 * fit. After another failure *bad_use is -1. */
int ps_plan_make(const ps_plan_input *in, ps_plan *out, int32_t *bad_use);
/* Makes the plan of a step that repeats. Plans again from the plan's own final state until it equals the initial
 * state, for at most a few rounds. */
int ps_plan_steady(const ps_plan_input *in, ps_plan *out, int32_t *bad_use);
void ps_plan_clear(ps_plan *plan);

/* -- rates of the machine ----------------------------------------------------------------------------------------- */
/* Measures the bytes per second that the compute threads read and write (median of `passes`). They read `reads` fp32
 * streams and write `writes` streams (0 or more). If `in_place` is 1, the written streams are the first of those
 * that are read; otherwise they are separate. `nbytes` is the size of all streams together. */
int ps_probe_bandwidth(int64_t nbytes, int reads, int writes, int in_place, int passes, double *bytes_per_s);
/* Runs the library's own all-gather or all-reduce of fp32, without checks between ranks. */
int ps_group_raw(ps_group *group, int all_reduce, ps_tensor *out, ps_tensor *in);
/* @endcdef */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
