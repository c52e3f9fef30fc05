/* SPDX-License-Identifier: BSD-3-Clause
 * Messages between two ranks (p2p/p2p.h). Ranks are threads of this process; those that die or are stopped are
 * processes. */
#define _GNU_SOURCE
#include "ranks_check.h"
#include "comm/group.h"
#include "p2p/p2p.h"
#include "tensor/tensor.h"
#include <signal.h>
#include <sys/wait.h>

#ifdef PS_HAVE_GLOO
enum { SIZE = 3 };

static ps_p2p_tag tag_of(char kind, int vstage, int micro)
{
    return (ps_p2p_tag){ .kind = kind, .vstage = vstage, .micro = micro };
}

static bool send_to(ps_p2p *p, int peer, int lane, ps_p2p_tag tag, ps_tensor *t, ps_p2p_request **q)
{
    ps_p2p_note note = { .when = tag.micro + 0.25, .value = { p ? ps_p2p_rank(p) : 0, -1 } };
    return ps_p2p_send(p, peer, lane, &tag, &note, t, q) == 0;
}

static bool recv_from(ps_p2p *p, int peer, int lane, ps_p2p_tag tag, ps_tensor *t, ps_p2p_request **q)
{
    return ps_p2p_recv(p, peer, lane, &tag, t, q) == 0;
}

/* The steady state of a pipeline in which both neighbours send first. There are messages of several micro-batches at
 * once, and the last stage's losses. Payloads are larger than socket buffers. */
static int both_first(struct member *m, ps_ctx *ctx, ps_group *g)
{
    enum { MICROS = 6, N = 200000 };
    ps_p2p *p;
    int rank = m->rank, last = m->size - 1;
    if (!expect(m, ps_p2p_open(g, &p) == 0, "open")) return 0;
    ps_tensor *up[MICROS], *down[MICROS], *x = numbers(ctx, PS_F32, N, 0, 0), *dy = numbers(ctx, PS_F32, N, 0, 0);
    ps_p2p_request *sent_up[MICROS], *sent_down[MICROS], *sent_loss[MICROS][MOST], *q;
    ps_p2p_note note;
    for (int i = 0; i < MICROS; i++) {
        up[i] = numbers(ctx, PS_F32, N, 100 * rank + i, 1);
        down[i] = numbers(ctx, PS_F32, N, -100 * rank - i, 1);
        if (rank < last) expect(m, send_to(p, rank + 1, PS_P2P_UP, tag_of('F', rank, i), up[i], &sent_up[i]), "up");
        if (rank > 0)
            expect(m, send_to(p, rank - 1, PS_P2P_DOWN, tag_of('I', rank, i), down[i], &sent_down[i]), "down");
        for (int r = 0; rank == last && r < last; r++)
            expect(m, send_to(p, r, PS_P2P_LOSS, tag_of('L', rank, i), NULL, &sent_loss[i][r]), "loss");
    }
    for (int i = 0; i < MICROS && !m->bad; i++) {
        if (rank < last) {                 /* the last lane first, since no lane waits for another */
            expect(m, recv_from(p, last, PS_P2P_LOSS, tag_of('L', last, i), NULL, &q), "loss");
            expect(m, ps_p2p_wait(q, &note) == 0 && note.when == i + 0.25 && note.value[0] == last, "its values");
            expect(m, recv_from(p, rank + 1, PS_P2P_DOWN, tag_of('I', rank + 1, i), dy, &q), "down");
            expect(m, ps_p2p_wait(q, &note) == 0 && note.value[0] == rank + 1, "a gradient");
            expect(m, at(dy, N - 1) == -100 * (rank + 1) - i + N - 1, "its value");
        }
        if (rank > 0) {
            expect(m, recv_from(p, rank - 1, PS_P2P_UP, tag_of('F', rank - 1, i), x, &q), "up");
            expect(m, ps_p2p_wait(q, NULL) == 0 && at(x, N - 1) == 100 * (rank - 1) + i + N - 1, "an activation");
        }
    }
    for (int i = 0; i < MICROS; i++) {
        if (rank < last) expect(m, ps_p2p_wait(sent_up[i], NULL) == 0, "sent up");
        if (rank > 0) expect(m, ps_p2p_wait(sent_down[i], NULL) == 0, "sent down");
        for (int r = 0; rank == last && r < last; r++) expect(m, ps_p2p_wait(sent_loss[i][r], NULL) == 0, "sent");
        ps_tensor_release(up[i]);
        ps_tensor_release(down[i]);
    }
    int64_t each = (int64_t)MICROS * N * 4;
    expect(m, ps_p2p_bytes_sent(p) == each * ((rank < last) + (rank > 0)), "bytes");
    expect(m, ps_group_barrier(g) == 0, "collectives beside");
    ps_tensor_release(x);
    ps_tensor_release(dy);
    ps_p2p_close(p);
    return 0;
}

