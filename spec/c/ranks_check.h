/* SPDX-License-Identifier: BSD-3-Clause
 * For C tests of groups: ranks that are threads of the test, and tensors of numbers. */
#ifndef PS_SPEC_RANKS_CHECK_H
#define PS_SPEC_RANKS_CHECK_H
#include "check.h"
#include <pthread.h>
#include <unistd.h>

static inline int group_of(ps_ctx *ctx, const char *rendezvous, int rank, int size, double timeout_s,
                           double heartbeat_s, ps_group **out)
{
    ps_meeting m = { .rendezvous = rendezvous, .rank = rank, .size = size, .timeout_s = timeout_s,
                     .heartbeat_s = heartbeat_s };
    return ps_group_gloo(ctx, &m, out);
}

static inline ps_tensor *numbers(ps_ctx *ctx, int dtype, int64_t n, double first, double step)
{
    ps_tensor *t = NULL;
    int64_t shape[1] = { n };
    if (!OK(ps_tensor_new(ctx, dtype, 0, 1, shape, &t))) exit(1);
    for (int64_t i = 0; i < n; i++) {
        double v = first + step * (double)i;
        ps_tensor_write_f64(t, i, 1, &v);
    }
    return t;
}

static inline double at(const ps_tensor *t, int64_t i)
{
    double v = 0;
    ps_tensor_read_f64(t, i, 1, &v);
    return v;
}

#ifdef PS_HAVE_GLOO
enum { MOST = 4 };
struct member {
    int rank, bad, size;
    double timeout_s, heartbeat_s;
    char rendezvous[64], why[400];
    int (*run)(struct member *, ps_ctx *, ps_group *);
};

static inline int expect(struct member *m, bool ok, const char *what)
{
    if (!ok && !m->bad++) snprintf(m->why, sizeof m->why, "rank %d: %s: %.300s", m->rank, what, ps_error_message());
    return ok;
}

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;   /* contexts are opened one at a time */

static inline void *member_main(void *arg)
{
    struct member *m = arg;
    ps_ctx *ctx = NULL;
    ps_group *g = NULL;
    pthread_mutex_lock(&opening);
    int rc = ps_ctx_new(&ctx);
    pthread_mutex_unlock(&opening);
    if (!expect(m, rc == 0, "context")) return NULL;
    rc = group_of(ctx, m->rendezvous, m->rank, m->size, m->timeout_s, m->heartbeat_s, &g);
    if (expect(m, rc == 0, "group")) m->run(m, ctx, g);
    ps_group_close(g);
    pthread_mutex_lock(&opening);
    ps_ctx_free(ctx);
    pthread_mutex_unlock(&opening);
    return NULL;
}

/* Runs a group whose ranks are threads. */
static inline void with_group_for(int size, double timeout_s, double heartbeat_s,
                                  int (*run)(struct member *, ps_ctx *, ps_group *))
{
    struct member members[MOST];
    pthread_t threads[MOST];
    char path[] = "/tmp/ps_test_comm_XXXXXX";
    int fd = mkstemp(path);
    close(fd);
    for (int r = 0; r < size; r++) {
        members[r] = (struct member){ .rank = r, .size = size, .timeout_s = timeout_s,
                                       .heartbeat_s = heartbeat_s, .run = run };
        snprintf(members[r].rendezvous, sizeof members[r].rendezvous, "file://%s", path);
        pthread_create(&threads[r], NULL, member_main, &members[r]);
    }
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
        if (members[r].bad) printf("    %s\n", members[r].why);
        CHECK(members[r].bad == 0);
    }
    unlink(path);
}

static inline void with_group_of(int size, int (*run)(struct member *, ps_ctx *, ps_group *))
{
    with_group_for(size, FAR_S, 5, run);
}
#endif
#endif
