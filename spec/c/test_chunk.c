/* SPDX-License-Identifier: BSD-3-Clause
 * The chunk manager against a shadow copy of its contents: random pins, allocations, adoptions and steps (planned, and
 * departing from their plan) on a device, the host and a disk file, with every policy and every kind of budget. Budgets
 * hold at every moment, a plan that fits is served without failing, injected faults change no contents, and all memory
 * comes back. */
#include <dirent.h>
#include <errno.h>
#include <sys/resource.h>
#include <unistd.h>
#include "backend/backend.h"
#include "check.h"
#include "chunk/chunk.h"
#include "chunk/disk.h"

enum { CHUNKS = 24, PER_CHUNK = 4, STORAGES = CHUNKS * PER_CHUNK, PLAIN = 12, OPS = 40, PINS = 4, PAGE = 4096 };
enum { CPU, SIM, DEVICES };

static ps_backend *ref, *devices[DEVICES];
static ps_mem *plain_mem;
static ps_step under_way;                    /* the step of the chunks */
static char folder[512];
static uint64_t state = 88172645463325252u;

static uint64_t draw(uint64_t n)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % n;
}

/* A storage and its expected contents. `version` 0 means zeros. */
typedef struct shadow {
    ps_storage *s;
    uint32_t key, version;
    int32_t chunk;                        /* -1: plain */
} shadow;

typedef struct world {
    ps_chunks *cs;
    ps_mem *mem;
    ps_chunk_config config;
    shadow chunked[STORAGES], plain[PLAIN];
    int n_tiers;
    bool faults;                          /* whether injected faults are enabled, so that errors are expected */
    bool small_disk;                      /* whether the disk might have no free piece that is large enough */
    int64_t refused, failed, served;
} world;

static uint32_t next_key = 1;

/* -- contents ----------------------------------------------------------------------------------------------------- */
static uint32_t word_at(const shadow *x, int64_t i)
{
    return x->version ? (x->key * 2654435761u) ^ (x->version * 40503u) ^ (uint32_t)i * 2246822519u : 0;
}

static void write_all(const shadow *x, void *p)
{
    uint32_t *to = p;
    for (int64_t i = 0; i < x->s->nbytes / 4; i++) to[i] = word_at(x, i);
}

static bool holds(const shadow *x, const void *p)
{
    const uint32_t *at = p;
    for (int64_t i = 0; i < x->s->nbytes / 4; i++) if (at[i] != word_at(x, i)) return false;
    return true;
}

/* -- conditions that must hold at every moment -------------------------------------------------------------------- */
static void check_budgets(world *w, int line)
{
    for (int t = 0; t < w->n_tiers; t++) {
        ps_tier_info info;
        ps_tier_get(w->cs, t, &info);
        char text[200];
        snprintf(text, sizeof text, "tier %s holds %lld in chunks and %lld besides of a budget of %lld", info.name,
                 (long long)info.chunks, (long long)info.other, (long long)info.budget);
        if (info.budget && info.chunks + info.other > info.budget) check(0, line, "within the budget", text);
    }
}

/* Records an error that is allowed: memory is short (and the error says so), or the fault was injected. */
static void note_failure(world *w, int rc, int line)
{
    bool fine = rc == PS_ENOMEM || rc == PS_ENOSPC || (w->faults && rc == PS_EIO);
    check(fine, line, "an error that may be", ps_error_message());
    if (w->faults) w->failed++;
    else w->refused++;
}

/* -- ops ---------------------------------------------------------------------------------------------------------- */
typedef struct op {
    int n, device;
    int storage[PINS];
    unsigned access[PINS];
} op;

static op random_op(world *w)
{
    op o = { .n = 1 + (int)draw(PINS), .device = draw(3) ? w->config.device : w->config.host };
    for (int i = 0; i < o.n; i++) {
        do o.storage[i] = (int)draw(STORAGES);
        while (!w->chunked[o.storage[i]].s);
        o.access[i] = draw(3) ? PS_READ : draw(2) ? PS_WRITE : PS_READ | PS_WRITE;
        for (int k = 0; k < i; k++) if (o.storage[k] == o.storage[i]) o.access[i] = o.access[k] = PS_READ;
    }
    return o;
}

static bool run_op(world *w, const op *o, bool must)
{
    void *p[PINS];
    int n = 0, rc = 0;
    ps_chunks_tick(w->cs);
    for (; n < o->n; n++) {
        shadow *x = &w->chunked[o->storage[n]];
        rc = ps_storage_pin(x->s, o->device, o->access[n], &p[n]);
        if (rc < 0) break;
    }
    if (rc < 0) {
        if (must && !(rc == PS_ENOSPC && w->small_disk)) check(0, __LINE__, "a planned pin", ps_error_message());
        note_failure(w, rc, __LINE__);
    } else {
        w->served++;
        for (int i = 0; i < n; i++) {
            shadow *x = &w->chunked[o->storage[i]];
            if (!holds(x, p[i])) CHECK(!"a pinned storage holds what was written last");
        }
        for (int i = 0; i < n; i++) {
            shadow *x = &w->chunked[o->storage[i]];
            if (!(o->access[i] & PS_WRITE)) continue;
            x->version++;
            write_all(x, p[i]);
        }
    }
    check_budgets(w, __LINE__);
    while (n > 0) {                                        /* frees them in random order */
        int i = (int)draw((uint64_t)n--);
        shadow *x = &w->chunked[o->storage[i]];
        if (rc == 0 && !holds(x, p[i])) CHECK(!"a pinned storage stays as it is");
        ps_storage_unpin(x->s, o->device);
        p[i] = p[n];
        ((op *)(uintptr_t)o)->storage[i] = o->storage[n];
        ((op *)(uintptr_t)o)->access[i] = o->access[n];
    }
    return rc == 0;
}

/* Runs a copy of an op, since run_op shuffles it. */
static bool run(world *w, op o, bool must) { return run_op(w, &o, must); }

/* -- chunks and plain storages are made and freed ----------------------------------------------------------------- */
static void storage_free(shadow *x)
{
    if (!x->s) return;
    ps_storage_free(x->s);
    ps_free(x->s);
    x->s = NULL;
}

