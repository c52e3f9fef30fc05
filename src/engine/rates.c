/* SPDX-License-Identifier: BSD-3-Clause
 * This file measures how fast this machine runs Adam, and how fast it copies data between the host and the device. The
 * plan uses these rates to decide where Adam runs. A trial runs the same kernels and copies as a real step, but in
 * memory that is allocated for the trial. Only lua/ps/engine/plan/rates.lua calls this file, between steps. */
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/error.h"
#include "engine/engine.h"

enum { STREAMS = 4, SLICES = 16, COPIES = 4, ROUNDS = 3, PASSES = 8 };
static const int64_t most_numel = (int64_t)32 << 20, least_numel = 16 << 10;
static const int64_t most_copy = (int64_t)4 << 20, least_copy = 64 << 10;
static const double few_seconds = 0.004, poll_seconds = 20e-6;

/* The memory of a trial on the device or on the host. The memory contains `numel` bf16 parameters, their fp32 masters
 * and averages, and one copy buffer for each direction. The gradients share the memory of the parameters. */
typedef struct side {
    ps_backend *be;
    /* state: memory region of the parameters, masters and averages
     * buffer: [to_device] memory region of the copy buffer for each direction */
    void *state, *buffer[2];
    size_t state_nbytes;
    char *stream[STREAMS];
    int64_t numel, copy;              /* number of parameters; size in bytes of a copy buffer */
} side;

static size_t stream_nbytes(int64_t numel, int k) { return (size_t)numel * (k == 0 ? 2 : 4); }

static void *no_scratch(ps_call *call, size_t nbytes)
{
    ps_fail_nomem(nbytes);
    return NULL;
}

static int call_kernel(ps_backend *be, ps_call *call)
{
    int rc = PS_EUNSUP;
    call->scratch = no_scratch;
    for (; be && rc == PS_EUNSUP; be = be->fallback)
        if (be->kernel[call->op]) rc = be->kernel[call->op](call);
    return rc == PS_EUNSUP ? ps_fail(PS_EUNSUP, "there is no kernel for op %d", call->op) : rc;
}

static ps_view view_of(void *data, int dtype, int64_t numel)
{
    return (ps_view){ .data = data, .dtype = dtype, .ndim = 1, .numel = numel, .shape = { numel }, .stride = { 1 } };
}

static int update(const side *s, int64_t first, int64_t numel)
{
    static const int stream_of[5] = { 0, 1, 0, 2, 3 };       /* index in `stream` of param, master, grad, m and v */
    ps_attrs_adam_ attrs = { .adamw = 1, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01,
                             .grad_scale = 1, .bias1 = 0.1, .bias2 = 0.001 };
    ps_view in[5];
    for (int i = 0; i < 5; i++) {
        int k = stream_of[i];
        in[i] = view_of(s->stream[k] + stream_nbytes(first, k), k == 0 ? PS_BF16 : PS_F32, numel);
    }
    ps_call call = { .op = PS_OP_adam_, .n_in = 5, .n_out = 1, .in = in, .out = in, .attrs = &attrs };
    return call_kernel(s->be, &call);
}

static int clear(const side *s)
{
    ps_attrs_fill_ attrs = { .value = 0 };
    for (int k = 0; k < STREAMS; k++) {
        ps_view x = view_of(s->stream[k], k == 0 ? PS_BF16 : PS_F32, s->numel);
        ps_call call = { .op = PS_OP_fill_, .n_in = 1, .n_out = 1, .in = &x, .out = &x, .attrs = &attrs };
        PS_TRY(call_kernel(s->be, &call));
    }
    return 0;
}

static void side_free(side *s)
{
    if (s->state) s->be->region_free(s->be, s->state, s->state_nbytes);
    for (int i = 0; i < 2; i++) if (s->buffer[i]) s->be->region_free(s->be, s->buffer[i], (size_t)s->copy);
    s->state = s->buffer[0] = s->buffer[1] = NULL;
}

