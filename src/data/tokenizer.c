/* SPDX-License-Identifier: BSD-3-Clause
 * Implements the tokenizers of ps.h. Makes tokenizers from files, and turns texts into ids and ids into text. A text is
 * encoded in four steps:
 *   1. The text is split at the added tokens that are matched in the original text.
 *   2. The sections between these tokens are normalized.
 *   3. The normalized sections are split at the added tokens that are matched after normalization.
 *   4. The remaining sections are split into words. */
#define _GNU_SOURCE
#include "data/tok.h"
#include "base/alloc.h"
#include "base/text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int tok_id(tok_state *st, int32_t id, int32_t begin, int32_t end)
{
    PS_TRY(tok_ints_add(&st->ids, id));
    if (!st->mapped) return 0;
    PS_TRY(tok_ints_add(&st->offsets, begin));
    return tok_ints_add(&st->offsets, end);
}

/* -- making ------------------------------------------------------------------------------------------------------- */
int ps_tok_new(const char *model, ps_tok **out)
{
    PS_NEED(model);
    PS_NEED(out);
    bool bpe = !strcmp(model, "bpe");
    if (!bpe && strcmp(model, "wordpiece"))
        return ps_fail(PS_EINVAL, "a tokenizer's model must be \"bpe\" or \"wordpiece\", not \"%s\"", model);
    ps_tok *t = ps_alloc0(sizeof *t);
    if (!t) return ps_fail_nomem(sizeof *t);
    t->model = bpe ? TOK_BPE : TOK_WORDPIECE;
    t->unk = -1, t->longest_word = 100;
    *out = t;
    return 0;
}

void tok_state_free(tok_state *st)
{
    tok_matcher_free(st->matcher);
    tok_bpe_free(st->bpe);
    tok_text_free(&st->repaired);
    tok_text_free(&st->plain);
    tok_text_free(&st->spaced);
    for (int i = 0; i < 2; i++) tok_text_free(&st->normal[i]), tok_text_free(&st->blanks[i]);
    for (int i = 0; i < TOK_SPLITS; i++) tok_bytes_free(&st->copy[i]);
    tok_bytes_free(&st->decoded);
    tok_ints_free(&st->ids);
    tok_ints_free(&st->offsets);
}

void tok_retain(ps_tok *t) { atomic_fetch_add(&t->more, 1); }

void ps_tok_free(ps_tok *t)
{
    if (!t || atomic_fetch_sub(&t->more, 1) > 0) return;
    tok_state_free(&t->state);
    tok_vocab_free(&t->vocab);
    tok_merges_free(&t->merges);
    for (int i = 0; i < t->n_splits; i++) tok_regex_free(t->split[i]);
    tok_bytes_free(&t->rest);
    for (int i = 0; i < t->n_steps; i++) ps_free(t->step[i].from), ps_free(t->step[i].to);
    for (int i = 0; i < t->n_added; i++) ps_free(t->added[i].s);
    ps_free(t->added);
    tok_bytes_free(&t->raw);
    ps_free(t->raw_entry);
    ps_free(t->path);
    ps_free(t);
}

static int being_made(const ps_tok *t)
{
    PS_NEED(t);
    return t->ready ? ps_fail(PS_ESTATE, "the tokenizer is ready, so its settings can no longer change") : 0;
}

static int tok_is_ready(const ps_tok *t)
{
    PS_NEED(t);
    return t->ready ? 0 : ps_fail(PS_ESTATE, "the tokenizer is not ready yet (ps_tok_ready)");
}

int ps_tok_read(ps_tok *t, const char *format, const char *path)
{
    static const struct { const char *format; int (*read)(ps_tok *, const ps_map *); } formats[] = {
        { "vocab.json", tok_read_vocab_json }, { "vocab.txt", tok_read_vocab_txt }, { "merges.txt", tok_read_merges },
        { "tokenizer.json", tok_read_tokenizer_json }, { "tiktoken", tok_read_tiktoken } };
    ps_map map;
    PS_TRY(being_made(t));
    PS_NEED(format);
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (strcmp(format, formats[i].format)) continue;
        PS_TRY(ps_map_open(&map, path));
        ps_map text = map;
        size_t mark = ps_bom(map.bytes, map.nbytes);
        text.bytes += mark, text.nbytes -= (int64_t)mark;
        int rc = formats[i].read(t, &text);
        if (rc == 0 && !t->path && !(t->path = ps_strdup(path))) rc = ps_fail_nomem(strlen(path) + 1);
        ps_map_close(&map);
        return rc;
    }
    return ps_fail(PS_EINVAL, "there is no format of tokenizer files called \"%s\"", format);
}

