/* SPDX-License-Identifier: BSD-3-Clause
 * Runs kernels on the processor: see cuda_runtime.h beside this file. A block's threads are fibres with stacks of their
 * own. A warp runs until all its threads wait for the block's barrier (or have ended), then the next one: from the
 * first warp to the last in every other block, else from the last to the first, and asynchronous copies happen as late
 * as they may, or at once. So warps are as far apart as barriers let them, and one that is missing shows.
 *
 * PS_EMULATE_MEMORY is the bytes of device memory (2 GiB), PS_EMULATE_CAPABILITY the major number of the device's
 * compute capability (9); the PS_EMULATE_FAIL-th kernel that is started fails. Where PS_EMULATE_CARDS is set, all
 * processes have the same so many cards; PS_EMULATE_NO_POOL=1 is a device without a memory pool. */
#include "cuda_runtime.h"
#include <mutex>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <map>
#include <vector>

enum { MAX_THREADS = 1024, STACK_BYTES = 256 << 10, DYNAMIC_BYTES = 232 << 10 };

ps_emu_fibre *ps_emu_now;
dim3 ps_emu_grid, ps_emu_block_dim, ps_emu_block;
unsigned char *ps_emu_dynamic;

static ps_emu_fibre fibres[MAX_THREADS];
static void *loop_sp;
static bool backwards, early;
static unsigned blocks_run;
static int64_t started;              /* kernels */
static int n_threads, alive, block_arrived, block_turn;
static int warp_arrived[32], warp_turn[32], warp_alive[32];
static uint64_t slots[32][2][32 * 16];
static void (*kernel_body)(void *);
static void *kernel_context;

/* Saves the registers that a call keeps on this stack and its address in *save; goes on with those saved at `load`. */
extern "C" void ps_emu_switch(void **save, void *load);
asm(".text\n"
    ".globl ps_emu_switch\n"
    ".type ps_emu_switch, @function\n"
    "ps_emu_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size ps_emu_switch, . - ps_emu_switch\n");

static void wait_turn(void) { ps_emu_switch(&ps_emu_now->sp, loop_sp); }

static void release_block(void)
{
    if (alive > 0 && block_arrived == alive) block_arrived = 0, block_turn++;
}
static void release_warp(int w)
{
    if (warp_alive[w] > 0 && warp_arrived[w] == warp_alive[w]) warp_arrived[w] = 0, warp_turn[w]++;
}

void ps_emu_barrier(void)
{
    int turn = block_turn;
    block_arrived++;
    release_block();
    ps_emu_now->barrier_turn = turn;
    ps_emu_now->at_barrier = true;
    while (turn == block_turn) wait_turn();
    ps_emu_now->at_barrier = false;
}

void ps_emu_warp_barrier(void)
{
    int w = ps_emu_now->warp, turn = warp_turn[w];
    warp_arrived[w]++;
    release_warp(w);
    while (turn == warp_turn[w]) wait_turn();
}

uint64_t *ps_emu_warp_slots(void) { return slots[ps_emu_now->warp][warp_turn[ps_emu_now->warp] & 1]; }

struct async_copy { void *dst; const void *src; int group; };
struct async_state { int group; std::vector<async_copy> copies; };
static async_state async_of[MAX_THREADS];

static void copy16(const async_copy &c)
{
    if (c.src) memcpy(c.dst, c.src, 16);
    else memset(c.dst, 0, 16);
}

static async_state *own_async(void) { return &async_of[ps_emu_now - fibres]; }

void ps_emu_async_copy16(void *dst, const void *src)
{
    async_state *a = own_async();
    if (((uintptr_t)dst | (uintptr_t)src) & 15) {
        fprintf(stderr, "an asynchronous copy of 16 bytes that are not aligned\n");
        abort();
    }
    a->copies.push_back(async_copy{ dst, src, a->group });
    if (early) copy16(a->copies.back());
}

void ps_emu_async_commit(void) { own_async()->group++; }

void ps_emu_async_wait(int but)
{
    async_state *a = own_async();
    size_t n = 0;
    while (n < a->copies.size() && a->copies[n].group < a->group - but) {
        if (!early) copy16(a->copies[n]);
        n++;
    }
    a->copies.erase(a->copies.begin(), a->copies.begin() + (long)n);
}

static void begin_thread(void)
{
    kernel_body(kernel_context);
    ps_emu_fibre *f = ps_emu_now;
    if (!own_async()->copies.empty()) {
        fprintf(stderr, "a thread ended without waiting for its asynchronous copies\n");
        abort();
    }
    f->ended = true;
    alive--;
    warp_alive[f->warp]--;
    release_block();
    release_warp(f->warp);
    for (;;) wait_turn();
}

static void prepare(ps_emu_fibre *f)
{
    if (!f->stack)
        f->stack = (char *)mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                -1, 0);
    if (f->stack == MAP_FAILED) {
        fprintf(stderr, "no memory for the emulator's stacks\n");
        abort();
    }
    void **top = (void **)(f->stack + STACK_BYTES - 64);
    *--top = NULL;                                 /* begin_thread never returns; keeps the stack aligned */
    *--top = (void *)begin_thread;
    for (int i = 0; i < 6; i++) *--top = NULL;
    f->sp = top;
    f->ended = f->at_barrier = false;
}

