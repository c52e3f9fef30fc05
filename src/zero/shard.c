/* SPDX-License-Identifier: BSD-3-Clause
 * This file manages the memory of ZeRO: parts, the storages in parts, pins, and stripes (shard.h). While a stripe is
 * open, its parts can be read on this rank. A part that holds gradients is neither gathered nor dropped. All ranks must
 * decide alike when they gather or reduce a stripe. Therefore the decision depends only on values that are the same on
 * all ranks. */
#include "zero/shard.h"
#include <string.h>
#include "base/alloc.h"
#include "base/error.h"
#include "base/grow.h"
#include "collectives/collectives.h"

enum { OPEN_UNPLANNED = 2 };

typedef struct part {
    ps_part_config c;
    int32_t n_lent, pins;
    /* grads: the part holds gradients, or will hold gradients that backward is about to write
     * whole: the buffer of the part contains the gathered values of the whole part */
    bool used, grads, whole;
    /* buffer: the bytes of the part, if this rank has no chunk for the part. buffer.block is NULL if no bytes are
     * allocated. */
    ps_storage buffer;
} part;

/* The record of a storage in a part. The `block` of the storage points to this record. */
typedef struct lent {
    struct lent *next, **link;
    /* outer: the storage in the part. inner: a storage for the same bytes in this rank's chunk, or NULL. */
    ps_storage *outer, *inner;
    int32_t part;
    int64_t offset;
} lent;

typedef struct stripe {
    int32_t *parts;               /* [ranks] index of each rank's part, or -1 */
    /* at: [ranks] during a job, the address and the size of each part on the device meeting_place() */
    ps_comm_part *at;
    /* staged: [ranks] handle of the staging buffer that stage_out has made for the part, or NULL */
    void **staged;
    ps_job *job;
    bool open, stale;             /* stale: the stripe must be closed when its last pin is released */
    bool gathering, reducing;     /* a gather is in progress; a reduction is in progress */
    /* pass: last pass that used the stripe
     * noted: index of the stripe's gather in `record`, or -1 */
    int32_t pins, pass, noted;
    /* uses: number of reads in this pass so far
     * until: expected number of reads in this pass, or -1 if unknown */
    int32_t uses, until;
    int64_t touched;
} stripe;

struct ps_shard {
    ps_keeper base;
    ps_chunks *chunks;
    ps_mem *buffers;
    const ps_step *step;
    ps_backend *const *devices;
    int device, host, rank, size;
    ps_group *group;
    bool direct;                  /* bytes are sent directly from device to device */
    part *parts;
    stripe *stripes;
    int32_t n_parts, parts_capacity, n_stripes, stripes_capacity;
    lent *first;
    /* touched: the stripes that the latest op has read. If the op fails, its reads are subtracted from `uses`. */
    int32_t touched[PS_MAX_IN];
    int n_touched;
    int32_t first_pass;           /* value of step->pass when the step began */
    int64_t clock;
    ps_gathers record;
    /* expected: the gathers that this step should repeat; NULL if the gathers are unknown, or if the step has already
     * made other gathers */
    const ps_gathers *expected;
    int32_t next;                 /* index of the next gather in `expected` */
    bool noting, alone;
    double waited_s;
};

ps_group *ps_shard_group(const ps_shard *sh) { return sh->group; }
double ps_shard_waited(const ps_shard *sh) { return sh->waited_s; }
void ps_shard_alone(ps_shard *sh, bool on) { sh->alone = on; }

static bool is_mine(const ps_shard *sh, const part *p) { return p->c.owner == sh->rank; }
static part *part_at(ps_shard *sh, const stripe *st, int r)
{
    return st->parts[r] < 0 ? NULL : &sh->parts[st->parts[r]];
}
static ps_mem *memory(ps_shard *sh) { return sh->step->dry ? sh->step->dry : sh->buffers; }
static int32_t pass_of_step(const ps_shard *sh) { return sh->step->pass - sh->first_pass; }
static int32_t number_of(const ps_shard *sh, const stripe *st) { return (int32_t)(st - sh->stripes); }

/* -- buffers ------------------------------------------------------------------------------------------------------- */
static int buffer_take(ps_shard *sh, part *p)
{
    if (p->c.chunk >= 0 || p->buffer.block) return 0;
    p->buffer = (ps_storage){ .nbytes = p->c.nbytes, .device = p->c.device, .refs = 1, .bytes.kept = true };
    p->whole = false;
    return memory(sh)->table->alloc(memory(sh), &p->buffer);
}

