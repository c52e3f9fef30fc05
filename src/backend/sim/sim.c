/* SPDX-License-Identifier: BSD-3-Clause
 * The `sim` backend, a simulated accelerator. With it, all code for devices with separate memory can be run, tested and
 * timed without such a device. The simulated memory has a configured size and consists of regions of host memory.
 * Scripts cannot read these regions directly. The backend uses the kernels of the cpu backend, and a copy engine with a
 * bandwidth model.
 *
 * The copy engine has two lanes: one for copies to the device, and one for copies from the device. Each lane has a
 * thread, which is started for the lane's first copy. When a copy is requested, its times are computed. The copy begins
 * when its lane is free and the copy `after` has ended. Its duration is latency + nbytes / bandwidth. The thread moves
 * the bytes in slices that are spread over the duration. The copy ends when all bytes are moved and the duration is
 * over. If the processor is too slow, the thread is late and catches up later. All other functions are called from one
 * thread.
 *
 * Kernels run in the caller's thread, so the device is as fast as the host. PS_SIM_ISA (with the same values as
 * PS_CPU_ISA) makes the device use the kernels of another instruction set. If the cpu backend uses a lower instruction
 * set, the device is then faster than the host. */
#define _GNU_SOURCE                  /* for pthread_setname_np */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)   /* the thread sanitizer does not see streaming stores */
#include <emmintrin.h>
#define STREAMING 1
#endif
#include "backend/backend.h"
#include "backend/cpu/cpu.h"
#include "backend/sim/sim.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/thread.h"

#define GIB ((int64_t)1 << 30)
/* Modelled seconds per slice. With shorter slices, the thread would wake up more often and slow down computing
 * threads. */
#define SLICE_S 0.002
#define SLICE_LEAST ((size_t)64 << 10)
#define NAP_S 0.02                   /* seconds that a thread sleeps before it checks whether its copy was cancelled */
#define SPARE_BYTES ((int64_t)64 << 20)   /* bytes of the machine's memory that are left to other programs */

typedef struct sim_backend sim_backend;

struct ps_copy {
    ps_copy *next;                   /* next copy in its lane */
    ps_copy *live_prev, *live_next;  /* neighbours in the list of copies that no caller has waited for */
    bool to_device, ended;
    atomic_bool cancelled;
    void *dst;
    const void *src;
    size_t nbytes;
    /* number: index of the copy in its lane, counted from 1. after: number of the copy in the other lane that must end
     * before this copy begins, or 0. */
    int64_t number, after;
    double begin, end;               /* modelled times of the first and last byte; `begin` includes the latency */
};

typedef struct lane {
    sim_backend *sim;
    struct lane *other;
    const char *thread_name;
    pthread_t thread;
    bool has_thread;
    pthread_cond_t work;             /* signalled when a copy is queued, and when the copy `first` can begin */
    ps_copy *first, *last;           /* list of copies in order; the first copy is running */
    int64_t asked, ended;            /* asked: number of copies that were requested; ended: number of copies that have
                                      * ended */
    double bytes_per_s, free_at;     /* free_at: modelled end of the last requested copy */
} lane;

typedef struct region {
    struct region *next;
    char *base;
    size_t size;                     /* size in bytes of the address space */
    int64_t committed;               /* number of committed bytes, anywhere in the region */
} region;

struct sim_backend {
    ps_backend base;
    region *regions;
    int64_t memory, handed_out;      /* memory: size of the memory in bytes; handed_out: number of bytes allocated from
                                      * it */
    int64_t unchecked;               /* bytes that were allocated since the machine's free memory was last checked */
    double latency_s;
    pthread_mutex_t lock;            /* guards all fields below, and the state of lanes and copies */
    pthread_cond_t ended;
    bool stop;
    lane lanes[2];                   /* indexed by to_device */
    ps_copy *live;
};

static double mib(int64_t nbytes) { return (double)nbytes / 1048576.0; }

