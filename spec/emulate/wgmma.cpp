/* SPDX-License-Identifier: BSD-3-Clause
 * Warpgroup products (wgmma.mma_async.m64nNk16 of bf16 and fp16) on the processor, from the PTX ISA's text: what the
 * bits of a matrix descriptor mean, the canonical layouts with the 128-byte swizzle on bits of the shared address, the
 * fragments in registers. It shares no code with src/backend/cuda/wgmma.h, so a misreading shows as a difference.
 *
 * A warp's quarter of a product happens when the warp waits for its group, or when it commits it in blocks where
 * copies are early: until then accumulators, A in registers and shared memory must not change. Products read shared
 * memory as it was when the thread that copied a piece last called fence.proxy.async after its copy had ended; the
 * rest is NaN or old. They never see plain stores. Errors that no order of events would show are checked: a group
 * begins after wgmma.fence, the warps of a warpgroup request the same products, and no unused bit of a descriptor is
 * set. */
#include "emulate.h"
extern "C" {
#include "base/half.h"
}
#include <vector>

enum { MOST_WARPS = 32, MOST_N = 256 };

/* One product as all threads of a warp request it, without the positions of their registers. */
struct product {
    uint64_t a, b;
    int n, trans_a, trans_b;
    bool a_in_registers, bf16, add;
    float *d[32];
    const uint32_t *registers[32];
    int group;
};
struct warp_state {
    std::vector<product> products;             /* in flight, from product `through` on */
    size_t through;
    size_t asked[32];                          /* number of products that each lane requested */
    int groups[32];                            /* number of groups that each lane committed */
    bool fenced[32];
};
static warp_state warps[MOST_WARPS];
static std::vector<product> warpgroup_log[MOST_WARPS / 4];       /* indexed by the warp that first requested each
                                                                  * product */
struct piece { unsigned char *at; int nbytes; };
static std::vector<std::vector<piece>> copied; /* by thread: pieces whose copy is complete, and that are not fenced
                                                * yet */
static std::vector<unsigned char> seen;        /* shared memory as products read it */
static int64_t block_number;
static int block_threads;
static size_t block_nbytes;
static int64_t products_done;
static bool used;                              /* whether the state above belongs to this block */

void ps_emu_wgmma_begin(int n_threads, size_t shared_nbytes)
{
    block_number++;
    block_threads = n_threads;
    block_nbytes = shared_nbytes;
    used = false;
}

static void use(void)
{
    if (used) return;
    used = true;
    copied.assign((size_t)block_threads, {});
    seen.assign(block_nbytes, 0xff);
    for (int w = 0; w < (block_threads + 31) / 32; w++) warps[w] = warp_state();
    for (auto &log : warpgroup_log) log.clear();
}

void ps_emu_wgmma_end(void)
{
    for (int w = 0; used && w < (block_threads + 31) / 32; w++) {
        warp_state *s = &warps[w];
        if (!s->products.empty()) ps_emu_wrong("wgmma: a block ended without waiting for its products");
        if (s->through != warpgroup_log[w / 4].size())
            ps_emu_wrong("wgmma: a warp has not asked for what its warpgroup did");
    }
}

/* Returns the start of the shared window, a part of which the hardware reserves. Dynamic memory is aligned to 16
 * bytes. */
static uint32_t window(void) { return 1024 + 16 * (uint32_t)(block_number % 5); }

uint32_t ps_emu_shared_address(const void *p)
{
    ptrdiff_t at = (const unsigned char *)p - ps_emu_dynamic;
    if (at < 0 || (size_t)at > block_nbytes) ps_emu_wrong("wgmma: an address outside of dynamic shared memory");
    return window() + (uint32_t)at;
}

void ps_emu_copied(int thread, void *dst, int nbytes)
{
    unsigned char *p = (unsigned char *)dst;
    use();
    if (p >= ps_emu_dynamic && p + nbytes <= ps_emu_dynamic + seen.size())
        copied[(size_t)thread].push_back(piece{ p, nbytes });
}

void ps_emu_async_fence(void)
{
    use();
    auto &list = copied[(size_t)ps_emu_thread_index()];
    for (const piece &c : list) memcpy(&seen[(size_t)(c.at - ps_emu_dynamic)], c.at, (size_t)c.nbytes);
    list.clear();
}

extern "C" __attribute__((visibility("default"))) int64_t ps_emu_take_products(void);
/* Returns the number of quarters of products since the last call, which shows whether a kernel used any. */
int64_t ps_emu_take_products(void)
{
    int64_t n = products_done;
    products_done = 0;
    return n;
}

/* -- operands ------------------------------------------------------------------------------------------------------ */
struct descriptor { uint32_t start, leading, stride, base, mode; };

static descriptor decode(uint64_t bits)
{
    descriptor d;
    d.start = (uint32_t)(bits & 0x3fff) << 4;
    d.leading = (uint32_t)(bits >> 16 & 0x3fff) << 4;
    d.stride = (uint32_t)(bits >> 32 & 0x3fff) << 4;
    d.base = (uint32_t)(bits >> 49 & 7);
    d.mode = (uint32_t)(bits >> 62);
    const uint64_t meaning = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 7ull << 49 | 3ull << 62;
    if (bits & ~meaning) ps_emu_wrong("wgmma: a descriptor has bits set that mean nothing");
    if (d.mode != 1) ps_emu_wrong("wgmma: only the 128-byte swizzle is emulated");
    if (d.base != 0) ps_emu_wrong("wgmma: a base offset is not emulated: patterns begin at multiples of 1024 bytes");
    return d;
}

