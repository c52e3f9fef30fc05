/* SPDX-License-Identifier: BSD-3-Clause
 * The watch over ranks (rendezvous/watch.h). Ranks are threads of this process. Ranks that die, fall silent or send
 * garbage are sockets of the test. watch_spec.lua has processes that end. */
#define _GNU_SOURCE
#include "check.h"
#include "files_left.h"
#include "rendezvous/net.h"
#include "rendezvous/watch_inner.h"
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SIZE = 3, MAGIC = 0x31575350 };
static const char *const LOCAL = "127.0.0.1";
static const ps_run nobody;                /* a run without a name and a secret */

typedef struct member {
    int rank, port, rc;
    double silence_s, timeout_s;
    ps_store *store;
    ps_watch *watch;
    atomic_int told;                       /* number of calls of on_verdict */
    char why[PS_WATCH_TEXT];
    pthread_t thread;
} member;

static ps_store_server *server;
static member members[SIZE];

static void on_verdict(void *arg) { atomic_fetch_add((atomic_int *)arg, 1); }

static void *start(void *arg)
{
    member *m = arg;
    ps_watch_options o = { .rank = m->rank, .size = SIZE, .silence_s = m->silence_s, .timeout_s = m->timeout_s,
                           .host = LOCAL, .run = &nobody, .on_verdict = on_verdict, .arg = &m->told };
    m->rc = ps_store_connect(LOCAL, m->port, &(ps_store_rank){ m->rank, SIZE, &nobody, 5 }, &m->store);
    if (m->rc == 0) m->rc = ps_watch_start(m->store, &o, &m->watch);
    snprintf(m->why, sizeof m->why, "%s", m->rc < 0 ? ps_error_message() : "");
    return NULL;
}

/* Starts ranks 0 .. n-1 of SIZE. The test plays the other ranks. */
static bool begin(int n, double silence_s)
{
    if (!OK(ps_store_serve(LOCAL, 0, SIZE, &nobody, &server))) return false;
    for (int r = 0; r < n; r++) {
        memset(&members[r], 0, sizeof members[r]);
        members[r].rank = r;
        members[r].port = ps_store_port(server);
        members[r].silence_s = silence_s;
        members[r].timeout_s = FAR_S;
        pthread_create(&members[r].thread, NULL, start, &members[r]);
    }
    bool ok = true;
    for (int r = 0; r < n; r++) {
        pthread_join(members[r].thread, NULL);
        if (members[r].rc < 0) printf("    %s\n", members[r].why);
        ok = CHECK(members[r].rc == 0) && ok;
    }
    return ok;
}

static void *finish(void *arg)
{
    member *m = arg;
    ps_watch_close(m->watch);
    ps_store_close(m->store, true);
    return NULL;
}

static void end(int n)
{
    double from = ps_now();
    for (int r = 0; r < n; r++) pthread_create(&members[r].thread, NULL, finish, &members[r]);
    for (int r = 0; r < n; r++) pthread_join(members[r].thread, NULL);
    CHECK(ps_now() - from < PROMPT_S);
    ps_store_stop(server, false);
}

static void wait_over(ps_watch *w, double seconds)
{
    for (double until = ps_now() + seconds; !ps_watch_over(w) && ps_now() < until;) poll(NULL, 0, 5);
}

/* Checks that ranks 0 .. n-1 each get this verdict once, within `seconds`. */
static void all_hear(int n, int code, const char *word, double seconds)
{
    for (int r = 0; r < n; r++) {
        wait_over(members[r].watch, seconds);
        FAILS(ps_watch_verdict(members[r].watch), code, word);
        for (int i = 0; i < 20000 && !atomic_load(&members[r].told); i++) poll(NULL, 0, 5);
        CHECK(atomic_load(&members[r].told) == 1);
    }
}

/* -- ranks that are all there -------------------------------------------------------------------------------------- */

