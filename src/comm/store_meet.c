/* SPDX-License-Identifier: BSD-3-Clause
 * Where ranks meet (ps_store_join of store.h): at a host and port, or by a board, a place that all reach and where
 * rank 0 writes the address of the store that it serves: a file, or a key in Redis. What an earlier run left on a board
 * names an address where nobody answers, so all read it until one does. */
#define _GNU_SOURCE
#include "base/error.h"
#include "comm/store.h"
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { LINE = 512 };

/* "host:port" or "[host]:port" into both; host is cut in place. */
static int split(char *text, char **host, int *port, const char *whole)
{
    char *colon = strrchr(text, ':'), *end = colon;
    long number = colon ? strtol(colon + 1, &end, 10) : 0;
    if (!colon || colon == text || end == colon + 1 || *end || number < 1 || number > 65535)
        return ps_fail(PS_EINVAL, "'%s' is not tcp://HOST:PORT with a port of 1 to 65535", whole);
    *colon = 0;
    *port = (int)number;
    *host = text;
    if (text[0] == '[' && colon[-1] == ']') {
        colon[-1] = 0;
        *host = text + 1;
    }
    return 0;
}

/* The first address of this machine that others may reach. */
static void own_address(char *text, size_t room)
{
    struct ifaddrs *list = NULL;
    snprintf(text, room, "127.0.0.1");
    if (getifaddrs(&list) < 0) return;
    for (struct ifaddrs *i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET) continue;
        if (!(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
        getnameinfo(i->ifa_addr, sizeof(struct sockaddr_in), text, (socklen_t)room, NULL, 0, NI_NUMERICHOST);
        break;
    }
    freeifaddrs(list);
}

/* -- boards -------------------------------------------------------------------------------------------------------- */

typedef struct board {
    const char *path;                      /* a file, or NULL */
    ps_redis *redis;                       /* or this */
} board;

static const char *board_name(const board *b) { return b->redis ? ps_redis_name(b->redis) : b->path; }

/* The address that others shall use: that by which Redis was reached, unless no other machine can mean it. */
static void board_address(const board *b, char *text, size_t room)
{
    const char *seen = b->redis ? ps_redis_local_address(b->redis) : "";
    if (!*seen || !strncmp(seen, "127.", 4) || !strcmp(seen, "::1")) own_address(text, room);
    else snprintf(text, room, "%s", seen);
}

static int board_put(const board *b, const char *text, double timeout_s)
{
    if (b->redis) return ps_redis_put(b->redis, text, timeout_s);
    return ps_file_write_atomic(b->path, text, (int64_t)strlen(text));
}

static int board_look(const board *b, char *text, size_t room)
{
    if (b->redis) return ps_redis_look(b->redis, text, room);
    FILE *f = fopen(b->path, "rb");
    size_t n = f ? fread(text, 1, room - 1, f) : 0;
    if (f) fclose(f);
    text[n] = 0;
    return 0;
}

static int serve_by(const board *b, int size, double timeout_s, ps_store_server **server, ps_store **out)
{
    char address[NI_MAXHOST], text[LINE];
    board_address(b, address, sizeof address);
    bool six = strchr(address, ':') != NULL;
    PS_TRY(ps_store_serve("", 0, size, server));
    int n = snprintf(text, sizeof text, six ? "[%s]:%d\n" : "%s:%d\n", address, ps_store_port(*server));
    if (n >= (int)sizeof text) return ps_fail(PS_ERANGE, "an address of %d bytes", n);
    PS_TRY(board_put(b, text, timeout_s));
    return ps_store_connect(address, ps_store_port(*server), 0, size, timeout_s, out);
}

static int find_by(const board *b, int rank, int size, double timeout_s, ps_store **out)
{
    char text[LINE];
    double until = ps_now() + timeout_s;
    for (;;) {
        PS_TRY(board_look(b, text, sizeof text));
        char *host, *line = strchr(text, '\n');
        int port;
        *out = NULL;
        if (line) *line = 0;                                /* a line without its end is not complete yet */
        if (line && split(text, &host, &port, board_name(b)) == 0)
            PS_TRY(ps_store_try(host, port, rank, size, until, timeout_s, out));
        if (*out) return 0;
        if (ps_now() + PS_STORE_AGAIN_S >= until)
            return ps_fail(PS_ETIME, "rank %d of %d found nobody by %s in %g s (%s); is rank 0 running, and does it "
                           "use the same %s?", rank, size, board_name(b), timeout_s,
                           line ? "it is there, but who wrote it does not answer" : "it is not there",
                           b->redis ? "server and prefix" : "file");
        ps_store_pause();
    }
}

static int join_by(const board *b, int rank, int size, double timeout_s, ps_store_server **server, ps_store **out)
{
    return rank == 0 ? serve_by(b, size, timeout_s, server, out) : find_by(b, rank, size, timeout_s, out);
}

int ps_store_join(const char *rendezvous, int rank, int size, double timeout_s, ps_store_server **server,
                  ps_store **out)
{
    char text[LINE], *host;
    int port, rc;
    *server = NULL;
    *out = NULL;
    if (!strncmp(rendezvous, "file://", 7) && rendezvous[7] == '/') {
        rc = join_by(&(board){ .path = rendezvous + 7 }, rank, size, timeout_s, server, out);
    } else if (!strncmp(rendezvous, "redis://", 8)) {
        board b = { 0 };
        rc = ps_redis_open(rendezvous, timeout_s, &b.redis);
        if (rc < 0) ps_error_prefix("rank %d of %d: ", rank, size);
        else rc = join_by(&b, rank, size, timeout_s, server, out);
        ps_redis_close(b.redis);
    } else if (!strncmp(rendezvous, "tcp://", 6) && strlen(rendezvous) < sizeof text) {
        strcpy(text, rendezvous + 6);
        PS_TRY(split(text, &host, &port, rendezvous));
        if (rank == 0) PS_TRY(ps_store_serve(host, port, size, server));
        rc = ps_store_connect(host, port, rank, size, timeout_s, out);
    } else
        return ps_fail(PS_EINVAL, "ranks cannot meet at '%s'; give tcp://HOST:PORT, file:///PATH or "
                       "redis://HOST:PORT/PREFIX", rendezvous);
    if (rc < 0) {
        ps_store_stop(*server, true);
        *server = NULL;
    }
    return rc;
}
