/* SPDX-License-Identifier: BSD-3-Clause
 * Tests of PyTorch's .pt files in C: archives (ZIP64, alignment, checksums, damage), the restricted pickle machine, the
 * writer's checks. spec/io/torch_spec.lua holds both directions against PyTorch itself. */
#define _GNU_SOURCE
#include "io/torch_pt.h"
#include "io_check.h"
#include <fcntl.h>
#include <sys/resource.h>

static uint8_t bytes_of[24];

static ps_pt_value text(const char *s)
{
    return (ps_pt_value){ .kind = PS_PT_STRING, .text = s, .integer = (int64_t)strlen(s) };
}

static int put(ps_ptw *w, int kind, int64_t n)
{
    ps_pt_value v = { .kind = kind, .integer = n, .number = (double)n / 2, .count = (int32_t)n };
    return ps_ptw_put(w, &v);
}

static int put_text(ps_ptw *w, const char *s)
{
    ps_pt_value v = text(s);
    return ps_ptw_put(w, &v);
}

/* Writes a value with every kind and dtype: [{"t": [tensors], 7: 3.5}, -1, 2^40, True, None, bytes, (), tied, view,
 * scalar]. */
static int write_sample_wide(const char *path, int64_t wide_from)
{
    ps_ptw *w = NULL;
    const ps_pt_value bytes = { .kind = PS_PT_BYTES, .text = "a\0\xff", .integer = 3 };
    int rc = ps_ptw_new(path, &w);
    if (rc == 0 && wide_from) pt_write_wide_from(w, wide_from);
    for (int d = 0; d < PS_DTYPE_COUNT && rc >= 0; d++) rc = ps_ptw_storage(w, d, 3);
    if (rc >= 0) rc = ps_ptw_storage(w, PS_F32, 0);
    if (rc >= 0) rc = put(w, PS_PT_LIST, 10);
    if (rc >= 0) rc = put(w, PS_PT_DICT, 4);
    if (rc >= 0) rc = put_text(w, "t");
    if (rc >= 0) rc = put(w, PS_PT_LIST, PS_DTYPE_COUNT + 1);
    for (int d = 0; d <= PS_DTYPE_COUNT && rc >= 0; d++) {
        ps_pt_tensor t = { .ndim = 2, .shape = { 1, d < PS_DTYPE_COUNT ? 3 : 0 }, .stride = { 3, 1 }, .storage = d };
        rc = ps_ptw_tensor(w, &t);
    }
    if (rc >= 0) rc = put(w, PS_PT_INT, 7);
    if (rc >= 0) rc = put(w, PS_PT_FLOAT, 7);
    if (rc >= 0) rc = put(w, PS_PT_INT, -1);
    if (rc >= 0) rc = put(w, PS_PT_INT, (int64_t)1 << 40);
    if (rc >= 0) rc = put(w, PS_PT_BOOL, 1);
    if (rc >= 0) rc = put(w, PS_PT_NONE, 0);
    if (rc >= 0) rc = ps_ptw_put(w, &bytes);
    if (rc >= 0) rc = put(w, PS_PT_TUPLE, 0);
    ps_pt_tensor tied = { .ndim = 1, .shape = { 3 }, .stride = { 1 } }, view = { .ndim = 2, .shape = { 2, 2 },
        .stride = { 1, 1 }, .storage = PS_I64 }, scalar = { .offset = 2, .storage = PS_F64 };
    if (rc >= 0) rc = ps_ptw_tensor(w, &tied);
    if (rc >= 0) rc = ps_ptw_tensor(w, &view);
    if (rc >= 0) rc = ps_ptw_tensor(w, &scalar);
    if (rc >= 0) rc = ps_ptw_begin(w);
    for (int d = PS_DTYPE_COUNT - 1; d >= 0 && rc >= 0; d--) {
        int64_t nbytes = 3 * pt_type_by_dtype(d)->nbytes;
        rc = ps_ptw_write(w, d, bytes_of, 1);               /* written in two pieces */
        if (rc >= 0) rc = ps_ptw_write(w, d, bytes_of + 1, nbytes - 1);
    }
    if (rc >= 0) rc = ps_ptw_commit(w);
    ps_ptw_free(w);
    return rc;
}

static int write_sample(void) { return write_sample_wide(in_folder("a.pt"), 0); }

static int item(const ps_pt *pt, int value, int i) { return ps_pt_item(pt, value, i); }

static ps_pt_value get(const ps_pt *pt, int value)
{
    ps_pt_value v = { .kind = -1 };
    OK(ps_pt_get(pt, value, &v));
    return v;
}

