/* SPDX-License-Identifier: BSD-3-Clause
 * This header declares the internals of the chunk manager. No other folder includes it. The manager has these files:
 *   chunk.c      chunks, the storages in them, pins
 *   transfer.c   memory of the tiers, copies, making room
 *   schedule.c   traces and plans
 *   resident.c   chunks that stay on tier 0
 *   source.c     chunks that are read from mapped files */
#ifndef PS_CHUNK_IMPL_H
#define PS_CHUNK_IMPL_H
#include <stdio.h>
#include "chunk/chunk.h"
#include "chunk/disk.h"
#include "chunk/source.h"

/* The position of a storage in a chunk. ps_storage.block points to this struct. */
typedef struct member {
    ps_storage *storage;
    char *name;                   /* NULL if it has no name */
    int64_t offset, nbytes;
    int32_t chunk;
    int8_t state;                 /* one of PS_TS_* */
} member;

/* A copy in progress. It moves a chunk between tier `level` and the tier below it. */
typedef struct transfer {
    struct transfer *next;        /* next copy, in the order in which copies started */
    int32_t chunk;
    /* heir: for a copy down, the chunk that will use the freed memory (see begin_fetch_after), or -1 */
    int32_t heir;
    int8_t level;
    /* true for a copy up of an heir. The copy ends after the copy down that frees the heir's memory. */
    bool up, behind;
    int64_t began_ns;             /* start of the copy's event in the record, or 0 */
    ps_copy *copy;                /* copy between device and host, or NULL */
    ps_disk_job *job;             /* job between memory and disk, or NULL */
    ps_source_job *read;          /* read from the chunk's source, or NULL */
} transfer;

typedef struct chunk {
    int32_t id, kind, group, index, dtype;
    int32_t pins, tier_pins[PS_TIERS];
    bool writing;                 /* a pin writes to the chunk, so no copy may begin */
    int64_t nbytes, used_nbytes;
    void *slot[PS_TIERS];         /* memory on each tier except the disk, or NULL */
    int64_t extent;               /* offset in the file of the disk tier, or -1 */
    /* source: [n_source] the parts of the chunk's contents on the disk tier, in order; NULL if the contents are in an
     * extent */
    source_part *source;
    int32_t n_source, source_capacity;
    /* valid: set of the tiers that have a valid copy, one bit per tier. 0 means that the chunk has no contents and
     * reads as zeros. */
    uint8_t valid;
    bool dead;                    /* its last storage was freed, so ps_chunk_new may reuse the record */
    bool ended;                   /* its contents were discarded, so its next slot is undefined */
    /* resident: the chunk stays on tier 0 and is never evicted (see resident.c) */
    bool resident;
    transfer *transfer;           /* its copy in progress, or NULL */
    member **members;             /* [n_members] members, sorted by offset */
    int32_t n_members, members_capacity, count[PS_TS_COUNT];
    int64_t last_use, arrived;    /* values of ps_chunks.clock, for lru and fifo without a plan */
    /* noted: moment of the last use
     * noted_at: index of the last use in the record */
    int32_t noted, noted_at;
    /* next_in_trace: index of the chunk's first use at or after `now` in the expected trace, or -1 */
    int32_t next_in_trace;
    int32_t first_in_trace;
    bool returning;               /* the chunk is in cs->back */
    int8_t held, held_tier;       /* number of pins by ps_chunk_pin, and the tier of these pins */
    bool there;                   /* scratch of room_to_stay(): whether the chunk is on tier 0 */
    int64_t seen;                 /* scratch of room_to_stay(): number of the call that set `there` */
} chunk;

typedef struct cached { void *p; int64_t nbytes; } cached;

typedef struct tier {
    const char *name;
    ps_backend *be;               /* NULL for the disk */
    int32_t device;
    int64_t budget;               /* 0 means no limit */
    int64_t used, cached_nbytes;  /* used: size of all slots. cached_nbytes: size of the memory that is kept for
                                   * reuse. */
    int64_t planned_other;        /* bytes that a plan leaves for tensors outside chunks */
    int64_t peak;
    int64_t bytes_up, bytes_down;
    /* granted: on the host, the number of bytes that may be allocated before the system is asked again */
    int64_t granted;
    /* recorded: the number of bytes of chunks and the number of bytes of other tensors in the last event of this
     * tier */
    int64_t recorded[2];
    cached *cache;
    int32_t n_cache, cache_capacity;
} tier;

