/* SPDX-License-Identifier: BSD-3-Clause
 * Encodes texts into examples on several threads. The script's thread puts texts into a ring of jobs, and other threads
 * encode them. The script's thread also stores the results, in the order of the texts. It stores results when the ring
 * is full, when it calls ps_encoder_drain, and at the end. */
#include "base/alloc.h"
#include "base/thread.h"
#include "data/examples.h"
#include "data/tok.h"
#include <string.h>

enum { MOST_ENCODERS = 64, PER_THREAD = 32 };
enum { FREE, WAITS, DONE };

typedef struct span { int64_t begin, end; } span;      /* a range of bytes of a text; `end` is exclusive */

typedef struct job {
    int state;
    int64_t index;                      /* index of the text in the order in which texts were put */
    int64_t number;                     /* number of the text's example */
    tok_bytes text;
    span *message, *role, *trained;     /* byte ranges, stored in `spans`: [n_message], [n_role], [n_trained] */
    span *spans;
    int64_t n_message, n_role, n_trained, spans_room;
    int32_t whole, need;
    double weight;
    ps_tok_lost lost;                   /* the characters of the text that have no ids */
    tok_ints ids, ends, labels;         /* ends: for each id, the offset after its last byte in the text */
    int rc;
    ps_error_kept error;
} job;

struct ps_encoder {
    ps_tok *tok;
    ps_examples *examples;
    int32_t *special, *prefix, *suffix;
    int64_t n_special, n_prefix, n_suffix;
    int flags;                          /* flags of ps_tok_encode for texts that are encoded as a whole */
    int threads, started, ring;
    int64_t put, taken, stored;         /* number of texts that the script put, that a thread began to encode, and that
                                         * were stored as examples; text i uses job i % ring */
    ps_tok_lost lost;                   /* the characters of all stored examples that have no ids */
    int64_t failed;                     /* number of the example that failed, or -1 if none failed */
    job *jobs;
    bool stop;
    pthread_t thread[MOST_ENCODERS];
    pthread_mutex_t lock;
    pthread_cond_t waits, done;
};

/* -- a text to ids ------------------------------------------------------------------------------------------------- */
static bool is_special(const ps_encoder *c, int32_t id)
{
    int64_t low = 0, high = c->n_special;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (c->special[middle] < id) low = middle + 1;
        else high = middle;
    }
    return low < c->n_special && c->special[low] == id;
}

static bool overlap(span a, span b) { return a.begin < b.end && b.begin < a.end; }

/* Returns whether the template, and not a message, wrote a special token. The template wrote it if none of the token's
 * bytes is from a message and if every role that overlaps the token is completely inside it. conversations.lua
 * (`written`) implements the same rule. spec/data/packing_spec.lua compares the two implementations. */
static bool is_own(const job *j, span token)
{
    for (int64_t i = 0; i < j->n_message && j->message[i].begin < token.end; i++)
        if (overlap(j->message[i], token)) return false;
    for (int64_t i = 0; i < j->n_role && j->role[i].begin < token.end; i++) {
        bool inside = j->role[i].begin > token.begin && j->role[i].end < token.end;
        if (overlap(j->role[i], token) && !inside) return false;
    }
    return true;
}

/* Appends the ids of bytes [begin, end) of the job's text. */
static int append(const ps_encoder *c, tok_state *st, job *j, int64_t begin, int64_t end, int flags)
{
    if (begin >= end) return 0;
    st->ids.n = st->offsets.n = 0;
    PS_TRY(tok_encode(c->tok, st, j->text.at + begin, (size_t)(end - begin), flags | PS_TOK_OFFSETS));
    for (size_t i = 0; i < st->ids.n; i++) {
        PS_TRY(tok_ints_add(&j->ids, st->ids.at[i]));
        PS_TRY(tok_ints_add(&j->ends, (int32_t)begin + st->offsets.at[2 * i + 1]));
    }
    return 0;
}

/* Encodes special tokens in messages as ordinary text, so that a message cannot forge a special token. The text between
 * two special tokens of the template is encoded without special tokens. `st` contains the ids and offsets of the whole
 * text. */
