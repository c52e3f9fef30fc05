/* SPDX-License-Identifier: BSD-3-Clause
 * The 16-bit floats over all of their patterns and rounding points, Philox against the known answers published with
 * Random123, errors that are passed between threads, growable arrays, and a ring of events that is replaced. */
#include <math.h>
#include <pthread.h>
#include "base/grow.h"
#include "base/half.h"
#include "base/philox.h"
#include "base/record.h"
#include "ref_check.h"

static double bf16_value(uint32_t h)
{
    int exponent = (int)(h >> 7 & 255), mantissa = (int)(h & 127);
    if (exponent == 255) return mantissa ? NAN : (h & 0x8000 ? -INFINITY : INFINITY);
    double x = exponent ? ldexp(128 + mantissa, exponent - 134) : ldexp(mantissa, -133);
    return h & 0x8000 ? -x : x;
}
static double f16_value(uint32_t h)
{
    int exponent = (int)(h >> 10 & 31), mantissa = (int)(h & 1023);
    if (exponent == 31) return mantissa ? NAN : (h & 0x8000 ? -INFINITY : INFINITY);
    double x = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return h & 0x8000 ? -x : x;
}

/* Tests every bit pattern, and the midpoint between each pair of neighbours with the floats next to it. */
static void test_half(float (*decode)(uint16_t), uint16_t (*encode)(float), double (*value)(uint32_t), uint32_t inf)
{
    int wrong_value = 0, wrong_back = 0, wrong_tie = 0, wrong_near = 0;
    for (uint32_t h = 0; h < 65536; h++) {
        double want = value(h);
        float got = decode((uint16_t)h);
        if (isnan(want)) {
            wrong_value += !isnan(got);
            wrong_back += !isnan(value(encode(got)));
            continue;
        }
        wrong_value += (double)got != want || !signbit(got) != !signbit(want);
        wrong_back += encode(got) != h;
        if ((h & 0x7fff) >= inf - 1) continue;          /* the last finite number is checked below */
        float next = decode((uint16_t)(h + 1)), middle = (float)(((double)got + (double)next) / 2);
        uint32_t even = h & 1 ? h + 1 : h;
        wrong_tie += encode(middle) != even;
        wrong_near += encode(nextafterf(middle, got)) != h || encode(nextafterf(middle, next)) != h + 1;
    }
    CHECK(wrong_value == 0);
    CHECK(wrong_back == 0);
    CHECK(wrong_tie == 0);
    CHECK(wrong_near == 0);
    float largest = decode((uint16_t)(inf - 1)), below = decode((uint16_t)(inf - 2));
    double limit = (double)largest + ((double)largest - (double)below) / 2;
    if (limit < 1e6) {                                  /* for fp16; bf16's limit is not a float below infinity */
        CHECK(encode((float)limit) == inf);
        CHECK(encode(nextafterf((float)limit, 0)) == inf - 1);
    }
    CHECK(encode(3.4028235e38f) == inf);
    CHECK(encode(INFINITY) == inf && encode(-INFINITY) == (inf | 0x8000));
}

static void test_philox(void)
{
    ps_philox a = ps_philox4x32(0, 0, 0);
    CHECK(a.v[0] == 0x6627e8d5 && a.v[1] == 0xe169c58d && a.v[2] == 0xbc57ac4c && a.v[3] == 0x9b00dbd8);
    ps_philox b = ps_philox4x32(UINT64_MAX, UINT64_MAX, UINT64_MAX);
    CHECK(b.v[0] == 0x408f276d && b.v[1] == 0x41c83b0e && b.v[2] == 0xa20bc7c6 && b.v[3] == 0x6d5451fd);
    ps_philox c = ps_philox4x32(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu);
    CHECK(c.v[0] == 0xd16cfe09 && c.v[1] == 0x94fdcceb && c.v[2] == 0x5001e420 && c.v[3] == 0x24126ea1);
    CHECK(ps_unit_f32(0) == 0 && ps_unit_f32(UINT32_MAX) < 1);
}

