/* SPDX-License-Identifier: BSD-3-Clause
 * Byte-pair encoding of words (Sennrich et al. 2016). Encoding a word repeatedly joins two neighbouring tokens into one
 * token. Each time it joins the pair whose merge has the lowest rank. If several pairs have this rank, it joins the
 * leftmost pair. Encoding ends when no two neighbours have a merge.
 *
 * Three methods compute the same ids. For a short word, each join searches all pairs. For a long word, each rank has a
 * list of its pairs, and a tree of bits finds the lowest rank whose list is not empty. So the time is proportional to
 * the length of the word. If the merges are not ordered (tok_merges.ordered), the pairs of a long word are in a heap. A
 * cache stores the ids of short words. */
#include "data/tok.h"
#include "base/alloc.h"
#include "base/text.h"
#include <stdlib.h>
#include <string.h>

enum { SHORT = 32, LEVELS = 4, CACHE_BITS = 15, CACHED_BYTES = 16, CACHED_IDS = 10, NO_RANK = INT32_MAX, PART = 2048 };

typedef struct symbol { int32_t id, from, to; } symbol;             /* from, to: the range of bytes in the word */
typedef struct symbols { symbol *at; int32_t n, room; } symbols;
typedef struct pair { int32_t rank, id; } pair;
/* One entry of the cache. n_bytes is 0 if the entry is free. */
typedef struct cached { uint64_t key[2]; uint8_t n_bytes, n_ids; int32_t ids[CACHED_IDS]; } cached;
/* An entry of a rank's list. `at` is the left symbol of a pair. */
typedef struct waiting { int32_t at, next; } waiting;

struct tok_bpe {
    cached *cache;              /* [1 << CACHE_BITS] */
    bool dropped;               /* true if a character of the word was omitted */
    int32_t room;               /* number of symbols that each of the arrays sym, prev, next and sorted can hold */
    symbol *sym;
    int32_t *prev, *next;       /* index of the neighbour, or -1 */
    int32_t *sorted;
    /* For a long word. done: the tokens of the word. patch: the new tokens around a seam. pairs: the tokens that
     * stay_two() makes from the bytes of two neighbours. */
    symbols done, patch, pairs;
    waiting *pool;              /* entries of the lists by rank; free entries are in the list `spare` */
    int32_t n_pool, room_pool, spare;
    int32_t *head, *tail;       /* [merges.count] -1 if the list is empty; all lists are empty between words */
    /* bits[0] has a bit for each rank, which is set if the rank's list is not empty. bits[i + 1] has a bit for each
     * 64-bit word of bits[i], which is set if the word is not 0. */
    uint64_t *bits[LEVELS];
    uint64_t *heap;             /* an entry is rank << 32 | left symbol */
    int32_t n_heap, room_heap;
};

