/* SPDX-License-Identifier: BSD-3-Clause
 * The wire of device cuda. It moves bytes between the GPUs of several processes, over NCCL. The library is loaded when
 * a group of ranks first exchanges memory of the device, so a machine without NCCL can still use its device.
 *
 * The wire uses only NCCL's sends and receives. Each exchange is one NCCL group of sends and receives. NCCL's
 * reductions are not used, because they do not add in the order of the ranks and round every partial sum to the type
 * that is sent. Communicators are non-blocking: each call returns at once and is polled until it ends. A peer that has
 * died therefore blocks no rank.
 *
 * Streams: exchanges run on the stream `moving`. Sums and copies run on the stream `adding`, so that they can overlap
 * the next exchange. Events order the two streams: a sum runs after the exchange that was passed to `follow`, and an
 * exchange runs after the earlier sums. The function `after` takes a mark. It makes both streams wait for the work that
 * was queued on `compute` when the mark was made. `compute` waits for the end of a wire's work by an event
 * (event_follow).
 *
 * Threads: `mark`, event_now and event_follow must be called by the backend's thread. Any thread can call the other
 * functions, because they use only one field of ps_cu, the device's index.
 *
 * If another rank never joins an exchange, the exchange blocks `compute` until the communicator is aborted. Results
 * that are computed after the abort are invalid, and reads of memory report this (lost).
 *
 * Ending: NCCL's threads serve the peers on the same machine until those peers end, too. So both destroying and
 * aborting a communicator may wait for other ranks. Both run on a separate thread, which is abandoned after a few
 * seconds. If there was no error, the communicator is finalized first, because its last bytes may not have reached the
 * network yet. */
#include <atomic>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <nccl.h>
#include "backend/cuda/nccl.h"

static_assert(PS_WIRE_ID_NBYTES == sizeof(ncclUniqueId), "the number that ranks share is NCCL's");

enum { VERSION_NEEDED = 21400 };               /* NCCL has non-blocking communicators since 2.14 */