static void new_chunk(world *w, int at)
{
    int32_t id;
    int64_t offset = 0, sizes[PER_CHUNK];
    int n = 1 + (int)draw(PER_CHUNK);
    int64_t nbytes = 0;
    for (int i = 0; i < n; i++) nbytes += (sizes[i] = (int64_t)(1 + draw(40)) * 256);
    nbytes = (nbytes + (int64_t)draw(2) * PAGE + PAGE - 1) / PAGE * PAGE;
    int rc = ps_chunk_new(w->cs, (int)draw(5), 0, at, PS_F32, nbytes, &id);
    if (rc < 0) {
        note_failure(w, rc, __LINE__);
        return;
    }
    for (int i = 0; i < n; i++) {
        shadow *x = &w->chunked[at * PER_CHUNK + i];
        rc = ps_chunk_storage_new(w->cs, id, offset, sizes[i], draw(2) ? "a.weight" : NULL, &x->s);
        if (rc < 0) {
            x->s = NULL;
            note_failure(w, rc, __LINE__);
            return;      /* a chunk without a storage remains until closing frees it */
        }
        x->key = next_key++, x->version = 0, x->chunk = id;
        offset += sizes[i];
    }
}

static void replace_chunk(world *w)
{
    int at = (int)draw(CHUNKS);
    for (int i = 0; i < PER_CHUNK; i++) storage_free(&w->chunked[at * PER_CHUNK + i]);
    new_chunk(w, at);
}

/* Accesses a plain storage's bytes from the host. The bytes of a sim storage are copied. */
static void plain_bytes(world *w, shadow *x, bool write)
{
    void *p;
    OK(ps_storage_pin(x->s, x->s->device, PS_READ, &p));
    ps_backend *be = devices[x->s->device];
    uint32_t *host = malloc((size_t)x->s->nbytes);
    if (write) {
        x->version++;
        write_all(x, host);
        if (be->copy_in) OK(be->copy_in(be, p, host, (size_t)x->s->nbytes));
        else memcpy(p, host, (size_t)x->s->nbytes);
    } else {
        if (be->copy_out) OK(be->copy_out(be, host, p, (size_t)x->s->nbytes));
        else memcpy(host, p, (size_t)x->s->nbytes);
        if (!holds(x, host)) CHECK(!"a plain storage stays as it is");
    }
    free(host);
    ps_storage_unpin(x->s, x->s->device);
}

static void plain_traffic(world *w)
{
    shadow *x = &w->plain[draw(PLAIN)];
    if (x->s) {
        if (!w->faults) plain_bytes(w, x, false);
        storage_free(x);
        return;
    }
    ps_storage *s = ps_alloc0(sizeof *s);
    if (!s) return;
    *s = (ps_storage){ .nbytes = (int64_t)(1 + draw(120)) * 256, .refs = 1,
                       .device = draw(2) ? w->config.device : w->config.host };
    int rc = w->mem->table->alloc(w->mem, s);
    check_budgets(w, __LINE__);
    if (rc < 0) {
        ps_free(s);
        note_failure(w, rc, __LINE__);
        return;
    }
    *x = (shadow){ .s = s, .key = next_key++, .chunk = -1 };
    if (!w->faults) plain_bytes(w, x, true);
    else x->version = 0, storage_free(x);
}

static void scratch_traffic(world *w)
{
    int device = draw(2) ? w->config.device : w->config.host;
    void *handle = NULL, *p = NULL;
    int rc = w->mem->table->scratch(w->mem, device, (int64_t)(1 + draw(60000)), &handle, &p);
    check_budgets(w, __LINE__);
    if (rc < 0) note_failure(w, rc, __LINE__);
    else w->mem->table->scratch_free(w->mem, device, handle);
}

/* Moves a plain storage with its contents into a chunk, in place of another storage. */
static void adopt(world *w)
{
    shadow *x = &w->plain[draw(PLAIN)];
    if (!x->s) return;
    int at = (int)draw(CHUNKS);
    int32_t id;
    int rc = ps_chunk_new(w->cs, PS_KIND_PARAM, 0, at, PS_F32, (x->s->nbytes + PAGE - 1) / PAGE * PAGE, &id);
    if (rc == 0) rc = ps_chunk_adopt(w->cs, x->s, id, 0, "adopted", false);
    if (rc < 0) {
        note_failure(w, rc, __LINE__);
        return;
    }
    for (int i = 0; i < PER_CHUNK; i++) storage_free(&w->chunked[at * PER_CHUNK + i]);
    w->chunked[at * PER_CHUNK] = *x;
    w->chunked[at * PER_CHUNK].chunk = id;
    x->s = NULL;
}

static void check_contents(world *w)
{
    w->faults = false;
    for (int i = 0; i < STORAGES; i++) {
        if (!w->chunked[i].s) continue;
        op o = { .n = 1, .device = draw(2) ? w->config.device : w->config.host, .storage = { i },
                 .access = { PS_READ } };
        run(w, o, false);
    }
    for (int i = 0; i < PLAIN; i++) if (w->plain[i].s) plain_bytes(w, &w->plain[i], false);
}

/* -- steps -------------------------------------------------------------------------------------------------------- */
static ps_trace copy_trace(const ps_trace *from)
{
    ps_trace to = *from;
    to.uses = malloc(sizeof *to.uses * (size_t)(to.n_uses + 1));
    memcpy(to.uses, from->uses, sizeof *to.uses * (size_t)to.n_uses);
    size_t spare = sizeof *to.spare * PS_TIERS * (size_t)to.n_moments;
    to.spare = malloc(spare + 1);
    if (spare > 0) memcpy(to.spare, from->spare, spare);
    return to;
}

static void stage(world *w, int kind)
{
    if (kind == under_way.is.now.kind) return;
    under_way.is.now.kind = kind;
    under_way.pass++;
    ps_chunks_pass(w->cs);
}

static int action_of(int i) { return i < OPS / 3 ? PS_ACT_FORWARD : i < OPS * 2 / 3 ? PS_ACT_BACKWARD : PS_ACT_UPDATE; }

