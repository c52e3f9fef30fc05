/* SPDX-License-Identifier: BSD-3-Clause
 * Collectives on devices' memory (transport/wired.c), over the wire of wire_check.h: calls return when their bytes are
 * under way, a group that stalls does not delay another one, and a failure for which no thread waits is reported once,
 * with its call. device_ranks_spec has those of an emulated NCCL between processes. */
#define _GNU_SOURCE
#include "wire_check.h"
#include "comm/group.h"
#include <signal.h>

#ifdef PS_HAVE_GLOO
enum { N = WIRE_N };

static pthread_barrier_t meeting;          /* a barrier of the ranks' threads */

static void meet(void) { pthread_barrier_wait(&meeting); }

/* This rank's device, to which two groups of the same ranks are connected. The first group is connection 1, and tp
 * is connection 2. */
struct sides { int device; ps_backend *be; ps_group *tp; };

static bool connected(struct member *m, ps_ctx *ctx, ps_group *g, struct sides *s)
{
    int32_t all[MOST] = { 0, 1, 2, 3 };
    s->be = wired_sim(m, ctx, &s->device);
    return s->be && expect(m, ps_group_connect(g, ctx, s->device) == 0, "connect") &&
           expect(m, ps_group_split(g, m->size, all, "tp", &s->tp) == 0, "split") &&
           expect(m, ps_group_connect(s->tp, ctx, s->device) == 0, "connect tp");
}

static bool says(const char *word) { return strstr(ps_error_message(), word) != NULL; }

/* Waits until this rank's communicator has abandoned the calls in progress. The error is kept. */
static bool loses(struct sides *s)
{
    double until = ps_now() + PROMPT_S;
    while (wire_lost(s->be, false) == 0 && ps_now() < until) usleep(1000);
    return wire_lost(s->be, false) < 0;
}

static bool is(ps_tensor *t, int64_t i, double value)
{
    void *bytes = NULL;
    if (ps_storage_pin(t->storage, t->device_, PS_READ, &bytes) < 0) return false;
    bool same = ((float *)bytes)[i] == (float)value;
    ps_storage_unpin(t->storage, t->device_);
    return same;
}

/* -- calls that succeed -------------------------------------------------------------------------------------------- */
enum { MANY = 100, TENSORS = 10 };

/* More calls than there are points. When the last call returns, none of them has moved a byte yet. */
static int in_a_row(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    ps_tensor *t[TENSORS], *part, *piece, *all = NULL;
    int64_t shape[1] = { (int64_t)m->size * N };
    if (!connected(m, ctx, g, &s)) return 0;
    for (int i = 0; i < TENSORS; i++) t[i] = filled(ctx, s.device, m->rank + 1);
    part = filled(ctx, s.device, 10 * m->rank), piece = filled(ctx, s.device, 0);
    expect(m, ps_tensor_new(ctx, PS_F32, s.device, 1, shape, &all) == 0, "a tensor");
    expect(m, ps_group_all_gather(g, all, part) == 0 && ps_group_broadcast(g, part, 1) == 0, "gather, broadcast");
    expect(m, ps_group_reduce_scatter(g, piece, all) == 0, "reduce_scatter");     /* the call that needs most memory
                                                                                   * first */
    for (int i = 0; i < MANY; i++)
        expect(m, ps_group_all_reduce(g, t[i % TENSORS], PS_REDUCE_SUM) == 0, "all_reduce");
    meet();
    expect(m, wire_get(&hubs[0].exchanges) == 0 && wire_get(&hubs[1].exchanges) == 0, "nothing has moved");
    meet();
    wire_set(&stall_at, 0);
    expect(m, device_wait(s.be) == 0, "what comes is no error");
    double sum = 6;
    for (int i = 1; i < MANY / TENSORS; i++) sum *= 3;
    expect(m, is(t[1], 0, sum) && is(t[9], 7, sum), "sums of sums");
    expect(m, is(part, 0, 10) && is(all, 0, 0) && is(all, N, 10) && is(piece, 0, 30 * m->rank), "what came");
    expect(m, ps_group_barrier(g) == 0, "barrier");
    for (int i = 0; i < TENSORS; i++) ps_tensor_release(t[i]);
    ps_tensor_release(part);
    ps_tensor_release(piece);
    ps_tensor_release(all);
    ps_group_close(s.tp);
    return 0;
}

