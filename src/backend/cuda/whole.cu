/* SPDX-License-Identifier: BSD-3-Clause
 * LAMB and Adafactor, whose updates depend on sums over the whole tensor. The kernels perform the same operations in
 * the same order as the cpu backend (cpu/whole.c), so results are bit-identical to its results. All threads compute the
 * terms of a sum. One thread adds up the terms in double, in the order of the elements. */
#include "backend/cuda/optim.h"
#include "base/update.h"

/* Adds the terms of n threads to *sum, in the order of the threads. *sum is valid only in thread 0. */
DEV void add_in_order(double term, int n, double *sum)
{
    __shared__ double terms[THREADS];
    terms[threadIdx.x] = term;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int k = 0; k < n; k++) *sum = __dadd_rn(*sum, terms[k]);
    __syncthreads();
}
DEV int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

/* Sets *out to the sum of x [n]. The elements are added in ascending order of their indices. */
KERNEL_UP_TO(THREADS) in_order_kernel(double *out, const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t first = 0; first < n; first += THREADS) {
        int64_t i = first + threadIdx.x;
        add_in_order(i < n ? x[i] : 0, least(n - first, THREADS), &sum);
    }
    if (threadIdx.x == 0) *out = sum;
}

/* -- LAMB ---------------------------------------------------------------------------------------------------------- */
struct lamb_constants {
    double scale, b1, b2, c1, c2, inv1, inv2, eps, wd, lr;
    bool adapt, clip;
};

template <class A> DEV A lamb_update(const lamb_constants &h, A p, A m, A v)
{
    typedef exact<A> e;
    A below = e::add(e::mul(e::root(v), (A)h.inv2), (A)h.eps);
    return e::add(e::div(e::mul(m, (A)h.inv1), below), e::mul((A)h.wd, p));
}

/* Updates the averages. Writes sums [2, units]. A unit has PS_LAMB_UNIT elements. sums[0] contains each unit's sum of
 * squares of p, and sums[1] contains each unit's sum of squares of the update. */
template <class A> KERNEL_UP_TO(THREADS) lamb_sums_kernel(lamb_constants h, item it, double *sums, int64_t units)
{
    typedef exact<A> e;
    A *ms = (A *)it.state[0], *vs = (A *)it.state[1];
    for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
        double of_p = 0, of_u = 0;
        int64_t end = (unit + 1) * PS_LAMB_UNIT;
        if (end > it.numel) end = it.numel;
        for (int64_t first = unit * PS_LAMB_UNIT; first < end; first += THREADS) {
            int64_t i = first + threadIdx.x;
            double p2 = 0, u2 = 0;
            if (i < end) {
                A g = e::mul(access<A>::load(it.grad, it.grad_type, i), (A)h.scale), p = master_get<A>(it, i);
                A m = e::add(e::mul((A)h.b1, ms[i]), e::mul((A)h.c1, g));
                A v = e::add(e::mul((A)h.b2, vs[i]), e::mul(e::mul((A)h.c2, g), g));
                double u = lamb_update(h, p, m, v);
                ms[i] = m, vs[i] = v;
                p2 = __dmul_rn((double)p, (double)p), u2 = __dmul_rn(u, u);
            }
            add_in_order(p2, least(end - first, THREADS), &of_p);
            add_in_order(u2, least(end - first, THREADS), &of_u);
        }
        if (threadIdx.x == 0) sums[unit] = of_p, sums[units + unit] = of_u;
    }
}

/* totals: the sum of squares of p and the sum of squares of the update, as in_order_kernel has written them. */
template <class A> KERNEL_UP_TO(THREADS) lamb_kernel(lamb_constants h, item it, const double *totals)
{
    typedef exact<A> e;
    double p = __dsqrt_rn(totals[0]), u = __dsqrt_rn(totals[1]);
    double ratio = p > 0 && u > 0 && h.adapt ? __ddiv_rn(p, u) : 1;
    A rate = (A)__dmul_rn(h.lr, h.clip && ratio > 1 ? 1 : ratio);
    const A *ms = (const A *)it.state[0], *vs = (const A *)it.state[1];
    for (int64_t i = FIRST_ELEMENT; i < it.numel; i += ALL_THREADS) {
        A old = master_get<A>(it, i);
        master_put(it, i, e::add(old, -e::mul(rate, lamb_update(h, old, ms[i], vs[i]))));
    }
}