/* Until nobody in it can go on before the block's barrier. */
static void run_warp(int warp)
{
    int first = warp * 32, end = first + 32 < n_threads ? first + 32 : n_threads;
    bool went_on = true;
    for (int rounds = 0; went_on && rounds < 1 << 20; rounds++) {
        went_on = false;
        for (int k = first; k < end; k++) {
            ps_emu_fibre *f = &fibres[backwards ? first + end - 1 - k : k];
            if (f->ended || (f->at_barrier && f->barrier_turn == block_turn)) continue;
            went_on = true;
            ps_emu_now = f;
            ps_emu_switch(&loop_sp, f->sp);
        }
    }
}

static void run_block(void)
{
    alive = n_threads;
    block_arrived = 0;
    memset(warp_arrived, 0, sizeof warp_arrived);
    memset(warp_alive, 0, sizeof warp_alive);
    for (int i = 0; i < n_threads; i++) {
        prepare(&fibres[i]);
        warp_alive[i / 32]++;
    }
    backwards = blocks_run & 1;
    early = blocks_run & 2;
    blocks_run++;
    for (int warps = (n_threads + 31) / 32, turns = 0; alive > 0; turns++) {
        for (int k = 0; k < warps; k++) run_warp(backwards ? warps - 1 - k : k);
        if (turns > 1 << 20) {
            fprintf(stderr, "threads of a block wait for each other and none goes on\n");
            abort();
        }
    }
}

void ps_emu_run(dim3 grid, dim3 block, size_t shared_nbytes, void (*body)(void *), void *context)
{
    int threads = (int)(block.x * block.y * block.z);
    if (threads < 1 || threads > MAX_THREADS || grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.y > 65535 ||
        grid.z > 65535 || shared_nbytes > DYNAMIC_BYTES) {
        fprintf(stderr, "no GPU takes a grid of %u x %u x %u blocks of %d threads with %zu bytes of shared memory\n",
                grid.x, grid.y, grid.z, threads, shared_nbytes);
        abort();
    }
    static std::mutex one;                         /* kernels of several threads take turns */
    std::lock_guard<std::mutex> guard(one);
    if (!ps_emu_dynamic && posix_memalign((void **)&ps_emu_dynamic, 1024, DYNAMIC_BYTES)) abort();
    n_threads = threads;
    started++;
    kernel_body = body;
    kernel_context = context;
    ps_emu_grid = grid;
    ps_emu_block_dim = block;
    for (int i = 0; i < n_threads; i++) {
        unsigned u = (unsigned)i;
        fibres[i].thread = dim3(u % block.x, u / block.x % block.y, u / block.x / block.y);
        fibres[i].lane = i % 32;
        fibres[i].warp = i / 32;
    }
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                ps_emu_block = dim3(x, y, z);
                memset(ps_emu_dynamic, 0xff, shared_nbytes);           /* NaN: nothing may count on what was there */
                run_block();
            }
}


/* A whole number from the environment. */
static int64_t number(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoll(text, NULL, 10) : otherwise;
}

/* -- what a step should not do ------------------------------------------------------------------------------------- */
/* waits: for a stream, the device, or an event that had not been waited for; pageable: copies between the device and
 * host memory that is not pinned, which make the host wait or are staged; allocations: of device memory and pinned
 * memory, and what pins host memory; frees: the reverse of those; copies: all between device and host. */
static struct { int64_t waits, pageable, allocations, frees, copies; } counts;

extern "C" __attribute__((visibility("default"))) void ps_emu_take_counts(int64_t *out);
/* What was counted since the last call. out: [5], in the order of `counts`. */
void ps_emu_take_counts(int64_t *out)
{
    memcpy(out, &counts, sizeof counts);
    memset(&counts, 0, sizeof counts);
}

/* -- streams and events -------------------------------------------------------------------------------------------- */
/* The device is late: what is recorded is over once its stream, the event or a later one was waited for, or was asked
 * about so often. */
enum { PATIENCE = 8 };
struct ps_emu_stream { int64_t recorded, over; };
struct ps_emu_event { ps_emu_stream *stream; int64_t at; int asked; };
static std::vector<ps_emu_stream *> streams;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    *s = new ps_emu_stream();
    streams.push_back(*s);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    for (size_t i = 0; i < streams.size(); i++)
        if (streams[i] == s) streams.erase(streams.begin() + (long)i--);
    delete s;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    counts.waits++;
    s->over = s->recorded;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void)
{
    counts.waits++;
    for (ps_emu_stream *s : streams) s->over = s->recorded;
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    *e = new ps_emu_event();
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    e->stream = s;
    e->at = ++s->recorded;
    e->asked = 0;
    return cudaSuccess;
}
/* One never recorded is over. */
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    if (!e->stream || e->stream->over >= e->at) return cudaSuccess;
    if (++e->asked < PATIENCE) return cudaErrorNotReady;
    e->stream->over = e->at;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    if (cudaEventQuery(e) == cudaSuccess) return cudaSuccess;
    counts.waits++;
    e->stream->over = e->at;
    return cudaSuccess;
}

