/* SPDX-License-Identifier: BSD-3-Clause
 * Layer norm and RMS norm for contiguous fp32, bf16 and fp16 tensors. This file is compiled once per instruction set.
 * All arithmetic is in fp32. The sum of a row has 4 x 16 lanes, which are added in a fixed order. The sums over rows
 * (dw, db) are computed for blocks of ROW_BLOCK rows, and the sums of the blocks are added in order. Hence the bits
 * depend neither on the number of threads nor on the instruction set. Weights are copied to fp32 rows, which are padded
 * with zeros to whole pairs of vectors. */
#define PS_ANY_LANES                    /* sums always have sixteen lanes (operand.h) */
#include "backend/cpu/simd/operand.h"

enum { ROW_BLOCK = 64, GROUP = 4 };

struct norm {
    int dtype, rms, want_w;
    int64_t rows, C, Cp;              /* Cp: C rounded up to whole pairs of vectors */
    double eps;
    const void *x, *dy, *add;         /* [rows, C] of type dtype; add can be NULL, or the same memory as dx */
    void *y, *dx;                     /* [rows, C] of type dtype; dx can be NULL */
    const float *w, *b;               /* [Cp] in the order of pairs; the elements after the first C are zero */
    float *mean, *rstd;               /* [rows]; both can be NULL in forward; mean is NULL for RMS norm */
    float *dw, *db;                   /* [blocks, Cp]; partial sums in the order of pairs */
    float exists[PAIR];               /* for the last pair of a row: 1 for positions within the row, 0 for positions
                                       * after the end of the row */
};

SIMD float row_sum(const void *x, int64_t C, int dtype)
{
    vf s0[PARTS] = { { 0 } }, s1[PARTS] = { { 0 } }, s2[PARTS] = { { 0 } }, s3[PARTS] = { { 0 } };
    int64_t i = 0;
    for (; i + 2 * PAIR <= C; i += 2 * PAIR)
        EACH_PART(j) {
            vp u = vp_get(x, i, j, dtype), v = vp_get(x, i + PAIR, j, dtype);
            s0[j] += u.a, s1[j] += u.b, s2[j] += v.a, s3[j] += v.b;
        }
    for (; i < C; i += PAIR)
        EACH_PART(j) {
            vp u = vp_row_get(x, i, C, j, 0.0f, dtype);
            s0[j] += u.a, s1[j] += u.b;
        }
    EACH_PART(j) s0[j] = (s0[j] + s1[j]) + (s2[j] + s3[j]);
    return sum_lanes(s0);
}
/* Returns the sum of (x - mean)^2. Sets *rest to the sum of x - mean. This sum is C times the rounding error of the
 * mean (Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983). */
SIMD float row_squares(const struct norm *n, const void *x, float mean, float *rest, int dtype)
{
    vf s0[PARTS] = { { 0 } }, s1[PARTS] = { { 0 } }, s2[PARTS] = { { 0 } }, s3[PARTS] = { { 0 } };
    vf r0[PARTS] = { { 0 } }, r1[PARTS] = { { 0 } }, m = vf_set(mean);
    int64_t C = n->C, i = 0;
    for (; i + 2 * PAIR <= C; i += 2 * PAIR)
        EACH_PART(j) {
            vp u = vp_get(x, i, j, dtype), v = vp_get(x, i + PAIR, j, dtype);
            u.a -= m, u.b -= m, v.a -= m, v.b -= m;
            s0[j] = vf_fma(u.a, u.a, s0[j]), s1[j] = vf_fma(u.b, u.b, s1[j]);
            s2[j] = vf_fma(v.a, v.a, s2[j]), s3[j] = vf_fma(v.b, v.b, s3[j]);
            r0[j] += u.a + u.b, r1[j] += v.a + v.b;
        }
    for (; i < C; i += PAIR)
        EACH_PART(j) {
            vp u = vp_row_get(x, i, C, j, 0.0f, dtype);
            u.a -= m, u.b -= m;
            if (i + PAIR > C) {
                vp exists = vp_load(n->exists, j);
                u.a *= exists.a, u.b *= exists.b;
            }
            s0[j] = vf_fma(u.a, u.a, s0[j]), s1[j] = vf_fma(u.b, u.b, s1[j]);
            r0[j] += u.a + u.b;
        }
    EACH_PART(j) r0[j] += r1[j], s0[j] = (s0[j] + s1[j]) + (s2[j] + s3[j]);
    *rest = sum_lanes(r0);
    return sum_lanes(s0);
}

