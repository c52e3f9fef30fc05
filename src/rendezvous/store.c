/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the server of the store (store.h). The server has one thread, one poll loop, and sockets that
 * never block. A client is a stranger until it has proved that it belongs to the run and has sent its rank. A stranger
 * is dropped after STRANGER_S seconds. If there are more than MAX_STRANGERS strangers, the oldest stranger is dropped.
 * All sizes are checked before the bytes are read. If a client sends invalid bytes, its connection is closed. Other
 * clients are not affected. */
#define _GNU_SOURCE
#include "rendezvous/store.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/text.h"
#include "base/thread.h"
#include "rendezvous/net.h"
#include "rendezvous/store_protocol.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_TOTAL = 64 << 20, MAX_STRANGERS = 128, MAX_ACCEPTS = 64 };
static const double STRANGER_S = 10;

typedef struct entry {
    struct entry *next;
    uint32_t key_nbytes, value_nbytes;
    char bytes[];                          /* the key, followed by the value */
} entry;

typedef struct client {
    struct client *next;
    int fd, rank;                          /* rank is -1 if the client is a stranger */
    bool proved;                           /* the client has proved that it belongs to this run */
    ps_proof proof;
    /* waits: the client waits for the key in `in`, or for all ranks */
    bool waits;
    /* missed: the client's last wait timed out before the key was set */
    bool missed;
    /* done: the client has sent BYE or FAULT
     * told: the client has received the fault
     * gone: the client must be closed */
    bool done, told, gone;
    /* no_memory: the client must be closed, because there is no memory for its request or for the answer */
    bool no_memory;
    /* deadline: time (ps_now) at which the client's wait ends. For a stranger, the time at which it is closed. */
    double deadline;
    ps_store_request request;
    uint32_t got;                          /* number of bytes of this request received so far */
    char *in;                              /* the key and then the value of the request */
    char *out;                             /* the answer that is being sent, or NULL */
    uint32_t out_nbytes, out_sent;
} client;

struct ps_store_server {
    int fd, port, size, wake[2];
    char host[NI_MAXHOST];
    ps_run run;
    pthread_t thread;
    client *clients;                       /* list of all clients, newest first */
    int n_strangers;
    /* turned_away: text for errors about the last client that failed the proof, or "" */
    char turned_away[300];
    entry *entries;
    int64_t total;
    struct pollfd *polls;
    int8_t *seen;                          /* [size] 1 if the rank has sent HELLO */
    atomic_int n_seen;
    /* n_untold: number of connected ranks that have not received the fault yet */
    atomic_int n_untold;
    atomic_bool faulty;                    /* true if a fault has been set */
    /* no_files: a client was not accepted because too many files were open */
    atomic_bool no_files;
    char fault[PS_STORE_TEXT];             /* the first fault, or "" */
    int fault_code;
};

static void hang_up(client *c)
{
    close(c->fd);
    ps_free(c->out);
    ps_free(c->in);
    ps_free(c);
}

static void flush(client *c)
{
    while (c->out && c->out_sent < c->out_nbytes) {
        int64_t n = ps_net_some(c->fd, c->out + c->out_sent, c->out_nbytes - c->out_sent, true);
        if (n < 0) c->gone = true;
        if (n <= 0) return;
        c->out_sent += (uint32_t)n;
    }
    ps_free(c->out);
    c->out = NULL;
    c->out_sent = 0;
}

static void answer(client *c, int status, const void *bytes, uint32_t nbytes)
{
    ps_store_answer head = { PS_STORE_MAGIC, status, nbytes };
    c->waits = false;
    c->got = 0;
    c->out = ps_alloc(sizeof head + nbytes);
    if (!c->out) {
        c->gone = c->no_memory = true;
        return;
    }
    memcpy(c->out, &head, sizeof head);
    if (nbytes) memcpy(c->out + sizeof head, bytes, nbytes);
    c->out_nbytes = (uint32_t)sizeof head + nbytes;
    flush(c);
}

static void answer_text(client *c, int status, const char *text) { answer(c, status, text, (uint32_t)strlen(text)); }