static inline pair find(const tok_merges *m, int32_t a, int32_t b)
{
    uint64_t key = (uint64_t)a << 32 | (uint32_t)b;
    uint32_t mask = m->slots - 1, i = (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & mask;
    while (m->slot[i].rank >= 0 && m->slot[i].key != key) i = (i + 1) & mask;
    return m->slot[i].rank < 0 ? (pair){ NO_RANK, -1 } : (pair){ m->slot[i].rank, m->slot[i].id };
}

/* -- a word's first symbols -------------------------------------------------------------------------------------- */
/* Makes the symbols of a word whose tokens spell characters. If a character has no token, it becomes the tokens of its
 * bytes or the unknown token, or it is omitted. The bytes of an incomplete character are treated as single
 * characters. */
static int32_t begin_characters(const ps_tok *t, tok_bpe *b, tok_span word, symbol *sym)
{
    int32_t n = 0;
    bool after_unknown = false;
    for (size_t i = 0, len; i < word.n; i += len) {
        len = (size_t)ps_utf8(word.s + i, word.n - i);
        int32_t id = len ? tok_vocab_find(&t->vocab, word.s + i, len) : -1, to = (int32_t)(i + len);
        if (!len) len = 1, to = (int32_t)i + 1;
        bool bytes = id < 0 && t->byte_fallback;
        for (size_t k = 0; bytes && k < len; k++) bytes = t->byte_id[word.s[i + k]] >= 0;
        for (size_t k = 0; bytes && k < len; k++)
            sym[n++] = (symbol){ t->byte_id[word.s[i + k]], (int32_t)(i + k), (int32_t)(i + k) + 1 };
        bool unknown = !bytes && id < 0;
        if (unknown) id = t->unk;
        if (unknown && after_unknown && t->fuse_unk && id >= 0) sym[n - 1].to = to;
        else if (id >= 0) sym[n++] = (symbol){ id, (int32_t)i, to };
        else if (unknown) b->dropped = true;
        after_unknown = unknown;
    }
    return n;
}

/* Makes the symbols of a word and returns their number. `sym` has room for one symbol per byte. A byte without a token
 * becomes the unknown token or is omitted. */
static int32_t begin_word(const ps_tok *t, tok_bpe *b, tok_span word, symbol *sym)
{
    int32_t n = 0;
    if (!t->byte_level) return begin_characters(t, b, word, sym);
    for (size_t i = 0; i < word.n; i++) {
        int32_t id = t->byte_id[word.s[i]];
        if (id < 0) id = t->unk;
        if (id >= 0) sym[n++] = (symbol){ id, (int32_t)i, (int32_t)i + 1 };
        else b->dropped = true;
    }
    return n;
}

/* Returns whether the vocabulary has a token for the character s [len], or tokens for all its bytes. */
static bool can_spell(const ps_tok *t, const uint8_t *s, size_t len)
{
    if (!t->byte_level && tok_vocab_find(&t->vocab, s, len) >= 0) return true;
    bool all = t->byte_level || t->byte_fallback;
    for (size_t i = 0; all && i < len; i++) all = t->byte_id[s[i]] >= 0;
    return all;
}

/* Counts the characters of a word that were omitted. Called only for words with omitted characters. */
static void count_lost(const ps_tok *t, tok_state *st, tok_span word)
{
    ps_tok_lost lost = { 0 };
    bool before = false;
    for (size_t i = 0, len; i < word.n; i += len) {
        int whole = ps_utf8(word.s + i, word.n - i);
        len = whole ? (size_t)whole : 1;
        bool has = can_spell(t, word.s + i, len);
        if (!has && !lost.characters++) lost.first = whole ? tok_code_point(word.s + i, whole) : word.s[i];
        lost.places += !has && !before;
        before = !has;
    }
    tok_lost_add(&st->lost, &lost);
}

/* Appends a token's id. If offsets were requested, also appends the range of the original text that the token covers.
 * The range is extended to whole characters. */
static int put(const ps_tok *t, tok_state *st, tok_span word, const symbol *s)
{
    if (!st->mapped) return tok_ints_add(&st->ids, s->id);
    size_t from = (size_t)s->from, to = (size_t)s->to;
    int32_t lead = 0, trail = 0;
    while (from + (size_t)lead < to && word.s[from + (size_t)lead] == ' ') lead++;
    while (from + (size_t)trail < to && word.s[to - 1 - (size_t)trail] == ' ') trail++;
    int32_t inner = lead ? tok_end(&word, from + (size_t)lead - 1) : 0, outer = trail ? tok_begin(&word,
        to - (size_t)trail) : 0;
    while (from > 0 && (word.s[from] & 0xc0) == 0x80) from--;
    while (to < word.n && (word.s[to] & 0xc0) == 0x80) to++;
    int32_t begin = tok_begin(&word, from), end = tok_end(&word, to - 1);
    if (t->trim_offsets) {              /* like process_offsets of the package tokenizers */
        bool kept = t->keep_first && (!st->ids.n || !begin);
        if (lead && !kept) begin = inner < end ? inner : end;
        if (trail) end = outer > begin ? outer : begin;
    }
    return tok_id(st, s->id, begin, end);
}

/* -- short words ------------------------------------------------------------------------------------------------- */
static int32_t merge_short(const tok_merges *m, symbol *sym, int32_t n)
{
    pair p[SHORT];
    for (int32_t i = 0; i + 1 < n; i++) p[i] = find(m, sym[i].id, sym[i + 1].id);
    while (n > 1) {
        int32_t best = 0;
        for (int32_t i = 1; i + 1 < n; i++) if (p[i].rank < p[best].rank) best = i;
        if (p[best].rank == NO_RANK) break;
        sym[best].id = p[best].id, sym[best].to = sym[best + 1].to;
        n--;
        memmove(sym + best + 1, sym + best + 2, (size_t)(n - best - 1) * sizeof *sym);
        memmove(p + best, p + best + 1, (size_t)(n - best - 1) * sizeof *p);
        if (best + 1 < n) p[best] = find(m, sym[best].id, sym[best + 1].id);
        if (best > 0) p[best - 1] = find(m, sym[best - 1].id, sym[best].id);
    }
    return n;
}

/* -- long words: lists by rank ------------------------------------------------------------------------------------ */
static int grow(void **list, size_t n, size_t size)
{
    void *p = ps_realloc(*list, n * size);
    if (!p) return ps_fail_nomem(n * size);
    *list = p;
    return 0;
}
#define GROW(list, n) do { \
        void *p_ = (list); \
        PS_TRY(grow(&p_, (size_t)(n), sizeof *(list))); \
        (list) = p_; \
    } while (0)

