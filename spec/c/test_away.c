/* SPDX-License-Identifier: BSD-3-Clause
 * Activations that wait on the host return by micro-batch and virtual stage: the backward of one never fetches those of
 * another, in any order of the step's table. */
#include "check.h"
#include "tensor/tensor.h"

enum { NUMEL = 64 << 10, DEPTH = 6, MICROS = 3, NBYTES = NUMEL * 4 };

static ps_ctx *ctx;
static ps_step *step;
static int sim;
static ps_tensor *leaf, *loss[MICROS];

static ps_tensor *run(int op, const void *attrs, int nbytes, int n, ps_tensor *const *in)
{
    ps_tensor *out[PS_MAX_OUT] = { NULL };
    OK(ps_apply(ctx, op, n, in, attrs, nbytes, out));
    return out[0];
}

static int64_t used(void)
{
    ps_memory_info info;
    OK(ps_memory_get(ctx, sim, &info));
    return info.used;
}

/* exp keeps its output, so DEPTH tensors are evicted, one at the end of each scope. */
static void forward(int micro)
{
    static const int32_t none;
    ps_attrs_affine shrink = { .alpha = 0.01 * (micro + 1), .beta = 0 };
    ps_attrs_sum all = { 0 };
    ps_tensor *t = run(PS_OP_affine, &shrink, sizeof shrink, 1, &leaf);
    for (int i = 0; i < DEPTH; i++) {
        int64_t scope;
        OK(ps_scope_begin(ctx, &scope));
        ps_tensor *y = run(PS_OP_exp, &none, sizeof none, 1, &t), *z = run(PS_OP_affine, &shrink, sizeof shrink, 1, &y);
        ps_tensor_release(y);
        OK(ps_scope_end(ctx, scope, 1, &z));
        ps_tensor_drop(t);
        ps_tensor_release(t);
        t = z;
    }
    loss[micro] = run(PS_OP_sum, &all, sizeof all, 1, &t);
    ps_tensor_release(t);
}

/* Computes the gradient of the whole step, and the bytes on the device after each action. */
static void perform(int n, const ps_action *table, int64_t *held, float *gradient)
{
    ps_step_config c = { .actions = table, .n_actions = n, .trace = PS_TRACE_NONE };
    int32_t trace;
    int64_t segment;
    OK(ps_step_begin(step, &c));
    for (int i = 0; i < n; i++) {
        const ps_action *a = &table[i];
        OK(ps_step_next(step, a->kind, &(ps_action_how){ .weight = 1 }));
        if (a->kind == PS_ACT_FORWARD) forward(a->micro);
        if (a->kind == PS_ACT_BACKWARD || a->kind == PS_ACT_INPUT) {
            OK(ps_backward_begin_n(ctx, 1, &loss[a->micro], NULL, &segment));
            ps_tensor_release(loss[a->micro]);
        }
        if (a->kind == PS_ACT_WEIGHT) OK(ps_backward_weights(ctx, NULL));
        OK(ps_step_done(step));
        held[i] = used();
    }
    OK(ps_step_end(step, &trace));
    OK(ps_tensor_read(ps_tensor_get_grad(leaf), gradient, NBYTES));
    OK(ps_tensor_set_grad(leaf, NULL));
}

#define F(m) { PS_ACT_FORWARD, 0, m }
#define B(m) { PS_ACT_BACKWARD, 0, m }
#define END { PS_ACT_UPDATE, 0, 0 }

static void test_order(void)
{
    static const ps_action turns[] = { F(0), B(0), F(1), B(1), F(2), B(2), END },
        ahead[] = { F(0), F(1), F(2), B(0), B(1), B(2), END };
    enum { COUNT = sizeof turns / sizeof *turns };
    static float one[NUMEL], two[NUMEL], there[NUMEL];
    int64_t held[COUNT], stay[COUNT];
    perform(COUNT, ahead, stay, there);
    CHECK(ps_set_offload(ctx, 1) == 0);
    perform(COUNT, turns, held, one);
    perform(COUNT, ahead, held, two);
    CHECK(!memcmp(one, two, sizeof one) && !memcmp(one, there, sizeof one));
    /* All tensors of a forward have been evicted except the last, whose copy is in flight until another tensor is
     * evicted. */
    CHECK(stay[2] - stay[0] >= 2 * DEPTH * NBYTES);
    CHECK(held[2] - held[0] < NBYTES / 2 && held[0] < 3 * NBYTES);
    /* The tensors that were fetched for a micro-batch are freed after its backward, and no tensors were fetched for
     * the other micro-batches. */
    CHECK(held[3] - held[2] < 3 * NBYTES / 2);            /* the gradient of the leaf */
    CHECK(held[4] <= held[3]);
    ps_set_offload(ctx, 0);
}

int main(void)
{
    static const int64_t numel = NUMEL;
    ps_chunk_config config = { .prefetch = 1 };
    ps_attrs_fill_ value = { .value = 0.5 };
    ps_tensor *out[PS_MAX_OUT] = { NULL };
    OK(ps_ctx_new(&ctx));
    OK(ps_device_find(ctx, "sim", &sim));
    OK(ps_policy_find("plan", &config.policy));
    OK(ps_step_new(ctx, &step));
    OK(ps_engine_open(ctx, step, &config, NULL));
    OK(ps_tensor_new(ctx, PS_F32, sim, 1, &numel, &leaf));
    OK(ps_apply(ctx, PS_OP_fill_, 1, &leaf, &value, sizeof value, out));
    ps_tensor_release(out[0]);
    OK(ps_tensor_keep(leaf));
    OK(ps_tensor_require_grad(leaf, 1));
    test_order();
    ps_tensor_release(leaf);
    ps_engine_close(ctx);
    ps_step_free(step);
    CHECK(used() == 0);
    ps_ctx_free(ctx);
    return end_checks();
}
