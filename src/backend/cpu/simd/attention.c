/* SPDX-License-Identifier: BSD-3-Clause
 * Attention forward and backward without a buffer of T x S scores: FlashAttention (Dao et al., NeurIPS 2022). A thread
 * converts K and V of one key head of one sample to fp32 panels. It then multiplies blocks of QUERIES queries by blocks
 * of KEYS keys. Scores are stored as [key][query]. Each vector lane belongs to one query, so softmax does not add lanes
 * of the same vector. Forward keeps a running maximum and a running sum for each query (the online softmax of Milakov
 * and Gimelshein, 2018). Backward computes the weights again from lse. Sums are computed in fp32. The order of a sum
 * depends only on shapes and segments, not on the number of threads, the instruction set or addresses.
 *
 * Invariants. Panels are [rows][Dp], where Dp is D rounded up to 16. A panel contains zeros in padding columns, in rows
 * of hidden keys, and in padding rows up to a multiple of 16. In a causal block, query c sees key r if c >= r + shift.
 * Let g be a multiple of 8. For the keys g to g + 7, only the query vectors from number lead(g) on have scores. The
 * scores of the query vectors before lead(g) are neither written nor read. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/packed.h"
#include "base/blocks.h"
#include "attention_tile.h"
#include "base/error.h"
#include <omp.h>

enum { QUERIES = 64, KEYS = 64, QV = QUERIES / VL, Q8_NBYTES = 34 };   /* Q8_NBYTES: size in bytes of a Q8_0 block */
enum { READ = 5, WRITTEN = 3 };        /* numbers of tensors with heads that backward reads and that it writes; in
                                        * forward, both numbers are smaller */
#define NO_SCORE (-3e38f)             /* the maximum of the scores of no keys; finite, so that a difference of maxima is
                                       * never NaN */
#define LOG2E 1.44269504088896340736
#define LN2 0.69314718055994530942

/* The reasons for which a block can contain weights of zero:
 *   ALL_SEEN: the block contains no weights of zero.
 *   HIDES: the causal order, the window, the mask or padding can hide keys.
 *   SEGMENTED: segments can hide keys, in addition to the reasons of HIDES. */
enum { ALL_SEEN, HIDES, SEGMENTED };

/* A call of attention. q, dq, y and dy are [B, H, T, D]. k, v, dk and dv are [B, G, S, D]. lse is [B, H, T]. mask is
 * [B, S] or [B|1, H|1, T|1, S]. If the mask contains int32 segments, it is [B, T]. */
typedef struct attn {
    ps_view q, k, v, mask, y, lse, dy, dq, dk, dv;
    int64_t B, H, G, T, S, D, Dp, Sp, nvec;         /* Sp: S rounded up to ROWS; nvec: Dp / 16 */
    int64_t window;                                 /* maximum number of keys that a query sees, or 0 for no limit */
    int64_t bias_step[3];                           /* the mask's strides along samples, heads and queries; the stride
                                                     * of a dimension of size 1 is 0 */
    float scale, scale2;                            /* scale: the factor of the scores; scale2: scale * log2 e */
    bool causal, drop, biased, segmented;           /* biased: the mask has 4 dimensions; segmented: the mask contains
                                                     * segments */
    int32_t limit;                                  /* a weight is dropped if the number that its 24 random bits form is
                                                     * below limit */
    float keep_scale;                               /* 1 / (1 - p) */
    uint64_t seed, sample, counter_hi;
    int64_t first_head;                             /* the first head of this rank, if the heads are divided among
                                                     * ranks */
} attn;

/* Rows of memory that are prefetched before the kernel reads or writes them. */
typedef struct stream { const char *at; int64_t row_nbytes, used_nbytes, rows; } stream;

/* A thread's memory. Forward does not use dk, dv, dy, dyt and dp. Backward does not use sum. `out` contains y of the
 * block in forward, and dq of the block in backward. */
typedef struct work {
    float *k, *v, *dk, *dv;                         /* [Sp, Dp] */
    float *q, *dy, *out;                            /* [QUERIES, Dp] */
    float *qt, *dyt;                                /* [Dp, QUERIES]; qt is q transposed, and dyt is dy transposed */
    float *p, *dp;                                  /* [KEYS, QUERIES]; p: the scores, which softmax replaces by
                                                     * weights; dp: the gradients of p */
    float *bias;                                    /* [QUERIES, KEYS], the bias times log2 e; used if `biased` is
                                                     * set */
    float *max, *sum, *factor;                      /* [QUERIES]; in backward, max contains lse * log2 e, and factor
                                                     * contains delta */
    uint32_t *keep;                                 /* [2, QUERIES]; the dropout bit of key r is bit r % 32 of word r /
                                                     * 32 */
    uint8_t *hidden;                                /* [Sp]; nonzero for a key that no query sees */
    int32_t *begin, *end;                           /* [T + QUERIES], used if `segmented` is set; query i's segment has
                                                     * the keys begin[i] to end[i] - 1; the elements of each array are
                                                     * in ascending order */
    bool any_hidden;                                /* true if any key below S is hidden */
    int64_t second;                                 /* index of the second key that the mask does not hide, or S if
                                                     * there are fewer than two such keys */
    stream ahead[READ + WRITTEN];                   /* the rows to prefetch: the rows that the thread reads for its next
                                                     * head, and the rows that this block writes */
} work;

/* A block has the queries [i0, i0 + nq) and the keys [j0, j0 + nk) of head h of sample b. */
typedef struct block {
    int64_t b, h, i0, j0;
    int nq, qv, nk;                                 /* qv: nq / VL rounded up; nk is rounded up to a multiple of ROWS */
    int shift;                                      /* if the block is causal, query c sees key r only if c >= r +
                                                     * shift; otherwise shift is so low that all keys are seen */
    int until;                                      /* if there is a window, query c sees key r only if c < r + until;
                                                     * otherwise until is so high that all keys are seen */
    int masked;                                     /* ALL_SEEN, HIDES or SEGMENTED */
} block;

static int clamp(int64_t x, int low, int high) { return x < low ? low : x > high ? high : (int)x; }
static int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
SIMD int lead(const block *k, int g) { return clamp((g + k->shift) >> 4, 0, k->qv); }

