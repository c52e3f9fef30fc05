/* SPDX-License-Identifier: BSD-3-Clause
 * Opens the cuda backend, and implements its memory, streams, copies and errors. The kernels are in other files. One
 * thread calls all functions. The device runs the queued work while the thread continues. The thread waits for the
 * device in copy_out, in copy_wait, and when memory is returned to the driver. It also waits in copy_in while 4 MiB of
 * copies by copy_in are pending.
 *
 * Order: kernels, copy_in and copy_out use the stream `compute`. Dispatch can therefore reuse the memory of one kernel
 * for the next kernel without waiting. copy_start uses two other streams, one for each direction. Its copy runs after
 * all work that was already queued on `compute`, because queued kernels may still use the copy's buffers. The caller
 * can use the copy's buffers again only after copy_wait. */
#include "backend/cuda/nccl.h"
#include "backend/cuda_rules.h"
#include <atomic>
#include <mutex>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ps_copy {
    ps_copy *next;                             /* next entry of the list `spare` */
    cudaEvent_t done;
    ps_copy_times times;
    bool to_device;
};

enum { SLOTS = 16 };
static const size_t slot_nbytes = (size_t)256 << 10;      /* size of a slot; larger copies are split into pieces of this
                                                           * size, in bytes */
static const int64_t memory_least = (int64_t)512 << 20;   /* free bytes that a device needs to be opened */
static const int64_t memory_spare = (int64_t)64 << 20;    /* bytes that are left free for the driver's modules, local
                                                           * memory and cuBLASLt */

ps_cuda *ps_cu;
static ps_copy *spare;
static ps_kernel kernels[PS_OP_COUNT];
/* Pinned memory for the pieces that copy_in copies. slot_free: one event per slot, recorded after the slot's last copy.
 * One additional slot is used for small copies to the host. */
static char *slots;
static cudaEvent_t slot_free[SLOTS];
static int slot_next;

#define OP(name, ...) #name,
static const char *const op_names[] = {
#include "ops.def"
};
#undef OP
const char *ps_cuda_op_name(int op) { return op >= 0 && op < PS_OP_COUNT ? op_names[op] : "?"; }

ps_kernel ps_cuda_kernel(int op) { return kernels[op]; }

/* -- errors -------------------------------------------------------------------------------------------------------- */
static int say_broken(void)
{
    return ps_fail(PS_EBACKEND, "device cuda cannot be used any more in this process: %s", ps_cu->what_broke);
}

/* Waits for running copies after a library has failed or a call was rejected. The device can still run work that was
 * queued earlier. No caller waits for this work any more, so host memory that the work writes to could be reused too
 * early. */
static void come_to_rest(void)
{
    const cudaStream_t all[3] = { ps_cu->lane[0], ps_cu->lane[1], ps_cu->compute };
    for (int i = 0; i < 3; i++)
        if (all[i]) cudaStreamSynchronize(all[i]);
    cudaGetLastError();
}

int ps_cuda_broke(const char *fmt, ...)
{
    if (!ps_cu->broken) {
        va_list args;
        come_to_rest();
        va_start(args, fmt);
        int used = vsnprintf(ps_cu->what_broke, sizeof ps_cu->what_broke, fmt, args);
        va_end(args);
        if (used > 0 && (size_t)used < sizeof ps_cu->what_broke && ps_cu->last_op)
            snprintf(ps_cu->what_broke + used, sizeof ps_cu->what_broke - (size_t)used,
                     "; the last op begun was %s%s", ps_cu->last_op,
                     ps_cu->sync ? "" : ", the cause may be one before it (PS_CUDA_SYNC=1 waits for each)");
        ps_cu->broken = true;
    }
    return say_broken();
}

int ps_cuda_check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return 0;
    cudaGetLastError();
    return ps_cuda_broke("%s (%s) in %.100s", cudaGetErrorString(e), cudaGetErrorName(e), what);
}

int ps_cuda_launched(void) { return ps_cuda_check(cudaPeekAtLastError(), "the start of a kernel"); }

