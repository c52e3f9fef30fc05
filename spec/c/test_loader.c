/* SPDX-License-Identifier: BSD-3-Clause
 * Tests of token shards and the loader of src/io. Prints what failed and returns non-zero. */
#define _GNU_SOURCE
#include "data/tokens.h"
#include "io_check.h"
#include <pthread.h>

/* -- token shards ------------------------------------------------------------------------------------------------ */
static void write_shard(const char *path, int width, int64_t n, int32_t first)
{
    ps_tokw *w = NULL;
    if (!OK(ps_tokw_new(path, width, &w))) return;
    for (int64_t i = 0; i < n; i++) {
        int32_t id = first + (int32_t)i;
        if (!OK(ps_tokw_append(w, &id, 1))) break;
    }
    OK(ps_tokw_commit(w));
    ps_tokw_free(w);
}

static void test_tokens(void)
{
    const char *path = in_folder("t.bin");
    int32_t back[8], header[256] = { 0 };
    ps_tokens *s = NULL;
    for (int width = 2; width <= 4; width += 2) {
        write_shard(path, width, 130000 / width, 7);
        for (int asked = 0; asked <= width; asked += width) {
            if (!OK(ps_tokens_open(path, asked, &s))) continue;
            CHECK(ps_tokens_count(s) == 130000 / width);
            OK(ps_tokens_read(s, 30000, 8, back));
            for (int i = 0; i < 8; i++) CHECK(back[i] == 30007 + i);
            FAILS(ps_tokens_read(s, ps_tokens_count(s) - 7, 8, back), PS_ERANGE, "were requested");
            FAILS(ps_tokens_read(s, -1, 8, back), PS_ERANGE, "were requested");
            FAILS(ps_tokens_read(s, INT64_MAX, 8, back), PS_ERANGE, "were requested");
            ps_tokens_close(s);
        }
        FAILS(ps_tokens_open(path, 6 - width, &s), PS_EFORMAT, "were requested");
    }
    if (OK(ps_tokens_open(path, 0, &s))) {
        CHECK(truncate(path, 5000) == 0);
        FAILS(ps_tokens_read(s, 0, 8, back), PS_EIO, "was truncated");
        ps_tokens_close(s);
    }
    FAILS(ps_tokens_open(path, 0, &s), PS_EFORMAT, "131024 bytes are expected; the file has 5000");
    CHECK(truncate(path, 1000) == 0);
    FAILS(ps_tokens_open(path, 0, &s), PS_EFORMAT, "header has 1024 bytes, the file 1000");
    CHECK(truncate(path, 3) == 0);
    FAILS(ps_tokens_open(path, 0, &s), PS_EFORMAT, "no token header");
    FAILS(ps_tokens_open(path, 2, &s), PS_EFORMAT, "3 bytes are not a multiple of the 2");
    FAILS(ps_tokens_open(path, 3, &s), PS_EINVAL, "not 3");
    header[0] = 20240520, header[1] = 7, header[2] = 0;
    write_file(path, header, 1024);
    FAILS(ps_tokens_open(path, 0, &s), PS_EFORMAT, "version 7");
    header[1] = 1, header[2] = -5;
    write_file(path, header, 1024);
    FAILS(ps_tokens_open(path, 0, &s), PS_EFORMAT, "-5 tokens");
    header[2] = 0;
    write_file(path, header, 1023);
    FAILS(ps_tokens_open(path, 2, &s), PS_EFORMAT, "truncated");
    write_file(path, header, 1024);
    if (OK(ps_tokens_open(path, 0, &s))) CHECK(ps_tokens_count(s) == 0);
    ps_tokens_close(s);
    write_file(path, "AB\xff", 3);
    if (OK(ps_tokens_open(path, 1, &s)) && OK(ps_tokens_read(s, 0, 3, back))) CHECK(back[0] == 65 && back[2] == 255);
    ps_tokens_close(s);
    write_file(path, "\1\0\0\0\0\0\0\x80", 8);
    if (OK(ps_tokens_open(path, 4, &s))) FAILS(ps_tokens_read(s, 0, 2, back), PS_ERANGE, "token 1 is 2147483648");
    CHECK(back[0] == 65);
    ps_tokens_close(s);
    unlink(path);
}

