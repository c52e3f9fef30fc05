/* SPDX-License-Identifier: BSD-3-Clause
 * The number of compute threads: those of the one OpenMP pool that kernels and oneDNN share. ThreadSanitizer cannot see
 * libgomp's barriers and would report every parallel loop, so its builds compute on one thread. */
#include <omp.h>
#include "ps.h"

#ifdef __SANITIZE_THREAD__
void ps_set_threads(int n) { omp_set_num_threads(1); }
static void __attribute__((constructor)) begin(void) { ps_set_threads(1); }
#else
void ps_set_threads(int n) { omp_set_num_threads(n > 0 ? n : 1); }
#endif
int ps_threads(void) { return omp_get_max_threads(); }