static void *fails(void *arg)
{
    ps_error_set_op("gelu");
    ps_fail_room(PS_ENOSPC, PS_SUB_NONE, 2, 700, 30, "no room");
    ps_error_set_op(NULL);
    ps_error_keep(arg);
    ps_fail(PS_EINVAL, "another");
    return NULL;
}

/* A thread's error is raised on another thread with all its fields. */
static void test_error_kept(void)
{
    ps_error_kept kept;
    pthread_t thread;
    ps_fail(PS_ESTATE, "this thread's own");
    CHECK(pthread_create(&thread, NULL, fails, &kept) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(!strcmp(ps_error_message(), "this thread's own") && kept.code == PS_ENOSPC);
    CHECK(ps_error_again(&kept) == PS_ENOSPC && !strcmp(ps_error_message(), "no room"));
    const ps_error_detail *d = ps_error_get_detail();
    CHECK(d->tier == 2 && d->wanted == 700 && d->left == 30);
    CHECK(!strcmp(ps_error_op(), "gelu") && strstr(ps_error_where(), "test_base.c:") != NULL);
    ps_error_prefix("in a file: ");
    CHECK(!strcmp(ps_error_message(), "in a file: no room") && ps_error_get_detail()->wanted == 700);
}

static void test_grow(void)
{
    int32_t *list = NULL, capacity = 0, moved = 0;
    for (int32_t n = 0; n < 10000; n++) {
        int32_t before = capacity;
        CHECK(ps_grow(list, capacity, n + 1) == 0 && capacity > n && capacity >= before);
        moved += capacity != before;
        list[n] = n;
    }
    int wrong = 0;
    for (int32_t n = 0; n < 10000; n++) wrong += list[n] != n;
    CHECK(wrong == 0);
    CHECK(moved <= 11);                                 /* the capacity doubles each time */
    int32_t *was = list, had = capacity;
    CHECK(ps_grow(list, capacity, capacity) == 0 && list == was);
    ps_test_fail_alloc(0, 1);                           /* after a failure, the array is unchanged and there is an
                                                         * error */
    CHECK(ps_grow(list, capacity, capacity + 1) == PS_ENOMEM && list == was && capacity == had);
    CHECK(strstr(ps_error_message(), "no memory for") != NULL);
    ps_fail(PS_EINVAL, "before");
    ps_test_fail_alloc(0, 1);                           /* an earlier error is kept */
    CHECK(!ps_try_grow(list, capacity, capacity + 1) && list == was && capacity == had);
    CHECK(!strcmp(ps_error_message(), "before"));
    ps_test_fail_alloc(-1, 0);
    CHECK(ps_grow(list, capacity, (int64_t)INT32_MAX + 1) == PS_ENOMEM && list == was);   /* more than the capacity's
                                                                                           * type can represent */
    CHECK(list[9999] == 9999);
    ps_free(list);
}

static atomic_bool stop;
static void *put_events(void *arg)
{
    while (!atomic_load(&stop)) ps_record_put((ps_record_event){ .kind = PS_REC_COPY, .begin_ns = ps_record_clock() });
    return NULL;
}

/* Rings are replaced by larger rings while threads write events. A thread may still write into the smaller ring, but
 * not beyond its end (AddressSanitizer). ThreadSanitizer reports writers that reach the same place a whole ring apart:
 * a reader detects such places by their numbers. */
static void test_record(void)
{
#ifndef __SANITIZE_THREAD__
    enum { THREADS = 6 };
    pthread_t threads[THREADS];
    CHECK(ps_record_start(100) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, put_events, NULL) == 0);
    for (int64_t events = 100; events < 100000; events += events / 16 + 1) CHECK(ps_record_start(events) == 0);
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    ps_record_stop();
    int64_t dropped;
    CHECK(ps_record_count(&dropped) >= 0);
#endif
}

int main(void)
{
    test_half(ps_bf16_to_f32, ps_f32_to_bf16, bf16_value, 0x7f80);
    test_half(ps_f16_to_f32, ps_f32_to_f16, f16_value, 0x7c00);
    test_philox();
    test_error_kept();
    test_grow();
    test_record();
    return report();
}
