/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements a communicator for device memory. The wire of a backend (backend/wire.h) queues the work of a
 * call on the device. The device performs the work of a call in order. It performs this work before kernels that are
 * queued after catch_up. Therefore a call returns as soon as its work is queued.
 *
 * After hand_over, the thread of the communicator watches the calls in progress. It checks the time-out and the watch,
 * because the device's library does not report which rank has died or stalls. A failure ends the whole group. The
 * communicator is aborted, so that the device can continue. Before the abort, the backend gets the error, so that its
 * next read fails. Therefore no results are used that were computed after the abort.
 *
 * The job thread and the thread of the communicator find failures. The script's thread reports the failures (told).
 * Reads of the device's memory fail until a call has raised the failure. */
#include "transport/transport.h"
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "backend/backend.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/record.h"
#include "base/thread.h"
#include "rendezvous/watch.h"

/* The number of polls without a pause. Small exchanges usually end during these polls. */
enum { TURNS_AT_ONCE = 200 };
/* The maximum number of points in progress. If there are more calls, the further calls share the last point. */
enum { CALLS = 64 };
enum { CALL_TEXT = 40, CALM_S = 5 };

/* A call in progress. If `n` calls share the event `end`, this struct describes the first of these calls. */
typedef struct underway {
    ps_wire_event *end;
    uint64_t call;
    int n;
    char op[CALL_TEXT];
} underway;

typedef struct wired {
    ps_comm comm;                          /* must be first, because the functions of the table get its address */
    ps_comm *host;
    ps_backend *be;
    const ps_wire_table *table;
    ps_wire *wire;
    pthread_mutex_t lock;                  /* guards the wire and the fields that follow */
    pthread_cond_t more;
    pthread_t thread;
    bool looks, closing;                   /* looks: the thread is running */
    /* calls: a ring buffer of CALLS points, followed by one point for calls of catch_up with point -1 */
    underway calls[CALLS + 1];
    int first, n;
    bool hung_up;
    struct wired *next;                    /* next communicator in the list `all` */
} wired;

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static wired *all;                         /* list of the communicators of this process */
/* telling: guards the errors of lost bytes, and the decision which thread reports a failure. */
static pthread_mutex_t telling = PTHREAD_MUTEX_INITIALIZER;

static wired *self(ps_comm *comm) { return (wired *)comm; }

/* Makes a call of the wire while it holds the lock, and returns the result of the call. If everything in progress has
 * been abandoned (hung_up), returns GONE without making the call. All calls return quickly, except the call that ends
 * the wire. */
enum { GONE = INT_MIN };
#define ON_WIRE(w, call) (pthread_mutex_lock(&(w)->lock), unlocked((w), (w)->hung_up ? GONE : (call)))
static int unlocked(wired *w, int rc)
{
    pthread_mutex_unlock(&w->lock);
    return rc;
}

static void nap(int64_t ns)
{
    struct timespec t = { .tv_nsec = ns };
    nanosleep(&t, NULL);
}

static void rest(int64_t turn)
{
    if (turn < TURNS_AT_ONCE) sched_yield();
    else nap(20000);
}

/* -- calls in progress --------------------------------------------------------------------------------------------- */
/* Removes calls that have ended from the list. Returns the oldest call in progress, or NULL. If `sure` is set, queries
 * the device's library several times, because the library may report late that a call has ended. The caller must hold
 * the lock. */
static underway *oldest(wired *w, bool sure)
{
    while (w->n > 0) {
        int over = 0;
        for (int turn = 0; over == 0 && turn < (sure ? 16 : 1); turn++)
            over = w->table->event_over(w->calls[w->first].end);
        if (over != 1) return &w->calls[w->first];
        w->first = (w->first + 1) % CALLS;
        w->n--;
    }
    return NULL;
}

/* Returns the error of the wire, or 0. The caller must hold the lock. */
static int sound(wired *w)
{
    for (int lane = 0; lane < PS_WIRE_LANES; lane++) {
        int rc = w->table->ended(w->wire, lane);
        if (rc < 0) return rc;
    }
    return 0;
}

