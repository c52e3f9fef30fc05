/* SPDX-License-Identifier: BSD-3-Clause
 * This file keeps statistics of the calls between ranks. Each call is an event of the record. In addition, DeepSpeed's
 * comms_logger needs totals, which are kept for each combination of call, group and size. The time of a call includes
 * the time in which it waits for other ranks. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "base/error.h"
#include "base/grow.h"
#include "base/record.h"
#include "comm/group.h"

/* counted: set of the calls (OP_*) that are counted, one bit per call; 0 if none are counted */
static _Atomic uint32_t counted;
static atomic_bool prints;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;      /* guards all fields that follow */
/* sums: one entry per combination of call, group and size, in the order of their first calls */
static ps_calls_total *sums;
/* places: [wide] hash table. An element is 1 + the index of an entry of `sums`, or 0 if it is empty. `wide` is a power
 * of two. */
static int32_t *places;
static int64_t n_sums, room, wide;

_Static_assert(sizeof ((ps_calls_total *)0)->axis == PS_AXIS_NBYTES && OP_COUNT <= 32, "sums of calls");

void ps_calls_count(uint32_t names, int verbose)
{
    pthread_mutex_lock(&lock);
    if (names && !atomic_load(&counted)) {
        n_sums = 0;
        if (places) memset(places, 0, (size_t)wide * sizeof *places);
    }
    atomic_store(&prints, verbose != 0);
    atomic_store(&counted, names);
    pthread_mutex_unlock(&lock);
}

int ps_calls_total_get(int64_t i, ps_calls_total *out)
{
    if (!out) return ps_fail(PS_EINVAL, "ps_calls_total_get: argument 'out' is missing (NULL)");
    pthread_mutex_lock(&lock);
    bool there = i >= 0 && i < n_sums;
    if (there) *out = sums[i];
    pthread_mutex_unlock(&lock);
    return !there;
}

double ps_calls_bus(int name, int ranks)
{
    double n = ranks < 1 ? 1 : ranks;
    switch (name) {
    case OP_ALL_REDUCE: case OP_CHUNK_ALL_REDUCE: return 2 * (n - 1) / n;
    case OP_REDUCE_SCATTER: case OP_ALL_GATHER: case OP_CHUNK_GATHER: case OP_CHUNK_REDUCE: return (n - 1) / n;
    default: return 1;
    }
}

/* -- sums ---------------------------------------------------------------------------------------------------------- */
static int64_t place_of(const ps_calls_total *key)
{
    uint64_t h = (uint64_t)key->nbytes * 31 + (uint64_t)key->name * 7 + (uint64_t)(key->group + 1);
    int64_t at = (int64_t)(h * 0x9e3779b97f4a7c15u >> 20) & (wide - 1);
    for (; places[at]; at = (at + 1) & (wide - 1)) {
        const ps_calls_total *s = &sums[places[at] - 1];
        if (s->name == key->name && s->group == key->group && s->nbytes == key->nbytes) break;
    }
    return at;
}

/* Makes room for one more entry of `sums`. At least half of the hash table stays empty. Returns false if there is no
 * memory. */
static bool make_room(void)
{
    if (!ps_try_grow(sums, room, n_sums + 1)) return false;
    if (2 * (n_sums + 1) <= wide) return true;
    int64_t now = wide ? 2 * wide : 64;
    int32_t *larger = ps_alloc0((size_t)now * sizeof *larger);
    if (!larger) return false;
    ps_free(places);
    places = larger;
    wide = now;
    for (int64_t i = 0; i < n_sums; i++) places[place_of(&sums[i])] = (int32_t)i + 1;
    return true;
}

/* Adds a call to its entry of `sums`. If there is no memory for a new entry, omits the call, because missing statistics
 * must not end a run. */
static void add(const ps_calls_total *one)
{
    pthread_mutex_lock(&lock);
    if (n_sums < INT32_MAX && make_room()) {
        int64_t at = place_of(one);
        if (!places[at]) {
            sums[n_sums] = *one;
            sums[n_sums].calls = sums[n_sums].ns = 0;
            places[at] = (int32_t)++n_sums;
        }
        ps_calls_total *sum = &sums[places[at] - 1];
        sum->calls += one->calls;
        sum->ns += one->ns;
    }
    pthread_mutex_unlock(&lock);
}

/* -- one call ------------------------------------------------------------------------------------------------------ */
static bool counts(void)
{
    return atomic_load_explicit(&counted, memory_order_relaxed) &&
           !atomic_load_explicit(&ps_record_silent, memory_order_relaxed);
}

int64_t group_call_begin(void) { return ps_record_on() || counts() ? ps_record_clock() : 0; }

static void print(const ps_calls_total *one)
{
    double seconds = (double)(one->ns > 0 ? one->ns : 1) * 1e-9, gbps = (double)one->nbytes * 8e-9 / seconds;
    printf("comm op: %s%s%s | time (ms): %.3f | msg size: %" PRId64 " B | algbw (Gbps): %.3f | busbw (Gbps): %.3f\n",
           group_op_name(one->name), one->axis[0] ? " of " : "", one->axis, seconds * 1e3, one->nbytes, gbps,
           gbps * ps_calls_bus(one->name, one->ranks));
    fflush(stdout);
}

bool group_call_is_timed(int op) { return counts() && (atomic_load(&counted) >> op & 1) != 0; }

void group_call_end(const ps_group *g, const group_call *call)
{
    if (call->began_ns == 0 || g->comm->pretends) return;
    int64_t end = ps_record_clock();
    ps_record_put((ps_record_event){ .kind = PS_REC_COLLECTIVE, .name = (uint16_t)call->op, .begin_ns = call->began_ns,
                                     .end_ns = end, .id = g->number, .bytes = call->nbytes,
                                     .on = (uint16_t)g->comm->size });
    bool alone = g->comm->size == 1;                          /* a single rank sends no bytes */
    if (alone || !counts() || !(atomic_load(&counted) >> call->op & 1)) return;
    ps_calls_total one = { .name = call->op, .group = g->number, .ranks = g->comm->size, .nbytes = call->nbytes,
                           .calls = 1, .ns = end - call->began_ns };
    memcpy(one.axis, g->comm->axis, sizeof one.axis);
    add(&one);
    if (atomic_load(&prints)) print(&one);
}
