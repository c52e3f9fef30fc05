/* SPDX-License-Identifier: BSD-3-Clause
 * A communicator over the memory of a device. A backend's wire (backend/wire.h) begins work, and this file waits for
 * its end, once a call: what a call does in turn is ordered on the device. While it waits it looks at the time and at
 * the watch of the group's host communicator, so that a rank that dies or stalls is named, although the device's
 * library names none. A failure here ends the whole group. */
#include "comm/comm.h"
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "backend/backend.h"
#include "base/alloc.h"
#include "base/error.h"
#include "comm/watch.h"

enum { TURNS_AT_ONCE = 200 };              /* turns without a nap: a small exchange takes tens of microseconds */

typedef struct wired {
    ps_comm comm;                          /* first: the table's functions get its address */
    ps_comm *host;
    const ps_wire_table *table;
    ps_wire *wire;
    atomic_bool hung_up;                   /* atomic: `mark` reads it while another thread waits */
} wired;

static wired *self(ps_comm *comm) { return (wired *)comm; }

static void rest(int64_t turn)
{
    struct timespec nap = { .tv_nsec = 20000 };
    if (turn < TURNS_AT_ONCE) sched_yield();
    else nanosleep(&nap, NULL);
}

static void give_up(wired *w)
{
    if (!atomic_exchange(&w->hung_up, true)) w->table->abort(w->wire);
}

/* The wire failed with this thread's error. The watch says which rank is to blame, before this rank ends all that is
 * under way. The other ranks are told of an error of this rank alone. */
static int failed(wired *w, int rc)
{
    char why[900];
    snprintf(why, sizeof why, "%s", ps_error_message());
    bool mine = rc != PS_ETIME && rc != PS_EIO;
    int verdict = mine ? 0 : ps_watch_complain(w->host->watch, w->host->place,
                                               rc == PS_ETIME ? PS_WATCH_TIME_OUT : PS_WATCH_LOST, -1,
                                               w->host->timeout_s, why);
    if (verdict == 0) {
        ps_fail(rc, "%s", why);
        w->host->table->hang_up(w->host);
    } else {
        snprintf(why, sizeof why, "%s", ps_error_message());
        rc = verdict;
    }
    give_up(w);
    return ps_fail(rc, "%s", why);
}

/* Ends all that is under way here, since there is a verdict. */
static int given_up(wired *w)
{
    give_up(w);
    return ps_watch_verdict(w->host->watch);
}

enum { UNTIL_READY = -1 };

/* Waits until the wire is ready for more (UNTIL_READY), or its work in `lane` has ended. */
static int wait_until(wired *w, int lane, const char *what)
{
    double until = ps_now() + w->host->timeout_s;
    for (int64_t turn = 0;; turn++) {
        int rc = lane == UNTIL_READY ? w->table->ready(w->wire) : w->table->ended(w->wire, lane);
        if (rc == 1) return 0;
        if (rc < 0) return failed(w, rc);
        if (ps_watch_over(w->host->watch)) return given_up(w);
        if (ps_now() > until)
            return failed(w, ps_fail(PS_ETIME, "rank %d: %s over %s took longer than %g s (init_distributed's timeout "
                                     "sets the seconds)", ps_comm_world(&w->comm, w->comm.rank), what,
                                     w->table->name, w->host->timeout_s));
        rest(turn);
    }
}

static int usable(const wired *w)
{
    return w->hung_up ? ps_watch_failed_before(w->host->watch) : 0;
}

static int begin(ps_comm *comm, int lane, const ps_comm_part *send, const ps_comm_part *recv)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    int rc = w->table->begin(w->wire, lane - PS_COMM_DATA, send, recv);
    return rc < 0 ? failed(w, rc) : wait_until(w, UNTIL_READY, "starting an exchange");
}

static int finish(ps_comm *comm, int lane)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    return wait_until(w, lane - PS_COMM_DATA, "an exchange");
}

static int mark(ps_comm *comm)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    return w->table->mark(w->wire);
}

static int after(ps_comm *comm, int mark_before)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    int rc = w->table->after(w->wire, mark_before);
    return rc < 0 ? failed(w, rc) : 0;
}

static int follow(ps_comm *comm, int lane)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    int rc = w->table->follow(w->wire, lane - PS_COMM_DATA);
    return rc < 0 ? failed(w, rc) : 0;
}

/* Exchanges first: a sum behind one that failed would never end. */
static int settle(ps_comm *comm)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    for (int lane = 0; lane < PS_WIRE_LANES; lane++) PS_TRY(wait_until(w, lane, "an exchange"));
    return wait_until(w, PS_WIRE_LOCAL, "a sum or a copy");
}

static int sum(ps_comm *comm, int dtype, int n, char *const *at, int64_t numel, char *to)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    int rc = w->table->sum(w->wire, dtype, n, at, numel, to);
    return rc < 0 ? failed(w, rc) : 0;
}

static int copy(ps_comm *comm, void *to, const void *from, int64_t nbytes)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    int rc = w->table->copy(w->wire, to, from, nbytes);
    return rc < 0 ? failed(w, rc) : 0;
}

static int memory(ps_comm *comm, int64_t nbytes, void **out)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    return w->table->memory(w->wire, nbytes, out);
}

static void memory_free(ps_comm *comm, void *p) { self(comm)->table->memory_free(self(comm)->wire, p); }

static void hang_up(ps_comm *comm)
{
    wired *w = self(comm);
    w->host->table->hang_up(w->host);
    give_up(w);
}

static void close_wire(ps_comm *comm)
{
    self(comm)->table->close(self(comm)->wire);
    ps_free(comm);
}

static int raw(ps_comm *comm, bool all_reduce, float *out, const float *in, int64_t count)
{
    wired *w = self(comm);
    PS_TRY(usable(w));
    int rc = w->table->raw(w->wire, all_reduce, out, in, count);
    if (rc < 0) return failed(w, rc);
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
    .mark = mark, .after = after, .follow = follow, .settle = settle, .sum = sum, .copy = copy, .memory = memory,
    .memory_free = memory_free,
    .raw_all_gather = raw_all_gather, .raw_all_reduce = raw_all_reduce
};

int ps_comm_wire(struct ps_backend *be, const char *id, ps_comm *host, ps_comm **out)
{
    wired *w = ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->comm = *host;
    w->comm.table = &wire_table;
    w->comm.watch = NULL;                  /* host->watch is asked */
    w->host = host;
    w->table = be->wire;
    int rc = w->table->open(be, id, host->rank, host->size, &w->wire);
    if (rc < 0) {
        ps_free(w);
        return rc;
    }
    rc = wait_until(w, UNTIL_READY, "connecting");
    if (rc < 0) {
        close_wire(&w->comm);
        return rc;
    }
    *out = &w->comm;
    return 0;
}
