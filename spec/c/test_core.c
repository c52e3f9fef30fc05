/* SPDX-License-Identifier: BSD-3-Clause
 * Contexts, storages, headers, scopes and the tape from C: which of them keep bytes alive, and that all bytes are
 * freed, even if a context is closed over live tensors, open scopes and a backward walk. */
#include "check.h"
#include "tensor/tensor.h"

enum { BIG = 64 << 10 };                      /* number of elements (256 KiB), which is not small for a scope */

static ps_ctx *ctx;

static int64_t used(void)
{
    ps_memory_info info;
    OK(ps_memory_get(ctx, 0, &info));
    return info.used;
}

static ps_tensor *tensor(int64_t numel)
{
    ps_tensor *t = NULL;
    OK(ps_tensor_new(ctx, PS_F32, 0, 1, &numel, &t));
    return t;
}

static ps_tensor *filled(int64_t numel, double value)
{
    ps_tensor *t = tensor(numel), *out[PS_MAX_OUT] = { NULL };
    ps_attrs_fill_ attrs = { .value = value };
    OK(ps_apply(ctx, PS_OP_fill_, 1, &t, &attrs, sizeof attrs, out));
    CHECK(out[0] == t);
    ps_tensor_release(out[0]);                /* in place, it returns its input with one more reference */
    return t;
}

static ps_tensor *binary(int op, ps_tensor *a, ps_tensor *b)
{
    static const int32_t none;
    ps_tensor *in[] = { a, b }, *out[PS_MAX_OUT] = { NULL };
    OK(ps_apply(ctx, op, 2, in, &none, sizeof none, out));
    return out[0];
}

static ps_tensor *sum(ps_tensor *x)
{
    ps_attrs_sum attrs = { 0 };
    ps_tensor *out[PS_MAX_OUT] = { NULL };
    OK(ps_apply(ctx, PS_OP_sum, 1, &x, &attrs, sizeof attrs, out));
    return out[0];
}

static ps_tensor *slice(ps_tensor *x, int64_t start, int64_t stop)
{
    ps_attrs_slice attrs = { .start = start, .stop = stop, .step = 1 };
    ps_tensor *out[PS_MAX_OUT] = { NULL };
    OK(ps_apply(ctx, PS_OP_slice, 1, &x, &attrs, sizeof attrs, out));
    return out[0];
}

static double item(ps_tensor *t)
{
    double value = -1;
    OK(ps_tensor_read_f64(t, 0, 1, &value));
    return value;
}

static int backward(ps_tensor *loss)
{
    int64_t segment;
    int rc = ps_backward_begin_n(ctx, 1, &loss, NULL, &segment);
    ps_backward_end(ctx);
    return rc;
}

static int64_t scope_begin(void)
{
    int64_t id = -1;
    OK(ps_scope_begin(ctx, &id));
    return id;
}

/* -- storages and headers ----------------------------------------------------------------------------------------- */
static void test_headers(void)
{
    int64_t before = used();
    ps_tensor *a = filled(BIG, 3), *view = slice(a, 10, 20), *twice;
    CHECK(a->refs == 1 && a->storage->refs == 2 && view->storage == a->storage);
    CHECK(used() == before + BIG * 4);
    ps_tensor_release(a);                                 /* the view keeps the bytes alive */
    CHECK(view->storage->refs == 1 && item(view) == 3 && used() == before + BIG * 4);
    ps_tensor_retain(view);
    OK(ps_tensor_detach(view, &twice));
    CHECK(view->refs == 2 && view->storage->refs == 2);
    ps_tensor_release(view);
    ps_tensor_release(view);
    CHECK(item(twice) == 3);
    ps_tensor_release(twice);
    CHECK(used() == before);

    ps_tensor *empty = tensor(0);
    CHECK(ps_tensor_alive(empty) && ps_tensor_nbytes(empty) == 0 && used() == before);
    OK(ps_tensor_read(empty, NULL, 0));
    ps_tensor_release(empty);
}

