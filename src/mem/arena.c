/* SPDX-License-Identifier: BSD-3-Clause
 * A memory allocator that divides large regions of a backend into blocks. Its algorithm is two-level segregated fit
 * (Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004). The algorithm finds a
 * free block in constant time. When a block is freed, it is merged with its free neighbours immediately.
 *
 * Regions stay allocated during a run, because page faults would take a third of the time of a training step. If
 * memory becomes short, the arena returns the pages of free blocks to the system. Holes between blocks therefore use
 * addresses, but they use none of the budget. The records of blocks are outside the regions, because the CPU may be
 * unable to access the memory of a region. Only one thread uses an arena.
 *
 * A block of more than about 960 MiB does not fit into a shared region. Such a block has a region of its own, unless
 * one region spans the whole device. Otherwise small blocks would split the large block's memory after the large
 * block is freed. The next large block, such as the gradient of another token table, would then need new memory, and
 * the pages of both large blocks would count against a budget. */
#include "mem/mem.h"
#include "base/alloc.h"
#include "base/error.h"
#include "base/record.h"
#include <stdlib.h>
#include <string.h>

enum {
    GRAIN_LOG2 = 8, GRAIN = 1 << GRAIN_LOG2,      /* sizes and addresses are multiples of 256 bytes */
    SECOND_LOG2 = 4, SECOND = 1 << SECOND_LOG2,   /* number of classes between two powers of two: 16 */
    FIRST = 48,                                   /* number of powers of two; enough for the largest tensor (2^56
                                                   * bytes) */
};
#define REGION_BYTES ((size_t)1 << 30)            /* size of a shared region; its pages use memory only after they are
                                                   * touched */
#define HUGE_BYTES ((size_t)2 << 20)              /* sizes of regions are multiples of this */
#define PAGE_BYTES ((size_t)4096)                 /* page size if the backend sets none */
#define MAP_PAGES ((size_t)1 << 22)               /* maximum number of pages in a region; a larger region has larger
                                                   * pages */
#define CHECK_BYTES ((int64_t)64 << 20)           /* each time the arena has grown by this size, the system's free
                                                   * memory is checked */

typedef struct region {
    struct region *next;
    char *base;
    size_t size, page;                            /* in bytes; page: smallest unit that can be returned to the system */
    uint64_t *pages;                              /* one bit per page: 1 if the page has memory */
    ps_block *first;                              /* block at the region's base; it never changes */
    bool alone;                                   /* true if the region has only one block, which is never split */
} region;

struct ps_block {
    char *address;
    size_t size;
    region *region;
    bool free;
    ps_block *left, *right;                       /* neighbours in the region */
    ps_block *prev, *next;                        /* neighbours in the free list */
    ps_holder by;                                 /* the block's user; its nbytes is not used */
};

/* The largest blocks that were in use at one time. */
typedef struct holders {
    int n;
    int64_t used;
    ps_holder list[PS_HOLDERS];
} holders;

struct ps_arena {
    ps_backend *be;
    region *regions;
    uint64_t first_map;
    uint32_t second_map[FIRST];
    ps_block *bins[FIRST][SECOND];
    ps_block *spare;                              /* list of records of blocks that can be reused */
    int64_t growth;                               /* bytes of new memory since the system's memory was last checked */
    int64_t held, hold_limit;                     /* bytes of pages that have memory, and their limit; 0 means no
                                                   * limit */
    int64_t busy, busy_peak;                      /* bytes of pages that contain part of a used block, and their peak */
    ps_memory_info info;
    bool rose;                                    /* true if more bytes are used than at the time of `peak`; the next
                                                   * free updates `peak` */
    holders peak, refused;
};

/* Support for AddressSanitizer, in host memory. AddressSanitizer then reports accesses to free memory, and accesses
 * to the bytes of a block after the requested bytes. */
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

/* Computes the class of a size. `first` is the index of the largest power of two, in grains, that is at most the size.
 * The interval above that power is divided into sixteen parts. `second` is the index of the part that contains the
 * size. If the size is less than 16 grains, `first` is 0, and each size has a class of its own. */
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
    b->free = true;
    if (b->region->alone) {                       /* take_alone finds this block without a list */
        b->size = b->region->size;
        return;
    }
    class_of(b->size, &f, &s);
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
    b->free = false;
    if (b->region->alone) return;
    class_of(b->size, &f, &s);
    if (b->next) b->next->prev = b->prev;
    if (b->prev) b->prev->next = b->next;
    else if (!(arena->bins[f][s] = b->next) && !(arena->second_map[f] &= ~(1u << s)))
        arena->first_map &= ~(1ull << f);
}

