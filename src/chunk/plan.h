/* SPDX-License-Identifier: BSD-3-Clause
 * From a trace of one training step to the moves that serve it: which chunk goes where, and when. Pure functions of
 * their arguments: no clock, no allocation that outlives a call but the result, no data. Called by chunk.c, by tests
 * and, through ps_test.h, by benches.
 *
 * Tiers count from 0, the fastest: device, host, disk (on the CPU backend host is tier 0). A level is a pair of
 * neighbours: level l moves chunks between tier l and tier l + 1. A chunk has a valid copy on one or more tiers; the
 * copies that stay behind when it is fetched cost their tier's space until they are dropped; on the last tier (disk),
 * whose space is set aside for every chunk, they are free. A write makes all other copies stale. Dropping a copy is
 * free when a lower tier holds a valid one; else it is moved down first.
 *
 * What a list of moves promises: carried out in order, each begun no sooner than `from` and `after` say, with every use
 * waiting for the moves that are needed by its moment, no tier ever holds more than its capacity (and `extra` from a
 * moment whose op needs it until the moves are done that the next moment waits for), every use finds its chunk, the
 * last valid copy of a chunk is never dropped, and nobody waits in a circle. `from` and `need` never fall along a list.
 * A DROP on the host is never to be made a write to the disk: it may leave the device with the only valid copy (the
 * device's list then has an EVICT where it would else have a DROP), or end contents that a coming write on the device
 * replaces. */
#ifndef PS_PLAN_H
#define PS_PLAN_H
#include "ps_test.h"   /* the types ps_use, ps_plan_chunk, ps_move, ps_plan_input, ps_plan, and all functions */

enum { PS_TIERS = 3 };
#endif