/* Receives before and after sends, unknown shapes, empty tensors, several parts, and messages between all pairs of
 * ranks. */
static int kinds(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_p2p *p;
    ps_p2p_request *q[8], *got;
    ps_p2p_header h;
    int rank = m->rank, size = m->size;
    if (!expect(m, ps_p2p_open(g, &p) == 0 && ps_p2p_size(p) == size, "open")) return 0;
    int64_t shape[3] = { 2, 3, 4 };
    ps_tensor *cube, *into, *none = numbers(ctx, PS_I64, 0, 0, 0), *mine, *theirs = numbers(ctx, PS_BF16, 5, 0, 0);
    ps_tensor_new(ctx, PS_F16, 0, 3, shape, &cube);
    ps_tensor_new(ctx, PS_F16, 0, 3, shape, &into);
    if (rank == 0) {                       /* two parts of one action, then a tag alone, then no elements */
        ps_p2p_tag second = tag_of('F', 0, 7);
        second.part = 1;
        expect(m, send_to(p, 1, PS_P2P_UP, tag_of('F', 0, 7), cube, &q[0]), "cube");
        expect(m, send_to(p, 1, PS_P2P_UP, second, none, &q[1]), "none");
        expect(m, send_to(p, 1, PS_P2P_UP, tag_of('Y', 0, -1), NULL, &q[2]), "alone");
        for (int i = 0; i < 3; i++) expect(m, ps_p2p_wait(q[i], NULL) == 0, "sent");
    } else if (rank == 1) {
        ps_p2p_tag second = tag_of('F', 0, 7);
        second.part = 1;
        expect(m, ps_p2p_next(p, 0, PS_P2P_UP, &h) == 0 && h.dtype == PS_F16 && h.n_dims == 3 && h.shape[2] == 4 &&
               h.tag.kind == 'F' && h.tag.micro == 7 && h.note.when == 7.25, "what comes");
        expect(m, ps_p2p_next(p, 0, PS_P2P_UP, &h) == 0 && h.tag.part == 0, "it stays");
        expect(m, recv_from(p, 0, PS_P2P_UP, tag_of('F', 0, 7), into, &got) && ps_p2p_wait(got, NULL) == 0, "cube");
        expect(m, recv_from(p, 0, PS_P2P_UP, second, none, &got) && ps_p2p_wait(got, NULL) == 0, "none");
        expect(m, ps_p2p_next(p, 0, PS_P2P_UP, &h) == 0 && h.dtype == -1 && h.tag.micro == -1, "alone");
        expect(m, recv_from(p, 0, PS_P2P_UP, tag_of('Y', 0, -1), NULL, &got) && ps_p2p_wait(got, NULL) == 0, "alone");
    }
    /* Posted before the sends. A receive is not complete before its message was sent, and is complete some time
     * later. */
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    expect(m, recv_from(p, before, PS_P2P_TIED, tag_of('W', before, 0), theirs, &got), "ahead");
    expect(m, ps_p2p_test(got) == 0, "not yet");
    expect(m, ps_group_barrier(g) == 0, "barrier");
    mine = numbers(ctx, PS_BF16, 5, rank, 0);
    expect(m, send_to(p, next, PS_P2P_TIED, tag_of('W', rank, 0), mine, &q[0]), "send");
    for (int i = 0; i < 4000 && !(ps_p2p_test(got) && ps_p2p_test(q[0])); i++) usleep(1000);
    expect(m, ps_p2p_test(got) == 1 && ps_p2p_test(q[0]) == 1, "now");
    expect(m, ps_p2p_wait(got, NULL) == 0 && at(theirs, 4) == before && ps_p2p_wait(q[0], NULL) == 0, "value");
    /* Invalid calls are rejected, and do not end the run. */
    ps_tensor *meta, *flat, *turned;
    int64_t two[2] = { 2, 12 };
    ps_tensor_new(ctx, PS_F32, 0, 2, two, &flat);
    ps_meta across = { .dtype = PS_F32, .ndim = 2, .shape = { 12, 2 }, .stride = { 1, 12 } };
    ps_tensor_view(flat, &across, &turned);
    int device = -1;
    expect(m, ps_device_find(ctx, "meta", &device) == 0, "device");
    expect(m, ps_tensor_new(ctx, PS_F32, device, 2, two, &meta) == 0, "meta");
    const struct { int peer, lane; ps_tensor *t; int rc; const char *why; } bad[] = {
        { rank, 0, NULL, PS_EINVAL, "in a group of" }, { -1, 0, NULL, PS_EINVAL, "in a group of" },
        { size, 0, NULL, PS_EINVAL, "in a group of" }, { next, PS_P2P_LANES, NULL, PS_EINVAL, "no lane 4" },
        { next, -1, NULL, PS_EINVAL, "no lane -1" }, { next, 0, turned, PS_EINVAL, "not contiguous" },
        { next, 0, meta, PS_EUNSUP, "on device meta" } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ps_p2p_tag tag = tag_of('F', 0, 0);
        expect(m, ps_p2p_send(p, bad[i].peer, bad[i].lane, &tag, NULL, bad[i].t, &q[0]) == bad[i].rc &&
               strstr(ps_error_message(), bad[i].why), bad[i].why);
        expect(m, ps_p2p_recv(p, bad[i].peer, bad[i].lane, &tag, bad[i].t, &q[0]) == bad[i].rc, bad[i].why);
    }
    expect(m, ps_group_barrier(g) == 0, "goes on");
    ps_tensor_release(cube), ps_tensor_release(into), ps_tensor_release(none), ps_tensor_release(theirs);
    ps_tensor_release(mine), ps_tensor_release(meta), ps_tensor_release(flat), ps_tensor_release(turned);
    ps_p2p_close(p);
    return 0;
}

