/* SPDX-License-Identifier: BSD-3-Clause
 * The backend sim: its memory and settings, the arena on a device with limited memory, and the copy engine: bytes,
 * order, `after`, times, and abandoned copies. */
#include <math.h>
#include <time.h>
#include "backend/backend.h"
#include "backend/sim/sim.h"
#include "check.h"
#include "mem/mem.h"
#include "tensor/tensor.h"

#define MIB ((int64_t)1 << 20)
enum { TRIES = 8 };

static ps_backend *ref, *cpu, *sim;

static void open_sim(int64_t memory, double bytes_per_s, double latency_s)
{
    OK(ps_backend_sim_open(ref, cpu, &sim));
    OK(ps_sim_configure(sim, memory, bytes_per_s, bytes_per_s, latency_s));
}

static void *region(int64_t nbytes)
{
    void *p = NULL;
    OK(sim->region_new(sim, (size_t)nbytes, &p));
    return p;
}

static ps_copy *start(bool to_device, void *dst, const void *src, int64_t nbytes, ps_copy *after)
{
    ps_copy *copy = NULL;
    OK(sim->copy_start(sim, to_device, dst, src, (size_t)nbytes, after, &copy));
    return copy;
}

static void fill(uint8_t *p, int64_t n, unsigned seed)
{
    for (int64_t i = 0; i < n; i++, seed = seed * 1664525u + 1013904223u) p[i] = (uint8_t)(seed >> 24);
}

/* -- settings ----------------------------------------------------------------------------------------------------- */
static int open_with(const char *name, const char *value)
{
    setenv(name, value, 1);
    ps_backend *be = NULL;
    int rc = ps_backend_sim_open(ref, cpu, &be);
    unsetenv(name);
    if (rc == 0) be->close(be);
    return rc;
}

static void memory_is(const char *text, int64_t nbytes)
{
    setenv("PS_SIM_MEMORY", text, 1);
    OK(ps_backend_sim_open(ref, cpu, &sim));
    unsetenv("PS_SIM_MEMORY");
    if (!CHECK(sim->bytes_available(sim) == nbytes)) printf("PS_SIM_MEMORY=%s\n", text);
    sim->close(sim);
}

static void test_settings(void)
{
    memory_is("", 1024 * MIB);
    memory_is("1000000", 1000000);
    memory_is("64MiB", 64 * MIB);
    memory_is("64M", 64 * MIB);
    memory_is("1.5 GiB", 1536 * MIB);
    memory_is("2G", 2048 * MIB);
    memory_is("12KiB", 12288);
    memory_is("12K", 12288);
    const char *bad[] = { "lots", "0", "-1MiB", "1TB", "1 GiB or so", "nan", "inf", "1e30" };
    for (int i = 0; i < 8; i++) FAILS(open_with("PS_SIM_MEMORY", bad[i]), PS_EINVAL, bad[i]);
    FAILS(open_with("PS_SIM_BANDWIDTH", "fast"), PS_EINVAL, "PS_SIM_BANDWIDTH is 'fast'");
    FAILS(open_with("PS_SIM_BANDWIDTH", "0"), PS_EINVAL, "GB/s");
    FAILS(open_with("PS_SIM_LATENCY", "-1"), PS_EINVAL, "microseconds");
    FAILS(open_with("PS_SIM_ISA", "neon"), PS_EINVAL, "PS_SIM_ISA is 'neon'");
    OK(open_with("PS_SIM_ISA", "sse2"));
    OK(open_with("PS_SIM_ISA", "best"));
    OK(open_with("PS_SIM_LATENCY", "0"));

    setenv("PS_SIM_BANDWIDTH", "2.5", 1);
    OK(ps_backend_sim_open(ref, cpu, &sim));
    unsetenv("PS_SIM_BANDWIDTH");
    CHECK(!strcmp(sim->name, "sim") && !sim->is_host && !sim->no_data && sim->fallback == ref);
    CHECK(strstr(sim->describe, "1024 MiB") && strstr(sim->describe, "2.5 GB/s in") && strstr(sim->describe, "10 us"));
    CHECK(!memcmp(sim->kernel, cpu->kernel, sizeof sim->kernel));
    OK(ps_sim_configure(sim, 0, 0, 1e9, -1));
    CHECK(strstr(sim->describe, "1024 MiB") && strstr(sim->describe, "2.5 GB/s in, 1 GB/s out, 10 us"));
    FAILS(ps_sim_configure(sim, -1, 0, 0, 0), PS_EINVAL, "-1 bytes");
    FAILS(ps_sim_configure(sim, 0, -1, 0, 0), PS_EINVAL, "must not be negative");
    FAILS(ps_sim_configure(sim, 0, 0, 0, (double)INFINITY), PS_EINVAL, "latency");
    FAILS(ps_sim_configure(cpu, MIB, 0, 0, 0), PS_EUNSUP, "device cpu");
    sim->close(sim);
    for (int nth = 0; nth < 2; nth++) {                         /* its only allocation is for itself */
        ps_backend *be = NULL;
        ps_test_fail_alloc(nth, 1);
        int rc = ps_backend_sim_open(ref, cpu, &be);
        ps_test_fail_alloc(-1, 0);
        CHECK(nth == 0 ? rc == PS_ENOMEM && !be : rc == 0);
        if (be) be->close(be);
    }
}

