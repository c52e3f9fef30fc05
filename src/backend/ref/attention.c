/* SPDX-License-Identifier: BSD-3-Clause
 * Attention: y = dropout(softmax(scale q k^T)) v. It is computed one head at a time, with all weights of a query in
 * memory. The packed ops use views of q, k and v in qkv [B, T, 3C]. Backward computes the weights again in double. It
 * does not read the saved y and lse, because their values may be rounded. */
#include "ref.h"
#include "base/blocks.h"

struct attention {
    ps_view q, k, v, mask;             /* q is [B, H, T, D]; k and v are [B, G, S, D];
                                        * mask is [B, S] or [B|1, H|1, T|1, S] */
    ps_view segments;                  /* int32 [B, T]; used instead of the mask */
    int64_t B, H, T, S, D, group;      /* group: number of heads that share keys, H / G */
    int64_t window;                    /* maximum number of keys that a query sees, or 0 for no limit */
    double scale, p;
    bool causal;
    uint64_t seed, step, sample;
    uint32_t op;
    int64_t first_head;                /* the first head of this rank, if the heads are divided among ranks */
};

#define ATTENTION_SET(t, a)                                                                           \
    ((t)->scale = (a)->scale, (t)->causal = (a)->causal != 0, (t)->p = (a)->p, (t)->seed = (a)->seed, \
     (t)->step = (a)->step, (t)->sample = (a)->sample, (t)->op = (a)->op, (t)->first_head = (a)->first_head)

/* Sets the mask or the segments of t from the input `mask` of the ops. */
static void set_mask(struct attention *t, const ps_view *mask)
{
    t->mask = t->segments = *mask;
    if (ps_has(mask) && mask->dtype == PS_I32) t->mask.ndim = -1;
    else t->segments.ndim = -1;
}

static void set_sizes(struct attention *t)
{
    t->B = t->q.shape[0], t->H = t->q.shape[1], t->T = t->q.shape[2], t->D = t->q.shape[3];
    t->S = t->k.shape[2];
    t->group = t->k.shape[1] > 0 ? t->H / t->k.shape[1] : 1;
}

/* Returns the number that the mask adds to the score of query i and key j. If the mask is bool, the number is 0 or
 * -infinity. */
static double bias(const struct attention *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const ps_view *m = &t->mask;
    int64_t place[] = { b, h, i, j }, at = m->ndim == 2 ? b * m->stride[0] + j * m->stride[1] : 0;
    if (!ps_has(m)) return 0;
    for (int d = 0; m->ndim == 4 && d < 4; d++) at += m->shape[d] == 1 ? 0 : place[d] * m->stride[d];
    double x = ref_load(m, at);
    if (m->dtype == PS_BOOL) return x != 0 ? 0 : -INFINITY;
    return x <= -1e30 ? -INFINITY : x;
}

/* The first and the last position of the segment that contains a position i. If i is padding, first is i and last is i
 * - 1. If there are no segments, the run contains all keys. */
struct run { int64_t first, last; };

static struct run run_of(const struct attention *t, int64_t b, int64_t i)
{
    struct run r = { 0, t->S - 1 };
    if (!ps_has(&t->segments)) return r;
    const char *id = (const char *)t->segments.data + b * t->segments.stride[0] * 4;
    int64_t step = t->segments.stride[1] * 4;
#define ID(j) (*(const int32_t *)(id + (j) * step))
    r = (struct run){ i, ID(i) == 0 ? i - 1 : i };
    while (ID(i) != 0 && r.first > 0 && ID(r.first - 1) == ID(i)) r.first--;
    while (ID(i) != 0 && r.last + 1 < t->S && ID(r.last + 1) == ID(i)) r.last++;
#undef ID
    return r;
}

/* Finds the first and the last key that causal order, window and segments allow query i to see. The mask can hide some
 * of the keys from *first to *last. */
static void keys_of(const struct attention *t, int64_t b, int64_t i, int64_t *first, int64_t *last)
{
    int64_t at = i + t->S - t->T;
    *first = t->window > 0 && at >= t->window ? at - t->window + 1 : 0;
    *last = t->causal && at < t->S ? at : t->S - 1;
    struct run r = run_of(t, b, i);
    *first = r.first > *first ? r.first : *first;
    *last = r.last < *last ? r.last : *last;
}