static const char *path_of(const ps_tok *t) { return t->path ? t->path : "a tokenizer"; }

int ps_tok_token(ps_tok *t, const char *token, int64_t nbytes, int64_t id)
{
    char shown[TOK_SHOWN];
    PS_TRY(being_made(t));
    PS_NEED(token);
    if (nbytes < 0 || !tok_utf8_valid((const uint8_t *)token, (size_t)nbytes))
        return ps_fail(PS_EFORMAT, "%s: token %lld, '%s', is not UTF-8", path_of(t), (long long)id,
                       tok_shown((const uint8_t *)token, nbytes < 0 ? 0 : (size_t)nbytes, shown));
    return tok_vocab_add(&t->vocab, path_of(t), (const uint8_t *)token, (size_t)nbytes, id);
}

int ps_tok_merge(ps_tok *t, const char *left, int64_t n_left, const char *right, int64_t n_right)
{
    PS_TRY(being_made(t));
    PS_NEED(left);
    PS_NEED(right);
    if (n_left < 0 || n_left > UINT16_MAX || n_right < 0 || n_right > UINT16_MAX)
        return ps_fail(PS_EFORMAT, "%s: merge %d joins a token of more than 65,535 bytes", path_of(t), t->merges.count);
    return tok_merges_add(&t->merges, &t->vocab, path_of(t), t->merges.count, (const uint8_t *)left, (size_t)n_left,
                          (const uint8_t *)right, (size_t)n_right);
}

int ps_tok_scores(ps_tok *t, const float *scores, int64_t n)
{
    PS_TRY(being_made(t));
    PS_NEED(scores);
    if (t->merges.count)
        return ps_fail(PS_ESTATE, "%s: the tokenizer already has merges; it cannot also have scores", path_of(t));
    if (n != t->vocab.count)
        return ps_fail(PS_EFORMAT, "%s: there are %lld scores for %d tokens; each token needs one", path_of(t),
                       (long long)n, t->vocab.count);
    return tok_merges_of_scores(&t->merges, &t->vocab, path_of(t), scores, (int32_t)n);
}

int ps_tok_set(ps_tok *t, const char *name, int64_t value)
{
    PS_TRY(being_made(t));
    PS_NEED(name);
    if (!strcmp(name, "unk")) {
        if (value >= 0 && (value >= t->vocab.count || t->vocab.entry[value].n < 0))
            return ps_fail(PS_EINVAL, "the unknown token is set to id %lld, which the vocabulary does not have",
                           (long long)value);
        t->unk = value < 0 ? -1 : (int32_t)value;
        return 0;
    }
    if (!strcmp(name, "longest_word")) {
        if (value < 1 || value > INT32_MAX)
            return ps_fail(PS_EINVAL, "longest_word is %lld; it must be 1 to 2^31 - 1 characters", (long long)value);
        t->longest_word = value;
        return 0;
    }
    if (!strcmp(name, "metaspace")) {
        if (value < 0 || value > 3)
            return ps_fail(PS_EINVAL, "metaspace is %lld; it must be 0 to 3", (long long)value);
        t->metaspace = (int)value;
        return 0;
    }
    struct { const char *name; int *at; } flags[] = {
        { "byte_fallback", &t->byte_fallback }, { "fuse_unk", &t->fuse_unk }, { "strip_first", &t->strip_first },
        { "cuts", &t->cuts }, { "prefix_space", &t->prefix_space }, { "byte_level", &t->byte_level },
        { "whole_words", &t->whole_words }, { "trim_offsets", &t->trim_offsets }, { "keep_first", &t->keep_first },
        { "clean_text", &t->clean_text }, { "chinese", &t->chinese }, { "strip_accents", &t->strip_accents },
        { "lower_case", &t->lower_case } };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (!strcmp(name, flags[i].name)) return *flags[i].at = value != 0, 0;
    return ps_fail(PS_EINVAL, "there is no tokenizer setting \"%s\"", name);
}

int ps_tok_split(ps_tok *t, const char *pattern, int64_t nbytes)
{
    PS_TRY(being_made(t));
    PS_NEED(pattern);
    if (t->n_splits == TOK_SPLITS) return ps_fail(PS_EUNSUP, "a tokenizer can have at most %d patterns", TOK_SPLITS);
    PS_TRY(tok_regex_new(pattern, (size_t)nbytes, &t->split[t->n_splits]));
    t->n_splits++;
    return 0;
}