static int room_for(tok_bpe *b, const tok_merges *m, size_t n)
{
    if ((size_t)b->room < n) {
        int32_t room = b->room ? b->room : 256;
        while ((size_t)room < n) room = room > INT32_MAX / 2 ? INT32_MAX : room * 2;
        GROW(b->sym, room);
        GROW(b->prev, room);
        GROW(b->next, room);
        b->room = room;
    }
    if (b->head || !m->ordered) return 0;
    int32_t *head = NULL, *tail = NULL;
    size_t n_bits = 0, words[LEVELS];
    for (int level = 0,
        left = m->count; level < LEVELS; level++) n_bits += words[level] = (size_t)(left = left / 64 + 1);
    uint64_t *bits = ps_alloc0(n_bits * sizeof *bits);
    head = ps_alloc((size_t)(m->count + 1) * sizeof *head), tail = ps_alloc((size_t)(m->count + 1) * sizeof *tail);
    if (!bits || !head || !tail) {
        ps_free(bits), ps_free(head), ps_free(tail);
        return ps_fail_nomem((size_t)m->count * 8);
    }
    for (int32_t r = 0; r <= m->count; r++) head[r] = -1;
    b->head = head, b->tail = tail;
    for (int level = 0; level < LEVELS; bits += words[level++]) b->bits[level] = bits;
    return 0;
}

static void set_bit(tok_bpe *b, uint32_t r)
{
    for (int level = 0; level < LEVELS; level++, r >>= 6) b->bits[level][r >> 6] |= 1ull << (r & 63);
}

static void clear_bit(tok_bpe *b, uint32_t r)
{
    for (int level = 0; level < LEVELS; level++, r >>= 6)
        if (b->bits[level][r >> 6] &= ~(1ull << (r & 63))) return;
}

/* Returns the lowest rank whose list is not empty, or -1 if all lists are empty. Level 3 is a single word, because 64^4
 * is more than the largest possible number of ranks. */
static int32_t lowest(const tok_bpe *b)
{
    uint32_t r = 0;
    if (!b->bits[LEVELS - 1][0]) return -1;
    for (int level = LEVELS - 1; level >= 0; level--) r = r << 6 | (uint32_t)__builtin_ctzll(b->bits[level][r]);
    return (int32_t)r;
}

