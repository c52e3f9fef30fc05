/* SPDX-License-Identifier: BSD-3-Clause
 * This file plans the moves of one level. A level consists of a tier with limited capacity and the tier below it. The
 * tier below is treated as if it had no limit. The input is a stream of events in the order in which they happen.
 *
 * Two cursors walk the stream. The take cursor allocates space for chunks, and the use cursor follows it. The space
 * that is taken between the two cursors is limited to the read-ahead depth plus the large chunks of one moment. Large
 * chunks are an exception because each use of a large chunk would otherwise wait for its whole copy. A chunk with an
 * event between the cursors is busy and stays. Every other chunk on this tier is a candidate for eviction, and its
 * next event is after the take cursor. All state is the state at the take cursor. Therefore no prefix of the list of
 * moves holds more bytes than the capacity of the tier. */
#include <float.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "chunk/plan_level.h"

/* The candidates for eviction are in heaps. There is one heap per WEIGH_* constant of policy.h, and one heap for
 * candidates whose eviction costs no copy. Candidates of the heap CLASS_FREE are evicted first. The weights choose
 * among the tops of the other heaps. */
enum { CLASS_FREE = WEIGH_COUNT, CLASS_COUNT };
/* Room is made only for uses whose distance from the use cursor is at most REACH times the read-ahead depth. The
 * distance is the number of bytes that the uses in between need. Making room sooner would evict chunks that are
 * needed earlier. */
enum { REACH = 3 };
/* A chunk is large if it is larger than the read-ahead depth, or larger than OUTLIER chunks of mean size. An example
 * is a token table, because an update uses its weights and averages at one moment. */
enum { OUTLIER = 4 };

typedef struct track {
    /* key: rank as a candidate
     * last: position of the chunk's last event
     * taken: position at which the chunk arrived on this tier */
    double key, last, taken;
    int64_t nbytes;
    int32_t next;                 /* next event after the take cursor (see ps_stream.next) */
    int32_t group;                /* group of the last event that was taken, or -1 */
    int32_t slot;                 /* index in its heap; -1 if it is not a candidate */
    int32_t free_from;            /* first moment at which the chunk may be evicted */
    int32_t below_from;           /* first moment at which the copy on the tier below may be read */
    /* fetched: 1 + index of the move of this level that brought the chunk, or 0
     * written: 1 + index of the move of the level above that brought the chunk, or 0 */
    int32_t fetched, written;
    /* above: 1 + index of the last move of the level above that read or wrote the chunk here, or 0 */
    int32_t above;
    int32_t class;
} track;

/* A reservation of memory for a chunk.
 * until: size in bytes of this and all earlier reservations, without large chunks
 * over: moment at which the use of the chunk has ended */
typedef struct taking { int64_t until; int32_t over; } taking;

typedef struct run {
    ps_level *l;
    const ps_stream *s;
    track *tracks;
    int32_t *heap[CLASS_COUNT], size[CLASS_COUNT];
    int32_t *picked;
    uint8_t *took;                /* [events of two rounds] 1 if the event reserved memory */
    taking *takings;
    int32_t n_takings, oldest;
    int32_t take, use;            /* the cursors: index of the next event, number of the next group */
    /* used: size in bytes of the chunks on this tier
     * leaving: size in bytes of the candidates for eviction */
    int64_t used, leaving;
    int64_t large_from;           /* size above which a chunk is large */
    /* waiting: bytes reserved for later uses of chunks that are not large
     * large: bytes reserved for later uses of large chunks */
    int64_t waiting, large;
    /* large_at: moment of the use of the latest large chunk
     * large_over: moment at which this use has ended */
    int32_t large_at, large_over;
    /* large_before: the value that large_over had when large_at was an earlier moment */
    int32_t large_before;
    int32_t last_free;            /* 1 + index of the last move that frees memory, or 0 */
    double now;                   /* position of the use cursor */
} run;

