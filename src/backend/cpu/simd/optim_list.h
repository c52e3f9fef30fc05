/* SPDX-License-Identifier: BSD-3-Clause
 * Code that the optimizers in optim.c and update.c share: lists of tensors as one range of units, and access to
 * masters, which can be stored as remainders. The whole range is divided among the threads, so that a list of small
 * tensors needs only one parallel region. Include this header after operand.h. */
#ifndef PS_CPU_OPTIM_LIST_H
#define PS_CPU_OPTIM_LIST_H
#include <omp.h>

enum { UNIT = 4096 };

/* One tensor of a list: its param, master, grad and states. The pointer of an absent operand is NULL. */
struct item {
    void *param;                      /* NULL if the parameter is its own master */
    float *master;
    uint16_t *low;                    /* remainders, which are used instead of a master */
    void *state[PS_MAX_STATES];
    const void *grad;
    int64_t numel;
    int param_dtype, grad_dtype;
};
struct work {
    int n;
    struct item item[PS_MAX_IN];
    int64_t unit[PS_MAX_IN + 1];      /* the first unit of each tensor, followed by the total number of units */
};
static inline void count_units(struct work *w)
{
    w->unit[0] = 0;
    for (int i = 0; i < w->n; i++) w->unit[i + 1] = w->unit[i] + (w->item[i].numel + UNIT - 1) / UNIT;
}

/* Fills w from groups of `each` inputs. A group consists of a param, a master, a grad and states. The states can have
 * any type. Returns false if the kernels do not support an operand. */
static inline bool collect_any(const ps_call *call, int each, struct work *w)
{
    w->n = call->n_in / each;
    for (int i = 0; i < w->n; i++) {
        const ps_view *g = call->in + i * each, *p = &g[0], *master = &g[1], *grad = &g[2];
        for (int k = 0; k < each; k++) if (!view_flat(&g[k])) return false;
        bool low = master->dtype == PS_U8;
        if (!is_lane_type(p->dtype) || !is_lane_type(grad->dtype) || grad->numel != p->numel ||
            (!low && master->dtype != PS_F32) || (low && p->dtype != PS_BF16)) return false;
        w->item[i] = (struct item){ .param = !low && master->data == p->data ? NULL : p->data,
                                    .master = low ? NULL : master->data, .low = low ? master->data : NULL,
                                    .grad = grad->data, .numel = p->numel, .param_dtype = p->dtype,
                                    .grad_dtype = grad->dtype };
        for (int k = 3; k < each; k++) w->item[i].state[k - 3] = g[k].data;
    }
    count_units(w);
    return true;
}

/* Like collect_any, but also returns false if the kernels do not support a state. A state must be the master, or it
 * must have the type `dtype` and the same number of elements as the parameter. */
static inline bool collect_alike(const ps_call *call, int each, int dtype, struct work *w)
{
    for (int i = 0; i + each <= call->n_in; i += each)
        for (int k = 3; k < each; k++)
            if (call->in[i + k].data != call->in[i + 1].data &&
                (call->in[i + k].dtype != dtype || call->in[i + k].numel != call->in[i].numel)) return false;
    return collect_any(call, each, w);
}

/* Calls span(setting, item, first, last) on all threads. Each call processes a piece that begins at a unit. Together
 * the pieces cover all elements. */
typedef void (*span_fn)(const void *setting, const struct item *it, int64_t first, int64_t last);
static inline void run_work(const struct work *w, const void *setting, span_fn span)
{
    int64_t units = w->unit[w->n];
#pragma omp parallel if (units > PS_PAR_MIN / UNIT)
    {
        int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        int64_t u = units * me / threads, end = units * (me + 1) / threads;
        for (int i = 0; i < w->n && u < end; i++) {
            if (u >= w->unit[i + 1]) continue;
            int64_t stop = end < w->unit[i + 1] ? end : w->unit[i + 1], last = (stop - w->unit[i]) * UNIT;
            span(setting, &w->item[i], (u - w->unit[i]) * UNIT, last < w->item[i].numel ? last : w->item[i].numel);
            u = stop;
        }
    }
}

/* -- masters ------------------------------------------------------------------------------------------------------- */
SIMD void vu_store_low(uint16_t *p, vu u)                /* stores the lower half of each lane */
{
#if defined(PS_SSE2)
    vh h = vu_narrow(u);
#else
    vh h = __builtin_convertvector(u, vh);
#endif
    memcpy(p, &h, sizeof h);
}
/* Load and store elements [i, i + VL) of the master. `form` is PS_REMAINDER if the item has remainders. If it has an
 * fp32 master, `form` is the type of the parameter. */