/* Checks that every range of a tensor equals the same range of the whole bytes. `whole` has the tensor's bytes. */
static void check_ranges(ps_pt *pt, const ps_pt_tensor *t, const uint8_t *whole)
{
    uint8_t part[64];
    int64_t each = t->nbytes / t->numel;
    for (int64_t first = 0; first < t->numel; first++)
        for (int64_t n = 0; n <= t->numel - first; n++) {
            memset(part, 0xee, sizeof part);
            OK(ps_pt_copy(pt, t, first, part, n));
            CHECK(!memcmp(part, whole + first * each, (size_t)(n * each)) && part[n * each] == 0xee);
        }
}

static void check_sample(const char *path)
{
    ps_pt *pt = NULL;
    ps_pt_tensor t = { 0 }, first = { 0 };
    uint8_t copy[32];
    if (!OK(ps_pt_open(path, &pt))) return;
    int root = ps_pt_root(pt), dict = item(pt, root, 0), list = item(pt, dict, 1);
    CHECK(get(pt, root).kind == PS_PT_LIST && get(pt, root).count == 10);
    CHECK(get(pt, dict).kind == PS_PT_DICT && get(pt, dict).count == 4);
    CHECK(get(pt, item(pt, dict, 0)).integer == 1 && *get(pt, item(pt, dict, 0)).text == 't');
    CHECK(get(pt, item(pt, dict, 2)).integer == 7 && get(pt, item(pt, dict, 3)).number == 3.5);
    for (int d = 0; d < PS_DTYPE_COUNT; d++) {
        int value = item(pt, list, d);
        if (!OK(ps_pt_tensor_get(pt, value, &t))) continue;
        int64_t each = pt_type_by_dtype(d)->nbytes;
        CHECK(t.dtype == d && t.ndim == 2 && t.shape[0] == 1 && t.shape[1] == 3 && t.numel == 3);
        CHECK(t.nbytes == 3 * each && t.storage_nbytes == 3 * each && ((uintptr_t)t.data & 63) == 0);
        CHECK(!strcmp(t.type, pt_type_by_dtype(d)->text) && !memcmp(t.data, bytes_of, (size_t)t.nbytes));
        OK(ps_pt_verify(pt, value));
        OK(ps_pt_copy(pt, &t, 0, copy, t.numel));
        CHECK(!memcmp(copy, bytes_of, (size_t)t.nbytes));
        if (d == PS_F32) first = t;
    }
    OK(ps_pt_tensor_get(pt, item(pt, list, PS_DTYPE_COUNT), &t));
    CHECK(t.numel == 0 && t.nbytes == 0 && t.shape[1] == 0);
    OK(ps_pt_copy(pt, &t, 0, NULL, 0));
    CHECK(get(pt, item(pt, root, 1)).integer == -1 && get(pt, item(pt, root, 2)).integer == (int64_t)1 << 40);
    CHECK(get(pt, item(pt, root, 3)).kind == PS_PT_BOOL && get(pt, item(pt, root, 4)).kind == PS_PT_NONE);
    ps_pt_value b = get(pt, item(pt, root, 5));
    CHECK(b.kind == PS_PT_BYTES && b.integer == 3 && !memcmp(b.text, "a\0\xff", 3));
    CHECK(get(pt, item(pt, root, 6)).kind == PS_PT_TUPLE);
    OK(ps_pt_tensor_get(pt, item(pt, root, 7), &t));
    CHECK(t.storage == first.storage && t.data == first.data);
    OK(ps_pt_tensor_get(pt, item(pt, root, 8), &t));
    OK(ps_pt_copy(pt, &t, 0, copy, 4));
    CHECK(!memcmp(copy, bytes_of, 16) && !memcmp(copy + 16, bytes_of + 8, 16));
    check_ranges(pt, &t, copy);
    OK(ps_pt_tensor_get(pt, item(pt, root, 9), &t));
    CHECK(t.ndim == 0 && t.numel == 1 && t.offset == 2);
    ps_pt_drop(pt, item(pt, root, 9));
    OK(ps_pt_copy(pt, &t, 0, copy, 1));
    CHECK(!memcmp(copy, bytes_of + 16, 8));
    FAILS(ps_pt_copy(pt, &t, 0, copy, 2), PS_ERANGE, "2 elements from 0 on were requested, but the tensor has 1");
    FAILS(ps_pt_copy(pt, &t, 1, copy, 1), PS_ERANGE, "1 elements from 1 on");
    FAILS(ps_pt_copy(pt, &t, INT64_MAX, copy, 2), PS_ERANGE, "but the tensor has 1");
    ps_pt_tensor outside = t;
    outside.ndim = 1, outside.shape[0] = 2, outside.stride[0] = 1;
    FAILS(ps_pt_copy(pt, &outside, 0, copy, 1), PS_EFORMAT, "needs element 3");
    outside = t, outside.storage = 99;
    FAILS(ps_pt_copy(pt, &outside, 0, copy, 1), PS_EINVAL, "not describe a tensor of");
    outside = t, outside.dtype = -1;
    FAILS(ps_pt_copy(pt, &outside, 0, copy, 1), PS_EINVAL, "not describe a tensor of");
    FAILS(item(pt, root, 10), PS_ERANGE, "no item 10");
    FAILS(item(pt, item(pt, root, 1), 0), PS_ERANGE, "no item 0");
    FAILS(ps_pt_get(pt, 1 << 30, &b), PS_ERANGE, "was requested");
    FAILS(ps_pt_tensor_get(pt, root, &t), PS_EINVAL, "not a tensor");
    OK(ps_pt_ready(pt));
    CHECK(truncate(path, 100) == 0);
    FAILS(ps_pt_ready(pt), PS_EIO, "was truncated");
    FAILS(ps_pt_copy(pt, &t, 0, copy, 1), PS_EIO, "was truncated");
    ps_pt_close(pt);
    unlink(path);
}

