/* SPDX-License-Identifier: BSD-3-Clause
 * The loader of token shards. A background thread copies batches from the shards and keeps a ring of batches ready.
 *
 * The loader reads the tokens [first, last) of the concatenated shards. It divides them into windows. A window has
 * seq + 1 tokens, and consecutive windows begin seq tokens apart. Two consecutive windows share one token, because the
 * target of each token is the next token. An epoch has `windows` windows. If epochs are shuffled, the first window of
 * an epoch begins at a random offset in [0, seq), and a keyed bijection determines the order of the windows. The offset
 * and the bijection depend only on the seed and the epoch. So a batch depends only on (config, epoch, batch). A loader
 * has no other state. Therefore it resumes exactly at a position, and `ahead` does not change any batch.
 *
 * Several ranks make the same batches as one process whose batches have batch * world_size rows, and count positions
 * like this process. Each rank makes only its own rows of each batch, and does not depend on other ranks.
 *
 * Threads: the background thread owns the slot that it fills, and no other thread touches that slot. The caller owns
 * the oldest ready slot. The counters and the fields below the mark (lock) may change only while `lock` is held. All
 * memory is allocated in ps_loader_new. */
#define _GNU_SOURCE
#include "data/tokens.h"
#include "base/alloc.h"
#include "base/philox.h"
#include "base/thread.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { FEISTEL_ROUNDS = 8, OFFSET_DRAW = 255 };     /* OFFSET_DRAW: a round number that the Feistel network never
                                                     * uses */

struct ps_loader {
    ps_loader_config c;
    int n;
    ps_tokens **shards;         /* [n], retained */
    int64_t *starts;            /* [n + 1] index of each shard's first token in the concatenation */
    int64_t windows, batches;   /* number of windows and batches per epoch, equal in all epochs and on all ranks */
    int64_t global_batch;       /* number of rows of a batch on all ranks together */
    int half_bits;              /* the smallest number >= 1 with windows <= 4^half_bits; see shuffled() */
    int32_t *ring;              /* [ahead][batch][seq + 1] */
    int64_t slot_numel;
    pthread_mutex_t lock;
    pthread_cond_t ready;       /* signalled when a slot is filled, or when filling a slot fails */
    pthread_cond_t wanted;      /* signalled when a slot is free, when the position is set, and when the loader ends */
    pthread_t thread;
    bool has_lock, has_thread;
    /* (lock) */
    int head, count;            /* head: index of the oldest ready slot. count: number of ready slots, which follow each
                                 * other modulo `ahead`. */
    bool stop;
    uint32_t generation;        /* number of calls of set_position; a batch begun before such a call is discarded */
    ps_loader_position next;    /* position of the batch that the caller will get next */
    ps_loader_position making;  /* position of the batch that the thread will make next */
    ps_error_kept failed;       /* error of the batch at `making`; the thread waits until a position is set */
};

/* -- which window ------------------------------------------------------------------------------------------------ */
static ps_philox draw(const ps_loader *l, int64_t epoch, int round, uint64_t value)
{
    return ps_philox4x32(l->c.seed, value | (uint64_t)round << 56, (uint64_t)epoch);
}

static int64_t epoch_offset(const ps_loader *l, int64_t epoch)
{
    if (!l->c.shuffle) return 0;
    ps_philox r = draw(l, epoch, OFFSET_DRAW, 0);
    uint64_t u = (uint64_t)r.v[0] << 32 | r.v[1];
    return (int64_t)((unsigned __int128)u * (uint64_t)l->c.seq >> 64);
}

/* Applies a bijection of [0, windows) to `index`. The bijection is a Feistel network on numbers of 2 * half_bits bits.
 * The network is applied repeatedly, until the result is less than `windows`. */
