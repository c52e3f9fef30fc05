/* SPDX-License-Identifier: BSD-3-Clause
 * The cost of an op (ps_op_cost). Related ops of ops.def share a rule. Only the FLOPs of matrix products, convolutions
 * and attention are counted. A multiplication and its addition count as two FLOPs, no matter how the kernel computes
 * them. PatrickStar and Megatron-LM count in the same way to compute their speeds. The FLOPs of elementwise work are
 * not counted, because memory bandwidth limits its speed. */
#include "base/error.h"
#include "tensor/optable.h"

#define RULES(X)                                                                                                       \
    X(moves) X(view) X(writes) X(copy) X(matmul) X(linear) X(linear_grad) X(mlp) X(linear_gelu_backward) X(lm_loss)    \
    X(linear_packed)                                                                                                   \
    X(column_linear) X(row_linear) X(column_linear_grad) X(parallel_lm_loss)                                           \
    X(attention) X(attention_backward) X(attention_packed) X(attention_packed_backward) X(embedding)                   \
    X(embedding_backward) X(gather) X(adam) X(sgd) X(adafactor) X(update) X(muon)                                      \
    X(conv) X(conv_transpose) X(conv_weight)
#define DECLARE(name) void cost_##name(ps_cost *c);
RULES(DECLARE)

/* Returns the size in bytes of the elements of t. An element of an expanded dimension is counted once, because it
 * exists in memory only once. */
static int64_t nbytes(const ps_tensor *t)
{
    if (!t) return 0;
    int64_t n = ps_dtype_bytes(t->dtype_);
    for (int d = 0; d < t->ndim; d++) if (t->stride_[d] != 0 || t->shape_[d] == 0) n *= t->shape_[d];
    return n;
}

static int64_t size(const ps_tensor *t, int d) { return t->shape_[d < 0 ? t->ndim + d : d]; }

static void outputs(ps_cost *c) { for (int i = 0; i < c->n_out; i++) c->bytes += nbytes(c->out[i]); }

void cost_moves(ps_cost *c)
{
    for (int i = 0; i < c->n_in; i++) c->bytes += nbytes(c->in[i]);
    outputs(c);
}

void cost_view(ps_cost *c) { (void)c; }
void cost_writes(ps_cost *c) { c->bytes += nbytes(c->in[0]); }
void cost_copy(ps_cost *c) { c->bytes += nbytes(c->in[0]) + nbytes(c->in[1]); }

/* -- products ------------------------------------------------------------------------------------------------------ */
void cost_matmul(ps_cost *c)                      /* a [..., M, K], b [..., K, N] -> y [..., M, N] */
{
    cost_moves(c);
    if (c->out[0]) c->flops += 2 * c->out[0]->numel_ * size(c->in[0], -1);
}

void cost_linear(ps_cost *c)                      /* x [..., I] w [I, O]; with out_in, w is [O, I] */
{
    const ps_attrs_linear *a = c->attrs;
    cost_moves(c);
    c->flops += 2 * c->in[0]->numel_ * size(c->in[1], a->out_in ? 0 : 1);
}

void cost_linear_packed(ps_cost *c)               /* x [..., I] -> [..., O], or the reverse */
{
    cost_moves(c);
    c->flops += 2 * c->in[0]->numel_ * size(c->out[0], -1);
}

void cost_linear_grad(ps_cost *c)                 /* x [N, I], dy [N, O] -> dw, db */
{
    const ps_attrs_linear_grad *a = c->attrs;
    cost_moves(c);
    if (a->accumulate) c->bytes += nbytes(c->out[0]);
    if (c->out[0]) c->flops += 2 * c->in[0]->numel_ * size(c->in[1], -1);
}

void cost_mlp(ps_cost *c)                         /* x [..., I] -> [..., H] -> [..., O] */
{
    const ps_attrs_mlp *a = c->attrs;
    int64_t in = size(c->in[0], -1), hidden = size(c->in[1], a->out_in ? 0 : 1);
    int64_t out = size(c->in[3], a->out_in ? 0 : 1);
    cost_moves(c);
    if (in > 0) c->flops += 2 * (c->in[0]->numel_ / in) * hidden * (in + out);
}

void cost_linear_gelu_backward(ps_cost *c)        /* dy [..., O], w [H, O] or [O, H] -> dpre [..., H] */
{
    const ps_attrs_linear_gelu_backward *a = c->attrs;
    cost_moves(c);
    c->flops += 2 * c->in[0]->numel_ * size(c->in[1], a->out_in ? 1 : 0);
}

void cost_lm_loss(ps_cost *c)                     /* x [..., C], w [V, C]: the logits, and dx and dw if they are
                                                   * computed */
{
    cost_moves(c);
    int products = 1 + (c->out[1] != NULL) + (c->out[2] != NULL);
    c->flops += 2 * c->in[0]->numel_ * size(c->in[1], 0) * products;
}