/* -- rows of a view to and from panels ---------------------------------------------------------------------------- */
static char *row_of(const ps_view *x, int64_t b, int64_t h, int64_t i)
{
    return (char *)x->data + (b * x->stride[0] + h * x->stride[1] + i * x->stride[2]) * ps_dtype_bytes(x->dtype);
}
SIMD void load_as(int dtype, const char *src, int64_t row_nbytes, int64_t n, int64_t D, float *dst, int64_t Dp)
{
    for (int64_t i = 0; i < n; i++, src += row_nbytes, dst += Dp) {
        int64_t d = 0;
        for (; d + VL <= D; d += VL) vf_store(dst + d, vf_get(src, d, dtype));
        if (d < D) vf_store(dst + d, vf_get_n(src, d, dtype, (int)(D - d), 0.0f));
    }
}
/* Copies rows [first, first + n) of head (b, h) to dst [n_pad, Dp], and fills the padding with zeros. */
static void load_rows(const attn *a, const ps_view *x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t n_pad,
                      float *dst)
{
    const char *src = row_of(x, b, h, first);
    int64_t row_nbytes = x->stride[2] * ps_dtype_bytes(x->dtype);
    if (x->dtype == PS_F32) load_as(PS_F32, src, row_nbytes, n, a->D, dst, a->Dp);
    else if (x->dtype == PS_BF16) load_as(PS_BF16, src, row_nbytes, n, a->D, dst, a->Dp);
    else if (x->dtype == PS_U8)
        for (int64_t i = 0; i < n; i++)
            ps_cpu_unpack(PS_Q8_0, (const uint8_t *)src + i * row_nbytes, x->shape[3] / Q8_NBYTES, NULL, 0,
                          dst + i * a->Dp, PS_F32);
    else load_as(PS_F16, src, row_nbytes, n, a->D, dst, a->Dp);
    memset(dst + n * a->Dp, 0, (size_t)((n_pad - n) * a->Dp) * sizeof *dst);
}
SIMD void store_as(int dtype, char *dst, int64_t row_nbytes, int64_t n, int64_t D, const float *src, int64_t Dp,
                   const float *factor, int64_t step)
{
    for (int64_t i = 0; i < n; i++, src += Dp, dst += row_nbytes) {
        vf f = vf_set(factor[i * step]);
        int64_t d = 0;
        for (; d + VL <= D; d += VL) vf_put(dst, d, dtype, vf_load(src + d) * f);
        if (d < D) vf_put_n(dst, d, dtype, (int)(D - d), vf_load(src + d) * f);
    }
}
/* Writes src [n, Dp] to rows [first, first + n) of head (b, h) of x. Multiplies row i of src by factor[i * step]. */
static void store_rows(const attn *a, const ps_view *x, int64_t b, int64_t h, int64_t first, int64_t n,
                       const float *src, const float *factor, int64_t step)
{
    char *dst = row_of(x, b, h, first);
    int64_t row_nbytes = x->stride[2] * ps_dtype_bytes(x->dtype);
    if (x->dtype == PS_F32) store_as(PS_F32, dst, row_nbytes, n, a->D, src, a->Dp, factor, step);
    else if (x->dtype == PS_BF16) store_as(PS_BF16, dst, row_nbytes, n, a->D, src, a->Dp, factor, step);
    else store_as(PS_F16, dst, row_nbytes, n, a->D, src, a->Dp, factor, step);
}

/* Returns a stream that prefetches rows of a head from main memory. The rows are far apart, so the hardware does not
 * predict the next row. Prefetching a few rows at a time between two products takes almost no time. Without
 * prefetching, loading the rows takes a tenth of the total time. The rows that a block writes are prefetched while the
 * block is computed. */
static stream rows_ahead(const ps_view *x, int64_t b, int64_t h, int64_t first, int64_t n)
{
    int64_t size = ps_dtype_bytes(x->dtype);
    return (stream){ row_of(x, b, h, first), x->stride[2] * size, x->shape[3] * size, n };
}
static void next_head(const attn *a, work *w, int64_t item)
{
    const ps_view *x[READ] = { &a->q, &a->k, &a->v, &a->dy, &a->y };
    int64_t b = item / a->G, g = item % a->G;
    int n = b >= a->B ? 0 : ps_has(&a->dy) ? READ : 3;
    memset(w->ahead, 0, sizeof w->ahead);
    for (int i = 0; i < n; i++)
        w->ahead[i] = rows_ahead(x[i], b, x[i]->shape[1] == a->G ? g : g * (a->H / a->G), 0, x[i]->shape[2]);
}
static void will_write(work *w, int i, const ps_view *x, int64_t b, int64_t h, int64_t first, int64_t n)
{
    if (ps_has(x)) w->ahead[READ + i] = rows_ahead(x, b, h, first, n);
}
SIMD void fetch_some(work *w)
{
    for (int i = 0; i < READ + WRITTEN; i++) {
        stream *s = &w->ahead[i];
        for (int n = i < READ ? 2 : 4; n > 0 && s->rows > 0; n--, s->rows--, s->at += s->row_nbytes)
            for (int64_t at = 0; at < s->used_nbytes; at += 64) __builtin_prefetch(s->at + at, 0, 2);
    }
}

static void hide_key(const attn *a, work *w, int64_t j)
{
    w->hidden[j] = 1;
    w->any_hidden = true;
    memset(w->k + j * a->Dp, 0, (size_t)a->Dp * sizeof *w->k);
    memset(w->v + j * a->Dp, 0, (size_t)a->Dp * sizeof *w->v);
}
/* Fills begin and end with the bounds of each position's segment, and hides the keys of padding. For all positions of a
 * run of padding, begin is the end of the run, and end is its beginning. Hence these positions see no key, and they do
 * not extend a block's range of keys. */
static void load_segments(const attn *a, work *w, int64_t b)
{
    const int32_t *id = (const int32_t *)a->mask.data + b * a->mask.stride[0];
    int64_t step = a->mask.stride[1];
    for (int64_t i = 0, next = 0; i < a->T; i = next) {
        int32_t own = id[i * step];
        for (next = i + 1; next < a->T && id[next * step] == own;) next++;
        for (int64_t j = i; j < next; j++) {
            w->begin[j] = (int32_t)(own != 0 ? i : next);
            w->end[j] = (int32_t)(own != 0 ? next : i);
            if (own == 0) hide_key(a, w, j);
        }
    }
    for (int64_t i = a->T; i < a->T + QUERIES; i++) w->begin[i] = w->end[i] = (int32_t)a->T;
}

/* Loads K and V of head (b, g) into the panels w->k and w->v. Rows of hidden keys become zeros. */
static void load_keys(const attn *a, work *w, int64_t b, int64_t g)
{
    load_rows(a, &a->k, b, g, 0, a->S, a->Sp, w->k);
    load_rows(a, &a->v, b, g, 0, a->S, a->Sp, w->v);
    memset(w->hidden, 0, (size_t)a->S);
    memset(w->hidden + a->S, 1, (size_t)(a->Sp - a->S));
    w->any_hidden = false;
    w->second = a->S < 1 ? a->S : 1;
    if (a->segmented) load_segments(a, w, b);
    if (!ps_has(&a->mask) || a->biased || a->segmented) return;
    const uint8_t *mask = (const uint8_t *)a->mask.data + b * a->mask.stride[0];
    int shown = 0;
    w->second = a->S;
    for (int64_t j = 0; j < a->S; j++) {
        if (mask[j * a->mask.stride[1]]) {
            if (++shown == 2) w->second = j;
            continue;
        }
        hide_key(a, w, j);
    }
}
/* Transposes the first qv * VL rows of src [QUERIES, Dp], and writes the result to dst [Dp, QUERIES]. */
static void transpose_panel(const attn *a, const float *src, int qv, float *dst)
{
    for (int v = 0; v < qv; v++)
        for (int64_t d = 0; d < a->Dp; d += VL)
            transpose16(src + v * VL * a->Dp + d, a->Dp, dst + d * QUERIES + v * VL, QUERIES);
}