static int side_new(side *s, ps_backend *be, int64_t numel, int64_t copy)
{
    const size_t shift = PS_KIND_SHIFT;
    *s = (side){ .be = be, .numel = numel, .copy = copy };
    for (int k = 0; k < STREAMS; k++) s->state_nbytes += stream_nbytes(numel, k) + shift;
    PS_TRY(be->region_new(be, s->state_nbytes, &s->state));
    size_t at = 0;
    for (int k = 0; k < STREAMS; k++) {
        s->stream[k] = (char *)s->state + at;
        at += stream_nbytes(numel, k) + shift;
    }
    for (int i = 0; i < 2; i++) PS_TRY(be->region_new(be, (size_t)copy, &s->buffer[i]));
    if (be->is_host) for (int i = 0; i < 2; i++) memset(s->buffer[i], 0, (size_t)copy);
    return clear(s);
}

/* -- measuring copies ---------------------------------------------------------------------------------------------- */
typedef struct lanes {
    const side *device, *host;
    ps_copy *copy[2][COPIES];         /* [to_device] copies in progress, oldest first */
    int begun[2], ended[2];
} lanes;

static int lane_begin(lanes *l, int up, int n)
{
    l->begun[up] = l->ended[up] = 0;
    for (; l->begun[up] < n; l->begun[up]++) {
        const side *to = up ? l->device : l->host, *from = up ? l->host : l->device;
        PS_TRY(l->device->be->copy_start(l->device->be, up, to->buffer[up], from->buffer[up], (size_t)to->copy, NULL,
                                         &l->copy[up][l->begun[up]]));
    }
    return 0;
}

/* Frees the completed copies of one direction: to the device if `up` is 1, to the host if `up` is 0. If `block` is set,
 * first waits for all copies of this direction. Returns 1 if no copy is left, and 0 otherwise. */
static int lane_poll(lanes *l, int up, bool block)
{
    while (l->ended[up] < l->begun[up]) {
        int rc = l->device->be->copy_wait(l->device->be, l->copy[up][l->ended[up]], block);
        if (rc == 0) return 0;
        l->ended[up]++;                                      /* copy_wait has freed the copy, even if the copy failed */
        if (rc < 0) return rc;
    }
    return 1;
}

static int lanes_end(lanes *l, int rc)
{
    for (int up = 0; up < 2; up++)
        while (l->ended[up] < l->begun[up]) {
            int ended = lane_poll(l, up, true);
            if (ended < 0 && rc >= 0) rc = ended;
        }
    return rc;
}

static void rest(void)
{
    struct timespec t = { .tv_nsec = (long)(poll_seconds * 1e9) };
    nanosleep(&t, NULL);
}

/* Measures the copy rate of each direction, in bytes per second, while copies run in both directions. The first copy of
 * each direction is not measured, because it may have to pin memory. */
static int copies(lanes *l, double *up_rate, double *down_rate)
{
    double seconds[2] = { 0 };
    for (int round = 0; round < 2; round++) {
        int n = round == 0 ? 1 : COPIES;
        bool over[2] = { false, false };
        double began = ps_now();
        for (int up = 0; up < 2; up++) PS_TRY(lane_begin(l, up, n));
        while (!over[0] || !over[1]) {
            for (int up = 0; up < 2; up++) {
                int rc = over[up] ? 0 : lane_poll(l, up, false);
                if (rc < 0) return rc;
                if (rc == 1) seconds[up] = ps_now() - began, over[up] = true;
            }
            if (!over[0] || !over[1]) rest();
        }
    }
    double nbytes = (double)COPIES * (double)l->host->copy;
    *up_rate = nbytes / seconds[1];
    *down_rate = nbytes / seconds[0];
    return 0;
}

