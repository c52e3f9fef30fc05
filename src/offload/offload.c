/* SPDX-License-Identifier: BSD-3-Clause
 * This file keeps activations on the host until backward reads them (offload.h). An offloaded storage has a record in
 * place of its block. The record contains two storages: `here` on the device and `there` on the host. `there` always
 * has memory. `here` has memory during a copy. After a copy to the host, `here` keeps its memory until the first
 * storage of the next round is offloaded. The first pin of the offloaded storage frees the record. */
#include "offload/offload.h"
#include "base/alloc.h"
#include "base/error.h"

enum { AHEAD = 2 };               /* number of storages that a pin in backward fetches ahead */

typedef struct record {
    /* The list is sorted by round. Within a round, the storage that was offloaded last comes first. */
    struct record *prev, *next;
    ps_storage *of;
    /* here: storage on the device; it has no memory if here.block is NULL
     * there: storage on the host; it has no memory if there.block is NULL */
    ps_storage here, there;
    ps_copy *copy;                /* copy in progress, or NULL; always NULL in dry runs */
    int64_t round;
    int32_t vstage, micro;        /* the forward that offloaded the storage */
    /* coming: true if the last copy was to the device
     * dry: true if the record was made in a dry run */
    bool coming, dry;
} record;

struct ps_away {
    ps_keeper base;
    ps_backend *const *devices;
    int host;
    ps_mem *const *mem;
    const ps_step *const *step;
    record *first, *last;
    /* round: number of the current round
     * leaving: number of the round whose storages may still have memory on the device */
    int64_t round, leaving;
    bool backward;
};

static bool is_dry(const ps_away *a) { return (*a->step)->dry != NULL; }

static const ps_keeper_table away_table;

static ps_backend *device_of(const ps_away *a, const record *r) { return a->devices[r->here.device]; }

static void drop(ps_storage *side)
{
    ps_storage_free(side);
}

static void unlink_record(ps_away *a, record *r)
{
    if (r->prev) r->prev->next = r->next;
    else a->first = r->next;
    if (r->next) r->next->prev = r->prev;
    else a->last = r->prev;
}

/* -- copies ------------------------------------------------------------------------------------------------------- */
/* Starts a copy to the device if `coming` is set, or to the host. r->here and r->there stay pinned until finish(). */
static int start(ps_away *a, record *r, bool coming)
{
    void *here, *there;
    ps_storage *x = &r->here, *y = &r->there;
    ps_backend *be = device_of(a, r);
    r->coming = coming;
    if (r->dry) return 0;
    PS_TRY(ps_storage_pin(x, x->device, coming ? PS_WRITE : PS_READ, &here));
    int rc = ps_storage_pin(y, y->device, coming ? PS_READ : PS_WRITE, &there);
    if (rc == 0) {
        rc = be->copy_start(be, coming, coming ? here : there, coming ? there : here, (size_t)x->nbytes, NULL,
                            &r->copy);
        if (rc < 0) ps_storage_unpin(y, y->device);
    }
    if (rc < 0) ps_storage_unpin(x, x->device);
    return rc;
}

/* Waits for the copy of the record, if a copy is in progress. r->here and r->there keep their memory. After an error,
 * the contents of the destination are undefined. */
static int finish(ps_away *a, record *r)
{
    if (!r->copy) return 0;
    ps_backend *be = device_of(a, r);
    int rc = be->copy_wait(be, r->copy, true);
    r->copy = NULL;
    ps_storage_unpin(&r->here, r->here.device);
    ps_storage_unpin(&r->there, r->there.device);
    return rc < 0 ? rc : 0;
}

static int take(ps_away *a, ps_storage *side)
{
    ps_mem *mem = *a->mem;
    return mem->table->alloc(mem, side);
}

static int begin_return(ps_away *a, record *r)
{
    if (r->here.block) return 0;
    PS_TRY(take(a, &r->here));
    int rc = start(a, r, true);
    if (rc < 0) drop(&r->here);
    return rc;
}

/* Ends the offloading of a storage whose bytes are on the device. Frees the memory on the host, and the record. */
static void restore(ps_away *a, record *r)
{
    drop(&r->there);
    unlink_record(a, r);
    r->of->keeper = r->here.keeper;
    r->of->block = r->here.block;
    r->of->offload.fetched = !a->backward;
    ps_free(r);
}

/* -- offloading --------------------------------------------------------------------------------------------------- */
/* Waits for the copies of the previous round to the host, and frees the device memory of the copied storages. */
static void end_leaving(ps_away *a)
{
    for (record *r = a->last, *prev; r && (r->here.block || r->dry != is_dry(a)); r = prev) {
        prev = r->prev;
        if (r->coming || r->dry != is_dry(a)) continue;
        if (finish(a, r) < 0) restore(a, r);
        else drop(&r->here);
    }
    a->leaving = a->round;
}

