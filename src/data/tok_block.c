/* SPDX-License-Identifier: BSD-3-Clause
 * Encodes long texts and JSON lines to ids on several threads. The ids must be the same as if the whole text were
 * encoded at once. Therefore a text is split only at the end of a line, between two ASCII characters that are not
 * blanks. No word of a known pattern crosses such a position. If a word, a normalizer or an added token could cross
 * such a position, the text is not split. */
#define _GNU_SOURCE
#include "data/tok.h"
#include "base/alloc.h"
#include "base/text.h"
#include "base/thread.h"
#include <pthread.h>
#include <string.h>

enum { MOST_THREADS = 256, LEAST_BYTES = 1 << 16 };        /* maximum number of threads; minimum number of bytes per
                                                            * thread */

typedef struct part {
    const ps_tok *t;
    const ps_tok_block *block;
    const uint8_t *s;
    size_t n;
    bool continued;             /* true if this part is not the beginning of the text */
    int64_t lines;              /* number of JSON lines that were read, including a line that failed; 1 if the text is
                                 * not JSON lines (no `field`) */
    tok_state state;
    int rc;
    ps_error_kept error;
    pthread_t thread;
    bool started;
} part;

/* Returns the first position at or after `from` where a text may be split, or n if there is no such position. */
static size_t cut_after(const uint8_t *s, size_t n, size_t from)
{
    for (size_t i = from < 2 ? 2 : from; i < n; i++) {
        const uint8_t *end = memchr(s + i - 1, '\n', n - i);
        if (!end) return n;
        i = (size_t)(end - s) + 1;
        if (s[i] > ' ' && s[i] < 0x7f && s[i - 2] > ' ' && s[i - 2] < 0x7f) return i;
    }
    return n;
}

/* Returns the last position before n where a text may be split, or 0 if there is no such position. */
static size_t cut_before(const uint8_t *s, size_t n)
{
    for (size_t i = n; i > 2; i--)
        if (s[i - 2] == '\n' && s[i - 1] > ' ' && s[i - 1] < 0x7f && i > 3 && s[i - 3] > ' ' &&
            s[i - 3] < 0x7f) return i - 1;
    return 0;
}

/* Returns whether a text that is encoded in sections gets the same ids as a text that is encoded as a whole. If `flags`
 * contains PLAIN, special tokens are not searched in the text. */
static bool may_cut(const ps_tok *t, int flags)
{
    if (t->model == TOK_BPE && (!t->n_splits || !t->cuts || t->metaspace)) return false;
    for (int i = 0; i < t->n_steps; i++) if (t->step[i].kind != TOK_NFC) return false;
    for (int i = 0; i < t->n_added; i++) {
        const tok_added *a = &t->added[i];
        if (flags & PS_TOK_PLAIN && a->flags & PS_TOK_SPECIAL) continue;
        if (a->flags & PS_TOK_LSTRIP || memchr(a->s, '\n', a->n)) return false;
        /* A line end becomes a blank in normalized text, so a token with a blank could cross a line end. */
        if (t->model == TOK_WORDPIECE && memchr(a->s, ' ', a->n)) return false;
    }
    return true;
}

static size_t line_after(const uint8_t *s, size_t n, size_t from)
{
    const uint8_t *end = from < n ? memchr(s + from, '\n', n - from) : NULL;
    return end ? (size_t)(end - s) + 1 : n;
}

/* -- JSON lines --------------------------------------------------------------------------------------------------- */
/* Finds the document of a line and stores it in j->text. The document is the string with the key `field`. */
static int document(tok_json *j, const char *field)
{
    size_t n = strlen(field);
    tok_bytes found = { 0 };
    bool has = false;
    int rc = tok_json_expect(j, '{');
    for (bool first = true; rc == 0; first = false) {
        if ((rc = tok_json_key(j, first)) <= 0) break;
        bool here = j->text.n == n && (!n || !memcmp(j->text.at, field, n));
        rc = here ? tok_json_string(j) : tok_json_skip(j);
        if (rc < 0 || !here) continue;
        found.n = 0, has = true;
        rc = tok_bytes_add(&found, j->text.at, j->text.n);
    }
    if (rc == 0) rc = tok_json_end(j);
    if (rc == 0 && !has) rc = ps_fail(PS_EFORMAT, "%s: the object has no string '%s'", j->path, field);
    j->text.n = 0;
    if (rc == 0) rc = tok_bytes_add(&j->text, found.at, found.n);
    tok_bytes_free(&found);
    return rc;
}

static int json_lines(part *p)
{
    tok_json j = { .path = "JSON" };
    int rc = 0;
    for (size_t at = 0, next; at < p->n && rc == 0; at = next) {
        next = line_after(p->s, p->n, at);
        p->lines++;
        j.first = j.at = p->s + at, j.end = p->s + next;
        j.at += ps_bom(j.at, j.end - j.at);         /* a byte order mark is allowed in a file's first line */
        while (j.at < j.end && (*j.at <= ' ')) j.at++;
        if (j.at == j.end) continue;                /* skip an empty line */
        rc = document(&j, p->block->field);
        if (rc == PS_EFORMAT) ps_error_prefix("a line must be an object whose '%s' is a string: ", p->block->field);
        if (rc == 0 && p->block->mark >= 0) rc = tok_ints_add(&p->state.ids, p->block->mark);
        if (rc == 0) rc = tok_encode(p->t, &p->state, j.text.at, j.text.n, p->block->flags);
        if (p->state.lost.characters && !p->state.lost.line) p->state.lost.line = p->lines;
    }
    tok_bytes_free(&j.text);
    return rc;
}