/* Products with exchanges. In addition to the operands of the product, these ops move rows that other ranks send, and
 * the terms of sums over ranks. */
void cost_column_linear(ps_cost *c)               /* x [n, I] -> y [size * n, O] */
{
    const ps_attrs_column_linear *a = c->attrs;
    cost_moves(c);
    if (!c->out[1]) c->bytes += a->size * nbytes(c->in[0]);
    for (int i = 0; i < PS_MAX_COLUMNS; i++)
        if (c->in[1 + 2 * i]) c->flops += 2 * a->size * c->in[0]->numel_ * size(c->in[1 + 2 * i], a->out_in ? 0 : 1);
}

void cost_row_linear(ps_cost *c)                  /* x [size * n, I] -> y [n, O] */
{
    const ps_attrs_row_linear *a = c->attrs;
    cost_moves(c);
    c->bytes += a->size * nbytes(c->out[0]);
    c->flops += 2 * c->in[0]->numel_ * size(c->in[1], a->out_in ? 0 : 1);
}

void cost_column_linear_grad(ps_cost *c)          /* dy [size * n, O], w, x?, full? -> dx [n, I], dw, db */
{
    const ps_attrs_column_linear_grad *a = c->attrs;
    cost_moves(c);
    c->bytes += (a->want_w && !c->in[3] ? 2 : 1) * a->size * nbytes(c->out[0]);
    for (int i = 0; i < PS_MAX_COLUMNS; i++) {
        const ps_tensor *dy = c->in[i ? 2 + 2 * i : 0];
        if (dy) c->flops += ((a->want_w >> i & 1) ? 4 : 2) * a->size * c->out[0]->numel_ * size(dy, 1);
        if (a->accumulate >> i & 1) c->bytes += nbytes(c->out[1 + 2 * i]);
    }
}

void cost_parallel_lm_loss(ps_cost *c)            /* x [N or N / size, C], w [V, C]: like lm_loss, for all N rows */
{
    const ps_attrs_parallel_lm_loss *a = c->attrs;
    cost_moves(c);
    if (a->parted) c->bytes += a->size * nbytes(c->in[0]);
    int products = 1 + (c->out[1] != NULL) + (c->out[2] != NULL);
    c->flops += 2 * c->in[2]->numel_ * c->in[1]->numel_ * products;
}

/* -- convolutions: for each output, one multiplication per element of the kernel ----------------------------------- */
/* Returns the number of products that are summed for an output element. w is [O, C / groups, ...]. */
static int64_t of_kernel(const ps_tensor *w)
{
    return w->shape_[0] > 0 ? w->numel_ / w->shape_[0] : 0;
}

void cost_conv(ps_cost *c)                        /* x, w -> y */
{
    cost_moves(c);
    if (c->out[0]) c->flops += 2 * c->out[0]->numel_ * of_kernel(c->in[1]);
}

void cost_conv_transpose(ps_cost *c)              /* x, w -> y; x has the channels of the conv's output */
{
    cost_moves(c);
    c->flops += 2 * c->in[0]->numel_ * of_kernel(c->in[1]);
}

void cost_conv_weight(ps_cost *c)                 /* x, dy -> dw */
{
    const ps_attrs_conv_weight *a = c->attrs;
    cost_moves(c);
    if (a->accumulate) c->bytes += nbytes(c->out[0]);
    if (c->out[0]) c->flops += 2 * c->in[1]->numel_ * of_kernel(c->out[0]);
}

/* -- attention ----------------------------------------------------------------------------------------------------- */
/* Counts the pairs of a query and a key that the query sees, for the queries at positions 0 to n - 1. A query sees the
 * keys up to its own position. If `window` is not 0, the query sees only the last `window` of these keys. */
static int64_t pairs_up_to(int64_t n, int64_t window)
{
    int64_t w = window > 0 && window < n ? window : n;
    return w * (w + 1) / 2 + (n - w) * w;
}

/* Counts the pairs of a query and a key that the query sees, for one head. With a causal mask, query i is at position
 * keys - queries + i. */
static int64_t pairs(int64_t queries, int64_t keys, int causal, int64_t window)
{
    if (!causal) return queries * keys;
    return pairs_up_to(keys, window) - pairs_up_to(keys - queries, window);
}

/* Returns the number of FLOPs of attention for q [B, H, T, D] and k, v [B, G, S, D]. */
static int64_t attention_flops(const ps_tensor *q, const ps_tensor *k, const ps_tensor *v,
                               const ps_attrs_attention *a)
{
    int64_t each = 2 * (size(q, 3) + size(v, 3));
    return each * size(q, 0) * size(q, 1) * pairs(size(q, 2), size(k, 2), a->causal, a->window);
}