/* A header without data takes over the bytes of another tensor. */
static void test_set_data(void)
{
    int meta = -1;
    OK(ps_device_find(ctx, "meta", &meta));
    int64_t before = used(), inner = scope_begin();
    ps_tensor *later, *value = filled(BIG, 3), *small = filled(4, 1);
    OK(ps_tensor_new(ctx, PS_F32, meta, 1, (int64_t[]){ BIG }, &later));
    OK(ps_tensor_keep(later));
    OK(ps_tensor_require_grad(later, 1));
    FAILS(ps_tensor_set_data(later, small), PS_EINVAL, "[4]");
    OK(ps_tensor_set_data(later, value));
    CHECK(later->device_ == 0 && later->storage == value->storage && later->storage->refs == 2);
    ps_tensor_release(value);
    ps_tensor_release(small);
    OK(ps_scope_end(ctx, inner, 0, NULL));               /* kept by the inner scope, as before */
    CHECK(ps_tensor_alive(later) && item(later) == 3 && (later->flags & PS_T_REQUIRES_GRAD));
    ps_tensor *grad = filled(BIG, 1), *other_value = filled(BIG, 5), *part = slice(other_value, 1, 5);
    OK(ps_tensor_set_grad(later, grad));
    FAILS(ps_tensor_set_data(later, other_value), PS_ESTATE, "without a gradient");
    OK(ps_tensor_set_grad(later, NULL));
    OK(ps_tensor_new(ctx, PS_F32, meta, 1, (int64_t[]){ 4 }, &small));
    OK(ps_tensor_set_data(small, part));
    CHECK(small->offset == 1 && small->storage == other_value->storage);
    ps_tensor *all[] = { later, grad, other_value, part, small };
    for (int i = 0; i < 5; i++) ps_tensor_release(all[i]);
    CHECK(used() == before);
}

static void test_refusals(void)
{
    ps_tensor *t = NULL, *a = tensor(4), *b = tensor(3), *in[] = { a, b, NULL }, *out[PS_MAX_OUT] = { NULL };
    int32_t none = 0;
    int64_t before = used(), huge[] = { INT64_MAX, 2 }, negative[] = { 2, -1 };
    FAILS(ps_tensor_new(ctx, 99, 0, 0, NULL, &t), PS_EINVAL, "type");
    FAILS(ps_tensor_new(ctx, PS_F32, 7, 0, NULL, &t), PS_EINVAL, "device");
    FAILS(ps_tensor_new(ctx, PS_F32, 0, 9, huge, &t), PS_EINVAL, "dimensions");
    FAILS(ps_tensor_new(ctx, PS_F32, 0, 2, huge, &t), PS_EINVAL, "has too many elements");
    FAILS(ps_tensor_new(ctx, PS_F32, 0, 1, huge, &t), PS_EINVAL, "addressed");
    FAILS(ps_tensor_new(ctx, PS_F32, 0, 2, negative, &t), PS_EINVAL, "[2, -1]");
    CHECK(t == NULL);
    FAILS(ps_apply(ctx, -1, 2, in, &none, 4, out), PS_EINVAL, "there is no op");
    FAILS(ps_apply(ctx, PS_OP_COUNT, 2, in, &none, 4, out), PS_EINVAL, "there is no op");
    FAILS(ps_apply(ctx, PS_OP_add, 2, in, &none, 8, out), PS_EINVAL, "attributes of 8 bytes");
    FAILS(ps_apply(ctx, PS_OP_add, 1, in, &none, 4, out), PS_EINVAL, "takes 2 inputs");
    FAILS(ps_apply(ctx, PS_OP_add, 65, in, &none, 4, out), PS_EINVAL, "at most");
    FAILS(ps_apply(ctx, PS_OP_add, 2, in, &none, 4, out), PS_EINVAL, "fp32 [4], fp32 [3]");
    in[1] = NULL;
    FAILS(ps_apply(ctx, PS_OP_add, 2, in, &none, 4, out), PS_EINVAL, "input b is missing");
    CHECK(!strcmp(ps_error_op(), "add"));
    CHECK(out[0] == NULL && used() == before);

    ps_ctx *other;
    OK(ps_ctx_new(&other));
    OK(ps_tensor_new(other, PS_F32, 0, 1, (int64_t[]){ 4 }, &t));
    in[1] = t;
    FAILS(ps_apply(ctx, PS_OP_add, 2, in, &none, 4, out), PS_EINVAL, "another context");
    ps_tensor_release(t);
    ps_ctx_free(other);

    FAILS(ps_tensor_write(a, &none, 4), PS_EINVAL, "16");
    FAILS(ps_tensor_read_f64(a, 3, 2, (double[]){ 0, 0 }), PS_ERANGE, "of 4");
    FAILS(backward(a), PS_EINVAL, "requires a gradient");
    ps_tensor_release(a);
    ps_tensor_release(b);
}