static void describe(sim_backend *sim)
{
    snprintf(sim->base.describe, sizeof sim->base.describe,
             "pretend accelerator: %.6g MiB of memory, %.3g GB/s in, %.3g GB/s out, %.4g us a copy, cpu kernels",
             mib(sim->memory), sim->lanes[1].bytes_per_s / 1e9, sim->lanes[0].bytes_per_s / 1e9, sim->latency_s * 1e6);
}

/* -- memory ------------------------------------------------------------------------------------------------------- */
static int64_t bytes_available(ps_backend *be)
{
    const sim_backend *sim = (sim_backend *)be;
    return sim->memory - sim->handed_out;
}

/* Returns the region that contains all nbytes bytes at p. If `any` is set, returns a region that contains at least one
 * of these bytes. */
static region *find_region(const sim_backend *sim, const char *p, size_t nbytes, bool any)
{
    for (region *r = sim->regions; r; r = r->next) {
        const char *end = r->base + r->size;
        if (any ? p < end && r->base < p + nbytes : p >= r->base && p <= end && nbytes <= (size_t)(end - p)) return r;
    }
    return NULL;
}

static region *region_at(const sim_backend *sim, const void *p)
{
    region *r = sim->regions;
    while (r && r->base != p) r = r->next;
    return r;
}

static int region_reserve(ps_backend *be, size_t nbytes, void **out)
{
    sim_backend *sim = (sim_backend *)be;
    void *base;
    region *r = ps_alloc(sizeof *r);
    if (!r) return ps_fail_nomem(sizeof *r);
    int rc = ps_host_region_new(be, nbytes, &base);
    if (rc < 0) {
        ps_free(r);
        return rc;
    }
    *r = (region){ .next = sim->regions, .base = base, .size = nbytes };
    sim->regions = r;
    *out = base;
    return 0;
}

static int region_commit(ps_backend *be, void *p, size_t nbytes)
{
    sim_backend *sim = (sim_backend *)be;
    region *r = find_region(sim, p, nbytes, false);
    if (!r) return ps_fail(PS_EINVAL, "%zu bytes are not in a region of sim", nbytes);
    int64_t more = (int64_t)nbytes, left = bytes_available(be);
    if (more > left)
        return ps_fail(PS_ENOMEM,
                       "sim has %.1f MiB of memory and %.1f MiB of it left; use a smaller batch, a smaller model or "
                       "recompute, or set PS_SIM_MEMORY higher", mib(sim->memory), mib(left));
    if ((sim->unchecked += more) >= SPARE_BYTES) {
        int64_t host = ps_host_bytes_available(be);
        if (host - SPARE_BYTES < more) {
            sim->unchecked -= more;
            return ps_fail(PS_ENOMEM, "%.1f MiB for sim's memory are not available: this machine has only %.1f MiB "
                           "left; lower PS_SIM_MEMORY", mib(more), mib(host));
        }
        sim->unchecked = 0;
    }
    sim->handed_out += more;
    r->committed += more;
    return 0;
}

static void region_discard(ps_backend *be, void *p, size_t nbytes)
{
    sim_backend *sim = (sim_backend *)be;
    region *r = find_region(sim, p, nbytes, false);
    if (!r) return;
    ps_host_region_discard(be, p, nbytes);
    sim->handed_out -= (int64_t)nbytes;
    r->committed -= (int64_t)nbytes;
}

/* Cancels the copies of a region, or all copies if `r` is NULL. Waits until no thread uses the memory of these copies.
 * The caller holds the lock. */
static void cancel_copies(sim_backend *sim, const region *r)
{
    for (ps_copy *c = sim->live; c; c = c->live_next) {
        const char *p = c->to_device ? c->dst : c->src;
        if (!c->ended && (!r || (p >= r->base && p < r->base + r->size))) atomic_store(&c->cancelled, true);
    }
    for (int i = 0; i < 2; i++) pthread_cond_signal(&sim->lanes[i].work);
    for (ps_copy *c = sim->live; c;) {
        if (atomic_load(&c->cancelled) && !c->ended) {
            pthread_cond_wait(&sim->ended, &sim->lock);
            c = sim->live;
        } else {
            c = c->live_next;
        }
    }
}