/* Runs the same ops in every step. They are recorded in a dry run and then planned. Some steps depart from the plan. */
static void steps(world *w, bool faults)
{
    op ops[OPS];
    for (int i = 0; i < OPS; i++) ops[i] = random_op(w);
    under_way.dry = plain_mem;
    ps_chunks_trace_begin(w->cs);
    for (int i = 0; i < OPS; i++) {
        stage(w, action_of(i));
        ps_chunks_tick(w->cs);
        for (int k = 0; k < ops[i].n; k++) {
            ps_storage *s = w->chunked[ops[i].storage[k]].s;
            void *p = NULL;
            OK(ps_storage_pin(s, ops[i].device, ops[i].access[k], &p));
            ps_storage_unpin(s, ops[i].device);
        }
    }
    ps_trace trace = copy_trace(ps_chunks_trace_end(w->cs));
    stage(w, PS_ACT_NONE);
    under_way.dry = NULL;
    for (int t = 0; t < w->n_tiers; t++) {
        ps_tier_info info;
        ps_tier_get(w->cs, t, &info);
        trace.other_peak[t] = info.other;
    }
    for (int step = 0; step < 4; step++) {
        bool departs = step == 2;
        ps_chunks_trace_begin(w->cs);
        if (faults && draw(2)) ps_test_fail_io((int64_t)draw(30), 1 + (int64_t)draw(2), draw(2) ? EIO : 0);
        if (faults && draw(2)) ps_test_fail_alloc((int64_t)draw(60), 1);
        w->faults = faults;
        int rc = ps_chunks_step_begin(w->cs, &trace);
        if (rc < 0) note_failure(w, rc, __LINE__);
        ps_step_forecast forecast;
        if (rc == 0 && !faults) OK(ps_chunks_predict(w->cs, &trace, &forecast));
        for (int i = 0; i < OPS; i++) {
            stage(w, action_of(i));
            if (departs && draw(4) == 0) continue;
            run(w, departs && draw(4) == 0 ? random_op(w) : ops[i], rc == 0 && !faults && !departs);
            if (departs && draw(8) == 0) scratch_traffic(w);
        }
        ps_chunks_step_end(w->cs);
        const ps_trace *now = ps_chunks_trace_end(w->cs);
        if (!departs && !faults && rc == 0 && !w->small_disk)
            CHECK(now->n_uses == trace.n_uses &&
                  !memcmp(now->uses, trace.uses, sizeof *now->uses * (size_t)now->n_uses));
        stage(w, PS_ACT_NONE);
        ps_test_fail_io(-1, 0, 0);
        ps_test_fail_alloc(-1, 0);
    }
    free(trace.uses);
    free(trace.spare);
    while (faults && ps_chunks_settle(w->cs) < 0) continue;       /* a failed transfer might not have been noticed
                                                                   * yet */
    check_contents(w);
}

static void traffic(world *w, int n, bool faults)
{
    for (int i = 0; i < n; i++) {
        if (faults && draw(6) == 0) {
            w->faults = true;
            if (draw(2)) ps_test_fail_alloc((int64_t)draw(8), 1 + (int64_t)draw(3));
            else ps_test_fail_io((int64_t)draw(4), 1, draw(2) ? EIO : 0);
        }
        switch (draw(12)) {
        case 0: case 1: plain_traffic(w); break;
        case 2: scratch_traffic(w); break;
        case 3: if (draw(3) == 0) replace_chunk(w); break;
        case 4: if (draw(3) == 0) adopt(w); break;
        case 5: stage(w, (int)draw(PS_ACT_COUNT)); break;
        case 6: if (draw(4) == 0 && !w->faults) OK(ps_chunks_settle(w->cs)); break;
        default: run(w, random_op(w), false);
        }
        ps_test_fail_alloc(-1, 0);
        if (draw(3) == 0 && w->faults) {                   /* an injected transfer might still be in flight */
            ps_test_fail_io(-1, 0, 0);
            while (ps_chunks_settle(w->cs) < 0) continue;
            w->faults = false;
        }
    }
    ps_test_fail_io(-1, 0, 0);
    while (ps_chunks_settle(w->cs) < 0) continue;
    check_contents(w);
}

/* -- a world ------------------------------------------------------------------------------------------------------ */
static int entries(void)
{
    DIR *dir = opendir(folder);
    int n = -2;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

static int64_t in_use(int device)
{
    ps_memory_info info;
    OK(plain_mem->table->info(plain_mem, device, &info));
    return info.used;
}

static void play(const char *name, ps_chunk_config config, int rounds)
{
    world w = { .config = config, .small_disk = config.budget[2] < ((int64_t)2 << 20) };
    int64_t before[DEVICES] = { in_use(CPU), in_use(SIM) }, sim_before = devices[SIM]->bytes_available(devices[SIM]);
    const char *disk = config.budget[2] ? folder : NULL;
    if (!OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &config, disk, &w.cs))) return;
    w.mem = ps_chunks_mem(w.cs);
    w.n_tiers = ps_tier_count(w.cs);
    for (int at = 0; at < CHUNKS; at++) new_chunk(&w, at);
    for (int i = 0; i < rounds; i++) {
        traffic(&w, 120, false);
        steps(&w, false);
        traffic(&w, 120, true);
        steps(&w, true);
    }
    if (draw(2)) run(&w, random_op(&w), false);            /* copies can be in flight when the manager is closed */
    ps_chunks_close(w.cs);
    for (int i = 0; i < STORAGES; i++) {
        if (!w.chunked[i].s) continue;
        CHECK(w.chunked[i].s->block == NULL);
        storage_free(&w.chunked[i]);
    }
    for (int i = 0; i < PLAIN; i++) storage_free(&w.plain[i]);
    for (int d = 0; d < DEVICES; d++) CHECK(in_use(d) == before[d]);
    plain_mem->table->trim(plain_mem, SIM, false);
    CHECK(devices[SIM]->bytes_available(devices[SIM]) >= sim_before);
    CHECK(entries() == 0);
    if (getenv("PS_TEST_VERBOSE"))
        printf("%s: %lld ops served, %lld refused, %lld failed\n", name, (long long)w.served, (long long)w.refused,
               (long long)w.failed);
    CHECK(w.served > 100);
}

static int policy_of(const char *name)
{
    int policy = -1;
    CHECK(ps_policy_find(name, &policy) == 0);
    return policy;
}

