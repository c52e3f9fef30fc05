/* SPDX-License-Identifier: BSD-3-Clause
 * Anomaly mode finds the first op that makes a NaN or an infinity, and makes that op fail. An op makes a NaN if its
 * output contains a NaN and none of its inputs contains a NaN. An op makes an infinity if its output contains an
 * infinity, and none of its inputs contains a NaN or an infinity. An op with an attribute that is not finite makes
 * neither, so values that the script wrote (a mask of -inf) do not count. In backward, the error names the node whose
 * gradient is being computed.
 *
 * The gradients of a scaled loss may overflow in backward. The loss scaler then skips the step. ps_anomaly_scaled(1) is
 * called before such a backward, and ps_anomaly_scaled(0) after it. Between these calls, the first infinity in backward
 * and all values that result from it are ignored. */
#include <math.h>
#include <string.h>
#include "base/error.h"
#include "tensor/tensor.h"

enum { BLOCK = 4096 };             /* number of elements of a non-contiguous tensor that are read at once */

typedef struct kinds { bool nan, inf; } kinds;

/* Returns which kinds of values n elements contain. The elements are read as unsigned integers. exp: mask of the
 * exponent bits. all: mask of all bits except the sign. */
#define LOOK(name, type)                                                                                              \
    static kinds name(const char *p, int64_t n, type exp, type all)                                                   \
    {                                                                                                                 \
        int special = 0, nan = 0, inf = 0;                                                                            \
        const type *v = (const type *)p;                                                                              \
        for (int64_t i = 0; i < n; i++) special |= (v[i] & exp) == exp;                                               \
        for (int64_t i = 0; special && i < n; i++) nan |= (v[i] & all) > exp, inf |= (v[i] & all) == exp;             \
        return (kinds){ nan != 0, inf != 0 };                                                                         \
    }
LOOK(look16, uint16_t)
LOOK(look32, uint32_t)
LOOK(look64, uint64_t)
#undef LOOK

static kinds look_contiguous(const char *p, int64_t n, int dtype)
{
    switch (dtype) {
    case PS_BF16: return look16(p, n, 0x7f80, 0x7fff);
    case PS_F16: return look16(p, n, 0x7c00, 0x7fff);
    case PS_F32: return look32(p, n, 0x7f800000u, 0x7fffffffu);
    default: return look64(p, n, UINT64_C(0x7ff0000000000000), UINT64_C(0x7fffffffffffffff));
    }
}

static int look_strided(const ps_tensor *t, kinds *out)
{
    double values[BLOCK];
    for (int64_t at = 0; at < t->numel_; at += BLOCK) {
        int64_t n = t->numel_ - at < BLOCK ? t->numel_ - at : BLOCK;
        PS_TRY(ps_tensor_read_f64(t, at, n, values));
        for (int64_t i = 0; i < n; i++) out->nan |= isnan(values[i]) != 0, out->inf |= isinf(values[i]) != 0;
    }
    return 0;
}

/* Adds the kinds of a tensor's values to *out. Tensors of integers, and tensors without values, add no kinds. */
static int look(ps_tensor *t, kinds *out)
{
    if (!t || !ps_dtype_is_float(t->dtype_) || t->numel_ == 0 || !ps_tensor_has_data(t)) return 0;
    ps_tensor *here = t;
    void *p = NULL;
    int rc = 0;
    if (!t->ctx->devices[t->device_]->is_host) {
        PS_TRY(ps_tensor_to_device(t, 0, &here));
    } else {
        ps_tensor_retain(here);
    }
    if (!ps_tensor_is_contiguous(here)) rc = look_strided(here, out);
    else if ((rc = ps_storage_pin(here->storage, here->device_, PS_READ, &p)) == 0) {
        kinds found = look_contiguous((char *)p + here->offset * ps_dtype_bytes(here->dtype_), here->numel_,
                                      here->dtype_);
        out->nan |= found.nan, out->inf |= found.inf;
        ps_storage_unpin(here->storage, here->device_);
    }
    ps_tensor_release(here);
    return rc;
}

static int look_at_all(ps_ctx *ctx, int n, ps_tensor *const *list, kinds *out)
{
    int was = ps_set_grad_enabled(ctx, 0), rc = 0;
    ctx->anomaly.busy = true;
    for (int i = 0; rc == 0 && i < n; i++) rc = look(list[i], out);
    ps_set_grad_enabled(ctx, was);
    ctx->anomaly.busy = false;
    return rc;
}