int ps_cuda_trapped(void)
{
    int kind = *(volatile int *)&ps_cu->trap_host->kind;
    if (kind == TRAP_NONE) return 0;
    CU_TRY(cudaStreamSynchronize(ps_cu->compute));
    ps_trap t = *ps_cu->trap_host;             /* the device is idle, so no copy writes to *trap_host any more */
    ps_cu->trap_host->kind = TRAP_NONE;
    CU_TRY(cudaMemsetAsync(ps_cu->trap_taken, 0, sizeof *ps_cu->trap_taken, ps_cu->compute));
    if (kind == TRAP_TARGET)
        return ps_fail(PS_ERANGE, "%s, on cuda: target %lld at position %lld is outside [0, %lld) and is not "
                       "ignore_index %lld; its results since then are wrong", ps_cuda_op_name(t.op), t.value,
                       t.position, t.limit, t.ignore);
    if (kind == TRAP_NAN)
        return ps_fail(PS_ERANGE, "%s, on cuda: logit %lld of row %lld is NaN; its results since then are wrong",
                       ps_cuda_op_name(t.op), t.value, t.position);
    if (kind == TRAP_INFINITE)
        return ps_fail(PS_ERANGE, "%s, on cuda: the largest logit of row %lld is %s; its results since then are wrong",
                       ps_cuda_op_name(t.op), t.position, t.value > 0 ? "inf" : "-inf");
    return ps_fail(PS_ERANGE, "%s, on cuda: index %lld at position %lld is outside [0, %lld); its results since then "
                   "are wrong", ps_cuda_op_name(t.op), t.value, t.position, t.limit);
}

static std::mutex lost_lock;
static std::atomic<int> lost_code;             /* 0 if no bytes were lost, or if the loss has been reported */
static char lost_text[1000];

void ps_cuda_lose(int code, const char *why)
{
    std::lock_guard<std::mutex> guard(lost_lock);
    if (lost_code) return;
    snprintf(lost_text, sizeof lost_text, "%s", why);
    lost_code = code;
}

int ps_cuda_lost(bool told)
{
    if (!lost_code) return 0;
    std::lock_guard<std::mutex> guard(lost_lock);
    int code = told ? lost_code.exchange(0) : lost_code.load();
    return code ? ps_fail(code, "%s", lost_text) : 0;
}

int ps_cuda_clear(void *p, size_t nbytes)
{
    if (!ps_cu->dry) CU_TRY(cudaMemsetAsync(p, 0, nbytes, ps_cu->compute));
    return 0;
}

int ps_cuda_move(void *dst, const void *src, size_t nbytes)
{
    if (!ps_cu->dry) CU_TRY(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDeviceToDevice, ps_cu->compute));
    return 0;
}

/* The number of bytes of workspace that a kernel has requested. To measure it, the kernel is run with a scratch
 * function that counts the bytes and allocates nothing. */
static int64_t asked;

static void *count_scratch(ps_call *call, size_t nbytes)
{
    asked += (int64_t)(nbytes + 63) / 64 * 64;
    return (void *)(uintptr_t)4096;
}

/* Returns the size in bytes of the workspace of a call, or -1 if the kernel rejects the call. */
static int64_t scratch_nbytes(ps_backend *be, const ps_call *call)
{
    ps_call c = *call;
    if (!kernels[c.op]) return 0;
    c.scratch = count_scratch;
    asked = 0;
    ps_cu->dry = true;
    int rc = kernels[c.op](&c);
    ps_cu->dry = false;
    return rc < 0 ? -1 : asked;
}

#ifdef PS_EMULATE_CUDA
/* Compares the workspace that kernels allocate with the prediction of cuda_rules.c. Plans for simulated cards use this
 * prediction. */