/* -- failures ------------------------------------------------------------------------------------------------------ */

/* Rank 0 sends, rank 1 expects another message, and rank 2 waits in a collective. All ranks get the difference as an
 * error. */
static ps_p2p_tag wrong_tag;
static int wrong_dtype, wrong_numel;
static const char *wrong_why;
static int mismatch(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_p2p *p;
    ps_p2p_request *q = NULL;
    if (ps_p2p_open(g, &p) < 0) {          /* the other ranks have already failed */
        expect(m, m->rank == 2 && strstr(ps_error_message(), wrong_why), "open");
        return 0;
    }
    ps_tensor *t = m->rank == 0 ? numbers(ctx, PS_F32, 8, 1, 0)
                                : wrong_numel ? numbers(ctx, wrong_dtype, wrong_numel, 0, 0) : NULL;
    int rc = 0;
    if (m->rank == 0) {
        ps_p2p_tag tag = tag_of('F', 0, 3);            /* the receiver can find the difference before the payload is
                                                        * sent */
        rc = ps_p2p_send(p, 1, PS_P2P_UP, &tag, NULL, t, &q);
        if (rc == 0) rc = ps_p2p_wait(q, NULL);
        expect(m, rc < 0, "the sender");
    } else if (m->rank == 1) {
        rc = ps_p2p_recv(p, 0, PS_P2P_UP, &wrong_tag, t, &q);
        if (rc == 0) rc = ps_p2p_wait(q, NULL);
        expect(m, rc == PS_EINVAL, "the receiver's wait");
    } else {
        rc = ps_group_barrier(g);
        expect(m, rc < 0, "a barrier");
    }
    expect(m, strstr(ps_error_message(), wrong_why) != NULL, wrong_why);
    const char *came = "from rank 0, which sent F of micro-batch 3, stage 0: fp32 [8] (lane up)";
    expect(m, strstr(ps_error_message(), came) != NULL, came);
    ps_p2p_tag next = tag_of('F', 0, 4);
    expect(m, ps_p2p_send(p, (m->rank + 1) % 3, PS_P2P_UP, &next, NULL, NULL, &q) < 0, "nothing goes on");
    expect(m, ps_p2p_recv(p, (m->rank + 1) % 3, PS_P2P_UP, &next, NULL, &q) < 0 || ps_p2p_wait(q, NULL) < 0, "at all");
    if (t) ps_tensor_release(t);
    ps_p2p_close(p);
    return 0;
}

