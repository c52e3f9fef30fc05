/* SPDX-License-Identifier: BSD-3-Clause
 * The store by which ranks meet: values, waits, faults, bad peers, other runs, ports in use, failing memory. */
#define _GNU_SOURCE
#include "check.h"
#include "store_check.h"
#include "files_left.h"
#include "ranks_check.h"
#include "rendezvous/net.h"
#include "rendezvous/store.h"
#include "rendezvous/store_protocol.h"
#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* -- the store ----------------------------------------------------------------------------------------------------- */

static void test_values(void)
{
    ps_store_server *server;
    ps_store *a, *b;
    char text[16] = "";
    int64_t nbytes = 0;
    if (!OK(ps_store_serve(LOCAL, 0, 2, &nobody, &server))) return;
    OK(come(ps_store_port(server), 0, 2, FAR_S, &a));
    OK(come(ps_store_port(server), 1, 2, FAR_S, &b));
    CHECK(!strcmp(ps_store_local_address(a), LOCAL));
    OK(ps_store_set(a, "k", "value", 5));
    OK(ps_store_get(b, "k", FAR_S, text, sizeof text, &nbytes));
    CHECK(nbytes == 5 && !memcmp(text, "value", 5));
    OK(ps_store_set(b, "empty", NULL, 0));
    OK(ps_store_get(a, "empty", FAR_S, text, sizeof text, &nbytes));
    CHECK(nbytes == 0);
    FAILS(ps_store_set(b, "k", "x", 1), PS_EINVAL, "set once");
    FAILS(ps_store_get(a, "never", 0.1, text, sizeof text, &nbytes), PS_ETIME, "rank 1 waits for nothing and did not");
    FAILS(ps_store_get(b, "never", 0.1, text, sizeof text, &nbytes), PS_ETIME, "no rank has set 'never'");
    CHECK(!strstr(ps_error_message(), "waits for nothing"));      /* rank 0 waited before, as long as it could */
    FAILS(ps_store_get(b, "k", FAR_S, text, 3, &nbytes), PS_EFORMAT, "room for only 3");
    ps_store_close(b, true);
    double start = ps_now();
    FAILS(ps_store_get(a, "never", 0.1, text, sizeof text, &nbytes), PS_ETIME, "no rank has set 'never'");
    CHECK(ps_now() - start < PROMPT_S);
    char long_key[PS_STORE_MAX_KEY + 2];
    memset(long_key, 'k', sizeof long_key);
    long_key[sizeof long_key - 1] = 0;
    FAILS(ps_store_set(a, long_key, "x", 1), PS_ERANGE, "bytes");
    FAILS(ps_store_get(a, long_key, 1, text, 1, &nbytes), PS_ERANGE, "bytes");
    FAILS(ps_store_set(a, "k2", "x", PS_STORE_MAX_VALUE + 1), PS_ERANGE, "bytes");
    char *much = calloc(1, PS_STORE_MAX_VALUE);
    much[PS_STORE_MAX_VALUE - 1] = 7;
    OK(ps_store_set(a, "much", much, PS_STORE_MAX_VALUE));
    much[PS_STORE_MAX_VALUE - 1] = 0;
    OK(ps_store_get(a, "much", 5, much, PS_STORE_MAX_VALUE, &nbytes));
    CHECK(nbytes == PS_STORE_MAX_VALUE && much[PS_STORE_MAX_VALUE - 1] == 7);
    free(much);
    ps_store_close(a, true);
    ps_store_stop(server, false);
}

static void test_missing_and_ports(void)
{
    ps_store_server *server, *second;
    ps_store *a;
    char text[4];
    int64_t nbytes;
    if (!OK(ps_store_serve(LOCAL, 0, 4, &nobody, &server))) return;
    int port = ps_store_port(server);
    FAILS(ps_store_serve(LOCAL, port, 4, &nobody, &second), PS_EIO, "in use");
    OK(come(port, 0, 4, FAR_S, &a));
    FAILS(ps_store_get(a, "x", 0.05, text, sizeof text, &nbytes), PS_ETIME, "rank 1, 2, 3 of 4 did not come");
    ps_store_close(a, true);
    ps_store_stop(server, false);
    FAILS(come(port, 1, 4, 0.2, &a), PS_ETIME, "MASTER_ADDR");
    FAILS(ps_store_serve(LOCAL, 70000, 4, &nobody, &server), PS_EINVAL, "70000");
    FAILS(ps_store_serve(LOCAL, 0, 0, &nobody, &server), PS_EINVAL, "world of 0");
    FAILS(join("tcp://nowhere", 0, 2, 1, &server, &a), PS_EINVAL, "tcp://HOST:PORT");
    FAILS(join("tcp://h:0", 0, 2, 1, &server, &a), PS_EINVAL, "1 to 65535");
    FAILS(join("udp://h:1", 0, 2, 1, &server, &a), PS_EINVAL, "file:///PATH");
    FAILS(join("file:///no/such/file", 1, 2, 0.1, &server, &a), PS_ETIME, "it is not there");
}

