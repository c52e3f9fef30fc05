/* SPDX-License-Identifier: BSD-3-Clause
 * Definitions that the kernels of the cuda backend share: element types, conversions, indexing, and sums over warps and
 * blocks. Host functions such as make_places are plain C++.
 *
 * Kernels are also tested without a GPU. For these tests, a plain C++ compiler compiles the files that include this
 * header, with spec/emulate/cuda_runtime.h. All inline assembly is in this file, and is excluded when the tests are
 * compiled. */
#ifndef PS_CUDA_DEVICE_H
#define PS_CUDA_DEVICE_H
#include "backend/cuda/cuda.h"
#include "base/half.h"
#include "base/philox.h"
#ifndef PS_EMULATE_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define PS_START(kernel, grid, block, shared_nbytes, stream, ...) \
    kernel<<<(grid), (block), (shared_nbytes), (stream)>>>(__VA_ARGS__)
#define PS_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif
#define PS_LAUNCH(...) do { if (!ps_cu->dry) { PS_START(__VA_ARGS__); } } while (0)
#define DEV static __device__ __forceinline__
/* Declares a kernel. The first number is the maximum number of threads per block. The compiler limits the registers per
 * thread so that a block of that size can run. The second number is optional: it is the number of blocks that should
 * fit on a multiprocessor. */
#define KERNEL_UP_TO(...) static __global__ void __launch_bounds__(__VA_ARGS__)

/* -- element types ------------------------------------------------------------------------------------------------- */
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class T> struct type_info;
template <> struct type_info<float> { typedef float acc; enum { dtype = PS_F32 }; };
template <> struct type_info<bf16> { typedef float acc; enum { dtype = PS_BF16 }; };
template <> struct type_info<f16> { typedef float acc; enum { dtype = PS_F16 }; };
template <> struct type_info<double> { typedef double acc; enum { dtype = PS_F64 }; };

#ifdef PS_EMULATE_CUDA
DEV float bf16_up(uint16_t h) { return ps_bf16_to_f32(h); }
DEV float f16_up(uint16_t h) { return ps_f16_to_f32(h); }
DEV uint16_t bf16_down(float f) { return ps_f32_to_bf16(f); }
DEV uint16_t f16_down(float f) { return ps_f32_to_f16(f); }
DEV float exp2_fast(float x) { return exp2f(x); }
#else
DEV float bf16_up(uint16_t h) { return __uint_as_float((unsigned)h << 16); }
DEV float f16_up(uint16_t h) { return __half2float(__ushort_as_half(h)); }
DEV uint16_t bf16_down(float f) { return __bfloat16_as_ushort(__float2bfloat16_rn(f)); }
DEV uint16_t f16_down(float f) { return __half_as_ushort(__float2half_rn(f)); }
/* Returns 2^x in one instruction, within 2 ulp. Returns 0 for x below -126. */
DEV float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

DEV float up(float x) { return x; }
DEV double up(double x) { return x; }
DEV float up(bf16 x) { return bf16_up(x.bits); }
DEV float up(f16 x) { return f16_up(x.bits); }
template <class T> struct down_to;
template <> struct down_to<float> { DEV float of(double x) { return (float)x; } DEV float of(float x) { return x; } };
template <> struct down_to<double> { DEV double of(double x) { return x; } };
template <> struct down_to<bf16> {
    DEV bf16 of(float x) { bf16 h = { bf16_down(x) }; return h; }
};
template <> struct down_to<f16> {
    DEV f16 of(float x) { f16 h = { f16_down(x) }; return h; }
};
template <class T, class A> DEV T down(A x) { return down_to<T>::of(x); }

/* Load or store one element whose type is known only at run time. As in ref, the suffix names the arithmetic: _f for
 * fp32, _d for fp64, and _i for integers. */
