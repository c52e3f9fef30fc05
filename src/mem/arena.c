/* SPDX-License-Identifier: BSD-3-Clause
 * Carves large regions of a backend into blocks: two-level segregated fit (Masmano et al., "TLSF: a new dynamic memory
 * allocator for real-time systems", ECRTS 2004). Constant time, neighbours merge at once, regions are reused and not
 * returned mid-run, because page faults cost a third of a training step when they are. Block records live outside the
 * regions, so that a region may be memory the CPU cannot touch. Owned by a memory manager; one thread. */
#include "mem/mem.h"
#include "base/alloc.h"
#include "base/error.h"
#include <stdlib.h>

enum {
    GRAIN_LOG2 = 8, GRAIN = 1 << GRAIN_LOG2,      /* sizes and addresses are multiples of 256 bytes */
    SECOND_LOG2 = 4, SECOND = 1 << SECOND_LOG2,   /* 16 classes between powers of two */
    FIRST = 48,                                   /* covers the largest tensor there can be (2^56 bytes) and more */
};
#define REGION_BYTES ((size_t)1 << 30)            /* address space; costs memory only when touched */
#define HUGE_BYTES ((size_t)2 << 20)              /* regions grow by pages of this size */
#define CHECK_BYTES ((int64_t)64 << 20)           /* ask the system again after so much growth */

typedef struct region {
    struct region *next;
    char *base;
    size_t size, touched;                         /* bytes from base that were ever given out, or are committed */
    ps_block *first;                              /* at base; stays the same block */
} region;

struct ps_block {
    char *address;
    size_t size;
    region *region;
    bool free;
    ps_block *left, *right;                       /* neighbours in the region */
    ps_block *prev, *next;                        /* in the free list */
};

struct ps_arena {
    ps_backend *be;
    region *regions;
    uint64_t first_map;
    uint32_t second_map[FIRST];
    ps_block *bins[FIRST][SECOND];
    ps_block *spare;                              /* records to reuse */
    int64_t growth;                               /* bytes touched since the system was last asked */
    int64_t held, hold_limit;                     /* sum of the regions' `touched`, and its bound (0: none) */
    ps_memory_info info;
};

/* AddressSanitizer sees into regions of host memory: what is not given out, and the end of a block beyond what was
 * asked for, must not be touched. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
static bool seen(const ps_arena *arena) { return arena->be->is_host && !arena->be->no_data; }
static void forbid(const ps_arena *arena, const char *p, size_t n)
{
    if (seen(arena)) __asan_poison_memory_region(p, n);
}
static void allow(const ps_arena *arena, const char *p, size_t n)
{
    if (seen(arena)) __asan_unpoison_memory_region(p, n);
}
#else
static void forbid(const ps_arena *arena, const char *p, size_t n) {}
static void allow(const ps_arena *arena, const char *p, size_t n) {}
#endif

void *ps_block_address(const ps_block *block) { return block->address; }
ps_memory_info *ps_arena_info(ps_arena *arena) { return &arena->info; }

/* Class of a size: [first] is its power of two in grains, [second] the sixteenth above it. */
static void class_of(size_t size, int *first, int *second)
{
    size_t grains = size >> GRAIN_LOG2;
    if (grains < SECOND) {
        *first = 0;
        *second = (int)grains;
        return;
    }
    int log2 = 63 - __builtin_clzll(grains);
    *first = log2 - SECOND_LOG2 + 1;
    *second = (int)((grains >> (log2 - SECOND_LOG2)) & (SECOND - 1));
}

static void list_add(ps_arena *arena, ps_block *b)
{
    int f, s;
    class_of(b->size, &f, &s);
    b->free = true;
    b->prev = NULL;
    b->next = arena->bins[f][s];
    if (b->next) b->next->prev = b;
    arena->bins[f][s] = b;
    arena->first_map |= 1ull << f;
    arena->second_map[f] |= 1u << s;
}

static void list_remove(ps_arena *arena, ps_block *b)
{
    int f, s;
    class_of(b->size, &f, &s);
    b->free = false;
    if (b->next) b->next->prev = b->prev;
    if (b->prev) b->prev->next = b->next;
    else if (!(arena->bins[f][s] = b->next) && !(arena->second_map[f] &= ~(1u << s)))
        arena->first_map &= ~(1ull << f);
}

static ps_block *record_new(ps_arena *arena)
{
    ps_block *b = arena->spare;
    if (b) arena->spare = b->next;
    else b = ps_alloc(sizeof *b);
    return b;
}
static void record_free(ps_arena *arena, ps_block *b)
{
    b->next = arena->spare;
    arena->spare = b;
}