static void test_token_writer(void)
{
    const char *path = in_folder("w.bin");
    int32_t ids[] = { 1, 65535, 65536, -1 }, back[4];
    ps_tokw *w = NULL;
    FAILS(ps_tokw_new(path, 1, &w), PS_EINVAL, "not 1");
    OK(ps_tokw_new(path, 2, &w));
    OK(ps_tokw_append(w, ids, 2));
    FAILS(ps_tokw_append(w, ids, 3), PS_ERANGE, "token 65536 at position 4");
    FAILS(ps_tokw_append(w, ids + 3, 1), PS_ERANGE, "token -1 at position 2");
    FAILS(ps_tokw_append(w, ids, -1), PS_EINVAL, "-1 tokens");
    OK(ps_tokw_append_bytes(w, "\x80", 1));
    CHECK(access(path, F_OK) != 0);
    OK(ps_tokw_commit(w));
    FAILS(ps_tokw_append(w, ids, 1), PS_ESTATE, "committed");
    FAILS(ps_tokw_commit(w), PS_ESTATE, "committed");
    ps_tokw_free(w);
    ps_tokens *s = NULL;
    if (OK(ps_tokens_open(path, 0, &s)) && CHECK(ps_tokens_count(s) == 3) && OK(ps_tokens_read(s, 0, 3, back)))
        CHECK(back[0] == 1 && back[1] == 65535 && back[2] == 128);
    ps_tokens_close(s);
    OK(ps_tokw_new(path, 4, &w));           /* after it is abandoned, the old file remains */
    OK(ps_tokw_append(w, ids, 3));
    ps_tokw_free(w);
    if (OK(ps_tokens_open(path, 2, &s))) CHECK(ps_tokens_count(s) == 3);
    ps_tokens_close(s);
    CHECK(files_in_folder() == 1);
    unlink(path);
}

/* -- the loader -------------------------------------------------------------------------------------------------- */
enum { SHARDS = 4, BATCH = 3, SEQ = 5, TOKENS = 10 + 1 + 400 + 89 };
static ps_tokens *shards[SHARDS];

static void open_shards(void)
{
    static const int sizes[SHARDS] = { 10, 1, 400, 89 };
    int first = 0;
    for (int i = 0; i < SHARDS; i++) {
        char name[24];
        snprintf(name, sizeof name, "s%d.bin", i);
        write_shard(in_folder(name), i % 2 ? 4 : 2, sizes[i], first);   /* token k of all shards is k */
        OK(ps_tokens_open(in_folder(name), 0, &shards[i]));
        first += sizes[i];
    }
}

static void close_shards(void)
{
    for (int i = 0; i < SHARDS; i++) {
        char name[24];
        snprintf(name, sizeof name, "s%d.bin", i);
        ps_tokens_close(shards[i]);
        unlink(in_folder(name));
    }
}

static ps_loader_config config(int shuffle, int ahead, uint64_t seed)
{
    return (ps_loader_config){ .batch = BATCH, .seq = SEQ, .vocab = TOKENS, .seed = seed, .shuffle = shuffle,
                               .ahead = ahead };
}

/* Records the results of `calls` calls of next. A row has rc, x and y. */
enum { ROW = 1 + 2 * BATCH * SEQ };
static int record(ps_loader *l, int calls, int32_t *rows)
{
    for (int i = 0; i < calls; i++, rows += ROW) {
        memset(rows, 0, ROW * sizeof *rows);
        rows[0] = ps_loader_next(l, rows + 1, rows + 1 + BATCH * SEQ);
        if (rows[0] < 0) return rows[0];
    }
    return 0;
}