static void test_quiet(void)
{
    if (!begin(SIZE, 2)) return;
    for (int i = 0; i < 800; i++)
        for (int r = 0; r < SIZE; r++) {
            ps_watch_enter(members[r].watch, 0, "barrier", (uint64_t)i, -1, false);
            ps_watch_leave(members[r].watch, 0);
            if (r == 0) poll(NULL, 0, 5);
        }
    for (int r = 0; r < SIZE; r++) {
        CHECK(!ps_watch_over(members[r].watch) && ps_watch_verdict(members[r].watch) == 0);
        CHECK(atomic_load(&members[r].told) == 0);
    }
    end(SIZE);
    ps_test_linger(FAR_S);                 /* no rank waits for another, so `end` takes less than PROMPT_S */
    for (int i = 0; i < 8; i++) {
        if (!begin(SIZE, 5)) break;
        end(SIZE);
    }
    ps_test_linger(-1);
    ps_watch_enter(NULL, 0, "barrier", 0, -1, false);
    ps_watch_leave(NULL, 0);
    ps_watch_close(NULL);
    CHECK(!ps_watch_over(NULL) && ps_watch_verdict(NULL) == 0);
    CHECK(ps_watch_complain(NULL, 0, PS_WATCH_LOST, 1, 1, "") == 0);
}

struct complainer { int rank, what, peer, rc, place; const char *text; char why[PS_WATCH_TEXT]; };
static void *complain(void *arg)
{
    struct complainer *c = arg;
    c->rc = ps_watch_complain(members[c->rank].watch, c->place, c->what, c->peer, 7, c->text);
    snprintf(c->why, sizeof c->why, "%s", c->rc < 0 ? ps_error_message() : "");
    return NULL;
}

/* Checks that both get the same verdict. */
static void both(struct complainer *a, struct complainer *b, int code, const char *word)
{
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, complain, a);
    pthread_create(&threads[1], NULL, complain, b);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    if (!CHECK(a->rc == code && b->rc == code && strstr(a->why, word) && !strcmp(a->why, b->why)))
        printf("    wanted %s; %d %s; %d %s\n", word, a->rc, a->why, b->rc, b->why);
}

static void enter(int rank, const char *op, uint64_t call, int peer)
{
    ps_watch_enter(members[rank].watch, 0, op, call, peer, false);
}

static void test_missing(void)
{
    if (!begin(SIZE, 5)) return;
    for (int r = 0; r < SIZE; r++) {
        enter(r, "barrier", 16, -1);
        ps_watch_leave(members[r].watch, 0);
    }
    enter(0, "all_reduce", 17, -1);
    enter(2, "all_reduce", 17, -1);
    struct complainer a = { .rank = 0, .what = PS_WATCH_TIME_OUT, .peer = 2, .text = "" }, b = a;
    b.rank = 2;
    b.peer = 1;
    both(&a, &b, PS_ETIME, ") is alive but has not come to all_reduce (call 17) within 7 s; it last finished barrier "
         "(call 16)");
    CHECK(!strncmp(a.why, "rank 1 (", 8));
    all_hear(SIZE, PS_ETIME, "rank 1 (", PROMPT_S);
    FAILS(ps_watch_complain(members[1].watch, 0, PS_WATCH_LOST, 0, 1, ""), PS_ETIME, "rank 1 (");
    end(SIZE);

    if (!begin(SIZE, 5)) return;           /* all ranks have arrived, so the bytes are late */
    for (int r = 0; r < SIZE; r++) enter(r, "all_reduce", 3, -1);
    both(&a, &b, PS_ETIME, "though all its ranks came to it: bytes of rank ");
    end(SIZE);

    if (!begin(SIZE, 5)) return;           /* a peer that is in another call */
    enter(2, "send", 0, 1);
    enter(1, "barrier", 0, -1);
    FAILS(ps_watch_complain(members[2].watch, 0, PS_WATCH_TIME_OUT, 1, 7, ""), PS_ETIME,
          ") is alive but has not come to meet rank 2's send within 7 s; it is in barrier (call 0)");
    all_hear(SIZE, PS_ETIME, "rank 1 (", PROMPT_S);
    end(SIZE);
}

