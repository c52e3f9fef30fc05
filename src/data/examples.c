/* SPDX-License-Identifier: BSD-3-Clause
 * Stores examples as token ids, one example after the other, in memory or in a file. Each full block of records is
 * written to the file while examples are added. The file is mapped when it is complete. A token has a record of 4
 * bytes. The highest bit of the record is set if the token is not trained. If examples have labels or weights of their
 * own, each record has 12 bytes.
 *
 * The file contains a head, the records (padded to a multiple of 8 bytes), the starts [count + 1] and the weights
 * [count]. The file gets its final name when it is complete. */
#include "data/examples.h"
#include "base/alloc.h"
#include <string.h>

enum { BLOCK = 3 << 18 };               /* size of a block in bytes, a multiple of both record sizes */
static const char MAGIC[8] = "PSEXAMP1";

typedef struct head {                   /* The head of a file, in little-endian byte order. All supported machines are
                                         * little-endian. */
    char magic[8];
    uint64_t key[2];
    int64_t count, tokens, wide;
    uint64_t hash;                      /* hash of the records, the starts and the weights */
    uint64_t sum;                       /* XXH3 of all bytes of the head before this field */
} head;

static int64_t padded(int64_t nbytes) { return (nbytes + 7) / 8 * 8; }
static uint64_t both(uint64_t a, uint64_t b)
{
    uint64_t pair[2] = { a, b };
    return ps_xxh3(pair, sizeof pair);
}

int ps_examples_new(const char *path, const uint64_t *key, int wide, ps_examples **out)
{
    PS_NEED(path);
    PS_NEED(key);
    PS_NEED(out);
    ps_examples *e = ps_alloc0(sizeof *e);
    if (!e) return ps_fail_nomem(sizeof *e);
    e->wide = wide != 0;
    e->file = PS_TEMPFILE_NONE;
    e->map.fd = -1;
    memcpy(e->key, key, sizeof e->key);
    e->block = ps_alloc(BLOCK);
    int rc = e->block ? 0 : ps_fail_nomem(BLOCK);
    if (rc == 0 && *path) rc = ps_tempfile_open(&e->file, path);
    if (rc < 0) ps_examples_free(e);
    else *out = e;
    return rc;
}

/* -- adding -------------------------------------------------------------------------------------------------------- */
static int to_memory(ps_examples *e)
{
    int64_t want = e->stored + e->in_block;
    if (want > e->memory_room) {
        int64_t room = e->memory_room ? e->memory_room : BLOCK;
        while (room < want) room *= 2;
        uint8_t *memory = ps_realloc(e->memory, (size_t)room);
        if (!memory) return ps_fail_nomem((size_t)room);
        e->memory = memory;
        e->memory_room = room;
    }
    memcpy(e->memory + e->stored, e->block, (size_t)e->in_block);
    return 0;
}

static int store_block(ps_examples *e)
{
    if (e->in_block == 0) return 0;
    if (e->file.fd < 0) PS_TRY(to_memory(e));
    else PS_TRY(ps_tempfile_write(&e->file, (int64_t)sizeof(head) + e->stored, e->block, e->in_block));
    e->hash = both(e->hash, ps_xxh3(e->block, e->in_block));
    e->stored += e->in_block;
    e->in_block = 0;
    return 0;
}

static int make_room(ps_examples *e)
{
    if (e->count < e->room) return 0;
    int64_t room = e->room ? 2 * e->room : 1024;
    int64_t *starts = ps_realloc(e->starts, (size_t)(room + 1) * sizeof *starts);
    if (!starts) return ps_fail_nomem((size_t)(room + 1) * sizeof *starts);
    e->starts = starts;
    float *weights = ps_realloc(e->weights, (size_t)room * sizeof *weights);
    if (!weights) return ps_fail_nomem((size_t)room * sizeof *weights);
    e->weights = weights;
    e->room = room;
    if (e->count == 0) e->starts[0] = 0;
    return 0;
}

int example_record(const ps_examples *e, const int32_t *ids, const int32_t *labels, const float *weights, int64_t i,
                   uint8_t *to)
{
    int32_t label = labels ? labels[i] : ids[i];
    if (ids[i] < 0) return ps_fail(PS_ERANGE, "token %lld is %d; ids begin with 0", (long long)i, ids[i]);
    if (!e->wide && label != ids[i] && label != EXAMPLE_IGNORED)
        return ps_fail(PS_EINVAL, "labels that differ from the ids need wide examples (ps_examples_new)");
    example_wide wide = { ids[i], label, weights ? weights[i] : 1.0f };
    uint32_t narrow = (uint32_t)ids[i] | (label == ids[i] ? 0 : EXAMPLE_UNTRAINED);
    memcpy(to, e->wide ? (void *)&wide : (void *)&narrow, (size_t)record_nbytes(e));
    return 0;
}