struct waiter { ps_store *store; int rc; char why[300]; };
static void *wait_for_x(void *arg)
{
    struct waiter *w = arg;
    char text[4];
    int64_t nbytes;
    w->rc = ps_store_get(w->store, "x", FAR_S, text, sizeof text, &nbytes);
    snprintf(w->why, sizeof w->why, "%s", w->rc < 0 ? ps_error_message() : "");
    return NULL;
}

/* Rank 0 waits while `spoil` makes rank 1 fail. Rank 0 must get the error. */
static void faulty(void (*spoil)(int port, ps_store *b), int code, const char *word)
{
    ps_store_server *server;
    ps_store *b;
    struct waiter w = { 0 };
    pthread_t thread;
    if (!OK(ps_store_serve(LOCAL, 0, 2, &nobody, &server))) return;
    OK(come(ps_store_port(server), 0, 2, FAR_S, &w.store));
    OK(come(ps_store_port(server), 1, 2, FAR_S, &b));
    pthread_create(&thread, NULL, wait_for_x, &w);
    usleep(20000);
    double start = ps_now();
    spoil(ps_store_port(server), b);
    pthread_join(thread, NULL);
    if (w.rc != code || !strstr(w.why, word)) printf("    %d %s\n", w.rc, w.why);
    CHECK(w.rc == code && strstr(w.why, word) && ps_now() - start < PROMPT_S);
    ps_store_close(w.store, true);
    ps_store_stop(server, false);
}
static void set_x(int port, ps_store *b)
{
    OK(ps_store_set(b, "x", "1", 1));
    ps_store_close(b, true);
}
static void end_early(int port, ps_store *b) { ps_store_close(b, false); }
static void give_up(int port, ps_store *b)
{
    ps_store_fault(b, "no such network");
    ps_store_close(b, true);
}
static void another_size(int port, ps_store *b)
{
    ps_store *c;
    FAILS(come(port, 1, 3, FAR_S, &c), PS_EINVAL, "there are 3 ranks, rank 0 says 2");
    ps_store_close(b, true);
}
static void same_rank(int port, ps_store *b)
{
    ps_store *c;
    FAILS(come(port, 1, 2, FAR_S, &c), PS_EINVAL, "two processes say that they are rank 1");
    ps_store_close(b, true);
}
static void no_rank(int port, ps_store *b)
{
    ps_store *c;
    FAILS(come(port, 2, 2, FAR_S, &c), PS_EINVAL, "rank 2 of 2");
    ps_store_close(b, true);
}

static int raw_connect(int port)
{
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    struct timeval limit = { .tv_sec = 5 };
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return fd;
}

/* Returns a connection that has proved that it belongs to the run, but has not sent its rank. */
static int proved_connect(int port)
{
    int fd = raw_connect(port);
    OK(ps_proof_ask(fd, &nobody, ps_now() + 5, "test"));
    return fd;
}