/* A free block of at least `size`, removed from its list; NULL when no region has one. */
static ps_block *take(ps_arena *arena, size_t size)
{
    int f, s;
    class_of(size, &f, &s); /* its own class first: a training step asks for the same sizes again */
    int tries = f < FIRST ? 16 : 0;
    for (ps_block *b = tries ? arena->bins[f][s] : NULL; b && tries--; b = b->next)
        if (b->size >= size) {
            list_remove(arena, b);
            return b;
        }
    size_t rounded = size;                          /* up to the next class, so that any block in it fits */
    if ((size >> GRAIN_LOG2) >= SECOND) {
        int log2 = 63 - __builtin_clzll(size >> GRAIN_LOG2);
        rounded += ((size_t)1 << (log2 - SECOND_LOG2 + GRAIN_LOG2)) - 1;
    }
    class_of(rounded, &f, &s);
    if (f >= FIRST) return NULL;
    uint32_t second = arena->second_map[f] & (~0u << s);
    if (!second) {
        uint64_t firsts = f + 1 < 64 ? arena->first_map & (~0ull << (f + 1)) : 0;
        if (!firsts) return NULL;
        f = __builtin_ctzll(firsts);
        second = arena->second_map[f];
    }
    ps_block *b = arena->bins[f][__builtin_ctz(second)];
    list_remove(arena, b);
    return b;
}

/* -- regions ------------------------------------------------------------------------------------------------------- */
static double mib(size_t nbytes) { return (double)nbytes / 1048576.0; }
static bool commits(const ps_arena *arena) { return arena->be->region_commit != NULL; }

/* Makes the first nbytes of a region memory, no more; for backends where that is to be asked for. */
static int commit(ps_arena *arena, region *r, size_t nbytes)
{
    PS_TRY(arena->be->region_commit(arena->be, r->base, nbytes));
    arena->info.reserved += (int64_t)nbytes - (int64_t)r->touched;
    arena->held += (int64_t)nbytes - (int64_t)r->touched;
    r->touched = nbytes;
    return 0;
}

static void region_drop(ps_arena *arena, region *r)
{
    if (r->first->free) {
        list_remove(arena, r->first);
        record_free(arena, r->first);
    }
    allow(arena, r->base, r->size);
    arena->info.reserved -= (int64_t)(commits(arena) ? r->touched : r->size);
    arena->held -= (int64_t)r->touched;
    arena->be->region_free(arena->be, r->base, r->size);
    ps_free(r);
}

int64_t ps_arena_held(const ps_arena *arena) { return arena->held; }
void ps_arena_set_hold_limit(ps_arena *arena, int64_t nbytes) { arena->hold_limit = nbytes; }

bool ps_arena_trim(ps_arena *arena)
{
    bool any = false;
    for (region **at = &arena->regions; *at;) {
        region *r = *at;
        ps_block *last = r->first;
        while (last->right) last = last->right;
        if (r->first->free && last == r->first) {
            *at = r->next;
            region_drop(arena, r);
            any = true;
            continue;
        }
        size_t used = (size_t)(last->address - r->base);
        if (commits(arena) && last->free && used < r->touched) any = commit(arena, r, used) == 0 || any;
        if (arena->be->region_discard && last->free && used < r->touched) {
            allow(arena, last->address, r->touched - used);
            arena->be->region_discard(arena->be, last->address, r->touched - used);
            forbid(arena, last->address, r->touched - used);
            arena->held -= (int64_t)(r->touched - used);
            r->touched = used;
            any = true;
        }
        at = &r->next;
    }
    return any;
}

static int region_from_device(ps_arena *arena, size_t nbytes, void **base)
{
    ps_backend *be = arena->be;
    return be->region_reserve ? be->region_reserve(be, nbytes, base) : be->region_new(be, nbytes, base);
}

