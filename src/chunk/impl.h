/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of the chunk manager: chunk.c (chunks, storages, pins), transfer.c (memory of the tiers, copies,
 * making room), schedule.c (traces and plans), resident.c (chunks with no place below tier 0). No other folder includes
 * this header. */
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

/* A copy of one chunk that is under way between tier `level` and the next lower tier. */
typedef struct transfer {
    struct transfer *next;        /* next transfer, in order of start */
    int32_t chunk;
    int32_t heir;                 /* for a copy down: the chunk that is fetched into the memory which this copy
                                   * frees, or -1 (begin_fetch_behind) */
    int8_t level;
    bool up, behind;              /* behind: an heir's copy up, which ends after the copy down that frees its memory */
    int64_t began_ns;             /* start of its event in the record, or 0 */
    ps_copy *copy;                /* copy between device and host, or NULL */
    ps_disk_job *job;             /* copy between memory and disk, or NULL */
    ps_source_job *read;          /* copy from the chunk's source, or NULL */
} transfer;

typedef struct chunk {
    int32_t id, kind, group, index, dtype;
    int32_t pins, tier_pins[PS_TIERS];
    bool writing;                 /* a pin is writing to the chunk, so no copy of the chunk may begin */
    int64_t nbytes, used_nbytes;
    void *slot[PS_TIERS];         /* memory on each tier except the disk, or NULL */
    int64_t extent;               /* offset in the disk's file, or -1 */
    source_part *source;          /* [n_source] parts, in order, that provide its contents on the disk tier; NULL if
                                   * the contents are in an extent */
    int32_t n_source, source_capacity;
    uint8_t valid;                /* bit set of the tiers with a valid copy; 0: no contents, which reads as zeros */
    bool dead;                    /* the chunk's last storage was freed, so ps_chunk_new may reuse this record */
    bool ended;                   /* the contents were discarded, so the next slot has undefined contents */
    bool resident;                /* the chunk lives only on tier 0 (chunk/resident.c) and is not evicted to make
                                   * room */
    transfer *transfer;           /* or NULL */
    member **members;             /* [n_members] storages in the order of their offsets */
    int32_t n_members, members_capacity, count[PS_TS_COUNT];
    int64_t last_use, arrived;    /* times by ps_chunks.clock, by which lru and fifo order chunks when there is no
                                   * plan */
    int32_t noted, noted_at;      /* moment of the last use, and the index of this use in the record */
    int32_t next_in_trace;        /* index, in the expected trace, of its first use at or after `now`; -1 if none */
    int32_t first_in_trace;
    bool returning;               /* among cs->back */
    int8_t held, held_tier;       /* number of pins by ps_chunk_pin, and the pins' tier */
    bool there;                   /* scratch of room_to_stay: the chunk is on tier 0 */
    int64_t seen;                 /* the call of room_to_stay in which `there` was set */
} chunk;

typedef struct cached { void *p; int64_t nbytes; } cached;

typedef struct tier {
    const char *name;
    ps_backend *be;               /* NULL if the tier is the disk */
    int32_t device;
    int64_t budget;               /* 0 if there is no limit */
    int64_t used, cached_nbytes;  /* bytes of slots in use, and of memory kept for reuse */
    int64_t planned_other;        /* bytes left free for other tensors while there is a plan */
    int64_t peak;
    int64_t bytes_up, bytes_down;
    int64_t granted;              /* for host memory: bytes that may be allocated before the system is asked for its
                                   * free memory again */
    int64_t recorded[2];          /* bytes of chunks and of other tensors as last written to the event record */
    cached *cache;
    int32_t n_cache, cache_capacity;
} tier;

struct ps_chunks {
    ps_mem base;
    ps_mem *plain;
    ps_chunk_config config;
    int32_t n_tiers;
    tier tiers[PS_TIERS];
    ps_disk *disk;                /* the last tier's disk, or NULL */
    ps_source *source;            /* reads the sources of chunks; NULL if no chunk has had a source */
    chunk *chunks;
    int32_t n_chunks, capacity;
    int32_t first_dead;           /* no chunk with a smaller index is dead */
    transfer *transfers, **transfers_end, *spare;
    int64_t clock;                /* counts uses and allocated slots */
    const ps_step *step;
    bool closing;
    /* the step */
    bool noting, fresh;           /* fresh: the running op has not used a chunk yet */
    int32_t now;                  /* present moment, or -1 */
    ps_trace record;              /* trace that is being recorded; until it is complete, `spare` contains the bytes
                                   * of other tensors instead of their difference to the peak */
    int64_t before_step[PS_TIERS];    /* peak bytes of other tensors before the step's first moment ends */
    int64_t before_pause[PS_TIERS];   /* peak bytes of other tensors in the present moment before the script paused,
                                       * else 0 */
    const ps_trace *expected;     /* the trace of the present plan, or NULL */
    ps_plan plan;
    int64_t *extra[PS_TIERS];     /* [n_moments of `expected`] ps_plan_input.extra of the plan, or NULL */
    int64_t margin[PS_TIERS];     /* if `extra` is set: bytes that stay free above the peak of other tensors */
    int32_t cursor[PS_TIERS - 1]; /* number of moves that have begun on each level */
    int64_t reserve[PS_TIERS];    /* bytes by which a tier may exceed its budget while the script is paused, else 0 */
    int64_t peak_before[PS_TIERS];    /* value of tier.peak when the script paused */
    int32_t *back;                /* [capacity] chunks to move back up to tier 0, oldest first */
    int32_t n_back;
    int32_t *held;                /* [capacity] chunks pinned by ps_chunk_pin */
    int32_t n_held;
    int64_t looks;                /* number of calls of room_to_stay */
    int32_t *next_use;            /* [n_uses of `expected`] index of the same chunk's next use, or -1 */
    int32_t next_use_capacity;
    ps_engine_stats stats;
    uint32_t random;              /* state of the stress mode's random number generator */
    int32_t recorded;             /* event record (ps_record_run) that already contains the initial positions of all
                                   * chunks */
};

