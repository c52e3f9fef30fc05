/* SPDX-License-Identifier: BSD-3-Clause
 * Memory is reached only by pin and unpin, through a table (ps_mem), so that the plain path and every managed one run
 * the same program. This layer sees storages (bytes on a device), never a tensor or an op. */
#ifndef PS_MEM_H
#define PS_MEM_H
#include "backend/backend.h"

typedef struct ps_mem ps_mem;
typedef struct ps_scope ps_scope;

enum { PS_READ = 1, PS_WRITE = 2 };

/* Bytes on a device. `refs` counts tensor headers. `holds` counts owners that need the bytes even after a scope dropped
 * the storage (tensors that the tape saved, gradients on their way). Bytes exist while `block` is set. Dropped bytes
 * never return. */
struct ps_storage {
    ps_mem *mem;
    void *block;              /* of the memory manager; NULL: no bytes (dropped, or nbytes is 0) */
    int64_t nbytes;
    int32_t device, refs, holds, pins;
    int32_t waits;            /* of a parameter: nodes with it that backward walk `walk` has not passed yet */
    int64_t walk;
    uint32_t version;         /* counts writes after creation; the tape compares it */
    bool dropped, kept;
    bool watched;             /* a parameter's: recompute segments note that they read it */
    bool fetched;             /* came back from the host before backward: others use it, so it stays */
    bool taken;               /* a gradient lies here for now; only headers with PS_T_SLOT may be used */
    ps_scope *scope;          /* that will drop it, or NULL */
    ps_storage *scope_prev, *scope_next;
};

typedef struct ps_mem_table {
    const char *name;
    /* Memory for s->nbytes > 0 on s->device. Sets s->block, and s->mem to the manager that holds the storage from now
     * on: free, pin and unpin are called through s->mem. */
    int (*alloc)(ps_mem *mem, ps_storage *s);
    void (*free)(ps_mem *mem, ps_storage *s);              /* clears s->block; never while pinned */
    /* The bytes stay at *out, an address of `device`, until unpin. They also stay for all work that the compute stream
     * of `device` was given before the unpin: other contents of that memory are ordered behind this work (backend.h).
     * On failure nothing stays pinned. Only chunks can be pinned on another device than s->device. */
    int (*pin)(ps_mem *mem, ps_storage *s, int device, unsigned access, void **out);
    void (*unpin)(ps_mem *mem, ps_storage *s, int device);
    void (*tick)(ps_mem *mem);                             /* (optional) an op begins */
    void (*failed)(ps_mem *mem);                           /* (optional) the op failed, and may be tried again */
    /* Memory for one kernel call. */
    int (*scratch)(ps_mem *mem, int device, int64_t nbytes, void **handle, void **out);
    void (*scratch_free)(ps_mem *mem, int device, void *handle);
    int (*info)(ps_mem *mem, int device, ps_memory_info *out);
    int (*set_limit)(ps_mem *mem, int device, int64_t nbytes);
    void (*reset_peak)(ps_mem *mem, int device);
    int64_t (*held)(ps_mem *mem, int device);              /* (optional) bytes taken from the system, in use or not */
    /* (optional) Bytes that would stay after a trim with holes. *peak, unless NULL: the most that these were since the
     * last call that asked for the peak. */
    int64_t (*busy)(ps_mem *mem, int device, int64_t *peak);
    void (*set_hold_limit)(ps_mem *mem, int device, int64_t nbytes);    /* (optional) bounds `held`; 0: no limit */
    /* (optional) Gives unused bytes back to the system: those behind the last used ones, and, with `holes`, those
     * between used ones, too, whose pages have to be touched anew later. */
    void (*trim)(ps_mem *mem, int device, bool holes);
    void (*close)(ps_mem *mem);
} ps_mem_table;

struct ps_mem { const ps_mem_table *table; };

/* pin and unpin of the storage's present manager; pin may hand the bytes to another one. */
static inline int ps_storage_pin(ps_storage *s, int device, unsigned access, void **out)
{
    return s->mem->table->pin(s->mem, s, device, access, out);
}
static inline void ps_storage_unpin(ps_storage *s, int device) { s->mem->table->unpin(s->mem, s, device); }

/* plain.c: every storage stays where it was made, in one arena per device. The reference path. */
int ps_mem_plain_new(int n_devices, ps_backend *const *devices, ps_mem **out);
int ps_mem_plain_add(ps_mem *mem, ps_backend *device);      /* one more device, behind the others */
bool ps_mem_is_plain(const ps_mem *mem);

/* arena.c: carves regions of a backend into blocks. */
typedef struct ps_arena ps_arena;
typedef struct ps_block ps_block;
int ps_arena_new(ps_backend *be, ps_arena **out);
void ps_arena_delete(ps_arena *arena);
int ps_arena_alloc(ps_arena *arena, int64_t nbytes, ps_block **out);
void ps_arena_free(ps_arena *arena, ps_block *block);
int64_t ps_arena_held(const ps_arena *arena);
int64_t ps_arena_busy(ps_arena *arena, int64_t *peak);      /* as ps_mem_table.busy */
void ps_arena_set_hold_limit(ps_arena *arena, int64_t nbytes);
/* Gives back regions of which nothing is in use, the unused ends of the others and, with `holes`, all whole pages that
 * are not in use. True: there were some. */
bool ps_arena_trim(ps_arena *arena, bool holes);
void *ps_block_address(const ps_block *block);
ps_memory_info *ps_arena_info(ps_arena *arena);
#endif