/* -- blocks ------------------------------------------------------------------------------------------------------- */
/* Returns an upper bound of the keys that the queries [i0, i0 + nq) see: every such key has a lower index. */
static int64_t keys_seen(const attn *a, const work *w, int64_t i0, int nq)
{
    int64_t n = a->causal ? i0 + nq + a->S - a->T : a->S;
    if (a->segmented) {
        int64_t last = w->end[i0 + nq - 1];
        n = last <= w->begin[i0] ? 0 : last < n ? last : n;
    }
    return n < 0 ? 0 : n < a->S ? n : a->S;
}
/* Returns the first key of the first block, for queries that begin at i0. With segments, the block begins near the
 * beginning of the first query's segment, because segments are often shorter than a block. */
static int64_t first_block(const attn *a, const work *w, int64_t i0)
{
    int64_t first = a->window > 0 ? i0 + a->S - a->T - a->window + 1 : 0, step = KEYS;
    if (a->segmented && w->begin[i0] > first) first = w->begin[i0], step = ROWS;
    return first > 0 ? first / step * step : 0;
}
static block block_at(const attn *a, const work *w, int64_t b, int64_t h, int64_t i0, int nq, int64_t j0, int64_t seen)
{
    block k = { .b = b, .h = h, .i0 = i0, .j0 = j0, .nq = nq, .qv = (nq + VL - 1) / VL };
    int n = clamp(seen - j0, 0, KEYS);
    k.nk = (int)round_up(n, ROWS);
    k.shift = a->causal ? clamp(j0 - (a->S - a->T) - i0, -KEYS, QUERIES) : -KEYS;
    k.until = a->window > 0 ? clamp(j0 - (a->S - a->T) - i0 + a->window, -KEYS, QUERIES) : QUERIES;
    k.masked = n < k.nk || n - 1 + k.shift > 0 || nq > k.until || w->any_hidden ? HIDES : ALL_SEEN;
    if (a->segmented && (w->begin[i0 + nq - 1] > j0 || w->end[i0] < j0 + k.nk)) k.masked = SEGMENTED;
    return k;
}
/* Converts a value x of a 4-dimensional mask to the number that is added to a score: x * log2 e, or -infinity if x is
 * at most -1e30. Such a value hides the key. */
SIMD float bias_of(float x) { return x <= -1e30f ? -INFINITY : x * (float)LOG2E; }
static void load_bias(const attn *a, const block *k, work *w)
{
    int64_t size = ps_dtype_bytes(a->mask.dtype), n = a->S - k->j0 < k->nk ? a->S - k->j0 : k->nk;
    const char *base = (const char *)a->mask.data + (k->b * a->bias_step[0] + k->h * a->bias_step[1] + k->j0) * size;
    for (int i = 0; i < k->nq; i++) {
        const char *row = base + (k->i0 + i) * a->bias_step[2] * size;
        float *to = w->bias + i * KEYS;
        for (int64_t j = 0; j < n; j++) {
            if (a->mask.dtype == PS_F32) to[j] = bias_of(((const float *)row)[j]);
            else if (a->mask.dtype == PS_BF16) to[j] = bias_of(ps_bf16_to_f32(((const uint16_t *)row)[j]));
            else if (a->mask.dtype == PS_F16) to[j] = bias_of(ps_f16_to_f32(((const uint16_t *)row)[j]));
            else to[j] = ((const uint8_t *)row)[j] ? 0.0f : -INFINITY;
        }
    }
}
/* Multiplies the scores by the scale, and adds the bias. */
static void add_bias(const attn *a, const block *k, work *w)
{
    load_bias(a, k, w);
    for (int i = 0; i < k->nq; i++)
        for (int r = 0; r < clamp(a->S - k->j0, 0, k->nk); r++)
            w->p[r * QUERIES + i] = fmaf(w->p[r * QUERIES + i], a->scale2, w->bias[i * KEYS + r]);
}
/* Computes s [key][query] = keys [.., Dp] * qt [Dp, QUERIES]. The result is the scores if the operands are K and q, and
 * dp if the operands are V and dy. */
static void scores(const attn *a, const block *k, work *w, const float *keys, const float *qt, float *s)
{
    for (int g = 0; g < k->nk; g += ROWS) {
        int v = lead(k, g);
        fetch_some(w);
        product(0, k->qv - v, a->D, keys + g * a->Dp, a->Dp, 1, qt + v * VL, QUERIES, s + g * QUERIES + v * VL,
                QUERIES);
    }
}
/* Computes s^T * keys, and stores the product in out [query, Dp]. If `add` is set, adds it to out instead. The product
 * is y if `keys` is V, and dq if `keys` is K. */
static void gather_keys(const attn *a, const block *k, work *w, int add, const float *s, const float *keys, float *out)
{
    for (int i = 0; i < k->nq; i += ROWS) {
        fetch_some(w);
        int depth = clamp(i + ROWS - k->shift, 0, k->nk);
        product(add, a->nvec, depth, s + i, 1, QUERIES, keys, a->Dp, out + i * a->Dp, a->Dp);
    }
}
/* Adds s * queries to out [key, Dp]. The product is dv if `queries` is dy, and dk if `queries` is q. */
static void gather_queries(const attn *a, const block *k, work *w, const float *s, const float *queries, float *out)
{
    int nq = (int)round_up(k->nq, ROWS);
    for (int g = 0; g < k->nk; g += ROWS) {
        fetch_some(w);
        int first = clamp(g + k->shift, 0, nq);
        product(1, a->nvec, nq - first, s + g * QUERIES + first, QUERIES, 1, queries + first * a->Dp, a->Dp,
                out + g * a->Dp, a->Dp);
    }
}
/* Draws dropout bits for a block with segments. A segment counts as a sample of its own, with one query and one key for
 * each of its positions. A draw yields the bits of 64 elements. The bits are used for all following queries whose keys
 * in this block are among these elements. */
static void draw_keep_of_segments(const attn *a, const block *k, work *w)
{
    uint64_t at = 0, bits = 0;                        /* bits: 64 elements of segment `drawn`, starting at element
                                                       * `at` */
    int32_t drawn = -1;
    for (int i = 0; i < k->nq; i++) {
        int32_t begin = w->begin[k->i0 + i], n = w->end[k->i0 + i] - begin;
        int64_t from = begin > k->j0 ? begin : k->j0, to = begin + n < k->j0 + KEYS ? begin + n : k->j0 + KEYS;
        w->keep[i] = w->keep[QUERIES + i] = 0;
        if (n <= 0 || from >= to) continue;
        uint64_t row = (uint64_t)((a->first_head + k->h) * n + k->i0 + i - begin);
        uint64_t first = row * (uint64_t)n + (uint64_t)(from - begin);
        if (drawn != begin || first - at + (uint64_t)(to - from) > 64) {
            uint64_t sample = a->sample + (uint64_t)k->b + ps_segment_sample(begin);
            bits = keep_bits(a->seed, sample << 32, a->counter_hi, first, a->limit);
            at = first, drawn = begin;
        }
        uint64_t mine = bits >> (first - at) << (from - k->j0);
        w->keep[i] = (uint32_t)mine;
        w->keep[QUERIES + i] = (uint32_t)(mine >> 32);
    }
}
/* Draws dropout bits for a block. A draw yields the bits of 64 elements of the stream. If rows are short, the elements
 * can belong to several rows. The bits are used for all following queries whose keys in this block are among the 64
 * elements. */