static void test_round_trip(void)
{
    CHECK(zip_crc32(0, "123456789", 9) == 0xcbf43926 && zip_crc32(0, "", 0) == 0);
    CHECK(zip_crc32(zip_crc32(0, "1234", 4), "56789", 5) == 0xcbf43926);
    uint8_t noise[1000];
    for (int i = 0; i < 1000; i++) noise[i] = (uint8_t)(i * i >> 3);
    for (int n = 0; n <= 1000; n++) {           /* long pieces and single bytes use different methods */
        uint32_t crc = 0;
        for (int i = 0; i < n; i++) crc = zip_crc32(crc, noise + i, 1);
        CHECK(zip_crc32(0, noise, n) == crc);
    }
    if (OK(write_sample())) check_sample(in_folder("a.pt"));
    for (int wide = 1; wide < 5000; wide = wide * 3 + 1)        /* from all numbers to a few of them in 64 bits */
        if (OK(write_sample_wide(in_folder("wide.pt"), wide))) check_sample(in_folder("wide.pt"));
}

static void test_writer_errors(void)
{
    const char *path = in_folder("w.pt");
    ps_ptw *w = NULL;
    FAILS(ps_ptw_new(NULL, &w), PS_EINVAL, "path");
    OK(ps_ptw_new(path, &w));
    FAILS(ps_ptw_storage(w, 99, 1), PS_EINVAL, "dtype 99");
    FAILS(ps_ptw_storage(w, PS_F64, INT64_MAX), PS_EINVAL, "elements");
    FAILS(ps_ptw_begin(w), PS_ESTATE, "not complete");
    CHECK(ps_ptw_storage(w, PS_F32, 4) == 0);
    OK(put(w, PS_PT_DICT, 2));
    FAILS(put(w, PS_PT_LIST, 0), PS_EINVAL, "key");
    FAILS(put(w, PS_PT_NONE, 0), PS_EINVAL, "key");
    FAILS(put_text(w, "\xff"), PS_EINVAL, "UTF-8");
    OK(put_text(w, "x"));
    FAILS(put(w, PS_PT_SET, 0), PS_EINVAL, "kind");
    FAILS(put(w, PS_PT_DICT, 3), PS_EINVAL, "3 items");
    FAILS(ps_ptw_begin(w), PS_ESTATE, "not complete");
    ps_pt_tensor t = { .ndim = 1, .shape = { 5 }, .stride = { 1 } };
    FAILS(ps_ptw_tensor(w, &t), PS_EINVAL, "beyond its storage");
    t.shape[0] = 2, t.stride[0] = INT64_MAX;
    FAILS(ps_ptw_tensor(w, &t), PS_EINVAL, "beyond its storage");
    t.stride[0] = 3, t.storage = 1;
    FAILS(ps_ptw_tensor(w, &t), PS_EINVAL, "storage 1 was not declared");
    t.storage = 0, t.ndim = 9;
    FAILS(ps_ptw_tensor(w, &t), PS_EINVAL, "9 dimensions");
    t.ndim = 1;
    OK(ps_ptw_tensor(w, &t));
    FAILS(put(w, PS_PT_INT, 1), PS_EINVAL, "complete");
    FAILS(ps_ptw_write(w, 0, bytes_of, 16), PS_ESTATE, "declaring");
    struct rlimit limit, small = { .rlim_cur = 300 };
    getrlimit(RLIMIT_FSIZE, &limit);
    small.rlim_max = limit.rlim_max;
    OK(ps_ptw_begin(w));
    FAILS(put(w, PS_PT_INT, 1), PS_ESTATE, "writing");
    FAILS(ps_ptw_write(w, 1, bytes_of, 16), PS_EINVAL, "storage 1");
    FAILS(ps_ptw_write(w, 0, bytes_of, 17), PS_EINVAL, "room for 16");
    OK(ps_ptw_write(w, 0, bytes_of, 15));
    FAILS(ps_ptw_commit(w), PS_ESTATE, "15 of its 16");
    CHECK(files_in_folder() == 1);
    ps_ptw_free(w);
    CHECK(files_in_folder() == 0);
    OK(ps_ptw_new(path, &w));
    for (int i = 0; i < PK_MAX_DEPTH; i++) OK(put(w, PS_PT_LIST, 1));
    FAILS(put(w, PS_PT_LIST, 1), PS_EINVAL, "nested more than");
    ps_ptw_free(w);
    OK(ps_ptw_new(path, &w));
    OK(put(w, PS_PT_INT, 1));
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK(ps_ptw_begin(w) < 0 && strstr(ps_error_message(), "ulimit"));
    setrlimit(RLIMIT_FSIZE, &limit);
    ps_ptw_free(w);
    CHECK(files_in_folder() == 0);
}

