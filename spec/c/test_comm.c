/* SPDX-License-Identifier: BSD-3-Clause
 * Groups whose ranks are threads of this process: calls of all ranks, planned calls, jobs, false peers, and groups cut
 * from groups. */
#define _GNU_SOURCE
#include "check.h"
#include "store_check.h"
#include "ranks_check.h"
#include "collectives/collectives.h"
#include "comm/group.h"
#include "rendezvous/store.h"
#include "transport/transport.h"
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

static void test_self(void)
{
    ps_ctx *ctx;
    ps_group *g;
    OK(ps_ctx_new(&ctx));
    if (!OK(ps_group_self(ctx, &g))) return;
    CHECK(ps_group_rank(g) == 0 && ps_group_size(g) == 1);
    ps_tensor *a = numbers(ctx, PS_F32, 5, 1, 1), *b = numbers(ctx, PS_F32, 5, 0, 0);
    ps_tensor *c = numbers(ctx, PS_I64, 5, 0, 0);
    OK(ps_group_all_reduce(g, a, PS_REDUCE_SUM));
    CHECK(at(a, 4) == 5);
    OK(ps_group_reduce_scatter(g, b, a));
    CHECK(at(b, 4) == 5);
    OK(ps_group_all_gather(g, a, b));
    OK(ps_group_all_gather(g, a, a));
    CHECK(at(a, 0) == 1);
    OK(ps_group_broadcast(g, c, 0));
    OK(ps_group_barrier(g));
    FAILS(ps_group_broadcast(g, c, 1), PS_EINVAL, "root 1 is not a rank");
    OK(ps_group_all_reduce(g, c, PS_REDUCE_SUM));
    FAILS(ps_group_all_reduce(g, c, 3), PS_EINVAL, "no reduction 3");
    int32_t self[1] = { 0 };
    ps_group *part = NULL;
    OK(ps_group_split(g, 1, self, "tp", &part));
    CHECK(ps_group_size(part) == 1 && !strcmp(ps_group_axis(part), "tp"));
    OK(ps_group_all_reduce(part, a, PS_REDUCE_MAX));
    ps_group_close(part);
    FAILS(ps_group_all_gather(g, a, c), PS_EINVAL, "one type");
    FAILS(ps_group_send(g, a, 0), PS_EINVAL, "no peer 0 for rank 0");
    FAILS(ps_group_recv(g, a, 3), PS_EINVAL, "no peer 3 for rank 0");
    FAILS(ps_group_raw(g, 0, a, b), PS_EUNSUP, "self");
    FAILS(group_of(ctx, "tcp://127.0.0.1:1", 2, 2, 1, 5, &g), PS_EINVAL, "rank 2");
    FAILS(group_of(ctx, "tcp://127.0.0.1:1", 0, 2, 0, 5, &g), PS_EINVAL, "time-out of 0");
    FAILS(group_of(ctx, "tcp://127.0.0.1:1", 0, 2, 1, 0.05, &g), PS_EINVAL, "heartbeat of 0.05");
    CHECK(ps_group_bytes_sent(g) == 0);
    ps_group_close(g);
    ps_group_close(NULL);
    for (int n = 0; n < 8; n++) {
        ps_test_fail_alloc(n, 1);
        int rc = ps_group_self(ctx, &g);
        ps_test_fail_alloc(-1, 0);
        CHECK(rc == 0 || rc == PS_ENOMEM);
        if (rc == 0) ps_group_close(g);
    }
    ps_tensor_release(a);
    ps_tensor_release(b);
    ps_tensor_release(c);
    ps_ctx_free(ctx);
}

#ifdef PS_HAVE_GLOO
enum { SIZE = 3 };
static void with_group(int (*run)(struct member *, ps_ctx *, ps_group *)) { with_group_of(SIZE, run); }

static int sums(struct member *m, ps_ctx *ctx, ps_group *g)
{
    static const int dtypes[] = { PS_F32, PS_BF16, PS_F16, PS_F64 };
    static const int64_t sizes[] = { 0, 1, 2, 7, 1000, 3 * 4096 };
    for (size_t d = 0; d < 4; d++)
        for (size_t s = 0; s < 6; s++) {
            int64_t n = sizes[s];
            ps_tensor *t = numbers(ctx, dtypes[d], n, m->rank + 1, 0);
            expect(m, ps_group_all_reduce(g, t, PS_REDUCE_SUM) == 0, "all_reduce");
            for (int64_t i = 0; i < n; i += n > 50 ? 37 : 1) expect(m, at(t, i) == 6, "sum");
            ps_tensor *in = numbers(ctx, dtypes[d], n * SIZE, m->rank, 0), *out = numbers(ctx, dtypes[d], n, 9, 0);
            expect(m, ps_group_reduce_scatter(g, out, in) == 0, "reduce_scatter");
            for (int64_t i = 0; i < n; i += n > 50 ? 37 : 1) expect(m, at(out, i) == 3, "part of a sum");
            ps_tensor_release(t);
            ps_tensor_release(in);
            ps_tensor_release(out);
        }
    return 0;
}