static ps_chunk_config with(int device, int policy, int64_t on_device, int64_t host, int64_t disk)
{
    ps_chunk_config c = { .device = device, .host = CPU, .policy = policy, .prefetch = 1,
                          .budget = { on_device, host, disk } };
    return c;
}

static void test_wrong_use(void)
{
    ps_chunks *cs;
    ps_chunk_config c = with(CPU, policy_of("plan"), 0, 0, 0);
    int32_t id, other;
    ps_storage *s = NULL;
    c.policy = 99;
    FAILS(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, NULL, &cs), PS_EINVAL, "policy");
    c.policy = 0, c.budget[1] = -5;
    FAILS(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, NULL, &cs), PS_EINVAL, "budget of -5");
    c.budget[1] = 0, c.device = 7;
    FAILS(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, NULL, &cs), PS_EINVAL, "a device");
    c.device = CPU, c.host = SIM;
    FAILS(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, NULL, &cs), PS_EINVAL, "host memory");
    c.host = CPU, c.budget[2] = 1 << 20;
    FAILS(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, "/nonexistent/folder", &cs), PS_EIO,
          "/nonexistent/folder");
    c.budget[2] = 0;
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, NULL, &cs));
    FAILS(ps_chunk_new(cs, PS_KIND_GRAD, 0, 0, PS_F32, 100, &id), PS_EINVAL, "multiple of 4096");
    OK(ps_chunk_new(cs, PS_KIND_GRAD, 0, 0, PS_F32, 8192, &id));
    FAILS(ps_chunk_storage_new(cs, id + 1, 0, 256, NULL, &s), PS_EINVAL, "no chunk");
    FAILS(ps_chunk_storage_new(cs, id, 100, 256, NULL, &s), PS_EINVAL, "do not fit");
    FAILS(ps_chunk_storage_new(cs, id, 8192 - 256, 512, NULL, &s), PS_EINVAL, "do not fit");
    OK(ps_chunk_storage_new(cs, id, 256, 512, "one", &s));
    ps_storage *second = NULL;
    FAILS(ps_chunk_storage_new(cs, id, 512, 256, "two", &second), PS_EINVAL, "overlap");
    CHECK(ps_storage_chunk(cs, s) == id);
    CHECK(!strcmp(ps_chunk_tensor_name(cs, id, 0), "one") && !*ps_chunk_tensor_name(cs, id, 1));
    OK(ps_chunk_new(cs, PS_KIND_GRAD, 0, 1, PS_F32, 4096, &other));
    void *p;
    FAILS(ps_storage_pin(s, SIM, PS_READ, &p), PS_EINVAL, "not a tier of its engine");
    OK(ps_storage_pin(s, CPU, PS_READ, &p));
    FAILS(ps_chunk_adopt(cs, s, other, 0, NULL, false), PS_ESTATE, "in use");
    ps_storage_unpin(s, CPU);
    OK(ps_chunk_adopt(cs, s, other, 0, NULL, false));
    CHECK(ps_storage_chunk(cs, s) == other && !strcmp(ps_chunk_tensor_name(cs, other, 0), "one"));
    FAILS(ps_chunk_storage_new(cs, id, 0, 256, NULL, &second), PS_EINVAL, "no chunk");   /* the chunk's last storage
                                                                                          * is gone */
    ps_chunks_close(cs);
    CHECK(s->block == NULL);
    ps_free(s);
}

/* Many tensors in one chunk, created and freed in any order, and many chunks. The time per operation must not grow
 * with their number. The limit is many times the usual time. */
static void test_many_members(void)
{
    enum { MANY = 20000, NBYTES = 256, STEP = 7919 };        /* STEP and MANY are coprime */
    static ps_storage *s[MANY];
    ps_chunks *cs;
    ps_chunk_config c = with(CPU, policy_of("plan"), 0, 0, 0);
    ps_chunk_info info;
    int32_t id;
    ps_storage *more = NULL;
    double began = thread_now();
    bool made = true, named = true;
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, NULL, &cs));
    OK(ps_chunk_new(cs, PS_KIND_GRAD, 0, 0, PS_F32, (int64_t)MANY * NBYTES, &id));
    for (int i = 0; i < MANY; i++) {
        int64_t at = (int64_t)i * STEP % MANY;
        char name[16];
        snprintf(name, sizeof name, "t%lld", (long long)at);
        made = made && ps_chunk_storage_new(cs, id, at * NBYTES, NBYTES, name, &s[at]) == 0;
    }
    CHECK(made);
    ps_chunk_get(cs, id, &info);
    CHECK(info.n_tensors == MANY && info.used_nbytes == (int64_t)MANY * NBYTES);
    for (int i = 0; i < MANY; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        named = named && !strcmp(ps_chunk_tensor_name(cs, id, i), name);
    }
    CHECK(named);
    CHECK(!*ps_chunk_tensor_name(cs, id, MANY));
    for (int i = 0; i < MANY / 2; i++) {
        shadow x = { .s = s[(int64_t)i * STEP % MANY] };
        storage_free(&x);
        s[(int64_t)i * STEP % MANY] = NULL;
    }
    for (int at = 1; at < MANY; at++) {                       /* a hole is free, and nothing outside of it is */
        if (s[at]) continue;
        if (s[at - 1]) FAILS(ps_chunk_storage_new(cs, id, (int64_t)(at - 1) * NBYTES, NBYTES, "t", &more), PS_EINVAL,
                             "overlap");
        if (at + 1 < MANY && s[at + 1])
            FAILS(ps_chunk_storage_new(cs, id, (int64_t)at * NBYTES, 2 * NBYTES, "t", &more), PS_EINVAL, "overlap");
        OK(ps_chunk_storage_new(cs, id, (int64_t)at * NBYTES, NBYTES, "t", &s[at]));
        if (at > MANY / 2) break;
    }
    bool more_made = true;
    for (int i = 0; i < MANY; i++)
        more_made = more_made && ps_chunk_new(cs, PS_KIND_GRAD, 0, i + 1, PS_F32, 4096, &id) == 0 && id == i + 1;
    CHECK(more_made);
    ps_chunks_close(cs);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    double limit_s = 10;                       /* 0.09 s without a sanitizer, which can be 12 times slower */