/* If other programs send messages, the server closes their connections and continues. */
static void strangers(int port, ps_store *b)
{
    ps_store_request bad[] = {
        { .magic = PS_STORE_MAGIC, .what = PS_STORE_HELLO, .a = 1, .b = 2 },    /* sent as a plain message, before
                                                                                 * the proof */
        { .magic = PS_STORE_MAGIC, .what = PS_STORE_HELLO, .a = 5, .b = 9 },
        { .magic = 0x12345678 },
        { .magic = PS_STORE_MAGIC, .what = 99 },
        { .magic = PS_STORE_MAGIC, .what = PS_STORE_SET, .key_nbytes = 1u << 30 },
        { .magic = PS_STORE_MAGIC, .what = PS_STORE_SET, .key_nbytes = 1, .value_nbytes = 0xffffffffu },
        { .magic = PS_STORE_MAGIC, .what = PS_STORE_GET },
        { .magic = PS_STORE_MAGIC, .what = PS_STORE_FAULT },
        { .magic = PS_STORE_MAGIC, .what = PS_STORE_BYE },
    };
    char byte;
    for (size_t i = 0; i < 2 * sizeof bad / sizeof *bad; i++) {
        size_t k = i / 2;
        if (i & 1 && bad[k].what == PS_STORE_HELLO && bad[k].magic == PS_STORE_MAGIC) continue;
        int fd = i & 1 ? proved_connect(port) : raw_connect(port);
        CHECK(send(fd, &bad[k], sizeof bad[k], MSG_NOSIGNAL) == sizeof bad[k]);
        CHECK(recv(fd, &byte, 1, 0) <= 0);
        close(fd);
    }
    int half = raw_connect(port), silent = raw_connect(port), many[300];
    CHECK(send(half, &bad[1], 3, MSG_NOSIGNAL) == 3);
    for (int i = 0; i < 300; i++) many[i] = raw_connect(port);          /* the oldest connections are closed */
    int late = proved_connect(port);
    CHECK(recv(half, &byte, 1, 0) <= 0 && recv(silent, &byte, 1, 0) <= 0);
    set_x(port, b);
    for (int i = 0; i < 300; i++) close(many[i]);
    close(half);
    close(silent);
    close(late);
}

/* Random bytes, some of them after a valid header, cause no crash, and rank 0 is still served. */
static void noise(int port, ps_store *b)
{
    uint32_t state = 12345;
    for (int i = 0; i < 300; i++) {
        unsigned char bytes[600];
        for (size_t j = 0; j < sizeof bytes; j++)
            bytes[j] = (unsigned char)((state = state * 1664525u + 1013904223u) >> 24);
        ps_store_request head = { PS_STORE_MAGIC, 1 + (state >> 8) % 5, state >> 12 & 127, state >> 20 & 511, 5, 5 };
        uint32_t magic = PS_PROOF_MAGIC;
        int kind = i % 3, fd = kind == 2 ? proved_connect(port) : raw_connect(port);
        if (kind == 1) memcpy(bytes, &magic, sizeof magic);
        if (kind == 2) memcpy(bytes, &head, sizeof head);
        if (send(fd, bytes, state >> 16 & 511, MSG_NOSIGNAL) < 0) failed++;
        close(fd);
    }
    ps_store_close(b, false);
}

/* -- other runs and other secrets ---------------------------------------------------------------------------------- */

static ps_run run_of(const char *name, const char *secret)
{
    ps_run run;
    OK(ps_run_make(name, secret, &run));
    return run;
}

/* Checks the error that a rank of the run `mine` gets from the store of the run `theirs`. The store continues, and
 * reports which rank connected. */
static void apart(ps_run theirs, ps_run mine, const char *word, const char *came)
{
    ps_store_server *server;
    ps_store *a, *b;
    if (!OK(ps_store_serve(LOCAL, 0, 2, &theirs, &server))) return;
    int port = ps_store_port(server);
    OK(ps_store_connect(LOCAL, port, &(ps_store_rank){ 0, 2, &theirs, 5 }, &a));
    FAILS(ps_store_connect(LOCAL, port, &(ps_store_rank){ 1, 2, &mine, 0.2 }, &b), PS_ESTATE, word);
    CHECK(!strpbrk(ps_error_message(), "\x1b\x9b\n"));
    FAILS(ps_store_meet(a, 0.05), PS_ETIME, "rank 1 of 2 did not come");
    CHECK(strstr(ps_error_message(), came) && !strpbrk(ps_error_message(), "\x1b\x9b\n"));
    OK(ps_store_connect(LOCAL, port, &(ps_store_rank){ 1, 2, &theirs, 5 }, &b));
    OK(ps_store_meet(a, 5));
    ps_store_close(a, true);
    ps_store_close(b, true);
    ps_store_stop(server, false);
}