static void mismatches(void)
{
    const struct { ps_p2p_tag tag; int dtype, numel; const char *why; } list[] = {
        { tag_of('F', 0, 4), PS_F32, 8, "rank 1 expects F of micro-batch 4, stage 0: fp32 [8] " },
        { tag_of('F', 2, 3), PS_F32, 8, "rank 1 expects F of micro-batch 3, stage 2: fp32 [8] " },
        { tag_of('I', 0, 3), PS_F32, 8, "rank 1 expects I of micro-batch 3, stage 0: fp32 [8] " },
        { tag_of('F', 0, 3), PS_F32, 7, "rank 1 expects F of micro-batch 3, stage 0: fp32 [7] " },
        { tag_of('F', 0, 3), PS_I32, 8, "rank 1 expects F of micro-batch 3, stage 0: int32 [8] " },
        { tag_of('F', 0, 3), PS_F32, 0, "rank 1 expects F of micro-batch 3, stage 0, without a tensor " } };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        wrong_tag = list[i].tag, wrong_dtype = list[i].dtype, wrong_numel = list[i].numel, wrong_why = list[i].why;
        with_group_of(3, mismatch);
    }
}

/* One rank's step fails while the other ranks wait for it, in messages and in a collective. The rank keeps its own
 * error. */
static int aborts(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_p2p *p;
    ps_p2p_request *q;
    if (!expect(m, ps_p2p_open(g, &p) == 0, "open")) return 0;
    ps_p2p_request *ready;
    int rc;
    for (int r = 0; m->rank == 1 && r < 3; r += 2)     /* all ranks have opened it */
        if (expect(m, recv_from(p, r, PS_P2P_UP, tag_of('R', r, 0), NULL, &q), "ready")) ps_p2p_wait(q, NULL);
    if (m->rank != 1 && !expect(m, send_to(p, 1, PS_P2P_UP, tag_of('R', m->rank, 0), NULL, &ready), "ready")) return 0;
    if (m->rank == 1) {
        ps_fail(PS_ENOMEM, "mine");
        ps_p2p_abort(p, "stage 1, I of micro-batch 2: no memory");
        expect(m, !strcmp(ps_error_message(), "mine"), "its error");
    } else {
        ps_p2p_tag tag = tag_of('I', 1, 2);
        rc = m->rank == 2 ? ps_group_barrier(g) : ps_p2p_recv(p, 1, PS_P2P_DOWN, &tag, NULL, &q);
        if (rc == 0) rc = ps_p2p_wait(q, NULL);
        expect(m, rc == PS_EIO || rc == PS_ESTATE, "told");             /* ESTATE if the rank made this call
                                                                         * afterwards */
        expect(m, strstr(ps_error_message(), "rank 1 (") != NULL, "who");
        expect(m, strstr(ps_error_message(), ") gave up: stage 1, I of micro-batch 2: no memory") != NULL, "why");
    }
    ps_p2p_close(p);
    return 0;
}