DEV float load_f(const void *p, int dtype, int64_t i)
{
    switch (dtype) {
    case PS_F32: return ((const float *)p)[i];
    case PS_BF16: return bf16_up(((const uint16_t *)p)[i]);
    case PS_F16: return f16_up(((const uint16_t *)p)[i]);
    case PS_F64: return (float)((const double *)p)[i];
    case PS_I32: return (float)((const int32_t *)p)[i];
    case PS_I64: return (float)((const int64_t *)p)[i];
    case PS_U8: return (float)((const uint8_t *)p)[i];
    default: return ((const uint8_t *)p)[i] != 0 ? 1.0f : 0.0f;
    }
}
DEV double load_d(const void *p, int dtype, int64_t i)
{
    switch (dtype) {
    case PS_F64: return ((const double *)p)[i];
    case PS_I32: return (double)((const int32_t *)p)[i];
    case PS_I64: return (double)((const int64_t *)p)[i];
    default: return (double)load_f(p, dtype, i);
    }
}
/* Truncates x to an integer and clamps the integer to the range from low to high. NaN becomes 0. */
DEV int64_t to_int(double x, int64_t low, int64_t high)
{
    if (x != x) return 0;
    if (x >= (double)high) return high;
    if (x <= (double)low) return low;
    return (int64_t)x;
}
DEV int64_t load_i(const void *p, int dtype, int64_t i)
{
    switch (dtype) {
    case PS_I32: return ((const int32_t *)p)[i];
    case PS_I64: return ((const int64_t *)p)[i];
    case PS_U8: return ((const uint8_t *)p)[i];
    case PS_BOOL: return ((const uint8_t *)p)[i] != 0;
    default: return to_int(load_d(p, dtype, i), INT64_MIN, INT64_MAX);
    }
}
DEV void store_int_type(void *p, int dtype, int64_t i, double x)
{
    switch (dtype) {
    case PS_I32: ((int32_t *)p)[i] = (int32_t)to_int(x, INT32_MIN, INT32_MAX); break;
    case PS_I64: ((int64_t *)p)[i] = to_int(x, INT64_MIN, INT64_MAX); break;
    case PS_U8: ((uint8_t *)p)[i] = (uint8_t)to_int(x, 0, UINT8_MAX); break;
    default: ((uint8_t *)p)[i] = x != 0; break;
    }
}
DEV void store_f(void *p, int dtype, int64_t i, float x)
{
    switch (dtype) {
    case PS_F32: ((float *)p)[i] = x; break;
    case PS_BF16: ((uint16_t *)p)[i] = bf16_down(x); break;
    case PS_F16: ((uint16_t *)p)[i] = f16_down(x); break;
    case PS_F64: ((double *)p)[i] = (double)x; break;
    default: store_int_type(p, dtype, i, (double)x); break;
    }
}
DEV void store_d(void *p, int dtype, int64_t i, double x)
{
    if (dtype == PS_F64) ((double *)p)[i] = x;
    else if (dtype <= PS_F16) store_f(p, dtype, i, (float)x);
    else store_int_type(p, dtype, i, x);
}
/* Stores x. If x does not fit in the type, it wraps around. */
DEV void store_i(void *p, int dtype, int64_t i, int64_t x)
{
    switch (dtype) {
    case PS_F32: ((float *)p)[i] = (float)x; break;
    case PS_I32: ((int32_t *)p)[i] = (int32_t)x; break;
    case PS_I64: ((int64_t *)p)[i] = x; break;
    case PS_U8: ((uint8_t *)p)[i] = (uint8_t)x; break;
    case PS_BOOL: ((uint8_t *)p)[i] = x != 0; break;
    default: store_d(p, dtype, i, (double)x); break;
    }
}
/* The functions above as members of a template whose parameter is the arithmetic type: float, double or int64_t. */
template <class A> struct access;
template <> struct access<float> {
    DEV float load(const void *p, int t, int64_t i) { return load_f(p, t, i); }
    DEV void store(void *p, int t, int64_t i, float x) { store_f(p, t, i, x); }
};
template <> struct access<double> {
    DEV double load(const void *p, int t, int64_t i) { return load_d(p, t, i); }
    DEV void store(void *p, int t, int64_t i, double x) { store_d(p, t, i, x); }
};
template <> struct access<int64_t> {
    DEV int64_t load(const void *p, int t, int64_t i) { return load_i(p, t, i); }
    DEV void store(void *p, int t, int64_t i, int64_t x) { store_i(p, t, i, x); }
};

/* A pack is 16 bytes that are accessed at once: 4 fp32, 8 bf16 or 8 fp16 elements. `p` must be a multiple of 16
 * bytes. */