struct ps_chunks {
    ps_mem base;
    ps_mem *plain;
    ps_chunk_config config;
    int32_t n_tiers;
    tier tiers[PS_TIERS];
    ps_disk *disk;                /* NULL without a disk tier */
    ps_source *source;            /* reader of the sources, or NULL if no chunk has had a source */
    chunk *chunks;
    int32_t n_chunks, capacity;
    int32_t first_dead;           /* no chunk with a smaller index is dead */
    transfer *transfers, **transfers_end, *spare;
    int64_t clock;                /* number of uses and of allocated slots so far */
    const ps_step *step;
    bool closing;
    /* Fields of the present step follow. */
    bool noting, fresh;           /* fresh: the running op has not used a chunk yet */
    int32_t now;                  /* the present moment, or -1 */
    /* record: the trace that is being recorded. During recording, record.spare contains the peak size in bytes of
     * other tensors at each moment. ps_chunks_trace_end subtracts these values from the peak of all moments. */
    ps_trace record;
    /* before_step: peak size in bytes of other tensors before the first moment of the step */
    int64_t before_step[PS_TIERS];
    /* before_pause: peak size in bytes of other tensors in the present moment before the pause; 0 if there was no
     * pause */
    int64_t before_pause[PS_TIERS];
    const ps_trace *expected;     /* trace that the present plan was made from, or NULL */
    ps_plan plan;
    int64_t *extra[PS_TIERS];     /* [n_moments of `expected`] like ps_plan_input.extra, or NULL */
    /* margin: if `extra` is not NULL, the number of bytes that stay free above the peak of other tensors */
    int64_t margin[PS_TIERS];
    int32_t cursor[PS_TIERS - 1]; /* number of moves that have begun on each level */
    /* reserve: number of bytes by which a paused script may exceed the budget; 0 if the script is not paused */
    int64_t reserve[PS_TIERS];
    int64_t peak_before[PS_TIERS];    /* value of tier.peak when the script paused */
    int32_t *back;                /* [capacity] chunks that should return to tier 0, oldest first */
    int32_t n_back;
    int32_t *held;                /* [capacity] chunks that are pinned by ps_chunk_pin */
    int32_t n_held;
    int64_t looks;                /* number of calls of room_to_stay() */
    int32_t *next_use;            /* [n_uses of `expected`] index of the same chunk's next use, or -1 */
    int32_t next_use_capacity;
    ps_engine_stats stats;
    uint32_t random;              /* state of the random generator of the stress mode */
    int32_t recorded;             /* value of ps_record_run when all positions were last written */
};

static inline chunk *chunk_at(ps_chunks *cs, int32_t id) { return &cs->chunks[id]; }
static inline bool is_disk(const ps_chunks *cs, int t) { return !cs->tiers[t].be; }
static inline bool has_copy(const chunk *c, int t) { return c->valid >> t & 1; }
/* Returns true if c is being evicted and an heir will use the memory of c. */
static inline bool hands_on(const chunk *c) { return c->transfer && c->transfer->heir >= 0; }

/* Formats a number of bytes for messages, such as "1.5 MiB". The text is valid until the end of the statement. */
typedef struct byte_text { char s[24]; } byte_text;
static inline byte_text bytes_text(int64_t n)
{
    byte_text text;
    bool large = n >= 1 << 20 || n <= -(1 << 20);
    snprintf(text.s, sizeof text.s, large ? "%.1f MiB" : "%.1f KiB", (double)n / (large ? 1048576.0 : 1024.0));
    return text;
}

/* -- chunk.c */
int ps_chunk_text(const ps_chunks *cs, const chunk *c, char *buf, size_t size);   /* "param[3] (h.0.w and 11 more)" */
int tier_of(const ps_chunks *cs, int device);                              /* returns -1 if the device is not a tier */

/* -- chunk/transfer.c */
int64_t tier_other(ps_chunks *cs, int t);             /* returns the size in bytes of all tensors outside chunks on
                                                       * tier t */