/* -- damaged files ----------------------------------------------------------------------------------------------- */
static uint8_t *read_whole(const char *path, size_t *n)
{
    struct stat st;
    int fd = open(path, O_RDONLY);
    uint8_t *bytes = fd >= 0 && fstat(fd, &st) == 0 ? malloc((size_t)st.st_size) : NULL;
    if (!bytes || read(fd, bytes, (size_t)st.st_size) != st.st_size) exit(1);
    close(fd);
    *n = (size_t)st.st_size;
    return bytes;
}

/* Reads everything that can be read below a value. */
static int read_all(ps_pt *pt, int value)
{
    uint8_t copy[4096];
    ps_pt_value v;
    ps_pt_tensor t;
    PS_TRY(ps_pt_get(pt, value, &v));
    if (v.kind == PS_PT_TENSOR) {
        PS_TRY(ps_pt_tensor_get(pt, value, &t));
        PS_TRY(ps_pt_verify(pt, value));
        if (t.dtype >= 0 && t.nbytes <= (int64_t)sizeof copy) PS_TRY(ps_pt_copy(pt, &t, 0, copy, t.numel));
    }
    for (int i = 0; i < v.count; i++) PS_TRY(read_all(pt, item(pt, value, i)));
    return 0;
}

static int open_all(const uint8_t *bytes, size_t n)
{
    ps_pt *pt = NULL;
    uint8_t *exact = malloc(n ? n : 1);         /* sanitizers detect a read past its end */
    memcpy(exact, bytes, n);
    int rc = pt_open_memory("damaged.pt", exact, (int64_t)n, &pt);
    if (rc == 0) rc = read_all(pt, ps_pt_root(pt));
    ps_pt_close(pt);
    free(exact);
    return rc;
}

static void test_damage(void)
{
    const char *path = in_folder("a.pt");
    size_t n, refused = 0;
    OK(write_sample());
    uint8_t *bytes = read_whole(path, &n);
    unlink(path);
    OK(open_all(bytes, n));
    for (size_t cut = 0; cut < n; cut++) CHECK(open_all(bytes, cut) == PS_EFORMAT);
    for (size_t i = 0; i < n; i++)
        for (int flip = 1; flip < 256; flip = flip * 2 + 1) {
            bytes[i] ^= (uint8_t)flip;
            int rc = open_all(bytes, n);
            bytes[i] ^= (uint8_t)flip;
            CHECK(rc == 0 || rc == PS_EFORMAT);
            refused += rc < 0;
        }
    CHECK(refused > n);
    for (size_t i = 0; i + 24 < n; i++)         /* checksums cover every byte of the tensors */
        if (!memcmp(bytes + i, bytes_of, 24)) {
            bytes[i + 5] ^= 1;
            FAILS(open_all(bytes, n), PS_EFORMAT, "checksum");
            bytes[i + 5] ^= 1;
        }
    int zeroed = 0;
    for (size_t i = 0; i + 46 + 14 < n; i++) {  /* 0 is a valid checksum unless all checksums in the archive are 0 */
        if (memcmp(bytes + i, "PK\1\2", 4) || memcmp(bytes + i + 46, "archive/data", 12)) continue;
        uint32_t crc;
        memcpy(&crc, bytes + i + 16, 4);
        memset(bytes + i + 16, 0, 4);
        if (crc) FAILS(open_all(bytes, n), PS_EFORMAT, "checksum");
        zeroed += crc != 0;
        memcpy(bytes + i + 16, &crc, 4);
    }
    CHECK(zeroed == 1 + PS_DTYPE_COUNT);
    for (size_t i = 0; i + 46 < n; i++)
        if (!memcmp(bytes + i, "PK\1\2", 4)) memset(bytes + i + 16, 0, 4);
    OK(open_all(bytes, n));
    free(bytes);
}

