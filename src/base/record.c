/* SPDX-License-Identifier: BSD-3-Clause
 * The ring buffer of events. A writer reserves a number, fills the place in the ring that belongs to the number, and
 * then stores the number in the place. A reader compares the number in the place before and after it copies the
 * event. It thereby detects that the place is being overwritten. */
#include "base/record.h"
#include <signal.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/error.h"
#include "ps_test.h"

ps_record_place ps_record_at;
atomic_bool ps_record_flag, ps_flops_flag, ps_record_silent;
int64_t ps_flops_sum;
int32_t ps_record_run;

/* A ring of events. When a larger ring replaces it, the smaller ring is kept, because a thread that began to write
 * before the replacement may still write into the smaller ring. */
typedef struct ring {
    struct ring *smaller;
    int64_t room;                              /* capacity in events */
    ps_record_event events[];
} ring;
static _Atomic(ring *) current;
static _Atomic int64_t capacity, taken, started_ns;
static ps_record_total totals[PS_OP_COUNT];    /* totals of the script's thread, which runs the ops */
static bool wanted, paused;                    /* wanted: recording is on. paused: a script is paused. */
static int counting;                           /* number of callers that count FLOPs */
static _Atomic int32_t steps;
static _Atomic int64_t skew_ns;                /* error of the clock, set by a test */
/* State of the step that this thread runs. It is per thread, because the threads of one process can be ranks. */
static _Thread_local bool dry;                 /* true if a dry run is in progress */
static _Thread_local struct { int64_t began; bool open, planned; } step;
static _Thread_local struct { int64_t began; ps_action is; } action;
static struct { int kind, micro, signal; double seconds; } planted;     /* signal of ps_test_signal */

/* Modules whose calls are in progress, outermost first. If more than DEEPEST modules are nested, the inner modules
 * are counted but not stored. */
enum { DEEPEST = 128 };
static struct { int64_t began; int32_t id; } modules[DEEPEST];
static int32_t depth;

int64_t ps_record_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec + atomic_load_explicit(&skew_ns, memory_order_relaxed);
}

void ps_test_record_skew(int64_t ns) { atomic_store(&skew_ns, ns); }

static void switch_flags(void)
{
    atomic_store(&ps_record_silent, dry || paused);
    atomic_store(&ps_record_flag, wanted && !dry && !paused);
    atomic_store(&ps_flops_flag, counting > 0 && !dry && !paused);
}

int ps_record_start(int64_t events)
{
    if (events < 1 || events > PS_RECORD_MOST)
        return ps_fail(PS_EINVAL, "a record cannot have %lld events; it must have 1 to %d", (long long)events,
                       PS_RECORD_MOST);
    ps_record_stop();
    ring *r = atomic_load(&current);
    if (!r || r->room < events) {
        size_t nbytes = sizeof *r + (size_t)events * sizeof *r->events;
        ring *larger = ps_alloc(nbytes);
        if (!larger) return ps_fail_nomem(nbytes);
        larger->smaller = r;
        larger->room = events;
        r = larger;
    }
    memset(r->events, 0, (size_t)events * sizeof *r->events);    /* also makes the ring's pages exist before the first
                                                                  * event */
    atomic_store(&current, r);
    memset(totals, 0, sizeof totals);
    for (int32_t i = 0; i < depth && i < DEEPEST; i++) modules[i].began = 0;
    step.began = action.began = 0;
    atomic_store(&capacity, events);
    atomic_store(&taken, 0);
    atomic_store(&started_ns, ps_record_clock());
    wanted = true;
    ps_record_run++;
    switch_flags();
    return 0;
}

void ps_record_stop(void)
{
    wanted = false;
    switch_flags();
}

int ps_record_is_on(void) { return wanted; }

void ps_record_pause(bool on)
{
    paused = on;
    switch_flags();
}

void ps_flops_count(int on)
{
    counting += on ? 1 : -1;
    switch_flags();
}

int64_t ps_flops_counted(void) { return ps_flops_sum; }

void ps_record_note(ps_record_event *e)
{
    e->step = atomic_load_explicit(&ps_record_at.step, memory_order_relaxed);
    e->action = atomic_load_explicit(&ps_record_at.action, memory_order_relaxed);
    if (!e->module) e->module = atomic_load_explicit(&ps_record_at.module, memory_order_relaxed);
}

void ps_record_put_late(ps_record_event e)
{
    ring *r = atomic_load_explicit(&current, memory_order_acquire);
    if (!r || e.begin_ns < atomic_load_explicit(&started_ns, memory_order_relaxed)) return;
    int64_t n = atomic_fetch_add_explicit(&taken, 1, memory_order_relaxed);
    int64_t most = atomic_load_explicit(&capacity, memory_order_relaxed);
    if (most > r->room) most = r->room;                    /* r was replaced by a larger ring since it was read */
    ps_record_event *at = &r->events[n % most];
    e.number = 0;
    __atomic_store_n(&at->number, 0, __ATOMIC_RELAXED);
    *at = e;
    __atomic_store_n(&at->number, n + 1, __ATOMIC_RELEASE);
    if (e.kind != PS_REC_OP) return;
    ps_record_total *sum = &totals[e.name];
    sum->calls++;
    sum->ns += e.end_ns - e.begin_ns;
    sum->bytes += e.bytes;
    sum->flops += e.flops;
}