void ps_away_round(ps_away *a) { a->round++; }
void ps_away_backward(ps_away *a, bool on) { a->backward = on; }

void ps_away_leave(ps_away *a, ps_storage *s)
{
    const ps_backend *be = a->devices[s->device];
    if (a->backward || s->pins > 0 || s->offload.fetched || !s->block || be->is_host || be->no_data ||
        !be->copy_start || !ps_storage_is_plain(s))
        return;
    if (a->leaving != a->round) end_leaving(a);
    record *r = ps_alloc0(sizeof *r);
    if (!r) return;
    const ps_action *now = &(*a->step)->is.now;
    *r = (record){ .of = s, .dry = is_dry(a), .round = a->round, .vstage = now->vstage, .micro = now->micro,
                   .here = { .keeper = s->keeper, .block = s->block, .nbytes = s->nbytes, .device = s->device },
                   .there = { .nbytes = s->nbytes, .device = a->host } };
    int rc = take(a, &r->there);
    if (rc == 0) rc = start(a, r, false);
    if (rc < 0) {
        drop(&r->there);
        ps_free(r);
        return;
    }
    s->keeper = &a->base;
    s->block = r;
    /* Insert r before the other records of its round. A scope offloads its youngest storage first, and backward also
     * needs the youngest storage first. Therefore the storages that backward needs next are at the end of the list. */
    r->prev = a->last;
    while (r->prev && r->prev->round == r->round) r->prev = r->prev->prev;
    r->next = r->prev ? r->prev->next : a->first;
    if (r->prev) r->prev->next = r;
    else a->first = r;
    if (r->next) r->next->prev = r;
    else a->last = r;
}

/* -- the table ---------------------------------------------------------------------------------------------------- */
/* Begins to fetch the last storages of the list, which backward needs next. Fetches only storages of the same forward
 * as `of`, because the backwards of other forwards may begin much later. */
static void fetch_ahead(ps_away *a, const record *of)
{
    int n = 0;
    for (record *r = a->last; r && n < AHEAD; r = r->prev) {
        if (r == of || r->dry != of->dry || r->vstage != of->vstage || r->micro != of->micro) continue;
        if (begin_return(a, r) < 0) return;
        n++;
    }
}

static int away_pin(ps_keeper *keeper, ps_storage *s, int device, unsigned access, void **out)
{
    ps_away *a = (ps_away *)keeper;
    record *r = s->block;
    if (is_dry(a) && !r->dry) {                    /* a dry run does not fetch real storages */
        *out = (void *)((uintptr_t)1 << 60);
        return 0;
    }
    if (r->dry && !is_dry(a))
        return ps_fail(PS_ESTALE, "a tensor that was made in a dry run has no contents; make it again in each step");
    int rc = begin_return(a, r);
    if (rc == 0 && a->backward) fetch_ahead(a, r);
    if (rc == 0) {
        rc = finish(a, r);
        if (rc < 0 && r->coming) drop(&r->here);
        else rc = 0;                             /* after a failed copy to the host, the device still has the bytes */
    }
    if (rc < 0) {
        ps_error_prefix("fetching %.1f MiB of activations from the host: ", (double)s->nbytes / 1048576.0);
        return rc;
    }
    restore(a, r);
    return ps_storage_pin(s, device, access, out);
}

/* Does nothing. A storage is unpinned while it is offloaded only in a dry run. In this case away_pin() has not pinned
 * the storage. */
static void away_unpin(ps_keeper *keeper, ps_storage *s, int device) {}

static void away_free(ps_keeper *keeper, ps_storage *s)
{
    ps_away *a = (ps_away *)keeper;
    record *r = s->block;
    finish(a, r);
    drop(&r->here);
    drop(&r->there);
    unlink_record(a, r);
    s->keeper = r->here.keeper;
    s->block = NULL;
    ps_free(r);
}

static const ps_keeper_table away_table = {
    .name = "away", .free = away_free, .pin = away_pin, .unpin = away_unpin,
};

bool ps_away_is_dry(const ps_away *a, const ps_storage *s)
{
    return s->keeper == &a->base && s->block && ((const record *)s->block)->dry;
}

int ps_away_new(int n_devices, ps_backend *const *devices, ps_mem *const *mem,
                const ps_step *const *step, ps_away **out)
{
    int host = 0;
    while (host < n_devices && (!devices[host]->is_host || devices[host]->no_data)) host++;
    if (host == n_devices)
        return ps_fail(PS_EUNSUP, "activations cannot be offloaded, because there is no host memory");
    ps_away *a = ps_alloc(sizeof *a);
    if (!a) return ps_fail_nomem(sizeof *a);
    *a = (ps_away){ .base.table = &away_table, .devices = devices, .host = host, .mem = mem, .step = step };
    *out = a;
    return 0;
}

void ps_away_delete(ps_away *a) { ps_free(a); }
