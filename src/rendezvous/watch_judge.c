/* SPDX-License-Identifier: BSD-3-Clause
 * This file makes the verdicts of the watch. It finds the rank to blame, and writes the text of the verdict. It runs
 * on the thread of the watch. */
#include "rendezvous/watch_inner.h"
#include "base/error.h"
#include <stdio.h>
#include <string.h>

/* The time in seconds from a broken connection to the verdict about it. During this time the reason may become known,
 * for example from a message or from the death of the peer. */
static const double GRACE_S = 1.5;
/* POKE_S: maximum time in seconds that ranks have to report their progress after a poke */
static const double POKE_S = 1;

enum { MAX_NAMED = 4, PLACE_TEXT = 240 };

static const char *host_of(const ps_watch *w, int rank)
{
    if (rank == w->rank) return w->host;
    const watch_peer *p = rank >= 0 && rank < w->size ? w->peers[rank] : NULL;
    return p && p->host[0] ? p->host : "host unknown";
}

/* Writes the name and the number of a call to `text`, such as "all_reduce (call 3)" or "all_reduce of tp (call 3)". */
static void numbered(const watch_place *at, const char *op, uint64_t call, char *text, size_t room)
{
    int n = snprintf(text, room, "%s%s%s", op, at->axis[0] ? " of " : "", at->axis);
    if (call != PS_WATCH_NO_CALL && n < (int)room)
        snprintf(text + n, room - (size_t)n, " (call %llu)", (unsigned long long)call);
}

/* Writes a description of the call that a rank is in to `text`. For a send or recv, the description is such as "send
 * with rank 2" or "send of pp with rank 2". For other calls, it is the text of numbered(). */
static void call_text(const watch_place *at, char *text, size_t room)
{
    if (at->peer < 0) numbered(at, at->op, at->call, text, room);
    else snprintf(text, room, "%s%s%s with rank %d", at->op, at->axis[0] ? " of " : "", at->axis, at->peer);
}

static void last_call_text(const watch_place *at, char *text, size_t room)
{
    numbered(at, at->last_op, at->last_call, text, room);
}

/* Returns the place that best describes the position of a rank. This is the last used place that is inside a call. If
 * no place is inside a call, it is the last used place with a finished collective. Returns NULL if the rank has made no
 * call. */
static const watch_place *latest(const watch_places *places)
{
    const watch_place *best = NULL;
    for (int i = 0; i < PS_WATCH_PLACES; i++) {
        const watch_place *at = &places->at[i];
        if (!places->known[i] || !(at->inside || at->last_op[0])) continue;
        if (!best || at->inside > best->inside || (at->inside == best->inside && at->turn > best->turn)) best = at;
    }
    return best;
}

/* Writes the position of a rank: "in all_reduce (call 3)", "after all_reduce (call 3)" or "before its first call".
 * Lists all calls that the rank is in, because calls of several groups can run at the same time. */
static void place_text(const watch_places *places, char *text, size_t room)
{
    const watch_place *first = latest(places);
    char call[96];
    if (!first) {
        snprintf(text, room, "before its first call");
        return;
    }
    if (!first->inside) {
        last_call_text(first, call, sizeof call);
        snprintf(text, room, "after %s", call);
        return;
    }
    call_text(first, call, sizeof call);
    int n = snprintf(text, room, "in %s", call);
    for (int i = 0; i < PS_WATCH_PLACES && n < (int)room; i++) {
        const watch_place *at = &places->at[i];
        if (!places->known[i] || !at->inside || at == first) continue;
        call_text(at, call, sizeof call);
        n += snprintf(text + n, room - (size_t)n, " and in %s", call);
    }
}

/* Returns true if a rank is in a call of a group whose place is not places->at[i]. */
static bool is_elsewhere(const watch_places *places, int i)
{
    bool found = false;
    for (int j = 0; j < PS_WATCH_PLACES; j++)
        found = found || (j != i && places->known[j] && places->at[j].inside);
    return found;
}

/* Writes the last known position of rank p to `text`. The position is known from the last message of rank p. If this
 * rank has since finished a collective, rank p must have begun this collective as well. Rank p is then assumed to be in
 * this collective, unless it is in a call of another group. */
static void last_known(ps_watch *w, const watch_peer *p, char *text, size_t room)
{
    watch_places own, theirs = p->places;
    watch_own_places(w, &own);
    for (int i = 0; i < PS_WATCH_PLACES; i++) {
        watch_place *at = &theirs.at[i];
        const watch_place *mine = theirs.known[i] ? watch_find(&own, at->key) : NULL;
        if (!mine || !mine->last_op[0] || mine->last_call == PS_WATCH_NO_CALL || mine->last_call < at->calls) continue;
        at->inside = !is_elsewhere(&theirs, i);
        at->peer = -1;
        at->call = at->last_call = mine->last_call;
        memcpy(at->op, mine->last_op, sizeof at->op);
        memcpy(at->last_op, mine->last_op, sizeof at->last_op);
    }
    place_text(&theirs, text, room);
}

