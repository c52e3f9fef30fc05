/* SPDX-License-Identifier: BSD-3-Clause
 * libFuzzer target of the tokenizers' readers and of encoding and decoding. The input's first byte selects the kind of
 * the rest: vocab.json, vocab.txt, merges.txt, tokenizer.json, JSON lines, a pattern (up to the first NUL; a text
 * follows), a text for GPT-2's kind, a text for BERT's, a file of ranks (.tiktoken). A tokenizer that opens then
 * encodes a text and decodes it again. */
#include "data/tok.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

static void must(int condition)
{
    if (!condition) abort();
}

static const char text[] = "the cat's  12\n\n caf\xc3\xa9 \xf0\x9f\x98\x80\xff [MASK]";
static const char pattern[] = "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
static char letters[8192];          /* vocab.json with the 256 letters and the results of some merges */

static void make_letters(void)
{
    static const char *const more[] = { "th", "the", "aa", "aaaa", "[MASK]" };
    size_t n = (size_t)snprintf(letters, sizeof letters, "{");
    int other = 256;
    for (int byte = 0; byte < 256; byte++) {
        int self = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        n += (size_t)snprintf(letters + n, sizeof letters - n, "\"\\u%04x\":%d,", self ? byte : other++, byte);
    }
    for (int i = 0; i < 5; i++)
        n += (size_t)snprintf(letters + n, sizeof letters - n, "\"%s\":%d%s", more[i], 256 + i, i < 4 ? "," : "}");
}

static int read_as(ps_tok *t, int (*reader)(ps_tok *, const ps_map *), const void *bytes, size_t n)
{
    ps_map map;
    if (ps_map_borrow(&map, "input", bytes, (int64_t)n) < 0) return -1;
    int rc = reader(t, &map);
    if (rc < 0) must(ps_error_message()[0]);
    ps_map_close(&map);
    return rc;
}

/* Converts texts to ids and back. Every id must exist, and offsets must be inside the text. With byte tokens, valid
 * UTF-8 must be restored. */
static void use(ps_tok *t, const uint8_t *s, size_t n, int bytes)
{
    ps_tok_ids out;
    const char *back;
    int64_t length;
    if (ps_tok_ready(t) < 0 || ps_tok_encode(t, (const char *)s, (int64_t)n, PS_TOK_OFFSETS, &out) < 0) {
        must(ps_error_message()[0]);
        return;
    }
    int32_t *ids = malloc((size_t)out.n * 4 + 1);
    if (!ids) return;
    if (out.n) memcpy(ids, out.ids, (size_t)out.n * 4);
    for (int64_t i = 0; i < 2 * out.n; i++) must(out.offsets[i] >= 0 && (size_t)out.offsets[i] <= n);
    for (int64_t i = 0; i < out.n; i++) must(out.offsets[2 * i] <= out.offsets[2 * i + 1]);
    int64_t count = out.n;
    must(ps_tok_encode(t, (const char *)s, (int64_t)n, 0, &out) == 0 && out.n == count);
    must(!count || !memcmp(ids, out.ids, (size_t)count * 4));
    must(ps_tok_decode(t, ids, count, 0, &back, &length) == 0 && tok_utf8_valid((const uint8_t *)back, (size_t)length));
    if (bytes && tok_utf8_valid(s, n)) must((size_t)length == n && !memcmp(back, s, n));
    free(ids);
}

/* Creates a GPT-2 tokenizer. With `strip`, [MASK] includes the blanks around it. */
static ps_tok *gpt2(const char *split, size_t n, int strip)
{
    ps_tok *t = NULL;
    if (!letters[0]) make_letters();
    must(ps_tok_new("bpe", &t) == 0 && read_as(t, tok_read_vocab_json, letters, strlen(letters)) == 0);
    must(read_as(t, tok_read_merges, "t h\nth e\na a\naa aa\n", 19) == 0 && ps_tok_set(t, "byte_level", 1) == 0);
    must(ps_tok_add(t, "[MASK]", 6, 260, PS_TOK_SPECIAL | (strip ? PS_TOK_LSTRIP | PS_TOK_RSTRIP : 0)) == 0);
    if (split && ps_tok_split(t, split, (int64_t)n) < 0) {
        ps_tok_free(t);
        return NULL;
    }
    return t;
}

