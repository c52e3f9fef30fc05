/* SPDX-License-Identifier: BSD-3-Clause
 * This file implements the two ways in which ranks meet (ps_store_join of store.h). Ranks meet at a host and port, or
 * through a file that all ranks can read. Rank 0 writes the address of its store to this file. If the file is from an
 * earlier run, no process answers at its address. Therefore ranks read the file again until rank 0 answers. */
#define _GNU_SOURCE
#include "base/error.h"
#include "rendezvous/net.h"
#include "rendezvous/store.h"
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE = 512 };

/* Splits `text`, which is "host:port" or "[host]:port", into host and port. Writes zeros into `text`, and makes *host
 * point into it. `whole` is the address for errors. */
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

/* Writes the first address of this machine that other machines can probably reach to `text`. */
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

/* -- meeting through a file ---------------------------------------------------------------------------------------- */

/* The contents of the file that rank 0 writes. The first line is "HOST:PORT\n". If rank 0 has made a secret, the second
 * line is "secret TEXT\n". */
typedef struct note {
    char text[LINE], *host;
    const char *secret;                    /* "" if there is no secret */
    int port;
} note;

/* Writes the text to a file without a name, and then names the file `path`. Therefore a process that is killed leaves
 * no incomplete file. Returns false if the file system, for example NFS, does not support files without a name. */