static int pieces(struct member *m, ps_ctx *ctx, ps_group *g)
{
    int64_t n = (6 << 20) + 5, shape[1] = { n }; /* several pieces, and shards of different sizes */
    ps_tensor *t;
    if (!expect(m, ps_tensor_new(ctx, PS_F32, 0, 1, shape, &t) == 0, "tensor")) return 0;
    float *values = malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = (float)(i % 1000 * (m->rank + 1));
    ps_tensor_write(t, values, n * 4);
    expect(m, ps_group_all_reduce(g, t, PS_REDUCE_SUM) == 0, "all_reduce");
    ps_tensor_read(t, values, n * 4);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong += values[i] != (float)(i % 1000 * 6);
    expect(m, wrong == 0, "pieces of a sum");
    if (m->rank == 1) for (int64_t i = 0; i < n; i++) values[i] = (float)(i % 777);
    ps_tensor_write(t, values, n * 4);
    expect(m, ps_group_broadcast(g, t, 1) == 0, "broadcast");
    ps_tensor_read(t, values, n * 4);
    for (int64_t i = 0; i < n; i++) wrong += values[i] != (float)(i % 777);
    expect(m, wrong == 0, "a spread broadcast");
    free(values);
    ps_tensor_release(t);
    return 0;
}

/* If one rank has no memory, or passes invalid arguments, all ranks get an error, and the group continues. */
static int one_fails(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_tensor *t = numbers(ctx, m->rank == 2 ? PS_U8 : PS_F32, 100, 1, 0), *u = numbers(ctx, PS_F32, 100, 1, 0);
    int rc = ps_group_all_reduce(g, t, PS_REDUCE_SUM);
    expect(m, rc == PS_EUNSUP, "cannot sum uint8");
    const char *word = m->rank == 2 ? "cannot sum uint8" : "rank 2 could not take part (EUNSUP)";
    expect(m, strstr(ps_error_message(), word) != NULL, "told");
    expect(m, ps_group_all_reduce(g, u, PS_REDUCE_SUM) == 0 && at(u, 0) == 3, "goes on");
    ps_tensor_release(t);
    ps_tensor_release(u);
    return 0;
}

/* The function table of a rank that completes each exchange late. */
static const ps_comm_table *prompt_table;
static int finish_late(ps_comm *comm, int lane)
{
    usleep(200000);
    return prompt_table->finish(comm, lane);
}

/* A call of all ranks that differs on rank 2 (`how` 0), or in which rank 2 cannot take part (1), or a message
 * between two ranks whose sizes differ (2). */
static int odd_call(struct member *m, ps_ctx *ctx, ps_group *g, int how)
{
    ps_tensor *t = numbers(ctx, PS_F32, how == 2 && m->rank == 2 ? 6 : 5, 1, 0);
    int rc = 0;
    if (how == 1 && m->rank == 2) rc = group_all_reduce(g, ON_HOST, PS_F32, NULL, 20, ps_fail(PS_ENOMEM, "full"));
    else if (how < 2) rc = ps_group_all_reduce(g, t, how == 0 && m->rank == 2 ? PS_REDUCE_MAX : PS_REDUCE_SUM);
    else if (m->rank != 1) rc = m->rank == 0 ? ps_group_send(g, t, 2) : ps_group_recv(g, t, 0);
    ps_tensor_release(t);
    return rc;
}

/* Ranks that end as soon as they have a call's error. The last rank to compare must still get its own error. */
static int odd_how;
static int all_compare(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_comm_table late = *g->comm->table;
    late.finish = finish_late;
    expect(m, ps_group_barrier(g) == 0, "a call that all ranks make");
    if (m->rank == 0) prompt_table = g->comm->table, g->comm->table = &late;
    int rc = odd_call(m, ctx, g, odd_how);
    if (m->rank == 0) g->comm->table = prompt_table;
    if (m->rank == 1 && odd_how == 2) return 0;
    const char *word = odd_how != 1 ? "the ranks disagree: " : m->rank == 2 ? "full"
                       : "rank 2 could not take part (ENOMEM)";
    expect(m, rc == (odd_how == 1 ? PS_ENOMEM : PS_EINVAL) && strstr(ps_error_message(), word), word);
    expect(m, !strstr(ps_error_message(), "gave up"), "its own error");
    if (m->rank != 0) g->comm->table->hang_up(g->comm);
    return 0;
}

/* Bytes are sent together with the headers, and the sums have the bits of larger calls. If calls differ, all ranks
 * get an error, no message is left over, and the group continues. */
