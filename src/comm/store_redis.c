/* SPDX-License-Identifier: BSD-3-Clause
 * Redis as a place where rank 0 writes where it is to be found (store_meet.c): one key, which expires. Nothing else
 * goes through Redis: once ranks have the address they are served by rank 0's store. The only file that knows hiredis.
 * The password comes from the URL or REDIS_PASSWORD and is in no message. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "base/error.h"
#include "comm/store.h"

#ifdef PS_HAVE_REDIS
#include <ctype.h>
#include <errno.h>
#include <hiredis/hiredis.h>
#include <math.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>

enum { PART = 256, USUAL_PORT = 6379 };

struct ps_redis {
    redisContext *c;
    double until;                          /* of what goes on now */
    int port;
    char user[PART], password[PART], host[PART], key[PART + 8], name[3 * PART], local[NI_MAXHOST];
};

/* -- the URL ------------------------------------------------------------------------------------------------------- */

static int bad_url(const char *why)
{
    return ps_fail(PS_EINVAL, "a rendezvous by Redis is redis://HOST:PORT/PREFIX or "
                   "redis://:PASSWORD@HOST:PORT/PREFIX, with %%XX for special characters; this one %s", why);
}

/* Bytes from .. end - 1 into `to`, %XX decoded. */
static bool decode(const char *from, const char *end, char *to, size_t room)
{
    size_t n = 0;
    for (; from < end && n + 1 < room; from++) {
        char hex[3] = { 0 };
        if (*from != '%') {
            to[n++] = *from;
            continue;
        }
        if (end - from < 3 || !isxdigit((unsigned char)from[1]) || !isxdigit((unsigned char)from[2])) return false;
        memcpy(hex, from + 1, 2);
        to[n] = (char)strtol(hex, NULL, 16);
        if (to[n++] == 0) return false;
        from += 2;
    }
    to[n] = 0;
    return from == end;
}

static int parse(ps_redis *r, const char *url)
{
    const char *at = url + strlen("redis://"), *slash = strchr(at, '/'), *sign, *host, *end, *colon;
    if (!slash || !slash[1]) return bad_url("has no prefix, a name of this run that no other uses");
    sign = memrchr(at, '@', (size_t)(slash - at));
    host = sign ? sign + 1 : at;
    if (sign) {
        colon = memchr(at, ':', (size_t)(sign - at));
        if (!colon) return bad_url("has a word before @ that is no :PASSWORD");
        if (!decode(at, colon, r->user, PART) || !decode(colon + 1, sign, r->password, PART))
            return bad_url("has a name or password that is too long or not well written");
    } else if (getenv("REDIS_PASSWORD"))
        snprintf(r->password, PART, "%s", getenv("REDIS_PASSWORD"));
    if (strlen(slash) > PART - 1) return bad_url("has too long a prefix");
    for (end = slash + 1; *end; end++)
        if (!isgraph((unsigned char)*end)) return bad_url("has a prefix that is not of letters, digits and signs");
    snprintf(r->key, sizeof r->key, "%s/rank0", slash + 1);
    end = slash;
    r->port = USUAL_PORT;
    for (colon = end; colon > host && colon[-1] != ':' && colon[-1] != ']'; ) colon--;
    if (colon > host && colon[-1] == ':') {
        char *stop;
        long port = strtol(colon, &stop, 10);
        if (stop != slash || stop == colon || port < 1 || port > 65535) return bad_url("has no port of 1 to 65535");
        r->port = (int)port;
        end = colon - 1;
    }
    if (end - host > 2 && host[0] == '[' && end[-1] == ']') {
        host++;
        end--;
    }
    if (end == host || !decode(host, end, r->host, PART)) return bad_url("has no host");
    snprintf(r->name, sizeof r->name, "the key %s of the Redis server at %s port %d", r->key, r->host, r->port);
    return 0;
}

/* -- the server ---------------------------------------------------------------------------------------------------- */

static struct timeval left(const ps_redis *r)
{
    double s = r->until - ps_now();
    if (s < 1) s = 1;                      /* a server that answers late is better than none */
    if (s > 1e6) s = 1e6;
    return (struct timeval){ .tv_sec = (time_t)s, .tv_usec = (suseconds_t)((s - floor(s)) * 1e6) };
}

static int lost(const ps_redis *r)
{
    if (r->c->err == REDIS_ERR_PROTOCOL)
        return ps_fail(PS_EFORMAT, "what answers at %s port %d is not a Redis server (%s)", r->host, r->port,
                       r->c->errstr);
    if (r->c->err == REDIS_ERR_IO && (errno == EAGAIN || errno == ETIMEDOUT))
        return ps_fail(PS_ETIME, "the Redis server at %s port %d does not answer; is it stopped?", r->host, r->port);
    return ps_fail(PS_EIO, "the Redis server at %s port %d hung up (%s); it ended, or was told to", r->host, r->port,
                   r->c->errstr);
}