/* Computes the elements [i, end) of a row. `end` is i + PAIR, or smaller for the last elements of the row. */
SIMD void out_block(const struct norm *n, void *y, const void *x, int64_t i, int64_t end, vf m, vf s, int dtype)
{
    vp out[PARTS];
    EACH_PART(j) {
        vp u = vp_row_get(x, i, end, j, 0.0f, dtype), w = vp_load(n->w + i, j), b = vp_load(n->b + i, j);
        out[j].a = vf_fma((u.a - m) * s, w.a, b.a);
        out[j].b = vf_fma((u.b - m) * s, w.b, b.b);
    }
    vp_row_put(y, i, end, out, dtype);
}
SIMD void forward_out(const struct norm *n, int64_t r, float mean, float rstd, int dtype)
{
    int64_t C = n->C, i = 0;
    const struct norm at = { .w = n->w, .b = n->b };         /* a copy, so that stores of results cannot change its
                                                              * pointers */
    const void *x = ps_at(n->x, r * C, dtype);
    void *y = ps_at(n->y, r * C, dtype);
    vf m = vf_set(mean), s = vf_set(rstd);
    for (; i + PAIR <= C; i += PAIR) out_block(&at, y, x, i, i + PAIR, m, s, dtype);
    if (i < C) out_block(&at, y, x, i, C, m, s, dtype);
}
/* Computes up to GROUP rows. All rows complete a stage before the next stage begins. The processor can thus add the
 * lanes of one row while it sums another row. */
SIMD void forward_rows(const struct norm *n, int64_t first, int64_t last, int dtype)
{
    float mean[GROUP] = { 0 }, rstd[GROUP];
    int64_t C = n->C;
    for (int64_t r = first; r < last && !n->rms; r++)
        mean[r - first] = row_sum(ps_at(n->x, r * C, dtype), C, dtype) / (float)C;
    for (int64_t r = first; r < last; r++) {
        float rest, var = row_squares(n, ps_at(n->x, r * C, dtype), mean[r - first], &rest, dtype) / (float)C;
        if (!n->rms) {
            rest /= (float)C;
            mean[r - first] += rest, var = fmaxf(var - rest * rest, 0.0f);
        }
        rstd[r - first] = (float)(1.0 / sqrt((double)var + n->eps));
    }
    for (int64_t r = first; r < last; r++) {
        if (n->mean) n->mean[r] = mean[r - first];
        if (n->rstd) n->rstd[r] = rstd[r - first];
        forward_out(n, r, mean[r - first], rstd[r - first], dtype);
    }
}