/* -- threads ------------------------------------------------------------------------------------------------------- */
static void *work(void *arg)
{
    part *p = arg;
    p->state.continued = p->continued;
    p->rc = p->block->field ? json_lines(p) : tok_encode(p->t, &p->state, p->s, p->n, p->block->flags);
    if (p->rc < 0) ps_error_keep(&p->error);         /* keep the error, because each thread has its own error */
    return NULL;
}

/* Divides [0, n) into at most `count` parts of about the same size. Returns the number of parts. */
static int divide(part *parts, int count, const uint8_t *s, size_t n, bool lines)
{
    size_t at = 0;
    int made = 0;
    while (at < n) {
        size_t want = at + (n - at) / (size_t)(count - made), end = made == count - 1 ? n : want;
        if (end < n) end = lines ? line_after(s, n, end) : cut_after(s, n, end > at + 2 ? end : at + 2);
        parts[made].s = s + at, parts[made++].n = end - at;
        at = end;
    }
    return made;
}

static int run(ps_tok *t, ps_tok_block *block, part *parts, int n)
{
    for (int i = 0; i < n; i++) {
        parts[i].t = t, parts[i].block = block;
        if (!block->field) parts[i].continued = i || block->line, parts[i].lines = 1;
        parts[i].started = i + 1 < n && ps_thread_start(&parts[i].thread, work, &parts[i]) == 0;
    }
    /* This thread encodes the last part, and every part whose thread could not be started. */
    for (int i = n - 1; i >= 0; i--) if (!parts[i].started) work(&parts[i]);
    int failed = -1;
    for (int i = 0; i < n; i++) if (parts[i].started) pthread_join(parts[i].thread, NULL);
    for (int i = n - 1; i >= 0; i--) if (parts[i].rc < 0) failed = i;
    int64_t line = block->line;
    for (int i = 0; i < (failed < 0 ? n : failed + 1); i++) line += parts[i].lines;
    if (failed >= 0) {
        const part *p = &parts[failed];
        const char *path = block->path ? block->path : "a text";
        ps_error_again(&p->error);
        if (block->field) ps_error_prefix("%s: line %lld: ", path, (long long)line);
        else ps_error_prefix("%s: ", path);
        return p->rc;
    }
    tok_ints *ids = &t->state.ids;
    for (int i = 0; i < n; i++) {
        ps_tok_lost *lost = &parts[i].state.lost;
        if (lost->line) lost->line += block->line;      /* the part counted lines from its own beginning */
        tok_lost_add(&t->state.lost, lost);
        block->line += parts[i].lines;
    }
    for (int i = 0; i < n; i++) {
        PS_TRY(tok_ints_more(ids, parts[i].state.ids.n));
        if (parts[i].state.ids.n) memcpy(ids->at + ids->n, parts[i].state.ids.at,
            parts[i].state.ids.n * sizeof *ids->at);
        ids->n += parts[i].state.ids.n;
    }
    return 0;
}

int ps_tok_encode_block(ps_tok *t, ps_tok_block *block, const char *text, int64_t nbytes, ps_tok_ids *out)
{
    PS_NEED(t);
    PS_NEED(block);
    PS_NEED(text);
    PS_NEED(out);
    if (!t->ready) return ps_fail(PS_ESTATE, "the tokenizer is not ready yet (ps_tok_ready)");
    if (block->threads < 1 || block->threads > MOST_THREADS)
        return ps_fail(PS_EINVAL, "the tokenizer cannot use %d threads; use 1 to %d", block->threads, MOST_THREADS);
    if (block->flags & PS_TOK_OFFSETS) return ps_fail(PS_EUNSUP, "offsets cannot be requested for blocks");
    const uint8_t *s = (const uint8_t *)text;
    size_t n = (size_t)nbytes;
    bool whole = !block->field && !may_cut(t, block->flags);
    if (whole && !block->last) n = 0;
    else if (!block->last) {
        const uint8_t *end = block->field && n ? memrchr(s, '\n', n) : NULL;
        n = block->field ? (end ? (size_t)(end - s) + 1 : 0) : cut_before(s, n);
    }
    block->used = (int64_t)n;
    t->state.ids.n = 0;
    size_t worth = whole ? 1 : n / LEAST_BYTES + 1;
    int count = worth < (size_t)block->threads ? (int)worth : block->threads;
    part *parts = ps_alloc0((size_t)count * sizeof *parts);
    if (!parts) return ps_fail_nomem((size_t)count * sizeof *parts);
    int made = divide(parts, count, s, n, block->field != NULL);
    int rc = run(t, block, parts, made);
    for (int i = 0; i < made; i++) tok_state_free(&parts[i].state);
    ps_free(parts);
    PS_TRY(rc);
    *out = (ps_tok_ids){ t->state.ids.at, NULL, (int64_t)t->state.ids.n };
    return 0;
}
