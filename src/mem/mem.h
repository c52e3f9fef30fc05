/* SPDX-License-Identifier: BSD-3-Clause
 * Storages: blocks of bytes on a device. Code may access the bytes of a storage only between a pin and an unpin. Pin
 * and unpin call the storage's keeper (ps_keeper). Therefore the same program works with plain memory and with
 * chunks. A manager that allocates memory also fills a second table (ps_mem). This layer does not know tensors or
 * ops. */
#ifndef PS_MEM_H
#define PS_MEM_H
#include <string.h>
#include "backend/backend.h"
#include "base/error.h"

typedef struct ps_mem ps_mem;
typedef struct ps_keeper ps_keeper;
typedef struct ps_scope ps_scope;

enum { PS_READ = 1, PS_WRITE = 2 };

/* Bytes on a device. The bytes exist while `block` is set. Dropped bytes cannot be restored. Each higher layer has a
 * nested struct for its own state, and only that layer writes to the struct (spec/source/layers_spec.lua). */
struct ps_storage {
    ps_keeper *keeper;
    void *block;                /* the keeper's record of the bytes; NULL if there are no bytes (they were dropped, or
                                 * nbytes is 0) */
    int64_t nbytes;
    int32_t device, pins;
    int32_t refs;               /* number of tensor headers */
    int32_t holds;              /* number of owners that keep dropped bytes alive, such as the tape or gradients in
                                 * transit */
    uint32_t version;           /* number of writes so far; the tape compares this number to detect changes */
    struct {
        bool dropped : 1;       /* the scope has ended; the last unhold frees the bytes */
        bool kept : 1;          /* scopes never drop the bytes */
        bool written : 1;       /* on a simulated device: a script wrote the bytes, so they have contents */
    } bytes;
    struct {
        bool taken;             /* the bytes contain a parameter's gradient; only headers with PS_T_SLOT may be used */
        bool watched;           /* the storage belongs to a parameter; recompute segments record that they read it */
    } engine;
    struct {
        bool fetched;           /* an op needed the bytes before backward. The bytes were fetched from the host and
                                 * will not be offloaded again. */
    } offload;
    struct {
        int64_t walk;           /* walk to which `waits` belongs */
        int32_t waits;          /* for a parameter: number of nodes that read it and that the walk has not visited
                                 * yet */
        uint32_t later : 31;    /* number of headers with PS_T_LATER. Deferred weight gradients will read the bytes,
                                 * so no op may overwrite them. */
        uint32_t trained : 1;   /* a tensor on these bytes has required gradients; a paused script must not write to
                                 * the bytes */
    } tape;
    struct {
        struct ps_replay *of;   /* dry run of a pipeline that made the storage (tensor/replay.h), or NULL */
        int64_t number;         /* index among the storages of the dry run `of` */
        int32_t noted;          /* position in the dry run `of`, or -1 */
        bool scripted;          /* a script may have had a tensor of this storage */
    } replay;
    struct {
        ps_scope *of;           /* scope that will drop the storage, or NULL */
        ps_storage *prev, *next;
        int64_t *count;         /* the context's counter that includes this storage, or NULL (tensor/scope.c) */
    } scope;
};

/* Must be called when a parameter moves from the storage `old` to the storage `s`. */
static inline void ps_storage_follow(ps_storage *s, const ps_storage *old) { s->engine.watched = old->engine.watched; }

/* The lenders of a storage's bytes. If n is 1, loan[0] has all bytes, and width[0] is the size of the storage. If n
 * is 2, the storage consists of blocks. Each block has width[0] bytes of loan[0], followed by width[1] bytes of
 * loan[1]. */
typedef struct ps_loans {
    ps_loan loan[2];
    int64_t width[2];
    int n;
} ps_loans;

static inline int ps_loans_check(const ps_loans *loans)
{
    for (int i = 0; i < loans->n; i++) PS_TRY(loans->loan[i].check(loans->loan[i].lender));
    return 0;
}
static inline void ps_loans_end(const ps_loans *loans)
{
    for (int i = 0; i < loans->n; i++) loans->loan[i].end(loans->loan[i].lender);
}
/* Copies nbytes bytes of loan i, starting at its byte `at`, to their places in the storage. dst is the begin of the
 * storage's bytes. src contains the bytes to copy. */
static inline void ps_loans_copy(char *dst, const ps_loans *loans, int i, int64_t at, const char *src, int64_t nbytes)
{
    int64_t own = loans->width[i], block = loans->n == 2 ? loans->width[0] + loans->width[1] : own;
    int64_t from = at % own;
    dst += at / own * block + (i == 1 ? loans->width[0] : 0);
    for (int64_t done = 0, n; done < nbytes; done += n, from = 0, dst += block) {
        n = own - from < nbytes - done ? own - from : nbytes - done;
        memcpy(dst + from, src + done, (size_t)n);
    }
}

/* The keeper of a storage is the object that owns the storage's bytes at the moment. The keeper is plain memory, a
 * chunk, a shard, a lender, or the host while activations are offloaded. */
typedef struct ps_keeper_table {
    const char *name;
    void (*free)(ps_keeper *keeper, ps_storage *s);        /* frees bytes that are not pinned, and clears s->block */
    /* Pins the bytes until the unpin, and stores their address on `device` in *out. After the unpin, the memory is
     * not reused until all work has run that was queued on the device's compute stream before the unpin (backend.h).
     * After a failure nothing is pinned. Only storages in chunks can be pinned on a device other than s->device. */
    int (*pin)(ps_keeper *keeper, ps_storage *s, int device, unsigned access, void **out);
    void (*unpin)(ps_keeper *keeper, ps_storage *s, int device);
    void (*note_line)(ps_storage *s, int32_t line);        /* (optional) implements ps_tensor_note_line */
    bool (*take_loans)(ps_storage *s, ps_loans *out);      /* (optional) implements ps_storage_take_loans */
} ps_keeper_table;

