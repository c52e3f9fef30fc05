/* SPDX-License-Identifier: BSD-3-Clause
 * How the process's compute threads are set up. Their number: ps_threads and ps_set_threads of ps.h. */
#ifndef PS_CPU_THREADS_H
#define PS_CPU_THREADS_H

/* First thing in a program: has waiting threads sleep soon, unless OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, and bounds
 * OMP_NUM_THREADS by what can be had, or leaves it aside where it is no number. It also has the C library keep no freed
 * blocks for each thread, unless GLIBC_TUNABLES has glibc.malloc.tcache_count. The libraries read these before any code
 * of a program runs, so this starts the program anew (the same process, by exec) where it changes one. */
void ps_threads_start(char **argv);
#endif
