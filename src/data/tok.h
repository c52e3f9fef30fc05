/* SPDX-License-Identifier: BSD-3-Clause
 * Tokenizers from the inside. A `ps_tok` contains the data of files (vocabulary, merges, patterns, added tokens).
 * It does not change after it is ready. A `tok_state` is the memory that a thread needs to turn a text into ids; each
 * thread has one. In reading order: tok_json.c and tok_vocab.c read files. tok_regex.c splits text into words.
 * tok_bpe.c and tok_wordpiece.c turn words into ids. tok_bert.c normalizes text for BERT, tok_normal.c for other
 * models. tokenizer.c implements ps.h. tok_block.c encodes long texts on several threads. tok_text.c has buffers and
 * UTF-8. */
#ifndef PS_DATA_TOK_H
#define PS_DATA_TOK_H
#include "base/error.h"
#include "io/file.h"
#include <stdatomic.h>
#include <stdbool.h>

enum { TOK_ID_LIMIT = 1 << 22 };    /* upper bound of ids; the largest id determines a vocabulary's memory */
enum { TOK_SHOWN = 72 };            /* bytes of a token that a message shows */
enum { TOK_SPLITS = 8 };            /* maximum number of patterns, which are applied one after the other */
enum { TOK_STEPS = 8 };             /* maximum number of steps of a normalizer */

/* -- buffers that grow ------------------------------------------------------------------------------------------- */
typedef struct tok_bytes { uint8_t *at; size_t n, room; } tok_bytes;
typedef struct tok_ints { int32_t *at; size_t n, room; } tok_ints;
/* Makes room for `more` further elements. */
int tok_bytes_more(tok_bytes *b, size_t more);
int tok_ints_more(tok_ints *b, size_t more);
int tok_bytes_add(tok_bytes *b, const void *from, size_t n);
int tok_ints_add(tok_ints *b, int32_t value);
void tok_bytes_free(tok_bytes *b);
void tok_ints_free(tok_ints *b);
const char *tok_shown(const uint8_t *s, size_t n, char out[TOK_SHOWN]);

/* -- UTF-8 ------------------------------------------------------------------------------------------------------- */
/* These functions return the code point of a valid character of `len` bytes (ps_utf8), convert a code point to
 * UTF-8, and return whether a whole text is UTF-8. */
uint32_t tok_code_point(const uint8_t *s, int len);
int tok_utf8_put(uint32_t c, uint8_t out[4]);
bool tok_utf8_valid(const uint8_t *s, size_t n);
/* Returns the length in bytes of the malformed sequence at s, which one U+FFFD replaces (Unicode's "maximal
 * subparts", as in Python). */
size_t tok_utf8_bad(const uint8_t *s, size_t n);

/* A text that is being normalized: its current bytes, and the origin of each byte. Byte i comes from bytes begin[i]
 * to end[i] of the original text. If offsets were not requested, there are no origins. */
typedef struct tok_text {
    tok_bytes s;
    tok_ints begin, end;
    bool mapped;
} tok_text;
int tok_text_add(tok_text *t, const void *bytes, size_t n, int32_t begin, int32_t end);
void tok_text_clear(tok_text *t, bool mapped);
void tok_text_free(tok_text *t);

/* A span of a text: its bytes, and their origins. If the origins are NULL, the bytes are those of the original text
 * from `first` on. */
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
typedef struct tok_entry { uint32_t at; int32_t n; } tok_entry;     /* n is -1 if no token has this id */
typedef struct tok_vocab {
    tok_bytes text;             /* text of all tokens */
    tok_entry *entry;           /* [count] tokens by id */
    int32_t count, room;        /* count is 1 + the largest id */
    int32_t *slot;              /* hash table with open addressing; a slot is id + 1, or 0 if free */
    uint32_t slots, used;
} tok_vocab;
/* Adds a token. Returns PS_EFORMAT if the token or the id already exists. `path` is used in messages. */
int tok_vocab_add(tok_vocab *v, const char *path, const uint8_t *s, size_t n, int64_t id);
int32_t tok_vocab_find(const tok_vocab *v, const uint8_t *s, size_t n);     /* -1: none */
void tok_vocab_free(tok_vocab *v);
static inline const uint8_t *tok_name(const tok_vocab *v, int32_t id) { return v->text.at + v->entry[id].at; }
uint64_t tok_hash(const uint8_t *s, size_t n);