/* No message arrives within the time-out. The error names the rank that did not send, and its position in the step. */
static int late(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_p2p *p;
    ps_p2p_request *q;
    ps_p2p_tag now = tag_of('W', 1, 5);
    ps_p2p_header h;
    if (!expect(m, ps_p2p_open(g, &p) == 0, "open")) return 0;
    int rc = 0;
    if (m->rank == 1) {
        ps_p2p_at(p, &now);
        usleep(3000000);
        ps_p2p_at(p, NULL);
        rc = ps_group_barrier(g);
    } else if (m->rank == 0) {
        if (expect(m, recv_from(p, 1, PS_P2P_DOWN, tag_of('I', 1, 2), NULL, &q), "recv")) rc = ps_p2p_wait(q, NULL);
    } else rc = ps_p2p_next(p, 0, PS_P2P_UP, &h);
    expect(m, rc < 0, "late");
    const char *why = strstr(ps_error_message(), "rank 1 (");      /* or the error says that rank 0 sent nothing to
                                                                    * rank 2 */
    expect(m, why ? strstr(why, ") is alive but has not come to meet rank 0's recv I of micro-batch 2, stage 1 within "
           "2 s; it is in W of micro-batch 5, stage 1 of world") != NULL
           : strstr(ps_error_message(), "meet rank 2's recv (lane up) within 2 s") != NULL, "who, and where");
    ps_p2p_close(p);
    return 0;
}

/* A rank ends its script while another rank waits for its message. */
static int ends(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_p2p *p;
    ps_p2p_request *q;
    if (!expect(m, ps_p2p_open(g, &p) == 0, "open")) return 0;
    if (m->rank == 0 && expect(m, recv_from(p, 2, PS_P2P_UP, tag_of('F', 2, 0), NULL, &q), "recv")) {
        expect(m, ps_p2p_wait(q, NULL) == PS_EIO, "ended");
        expect(m, strstr(ps_error_message(), "rank 2 (") && strstr(ps_error_message(), "waits for it in recv F of "
               "micro-batch 0, stage 2 of world with rank 2"), "who, and who waits");
    }
    ps_p2p_close(p);
    return 0;
}

/* Messages that are never received, and receives whose messages are never sent. Closing waits for none of them. */
static int left_over(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_p2p *p;
    ps_p2p_request *q;
    if (!expect(m, ps_p2p_open(g, &p) == 0, "open")) return 0;
    ps_tensor *t = numbers(ctx, PS_F32, 100000, 1, 0);
    if (m->rank == 0) expect(m, send_to(p, 1, PS_P2P_UP, tag_of('F', 0, 0), t, &q), "send");
    if (m->rank == 0) expect(m, send_to(p, 1, PS_P2P_UP, tag_of('F', 0, 1), t, &q), "send");
    if (m->rank == 1) expect(m, recv_from(p, 2, PS_P2P_UP, tag_of('F', 2, 0), t, &q), "recv");
    expect(m, ps_group_barrier(g) == 0, "all have begun");
    ps_p2p_close(p);
    ps_tensor_release(t);
    return 0;
}

/* Every allocation in a rank's calls fails once. This is an error of that rank, or of all ranks, and nothing hangs. */
static int nth;
static int without_memory(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_p2p *p = NULL;
    ps_p2p_request *up = NULL, *down = NULL;
    ps_tensor *t = numbers(ctx, PS_F32, 10, m->rank, 0), *u = numbers(ctx, PS_F32, 10, 0, 0);
    int other = 1 - m->rank, rc;
    if (!expect(m, ps_group_barrier(g) == 0, "barrier")) return 0;
    if (m->rank == 0) ps_test_fail_alloc(nth, 1);
    rc = ps_p2p_open(g, &p);
    for (int i = 0; rc == 0 && i < 3; i++) {
        ps_p2p_tag mine = tag_of('F', m->rank, i), theirs = tag_of('F', other, i);
        rc = ps_p2p_recv(p, other, PS_P2P_UP, &theirs, u, &down);
        if (rc == 0) rc = ps_p2p_send(p, other, PS_P2P_UP, &mine, NULL, t, &up);
        if (rc == PS_ENOMEM) ps_p2p_abort(p, ps_error_message());
        if (rc == 0) rc = ps_p2p_wait(up, NULL);
        if (rc == 0) rc = ps_p2p_wait(down, NULL);
        if (rc == 0) expect(m, at(u, 9) == other, "value");
    }
    if (m->rank == 0) ps_test_fail_alloc(-1, 0);
    expect(m, rc == 0 || rc == PS_ENOMEM || rc == PS_EIO || rc == PS_ESTATE, "an error");
    expect(m, rc == 0 || strlen(ps_error_message()) > 0, "with a message");
    ps_p2p_close(p);
    ps_tensor_release(t);
    ps_tensor_release(u);
    return 0;
}

