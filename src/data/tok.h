/* SPDX-License-Identifier: BSD-3-Clause
 * Internal declarations of the tokenizers. A `ps_tok` contains the data of a tokenizer's files: vocabulary, merges,
 * patterns and added tokens. A `ps_tok` does not change after it is ready. A `tok_state` is the memory that a thread
 * needs to turn a text into ids. Each thread has its own tok_state.
 *
 * The files, in reading order: tok_json.c and tok_vocab.c read the tokenizer's files. tok_regex.c splits text into
 * words. tok_bpe.c and tok_wordpiece.c turn words into ids. tok_bert.c normalizes text for BERT. tok_normal.c
 * normalizes text for other models. tokenizer.c implements the functions in ps.h. tok_block.c encodes long texts on
 * several threads. tok_text.c implements buffers and UTF-8. */
#ifndef PS_DATA_TOK_H
#define PS_DATA_TOK_H
#include "base/error.h"
#include "io/file.h"
#include <stdatomic.h>
#include <stdbool.h>

enum { TOK_ID_LIMIT = 1 << 22 };    /* ids must be less than this; the largest id determines a vocabulary's memory */
enum { TOK_SHOWN = 72 };            /* maximum number of bytes of a token that an error message shows */
enum { TOK_SPLITS = 8 };            /* maximum number of patterns; the patterns are applied one after the other */
enum { TOK_STEPS = 8 };             /* maximum number of steps of a normalizer */

/* -- buffers that grow ------------------------------------------------------------------------------------------- */
typedef struct tok_bytes { uint8_t *at; size_t n, room; } tok_bytes;
typedef struct tok_ints { int32_t *at; size_t n, room; } tok_ints;
/* Make room for `more` additional elements. */
int tok_bytes_more(tok_bytes *b, size_t more);
int tok_ints_more(tok_ints *b, size_t more);
int tok_bytes_add(tok_bytes *b, const void *from, size_t n);
int tok_ints_add(tok_ints *b, int32_t value);
void tok_bytes_free(tok_bytes *b);
void tok_ints_free(tok_ints *b);
const char *tok_shown(const uint8_t *s, size_t n, char out[TOK_SHOWN]);

/* -- UTF-8 ------------------------------------------------------------------------------------------------------- */
/* tok_code_point returns the code point of a valid UTF-8 character that has `len` bytes (ps_utf8).
 * tok_utf8_put writes code point c as UTF-8 to `out` and returns the number of bytes that it wrote.
 * tok_utf8_valid returns whether all n bytes at s are valid UTF-8. */
uint32_t tok_code_point(const uint8_t *s, int len);
int tok_utf8_put(uint32_t c, uint8_t out[4]);
bool tok_utf8_valid(const uint8_t *s, size_t n);
/* Returns the length in bytes of the malformed sequence at s. The caller replaces the sequence by one U+FFFD. The
 * length follows Unicode's rule of "maximal subparts", as in Python. */
size_t tok_utf8_bad(const uint8_t *s, size_t n);

/* A text that is being normalized. `s` contains the current bytes. Byte i was made from bytes begin[i] to end[i] of the
 * original text. If the caller did not request offsets, `begin` and `end` are empty. */
typedef struct tok_text {
    tok_bytes s;
    tok_ints begin, end;
    bool mapped;
} tok_text;
int tok_text_add(tok_text *t, const void *bytes, size_t n, int32_t begin, int32_t end);
void tok_text_clear(tok_text *t, bool mapped);
void tok_text_free(tok_text *t);

/* A span of a text: n bytes `s`, and their origins as in tok_text. If `begin` and `end` are NULL, the span is a part of
 * the original text that starts at byte `first`. */
typedef struct tok_span {
    const uint8_t *s;
    size_t n;
    const int32_t *begin, *end;
    int32_t first;
} tok_span;
tok_span tok_slice(tok_span span, size_t from, size_t to);
static inline int32_t tok_begin(const tok_span *t, size_t i) { return t->begin ? t->begin[i] : t->first + (int32_t)i; }
static inline int32_t tok_end(const tok_span *t, size_t i) { return t->end ? t->end[i] : t->first + (int32_t)i + 1; }