/* -- merges ------------------------------------------------------------------------------------------------------ */
typedef struct tok_pair { uint64_t key; int32_t rank, id; } tok_pair;       /* key is left << 32 | right; rank is -1
                                                                             * in a free slot */
typedef struct tok_merges {
    int32_t *left, *right, *id; /* [count] merges by rank */
    int32_t count, room;
    tok_pair *slot;             /* hash table with open addressing, by key */
    uint32_t slots;
    bool ordered;               /* no merge makes a pair that has a lower rank than the merge itself */
    bool by_token;              /* two tokens merge if together they are a token, whose id is the rank (tiktoken) */
    int32_t *token_rank;        /* if by_token: rank of each token by its score; NULL if the id is the rank */
} tok_merges;
int tok_merges_add(tok_merges *m, const tok_vocab *v, const char *path, int64_t line, const uint8_t *a, size_t na,
                   const uint8_t *b, size_t nb);
/* Makes merges by scores: two tokens merge if together they are a token. The merge whose token has the highest score
 * is first. If scores are equal, the leftmost merge is first. A token with score NaN is never made. */
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

/* -- JSON: a reader that walks over a text, without recursion and without a tree ---------------------------------- */
typedef struct tok_json {
    const char *path;
    const uint8_t *first, *at, *end;
    tok_bytes text;             /* text of the last string */
} tok_json;
int tok_json_bad(const tok_json *j, const char *what);
bool tok_json_accept(tok_json *j, char c);      /* skips blanks */
int tok_json_expect(tok_json *j, char c);
int tok_json_string(tok_json *j);               /* to j->text */
int tok_json_whole(tok_json *j, int64_t *out);
int tok_json_skip(tok_json *j);                 /* skips one value of any kind */
int tok_json_end(tok_json *j);                  /* PS_EFORMAT if anything except blanks is left */
/* Reads the next key of an object after its '{', and the colon after the key. Returns 1 and stores the key in
 * j->text, or returns 0 at the end of the object. `first` is true if no key was read yet. */
int tok_json_key(tok_json *j, bool first);

/* -- words ------------------------------------------------------------------------------------------------------- */
typedef struct tok_regex tok_regex;
int tok_regex_new(const char *pattern, size_t n, tok_regex **out);
void tok_regex_free(tok_regex *r);
/* Memory for matching, one per thread. */
typedef struct tok_matcher tok_matcher;
int tok_matcher_new(tok_matcher **out);
void tok_matcher_free(tok_matcher *m);
/* Finds the first match in s [n] (UTF-8) from `from` on. Returns 1 with its range, or 0 if there is no match. */
int tok_regex_find(const tok_regex *r, tok_matcher *m, const uint8_t *s, size_t n, size_t from, size_t *begin,
                   size_t *end);
/* Returns s in a form that the regular expressions can read: s itself, or a copy in `copy` in which stand-ins
 * replace the code points that PCRE2's tables do not have. */
int tok_stand_in(const uint8_t *s, size_t n, tok_bytes *copy, const uint8_t **out);

/* -- from words to ids ------------------------------------------------------------------------------------------- */
typedef struct tok_bpe tok_bpe;     /* scratch memory and cache of words */
typedef struct tok_state {
    tok_matcher *matcher;
    tok_bpe *bpe;
    tok_text repaired, plain, spaced;
    tok_text normal[2], blanks[2];  /* two texts each for the steps of the normalizer and of Metaspace, which use
                                     * them alternately */
    bool begun;                     /* a section of the original text was already processed, so the next section is
                                     * not its beginning */
    tok_bytes copy[TOK_SPLITS];     /* stand-ins of each split; WordPiece also uses the first entry */
    tok_ints ids, offsets;          /* two offsets per id */
    tok_bytes decoded;
    bool mapped;                    /* offsets were requested */
    bool continued;                 /* the text continues another one, so no blank precedes its first word */
    ps_tok_lost lost;               /* characters that were left out */
} tok_state;
/* Adds the characters of a later text. */
void tok_lost_add(ps_tok_lost *to, const ps_tok_lost *more);
/* Appends the ids of a word to st->ids (and its offsets to st->offsets). */
int tok_bpe_word(const ps_tok *t, tok_state *st, tok_span word);
void tok_bpe_free(tok_bpe *b);
int tok_wordpiece_word(const ps_tok *t, tok_state *st, tok_span word);
/* Writes the text to st->plain as BERT's normalizer returns it. */
int tok_bert_plain(const ps_tok *t, tok_state *st, tok_span text);
/* Calls a function for each word of a normalized text, which is split at white space and punctuation. */
int tok_bert_words(const ps_tok *t, tok_state *st, tok_span text);
int tok_id(tok_state *st, int32_t id, int32_t begin, int32_t end);