static void answer_fault(const ps_store_server *s, client *c)
{
    c->told = true;
    answer_text(c, s->fault_code, s->fault);
}

/* Sets the fault, unless there is one already. All waiting clients and all later requests are answered with this
 * fault. */
static void set_fault(ps_store_server *s, int code, const char *text)
{
    if (s->fault[0]) return;
    snprintf(s->fault, sizeof s->fault, "%s", text);
    ps_text_shown(s->fault, s->fault, sizeof s->fault);
    s->fault_code = code;
    atomic_store(&s->faulty, true);
    for (client *c = s->clients; c; c = c->next)
        if (c->waits) answer_fault(s, c);
}

static entry *find(const ps_store_server *s, const char *key, uint32_t nbytes)
{
    for (entry *e = s->entries; e; e = e->next)
        if (e->key_nbytes == nbytes && !memcmp(e->bytes, key, nbytes)) return e;
    return NULL;
}

enum { MISSING_NAMED = 16, MISSING_TEXT = MISSING_NAMED * 12 + 32 };      /* sizes for missing() */

/* Lists the ranks that have not connected. Names the first MISSING_NAMED of these ranks, and counts the others. text:
 * [MISSING_TEXT]. */
static void missing(const ps_store_server *s, char *text)
{
    int n = 0;
    size_t at = 0;
    text[0] = 0;
    for (int r = 0; r < s->size; r++) {
        if (s->seen[r] || n++ >= MISSING_NAMED) continue;
        at += (size_t)snprintf(text + at, MISSING_TEXT - at, "%s%d", n > 1 ? ", " : "", r);
    }
    if (n > MISSING_NAMED) snprintf(text + at, MISSING_TEXT - at, " and %d more", n - MISSING_NAMED);
}

static bool all_came(const ps_store_server *s) { return atomic_load(&s->n_seen) == s->size; }

static void tell_all_came(ps_store_server *s)
{
    for (client *c = s->clients; c; c = c->next)
        if (c->waits && c->request.what == PS_STORE_ALL) answer(c, 0, NULL, 0);
}

static void hello(ps_store_server *s, client *c)
{
    char text[PS_STORE_TEXT];
    int rank = c->request.a, size = c->request.b;
    if (size != s->size)
        snprintf(text, sizeof text, "a process (rank %d) says that there are %d ranks, rank 0 says %d: give all the "
                 "same world size", rank, size, s->size);
    else if (rank < 0 || rank >= size)
        snprintf(text, sizeof text, "a process says that it is rank %d of %d: ranks count from 0", rank, size);
    else if (s->seen[rank])
        snprintf(text, sizeof text, "two processes say that they are rank %d of %d: give each its own rank", rank,
                 size);
    else {
        s->seen[rank] = 1;
        atomic_fetch_add(&s->n_seen, 1);
        c->rank = rank;
        s->n_strangers--;
        if (s->fault[0]) answer_fault(s, c);
        else answer(c, 0, NULL, 0);
        if (all_came(s)) tell_all_came(s);
        return;
    }
    set_fault(s, PS_EINVAL, text);
    answer_text(c, PS_EINVAL, text);
}

static void give(ps_store_server *s, client *c)
{
    entry *e = find(s, c->in, c->request.key_nbytes);
    if (e) answer(c, 0, e->bytes + e->key_nbytes, e->value_nbytes);
    else c->waits = true;
}

static void take(ps_store_server *s, client *c)
{
    uint32_t key = c->request.key_nbytes, value = c->request.value_nbytes;
    if (find(s, c->in, key)) {
        answer_text(c, PS_EINVAL, "this key is there already; each is set once");
        return;
    }
    int64_t nbytes = (int64_t)sizeof(entry) + key + value;
    entry *e = s->total + nbytes > MAX_TOTAL ? NULL : ps_alloc((size_t)nbytes);
    if (!e) {
        answer_text(c, PS_ENOMEM, "rank 0 has no memory for the store");
        return;
    }
    *e = (entry){ s->entries, key, value };
    memcpy(e->bytes, c->in, key + value);
    s->entries = e;
    s->total += nbytes;
    answer(c, 0, NULL, 0);
    for (client *w = s->clients; w; w = w->next)
        if (w->waits && w->request.what == PS_STORE_GET && w->request.key_nbytes == key &&
            !memcmp(w->in, e->bytes, key))
            give(s, w);
}

