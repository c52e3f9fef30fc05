/* SPDX-License-Identifier: BSD-3-Clause
 * Every thread of the engine is started through this function. */
#ifndef PS_BASE_THREAD_H
#define PS_BASE_THREAD_H
#include <pthread.h>

/* Starts a thread that runs run(arg), with all signals blocked: the script's thread handles them. Returns 0 or a
 * positive errno, and sets no error message. Tests can make it fail like an allocation (alloc.h). */
int ps_thread_start(pthread_t *out, void *(*run)(void *), void *arg);
#endif