#else
    double limit_s = 1;
#endif
    check(thread_now() - began < limit_s, __LINE__, "20,000 tensors of one chunk, and as many chunks, in time", NULL);
    for (int i = 0; i < MANY; i++) ps_free(s[i]);
}

/* The working set of one op does not fit. The error contains the numbers, and later ops that fit succeed. */
static void test_too_small(void)
{
    ps_chunks *cs;
    ps_chunk_config c = with(CPU, policy_of("plan"), 0, 40960, 1 << 20);
    ps_storage *s[3];
    void *p[3];
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, folder, &cs));
    for (int i = 0; i < 3; i++) {
        int32_t id;
        OK(ps_chunk_new(cs, PS_KIND_PARAM, 0, i, PS_F32, 16384, &id));
        OK(ps_chunk_storage_new(cs, id, 0, 16384, "h.0.weight", &s[i]));
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2; i++) OK(ps_storage_pin(s[i], CPU, PS_WRITE, &p[i]));
        FAILS(ps_storage_pin(s[2], CPU, PS_READ, &p[2]), PS_ENOMEM, "h.0.weight");
        CHECK(strstr(ps_error_message(), "memory.host") && strstr(ps_error_message(), "param[2]"));
        for (int i = 0; i < 2; i++) ps_storage_unpin(s[i], CPU);
        OK(ps_storage_pin(s[2], CPU, PS_READ, &p[2]));
        ps_storage_unpin(s[2], CPU);
    }
    ps_trace trace = { .n_uses = 3, .n_moments = 1 };
    ps_use uses[3] = { { .chunk = 0 }, { .chunk = 1 }, { .chunk = 2 } };
    trace.uses = uses;
    FAILS(ps_chunks_step_begin(cs, &trace), PS_ENOMEM, "memory.host");
    CHECK(strstr(ps_error_message(), "moment 0") && strstr(ps_error_message(), "param["));
    ps_chunks_close(cs);
    for (int i = 0; i < 3; i++) ps_free(s[i]);
}

/* Copies in host memory of chunks that are pinned on the device make room for a chunk that is read from the disk, which
 * passes through host memory. */
static void test_copies_of_pinned_chunks(void)
{
    ps_chunks *cs;
    ps_chunk_config c = with(SIM, policy_of("plan"), 0, 2 * 16384, 1 << 20);
    ps_storage *s[3];
    ps_chunk_info info;
    void *p;
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, folder, &cs));
    for (int i = 0; i < 3; i++) {
        int32_t id;
        OK(ps_chunk_new(cs, PS_KIND_PARAM, 0, i, PS_F32, 16384, &id));
        OK(ps_chunk_storage_new(cs, id, 0, 16384, NULL, &s[i]));
        OK(ps_storage_pin(s[i], CPU, PS_WRITE, &p));
        memset(p, 10 + i, 16384);
        ps_storage_unpin(s[i], CPU);
    }
    OK(ps_chunks_settle(cs));
    ps_chunk_get(cs, 0, &info);
    CHECK(info.valid == 4);                                  /* bit 2 is the disk, bit 1 the host, bit 0 the device */
    for (int i = 2; i >= 0; i--) {
        OK(ps_storage_pin(s[i], SIM, PS_READ, &p));
        CHECK(((char *)p)[0] == 10 + i && ((char *)p)[16383] == 10 + i);
        ps_chunk_get(cs, i, &info);
        CHECK(i == 0 || info.valid == 3);
    }
    for (int i = 0; i < 3; i++) ps_storage_unpin(s[i], SIM);
    ps_chunks_close(cs);
    for (int i = 0; i < 3; i++) ps_free(s[i]);
}

/* The same when another chunk is in host memory only, and the disk tier has no room for it. */
static void test_copies_of_pinned_chunks_over_a_full_disk(void)
{
    ps_chunks *cs;
    ps_storage *s[3];
    void *p[3];
    for (int policy = 0; ps_policy_name(policy); policy++) {
        ps_chunk_config c = with(SIM, policy, 0, 2 * 16384, 16384);
        OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, folder, &cs));
        for (int i = 0; i < 3; i++) {                        /* 0: on the disk; 1 and 2: in host memory */
            int32_t id;
            OK(ps_chunk_new(cs, PS_KIND_PARAM, 0, i, PS_F32, 16384, &id));
            OK(ps_chunk_storage_new(cs, id, 0, 16384, NULL, &s[i]));
            OK(ps_storage_pin(s[i], CPU, PS_WRITE, &p[i]));
            memset(p[i], 10 + i, 16384);
            ps_storage_unpin(s[i], CPU);
        }
        OK(ps_chunks_settle(cs));
        OK(ps_storage_pin(s[1], SIM, PS_READ, &p[1]));
        OK(ps_storage_pin(s[0], SIM, PS_READ, &p[0]));
        for (int i = 0; i < 2; i++) CHECK(((char *)p[i])[0] == 10 + i && ((char *)p[i])[16383] == 10 + i);
        for (int i = 0; i < 2; i++) ps_storage_unpin(s[i], SIM);
        OK(ps_storage_pin(s[2], SIM, PS_READ, &p[2]));
        CHECK(((char *)p[2])[0] == 12);
        ps_storage_unpin(s[2], SIM);
        ps_chunks_close(cs);
        for (int i = 0; i < 3; i++) ps_free(s[i]);
    }
}

/* Without a plan, the policy's order also decides. Chunk 0 was created first and was used last. The next uses are
 * unknown, so a policy that used them would evict the chunk that was unused for the longest time. */
static void test_leaves_without_a_plan(const char *policy, int leaves)
{
    ps_chunks *cs;
    ps_chunk_config c = with(CPU, policy_of(policy), 0, 3 * 16384, 1 << 20);
    static const int uses[] = { 0, 1, 2, 1, 2, 0, 3 };
    ps_storage *s[4];
    ps_chunk_info info;
    void *p;
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, folder, &cs));
    for (int i = 0; i < 4; i++) {
        int32_t id;
        OK(ps_chunk_new(cs, PS_KIND_PARAM, 0, i, PS_F32, 16384, &id));
        OK(ps_chunk_storage_new(cs, id, 0, 16384, NULL, &s[i]));
    }
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) {
        OK(ps_storage_pin(s[uses[i]], CPU, PS_WRITE, &p));
        ps_storage_unpin(s[uses[i]], CPU);
    }
    for (int i = 0; i < 4; i++) {
        ps_chunk_get(cs, i, &info);
        CHECK(info.valid == (i == leaves ? 2 : 1));          /* bit 2 is the disk, bit 1 the host */
    }
    ps_chunks_close(cs);
    for (int i = 0; i < 4; i++) ps_free(s[i]);
}