void cost_attention(ps_cost *c)
{
    cost_moves(c);
    c->flops += attention_flops(c->in[0], c->in[1], c->in[2], c->attrs);
}

/* Backward has five products, because it computes the scores again. Forward has two products. */
void cost_attention_backward(ps_cost *c)          /* dy q k v mask? y lse, with the attributes of attention */
{
    cost_moves(c);
    c->flops += attention_flops(c->in[1], c->in[2], c->in[3], c->attrs) / 2 * 5;
}

static int64_t packed_flops(const ps_tensor *qkv, const ps_attrs_attention_packed *a)   /* qkv [B, T, 3 * C] */
{
    return 4 * size(qkv, 0) * (size(qkv, 2) / 3) * pairs(size(qkv, 1), size(qkv, 1), a->causal, 0);
}

void cost_attention_packed(ps_cost *c)
{
    cost_moves(c);
    c->flops += packed_flops(c->in[0], c->attrs);
}

void cost_attention_packed_backward(ps_cost *c)   /* dy qkv mask? y lse, with the attributes of attention_packed */
{
    cost_moves(c);
    c->flops += packed_flops(c->in[1], c->attrs) / 2 * 5;
}

/* -- tables: only rows that are selected by an index are counted --------------------------------------------------- */
void cost_embedding(ps_cost *c) { c->bytes += nbytes(c->in[1]) + 2 * nbytes(c->out[0]); }
void cost_gather(ps_cost *c) { cost_embedding(c); }

void cost_embedding_backward(ps_cost *c)          /* index dy -> dw: reads and writes rows of dw; a new dw is first
                                                   * filled with zeros */
{
    const ps_attrs_embedding_backward *a = c->attrs;
    c->bytes += nbytes(c->in[0]) + 3 * nbytes(c->in[1]) + (a->accumulate ? 0 : nbytes(c->out[0]));
}

/* -- optimizers ---------------------------------------------------------------------------------------------------- */
/* The inputs are groups of `width` tensors: param, master (or the param again), grad, and then the states. In place of
 * a state that does not exist, the group contains the master again. */
static void update(ps_cost *c, int width)
{
    for (int i = 0; i + width <= c->n_in; i += width) {
        const ps_tensor *param = c->in[i], *master = c->in[i + 1];
        c->bytes += nbytes(param) * (master == param || master->dtype_ == PS_U8 ? 2 : 1) + nbytes(c->in[i + 2]);
        if (master != param) c->bytes += 2 * nbytes(master);
        for (int k = 3; k < width; k++) if (c->in[i + k] != master) c->bytes += 2 * nbytes(c->in[i + k]);
    }
}

void cost_adam(ps_cost *c) { update(c, 5); }
void cost_sgd(ps_cost *c) { update(c, 4); }
void cost_adafactor(ps_cost *c) { update(c, 5); }
void cost_update(ps_cost *c) { update(c, 7); }

void cost_muon(ps_cost *c)                        /* counts half of the FLOPs of symmetric products */
{
    const ps_attrs_muon_ *a = c->attrs;
    update(c, 4);
    for (int i = 0; i + 4 <= c->n_in; i += 4) {
        double rows = (double)c->in[i]->shape_[0], cols = (double)c->in[i]->shape_[1];
        double least = rows < cols ? rows : cols;
        c->flops += a->steps * (least * rows * cols + least * least * least + 2 * least * rows * cols);
    }
}

/* -- of any op ----------------------------------------------------------------------------------------------------- */
int ps_op_cost(int op, int n_in, ps_tensor *const *in, const void *attrs, int n_out, ps_tensor *const *out,
               ps_op_cost_info *cost)
{
    if (op < 0 || op >= PS_OP_COUNT) return ps_fail(PS_EINVAL, "there is no op %d", op);
    const ps_opinfo *row = ps_op(op);
    if (n_in < 1 || n_in > PS_MAX_IN || (row->n_in >= 0 && n_in != row->n_in) || n_out != row->n_out)
        return ps_fail(PS_EINVAL, "%s has %d inputs and %d outputs, but %d and %d were passed", row->name, row->n_in,
                       row->n_out, n_in, n_out);
    for (int i = 0; i < n_in; i++)
        if (!in[i] && !(row->optional_in >> i & 1))
            return ps_fail(PS_EINVAL, "%s: input %d is missing", row->name, i);
    ps_cost c = { .n_in = n_in, .n_out = n_out, .in = in, .out = out, .attrs = attrs };
    row->cost(&c);
    *cost = (ps_op_cost_info){ .flops = c.flops, .bytes = c.bytes };
    return 0;
}
