/* SPDX-License-Identifier: BSD-3-Clause
 * Runs kernels on the processor: see cuda_runtime.h next to this file. A block's threads are fibres with their own
 * stacks. A warp runs until all its threads wait for the block's barrier (or have ended), then the next warp runs.
 * Every other block runs its warps from first to last, the others from last to first, and asynchronous copies happen
 * as late as possible, or at once. So warps are as far apart as barriers allow, and a missing barrier shows.
 * streams.cpp runs one kernel at a time. The PS_EMULATE_FAIL-th kernel fails. With PS_EMULATE_LIST a file gets a line
 * for each kernel, product, clearing and copy as it is queued, and neither kernels nor products run. */
#include "emulate.h"
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <vector>

enum { MAX_THREADS = 1024, STACK_BYTES = 256 << 10, STAGGERED = 256, DYNAMIC_BYTES = 227 << 10 };

ps_emu_fibre *ps_emu_now;
dim3 ps_emu_grid, ps_emu_block_dim, ps_emu_block;
unsigned char *ps_emu_dynamic;

static ps_emu_fibre fibres[MAX_THREADS];
static void *loop_sp;
static bool backwards, early;
static unsigned blocks_run;
static int64_t started;              /* number of kernels that have started */
static int n_threads, alive, block_arrived, block_turn;
static int warp_arrived[32], warp_turn[32], warp_alive[32];
static uint64_t slots[32][2][32 * 16];
static void (*kernel_body)(void *);
static void *kernel_context;

/* Saves the registers that a call must preserve on this stack, and their address in *save. Continues with the
 * registers saved at `load`. */
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

struct async_copy { void *dst; const void *src; int nbytes, group; };
struct async_state { int group; std::vector<async_copy> copies; };
static async_state async_of[MAX_THREADS];

static void copy_now(const async_copy &c)
{
    if (c.src) memcpy(c.dst, c.src, (size_t)c.nbytes);
    else memset(c.dst, 0, (size_t)c.nbytes);
}

int ps_emu_thread_index(void) { return (int)(ps_emu_now - fibres); }
bool ps_emu_early(void) { return early; }
static async_state *own_async(void) { return &async_of[ps_emu_thread_index()]; }

void ps_emu_async_copy(void *dst, const void *src, int nbytes)
{
    async_state *a = own_async();
    if (((uintptr_t)dst | (uintptr_t)src) & (uintptr_t)(nbytes - 1)) {
        fprintf(stderr, "an asynchronous copy of %d bytes that are not aligned\n", nbytes);
        abort();
    }
    a->copies.push_back(async_copy{ dst, src, nbytes, a->group });
    if (early) copy_now(a->copies.back());
}

void ps_emu_async_commit(void) { own_async()->group++; }

void ps_emu_async_wait(int but)
{
    async_state *a = own_async();
    size_t n = 0;
    while (n < a->copies.size() && a->copies[n].group < a->group - but) {
        if (!early) copy_now(a->copies[n]);
        ps_emu_copied(ps_emu_thread_index(), a->copies[n].dst, a->copies[n].nbytes);
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
    void **top = (void **)(f->stack + STACK_BYTES - 64 - (f - fibres) % STAGGERED * 256);
    *--top = NULL;                                 /* begin_thread never returns; this keeps the stack aligned */
    *--top = (void *)begin_thread;
    for (int i = 0; i < 6; i++) *--top = NULL;
    f->sp = top;
    f->ended = f->at_barrier = false;
}

/* Runs until every thread in the warp has ended or waits for the block's barrier. */
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

static void run_block(size_t shared_nbytes)
{
    alive = n_threads;
    block_arrived = 0;
    memset(warp_arrived, 0, sizeof warp_arrived);
    memset(warp_alive, 0, sizeof warp_alive);
    for (int i = 0; i < n_threads; i++) {
        prepare(&fibres[i]);
        warp_alive[i / 32]++;
    }
    ps_emu_wgmma_begin(n_threads, shared_nbytes);
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
    ps_emu_wgmma_end();
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
    if (!ps_emu_dynamic && posix_memalign((void **)&ps_emu_dynamic, 1024, DYNAMIC_BYTES)) abort();
    n_threads = threads;
    if (++started == ps_emu_number("PS_EMULATE_FAIL", 0)) {
        ps_emu_fail(cudaErrorIllegalAddress);
        return;
    }
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
                memset(ps_emu_dynamic, 0xff, shared_nbytes);           /* NaN, so that a use of the old contents is
                                                                        * detected */
                run_block(shared_nbytes);
            }
}

bool ps_emu_listed(const char *format, ...)
{
    static FILE *list;
    static const char *path = getenv("PS_EMULATE_LIST");
    if (!path) return false;
    if (!list) list = fopen(path, "w");
    if (!list) abort();
    va_list args;
    va_start(args, format);
    vfprintf(list, format, args);
    va_end(args);
    fputc('\n', list);
    fflush(list);
    return true;
}
