/* SPDX-License-Identifier: BSD-3-Clause
 * This file contains the thread and the connections of the watch (watch.h). Rank 0 has a connection to each other rank.
 * Every other rank has a connection to rank 0. Only the thread of the watch uses connections. Callers store their
 * messages in fields that the lock guards, and then wake this thread. Sockets never block, and all sizes are checked
 * before the bytes are read. If a peer sends invalid bytes, its connection is closed. */
#define _GNU_SOURCE
#include "rendezvous/watch_inner.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/thread.h"
#include "rendezvous/net.h"
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* All times below are in seconds. */
/* Time between two beats. It is shorter if the allowed silence is short. */
static const double BEAT_S = 1;
/* Maximum time for which a process that closes its watch waits until its last message has been received. */
static const double LINGER_S = 1;
static const double AGAIN_S = 0.05;        /* time between two tries to connect */
/* Maximum time between the end of the allowed silence and the verdict. */
static const double SLACK_S = 3;
static const double STRANGER_S = 10;       /* time that a new connection has to send its rank */
/* The minimum time between two PLACE messages of a rank is TELL_S times the number of ranks. */
static const double TELL_S = 1e-4;

enum { MAGIC = 0x31575350 /* "PSW1" */, MAX_STRANGERS = 64, MAX_EVENTS = 64 };
static const char *const ADDRESS_KEY = "watch";

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
/* The last verdict about another rank of a watch that has been closed, or "". It is kept because a group that fails
 * while it is made is closed before its error is printed. all_lock guards this text. */
static char closed_verdict[PS_WATCH_TEXT];
static ps_watch *all;                      /* list of the watches of this process */

static void wake(ps_watch *w) { while (write(w->wake[1], "", 1) < 0 && errno == EINTR) { } }

void watch_own_places(ps_watch *w, watch_places *out)
{
    pthread_mutex_lock(&w->lock);
    *out = w->places;
    pthread_mutex_unlock(&w->lock);
}

const watch_place *watch_find(const watch_places *places, uint64_t key)
{
    for (int i = 0; i < PS_WATCH_PLACES; i++)
        if (places->known[i] && places->at[i].key == key) return &places->at[i];
    return NULL;
}

/* -- connections, which only the thread uses ----------------------------------------------------------------------- */

static watch_peer *peer_new(ps_watch *w, int fd, int rank)
{
    watch_peer *p = ps_alloc(sizeof *p);
    if (!p) return NULL;
    memset(p, 0, offsetof(watch_peer, in));
    p->fd = fd;
    p->rank = rank;
    p->heard_at = ps_now();
    struct epoll_event e = { .events = EPOLLIN, .data.ptr = p };
    if (epoll_ctl(w->epoll, EPOLL_CTL_ADD, fd, &e) == 0) return p;
    ps_free(p);
    return NULL;
}

/* Closes a file descriptor. First removes it from the epoll set, because a child process may have the same file
 * open. */
static void forget(ps_watch *w, int *fd)
{
    if (*fd < 0) return;
    epoll_ctl(w->epoll, EPOLL_CTL_DEL, *fd, NULL);
    close(*fd);
    *fd = -1;
}

static void flush(ps_watch *w, watch_peer *p)
{
    uint32_t sent = 0;
    if (p->fd < 0) return;
    while (sent < p->out_nbytes) {
        int64_t n = ps_net_some(p->fd, p->out + sent, p->out_nbytes - sent, true);
        if (n <= 0) break;                 /* the next read will report the failure */
        sent += (uint32_t)n;
    }
    memmove(p->out, p->out + sent, p->out_nbytes - sent);
    p->out_nbytes -= sent;
    struct epoll_event e = { .events = EPOLLIN | (p->out_nbytes ? EPOLLOUT : 0u), .data.ptr = p };
    epoll_ctl(w->epoll, EPOLL_CTL_MOD, p->fd, &e);
}

static void post(ps_watch *w, watch_peer *p, watch_message m, const char *text)
{
    if (!p || p->fd < 0) return;
    m.magic = MAGIC;
    m.rank = w->rank;
    m.nbytes = text ? (uint32_t)strlen(text) : 0;
    if (p->out_nbytes + sizeof m + m.nbytes > sizeof p->out) return;
    memcpy(p->out + p->out_nbytes, &m, sizeof m);
    if (m.nbytes) memcpy(p->out + p->out_nbytes + sizeof m, text, m.nbytes);
    p->out_nbytes += (uint32_t)sizeof m + m.nbytes;
    flush(w, p);
}

static void post_all(ps_watch *w, watch_message m, const char *text)
{
    for (int r = 0; r < w->size; r++) post(w, w->peers[r], m, text);
}