static const ps_event *event_at(const run *r, int32_t i) { return &r->s->events[i < r->s->n ? i : i - r->s->n]; }
static double place_of(const run *r, int32_t i)
{
    return i < 0 ? DBL_MAX / 4 : i < r->s->n ? r->s->when[i] : r->s->when[i - r->s->n] + r->s->total;
}
static int32_t after(const run *r, int32_t i)
{
    int32_t n = r->s->n, next = i < n ? r->s->next[i] : r->s->next[i - n];
    return i < n || next < 0 ? next : next < n ? next + n : -1;
}

/* -- heaps of candidates ------------------------------------------------------------------------------------------ */
static void heap_set(run *r, int k, int32_t at, int32_t chunk)
{
    r->heap[k][at] = chunk;
    r->tracks[chunk].slot = at;
}
static void heap_up(run *r, int k, int32_t at)
{
    int32_t chunk = r->heap[k][at];
    for (; at > 0 && r->tracks[r->heap[k][(at - 1) / 2]].key < r->tracks[chunk].key; at = (at - 1) / 2)
        heap_set(r, k, at, r->heap[k][(at - 1) / 2]);
    heap_set(r, k, at, chunk);
}
static void heap_down(run *r, int k, int32_t at)
{
    int32_t chunk = r->heap[k][at], child;
    for (; (child = 2 * at + 1) < r->size[k]; at = child) {
        if (child + 1 < r->size[k] && r->tracks[r->heap[k][child + 1]].key > r->tracks[r->heap[k][child]].key) child++;
        if (r->tracks[r->heap[k][child]].key <= r->tracks[chunk].key) break;
        heap_set(r, k, at, r->heap[k][child]);
    }
    heap_set(r, k, at, chunk);
}

static void candidate_add(run *r, int32_t chunk)
{
    track *t = &r->tracks[chunk];
    int k = t->class;
    r->heap[k][r->size[k]] = chunk;
    heap_up(r, k, r->size[k]++);
    r->leaving += t->nbytes;
}
static void candidate_remove(run *r, int32_t chunk)
{
    track *t = &r->tracks[chunk];
    if (t->slot < 0) return;
    int k = t->class;
    int32_t at = t->slot, moved = r->heap[k][--r->size[k]];
    t->slot = -1;
    r->leaving -= t->nbytes;
    if (moved == chunk) return;
    heap_set(r, k, at, moved);
    heap_up(r, k, at);
    heap_down(r, k, r->tracks[moved].slot);
}

/* Returns the class that a chunk would have if it were evicted now. The later events of the chunk determine the
 * class. *next receives the first event that needs the chunk here again. */
static int classify(const run *r, int32_t chunk, int32_t *next)
{
    uint8_t at = r->l->at[chunk];
    int32_t e = r->tracks[chunk].next;
    bool lone = !(at & AT_BELOW);
    for (; e >= 0; e = after(r, e)) {
        int kind = event_at(r, e)->kind;
        /* The event requires an eviction in any case. */
        if (lone ? kind == EV_DOWN : kind == EV_DOWN_WRITE) break;
        if (!lone && (kind == EV_DOWN || kind == EV_GONE)) continue;    /* the copy below is enough */
        break;
    }
    *next = e;
    int kind = e < 0 ? -1 : event_at(r, e)->kind;
    bool this_round = e >= 0 && e < r->s->n;
    if (kind == EV_DOWN || kind == EV_DOWN_WRITE) return CLASS_FREE;
    if (this_round && (kind == EV_STALE || kind == EV_DEST || kind == EV_END))
        return CLASS_FREE;                                /* nothing uses the contents before they are replaced */
    if (lone && (at & AT_ABOVE) && (!this_round || kind == EV_GONE)) return WEIGH_TWIN;
    return lone ? WEIGH_DIRTY : WEIGH_CLEAN;
}

