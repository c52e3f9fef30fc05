/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements a rank's side of the store (store.h). Every wait is a poll with a time limit. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "rendezvous/net.h"
#include "rendezvous/store.h"
#include "rendezvous/store_protocol.h"
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* If a wait times out, the server's answer may be late by at most this number of seconds. */
static const double SLACK_S = 2;
static const double LONG_S = 10;           /* number of seconds after which a waiting rank prints a note */
/* The maximum number of seconds to wait for the server's proof before the client tries again. */
static const double ANSWER_S = 10;

struct ps_store {
    int fd, rank;
    double timeout_s;
    bool hello;                            /* the server has accepted this rank's HELLO */
    char local[NI_MAXHOST], server[NI_MAXHOST];
};

static int lost(const char *what)
{
    return ps_fail(PS_EIO, "%s: the store of rank 0 closed the connection; rank 0 ended, or another program answers "
                   "there", what);
}

static int transfer(ps_store *s, void *bytes, size_t nbytes, bool out, double until, const char *what)
{
    int done = ps_net_transfer(s->fd, bytes, nbytes, out, until);
    if (done < 0) return lost(what);
    if (done == 0)
        return ps_fail(PS_ETIME, "%s: the store of rank 0 does not answer; is rank 0 stopped?", what);
    return 0;
}

static int ask(ps_store *s, ps_store_request q, const char *key, const void *value, double until, const char *what)
{
    q.magic = PS_STORE_MAGIC;
    PS_TRY(transfer(s, &q, sizeof q, true, until, what));
    PS_TRY(transfer(s, (void *)(uintptr_t)key, q.key_nbytes, true, until, what));
    return transfer(s, (void *)(uintptr_t)value, q.value_nbytes, true, until, what);
}

/* Receives an answer of the server. The answer is a value of at most `room` bytes, or an error. */
static int hear(ps_store *s, void *value, int64_t room, int64_t *nbytes, double until, const char *what)
{
    ps_store_answer a;
    PS_TRY(transfer(s, &a, sizeof a, false, until, what));
    if (a.magic != PS_STORE_MAGIC || a.nbytes > PS_STORE_MAX_VALUE)
        return ps_fail(PS_EFORMAT, "%s: what answers is not the store of rank 0; is the port another program's?", what);
    if (a.status < 0) {
        char text[PS_STORE_TEXT] = "";
        if (a.nbytes >= sizeof text) return lost(what);
        PS_TRY(transfer(s, text, a.nbytes, false, until, what));
        return ps_fail(a.status, "%s: %s", what, ps_text_shown(text, text, sizeof text));
    }
    if (a.nbytes > room)
        return ps_fail(PS_EFORMAT, "%s: the answer has %u bytes, but there is room for only %lld", what, a.nbytes,
                       (long long)room);
    if (nbytes) *nbytes = a.nbytes;
    return transfer(s, value, a.nbytes, false, until, what);
}

void ps_store_pause(void)
{
    struct timespec t = { .tv_nsec = (long)(PS_STORE_AGAIN_S * 1e9) };
    nanosleep(&t, NULL);
}

/* Performs the proof on a new connection, and sends HELLO. On success, the new store owns fd. On failure, fd is
 * closed. */
static int introduce(int fd, const ps_store_rank *me, double until, ps_store **out)
{
    static const char *const what = "joining the other ranks";
    ps_store *s = ps_alloc0(sizeof *s);
    if (!s) {
        close(fd);
        return ps_fail_nomem(sizeof *s);
    }
    *s = (ps_store){ .fd = fd, .rank = me->rank, .timeout_s = me->timeout_s };
    int rc = ps_net_address(fd, false, s->local, sizeof s->local);
    if (rc == 0) rc = ps_net_address(fd, true, s->server, sizeof s->server);
    double most = ps_now() + ANSWER_S;
    if (rc == 0 && (rc = ps_proof_ask(fd, me->run, most < until ? most : until, what)) < 0) {
        ps_store_close(s, true);
        return rc == PS_EIO || rc == PS_ETIME ? PS_STORE_TURNED_AWAY : PS_STORE_FOREIGN;
    }
    ps_store_request q = { .what = PS_STORE_HELLO, .a = me->rank, .b = me->size };
    if (rc == 0) rc = ask(s, q, NULL, NULL, until, what);
    if (rc == 0) rc = hear(s, NULL, 0, NULL, until, what);
    s->hello = rc == 0;
    if (rc < 0) ps_store_close(s, true);
    else *out = s;
    return rc;
}

int ps_store_try(const char *host, int port, const ps_store_rank *me, double until, ps_store **out)
{
    int fd = ps_net_reach(host, port, until);
    *out = NULL;
    if (fd < 0) return fd;
    return fd > 0 ? introduce(fd, me, until + SLACK_S, out) : PS_STORE_NOBODY;
}

double ps_store_say_s(double timeout_s) { return timeout_s < 4 * LONG_S ? timeout_s / 4 : LONG_S; }

void ps_store_say(const ps_store_rank *me, double since, const char *where, bool *said)
{
    double waited = ps_now() - since;
    if (*said || waited < ps_store_say_s(me->timeout_s)) return;
    *said = true;
    ps_log(PS_LOG_WARN, "rank %d of %d waits for rank 0 %s, which has not answered for %.3g s; it gives up after %g s",
           me->rank, me->size, where, waited, me->timeout_s);
}