/* Each exchange takes some time, and all of them together take much longer than a single one is allowed to take. */
static int slowly(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *t = filled(ctx, s.device, m->rank);
    for (int i = 0; i < MANY + 20; i++) expect(m, ps_group_broadcast(g, t, i % 2) == 0, "broadcast");
    expect(m, ps_group_barrier(g) == 0, "each came in time");
    expect(m, device_wait(s.be) == 0 && touch(t, false, 0), "what came");
    ps_tensor_release(t);
    ps_group_close(s.tp);
    return 0;
}

/* Starts a ZeRO job on the two parts of a tensor. */
static bool job_start(ps_group *g, ps_tensor *t, int op, ps_job **job)
{
    void *bytes = NULL;
    ps_comm_part parts[2];
    if (ps_storage_pin(t->storage, t->device_, PS_READ | PS_WRITE, &bytes) < 0) return false;
    for (int r = 0; r < 2; r++) parts[r] = (ps_comm_part){ (float *)bytes + r * (N / 2), N / 2 * 4 };
    return group_job_start(g, op, ON_DEVICE, op == OP_CHUNK_GATHER ? PS_U8 : PS_F32, 0, 0, parts, 0, job) == 0;
}

static int job_end(ps_group *g, ps_tensor *t, ps_job *job)
{
    int rc = group_job_wait(g, job);
    ps_storage_unpin(t->storage, t->device_);
    return group_told(g, rc);
}

/* A gather of chunks stalls. The other group's calls begin after it and end before it. Their order is the script's
 * order if the gather's ranks agree late. */
static int two_groups(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    ps_job *job = NULL, *sum = NULL;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *chunk = filled(ctx, s.device, m->rank), *t = filled(ctx, s.device, 1);
    ps_tensor *grads = filled(ctx, s.device, 1);
    expect(m, job_start(g, chunk, OP_CHUNK_GATHER, &job), "job");
    for (int i = 0; i < 3; i++) expect(m, ps_group_all_reduce(s.tp, t, PS_REDUCE_SUM) == 0, "the other group");
    expect(m, device_wait(s.be) == 0 && is(t, 0, 8) && is(t, N - 1, 8 * (1 + (N - 1) % 7)), "its sums are there");
    expect(m, wire_get(&hubs[0].exchanges) == 0, "the gather is not");
    meet();
    wire_set(&stall_at, 0);
    expect(m, job_end(g, chunk, job) == 0 && device_wait(s.be) == 0, "the gather came");
    expect(m, is(chunk, 0, 0) && is(chunk, N / 2, 1 + N / 2 % 7), "its parts");
    int64_t before = wire_get(&hubs[0].given[m->rank]);
    expect(m, job_start(g, grads, OP_CHUNK_REDUCE, &sum), "a job that wants memory first");
    int rc = m->rank == 0 ? ps_group_send(s.tp, t, 1) : ps_group_recv(s.tp, t, 0);
    expect(m, rc == 0 && wire_get(&hubs[0].given[m->rank]) > before, "a message comes after the job, too");
    expect(m, job_end(g, grads, sum) == 0 && device_wait(s.be) == 0, "the sum came");
    expect(m, is(grads, m->rank * (N / 2), 2 + 2 * (m->rank * (N / 2) % 7)), "its part");
    ps_tensor_release(chunk);
    ps_tensor_release(grads);
    ps_tensor_release(t);
    ps_group_close(s.tp);
    return 0;
}

static void *releases(void *arg)
{
    usleep(300000);
    wire_set(&stall_at, 0);
    return NULL;
}

