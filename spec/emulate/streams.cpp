/* SPDX-License-Identifier: BSD-3-Clause
 * Streams and events: see cuda_runtime.h next to this file. A stream is a queue of work: kernels with their arguments,
 * copies, waits for events. No work is performed before the host waits for it, or has often queried whether it is
 * over. The work that is then performed, and its order, is the worst that streams and events allow, by
 * PS_EMULATE_STREAMS:
 *
 *   late         (the default) only the awaited work, and the work for which it waits by events
 *   mixed=SEED   the same, with random pieces of other streams in between, and a few at any call of the runtime
 *   now          each piece when it is queued, unless it waits for another process
 *
 * The host learns of it late: an event counts as over once the host has waited for its stream, for it or for a later
 * event, or has queried it often enough. The counts of waits are the same in all three modes. */
#include "emulate.h"
#include <deque>
#include <memory>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#include <vector>

enum { PATIENCE = 8, MOST_WORK = 8192 };

namespace {

struct stream : ps_emu_stream {
    std::deque<std::unique_ptr<ps_emu_work>> work;
    int64_t added = 0, done = 0;               /* number of added works; number of finished works */
    int64_t told = 0;                          /* number of works that the host knows to be complete */
    bool destroyed = false, going = false;     /* going: the first work has started and continues by itself */
    void add(ps_emu_work *w) override;
    void drive(void) override;
    void append(ps_emu_work *w);
};

/* Waits for a position in a stream. */
struct waiting : ps_emu_work {
    stream *on;
    int64_t at;
    waiting(stream *s, int64_t n) : on(s), at(n) {}
    bool go(void) override { return on->done >= at; }
};

struct copying : ps_emu_work {
    void *dst;
    const void *src, *host;                    /* host: the side that is host memory, or NULL */
    size_t n;
    std::vector<char> staged;                  /* a copy of the source, if it was made immediately */
    copying(void *d, const void *s, size_t nbytes, const void *h) : dst(d), src(s), host(h), n(nbytes)
    {
        if (host) ps_emu_host_begins(host, n);
    }
    ~copying() { if (host) ps_emu_host_ends(host, n); }
    bool go(void) override
    {
        memmove(dst, staged.empty() ? src : staged.data(), n);
        return true;
    }
};

std::mutex one;
std::vector<stream *> streams;                 /* includes destroyed streams, whose queued work is still performed */
cudaError_t broken;
thread_local cudaError_t last_error;
enum { LATE, MIXED, NOW };

uint64_t seed;
int read_mode(void)
{
    const char *text = getenv("PS_EMULATE_STREAMS");
    if (!text || !*text || strcmp(text, "late") == 0) return LATE;
    if (strcmp(text, "now") == 0) return NOW;
    if (strncmp(text, "mixed=", 6) != 0) ps_emu_wrong("PS_EMULATE_STREAMS is late, mixed=SEED or now, not '%s'", text);
    seed = (uint64_t)strtoll(text + 6, NULL, 10) * 0x9E3779B97F4A7C15u + 1;
    return MIXED;
}
const int mode = read_mode();

unsigned random_below(unsigned n)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (unsigned)((seed >> 20) % n);
}

/* Performs the next work of s, or a work for which it waits. Returns false if that work continues by itself; the
 * caller calls again. */
bool advance(stream *s)
{
    while (const waiting *w = dynamic_cast<const waiting *>(s->work.front().get())) {
        if (w->on->done >= w->at) break;
        s = w->on;
    }
    ps_emu_show_memory(true);
    ps_emu_doing = "work of a stream";
    bool over = s->work.front()->go();
    ps_emu_doing = NULL;
    s->going = !over;
    if (over && !broken) {
        s->work.pop_front();
        s->done++;
    }
    if (broken)
        for (stream *all : streams) all->work.clear(), all->done = all->added, all->going = false;
    return over;
}

/* Performs one work of a random stream. */
void advance_any(void)
{
    size_t n = streams.size(), first = n ? random_below((unsigned)n) : 0;
    for (size_t i = 0; i < n; i++) {
        stream *s = streams[(first + i) % n];
        if (s->work.empty()) continue;
        advance(s);
        return;
    }
}

/* Performs the first `at` works of s. Returns false if one of them continues by itself; the caller calls again. */
bool force(stream *s, int64_t at)
{
    while (s->done < at) {
        if (ps_emu_chance(3)) advance_any();
        else if (!advance(s)) return false;
    }
    return true;
}

/* Performs all work that is possible, in the order of the calls as far as it is known. */
void settle(void)
{
    for (stream *s : streams)
        while (!s->work.empty() && advance(s)) { }
}

void tell(stream *s, int64_t at) { if (s->told < at) s->told = at; }

void wait_for(ps_emu_entry &in, stream *s, int64_t at)
{
    while (!force(s, at)) {
        in.lock.unlock();
        usleep(100);
        in.lock.lock();
    }
}

