/* SPDX-License-Identifier: BSD-3-Clause
 * Tests of src/data/batches.c: batches that a thread makes ahead are those that ps_rows_fill makes at once, from any
 * position, and after failures, also while rows grow. Prints what failed and returns non-zero. */
#define _GNU_SOURCE
#include "check.h"
#include "ps.h"
#include <dirent.h>
#include <time.h>
#include <unistd.h>

enum { N = 61, SEQ = 24, MOST = 6 * SEQ };              /* examples, tokens of a row, values of a batch */

static int32_t length_of(int i) { return 2 + i * 13 % 21; }

/* Makes ids and labels [SEQ] of example i. */
static void example_of(int i, int32_t *ids, int32_t *labels)
{
    for (int k = 0; k < length_of(i); k++) ids[k] = 100 * i + k, labels[k] = k % 3 ? ids[k] : -100;
}

static ps_examples *examples_of(const char *path)
{
    uint64_t key[2] = { 1, 2 };
    ps_examples *e = NULL;
    if (!OK(ps_examples_new(path, key, 0, &e))) exit(1);
    for (int i = 0; i < N; i++) {
        int32_t ids[SEQ], labels[SEQ];
        example_of(i, ids, labels);
        OK(ps_examples_add(e, ids, labels, NULL, length_of(i), 1 + i % 3));
    }
    OK(ps_examples_finish(e));
    return e;
}

static const int64_t counts[] = { N };
static const double shares[] = { 1 };

static ps_rows_config rows_config(bool packing)
{
    return (ps_rows_config){ .seq = SEQ, .window = 20, .seed = 3, .counts = counts, .weights = shares, .n_sources = 1,
                             .shuffle = 1, .packing = packing, .grouping = !packing };
}

static ps_batches_config batches_config(bool packing, int ahead)
{
    return (ps_batches_config){ .batch = 2, .accumulate = 2, .multiple = 4, .world_size = 1, .ahead = ahead, .fills = 1,
                                .to_seq = packing, .weights = 1, .pad = 7 };
}

static ps_rows *rows_of(ps_examples *e, ps_rows_config c, int64_t epoch, int64_t *n)
{
    ps_rows_info info;
    ps_rows *r = NULL;
    c.epoch = epoch;
    if (!OK(ps_rows_new(e, &c, &info, &r))) exit(1);
    *n = info.rows;
    return r;
}

static ps_batches *open_batches(ps_examples *e, bool packing, int ahead)
{
    ps_rows_config rc = rows_config(packing);
    ps_batches_config bc = batches_config(packing, ahead);
    int64_t n;
    ps_rows *first = rows_of(e, rc, 0, &n);
    ps_batches *b = NULL;
    if (!OK(ps_batches_new(e, &rc, &bc, first, &b))) exit(1);
    ps_rows_free(first);
    return b;
}

/* Whether a batch has the values that ps_rows_fill makes of the same rows. */
static bool same(const ps_rows *r, const ps_batch *got)
{
    int32_t ids[MOST], labels[MOST], mask[MOST], positions[MOST];
    float weights[MOST];
    size_t size = (size_t)(got->rows * got->length);
    ps_rows_batch want = { .ids = ids, .labels = labels, .mask = mask, .positions = got->positions ? positions : NULL,
                           .weights = weights, .rows = got->rows, .length = got->length, .real = got->rows, .pad = 7,
                           .filler = got->first - got->first % 4 };
    if (size > MOST || !OK(ps_rows_fill(r, got->first, &want))) return false;
    size *= 4;
    return !memcmp(ids, got->ids, size) && !memcmp(labels, got->labels, size) && !memcmp(mask, got->mask, size) &&
           !memcmp(weights, got->weights, size) && (!got->positions || !memcmp(positions, got->positions, size));
}

/* Compares the batches from a row of an epoch on, `n` of them, with those of ps_rows_fill. */
static void follow(ps_batches *b, ps_examples *e, bool packing, int64_t epoch, int64_t row, int n)
{
    int64_t rows;
    ps_rows *r = rows_of(e, rows_config(packing), epoch, &rows);
    for (; n > 0; n--) {
        ps_batch got;
        int rc = ps_batches_next(b, &got);
        if (!check(rc == (row < rows), __LINE__, "the end of an epoch", ps_error_message())) break;
        if (rc == 1) {
            CHECK(got.epoch == epoch && got.first == row && got.rows == 2 && same(r, &got));
            CHECK(got.length % 4 == 0 && got.length <= SEQ);
            row = got.next;
            continue;
        }
        ps_rows_free(r);
        r = rows_of(e, rows_config(packing), ++epoch, &rows);
        row = 0;
    }
    ps_rows_free(r);
}