static int check_rules(ps_call *call)
{
    int64_t by_rules = ps_cuda_rules_scratch(&ps_cu->card, call), by_kernel = scratch_nbytes(&ps_cu->base, call);
    if (by_rules == by_kernel || by_kernel < 0) return 0;
    return ps_fail(PS_EBACKEND, "%s: its kernel asks for %lld bytes of work space, cuda_rules.c says %lld",
                   ps_cuda_op_name(call->op), (long long)by_kernel, (long long)by_rules);
}
#endif

/* Runs the kernel of a call's op. Fails if the device is broken or if a launch reports an error. */
static int run(ps_call *call)
{
    if (ps_cu->broken) return say_broken();
    PS_TRY(ps_cuda_trapped());
    ps_cu->last_op = ps_cuda_op_name(call->op);
    if (ps_cu->told) fprintf(stderr, "cuda op %s\n", ps_cu->last_op);
#ifdef PS_EMULATE_CUDA
    PS_TRY(check_rules(call));
#endif
    PS_TRY(kernels[call->op](call));
    PS_TRY(ps_cuda_launched());
    if (!ps_cu->sync) return 0;
    CU_TRY(cudaStreamSynchronize(ps_cu->compute));
    return ps_cuda_trapped();
}

/* -- memory -------------------------------------------------------------------------------------------------------- */
/* Regions are allocated from the device's own memory pool. (Some virtual devices have no pool.) Freed memory stays in
 * the pool, and work that is queued on `compute` later can reuse it. When one chunk replaces another in a step, the
 * engine therefore neither waits for the device nor calls the driver. When a region is freed, the other streams do not
 * use it any more, because the host has waited for their copies. */
static int64_t pool_spare(void)
{
    uint64_t reserved = 0, used = 0;
    if (!ps_cu->pool || cudaMemPoolGetAttribute(ps_cu->pool, cudaMemPoolAttrReservedMemCurrent, &reserved) ||
        cudaMemPoolGetAttribute(ps_cu->pool, cudaMemPoolAttrUsedMemCurrent, &used))
        return 0;
    return (int64_t)(reserved - used);
}

static int64_t bytes_available(ps_backend *be)
{
    size_t left = 0, total = 0;
    if (ps_cu->broken || ps_cuda_check(cudaMemGetInfo(&left, &total), "cudaMemGetInfo") < 0)
        return INT64_MAX;                      /* the amount of free memory is unknown; if the device has failed, the
                                                * next allocation reports it */
    int64_t all = (int64_t)left + pool_spare();
    return all > memory_spare ? all - memory_spare : 0;
}

static int wait_all(void)
{
    for (int i = 0; i < 2; i++) CU_TRY(cudaStreamSynchronize(ps_cu->lane[i]));
    CU_TRY(cudaStreamSynchronize(ps_cu->compute));
    return 0;
}

static cudaError_t take_memory(size_t nbytes, void **out)
{
    if (!ps_cu->pool) return cudaMalloc(out, nbytes);
    cudaError_t e = cudaMallocAsync(out, nbytes, ps_cu->compute);
    if (e != cudaErrorMemoryAllocation) return e;
    cudaGetLastError(); /* the pool's blocks can fragment the free memory: release them, then try again */
    if (wait_all() < 0) return cudaErrorUnknown;
    cudaMemPoolTrimTo(ps_cu->pool, 0);
    return cudaMallocAsync(out, nbytes, ps_cu->compute);
}

static int region_new(ps_backend *be, size_t nbytes, void **out)
{
    if (ps_cu->broken) return say_broken();
    if (ps_alloc_should_fail())
        return ps_fail(PS_ENOMEM, "no memory for %zu bytes, because a test made this allocation fail", nbytes);
    cudaError_t e = take_memory(nbytes ? nbytes : 1, out);
    if (ps_cu->broken) return say_broken();
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();                    /* the error is not permanent: the context still works */
        return ps_fail(PS_ENOMEM, "cuda has no %.1f MiB of memory in one piece, %.1f MiB are free; use a smaller "
                       "batch, a smaller model or recompute", (double)nbytes / 1048576.0,
                       (double)bytes_available(be) / 1048576.0);
    }
    return ps_cuda_check(e, "taking memory");
}

