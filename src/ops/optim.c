/* SPDX-License-Identifier: BSD-3-Clause
 * Optimizer updates and ops that store gradients: checks of their groups of tensors. None of these ops has a gradient
 * rule. */
#include "base/error.h"
#include "base/update.h"
#include "tensor/optable.h"

int infer_adam(ps_infer *f);
int infer_sgd(ps_infer *f);
int infer_grad_store(ps_infer *f);
int infer_rmsprop(ps_infer *f);
int infer_lion(ps_infer *f);
int infer_adam_schedule_free(ps_infer *f);
int infer_master_lerp(ps_infer *f);
int infer_adam_bf16(ps_infer *f);
int infer_lamb(ps_infer *f);
int infer_muon(ps_infer *f);
int infer_adafactor(ps_infer *f);
int infer_adam8bit(ps_infer *f);
int infer_lion8bit(ps_infer *f);
int infer_remainder_split(ps_infer *f);
int infer_remainder_join(ps_infer *f);

/* Checks groups of param, master, grad and states. The master is one of three tensors: an fp32 tensor (fp64 for fp64
 * parameters), the parameter itself, or the remainders of a bf16 parameter. Remainders are the lower halves of the
 * parameter's fp32 values (base/half.h), stored as uint8 [2 * numel].
 *
 * The first `alike` states must have the parameter's numel and the type `dtype`. If `dtype` is PS_F32, states of fp64
 * parameters must be fp64. The op's own rule checks the other states. The op writes to all tensors except the gradient,
 * so these tensors must not be copies, because writes to a copy would be lost. */
static int check_update(const ps_infer *f, int size, int alike, int dtype)
{
    if (f->n_in % size) return ps_rule_fail(f, "%d tensors cannot be divided into groups of %d", f->n_in, size);
    for (int i = 0; i < f->n_in; i++) {
        const ps_tensor *p = f->in[i - i % size], *master = f->in[i - i % size + 1], *t = f->in[i];
        int k = i % size, wide = p->dtype_ == PS_F64 ? PS_F64 : PS_F32, state = dtype == PS_F32 ? wide : dtype;
        bool low = k == 1 && t->dtype_ == PS_U8;
        bool unused = k > 1 && t == master;                    /* the caller passes the master again in place of a state
                                                                * that it does not have */
        if (k < 3 + alike && t->numel_ != (low ? 2 : 1) * p->numel_ && !unused)
            return ps_rule_fail(f, "tensor %d of group %d has %lld elements, but the parameter has %lld", k, i / size,
                                (long long)t->numel_, (long long)p->numel_);
        bool fits = ps_dtype_is_float(t->dtype_);
        if (k == 1) fits = t->dtype_ == wide || t == p || (low && p->dtype_ == PS_BF16);
        if (k > 2 && k < 3 + alike) fits = t->dtype_ == state || unused;
        if (k >= 3 + alike) fits = true;
        if (k != 2 && f->copied >> i & 1)
            return ps_rule_fail(f, "tensor %d of group %d is not contiguous", k, i / size);
        if (!fits) return ps_rule_fail(f, "tensor %d of group %d has type %s, which does not fit the parameter", k,
                                       i / size, ps_dtype_name(t->dtype_));
    }
    return 0;
}

int infer_adam(ps_infer *f)
{
    const ps_attrs_adam_ *at = f->attrs;
    if (!(at->bias1 > 0) || !(at->bias2 > 0))
        return ps_rule_fail(f, "bias corrections %g and %g must be positive", at->bias1, at->bias2);
    return check_update(f, 5, 2, PS_F32);
}

int infer_sgd(ps_infer *f) { return check_update(f, 4, 1, PS_F32); }
int infer_rmsprop(ps_infer *f) { return check_update(f, 5, 2, PS_F32); }
int infer_lion(ps_infer *f) { return check_update(f, 4, 1, PS_F32); }
int infer_master_lerp(ps_infer *f) { return check_update(f, 3, 0, PS_F32); }

int infer_adam_schedule_free(ps_infer *f)
{
    const ps_attrs_adam_schedule_free_ *at = f->attrs;
    if (!(at->bias2 > 0)) return ps_rule_fail(f, "the bias correction %g must be positive", at->bias2);
    return check_update(f, 5, 2, PS_F32);
}
int infer_adam_bf16(ps_infer *f) { return check_update(f, 5, 2, PS_BF16); }
int infer_lamb(ps_infer *f) { return check_update(f, 5, 2, PS_F32); }

int infer_muon(ps_infer *f)
{
    PS_TRY(check_update(f, 4, 1, PS_F32));
    for (int i = 0; i < f->n_in; i += 4)
        if (f->in[i]->ndim != 2)
            return ps_rule_fail(f, "parameter %d has %d dimensions; Muon supports only matrices", i / 4,
                                f->in[i]->ndim);
    return 0;
}

/* Returns the product of the sizes of all dimensions of t except dimension d. */
static int64_t numel_without(const ps_tensor *t, int d)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) if (i != d) n *= t->shape_[i];
    return n;
}

/* A tensor of two or more dimensions [..., R, C] has two states: the averages of rows [..., R, 1] and the averages of
 * columns [..., 1, C]. A vector's first state contains one average per element. In place of the second state, the
 * caller passes the master again. */
