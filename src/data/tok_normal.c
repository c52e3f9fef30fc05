/* SPDX-License-Identifier: BSD-3-Clause
 * The normalizers in a BPE's tokenizer.json. They change a text before it is split into words. There are three:
 * canonical composition (NFC, Unicode Standard Annex 15, by utf8proc), prepending a text, and replacing one text by
 * another text. */
#define _GNU_SOURCE
#include "data/tok.h"
#include "base/alloc.h"
#include "base/text.h"
#include <string.h>
#include <utf8proc.h>

enum { SEGMENT = 256 };             /* maximum size in bytes of a segment that is composed at once; a segment that would
                                     * be longer is divided */

/* -- NFC ---------------------------------------------------------------------------------------------------------- */
/* Returns whether a character depends on the character before it although its combining class is 0. Some of these
 * characters can be composed with the character before them. The other characters (U+0F73, U+0F75, U+0F81) are
 * decomposed into marks. */
static bool joins_back(uint32_t c)
{
    static const uint32_t list[] = {
        0x9be, 0x9d7, 0xb3e, 0xb56, 0xb57, 0xbbe, 0xbd7, 0xcc2, 0xcd5, 0xcd6, 0xd3e, 0xd57, 0xdcf, 0xddf, 0x102e,
        0xf73, 0xf75, 0xf81, 0x1b35, 0x11127, 0x1133e, 0x11357, 0x114b0, 0x114ba, 0x114bd, 0x115af, 0x11930 };
    if ((c >= 0x1161 && c <= 0x1175) || (c >= 0x11a8 && c <= 0x11c2)) return true;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        if (list[i] == c) return true;
    return false;
}

/* Returns true if the text before c and the text that starts with c can be normalized separately. */
static bool begins_anew(uint32_t c)
{
    return c < 0x300 || (utf8proc_get_property((int32_t)c)->combining_class == 0 && !joins_back(c));
}

/* A character of the segment. `change` is the number that the package tokenizers uses for the origin of a character:
 *    0   the character was made from the next character of the text
 *    1   the character has no character of the text as its origin
 *   -n   the character was made from the next character of the text and the n characters after it */
typedef struct { int32_t c, change, class; } piece;

/* Decomposes bytes [from, to) into `list`, and sorts marks by their combining classes. */
static int take_apart(piece list[SEGMENT * 4], int64_t *n, tok_span text, size_t from, size_t to)
{
    *n = 0;
    for (size_t at = from, len; at < to; at += len) {
        int32_t points[SEGMENT * 4];
        len = (size_t)ps_utf8(text.s + at, to - at);
        int32_t whole = (int32_t)tok_code_point(text.s + at, (int)len);
        int64_t count = utf8proc_decompose_char(whole, points, SEGMENT * 4 - *n, UTF8PROC_STABLE | UTF8PROC_COMPOSE,
                                                NULL);
        if (count < 0 || *n + count > SEGMENT * 4) return ps_fail(PS_EINVAL, "utf8proc: %s", utf8proc_errmsg(count));
        for (int64_t k = 0; k < count; k++, ++*n) {
            piece p = { points[k], k > 0, utf8proc_get_property(points[k])->combining_class };
            int64_t to_place = *n;
            for (; p.class && to_place > 0 && list[to_place - 1].class > p.class; to_place--)
                list[to_place] = list[to_place - 1];
            list[to_place] = p;
        }
    }
    return 0;
}

/* Returns the composition of characters `a` and `b`, or -1 if they have no composition. */
static int32_t joined(int32_t a, int32_t b)
{
    int32_t pair[2] = { a, b };
    return utf8proc_normalize_utf32(pair, 2, UTF8PROC_STABLE | UTF8PROC_COMPOSE) == 1 ? pair[0] : -1;
}

/* Composes characters where possible. Returns the number of characters that remain. */
static int64_t join(piece *list, int64_t n)
{
    int64_t kept = 0, starter = -1;
    int32_t last = -1;                  /* class of the last character kept after the starter, or -1 */
    for (int64_t k = 0; k < n; k++) {
        piece p = list[k];
        if (starter >= 0 && last < p.class) {                  /* no mark after the starter blocks p */
            int32_t c = joined(list[starter].c, p.c);
            if (c >= 0) {
                list[starter].c = c;
                list[starter].change += p.change - 1;
                continue;
            }
        }
        if (p.class == 0) starter = kept, last = -1;
        else if (starter >= 0) last = p.class;
        list[kept++] = p;
    }
    return kept;
}

/* Composes bytes [from, to). Characters outside this range do not affect the composition. Each character gets the same
 * position as in the package tokenizers. A character without an origin gets the position of the last character of the
 * text that was used. */
static int compose(tok_text *out, tok_span text, size_t from, size_t to)
{
    piece list[SEGMENT * 4];
    int64_t n;
    PS_TRY(take_apart(list, &n, text, from, to));
    n = join(list, n);
    size_t used = from, next = from;    /* begin of the last character that was used, and of the next character */
    for (int64_t k = 0; k < n; k++) {
        int64_t takes = 1 - list[k].change;
        size_t begin = takes > 0 && next < to ? next : used, end = begin + (size_t)ps_utf8(text.s + begin, to - begin);
        uint8_t bytes[4];
        PS_TRY(tok_text_add(out, bytes, (size_t)tok_utf8_put((uint32_t)list[k].c, bytes), tok_begin(&text, begin),
                            tok_end(&text, end - 1)));
        for (; takes > 0 && next < to; takes--) {
            used = next;
            next += (size_t)ps_utf8(text.s + next, to - next);
        }
    }
    return 0;
}

