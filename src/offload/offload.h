/* SPDX-License-Identifier: BSD-3-Clause
 * Activations that wait on the host. A storage that the tape keeps for backward leaves its device by a copy that runs
 * beside the computation. It comes back when it is pinned, or a little before. This layer is the keeper of a storage
 * that is away. The bytes on both sides are plain memory, and the budgets there count them. Called by tensor/ and by
 * the tape; one thread.
 *
 * Storages that leave together are a round. The first to leave in a round waits until the round before has left. Bytes
 * on either side are given back there, at pins and at frees, never when a copy happens to end. So dry runs, which do
 * everything except copy, tell the peaks exactly. */
#ifndef PS_AWAY_H
#define PS_AWAY_H
#include "base/step.h"
#include "mem/mem.h"

typedef struct ps_away ps_away;

/* `mem`: the memory that allocates now; `step`: the step under way. Both are read at each call. PS_EUNSUP without host
 * memory. */
int ps_away_new(int n_devices, ps_backend *const *devices, ps_mem *const *mem,
                const ps_step *const *step, ps_away **out);
void ps_away_delete(ps_away *away);           /* when no storage is away any more */
void ps_away_round(ps_away *away);            /* begins the next round */
/* Sends a storage away, if it can go: it lies in plain memory of a device apart from the host, is not pinned, was not
 * fetched before, and no backward is under way. Where the host has no room, it stays. */
void ps_away_leave(ps_away *away, ps_storage *s);
/* on: backward is under way. Then a pin also fetches the storages that backward will want next, of the forward of the
 * same micro-batch and virtual stage. */
void ps_away_backward(ps_away *away, bool on);
bool ps_away_is_dry(const ps_away *away, const ps_storage *s);   /* s is away, and a dry run made it */
#endif