static void buffer_drop(part *p)
{
    ps_storage_free(&p->buffer);
    p->buffer.block = NULL;
    p->whole = false;
}

static int buffer_pin(part *p, int device, unsigned access, void **out)
{
    return ps_storage_pin(&p->buffer, device, access, out);
}

static void buffer_unpin(part *p, int device) { ps_storage_unpin(&p->buffer, device); }

/* Allocates a staging buffer on the host for the part of rank r. If `contents` is set, copies the part from its device
 * to the staging buffer. Used if the group has not connected its devices, so that bytes are sent through the host. */
static int stage_out(ps_shard *sh, stripe *st, int r, bool contents)
{
    part *p = part_at(sh, st, r);
    ps_backend *be = sh->devices[p->c.device];
    void *from;
    PS_TRY(memory(sh)->table->scratch(memory(sh), sh->host, p->c.nbytes, &st->staged[r], &st->at[r].address));
    if (sh->step->dry || !contents) return 0;
    int rc = buffer_pin(p, p->c.device, PS_READ, &from);
    if (rc == 0) {
        rc = be->copy_out(be, st->at[r].address, from, (size_t)p->c.nbytes);
        buffer_unpin(p, p->c.device);
    }
    if (rc < 0) memory(sh)->table->scratch_free(memory(sh), sh->host, st->staged[r]);
    return rc;
}

static int stage_in(ps_shard *sh, stripe *st, int r, bool contents)
{
    part *p = part_at(sh, st, r);
    ps_backend *be = sh->devices[p->c.device];
    void *to;
    int rc = 0;
    if (contents && !sh->step->dry) {
        rc = buffer_pin(p, p->c.device, PS_WRITE, &to);
        if (rc == 0) {
            rc = be->copy_in(be, to, st->at[r].address, (size_t)p->c.nbytes);
            buffer_unpin(p, p->c.device);
        }
    }
    memory(sh)->table->scratch_free(memory(sh), sh->host, st->staged[r]);
    st->staged[r] = NULL;
    return rc;
}

/* -- jobs ---------------------------------------------------------------------------------------------------------- */
/* Returns the device whose memory the part's bytes are sent from and received into. */
static int meeting_place(const ps_shard *sh, const part *p) { return sh->direct ? p->c.device : sh->host; }

/* Pins the part of rank r for a job, and stores the part's address and size in st->at[r]. */
static int hold(ps_shard *sh, stripe *st, int r, unsigned access)
{
    part *p = part_at(sh, st, r);
    int device = meeting_place(sh, p);
    if (p->c.chunk >= 0) {
        PS_TRY(ps_chunk_pin(sh->chunks, p->c.chunk, device, access, &st->at[r].address));
    } else {
        PS_TRY(buffer_take(sh, p));
        if (p->c.device != device) PS_TRY(stage_out(sh, st, r, access & PS_READ));
        else PS_TRY(buffer_pin(p, device, access, &st->at[r].address));
    }
    st->at[r].nbytes = p->c.nbytes;
    return 0;
}

/* Releases the pins of all hold() calls of a job. If `come` is set, the job has received bytes of other ranks. Bytes in
 * staging buffers are then copied to their parts. */
static int let_go(ps_shard *sh, stripe *st, bool come)
{
    int rc = 0;
    for (int r = 0; r < sh->size; r++) {
        part *p = part_at(sh, st, r);
        if (st->at[r].nbytes == 0) continue;
        int device = meeting_place(sh, p);
        if (p->c.chunk >= 0) {
            ps_chunk_unpin(sh->chunks, p->c.chunk, device);
        } else if (p->c.device != device) {
            int one = stage_in(sh, st, r, come);
            if (one < 0) rc = one;
        } else {
            buffer_unpin(p, device);
        }
        st->at[r].nbytes = 0;
    }
    return rc;
}

/* Returns the kind of memory of a stripe. All parts of a stripe are on the same device. */
static place place_of(const ps_shard *sh, const stripe *st)
{
    for (int r = 0; r < sh->size; r++)
        if (st->parts[r] >= 0) return meeting_place(sh, &sh->parts[st->parts[r]]) == sh->host ? ON_HOST : ON_DEVICE;
    return ON_HOST;
}