static int without_forged(const ps_encoder *c, tok_state *st, job *j)
{
    size_t n = st->ids.n;
    int32_t *ids = ps_alloc((n + 1) * 3 * sizeof *ids), *at = ids + n;
    if (!ids) return ps_fail_nomem((n + 1) * 3 * sizeof *ids);
    memcpy(ids, st->ids.at, n * sizeof *ids);
    memcpy(at, st->offsets.at, 2 * n * sizeof *at);
    j->ids.n = j->ends.n = 0;
    st->lost = (ps_tok_lost){ 0 };
    int64_t from = 0;
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        if (!is_special(c, ids[i]) || !is_own(j, (span){ at[2 * i], at[2 * i + 1] })) continue;
        rc = append(c, st, j, from, at[2 * i], PS_TOK_PLAIN);
        if (rc == 0) rc = tok_ints_add(&j->ids, ids[i]);
        if (rc == 0) rc = tok_ints_add(&j->ends, at[2 * i + 1]);
        from = at[2 * i + 1];
    }
    if (rc == 0) rc = append(c, st, j, from, (int64_t)j->text.n, PS_TOK_PLAIN);
    ps_free(ids);
    return rc;
}

/* Sets the labels. If a token is partly inside a trained range, the token is trained only if its last byte is inside
 * the range. */
static int label(job *j)
{
    int64_t part = 0, trained = 0;
    for (size_t i = 0; i < j->ids.n; i++) {
        int64_t end = j->ends.at[i];
        while (part < j->n_trained && j->trained[part].end < end) part++;
        bool counts = part < j->n_trained && end > j->trained[part].begin;
        trained += counts;
        PS_TRY(tok_ints_add(&j->labels, counts ? j->ids.at[i] : EXAMPLE_IGNORED));
    }
    if (j->need >= 1 && (trained == 0 || (j->need == 2 && trained == (int64_t)j->ids.n)))
        return ps_fail(PS_EINVAL, "%s of its %lld tokens are trained; `psluajit tools/data.lua show` prints what the "
                       "model sees", trained == 0 ? "none" : "all", (long long)j->ids.n);
    return 0;
}

static int add_all(tok_ints *to, const int32_t *ids, int64_t n)
{
    for (int64_t i = 0; i < n; i++) PS_TRY(tok_ints_add(to, ids[i]));
    return 0;
}

static int encode(const ps_encoder *c, tok_state *st, job *j)
{
    j->ids.n = j->ends.n = j->labels.n = 0;
    if (j->whole) {
        PS_TRY(add_all(&j->ids, c->prefix, c->n_prefix));
        st->ids.n = st->offsets.n = 0;
        PS_TRY(tok_encode(c->tok, st, j->text.at, j->text.n, c->flags));
        PS_TRY(add_all(&j->ids, st->ids.at, (int64_t)st->ids.n));
        PS_TRY(add_all(&j->ids, c->suffix, c->n_suffix));
        return j->ids.n ? 0 : ps_fail(PS_EINVAL, "the text has no tokens");
    }
    PS_TRY(append(c, st, j, 0, (int64_t)j->text.n, 0));
    for (size_t i = 0; i < st->ids.n; i++) {
        span token = { st->offsets.at[2 * i], st->offsets.at[2 * i + 1] };
        if (!is_special(c, st->ids.at[i]) || is_own(j, token)) continue;
        PS_TRY(without_forged(c, st, j));
        break;
    }
    return label(j);
}

/* -- threads ------------------------------------------------------------------------------------------------------- */
static void run(const ps_encoder *c, tok_state *st, job *j)
{
    st->lost = (ps_tok_lost){ 0 };
    j->rc = encode(c, st, j);
    j->lost = st->lost, j->lost.example = j->number;
    if (j->rc < 0) ps_error_keep(&j->error);             /* keep the error, because each thread has its own error */
}