/* -- normalizers of a BPE ------------------------------------------------------------------------------------------ */
enum { TOK_NFC, TOK_PREPEND, TOK_REPLACE };
typedef struct tok_step { int kind; uint8_t *from; size_t n_from; uint8_t *to; size_t n_to; } tok_step;
/* Applies the steps to *text. The result is in `turns`; *text must not point into it. */
int tok_normalize(tok_text turns[2], bool mapped, const tok_step *steps, int n, tok_span *text);

/* -- added tokens ------------------------------------------------------------------------------------------------ */
/* s: spelling of the token in the text that is searched, which is normalized if NORMALIZED is set. */
typedef struct tok_added { uint8_t *s; size_t n; int32_t id; int flags; } tok_added;
/* Finds the first added token in s, from *at on, whose flag NORMALIZED equals `normalized`. If several of these
 * tokens begin at the same position, finds the longest. Returns NULL if there is none. Afterwards *at is the
 * position after the token. `begin` and `end` are the token's range, including the blanks that belong to the token,
 * which begin after `done`. */
const tok_added *tok_added_find(const ps_tok *t, const uint8_t *s, size_t n, bool normalized, bool plain, size_t done,
                                size_t *at, size_t *begin, size_t *end);
/* Writes the ids of a whole text to st->ids. `flags` are the flags of ps_tok_encode. */
int tok_encode(const ps_tok *t, tok_state *st, const uint8_t *text, size_t n, int flags);
void tok_state_free(tok_state *st);

enum { TOK_BPE, TOK_WORDPIECE };
struct ps_tok {
    _Atomic int more;           /* number of owners in addition to the first */
    int model;                  /* TOK_BPE .. */
    bool ready;
    char *path;                 /* path of the vocabulary, for messages */
    /* Settings, 0 or 1. prefix_space puts a blank before the first word. byte_level: tokens spell bytes in GPT-2's
     * letters. whole_words: a word that is a token is not merged. trim_offsets excludes a token's blanks from its
     * offsets, and keep_first still includes those of the first token. For WordPiece, clean_text removes control
     * characters, chinese separates Chinese characters, and then strip_accents and lower_case apply. */
    int prefix_space, byte_level, whole_words, trim_offsets, keep_first, clean_text, chinese, strip_accents, lower_case;
    /* Settings of a BPE whose tokens spell characters. byte_fallback spells a character without a token by the
     * tokens <0xXX> of its bytes. fuse_unk makes one unknown token of adjacent characters without a token.
     * strip_first removes one blank from the beginning when decoding. metaspace: blanks are U+2581, and one is put
     * before each section of a text (1), before the text's beginning (2) or nowhere (3). */
    int byte_fallback, fuse_unk, strip_first, metaspace;
    int cuts;                   /* no word that the patterns find continues after a line end between ASCII characters */
    int32_t unk;                /* -1: none */
    int64_t longest_word;       /* WordPiece: largest word length in characters; longer words are unknown */
    int32_t longest_token;      /* in bytes */
    tok_vocab vocab;
    tok_merges merges;
    tok_regex *split[TOK_SPLITS];
    int n_splits;
    tok_step step[TOK_STEPS];
    int n_steps;
    tok_bytes rest;             /* text of tokenizer.json without vocabulary and merges */
    tok_added *added;           /* [n_added] added tokens, longest first */
    int n_added;
    int n_kind[2];              /* number of added tokens that are searched in the original text, and in normalized
                                 * text */
    bool starts[256];           /* first bytes of added tokens */
    int32_t byte_id[256];       /* token of a byte (byte_level: its letter; byte_fallback: <0xXX>), -1 if there is
                                 * none */
    struct { uint8_t s[2], n; } letter[256];    /* for byte_level: spelling of a byte */
    tok_bytes raw;              /* for byte_level: the bytes that tokens represent */
    tok_entry *raw_entry;       /* [vocab.count] */
    tok_state state;            /* state of the calling thread */
};
void tok_retain(ps_tok *tok);        /* adds an owner; each owner calls ps_tok_free */
#endif