/* Starts a job on the stripe. If this rank cannot pin the parts, the job sends this rank's error to the other ranks,
 * and job_end returns the error on all ranks. */
static int job_begin(ps_shard *sh, stripe *st, int op, int dtype, uint64_t check)
{
    int rc = 0;
    for (int r = 0; rc == 0 && r < sh->size; r++) {
        part *p = part_at(sh, st, r);
        bool gather = op == OP_CHUNK_GATHER;
        st->at[r] = (ps_comm_part){ NULL, 0 };
        if (!p || (gather && p->grads)) continue;
        unsigned sent = PS_READ, here = gather ? PS_WRITE : PS_READ;
        if (op == OP_CHUNK_REDUCE && is_mine(sh, p)) sent |= PS_WRITE;
        if (op == OP_CHUNK_ALL_REDUCE) here |= PS_WRITE, sent |= PS_WRITE;
        rc = hold(sh, st, r, is_mine(sh, p) ? sent : here);
    }
    if (sh->step->dry) {
        if (rc < 0) let_go(sh, st, false);
        return rc;
    }
    if (rc < 0) {
        ps_error_kept error;
        ps_error_keep(&error);
        let_go(sh, st, false);
        ps_error_again(&error);
    }
    int started = group_job_start(sh->group, op, place_of(sh, st), dtype, number_of(sh, st), check, st->at, rc,
                                  &st->job);
    if (started < 0) let_go(sh, st, false);
    return started;
}

static int job_end(ps_shard *sh, stripe *st, bool come)
{
    int rc = 0;
    if (st->job) {                         /* a dry run has no job */
        double began = ps_now();
        rc = group_job_wait(sh->group, st->job);
        st->job = NULL;
        sh->waited_s += ps_now() - began;
    }
    int back = let_go(sh, st, come && rc == 0);
    return rc < 0 ? rc : back;
}

/* Waits for the job of the stripe, if it has one. Ignores the result of the job. */
static void stripe_end_job(ps_shard *sh, stripe *st)
{
    if (st->gathering || st->reducing) job_end(sh, st, false);
    st->gathering = st->reducing = false;
}

/* -- stripes ------------------------------------------------------------------------------------------------------- */
static void close_stripe(ps_shard *sh, stripe *st)
{
    st->open = st->stale = false;
    for (int r = 0; r < sh->size; r++) {
        part *p = part_at(sh, st, r);
        if (p && !p->grads && p->pins == 0) buffer_drop(p);
    }
}

static int gather_begin(ps_shard *sh, stripe *st)
{
    PS_TRY(job_begin(sh, st, OP_CHUNK_GATHER, PS_U8, 0));
    st->gathering = true;
    return 0;
}

static int gather_end(ps_shard *sh, stripe *st)
{
    st->gathering = false;
    for (int r = 0; r < sh->size; r++)                       /* nbytes is 0 for parts that hold gradients */
        if (st->at[r].nbytes > 0) part_at(sh, st, r)->whole = true;
    int rc = group_told(sh->group, job_end(sh, st, true));
    if (rc < 0) {
        for (int r = 0; r < sh->size; r++) if (part_at(sh, st, r)) part_at(sh, st, r)->whole = false;
        close_stripe(sh, st);
        return rc;
    }
    st->open = true;
    return 0;
}

static bool keeps(const ps_shard *sh, const stripe *st)
{
    for (int r = 0; r < sh->size; r++) if (st->parts[r] >= 0) return sh->parts[st->parts[r]].c.keeps;
    return false;
}

/* Called before another stripe is opened, if there is no list of gathers. Closes the least recently used stripes until
 * at most OPEN_UNPLANNED stripes are open. */
static void close_oldest(ps_shard *sh, const stripe *except)
{
    for (;;) {
        stripe *oldest = NULL;
        int n = 0;
        for (int32_t i = 0; i < sh->n_stripes; i++) {
            stripe *st = &sh->stripes[i];
            if (!st->open || keeps(sh, st)) continue;
            n++;
            if (st != except && st->pins == 0 && (!oldest || st->touched < oldest->touched)) oldest = st;
        }
        if (n <= OPEN_UNPLANNED || !oldest) return;
        close_stripe(sh, oldest);
    }
}

