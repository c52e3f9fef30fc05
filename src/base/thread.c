/* SPDX-License-Identifier: BSD-3-Clause
 * Starts threads (thread.h). */
#include "base/thread.h"
#include <errno.h>
#include <signal.h>
#include "base/alloc.h"

int ps_thread_start(pthread_t *out, void *(*run)(void *), void *arg)
{
    sigset_t all, before;
    if (ps_alloc_should_fail()) return EAGAIN;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);         /* a thread inherits the signal mask of its creator */
    int failed = pthread_create(out, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}