stream *live(cudaStream_t h)
{
    stream *s = static_cast<stream *>(h);
    if (!s || s->destroyed) ps_emu_wrong("a stream is used that %s", s ? "was destroyed" : "is none");
    return s;
}

void stream::append(ps_emu_work *w)
{
    work.emplace_back(w);
    added++;
    if (broken) work.clear(), done = added;
    else if (mode == NOW) settle();
    else if ((int64_t)work.size() > MOST_WORK) force(this, added - MOST_WORK / 2);
}

void stream::add(ps_emu_work *w)
{
    ps_emu_entry in;
    live(this)->append(w);
}

void stream::drive(void)
{
    ps_emu_entry in;
    force(this, added);
}

}

struct ps_emu_event {
    stream *on;
    int64_t at;
    int asked;
    bool destroyed, timed;
    int64_t ns, times;                         /* time when its stream reached it; number of times it was recorded */
};

/* Records the time at which a stream reaches an event. */
struct stamping : waiting {
    ps_emu_event *e;
    int64_t which;
    stamping(stream *s, ps_emu_event *made) : waiting(s, s->added), e(made), which(++made->times) {}
    bool go(void) override
    {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        if (e->times == which) e->ns = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
        return waiting::go();
    }
};

static ps_emu_event *live(ps_emu_event *e)
{
    if (!e || e->destroyed) ps_emu_wrong("an event is used that %s", e ? "was destroyed" : "is none");
    return e;
}

/* -- shared by the emulator's files ------------------------------------------------------------------------------- */
ps_emu_counts ps_emu_count;
thread_local const char *ps_emu_doing;

static struct { int64_t calls, first, count; } asked[PS_EMU_FAILURES] = { { 0, -1, 0 }, { 0, -1, 0 }, { 0, -1, 0 } };

bool ps_emu_fails(int kind)
{
    auto &a = asked[kind];
    int64_t n = a.calls++;
    return a.first >= 0 && n >= a.first && n - a.first < a.count;
}

bool ps_emu_library_fails(void)
{
    std::unique_lock<std::mutex> lock(one);
    return ps_emu_fails(PS_EMU_FAIL_LIBRARY);
}

extern "C" __attribute__((visibility("default"))) int64_t ps_emu_fail_calls(int kind, int64_t first, int64_t count);
/* After `first` more calls of a kind, makes `count` of them fail. No call fails if first < 0. Returns the number of
 * such calls since the last call of this function. A device that has failed stays failed. */
int64_t ps_emu_fail_calls(int kind, int64_t first, int64_t count)
{
    std::unique_lock<std::mutex> lock(one);
    int64_t were = asked[kind].calls;
    asked[kind] = { 0, first, count };
    return were;
}

static void break_now(void)
{
    broken = cudaErrorIllegalAddress;
    for (stream *s : streams) s->work.clear(), s->done = s->added, s->going = false;
}

ps_emu_entry::ps_emu_entry(void) : lock(one)
{
    if (ps_emu_fails(PS_EMU_FAIL_DEVICE) && !broken) break_now();
    if (mode == NOW) settle();
    while (ps_emu_chance(3)) advance_any();
}

ps_emu_entry::~ps_emu_entry()
{
    bool going = mode == NOW;
    for (const stream *s : streams) going = going || s->going;
    ps_emu_show_memory(going);
}

void ps_emu_entry::wait_all(void)
{
    for (size_t i = streams.size(); i-- > 0;) wait_for(*this, streams[i], streams[i]->added);
}

cudaError_t ps_emu_say(cudaError_t e)
{
    if (broken) e = broken;
    if (e != cudaSuccess) last_error = e;
    return e;
}

void ps_emu_fail(cudaError_t e) { broken = e; }

void ps_emu_wrong(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fputs("emulated CUDA: ", stderr);
    vfprintf(stderr, fmt, args);
    fputs("\n", stderr);
    va_end(args);
    abort();
}

int64_t ps_emu_number(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoll(text, NULL, 10) : otherwise;
}

bool ps_emu_chance(unsigned one_of) { return mode == MIXED && random_below(one_of) == 0; }

extern "C" __attribute__((visibility("default"))) void ps_emu_take_counts(int64_t *out, int n);
/* Returns the counts since the last call. out is [n], the first n of ps_emu_counts. */
void ps_emu_take_counts(int64_t *out, int n)
{
    ps_emu_entry in;
    size_t room = (size_t)n * sizeof *out;
    memcpy(out, &ps_emu_count, room < sizeof ps_emu_count ? room : sizeof ps_emu_count);
    memset(&ps_emu_count, 0, sizeof ps_emu_count);
}

/* -- errors -------------------------------------------------------------------------------------------------------- */
cudaError_t cudaPeekAtLastError(void)
{
    ps_emu_entry in;
    return broken ? broken : last_error;
}

