/* SPDX-License-Identifier: BSD-3-Clause
 * The verdicts of the watch: who is to blame, and the words for it. Runs in the watch's thread. */
#include "comm/watch_inner.h"
#include "base/error.h"
#include <stdio.h>
#include <string.h>

/* A peer may break a connection a moment before its own word, or its end, is known. */
static const double GRACE_S = 1.5;
static const double POKE_S = 1;            /* so long ranks have to answer how far they are */

enum { MAX_NAMED = 4 };

static const char *host_of(const ps_watch *w, int rank)
{
    if (rank == w->rank) return w->host;
    const watch_peer *p = rank >= 0 && rank < w->size ? w->peers[rank] : NULL;
    return p && p->host[0] ? p->host : "host unknown";
}

/* "all_reduce (call 3)", "send with rank 2". */
static void call_text(const watch_place *at, char *text, size_t room)
{
    if (at->peer >= 0) snprintf(text, room, "%s with rank %d", at->op, at->peer);
    else snprintf(text, room, "%s (call %llu)", at->op, (unsigned long long)at->call);
}

/* "in all_reduce (call 3)", "after all_reduce (call 3)", "before its first call". */
static void place_text(const watch_place *at, char *text, size_t room)
{
    char call[64];
    call_text(at, call, sizeof call);
    if (at->inside) snprintf(text, room, "in %s", call);
    else if (at->last_op[0])
        snprintf(text, room, "after %s (call %llu)", at->last_op, (unsigned long long)at->last_call);
    else snprintf(text, room, "before its first call");
}

/* Where a rank was when it was last heard. A call that this rank finished since, the other one came to as well. */
static void last_known(ps_watch *w, const watch_peer *p, char *text, size_t room)
{
    watch_place own = watch_own_place(w), at = p->at;
    if (own.last_op[0] && own.last_call >= at.calls) {
        at = (watch_place){ .call = own.last_call, .peer = -1, .inside = 1 };
        memcpy(at.op, own.last_op, sizeof at.op);
    }
    place_text(&at, text, room);
}

void watch_died(ps_watch *w, const watch_peer *p)
{
    char place[96];
    last_known(w, p, place, sizeof place);
    watch_decide(w, PS_EIO, p->rank, "rank %d (%s) died: its process ended without a word (killed, out of memory, or a "
                 "crash); it was last known %s", p->rank, p->host, place);
}

void watch_silent(ps_watch *w, const watch_peer *p, double now)
{
    char place[96];
    last_known(w, p, place, sizeof place);
    watch_decide(w, PS_ETIME, p->rank, "rank %d (%s) is silent for %.1f s: it was stopped, its machine hangs, or the "
                 "network to it is cut; it was last known %s", p->rank, p->host, now - p->heard_at, place);
}

void watch_failed(ps_watch *w, int rank, const char *host, const char *text)
{
    watch_decide(w, PS_EIO, rank, "rank %d (%s) failed: %s", rank, host, text);
}

static void ended(ps_watch *w, const watch_peer *p, const watch_complaint *c)
{
    char place[96], call[64];
    place_text(&p->at, place, sizeof place);
    call_text(&c->at, call, sizeof call);
    watch_decide(w, PS_EIO, p->rank, "rank %d (%s) ended %s (its script came to its end, or it closed the group), and "
                 "rank %d (%s) waits for it in %s", p->rank, p->host, place, c->from, host_of(w, c->from), call);
}

/* Whether rank `p` keeps the complaining rank waiting: it is not in, and was not in, the same call. */
static bool is_missing(const watch_place *p, const watch_complaint *c)
{
    if (c->at.peer >= 0) return !(p->inside && p->peer == c->from);
    return p->calls <= c->at.call;
}

static int add_missing(const ps_watch *w, const watch_peer *p, const watch_complaint *c, double now, char *text,
                       size_t room)
{
    char call[64], place[160], state[64] = "is alive but";
    if (c->at.peer < 0) call_text(&c->at, call, sizeof call);
    else snprintf(call, sizeof call, "meet rank %d's %s", c->from, c->at.op);
    if (!p->fresh && now - p->heard_at > 2 * w->beat_s)
        snprintf(state, sizeof state, "is silent for %.1f s and", now - p->heard_at);
    if (p->at.inside) {
        char other[64];
        call_text(&p->at, other, sizeof other);
        snprintf(place, sizeof place, "it is in %s", other);
    } else if (p->at.last_op[0])
        snprintf(place, sizeof place, "it last finished %s (call %llu)", p->at.last_op,
                 (unsigned long long)p->at.last_call);
    else snprintf(place, sizeof place, "it has made no call yet");
    return snprintf(text, room, "rank %d (%s) %s has not come to %s within %g s; %s", p->rank, p->host, state, call,
                    c->seconds, place);
}