/* -- host memory --------------------------------------------------------------------------------------------------- */
static std::map<uintptr_t, uintptr_t> pinned;       /* begin -> end */

static bool is_pinned(const void *p, size_t n)
{
    uintptr_t begin = (uintptr_t)p;
    auto r = pinned.upper_bound(begin);
    return r != pinned.begin() && begin + n <= std::prev(r)->second;
}
cudaError_t cudaHostRegister(void *p, size_t n, unsigned)
{
    uintptr_t begin = (uintptr_t)p;
    auto next = pinned.lower_bound(begin + n);
    counts.allocations++;
    if (next != pinned.begin() && std::prev(next)->second > begin) return cudaErrorHostMemoryAlreadyRegistered;
    pinned[begin] = begin + n;
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p)
{
    counts.frees++;
    return pinned.erase((uintptr_t)p) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned)
{
    *p = calloc(1, n ? n : 1);
    return *p ? cudaHostRegister(*p, n ? n : 1, 0) : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *p)
{
    cudaError_t e = cudaHostUnregister(p);
    free(p);
    return e;
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind kind, cudaStream_t)
{
    if (kind != cudaMemcpyDeviceToDevice) {
        counts.copies++;
        if (!is_pinned(kind == cudaMemcpyHostToDevice ? s : d, n)) counts.pageable++;
    }
    memmove(d, s, n);
    return cudaSuccess;
}

/* -- device memory ------------------------------------------------------------------------------------------------- */
/* The pool keeps its most, until it is trimmed; taking what it has is no allocation. New memory is full of NaNs. */
struct ps_emu_pool { int64_t reserved, used; };
static ps_emu_pool pool;
static int64_t plain_used;

static void *take(size_t nbytes)
{
    char *q = (char *)mmap(NULL, nbytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                           0);
    if (q == MAP_FAILED) return NULL;
    *(size_t *)q = nbytes;
    memset(q + 4096, 0xff, nbytes);
    return q + 4096;
}

static int64_t give(void *p)
{
    char *q = (char *)p - 4096;
    int64_t nbytes = (int64_t)*(size_t *)q;
    munmap(q, (size_t)nbytes + 4096);
    return nbytes;
}

cudaError_t cudaMalloc(void **p, size_t nbytes)
{
    size_t left, total;
    counts.allocations++;
    cudaMemGetInfo(&left, &total);
    if (nbytes > left || !(*p = take(nbytes))) return cudaErrorMemoryAllocation;
    plain_used += (int64_t)nbytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    if (!p) return cudaSuccess;
    counts.frees++;
    plain_used -= give(p);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **p, size_t nbytes, cudaStream_t)
{
    size_t left, total;
    int64_t more = pool.used + (int64_t)nbytes - pool.reserved;
    cudaMemGetInfo(&left, &total);
    if (more > (int64_t)left || !(*p = take(nbytes))) return cudaErrorMemoryAllocation;
    pool.used += (int64_t)nbytes;
    if (more <= 0) return cudaSuccess;
    counts.allocations++;
    pool.reserved += more;
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t)
{
    if (p) pool.used -= give(p);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr, int)
{
    *out = number("PS_EMULATE_NO_POOL", 0) == 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *out, int)
{
    *out = &pool;
    return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr which, void *value)
{
    *(uint64_t *)value = (uint64_t)(which == cudaMemPoolAttrReservedMemCurrent ? pool.reserved : pool.used);
    return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t)
{
    counts.frees += pool.reserved > pool.used;
    pool.reserved = pool.used;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_nbytes, size_t *total)
{
    int64_t all = number("PS_EMULATE_MEMORY", (int64_t)2 << 30);
    *total = (size_t)all;
    *free_nbytes = (size_t)(all - plain_used - pool.reserved);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int)
{
    size_t left;
    memset(out, 0, sizeof *out);
    cudaMemGetInfo(&left, &out->totalGlobalMem);
    snprintf(out->name, sizeof out->name, "emulated on the processor");
    out->major = (int)number("PS_EMULATE_CAPABILITY", 9);
    out->multiProcessorCount = 4;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = (int)number("PS_EMULATE_CARDS", 1);
    return cudaSuccess;
}

/* Each process has cards of its own, unless their number is set. */
cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device)
{
    unsigned bus = number("PS_EMULATE_CARDS", 0) ? 1 : (unsigned)getpid() & 0xffff;
    snprintf(out, (size_t)size, "0000:%04x:%02x.0", bus, (unsigned)device);
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void)
{
    return started > 0 && started == number("PS_EMULATE_FAIL", 0) ? cudaErrorIllegalAddress : cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t e)
{
    return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
        : e == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "another error";
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorMemoryAllocation ? "out of memory"
        : e == cudaErrorIllegalAddress ? "an illegal memory access was encountered" : "an error";
}