/* -- vocabularies ------------------------------------------------------------------------------------------------ */
typedef struct tok_entry { uint32_t at; int32_t n; } tok_entry;     /* n is -1 if there is no token with this id */
typedef struct tok_vocab {
    tok_bytes text;             /* the text of all tokens, one after the other */
    tok_entry *entry;           /* [count] the tokens, by id */
    int32_t count, room;        /* count is the largest id plus 1 */
    int32_t *slot;              /* hash table with open addressing; a slot contains id + 1, or 0 if it is free */
    uint32_t slots, used;
} tok_vocab;
/* Adds a token. Returns PS_EFORMAT if the token or the id already exists. Error messages contain `path`. */
int tok_vocab_add(tok_vocab *v, const char *path, const uint8_t *s, size_t n, int64_t id);
int32_t tok_vocab_find(const tok_vocab *v, const uint8_t *s, size_t n);     /* returns -1 if there is no such token */
void tok_vocab_free(tok_vocab *v);
static inline const uint8_t *tok_name(const tok_vocab *v, int32_t id) { return v->text.at + v->entry[id].at; }
uint64_t tok_hash(const uint8_t *s, size_t n);

/* -- merges ------------------------------------------------------------------------------------------------------ */
typedef struct tok_pair { uint64_t key; int32_t rank, id; } tok_pair;       /* key: left << 32 | right */
typedef struct tok_merges {
    int32_t *left, *right, *id; /* [count] the merges, by rank */
    int32_t count, room;
    tok_pair *slot;             /* hash table with open addressing, searched by key; rank is -1 in a free slot */
    uint32_t slots;
    bool ordered;               /* true if a merge never makes a pair whose rank is lower than the rank of the merge */
    bool by_token;              /* true if any two tokens merge whose concatenation is a token; the rank of the merge is
                                 * the id of this token (tiktoken) or its token_rank */
    int32_t *token_rank;        /* if by_token is true: each token's rank by its score; NULL if ids are ranks */
} tok_merges;
int tok_merges_add(tok_merges *m, const tok_vocab *v, const char *path, int64_t line, const uint8_t *a, size_t na,
                   const uint8_t *b, size_t nb);
/* Makes merges from scores. Two tokens merge if their concatenation is a token. Among the possible merges, the merge
 * that makes the token with the highest score is applied first. If scores are equal, the leftmost merge is applied
 * first. No merge makes a token whose score is NaN. */
int tok_merges_of_scores(tok_merges *m, const tok_vocab *v, const char *path, const float *scores, int32_t n);
int tok_merges_ready(tok_merges *m, const tok_vocab *v);
void tok_merges_free(tok_merges *m);

int tok_read_vocab_json(ps_tok *t, const ps_map *map);
int tok_read_vocab_txt(ps_tok *t, const ps_map *map);
int tok_read_merges(ps_tok *t, const ps_map *map);
int tok_read_tokenizer_json(ps_tok *t, const ps_map *map);
int tok_read_tiktoken(ps_tok *t, const ps_map *map);
/* Returns GPT-2's letter for a byte (bytes_to_unicode). */
uint32_t tok_letter_of(int byte);

/* -- JSON: a reader that scans a text once, without recursion and without a tree ---------------------------------- */
typedef struct tok_json {
    const char *path;
    const uint8_t *first, *at, *end;
    tok_bytes text;             /* text of the last string that was read */
} tok_json;
int tok_json_bad(const tok_json *j, const char *what);
bool tok_json_accept(tok_json *j, char c);      /* skips blanks before c */
int tok_json_expect(tok_json *j, char c);
int tok_json_string(tok_json *j);               /* stores the string in j->text */
int tok_json_whole(tok_json *j, int64_t *out);
int tok_json_skip(tok_json *j);                 /* skips one value of any kind */
int tok_json_end(tok_json *j);                  /* returns PS_EFORMAT if anything except blanks follows */
/* Reads the next key of an object, and the colon after the key. The caller has already read the object's '{'. Returns 1
 * and stores the key in j->text, or returns 0 at the end of the object. `first` is true if no key was read yet. */