static int small_calls(struct member *m, ps_ctx *ctx, ps_group *g)
{
    enum { FULL = GROUP_SMALL_NBYTES / 4, LARGE = FULL + 1 };
    ps_tensor *large = numbers(ctx, PS_F32, LARGE, 1.0 / (3 + m->rank), 0.1), *few = numbers(ctx, PS_F32, 5, 1, 0),
              *all = numbers(ctx, PS_F32, 5 * SIZE, 0, 0), *one = numbers(ctx, PS_F32, FULL, 1.0 / (3 + m->rank), 0.1);
    float a[LARGE], b[FULL];
    expect(m, ps_group_all_reduce(g, large, PS_REDUCE_SUM) == 0, "a large one");
    expect(m, ps_group_all_reduce(g, one, PS_REDUCE_SUM) == 0, "a small one");
    ps_tensor_read(large, a, sizeof a);
    ps_tensor_read(one, b, sizeof b);
    expect(m, !memcmp(a, b, sizeof b), "the same bits");
    for (int odd = 0; odd < SIZE; odd++)
        for (int how = 0; how < 5; how++) {
            int rc = m->rank != odd ? ps_group_all_reduce(g, few, PS_REDUCE_SUM)
                     : how == 0 ? ps_group_barrier(g) : how == 1 ? ps_group_all_reduce(g, one, PS_REDUCE_SUM)
                     : how == 2 ? ps_group_all_reduce(g, large, PS_REDUCE_SUM)
                     : how == 3 ? ps_group_broadcast(g, few, 0) : ps_group_all_reduce(g, few, PS_REDUCE_MAX);
            expect(m, rc == PS_EINVAL && strstr(ps_error_message(), "the ranks disagree"), "calls differ");
            expect(m, ps_group_all_gather(g, all, few) == 0, "goes on");
        }
    expect(m, ps_group_all_reduce(g, few, PS_REDUCE_SUM) == 0 && at(few, 4) == SIZE, "sums go on");
    int64_t sent = ps_group_bytes_sent(g);
    expect(m, ps_group_all_gather(g, all, few) == 0 && ps_group_bytes_sent(g) - sent == 20 * (SIZE - 1), "bytes");
    for (int i = 0; i < 5 * SIZE; i++) expect(m, at(all, i) == SIZE, "gathered");
    ps_tensor *tensors[] = { large, few, all, one };
    for (int i = 0; i < 4; i++) ps_tensor_release(tensors[i]);
    return 0;
}

enum { FEW = 5, MANY = 3000 };
/* Plans the calls of calls_as_planned. */
static void plan(ps_group *g)
{
    ps_rank_call list[] = {
        { .op = OP_ALL_REDUCE, .dtype = PS_F32, .nbytes = FEW * 4 },
        { .op = OP_ALL_GATHER, .dtype = PS_F32, .nbytes = FEW * 4 },
        { .op = OP_ALL_REDUCE, .dtype = PS_F32, .nbytes = MANY * 4 },
        { .op = OP_BROADCAST, .dtype = PS_F32, .nbytes = FEW * 4, .root = 1 },
        { .op = OP_REDUCE_SCATTER, .dtype = PS_F32, .nbytes = FEW * SIZE * 4 },
    };
    ps_rank_calls calls = { list, 5, 5 };
    for (int i = 0; i < 5; i++) list[i].group = ps_group_number(g);
    group_plan_prepare(g, &calls);
    ps_group_plan_begin(g, 1);
}

struct tensors { ps_tensor *few, *all, *many; };
static struct tensors tensors_new(struct member *m, ps_ctx *ctx)
{
    return (struct tensors){ numbers(ctx, PS_F32, FEW, m->rank + 1, 0), numbers(ctx, PS_F32, FEW * SIZE, 1, 0),
                             numbers(ctx, PS_F32, MANY, 1.0 / (3 + m->rank), 0.1) };
}
static void tensors_free(struct tensors t)
{
    ps_tensor_release(t.few);
    ps_tensor_release(t.all);
    ps_tensor_release(t.many);
}

/* Planned calls, and other calls between them, produce the same bits as calls without a plan, and send as many
 * bytes. */
static int calls_as_planned(struct member *m, ps_ctx *ctx, ps_group *g)
{
    float few[2][FEW], many[2][MANY];
    int64_t sent[2];
    for (int planned = 0; planned < 2; planned++) {
        struct tensors t = tensors_new(m, ctx);
        sent[planned] = ps_group_bytes_sent(g);
        if (planned) plan(g);
        if (planned) expect(m, ps_group_barrier(g) == 0, "a call that is not in the plan");
        expect(m, ps_group_all_reduce(g, t.few, PS_REDUCE_SUM) == 0 && at(t.few, 4) == 6, "all_reduce");
        expect(m, ps_group_all_gather(g, t.all, t.few) == 0 && at(t.all, FEW * SIZE - 1) == 6, "all_gather");
        expect(m, ps_group_all_reduce(g, t.many, PS_REDUCE_SUM) == 0, "a large all_reduce");
        expect(m, ps_group_all_reduce(g, t.few, PS_REDUCE_MAX) == 0, "a small call that is not in the plan");
        expect(m, ps_group_broadcast(g, t.few, 1) == 0, "broadcast");
        expect(m, ps_group_reduce_scatter(g, t.few, t.all) == 0 && at(t.few, 0) == 18, "reduce_scatter");
        expect(m, ps_group_all_gather(g, t.all, t.few) == 0, "behind the plan");
        ps_tensor_read(t.few, few[planned], sizeof few[0]);
        ps_tensor_read(t.many, many[planned], sizeof many[0]);
        sent[planned] = ps_group_bytes_sent(g) - sent[planned];
        tensors_free(t);
    }
    expect(m, !memcmp(few[0], few[1], sizeof few[0]) && !memcmp(many[0], many[1], sizeof many[0]), "bits");
    expect(m, sent[0] == sent[1], "bytes");
    expect(m, ps_group_planned(g) == 5, "went as planned");
    return 0;
}

