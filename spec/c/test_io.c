/* SPDX-License-Identifier: BSD-3-Clause
 * Tests of src/io: safetensors, atomic files, a full disk, interrupts (test_loader.c: tokens and the loader). Prints
 * what failed and returns non-zero. */
#define _GNU_SOURCE
#include "io/safetensors.h"
#include "io_check.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

/* -- safetensors ------------------------------------------------------------------------------------------------- */
static const char awkward[] = "we\"ird\\ \xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82 \n\x01";

/* Declares and writes a file with every dtype, an empty tensor, a scalar, and a name that needs escapes. */
static int write_sample(const char *path)
{
    ps_stw *w = NULL;
    int64_t three[] = { 1, 3 }, none[] = { 4, 0 };
    unsigned char bytes[24];
    char name[32];
    for (int i = 0; i < 24; i++) bytes[i] = (unsigned char)(i + 1);
    int rc = ps_stw_new(path, &w);
    if (rc == 0) rc = ps_stw_meta(w, "note", "first");
    if (rc == 0) rc = ps_stw_meta(w, "note", awkward);
    for (int d = 0; d < PS_DTYPE_COUNT && rc == 0; d++) {
        snprintf(name, sizeof name, "t%d", d);
        rc = ps_stw_add(w, name, d, 2, three);
    }
    if (rc == 0) rc = ps_stw_add(w, "empty", PS_F32, 2, none);
    if (rc == 0) rc = ps_stw_add(w, awkward, PS_I32, 0, NULL);
    if (rc == 0) rc = ps_stw_begin(w);
    if (rc == 0) rc = ps_stw_write(w, awkward, bytes, 4);
    for (int d = PS_DTYPE_COUNT - 1; d >= 0 && rc == 0; d--) {
        snprintf(name, sizeof name, "t%d", d);
        rc = ps_stw_write(w, name, bytes, 3 * st_type_by_dtype(d)->bits / 8);
    }
    if (rc == 0) rc = ps_stw_commit(w);
    ps_stw_free(w);
    return rc;
}

static void test_st_round_trip(void)
{
    const char *path = in_folder("a.safetensors");
    ps_st *st = NULL;
    ps_st_entry e;
    if (!OK(write_sample(path)) || !OK(ps_st_open(path, &st))) return;
    CHECK(ps_st_count(st) == PS_DTYPE_COUNT + 2);
    CHECK(ps_st_meta_count(st) == 2);
    CHECK(!strcmp(ps_st_meta_key(st, 0), "format") && !strcmp(ps_st_meta_value(st, 0), "pt"));
    CHECK(!strcmp(ps_st_meta_key(st, 1), "note") && !strcmp(ps_st_meta_value(st, 1), awkward));
    for (int d = 0; d < PS_DTYPE_COUNT; d++) {
        char name[32];
        snprintf(name, sizeof name, "t%d", d);
        int i = ps_st_find(st, name);
        if (!CHECK(i >= 0) || !OK(ps_st_get(st, i, &e))) continue;
        CHECK(e.dtype == d && e.ndim == 2 && e.shape[0] == 1 && e.shape[1] == 3);
        const unsigned char *data = ps_st_data(st, i);
        CHECK(data && (uintptr_t)data % (uintptr_t)(e.nbytes / 3) == 0);
        for (int64_t b = 0; data && b < e.nbytes; b++) CHECK(data[b] == b + 1);
    }
    CHECK(((uintptr_t)ps_st_data(st, 0) & 63) == 0);
    int i = ps_st_find(st, awkward);
    OK(ps_st_get(st, i, &e));
    CHECK(i >= 0 && !strcmp(ps_st_name(st, i), awkward) && e.ndim == 0 && e.nbytes == 4);
    CHECK(ps_st_data(st, i) && !memcmp(ps_st_data(st, i), "\1\2\3\4", 4));
    OK(ps_st_get(st, ps_st_find(st, "empty"), &e));
    CHECK(e.nbytes == 0 && ps_st_data(st, ps_st_find(st, "empty")));
    CHECK(ps_st_find(st, "t99") == -1 && !ps_st_name(st, -1) && !ps_st_name(st, 999) && !ps_st_meta_key(st, 2));
    FAILS(ps_st_get(st, 999, &e), PS_ERANGE, "999");
    OK(ps_st_get(st, 1, &e));
    unsigned char read[64], *data = (unsigned char *)(uintptr_t)ps_st_data(st, 1);
    OK(ps_st_read(st, e.at, read, e.nbytes));
    CHECK(!memcmp(read, data, (size_t)e.nbytes));
    OK(ps_st_read(st, e.at + e.nbytes, read, 0));
    OK(ps_st_read(st, 0, NULL, 0));
    FAILS(ps_st_read(NULL, 0, read, 1), PS_EINVAL, "'st'");
    FAILS(ps_st_read(st, -1, read, 1), PS_ERANGE, "1 bytes from byte -1");
    FAILS(ps_st_read(st, 1, read, INT64_MAX), PS_ERANGE, "9223372036854775807 bytes from byte 1");
    FAILS(ps_st_read(st, INT64_MAX, read, 1), PS_ERANGE, "9223372036854775807 of the data");
    FAILS(ps_st_read(st, 0, NULL, 1), PS_ERANGE, "1 bytes");
    CHECK(truncate(path, 100) == 0);
    FAILS(ps_st_read(st, e.at, read, e.nbytes), PS_EIO, "was truncated");
    CHECK(!ps_st_data(st, 0) && strstr(ps_error_message(), "was truncated"));
    ps_st_close(st);
    unlink(path);
}