/* Groups of some ranks. Each group has its own calls, and the verdict names the group. */
static void test_groups(void)
{
    enum { TP = 7, PP = 8 };
    int tp[SIZE] = { 0 }, pp[SIZE] = { 0 };
    struct complainer a = { .rank = 1, .what = PS_WATCH_TIME_OUT, .peer = 2, .text = "" }, b = a;
    if (!begin(SIZE, 5)) return;
    for (int r = 1; r < SIZE; r++) CHECK((tp[r] = ps_watch_join(members[r].watch, TP, "tp")) == 1);
    for (int r = 0; r < SIZE; r++) CHECK((pp[r] = ps_watch_join(members[r].watch, PP, "pp")) > 0);
    enter(2, "barrier", 9, -1);            /* it has made many calls in other groups, but has not reached this
                                            * group's call */
    ps_watch_enter(members[2].watch, pp[2], "all_gather", 40, -1, false);
    ps_watch_enter(members[1].watch, tp[1], "all_reduce", 3, -1, false);
    a.place = b.place = tp[1];
    both(&a, &b, PS_ETIME, ") is alive but has not come to all_reduce of tp (call 3) within 7 s; it is in all_gather "
         "of pp (call 40) and in barrier (call 9)");
    CHECK(!strncmp(a.why, "rank 2 (", 8));             /* rank 0 does not belong to that group */
    all_hear(SIZE, PS_ETIME, "rank 2 (", PROMPT_S);
    end(SIZE);

    if (!begin(SIZE, 5)) return;           /* it ended while other ranks of its group wait; rank 0 is in no call */
    for (int r = 1; r < SIZE; r++) tp[r] = ps_watch_join(members[r].watch, TP, "tp");
    ps_watch_enter(members[2].watch, tp[2], "barrier", 0, -1, false);
    ps_watch_leave(members[2].watch, tp[2]);
    ps_watch_enter(members[1].watch, tp[1], "barrier", 1, -1, false);
    ps_watch_close(members[2].watch);
    members[2].watch = NULL;
    a.what = PS_WATCH_LOST;
    a.place = tp[1];
    complain(&a);
    if (!CHECK(a.rc == PS_EIO && strstr(a.why, ") ended after barrier of tp (call 0)"))) printf("    %s\n", a.why);
    end(SIZE);

    if (!begin(1, 5)) return;              /* as many as there is room for; closing one makes room */
    for (int i = 1; i < PS_WATCH_PLACES; i++) CHECK(ps_watch_join(members[0].watch, (uint64_t)i, "g") == i);
    FAILS(ps_watch_join(members[0].watch, 99, "g"), PS_EINVAL, "there are already 32 groups of these ranks");
    ps_watch_part(members[0].watch, 5);
    ps_watch_part(members[0].watch, 0);
    ps_watch_part(members[0].watch, -1);
    CHECK(ps_watch_join(members[0].watch, 99, "g") == 5 && ps_watch_join(NULL, 1, "g") == 0);
    ps_watch_part(NULL, 1);
    end(1);
}

/* Scripts that wait for each other in calls of two groups. */
static void test_circle(void)
{
    enum { TP = 7 };
    int tp[SIZE] = { 0 };
    struct { const char *what; int place, peer; bool inside, waits, moves, over; } const cases[] = {
        { "a circle", 0, -1, false, true, false, true },
        { "a circle with a send", 0, 2, false, true, false, true },
        { "a call beside the script", 0, -1, false, false, false, false },
        { "a rank that is in the group's last call", 0, -1, true, true, false, false },
        { "a rank that moves", 0, -1, false, true, true, false },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (!begin(SIZE, 1)) return;
        for (int r = 0; r < SIZE; r++) tp[r] = ps_watch_join(members[r].watch, TP, "tp");
        if (cases[i].inside) ps_watch_enter(members[1].watch, tp[1], "all_reduce", 2, -1, false);
        ps_watch_enter(members[2].watch, tp[2], "all_reduce", 3, -1, true);
        ps_watch_enter(members[1].watch, 0, "barrier", 9, cases[i].peer, cases[i].waits);
        for (double until = ps_now() + (cases[i].over ? PROMPT_S : 1.5); ps_now() < until; poll(NULL, 0, 20)) {
            if (ps_watch_over(members[0].watch)) break;
            if (!cases[i].moves) continue;
            ps_watch_leave(members[1].watch, 0);
            ps_watch_enter(members[1].watch, 0, "barrier", 9, -1, true);
        }
        if (cases[i].over) {
            all_hear(SIZE, PS_EINVAL, ") is in all_reduce of tp (call 3), to which rank 1 has not come", PROMPT_S);
            if (!CHECK(!strncmp(ps_error_message(), "ranks wait for each other: rank 1 (", 35) &&
                       strstr(ps_error_message(), ", to which rank 2 has not come; rank 2 (")))
                printf("    %s: %s\n", cases[i].what, ps_error_message());
        } else if (!CHECK(!ps_watch_over(members[0].watch))) printf("    %s\n", cases[i].what);
        end(SIZE);
    }
}