/* Returns the size of a region that is large enough for take() to find a block of `size` bytes in it. The region's
 * size is in the next class, because take() searches that class for blocks that are certainly large enough. */
static size_t region_for(size_t size) { return size + size / SECOND + GRAIN; }
static bool commits(const ps_arena *arena) { return arena->be->region_commit != NULL; }
static bool is_alone(const ps_arena *arena, size_t size) { return !commits(arena) && region_for(size) > REGION_BYTES; }

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

static bool is_whole(const region *r) { return r->first->free && !r->first->right; }

/* Allocates a whole free region of at least `size` bytes as one block, and returns the block. From now on the region
 * has only one block. The smallest region is used. Among equal regions, a region that had only one block before is
 * preferred. The block has `size` bytes until it is free again. Returns NULL if there is no such region. */
static ps_block *take_alone(ps_arena *arena, size_t size)
{
    region *found = NULL;
    for (region *r = arena->regions; r; r = r->next)
        if (is_whole(r) && r->size >= size &&
            (!found || r->size < found->size || (r->size == found->size && r->alone))) found = r;
    if (!found) return NULL;
    list_remove(arena, found->first);
    found->alone = true;
    found->first->size = size;
    return found->first;
}

/* Removes a free block of at least `size` bytes from its list, and returns the block. Returns NULL if there is no
 * such block. */