int ps_tok_rest(const ps_tok *t, const char **text, int64_t *nbytes)
{
    PS_NEED(t);
    PS_NEED(text);
    PS_NEED(nbytes);
    *text = t->rest.n ? (const char *)t->rest.at : "", *nbytes = (int64_t)t->rest.n;
    return 0;
}

int ps_tok_add(ps_tok *t, const char *token, int64_t nbytes, int64_t id, int flags)
{
    char shown[TOK_SHOWN];
    PS_TRY(being_made(t));
    PS_NEED(token);
    const uint8_t *s = (const uint8_t *)token;
    size_t n = (size_t)nbytes;
    const char *path = t->path ? t->path : "a tokenizer";
    if (!n || !tok_utf8_valid(s, n))
        return ps_fail(PS_EFORMAT, "%s: added token %lld is %s", path, (long long)id, n ? "not UTF-8" : "empty");
    int32_t there = tok_vocab_find(&t->vocab, s, n);
    if (there >= 0 && there != id)
        return ps_fail(PS_EFORMAT, "%s: added token '%s' has id %lld, but the vocabulary has it with id %d", path,
                       tok_shown(s, n, shown), (long long)id, there);
    if (there < 0) PS_TRY(tok_vocab_add(&t->vocab, path, s, n, id));
    for (int i = 0; i < t->n_added; i++)
        if (t->added[i].id == id) return t->added[i].flags = flags, 0;
    tok_added *list = ps_realloc(t->added, (size_t)(t->n_added + 1) * sizeof *list);
    if (!list) return ps_fail_nomem((size_t)(t->n_added + 1) * sizeof *list);
    t->added = list;
    uint8_t *copy = ps_alloc(n);
    if (!copy) return ps_fail_nomem(n);
    memcpy(copy, s, n);
    t->added[t->n_added++] = (tok_added){ copy, n, (int32_t)id, flags };
    return 0;
}

/* Returns GPT-2's letter for a byte (bytes_to_unicode). A printable byte is its own letter. The letters of the other
 * bytes are the code points starting at U+0100. */
uint32_t tok_letter_of(int byte)
{
    static const uint8_t from[] = { 0, 127, 173, 255 }, to[] = { 33, 161, 174 };
    uint32_t before = 0;            /* number of bytes below `byte` that are not their own letter */
    for (int i = 0; i < 3; i++) {
        if (byte >= to[i] && byte < from[i + 1]) return (uint32_t)byte;
        before += (uint32_t)((byte < to[i] ? byte : to[i]) - (byte < from[i] ? byte : from[i]));
    }
    return byte == 255 ? 255 : 256 + before;
}

static void find_fallback(ps_tok *t)
{
    for (int byte = 0; byte < 256; byte++) {
        char s[8];
        snprintf(s, sizeof s, "<0x%02X>", (unsigned)byte);
        t->byte_id[byte] = tok_vocab_find(&t->vocab, (const uint8_t *)s, 6);
    }
}

static void find_bytes(ps_tok *t)
{
    uint8_t s[4] = { 0 };
    for (int byte = 0; byte < 256; byte++) {
        int n = tok_utf8_put(tok_letter_of(byte), s);
        t->letter[byte].s[0] = s[0], t->letter[byte].s[1] = s[1], t->letter[byte].n = (uint8_t)n;
        t->byte_id[byte] = tok_vocab_find(&t->vocab, s, (size_t)n);
    }
}