static inline chunk *chunk_at(ps_chunks *cs, int32_t id) { return &cs->chunks[id]; }
static inline bool is_disk(const ps_chunks *cs, int t) { return !cs->tiers[t].be; }
static inline bool has_copy(const chunk *c, int t) { return c->valid >> t & 1; }
/* Returns true if an heir will get c's memory on tier 0 as soon as c's copy down ends. */
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
int ps_chunk_text(const ps_chunks *cs, const chunk *c, char *buf, size_t size);   /* such as "param[3] (h.0.w and 11
                                                                                   * more)" */
int tier_of(const ps_chunks *cs, int device);                                     /* or -1 */

/* -- chunk/transfer.c */
int64_t tier_other(ps_chunks *cs, int t);             /* bytes of other tensors on the tier */
int64_t tier_busy(ps_chunks *cs, int t, int64_t *peak);   /* bytes that a trim cannot return (ps_mem_table.busy) */
int64_t other_in_step(ps_chunks *cs, const ps_trace *trace, int t);   /* peak of other tensors in a step like
                                                                       * `trace`, or their present bytes if larger */
int64_t tier_room(ps_chunks *cs, int t);              /* bytes that chunks may still allocate */
const char *last_key(const ps_chunks *cs);            /* configuration key of the last tier's size, such as
                                                       * "disk.limit" */
/* Allocates memory for c on tier t, with undefined contents. Returns 0 on success, 1 if there is no room now, or a
 * negative error. A full disk is an error, PS_ENOSPC. */
int slot_take(ps_chunks *cs, chunk *c, int t);
void slot_drop(ps_chunks *cs, chunk *c, int t);       /* frees c's memory and contents on tier t */
void cache_clear(ps_chunks *cs, int t, int64_t until_room);
/* Frees memory of this size that is kept for reuse, unless a chunk of this size still exists. */
void cache_forget(ps_chunks *cs, int64_t nbytes);
/* Begins a copy of c up to tier t (fetch) or from tier t down (evict). Returns 1 if there is no room or the copy
 * cannot begin now. */
int begin_fetch(ps_chunks *cs, chunk *c, int t);
int begin_evict(ps_chunks *cs, chunk *c, int t);
/* Completes the copies that have ended. If `block` is set, first waits until a copy has ended: the one of chunk
 * `only`, or any if `only` is NULL. */
int transfers_poll(ps_chunks *cs, bool block, const chunk *only);
/* Frees `nbytes` on tier t by moving other chunks down, or up if t is a last tier of host memory. Does not move
 * `keep`. If moving all movable chunks would not free enough, fails without moving any. */
int make_room(ps_chunks *cs, int t, int64_t nbytes, const chunk *keep);
/* Brings c's contents to tier t with as many copies as necessary. */
int bring(ps_chunks *cs, chunk *c, int t);
int bring_blank(ps_chunks *cs, chunk *c, int t);      /* allocates memory for c on tier t, with undefined contents */
int fail_no_room(ps_chunks *cs, int t, const chunk *c, int64_t nbytes);

/* Writes the bytes of tiers that changed to the event record. The first call also writes the positions of all
 * chunks. */
void record_tiers(ps_chunks *cs);

/* -- chunk/source.c */
/* Adds borrowed bytes to the source of the chunk that has the new member m. The bytes are those of storage s, or of
 * its position in another chunk with a source. Returns 1 if it added them, so that the caller need not copy the
 * bytes, and 0 if this is not possible. */
int source_adopt(ps_chunks *cs, ps_storage *s, const member *m);
void source_drop(chunk *c);           /* ends the chunk's source, if it has one */

/* -- chunk/resident.c */
/* Decides which chunks must stay on tier 0 for all of a step like `trace`: sets their entries of resident [n_chunks]
 * to 1, and *nbytes to their total bytes. PS_ENOMEM, PS_SUB_HOMELESS: tier 0 has too little room for them. */
int residents_choose(ps_chunks *cs, const ps_trace *trace, uint8_t *resident, int64_t *nbytes);
/* Makes the chunks marked in `resident` resident: brings them to tier 0 and drops their copies on lower tiers. */
int residents_make(ps_chunks *cs, const uint8_t *resident);

/* -- chunk/schedule.c */
void note_use(ps_chunks *cs, chunk *c, int t, bool write);
void note_end(ps_chunks *cs, const chunk *c);         /* records that nobody reads c's contents after its last
                                                       * recorded use */
int advance(ps_chunks *cs);                           /* begins the plan's moves, and waits until every move that is
                                                       * due has begun */
int64_t next_use_of(const ps_chunks *cs, const chunk *c);   /* number of moments until c's next use, INT64_MAX if
                                                             * unknown */
void done_with(ps_chunks *cs, chunk *c, int t);       /* called when c's last pin on t has ended, because c's next
                                                       * use can be on another tier */
void step_off(ps_chunks *cs);
#endif
