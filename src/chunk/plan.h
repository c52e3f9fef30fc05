/* SPDX-License-Identifier: BSD-3-Clause
 * The planner computes, from a trace of one training step, the moves that serve it: which chunk moves where, and when.
 * Its functions are pure: they read no clock and no tensors, and only the result outlives a call. schedule.c, tests and
 * (through ps_test.h) benches call them.
 *
 * Tiers count from 0, the fastest: device, host, disk (on the CPU backend host is tier 0). A level is a pair of
 * neighbours: level l moves chunks between tier l and tier l + 1. A chunk has a valid copy on one or more tiers. When a
 * chunk is fetched, its copy on the lower tier stays and occupies space there until it is dropped. On the last tier
 * such copies cost nothing, since that tier has space for every chunk. A write makes all other copies stale. Dropping a
 * copy costs nothing if a lower tier has a valid one; else the contents are moved down first.
 *
 * A list of moves is performed in order. Each move begins no sooner than its `from` and `after`, and every use waits
 * for the moves that are needed by its moment. The list then guarantees:
 *   - No tier holds more than its capacity. If the op of a moment needs more, the bound is the capacity plus `extra`
 *     until the moves that the next moment waits for are done.
 *   - Every use finds its chunk, and the last valid copy of a chunk is never dropped.
 *   - No moves wait for each other in a circle. `from` and `need` never fall along a list.
 * The executor of a DROP on the host must not turn it into a write to the disk. Such a DROP may leave the only valid
 * copy on the device (the device's list then has an EVICT in place of a DROP), or may discard contents that a later
 * write on the device replaces. */
#ifndef PS_PLAN_H
#define PS_PLAN_H
#include "ps_test.h"   /* declares ps_plan_chunk, ps_move, ps_plan_input, ps_plan and all functions */

enum { PS_TIERS = 3 };
#endif