static int open_stripe(ps_shard *sh, stripe *st)
{
    if (st->open) return 0;
    if (!sh->expected && !sh->step->dry) close_oldest(sh, st);
    if (!st->gathering) PS_TRY(gather_begin(sh, st));
    return gather_end(sh, st);
}

int64_t ps_shard_comes(const ps_shard *sh, int32_t number)
{
    int64_t sum = 0;
    for (int32_t i = 0; i < sh->n_parts; i++) {
        const part *p = &sh->parts[i];
        if (p->used && p->c.stripe == number && !is_mine(sh, p)) sum += p->c.nbytes;
    }
    return sum;
}

/* Returns the stripe of the next gather in sh->expected, or -1. */
static int32_t coming(const ps_shard *sh)
{
    return sh->expected && sh->next < sh->expected->n ? sh->expected->list[sh->next].stripe : -1;
}

static void note_gather(ps_shard *sh, stripe *st)
{
    ps_gathers *record = &sh->record;
    st->noted = -1;
    if (!sh->noting) return;
    if (!ps_try_grow(record->list, record->capacity, record->n + 1)) {
        /* Record no gathers. The next step then has no list, and gathers each stripe at its first read. */
        sh->noting = false;
        record->n = 0;
        return;
    }
    st->noted = record->n;
    record->list[record->n++] = (ps_gather){ number_of(sh, st), pass_of_step(sh), 0 };
}

/* Begins the next gather in sh->expected early, before an op reads its stripe. If the stripe is open, or if it is
 * being gathered or reduced, does nothing. Each read of a stripe calls this function, so a later read begins the
 * gather. */
static int run_ahead(ps_shard *sh)
{
    int32_t next = coming(sh);
    if (next < 0) return 0;
    stripe *ahead = &sh->stripes[next];
    return ahead->open || ahead->gathering || ahead->reducing ? 0 : gather_begin(sh, ahead);
}

/* Discards the list of expected gathers, because the step differs from the list. After that, the expected number of
 * reads of each stripe is unknown. */
static void go_on_without(ps_shard *sh)
{
    sh->expected = NULL;
    for (int32_t i = 0; i < sh->n_stripes; i++) sh->stripes[i].until = -1;
}

/* Handles the first use of a stripe in a pass. */
static int begin_pass(ps_shard *sh, stripe *st)
{
    st->pass = sh->step->pass;
    st->uses = 0;
    st->until = st->noted = -1;
    if (keeps(sh, st) && st->open) return 0;
    note_gather(sh, st);
    if (coming(sh) == number_of(sh, st)) st->until = sh->expected->list[sh->next++].uses;
    else if (sh->expected) go_on_without(sh);
    return open_stripe(sh, st);
}

static void count_use(ps_shard *sh, stripe *st, int by)
{
    st->uses += by;
    if (sh->noting && st->noted >= 0) sh->record.list[st->noted].uses += by;
}

static int touch(ps_shard *sh, stripe *st)
{
    st->touched = ++sh->clock;
    if (st->pass != sh->step->pass) {
        PS_TRY(begin_pass(sh, st));
    } else {
        /* If the stripe has already been read `until` times, the step differs from the list. */
        if (st->until >= 0 && st->uses >= st->until) go_on_without(sh);
        PS_TRY(open_stripe(sh, st));
    }
    PS_TRY(run_ahead(sh));
    if (sh->n_touched < PS_MAX_IN) sh->touched[sh->n_touched++] = number_of(sh, st);
    count_use(sh, st, 1);
    return 0;
}

/* Called when an op begins. Closes the stripes that the previous op has read and that will not be read again. The
 * previous op itself cannot close them, because an op can fail and be repeated after it has unpinned its inputs. */
void ps_shard_tick(ps_shard *sh)
{
    while (sh->n_touched > 0) {
        stripe *st = &sh->stripes[sh->touched[--sh->n_touched]];
        bool done = st->until >= 0 && st->uses >= st->until && st->pass == sh->step->pass;
        if (done && st->open && st->pins == 0 && !keeps(sh, st) && coming(sh) != number_of(sh, st))
            close_stripe(sh, st);
    }
    ps_chunks_tick(sh->chunks);
}