/* Sends a beat. A beat consists of one message for each place. */
static void post_places(ps_watch *w, watch_peer *p)
{
    watch_places own;
    int n = 0;
    watch_own_places(w, &own);
    for (int i = 0; i < PS_WATCH_PLACES; i++) n += own.known[i];
    for (int i = 0; i < PS_WATCH_PLACES; i++)
        if (own.known[i])
            post(w, p, (watch_message){ .kind = WATCH_BEAT, .code = w->n_beats, .what = w->n_pokes, .at = own.at[i],
                                        .places = n-- }, NULL);
}

/* Returns true if earlier bytes for this peer are still unsent. The watch then skips beats and pokes for this peer. It
 * never skips other messages. There are so few other messages that the buffer has room for them. */
static bool is_behind(const watch_peer *p) { return !p || p->fd < 0 || p->out_nbytes > 0; }

static void beat_to(ps_watch *w, watch_peer *p) { if (!is_behind(p)) post_places(w, p); }

/* Returns the pipe to the launcher of this rank (lua/ps/launch/supervisor.lua), or -1. The number of the rank that this
 * group blames is written to the pipe. PS_LAUNCHER_PIPE has the form "descriptor:inode". The inode is checked, because
 * a process may have inherited the environment variable without the descriptor. */
static int launcher_pipe(void)
{
    const char *text = getenv("PS_LAUNCHER_PIPE");
    struct stat file;
    int fd;
    unsigned long long inode;
    if (!text || sscanf(text, "%d:%llu", &fd, &inode) != 2 || fd < 3 || fstat(fd, &file) < 0) return -1;
    return S_ISFIFO(file.st_mode) && file.st_ino == inode ? fd : -1;
}

/* Tells the launcher which rank is to blame for the end of this rank. The launcher reads the pipe continuously, so the
 * write does not block. */
static void tell_launcher(const ps_watch *w)
{
    char line[48];
    if (w->launcher < 0 || w->blamed < 0 || w->blamed == w->rank) return;
    int n = snprintf(line, sizeof line, "%d %s\n", w->blamed, ps_error_name(w->code));
    while (write(w->launcher, line, (size_t)n) < 0 && errno == EINTR) { }
}

void watch_decide(ps_watch *w, int code, int blamed, const char *fmt, ...)
{
    if (atomic_load(&w->over)) return;
    char text[PS_WATCH_TEXT] = "";
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (w->rank == 0) post_all(w, (watch_message){ .kind = WATCH_VERDICT, .code = code, .peer = blamed }, text);
    pthread_mutex_lock(&w->lock);
    w->code = code, w->blamed = blamed;
    memcpy(w->verdict, text, sizeof text);
    atomic_store(&w->over, 1);
    pthread_cond_broadcast(&w->news);
    pthread_mutex_unlock(&w->lock);
    tell_launcher(w);
    if (w->on_verdict) w->on_verdict(w->arg);
}

static void no_answer(ps_watch *w)
{
    w->pending.on = false;
    pthread_mutex_lock(&w->lock);
    w->unanswered = true;
    pthread_cond_broadcast(&w->news);
    pthread_mutex_unlock(&w->lock);
}

static void judge(ps_watch *w)
{
    if (!watch_judge(w, ps_now())) no_answer(w);
}

/* Returns true if complaint `c` replaces the earlier complaint. Of all complaints of all ranks, only one is judged. A
 * complaint about a lost connection is replaced by any other kind of complaint, because the rank that closed the
 * connection knows the reason better. */
static bool replaces(const watch_complaint *c, const watch_complaint *earlier)
{
    return c->on && (!earlier->on || (earlier->what == PS_WATCH_LOST && c->what != PS_WATCH_LOST));
}

/* Handles a complaint. Rank 0 asks all ranks for their progress. Other ranks send the complaint to rank 0. */
static void complained(ps_watch *w, const watch_complaint *c)
{
    if (!replaces(c, &w->pending)) return;
    w->pending = *c;
    w->pending.since = ps_now();
    if (w->rank == 0) {
        w->n_pokes++;
        for (int r = 1; r < w->size; r++) {
            if (w->peers[r]) w->peers[r]->fresh = false;
            if (!is_behind(w->peers[r]))
                post(w, w->peers[r], (watch_message){ .kind = WATCH_POKE, .what = w->n_pokes }, NULL);
        }
    } else if (!w->peers[0]->left)
        post(w, w->peers[0], (watch_message){ .kind = WATCH_COMPLAIN, .what = c->what, .peer = c->peer,
                                              .seconds = c->seconds, .at = c->at, .places = 1 }, c->text);
    judge(w);
}

/* Handles the first message that arrives on a connection after its proof. Returns false if no rank of this group can
 * have sent the message. */
