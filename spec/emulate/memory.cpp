/* SPDX-License-Identifier: BSD-3-Clause
 * Memory and properties of the emulated device: see cuda_runtime.h next to this file. An allocation gets new addresses,
 * never those of a recently freed one. Memory of the pool exists from its allocation to its release, in the order of
 * the streams on which both were requested; accessing it at any other time ends the process. New memory is full of
 * NaNs. Host memory may not be unpinned while a copy that uses it is queued.
 *
 * PS_EMULATE_MEMORY is the bytes of device memory (2 GiB), PS_EMULATE_CAPABILITY the major number of the device's
 * compute capability (9). If PS_EMULATE_CARDS is set, all processes share this number of cards;
 * PS_EMULATE_NO_POOL=1 is a device without a memory pool. */
#include "emulate.h"
#include <deque>
#include <map>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

/* -- host memory --------------------------------------------------------------------------------------------------- */
namespace {

struct range { uintptr_t begin, end; };
std::map<uintptr_t, uintptr_t> pinned;         /* begin -> end */
std::vector<range> in_use;

range range_of(const void *p, size_t n) { return range{ (uintptr_t)p, (uintptr_t)p + n }; }

}

int ps_emu_is_pinned(const void *p, size_t n)
{
    range r = range_of(p, n);
    auto next = pinned.lower_bound(r.end);
    if (next == pinned.begin() || std::prev(next)->second <= r.begin) return PS_EMU_PAGEABLE;
    auto last = std::prev(next);
    return last->first <= r.begin && r.end <= last->second ? PS_EMU_PINNED : PS_EMU_PARTLY;
}

void ps_emu_host_begins(const void *p, size_t n) { in_use.push_back(range_of(p, n)); }

void ps_emu_host_ends(const void *p, size_t n)
{
    range r = range_of(p, n);
    for (size_t i = 0; i < in_use.size(); i++)
        if (in_use[i].begin == r.begin && in_use[i].end == r.end) {
            in_use[i] = in_use.back();
            in_use.pop_back();
            return;
        }
}

bool ps_emu_host_in_use(const void *p, size_t n)
{
    range r = range_of(p, n);
    for (const range &u : in_use)
        if (u.begin < r.end && r.begin < u.end) return true;
    return false;
}

static cudaError_t pin(void *p, size_t n)
{
    uintptr_t begin = (uintptr_t)p;
    auto next = pinned.lower_bound(begin + n);
    ps_emu_count.allocations++;
    if (next != pinned.begin() && std::prev(next)->second > begin) return cudaErrorHostMemoryAlreadyRegistered;
    pinned[begin] = begin + n;
    return cudaSuccess;
}

static cudaError_t unpin(void *p)
{
    auto found = pinned.find((uintptr_t)p);
    ps_emu_count.frees++;
    if (found == pinned.end()) return cudaErrorHostMemoryNotRegistered;
    if (ps_emu_host_in_use(p, found->second - found->first))
        ps_emu_wrong("host memory is unpinned or freed while a copy that uses it is queued");
    pinned.erase(found);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *p, size_t n, unsigned)
{
    ps_emu_entry in;
    return ps_emu_say(ps_emu_fails(PS_EMU_FAIL_MEMORY) ? cudaErrorMemoryAllocation : pin(p, n));
}

cudaError_t cudaHostUnregister(void *p)
{
    ps_emu_entry in;
    return ps_emu_say(unpin(p));
}