/* A chunk whose contents have ended does not move: it is not written to a lower tier, and it is not fetched for its
 * next use. */
static void test_ended(void)
{
    ps_chunks *cs;
    ps_chunk_config c = with(CPU, policy_of("lru"), 0, 2 * 16384, 1 << 20);
    static const int uses[] = { 0, 1, 2, 0, 1 };             /* the contents of chunk 0 end with each use */
    ps_storage *s[3];
    ps_chunk_info info;
    ps_tier_info disk;
    void *p;
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, folder, &cs));
    for (int i = 0; i < 3; i++) {
        int32_t id;
        OK(ps_chunk_new(cs, PS_KIND_GRAD, 0, i, PS_F32, 16384, &id));
        OK(ps_chunk_storage_new(cs, id, 0, 16384, NULL, &s[i]));
    }
    ps_chunks_trace_begin(cs);
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) {
        ps_chunks_tick(cs);
        OK(ps_storage_pin(s[uses[i]], CPU, PS_WRITE, &p));
        memset(p, 1 + uses[i], 16384);
        OK(ps_chunk_end(cs, 0));                             /* not allowed while it is pinned */
        if (uses[i] == 0) CHECK(((char *)p)[16383] == 1);
        ps_storage_unpin(s[uses[i]], CPU);
        if (uses[i] == 0) OK(ps_chunk_end(cs, 0));
    }
    OK(ps_chunks_settle(cs));
    const ps_trace *trace = ps_chunks_trace_end(cs);
    CHECK(trace->n_uses == 5);
    for (int i = 0; i < trace->n_uses; i++) CHECK(trace->uses[i].ends == (trace->uses[i].chunk == 0));
    ps_chunk_get(cs, 0, &info);
    CHECK(info.valid == 0 && info.state == PS_TS_FREE);
    ps_tier_get(cs, 1, &disk);
    CHECK(disk.bytes_down == 16384 && disk.bytes_up == 16384);       /* chunk 1 was evicted once, and fetched again */
    ps_chunks_close(cs);
    for (int i = 0; i < 3; i++) ps_free(s[i]);
}

/* A slot is made of the memory of chunks of other sizes that left for it, so the system clears no pages again. */
static void test_remade(void)
{
    enum { MIB = 1 << 20, N = 4, ROUNDS = 6 };
    static const int64_t nbytes[N] = { 6 * MIB, 8 * MIB + 4096, 4 * MIB, 14 * MIB };   /* the last evicts two */
    ps_chunks *cs;
    ps_chunk_config c = with(CPU, policy_of("lru"), 0, 19 * MIB, 64 * MIB);
    ps_storage *s[N];
    void *p;
    struct rusage before, after;
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, folder, &cs));
    for (int i = 0; i < N; i++) {
        int32_t id;
        OK(ps_chunk_new(cs, PS_KIND_PARAM, 0, i, PS_F32, nbytes[i], &id));
        OK(ps_chunk_storage_new(cs, id, 0, nbytes[i], NULL, &s[i]));
    }
    for (int round = 0; round < ROUNDS; round++) {
        if (round == 2) getrusage(RUSAGE_SELF, &before);
        for (int i = 0; i < N; i++) {
            ps_chunks_tick(cs);
            if (!OK(ps_storage_pin(s[i], CPU, round ? PS_READ | PS_WRITE : PS_WRITE, &p))) continue;
            bool same = true;
            for (int64_t k = 0; k < nbytes[i]; k += 512) {
                char *at = (char *)p + k;
                same = same && (round == 0 || *at == (char)(i + round + k / 4096));
                *at = (char)(i + round + 1 + k / 4096);
            }
            CHECK(same);
            ps_storage_unpin(s[i], CPU);
        }
    }
    getrusage(RUSAGE_SELF, &after);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    CHECK(after.ru_minflt - before.ru_minflt < 8 * (ROUNDS - 2));    /* 32 MiB are 16 huge pages, or 8,192 others */
#endif
    OK(ps_chunks_settle(cs));
    ps_chunks_close(cs);
    for (int i = 0; i < N; i++) ps_free(s[i]);
}

/* A plan is rejected if a tier cannot hold the other tensors, even if the plan moves no chunk there. */
static void test_no_room_for_others(void)
{
    ps_chunks *cs;
    ps_chunk_config c = with(SIM, policy_of("plan"), 40960, 40960, 1 << 20);
    ps_use use = { .chunk = 0, .write = 1 };
    ps_trace trace = { .n_uses = 1, .n_moments = 1, .uses = &use, .other_peak = { 0, 40961 } };
    ps_step_forecast forecast;
    int32_t id;
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, folder, &cs));
    OK(ps_chunk_new(cs, PS_KIND_PARAM, 0, 0, PS_F32, 16384, &id));
    FAILS(ps_chunks_predict(cs, &trace, &forecast), PS_ENOMEM, "raise memory.host");
    FAILS(ps_chunks_step_begin(cs, &trace), PS_ENOMEM, "raise memory.host");
    trace.other_peak[1] = 40960;
    OK(ps_chunks_predict(cs, &trace, &forecast));
    OK(ps_chunks_step_begin(cs, &trace));
    ps_chunks_step_end(cs);
    ps_chunks_close(cs);
}

/* Every op fits on the device, but the chunks that it must evict do not fit on the next tier. The error names that
 * tier. */