template <class T> struct pack { enum { n = 16 / sizeof(T) }; T v[16 / sizeof(T)]; };
template <class T> DEV pack<T> load_pack(const T *p)
{
    union { uint4 raw; pack<T> v; } u;
    u.raw = *(const uint4 *)p;
    return u.v;
}
template <class T> DEV void store_pack(T *p, const pack<T> &v)
{
    union { uint4 raw; pack<T> v; } u;
    u.v = v;
    *(uint4 *)p = u.raw;
}
/* Returns element k of a pack that stays in four registers. If the pack were unpacked, each element would need a
 * register. k must be a constant after unrolling. */
template <class T> struct lane_of;
template <> struct lane_of<float> {
    DEV float get(const uint4 &v, int k) { return __uint_as_float(k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w); }
};
template <class T> struct lane_of_halves {
    DEV float get(const uint4 &v, int k)
    {
        unsigned two = k < 2 ? v.x : k < 4 ? v.y : k < 6 ? v.z : v.w;
        T h = { (uint16_t)(k % 2 ? two >> 16 : two) };
        return up(h);
    }
};
template <> struct lane_of<bf16> : lane_of_halves<bf16> {};
template <> struct lane_of<f16> : lane_of_halves<f16> {};
template <> struct lane_of<double> {
    DEV double get(const uint4 &v, int k)
    {
        union { uint64_t u; double d; } x;
        x.u = k ? (uint64_t)v.w << 32 | v.z : (uint64_t)v.y << 32 | v.x;
        return x.d;
    }
};
template <class T> DEV typename type_info<T>::acc lane(const uint4 &v, int k) { return lane_of<T>::get(v, k); }
/* Makes the compiler unpack v again at its next use. Otherwise the compiler would keep the unpacked values, which need
 * too many registers. */
DEV void stay_packed(uint4 &v)
{
#ifndef PS_EMULATE_CUDA
    asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
#endif
}
/* Prefetches the cache line at address p into the L2 cache. */
DEV void prefetch_line(const void *p)
{
#ifndef PS_EMULATE_CUDA
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}
static __host__ __device__ inline bool aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }

/* -- indexing ------------------------------------------------------------------------------------------------------ */
/* Maps an element's index to the element's positions in N operands. The index counts the elements of a shape in
 * row-major order. Dimensions of size 1 are dropped, and adjacent dimensions that are contiguous in all operands are
 * merged. */
template <int N> struct places {
    int ndim;
    int64_t numel;
    int64_t size[PS_MAX_DIMS], stride[N][PS_MAX_DIMS];
};
template <int N> static __host__ __device__ inline void locate(const places<N> &x, int64_t i, int64_t *at)
{
    for (int k = 0; k < N; k++) at[k] = 0;
    if (x.numel <= 0xffffffffll) {                   /* 32-bit division is several times faster than 64-bit division */
        uint32_t rest = (uint32_t)i;
        for (int d = x.ndim - 1; d > 0; d--) {
            uint32_t size = (uint32_t)x.size[d], q = rest / size, r = rest - q * size;
            for (int k = 0; k < N; k++) at[k] += (int64_t)r * x.stride[k][d];
            rest = q;
        }
        if (x.ndim > 0)
            for (int k = 0; k < N; k++) at[k] += (int64_t)rest * x.stride[k][0];
        return;
    }
    for (int d = x.ndim - 1; d > 0; d--) {
        int64_t q = i / x.size[d], r = i - q * x.size[d];
        for (int k = 0; k < N; k++) at[k] += r * x.stride[k][d];
        i = q;
    }
    if (x.ndim > 0)
        for (int k = 0; k < N; k++) at[k] += i * x.stride[k][0];
}

