/* SPDX-License-Identifier: BSD-3-Clause
 * Memory of the caller that Gloo uses: after a call has failed, Gloo's thread uses none of it. Ranks are threads of
 * this process. */
#define _GNU_SOURCE
#include "ranks_check.h"
#include "comm/group.h"
#include "rendezvous/watch.h"
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>

#ifdef PS_HAVE_GLOO
enum { N = 1 << 20 };

static char *pages(void)
{
    char *p = mmap(NULL, N, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) exit(1);
    return p;
}

static atomic_int begun;                   /* number of ranks that have begun their exchange */

static void *hang_up(void *arg)
{
    ps_comm *c = arg;
    ps_fail(PS_EIO, "a test");
    c->table->hang_up(c);
    return NULL;
}

/* Ranks 0 and 3 have a slow exchange in progress. Meanwhile, another thread of rank 0, which is also slow, hangs up
 * another communicator of the same connections. The exchange ends, as a failure unless the machine is slow. From
 * then on its memory belongs to the caller, although the connection can still be open: Gloo neither writes to the
 * memory nor sends its contents. */
static int hung_up_beside(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_comm *c = g->comm;
    ps_group *beside = NULL;
    const int32_t all[MOST] = { 0, 1, 2, 3 };
    const bool first = m->rank == 0;
    ps_comm_part send[MOST] = { { NULL, 0 } }, recv[MOST] = { { NULL, 0 } };
    char *out = pages(), *in = pages();
    pthread_t thread;
    if (!expect(m, ps_group_split(g, m->size, all, "beside", &beside) == 0, "split")) return 0;
    if (first || m->rank == 3) {
        send[3 - m->rank] = (ps_comm_part){ out, N }, recv[3 - m->rank] = (ps_comm_part){ in, N };
        memset(out, first ? '0' : '3', N);
    }
    expect(m, ps_group_barrier(g) == 0, "barrier");
    expect(m, c->table->begin(c, PS_COMM_DATA, send, recv) == 0, "begin");
    atomic_fetch_add(&begun, 1);
    if (first) {
        while (atomic_load(&begun) < m->size) usleep(50);
        pthread_create(&thread, NULL, hang_up, beside->comm);
        while (!ps_watch_over(c->watch)) usleep(50);
        usleep(1000);                      /* the connections are now being closed */
        c->table->finish(c, PS_COMM_DATA);
        memset(out, 'x', N);
        memset(in, 'x', N);
    }
    usleep(100000);
    if (first) pthread_join(thread, NULL);
    c->table->finish(c, PS_COMM_DATA);
    int new_bytes = 0;
    for (int i = 0; i < N; i++) new_bytes += in[i] == 'x';
    expect(m, new_bytes == (first ? N : 0), "bytes came to memory that went back, or from it");
    ps_group_close(beside);
    munmap(out, N);
    munmap(in, N);
    return 0;
}

/* Two threads wait for lanes of one communicator, for bytes that never arrive, when a third thread hangs it up. Both
 * threads get an error, and neither uses buffers that another thread has freed. */
static void *wait_for_lane(void *arg)
{
    ps_comm *c = arg;
    return c->table->finish(c, PS_COMM_DATA + 1) < 0 ? arg : NULL;
}

static int hung_up_itself(struct member *m, ps_ctx *ctx, ps_group *g)
{
    ps_comm *c = g->comm;
    ps_comm_part send[MOST] = { { NULL, 0 } }, recv[MOST] = { { NULL, 0 } };
    char *in = pages();
    pthread_t waiter, closer;
    void *rc = NULL;
    expect(m, ps_group_barrier(g) == 0, "barrier");
    if (m->rank == 1) {
        usleep(100000);                    /* this rank sends nothing */
        munmap(in, N);
        return 0;
    }
    recv[1] = (ps_comm_part){ in, N };
    usleep(20000);                         /* rank 1 has left the barrier, too */
    for (int lane = 0; lane < 2; lane++)
        expect(m, c->table->begin(c, PS_COMM_DATA + lane, send, recv) == 0, "begin");
    pthread_create(&waiter, NULL, wait_for_lane, c);
    pthread_create(&closer, NULL, hang_up, c);
    expect(m, c->table->finish(c, PS_COMM_DATA) < 0, "a lane that was hung up");
    pthread_join(closer, NULL);
    pthread_join(waiter, &rc);
    expect(m, rc == c, "the other lane");
    munmap(in, N);
    return 0;
}
#endif

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
#ifdef PS_HAVE_GLOO
    setenv("PS_SIM_LINK", "8e7", 1);
    with_group_for(4, 10, 5, hung_up_beside);
    unsetenv("PS_SIM_LINK");
    for (int i = 0; i < 10; i++) with_group_for(2, 10, 5, hung_up_itself);
#endif
    return end_checks();
}
