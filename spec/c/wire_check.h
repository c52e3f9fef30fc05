/* SPDX-License-Identifier: BSD-3-Clause
 * For C tests of transfers between devices: a wire (backend/wire.h) between ranks that are threads of the test. Their
 * device is sim, and a thread of each connection moves the bytes, so that ThreadSanitizer sees which thread accesses
 * memory at which time. A rank's exchanges, sums and copies on a connection are performed in their order, and an
 * exchange when all its ranks have reached it. Kernels of sim have ended when they return. So the thread that runs
 * them waits (device_wait) before it uses memory that an event orders. */
#ifndef PS_SPEC_WIRE_CHECK_H
#define PS_SPEC_WIRE_CHECK_H
#include "ranks_check.h"
#include "backend/backend.h"
#include "tensor/tensor.h"

#ifdef PS_HAVE_GLOO
enum { HUBS = 16, DUE = 512, FOLLOWS = 1024, WIRE_N = 30000 };
enum { EXCHANGE, SUM, COPY };

typedef struct work {
    int kind, n;                           /* n: addends */
    ps_comm_part send[MOST], recv[MOST];   /* for SUM and COPY: from, and to the first */
    int64_t after;                         /* number of completed moments after which the device's kernels have run */
} work;

/* A connection between the devices of some ranks. */
typedef struct hub {
    char id[PS_WIRE_ID_NBYTES];
    int size, number, n_open;
    bool gone[MOST];
    work due[MOST][DUE];
    int64_t given[MOST], over[MOST], exchanges;
    pthread_t mover;
} hub;

struct ps_wire_event { hub *h; int rank; int64_t number; };      /* complete when this number of the rank's works are
                                                                  * complete or, if h is NULL, this number of the
                                                                  * device's moments */
/* A rank's device: the moments after which its kernels run. */
typedef struct sim_device {
    ps_backend *be;
    ps_wire_event follows[FOLLOWS];
    int64_t n, marks[PS_WIRE_MARKS];
    int next_mark, lost;
    char why[1000];
} sim_device;