static void serve(ps_store_server *s, client *c)
{
    const ps_store_request *q = &c->request;
    if (q->what == PS_STORE_HELLO && c->rank < 0) {
        hello(s, c);
        return;
    }
    if (c->rank < 0) {
        c->gone = true;
        return;
    }
    if (q->what == PS_STORE_BYE) {
        c->done = c->gone = true;
        return;
    }
    if (q->what == PS_STORE_FAULT) {
        c->in[q->key_nbytes + q->value_nbytes] = 0;
        set_fault(s, PS_EIO, c->in + q->key_nbytes);
        c->done = c->gone = true;
        return;
    }
    if (s->fault[0]) {
        answer_fault(s, c);
        return;
    }
    c->deadline = ps_now() + (q->a > 0 ? q->a : 0) * 1e-3;
    c->missed = false;
    if (q->what == PS_STORE_SET) take(s, c);
    else if (q->what == PS_STORE_GET) give(s, c);
    else if (all_came(s)) answer(c, 0, NULL, 0);
    else c->waits = true;
}

/* Allocates memory for the key and the value of the request, and for a final 0. */
static bool next_body(client *c)
{
    ps_free(c->in);
    c->in = ps_alloc(c->request.key_nbytes + c->request.value_nbytes + 1);
    c->gone = c->no_memory = !c->in;
    return c->in != NULL;
}

/* Continues the proof of a client. Returns true if the proof is complete. Sets `gone` if the client must be closed. */
static bool is_ours(ps_store_server *s, client *c)
{
    char why[PS_PROOF_TEXT], from[64];
    if (c->proved) return true;
    int done = ps_proof_answer(&c->proof, c->fd, &s->run, why);
    c->proved = done == PS_PROOF_DONE;
    c->gone = done == PS_PROOF_HANG_UP;
    if (why[0] && ps_net_address(c->fd, true, from, sizeof from) == 0)
        snprintf(s->turned_away, sizeof s->turned_away, "; one that came from %s was turned away: it %.190s", from,
                 why);
    return c->proved;
}

/* Reads the bytes that have arrived, and serves each complete request. */
static void receive(ps_store_server *s, client *c)
{
    char *head = (char *)&c->request;
    if (!is_ours(s, c)) return;
    while (!c->gone && !c->waits && !c->out) {
        uint32_t want = sizeof c->request;
        if (c->got >= want) want += c->request.key_nbytes + c->request.value_nbytes;
        char *to = c->got < sizeof c->request ? head + c->got : c->in + (c->got - sizeof c->request);
        if (want > c->got) {
            int64_t n = ps_net_some(c->fd, to, want - c->got, false);
            if (n < 0) c->gone = true;
            if (n <= 0) return;
            c->got += (uint32_t)n;
        }
        if (c->got < sizeof c->request) continue;
        const ps_store_request *q = &c->request;
        if (q->magic != PS_STORE_MAGIC || q->what > PS_STORE_ALL || q->key_nbytes > PS_STORE_MAX_KEY ||
            q->value_nbytes > PS_STORE_MAX_VALUE) {
            c->gone = true;
            return;
        }
        if (c->got == sizeof *q && !next_body(c)) return;
        if (c->got == sizeof *q + q->key_nbytes + q->value_nbytes) {
            serve(s, c);
            c->got = c->waits ? c->got : 0;
        }
    }
}

/* Closes the oldest stranger that has not proved anything. If there is none, closes the oldest stranger. Returns false
 * if there are no strangers. */