static void test_no_room_below(void)
{
    enum { N = 4 };
    ps_chunks *cs;
    ps_chunk_config c = with(SIM, policy_of("plan"), 40960, 12288, 1 << 20);
    ps_use uses[N];
    ps_trace trace = { .n_uses = N, .n_moments = N, .uses = uses };
    ps_step_forecast forecast;
    OK(ps_chunks_new(&under_way, DEVICES, devices, plain_mem, &c, folder, &cs));
    for (int32_t i = 0; i < N; i++) {
        int32_t id;
        OK(ps_chunk_new(cs, PS_KIND_PARAM, 0, i, PS_F32, 16384, &id));
        uses[i] = (ps_use){ .moment = i, .chunk = id, .write = 1 };
    }
    FAILS(ps_chunks_predict(cs, &trace, &forecast), PS_ENOMEM, "raise memory.host");
    const ps_error_detail *detail = ps_error_get_detail();
    CHECK(detail->sub == PS_SUB_OP_CHUNKS && detail->tier == 1 && detail->left == 12288 &&
          detail->wanted > detail->left);
    FAILS(ps_chunks_step_begin(cs, &trace), PS_ENOMEM, "raise memory.host");
    ps_chunks_close(cs);
}

/* -- a device whose addresses the host cannot touch ---------------------------------------------------------------- */
static char *near(const void *p) { return (char *)((uintptr_t)p - ((uintptr_t)1 << 60)); }

static int away_region_new(ps_backend *be, size_t nbytes, void **out)
{
    char *p = malloc(nbytes);
    if (!p) return ps_fail_nomem(nbytes);
    memset(p, 0xA5, nbytes);
    *out = (void *)((uintptr_t)p + ((uintptr_t)1 << 60));
    return 0;
}
static void away_region_free(ps_backend *be, void *p, size_t nbytes) { free(near(p)); }
static int64_t away_available(ps_backend *be) { return INT64_MAX; }
static int away_copy_in(ps_backend *be, void *dst, const void *src, size_t nbytes)
{
    memcpy(near(dst), src, nbytes);
    return 0;
}
static int away_copy_out(ps_backend *be, void *dst, const void *src, size_t nbytes)
{
    memcpy(dst, near(src), nbytes);
    return 0;
}
static int away_copy_start(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes, ps_copy *after,
                           ps_copy **out)
{
    if (!(*out = malloc(1))) return ps_fail_nomem(1);
    return to_device ? away_copy_in(be, dst, src, nbytes) : away_copy_out(be, dst, src, nbytes);
}
static int away_copy_wait(ps_backend *be, ps_copy *copy, bool block)
{
    free(copy);
    return 1;
}

/* A chunk without contents reads as zeros, also on a device, regardless of which side writes the zeros. */
static void test_zeros_on_a_device(void)
{
    enum { NBYTES = 3 << 20 };
    ps_backend away = { .name = "away", .region_new = away_region_new, .region_free = away_region_free,
                        .bytes_available = away_available, .copy_in = away_copy_in, .copy_out = away_copy_out,
                        .copy_start = away_copy_start, .copy_wait = away_copy_wait };
    ps_backend *both[] = { devices[CPU], &away };
    ps_mem *plain;
    ps_chunks *cs;
    ps_chunk_config c = with(1, policy_of("plan"), 0, 0, 0);
    ps_storage *s;
    int32_t id;
    void *p;
    OK(ps_mem_plain_new(2, both, &plain));
    OK(ps_chunks_new(&under_way, 2, both, plain, &c, NULL, &cs));
    OK(ps_chunk_new(cs, PS_KIND_PARAM_FP32, 0, 0, PS_F32, NBYTES + 4096, &id));
    OK(ps_chunk_storage_new(cs, id, 256, NBYTES, NULL, &s));
    OK(ps_storage_pin(s, 1, PS_READ | PS_WRITE, &p));
    const char *at = near(p);
    int64_t wrong = 0;
    for (int64_t i = 0; i < NBYTES; i++) wrong += at[i] != 0;
    CHECK(wrong == 0);
    ps_storage_unpin(s, 1);
    ps_chunks_close(cs);
    plain->table->close(plain);
    ps_free(s);
}

/* -- copies down that fail, and the fetches after them ------------------------------------------------------------ */
/* Copies run when they are started. A caller that waits sees them as complete, and a caller that only checks sees
 * them as in flight. If `seen_up` is set, a check also sees copies to the device as complete. Copy number fail_at to
 * the host, counted from now on, fails. `failed` is the number of fetches that failed because of it. */
static struct { int fail_at; bool seen_up; int regions, failed; } far;   /* failed: number of fetches that failed
                                                                          * with the copies */
static int far_met;
struct ps_copy { bool to_device, failed; };

static int far_region_new(ps_backend *be, size_t nbytes, void **out)
{
    far.regions++;
    return away_region_new(be, nbytes, out);
}

static void far_region_free(ps_backend *be, void *p, size_t nbytes)
{
    far.regions--;
    away_region_free(be, p, nbytes);
}

static int far_copy_start(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes, ps_copy *after,
                          ps_copy **out)
{
    ps_copy *c = malloc(sizeof *c);
    if (!c) return ps_fail_nomem(sizeof *c);
    *c = (ps_copy){ to_device, after && after->failed };
    if (!to_device && far.fail_at > 0 && --far.fail_at == 0) c->failed = true;
    if (c->failed && to_device) far.failed++;
    *out = c;
    if (c->failed) return 0;
    return to_device ? away_copy_in(be, dst, src, nbytes) : away_copy_out(be, dst, src, nbytes);
}

static int far_copy_wait(ps_backend *be, ps_copy *copy, bool block)
{
    if (!block && !(far.seen_up && copy->to_device)) return 0;
    bool bad = copy->failed;
    free(copy);
    return bad ? ps_fail(PS_EIO, "the device has failed") : 1;
}

enum { FAR = 4, FAR_TURNS = 12, FAR_NBYTES = 16384 };

/* Writes the chunks one after another. The contents of each chunk must be unchanged since its last pin. Returns the
 * number of pins that failed. */
static int turns(ps_chunks *cs, ps_storage **s, char *holds)
{
    int refused = 0;
    for (int i = 0; i < FAR_TURNS; i++) {
        ps_storage *at = s[i % FAR];
        void *p;
        ps_chunks_tick(cs);
        int rc = ps_storage_pin(at, 1, PS_READ | PS_WRITE, &p);
        if (rc < 0) {
            CHECK(rc == PS_EIO && strstr(ps_error_message(), "the device has failed"));
            refused++;
            continue;
        }
        int wrong = 0;
        for (int k = 0; k < FAR_NBYTES; k++) wrong += near(p)[k] != holds[i % FAR];
        CHECK(wrong == 0);
        memset(near(p), ++holds[i % FAR], FAR_NBYTES);
        ps_storage_unpin(at, 1);
    }
    return refused;
}