int tok_json_key(tok_json *j, bool first);

/* -- words ------------------------------------------------------------------------------------------------------- */
typedef struct tok_regex tok_regex;
int tok_regex_new(const char *pattern, size_t n, tok_regex **out);
void tok_regex_free(tok_regex *r);
/* The memory for matching. Each thread needs its own tok_matcher. */
typedef struct tok_matcher tok_matcher;
int tok_matcher_new(tok_matcher **out);
void tok_matcher_free(tok_matcher *m);
/* Finds the first match in the UTF-8 text s [n] at or after byte `from`. Returns 1 and sets *begin and *end to the
 * match's range, or returns 0 if there is no match. */
int tok_regex_find(const tok_regex *r, tok_matcher *m, const uint8_t *s, size_t n, size_t from, size_t *begin,
                   size_t *end);
/* Sets *out to a text that the regular expressions can match in place of s: s itself, or a copy of s in `copy`. In the
 * copy, each code point that PCRE2's tables lack is replaced by another code point of the same category. */
int tok_stand_in(const uint8_t *s, size_t n, tok_bytes *copy, const uint8_t **out);

/* -- from words to ids ------------------------------------------------------------------------------------------- */
typedef struct tok_bpe tok_bpe;     /* scratch memory, and a cache of the ids of words */
typedef struct tok_state {
    tok_matcher *matcher;
    tok_bpe *bpe;
    tok_text repaired, plain, spaced;
    /* The steps of the normalizer write to the two texts of `normal` alternately. The steps of Metaspace write to the
     * two texts of `blanks` alternately. */
    tok_text normal[2], blanks[2];
    /* True if a section of the original text was already processed, so that the next section does not begin the
     * text. */
    bool begun;
    tok_bytes copy[TOK_SPLITS];     /* for each pattern: the copy that tok_stand_in makes; WordPiece uses copy[0] */
    tok_ints ids, offsets;          /* `offsets` has two entries per id */
    tok_bytes decoded;
    bool mapped;                    /* true if the caller requested offsets */
    bool continued;                 /* true if the text continues another text; no blank is put before its first word */
    ps_tok_lost lost;               /* the characters of the text that have no ids */
} tok_state;
/* Adds the lost characters of a later text to `to`. */
void tok_lost_add(ps_tok_lost *to, const ps_tok_lost *more);
/* Appends the ids of a word to st->ids, and their offsets to st->offsets if offsets were requested. */
int tok_bpe_word(const ps_tok *t, tok_state *st, tok_span word);
void tok_bpe_free(tok_bpe *b);
int tok_wordpiece_word(const ps_tok *t, tok_state *st, tok_span word);
/* Normalizes a text for BERT and writes the result to st->plain. */
int tok_bert_plain(const ps_tok *t, tok_state *st, tok_span text);
/* Splits a normalized text at white space and punctuation, and appends the ids of each word. */
int tok_bert_words(const ps_tok *t, tok_state *st, tok_span text);
int tok_id(tok_state *st, int32_t id, int32_t begin, int32_t end);

/* -- normalizers of a BPE ------------------------------------------------------------------------------------------ */
enum { TOK_NFC, TOK_PREPEND, TOK_REPLACE };
typedef struct tok_step { int kind; uint8_t *from; size_t n_from; uint8_t *to; size_t n_to; } tok_step;
/* Applies n steps to *text. The result is stored in turns[0] or turns[1], and *text points to the result. Before the
 * call, *text must not point into `turns`. */
int tok_normalize(tok_text turns[2], bool mapped, const tok_step *steps, int n, tok_span *text);

/* -- added tokens ------------------------------------------------------------------------------------------------ */
/* An added token. If the flag NORMALIZED is set, `s` is the token's spelling in normalized text. Otherwise `s` is its
 * spelling in the original text. */
