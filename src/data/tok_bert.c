/* SPDX-License-Identifier: BSD-3-Clause
 * Normalizes text for BERT (Devlin et al. 2018, tokenization.py): removes control characters, makes each Chinese
 * character a word of its own, removes accents, and changes letters to lower case. White space and punctuation separate
 * words. The package tokenizers has the same order of steps and the same classes of characters. */
#include "data/tok.h"
#include "data/tok_unicode.h"
#include "base/text.h"
#include <stdlib.h>
#include <utf8proc.h>

typedef struct letter { uint32_t c; int32_t class, begin, end; } letter;    /* class: the canonical combining class */
enum { PENDING = 64 };              /* maximum number of successive marks that are sorted together; a run with more
                                     * marks is divided */

static const tok_range *range_of(const tok_range *ranges, size_t n, uint32_t c)
{
    size_t low = 0, high = n;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (c > ranges[mid].last) low = mid + 1;
        else high = mid;
    }
    return low < n && c >= ranges[low].first ? &ranges[low] : NULL;
}
#define IN(ranges, c) (range_of(ranges, sizeof(ranges) / sizeof *(ranges), c) != NULL)

static bool is_space(uint32_t c)    /* the Unicode property White_Space */
{
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

static bool is_punctuation(uint32_t c)
{
    if (c < 0x80) return c > ' ' && c < 0x7f && !(c >= '0' && c <= '9') && !((c | 32) >= 'a' && (c | 32) <= 'z');
    return IN(tok_bert_punctuation, c);
}

static bool is_chinese(uint32_t c)
{
    return (c >= 0x4e00 && c <= 0x9fff) || (c >= 0x3400 && c <= 0x4dbf) || (c >= 0x20000 && c <= 0x2a6df) ||
           (c >= 0x2a700 && c <= 0x2b81f) || (c >= 0x2b920 && c <= 0x2ceaf) || (c >= 0xf900 && c <= 0xfaff) ||
           (c >= 0x2f800 && c <= 0x2fa1f);
}

static int emit(const ps_tok *t, tok_text *out, uint32_t c, int32_t begin, int32_t end)
{
    uint8_t bytes[4];
    if (t->lower_case) {
        if (c == 0x130) {           /* the only letter whose lower-case form has two code points */
            PS_TRY(tok_text_add(out, "i", 1, begin, end));
            c = 0x307;
        } else {
            const tok_range *r = range_of(tok_lower, sizeof tok_lower / sizeof *tok_lower, c);
            c = r ? c + r->value : (uint32_t)utf8proc_tolower((int32_t)c);
        }
    }
    return tok_text_add(out, bytes, (size_t)tok_utf8_put(c, bytes), begin, end);
}

/* Sorts the pending marks into canonical order, removes accents, and writes the other characters to `out`. */
static int flush(const ps_tok *t, tok_text *out, letter *l, int *n)
{
    for (int i = 1; i < *n; i++)
        for (int j = i; j > 0 && l[j].class && l[j - 1].class > l[j].class; j--) {
            letter swap = l[j];
            l[j] = l[j - 1], l[j - 1] = swap;
        }
    for (int i = 0; i < *n; i++)
        if (!IN(tok_bert_accents, l[i].c)) PS_TRY(emit(t, out, l[i].c, l[i].begin, l[i].end));
    *n = 0;
    return 0;
}

static int decompose(const ps_tok *t, tok_text *out, letter *l, int *n, uint32_t c, int32_t begin, int32_t end)
{
    int32_t parts[32] = { 0 };
    int last = 0;
    int64_t count = utf8proc_decompose_char((int32_t)c, parts, 32, UTF8PROC_DECOMPOSE, &last);
    if (count < 0 || count > 32) count = 1, parts[0] = (int32_t)c;
    for (int64_t i = 0; i < count; i++) {
        int32_t class = utf8proc_get_property(parts[i])->combining_class;
        if (!class || *n == PENDING) PS_TRY(flush(t, out, l, n));
        l[(*n)++] = (letter){ (uint32_t)parts[i], class, begin, end };
    }
    return 0;
}

int tok_bert_plain(const ps_tok *t, tok_state *st, tok_span text)
{
    tok_text *out = &st->plain;
    letter pending[PENDING];
    int n = 0;
    tok_text_clear(out, st->mapped);
    for (size_t i = 0, len; i < text.n; i += len) {
        len = (size_t)ps_utf8(text.s + i, text.n - i);
        uint32_t c = tok_code_point(text.s + i, (int)len);
        int32_t begin = tok_begin(&text, i), end = tok_end(&text, i + len - 1);
        if (t->clean_text && IN(tok_bert_controls, c)) continue;
        if (t->clean_text && is_space(c)) c = ' ';
        if (c < 0x80 || !t->strip_accents) {
            PS_TRY(flush(t, out, pending, &n));
            bool alone = c >= 0x80 && t->chinese && is_chinese(c);
            if (alone) PS_TRY(tok_text_add(out, " ", 1, begin, end));
            PS_TRY(emit(t, out, c, begin, end));
            if (alone) PS_TRY(tok_text_add(out, " ", 1, begin, end));
            continue;
        }
        bool alone = t->chinese && is_chinese(c);
        if (alone) PS_TRY(decompose(t, out, pending, &n, ' ', begin, end));
        PS_TRY(decompose(t, out, pending, &n, c, begin, end));
        if (alone) PS_TRY(decompose(t, out, pending, &n, ' ', begin, end));
    }
    return flush(t, out, pending, &n);
}

int tok_bert_words(const ps_tok *t, tok_state *st, tok_span text)
{
    size_t from = 0;
    for (size_t i = 0, len; i < text.n; i += len) {
        len = (size_t)ps_utf8(text.s + i, text.n - i);
        uint32_t c = tok_code_point(text.s + i, (int)len);
        bool space = is_space(c), alone = !space && is_punctuation(c);
        if (!space && !alone) continue;
        if (i > from) PS_TRY(tok_wordpiece_word(t, st, tok_slice(text, from, i)));
        if (alone) PS_TRY(tok_wordpiece_word(t, st, tok_slice(text, i, i + len)));
        from = i + len;
    }
    return text.n > from ? tok_wordpiece_word(t, st, tok_slice(text, from, text.n)) : 0;
}