/* Frees a region. This happens when its arena is closed or trimmed. Copies use the region then only if a step has
 * failed. These copies are cancelled and end with an error. */
static void region_free(ps_backend *be, void *p, size_t nbytes)
{
    sim_backend *sim = (sim_backend *)be;
    region **at = &sim->regions, *r = region_at(sim, p);
    if (!r) return;
    while (*at != r) at = &(*at)->next;
    pthread_mutex_lock(&sim->lock);
    cancel_copies(sim, r);
    pthread_mutex_unlock(&sim->lock);
    *at = r->next;
    sim->handed_out -= r->committed;
    ps_host_region_free(be, r->base, r->size);
    ps_free(r);
}

static int region_new(ps_backend *be, size_t nbytes, void **out)
{
    void *base;
    PS_TRY(region_reserve(be, nbytes, &base));
    int rc = region_commit(be, base, nbytes);
    if (rc < 0) {
        region_free(be, base, nbytes);
        return rc;
    }
    *out = base;
    return 0;
}

/* -- the lanes' threads ------------------------------------------------------------------------------------------- */
/* Sleeps until time t. Returns false if the copy c is cancelled before. */
static bool sleep_until(ps_copy *c, double t)
{
    while (!atomic_load_explicit(&c->cancelled, memory_order_relaxed)) {
        double now = ps_now(), wake = t < now + NAP_S ? t : now + NAP_S;
        if (t <= now) return true;
        struct timespec at = { .tv_sec = (time_t)wake };
        at.tv_nsec = (long)((wake - (double)at.tv_sec) * 1e9);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
    }
    return false;
}

/* Copies like memcpy, but does not evict the data of computing threads from the caches. If neither src nor dst is in a
 * cache, this function takes half the processor time of memcpy. */
