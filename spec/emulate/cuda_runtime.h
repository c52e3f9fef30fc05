/* SPDX-License-Identifier: BSD-3-Clause
 * A stand-in for <cuda_runtime.h>, for tests on machines without a GPU: kernels run on the processor, block after
 * block, with each thread of a block as a fibre, which is switched at barriers and warp operations (fibres.cpp).
 * Streams are queues of work that is performed when the host waits for it, as late as possible and in an order that
 * only streams and events constrain (streams.cpp). Device memory exists from its allocation to its release in its
 * stream's order, and pinned host memory is checked (memory.cpp). The emulator counts calls that make the host wait or
 * allocate memory (ps_emu_take_counts). It shows whether kernels compute the right values and whether streams are
 * ordered where necessary; an access that is not aligned to its type traps, as on the hardware. It cannot show races
 * between blocks, limits on registers and shared memory, or speed.
 *
 * It has only the functions that src/backend/cuda uses. PS_EMULATE_CUDA is defined so that device.h leaves out inline
 * assembly. */
#ifndef PS_EMULATE_CUDA_RUNTIME_H
#define PS_EMULATE_CUDA_RUNTIME_H
#define PS_EMULATE_CUDA 1
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__
#define __grid_constant__

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{ x, y, z, w }; }

/* -- the running thread and its block (fibres.cpp) ----------------------------------------------------------------- */
struct ps_emu_fibre {
    void *sp;
    char *stack;
    dim3 thread;
    int lane, warp, barrier_turn;
    bool ended, at_barrier;
};
extern ps_emu_fibre *ps_emu_now;
extern dim3 ps_emu_grid, ps_emu_block_dim, ps_emu_block;
extern unsigned char *ps_emu_dynamic;
#define threadIdx (ps_emu_now->thread)
#define blockIdx ps_emu_block
#define blockDim ps_emu_block_dim
#define gridDim ps_emu_grid
#define warpSize 32

void ps_emu_barrier(void);                     /* number of threads in the block that have not ended */
void ps_emu_warp_barrier(void);
/* [32][16] slots of this warp for one exchange. They are requested and filled before a barrier of the warp, and read
 * after it. Two buffers alternate, so that no thread needs to wait for the readers. */
uint64_t *ps_emu_warp_slots(void);
/* Runs body(context) once for each thread of each block. */
void ps_emu_run(dim3 grid, dim3 block, size_t shared_nbytes, void (*body)(void *), void *context);
/* If launches are only listed (PS_EMULATE_LIST), lists this launch and returns true. */
bool ps_emu_listed(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Copies 4 or 16 bytes (zeros if src is NULL). The copy happens when it is waited for, or immediately in some
 * blocks. */
void ps_emu_async_copy(void *dst, const void *src, int nbytes);
void ps_emu_async_commit(void);
void ps_emu_async_wait(int but);

/* Warpgroup products (wgmma.cpp): wgmma.fence, commit_group and wait_group; m64nNk16 of bf16 or fp16 with A in
 * registers or by descriptor, and B by descriptor; fence.proxy.async; and the descriptor address of an object in
 * dynamic shared memory. */
void ps_emu_wgmma_fence(void);
void ps_emu_wgmma(float *d, const uint32_t *a_registers, uint64_t a, uint64_t b, int n, bool bf16, int trans_a,
                  int trans_b, bool add);
void ps_emu_wgmma_commit(void);
void ps_emu_wgmma_wait(int but);
void ps_emu_async_fence(void);
uint32_t ps_emu_shared_address(const void *p);

static inline void __syncthreads(void) { ps_emu_barrier(); }
static inline void __syncwarp(unsigned = 0xffffffffu) { ps_emu_warp_barrier(); }
static inline void __threadfence_system(void) {}
static inline void __threadfence(void) {}

template <class T> static inline T ps_emu_exchange(T v, int from)
{
    static_assert(sizeof(T) <= 8, "a warp exchanges up to 8 bytes");
    uint64_t *slots = ps_emu_warp_slots();
    memcpy(&slots[16 * ps_emu_now->lane], &v, sizeof v);
    ps_emu_warp_barrier();
    T got;
    memcpy(&got, &slots[16 * (from & 31)], sizeof got);
    return got;
}
template <class T> static inline T __shfl_xor_sync(unsigned, T v, int mask)
{
    return ps_emu_exchange(v, ps_emu_now->lane ^ mask);
}
template <class T> static inline T __shfl_sync(unsigned, T v, int lane) { return ps_emu_exchange(v, lane); }
static inline int __any_sync(unsigned, int v)
{
    uint64_t *slots = ps_emu_warp_slots();
    slots[16 * ps_emu_now->lane] = v != 0;
    ps_emu_warp_barrier();
    int any = 0;
    for (int k = 0; k < 32; k++) any |= slots[16 * k] != 0;
    return any;
}

static inline int atomicAdd(int *p, int v) { int old = *p; *p = old + v; return old; }
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long v)
{
    unsigned long long old = *p;
    *p = old + v;
    return old;
}
static inline int atomicCAS(int *p, int compare, int v) { int old = *p; if (old == compare) *p = v; return old; }