/* Subtracts the reads of the failed op from the number of reads of each stripe. If the op is tried again, it repeats
 * these reads. Without the subtraction, this rank would count more reads than the other ranks. */
void ps_shard_failed(ps_shard *sh)
{
    while (sh->n_touched > 0) count_use(sh, &sh->stripes[sh->touched[--sh->n_touched]], -1);
}

void ps_shard_pass(ps_shard *sh)
{
    for (int32_t i = 0; i < sh->n_stripes; i++) {
        stripe *st = &sh->stripes[i];
        if (st->open && st->pins == 0 && !keeps(sh, st) && coming(sh) != i) close_stripe(sh, st);
    }
}

void ps_shard_forget(ps_shard *sh)
{
    sh->n_touched = 0;
    for (int32_t i = 0; i < sh->n_stripes; i++) {
        stripe *st = &sh->stripes[i];
        stripe_end_job(sh, st);
        for (int r = 0; r < sh->size; r++) if (part_at(sh, st, r)) part_at(sh, st, r)->grads = false;
        if (st->pins == 0) close_stripe(sh, st);
        else st->stale = true;
        st->pass = -1;
    }
}

void ps_shard_step_begin(ps_shard *sh, const ps_gathers *expected)
{
    ps_shard_forget(sh);
    sh->record.n = 0;
    sh->noting = true;
    sh->expected = expected && expected->n > 0 ? expected : NULL;
    sh->next = 0;
    sh->first_pass = sh->step->pass;
}

/* Returns a hash of 52 bits plus 1. The result is never 0, and a double represents it exactly. */
double ps_shard_expects(const ps_shard *sh)
{
    if (!sh->expected) return 0;
    uint64_t h = ps_xxh3(sh->expected->list, sh->expected->n * (int64_t)sizeof *sh->expected->list);
    return (double)(h >> 12) + 1;
}

void ps_shard_expect_none(ps_shard *sh) { sh->expected = NULL; }

/* Returns the recorded gathers, without the gathers whose stripe was not read. A stripe that only receives gradients
 * does not need its values. */
const ps_gathers *ps_shard_step_end(ps_shard *sh)
{
    int32_t n = 0;
    for (int32_t i = 0; i < sh->record.n; i++)
        if (sh->record.list[i].uses > 0) sh->record.list[n++] = sh->record.list[i];
    sh->record.n = n;
    sh->noting = false;
    sh->expected = NULL;
    return &sh->record;
}

/* -- gradients ----------------------------------------------------------------------------------------------------- */
int ps_shard_grads(ps_shard *sh, int32_t number)
{
    part *p = &sh->parts[number];
    stripe *st = &sh->stripes[p->c.stripe];
    if (p->grads) return 0;
    if (p->c.reads && !st->open && !p->c.keeps) {
        bool known = sh->expected != NULL;                   /* the list shows whether a read follows in this pass */
        bool follows = coming(sh) == p->c.stripe && sh->expected->list[sh->next].pass == pass_of_step(sh);
        if (follows || !known) {
            if (st->pass != sh->step->pass) PS_TRY(begin_pass(sh, st));
            else PS_TRY(open_stripe(sh, st));
            PS_TRY(run_ahead(sh));
        }
    }
    PS_TRY(buffer_take(sh, p));
    p->grads = true;
    return 0;
}

int ps_shard_reduce_begin(ps_shard *sh, int32_t number, bool everywhere, uint64_t check)
{
    const part *p = &sh->parts[number];
    stripe *st = &sh->stripes[p->c.stripe];
    if (st->gathering) PS_TRY(gather_end(sh, st));       /* the gather began early, and no op has read the stripe */
    PS_TRY(job_begin(sh, st, everywhere ? OP_CHUNK_ALL_REDUCE : OP_CHUNK_REDUCE, p->c.dtype, check));
    st->reducing = true;
    return 0;
}

int ps_shard_reduce_end(ps_shard *sh, int32_t number)
{
    stripe *st = &sh->stripes[sh->parts[number].c.stripe];
    if (!st->reducing) return 0;
    st->reducing = false;
    int rc = group_told(sh->group, job_end(sh, st, false));
    for (int r = 0; r < sh->size; r++) if (part_at(sh, st, r)) part_at(sh, st, r)->grads = false;
    if (st->pins == 0) close_stripe(sh, st);
    else st->stale = true;
    return rc;
}