/* -- backward: with g = dy * w, dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); RMS norm has no mean(g) ------- */
/* A row in backward, with the values that are the same for all elements of the row. */
struct slope { const void *x, *dy, *add; const float *w; float *dw, *db; vf mean, rstd; };
SIMD struct slope slope_of(const struct norm *n, int64_t r, float *dw, float *db, int dtype)
{
    int64_t at = r * n->C;
    return (struct slope){ .x = ps_at(n->x, at, dtype), .dy = ps_at(n->dy, at, dtype), .w = n->w, .dw = dw, .db = db,
                           .add = n->add ? ps_at(n->add, at, dtype) : NULL,
                           .mean = vf_set(n->rms ? 0.0f : n->mean[r]), .rstd = vf_set(n->rstd[r]) };
}
SIMD void sums_block(const struct slope *s, int64_t i, int64_t end, vf *g0, vf *g1, vf *gx0, vf *gx1, int dtype)
{
    EACH_PART(j) {
        vp u = vp_row_get(s->x, i, end, j, 0.0f, dtype), d = vp_row_get(s->dy, i, end, j, 0.0f, dtype);
        vp w = vp_load(s->w + i, j);
        u.a = (u.a - s->mean) * s->rstd, u.b = (u.b - s->mean) * s->rstd;    /* u becomes xhat; d is 0 for elements
                                                                              * after the end of the row */
        w.a *= d.a, w.b *= d.b;
        g0[j] += w.a, g1[j] += w.b;
        gx0[j] = vf_fma(w.a, u.a, gx0[j]), gx1[j] = vf_fma(w.b, u.b, gx1[j]);
        if (s->dw) {
            vp t = vp_load(s->dw + i, j);
            vp_store(s->dw + i, j, (vp){ vf_fma(d.a, u.a, t.a), vf_fma(d.b, u.b, t.b) });
        }
        if (s->db) {
            vp t = vp_load(s->db + i, j);
            vp_store(s->db + i, j, (vp){ t.a + d.a, t.b + d.b });
        }
    }
}
/* The first pass over a row. Computes the mean of g and the mean of g * xhat, and adds the row's terms to dw and db. */
SIMD void backward_sums(const struct norm *n, int64_t r, float *dw, float *db, float *mean_g, float *mean_gx, int dtype)
{
    int64_t C = n->C, i = 0;
    const struct slope s = slope_of(n, r, dw, db, dtype);
    vf g0[PARTS] = { { 0 } }, g1[PARTS] = { { 0 } }, gx0[PARTS] = { { 0 } }, gx1[PARTS] = { { 0 } };
    for (; i + PAIR <= C; i += PAIR) sums_block(&s, i, i + PAIR, g0, g1, gx0, gx1, dtype);
    if (i < C) sums_block(&s, i, C, g0, g1, gx0, gx1, dtype);
    EACH_PART(j) g0[j] += g1[j], gx0[j] += gx1[j];
    *mean_g = n->rms ? 0.0f : sum_lanes(g0) / (float)C;
    *mean_gx = sum_lanes(gx0) / (float)C;
}
SIMD void dx_block(const struct slope *s, void *dx, int64_t i, int64_t end, vf mg, vf mgx, int dtype)
{
    vp out[PARTS];
    EACH_PART(j) {
        vp u = vp_row_get(s->x, i, end, j, 0.0f, dtype), d = vp_row_get(s->dy, i, end, j, 0.0f, dtype);
        vp w = vp_load(s->w + i, j);
        u.a = vf_fma((u.a - s->mean) * s->rstd, mgx, d.a * w.a - mg);
        u.b = vf_fma((u.b - s->mean) * s->rstd, mgx, d.b * w.b - mg);
        if (s->add) {
            vp t = vp_row_get(s->add, i, end, j, 0.0f, dtype);
            u.a = vf_fma(u.a, s->rstd, t.a), u.b = vf_fma(u.b, s->rstd, t.b);
        } else {
            u.a *= s->rstd, u.b *= s->rstd;
        }
        out[j] = u;
    }
    vp_row_put(dx, i, end, out, dtype);
}
SIMD void backward_dx(const struct norm *n, int64_t r, float mean_g, float mean_gx, int dtype)
{
    int64_t C = n->C, i = 0;
    const struct slope s = slope_of(n, r, NULL, NULL, dtype);
    void *dx = ps_at(n->dx, r * C, dtype);
    vf mg = vf_set(mean_g), mgx = vf_set(-mean_gx);
    for (; i + PAIR <= C; i += PAIR) dx_block(&s, dx, i, i + PAIR, mg, mgx, dtype);
    if (i < C) dx_block(&s, dx, i, C, mg, mgx, dtype);
}
SIMD void backward_rows(const struct norm *n, int64_t block, int dtype)
{
    float *dw = n->want_w ? n->dw + block * n->Cp : NULL, *db = n->want_w && !n->rms ? n->db + block * n->Cp : NULL;
    if (dw) memset(dw, 0, (size_t)n->Cp * sizeof *dw);
    if (db) memset(db, 0, (size_t)n->Cp * sizeof *db);
    int64_t last = (block + 1) * ROW_BLOCK < n->rows ? (block + 1) * ROW_BLOCK : n->rows;
    for (int64_t r = block * ROW_BLOCK; r < last; r++) {
        float mean_g, mean_gx;
        backward_sums(n, r, dw, db, &mean_g, &mean_gx, dtype);
        if (n->dx) backward_dx(n, r, mean_g, mean_gx, dtype);
    }
}