static void test_order(ps_examples *e)
{
    for (int ahead = 1; ahead <= 4; ahead++)
        for (int packing = 0; packing < 2; packing++) {
            ps_batches *b = open_batches(e, packing, ahead);
            follow(b, e, packing, 0, 0, 100);
            ps_batches_free(b);
        }
}

/* Positions are set while the thread works, with rows of its epoch and of others. */
static void test_seek(ps_examples *e)
{
    ps_batches *b = open_batches(e, true, 3);
    for (int i = 0; i < 300; i++) {
        int64_t epoch = i % 5, n, row;
        ps_rows_info info;
        ps_rows *r = NULL;
        if (!OK(ps_batches_rows(b, epoch, &info, &r))) break;
        ps_rows *own = rows_of(e, rows_config(true), epoch, &n);
        CHECK(info.rows == n && info.examples == N && info.failed == -1);
        row = i * 4 % n / 4 * 4;
        OK(ps_batches_seek(b, epoch, r, row));
        ps_rows_free(r);
        ps_rows_free(own);
        if (i % 3) follow(b, e, true, epoch, row, i % 7);
    }
    ps_rows_info info;
    ps_rows *r = NULL;
    OK(ps_batches_rows(b, 0, &info, &r));
    FAILS(ps_batches_seek(b, 0, r, info.rows + 1), PS_ERANGE, "cannot go to row");
    FAILS(ps_batches_seek(b, -1, r, 0), PS_ERANGE, "epoch -1");
    ps_rows_free(r);
    ps_batches_free(b);
}

/* Each allocation fails once, in the call or in the thread. The next call has the batch. */
static void test_failures(ps_examples *e)
{
    int failures = 0;
    for (int nth = 0; nth < 120; nth++) {
        ps_batches *b = open_batches(e, true, 2);
        int64_t n, row = 0, epoch = 0;
        ps_rows *r = rows_of(e, rows_config(true), 0, &n);
        ps_test_fail_alloc(nth, 1);
        for (int k = 0; k < 40; k++) {
            ps_batch got;
            int rc = ps_batches_next(b, &got);
            if (rc < 0) {
                failures++;
                check(rc == PS_ENOMEM, __LINE__, "ps_batches_next", ps_error_message());
                rc = ps_batches_next(b, &got);
            }
            if (!check(rc >= 0, __LINE__, "ps_batches_next again", ps_error_message())) break;
            if (rc == 0) epoch++, row = 0;
            if (rc == 0) continue;
            CHECK(got.epoch == epoch && got.first == row);
            if (epoch == 0) CHECK(same(r, &got));
            row = got.next;
        }
        ps_test_fail_alloc(-1, 0);
        ps_rows_free(r);
        ps_batches_free(b);
    }
    CHECK(failures > 10);
}

/* Returns whether two lists have the same examples. */
static bool same_examples(ps_examples *a, ps_examples *b)
{
    bool equal = ps_examples_count(a) == ps_examples_count(b) && ps_examples_hash(a) == ps_examples_hash(b);
    for (int64_t i = 0; i < ps_examples_count(a) && equal; i++) {
        int32_t ids[2][SEQ], labels[2][SEQ];
        int64_t n[2];
        equal = OK(ps_examples_read(a, i, ids[0], labels[0], SEQ, &n[0])) &&
                OK(ps_examples_read(b, i, ids[1], labels[1], SEQ, &n[1])) && n[0] == n[1];
        for (int64_t k = 0; k < n[0] && equal; k++) equal = ids[0][k] == ids[1][k] && labels[0][k] == labels[1][k];
    }
    return equal;
}

/* Puts up to n examples in the order of the rows, and lets the rows grow. Returns how many were put. */
static int64_t put(ps_examples *s, ps_rows *r, int64_t at, int64_t n)
{
    ps_rows_info info;
    for (int64_t last = at + n < N ? at + n : N; at < last; at++) {
        int32_t ids[SEQ], labels[SEQ], i = ps_rows_order(r, at);
        example_of(i, ids, labels);
        OK(ps_examples_put(s, i, ids, labels, NULL, length_of(i), 1 + i % 3));
    }
    OK(ps_rows_grow(r, &info));
    CHECK(info.taken == at && info.places == N && info.rows <= info.examples && info.examples == at);
    return at;
}

/* The thread makes batches of rows that grow meanwhile. They are those of rows that are complete at the beginning, and
 * are not made before their rows are there. */
