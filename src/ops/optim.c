/* SPDX-License-Identifier: BSD-3-Clause
 * Optimizer steps, whose groups of tensors are checked here, and ops that store gradients. None of them has a gradient
 * rule. */
#include "base/error.h"
#include "tensor/optable.h"

int infer_adam(ps_infer *f);
int infer_sgd(ps_infer *f);
int infer_grad_store(ps_infer *f);

/* Groups of param, master, grad, and state tensors: equal numel; state and master in fp32 (fp64 for fp64 parameters),
 * or the master is the parameter itself. All except the gradient are written to, so writes to a copy of them would be
 * lost. */
static int check_groups(const ps_infer *f, int size)
{
    if (f->n_in % size) return ps_rule_fail(f, "%d tensors cannot be divided into groups of %d", f->n_in, size);
    for (int i = 0; i < f->n_in; i++) {
        const ps_tensor *p = f->in[i - i % size], *t = f->in[i];
        int state = p->dtype_ == PS_F64 ? PS_F64 : PS_F32;
        if (t->numel_ != p->numel_)
            return ps_rule_fail(f, "tensor %d of group %d differs in numel", i % size, i / size);
        bool fits = ps_dtype_is_float(t->dtype_);
        if (i % size == 1 || i % size > 2) fits = t->dtype_ == state || t == p;
        if (i % size != 2 && f->copied >> i & 1)
            return ps_rule_fail(f, "tensor %d of group %d is not contiguous", i % size, i / size);
        if (!fits)
            return ps_rule_fail(f, "tensor %d of group %d has type %s", i % size, i / size, ps_dtype_name(t->dtype_));
    }
    return 0;
}

int infer_adam(ps_infer *f)
{
    const ps_attrs_adam_ *at = f->attrs;
    if (!(at->bias1 > 0) || !(at->bias2 > 0))
        return ps_rule_fail(f, "bias corrections %g and %g must be positive", at->bias1, at->bias2);
    return check_groups(f, 5);
}

int infer_sgd(ps_infer *f) { return check_groups(f, 4); }

/* The kernel checks the dtype of an output that the caller passed, because this function does not know it. */
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
