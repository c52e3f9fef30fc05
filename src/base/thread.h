/* SPDX-License-Identifier: BSD-3-Clause
 * The one door for threads of the engine. */
#ifndef PS_BASE_THREAD_H
#define PS_BASE_THREAD_H
#include <pthread.h>

/* Starts a thread that runs run(arg). It blocks all signals: signals are for the thread that runs the script. 0, or a
 * positive errno, with no message left. Tests fail it as a request for memory (alloc.h). */
int ps_thread_start(pthread_t *out, void *(*run)(void *), void *arg);
#endif