static struct {
    void *lib;
    ncclResult_t (*version)(int *out);
    ncclResult_t (*new_id)(ncclUniqueId *out);
    ncclResult_t (*init)(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *config);
    ncclResult_t (*state)(ncclComm_t comm, ncclResult_t *out);
    const char *(*error_text)(ncclResult_t result);
    const char *(*last_error)(ncclComm_t comm);
    ncclResult_t (*finalize)(ncclComm_t comm);
    ncclResult_t (*destroy)(ncclComm_t comm);
    ncclResult_t (*abort)(ncclComm_t comm);
    ncclResult_t (*group_start)(void);
    ncclResult_t (*group_end)(void);
    ncclResult_t (*send)(const void *p, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
    ncclResult_t (*recv)(void *p, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
    ncclResult_t (*all_gather)(const void *in, void *out, size_t n, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream);
    ncclResult_t (*all_reduce)(const void *in, void *out, size_t n, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream);
} nccl;

enum { NOTHING = -1, CONNECTION = PS_WIRE_LANES };

struct ps_wire {
    ncclComm_t comm;                           /* NULL after an abort, and for a world of one rank, which does not use
                                                * NCCL */
    /* number: the device's index, stored here because a wire can be closed after the device */
    int rank, size, number;
    cudaStream_t moving, adding;
    cudaEvent_t marks[PS_WIRE_MARKS];          /* events on `compute`, reused in turn */
    int next_mark;
    cudaEvent_t ended[PS_WIRE_LANES + 1];      /* one event per lane, and one for PS_WIRE_LOCAL */
    /* the lane whose exchange NCCL has not queued yet, or a value of the enum above */
    int starting;
};

static int check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return 0;
    return ps_fail(PS_EBACKEND, "moving bytes between GPUs: %s (%s) in %.100s", cudaGetErrorString(e),
                   cudaGetErrorName(e), what);
}
#define TRY_CUDA(call) PS_TRY(check((call), #call))

/* Reports an error of NCCL, with NCCL's text of details if there is one. If the device has failed, reports the device's
 * error instead, because it is the cause of the failed connections. */
static int nccl_failed(const ps_wire *w, ncclResult_t r, const char *what)
{
    cudaError_t e = w && w->ended[0] ? cudaEventQuery(w->ended[0]) : cudaSuccess;
    if (e != cudaSuccess) cudaGetLastError();
    if (e != cudaSuccess && e != cudaErrorNotReady) return check(e, what);
    const char *more = nccl.last_error ? nccl.last_error(w ? w->comm : NULL) : NULL;
    bool has = more && *more;
    return ps_fail(r == ncclSystemError || r == ncclRemoteError ? PS_EIO : PS_EBACKEND,
                   "NCCL, %s: %s%s%.300s; NCCL_DEBUG=WARN has it say more", what, nccl.error_text(r), has ? ": " : "",
                   has ? more : "");
}

static bool went(ncclResult_t r) { return r == ncclSuccess || r == ncclInProgress; }

/* -- the library --------------------------------------------------------------------------------------------------- */
static bool find(const char *name, void *out)
{
    void *p = dlsym(nccl.lib, name);
    memcpy(out, &p, sizeof p);
    return p != NULL;
}

static int load(ps_backend *be)
{
    static const char missing[] = "NCCL cannot be had: ";
    if (nccl.lib) return 0;
    nccl.lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!nccl.lib)
        return ps_fail(PS_EUNSUP, "%s%s; install it (libnccl2) or have LD_LIBRARY_PATH name its folder", missing,
                       dlerror());
    bool all = find("ncclGetVersion", &nccl.version) && find("ncclGetUniqueId", &nccl.new_id) &&
               find("ncclCommInitRankConfig", &nccl.init) && find("ncclCommGetAsyncError", &nccl.state) &&
               find("ncclGetErrorString", &nccl.error_text) && find("ncclCommAbort", &nccl.abort) &&
               find("ncclCommFinalize", &nccl.finalize) && find("ncclCommDestroy", &nccl.destroy) &&
               find("ncclGroupStart", &nccl.group_start) && find("ncclGroupEnd", &nccl.group_end) &&
               find("ncclSend", &nccl.send) && find("ncclRecv", &nccl.recv) &&
               find("ncclAllGather", &nccl.all_gather) && find("ncclAllReduce", &nccl.all_reduce);
    int version = 0;
    find("ncclGetLastError", &nccl.last_error);
    if (all && nccl.version(&version) == ncclSuccess && version >= VERSION_NEEDED) return 0;
    if (!all && !nccl.version) ps_fail(PS_EUNSUP, "%slibnccl.so.2 has no ncclGetVersion, so it is not NCCL", missing);
    else ps_fail(PS_EUNSUP, "%slibnccl.so.2 is too old (version %d); 2.14 is needed", missing, version);
    dlclose(nccl.lib);
    memset(&nccl, 0, sizeof nccl);
    return PS_EUNSUP;
}

/* Writes the device's PCI address and the host name, so that ranks can find out whether they share a device. */
static int device_name(ps_backend *be, char *name)
{
    char host[64] = "", bus[24] = "";
    gethostname(host, sizeof host - 1);
    TRY_CUDA(cudaDeviceGetPCIBusId(bus, (int)sizeof bus, ps_cu->number));
    memset(name, 0, PS_WIRE_NAME_NBYTES);
    snprintf(name, PS_WIRE_NAME_NBYTES, "%s of %s", bus, host);
    return 0;
}

static int new_id(ps_backend *be, char *id)
{
    ncclUniqueId made;
    ncclResult_t r = nccl.new_id(&made);
    if (r != ncclSuccess) return nccl_failed(NULL, r, "making the number that ranks meet by");
    memcpy(id, made.internal, sizeof made.internal);
    return 0;
}

/* -- opening and closing ------------------------------------------------------------------------------------------- */
/* Ends a communicator on a separate thread. Waits for that thread for at most `seconds`. */
static void end_comm(ncclComm_t comm, bool sound, double seconds)
{
    typedef std::chrono::steady_clock clock;
    const auto until = clock::now() + std::chrono::milliseconds((int64_t)(seconds * 1e3));
    std::atomic<int> *told = new (std::nothrow) std::atomic<int>(0);     /* two threads use it; the thread that finishes
                                                                          * last deletes it */
    if (!told) return;
    auto work = [comm, sound, until, told] {
        ncclResult_t r = sound ? nccl.finalize(comm) : ncclRemoteError;
        while (r == ncclInProgress && clock::now() < until) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            if (nccl.state(comm, &r) != ncclSuccess) r = ncclRemoteError;
        }
        if (r == ncclSuccess) nccl.destroy(comm);
        else nccl.abort(comm);
        if (told->exchange(1)) delete told;
    };
    try {
        std::thread(work).detach();
    } catch (const std::system_error &) {      /* no thread could be started, so the communicator is not ended */
        delete told;
        return;
    }
    while (!told->load() && clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (told->exchange(1)) delete told;
}