/* A call that took too long: names the ranks that have not come to it. */
static void timed_out(ps_watch *w, const watch_complaint *c, double now)
{
    char text[PS_WATCH_TEXT - 100], call[64];
    size_t at = 0;
    int n = 0, first = -1;
    watch_peer own = { .rank = 0, .fresh = true, .at = watch_own_place(w) };
    memcpy(own.host, w->host, sizeof own.host);
    text[0] = 0;
    for (int r = 0; r < w->size; r++) {
        const watch_peer *p = r == 0 ? &own : w->peers[r];
        if (r == c->from || !p || (c->at.peer >= 0 && r != c->at.peer) || !is_missing(&p->at, c)) continue;
        if (first < 0) first = r;
        if (n++ >= MAX_NAMED || at >= sizeof text) continue;
        if (n > 1) at += (size_t)snprintf(text + at, sizeof text - at, "; ");
        if (at < sizeof text) at += (size_t)add_missing(w, p, c, now, text + at, sizeof text - at);
    }
    call_text(&c->at, call, sizeof call);
    if (n > MAX_NAMED) watch_decide(w, PS_ETIME, first, "%s; and so for %d more ranks", text, n - MAX_NAMED);
    else if (n) watch_decide(w, PS_ETIME, first, "%s", text);
    else if (c->peer < 0)
        watch_decide(w, PS_ETIME, -1, "%s of rank %d (%s) did not end within %g s, though all its ranks came to it: %s",
                     call, c->from, host_of(w, c->from), c->seconds, c->text);
    else
        watch_decide(w, PS_ETIME, -1, "%s of rank %d (%s) did not end within %g s, though all its ranks came to it: "
                     "bytes of rank %d (%s) do not arrive; is the network slow, or the time-out short?", call, c->from,
                     host_of(w, c->from), c->seconds, c->peer, host_of(w, c->peer));
}

static void broke(ps_watch *w, const watch_complaint *c)
{
    char call[64];
    call_text(&c->at, call, sizeof call);
    if (c->peer < 0) {
        watch_decide(w, PS_EIO, -1, "rank %d (%s) lost its connection to other ranks' devices in %s, while all ranks "
                     "are alive: %s", c->from, host_of(w, c->from), call, c->text);
        return;
    }
    watch_decide(w, PS_EIO, -1, "the connection of rank %d (%s) to rank %d (%s) broke in %s, while both are alive; is "
                 "the network between them sound? (%s)", c->from, host_of(w, c->from), c->peer, host_of(w, c->peer),
                 call, c->text);
}

/* Not rank 0: it was rank 0's to judge, unless that left. */
static bool judge_rank_0(ps_watch *w)
{
    const watch_peer *p = w->peers[0];
    const watch_complaint *c = &w->pending;
    if (!p->left) return true;
    if (c->what == PS_WATCH_GIVES_UP || (c->at.peer > 0)) return false;
    ended(w, p, c);
    return true;
}

bool watch_judge(ps_watch *w, double now)
{
    watch_complaint *c = &w->pending;
    if (!c->on || atomic_load(&w->over)) return true;
    if (w->rank != 0) return judge_rank_0(w);
    if (c->what == PS_WATCH_GIVES_UP) {
        watch_decide(w, PS_EIO, c->from, "rank %d (%s) gave up: %s", c->from, host_of(w, c->from), c->text);
        return true;
    }
    bool all_fresh = true;
    for (int r = 1; r < w->size; r++) {
        const watch_peer *p = w->peers[r];
        if (!p) continue;
        if (p->left && r != c->from && (c->at.peer < 0 || c->at.peer == r) && is_missing(&p->at, c)) {
            ended(w, p, c);
            return true;
        }
        if (!p->left && !p->fresh) all_fresh = false;
    }
    if (c->what == PS_WATCH_TIME_OUT && (all_fresh || now >= c->since + POKE_S)) timed_out(w, c, now);
    else if (c->what == PS_WATCH_LOST && now >= c->since + GRACE_S) broke(w, c);
    return true;
}
