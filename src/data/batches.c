/* SPDX-License-Identifier: BSD-3-Clause
 * Prepares batches of rows before a training step asks for them. A background thread makes the rows of each epoch
 * (rows.c) and copies them into a ring of batches. A batch depends only on the examples, the settings, the epoch and
 * the row at which the batch begins. Therefore the size of the ring (`ahead`) does not change any batch, and a run that
 * resumes at a position gets the same batches.
 *
 * Threads: the background thread owns the slot that it fills, and no other thread touches that slot. The caller owns
 * the oldest ready slot until the caller's next call. The fields below the mark (lock) may change only while `lock` is
 * held. */
#define _GNU_SOURCE
#include "base/alloc.h"
#include "base/thread.h"
#include "data/examples.h"
#include <pthread.h>
#include <string.h>

enum { STEPS = 8 };                     /* number of padded lengths between n and 2 * n tokens, for a large n */

typedef struct slot {
    ps_batch batch;
    bool ends;                          /* true if the slot marks the end of an epoch and contains no batch */
    void *memory;
    int64_t room;                       /* size of `memory` in bytes */
} slot;

/* The position of a batch that all ranks make together. `row` is the batch's first row. The first step begins at row
 * `base`, and each step has `accumulate` batches. */
typedef struct place { int64_t epoch, row, base; } place;

struct ps_batches {
    ps_batches_config c;
    ps_rows_config rows_config;         /* the settings; its lists are copies that this struct owns */
    ps_examples *examples;              /* retained */
    int64_t global_batch;               /* number of rows of a batch on all ranks together */
    int64_t step;                       /* number of rows of a step on all ranks together */
    slot *ring;                         /* [ahead + 1] */
    pthread_mutex_t lock;
    pthread_cond_t ready;               /* signalled when a slot is filled, when an epoch's rows are made, and on an
                                         * error */
    pthread_cond_t wanted;              /* signalled when a slot is free, when the position is set, and when the thread
                                         * must end */
    pthread_t thread;
    bool has_thread;
    /* (lock) */
    int head, count;                    /* head: index of the oldest ready slot. count: number of ready slots, which
                                         * follow each other modulo ahead + 1. */
    bool lent;                          /* true while the caller uses the oldest slot */
    bool stop;
    uint32_t generation;                /* number of calls of ps_batches_seek; a batch that was begun before such a call
                                         * is discarded */
    place making;                       /* position of the batch that the thread will make next */
    ps_rows *rows;                      /* the rows of epoch `epoch`, retained */
    int64_t epoch;
    int64_t arranging;                  /* the epoch whose rows the thread is making, or -1 */
    ps_error_kept failed;               /* error of the batch at `making`; cleared when the caller gets the error */
};

/* -- a batch ------------------------------------------------------------------------------------------------------- */
/* Returns the length, in tokens, to which the rows of a batch are padded. `longest` is the length of the longest row.
 * The result is a multiple of `step` tokens. `step` is larger for longer rows, so that only a few lengths occur. */
static int64_t padded(const ps_batches *b, int64_t longest)
{
    int64_t seq = b->rows_config.seq, step = b->c.multiple;
    if (b->c.to_seq) return seq;
    while (step > 1 && longest > 2 * STEPS * step) step *= 2;
    int64_t n = (longest + step - 1) / step * step, most = seq > longest ? seq : longest;
    n = n < most ? n : most;
    return n > 1 ? n : 1;
}

/* Finds this rank's first row in the batch at p, and the number of this rank's rows. An incomplete last batch that is
 * not filled up is divided among the ranks as evenly as possible. */
static void own_rows(const ps_batches *b, place p, int64_t total, int64_t *first, int64_t *n)
{
    int64_t there = total - p.row < b->global_batch ? total - p.row : b->global_batch;
    *first = p.row + b->c.rank * b->c.batch;
    *n = b->c.batch;
    if (b->c.fills || there == b->global_batch) return;
    int64_t from = there * b->c.rank / b->c.world_size;
    *first = p.row + from;
    *n = there * (b->c.rank + 1) / b->c.world_size - from;
}