/* If one rank makes another call, or fails, all ranks get an error, and the plan continues after the call. */
static int one_leaves_the_plan(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct tensors t = tensors_new(m, ctx);
    for (int how = 0; how < 4; how++) {
        bool odd = m->rank == 1;
        plan(g);
        int64_t planned = ps_group_planned(g);
        int rc = !odd || how == 3 ? 0 : how == 0 ? ps_group_barrier(g)
                 : how == 1 ? ps_group_all_reduce(g, t.many, PS_REDUCE_SUM)
                 : ps_group_all_reduce(g, t.few, PS_REDUCE_MAX);
        if (!odd) rc = ps_group_all_reduce(g, t.few, PS_REDUCE_SUM);
        if (odd && how == 3) rc = group_all_reduce(g, ON_HOST, PS_F32, NULL, FEW * 4, ps_fail(PS_ENOMEM, "full"));
        const char *word = how < 3 ? "the ranks disagree: rank 0 is in all_reduce (call "
                           : odd ? "full" : "rank 1 could not take part (ENOMEM)";
        expect(m, rc == (how < 3 ? PS_EINVAL : PS_ENOMEM) && strstr(ps_error_message(), word), "one leaves the plan");
        expect(m, ps_group_all_gather(g, t.all, t.few) == 0, "goes on");
        expect(m, ps_group_planned(g) - planned == (how < 3 ? 1 : 2), "the next call is the next of the plan");
    }
    tensors_free(t);
    return 0;
}

static atomic_int through;                 /* number of ranks that have passed a call; 0 before the group is created */
/* A call ends on some ranks before the others. A rank that ended the group now would also end it for the other
 * ranks. */
static void wait_for_all(const struct member *m)
{
    atomic_fetch_add(&through, 1);
    for (double until = ps_now() + PROMPT_S; atomic_load(&through) < m->size && ps_now() < until;) usleep(1000);
}

/* Messages between two ranks must not mix with a call of all ranks. The group ends, and no rank waits. */
static int pair_in_a_plan(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct tensors t = tensors_new(m, ctx);
    plan(g);
    if (m->rank == 0) expect(m, ps_group_send(g, t.few, 1) == 0, "send");
    if (m->rank == 1) expect(m, ps_group_recv(g, t.few, 0) == 0 && at(t.few, 0) == 1, "recv");
    expect(m, ps_group_all_gather(g, t.all, t.few) == 0, "the ranks go on");
    wait_for_all(m);
    double began = ps_now();
    int rc = m->rank == 2 ? ps_group_send(g, t.few, 0) : ps_group_all_reduce(g, t.few, PS_REDUCE_SUM);
    expect(m, rc < 0 && ps_now() - began < PROMPT_S, "a send within a call of all");
    tensors_free(t);
    return 0;
}

struct lone { char path[32], rendezvous[64], why[400]; int rc; double timeout_s, seconds; pthread_t thread; };
static void *lone_rank(void *arg)
{
    struct lone *l = arg;
    ps_ctx *ctx = NULL;
    ps_group *g = NULL;
    pthread_mutex_lock(&opening);
    bool opened = OK(ps_ctx_new(&ctx));
    pthread_mutex_unlock(&opening);
    if (!opened) return NULL;
    double start = ps_now();
    l->rc = group_of(ctx, l->rendezvous, 0, 2, l->timeout_s, 5, &g);
    l->seconds = ps_now() - start;
    snprintf(l->why, sizeof l->why, "%s", ps_error_message());
    ps_group_close(g);
    pthread_mutex_lock(&opening);
    ps_ctx_free(ctx);
    pthread_mutex_unlock(&opening);
    return NULL;
}

/* Starts rank 0 of two in a thread, which lone_end joins, and connects to its store as rank 1. Returns NULL if it
 * could not connect. */
static ps_store *lone_begin(struct lone *l, double timeout_s)
{
    ps_store_server *none;
    ps_store *s;
    *l = (struct lone){ .rc = 1, .timeout_s = timeout_s, .path = "/tmp/ps_test_comm_XXXXXX" };
    close(mkstemp(l->path));
    snprintf(l->rendezvous, sizeof l->rendezvous, "file://%s", l->path);
    pthread_create(&l->thread, NULL, lone_rank, l);
    if (!OK(join(l->rendezvous, 1, 2, FAR_S, &none, &s))) return NULL;
    OK(ps_store_meet(s, FAR_S));
    return s;
}

static void lone_end(struct lone *l, int rc, const char *why)
{
    pthread_join(l->thread, NULL);
    unlink(l->path);
    if (l->rc != rc) printf("    %d, %g s: %s\n", l->rc, l->seconds, l->why);
    CHECK(l->rc == rc && strstr(l->why, why));
}

/* Rank 1 sends an address and never connects. Rank 0 waits for its time-out and reports it. Gloo would wait five
 * times as long, which is more than PROMPT_S. Other tests run in the meantime. */