/* A script waits for a message after none, one or all of the sent messages have arrived. */
static void test_messages(void)
{
    enum { PP = 8 };
    int pp[SIZE] = { 0 };
    for (int sent = 0; sent < 3; sent++) {
        bool over = sent != 1;
        if (!begin(SIZE, 1)) return;
        for (int r = 0; r < SIZE; r++) pp[r] = ps_watch_join(members[r].watch, PP, "pp");
        ps_watch_enter(members[1].watch, pp[1], "recv F", PS_WATCH_NO_CALL, 2, false);
        ps_watch_waits(members[1].watch, pp[1], true);
        if (sent > 0) ps_watch_sent(members[2].watch, pp[2]);
        if (sent > 1) ps_watch_came(members[1].watch, pp[1]);
        if (sent > 1) ps_watch_waits(members[1].watch, pp[1], true);   /* it was another message */
        ps_watch_enter(members[2].watch, 0, "barrier", 9, -1, true);
        wait_over(members[0].watch, over ? PROMPT_S : 1.5);
        if (over) all_hear(SIZE, PS_EINVAL, ") is in recv F of pp with rank 2, to which rank 2 has not come; ", 1);
        else CHECK(!ps_watch_over(members[0].watch));
        end(SIZE);
    }
}

static void test_blame(void)
{
    struct complainer a = { .rank = 0, .what = PS_WATCH_LOST, .peer = 2, .text = "reset" }, b = a;
    b.rank = 2;
    b.peer = 0;
    if (!begin(SIZE, FAR_S)) return;       /* no rank is at fault */
    for (int r = 0; r < SIZE; r++) enter(r, "barrier", 0, -1);
    double from = ps_now();
    both(&a, &b, PS_EIO, "broke in barrier (call 0), while both are alive");
    CHECK(ps_now() - from < PROMPT_S);
    end(SIZE);

    if (!begin(SIZE, 5)) return;           /* a third rank left, so the peers that lost each other are not the cause */
    for (int r = 0; r < SIZE; r++) enter(r, "barrier", 0, -1), ps_watch_leave(members[r].watch, 0);
    ps_watch_close(members[1].watch);
    members[1].watch = NULL;
    for (int r = 0; r < SIZE; r += 2) {
        CHECK(!ps_watch_over(members[r].watch));
        enter(r, "all_reduce", 1, -1);
    }
    both(&a, &b, PS_EIO, ") ended after barrier (call 0)");
    CHECK(!strncmp(a.why, "rank 1 (", 8));
    end(SIZE);

    if (!begin(SIZE, 5)) return;           /* rank 0 left, and the others detect it */
    for (int r = 0; r < SIZE; r++) enter(r, "barrier", 0, -1), ps_watch_leave(members[r].watch, 0);
    ps_watch_close(members[0].watch);
    members[0].watch = NULL;
    enter(1, "barrier", 1, -1);
    enter(2, "send", 0, 1);
    a.rank = 1;
    FAILS(ps_watch_complain(members[1].watch, 0, PS_WATCH_LOST, 2, 1, ""), PS_EIO, ") ended after barrier (call 0)");
    CHECK(!strncmp(ps_error_message(), "rank 0 (", 8));
    CHECK(ps_watch_complain(members[2].watch, 0, PS_WATCH_LOST, 1, 1, "") == 0);
    end(SIZE);

    if (!begin(SIZE, 5)) return;           /* a rank that gives up reports the reason, whatever was lost before, and
                                            * keeps its own error */
    for (int r = 0; r < SIZE; r++) enter(r, "barrier", 0, -1);
    pthread_t thread;
    struct complainer c = { .rank = 0, .what = PS_WATCH_LOST, .peer = 2, .text = "reset" };
    pthread_create(&thread, NULL, complain, &c);
    poll(NULL, 0, 100);
    ps_fail(PS_EINVAL, "my own");
    CHECK(ps_watch_complain(members[2].watch, 0, PS_WATCH_GIVES_UP, 2, 0, "shapes differ") == 0);
    CHECK(!strcmp(ps_error_message(), "my own"));
    pthread_join(thread, NULL);
    if (!CHECK(c.rc == PS_EIO && strstr(c.why, ") gave up: shapes differ"))) printf("    %s\n", c.why);
    all_hear(SIZE, PS_EIO, ") gave up: shapes differ", PROMPT_S);
    end(SIZE);

    if (!begin(SIZE, 5)) return;           /* the same for a reason that the watch has not read yet */
    for (int r = 0; r < SIZE - 1; r++) enter(r, "barrier", 0, -1);
    CHECK(ps_watch_complain(members[1].watch, 0, PS_WATCH_GIVES_UP, 1, 0, "shapes differ") == 0);
    FAILS(ps_watch_complain(members[1].watch, 0, PS_WATCH_LOST, 2, 1, "reset"), PS_EIO, ") gave up: shapes differ");
    end(SIZE);
    if (!begin(SIZE, 5)) return;
    CHECK(ps_watch_complain(members[1].watch, 0, PS_WATCH_GIVES_UP, 1, 0, "shapes differ") == 0);
    FAILS(ps_watch_complain(members[1].watch, 0, PS_WATCH_LOST, 2, 1, "reset"), PS_EIO, ") gave up: shapes differ");
    end(SIZE);

    if (!begin(SIZE, 5)) return;           /* the message of a process that ends */
    ps_groups_end("first line\nsecond line");
    all_hear(SIZE, PS_EIO, ") failed: first line", PROMPT_S);
    CHECK(!strstr(ps_error_message(), "second"));
    end(SIZE);
    if (!begin(SIZE, 5)) return;
    ps_groups_end(NULL);
    for (int r = 0; r < SIZE; r++) CHECK(!ps_watch_over(members[r].watch));
    end(SIZE);
}