template <class A> static int lamb_tensor(const lamb_constants &h, const item &it, double *sums)
{
    int64_t units = ps_cu_div_up(it.numel, PS_LAMB_UNIT);
    double *totals = sums + 2 * units;
    PS_LAUNCH(lamb_sums_kernel<A>, unit_blocks(units), THREADS, 0, ps_cu->compute, h, it, sums, units);
    for (int k = 0; k < 2; k++)
        PS_LAUNCH(in_order_kernel, 1, THREADS, 0, ps_cu->compute, totals + k, (const double *)sums + k * units, units);
    PS_LAUNCH(lamb_kernel<A>, blocks_for(it.numel), THREADS, 0, ps_cu->compute, h, it, (const double *)totals);
    return 0;
}

static int lamb_(ps_call *call)
{
    const ps_attrs_lamb_ *a = (const ps_attrs_lamb_ *)call->attrs;
    double bias1 = a->bias_correction ? 1 - pow(a->beta1, (double)a->t) : 1;
    double bias2 = a->bias_correction ? 1 - pow(a->beta2, (double)a->t) : 1;
    lamb_constants h = { a->grad_scale, a->beta1, a->beta2, a->grad_averaging ? 1 - a->beta1 : 1, 1 - a->beta2,
                         1 / bias1, 1 / sqrt(bias2), a->eps, a->weight_decay, a->lr,
                         a->weight_decay != 0 || a->always_adapt, a->trust_clip != 0 };
    work w = collect(call, 5, UNIT);
    int64_t nbytes = ps_cu_lamb_workspace(call);
    if (nbytes == 0) return 0;
    double *sums = (double *)call->scratch(call, (size_t)nbytes);
    if (!sums) return PS_ENOMEM;
    for (int i = 0; i < w.n; i++) {
        if (w.it[i].master_type == PS_F64) PS_TRY(lamb_tensor<double>(h, w.it[i], sums));
        else PS_TRY(lamb_tensor<float>(h, w.it[i], sums));
    }
    return 0;
}

/* -- Adafactor ----------------------------------------------------------------------------------------------------- */
/* A tensor [batch, R, C] with its averages. A vector has the shape [1, 1, C], and each of its elements has its own
 * average. */
struct factored {
    item it;
    int64_t batch, R, C;
    bool matrix, hugging_face;
    double scale, eps1, take;
    double *by_row, *row_mean;                       /* by_row: [batch * R] row sums. row_mean: [batch] means of the
                                                      * rows' averages */
};
enum { OF_MASTER, OF_UPDATE };

template <class A> DEV double squared(const factored &f, int64_t i)
{
    A g = exact<A>::mul(access<A>::load(f.it.grad, f.it.grad_type, i), (A)f.scale);
    return __dadd_rn(__dmul_rn((double)g, (double)g), f.hugging_face ? f.eps1 : 0);
}
/* Returns the update of an element of row `row`, before the update is clipped. */
template <class A> DEV A factored_update(const factored &f, int64_t row, int64_t c)
{
    typedef exact<A> e;
    const A *rows = (const A *)f.it.state[0], *cols = (const A *)f.it.state[1];
    int64_t b = row / f.R;
    A var;
    if (f.matrix) {
        double mean = f.row_mean[b];
        var = e::mul((A)__ddiv_rn((double)rows[row], !f.hugging_face && mean < f.eps1 ? f.eps1 : mean),
                     cols[b * f.C + c]);
    } else {
        var = rows[c];
    }
    A smallest = (A)__dmul_rn(f.eps1, f.eps1);
    if (!f.hugging_face && var < smallest) var = smallest;
    return e::div(e::mul(access<A>::load(f.it.grad, f.it.grad_type, row * f.C + c), (A)f.scale), e::root(var));
}