static void make_candidate(run *r, int32_t chunk)
{
    track *t = &r->tracks[chunk];
    int32_t next;
    t->class = classify(r, chunk, &next);
    ps_victim v = { .next = place_of(r, next), .last = t->last, .taken = t->taken };
    t->key = r->l->policy->rank(&v);
    candidate_add(r, chunk);
}

/* Returns the candidate to evict first, or -1. */
static int32_t best(const run *r)
{
    if (r->size[CLASS_FREE] > 0) return r->heap[CLASS_FREE][0];
    int32_t found = -1;
    double highest = 0;
    for (int k = 0; k < WEIGH_COUNT; k++) {
        if (r->size[k] == 0) continue;
        double weight = r->l->tuning->weight[k], key = r->tracks[r->heap[k][0]].key;
        double score = weight == 1 ? key - r->now : (key - r->now) / weight;
        if (found >= 0 && score <= highest) continue;
        found = r->heap[k][0];
        highest = score;
    }
    return found;
}

/* -- moves -------------------------------------------------------------------------------------------------------- */
static int emit(run *r, int kind, int32_t chunk, int32_t from, int32_t need, int32_t event)
{
    ps_level *l = r->l;
    int32_t room = l->room;
    PS_TRY(ps_grow(l->moves, room, l->n_moves + 1));
    PS_TRY(ps_grow(l->serves, l->room, l->n_moves + 1));
    track *t = &r->tracks[chunk];
    l->serves[l->n_moves] = event < r->s->n ? event : event - r->s->n;
    l->moves[l->n_moves++] = (ps_move){ .chunk = chunk, .from = from, .need = need, .kind = (int8_t)kind,
                                        .tier = (int8_t)l->tier, .after = kind == PS_MOVE_FETCH ? 0 : t->above };
    if (kind == PS_MOVE_FETCH) {
        l->fetched += t->nbytes;
        t->fetched = l->n_moves;
        return 0;
    }
    l->at[chunk] &= (uint8_t)~AT_HERE;
    r->used -= t->nbytes;
    r->last_free = l->n_moves;
    if (kind == PS_MOVE_EVICT) {
        l->evicted += t->nbytes;
        l->at[chunk] |= AT_BELOW;
    }
    return 0;
}

/* Emits the move that evicts a chunk. The chunk must not be in a heap any more. */
static int leave(run *r, int32_t chunk, int32_t need, int32_t event)
{
    track *t = &r->tracks[chunk];
    uint8_t at = r->l->at[chunk];
    int32_t next;
    bool ends = (at & AT_BELOW) || (r->tracks[chunk].class == WEIGH_TWIN) ||
                (classify(r, chunk, &next) == CLASS_FREE && (at & AT_ABOVE));
    return emit(r, ends ? PS_MOVE_DROP : PS_MOVE_EVICT, chunk, t->free_from < need ? t->free_from : need, need, event);
}

/* Returns the number of bytes that chunks may use at a moment. */
static int64_t limit_at(const ps_level *l, int32_t moment)
{
    return l->capacity + (l->extra && moment < l->n_moments ? l->extra[moment] : 0);
}

/* Makes room for `nbytes` more bytes within `limit`. Returns 1, or 0 if the candidates are too small. Picks chunks by
 * rank until there is enough room, and then puts back the chunks that did not have to be picked. */
static int make_room(run *r, int64_t nbytes, int64_t limit, int32_t need, int32_t event)
{
    int64_t room = limit - r->used;
    if (room >= nbytes) return 1;
    if (room + r->leaving < nbytes) return 0;
    int32_t n = 0;
    while (room < nbytes) {
        int32_t chunk = best(r);
        candidate_remove(r, chunk);
        r->picked[n++] = chunk;
        room += r->tracks[chunk].nbytes;
    }
    for (int32_t i = n - 1; i >= 0; i--) {
        int32_t chunk = r->picked[i];
        if (room - r->tracks[chunk].nbytes < nbytes) continue;
        room -= r->tracks[chunk].nbytes;
        candidate_add(r, chunk);
        r->picked[i] = -1;
    }
    for (int32_t i = 0; i < n; i++)
        if (r->picked[i] >= 0) PS_TRY(leave(r, r->picked[i], need, event));
    return 1;
}