/* -- ranks that are not what they should be ------------------------------------------------------------------------ */

/* Returns the watch's port, and the run whose key identifies its ranks. */
static int address(ps_store *store, ps_run *run)
{
    char text[128] = "";
    int64_t nbytes;
    if (!OK(ps_store_get(store, "watch", 2, text, sizeof text - 1, &nbytes))) return 0;
    ps_run_derive(&nobody, text, run);
    return (int)strtol(text, NULL, 10);
}

/* Returns a connection to the watch that has proved itself. */
static int reach(void)
{
    ps_run run;
    int port = address(members[0].store, &run), fd = ps_net_reach(LOCAL, port, ps_now() + PROMPT_S);
    if (CHECK(fd > 0)) OK(ps_proof_ask(fd, &run, ps_now() + 2, "test"));
    return fd;
}

static int say(int fd, watch_message m, const char *text)
{
    m.magic = MAGIC;
    m.nbytes = (uint32_t)strlen(text);
    return ps_net_transfer(fd, &m, sizeof m, true, ps_now() + PROMPT_S) == 1 &&
           ps_net_transfer(fd, (void *)(uintptr_t)text, m.nbytes, true, ps_now() + PROMPT_S) == 1;
}

/* Receives a message. Returns false if there is none. */
static bool hear(int fd, watch_message *m, char *text, double seconds)
{
    double until = ps_now() + seconds;
    if (ps_net_transfer(fd, m, sizeof *m, false, until) != 1 || m->nbytes >= PS_WATCH_TEXT) return false;
    text[m->nbytes] = 0;
    return ps_net_transfer(fd, text, m->nbytes, false, until) == 1;
}

/* Returns a rank 2 that the test plays, after its welcome. */
static int false_rank(double silence_s)
{
    int fd = reach();
    watch_message m = { .kind = WATCH_HELLO, .rank = 2, .seconds = silence_s, .at.peer = -1 };
    char text[PS_WATCH_TEXT];
    CHECK(say(fd, m, "elsewhere") && hear(fd, &m, text, PROMPT_S) && m.kind == WATCH_WELCOME);
    return fd;
}

