/* SPDX-License-Identifier: BSD-3-Clause
 * The arena against a model: random requests and releases on a backend whose regions are addresses only, so that sizes
 * may be as large as they like. */
#include "check.h"
#include "mem/mem.h"

enum { GRAIN = 256, MAX_LIVE = 400 };

/* -- a backend of addresses ------------------------------------------------------------------------------------- */
static struct {
    int made, open;
    bool refuse;
    int64_t available;
    struct { uintptr_t base; size_t size; } region[256];
} world;

static int region_new(ps_backend *be, size_t nbytes, void **out)
{
    if (world.refuse) return ps_fail(PS_ENOMEM, "no regions today");
    if (ps_alloc_should_fail()) return ps_fail(PS_ENOMEM, "a test");
    uintptr_t base = (uintptr_t)(world.made + 1) << 44;
    world.region[world.made % 256].base = base;
    world.region[world.made++ % 256].size = nbytes;
    world.open++;
    *out = (void *)base;
    return 0;
}
static void region_free(ps_backend *be, void *p, size_t nbytes) { world.open--; }
static int64_t bytes_available(ps_backend *be) { return world.available; }

static void region_discard(ps_backend *be, void *p, size_t nbytes)
{
}

static ps_backend backend = { .name = "paper", .region_new = region_new, .region_free = region_free,
                              .bytes_available = bytes_available };

static void begin(ps_arena **arena)
{
    memset(&world, 0, sizeof world);
    world.available = INT64_MAX;
    OK(ps_arena_new(&backend, arena));
}

