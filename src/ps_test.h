/* SPDX-License-Identifier: BSD-3-Clause
 * Functions for tests and benches: deliberate failures, the planner by itself, and rates of the machine. The program
 * exports these functions, and Lua declares them together with the functions of ps.h. They are not part of the API,
 * and this file is not installed. */
#ifndef PS_TEST_H
#define PS_TEST_H
#include "ps.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* @cdef */
/* -- deliberate failures ----------------------------------------------------------------------------------------- */
/* Makes `count` consecutive allocations fail. Allocations are numbered from 0, starting now, and the first allocation
 * that fails has the number `nth`. If nth is -1, the failures are turned off. */
void ps_test_fail_alloc(int64_t nth, int64_t count);
int64_t ps_test_fail_alloc_left(void);   /* number of allocations before the first failure; negative after it */
/* Functions for the disk tier, documented in chunk/disk.h. */
void ps_test_fail_io(int64_t nth, int64_t count, int code);
void ps_test_slow_io(double seconds);
/* Makes operations that write files fail with error `code` (an errno). The operations are reserving, writing, syncing
 * and renaming. The operations are numbered from 0, starting now. The operations from nth to nth + count - 1 fail. If
 * nth is -1, the failures are turned off. ps_test_fail_file_left returns the number of operations before the first
 * failure. The number is negative after the first failure. */
void ps_test_fail_file(int64_t nth, int64_t count, int code);
int64_t ps_test_fail_file_left(void);
/* Plants a signal. When the next action of this kind and micro-batch has begun, the process waits `seconds` seconds and
 * then raises the signal. */
void ps_test_signal(int kind, int micro, double seconds, int signal);
/* Sets how long the end of a group waits until its peers have received its last message. A negative value restores
 * the default. A test can pass more seconds than the test itself may take. The test then detects an end that waits
 * for a peer which already has the message. It does not mistake a slow machine for such an end. */
void ps_test_linger(double seconds);
/* Shifts the clock of recorded events by this number of nanoseconds. The clocks of two machines can differ in this
 * way. */
void ps_test_record_skew(int64_t ns);

/* -- the layout of structs ---------------------------------------------------------------------------------------- */
/* Returns entry i of the table of sizes and offsets in C, such as "ps_tensor" (a size) or "ps_tensor.grad_" (an
 * offset). Returns -1 after the last entry. */
int64_t ps_abi_size(int i, const char **name);

/* -- planning: makes the moves that a step needs, from the trace of one step; src/chunk/plan.h explains them ----- */
typedef struct ps_plan_chunk {
  int64_t nbytes;
  uint8_t valid;               /* bit set of the tiers with a valid copy at the start. 0 means that the chunk has no
                                * contents yet (zeros). Its first use then allocates memory but moves nothing. */
} ps_plan_chunk;
/* FETCH: copies from tier + 1 to `tier`. EVICT: copies from `tier` to tier + 1, then drops the copy on `tier`. DROP:
 * drops the copy on `tier`, because another copy is valid, because the contents are no longer needed (ps_use.ends),
 * or because no op uses them before they are no longer needed. */
enum { PS_MOVE_FETCH, PS_MOVE_EVICT, PS_MOVE_DROP };
/* The moves of a level are performed in the order of their list. A move may begin when two things have ended: all
 * uses at moments less than `from`, and the first `after` moves of the other level. A use at moment m waits for all
 * moves whose `need` is at most m. If `need` is after the last moment of the step, the move reads ahead for the next
 * step. */
typedef struct ps_move {
  int32_t chunk;
  int32_t from, need;          /* moments. need: moment of the use that needs the chunk or the memory that this move
                                * frees. */
  int32_t after;
  int8_t kind, tier;
  int16_t pad;
} ps_move;
typedef struct ps_plan_input {
  int32_t n_tiers, n_chunks, n_uses, n_moments;
  const ps_plan_chunk *chunks;
  const ps_use *uses;
  int64_t capacity[3];         /* bytes for chunks on each tier. The last value is ignored, because the last tier has
                                * space for all chunks. */
  const int64_t *extra[3];     /* [n_moments] or NULL: additional bytes of a tier between the op of a moment and the
                                * next op, for chunks of that op that exceed the capacity */
  int64_t ahead[3];            /* read-ahead depth: maximum bytes of a tier that fetched chunks occupy before their
                                * use */
  int32_t policy;
  int32_t cyclic;              /* 1 if the step repeats, so that the first moment follows the last moment */
} ps_plan_input;
typedef struct ps_plan {
  int32_t n_moves[2];
  ps_move *moves[2];           /* moves of each level */
  int64_t fetched[2], evicted[2];   /* fetched: bytes that this step copies to the upper tier of a level. evicted:
                                     * bytes that it copies to the lower tier. */
  int64_t peak[3];             /* peak bytes of chunks on each tier; for the last tier, the bytes of all chunks */
  uint8_t *valid_before, *valid_after;   /* [n_chunks] values as in ps_plan_chunk.valid, before and after the step. If
                                          * both are equal, the plan repeats. */
} ps_plan;
/* Makes a plan. Returns PS_ENOMEM if the chunks of one moment do not fit into their tier. *bad_use is then the first
 * use that does not fit. The message contains the moment, the bytes wanted and the capacity; the caller adds names.
 * After any other failure *bad_use is -1. */
int ps_plan_make(const ps_plan_input *in, ps_plan *out, int32_t *bad_use);
/* Makes the plan of a step that repeats. The function makes a sequence of plans. Each plan starts from the final
 * state of the previous plan. The sequence ends when the final state of a plan equals its initial state, or after a
 * few plans. */
int ps_plan_steady(const ps_plan_input *in, ps_plan *out, int32_t *bad_use);
void ps_plan_clear(ps_plan *plan);

/* -- rates of the machine ----------------------------------------------------------------------------------------- */
/* Measures the bytes per second that the compute threads read and write. The result is the median of `passes` passes.
 * The threads read `reads` streams of fp32 values and write `writes` streams. `writes` can be 0. If `in_place` is 1,
 * the written streams are the first `writes` of the read streams. Otherwise the written streams are separate.
 * `nbytes` is the size of all streams together. */
int ps_probe_bandwidth(int64_t nbytes, int reads, int writes, int in_place, int passes, double *bytes_per_s);
/* Runs the communication library's own all-gather or all-reduce of fp32 values, without checks between ranks. */
int ps_group_raw(ps_group *group, int all_reduce, ps_tensor *out, ps_tensor *in);
/* @endcdef */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