/* Sets by_row [batch * R] to the sum of squares of each row of the master (OF_MASTER) or of the update (OF_UPDATE). */
template <class A, int OF> KERNEL_UP_TO(THREADS) row_squares_kernel(const __grid_constant__ factored f)
{
    for (int64_t row = blockIdx.x; row < f.batch * f.R; row += gridDim.x) {
        double sum = 0;
        for (int64_t first = 0; first < f.C; first += THREADS) {
            int64_t c = first + threadIdx.x;
            double x = 0;
            if (c < f.C) x = OF == OF_MASTER ? master_get<A>(f.it, row * f.C + c) : factored_update<A>(f, row, c);
            add_in_order(__dmul_rn(x, x), least(f.C - first, THREADS), &sum);
        }
        if (threadIdx.x == 0) f.by_row[row] = sum;
    }
}
template <class A> DEV A averaged(const factored &f, A old, double mean)
{
    double keep = __dadd_rn(1, -f.take), by = __dadd_rn(mean, -(double)old);     /* as in ps_adafactor_average */
    if (f.hugging_face) return (A)__dadd_rn(__dmul_rn(keep, (double)old), __dmul_rn(f.take, mean));
    return (A)(f.take < 0.5 ? __dadd_rn((double)old, __dmul_rn(f.take, by)) : __dadd_rn(mean, -__dmul_rn(keep, by)));
}
/* Updates the averages of the rows of a matrix, or of the elements of a vector. */
template <class A> KERNEL_UP_TO(THREADS) row_averages_kernel(const __grid_constant__ factored f)
{
    A *rows = (A *)f.it.state[0];
    if (!f.matrix) {
        for (int64_t i = FIRST_ELEMENT; i < f.C; i += ALL_THREADS) rows[i] = averaged(f, rows[i], squared<A>(f, i));
        return;
    }
    for (int64_t row = blockIdx.x; row < f.batch * f.R; row += gridDim.x) {
        double sum = 0;
        for (int64_t first = 0; first < f.C; first += THREADS) {
            int64_t c = first + threadIdx.x;
            add_in_order(c < f.C ? squared<A>(f, row * f.C + c) : 0, least(f.C - first, THREADS), &sum);
        }
        if (threadIdx.x == 0) rows[row] = averaged(f, rows[row], __ddiv_rn(sum, (double)f.C));
    }
}
/* Updates the averages of columns. Each thread updates one column. */
template <class A> KERNEL_UP_TO(THREADS) column_averages_kernel(const __grid_constant__ factored f)
{
    A *cols = (A *)f.it.state[1];
    for (int64_t k = FIRST_ELEMENT; k < f.batch * f.C; k += ALL_THREADS) {
        int64_t at = k / f.C * f.R * f.C + k % f.C;
        double sum = 0;
#pragma unroll 8
        for (int64_t r = 0; r < f.R; r++) sum = __dadd_rn(sum, squared<A>(f, at + r * f.C));
        cols[k] = averaged(f, cols[k], __ddiv_rn(sum, (double)f.R));
    }
}
/* Computes row_mean [batch]. Each block computes the mean of one matrix. */
template <class A> KERNEL_UP_TO(THREADS) row_mean_kernel(const __grid_constant__ factored f)
{
    const A *rows = (const A *)f.it.state[0];
    for (int64_t b = blockIdx.x; b < f.batch; b += gridDim.x) {
        double sum = 0;
        for (int64_t first = 0; first < f.R; first += THREADS) {
            int64_t r = first + threadIdx.x;
            add_in_order(r < f.R ? (double)rows[b * f.R + r] : 0, least(f.R - first, THREADS), &sum);
        }
        if (threadIdx.x == 0) f.row_mean[b] = __ddiv_rn(sum, (double)f.R);
    }
}
/* totals: the sum of squares of the master and the sum of squares of the update, as in_order_kernel has written
 * them. */
