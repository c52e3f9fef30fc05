/* SPDX-License-Identifier: BSD-3-Clause
 * Where ranks meet (ps_store_join of store.h): at a host and port, or by a file that all reach and where rank 0 writes
 * the address of the store that it serves. What an earlier run left there names an address where nobody answers, so
 * all read it until one does. */
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

static void look(const char *path, char *text, size_t room)
{
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(text, 1, room - 1, f) : 0;
    if (f) fclose(f);
    text[n] = 0;
}

static int serve_by(const char *path, int size, double timeout_s, ps_store_server **server, ps_store **out)
{
    char address[NI_MAXHOST], text[LINE];
    own_address(address, sizeof address);
    PS_TRY(ps_store_serve("", 0, size, server));
    int n = snprintf(text, sizeof text, "%s:%d\n", address, ps_store_port(*server));
    if (n >= (int)sizeof text) return ps_fail(PS_ERANGE, "an address of %d bytes", n);
    PS_TRY(ps_file_write_atomic(path, text, n));
    return ps_store_connect(address, ps_store_port(*server), 0, size, timeout_s, out);
}

static int find_by(const char *path, int rank, int size, double timeout_s, ps_store **out)
{
    char text[LINE];
    double until = ps_now() + timeout_s;
    for (;;) {
        look(path, text, sizeof text);
        char *host, *line = strchr(text, '\n');
        int port;
        *out = NULL;
        if (line) *line = 0;                                /* a line without its end is not complete yet */
        if (line && split(text, &host, &port, path) == 0)
            PS_TRY(ps_store_try(host, port, rank, size, until, timeout_s, out));
        if (*out) return 0;
        if (ps_now() + PS_STORE_AGAIN_S >= until)
            return ps_fail(PS_ETIME, "rank %d of %d found nobody by %s in %g s (%s); is rank 0 running, and does it "
                           "use the same file?", rank, size, path, timeout_s,
                           line ? "it is there, but who wrote it does not answer" : "it is not there");
        ps_store_pause();
    }
}

int ps_store_join(const char *rendezvous, int rank, int size, double timeout_s, ps_store_server **server,
                  ps_store **out)
{
    char text[LINE], *host;
    int port, rc;
    *server = NULL;
    *out = NULL;
    if (!strncmp(rendezvous, "file://", 7) && rendezvous[7] == '/') {
        const char *path = rendezvous + 7;
        rc = rank == 0 ? serve_by(path, size, timeout_s, server, out) : find_by(path, rank, size, timeout_s, out);
    } else if (!strncmp(rendezvous, "tcp://", 6) && strlen(rendezvous) < sizeof text) {
        strcpy(text, rendezvous + 6);
        PS_TRY(split(text, &host, &port, rendezvous));
        if (rank == 0) PS_TRY(ps_store_serve(host, port, size, server));
        rc = ps_store_connect(host, port, rank, size, timeout_s, out);
    } else
        return ps_fail(PS_EINVAL, "ranks cannot meet at '%s'; give tcp://HOST:PORT or file:///PATH",
                       rendezvous);
    if (rc < 0) {
        ps_store_stop(*server, true);
        *server = NULL;
    }
    return rc;
}
