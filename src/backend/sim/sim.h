/* SPDX-License-Identifier: BSD-3-Clause
 * For tests of sim's copy engine. */
#ifndef PS_BACKEND_SIM_SIM_H
#define PS_BACKEND_SIM_SIM_H
#include "backend/backend.h"

/* Returns the modelled times of a copy that has not been waited for yet, by ps_now(): when its first byte is sent,
 * and when it ends. */
void ps_sim_copy_times(const ps_copy *copy, double *begin, double *end);
#endif