static int wait_in_list(tok_bpe *b, const tok_merges *m, int32_t at)
{
    if (at < 0 || b->next[at] < 0) return 0;
    int32_t r = find(m, b->sym[at].id, b->sym[b->next[at]].id).rank, e = b->spare;
    if (r == NO_RANK) return 0;
    if (e >= 0) b->spare = b->pool[e].next;
    else {
        if (b->n_pool == b->room_pool) {
            int32_t room = b->room_pool ? b->room_pool * 2 : 1024;
            if (b->room_pool > INT32_MAX / 2) return ps_fail_nomem((size_t)b->room_pool * 2 * sizeof *b->pool);
            GROW(b->pool, room);
            b->room_pool = room;
        }
        e = b->n_pool++;
    }
    b->pool[e] = (waiting){ at, -1 };
    if (b->head[r] < 0) b->head[r] = e, set_bit(b, (uint32_t)r);
    else b->pool[b->tail[r]].next = e;
    b->tail[r] = e;
    return 0;
}

/* Returns the token that the pair at `at` merges into. Returns -1 if the pair no longer exists, or if its rank is not
 * `rank` any more. */
static int32_t still_there(const tok_bpe *b, const tok_merges *m, int32_t at, int32_t rank)
{
    int32_t right = b->next[at];
    if (right < 0) return -1;
    if (m->by_token) {
        if (b->sym[at].id < 0) return -1;
        pair p = find(m, b->sym[at].id, b->sym[right].id);
        return p.rank == rank ? p.id : -1;
    }
    return b->sym[at].id == m->left[rank] && b->sym[right].id == m->right[rank] ? m->id[rank] : -1;
}

/* Replaces the pair at `at` by one symbol. */
static void join(tok_bpe *b, int32_t at, int32_t id)
{
    int32_t gone = b->next[at], after = b->next[gone];
    b->sym[at].id = id, b->sym[at].to = b->sym[gone].to;
    b->sym[gone].id = -1;
    b->next[at] = after;
    if (after >= 0) b->prev[after] = at;
}