static void test_runs(void)
{
    char name[PS_RUN_NAME + 2];
    ps_run run;
    apart(run_of("A", NULL), run_of("B", NULL), "run 'A' answers there, but this rank belongs to run 'B'",
          "one that came from 127.0.0.1 was turned away: it is of run 'B'");
    apart(run_of("A", "x"), run_of("B", "x"), "run 'A' answers there", "of run 'B'");
    apart(run_of("A", NULL), run_of(NULL, NULL), "this rank belongs to a run without a name",
          "of a run without a name");
    apart(run_of("A\x1b[31m\n", NULL), run_of("\xc2\x9b!", NULL), "run 'A?[31m?' answers", "of run '?!'");
    apart(run_of("A", "secret"), run_of("A", "Secret"), "for run 'A' has another secret", "it has another secret");
    apart(run_of("A", "secret"), run_of("A", NULL), "a secret, which is lacking here", "it has no secret");
    apart(run_of("A", NULL), run_of("A", "secret"), "has no secret; give all ranks the same PS_SECRET",
          "it has a secret, which is lacking here");
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    FAILS(ps_run_make(name, NULL, &run), PS_EINVAL, "has 129 bytes; it may have 128");
    name[PS_RUN_NAME] = 0;
    apart(run_of(name, "x"), run_of("B", "x"), "nnn' answers there", "of run 'B'");
}

/* A server that does not know the secret gets no rank, whatever it sends. Neither does a server that repeats a
 * rank's own messages. */
static void *false_server(void *arg)
{
    const int *fd = arg;
    for (int i = 0; i < 2; i++) {
        int peer = accept(*fd, NULL, NULL);
        ps_proof_hello hello;
        ps_proof_word word;
        CHECK(ps_net_transfer(peer, &hello, sizeof hello, false, ps_now() + 5) == 1);
        CHECK(ps_net_transfer(peer, &hello, sizeof hello, true, ps_now() + 5) == 1);
        CHECK(ps_net_transfer(peer, &word, sizeof word, false, ps_now() + 5) == 1);
        if (i == 0) memset(word.hash, 0, sizeof word.hash);
        CHECK(ps_net_transfer(peer, &word, sizeof word, true, ps_now() + 5) == 1);
        close(peer);
    }
    return NULL;
}
static void test_false_server(void)
{
    int fd, port;
    ps_run run = run_of("A", "secret");
    pthread_t thread;
    if (!OK(ps_net_listen(LOCAL, 0, &fd, &port))) return;
    pthread_create(&thread, NULL, false_server, &fd);
    for (int i = 0; i < 2; i++) {
        int c = raw_connect(port);
        FAILS(ps_proof_ask(c, &run, ps_now() + 5, "test"), PS_ESTATE,
              "the program that answers for run 'A' has another secret");
        close(c);
    }
    pthread_join(thread, NULL);
    close(fd);
}

/* Tests the addresses that this machine has, and no others. */
static void test_addresses(void)
{
    int fd, port, other;
    char text[64];
    if (!OK(ps_net_listen("127.0.1.1", 0, &fd, &port))) return;      /* the address of the host name on Debian */
    OK(ps_net_address(fd, false, text, sizeof text));
    CHECK(!strcmp(text, "127.0.1.1"));
    CHECK(ps_net_reach("127.0.0.1", port, ps_now() + 1) == 0);
    CHECK((other = ps_net_reach("127.0.1.1", port, ps_now() + 1)) > 0);
    close(other);
    FAILS(ps_net_listen("127.0.1.1", port, &other, &port), PS_EIO, "in use");
    close(fd);
    FAILS(ps_net_listen("192.0.2.1", 0, &fd, &port), PS_EIO,
          "at 192.0.2.1 (192.0.2.1), which is not an address of this");
    FAILS(ps_net_listen("no..host", 0, &fd, &port), PS_EIO, "at no..host, which has no address here");
    if (OK(ps_net_listen("0.0.0.0", 0, &fd, &port))) {
        CHECK((other = ps_net_reach("127.0.1.1", port, ps_now() + 1)) > 0);
        close(other);
        close(fd);
    }
    CHECK(ps_net_knows("a.localhost"));
    if (OK(ps_net_listen("a.localhost", 0, &fd, &port))) {
        CHECK((other = ps_net_reach("localhost", port, ps_now() + 60)) > 0);
        close(other);
        close(fd);
    }
    /* Names of the loopback interface are resolved without a file or a name server. */
    const char *loopback[] = { "127.0.0.1", "127.0.1.1", "::1", "localhost", "LocalHost", "localhost.",
                               "rank-0.Job.localhost", "a.localhost." };
    const char *wider[] = { "0.0.0.0", "192.0.2.1", "::", ".localhost", "notlocalhost", "localhost..", "" };
    for (size_t i = 0; i < sizeof loopback / sizeof *loopback; i++) CHECK(ps_host_is_loopback(loopback[i]));
    for (size_t i = 0; i < sizeof wider / sizeof *wider; i++) CHECK(!ps_host_is_loopback(wider[i]));
    CHECK(!ps_host_is_loopback(NULL) && !ps_host_is_loopback("no..host"));

    ps_store_server *server;                                            /* several machines, and a name for this
                                                                         * machine */
    ps_store *s;
    ps_run run;
    ps_meeting m = { .rendezvous = "tcp://127.0.1.1:1", .size = 2, .machines = 2, .timeout_s = FAR_S };
    double start = ps_now();
    FAILS(ps_store_join(&m, &run, &server, &s), PS_EINVAL, "127.0.1.1 is a loopback address on the machine of rank 0");
    CHECK(ps_now() - start < PROMPT_S);
}

