/* SPDX-License-Identifier: BSD-3-Clause
 * The reference memory manager. A storage stays in the arena of its device and never moves. A pin therefore only
 * increments a counter and returns the address. */
#include "base/alloc.h"
#include "base/error.h"
#include "mem/mem.h"

enum { MAX_DEVICES = 8 };

typedef struct plain {
    ps_mem base;
    int n_devices;
    int refused;                  /* device on which an allocation last failed, or -1 */
    ps_arena *arenas[MAX_DEVICES];
} plain;

static int take(plain *p, int device, int64_t nbytes, ps_block **out)
{
    int rc = ps_arena_alloc(p->arenas[device], nbytes, out);
    if (rc < 0) p->refused = device;
    return rc;
}

static int plain_alloc(ps_mem *mem, ps_storage *s)
{
    ps_block *block;
    PS_TRY(take((plain *)mem, s->device, s->nbytes, &block));
    s->block = block;
    s->keeper = &mem->keeper;
    return 0;
}

static void plain_free(ps_keeper *keeper, ps_storage *s)
{
    ps_arena_free(((plain *)keeper)->arenas[s->device], s->block);
    s->block = NULL;
}

static int plain_pin(ps_keeper *keeper, ps_storage *s, int device, unsigned access, void **out)
{
    *out = s->block ? ps_block_address(s->block) : NULL;
    s->pins++;
    return 0;
}

static void plain_unpin(ps_keeper *keeper, ps_storage *s, int device) { s->pins--; }

static int plain_scratch(ps_mem *mem, int device, int64_t nbytes, void **handle, void **out)
{
    ps_block *block;
    PS_TRY(take((plain *)mem, device, nbytes, &block));
    ps_block_note(block, 0, true);
    *handle = block;
    *out = ps_block_address(block);
    return 0;
}

static void plain_scratch_free(ps_mem *mem, int device, void *handle)
{
    ps_arena_free(((plain *)mem)->arenas[device], handle);
}

static int plain_info(ps_mem *mem, int device, ps_memory_info *out)
{
    *out = *ps_arena_info(((plain *)mem)->arenas[device]);
    return 0;
}

static int plain_set_limit(ps_mem *mem, int device, int64_t nbytes)
{
    ps_arena_info(((plain *)mem)->arenas[device])->limit = nbytes;
    return 0;
}

static void plain_reset_peak(ps_mem *mem, int device)
{
    ps_arena_reset_peak(((plain *)mem)->arenas[device]);
}

static int64_t plain_held(ps_mem *mem, int device) { return ps_arena_held(((plain *)mem)->arenas[device]); }

static int64_t plain_busy(ps_mem *mem, int device, int64_t *peak)
{
    return ps_arena_busy(((plain *)mem)->arenas[device], peak);
}

static void plain_set_hold_limit(ps_mem *mem, int device, int64_t nbytes)
{
    ps_arena_set_hold_limit(((plain *)mem)->arenas[device], nbytes);
}

static void plain_trim(ps_mem *mem, int device, bool holes)
{
    ps_arena_trim(((plain *)mem)->arenas[device], holes);
}

static void plain_close(ps_mem *mem)
{
    plain *p = (plain *)mem;
    for (int i = 0; i < p->n_devices; i++) ps_arena_delete(p->arenas[i]);
    ps_free(p);
}

static void plain_note_line(ps_storage *s, int32_t line)
{
    if (s->block) ps_block_note(s->block, line, false);
}

static void plain_refused(ps_mem *mem, int device)
{
    plain *p = (plain *)mem;
    p->refused = device;
    ps_arena_refused(p->arenas[device]);
}

static int plain_holders(ps_mem *mem, int device, int when, ps_holder *out, int64_t *used)
{
    plain *p = (plain *)mem;
    if (device == -1 && when == PS_HOLD_FAILED) {
        *used = 0;
        if (p->refused < 0) return 0;
        device = p->refused;
    }
    if (device < 0 || device >= p->n_devices || when < PS_HOLD_NOW || when > PS_HOLD_FAILED)
        return ps_fail(PS_EINVAL, "there is no device %d, or no moment %d of memory use", device, when);
    return ps_arena_holders(p->arenas[device], when, out, used);
}

static const ps_keeper_table plain_keeper = {
    .name = "plain", .free = plain_free, .pin = plain_pin, .unpin = plain_unpin, .note_line = plain_note_line,
};
static const ps_mem_table plain_table = {
    .alloc = plain_alloc, .scratch = plain_scratch, .scratch_free = plain_scratch_free, .info = plain_info,
    .set_limit = plain_set_limit,
    .reset_peak = plain_reset_peak, .held = plain_held, .busy = plain_busy, .set_hold_limit = plain_set_hold_limit,
    .trim = plain_trim, .holders = plain_holders, .refused = plain_refused, .close = plain_close,
};

bool ps_storage_is_plain(const ps_storage *s) { return s->keeper->table == &plain_keeper; }

int ps_mem_plain_add(ps_mem *mem, ps_backend *device)
{
    plain *p = (plain *)mem;
    if (p->n_devices == MAX_DEVICES)
        return ps_fail(PS_EINVAL, "a context cannot have %d devices; at most %d are supported", MAX_DEVICES + 1,
                       MAX_DEVICES);
    PS_TRY(ps_arena_new(device, &p->arenas[p->n_devices]));
    p->n_devices++;
    return 0;
}

void ps_mem_plain_undo(ps_mem *mem)
{
    plain *p = (plain *)mem;
    ps_arena_delete(p->arenas[--p->n_devices]);
}

int ps_mem_plain_new(int n_devices, ps_backend *const *devices, ps_mem **out)
{
    if (n_devices > MAX_DEVICES)
        return ps_fail(PS_EINVAL, "a context cannot have %d devices; at most %d are supported", n_devices, MAX_DEVICES);
    plain *p = ps_alloc0(sizeof *p);
    if (!p) return ps_fail_nomem(sizeof *p);
    p->base = (ps_mem){ { &plain_keeper }, &plain_table };
    p->refused = -1;
    for (int i = 0; i < n_devices; i++) {
        int rc = ps_mem_plain_add(&p->base, devices[i]);
        if (rc < 0) {
            plain_close(&p->base);
            return rc;
        }
    }
    *out = &p->base;
    return 0;
}