/* Returns element (i of M or N, k) of an operand. The canonical layouts, in elements of which T = 8 are 128 bits,
 * are MN-major ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO)) and K-major ((8,m),(T,2k)):((8T,SBO),(1,T)). Then Swizzle<3,4,3>
 * is applied to the address: bits 4..6 are XORed with bits 7..9. */
static float element(const descriptor &d, bool mn_major, int i, int k, bool bf16)
{
    uint32_t at;
    if (mn_major) at = 2 * (i % 8 + 8 * (i / 8 % 8) + 64 * (k % 8)) + d.leading * (i / 64) + d.stride * (k / 8);
    else at = 2 * (64 * (i % 8) + k % 8 + 8 * (k / 8)) + d.stride * (i / 8);
    at += d.start;
    at ^= (at >> 7 & 7) << 4;
    if (at < window() || at + 2 > window() + seen.size()) ps_emu_wrong("wgmma: an operand outside of shared memory");
    uint16_t half;
    memcpy(&half, &seen[at - window()], 2);
    return bf16 ? ps_bf16_to_f32(half) : ps_f16_to_f32(half);
}

/* Computes rows 16 w .. 16 w + 15 of one product, where w is the warp's index in its warpgroup. Fragments, with g =
 * lane / 4 and t = lane % 4: of A, each lane has (g, 2t..), (g + 8, 2t..), (g, 2t + 8..) and (g + 8, 2t + 8..), two
 * halves each. Of D, for every 8 columns from c on, it has (g, c + 2t..) and (g + 8, c + 2t..). */
static void multiply(const product &x, int w)
{
    static float a[16][16], b[16][MOST_N];
    descriptor of_b = decode(x.b);
    for (int k = 0; k < 16; k++)
        for (int j = 0; j < x.n; j++) b[k][j] = element(of_b, x.trans_b, j, k, x.bf16);
    if (x.a_in_registers) {
        for (int lane = 0; lane < 32; lane++)
            for (int e = 0; e < 8; e++) {
                uint16_t half = (uint16_t)(x.registers[lane][e / 2] >> e % 2 * 16);
                a[lane / 4 + e / 2 % 2 * 8][lane % 4 * 2 + e % 2 + e / 4 * 8] =
                    x.bf16 ? ps_bf16_to_f32(half) : ps_f16_to_f32(half);
            }
    } else {
        descriptor of_a = decode(x.a);
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 16; k++) a[i][k] = element(of_a, x.trans_a, 16 * w + i, k, x.bf16);
    }
    for (int i = 0; i < 16; i++) {
        float row[MOST_N] = { 0 };
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < x.n; j++) row[j] += a[i][k] * b[k][j];
        for (int j = 0; j < x.n; j++) {
            float *d = &x.d[i % 8 * 4 + j % 8 / 2][j / 8 * 4 + i / 8 * 2 + j % 2];
            *d = x.add ? *d + row[j] : row[j];
        }
    }
}

/* Finishes this warp's groups before number `end`. All threads of the warp have arrived. */
static void finish(int end)
{
    warp_state *s = &warps[ps_emu_now->warp];
    ps_emu_warp_barrier();
    if (ps_emu_now->lane == 0) {
        size_t n = 0;
        while (n < s->products.size() && s->products[n].group < end) multiply(s->products[n++], ps_emu_now->warp % 4);
        s->products.erase(s->products.begin(), s->products.begin() + (long)n);
        s->through += n;
        products_done += (int64_t)n;
    }
    ps_emu_warp_barrier();
}

/* -- the instructions ---------------------------------------------------------------------------------------------- */
void ps_emu_wgmma_fence(void)
{
    use();
    warps[ps_emu_now->warp].fenced[ps_emu_now->lane] = true;
}

static bool same(const product &x, const product &y)
{
    return x.a == y.a && x.b == y.b && x.n == y.n && x.trans_a == y.trans_a && x.trans_b == y.trans_b &&
           x.add == y.add && x.a_in_registers == y.a_in_registers && x.bf16 == y.bf16 && x.group == y.group;
}

void ps_emu_wgmma(float *d, const uint32_t *a_registers, uint64_t a, uint64_t b, int n, bool bf16, int trans_a,
                  int trans_b, bool add)
{
    int lane = ps_emu_now->lane, w = ps_emu_now->warp;
    use();
    warp_state *s = &warps[w];
    product x = { a, b, n, trans_a, trans_b, a_registers != NULL, bf16, add, {}, {}, s->groups[lane] };
    size_t number = s->asked[lane]++;
    auto &log = warpgroup_log[w / 4];
    if (n % 8 != 0 || n < 8 || n > MOST_N) ps_emu_wrong("wgmma: N is a multiple of 8, up to 256");
    if (!s->fenced[lane]) ps_emu_wrong("wgmma: a group of products begins without wgmma.fence");
    if (number == log.size()) log.push_back(x);
    if (!same(log[number], x)) ps_emu_wrong("wgmma: the threads of a warpgroup ask for different products");
    if (number - s->through == s->products.size()) s->products.push_back(x);
    s->products[number - s->through].d[lane] = d;
    s->products[number - s->through].registers[lane] = a_registers;
}

void ps_emu_wgmma_commit(void)
{
    use();
    warp_state *s = &warps[ps_emu_now->warp];
    int group = ++s->groups[ps_emu_now->lane];
    s->fenced[ps_emu_now->lane] = false;
    if (ps_emu_early()) finish(group);
}

void ps_emu_wgmma_wait(int but)
{
    use();
    warp_state *s = &warps[ps_emu_now->warp];
    s->fenced[ps_emu_now->lane] = false;
    finish(s->groups[ps_emu_now->lane] - but);
}