static bool is_large(const run *r, int64_t nbytes) { return nbytes > r->large_from; }

/* Returns the counter of reserved bytes for a chunk of this size: r->large for a large chunk, otherwise r->waiting. */
static int64_t *waiting_of(run *r, int64_t nbytes) { return is_large(r, nbytes) ? &r->large : &r->waiting; }

/* Returns the first moment at which a fetch may reserve its memory. If the fetch reserved memory earlier, the chunks
 * that are fetched and not used yet would need more than `ahead` bytes together. A large chunk must wait until the
 * large chunks of an earlier moment have been used. must: the chunk is used at `moment`, so it cannot wait longer. */
static int32_t fetch_from(run *r, int64_t nbytes, int32_t moment, bool must)
{
    int64_t total = (r->n_takings ? r->takings[r->n_takings - 1].until : 0) + nbytes;
    if (is_large(r, nbytes)) return must ? moment : r->large_before;
    if (total <= r->l->ahead) return 0;
    while (r->oldest < r->n_takings && r->takings[r->oldest].until < total - r->l->ahead) r->oldest++;
    int32_t over = r->oldest < r->n_takings ? r->takings[r->oldest].over : moment;
    return over < moment ? over : moment;
}

/* Reserves memory for the chunk of event i. If `fetch` is set, also fetches the contents of the chunk. Returns 1, or
 * 0 if the memory cannot be reserved now. `must` means that the event is due. Neither `ahead` nor REACH limits such
 * an event. */
static int take_space(run *r, int32_t i, bool fetch, bool must)
{
    const ps_event *e = event_at(r, i);
    ps_level *l = r->l;
    track *t = &r->tracks[e->chunk];
    int32_t beyond = i < r->s->n ? 0 : l->n_moments, need = e->need + beyond;
    bool large = is_large(r, t->nbytes), joins = large && r->large > 0 && r->large_at == e->moment + beyond;
    if (!must && (large ? r->large > 0 && !joins : r->waiting + t->nbytes > l->ahead)) return 0;
    bool far = place_of(r, i) - r->now > REACH * (double)l->ahead;
    if (!must && !joins && far && l->capacity - r->used < t->nbytes) return 0;
    bool more = must && e->kind <= EV_WRITE && l->capacity - r->used + r->leaving < t->nbytes;
    int rc = make_room(r, t->nbytes, more ? limit_at(l, e->moment) : l->capacity, need, i);
    if (rc <= 0) return rc;
    if (large && !joins) r->large_at = e->moment + beyond, r->large_before = r->large_over;
    int32_t from = fetch_from(r, t->nbytes, e->moment + beyond, must);
    if (r->used + t->nbytes > l->capacity) from = e->moment;         /* only this moment has extra room */
    if (fetch) PS_TRY(emit(r, PS_MOVE_FETCH, e->chunk, from > t->below_from ? from : t->below_from, need, i));
    else if (l->n_moves > 0 && l->moves[l->n_moves - 1].need > need) l->moves[l->n_moves - 1].need = need;
    bool use = e->kind == EV_READ || e->kind == EV_WRITE;
    int64_t before = r->n_takings ? r->takings[r->n_takings - 1].until : 0;
    int32_t over = e->moment + use + beyond;
    r->takings[r->n_takings++] = (taking){ large ? before : before + t->nbytes, over };
    if (large) r->large_over = over;
    r->took[i] = 1;
    *waiting_of(r, t->nbytes) += t->nbytes;
    r->used += t->nbytes;
    if (r->used > l->peak) l->peak = r->used;
    l->at[e->chunk] |= AT_HERE;
    t->taken = place_of(r, i);
    t->free_from = e->moment;
    return 1;
}