static bool write_nameless(const char *path, const char *text, size_t nbytes)
{
    enum { TRIES = 100 };                  /* other processes may create `path` between two tries */
    char folder[PATH_MAX], own[64];
    const char *slash = strrchr(path, '/');
    int n = slash ? snprintf(folder, sizeof folder, "%.*s", (int)(slash - path + 1), path)
                  : snprintf(folder, sizeof folder, ".");
    if (n >= (int)sizeof folder) return false;
    int fd = open(folder, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    bool written = write(fd, text, nbytes) == (ssize_t)nbytes, named = false;
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    for (int i = 0; written && !named && i < TRIES; i++) {
        named = linkat(AT_FDCWD, own, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0;
        if (!named && (errno != EEXIST || (unlink(path) < 0 && errno != ENOENT))) break;
    }
    close(fd);
    return named;
}

/* Writes the file so that a reader finds either the complete file or no file. If the file cannot be written without a
 * name, writes another file and renames it. Only this user can read the file. */
static int write_note(const char *path, const char *text, size_t nbytes)
{
    if (write_nameless(path, text, nbytes)) return 0;
    char temp[PATH_MAX];
    if (snprintf(temp, sizeof temp, "%s.tmp-%ld", path, (long)getpid()) >= (int)sizeof temp)
        return ps_fail(PS_EINVAL, "the name of the file to meet by is too long: %s", path);
    unlink(temp);
    int fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && write(fd, text, nbytes) == (ssize_t)nbytes;
    int why = ok ? 0 : errno;
    if (fd >= 0 && close(fd) < 0 && ok) ok = false, why = errno;
    if (ok && rename(temp, path) < 0) ok = false, why = errno;
    if (ok) return 0;
    if (fd >= 0) unlink(temp);
    return ps_fail(PS_EIO, "rank 0 cannot write its address to %s: %s", path, strerror(why));
}

/* Returns NULL if the file is complete. Otherwise returns a text that says why it is not. Rejects a file that has a
 * secret and belongs to another user, because that user could pretend to be rank 0. Files of the user `nobody` are
 * accepted, because NFS may show files of root as files of `nobody`. */
static const char *read_note(const char *path, note *n)
{
    enum { NOBODY = 65534 };
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return errno == ENOENT ? "it is not there" : strerror(errno);
    ssize_t got = fstat(fd, &st) == 0 ? read(fd, n->text, sizeof n->text - 1) : -1;
    close(fd);
    n->text[got > 0 ? got : 0] = 0;
    char *end = strchr(n->text, '\n'), *secret = end ? end + 1 : NULL;
    if (!end) return "it has no address";
    *end = 0;
    n->secret = "";
    if (!strncmp(secret, "secret ", 7) && (end = strchr(secret, '\n'))) {
        *end = 0;
        n->secret = secret + 7;
        if (st.st_uid != geteuid() && st.st_uid != NOBODY) return "it is another user's";
    }
    return split(n->text, &n->host, &n->port, path) < 0 ? "it has no address" : NULL;
}

static int serve_by(const char *path, const ps_meeting *m, ps_run *run, ps_store_server **server, ps_store **out)
{
    char address[NI_MAXHOST], text[LINE], hex[2 * PS_PROOF_BYTES + 1];
    bool made = !run->secret;
    if (made) {
        ps_run_token(hex);
        PS_TRY(ps_run_make(m->run, hex, run));
    }
    if (m->machines == 1) snprintf(address, sizeof address, "127.0.0.1");
    else own_address(address, sizeof address);
    PS_TRY(ps_store_serve(address, 0, m->size, run, server));
    int n = snprintf(text, sizeof text, "%s:%d\n%s%s%s", address, ps_store_port(*server), made ? "secret " : "",
                     made ? hex : "", made ? "\n" : "");
    PS_TRY(write_note(path, text, (size_t)n));
    ps_store_rank me = { 0, m->size, run, m->timeout_s };
    return ps_store_connect(address, ps_store_port(*server), &me, out);
}

static int find_by(const char *path, const ps_meeting *m, ps_run *run, ps_store **out)
{
    double began = ps_now(), until = began + m->timeout_s;
    bool said = false;
    char where[PATH_MAX + 8];
    ps_run given = *run;
    note n;
    for (;;) {
        const char *lacks = read_note(path, &n);
        int found = PS_STORE_NOBODY;
        *out = NULL;
        if (!lacks) {
            ps_store_rank me = { m->rank, m->size, run, m->timeout_s };
            if (given.secret) *run = given;
            else PS_TRY(ps_run_make(m->run, n.secret, run));
            found = ps_store_try(n.host, n.port, &me, until, out);
        }
        if (found <= PS_STORE_REACHED) return found;
        if (ps_now() + PS_STORE_AGAIN_S >= until) {
            char why[PS_STORE_TEXT] = "it is there, but who wrote it does not answer";
            if (lacks || found != PS_STORE_NOBODY) snprintf(why, sizeof why, "%s", lacks ? lacks : ps_error_message());
            return ps_fail(PS_ETIME, "rank %d of %d found no rank 0 by %s in %g s (%s); is rank 0 running, and does it "
                           "use the same file?", m->rank, m->size, path, m->timeout_s, why);
        }
        snprintf(where, sizeof where, "by %s", path);
        ps_store_say(&(ps_store_rank){ m->rank, m->size, run, m->timeout_s }, began, where, &said);
        ps_store_pause();
    }
}

/* -- meeting at an address ----------------------------------------------------------------------------------------- */

/* Raises an error if rank 0 cannot serve at this address. If another run, or another rank 0 of this run, already serves
 * at this address, the error says so. */
static int taken(const char *host, int port, const ps_run *run, int rc)
{
    char why[PS_STORE_TEXT], name[PS_RUN_NAME + 32];
    double until = ps_now() + 1;
    snprintf(why, sizeof why, "%s", ps_error_message());
    int fd = ps_net_reach(host, port, until);
    if (fd <= 0) return ps_fail(rc, "%s", why);
    int found = ps_proof_ask(fd, run, until, "who is there");
    close(fd);
    if (found == 0) return ps_fail(rc, "%s; rank 0 of %s already serves there", why, ps_run_shown(run->name, name));
    if (found != PS_ESTATE) return ps_fail(rc, "%s", why);
    ps_error_prefix("%s; ", why);
    return rc;
}

static int meet_at(const char *host, int port, const ps_meeting *m, const ps_run *run, ps_store_server **server,
                   ps_store **out)
{
    ps_store_rank me = { m->rank, m->size, run, m->timeout_s };
    if (m->machines == 2 && ps_net_is_loopback(host))
        return ps_fail(PS_EINVAL, "ranks are on several machines, but %s is a loopback address on the machine of rank "
                       "%d, which other machines cannot reach (Debian's /etc/hosts maps a machine's own name to such "
                       "an address): set the address of rank 0's network interface (MASTER_ADDR, --master-addr), or, "
                       "if all ranks are on this machine, set PS_RENDEZVOUS=tcp://HOST:PORT", host, m->rank);
    if (m->rank == 0) {
        int rc = ps_store_serve(host, port, m->size, run, server);
        if (rc < 0) return taken(host, port, run, rc);
    }
    return ps_store_connect(host, port, &me, out);
}

int ps_store_join(const ps_meeting *m, ps_run *run, ps_store_server **server, ps_store **out)
{
    char text[LINE], *host;
    int port, rc;
    *server = NULL;
    *out = NULL;
    PS_TRY(ps_run_make(m->run, m->secret, run));
    if (!strncmp(m->rendezvous, "file://", 7) && m->rendezvous[7] == '/') {
        const char *path = m->rendezvous + 7;
        rc = m->rank == 0 ? serve_by(path, m, run, server, out) : find_by(path, m, run, out);
    } else if (!strncmp(m->rendezvous, "tcp://", 6) && strlen(m->rendezvous) < sizeof text) {
        strcpy(text, m->rendezvous + 6);
        PS_TRY(split(text, &host, &port, m->rendezvous));
        rc = meet_at(host, port, m, run, server, out);
    } else
        return ps_fail(PS_EINVAL, "ranks cannot meet at '%s'; set tcp://HOST:PORT or file:///PATH", m->rendezvous);
    if (rc < 0) {
        char why[2 * PS_STORE_TEXT];
        snprintf(why, sizeof why, "%s%s", ps_error_message(), *server ? ps_store_lacks(*server) : "");
        ps_store_stop(*server, true);
        *server = NULL;
        return ps_fail(rc, "%s", why);
    }
    return rc;
}