enum { PS_REMAINDER = 100 };
SIMD vf master_get(const struct item *it, int64_t i, int form)
{
    if (form != PS_REMAINDER) return vf_load(it->master + i);
    vu w = (vu)vf_load_bf16((const uint16_t *)it->param + i), lo = (vu)vf_load_bf16(it->low + i) >> 16;
    return (vf)((w - ((lo & 0x8000u) << 1)) | lo);
}
SIMD void master_put(const struct item *it, int64_t i, vf p, int form)
{
    if (form != PS_REMAINDER) {
        vf_store(it->master + i, p);
        if (it->param) vf_put(it->param, i, form, p);
        return;
    }
    vu m = (vu)p, nan = (vu)((vi)(m & 0x7fffffffu) > vi_set(0x7f800000));
    m = (nan & 0x7fc00000u) | (~nan & m);
    vu_store_low((uint16_t *)it->param + i, (m + 0x8000u) >> 16);
    vu_store_low(it->low + i, m);
}

/* Calls body(..., form, grad_dtype), where both arguments are constants. */
#define PS_BY_FORM(it, body, ...) \
    do { \
        if ((it)->low) PS_BY_VEC((it)->grad_dtype, body, __VA_ARGS__, PS_REMAINDER); \
        else if ((it)->param_dtype == PS_F32) PS_BY_VEC((it)->grad_dtype, body, __VA_ARGS__, PS_F32); \
        else if ((it)->param_dtype == PS_BF16) PS_BY_VEC((it)->grad_dtype, body, __VA_ARGS__, PS_BF16); \
        else PS_BY_VEC((it)->grad_dtype, body, __VA_ARGS__, PS_F16); \
    } while (0)

/* -- the end of a tensor ------------------------------------------------------------------------------------------- */
/* A copy of the last n < VL elements of an item, in separate vectors. */
struct tail {
    struct item it;
    char param[64], grad[64], state[2][64];
    float master[VL];
    uint16_t low[VL];
};
/* state_nbytes is the size in bytes of an element of each of the two states, or 0 for an absent state. */
static __attribute__((noinline, unused)) void tail_get(struct tail *t, const struct item *it, int64_t i, int n,
                                                       const int *state_nbytes)
{
    memset(t, 0, sizeof *t);
    t->it = *it;
    size_t half = it->param_dtype == PS_F32 ? 4 : 2, of_grad = it->grad_dtype == PS_F32 ? 4 : 2, count = (size_t)n;
    if (it->param) memcpy(t->param, ps_at(it->param, i, it->param_dtype), count * half), t->it.param = t->param;
    if (it->master) memcpy(t->master, it->master + i, count * 4), t->it.master = t->master;
    if (it->low) memcpy(t->low, it->low + i, count * 2), t->it.low = t->low;
    memcpy(t->grad, ps_at(it->grad, i, it->grad_dtype), count * of_grad), t->it.grad = t->grad;
    for (int k = 0; k < 2 && state_nbytes[k]; k++) {
        memcpy(t->state[k], (char *)it->state[k] + i * state_nbytes[k], count * (size_t)state_nbytes[k]);
        t->it.state[k] = t->state[k];
    }
}
static __attribute__((noinline, unused)) void tail_put(const struct tail *t, const struct item *it, int64_t i, int n,
                                                       const int *state_nbytes)
{
    size_t half = it->param_dtype == PS_F32 ? 4 : 2, count = (size_t)n;
    for (int k = 0; k < 2 && state_nbytes[k]; k++)
        memcpy((char *)it->state[k] + i * state_nbytes[k], t->state[k], count * (size_t)state_nbytes[k]);
    if (it->master) memcpy(it->master + i, t->master, count * 4);
    if (it->low) memcpy(it->low + i, t->low, count * 2);
    if (it->param) memcpy(ps_at(it->param, i, it->param_dtype), t->param, count * half);
}

/* Defines NAME_span, a span_fn whose setting is a struct NAME *h. It calls NAME_at for VL elements at a time. For the
 * last elements, it calls NAME_at on a copy. first_nbytes is the size in bytes of an element of the first state, and
 * second_nbytes of the second state. The size is 0 if the state is absent. */
#define PS_SPAN(name, first_nbytes, second_nbytes) \
    SIMD void name##_body(const struct name *h, const struct item *it, int64_t i, int64_t last, int form, \
                          int grad_dtype) \
    { \
        const int nbytes[2] = { first_nbytes, second_nbytes }; \
        for (; i + VL <= last; i += VL) name##_at(h, it, i, form, grad_dtype); \
        if (i == last) return; \
        struct tail t; \
        tail_get(&t, it, i, (int)(last - i), nbytes); \
        name##_at(h, &t.it, 0, form, grad_dtype); \
        tail_put(&t, it, i, (int)(last - i), nbytes); \
    } \
    static void name##_span(const void *setting, const struct item *it, int64_t first, int64_t last) \
    { \
        PS_BY_FORM(it, name##_body, setting, it, first, last); \
    }
#endif