static int open_sample(void)
{
    ps_pt *pt = NULL;
    int rc = ps_pt_open(in_folder("kept.pt"), &pt);
    ps_pt_close(pt);
    return rc;
}

static int write_and_remove(void)
{
    int rc = write_sample();
    if (rc == 0) unlink(in_folder("a.pt"));
    return rc;
}

static void test_allocations(void)
{
    OK(write_sample_wide(in_folder("kept.pt"), 0));
    fail_allocations("open", open_sample);
    unlink(in_folder("kept.pt"));
    fail_allocations("write", write_and_remove);
}

/* -- pickles by hand --------------------------------------------------------------------------------------------- */
/* Opens an archive with this data.pkl and the storages "0" (16 bytes) and "e" (empty). */
static int open_pickle(const char *pickle, size_t n, ps_pt **out)
{
    const char *path = in_folder("p.pt");
    zipw w;
    zipw_init(&w);
    int rc = zipw_add(&w, "x/data.pkl", (int64_t)n);
    if (rc >= 0) rc = zipw_add(&w, "x/data/0", 16);
    if (rc >= 0) rc = zipw_add(&w, "x/data/e", 0);
    if (rc >= 0) rc = zipw_begin(&w, path);
    if (rc >= 0) rc = zipw_write(&w, 0, pickle, (int64_t)n);
    if (rc >= 0) rc = zipw_write(&w, 1, bytes_of, 16);
    if (rc >= 0) rc = zipw_commit(&w);
    zipw_close(&w);
    OK(rc);
    rc = ps_pt_open(path, out);
    unlink(path);
    return rc;
}

static int refuse_pickle(const char *pickle, size_t n)
{
    ps_pt *pt = NULL;
    int rc = open_pickle(pickle, n, &pt);
    ps_pt_close(pt);
    return rc;
}
#define REFUSED(pickle, word) FAILS(refuse_pickle(pickle, sizeof pickle - 1), PS_EFORMAT, word)
#define TAKEN(pickle) OK(refuse_pickle(pickle, sizeof pickle - 1))

#define STORAGE(numel) "((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0""0X\3\0\0\0cpuK" numel "tQ"
#define TENSOR(numel, rest) "\x80\2ctorch._utils\n_rebuild_tensor_v2\n" STORAGE(numel) rest "tR."
#define PLAIN "\x89" "ccollections\nOrderedDict\n)R"

static void test_refused_calls(void)
{
    REFUSED("\x80\2cposix\nsystem\nX\2\0\0\0id\x85R.", "'posix.system'");
    REFUSED("\x80\2" "c__builtin__\neval\nX\1\0\0\0" "1\x85R.", "'__builtin__.eval'");
    REFUSED("\x80\4X\2\0\0\0osX\6\0\0\0system\x93.", "'os.system'");
    REFUSED("\x80\2" "cbuiltins\ngetattr\n.", "nothing was executed");
    REFUSED("\x80\2" "ctorch\nload\n.", "'torch.load'");
    REFUSED("\x80\2" "ctorch.storage\n_load_from_bytes\n.", "_load_from_bytes");
    REFUSED("\x80\2" "ca\x01\xff\nb\n.", "'a??.b'");
    REFUSED("\x80\2" "ccollections\nOrderedDict\n)\x81.", "object of a class");
    REFUSED("\x80\2(X\1\0\0\0aios\nsystem\n.", "object of a class");
    REFUSED("\x80\2K\1)R.", "not a function");
    REFUSED("\x80\2" "ctorch\nFloatStorage\n)R.", "in a form that is not supported");
    REFUSED("\x80\2" "ctorch._tensor\n_rebuild_from_type_v2\n(c_codecs\nencode\nctorch\nSize\n)NtR.", "not supported");
    REFUSED("\x80\2" "ctorch._utils\n_rebuild_parameter\n(K\1tR.", "not supported");
    REFUSED("\x80\2" "c_codecs\nencode\nX\3\0\0\0\xe2\x82\xacX\6\0\0\0latin1\x86R.", "Latin-1");
    TAKEN("\x80\2" "c_codecs\nencode\nX\2\0\0\0\xc3\xbfX\6\0\0\0latin1\x86R.");
}