/* If no more files can be opened, the error contains the reason, and everything works when files can be opened
 * again. */
static void test_files(void)
{
    ps_store_server *server;
    ps_store *s;
    if (!OK(ps_store_serve(LOCAL, 0, 1, &nobody, &server))) return;
    int port = ps_store_port(server);
    files_left(1);                                                      /* room for the rank's own end of a
                                                                         * connection */
    FAILS(come(port, 0, 1, 0.3, &s), PS_ETIME, "was turned away");
    CHECK(strstr(ps_store_lacks(server), "as many files open as it may (ulimit -n)") != NULL);
    int rc = 0;
    for (int tries = 0; rc != PS_EIO && tries < 50; tries++) {          /* The server may free a descriptor meanwhile:
                                                                         * that of a connection that was closed. */
        files_left(0);
        if ((rc = come(port, 0, 1, 0.1, &s)) == 0) ps_store_close(s, true);
    }
    CHECK(rc == PS_EIO && strstr(ps_error_message(), "cannot open a socket to the other ranks: Too many open files "
                                                     "(ulimit -n)"));
    files_left(-1);
    if (OK(come(port, 0, 1, FAR_S, &s))) ps_store_close(s, true);
    ps_store_stop(server, false);
}

/* Ranks meet through a file: rank 0 listens on the address that it writes, and creates a secret that only this user
 * can read. */
static void test_file(void)
{
    char path[] = "/tmp/ps_test_comm_XXXXXX", rendezvous[64], text[300] = "", host[128];
    ps_store_server *server, *none;
    ps_store *a, *b;
    ps_run run;
    struct stat st;
    int port;
    close(mkstemp(path));
    chmod(path, 0644);
    snprintf(rendezvous, sizeof rendezvous, "file://%s", path);
    ps_meeting m = { .rendezvous = rendezvous, .run = "A", .size = 2, .machines = 1, .timeout_s = 5 };
    if (!OK(ps_store_join(&m, &run, &server, &a))) return;
    CHECK(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600);
    FILE *f = fopen(path, "rb");
    CHECK(f && fread(text, 1, sizeof text - 1, f) > 64);
    fclose(f);
    CHECK(sscanf(text, "%127[0-9.]:%d\nsecret ", host, &port) == 2 && port == ps_store_port(server));
    CHECK(!strcmp(host, LOCAL) && !strcmp(ps_store_host(server), LOCAL));       /* all ranks are on this machine */
    ps_run nosecret = run_of("A", NULL);
    FAILS(ps_store_connect(LOCAL, port, &(ps_store_rank){ 1, 2, &nosecret, 0.1 }, &b), PS_ESTATE, "lacking here");
    m.rank = 1;
    m.run = "B";
    m.timeout_s = 0.2;
    FAILS(ps_store_join(&m, &run, &none, &b), PS_ETIME, "this rank belongs to run 'B'");
    m.run = "A";
    m.secret = "mine";
    FAILS(ps_store_join(&m, &run, &none, &b), PS_ETIME, "has another secret");
    m.secret = NULL;
    m.timeout_s = 5;
    OK(ps_store_join(&m, &run, &none, &b));
    ps_store_close(a, true);
    ps_store_close(b, true);
    ps_store_stop(server, false);
    if (geteuid() == 0 && chown(path, 12345, 12345) == 0) {             /* a file of another user */
        m.timeout_s = 0.2;
        FAILS(ps_store_join(&m, &run, &none, &b), PS_ETIME, "it is another user's");
    }
    m.rank = 0;
    m.machines = 0;
    m.secret = "given";                                                 /* a given secret is not in the file */
    if (OK(ps_store_join(&m, &run, &server, &a))) {
        memset(text, 0, sizeof text);
        f = fopen(path, "rb");
        CHECK(f && fread(text, 1, sizeof text - 1, f) > 4 && !strstr(text, "secret"));
        fclose(f);
        CHECK(!strncmp(text, ps_store_host(server), strlen(ps_store_host(server))));
        ps_store_close(a, true);
        ps_store_stop(server, false);
    }
    unlink(path);
    m.rendezvous = "file:///no/such/folder/file";
    FAILS(ps_store_join(&m, &run, &server, &a), PS_EIO, "rank 0 cannot write its address to /no/such/folder/file");
}