static void draw_keep(const attn *a, const block *k, work *w)
{
    if (a->segmented) {
        draw_keep_of_segments(a, k, w);
        return;
    }
    uint64_t n = (uint64_t)clamp(a->S - k->j0, 0, KEYS), at = 0, bits = 0;   /* bits: 64 elements, starting at element
                                                                              * `at` */
    for (int i = 0; i < k->nq; i++) {
        uint64_t row = (uint64_t)((a->first_head + k->h) * a->T + k->i0 + i);
        uint64_t first = row * (uint64_t)a->S + (uint64_t)k->j0;
        if (i == 0 || first - at + n > 64) {
            bits = keep_bits(a->seed, (a->sample + (uint64_t)k->b) << 32, a->counter_hi, first, a->limit);
            at = first;
        }
        uint64_t mine = bits >> (first - at);
        w->keep[i] = (uint32_t)mine;
        w->keep[QUERIES + i] = (uint32_t)(mine >> 32);
    }
}
/* Returns a mask for the queries c, c + 1, and so on. All bits of a lane are set if the lane's query sees key r.
 * `masked` is the constant HIDES or SEGMENTED. */
SIMD vni seen_by(const work *w, const block *k, int r, int c, int masked)
{
    vni lane = vn_lanes(c), begin, end;
    vni seen = (lane >= (w->hidden[k->j0 + r] ? QUERIES : r + k->shift)) & (lane < r + k->until);
    if (masked != SEGMENTED) return seen;
    memcpy(&begin, w->begin + k->i0 + c, sizeof begin);
    memcpy(&end, w->end + k->i0 + c, sizeof end);
    int32_t key = (int32_t)k->j0 + r;
    return seen & (begin <= key) & (end > key);
}
SIMD vni kept_by(const work *w, int r, int c)
{
    vnu bits;
    memcpy(&bits, w->keep + r / 32 * QUERIES + c, sizeof bits);
    return (vni)(bits << (31 - r % 32)) < 0;
}
/* Returns the number of keys that have scores for the query vector that begins at query c. */
SIMD int rows_of(const block *k, int c) { return clamp(round_up((c / VL + 1) * VL - k->shift, ROWS), 0, k->nk); }

/* -- forward ------------------------------------------------------------------------------------------------------ */
/* Replaces the scores of a block by weights relative to the new running maximum. The caller must multiply the sums over
 * earlier blocks by w->factor. masked and drop are constants. */
SIMD void softmax_block(const attn *a, const block *k, work *w, int masked, bool drop)
{
    vn scale = vn_set(a->biased ? 1.0f : a->scale2), keep_scale = vn_set(a->keep_scale);
    for (int c = 0; c < k->qv * VL; c += LANES) {
        float *s = w->p + c;
        int n = rows_of(k, c);
        vn old = vn_load(w->max + c), top[2] = { old, old }, sum[2] = { vn_set(0), vn_set(0) };
        for (int r = 0; r < n; r += 2)
#pragma GCC unroll 2
            for (int u = 0; u < 2; u++) {
                vn x = vn_load(s + (r + u) * QUERIES) * scale;
                if (masked) x = vn_select(seen_by(w, k, r + u, c, masked), x, vn_set(NO_SCORE));
                top[u] = vn_max(x, top[u]);
            }
        vn now = vn_max(top[0], top[1]), factor = vn_exp2_neg(old - now);
        for (int r = 0; r < n; r += 2)
#pragma GCC unroll 2
            for (int u = 0; u < 2; u++) {
                vn x = vn_exp2_neg(vn_fma(vn_load(s + (r + u) * QUERIES), scale, -now));
                if (masked) x = vn_and(seen_by(w, k, r + u, c, masked), x);
                sum[u] += x;
                if (drop) x = vn_and(kept_by(w, r + u, c), x * keep_scale);
                vn_store(s + (r + u) * QUERIES, x);
            }
        vn_store(w->max + c, now);
        vn_store(w->sum + c, vn_fma(vn_load(w->sum + c), factor, sum[0] + sum[1]));
        vn_store(w->factor + c, factor);
    }
}
static void rescale_rows(const attn *a, const block *k, work *w)
{
    for (int i = 0; i < k->nq; i++) {
        if (w->factor[i] == 1.0f) continue;
        vf f = vf_set(w->factor[i]);
        float *row = w->out + i * a->Dp;
        for (int64_t d = 0; d < a->Dp; d += VL) vf_store(row + d, vf_load(row + d) * f);
    }
}
/* Sets factor to the reciprocals of the sums, and replaces the sums by lse. */
static void finish_sums(work *w)
{
    for (int v = 0; v < QV; v++) {
        vf sum = vf_load(w->sum + v * VL);
        vi none = sum == vf_zero();
        vf_store(w->factor + v * VL, vf_select(none, vf_zero(), vf_set(1.0f) / sum));
        vf lse = (vf_load(w->max + v * VL) + vf_log2(sum)) * vf_set((float)LN2);
        vf_store(w->sum + v * VL, vf_select(none, vf_set(-INFINITY), lse));
    }
}
/* Stores y and lse of nq queries of head h. y is in w->out and lse is in w->sum, both starting at row `from`. */
static void store_queries(const attn *a, const work *w, int64_t b, int64_t h, int64_t i0, int nq, int from)
{
    store_rows(a, &a->y, b, h, i0, nq, w->out + from * a->Dp, w->factor + from, 1);
    float *lse = (float *)a->lse.data + b * a->lse.stride[0] + h * a->lse.stride[1] + i0 * a->lse.stride[2];
    for (int i = 0; i < nq; i++) lse[i * a->lse.stride[2]] = w->sum[from + i];
}
/* Calls softmax_block with constants for masked and drop. */
static void softmax_of(const attn *a, const block *k, work *w)
{
    if (a->drop) {
        draw_keep(a, k, w);
        if (k->masked == SEGMENTED) softmax_block(a, k, w, SEGMENTED, true);
        else softmax_block(a, k, w, HIDES, true);
    } else if (k->masked == SEGMENTED) {
        softmax_block(a, k, w, SEGMENTED, false);
    } else if (k->masked == HIDES) {
        softmax_block(a, k, w, HIDES, false);
    } else {
        softmax_block(a, k, w, ALL_SEEN, false);
    }
}
static void forward_queries(const attn *a, work *w, int64_t b, int64_t h, int64_t i0)
{
    int nq = clamp(a->T - i0, 0, QUERIES);
    int64_t seen = keys_seen(a, w, i0, nq), first = first_block(a, w, i0);
    load_rows(a, &a->q, b, h, i0, nq, round_up(nq, VL), w->q);
    transpose_panel(a, w->q, (nq + VL - 1) / VL, w->qt);
    will_write(w, 0, &a->y, b, h, i0, nq);
    for (int i = 0; i < QUERIES; i++) w->max[i] = NO_SCORE, w->sum[i] = 0;
    if (seen <= first) memset(w->out, 0, (size_t)(QUERIES * a->Dp) * sizeof *w->out);
    for (int64_t j0 = first; j0 < seen; j0 += KEYS) {
        block k = block_at(a, w, b, h, i0, nq, j0, seen);
        scores(a, &k, w, w->k + j0 * a->Dp, w->qt, w->p);
        if (a->biased) add_bias(a, &k, w);
        softmax_of(a, &k, w);
        if (j0 > first) rescale_rows(a, &k, w);
        gather_keys(a, &k, w, j0 > first, w->p, w->v + j0 * a->Dp, w->out);
    }
    finish_sums(w);
    store_queries(a, w, b, h, i0, nq, 0);
}