/* Returns the number of bytes that a trim cannot return to the system (see ps_mem_table.busy). */
int64_t tier_busy(ps_chunks *cs, int t, int64_t *peak);
/* Returns the peak size in bytes of tensors outside chunks in a step like `trace`, or the present size of these
 * tensors if it is larger. */
int64_t other_in_step(ps_chunks *cs, const ps_trace *trace, int t);
int64_t tier_room(ps_chunks *cs, int t);              /* returns the number of bytes that chunks may still allocate */
const char *last_key(const ps_chunks *cs);            /* returns the configuration key of the last tier's size */
/* Allocates memory with undefined contents for c on tier t. Returns 1 if there is no room now. Returns PS_ENOSPC if
 * the disk is full. */
int slot_take(ps_chunks *cs, chunk *c, int t);
void slot_drop(ps_chunks *cs, chunk *c, int t);       /* frees the memory of c on tier t, with its contents */
void cache_clear(ps_chunks *cs, int t, int64_t until_room);
/* Frees memory of this size that is kept for reuse. Does nothing if a chunk still has this size. */
void cache_forget(ps_chunks *cs, int64_t nbytes);
/* begin_fetch begins a copy of c up to tier t. begin_evict begins a copy of c down from tier t. They return 1 if the
 * copy cannot begin now. */
int begin_fetch(ps_chunks *cs, chunk *c, int t);
int begin_evict(ps_chunks *cs, chunk *c, int t);
/* Completes the copies that have ended. If `block` is set, first waits for the copy of chunk `only`, or for any copy
 * if `only` is NULL. */
int transfers_poll(ps_chunks *cs, bool block, const chunk *only);
/* Frees `nbytes` bytes on tier t by moving chunks other than `keep`. The chunks move down, or up if t is host memory
 * and the last tier. Fails without moving a chunk if the moves cannot free enough bytes. */
int make_room(ps_chunks *cs, int t, int64_t nbytes, const chunk *keep);
/* Brings the contents of c to tier t, with several copies if necessary. */
int bring(ps_chunks *cs, chunk *c, int t);
int bring_blank(ps_chunks *cs, chunk *c, int t);      /* allocates memory for c on tier t, with undefined
                                                       * contents */
int fail_no_room(ps_chunks *cs, int t, const chunk *c, int64_t nbytes);

/* Writes the tiers whose numbers of bytes have changed to the event record. The first call also writes the positions
 * of all chunks. */
void record_tiers(ps_chunks *cs);

/* -- chunk/source.c */
/* Adds borrowed bytes to the source of m's chunk, so that the caller does not have to copy them. These are the bytes
 * of s, borrowed directly or through the source of another chunk. Returns 1, or 0 if the bytes cannot be added. */
int source_adopt(ps_chunks *cs, ps_storage *s, const member *m);
void source_drop(chunk *c);           /* ends the chunk's source, if it has one */
/* Copies bytes of a mapped file. See copy_mapped in source.c. */
void source_copy(char *dst, const char *src, int64_t nbytes);

/* -- chunk/resident.c */
/* Chooses the chunks that must stay on tier 0 during each step like `trace`. Sets their entries of resident
 * [n_chunks] to 1, and sets *nbytes to their total size. Returns PS_ENOMEM with sub-code PS_SUB_HOMELESS if too few
 * chunks can stay on tier 0. */
int residents_choose(ps_chunks *cs, const ps_trace *trace, uint8_t *resident, int64_t *nbytes);
/* Brings the chunks that are marked in `resident` to tier 0, and drops their copies on lower tiers. */
int residents_make(ps_chunks *cs, const uint8_t *resident);

/* -- chunk/schedule.c */
void note_use(ps_chunks *cs, chunk *c, int t, bool write);
void note_end(ps_chunks *cs, const chunk *c);         /* records that nobody reads c after its last use */
int advance(ps_chunks *cs);                           /* begins moves of the plan, and waits for the moves that are
                                                       * due */
int64_t next_use_of(const ps_chunks *cs, const chunk *c);   /* number of moments until c's next use, or INT64_MAX */
void done_with(ps_chunks *cs, chunk *c, int t);       /* c's last pin on t has ended, so c may move now */
void step_off(ps_chunks *cs);
#endif
