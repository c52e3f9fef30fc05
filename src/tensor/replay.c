/* SPDX-License-Identifier: BSD-3-Clause
 * Records the effects of the spans of micro-batches, and repeats these effects (replay.h). A replay is possible after
 * NOTED consecutive micro-batches have had equal effects. All following micro-batches except the last one then have the
 * same effects, no matter how many micro-batches there are. */
#include "tensor/replay.h"
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"

enum { MADE, GONE, OP, PIN, UNPIN, TAKE, GIVE };

typedef struct effect {
    int32_t kind, device;
    /* For GONE: the storage is number `at` among the storages that the micro-batch made in its span `span`. */
    int32_t span, at;
    int64_t access;               /* PIN only */
    int64_t nbytes;               /* MADE and TAKE only */
    ps_storage *storage;          /* PIN and UNPIN only: a storage that outlives the step, such as one in a chunk */
} effect;
_Static_assert(sizeof(effect) == 40, "no padding: effects are compared byte by byte");

typedef struct place { int32_t span, at; } place;
typedef struct made { ps_storage *storage; place at; bool ended; } made;            /* storage: NULL after the storage
                                                                                     * was dropped */

/* The effects of a span. */
typedef struct noted {
    effect *effects;
    int32_t n, capacity, n_made;
    place *ended;                 /* [n_ended], sorted: storages whose bytes begin to wait for Lua's collector in this
                                   * span */
    int32_t n_ended, ended_capacity;
    ps_rank_calls calls;
    bool whole;
} noted;

typedef struct notes {            /* the effects of one micro-batch */
    noted *spans;                 /* [n_spans] */
    made *made;                   /* [n_made] */
    int32_t n_made, capacity;
} notes;

/* The storages of a repeated span. They have no tensor headers. */
typedef struct twins { ps_storage *list; int32_t n, live; bool whole; } twins;

typedef struct waiting { ps_storage bytes; int64_t number; } waiting;
typedef struct taken { void *handle; int32_t device; } taken;

enum { NOTED = PS_PIPE_PERFORMED - 1 };           /* number of micro-batches whose effects are recorded; they precede
                                                   * the micro-batch `first` */

struct ps_replay {
    ps_ctx *ctx;
    int32_t n_spans, n_micros, first, end;
    notes notes[NOTED];           /* effects of the micro-batches first - NOTED to first - 1 */
    int32_t span, micro;          /* span: the current span, -1 outside spans */
    int32_t n_calls;              /* value of ctx->dry.calls.n at the beginning of the span */
    bool differs;
    twins *twins;                 /* [n_micros x n_spans] */
    waiting *waiting;             /* [n_waiting] */
    int32_t n_waiting, waiting_capacity;
    int64_t number, began;        /* number: number of the next storage. began: number of the first storage of this
                                   * run */
    taken *scratch;               /* [n_scratch] used while a span is repeated */
    int32_t n_scratch, scratch_capacity;
};

static twins *twins_of(const ps_replay *r, int32_t micro, int32_t span)
{
    return &r->twins[(int64_t)micro * r->n_spans + span];
}

/* -- life ---------------------------------------------------------------------------------------------------------- */
static void notes_drop(notes *of, int32_t n_spans)
{
    for (int32_t i = 0; of->spans && i < n_spans; i++) {
        ps_free(of->spans[i].effects);
        ps_free(of->spans[i].ended);
        ps_free(of->spans[i].calls.list);
    }
    ps_free(of->spans);
    ps_free(of->made);
    *of = (notes){ .spans = NULL };
}

/* Orders the waiting bytes from the youngest to the oldest, which is the order in which they are freed. The order
 * determines where later bytes are placed, so it must not depend on the collector. */
static int by_number(const void *a, const void *b)
{
    int64_t x = ((const waiting *)a)->number, y = ((const waiting *)b)->number;
    return x < y ? 1 : x > y ? -1 : 0;
}

static void free_waiting(ps_replay *r)
{
    if (r->n_waiting > 1) qsort(r->waiting, (size_t)r->n_waiting, sizeof *r->waiting, by_number);
    for (int32_t i = 0; i < r->n_waiting; i++) ps_storage_free(&r->waiting[i].bytes);
    r->n_waiting = 0;
}

static void give(ps_replay *r)
{
    const taken *t = &r->scratch[--r->n_scratch];
    r->ctx->dry.mem->table->scratch_free(r->ctx->dry.mem, t->device, t->handle);
}

