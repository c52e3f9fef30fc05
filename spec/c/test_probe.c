/* SPDX-License-Identifier: BSD-3-Clause
 * The bandwidth probe: its arguments, and a rate on every instruction set that this machine has.
 * spec/backend/spills_spec.lua counts the loads and stores of its loops; their speed depends on the machine and its
 * load, so it is not tested. */
#include <math.h>
#include "backend/cpu/cpu.h"
#include "check.h"

static void test_set(const char *set)
{
    static const struct { int reads, writes, in_place; } of[] = { { 2, 1, 0 }, { 4, 3, 1 }, { 4, 4, 1 }, { 4, 0, 0 },
                                                                  { 1, 8, 0 }, { 8, 8, 1 } };
    setenv("PS_CPU_ISA", set, 1);
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        double rate = 0;
        OK(ps_probe_bandwidth(1 << 20, of[i].reads, of[i].writes, of[i].in_place, 3, &rate));
        CHECK(isfinite(rate) && rate > 0);
    }
}

int main(void)
{
    double rate;
    setenv("PS_CPU_ISA", "mmx", 1);
    FAILS(ps_probe_bandwidth(1 << 20, 2, 1, 0, 3, &rate), PS_EINVAL, "mmx");
    test_set("sse2");
#if defined(__x86_64__)
    if (ps_cpu_has_set("avx2")) test_set("avx2");
    if (ps_cpu_has_set("avx512")) test_set("avx512");
#endif
    FAILS(ps_probe_bandwidth(1 << 20, 0, 1, 0, 3, &rate), PS_EINVAL, "0 streams read, 1 written, 3 passes");
    FAILS(ps_probe_bandwidth(1 << 20, 2, 9, 0, 3, &rate), PS_EINVAL, "2 streams read, 9 written");
    FAILS(ps_probe_bandwidth(1 << 20, 2, 3, 1, 3, &rate), PS_EINVAL, "no more than are read");
    FAILS(ps_probe_bandwidth(1 << 20, 2, 1, 0, 32, &rate), PS_EINVAL, "1 to 31");
    FAILS(ps_probe_bandwidth(12 * 1023, 2, 1, 0, 3, &rate), PS_EINVAL, "too few for a probe");
    return end_checks();
}