/* A group is closed while its bytes are in flight, and they still arrive. */
static int closed(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    pthread_t thread;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *t = filled(ctx, s.device, m->rank);
    expect(m, ps_group_broadcast(s.tp, t, 1) == 0, "broadcast");
    pthread_create(&thread, NULL, releases, NULL);
    ps_group_close(s.tp);
    expect(m, touch(t, false, 1) && device_wait(s.be) == 0, "what came");
    pthread_join(thread, NULL);
    ps_tensor_release(t);
    return 0;
}

/* -- failures ------------------------------------------------------------------------------------------------------ */
/* After a failure that the script has received, later calls say that there was a failure, and nothing reports it
 * again. */
static void told_once(struct member *m, struct sides *s, ps_group *g, ps_tensor *t)
{
    expect(m, ps_group_broadcast(g, t, 0) < 0 && says("failed before"), "a later call");
    expect(m, ps_group_broadcast(s->tp, t, 0) < 0, "a call of the other group");
    usleep(50000);
    expect(m, device_wait(s->be) == 0, "it was told before");
    meet();
    expect(m, ps_groups_settle() == 0, "nothing is left to tell");
    ps_tensor_release(t);
    ps_group_close(s->tp);
    meet();
}

static const char lost[] = "lost its connection to other ranks' devices in broadcast (call ";
static const char alone[] = " of rank 1: a link is down";

static int next_call(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *t = filled(ctx, s.device, 1), *u = filled(ctx, s.device, 1);
    expect(m, ps_group_broadcast(g, t, 1) == 0 && ps_group_broadcast(s.tp, u, 1) == 0, "calls return");
    expect(m, loses(&s), "it is lost");
    expect(m, ps_group_broadcast(g, t, 1) < 0 && says(lost), "the next call");
    ps_tensor_release(u);
    told_once(m, &s, g, t);
    return 0;
}

/* The next call is an op that multiplies gathered rows. */
static int next_op(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *t = filled(ctx, s.device, 1), *in[1 + 2 * PS_MAX_COLUMNS] = { NULL }, *out[PS_MAX_OUT] = { NULL };
    ps_attrs_column_linear at = { .group = ps_group_number(g), .size = m->size, .rank = m->rank, .pieces = 1 };
    int64_t shape[2] = { 4, 4 };
    for (int i = 0; i < 2; i++) expect(m, ps_tensor_new(ctx, PS_F32, s.device, 2, shape, &in[i]) == 0, "a tensor");
    expect(m, ps_group_broadcast(g, t, 1) == 0, "the call returns");
    expect(m, loses(&s), "it is lost");
    expect(m, ps_apply(ctx, PS_OP_column_linear, 1 + 2 * PS_MAX_COLUMNS, in, &at, sizeof at, out) < 0 && says(lost),
           "the op");
    for (int i = 0; i < 2; i++) ps_tensor_release(in[i]);
    told_once(m, &s, g, t);
    return 0;
}

/* The other group also has a call in progress, which ends with the same failure. */
static int next_read(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *t = filled(ctx, s.device, 1), *u = filled(ctx, s.device, 1);
    expect(m, ps_group_broadcast(g, t, 1) == 0 && ps_group_broadcast(s.tp, u, 1) == 0, "calls return");
    expect(m, device_wait(s.be) == PS_ETIME && says("did not end within 0.5 s") && says("broadcast"), "the read");
    ps_tensor_release(u);
    told_once(m, &s, g, t);
    return 0;
}

/* ps_groups_settle applies to the whole process, which is both ranks in this test. */
static int settled(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *t = filled(ctx, s.device, 1);
    expect(m, ps_group_broadcast(g, t, 1) == 0, "the call returns");
    expect(m, loses(&s), "it is lost");
    meet();
    for (int r = 0; m->rank == 0 && r < m->size; r++)
        expect(m, ps_groups_settle() < 0 && says(alone), "settle");
    meet();
    told_once(m, &s, g, t);
    return 0;
}