/* -- memory ------------------------------------------------------------------------------------------------------- */
static void test_memory(void)
{
    open_sim(8 * MIB, 8e9, 0);
    uint8_t *a = region(5 * MIB), *b = region(3 * MIB);
    memset(a, 1, 5 * MIB);
    memset(b, 2, 3 * MIB);
    CHECK(sim->bytes_available(sim) == 0);
    void *p = &p;
    FAILS(sim->region_new(sim, 1, &p), PS_ENOMEM, "sim has 8.0 MiB of memory and 0.0 MiB of it left");
    CHECK(p == &p);
    sim->region_free(sim, a, 5 * MIB);
    CHECK(sim->bytes_available(sim) == 5 * MIB);
    FAILS(sim->region_new(sim, 6 * MIB, &p), PS_ENOMEM, "PS_SIM_MEMORY");
    FAILS(ps_sim_configure(sim, 2 * MIB, 0, 0, -1), PS_ESTATE, "3.0 MiB of it are in use");
    OK(ps_sim_configure(sim, 3 * MIB, 0, 0, -1));
    CHECK(sim->bytes_available(sim) == 0);
    OK(ps_sim_configure(sim, 4 * MIB, 0, 0, -1));
    for (int nth = 0; nth < 2; nth++) {
        ps_test_fail_alloc(nth, 1);
        CHECK(sim->region_new(sim, MIB, &p) == PS_ENOMEM && sim->bytes_available(sim) == MIB);
        ps_test_fail_alloc(-1, 0);
    }
    OK(ps_sim_configure(sim, (int64_t)1 << 50, 0, 0, -1));
    FAILS(sim->region_new(sim, (size_t)1 << 37, &p), PS_ENOMEM, "this machine has");
    OK(ps_sim_configure(sim, 8 * MIB, 0, 0, -1));

    CHECK(sim->bytes_available(sim) == 5 * MIB);                /* addresses use no memory before they are written */
    OK(sim->region_reserve(sim, 100 * MIB, (void **)&a));
    CHECK(sim->bytes_available(sim) == 5 * MIB);
    OK(sim->region_commit(sim, a, 4 * MIB));
    memset(a, 3, 4 * MIB);
    CHECK(sim->bytes_available(sim) == MIB);
    FAILS(sim->region_commit(sim, a + 4 * MIB, 2 * MIB), PS_ENOMEM, "1.0 MiB of it left");
    FAILS(sim->region_commit(sim, a + 90 * MIB, 11 * MIB), PS_EINVAL, "not in a region");
    FAILS(sim->region_commit(sim, a - 4096, 4096), PS_EINVAL, "not in a region");
    ps_copy *copy = NULL;
    FAILS(sim->copy_start(sim, false, &p, a + 100 * MIB - 1, 2, NULL, &copy), PS_EINVAL, "not in sim's memory");
    sim->region_discard(sim, a + MIB, 2 * MIB);                 /* a hole */
    CHECK(sim->bytes_available(sim) == 3 * MIB && a[MIB - 1] == 3 && a[3 * MIB] == 3);
    OK(sim->region_commit(sim, a + MIB, MIB));
    CHECK(a[MIB] == 0 && sim->bytes_available(sim) == 2 * MIB); /* a freed block uses no memory */
    sim->region_free(sim, a, 100 * MIB);
    CHECK(sim->bytes_available(sim) == 5 * MIB);
    sim->close(sim);                                            /* closing returns b's memory */
}