void ps_replay_end(ps_ctx *ctx)
{
    ps_replay *r = ctx->dry.replay;
    if (!r) return;
    ctx->dry.replay = NULL;
    while (r->n_scratch > 0) give(r);
    free_waiting(r);
    for (int64_t i = 0; r->twins && i < (int64_t)r->n_micros * r->n_spans; i++) {
        for (int32_t k = 0; r->twins[i].list && k < r->twins[i].n; k++) ps_storage_free(&r->twins[i].list[k]);
        ps_free(r->twins[i].list);
    }
    ps_free(r->twins);
    r->twins = NULL;
    for (int i = 0; i < NOTED; i++) notes_drop(&r->notes[i], r->n_spans);
}

void ps_replay_free(ps_replay *r)
{
    if (!r) return;
    ps_free(r->waiting);
    ps_free(r->scratch);
    ps_free(r);
}

int ps_replay_begin(ps_ctx *ctx, int32_t micros, int32_t spans, int32_t first, int32_t end)
{
    ps_replay_end(ctx);
    if (!ctx->dry.replay_kept && !(ctx->dry.replay_kept = ps_alloc0(sizeof *ctx->dry.replay_kept)))
        return ps_fail_nomem(sizeof *ctx->dry.replay_kept);
    ps_replay *r = ctx->dry.replay = ctx->dry.replay_kept;
    r->ctx = ctx;
    r->n_spans = spans, r->n_micros = micros, r->first = first, r->end = end;
    r->span = -1;
    r->differs = false;
    r->began = r->number;
    if (first == end) return 0;
    bool has = (r->twins = ps_alloc0((size_t)micros * (size_t)spans * sizeof *r->twins)) != NULL;
    for (int i = 0; has && i < NOTED; i++)
        has = (r->notes[i].spans = ps_alloc0((size_t)spans * sizeof *r->notes[i].spans)) != NULL;
    if (has) return 0;
    ps_replay_end(ctx);
    return ps_fail_nomem((size_t)micros * (size_t)spans * sizeof *r->twins);
}

/* -- recording effects --------------------------------------------------------------------------------------------- */
/* Returns the recorded effects of a micro-batch, or NULL. */
static notes *notes_of(ps_replay *r, int32_t micro)
{
    int32_t at = micro - (r->first - NOTED);
    return r->first < r->end && at >= 0 && at < NOTED ? &r->notes[at] : NULL;
}

static noted *noting(ps_replay *r)
{
    notes *of = r->span >= 0 ? notes_of(r, r->micro) : NULL;
    return of ? &of->spans[r->span] : NULL;
}

static void note(ps_replay *r, effect e)
{
    noted *p = noting(r);
    if (!p) return;
    if (ps_try_grow(p->effects, p->capacity, p->n + 1)) p->effects[p->n++] = e;
    else r->differs = true;
}

static void note_ended(ps_replay *r, noted *p, made *m)
{
    m->ended = true;
    if (ps_try_grow(p->ended, p->ended_capacity, p->n_ended + 1)) p->ended[p->n_ended++] = m->at;
    else r->differs = true;
}

void ps_replay_made(ps_ctx *ctx, ps_storage *s)
{
    ps_replay *r = ctx->dry.replay;
    noted *p = noting(r);
    s->replay.of = r;
    s->replay.number = r->number++;
    s->replay.noted = -1;
    if (!p || !s->block) return;
    notes *of = notes_of(r, r->micro);
    if (!ps_try_grow(of->made, of->capacity, of->n_made + 1)) {
        r->differs = true;
        return;
    }
    s->replay.noted = of->n_made * NOTED + (int32_t)(of - r->notes);
    of->made[of->n_made++] = (made){ .storage = s, .at = { r->span, p->n_made++ } };
    note(r, (effect){ .kind = MADE, .device = s->device, .nbytes = s->nbytes });
}

/* Records that a storage of a recorded micro-batch loses its bytes. If `late` is set, the bytes wait for Lua's
 * collector first. */
static void note_gone(ps_replay *r, const ps_storage *s, bool late)
{
    notes *of = &r->notes[s->replay.noted % NOTED];
    made *m = &of->made[s->replay.noted / NOTED];
    m->storage = NULL;
    if (m->ended) return;
    noted *p = noting(r);
    if (!p || notes_of(r, r->micro) != of) r->differs = true;         /* the storage was made in another micro-batch, or
                                                                       * outside of micro-batches */
    else if (late) note_ended(r, p, m);
    else note(r, (effect){ .kind = GONE, .span = m->at.span, .at = m->at.at });
}