static void test_st_copy(void)
{
    const char *path = in_folder("r.safetensors");
    int64_t shape[] = { 3, 4, 5 }, from[] = { 1, 1, 2 }, size[] = { 2, 3, 2 }, none[] = { 0, 3, 3 };
    int32_t all[60], got[12], want[12];
    ps_stw *w = NULL;
    ps_st *st = NULL;
    for (int i = 0; i < 60; i++) all[i] = i;
    OK(ps_stw_new(path, &w));
    OK(ps_stw_add(w, "x", PS_I32, 3, shape));
    OK(ps_stw_add(w, "scalar", PS_I32, 0, NULL));
    OK(ps_stw_begin(w));
    OK(ps_stw_write(w, "x", all, sizeof all));
    OK(ps_stw_write(w, "scalar", all + 7, 4));
    OK(ps_stw_commit(w));
    ps_stw_free(w);
    if (!OK(ps_st_open(path, &st))) return;
    int x = ps_st_find(st, "x"), k = 0;
    for (int64_t a = 1; a < 3; a++)
        for (int64_t b = 1; b < 4; b++)
            for (int64_t c = 2; c < 4; c++) want[k++] = (int32_t)(20 * a + 5 * b + c);
    for (int64_t first = 0; first < 12; first++)
        for (int64_t n = 0; n <= 12 - first; n++) {
            memset(got, 0xff, sizeof got);
            if (!OK(ps_st_copy(st, x, from, size, first, got, n))) continue;
            CHECK(!memcmp(got, want + first, (size_t)n * 4));
            CHECK(n == 12 || got[n] == -1);
        }
    OK(ps_st_copy(st, ps_st_find(st, "scalar"), NULL, NULL, 0, got, 1));
    CHECK(got[0] == 7);
    OK(ps_st_copy(st, x, from, none, 0, got, 0));
    FAILS(ps_st_copy(st, x, from, none, 0, got, 1), PS_ERANGE, "1 elements from 0 on were requested, of 0");
    FAILS(ps_st_copy(st, x, from, size, 11, got, 2), PS_ERANGE, "of 12 of tensor 'x'");
    FAILS(ps_st_copy(st, x, from, shape, 0, got, 1), PS_ERANGE, "5 from 2 on of dimension 2 were requested");
    FAILS(ps_st_copy(st, 9, from, size, 0, got, 1), PS_ERANGE, "tensor 9");
    FAILS(ps_st_copy(st, x, NULL, size, 0, got, 1), PS_EINVAL, "offset");
    CHECK(truncate(path, 100) == 0);
    FAILS(ps_st_copy(st, x, from, size, 0, got, 1), PS_EIO, "was truncated");
    ps_st_close(st);
    unlink(path);
}