/* -- all at once --------------------------------------------------------------------------------------------------- */

struct guest { int port, rank; _Atomic int rc; _Atomic bool came; ps_store *store; };
static void *meet(void *arg)
{
    struct guest *g = arg;
    int rc = come(g->port, g->rank, 3, FAR_S, &g->store);
    g->came = true;
    g->rc = rc < 0 ? rc : ps_store_meet(g->store, FAR_S);
    return NULL;
}

/* No rank continues before the last rank has arrived. */
static void test_meet(void)
{
    ps_store_server *server;
    struct guest all[3];
    pthread_t threads[3];
    if (!OK(ps_store_serve(LOCAL, 0, 3, &nobody, &server))) return;
    double start = ps_now(), late_s = 0.2;
    for (int r = 0; r < 3; r++) {
        all[r] = (struct guest){ .port = ps_store_port(server), .rank = r, .rc = 1 };
        if (r == 2) usleep((useconds_t)(late_s * 1e6));
        CHECK(r < 2 || (all[0].rc == 1 && all[1].rc == 1));
        pthread_create(&threads[r], NULL, meet, &all[r]);
    }
    for (int r = 0; r < 3; r++) {
        pthread_join(threads[r], NULL);
        CHECK(all[r].rc == 0);
    }
    CHECK(ps_now() - start >= late_s && ps_now() - start < PROMPT_S);
    OK(ps_store_meet(all[1].store, FAR_S));                             /* a second meeting, since all ranks have
                                                                         * arrived */
    OK(ps_store_ask_fault(all[1].store));
    ps_store_fault(all[0].store, "no cable");
    FAILS(ps_store_ask_fault(all[1].store), PS_EIO, "rank 0 failed: no cable");
    FAILS(ps_store_meet(all[2].store, FAR_S), PS_EIO, "rank 0 failed: no cable");
    start = ps_now();
    ps_test_linger(FAR_S);
    for (int r = 0; r < 3; r++) ps_store_close(all[r].store, false);
    ps_store_stop(server, true);                                        /* all ranks have received the message */
    CHECK(ps_now() - start < PROMPT_S);
    ps_test_linger(-1);
}

/* If many ranks are missing, the error contains the first 16, whatever the number of their digits. */
static void test_many_missing(void)
{
    enum { THERE = 1000, ALL = 1200 };
    ps_store_server *server;
    static ps_store *stores[THERE];
    if (!OK(ps_store_serve(LOCAL, 0, ALL, &nobody, &server))) return;
    int n = 0;
    while (n < THERE && come(ps_store_port(server), n, ALL, FAR_S, &stores[n]) == 0) n++;
    CHECK(n == THERE);
    if (n == THERE)
        FAILS(ps_store_meet(stores[0], 0.05), PS_ETIME, "1012, 1013, 1014, 1015 and 184 more of 1200 did not come");
    while (n-- > 0) ps_store_close(stores[n], true);
    ps_store_stop(server, false);
}

