/* SPDX-License-Identifier: BSD-3-Clause
 * This layer offloads activations to the host until backward needs them. The copies run concurrently with the
 * computation. A storage is fetched back to the device when it is pinned, or a little earlier. This layer is the keeper
 * of an offloaded storage. The memory of the storage on the device and on the host is plain memory, and it counts
 * against the budgets. tensor/ and the tape call this layer on one thread.
 *
 * A round is the set of storages that are offloaded together. When the first storage of a round is offloaded, this
 * layer waits for the copies of the previous round. Memory is freed in three cases: after this wait, when a storage is
 * pinned, and when a storage is freed. Memory is not freed when a copy ends. A dry run does everything except copy.
 * Therefore it predicts the peaks exactly. */
#ifndef PS_AWAY_H
#define PS_AWAY_H
#include "base/step.h"
#include "mem/mem.h"

typedef struct ps_away ps_away;

/* Creates the offloading layer of a context. `mem` and `step` point to the variables that contain the current memory
 * manager and the current step. Every function of this layer reads these variables again. Returns PS_EUNSUP if there is
 * no host memory. */
int ps_away_new(int n_devices, ps_backend *const *devices, ps_mem *const *mem,
                const ps_step *const *step, ps_away **out);
void ps_away_delete(ps_away *away);           /* may be called only if no storage is offloaded */
void ps_away_round(ps_away *away);            /* begins the next round */
/* Offloads a storage. Does nothing in a backward. Also does nothing if the storage is pinned, was fetched before, or
 * is not in plain memory of a device. If the host has no room, the storage stays on the device. */
void ps_away_leave(ps_away *away, ps_storage *s);
/* Called when a backward begins or ends. During a backward, the pin of an offloaded storage also fetches the storages
 * of the same forward that backward needs next. */
void ps_away_backward(ps_away *away, bool on);
/* Returns true if s is offloaded and was made in a dry run. */
bool ps_away_is_dry(const ps_away *away, const ps_storage *s);
#endif
