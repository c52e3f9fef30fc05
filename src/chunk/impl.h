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

/* A storage's place in a chunk. ps_storage.block points to it. */
typedef struct member {
    ps_storage *storage;
    char *name;                   /* or NULL */
    int64_t offset, nbytes;
    int32_t chunk;
    int8_t state;                 /* PS_TS_* */
} member;

/* A copy of one chunk that is under way, between tier `level` and the tier below. */
typedef struct transfer {
    struct transfer *next;        /* list in order of start */
    int32_t chunk;
    int32_t heir;                 /* of a copy down: the chunk that is fetched into the memory that this copy frees, or
                                   * -1 (see begin_fetch_behind) */
    int8_t level;
    bool up, behind;              /* behind: a copy up of an heir. It ends after the copy down before it */
    int64_t began_ns;             /* begin of its event in the record, or 0 */
    ps_copy *copy;                /* handle of a copy between device and host, or NULL */
    ps_disk_job *job;             /* handle of a copy between memory and disk, or NULL */
    ps_source_job *read;          /* handle of a copy from the chunk's source, or NULL */
} transfer;

typedef struct chunk {
    int32_t id, kind, group, index, dtype;
    int32_t pins, tier_pins[PS_TIERS];
    bool writing;                 /* a pin writes to the chunk, so no copy of the chunk may begin now */
    int64_t nbytes, used_nbytes;
    void *slot[PS_TIERS];         /* memory on each tier except the disk, or NULL */
    int64_t extent;               /* its place in the disk's file, or -1 */
    source_part *source;          /* [n_source] in order: its contents on the disk tier, instead of an extent; or
                                   * NULL */
    int32_t n_source, source_capacity;
    uint8_t valid;                /* tiers with a valid copy, as a bit set. 0: no contents, which reads as zeros */
    bool dead;                    /* the chunk's last storage was freed: ps_chunk_new may reuse this record */
    bool ended;                   /* its contents were discarded: its next slot has undefined contents */
    bool resident;                /* lives only on tier 0 (chunk/resident.c); it is not evicted to make room */
    transfer *transfer;           /* or NULL */
    member **members;             /* [n_members] in the order of their offsets */
    int32_t n_members, members_capacity, count[PS_TS_COUNT];
    int64_t last_use, arrived;    /* times by ps_chunks.clock, by which lru and fifo order chunks if there is no plan */
    int32_t noted, noted_at;      /* moment of its last use, and the place of this use in the record */
    int32_t next_in_trace;        /* place in the expected trace of its next use at or after `now`, or -1 */
    int32_t first_in_trace;
    bool returning;               /* among cs->back */
    int8_t held, held_tier;       /* number of pins by ps_chunk_pin, and their tier */
    bool there;                   /* for room_to_stay alone: the chunk is on tier 0 */
    int64_t seen;                 /* the call of room_to_stay for which `there` is valid */
} chunk;

typedef struct cached { void *p; int64_t nbytes; } cached;

typedef struct tier {
    const char *name;
    ps_backend *be;               /* NULL: the tier is the disk */
    int32_t device;
    int64_t budget;               /* 0: there is no limit */
    int64_t used, cached_nbytes;  /* bytes of slots in use, and of memory kept for reuse */
    int64_t planned_other;        /* bytes that are left free for other tensors while a plan is on */
    int64_t peak;
    int64_t bytes_up, bytes_down;
    int64_t granted;              /* host memory: bytes that may be allocated before the system is asked again for its
                                   * free memory */
    int64_t recorded[2];          /* bytes of chunks and of other tensors in the last event of the record */
    cached *cache;
    int32_t n_cache, cache_capacity;
} tier;

struct ps_chunks {
    ps_mem base;
    ps_mem *plain;
    ps_chunk_config config;
    int32_t n_tiers;
    tier tiers[PS_TIERS];
    ps_disk *disk;                /* disk of the last tier, or NULL */
    ps_source *source;            /* reads the sources of chunks; NULL: no chunk has had one */
    chunk *chunks;
    int32_t n_chunks, capacity;
    int32_t first_dead;           /* no chunk with a smaller index is dead */
    transfer *transfers, **transfers_end, *spare;
    int64_t clock;                /* number of uses and of allocated slots */
    const ps_step *step;
    bool closing;
    /* the step */
    bool noting, fresh;           /* fresh: the running op has not touched a chunk yet */
    int32_t now;                  /* the present moment, or -1 */
    ps_trace record;              /* while uses are recorded, `spare` holds the bytes of other tensors, not the
                                   * difference to their peak */
    int64_t before_step[PS_TIERS];    /* the largest number of bytes of other tensors up to the first moment */
    int64_t before_pause[PS_TIERS];   /* the same in the present moment, up to a pause of the script; else 0 */
    const ps_trace *expected;     /* set while a plan is on */
    ps_plan plan;
    int64_t *extra[PS_TIERS];     /* [n_moments of `expected`] the plan's ps_plan_input.extra, or NULL */
    int64_t margin[PS_TIERS];     /* if `extra` is set: bytes that are left to other tensors in addition to their
                                   * peak */
    int32_t cursor[PS_TIERS - 1]; /* number of moves that have begun, by level */
    int64_t reserve[PS_TIERS];    /* bytes by which budgets are larger while the script is paused; else 0 */
    int64_t peak_before[PS_TIERS];    /* tier.peak when the script paused */
    int32_t *back;                /* [capacity] chunks that wait to be moved back up to tier 0, oldest first */
    int32_t n_back;
    int32_t *held;                /* [capacity] chunks that ps_chunk_pin has pinned */
    int32_t n_held;
    int64_t looks;                /* number of calls of room_to_stay */
    int32_t *next_use;            /* [n_uses] of `expected`: place of the chunk's next use, or -1 */
    int32_t next_use_capacity;
    ps_engine_stats stats;
    uint32_t random;              /* state of the stress mode's generator */
    int32_t recorded;             /* the record (ps_record_run) in which the places of all chunks were written at its
                                   * start */
};