struct ps_wire { hub *h; sim_device *d; int rank, asked; int64_t after, last[PS_WIRE_LANES + 1]; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;         /* guards all following fields, also while bytes
                                                                  * move */
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static hub hubs[HUBS];
static sim_device devices[MOST];
static int n_hubs, numbers_given, n_devices;
/* The exchange that fails, counted from 1 in its connection, or 0 for none. A stalled exchange continues when the
 * test allows it (wire_set). A broken exchange is the error break_code of rank break_rank, or of all ranks if
 * break_rank is -1. hub_hit is the connection's number, or 0 for all connections. */
static int64_t break_at, stall_at;
static int break_code = PS_EIO, break_rank = -1, hub_hit;
static useconds_t pace_us, memory_us;      /* duration of an exchange, and of allocating memory for sums */

static inline void wire_set(int64_t *what, int64_t value)
{
    pthread_mutex_lock(&lock);
    *what = value;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static inline int64_t wire_get(const int64_t *what)
{
    pthread_mutex_lock(&lock);
    int64_t value = *what;
    pthread_mutex_unlock(&lock);
    return value;
}

/* -- the mover; the lock is held ----------------------------------------------------------------------------------- */
static inline bool over(const ps_wire_event *e)
{
    return !e->h || e->h->over[e->rank] >= e->number || e->h->gone[e->rank];
}

static inline bool all_over(const sim_device *d, int64_t n)
{
    for (int64_t i = 0; i < n; i++) if (!over(&d->follows[i])) return false;
    return true;
}

/* Returns the rank's next work if it is due. */
static inline work *next_of(hub *h, int rank, sim_device *d)
{
    work *w = &h->due[rank][h->over[rank] % DUE];
    return h->given[rank] > h->over[rank] && !h->gone[rank] && d && all_over(d, w->after) ? w : NULL;
}

static sim_device *owners[HUBS][MOST];

/* Returns whether all ranks have reached their next exchange. */
static inline bool all_come(hub *h)
{
    for (int r = 0; r < h->size; r++) {
        const work *w = next_of(h, r, owners[h - hubs][r]);
        if (!w || w->kind != EXCHANGE) return false;
    }
    return true;
}

static inline bool hit(hub *h, int64_t at) { return at == h->exchanges + 1 && (!hub_hit || hub_hit == h->number); }

static inline void exchange(hub *h)
{
    for (int to = 0; to < h->size; to++)
        for (int from = 0; from < h->size; from++) {
            const ps_comm_part *in = &h->due[to][h->over[to] % DUE].recv[from];
            const ps_comm_part *out = &h->due[from][h->over[from] % DUE].send[to];
            if (from == to || (in->nbytes == 0 && out->nbytes == 0)) continue;
            if (in->nbytes != out->nbytes) abort();
            memcpy(in->address, out->address, (size_t)in->nbytes);
        }
    for (int r = 0; r < h->size; r++) h->over[r]++;
    h->exchanges++;
}

static inline void local(work *w)
{
    if (w->kind == COPY) {
        memmove(w->recv[0].address, w->send[0].address, (size_t)w->send[0].nbytes);
        return;
    }
    for (int64_t i = 0; i < w->recv[0].nbytes / 4; i++) {
        float sum = ((float *)w->send[0].address)[i];
        for (int r = 1; r < w->n; r++) sum += ((float *)w->send[r].address)[i];
        ((float *)w->recv[0].address)[i] = sum;
    }
}

static inline bool step(hub *h)
{
    for (int r = 0; r < h->size; r++) {
        work *w = next_of(h, r, owners[h - hubs][r]);
        if (!w || w->kind == EXCHANGE) continue;
        local(w);
        h->over[r]++;
        return true;
    }
    if (!all_come(h) || hit(h, stall_at) || hit(h, break_at)) return false;
    if (pace_us) {
        pthread_mutex_unlock(&lock);
        usleep(pace_us);
        pthread_mutex_lock(&lock);
        if (!all_come(h)) return false;    /* a rank has left */
    }
    exchange(h);
    return true;
}

static inline void *move(void *arg)
{
    hub *h = arg;
    pthread_mutex_lock(&lock);
    for (;;) {
        int gone = 0;
        for (int r = 0; r < h->size; r++) gone += h->gone[r];
        if (gone == h->size) break;
        if (step(h)) pthread_cond_broadcast(&moved);
        else pthread_cond_wait(&moved, &lock);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* -- the table ----------------------------------------------------------------------------------------------------- */
static inline int wire_load(ps_backend *be) { return 0; }

static inline int wire_device_name(ps_backend *be, char *name)
{
    memset(name, 0, PS_WIRE_NAME_NBYTES);
    return snprintf(name, PS_WIRE_NAME_NBYTES, "sim at %p", (void *)be), 0;
}

static inline int wire_new_id(ps_backend *be, char *id)
{
    pthread_mutex_lock(&lock);
    memset(id, 0, PS_WIRE_ID_NBYTES);
    snprintf(id, PS_WIRE_ID_NBYTES, "hub %d", ++numbers_given);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Returns the device. The caller holds the lock. */
static inline sim_device *device_of(ps_backend *be)
{
    for (int i = 0; i < n_devices; i++) if (devices[i].be == be) return &devices[i];
    if (n_devices == MOST) abort();
    devices[n_devices] = (sim_device){ .be = be };
    return &devices[n_devices++];
}

static inline int wire_open(ps_backend *be, const char *id, int rank, int size, ps_wire **out)
{
    hub *h = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_hubs; i++) if (!memcmp(hubs[i].id, id, sizeof h->id)) h = &hubs[i];
    if (!h && n_hubs < HUBS) {
        h = &hubs[n_hubs++];
        memcpy(h->id, id, sizeof h->id);
        h->size = size;
        h->number = (int)strtol(id + 4, NULL, 10);
    }
    if (h) {
        *out = ps_alloc0(sizeof **out);
        **out = (ps_wire){ .h = h, .d = device_of(be), .rank = rank };
        owners[h - hubs][rank] = (*out)->d;
        if (++h->n_open == size) pthread_create(&h->mover, NULL, move, h);
    }
    pthread_mutex_unlock(&lock);
    return h ? 0 : ps_fail(PS_ENOMEM, "no more hubs");
}

/* Succeeds at the second query, like a library that does not block. */
static inline int wire_ready(ps_wire *w)
{
    pthread_mutex_lock(&lock);
    bool ready = w->h->n_open == w->h->size && ++w->asked > 1;
    pthread_mutex_unlock(&lock);
    return ready;
}

static inline int give(ps_wire *w, int lane, const work *what)
{
    hub *h = w->h;
    pthread_mutex_lock(&lock);
    if (h->given[w->rank] - h->over[w->rank] == DUE) abort();
    work *to = &h->due[w->rank][h->given[w->rank]++ % DUE];
    *to = *what;
    to->after = w->after;
    w->last[lane] = h->given[w->rank];
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return 0;
}

static inline int wire_begin(ps_wire *w, int lane, const ps_comm_part *send, const ps_comm_part *recv)
{
    work x = { .kind = EXCHANGE };
    memcpy(x.send, send, sizeof *send * (size_t)w->h->size);
    memcpy(x.recv, recv, sizeof *recv * (size_t)w->h->size);
    w->asked = 0;
    return give(w, lane, &x);
}

static inline int wire_follow(ps_wire *w, int lane) { return 0; }

static inline int wire_sum(ps_wire *w, int dtype, int n, char *const *at, int64_t numel, char *to)
{
    work x = { .kind = SUM, .n = n, .recv = { { to, 4 * numel } } };
    if (dtype != PS_F32) abort();
    for (int r = 0; r < n; r++) x.send[r] = (ps_comm_part){ at[r], 4 * numel };
    return give(w, PS_WIRE_LOCAL, &x);
}

static inline int wire_copy(ps_wire *w, void *to, const void *from, int64_t nbytes)
{
    work x = { .kind = COPY, .recv = { { to, nbytes } } };
    x.send[0] = (ps_comm_part){ (void *)(uintptr_t)from, nbytes };
    return give(w, PS_WIRE_LOCAL, &x);
}

static inline int wire_ended(ps_wire *w, int lane)
{
    hub *h = w->h;
    pthread_mutex_lock(&lock);
    bool broken = hit(h, break_at) && (break_rank < 0 || break_rank == w->rank) && all_come(h);
    bool ended = h->over[w->rank] >= w->last[lane] || h->gone[w->rank];
    pthread_mutex_unlock(&lock);
    return broken ? ps_fail(break_code, "a link is down") : ended;
}

static inline int wire_mark(ps_wire *w)
{
    pthread_mutex_lock(&lock);
    int i = w->d->next_mark;
    w->d->next_mark = (i + 1) % PS_WIRE_MARKS;
    w->d->marks[i] = w->d->n;
    pthread_mutex_unlock(&lock);
    return i;
}

static inline int wire_after(ps_wire *w, int mark)
{
    pthread_mutex_lock(&lock);
    w->after = w->d->marks[mark];
    pthread_mutex_unlock(&lock);
    return 0;
}

static inline int wire_event_new(ps_backend *be, ps_wire_event **out)
{
    *out = ps_alloc0(sizeof **out);
    return *out ? 0 : ps_fail_nomem(sizeof **out);
}

static inline void wire_event_free(ps_wire_event *e) { ps_free(e); }

static inline int wire_event_now(ps_backend *be, ps_wire_event *e)
{
    pthread_mutex_lock(&lock);
    *e = (ps_wire_event){ .number = device_of(be)->n };
    pthread_mutex_unlock(&lock);
    return 0;
}

static inline int wire_event_before(ps_wire *w, ps_wire_event *e)
{
    pthread_mutex_lock(&lock);
    if (!e->h && e->number > w->after) w->after = e->number;
    pthread_mutex_unlock(&lock);
    return 0;
}

static inline int wire_event_end(ps_wire *w, ps_wire_event *e)
{
    pthread_mutex_lock(&lock);
    *e = (ps_wire_event){ w->h, w->rank, w->h->given[w->rank] };
    pthread_mutex_unlock(&lock);
    return 0;
}

static inline int wire_event_over(ps_wire_event *e)
{
    pthread_mutex_lock(&lock);
    bool is_over = over(e);
    pthread_mutex_unlock(&lock);
    return is_over;
}

static inline int wire_event_follow(ps_backend *be, ps_wire_event *e)
{
    pthread_mutex_lock(&lock);
    sim_device *d = device_of(be);
    if (d->n == FOLLOWS) abort();
    d->follows[d->n++] = *e;
    pthread_mutex_unlock(&lock);
    return 0;
}

static inline int wire_memory(ps_wire *w, int64_t nbytes, void **out)
{
    if (w->rank == 0) usleep(memory_us);
    *out = ps_alloc((size_t)nbytes);
    return *out ? 0 : ps_fail_nomem((size_t)nbytes);
}

static inline void wire_memory_free(ps_wire *w, void *p) { ps_free(p); }

static inline void wire_abort(ps_wire *w)
{
    pthread_mutex_lock(&lock);
    w->h->gone[w->rank] = true;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static inline void wire_close(ps_wire *w)
{
    wire_abort(w);
    ps_free(w);
}

static inline void wire_lose(ps_backend *be, int code, const char *why)
{
    pthread_mutex_lock(&lock);
    sim_device *d = device_of(be);
    if (!d->lost) snprintf(d->why, sizeof d->why, "%s", why);
    if (!d->lost) d->lost = code;
    pthread_mutex_unlock(&lock);
}

static inline int wire_lost(ps_backend *be, bool told)
{
    char why[1000];
    pthread_mutex_lock(&lock);
    sim_device *d = device_of(be);
    int code = d->lost;
    snprintf(why, sizeof why, "%s", d->why);
    if (told) d->lost = 0;
    pthread_mutex_unlock(&lock);
    return code ? ps_fail(code, "%s", why) : 0;
}

static const ps_wire_table wire = {
    .name = "hubs", .load = wire_load, .device_name = wire_device_name, .most_ranks = MOST, .new_id = wire_new_id,
    .open = wire_open, .ready = wire_ready, .mark = wire_mark, .after = wire_after, .begin = wire_begin,
    .follow = wire_follow, .sum = wire_sum, .copy = wire_copy, .ended = wire_ended, .event_new = wire_event_new,
    .event_free = wire_event_free, .event_now = wire_event_now, .event_follow = wire_event_follow,
    .event_before = wire_event_before, .event_end = wire_event_end, .event_over = wire_event_over,
    .memory = wire_memory, .memory_free = wire_memory_free, .abort = wire_abort, .close = wire_close,
    .lose = wire_lose, .lost = wire_lost
};

/* -- devices ------------------------------------------------------------------------------------------------------- */
/* Returns this rank's device sim, whose bytes are sent over the wire, or NULL if a check failed. */
static inline ps_backend *wired_sim(struct member *m, ps_ctx *ctx, int *number)
{
    if (!expect(m, ps_device_find(ctx, "sim", number) == 0, "sim")) return NULL;
    ctx->devices[*number]->wire = &wire;
    ctx->devices[*number]->host_carries = false;
    return ctx->devices[*number];
}

/* Waits for everything after which the device's kernels run, and returns the error of lost bytes, like a read of the
 * device's memory. */
static inline int device_wait(ps_backend *be)
{
    pthread_mutex_lock(&lock);
    sim_device *d = device_of(be);
    while (!all_over(d, d->n)) pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return wire_lost(be, true);
}

/* Writes value, value + 1, ... + 6, value, ... to a tensor of WIRE_N numbers on sim, whose memory the processor can
 * access, or checks that it has these values. */
static inline bool touch(ps_tensor *t, bool writes, double value)
{
    void *bytes = NULL;
    if (ps_storage_pin(t->storage, t->device_, writes ? PS_WRITE : PS_READ, &bytes) < 0) return false;
    float *x = bytes;
    for (int i = 0; writes && i < WIRE_N; i++) x[i] = (float)value + (float)(i % 7);
    bool same = x[0] == (float)value && x[WIRE_N - 1] == (float)value + (float)((WIRE_N - 1) % 7);
    ps_storage_unpin(t->storage, t->device_);
    return same;
}

static inline ps_tensor *filled(ps_ctx *ctx, int number, double value)
{
    ps_tensor *t = NULL;
    int64_t shape[1] = { WIRE_N };
    if (!OK(ps_tensor_new(ctx, PS_F32, number, 1, shape, &t)) || !CHECK(touch(t, true, value))) exit(1);
    return t;
}

/* Runs ranks with a new wire. */
static inline void with_wires(int size, double timeout_s, int64_t breaks, int64_t stalls,
                              int (*run)(struct member *, ps_ctx *, ps_group *))
{
    n_hubs = n_devices = numbers_given = 0;
    memset(hubs, 0, sizeof hubs);
    break_at = breaks, stall_at = stalls;
    with_group_for(size, timeout_s, 5, run);
    for (int i = 0; i < n_hubs; i++)
        if (hubs[i].n_open == hubs[i].size) pthread_join(hubs[i].mover, NULL);
    break_rank = -1, break_code = PS_EIO, hub_hit = 0, pace_us = memory_us = 0;
}
#endif
#endif