/* -- forward of one query ----------------------------------------------------------------------------------------- */
/* Returns true if each head has only one query. This is the case if a model continues a text token by token. Separate
 * code handles this case. With blocks, one query would take as long as 16 queries, and all keys would be packed for one
 * query. In the separate code, each lane belongs to a key or to an element of the output. The order of sums is the same
 * as in blocks, so the bits do not depend on the number of queries. */
static bool is_one_query(const attn *a)
{
    return a->T == 1 && a->S > 0 && !a->drop && !ps_has(&a->mask) && a->window <= 0;
}
/* Computes one row of a product: adds terms [count] * rows [count, ld] to sum [16 * vectors]. Uses as many partial sums
 * as tile(). */
static void add_rows(int64_t vectors, int64_t count, const float *terms, const float *rows, int64_t ld, float *sum)
{
    enum { MOST = 4 * LANES / VL };
    for (; vectors >= MOST; vectors -= MOST, rows += MOST * VL, sum += MOST * VL)
        tile(1, MOST, 1, count, terms, 0, 1, rows, ld, sum, 0);
    for (; vectors > 0; vectors--, rows += VL, sum += VL) tile(1, 1, 1, count, terms, 0, 1, rows, ld, sum, 0);
}
/* Computes the scores of n keys of head (b, g), starting at key j0, and writes the scores to w->p [heads, KEYS]. w->k
 * contains the queries. */
static void scores_of_one(const attn *a, work *w, int64_t b, int64_t g, int64_t j0, int n, int heads)
{
    int vectors = (n + VL - 1) / VL;
    memset(w->p, 0, (size_t)(heads * KEYS) * sizeof *w->p);
    load_rows(a, &a->k, b, g, j0, n, vectors * VL, w->q);
    for (int64_t d0 = 0; d0 < a->D; d0 += VL) {
        for (int v = 0; v < vectors; v++) transpose16(w->q + v * VL * a->Dp + d0, a->Dp, w->qt + v * VL, KEYS);
        for (int i = 0; i < heads; i++)
            add_rows(vectors, clamp(a->D - d0, 0, VL), w->k + i * a->Dp + d0, w->qt, KEYS, w->p + i * KEYS);
    }
}
/* Replaces the n scores in row i of w->p by weights relative to the new running maximum. Returns the factor by which
 * the caller must multiply the sums over earlier keys. */
static float softmax_of_one(const attn *a, work *w, int n, int i)
{
    vn scale = vn_set(a->scale2);
    float old = w->max[i], now = old, sum[2] = { 0, 0 }, top[LANES], *p = w->p + i * KEYS;
    vn most = vn_set(old), factor;
    memset(p + n, 0, (size_t)(KEYS - n) * sizeof *p);
    for (int r = 0; r < n; r += LANES)
        most = vn_max(vn_select(vn_lanes(r) < n, vn_load(p + r) * scale, vn_set(NO_SCORE)), most);
    vn_store(top, most);
    for (int r = 0; r < LANES; r++) now = top[r] > now ? top[r] : now;
    for (int r = 0; r < n; r += LANES) vn_store(p + r, vn_exp2_neg(vn_fma(vn_load(p + r), scale, vn_set(-now))));
    for (int r = 0; r < n; r++) sum[r % 2] += p[r];
    factor = vn_exp2_neg(vn_set(old - now));
    w->max[i] = now;
    w->sum[i] = fmaf(w->sum[i], factor[0], sum[0] + sum[1]);
    return factor[0];
}
/* Multiplies the weights in w->p by the values of n keys, starting at key j0, and adds the products to w->out [heads,
 * Dp]. */
static void weigh(const attn *a, work *w, int64_t b, int64_t g, int64_t j0, int n, int heads)
{
    const float *rows = w->q;
    int64_t ld = a->Dp;
    if (a->v.dtype == PS_F32 && a->D == a->Dp) {
        rows = (const float *)row_of(&a->v, b, g, j0);
        ld = a->v.stride[2];
    } else load_rows(a, &a->v, b, g, j0, n, n, w->q);
    for (int i = 0; i < heads; i++) {
        float *out = w->out + i * a->Dp;
        add_rows(a->nvec, n, w->p + i * KEYS, rows, ld, out);
        if (n % ROWS == 0) continue;
        /* Turns -0 into 0, as blocks do. The sums of a block end with zero weights times zero rows. */
        for (int64_t d = 0; d < a->Dp; d += LANES) vn_store(out + d, vn_load(out + d) + vn_set(0));
    }
}
/* Computes the output for the single query of each of the heads h, h + step, and so on. These heads share key head g,
 * so each block of keys is loaded only once. */
static __attribute__((noinline)) void forward_one(const attn *a, work *w, int64_t b, int64_t h, int64_t step, int heads,
                                                  int64_t g)
{
    for (int i = 0; i < heads; i++) load_rows(a, &a->q, b, h + i * step, 0, 1, 1, w->k + i * a->Dp);
    for (int i = 0; i < QUERIES; i++) w->max[i] = NO_SCORE, w->sum[i] = 0;
    memset(w->out, 0, (size_t)(heads * a->Dp) * sizeof *w->out);
    for (int64_t j0 = 0; j0 < a->S; j0 += KEYS) {
        int n = clamp(a->S - j0, 0, KEYS);
        scores_of_one(a, w, b, g, j0, n, heads);
        for (int i = 0; i < heads; i++) {
            float factor = softmax_of_one(a, w, n, i), *out = w->out + i * a->Dp;
            if (j0 > 0 && factor != 1.0f)
                for (int64_t d = 0; d < a->Dp; d += LANES) vn_store(out + d, vn_load(out + d) * vn_set(factor));
        }
        weigh(a, w, b, g, j0, n, heads);
    }
    finish_sums(w);
    for (int i = 0; i < heads; i++) store_queries(a, w, b, h + i * step, 0, 1, i);
}
/* The heads that share key head g are divided into `cuts` interleaved parts. Calls forward_one for part `cut`. The
 * queries are in w->k, which has at least as many rows as a tile. */
