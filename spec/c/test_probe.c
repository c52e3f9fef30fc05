/* SPDX-License-Identifier: BSD-3-Clause
 * The bandwidth probe against a triad written as one plain loop over arrays of the same size, on every instruction set
 * that this machine has. The best of each is compared: other programs only take away from both. */
#include <math.h>
#include "backend/cpu/cpu.h"
#include "check.h"

enum { NUMEL = 2 << 20, ROUNDS = 100, FEWEST = 20 };

/* a[i] = b[i] + s * c[i], as the compiler makes vectors of it. */
#define TRIAD(name, attribute) \
    static __attribute__((optimize("O3"), attribute)) void triad_##name(float *restrict to, const float *restrict x, \
                                                                        const float *restrict y, float s) \
    { \
        for (int64_t i = 0; i < NUMEL; i++) to[i] = x[i] + s * y[i]; \
    }
TRIAD(sse2, noinline)
#if defined(__x86_64__)
TRIAD(avx2, target("avx2"))
TRIAD(avx512, target("avx512f,prefer-vector-width=512"))
#endif
typedef void (*triad_fn)(float *restrict, const float *restrict, const float *restrict, float);

/* Bytes a second: two arrays are read, one is written. All is as in the probe but for the loop: memory as tensors have
 * it, in huge pages perhaps, just filled; a first pass is not counted. */
static double triad(triad_fn fn, float s)
{
    size_t stream = (size_t)NUMEL * sizeof(float) + 4096 + 512;
    void *memory;
    if (!OK(ps_host_region_new(NULL, 3 * stream, &memory))) return 0;
    float *b = memory, *c = b + stream / sizeof *b, *a = c + stream / sizeof *b;
    for (size_t i = 0; i < 3 * stream / sizeof *b; i++) b[i] = 0.5f;
    fn(a, b, c, s);
    double began = ps_now();
    fn(a, b, c, s);
    double seconds = ps_now() - began;
    ps_host_region_free(NULL, memory, 3 * stream);
    return 12.0 * NUMEL / seconds;
}

static double probe(int streams, int reads, int writes, int in_place)
{
    double rate = 0;
    OK(ps_probe_bandwidth(4ll * streams * NUMEL, reads, writes, in_place, 1, &rate));
    return rate;
}

/* Bytes a second of one array of four times the size that is only read: the words' parity. It takes longer than a
 * program may have a processor for itself where others wait, so seconds of this thread count. */
static __attribute__((optimize("O3"), noinline)) double parity(void)
{
    size_t nbytes = 4ull * NUMEL * sizeof(float);
    void *memory;
    if (!OK(ps_host_region_new(NULL, nbytes, &memory))) return 0;
    memset(memory, 0x3d, nbytes);
    uint64_t *word = memory, bits = 0;
    double began = thread_now();
    for (size_t i = 0; i < nbytes / sizeof *word; i++) bits ^= word[i];
    double seconds = thread_now() - began;
    CHECK(bits == 0);
    ps_host_region_free(NULL, memory, nbytes);
    return (double)nbytes / seconds;
}

/* On one thread: a second one that waits for a processor would be measured with it. */
static void test_triad(const char *set, triad_fn fn)
{
    double plain = 0, probed = 0, in_place = 0, words = 0, only_read = 0;
    setenv("PS_CPU_ISA", set, 1);
    int round = 0;
    do {
        plain = fmax(plain, triad(fn, (float)round));
        probed = fmax(probed, probe(3, 2, 1, 0));
        in_place = fmax(in_place, probe(4, 4, 3, 1));
        if (round >= FEWEST && only_read > 0.8 * words) continue;
        words = fmax(words, parity());
        only_read = fmax(only_read, probe(4, 4, 0, 0));
    } while (++round < FEWEST || (round < ROUNDS && (fabs(probed / plain - 1) > 0.1 || only_read <= 0.8 * words)));
    printf("%s: the probe tells %.1f GB/s, a plain triad %.1f (%d rounds)\n", set, probed / 1e9, plain / 1e9, round);
    CHECK(fabs(probed / plain - 1) < 0.15);
    /* What an optimizer does; no line is fetched only to be written, so no less moves. */
    printf("%s: four streams read, three written in place: %.1f GB/s\n", set, in_place / 1e9);
    CHECK(in_place > 0.8 * probed);
    printf("%s: four streams read: %.1f GB/s, plain words %.1f\n", set, only_read / 1e9, words / 1e9);
    CHECK(only_read > 0.8 * words && only_read < 8 * words);
}

int main(void)
{
    double rate;
    ps_set_threads(1);
    setenv("PS_CPU_ISA", "mmx", 1);
    FAILS(ps_probe_bandwidth(1 << 20, 2, 1, 0, 3, &rate), PS_EINVAL, "mmx");
    test_triad("sse2", triad_sse2);
#if defined(__x86_64__)
    if (ps_cpu_has_set("avx2")) test_triad("avx2", triad_avx2);
    if (ps_cpu_has_set("avx512")) test_triad("avx512", triad_avx512);
#endif
    return end_checks();
}