/* -- pins ---------------------------------------------------------------------------------------------------------- */
static int shard_pin(ps_keeper *keeper, ps_storage *s, int device, unsigned access, void **out)
{
    ps_shard *sh = (ps_shard *)keeper;
    const lent *l = s->block;
    part *p = &sh->parts[l->part];
    stripe *st = &sh->stripes[p->c.stripe];
    bool reads = p->c.reads && !(access & PS_WRITE);
    if (reads && !s->engine.taken && !sh->alone && (st->open || !p->grads)) PS_TRY(touch(sh, st));
    /* A gather in progress also writes to the part, so it must end before the op writes to the part. */
    if (p->c.reads && (access & PS_WRITE) && st->gathering) PS_TRY(gather_end(sh, st));
    if (l->inner) {
        PS_TRY(ps_storage_pin(l->inner, device, access, out));
    } else {
        if (device != p->c.device)
            return ps_fail(PS_ESTATE, "a tensor in rank %d's chunks was requested on a device other than the compute "
                           "device", p->c.owner);
        if (reads && p->grads && !p->whole && !s->engine.taken && !sh->step->dry)
            return ps_fail(PS_ESTATE, "a parameter in rank %d's chunks was read after its last use in this pass, when "
                           "gradients had replaced its values; this step used parameters in another order than the "
                           "previous step", p->c.owner);
        PS_TRY(buffer_take(sh, p));
        PS_TRY(buffer_pin(p, device, access, out));
        *out = (char *)*out + l->offset;
    }
    if (p->c.reads && (access & PS_WRITE) && !p->grads) st->stale = true;
    p->pins++, st->pins++, s->pins++;
    return 0;
}

static void shard_unpin(ps_keeper *keeper, ps_storage *s, int device)
{
    ps_shard *sh = (ps_shard *)keeper;
    const lent *l = s->block;
    part *p = &sh->parts[l->part];
    stripe *st = &sh->stripes[p->c.stripe];
    if (l->inner) ps_storage_unpin(l->inner, device);
    else buffer_unpin(p, device);
    p->pins--, st->pins--, s->pins--;
    if (st->stale && st->pins == 0) close_stripe(sh, st);
}

/* -- parts and their storages -------------------------------------------------------------------------------------- */
static int stripe_need(ps_shard *sh, int32_t number)
{
    while (sh->n_stripes <= number) {
        PS_TRY(ps_grow(sh->stripes, sh->stripes_capacity, sh->n_stripes + 1));
        size_t n = (size_t)sh->size;
        stripe st = { .pass = -1, .until = -1, .noted = -1 };
        char *memory_of = ps_alloc0(n * (sizeof *st.at + sizeof *st.staged + sizeof *st.parts));
        if (!memory_of) return ps_fail_nomem(n * sizeof *st.at);
        st.at = (ps_comm_part *)(void *)memory_of;
        st.staged = (void **)(void *)(st.at + n);
        st.parts = (int32_t *)(void *)(st.staged + n);
        for (size_t r = 0; r < n; r++) st.parts[r] = -1;
        sh->stripes[sh->n_stripes++] = st;
    }
    return 0;
}

int ps_shard_part(ps_shard *sh, const ps_part_config *c, int32_t *out)
{
    if (c->owner < 0 || c->owner >= sh->size || c->nbytes <= 0 || c->stripe < 0 || c->stripe > 1 << 24 ||
        (c->chunk < 0 && c->owner == sh->rank) || (c->device != sh->device && c->device != sh->host))
        return ps_fail(PS_EINVAL, "cannot make a part with %lld bytes in stripe %d for rank %d of %d ranks",
                       (long long)c->nbytes, c->stripe, c->owner, sh->size);
    PS_TRY(stripe_need(sh, c->stripe));
    stripe *st = &sh->stripes[c->stripe];
    if (st->parts[c->owner] >= 0)
        return ps_fail(PS_EINVAL, "stripe %d already has a part of rank %d", c->stripe, c->owner);
    for (int r = 0; r < sh->size; r++)
        if (st->parts[r] >= 0 && part_at(sh, st, r)->c.device != c->device)
            return ps_fail(PS_EINVAL, "stripe %d has its part of rank %d on another device; all its parts must be on "
                           "one device", c->stripe, r);
    int32_t at = 0;
    while (at < sh->n_parts && sh->parts[at].used) at++;
    PS_TRY(ps_grow(sh->parts, sh->parts_capacity, at + 1));
    if (at == sh->n_parts) sh->n_parts++;
    sh->parts[at] = (part){ .c = *c, .used = true };
    st->parts[c->owner] = at;
    *out = at;
    return 0;
}

