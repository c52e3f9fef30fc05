/* SPDX-License-Identifier: BSD-3-Clause
 * Times of kernels and copies by the device's clock, for the event record. The begin and the end of a kernel or copy
 * are CUDA events on its stream. Their times are read after both events have ended, so a step does not wait for them.
 *
 * When a record begins, the device's clock is aligned with the host's clock. The host waits for an event, and reads its
 * own clock before and after the wait. The time of the event is assumed to be halfway between these two times.
 * lua/ps/profile/clock.lua aligns the clocks of ranks in the same way. */
#include <string.h>
#include "backend/cuda/cuda.h"

struct timed { ps_record_event what; cudaEvent_t from, to; };
/* queue [room]: a ring buffer of kernels whose times have not been read. It has `count` entries, starting at `first`,
 * in the order of the stream. */
static timed *queue;
static int64_t first, count, room;
/* spare [n_spare]: events that are not in use.
 * begun: the event at the beginning of the current op, or NULL.
 * anchor: an event whose time by the host's clock is known. */
static cudaEvent_t *spare, begun, anchor;
static int64_t n_spare, spare_room, anchor_ns; /* anchor_ns: time of the anchor by the host's clock */
static int32_t aligned;                        /* number of the event record for which the clocks are aligned */

enum { TRIES = 8 };
static const int64_t near_ns = 20000;          /* a wait of at most this length is short enough to align the clocks */
/* If an event is further from the anchor than this time, a new anchor is chosen. CUDA returns distances as floats of
 * milliseconds, whose precision beyond this time is worse than a quarter of a microsecond. */
static const float far_ms = 2000;

static int take(cudaEvent_t *out)
{
    if (n_spare > 0) *out = spare[--n_spare];
    else CU_TRY(cudaEventCreateWithFlags(out, cudaEventDefault));
    return 0;
}

static void give(cudaEvent_t e)
{
    if (!e) return;
    if (n_spare == spare_room) {
        int64_t wider = spare_room ? 2 * spare_room : 64;
        cudaEvent_t *all = (cudaEvent_t *)ps_alloc((size_t)wider * sizeof *all);
        if (!all) {
            cudaEventDestroy(e);
            return;
        }
        if (n_spare > 0) memcpy(all, spare, (size_t)n_spare * sizeof *all);
        ps_free(spare);
        spare = all, spare_room = wider;
    }
    spare[n_spare++] = e;
}

static int record(cudaStream_t stream, cudaEvent_t *out)
{
    PS_TRY(take(out));
    cudaError_t e = cudaEventRecord(*out, stream);
    if (e == cudaSuccess) return 0;
    give(*out);
    *out = NULL;
    return ps_cuda_check(e, "cudaEventRecord");
}

static void forget(void)
{
    for (; count > 0; count--, first = (first + 1) % room) give(queue[first].from), give(queue[first].to);
    give(begun);
    begun = NULL;
}

/* Aligns the clocks, once per record. Waits for all work that is queued on the device. */
static int align(int32_t run)
{
    int64_t shortest = INT64_MAX;
    if (run == aligned) return 0;
    forget();
    CU_TRY(cudaStreamSynchronize(ps_cu->compute));
    for (int i = 0; i < TRIES && shortest > near_ns; i++) {
        cudaEvent_t now;
        int64_t before = ps_cuda_host->clock();
        PS_TRY(record(ps_cu->compute, &now));
        CU_TRY(cudaEventSynchronize(now));
        int64_t trip = ps_cuda_host->clock() - before;
        if (trip < shortest) {
            shortest = trip;
            give(anchor);
            anchor = now, anchor_ns = before + trip / 2;
        } else {
            give(now);
        }
    }
    aligned = run;
    return 0;
}

/* Sets *ns to the time of an event that has ended. */
static int moment(cudaEvent_t e, int64_t *ns)
{
    float ms = 0;
    CU_TRY(cudaEventElapsedTime(&ms, anchor, e));
    *ns = anchor_ns + (int64_t)((double)ms * 1e6);
    return 0;
}

/* Makes `to` the anchor if `to` is more than far_ms after the current anchor. Otherwise frees `to`. ns: the time of
 * `to`. */
static void move_anchor(cudaEvent_t to, int64_t ns)
{
    if ((double)(ns - anchor_ns) < (double)far_ms * 1e6) return give(to);
    give(anchor);
    anchor = to, anchor_ns = ns;
}

int ps_cuda_time_begin(ps_backend *be, int32_t run)
{
    if (ps_cu->broken) return PS_EBACKEND;
    PS_TRY(align(run));
    give(begun);
    return record(ps_cu->compute, &begun);
}

static int make_room(void)
{
    if (count < room) return 0;
    int64_t wider = room ? 2 * room : 256;
    timed *all = (timed *)ps_alloc((size_t)wider * sizeof *all);
    if (!all) return ps_fail_nomem((size_t)wider * sizeof *all);
    for (int64_t i = 0; i < count; i++) all[i] = queue[(first + i) % room];
    ps_free(queue);
    queue = all, room = wider, first = 0;
    return 0;
}

int ps_cuda_time_end(ps_backend *be, const ps_record_event *what)
{
    if (ps_cu->broken || !begun) return PS_EBACKEND;
    PS_TRY(make_room());
    timed t = { *what, begun, NULL };
    PS_TRY(record(ps_cu->compute, &t.to));
    begun = NULL;
    queue[(first + count++) % room] = t;
    return 0;
}

int ps_cuda_time_read(ps_backend *be, bool wait, ps_record_event *out)
{
    if (count == 0 || ps_cu->broken) return 0;
    timed *t = &queue[first];
    cudaError_t e = wait ? cudaEventSynchronize(t->to) : cudaEventQuery(t->to);
    if (e == cudaErrorNotReady) {
        cudaGetLastError();
        return 0;
    }
    PS_TRY(ps_cuda_check(e, "a kernel"));
    *out = t->what;
    PS_TRY(moment(t->from, &out->begin_ns));
    PS_TRY(moment(t->to, &out->end_ns));
    give(t->from);
    move_anchor(t->to, out->end_ns);
    first = (first + 1) % room, count--;
    return 1;
}

int ps_cuda_copy_times(ps_copy_times *t, cudaStream_t lane, bool begins)
{
    if (!anchor) return 0;                     /* no record has begun yet */
    return record(lane, begins ? &t->from : &t->to);
}

int ps_cuda_copy_times_read(ps_copy_times *t, int64_t ns[2])
{
    ns[0] = ns[1] = 0;
    int rc = 0;
    if (t->from && t->to && anchor && !ps_cu->broken) {
        rc = moment(t->from, &ns[0]);
        if (rc == 0) rc = moment(t->to, &ns[1]);
    }
    give(t->from), give(t->to);
    t->from = t->to = NULL;
    return rc;
}

void ps_cuda_times_close(void)
{
    forget();
    give(anchor);
    anchor = NULL;
    aligned = 0;
    while (n_spare > 0) cudaEventDestroy(spare[--n_spare]);
    ps_free(spare), ps_free(queue);
    spare = NULL, queue = NULL;
    spare_room = room = first = 0;
}