static int ascending(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts a rank's list by position. The order matters if three equal symbols follow each other. These symbols are two
 * overlapping pairs, and the left pair must be merged first. */
static int sort_list(tok_bpe *b, int32_t rank)
{
    int32_t n = 0, last = -1;
    bool sorted = true;
    for (int32_t e = b->head[rank]; e >= 0; last = b->pool[e].at, e = b->pool[e].next)
        n++, sorted = sorted && b->pool[e].at >= last;
    if (sorted) return 0;
    GROW(b->sorted, n);
    n = 0;
    for (int32_t e = b->head[rank]; e >= 0; e = b->pool[e].next) b->sorted[n++] = b->pool[e].at;
    qsort(b->sorted, (size_t)n, sizeof *b->sorted, ascending);
    n = 0;
    for (int32_t e = b->head[rank]; e >= 0; e = b->pool[e].next) b->pool[e].at = b->sorted[n++];
    return 0;
}

/* Merges a long word with the lists. A merge makes only pairs that have higher ranks (tok_merges.ordered). So a rank's
 * list is complete when it is processed. */
static int merge_by_lists(tok_bpe *b, const tok_merges *m, int32_t n)
{
    for (int32_t i = 0; i + 1 < n; i++) PS_TRY(wait_in_list(b, m, i));
    for (int32_t r; (r = lowest(b)) >= 0;) {
        if (m->left[r] == m->right[r]) PS_TRY(sort_list(b, r));
        while (b->head[r] >= 0) {
            int32_t e = b->head[r], at = b->pool[e].at;
            b->head[r] = b->pool[e].next;
            b->pool[e].next = b->spare, b->spare = e;
            if (still_there(b, m, at, r) < 0) continue;
            join(b, at, m->id[r]);
            PS_TRY(wait_in_list(b, m, b->prev[at]));
            PS_TRY(wait_in_list(b, m, at));
        }
        clear_bit(b, (uint32_t)r);
    }
    return 0;
}

/* Empties the lists after an error, because the lists must be empty when the next word begins. */
static void drop_lists(tok_bpe *b)
{
    for (int32_t r; (r = lowest(b)) >= 0;) {
        b->head[r] = -1;
        clear_bit(b, (uint32_t)r);
    }
}

/* -- long words if merges are not ordered ------------------------------------------------------------------------- */
static int wait_in_heap(tok_bpe *b, const tok_merges *m, int32_t at)
{
    if (at < 0 || b->next[at] < 0) return 0;
    int32_t r = find(m, b->sym[at].id, b->sym[b->next[at]].id).rank, i = b->n_heap;
    if (r == NO_RANK) return 0;
    if (b->n_heap == b->room_heap) {
        int32_t room = b->room_heap ? b->room_heap * 2 : 1024;
        if (b->room_heap > INT32_MAX / 2) return ps_fail_nomem((size_t)b->room_heap * 2 * sizeof *b->heap);
        GROW(b->heap, room);
        b->room_heap = room;
    }
    uint64_t key = (uint64_t)r << 32 | (uint32_t)at;
    for (b->n_heap++; i > 0 && b->heap[(i - 1) / 2] > key; i = (i - 1) / 2) b->heap[i] = b->heap[(i - 1) / 2];
    b->heap[i] = key;
    return 0;
}

static uint64_t take_from_heap(tok_bpe *b)
{
    uint64_t top = b->heap[0], key = b->heap[--b->n_heap];
    int32_t i = 0;
    for (int32_t child; (child = 2 * i + 1) < b->n_heap; i = child) {
        if (child + 1 < b->n_heap && b->heap[child + 1] < b->heap[child]) child++;
        if (b->heap[child] >= key) break;
        b->heap[i] = b->heap[child];
    }
    b->heap[i] = key;
    return top;
}

static int merge_by_heap(tok_bpe *b, const tok_merges *m, int32_t n)
{
    b->n_heap = 0;
    for (int32_t i = 0; i + 1 < n; i++) PS_TRY(wait_in_heap(b, m, i));
    while (b->n_heap) {
        uint64_t top = take_from_heap(b);
        int32_t r = (int32_t)(top >> 32), at = (int32_t)(uint32_t)top;
        int32_t id = still_there(b, m, at, r);
        if (id < 0) continue;
        join(b, at, id);
        PS_TRY(wait_in_heap(b, m, b->prev[at]));
        PS_TRY(wait_in_heap(b, m, at));
    }
    return 0;
}

static int add_symbol(symbols *list, symbol one)
{
    if (list->n == list->room) {
        int32_t room = list->room ? list->room * 2 : 256;
        if (list->room > INT32_MAX / 2) return ps_fail_nomem((size_t)list->room * 2 * sizeof *list->at);
        GROW(list->at, room);
        list->room = room;
    }
    list->at[list->n++] = one;
    return 0;
}

/* Merges bytes [from, to) of a word, and appends their tokens to `out`. */
static int merge_part(const ps_tok *t, tok_bpe *b, tok_span word, size_t from, size_t to, symbols *out)
{
    symbol few[SHORT];
    tok_span part = tok_slice(word, from, to);
    bool is_short = part.n <= SHORT;
    if (!is_short) PS_TRY(room_for(b, &t->merges, part.n));
    symbol *sym = is_short ? few : b->sym;
    int32_t n = begin_word(t, b, part, sym), shift = (int32_t)from;
    if (is_short) n = merge_short(&t->merges, sym, n);
    else {
        for (int32_t i = 0; i < n; i++) b->prev[i] = i - 1, b->next[i] = i + 1 < n ? i + 1 : -1;
        b->n_pool = 0, b->spare = -1;
        int rc = t->merges.ordered ? merge_by_lists(b, &t->merges, n) : merge_by_heap(b, &t->merges, n);
        if (rc < 0 && t->merges.ordered) drop_lists(b);
        PS_TRY(rc);
    }
    for (int32_t i = n ? 0 : -1; i >= 0; i = is_short ? (i + 1 < n ? i + 1 : -1) : b->next[i])
        PS_TRY(add_symbol(out, (symbol){ sym[i].id, sym[i].from + shift, sym[i].to + shift }));
    return 0;
}

/* -- very long words, in parts that fit a cache of the processor ---------------------------------------------------
 *
 * A very long word is cut into parts, and each part is merged separately. The border between two parts is called a
 * seam. Merging the parts makes the same tokens as merging the whole word if no merge of the whole word crosses a seam.
 * stay_two() tests this. It merges only the bytes of the two tokens at a seam. These bytes merge in the same way within
 * the whole word until the first merge crosses the seam. Therefore, if a merge of the whole word crosses the seam, a
 * merge of these bytes crosses it, too, and the result is not the same two tokens. Two neighbours within a part always
 * stay two tokens. */
static int stay_two(const ps_tok *t, tok_bpe *b, tok_span word, symbol x, symbol y)
{
    b->pairs.n = 0;
    PS_TRY(merge_part(t, b, word, (size_t)x.from, (size_t)y.to, &b->pairs));
    return b->pairs.n == 2 && b->pairs.at[0].id == x.id && b->pairs.at[1].id == y.id;
}

/* Changes the tokens around the seam before token `seam` to the tokens that merging the whole word would make. Returns
 * 1, or returns 0 if a part of the word longer than 2 * PART bytes would have to be merged again. */
static int mend(const ps_tok *t, tok_bpe *b, tok_span word, int32_t seam)
{
    symbols *all = &b->done, *patch = &b->patch;
    if (!seam || seam == all->n) return 1;
    int rc = stay_two(t, b, word, all->at[seam - 1], all->at[seam]);
    for (int32_t reach = 2; rc == 0; reach *= 2) {
        int32_t low = seam > reach ? seam - reach : 0, high = all->n - seam > reach ? seam + reach : all->n;
        int32_t from = all->at[low].from, to = all->at[high - 1].to;
        if (to - from > 2 * PART) return 0;
        patch->n = 0;
        PS_TRY(merge_part(t, b, word, (size_t)from, (size_t)to, patch));
        rc = low ? stay_two(t, b, word, all->at[low - 1], patch->at[0]) : 1;
        if (rc == 1 && high < all->n) rc = stay_two(t, b, word, patch->at[patch->n - 1], all->at[high]);
        if (rc != 1) continue;
        int32_t behind = all->n - high;
        symbol last = { 0 };
        while (all->n < low + patch->n + behind) PS_TRY(add_symbol(all, last));
        memmove(all->at + low + patch->n, all->at + high, (size_t)behind * sizeof *all->at);
        memcpy(all->at + low, patch->at, (size_t)patch->n * sizeof *all->at);
        all->n = low + patch->n + behind;
    }
    return rc;
}

static int long_word(const ps_tok *t, tok_state *st, tok_span word)
{
    tok_bpe *b = st->bpe;
    int mended = word.n > 2 * PART;
    b->done.n = 0;
    for (size_t at = 0, end; at < word.n && mended; at = end) {
        int32_t seam = b->done.n;
        end = word.n - at > PART ? at + PART : word.n;
        while (!t->byte_level && end < word.n && (word.s[end] & 0xc0) == 0x80) end--;
        PS_TRY(merge_part(t, b, word, at, end, &b->done));
        PS_TRY(mended = mend(t, b, word, seam));
    }
    if (!mended) {
        b->done.n = 0;
        PS_TRY(merge_part(t, b, word, 0, word.n, &b->done));
    }
    for (int32_t i = 0; i < b->done.n; i++) PS_TRY(put(t, st, word, &b->done.at[i]));
    return 0;
}

/* -- words ------------------------------------------------------------------------------------------------------- */
/* Makes a key for the cache from a word of 1 to 16 bytes. The key and the word's length together identify the word. */
static void key_of(const uint8_t *s, size_t n, uint64_t key[2])
{
    uint32_t a, b;
    key[0] = key[1] = 0;
    if (n >= 8) {
        memcpy(&key[0], s, 8);
        memcpy(&key[1], s + n - 8, 8);
    } else if (n >= 4) {
        memcpy(&a, s, 4);
        memcpy(&b, s + n - 4, 4);
        key[0] = (uint64_t)a << 32 | b;
    } else key[0] = (uint64_t)s[0] << 16 | (uint64_t)s[n / 2] << 8 | s[n - 1];
}

static int new_bpe(tok_bpe **out)
{
    tok_bpe *b = ps_alloc0(sizeof *b);
    if (!b) return ps_fail_nomem(sizeof *b);
    if (!(b->cache = ps_alloc0(sizeof(cached) << CACHE_BITS))) {
        ps_free(b);
        return ps_fail_nomem(sizeof(cached) << CACHE_BITS);
    }
    *out = b;
    return 0;
}

static int short_word(const ps_tok *t, tok_state *st, tok_span word, size_t *n_ids)
{
    symbol sym[SHORT];
    int32_t n = merge_short(&t->merges, sym, begin_word(t, st->bpe, word, sym));
    for (int32_t i = 0; i < n; i++) PS_TRY(put(t, st, word, &sym[i]));
    *n_ids = (size_t)n;
    return 0;
}

/* Returns the token that spells the whole word, or -1 if no token spells it. */
static int32_t find_word(const ps_tok *t, tok_span word)
{
    uint8_t s[1024];
    size_t n = 0;
    if (!t->byte_level) return tok_vocab_find(&t->vocab, word.s, word.n);
    if (word.n > sizeof s / 2) return -1;
    for (size_t i = 0; i < word.n; i++) {
        memcpy(s + n, t->letter[word.s[i]].s, 2);
        n += t->letter[word.s[i]].n;
    }
    return tok_vocab_find(&t->vocab, s, n);
}

int tok_bpe_word(const ps_tok *t, tok_state *st, tok_span word)
{
    size_t n_ids;
    if (!word.n) return 0;
    if (!st->bpe) PS_TRY(new_bpe(&st->bpe));
    int32_t whole = t->whole_words ? find_word(t, word) : -1;
    if (whole >= 0) return put(t, st, word, &(symbol){ whole, 0, (int32_t)word.n });
    st->bpe->dropped = false;
    if (word.n > CACHED_BYTES || st->mapped) {
        PS_TRY(word.n > SHORT ? long_word(t, st, word) : short_word(t, st, word, &n_ids));
        if (st->bpe->dropped) count_lost(t, st, word);
        return 0;
    }
    uint64_t key[2];
    key_of(word.s, word.n, key);
    uint64_t mixed = (key[0] ^ (key[1] + word.n) * 0xc4ceb9fe1a85ec53u) * 0x9e3779b97f4a7c15u;
    cached *c = &st->bpe->cache[mixed >> (64 - CACHE_BITS)];
    if (c->n_bytes == word.n && c->key[0] == key[0] && c->key[1] == key[1]) {
        PS_TRY(tok_ints_more(&st->ids, CACHED_IDS));
        memcpy(st->ids.at + st->ids.n, c->ids, sizeof c->ids);
        st->ids.n += c->n_ids;
        return 0;
    }
    PS_TRY(short_word(t, st, word, &n_ids));
    if (st->bpe->dropped) {                     /* do not cache the word: each use must count its lost characters */
        count_lost(t, st, word);
        return 0;
    }
    if (n_ids > CACHED_IDS) return 0;
    *c = (cached){ { key[0], key[1] }, (uint8_t)word.n, (uint8_t)n_ids, { 0 } };
    memcpy(c->ids, st->ids.at + st->ids.n - n_ids, n_ids * sizeof *c->ids);
    return 0;
}

void tok_bpe_free(tok_bpe *b)
{
    if (!b) return;
    ps_free(b->bits[0]);
    void *lists[] = { b->cache, b->sym, b->prev, b->next, b->sorted, b->pool, b->head, b->tail, b->heap,
                      b->done.at, b->patch.at, b->pairs.at };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) ps_free(lists[i]);
    ps_free(b);
}
