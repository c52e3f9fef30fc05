/* SPDX-License-Identifier: BSD-3-Clause
 * From a trace of one training step to the moves that serve it: which chunk goes where, and when. Pure functions of
 * their arguments: no clock, no allocation that outlives a call but the result, no data. Called by chunk.c, by tests
 * and, through ps.h, by benches.
 *
 * Tiers count from 0, the fastest: device, host, disk (on the CPU backend host is tier 0). A level is a pair of
 * neighbours: level l moves chunks between tier l and tier l + 1. A chunk has a valid copy on one or more tiers; the
 * copies that stay behind when it is fetched cost their tier's space until they are dropped; on the last tier (disk),
 * whose space is set aside for every chunk, they are free. A write makes all other copies stale. Dropping a copy is
 * free when a lower tier holds a valid one; else it is moved down first. */
#ifndef PS_PLAN_H
#define PS_PLAN_H
#include <stdbool.h>
#include <stdint.h>

enum { PS_TIERS = 3 };

/* One use of a chunk: at moment `moment` its bytes must be on `tier`. Uses are sorted by moment; those of one moment
 * (an op) are needed at once. A chunk occurs at most once a moment; `write`: it is changed there. */
typedef struct ps_use {
    int32_t moment, chunk;
    int8_t tier, write;
    int16_t pad;
} ps_use;

typedef struct ps_plan_chunk {
    int64_t nbytes;
    uint8_t valid;        /* tiers with a valid copy at the start, as a bit set; 0: no contents yet (zeros): the first
                           * use takes space but moves nothing */
} ps_plan_chunk;

typedef enum ps_move_kind {
    PS_MOVE_FETCH,        /* copy from tier + 1 up to `tier` */
    PS_MOVE_EVICT,        /* write down from `tier` to tier + 1 (when no lower copy is valid), then drop from `tier` */
    PS_MOVE_DROP,         /* drop from `tier`: a lower tier has a valid copy, or the contents are stale */
} ps_move_kind;

/* Moves of a level are carried out in the order of the list. A move may begin as soon as every use of a moment < `from`
 * is over; a use at moment m waits for all moves with need <= m. */
typedef struct ps_move {
    int32_t chunk;
    int32_t from, need;   /* moments; need: of the use it serves or makes room for */
    int8_t kind, tier;
    int16_t pad;
} ps_move;

enum { PS_POLICY_BELADY, PS_POLICY_LRU, PS_POLICY_FIFO, PS_POLICY_PLAN, PS_POLICY_COUNT };
const char *ps_policy_name(int policy);               /* "belady", "lru", "fifo", "plan" */
int ps_policy_find(const char *name, int *out);       /* PS_EINVAL, naming those there are */

typedef struct ps_plan_input {
    int32_t n_tiers, n_chunks, n_uses, n_moments;
    const ps_plan_chunk *chunks;
    const ps_use *uses;
    int64_t capacity[PS_TIERS];   /* bytes for chunks on each tier; of the last one ignored: it holds them all */
    int64_t ahead[PS_TIERS];      /* bytes of a tier that fetches may take before their use: read-ahead depth */
    int32_t policy;
    int32_t cyclic;               /* 1: the step repeats, so after the last moment the first comes again */
} ps_plan_input;

typedef struct ps_plan {
    int32_t n_moves[PS_TIERS - 1];
    ps_move *moves[PS_TIERS - 1];         /* by level */
    int64_t fetched[PS_TIERS - 1], evicted[PS_TIERS - 1];   /* bytes copied up and down a level, this step */
    int64_t peak[PS_TIERS];               /* bytes of chunks on each tier, at most */
    uint8_t *valid_after;                 /* [n_chunks] as ps_plan_chunk.valid, when the step is over */
} ps_plan;

/* PS_ENOMEM when the chunks of one moment do not fit their tier: says moment, bytes wanted and capacity (the caller
 * adds names), `*bad_use` is the first use that did not fit. */
int ps_plan_make(const ps_plan_input *in, ps_plan *out, int32_t *bad_use);
void ps_plan_clear(ps_plan *plan);
#endif