static void test_loader_epochs(int shuffle)
{
    ps_loader *l = NULL;
    int32_t rows[ROW], orders[3][TOKENS], starts[3] = { 0 };
    ps_loader_config c = config(shuffle, 2, 42);
    c.batch = 1;
    if (!OK(ps_loader_new(SHARDS, shards, &c, &l))) return;
    int64_t windows = ps_loader_batches(l);
    CHECK(windows == (shuffle ? TOKENS / SEQ - 1 : (TOKENS - 1) / SEQ));
    for (int epoch = 0; epoch < 3; epoch++) {
        char seen[TOKENS] = { 0 };
        int32_t low = TOKENS;
        for (int64_t b = 0; b < windows; b++) {
            if (!CHECK(ps_loader_next(l, rows, rows + SEQ) == 1)) break;
            for (int i = 0; i < SEQ; i++) CHECK(rows[i] == rows[0] + i && rows[SEQ + i] == rows[i] + 1);
            CHECK(!seen[rows[0]]);
            seen[rows[0]] = 1;
            orders[epoch][b] = rows[0];
            if (rows[0] < low) low = rows[0];
        }
        starts[epoch] = low;
        CHECK(low < SEQ);
        for (int64_t w = 0; w < windows; w++) CHECK(seen[low + w * SEQ]);
        CHECK(ps_loader_next(l, rows, rows + SEQ) == 0);
    }
    CHECK((memcmp(orders[0], orders[1], (size_t)windows * sizeof **orders) != 0) == shuffle);
    CHECK(!shuffle || starts[0] != starts[1] || starts[0] != starts[2]);
    ps_loader_free(l);
}

static void test_loader_resume(void)
{
    enum { CALLS = 75 };                    /* more than two epochs of 33 batches */
    static int32_t all[CALLS][ROW], some[CALLS][ROW];
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        ps_loader *l = NULL, *other = NULL;
        ps_loader_position at;
        ps_loader_config c = config(shuffle, 1, 7);
        if (!OK(ps_loader_new(SHARDS, shards, &c, &l)) || !OK(record(l, CALLS, *all))) return;
        for (int ahead = 1; ahead <= 16; ahead += 5) {      /* the number of prepared batches has no effect */
            c.ahead = ahead;
            if (!OK(ps_loader_new(SHARDS, shards, &c, &other))) continue;
            OK(record(other, CALLS, *some));
            CHECK(!memcmp(all, some, sizeof all));
            ps_loader_free(other);
        }
        OK(ps_loader_new(SHARDS, shards, &c, &other));
        OK(ps_loader_set_position(l, &(ps_loader_position){ 0, 0 }));
        for (int done = 0; done < CALLS; done++) {          /* from every position, including the epoch's end */
            int n = CALLS - done < 3 ? CALLS - done : 3;
            OK(ps_loader_get_position(l, &at));
            OK(ps_loader_set_position(other, &at));
            OK(record(other, n, *some));
            CHECK(!memcmp(all[done], some, (size_t)n * sizeof *some));
            OK(record(l, 1, *some));
        }
        CHECK(at.epoch == 2);
        FAILS(ps_loader_set_position(l, &(ps_loader_position){ 0, ps_loader_batches(l) + 1 }), PS_ERANGE, "epoch has");
        FAILS(ps_loader_set_position(l, &(ps_loader_position){ -1, 0 }), PS_ERANGE, "epoch -1");
        ps_loader_free(other);
        ps_loader_free(l);
    }
}

/* The order is a bijection for every small epoch, and windows cross shards within a range of the tokens. */
static void test_loader_sizes(void)
{
    ps_loader *l = NULL;
    int32_t x[2], y[2];
    for (int n = 1; n <= 70; n++) {
        ps_loader_config c = { .batch = 1, .seq = 2, .first = 5, .last = 5 + 2 * n + 2, .seed = (uint64_t)n,
                               .shuffle = 1, .ahead = 3 };
        if (!OK(ps_loader_new(SHARDS, shards, &c, &l))) return;
        CHECK(ps_loader_batches(l) == n);
        char seen[TOKENS] = { 0 };
        int distinct = 0;
        while (ps_loader_next(l, x, y) == 1) {
            CHECK(x[0] >= 5 && y[1] < c.last);
            distinct += !seen[x[0]];
            seen[x[0]] = 1;
        }
        CHECK(distinct == n);
        ps_loader_free(l);
    }
}

