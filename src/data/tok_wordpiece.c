/* SPDX-License-Identifier: BSD-3-Clause
 * WordPiece (Wu et al. 2016, as in BERT). The first token of a word is the longest token that the word begins with. The
 * rest of the word is divided in the same way, but into tokens that begin with "##". If a word cannot be divided in
 * this way, the whole word becomes the unknown token. */
#include "data/tok.h"
#include <string.h>

static bool begins_character(const uint8_t *s, size_t i) { return (s[i] & 0xc0) != 0x80; }

/* Finds the longest token that s [n] begins with. Returns the token's length in bytes, or 0 if s begins with no token.
 * If `continued` is true, the two bytes before s are "##" and belong to the token, but not to its length. */
static size_t longest(const ps_tok *t, const uint8_t *s, size_t n, bool continued, int32_t *id)
{
    size_t most = (size_t)t->longest_token;
    for (size_t len = n < most ? n : most; len > 0; len--) {
        if (len < n && !begins_character(s, len)) continue;
        *id = continued ? tok_vocab_find(&t->vocab, s - 2, len + 2) : tok_vocab_find(&t->vocab, s, len);
        if (*id >= 0) return len;
    }
    return 0;
}

int tok_wordpiece_word(const ps_tok *t, tok_state *st, tok_span word)
{
    size_t characters = 0, first = st->ids.n, first_offset = st->offsets.n, len = 0;
    for (size_t i = 0; i < word.n; i++) characters += begins_character(word.s, i);
    bool known = characters <= (size_t)t->longest_word;
    tok_bytes *copy = &st->copy[0];
    copy->n = 0;
    for (size_t i = 0; i < word.n && known; i += len) {
        int32_t id;
        PS_TRY(tok_bytes_more(copy, word.n - i + 2));
        memcpy(copy->at, "##", 2);
        memcpy(copy->at + 2, word.s + i, word.n - i);
        len = longest(t, copy->at + 2, word.n - i, i > 0, &id);
        if (!(known = len > 0)) break;
        PS_TRY(tok_id(st, id, tok_begin(&word, i), tok_end(&word, i + len - 1)));
    }
    if (known) return 0;
    st->ids.n = first, st->offsets.n = first_offset;
    return tok_id(st, t->unk, tok_begin(&word, 0), tok_end(&word, word.n - 1));
}