int infer_adafactor(ps_infer *f)
{
    PS_TRY(check_update(f, 5, 0, PS_F32));
    for (int i = 0; i < f->n_in; i += 5) {
        const ps_tensor *p = f->in[i], *rows = f->in[i + 3], *cols = f->in[i + 4];
        int n = p->ndim;
        int64_t r = n > 1 ? numel_without(p, n - 1) : p->numel_, c = n > 1 ? numel_without(p, n - 2) : p->numel_;
        if (rows->numel_ != r || (n > 1 && cols->numel_ != c))
            return ps_rule_fail(f, "the states of parameter %d have %lld and %lld elements; they must have %lld and "
                                "%lld", i / 5, (long long)rows->numel_, (long long)cols->numel_, (long long)r,
                                (long long)c);
        for (int k = 3; k < (n > 1 ? 5 : 4); k++)
            if (f->in[i + k]->dtype_ != (p->dtype_ == PS_F64 ? PS_F64 : PS_F32))
                return ps_rule_fail(f, "state %d of parameter %d has type %s, which does not fit the parameter", k - 3,
                                    i / 5, ps_dtype_name(f->in[i + k]->dtype_));
    }
    return 0;
}

/* Checks the states. Each average is stored as two states: codes (uint8 [numel]) and scales (fp32 [blocks]). */
static int check_codes(const ps_infer *f, int each)
{
    PS_TRY(check_update(f, each, 0, PS_F32));
    for (int i = 0; i < f->n_in; i++) {
        const ps_tensor *p = f->in[i - i % each], *t = f->in[i];
        int k = i % each;
        bool codes = k % 2 == 1;
        int64_t numel = codes ? p->numel_ : (p->numel_ + PS_STATE_BLOCK - 1) / PS_STATE_BLOCK;
        if (k > 2 && (t->numel_ != numel || t->dtype_ != (codes ? PS_U8 : PS_F32)))
            return ps_rule_fail(f, "tensor %d of group %d is %s [%lld]; it must be %s [%lld]", k, i / each,
                                ps_dtype_name(t->dtype_), (long long)t->numel_, codes ? "uint8" : "fp32",
                                (long long)numel);
        if (k == 0 && p->dtype_ == PS_F64)
            return ps_rule_fail(f, "parameter %d is fp64, which this op does not support", i / each);
    }
    return 0;
}

int infer_adam8bit(ps_infer *f) { return check_codes(f, 7); }
int infer_lion8bit(ps_infer *f) { return check_codes(f, 5); }

int infer_remainder_split(ps_infer *f)
{
    if (f->n_in % 3) return ps_rule_fail(f, "%d tensors cannot be divided into groups of 3", f->n_in);
    for (int i = 0; i < f->n_in; i += 3) {
        const ps_tensor *w = f->in[i], *low = f->in[i + 1], *src = f->in[i + 2];
        if (w->dtype_ != PS_BF16 || low->dtype_ != PS_U8 || src->dtype_ != PS_F32)
            return ps_rule_fail(f, "param is %s, low is %s and src is %s; they must be bf16, uint8 and fp32",
                                ps_dtype_name(w->dtype_), ps_dtype_name(low->dtype_), ps_dtype_name(src->dtype_));
        if (low->numel_ != 2 * w->numel_ || src->numel_ != w->numel_)
            return ps_rule_fail(f, "low has %lld elements and src has %lld, but param has %lld", (long long)low->numel_,
                                (long long)src->numel_, (long long)w->numel_);
        if (f->copied >> i & 3) return ps_rule_fail(f, "param or low of group %d is not contiguous", i / 3);
    }
    return 0;
}

int infer_remainder_join(ps_infer *f)
{
    const ps_tensor *w = f->in[0], *low = f->in[1];
    if (w->dtype_ != PS_BF16 || low->dtype_ != PS_U8 || low->numel_ != 2 * w->numel_)
        return ps_rule_fail(f, "param is %s [%lld] and low %s [%lld]; they must be bf16 [n] and uint8 [2 n]",
                            ps_dtype_name(w->dtype_), (long long)w->numel_, ps_dtype_name(low->dtype_),
                            (long long)low->numel_);
    f->out[0] = ps_meta_like(w);
    f->out[0].dtype = PS_F32;
    return 0;
}

/* The caller can pass the output tensor. In this case the kernel checks the tensor's dtype, because this function does
 * not know it. */
int infer_grad_store(ps_infer *f)
{
    const ps_attrs_grad_store *at = f->attrs;
    const ps_tensor *src = f->in[0];
    if (!ps_dtype_is_float(src->dtype_)) return ps_rule_fail(f, "src is not a float tensor");
    if (at->dtype < 0 || at->dtype >= PS_DTYPE_COUNT || !ps_dtype_is_float(at->dtype))
        return ps_rule_fail(f, "dtype = %d is not a float type", at->dtype);
    f->out[0] = ps_meta_like(src);
    f->out[0].dtype = at->dtype;
    f->out[1] = (ps_meta){ .dtype = PS_F64, .ndim = 1, .shape = { 1 } };
    return 0;
}
