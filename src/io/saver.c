/* SPDX-License-Identifier: BSD-3-Clause
 * Writes a safetensors file in a separate thread. The caller passes a copy of the bytes and does not change the copy
 * while the thread runs. The thread calls only src/io, and blocks all signals. An error of the thread is kept for the
 * caller that waits for the save. A saver has one owner, and only the owner may call its functions. */
#define _GNU_SOURCE
#include "io/file.h"
#include "base/alloc.h"
#include "base/thread.h"
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

struct ps_saver {
    pthread_t thread;
    bool running;               /* true if there is a thread to join */
    atomic_bool busy;           /* true while the thread works; the thread clears it after it has set `writer`, `error`
                                 * and `seconds` */
    ps_stw *writer;
    const void *data;           /* [nbytes] owned by the caller */
    int64_t nbytes;
    ps_error_kept error;        /* error of the last save; it is kept until a caller waits for the save */
    double seconds;
};

static void *work(void *arg)
{
    ps_saver *s = arg;
    double start = ps_now();
    int rc = ps_stw_write_all(s->writer, s->data, s->nbytes);
    if (rc == 0) rc = ps_stw_commit(s->writer);
    if (rc < 0) ps_error_keep(&s->error);
    ps_stw_free(s->writer);
    s->writer = NULL;
    s->seconds = ps_now() - start;
    atomic_store(&s->busy, false);
    return NULL;
}

int ps_saver_new(ps_saver **out)
{
    PS_NEED(out);
    ps_saver *s = ps_alloc0(sizeof *s);
    if (!s) return ps_fail_nomem(sizeof *s);
    *out = s;
    return 0;
}

int ps_saver_start(ps_saver *s, ps_stw *writer, const void *data, int64_t nbytes)
{
    PS_NEED(writer);
    if (!s || s->running) {
        ps_stw_free(writer);
        return ps_fail(PS_ESTATE, "this saver %s", s ? "is at work; wait for it first" : "is missing (NULL)");
    }
    s->writer = writer, s->data = data, s->nbytes = nbytes, s->error.code = 0;
    atomic_store(&s->busy, true);
    int err = ps_thread_start(&s->thread, work, s);
    if (err) {
        atomic_store(&s->busy, false);
        ps_stw_free(writer);
        s->writer = NULL;
        return ps_fail(PS_ENOMEM, "cannot start a thread to save in the background: %s", strerror(err));
    }
    s->running = true;
    return 0;
}

int ps_saver_busy(ps_saver *s) { return s && atomic_load(&s->busy); }

int ps_saver_wait(ps_saver *s, double *seconds)
{
    PS_NEED(s);
    if (s->running) {
        pthread_join(s->thread, NULL);
        s->running = false;
    }
    if (seconds) *seconds = s->seconds;
    if (s->error.code == 0) return 0;
    int rc = ps_error_again(&s->error);
    s->error.code = 0;
    return rc;
}

void ps_saver_free(ps_saver *s)
{
    if (!s) return;
    if (s->running) pthread_join(s->thread, NULL);
    ps_free(s);
}
