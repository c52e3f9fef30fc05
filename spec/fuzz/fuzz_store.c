/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of the messages at the port where ranks meet. The input's first byte selects the sender: a
 * stranger, a process that has proved that it belongs to the run, or a rank, to the server; a server, to a rank that
 * waits for a proof or an answer; or the file by which ranks meet. A stranger must change nothing. */
#include "rendezvous/store.c"
#include "rendezvous/store_client.c"
#include "rendezvous/store_meet.c"
#include <stdlib.h>
#include <sys/mman.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

enum { STRANGER, PROVED, RANK, FALSE_SERVER, ANSWER, NOTE, MODES };

static void must(int condition)
{
    if (!condition) abort();
}

static ps_run run;

/* Creates both ends of a connection. The bytes can be read at the second end, and nothing follows them. */
static void connection(int fd[2], const uint8_t *bytes, size_t nbytes)
{
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) == 0);
    for (size_t at = 0; at < nbytes;) {
        ssize_t n = send(fd[0], bytes + at, nbytes - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n <= 0) break;
        at += (size_t)n;
    }
    shutdown(fd[0], SHUT_WR);
}

static void to_server(int mode, const uint8_t *bytes, size_t nbytes)
{
    int fd[2];
    char heard[4096];
    connection(fd, bytes, nbytes);
    ps_store_server *s = ps_alloc0(sizeof *s);
    client *c = ps_alloc0(sizeof *c);
    must(s && c && (s->seen = ps_alloc0(3)) != NULL);
    s->fd = s->wake[0] = s->wake[1] = -1;
    s->size = 3;
    s->run = run;
    *c = (client){ .fd = fd[1], .rank = mode == RANK ? 1 : -1, .proved = mode != STRANGER, .deadline = ps_now() + 10 };
    s->clients = c;
    s->n_strangers = mode != RANK;
    if (mode == RANK) s->seen[1] = 1, s->n_seen = 1;
    for (int i = 0; i < 4096 && s->clients; i++) {
        if (c->out) flush(c);
        if (c->waits) c->gone = true;                       /* the end of the connection has arrived already */
        else receive(s, c);
        while (recv(fd[0], heard, sizeof heard, MSG_DONTWAIT) > 0) { }
        sweep(s);
    }
    must(!s->clients && s->n_strangers == 0 && s->total <= MAX_TOTAL);
    for (const char *at = s->fault; *at; at++) must((unsigned char)*at >= 0x20 && *at != 0x7f);
    if (mode == STRANGER) must(!s->fault[0] && s->n_seen == 0 && !s->entries);
    server_free(s);
    close(fd[0]);
}

static void to_rank(int mode, const uint8_t *bytes, size_t nbytes)
{
    int fd[2];
    char value[100];
    int64_t got = 0;
    connection(fd, bytes, nbytes);
    if (mode == FALSE_SERVER) must(ps_proof_ask(fd[1], &run, ps_now() + 5, "fuzz") < 0);
    else {
        ps_store s = { .fd = fd[1], .rank = 1 };
        int rc = ps_store_get(&s, "key", 5, value, sizeof value, &got);
        must(rc < 0 ? ps_error_message()[0] != 0 : got >= 0 && got <= (int64_t)sizeof value);
    }
    close(fd[0]);
    close(fd[1]);
}

static void to_reader(const uint8_t *bytes, size_t nbytes)
{
    char path[64];
    note n;
    int fd = memfd_create("note", MFD_CLOEXEC);
    must(fd >= 0 && write(fd, bytes, nbytes) == (ssize_t)nbytes);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const char *lacks = read_note(path, &n);
    must(lacks ? *lacks != 0 : n.port >= 1 && n.port <= 65535 && strlen(n.host) < LINE && strlen(n.secret) < LINE);
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    if (!size) return 0;
    if (!run.secret) must(ps_run_make("fuzz", "a secret", &run) == 0);
    int mode = input[0] % MODES;
    if (mode <= RANK) to_server(mode, input + 1, size - 1);
    else if (mode == NOTE) to_reader(input + 1, size - 1);
    else to_rank(mode, input + 1, size - 1);
    return 0;
}