/* -- measuring Adam ------------------------------------------------------------------------------------------------ */
/* Measures the update rate of the host while copies run in both directions. The rate is in parameters per second. */
static int host_adam(lanes *l, double *rate)
{
    const side *s = l->host;
    int64_t slice = s->numel / SLICES;
    PS_TRY(update(s, 0, slice));
    double spent[SLICES];
    for (int i = 0; i < SLICES; i++) {
        for (int up = 0; up < 2; up++) {
            int rc = lane_poll(l, up, false);
            if (rc < 0) return rc;
            if (rc == 1) PS_TRY(lane_begin(l, up, 1));
        }
        double began = ps_now();
        PS_TRY(update(s, i * slice, slice));
        spent[i] = ps_now() - began;
        for (int k = i; k > 0 && spent[k] < spent[k - 1]; k--) {
            double x = spent[k];
            spent[k] = spent[k - 1];
            spent[k - 1] = x;
        }
    }
    /* Use the lower quartile of the times, because other programs slow down some of the slices. */
    *rate = (double)slice / spent[SLICES / 4];
    return 0;
}

/* Waits for the device by reading one float from it. */
static int settle(const side *s)
{
    float word;
    return s->be->copy_out(s->be, &word, s->stream[1], sizeof word);
}

/* Runs several rounds of updates on the device. Sets *rate to the rate of the fastest round in parameters per second.
 * Sets *at_once to the fraction of this round's time in which the calling thread was free. */
static int device_adam(const side *s, double *rate, double *at_once)
{
    int passes = 1;
    *rate = 0;
    PS_TRY(settle(s));
    for (int round = 0; round < ROUNDS; round++) {
        double began = ps_now();
        PS_TRY(settle(s));
        double waiting = ps_now() - began;
        began = ps_now();
        for (int i = 0; i < passes; i++) PS_TRY(update(s, 0, s->numel));
        double called = ps_now() - began;
        PS_TRY(settle(s));
        double all = ps_now() - began, spent = all - waiting > called ? all - waiting : called;
        double seen = (double)s->numel * passes / spent;
        if (seen > *rate) *rate = seen, *at_once = 1 - called / spent;
        if (round == 0 && spent < few_seconds) passes = PASSES;
    }
    return 0;
}

/* -- measuring all rates ------------------------------------------------------------------------------------------- */
static int64_t within(int64_t x, int64_t least, int64_t most) { return x < least ? least : x > most ? most : x; }

static int measure(side *device, side *host, ps_rates *out)
{
    lanes l = { .device = device, .host = host };
    int rc = copies(&l, &out->up, &out->down);
    if (rc == 0) rc = host_adam(&l, &out->host_adam);
    PS_TRY(lanes_end(&l, rc));
    return device_adam(device, &out->device_adam, &out->at_once);
}

int ps_rates_measure(ps_ctx *ctx, int device, int host, int64_t nbytes, ps_rates *out)
{
    if (device < 0 || device >= ctx->n_devices || host < 0 || host >= ctx->n_devices)
        return ps_fail(PS_EINVAL, "cannot measure rates between devices %d and %d; there are only %d devices", device,
                       host, ctx->n_devices);
    ps_backend *at = ctx->devices[device], *home = ctx->devices[host];
    if (at->is_host || !at->copy_start || !at->copy_out || at->no_data || !home->is_host || home->no_data)
        return ps_fail(PS_EINVAL, "cannot measure rates between %s and %s: the first must be an accelerator, the "
                       "second host memory", at->name, home->name);
    double began = ps_now();
    int rc;
    do {
        side d, h = { .state = NULL };
        int64_t copy = within(nbytes / 8, least_copy, most_copy) / 4096 * 4096;
        int64_t numel = within((nbytes - 2 * copy) / 16, least_numel, most_numel) / SLICES * SLICES;
        *out = (ps_rates){ .numel = numel };
        rc = side_new(&d, at, numel, copy);
        if (rc == 0) rc = side_new(&h, home, numel, copy);
        if (rc == 0) rc = measure(&d, &h, out);
        side_free(&d);
        side_free(&h);
        /* If there was not enough memory, the next trial uses half of it. */
        nbytes /= 2;
    } while (rc == PS_ENOMEM && nbytes >= 4 * least_copy);
    out->seconds = ps_now() - began;
    return rc;
}