struct ps_keeper { const ps_keeper_table *table; };

/* A memory manager allocates the bytes of storages, and is also the keeper of these storages. */
typedef struct ps_mem_table {
    /* Allocates s->nbytes > 0 on s->device, and sets s->block and s->keeper. */
    int (*alloc)(ps_mem *mem, ps_storage *s);
    /* Allocates workspace for one kernel call. */
    int (*scratch)(ps_mem *mem, int device, int64_t nbytes, void **handle, void **out);
    void (*scratch_free)(ps_mem *mem, int device, void *handle);
    int (*info)(ps_mem *mem, int device, ps_memory_info *out);
    int (*set_limit)(ps_mem *mem, int device, int64_t nbytes);
    void (*reset_peak)(ps_mem *mem, int device);
    int64_t (*held)(ps_mem *mem, int device);              /* (optional) returns the number of bytes that were
                                                            * allocated from the system, whether they are used or not */
    /* (optional) Returns the number of bytes that a trim with `holes` would keep. If `peak` is not NULL, *peak is set
     * to the maximum of this number since the last call in which `peak` was not NULL. */
    int64_t (*busy)(ps_mem *mem, int device, int64_t *peak);
    void (*set_hold_limit)(ps_mem *mem, int device, int64_t nbytes);    /* (optional) limits `held`; 0 means no limit */
    /* (optional) Returns unused memory to the system. The bytes after the last used byte of each region are returned.
     * If `holes` is true, the unused bytes between used bytes are returned too. The system maps returned pages again
     * when they are touched. */
    void (*trim)(ps_mem *mem, int device, bool holes);
    /* (only for plain memory) Implements ps_memory_holders. */
    int (*holders)(ps_mem *mem, int device, int when, ps_holder *out, int64_t *used);
    /* (only for plain memory) Called after another manager has found no memory. Both managers share the device's
     * budget. */
    void (*refused)(ps_mem *mem, int device);
    void (*close)(ps_mem *mem);
} ps_mem_table;

struct ps_mem {
    ps_keeper keeper;             /* must be the first field */
    const ps_mem_table *table;
};

/* Pins a storage through its current keeper. The pin can move the storage to another keeper. */
static inline int ps_storage_pin(ps_storage *s, int device, unsigned access, void **out)
{
    return s->keeper->table->pin(s->keeper, s, device, access, out);
}
static inline void ps_storage_unpin(ps_storage *s, int device) { s->keeper->table->unpin(s->keeper, s, device); }
/* Moves the loans out of a storage. The storage then has no bytes. Returns false if the storage has no loans, or if
 * the bytes are pinned or were written to. */
static inline bool ps_storage_take_loans(ps_storage *s, ps_loans *out)
{
    return s->block && s->keeper->table->take_loans && s->keeper->table->take_loans(s, out);
}
/* Returns whether the bytes of a storage belong to lenders. */
static inline bool ps_storage_is_lent(const ps_storage *s) { return s->block && s->keeper->table->take_loans; }
static inline void ps_storage_free(ps_storage *s)
{
    if (s->block) s->keeper->table->free(s->keeper, s);
}
/* Returns whether `mem` is the keeper of the storage. `mem` may be NULL. */
static inline bool ps_storage_is_of(const ps_storage *s, const ps_mem *mem) { return mem && s->keeper == &mem->keeper; }

/* plain.c is the reference implementation. A storage stays in the place where it was allocated. There is one arena
 * per device. */
int ps_mem_plain_new(int n_devices, ps_backend *const *devices, ps_mem **out);
int ps_mem_plain_add(ps_mem *mem, ps_backend *device);      /* adds a device, after the existing devices */
void ps_mem_plain_undo(ps_mem *mem);                        /* removes the last device, which must be unused */
bool ps_storage_is_plain(const ps_storage *s);

/* lent.c implements storages whose bytes belong to lenders. ps_storage_lend frees the previous bytes of the storage.
 * The storage owns the loans until its bytes are freed. If the storage consists of blocks (n = 2), the first pin
 * copies its bytes to memory of the previous keeper and ends the loans. The previous keeper must then be a memory
 * manager. */
int ps_storage_lend(ps_storage *s, const ps_loans *loans);

/* arena.c divides the regions of a backend into blocks. */
typedef struct ps_arena ps_arena;
typedef struct ps_block ps_block;
int ps_arena_new(ps_backend *be, ps_arena **out);
void ps_arena_delete(ps_arena *arena);
int ps_arena_alloc(ps_arena *arena, int64_t nbytes, ps_block **out);
void ps_arena_free(ps_arena *arena, ps_block *block);
void ps_arena_reset_peak(ps_arena *arena);
int64_t ps_arena_held(const ps_arena *arena);
int64_t ps_arena_busy(ps_arena *arena, int64_t *peak);      /* like ps_mem_table.busy */
void ps_arena_set_hold_limit(ps_arena *arena, int64_t nbytes);
/* Returns unused memory to the system: unused regions, and the unused ends of other regions. If `holes` is true, all
 * unused whole pages are returned. The result is true if any memory was returned. */
bool ps_arena_trim(ps_arena *arena, bool holes);
void *ps_block_address(const ps_block *block);
void ps_block_note(ps_block *block, int32_t line, bool scratch);
int ps_arena_holders(ps_arena *arena, int when, ps_holder *out, int64_t *used);
void ps_arena_refused(ps_arena *arena);
ps_memory_info *ps_arena_info(ps_arena *arena);
#endif
