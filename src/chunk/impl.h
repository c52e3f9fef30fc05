/* SPDX-License-Identifier: BSD-3-Clause
 * Internals of the chunk manager, which no other folder includes. Its files:
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

/* A storage's position in a chunk. ps_storage.block points to it. */
typedef struct member {
    ps_storage *storage;
    char *name;                   /* or NULL */
    int64_t offset, nbytes;
    int32_t chunk;
    int8_t state;                 /* PS_TS_* */
} member;

/* A copy of a chunk under way, between tier `level` and the tier below it. */
typedef struct transfer {
    struct transfer *next;        /* in order of start */
    int32_t chunk;
    int32_t heir;                 /* copy down: chunk that gets the freed memory (begin_fetch_behind), or -1 */
    int8_t level;
    bool up, behind;              /* behind: copy up of an heir, which ends after the copy down */
    int64_t began_ns;             /* start of its event in the record, or 0 */
    ps_copy *copy;                /* between device and host, or NULL */
    ps_disk_job *job;             /* between memory and disk, or NULL */
    ps_source_job *read;          /* from the chunk's source, or NULL */
} transfer;

typedef struct chunk {
    int32_t id, kind, group, index, dtype;
    int32_t pins, tier_pins[PS_TIERS];
    bool writing;                 /* a pin writes to the chunk, so no copy may begin */
    int64_t nbytes, used_nbytes;
    void *slot[PS_TIERS];         /* memory on each tier except the disk, or NULL */
    int64_t extent;               /* offset in the disk's file, or -1 */
    source_part *source;          /* [n_source] its contents on the disk tier, in order; NULL if in an extent */
    int32_t n_source, source_capacity;
    uint8_t valid;                /* bit set of tiers with a valid copy; 0: no contents, reads as zeros */
    bool dead;                    /* its last storage was freed; ps_chunk_new may reuse the record */
    bool ended;                   /* its contents were discarded; the next slot is undefined */
    bool resident;                /* lives only on tier 0, and is not evicted (resident.c) */
    transfer *transfer;           /* or NULL */
    member **members;             /* [n_members] sorted by offset */
    int32_t n_members, members_capacity, count[PS_TS_COUNT];
    int64_t last_use, arrived;    /* times by ps_chunks.clock, for lru and fifo without a plan */
    int32_t noted, noted_at;      /* moment of the last use, and its index in the record */
    int32_t next_in_trace;        /* index of its next use from `now` on in the expected trace, or -1 */
    int32_t first_in_trace;
    bool returning;               /* in cs->back */
    int8_t held, held_tier;       /* number of pins by ps_chunk_pin, and their tier */
    bool there;                   /* scratch of room_to_stay: whether it is on tier 0 */
    int64_t seen;                 /* scratch: the call that set `there` */
} chunk;

typedef struct cached { void *p; int64_t nbytes; } cached;

typedef struct tier {
    const char *name;
    ps_backend *be;               /* NULL for the disk */
    int32_t device;
    int64_t budget;               /* 0: no limit */
    int64_t used, cached_nbytes;  /* bytes of slots; bytes kept for reuse */
    int64_t planned_other;        /* bytes that a plan leaves for tensors outside chunks */
    int64_t peak;
    int64_t bytes_up, bytes_down;
    int64_t granted;              /* host: bytes to allocate before the system is asked again */
    int64_t recorded[2];          /* bytes of chunks, of other tensors, last written to the event record */
    cached *cache;
    int32_t n_cache, cache_capacity;
} tier;

struct ps_chunks {
    ps_mem base;
    ps_mem *plain;
    ps_chunk_config config;
    int32_t n_tiers;
    tier tiers[PS_TIERS];
    ps_disk *disk;                /* or NULL */
    ps_source *source;            /* reads sources; NULL if no chunk has had one */
    chunk *chunks;
    int32_t n_chunks, capacity;
    int32_t first_dead;           /* no chunk with a smaller index is dead */
    transfer *transfers, **transfers_end, *spare;
    int64_t clock;                /* counts uses and allocated slots */
    const ps_step *step;
    bool closing;
    /* the step */
    bool noting, fresh;           /* fresh: the running op has not used a chunk yet */
    int32_t now;                  /* moment, or -1 */
    ps_trace record;              /* trace being recorded; at its end `spare` is subtracted from the peak */
    int64_t before_step[PS_TIERS];    /* peak bytes of other tensors before the step's first moment */
    int64_t before_pause[PS_TIERS];   /* peak of the present moment before the pause, else 0 */
    const ps_trace *expected;     /* trace of the present plan, or NULL */
    ps_plan plan;
    int64_t *extra[PS_TIERS];     /* [n_moments of `expected`] as ps_plan_input.extra, or NULL */
    int64_t margin[PS_TIERS];     /* with `extra`: bytes that stay free above the peak of other tensors */
    int32_t cursor[PS_TIERS - 1]; /* number of moves begun on each level */
    int64_t reserve[PS_TIERS];    /* bytes by which a paused script may exceed the budget, else 0 */
    int64_t peak_before[PS_TIERS];    /* tier.peak when the script paused */
    int32_t *back;                /* [capacity] chunks that should return to tier 0, oldest first */
    int32_t n_back;
    int32_t *held;                /* [capacity] chunks pinned by ps_chunk_pin */
    int32_t n_held;
    int64_t looks;                /* calls of room_to_stay */
    int32_t *next_use;            /* [n_uses of `expected`] the same chunk's next use, or -1 */
    int32_t next_use_capacity;
    ps_engine_stats stats;
    uint32_t random;              /* state of the stress mode's generator */
    int32_t recorded;             /* ps_record_run when all positions were last written */
};