static ps_block *take(ps_arena *arena, size_t size)
{
    int f, s;
    if (is_alone(arena, size)) return take_alone(arena, size);
    class_of(size, &f, &s); /* searches the class of `size` first, because the sizes of a training step repeat */
    int tries = f < FIRST ? 16 : 0;
    for (ps_block *b = tries ? arena->bins[f][s] : NULL; b && tries--; b = b->next)
        if (b->size >= size) {
            list_remove(arena, b);
            return b;
        }
    size_t rounded = size;                          /* size rounded up to the next class; every block of that class is
                                                     * large enough */
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

static bool is_set(const region *r, size_t page) { return r->pages[page / 64] >> page % 64 & 1; }

/* If `set` is true, returns the first page in [from, end) that has memory. If `set` is false, returns the first page
 * that has no memory. Returns `end` if there is no such page. */
static size_t find_page(const region *r, size_t from, size_t end, bool set)
{
    size_t p = from;
    while (p < end && is_set(r, p) != set) {
        uint64_t word = (set ? r->pages[p / 64] : ~r->pages[p / 64]) & ~0ull << p % 64;
        p = word ? p / 64 * 64 + (size_t)__builtin_ctzll(word) : (p / 64 + 1) * 64;
    }
    return p < end ? p : end;
}

/* Finds the next run of pages in [from, end) that all have memory, or that all have no memory if `set` is false.
 * Returns the first page of the run, or `end` if there is no such run. Sets *after to the page after the run. */
static size_t next_run(const region *r, size_t from, size_t end, bool set, size_t *after)
{
    size_t first = find_page(r, from, end, set);
    *after = find_page(r, first, end, !set);
    return first;
}

static void mark(ps_arena *arena, region *r, size_t from, size_t end, bool set)
{
    for (size_t p = from; p < end;) {
        size_t n = 64 - p % 64 < end - p ? 64 - p % 64 : end - p;
        uint64_t bits = (n == 64 ? ~0ull : (1ull << n) - 1) << p % 64;
        if (set) r->pages[p / 64] |= bits;
        else r->pages[p / 64] &= ~bits;
        p += n;
    }
    int64_t nbytes = (int64_t)((end - from) * r->page);
    arena->held += set ? nbytes : -nbytes;
    if (commits(arena)) arena->info.reserved += set ? nbytes : -nbytes;
}

/* Returns the memory of the pages [from, end) to the system. The result is true if any of these pages had memory. */
static bool discard(ps_arena *arena, region *r, size_t from, size_t end)
{
    bool any = false;
    for (size_t after, first = next_run(r, from, end, true, &after); first < end;
         first = next_run(r, after, end, true, &after)) {
        char *p = r->base + first * r->page;
        size_t nbytes = (after - first) * r->page;
        allow(arena, p, nbytes);
        arena->be->region_discard(arena->be, p, nbytes);
        forbid(arena, p, nbytes);
        mark(arena, r, first, after, false);
        any = true;
    }
    return any;
}

static int64_t count_memory(const region *r)
{
    int64_t n = 0;
    for (size_t i = 0; i < (r->size / r->page + 63) / 64; i++) n += __builtin_popcountll(r->pages[i]);
    return n * (int64_t)r->page;
}

static void region_drop(ps_arena *arena, region *r)
{
    if (r->first->free) {
        list_remove(arena, r->first);
        record_free(arena, r->first);
    }
    allow(arena, r->base, r->size);
    int64_t memory = count_memory(r);
    arena->info.reserved -= commits(arena) ? memory : (int64_t)r->size;
    arena->held -= memory;
    arena->be->region_free(arena->be, r->base, r->size);
    ps_free(r->pages);
    ps_free(r);
}

int64_t ps_arena_held(const ps_arena *arena) { return arena->held; }

int64_t ps_arena_busy(ps_arena *arena, int64_t *peak)
{
    if (peak) {
        *peak = arena->busy_peak;
        arena->busy_peak = arena->busy;
    }
    return arena->busy;
}
void ps_arena_set_hold_limit(ps_arena *arena, int64_t nbytes) { arena->hold_limit = nbytes; }

bool ps_arena_trim(ps_arena *arena, bool holes)
{
    bool any = false;
    for (region **at = &arena->regions; *at;) {
        region *r = *at;
        if (is_whole(r)) {
            *at = r->next;
            region_drop(arena, r);
            any = true;
            continue;
        }
        if (r->alone && arena->be->region_discard)         /* discards the end of the region, after its only block */
            any = discard(arena, r, (r->first->size + r->page - 1) / r->page, r->size / r->page) || any;
        for (ps_block *b = r->first; arena->be->region_discard && b; b = b->right) {
            if (!b->free || (b->right && !holes)) continue;
            size_t from = (size_t)(b->address - r->base), end = from + b->size;
            from = (from + r->page - 1) / r->page, end /= r->page;
            if (from < end) any = discard(arena, r, from, end) || any;
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

/* Reserves addresses for a region, and allocates the bitmap of its pages. */
static int region_make(ps_arena *arena, size_t nbytes, region *r)
{
    size_t page = arena->be->page_nbytes ? arena->be->page_nbytes : PAGE_BYTES;
    while (nbytes / page >= MAP_PAGES) page *= 2;
    size_t words = (nbytes / page + 64) / 64;
    uint64_t *pages = ps_alloc0(sizeof *pages * words);
    if (!pages) return ps_fail_nomem(sizeof *pages * words);
    void *base = NULL;
    int rc = region_from_device(arena, nbytes, &base);
    if (rc < 0) ps_free(pages);
    else *r = (region){ .base = base, .size = nbytes, .page = page, .pages = pages };
    return rc;
}

/* Adds a region that is large enough for a block of `size` bytes. */
static int grow(ps_arena *arena, size_t size)
{
    bool alone = is_alone(arena, size);
    if (!alone) size = region_for(size);
    region *r = ps_alloc0(sizeof *r);
    ps_block *b = r ? record_new(arena) : NULL;
    if (!b) {
        ps_free(r);
        return ps_fail_nomem(sizeof *r + sizeof *b);
    }
    size_t least = (size + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    size_t got = alone || least > REGION_BYTES ? least : REGION_BYTES;
    if (commits(arena)) {                            /* One region spans the whole device, so that no block is limited
                                                      * by the end of a region. */
        int64_t available = arena->be->bytes_available(arena->be);
        if (available > (int64_t)got) got = ((size_t)available + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    }
    int rc = region_make(arena, got, r);
    if (rc < 0 && got > least) rc = region_make(arena, got = least, r);
    if (rc < 0) {
        ps_free(r);
        record_free(arena, b);
        return rc;
    }
    void *base = r->base;
    r->next = arena->regions;
    r->first = b;
    r->alone = alone;
    arena->regions = r;
    if (!commits(arena)) arena->info.reserved += (int64_t)got;
    *b = (ps_block){ .address = base, .size = got, .region = r };
    list_add(arena, b);
    return 0;
}

/* Fails if the system does not have enough memory for `more` bytes. Without this check, the system would later kill
 * the process. */
static int check_growth(ps_arena *arena, int64_t more, size_t size)
{
    if (arena->growth + more < CHECK_BYTES) {
        arena->growth += more;
        return 0;
    }
    int64_t available = arena->be->bytes_available(arena->be);
    if (available < more + CHECK_BYTES)
        return ps_fail_room(PS_ENOMEM, PS_SUB_NONE, -1, (int64_t)size, available,
                            "device %s: %.1f MiB wanted, %.1f MiB in use, only %.1f MiB left %s; use a smaller batch, "
                            "a smaller model or recompute", arena->be->name, mib(size), mib((size_t)arena->info.used),
                            mib((size_t)available), arena->be->is_host ? ps_host_limited_by() : "there");
    arena->growth = 0;
    return 0;
}

/* Commits memory for the pages in [from, end) that have no memory. */
static int make_memory(ps_arena *arena, region *r, size_t from, size_t end)
{
    ps_backend *be = arena->be;
    for (size_t after, first = next_run(r, from, end, false, &after); first < end;
         first = next_run(r, after, end, false, &after)) {
        size_t nbytes = (after - first) * r->page;   /* after a failure, earlier runs stay committed and counted */
        if (commits(arena)) PS_TRY(be->region_commit(be, r->base + first * r->page, nbytes));
        mark(arena, r, first, after, true);
    }
    return 0;
}

/* Commits memory for the pages [from, end) if the system has enough memory. `more` is the size in bytes of the pages
 * that have no memory yet. `size` is the size of the block in bytes. */
static int grow_pages(ps_arena *arena, region *r, size_t from, size_t end, int64_t more, size_t size)
{
    if (!commits(arena)) PS_TRY(check_growth(arena, more, size));
    return make_memory(arena, r, from, end);
}

/* Commits memory for the first `size` bytes of block b. */
static int extend(ps_arena *arena, const ps_block *b, size_t size)
{
    region *r = b->region;
    size_t offset = (size_t)(b->address - r->base), from = offset / r->page, end = (offset + size - 1) / r->page + 1;
    int64_t more = 0;
    for (size_t after, first = next_run(r, from, end, false, &after); first < end;
         first = next_run(r, after, end, false, &after))
        more += (int64_t)((after - first) * r->page);
    if (more == 0) return 0;
    if (arena->hold_limit && arena->held + more > arena->hold_limit)
        return ps_fail_room(PS_ENOMEM, PS_SUB_NONE, -1, (int64_t)size, arena->hold_limit - arena->held,
                            "device %s: %.1f MiB wanted; %.1f MiB are held, of which %.1f are in use, but at most %.1f "
                            "MiB may be held",
                            arena->be->name, mib(size), mib((size_t)arena->held), mib((size_t)arena->info.used),
                            mib((size_t)arena->hold_limit));
    int rc = grow_pages(arena, r, from, end, more, size);
    if (rc < 0 && ps_arena_trim(arena, true)) rc = grow_pages(arena, r, from, end, more, size);
    if (rc < 0)
        ps_error_prefix("device %s: %.1f MiB wanted, %.1f of %.1f MiB held in use: ", arena->be->name, mib(size),
                        mib((size_t)arena->info.used), mib((size_t)arena->info.reserved));
    return rc;
}

/* Returns the size in bytes of the pages that only block b uses. Free neighbours are always merged, so the nearest
 * used block on each side is the first or the second neighbour. */
static int64_t own_pages(const ps_block *b)
{
    const region *r = b->region;
    size_t offset = (size_t)(b->address - r->base), from = offset / r->page, end = (offset + b->size - 1) / r->page + 1;
    const ps_block *left = b->left && b->left->free ? b->left->left : b->left;
    const ps_block *right = b->right && b->right->free ? b->right->right : b->right;
    if (left && left->address + left->size > r->base + from * r->page) from++;
    if (right && from < end && right->address < r->base + end * r->page) end--;
    return (int64_t)((end - from) * r->page);
}

/* -- users of memory --------------------------------------------------------------------------------------------- */
static void look(const ps_arena *arena, holders *out)
{
    out->n = 0;
    out->used = arena->info.used;
    for (const region *r = arena->regions; r; r = r->next)
        for (const ps_block *b = r->first; b; b = b->right) {
            int at = out->n;
            int64_t nbytes = (int64_t)b->size;
            if (b->free || (at == PS_HOLDERS && nbytes <= out->list[at - 1].nbytes)) continue;
            if (at < PS_HOLDERS) out->n++;
            else at--;
            for (; at > 0 && out->list[at - 1].nbytes < nbytes; at--) out->list[at] = out->list[at - 1];
            out->list[at] = b->by;
            out->list[at].nbytes = nbytes;
        }
}

void ps_arena_refused(ps_arena *arena) { look(arena, &arena->refused); }

int ps_arena_holders(ps_arena *arena, int when, ps_holder *out, int64_t *used)
{
    holders now;
    if (when == PS_HOLD_NOW) look(arena, &now);
    if (when == PS_HOLD_PEAK && arena->rose) look(arena, &arena->peak), arena->rose = false;
    const holders *h = when == PS_HOLD_NOW ? &now : when == PS_HOLD_PEAK ? &arena->peak : &arena->refused;
    memcpy(out, h->list, sizeof *out * (size_t)h->n);
    *used = h->used;
    return h->n;
}

void ps_arena_reset_peak(ps_arena *arena)
{
    arena->info.peak = arena->info.used;
    look(arena, &arena->peak);
    arena->rose = false;
}

void ps_block_note(ps_block *block, int32_t line, bool scratch)
{
    block->by.line = line;
    block->by.scratch = scratch;
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */
static int alloc(ps_arena *arena, int64_t nbytes, ps_block **out)
{
    if (ps_alloc_should_fail())
        return ps_fail(PS_ENOMEM, "device %s: %lld bytes wanted, but a test made this allocation fail", arena->be->name,
                       (long long)nbytes);
    size_t size = ((size_t)nbytes + GRAIN - 1) & ~(size_t)(GRAIN - 1);
    if (size == 0) size = GRAIN;
    ps_memory_info *info = &arena->info;
    if (info->limit && info->used + (int64_t)size > info->limit)
        return ps_fail_room(PS_ENOMEM, PS_SUB_NONE, -1, (int64_t)size, info->limit - info->used,
                            "device %s: %.1f MiB wanted, %.1f MiB in use, the limit set is %.1f MiB; raise it, or use "
                            "a smaller batch, a smaller model or recompute", arena->be->name, (double)size / 1048576.0,
                            (double)info->used / 1048576.0, (double)info->limit / 1048576.0);
    ps_block *b = take(arena, size);
    if (!b) {
        PS_TRY(grow(arena, size));
        b = take(arena, size);
    }
    if (!b) return ps_fail(PS_ENOMEM, "device %s: there is no block of %zu bytes", arena->be->name, size);
    int rc = extend(arena, b, size);
    ps_block *rest = rc == 0 && b->size > size ? record_new(arena) : NULL;
    if (rc < 0 || (b->size > size && !rest)) {
        list_add(arena, b);
        return rc < 0 ? rc : ps_fail_nomem(sizeof *rest);
    }
    if (rest) {                                      /* the low part is allocated; the high part stays free */
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
    arena->busy += own_pages(b);
    if (arena->busy > arena->busy_peak) arena->busy_peak = arena->busy;
    b->by = (ps_holder){ .op = ps_error_running(), .module = ps_module_now(), .backward = ps_record_at.backward };
    if (info->used > arena->peak.used + arena->peak.used / 256) arena->rose = true;
    *out = b;
    return 0;
}

int ps_arena_alloc(ps_arena *arena, int64_t nbytes, ps_block **out)
{
    int rc = alloc(arena, nbytes, out);
    if (rc < 0) ps_arena_refused(arena);
    return rc;
}

void ps_arena_free(ps_arena *arena, ps_block *b)
{
    if (arena->rose) {
        look(arena, &arena->peak);
        arena->rose = false;
    }
    arena->info.used -= (int64_t)b->size;
    arena->busy -= own_pages(b);
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
    while (arena->regions) {                         /* all blocks are free, so each block is a whole region */
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