static void copy_past_caches(char *dst, const char *src, size_t n)
{
#ifdef STREAMING
    size_t head = -(uintptr_t)dst % 16;
    if (n >= 4096) {
        memcpy(dst, src, head);
        dst += head, src += head, n -= head;
        for (; n >= 64; n -= 64, dst += 64, src += 64) {
            const __m128i *from = (const __m128i *)src;
            __m128i *to = (__m128i *)dst;
            __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_prefetch(src + 512, _MM_HINT_NTA);
            _mm_stream_si128(to, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
        _mm_sfence();
    }
#endif
    memcpy(dst, src, n);
}

static void move_bytes(ps_copy *c)
{
    double seconds_a_byte = c->nbytes ? (c->end - c->begin) / (double)c->nbytes : 0;
    size_t slice = SLICE_LEAST, done = 0;
    if (seconds_a_byte * (double)c->nbytes <= SLICE_S) slice = c->nbytes;
    else if (seconds_a_byte * (double)slice < SLICE_S) slice = (size_t)(SLICE_S / seconds_a_byte);
    while (done < c->nbytes) {
        if (!sleep_until(c, c->begin + (double)done * seconds_a_byte)) return;
        size_t n = c->nbytes - done < slice ? c->nbytes - done : slice;
        copy_past_caches((char *)c->dst + done, (const char *)c->src + done, n);
        done += n;
    }
    sleep_until(c, c->end);
}

static bool may_begin(const lane *l)
{
    ps_copy *c = l->first;
    return c && (c->after <= l->other->ended || atomic_load(&c->cancelled));
}

static void *run_lane(void *arg)
{
    lane *l = arg;
    sim_backend *sim = l->sim;
    pthread_setname_np(pthread_self(), l->thread_name);
    prctl(PR_SET_TIMERSLACK, 1000ul);              /* the thread wakes up within microseconds of the requested time */
    pthread_mutex_lock(&sim->lock);
    for (;;) {
        while (!sim->stop && !may_begin(l)) pthread_cond_wait(&l->work, &sim->lock);
        if (sim->stop) break;
        ps_copy *c = l->first;
        pthread_mutex_unlock(&sim->lock);
        move_bytes(c);
        pthread_mutex_lock(&sim->lock);
        l->first = c->next;
        if (!l->first) l->last = NULL;
        l->ended = c->number;
        c->ended = true;                           /* from here on, the thread that waits for c owns c */
        pthread_cond_broadcast(&sim->ended);
        pthread_cond_signal(&l->other->work);
    }
    pthread_mutex_unlock(&sim->lock);
    return NULL;
}

static int start_thread(lane *l)
{
    int rc = ps_thread_start(&l->thread, run_lane, l);
    if (rc) return ps_fail(PS_ENOMEM, "a thread for sim's copies cannot be started: %s", strerror(rc));
    l->has_thread = true;
    return 0;
}

/* -- the caller's side -------------------------------------------------------------------------------------------- */
static int check_addresses(const sim_backend *sim, bool to_device, const void *dst, const void *src, size_t nbytes)
{
    const char *device = to_device ? dst : src, *host = to_device ? src : dst;
    if (nbytes == 0) return 0;
    if (!find_region(sim, device, nbytes, false))
        return ps_fail(PS_EINVAL, "a copy of %zu bytes %s sim: its %s is not in sim's memory", nbytes,
                       to_device ? "to" : "from", to_device ? "destination" : "source");
    if (!host || find_region(sim, host, nbytes, true))
        return ps_fail(PS_EINVAL, "a copy of %zu bytes %s sim: its %s is not in host memory", nbytes,
                       to_device ? "to" : "from", to_device ? "source" : "destination");
    return 0;
}

static int copy_start(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes, ps_copy *after,
                      ps_copy **out)
{
    sim_backend *sim = (sim_backend *)be;
    lane *l = &sim->lanes[to_device];
    PS_TRY(check_addresses(sim, to_device, dst, src, nbytes));
    if (!l->has_thread) PS_TRY(start_thread(l));
    ps_copy *c = ps_alloc0(sizeof *c);
    if (!c) return ps_fail_nomem(sizeof *c);
    c->to_device = to_device;
    c->dst = dst;
    c->src = src;
    c->nbytes = nbytes;
    double start = ps_now();
    pthread_mutex_lock(&sim->lock);
    if (after) {
        if (after->to_device != to_device) c->after = after->number;
        if (after->end > start) start = after->end;
    }
    if (l->free_at > start) start = l->free_at;
    c->begin = start + sim->latency_s;
    c->end = l->free_at = c->begin + (double)nbytes / l->bytes_per_s;
    c->number = ++l->asked;
    if (l->last) l->last->next = c;
    else l->first = c;
    l->last = c;
    c->live_next = sim->live;
    if (sim->live) sim->live->live_prev = c;
    sim->live = c;
    pthread_cond_signal(&l->work);
    pthread_mutex_unlock(&sim->lock);
    *out = c;
    return 0;
}

static int copy_wait(ps_backend *be, ps_copy *c, bool block)
{
    sim_backend *sim = (sim_backend *)be;
    pthread_mutex_lock(&sim->lock);
    while (block && !c->ended) pthread_cond_wait(&sim->ended, &sim->lock);
    bool ended = c->ended;
    if (ended) {
        if (c->live_next) c->live_next->live_prev = c->live_prev;
        if (c->live_prev) c->live_prev->live_next = c->live_next;
        else sim->live = c->live_next;
    }
    pthread_mutex_unlock(&sim->lock);
    if (!ended) return 0;
    bool cancelled = atomic_load(&c->cancelled);
    size_t nbytes = c->nbytes;
    ps_free(c);
    return cancelled ? ps_fail(PS_ESTATE, "a copy of %zu bytes was under way when sim's memory was freed", nbytes) : 1;
}

void ps_sim_copy_times(const ps_copy *copy, double *begin, double *end) { *begin = copy->begin, *end = copy->end; }

static int copy_whole(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes)
{
    ps_copy *c;
    PS_TRY(copy_start(be, to_device, dst, src, nbytes, NULL, &c));
    int rc = copy_wait(be, c, true);
    return rc < 0 ? rc : 0;
}

static int copy_in(ps_backend *be, void *dst, const void *host_src, size_t nbytes)
{
    return copy_whole(be, true, dst, host_src, nbytes);
}

static int copy_out(ps_backend *be, void *host_dst, const void *src, size_t nbytes)
{
    return copy_whole(be, false, host_dst, src, nbytes);
}

/* -- opening, settings, closing ----------------------------------------------------------------------------------- */
/* Cancels running copies, and frees the copies that no caller has waited for. */
static void close_sim(ps_backend *be)
{
    sim_backend *sim = (sim_backend *)be;
    pthread_mutex_lock(&sim->lock);
    cancel_copies(sim, NULL);
    sim->stop = true;
    for (int i = 0; i < 2; i++) pthread_cond_signal(&sim->lanes[i].work);
    pthread_mutex_unlock(&sim->lock);
    for (int i = 0; i < 2; i++)
        if (sim->lanes[i].has_thread) pthread_join(sim->lanes[i].thread, NULL);
    while (sim->regions) region_free(be, sim->regions->base, sim->regions->size);
    while (sim->live) {
        ps_copy *c = sim->live;
        sim->live = c->live_next;
        ps_free(c);
    }
    for (int i = 0; i < 2; i++) pthread_cond_destroy(&sim->lanes[i].work);
    pthread_cond_destroy(&sim->ended);
    pthread_mutex_destroy(&sim->lock);
    ps_free(sim);
}

int ps_sim_configure(ps_backend *be, int64_t memory_nbytes, double h2d_bytes_per_s, double d2h_bytes_per_s,
                     double latency_s)
{
    if (be->close != close_sim) return ps_fail(PS_EUNSUP, "device %s does not have the settings of sim", be->name);
    sim_backend *sim = (sim_backend *)be;
    if (memory_nbytes < 0 || !(h2d_bytes_per_s >= 0) || !(d2h_bytes_per_s >= 0) || isnan(latency_s)
        || latency_s == INFINITY)
        return ps_fail(PS_EINVAL, "sim: memory (%lld bytes) and the rates (%g and %g bytes/s) must not be negative, "
                       "and the latency (%g s) must be finite",
                       (long long)memory_nbytes, h2d_bytes_per_s, d2h_bytes_per_s, latency_s);
    if (memory_nbytes && memory_nbytes < sim->handed_out)
        return ps_fail(PS_ESTATE, "sim's memory cannot be reduced to %.1f MiB: %.1f MiB of it are in use",
                       mib(memory_nbytes), mib(sim->handed_out));
    if (memory_nbytes) sim->memory = memory_nbytes;
    if (h2d_bytes_per_s > 0) sim->lanes[1].bytes_per_s = h2d_bytes_per_s;
    if (d2h_bytes_per_s > 0) sim->lanes[0].bytes_per_s = d2h_bytes_per_s;
    if (latency_s >= 0) sim->latency_s = latency_s;
    describe(sim);
    return 0;
}

/* Parses a size in bytes such as "64MiB", "1.5G" or "1000000". K, M and G are powers of 1024, as are KiB, MiB and
 * GiB. */
static int parse_bytes(const char *text, int64_t *out)
{
    static const struct { const char *unit; int log2; } units[] = {
        { "", 0 }, { "B", 0 }, { "K", 10 }, { "KiB", 10 }, { "M", 20 }, { "MiB", 20 }, { "G", 30 }, { "GiB", 30 },
    };
    char *end;
    double value = strtod(text, &end);
    bool number = end != text;
    while (*end == ' ') end++;
    for (size_t i = 0; number && i < sizeof units / sizeof *units; i++) {
        double nbytes = ldexp(value, units[i].log2);
        if (strcmp(end, units[i].unit) != 0 || !(nbytes >= 1) || nbytes > 0x1p56) continue;
        *out = (int64_t)nbytes;
        return 0;
    }
    return ps_fail(PS_EINVAL, "PS_SIM_MEMORY is '%s'; it must be a number of bytes such as 1000000, 64MiB or 1.5GiB",
                   text);
}

/* Reads a number from an environment variable, and sets *out to the number times `unit`. Leaves *out unchanged if the
 * variable is not set. */
static int read_number(const char *name, double unit, double least, const char *what, double *out)
{
    const char *text = getenv(name);
    if (!text || !*text) return 0;
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= least) || !isfinite(value))
        return ps_fail(PS_EINVAL, "%s is '%s'; it must be %s", name, text, what);
    *out = value * unit;
    return 0;
}