/* If ranks are missing, the time-out's error names them. A wrong rank is an error on the ranks that already wait. */
static void test_meet_fails(void)
{
    ps_store_server *server;
    struct guest g;
    ps_store *other;
    pthread_t thread;
    if (!OK(ps_store_serve(LOCAL, 0, 3, &nobody, &server))) return;
    g = (struct guest){ .port = ps_store_port(server), .rank = 1 };
    OK(come(g.port, 0, 3, FAR_S, &other));
    FAILS(ps_store_meet(other, 0.05), PS_ETIME, "rank 1, 2 of 3 did not come");
    ps_store_close(other, true);
    pthread_create(&thread, NULL, meet, &g);
    while (!g.came) usleep(1000);
    FAILS(come(g.port, 1, 3, FAR_S, &other), PS_EINVAL, "two processes");
    double start = ps_now();
    pthread_join(thread, NULL);
    CHECK(g.rc == PS_EINVAL && ps_now() - start < PROMPT_S);
    ps_store_close(g.store, false);
    start = ps_now();
    ps_store_stop(server, true);                                        /* rank 2 has time to receive the message */
    CHECK(ps_now() - start >= PS_STORE_LINGER_S - 0.1 && ps_now() - start < PROMPT_S);
}

/* If another program answers at the port, this is an error, and nothing hangs. */
static void *answer_nonsense(void *arg)
{
    const int *fd = arg;
    for (;;) {
        int peer = accept(*fd, NULL, NULL);
        if (peer < 0) return NULL;
        if (send(peer, "HTTP/1.0 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL) < 0) failed++;
        close(peer);
    }
}
static void test_foreign_server(void)
{
    int fd, port;
    pthread_t thread;
    ps_store *s;
    if (!OK(ps_net_listen(LOCAL, 0, &fd, &port))) return;
    double start = ps_now();
    FAILS(come(port, 1, 2, 0.2, &s), PS_ETIME, "does not answer");      /* none accepts */
    CHECK(ps_now() - start < PROMPT_S);
    pthread_create(&thread, NULL, answer_nonsense, &fd);
    FAILS(come(port, 1, 2, 0.3, &s), PS_ESTATE, "what answers is not the store of rank 0");
    shutdown(fd, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(fd);
}

/* A rank whose connection was closed before it could prove itself connects again. */
struct moody { int fd, port; };
static void *hang_up_twice(void *arg)
{
    struct moody *m = arg;
    for (int i = 0; i < 2; i++) close(accept(m->fd, NULL, NULL));
    close(m->fd);
    ps_store_server *server = NULL;
    OK(ps_store_serve(LOCAL, m->port, 1, &nobody, &server));
    return server;
}
static void test_turned_away(void)
{
    struct moody m;
    pthread_t thread;
    void *server;
    ps_store *s;
    if (!OK(ps_net_listen(LOCAL, 0, &m.fd, &m.port))) return;
    pthread_create(&thread, NULL, hang_up_twice, &m);
    if (OK(come(m.port, 0, 1, FAR_S, &s))) ps_store_close(s, true);
    pthread_join(thread, &server);
    ps_store_stop(server, false);
}

static void test_store_memory(void)
{
    for (int n = 0; n < 12; n++) {
        ps_store_server *server = NULL;
        ps_store *a = NULL;
        ps_test_fail_alloc(n, 1);
        int rc = ps_store_serve(LOCAL, 0, 1, &nobody, &server);
        if (rc == 0) rc = come(ps_store_port(server), 0, 1, 2, &a);
        if (rc == 0) rc = ps_store_set(a, "k", "v", 1);
        ps_test_fail_alloc(-1, 0);
        CHECK(rc == 0 || strlen(ps_error_message()) > 0);
        ps_store_close(a, true);
        ps_store_stop(server, false);
    }
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);              /* ps_comm_gloo does the same */
    test_values();
    test_missing_and_ports();
    faulty(set_x, 0, "");
    faulty(end_early, PS_EIO, "rank 1 ended while the group was made");
    faulty(give_up, PS_EIO, "rank 1 failed: no such network");
    faulty(another_size, PS_EINVAL, "there are 3 ranks, rank 0 says 2");
    faulty(same_rank, PS_EINVAL, "two processes");
    faulty(no_rank, PS_EINVAL, "rank 2 of 2");
    faulty(strangers, 0, "");
    faulty(noise, PS_EIO, "rank 1 ended");
    test_meet();
    test_many_missing();
    test_meet_fails();
    test_foreign_server();
    test_turned_away();
    test_runs();
    test_false_server();
    test_file();
    test_addresses();                      /* from here on, files and memory of the whole process fail */
    test_files();
    test_store_memory();
    return end_checks();
}