/* Converts a row to fp32, in the order of pairs. Each NaN becomes the canonical NaN (vp_put). */
SIMD void pad_pairs(float *p, const void *v, int64_t C, int dtype)
{
    vf nan = vf_set(NAN);
    for (int64_t i = 0; i < C; i += PAIR)
        EACH_PART(j) {
            vp u = vp_row_get(v, i, C, j, 0.0f, dtype);
            vp_store(p + i, j, (vp){ vf_select(u.a != u.a, nan, u.a), vf_select(u.b != u.b, nan, u.b) });
        }
}
/* Returns v as an fp32 row [Cp] in the order of pairs. If v is absent, all elements of the row are `value`. Returns
 * NULL if there is no memory. */
static float *padded_row(ps_call *call, const ps_view *v, float value, const struct norm *n)
{
    float *p = call->scratch(call, (size_t)n->Cp * sizeof *p);
    bool has = v && ps_has(v);
    if (!p || call->dry) return p;
    if (has && v->dtype == n->dtype) {
        PS_BY_VEC(n->dtype, pad_pairs, p, v->data, n->C);
        return p;
    }
    memset(p, 0, (size_t)n->Cp * sizeof *p);
    for (int64_t i = 0; i < n->C; i++) {
        float e = has ? ps_get_one(v->data, i, v->dtype) : value;
        p[pair_place(i, n->dtype)] = e == e ? e : NAN;
    }
    return p;
}
static void set_sizes(struct norm *n, const ps_view *x)
{
    n->rows = x->numel / n->C;
    n->Cp = (n->C + PAIR - 1) / PAIR * PAIR;
    for (int i = 0; i < PAIR; i++) n->exists[pair_place(i, n->dtype)] = n->Cp - PAIR + i < n->C ? 1.0f : 0.0f;
}
static bool usable(const ps_view *v) { return !ps_has(v) || (is_lane_type(v->dtype) && view_flat(v)); }

static int norm_forward(ps_call *call, int rms, double eps)
{
    const ps_view *x = &call->in[0], *w = &call->in[1], *b = rms ? NULL : &call->in[2];
    ps_view *y = &call->out[0], *mean = rms ? NULL : &call->out[1], *rstd = &call->out[rms ? 1 : 2];
    struct norm n = { .dtype = x->dtype, .rms = rms, .C = ps_last_dim(x), .eps = eps, .x = x->data, .y = y->data };
    if (n.C == 0 || y->dtype != x->dtype || !usable(x) || !usable(y) || !usable(w) || (b && !usable(b)) ||
        (ps_has(rstd) && (rstd->dtype != PS_F32 || !view_flat(rstd))) ||
        (mean && ps_has(mean) && (mean->dtype != PS_F32 || !view_flat(mean))))
        return PS_EUNSUP;
    set_sizes(&n, x);
    n.mean = mean && ps_has(mean) ? mean->data : NULL;
    n.rstd = ps_has(rstd) ? rstd->data : NULL;
    n.w = padded_row(call, w, 1.0f, &n);
    n.b = padded_row(call, b, 0.0f, &n);
    if (!n.w || !n.b) return PS_ENOMEM;
    if (call->dry) return 0;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t r = 0; r < n.rows; r += GROUP) {
        int64_t last = r + GROUP < n.rows ? r + GROUP : n.rows;
        PS_BY_VEC(n.dtype, forward_rows, &n, r, last);
    }
    return 0;
}