/* -- failures ------------------------------------------------------------------------------------------------------ */
/* Ends everything in progress, with the error rc of this thread. Reports lost bytes only for the first failure of a
 * group. One report is sufficient, because the failure ends all groups that use the connections of these ranks. */
static void give_up(wired *w, int rc)
{
    char why[1000];
    snprintf(why, sizeof why, "%s", ps_error_message());
    pthread_mutex_lock(&w->lock);
    if (!w->hung_up) {
        pthread_mutex_lock(&telling);
        if (oldest(w, true) && ps_watch_first_to_tell(w->host->watch)) w->table->lose(w->be, rc, why);
        pthread_mutex_unlock(&telling);
        w->table->abort(w->wire);
    }
    w->hung_up = true;
    pthread_mutex_unlock(&w->lock);
}

/* Finds the call that has failed. This is the oldest call in progress. If no call is in progress, returns false. In
 * this case, the failed call is the call that this rank is in. */
static bool failed_call(wired *w, underway *out)
{
    pthread_mutex_lock(&w->lock);
    const underway *first = oldest(w, true);
    if (first) *out = *first;
    pthread_mutex_unlock(&w->lock);
    return first != NULL;
}

/* Handles a failure of the wire. rc and its text are the error of this thread. First the watch finds the rank that
 * caused the failure. Then this rank ends everything in progress. If the watch blames no rank, this rank notifies the
 * other ranks that it gives up. It notifies them through the watch, because the other thread of the group may be in a
 * call that uses the connections of the host. */
static int failed(wired *w, int rc)
{
    ps_watch *watch = w->host->watch;
    underway in;
    char why[900];
    snprintf(why, sizeof why, "%s", ps_error_message());
    bool alone = rc != PS_ETIME && rc != PS_EIO, left = failed_call(w, &in);
    int what = rc == PS_ETIME ? PS_WATCH_TIME_OUT : PS_WATCH_LOST, verdict = 0, rank = w->host->rank;
    double seconds = w->host->timeout_s;
    if (!alone && left) verdict = ps_watch_complain_of(watch, w->host->place, in.op, in.call, what, seconds, why);
    else if (!alone) verdict = ps_watch_complain(watch, w->host->place, what, -1, seconds, why);
    if (verdict == 0) {
        ps_fail(rc, "%s", why);
        if (left)
            ps_error_prefix("%s%s%s (call %llu) of rank %d: ", in.op, w->host->axis[0] ? " of " : "", w->host->axis,
                            (unsigned long long)in.call, ps_comm_world(w->host, rank));
        ps_watch_complain(watch, w->host->place, PS_WATCH_GIVES_UP, ps_comm_world(w->host, rank), 0,
                          ps_error_message());
    }
    ps_error_kept error;
    ps_error_keep(&error);
    give_up(w, error.code);
    return ps_error_again(&error);
}

/* Ends everything in progress on this rank because there is a verdict, and raises the verdict. */
static int given_up(wired *w)
{
    int rc = ps_watch_verdict(w->host->watch);
    give_up(w, rc);
    return ps_watch_verdict(w->host->watch);
}

static int late(const wired *w, const char *what)
{
    return ps_fail(PS_ETIME, "rank %d: %s over %s took longer than %g s (init_distributed's timeout sets the seconds)",
                   ps_comm_world(&w->comm, w->comm.rank), what, w->table->name, w->host->timeout_s);
}

/* Returns true if the error of this thread should be raised in the script. Returns false if an error about the same
 * failure has already been raised in the script. */
static bool told(wired *w)
{
    ps_error_kept error;
    ps_error_keep(&error);
    pthread_mutex_lock(&telling);
    bool first = ps_watch_first_to_tell(w->host->watch), lost = w->table->lost(w->be, true) < 0;
    pthread_mutex_unlock(&telling);
    ps_error_again(&error);
    return first || lost;
}

/* Returns the error of an abandoned communicator. Until the failure has been reported to the script, this error is the
 * loss of bytes. After that, it says that the group has failed before. */