static void test_growing(ps_examples *e, bool packing, int64_t each, int ahead)
{
    uint64_t key[2] = { 1, 2 };
    ps_examples *s = NULL, *all = NULL;
    ps_rows *r = NULL;
    ps_batches *b = NULL;
    ps_rows_config rc = rows_config(packing);
    ps_batches_config bc = batches_config(packing, ahead);
    int64_t n, there = 0, row = 0;
    if (!OK(ps_examples_scattered(N, 0, &s)) || !OK(ps_rows_begin(s, &rc, &r))) return;
    ps_rows *want = rows_of(e, rc, 0, &n);
    OK(ps_batches_new(s, &rc, &bc, r, &b));
    int calls = 0;
    for (int result = 2; result != 0; calls++) {
        ps_batch got;
        if (calls % 3 == 0) there = put(s, r, there, each);
        result = ps_batches_next(b, &got);
        if (!check(result >= 0, __LINE__, "ps_batches_next", ps_error_message())) break;
        if (result == 2) CHECK(there < N), there = put(s, r, there, each);
        if (result != 1) continue;
        CHECK(got.first == row && same(want, &got) && got.length % 4 == 0);
        CHECK(row < there);
        row = got.next;
    }
    CHECK(row == n && there == N);
    ps_batch got;
    CHECK(ps_batches_next(b, &got) == PS_BATCHES_MORE);  /* the next epoch needs gathered examples */
    FAILS(ps_batches_examples(b, s), PS_ESTATE, "not finished");
    OK(ps_examples_new("", key, 0, &all));
    OK(ps_examples_gather(all, s));
    OK(ps_examples_finish(all));
    CHECK(same_examples(all, e));
    OK(ps_batches_examples(b, all));
    ps_examples_free(s);
    ps_examples_free(all);
    follow(b, e, packing, 1, 0, 60);
    ps_rows_free(want);
    ps_rows_free(r);
    ps_batches_free(b);
}

static void test_scattered(ps_examples *e)
{
    uint64_t key[2] = { 1, 2 };
    ps_examples *s = NULL, *other = NULL;
    ps_rows *r = NULL;
    ps_rows_info info;
    ps_rows_config rc = rows_config(false);
    int32_t ids[SEQ] = { 0 }, labels[SEQ] = { 0 };
    if (!OK(ps_examples_scattered(N, 0, &s)) || !OK(ps_rows_begin(s, &rc, &r))) return;
    FAILS(ps_examples_put(s, N, ids, labels, NULL, 1, 1), PS_EINVAL, "no such example");
    FAILS(ps_examples_add(s, ids, labels, NULL, 1, 1), PS_ESTATE, "appended");
    OK(ps_examples_put(s, 5, ids, labels, NULL, 1, 1));
    FAILS(ps_examples_put(s, 5, ids, labels, NULL, 1, 1), PS_EINVAL, "there already");
    FAILS(ps_rows_order(r, N), PS_ERANGE, "place 61");
    FAILS(ps_examples_finish(s), PS_ESTATE, "gathered");
    OK(ps_examples_new("", key, 0, &other));
    FAILS(ps_examples_gather(other, s), PS_ESTATE, "example 0 has not been put");
    FAILS(ps_examples_put(other, 1, ids, labels, NULL, 1, 1), PS_EINVAL, "example 0 is the next one");
    FAILS(ps_rows_new(s, &rc, &info, &r), PS_ESTATE, "ps_examples_finish");
    ps_examples_free(other);
    ps_rows_free(r);
    ps_examples_free(s);
    for (int nth = 0; nth < 12; nth++) {                 /* each allocation fails once */
        s = NULL, r = NULL;
        ps_test_fail_alloc(nth, 1);
        int code = ps_examples_scattered(N, 0, &s);
        if (code == 0) code = ps_rows_begin(s, &rc, &r);
        if (code == 0) code = ps_examples_put(s, 5, ids, labels, NULL, 1, 1);
        ps_test_fail_alloc(-1, 0);
        CHECK(code == 0 || code == PS_ENOMEM);
        ps_rows_free(r);
        if (s) ps_examples_free(s);
    }
    for (int i = 0; i < 8; i++) test_growing(e, i % 2, 1 + 7 * (i / 2), 1 + i % 4);
}

