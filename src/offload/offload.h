/* SPDX-License-Identifier: BSD-3-Clause
 * Offloaded activations. A storage that the tape saved for backward is moved to the host by a copy that runs
 * concurrently with the computation. It is fetched back when it is pinned, or a little before. This layer is the keeper
 * of a storage that is away. The bytes on both sides are plain memory and count against the budgets there. Called by
 * tensor/ and by the tape; one thread.
 *
 * Storages that are sent away together are a round. The first storage of a round waits until the previous round has
 * left. Bytes on either side are freed at that point, at pins and at frees, never at the moment when a copy ends. So
 * dry runs, which do everything except copy, predict the peaks exactly. */
#ifndef PS_AWAY_H
#define PS_AWAY_H
#include "base/step.h"
#include "mem/mem.h"

typedef struct ps_away ps_away;

/* Makes the offloading of a context. `mem` points to the memory managers that allocate now, and `step` to the
 * present step; each call reads both. PS_EUNSUP: there is no host memory. */
int ps_away_new(int n_devices, ps_backend *const *devices, ps_mem *const *mem,
                const ps_step *const *step, ps_away **out);
void ps_away_delete(ps_away *away);           /* may be called only when no storage is offloaded */
void ps_away_round(ps_away *away);            /* begins the next round */
/* Offloads a storage. Does nothing during a backward, or if the storage is not in plain memory of a device, is
 * pinned, or was fetched before. If the host has no room, the storage stays on the device. */
void ps_away_leave(ps_away *away, ps_storage *s);
/* Tells whether a backward is under way. While it is, each pin also fetches the storages that backward needs next,
 * if they are from the forward of the same micro-batch and virtual stage. */
void ps_away_backward(ps_away *away, bool on);
bool ps_away_is_dry(const ps_away *away, const ps_storage *s);   /* returns true if s is offloaded and a dry run made
                                                                  * it */
#endif