static int gone(wired *w)
{
    int rc = w->table->lost(w->be, false);
    return rc < 0 ? rc : ps_watch_failed_before(w->host->watch);
}

static bool works(wired *w) { return ON_WIRE(w, 0) == 0; }

/* Turns the result of ON_WIRE into the result of a call of the group. If the wire has failed, makes the group fail. */
static int result(wired *w, int rc) { return rc == GONE ? gone(w) : rc < 0 ? failed(w, rc) : rc; }

/* -- the thread ---------------------------------------------------------------------------------------------------- */
/* Handles a failure that the thread of the communicator has found. The lock is held when the function begins and when
 * it returns. */
static void say_why(wired *w, int rc)
{
    pthread_mutex_unlock(&w->lock);
    if (ps_watch_over(w->host->watch)) given_up(w);
    else failed(w, rc);
    pthread_mutex_lock(&w->lock);
}

/* The thread of the communicator. It watches the oldest call in progress until this call has ended, then the next call,
 * and so on. */
static void *look(void *arg)
{
    wired *w = arg;
    double until = 0;
    int64_t turn = 0;
    uint64_t seen = PS_WATCH_NO_CALL;
    pthread_mutex_lock(&w->lock);
    while (!w->closing) {
        const underway *c = w->hung_up ? NULL : oldest(w, false);
        if (!c) {
            seen = PS_WATCH_NO_CALL;
            pthread_cond_wait(&w->more, &w->lock);
            continue;
        }
        if (c->call != seen) until = ps_now() + w->host->timeout_s * c->n, turn = 0;
        seen = c->call;
        int rc = sound(w);
        if (rc == 0 && ps_watch_over(w->host->watch)) rc = ps_watch_verdict(w->host->watch);
        if (rc == 0 && ps_now() > until) rc = late(w, "an exchange");
        if (rc < 0) {
            say_why(w, rc);
            continue;
        }
        pthread_mutex_unlock(&w->lock);
        nap(turn++ < TURNS_AT_ONCE ? 20000 : 200000);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Makes the events of all points, and starts the thread. */
static int prepare(wired *w)
{
    for (int i = 0; i <= CALLS; i++) PS_TRY(w->table->event_new(w->be, &w->calls[i].end));
    int rc = ps_thread_start(&w->thread, look, w);
    if (rc) return ps_fail(PS_ENOMEM, "cannot start a thread for the calls of a group of ranks between devices: %s",
                           strerror(rc));
    w->looks = true;
    return 0;
}

/* -- waiting ------------------------------------------------------------------------------------------------------- */
enum { UNTIL_READY = -1 };

/* Waits until the wire is ready for more work (UNTIL_READY), or until the work in `lane` has ended. */
static int wait_until(wired *w, int lane, const char *what)
{
    double until = ps_now() + w->host->timeout_s;
    for (int64_t turn = 0;; turn++) {
        int rc = ON_WIRE(w, lane == UNTIL_READY ? w->table->ready(w->wire) : w->table->ended(w->wire, lane));
        if (rc != 0) return rc == 1 ? 0 : result(w, rc);
        if (ps_watch_over(w->host->watch)) return given_up(w);
        if (ps_now() > until) return failed(w, late(w, what));
        rest(turn);
    }
}

/* Waits for the calls that were handed over. This wait always ends, because the thread of the communicator raises an
 * error for calls that take too long. */
static int wait_for_calls(wired *w)
{
    for (int64_t turn = 0;; turn++) {
        int rc = ON_WIRE(w, oldest(w, false) == NULL);
        if (rc != 0) return rc == 1 ? 0 : result(w, rc);
        if (ps_watch_over(w->host->watch)) return given_up(w);
        rest(turn);
    }
}

static int begin(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv)
{
    wired *w = self(comm);
    PS_TRY(result(w, ON_WIRE(w, w->table->begin(w->wire, lane - PS_COMM_DATA, send, recv))));
    return wait_until(w, UNTIL_READY, "starting an exchange");
}

static int finish(ps_comm *comm, int lane) { return wait_until(self(comm), lane - PS_COMM_DATA, "an exchange"); }

static int mark(ps_comm *comm)
{
    wired *w = self(comm);
    int rc = ON_WIRE(w, w->table->mark(w->wire));
    return rc == GONE ? gone(w) : rc;
}

static int after(ps_comm *comm, int mark_before)
{
    wired *w = self(comm);
    return result(w, ON_WIRE(w, w->table->after(w->wire, mark_before)));
}

static int follow(ps_comm *comm, int lane)
{
    wired *w = self(comm);
    return result(w, ON_WIRE(w, w->table->follow(w->wire, lane - PS_COMM_DATA)));
}

/* Waits for the end of all exchanges, sums and copies. Waits for the exchanges first, because a sum after a failed
 * exchange would never end. */
static int wait_for_all(wired *w)
{
    for (int lane = 0; lane < PS_WIRE_LANES; lane++) PS_TRY(wait_until(w, lane, "an exchange"));
    return wait_until(w, PS_WIRE_LOCAL, "a sum or a copy");
}

static int settle(ps_comm *comm)
{
    wired *w = self(comm);
    int64_t since = ps_record_begin();
    int rc = wait_for_calls(w);
    if (rc == 0) rc = wait_for_all(w);
    ps_record_end((ps_record_event){ .kind = PS_REC_WAIT, .name = PS_WAIT_COLLECTIVE, .begin_ns = since, .id = -1 });
    return rc;
}

/* Records a call, and returns the point of the call. If CALLS points are in progress, the call shares the last point.
 * In a world of one rank, the call is not watched. The caller must hold the lock. */
static int note(wired *w, const char *op, uint64_t call)
{
    bool shares = w->n == CALLS;
    int at = (w->first + w->n - shares) % CALLS;
    underway *c = &w->calls[at];
    PS_TRY(w->table->event_end(w->wire, c->end));
    if (shares) {
        c->n++;
    } else {
        c->call = call, c->n = 1;
        snprintf(c->op, sizeof c->op, "%s", op);
        if (w->comm.size > 1) w->n++;
    }
    pthread_cond_signal(&w->more);
    return at;
}

static int hand_over(ps_comm *comm, const char *op, uint64_t call)
{
    wired *w = self(comm);
    return result(w, ON_WIRE(w, note(w, op, call)));
}

static int catch_up(ps_comm *comm, int point)
{
    wired *w = self(comm);
    ps_wire_event *end = w->calls[point < 0 ? CALLS : point].end;
    pthread_mutex_lock(&w->lock);
    int rc = point < 0 ? w->table->event_end(w->wire, end) : 0;
    return unlocked(w, rc < 0 ? rc : w->table->event_follow(w->be, end));
}

/* Called when the script gets the error of this thread. If the ranks have only disagreed on a call, the communicator
 * has not ended, and this function does nothing. */
static void is_told(ps_comm *comm)
{
    wired *w = self(comm);
    if (ps_watch_over(w->host->watch) || !works(w)) told(w);
}

static int sum(ps_comm *comm, int dtype, int n, char *const *at, int64_t numel, char *to)
{
    wired *w = self(comm);
    return result(w, ON_WIRE(w, w->table->sum(w->wire, dtype, n, at, numel, to)));
}

static int copy(ps_comm *comm, void *to, const void *from, int64_t nbytes)
{
    wired *w = self(comm);
    return result(w, ON_WIRE(w, w->table->copy(w->wire, to, from, nbytes)));
}

static int memory(ps_comm *comm, int64_t nbytes, void **out)
{
    wired *w = self(comm);
    return works(w) ? w->table->memory(w->wire, nbytes, out) : gone(w);
}

static void memory_free(ps_comm *comm, void *p) { self(comm)->table->memory_free(self(comm)->wire, p); }

/* Closes the connections, and ends everything in progress with the error of this thread. */
static void hang_up(ps_comm *comm)
{
    wired *w = self(comm);
    ps_error_kept error;
    ps_error_keep(&error);
    w->host->table->hang_up(w->host);
    ps_error_again(&error);
    give_up(w, error.code);
    ps_error_again(&error);
}

/* Waits until the calls in progress have ended, but at most CALM_S seconds, and then aborts them. A device that waits
 * for absent ranks would block the host. */
static void end_calls(wired *w)
{
    double until = ps_now() + CALM_S;
    for (int64_t turn = 0; ON_WIRE(w, oldest(w, true) != NULL) == 1; rest(turn++)) {
        if (ps_watch_over(w->host->watch)) given_up(w);
        else if (ps_now() > until)
            give_up(w, ps_fail(PS_EIO, "rank %d: a group of ranks was closed, and its bytes did not arrive within %d s",
                               ps_comm_world(&w->comm, w->comm.rank), CALM_S));
    }
}

static void leave(ps_comm *comm)
{
    wired *w = self(comm);
    end_calls(w);
    pthread_mutex_lock(&w->lock);
    w->closing = true;
    pthread_cond_signal(&w->more);
    pthread_mutex_unlock(&w->lock);
    if (w->looks) pthread_join(w->thread, NULL);
    w->looks = false;
    pthread_mutex_lock(&all_lock);
    for (wired **at = &all; *at; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    pthread_mutex_unlock(&all_lock);
}

static void close_wire(ps_comm *comm)
{
    wired *w = self(comm);
    w->table->close(w->wire);
    for (int i = 0; i <= CALLS; i++) if (w->calls[i].end) w->table->event_free(w->calls[i].end);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->more);
    ps_free(w);
}

int ps_groups_settle(void)
{
    int rc = 0;
    pthread_mutex_lock(&all_lock);
    for (wired *w = all; w && rc == 0; w = w->next) {
        rc = works(w) ? settle(&w->comm) : w->table->lost(w->be, false);
        if (rc < 0 && !told(w)) rc = 0;
    }
    pthread_mutex_unlock(&all_lock);
    return rc;
}

static int raw(ps_comm *comm, bool all_reduce, float *out, const float *in, int64_t count)
{
    wired *w = self(comm);
    PS_TRY(result(w, ON_WIRE(w, w->table->raw(w->wire, all_reduce, out, in, count))));
    PS_TRY(wait_until(w, UNTIL_READY, "starting the library's own collective"));
    return wait_until(w, 0, "the library's own collective");
}

static int raw_all_gather(ps_comm *comm, float *out, float *in, int64_t count)
{
    return raw(comm, false, out, in, count);
}

static int raw_all_reduce(ps_comm *comm, float *out, float *in, int64_t count)
{
    return raw(comm, true, out, in, count);
}

static const ps_comm_table wire_table = {
    .name = "device", .begin = begin, .finish = finish, .hang_up = hang_up, .close = close_wire,
    .mark = mark, .after = after, .follow = follow, .settle = settle, .hand_over = hand_over, .catch_up = catch_up,
    .told = is_told, .leave = leave, .sum = sum, .copy = copy, .memory = memory, .memory_free = memory_free,
    .raw_all_gather = raw_all_gather, .raw_all_reduce = raw_all_reduce
};

int ps_comm_wire(struct ps_backend *be, const char *id, ps_comm *host, ps_comm **out)
{
    wired *w = ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->comm = *host;
    w->comm.table = &wire_table;
    w->comm.watch = NULL;                  /* host->watch is used instead */
    w->host = host;
    w->be = be;
    w->table = be->wire;
    int rc = w->table->open(be, id, host->rank, host->size, &w->wire);
    if (rc < 0) {
        ps_free(w);
        return rc;
    }
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->more, NULL);
    pthread_mutex_lock(&all_lock);
    w->next = all;
    all = w;
    pthread_mutex_unlock(&all_lock);
    rc = wait_until(w, UNTIL_READY, "connecting");
    if (rc == 0) rc = prepare(w);
    if (rc < 0) {
        leave(&w->comm);
        close_wire(&w->comm);
        return rc;
    }
    *out = &w->comm;
    return 0;
}
