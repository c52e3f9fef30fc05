/* SPDX-License-Identifier: BSD-3-Clause
 * The planner decides which chunk moves where and when in a training step, from a trace of that step. Its functions
 * are pure: they read no clock and no tensors. schedule.c calls them, and tests and benches do through ps_test.h.
 *
 * Tiers count from 0, the fastest: device, host, disk. On the CPU backend, host is tier 0. Level l moves chunks
 * between tier l and tier l + 1. A chunk has a valid copy on one or more tiers:
 *   - A fetch leaves the copy on the lower tier, which takes space there until it is dropped. The last tier has space
 *     for every chunk.
 *   - A write makes all other copies stale.
 *   - Dropping a copy costs nothing if a lower tier has a valid one. Otherwise the contents move down first.
 *
 * Moves are performed in the order of their list. Each begins no sooner than its `from` and `after`, and a use waits
 * for the moves that its moment needs. The list guarantees:
 *   - No tier holds more than its capacity. If a moment's op needs more, the capacity is larger by `extra` until the
 *     moves that the next moment waits for are done.
 *   - Every use finds its chunk, and the last valid copy of a chunk is never dropped.
 *   - No moves wait for each other in a circle. `from` and `need` never fall along a list.
 * A DROP on the host must never become a write to the disk. It may leave the only valid copy on the device, whose
 * list then has an EVICT instead of a DROP. Or it may discard contents that a later write on the device replaces. */
#ifndef PS_PLAN_H
#define PS_PLAN_H
#include "ps_test.h"   /* declares ps_plan_chunk, ps_move, ps_plan_input, ps_plan and all functions */

enum { PS_TIERS = 3 };
#endif
