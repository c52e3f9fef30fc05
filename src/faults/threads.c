/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the doors of memory, clocks, sleeps and locks (faults.h). Only the engine's own memory requests
 * pass a door. The linker redirects the engine's calls of malloc, calloc and realloc to the functions __wrap_malloc,
 * __wrap_calloc and __wrap_realloc. */
#define _GNU_SOURCE
#include "faults/faults.h"
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void *__real_malloc(size_t nbytes);
void *__real_calloc(size_t n, size_t nbytes);
void *__real_realloc(void *p, size_t nbytes);
void *__wrap_malloc(size_t nbytes);
void *__wrap_calloc(size_t n, size_t nbytes);
void *__wrap_realloc(void *p, size_t nbytes);

static bool no_memory(void)
{
    if (faults_pass(DOOR_ALLOC, CAN(ACT_ERRNO), NULL).action == ACT_NONE) return false;
    errno = ENOMEM;
    return true;
}

void *__wrap_malloc(size_t nbytes) { return no_memory() ? NULL : __real_malloc(nbytes); }
void *__wrap_calloc(size_t n, size_t nbytes) { return no_memory() ? NULL : __real_calloc(n, nbytes); }
void *__wrap_realloc(void *p, size_t nbytes) { return no_memory() ? NULL : __real_realloc(p, nbytes); }

/* -- clocks and sleeps -------------------------------------------------------------------------------------------- */
/* The number of seconds by which the wall clock has jumped. The monotonic clock cannot jump. */
static _Atomic int64_t jumped_s;

int clock_gettime(clockid_t id, struct timespec *t)
{
    static int (*next)(clockid_t, struct timespec *);
    if (!next) *(void **)&next = faults_next("clock_gettime", NULL);
    if (id != CLOCK_REALTIME) return next(id, t);
    faults_hit hit = faults_pass(DOOR_CLOCK, CAN(ACT_JUMP), NULL);
    if (hit.action) atomic_fetch_add(&jumped_s, (int64_t)hit.arg);
    int rc = next(id, t);
    t->tv_sec += atomic_load(&jumped_s);
    return rc;
}

time_t time(time_t *out)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}

static int sleep_door(struct timespec *left)
{
    faults_hit hit = faults_pass(DOOR_SLEEP, CAN(ACT_INTERRUPT), NULL);
    if (!hit.action) return 0;
    if (left) *left = (struct timespec){ 0 };
    return hit.err;
}

int nanosleep(const struct timespec *t, struct timespec *left)
{
    int err = sleep_door(left);
    if (err) return errno = err, -1;
    return (int)syscall(SYS_nanosleep, t, left);
}

int clock_nanosleep(clockid_t id, int flags, const struct timespec *t, struct timespec *left)
{
    int err = sleep_door(left);
    if (err) return err;
    return syscall(SYS_clock_nanosleep, id, flags, t, left) < 0 ? errno : 0;
}

/* -- switches between threads ------------------------------------------------------------------------------------- */
/* The action `lag` delays its thread at each of the thread's next LAGS locks, so that other threads run between these
 * locks. */
enum { LAGS = 200 };
static _Thread_local int lags_left;
static _Thread_local double lag_s;

static void make_late(faults_hit hit)
{
    if (hit.action == ACT_LAG) lags_left = LAGS, lag_s = hit.arg;
}

int pthread_mutex_lock(pthread_mutex_t *m)
{
    static int (*next)(pthread_mutex_t *);
    if (!next) *(void **)&next = faults_next("pthread_mutex_lock", NULL);
    faults_hit hit = faults_pass(DOOR_LOCK, CAN(ACT_LAG), NULL);
    make_late(hit);
    if (lags_left > 0) {
        lags_left--;
        faults_nap(lag_s);
    }
    return next(m);
}

/* Returns true if Gloo waits, or if the C++ library waits for Gloo. Gloo's Loop::unregisterDescriptor interprets any
 * end of its wait as a turn of its thread. If the wait ends early, the thread later finds a closed pair and ends the
 * process. */
static bool gloo_waits(const void *caller)
{
    Dl_info at;
    return dladdr(caller, &at) && at.dli_fname
        && (strstr(at.dli_fname, "libgloo") || strstr(at.dli_fname, "libstdc++"));
}

/* This wait can end without a signal. POSIX allows such ends, so callers must check their condition again. */
int pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
{
    static int (*next)(pthread_cond_t *, pthread_mutex_t *);
    if (!next) *(void **)&next = faults_next("pthread_cond_wait", "GLIBC_2.3.2");
    faults_hit hit = faults_pass(DOOR_WAIT, CAN(ACT_SPURIOUS) | CAN(ACT_LAG), NULL);
    make_late(hit);
    if (hit.action == ACT_SPURIOUS && !gloo_waits(__builtin_return_address(0))) return 0;
    return next(c, m);
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until)
{
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) *(void **)&next = faults_next("pthread_cond_timedwait", "GLIBC_2.3.2");
    faults_hit hit = faults_pass(DOOR_WAIT, CAN(ACT_SPURIOUS) | CAN(ACT_LAG), NULL);
    make_late(hit);
    if (hit.action == ACT_SPURIOUS) return 0;
    return next(c, m, until);
}
