/* SPDX-License-Identifier: BSD-3-Clause
 * The number of compute threads: those of the one OpenMP pool that kernels and oneDNN share. */
#include <omp.h>
#include "ps.h"

void ps_set_threads(int n) { omp_set_num_threads(n > 0 ? n : 1); }
int ps_threads(void) { return omp_get_max_threads(); }
