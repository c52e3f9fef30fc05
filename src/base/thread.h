/* SPDX-License-Identifier: BSD-3-Clause
 * The function that starts all threads of the engine. */
#ifndef PS_BASE_THREAD_H
#define PS_BASE_THREAD_H
#include <pthread.h>

/* Starts a thread that runs run(arg). All signals are blocked in the new thread, because the script's thread handles
 * signals. Returns 0 or a positive errno, and sets no error message. The call counts as an allocation, so that a test
 * can make it fail (alloc.h). */
int ps_thread_start(pthread_t *out, void *(*run)(void *), void *arg);
#endif
