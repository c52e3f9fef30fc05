/* SPDX-License-Identifier: BSD-3-Clause
 * A benchmark of memory bandwidth: how many bytes per second the compute threads read and write. Like an optimizer, a
 * pass reads and writes several streams of fp32 in parallel. Unlike an optimizer, a pass does almost no arithmetic.
 * Vectors have the machine's largest size. Memory is allocated like the memory of tensors, with huge pages if the
 * system grants them. */
#include <omp.h>
#include <stdbool.h>
#include <string.h>
#include "backend/cpu/cpu.h"
#include "base/error.h"
#include "ps_test.h"

enum { STREAMS = 8, PASSES = 31, STEP = 16 };            /* a step processes 64 bytes of each stream */
struct streams { int reads, writes; float *in[STREAMS], *out[STREAMS]; };
typedef void (*walk_fn)(const struct streams *s, int64_t first, int64_t last);

/* Copies streams. Each written value is a value of one read stream plus a fraction of the sum over all read streams.
 * The loop reads each value twice: once for the sum, and then from the cache. Hence only the sum needs a register, for
 * any number of streams. If no stream is written, the sum is stored at the end, so that the compiler cannot remove the
 * reads. The numbers of streams are compile-time constants for all numbers that the benchmarks use. Vectors have the
 * machine's own width, because GCC moves wider vectors through memory. */
#define WALK(name, target, nbytes) \
    typedef float vf_##name __attribute__((vector_size(nbytes))); \
    static inline __attribute__((always_inline, target)) void counted_##name( \
        const struct streams *given, int64_t first, int64_t last, int reads, int writes) \
    { \
        const struct streams s = *given;                     /* a copy, so that writes cannot change these pointers */ \
        vf_##name all = { 0 }; \
        for (int64_t i = first; i < last; i += (nbytes) / 4) { \
            vf_##name rest = { 0 }, x; \
            _Pragma("GCC unroll 8") \
            for (int k = 0; k < reads; k++) memcpy(&x, s.in[k] + i, sizeof x), rest += x; \
            if (writes == 0) all += rest; \
            rest *= 0x1p-20f; \
            _Pragma("GCC unroll 8") \
            for (int k = 0; k < writes; k++) { \
                memcpy(&x, s.in[k < reads ? k : 0] + i, sizeof x); \
                x += rest; \
                memcpy(s.out[k] + i, &x, sizeof x); \
            } \
        } \
        volatile vf_##name stored = all; \
        (void)stored; \
    } \
    static __attribute__((target)) void walk_##name(const struct streams *s, int64_t first, int64_t last) \
    { \
        if (s->reads == 4 && s->writes == 3) counted_##name(s, first, last, 4, 3); \
        else if (s->reads == 4 && s->writes == 4) counted_##name(s, first, last, 4, 4); \
        else if (s->reads == 2 && s->writes == 1) counted_##name(s, first, last, 2, 1); \
        else if (s->reads == 4 && s->writes == 0) counted_##name(s, first, last, 4, 0); \
        else counted_##name(s, first, last, s->reads, s->writes); \
    }
WALK(plain, unused, 16)
#if defined(__x86_64__)
WALK(avx2, target("avx2"), 32)
WALK(avx512, target("avx512f"), 64)
#endif
static walk_fn walk_of(int vector_nbytes)
{
#if defined(__x86_64__)
    if (vector_nbytes == 64) return walk_avx512;
    if (vector_nbytes == 32) return walk_avx2;
#endif
    return walk_plain;
}

static double pass(const struct streams *s, int64_t numel, walk_fn fn)
{
    double began = ps_now();
#pragma omp parallel
    {
        int64_t blocks = numel / STEP, threads = omp_get_num_threads(), me = omp_get_thread_num();
        fn(s, blocks * me / threads * STEP, blocks * (me + 1) / threads * STEP);
    }
    return ps_now() - began;
}

static double median(double *t, int n)
{
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && t[k] < t[k - 1]; k--) {
            double x = t[k];
            t[k] = t[k - 1];
            t[k - 1] = x;
        }
    return t[n / 2];
}

int ps_probe_bandwidth(int64_t nbytes, int reads, int writes, int in_place, int passes, double *bytes_per_s)
{
    if (reads < 1 || reads > STREAMS || writes < 0 || writes > STREAMS || passes < 1 || passes > PASSES ||
        (in_place && writes > reads))
        return ps_fail(PS_EINVAL, "a probe of %d streams read, %d written%s, %d passes; it takes 1 to %d, 0 to %d%s, 1 "
                       "to %d", reads, writes, in_place ? " in place" : "", passes, STREAMS, STREAMS,
                       in_place ? " and no more than are read" : "", PASSES);
    int vector_nbytes;
    PS_TRY(ps_cpu_vector_nbytes(&vector_nbytes));
    int count = reads + (in_place ? 0 : writes);
    int64_t numel = nbytes / count / 4 / STEP * STEP;
    if (numel < STEP * 64) return ps_fail(PS_EINVAL, "%lld bytes are too few for a probe", (long long)nbytes);
    size_t stream = (size_t)numel * 4, pad = 4096 + 512, size = (size_t)count * (stream + pad);
    void *memory;
    PS_TRY(ps_host_region_new(NULL, size, &memory));
    struct streams s = { .reads = reads, .writes = writes };
    for (int k = 0; k < count; k++) {                        /* each stream begins at a different offset within a
                                                              * page */
        float *p = (float *)((char *)memory + (size_t)k * (stream + pad) / 64 * 64);
        if (k < reads) s.in[k] = p;
        else s.out[k - reads] = p;
    }
    if (in_place) memcpy(s.out, s.in, sizeof s.out);
    memset(memory, 0x3d, size);                              /* each float is about 0.046; it is not 0, because a
                                                              * processor can skip writes of zeros */
    double seconds[PASSES];
    walk_fn fn = walk_of(vector_nbytes);
    pass(&s, numel, fn);
    for (int i = 0; i < passes; i++) seconds[i] = pass(&s, numel, fn);
    ps_host_region_free(NULL, memory, size);
    *bytes_per_s = (double)stream * (reads + writes) / median(seconds, passes);
    return 0;
}