/* Lent bytes are the file's bytes until they are written to, and exist until the last loan ends. */
static void test_st_lend(void)
{
    const char *path = in_folder("l.safetensors"), *other = in_folder("m.safetensors");
    static int32_t all[4096], back[4096];
    int64_t shape[] = { 4096 };
    ps_stw *w = NULL;
    ps_st *st = NULL;
    ps_loan loan[2] = { { 0 } }, none;
    for (int i = 0; i < 4096; i++) all[i] = i;
    OK(ps_stw_new(path, &w));
    OK(ps_stw_add(w, "x", PS_I32, 1, shape));
    OK(ps_stw_begin(w));
    OK(ps_stw_write(w, "x", all, sizeof all));
    OK(ps_stw_commit(w));
    ps_stw_free(w);
    if (!OK(ps_st_open(path, &st))) return;
    FAILS(ps_st_lend(NULL, 0, 4, &none), PS_EINVAL, "'st'");
    FAILS(ps_st_lend(st, 0, 4, NULL), PS_EINVAL, "'out'");
    FAILS(ps_st_lend(st, 4, sizeof all, &none), PS_ERANGE, "from byte 4 of the data on");
    OK(ps_st_lend(st, 0, sizeof all / 2, &loan[0]));
    OK(ps_st_lend(st, sizeof all / 2, sizeof all / 2, &loan[1]));
    int32_t *x = loan[0].bytes;
    x[1] = -1;
    ps_st_drop(st, 0);                                    /* pages that were written to are kept */
    CHECK(x[1] == -1 && x[2] == 2 && ((int32_t *)loan[1].bytes)[0] == 2048);
    OK(ps_st_read(st, 0, back, sizeof back));
    CHECK(!memcmp(all, back, sizeof all));                /* the file has its original contents */
    OK(ps_st_copy(st, 0, (int64_t[]){ 0 }, shape, 0, back, 4096));
    CHECK(!memcmp(all, back, sizeof all));                /* the map also has its original contents */
    ps_loan again;
    OK(ps_st_lend(st, 4, 8, &again));
    CHECK(((int32_t *)again.bytes)[0] == 1 && ((int32_t *)again.bytes)[1] == 2);
    again.end(again.lender);
    ps_test_fail_alloc(0, 1);
    FAILS(ps_st_lend(st, 0, 8, &again), PS_ENOMEM, "");
    ps_test_fail_alloc(-1, 0);
    OK(ps_st_lend(st, 0, 0, &again));
    again.end(again.lender);
    ps_st_close(st);
    OK(loan[0].check(loan[0].lender));
    CHECK(x[1] == -1 && x[4] == 4);
    write_file(other, all, sizeof all);
    CHECK(rename(other, path) == 0);                      /* the map keeps the old file */
    OK(loan[0].check(loan[0].lender));
    loan[0].end(loan[0].lender);
    CHECK(((int32_t *)loan[1].bytes)[1] == 2049);
    loan[1].end(loan[1].lender);

    if (!OK(write_sample(path)) || !OK(ps_st_open(path, &st))) return;
    OK(ps_st_lend(st, 0, 8, &loan[0]));
    struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, { .tv_sec = 1 } };
    CHECK(utimensat(AT_FDCWD, path, times, 0) == 0);
    FAILS(loan[0].check(loan[0].lender), PS_EIO, "was written to");
    FAILS(ps_st_lend(st, 0, 8, &none), PS_EIO, "was written to");
    CHECK(truncate(path, 100) == 0);
    FAILS(loan[0].check(loan[0].lender), PS_EIO, "was truncated");
    loan[0].end(loan[0].lender);
    ps_st_close(st);
    unlink(path);
}

static void test_st_writer_errors(void)
{
    const char *path = in_folder("w.safetensors");
    int64_t two[] = { 2 }, wrong[] = { -1 }, huge[] = { INT64_MAX / 2, 3 };
    char data[8] = { 0 };
    ps_stw *w = NULL;
    FAILS(ps_stw_new(NULL, &w), PS_EINVAL, "path");
    OK(ps_stw_new(path, &w));
    FAILS(ps_stw_add(w, "__metadata__", PS_F32, 1, two), PS_EINVAL, "__metadata__");
    FAILS(ps_stw_add(w, "x", 77, 1, two), PS_EINVAL, "dtype 77");
    FAILS(ps_stw_add(w, "x", PS_F32, 9, two), PS_EINVAL, "9 dimensions");
    FAILS(ps_stw_add(w, "x", PS_F32, 1, wrong), PS_EINVAL, "dimension 0 is -1");
    FAILS(ps_stw_add(w, "x", PS_F32, 2, huge), PS_EINVAL, "too large");
    FAILS(ps_stw_add(w, "\xff", PS_F32, 1, two), PS_EINVAL, "UTF-8");
    FAILS(ps_stw_write(w, "x", data, 8), PS_ESTATE, "declaring");
    OK(ps_stw_add(w, "x", PS_F32, 1, two));
    OK(ps_stw_begin(w));
    FAILS(ps_stw_add(w, "y", PS_F32, 1, two), PS_ESTATE, "writing");
    FAILS(ps_stw_write(w, "y", data, 8), PS_EINVAL, "'y' was not added");
    FAILS(ps_stw_write(w, "x", data, 7), PS_EINVAL, "8 bytes");
    FAILS(ps_stw_commit(w), PS_ESTATE, "'x' was added, but only");
    FAILS(ps_stw_append(w, "y", data, 8), PS_EINVAL, "'y' was not added");
    FAILS(ps_stw_append(w, "x", NULL, 8), PS_EINVAL, "0 were passed");
    OK(ps_stw_append(w, "x", data, 5));
    FAILS(ps_stw_append(w, "x", data, 4), PS_EINVAL, "room for 3 more bytes, but 4 were passed");
    FAILS(ps_stw_commit(w), PS_ESTATE, "only 5 of its 8 bytes were written");
    CHECK(files_in_folder() == 1);
    ps_stw_free(w);
    CHECK(files_in_folder() == 0);
    OK(ps_stw_new(path, &w));
    OK(ps_stw_add(w, "x", PS_F32, 1, two));
    OK(ps_stw_add(w, "x", PS_F32, 1, two));
    FAILS(ps_stw_begin(w), PS_EINVAL, "'x' was added twice");
    ps_stw_free(w);
    OK(ps_stw_new(in_folder("no/such/file"), &w));
    FAILS(ps_stw_begin(w), PS_EIO, "No such file");
    ps_stw_free(w);
    OK(ps_stw_new(folder, &w));
    FAILS(ps_stw_begin(w), PS_EIO, "a folder");
    ps_stw_free(w);
    OK(ps_stw_new(path, &w));               /* a file without tensors is valid */
    OK(ps_stw_begin(w));
    OK(ps_stw_commit(w));
    FAILS(ps_stw_commit(w), PS_ESTATE, "finished");
    ps_stw_free(w);
    ps_st *st = NULL;
    if (OK(ps_st_open(path, &st))) CHECK(ps_st_count(st) == 0);
    ps_st_close(st);
    unlink(path);
}