static uint64_t state = 88172645463325252u;
static uint64_t rnd(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static int64_t rounded(int64_t nbytes) { return nbytes ? (nbytes + GRAIN - 1) / GRAIN * GRAIN : GRAIN; }
static int64_t random_size(int max_log2) { return (int64_t)(rnd() >> (64 - 1 - rnd() % (unsigned)max_log2)); }

/* -- the model: a list of the allocated blocks -------------------------------------------------------------------- */
static struct { ps_block *block; uintptr_t at; int64_t size; } live[MAX_LIVE];
static int n_live;
static int64_t sum_live;

/* Checks that the block is in a region and overlaps no other block. */
static bool fits(uintptr_t at, int64_t size)
{
    bool inside = false;
    for (int i = 0; !inside && i < world.made; i++) {
        uintptr_t base = world.region[i].base;
        inside = at >= base && at + (uintptr_t)size <= base + world.region[i].size;
    }
    for (int i = 0; inside && i < n_live; i++)
        if (at < live[i].at + (uintptr_t)live[i].size && live[i].at < at + (uintptr_t)size) return false;
    return inside && at % GRAIN == 0;
}

static int take(ps_arena *arena, int64_t nbytes)
{
    ps_block *block = NULL;
    int rc = ps_arena_alloc(arena, nbytes, &block);
    if (rc < 0) return rc;
    live[n_live].block = block;
    live[n_live].at = (uintptr_t)ps_block_address(block);
    live[n_live].size = rounded(nbytes);
    if (!fits(live[n_live].at, live[n_live].size)) CHECK(!"a block overlaps another or leaves its region");
    sum_live += live[n_live++].size;
    return 0;
}

static void give(ps_arena *arena, int i)
{
    ps_arena_free(arena, live[i].block);
    sum_live -= live[i].size;
    live[i] = live[--n_live];
}

static void give_all(ps_arena *arena)
{
    while (n_live) give(arena, (int)(rnd() % (unsigned)n_live));
}

/* When no block is allocated, each region must be one block again, so a request for its whole size needs no growth. */
static void check_whole(ps_arena *arena)
{
    int made = world.made;
    CHECK(ps_arena_info(arena)->used == 0);
    for (int i = 0; i < made; i++) OK(take(arena, (int64_t)world.region[i].size));
    CHECK(world.made == made);
    give_all(arena);
}

static void test_random(void)
{
    ps_arena *arena;
    begin(&arena);
    int64_t peak = 0;
    bool right = true;
    for (int step = 0; step < 40000; step++) {
        unsigned phase = (unsigned)(step / 4000) % 2 ? 45 : 60;          /* the arena shrinks, then grows */
        if (n_live < MAX_LIVE && (n_live == 0 || rnd() % 100 < phase)) {
            if (take(arena, random_size(26)) < 0) CHECK(!"a request was refused");
            peak = sum_live > peak ? sum_live : peak;
        } else {
            give(arena, (int)(rnd() % (unsigned)n_live));
        }
        right = right && ps_arena_info(arena)->used == sum_live && ps_arena_info(arena)->peak == peak;
    }
    CHECK(right);
    give_all(arena);
    check_whole(arena);
    ps_arena_delete(arena);
    CHECK(world.open == 0);
}

/* A training step requests the same sizes in the same order. From the second step on, it must get the same
 * addresses. */
static void test_steps(void)
{
    ps_arena *arena;
    begin(&arena);
    uintptr_t first[300] = { 0 };
    ps_memory_info after_one = { 0 };
    uint64_t seed = rnd();
    for (int step = 0; step < 20; step++) {
        state = seed;
        for (int i = 0; i < 300; i++) {
            OK(take(arena, random_size(24)));
            if (step == 0) first[i] = live[n_live - 1].at;
            else if (first[i] != live[n_live - 1].at) CHECK(!"an address changed between equal steps");
            if (rnd() % 3 == 0) give(arena, (int)(rnd() % (unsigned)n_live));
        }
        give_all(arena);
        if (step == 0) after_one = *ps_arena_info(arena);
    }
    CHECK(!memcmp(&after_one, ps_arena_info(arena), sizeof after_one));
    check_whole(arena);
    ps_arena_delete(arena);
}

static void test_same_size(void)
{
    ps_arena *arena;
    begin(&arena);
    int64_t gib = (int64_t)1 << 30, sizes[] = { 1, GRAIN, GRAIN + 1, 5000, (64 << 20) + 3, gib, gib + 1, 5 * gib };
    for (int s = 0; s < 8; s++) {
        OK(take(arena, sizes[s]));
        give_all(arena);
        int64_t reserved = ps_arena_info(arena)->reserved;
        int made = world.made;
        for (int i = 0; i < 100; i++) {
            OK(take(arena, sizes[s]));
            give_all(arena);
        }
        CHECK(world.made == made && ps_arena_info(arena)->reserved == reserved);
    }
    OK(take(arena, 0));
    OK(take(arena, 0));
    CHECK(live[0].at != live[1].at);
    give_all(arena);
    OK(take(arena, (int64_t)1 << 43));
    give_all(arena);
    ps_arena_delete(arena);
    CHECK(world.open == 0);
}

static void test_largest(void)
{
    ps_arena *arena;
    begin(&arena);
    for (int log2 = 44; log2 <= 56; log2++) {           /* a size that ps_tensor_new accepts; meta has enough
                                                         * addresses */
        ps_block *block;
        OK(ps_arena_alloc(arena, (int64_t)1 << log2, &block));
        ps_arena_free(arena, block);
    }
    ps_arena_delete(arena);
    CHECK(world.open == 0);
}

/* At every moment, the bytes that are reported as busy are the bytes that a trim keeps. The peak is the largest such
 * number since it was last read. */
static void test_busy(void)
{
    ps_arena *arena;
    begin(&arena);
    backend.region_discard = region_discard;
    for (size_t page = 4096; page <= 65536; page *= 16) {
        backend.page_nbytes = page;
        int64_t most = ps_arena_busy(arena, NULL), peak;
        ps_arena_busy(arena, &peak);
        for (int step = 0; step < 3000; step++) {
            if (n_live < MAX_LIVE && (n_live == 0 || rnd() % 100 < 52)) OK(take(arena, random_size(18)));
            else give(arena, (int)(rnd() % (unsigned)n_live));
            int64_t busy = ps_arena_busy(arena, NULL);
            if (busy > most) most = busy;
            if (rnd() % 20) continue;
            CHECK(ps_arena_busy(arena, &peak) == busy && peak == most);
            most = busy;
            if (rnd() % 5) continue;
            ps_arena_trim(arena, true);
            CHECK(ps_arena_held(arena) == busy);
        }
        give_all(arena);
        CHECK(ps_arena_busy(arena, NULL) == 0);
        ps_arena_trim(arena, true);
        CHECK(ps_arena_held(arena) == 0);
    }
    backend.region_discard = NULL;
    backend.page_nbytes = 0;
    ps_arena_delete(arena);
}

/* Large blocks of two sizes in turn, with small blocks that are allocated while the large ones are free and stay. The
 * pages that have memory are those of the largest use at one moment, up to a region of small blocks. */
static void test_large(void)
{
    ps_arena *arena;
    begin(&arena);
    int64_t mib = 1 << 20, table = 1002 * mib, gib = 1024 * mib;
    for (int round = 0; round < 50; round++) {
        OK(take(arena, table));
        OK(take(arena, 8 * mib));
        give(arena, 0);
        for (int i = 0; i < 20; i++) OK(take(arena, 7 * mib));
        OK(take(arena, table - 30 * mib));           /* a little smaller: the same region */
        CHECK(ps_arena_info(arena)->used == sum_live);
        CHECK(ps_arena_held(arena) <= table + 160 * mib);
        if (round % 10 == 9) {
            backend.region_discard = region_discard;
            ps_arena_trim(arena, true);
            CHECK(ps_arena_held(arena) == ps_arena_busy(arena, NULL));
            backend.region_discard = NULL;
        }
        while (n_live > 1) give(arena, 0);
        give_all(arena);
        CHECK(ps_arena_busy(arena, NULL) == 0);
    }
    CHECK(world.made == 2);
    OK(take(arena, 2 * gib));                        /* too large for both regions */
    CHECK(world.made == 3 && ps_arena_held(arena) <= 2 * gib + table + 160 * mib);
    give_all(arena);
    for (int64_t size = 2 * gib; size > 1100 * mib; size -= 128 * mib) {      /* use the freed region */
        OK(take(arena, size));
        give_all(arena);
    }
    CHECK(world.made == 3);
    check_whole(arena);
    ps_arena_trim(arena, true);
    CHECK(ps_arena_held(arena) == 0 && world.open == 0);
    ps_arena_delete(arena);
}

/* A request that fails must leave everything unchanged. `word` is a part of the error. */
static void refused(ps_arena *arena, int64_t nbytes, const char *word)
{
    ps_memory_info before = *ps_arena_info(arena);
    ps_block *block = (ps_block *)&before;
    FAILS(ps_arena_alloc(arena, nbytes, &block), PS_ENOMEM, word);
    CHECK(block == (ps_block *)&before);
    CHECK(!memcmp(&before, ps_arena_info(arena), sizeof before));
}

static void test_limit(void)
{
    ps_arena *arena;
    begin(&arena);
    ps_arena_info(arena)->limit = 10 << 20;
    OK(take(arena, 6 << 20));
    refused(arena, 5 << 20, "the limit set is 10.0 MiB");
    OK(take(arena, 4 << 20));
    refused(arena, 1, "limit");
    give(arena, 0);
    OK(take(arena, 6 << 20));
    ps_arena_info(arena)->limit = 0;
    OK(take(arena, 100 << 20));
    ps_arena_info(arena)->limit = 10 << 20;              /* with a limit below the current use, no memory is
                                                          * allocated, and nothing is lost */
    refused(arena, 1, "limit");
    give_all(arena);
    OK(take(arena, 10 << 20));
    give_all(arena);
    ps_arena_info(arena)->limit = 0;
    check_whole(arena);
    ps_arena_delete(arena);
}

static void test_no_memory(void)
{
    ps_arena *arena;
    begin(&arena);
    world.refuse = true;
    refused(arena, 1000, "no regions today");
    world.refuse = false;
    OK(take(arena, 1000));
    world.available = 100 << 20;                         /* growth must leave 64 MiB free on the machine */
    OK(take(arena, 30 << 20));
    refused(arena, 60 << 20, "only 100.0 MiB left");
    world.available = INT64_MAX;
    OK(take(arena, 60 << 20));
    give_all(arena);
    world.available = 0;                                 /* memory that was touched before needs no query */
    OK(take(arena, 60 << 20));
    give_all(arena);
    ps_arena_delete(arena);
}

/* Fails each allocation of the engine's own memory, one per run, within a request that makes the arena grow. */
static void test_failing(void)
{
    for (int nth = 0; nth < 20; nth++) {
        ps_arena *arena;
        begin(&arena);
        OK(take(arena, 700 << 20));
        ps_memory_info before = *ps_arena_info(arena);
        ps_block *block = NULL;
        ps_test_fail_alloc(nth, 1);
        int rc = ps_arena_alloc(arena, 700 << 20, &block);
        bool hit = ps_test_fail_alloc_left() < 0;
        ps_test_fail_alloc(-1, 0);
        CHECK(rc == 0 || (hit && rc == PS_ENOMEM));      /* rc is 0 if a smaller region was allocated after the
                                                          * failure */
        if (rc == 0) ps_arena_free(arena, block);
        else CHECK(ps_arena_info(arena)->used == before.used && ps_arena_info(arena)->peak == before.peak && !block);
        OK(take(arena, 700 << 20));                      /* afterwards the arena works as if nothing had failed */
        CHECK(world.made == 2);
        give_all(arena);
        check_whole(arena);
        ps_arena_delete(arena);
        CHECK(world.open == 0);
        if (!hit) {
            CHECK(nth >= 3);
            return;
        }
    }
    CHECK(!"it never succeeded");
}

int main(void)
{
    test_random();
    test_steps();
    test_same_size();
    test_largest();
    test_busy();
    test_large();
    test_limit();
    test_no_memory();
    test_failing();
    return end_checks();
}