static void wait_for_collector(ps_replay *r, const ps_storage *s, int64_t number)
{
    r->waiting[r->n_waiting++] = (waiting){ { .keeper = s->keeper, .block = s->block, .nbytes = s->nbytes,
                                              .device = s->device }, number };
}

bool ps_replay_gone(ps_storage *s, bool released)
{
    ps_replay *r = s->replay.of;
    s->replay.of = NULL;
    if (!r->ctx->dry.replay || s->replay.number < r->began) return false;   /* s was made in an earlier dry run */
    bool late = released && (s->replay.scripted || r->span < 0) && ps_storage_is_of(s, r->ctx->dry.mem) &&
                ps_try_grow(r->waiting, r->waiting_capacity, r->n_waiting + 1);
    if (s->replay.noted >= 0) note_gone(r, s, late);
    if (late) wait_for_collector(r, s, s->replay.number);
    return late;
}

void ps_replay_op(ps_ctx *ctx) { note(ctx->dry.replay, (effect){ .kind = OP }); }

/* Returns true if the storage has a block outside plain memory. In plain memory, storages never move, so pins have no
 * effect. */
static bool is_elsewhere(const ps_storage *s) { return s->block && !ps_storage_is_plain(s); }

void ps_replay_pin(ps_ctx *ctx, ps_storage *s, int device, unsigned access)
{
    if (is_elsewhere(s))
        note(ctx->dry.replay, (effect){ .kind = PIN, .device = device, .access = access, .storage = s });
}

void ps_replay_unpin(ps_ctx *ctx, ps_storage *s, int device)
{
    if (is_elsewhere(s)) note(ctx->dry.replay, (effect){ .kind = UNPIN, .device = device, .storage = s });
}

void ps_replay_take(ps_ctx *ctx, int device, int64_t nbytes)
{
    note(ctx->dry.replay, (effect){ .kind = TAKE, .device = device, .nbytes = nbytes });
}

void ps_replay_give(ps_ctx *ctx, int device) { note(ctx->dry.replay, (effect){ .kind = GIVE, .device = device }); }

void ps_replay_spoil(ps_ctx *ctx) { ctx->dry.replay->differs = true; }

void ps_replay_collected(ps_ctx *ctx)
{
    if (ctx->dry.replay) free_waiting(ctx->dry.replay);
}

/* -- spans --------------------------------------------------------------------------------------------------------- */
void ps_replay_enter(ps_ctx *ctx, int32_t span, int32_t micro)
{
    ps_replay *r = ctx->dry.replay;
    r->span = span, r->micro = micro;
    r->n_calls = ctx->dry.calls.n;
}

static int by_place(const void *a, const void *b)
{
    const place *x = a, *y = b;
    if (x->span != y->span) return x->span < y->span ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at ? 1 : 0;
}

/* Finds the storages of the micro-batch to which only headers of the script still refer. The bytes of these storages
 * wait for Lua's collector. */
static void find_ended(ps_replay *r, notes *of, noted *p)
{
    for (int32_t i = 0; i < of->n_made; i++) {
        made *m = &of->made[i];
        if (m->storage && !m->ended && m->storage->replay.scripted && m->storage->holds == 0 && !m->storage->bytes.kept)
            note_ended(r, p, m);
    }
    if (p->n_ended > 1) qsort(p->ended, (size_t)p->n_ended, sizeof *p->ended, by_place);
}

static bool same(const noted *a, const noted *b)
{
    return a->whole && b->whole && a->n == b->n && a->n_ended == b->n_ended && a->calls.n == b->calls.n &&
           (a->n == 0 || !memcmp(a->effects, b->effects, (size_t)a->n * sizeof *a->effects)) &&
           (a->n_ended == 0 || !memcmp(a->ended, b->ended, (size_t)a->n_ended * sizeof *a->ended)) &&
           (a->calls.n == 0 || !memcmp(a->calls.list, b->calls.list, (size_t)a->calls.n * sizeof *a->calls.list));
}