/* -- events ------------------------------------------------------------------------------------------------------- */
/* Called when an event uses a chunk that is already here. Ensures that the move that brings the chunk is due in time
 * for this use. */
static void hurry(run *r, const ps_event *e)
{
    const track *t = &r->tracks[e->chunk];
    ps_level *l = r->l;
    ps_move *m = t->fetched ? &l->moves[t->fetched - 1] : t->written ? &l->above->moves[t->written - 1] : NULL;
    if (m && m->need > e->need) m->need = e->need;
}

static int use_here(run *r, int32_t i, const ps_event *e, bool must)
{
    uint8_t *at = &r->l->at[e->chunk];
    if (*at & AT_HERE) hurry(r, e);
    if (!(*at & AT_HERE)) {
        bool blank = *at & AT_BLANK;
        int rc = take_space(r, i, !blank, must);
        if (rc <= 0) return rc;
        if (blank) *at = AT_HERE;
    }
    if (*at & AT_ENDED) *at = AT_HERE;                    /* new contents replace the old contents in the same memory */
    if (e->kind == EV_WRITE) *at &= (uint8_t)~AT_BELOW;
    r->tracks[e->chunk].free_from = e->moment + 1;
    return 1;
}

static int use_below(run *r, int32_t i, const ps_event *e)
{
    uint8_t *at = &r->l->at[e->chunk];
    track *t = &r->tracks[e->chunk];
    bool write = e->kind == EV_DOWN_WRITE || (*at & (AT_BLANK | AT_ENDED));
    if ((*at & AT_HERE) && (write || e->ends || !(*at & AT_BELOW))) {
        PS_TRY(emit(r, *at & (AT_BELOW | AT_ENDED) ? PS_MOVE_DROP : PS_MOVE_EVICT, e->chunk,
                    t->free_from < e->need ? t->free_from : e->need, e->need, i));
    }
    *at = (uint8_t)((*at & ~(AT_BLANK | AT_ENDED)) | AT_BELOW);
    if (write) t->below_from = e->moment + 1;
    return 1;
}

/* Handles an event of the level above. Such an event is a move, or a write or the end of contents on the upper tier
 * of that level. */
static int serve_above(run *r, int32_t i, const ps_event *e, bool must)
{
    uint8_t *at = &r->l->at[e->chunk];
    track *t = &r->tracks[e->chunk];
    bool ends = e->kind == EV_STALE || e->kind == EV_END;
    ps_move *move = ends ? NULL : &r->l->above->moves[e->ref];
    bool comes = e->kind == EV_DEST || (e->kind == EV_GONE && !(*at & (AT_HERE | AT_BELOW | AT_BLANK)));
    if ((e->kind == EV_SOURCE || comes) && !(*at & AT_HERE)) {
        int rc = take_space(r, i, !comes, must);
        if (rc <= 0) return rc;
    }
    if (ends) {
        candidate_remove(r, e->chunk);
        if (*at & AT_HERE) PS_TRY(emit(r, PS_MOVE_DROP, e->chunk, t->free_from, e->need, i));
        *at = e->kind == EV_END ? AT_BLANK : AT_ABOVE;
    } else if (e->kind == EV_SOURCE) {
        *at |= AT_ABOVE;
        move->after = t->fetched;
        t->above = e->ref + 1;
    } else {
        *at &= (uint8_t)~AT_ABOVE;
        if (comes) {
            if (e->kind == EV_GONE) {
                move->kind = PS_MOVE_EVICT;
                r->l->above->evicted += t->nbytes;
            }
            *at = AT_HERE;
            move->after = r->last_free;
            t->above = t->written = e->ref + 1;
            t->fetched = 0;
        }
    }
    t->free_from = e->moment;
    return 1;
}