static int64_t shuffled(const ps_loader *l, int64_t epoch, int64_t index)
{
    uint64_t mask = (UINT64_C(1) << l->half_bits) - 1, v = (uint64_t)index;
    do {
        uint64_t left = v >> l->half_bits, right = v & mask;
        for (int round = 0; round < FEISTEL_ROUNDS; round++) {
            ps_philox r = draw(l, epoch, round, right);
            uint64_t mixed = left ^ (((uint64_t)r.v[0] << 32 | r.v[1]) & mask);
            left = right, right = mixed;
        }
        v = left << l->half_bits | right;
    } while (v >= (uint64_t)l->windows);
    return (int64_t)v;
}

/* Copies tokens [at, at + n) of the concatenated shards to dst. */
static int copy_tokens(const ps_loader *l, int64_t at, int64_t n, int32_t *dst)
{
    int low = 0, high = l->n - 1;           /* search for the last shard that begins at or before `at` */
    while (low < high) {
        int mid = low + (high - low + 1) / 2;
        if (l->starts[mid] <= at) low = mid;
        else high = mid - 1;
    }
    for (; n > 0; low++) {
        int64_t here = l->starts[low + 1] - at;
        if (here > n) here = n;
        if (here > 0) PS_TRY(tokens_copy(l->shards[low], at - l->starts[low], here, l->c.vocab, dst));
        at += here, dst += here, n -= here;
    }
    return 0;
}

static int make_batch(const ps_loader *l, ps_loader_position p, int32_t *slot)
{
    int64_t row_numel = l->c.seq + 1, offset = epoch_offset(l, p.epoch);
    for (int64_t row = 0; row < l->c.batch; row++) {
        int64_t window = p.batch * l->global_batch + l->c.rank * l->c.batch + row;
        if (l->c.shuffle) window = shuffled(l, p.epoch, window);
        PS_TRY(copy_tokens(l, l->c.first + offset + window * l->c.seq, row_numel, slot + row * row_numel));
    }
    return 0;
}