static ps_block *block(ps_arena *arena, int64_t nbytes)
{
    ps_block *b = NULL;
    OK(ps_arena_alloc(arena, nbytes, &b));
    return b;
}

/* The arena has addresses for the whole device. It has memory for the blocks that were in use at the same time, and
 * can return unused memory. */
static void test_arena(void)
{
    ps_arena *arena;
    ps_block *b = NULL, *all[64];
    open_sim(64 * MIB, 8e9, 0);
    OK(ps_arena_new(sim, &arena));
    const ps_memory_info *info = ps_arena_info(arena);
    b = block(arena, 1000);
    CHECK(info->reserved == 4096 && sim->bytes_available(sim) == 64 * MIB - 4096);
    ps_arena_free(arena, b);
    b = block(arena, 64 * MIB);                                 /* the whole device in one piece */
    CHECK(info->reserved == 64 * MIB && sim->bytes_available(sim) == 0);
    ps_arena_free(arena, b);
    for (int i = 0; i < 64; i++) all[i] = block(arena, MIB);
    FAILS(ps_arena_alloc(arena, 1, &b), PS_ENOMEM, "device sim: 0.0 MiB wanted, 64.0 of 64.0 MiB held in use: sim has");
    CHECK(strstr(ps_error_message(), "PS_SIM_MEMORY") != NULL);
    for (int i = 0; i < 64; i += 2) ps_arena_free(arena, all[i]);
    b = block(arena, 30 * MIB);                                 /* the memory of 1 MiB holes is used where it is
                                                                 * needed */
    CHECK(info->reserved == 62 * MIB && sim->bytes_available(sim) == 2 * MIB);
    FAILS(ps_arena_alloc(arena, 3 * MIB, &all[0]), PS_ENOMEM, "3.0 MiB wanted, 62.0 of 62.0 MiB held in use");
    all[0] = block(arena, 2 * MIB);                             /* and nothing is lost */
    CHECK(sim->bytes_available(sim) == 0);
    ps_arena_free(arena, all[0]);
    ps_arena_free(arena, b);
    CHECK(ps_arena_trim(arena, true) && info->reserved == 32 * MIB && info->used == 32 * MIB);
    CHECK(!ps_arena_trim(arena, true) && !ps_arena_trim(arena, false));
    uint8_t *others = region(32 * MIB);
    FAILS(ps_arena_alloc(arena, 2 * MIB, &b), PS_ENOMEM, "2.0 MiB wanted, 32.0 of 32.0 MiB held in use");
    sim->region_free(sim, others, 32 * MIB);
    for (int i = 33; i < 64; i += 2) ps_arena_free(arena, all[i]);
    CHECK(ps_arena_trim(arena, false) && info->reserved == 16 * MIB);
    for (int i = 1; i < 32; i += 4) ps_arena_free(arena, all[i]);
    CHECK(!ps_arena_trim(arena, false) && info->reserved == 16 * MIB);   /* holes remain until a trim with holes */
    for (int i = 3; i < 32; i += 4) ps_arena_free(arena, all[i]);
    CHECK(ps_arena_trim(arena, false) && info->reserved == 0 && sim->bytes_available(sim) == 64 * MIB);

    OK(ps_sim_configure(sim, 3 * MIB / 2 + 100, 0, 0, -1));     /* less than one step of growth, and an odd size */
    b = block(arena, 3 * MIB / 2);
    CHECK(info->reserved == 3 * MIB / 2);
    FAILS(ps_arena_alloc(arena, 100, &all[0]), PS_ENOMEM, "0.0 MiB of it left");
    ps_arena_free(arena, b);
    OK(ps_sim_configure(sim, 2048 * MIB, 0, 0, -1));
    all[0] = block(arena, MIB);
    all[1] = block(arena, 1900 * MIB);                          /* more than the addresses in the first region */
    CHECK(info->reserved == 1900 * MIB + 3 * MIB / 2);
    ps_arena_free(arena, all[1]);
    all[1] = block(arena, 500 * MIB);                           /* the block is freed to make room in the first
                                                                 * region */
    CHECK(info->reserved == 501 * MIB);
    ps_arena_free(arena, all[0]);
    ps_arena_free(arena, all[1]);
    ps_arena_delete(arena);
    CHECK(sim->bytes_available(sim) == 2048 * MIB);
    sim->close(sim);
}

