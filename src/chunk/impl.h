/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of the chunk manager: chunk.c (chunks, storages, pins), transfer.c (memory of the tiers, copies,
 * making room), schedule.c (traces and plans), resident.c (chunks with no place below tier 0). No other folder includes
 * it. */
#ifndef PS_CHUNK_IMPL_H
#define PS_CHUNK_IMPL_H
#include <stdio.h>
#include "chunk/chunk.h"
#include "chunk/disk.h"

/* A storage's place: what ps_storage.block points at. */
typedef struct member {
    ps_storage *storage;
    struct member *next;          /* in the chunk, by offset */
    char *name;                   /* or NULL */
    int64_t offset, nbytes;
    int32_t chunk;
    int8_t state;                 /* PS_TS_* */
} member;

/* A copy of one chunk under way between tier `level` and the one below. */
typedef struct transfer {
    struct transfer *next;        /* in order of start */
    int32_t chunk;
    int32_t heir;                 /* going down: the chunk that comes into its memory behind it, or -1 */
    int8_t level;
    bool up, behind;              /* behind: into memory that a copy down still has; it ends after that copy */
    ps_copy *copy;                /* device and host, */
    ps_disk_job *job;             /* or memory and disk */
} transfer;

typedef struct chunk {
    int32_t id, kind, group, index, dtype;
    int32_t pins, tier_pins[PS_TIERS];
    bool writing;                 /* one of the pins writes: no copy of it may be taken now */
    int64_t nbytes, used_nbytes;
    void *slot[PS_TIERS];         /* memory on each tier but the disk, or NULL */
    int64_t extent;               /* its place in the disk's file, or -1 */
    uint8_t valid;                /* tiers whose copy is right, as a bit set; 0: no contents (zeros) */
    bool dead;                    /* its last storage has gone: the record waits to be used again */
    bool resident;                /* lives on tier 0 alone (chunk/resident.c): it does not leave to make room */
    transfer *transfer;           /* or NULL */
    member *members;
    int32_t n_members, count[PS_TS_COUNT];
    int64_t last_use, arrived;    /* by the manager's clocks: for lru and fifo, and for showing */
    int32_t noted, noted_at;      /* moment and place of its last use in the record */
    int32_t next_in_trace;        /* place in the expected trace of its next use at or after `now`, or -1 */
    int32_t first_in_trace;
    bool returning;               /* among cs->back */
    int8_t held, held_tier;       /* pins of ps_chunk_pin, and where */
    bool there;                   /* scratch of room_to_stay, good where `seen` is its call's number */
    int64_t seen;
} chunk;

typedef struct cached { void *p; int64_t nbytes; } cached;

typedef struct tier {
    const char *name;
    ps_backend *be;               /* NULL: the disk */
    int32_t device;
    int64_t budget;               /* 0: no limit */
    int64_t used, cached_nbytes;  /* slots given out, and kept for reuse */
    int64_t planned_other;        /* left free for other tensors while a plan is on */
    int64_t peak;
    int64_t bytes_up, bytes_down;
    cached *cache;
    int32_t n_cache, cache_capacity;
} tier;

struct ps_chunks {
    ps_mem base;
    ps_mem *plain;
    ps_chunk_config config;
    int32_t n_tiers;
    tier tiers[PS_TIERS];
    ps_disk *disk;                /* of the last tier, or NULL */
    chunk *chunks;
    int32_t n_chunks, capacity;
    transfer *transfers, **transfers_end, *spare;
    int64_t clock;                /* counts uses */
    const ps_step *step;
    bool closing;
    /* the step */
    bool noting, fresh;           /* fresh: the op that runs has not touched a chunk yet */
    int32_t now;                  /* the moment that runs, or -1 */
    ps_trace record;              /* while noting, `spare` has the bytes themselves */
    int64_t before_step[PS_TIERS];    /* the most bytes of other tensors up to the first moment */
    const ps_trace *expected;     /* while a plan is on */
    ps_plan plan;
    int64_t *extra[PS_TIERS];     /* [n_moments of `expected`] of `plan`, as ps_plan_input.extra, or NULL; */
    int64_t margin[PS_TIERS];     /* then left to other tensors, beside their peak */
    int32_t cursor[PS_TIERS - 1]; /* moves begun, by level */
    int32_t *back;                /* [capacity] chunks that wait for going back up to tier 0, oldest first */
    int32_t n_back;
    int32_t *held;                /* [capacity] chunks that ps_chunk_pin holds, */
    int32_t n_held;
    int64_t looks;                /* calls of room_to_stay */
    int32_t *next_use;            /* [n_uses] of `expected`: place of the chunk's next use, or -1 */
    int32_t next_use_capacity;
    ps_engine_stats stats;
    uint32_t random;              /* of the stress mode */
};