/* Computes the weights w [S] of query i of head h before dropout. The weights of hidden keys are 0. Returns the
 * log-sum-exp. */
static double weigh(const struct attention *t, int64_t b, int64_t h, int64_t i, const double *q, const double *k,
                    double *w)
{
    double top = -INFINITY, sum = 0;
    int64_t first, last;
    bool any = false;
    keys_of(t, b, i, &first, &last);
    memset(w, 0, (size_t)t->S * sizeof *w);
    for (int64_t j = first; j <= last; j++) {
        if (bias(t, b, h, i, j) == -INFINITY) continue;
        any = true;
        for (int64_t d = 0; d < t->D; d++) w[j] += q[i * t->D + d] * k[j * t->D + d];
        w[j] = w[j] * t->scale + bias(t, b, h, i, j);
        top = w[j] > top ? w[j] : top;
    }
    if (!any) return -INFINITY;
    for (int64_t j = first; j <= last; j++) {
        if (bias(t, b, h, i, j) == -INFINITY) continue;
        w[j] = exp(w[j] - top);
        sum += w[j];
    }
    for (int64_t j = first; j <= last; j++) w[j] /= sum;
    return top + log(sum);
}

/* Returns the dropout factor of weight (i, j). A segment counts as a sample of its own. r is the range of the segment's
 * positions. */
static double kept(const struct attention *t, int64_t b, int64_t h, int64_t i, int64_t j, struct run r)
{
    if (t->p <= 0) return 1;
    bool is_run = ps_has(&t->segments);
    int64_t first = is_run ? r.first : 0, T = is_run ? r.last - first + 1 : t->T, S = is_run ? T : t->S;
    uint64_t e = (uint64_t)(((t->first_head + h) * T + i - first) * S + j - first);
    uint64_t sample = t->sample + (uint64_t)b + ps_segment_sample(first);
    return ref_dropped(t->seed, t->step, t->op, sample, e, t->p) ? 0 : 1 / (1 - t->p);
}

/* Returns one head of a view [B, H, rows, D]. */
static ps_view head(const ps_view *v, int64_t b, int64_t h)
{
    return ref_matrix(v, b * v->stride[0] + h * v->stride[1]);
}

static void read_head(const ps_view *v, int64_t b, int64_t h, double *dst)
{
    ps_view m = head(v, b, h);
    ref_read(&m, dst);
}

/* Reads a head of k or v as doubles. k and v can consist of Q8_0 blocks. */
static void read_keys(const ps_view *v, int64_t b, int64_t h, double *dst)
{
    const ps_blocks *q8 = ps_blocks_of(PS_Q8_0);
    ps_view m = head(v, b, h);
    float values[PS_BLOCKS_MOST];
    if (v->dtype != PS_U8) {
        ref_read(&m, dst);
        return;
    }
    for (int64_t i = 0; i < m.shape[0]; i++)
        for (int64_t at = 0; at < m.shape[1]; at += q8->bytes) {
            q8->unpack((const uint8_t *)m.data + i * m.stride[0] + at, values);
            for (int k = 0; k < q8->block; k++) *dst++ = values[k];
        }
}

static void put_head(const ps_view *v, int64_t b, int64_t h, const double *src)
{
    if (!ps_has(v)) return;
    ps_view m = head(v, b, h);
    ref_put(&m, src, false);
}

/* y is [B, H, T, D] and can have any strides. lse is [B, H, T] and must be contiguous. lse can be absent. */
static int forward(ps_call *call, const struct attention *t, const ps_view *y, const ps_view *lse)
{
    int64_t T = t->T, S = t->S, D = t->D;
    double *q, *k, *v, *o, *w;                      /* q and o are [T, D]; k and v are [S, D]; w is [S] */
    PS_TRY(ref_scratch(call, T * D, &q));
    PS_TRY(ref_scratch(call, S * D, &k));
    PS_TRY(ref_scratch(call, S * D, &v));
    PS_TRY(ref_scratch(call, T * D, &o));
    PS_TRY(ref_scratch(call, S, &w));
    for (int64_t b = 0; b < t->B; b++) {
        for (int64_t h = 0; h < t->H; h++) {
            read_head(&t->q, b, h, q);
            read_keys(&t->k, b, h / t->group, k);
            read_keys(&t->v, b, h / t->group, v);
            memset(o, 0, (size_t)(T * D) * sizeof *o);
            for (int64_t i = 0; i < T; i++) {
                double l = weigh(t, b, h, i, q, k, w);
                struct run r = run_of(t, b, i);
                if (ps_has(lse)) ref_store(lse, (b * t->H + h) * T + i, l);
                for (int64_t j = 0; j < S; j++) {
                    if (w[j] == 0) continue;        /* v of a hidden key can contain any bits, such as NaN */
                    double w_j = w[j] * kept(t, b, h, i, j, r);
                    for (int64_t d = 0; d < D; d++) o[i * D + d] += w_j * v[j * D + d];
                }
            }
            put_head(y, b, h, o);
        }
    }
    return 0;
}