/* -- processes that die or are stopped ----------------------------------------------------------------------------- */

/* This signal ends rank 1 of three during its action. The other ranks wait, one for a message and one in a
 * collective. Each of them writes its error to the pipe. */
static int victim(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_p2p *p;
    ps_p2p_request *q;
    ps_p2p_tag now = tag_of('F', 1, 3);
    int rc = ps_p2p_open(g, &p);
    if (rc == 0 && m->rank == 1) {
        rc = ps_p2p_send(p, 0, PS_P2P_DOWN, &now, NULL, NULL, &q);
        if (rc == 0) rc = ps_p2p_wait(q, NULL);
        ps_p2p_at(p, &now);
        usleep(400000);                    /* a heartbeat reports its position */
        raise(m->bad);
    }
    if (rc == 0 && m->rank == 0) {
        rc = ps_p2p_recv(p, 1, PS_P2P_DOWN, &now, NULL, &q);
        if (rc == 0) rc = ps_p2p_wait(q, NULL);
        if (rc == 0) rc = ps_p2p_recv(p, 1, PS_P2P_DOWN, &now, NULL, &q);
        if (rc == 0) rc = ps_p2p_wait(q, NULL);
    }
    if (rc == 0 && m->rank == 2) rc = ps_group_barrier(g);
    dprintf(atoi(m->why), "%d|rank %d: %s\n", rc, m->rank, ps_error_message());
    ps_p2p_close(p);
    return 0;
}

static void processes(int signal_number, int code, const char *word)
{
    char path[] = "/tmp/ps_test_p2p_XXXXXX", text[4000] = "";
    int fd[2], n = 0;
    pid_t child[SIZE];
    close(mkstemp(path));
    CHECK(pipe(fd) == 0);
    fflush(stdout);
    double from = ps_now();
    for (int r = 0; r < SIZE; r++) {
        child[r] = fork();
        if (child[r]) continue;
        struct member m = { .rank = r, .size = SIZE, .timeout_s = FAR_S, .heartbeat_s = 1, .run = victim,
                            .bad = signal_number };
        snprintf(m.rendezvous, sizeof m.rendezvous, "file://%s", path);
        snprintf(m.why, sizeof m.why, "%d", fd[1]);
        member_main(&m);
        _exit(0);
    }
    close(fd[1]);
    for (int lines = 0; lines < SIZE - 1 && n < (int)sizeof text - 1;) {
        int64_t got = read(fd[0], text + n, sizeof text - 1 - (size_t)n);
        if (got <= 0) break;
        for (int64_t i = 0; i < got; i++) lines += text[n + i] == '\n';
        n += (int)got;
    }
    double seconds = ps_now() - from;
    for (int r = 0; r < SIZE; r++) {
        if (r == 1) kill(child[r], SIGKILL);
        waitpid(child[r], NULL, 0);
    }
    close(fd[0]);
    unlink(path);
    char first[32], third[32];
    snprintf(first, sizeof first, "%d|rank 0: ", code);
    snprintf(third, sizeof third, "%d|rank 2: ", code);
    char *other = strstr(strstr(text, word) ? strstr(text, word) + 1 : text, word);
    bool told = strstr(text, first) && strstr(text, third) && other && seconds < PROMPT_S;
    if (!CHECK(told)) printf("    %g s: %s\n", seconds, text);
    CHECK(strstr(text, "rank 1 (") != NULL);
}
#endif

int main(void)
{
#ifdef PS_HAVE_GLOO
    processes(SIGKILL, PS_EIO, "it was last known in F of micro-batch 3, stage 1 of world");
    processes(SIGSTOP, PS_ETIME, "it was last known in F of micro-batch 3, stage 1 of world");
    signal(SIGPIPE, SIG_IGN);              /* ps_comm_gloo does the same */
    with_group_of(4, both_first);
    with_group_of(3, kinds);
    mismatches();
    with_group_of(3, aborts);
    with_group_for(3, 2, 5, late);
    with_group_of(3, ends);
    with_group_of(3, left_over);
    for (nth = 0; nth < 30; nth++) with_group_of(2, without_memory);
#endif
    return end_checks();
}
