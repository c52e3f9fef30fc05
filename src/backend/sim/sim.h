/* SPDX-License-Identifier: BSD-3-Clause
 * Functions for tests of sim's copy engine. */
#ifndef PS_BACKEND_SIM_SIM_H
#define PS_BACKEND_SIM_SIM_H
#include "backend/backend.h"

/* Sets *begin and *end to the modelled times, by ps_now(), at which a copy sends its first byte and at which it ends.
 * Call this function before any caller has waited for the copy. */
void ps_sim_copy_times(const ps_copy *copy, double *begin, double *end);
#endif
