/* SPDX-License-Identifier: BSD-3-Clause
 * Offloads activations to the host until backward needs them. The copies run concurrently with the computation. A
 * storage is fetched back when it is pinned, or a little earlier. This layer is the keeper of an offloaded storage.
 * The bytes on both sides are plain memory and count against the budgets. Called by tensor/ and by the tape, on one
 * thread.
 *
 * Storages that are offloaded together are a round. The first one of a round waits until the previous round's copies
 * have ended. Bytes are freed only at that point, at pins and at frees, never when a copy ends. So a dry run, which
 * does everything except copy, predicts the peaks exactly. */
#ifndef PS_AWAY_H
#define PS_AWAY_H
#include "base/step.h"
#include "mem/mem.h"

typedef struct ps_away ps_away;

/* Makes the offloading of a context. Each call reads the present memory manager and step through `mem` and `step`.
 * PS_EUNSUP: there is no host memory. */
int ps_away_new(int n_devices, ps_backend *const *devices, ps_mem *const *mem,
                const ps_step *const *step, ps_away **out);
void ps_away_delete(ps_away *away);           /* only when no storage is offloaded */
void ps_away_round(ps_away *away);            /* begins the next round */
/* Offloads a storage. Does nothing in a backward, or if the storage is pinned, was fetched before, or is not in
 * plain memory of a device. If the host has no room, the storage stays on the device. */
void ps_away_leave(ps_away *away, ps_storage *s);
/* Begins or ends a backward. In a backward, each pin also fetches the storages that are needed next, if they are
 * from the forward of the same micro-batch and virtual stage. */
void ps_away_backward(ps_away *away, bool on);
bool ps_away_is_dry(const ps_away *away, const ps_storage *s);   /* s is offloaded, made in a dry run */
#endif