void ps_record_put(ps_record_event e)
{
    if (!ps_record_on()) return;
    if (e.end_ns == 0) e.end_ns = ps_record_clock();
    ps_record_note(&e);
    ps_record_put_late(e);
}

int64_t ps_record_count(int64_t *dropped)
{
    int64_t n = atomic_load(&taken), most = atomic_load(&capacity);
    *dropped = n > most ? n - most : 0;
    return n - *dropped;
}

int ps_record_get(int64_t i, ps_record_event *out)
{
    int64_t dropped, n = ps_record_count(&dropped);
    if (i < 0 || i >= n) return ps_fail(PS_ERANGE, "there is no event %lld: the record has %lld events", (long long)i,
                                        (long long)n);
    const ps_record_event *at = &atomic_load(&current)->events[(dropped + i) % atomic_load(&capacity)];
    if (__atomic_load_n(&at->number, __ATOMIC_ACQUIRE) != dropped + i + 1) return 1;
    *out = *at;
    return __atomic_load_n(&at->number, __ATOMIC_ACQUIRE) != dropped + i + 1;
}

int ps_record_op_total(int op, ps_record_total *out)
{
    if (op < 0 || op >= PS_OP_COUNT) return ps_fail(PS_EINVAL, "there is no op %d", op);
    *out = totals[op];
    return 0;
}

/* -- steps and actions --------------------------------------------------------------------------------------------- */
void ps_record_step_begin(bool is_dry, bool planned)
{
    dry = is_dry;
    switch_flags();
    if (dry) return;
    atomic_store_explicit(&ps_record_at.step, ++steps, memory_order_relaxed);
    step.began = ps_record_begin(), step.open = true, step.planned = planned;
}

void ps_record_step_end(void)
{
    if (dry) {
        dry = false;
        switch_flags();
    } else if (step.open) {
        ps_record_end((ps_record_event){ .kind = PS_REC_STEP, .begin_ns = step.began,
                                         .name = !step.planned || steps == 1 });
    }
    step.open = false;
    atomic_store_explicit(&ps_record_at.step, 0, memory_order_relaxed);
}

void ps_test_signal(int kind, int micro, double seconds, int number)
{
    planted.kind = kind, planted.micro = micro, planted.seconds = seconds, planted.signal = number;
}

static void strike(void)
{
    struct timespec t = { .tv_sec = (time_t)planted.seconds };
    t.tv_nsec = (long)((planted.seconds - (double)t.tv_sec) * 1e9);
    planted.kind = PS_ACT_NONE;
    nanosleep(&t, NULL);
    raise(planted.signal);
}

void ps_record_action(ps_action a)
{
    if (a.kind == PS_ACT_NONE && action.is.kind != PS_ACT_NONE)
        ps_record_end((ps_record_event){ .kind = PS_REC_ACTION, .begin_ns = action.began, .id = action.is.micro,
                                         .name = (uint16_t)action.is.kind, .to = (uint8_t)action.is.vstage });
    action.is = a;
    action.began = a.kind != PS_ACT_NONE ? ps_record_begin() : 0;
    atomic_store_explicit(&ps_record_at.action, (uint8_t)a.kind, memory_order_relaxed);
    if (planted.kind != PS_ACT_NONE && planted.kind == a.kind && planted.micro == a.micro) strike();
}

/* -- modules ------------------------------------------------------------------------------------------------------- */
int32_t ps_record_module(int32_t id)
{
    int32_t before = atomic_load_explicit(&ps_record_at.module, memory_order_relaxed);
    atomic_store_explicit(&ps_record_at.module, id, memory_order_relaxed);
    return before;
}

int ps_module_enter(int id)
{
    if (depth < DEEPEST) {
        modules[depth].id = ps_record_module(id);      /* outer module; it is current again after ps_module_leave */
        modules[depth].began = ps_record_begin();
    }
    return depth++;
}

void ps_module_leave(int to)
{
    if (to < 0) return;
    while (depth > to) {
        if (--depth >= DEEPEST) continue;
        int32_t id = ps_record_module(modules[depth].id);
        ps_record_end((ps_record_event){ .kind = PS_REC_MODULE, .begin_ns = modules[depth].began, .module = id });
    }
}

int ps_module_now(void) { return atomic_load_explicit(&ps_record_at.module, memory_order_relaxed); }
int ps_module_depth(void) { return depth; }
