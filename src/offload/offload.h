/* SPDX-License-Identifier: BSD-3-Clause
 * This layer offloads activations to the host until backward needs them. The copies run concurrently with the
 * computation. A storage is fetched back when it is pinned, or a little earlier. This layer is the keeper of an
 * offloaded storage. The memory on both sides is plain memory, and it counts against the budgets. tensor/ and the
 * tape call this layer on one thread.
 *
 * A round is the set of storages that are offloaded together. When the first storage of a round is offloaded, this
 * layer waits for the copies of the previous round. Memory is freed only at that point, at pins and when storages are
 * freed. It is never freed when a copy ends. A dry run does everything except copy. It therefore predicts the peaks
 * exactly. */
#ifndef PS_AWAY_H
#define PS_AWAY_H
#include "base/step.h"
#include "mem/mem.h"

typedef struct ps_away ps_away;

/* Creates the offloading layer of a context. Each call reads the present memory manager and step through `mem` and
 * `step`. Returns PS_EUNSUP if there is no host memory. */
int ps_away_new(int n_devices, ps_backend *const *devices, ps_mem *const *mem,
                const ps_step *const *step, ps_away **out);
void ps_away_delete(ps_away *away);           /* may be called only if no storage is offloaded */
void ps_away_round(ps_away *away);            /* begins the next round */
/* Offloads a storage. Does nothing in a backward. Also does nothing if the storage is pinned, was fetched before, or
 * is not in plain memory of a device. If the host has no room, the storage stays on the device. */
void ps_away_leave(ps_away *away, ps_storage *s);
/* Begins or ends a backward. During a backward, each pin also fetches the storages that are needed next, if they are
 * from the forward of the same micro-batch and virtual stage. */
void ps_away_backward(ps_away *away, bool on);
/* Returns true if s is offloaded and was made in a dry run. */
bool ps_away_is_dry(const ps_away *away, const ps_storage *s);
#endif