/* Returns the places for the views v[k], which are broadcast to the shape by PyTorch's rules. */
template <int N> static inline places<N> make_places(int ndim, const int64_t *shape, const ps_view *const *v)
{
    places<N> x;
    x.ndim = 0;
    x.numel = 1;
    for (int d = 0; d < ndim; d++) {
        int64_t size = shape[d], stride[N];
        x.numel *= size;
        if (size == 1) continue;
        for (int k = 0; k < N; k++) {
            int own = d - (ndim - v[k]->ndim);
            stride[k] = own < 0 || v[k]->shape[own] == 1 ? 0 : v[k]->stride[own];
        }
        bool merge = x.ndim > 0;
        for (int k = 0; merge && k < N; k++) merge = x.stride[k][x.ndim - 1] == size * stride[k];
        int at = merge ? x.ndim - 1 : x.ndim++;
        x.size[at] = merge ? x.size[at] * size : size;
        for (int k = 0; k < N; k++) x.stride[k][at] = stride[k];
    }
    return x;
}
/* Returns whether operand k is contiguous in row-major order. */
template <int N> static inline bool is_flat(const places<N> &x, int k)
{
    return x.ndim == 0 || (x.ndim == 1 && x.stride[k][0] == 1);
}

/* -- launching ----------------------------------------------------------------------------------------------------- */
enum { THREADS = 256 };
/* Returns the number of blocks for n elements. This number is limited, so each thread of a kernel must loop over
 * several elements. */
static inline dim3 blocks_for(int64_t n)
{
    int64_t want = ps_cu_div_up(n, THREADS), most = (int64_t)ps_cu->card.sm_count * 32;
    return dim3((unsigned)(want < 1 ? 1 : want < most ? want : most));
}
#define FIRST_ELEMENT ((int64_t)blockIdx.x * blockDim.x + threadIdx.x)
#define ALL_THREADS ((int64_t)gridDim.x * blockDim.x)

/* Calls fn<T>(...) for the float type `dtype`. */
#define BY_FLOAT(dtype, fn, ...)                                    \
    ((dtype) == PS_F32 ? fn<float>(__VA_ARGS__)                     \
     : (dtype) == PS_BF16 ? fn<bf16>(__VA_ARGS__)                   \
     : (dtype) == PS_F16 ? fn<f16>(__VA_ARGS__) : fn<double>(__VA_ARGS__))

/* quick_exp computes exp in two instructions within 2 + |1.2 * x| ulp, and quick_inverse computes 1 / x within 2 ulp.
 * Kernels use them for results that are rounded to bf16 or fp16, and for weights that are divided by the sum of all
 * weights. */
DEV float quick_exp(float x) { return __expf(x); }
DEV double quick_exp(double x) { return exp(x); }
DEV float quick_inverse(float x) { return __fdividef(1.0f, x); }

/* -- sums over threads in a fixed order, so that results are always bit-identical ---------------------------------- */
struct op_add { template <class A> DEV A of(A a, A b) { return a + b; } };
struct op_max { template <class A> DEV A of(A a, A b) { return a > b ? a : b; } };

template <class Op, class A> DEV A warp_all(A v)
{
    for (int m = 16; m > 0; m >>= 1) v = Op::of(v, __shfl_xor_sync(0xffffffffu, v, m));
    return v;
}
/* Like warp_all(), for a block of full warps with at most 1024 threads. `empty` is used as the value of warps that the
 * block does not have. */
template <class Op, class A> DEV A block_all(A v, A empty)
{
    __shared__ A part[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
    v = warp_all<Op>(v);
    __syncthreads();                                 /* other threads may still read `part` of the previous call */
    if (lane == 0) part[warp] = v;
    __syncthreads();
    return warp_all<Op>(lane < warps ? part[lane] : empty);
}
template <class A> DEV A block_sum(A v) { return block_all<op_add>(v, (A)0); }
template <class A> DEV A block_max(A v) { return block_all<op_max>(v, (A)-INFINITY); }

/* -- rows: each row has a block, which reads the row a few times --------------------------------------------------- */
/* Returns the number of threads per block for rows of n elements, at most 1024. The number grows with n so that a block
 * can hold a whole row at once, unless the row is too long for 1024 threads. */
static inline int threads_for(int64_t n) { return n <= 128 ? 32 : n <= 1024 ? 128 : n <= 8192 ? 256 : 1024; }
static inline unsigned row_blocks(int64_t rows)
{
    int64_t most = (int64_t)ps_cu->card.sm_count * 64;
    return (unsigned)(rows < most ? rows : most);
}

/* Calls f(j, x[j]) for this thread's elements of a row [n]. Reads 16 bytes at a time if the row is aligned. */
template <class T, class F> DEV void each(const T *x, int64_t n, F f)
{
    const int W = pack<T>::n;
    int64_t packs = aligned16(x) ? n / W : 0;
    for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
        pack<T> v = load_pack(x + i * W);
#pragma unroll
        for (int k = 0; k < W; k++) f(i * W + k, up(v.v[k]));
    }
    for (int64_t j = packs * W + threadIdx.x; j < n; j += blockDim.x) f(j, up(x[j]));
}

