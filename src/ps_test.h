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
/* `count` requests for memory fail, beginning with number `nth` (from 0). nth -1 switches this off. */
void ps_test_fail_alloc(int64_t nth, int64_t count);
int64_t ps_test_fail_alloc_left(void);   /* requests before the first failure; negative once one has failed */
/* Calls for the disk tier: see chunk/disk.h. */
void ps_test_fail_io(int64_t nth, int64_t count, int code);
void ps_test_slow_io(double seconds);
/* Operations that write files (reserving, writing, syncing, renaming) are counted from now on. Those with numbers nth
 * to nth + count - 1 fail with error `code` (an errno). nth -1 switches this off. left: number of operations before the
 * first failure; negative after it. */
void ps_test_fail_file(int64_t nth, int64_t count, int code);
int64_t ps_test_fail_file_left(void);
/* After the next action of this kind and micro-batch of a step has begun, it waits `seconds` and raises the signal. */
void ps_test_signal(int kind, int micro, double seconds, int signal);
/* The end of a group waits up to `seconds` until its peers have received its last message; negative: as long as usual.
 * If this time is longer than a test may take, then an end that waits for a peer which already has the message cannot
 * be mistaken for a slow machine. */
void ps_test_linger(double seconds);
/* From now on the clock of recorded events is wrong by this amount, as that of another machine may be. */
void ps_test_record_skew(int64_t ns);

/* -- the layout of structs ---------------------------------------------------------------------------------------- */
/* Returns entry i of a table of sizes ("ps_tensor") and offsets ("ps_tensor.grad_") as C has them; -1 after its end. */
int64_t ps_abi_size(int i, const char **name);

/* -- planning: from a trace of one step to the moves that serve it; src/chunk/plan.h says how to read them --------- */
typedef struct ps_plan_chunk {
  int64_t nbytes;
  uint8_t valid;               /* tiers with a valid copy at the start, as a bit set; 0: no contents yet (zeros): the
                                * first use takes space but moves nothing */
} ps_plan_chunk;
/* FETCH: copy from tier + 1 up to `tier`. EVICT: write down from `tier` to tier + 1, then drop from `tier`. DROP: drop
 * from `tier`: another copy is valid, or the contents end before they are used, or have ended. */
enum { PS_MOVE_FETCH, PS_MOVE_EVICT, PS_MOVE_DROP };
/* Moves of a level are performed in the order of their list. A move may begin as soon as every use of a moment < from
 * and the first `after` moves of the other level are over. A use at moment m waits for all moves with need <= m. need
 * may be after the step's last moment: this is read-ahead for the next step. */
typedef struct ps_move {
  int32_t chunk;
  int32_t from, need;          /* moments; need: the moment of the use for which it fetches or makes room */
  int32_t after;
  int8_t kind, tier;
  int16_t pad;
} ps_move;
typedef struct ps_plan_input {
  int32_t n_tiers, n_chunks, n_uses, n_moments;
  const ps_plan_chunk *chunks;
  const ps_use *uses;
  int64_t capacity[3];         /* bytes for chunks on each tier. The value of the last tier is ignored: it has room for
                                * all */
  const int64_t *extra[3];     /* [n_moments] additional bytes of a tier, from that moment's op up to the next one, for
                                * chunks of that op that the capacity cannot hold; NULL: none */
  int64_t ahead[3];            /* bytes of a tier that fetches may take before their use: the read-ahead depth */
  int32_t policy;
  int32_t cyclic;              /* 1: the step repeats, so the first moment follows the last */
} ps_plan_input;
typedef struct ps_plan {
  int32_t n_moves[2];
  ps_move *moves[2];           /* by level */
  int64_t fetched[2], evicted[2];   /* bytes copied up and down a level in this step */
  int64_t peak[3];             /* the most bytes of chunks on each tier; for the last tier: the bytes of all chunks */
  uint8_t *valid_before, *valid_after;   /* [n_chunks] as ps_plan_chunk.valid; equal: the plan repeats */
} ps_plan;
/* PS_ENOMEM if the chunks of one moment do not fit their tier. The message has the moment, the bytes wanted and the
 * capacity (the caller adds names), and *bad_use is the first use that did not fit. -1: another failure. */
int ps_plan_make(const ps_plan_input *in, ps_plan *out, int32_t *bad_use);
/* Makes the plan of a step that repeats: makes it again from its own end until it ends as it began, for at most a few
 * rounds. */
int ps_plan_steady(const ps_plan_input *in, ps_plan *out, int32_t *bad_use);
void ps_plan_clear(ps_plan *plan);

/* -- rates of the machine ----------------------------------------------------------------------------------------- */
/* Bytes per second that the compute threads read and write (median of `passes`). They read `reads` fp32 streams and
 * write `writes` streams (0 or more). in_place: they write the first of the streams that they read, else others.
 * nbytes: bytes of all streams together. */
int ps_probe_bandwidth(int64_t nbytes, int reads, int writes, int in_place, int passes, double *bytes_per_s);
/* The library's own all-gather or all-reduce of fp32, without any check between ranks. */
int ps_group_raw(ps_group *group, int all_reduce, ps_tensor *out, ps_tensor *in);
/* @endcdef */

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