int ps_examples_add(ps_examples *e, const int32_t *ids, const int32_t *labels, const float *weights, int64_t n,
                    double weight)
{
    PS_NEED(e);
    PS_NEED(ids || n == 0);
    if (e->finished || e->at) return ps_fail(PS_ESTATE, "no example can be appended to these");
    if (!e->wide && weights) return ps_fail(PS_EINVAL, "token weights need wide examples (ps_examples_new)");
    PS_TRY(make_room(e));
    for (int64_t i = 0; i < n; i++) {
        if (e->in_block == BLOCK) PS_TRY(store_block(e));
        PS_TRY(example_record(e, ids, labels, weights, i, e->block + e->in_block));
        e->in_block += record_nbytes(e);
    }
    e->tokens += n;
    e->weights[e->count] = (float)weight;
    e->starts[++e->count] = e->tokens;
    return 0;
}

int ps_examples_gather(ps_examples *e, const ps_examples *from)
{
    PS_NEED(e);
    PS_NEED(from && from->at);
    if (e->finished || e->at || e->wide != from->wide)
        return ps_fail(PS_EINVAL, "examples are gathered into a list of the same kind that is not finished");
    for (int64_t i = 0; i < from->count; i++) {
        if (!from->at[i]) return ps_fail(PS_ESTATE, "example %lld has not been put", (long long)i);
        int64_t left = from->lengths[i] * record_nbytes(e);
        const uint8_t *records = from->at[i];
        PS_TRY(make_room(e));
        while (left > 0) {
            if (e->in_block == BLOCK) PS_TRY(store_block(e));
            int64_t n = left < BLOCK - e->in_block ? left : BLOCK - e->in_block;
            memcpy(e->block + e->in_block, records, (size_t)n);
            e->in_block += n, records += n, left -= n;
        }
        e->tokens += from->lengths[i];
        e->weights[e->count] = from->weights[i];
        e->starts[++e->count] = e->tokens;
    }
    return 0;
}

/* -- the file ------------------------------------------------------------------------------------------------------ */
/* Sets the pointers into the mapped file. The file's head must be valid. */
static void point(ps_examples *e)
{
    int64_t nbytes = padded(e->tokens * record_nbytes(e));
    e->records = e->map.bytes + sizeof(head);
    e->starts = (int64_t *)(uintptr_t)(e->records + nbytes);
    e->weights = (float *)(e->starts + e->count + 1);
}

static int64_t file_nbytes(const head *h)
{
    int64_t each = h->wide ? (int64_t)sizeof(example_wide) : 4;
    return (int64_t)sizeof *h + padded(h->tokens * each) + (h->count + 1) * 8 + h->count * 4;
}

static int write_file(ps_examples *e)
{
    head h = { .key = { e->key[0], e->key[1] }, .count = e->count, .tokens = e->tokens, .wide = e->wide,
               .hash = e->hash };
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.sum = ps_xxh3(&h, (int64_t)offsetof(head, sum));
    int64_t at = (int64_t)sizeof h + padded(e->stored);
    PS_TRY(ps_tempfile_write(&e->file, at, e->starts, (e->count + 1) * 8));
    PS_TRY(ps_tempfile_write(&e->file, at + (e->count + 1) * 8, e->weights, e->count * 4));
    PS_TRY(ps_tempfile_write(&e->file, 0, &h, sizeof h));
    PS_TRY(ps_tempfile_commit(&e->file));
    PS_TRY(ps_map_open(&e->map, e->file.path));
    ps_free(e->starts);
    ps_free(e->weights);
    point(e);
    return 0;
}

int ps_examples_finish(ps_examples *e)
{
    PS_NEED(e);
    if (e->finished) return 0;
    if (e->at) return ps_fail(PS_ESTATE, "scattered examples are not finished but gathered (ps_examples_gather)");
    PS_TRY(make_room(e));
    PS_TRY(store_block(e));
    e->hash = both(e->hash, both(ps_xxh3(e->starts, (e->count + 1) * 8), ps_xxh3(e->weights, e->count * 4)));
    if (e->file.fd >= 0) PS_TRY(write_file(e));
    else e->records = e->memory;
    ps_tempfile_close(&e->file);
    ps_free(e->block);
    e->block = NULL;
    e->finished = true;
    return 0;
}

/* Returns the hash of the records, starts and weights in a mapped file. ps_examples_finish computes the same hash when
 * it writes the file. */