static void forward_one_group(const attn *a, work *w, int64_t b, int64_t g, int64_t cut, int64_t cuts)
{
    int64_t shared = a->H / a->G, most = a->Sp < QUERIES ? a->Sp : QUERIES;
    for (int64_t i = cut; i < shared; i += most * cuts)
        forward_one(a, w, b, g * shared + i, cuts, clamp((shared - i + cuts - 1) / cuts, 0, (int)most), g);
}

/* -- backward ----------------------------------------------------------------------------------------------------- */
/* Returns the weights of key r before dropout, for the queries of the vector that begins at query c. masked is a
 * constant. */
SIMD vn weight_of(const attn *a, const block *k, const work *w, int r, int c, int masked)
{
    vn lse = vn_load(w->max + c);
    float scale = a->biased ? 1.0f : a->scale2;
    vn p = vn_exp2_neg(vn_fma(vn_load(w->p + r * QUERIES + c), vn_set(scale), -lse));
    return masked ? vn_and(seen_by(w, k, r, c, masked), p) : p;
}
SIMD vn weight_gradient(const attn *a, const work *w, int r, int c, bool drop)
{
    vn dp = vn_load(w->dp + r * QUERIES + c);
    return drop ? vn_and(kept_by(w, r, c), dp * vn_set(a->keep_scale)) : dp;
}
/* Replaces the scores in p by weights after dropout, and dp by the gradient of the unscaled scores. masked and drop are
 * constants.
 * If `alone` is set, the block contains all keys of its queries, in fp32. In this case the weights are divided by their
 * own sum, because for large scores the rounding error of lse would affect all weights of a query. In addition, delta
 * is computed as the sum of p * dp, because dy * y contains the rounding error of y. If one weight is nearly 1, this
 * error is not small compared to dp - delta. */
SIMD void softmax_block_backward(const attn *a, const block *k, work *w, int masked, bool drop, bool alone)
{
    for (int c = 0; c < k->qv * VL; c += LANES) {
        int n = rows_of(k, c);
        vn delta = vn_load(w->factor + c), share = vn_set(1);
        if (alone) {
            vn all[2] = { vn_set(0), vn_set(0) }, sum[2] = { vn_set(0), vn_set(0) };
            for (int r = 0; r < n; r += 2)
#pragma GCC unroll 2
                for (int u = 0; u < 2; u++) {
                    vn p = weight_of(a, k, w, r + u, c, masked);
                    all[u] += p;
                    sum[u] = vn_fma(p, weight_gradient(a, w, r + u, c, drop), sum[u]);
                }
            vn total = all[0] + all[1];
            share = vn_select(total > vn_set(0), vn_set(1) / total, vn_set(0));
            delta = (sum[0] + sum[1]) * share;
        }
        for (int r = 0; r < n; r++) {
            vn p = weight_of(a, k, w, r, c, masked), dp = weight_gradient(a, w, r, c, drop);
            if (alone) p *= share;
            vn given = drop ? vn_and(kept_by(w, r, c), p * vn_set(a->keep_scale)) : p;
            vn_store(w->p + r * QUERIES + c, given);
            vn_store(w->dp + r * QUERIES + c, p * (dp - delta));
        }
    }
}
/* Returns the number of queries at the beginning of [i0, i0 + nq) that see at most one key. The weight of a single key
 * is 1 for any score, so the gradient of the score must be exactly 0. Otherwise Adam would turn the rounding error of
 * dp - delta into a step. */
static int sure_queries(const attn *a, const work *w, int64_t i0, int nq)
{
    if (w->second >= a->S || a->window == 1) return nq;
    return a->causal ? clamp(w->second - (a->S - a->T) - i0, 0, nq) : 0;
}
/* Sets factor[i] to the delta of query i. delta is the sum of dy * y over the D elements of the query's row. w->out is
 * scratch memory. */
static void load_delta(const attn *a, work *w, int64_t b, int64_t h, int64_t i0, int nq)
{
    float part[VL * VL], turned[VL * VL];
    load_rows(a, &a->y, b, h, i0, nq, round_up(nq, VL), w->out);
    for (int v = 0; v < (nq + VL - 1) / VL; v++) {
        for (int i = 0; i < VL; i++) {
            const float *y = w->out + (v * VL + i) * a->Dp, *dy = w->dy + (v * VL + i) * a->Dp;
            vf sum = vf_zero();
            for (int64_t d = 0; d < a->Dp; d += VL) sum = vf_fma(vf_load(y + d), vf_load(dy + d), sum);
            vf_store(part + i * VL, sum);
        }
        transpose16(part, VL, turned, VL);
        vf delta = vf_zero();
        for (int i = 0; i < VL; i++) delta += vf_load(turned + i * VL);
        vf_store(w->factor + v * VL, delta);
    }
}
/* Sets max[i] to lse * log2 e. If query i saw no key, sets max[i] to +infinity, so that the query's weights become
 * 0. */
static void load_lse(const attn *a, work *w, int64_t b, int64_t h, int64_t i0, int nq)
{
    const float *lse = (const float *)a->lse.data + b * a->lse.stride[0] + h * a->lse.stride[1] + i0 * a->lse.stride[2];
    for (int i = 0; i < QUERIES; i++) {
        float x = i < nq ? lse[i * a->lse.stride[2]] : -INFINITY;
        w->max[i] = x == -INFINITY ? INFINITY : x * (float)LOG2E;
    }
}
/* Sets dp to 0 for queries that see at most one key of their segment. sure_queries cannot count these queries, because
 * a segment can end within a block. */