/* Allocates a slot's arrays. Each array has rows * length values. */
static int make_room(const ps_batches *b, slot *s, ps_rows_batch *fill)
{
    int64_t size, nbytes;
    int arrays = 3 + (b->rows_config.packing != 0) + (b->c.weights != 0);
    if (__builtin_mul_overflow(fill->rows, fill->length, &size) || __builtin_mul_overflow(size, 4 * arrays, &nbytes))
        return ps_fail(PS_ENOMEM, "a batch of %lld rows of %lld tokens is too large", (long long)fill->rows,
                       (long long)fill->length);
    if (nbytes > s->room) {
        void *memory = ps_realloc(s->memory, (size_t)nbytes);
        if (!memory) return ps_fail_nomem((size_t)nbytes);
        s->memory = memory;
        s->room = nbytes;
    }
    int32_t *at = s->memory;
    fill->ids = at, fill->labels = at + size, fill->mask = at + 2 * size;
    at += 3 * size;
    if (b->rows_config.packing) fill->positions = at, at += size;
    if (b->c.weights) fill->weights = (float *)at;
    return 0;
}

static int make_batch(const ps_batches *b, const ps_rows *rows, int64_t total, place p, slot *s)
{
    int64_t first, n, from = p.row - (p.row - p.base) % b->step, count = b->step;
    own_rows(b, p, total, &first, &n);
    if (!b->c.fills) from = first, count = n;
    int64_t longest = ps_rows_longest(rows, from, count);
    ps_rows_batch fill = { .rows = n, .length = padded(b, longest), .real = n, .pad = b->c.pad, .by = b->c.by,
                           .filler = from < total - 1 ? from : total - 1 };
    PS_TRY(make_room(b, s, &fill));
    PS_TRY(rows_check(rows));
    PS_TRY(ps_rows_fill(rows, first, &fill));
    int64_t next = p.row + b->global_batch;
    s->batch = (ps_batch){ .epoch = p.epoch, .first = first, .next = next < total ? next : total, .rows = n,
                           .length = fill.length, .ids = fill.ids, .labels = fill.labels, .mask = fill.mask,
                           .positions = fill.positions, .weights = fill.weights };
    return 0;
}

/* Returns whether the thread can make the batch at `making`. The rows of the batch must exist, and so must the rows
 * that decide the batch's length and whether the epoch ends. The caller holds the lock. */
static bool has_rows(const ps_batches *b)
{
    place p = b->making;
    if (!b->rows || b->epoch != p.epoch) return b->examples->finished;
    if (rows_complete(b->rows)) return true;
    int64_t step = p.row - (p.row - p.base) % b->step + b->step, batch = p.row + b->global_batch;
    return rows_count(b->rows) >= (step > batch ? step : batch);
}

/* -- the background thread --------------------------------------------------------------------------------------- */
/* Makes the rows of an epoch and stores them in b->rows. The caller holds the lock. The lock is released while the rows
 * are made. */
static int arrange(ps_batches *b, int64_t epoch)
{
    ps_rows_config c = b->rows_config;
    ps_rows_info info;
    ps_rows *rows = NULL;
    uint32_t generation = b->generation;
    c.epoch = epoch;
    b->arranging = epoch;
    pthread_mutex_unlock(&b->lock);
    int rc = ps_rows_new(b->examples, &c, &info, &rows);
    pthread_mutex_lock(&b->lock);
    b->arranging = -1;
    if (rc == 0 && generation == b->generation) {
        ps_rows_free(b->rows);
        b->rows = rows;
        b->epoch = epoch;
    } else ps_rows_free(rows);
    pthread_cond_broadcast(&b->ready);
    return rc;
}

/* Makes the next batch, or marks the end of the epoch. The caller holds the lock. If ps_batches_seek is called while
 * the batch is being made, the batch is discarded. */
