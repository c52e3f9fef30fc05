/* SPDX-License-Identifier: BSD-3-Clause
 * From a trace of one training step to the moves that serve it: which chunk goes where, and when. Pure functions of
 * their arguments: no clock, no data, and only the result outlives a call. Called by schedule.c, by tests and, through
 * ps_test.h, by benches.
 *
 * Tiers count from 0, the fastest: device, host, disk (on the CPU backend host is tier 0). A level is a pair of
 * neighbours: level l moves chunks between tier l and tier l + 1. A chunk has a valid copy on one or more tiers. The
 * copy that stays below when a chunk is fetched takes space of its tier until it is dropped. On the last tier such
 * copies are free, since that tier has space for every chunk. A write makes all other copies stale. Dropping a copy
 * is free when a lower tier has a valid one; else the contents are moved down first.
 *
 * A list of moves is carried out in order. Each move begins no sooner than `from` and `after` say, and every use waits
 * for the moves that are needed by its moment. The list then promises:
 *   - No tier holds more than its capacity, plus `extra` from a moment whose op needs it until the moves are done that
 *     the next moment waits for.
 *   - Every use finds its chunk, and the last valid copy of a chunk is never dropped.
 *   - No moves wait for each other in a circle. `from` and `need` never fall along a list.
 * Whoever carries out a DROP on the host must not turn it into a write to the disk. Such a DROP may leave the device
 * with the only valid copy (the device's list then has an EVICT where it would else have a DROP), or end contents that
 * a coming write on the device replaces. */
#ifndef PS_PLAN_H
#define PS_PLAN_H
#include "ps_test.h"   /* the types ps_plan_chunk, ps_move, ps_plan_input, ps_plan, and all functions */

enum { PS_TIERS = 3 };
#endif