/* Computes the gradients of one head. In these formulas, m is the dropout factor:
 *     dw = m * (dy . v), ds = w * (dw - sum(w * dw)) * scale, dq = ds k, dk = ds^T q, dv = (w * m)^T dy.
 * `w` and `dw` are scratch memory [S]. */
static void head_backward(const struct attention *t, int64_t b, int64_t h, const double *q, const double *k,
                          const double *v, const double *dy, double *dq, double *dk, double *dv, double *w, double *dw)
{
    int64_t D = t->D;
    for (int64_t i = 0; i < t->T; i++) {
        double dot = 0;
        struct run r = run_of(t, b, i);
        weigh(t, b, h, i, q, k, w);
        for (int64_t j = 0; j < t->S; j++) {
            if (w[j] == 0) continue;
            double m = kept(t, b, h, i, j, r);
            dw[j] = 0;
            for (int64_t d = 0; d < D; d++) {
                dw[j] += m * dy[i * D + d] * v[j * D + d];
                dv[j * D + d] += w[j] * m * dy[i * D + d];
            }
            dot += w[j] * dw[j];
        }
        for (int64_t j = 0; j < t->S; j++) {
            if (w[j] == 0) continue;
            double ds = w[j] * (dw[j] - dot) * t->scale;
            for (int64_t d = 0; d < D; d++) {
                dq[i * D + d] += ds * k[j * D + d];
                dk[j * D + d] += ds * q[i * D + d];
            }
        }
    }
}

/* Computes dq, dk and dv. Each of these gradients can have any strides, and can be absent. */
static int backward(ps_call *call, const struct attention *t, const ps_view *dy_view, const ps_view *dq_view,
                    const ps_view *dk_view, const ps_view *dv_view)
{
    int64_t nq = t->T * t->D, nk = t->S * t->D;
    double *q, *k, *v, *dy, *dq, *dk, *dv, *w, *dw;
    PS_TRY(ref_scratch(call, nq, &q));
    PS_TRY(ref_scratch(call, nk, &k));
    PS_TRY(ref_scratch(call, nk, &v));
    PS_TRY(ref_scratch(call, nq, &dy));
    PS_TRY(ref_scratch(call, nq, &dq));
    PS_TRY(ref_scratch(call, nk, &dk));
    PS_TRY(ref_scratch(call, nk, &dv));
    PS_TRY(ref_scratch(call, t->S, &w));
    PS_TRY(ref_scratch(call, t->S, &dw));
    for (int64_t b = 0; b < t->B; b++) {
        for (int64_t h = 0; h < t->H; h++) {
            read_head(&t->q, b, h, q);
            read_head(&t->k, b, h / t->group, k);
            read_head(&t->v, b, h / t->group, v);
            read_head(dy_view, b, h, dy);
            memset(dq, 0, (size_t)nq * sizeof *dq);
            if (h % t->group == 0) {
                memset(dk, 0, (size_t)nk * sizeof *dk);
                memset(dv, 0, (size_t)nk * sizeof *dv);
            }
            head_backward(t, b, h, q, k, v, dy, dq, dk, dv, w, dw);
            put_head(dq_view, b, h, dq);
            if ((h + 1) % t->group != 0) continue;
            put_head(dk_view, b, h / t->group, dk);
            put_head(dv_view, b, h / t->group, dv);
        }
    }
    return 0;
}

int ref_attention(ps_call *call)
{
    struct attention t = { .q = call->in[0], .k = call->in[1], .v = call->in[2],
                           .window = ((const ps_attrs_attention *)call->attrs)->window };
    ATTENTION_SET(&t, (const ps_attrs_attention *)call->attrs);
    set_mask(&t, &call->in[3]);
    set_sizes(&t);
    return forward(call, &t, &call->out[0], &call->out[1]);
}