static inline chunk *chunk_at(ps_chunks *cs, int32_t id) { return &cs->chunks[id]; }
static inline bool is_disk(const ps_chunks *cs, int t) { return !cs->tiers[t].be; }
static inline bool has_copy(const chunk *c, int t) { return c->valid >> t & 1; }
/* True if an heir gets c's memory on tier 0 as soon as c's copy down has ended. */
static inline bool hands_on(const chunk *c) { return c->transfer && c->transfer->heir >= 0; }

/* Text for messages, such as "1.5 MiB" or "96.0 KiB". It is valid until the end of the statement. */
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
int64_t tier_other(ps_chunks *cs, int t);             /* bytes of other tensors */
int64_t tier_busy(ps_chunks *cs, int t, int64_t *peak);   /* bytes that a trim would keep (ps_mem_table.busy) */
int64_t other_in_step(ps_chunks *cs, const ps_trace *trace, int t);   /* the peak of other tensors in such a step, or
                                                                       * their present bytes if these are more */
int64_t tier_room(ps_chunks *cs, int t);              /* bytes that chunks may still allocate */
const char *last_key(const ps_chunks *cs);            /* the configuration key of the last tier's size: "disk.limit" */
/* Allocates memory for c on tier t, with undefined contents. 0: done; 1: no room now; negative: an error. A full disk
 * is an error, PS_ENOSPC. */
int slot_take(ps_chunks *cs, chunk *c, int t);
void slot_drop(ps_chunks *cs, chunk *c, int t);       /* frees c's memory there; the copy in it is no longer valid */
void cache_clear(ps_chunks *cs, int t, int64_t until_room);
/* Frees memory of this size that is kept for reuse. Does nothing if a chunk of this size exists, which would reuse
 * it. */
void cache_forget(ps_chunks *cs, int64_t nbytes);
/* Begins a copy of c up to tier t, or from tier t down. 1: no room, or not ready now. */
int begin_fetch(ps_chunks *cs, chunk *c, int t);
int begin_evict(ps_chunks *cs, chunk *c, int t);
/* Completes the copies that have ended. block: waits until a copy has ended or, if `only` is set, until a copy of that
 * chunk has ended. */
int transfers_poll(ps_chunks *cs, bool block, const chunk *only);
/* Frees `nbytes` on tier t by moving other chunks down (or up, if t is a last tier of host memory). `keep` does not
 * move. If too few chunks may move, fails before any chunk moves. */
int make_room(ps_chunks *cs, int t, int64_t nbytes, const chunk *keep);
/* Brings c's contents to tier t, by as many copies as are necessary. */
int bring(ps_chunks *cs, chunk *c, int t);
int bring_blank(ps_chunks *cs, chunk *c, int t);      /* allocates memory for c on tier t, with undefined contents */
int fail_no_room(ps_chunks *cs, int t, const chunk *c, int64_t nbytes);

/* Writes the bytes of tiers that changed to the record of events. The first call also writes the places of all
 * chunks. */
void record_tiers(ps_chunks *cs);

/* -- chunk/source.c */
/* Makes the borrowed bytes of a storage, or those of its place in a chunk with a source, a part of the source of the
 * new member's chunk. 1: done, and nothing is copied. 0: not possible. */
int source_adopt(ps_chunks *cs, ps_storage *s, const member *m);
void source_drop(chunk *c);           /* ends the chunk's source, if it has one */

/* -- chunk/resident.c */
/* Sets resident [n_chunks] to 1 for chunks that must live only on tier 0 in a step like `trace`, and *nbytes to their
 * bytes. PS_ENOMEM, PS_SUB_HOMELESS: too few chunks can live there. */
int residents_choose(ps_chunks *cs, const ps_trace *trace, uint8_t *resident, int64_t *nbytes);
/* Makes these chunks residents: brings them to tier 0 and drops their copies on lower tiers. */
int residents_make(ps_chunks *cs, const uint8_t *resident);

/* -- chunk/schedule.c */
void note_use(ps_chunks *cs, chunk *c, int t, bool write);
void note_end(ps_chunks *cs, const chunk *c);         /* c's contents end with the last use that was recorded */
int advance(ps_chunks *cs);                           /* begins the plan's moves; waits until the moves that are due
                                                       * have begun */
int64_t next_use_of(const ps_chunks *cs, const chunk *c);   /* number of moments from now to c's next use; INT64_MAX:
                                                             * unknown */
void done_with(ps_chunks *cs, chunk *c, int t);       /* c's last pin on t ended: its next use may be on another tier */
void step_off(ps_chunks *cs);
#endif