/* The ranks together return the batches of one process, from any position on, and end their epochs together. */
static void test_loader_ranks(int shuffle)
{
    enum { CALLS = 20, SIZE = 4 };          /* global batch 4 * 3: an epoch of 8 batches */
    int32_t x[SIZE * BATCH * SEQ], y[SIZE * BATCH * SEQ], mine[2][BATCH * SEQ];
    ps_loader *whole = NULL, *ranks[SIZE] = { 0 };
    ps_loader_config c = config(shuffle, 2, 3);
    c.batch = SIZE * BATCH;
    if (!OK(ps_loader_new(SHARDS, shards, &c, &whole))) return;
    c.batch = BATCH, c.world_size = SIZE;
    for (c.rank = 0; c.rank < SIZE; c.rank++) {
        if (!OK(ps_loader_new(SHARDS, shards, &c, &ranks[c.rank]))) return;
        CHECK(ps_loader_batches(ranks[c.rank]) == ps_loader_batches(whole));
        OK(ps_loader_set_position(ranks[c.rank], &(ps_loader_position){ 1, 5 }));
    }
    OK(ps_loader_set_position(whole, &(ps_loader_position){ 1, 5 }));
    for (int call = 0; call < CALLS; call++) {
        int given = ps_loader_next(whole, x, y);
        for (int r = 0; r < SIZE; r++) {
            ps_loader_position at, its;
            CHECK(ps_loader_next(ranks[r], mine[0], mine[1]) == given);
            OK(ps_loader_get_position(whole, &at));
            OK(ps_loader_get_position(ranks[r], &its));
            CHECK(at.epoch == its.epoch && at.batch == its.batch);
            if (given != 1) continue;
            CHECK(!memcmp(mine[0], x + r * BATCH * SEQ, sizeof mine[0]));
            CHECK(!memcmp(mine[1], y + r * BATCH * SEQ, sizeof mine[1]));
        }
    }
    for (int r = 0; r < SIZE; r++) ps_loader_free(ranks[r]);
    ps_loader_free(whole);
}

static void test_loader_errors(void)
{
    ps_loader *l = NULL;
    int32_t rows[ROW];
    ps_loader_position at;
    ps_loader_config c = config(0, 4, 0);
    FAILS(ps_loader_new(0, shards, &c, &l), PS_EINVAL, "at least one");
    c.batch = 0;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "at least 1");
    c.batch = 100;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "needs 501, 500 are there");
    c.shuffle = 1;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "needs 505, 500 are there");
    c.batch = INT64_MAX / 2;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "too large");
    c = config(0, 0, 0);
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "ahead");
    c = config(0, 1, 0);
    c.rank = 1;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "1 of 1");
    c.world_size = -1;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "world_size");
    c.world_size = 34;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "3 x 5 on each of 34 ranks needs 511, 500 are there");
    c.rank = -1;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "-1 of 34");
    c.rank = 0, c.world_size = INT32_MAX, c.batch = INT64_MAX / 4;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_EINVAL, "too large");
    c = config(0, 4, 0);
    c.last = TOKENS + 1;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_ERANGE, "files have 500");
    c.last = 3, c.first = 4;
    FAILS(ps_loader_new(SHARDS, shards, &c, &l), PS_ERANGE, "[4, 3)");
    c = config(0, 4, 0);
    c.vocab = 50;                           /* token 50 of all is token 39 of shard 2, and batch 3 is the first to
                                             * read it */
    if (!OK(ps_loader_new(SHARDS, shards, &c, &l))) return;
    OK(record(l, 1, rows));
    OK(record(l, 1, rows));
    OK(record(l, 1, rows));
    FAILS(record(l, 1, rows), PS_ERANGE, "s2.bin: token 39 of the file is 50, beyond the vocabulary of 50");
    FAILS(record(l, 1, rows), PS_ERANGE, "s2.bin");
    OK(ps_loader_get_position(l, &at));
    CHECK(at.epoch == 0 && at.batch == 3);
    OK(ps_loader_set_position(l, &(ps_loader_position){ 5, 0 }));
    OK(record(l, 1, rows));
    ps_loader_free(l);
    c = config(0, 1, 0);
    OK(ps_loader_new(SHARDS, shards, &c, &l));
    CHECK(truncate(in_folder("s2.bin"), 1100) == 0);
    int rc = 0;
    for (int i = 0; i < 33 && rc >= 0; i++) rc = record(l, 1, rows);
    FAILS(rc, PS_EIO, "was truncated");
    ps_loader_free(l);
}