/* -- scopes ------------------------------------------------------------------------------------------------------- */
static void test_scopes(void)
{
    int64_t before = used(), outer = scope_begin();
    ps_tensor *dropped = filled(BIG, 1), *kept = filled(BIG, 2), *small = filled(8, 3), *returned, *inner_dropped;
    OK(ps_tensor_keep(kept));
    int64_t inner = scope_begin();
    CHECK(ps_scope_depth(ctx) == 2);
    returned = filled(BIG, 4);
    ps_tensor *base = filled(BIG, 5);
    inner_dropped = slice(base, 0, 5);
    ps_tensor_release(base);
    OK(ps_scope_end(ctx, inner, 1, &returned));
    CHECK(ps_tensor_alive(dropped) && ps_tensor_alive(returned) && !ps_tensor_alive(inner_dropped));
    FAILS(ps_scope_end(ctx, inner, 0, NULL), PS_ESTATE, "not open");
    scope_begin();                                               /* not closed, so the outer scope ends it */
    ps_tensor *forgotten = filled(BIG, 6);
    OK(ps_scope_end(ctx, outer, 0, NULL));
    CHECK(ps_scope_depth(ctx) == 0);
    CHECK(!ps_tensor_alive(dropped) && !ps_tensor_alive(returned) && !ps_tensor_alive(forgotten));
    CHECK(ps_tensor_alive(kept) && ps_tensor_alive(small) && item(kept) == 2 && item(small) == 3);
    CHECK(used() == before + BIG * 4 + 256);

    ps_tensor *in[] = { dropped, kept }, *out[PS_MAX_OUT] = { NULL };
    FAILS(ps_apply(ctx, PS_OP_add, 2, in, &(int32_t){ 0 }, 4, out), PS_ESTALE, "scope");
    FAILS(ps_tensor_keep(dropped), PS_ESTALE, "[65536]");
    CHECK(out[0] == NULL);
    ps_tensor *all[] = { dropped, kept, small, returned, forgotten };
    for (int i = 0; i < 5; i++) ps_tensor_release(all[i]);
    ps_tensor_release(inner_dropped);
    CHECK(used() == before);
}

/* -- the tape ----------------------------------------------------------------------------------------------------- */
/* The tape keeps bytes that a scope dropped, and releases them after the walk has passed. */
static void test_tape(void)
{
    int64_t before = used();
    ps_tensor *w = filled(BIG, 3);
    OK(ps_tensor_require_grad(w, 1));
    int64_t id = scope_begin();
    ps_tensor *x = filled(BIG, 2), *y = binary(PS_OP_mul, w, x), *z = binary(PS_OP_mul, y, y), *loss = sum(z);
    ps_tensor_release(y);
    OK(ps_scope_end(ctx, id, 0, NULL));
    CHECK(!ps_tensor_alive(z) && ps_tensor_alive(loss) && item(loss) == 36.0 * BIG);
    CHECK(x->storage->bytes.dropped && x->storage->holds == 1);  /* the bytes exist, but scripts cannot read them */
    OK(backward(loss));
    CHECK(item(ps_tensor_get_grad(w)) == 2 * 3 * 2 * 2);
    CHECK(used() == before + 2 * BIG * 4 + 256);                 /* w, its gradient and the loss */
    FAILS(backward(loss), PS_ESTATE, "second time");
    ps_tensor_release(loss);
    ps_tensor_release(x);
    ps_tensor_release(z);
    OK(ps_tensor_set_grad(w, NULL));
    CHECK(used() == before + BIG * 4);
    ps_tensor_release(w);
    CHECK(used() == before);
}