static bool hello(ps_watch *w, watch_peer *p, const watch_message *m, const char *text)
{
    if (m->kind != WATCH_HELLO || m->rank < 1 || m->rank >= w->size || w->peers[m->rank])
        return false;
    bool over = atomic_load(&w->over);     /* the verdict was made before this rank connected */
    p->rank = m->rank;
    snprintf(p->host, sizeof p->host, "%.*s", WATCH_HOST - 1, text);
    for (watch_peer **at = &w->strangers; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    w->n_strangers--;
    w->peers[p->rank] = p;
    post(w, p, (watch_message){ .kind = WATCH_WELCOME, .seconds = w->silence_s }, w->host);
    if (m->seconds != w->silence_s)
        watch_decide(w, PS_EINVAL, p->rank, "heartbeat is %g s on rank %d and %g s on rank 0; give all ranks the same",
                     m->seconds, p->rank, w->silence_s);
    if (over)
        post(w, p, (watch_message){ .kind = WATCH_VERDICT, .code = w->code, .peer = w->blamed }, w->verdict);
    if (++w->n_come == w->size - 1) forget(w, &w->listener);
    return true;
}

/* Handles the BYE of a peer. If code < 0, the message also contains the verdict that the peer has received. This rank
 * may not have received the verdict yet. */
static void bye(ps_watch *w, watch_peer *p, int code, int blamed, const char *text)
{
    p->left = true;
    forget(w, &p->fd);
    if (code < 0) watch_decide(w, code, blamed, "%s", text);
    judge(w);
}

/* Stores a place that a rank has sent. If there is no room for another place, replaces the place that was used least
 * recently. */
static watch_place note_place(watch_places *places, watch_place at)
{
    int to = 0;
    at.op[WATCH_OP - 1] = at.last_op[WATCH_OP - 1] = at.axis[WATCH_AXIS - 1] = 0;
    for (int i = 0; i < PS_WATCH_PLACES; i++) {
        bool same = places->known[i] && places->at[i].key == at.key, free = !places->known[i] && places->known[to];
        bool older = places->known[i] && places->known[to] && places->at[i].turn < places->at[to].turn;
        if (same || free || older) to = i;
        if (same) break;
    }
    places->known[to] = true;
    places->at[to] = at;
    return at;
}

/* Handles a message of a peer. Returns false if no rank of this group can have sent the message. */
static bool understand(ps_watch *w, watch_peer *p, const watch_message *m, const char *text)
{
    if (p->rank < 0) return hello(w, p, m, text);
    if (m->rank != p->rank || m->peer < -1 || m->peer >= w->size) return false;
    p->heard_at = ps_now();
    watch_place at = { .peer = -1 };
    if (m->places > 0) at = note_place(&p->places, m->at);
    if (m->kind == WATCH_BEAT && m->places <= 1 && m->what == w->n_pokes) p->fresh = true;
    if (m->kind == WATCH_BEAT && m->places <= 1 && w->rank == 0) w->rests[p->rank].heard = m->code;
    if (m->kind == WATCH_BEAT && w->rank != 0) w->n_beats = m->code;
    if (m->kind == WATCH_BEAT) {
        if (w->pending.on) judge(w);
    } else if (m->kind == WATCH_PLACE) {
        return m->places == 1;
    } else if (m->kind == WATCH_BYE) {
        bye(w, p, m->code, m->peer, text);
    } else if (m->kind == WATCH_POKE && w->rank != 0) {
        w->n_pokes = m->what;
        beat_to(w, p);
    } else if (m->kind == WATCH_VERDICT && w->rank != 0 && m->code < 0) {
        watch_decide(w, m->code, m->peer, "%s", text);
    } else if (m->kind == WATCH_FAIL && w->rank == 0) {
        watch_failed(w, p->rank, p->host, text);
    } else if (m->kind == WATCH_COMPLAIN && w->rank == 0) {
        watch_complaint c = { .on = true, .what = m->what, .from = p->rank, .peer = m->peer, .seconds = m->seconds,
                              .at = at };
        snprintf(c.text, sizeof c.text, "%s", text);
        complained(w, &c);
    } else return false;
    return true;
}

/* Reads the bytes that have arrived. Returns false if the connection has ended, or if no rank of this group can have
 * sent these bytes. */
static bool receive(ps_watch *w, watch_peer *p)
{
    char why[PS_PROOF_TEXT];
    if (!p->proved && p->rank < 0) {
        int done = ps_proof_answer(&p->proof, p->fd, &w->run, why);
        if (done != PS_PROOF_DONE) return done == PS_PROOF_MORE;
        p->proved = true;
    }
    while (p->fd >= 0) {
        watch_message m;
        uint32_t want = sizeof m;
        if (p->in_nbytes >= sizeof m) {
            memcpy(&m, p->in, sizeof m);
            if (m.magic != MAGIC || (uint32_t)m.kind >= WATCH_KINDS || m.nbytes >= PS_WATCH_TEXT) return false;
            want += m.nbytes;
        }
        if (p->in_nbytes < want) {
            int64_t n = ps_net_some(p->fd, p->in + p->in_nbytes, want - p->in_nbytes, false);
            if (n <= 0) return n == 0;
            p->in_nbytes += (uint32_t)n;
            continue;
        }
        char text[PS_WATCH_TEXT];
        memcpy(text, p->in + sizeof m, m.nbytes);
        text[m.nbytes] = 0;
        p->in_nbytes = 0;
        if (!understand(w, p, &m, text)) return false;
    }
    return true;
}

/* Closes the oldest stranger that has not proved anything. If there is none, closes the oldest stranger.
 * sweep_strangers frees it later. */
static void drop_stranger(ps_watch *w)
{
    watch_peer *oldest = NULL;
    for (watch_peer *p = w->strangers; p; p = p->next)     /* the list begins with the newest stranger */
        if (p->fd >= 0 && (!oldest || oldest->proved || !p->proved)) oldest = p;
    if (oldest) forget(w, &oldest->fd);
}

static void admit(ps_watch *w)
{
    int fd = accept4(w->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), on = 1;
    if (fd < 0 && ps_net_no_files(errno)) {
        if (w->n_strangers > 0) return drop_stranger(w);
        watch_decide(w, PS_EIO, 0, "rank 0 (%s) has as many files open as it may (ulimit -n), and needs one for "
                     "the heartbeat of each rank", w->host);
        forget(w, &w->listener);
    }
    if (fd < 0) return;
    if (w->n_strangers >= MAX_STRANGERS) drop_stranger(w);
    watch_peer *p = peer_new(w, fd, -1);
    if (!p) {
        close(fd);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    p->next = w->strangers;
    w->strangers = p;
    w->n_strangers++;
}

/* Frees strangers whose connections have ended. Also closes and frees strangers that have not sent their rank within
 * STRANGER_S seconds. */
static void sweep_strangers(ps_watch *w, double now)
{
    for (watch_peer **at = &w->strangers; *at;) {
        watch_peer *p = *at;
        if (p->fd >= 0 && now < p->heard_at + STRANGER_S) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        w->n_strangers--;
        forget(w, &p->fd);
        ps_free(p);
    }
}

static void lost(ps_watch *w, watch_peer *p)
{
    forget(w, &p->fd);
    if (p->rank >= 0 && !p->left && !w->leaving) watch_died(w, p);
}

/* -- the thread ---------------------------------------------------------------------------------------------------- */

/* Shortens the measured silence of all peers by `seconds`. This thread did not run during that time, because the
 * machine slept or the process was stopped. */
static void forgive(ps_watch *w, double seconds)
{
    double now = ps_now();
    for (int r = 0; r < w->size; r++) {
        watch_peer *p = w->peers[r];
        if (p) p->heard_at = p->heard_at + seconds < now ? p->heard_at + seconds : now;
    }
}

static void beat(ps_watch *w, double now)
{
    if (w->rank == 0) w->n_beats++, watch_circle(w);
    for (int r = 0; r < w->size; r++) {
        watch_peer *p = w->peers[r];
        beat_to(w, p);
        if (p && p->fd >= 0 && now - p->heard_at >= w->silence_s) watch_silent(w, p, now);
    }
    w->beat_at = now + w->beat_s;
}

/* Sends the place that a caller wants to send at once. If the last PLACE was sent a moment ago, sends nothing and
 * returns the time at which the place may be sent. Returns 0 if there is nothing left to send. */
static double tell(ps_watch *w, double now)
{
    double due = w->told_at + TELL_S * w->size;
    watch_message m = { .kind = WATCH_PLACE, .places = 1 };
    pthread_mutex_lock(&w->lock);
    int place = w->moved;
    /* a place that is not known belongs to a closed group */
    bool known = place >= 0 && w->places.known[place];
    if (known) m.at = w->places.at[place];
    if (now >= due) w->moved = -1;
    pthread_mutex_unlock(&w->lock);
    if (!known) return 0;
    if (now < due) return due;
    for (int r = 0; r < w->size; r++) if (!is_behind(w->peers[r])) post(w, w->peers[r], m, NULL);
    w->told_at = now;
    return 0;
}

/* Handles the requests of callers in this process. Returns true if the watch must end. */
static bool mailbox(ps_watch *w)
{
    char words[PS_WATCH_TEXT];
    pthread_mutex_lock(&w->lock);
    watch_complaint c = w->asks;
    int farewell = w->farewell, done = w->farewell_done;
    w->asks.on = false;
    memcpy(words, w->last_words, sizeof words);
    pthread_mutex_unlock(&w->lock);
    if (c.on) complained(w, &c);
    if (farewell == WATCH_FAILED && done == WATCH_STAYS) {
        if (w->rank == 0) watch_failed(w, 0, w->host, words);
        else post(w, w->peers[0], (watch_message){ .kind = WATCH_FAIL }, words);
        pthread_mutex_lock(&w->lock);
        w->farewell_done = WATCH_FAILED;
        pthread_cond_broadcast(&w->news);
        pthread_mutex_unlock(&w->lock);
    }
    return farewell >= WATCH_LEAVES;
}

static void events(ps_watch *w, int wait_ms)
{
    struct epoll_event list[MAX_EVENTS];
    int n = epoll_wait(w->epoll, list, MAX_EVENTS, wait_ms);
    bool stranger = false;
    for (int i = 0; i < n; i++) {
        watch_peer *p = list[i].data.ptr;
        char bytes[64];
        if (!p) {
            while (read(w->wake[0], bytes, sizeof bytes) > 0) { }
        } else if ((void *)p == w) {
            if (w->listener >= 0) admit(w);
            stranger = true;               /* admit may have closed a stranger */
        } else {
            stranger = stranger || p->rank < 0;
            if (p->fd >= 0 && (list[i].events & EPOLLOUT)) flush(w, p);
            if (p->fd >= 0 && (list[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) && !receive(w, p)) lost(w, p);
        }
    }
    if (stranger) sweep_strangers(w, ps_now());
}

/* Sends BYE, and waits until the peers have closed their connections, but at most LINGER_S seconds. If this rank closed
 * the connections at once, messages that it sent before could be lost. */
static void leave(ps_watch *w)
{
    bool over = atomic_load(&w->over);
    w->leaving = true;
    for (int r = 0; r < w->size; r++) if (w->peers[r]) post_places(w, w->peers[r]);
    post_all(w, (watch_message){ .kind = WATCH_BYE, .code = over ? w->code : 0, .peer = w->blamed },
             over ? w->verdict : NULL);
    for (double until = ps_now() + ps_net_linger_s(LINGER_S);;) {
        int open = 0;
        double left = until - ps_now();
        for (int r = 0; r < w->size; r++) {
            watch_peer *p = w->peers[r];
            if (!p || p->fd < 0) continue;
            open++;
            if (!p->out_nbytes) shutdown(p->fd, SHUT_WR);
        }
        if (!open || left <= 0) return;
        events(w, (int)(left * 1e3) + 1);
    }
}

static void *run(void *arg)
{
    ps_watch *w = arg;
    while (!mailbox(w)) {
        double now = ps_now();
        if (now >= w->beat_at) {
            beat(w, now);
            sweep_strangers(w, now);
        }
        if (w->pending.on) judge(w);
        double most = w->pending.on && !atomic_load(&w->over) ? 0.1 : w->beat_s, until = w->beat_at;
        if (until > now + most) until = now + most;
        double due = tell(w, now);
        if (due > 0 && due < until) until = due;
        events(w, until <= now ? 0 : (int)((until - now) * 1e3) + 1);
        double late = ps_now() - until;
        if (late > w->beat_s) forgive(w, late);
    }
    leave(w);
    pthread_mutex_lock(&w->lock);
    w->farewell_done = WATCH_GONE;
    w->unanswered = true;
    pthread_cond_broadcast(&w->news);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* -- making a watch ------------------------------------------------------------------------------------------------ */

/* Makes rank 0 listen. The key of the watch is derived from the key of the run and from random bits. Only ranks that
 * the store has accepted can read the random bits. */
static int serve(ps_watch *w, ps_store *store, const ps_watch_options *o)
{
    char text[128], token[2 * PS_PROOF_BYTES + 1];
    int port;
    PS_TRY(ps_net_listen(o->host, 0, &w->listener, &port));
    struct epoll_event e = { .events = EPOLLIN, .data.ptr = w };
    if (fcntl(w->listener, F_SETFL, O_NONBLOCK) < 0 || epoll_ctl(w->epoll, EPOLL_CTL_ADD, w->listener, &e) < 0)
        return ps_fail(PS_EIO, "rank 0 cannot watch over the others: %s", strerror(errno));
    ps_run_token(token);
    int n = snprintf(text, sizeof text, "%d %s", port, token);
    ps_run_derive(o->run, text, &w->run);
    return ps_store_set(store, ADDRESS_KEY, text, n);
}

/* Sends HELLO on a proved connection, and receives the WELCOME of rank 0. */
static int introduce(ps_watch *w, watch_peer *p, double until)
{
    watch_message m = { .magic = MAGIC, .kind = WATCH_HELLO, .rank = w->rank, .seconds = w->silence_s,
                        .nbytes = (uint32_t)strlen(w->host) };
    char host[PS_WATCH_TEXT] = "";
    int done = ps_net_transfer(p->fd, &m, sizeof m, true, until);
    if (done == 1) done = ps_net_transfer(p->fd, w->host, m.nbytes, true, until);
    if (done == 1) done = ps_net_transfer(p->fd, &m, sizeof m, false, until);
    if (done == 1 && (m.magic != MAGIC || m.kind != WATCH_WELCOME || m.nbytes >= sizeof host)) done = -1;
    if (done == 1) done = ps_net_transfer(p->fd, host, m.nbytes, false, until);
    if (done != 1)
        return ps_fail(done ? PS_EIO : PS_ETIME, "joining the other ranks: rank %d reached the watch of "
                       "rank 0, which %s; see the error of rank 0", w->rank, done ? "hung up" : "does not answer");
    snprintf(p->host, sizeof p->host, "%.*s", WATCH_HOST - 1, host);
    p->heard_at = ps_now();
    if (m.seconds != w->silence_s)
        return ps_fail(PS_EINVAL, "heartbeat is %g s on rank %d and %g s on rank 0; give all ranks the same",
                       w->silence_s, w->rank, m.seconds);
    return 0;
}

/* Connects to the watch of rank 0, and performs the proof. If rank 0 closes the connection because it has too many
 * strangers, tries again. */
static int reach(const ps_watch *w, const char *host, int port, double timeout_s, int *out)
{
    double until = ps_now() + timeout_s;
    for (;;) {
        int fd = ps_net_reach(host, port, until), rc = 0;
        if (fd > 0 && (rc = ps_proof_ask(fd, &w->run, until, "connecting to the watch of rank 0")) == 0) {
            *out = fd;
            return 0;
        }
        if (fd < 0) return fd;
        if (fd > 0) close(fd);
        bool late = ps_now() + AGAIN_S >= until;
        if (fd > 0 && (late || rc != PS_EIO)) return rc;
        if (late)
            return ps_fail(PS_ETIME, "rank %d, joining the other ranks: rank 0 does not answer at %s port %d, where it "
                           "watches the ranks, in %g s; has it ended, or is that port, which the system chose, closed "
                           "between the machines?", w->rank, host, port, timeout_s);
        poll(NULL, 0, (int)(AGAIN_S * 1e3));
    }
}

static int join(ps_watch *w, ps_store *store, const ps_watch_options *o)
{
    char text[128] = "";
    int64_t nbytes;
    int fd = -1;
    double until = ps_now() + o->timeout_s;
    PS_TRY(ps_store_get(store, ADDRESS_KEY, o->timeout_s, text, sizeof text - 1, &nbytes));
    text[nbytes] = 0;
    ps_run_derive(o->run, text, &w->run);
    PS_TRY(reach(w, ps_store_server_address(store), (int)strtol(text, NULL, 10), o->timeout_s, &fd));
    w->peers[0] = peer_new(w, fd, 0);
    if (!w->peers[0]) {
        close(fd);
        return ps_fail_nomem(sizeof(watch_peer));
    }
    return introduce(w, w->peers[0], until);
}

static int start_thread(ps_watch *w)
{
    int why = ps_thread_start(&w->thread, run, w);
    return why ? ps_fail(PS_EIO, "cannot start a thread to watch over the ranks: %s", strerror(why)) : 0;
}

static void watch_free(ps_watch *w)
{
    while (w->strangers) {
        watch_peer *p = w->strangers;
        w->strangers = p->next;
        forget(w, &p->fd);
        ps_free(p);
    }
    for (int r = 0; w->peers && r < w->size; r++) {
        if (w->peers[r]) forget(w, &w->peers[r]->fd);
        ps_free(w->peers[r]);
    }
    ps_free(w->peers);
    ps_free(w->rests);
    const int fds[] = { w->listener, w->epoll, w->wake[0], w->wake[1] };
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0) close(fds[i]);
    pthread_cond_destroy(&w->news);
    pthread_mutex_destroy(&w->lock);
    ps_free(w);
}

static int open_thread_files(ps_watch *w)
{
    struct epoll_event e = { .events = EPOLLIN, .data.ptr = NULL };
    if (pipe2(w->wake, O_CLOEXEC | O_NONBLOCK) < 0 || (w->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0 ||
        epoll_ctl(w->epoll, EPOLL_CTL_ADD, w->wake[0], &e) < 0)
        return ps_fail(PS_EIO, "cannot open files to watch over the ranks: %s", strerror(errno));
    return 0;
}

int ps_watch_start(ps_store *store, const ps_watch_options *o, ps_watch **out)
{
    ps_watch *w = ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->rank = o->rank;
    w->size = o->size;
    w->silence_s = o->silence_s;
    w->beat_s = o->silence_s / 5 < BEAT_S ? o->silence_s / 5 : BEAT_S;
    w->on_verdict = o->on_verdict;
    w->arg = o->arg;
    w->pid = getpid();
    w->launcher = launcher_pipe();
    w->blamed = w->moved = -1;
    w->places.known[0] = true;
    w->places.at[0].peer = -1;
    w->epoll = w->listener = w->wake[0] = w->wake[1] = -1;
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&w->news, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (gethostname(w->host, sizeof w->host - 1) < 0 || !w->host[0]) snprintf(w->host, sizeof w->host, "host unknown");
    w->peers = ps_alloc0(sizeof *w->peers * (size_t)o->size);
    w->rests = ps_alloc0(sizeof *w->rests * (size_t)o->size);
    bool room = w->peers && w->rests;
    int rc = room ? open_thread_files(w) : ps_fail_nomem((sizeof *w->peers + sizeof *w->rests) * (size_t)o->size);
    if (rc == 0) rc = o->rank == 0 ? serve(w, store, o) : join(w, store, o);
    if (rc == 0) rc = start_thread(w);
    if (rc < 0) {
        watch_free(w);
        return rc;
    }
    pthread_mutex_lock(&all_lock);
    w->next = all;
    all = w;
    pthread_mutex_unlock(&all_lock);
    *out = w;
    return 0;
}

/* -- functions for callers ----------------------------------------------------------------------------------------- */

/* Returns true if the group has ended because another rank failed. */
static bool blames_other(const ps_watch *w) { return ps_watch_over(w) && w->blamed >= 0 && w->blamed != w->rank; }

void ps_watch_close(ps_watch *w)
{
    if (!w) return;
    pthread_mutex_lock(&all_lock);
    if (blames_other(w)) memcpy(closed_verdict, w->verdict, sizeof closed_verdict);
    for (ps_watch **at = &all; *at; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    pthread_mutex_unlock(&all_lock);
    if (getpid() == w->pid) {              /* a forked process does not have the thread */
        pthread_mutex_lock(&w->lock);
        w->farewell = WATCH_LEAVES;
        pthread_mutex_unlock(&w->lock);
        wake(w);
        pthread_join(w->thread, NULL);
    }
    watch_free(w);
}

int ps_watch_join(ps_watch *w, uint64_t key, const char *axis)
{
    if (!w) return 0;
    pthread_mutex_lock(&w->lock);
    int place = 0;
    while (place < PS_WATCH_PLACES && w->places.known[place]) place++;
    if (place < PS_WATCH_PLACES) {
        watch_place *at = &w->places.at[place];
        *at = (watch_place){ .key = key, .peer = -1, .turn = ++w->turn, .moved = w->turn };
        snprintf(at->axis, sizeof at->axis, "%s", axis);
        w->places.known[place] = true;
    }
    pthread_mutex_unlock(&w->lock);
    if (place < PS_WATCH_PLACES) return place;
    return ps_fail(PS_EINVAL, "group %s: there are already %d groups of these ranks; close one", axis, PS_WATCH_PLACES);
}

void ps_watch_part(ps_watch *w, int place)
{
    if (!w || place <= 0) return;
    pthread_mutex_lock(&w->lock);
    w->places.known[place] = false;
    pthread_mutex_unlock(&w->lock);
}

void ps_watch_enter(ps_watch *w, int place, const char *op, uint64_t call, int peer, bool waits)
{
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    watch_place *at = &w->places.at[place];
    snprintf(at->op, sizeof at->op, "%s", op);
    at->call = call;
    at->peer = peer;
    at->inside = 1;
    at->waits = waits;
    at->turn = at->moved = ++w->turn;
    if (peer < 0 && call != PS_WATCH_NO_CALL) at->calls = call + 1;
    pthread_mutex_unlock(&w->lock);
}

void ps_watch_leave(ps_watch *w, int place)
{
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    watch_place *at = &w->places.at[place];
    if (at->inside && at->peer < 0) {
        memcpy(at->last_op, at->op, sizeof at->op);
        at->last_call = at->call;
    }
    at->inside = at->waits = 0;
    at->turn = at->moved = ++w->turn;
    pthread_mutex_unlock(&w->lock);
}

static void count_message(ps_watch *w, int place, int n)
{
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    watch_place *at = &w->places.at[place];
    at->under_way += n;
    if (n < 0) at->waits = 0;
    at->moved = ++w->turn;
    pthread_mutex_unlock(&w->lock);
}

void ps_watch_sent(ps_watch *w, int place) { count_message(w, place, 1); }
void ps_watch_came(ps_watch *w, int place) { count_message(w, place, -1); }

void ps_watch_waits(ps_watch *w, int place, bool waits)
{
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    watch_place *at = &w->places.at[place];
    if (at->waits != waits) at->waits = waits, at->moved = ++w->turn;
    pthread_mutex_unlock(&w->lock);
}

void ps_watch_tell(ps_watch *w, int place)
{
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    bool awake = w->moved >= 0;
    w->moved = place;
    pthread_mutex_unlock(&w->lock);
    if (!awake) wake(w);
}

bool ps_watch_first_to_tell(ps_watch *w) { return !w || !atomic_exchange(&w->told, 1); }

bool ps_watch_over(const ps_watch *w) { return w && atomic_load(&w->over); }

int ps_watch_verdict(ps_watch *w)
{
    if (!ps_watch_over(w)) return 0;
    ps_fail_rank(w->code, w->blamed, "%s", w->verdict);    /* needs no lock, because a verdict does not change */
    return ps_error_set_final();
}

int ps_watch_failed_before(ps_watch *w)
{
    bool over = ps_watch_over(w);
    return ps_fail_rank(PS_ESTATE, over ? w->blamed : -1, "this group failed before and can be used no more; close "
                        "it%s%s%s", over ? " (" : "", over ? w->verdict : "", over ? ")" : "");
}

/* Waits until stop(w) returns true, but at most `seconds` seconds. The caller must hold the lock, which guards the
 * fields that stop() reads. */
static void wait_for(ps_watch *w, double seconds, bool (*stop)(const ps_watch *))
{
    double until = ps_now() + seconds;
    for (double left = seconds; left > 0 && !stop(w); left = until - ps_now()) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        double end = (double)t.tv_sec + (double)t.tv_nsec * 1e-9 + left;
        t.tv_sec = (time_t)end;
        t.tv_nsec = (long)((end - (double)t.tv_sec) * 1e9);
        pthread_cond_timedwait(&w->news, &w->lock, &t);
    }
}

static bool answered(const ps_watch *w) { return atomic_load(&w->over) || w->unanswered; }
static bool farewell_said(const ps_watch *w)
{
    return w->farewell_done >= w->farewell || (w->farewell == WATCH_FAILED && atomic_load(&w->over));
}

/* Reports a complaint, and waits for the verdict. If `op` is NULL, the complaint is about the call that this rank is
 * in. Otherwise it is about the collective `op` with the number `call`. */
static int complain(ps_watch *w, int place, const char *op, uint64_t call, int what, int peer, double seconds,
                    const char *text)
{
    if (!w) return 0;
    if (ps_watch_over(w) && what != PS_WATCH_GIVES_UP) return ps_watch_verdict(w);
    pthread_mutex_lock(&w->lock);
    watch_place at = w->places.at[place];
    if (op) {
        snprintf(at.op, sizeof at.op, "%s", op);
        at.call = call;
        at.peer = -1;
        at.inside = 1;
    }
    watch_complaint c = { .on = at.inside || what == PS_WATCH_GIVES_UP, .what = what, .from = w->rank, .peer = peer,
                          .seconds = seconds, .at = at };
    snprintf(c.text, sizeof c.text, "%s", text);
    /* Otherwise the complaint of another thread, which came earlier, is judged. */
    if (replaces(&c, &w->asks)) w->asks = c;
    w->unanswered = w->farewell_done == WATCH_GONE;
    wake(w);
    /* While the group is made, this rank is in no call, and its complaint is not judged. But the watch may make a
     * verdict because a rank has died. */
    if (what != PS_WATCH_GIVES_UP) wait_for(w, c.on ? w->silence_s + SLACK_S : SLACK_S, answered);
    pthread_mutex_unlock(&w->lock);
    return what == PS_WATCH_GIVES_UP ? 0 : ps_watch_verdict(w);
}

int ps_watch_complain(ps_watch *w, int place, int what, int peer, double seconds, const char *text)
{
    return complain(w, place, NULL, 0, what, peer, seconds, text);
}

int ps_watch_complain_of(ps_watch *w, int place, const char *op, uint64_t call, int what, double seconds,
                         const char *text)
{
    return complain(w, place, op, call, what, -1, seconds, text);
}

size_t ps_watch_last_words(const char *error)
{
    size_t n = strcspn(error, "\r\n");
    return n < 400 ? n : 400;
}

bool ps_watch_repeats(const char *error, char *verdict)
{
    bool found = false;
    pthread_mutex_lock(&all_lock);
    for (ps_watch *w = all; w && !found; w = w->next) {
        found = getpid() == w->pid && blames_other(w) && strstr(error, w->verdict);
        if (found) memcpy(verdict, w->verdict, PS_WATCH_TEXT);
    }
    if (!found && *closed_verdict && strstr(error, closed_verdict)) {
        memcpy(verdict, closed_verdict, PS_WATCH_TEXT);
        found = true;
    }
    pthread_mutex_unlock(&all_lock);
    return found;
}

void ps_groups_end(const char *why)
{
    pthread_mutex_lock(&all_lock);
    for (ps_watch *w = all; w; w = w->next) {
        if (getpid() != w->pid) continue;
        pthread_mutex_lock(&w->lock);
        if (w->farewell == WATCH_STAYS) {
            if (why)
                snprintf(w->last_words, sizeof w->last_words, "%.*s", (int)ps_watch_last_words(why), why);
            w->farewell = why ? WATCH_FAILED : WATCH_GONE;
            wake(w);
            wait_for(w, 2 * ps_net_linger_s(LINGER_S), farewell_said);
        }
        pthread_mutex_unlock(&w->lock);
    }
    pthread_mutex_unlock(&all_lock);
}