static int open_header(const char *header, int64_t announced, int64_t data_nbytes, ps_st **out, char *buffer)
{
    int64_t n = (int64_t)strlen(header);
    if (announced < 0) announced = n;
    for (int i = 0; i < 8; i++) buffer[i] = (char)(announced >> (8 * i));
    memcpy(buffer + 8, header, (size_t)n);
    memset(buffer + 8 + n, 0, (size_t)data_nbytes);
    return st_open_memory("F.st", buffer, 8 + n + data_nbytes, out);
}

#define T(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
static const struct { const char *header; int64_t announced, data_nbytes; const char *word; } bad_headers[] = {
    { "", 0, 0, "truncated" },
    { "{}", 1, 0, "'{}' is the least" },
    { "{}", 3, 0, "3 bytes is announced, 2 bytes follow" },
    { "{}", INT64_MAX, 0, "not a safetensors file" },
    { "{}", 100000001, 0, "not a safetensors file" },
    { " {}", -1, 0, "begin with '{'" },
    { "[]", -1, 0, "begin with '{'" },
    { "{  ", -1, 0, "'\"' expected, the end of the header" },
    { "{}x", -1, 0, "only spaces" },
    { "{},", -1, 0, "only spaces" },
    { "{,}", -1, 0, "'\"' expected, ',' found" },
    { "{" T("a", "F32", "[1]", "[0,4]") ",}", -1, 4, "'\"' expected, '}' found" },
    { "{" T("a", "F32", "[1]", "[0,4]") " " T("b", "F32", "[1]", "[4,8]") "}", -1, 8, "',' or '}' expected" },
    { "{" T("a", "F32", "[1]", "[0,4]"), -1, 4, "the end of the header found" },
    { "{'a'}", -1, 0, "'\"' expected, ''' found" },
    { "{\"a", -1, 0, "inside a string" },
    { "{\"a\\", -1, 0, "inside a string" },
    { "{\"a\\q\":1}", -1, 0, "unknown escape" },
    { "{\"a\n\":1}", -1, 0, "control character" },
    { "{\"\\u12\":1}", -1, 0, "four hexadecimal" },
    { "{\"\\u00g0\":1}", -1, 0, "four hexadecimal" },
    { "{\"\\u0000\":1}", -1, 0, "zero character" },
    { "{\"\\ud800\":1}", -1, 0, "surrogate" },
    { "{\"\\udc00\":1}", -1, 0, "surrogate" },
    { "{\"\\ud800\\u0041\":1}", -1, 0, "surrogate" },
    { "{\"\xff\":1}", -1, 0, "not UTF-8" },
    { "{\"\xc0\x80\":1}", -1, 0, "not UTF-8" },
    { "{\"\xed\xa0\x80\":1}", -1, 0, "not UTF-8" },
    { "{\"\xf4\x90\x80\x80\":1}", -1, 0, "not UTF-8" },
    { "{\"\xe2\x82\"}", -1, 0, "not UTF-8" },
    { "{\"a\":1}", -1, 0, "tensor 'a'" },
    { "{\"a\":{}}", -1, 0, "tensor 'a'" },
    { "{\"a\":null}", -1, 0, "'{' expected, 'n' found" },
    { "{\"a\":{\"dtype\":\"F32\"}}", -1, 0, "entry 'shape' is missing" },
    { "{\"a\":{\"shape\":[]}}", -1, 0, "entry 'dtype' is missing" },
    { "{\"a\":{\"shape\":[],\"dtype\":\"F32\"}}", -1, 0, "entry 'data_offsets' is missing" },
    { "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", -1, 0, "entry 'dtype' occurs twice" },
    { "{\"a\":{\"stride\":[1]}}", -1, 0, "unknown entry 'stride'" },
    { "{\"a\":{\"dtype\":1}}", -1, 0, "'\"' expected, '1' found" },
    { "{" T("a", "F31", "[1]", "[0,4]") "}", -1, 4, "unknown dtype 'F31'" },
    { "{" T("a", "f32", "[1]", "[0,4]") "}", -1, 4, "unknown dtype" },
    { "{" T("a", "F32", "1", "[0,4]") "}", -1, 4, "'[' expected" },
    { "{" T("a", "F32", "[-1]", "[0,4]") "}", -1, 4, "a whole number of at least 0, found '-'" },
    { "{" T("a", "F32", "[1.0]", "[0,4]") "}", -1, 4, "',' or ']' expected, '.' found" },
    { "{" T("a", "F32", "[1e0]", "[0,4]") "}", -1, 4, "',' or ']' expected, 'e' found" },
    { "{" T("a", "F32", "[01]", "[0,4]") "}", -1, 4, "leading zero" },
    { "{" T("a", "F32", "[1,]", "[0,4]") "}", -1, 4, "whole number" },
    { "{" T("a", "F32", "[\"1\"]", "[0,4]") "}", -1, 4, "whole number" },
    { "{" T("a", "F32", "[[1]]", "[0,4]") "}", -1, 4, "whole number" },
    { "{" T("a", "F32", "[9223372036854775808]", "[0,4]") "}", -1, 4, "63 bits" },
    { "{" T("a", "F32", "[99999999999999999999999]", "[0,4]") "}", -1, 4, "63 bits" },
    { "{" T("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", -1, 0, "too large" },
    { "{" T("a", "F32", "[4611686018427387904]", "[0,0]") "}", -1, 0, "too large" },
    { "{" T("a", "F32", "[0,4294967296,4294967296]", "[0,0]") "}", -1, 0, "too large" },
    { "{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", -1, 4, "tensor 'a'" },
    { "{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", -1, 4, "more than 8 dimensions" },
    { "{" T("a", "F32", "[1]", "[0]") "}", -1, 4, "',' expected" },
    { "{" T("a", "F32", "[1]", "[0,4,8]") "}", -1, 4, "']' expected" },
    { "{" T("a", "F32", "[1]", "[4,0]") "}", -1, 4, "before they begin" },
    { "{" T("a", "F32", "[1]", "[0,8]") "}", -1, 8, "need 4 bytes, data_offsets [0, 8) hold 8" },
    { "{" T("a", "F8_E4M3", "[3]", "[0,4]") "}", -1, 4, "need 3 bytes" },
    { "{" T("a", "F4", "[3]", "[0,2]") "}", -1, 2, "whole bytes" },
    { "{" T("a", "F32", "[2]", "[0,8]") "}", -1, 7, "truncated" },
    { "{" T("a", "F32", "[2]", "[0,8]") "}", -1, 9, "1 bytes belong to no tensor" },
    { "{" T("a", "F32", "[1]", "[4,8]") "}", -1, 8, "a hole of 4 bytes" },
    { "{" T("a", "U8", "[4]", "[0,4]") "," T("b", "U8", "[3]", "[5,8]") "}", -1, 8, "a hole of 1 bytes" },
    { "{" T("a", "U8", "[4]", "[0,4]") "," T("b", "U8", "[5]", "[3,8]") "}", -1, 8, "an overlap of 1 bytes" },
    { "{" T("a", "U8", "[4]", "[0,4]") "," T("b", "U8", "[4]", "[0,4]") "}", -1, 4, "an overlap of 4 bytes" },
    { "{" T("a", "U8", "[4]", "[0,4]") "," T("a", "U8", "[4]", "[4,8]") "}", -1, 8, "tensor 'a' occurs twice" },
    { "{" T("a", "U8", "[4]", "[0,4]") "," T("\\u0061", "U8", "[4]", "[4,8]") "}", -1, 8, "tensor 'a' occurs twice" },
    { "{}", -1, 1, "belong to no tensor" },
    { "{\"__metadata__\":1}", -1, 0, "'{' expected" },
    { "{\"__metadata__\":{\"a\":1}}", -1, 0, "can have only strings" },
    { "{\"__metadata__\":{\"a\":{}}}", -1, 0, "can have only strings" },
    { "{\"__metadata__\":{\"a\"}}", -1, 0, "':' expected" },
    { "{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", -1, 0, "key 'a' occurs twice" },
    { "{\"__metadata__\":{},\"__metadata__\":{}}", -1, 0, "'__metadata__' occurs twice" },
};

static void test_st_bad_headers(void)
{
    char buffer[1024];
    for (size_t i = 0; i < sizeof bad_headers / sizeof *bad_headers; i++) {
        ps_st *st = NULL;
        fails(open_header(bad_headers[i].header, bad_headers[i].announced, bad_headers[i].data_nbytes, &st, buffer),
              PS_EFORMAT, bad_headers[i].word, __LINE__, bad_headers[i].header);
        CHECK(!st && !strncmp(ps_error_message(), "F.st: ", 6));
        ps_st_close(st);
    }
    /* Unusual but valid files: spaces, any order, trailing padding, types that psluajit lacks, empty tensors between
     * others, escapes. */
    const char *good = "{ \"b\" : {\"shape\":[ 2 ,2], \"data_offsets\" : [8,12],\"dtype\":\"I8\"}\n,"
        "\"\\uD83D\\uDE42\\/\\u00e9\":{\"dtype\":\"U16\",\"shape\":[4],\"data_offsets\":[0,8]},"
        T("e", "F32", "[0,3]", "[8,8]") "," T("f4", "F4", "[2]", "[12,13]") "}   ";
    ps_st *st = NULL;
    ps_st_entry e;
    if (!OK(open_header(good, -1, 13, &st, buffer))) return;
    CHECK(ps_st_count(st) == 4 && ps_st_find(st, "\xf0\x9f\x99\x82/\xc3\xa9") == 0);
    OK(ps_st_get(st, ps_st_find(st, "b"), &e));
    CHECK(e.dtype == -1 && e.nbytes == 4 && !strcmp(ps_st_dtype_text(st, ps_st_find(st, "b")), "I8"));
    ps_st_close(st);
    FAILS(ps_st_open(in_folder("none"), &st), PS_EIO, "No such file");
    FAILS(ps_st_open(folder, &st), PS_EIO, "a folder");
    FAILS(ps_st_open("/dev/zero", &st), PS_EIO, "pipe or device");
    FAILS(ps_st_open(NULL, &st), PS_EINVAL, "path");
    write_file(in_folder("z"), "", 0);
    FAILS(ps_st_open(in_folder("z"), &st), PS_EFORMAT, "0 bytes are too few");
    unlink(in_folder("z"));
}

/* Every prefix of a valid file is an error. A changed byte in its header is an error or harmless. */
static void test_st_damage(void)
{
    const char *path = in_folder("d.safetensors");
    if (!OK(write_sample(path))) return;
    char bytes[4096];
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(bytes, 1, sizeof bytes, f) : 0;
    if (f) fclose(f);
    CHECK(n > 100 && n < sizeof bytes);
    int opened = 0;
    for (size_t cut = 0; cut < n; cut++) {
        ps_st *st = NULL;
        opened += st_open_memory("cut", bytes, (int64_t)cut, &st) >= 0;
        ps_st_close(st);
    }
    CHECK(opened == 0);
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++) {
            ps_st *st = NULL;
            bytes[i] ^= (char)(1 << bit);
            if (st_open_memory("flip", bytes, (int64_t)n, &st) >= 0) CHECK(ps_st_count(st) == PS_DTYPE_COUNT + 2);
            ps_st_close(st);
            bytes[i] ^= (char)(1 << bit);
        }
    unlink(path);
}