static void *no_connection(void *unused)
{
    enum { TIMEOUT_S = PROMPT_S / 5 + 1 };
    struct lone l;
    char address[512], text[4], why[64];
    int64_t nbytes;
    ps_store *s = lone_begin(&l, TIMEOUT_S);
    if (s) {
        OK(ps_store_get(s, "0", FAR_S, address, sizeof address, &nbytes));
        memset(address + 2, 0xff, 2);                                   /* a higher port, so that rank 0 waits for
                                                                         * rank 1 */
        OK(ps_store_set(s, "1", address, nbytes));
        FAILS(ps_store_get(s, "x", FAR_S, text, sizeof text, &nbytes), PS_EIO, "rank 0 failed: rank 0 of 2 could not");
        ps_store_close(s, false);
    }
    snprintf(why, sizeof why, "could not connect to the others within %d s", TIMEOUT_S);
    lone_end(&l, PS_ETIME, why);
    CHECK(l.seconds < PROMPT_S);
    return NULL;
}

/* Another process connects to rank 0's Gloo port in place of rank 1. It sends the messages of Gloo's ranks, except
 * the word that only the group's ranks know. */
static void test_false_peer(void)
{
    struct lone l;
    char token[128];
    struct { struct sockaddr_storage at; char rest[384]; } address;             /* in Gloo's layout */
    enum { SEND = 1, TAKES = 3, NBYTES = 32 };
    struct { uint64_t nbytes, opcode, slot, offset, length, roffset; } takes = { 48, TAKES, 1, 0, NBYTES, 0 },
        sends = { 48 + NBYTES, SEND, 1, 0, NBYTES, 0 }, heard;
    unsigned char word[NBYTES] = { 1 };
    int64_t nbytes;
    ps_store *s = lone_begin(&l, FAR_S);
    int fd = -1;
    if (s) {
        OK(ps_store_get(s, "group", FAR_S, token, sizeof token, &nbytes));
        OK(ps_store_get(s, "0", FAR_S, &address, sizeof address, &nbytes));
        struct sockaddr_in to = *(struct sockaddr_in *)&address.at;
        ((struct sockaddr_in *)&address.at)->sin_port = 0xffff;                 /* a higher port, so that rank 0
                                                                                 * waits for rank 1 */
        OK(ps_store_set(s, "1", &address, nbytes));
        fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(nbytes == 136 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
        for (heard.opcode = 0; heard.opcode != TAKES;)                          /* until it accepts words */
            if (!CHECK(recv(fd, &heard, sizeof heard, MSG_WAITALL) == sizeof heard)) break;
        CHECK(send(fd, &takes, sizeof takes, MSG_NOSIGNAL) == sizeof takes);
        CHECK(send(fd, &sends, sizeof sends, MSG_NOSIGNAL) == sizeof sends);
        CHECK(send(fd, word, sizeof word, MSG_NOSIGNAL) == sizeof word);
    }
    lone_end(&l, PS_EIO, "the process that connected to rank 0 as rank 1 does not belong to this run");
    if (s) {
        close(fd);
        ps_store_close(s, false);
    }
}

/* Shards of different sizes, one of them empty, and several jobs at once with calls between them. */
enum { JOBS = 6, PART = 3 << 20 };

static int64_t part_of(int job, int rank) { return job == 3 && rank == 1 ? 0 : PART / (job + 1) + 4 * rank; }

static void fill_parts(ps_comm_part *parts, float *values, int job, int rank)
{
    for (int r = 0; r < SIZE; r++) {
        parts[r] = (ps_comm_part){ values, part_of(job, r) / 4 * 4 };
        for (int64_t i = 0; i < parts[r].nbytes / 4; i++) values[i] = (float)((i % 100 + r) * (rank + 1));
        values += parts[r].nbytes / 4;
    }
}

/* Checks the result for part r: a sum has 6 times the first rank's numbers, and a gather has its owner's numbers. */
static bool parts_are(const ps_comm_part *parts, int rank, int op)
{
    for (int r = 0; r < SIZE; r++) {
        const float *values = parts[r].address;
        int factor = op == OP_CHUNK_GATHER ? r + 1 : op == OP_CHUNK_ALL_REDUCE || r == rank ? 6 : rank + 1;
        for (int64_t i = 0; i < parts[r].nbytes / 4; i++)
            if (values[i] != (float)((i % 100 + r) * factor)) return false;
    }
    return true;
}

static int jobs(struct member *m, ps_ctx *ctx, ps_group *g)
{
    static const int ops[JOBS] = { OP_CHUNK_GATHER, OP_CHUNK_REDUCE, OP_CHUNK_ALL_REDUCE, OP_CHUNK_REDUCE,
                                   OP_CHUNK_GATHER, OP_CHUNK_ALL_REDUCE };
    ps_job *job[JOBS];
    ps_comm_part parts[JOBS][SIZE];
    float *values[JOBS];
    for (int k = 0; k < JOBS; k++) {
        values[k] = malloc(SIZE * (PART + 64));
        fill_parts(parts[k], values[k], k, m->rank);
        expect(m, group_job_start(g, ops[k], ON_HOST, PS_F32, k, 7, parts[k], 0, &job[k]) == 0, "start");
    }
    expect(m, ps_group_barrier(g) == 0, "a call behind jobs");
    for (int k = 0; k < JOBS; k++) {
        expect(m, group_job_wait(g, job[k]) == 0, "job");
        expect(m, parts_are(parts[k], m->rank, ops[k]), "parts of a job");
        free(values[k]);
    }
    return 0;
}

/* If ranks differ, or a rank cannot take part, every job has its own error, and the next job succeeds. */
static int jobs_fail(struct member *m, ps_ctx *ctx, ps_group *g)
{
    float x[SIZE] = { 1, 1, 1 };
    ps_comm_part parts[SIZE] = { { &x[0], 4 }, { &x[1], 4 }, { &x[2], 4 } };
    ps_job *job[3];
    int mine = m->rank == 1 ? ps_fail(PS_ENOMEM, "no room here") : 0;
    group_job_start(g, OP_CHUNK_REDUCE, ON_HOST, PS_F32, 5, 0, parts, mine, &job[0]);
    group_job_start(g, OP_CHUNK_REDUCE, ON_HOST, PS_F32, 6, (uint64_t)(m->rank == 2), parts, 0, &job[1]);
    group_job_start(g, OP_CHUNK_ALL_REDUCE, ON_HOST, PS_F32, 7, 0, parts, 0, &job[2]);
    expect(m, group_job_wait(g, job[0]) == PS_ENOMEM, "one cannot");
    const char *word = m->rank == 1 ? "stripe 5: no room here" : "rank 1 could not take part (ENOMEM)";
    expect(m, strstr(ps_error_message(), word) != NULL, word);
    expect(m, group_job_wait(g, job[1]) == PS_EINVAL, "ranks differ");
    expect(m, strstr(ps_error_message(), "gradients of other parameters") != NULL, "on what");
    expect(m, group_job_wait(g, job[2]) == 0 && x[0] == 3, "the next one");
    return 0;
}

/* -- groups cut from a group --------------------------------------------------------------------------------------- */

/* Checks the values of sum, max and min, including integers and NaN. */
static int reductions(struct member *m, ps_ctx *ctx, ps_group *g)
{
    static const int dtypes[] = { PS_F32, PS_F64, PS_BF16, PS_F16, PS_I32, PS_I64, PS_U8 };
    static const double mine[] = { 4, 2, 9 }, results[] = { 15, 9, 2 };
    for (size_t d = 0; d < 7; d++)
        for (int op = PS_REDUCE_SUM; op <= PS_REDUCE_MIN; op++) {
            int sign = dtypes[d] == PS_U8 || op == PS_REDUCE_SUM ? 1 : -1;        /* includes values below 0 */
            if (dtypes[d] == PS_U8 && op == PS_REDUCE_SUM) continue;
            double result = sign > 0 ? results[op] : -results[op == PS_REDUCE_MAX ? PS_REDUCE_MIN : PS_REDUCE_MAX];
            ps_tensor *t = numbers(ctx, dtypes[d], 2000, sign * mine[m->rank], 0);
            expect(m, ps_group_all_reduce(g, t, op) == 0, "a reduction");
            for (int i = 0; i < 2000; i += 111) expect(m, at(t, i) == result, "its value");
            ps_tensor_release(t);
        }
    ps_tensor *bytes = numbers(ctx, PS_U8, 2, 1, 0);
    expect(m, ps_group_all_reduce(g, bytes, PS_REDUCE_SUM) == PS_EUNSUP, "a sum of bytes");
    ps_tensor_release(bytes);
    ps_tensor *nan = numbers(ctx, PS_F32, 2, m->rank == 1 ? 0.0 / 0.0 : 5, 0), *big = numbers(ctx, PS_I64, 1, 0, 0);
    expect(m, ps_group_all_reduce(g, nan, PS_REDUCE_MIN) == 0 && at(nan, 1) != at(nan, 1), "NaN stays");
    int64_t most = INT64_MAX - 1, sum;     /* exact, with the wrap-around of unsigned integers in C */
    ps_tensor_write(big, &most, 8);
    expect(m, ps_group_all_reduce(g, big, PS_REDUCE_SUM) == 0 && ps_tensor_read(big, &sum, 8) == 0 &&
           sum == (int64_t)(3 * (uint64_t)most), "a sum that wraps around");
    int rc = ps_group_all_reduce(g, big, m->rank == 2 ? PS_REDUCE_MAX : PS_REDUCE_MIN);
    expect(m, rc == PS_EINVAL && strstr(ps_error_message(), "another of sum, max and min"), "ranks that differ");
    ps_tensor_release(nan);
    ps_tensor_release(big);
    return 0;
}

/* Creates the rows and columns of a 2 x 2 mesh. */
static bool row_and_column(struct member *m, ps_group *g, ps_group **row, ps_group **column)
{
    int32_t r = m->rank / 2 * 2, c = m->rank % 2, mine[2] = { r, r + 1 }, other[2] = { c, c + 2 };
    return expect(m, ps_group_split(g, 2, mine, "tp", row) == 0, "rows") &&
           expect(m, ps_group_split(g, 2, other, "dp", column) == 0, "columns");
}

/* A thread of this rank that sums in one group while the rank itself sums in another group. */
struct beside { struct member *m; ps_ctx *ctx; ps_group *g; double first, sum; int turns; };
static void *sum_beside(void *arg)
{
    struct beside *b = arg;
    for (int i = 0; i < b->turns && !b->m->bad; i++) {
        float values[3000];
        ps_comm_part parts[2] = { { values, 6000 }, { values + 1500, 6000 } };
        for (int k = 0; k < 3000; k++) values[k] = (float)(b->first + k % 50 + i);
        ps_job *job;
        bool ok = group_job_start(b->g, OP_CHUNK_ALL_REDUCE, ON_HOST, PS_F32, i, 0, parts, 0, &job) == 0 &&
                  group_job_wait(b->g, job) == 0;
        expect(b->m, ok, "a job beside");
        for (int k = 0; ok && k < 3000; k++) ok = values[k] == (float)(b->sum + 2 * (k % 50 + i));
        expect(b->m, ok, "its sum");
    }
    return NULL;
}

/* Rows and columns work at the same time, and each rank has its own timing. The numbers must be those of each group. */
static int crossing(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_group *row, *column;
    if (!row_and_column(m, g, &row, &column)) return 0;
    expect(m, ps_group_size(row) == 2 && ps_group_rank(row) == m->rank % 2 && !strcmp(ps_group_axis(row), "tp"), "row");
    expect(m, ps_group_rank(column) == m->rank / 2 && ps_group_world_rank(column, 1) == m->rank % 2 + 2, "column");
    expect(m, !strcmp(ps_group_axis(g), "") && ps_group_world_rank(row, 2) == PS_EINVAL, "of all");
    struct beside b = { m, ctx, column, m->rank, m->rank % 2 * 2 + 2, 40 };
    pthread_t thread;
    pthread_create(&thread, NULL, sum_beside, &b);
    for (int i = 0; i < 40 && !m->bad; i++) {
        if (m->rank == i % 4) usleep(500);             /* rows continue while a column waits, and vice versa */
        ps_tensor *t = numbers(ctx, PS_F32, 1000, m->rank * 10 + i, 1);
        expect(m, ps_group_all_reduce(row, t, PS_REDUCE_SUM) == 0, "row's sum");
        expect(m, at(t, 999) == (m->rank / 2 * 4 + 1) * 10 + 2 * i + 2 * 999, "its value");
        ps_tensor_release(t);
    }
    pthread_join(thread, NULL);
    ps_tensor *t = numbers(ctx, PS_F64, 3, m->rank, 0), *u = numbers(ctx, PS_F64, 6, 0, 0);
    expect(m, ps_group_all_reduce(g, t, PS_REDUCE_SUM) == 0 && at(t, 0) == 6, "all ranks still add up");
    expect(m, ps_group_broadcast(column, t, 1) == 0, "broadcast in a column");
    ps_tensor_release(t);
    t = numbers(ctx, PS_F64, 3, m->rank, 0);
    expect(m, ps_group_all_gather(row, u, t) == 0 && at(u, 0) == m->rank / 2 * 2 && at(u, 5) == m->rank / 2 * 2 + 1,
           "gather in a row");
    if (m->rank % 2 == 0) expect(m, ps_group_send(row, t, 1) == 0, "send");
    else expect(m, ps_group_recv(row, t, 0) == 0 && at(t, 0) == m->rank - 1, "recv");
    /* A group split from a row, in another order. It outlives its parent. */
    int32_t turned[2] = { 1, 0 };
    ps_group *again = NULL;
    expect(m, ps_group_split(row, 2, turned, "pp", &again) == 0 && ps_group_rank(again) == 1 - m->rank % 2, "again");
    ps_group_close(row);
    expect(m, ps_group_all_gather(again, u, t) == 0, "a group after its parent's end");
    ps_tensor_release(t);
    ps_tensor_release(u);
    ps_group_close(column);
    ps_group_close(again);
    return 0;
}

/* Calls that do not match are errors on all ranks, and the parent group continues. */
static int bad_cuts(struct member *m, ps_ctx *ctx, ps_group *g)
{
    int32_t all[4] = { 0, 1, 2, 3 }, pair[2] = { m->rank / 2 * 2, m->rank / 2 * 2 + 1 }, alone = m->rank;
    ps_group *none = NULL;
    int rc = ps_group_split(g, m->rank == 3 ? 4 : 2, m->rank == 3 ? all : pair, "tp", &none);
    expect(m, rc == PS_EINVAL && strstr(ps_error_message(), "rank 2 makes a group tp of 2 ranks, rank 3 among them, "
           "which makes a group tp of 4"), "lists that differ");
    rc = ps_group_split(g, 2, pair, m->rank == 0 ? "tp" : "pp", &none);
    expect(m, rc == PS_EINVAL && strstr(ps_error_message(), "rank 0 makes a group tp of 2 ranks, rank 1"), "names");
    int32_t foreign[2] = { 0, 1 }, high[2] = { m->rank, 4 }, twice[2] = { m->rank, m->rank };
    const struct { int n; const int32_t *ranks; const char *axis, *why; } bad[] = {
        { 2, foreign, "tp", "rank 2 passed a list without itself" }, { 2, high, "tp", "no rank 4 in a group of 4" },
        { 2, twice, "tp", "rank 2 is in the list twice" }, { 5, all, "tp", "5 ranks were requested of 4" },
        { 0, all, "tp", "0 ranks were requested of 4" },
        { 2, pair, "", "'' cannot be the name" }, { 2, pair, "t p", "'t p' cannot be the name" },
        { 2, pair, "sixteen_letters_", "1 to 15 letters" } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {            /* only rank 2 makes a mistake */
        bool errs = m->rank == 2;
        rc = ps_group_split(g, errs ? bad[i].n : 2, errs ? bad[i].ranks : pair, errs ? bad[i].axis : "tp", &none);
        expect(m, rc == PS_EINVAL && strstr(ps_error_message(), errs ? bad[i].why : "rank 2 could not take part"),
               bad[i].why);
    }
    expect(m, ps_group_split(g, 1, &alone, "ep", &none) == 0 && ps_group_barrier(none) == 0, "a group of one");
    ps_tensor *t = numbers(ctx, PS_F32, 4, m->rank, 0);
    expect(m, ps_group_all_reduce(none, t, PS_REDUCE_SUM) == 0 && at(t, 0) == m->rank, "its sum");
    expect(m, ps_group_all_reduce(g, t, PS_REDUCE_MAX) == 0 && at(t, 0) == 3, "the parent goes on");
    ps_group_close(none);
    /* Errors about ranks of a group that disagree contain the ranks' numbers in the world. */
    expect(m, ps_group_split(g, 2, pair, "tp", &none) == 0, "rows");
    rc = m->rank == 3 ? ps_group_barrier(none) : ps_group_all_reduce(none, t, PS_REDUCE_SUM);
    const char *why = "the ranks of tp disagree: rank 2 is in all_reduce (call 0, fp32, 16 bytes), rank 3 in barrier";
    expect(m, m->rank < 2 ? rc == 0 : rc == PS_EINVAL && strstr(ps_error_message(), why), "ranks that disagree");
    expect(m, ps_group_barrier(g) == 0, "goes on");
    ps_group_close(none);
    ps_tensor_release(t);
    return 0;
}

/* A rank ends while other ranks wait in their groups. Every call of every group fails with the same verdict. */
static int one_ends(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_group *row, *column;
    if (!row_and_column(m, g, &row, &column)) return 0;
    expect(m, ps_group_barrier(row) == 0 && ps_group_barrier(column) == 0, "barriers");
    wait_for_all(m);
    if (m->rank == 3) {                                /* rank 3 leaves all its groups */
        ps_group_close(row);
        ps_group_close(column);
        return 0;
    }
    int rc = ps_group_barrier(m->rank == 1 ? column : row);            /* ranks 1 and 2 wait for rank 3, and rank 0
                                                                        * for rank 1 */
    if (m->rank == 0 && rc < 0) rc = ps_group_barrier(column);
    expect(m, rc < 0 && strstr(ps_error_message(), "rank 3 ("), "a call with a rank that ended");
    expect(m, strstr(ps_error_message(), " (its script came to its end, or it closed the group), and rank "), "how");
    expect(m, strstr(ps_error_message(), " waits for it in barrier of "), "who waits");
    ps_group_close(row);
    ps_group_close(column);
    return 0;
}

/* Every allocation of a split fails once on one rank. This is an error on all ranks, and the next split succeeds. */
static int cuts_without_memory(struct member *m, ps_ctx *ctx, ps_group *g)
{
    int32_t all[2] = { 0, 1 };
    bool made = false;
    for (int n = 0; n < 40 && !made && !m->bad; n++) {
        ps_group *part = NULL;
        pthread_mutex_lock(&opening);                  /* allocations are counted for the whole process */
        if (m->rank == 0) ps_test_fail_alloc(n, 1);
        pthread_mutex_unlock(&opening);
        int rc = ps_group_split(g, 2, all, "tp", &part);
        if (m->rank == 0) ps_test_fail_alloc(-1, 0);
        expect(m, rc == 0 || rc == PS_ENOMEM, "no memory");
        if (!expect(m, ps_group_barrier(g) == 0, "the parent goes on")) return 0;
        ps_tensor *t = numbers(ctx, PS_I32, 1, rc == 0 ? 1 : 0, 0);
        if (!expect(m, ps_group_all_reduce(g, t, PS_REDUCE_SUM) == 0, "counting")) break;
        expect(m, at(t, 0) == 0 || at(t, 0) == 2, "all ranks have the group, or none");
        made = at(t, 0) == 2 && n > 8;
        ps_tensor_release(t);
        ps_group_close(part);
    }
    expect(m, made, "a split with all its memory");
    return 0;
}

#endif

int main(void)
{
    signal(SIGPIPE, SIG_IGN);              /* ps_comm_gloo does the same */
#ifdef PS_HAVE_GLOO
    pthread_t unconnected;
    pthread_create(&unconnected, NULL, no_connection, NULL);
    test_false_peer();
    with_group(sums);
    with_group(pieces);
    with_group(one_fails);
    for (odd_how = 0; odd_how < 3; odd_how++) with_group(all_compare);
    with_group(small_calls);
    with_group(calls_as_planned);
    with_group(one_leaves_the_plan);
    atomic_store(&through, 0);
    with_group(pair_in_a_plan);
    with_group(jobs);
    with_group(jobs_fail);
    with_group(reductions);
    with_group_of(4, crossing);
    with_group_of(4, bad_cuts);
    atomic_store(&through, 0);
    with_group_of(4, one_ends);
    pthread_join(unconnected, NULL);
#endif
    test_self();                           /* from here on, memory of the whole process fails */
#ifdef PS_HAVE_GLOO
    with_group_of(2, cuts_without_memory);
#endif
    return end_checks();
}
