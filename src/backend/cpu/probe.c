/* SPDX-License-Identifier: BSD-3-Clause
 * The bytes a second that the compute threads move between memory and themselves, for benches. A pass
 * walks plain streams of fp32 side by side, as an optimizer does, with next to no arithmetic, in the widest vectors
 * that the machine has and in the kind of memory that tensors lie in (huge pages where the system grants them). */
#include <omp.h>
#include <stdbool.h>
#include <string.h>
#include "backend/backend.h"
#include "base/error.h"
#include "ps_test.h"

enum { STREAMS = 8, PASSES = 31, LANES = 16 };
typedef float vf __attribute__((vector_size(LANES * 4)));
struct streams { int reads, writes; float *in[STREAMS], *out[STREAMS]; };

/* Each stream written is one stream read plus a part of the sum of the others. */
static inline __attribute__((always_inline)) void walk(const struct streams *s, int64_t first, int64_t last, int reads,
                                                       int writes)
{
    for (int64_t i = first; i < last; i += LANES) {
        vf x[STREAMS], rest = { 0 };
        for (int k = 0; k < reads; k++) {
            memcpy(&x[k], s->in[k] + i, sizeof x[k]);
            rest += x[k];
        }
        for (int k = 0; k < writes; k++) {
            vf y = x[k < reads ? k : 0] + rest * 0x1p-20f;
            memcpy(s->out[k] + i, &y, sizeof y);
        }
    }
}
/* The counts that benches ask for are constants, so that a step is loads, sums and stores. */
static inline __attribute__((always_inline)) void walk_any(const struct streams *s, int64_t first, int64_t last)
{
    if (s->reads == 4 && s->writes == 3) walk(s, first, last, 4, 3);
    else if (s->reads == 4 && s->writes == 4) walk(s, first, last, 4, 4);
    else if (s->reads == 2 && s->writes == 1) walk(s, first, last, 2, 1);
    else walk(s, first, last, s->reads, s->writes);
}
typedef void (*walk_fn)(const struct streams *s, int64_t first, int64_t last);
static void walk_plain(const struct streams *s, int64_t first, int64_t last) { walk_any(s, first, last); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void walk_avx2(const struct streams *s, int64_t first, int64_t last)
{
    walk_any(s, first, last);
}
__attribute__((target("avx512f"))) static void walk_avx512(const struct streams *s, int64_t first, int64_t last)
{
    walk_any(s, first, last);
}
#endif
static walk_fn widest(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return walk_avx512;
    if (__builtin_cpu_supports("avx2")) return walk_avx2;
#endif
    return walk_plain;
}

static double pass(const struct streams *s, int64_t numel, walk_fn fn)
{
    double began = ps_now();
#pragma omp parallel
    {
        int64_t blocks = numel / LANES, threads = omp_get_num_threads(), me = omp_get_thread_num();
        fn(s, blocks * me / threads * LANES, blocks * (me + 1) / threads * LANES);
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
    if (reads < 1 || reads > STREAMS || writes < 1 || writes > STREAMS || passes < 1 || passes > PASSES ||
        (in_place && writes > reads))
        return ps_fail(PS_EINVAL, "a probe of %d streams read, %d written%s, %d passes; it takes 1 to %d, 1 to %d%s, 1 "
                       "to %d", reads, writes, in_place ? " in place" : "", passes, STREAMS, STREAMS,
                       in_place ? " and no more than are read" : "", PASSES);
    int count = reads + (in_place ? 0 : writes);
    int64_t numel = nbytes / count / 4 / LANES * LANES;
    if (numel < LANES * 64) return ps_fail(PS_EINVAL, "%lld bytes are too few for a probe", (long long)nbytes);
    size_t stream = (size_t)numel * 4, pad = 4096 + 512, size = (size_t)count * (stream + pad);
    void *memory;
    PS_TRY(ps_host_region_new(NULL, size, &memory));
    struct streams s = { .reads = reads, .writes = writes };
    for (int k = 0; k < count; k++) {                        /* no two streams at equal offsets in a page */
        float *p = (float *)((char *)memory + (size_t)k * (stream + pad) / 64 * 64);
        if (k < reads) s.in[k] = p;
        else s.out[k - reads] = p;
    }
    if (in_place) memcpy(s.out, s.in, sizeof s.out);
    memset(memory, 0, size);
    double seconds[PASSES];
    walk_fn fn = widest();
    pass(&s, numel, fn);
    for (int i = 0; i < passes; i++) seconds[i] = pass(&s, numel, fn);
    ps_host_region_free(NULL, memory, size);
    *bytes_per_s = (double)stream * (reads + writes) / median(seconds, passes);
    return 0;
}