static void make_next(ps_batches *b)
{
    uint32_t generation = b->generation;
    place p = b->making;
    int rc = b->epoch == p.epoch && b->rows ? 0 : arrange(b, p.epoch);
    if (generation != b->generation) return;
    slot *s = &b->ring[(b->head + b->count) % (b->c.ahead + 1)];
    int64_t total = rc == 0 ? rows_count(b->rows) : 0;
    bool ends = p.row >= total || (b->c.drop_last && p.row + b->global_batch > total);
    if (rc == 0) s->ends = ends;
    if (rc == 0 && !ends) {
        ps_rows *rows = b->rows;
        rows_retain(rows);
        pthread_mutex_unlock(&b->lock);
        rc = make_batch(b, rows, total, p, s);
        pthread_mutex_lock(&b->lock);
        ps_rows_free(rows);
    }
    if (generation != b->generation) return;
    if (rc < 0) {
        ps_error_keep(&b->failed);
    } else {
        b->count++;
        b->making = ends ? (place){ p.epoch + 1, 0, 0 } : (place){ p.epoch, s->batch.next, p.base };
    }
    pthread_cond_broadcast(&b->ready);
}

static void *maker(void *arg)
{
    ps_batches *b = arg;
    pthread_setname_np(pthread_self(), "ps-batches");
    pthread_mutex_lock(&b->lock);
    for (;;) {
        while (!b->stop && (b->failed.code || b->count == b->c.ahead + b->lent || !has_rows(b)))
            pthread_cond_wait(&b->wanted, &b->lock);
        if (b->stop) break;
        make_next(b);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

/* -- the caller's side --------------------------------------------------------------------------------------------- */
static int check(const ps_batches_config *c)
{
    if (c->batch < 1 || c->accumulate < 1 || c->multiple < 1 || c->ahead < 1)
        return ps_fail(PS_EINVAL, "batch, accumulate, multiple and ahead must be at least 1, not %lld, %lld, %lld and "
                       "%d", (long long)c->batch, (long long)c->accumulate, (long long)c->multiple, c->ahead);
    if (c->world_size < 1 || c->rank < 0 || c->rank >= c->world_size)
        return ps_fail(PS_EINVAL, "a loader's rank is 0 to world_size - 1: %d of %d", c->rank, c->world_size);
    return 0;
}

static int copy_lists(ps_batches *b, const ps_rows_config *c)
{
    size_t n = (size_t)c->n_sources;
    int64_t *counts = ps_alloc((n + 1) * sizeof *counts);
    double *weights = ps_alloc((n + 1) * sizeof *weights);
    b->rows_config.counts = counts, b->rows_config.weights = weights;
    if (!counts || !weights) return ps_fail_nomem((n + 1) * sizeof *counts);
    memcpy(counts, c->counts, n * sizeof *counts);
    memcpy(weights, c->weights, n * sizeof *weights);
    return 0;
}

int ps_batches_new(ps_examples *e, const ps_rows_config *rows, const ps_batches_config *config, ps_rows *first,
                   ps_batches **out)
{
    PS_NEED(e);
    PS_NEED(rows);
    PS_NEED(config);
    PS_NEED(first);
    PS_NEED(out);
    PS_TRY(check(config));
    int64_t global_batch, step, end;
    if (__builtin_mul_overflow(config->batch, (int64_t)config->world_size, &global_batch) ||
        __builtin_mul_overflow(global_batch, config->accumulate, &step) ||
        __builtin_add_overflow(step, rows_count(first), &end))
        return ps_fail(PS_EINVAL, "steps of %lld batches of %lld rows on each of %d ranks are too large",
                       (long long)config->accumulate, (long long)config->batch, config->world_size);
    ps_batches *b = ps_alloc0(sizeof *b);
    if (!b) return ps_fail_nomem(sizeof *b);
    b->c = *config, b->rows_config = *rows, b->global_batch = global_batch, b->step = step, b->arranging = -1;
    examples_retain(e);
    rows_retain(first);
    b->examples = e, b->rows = first, b->epoch = rows->epoch, b->making = (place){ rows->epoch, 0, 0 };
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->ready, NULL);
    pthread_cond_init(&b->wanted, NULL);
    int rc = copy_lists(b, rows);
    if (rc == 0 && !(b->ring = ps_alloc0(((size_t)config->ahead + 1) * sizeof *b->ring)))
        rc = ps_fail_nomem(((size_t)config->ahead + 1) * sizeof *b->ring);
    if (rc < 0) ps_batches_free(b);
    else *out = b;
    return rc;
}

int ps_batches_next(ps_batches *b, ps_batch *out)
{
    PS_NEED(b);
    PS_NEED(out);
    if (!b->has_thread) {
        int rc = ps_thread_start(&b->thread, maker, b);
        if (rc) return ps_fail(PS_ENOMEM, "the loader's thread cannot be started: %s", strerror(rc));
        b->has_thread = true;
    }
    pthread_mutex_lock(&b->lock);
    if (b->lent) {
        b->lent = false;
        b->head = (b->head + 1) % (b->c.ahead + 1);
        b->count--;
        pthread_cond_signal(&b->wanted);
    }
    pthread_cond_signal(&b->wanted);                     /* the script may have added rows */
    while (!b->count && !b->failed.code && has_rows(b)) pthread_cond_wait(&b->ready, &b->lock);
    int rc;
    if (!b->count && !b->failed.code) {
        rc = PS_BATCHES_MORE;
    } else if (b->count) {
        const slot *s = &b->ring[b->head];
        *out = s->batch;
        b->lent = true;
        rc = !s->ends;
    } else {                            /* all batches before the failed batch were returned first */
        rc = ps_error_again(&b->failed);
        b->failed.code = 0;
    }
    pthread_cond_signal(&b->wanted);
    pthread_mutex_unlock(&b->lock);
    return rc;
}

int ps_batches_examples(ps_batches *b, ps_examples *e)
{
    PS_NEED(b);
    PS_NEED(e);
    if (!e->finished) return ps_fail(PS_ESTATE, "these examples are not finished");
    examples_retain(e);
    pthread_mutex_lock(&b->lock);
    ps_examples *before = b->examples;
    b->examples = e;
    pthread_cond_signal(&b->wanted);
    pthread_mutex_unlock(&b->lock);
    ps_examples_free(before);
    return 0;
}

int ps_batches_rows(ps_batches *b, int64_t epoch, ps_rows_info *info, ps_rows **out)
{
    PS_NEED(b);
    PS_NEED(info);
    PS_NEED(out);
    pthread_mutex_lock(&b->lock);
    while (b->arranging == epoch) pthread_cond_wait(&b->ready, &b->lock);
    bool there = b->rows && b->epoch == epoch;
    if (there) {
        rows_retain(b->rows);
        *out = b->rows;
    }
    pthread_mutex_unlock(&b->lock);
    if (there) {
        rows_info(*out, info);
        return 0;
    }
    ps_rows_config c = b->rows_config;
    c.epoch = epoch;
    return ps_rows_new(b->examples, &c, info, out);
}

int ps_batches_seek(ps_batches *b, int64_t epoch, ps_rows *rows, int64_t row)
{
    PS_NEED(b);
    PS_NEED(rows);
    if (epoch < 0 || row < 0 || row > rows_count(rows))
        return ps_fail(PS_ERANGE, "a loader cannot go to row %lld of epoch %lld, which has %lld rows", (long long)row,
                       (long long)epoch, (long long)rows_count(rows));
    rows_retain(rows);
    pthread_mutex_lock(&b->lock);
    ps_rows_free(b->rows);
    b->rows = rows;
    b->epoch = epoch;
    b->making = (place){ epoch, row, row % b->step ? row : 0 };
    b->count = 0;
    b->lent = false;
    b->failed.code = 0;
    b->generation++;
    pthread_cond_signal(&b->wanted);
    pthread_mutex_unlock(&b->lock);
    return 0;
}

void ps_batches_free(ps_batches *b)
{
    if (!b) return;
    if (b->has_thread) {
        pthread_mutex_lock(&b->lock);
        b->stop = true;
        pthread_cond_signal(&b->wanted);
        pthread_mutex_unlock(&b->lock);
        pthread_join(b->thread, NULL);
    }
    pthread_mutex_destroy(&b->lock);
    pthread_cond_destroy(&b->ready);
    pthread_cond_destroy(&b->wanted);
    for (int i = 0; b->ring && i <= b->c.ahead; i++) ps_free(b->ring[i].memory);
    ps_free(b->ring);
    ps_rows_free(b->rows);
    ps_free((void *)b->rows_config.counts);
    ps_free((void *)b->rows_config.weights);
    ps_examples_free(b->examples);
    ps_free(b);
}
