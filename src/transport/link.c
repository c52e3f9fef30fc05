/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the simulated link (link.h). The link has a queue of messages, sorted by the time at which each
 * message will have passed the link. A thread sleeps until the first of these times, and then sends the message. */
#include "transport/link.h"
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "base/thread.h"

typedef struct waiting { void *message; int peer; uint64_t slot; double due; } waiting;

struct ps_link {
    ps_link_send send;
    double rate;                           /* in bytes per second */
    pthread_t thread;
    /* The lock guards the fields that follow. It is also held while a message is sent. */
    pthread_mutex_t lock;
    pthread_cond_t more;
    bool closing;
    /* free: time at which the last queued message will have passed the link */
    double free;
    waiting *queue;                        /* [n] messages, sorted by `due` */
    int32_t n, capacity;
};

static void remove_at(ps_link *l, int32_t i)
{
    l->n--;
    memmove(&l->queue[i], &l->queue[i + 1], sizeof *l->queue * (size_t)(l->n - i));
}

static void *run(void *arg)
{
    ps_link *l = arg;
    pthread_mutex_lock(&l->lock);
    while (!l->closing) {
        double now = ps_now();
        if (l->n == 0) {
            pthread_cond_wait(&l->more, &l->lock);
        } else if (l->queue[0].due > now) {
            struct timespec t;
            double left = l->queue[0].due - now;
            clock_gettime(CLOCK_MONOTONIC, &t);
            double end = (double)t.tv_sec + (double)t.tv_nsec * 1e-9 + (left < 1e6 ? left : 1e6);
            t.tv_sec = (time_t)end;
            t.tv_nsec = (long)((end - (double)t.tv_sec) * 1e9);
            pthread_cond_timedwait(&l->more, &l->lock, &t);
        } else {
            waiting w = l->queue[0];
            remove_at(l, 0);
            l->send(w.message, w.peer, w.slot);
        }
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static void link_free(ps_link *l)
{
    pthread_mutex_destroy(&l->lock);
    pthread_cond_destroy(&l->more);
    ps_free(l->queue);
    ps_free(l);
}

int ps_link_open(ps_link_send send, ps_link **out)
{
    const char *text = getenv("PS_SIM_LINK");
    char *end = NULL;
    *out = NULL;
    if (!text || !*text) return 0;
    double rate = strtod(text, &end);
    if (*end || !isfinite(rate) || rate <= 0)
        return ps_fail(PS_EINVAL, "PS_SIM_LINK is '%s'; it must be a number of bytes per second, such as 1e9", text);
    ps_link *l = ps_alloc0(sizeof *l);
    if (!l) return ps_fail_nomem(sizeof *l);
    l->send = send;
    l->rate = rate;
    pthread_mutex_init(&l->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&l->more, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int failed = ps_thread_start(&l->thread, run, l);
    if (failed) {
        link_free(l);
        return ps_fail(PS_ENOMEM, "cannot start a thread for the link of PS_SIM_LINK: %s", strerror(failed));
    }
    *out = l;
    return 0;
}

int ps_link_put(ps_link *l, void *message, int peer, uint64_t slot, int64_t nbytes)
{
    pthread_mutex_lock(&l->lock);
    int rc = ps_grow(l->queue, l->capacity, l->n + 1);
    if (rc == 0) {
        double now = ps_now();
        l->free = (now > l->free ? now : l->free) + (double)nbytes / l->rate;
        l->queue[l->n++] = (waiting){ message, peer, slot, l->free };
        pthread_cond_signal(&l->more);
    }
    pthread_mutex_unlock(&l->lock);
    return rc;
}

void ps_link_drop(ps_link *l, const void *message)
{
    if (!l) return;
    pthread_mutex_lock(&l->lock);
    for (int32_t i = l->n - 1; i >= 0; i--) if (l->queue[i].message == message) remove_at(l, i);
    pthread_mutex_unlock(&l->lock);
}

void ps_link_close(ps_link *l)
{
    if (!l) return;
    pthread_mutex_lock(&l->lock);
    l->closing = true;
    pthread_cond_signal(&l->more);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    link_free(l);
}