static void region_free(ps_backend *be, void *p, size_t nbytes)
{
    if (ps_cu->broken) return;
    if (ps_cu->pool) cudaFreeAsync(p, ps_cu->compute);
    else if (wait_all() == 0) cudaFree(p);
}

/* -- copies -------------------------------------------------------------------------------------------------------- */
static int copy_in(ps_backend *be, void *dst, const void *src, size_t nbytes)
{
    if (ps_cu->broken) return say_broken();
    for (size_t done = 0, n; done < nbytes; done += n) {
        char *slot = slots + (size_t)slot_next * slot_nbytes;
        cudaEvent_t is_free = slot_free[slot_next];
        n = nbytes - done < slot_nbytes ? nbytes - done : slot_nbytes;
        slot_next = (slot_next + 1) % SLOTS;
        CU_TRY(cudaEventSynchronize(is_free));         /* returns at once for an event that was never recorded */
        memcpy(slot, (const char *)src + done, n);
        CU_TRY(cudaMemcpyAsync((char *)dst + done, slot, n, cudaMemcpyHostToDevice, ps_cu->compute));
        CU_TRY(cudaEventRecord(is_free, ps_cu->compute));
    }
    return 0;
}

/* Copies in pieces, because one copy must not use memory of two pinned ranges, and must not mix pinned and unpinned
 * memory. */
static int move(cudaStream_t stream, bool to_device, void *dst, const void *src, size_t nbytes)
{
    const char *host = (const char *)(to_device ? src : dst);
    for (size_t done = 0, n; done < nbytes; done += n) {
        n = ps_cuda_pinned_run(host + done, nbytes - done);
        CU_TRY(cudaMemcpyAsync((char *)dst + done, (const char *)src + done, n,
                               to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream));
    }
    return 0;
}

static int copy_out(ps_backend *be, void *dst, const void *src, size_t nbytes)
{
    if (ps_cu->broken) return say_broken();
    if (nbytes == 0) return 0;
    void *to = nbytes <= slot_nbytes ? slots + SLOTS * slot_nbytes : dst;
    PS_TRY(move(ps_cu->compute, false, to, src, nbytes));
    CU_TRY(cudaStreamSynchronize(ps_cu->compute));
    if (to != dst) memcpy(dst, to, nbytes);
    PS_TRY(ps_cuda_lost(true));
    return ps_cuda_trapped();
}

static int clear(ps_backend *be, void *dst, size_t nbytes)
{
    if (ps_cu->broken) return say_broken();
    return ps_cuda_check(cudaMemsetAsync(dst, 0, nbytes, ps_cu->compute), "cudaMemsetAsync");
}

static void give_copy(ps_copy *c)
{
    c->next = spare;
    spare = c;
}

static int take_copy(ps_copy **out)
{
    ps_copy *c = spare;
    if (c) {
        spare = c->next;
    } else {
        c = (ps_copy *)ps_alloc0(sizeof *c);
        if (!c) return ps_fail_nomem(sizeof *c);
        cudaError_t e = cudaEventCreateWithFlags(&c->done, cudaEventDisableTiming);
        if (e != cudaSuccess) {
            ps_free(c);
            return ps_cuda_check(e, "cudaEventCreateWithFlags");
        }
    }
    *out = c;
    return 0;
}

static int queue_copy(ps_copy *c, void *dst, const void *src, size_t nbytes, ps_copy *after)
{
    cudaStream_t lane = ps_cu->lane[c->to_device];
    CU_TRY(cudaEventRecord(ps_cu->fence, ps_cu->compute));
    CU_TRY(cudaStreamWaitEvent(lane, ps_cu->fence, 0));
    if (after && after->to_device != c->to_device) CU_TRY(cudaStreamWaitEvent(lane, after->done, 0));
    if (ps_cu->base.times) PS_TRY(ps_cuda_copy_times(&c->times, lane, true));
    PS_TRY(move(lane, c->to_device, dst, src, nbytes));
    if (c->times.from) PS_TRY(ps_cuda_copy_times(&c->times, lane, false));
    CU_TRY(cudaEventRecord(c->done, lane));
    return 0;
}