/* A chain that is much longer than the C stack is deep is processed without recursion. */
static void test_long_chain(void)
{
    int64_t before = used();
    ps_tensor *x = filled(4, 1), *one = filled(4, 1);
    OK(ps_tensor_require_grad(x, 1));
    for (int i = 0; i < 100000; i++) {
        ps_tensor *next = binary(PS_OP_add, x, one);
        ps_tensor_release(x);
        x = next;
    }
    ps_tensor_release(x);
    ps_tensor_release(one);
    CHECK(used() == before);
}

/* A tensor that was changed in place after it was saved is detected. */
static void test_versions(void)
{
    ps_tensor *w = filled(BIG, 3), *x = filled(BIG, 2), *out[PS_MAX_OUT] = { NULL };
    OK(ps_tensor_require_grad(w, 1));
    ps_tensor *y = binary(PS_OP_mul, w, x), *loss = sum(y);
    ps_attrs_fill_ attrs = { .value = 1 };
    OK(ps_apply(ctx, PS_OP_fill_, 1, &x, &attrs, sizeof attrs, out));
    ps_tensor_release(out[0]);
    FAILS(backward(loss), PS_ESTALE, "changed in place");
    out[0] = NULL;
    FAILS(ps_apply(ctx, PS_OP_fill_, 1, &w, &attrs, sizeof attrs, out), PS_EINVAL, "no_grad");
    ps_tensor_release(loss);
    ps_tensor_release(y);
    ps_tensor_release(x);
    ps_tensor_release(w);
}

/* -- the end ------------------------------------------------------------------------------------------------------ */
/* Closes a context while everything that can be open is open. Headers remain valid, without bytes. */
static void test_close(void)
{
    ps_ctx *first = ctx;
    OK(ps_ctx_new(&ctx));
    ps_tensor *w = filled(BIG, 1), *kept = filled(BIG, 2), *held[8] = { NULL };
    OK(ps_tensor_require_grad(w, 1));
    OK(ps_tensor_keep(kept));
    scope_begin();
    held[0] = binary(PS_OP_mul, w, kept);
    held[1] = sum(held[0]);
    OK(backward(held[1]));
    held[2] = binary(PS_OP_mul, w, w);
    held[3] = sum(held[2]);
    scope_begin();
    ps_set_grad_enabled(ctx, 0);
    held[4] = binary(PS_OP_add, kept, kept);
    ps_set_grad_enabled(ctx, 1);
    int64_t segment, stopped;
    OK(ps_segment_new(ctx, 1, &w, 1, &held[4], &segment));
    held[5] = sum(held[4]);
    OK(ps_backward_begin_n(ctx, 1, &held[5], NULL, NULL));
    CHECK(ps_backward_next(ctx, &stopped) == 1 && stopped == segment);
    ps_ctx_free(ctx);                                        /* closes the context during a walk */
    ps_ctx_free(ctx);                                        /* a second call is harmless while a header is held */

    int32_t none = 0, device;
    int64_t id;
    ps_tensor *in[] = { w, kept }, *out[PS_MAX_OUT] = { NULL };
    double value;
    CHECK(!ps_tensor_alive(w) && !ps_tensor_alive(held[3]));
    FAILS(ps_apply(ctx, PS_OP_add, 2, in, &none, 4, out), PS_ESTATE, "closed");
    FAILS(ps_tensor_new(ctx, PS_F32, 0, 1, (int64_t[]){ 1 }, &out[0]), PS_EINVAL, "device");
    CHECK(ps_tensor_read_f64(w, 0, 1, &value) == PS_ESTALE && ps_tensor_keep(w) == PS_ESTALE);
    CHECK(ps_backward_begin_n(ctx, 1, &held[3], NULL, NULL) < 0 && ps_backward_next(ctx, &stopped) < 0);
    CHECK(ps_tensor_to_device(w, 1, &out[0]) < 0);
    CHECK(ps_scope_begin(ctx, &id) == PS_ESTATE && ps_scope_end(ctx, 1, 0, NULL) == PS_ESTATE);
    CHECK(ps_device_count(ctx) == 0 && ps_device_find(ctx, "cpu", &device) < 0);
    CHECK(ps_collect_due(ctx) == 0);
    ps_tensor_release(w);
    ps_tensor_release(kept);
    for (int i = 0; i < 6; i++) ps_tensor_release(held[i]);  /* releasing the last header frees the context */
    ctx = first;
}