static void *run_loader(void *arg)
{
    enum { CALLS = 200 };
    ps_loader *l = NULL;
    ps_loader_config c = config(1, 2, 11);
    int32_t *rows = arg;
    if (ps_loader_new(SHARDS, shards, &c, &l) < 0 || record(l, CALLS, rows) < 0) return (void *)1;
    ps_loader_free(l);
    return NULL;
}

static void test_loader_concurrent(void)
{
    static int32_t rows[2][200 * ROW];
    pthread_t threads[2];
    void *result;
    for (int i = 0; i < 2; i++) CHECK(!pthread_create(&threads[i], NULL, run_loader, rows[i]));
    for (int i = 0; i < 2; i++) CHECK(!pthread_join(threads[i], &result) && !result);
    CHECK(!memcmp(rows[0], rows[1], sizeof rows[0]));
}

/* The ring is filled and discarded repeatedly. Loaders and their threads end at any point. */
static void test_loader_stress(void)
{
    int32_t rows[2 * ROW], first[ROW];
    ps_loader *l = NULL;
    ps_loader_config c = config(1, 3, 5);
    OK(ps_loader_new(SHARDS, shards, &c, &l));
    OK(record(l, 1, first));
    for (int i = 0; i < 500; i++) {
        ps_loader_position p = { i % 7, i % 33 };
        OK(ps_loader_set_position(l, &p));
        if (i % 3) OK(record(l, i % 3, rows));
    }
    OK(ps_loader_set_position(l, &(ps_loader_position){ 0, 0 }));
    OK(record(l, 1, rows));
    CHECK(!memcmp(rows, first, sizeof first));
    ps_loader_free(l);
    for (int i = 0; i < 100; i++) {
        OK(ps_loader_new(SHARDS, shards, &c, &l));
        if (i % 2) OK(record(l, 1, rows));
        ps_loader_free(l);
    }
}

static int work_tokens(void)
{
    ps_tokw *w = NULL;
    int rc = ps_tokw_new(in_folder("n.bin"), 2, &w);
    if (rc == 0) rc = ps_tokw_append_bytes(w, "abc", 3);
    ps_tokw_free(w);
    ps_tokens *s = NULL;
    if (rc == 0) rc = ps_tokens_open(in_folder("n.bin"), 1, &s);
    ps_tokens_close(s);
    return rc;
}

static int work_loader(void)
{
    ps_loader *l = NULL;
    int32_t row[ROW];
    ps_loader_config c = config(1, 2, 1);
    int rc = ps_loader_new(2, shards + 2, &c, &l);
    if (rc == 0) rc = record(l, 1, row);
    ps_loader_free(l);
    return rc;
}

int main(void)
{
    begin_tests();
    test_tokens();
    test_token_writer();
    open_shards();
    test_loader_epochs(0);
    test_loader_epochs(1);
    test_loader_resume();
    test_loader_sizes();
    test_loader_ranks(0);
    test_loader_ranks(1);
    test_loader_concurrent();
    test_loader_stress();
    write_file(in_folder("n.bin"), "text", 4);
    fail_allocations("tokens", work_tokens);
    unlink(in_folder("n.bin"));
    fail_allocations("loader", work_loader);
    test_loader_errors();
    close_shards();
    return end_tests();
}