static void *work(void *arg)
{
    ps_encoder *c = arg;
    tok_state st = { 0 };
    pthread_mutex_lock(&c->lock);
    for (;;) {
        while (!c->stop && c->taken == c->put) pthread_cond_wait(&c->waits, &c->lock);
        if (c->stop) break;
        job *j = &c->jobs[c->taken++ % c->ring];
        pthread_mutex_unlock(&c->lock);
        run(c, &st, j);
        pthread_mutex_lock(&c->lock);
        j->state = DONE;
        if (j->index == c->stored) pthread_cond_signal(&c->done);
    }
    pthread_mutex_unlock(&c->lock);
    tok_state_free(&st);
    return NULL;
}

/* Adds the lost characters `more` of another example to `to`. The sum reports the first lost character of the example
 * with the lowest number. */
static void add_lost(ps_tok_lost *to, const ps_tok_lost *more)
{
    ps_tok_lost sum = *more;
    bool earlier = to->characters && more->example < to->example;
    tok_lost_add(earlier ? &sum : to, earlier ? to : more);
    if (earlier) *to = sum;
}

/* Stores the example of the oldest text. If this text could not be encoded, it remains the oldest text. Therefore later
 * calls return the same error again, and not the error of a later text. */
static int store(ps_encoder *c)
{
    job *j = &c->jobs[c->stored % c->ring];
    pthread_mutex_lock(&c->lock);
    while (j->state != DONE) pthread_cond_wait(&c->done, &c->lock);
    pthread_mutex_unlock(&c->lock);
    int rc = j->rc;
    if (rc < 0) ps_error_again(&j->error);
    else rc = ps_examples_put(c->examples, j->number, j->ids.at, j->whole ? NULL : j->labels.at, NULL,
                              (int64_t)j->ids.n, j->weight);
    c->failed = rc < 0 ? j->number : -1;
    if (rc < 0) return rc;
    if (j->lost.characters) add_lost(&c->lost, &j->lost);
    pthread_mutex_lock(&c->lock);
    j->state = FREE;
    c->stored++;
    pthread_mutex_unlock(&c->lock);
    return 0;
}

static int copy_ids(const int32_t *ids, int64_t n, int32_t **out, int64_t *n_out)
{
    *out = ps_alloc((size_t)(n + 1) * sizeof **out);
    if (!*out) return ps_fail_nomem((size_t)(n + 1) * sizeof **out);
    if (n) memcpy(*out, ids, (size_t)n * sizeof **out);
    *n_out = n;
    return 0;
}

int ps_encoder_new(ps_tok *tok, ps_examples *examples, const ps_encoder_config *config, ps_encoder **out)
{
    PS_NEED(tok);
    PS_NEED(examples);
    PS_NEED(config);
    PS_NEED(out);
    if (config->threads < 1 || config->threads > MOST_ENCODERS)
        return ps_fail(PS_EINVAL, "a tokenizing encoder cannot use %d threads; use 1 to %d", config->threads,
                       MOST_ENCODERS);
    if (!tok->ready) return ps_fail(PS_ESTATE, "the tokenizer is not ready yet (ps_tok_ready)");
    ps_encoder *c = ps_alloc0(sizeof *c);
    if (!c) return ps_fail_nomem(sizeof *c);
    tok_retain(tok);
    examples_retain(examples);
    c->tok = tok, c->examples = examples, c->threads = config->threads, c->flags = config->flags, c->failed = -1;
    c->ring = config->queue > 0 ? config->queue : PER_THREAD * c->threads;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->waits, NULL);
    pthread_cond_init(&c->done, NULL);
    c->jobs = ps_alloc0((size_t)c->ring * sizeof *c->jobs);
    int rc = c->jobs ? 0 : ps_fail_nomem((size_t)c->ring * sizeof *c->jobs);
    if (rc == 0) rc = copy_ids(config->special, config->n_special, &c->special, &c->n_special);
    if (rc == 0) rc = copy_ids(config->prefix, config->n_prefix, &c->prefix, &c->n_prefix);
    if (rc == 0) rc = copy_ids(config->suffix, config->n_suffix, &c->suffix, &c->n_suffix);
    for (int i = 0; rc == 0 && i < c->threads; i++)
        if (ps_thread_start(&c->thread[c->started], work, c) == 0) c->started++;
    if (rc == 0 && c->started == 0) rc = ps_fail(PS_ENOMEM, "cannot start a thread for tokenizing");
    if (rc < 0) ps_encoder_free(c);
    else *out = c;
    return rc;
}