static int read_settings(sim_backend *sim)
{
    const char *memory = getenv("PS_SIM_MEMORY");
    double bandwidth = 8e9;
    sim->memory = GIB;
    sim->latency_s = 10e-6;
    if (memory && *memory) PS_TRY(parse_bytes(memory, &sim->memory));
    PS_TRY(read_number("PS_SIM_BANDWIDTH", 1e9, 1e-6, "GB/s each way, such as 8", &bandwidth));
    PS_TRY(read_number("PS_SIM_LATENCY", 1e-6, 0, "microseconds per copy, such as 10", &sim->latency_s));
    for (int i = 0; i < 2; i++) sim->lanes[i].bytes_per_s = bandwidth;
    return 0;
}

static int init_locks(sim_backend *sim)
{
    if (pthread_mutex_init(&sim->lock, NULL) || pthread_cond_init(&sim->ended, NULL)
        || pthread_cond_init(&sim->lanes[0].work, NULL) || pthread_cond_init(&sim->lanes[1].work, NULL))
        return ps_fail(PS_ENOMEM, "cannot make a lock for sim");
    return 0;
}

int ps_backend_sim_open(ps_backend *ref, const ps_backend *cpu, ps_backend **out)
{
    sim_backend *sim = ps_alloc0(sizeof *sim);
    if (!sim) return ps_fail_nomem(sizeof *sim);
    const char *isa = getenv("PS_SIM_ISA");
    int rc = read_settings(sim);
    if (rc == 0) rc = init_locks(sim);
    if (rc < 0) {
        ps_free(sim);
        return rc;
    }
    for (int i = 0; i < 2; i++) {
        lane *l = &sim->lanes[i];
        l->sim = sim;
        l->other = &sim->lanes[!i];
        l->thread_name = i ? "ps-sim-in" : "ps-sim-out";
    }
    ps_backend *be = &sim->base;
    be->name = "sim";
    describe(sim);
    be->region_new = region_new;
    be->region_free = region_free;
    be->region_reserve = region_reserve;
    be->region_commit = region_commit;
    be->region_discard = region_discard;
    be->bytes_available = bytes_available;
    be->copy_in = copy_in;
    be->copy_out = copy_out;
    be->copy_start = copy_start;
    be->copy_wait = copy_wait;
    memcpy(be->kernel, cpu->kernel, sizeof be->kernel);
    be->fast_bf16 = cpu->fast_bf16;
    be->scratch_nbytes = cpu->scratch_nbytes;
    be->fallback = ref;
    be->host_carries = true;
    be->close = close_sim;
    rc = isa && *isa ? ps_cpu_kernels("PS_SIM_ISA", be->kernel) : 0;
    if (rc < 0) close_sim(be);
    else *out = be;
    return rc;
}