/* Sets y[j] = f(j, x[j]) for the elements that each() visits. y can be x or an operand that f reads at j, because a
 * thread reads its elements before it writes them. */
template <class G, class T, class F> DEV void map_row(G *y, const T *x, int64_t n, F f)
{
    const int W = pack<T>::n;
    struct alignas(W * sizeof(G) < 16 ? W * sizeof(G) : 16) line { G v[W]; };
    int64_t packs = aligned16(x) && (uintptr_t)y % alignof(line) == 0 ? n / W : 0;
    for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
        pack<T> v = load_pack(x + i * W);
        line out;
#pragma unroll
        for (int k = 0; k < W; k++) out.v[k] = down<G>(f(i * W + k, up(v.v[k])));
        *(line *)(y + i * W) = out;
    }
    for (int64_t j = packs * W + threadIdx.x; j < n; j += blockDim.x) y[j] = down<G>(f(j, up(x[j])));
}

/* -- tensor cores: a warp's 16 x 8 += 16 x 16 by 16 x 8, in fragments as PTX lays them out (m16n8k16) -------------- */
/* Fragments of matrices. With g = lane / 4 and t = lane % 4, a lane holds these elements (row, column):
 *   A [16, 16]: a[0] (g, 2t..), a[1] (g + 8, 2t..), a[2] (g, 2t + 8..), a[3] (g + 8, 2t + 8..), two columns each;
 *   B [16, 8]:  b[0] (2t.., g), b[1] (2t + 8.., g), two rows each;
 *   C [16, 8]:  c[0], c[1] (g, 2t..), c[2], c[3] (g + 8, 2t..).
 *
 * two_down() rounds two floats to bf16 or fp16. The first result is in the low 16 bits.
 *
 * async_copy16() copies 16 bytes to shared memory, and async_copy4() copies 4 bytes. If there is nothing to copy, they
 * write zeros and do not read src. The copies that a thread starts between two calls of async_commit() form a group.
 * async_wait<N>() waits until at most the last N groups of the thread are still running. Other threads see the data
 * after a barrier. */
#ifdef PS_EMULATE_CUDA
DEV float half_up(bf16, uint32_t bits) { return bf16_up((uint16_t)bits); }
DEV float half_up(f16, uint32_t bits) { return f16_up((uint16_t)bits); }
template <class T> DEV void mma(float *c, const uint32_t *a, const uint32_t *b)
{
    float *slots = (float *)ps_emu_warp_slots();     /* the first 12 of the 32 slots of each lane: the elements of a,
                                                      * then the elements of b */
    int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    for (int k = 0; k < 12; k++) slots[32 * lane + k] = half_up(T(), (k < 8 ? a[k / 2] : b[k / 2 - 4]) >> k % 2 * 16);
    ps_emu_warp_barrier();
    for (int e = 0; e < 4; e++) {
        int row = g + e / 2 * 8, col = 2 * t + e % 2;
        for (int k = 0; k < 16; k++)
            c[e] += slots[32 * (row % 8 * 4 + k % 8 / 2) + (row / 8 + k / 8 * 2) * 2 + k % 2] *
                    slots[32 * (col * 4 + k % 8 / 2) + 8 + k / 8 * 2 + k % 2];
    }
}
DEV uint32_t two_down(bf16, float low, float high) { return bf16_down(low) | (uint32_t)bf16_down(high) << 16; }
DEV uint32_t two_down(f16, float low, float high) { return f16_down(low) | (uint32_t)f16_down(high) << 16; }
DEV void async_copy16(void *dst, const void *src, bool there) { ps_emu_async_copy(dst, there ? src : NULL, 16); }
DEV void async_copy4(void *dst, const void *src, bool there) { ps_emu_async_copy(dst, there ? src : NULL, 4); }
DEV void async_commit(void) { ps_emu_async_commit(); }
template <int N> DEV void async_wait(void) { ps_emu_async_wait(N); }
/* Loads N matrices. Lane 8 * m + r passes the address of row r of matrix m. A row has 16 bytes. Each lane gets two
 * elements of each matrix (of its transpose if TRANSPOSED is set). They are in row lane / 4, in columns lane % 4 * 2
 * and lane % 4 * 2 + 1. */