static void clear_sure(const attn *a, work *w, const block *k)
{
    for (int c = 0; c < k->nq; c++) {
        int64_t i = k->i0 + c, last = a->causal && w->end[i] > i ? i + 1 : w->end[i];
        if (last - w->begin[i] > 1 && a->window != 1) continue;
        for (int r = 0; r < k->nk; r++) w->dp[r * QUERIES + c] = 0;
    }
}
static void softmax_backward_of(const attn *a, const block *k, work *w, bool alone)
{
    if (a->drop) {
        draw_keep(a, k, w);
        if (k->masked == SEGMENTED) softmax_block_backward(a, k, w, SEGMENTED, true, alone);
        else softmax_block_backward(a, k, w, HIDES, true, alone);
    } else if (k->masked == SEGMENTED) {
        softmax_block_backward(a, k, w, SEGMENTED, false, alone);
    } else if (k->masked == HIDES) {
        softmax_block_backward(a, k, w, HIDES, false, alone);
    } else {
        softmax_block_backward(a, k, w, ALL_SEEN, false, alone);
    }
}
static void backward_queries(const attn *a, work *w, int64_t b, int64_t h, int64_t i0)
{
    int nq = clamp(a->T - i0, 0, QUERIES), qv = (nq + VL - 1) / VL;
    int sure = sure_queries(a, w, i0, nq);
    int64_t seen = keys_seen(a, w, i0, nq), first = first_block(a, w, i0);
    bool want_ds = ps_has(&a->dq) || ps_has(&a->dk);
    load_rows(a, &a->q, b, h, i0, nq, round_up(nq, VL), w->q);
    load_rows(a, &a->dy, b, h, i0, nq, round_up(nq, VL), w->dy);
    transpose_panel(a, w->q, qv, w->qt);
    if (want_ds) transpose_panel(a, w->dy, qv, w->dyt);
    load_delta(a, w, b, h, i0, nq);
    load_lse(a, w, b, h, i0, nq);
    memset(w->out, 0, (size_t)(qv * VL * a->Dp) * sizeof *w->out);
    will_write(w, 0, &a->dq, b, h, i0, nq);
    for (int64_t j0 = first; j0 < seen; j0 += KEYS) {
        block k = block_at(a, w, b, h, i0, nq, j0, seen);
        int64_t at = j0 * a->Dp;
        scores(a, &k, w, w->k + at, w->qt, w->p);
        if (a->biased) add_bias(a, &k, w);
        if (want_ds) scores(a, &k, w, w->v + at, w->dyt, w->dp);
        bool alone = seen <= first + KEYS && a->y.dtype == PS_F32;
        softmax_backward_of(a, &k, w, alone);
        if (sure > 0)
            for (int r = 0; r < k.nk; r++) memset(w->dp + r * QUERIES, 0, (size_t)sure * sizeof *w->dp);
        if (a->segmented) clear_sure(a, w, &k);
        if (ps_has(&a->dv)) gather_queries(a, &k, w, w->p, w->dy, w->dv + at);
        if (ps_has(&a->dq)) gather_keys(a, &k, w, 1, w->dp, w->k + at, w->out);
        if (ps_has(&a->dk)) gather_queries(a, &k, w, w->dp, w->q, w->dk + at);
    }
    if (ps_has(&a->dq)) store_rows(a, &a->dq, b, h, i0, nq, w->out, &a->scale, 0);
}
/* Computes the gradients of all heads that share the keys of head (b, g). */
static void backward_group(const attn *a, work *w, int64_t b, int64_t g)
{
    const float one = 1.0f;
    int64_t heads = a->H / a->G;
    load_keys(a, w, b, g);
    memset(w->dk, 0, (size_t)(a->Sp * a->Dp) * sizeof *w->dk);
    memset(w->dv, 0, (size_t)(a->Sp * a->Dp) * sizeof *w->dv);
    for (int64_t h = g * heads; h < (g + 1) * heads; h++)
        for (int64_t i0 = 0; i0 < a->T; i0 += QUERIES) {
            if (h == (g + 1) * heads - 1 && i0 + QUERIES >= a->T) {
                will_write(w, 1, &a->dk, b, g, 0, a->S);
                will_write(w, 2, &a->dv, b, g, 0, a->S);
            }
            backward_queries(a, w, b, h, i0);
        }
    if (ps_has(&a->dk)) store_rows(a, &a->dk, b, g, 0, a->S, w->dk, &a->scale, 0);
    if (ps_has(&a->dv)) store_rows(a, &a->dv, b, g, 0, a->S, w->dv, &one, 0);
}

/* -- a call ------------------------------------------------------------------------------------------------------- */
/* Divides a thread's memory, which begins at `at`, among the fields of w. Returns the end of the memory. If `at` is
 * NULL, the returned pointer is the size of the memory in bytes. */
static char *work_at(const attn *a, bool backward, char *at, work *w)
{
    int64_t keys = a->Sp * a->Dp, queries = QUERIES * a->Dp, square = KEYS * QUERIES;
    struct { void *field; int64_t nbytes; } part[] = {
        { &w->k, keys * 4 }, { &w->v, keys * 4 }, { &w->q, queries * 4 }, { &w->qt, queries * 4 },
        { &w->out, queries * 4 }, { &w->p, square * 4 }, { &w->max, QUERIES * 4 }, { &w->sum, QUERIES * 4 },
        { &w->factor, QUERIES * 4 }, { &w->keep, 2 * QUERIES * 4 }, { &w->hidden, a->Sp },
        { &w->bias, a->biased ? square * 4 : 0 },
        { &w->begin, a->segmented ? (a->T + QUERIES) * 4 : 0 }, { &w->end, a->segmented ? (a->T + QUERIES) * 4 : 0 },
        { &w->dk, keys * 4 }, { &w->dv, keys * 4 }, { &w->dy, queries * 4 }, { &w->dyt, queries * 4 },
        { &w->dp, square * 4 } };
    int n = (int)(sizeof part / sizeof *part) - (backward ? 0 : 5);
    uintptr_t p = (uintptr_t)at;
    for (int i = 0; i < n; i++) {
        memcpy(part[i].field, &p, sizeof p);
        p += (uintptr_t)round_up(part[i].nbytes, 64);
    }
    return (char *)p;
}
static bool float_view(const ps_view *x)
{
    return x->dtype == PS_F32 || x->dtype == PS_BF16 || x->dtype == PS_F16;
}
/* Returns true if the kernels can read an operand. The operand must be absent, or it must have a float type and rows of
 * D adjacent elements. */
static bool usable(const ps_view *x)
{
    return !ps_has(x) || (float_view(x) && x->ndim == 4 && (x->stride[3] == 1 || x->shape[3] <= 1));
}
/* Returns true if the kernels can read x as k or v. In forward, k and v can also consist of Q8_0 blocks. */
static bool usable_keys(const ps_view *x) { return (x->dtype == PS_U8 && x->stride[3] == 1) || usable(x); }
/* Returns true if the kernels can read the mask. A mask with 2 dimensions contains bytes or int32 segments. A mask with
 * 4 dimensions contains bytes or floats, and its last dimension is contiguous. */
static bool mask_usable(attn *a)
{
    const ps_view *m = &a->mask;
    if (!ps_has(m)) return true;
    bool bytes = m->dtype == PS_BOOL || m->dtype == PS_U8;
    a->biased = m->ndim == 4;
    a->segmented = !a->biased && m->dtype == PS_I32;
    if (!a->biased) return bytes || (a->segmented && a->q.shape[2] <= INT32_MAX - QUERIES);
    for (int d = 0; d < 3; d++) a->bias_step[d] = m->shape[d] == 1 ? 0 : m->stride[d];
    return (bytes || float_view(m)) && (m->stride[3] == 1 || m->shape[3] <= 1);
}
/* Divides the key heads among the threads. If there are fewer key heads than threads, forward divides the queries that
 * share a key head into `cuts` interleaved parts. */