/* -- files, memory, the process ---------------------------------------------------------------------------------- */
static void test_files(void)
{
    char text[8] = { 0 };
    struct stat st;
    const char *path = in_folder("f"), *link = in_folder("l");
    OK(ps_file_write_atomic(path, "one", 3));
    CHECK(chmod(path, 0640) == 0 && symlink("f", link) == 0);
    OK(ps_file_write_atomic(link, "three", 5));
    CHECK(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(stat(path, &st) == 0 && st.st_size == 5 && (st.st_mode & 0777) == 0640);
    int fd = open(path, O_RDONLY);
    CHECK(read(fd, text, 7) == 5 && !strcmp(text, "three"));
    close(fd);
    char target[4096];
    OK(ps_file_target(path, target, sizeof target));
    CHECK(!strcmp(target, path));
    OK(ps_file_target(link, target, sizeof target));
    CHECK(!strcmp(target, path));
    OK(ps_file_target(link, target, (int64_t)strlen(path) + 1));
    FAILS(ps_file_target(link, target, (int64_t)strlen(path)), PS_EIO, "too long");
    FAILS(ps_file_target(path, target, 0), PS_EIO, "too long");
    const char *self = in_folder("self");
    CHECK(symlink("self", self) == 0);
    FAILS(ps_file_target(self, target, sizeof target), PS_EIO, "symbolic links");
    unlink(self);
    OK(ps_file_write_atomic(path, NULL, 0));
    FAILS(ps_file_write_atomic(path, NULL, 1), PS_EINVAL, "1 bytes");
    FAILS(ps_file_write_atomic("", "x", 1), PS_EINVAL, "empty");
    FAILS(ps_file_write_atomic(in_folder("a/b"), "x", 1), PS_EIO, "No such file");
    OK(ps_file_fsync_dir(folder));
    FAILS(ps_file_fsync_dir(path), PS_EIO, "Not a directory");
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before, limit.rlim_cur = 1000;
    setrlimit(RLIMIT_FSIZE, &limit);
    char big[2000] = { 0 };
    int rc = ps_file_write_atomic(path, big, sizeof big);
    setrlimit(RLIMIT_FSIZE, &before);
    FAILS(rc, PS_EIO, "ulimit");
    CHECK(files_in_folder() == 2);
    unlink(link);
    unlink(path);
}

static bool holds(const char *path, const char *text)
{
    char got[16] = { 0 };
    int fd = open(path, O_RDONLY);
    bool same = fd >= 0 && read(fd, got, sizeof got - 1) == (ssize_t)strlen(text) && !strcmp(got, text);
    if (fd >= 0) close(fd);
    return same;
}

/* If links lead to a file that does not exist yet, the file is created, and the links remain. */
static void test_links(void)
{
    char sub[512], target[600];
    const char *link = in_folder("l1"), *second = in_folder("l2"), *loop = in_folder("loop");
    struct stat st;
    snprintf(sub, sizeof sub, "%s/sub", folder);
    snprintf(target, sizeof target, "%s/target", sub);
    CHECK(mkdir(sub, 0700) == 0 && symlink("sub/target", link) == 0 && symlink(link, second) == 0);
    CHECK(symlink("loop", loop) == 0);
    OK(ps_file_write_atomic(second, "new", 3));
    CHECK(lstat(second, &st) == 0 && S_ISLNK(st.st_mode) && lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(holds(target, "new"));
    FAILS(ps_file_write_atomic(loop, "x", 1), PS_EIO, "symbolic links");
    unlink(target);
    CHECK(rmdir(sub) == 0);
    FAILS(ps_file_write_atomic(link, "x", 1), PS_EIO, "sub/target");
    unlink(link), unlink(second), unlink(loop);
}

/* Between the rename of a file and the sync of its folder, another process can rename the folder, as the rank that
 * commits a checkpoint does. */
static void test_folder_moves(void)
{
    char from[512], to[512], path[600], moved[600];
    ps_tempfile f;
    snprintf(from, sizeof from, "%s/from", folder);
    snprintf(to, sizeof to, "%s/to", folder);
    snprintf(path, sizeof path, "%s/x", from);
    snprintf(moved, sizeof moved, "%s/x", to);
    CHECK(mkdir(from, 0700) == 0);
    OK(ps_tempfile_open(&f, path));
    OK(ps_tempfile_write(&f, 0, "all", 3));
    CHECK(rename(from, to) == 0);
    OK(ps_tempfile_commit(&f));
    ps_tempfile_close(&f);
    CHECK(holds(moved, "all"));
    unlink(moved);
    OK(ps_tempfile_open(&f, moved));
    CHECK(rename(to, from) == 0);
    ps_tempfile_close(&f);
    CHECK(rmdir(from) == 0);            /* the temporary file was removed, too */
}

/* A file never gets the descriptor of stdin, stdout or stderr, even if these are closed. */
static void test_stdio_closed(void)
{
    ps_tempfile f;
    const char *path = in_folder("f");
    int in = dup(STDIN_FILENO);
    close(STDIN_FILENO);
    OK(ps_tempfile_open(&f, path));
    CHECK(f.fd > STDERR_FILENO && f.folder > STDERR_FILENO);
    ps_tempfile_close(&f);
    CHECK(fcntl(STDIN_FILENO, F_GETFD) < 0);
    if (in >= 0) dup2(in, STDIN_FILENO), close(in);
}

/* Two folders exchange their names, in one step or, if the file system cannot do that, in three steps. */
static void test_swap(void)
{
    char a[512], b[512], in_a[600], in_b[600];
    snprintf(a, sizeof a, "%s/a", folder);
    snprintf(b, sizeof b, "%s/b", folder);
    snprintf(in_a, sizeof in_a, "%s/x", a);
    snprintf(in_b, sizeof in_b, "%s/x", b);
    CHECK(mkdir(a, 0700) == 0 && mkdir(b, 0700) == 0);
    write_file(in_a, "a", 1), write_file(in_b, "b", 1);
    CHECK(ps_file_swap_folder(a, b) == 1 && holds(in_a, "b") && holds(in_b, "a"));
    ps_test_fail_file(0, 1, EINVAL);
    CHECK(ps_file_swap_folder(a, b) == 1 && holds(in_a, "a") && holds(in_b, "b"));
    ps_test_fail_file(0, 2, EINVAL);                /* the second of three steps also fails, and everything is
                                                     * unchanged */
    int rc = ps_file_swap_folder(a, b);
    ps_test_fail_file(-1, 0, 0);
    FAILS(rc, PS_EIO, "Invalid argument");
    CHECK(holds(in_a, "a") && holds(in_b, "b") && files_in_folder() == 2);
    unlink(in_a), unlink(in_b), rmdir(a);
    CHECK(ps_file_swap_folder(b, a) == 0 && rmdir(a) == 0);
}

/* Tests a full disk in a child process with a 64 KiB file system. The test is skipped if this is not allowed. The
 * child exits with 0, 1 or 77. */
static int full_disk_child(void)
{
    static char big[100000];
    int64_t n[] = { sizeof big };
    struct stat st;
    ps_stw *w = NULL;
    ps_tokw *t = NULL;
    const char *path = in_folder("m/x");
    bool mounted = (unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) &&
                   mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 && mkdir(in_folder("m"), 0700) == 0 &&
                   mount("none", in_folder("m"), "tmpfs", 0, "size=64k") == 0;
    if (!mounted) return 77;
    failed = 0;
    OK(ps_file_write_atomic(path, "old", 3));
    FAILS(ps_file_write_atomic(path, big, sizeof big), PS_EIO, "100000 bytes wanted, 61440 bytes free");
    OK(ps_stw_new(path, &w));
    OK(ps_stw_add(w, "big", PS_U8, 1, n));
    FAILS(ps_stw_begin(w), PS_EIO, "bytes wanted");
    ps_stw_free(w);
    OK(ps_tokw_new(path, 4, &t));
    int rc = 0;
    for (int i = 0; i < 10 && rc == 0; i++) rc = ps_tokw_append_bytes(t, big, sizeof big);
    FAILS(rc, PS_EIO, "bytes wanted");
    FAILS(ps_tokw_commit(t), PS_ESTATE, "earlier write failed");
    ps_tokw_free(t);
    CHECK(stat(path, &st) == 0 && st.st_size == 3);
    return failed > 0;
}

static void test_full_disk(void)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int rc = full_disk_child();
        fflush(stdout);
        _exit(rc);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) printf("skipped: the full disk (no file system can be mounted here)\n");
    else CHECK(WEXITSTATUS(status) == 0);
    rmdir(in_folder("m"));
}