int ps_store_connect(const char *host, int port, const ps_store_rank *me, ps_store **out)
{
    double began = ps_now(), until = began + me->timeout_s, foreign_since = 0;
    char why[PS_STORE_TEXT] = "", where[NI_MAXHOST + 32];
    bool said = false;
    snprintf(where, sizeof where, "at %s port %d", host, port);
    for (;;) {
        int found = ps_store_try(host, port, me, until, out);
        if (found <= PS_STORE_REACHED) return found;
        double now = ps_now();
        if (found != PS_STORE_FOREIGN) foreign_since = 0;
        else if (foreign_since == 0) foreign_since = now;
        if (found != PS_STORE_NOBODY) snprintf(why, sizeof why, "%s", ps_error_message());
        bool late = now + PS_STORE_AGAIN_S >= until;
        if (found == PS_STORE_FOREIGN && (late || now - foreign_since >= PS_STORE_FOREIGN_S))
            return ps_fail(PS_ESTATE, "rank %d of %d at %s port %d: %s", me->rank, me->size, host, port, why);
        if (late && why[0])
            return ps_fail(PS_ETIME, "rank %d of %d was turned away at %s port %d for %g s: %s", me->rank, me->size,
                           host, port, me->timeout_s, why);
        if (late && !ps_net_knows(host))
            return ps_fail(PS_ETIME, "rank %d of %d: the host %s could not be found in %g s; is rank 0's address "
                           "(MASTER_ADDR) right?", me->rank, me->size, host, me->timeout_s);
        if (late)
            return ps_fail(PS_ETIME, "rank %d of %d got no answer at %s port %d in %g s; is rank 0 running there, and "
                           "are address and port (MASTER_ADDR, MASTER_PORT) right?", me->rank, me->size, host, port,
                           me->timeout_s);
        ps_store_say(me, began, where, &said);
        ps_store_pause();
    }
}

/* Sends a request that the server answers when other ranks have done their part, or after timeout_s. in_all: the number
 * of seconds that the text of a time-out error contains. */
static int ask_to_wait(ps_store *s, ps_store_request q, const char *key, double timeout_s, double in_all, void *value,
                       int64_t room, int64_t *nbytes)
{
    char what[64];
    snprintf(what, sizeof what, "waiting %g s for the other ranks", in_all);
    double until = ps_now() + timeout_s + SLACK_S, ms = timeout_s * 1e3;
    q.a = ms > 2e9 ? 2000000000 : (int)ms;
    PS_TRY(ask(s, q, key, NULL, until, what));
    return hear(s, value, room, nbytes, until, what);
}

int ps_store_meet(ps_store *s, double timeout_s)
{
    const ps_store_request all = { .what = PS_STORE_ALL };
    double first = s->rank == 0 ? ps_store_say_s(timeout_s) : timeout_s;
    int rc = ask_to_wait(s, all, NULL, first, first, NULL, 0, NULL);
    if (rc != PS_ETIME || first >= timeout_s) return rc;
    ps_log(PS_LOG_WARN, "rank 0 at %s: %s (it gives up after %g s)", s->server, ps_error_message(), timeout_s);
    return ask_to_wait(s, all, NULL, timeout_s - first, timeout_s, NULL, 0, NULL);
}

int ps_store_ask_fault(ps_store *s)
{
    int64_t nbytes;
    int rc = ps_store_get(s, "the fault, which is never set", PS_STORE_FAULT_S, NULL, 0, &nbytes);
    return rc == PS_ETIME ? 0 : rc;
}

int ps_store_set(ps_store *s, const char *key, const void *value, int64_t nbytes)
{
    size_t length = strlen(key);
    if (length > PS_STORE_MAX_KEY || nbytes < 0 || nbytes > PS_STORE_MAX_VALUE)
        return ps_fail(PS_ERANGE, "a key of %zu bytes with a value of %lld bytes is too long; the store supports keys "
                       "of up to %d bytes and values of up to %d", length, (long long)nbytes, PS_STORE_MAX_KEY,
                       PS_STORE_MAX_VALUE);
    double until = ps_now() + s->timeout_s;
    ps_store_request q = { .what = PS_STORE_SET, .key_nbytes = (uint32_t)length, .value_nbytes = (uint32_t)nbytes };
    PS_TRY(ask(s, q, key, value, until, "telling the other ranks"));
    return hear(s, NULL, 0, NULL, until, "telling the other ranks");
}

int ps_store_get(ps_store *s, const char *key, double timeout_s, void *value, int64_t room, int64_t *nbytes)
{
    size_t length = strlen(key);
    if (length > PS_STORE_MAX_KEY)
        return ps_fail(PS_ERANGE, "a key of %zu bytes is too long; the store supports keys of up to %d bytes", length,
                       PS_STORE_MAX_KEY);
    ps_store_request q = { .what = PS_STORE_GET, .key_nbytes = (uint32_t)length };
    return ask_to_wait(s, q, key, timeout_s, timeout_s, value, room, nbytes);
}

void ps_store_fault(ps_store *s, const char *text)
{
    char full[PS_STORE_TEXT];
    snprintf(full, sizeof full, "rank %d failed: %.400s", s->rank, text);
    ps_store_request q = { .what = PS_STORE_FAULT, .value_nbytes = (uint32_t)strlen(full) };
    if (s->hello) ask(s, q, NULL, full, ps_now() + SLACK_S, "telling the other ranks");
    s->hello = false;
}

void ps_store_close(ps_store *s, bool ok)
{
    if (!s) return;
    if (ok && s->hello) ask(s, (ps_store_request){ .what = PS_STORE_BYE }, NULL, NULL, ps_now() + SLACK_S, "leaving");
    close(s->fd);
    ps_free(s);
}

const char *ps_store_local_address(const ps_store *s) { return s->local; }
const char *ps_store_server_address(const ps_store *s) { return s->server; }
