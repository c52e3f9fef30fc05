/* SPDX-License-Identifier: BSD-3-Clause
 * The settings of the process's compute threads. ps_threads and ps_set_threads in ps.h read and set the number of
 * threads. */
#ifndef PS_CPU_THREADS_H
#define PS_CPU_THREADS_H

/* Sets environment variables of OpenMP and the C library. A program must call this function before any other function.
 * The function makes these settings:
 *   - A waiting thread sleeps after a short spin, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT is set.
 *   - OMP_NUM_THREADS is limited to ps_threads_most(), and is removed if it is not a number.
 *   - The C library keeps no freed blocks per thread, unless GLIBC_TUNABLES contains glibc.malloc.tcache_count.
 * The libraries read these variables before the program's first code runs. Therefore, if the function has changed a
 * variable, it executes the program again in the same process (exec). */
void ps_threads_start(char **argv);
#endif