static int work_save(void) { return write_sample(in_folder("n.safetensors")); }

static int work_load(void)
{
    ps_st *st = NULL;
    int rc = ps_st_open(in_folder("n.safetensors"), &st);
    ps_st_close(st);
    return rc;
}

static int signalled_child(int times, int sig)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        signal(sig, SIG_DFL);
        if (ps_interrupts_install() < 0) _exit(50);
        for (int i = 0; i < times; i++) raise(sig);
        _exit(ps_interrupts());
    }
    return waitpid(child, &status, 0) == child ? status : -1;
}

static void test_process(void)
{
    int status = signalled_child(1, SIGINT);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    status = signalled_child(2, SIGINT);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT);
    status = signalled_child(2, SIGTERM);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    status = signalled_child(3, SIGHUP);                      /* a lost terminal sends the signal more than once */
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    struct sigaction action;
    signal(SIGHUP, SIG_IGN);                                  /* nohup */
    OK(ps_interrupts_install());
    raise(SIGHUP);
    CHECK(ps_interrupts() == 0);
    ps_interrupts_remove();
    signal(SIGHUP, SIG_DFL);
    OK(ps_interrupts_install());
    OK(ps_interrupts_install());
    raise(SIGTERM);
    CHECK(ps_interrupts() == 1);
    ps_interrupts_remove();
    CHECK(sigaction(SIGTERM, NULL, &action) == 0 && action.sa_handler == SIG_DFL);
    OK(ps_interrupts_install());
    CHECK(ps_interrupts() == 0);
    ps_interrupts_remove();
    double t = ps_now();
    CHECK(t > 0 && ps_now() >= t);
    CHECK(ps_rss_peak() > 100000);
    int fd = open("/dev/null", O_RDONLY);
    CHECK(!ps_is_terminal(fd) && ps_terminal_columns(fd) == 80);
    close(fd);
}

int main(void)
{
    begin_tests();
    test_st_round_trip();
    test_st_copy();
    test_st_lend();
    test_st_writer_errors();
    test_st_bad_headers();
    test_st_damage();
    test_files();
    test_links();
    test_folder_moves();
    test_stdio_closed();
    test_swap();
    test_full_disk();
    test_process();
    fail_allocations("save", work_save);
    fail_allocations("load", work_load);
    unlink(in_folder("n.safetensors"));
    return end_tests();
}