void watch_died(ps_watch *w, const watch_peer *p)
{
    char place[PLACE_TEXT];
    last_known(w, p, place, sizeof place);
    watch_decide(w, PS_EIO, p->rank, "rank %d (%s) died: its process ended without a word (killed, out of memory, or a "
                 "crash); it was last known %s", p->rank, p->host, place);
}

void watch_silent(ps_watch *w, const watch_peer *p, double now)
{
    char place[PLACE_TEXT];
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
    char place[PLACE_TEXT], call[96];
    place_text(&p->places, place, sizeof place);
    call_text(&c->at, call, sizeof call);
    watch_decide(w, PS_EIO, p->rank, "rank %d (%s) ended %s (its script came to its end, or it closed the group), and "
                 "rank %d (%s) waits for it in %s", p->rank, p->host, place, c->from, host_of(w, c->from), call);
}

/* Returns true if rank `r`, whose places are `places`, keeps the complaining rank waiting. Rank `r` does so if it is in
 * the group of the call and has not begun the call. If `r` has no known place in this group, only the peer that the
 * complaint names is assumed to keep it waiting. */
static bool is_missing(const watch_places *places, int r, const watch_complaint *c)
{
    const watch_place *p = watch_find(places, c->at.key);
    if (r == c->from || (c->at.peer >= 0 && r != c->at.peer)) return false;
    if (!p) return r == c->peer;
    return c->at.peer >= 0 ? !(p->inside && p->peer == c->from) : p->calls <= c->at.call;
}

static int add_missing(const ps_watch *w, const watch_peer *p, const watch_complaint *c, double now, char *text,
                       size_t room)
{
    char call[96], place[PLACE_TEXT], state[64] = "is alive but";
    const watch_place *at = latest(&p->places);
    if (c->at.peer < 0) call_text(&c->at, call, sizeof call);
    else snprintf(call, sizeof call, "meet rank %d's %s", c->from, c->at.op);
    if (!p->fresh && now - p->heard_at > 2 * w->beat_s)
        snprintf(state, sizeof state, "is silent for %.1f s and", now - p->heard_at);
    if (at && at->inside) {
        char other[PLACE_TEXT - 8];
        place_text(&p->places, other, sizeof other);
        snprintf(place, sizeof place, "it is %s", other);
    } else if (at) {
        char other[96];
        last_call_text(at, other, sizeof other);
        snprintf(place, sizeof place, "it last finished %s", other);
    } else snprintf(place, sizeof place, "it has made no call yet");
    return snprintf(text, room, "rank %d (%s) %s has not come to %s within %g s; %s", p->rank, p->host, state, call,
                    c->seconds, place);
}