/* One command of up to 6 words. NULL: *rc says why. */
static redisReply *command(ps_redis *r, int n, const char *const *words, int *rc)
{
    redisReply *reply = NULL;
    if (redisSetTimeout(r->c, left(r)) == REDIS_OK)
        reply = redisCommandArgv(r->c, n, (const char **)(uintptr_t)words, NULL);
    if (!reply) {
        *rc = lost(r);
        return NULL;
    }
    if (reply->type != REDIS_REPLY_ERROR) return reply;
    bool access = !strncmp(reply->str, "NOAUTH", 6) || !strncmp(reply->str, "WRONGPASS", 9) ||
                  !strcmp(words[0], "AUTH");
    *rc = ps_fail(access ? PS_EINVAL : PS_EIO, "the Redis server at %s port %d refuses %s: %s%s", r->host, r->port,
                  words[0], reply->str,
                  access ? "; its password goes into redis://:PASSWORD@HOST:PORT/PREFIX or REDIS_PASSWORD" : "");
    freeReplyObject(reply);
    return NULL;
}

static int connect_once(ps_redis *r)
{
    if (r->c) redisFree(r->c);
    r->c = redisConnectWithTimeout(r->host, r->port, left(r));
    if (!r->c) return ps_fail(PS_ENOMEM, "no memory for a connection to Redis");
    return r->c->err ? -1 : 0;
}

/* By which address this machine reached the server. */
static void note_local(ps_redis *r)
{
    struct sockaddr_storage local;
    socklen_t length = sizeof local;
    if (getsockname(r->c->fd, (struct sockaddr *)&local, &length) < 0 ||
        getnameinfo((struct sockaddr *)&local, length, r->local, sizeof r->local, NULL, 0, NI_NUMERICHOST) != 0)
        r->local[0] = 0;
}

static int sign_in(ps_redis *r)
{
    int rc = 0;
    redisReply *reply;
    if (!r->password[0]) return 0;
    if (r->user[0]) reply = command(r, 3, (const char *[]){ "AUTH", r->user, r->password }, &rc);
    else reply = command(r, 2, (const char *[]){ "AUTH", r->password }, &rc);
    if (reply) freeReplyObject(reply);
    return rc;
}

int ps_redis_open(const char *url, double timeout_s, ps_redis **out)
{
    ps_redis *r = ps_alloc0(sizeof *r);
    *out = NULL;
    if (!r) return ps_fail_nomem(sizeof *r);
    int rc = parse(r, url);
    r->until = ps_now() + timeout_s;
    while (rc == 0) {
        int tried = connect_once(r);
        if (tried == 0) break;
        if (!r->c) rc = tried;
        else if (ps_now() + PS_STORE_AGAIN_S >= r->until)
            rc = ps_fail(PS_ETIME, "no Redis server answered at %s port %d in %g s: %s", r->host, r->port, timeout_s,
                         r->c->errstr);
        else ps_store_pause();
    }
    if (rc == 0) {
        r->until = ps_now() + timeout_s;   /* what comes next has its own time */
        note_local(r);
        rc = sign_in(r);
    }
    if (rc < 0) ps_redis_close(r);
    else *out = r;
    return rc;
}

int ps_redis_put(ps_redis *r, const char *text, double expire_s)
{
    char seconds[32];
    int rc = 0;
    snprintf(seconds, sizeof seconds, "%.0f", ceil(expire_s) + 1);
    redisReply *reply = command(r, 5, (const char *[]){ "SET", r->key, text, "EX", seconds }, &rc);
    if (reply) freeReplyObject(reply);
    return rc;
}

int ps_redis_look(ps_redis *r, char *text, size_t room)
{
    int rc = 0;
    text[0] = 0;
    redisReply *reply = command(r, 2, (const char *[]){ "GET", r->key }, &rc);
    if (!reply) return rc;
    if (reply->type == REDIS_REPLY_STRING && (size_t)reply->len < room) snprintf(text, room, "%s", reply->str);
    freeReplyObject(reply);
    return 0;
}

const char *ps_redis_local_address(const ps_redis *r) { return r->local; }
const char *ps_redis_name(const ps_redis *r) { return r->name; }

void ps_redis_close(ps_redis *r)
{
    if (!r) return;
    if (r->c) redisFree(r->c);
    explicit_bzero(r->password, sizeof r->password);
    ps_free(r);
}

#else

int ps_redis_open(const char *url, double timeout_s, ps_redis **out)
{
    *out = NULL;
    return ps_fail(PS_EUNSUP, "this build has no hiredis (libhiredis-dev), so ranks cannot meet by Redis; give "
                   "tcp://HOST:PORT or file:///PATH");
}
int ps_redis_put(ps_redis *r, const char *text, double expire_s) { return PS_EUNSUP; }
int ps_redis_look(ps_redis *r, char *text, size_t room) { return PS_EUNSUP; }
const char *ps_redis_local_address(const ps_redis *r) { return ""; }
const char *ps_redis_name(const ps_redis *r) { return ""; }
void ps_redis_close(ps_redis *r) { }
#endif