/* Adds the partial sums part [blocks, Cp] in order, and stores the sum in out [C]. Overwrites the first partial sum. */
static void sum_blocks(ps_view *out, float *part, int64_t blocks, const struct norm *n)
{
    for (int64_t k = 1; k < blocks; k++)
        for (int64_t i = 0; i < n->Cp; i += VL)
            vf_store(part + i, vf_load(part + i) + vf_load(part + k * n->Cp + i));
    for (int64_t i = 0; i < n->C; i++)
        ps_put_one(out->data, i, out->dtype, blocks ? part[pair_place(i, n->dtype)] : 0.0f);
}

static int norm_backward(ps_call *call, int rms, int want_w)
{
    const ps_view *dy = &call->in[0], *x = &call->in[1], *w = &call->in[2], *mean = rms ? NULL : &call->in[3];
    const ps_view *rstd = &call->in[rms ? 3 : 4], *add = &call->in[rms ? 4 : 5];
    ps_view *dx = &call->out[0], *dw = &call->out[1], *db = rms ? NULL : &call->out[2];
    bool has_dw = ps_has(dw), has_db = db && ps_has(db);
    struct norm n = { .dtype = x->dtype, .rms = rms, .C = ps_last_dim(x), .x = x->data, .dy = dy->data };
    if (n.C == 0 || dy->dtype != x->dtype || !usable(dy) || !usable(x) || !usable(w) || !usable(add) || !usable(dx) ||
        !usable(dw) || (db && !usable(db)) || (ps_has(dx) && dx->dtype != x->dtype) ||
        (ps_has(add) && add->dtype != x->dtype) || rstd->dtype != PS_F32 || (mean && mean->dtype != PS_F32))
        return PS_EUNSUP;
    set_sizes(&n, x);
    n.want_w = want_w && (has_dw || has_db);
    n.dx = ps_has(dx) ? dx->data : NULL;
    n.add = ps_has(add) ? add->data : NULL;
    n.mean = mean ? mean->data : NULL;
    n.rstd = rstd->data;
    int64_t blocks = (n.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    n.w = padded_row(call, w, 1.0f, &n);
    if (!n.w) return PS_ENOMEM;
    if (n.want_w) {
        size_t nbytes = (size_t)(2 * blocks * n.Cp) * sizeof(float);
        n.dw = call->scratch(call, nbytes ? nbytes : 1);
        if (!n.dw) return PS_ENOMEM;
        n.db = n.dw + blocks * n.Cp;
    }
    if (call->dry) return 0;
#pragma omp parallel for schedule(static) if (x->numel >= PS_PAR_MIN)
    for (int64_t k = 0; k < blocks; k++) PS_BY_VEC(n.dtype, backward_rows, &n, k);
    if (n.want_w && has_dw) sum_blocks(dw, n.dw, blocks, &n);
    if (n.want_w && has_db) sum_blocks(db, n.db, blocks, &n);
    return 0;
}

static int layer_norm(ps_call *call)
{
    return norm_forward(call, 0, ((const struct ps_attrs_layer_norm *)call->attrs)->eps);
}
static int rms_norm(ps_call *call)
{
    return norm_forward(call, 1, ((const struct ps_attrs_rms_norm *)call->attrs)->eps);
}
static int layer_norm_backward(ps_call *call)
{
    return norm_backward(call, 0, ((const struct ps_attrs_layer_norm_backward *)call->attrs)->want_w);
}
static int rms_norm_backward(ps_call *call)
{
    return norm_backward(call, 1, ((const struct ps_attrs_rms_norm_backward *)call->attrs)->want_w);
}

void PS_ISA_FN(ps_cpu_fill_norm)(ps_kernel *k);
void PS_ISA_FN(ps_cpu_fill_norm)(ps_kernel *k)
{
    k[PS_OP_layer_norm] = layer_norm;
    k[PS_OP_layer_norm_backward] = layer_norm_backward;
    k[PS_OP_rms_norm] = rms_norm;
    k[PS_OP_rms_norm_backward] = rms_norm_backward;
}