static void test_death_and_silence(void)
{
    watch_place at = { .calls = 4, .call = 3, .peer = -1, .inside = 1, .op = "all_gather" };
    if (!begin(2, 5)) return;
    int fd = false_rank(5);
    CHECK(say(fd, (watch_message){ .kind = WATCH_BEAT, .rank = 2, .at = at, .places = 1 }, ""));
    close(fd);
    all_hear(2, PS_EIO, "rank 2 (elsewhere) died: its process ended without a word (killed, out of memory, or a "
             "crash); it was last known in all_gather (call 3)", 2);
    end(2);

    if (!begin(2, 5)) return;              /* more groups than a rank can report: the last ones are reported */
    fd = false_rank(5);
    watch_place in_tp = at;
    memcpy(in_tp.axis, "tp", 3);
    for (int i = 0; i < 2 * PS_WATCH_PLACES; i++) {
        in_tp.key = (uint64_t)i, in_tp.turn = (uint64_t)i, in_tp.call = (uint64_t)i;
        in_tp.inside = i == 2 * PS_WATCH_PLACES - 1;
        CHECK(say(fd, (watch_message){ .kind = WATCH_BEAT, .rank = 2, .at = in_tp, .places = 1 }, ""));
    }
    close(fd);
    all_hear(2, PS_EIO, "it was last known in all_gather of tp (call 63)", PROMPT_S);
    end(2);

    if (!begin(2, 0.5)) return;
    double from = ps_now();
    fd = false_rank(0.5);
    at.inside = 0;
    memcpy(at.last_op, at.op, sizeof at.op);
    at.last_call = 3;
    CHECK(say(fd, (watch_message){ .kind = WATCH_BEAT, .rank = 2, .at = at, .places = 1 }, ""));
    all_hear(2, PS_ETIME, "rank 2 (elsewhere) is silent for 0.", PROMPT_S);
    CHECK(strstr(ps_error_message(), "it was last known after all_gather (call 3)") && ps_now() - from < PROMPT_S);
    watch_message m;
    char text[PS_WATCH_TEXT];
    bool told = false;
    while (!told && hear(fd, &m, text, PROMPT_S)) told = m.kind == WATCH_VERDICT && strstr(text, "is silent");
    CHECK(told);
    close(fd);
    end(2);

    if (!begin(2, 5)) return;              /* values that a rank never sends */
    fd = false_rank(5);
    CHECK(say(fd, (watch_message){ .kind = WATCH_VERDICT, .rank = 2, .code = -1 }, "mine"));
    all_hear(2, PS_EIO, "rank 2 (elsewhere) died", PROMPT_S);
    close(fd);
    end(2);

    if (!begin(2, 5)) return;              /* a rank that arrives late gets the verdict */
    enter(1, "barrier", 0, -1);
    CHECK(ps_watch_complain(members[1].watch, 0, PS_WATCH_GIVES_UP, 1, 0, "early") == 0);
    all_hear(2, PS_EIO, ") gave up: early", PROMPT_S);
    fd = false_rank(5);
    told = false;
    while (!told && hear(fd, &m, text, PROMPT_S)) told = m.kind == WATCH_VERDICT && strstr(text, "early");
    CHECK(told);
    close(fd);
    end(2);

    if (!begin(2, 5)) return;
    fd = false_rank(4);
    all_hear(2, PS_EINVAL, "heartbeat is 4 s on rank 2 and 5 s on rank 0", PROMPT_S);
    close(fd);
    end(2);
}

/* Checks that the connection is closed, although the watch has sent nothing useful on it. */
static void ends(int fd)
{
    char byte;
    CHECK(ps_net_transfer(fd, &byte, 1, false, ps_now() + PROMPT_S) == -1);
    close(fd);
}

static void noise(int fd, uint32_t *state, const void *head, size_t nbytes)
{
    unsigned char bytes[600];
    for (size_t j = 0; j < sizeof bytes; j++)
        bytes[j] = (unsigned char)((*state = *state * 1664525u + 1013904223u) >> 24);
    memcpy(bytes, head, nbytes);
    ps_net_transfer(fd, bytes, *state >> 16 & 511, true, ps_now() + PROMPT_S);
    close(fd);
}