static int copy_start(ps_backend *be, bool to_device, void *dst, const void *src, size_t nbytes, ps_copy *after,
                      ps_copy **out)
{
    ps_copy *c = NULL;
    if (ps_cu->broken) return say_broken();
    PS_TRY(take_copy(&c));
    c->to_device = to_device;
    ps_cuda_pin_host(to_device ? src : dst, nbytes);
    int rc = queue_copy(c, dst, src, nbytes, after);
    if (rc < 0) {
        int64_t ns[2];
        ps_cuda_copy_times_read(&c->times, ns);
        give_copy(c);
    } else {
        *out = c;
    }
    return rc;
}

static int copy_wait(ps_backend *be, ps_copy *c, bool block)
{
    cudaError_t e = ps_cu->broken ? cudaSuccess : block ? cudaEventSynchronize(c->done) : cudaEventQuery(c->done);
    if (e == cudaErrorNotReady) {
        cudaGetLastError();                    /* clears the error, which the next launch would report otherwise */
        return 0;
    }
    bool to_device = c->to_device;
    int rc = ps_cuda_copy_times_read(&c->times, be->copied_ns);
    give_copy(c);
    if (ps_cu->broken) return say_broken();
    PS_TRY(rc);
    PS_TRY(ps_cuda_check(e, "a copy"));
    if (!to_device) PS_TRY(ps_cuda_lost(false));           /* the error stays set, so that a caller which waits for this
                                                            * copy later reports the error, too */
    return 1;
}

/* -- opening and closing ------------------------------------------------------------------------------------------- */
static void close_cuda(ps_backend *be)
{
    if (!ps_cu->broken) cudaDeviceSynchronize();
    ps_cuda_gemm_close();
    ps_cuda_unpin_all();
    ps_cuda_times_close();
    for (ps_copy *c = spare, *next; c; c = next) {
        next = c->next;
        cudaEventDestroy(c->done);
        ps_free(c);
    }
    spare = NULL;
    for (int i = 0; i < SLOTS; i++)
        if (slot_free[i]) cudaEventDestroy(slot_free[i]);
    memset(slot_free, 0, sizeof slot_free);
    if (slots) cudaFreeHost(slots);
    slots = NULL;
    if (ps_cu->pool && !ps_cu->broken) cudaMemPoolTrimTo(ps_cu->pool, 0);
    if (ps_cu->fence) cudaEventDestroy(ps_cu->fence);
    for (int i = 0; i < 2; i++)
        if (ps_cu->lane[i]) cudaStreamDestroy(ps_cu->lane[i]);
    if (ps_cu->compute) cudaStreamDestroy(ps_cu->compute);
    if (ps_cu->trap_taken) cudaFree(ps_cu->trap_taken);
    if (ps_cu->trap_host) cudaFreeHost(ps_cu->trap_host);
    ps_free(ps_cu);
    ps_cu = NULL;
}

/* Selects the device of this process by the local rank that torchrun, Open MPI, PMI or Slurm has set in an environment
 * variable. */