static int copy_spans(job *j, const ps_encoder_text *t)
{
    int64_t n = t->n_message + t->n_role + t->n_trained;
    if (n > j->spans_room) {
        span *spans = ps_realloc(j->spans, (size_t)(2 * n) * sizeof *spans);
        if (!spans) return ps_fail_nomem((size_t)(2 * n) * sizeof *spans);
        j->spans = spans;
        j->spans_room = 2 * n;
    }
    j->message = j->spans, j->n_message = t->n_message;
    j->role = j->message + t->n_message, j->n_role = t->n_role;
    j->trained = j->role + t->n_role, j->n_trained = t->n_trained;
    if (t->n_message) memcpy(j->message, t->message, (size_t)t->n_message * sizeof(span));
    if (t->n_role) memcpy(j->role, t->role, (size_t)t->n_role * sizeof(span));
    if (t->n_trained) memcpy(j->trained, t->trained, (size_t)t->n_trained * sizeof(span));
    return 0;
}

int ps_encoder_put(ps_encoder *c, const ps_encoder_text *text)
{
    PS_NEED(c);
    PS_NEED(text && text->text);
    if (text->nbytes > INT32_MAX)
        return ps_fail(PS_EINVAL, "a text of %lld bytes is too long for the tokenizer; split it into texts of less "
                       "than 2 GiB", (long long)text->nbytes);
    if (c->put - c->stored == c->ring) PS_TRY(store(c));
    job *j = &c->jobs[c->put % c->ring];
    j->text.n = 0;
    PS_TRY(tok_bytes_more(&j->text, (size_t)text->nbytes + 1));
    memcpy(j->text.at, text->text, (size_t)text->nbytes);
    j->text.n = (size_t)text->nbytes;
    PS_TRY(copy_spans(j, text));
    j->whole = text->whole, j->need = text->need, j->weight = text->weight, j->number = text->number;
    j->index = c->put;
    pthread_mutex_lock(&c->lock);
    j->state = WAITS;
    c->put++;
    pthread_cond_signal(&c->waits);
    pthread_mutex_unlock(&c->lock);
    return 0;
}

int64_t ps_encoder_drain(ps_encoder *c)
{
    PS_NEED(c);
    while (c->stored < c->put) {
        pthread_mutex_lock(&c->lock);
        bool done = c->jobs[c->stored % c->ring].state == DONE;
        pthread_mutex_unlock(&c->lock);
        if (!done) break;
        PS_TRY(store(c));
    }
    return c->put - c->stored;
}

int ps_encoder_finish(ps_encoder *c)
{
    PS_NEED(c);
    while (c->stored < c->put) PS_TRY(store(c));
    return 0;
}

int ps_encoder_lost(const ps_encoder *c, ps_tok_lost *out)
{
    PS_NEED(c);
    PS_NEED(out);
    *out = c->lost;
    return 0;
}

int64_t ps_encoder_failed(const ps_encoder *c) { return c ? c->failed : -1; }

void ps_encoder_free(ps_encoder *c)
{
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    c->stop = true;
    pthread_cond_broadcast(&c->waits);
    pthread_mutex_unlock(&c->lock);
    for (int i = 0; i < c->started; i++) pthread_join(c->thread[i], NULL);
    for (int i = 0; c->jobs && i < c->ring; i++) {
        job *j = &c->jobs[i];
        tok_bytes_free(&j->text);
        tok_ints_free(&j->ids);
        tok_ints_free(&j->ends);
        tok_ints_free(&j->labels);
        ps_free(j->spans);
    }
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->waits);
    pthread_cond_destroy(&c->done);
    ps_free(c->jobs);
    ps_free(c->special);
    ps_free(c->prefix);
    ps_free(c->suffix);
    ps_tok_free(c->tok);
    ps_examples_free(c->examples);
    ps_free(c);
}
