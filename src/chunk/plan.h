/* SPDX-License-Identifier: BSD-3-Clause
 * The planner decides which chunks move in a training step, and when and where they move. It uses a trace of that step.
 * Its functions are pure: they read no clock and no tensors. schedule.c calls them. Tests and benchmarks call them
 * through ps_test.h.
 *
 * Tiers are numbered from 0, which is the fastest. The order is device, host, disk. On the CPU backend, host is tier 0.
 * Level l moves chunks between tier l and tier l + 1. A chunk has a valid copy on one or more tiers:
 *   - A fetch leaves the copy on the lower tier. That copy occupies space on the lower tier until it is dropped. The
 *   last tier has
 *     space for every chunk.
 *   - A write makes all other copies stale.
 *   - Dropping a copy costs nothing if a lower tier has a valid copy. Otherwise the contents must first move down.
 *
 * Moves are performed in the order of their list. A move begins at moment `from` or later, and not before the first
 * `after` moves of the other level. A use waits for the moves that its moment needs. The lists guarantee:
 *   - No tier holds more bytes than its capacity. If the op of a moment needs more, the capacity is larger by `extra`
 *     until the moves that the next moment waits for are done.
 *   - Every use finds its chunk, and the last valid copy of a chunk is never dropped.
 *   - Moves never wait for each other in a circle. `from` and `need` never decrease along a list.
 * A DROP on the host must never become a write to the disk. There are two cases. If the DROP leaves the only valid
 * copy on the device, the list of level 0 then has an EVICT instead of a DROP. Otherwise the DROP discards contents
 * that a later write on the device replaces. */
#ifndef PS_PLAN_H
#define PS_PLAN_H
#include "ps_test.h"   /* declares the types and all functions of the planner */

enum { PS_TIERS = 3 };
#endif