typedef struct tok_added { uint8_t *s; size_t n; int32_t id; int flags; } tok_added;
/* Finds the next added token in s whose flag NORMALIZED equals `normalized`. The search starts at *at. If several such
 * tokens begin at the same position, the longest token is found. Returns NULL if s contains no such token. Sets *at to
 * the position after the token. Sets *begin and *end to the token's range. The range includes the blanks that belong to
 * the token, but no byte before `done`. */
const tok_added *tok_added_find(const ps_tok *t, const uint8_t *s, size_t n, bool normalized, bool plain, size_t done,
                                size_t *at, size_t *begin, size_t *end);
/* Appends the ids of a whole text to st->ids. `flags` are the flags of ps_tok_encode. */
int tok_encode(const ps_tok *t, tok_state *st, const uint8_t *text, size_t n, int flags);
void tok_state_free(tok_state *st);

enum { TOK_BPE, TOK_WORDPIECE };
struct ps_tok {
    _Atomic int more;           /* number of owners minus one */
    int model;                  /* TOK_BPE or TOK_WORDPIECE */
    bool ready;
    char *path;                 /* path of the vocabulary, for error messages */
    /* Settings, each 0 or 1:
     *   prefix_space    a blank is put before the first word
     *   byte_level      tokens spell bytes in GPT-2's letters
     *   whole_words     a word that is a token is not merged
     *   trim_offsets    a token's offsets do not include its blanks
     *   keep_first      the offsets of the first token include its blanks even if trim_offsets is 1
     * Settings of WordPiece, each 0 or 1. The first two settings are applied before the last two:
     *   clean_text      control characters are removed
     *   chinese         each Chinese character becomes a word
     *   strip_accents   accents are removed
     *   lower_case      letters become lower case */
    int prefix_space, byte_level, whole_words, trim_offsets, keep_first, clean_text, chinese, strip_accents, lower_case;
    /* Settings of a BPE whose tokens spell characters:
     *   byte_fallback   1: the tokens <0xXX> of a character's bytes spell a character that has no token
     *   fuse_unk        1: adjacent characters that have no tokens become one unknown token
     *   strip_first     1: decoding removes one blank from the beginning
     *   metaspace       1 to 3: blanks become U+2581
     *                   1: a U+2581 is also put before each section of a text
     *                   2: a U+2581 is also put before the beginning of a text */
    int byte_fallback, fuse_unk, strip_first, metaspace;
    /* 1 if no word that the patterns find contains a line end between two ASCII characters that are not blanks. */
    int cuts;
    int32_t unk;                /* id of the unknown token, or -1 */
    int64_t longest_word;       /* WordPiece: maximum length of a word in characters; a longer word is unknown */
    int32_t longest_token;      /* length of the longest token in bytes */
    tok_vocab vocab;
    tok_merges merges;
    tok_regex *split[TOK_SPLITS];
    int n_splits;
    tok_step step[TOK_STEPS];
    int n_steps;
    tok_bytes rest;             /* the text of tokenizer.json without its vocabulary and merges */
    tok_added *added;           /* [n_added] the added tokens, longest first */
    int n_added;
    /* n_kind[0]: number of added tokens that are searched in the original text. n_kind[1]: number of added tokens that
     * are searched in normalized text. */
    int n_kind[2];
    bool starts[256];           /* true for the first bytes of added tokens */
    int32_t byte_id[256];       /* id of each byte's token, or -1; the token is the byte's letter (byte_level) or <0xXX>
                                 * (byte_fallback) */
    struct { uint8_t s[2], n; } letter[256];    /* for byte_level: the letter of each byte, n bytes of UTF-8 */
    tok_bytes raw;              /* for byte_level: the bytes that each token represents */
    tok_entry *raw_entry;       /* [vocab.count] the range in `raw` of each token */
    tok_state state;            /* state for the calling thread */
};
void tok_retain(ps_tok *tok);        /* adds an owner; each owner must call ps_tok_free */
#endif