static void test_failing_new(void)
{
    for (int nth = 0; nth < 100; nth++) {
        ps_ctx *made = NULL;
        ps_test_fail_alloc(nth, 1);
        int rc = ps_ctx_new(&made);
        bool hit = ps_test_fail_alloc_left() < 0;
        ps_test_fail_alloc(-1, 0);
        if (!hit) {
            OK(rc);
            CHECK(nth > 3);
            ps_ctx_free(made);
            return;
        }
        CHECK(rc == PS_ENOMEM && !made);
    }
    CHECK(!"it never succeeded");
}

/* If there is no memory for a device, the device does not exist, and another device can take its index. */
static void test_failing_device(void)
{
    bool hit = true;
    for (int nth = 0; hit; nth++) {
        ps_ctx *c;
        ps_backend *be;
        int64_t two = 2;
        ps_tensor *t;
        if (!OK(ps_ctx_new(&c))) return;
        int device = c->n_devices;
        OK(ps_dry_begin(c));
        ps_dry_end(c);
        for (int times = 0; hit && times < 10; times++) {            /* more attempts than there can be devices */
            OK(ps_backend_ref_open(&be));
            ps_test_fail_alloc(nth, 1);
            int rc = ps_ctx_add_device(c, be);
            hit = ps_test_fail_alloc_left() < 0;
            ps_test_fail_alloc(-1, 0);
            CHECK(hit ? rc == PS_ENOMEM && c->n_devices == device : rc == 0 && nth >= 2);
        }
        if (hit) {
            OK(ps_backend_ref_open(&be));
            OK(ps_ctx_add_device(c, be));
        }
        for (int dry = 0; dry < 2; dry++) {
            if (dry) OK(ps_dry_begin(c));
            if (!OK(ps_tensor_new(c, PS_F32, device, 1, &two, &t))) return;
            if (!dry) OK(ps_tensor_write_f64(t, 0, 2, (double[]){ 1, 2 }));
            ps_tensor_release(t);
        }
        ps_dry_end(c);
        ps_ctx_free(c);
    }
}

/* -- bytes that are lent ------------------------------------------------------------------------------------------- */
static float lent[BIG + 1];
static int loans, gone;

static int lent_check(void *lender) { return gone ? ps_fail(PS_EIO, "the lender's bytes are gone") : 0; }
static void lent_end(void *lender) { loans--; }
static int lend(void *from, int64_t at, int64_t nbytes, ps_loan *out)
{
    if (at < 0) return ps_fail(PS_ERANGE, "nothing is lent from byte %lld on", (long long)at);
    *out = (ps_loan){ .bytes = (char *)from + at, .check = lent_check, .end = lent_end };
    loans++;
    return 0;
}

