/* SPDX-License-Identifier: BSD-3-Clause
 * Vocabularies and merges. A token can be found by its text or its id. A merge can be found by its pair of tokens. This
 * file also reads the files that contain vocabularies and merges. */
#define _GNU_SOURCE
#include "data/tok.h"
#include "base/alloc.h"
#include "base/text.h"
#include <stdlib.h>
#include <string.h>

/* Hashes bytes to 64 bits by multiplying and folding, eight bytes at a time. The hash is not safe against keys that an
 * attacker chooses. This is acceptable, because each table belongs to one vocabulary. If the tokens of a vocabulary
 * file all collide, only loading this file is slow. */
uint64_t tok_hash(const uint8_t *s, size_t n)
{
    uint64_t h = n * 0x9e3779b97f4a7c15u, w;
    for (; n > 8; n -= 8, s += 8) {
        memcpy(&w, s, 8);
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    w = 0;
    for (size_t i = 0; i < n; i++) w |= (uint64_t)s[i] << (8 * i);
    h = (h ^ w) * 0xff51afd7ed558ccdu;
    h ^= h >> 29;
    h *= 0xc4ceb9fe1a85ec53u;
    return h ^ h >> 32;
}

/* -- tokens ------------------------------------------------------------------------------------------------------ */
static bool is_token(const tok_vocab *v, int32_t id, const uint8_t *s, size_t n)
{
    return (size_t)v->entry[id].n == n && !memcmp(tok_name(v, id), s, n);
}

/* Returns the slot of a token. If the token does not exist, returns the free slot where it belongs. */
static uint32_t slot_of(const tok_vocab *v, const uint8_t *s, size_t n)
{
    uint32_t mask = v->slots - 1, i = (uint32_t)tok_hash(s, n) & mask;
    while (v->slot[i] && !is_token(v, v->slot[i] - 1, s, n)) i = (i + 1) & mask;
    return i;
}

int32_t tok_vocab_find(const tok_vocab *v, const uint8_t *s, size_t n)
{
    return v->slots ? v->slot[slot_of(v, s, n)] - 1 : -1;
}

static int grow_slots(tok_vocab *v)
{
    uint32_t slots = v->slots ? v->slots * 2 : 1024;
    int32_t *old = v->slot;
    if (!(v->slot = ps_alloc0(slots * sizeof *v->slot))) {
        v->slot = old;
        return ps_fail_nomem(slots * sizeof *v->slot);
    }
    v->slots = slots;
    for (int32_t id = 0; id < v->count; id++)
        if (v->entry[id].n >= 0) v->slot[slot_of(v, tok_name(v, id), (size_t)v->entry[id].n)] = id + 1;
    ps_free(old);
    return 0;
}

static int grow_entries(tok_vocab *v, int32_t id)
{
    if (id >= v->room) {
        int32_t room = v->room ? v->room : 512;
        while (room <= id) room *= 2;
        tok_entry *entry = ps_realloc(v->entry, (size_t)room * sizeof *entry);
        if (!entry) return ps_fail_nomem((size_t)room * sizeof *entry);
        v->entry = entry, v->room = room;
    }
    for (; v->count <= id; v->count++) v->entry[v->count] = (tok_entry){ 0, -1 };
    return 0;
}

int tok_vocab_add(tok_vocab *v, const char *path, const uint8_t *s, size_t n, int64_t id)
{
    char shown[TOK_SHOWN], other[TOK_SHOWN];
    if (id < 0 || id >= TOK_ID_LIMIT)
        return ps_fail(PS_EFORMAT, "%s: token '%s' has id %lld; ids must be 0 to %d", path, tok_shown(s, n, shown),
                       (long long)id, TOK_ID_LIMIT - 1);
    if (n > UINT16_MAX)
        return ps_fail(PS_EFORMAT, "%s: token %lld has %zu bytes; a token can have at most 65,535", path, (long long)id,
                       n);
    int32_t there = tok_vocab_find(v, s, n);
    if (there >= 0)
        return ps_fail(PS_EFORMAT, "%s: token '%s' is there twice, as %d and as %lld", path, tok_shown(s, n, shown),
            there,
                       (long long)id);
    if (id < v->count && v->entry[id].n >= 0)
        return ps_fail(PS_EFORMAT, "%s: tokens '%s' and '%s' have the same id, %lld", path,
                       tok_shown(tok_name(v, (int32_t)id), (size_t)v->entry[id].n, other), tok_shown(s, n, shown),
                       (long long)id);
    if (v->text.n + n > UINT32_MAX) return ps_fail(PS_EFORMAT, "%s: all tokens together have more than 4 GiB", path);
    if (v->used * 2 >= v->slots) PS_TRY(grow_slots(v));
    PS_TRY(tok_bytes_more(&v->text, n + 1));        /* 1 more byte, so that the empty token has an address */
    PS_TRY(grow_entries(v, (int32_t)id));
    uint32_t at = (uint32_t)v->text.n, slot = slot_of(v, s, n);
    PS_TRY(tok_bytes_add(&v->text, s, n));
    v->entry[id] = (tok_entry){ at, (int32_t)n };
    v->slot[slot] = (int32_t)id + 1;
    v->used++;
    return 0;
}

/* Changes the id of the token `there` to `id`. After that no token has the id `there`. */
static int move_token(tok_vocab *v, int32_t there, int32_t id)
{
    tok_entry e = v->entry[there];
    uint32_t slot = slot_of(v, tok_name(v, there), (size_t)e.n);
    PS_TRY(grow_entries(v, id));
    v->entry[there].n = -1;
    v->entry[id] = e;
    v->slot[slot] = id + 1;
    return 0;
}

void tok_vocab_free(tok_vocab *v)
{
    tok_bytes_free(&v->text);
    ps_free(v->entry);
    ps_free(v->slot);
    *v = (tok_vocab){ 0 };
}

/* -- merges ------------------------------------------------------------------------------------------------------ */
static int push_merge(tok_merges *m, const char *path, int32_t left, int32_t right, int32_t id)
{
    if (m->count == m->room) {
        int32_t room = m->room ? m->room * 2 : 4096;
        if (room > TOK_ID_LIMIT) return ps_fail(PS_EFORMAT, "%s: there are more than %d merges", path, TOK_ID_LIMIT);
        int32_t **lists[] = { &m->left, &m->right, &m->id };
        for (int i = 0; i < 3; i++) {
            int32_t *p = ps_realloc(*lists[i], (size_t)room * sizeof *p);
            if (!p) return ps_fail_nomem((size_t)room * sizeof *p);
            *lists[i] = p;
        }
        m->room = room;
    }
    m->left[m->count] = left, m->right[m->count] = right, m->id[m->count++] = id;
    return 0;
}

int tok_merges_add(tok_merges *m, const tok_vocab *v, const char *path, int64_t line, const uint8_t *a, size_t na,
                   const uint8_t *b, size_t nb)
{
    char left[TOK_SHOWN], right[TOK_SHOWN];
    uint8_t both[2 * UINT16_MAX];
    int32_t l = tok_vocab_find(v, a, na), r = tok_vocab_find(v, b, nb), id = -1;
    if (l >= 0 && r >= 0) {
        memcpy(both, a, na);
        memcpy(both + na, b, nb);
        id = tok_vocab_find(v, both, na + nb);
    }
    if (id < 0)
        return ps_fail(PS_EFORMAT, "%s: merge %lld joins '%s' and '%s', but the vocabulary has no token '%s%s'", path,
                       (long long)line, tok_shown(a, na, left), tok_shown(b, nb, right), l < 0 || r >= 0 ? left : "",
                       l < 0 ? "" : right);
    return push_merge(m, path, l, r, id);
}

/* Determines whether the merges are ordered. Merges are ordered if each merge that makes a token has a lower rank than
 * each merge that joins this token with another token. If the merges are ordered, merging never returns to a lower
 * rank, and one pass over the ranks is enough for a word. */
static int find_order(tok_merges *m, const tok_vocab *v)
{
    int32_t *made = ps_alloc((size_t)(v->count + 1) * sizeof *made);        /* rank of each token's last merge */
    if (!made) return ps_fail_nomem((size_t)(v->count + 1) * sizeof *made);
    for (int32_t i = 0; i < v->count; i++) made[i] = -1;
    for (int32_t r = 0; r < m->count; r++) made[m->id[r]] = r;
    m->ordered = true;
    for (int32_t r = 0; r < m->count; r++)
        if (made[m->left[r]] >= r || made[m->right[r]] >= r) m->ordered = false;
    ps_free(made);
    return 0;
}

static int by_score(const void *a, const void *b, void *scores)
{
    float x = ((const float *)scores)[*(const int32_t *)a], y = ((const float *)scores)[*(const int32_t *)b];
    return x > y ? -1 : x < y;
}

int tok_merges_of_scores(tok_merges *m, const tok_vocab *v, const char *path, const float *scores, int32_t n)
{
    int32_t *order = ps_alloc((size_t)(n + 1) * sizeof *order), used = 0;
    m->token_rank = ps_alloc0((size_t)(v->count + 1) * sizeof *m->token_rank);
    if (!order || !m->token_rank) {
        ps_free(order);
        return ps_fail_nomem((size_t)n * 8);
    }
    for (int32_t id = 0; id < n && id < v->count; id++) if (scores[id] == scores[id]) order[used++] = id;
    qsort_r(order, (size_t)used, sizeof *order, by_score, (void *)scores);
    int rc = 0;
    for (int32_t i = 0, rank = -1; i < used && !rc; i++) {
        int32_t id = order[i], len = v->entry[id].n;
        if (!i || scores[id] != scores[order[i - 1]]) rank++;
        m->token_rank[id] = rank;
        for (int32_t at = 1; at < len && !rc; at++) {
            const uint8_t *s = tok_name(v, id);
            if ((s[at] & 0xc0) == 0x80) continue;
            int32_t left = tok_vocab_find(v, s, (size_t)at);
            int32_t right = left < 0 ? -1 : tok_vocab_find(v, s + at, (size_t)(len - at));
            if (right >= 0) rc = push_merge(m, path, left, right, id);
        }
    }
    m->by_token = true;
    ps_free(order);
    return rc;
}

int tok_merges_ready(tok_merges *m, const tok_vocab *v)
{
    if (!m->by_token) PS_TRY(find_order(m, v));
    uint32_t slots = 16;
    while (slots < (uint32_t)m->count * 2) slots *= 2;
    if (!(m->slot = ps_alloc(slots * sizeof *m->slot))) return ps_fail_nomem(slots * sizeof *m->slot);
    m->slots = slots;
    for (uint32_t i = 0; i < slots; i++) m->slot[i] = (tok_pair){ 0, -1, -1 };
    for (int32_t r = 0; r < m->count; r++) {
        uint64_t key = (uint64_t)m->left[r] << 32 | (uint32_t)m->right[r];
        uint32_t i = (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & (slots - 1);
        while (m->slot[i].rank >= 0 && m->slot[i].key != key) i = (i + 1) & (slots - 1);
        /* If a pair occurs twice, its second merge applies. */
        m->slot[i] = (tok_pair){ key, m->token_rank ? m->token_rank[m->id[r]] : m->by_token ? m->id[r] : r,
                                   m->id[r] };
    }
    return 0;
}

void tok_merges_free(tok_merges *m)
{
    ps_free(m->left);
    ps_free(m->right);
    ps_free(m->id);
    ps_free(m->slot);
    ps_free(m->token_rank);
    *m = (tok_merges){ 0 };
}

/* -- files ------------------------------------------------------------------------------------------------------- */
static int vocab_object(ps_tok *t, tok_json *j)
{
    PS_TRY(tok_json_expect(j, '{'));
    for (bool first = true;; first = false) {
        int64_t id;
        int rc = tok_json_key(j, first);
        if (rc <= 0) return rc;
        PS_TRY(tok_json_whole(j, &id));
        PS_TRY(tok_vocab_add(&t->vocab, j->path, j->text.at, j->text.n, id));
    }
}

int tok_read_vocab_json(ps_tok *t, const ps_map *map)
{
    tok_json j = { map->path, map->bytes, map->bytes, map->bytes + map->nbytes, { 0 } };
    int rc = tok_bytes_more(&j.text, 1);    /* 1 byte, so that the empty string has an address */
    if (rc == 0) rc = vocab_object(t, &j);
    if (rc == 0) rc = tok_json_end(&j);
    tok_bytes_free(&j.text);
    return rc;
}

/* Sets s [*n] to the next line without its line end. Returns false if no line is left. */
static bool line(const uint8_t **at, const uint8_t *end, const uint8_t **s, size_t *n)
{
    if (*at >= end) return false;
    const uint8_t *stop = memchr(*at, '\n', (size_t)(end - *at)), *next = stop ? stop + 1 : end;
    if (!stop) stop = end;
    if (stop > *at && stop[-1] == '\r') stop--;
    *s = *at, *n = (size_t)(stop - *at), *at = next;
    return true;
}

/* The id of a token is the number of its line. If a line occurs twice, the id is the number of the last occurrence, as
 * in transformers. The same is true of empty lines. */
int tok_read_vocab_txt(ps_tok *t, const ps_map *map)
{
    const uint8_t *at = map->bytes, *end = at + map->nbytes, *s;
    size_t n;
    for (int64_t id = 0; line(&at, end, &s, &n); id++) {
        if (!tok_utf8_valid(s, n))
            return ps_fail(PS_EFORMAT, "%s: line %lld is not UTF-8", map->path, (long long)id + 1);
        int32_t there = id < TOK_ID_LIMIT ? tok_vocab_find(&t->vocab, s, n) : -1;
        PS_TRY(there >= 0 ? move_token(&t->vocab, there, (int32_t)id)
                          : tok_vocab_add(&t->vocab, map->path, s, n, id));
    }
    return 0;
}

int tok_read_merges(ps_tok *t, const ps_map *map)
{
    const uint8_t *at = map->bytes, *end = at + map->nbytes, *s;
    size_t n;
    for (int64_t i = 1; line(&at, end, &s, &n); i++) {
        if (n >= 8 && !memcmp(s, "#version", 8)) continue;
        if (!n && at == end) break;
        const uint8_t *blank = n ? memchr(s, ' ', n) : NULL;
        size_t left = blank ? (size_t)(blank - s) : 0, right = blank ? n - left - 1 : 0;
        if (!left || !right || memchr(blank + 1, ' ', right)) {
            char shown[TOK_SHOWN];
            return ps_fail(PS_EFORMAT, "%s: line %lld is '%s'; a merge must be two tokens with a blank between them",
                           map->path, (long long)i, tok_shown(s, n, shown));
        }
        PS_TRY(tok_merges_add(&t->merges, &t->vocab, map->path, t->merges.count + 1, s, left, blank + 1, right));
    }
    return 0;
}

/* -- tiktoken: a line contains a token's bytes in base64, a blank, and the token's rank -------------------------- */
static int base64_value(uint8_t c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decodes the base64 text s [n], and appends the bytes to `out`, spelled in GPT-2's letters. Sets *good to whether s is
 * valid base64. */
static int spell_base64(tok_bytes *out, const uint8_t *s, size_t n, bool *good)
{
    uint32_t bits = 0;
    int have = 0;
    size_t length = n;
    while (length && n - length < 2 && s[length - 1] == '=') length--;
    out->n = 0;
    *good = n && n % 4 == 0 && length % 4 != 1;
    for (size_t i = 0; i < length && *good; i++) {
        int value = base64_value(s[i]);
        *good = value >= 0;
        bits = bits << 6 | (uint32_t)(value & 63), have += 6;
        if (have < 8) continue;
        uint8_t letter[4];
        have -= 8;
        PS_TRY(tok_bytes_add(out, letter, (size_t)tok_utf8_put(tok_letter_of((int)(bits >> have & 255)), letter)));
    }
    return 0;
}

/* Finds all pairs of tokens whose concatenation is a token. Looking up a part of a token takes time proportional to the
 * part's length. So a part is looked up only if the vocabulary has a token of this length. Few parts of a long token
 * have the length of another token. */
static int pairs_of_tokens(ps_tok *t, const char *path)
{
    const tok_vocab *v = &t->vocab;
    bool length[UINT16_MAX + 1] = { false };
    for (int32_t id = 0; id < v->count; id++)
        if (v->entry[id].n >= 0) length[v->entry[id].n] = true;
    for (int32_t id = 0; id < v->count; id++) {
        int32_t n = v->entry[id].n;
        const uint8_t *s = n > 0 ? tok_name(v, id) : NULL;
        for (int32_t i = 1; i < n; i++) {
            if (!length[i] || !length[n - i] || (s[i] & 0xc0) == 0x80) continue;     /* 0x80: inside a character */
            if (tok_vocab_find(v, s, (size_t)i) < 0 || tok_vocab_find(v, s + i, (size_t)(n - i)) < 0) continue;
            PS_TRY(tok_merges_add(&t->merges, v, path, id + 1, s, (size_t)i, s + i, (size_t)(n - i)));
        }
    }
    t->merges.by_token = true;
    return 0;
}

int tok_read_tiktoken(ps_tok *t, const ps_map *map)
{
    const uint8_t *at = map->bytes, *end = at + map->nbytes, *s;
    tok_bytes letters = { 0 };
    size_t n;
    int rc = 0;
    for (int64_t i = 1; rc == 0 && line(&at, end, &s, &n); i++) {
        const uint8_t *blank = n ? memchr(s, ' ', n) : NULL;
        size_t digits = blank ? n - (size_t)(blank - s) - 1 : 0;
        bool good = false;
        int64_t rank = 0;
        if (!n) continue;
        if (blank) rc = spell_base64(&letters, s, (size_t)(blank - s), &good);
        good = good && digits > 0 && digits < 10;
        for (size_t k = 0; k < digits && good; k++) {
            good = blank[1 + k] >= '0' && blank[1 + k] <= '9';
            rank = rank * 10 + (blank[1 + k] - '0');
        }
        if (rc == 0 && !good)
            rc = ps_fail(PS_EFORMAT, "%s: line %lld is no token in base64 with its rank", map->path, (long long)i);
        if (rc == 0) rc = tok_vocab_add(&t->vocab, map->path, letters.at, letters.n, rank);
    }
    tok_bytes_free(&letters);
    if (rc == 0 && !t->vocab.used)
        rc = ps_fail(PS_EFORMAT, "%s: %lld bytes without a token; the file is empty, fetch it again", map->path,
                     (long long)map->nbytes);
    return rc < 0 ? rc : pairs_of_tokens(t, map->path);
}

/* -- tokenizer.json ------------------------------------------------------------------------------------------------ */
/* Reads the merges. A merge is "left right" or, in files since 2024, ["left", "right"]. */
static int merges_list(ps_tok *t, tok_json *j)
{
    tok_bytes left = { 0 };
    int rc = tok_json_expect(j, '[');
    for (bool first = true; rc == 0 && !tok_json_accept(j, ']'); first = false) {
        if (!first && (rc = tok_json_expect(j, ',')) < 0) break;
        bool two = tok_json_accept(j, '[');
        left.n = 0;
        if ((rc = tok_json_string(j)) < 0 || (rc = tok_bytes_add(&left, j->text.at, j->text.n)) < 0) break;
        const uint8_t *b = NULL;
        size_t na = left.n, nb = 0;
        if (two) {
            if ((rc = tok_json_expect(j, ',')) < 0 || (rc = tok_json_string(j)) < 0) break;
            b = j->text.at, nb = j->text.n;
            if ((rc = tok_json_expect(j, ']')) < 0) break;
        } else {
            const uint8_t *blank = na ? memchr(left.at, ' ', na) : NULL;
            if (blank) b = blank + 1, nb = na - (size_t)(b - left.at), na = (size_t)(blank - left.at);
        }
        if (!na || !nb) rc = tok_json_bad(j, "a merge must be two tokens");
        else rc = tok_merges_add(&t->merges, &t->vocab, j->path, t->merges.count + 1, left.at, na, b, nb);
    }
    tok_bytes_free(&left);
    return rc;
}

/* The range of the model's vocabulary or merges in the file. `end` is NULL if the model has no such list, or if the
 * list's key has a value of another type. */
typedef struct found { const uint8_t *begin, *end; } found;

static int find_model(tok_json *j, found *vocab, found *merges)
{
    PS_TRY(tok_json_expect(j, '{'));
    for (bool first = true;; first = false) {
        int rc = tok_json_key(j, first);
        if (rc <= 0) return rc;
        bool is_vocab = j->text.n == 5 && !memcmp(j->text.at, "vocab", 5);
        bool is_merges = j->text.n == 6 && !memcmp(j->text.at, "merges", 6);
        const uint8_t *from = j->at;
        PS_TRY(tok_json_skip(j));
        while (from < j->at && strchr(" \n\r\t", *from)) from++;
        if (is_vocab && *from == '{') *vocab = (found){ from, j->at };
        if (is_merges && *from == '[') *merges = (found){ from, j->at };
    }
}

static int find_parts(tok_json *j, found *vocab, found *merges)
{
    PS_TRY(tok_json_expect(j, '{'));
    for (bool first = true;; first = false) {
        int rc = tok_json_key(j, first);
        if (rc < 0) return rc;
        if (rc == 0) return tok_json_end(j);
        bool is_model = j->text.n == 5 && !memcmp(j->text.at, "model", 5);
        PS_TRY(is_model ? find_model(j, vocab, merges) : tok_json_skip(j));
    }
}

static int rest_of(tok_bytes *rest, const tok_json *j, const found *parts)
{
    const uint8_t *at = j->first;
    for (int i = 0; i < 2; i++) {
        const found *p = &parts[parts[0].begin && parts[1].begin && parts[1].begin < parts[0].begin ? 1 - i : i];
        if (!p->end) continue;
        PS_TRY(tok_bytes_add(rest, at, (size_t)(p->begin - at)));
        PS_TRY(tok_bytes_add(rest, "null", 4));
        at = p->end;
    }
    return tok_bytes_add(rest, at, (size_t)(j->end - at));
}

int tok_read_tokenizer_json(ps_tok *t, const ps_map *map)
{
    tok_json j = { map->path, map->bytes, map->bytes, map->bytes + map->nbytes, { 0 } };
    found parts[2] = { { 0 } };             /* the vocabulary and the merges */
    int rc = tok_bytes_more(&j.text, 1);
    if (rc == 0) rc = find_parts(&j, &parts[0], &parts[1]);
    if (rc == 0) rc = rest_of(&t->rest, &j, parts);
    if (rc == 0 && parts[0].end) {
        j.at = parts[0].begin;
        rc = vocab_object(t, &j);
    }
    if (rc == 0 && parts[1].end) {
        j.at = parts[1].begin;
        rc = merges_list(t, &j);
    }
    tok_bytes_free(&j.text);
    return rc;
}