enum { ABORT_S = 2, CLOSE_S = 5 };

static void let_go(ps_wire *w, bool sound)
{
    ncclComm_t comm = w->comm;
    w->comm = NULL;
    w->starting = NOTHING;
    if (comm) end_comm(comm, sound, sound ? CLOSE_S : ABORT_S);
}

static void lose(ps_backend *be, int code, const char *why) { ps_cuda_lose(code, why); }
static int lost(ps_backend *be, bool told) { return ps_cuda_lost(told); }

/* Waits for sums and copies, because they use the callers' memory. Even after an error, a sum or copy runs only after
 * the earlier exchanges have ended. */
static void wait_for_local(const ps_wire *w, double seconds)
{
    typedef std::chrono::steady_clock clock;
    const auto until = clock::now() + std::chrono::milliseconds((int64_t)(seconds * 1e3));
    while (cudaEventQuery(w->ended[PS_WIRE_LOCAL]) == cudaErrorNotReady && clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    cudaGetLastError();
}

static void abort_wire(ps_wire *w)
{
    cudaSetDevice(w->number);
    let_go(w, false);
    wait_for_local(w, ABORT_S);
}

static void close_wire(ps_wire *w)
{
    cudaSetDevice(w->number);
    let_go(w, w->starting == NOTHING);
    for (int i = 0; i <= PS_WIRE_LANES; i++)
        if (w->ended[i]) cudaEventDestroy(w->ended[i]);
    for (int i = 0; i < PS_WIRE_MARKS; i++)
        if (w->marks[i]) cudaEventDestroy(w->marks[i]);
    if (w->moving) cudaStreamDestroy(w->moving);
    if (w->adding) cudaStreamDestroy(w->adding);
    ps_free(w);
}

static int make_streams(ps_wire *w)
{
    TRY_CUDA(cudaStreamCreateWithFlags(&w->moving, cudaStreamNonBlocking));
    TRY_CUDA(cudaStreamCreateWithFlags(&w->adding, cudaStreamNonBlocking));
    for (int i = 0; i < PS_WIRE_MARKS; i++)
        TRY_CUDA(cudaEventCreateWithFlags(&w->marks[i], cudaEventDisableTiming));
    for (int i = 0; i <= PS_WIRE_LANES; i++)
        TRY_CUDA(cudaEventCreateWithFlags(&w->ended[i], cudaEventDisableTiming));
    return 0;
}

static int begin_connection(ps_wire *w, const char *id)
{
    ncclUniqueId number;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    memcpy(number.internal, id, sizeof number.internal);
    ncclResult_t r = nccl.init(&w->comm, w->size, number, w->rank, &config);
    if (!went(r)) return nccl_failed(w, r, "connecting the ranks");
    w->starting = CONNECTION;
    return 0;
}

static int open_wire(ps_backend *be, const char *id, int rank, int size, ps_wire **out)
{
    ps_wire *w = (ps_wire *)ps_alloc0(sizeof *w);
    if (!w) return ps_fail_nomem(sizeof *w);
    w->rank = rank;
    w->size = size;
    w->number = ps_cu->number;
    w->starting = NOTHING;
    cudaSetDevice(w->number);
    int rc = make_streams(w);
    if (rc == 0 && id) rc = begin_connection(w, id);
    if (rc < 0) close_wire(w);
    else *out = w;
    return rc;
}

/* -- moving -------------------------------------------------------------------------------------------------------- */
static int ready(ps_wire *w)
{
    ncclResult_t state = ncclSuccess;
    if (w->starting == NOTHING) return 1;
    ncclResult_t asked = nccl.state(w->comm, &state);
    if (asked != ncclSuccess) state = asked;
    if (state == ncclInProgress) return 0;
    if (state != ncclSuccess) return nccl_failed(w, state, w->starting == CONNECTION ? "connecting the ranks"
                                                                                     : "starting an exchange");
    int lane = w->starting;
    w->starting = NOTHING;
    cudaSetDevice(w->number);
    if (lane != CONNECTION) TRY_CUDA(cudaEventRecord(w->ended[lane], w->moving));
    return 1;
}

static int mark(ps_wire *w)
{
    int i = w->next_mark;
    w->next_mark = (i + 1) % PS_WIRE_MARKS;
    TRY_CUDA(cudaEventRecord(w->marks[i], ps_cu->compute));
    return i;
}

static int after(ps_wire *w, int i)
{
    cudaSetDevice(w->number);
    TRY_CUDA(cudaStreamWaitEvent(w->moving, w->marks[i], 0));
    TRY_CUDA(cudaStreamWaitEvent(w->adding, w->marks[i], 0));
    return 0;
}

/* Ends a group of calls and reports the first failure. The group must be ended even if a call of it has failed
 * (`sent`). */
static int end_group(ps_wire *w, ncclResult_t sent, int lane, const char *what)
{
    ncclResult_t ended = nccl.group_end(), r = went(sent) ? ended : sent, state = ncclSuccess;
    /* if an earlier exchange has failed, its error is reported */
    if (!went(r) && nccl.state(w->comm, &state) == ncclSuccess && !went(state)) r = state;
    if (!went(r)) return nccl_failed(w, r, what);
    w->starting = lane;
    return 0;
}

static int begin(ps_wire *w, int lane, const ps_comm_part *send, const ps_comm_part *recv)
{
    bool none = true;
    for (int r = 0; r < w->size; r++)
        if (r != w->rank && (send[r].nbytes || recv[r].nbytes)) none = false;
    cudaSetDevice(w->number);
    TRY_CUDA(cudaStreamWaitEvent(w->moving, w->ended[PS_WIRE_LOCAL], 0));      /* waits for sums and copies; exchanges
                                                                                * run on `moving` itself */
    if (none || !w->comm) return check(cudaEventRecord(w->ended[lane], w->moving), "an exchange of nothing");
    ncclResult_t r = nccl.group_start();
    if (r != ncclSuccess) return nccl_failed(w, r, "an exchange");
    for (int i = 1; went(r) && i < w->size; i++) {       /* each rank starts with its next rank, so that not all ranks
                                                          * send to the same rank */
        int to = (w->rank + i) % w->size, from = (w->rank - i + w->size) % w->size;
        if (recv[from].nbytes)
            r = nccl.recv(recv[from].address, (size_t)recv[from].nbytes, ncclUint8, from, w->comm, w->moving);
        if (went(r) && send[to].nbytes)
            r = nccl.send(send[to].address, (size_t)send[to].nbytes, ncclUint8, to, w->comm, w->moving);
    }
    return end_group(w, r, lane, "an exchange");
}

static int follow(ps_wire *w, int lane)
{
    cudaSetDevice(w->number);
    return check(cudaStreamWaitEvent(w->adding, w->ended[lane], 0), "the order of sums and exchanges");
}

static int sum(ps_wire *w, int dtype, int n, char *const *at, int64_t numel, char *to)
{
    cudaSetDevice(w->number);
    PS_TRY(ps_cuda_add_up(w->adding, dtype, n, at, numel, to));
    TRY_CUDA(cudaPeekAtLastError());
    TRY_CUDA(cudaEventRecord(w->ended[PS_WIRE_LOCAL], w->adding));
    return 0;
}

static int copy(ps_wire *w, void *to, const void *from, int64_t nbytes)
{
    cudaSetDevice(w->number);
    TRY_CUDA(cudaMemcpyAsync(to, from, (size_t)nbytes, cudaMemcpyDeviceToDevice, w->adding));
    TRY_CUDA(cudaEventRecord(w->ended[PS_WIRE_LOCAL], w->adding));
    return 0;
}

static int ended(ps_wire *w, int lane)
{
    cudaError_t e = cudaEventQuery(w->ended[lane]);
    if (e == cudaSuccess) return 1;
    if (e != cudaErrorNotReady) return check(e, "an exchange, or work that overlapped it");
    cudaGetLastError();
    ncclResult_t state = ncclSuccess;
    if (lane == PS_WIRE_LOCAL || !w->comm || nccl.state(w->comm, &state) != ncclSuccess) return 0;
    return went(state) ? 0 : nccl_failed(w, state, "an exchange");
}

/* -- moments ------------------------------------------------------------------------------------------------------- */
struct ps_wire_event {
    cudaEvent_t at;
    int number; /* the device's index, stored here because an event can be freed after the device is closed */
};

static int event_new(ps_backend *be, ps_wire_event **out)
{
    ps_wire_event *e = (ps_wire_event *)ps_alloc0(sizeof *e);
    if (!e) return ps_fail_nomem(sizeof *e);
    e->number = ps_cu->number;
    cudaSetDevice(e->number);
    int rc = check(cudaEventCreateWithFlags(&e->at, cudaEventDisableTiming), "making an event");
    if (rc < 0) ps_free(e);
    else *out = e;
    return rc;
}

static void event_free(ps_wire_event *e)
{
    cudaSetDevice(e->number);
    cudaEventDestroy(e->at);
    ps_free(e);
}

static int event_now(ps_backend *be, ps_wire_event *e)
{
    return check(cudaEventRecord(e->at, ps_cu->compute), "an event of kernels");
}

static int event_follow(ps_backend *be, ps_wire_event *e)
{
    return check(cudaStreamWaitEvent(ps_cu->compute, e->at, 0), "the order of kernels and messages");
}

static int event_before(ps_wire *w, ps_wire_event *e)
{
    cudaSetDevice(w->number);
    return check(cudaStreamWaitEvent(w->moving, e->at, 0), "the order of messages and kernels");
}

static int event_end(ps_wire *w, ps_wire_event *e)
{
    cudaSetDevice(w->number);
    TRY_CUDA(cudaStreamWaitEvent(w->moving, w->ended[PS_WIRE_LOCAL], 0));      /* waits for sums and copies; exchanges
                                                                                * run on `moving` itself */
    return check(cudaEventRecord(e->at, w->moving), "the end of what was begun");
}

static int event_over(ps_wire_event *e)
{
    cudaSetDevice(e->number);
    cudaError_t r = cudaEventQuery(e->at);
    if (r == cudaSuccess) return 1;
    if (r != cudaErrorNotReady) return check(r, "a message");
    cudaGetLastError();
    return 0;
}

static int raw(ps_wire *w, bool all_reduce, float *out, const float *in, int64_t count)
{
    cudaSetDevice(w->number);
    if (!w->comm) return ps_fail(PS_EUNSUP, "this world of one rank does not use NCCL, so there are no collectives of "
                                 "NCCL to compare with");
    ncclResult_t r = nccl.group_start();
    if (r != ncclSuccess) return nccl_failed(w, r, "its own collective");
    if (all_reduce) r = nccl.all_reduce(in, out, (size_t)count, ncclFloat32, ncclSum, w->comm, w->moving);
    else r = nccl.all_gather(in, out, (size_t)count, ncclFloat32, w->comm, w->moving);
    return end_group(w, r, 0, "its own collective");
}

/* -- memory -------------------------------------------------------------------------------------------------------- */
static int memory(ps_wire *w, int64_t nbytes, void **out)
{
    cudaSetDevice(w->number);
    if (ps_alloc_should_fail())
        return ps_fail(PS_ENOMEM, "no memory for %lld bytes, because a test made this allocation fail",
                       (long long)nbytes);
    cudaError_t e = cudaMalloc(out, (size_t)nbytes);
    if (e != cudaErrorMemoryAllocation) return check(e, "cudaMalloc");
    cudaGetLastError();
    return ps_fail(PS_ENOMEM, "cuda has no %.1f MiB for sums over ranks, which are not counted in memory.device; lower "
                   "memory.device", (double)nbytes / 1048576.0);
}

static void memory_free(ps_wire *w, void *p)
{
    cudaSetDevice(w->number);
    cudaFree(p);
}

extern const ps_wire_table ps_cuda_nccl = {
    "nccl", load, device_name, PS_CUDA_MOST_RANKS, new_id, open_wire, ready, mark, after, begin, follow, sum, copy,
    ended, event_new, event_free, event_now, event_follow, event_before, event_end, event_over,
    memory, memory_free, abort_wire, close_wire, lose, lost, raw
};