static void test_lent(void)
{
    int64_t before = used(), inner = scope_begin();
    int meta = -1;
    ps_tensor *t = filled(BIG, 3), *part = slice(t, 4, 8), *none = tensor(0), *later;
    OK(ps_device_find(ctx, "meta", &meta));
    OK(ps_tensor_new(ctx, PS_F32, meta, 1, (int64_t[]){ 4 }, &later));
    for (int i = 0; i <= BIG; i++) lent[i] = 2;
    FAILS(ps_tensor_borrow(t, NULL, lent, 0, BIG * 4), PS_EINVAL, "lender");
    FAILS(ps_tensor_borrow(t, lend, lent, 0, BIG * 4 - 4), PS_EINVAL, "bytes were passed");
    FAILS(ps_tensor_borrow(t, lend, lent, -1, BIG * 4), PS_ERANGE, "nothing is lent");
    FAILS(ps_tensor_borrow(t, lend, lent, 2, BIG * 4), PS_EUNSUP, "not a multiple of the element size");
    FAILS(ps_tensor_borrow(part, lend, lent, 0, 16), PS_EUNSUP, "a part of another tensor");
    FAILS(ps_tensor_borrow(later, lend, lent, 0, 16), PS_EUNSUP, "");
    ps_test_fail_alloc(0, 1);
    FAILS(ps_tensor_borrow(t, lend, lent, 0, BIG * 4), PS_ENOMEM, "");
    ps_test_fail_alloc(-1, 0);
    CHECK(loans == 0 && item(t) == 3 && item(part) == 3);

    uint32_t version = ps_tensor_version(t);
    OK(ps_tensor_borrow(t, lend, lent, 4, BIG * 4));
    OK(ps_tensor_borrow(none, lend, lent, 0, 0));
    CHECK(loans == 1 && used() == before && ps_tensor_version(t) > version);
    gone = 1;
    OK(ps_tensor_borrow(t, lend, lent, 4, BIG * 4));      /* replaces bytes that are lost */
    gone = 0;
    CHECK(loans == 1 && used() == before);
    void *address = NULL;
    OK(ps_tensor_address(t, &address));
    CHECK(address == lent + 1);
    ps_tensor *total = sum(t);
    CHECK(item(total) == 2.0 * BIG && item(part) == 2);
    lent[5] = 7;                                          /* element 4 of t */
    CHECK(item(part) == 7);
    OK(ps_tensor_write(t, memset(lent, 0, sizeof lent), BIG * 4));

    gone = 1;                                             /* from here on, every use returns the lender's error */
    float out[4];
    FAILS(ps_tensor_read(part, out, 16), PS_EIO, "the lender's bytes are gone");
    static const int32_t no_attrs;
    ps_tensor *in[] = { t, t }, *made[PS_MAX_OUT] = { NULL };
    FAILS(ps_apply(ctx, PS_OP_add, 2, in, &no_attrs, sizeof no_attrs, made), PS_EIO, "the lender's bytes are gone");
    gone = 0;
    ps_tensor_release(t);
    CHECK(loans == 1);                                    /* the view uses the loan */
    OK(ps_scope_end(ctx, inner, 0, NULL));                /* drops the bytes and keeps the headers */
    CHECK(loans == 0 && !ps_tensor_alive(part));
    FAILS(ps_tensor_read(part, out, 16), PS_ESTALE, "");
    ps_tensor *rest[] = { part, none, later, total };
    for (int i = 0; i < 4; i++) ps_tensor_release(rest[i]);
    CHECK(used() == before);
}

/* A tensor is written from its lender's memory, and read into it, at an earlier or later address than its own bytes.
 * The result must be as if the bytes had been copied to a separate buffer first. Large tensors are copied in pieces
 * by several threads. */
static void test_lent_overlaps(void)
{
    enum { MOST = 3 << 20, AWAY = 100 };
    for (int large = 0; large < 2; large++)
        for (int later = 0; later < 2; later++)
            for (int reads = 0; reads < 2; reads++) {
                int64_t n = large ? MOST : 1000;
                float *memory = malloc(sizeof *memory * (size_t)(n + AWAY)), *other = memory + (later ? AWAY : 0);
                float *own = memory + (later ? 0 : AWAY), *from = reads ? own : other, *to = reads ? other : own;
                ps_tensor *t = tensor(n);
                for (int64_t i = 0; i < n + AWAY; i++) memory[i] = (float)i;
                OK(ps_tensor_borrow(t, lend, memory, (own - memory) * 4, n * 4));
                if (reads) OK(ps_tensor_read(t, other, n * 4));
                else OK(ps_tensor_write(t, other, n * 4));
                int64_t n_right = 0;
                for (int64_t i = 0; i < n; i++) n_right += to[i] == (float)(from - memory + i);
                CHECK(n_right == n);
                ps_tensor_release(t);
                free(memory);
            }
    CHECK(loans == 0);
}