static bool drop_stranger(ps_store_server *s)
{
    client **oldest = NULL;
    for (client **at = &s->clients; *at; at = &(*at)->next)
        if ((*at)->rank < 0 && (!oldest || (*oldest)->proved || !(*at)->proved)) oldest = at;
    if (!oldest) return false;
    client *c = *oldest;
    *oldest = c->next;
    s->n_strangers--;
    hang_up(c);
    return true;
}

static void admit(ps_store_server *s)
{
    for (int i = 0; i < MAX_ACCEPTS; i++) {
        int fd = accept4(s->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && ps_net_no_files(errno)) {
            atomic_store(&s->no_files, true);
            if (drop_stranger(s)) continue;
            poll(NULL, 0, 10);             /* sleeps 10 ms, so that the loop does not spin */
        }
        if (fd < 0) return;
        if (s->n_strangers == MAX_STRANGERS) drop_stranger(s);
        client *c = ps_alloc0(sizeof *c);
        if (!c) {
            close(fd);
            return;
        }
        c->fd = fd;
        c->rank = -1;
        c->deadline = ps_now() + STRANGER_S;
        c->next = s->clients;
        s->clients = c;
        s->n_strangers++;
    }
}

const char *ps_store_lacks(const ps_store_server *s)
{
    return atomic_load(&s->no_files) ? "; rank 0 has as many files open as it may (ulimit -n)" : "";
}

/* Writes the error of the client `waiting`, whose wait for a key has timed out although all ranks have connected. Names
 * the lowest connected rank that does not wait, because that rank may have to set the key. text: [PS_STORE_TEXT]. */
static void not_set(const ps_store_server *s, const client *waiting, char *text)
{
    int idle = INT_MAX;
    for (const client *c = s->clients; c; c = c->next)
        if (c->rank >= 0 && c->rank < idle && !c->waits && !c->missed && !c->done) idle = c->rank;
    int n = snprintf(text, PS_STORE_TEXT, "all ranks connected, but no rank has set '%.*s'",
                     (int)waiting->request.key_nbytes, waiting->in);
    if (idle < INT_MAX)
        snprintf(text + n, (size_t)(PS_STORE_TEXT - n), "; rank %d waits for nothing and did not set it", idle);
}

static void sweep(ps_store_server *s)
{
    char text[PS_STORE_TEXT], absent[MISSING_TEXT];
    double now = ps_now();
    for (client **at = &s->clients; *at;) {
        client *c = *at;
        if (c->waits && now >= c->deadline) {
            missing(s, absent);
            if (absent[0]) snprintf(text, sizeof text, "rank %s of %d did not come; is it running, and does it reach "
                                    "this address?%s%s", absent, s->size, ps_store_lacks(s), s->turned_away);
            else not_set(s, c, text);
            answer_text(c, PS_ETIME, text);
            c->missed = true;
        }
        if (c->rank < 0 && now >= c->deadline) c->gone = true;
        if (!c->gone) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        s->n_strangers -= c->rank < 0;
        if (c->rank >= 0 && !c->done) {
            snprintf(text, sizeof text, c->no_memory ? "rank 0 has no memory for a request of rank %d to the store" :
                     "rank %d ended while the group was made; its own output says why", c->rank);
            set_fault(s, c->no_memory ? PS_ENOMEM : PS_EIO, text);
        }
        hang_up(c);
    }
    int untold = 0;
    for (const client *c = s->clients; c; c = c->next) untold += c->rank >= 0 && (!c->told || c->out);
    atomic_store(&s->n_untold, untold);
}

static int next_wait_ms(const ps_store_server *s)
{
    double now = ps_now(), until = now + 1;
    for (const client *c = s->clients; c; c = c->next)
        if ((c->waits || c->rank < 0) && c->deadline < until) until = c->deadline;
    return until <= now ? 1 : (int)((until - now) * 1e3) + 1;
}

