/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the thread of a line (line.h). The thread connects the devices, begins messages in order, and
 * polls the messages in progress. It also checks the watch, because the device's library does not report which rank has
 * died. After a verdict, a failure or a time-out, the thread aborts the communicator, so that the device can continue.
 * Results that the device computes after the abort are invalid, and the next call of the line's owner fails. */
#include "transport/line.h"
#include <string.h>
#include <time.h>
#include "backend/backend.h"
#include "base/alloc.h"
#include "base/thread.h"
#include "rendezvous/watch.h"

enum { TURNS_AT_ONCE = 50, NAP_NS = 20000 };

struct ps_line {
    ps_line_owner o;
    const ps_wire_table *table;
    ps_wire *wire;
    char id[PS_WIRE_ID_NBYTES];
    int peer, lane;
    bool out;
    pthread_t thread;
    pthread_cond_t more;
    bool closing, stopped, failed, rests;
    ps_error_kept why;
    ps_line_message *first, *last;         /* messages that have not begun */
    /* allowed: number of messages that may begin
     * begun: number of messages that have begun
     * over: number of messages that are known to have ended */
    int64_t allowed, begun, over;
    char at[PS_LINE_NAME];                 /* name of the oldest message that has not ended */
};

/* Returns the error because of which the thread must stop, or 0. */
static int given_up(ps_line *l)
{
    PS_TRY(ps_watch_verdict(l->o.host->watch));
    pthread_mutex_lock(l->o.lock);
    int rc = l->o.failed->code ? ps_error_again(l->o.failed) : 0;
    if (rc == 0 && (l->stopped || l->closing)) rc = ps_watch_failed_before(l->o.host->watch);
    pthread_mutex_unlock(l->o.lock);
    return rc;
}

static void nap(int64_t turn)
{
    struct timespec t = { .tv_nsec = turn < TURNS_AT_ONCE ? 1000 : NAP_NS };
    nanosleep(&t, NULL);
}

/* Raises an error if nothing has arrived, although both ranks have begun long ago. `what` names what takes too long. */
static int late(const ps_line *l, const char *what)
{
    return ps_fail(PS_EIO, "%s over %s took longer than %g s (init_distributed's timeout sets the seconds)", what,
                   l->table->name, l->o.host->timeout_s);
}

static int until_ready(ps_line *l, const char *what)
{
    double until = ps_now() + l->o.host->timeout_s;
    for (int64_t turn = 0;; turn++) {
        int rc = l->table->ready(l->wire);
        if (rc != 0) return rc < 0 ? rc : 0;
        PS_TRY(given_up(l));
        if (ps_now() > until) return late(l, what);
        nap(turn);
    }
}

/* Connects the two devices. On the wire, the sender has rank 0, and the receiver has rank 1. */
static int connect_wire(ps_line *l)
{
    PS_TRY(l->table->open(l->o.be, l->id, l->out ? 0 : 1, 2, &l->wire));
    return until_ready(l, "connecting two devices");
}

static int begin(ps_line *l, ps_line_message *m)
{
    ps_comm_part send[2] = { { NULL, 0 } }, recv[2] = { { NULL, 0 } };
    if (l->out) send[1] = (ps_comm_part){ m->bytes, m->nbytes };
    else recv[0] = (ps_comm_part){ m->bytes, m->nbytes };
    PS_TRY(l->table->event_before(l->wire, m->ready));
    PS_TRY(l->table->begin(l->wire, 0, send, recv));
    if (!l->out) PS_TRY(l->o.tell(l->o.arg, l->peer, l->lane));
    PS_TRY(until_ready(l, "starting a message"));
    return l->table->event_end(l->wire, m->end);
}

/* Copies the name of `next` to l->at if no message is in progress. `next` is the message that begins next, or NULL. The
 * caller must hold the lock. */
static void come_to(ps_line *l, const ps_line_message *next)
{
    if (next && l->over == l->begun) memcpy(l->at, next->name, sizeof l->at);
}

/* Begins the first message of the queue. The lock is held when the function begins and when it returns. */
static int begin_first(ps_line *l)
{
    ps_line_message *m = l->first;
    come_to(l, m);
    pthread_mutex_unlock(l->o.lock);
    int rc = begin(l, m);
    pthread_mutex_lock(l->o.lock);
    if (rc < 0) return rc;
    l->first = m->next;
    l->begun++;
    m->begun = true;                       /* from now on, the owner may reuse the message */
    pthread_cond_broadcast(l->o.news);
    return 0;
}

/* Checks whether the last begun message has ended. If it has ended, all earlier messages have ended, too. The lock is
 * held when the function begins and when it returns. */
static int look(ps_line *l, double until, int64_t turn)
{
    int64_t begun = l->begun;
    pthread_mutex_unlock(l->o.lock);
    int rc = l->table->ended(l->wire, 0);
    if (rc == 0) rc = given_up(l);
    if (rc == 0 && ps_now() > until) rc = late(l, "a message");
    if (rc == 0) nap(turn);
    pthread_mutex_lock(l->o.lock);
    if (rc != 1) return rc;
    l->over = begun;
    pthread_cond_broadcast(l->o.news);
    return 0;
}