/* Records that the contents of a chunk end with event e. */
static void note_end(run *r, const ps_event *e)
{
    uint8_t *at = &r->l->at[e->chunk];
    *at = *at & AT_HERE ? AT_HERE | AT_ENDED : AT_BLANK;
    r->tracks[e->chunk].free_from = e->moment + 1;
}

/* Processes event i at the take cursor. Returns 1, or 0 if the memory that the event needs cannot be reserved now. */
static int take_event(run *r, int32_t i, bool must)
{
    const ps_event *e = event_at(r, i);
    track *t = &r->tracks[e->chunk];
    uint8_t both = AT_HERE | AT_BELOW;
    if (e->kind == EV_DOWN && (r->l->at[e->chunk] & both) == both && !e->ends && !(r->l->at[e->chunk] & AT_ENDED)) {
        t->next = r->s->next[i];                          /* the event reads the copy below, so nothing changes here */
        return 1;
    }
    candidate_remove(r, e->chunk);
    int rc = e->kind <= EV_WRITE ? use_here(r, i, e, must) : e->kind <= EV_DOWN_WRITE ? use_below(r, i, e)
                                                                                     : serve_above(r, i, e, must);
    if (rc <= 0) return rc;                               /* the chunk is not here, so it was not a candidate */
    t->next = r->s->next[i];
    t->group = e->group;
    t->last = r->s->when[i];
    if (e->ends) note_end(r, e);
    return 1;
}

/* Processes event i of the next round. If possible, fetches the chunk of the event early, and returns 1. Otherwise
 * does nothing and returns 0. */
static int take_beyond(run *r, int32_t i)
{
    const ps_event *e = event_at(r, i);
    uint8_t at = r->l->at[e->chunk];
    if (e->kind != EV_READ && e->kind != EV_WRITE && e->kind != EV_SOURCE) return 0;
    if (!(at & (AT_HERE | AT_BELOW)) || (at & AT_ENDED)) return 0;
    if (e->kind == EV_SOURCE && (at & AT_ABOVE)) return 0;
    candidate_remove(r, e->chunk);
    r->tracks[e->chunk].group = INT32_MAX;                /* the chunk stays until the step ends */
    if (at & AT_HERE) return 1;
    return take_space(r, i, true, false);
}

/* Called when the uses of a group have ended. The memory of the group's chunks no longer counts as waiting, and the
 * chunks become candidates for eviction. Chunks whose contents have ended are dropped at once. */
static int pass_group(run *r, int32_t first, int32_t end)
{
    for (int32_t i = first; i < end; i++) {
        int32_t chunk = r->s->events[i].chunk;
        track *t = &r->tracks[chunk];
        uint8_t *at = &r->l->at[chunk];
        if (r->took[i]) *waiting_of(r, t->nbytes) -= t->nbytes;
        if (t->group != r->use || t->slot >= 0 || !(*at & AT_HERE)) continue;
        if (*at & AT_ENDED) {
            /* The extra room must be free again before the next moment. */
            int32_t need = r->used > r->l->capacity ? t->free_from : 2 * r->l->n_moments;
            PS_TRY(emit(r, PS_MOVE_DROP, chunk, t->free_from, need, i));
            *at = AT_BLANK;
        } else {
            make_candidate(r, chunk);
        }
    }
    return 0;
}

/* -- a run -------------------------------------------------------------------------------------------------------- */
static int fail_group(run *r, int32_t i)
{
    const ps_event *e = event_at(r, i);
    int64_t wanted = 0;
    for (int32_t j = i; j >= 0 && r->s->events[j].group == e->group; j--)
        if (r->s->events[j].kind <= EV_WRITE || j == i) wanted += r->tracks[r->s->events[j].chunk].nbytes;
    for (int32_t j = i + 1; j < r->s->n && r->s->events[j].group == e->group; j++)
        if (r->s->events[j].kind <= EV_WRITE) wanted += r->tracks[r->s->events[j].chunk].nbytes;
    r->l->bad_event = i;
    return ps_fail_room(PS_ENOMEM, PS_SUB_OP_CHUNKS, r->l->tier, wanted, limit_at(r->l, e->moment),
                        "moment %d of the step needs %lld bytes of chunks at once on tier %d, which has %lld for them; "
                        "raise its budget or use smaller chunks",
                        e->need, (long long)wanted, r->l->tier, (long long)limit_at(r->l, e->moment));
}