int ref_attention_backward(ps_call *call)
{
    struct attention t = { .q = call->in[1], .k = call->in[2], .v = call->in[3],
                           .window = ((const ps_attrs_attention_backward *)call->attrs)->window };
    ATTENTION_SET(&t, (const ps_attrs_attention_backward *)call->attrs);
    set_mask(&t, &call->in[4]);
    set_sizes(&t);
    return backward(call, &t, &call->in[0], &call->out[0], &call->out[1], &call->out[2]);
}

/* x [B, T, parts * C] is contiguous and has `parts` parts. Returns one part as [B, heads, T, C / heads]. */
static ps_view packed_part(const ps_view *x, int parts, int part, int64_t heads)
{
    int64_t B = x->shape[0], T = x->shape[1], width = x->shape[2], C = width / parts, D = C / heads;
    ps_view v = ref_shift(x, part * C);
    v.ndim = 4;
    v.numel = B * T * C;
    v.shape[0] = B, v.shape[1] = heads, v.shape[2] = T, v.shape[3] = D;
    v.stride[0] = T * width, v.stride[1] = D, v.stride[2] = width, v.stride[3] = 1;
    return v;
}

static void set_packed(struct attention *t, const ps_view *qkv, const ps_view *mask, int64_t heads)
{
    t->q = packed_part(qkv, 3, 0, heads);
    t->k = packed_part(qkv, 3, 1, heads);
    t->v = packed_part(qkv, 3, 2, heads);
    set_mask(t, mask);
    set_sizes(t);
    if (t->scale == 0) t->scale = 1 / sqrt((double)t->D);
}

int ref_attention_packed(ps_call *call)
{
    const ps_attrs_attention_packed *a = call->attrs;
    struct attention t = { 0 };
    ATTENTION_SET(&t, a);
    set_packed(&t, &call->in[0], &call->in[1], a->heads);
    ps_view y = packed_part(&call->out[0], 1, 0, a->heads);
    return forward(call, &t, &y, &call->out[1]);
}

int ref_attention_packed_backward(ps_call *call)
{
    const ps_attrs_attention_packed_backward *a = call->attrs;
    struct attention t = { 0 };
    ATTENTION_SET(&t, a);
    set_packed(&t, &call->in[1], &call->in[2], a->heads);
    ps_view dy = packed_part(&call->in[0], 1, 0, a->heads), d[3];
    for (int part = 0; part < 3; part++) d[part] = packed_part(&call->out[0], 3, part, a->heads);
    return backward(call, &t, &dy, &d[0], &d[1], &d[2]);
}

int ref_rope(ps_call *call)
{
    const ps_view *x = &call->in[0], *cos = &call->in[1], *sin = &call->in[2], *y = &call->out[0];
    int64_t half = cos->shape[2], T = x->shape[2], D = x->shape[3];
    double sign = ((const ps_attrs_rope *)call->attrs)->inverse ? -1 : 1;
    for (int64_t i = 0; i < x->numel / (D > 0 ? D : 1); i++) {
        int64_t t = i % T, h = i / T % x->shape[1], b = i / T / x->shape[1], angles = cos->shape[0] > 1 ? b : 0;
        int64_t from = b * x->stride[0] + h * x->stride[1] + t * x->stride[2];
        int64_t to = b * y->stride[0] + h * y->stride[1] + t * y->stride[2];
        for (int64_t d = 0; d < half; d++) {
            double c = ref_load(cos, angles * cos->stride[0] + t * cos->stride[1] + d * cos->stride[2]);
            double s = ref_load(sin, angles * sin->stride[0] + t * sin->stride[1] + d * sin->stride[2]) * sign;
            double first = ref_load(x, from + d * x->stride[3]), second = ref_load(x, from + (d + half) * x->stride[3]);
            ref_store(y, to + d * y->stride[3], first * c - second * s);
            ref_store(y, to + (d + half) * y->stride[3], second * c + first * s);
        }
        for (int64_t d = 2 * half; d < D; d++)
            ref_store(y, to + d * y->stride[3], ref_load(x, from + d * x->stride[3]));
    }
    return 0;
}