static int grow(ps_arena *arena, size_t size)
{
    region *r = ps_alloc0(sizeof *r);
    ps_block *b = r ? record_new(arena) : NULL;
    if (!b) {
        ps_free(r);
        return ps_fail_nomem(sizeof *r + sizeof *b);
    }
    size_t least = (size + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    size_t got = least > REGION_BYTES ? least : REGION_BYTES;
    if (commits(arena)) {                            /* one region for all that the device has: none is cut up */
        int64_t available = arena->be->bytes_available(arena->be);
        if (available > (int64_t)got) got = (size_t)available;
    }
    void *base = NULL;
    int rc = region_from_device(arena, got, &base);
    if (rc < 0 && got > least) rc = region_from_device(arena, got = least, &base);
    if (rc < 0) {
        ps_free(r);
        record_free(arena, b);
        return rc;
    }
    *r = (region){ .next = arena->regions, .base = base, .size = got, .first = b };
    arena->regions = r;
    if (!commits(arena)) arena->info.reserved += (int64_t)got;
    *b = (ps_block){ .address = base, .size = got, .region = r };
    list_add(arena, b);
    return 0;
}

/* Refuses growth that the system could only answer by killing. */
static int check_growth(ps_arena *arena, region *r, size_t end, size_t size)
{
    int64_t more = (int64_t)(end - r->touched);
    if (arena->growth + more >= CHECK_BYTES) {
        int64_t available = arena->be->bytes_available(arena->be);
        if (available < more + CHECK_BYTES)
            return ps_fail(PS_ENOMEM,
                           "device %s: %.1f MiB wanted, %.1f MiB in use, only %.1f MiB left on this machine; "
                           "use a smaller batch, a smaller model or recompute",
                           arena->be->name, mib(size), (double)arena->info.used / 1048576.0,
                           (double)available / 1048576.0);
        arena->growth = 0;
    } else {
        arena->growth += more;
    }
    arena->held += more;
    r->touched = end;
    return 0;
}

/* Block b is about to hold `size` bytes: its region may have to reach further. */
static int extend(ps_arena *arena, const ps_block *b, size_t size)
{
    region *r = b->region;
    size_t end = (size_t)(b->address - r->base) + size, step = (end + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    if (end <= r->touched) return 0;
    if (arena->hold_limit && arena->held + (int64_t)(end - r->touched) > arena->hold_limit)
        return ps_fail(PS_ENOMEM, "device %s: %.1f MiB wanted, %.1f MiB held, of which %.1f in use; %.1f may be held",
                       arena->be->name, mib(size), (double)arena->held / 1048576.0,
                       (double)arena->info.used / 1048576.0, (double)arena->hold_limit / 1048576.0);
    if (!commits(arena)) return check_growth(arena, r, end, size);
    if (step > r->size) step = r->size;
    if (arena->hold_limit && arena->held + (int64_t)(step - r->touched) > arena->hold_limit) step = end;
    int rc = commit(arena, r, step);
    if (rc < 0) rc = commit(arena, r, end);
    if (rc < 0 && ps_arena_trim(arena)) rc = commit(arena, r, end);
    if (rc < 0)
        ps_error_prefix("device %s: %.1f MiB wanted, %.1f of %.1f MiB held in use: ", arena->be->name, mib(size),
                        (double)arena->info.used / 1048576.0, (double)arena->info.reserved / 1048576.0);
    return rc;
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */
int ps_arena_alloc(ps_arena *arena, int64_t nbytes, ps_block **out)
{
    if (ps_alloc_should_fail())
        return ps_fail(PS_ENOMEM, "device %s: %lld bytes wanted, refused by a test", arena->be->name,
                       (long long)nbytes);
    size_t size = ((size_t)nbytes + GRAIN - 1) & ~(size_t)(GRAIN - 1);
    if (size == 0) size = GRAIN;
    ps_memory_info *info = &arena->info;
    if (info->limit && info->used + (int64_t)size > info->limit)
        return ps_fail(PS_ENOMEM,
                       "device %s: %.1f MiB wanted, %.1f MiB in use, the limit set is %.1f MiB; raise it, or use a "
                       "smaller batch, a smaller model or recompute",
                       arena->be->name, (double)size / 1048576.0, (double)info->used / 1048576.0,
                       (double)info->limit / 1048576.0);
    ps_block *b = take(arena, size);
    if (!b) {
        PS_TRY(grow(arena, size + size / SECOND + GRAIN));
        b = take(arena, size);
    }
    if (!b) return ps_fail(PS_ENOMEM, "device %s: no block of %zu bytes", arena->be->name, size);
    int rc = extend(arena, b, size);
    ps_block *rest = rc == 0 && b->size > size ? record_new(arena) : NULL;
    if (rc < 0 || (b->size > size && !rest)) {
        list_add(arena, b);
        return rc < 0 ? rc : ps_fail_nomem(sizeof *rest);
    }
    if (rest) {                                      /* the low part is given out, the high part stays free */
        *rest = (ps_block){ .address = b->address + size, .size = b->size - size, .region = b->region, .left = b,
                            .right = b->right };
        if (rest->right) rest->right->left = rest;
        b->right = rest;
        b->size = size;
        list_add(arena, rest);
        forbid(arena, rest->address, rest->size < 4096 ? rest->size : 4096);
    }
    allow(arena, b->address, (size_t)nbytes);
    forbid(arena, b->address + nbytes, b->size - (size_t)nbytes);
    info->used += (int64_t)b->size;
    if (info->used > info->peak) info->peak = info->used;
    *out = b;
    return 0;
}

void ps_arena_free(ps_arena *arena, ps_block *b)
{
    arena->info.used -= (int64_t)b->size;
    forbid(arena, b->address, b->size);
    ps_block *l = b->left, *r = b->right;
    if (r && r->free) {
        list_remove(arena, r);
        b->size += r->size;
        b->right = r->right;
        if (b->right) b->right->left = b;
        record_free(arena, r);
    }
    if (l && l->free) {
        list_remove(arena, l);
        l->size += b->size;
        l->right = b->right;
        if (l->right) l->right->left = l;
        record_free(arena, b);
        b = l;
    }
    list_add(arena, b);
}

int ps_arena_new(ps_backend *be, ps_arena **out)
{
    ps_arena *arena = ps_alloc0(sizeof *arena);
    if (!arena) return ps_fail_nomem(sizeof *arena);
    arena->be = be;
    *out = arena;
    return 0;
}

void ps_arena_delete(ps_arena *arena)
{
    if (!arena) return;
    while (arena->regions) {                         /* all blocks are free by now: each is a whole region */
        region *r = arena->regions;
        arena->regions = r->next;
        region_drop(arena, r);
    }
    while (arena->spare) {
        ps_block *b = arena->spare;
        arena->spare = b->next;
        ps_free(b);
    }
    ps_free(arena);
}