static int begin(run *r)
{
    ps_level *l = r->l;
    const ps_stream *s = r->s;
    size_t n = (size_t)s->n_chunks + 1, events = (size_t)s->n + 1;
    size_t want = n * (sizeof *r->tracks + (CLASS_COUNT + 1) * sizeof(int32_t)) + 2 * events * (sizeof *r->takings + 1);
    char *p = ps_alloc(want);
    if (!p) return ps_fail_nomem(want);
    r->tracks = (track *)p;
    r->takings = (taking *)(p += n * sizeof *r->tracks);
    r->picked = (int32_t *)(p += 2 * events * sizeof *r->takings);
    for (int k = 0; k < CLASS_COUNT; k++) r->heap[k] = r->picked + n * (size_t)(k + 1);
    r->took = (uint8_t *)(r->picked + n * (CLASS_COUNT + 1));
    memset(r->took, 0, 2 * events);
    int64_t total = 0;
    for (int32_t c = 0; c < s->n_chunks; c++) {
        int32_t last = s->last[c];
        double place = !l->cyclic || last < 0 ? -(double)(s->n_chunks - c) - s->total : s->when[last] - s->total;
        r->tracks[c] = (track){ .nbytes = l->chunks[c].nbytes, .next = s->first[c], .slot = -1, .group = -1,
                                .last = place, .taken = place };
        total += l->chunks[c].nbytes;
        if (!(l->at[c] & AT_HERE)) continue;
        r->used += l->chunks[c].nbytes;
        make_candidate(r, c);
    }
    l->peak = r->used;
    r->large_from = s->n_chunks > 0 ? total / s->n_chunks * OUTLIER : l->ahead;
    if (r->large_from > l->ahead) r->large_from = l->ahead;
    if (r->used <= l->capacity) return 0;
    int rc = make_room(r, 0, l->capacity, 0, 0);          /* the tier is smaller than in the previous step */
    if (rc != 0) return rc < 0 ? rc : 0;
    int32_t i = 0;                                        /* the capacity is negative, so no chunk can be here */
    while (i < s->n && s->events[i].kind > EV_WRITE) i++;
    return i < s->n ? fail_group(r, i) : 0;
}

/* Keeps the chunks that events [first, end) use on this tier. Called for a moment with extra room. The op of that
 * moment needs all these chunks until it has run. */
static void keep_group(run *r, int32_t first, int32_t end)
{
    for (int32_t i = first; i < end; i++)
        if (r->s->events[i].kind <= EV_WRITE) candidate_remove(r, r->s->events[i].chunk);
}

/* Evicts chunks that fit only because of a moment's extra room. These chunks must have left before the next moment
 * begins. */
static int end_extra(run *r, int32_t moment, int32_t event)
{
    if (limit_at(r->l, moment) <= r->l->capacity || r->used <= r->l->capacity || moment + 1 >= r->l->n_moments)
        return 1;
    return make_room(r, 0, limit_at(r->l, moment + 1), moment + 1, event);
}