/* Blocks of 5 + 32 bytes, each part from a range of its own: the first use copies them. */
static void test_lent_blocks(void)
{
    enum { HEAD = 5, BODY = 32, BLOCKS = 40000, ALL = (HEAD + BODY) * BLOCKS };
    static uint8_t memory[ALL], out[ALL];
    int64_t before = used();
    ps_tensor *t, *floats = tensor(37);
    for (int i = 0; i < ALL; i++) memory[i] = (uint8_t)((uint32_t)i * 2654435761u >> 24);
    ps_lent_range ranges[2] = { { memory, BODY * BLOCKS, HEAD }, { memory, 0, BODY } }, wrong[2];
    OK(ps_tensor_new(ctx, PS_U8, 0, 2, (int64_t[]){ BLOCKS / 4, (HEAD + BODY) * 4 }, &t));
    int64_t with = used();
    FAILS(ps_tensor_borrow_blocks(t, NULL, ranges), PS_EINVAL, "missing");
    FAILS(ps_tensor_borrow_blocks(t, lend, NULL), PS_EINVAL, "missing");
    FAILS(ps_tensor_borrow_blocks(NULL, lend, ranges), PS_EINVAL, "missing");
    FAILS(ps_tensor_borrow_blocks(floats, lend, ranges), PS_EINVAL, "37 bytes do not fill a tensor of 148 bytes");
    for (int i = 0; i < 4; i++) {
        static const struct { int64_t at, width; int code; const char *word; } rows[4] = {
            { 0, 0, PS_EINVAL, "blocks of 5 and 0" }, { 0, PS_BLOCK_WIDTH + 1, PS_EINVAL, "1 to 65536" },
            { 0, 6, PS_EINVAL, "blocks of 11 bytes" }, { -1, BODY, PS_ERANGE, "nothing is lent" },
        };
        wrong[0] = ranges[0];
        wrong[1] = (ps_lent_range){ memory, rows[i].at, rows[i].width };
        FAILS(ps_tensor_borrow_blocks(t, lend, wrong), rows[i].code, rows[i].word);
        CHECK(loans == 0);                                /* that of the first range has ended */
    }
    ps_test_fail_alloc(0, 1);
    FAILS(ps_tensor_borrow_blocks(t, lend, ranges), PS_ENOMEM, "");
    ps_test_fail_alloc(-1, 0);
    CHECK(loans == 0);
    for (int first = 0; first < 2; first++) {             /* the first use reads, or writes one byte */
        OK(ps_tensor_borrow_blocks(t, lend, ranges));
        CHECK(loans == 2 && ps_tensor_is_lent(t) && used() < with);
        gone = 1;
        FAILS(ps_tensor_read(t, out, ALL), PS_EIO, "the lender's bytes are gone");
        gone = 0;
        OK(ps_memory_set_limit(ctx, 0, before + 1000));
        FAILS(ps_tensor_read(t, out, ALL), PS_ENOMEM, "");
        OK(ps_memory_set_limit(ctx, 0, 0));
        CHECK(loans == 2 && ps_tensor_is_lent(t));        /* it can be tried again */
        if (first == 1) {
            ps_tensor *row = slice(t, 0, 1);
            OK(ps_tensor_write(row, memory, (HEAD + BODY) * 4));
            ps_tensor_release(row);
        }
        OK(ps_tensor_read(t, out, ALL));
        CHECK(loans == 0 && !ps_tensor_is_lent(t) && used() == with);
        int n_wrong = 0;
        for (int b = first * 4; b < BLOCKS; b++) {
            n_wrong += memcmp(out + b * (HEAD + BODY), memory + BODY * BLOCKS + b * HEAD, HEAD) != 0;
            n_wrong += memcmp(out + b * (HEAD + BODY) + HEAD, memory + b * BODY, BODY) != 0;
        }
        CHECK(n_wrong == 0 && (!first || memcmp(out, memory, (HEAD + BODY) * 4) == 0));
    }
    OK(ps_tensor_borrow_blocks(t, lend, ranges));
    ps_tensor_release(t);                                 /* never used */
    ps_tensor_release(floats);
    CHECK(loans == 0 && used() <= before);
}

int main(void)
{
    test_failing_new();
    test_failing_device();
    OK(ps_ctx_new(&ctx));
    test_headers();
    test_set_data();
    test_lent();
    test_lent_overlaps();
    test_lent_blocks();
    test_refusals();
    test_scopes();
    test_tape();
    test_long_chain();
    test_versions();
    CHECK(used() == 0);
    test_close();
    ps_ctx_free(ctx);
    return end_checks();
}
