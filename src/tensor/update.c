/* SPDX-License-Identifier: BSD-3-Clause
 * Sets the attributes of an optimizer update that change from one update to the next. */
#include "base/error.h"
#include "tensor/tensor.h"

int ps_update_attrs(int op, void *attrs, int64_t t, double grad_scale)
{
    if (op == PS_OP_adam_) {
        ps_attrs_adam_ *a = attrs;
        a->grad_scale = grad_scale;
        a->bias1 = 1 - __builtin_pow(a->beta1, (double)t);
        a->bias2 = 1 - __builtin_pow(a->beta2, (double)t);
    } else if (op == PS_OP_sgd_) {
        ps_attrs_sgd_ *a = attrs;
        a->grad_scale = grad_scale;
        a->first = t == 1;
    } else if (op == PS_OP_lion_ || op == PS_OP_lamb_ || op == PS_OP_muon_ || op == PS_OP_adafactor_ ||
               op == PS_OP_adam8bit_ || op == PS_OP_lion8bit_ || op == PS_OP_adam_bf16_ || op == PS_OP_rmsprop_ ||
               op == PS_OP_adam_schedule_free_) {
        struct { double grad_scale; int64_t t; } *head = attrs;           /* the attributes of every such op begin with
                                                                           * these two */
        head->grad_scale = grad_scale;
        head->t = t;
    } else {
        return ps_fail(PS_EINVAL, "op %d is not an optimizer's update", op);
    }
    return 0;
}