/* -- copies ------------------------------------------------------------------------------------------------------- */
static void test_bytes(void)
{
    open_sim(64 * MIB, 20e9, 1e-6);
    int64_t sizes[] = { 0, 1, 7, 4096, 65536, 65537, 3 * MIB + 5, 20 * MIB };
    uint8_t *device = region(24 * MIB), *host = malloc(24 * MIB), *back = malloc(24 * MIB);
    for (int i = 0; i < 8; i++) {
        int64_t n = sizes[i], at = i * 13;
        fill(host, n, (unsigned)i);
        memset(device, 0xee, (size_t)(n + 2 * at + 1));
        memset(back, 0xdd, (size_t)n + 1);
        OK(sim->copy_in(sim, device + at, host, (size_t)n));
        CHECK(!memcmp(device + at, host, (size_t)n) && device[at + n] == 0xee && (!at || device[at - 1] == 0xee));
        OK(sim->copy_out(sim, back, device + at, (size_t)n));
        CHECK(!memcmp(back, host, (size_t)n) && back[n] == 0xdd);
    }
    free(host);
    free(back);
    sim->close(sim);
}

static void test_order(void)
{
    enum { N = 40 };
    open_sim(16 * MIB, 4e9, 2e-6);
    uint8_t *device = region(MIB), *host = malloc(N * MIB), *back = malloc(N * MIB);
    ps_copy *in[N], *out[N];
    fill(host, N * MIB, 5);
    for (int i = 0; i < N; i++) {                               /* one slot, which is filled and emptied alternately */
        in[i] = start(true, device, host + i * MIB, MIB, i ? out[i - 1] : NULL);
        out[i] = start(false, back + i * MIB, device, MIB, in[i]);
        if (i % 7 == 3) CHECK(sim->copy_wait(sim, in[i - 1], true) == 1);
    }
    CHECK(sim->copy_wait(sim, out[N - 1], true) == 1);          /* copies are in order, so all other copies have
                                                                 * ended, too */
    for (int i = 0; i < N; i++) {
        if (i < N - 1) CHECK(sim->copy_wait(sim, out[i], false) == 1);
        if ((i + 1) % 7 != 3 || i == N - 1) CHECK(sim->copy_wait(sim, in[i], false) == 1);
    }
    CHECK(!memcmp(host, back, N * MIB));
    for (int i = 0; i < N; i++) in[i] = start(true, device, host + i * MIB, MIB, NULL);
    for (int i = N - 1; i >= 0; i--) CHECK(sim->copy_wait(sim, in[i], true) == 1);
    CHECK(!memcmp(device, host + (N - 1) * MIB, MIB));          /* the slot contains the last copy */
    free(host);
    free(back);
    sim->close(sim);
}

static void test_errors(void)
{
    open_sim(4 * MIB, 8e9, 0);
    uint8_t *device = region(MIB), host[64] = { 0 };
    ps_copy *copy = NULL;
    FAILS(sim->copy_start(sim, true, host, host, 64, NULL, &copy), PS_EINVAL, "destination is not in sim's memory");
    FAILS(sim->copy_start(sim, false, host, host, 64, NULL, &copy), PS_EINVAL, "source is not in sim's memory");
    FAILS(sim->copy_start(sim, true, device + MIB - 63, host, 64, NULL, &copy), PS_EINVAL, "64 bytes to sim");
    FAILS(sim->copy_start(sim, true, device, device + 100, 64, NULL, &copy), PS_EINVAL, "not in host memory");
    FAILS(sim->copy_start(sim, false, device - 1, device, 64, NULL, &copy), PS_EINVAL, "not in host memory");
    FAILS(sim->copy_start(sim, true, device, NULL, 64, NULL, &copy), PS_EINVAL, "not in host memory");
    static const char *const words[] = { "a thread for sim's copies cannot be started", "no memory" };
    for (int nth = 0; nth < 2; nth++) {
        ps_test_fail_alloc(nth, 1);
        FAILS(sim->copy_start(sim, true, device, host, 64, NULL, &copy), PS_ENOMEM, words[nth]);
        ps_test_fail_alloc(-1, 0);
        CHECK(!copy);
    }
    OK(sim->copy_in(sim, device, host, 64));
    sim->close(sim);
}