static int append_calls(ps_rank_calls *to, const ps_rank_call *list, int32_t n)
{
    if (n == 0) return 0;
    PS_TRY(ps_grow(to->list, to->capacity, to->n + n));
    memcpy(&to->list[to->n], list, (size_t)n * sizeof *list);
    to->n += n;
    return 0;
}

int ps_replay_leave(ps_ctx *ctx)
{
    ps_replay *r = ctx->dry.replay;
    noted *p = noting(r);
    int32_t span = r->span;
    if (p) {
        find_ended(r, notes_of(r, r->micro), p);
        PS_TRY(append_calls(&p->calls, &ctx->dry.calls.list[r->n_calls], ctx->dry.calls.n - r->n_calls));
        p->whole = true;
        if (r->micro > r->first - NOTED && !same(p, &r->notes[0].spans[span])) r->differs = true;
    }
    r->span = -1;
    if (!r->differs || r->first == r->end) return 0;
    return ps_fail(PS_ESTATE, "in a dry run micro-batch %d allocated or held other memory than the micro-batch before "
                              "it, so no later one can repeat it", r->micro);
}

bool ps_replay_differs(const ps_ctx *ctx) { return ctx->dry.replay && ctx->dry.replay->differs; }

/* -- repeating a span ---------------------------------------------------------------------------------------------- */
static void drop_empty(twins *t)
{
    if (!t->whole || t->live > 0) return;
    ps_free(t->list);
    t->list = NULL;
}

static int make(ps_replay *r, twins *t, const effect *e)
{
    ps_mem *mem = r->ctx->mem.now;
    ps_storage *s = &t->list[t->n];
    *s = (ps_storage){ .keeper = &mem->keeper, .nbytes = e->nbytes, .device = e->device, .refs = 1,
                       .replay.number = r->number++ };
    PS_TRY(mem->table->alloc(mem, s));
    t->n++, t->live++;
    return 0;
}

static int take(ps_replay *r, const effect *e)
{
    void *p;
    PS_TRY(ps_grow(r->scratch, r->scratch_capacity, r->n_scratch + 1));
    taken *t = &r->scratch[r->n_scratch];
    t->device = e->device;
    PS_TRY(r->ctx->mem.now->table->scratch(r->ctx->mem.now, e->device, e->nbytes, &t->handle, &p));
    r->n_scratch++;
    return 0;
}

static int do_one(ps_replay *r, int32_t micro, twins *t, const effect *e)
{
    ps_ctx *ctx = r->ctx;
    twins *of;
    void *p;
    switch (e->kind) {
    case MADE: return make(r, t, e);
    case GONE:
        of = twins_of(r, micro, e->span);
        ps_storage_free(&of->list[e->at]);
        of->live--;
        drop_empty(of);
        return 0;
    case OP:
        if (ctx->engine.hooks) ctx->engine.hooks->op_begins(ctx);
        return 0;
    case PIN: return ps_storage_pin(e->storage, e->device, (unsigned)e->access, &p);
    case UNPIN: return ps_storage_unpin(e->storage, e->device), 0;
    case TAKE: return take(r, e);
    default: return give(r), 0;
    }
}

int ps_replay_span(ps_ctx *ctx, int32_t span, int32_t micro)
{
    ps_replay *r = ctx->dry.replay;
    const noted *p = &r->notes[NOTED - 1].spans[span];
    twins *t = twins_of(r, micro, span);
    if (!p->whole) {
        r->differs = true;
        return ps_fail(PS_ESTATE, "micro-batch %d must repeat a span that no earlier one has performed", micro);
    }
    if (p->n_made > 0 && !(t->list = ps_alloc0((size_t)p->n_made * sizeof *t->list)))
        return ps_fail_nomem((size_t)p->n_made * sizeof *t->list);
    for (int32_t i = 0; i < p->n; i++) PS_TRY(do_one(r, micro, t, &p->effects[i]));
    t->whole = true;
    PS_TRY(ps_grow(r->waiting, r->waiting_capacity, r->n_waiting + p->n_ended));
    for (int32_t i = 0; i < p->n_ended; i++) {
        twins *of = twins_of(r, micro, p->ended[i].span);
        ps_storage *s = &of->list[p->ended[i].at];
        wait_for_collector(r, s, s->replay.number);
        s->block = NULL;
        of->live--;
        drop_empty(of);
    }
    drop_empty(t);
    return ps_dry_note_calls(ctx, p->calls.list, p->calls.n);
}