static int longest_first(const void *a, const void *b)
{
    const tok_added *x = a, *y = b;
    if (x->n != y->n) return x->n > y->n ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Normalizes the spellings of the added tokens that are searched in normalized text. */
static int plain_added(ps_tok *t)
{
    for (int i = 0; i < t->n_added; i++) {
        tok_added *a = &t->added[i];
        if ((t->model != TOK_WORDPIECE && !t->n_steps) || !(a->flags & PS_TOK_NORMALIZED)) continue;
        tok_span text = { a->s, a->n, NULL, NULL, 0 };
        if (t->model == TOK_WORDPIECE) {
            PS_TRY(tok_bert_plain(t, &t->state, text));
            text = (tok_span){ t->state.plain.s.at, t->state.plain.s.n, NULL, NULL, 0 };
        } else PS_TRY(tok_normalize(t->state.normal, false, t->step, t->n_steps, &text));
        size_t n = text.n;
        uint8_t *s = ps_alloc(n + 1);
        if (!s) return ps_fail_nomem(n + 1);
        if (n) memcpy(s, text.s, n);
        ps_free(a->s);
        a->s = s, a->n = n;
    }
    return 0;
}

int ps_tok_ready(ps_tok *t)
{
    PS_TRY(being_made(t));
    if (!t->vocab.used) return ps_fail(PS_EFORMAT, "%s: the vocabulary has no tokens",
        t->path ? t->path : "a tokenizer");
    if (t->model == TOK_WORDPIECE && t->unk < 0)
        return ps_fail(PS_EFORMAT, "%s: the vocabulary lacks the unknown token, which WordPiece needs", t->path);
    if (t->byte_level) find_bytes(t);
    else if (t->byte_fallback) find_fallback(t);
    for (int32_t id = 0; id < t->vocab.count; id++)
        if (t->vocab.entry[id].n > t->longest_token) t->longest_token = t->vocab.entry[id].n;
    if (t->model == TOK_BPE) PS_TRY(tok_merges_ready(&t->merges, &t->vocab));
    PS_TRY(plain_added(t));
    if (t->n_added) qsort(t->added, (size_t)t->n_added, sizeof *t->added, longest_first);
    for (int i = 0; i < t->n_added; i++) {
        if (t->added[i].n) t->starts[t->added[i].s[0]] = true;
        t->n_kind[(t->added[i].flags & PS_TOK_NORMALIZED) != 0]++;
    }
    t->ready = true;
    return 0;
}

/* -- contents ------------------------------------------------------------------------------------------------------ */
int64_t ps_tok_count(const ps_tok *t) { return t ? t->vocab.count : 0; }

int32_t ps_tok_find(const ps_tok *t, const char *token, int64_t nbytes)
{
    return t && token && nbytes >= 0 ? tok_vocab_find(&t->vocab, (const uint8_t *)token, (size_t)nbytes) : -1;
}

static int check_id(const ps_tok *t, int64_t id)
{
    if (id < 0 || id >= t->vocab.count || t->vocab.entry[id].n < 0)
        return ps_fail(PS_ERANGE, "%s: there is no token %lld (ids are 0 to %d)", t->path ? t->path : "a tokenizer",
                       (long long)id, t->vocab.count - 1);
    return 0;
}

int ps_tok_name(const ps_tok *t, int64_t id, const char **token, int64_t *nbytes)
{
    PS_NEED(t);
    PS_NEED(token);
    PS_NEED(nbytes);
    PS_TRY(check_id(t, id));
    *token = (const char *)tok_name(&t->vocab, (int32_t)id), *nbytes = t->vocab.entry[id].n;
    return 0;
}

/* -- texts to ids -------------------------------------------------------------------------------------------------- */
static bool is_blank(const uint8_t *s, size_t n, size_t *len)
{
    int k = ps_utf8(s, n);
    uint32_t c = k ? tok_code_point(s, k) : 'x';
    *len = (size_t)(k ? k : 1);
    return c == ' ' || (c >= 9 && c <= 13) || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

const tok_added *tok_added_find(const ps_tok *t, const uint8_t *s, size_t n, bool normalized, bool plain, size_t done,
                                size_t *at, size_t *begin, size_t *end)
{
    size_t len;
    if (!t->n_kind[normalized]) return NULL;
    for (size_t i = *at; i < n; i++) {
        if (!t->starts[s[i]]) continue;
        for (int k = 0; k < t->n_added; k++) {
            const tok_added *a = &t->added[k];
            if (!a->n || a->n > n - i || a->s[0] != s[i] || !(a->flags & PS_TOK_NORMALIZED) == normalized) continue;
            if ((plain && a->flags & PS_TOK_SPECIAL) || memcmp(a->s, s + i, a->n)) continue;
            *begin = i, *at = *end = i + a->n;
            while (a->flags & PS_TOK_LSTRIP && *begin > done) {
                size_t p = *begin - 1;
                while (p > done && (s[p] & 0xc0) == 0x80) p--;
                if (!is_blank(s + p, *begin - p, &len) || len != *begin - p) break;
                *begin = p;
            }
            if (a->flags & PS_TOK_RSTRIP) while (*end < n && is_blank(s + *end, n - *end, &len)) *end += len;
            return a;
        }
    }
    return NULL;
}

/* Splits a text into sections by pattern `k`. A match is a section, and so is the text between two matches. Then splits
 * each section by the next pattern. The sections of the last pattern are words. */
static int words_of(const ps_tok *t, tok_state *st, tok_span text, int k)
{
    const uint8_t *seen;
    size_t begin, end, from = 0, done = 0;
    if (k == t->n_splits) return tok_bpe_word(t, st, text);
    if (!st->matcher) PS_TRY(tok_matcher_new(&st->matcher));
    PS_TRY(tok_stand_in(text.s, text.n, &st->copy[k], &seen));
    while (from < text.n) {
        int rc = tok_regex_find(t->split[k], st->matcher, seen, text.n, from, &begin, &end);
        PS_TRY(rc);
        if (!rc) break;
        if (end == begin) {                             /* an empty match does not split the text */
            from = end < text.n ? end + (size_t)ps_utf8(seen + end, text.n - end) : text.n;
            continue;
        }
        if (begin > done) PS_TRY(words_of(t, st, tok_slice(text, done, begin), k + 1));
        PS_TRY(words_of(t, st, tok_slice(text, begin, end), k + 1));
        from = done = end;
    }
    return text.n > done ? words_of(t, st, tok_slice(text, done, text.n), k + 1) : 0;
}

/* Replaces blanks by U+2581 like transformers' Metaspace. If the text must begin with U+2581 (t->metaspace) and does
 * not, puts a U+2581 before the text. */
static int metaspace(const ps_tok *t, tok_state *st, tok_span *text)
{
    static const tok_step steps[] = { { TOK_REPLACE, (uint8_t *)" ", 1, (uint8_t *)"\xe2\x96\x81", 3 },
                                      { TOK_PREPEND, (uint8_t *)"", 0, (uint8_t *)"\xe2\x96\x81", 3 } };
    bool has = text->s[0] == ' ' || (text->n >= 3 && !memcmp(text->s, steps->to, 3));
    bool wants = t->metaspace == 1 || (t->metaspace == 2 && !st->begun);
    return tok_normalize(st->blanks, st->mapped, steps, wants && !has ? 2 : 1, text);
}

static int bpe_part(const ps_tok *t, tok_state *st, tok_span text)
{
    bool continued = st->continued;
    st->continued = false;
    if (t->metaspace) PS_TRY(metaspace(t, st, &text));
    if (t->prefix_space && !continued && text.s[0] != ' ') {
        tok_text *out = &st->spaced;
        int32_t first = (int32_t)ps_utf8(text.s, text.n);
        tok_text_clear(out, st->mapped);
        PS_TRY(tok_text_add(out, " ", 1, tok_begin(&text, 0), tok_end(&text, (size_t)first - 1)));
        if (!st->mapped) PS_TRY(tok_bytes_add(&out->s, text.s, text.n));
        for (size_t i = 0; st->mapped && i < text.n; i++)
            PS_TRY(tok_text_add(out, text.s + i, 1, tok_begin(&text, i), tok_end(&text, i)));
        text = (tok_span){ out->s.at, out->s.n, st->mapped ? out->begin.at : NULL, st->mapped ? out->end.at : NULL, 0 };
    }
    return words_of(t, st, text, 0);
}

static int word_part(const ps_tok *t, tok_state *st, tok_span text)
{
    return t->model == TOK_BPE ? bpe_part(t, st, text) : tok_bert_words(t, st, text);
}

/* Splits a text at the added tokens whose flag NORMALIZED equals `normalized`, and calls `part` for each section
 * between these tokens. A blank that belongs to a token can also be part of the next token, as in the package
 * tokenizers. */
static int cut_added(const ps_tok *t, tok_state *st, tok_span text, bool normalized, bool plain,
                     int (*part)(const ps_tok *, tok_state *, tok_span, bool))
{
    size_t from = 0, at = 0, begin, end;
    const tok_added *a;
    while ((a = tok_added_find(t, text.s, text.n, normalized, plain, from, &at, &begin, &end))) {
        if (begin > from) PS_TRY(part(t, st, tok_slice(text, from, begin), plain));
        PS_TRY(tok_id(st, a->id, tok_begin(&text, begin), tok_end(&text, end - 1)));
        st->continued = false, st->begun = true;
        from = end;
    }
    return text.n > from ? part(t, st, tok_slice(text, from, text.n), plain) : 0;
}

static int last_part(const ps_tok *t, tok_state *st, tok_span text, bool plain) { return word_part(t, st, text); }

static int plain_part(const ps_tok *t, tok_state *st, tok_span text, bool plain)
{
    if (t->model == TOK_WORDPIECE) {
        PS_TRY(tok_bert_plain(t, st, text));
        const tok_text *p = &st->plain;
        text = (tok_span){ p->s.at, p->s.n, st->mapped ? p->begin.at : NULL, st->mapped ? p->end.at : NULL, 0 };
    } else if (t->n_steps) PS_TRY(tok_normalize(st->normal, st->mapped, t->step, t->n_steps, &text));
    return cut_added(t, st, text, true, plain, last_part);
}

/* Writes the text to st->repaired, with U+FFFD in place of invalid UTF-8. */
static int repair(tok_state *st, const uint8_t *s, size_t n)
{
    tok_text *out = &st->repaired;
    tok_text_clear(out, st->mapped);
    for (size_t i = 0, len; i < n; i += len) {
        len = (size_t)ps_utf8(s + i, n - i);
        bool bad = !len;
        if (bad) len = tok_utf8_bad(s + i, n - i);
        PS_TRY(tok_text_add(out, bad ? (const void *)"\xef\xbf\xbd" : s + i, bad ? 3 : len, (int32_t)i,
            (int32_t)(i + len)));
    }
    return 0;
}

int tok_encode(const ps_tok *t, tok_state *st, const uint8_t *text, size_t n, int flags)
{
    if (n > INT32_MAX / 4)
        return ps_fail(PS_EINVAL, "a text of %zu bytes is too long to encode at once; split it into texts of at most "
                       "%d bytes", n, INT32_MAX / 4);
    tok_span span = { text, n, NULL, NULL, 0 };
    st->mapped = (flags & PS_TOK_OFFSETS) != 0, st->begun = st->continued;
    if (!tok_utf8_valid(text, n)) {
        PS_TRY(repair(st, text, n));
        const tok_text *r = &st->repaired;
        span = (tok_span){ r->s.at, r->s.n, st->mapped ? r->begin.at : NULL, st->mapped ? r->end.at : NULL, 0 };
    }
    return cut_added(t, st, span, false, (flags & PS_TOK_PLAIN) != 0, plain_part);
}

int ps_tok_encode(ps_tok *t, const char *text, int64_t nbytes, int flags, ps_tok_ids *out)
{
    PS_TRY(tok_is_ready(t));
    PS_NEED(text);
    PS_NEED(out);
    tok_state *st = &t->state;
    st->ids.n = st->offsets.n = 0;
    PS_TRY(tok_encode(t, st, (const uint8_t *)text, (size_t)nbytes, flags));
    *out = (ps_tok_ids){ st->ids.at, st->mapped ? st->offsets.at : NULL, (int64_t)st->ids.n };
    return 0;
}

void tok_lost_add(ps_tok_lost *to, const ps_tok_lost *more)
{
    int64_t characters = to->characters + more->characters, places = to->places + more->places;
    if (!to->characters) *to = *more;
    to->characters = characters, to->places = places;
}

int ps_tok_take_lost(ps_tok *t, ps_tok_lost *out)
{
    PS_NEED(t);
    PS_NEED(out);
    *out = t->state.lost;
    t->state.lost = (ps_tok_lost){ 0 };
    return 0;
}

/* -- ids to text --------------------------------------------------------------------------------------------------- */
static const tok_added *added_of(const ps_tok *t, int32_t id)
{
    for (int i = 0; i < t->n_added; i++) if (t->added[i].id == id) return &t->added[i];
    return NULL;
}

/* Finds the bytes that each token represents, and stores them in t->raw. If a token is not spelled in GPT-2's letters,
 * it represents the bytes of its own text. */
static int find_raw(ps_tok *t)
{
    int16_t byte_of[512];
    for (int i = 0; i < 512; i++) byte_of[i] = -1;
    for (int byte = 0; byte < 256; byte++) byte_of[tok_letter_of(byte)] = (int16_t)byte;
    t->raw.n = 0;
    PS_TRY(tok_bytes_more(&t->raw, t->vocab.text.n + 1));       /* raw is never longer than the text of all tokens */
    tok_entry *entry = ps_alloc((size_t)t->vocab.count * sizeof *entry);
    if (!entry) return ps_fail_nomem((size_t)t->vocab.count * sizeof *entry);
    for (int32_t id = 0; id < t->vocab.count; id++) {
        int32_t n = t->vocab.entry[id].n > 0 ? t->vocab.entry[id].n : 0;
        const uint8_t *s = tok_name(&t->vocab, id);
        size_t first = t->raw.n;
        for (int32_t i = 0, len; i < n; i += len) {
            len = ps_utf8(s + i, (size_t)(n - i));
            uint32_t c = tok_code_point(s + i, len);
            /* GPT-2's alphabet does not contain this character, so the whole token represents its own text. */
            if (c >= 512 || byte_of[c] < 0) {
                memcpy(t->raw.at + first, s, (size_t)n);
                t->raw.n = first + (size_t)n;
                break;
            }
            t->raw.at[t->raw.n++] = (uint8_t)byte_of[c];
        }
        entry[id] = (tok_entry){ (uint32_t)first, (int32_t)(t->raw.n - first) };
    }
    for (int i = 0; i < t->n_added; i++) entry[t->added[i].id].n = -1;
    t->raw_entry = entry;
    return 0;
}

/* Replaces each `from` after byte `first` by `to`. `to` must not be longer than `from`. */
static void shorten(tok_bytes *b, size_t first, const char *from, const char *to)
{
    size_t n_from = strlen(from), n_to = strlen(to);
    for (uint8_t *at = b->at + first; (at = memmem(at, (size_t)(b->at + b->n - at), from, n_from)); at += n_to) {
        memcpy(at, to, n_to);
        memmove(at + n_to, at + n_from, (size_t)(b->at + b->n - at) - n_from);
        b->n -= n_from - n_to;
    }
}

/* Appends a token of WordPiece. If the token is not the first token and begins with "##", the "##" is removed. If it is
 * not the first token and does not begin with "##", a blank is put before the token. Then the blanks before punctuation
 * and short forms are removed, in the same order as in the package tokenizers. */
static int add_piece(tok_bytes *out, const uint8_t *s, size_t n, bool first)
{
    static const char *const short_of[][2] = { { " .", "." }, { " ?", "?" }, { " !", "!" }, { " ,", "," },
        { " ' ", "'" }, { " n't", "n't" }, { " 'm", "'m" }, { " do not", " don't" }, { " 's", "'s" }, { " 've", "'ve" },
        { " 're", "'re" } };
    size_t begin = out->n;
    bool joins = !first && n >= 2 && !memcmp(s, "##", 2);
    if (joins) s += 2, n -= 2;
    else if (!first) PS_TRY(tok_bytes_add(out, " ", 1));
    PS_TRY(tok_bytes_add(out, s, n));
    if (out->n == begin) return 0;
    for (size_t i = 0; i < sizeof short_of / sizeof *short_of; i++)
        shorten(out, begin, short_of[i][0], short_of[i][1]);
    return 0;
}

static int repair_decoded(tok_state *st)
{
    PS_TRY(repair(st, st->decoded.at, st->decoded.n));
    st->decoded.n = 0;
    return tok_bytes_add(&st->decoded, st->repaired.s.at, st->repaired.s.n);
}

/* Returns the byte that a token <0xXX> represents, or -1 if the token has another form. */
static int byte_of_token(const uint8_t *s, size_t n)
{
    int value = 0;
    if (n != 6 || memcmp(s, "<0x", 3) || s[5] != '>') return -1;
    for (int i = 3; i < 5; i++) {
        int small = s[i] | 32, letter = small >= 'a' && small <= 'f' ? small - 'a' + 10 : -1;
        int digit = s[i] >= '0' && s[i] <= '9' ? s[i] - '0' : letter;
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* Ends a run of tokens <0xXX>. The bytes of the run begin at `from` in st->decoded. If the bytes are not valid UTF-8,
 * each byte becomes U+FFFD. If `as_they_are` is true, the bytes are never changed. */
static int end_bytes(tok_state *st, size_t from, bool as_they_are)
{
    size_t n = st->decoded.n - from;
    if (as_they_are || tok_utf8_valid(st->decoded.at + from, n)) return 0;
    st->decoded.n = from;
    for (size_t i = 0; i < n; i++) PS_TRY(tok_bytes_add(&st->decoded, "\xef\xbf\xbd", 3));
    return 0;
}

/* Decodes tokens that spell characters. U+2581 becomes a blank, and <0xXX> becomes a byte. If t->strip_first is set, a
 * blank at the beginning is removed. */
static int decode_characters(const ps_tok *t, tok_state *st, const int32_t *ids, int64_t n, int flags)
{
    size_t run = SIZE_MAX;
    for (int64_t i = 0; i < n; i++) {
        PS_TRY(check_id(t, ids[i]));
        const tok_added *a = added_of(t, ids[i]);
        if (a && flags & PS_TOK_SKIP && a->flags & PS_TOK_SPECIAL) continue;
        const uint8_t *s = a ? a->s : tok_name(&t->vocab, ids[i]);       /* an added token, as it is spelled in texts */
        size_t len = a ? a->n : (size_t)t->vocab.entry[ids[i]].n;
        int byte = byte_of_token(s, len);
        if (byte >= 0) {
            uint8_t one = (uint8_t)byte;
            if (run == SIZE_MAX) run = st->decoded.n;
            PS_TRY(tok_bytes_add(&st->decoded, &one, 1));
            continue;
        }
        if (run != SIZE_MAX) PS_TRY(end_bytes(st, run, (flags & PS_TOK_BYTES) != 0));
        run = SIZE_MAX;
        for (size_t k = 0; k < len;) {
            bool blank = len - k >= 3 && !memcmp(s + k, "\xe2\x96\x81", 3);
            PS_TRY(tok_bytes_add(&st->decoded, blank ? (const void *)" " : s + k, 1));
            k += blank ? 3 : 1;
        }
    }
    if (run != SIZE_MAX) PS_TRY(end_bytes(st, run, (flags & PS_TOK_BYTES) != 0));
    if (t->strip_first && st->decoded.n && st->decoded.at[0] == ' ')
        memmove(st->decoded.at, st->decoded.at + 1, --st->decoded.n);
    return 0;
}

int ps_tok_decode(ps_tok *t, const int32_t *ids, int64_t n, int flags, const char **text, int64_t *nbytes)
{
    PS_TRY(tok_is_ready(t));
    PS_NEED(text);
    PS_NEED(nbytes);
    if (n) PS_NEED(ids);
    tok_state *st = &t->state;
    bool first = true;
    if (t->byte_level && !t->raw_entry) PS_TRY(find_raw(t));
    st->decoded.n = 0, st->mapped = false;
    bool characters = t->model == TOK_BPE && !t->byte_level;
    if (characters) PS_TRY(decode_characters(t, st, ids, n, flags));
    for (int64_t i = 0; i < n && !characters; i++) {
        PS_TRY(check_id(t, ids[i]));
        const tok_added *a = t->byte_level && t->raw_entry[ids[i]].n >= 0 ? NULL : added_of(t, ids[i]);
        if (a && flags & PS_TOK_SKIP && a->flags & PS_TOK_SPECIAL) continue;
        bool made_plain = a && !t->byte_level;              /* an added token, as it is spelled in texts */
        const uint8_t *s = made_plain ? a->s : tok_name(&t->vocab, ids[i]);
        size_t len = made_plain ? a->n : (size_t)t->vocab.entry[ids[i]].n;
        if (!t->byte_level) PS_TRY(add_piece(&st->decoded, s, len, first));
        else if (a) PS_TRY(tok_bytes_add(&st->decoded, s, len));
        else PS_TRY(tok_bytes_add(&st->decoded, t->raw.at + t->raw_entry[ids[i]].at, (size_t)t->raw_entry[ids[i]].n));
        first = false;
    }
    if (!(flags & PS_TOK_BYTES) && !tok_utf8_valid(st->decoded.at, st->decoded.n)) PS_TRY(repair_decoded(st));
    *text = st->decoded.n ? (const char *)st->decoded.at : "", *nbytes = (int64_t)st->decoded.n;
    return 0;
}

int ps_tok_print(ps_tok *t, const int32_t *ids, int64_t n, const char **text, int64_t *nbytes)
{
    PS_TRY(tok_is_ready(t));
    PS_NEED(text);
    PS_NEED(nbytes);
    if (n) PS_NEED(ids);
    tok_bytes *out = &t->state.decoded;
    out->n = 0;
    PS_TRY(tok_bytes_more(out, (size_t)n * 12 + 1));
    for (int64_t i = 0; i < n; i++) {
        char digits[12];
        int at = 12;
        uint32_t v = ids[i] < 0 ? 0u - (uint32_t)ids[i] : (uint32_t)ids[i];
        do digits[--at] = (char)('0' + v % 10); while (v /= 10);
        if (ids[i] < 0) digits[--at] = '-';
        if (i) out->at[out->n++] = ' ';
        memcpy(out->at + out->n, digits + at, (size_t)(12 - at));
        out->n += (size_t)(12 - at);
    }
    *text = (const char *)out->at, *nbytes = (int64_t)out->n;
    return 0;
}