static inline chunk *chunk_at(ps_chunks *cs, int32_t id) { return &cs->chunks[id]; }
static inline bool is_disk(const ps_chunks *cs, int t) { return !cs->tiers[t].be; }
static inline bool has_copy(const chunk *c, int t) { return c->valid >> t & 1; }
/* Returns true if c is being evicted and an heir will get its memory. */
static inline bool hands_on(const chunk *c) { return c->transfer && c->transfer->heir >= 0; }

/* Formats bytes for messages, such as "1.5 MiB". The text is valid until the end of the statement. */
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
int tier_of(const ps_chunks *cs, int device);                                     /* or -1 */

/* -- chunk/transfer.c */
int64_t tier_other(ps_chunks *cs, int t);             /* bytes of tensors outside chunks */
int64_t tier_busy(ps_chunks *cs, int t, int64_t *peak);   /* bytes that a trim cannot return (ps_mem_table.busy) */
int64_t other_in_step(ps_chunks *cs, const ps_trace *trace, int t);   /* their peak in such a step, or now if higher */
int64_t tier_room(ps_chunks *cs, int t);              /* bytes that chunks may still allocate */
const char *last_key(const ps_chunks *cs);            /* configuration key of the last tier's size */
/* Allocates memory for c on tier t, with undefined contents. Returns 1 if there is no room now. A full disk is an
 * error, PS_ENOSPC. */
int slot_take(ps_chunks *cs, chunk *c, int t);
void slot_drop(ps_chunks *cs, chunk *c, int t);       /* frees c's memory and contents on tier t */
void cache_clear(ps_chunks *cs, int t, int64_t until_room);
/* Frees memory of this size that is kept for reuse, if no chunk has this size any more. */
void cache_forget(ps_chunks *cs, int64_t nbytes);
/* Begins a copy of c up to tier t (fetch), or down from tier t (evict). Returns 1 if that is not possible now. */
int begin_fetch(ps_chunks *cs, chunk *c, int t);
int begin_evict(ps_chunks *cs, chunk *c, int t);
/* Completes the copies that have ended. If `block` is set, first waits for the copy of chunk `only`, or for any copy
 * if `only` is NULL. */
int transfers_poll(ps_chunks *cs, bool block, const chunk *only);
/* Frees `nbytes` on tier t by moving chunks other than `keep`. They move down, or up if t is host memory and the
 * last tier. If this cannot free enough, fails without moving any. */
int make_room(ps_chunks *cs, int t, int64_t nbytes, const chunk *keep);
/* Brings c's contents to tier t, in several copies if necessary. */
int bring(ps_chunks *cs, chunk *c, int t);
int bring_blank(ps_chunks *cs, chunk *c, int t);      /* gives c undefined memory on tier t */
int fail_no_room(ps_chunks *cs, int t, const chunk *c, int64_t nbytes);

/* Writes the tiers whose bytes have changed to the event record. The first call also writes where all chunks are. */
void record_tiers(ps_chunks *cs);

/* -- chunk/source.c */
/* Adds borrowed bytes to the source of m's chunk, so that the caller need not copy them. They are the bytes of s, or
 * of its position in another chunk with a source. Returns 1, or 0 if this is not possible. */
int source_adopt(ps_chunks *cs, ps_storage *s, const member *m);
void source_drop(chunk *c);           /* ends the chunk's source, if any */
void source_copy(char *dst, const char *src, int64_t nbytes);   /* copies bytes of a mapped file, see source.c */

/* -- chunk/resident.c */
/* Chooses the chunks that must stay on tier 0 for a whole step like `trace`. Sets their entries of resident
 * [n_chunks] to 1, and *nbytes to their total. PS_ENOMEM, PS_SUB_HOMELESS: too few chunks can stay there. */
int residents_choose(ps_chunks *cs, const ps_trace *trace, uint8_t *resident, int64_t *nbytes);
/* Brings the chunks marked in `resident` to tier 0, and drops their copies below. */
int residents_make(ps_chunks *cs, const uint8_t *resident);

/* -- chunk/schedule.c */
void note_use(ps_chunks *cs, chunk *c, int t, bool write);
void note_end(ps_chunks *cs, const chunk *c);         /* records that nobody reads c after its last use */
int advance(ps_chunks *cs);                           /* begins the plan's moves, waiting for those that are due */
int64_t next_use_of(const ps_chunks *cs, const chunk *c);   /* moments until c's next use, or INT64_MAX */
void done_with(ps_chunks *cs, chunk *c, int t);       /* c's last pin on t has ended; may move c now */
void step_off(ps_chunks *cs);
#endif