cudaError_t cudaGetLastError(void)
{
    ps_emu_entry in;
    cudaError_t e = broken ? broken : last_error;
    last_error = cudaSuccess;
    return e;
}

static const struct { cudaError_t code; const char *name, *text; } error_words[] = {
    { cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument" },
    { cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory" },
    { cudaErrorNotReady, "cudaErrorNotReady", "device not ready" },
    { cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered" },
};

const char *cudaGetErrorName(cudaError_t e)
{
    for (const auto &words : error_words) if (words.code == e) return words.name;
    return "another error";
}

const char *cudaGetErrorString(cudaError_t e)
{
    for (const auto &words : error_words) if (words.code == e) return words.text;
    return "an error";
}

/* -- streams and events -------------------------------------------------------------------------------------------- */
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    ps_emu_entry in;
    stream *made = new stream;
    streams.push_back(made);
    *s = made;
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    ps_emu_entry in;
    live(s)->destroyed = true;
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t h)
{
    ps_emu_entry in;
    stream *s = live(h);
    int64_t at = s->added;
    ps_emu_count.waits++;
    wait_for(in, s, at);
    tell(s, at);
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void)
{
    ps_emu_entry in;
    ps_emu_count.waits++;
    in.wait_all();
    for (stream *s : streams) tell(s, s->done);
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t h, cudaEvent_t e, unsigned)
{
    ps_emu_entry in;
    stream *s = live(h);
    if (live(e)->on) s->append(new waiting(e->on, e->at));
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    *e = new ps_emu_event();
    (*e)->timed = !(flags & cudaEventDisableTiming);
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    ps_emu_entry in;
    live(e)->destroyed = true;
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t h)
{
    ps_emu_entry in;
    stream *s = live(h);
    live(e)->on = s;
    e->at = s->added + 1;
    e->asked = 0;
    s->append(new stamping(s, e));
    return ps_emu_say(cudaSuccess);
}

/* Returns whether an event is complete. An event that was never recorded is complete. */
static bool is_over(cudaEvent_t e)
{
    if (!live(e)->on || e->on->told >= e->at) return true;
    if (++e->asked < PATIENCE || !force(e->on, e->at)) return false;
    tell(e->on, e->at);
    return true;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    ps_emu_entry in;
    return ps_emu_say(is_over(e) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    ps_emu_entry in;
    if (is_over(e)) return ps_emu_say(cudaSuccess);
    stream *s = e->on;
    int64_t at = e->at;
    ps_emu_count.waits++;
    wait_for(in, s, at);
    tell(s, at);
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    ps_emu_entry in;
    if (!live(from)->timed || !live(to)->timed || !from->on || !to->on) return ps_emu_say(cudaErrorInvalidValue);
    if (from->on->told < from->at || to->on->told < to->at) return ps_emu_say(cudaErrorNotReady);
    *ms = (float)((double)(to->ns - from->ns) * 1e-6);
    return ps_emu_say(cudaSuccess);
}

/* -- copies -------------------------------------------------------------------------------------------------------- */
/* If memory is not pinned, the source can be read immediately, and the call can return after the copy, or neither.
 * The destination must not be read before the copy is complete. */
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind kind, cudaStream_t h)
{
    ps_emu_entry in;
    stream *on = live(h);
    bool up = kind == cudaMemcpyHostToDevice, within = kind == cudaMemcpyDeviceToDevice;
    const void *host = within ? NULL : up ? s : d;
    if (n == 0) return ps_emu_say(cudaSuccess);
    ps_emu_listed("cudaMemcpyAsync\t%d\t%zu", (int)kind, n);
    int pinned = host ? ps_emu_is_pinned(host, n) : PS_EMU_PINNED;
    if (host) ps_emu_count.copies++, ps_emu_count.nbytes += (int64_t)n;
    if (pinned != PS_EMU_PINNED) ps_emu_count.pageable++;
    if (pinned == PS_EMU_PARTLY || (!up && !ps_emu_on_device(s, n)) || ((up || within) && !ps_emu_on_device(d, n)))
        return ps_emu_say(cudaErrorInvalidValue);
    if (kind == cudaMemcpyDeviceToHost && mode != NOW && !ps_emu_host_in_use(d, n)) memset(d, 0xff, n);
    bool staged = pinned != PS_EMU_PINNED && ps_emu_chance(2);
    copying *c = new copying(d, s, n, staged && up ? NULL : host);
    if (staged && up) c->staged.assign((const char *)s, (const char *)s + n);
    on->append(c);
    if (staged && !up) wait_for(in, on, on->added);
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t h)
{
    ps_emu_entry in;
    if (!ps_emu_on_device(d, n)) return ps_emu_say(cudaErrorInvalidValue);
    ps_emu_listed("cudaMemsetAsync\t%zu", n);
    auto set = [d, v, n] { memset(d, v, n); };
    live(h)->append(new ps_emu_call<decltype(set)>(set));
    return ps_emu_say(cudaSuccess);
}