/* Chunks share a device with room for three of them. Fetches start into the memory of chunks whose copy to the host
 * is still in flight. Whichever copy fails, each chunk must keep its contents, and memory must have one owner. */
static void test_failed_eviction(int nth, bool seen_up)
{
    ps_backend away = { .name = "away", .region_new = far_region_new, .region_free = far_region_free,
                        .bytes_available = away_available, .copy_in = away_copy_in, .copy_out = away_copy_out,
                        .copy_start = far_copy_start, .copy_wait = far_copy_wait };
    ps_backend *both[] = { devices[CPU], &away };
    ps_mem *plain;
    ps_chunks *cs;
    ps_chunk_config c = with(1, policy_of("plan"), 3 * FAR_NBYTES, 16 * FAR_NBYTES, 0);
    ps_storage *s[FAR];
    char holds[FAR] = { 0 };
    int refused = 0;
    c.ahead[0] = FAR * FAR_NBYTES;
    memset(&far, 0, sizeof far);
    far.seen_up = seen_up;
    OK(ps_mem_plain_new(2, both, &plain));
    OK(ps_chunks_new(&under_way, 2, both, plain, &c, NULL, &cs));
    for (int i = 0; i < FAR; i++) {
        int32_t id;
        OK(ps_chunk_new(cs, PS_KIND_PARAM, 0, i, PS_F32, FAR_NBYTES, &id));
        OK(ps_chunk_storage_new(cs, id, 0, FAR_NBYTES, NULL, &s[i]));
    }
    ps_chunks_trace_begin(cs);
    CHECK(turns(cs, s, holds) == 0);
    ps_trace trace = copy_trace(ps_chunks_trace_end(cs));
    OK(ps_chunks_step_begin(cs, &trace));
    ps_chunks_trace_begin(cs);
    far.fail_at = nth;
    refused += turns(cs, s, holds);
    ps_chunks_step_end(cs);
    ps_chunks_trace_end(cs);
    refused += turns(cs, s, holds);
    CHECK(refused > 0 && far.fail_at == 0);
    CHECK(turns(cs, s, holds) == 0);
    far_met += far.failed;
    ps_tier_info info;
    ps_tier_get(cs, 0, &info);
    int64_t slots = 0;
    for (int i = 0; i < FAR; i++) {
        ps_chunk_info at;
        ps_chunk_get(cs, i, &at);
        if (at.valid & 1) slots += FAR_NBYTES;
    }
    CHECK(info.chunks == slots);
    ps_chunks_close(cs);
    plain->table->close(plain);
    CHECK(far.regions == 0);
    free(trace.uses);
    free(trace.spare);
    for (int i = 0; i < FAR; i++) ps_free(s[i]);
}

int main(void)
{
    enum { KIB = 1024 };
    snprintf(folder, sizeof folder, "%s/ps-chunk-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(folder)) return 2;
    if (getenv("PS_TEST_SEED")) state ^= strtoull(getenv("PS_TEST_SEED"), NULL, 10) * 0x9E3779B97F4A7C15u;
    OK(ps_backend_ref_open(&ref));
    OK(ps_backend_cpu_open(ref, &devices[CPU]));
    OK(ps_backend_sim_open(ref, devices[CPU], &devices[SIM]));
    OK(ps_sim_configure(devices[SIM], (int64_t)8 << 20, 16e9, 16e9, 2e-6));
    OK(ps_mem_plain_new(DEVICES, devices, &plain_mem));
    test_wrong_use();
    test_many_members();
    test_too_small();
    test_copies_of_pinned_chunks();
    test_copies_of_pinned_chunks_over_a_full_disk();
    test_leaves_without_a_plan("fifo", 0);
    test_leaves_without_a_plan("lru", 1);
    test_leaves_without_a_plan("belady", 1);
    test_leaves_without_a_plan("plan", 1);
    test_ended();
    test_remade();
    test_no_room_for_others();
    test_no_room_below();
    test_zeros_on_a_device();
    for (int nth = 1; nth <= 6; nth++) for (int seen = 0; seen < 2; seen++) test_failed_eviction(nth, seen);
    CHECK(far_met > 0);
    /* The chunks together have about 400 KiB, the plain storages at most 180 KiB, and an op at most 176 KiB. */
    play("cpu, no limits", with(CPU, policy_of("plan"), 0, 0, 0), 1);
    play("cpu, no disk", with(CPU, policy_of("lru"), 0, 800 * KIB, 0), 2);
    for (int policy = 0; ps_policy_name(policy); policy++) {
        int n = policy % 4;                            /* the budgets depend on the policy, too */
        play("cpu, disk", with(CPU, policy, 0, (300 - 40 * n) * KIB, 4096 * KIB), 2);
        play("sim, host", with(SIM, policy, (280 - 40 * n) * KIB, 800 * KIB, 0), 2);
        play("sim, host, disk", with(SIM, policy, (260 - 40 * n) * KIB, (320 - 30 * n) * KIB, 4096 * KIB), 3);
    }
    ps_chunk_config c = with(SIM, policy_of("plan"), 200 * KIB, 250 * KIB, 500 * KIB);
    play("a small disk", c, 3);
    c.budget[2] = 4096 * KIB, c.stress = 1;
    play("stress", c, 2);
    c.prefetch = 0, c.disk_threads = 2;
    play("stress, threads", c, 2);
    c.stress = 0;
    play("threads, no prefetch", c, 2);
    c.prefetch = 1, c.ahead[0] = c.ahead[1] = 1 << 20;
    play("far ahead", c, 2);
    play("sim, no limits but its memory", with(SIM, policy_of("plan"), 0, 0, 4096 * KIB), 2);
    plain_mem->table->close(plain_mem);
    for (int d = 0; d < DEVICES; d++) devices[d]->close(devices[d]);
    if (ref->close) ref->close(ref);
    rmdir(folder);
    return end_checks();
}