/* Returns true if an attribute is not finite. The function reads every 8 bytes of attrs as a double, even if they
 * contain an integer. The bits of an integer are those of a finite double unless the integer is above 9e18. */
static bool given_by_script(const ps_opinfo *row, const void *attrs)
{
    for (int at = 0; at + 8 <= row->attrs_nbytes; at += 8) {
        double d;
        memcpy(&d, (const char *)attrs + at, 8);
        if (isinf(d) || isnan(d)) return true;
    }
    return false;
}

static bool watches(const ps_ctx *ctx) { return ctx->anomaly.on && !ctx->anomaly.busy && !ctx->step->dry; }

int ps_anomaly_before(ps_ctx *ctx, const ps_opinfo *row, int n_in, ps_tensor *const *in, uint32_t given,
                      ps_tensor *const *out)
{
    kinds had = { false, false };
    if (!watches(ctx)) return 0;
    if (row->flags & PS_OPF_INPLACE) PS_TRY(look_at_all(ctx, n_in, in, &had));
    for (int i = 0; i < row->n_out; i++)
        if (given >> i & 1) PS_TRY(look_at_all(ctx, 1, &out[i], &had));
    ctx->anomaly.had_nan = had.nan, ctx->anomaly.had_inf = had.inf;
    return 0;
}

int ps_anomaly_after(ps_ctx *ctx, const ps_opinfo *row, int op, int n_in, ps_tensor *const *in, const void *attrs,
                     ps_tensor *const *out)
{
    kinds made = { false, false }, had = { ctx->anomaly.had_nan, ctx->anomaly.had_inf };   /* kinds of values before
                                                                                            * the op wrote */
    bool in_place = row->flags & PS_OPF_INPLACE;
    if (!watches(ctx) || n_in == 0) return 0;
    if (ctx->anomaly.pardons) {
        ctx->anomaly.pardons = false;
        return 0;
    }
    for (int i = 0; i < row->n_out; i++)
        if (out[i] && !(row->hidden_out >> i & 1)) PS_TRY(look_at_all(ctx, 1, &out[i], &made));
    if (in_place) PS_TRY(look_at_all(ctx, row->n_in < 0 ? n_in : 1, in, &made));
    if (!made.nan && !made.inf) return 0;
    if (!in_place) PS_TRY(look_at_all(ctx, n_in, in, &had));
    bool of_script = given_by_script(row, attrs), nan = made.nan && !had.nan && !of_script;
    if (!nan && (had.nan || had.inf || of_script)) return 0;
    if (ctx->anomaly.scaled && ctx->anomaly.in_backward && !nan) ctx->anomaly.overflowed = true;
    if (ctx->anomaly.overflowed) return 0;
    ctx->anomaly.found = (ps_anomaly_info){ .op = op, .nan = nan, .of = ctx->anomaly.in_backward ? ctx->anomaly.of : -1,
        .place = ctx->anomaly.in_backward ? ctx->anomaly.of_place : ctx->anomaly.place,
        .module = ctx->anomaly.in_backward ? ctx->anomaly.of_module : ps_module_now() };
    return ps_fail_sub(PS_ERANGE, PS_SUB_ANOMALY, "%s made %s; its inputs have none", row->name,
                       nan ? "a NaN" : "an infinity");
}

int ps_detect_anomaly(ps_ctx *ctx, int on)
{
    int was = ctx->anomaly.on;
    memset(&ctx->anomaly, 0, sizeof ctx->anomaly);
    ctx->anomaly.on = on != 0;
    ctx->anomaly.place = -1;
    return was;
}

void ps_anomaly_in_backward(ps_ctx *ctx, int32_t op, int64_t place, int32_t module)
{
    ctx->anomaly.in_backward = op >= 0;
    if (op >= 0) ctx->anomaly.of = op, ctx->anomaly.of_place = place, ctx->anomaly.of_module = module;
}

void ps_anomaly_at(ps_ctx *ctx, int64_t place) { ctx->anomaly.place = place; }

void ps_anomaly_scaled(ps_ctx *ctx, int on)
{
    ctx->anomaly.scaled = ctx->anomaly.pardons = on != 0;
    if (!on) ctx->anomaly.overflowed = false;
}

void ps_anomaly_get(ps_ctx *ctx, ps_anomaly_info *out) { *out = ctx->anomaly.found; }