static void *serve_all(void *arg)
{
    ps_store_server *s = arg;
    for (;;) {
        int n = 0;
        s->polls[n++] = (struct pollfd){ .fd = s->wake[0], .events = POLLIN };
        s->polls[n++] = (struct pollfd){ .fd = s->fd, .events = POLLIN };
        for (client *c = s->clients; c; c = c->next)
            s->polls[n++] = (struct pollfd){ .fd = c->fd, .events = c->out ? POLLOUT : c->waits ? POLLRDHUP : POLLIN };
        if (poll(s->polls, (nfds_t)n, next_wait_ms(s)) < 0 && errno != EINTR) return NULL;
        if (s->polls[0].revents) return NULL;
        int i = 2;
        for (client *c = s->clients; c && i < n; c = c->next, i++) {
            int news = s->polls[i].revents;
            if (!news) continue;
            if (c->out) flush(c);
            if (!c->waits) receive(s, c);
            /* A client that waits for an answer sends no further request. */
            else if (news & (POLLERR | POLLHUP | POLLRDHUP)) c->gone = true;
        }
        /* New clients are accepted last, because admit() changes the list of clients. */
        if (s->polls[1].revents) admit(s);
        sweep(s);
    }
}

static void server_free(ps_store_server *s)
{
    while (s->clients) {
        client *c = s->clients;
        s->clients = c->next;
        hang_up(c);
    }
    while (s->entries) {
        entry *e = s->entries;
        s->entries = e->next;
        ps_free(e);
    }
    for (int i = 0; i < 2; i++)
        if (s->wake[i] >= 0) close(s->wake[i]);
    if (s->fd >= 0) close(s->fd);
    ps_free(s->polls);
    ps_free(s->seen);
    ps_free(s);
}

int ps_store_serve(const char *host, int port, int size, const ps_run *run, ps_store_server **out)
{
    if (size < 1 || size > PS_STORE_MAX_RANKS)
        return ps_fail(PS_EINVAL, "a store cannot serve a world of %d ranks; it can serve 1 to %d", size,
                       PS_STORE_MAX_RANKS);
    if (port < 0 || port > 65535) return ps_fail(PS_EINVAL, "there is no port %d; ports are 1 to 65535", port);
    ps_store_server *s = ps_alloc0(sizeof *s);
    if (!s) return ps_fail_nomem(sizeof *s);
    size_t polls = sizeof *s->polls * (size_t)(size + MAX_STRANGERS + 2);
    s->fd = s->wake[0] = s->wake[1] = -1;
    s->size = size;
    s->run = *run;
    int rc = 0;
    if (!(s->polls = ps_alloc(polls)) || !(s->seen = ps_alloc0((size_t)size))) rc = ps_fail_nomem(polls);
    if (rc == 0) rc = ps_net_listen(host, port, &s->fd, &s->port);
    if (rc == 0) rc = ps_net_address(s->fd, false, s->host, sizeof s->host);
    if (rc == 0 && fcntl(s->fd, F_SETFL, O_NONBLOCK) < 0)
        rc = ps_fail(PS_EIO, "cannot open a socket: %s", strerror(errno));
    if (rc == 0 && pipe2(s->wake, O_CLOEXEC) < 0) rc = ps_fail(PS_EIO, "cannot make a pipe for the store: %s",
                                                               strerror(errno));
    if (rc == 0 && (errno = ps_thread_start(&s->thread, serve_all, s)) != 0)
        rc = ps_fail(PS_EIO, "cannot start a thread for the store: %s", strerror(errno));
    if (rc < 0) {
        server_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

int ps_store_port(const ps_store_server *s) { return s->port; }
const char *ps_store_host(const ps_store_server *s) { return s->host; }

static bool more_to_tell(const ps_store_server *s)
{
    return atomic_load(&s->n_untold) > 0 || (atomic_load(&s->faulty) && !all_came(s));
}

void ps_store_stop(ps_store_server *s, bool failed)
{
    if (!s) return;
    double until = ps_now() + (failed ? ps_net_linger_s(PS_STORE_LINGER_S) : 0);
    while (ps_now() < until && more_to_tell(s)) poll(NULL, 0, 10);
    while (write(s->wake[1], "", 1) < 0 && errno == EINTR) { }
    pthread_join(s->thread, NULL);
    server_free(s);
}