static void test_refused_machine(void)
{
    REFUSED("", "without its last");
    REFUSED("\x80\2", "without its last");
    REFUSED("\x80\7.", "protocol 7");
    REFUSED("\x80\2.", "stack is empty");
    REFUSED("\x80\2(K\1(.", "stack is empty");
    REFUSED("\x80\2K", "inside an instruction");
    REFUSED("\x80\2X\xff\xff\xff\xff" "a.", "inside an instruction");
    REFUSED("\x80\4\x8d\xff\xff\xff\xff\xff\xff\xff\xff" "a.", "inside an instruction");
    REFUSED("\x80\2t.", "mark is missing");
    REFUSED("\x80\2(K\1d.", "key has no value");
    REFUSED("\x80\2}(K\1u.", "key has no value");
    REFUSED("\x80\2}K\1a.", "not a list");
    REFUSED("\x80\2)(K\1e.", "not a list");
    REFUSED("\x80\2K\1r\xff\xff\xff\xff.", "too large");
    REFUSED("\x80\2h\1.", "never set");
    REFUSED("\x80\2K\1q\0j\1\0\0\0.", "never set");
    REFUSED("\x80\2\xfe.", "0xfe");
    REFUSED("\x80\2I1x\n.", "an integer is malformed");
    REFUSED("\x80\2]q\0h\0a.", "contains itself");
    REFUSED("\x80\2}q\0K\1h\0s.", "contains itself");
    REFUSED("\x80\2]q\0(h\0ta.", "contains itself");
    char deep[2 * PK_MAX_DEPTH + 64];
    size_t n = 0;
    deep[n++] = '\x80', deep[n++] = 2, deep[n++] = ')';
    while (n < 3 + PK_MAX_DEPTH - 1) deep[n++] = '\x85';
    deep[n++] = '.';
    OK(refuse_pickle(deep, n));
    deep[n - 1] = '\x85', deep[n++] = '.';
    FAILS(refuse_pickle(deep, n), PS_EFORMAT, "deep");
}

static void test_tensors(void)
{
    TAKEN(TENSOR("\4", "K\0K\4\x85K\1\x85" PLAIN));
    TAKEN(TENSOR("\4", "K\3))" PLAIN));
    REFUSED(TENSOR("\5", "K\0K\4\x85K\1\x85" PLAIN), "16 bytes, but data.pkl says that it has 5 elements of 4");
    REFUSED(TENSOR("\4", "K\1K\4\x85K\1\x85" PLAIN), "element 4 of a storage that has 4");
    REFUSED(TENSOR("\4", "K\4))" PLAIN), "element 4 of a storage that has 4");
    REFUSED(TENSOR("\4", "K\0K\4\x85K\2\x85" PLAIN), "element 6");
    REFUSED(TENSOR("\4", "J\xff\xff\xff\xff))" PLAIN), "offset");
    REFUSED(TENSOR("\4", "K\0K\4\x85J\xff\xff\xff\xff\x85" PLAIN), "strides");
    REFUSED(TENSOR("\4", "K\0K\4\x85)" PLAIN), "1 sizes and 0 strides");
    REFUSED(TENSOR("\4", "K\0]])" PLAIN), "shape is not a tuple");
    REFUSED(TENSOR("\4", "K\0(K\1K\1K\1K\1K\1K\1K\1K\1K\1t)" PLAIN), "9 dimensions");
    REFUSED(TENSOR("\4", "K\0\x8a\7\0\0\0\0\0\0\1\x8a\7\0\0\0\0\0\0\1\x86K\0K\0\x86" PLAIN), "too large");
    REFUSED(TENSOR("\4", "K\0K\4\x85K\1\x85" PLAIN "}X\3\0\0\0neg\x88s"), "negative");
    REFUSED(TENSOR("\4", "K\0K\4\x85K\1\x85"), "instead of 6");
    REFUSED("\x80\2(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0""9X\3\0\0\0cpuK\4tQ.", "'9' is not in the archive");
    REFUSED("\x80\2(X\7\0\0\0storagectorch\nSize\nX\1\0\0\0""0X\3\0\0\0cpuK\4tQ.", "describes a storage");
    REFUSED("\x80\2K\1Q.", "something other than a storage");
    ps_pt *pt = NULL;
    ps_pt_tensor t;
    static const char untyped[] = "\x80\2" "ctorch._utils\n_rebuild_tensor_v3\n((X\7\0\0\0storagectorch.storage\n"
        "UntypedStorage\nX\1\0\0\0""0X\3\0\0\0cpuK\20tQK\1K\2\x85K\1\x85" PLAIN "ctorch\nuint16\ntR.";
    OK(open_pickle(untyped, sizeof untyped - 1, &pt));
    OK(ps_pt_tensor_get(pt, ps_pt_root(pt), &t));
    CHECK(t.dtype == -1 && !strcmp(t.type, "torch.uint16") && t.nbytes == 4 && t.offset == 1);
    ps_pt_close(pt);
}