static void part_end(ps_shard *sh, part *p)
{
    stripe *st = &sh->stripes[p->c.stripe];
    stripe_end_job(sh, st);                 /* the job may still write to the part */
    if (p->pins == 0) buffer_drop(p);
    p->used = false;
    st->parts[p->c.owner] = -1;
    st->open = false;
    st->pass = -1;
}

int ps_shard_part_drop(ps_shard *sh, int32_t number)
{
    if (number < 0 || number >= sh->n_parts || !sh->parts[number].used)
        return ps_fail(PS_EINVAL, "there is no part %d", number);
    if (sh->parts[number].n_lent == 0) part_end(sh, &sh->parts[number]);
    return 0;
}

static lent *lent_new(ps_shard *sh, int32_t number, int64_t offset)
{
    lent *l = ps_alloc0(sizeof *l);
    if (!l) ps_fail_nomem(sizeof *l);
    else l->part = number, l->offset = offset;
    return l;
}

/* Moves s into the part of l. If this rank has the chunk of the part, s must be in this chunk, and `inner` must not be
 * NULL: the storage `inner` takes the position of s in the chunk. On other ranks, `inner` is NULL. */
static void lend(ps_shard *sh, lent *l, ps_storage *s, ps_storage *inner)
{
    if (inner) {
        ps_chunk_storage_hand_on(s, inner);
        l->inner = inner;
    }
    l->outer = s;
    l->next = sh->first;
    l->link = &sh->first;
    if (l->next) l->next->link = &l->next;
    sh->first = l;
    sh->parts[l->part].n_lent++;
    s->keeper = &sh->base;
    s->block = l;
    s->bytes.kept = true;
}

static int check_place(const ps_shard *sh, int32_t number, int64_t offset, int64_t nbytes)
{
    if (number < 0 || number >= sh->n_parts || !sh->parts[number].used)
        return ps_fail(PS_EINVAL, "there is no part %d", number);
    if (offset < 0 || nbytes <= 0 || offset + nbytes > sh->parts[number].c.nbytes)
        return ps_fail(PS_EINVAL, "bytes %lld to %lld do not fit a part of %lld", (long long)offset,
                       (long long)(offset + nbytes), (long long)sh->parts[number].c.nbytes);
    return 0;
}

/* Reads s, because another rank reads s too, and every rank must take part in the gather of its stripe. */
static int read_along(ps_storage *s)
{
    void *p;
    PS_TRY(ps_storage_pin(s, s->device, PS_READ, &p));
    ps_storage_unpin(s, s->device);
    return 0;
}

int ps_shard_adopt(ps_shard *sh, ps_storage *s, int32_t number, int64_t offset, const char *name, bool stays)
{
    PS_TRY(check_place(sh, number, offset, s->nbytes));
    if (s->pins > 0 || !s->block)
        return ps_fail(PS_ESTATE, "a tensor that is in use, or has no bytes, cannot be moved into a chunk");
    int32_t chunk = sh->parts[number].c.chunk;
    lent *l = lent_new(sh, number, offset);
    ps_storage *inner = l && chunk >= 0 ? ps_alloc0(sizeof *inner) : NULL;
    int rc = !l || (chunk >= 0 && !inner) ? ps_fail_nomem(sizeof *inner) : 0;
    if (rc == 0) rc = chunk >= 0 ? ps_chunk_adopt(sh->chunks, s, chunk, offset, name, stays) : read_along(s);
    if (rc < 0) {
        ps_free(inner);
        ps_free(l);
        return rc;
    }
    if (chunk < 0) ps_storage_free(s);
    lend(sh, l, s, inner);
    return 0;
}