static int threads_now(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/task");
    for (struct dirent *t; d && (t = readdir(d)); ) n += t->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

/* A thread that has been joined can still be listed for a moment. */
static bool threads_become(int n)
{
    for (int i = 0; i < 5000 && threads_now() != n; i++) nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    return threads_now() == n;
}

static void test_end(ps_examples *e)
{
    int before = threads_now();
    for (int i = 0; i < 50; i++) {
        ps_batches *b = open_batches(e, i % 2, 1 + i % 3);
        CHECK(threads_now() == before);                  /* the first call starts the thread */
        ps_batch got;
        for (int k = 0; k < i % 4; k++) CHECK(ps_batches_next(b, &got) == 1);
        ps_batches_free(b);
        CHECK(threads_become(before));
    }
}

static void test_errors(ps_examples *e)
{
    ps_rows_config rc = rows_config(true);
    int64_t n;
    ps_rows *first = rows_of(e, rc, 0, &n);
    ps_batches *b = NULL;
    ps_batches_config c = batches_config(true, 1), wrong;
    wrong = c, wrong.ahead = 0;
    FAILS(ps_batches_new(e, &rc, &wrong, first, &b), PS_EINVAL, "at least 1");
    wrong = c, wrong.rank = 1;
    FAILS(ps_batches_new(e, &rc, &wrong, first, &b), PS_EINVAL, "1 of 1");
    wrong = c, wrong.batch = INT64_MAX, wrong.accumulate = 3;
    FAILS(ps_batches_new(e, &rc, &wrong, first, &b), PS_EINVAL, "too large");
    ps_rows_free(first);
    CHECK(b == NULL);
}

/* The examples live until the last batch, and a truncated file of examples is an error of the step. */
static void test_file(void)
{
    const char *tmp = getenv("TMPDIR");
    char path[300];
    snprintf(path, sizeof path, "%s/psluajit-%d.examples", tmp && *tmp ? tmp : "/tmp", (int)getpid());
    ps_examples *e = examples_of(path);
    ps_batches *b = open_batches(e, true, 1);
    ps_examples_free(e);
    ps_batch got;
    CHECK(ps_batches_next(b, &got) == 1);
    CHECK(got.ids[0] % 100 == 0);
    CHECK(truncate(path, 100) == 0);
    int rc = 1;
    for (int k = 0; k < 4 && rc >= 0; k++) rc = ps_batches_next(b, &got);
    FAILS(rc, PS_EIO, path);
    ps_batches_free(b);
    unlink(path);
}

static uint64_t both(uint64_t a, uint64_t b)
{
    uint64_t pair[2] = { a, b };
    return ps_xxh3(pair, sizeof pair);
}

/* A file whose checksums are correct and whose starts are not: examples outside of the records. */
static void test_wrong_starts(void)
{
    enum { HEAD = 64, COUNT = 24, TOKENS = 32, HASH = 48, SUM = 56 };            /* offsets in the head */
    const char *tmp = getenv("TMPDIR");
    char path[300];
    uint64_t key[2] = { 1, 2 };
    snprintf(path, sizeof path, "%s/psluajit-%d.starts", tmp && *tmp ? tmp : "/tmp", (int)getpid());
    static const struct { int start; int64_t value; } cases[] = {
        { 0, -4 }, { 0, 1 }, { 1, (int64_t)1 << 40 }, { 1, -1 }, { N, (int64_t)1 << 40 }, { N, 1 },
    };
    for (size_t c = 0; c <= sizeof cases / sizeof *cases; c++) {
        static _Alignas(8) char all[1 << 16];
        ps_examples *e = examples_of(path);
        ps_examples_free(e);
        FILE *f = fopen(path, "rb");
        size_t n = fread(all, 1, sizeof all, f);
        fclose(f);
        int64_t *head = (int64_t *)all, tokens = head[TOKENS / 8], nbytes = (tokens * 4 + 7) / 8 * 8;
        int64_t *starts = (int64_t *)(all + HEAD + nbytes);
        CHECK(n < sizeof all && head[COUNT / 8] == N && starts[N] == tokens);
        if (c > 0) starts[cases[c - 1].start] = cases[c - 1].value;
        uint64_t hash = both(both(0, ps_xxh3(all + HEAD, tokens * 4)),
                             both(ps_xxh3(starts, (N + 1) * 8), ps_xxh3(starts + N + 1, N * 4)));
        CHECK(c > 0 || (uint64_t)head[HASH / 8] == hash);
        head[HASH / 8] = (int64_t)hash;
        head[SUM / 8] = (int64_t)ps_xxh3(all, SUM);
        f = fopen(path, "wb");
        CHECK(fwrite(all, 1, n, f) == n && fclose(f) == 0);
        e = NULL;
        if (c == 0) OK(ps_examples_open(path, key, &e));
        else FAILS(ps_examples_open(path, key, &e), PS_EFORMAT, path);
        ps_examples_free(e);
    }
    unlink(path);
}

int main(void)
{
    ps_examples *e = examples_of("");
    test_order(e);
    test_seek(e);
    test_failures(e);
    test_scattered(e);
    test_end(e);
    test_errors(e);
    ps_examples_free(e);
    test_file();
    test_wrong_starts();
    return end_checks();
}