static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float ps_emu_expf(float x) { return expf(x); }
#define __expf ps_emu_expf                     /* glibc declares this name without exporting it */
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

/* -- work of streams ----------------------------------------------------------------------------------------------- */
/* go() is called when the work is due in its stream, and again until it returns true, which means that the work is
 * complete. It does not call the emulator. */
struct ps_emu_work {
    virtual bool go(void) = 0;
    virtual ~ps_emu_work() {}
};
struct ps_emu_stream {
    virtual void add(ps_emu_work *work) = 0;       /* appends the stream's last work; the stream deletes it */
    virtual void drive(void) = 0;                  /* as if the host had often checked whether all work is complete */
};
typedef ps_emu_stream *cudaStream_t;

template <class F> struct ps_emu_call : ps_emu_work {
    F call;
    ps_emu_call(F f) : call(std::move(f)) {}
    bool go(void) override { call(); return true; }
};
template <class F> static inline void ps_emu_add(cudaStream_t s, F call)
{
    s->add(new ps_emu_call<F>(std::move(call)));
}

/* -- launching ----------------------------------------------------------------------------------------------------- */
/* A kernel with its launch configuration. Calling it with arguments queues it in its stream, with copies of the
 * arguments. */
template <class... P> struct ps_emu_launch {
    void (*kernel)(P...);
    dim3 grid, block;
    size_t shared_nbytes;
    cudaStream_t stream;
    void operator()(P... p) const
    {
        struct bound { void (*kernel)(P...); std::tuple<P...> arguments; };
        bound b = { kernel, std::tuple<P...>(p...) };
        dim3 g = grid, t = block;
        size_t nbytes = shared_nbytes;
        ps_emu_add(stream, [b, g, t, nbytes] {
            ps_emu_run(g, t, nbytes, [](void *at) { std::apply(((bound *)at)->kernel, ((bound *)at)->arguments); },
                       (void *)&b);
        });
    }
};
template <class... P> static inline ps_emu_launch<P...> ps_emu_launcher(void (*kernel)(P...), dim3 grid, dim3 block,
                                                                         size_t shared_nbytes, cudaStream_t stream)
{
    return ps_emu_launch<P...>{ kernel, grid, block, shared_nbytes, stream };
}
#define PS_START(kernel, grid, block, shared_nbytes, stream, ...)                                            \
    do {                                                                                                     \
        dim3 grid_ = grid, block_ = block;                                                                   \
        if (!ps_emu_listed("%s\t%u x %u x %u\t%u\t%zu\t%s", #kernel, grid_.x, grid_.y, grid_.z,              \
                           block_.x * block_.y * block_.z, (size_t)(shared_nbytes), __PRETTY_FUNCTION__))    \
            ps_emu_launcher(kernel, grid_, block_, shared_nbytes, stream)(__VA_ARGS__);                      \
    } while (0)
#define PS_DYNAMIC_SHARED(name) unsigned char *name = ps_emu_dynamic

/* -- the runtime --------------------------------------------------------------------------------------------------- */
typedef enum cudaError {
    cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorNoDevice = 100,
    cudaErrorIllegalAddress = 700, cudaErrorNotReady = 600, cudaErrorUnknown = 999,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713
} cudaError_t;
typedef struct ps_emu_event *cudaEvent_t;
typedef enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 }
    cudaMemcpyKind;
enum { cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2, cudaHostAllocMapped = 2,
       cudaHostAllocDefault = 0, cudaHostRegisterDefault = 0 };
typedef enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 } cudaFuncAttribute;
typedef struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlockOptin;
    int major, minor, multiProcessorCount;
} cudaDeviceProp;

cudaError_t cudaMalloc(void **p, size_t nbytes);
cudaError_t cudaFree(void *p);
typedef struct ps_emu_pool *cudaMemPool_t;
typedef enum cudaMemPoolAttr {
    cudaMemPoolAttrReleaseThreshold, cudaMemPoolAttrReservedMemCurrent, cudaMemPoolAttrUsedMemCurrent
} cudaMemPoolAttr;
typedef enum cudaDeviceAttr { cudaDevAttrMemoryPoolsSupported = 115 } cudaDeviceAttr;
cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr which, int device);
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *out, int device);
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void *value);
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void *value);
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep);
cudaError_t cudaMallocAsync(void **p, size_t nbytes, cudaStream_t s);
cudaError_t cudaFreeAsync(void *p, cudaStream_t s);
cudaError_t cudaMemGetInfo(size_t *free_nbytes, size_t *total);
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags);
cudaError_t cudaHostUnregister(void *p);
static inline cudaError_t cudaHostGetDevicePointer(void **out, void *p, unsigned) { *out = p; return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device);
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int device);
const char *cudaGetErrorName(cudaError_t e);
const char *cudaGetErrorString(cudaError_t e);
template <class F> static inline cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) { return cudaSuccess; }
#endif