/* A list contains one list four times, which contains another list four times, and so on. There are few values and
 * many paths. */
static void test_shared(void)
{
    static const char pickle[] = "\x80\2]q\0]q\1(h\0h\0h\0h\0e]q\2(h\1h\1h\1h\1e]q\3(h\2h\2h\2h\2e.";
    ps_pt *pt = NULL;
    OK(open_pickle(pickle, sizeof pickle - 1, &pt));
    int root = ps_pt_root(pt);
    CHECK(get(pt, root).count == 4 && item(pt, root, 0) == item(pt, root, 3));
    ps_pt_close(pt);
}

static void test_numbers(void)
{
    static const char pickle[] = "\x80\2(\x8a\1\xff\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0"
        "\x8a\x09\0\0\0\0\0\0\0\x80\xff"
        "\x8a\x09\0\0\0\0\0\0\0\0\xff\x8a\0G\x3f\xf8\0\0\0\0\0\0J\xfe\xff\xff\xffI01\nI-12\nL123456789012L\nt.";
    ps_pt *pt = NULL;
    if (!OK(open_pickle(pickle, sizeof pickle - 1, &pt))) return;
    int root = ps_pt_root(pt);
    CHECK(get(pt, item(pt, root, 0)).integer == -1);
    CHECK(get(pt, item(pt, root, 1)).kind == PS_PT_FLOAT && get(pt, item(pt, root, 1)).number == 0x1p64);
    CHECK(get(pt, item(pt, root, 2)).kind == PS_PT_INT && get(pt, item(pt, root, 2)).integer == INT64_MIN);
    CHECK(get(pt, item(pt, root, 3)).kind == PS_PT_FLOAT && get(pt, item(pt, root, 3)).number == -0x1p64);
    CHECK(get(pt, item(pt, root, 4)).integer == 0 && get(pt, item(pt, root, 5)).number == 1.5);
    CHECK(get(pt, item(pt, root, 6)).integer == -2 && get(pt, item(pt, root, 7)).kind == PS_PT_BOOL);
    CHECK(get(pt, item(pt, root, 8)).integer == -12 && get(pt, item(pt, root, 9)).integer == 123456789012);
    ps_pt_close(pt);
}

/* Integers that do not fit into 64 bits become the nearest double in every notation, or are rejected. They never
 * become another integer. */
static void test_large_numbers(void)
{
    static const char pickle[] = "\x80\2(L99999999999999999999L\nL-99999999999999999999L\nI9223372036854775808\n"
        "I9223372036854775807\nL-9223372036854775808L\nL-9223372036854775809L\nL18446744073709553665L\n"
        "\x8a\x09\1\x08\0\0\0\0\0\0\1\x8a\x09\0\x08\0\0\0\0\0\0\1\x8a\x09\xff\xf7\xff\xff\xff\xff\xff\xff\xfet.";
    static const double want[] = { 1e20, -1e20, 0x1p63, 0, 0, -0x1p63, 0x1p64 + 4096, 0x1p64 + 4096, 0x1p64,
                                   -0x1p64 - 4096 };
    ps_pt *pt = NULL;
    if (!OK(open_pickle(pickle, sizeof pickle - 1, &pt))) return;
    int root = ps_pt_root(pt);
    CHECK(get(pt, root).count == 10);
    for (int i = 0; i < 10; i++) {
        ps_pt_value v = get(pt, item(pt, root, i));
        if (want[i] == 0) CHECK(v.kind == PS_PT_INT && v.integer == (i == 3 ? INT64_MAX : INT64_MIN));
        else CHECK(v.kind == PS_PT_FLOAT && v.number == want[i]);
    }
    ps_pt_close(pt);
    char digits[400] = "\x80\2L";
    memset(digits + 3, '9', 308);
    memcpy(digits + 311, "L\n.", 3);
    OK(refuse_pickle(digits, 314));
    memset(digits + 3, '9', 309);
    memcpy(digits + 312, "L\n.", 3);
    FAILS(refuse_pickle(digits, 315), PS_EFORMAT, "larger than every double");
    memset(digits + 3, '9', 390);
    memcpy(digits + 393, "L\n.", 3);
    FAILS(refuse_pickle(digits, 396), PS_EFORMAT, "390 digits");
    REFUSED("\x80\2L-\n.", "an integer is malformed");
    REFUSED("\x80\2L--1\n.", "an integer is malformed");
    REFUSED("\x80\2I1-1\n.", "an integer is malformed");
    REFUSED("\x80\2L1\0L\n.", "an integer is malformed");
}