static uint64_t hash_of(const ps_examples *e)
{
    uint64_t hash = 0;
    int64_t nbytes = e->tokens * record_nbytes(e);
    for (int64_t at = 0; at < nbytes; at += BLOCK)
        hash = both(hash, ps_xxh3(e->records + at, nbytes - at < BLOCK ? nbytes - at : BLOCK));
    return both(hash, both(ps_xxh3(e->starts, (e->count + 1) * 8), ps_xxh3(e->weights, e->count * 4)));
}

/* Returns true if all examples are within the records. A checksum does not prove this: a program can write any numbers
 * with a correct checksum. */
static bool starts_are_valid(const ps_examples *e)
{
    if (e->starts[0] != 0 || e->starts[e->count] != e->tokens) return false;
    for (int64_t i = 0; i < e->count; i++) if (e->starts[i] > e->starts[i + 1]) return false;
    return true;
}

int ps_examples_open(const char *path, const uint64_t *key, ps_examples **out)
{
    PS_NEED(path);
    PS_NEED(key);
    PS_NEED(out);
    ps_map map;
    head h;
    PS_TRY(ps_map_open(&map, path));
    int rc = 0;
    if (map.nbytes < (int64_t)sizeof h) rc = ps_fail(PS_EFORMAT, "%s: the file is too short", path);
    if (rc == 0) rc = ps_map_read(&map, 0, &h, sizeof h);
    if (rc == 0 && (memcmp(h.magic, MAGIC, sizeof MAGIC) || h.sum != ps_xxh3(&h, (int64_t)offsetof(head, sum)) ||
                    h.count < 0 || h.count > map.nbytes || h.tokens < 0 || h.tokens > map.nbytes ||
                    map.nbytes != file_nbytes(&h)))
        rc = ps_fail(PS_EFORMAT, "%s: this is not a complete file of examples", path);
    if (rc == 0 && memcmp(h.key, key, sizeof h.key))
        rc = ps_fail(PS_ESTATE, "%s: the file has the examples of other data", path);
    ps_examples *e = rc == 0 ? ps_alloc0(sizeof *e) : NULL;
    if (rc == 0 && !e) rc = ps_fail_nomem(sizeof *e);
    if (rc < 0) {
        ps_map_close(&map);
        return rc;
    }
    e->map = map;
    e->file = PS_TEMPFILE_NONE;
    e->wide = h.wide != 0, e->finished = true, e->count = h.count, e->tokens = h.tokens, e->hash = h.hash;
    memcpy(e->key, h.key, sizeof e->key);
    point(e);
    if (hash_of(e) == e->hash && starts_are_valid(e)) {
        *out = e;
        return 0;
    }
    ps_examples_free(e);
    return ps_fail(PS_EFORMAT, "%s: the file's bytes have changed", path);
}

int ps_file_hash(const char *path, uint64_t *out)
{
    PS_NEED(path);
    PS_NEED(out);
    ps_map map;
    PS_TRY(ps_map_open(&map, path));
    int rc = ps_map_hash(&map, out);
    ps_map_close(&map);
    return rc;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */
int64_t ps_examples_count(const ps_examples *e) { return e ? e->count : 0; }
int64_t ps_examples_tokens(const ps_examples *e) { return e ? e->tokens : 0; }
uint64_t ps_examples_hash(const ps_examples *e) { return e ? e->hash : 0; }

int ps_examples_read(const ps_examples *e, int64_t i, int32_t *ids, int32_t *labels, int64_t room, int64_t *n)
{
    PS_NEED(e);
    PS_NEED(n);
    if (!e->finished && !e->at) return ps_fail(PS_ESTATE, "examples can be read only after ps_examples_finish");
    if (i < 0 || i >= e->count || (e->at && !e->at[i]))
        return ps_fail(PS_ERANGE, "there is no example %lld: there are %lld examples", (long long)i,
                       (long long)e->count);
    const uint8_t *records = example_records(e, i);
    *n = example_length(e, i);
    for (int64_t k = 0; k < *n && k < room; k++) {
        ids[k] = example_id(e, records, k);
        labels[k] = example_label(e, records, k);
    }
    return 0;
}

void examples_retain(ps_examples *e) { atomic_fetch_add(&e->more, 1); }

void ps_examples_free(ps_examples *e)
{
    if (!e || atomic_fetch_sub(&e->more, 1) > 0) return;
    ps_tempfile_close(&e->file);
    if (e->map.bytes) ps_map_close(&e->map);
    else {
        ps_free(e->starts);
        ps_free(e->weights);
    }
    ps_free(e->memory);
    ps_free(e->block);
    scatter_free(e);
    ps_free(e);
}