/* Makes the verdict about a call that has timed out. The verdict lists the ranks that have not begun the call. */
static void timed_out(ps_watch *w, const watch_complaint *c, double now)
{
    char text[PS_WATCH_TEXT - 100], call[96];
    size_t at = 0;
    int n = 0, first = -1;
    watch_peer own = { .rank = 0, .fresh = true };
    watch_own_places(w, &own.places);
    memcpy(own.host, w->host, sizeof own.host);
    text[0] = 0;
    for (int r = 0; r < w->size; r++) {
        const watch_peer *p = r == 0 ? &own : w->peers[r];
        if (!p || !is_missing(&p->places, r, c)) continue;
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
    char call[96];
    call_text(&c->at, call, sizeof call);
    if (c->peer < 0) {
        watch_decide(w, PS_EIO, -1, "rank %d (%s) lost its connection to other ranks' devices in %s, although all "
                     "ranks are alive: %s", c->from, host_of(w, c->from), call, c->text);
        return;
    }
    watch_decide(w, PS_EIO, -1, "the connection of rank %d (%s) to rank %d (%s) broke in %s, while both are alive; is "
                 "the network between them sound? (%s)", c->from, host_of(w, c->from), c->peer, host_of(w, c->peer),
                 call, c->text);
}

/* -- cycles
 *
 * If ranks deadlock in calls of different groups, they would wait until the time-out. Rank 0 finds such ranks earlier,
 * from the places in their beats. The places of two ranks can be from different times. Therefore rank 0 examines one
 * moment in the past, at which it sent an earlier beat. A rank had its present place at that moment if two conditions
 * hold: it sent this place before that moment, and it sent the same place again after it had received that beat. A rank
 * whose script waits begins no other call. Therefore a cycle of such ranks never ends. */
/* The examined moment is the sending of the beat with the index n_beats - EARLIER. */
enum { EARLIER = 2 };

/* Returns the place of the call in which the script of a rank waits, or NULL if the script does not wait. */
static const watch_place *waiting(const watch_places *places)
{
    for (int i = 0; i < PS_WATCH_PLACES; i++)
        if (places->known[i] && places->at[i].waits) return &places->at[i];
    return NULL;
}

static uint64_t last_move(const watch_places *places)
{
    uint64_t moved = 0;
    for (int i = 0; i < PS_WATCH_PLACES; i++)
        if (places->known[i] && places->at[i].moved > moved) moved = places->at[i].moved;
    return moved;
}

/* Returns the places of a rank. Returns NULL if the rank has not connected or has left. own: the places of rank 0. */
static const watch_places *places_of(const ps_watch *w, const watch_places *own, int rank)
{
    const watch_peer *p = w->peers[rank];
    return rank == 0 ? own : p && !p->left ? &p->places : NULL;
}

/* Returns true if it is known that no message of the group `key` is in transit. This is known only if all ranks
 * rest. */
static bool is_quiet(const ps_watch *w, const watch_places *own, uint64_t key)
{
    int64_t under_way = 0;
    for (int r = 0; r < w->size; r++) {
        const watch_places *places = places_of(w, own, r);
        const watch_place *at = places ? watch_find(places, key) : NULL;
        if (!w->rests[r].rests) return false;
        if (at) under_way += at->under_way;
    }
    return under_way == 0;
}

/* Returns a held rank that keeps rank `rank` waiting, or -1 if there is none. The returned rank belongs to the group of
 * the call in which `rank` waits, but it is in no call of that group. If `rank` waits for a message, the returned rank
 * is the rank that must send the message. */
static int held_by(const ps_watch *w, const watch_places *own, int rank)
{
    const watch_place *at = waiting(places_of(w, own, rank));
    bool message = at->call == PS_WATCH_NO_CALL;
    if (message && !is_quiet(w, own, at->key)) return -1;
    for (int r = 0; r < w->size; r++) {
        if (r == rank || !w->rests[r].held || (at->peer >= 0 && at->peer != r)) continue;
        const watch_place *theirs = watch_find(places_of(w, own, r), at->key);
        if (message || (theirs && !theirs->inside && (at->peer >= 0 || theirs->calls <= at->call))) return r;
    }
    return -1;
}

static void in_a_circle(ps_watch *w, const watch_places *own)
{
    char text[PS_WATCH_TEXT - 200], call[96];
    size_t at = 0;
    int n = 0;
    for (int r = 0; r < w->size; r++) {
        if (!w->rests[r].held || n++ >= MAX_NAMED || at >= sizeof text) continue;
        int by = held_by(w, own, r);
        call_text(waiting(places_of(w, own, r)), call, sizeof call);
        at += (size_t)snprintf(text + at, sizeof text - at, "%srank %d (%s) is in %s, to which rank %d has not come",
                               n > 1 ? "; " : "", r, host_of(w, r), call, by);
    }
    watch_decide(w, PS_EINVAL, -1, "ranks wait for each other: %s%s; all ranks must make the calls of all their "
                 "groups in one order", text, n > MAX_NAMED ? "; and so on" : "");
}

void watch_circle(ps_watch *w)
{
    watch_places own;
    int n = 0;
    if (atomic_load(&w->over)) return;
    watch_own_places(w, &own);
    for (int r = 0; r < w->size; r++) {
        const watch_places *places = places_of(w, &own, r);
        watch_rest *rest = &w->rests[r];
        uint64_t moved = places ? last_move(places) : 0;
        if (moved != rest->moved) rest->moved = moved, rest->since = w->n_beats;
        int32_t then = w->n_beats - EARLIER;
        rest->rests = places && rest->since <= then && (r == 0 || rest->heard >= then);
        rest->held = rest->rests && waiting(places);
        n += rest->held;
    }
    /* Removes ranks whose wait can end from the set of held ranks. The remaining held ranks form cycles. */
    for (int before = n + 1; n > 0 && n < before;) {
        before = n;
        for (int r = 0; r < w->size; r++)
            if (w->rests[r].held && held_by(w, &own, r) < 0) w->rests[r].held = false, n--;
    }
    if (n > 0) in_a_circle(w, &own);
}

/* -- complaints */

/* Judges a complaint on a rank other than 0. This rank makes a verdict only if rank 0 has left. Returns false if there
 * will be no verdict. */
static bool judge_rank_0(ps_watch *w)
{
    const watch_peer *p = w->peers[0];
    const watch_complaint *c = &w->pending;
    if (!p->left) return true;
    bool waits = c->at.peer < 0 ? watch_find(&p->places, c->at.key) || c->peer == 0 : c->at.peer == 0;
    if (c->what == PS_WATCH_GIVES_UP || !waits) return false;
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
        if (p->left && is_missing(&p->places, r, c)) {
            ended(w, p, c);
            return true;
        }
        if (!p->left && !p->fresh) all_fresh = false;
    }
    if (c->what == PS_WATCH_TIME_OUT && (all_fresh || now >= c->since + POKE_S)) timed_out(w, c, now);
    else if (c->what == PS_WATCH_LOST && now >= c->since + GRACE_S) broke(w, c);
    return true;
}