/* A container that occurs again is one value at two positions. */
static void test_again(void)
{
    const char *path = in_folder("again.pt");
    ps_ptw *w = NULL;
    ps_pt *pt = NULL;
    enum { MANY = 300 };                        /* indices of one byte and of four bytes */
    int numbers[MANY];
    OK(ps_ptw_new(path, &w));
    int root = put(w, PS_PT_LIST, 2 * MANY);
    FAILS(ps_ptw_again(w, root), PS_EINVAL, "no complete container");
    FAILS(ps_ptw_again(w, -1), PS_EINVAL, "no complete container");
    FAILS(ps_ptw_again(w, 99), PS_EINVAL, "container 99");
    for (int i = 0; i < MANY; i++) {
        static const int kinds[] = { PS_PT_LIST, PS_PT_TUPLE, PS_PT_DICT };
        int kind = kinds[i % 3], n = i / 3 % 3;
        numbers[i] = put(w, kind, kind == PS_PT_DICT ? 2 * n : n);
        for (int j = 0; j < (kind == PS_PT_DICT ? 2 * n : n); j++) OK(put(w, PS_PT_INT, i * 10 + j));
    }
    for (int i = MANY - 1; i >= 0; i--) OK(ps_ptw_again(w, numbers[i]));
    OK(ps_ptw_begin(w));
    OK(ps_ptw_commit(w));
    ps_ptw_free(w);
    if (OK(ps_pt_open(path, &pt))) {
        root = ps_pt_root(pt);
        for (int i = 0; i < MANY; i++) {
            int one = item(pt, root, i);
            CHECK(one == item(pt, root, 2 * MANY - 1 - i));
            if (get(pt, one).count) CHECK(get(pt, item(pt, one, 0)).integer == i * 10);
        }
    }
    ps_pt_close(pt);
    unlink(path);
}

static void test_other_formats(void)
{
    static const char legacy[] = "\x80\2\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\2M\xe9\3.";
    char tar[1024] = { 0 };
    ps_pt *pt = NULL;
    write_file(in_folder("old.pt"), legacy, sizeof legacy - 1);
    FAILS(ps_pt_open(in_folder("old.pt"), &pt), PS_EFORMAT, "before 1.6");
    unlink(in_folder("old.pt"));
    memcpy(tar + 257, "ustar", 5);
    FAILS(pt_open_memory("old.pt", tar, sizeof tar, &pt), PS_EFORMAT, "tar archive");
    static const char header[] = "\x80\0\0\0\0\0\0\0{}";
    FAILS(pt_open_memory("x.pt", header, sizeof header - 1, &pt), PS_EFORMAT, "a safetensors file");
    FAILS(pt_open_memory("x.pkl", "\x80\4K\1.", 5, &pt), PS_EFORMAT, "bare pickle");
    FAILS(pt_open_memory("x.pt", "\10\0\0\0\0\0\0\0{}      ", 16, &pt), PS_EFORMAT, "safetensors");
    FAILS(pt_open_memory("x.pt", "", 0, &pt), PS_EFORMAT, "not a whole ZIP");
    FAILS(pt_open_memory("x.zip", "PK\5\6\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 22, &pt), PS_EFORMAT, "data.pkl");
    FAILS(ps_pt_open(in_folder("none.pt"), &pt), PS_EIO, "No such file");
    CHECK(!pt);
}

int main(void)
{
    begin_tests();
    for (int i = 0; i < 24; i++) bytes_of[i] = (uint8_t)(i + 1);
    test_round_trip();
    test_writer_errors();
    test_damage();
    test_allocations();
    test_refused_calls();
    test_refused_machine();
    test_tensors();
    test_shared();
    test_numbers();
    test_large_numbers();
    test_again();
    test_other_formats();
    return end_tests();
}
