/* SPDX-License-Identifier: BSD-3-Clause
 * Vectors of the plain build (simd.h, four lanes) against the C library's scalars, bit by bit: the fused multiply-add,
 * which is computed in fp64, half types by integer arithmetic, and divisions with a remainder. */
#define PS_ANY_LANES
#define PS_ISA plain
#include "backend/cpu/simd/divide.h"
#include "check.h"

static uint64_t state = 1;
static uint32_t draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}
/* Returns random bits, or a number with an exponent near 1 (for which sums cancel and ties occur), or a number with
 * few bits set. */
static float number(int way)
{
    uint32_t u = draw();
    if (way == 1) u = (u & 0x80ffffffu) | 0x3f000000u;
    if (way == 2) u = (u & 0xc0000001u) | (0x00100000u << (u >> 8 & 15)) | ((u >> 2 & 0x3fu) << 23);
    return ps_bits_f32(u);
}
static bool same(float a, float b) { return a == b ? signbit(a) == signbit(b) : a != a && b != b; }

static void test_fma(void)
{
    static const float edge[] = { 0.0f, -0.0f, 1.0f, -1.0f, 0x1p-149f, -0x1p-149f, 0x1p-126f, 0x1.fffffep127f, INFINITY,
                                  -INFINITY, NAN, 0x1.000002p0f, 0x1.fffffep-1f, 0x1p-75f, 0x1p-24f };
    enum { EDGES = sizeof edge / sizeof *edge, DRAWN = 1000000 };
    int wrong = 0;
    for (int i = 0; i < EDGES * EDGES * EDGES + DRAWN; i += VL) {
        vf a, b, c;
        for (int k = 0; k < VL; k++) {
            int n = i + k, way = n % 3;
            bool drawn = n >= EDGES * EDGES * EDGES;
            a[k] = drawn ? number(way) : edge[n % EDGES];
            b[k] = drawn ? number(way) : edge[n / EDGES % EDGES];
            c[k] = drawn ? number(way) : edge[n / EDGES / EDGES];
            if (drawn && n % 5 == 0) c[k] = -(a[k] * b[k]);              /* only the product's rounding error remains */
        }
        vf y = vf_fma(a, b, c);
        for (int k = 0; k < VL; k++) {
            if (same(y[k], fmaf(a[k], b[k], c[k]))) continue;
            if (wrong++ < 5) printf("%a * %a + %a is not %a\n", a[k], b[k], c[k], y[k]);
        }
    }
    CHECK(wrong == 0);
}

static void test_halves(void)
{
    int wide = 0, narrow = 0;
    for (int i = 0; i < 0x10000; i += VL) {
        uint16_t h[VL];
        for (int k = 0; k < VL; k++) h[k] = (uint16_t)(i + k);
        vf f = vf_load_f16(h), b = vf_load_bf16(h);
        for (int k = 0; k < VL; k++)
            wide += ps_f32_bits(f[k]) != ps_f32_bits(ps_f16_to_f32(h[k])) ||
                    ps_f32_bits(b[k]) != ps_f32_bits(ps_bf16_to_f32(h[k]));
    }
    for (int i = 0; i < 2000000; i += VL) {
        uint16_t f[VL], b[VL];
        vf x;
        for (int k = 0; k < VL; k++) x[k] = draw() % 2 ? number(0) : ps_bits_f32((draw() & 0x8fffffffu) | 0x30000000u);
        vf_store_f16(f, x);
        vf_store_bf16(b, x);
        for (int k = 0; k < VL; k++) narrow += f[k] != ps_f32_to_f16(x[k]) || b[k] != ps_f32_to_bf16(x[k]);
    }
    CHECK(wide == 0);
    CHECK(narrow == 0);
}

/* Compares with the rule of doubles: quotients of any size, and quotients within a few steps of an integer, which
 * rounding can lift to the next one. */
static void test_divide(void)
{
    static const float edge[] = { 0.0f, -0.0f, 1.0f, -1.0f, 0.5f, -3.0f, 0x1p-149f, -0x1p-149f, 0x1p-126f, 0x1p22f,
                                  0x1p23f, -0x1p24f, 0x1.fffffep127f, INFINITY, -INFINITY, NAN, 0x1.fffffep-1f };
    enum { EDGES = sizeof edge / sizeof *edge, DRAWN = 3000000 };
    int wrong = 0, near_integers = 0;
    for (int i = 0; i < EDGES * EDGES + DRAWN; i += VL) {
        vf a, b;
        for (int k = 0; k < VL; k++) {
            int n = i + k;
            bool drawn = n >= EDGES * EDGES;
            a[k] = drawn ? number(n % 3) : edge[n % EDGES];
            b[k] = drawn ? number(n / 3 % 3) : edge[n / EDGES % EDGES];
            if (!drawn || n % 2) continue;
            a[k] = b[k] * (float)(draw() >> (8 + draw() % 24));
            for (uint32_t steps = draw() % 3; steps > 0; steps--) a[k] = nextafterf(a[k], draw() % 2 ? 1e38f : -1e38f);
            float q = a[k] / b[k];
            near_integers += q == rintf(q) && fmod(a[k], b[k]) != 0;
        }
        vf y[3] = { divide_lanes(PS_REMAINDER, a, b), divide_lanes(PS_FMOD, a, b),
                    divide_lanes(PS_FLOOR_DIVIDE, a, b) };
        for (int k = 0; k < VL; k++)
            for (int kind = 0; kind < 3; kind++) {
                if (same(y[kind][k], (float)ps_divide(kind, a[k], b[k]))) continue;
                if (wrong++ < 5) printf("%a and %a: kind %d is not %a\n", a[k], b[k], kind, y[kind][k]);
            }
    }
    CHECK(near_integers > 10000);
    CHECK(wrong == 0);
}

int main(void)
{
    test_fma();
    test_divide();
    test_halves();
    return end_checks();
}