cudaError_t cudaHostAlloc(void **p, size_t n, unsigned)
{
    ps_emu_entry in;
    *p = ps_emu_fails(PS_EMU_FAIL_MEMORY) ? NULL : calloc(1, n ? n : 1);
    return ps_emu_say(*p ? pin(*p, n ? n : 1) : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *p)
{
    ps_emu_entry in;
    cudaError_t e = unpin(p);
    free(p);
    return ps_emu_say(e);
}

/* -- device memory ------------------------------------------------------------------------------------------------- */
/* The pool keeps its largest size until it is trimmed. Using memory of the pool is not an allocation. */
struct ps_emu_pool { int64_t reserved, used; };
static ps_emu_pool pool;
static int64_t plain_used;

namespace {

enum { OLD_KEPT = 512, NANS_NBYTES = 32 << 20 };     /* OLD_KEPT: number of freed allocations whose addresses are not
                                                      * reused */

struct region { size_t nbytes, mapped; bool there, freed, pooled; };
std::map<uintptr_t, region> regions;
std::deque<uintptr_t> old;
bool shown;

region *region_of(const void *p)
{
    auto r = regions.upper_bound((uintptr_t)p);
    if (r == regions.begin() || (uintptr_t)p >= std::prev(r)->first + std::prev(r)->second.mapped) return NULL;
    return &std::prev(r)->second;
}

void touched(int, siginfo_t *info, void *)
{
    const region *r = region_of(info->si_addr);
    const char *who = ps_emu_doing ? ps_emu_doing : "the host, or an exchange,";
    if (r)
        fprintf(stderr, "emulated CUDA: %s touches one of %zu bytes of device memory, at %p, that %s\n", who, r->nbytes,
                info->si_addr, r->there ? "only the device can" : r->freed ? "were freed" : "are not there yet");
    signal(SIGSEGV, SIG_DFL);                  /* the access is repeated */
}

/* Reserves addresses without memory. */
void *reserve(size_t nbytes, bool pooled)
{
    static bool first = true;
    if (first) {
        struct sigaction a = {};
        a.sa_sigaction = touched;
        a.sa_flags = SA_SIGINFO;
        sigaction(SIGSEGV, &a, NULL);
        first = false;
    }
    size_t mapped = (nbytes + 4095) / 4096 * 4096 + 4096;      /* the next page belongs to no allocation */
    void *p = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    regions[(uintptr_t)p] = region{ nbytes, mapped, false, false, pooled };
    return p;
}

/* Returns a file full of NaNs. Its pages become private memory when they are written. */
int nans(void)
{
    static int file = -1;
    if (file >= 0) return file;
    std::vector<char> bytes(NANS_NBYTES, (char)0xff);
    file = memfd_create("nan", MFD_CLOEXEC);
    if (file < 0 || write(file, bytes.data(), NANS_NBYTES) != NANS_NBYTES)
        ps_emu_wrong("there is no file in memory to be had");
    return file;
}

void map(char *p, size_t nbytes, int rights, int flags, int file)
{
    nbytes = (nbytes + 4095) / 4096 * 4096;
    if (mmap(p, nbytes, rights, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE | flags, file, 0) == MAP_FAILED)
        ps_emu_wrong("%zu bytes of device memory cannot be mapped", nbytes);
}

void come(void *p, size_t nbytes)
{
    for (size_t done = 0, n; done < nbytes; done += n) {
        n = nbytes - done < (size_t)NANS_NBYTES ? nbytes - done : (size_t)NANS_NBYTES;
        map((char *)p + done, n, shown ? PROT_READ | PROT_WRITE : PROT_NONE, 0, nans());
    }
    region_of(p)->there = true;
}

void go_away(void *p, size_t nbytes)
{
    map((char *)p, nbytes, PROT_NONE, MAP_ANONYMOUS, -1);
    region_of(p)->there = false;
    old.push_back((uintptr_t)p);
    if (old.size() <= OLD_KEPT) return;
    auto r = regions.find(old.front());
    munmap((void *)r->first, r->second.mapped);
    regions.erase(r);
    old.pop_front();
}

region *to_free(void *p)
{
    auto r = regions.find((uintptr_t)p);
    if (r == regions.end() || r->second.freed) ps_emu_wrong("device memory is freed that is not there");
    r->second.freed = true;
    return &r->second;
}

int64_t free_nbytes(void)
{
    return ps_emu_number("PS_EMULATE_MEMORY", (int64_t)2 << 30) - plain_used - pool.reserved;
}

}

void ps_emu_show_memory(bool show)
{
    if (show == shown) return;
    shown = show;
    int rights = show ? PROT_READ | PROT_WRITE : PROT_NONE;
    for (const auto &r : regions)
        if (r.second.there) mprotect((void *)r.first, r.second.mapped - 4096, rights);
}

bool ps_emu_on_device(const void *p, size_t n)
{
    const region *r = region_of(p);
    return r && !r->freed && (uintptr_t)p + n <= std::prev(regions.upper_bound((uintptr_t)p))->first + r->nbytes;
}

cudaError_t cudaMalloc(void **p, size_t nbytes)
{
    ps_emu_entry in;
    ps_emu_count.allocations++;
    if (ps_emu_fails(PS_EMU_FAIL_MEMORY) || (int64_t)nbytes > free_nbytes() || !(*p = reserve(nbytes, false)))
        return ps_emu_say(cudaErrorMemoryAllocation);
    come(*p, nbytes);
    plain_used += (int64_t)nbytes;
    return ps_emu_say(cudaSuccess);
}

/* Waits for the whole device, like the real runtime for memory outside of pools. */
cudaError_t cudaFree(void *p)
{
    ps_emu_entry in;
    if (!p) return ps_emu_say(cudaSuccess);
    in.wait_all();
    region *r = to_free(p);
    if (r->pooled) ps_emu_wrong("memory of a pool is freed out of its stream's order");
    ps_emu_count.frees++;
    plain_used -= (int64_t)r->nbytes;
    go_away(p, r->nbytes);
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaMallocAsync(void **p, size_t nbytes, cudaStream_t s)
{
    {
        ps_emu_entry in;
        int64_t more = pool.used + (int64_t)nbytes - pool.reserved;
        if (ps_emu_fails(PS_EMU_FAIL_MEMORY) || more > free_nbytes() || !(*p = reserve(nbytes, true)))
            return ps_emu_say(cudaErrorMemoryAllocation);
        pool.used += (int64_t)nbytes;
        if (more > 0) {
            ps_emu_count.allocations++;
            pool.reserved += more;
        }
    }
    void *q = *p;
    ps_emu_add(s, [q, nbytes] { come(q, nbytes); });
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t s)
{
    size_t nbytes;
    if (!p) return ps_emu_say(cudaSuccess);
    {
        ps_emu_entry in;
        region *r = to_free(p);
        if (!r->pooled) ps_emu_wrong("memory that is not of a pool is freed as if it were");
        nbytes = r->nbytes;
        pool.used -= (int64_t)nbytes;
    }
    ps_emu_add(s, [p, nbytes] { go_away(p, nbytes); });
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr, int)
{
    *out = ps_emu_number("PS_EMULATE_NO_POOL", 0) == 0;
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *out, int)
{
    *out = &pool;
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return ps_emu_say(cudaSuccess); }

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr which, void *value)
{
    ps_emu_entry in;
    *(uint64_t *)value = (uint64_t)(which == cudaMemPoolAttrReservedMemCurrent ? pool.reserved : pool.used);
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t)
{
    ps_emu_entry in;
    ps_emu_count.frees += pool.reserved > pool.used;
    pool.reserved = pool.used;
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total)
{
    ps_emu_entry in;
    *total = (size_t)ps_emu_number("PS_EMULATE_MEMORY", (int64_t)2 << 30);
    *left = (size_t)free_nbytes();
    return ps_emu_say(cudaSuccess);
}

/* -- the device ---------------------------------------------------------------------------------------------------- */
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int)
{
    memset(out, 0, sizeof *out);
    out->totalGlobalMem = (size_t)ps_emu_number("PS_EMULATE_MEMORY", (int64_t)2 << 30);
    snprintf(out->name, sizeof out->name, "emulated on the processor");
    out->major = (int)ps_emu_number("PS_EMULATE_CAPABILITY", 9);
    out->multiProcessorCount = 4;
    out->sharedMemPerBlockOptin = 163 << 10;
    return ps_emu_say(cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = (int)ps_emu_number("PS_EMULATE_CARDS", 1);
    return ps_emu_say(cudaSuccess);
}

/* Each process has its own cards, unless their number is set. */
cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device)
{
    unsigned bus = ps_emu_number("PS_EMULATE_CARDS", 0) ? 1 : (unsigned)getpid() & 0xffff;
    snprintf(out, (size_t)size, "0000:%04x:%02x.0", bus, (unsigned)device);
    return ps_emu_say(cudaSuccess);
}