static int walk(run *r)
{
    const ps_stream *s = r->s;
    for (int32_t first = 0, end; first < s->n; first = end) {
        int32_t moment = s->events[first].moment;
        r->now = s->when[first];
        for (end = first; end < s->n && s->events[end].group == s->events[first].group; end++);
        if (limit_at(r->l, moment) > r->l->capacity) keep_group(r, first, end);
        for (; r->take < end; r->take++) {
            int rc = take_event(r, r->take, true);
            if (rc <= 0) return rc < 0 ? rc : fail_group(r, r->take);
        }
        int rc = 1;
        while (rc > 0 && r->take < s->n && r->l->ahead > 0 && r->used <= r->l->capacity)
            if ((rc = take_event(r, r->take, false)) > 0) r->take++;
        while (rc > 0 && r->take >= s->n && r->take < 2 * s->n && r->l->cyclic && r->l->ahead > 0 &&
               r->used <= r->l->capacity)
            if ((rc = take_beyond(r, r->take)) > 0) r->take++;
        if (rc < 0) return rc;
        PS_TRY(pass_group(r, first, end));
        r->use++;
        rc = end_extra(r, moment, end < s->n ? end : first);
        if (rc <= 0) return rc < 0 ? rc : fail_group(r, first);
    }
    return 0;
}

/* Adjusts the moments of moves to the order of the list, so that `from` and `need` never decrease along the list. */
static void smooth(ps_level *l)
{
    for (int32_t i = l->n_moves - 2; i >= 0; i--)
        if (l->moves[i].need > l->moves[i + 1].need) l->moves[i].need = l->moves[i + 1].need;
    for (int32_t i = 0; i < l->n_moves; i++) {
        if (i > 0 && l->moves[i].from < l->moves[i - 1].from) l->moves[i].from = l->moves[i - 1].from;
        if (l->moves[i].from > l->moves[i].need) l->moves[i].from = l->moves[i].need;
    }
}

int ps_level_run(ps_level *l)
{
    run r = { .l = l, .s = l->stream, .large_at = -1 };
    l->bad_event = -1;
    l->n_moves = 0;
    l->fetched = l->evicted = 0;
    int rc = begin(&r);
    if (rc == 0) rc = walk(&r);
    ps_free(r.tracks);
    if (rc == 0) smooth(l);
    if (rc == 0 && l->above) smooth(l->above);            /* hurry may have changed the moves of the level above */
    return rc;
}

void ps_level_clear(ps_level *l)
{
    ps_free(l->moves);
    ps_free(l->serves);
    l->moves = NULL;
    l->serves = NULL;
    l->n_moves = l->room = 0;
}

/* -- streams ------------------------------------------------------------------------------------------------------ */
int ps_stream_link(ps_stream *s, const ps_plan_chunk *chunks, int cyclic)
{
    size_t n = (size_t)s->n + 1, nc = (size_t)s->n_chunks + 1;
    size_t want = n * (sizeof *s->when + sizeof *s->next) + 2 * nc * sizeof *s->first;
    char *p = ps_alloc(want);
    if (!p) return ps_fail_nomem(want);
    s->when = (double *)p;
    s->next = (int32_t *)(p += n * sizeof *s->when);
    s->first = s->next + n;
    s->last = s->first + nc;
    for (int32_t c = 0; c < s->n_chunks; c++) s->first[c] = s->last[c] = -1;
    s->total = 1;
    for (int32_t i = 0; i < s->n; i++) {
        int32_t c = s->events[i].chunk;
        s->when[i] = s->total;
        bool again = s->last[c] >= 0 && s->events[s->last[c]].group >= s->events[i].group - 1;
        s->total += 1 + (again ? 0 : (double)chunks[c].nbytes);
        s->next[i] = -1;
        if (s->last[c] >= 0) s->next[s->last[c]] = i;
        else s->first[c] = i;
        s->last[c] = i;
    }
    if (cyclic)
        for (int32_t c = 0; c < s->n_chunks; c++)
            if (s->last[c] >= 0) s->next[s->last[c]] = s->n + s->first[c];
    return 0;
}

void ps_stream_clear(ps_stream *s)
{
    ps_free(s->when);
    ps_free(s->events);
    *s = (ps_stream){ 0 };
}