static void json_lines(const uint8_t *s, size_t n)
{
    ps_tok *t = gpt2(pattern, sizeof pattern - 1, 0);
    ps_tok_block block = { .path = "input", .field = n % 2 ? "text" : NULL, .mark = 260, .threads = 1 + (int)(n % 3),
                           .flags = PS_TOK_PLAIN };
    ps_tok_ids out;
    must(t && ps_tok_ready(t) == 0);
    for (int last = 0; last < 2; last++) {
        block.last = last;
        if (ps_tok_encode_block(t, &block, (const char *)s, (int64_t)n, &out) < 0) break;
        must(block.used >= 0 && (size_t)block.used <= n && (!last || (size_t)block.used == n));
        s += block.used, n -= (size_t)block.used;
    }
    ps_tok_free(t);
}

static void bert(const uint8_t *s, size_t n)
{
    static const char words[] = "[UNK]\nthe\n##s\ncat\n'\na\n##b\ne\n";
    ps_tok *t = NULL;
    must(ps_tok_new("wordpiece", &t) == 0 && read_as(t, tok_read_vocab_txt, words, sizeof words - 1) == 0);
    const char *const flags[] = { "clean_text", "chinese", "strip_accents", "lower_case" };
    for (int i = 0; i < 4; i++) must(ps_tok_set(t, flags[i], !n || s[0] & 1 << i) == 0);
    must(ps_tok_set(t, "unk", 0) == 0 && ps_tok_add(t, "The\xcc\x81", 5, 8, PS_TOK_NORMALIZED) == 0);
    use(t, s, n, 0);
    ps_tok_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    static int (*const readers[])(ps_tok *, const ps_map *) = { tok_read_vocab_json, tok_read_vocab_txt,
        tok_read_merges,
                                                                tok_read_tokenizer_json };
    if (!size) return 0;
    int kind = input[0] % 9;
    uint8_t *s = malloc(size);              /* separate memory, so that a read past the end is detected */
    ps_tok *t = NULL;
    if (!s) return 0;
    size_t n = size - 1;
    memcpy(s, input + 1, n);
    if (kind == 4) json_lines(s, n);
    else if (kind == 7) bert(s, n);
    else if (kind == 8) {
        must(ps_tok_new("bpe", &t) == 0);
        if (read_as(t, tok_read_tiktoken, s, n) == 0) {
            must(ps_tok_set(t, "byte_level", 1) == 0 && ps_tok_set(t, "whole_words", 1) == 0);
            use(t, (const uint8_t *)text, sizeof text - 1, 0);
        }
    } else if (kind >= 5) {
        const uint8_t *end = kind == 5 ? memchr(s, 0, n) : NULL;
        size_t at = end ? (size_t)(end - s) : kind == 5 ? n : 0;
        int strip = n % 2;
        t = kind == 5 ? gpt2((const char *)s, at, strip) : gpt2(pattern, sizeof pattern - 1, strip);
        if (t) use(t, s + at, n - at, !strip);
    } else {
        must(ps_tok_new("bpe", &t) == 0);
        if (kind == 2) must(read_as(t, tok_read_vocab_json, letters[0] ? letters : "{\"a\":0,\"aa\":1}",
                                    letters[0] ? strlen(letters) : 14) == 0);
        must(ps_tok_set(t, "byte_level", 1) == 0);
        if (read_as(t, readers[kind], s, n) == 0) use(t, (const uint8_t *)text, sizeof text - 1, 0);
    }
    ps_tok_free(t);
    free(s);
    return 0;
}