/* -- times -------------------------------------------------------------------------------------------------------- */
/* By the model, a copy takes latency + nbytes / rate on any machine. It begins when it was requested, or when its
 * lane is free and the copy for which it waits has ended, whichever is later. The test checks that no copy ends
 * earlier. */
static uint8_t *device_bytes, *host_bytes, *other_bytes;
enum { PIECE = 2 << 20 };                                       /* takes 20 ms at the rate below */
static const double rate = 2097152 / 0.02;
typedef struct span { double begin, end; } span;

static bool near(double x, double y) { return fabs(x - y) < 1e-9; }

/* Starts a copy that cannot begin before `least`, and checks its modelled times. */
static span begins(bool to_device, int64_t at, int64_t nbytes, ps_copy *after, double least, double latency,
                   double takes, ps_copy **out)
{
    span s;
    double before = ps_now();
    if (to_device) *out = start(true, device_bytes + at, host_bytes, nbytes, after);
    else *out = start(false, other_bytes, device_bytes + at, nbytes, after);
    double behind = ps_now();
    ps_sim_copy_times(*out, &s.begin, &s.end);
    CHECK(s.begin >= fmax(before, least) + latency - 1e-9 && s.begin <= fmax(behind, least) + latency + 1e-9);
    CHECK(near(s.end - s.begin, takes));
    return s;
}

static void ends(ps_copy *copy, span s) { CHECK(sim->copy_wait(sim, copy, true) == 1 && ps_now() >= s.end); }

static void one_way(double latency, double takes)
{
    ps_copy *in;
    span s = begins(true, 0, PIECE, NULL, 0, latency, takes, &in);
    ends(in, s);
}

static void both_ways(void)
{
    ps_copy *in, *out;
    span there = begins(true, 0, PIECE, NULL, 0, 0, 0.02, &in);
    span back = begins(false, PIECE, PIECE, NULL, 0, 0, 0.02, &out);    /* each direction is independent */
    ends(in, there);
    ends(out, back);
}

static void one_after_another(void)
{
    ps_copy *in, *out;
    span there = begins(true, 0, PIECE, NULL, 0, 0, 0.02, &in);
    span back = begins(false, 0, PIECE, in, there.end, 0, 0.02, &out);
    int rc = sim->copy_wait(sim, out, false);
    CHECK(rc == 0 || ps_now() >= back.end);
    if (rc == 0) ends(out, back);
    CHECK(sim->copy_wait(sim, in, false) == 1);
}

/* If threads wake up late, the delays must not add up. A copy begins at the modelled end of the previous copy. */
static void many_small(void)
{
    enum { N = 100 };
    ps_copy *copies[N];
    span spans[N];
    double least = 0;
    for (int i = 0; i < N; i++) {
        spans[i] = begins(true, i * 256, PIECE / N, NULL, least, 0, PIECE / N / rate, &copies[i]);
        least = spans[i].end;
    }
    for (int i = 0; i < N; i++) ends(copies[i], spans[i]);
}

static double process_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A thread sleeps while it waits, so 70 ms of copying and idling need only a few milliseconds of processor time; with a
 * sanitizer they need more, but not half of the 70 ms that a thread without sleep needs. */
static void test_idle_cost(void)
{
    const double IDLE_S = 0.035;
    double least = FAR_S;
    for (int i = 0; i < TRIES && least >= IDLE_S; i++) {
        double before = process_now();
        ps_copy *in = start(true, device_bytes, host_bytes, PIECE, NULL);
        CHECK(sim->copy_wait(sim, in, true) == 1);
        struct timespec pause = { .tv_nsec = 50000000 };
        nanosleep(&pause, NULL);
        least = fmin(least, process_now() - before);
    }
    CHECK(least < IDLE_S);
}