static int device_number(int n, int local_rank)
{
    static const char *const names[] = { "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                         "SLURM_LOCALID" };
    for (size_t i = 0; local_rank < 0 && i < sizeof names / sizeof *names; i++) {
        const char *text = getenv(names[i]);
        if (text && *text >= '0' && *text <= '9') local_rank = (int)(strtol(text, NULL, 10) % n);
    }
    return local_rank < 0 ? 0 : local_rank % n;
}

static int choose_device(int local_rank)
{
    cudaDeviceProp prop;
    int n = 0;
    size_t left = 0, total = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0)
        return ps_fail(PS_EUNSUP, "no device: the CUDA runtime finds none: %s (%s)", cudaGetErrorString(e),
                       cudaGetErrorName(e));
    int number = device_number(n, local_rank);
    CU_TRY(cudaSetDevice(number));
    CU_TRY(cudaGetDeviceProperties(&prop, number));
    if (prop.major < 8)
        return ps_fail(PS_EUNSUP, "no device: %s has compute capability %d.%d, but at least 8.0 is needed", prop.name,
                       prop.major, prop.minor);
    CU_TRY(cudaMemGetInfo(&left, &total));
    if ((int64_t)left < memory_least)
        return ps_fail(PS_ENOMEM, "no memory: %s has %.0f MiB, of which %.0f MiB are free and at least %.0f MiB are "
                       "needed; end the other programs that use it", prop.name, (double)total / 1048576.0,
                       (double)left / 1048576.0, (double)memory_least / 1048576.0);
    ps_cu->number = number;
    ps_cu->card.sm_count = prop.multiProcessorCount;
    ps_cu->capability = 10 * prop.major + prop.minor;
    ps_cu->card.memory = (int64_t)total;
    ps_cu->shared = (int64_t)prop.sharedMemPerBlockOptin;
    snprintf(ps_cu->base.describe, sizeof ps_cu->base.describe, "%.80s, compute capability %d.%d, %d SMs, %.1f GiB, %s",
             prop.name, prop.major, prop.minor, prop.multiProcessorCount, (double)total / 1073741824.0,
             ps_cuda_gemm_describe());
    return 0;
}

/* Chooses the attention kernels for calls that both kinds of kernel support. */
static int choose_attention(void)
{
    const char *text = getenv("PS_CUDA_ATTENTION");
    ps_cu->wgmma = ps_cu->capability == 90 ? WGMMA_WHERE_FASTER : WGMMA_NEVER;
    if (!text || !*text) return 0;
    ps_cu->wgmma = strcmp(text, "wgmma") == 0 ? WGMMA_ALWAYS : WGMMA_NEVER;
    if (ps_cu->wgmma == WGMMA_NEVER && strcmp(text, "mma") != 0)
        return ps_fail(PS_EINVAL, "PS_CUDA_ATTENTION is '%s'; it must be mma or wgmma; if it is unset, each call uses "
                       "the faster one", text);
    if (ps_cu->wgmma == WGMMA_ALWAYS && ps_cu->capability != 90)
        return ps_fail(PS_EUNSUP, "PS_CUDA_ATTENTION=wgmma is for compute capability 9.0, this device has %d.%d; unset "
                       "it", ps_cu->capability / 10, ps_cu->capability % 10);
    return 0;
}

/* Finds the device's memory pool, and sets the pool to keep freed memory, so that no memory is returned to the driver
 * during a step. */
static int find_pool(void)
{
    int there = 0;
    uint64_t keep = UINT64_MAX;
    CU_TRY(cudaDeviceGetAttribute(&there, cudaDevAttrMemoryPoolsSupported, ps_cu->number));
    if (!there) return 0;
    CU_TRY(cudaDeviceGetDefaultMemPool(&ps_cu->pool, ps_cu->number));
    CU_TRY(cudaMemPoolSetAttribute(ps_cu->pool, cudaMemPoolAttrReleaseThreshold, &keep));
    return 0;
}