/* -- the background thread --------------------------------------------------------------------------------------- */
static void *maker(void *arg)
{
    ps_loader *l = arg;
    pthread_setname_np(pthread_self(), "ps-loader");
    pthread_mutex_lock(&l->lock);
    for (;;) {
        while (!l->stop && (l->failed.code || l->count == l->c.ahead)) pthread_cond_wait(&l->wanted, &l->lock);
        if (l->stop) break;
        ps_loader_position p = l->making;
        uint32_t generation = l->generation;
        int32_t *slot = l->ring + (l->head + l->count) % l->c.ahead * l->slot_numel;
        pthread_mutex_unlock(&l->lock);
        int rc = make_batch(l, p, slot);
        pthread_mutex_lock(&l->lock);
        if (generation != l->generation) continue;
        if (rc < 0) {
            ps_error_keep(&l->failed);
        } else {
            l->count++;
            l->making.batch++;
            if (l->making.batch == l->batches) l->making = (ps_loader_position){ p.epoch + 1, 0 };
        }
        pthread_cond_signal(&l->ready);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static int start_thread(ps_loader *l)
{
    if (pthread_mutex_init(&l->lock, NULL) || pthread_cond_init(&l->ready, NULL) || pthread_cond_init(&l->wanted, NULL))
        return ps_fail(PS_ENOMEM, "cannot make a lock for a loader");
    l->has_lock = true;
    int rc = ps_thread_start(&l->thread, maker, l);
    if (rc) return ps_fail(PS_ENOMEM, "cannot start a loader's thread: %s", strerror(rc));
    l->has_thread = true;
    return 0;
}

/* -- making a loader ---------------------------------------------------------------------------------------------- */
static int check_config(int n, ps_tokens *const *shards, const ps_loader_config *c)
{
    if (n < 1) return ps_fail(PS_EINVAL, "a loader needs at least one token file");
    for (int i = 0; i < n; i++)
        if (!shards[i]) return ps_fail(PS_EINVAL, "token file %d of a loader is NULL", i);
    if (c->batch < 1 || c->seq < 1)
        return ps_fail(PS_EINVAL, "a loader's batch and seq must be at least 1, not %lld and %lld", (long long)c->batch,
                       (long long)c->seq);
    if (c->ahead < 1) return ps_fail(PS_EINVAL, "a loader's ahead must be at least 1, not %d", c->ahead);
    if (c->vocab < 0) return ps_fail(PS_EINVAL, "a loader's vocab is %lld; it must be 0 (not checked) or more",
                                     (long long)c->vocab);
    if (c->world_size < 0) return ps_fail(PS_EINVAL, "a loader's world_size must be at least 1, not %d", c->world_size);
    int32_t size = c->world_size ? c->world_size : 1;
    if (c->rank < 0 || c->rank >= size)
        return ps_fail(PS_EINVAL, "a loader's rank is 0 to world_size - 1: %d of %d", c->rank, size);
    return 0;
}

/* Determines the range of tokens and the size of an epoch. `there` is the number of tokens in all shards. */
static int plan(ps_loader *l, int64_t there)
{
    ps_loader_config *c = &l->c;
    if (c->last == 0) c->last = there;
    if (c->first < 0 || c->last < c->first || c->last > there)
        return ps_fail(PS_ERANGE, "a loader cannot read tokens [%lld, %lld): its files have %lld tokens",
                       (long long)c->first, (long long)c->last, (long long)there);
    /* A shuffled epoch begins 0 to seq - 1 tokens after c->first. All its windows must fit even if it begins last. */
    int64_t range = c->last - c->first, spare = c->shuffle ? c->seq : 1, need, slots, bytes;
    char ranks[48] = "";
    if (c->world_size > 1) snprintf(ranks, sizeof ranks, " on each of %d ranks", c->world_size);
    if (__builtin_mul_overflow(c->batch, (int64_t)c->world_size, &l->global_batch) ||
        __builtin_mul_overflow(l->global_batch, c->seq, &need) || __builtin_add_overflow(need, spare, &need))
        return ps_fail(PS_EINVAL, "a batch of %lld x %lld tokens%s is too large", (long long)c->batch,
                       (long long)c->seq, ranks);
    if (range < need)
        return ps_fail(PS_EINVAL, "too few tokens for one batch: %lld x %lld%s needs %lld, %lld are there; use a "
                       "smaller batch or seq, or more data", (long long)c->batch, (long long)c->seq, ranks,
                       (long long)need, (long long)range);
    l->windows = (range - spare) / c->seq;
    l->batches = l->windows / l->global_batch;
    l->half_bits = 1;
    while (l->windows > INT64_C(1) << (2 * l->half_bits)) l->half_bits++;
    /* slot_numel is at most 2 * need and therefore cannot overflow, because `need` is at most the number of tokens. */
    l->slot_numel = c->batch * (c->seq + 1);
    if (__builtin_mul_overflow(l->slot_numel, c->ahead, &slots) || __builtin_mul_overflow(slots, 4, &bytes))
        return ps_fail(PS_EINVAL, "a loader cannot prepare %d batches of %lld x %lld tokens ahead: they are too large; "
                       "lower ahead", c->ahead, (long long)c->batch, (long long)c->seq);
    if (!(l->ring = ps_alloc((size_t)bytes))) return ps_fail_nomem(bytes);
    return 0;
}

static int set_up(ps_loader *l, int n, ps_tokens *const *shards)
{
    size_t shards_nbytes = (size_t)n * sizeof *l->shards, starts_nbytes = ((size_t)n + 1) * sizeof *l->starts;
    if (!(l->shards = ps_alloc(shards_nbytes))) return ps_fail_nomem(shards_nbytes);
    if (!(l->starts = ps_alloc(starts_nbytes))) return ps_fail_nomem(starts_nbytes);
    l->starts[0] = 0;
    for (; l->n < n; l->n++) {
        tokens_retain(shards[l->n]);
        l->shards[l->n] = shards[l->n];
        l->starts[l->n + 1] = l->starts[l->n] + shards[l->n]->count;
    }
    PS_TRY(plan(l, l->starts[n]));
    return start_thread(l);
}

int ps_loader_new(int n, ps_tokens *const *shards, const ps_loader_config *config, ps_loader **out)
{
    PS_NEED(shards);
    PS_NEED(config);
    PS_NEED(out);
    PS_TRY(check_config(n, shards, config));
    ps_loader *l = ps_alloc0(sizeof *l);
    if (!l) return ps_fail_nomem(sizeof *l);
    l->c = *config;
    if (!l->c.world_size) l->c.world_size = 1;
    int rc = set_up(l, n, shards);
    if (rc < 0) ps_loader_free(l);
    else *out = l;
    return rc;
}

void ps_loader_free(ps_loader *l)
{
    if (!l) return;
    if (l->has_thread) {
        pthread_mutex_lock(&l->lock);
        l->stop = true;
        pthread_cond_signal(&l->wanted);
        pthread_mutex_unlock(&l->lock);
        pthread_join(l->thread, NULL);
    }
    if (l->has_lock) {
        pthread_cond_destroy(&l->wanted);
        pthread_cond_destroy(&l->ready);
        pthread_mutex_destroy(&l->lock);
    }
    for (int i = 0; i < l->n; i++) ps_tokens_close(l->shards[i]);
    ps_free(l->ring);
    ps_free(l->starts);
    ps_free(l->shards);
    ps_free(l);
}

/* -- the caller's side ------------------------------------------------------------------------------------------- */
int64_t ps_loader_batches(const ps_loader *l) { return l ? l->batches : 0; }

int ps_loader_next(ps_loader *l, int32_t *x, int32_t *y)
{
    PS_NEED(l);
    PS_NEED(x);
    PS_NEED(y);
    pthread_mutex_lock(&l->lock);
    if (l->next.batch == l->batches) {
        l->next = (ps_loader_position){ l->next.epoch + 1, 0 };
        pthread_mutex_unlock(&l->lock);
        return 0;
    }
    while (!l->count && !l->failed.code) pthread_cond_wait(&l->ready, &l->lock);
    if (!l->count) {            /* all batches before the failed batch were returned first */
        int rc = ps_error_again(&l->failed);
        pthread_mutex_unlock(&l->lock);
        return rc;
    }
    const int32_t *row = l->ring + l->head * l->slot_numel;
    pthread_mutex_unlock(&l->lock);
    int64_t seq = l->c.seq;
    for (int64_t i = 0; i < l->c.batch; i++, row += seq + 1) {
        memcpy(x + i * seq, row, (size_t)seq * sizeof *x);
        memcpy(y + i * seq, row + 1, (size_t)seq * sizeof *y);
    }
    pthread_mutex_lock(&l->lock);
    l->head = (l->head + 1) % l->c.ahead;
    l->count--;
    l->next.batch++;
    pthread_cond_signal(&l->wanted);
    pthread_mutex_unlock(&l->lock);
    return 1;
}

/* At the end of an epoch the position is (epoch, batches). At this position, ps_loader_next returns 0. The following
 * call of ps_loader_next returns the first batch of the next epoch. */
int ps_loader_get_position(ps_loader *l, ps_loader_position *out)
{
    PS_NEED(l);
    PS_NEED(out);
    pthread_mutex_lock(&l->lock);
    *out = l->next;
    pthread_mutex_unlock(&l->lock);
    return 0;
}

int ps_loader_set_position(ps_loader *l, const ps_loader_position *position)
{
    PS_NEED(l);
    PS_NEED(position);
    ps_loader_position p = *position;
    if (p.epoch < 0 || p.epoch == INT64_MAX || p.batch < 0 || p.batch > l->batches)
        return ps_fail(PS_ERANGE, "a loader cannot go to epoch %lld, batch %lld: an epoch has %lld batches",
                       (long long)p.epoch, (long long)p.batch, (long long)l->batches);
    pthread_mutex_lock(&l->lock);
    l->next = p;
    l->making = p.batch == l->batches ? (ps_loader_position){ p.epoch + 1, 0 } : p;
    l->count = 0;
    l->failed.code = 0;
    l->generation++;
    pthread_cond_signal(&l->wanted);
    pthread_mutex_unlock(&l->lock);
    return 0;
}