/* Rank 1 fails by itself while its script is in a call in host memory, which the other rank reaches late. */
static int beside_a_call(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *t = filled(ctx, s.device, 1), *host = numbers(ctx, PS_F32, N, 0, 1);
    expect(m, ps_group_broadcast(g, t, 1) == 0, "the call returns");
    if (m->rank == 0) {
        usleep(100000);
        wire_set(&break_at, 1);
        expect(m, loses(&s), "it is lost");
    }
    expect(m, ps_group_all_reduce(g, host, PS_REDUCE_SUM) < 0 && says(alone), "the call");
    ps_tensor_release(host);
    told_once(m, &s, g, t);
    return 0;
}

/* A job finds the failure first. A read in the meantime is still an error, even if the job's result is never
 * requested. */
static int job_first(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    ps_job *job = NULL, *unused = NULL;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *chunk = filled(ctx, s.device, m->rank), *t = filled(ctx, s.device, 1);
    expect(m, ps_group_broadcast(s.tp, t, 1) == 0, "the call returns");
    expect(m, loses(&s), "it is lost");
    expect(m, job_start(g, chunk, OP_CHUNK_GATHER, &unused) && group_job_wait(g, unused) < 0, "a job nobody wants");
    ps_storage_unpin(chunk->storage, chunk->device_);
    expect(m, wire_lost(s.be, false) < 0 && says(alone), "a read behind it");
    expect(m, job_start(g, chunk, OP_CHUNK_GATHER, &job), "job");
    group_drain(g);
    expect(m, wire_lost(s.be, false) < 0 && says(alone), "a read");
    expect(m, job_end(g, chunk, job) < 0 && says(alone), "the job");
    expect(m, device_wait(s.be) == 0, "it was told");
    ps_tensor_release(chunk);
    meet();
    expect(m, ps_groups_settle() == 0, "nothing is left to tell");
    ps_tensor_release(t);
    ps_group_close(s.tp);
    return 0;
}

/* The script waits for a gather that stalls. The time-out ends both the gather and the wait. */
static int job_stalls(struct member *m, ps_ctx *ctx, ps_group *g)
{
    struct sides s;
    ps_job *job = NULL;
    if (!connected(m, ctx, g, &s)) return 0;
    ps_tensor *chunk = filled(ctx, s.device, m->rank);
    expect(m, job_start(g, chunk, OP_CHUNK_GATHER, &job) && job_end(g, chunk, job) == 0, "its bytes are under way");
    expect(m, device_wait(s.be) == PS_ETIME && says("gather of chunks (call "), "the read");
    told_once(m, &s, g, chunk);
    return 0;
}

static void with_ranks(int size, double timeout_s, int64_t breaks, int64_t stalls,
                       int (*run)(struct member *, ps_ctx *, ps_group *))
{
    pthread_barrier_init(&meeting, NULL, (unsigned)size);
    with_wires(size, timeout_s, breaks, stalls, run);
    pthread_barrier_destroy(&meeting);
}
#endif

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
#ifdef PS_HAVE_GLOO
    with_ranks(3, FAR_S, 0, 1, in_a_row);
    pace_us = 12000;
    with_ranks(2, 0.5, 0, 0, slowly);
    hub_hit = 1, memory_us = 200000;
    with_ranks(2, FAR_S, 0, 1, two_groups);
    with_ranks(2, FAR_S, 0, 1, closed);
    hub_hit = 1;
    with_ranks(2, FAR_S, 1, 0, next_call);
    hub_hit = 1;
    with_ranks(2, FAR_S, 1, 0, next_op);
    with_ranks(2, 0.5, 0, 1, next_read);
    with_ranks(2, 0.5, 0, 1, job_stalls);
    break_code = PS_EBACKEND, break_rank = 1;
    with_ranks(2, FAR_S, 1, 0, settled);
    break_code = PS_EBACKEND, break_rank = 1, stall_at = 1;
    with_ranks(2, FAR_S, 0, 1, beside_a_call);
    break_code = PS_EBACKEND, break_rank = 1;
    with_ranks(2, FAR_S, 1, 0, job_first);
#endif
    return end_checks();
}