static int make_streams(void)
{
    CU_TRY(cudaStreamCreateWithFlags(&ps_cu->compute, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) CU_TRY(cudaStreamCreateWithFlags(&ps_cu->lane[i], cudaStreamNonBlocking));
    CU_TRY(cudaEventCreateWithFlags(&ps_cu->fence, cudaEventDisableTiming));
    CU_TRY(cudaHostAlloc((void **)&slots, (SLOTS + 1) * slot_nbytes, cudaHostAllocDefault));
    for (int i = 0; i < SLOTS; i++) CU_TRY(cudaEventCreateWithFlags(&slot_free[i], cudaEventDisableTiming));
    CU_TRY(cudaHostAlloc((void **)&ps_cu->trap_host, sizeof *ps_cu->trap_host, cudaHostAllocMapped));
    memset(ps_cu->trap_host, 0, sizeof *ps_cu->trap_host);
    CU_TRY(cudaHostGetDevicePointer((void **)&ps_cu->trap_device, ps_cu->trap_host, 0));
    CU_TRY(cudaMalloc((void **)&ps_cu->trap_taken, sizeof *ps_cu->trap_taken));
    CU_TRY(cudaMemsetAsync(ps_cu->trap_taken, 0, sizeof *ps_cu->trap_taken, ps_cu->compute));
    return 0;
}

static void fill_kernels(void)
{
    memset(kernels, 0, sizeof kernels);
    ps_cuda_fill_elementwise(kernels);
    ps_cuda_fill_copy(kernels);
    ps_cuda_fill_random(kernels);
    ps_cuda_fill_reduce(kernels);
    ps_cuda_fill_rows(kernels);
    ps_cuda_fill_norm(kernels);
    ps_cuda_fill_table(kernels);
    ps_cuda_fill_optim(kernels);
    ps_cuda_fill_update(kernels);
    ps_cuda_fill_whole(kernels);
    ps_cuda_fill_packed(kernels);
    ps_cuda_fill_matmul(kernels);
    ps_cuda_fill_attention(kernels);
    ps_cuda_fill_rope(kernels);
    ps_cuda_fill_conv(kernels);
    ps_cuda_fill_image(kernels);
    ps_cuda_fill_channel_norm(kernels);
    for (int op = 0; op < PS_OP_COUNT; op++) ps_cu->base.kernel[op] = kernels[op] ? run : NULL;
}

/* The plug-in's entry point. `layout` is the value of ps_cuda_layout() in the program's build. */
extern "C" __attribute__((visibility("default"))) int ps_cuda_plugin_open(
    const char *layout, const ps_cuda_program *program, int local_rank, ps_backend **out);
int ps_cuda_plugin_open(const char *layout, const ps_cuda_program *program, int local_rank, ps_backend **out)
{
    char own[128];
    ps_cuda_host = program;
    ps_cuda_layout(own, sizeof own);
    if (strcmp(layout, own) != 0)
        return ps_fail(PS_EUNSUP, "no library: libps_cuda.so was built from other sources than psluajit (%s, not %s); "
                       "rebuild both", own, layout);
    if (ps_cu) return ps_fail(PS_ESTATE, "device cuda is already open in another context of this process; close that "
                              "context first");
    ps_cu = (ps_cuda *)ps_alloc0(sizeof *ps_cu);
    if (!ps_cu) return ps_fail_nomem(sizeof *ps_cu);
    ps_backend *be = &ps_cu->base;
    const char *sync = getenv("PS_CUDA_SYNC");
    ps_cu->sync = sync && *sync && strcmp(sync, "0") != 0;
    ps_cu->told = ps_cu->sync && strcmp(sync, "trace") == 0;
    int rc = choose_device(local_rank);
    if (rc == 0) rc = choose_attention();
    if (rc == 0) rc = find_pool();
    if (rc == 0) rc = make_streams();
    if (rc == 0) rc = ps_cuda_gemm_open();
    if (rc < 0) {
        if (ps_cu->broken) ps_fail(rc, "it does not start: %s", ps_cu->what_broke);
        close_cuda(be);
        return rc;
    }
    be->name = "cuda";
    be->fast_bf16 = true;
    be->fuses = true;
    be->region_new = region_new;
    be->region_free = region_free;
    be->bytes_available = bytes_available;
    be->copy_in = copy_in;
    be->clear = clear;
    be->copy_out = copy_out;
    be->copy_start = copy_start;
    be->copy_wait = copy_wait;
    be->time_begin = ps_cuda_time_begin;
    be->time_end = ps_cuda_time_end;
    be->time_read = ps_cuda_time_read;
    be->scratch_nbytes = scratch_nbytes;
    be->close = close_cuda;
#ifdef PS_HAVE_NCCL
    be->wire = &ps_cuda_nccl;
#endif
    fill_kernels();
    *out = be;
    return 0;
}