int ps_shard_storage_new(ps_shard *sh, int32_t number, int64_t offset, int64_t nbytes, const char *name,
                         ps_storage **out)
{
    PS_TRY(check_place(sh, number, offset, nbytes));
    const part *p = &sh->parts[number];
    ps_storage *s = NULL, *inner = NULL;
    lent *l = lent_new(sh, number, offset);
    int rc = l ? 0 : PS_ENOMEM;
    if (rc == 0 && p->c.chunk >= 0) {
        inner = ps_alloc0(sizeof *inner);
        rc = inner ? ps_chunk_storage_new(sh->chunks, p->c.chunk, offset, nbytes, name, &s) : ps_fail_nomem(sizeof *s);
    } else if (rc == 0) {
        s = ps_alloc0(sizeof *s);
        if (s) *s = (ps_storage){ .nbytes = nbytes, .device = p->c.device, .refs = 1 };
        else rc = ps_fail_nomem(sizeof *s);
    }
    if (rc < 0) {
        ps_free(inner);
        ps_free(l);
        return rc;
    }
    lend(sh, l, s, inner);
    *out = s;
    return 0;
}

static void inner_release(ps_storage *inner, bool closing)
{
    if (!inner) return;
    if (closing || inner->refs == 1) {
        ps_storage_free(inner);
        inner->bytes.dropped = true;
    }
    if (--inner->refs == 0) ps_free(inner);
}

static void take_back(ps_shard *sh, ps_storage *s, bool closing)
{
    lent *l = s->block;
    part *p = &sh->parts[l->part];
    *l->link = l->next;
    if (l->next) l->next->link = l->link;
    s->block = NULL;
    /* If s is the last storage of the part, freeing s frees the part. Therefore a job of the stripe must end before. */
    if (p->n_lent == 1) stripe_end_job(sh, &sh->stripes[p->c.stripe]);
    inner_release(l->inner, closing);
    if (--p->n_lent == 0) part_end(sh, p);
    ps_free(l);
}

static void shard_free(ps_keeper *keeper, ps_storage *s) { take_back((ps_shard *)keeper, s, false); }

void ps_shard_storage_undo(ps_shard *sh, ps_storage *s)
{
    take_back(sh, s, false);
    ps_free(s);
}

static const lent *lent_of(const ps_shard *sh, const ps_storage *s)
{
    return s->keeper == &sh->base ? s->block : NULL;
}

bool ps_shard_has(const ps_shard *sh, const ps_storage *s) { return lent_of(sh, s) != NULL; }

ps_storage *ps_shard_own(const ps_shard *sh, ps_storage *s)
{
    const lent *l = lent_of(sh, s);
    if (!l) return s;
    return is_mine(sh, &sh->parts[l->part]) ? l->inner : NULL;
}

int32_t ps_shard_chunk(const ps_shard *sh, const ps_storage *s)
{
    const lent *l = lent_of(sh, s);
    return l ? sh->parts[l->part].c.chunk : ps_storage_chunk(sh->chunks, s);
}

/* -- the sharding layer -------------------------------------------------------------------------------------------- */
static const ps_keeper_table shard_table = { .name = "shard", .free = shard_free, .pin = shard_pin,
                                             .unpin = shard_unpin };

int ps_shard_new(ps_chunks *chunks, const ps_step *step, ps_backend *const *devices, int device, int host,
                 ps_group *group, ps_shard **out)
{
    ps_shard *sh = ps_alloc0(sizeof *sh);
    if (!sh) return ps_fail_nomem(sizeof *sh);
    sh->base.table = &shard_table;
    sh->chunks = chunks;
    sh->step = step;
    sh->buffers = ps_chunks_mem(chunks);
    sh->devices = devices;
    sh->device = device, sh->host = host;
    sh->group = group;
    sh->direct = group->device == device;
    group_retain(group);
    sh->rank = group->comm->rank, sh->size = group->comm->size;
    *out = sh;
    return 0;
}

void ps_shard_close(ps_shard *sh)
{
    if (!sh) return;
    ps_shard_forget(sh);
    while (sh->first) {
        ps_storage *s = sh->first->outer;
        s->bytes.dropped = true;
        s->pins = 0;
        take_back(sh, s, true);
    }
    for (int32_t i = 0; i < sh->n_parts; i++) buffer_drop(&sh->parts[i]);
    for (int32_t i = 0; i < sh->n_stripes; i++) ps_free(sh->stripes[i].at);
    ps_free(sh->stripes);
    ps_free(sh->parts);
    ps_free(sh->record.list);
    ps_group_close(sh->group);
    ps_free(sh);
}