template <class A> KERNEL_UP_TO(THREADS) adafactor_kernel(const __grid_constant__ factored f, ps_attrs_adafactor_ a,
                                                          const double *totals)
{
    typedef exact<A> e;
    double n = (double)f.it.numel, rms = __dsqrt_rn(__ddiv_rn(totals[0], n));
    double divisor = ps_adafactor_divisor(__ddiv_rn(__dsqrt_rn(__ddiv_rn(totals[1], n)), a.d), a.hugging_face);
    double alpha = ps_adafactor_rate(a.t, a.lr, a.eps2, rms, a.hugging_face, a.scale_parameter, a.relative_step,
                                     a.warmup_init);
    A keep = (A)__dadd_rn(1, -__dmul_rn(a.weight_decay, a.hugging_face ? alpha : a.lr));
    A rate = (A)__ddiv_rn(alpha, divisor);
    for (int64_t i = FIRST_ELEMENT; i < f.it.numel; i += ALL_THREADS) {
        int64_t row = i / f.C;
        A u = factored_update<A>(f, row, i - row * f.C);
        master_put(f.it, i, e::add(e::mul(master_get<A>(f.it, i), keep), -e::mul(rate, u)));
    }
}

template <class A> static int adafactor_tensor(const ps_attrs_adafactor_ &a, factored f)
{
    int64_t rows = f.batch * f.R;
    double *totals = f.by_row + rows;
    f.row_mean = totals + 2;
    unsigned by_rows = row_blocks(rows);
    cudaStream_t s = ps_cu->compute;
    PS_LAUNCH((row_squares_kernel<A, OF_MASTER>), by_rows, THREADS, 0, s, f);
    PS_LAUNCH(in_order_kernel, 1, THREADS, 0, s, totals, (const double *)f.by_row, rows);
    PS_LAUNCH(row_averages_kernel<A>, f.matrix ? by_rows : blocks_for(f.C).x, THREADS, 0, s, f);
    if (f.matrix) {
        PS_LAUNCH(column_averages_kernel<A>, blocks_for(f.batch * f.C), THREADS, 0, s, f);
        PS_LAUNCH(row_mean_kernel<A>, row_blocks(f.batch), THREADS, 0, s, f);
    }
    PS_LAUNCH((row_squares_kernel<A, OF_UPDATE>), by_rows, THREADS, 0, s, f);
    PS_LAUNCH(in_order_kernel, 1, THREADS, 0, s, totals + 1, (const double *)f.by_row, rows);
    PS_LAUNCH(adafactor_kernel<A>, blocks_for(f.it.numel), THREADS, 0, s, f, a, (const double *)totals);
    return 0;
}

static int adafactor_(ps_call *call)
{
    const ps_attrs_adafactor_ *a = (const ps_attrs_adafactor_ *)call->attrs;
    double take = pow((double)a->t, a->beta2_decay);
    int64_t nbytes = ps_cu_adafactor_workspace(call);
    if (nbytes == 0) return 0;
    double *by_row = (double *)call->scratch(call, (size_t)nbytes);
    if (!by_row) return PS_ENOMEM;
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        const ps_view *in = &call->in[n];
        if (in->numel == 0) continue;
        ps_call one = *call;
        one.in = in, one.n_in = 5;
        factored f = { collect(&one, 5, UNIT).it[0], 1, 1, in->numel, in->ndim > 1, a->hugging_face != 0,
                       a->grad_scale, a->eps1, take, by_row, NULL };
        if (f.matrix) f.R = in->shape[in->ndim - 2], f.C = in->shape[in->ndim - 1], f.batch = in->numel / (f.R * f.C);
        if (in[1].dtype == PS_F64) PS_TRY(adafactor_tensor<double>(*a, f));
        else PS_TRY(adafactor_tensor<float>(*a, f));
    }
    return 0;
}

void ps_cuda_fill_whole(ps_kernel *k)
{
    k[PS_OP_lamb_] = lamb_;
    k[PS_OP_adafactor_] = adafactor_;
}
