/* SPDX-License-Identifier: BSD-3-Clause
 * Activations that wait on the host. A storage that the tape keeps for backward leaves its device by a copy that runs
 * beside the computation. It comes back when it is pinned, or a little before. This layer lies above the manager that
 * made the storage's bytes (plain memory, whose budgets count both sides), and is the storage's manager while it is
 * away. Called by tensor/ and by the tape; one thread.
 *
 * Storages that leave together are a round. The first to leave in a round waits until the round before has left. Bytes
 * on either side go at these points only, never when a copy happens to end. So dry runs, which do everything except
 * copy, tell the peaks exactly. */
#ifndef PS_AWAY_H
#define PS_AWAY_H
#include "base/step.h"
#include "mem/mem.h"

typedef struct ps_away ps_away;

/* `mem`: who allocates now; `step`: the step under way. Both are read at each call. PS_EUNSUP without a host. */
int ps_away_new(int n_devices, ps_backend *const *devices, ps_mem *const *mem,
                const ps_step *const *step, ps_away **out);
void ps_away_delete(ps_away *away);           /* when no storage is away any more */
void ps_away_round(ps_away *away);            /* begins the next round */
/* Sends a storage away, if it can go: in plain memory, of a device apart from the host, not pinned, not fetched before.
 * Where there is no room on the host it stays. */
void ps_away_leave(ps_away *away, ps_storage *s);
/* Backward is under way: a pin also fetches those that left before it, in the forward of the same micro-batch and
 * virtual stage. */
void ps_away_backward(ps_away *away, bool on);
bool ps_away_is_dry(const ps_away *away, const ps_storage *s);   /* it is away, and a dry run made it */
#endif