static int nfc(tok_text *out, tok_span text)
{
    for (size_t i = 0, next; i < text.n; i = next) {
        size_t len = (size_t)ps_utf8(text.s + i, text.n - i);
        uint32_t c = tok_code_point(text.s + i, (int)len);
        next = i + len;
        /* 0xcc is the first byte of U+0300. A character below U+0300 is not composed with the character before it. */
        while (next < text.n && text.s[next] >= 0xcc && next - i < SEGMENT - 4) {
            size_t more = (size_t)ps_utf8(text.s + next, text.n - next);
            if (begins_anew(tok_code_point(text.s + next, (int)more))) break;
            next += more;
        }
        if (c < 0x300 && next == i + len)
            PS_TRY(tok_text_add(out, text.s + i, len, tok_begin(&text, i), tok_end(&text, next - 1)));
        else PS_TRY(compose(out, text, i, next));
    }
    return 0;
}

/* -- prepended texts, and replacements of parts of a text --------------------------------------------------------- */
static int copy(tok_text *out, tok_span text, size_t from, size_t to)
{
    if (!out->mapped) return tok_bytes_add(&out->s, text.s + from, to - from);
    for (size_t i = from; i < to; i++)
        PS_TRY(tok_text_add(out, text.s + i, 1, tok_begin(&text, i), tok_end(&text, i)));
    return 0;
}

/* Puts step->to before the text. The origin of its bytes is the text's first character. */
static int prepend(tok_text *out, tok_span text, const tok_step *step)
{
    size_t first = (size_t)ps_utf8(text.s, text.n);
    PS_TRY(tok_text_add(out, step->to, step->n_to, tok_begin(&text, 0), tok_end(&text, first - 1)));
    return copy(out, text, 0, text.n);
}

static int replace(tok_text *out, tok_span text, const tok_step *step)
{
    size_t done = 0;
    for (size_t i = 0; i + step->n_from <= text.n;) {
        const uint8_t *at = memmem(text.s + i, text.n - i, step->from, step->n_from);
        if (!at) break;
        i = (size_t)(at - text.s);
        PS_TRY(copy(out, text, done, i));
        PS_TRY(tok_text_add(out, step->to, step->n_to, tok_begin(&text, i), tok_end(&text, i + step->n_from - 1)));
        i += step->n_from, done = i;
    }
    return copy(out, text, done, text.n);
}

/* -- all steps ---------------------------------------------------------------------------------------------------- */
static int run(const tok_step *step, tok_text *out, tok_span text)
{
    switch (step->kind) {
    case TOK_NFC: return nfc(out, text);
    case TOK_PREPEND: return prepend(out, text, step);
    default: return replace(out, text, step);
    }
}

int tok_normalize(tok_text turns[2], bool mapped, const tok_step *steps, int n, tok_span *text)
{
    for (int k = 0; k < n && text->n; k++) {
        tok_text *out = &turns[k & 1];
        tok_text_clear(out, mapped);
        PS_TRY(run(&steps[k], out, *text));
        *text = (tok_span){ out->s.at, out->s.n, mapped ? out->begin.at : NULL, mapped ? out->end.at : NULL, 0 };
    }
    return 0;
}

int ps_tok_normalize(ps_tok *t, const char *what, const char *from, const char *to)
{
    PS_NEED(t);
    PS_NEED(what);
    PS_NEED(from);
    PS_NEED(to);
    static const char *const kinds[] = { [TOK_NFC] = "nfc", [TOK_PREPEND] = "prepend", [TOK_REPLACE] = "replace" };
    if (t->ready) return ps_fail(PS_ESTATE, "the tokenizer is ready, so its settings can no longer change");
    if (t->n_steps == TOK_STEPS) return ps_fail(PS_EUNSUP, "a tokenizer has more than %d normalizers", TOK_STEPS);
    for (int kind = 0; kind < 3; kind++) {
        if (strcmp(what, kinds[kind])) continue;
        if ((kind == TOK_REPLACE && !*from) || (kind == TOK_PREPEND && !*to))
            return ps_fail(PS_EINVAL, "a normalizer \"%s\" has an empty text", what);
        if (!tok_utf8_valid((const uint8_t *)from, strlen(from)) || !tok_utf8_valid((const uint8_t *)to, strlen(to)))
            return ps_fail(PS_EFORMAT, "the texts of a normalizer \"%s\" are not UTF-8", what);
        tok_step *step = &t->step[t->n_steps];
        *step = (tok_step){ kind, (uint8_t *)ps_strdup(from), strlen(from), (uint8_t *)ps_strdup(to), strlen(to) };
        t->n_steps++;
        return step->from && step->to ? 0 : ps_fail_nomem(step->n_from + step->n_to + 2);
    }
    return ps_fail(PS_EINVAL, "there is no normalizer \"%s\"; the normalizers are nfc, prepend and replace", what);
}