template <int N, bool TRANSPOSED> DEV void ldmatrix(uint32_t *r, const uint16_t *p)
{
    uint64_t *slots = ps_emu_warp_slots();
    int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    memcpy(&slots[16 * lane], &p, sizeof p);
    ps_emu_warp_barrier();
    for (int m = 0; m < N; m++) {
        uint16_t v[2];
        for (int k = 0; k < 2; k++) {
            int row = TRANSPOSED ? 2 * t + k : g, col = TRANSPOSED ? g : 2 * t + k;
            const uint16_t *line;
            memcpy(&line, &slots[16 * (8 * m + row)], sizeof line);
            v[k] = line[col];
        }
        r[m] = (uint32_t)v[0] | (uint32_t)v[1] << 16;
    }
}
#else
template <class T> DEV void mma(float *c, const uint32_t *a, const uint32_t *b);
template <> __device__ __forceinline__ void mma<bf16>(float *c, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> __device__ __forceinline__ void mma<f16>(float *c, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEV uint32_t two_down(bf16, float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&v;
}
DEV uint32_t two_down(f16, float low, float high)
{
    __half2 v = __floats2half2_rn(low, high);
    return *(uint32_t *)&v;
}
DEV void async_copy16(void *dst, const void *src, bool there)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(dst), nbytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" : : "r"(at), "l"(src), "r"(nbytes) : "memory");
}
DEV void async_copy4(void *dst, const void *src, bool there)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(dst), nbytes = there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" : : "r"(at), "l"(src), "r"(nbytes) : "memory");
}
DEV void async_commit(void) { asm volatile("cp.async.commit_group;\n" : : : "memory"); }
template <int N> DEV void async_wait(void) { asm volatile("cp.async.wait_group %0;\n" : : "n"(N) : "memory"); }
template <int N, bool TRANSPOSED> DEV void ldmatrix(uint32_t *r, const uint16_t *p)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(p);
    if (N == 4 && !TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    if (N == 4 && TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
#endif

/* -- four elements ------------------------------------------------------------------------------------------------- */
/* Four adjacent elements as they are stored in memory. With this type, a kernel can issue all loads before it uses the
 * first element. */
template <class T> struct four { typedef uint2 raw; };
template <> struct four<float> { typedef float4 raw; };
DEV void unpack(const float4 &v, float, float *x) { x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w; }
template <class T> DEV void unpack(const uint2 &v, T, float *x)
{
    T a = { (uint16_t)v.x }, b = { (uint16_t)(v.x >> 16) }, c = { (uint16_t)v.y }, d = { (uint16_t)(v.y >> 16) };
    x[0] = up(a), x[1] = up(b), x[2] = up(c), x[3] = up(d);
}
DEV float4 pack_four(const float *x, float) { return float4{ x[0], x[1], x[2], x[3] }; }
template <class T> DEV uint2 pack_four(const float *x, T)
{
    return uint2{ two_down(T(), x[0], x[1]), two_down(T(), x[2], x[3]) };
}

/* -- traps --------------------------------------------------------------------------------------------------------- */
struct trap_to { ps_trap *out; int *taken; };
static inline trap_to traps(void) { trap_to t = { ps_cu->trap_device, ps_cu->trap_taken }; return t; }
DEV void trap(trap_to t, int kind, int op, long long value, long long position, long long limit, long long ignore)
{
    if (atomicCAS(t.taken, 0, 1) != 0) return;
    t.out->op = op;
    t.out->value = value;
    t.out->position = position;
    t.out->limit = limit;
    t.out->ignore = ignore;
    __threadfence_system();
    *(volatile int *)&t.out->kind = kind;
}
#endif