static void test_strangers(void)
{
    if (!begin(2, 5)) return;
    ps_run run, other;
    int port = address(members[0].store, &run), idle = ps_net_reach(LOCAL, port, ps_now() + PROMPT_S);
    watch_message good = { .magic = MAGIC, .kind = WATCH_HELLO, .rank = 2, .seconds = 5 };
    int fd = ps_net_reach(LOCAL, port, ps_now() + PROMPT_S);            /* a rank's messages without a proof */
    CHECK(ps_net_transfer(fd, &good, sizeof good, true, ps_now() + PROMPT_S) == 1);
    ends(fd);
    ps_run_derive(&nobody, "1234 5", &other);                           /* the run is correct, but the key is wrong */
    const ps_run *strange[] = { &nobody, &other };
    for (int i = 0; i < 2; i++) {
        fd = ps_net_reach(LOCAL, port, ps_now() + PROMPT_S);
        FAILS(ps_proof_ask(fd, strange[i], ps_now() + 2, "test"), PS_ESTATE, "has another secret");
        ends(fd);
    }
    watch_message bad[] = {                                             /* and invalid messages after a proof */
        { .magic = 1, .kind = WATCH_HELLO, .rank = 2 },
        { .magic = MAGIC, .kind = WATCH_HELLO, .rank = 1 },
        { .magic = MAGIC, .kind = WATCH_HELLO, .rank = 0 },
        { .magic = MAGIC, .kind = WATCH_HELLO, .rank = SIZE },
        { .magic = MAGIC, .kind = WATCH_HELLO, .rank = -1 },
        { .magic = MAGIC, .kind = WATCH_HELLO, .rank = 2, .nbytes = 1u << 31 },
        { .magic = MAGIC, .kind = WATCH_BYE, .rank = 2 },
        { .magic = MAGIC, .kind = 99, .rank = 2 },
        { .magic = MAGIC, .kind = -1, .rank = 2 },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        fd = reach();
        CHECK(ps_net_transfer(fd, &bad[i], sizeof bad[i], true, ps_now() + PROMPT_S) == 1);
        ends(fd);
    }
    uint32_t state = 12345, magic = PS_PROOF_MAGIC;
    for (int i = 0; i < 200; i++)
        noise(ps_net_reach(LOCAL, port, ps_now() + PROMPT_S), &state, &magic, i & 1 ? sizeof magic : 0);
    for (int i = 0; i < 100; i++) noise(reach(), &state, &bad[3], i & 1 ? 8 : 0);
    int many[200];                         /* more connections than there is room for; the oldest are closed, among
                                            * them the idle one */
    for (int i = 0; i < 200; i++) many[i] = ps_net_reach(LOCAL, port, ps_now() + PROMPT_S);
    fd = false_rank(5);                    /* and rank 2 can still connect */
    ends(idle);
    for (int i = 0; i < 200; i++) close(many[i]);
    watch_message m;
    char text[PS_WATCH_TEXT];
    CHECK(hear(fd, &m, text, PROMPT_S) && m.kind == WATCH_BEAT && m.rank == 0 && !ps_watch_over(members[0].watch));
    CHECK(say(fd, (watch_message){ .kind = WATCH_BYE, .rank = 2 }, ""));
    CHECK(ps_net_reach(LOCAL, port, ps_now() + 0.2) == 0);     /* all ranks have arrived, so it stops listening */
    close(fd);
    end(2);
}

/* Rank 0 cannot open a file for a rank's connection, and reports that. */
static void test_files(void)
{
    if (!begin(2, 5)) return;
    ps_run run;
    int port = address(members[0].store, &run);
    files_left(1);
    int fd = ps_net_reach(LOCAL, port, ps_now() + PROMPT_S);
    wait_over(members[0].watch, PROMPT_S);
    files_left(-1);
    FAILS(ps_watch_verdict(members[0].watch), PS_EIO, "as many files open as it may (ulimit -n), and needs one");
    close(fd);
    end(2);
}

/* Lets a rank prove itself, and proves that this side belongs to the run. */
static void let_in(int fd, const ps_run *run)
{
    ps_proof p = { 0 };
    char why[PS_PROOF_TEXT];
    int done = PS_PROOF_MORE;
    while (done == PS_PROOF_MORE && ps_net_ready(fd, POLLIN, ps_now() + PROMPT_S) > 0)
        done = ps_proof_answer(&p, fd, run, why);
    CHECK(done == PS_PROOF_DONE);
}