static void test_times(void)
{
    open_sim(8 * MIB, rate, 0);
    device_bytes = region(2 * PIECE);
    host_bytes = calloc(PIECE, 1);
    other_bytes = calloc(PIECE, 1);
    one_way(0, 0.02);
    both_ways();
    one_after_another();
    many_small();
    test_idle_cost();
    OK(ps_sim_configure(sim, 0, rate * 2, 0, 0.015));
    one_way(0.015, 0.01);
    OK(ps_sim_configure(sim, 0, (double)INFINITY, rate, 0));
    one_way(0, 0);
    free(host_bytes);
    free(other_bytes);
    sim->close(sim);
}

/* -- abandoned copies --------------------------------------------------------------------------------------------- */
/* Freeing memory and closing a backend do not wait for copies in flight, which would take minutes by the model. */
static void test_given_up(void)
{
    open_sim(16 * MIB, 1e4, 50);
    uint8_t *a = region(4 * MIB), *b = region(4 * MIB), *host = calloc(4 * MIB, 1), *out = calloc(4 * MIB, 1);
    double began = ps_now();
    ps_copy *first = start(true, a, host, 4 * MIB, NULL);
    ps_copy *second = start(false, out, a, 4 * MIB, first);
    ps_copy *third = start(true, b, host, 64, first);
    sim->region_free(sim, a, 4 * MIB);
    FAILS(sim->copy_wait(sim, first, false), PS_ESTATE, "4194304 bytes was under way when sim's memory was freed");
    FAILS(sim->copy_wait(sim, second, true), PS_ESTATE, "freed");
    CHECK(sim->copy_wait(sim, third, false) == 0);
    start(true, b, host, 4 * MIB, NULL);
    start(false, out, b, 4 * MIB, third);
    sim->close(sim);
    CHECK(ps_now() - began < PROMPT_S);
    memset(host, 1, 4 * MIB);                                   /* no thread accesses this memory any more */
    memset(out, 1, 4 * MIB);
    free(host);
    free(out);
}

/* -- in a context ------------------------------------------------------------------------------------------------- */
static void test_context(void)
{
    ps_ctx *ctx;
    ps_tensor *t = NULL, *moved = NULL, *again = NULL;
    int device = -1, host = -1;
    OK(ps_ctx_new(&ctx));
    OK(ps_device_find(ctx, "sim", &device));
    OK(ps_device_find(ctx, "cpu", &host));
    CHECK(device == 3 && host == 0 && ps_device_count(ctx) == 4);
    FAILS(ps_device_find(ctx, "gpu", &host), PS_EUNSUP, "cpu, ref, meta, sim");
    int64_t shape[] = { 3, 5 };
    float x[15], y[15] = { 0 };
    for (int i = 0; i < 15; i++) x[i] = (float)i;
    OK(ps_tensor_new(ctx, PS_F32, host, 2, shape, &t));
    OK(ps_tensor_write(t, x, sizeof x));
    OK(ps_tensor_to_device(t, device, &moved));
    double value;
    FAILS(ps_tensor_read_f64(moved, 0, 1, &value), PS_EUNSUP, "move the tensor to the cpu first: it is on sim");
    FAILS(ps_tensor_nonzero(moved, &again), PS_EUNSUP, "it is on sim");
    OK(ps_tensor_to_device(moved, host, &again));
    OK(ps_tensor_read(again, y, sizeof y));
    CHECK(!memcmp(x, y, sizeof x));
    ps_tensor_release(again);
    for (int nth = 0;; nth++) {                                 /* a copy that fails keeps no memory */
        ps_memory_info before, after;
        OK(ps_memory_get(ctx, host, &before));
        ps_test_fail_alloc(nth, 1);
        int rc = ps_tensor_to_device(moved, host, &again);
        ps_test_fail_alloc(-1, 0);
        if (rc == 0) {
            ps_tensor_release(again);
            CHECK(nth >= 3);
            break;
        }
        OK(ps_memory_get(ctx, host, &after));
        CHECK(rc == PS_ENOMEM && before.used == after.used);
    }
    ps_tensor_release(moved);
    ps_tensor_release(t);
    ps_ctx_free(ctx);
}

int main(void)
{
    if (ps_backend_ref_open(&ref) < 0 || ps_backend_cpu_open(ref, &cpu) < 0) return 1;
    test_settings();
    test_memory();
    test_arena();
    test_bytes();
    test_order();
    test_errors();
    test_times();
    test_given_up();
    cpu->close(cpu);
    ref->close(ref);
    test_context();
    return end_checks();
}