static int run(attn *a, ps_call *call, bool backward)
{
    if (!usable(&a->q) || !usable_keys(&a->k) || !usable_keys(&a->v) || !usable(&a->y) || !usable(&a->dy) ||
        !usable(&a->dq) || !usable(&a->dk) || !usable(&a->dv) || a->lse.dtype != PS_F32 || !mask_usable(a))
        return PS_EUNSUP;
    a->B = a->q.shape[0], a->H = a->q.shape[1], a->T = a->q.shape[2], a->D = a->q.shape[3], a->S = a->k.shape[2];
    a->G = a->k.shape[1] > 0 ? a->k.shape[1] : 1;
    a->Dp = round_up(a->D, VL), a->Sp = round_up(a->S, ROWS), a->nvec = a->Dp / VL;
    int64_t heads = a->H > 0 ? a->B * a->G : 0, shared = a->H / a->G, threads = omp_get_max_threads(), cuts = 1;
    int64_t per_head = (a->T + QUERIES - 1) / QUERIES, blocks = shared * per_head;
    bool one = !backward && is_one_query(a);
    if (heads == 0 || (a->T == 0 && !backward)) return 0;
    double least = one ? 2.0 * PS_PAR_MIN : 16.0 * PS_PAR_MIN;    /* lower if there is one query, because a call also
                                                                   * converts all keys and values */
    if ((double)heads * (double)shared * (double)a->T * (double)a->S * (double)a->D < least) threads = 1;
    if (!backward && heads < threads) cuts = (threads + heads - 1) / heads;
    if (cuts > blocks) cuts = blocks > 0 ? blocks : 1;
    if (threads > heads * cuts) threads = heads * cuts;

    work none;
    size_t need = (size_t)(uintptr_t)work_at(a, backward, NULL, &none);
    char *memory = call->scratch(call, need * (size_t)threads);
    if (!memory) return PS_ENOMEM;                           /* scratch() has recorded the error */
    if (call->dry) return 0;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        work w;
        work_at(a, backward, memory + need * (size_t)omp_get_thread_num(), &w);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < heads * cuts; item++) {
            int64_t b = item / cuts / a->G, g = item / cuts % a->G;
            next_head(a, &w, (item + threads) / cuts);
            if (backward) {
                backward_group(a, &w, b, g);
                continue;
            }
            if (one) {
                forward_one_group(a, &w, b, g, item % cuts, cuts);
                continue;
            }
            load_keys(a, &w, b, g);
            for (int64_t i = item % cuts; i < blocks; i += cuts)
                forward_queries(a, &w, b, g * shared + i / per_head, i % per_head * QUERIES);
        }
    }
    return 0;
}

/* Sets the fields that the four attribute structs have in common. */
static attn attn_new(double scale, int causal, double p, uint64_t seed, uint64_t step, uint64_t sample, uint32_t op,
                     int first_head)
{
    attn a = { .scale = (float)scale, .causal = causal != 0, .drop = p > 0, .seed = seed, .sample = sample,
               .first_head = first_head };
    a.scale2 = (float)(scale * LOG2E);
    a.counter_hi = step << 32 | op;
    a.limit = (int32_t)ceil((p < 1 ? p : 1.0) * 0x1p24);
    a.keep_scale = p < 1 ? (float)(1 / (1 - p)) : 0.0f;
    ps_view *optional[] = { &a.mask, &a.dy, &a.dq, &a.dk, &a.dv };
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++) optional[i]->ndim = -1;
    return a;
}
static int attention(ps_call *call)
{
    const ps_attrs_attention *at = call->attrs;
    attn a = attn_new(at->scale, at->causal, at->p, at->seed, at->step, at->sample, at->op, at->first_head);
    a.q = call->in[0], a.k = call->in[1], a.v = call->in[2], a.mask = call->in[3];
    a.y = call->out[0], a.lse = call->out[1], a.window = at->window;
    return run(&a, call, false);
}
static int attention_backward(ps_call *call)
{
    const ps_attrs_attention_backward *at = call->attrs;
    attn a = attn_new(at->scale, at->causal, at->p, at->seed, at->step, at->sample, at->op, at->first_head);
    a.dy = call->in[0], a.q = call->in[1], a.k = call->in[2], a.v = call->in[3], a.mask = call->in[4];
    a.y = call->in[5], a.lse = call->in[6], a.window = at->window;
    a.dq = call->out[0], a.dk = call->out[1], a.dv = call->out[2];
    return run(&a, call, true);
}
/* x [B, T, parts * heads * D] consists of `parts` parts. Returns a view of one part as [B, heads, T, D]. */
static ps_view head_view(const ps_view *x, int part, int parts, int64_t heads)
{
    ps_view y = { .dtype = x->dtype, .ndim = 4 };
    int64_t C = x->shape[2] / parts, D = C / heads;
    y.data = (char *)x->data + part * C * ps_dtype_bytes(x->dtype);
    y.numel = x->numel / parts;
    int64_t shape[4] = { x->shape[0], heads, x->shape[1], D };
    int64_t stride[4] = { x->shape[1] * parts * C, D, parts * C, 1 };
    memcpy(y.shape, shape, sizeof shape);
    memcpy(y.stride, stride, sizeof stride);
    return y;
}
static double packed_scale(double scale, const ps_view *qkv, int64_t heads)
{
    return scale != 0 ? scale : 1 / sqrt((double)(qkv->shape[2] / 3 / heads));
}
static int attention_packed(ps_call *call)
{
    const ps_attrs_attention_packed *at = call->attrs;
    const ps_view *qkv = &call->in[0];
    double scale = packed_scale(at->scale, qkv, at->heads);
    attn a = attn_new(scale, at->causal, at->p, at->seed, at->step, at->sample, at->op, at->first_head);
    a.q = head_view(qkv, 0, 3, at->heads), a.k = head_view(qkv, 1, 3, at->heads), a.v = head_view(qkv, 2, 3, at->heads);
    a.mask = call->in[1];
    a.y = head_view(&call->out[0], 0, 1, at->heads), a.lse = call->out[1];
    return run(&a, call, false);
}
static int attention_packed_backward(ps_call *call)
{
    const ps_attrs_attention_packed_backward *at = call->attrs;
    const ps_view *qkv = &call->in[1], *dqkv = &call->out[0];
    double scale = packed_scale(at->scale, qkv, at->heads);
    attn a = attn_new(scale, at->causal, at->p, at->seed, at->step, at->sample, at->op, at->first_head);
    a.dy = head_view(&call->in[0], 0, 1, at->heads), a.y = head_view(&call->in[3], 0, 1, at->heads);
    a.q = head_view(qkv, 0, 3, at->heads), a.k = head_view(qkv, 1, 3, at->heads), a.v = head_view(qkv, 2, 3, at->heads);
    a.mask = call->in[2], a.lse = call->in[4];
    if (ps_has(dqkv)) {
        a.dq = head_view(dqkv, 0, 3, at->heads), a.dk = head_view(dqkv, 1, 3, at->heads);
        a.dv = head_view(dqkv, 2, 3, at->heads);
    }
    return run(&a, call, true);
}

void PS_ISA_FN(ps_cpu_fill_attention)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_attention)(ps_kernel *k)
{
    k[PS_OP_attention] = attention;
    k[PS_OP_attention_backward] = attention_backward;
    k[PS_OP_attention_packed] = attention_packed;
    k[PS_OP_attention_packed_backward] = attention_packed_backward;
}