/* Plays rank 0 and serves `m`. */
static int answer_with(watch_message m, bool stay, int *out_fd)
{
    int listener = -1, port = 0;
    ps_store *store = NULL;
    char text[64];
    ps_run run;
    if (!OK(ps_store_serve(LOCAL, 0, SIZE, &nobody, &server))) return -1;
    if (!OK(ps_net_listen(LOCAL, 0, &listener, &port))) return -1;
    OK(ps_store_connect(LOCAL, ps_store_port(server), &(ps_store_rank){ 0, SIZE, &nobody, 5 }, &store));
    int n = snprintf(text, sizeof text, "%d 5", port);
    OK(ps_store_set(store, "watch", text, n));
    memset(&members[1], 0, sizeof members[1]);
    members[1].rank = 1;
    members[1].port = ps_store_port(server);
    members[1].silence_s = 1;
    members[1].timeout_s = m.kind == WATCH_KINDS ? 0.5 : FAR_S;
    pthread_create(&members[1].thread, NULL, start, &members[1]);
    int fd = accept(listener, NULL, NULL);
    watch_message hello;
    ps_run_derive(&nobody, text, &run);
    let_in(fd, &run);
    CHECK(hear(fd, &hello, members[0].why, PROMPT_S) && hello.kind == WATCH_HELLO && hello.rank == 1);
    m.magic = MAGIC;
    m.nbytes = 4;
    if (m.kind != WATCH_KINDS) CHECK(ps_net_transfer(fd, &m, sizeof m, true, ps_now() + PROMPT_S) == 1);
    if (m.kind != WATCH_KINDS)
        CHECK(ps_net_transfer(fd, (void *)(uintptr_t)"home", 4, true, ps_now() + PROMPT_S) == 1);
    if (!stay) {
        close(fd);
        fd = -1;
    }
    pthread_join(members[1].thread, NULL);
    close(listener);
    ps_store_close(store, true);
    *out_fd = fd;
    return members[1].rc;
}

static void end_rank_1(int fd)
{
    finish(&members[1]);
    if (fd >= 0) close(fd);
    ps_store_stop(server, false);
}

static void test_rank_0(void)
{
    int fd;
    watch_message welcome = { .kind = WATCH_WELCOME, .seconds = 1 }, other = { .kind = WATCH_BEAT },
                  slower = { .kind = WATCH_WELCOME, .seconds = 2 }, nothing = { .kind = WATCH_KINDS };
    CHECK(answer_with(other, true, &fd) == PS_EIO
          && strstr(members[1].why, "joining the other ranks: rank 1 reached the watch of rank 0, which hung up"));
    end_rank_1(fd);
    CHECK(answer_with(slower, true, &fd) == PS_EINVAL && strstr(members[1].why, "heartbeat is 1 s on rank 1 and 2 s"));
    end_rank_1(fd);
    CHECK(answer_with(nothing, true, &fd) == PS_ETIME && strstr(members[1].why, "does not answer"));
    end_rank_1(fd);
    CHECK(answer_with(nothing, false, &fd) == PS_EIO);
    end_rank_1(fd);

    CHECK(answer_with(welcome, false, &fd) == 0);              /* it dies */
    wait_over(members[1].watch, PROMPT_S);
    FAILS(ps_watch_verdict(members[1].watch), PS_EIO, "rank 0 (home) died");
    end_rank_1(fd);
    CHECK(answer_with(welcome, true, &fd) == 0);               /* it stays silent */
    enter(1, "barrier", 0, -1);
    FAILS(ps_watch_complain(members[1].watch, 0, PS_WATCH_LOST, 2, 1, "reset"), PS_ETIME, "rank 0 (home) is silent");
    end_rank_1(fd);
}

static void test_memory(void)
{
    for (int n = 0; n < 16; n++) {
        if (!OK(ps_store_serve(LOCAL, 0, SIZE, &nobody, &server))) return;
        ps_test_fail_alloc(n, 1);
        for (int r = 0; r < 2; r++) {
            memset(&members[r], 0, sizeof members[r]);
            members[r].rank = r;
            members[r].port = ps_store_port(server);
            members[r].silence_s = 1;
            members[r].timeout_s = 0.2;
            start(&members[r]);
        }
        ps_test_fail_alloc(-1, 0);
        for (int r = 1; r >= 0; r--) {
            CHECK(members[r].rc == 0 || members[r].why[0]);
            finish(&members[r]);
        }
        ps_store_stop(server, false);
    }
}

int main(void)
{
    test_quiet();
    test_missing();
    test_groups();
    test_circle();
    test_messages();
    test_blame();
    test_death_and_silence();
    test_strangers();
    test_files();
    test_rank_0();
    test_memory();
    return end_checks();
}