/* Runs the line until it fails or is closed. The lock is held when the function begins and when it returns. */
static int carry(ps_line *l)
{
    int64_t turn = 0;
    double until = 0;
    while (!l->closing) {
        if (l->o.failed->code) return ps_error_again(l->o.failed);
        if (l->stopped) return ps_watch_failed_before(l->o.host->watch);
        bool idle = l->over == l->begun;
        if (idle) turn = 0, until = ps_now() + l->o.host->timeout_s;
        if (l->first && (!l->out || l->allowed > l->begun)) {
            PS_TRY(begin_first(l));
            turn = 0, until = ps_now() + l->o.host->timeout_s;
        } else if (!idle) {
            PS_TRY(look(l, until, turn++));
        } else {
            pthread_cond_wait(&l->more, l->o.lock);
        }
    }
    return 0;
}

/* Makes the line fail. The owner gets the error before the device can continue. */
static void fail(ps_line *l, int rc)
{
    bool mine;
    pthread_mutex_lock(l->o.lock);
    mine = !l->closing && !l->stopped && !l->o.failed->code;
    pthread_mutex_unlock(l->o.lock);
    if (mine) l->o.blame(l->o.arg, l->peer, rc);
    pthread_mutex_lock(l->o.lock);
    come_to(l, l->first);                  /* sets l->at to the name of the first message if no message had begun */
    ps_error_keep(&l->why);
    l->failed = true;
    pthread_cond_broadcast(l->o.news);
    pthread_mutex_unlock(l->o.lock);
    if (l->wire) l->table->abort(l->wire);
    pthread_mutex_lock(l->o.lock);
    l->rests = true;
    pthread_cond_broadcast(l->o.news);
    pthread_mutex_unlock(l->o.lock);
}

static void *run(void *arg)
{
    ps_line *l = arg;
    int rc = connect_wire(l);
    if (rc == 0) {
        pthread_mutex_lock(l->o.lock);
        rc = carry(l);
        pthread_mutex_unlock(l->o.lock);
    }
    if (rc < 0) fail(l, rc);
    return NULL;
}

int ps_line_open(const ps_line_owner *owner, const char *id, int peer, int lane, bool out, ps_line **out_line)
{
    ps_line *l = ps_alloc0(sizeof *l);
    if (!l) return ps_fail_nomem(sizeof *l);
    l->o = *owner;
    l->table = owner->be->wire;
    l->peer = peer, l->lane = lane, l->out = out;
    memcpy(l->id, id, sizeof l->id);
    pthread_cond_init(&l->more, NULL);
    int failed = ps_thread_start(&l->thread, run, l);
    if (!failed) {
        *out_line = l;
        return 0;
    }
    pthread_cond_destroy(&l->more);
    ps_free(l);
    return ps_fail(PS_ENOMEM, "cannot start a thread for messages between devices: %s", strerror(failed));
}

const char *ps_line_id(const ps_line *l) { return l->id; }

int ps_line_message_prepare(ps_backend *be, ps_line_message *m)
{
    if (!m->ready) PS_TRY(be->wire->event_new(be, &m->ready));
    if (!m->end) PS_TRY(be->wire->event_new(be, &m->end));
    return be->wire->event_now(be, m->ready);
}

void ps_line_message_free(ps_backend *be, ps_line_message *m)
{
    if (m->ready) be->wire->event_free(m->ready);
    if (m->end) be->wire->event_free(m->end);
    m->ready = m->end = NULL;
}

void ps_line_put(ps_line *l, ps_line_message *m)
{
    m->next = NULL;
    m->begun = false;
    if (l->first) l->last->next = m;
    else l->first = m;
    l->last = m;
    pthread_cond_signal(&l->more);
}

void ps_line_allow(ps_line *l)
{
    l->allowed++;
    pthread_cond_signal(&l->more);
}

void ps_line_stop(ps_line *l)
{
    l->stopped = true;
    pthread_cond_signal(&l->more);
}

bool ps_line_is_still(const ps_line *l) { return l->over == l->begun; }
const ps_error_kept *ps_line_failed(const ps_line *l) { return l->failed ? &l->why : NULL; }
const char *ps_line_at(const ps_line *l) { return l->at; }
bool ps_line_rests(const ps_line *l) { return l->rests; }

void ps_line_close(ps_line *l)
{
    if (!l) return;
    pthread_mutex_lock(l->o.lock);
    l->closing = true;
    pthread_cond_signal(&l->more);
    pthread_mutex_unlock(l->o.lock);
    pthread_join(l->thread, NULL);
    if (l->wire) l->table->close(l->wire);
    pthread_cond_destroy(&l->more);
    ps_free(l);
}