static inline chunk *chunk_at(ps_chunks *cs, int32_t id) { return &cs->chunks[id]; }
static inline bool is_disk(const ps_chunks *cs, int t) { return !cs->tiers[t].be; }
static inline bool has_copy(const chunk *c, int t) { return c->valid >> t & 1; }
/* Its memory on tier 0 is another chunk's as soon as it has gone down. */
static inline bool hands_on(const chunk *c) { return c->transfer && c->transfer->heir >= 0; }

/* "1.5 MiB", "96.0 KiB": for messages; lives to the end of the statement. */
typedef struct byte_text { char s[24]; } byte_text;
static inline byte_text bytes_text(int64_t n)
{
    byte_text text;
    bool large = n >= 1 << 20 || n <= -(1 << 20);
    snprintf(text.s, sizeof text.s, large ? "%.1f MiB" : "%.1f KiB", (double)n / (large ? 1048576.0 : 1024.0));
    return text;
}

/* -- chunk.c */
int ps_chunk_text(const ps_chunks *cs, const chunk *c, char *buf, size_t size);   /* "param[3] (h.0.w .. 12 tensors)" */
int tier_of(const ps_chunks *cs, int device);                                     /* or -1 */

/* -- chunk/transfer.c */
int64_t tier_other(ps_chunks *cs, int t);             /* bytes of other tensors */
int64_t tier_busy(ps_chunks *cs, int t, int64_t *peak);   /* those that a trim leaves; peak: as ps_mem_table.busy */
int64_t other_in_step(ps_chunks *cs, const ps_trace *trace, int t);   /* their peak in a step like `trace` */
int64_t tier_room(ps_chunks *cs, int t);              /* bytes that chunks may still take */
const char *last_key(const ps_chunks *cs);            /* of the configuration, the last tier's size: "disk.limit" */
/* Memory for c on tier t: 0, or 1 when there is no room now; negative: failed. Contents are not set. */
int slot_take(ps_chunks *cs, chunk *c, int t);
void slot_drop(ps_chunks *cs, chunk *c, int t);       /* gives it back; the copy there is no longer valid */
void cache_clear(ps_chunks *cs, int t, int64_t until_room);
/* Begins a copy of c up to tier t or down from it; 1: no room or not ready now. */
int begin_fetch(ps_chunks *cs, chunk *c, int t);
int begin_evict(ps_chunks *cs, chunk *c, int t);
int transfers_poll(ps_chunks *cs, bool block, const chunk *only);   /* takes in what has ended; block: at least one */
/* Frees `nbytes` on tier t by moving others down, or fails with nothing moved. `keep` stays. */
int make_room(ps_chunks *cs, int t, int64_t nbytes, const chunk *keep);
/* Has c's bytes on tier t when it returns, by whatever copies that takes. */
int bring(ps_chunks *cs, chunk *c, int t);
int bring_blank(ps_chunks *cs, chunk *c, int t);      /* memory there, with any contents */
int fail_no_room(ps_chunks *cs, int t, const chunk *c, int64_t nbytes);

/* -- chunk/resident.c */
/* Sets resident[n_chunks] to 1 for chunks that are to live on tier 0 alone in such a step, *nbytes to their bytes.
 * PS_ENOMEM, PS_SUB_HOMELESS: too few can. */
int residents_choose(ps_chunks *cs, const ps_trace *trace, uint8_t *resident, int64_t *nbytes);
/* Makes these chunks residents: they come up, and their copies below go. */
int residents_settle(ps_chunks *cs, const uint8_t *resident);

/* -- chunk/schedule.c */
void note_use(ps_chunks *cs, chunk *c, int t, bool write);
int advance(ps_chunks *cs);                           /* begins moves that may begin, and all that are needed now */
int64_t next_use_of(const ps_chunks *cs, const chunk *c);   /* moments from now to its next use; INT64_MAX: unknown */
void done_with(ps_chunks *cs, chunk *c, int t);       /* c's last pin on t ended: its next use may be on another tier */
void step_off(ps_chunks *cs);
#endif
